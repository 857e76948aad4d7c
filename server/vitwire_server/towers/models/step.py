"""Step3's and Step 5's vision towers and GOT-OCR 2 (StepFun)."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.vision_utils import get_vision_position_ids

from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.towers.configs import Config, changed, dtype_of, new_config
from vitwire_server.towers.family import Parts, in_model, stripped
from vitwire_server.towers.layouts.assembled import CropEncoder
from vitwire_server.towers.layouts.tiles import TileFamily, TileShape, heads_of, merged_tile, side
from vitwire_server.towers.processors.settings import BILINEAR, CLIP, ProcessorFiles, images, whole
from vitwire_server.towers.processors.tiles import nearest_ratio, tiled
from vitwire_server.towers.shared.learned import gather_relative_positions
from vitwire_server.towers.shared.parts import Constants, projector, stock
from vitwire_server.towers.shared.projected_tiles import ProjectedTiles


def _step3_config(folder: Path, settings: Mapping[str, Any]) -> Config:
    """Checkpoints of the hub's code and of transformers differ in the names of their fields."""
    text = settings.get("text_config") or {}
    config = new_config(
        "step3p7",
        vision_config=dict(settings["vision_config"]),
        text_config={"hidden_size": text.get("hidden_size") or settings["hidden_size"]},
        projector_bias=settings.get("projector_bias", False),
        dtype=dtype_of(settings),
    )
    return changed(config, {"crop_size": ProcessorFiles.read(folder).square("patch_size", 504)})


def _step3_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    overview, crop = config.vision_config.image_size, config.crop_size
    most = whole(image, "max_image_size", 3024)
    tiling = Tiling(
        TilingRule.WINDOWS,
        (overview, overview),
        max_tiles=max(1, -(-most // crop)) ** 2,
        max_side=most,
        crop=(crop, crop),
    )
    return tiled(image, tiling, CLIP, BILINEAR)


def _got_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    return tiled(image, nearest_ratio(image, side(config.vision_config.image_size), cuts=False), CLIP)


class Step3(CropEncoder):
    """A ViT with rotary positions and two strided convolutions; positions of both sizes are constants."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        vision = config.vision_config
        self.patch, self.merge = vision.patch_size, 4
        self.tile = self._shape(vision.image_size)
        self.crop = self._shape(config.crop_size)
        self.width = config.text_config.hidden_size
        self.attention_heads = heads_of(vision)
        self.blocks = list(self._tower.layers)
        sides = {shape.height // self.patch for shape in (self.tile, self.crop)}
        self.model["constants"] = nn.ModuleDict({str(side): self._fixed(side) for side in sides})

    def _shape(self, size: int) -> TileShape:
        return TileShape(size, size, ceil(size // self.patch / self.merge) ** 2)

    @torch.no_grad()
    def _fixed(self, side: int) -> Constants:
        """Positions of a grid with this many patches a side: the learned square, resampled, and rotary ones."""
        weight = self._tower.embeddings.position_embedding.weight
        own = round(len(weight) ** 0.5)
        learned = weight.float().T.reshape(1, -1, own, own)
        if own != side:
            learned = functional.interpolate(learned, size=(side, side), mode="bilinear", align_corners=False)
        ids = get_vision_position_ids(torch.tensor([[1, side, side]]), 1)
        cosines, sines = self._tower.rotary_emb(weight, ids.to(weight.device))
        return Constants(learned=learned.flatten(2).transpose(1, 2).clone(), cosines=cosines, sines=sines)

    def encode(self, tiles: Tensor) -> Tensor:
        tower, side = self._tower, tiles.shape[-1] // self.patch
        constants = self.model["constants"][str(side)]
        patches = tower.embeddings.patch_embedding(tiles).flatten(2).transpose(1, 2)
        states = tower.pre_layernorm(patches + constants.learned.to(patches.dtype))
        for layer in tower.layers:
            states = layer(states, position_embeddings=(constants.cosines, constants.sines))
        grid = states.transpose(1, 2).unflatten(2, (side, side))
        merged: Tensor = tower.downsampler2(tower.downsampler1(grid))
        return self._projector(merged.flatten(2).transpose(1, 2))  # type: ignore[no-any-return]

    def encode_crops(self, crops: Tensor) -> Tensor:
        return self.encode(crops)


class GotOcr2(ProjectedTiles):
    """SAM's tower, and a projector of two convolutions of stride 2, which makes one row of 4 x 4 patches."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config, layers="layers")
        self.merge = 4
        self.tile = merged_tile(self.tile.width, self.patch, self.merge, "the stride of the projector")
        if config.vision_config.use_rel_pos:
            gather_relative_positions(self._tower, (self.tile.width // self.patch,))


_STEP3P7 = TileFamily(
    "step3p7",
    "Step-3.7",
    configuration=_step3_config,
    tower=stock("step3p7.Step3p7VisionModel", in_model("vision_model.")),
    beside=projector(
        nn.Linear,
        stripped("model.multi_modal_projector.", "vit_large_projector.", "model.vit_large_projector."),
        arguments=lambda config: (
            config.vision_config.hidden_size * 4,
            config.text_config.hidden_size,
            config.projector_bias,
        ),
    ),
    encoder=Step3,
    processor=images(_step3_settings),
    in_code=True,
)

ROWS = (
    _STEP3P7,
    *(replace(_STEP3P7, model_type=name, title="Step3-VL") for name in ("step3_vl", "step_robotics")),
    replace(_STEP3P7, model_type="step5_vl", title="Step 5"),
    TileFamily(
        "got_ocr2",
        "GOT-OCR 2",
        tower=stock("got_ocr2.GotOcr2VisionEncoder", in_model("vision_tower.")),
        beside=projector("got_ocr2.GotOcr2MultiModalProjector"),
        encoder=GotOcr2,
        processor=images(_got_settings),
    ),
)
