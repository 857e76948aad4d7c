"""Products by quack's kernels for Hopper, with the bias and tanh GELU, or a sum, in their epilogue.

quack comes with flash attention 4. Its kernels were faster than cuBLAS for most products from 3136 rows on (H100 and
H200). A release of quack that differs is not used. Used on the engine thread.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from vitwire_server.runtime.devices import architecture
from vitwire_server.runtime.kernels.launching import cute_cache
from vitwire_server.runtime.products.cublaslt import Epilogue

_log = logging.getLogger(__name__)

NAME = "quack"
"""Names of its plans begin with it."""
_HOPPER = 9
_LEAST_ROWS = 1024
"""At 196 and 784 rows cuBLASLt was faster; between 784 and 3136 nothing was measured."""
_ALIGNED = 8
"""Columns and inputs must be a multiple of this many values, 16 bytes."""
_NOT_USED = "quack's products are not used: %r"


@dataclass(frozen=True, slots=True)
class ClusterTile:
    """A tile of the result, or of its transpose; the programs of a cluster share their inputs."""

    rows: int
    columns: int
    cluster: tuple[int, int]
    transposed: bool = False

    def __str__(self) -> str:
        """For the file of choices."""
        name = "{} {}x{} {}x{}".format(NAME, self.rows, self.columns, *self.cluster)
        return f"{name} transposed" if self.transposed else name

    def work(self, rows: int, columns: int, processors: int) -> int:
        """Values that the multiprocessor with most tiles computes, also those outside of the result."""
        sides = (columns, rows) if self.transposed else (rows, columns)
        down, across = (
            -(-side // (each * shared)) * shared
            for side, each, shared in zip(sides, (self.rows, self.columns), self.cluster, strict=True)
        )
        return -(-down * across // processors) * self.rows * self.columns


TILES = (
    ClusterTile(128, 192, (2, 1)),
    ClusterTile(128, 144, (1, 2)),
    ClusterTile(192, 112, (1, 2), transposed=True),
    ClusterTile(128, 224, (1, 2), transposed=True),
)
_TIMED = 2
"""Tiles with the least work, which are timed."""
_MOST_IN_TURNS = 208
"""Columns up to which a program computes one of two tiles while it stores the other."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled kernel for products with weights of one size."""

    name: str
    launch: Any

    def run(self, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Compute `out` on the current stream, or without a bias add to it; all are contiguous."""
        self.launch.run(rows, weight.mT, out={"D": out}, **_operands(bias, out))

    def resized(self, rows: int, weight: Tensor) -> "Plan":
        """The same: kernels are compiled for any number of rows."""
        del rows, weight
        return self


def _operands(bias: Tensor | None, out: Tensor) -> dict[str, Tensor]:
    """Operands of the epilogue: the bias, or without one the result that is added to."""
    return {"C": out} if bias is None else {"bias": bias[None]}


class Quack:
    """The installed quack."""

    def __init__(self) -> None:
        """Raises whatever a release that differs raises."""
        frontend = import_module("quack.epilogue.frontend")
        cute_cache()
        bias = import_module("quack.epilogue.ops").RowVecLoad
        release = version("quack-kernels")
        self.version = f"{release}-{crc32(repr(TILES).encode()):08x}"
        """Release and tiles, as they name the file of choices."""
        self._config = import_module("quack.gemm_config").GemmConfig
        gelu = _Gelu(import_module("quack.activation").gelu_tanh_approx, release)

        def plain(acc: Any, bias: Any) -> dict[str, Any]:  # noqa: ANN401 - quack traces it
            return {"D": acc + bias}

        def activated(acc: Any, bias: Any) -> dict[str, Any]:  # noqa: ANN401 - quack traces it
            return {"D": gelu(acc + bias)}

        def summed(acc: Any, c: Any) -> dict[str, Any]:  # noqa: ANN401 - quack traces it
            return {"D": acc + c}

        self._kernels = {
            Epilogue.BIAS: frontend.gemm_epilogue(ops={"bias": bias("bias")})(plain),
            Epilogue.BIAS_TANH_GELU: frontend.gemm_epilogue(ops={"bias": bias("bias")})(activated),
            Epilogue.NONE: frontend.gemm_epilogue(ops={})(summed),
        }

    def plans(self, rows: int, weight: Tensor, epilogue: Epilogue) -> list[Plan]:
        """Compiled kernels for `rows` by `weight (columns, depth)`; none if others are faster, or if quack fails.

        Those without an epilogue add to the result.
        """
        kernel = self._kernels.get(epilogue)
        columns, depth = weight.shape
        if kernel is None or rows < _LEAST_ROWS or columns % _ALIGNED or depth % _ALIGNED:
            return []
        sample, out = weight.new_empty(rows, depth), weight.new_empty(rows, columns)
        bias = None if epilogue is Epilogue.NONE else weight.new_empty(columns)
        processors = architecture(weight.device).processors
        tiles = sorted(TILES, key=lambda tile: tile.work(rows, columns, processors))[:_TIMED]
        given: dict[str, Any] = {"out": {"D": out}, **_operands(bias, out)}
        try:
            plans = [
                Plan(str(tile), kernel.plan(sample, weight.mT, config=self._configured(tile), **given))
                for tile in tiles
            ]
            for plan in plans:
                plan.run(sample, weight, bias, out)
        except Exception as error:  # noqa: BLE001 - another package's compiler may fail in any way
            _log.warning(_NOT_USED, error)
            self._kernels.clear()
            return []
        return plans

    def _configured(self, tile: ClusterTile) -> object:
        tall, wide = tile.cluster
        sizes = {"tile_m": tile.rows, "tile_n": tile.columns, "cluster_m": tall, "cluster_n": wide}
        kind = {"pingpong": tile.columns <= _MOST_IN_TURNS, "swap_ab": tile.transposed}
        return self._config(**sizes, **kind, is_dynamic_persistent=False, device_capacity=_HOPPER)


class _Gelu:
    """quack's tanh GELU, under a name for its cache: quack cannot fingerprint it with cutlass-dsl 4.8."""

    def __init__(self, function: Callable[[Any], Any], release: str) -> None:
        self._function, self._release = function, release

    def __call__(self, value: Any) -> Any:  # noqa: ANN401 - quack traces it
        return self._function(value)

    def __quack_semantic_key__(self) -> tuple[str, str]:
        return "tanh gelu", self._release


def quack_on(device: torch.device) -> Quack | None:
    """quack, if it is installed and has kernels for this device."""
    if torch.cuda.get_device_capability(device)[0] != _HOPPER or find_spec(NAME) is None:
        return None
    try:
        return Quack()
    except Exception as error:  # noqa: BLE001 - another package, which may differ in any way
        _log.warning(_NOT_USED, error)
        return None
