"""Ovis 2 (AIDC-AI)."""

from typing import Any

from torch import Tensor
from transformers.models.ovis2.modeling_ovis2 import Ovis2VisualEmbeddingTable

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, Parts, in_model
from vitwire_server.towers.layouts.tiles import Encoder, TileFamily, TileShape, heads_of, side
from vitwire_server.towers.processors.settings import CLIP, ProcessorFiles
from vitwire_server.towers.processors.tiles import tiled
from vitwire_server.towers.served import Served


def _ovis2_settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    image = files.image
    tile = (side(config.vision_config.image_size),) * 2
    most = int(image.get("max_patches", 12))
    tiling = Tiling(TilingRule.STRETCH, tile)
    if image.get("crop_to_patches") and most > 1:
        covering = image.get("use_covering_area_grid", True)
        tiling = Tiling(
            TilingRule.COVERING if covering else TilingRule.CLOSEST_RATIO,
            tile,
            overview=Overview.FIRST,
            min_tiles=1 if covering else int(image.get("min_patches", 1)),
            max_tiles=most,
        )
    return {Modality.IMAGE: tiled(image, tiling, CLIP)}


def _divides(stride: int, vision: Config) -> bool:
    return side(vision.image_size) // side(vision.patch_size) % stride == 0


class VisualEmbeddings(Ovis2VisualEmbeddingTable):
    """An embedding for each word of the visual vocabulary; the last ones are of tokens that mark an image's layout."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.vision_config.vocab_size, config.hidden_size)


class Ovis2(Encoder):
    """The tower gives each token probabilities over a visual vocabulary, whose embeddings are averaged by them."""

    def __init__(self, parts: Parts, config: Config) -> None:
        vision = config.vision_config
        size, self.patch = side(vision.image_size), side(vision.patch_size)
        self.merge = vision.hidden_stride
        self.tile = TileShape(size, size, (size // self.patch // self.merge) ** 2)
        self.channels = vision.num_channels
        self.width = config.hidden_size
        self.attention_heads = heads_of(vision)
        self._tower: Any = parts["tower"]
        self._table: Any = parts["projector"]
        self._words = vision.vocab_size - vision.num_visual_indicator_tokens
        self.blocks = list(self._tower.transformer.encoder.layers)

    def encode(self, tiles: Tensor) -> Tensor:
        probabilities: Tensor = self._tower(pixel_values=tiles).pooler_output
        return probabilities @ self._table.weight[: self._words]  # type: ignore[no-any-return]


_OVIS2 = TileFamily(
    model_type="ovis2",
    title="Ovis 2",
    architecture="24 x 1024, patch 14, SwiGLU",
    tower=Module(
        source="ovis2.modeling_ovis2:Ovis2VisionModel",
        prefixes=in_model("vision_tower."),
        served=(
            Served("tokenize_function", lambda name, _: name == "softmax", "'softmax'"),
            Served("hidden_stride", _divides, "a divisor of image_size / patch_size"),
        ),
    ),
    beside={
        "projector": Module(
            source="vitwire_server.towers.models.ovis:VisualEmbeddings",
            prefixes=in_model("visual_embeddings_table."),
            config="",
        )
    },
    encoder=Ovis2,
    processor=_ovis2_settings,
    videos=Accepts.NOTHING,
    special="rows are means of visual embeddings; those of the tokens between tiles stay with the LLM",
)

ROWS: tuple[Family, ...] = (_OVIS2,)
