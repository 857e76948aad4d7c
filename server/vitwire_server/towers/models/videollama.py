"""VideoLLaMA 3 (Alibaba DAMO Academy)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Geometry
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, in_model
from vitwire_server.towers.layouts.heads import Head, Output, of_clips
from vitwire_server.towers.layouts.packed import PackedFamily
from vitwire_server.towers.metadata import Kind, Sources
from vitwire_server.towers.processors.settings import ProcessorFiles

_OF_CLIPS = 2
"""Root of the patches of a clip's token; an image's token is one patch."""


class SquareMeans(Head):
    """Tokens of clips are means of squares of patches, those of images single patches; then the projector.

    The stock tower interpolates at the centre of each square, which is the mean of its four patches.
    """

    pools_clips = True

    def sizes(self, bare: Geometry) -> Geometry:
        return of_clips(bare, clip_merge=_OF_CLIPS)

    def inputs(self) -> dict[str, Kind]:
        return {"squares": Sources(_OF_CLIPS**2)}

    def compute(self, grid: Grid) -> dict[str, Tensor]:
        """An image's patch is all four of its own square."""
        patches = torch.arange(grid.patches)
        return {"squares": patches.view(-1, _OF_CLIPS**2) if grid.t > 1 else patches[:, None].repeat(1, _OF_CLIPS**2)}

    def keywords(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tower asks for merge sizes, which only the step reads that is left out."""
        return {"merge_sizes": tensors["squares"][:0, 0]}

    def rows(self, output: Output, tensors: Mapping[str, Tensor]) -> Tensor:
        patches = output.last_hidden_state
        means = patches[tensors["squares"]].float().mean(dim=1).to(patches.dtype)
        rows: Tensor = self.projector(means)
        return rows


@dataclass(frozen=True, kw_only=True)
class VideoLlama3Family(PackedFamily):
    """Checkpoints whose processors merge as the published ones do."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See Family. Raises ValueError over processors that merge other squares of patches."""
        files = ProcessorFiles.read(folder)
        for kind, own, merge in (("images", files.image, 1), ("clips", files.own_video, _OF_CLIPS)):
            if (found := own.get("merge_size", merge)) != merge:
                raise ValueError(f"merge_size of {kind} is {found!r}, but must be {merge}")
        return super().read_config(folder, settings)


_VIDEO_LLAMA_3 = VideoLlama3Family(
    model_type="video_llama_3",
    title="VideoLLaMA 3",
    tower=Module(source="vitwire_server.towers.models.videollama_tower:PatchTower", prefixes=in_model("vision_model.")),
    beside={
        "projector": Module(
            source="video_llama_3.modeling_video_llama_3:VideoLlama3Projector",
            prefixes=in_model("projector."),
            config="",
        )
    },
    head=SquareMeans,
    width="text_config.hidden_size",
    layers="encoder.layers",
    videos=Accepts.PIXELS,
    architecture="27 x 1152, patch 14",
    attention="per frame",
    special="a token of an image is one patch, a token of a clip four; clips have two frames or more; "
    "the LLM drops tokens by `video_compression_mask`",
)

ROWS: tuple[Family, ...] = (_VIDEO_LLAMA_3,)
