"""The forms of layers that can be fused: norm, attention, add, norm, MLP, add, under several names."""

from collections.abc import Set
from dataclasses import dataclass
from inspect import signature

from torch import nn

from vitwire_server.runtime.fused.mlps import IDLE

_ARGUMENTS = ("hidden_states", "attention_mask", "position_embeddings")
"""Of a layer's forward, in their order; the last ones may be missing."""
_SEPARATE = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Form:
    """The names that a kind of layer has for its parts."""

    norms: tuple[str, str]
    attention: str
    output: str
    mlp: str = "mlp"
    factors: tuple[str, ...] = ()
    """Paths of the factors `(hidden,)` of what attention and the MLP add."""
    projections: tuple[str, ...] = _SEPARATE
    """The layers for queries, keys and values."""

    def fits(self, layer: nn.Module) -> bool:
        """Whether a layer has these parts and no others that compute something."""
        parts = dict(layer.named_children())
        named = {*self.norms, self.attention, self.mlp}
        if not named <= parts.keys():
            return False
        inner = dict(parts[self.attention].named_children())
        wanted = {self.output, *self.projections}
        beside = parts.keys() - named - {path.split(".")[0] for path in self.factors}
        extras = inner.keys() - wanted - {"q_norm", "k_norm"}
        return wanted <= inner.keys() and all(map(_is_idle, (*map(parts.get, beside), *map(inner.get, extras))))

    def unknown_arguments(self, layer: nn.Module, known: Set[str]) -> list[str]:
        """Arguments other than the usual ones in their order, or of attention beside rows, mask and what is `known`.

        Layers pass arguments on to attention by keyword, also such as they do not name themselves.
        """
        taken = [name for name in signature(layer.forward).parameters if name != "kwargs"]
        if taken != list(_ARGUMENTS[: len(taken)]):
            return taken
        inner = signature(layer.get_submodule(self.attention).forward).parameters.keys()
        return sorted(inner - {*_ARGUMENTS[:2], "kwargs"} - (known & {*taken, "cu_seqlens"}))


def _is_idle(part: nn.Module | None) -> bool:
    return isinstance(part, IDLE) or type(part).__name__.endswith("DropPath")


PLAIN = Form(("layer_norm1", "layer_norm2"), "self_attn", "out_proj")
ROTARY = Form(("attention_norm", "ffn_norm"), "attention", "o_proj", mlp="feed_forward")
"""Pixtral."""
OF_TILES = (
    PLAIN,
    Form(("layer_norm1", "layer_norm2"), "self_attn", "projection_layer"),
    Form(("layernorm_before", "layernorm_after"), "attention", "o_proj"),
    Form(("layernorm_before", "layernorm_after"), "attention", "projection_layer", factors=("lambda_1", "lambda_2")),
    Form(("norm1", "norm2"), "attention", "o_proj", factors=("layer_scale1.lambda1", "layer_scale2.lambda1")),
    Form(("rms_norm1", "rms_norm2"), "attention", "out_proj", mlp="ffn"),
)
"""CLIP and SigLIP, Janus, ViT, InternVL, DINOv2, AIMv2."""
OF_BLOCKS = tuple(
    Form(("norm1", "norm2"), "attn", "proj", projections=each) for each in (("qkv",), _SEPARATE, ("q", "k", "v"))
)
"""Qwen's blocks, and those that take the same arguments."""
