"""MiniMax's vision towers."""

from vitwire_server.towers.family import Accepts, Family, Module, in_model
from vitwire_server.towers.layouts.heads import Projected
from vitwire_server.towers.layouts.packed import AttentionSpan, Inputs, PackedFamily
from vitwire_server.towers.processors.areas import AreaRule

_MINIMAX = PackedFamily(
    model_type="minimax_m3_vl",
    title="MiniMax M3-VL",
    tower=Module(
        source="minimax_m3_vl.modeling_minimax_m3_vl:MiniMaxM3VLVisionModel",
        prefixes=in_model("vision_tower."),
        renames=(
            (r"^vision_model\.embeddings\.patch_embedding\.", "embeddings.proj."),
            (r"^vision_model\.(encoder\.)?", ""),
        ),
    ),
    beside={
        "projector": Module(
            source="minimax_m3_vl.modeling_minimax_m3_vl:MiniMaxM3VLMultiModalProjector",
            prefixes=in_model("multi_modal_projector.") | {"patch_merge_mlp.": "merge_"},
            config="",
        )
    },
    head=Projected,
    width="text_config.hidden_size",
    layers="layers",
    span=AttentionSpan.CLIP,
    inputs=Inputs(frame_positions=True),
    videos=Accepts.PIXELS,
    image_areas=AreaRule(pixels=(4 * 28 * 28, 451584)),
    architecture="32 x 1280, patch 14",
    attention="over whole clips",
    special="positions in time, height and width; clips come in chunks of 4 groups of frames; projector",
    transformers="5.23.0",
)


ROWS: tuple[Family, ...] = (_MINIMAX,)
