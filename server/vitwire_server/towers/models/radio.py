"""C-RADIO (NVIDIA), served alone."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.configs import Config, dtype_of
from vitwire_server.towers.family import Family, Module, Parts, Pooler, stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily
from vitwire_server.towers.models.internvl import unfused
from vitwire_server.towers.shared.pooling import MEAN

RADIO_NAMES = (
    (r"^model\.patch_generator\.video_embedder\.", "embeddings.video_patch_projection."),
    (r"^model\.patch_generator\.embedder\.", "embeddings.patch_projection."),
    (r"^model\.patch_generator\.pos_embed$", "embeddings.position_embedding"),
    (r"^model\.patch_generator\.cls_token\.token$", "embeddings.cls_register_token"),
    (r"^model\.blocks\.", "encoder.layer."),
    (r"\.attn\.proj\.", ".attention.o_proj."),
)
"""NVIDIA's names within `radio_model.`, and transformers'."""


_NAMED = re.compile(r"vit_(?P<size>[a-z0-9]+(_v2)?)_patch(?P<patch>\d+)(_v2)?_224")
_SIZES = {
    "tiny": (192, 12, 3, 4 * 192),
    "small": (384, 12, 6, 4 * 384),
    "base": (768, 12, 12, 4 * 768),
    "large": (1024, 24, 16, 4 * 1024),
    "so400m": (1152, 27, 16, 4304),
    "so400m_v2": (1152, 27, 16, 4320),
    "huge": (1280, 32, 16, 4 * 1280),
    "giant": (1536, 40, 24, 4 * 1536),
}
"""Width, layers, heads and width of the MLP, by names in NVIDIA's code."""
_USUAL = {"weight_init": "skip"}
"""Options of a model that do not change its rows."""


class Radio(PlainEncoder):
    """Positions cropped out of a resampled square, computed once for the processor's tile.

    The tower normalises pixels itself: its processor only scales them.
    """

    @torch.no_grad()
    def __init__(self, family: PlainFamily, parts: Parts, config: Config) -> None:
        super().__init__(family, parts, config)
        embeddings = self._tower.embeddings
        grid = (self.tile.height // self.patch, self.tile.width // self.patch)
        table = embeddings.position_embedding
        resampled = embeddings._interpolate_position_embedding(grid, table.dtype)  # noqa: SLF001 - the stock function
        embeddings.position_embedding = nn.Parameter(resampled.clone(), requires_grad=False)
        embeddings._interpolate_position_embedding = MethodType(_resampled_before, embeddings)  # noqa: SLF001 - as above


def _resampled_before(embeddings: Any, *_: object) -> Tensor:  # noqa: ANN401 - a stock module
    """In place of the stock function, which would resample in every forward."""
    positions: Tensor = embeddings.position_embedding
    return positions


class Summary:
    """The class tokens that the model's summary consists of, side by side."""

    def __init__(self, parts: Parts, config: Config) -> None:
        del config
        self._tower: Any = parts["tower"]
        self.width: int = len(self._tower.summary_idxs) * self._tower.config.hidden_size

    def __call__(self, leading: Tensor, patches: Tensor) -> Tensor:
        """See TilePool."""
        del patches
        return leading.index_select(1, self._tower.summary_idxs).flatten(1)


def _leading(config: Config) -> int:
    """Class and register tokens."""
    return int(config.num_cls_tokens + config.num_registers)


@dataclass(frozen=True, kw_only=True)
class RadioFamily(PlainFamily):
    """C-RADIO, whose versions 2 and 3 were published with the arguments of NVIDIA's code as configuration."""

    def stock_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See PlainFamily. Raises KeyError, TypeError or ValueError over arguments that are not served."""
        return super().stock_config(folder, settings) if settings.get("model_type") else _of_arguments(settings)


def _of_arguments(settings: Mapping[str, Any]) -> Config:
    """The configuration of transformers' class that says what NVIDIA's arguments say."""
    from transformers.models.radio.configuration_radio import RadioConfig  # noqa: PLC0415 - since transformers 5.23

    args = settings["args"]
    named = _NAMED.fullmatch(str(args["model"]))
    if not named or named["size"] not in _SIZES:
        known = ", ".join(_SIZES)
        raise ValueError(f"args.model is {args['model']!r}, but must be vit_SIZE_patchN_224, of the sizes {known}")
    steps = {f"args.{key}": args.get(key) for key in ("model_kwargs", "model_norm")}
    steps |= {key: settings.get(key) for key in ("feature_normalizer_config", "vitdet_window_size")}
    for field, value in steps.items():
        if value and value != _USUAL:
            raise ValueError(f"{field} is {value!r}, but must be empty")
    width, layers, heads, inner = _SIZES[named["size"]]
    teachers, multiple = args["teachers"], args.get("register_multiple") or 0
    tokens = len({teacher["name"] for teacher in teachers}) if args.get("cls_token_per_teacher") else 1
    patch = int(named["patch"])
    return RadioConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        mlp_ratio=inner / width,
        patch_size=patch,
        max_img_size=round(args["cpe_max_size"] / patch) * patch,
        num_cls_tokens=tokens,
        num_registers=args.get("cpe_num_registers") or (multiple - tokens % multiple if multiple else 0),
        summary_idxs=[at for at, teacher in enumerate(teachers) if teacher.get("use_summary", True)],
        dtype=dtype_of(settings),
    )


_RADIO = RadioFamily(
    model_type="radio",
    original="RADIOModel",
    title="C-RADIO 2 to 4",
    architecture="32 x 1280, patch 16",
    tower=Module(
        source="radio.modeling_radio:RadioModel",
        prefixes=stripped("radio_model.", ""),
        renames=(*RADIO_NAMES, (r"\.ls(\d)\.(gamma|grandma)$", r".layer_scale\1.lambda1")),
        ignored=("adaptors.", "inter_feature_normalizer.", "model.reg_token"),
        convert=unfused,
        config="",
    ),
    encoder=Radio,
    layers="encoder.layer",
    leading=_leading,
    resizes=True,
    poolers=(Pooler(pooling=Pooling.CLS, make=Summary), MEAN),
    processor="CLIP",
    transformers="5.23.0",
    special="class and register tokens; the tower normalises pixels itself; rows of the patches; cls: its summary",
)

ROWS: tuple[Family, ...] = (_RADIO,)
