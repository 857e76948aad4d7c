"""Device memory that rows are delivered from: one allocation, made once, which senders map.

Used on the engine's thread, but for `uploaded` and the methods of rows, which any thread may call.
"""

from collections import deque
from collections.abc import Callable
from weakref import finalize

import torch
from torch import Tensor

from vitwire.agents import Memory
from vitwire.regions import Region, Regions
from vitwire_server.delivery import cuda
from vitwire_server.delivery.messages import Outbox as Exported


class DeviceRows:
    """Rows in the outbox; see `core.delivery.DeviceRows`. Their room is free again once released or forgotten."""

    def __init__(self, memory: Memory, free: Callable[[], None], written: torch.cuda.Event) -> None:
        self.address, self.nbytes, self.device = memory
        self._free = finalize(self, free)
        self._free.atexit = False
        self._written = written
        self.host_copy: torch.cuda.Event | None = None
        """Recorded after the copy to the host, if there is one."""

    def is_ready(self) -> bool:
        """See Rows."""
        return bool(self._written.query())

    def release(self) -> None:
        """See Rows."""
        self._free()

    def finish_host_copy(self) -> None:
        """See DeviceRows."""
        if self.host_copy:
            self.host_copy.synchronize()


class Outbox:
    """Hands out room for rows on a CUDA device."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        """Raises torch.OutOfMemoryError. Other processes can map the memory only if segments are not expandable."""
        self._tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._regions = Regions(nbytes)
        self._freed: deque[Region] = deque()
        """By finalisers, which may run anywhere and so take no lock."""
        self._uploads = torch.cuda.Stream(device)
        self.memory = Memory(self._tensor.data_ptr(), nbytes, self._tensor.device.index)

    def copied(self, rows: Tensor) -> DeviceRows | None:
        """A copy of rows, by the current stream; None without room."""
        region = self._room(rows.nbytes)
        if region is None:
            return None
        target = self._tensor[region.offset : region.offset + rows.nbytes]
        target.copy_(rows.contiguous().view(-1).view(torch.uint8), non_blocking=True)
        return self._written(region, rows.nbytes)

    def uploaded(self, data: memoryview) -> DeviceRows | None:
        """A copy of rows that are on the host only; None without room."""
        region = self._room(len(data))
        if region is None:
            return None
        with torch.cuda.stream(self._uploads):
            source = torch.frombuffer(data, dtype=torch.uint8)
            self._tensor[region.offset : region.offset + len(data)].copy_(source, non_blocking=True)
            rows = self._written(region, len(data))
        self._uploads.synchronize()  # `data` may be pinned, and is not kept
        return rows

    def exported(self) -> Exported:
        """What the processes that deliver map the memory by. Raises CudaError."""
        cuda.make_current(self._tensor.device.index)  # torch sets it only once it differs
        handle, offset = cuda.exported(self.memory.address)
        return Exported(self._tensor.device.index, self.memory.nbytes, handle, offset)

    def _room(self, nbytes: int) -> Region | None:
        while self._freed:
            self._regions.give_back(self._freed.popleft())
        return self._regions.take(nbytes)

    def _written(self, region: Region, nbytes: int) -> DeviceRows:
        written = torch.cuda.Event()
        written.record()
        return DeviceRows(self.memory.part(region.offset, nbytes), lambda: self._freed.append(region), written)
