"""The card of a model that no test loads."""

from vitwire_server.core.budgets import Ladder
from vitwire_server.core.items import DType
from vitwire_server.core.models import Geometry, Limits, ModelCard

CARD = ModelCard(
    model_id="tiny",
    model_type="qwen2_vl",
    fingerprint="",
    dtype=DType.FLOAT32,
    geometry=Geometry(patch=2, merge=2, temporal=2, channels=3, width=8, levels=0),
    preprocessing={},
    ladder=Ladder(),
    dropped={},
    limits=Limits(1 << 20, items_per_request=3, patches_per_item=64, queued_items=9, queued_bytes=1 << 20),
    graphs="off",
    attention="sdpa",
    device="cpu",
    version="0",
)
