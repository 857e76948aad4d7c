"""Towers that differ from transformers' in single modules, imported only for their checkpoints."""

from typing import Any

from torch import nn
from transformers.models.dots3_note.configuration_dots3_note import Dots3NoteVisionConfig
from transformers.models.dots3_note.modeling_dots3_note import Dots3NoteVisionModel
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
