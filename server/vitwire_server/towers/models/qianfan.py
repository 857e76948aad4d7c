"""Qianfan-OCR (Baidu): InternVL's tower and projector, in transformers' layout and in the authors' own."""

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, in_model
from vitwire_server.towers.layouts.tiles import TileFamily
from vitwire_server.towers.models.internvl import ORIGINAL_NAMES, PROJECTION, InternVL, internvl_settings, unfused
from vitwire_server.towers.processors.settings import ProcessorFiles
from vitwire_server.towers.shared.pixel_shuffle import MLP1


def _settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    return {Modality.IMAGE: internvl_settings(files, config)[Modality.IMAGE]}


class QianfanOcr(InternVL):
    """InternVL, whose layers are the tower's own."""

    layers = "layers"


_QIANFAN = TileFamily(
    model_type="qianfan_ocr",
    title="Qianfan-OCR",
    architecture="24 x 1024, patch 14",
    tower=Module(
        source="qianfan_ocr.modeling_qianfan_ocr:QianfanOCRVisionModel",
        prefixes=in_model("vision_tower.", "vision_model."),
        renames=((r"^encoder\.layers\.", "layers."), *ORIGINAL_NAMES),
        convert=unfused,
    ),
    beside={
        "projector": Module(
            source="qianfan_ocr.modeling_qianfan_ocr:QianfanOCRMultiModalProjector",
            prefixes={**in_model("multi_modal_projector."), **MLP1},
            config="",
            served=PROJECTION,
        )
    },
    encoder=QianfanOcr,
    processor=_settings,
    videos=Accepts.NOTHING,
    transformers="5.23.0",
)

ROWS: tuple[Family, ...] = (_QIANFAN,)
