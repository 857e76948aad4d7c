"""The few functions of CUDA's driver that processes share device memory with. Does not import torch."""

import ctypes
from functools import cache

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class CudaError(Exception):
    """A function of the driver failed, or there is none."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


def make_current(device: int) -> None:
    """Make the primary context of a device the current one of this thread. Raises CudaError."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(number), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    _call("cuCtxSetCurrent", context)


def exported(address: int) -> tuple[bytes, int]:
    """A handle by which another process maps an allocation, and the offset of an address in it. Raises CudaError."""
    handle, base, size = _Handle(), ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES), address - base.value


def mapped(handle: bytes) -> int:
    """The address in this process of another process's allocation. Raises CudaError."""
    address = ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    return address.value


def _call(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise CudaError(f"{name}: {(text.value or b'unknown error').decode()}")


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(str(error)) from None
