"""What the server may hold on a CUDA device that others use too: `--device-memory`."""

import ctypes
import logging
import os
from dataclasses import replace
from importlib.util import find_spec

import torch

from vitwire_flags.sizes import shown
from vitwire_server.config.host import rpc_processes
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.decoding import CLIP_DECODERS_BYTES, CLIP_TENSORS_BYTES

_log = logging.getLogger(__name__)
PASSING_BYTES = 512 << 20
"""Room for rows on their way to clients, for new ones, and for those that move to the host."""
_PROCESS_BYTES = 640 << 20
"""Of a process for its context and libraries; the context alone takes 525 MiB on an H200."""
_MPS_ENABLED = 133
"""CU_DEVICE_ATTRIBUTE_MPS_ENABLED."""


def outbox_bytes(settings: ServeSettings, device: torch.device) -> int:
    """Memory that rows are delivered from; 0 if there is nothing to deliver from there."""
    if not settings.nixl or (device.type == "cpu" and not settings.stored_bytes):
        return 0
    return PASSING_BYTES + settings.stored_bytes


def torch_bytes(settings: ServeSettings, *, free: int) -> int:
    """Bytes for torch's tensors in the process of the engine, within `--device-memory`.

    free: bytes of the device that nobody holds. The rest is for the contexts of this process, of the decoders of each
    process that serves RPCs, and of NIXL's first sender and the spare one. Raises UsageError if that cannot be.
    """
    decodes = settings.decode != "cpu" and settings.decode_process_count != 0
    decoders = rpc_processes(settings.rpc_process_count, cuda_devices=1) if decodes else 0
    of_clips = decoders if find_spec("PyNvVideoCodec") else 0
    bound, processes = settings.device_memory, 1 + decoders + of_clips + 2 * settings.nixl
    others = processes * _PROCESS_BYTES + of_clips * (CLIP_TENSORS_BYTES + CLIP_DECODERS_BYTES)
    if bound - _PROCESS_BYTES > free:  # this process has its context
        raise UsageError(
            f"--device-memory {shown(bound)}: the device has only {shown(free)} free; other processes hold the rest"
        )
    fixed = others + outbox_bytes(settings, torch.device("cuda"))
    if bound <= fixed:
        raise UsageError(
            f"--device-memory {shown(bound)}: {processes} processes and embeddings on the device (--store-bytes) take "
            f"{shown(fixed)} without weights; raise it, or lower --store-bytes or --rpc-processes, or set --decode cpu"
        )
    return bound - others


def bound_device(settings: ServeSettings, device: torch.device) -> int | None:
    """Have torch stay within `--device-memory`; its bytes, None if it is not bounded. Raises UsageError."""
    if not settings.device_memory:
        return None
    if device.type != "cuda":
        _log.warning("--device-memory has no effect on %s", device)
        return None
    free, total = torch.cuda.mem_get_info(device)
    nbytes = torch_bytes(settings, free=free)
    torch.cuda.set_per_process_memory_fraction(nbytes / total, device)
    return nbytes


def with_room_for_graphs(settings: ServeSettings, nbytes: int, weights: int) -> ServeSettings:
    """Settings whose graphs take at most half of what weights and embeddings leave of torch's bytes.

    The other half is for eager forwards. Raises UsageError if nothing is left.
    """
    left = nbytes - weights - outbox_bytes(settings, torch.device("cuda"))
    if left <= 0:
        raise UsageError(
            f"--device-memory {shown(settings.device_memory)}: the weights take {shown(weights)}, which leaves nothing "
            f"for forwards; raise it by more than {shown(-left)}"
        )
    return replace(settings, graph_memory=min(settings.graph_memory, left // 2))


def sharing(device: torch.device, bound: int) -> str:
    """How this process shares a CUDA device, in a line; empty on a CPU. bound: of `--device-memory`."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    mps, percentage = ctypes.c_int(0), os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(mps), _MPS_ENABLED, device.index or 0)
    parts = [
        torch.cuda.get_device_name(device),
        f"{shown(free)} of {shown(total)} free",
        f"at most {shown(bound)} for this server" if bound else "",
        f"MPS, {percentage} % of the multiprocessors" if mps.value else "no MPS",
    ]
    return ", ".join(filter(None, parts))
