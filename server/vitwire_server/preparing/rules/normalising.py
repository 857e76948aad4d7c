"""How bytes become the numbers that a tower takes."""

from vitwire_server.core.models import Preprocessing


def affine(settings: Preprocessing) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Scale and offset of each channel: `x * rescale / std - mean / std`."""
    scale = tuple(settings.rescale_factor / std for std in settings.std)
    offset = tuple(-mean / std for mean, std in zip(settings.mean, settings.std, strict=True))
    return scale, offset
