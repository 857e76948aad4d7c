"""bfloat16 in DLPack capsules. numpy, which exports the capsules, has no bfloat16 and holds its bits as uint16."""

import ctypes

_BFLOAT = 4
"""`kDLBfloat`, https://dmlc.github.io/dlpack/latest/c_api.html."""
_CODE_OFFSETS = {b"dltensor": 20, b"dltensor_versioned": 52}
"""Offset of the type code by name of the capsule. A tensor has data (8 bytes), device (8) and number of dimensions (4)
before it; the versioned struct has version (8), context (8), deleter (8) and flags (8) before these."""


def name_bfloat16(capsule: object) -> None:
    """Change the type of a capsule that is not yet consumed from uint16 to bfloat16."""
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    name = api.PyCapsule_GetName(capsule)
    address = api.PyCapsule_GetPointer(capsule, name)
    ctypes.c_uint8.from_address(address + _CODE_OFFSETS[name]).value = _BFLOAT
