"""dots.ocr (rednote hilab), through the classes of dots3."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitwire_server.towers.configs import Config, dtype_of, new_config, require, usual_fields
from vitwire_server.towers.family import Accepts, stripped
from vitwire_server.towers.layouts.packed import PackedFamily
from vitwire_server.towers.shared.parts import stock


def _dots_config(_: Path, settings: Mapping[str, Any]) -> Config:
    """rednote's configuration calls the tower's width `embed_dim`, and the width of a row `hidden_size`."""
    own = settings["vision_config"]
    for name, value in {"is_causal": False, "post_norm": True, "temporal_patch_size": 1, "use_bias": False}.items():
        require(f"vision_config.{name}", own.get(name, value), value)
    sides = {"hidden_size": own["embed_dim"], "adapter_in_dim": own["embed_dim"], "adapter_out_dim": own["hidden_size"]}
    vision = usual_fields(own, "num_channels", "spatial_merge_size", "rms_norm_eps") | sides
    return new_config(
        "dots3_note",
        vision_config=vision | {"mlp_layer_types": ["dense"] * own["num_hidden_layers"]},
        text_config={"hidden_size": own["hidden_size"]},
        audio_config={"adapter_out_dim": own["hidden_size"]},
        dtype=dtype_of(settings),
    )


ROWS = (
    PackedFamily(
        "dots_ocr",
        "dots.ocr",
        configuration=_dots_config,
        tower=stock(
            "vitwire_server.towers.models.subclasses:DotsOcr",
            stripped("vision_tower."),
            renames=(
                (r"\.patchifier\.", "."),
                (r"^post_trunk_norm\.", "norm."),
                (r"\.fc1\.", ".gate_proj."),
                (r"\.fc2\.", ".down_proj."),
                (r"\.fc3\.", ".up_proj."),
            ),
        ),
        width="vision_config.adapter_out_dim",
        videos=Accepts.NOTHING,
        transformers="5.23.0",
    ),
)
