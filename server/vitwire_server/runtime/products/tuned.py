"""The products of a tower, each in the way that was fastest for its number of rows.

While a forward is recorded, the algorithms that cuBLASLt proposes, and quack's kernels if it is installed, are timed on
the weights of all blocks, which are more than the device's cache holds, against what torch would take; the fastest one
that is as accurate is kept, also on disk. A forward that is captured while batches run takes the choices for more
rows. Eager forwards take torch's. Used on the engine thread.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from vitwire_server.runtime.graph_recording import is_recording, is_tuning
from vitwire_server.runtime.products.choices import Choices
from vitwire_server.runtime.products.cublaslt import Algorithm, CublasLt, CublasLtError, Epilogue
from vitwire_server.runtime.products.quack_tiles import NAME, Plan, Quack, quack_on
from vitwire_server.runtime.products.trials import cold_seconds, exact_product, relative_error

_log = logging.getLogger(__name__)
Linear: TypeAlias = tuple[Tensor, Tensor | None]
"""Weight and bias of a linear layer."""
_TUNED = (torch.bfloat16, torch.float16)
_MOST_ERROR = 1.1
"""Accepted error, relative to that of torch's product."""


@dataclass(frozen=True, slots=True)
class _Size:
    """The properties on which the speed of a product depends."""

    rows: int
    columns: int
    depth: int
    dtype: torch.dtype
    epilogue: Epilogue
    accumulates: bool = False

    @property
    def name(self) -> str:
        """For the log and the file of choices."""
        then = "+=" if self.accumulates else self.epilogue.name.lower()
        return f"{self.rows}x{self.depth}x{self.columns} {str(self.dtype).removeprefix('torch.')} {then}"


