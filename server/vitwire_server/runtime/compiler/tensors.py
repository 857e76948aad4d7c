"""The tensors of a tower and of a batch by name, on both sides."""

from torch import Tensor

from vitwire_server.towers.metadata import Capacity
from vitwire_server.towers.tower import Metadata, Tower

PIXELS, CROPS = "pixels", "crops"
"""Names of inputs; those of metadata begin with a dot."""


def named_tensors(tower: Tower) -> dict[str, Tensor]:
    """Weights and buffers; a tensor that is held twice has two names."""
    found: dict[str, Tensor] = {}
    for part, module in tower.modules.items():
        for tensors in (module.named_parameters, module.named_buffers):
            found |= {f"{part}.{name}": tensor.detach() for name, tensor in tensors(remove_duplicate=False)}
    return found


def named_inputs(pixels: Tensor, metadata: Metadata) -> dict[str, Tensor]:
    """What a forward reads of a batch."""
    inputs = {PIXELS: pixels, **{f".{name}": tensor for name, tensor in metadata.tensors.items()}}
    return inputs if metadata.crops is None else {**inputs, CROPS: metadata.crops}


def batch_of(inputs: dict[str, Tensor], capacity: Capacity, bounds: dict[str, int]) -> tuple[Tensor, Metadata]:
    """The arguments of a tower's forward that have these inputs."""
    tensors = {name[1:]: tensor for name, tensor in inputs.items() if name.startswith(".")}
    return inputs[PIXELS], Metadata(capacity, tensors, bounds, inputs.get(CROPS))
