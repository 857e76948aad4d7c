"""bfloat16 in DLPack capsules: numpy, which exports them, knows it only as the bits of uint16."""

import ctypes
from typing import Any

_BFLOAT = 4
"""`kDLBfloat`, https://dmlc.github.io/dlpack/latest/c_api.html."""
_CODE_OFFSETS = {b"dltensor": 20, b"dltensor_versioned": 52}
"""Where the code of the type is in the struct of each capsule. A tensor begins with its data (8 bytes), its device (8)
and its number of dimensions (4); the newer struct has version (8), context (8), deleter (8) and flags (8) before it."""


def name_bfloat16(capsule: Any) -> None:  # noqa: ANN401  # Python has no type for capsules
    """Make a capsule of uint16, which nobody took yet, one of bfloat16."""
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    name = api.PyCapsule_GetName(capsule)
    address = api.PyCapsule_GetPointer(capsule, name)
    ctypes.c_uint8.from_address(address + _CODE_OFFSETS[name]).value = _BFLOAT
