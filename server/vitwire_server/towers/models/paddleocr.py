"""PaddleOCR-VL's vision tower (Baidu)."""

from collections.abc import Mapping

from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Geometry, Resizing
from vitwire_server.towers.family import Accepts, Family, Module, in_model, stripped
from vitwire_server.towers.layouts.heads import Head, Output, of_clips
from vitwire_server.towers.layouts.packed import Inputs, PackedFamily
from vitwire_server.towers.layouts.patches import neighbours
from vitwire_server.towers.metadata import Kind, Sources
from vitwire_server.towers.processors.areas import AreaRule


def one_image(rows: Tensor, side: int) -> Tensor:
    """Rows of pixels as `(1, patches, C, p, p)`."""
    return rows.view(1, len(rows), -1, side, side)


class PatchProjector(Head):
    """A projector that groups patches in raster order to tokens; single images."""

    def sizes(self, bare: Geometry) -> Geometry:
        return of_clips(bare, most_frames=1)

    def inputs(self) -> dict[str, Kind]:
        return {"patches": Sources(self.geometry.merge**2)}

    def compute(self, grid: Grid) -> dict[str, Tensor]:
        return {"patches": neighbours(grid, self.geometry.merge)}

    def rows(self, output: Output, tensors: Mapping[str, Tensor]) -> Tensor:
        projector = self.projector
        patches = projector.pre_norm(output.last_hidden_state)[tensors["patches"]]
        rows: Tensor = projector.linear_2(projector.act(projector.linear_1(patches.flatten(1))))
        return rows


_PADDLE = PackedFamily(
    model_type="paddleocr_vl",
    title="PaddleOCR-VL",
    tower=Module(
        source="paddleocr_vl.modeling_paddleocr_vl:PaddleOCRVisionModel",
        prefixes=in_model("visual."),
        ignored=("vision_model.head.", "vision_model.embeddings.packing_position_embedding."),
    ),
    beside={
        "projector": Module(
            source="paddleocr_vl.modeling_paddleocr_vl:PaddleOCRProjector",
            prefixes=stripped("model.projector.", "mlp_AR."),
            config="",
        )
    },
    head=PatchProjector,
    width="text_config.hidden_size",
    inputs=Inputs(learned_positions="vision_model.embeddings", raster=True, shape=one_image),
    layers="vision_model.encoder.layers",
    image_areas=AreaRule(resizing=Resizing.ENLARGED_AREA),
    videos=Accepts.NOTHING,
    architecture="27 x 1152, patch 14",
    attention="full",
    special="patches in raster order; projector",
    transformers="5.23.0",
)


ROWS: tuple[Family, ...] = (_PADDLE,)
