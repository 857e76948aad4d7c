"""Launches of Triton kernels that cost the host little, and where compiled kernels are kept.

Triton binds and classifies the arguments of each launch and formats them as the key of a compiled kernel, which takes
several times as long as the launch: eager forwards of one image are bound by that. Here the key is looked up as it is.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from packaging.version import Version
from torch import Tensor
from triton.runtime import JITFunction, KernelInterface, driver

_IS_KNOWN = Version("3.6") <= Version(triton.__version__) < Version("3.10")
"""True for releases of Triton whose compiled kernels take the arguments that are passed here."""
_ALIGNMENT = 16
"""Triton compiles pointers and integers that are multiples of it separately."""


def cute_cache() -> ModuleType:
    """quack's cache of kernels in the CuTe DSL, on disk beside Triton's. Raises ImportError without quack."""
    module = import_module("quack.cache")
    cache: Any = module
    cache.CACHE_DIR = cache.CACHE_DIR or str(Path(triton.knobs.cache.dir) / "quack")
    return module


class Kernel:
    """A kernel, launched as Triton's: `kernel[grid](*arguments, **constants)`.

    Constants and the compiler's options are passed by name, other arguments by position. Triton itself launches what it
    has to compile, and kernels in its interpreter. Its launch hooks are not called.
    """

    def __init__(self, function: KernelInterface) -> None:
        """`function` is decorated by `triton.jit`; its constants come last."""
        self._function = function
        self._bound: dict[tuple[object, ...], Bound] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """The launch of `grid` programs."""
        return partial(self._launch, grid)

    def bound(self, **constants: object) -> "Bound":
        """The kernel with these constants, which callers may keep."""
        return Bound(self._function, constants)

    def _launch(self, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
        key = (*constants, *constants.values())
        if (bound := self._bound.get(key)) is None:
            bound = self._bound[key] = self.bound(**constants)
        bound(grid, *arguments)


class Bound:
    """A kernel and its constants, launched as `bound(grid, *arguments)`."""

    def __init__(self, function: KernelInterface, constants: dict[str, object]) -> None:
        self._function, self._constants = function, constants
        self._is_compiled = _IS_KNOWN and isinstance(function, JITFunction)
        self._values = [constants[name] for name in function.arg_names if name in constants]
        self._kernels: dict[tuple[object, ...], Any] = {}
        """Compiled kernels, by all that Triton specialises on."""

    def __call__(self, grid: tuple[int, ...], *arguments: object) -> None:
        """Launch `grid` programs."""
        read = _read(arguments) if self._is_compiled else None
        if read is None:
            self._function[grid](*arguments, **self._constants)
            return
        kinds, values = read
        active = driver.active
        device = active.get_current_device()
        key = (device, *kinds)
        if (kernel := self._kernels.get(key)) is None:
            self._kernels[key] = self._function[grid](*arguments, **self._constants)
            return
        stream, programs = active.get_current_stream(device), (*grid, 1, 1)[:3]
        kernel.run(
            *programs, stream, kernel.function, kernel.packed_metadata, None, None, None, *values, *self._values
        )  # fmt: skip


def _read(arguments: tuple[object, ...]) -> tuple[list[object], list[object]] | None:
    """What Triton specialises on, and the arguments, tensors as addresses; None if one is not of the usual kinds."""
    kinds: list[object] = []
    values: list[object] = []
    for each in arguments:
        if isinstance(each, Tensor):
            if not each.is_cuda:
                return None
            address = each.data_ptr()
            kinds.append(each.dtype if address % _ALIGNMENT == 0 else (each.dtype,))
            values.append(address)
            continue
        if type(each) is int:
            kinds += (each >> 31, each % _ALIGNMENT == 0, each == 1)
        elif each is None or type(each) is float:
            kinds.append(type(each))
        else:
            return None
        values.append(each)
    return kinds, values
