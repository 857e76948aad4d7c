"""Grouped queries: attention here needs as many key heads as query heads, so shared heads are copied at load."""

from torch import Tensor

from vitwire_server.towers.configs import Config, changed

SHARED_BY = "queries_of_a_key"
"""Field of a tower's changed configuration: how many query heads share a key head."""


def ungrouped(config: Config, path: str = "vision_config.") -> Config:
    """A configuration whose tower has as many key heads as query heads. Raises AttributeError or ZeroDivisionError."""
    own = getattr(config, path.rstrip("."))
    return changed(
        config,
        {
            f"{path}{SHARED_BY}": own.num_attention_heads // own.num_key_value_heads,
            f"{path}num_key_value_heads": own.num_attention_heads,
        },
    )


def copied(rows: Tensor, config: Config) -> Tensor:
    """Rows of a key or value projection, each head as often as queries share it; `config` is the changed tower's."""
    side = config.hidden_size // config.num_attention_heads
    heads: Tensor = rows.unflatten(0, (-1, side))
    return heads.repeat_interleave(getattr(config, SHARED_BY), dim=0).flatten(0, 1)
