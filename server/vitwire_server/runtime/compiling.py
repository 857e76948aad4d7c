"""torch.compile for static shapes: frequent shapes on CPU, a tower's blocks during graph capture on CUDA."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from statistics import median
from threading import Thread
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor

from vitwire_server.runtime.toolchain import idle_compiler
from vitwire_server.towers.metadata import Capacity
from vitwire_server.towers.tower import Metadata, Tower

_log = logging.getLogger(__name__)
_MOST_COUNTED = 1024
_REPEATS = 5
_GAIN = 1.05
_MOMENT = 0.001

Forward = Callable[[Tensor, Metadata], Tensor]


class HotShapes:
    """Compiles forwards, with frozen weights, for frequent shapes.

    After `hits` batches of a shape, its forward is compiled on the compiling thread while batches run eagerly, and used
    from then on if it is faster. At most `most` shapes are compiled. `forward` belongs to the engine thread.
    """

    def __init__(self, tower: Tower, *, hits: int = 32, most: int = 8) -> None:
        self._tower = tower
        self._hits = hits
        self._most = most
        self._counts: Counter[Capacity] = Counter()
        self._requested: set[Capacity] = set()
        self._ready: dict[Capacity, Forward] = {}
        self._work: SimpleQueue[tuple[Tensor, Metadata]] = SimpleQueue()
        self._begun = self._ended = 0
        """Numbers of compilations begun and ended; while they differ, the compiling thread may be tracing."""
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * most)  # noqa: SLF001
        torch._dynamo.config.error_on_nested_fx_trace = False  # noqa: SLF001 - the same forward runs eagerly meanwhile
        Thread(target=self._compile_all, name="compiling", daemon=True).start()

    @property
    def ready(self) -> frozenset[Capacity]:
        """Shapes with a compiled forward in use."""
        return frozenset(self._ready)

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        """As `Tower.forward`, compiled if the shape is ready; never waits for a compilation."""
        shape = metadata.capacity
        compiled = self._ready.get(shape)
        if compiled is None:
            self._count(shape, pixels, metadata)
        return self._retrying(compiled or self._tower.forward, pixels, metadata)

    def _retrying(self, forward: Forward, pixels: Tensor, metadata: Metadata) -> Tensor:
        """Run the forward, again if tracing on the compiling thread breaks it.

        torch.fx traces by patching the calls of all modules in all threads; for moments, calls outside of the trace
        then raise NameError.
        """
        while True:
            ended = self._ended
            try:
                return forward(pixels, metadata)
            except NameError:
                if self._begun == ended:
                    raise
                time.sleep(_MOMENT)

    def _count(self, shape: Capacity, pixels: Tensor, metadata: Metadata) -> None:
        if shape in self._requested or len(self._requested) >= self._most:
            return
        self._counts[shape] += 1
        if self._counts[shape] >= self._hits:
            self._requested.add(shape)
            self._work.put((pixels, metadata))
        if len(self._counts) > _MOST_COUNTED:
            self._counts = Counter(dict(self._counts.most_common(_MOST_COUNTED // 2)))

    def _compile_all(self) -> None:
        while True:
            pixels, metadata = self._work.get()
            self._begun += 1
            try:
                self._compile(pixels, metadata)
            except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; the shape stays eager
                _log.warning("cannot compile the forward for %s: %s", metadata.capacity, str(error).partition("\n")[0])
            finally:
                self._ended += 1

    @torch.inference_mode()
    def _compile(self, pixels: Tensor, metadata: Metadata) -> None:
        start = time.perf_counter()
        compiled: Forward = torch.compile(self._tower.forward, dynamic=False)
        # Weights never change here; C++ is compiled by one process at a time, which leaves busy cores to the batches.
        settings = {"freezing": True, "compile_threads": 1, "cpp.cxx": (None, idle_compiler())}
        with torch._inductor.config.patch(settings):  # noqa: SLF001 - torch.compile's options have no compiler
            compiled(pixels, metadata)
        took = time.perf_counter() - start
        eager, fast = (_seconds(forward, pixels, metadata) for forward in (self._tower.forward, compiled))
        used = fast * _GAIN < eager
        if used:
            self._ready[metadata.capacity] = compiled
        verdict = "used" if used else "not used, since not faster"
        _log.info("compiled %d patches in %.0f s: %.2f times eager, %s", len(pixels), took, eager / fast, verdict)


def _seconds(forward: Forward, pixels: Tensor, metadata: Metadata) -> float:
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        forward(pixels, metadata)
        taken.append(time.perf_counter() - start)
    return median(taken)


@contextmanager
def compiled_blocks(tower: Tower) -> Iterator[None]:
    """Compile calls of the tower's blocks within the block, for static shapes.

    It surrounds graph capture, so that graphs have compiled kernels while eager forwards, whose shapes vary, do not.
    """
    blocks: list[Any] = list(tower.blocks)
    torch._dynamo.config.recompile_limit = 256  # noqa: SLF001 - one compilation per budget
    for block in blocks:
        block.compile(dynamic=False)
    try:
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None  # noqa: SLF001 - undoes Module.compile, which has no inverse
