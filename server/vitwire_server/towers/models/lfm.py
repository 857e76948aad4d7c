"""LFM2-VL, whose tower is SigLIP 2, and LFM3-VL, which convolves the patches of a frame (Liquid AI)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import vision_utils

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Geometry
from vitwire_server.towers.configs import Config, Served
from vitwire_server.towers.family import Accepts, Parts, Weights, in_model, of_transformers
from vitwire_server.towers.layouts.heads import Projected
from vitwire_server.towers.layouts.packed import Inputs, PackedFamily
from vitwire_server.towers.layouts.patches import neighbours
from vitwire_server.towers.layouts.raster import RasterFamily
from vitwire_server.towers.metadata import Kind, Rows, Sources
from vitwire_server.towers.models.siglip import Siglip2Tower, siglip2, siglip2_config
from vitwire_server.towers.processors.settings import BILINEAR, HALF, AreaRule, images, unsized
from vitwire_server.towers.shared.fused import copied, ungrouped
from vitwire_server.towers.shared.parts import projector, stock


class Lfm2VlTower(Siglip2Tower):
    """SigLIP 2 with a projector that unshuffles squares of patches."""

    def _inputs(self) -> dict[str, Kind]:
        return {**super()._inputs(), "squares": Sources(self.geometry.merge**2)}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        return {**super()._compute(grid), "squares": neighbours(grid, self.geometry.merge)}

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        """Each token's patches are an image to the projector, which makes one row of it."""
        patches = super()._rows(pixels, tensors, attended)[tensors["squares"]]
        rows: Tensor = self._projector(patches.unflatten(1, (self.geometry.merge, -1)))
        return rows.flatten(0, 2)


class GatheredConvolution(nn.Module):
    """A stock layer's convolution with the neighbours of each patch given, so that it needs no grid on the host."""

    stock: Any

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, hidden_states: Tensor, neighbours: Tensor, inside: Tensor, **_: object) -> Tensor:
        """`(patches, C)`; of each patch the numbers of its neighbours, and 1 or 0 for those within the frame or not."""
        before, after, states = self.stock.in_proj(hidden_states).chunk(3, dim=-1)
        gated, kernel = before * states, self.stock.spatial_conv.weight.flatten(1).float()
        total = torch.zeros_like(gated, dtype=torch.float32)
        for tap in range(kernel.shape[1]):
            total = total + gated[neighbours[:, tap]] * inside[:, tap, None] * kernel[:, tap]
        rows: Tensor = self.stock.out_proj(after * total.to(gated.dtype))
        return rows


class ConvolvedHead(Projected):
    """The projector; the tower's convolutions are given the neighbours of each patch."""

    def __init__(self, parts: Parts, bare: Geometry) -> None:
        super().__init__(parts, bare)
        for layer in parts["tower"].layers:
            if not layer.is_attention_layer:
                layer.conv = GatheredConvolution(layer.conv)

    def inputs(self) -> dict[str, Kind]:
        taps = self.config.conv_kernel_size**2
        return {"neighbours": Sources(taps, per_patch=True), "inside": Rows((taps,), torch.float32)}

    def compute(self, grid: Grid) -> dict[str, Tensor]:
        places = vision_utils.get_vision_position_ids(torch.tensor([(1, grid.h, grid.w)]), self.geometry.merge)
        numbers = torch.empty(grid.h, grid.w, dtype=torch.int64)
        numbers[places[:, 0], places[:, 1]] = torch.arange(grid.frame_patches)
        side = self.config.conv_kernel_size
        steps = torch.arange(side) - side // 2
        around = places[:, None] + torch.cartesian_prod(steps, steps)
        limits = torch.tensor([grid.h, grid.w])
        inside = ((around >= 0) & (around < limits)).all(dim=-1)
        rows, columns = torch.where(inside[..., None], around, places[:, None]).unbind(dim=-1)
        frames = torch.arange(grid.t)[:, None, None] * grid.frame_patches
        return {
            "neighbours": (numbers[rows, columns] + frames).flatten(0, 1),
            "inside": inside.float().repeat(grid.t, 1),
        }

    def keywords(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors[name] for name in ("neighbours", "inside")}


def _ungrouped_heads(weights: Weights, config: Config) -> Weights:
    grouped = (".k_proj.", ".v_proj.")
    return {name: copied(own, config) if any(map(name.count, grouped)) else own for name, own in weights.items()}


ROWS = (
    RasterFamily(
        "lfm2_vl",
        "LFM2-VL",
        configuration=siglip2_config,
        tower=siglip2(in_model("vision_tower.vision_model.", "vision_tower.")),
        beside=projector("lfm2_vl.Lfm2VlMultiModalProjector"),
        merge="downsample_factor",
        forward=Lfm2VlTower,
        channels_last=True,
        # The processor makes several images of a large one: parts of one size, and an overview of another.
        processor=images(lambda image, _: unsized(image, HALF, BILINEAR)),
        images=Accepts.PIXELS,
    ),
    PackedFamily(
        "lfm3_vl",
        "LFM3-VL",
        video_processor="Qwen3VL",
        configuration=lambda folder, settings: ungrouped(of_transformers(folder, settings)),
        tower=stock(
            "lfm3_vl.Lfm3VlVisionModel",
            in_model("vision_tower."),
            renames=((r"^patchifier\.", "patch_embed."), (r"\.([qk])_layernorm\.", r".\1_norm.")),
            convert=_ungrouped_heads,
            served=(Served("conv_kernel_size", lambda side, _: side % 2 == 1, "odd"),),
        ),
        beside=projector("lfm3_vl.Lfm3VlMultiModalProjector"),
        head=ConvolvedHead,
        layers="layers",
        inputs=Inputs(listed_grids=True),
        video_areas=AreaRule(pixels=(128 * 32 * 32, 768 * 32 * 32), spans_frames=True),
        transformers="5.23.0",
    ),
)
