"""Pinning of memory that torch did not allocate, so that copies to and from a device need no staging."""

import logging

import numpy as np
import torch

_log = logging.getLogger(__name__)


def pin(memory: memoryview) -> None:
    """Register memory with CUDA for the life of the process; without it, copies are slower but right."""
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    error = torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)
    if int(error) != 0:
        _log.warning("%d bytes of shared memory could not be pinned: %s", len(memory), error)
