"""CUDA graphs that are replayed one after the other, joined to one: a launch instead of several.

torch has no binding for it, so this calls the runtime library that torch has loaded, by its C interface.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_size_t, c_uint64, c_void_p
from functools import cache

import torch

_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation"""


def joined(graphs: Sequence[torch.cuda.CUDAGraph], stream: torch.cuda.Stream) -> Callable[[], None]:
    """The replay of `graphs`, which were kept and not instantiated, on `stream`. Raises RuntimeError."""
    whole, instance = c_void_p(), c_void_p()
    _call("cudaGraphCreate", byref(whole), 0)
    try:
        before: list[int | None] = []
        for graph in graphs:
            node = c_void_p()
            _call(
                "cudaGraphAddChildGraphNode",
                byref(node),
                whole,
                (c_void_p * len(before))(*before),
                c_size_t(len(before)),
                c_void_p(graph.raw_cuda_graph()),
            )
            before = [node.value]
        _call("cudaGraphInstantiate", byref(instance), whole, c_uint64(0))
    finally:
        _call("cudaGraphDestroy", whole)
    return _Replay(instance, graphs, stream)


class _Replay:
    """Called, it launches a graph that was joined."""

    def __init__(self, instance: c_void_p, graphs: Sequence[torch.cuda.CUDAGraph], stream: torch.cuda.Stream) -> None:
        self._graphs = graphs
        """They keep the memory that the graph uses."""
        self._instance, self._stream = instance, c_void_p(stream.cuda_stream)
        weakref.finalize(self, _call, "cudaGraphExecDestroy", instance).atexit = False
        _call("cudaGraphUpload", instance, self._stream)

    def __call__(self) -> None:
        """Raises OutOfMemoryError, RuntimeError."""
        _call("cudaGraphLaunch", self._instance, self._stream)


def _call(name: str, *arguments: object) -> None:
    code = getattr(_library(), name)(*arguments)
    if not code:
        return
    _library().cudaGetLastError()  # else torch reports it as the error of another operation
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: CUDA out of memory")
    raise RuntimeError(f"{name}: CUDA error {code}")


@cache
def _library() -> ctypes.CDLL:
    """Raises RuntimeError."""
    name = f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise RuntimeError(str(error)) from None
