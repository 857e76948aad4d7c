"""Nemotron Omni's tower, imported only for its checkpoints."""

from transformers.models.radio.configuration_radio import RadioConfig
from transformers.models.radio.modeling_radio import RadioModel


class Radio(RadioModel):
    """C-RADIO, whose pixels the processor has normalised."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__(config)
        self.make_preprocessor_external()  # type: ignore[no-untyped-call]
