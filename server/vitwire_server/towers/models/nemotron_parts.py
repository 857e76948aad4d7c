"""Nemotron Omni's modules: transformers' own, built of the configurations that checkpoints have."""

from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import NemotronH_Omni_Reasoning_V3MultiModalProjector
from transformers.models.radio.configuration_radio import RadioConfig
from transformers.models.radio.modeling_radio import RadioModel

from vitwire_server.towers.configs import Config


class Radio(RadioModel):
    """C-RADIO, whose pixels the processor has normalised."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__(config)
        self.make_preprocessor_external()  # type: ignore[no-untyped-call]


class Projector(NemotronH_Omni_Reasoning_V3MultiModalProjector):
    """The projector, built of the checkpoint's whole configuration."""

    def __init__(self, config: Config) -> None:
        merged = config.vision_hidden_size * round(1 / config.downsample_ratio) ** 2
        super().__init__(merged, config.projector_hidden_size, config.text_config.hidden_size)
