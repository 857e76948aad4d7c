"""Tiny whole VLMs in hub layout: random weights of a fixed seed, for demos and tests."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from vitwire_server.towers import tiny_navit, tiny_packed, tiny_tiles

_WRITERS: Mapping[str, Callable[[str, Path, int], None]] = MappingProxyType(
    {
        **dict.fromkeys(tiny_packed.PACKED, tiny_packed.write),
        **dict.fromkeys(tiny_tiles.TILES, tiny_tiles.write),
        **dict.fromkeys(tiny_navit.NAVIT, tiny_navit.write),
    }
)


def write_demo_checkpoint(model_type: str, out: Path, *, seed: int = 0) -> None:
    """Write a tiny VLM of this type: sharded safetensors in bfloat16, index, processor settings.

    It has the layout that its authors publish. The same arguments write the same bytes. Raises ValueError if
    there is no tiny model of this type.
    """
    if model_type not in _WRITERS:
        raise ValueError(f"no demo checkpoint of model_type {model_type!r}; there are: {', '.join(_WRITERS)}")
    _WRITERS[model_type](model_type, out, seed)
