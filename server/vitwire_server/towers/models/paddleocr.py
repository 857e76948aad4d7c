"""PaddleOCR-VL's vision tower (Baidu)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Resizing
from vitwire_server.towers.family import Family, Module, Parts, in_model, stripped
from vitwire_server.towers.layouts.packed import PackedFamily
from vitwire_server.towers.layouts.patches import neighbours
from vitwire_server.towers.layouts.projected import ProjectedTower, of_clips
from vitwire_server.towers.metadata import Sources

_TEXT = "text_config.hidden_size"


_VISUAL = in_model("visual.")


class PaddleTower(ProjectedTower):
    """Patches in raster order, which only the projector groups to tokens; single images."""

    after = frozenset({"patches"})

    def __init__(self, family: PackedFamily, parts: Parts, config: Any) -> None:  # noqa: ANN401
        super().__init__(family, parts, config)
        self.geometry = of_clips(self.geometry, most_frames=1)
        self._kinds["patches"] = Sources(self.geometry.merge**2)

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        return super()._compute(grid) | {"patches": neighbours(grid, self.geometry.merge)}

    def _shaped(self, pixels: Tensor) -> Tensor:
        side = self.geometry.patch
        return pixels.view(1, len(pixels), -1, side, side)

    def _finish(self, output: Any, tensors: Mapping[str, Tensor]) -> Tensor:  # noqa: ANN401
        projector = self.projector
        patches = projector.pre_norm(output.last_hidden_state)[tensors["patches"]]
        rows: Tensor = projector.linear_2(projector.act(projector.linear_1(patches.flatten(1))))
        return rows


_PADDLE = PackedFamily(
    model_type="paddleocr_vl",
    title="PaddleOCR-VL",
    tower=Module(
        source="paddleocr_vl.modeling_paddleocr_vl:PaddleOCRVisionModel",
        prefixes=_VISUAL,
        ignored=("vision_model.head.", "vision_model.embeddings.packing_position_embedding."),
    ),
    beside={
        "projector": Module(
            source="paddleocr_vl.modeling_paddleocr_vl:PaddleOCRProjector",
            prefixes=stripped("model.projector.", "mlp_AR."),
            config="",
        )
    },
    adapter=PaddleTower,
    width=_TEXT,
    positions="vision_model.embeddings",
    layers="vision_model.encoder.layers",
    raster=True,
    resizing=Resizing.ENLARGED_AREA,
    videos=False,
    architecture="27 x 1152, patch 14",
    attention="full",
    special="patches in raster order; projector",
    transformers="5.23.0",
)


ROWS: tuple[Family, ...] = (_PADDLE,)
