"""Places of images and clips in a request. Pure functions."""

from typing import NamedTuple

from vitwire import InvalidItem, ProcessorOptions
from vitwire.items import Modality
from vitwire_gateway.api_errors import invalid
from vitwire_gateway.bodies import Json

Path = tuple[str | int, ...]
"""Keys and indices that lead to a value in a request."""

_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields of a request by which engines prepare its images and clips."""
_CLIP_OPTIONS = (*_OPTIONS, "video_config", "use_audio_in_video")
_OF_ENCODER = {"min_pixels", "max_pixels", "size"}
"""Options that `ProcessorOptions.of` takes."""
_NOT_OF_IMAGES = {"audio", "audio_kwargs", "fps", "num_frames", "use_audio_in_video", "video", "videos_kwargs"}


class ImageRef(NamedTuple):
    """An image or clip in a request."""

    path: Path
    """To the field of its part that has it."""
    url: str

    @property
    def param(self) -> str:
        """Its name in errors."""
        return param_of(self.path)

    @property
    def modality(self) -> Modality:
        """A clip's field is `video_url`."""
        return "video" if self.path[-1] == "video_url" else "image"


def param_of(path: Path) -> str:
    """The name of a field in errors, such as `messages[1].content[2].image_url`."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path)[1:]


def check_options(request: Json, source: object, ref: ImageRef) -> None:
    """Raises ApiError if an image or clip has options that would have no effect on its embedding."""
    is_clip = ref.modality == "video"
    others, known = (set[str](), ("url",)) if is_clip else (_NOT_OF_IMAGES | _OF_ENCODER, ("url", "detail"))
    options = {name: request.get(name) for name in (_CLIP_OPTIONS if is_clip else _OPTIONS)}
    given = [
        name for name, value in options.items() if value and not (isinstance(value, dict) and value.keys() <= others)
    ]
    if isinstance(source, dict):
        given += [f"{ref.param}.{name[:32]}" for name, value in source.items() if name not in known and value]
    if given:
        what = "clips" if is_clip else "images"
        text = f"it has no effect on {what} that the encoder prepares, by the rule of its model; leave it out"
        raise invalid(text, given[0], "unsupported_option")


def options_of(request: Json) -> list[tuple[str, int]]:
    """The options of all images of a request, which the encoder gets. Raises ApiError."""
    given = request.get("mm_processor_kwargs") or {}
    try:
        found = ProcessorOptions.of({name: value for name, value in given.items() if name in _OF_ENCODER})
        return list(found.given().items()) if found else []
    except InvalidItem as error:
        ((field, reason),) = error.violations
        raise invalid(reason, field.replace("options", "mm_processor_kwargs", 1), "invalid_option") from error


def url_of(source: object, path: Path) -> str:
    """The URL of an image or clip, given as a string or as an object with `url`. Raises ApiError."""
    url = source.get("url") if isinstance(source, dict) else source
    if isinstance(url, str) and url:
        return url
    kind = "video" if path[-1] == "video_url" else "image"
    code = "invalid_clip_url" if kind == "video" else "invalid_image_url"
    if isinstance(source, dict):
        raise invalid("expected a string in the field url", f"{param_of(path)}.url", code)
    got = "nothing" if source is None else type(source).__name__
    raise invalid(f'expected {{"url": "data:{kind}/..."}}, got {got}', param_of(path), code)
