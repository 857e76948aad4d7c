"""Fused layers in the place of stock ones, each compared with the stock layer before it is used."""

import logging
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from triton import TritonError

from vitwire_server.runtime.attention.selection import Selection
from vitwire_server.runtime.fused.layers import Block, Layer, NotFusable, PackedLayer, Shared, TileLayer
from vitwire_server.runtime.fused.surroundings import hasten_mergers, hasten_positions
from vitwire_server.runtime.products.tuned import Products
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
_UNITS, _TOKENS = 2, 24
"""Units and tokens of the random rows that a fused layer is compared on."""
_LEAST_FACTOR = 1e-3
"""Smaller rows would be lost in the epsilon of norms."""
_TOLERANCE_ULPS = 4
"""Accepted relative difference to the stock layer, in units in the last place."""
_FLOAT32_TOLERANCE = 1e-5
"""Accepted relative difference from summing in another order in float32."""


class KernelFailed(NotFusable):
    """A layer has a supported form, but Triton or the device failed; the message says how."""


def fuse_tower(tower: Tower, attention: Selection | None) -> int:
    """Fuse the layers of a tower on CUDA; returns their number. `attention` is None for towers of tiles."""
    fused = fuse(tower.blocks, attention)
    if attention:
        hasten_mergers(tower.model, tower.blocks)
        hasten_positions(tower.model)
    return fused


@torch.inference_mode()
def fuse(layers: Sequence[nn.Module], attention: Selection | None) -> int:
    """Replace the forward of layers that can be fused; returns their number. Without `attention`, they are of tiles."""
    shared, reasons = Shared(Products()), set()
    fused: list[TileLayer | PackedLayer | None] = []
    blocks = attention is not None and all(hasattr(layer, "attn") for layer in layers)
    for stock in layers:
        first = not any(fused)
        fused.append(None)
        try:
            layer: TileLayer | PackedLayer = (
                (Block if blocks else PackedLayer)(stock, attention, shared, first=first)
                if attention
                else TileLayer(stock, shared, first=first)
            )
            errors = _differences(stock, layer)
        except NotFusable as fault:
            if (reason := f"{type(stock).__name__}: {fault}") not in reasons:
                level = logging.WARNING if isinstance(fault, KernelFailed) else logging.INFO
                _log.log(level, "layers are not fused: %s", reason)
            reasons.add(reason)
            continue
        tolerance = max(_FLOAT32_TOLERANCE, _TOLERANCE_ULPS * torch.finfo(next(stock.parameters()).dtype).eps)
        if not all(each <= tolerance for each in errors):  # False for NaN
            _log.warning("fused %s is not used: relative errors %s", type(stock).__name__, errors)
            continue
        stock.forward = layer.__call__
        fused[-1] = layer
    for one, following in pairwise(fused):
        if one and following:
            one.parts.precede(following.parts)
    return sum(layer is not None for layer in fused)


def _differences(stock: nn.Module, layer: Layer) -> list[float]:
    """Relative errors, in norm, of what the layer adds to random rows, compared with the stock layer.

    Rows are as small as what is added to them, whose error their rounding would hide. Raises NotFusable.
    """
    known = layer.known_arguments
    if known is not None and (others := layer.form.unknown_arguments(stock, known)):
        raise NotFusable(f"it takes {', '.join(others)}")
    weight = next(stock.parameters())
    rows = torch.randn(_UNITS, _TOKENS, layer.parts.columns, generator=torch.Generator().manual_seed(0)).to(weight)
    rows *= min([1.0, *(max(_LEAST_FACTOR, float(each.abs().mean())) for each in layer.parts.factors)])
    try:
        pairs = layer.compared(stock, rows)
    except (RuntimeError, TritonError, TypeError, ValueError, AttributeError) as error:
        kind = KernelFailed if isinstance(error, RuntimeError | TritonError) else NotFusable
        raise kind(str(error).partition("\n")[0] or type(error).__name__) from error
    errors = []
    for expected, got in pairs:
        if not isinstance(expected, Tensor):
            raise NotFusable(f"it returns a {type(expected).__name__}")
        added = expected.float() - rows.float()
        errors.append(float((got.float() - rows.float() - added).norm() / added.norm()))
    return errors
