"""C-RADIO (NVIDIA), served alone."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.configs import Config
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


_RADIO = PlainFamily(
    model_type="radio",
    title="C-RADIO",
    architecture="32 x 1280, patch 16",
    tower=Module(
        source="radio.modeling_radio:RadioModel",
        prefixes=stripped("radio_model.", ""),
        renames=RADIO_NAMES,
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
