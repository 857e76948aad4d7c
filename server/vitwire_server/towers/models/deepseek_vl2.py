"""DeepSeek-VL2, in the layout that its authors publish."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config, changed, dtype_of
from vitwire_server.towers.family import Accepts, Family, Module, Parts, Weights, stripped
from vitwire_server.towers.files import optional_json
from vitwire_server.towers.layouts.tiles import TileFamily
from vitwire_server.towers.processors.settings import HALF, ProcessorFiles, per_channel
from vitwire_server.towers.processors.tiles import shade, tiled
from vitwire_server.towers.shared.fused import position_tables, split_qkv
from vitwire_server.towers.shared.siglip import Siglip, siglip_config

_TOWER = {"image_size": 384, "patch_size": 16, "width": 1024, "layers": 24, "heads": 16, "mlp_ratio": 4}
"""What config.json leaves out, by the authors' configuration classes; the projector's below."""
_PROJECTOR = {
    "projector_type": "downsample_mlp_gelu",
    "input_dim": 1152,
    "n_embed": 2048,
    "depth": 2,
    "mlp_ratio": 1,
    "downsample_ratio": 2,
    "token_pooling": False,
}


def _settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """The processor's numbers lie in processor_config.json, which `read_config` reads."""
    del files
    own, size = config.processor, config.vision_config.image_size
    layouts = tuple(_layout(sides, size) for sides in own["candidate_resolutions"] or [(size, size)])
    tiling = Tiling(
        TilingRule.PADDED_FIT,
        (size, size),
        overview=Overview.FIRST,
        max_tiles=max(rows * columns for rows, columns in layouts),
        layouts=layouts,
        background=shade(per_channel(own, "image_mean", HALF[0])),
    )
    return {Modality.IMAGE: tiled(own, tiling, HALF)}


def _layout(sides: Sequence[int], tile: int) -> tuple[int, int]:
    """Rows and columns of a resolution `(width, height)`. Raises ValueError."""
    width, height = sides
    if width % tile or height % tile or min(width, height) < tile:
        raise ValueError(f"candidate_resolutions {list(sides)} are not multiples of {tile}")
    return height // tile, width // tile


def _unfused(weights: Weights, config: Config) -> Weights:
    del config
    return position_tables(split_qkv(weights, ".attn.qkv.", ".self_attn.{}_proj."))


class DownsampleProjector(nn.Module):
    """Squares of patches, zeros beyond the last row and column, through an MLP."""

    def __init__(self, config: Config) -> None:
        """`config` is the whole checkpoint's."""
        super().__init__()
        own = config.projector
        self.ratio: int = own["downsample_ratio"]
        inner = own["n_embed"] * own["mlp_ratio"]
        layers: list[nn.Module] = [nn.Linear(own["input_dim"] * self.ratio**2, inner)]
        for _ in range(1, own["depth"] - 1):
            layers += [nn.GELU(), nn.Linear(inner, inner)]
        self.layers = nn.Sequential(*layers, nn.GELU(), nn.Linear(inner, own["n_embed"]))

    def forward(self, patches: Tensor) -> Tensor:
        """`(tiles, side * side, C)` to `(tiles, tokens, width)`; a token's columns are by channel, then by patch."""
        ratio, side = self.ratio, round(patches.shape[1] ** 0.5)
        spare = -side % ratio
        grid = functional.pad(patches.unflatten(1, (side, side)), (0, 0, 0, spare, 0, spare))
        squares = grid.unflatten(2, (-1, ratio)).unflatten(1, (-1, ratio)).permute(0, 1, 3, 5, 2, 4)
        rows: Tensor = self.layers(squares.flatten(3).flatten(1, 2))
        return rows


class DeepseekVL2(Siglip):
    """A row for each square of patches, those at the edges included."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config)
        side = -(-self.tile.width // (self.patch * self.merge))
        self.tile = self.tile._replace(tokens=side**2)

    def _merge(self, config: Config, side: int) -> int:
        del side
        ratio: int = config.projector["downsample_ratio"]
        return ratio


@dataclass(frozen=True, kw_only=True)
class DeepseekVL2Family(TileFamily):
    """Checkpoints of this `model_type` with a SigLIP tower; DeepSeek-OCR's have others."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See Family. Raises ValueError over another tower or projector."""
        vision, projector = {**_TOWER, **settings["vision_config"]}, {**_PROJECTOR, **settings["projector_config"]}
        name = str(vision.get("model_name", "siglip_large_patch16_384"))
        if not name.startswith("siglip") or vision.get("class_token"):
            raise ValueError(f"vision_config.model_name is {name!r}, only SigLIP's towers are served")
        if projector["projector_type"] != "downsample_mlp_gelu" or projector["token_pooling"]:
            raise ValueError(
                f"projector_config.projector_type is {projector['projector_type']!r}, only 'downsample_mlp_gelu' "
                "without token_pooling is served"
            )
        config = siglip_config(
            {
                "hidden_size": vision["width"],
                "image_size": vision["image_size"],
                "intermediate_size": int(vision["width"] * vision["mlp_ratio"]),
                "num_attention_heads": vision["heads"],
                "num_hidden_layers": vision["layers"],
                "patch_size": vision["patch_size"],
            },
            width=projector["n_embed"],
            dtype=dtype_of(settings),
        )
        processor = {"candidate_resolutions": settings.get("candidate_resolutions")}
        processor |= optional_json(folder / "processor_config.json")
        return changed(config, {"projector": projector, "processor": processor})


_DEEPSEEK_VL2 = DeepseekVL2Family(
    model_type="deepseek_vl_v2",
    title="DeepSeek-VL2",
    architecture="27 x 1152, patch 14",
    tower=Module(
        source="siglip.modeling_siglip:SiglipVisionModel",
        prefixes=stripped("vision."),
        renames=(
            (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
            (r"^pos_embed$", "embeddings.position_embedding.weight"),
            (r"^norm\.", "post_layernorm."),
            (r"^blocks\.", "encoder.layers."),
            (r"\.norm([12])\.", r".layer_norm\1."),
            (r"\.attn\.proj\.", ".self_attn.out_proj."),
        ),
        ignored=("attn_pool.",),
        convert=_unfused,
    ),
    beside={"projector": Module(source=f"{__name__}:DownsampleProjector", prefixes=stripped("projector."), config="")},
    encoder=DeepseekVL2,
    processor=_settings,
    videos=Accepts.NOTHING,
    special="DeepSeek's layout; whole image first; line breaks and the separator stay with the LLM",
)

ROWS: tuple[Family, ...] = (_DEEPSEEK_VL2,)
