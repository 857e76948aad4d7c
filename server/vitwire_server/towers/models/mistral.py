"""Pixtral and Mistral 3, and models of other makers with their tower."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.towers.configs import Config, last_layer, one_of
from vitwire_server.towers.family import Weights, in_model, of_transformers
from vitwire_server.towers.layouts.patches import neighbours
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower, places
from vitwire_server.towers.metadata import Kind, Rows, Sources
from vitwire_server.towers.processors.settings import CLIP, bounded_above, images, square
from vitwire_server.towers.shared.fused import rotary_halves
from vitwire_server.towers.shared.parts import projector, stock, variant

_ORIGINAL_NAMES = (
    (r"\.attention\.w([vo])\.", r".attention.\1_proj."),
    (r"\.feed_forward\.w1\.", ".feed_forward.gate_proj."),
    (r"\.feed_forward\.w2\.", ".feed_forward.down_proj."),
    (r"\.feed_forward\.w3\.", ".feed_forward.up_proj."),
)
"""Names in Mistral's checkpoints, and transformers'."""
_PAIRED = re.compile(r"\.attention\.w([qk])\.")


def _mistral_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    longest = square(image)
    factor = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    if longest < factor:
        raise ValueError(f"size {longest} is less than one token of {factor} pixels")
    return bounded_above(image, longest**2, factor, Resizing.LONGEST_SIDE, CLIP)


def _mistral_config(folder: Path, settings: Mapping[str, Any]) -> Config:
    config = of_transformers(folder, settings)
    last_layer(config)
    return config


def _from_original(weights: Weights, config: Config) -> Weights:
    """Rotary pairs, which are neighbours in Mistral's checkpoints, as halves of a head."""
    return {
        _PAIRED.sub(r".attention.\1_proj.", name): rotary_halves(own, config.num_attention_heads)
        if _PAIRED.search(name)
        else own
        for name, own in weights.items()
    }


class PixtralTower(RasterTower):
    """Rotary positions by row and column; in Mistral 3, a learned merger of neighbours before the projector."""

    def _inputs(self) -> dict[str, Kind]:
        kinds: dict[str, Kind] = {"positions": Rows((2,), torch.int64)}
        if self.geometry.merge > 1:
            kinds["neighbours"] = Sources(self.geometry.merge**2)
        return kinds

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        computed = {**super()._compute(grid), "positions": places(grid)}
        if self.geometry.merge > 1:
            computed["neighbours"] = neighbours(grid, self.geometry.merge)
        return computed

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        model, side = self.model, self.geometry.patch
        patches = model.patch_conv(pixels.view(len(pixels), -1, side, side)).flatten(1)
        states = model.ln_pre(patches.unsqueeze(0))
        rotary = model.patch_positional_embedding(states, tensors["positions"])
        states = model.transformer(
            states, attention_mask=None, position_embeddings=rotary, **attended
        ).last_hidden_state
        if self.geometry.merge == 1:
            return self._projector(states[0])  # type: ignore[no-any-return]
        projector = self._projector
        beside = projector.norm(states[0])[tensors["neighbours"]].transpose(1, 2).flatten(1)
        hidden = projector.act(projector.linear_1(projector.patch_merger.merging_layer(beside)))
        return projector.linear_2(hidden)  # type: ignore[no-any-return]


_PIXTRAL = RasterFamily(
    "llava",
    "Pixtral",
    tower_type="pixtral",
    configuration=_mistral_config,
    tower=stock("pixtral.PixtralVisionModel", in_model("vision_tower.", "vision_encoder.")),
    beside=projector("llava.LlavaMultiModalProjector", served=(one_of("vision_feature_select_strategy", "full"),)),
    forward=PixtralTower,
    layers="transformer.layers",
    processor=images(_mistral_settings),
)

_MISTRAL3 = variant(
    _PIXTRAL,
    "mistral3",
    "Mistral Small 3.1",
    tower_type="",
    beside=projector("mistral3.Mistral3MultiModalProjector", in_model("multi_modal_projector.", "vision_projection.")),
    merge="spatial_merge_size",
)

ROWS = (
    _PIXTRAL,
    _MISTRAL3,
    variant(
        _MISTRAL3,
        "mistral_large4",
        "Mistral Large 4",
        tower=replace(_PIXTRAL.tower, renames=_ORIGINAL_NAMES, convert=_from_original),
        beside=projector(
            "mistral_large4.MistralLarge4MultiModalProjector",
            {
                **in_model("multi_modal_projector."),
                "pre_mm_projector_norm.": "norm.",
                "patch_merger.": "patch_merger.",
                "vision_language_adapter.w_in.": "linear_1.",
                "vision_language_adapter.w_out.": "linear_2.",
            },
        ),
        transformers="5.23.0",
    ),
    # Images of whole tokens, as vLLM prepares them; LightOnOCR's processor also leaves half a token.
    variant(
        _MISTRAL3,
        "lighton_ocr",
        "LightOnOCR",
        beside=projector(
            "lighton_ocr.LightOnOcrMultiModalProjector", in_model("vision_projection.", "multi_modal_projector.")
        ),
        transformers="5.23.0",
    ),
)
