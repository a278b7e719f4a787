"""DLPack in ctypes: exchange tables made by hand, as a foreign library might hand them over."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

FLOAT, BFLOAT, INTEGER = 2, 4, 0
CPU, CUDA = 1, 2

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


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


def integers(values: Sequence[int] | None) -> Any:
    return None if values is None else (ctypes.c_int64 * max(len(values), 1))(*values)


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


@CURRENT_STREAM
def _default_stream(_device_type: int, _device_index: int, out: Any) -> int:
    out[0] = None
    return 0


def describing(describe: Any, major: int = 1, current_stream: Any = _default_stream, **more: Any) -> Table:
    """A table with this way to describe a tensor."""
    return Table(version=Version(major, 0), tensor_from_object=describe, current_stream=current_stream, **more)


def described_as(
    data: int | None,
    shape: Sequence[int] | None,
    strides: Sequence[int] | None = None,
    *,
    ndim: int | None = None,
    dtype: tuple[int, int, int] = (FLOAT, 32, 1),
    byte_offset: int = 0,
    device: tuple[int, int] = (CPU, 0),
) -> tuple[DLTensor, Any]:
    """A description, and what it points to.  ``shape`` and ``strides`` may be None: the pointer is then NULL."""
    sizes, steps = integers(shape), integers(strides)
    tensor = DLTensor(data, *device, len(shape or ()) if ndim is None else ndim, *dtype, byte_offset=byte_offset)
    for field, array in (("shape", sizes), ("strides", steps)):
        if array is not None:
            setattr(tensor, field, array)
    return tensor, (sizes, steps)


def described(*facts: Any, **more: Any) -> Any:
    """An object of a type of its own, with the description that :func:`described_as` makes."""
    tensor, kept = described_as(*facts, **more)

    @TENSOR_FROM_OBJECT
    def describe(_object: object, out: Any) -> int:
        out[0] = tensor
        return 0

    return table_type(describing(describe), keep=kept)()
