"""Products by a chosen algorithm of cuBLASLt, of which torch takes the first proposal.

torch's binding has no choice of the algorithm, so this calls the library that torch has loaded, by its C interface.
Used on the engine thread.
"""

import ctypes
from ctypes import Array, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

_WORKSPACE_BYTES = 32 << 20
_TYPES = {torch.float16: 2, torch.bfloat16: 14}
"""cudaDataType_t of the types that products come in."""
_FLOAT32 = 0
_COMPUTE_FLOAT32 = 68
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER, _BIAS_TYPE = 3, 7, 8, 26
"""cublasLtMatmulDescAttributes_t"""
_MOST_WORKSPACE, _REDUCTIONS = 1, 3
"""cublasLtMatmulPreferenceAttributes_t"""
_IN_FLOAT32 = 2
"""A value of cublasLtReductionScheme_t: splits are added in the type of the sums, not of the result."""
_RESULT_BYTES, _ALGORITHM_BYTES, _WORKSPACE_AT, _STATE_AT = 96, 64, 64, 72
"""Layout of cublasLtMatmulHeuristicResult_t."""
_PROPOSALS = 5
"""One of the first five of 8 was the fastest for all products of Qwen3-VL-8B from 196 to 4096 rows (H200)."""


class Epilogue(IntEnum):
    """Steps after the sums in the same kernel: values of cublasLtEpilogue_t."""

    NONE = 1
    BIAS = 4
    BIAS_TANH_GELU = 36


