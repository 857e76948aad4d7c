"""MiniMax's vision towers."""

from vitwire_server.towers.family import Accepts, in_model
from vitwire_server.towers.layouts.heads import Projected
from vitwire_server.towers.layouts.packed import AttentionSpan, Inputs, PackedFamily
from vitwire_server.towers.processors.settings import AreaRule
from vitwire_server.towers.shared.parts import projector, stock

ROWS = (
    PackedFamily(
        "minimax_m3_vl",
        "MiniMax M3-VL",
        tower=stock(
            "minimax_m3_vl.MiniMaxM3VLVisionModel",
            in_model("vision_tower."),
            renames=(
                (r"^vision_model\.embeddings\.patch_embedding\.", "embeddings.proj."),
                (r"^vision_model\.(encoder\.)?", ""),
            ),
        ),
        beside=projector(
            "minimax_m3_vl.MiniMaxM3VLMultiModalProjector",
            in_model("multi_modal_projector.") | {"patch_merge_mlp.": "merge_"},
        ),
        head=Projected,
        layers="layers",
        span=AttentionSpan.CLIP,
        inputs=Inputs(frame_positions=True),
        videos=Accepts.PIXELS,
        image_areas=AreaRule(pixels=(4 * 28 * 28, 451584)),
        transformers="5.23.0",
    ),
)
