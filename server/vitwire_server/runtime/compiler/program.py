"""A compiled forward: an extension module that torch generated, called with the tower's own tensors."""

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitwire_server.runtime.compiler.messages import Compile, Compiled, Layout, Source
from vitwire_server.runtime.compiler.tensors import named_inputs
from vitwire_server.towers.tower import Metadata

FUNCTION = "inductor_entry_cpp"
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