class CublasLtError(RuntimeError):
    """A call of cuBLASLt failed."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to compute a product of a certain size."""

    operation: c_void_p
    layouts: tuple[c_void_p, c_void_p, c_void_p]
    """Layouts of weight, rows and result."""
    state: bytes
    """cuBLASLt's identifier of the algorithm; valid for this version of the library on this device."""
    accumulates: bool
    library: "CublasLt"

    @property
    def name(self) -> str:
        """For the file of choices."""
        return self.state.hex()

    def run(self, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Compute `out` on the current stream; all are contiguous. Raises CublasLtError."""
        self.library.run(self, rows, weight, bias, out)

    def resized(self, rows: int, weight: Tensor) -> "Algorithm | None":
        """The same way for another number of rows; None if the library does not support it. Raises CublasLtError."""
        return self.library.resized(self, rows, weight)


class CublasLt:
    """The library, with a workspace on a device that one stream at a time may use."""

    def __init__(self, device: torch.device) -> None:
        """Raises OSError without the library, CublasLtError."""
        major = str(torch.version.cuda).partition(".")[0]
        self._library = ctypes.CDLL(f"libcublasLt.so.{major}")
        self._library.cublasLtGetVersion.restype = c_size_t
        self._handle = c_void_p()
        with torch.cuda.device(device):
            self._call("cublasLtCreate", byref(self._handle))
            self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    @property
    def version(self) -> int:
        return int(self._library.cublasLtGetVersion())

    def proposals(
        self, rows: int, weight: Tensor, epilogue: Epilogue = Epilogue.NONE, *, accumulates: bool = False
    ) -> list[Algorithm]:
        """The library's proposals for `rows` by `weight (columns, depth)`, best first. Raises CublasLtError.

        The result is rounded once; `accumulates` adds what was in it.
        """
        columns, depth = weight.shape
        kind = _TYPES[weight.dtype]
        operation = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(operation), c_int(_COMPUTE_FLOAT32), c_int(_FLOAT32))
        self._set(operation, _TRANSPOSE_A, c_int32(1))
        self._set(operation, _EPILOGUE, c_uint32(epilogue))
        if epilogue is not Epilogue.NONE:
            self._set(operation, _BIAS_TYPE, c_int32(kind))
            self._set(operation, _BIAS_POINTER, c_void_p(self._workspace.data_ptr()))  # only its alignment counts here
        # The library counts by columns: weight^T (depth, columns), rows^T (depth, rows), result^T (columns, rows).
        layouts = (
            self._layout(kind, depth, columns),
            self._layout(kind, depth, rows),
            self._layout(kind, columns, rows),
        )
        states = self._proposed(operation, layouts)
        return [Algorithm(operation, layouts, state, accumulates, self) for state in states]

    def resized(self, algorithm: Algorithm, rows: int, weight: Tensor) -> Algorithm | None:
        (columns, depth), kind = weight.shape, _TYPES[weight.dtype]
        weights, inputs, outputs = layouts = (
            algorithm.layouts[0],
            self._layout(kind, depth, rows),
            self._layout(kind, columns, rows),
        )
        state, result = _buffer(algorithm.state), ctypes.create_string_buffer(_RESULT_BYTES)
        sides = weights, inputs, outputs, outputs
        if self._library.cublasLtMatmulAlgoCheck(self._handle, algorithm.operation, *sides, state, result):
            return None
        workspace = c_size_t.from_buffer(result, _WORKSPACE_AT).value
        return replace(algorithm, layouts=layouts) if workspace <= _WORKSPACE_BYTES else None

    def run(self, algorithm: Algorithm, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if bias is not None:
            self._set(algorithm.operation, _BIAS_POINTER, c_void_p(bias.data_ptr()))
        weights, inputs, outputs = algorithm.layouts
        self._call(
            "cublasLtMatmul",
            self._handle,
            algorithm.operation,
            byref(c_float(1.0)),
            c_void_p(weight.data_ptr()),
            weights,
            c_void_p(rows.data_ptr()),
            inputs,
            byref(c_float(float(algorithm.accumulates))),
            c_void_p(out.data_ptr()),
            outputs,
            c_void_p(out.data_ptr()),
            outputs,
            _buffer(algorithm.state),
            c_void_p(self._workspace.data_ptr()),
            c_size_t(_WORKSPACE_BYTES),
            c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
        )

    def _proposed(self, operation: c_void_p, layouts: tuple[c_void_p, c_void_p, c_void_p]) -> list[bytes]:
        preference, found = c_void_p(), c_int(0)
        results = ctypes.create_string_buffer(_RESULT_BYTES * _PROPOSALS)
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        try:
            for attribute, value in (
                (_MOST_WORKSPACE, c_size_t(_WORKSPACE_BYTES)),
                (_REDUCTIONS, c_uint32(_IN_FLOAT32)),
            ):
                size = c_size_t(ctypes.sizeof(value))
                self._call("cublasLtMatmulPreferenceSetAttribute", preference, c_int(attribute), byref(value), size)
            weights, inputs, outputs = layouts
            self._call(
                "cublasLtMatmulAlgoGetHeuristic",
                self._handle,
                operation,
                weights,
                inputs,
                outputs,
                outputs,
                preference,
                c_int(_PROPOSALS),
                results,
                byref(found),
            )
        finally:
            self._call("cublasLtMatmulPreferenceDestroy", preference)
        entries = [results.raw[_RESULT_BYTES * index :][:_RESULT_BYTES] for index in range(found.value)]
        return [entry[:_ALGORITHM_BYTES] for entry in entries if not any(entry[_STATE_AT : _STATE_AT + 4])]

    def _layout(self, kind: int, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        sizes = c_uint64(rows), c_uint64(columns), c_int64(rows)
        self._call("cublasLtMatrixLayoutCreate", byref(layout), c_int(kind), *sizes)
        return layout

    def _set(self, operation: c_void_p, attribute: int, value: c_int32 | c_uint32 | c_void_p) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulDescSetAttribute", operation, c_int(attribute), byref(value), size)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CublasLtError(f"{name} returned status {status}")


def _buffer(state: bytes) -> Array[c_uint64]:
    return (c_uint64 * (_ALGORITHM_BYTES // 8)).from_buffer_copy(state)
