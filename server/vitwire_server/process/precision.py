"""`--precision fp8`: the tower's layers in float8, compared with bfloat16 before anything is served."""

import hashlib
import logging
from collections.abc import Callable

import torch

from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.budgets import Ladder
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.models import Precision
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import GraphSet, SimulatedRecorder
from vitwire_server.runtime.kernels.operands import FLOAT8
from vitwire_server.runtime.memory.streams import Streams
from vitwire_server.runtime.precision.float8 import device_fault, reduce
from vitwire_server.runtime.precision.similarity import Comparison
from vitwire_server.runtime.staging import Stager
from vitwire_server.runtime.toolchain import triton_fault
from vitwire_server.towers.files import CheckpointError
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
_TYPE = str(FLOAT8).removeprefix("torch.")


def compute_dtype(settings: ServeSettings, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The tower's dtype for a checkpoint of `stored`. Raises UsageError if the device has no float8."""
    if settings.precision == "fp8":
        if fault := device_fault(device) or (triton_fault() if device.type == "cuda" else ""):
            raise UsageError(f"--precision fp8: {fault}; serve without it")
        return torch.bfloat16
    chosen: torch.dtype = stored if settings.dtype == "auto" else getattr(torch, settings.dtype)
    return chosen


def reduce_precision(
    tower: Tower, stager: Stager, streams: Streams, *, floor: float, finish: Callable[[], None]
) -> Precision:
    """Reduce the tower's layers to float8, then call `finish`, which fuses them, and compare rows with those before.

    Raises UsageError if a row is less similar than `floor`, or if no layer can be reduced.
    """
    engine = Engine(tower, GraphSet(tower, Ladder(), SimulatedRecorder()), stager, streams)
    try:
        comparison = Comparison(tower, engine)
    except EncoderError as error:
        raise CheckpointError(f"the forward of a test picture failed: {error}") from error
    layers = sum(reduce(block) for block in tower.blocks)
    if not layers:
        raise UsageError("--precision fp8: no linear layer of this tower can be computed in float8; serve without it")
    if tower.device.type == "cuda":
        torch.cuda.empty_cache()
    finish()
    similarities = comparison.similarities()
    least, median = float(similarities.min()), float(similarities.median())
    rows = f"{len(similarities)} rows of test pictures, cosine to bfloat16: least {least:.5f}, median {median:.5f}"
    _log.info("%d linear layers in %s; %s", layers, _TYPE, rows)
    if not least >= floor:  # also for NaN
        raise UsageError(
            f"--precision-floor {floor}: with --precision fp8, the cosine similarity of the worst row to bfloat16 is "
            f"{least:.5f} (median {median:.5f}); serve without --precision fp8, or lower the floor if this is enough"
        )
    return Precision(_TYPE, layers, least, median)


def fingerprint(weights: str, precision: Precision | None) -> str:
    """The fingerprint that clients and caches know embeddings by: those of another precision are not mixed."""
    return hashlib.sha256(f"{weights} {precision.type}".encode()).hexdigest() if precision else weights
