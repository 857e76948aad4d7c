"""Messages between a server's process and its compiler, lines of JSON, and the names of tensors in them."""

from enum import StrEnum
from typing import TypeAlias

import torch
from msgspec import Struct
from msgspec.json import Decoder
from torch import Tensor

from vitwire_server.towers.metadata import Capacity
from vitwire_server.towers.tower import Metadata, Tower

FUNCTION = "inductor_entry_cpp"
"""The function of an extension module that torch generated."""
PIXELS, CROPS = "pixels", "crops"
"""Names of inputs; those of metadata begin with a dot."""


class Layout(Struct, array_like=True, frozen=True):
    """Everything that compiled code assumes about a tensor except its values."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """The layout of a tensor."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())

    def empty(self) -> Tensor:
        """A tensor of this layout on the host whose values are undefined; it takes no memory until written."""
        return torch.empty_strided(self.shape, self.strides, dtype=getattr(torch, self.dtype))


class Factory(Struct, array_like=True, frozen=True):
    """A function by which a process makes the tower without its weights."""

    function: str
    """`module:function`, which takes the arguments and returns a Tower whose tensors may hold anything."""
    arguments: dict[str, str]


# -- to the compiler -------------------------------------------------------------------------------


class Blueprint(Struct, frozen=True):
    """The first message: the tower whose forwards are compiled."""

    factory: Factory
    tensors: dict[str, Layout]
    """Weights and buffers, by the names of `named_tensors`."""
    threads: int
    """Threads that compiled code uses."""
    path: list[str]
    """Where modules are imported from."""


class Compile(Struct, frozen=True):
    """Answered with Compiled or Refused."""

    capacity: Capacity
    bounds: dict[str, int]
    inputs: dict[str, Layout]
    """Pixels, metadata and crops, by the names of `named_inputs`."""


# -- from the compiler -----------------------------------------------------------------------------


class Source(StrEnum):
    """Where an argument of compiled code comes from."""

    TENSOR = "tensor"
    """The tower."""
    INPUT = "input"
    """The batch."""
    CONSTANT = "constant"
    """A file that the compiler wrote."""


class Compiled(Struct, frozen=True, tag="compiled"):
    """A forward was compiled."""

    library: str
    """Path of a Python extension module."""
    arguments: list[tuple[Source, str]]
    """Source and name of each argument of its function, in order."""
    constants: str
    """Path of the constants by name, as torch.save wrote them; empty if there are none."""


class Refused(Struct, frozen=True, tag="refused"):
    """The forward cannot be compiled."""

    reason: str


FromCompiler: TypeAlias = Compiled | Refused
FROM_COMPILER = Decoder(FromCompiler)
BLUEPRINT, REQUEST = Decoder(Blueprint), Decoder(Compile)


# -- on both sides ---------------------------------------------------------------------------------


def named_tensors(tower: Tower) -> dict[str, Tensor]:
    """Weights and buffers; a tensor that is held twice has two names."""
    found: dict[str, Tensor] = {}
    for part, module in tower.modules.items():
        for tensors in (module.named_parameters, module.named_buffers):
            found |= {f"{part}.{name}": tensor.detach() for name, tensor in tensors(remove_duplicate=False)}
    return found


def named_inputs(pixels: Tensor, metadata: Metadata) -> dict[str, Tensor]:
    """The tensors of a batch that a forward reads."""
    inputs = {PIXELS: pixels, **{f".{name}": tensor for name, tensor in metadata.tensors.items()}}
    return inputs if metadata.crops is None else {**inputs, CROPS: metadata.crops}


def batch_of(inputs: dict[str, Tensor], capacity: Capacity, bounds: dict[str, int]) -> tuple[Tensor, Metadata]:
    """The arguments of a tower's forward that have these inputs."""
    tensors = {name[1:]: tensor for name, tensor in inputs.items() if name.startswith(".")}
    return inputs[PIXELS], Metadata(capacity, tensors, bounds, inputs.get(CROPS))