@dataclass(slots=True)
class Products:
    """Products with the weights of one tower, for one stream at a time."""

    _weights: dict[tuple[int, ...], list[Tensor]] = field(default_factory=dict)
    """By shape."""
    _algorithms: dict[_Size, Algorithm | Plan | None] = field(default_factory=dict)
    _library: CublasLt | None = None
    _quack: Quack | None = None
    _choices: Choices | None = None
    _unavailable: bool = False

    def register(self, *weights: Tensor) -> None:
        """Count `weights` among those that products are timed on."""
        for weight in weights:
            self._weights.setdefault(tuple(weight.shape), []).append(weight)

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool = False) -> Tensor:
        """`rows (count, depth)` by `weight (columns, depth)`, with tanh GELU if wanted, which needs a bias."""
        if is_recording() and (algorithm := self._algorithm(rows, weight, _epilogue(bias, gelu=gelu))):
            out = rows.new_empty(len(rows), len(weight))
            algorithm.run(rows, weight, bias, out)
            return out
        return _linear(rows, weight, bias, gelu=gelu)

    def add(self, hidden: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        """`hidden` with `rows` by `weight` added in place."""
        if is_recording() and (algorithm := self._algorithm(rows, weight, Epilogue.NONE, accumulates=True)):
            algorithm.run(rows, weight, None, hidden)
            return hidden
        return hidden.addmm_(rows, weight.t())

    def _tunes(self, rows: Tensor, weight: Tensor) -> bool:
        """Whether this product may be tuned."""
        return (
            not self._unavailable
            and rows.is_cuda
            and rows.dtype in _TUNED
            and rows.is_contiguous()
            and tuple(weight.shape) in self._weights
            and weight.is_contiguous()
        )

    def _algorithm(
        self, rows: Tensor, weight: Tensor, epilogue: Epilogue, *, accumulates: bool = False
    ) -> Algorithm | Plan | None:
        if not self._tunes(rows, weight):
            return None
        size = _Size(len(rows), *_sides(weight), rows.dtype, epilogue, accumulates)
        if size not in self._algorithms:
            self._algorithms[size] = self._chosen(size, rows.device) if is_tuning() else self._taken_over(size, weight)
        return self._algorithms[size]

    def _taken_over(self, size: _Size, weight: Tensor) -> Algorithm | Plan | None:
        """The choice for more rows, if it can be used for these.

        In the place of torch's product, which may need a kernel that is not loaded yet, it is the library's proposal.
        """
        larger = _with_more_rows(self._algorithms, size)
        if larger is None or self._library is None:
            return None
        choice = self._algorithms[larger] or next(
            iter(self._library.proposals(larger.rows, weight, size.epilogue, accumulates=size.accumulates)), None
        )
        return choice.resized(size.rows, weight) if choice else None

    def _chosen(self, size: _Size, device: torch.device) -> Algorithm | Plan | None:
        weights = self._weights[size.columns, size.depth]
        try:
            if self._library is None:
                self._library = CublasLt(device)
                self._quack = quack_on(device)
            proposals = self._library.proposals(size.rows, weights[0], size.epilogue, accumulates=size.accumulates)
        except (OSError, CublasLtError) as error:
            _log.warning("products take torch's algorithms: %s", error)
            self._unavailable = self._library is None
            return None
        if self._choices is None:
            others = (f"{NAME}{self._quack.version}",) if self._quack else ()
            self._choices = Choices.of(device, str(self._library.version), *others)
        known = self._choices.get(size.name)
        ways: list[Algorithm | Plan] = [*proposals]
        supported = size.accumulates or size.epilogue is not Epilogue.NONE
        if self._quack and supported and (known is None or known.startswith(NAME)):
            ways += self._quack.plans(size.rows, weights[0], size.epilogue)  # compiles
        if known is not None:
            return next((each for each in ways if each.name == known), None)
        fastest = self._fastest(size, ways, weights, device)
        self._choices.put(size.name, fastest.name if fastest else "")
        return fastest

    def _fastest(
        self, size: _Size, proposals: Sequence[Algorithm | Plan], weights: Sequence[Tensor], device: torch.device
    ) -> Algorithm | Plan | None:
        """The fastest of `proposals`; None if torch's product is faster."""
        generator = torch.Generator(device).manual_seed(0)
        rows = torch.randn(size.rows, size.depth, generator=generator, device=device, dtype=size.dtype)
        bias = None
        if size.epilogue is not Epilogue.NONE:
            bias = torch.randn(size.columns, generator=generator, device=device, dtype=size.dtype)
        out = rows.new_zeros(size.rows, size.columns)
        gelu = size.epilogue is Epilogue.BIAS_TANH_GELU

        def torch_way(weight: Tensor) -> None:
            if size.accumulates:
                out.addmm_(rows, weight.t())
            else:
                _linear(rows, weight, bias, gelu=gelu)

        exact = exact_product(rows, weights[0], bias, gelu=gelu)
        most = _MOST_ERROR * relative_error(_linear(rows, weights[0], bias, gelu=gelu), exact)
        best, least = None, cold_seconds(torch_way, weights)
        for proposal in proposals:
            try:
                proposal.run(rows, weights[0], bias, out.zero_())
                if not relative_error(out, exact) <= most:
                    continue
                taken = cold_seconds(lambda weight, own=proposal: own.run(rows, weight, bias, out), weights)  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - quack may fail in any way
                _log.debug("%s: an algorithm failed: %s", size.name, error)
                continue
            if taken < least:
                best, least = proposal, taken
        return best


def _with_more_rows(sizes: Iterable[_Size], size: _Size) -> _Size | None:
    """The same size with the next larger number of rows; None if there is none."""
    larger = [each for each in sizes if each.rows > size.rows and replace(each, rows=size.rows) == size]
    return min(larger, key=lambda each: each.rows, default=None)


def _sides(weight: Tensor) -> tuple[int, int]:
    columns, depth = weight.shape
    return columns, depth


def _epilogue(bias: Tensor | None, *, gelu: bool) -> Epilogue:
    if gelu:
        return Epilogue.BIAS_TANH_GELU
    return Epilogue.NONE if bias is None else Epilogue.BIAS


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool) -> Tensor:
    if gelu:
        assert bias is not None
        # cuBLAS applies the bias and tanh GELU to its float32 sums.
        return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)  # noqa: SLF001
    return functional.linear(rows, weight, bias)
