"""Modules that hold what transformers keeps outside of modules."""

import torch
from torch import Tensor, nn


class SingleParameter(nn.Module):
    """One parameter that transformers keeps on the whole model."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


class Constants(nn.Module):
    """Tensors that follow from the size of a tile, in the types that they were computed in."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
