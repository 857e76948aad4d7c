"""VideoLLaMA 3 (Alibaba DAMO Academy), in transformers' layout and in the authors' own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Geometry
from vitwire_server.towers.configs import Config, dtype_of, new_config, require
from vitwire_server.towers.family import Accepts, Parts, in_model, of_transformers
from vitwire_server.towers.files import CheckpointError, optional_json
from vitwire_server.towers.layouts.heads import Head, Output, of_clips
from vitwire_server.towers.layouts.packed import PackedFamily
from vitwire_server.towers.metadata import Kind, Sources
from vitwire_server.towers.processors.settings import ProcessorFiles
from vitwire_server.towers.shared.parts import projector, stock, variant

_OF_CLIPS = 2
"""Root of the patches of a clip's token; an image's token is one patch."""
_NOT_OF_TOWERS = ("model_type", "auto_map", "architectures", "transformers_version", "torch_dtype")
"""Fields of the authors' configuration of the tower that say nothing about it."""


class SquareMeans(Head):
    """Tokens of clips are means of squares of patches, those of images single patches; then the projector.

    The stock tower interpolates at the centre of each square, which is the mean of its four patches.
    """

    pools_clips = True

    def __init__(self, parts: Parts, bare: Geometry) -> None:
        super().__init__(parts, bare)
        # The stock tower merges item by item, by numbers that it reads on the host.
        parts["tower"].pixel_unshuffle = lambda states, *_: states

    def sizes(self, bare: Geometry) -> Geometry:
        return of_clips(bare, clip_merge=_OF_CLIPS)

    def inputs(self) -> dict[str, Kind]:
        return {"squares": Sources(_OF_CLIPS**2)}

    def compute(self, grid: Grid) -> dict[str, Tensor]:
        """An image's patch is all four of its square."""
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


def _videollama_config(folder: Path, settings: Mapping[str, Any]) -> Config:
    """Raises CheckpointError over processors that merge other squares of patches than the published ones do."""
    files = ProcessorFiles.read(folder)
    _check_merged(files.image_path, "merge_size", files.image, 1)
    _check_merged(files.video_path, "merge_size", files.own_video, _OF_CLIPS)
    return of_transformers(folder, settings)


def _original_videollama_config(folder: Path, settings: Mapping[str, Any]) -> Config:
    """From the authors' config.json, which has the fields of the language model at its top."""
    path = folder / "processor_config.json"
    processor = optional_json(path)
    _check_merged(path, "image_merge_size", processor, 1)
    _check_merged(path, "video_merge_size", processor, _OF_CLIPS)
    require("mm_projector_type", settings.get("mm_projector_type"), "mlp2x_gelu")
    vision = settings["vision_encoder_config"]
    return new_config(
        "video_llama_3",
        vision_config={key: value for key, value in vision.items() if key not in _NOT_OF_TOWERS},
        text_config={"model_type": "qwen2", "hidden_size": settings["hidden_size"]},
        dtype=dtype_of(settings),
    )


def _check_merged(path: Path, key: str, settings: Mapping[str, Any], merge: int) -> None:
    found = settings.get(key)
    if found not in (None, merge):
        raise CheckpointError(f"{path}: {key} is {found!r}, but must be {merge}")


_VIDEO_LLAMA_3 = PackedFamily(
    "video_llama_3",
    "VideoLLaMA 3",
    configuration=_videollama_config,
    tower=stock("video_llama_3.VideoLlama3VisionModel", in_model("vision_model.")),
    beside=projector("video_llama_3.VideoLlama3Projector", in_model("projector.")),
    head=SquareMeans,
    layers="encoder.layers",
    videos=Accepts.PIXELS,
)

ROWS = (
    _VIDEO_LLAMA_3,
    variant(
        _VIDEO_LLAMA_3,
        "videollama3_qwen2",
        _VIDEO_LLAMA_3.title,
        configuration=_original_videollama_config,
        tower=stock("video_llama_3.VideoLlama3VisionModel", in_model("vision_encoder.")),
        beside=projector("video_llama_3.VideoLlama3Projector", in_model("mm_projector.")),
        images=Accepts.PIXELS,
    ),
)
