"""The demo models by `model_type`, and the checkpoint of one: random weights of a fixed seed."""

import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from vitwire_server.demo.demo_model import DemoModel, write
from vitwire_server.demo.models.assembled import ASSEMBLED
from vitwire_server.demo.models.deepseek import DEEPSEEK
from vitwire_server.demo.models.gemma4 import GEMMA4
from vitwire_server.demo.models.glm import GLM
from vitwire_server.demo.models.granite_docling import GRANITE_DOCLING
from vitwire_server.demo.models.idefics import IDEFICS
from vitwire_server.demo.models.internvl import INTERNVL
from vitwire_server.demo.models.lfm2 import LFM2
from vitwire_server.demo.models.llava import LLAVA
from vitwire_server.demo.models.packed import PACKED
from vitwire_server.demo.models.pixtral import PIXTRAL
from vitwire_server.demo.models.plain import PLAIN
from vitwire_server.demo.models.published import PUBLISHED
from vitwire_server.demo.models.qwen import QWEN
from vitwire_server.demo.models.raster import RASTER
from vitwire_server.demo.models.readers import READERS
from vitwire_server.demo.models.single_tiles import SINGLE_TILES
from vitwire_server.demo.models.tiles import TILES

DEMO_MODELS: Mapping[str, DemoModel] = MappingProxyType(
    {
        **ASSEMBLED,
        **DEEPSEEK,
        **GEMMA4,
        **GLM,
        **GRANITE_DOCLING,
        **IDEFICS,
        **INTERNVL,
        **LFM2,
        **LLAVA,
        **PACKED,
        **PIXTRAL,
        **PLAIN,
        **PUBLISHED,
        **QWEN,
        **RASTER,
        **READERS,
        **SINGLE_TILES,
        **TILES,
    }
)


def write_demo_checkpoint(model_type: str, out: Path, *, seed: int = 0) -> None:
    """Write a tiny VLM of this type: sharded safetensors in bfloat16, index, processor settings.

    It has the layout that its authors publish. The same arguments write the same bytes. Files have the mode that
    the umask gives. Raises ValueError if there is no tiny model of this type.
    """
    if model_type not in DEMO_MODELS:
        raise ValueError(f"no demo checkpoint of model_type {model_type!r}; there are: {', '.join(DEMO_MODELS)}")
    write(model_type, DEMO_MODELS[model_type], out, seed)
    mode = (out / "config.json").stat().st_mode
    for path in out.glob("*.safetensors"):  # which safetensors makes readable by their owner alone
        path.chmod(stat.S_IMODE(mode))
