"""Trace a tower's forward for one shape and compile it to an extension module."""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._inductor.compile_fx import _CompileFxKwargs as Settings
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.output_code import CompiledFxGraph, OutputCode
from torch.export.graph_signature import InputKind, InputSpec

from vitwire_server.runtime.compiler.messages import FUNCTION, Compile, Compiled, Source, batch_of
from vitwire_server.towers.tower import Tower

_SETTINGS = {
    "cpp_wrapper": True,  # one function for the whole forward, which releases the interpreter's lock
    "compile_threads": 1,
    # The values of weights are not known here, so none may become part of the code.
    "freezing": False,
    "joint_graph_constant_folding": False,
    "always_keep_tensor_constants": True,
    "fx_graph_cache": False,
}


class _Forward(nn.Module):
    """A tower's forward, whose weights and inputs torch.export can name."""

    def __init__(self, tower: Tower, request: Compile) -> None:
        super().__init__()
        for name, module in tower.modules.items():
            self.add_module(name, module)
        self._tower = tower
        self._request = request

    def forward(self, *inputs: Tensor) -> Tensor:
        request = self._request
        named = dict(zip(request.inputs, inputs, strict=True))
        return self._tower.forward(*batch_of(named, request.capacity, request.bounds))


@torch.no_grad()
def compiled(tower: Tower, request: Compile, threads: int) -> Compiled:
    """The forward for one shape, for `threads` threads. Raises whatever torch raises if it cannot compile it."""
    inputs = tuple(layout.empty().zero_() for layout in request.inputs.values())
    program = torch.export.export(_Forward(tower, request), inputs, strict=False)
    names = iter(request.inputs)
    arguments = [_argument(spec, names) for spec in program.graph_signature.input_specs]
    constants = {name: program.constants[name] for source, name in arguments if source is Source.CONSTANT}
    values = {**dict(zip(request.inputs, inputs, strict=True)), **program.state_dict, **program.constants}
    library, added = _library(program.graph_module, [values[name] for _, name in arguments], threads)
    arguments += [(Source.CONSTANT, name) for name in added]
    constants |= added
    return Compiled(library, arguments, _saved(constants))


def _argument(spec: InputSpec, names: Iterator[str]) -> tuple[Source, str]:
    """Where an input of the graph comes from; inputs of the batch are taken from `names`."""
    if spec.kind is InputKind.USER_INPUT:
        return Source.INPUT, next(names)
    assert spec.target is not None, "everything else has a name"
    own = spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
    return (Source.TENSOR if own else Source.CONSTANT), spec.target


def _library(graph: torch.fx.GraphModule, values: list[Tensor], threads: int) -> tuple[str, Mapping[str, Tensor]]:
    """The path of the extension module, and constants that it takes after its arguments."""
    graphs: list[CompiledFxGraph] = []

    def inner(module: torch.fx.GraphModule, given: Sequence[Any], **settings: Unpack[Settings]) -> OutputCode:
        graph = compile_fx_inner(module, given, **settings)
        if not isinstance(graph, CompiledFxGraph) or len(given) != len(values):
            raise ValueError("torch compiles it in parts")
        graphs.append(graph)
        return graph

    before = set(sys.modules)
    with torch._inductor.config.patch({**_SETTINGS, "cpp.threads": threads}):  # noqa: SLF001 - has no public name
        compile_fx(graph, values, inner_compile=inner)
    found = [sys.modules[name] for name in sys.modules.keys() - before if name.endswith(f".{FUNCTION}")]
    if len(graphs) != 1 or len(found) != 1:
        raise ValueError(f"torch made {len(graphs)} graphs and {len(found)} modules of it")
    return str(found[0].__file__), graphs[0].constants or {}


def _saved(constants: Mapping[str, Tensor]) -> str:
    if not constants:
        return ""
    with tempfile.NamedTemporaryFile(prefix="constants-", delete=False) as file:
        torch.save({name: tensor.detach().clone() for name, tensor in constants.items()}, file)
    return str(Path(file.name))
