"""DLPack in ctypes: capsules and exchange tables made by hand, as a foreign library might hand them over."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

FLOAT, BFLOAT, INTEGER = 2, 4, 0
CPU, CUDA = 1, 2
COPIED = 2

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
capsule_name = ctypes.pythonapi.PyCapsule_GetName
capsule_name.restype = ctypes.c_char_p
capsule_name.argtypes = [ctypes.py_object]


class Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("version", Version),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


def integers(values: Sequence[int] | None) -> Any:
    return None if values is None else (ctypes.c_int64 * max(len(values), 1))(*values)


class Exporter:
    """An object whose ``__dlpack__`` returns a capsule made by hand, the same one every time.

    ``deleted`` counts the calls of the deleter.  ``shape`` and ``strides`` may be None: the pointer is then NULL.
    """

    def __init__(
        self,
        data: int | None,
        shape: Sequence[int] | None,
        strides: Sequence[int] | None = None,
        *,
        ndim: int | None = None,
        dtype: tuple[int, int, int] = (FLOAT, 32, 1),
        byte_offset: int = 0,
        device: tuple[int, int] = (CPU, 0),
        versioned: bool = True,
        version: tuple[int, int] = (1, 0),
        flags: int = 0,
        deleter: bool = True,
    ) -> None:
        self.deleted = 0
        self._arrays = integers(shape), integers(strides)
        self.managed = ManagedVersioned() if versioned else Managed()
        if isinstance(self.managed, ManagedVersioned):
            self.managed.version = Version(*version)
            self.managed.flags = flags
        if deleter:
            self.managed.deleter = DELETER(self._delete)
        tensor = self.managed.tensor
        tensor.data = data
        tensor.device_type, tensor.device_index = device
        tensor.ndim = len(shape or ()) if ndim is None else ndim
        tensor.code, tensor.bits, tensor.lanes = dtype
        tensor.byte_offset = byte_offset
        for field, array in zip(("shape", "strides"), self._arrays, strict=True):
            if array is not None:
                setattr(tensor, field, array)
        # Kept by the object: a capsule refers to its name, it does not copy it.
        self._name = b"dltensor_versioned" if versioned else b"dltensor"
        self.capsule = new_capsule(ctypes.addressof(self.managed), self._name, None)

    def _delete(self, _managed: int) -> None:
        self.deleted += 1

    def __dlpack__(self) -> Any:
        return self.capsule


ALLOCATE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
FROM_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
TO_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
TENSOR_FROM_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
CURRENT_STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Table(ctypes.Structure):
    """An exchange table.  Tables must outlive every type that names them: tests keep them in ``ALIVE``."""

    _fields_ = (
        ("version", Version),
        ("previous", ctypes.c_void_p),
        ("allocate", ALLOCATE),
        ("managed_from_object", FROM_OBJECT),
        ("managed_to_object", TO_OBJECT),
        ("tensor_from_object", TENSOR_FROM_OBJECT),
        ("current_stream", CURRENT_STREAM),
    )


ALIVE: list[Any] = []


def table_type(table: Table, *, name: bytes = b"dlpack_exchange_api", **members: Any) -> Any:
    """A new class that offers ``table``."""
    ALIVE.extend((table, name))
    capsule = new_capsule(ctypes.addressof(table), name, None)
    return type("Foreign", (), {"__dlpack_c_exchange_api__": capsule, **members})
