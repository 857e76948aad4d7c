"""Towers that differ from transformers' in single modules, imported only for their checkpoints."""

from typing import Any

import torch
from torch import nn
from transformers.models.dots3_note.configuration_dots3_note import Dots3NoteVisionConfig
from transformers.models.dots3_note.modeling_dots3_note import Dots3NoteVisionModel
from transformers.models.hunyuan_vl.configuration_hunyuan_vl import HunYuanVLVisionConfig
from transformers.models.hunyuan_vl.modeling_hunyuan_vl import HunYuanVLVisionTransformer
from transformers.models.paddleocr_vl.configuration_paddleocr_vl import PaddleOCRVisionConfig
from transformers.models.paddleocr_vl.modeling_paddleocr_vl import PaddleOCRVisionModel
from transformers.models.radio.configuration_radio import RadioConfig
from transformers.models.radio.modeling_radio import RadioModel


class DotsOcr(Dots3NoteVisionModel):
    """Queries and keys are not normalised."""

    def __init__(self, config: Dots3NoteVisionConfig) -> None:
        super().__init__(config)
        blocks: Any = self.blocks
        for block in blocks:
            block.attn.q_norm = block.attn.k_norm = nn.Identity()


class Hy4(HunYuanVLVisionTransformer):
    """Its merger makes rows by its convolutions alone, and ends no image."""

    def __init__(self, config: HunYuanVLVisionConfig) -> None:
        super().__init__(config)
        merger: Any = self.patch_merger
        merger.mlp = merger.after_rms = nn.Identity()
        merger.image_begin = merger.image_end = merger.image_sep = None
        side, width = config.spatial_merge_size, config.hidden_size
        merger.proj_conv = nn.Conv2d(width, width * side**2, side, side)
        merger.proj_out = nn.Conv2d(width * side**2, config.out_hidden_size, 1)
        merger.image_newline = nn.Parameter(torch.zeros(config.out_hidden_size))


class SiglipNavit(PaddleOCRVisionModel):
    """Ovis 2.5's: learned positions are resampled by a bicubic filter, and rows are not normalised."""

    def __init__(self, config: PaddleOCRVisionConfig) -> None:
        super().__init__(config)
        inner: Any = self.vision_model
        inner.embeddings.interpolation_mode = "bicubic"
        inner.post_layernorm = nn.Identity()


class Radio(RadioModel):
    """Nemotron's C-RADIO, whose pixels the processor has normalised."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__(config)
        self.make_preprocessor_external()  # type: ignore[no-untyped-call]
