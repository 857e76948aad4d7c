"""Memory of the engine's device that rows are delivered from: one allocation, made once, which senders map on CUDA.

Rows are there on their way to a client, or kept until a client asks for them. Used on the engine's thread, but for
`uploaded` and the methods of rows, which any thread may call.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from vitwire.shared.agents import Memory
from vitwire.shared.regions import Region, Regions
from vitwire_server.core.items import Item
from vitwire_server.delivery import cuda
from vitwire_server.delivery.messages import Outbox as Exported


@dataclass(frozen=True, slots=True)
class _Ready:
    """When rows on a CUDA device are complete, and the stream that copies them to the host."""

    written: torch.cuda.Event
    downloads: torch.cuda.Stream


class DeviceRows:
    """Rows in the outbox; see `core.delivery.DeviceRows`. Their room is free again once nothing refers to them."""

    def __init__(self, memory: Memory, source: Tensor, taken: int, ready: _Ready | None) -> None:
        """`source` are the bytes at `memory`; `ready` is None on the CPU."""
        self.address, self.nbytes, self.device = memory
        self.taken = taken
        self._source = source
        self._ready = ready

    def is_ready(self) -> bool:
        """See DeviceRows of core."""
        return self._ready is None or bool(self._ready.written.query())

    def download(self) -> memoryview:
        """See DeviceRows of core. The copy is in memory that is not pinned, as it may be kept."""
        copy, source = np.empty(self.nbytes, np.uint8), self._source
        if self._ready:
            with torch.cuda.stream(self._ready.downloads):
                self._ready.written.wait()
                source = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                source.copy_(self._source, non_blocking=True)
                copied = torch.cuda.Event(blocking=True)
                copied.record()
            copied.synchronize()
        np.copyto(copy, source.numpy())  # without the GIL
        return copy.data


class Outbox:
    """Hands out room for rows."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        """Raises torch.OutOfMemoryError. Other processes can map the memory only if segments are not expandable."""
        self._tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._regions = Regions(nbytes)
        self._freed: deque[Region] = deque()
        """By finalisers, which may run anywhere and so take no lock."""
        self.is_shared = self._tensor.is_cuda
        """Whether senders map the memory; else they get copies of rows on the host."""
        self._uploads, self._downloads = (torch.cuda.Stream(device) if self.is_shared else None for _ in range(2))
        self.memory = Memory(self._tensor.data_ptr(), nbytes, self._tensor.device.index)
        self.keeps = False
        """Whether rows that are only stored stay here; set once rows can be delivered from here."""

    def takes(self, item: Item) -> bool:
        """Whether the rows of an item are delivered from here, or kept."""
        return (item.on_device and self.is_shared) or (item.store_only and self.keeps)

    def copied(self, rows: Tensor) -> DeviceRows | None:
        """A copy of rows, by the current stream; None without room."""
        return self.copies([rows])[0]

    def copies(self, rows: Sequence[Tensor | None]) -> list[DeviceRows | None]:
        """A copy of each of the rows, by the current stream; None for those without room."""
        ready = _Ready(torch.cuda.Event(), self._downloads) if self._downloads else None
        copies = [None if each is None else self._copy(each, ready) for each in rows]
        if ready and any(copies):
            ready.written.record()
        return copies

    def uploaded(self, data: memoryview) -> DeviceRows | None:
        """A copy of rows that are on the host only, on CUDA; None without room."""
        assert self._uploads, "on the CPU rows are delivered from where they are"
        with torch.cuda.stream(self._uploads):
            rows = self.copied(torch.frombuffer(data, dtype=torch.uint8))
        self._uploads.synchronize()  # `data` may be pinned, and is not kept
        return rows

    def exported(self) -> Exported:
        """The handle by which senders map the memory. Raises CudaError."""
        device = self._tensor.device.index
        cuda.make_current(device)  # torch sets it only once it differs
        handle, offset = cuda.exported(self.memory.address)
        return Exported(device, self.memory.nbytes, handle, offset)

    def _copy(self, rows: Tensor, ready: _Ready | None) -> DeviceRows | None:
        while self._freed:
            self._regions.give_back(self._freed.popleft())
        region = self._regions.take(rows.nbytes)
        if region is None:
            return None
        target = self._tensor[region.offset : region.offset + rows.nbytes]
        target.copy_(rows.contiguous().view(-1).view(torch.uint8), non_blocking=True)
        copy = DeviceRows(self.memory.part(region.offset, rows.nbytes), target, region.nbytes, ready)
        finalize(copy, self._freed.append, region).atexit = False
        return copy
