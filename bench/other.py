"""A published tower of another maker than Qwen: the files of its checkpoint, and how plain transformers computes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.stock import Plain

from vitwire_server.core.grids import Grid
from vitwire_server.core.pooling import Pooling
from vitwire_server.demo.shrinking import Json

_TEXT: Json = {
    "vocab_size": 512,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE_TOKEN: Json = {"image_token_index": 500}
TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
"""Where most stock models have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """A published tower and one size of image."""

    model_type: str
    vision: Json
    """`vision_config`; of an encoder that is alone, all of config.json."""
    width: int = 0
    """Columns of the language model, which is not built in full; 0 without one."""
    text: Json = field(default_factory=dict)
    """Other fields of `text_config`."""
    fields: Json = field(default_factory=lambda: dict(IMAGE_TOKEN))
    """Other fields of config.json."""
    image: Json
    """preprocessor_config.json."""
    grid: Grid
    """Of one image."""
    plain: Plain
    """How plain transformers computes rows."""
    parts: Mapping[str, str] = field(default_factory=lambda: {"tower": TOWER, "projector": PROJECTOR})
    """Where the stock model has each module of the row; empty where the stock modules are those of the row."""
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """Classes of stock modules that are not those of the row, by module, within `transformers.models`."""
    pooling: Pooling = Pooling.NONE
    batch: int = 16
    """Images of a packed batch."""
    transformers: str = "5.17.0"
    """Oldest release whose stock model is right in bfloat16."""

    def config(self) -> Json:
        """config.json."""
        if not self.width:
            return {**self.vision, "model_type": self.model_type}
        text = {**_TEXT, "hidden_size": self.width, "num_hidden_layers": 1, **self.text}
        return {"model_type": self.model_type, "text_config": text, "vision_config": dict(self.vision), **self.fields}
