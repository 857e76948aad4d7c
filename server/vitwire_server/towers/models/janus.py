"""Janus (DeepSeek): the tower that understands images, in transformers' layout."""

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, in_model
from vitwire_server.towers.layouts.tiles import TileFamily
from vitwire_server.towers.processors.settings import CLIP, ProcessorFiles
from vitwire_server.towers.processors.tiles import squared
from vitwire_server.towers.shared.siglip import Siglip


def _janus_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    return {Modality.IMAGE: squared(files.image, config.vision_config.image_size, CLIP)}


_JANUS = TileFamily(
    model_type="janus",
    title="Janus",
    architecture="24 x 1024, patch 16",
    tower=Module(source="janus.modeling_janus:JanusVisionModel", prefixes=in_model("vision_model.")),
    beside={"projector": Module(source="janus.modeling_janus:JanusVisionAlignerMLP", prefixes=in_model("aligner."))},
    encoder=Siglip,
    processor=_janus_settings,
    converts=False,
    videos=Accepts.NOTHING,
    special="the understanding tower; images are generated without Vitwire; transformers' layout (deepseek-community)",
)

ROWS: tuple[Family, ...] = (_JANUS,)
