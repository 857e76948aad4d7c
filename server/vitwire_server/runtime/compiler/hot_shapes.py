"""Forwards compiled for static shapes: frequent shapes on CPU, a tower's blocks during graph capture on CUDA."""

import importlib.util
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from threading import Lock, Thread
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from vitwire_server.runtime.compiler.child import Compiler, CompilerGone, NotCompiled
from vitwire_server.runtime.compiler.messages import (
    FUNCTION,
    Blueprint,
    Compile,
    Compiled,
    Factory,
    Layout,
    Source,
    named_inputs,
    named_tensors,
)
from vitwire_server.runtime.precision.similarity import norm_errors
from vitwire_server.towers.metadata import Capacity
from vitwire_server.towers.tower import Metadata, Tower

_log = logging.getLogger(__name__)
_MOST_COUNTED = 1024
_REPEATS = 5
_GAIN = 1.05
_EPSILONS, _LEAST_ERROR = 8, 1e-3
"""Relative error of a row that rounding may explain, in units of the tower's precision, and at least."""
_COMPILE_SECONDS = 4 * 3600.0
"""Most time for one shape: the compiler only gets what busy cores leave. Its processor time is limited too."""
_IDLE_SECONDS = 60.0
"""After which a compiler without work ends."""
_ADDRESS = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
"""Variable with the address of a function that such modules look up when they are imported."""


class Program:
    """The forward for one shape. It runs without the interpreter's lock and shares the tower's weights."""

    def __init__(self, request: Compile, compiled: Compiled, tensors: Mapping[str, Tensor]) -> None:
        """Import the module, whose file may be removed afterwards.

        tensors: the tower's, by the names of `named_tensors`.

        Raises ImportError if this version of torch has other names for the private functions that call such modules,
        and whatever a broken module raises.
        """
        self._request = request
        constants: dict[str, Tensor] = torch.load(compiled.constants, weights_only=True) if compiled.constants else {}
        held = {Source.TENSOR: tensors, Source.CONSTANT: constants}
        self.arguments: list[Tensor | str] = [
            name if source is Source.INPUT else held[source][name] for source, name in compiled.arguments
        ]
        """In order; for an input of the batch, its name."""
        from torch._C._aoti import (  # noqa: PLC0415 - a server must start without them
            alloc_tensors_by_stealing_from_void_ptrs,
            unsafe_alloc_void_ptrs_from_tensors,
        )

        self._given, self._taken = unsafe_alloc_void_ptrs_from_tensors, alloc_tensors_by_stealing_from_void_ptrs
        self._call = _imported(Path(compiled.library))

    def fits(self, pixels: Tensor, metadata: Metadata) -> bool:
        """Whether the forward was compiled for inputs of these layouts."""
        wanted = self._request
        inputs = named_inputs(pixels, metadata)
        return metadata.bounds == wanted.bounds and {k: Layout.of(v) for k, v in inputs.items()} == wanted.inputs

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        """As `Tower.forward`, for a batch that fits. Raises RuntimeError."""
        inputs = named_inputs(pixels, metadata)
        arguments = [inputs[each] if isinstance(each, str) else each for each in self.arguments]
        # The module takes over the handles, and returns handles for this process to take over.
        (rows,) = self._taken(self._call(self._given(arguments)))
        return rows


def _imported(library: Path) -> Callable[[list[Any]], list[Any]]:
    """The function of a module, which is not entered in `sys.modules`."""
    from torch._C._dynamo.guards import (  # type: ignore[attr-defined]  # noqa: PLC0415 - as above
        _torchinductor_pyobject_tensor_data_ptr,
    )

    os.environ[_ADDRESS] = str(_torchinductor_pyobject_tensor_data_ptr)  # as torch does
    spec = importlib.util.spec_from_file_location(f"{library.stem}.{FUNCTION}", library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library.name} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[list[Any]], list[Any]] = getattr(module, FUNCTION)
    return function


