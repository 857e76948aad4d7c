"""Pictures prepared in the engine: what a decoder would send, written into the tower's input."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from vitwire_server.core.items import Item, Modality
from vitwire_server.preparing import pillow
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.runtime.staging import Stager


class Preparer(ABC):
    """Prepares pictures. Used on the engine thread, within `Streams.computing`."""

    @abstractmethod
    def write(self, item: Item, source: Tensor, pixels: Tensor, crops: Tensor | None) -> None:
        """Write the prepared picture of an item into rows of the tower's input.

        `source` is its flat uint8 picture on the device, `pixels` `(patches, C*T*p*p)` or a row for each tile, and
        `crops` the same for crops; None without any. Raises RuntimeError.
        """


class HostPreparer(Preparer):
    """By Pillow, for towers on the CPU: the same path as on a device, for tests and for servers without decoders."""

    def __init__(self, recipes: Mapping[Modality, Recipe], stager: Stager) -> None:
        self._recipes = recipes
        self._stager = stager

    def write(self, item: Item, source: Tensor, pixels: Tensor, crops: Tensor | None) -> None:
        try:
            made = pillow.prepared(source.numpy().reshape(item.pixels.shape), self._recipes[item.modality])
        except (ValueError, MemoryError) as error:  # the size was checked, so it is not the item's fault
            raise RuntimeError(f"a picture was not prepared: {error}") from error
        self._stager.stage(torch.from_numpy(made.pixels).view(-1), item.modality, pixels)
        if crops is not None and made.crops is not None:
            self._stager.stage(torch.from_numpy(made.crops).view(-1), item.modality, crops, crops=True)
