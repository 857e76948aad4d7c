"""Parameters that belong to no module of a tower."""

import torch
from torch import nn


class Lone(nn.Module):
    """One parameter that belongs to no module of the tower."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