class HotShapes:
    """Compiles forwards for frequent shapes.

    After `hits` batches of a shape, a process compiles its forward while batches run eagerly; it is used from then on
    if its rows are as close as rounding allows, and if it is faster. At most `most` shapes are compiled. `forward`
    belongs to the engine thread.
    """

    def __init__(self, tower: Tower, factory: Factory, *, hits: int = 32, most: int = 8) -> None:
        """`factory` makes the tower in the process, without its weights."""
        self._tower = tower
        self._factory = factory
        self._hits = hits
        self._most = most
        self._counts: Counter[Capacity] = Counter()
        self._requested: set[Capacity] = set()
        self._programs: dict[Capacity, Program] = {}
        self._work: SimpleQueue[Metadata | None] = SimpleQueue()
        """None once closed."""
        self._compiler: Compiler | None = None
        self._lock = Lock()
        """Of the compiler's start, so that none starts after `close`."""
        self._closed = False
        Thread(target=self._compile_all, name="compiling", daemon=True).start()

    @property
    def ready(self) -> frozenset[Capacity]:
        """Shapes with a compiled forward in use."""
        return frozenset(self._programs)

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        """As `Tower.forward`, compiled if the shape is ready; never waits for a compilation."""
        shape = metadata.capacity
        program = self._programs.get(shape)
        if program is None:
            self._count(metadata)
        elif program.fits(pixels, metadata):
            try:
                return program.forward(pixels, metadata)
            except RuntimeError as error:
                del self._programs[shape]
                _log.warning("the compiled forward for %s failed, and is not used any more: %s", shape, error)
        return self._tower.forward(pixels, metadata)

    def close(self) -> None:
        """End the compiler, if there is one, at once; what is compiled stays in use."""
        self._closed = True
        self._work.put(None)
        with self._lock:
            if self._compiler:
                self._compiler.close()

    def _count(self, metadata: Metadata) -> None:
        shape = metadata.capacity
        if shape in self._requested or len(self._requested) >= self._most:
            return
        self._counts[shape] += 1
        if self._counts[shape] >= self._hits:
            self._requested.add(shape)
            self._work.put(metadata)
        if len(self._counts) > _MOST_COUNTED:
            self._counts = Counter(dict(self._counts.most_common(_MOST_COUNTED // 2)))

    def _compile_all(self) -> None:
        while not self._closed:
            try:
                metadata = self._work.get(timeout=_IDLE_SECONDS if self._compiler else None)
            except Empty:
                self._end_compiler()
                continue
            if metadata is None:
                return
            try:
                self._compile(metadata)
            except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; the shape stays eager
                if isinstance(error, CompilerGone):
                    self._end_compiler()
                if not self._closed:
                    reason = str(error).partition("\n")[0]
                    _log.warning("cannot compile the forward for %s: %s", metadata.capacity, reason)

    @torch.inference_mode()
    def _compile(self, metadata: Metadata) -> None:
        start = time.perf_counter()
        pixels, metadata = self._sample(metadata)
        inputs = {name: Layout.of(tensor) for name, tensor in named_inputs(pixels, metadata).items()}
        request = Compile(metadata.capacity, metadata.bounds, inputs)
        compiled = self._started().compile(request, _COMPILE_SECONDS)
        program = Program(request, compiled, named_tensors(self._tower))
        took = time.perf_counter() - start
        self._check(program, pixels, metadata)
        eager, fast = self._seconds(program, pixels, metadata)
        used = fast * _GAIN < eager
        if used:
            self._programs[metadata.capacity] = program
        verdict = "used" if used else "not used, since not faster"
        _log.info("compiled %d patches in %.0f s: %.2f times eager, %s", len(pixels), took, eager / fast, verdict)

    def _sample(self, metadata: Metadata) -> tuple[Tensor, Metadata]:
        """A batch like this one, which may still run, with random pixels: what clients sent decides nothing here."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self._tower.dtype)

        crops = None if metadata.crops is None else random(*metadata.crops.shape)
        return random(metadata.capacity.patches, self._tower.geometry.row), replace(metadata, crops=crops)

    def _check(self, program: Program, pixels: Tensor, metadata: Metadata) -> None:
        """Raises NotCompiled if a row is further from the eager one than rounding explains."""
        eager, fast = (forward(pixels, metadata) for forward in (self._tower.forward, program.forward))
        most = max(_EPSILONS * torch.finfo(eager.dtype).eps, _LEAST_ERROR)
        error = float(norm_errors(eager, fast, 1 + self._tower.geometry.levels).max())
        if not error <= most:  # also for NaN
            raise NotCompiled(f"its rows differ from eager ones, by a norm error of {error:.6f}")

    def _seconds(self, program: Program, pixels: Tensor, metadata: Metadata) -> tuple[float, float]:
        """Of an eager forward and of a compiled one, which take turns."""
        taken: tuple[list[float], list[float]] = ([], [])
        for _ in range(_REPEATS):
            for forward, times in zip((self._tower.forward, program.forward), taken, strict=True):
                start = time.perf_counter()
                forward(pixels, metadata)
                times.append(time.perf_counter() - start)
        return median(taken[0]), median(taken[1])

    def _started(self) -> Compiler:
        """The compiler. Raises CompilerGone."""
        with self._lock:
            if self._closed:
                raise CompilerGone("the server stops")
            if self._compiler is None:
                layouts = {name: Layout.of(tensor) for name, tensor in named_tensors(self._tower).items()}
                self._compiler = Compiler(Blueprint(self._factory, layouts, torch.get_num_threads(), sys.path))
            return self._compiler

    def _end_compiler(self) -> None:
        with self._lock:
            if self._compiler:
                self._compiler.close()
            self._compiler = None


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
