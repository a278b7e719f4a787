"""What the extension reads of a tensor, by the exchange table of its type."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.dlpack import (
    BFLOAT,
    CUDA,
    CURRENT_STREAM,
    FLOAT,
    INTEGER,
    TENSOR_FROM_OBJECT,
    Table,
    Version,
    described,
    describing,
    integers,
    table_type,
)
from kit.inside import _C
from torch.nn import Parameter, UninitializedParameter


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """By enumeration: the elements' offsets are 0, 1, ..., numel - 1."""
    offsets = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, shape))]
    return sorted(offsets) == list(range(len(offsets)))


# --- tensors that can be read -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "float64"),
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
        (torch.int64, "none"),
        (torch.uint8, "none"),
        (torch.bool, "none"),
        (torch.complex64, "none"),
        (torch.float8_e4m3fn, "none"),
    ],
)
def test_describe_dtype_is_named(dtype: torch.dtype, name: str) -> None:
    tensor = torch.empty(2, 3, dtype=dtype)
    assert _C.describe(tensor) == {
        "data": tensor.data_ptr(),
        "numel": 6,
        "dtype": name,
        "dense": True,
        "device_type": 1,
        "device_index": 0,
        "shape": (2, 3),
        "strides": (3, 1),
    }


def test_describe_scalar_has_one_element() -> None:
    facts = _C.describe(torch.tensor(1.0))
    assert (facts["numel"], facts["shape"], facts["strides"], facts["dense"]) == (1, (), (), True)


LAYOUTS: dict[str, tuple[Callable[[], torch.Tensor], bool]] = {
    "contiguous": (lambda: torch.randn(2, 3, 4, 5), True),
    "channels_last": (lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
    "channels_last_2311": (lambda: torch.randn(2, 3, 1, 1).to(memory_format=torch.channels_last), True),
    "channels_last_3d": (lambda: torch.randn(2, 3, 1, 2, 1).to(memory_format=torch.channels_last_3d), True),
    "transposed": (lambda: torch.randn(3, 5).t(), True),
    "permuted": (lambda: torch.randn(2, 3, 4).permute(2, 0, 1), True),
    "one of every third": (lambda: torch.randn(16)[::3][:1], True),
    "odd stride of a size-1 dimension": (lambda: torch.randn(12).as_strided((1, 3), (7, 1)), True),
    "slice of rows": (lambda: torch.randn(8, 3)[2:5], True),
    "slice of columns": (lambda: torch.randn(8, 3)[:, :2], False),
    "every second": (lambda: torch.randn(8)[::2], False),
    "expanded": (lambda: torch.randn(3).expand(4, 3), False),
    "expanded to one": (lambda: torch.randn(3).expand(1, 3), True),
    "overlapping": (lambda: torch.randn(8).as_strided((3, 3), (2, 1)), False),
    "diagonal": (lambda: torch.randn(4, 4).diagonal(), False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_describe_layout_is_dense_or_not(layout: str) -> None:
    make, dense = LAYOUTS[layout]
    tensor = make()
    facts = _C.describe(tensor)
    assert facts["data"] == tensor.data_ptr()
    assert facts["numel"] == tensor.numel()
    assert facts["shape"] == tuple(tensor.shape)
    assert facts["dense"] is dense
    # Strides are the tensor's own wherever one steps along them.
    for size, seen, own in zip(tensor.shape, facts["strides"], tensor.stride(), strict=True):
        assert size == 1 or seen == own


def test_describe_size_1_strides_are_those_of_row_major() -> None:
    """Exporters differ in what they report there, so that only a normal form can be compared."""
    rows = _C.describe(torch.zeros(2, 3, 1, 1))
    channels = _C.describe(torch.zeros(2, 3, 1, 1).to(memory_format=torch.channels_last))
    assert rows["strides"] == channels["strides"] == (3, 1, 1, 1)
    assert _C.describe(torch.zeros(16)[::3][:1])["strides"] == (1,)
    assert _C.describe(torch.zeros(12).as_strided((1, 3), (7, 1)))["strides"] == (3, 1)


@pytest.mark.parametrize("layout", [name for name, (_, dense) in LAYOUTS.items() if dense])
def test_cast_dense_layout_gives_the_bits_of_to(layout: str) -> None:
    tensor = LAYOUTS[layout][0]()
    low = torch.empty_like(tensor, dtype=torch.bfloat16)
    _C.cast(tensor, low)
    torch.testing.assert_close(low, tensor.to(torch.bfloat16), rtol=0, atol=0)


@pytest.mark.parametrize("layout", [name for name, (_, dense) in LAYOUTS.items() if not dense])
def test_cast_other_layout_is_refused(layout: str) -> None:
    tensor = LAYOUTS[layout][0]()
    low = torch.full(tensor.shape, 7.0, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"src: expected a dense tensor"):
        _C.cast(tensor, low)
    assert torch.equal(low, torch.full_like(low, 7.0))


shapes_and_strides = st.integers(0, 4).flatmap(
    lambda ndim: st.tuples(
        st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim),
        st.lists(st.integers(0, 13), min_size=ndim, max_size=ndim),
    )
)


@settings(deadline=None)
@given(shapes_and_strides)
def test_describe_random_strides_agrees_with_enumeration(drawn: tuple[list[int], list[int]]) -> None:
    shape, strides = map(tuple, drawn)
    tensor = torch.zeros(4 * 4 * 13 + 1).as_strided(shape, strides)
    assert _C.describe(tensor)["dense"] is is_dense(shape, strides)


@settings(deadline=None)
@given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_describe_any_permutation_is_dense(order: list[int], shape: list[int]) -> None:
    assert _C.describe(torch.zeros(shape).permute(order))["dense"] is True


@settings(deadline=None)
@given(shapes_and_strides, st.sampled_from([1, -1]))
def test_describe_any_strides_agree_with_enumeration(drawn: tuple[list[int], list[int]], sign: int) -> None:
    """By a description made by hand: nobody has put the strides in order, and they may be negative."""
    shape, strides = drawn[0], [sign * s for s in drawn[1]]
    stepped = [s if n > 1 else 0 for n, s in zip(shape, strides, strict=True)]
    memory = ctypes.create_string_buffer(64)
    assert _C.describe(described(aligned(memory), shape, strides))["dense"] is is_dense(tuple(shape), tuple(stepped))


def test_describe_empty_is_dense() -> None:
    for shape in [(0,), (0, 3), (3, 0), (2, 0, 5)]:
        facts = _C.describe(torch.empty(shape))
        assert (facts["numel"], facts["shape"], facts["dense"]) == (0, shape, True)


def test_describe_view_with_offset_points_at_its_first_element() -> None:
    base = torch.arange(10.0)
    facts = _C.describe(base[3:])
    assert facts["data"] == base.data_ptr() + 12


def test_describe_requires_grad_is_read() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    assert _C.describe(leaf)["data"] == leaf.data_ptr()
    assert _C.describe(leaf * 1)["numel"] == 3


def test_describe_parameter_and_subclasses_are_read() -> None:
    class Plain(torch.Tensor):
        pass

    class Special(Parameter):
        pass

    base = torch.zeros(3)
    for tensor in (Parameter(base), base.as_subclass(Plain), Special(base)):
        assert _C.describe(tensor)["data"] == base.data_ptr()


def test_describe_data_switched_sees_the_new_pointer() -> None:
    parameter = Parameter(torch.zeros(3))
    low = torch.zeros(3, dtype=torch.bfloat16)
    for data, name in ((torch.ones(3), "float32"), (low, "bfloat16")):
        parameter.data = data
        facts = _C.describe(parameter)
        assert (facts["data"], facts["dtype"]) == (data.data_ptr(), name)


def test_describe_numpy_read_only_is_read() -> None:
    array = np.arange(4, dtype=np.float32)
    array.flags.writeable = False
    with warnings.catch_warnings():  # PyTorch says once that it cannot keep anybody from writing
        warnings.simplefilter("ignore")
        tensor = torch.from_numpy(array)
    assert _C.describe(tensor)["data"] == array.ctypes.data


def test_describe_lazy_clone_has_memory_of_its_own() -> None:
    base = torch.arange(4.0)
    clone = torch._lazy_clone(base)
    pointer = _C.describe(clone)["data"]
    low = torch.empty(4, dtype=torch.bfloat16)
    _C.cast(clone, low)
    assert pointer == clone.data_ptr() != base.data_ptr()
    assert torch.equal(low, base.to(torch.bfloat16))


# --- tensors that cannot -------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_describe_dtensor_is_refused(one_rank: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    tensor = DTensor.from_local(torch.zeros(3), init_device_mesh("cpu", (1,)), [Replicate()])
    with pytest.raises(BufferError, match="cannot be read"):
        _C.describe(tensor)
    assert _C.describe(tensor.to_local())["numel"] == 3


def freed() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def wrapper() -> torch.Tensor:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.detach.default:
                return args[0]
            raise NotImplementedError(func)

    return torch.Tensor._make_wrapper_subclass(Wrapper, (3,))


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(3)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "freed storage": (freed, "no memory|not export"),
    "wrapper": (wrapper, "no memory|not export"),
    "fake": (fake, "no memory|not export"),
    "zero tensor": (lambda: torch._efficientzerotensor((3,)), "no memory|not export"),
    "meta": (lambda: torch.zeros(3, device="meta"), "a meta tensor has no memory"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "a sparse tensor"),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), "a sparse tensor"),
    "mkldnn": (lambda: torch.zeros(3, 3).to_mkldnn(), "MKL-DNN"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "no memory|not export|nested"),
    "conjugate": (lambda: torch.zeros(3, dtype=torch.complex64).conj(), "conjugate bit|not export"),
    "negative": (lambda: torch.randn(3, dtype=torch.complex64).conj().imag, "negative bit|not export"),
    "33 dimensions": (lambda: torch.zeros([1] * 33), "more dimensions"),
    "misaligned": (lambda: torch.frombuffer(bytearray(16), dtype=torch.float32, offset=1, count=3), "not aligned"),
    "uninitialized": (UninitializedParameter, "does not say"),
    "int": (lambda: 5, "offers no DLPack exchange table"),
    "None": (lambda: None, "offers no DLPack exchange table"),
    "type": (lambda: torch.Tensor, "offers no DLPack exchange table"),
    "numpy array": (lambda: np.zeros(3), "offers no DLPack exchange table"),
}


@pytest.mark.filterwarnings("ignore:.*(prototype|beta|Sparse).*:UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_describe_unreadable_is_refused_with_the_reason(kind: str) -> None:
    make, reason = REFUSED[kind]
    with pytest.raises(BufferError, match=reason):
        _C.describe(make())


def test_describe_negative_view_resolved_is_read() -> None:
    negative = torch.randn(3, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    assert _C.describe(negative.resolve_neg())["numel"] == 3


def test_describe_freed_storage_brought_back_is_read() -> None:
    tensor = torch.zeros(3)
    size = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)
    with pytest.raises(BufferError):
        _C.describe(tensor)
    tensor.untyped_storage().resize_(size)
    assert _C.describe(tensor)["data"] == tensor.data_ptr() != 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit])
@pytest.mark.parametrize("method", ["is_neg", "is_conj"])
def test_describe_error_of_the_process_passes(error: type[BaseException], method: str, memory: Any) -> None:
    def fail(self: object) -> None:
        raise error("passes")

    with pytest.raises(error, match="passes"):
        _C.describe(table_type(foreign_table(aligned(memory)), **{method: fail})())


@pytest.mark.parametrize("method", ["is_neg", "is_conj"])
def test_describe_error_of_the_tensor_is_a_refusal(method: str, memory: Any) -> None:
    def fail(self: object) -> None:
        raise ValueError("does not pass")

    with pytest.raises(BufferError, match="does not say") as caught:
        _C.describe(table_type(foreign_table(aligned(memory)), **{method: fail})())
    assert caught.value.__context__ is None


def test_describe_error_of_the_type_passes() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            if name == "__dlpack_c_exchange_api__":
                raise KeyboardInterrupt
            return super().__getattribute__(name)

    class Strange(metaclass=Meta):
        pass

    with pytest.raises(KeyboardInterrupt):
        _C.describe(Strange())  # type: ignore[arg-type]


# --- descriptions made by hand -------------------------------------------------------------------------------------


def aligned(memory: Any) -> int:
    """An address inside the buffer that suits every element type; 48 bytes behind it are the buffer's."""
    return (ctypes.addressof(memory) + 15) & ~15


@pytest.fixture
def memory() -> Any:
    return ctypes.create_string_buffer(64)


def test_description_is_read(memory: Any) -> None:
    facts = _C.describe(described(aligned(memory), (2, 3), (3, 1)))
    assert (facts["data"], facts["numel"], facts["strides"]) == (aligned(memory), 6, (3, 1))


def test_description_null_strides_is_row_major(memory: Any) -> None:
    facts = _C.describe(described(aligned(memory), (2, 1, 3), None))
    assert (facts["strides"], facts["dense"]) == ((3, 3, 1), True)


def test_description_byte_offset_is_added(memory: Any) -> None:
    assert _C.describe(described(aligned(memory), (3,), (1,), byte_offset=8))["data"] == aligned(memory) + 8


def test_description_byte_offset_counts_for_values() -> None:
    values = np.arange(6, dtype=np.float32)
    low = torch.empty(3, dtype=torch.bfloat16)
    _C.cast(described(values.ctypes.data, (3,), (1,), byte_offset=12), low)
    assert low.tolist() == [3.0, 4.0, 5.0]


def test_description_empty_without_memory_is_read() -> None:
    facts = _C.describe(described(None, (0, 3), byte_offset=8))
    assert (facts["data"], facts["numel"], facts["dense"]) == (0, 0, True)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ((FLOAT, 64, 1), "float64"),
        ((FLOAT, 16, 1), "float16"),
        ((BFLOAT, 16, 1), "bfloat16"),
        ((BFLOAT, 32, 1), "none"),
        ((FLOAT, 8, 1), "none"),
        ((FLOAT, 32, 2), "none"),
        ((FLOAT, 32, 0), "none"),
        ((INTEGER, 32, 1), "none"),
    ],
)
def test_description_dtype_is_named(memory: Any, dtype: tuple[int, int, int], name: str) -> None:
    assert _C.describe(described(aligned(memory), (3,), dtype=dtype))["dtype"] == name


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no memory": ({"data": None}, "no memory"),
    "no memory, with offset": ({"data": None, "byte_offset": 64}, "no memory"),
    "no shape": ({"shape": None, "ndim": 1}, "no shape"),
    "negative ndim": ({"ndim": -1}, "more dimensions"),
    "too many dimensions": ({"ndim": 33, "shape": [1] * 33}, "more dimensions"),
    "most dimensions": ({"ndim": 2**31 - 1}, "more dimensions"),
    "negative size": ({"shape": (3, -1)}, "negative size"),
    "negative size beside 0": ({"shape": (0, -1)}, "negative size"),
    "elements overflow": ({"shape": (2**32, 2**32)}, "63 bits"),
    "elements wrap to few": ({"shape": (2**32, 2**32, 3)}, "63 bits"),
    "bytes overflow": ({"shape": (2**61,)}, "63 bits"),
    "offset overflows": ({"byte_offset": 2**64 - 4}, "byte offset"),
    "misaligned": ({"byte_offset": 2}, "not aligned"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_description_malformed_is_refused(memory: Any, kind: str) -> None:
    changes, reason = MALFORMED[kind]
    with pytest.raises(BufferError, match=reason):
        _C.describe(described(**{"data": aligned(memory), "shape": (3,), **changes}))


def test_description_empty_with_overflowing_sizes_is_empty(memory: Any) -> None:
    facts = _C.describe(described(aligned(memory), (2**62, 4, 0), (0, 0, 0)))
    assert (facts["numel"], facts["dense"]) == (0, True)


def test_description_extreme_strides_are_not_dense(memory: Any) -> None:
    for stride in (2**63 - 1, -(2**63)):
        assert _C.describe(described(aligned(memory), (2, 1, 3), (1, 1, stride)))["dense"] is False


def test_description_of_another_device_has_no_backend(memory: Any) -> None:
    assert _C.describe(described(aligned(memory), (3,), device=(8, 1)))["device_type"] == 8
    with pytest.raises(ValueError, match="no backend for DLPack device type 8"):
        _C.cast(described(aligned(memory), (3,), device=(8, 0)), described(aligned(memory) + 16, (3,), device=(8, 0)))


# --- exchange tables made by hand ----------------------------------------------------------------------------------


def foreign_table(address: int, shape: tuple[int, ...] = (3,), major: int = 1, **functions: Any) -> Table:
    """A table that describes every object as float32 memory at `address`."""
    sizes = integers(shape)

    @TENSOR_FROM_OBJECT
    def describe(_object: object, out: Any) -> int:
        out[0].data = address
        out[0].device_type, out[0].device_index = 1, 0
        out[0].ndim, out[0].shape, out[0].strides = len(shape), sizes, None
        out[0].code, out[0].bits, out[0].lanes = FLOAT, 32, 1
        out[0].byte_offset = 0
        return 0

    table = describing(functions.pop("describe", describe), major, **functions)
    table.keep = describe, sizes
    return table


def test_table_of_another_version_is_passed_over_for_an_older_one(memory: Any) -> None:
    old = foreign_table(aligned(memory))
    middle = Table(version=Version(2, 0), previous=ctypes.addressof(old))
    newest = Table(version=Version(3, 0), previous=ctypes.addressof(middle))
    kind = table_type(newest, keep=(old, middle))
    assert _C.describe(kind())["data"] == aligned(memory)


def test_table_of_another_version_alone_is_a_refusal(memory: Any) -> None:
    with pytest.raises(BufferError, match="offers no DLPack exchange table"):
        _C.describe(table_type(foreign_table(aligned(memory), major=2))())


def test_table_chain_that_is_a_ring_ends() -> None:
    ring = Table(version=Version(2, 0))
    ring.previous = ctypes.addressof(ring)
    with pytest.raises(BufferError, match="offers no DLPack exchange table"):
        _C.describe(table_type(ring)())


def test_table_in_a_capsule_of_another_name_is_ignored(memory: Any) -> None:
    with pytest.raises(BufferError, match="offers no DLPack exchange table"):
        _C.describe(table_type(foreign_table(aligned(memory)), name=b"other")())


@pytest.mark.parametrize("function", ["tensor_from_object", "current_stream"])
def test_table_that_lacks_a_function_is_a_refusal(memory: Any, function: str) -> None:
    table = foreign_table(aligned(memory))
    setattr(table, function, type(getattr(table, function))())
    with pytest.raises(BufferError, match="offers no DLPack exchange table"):
        _C.describe(table_type(table)())


def test_table_that_fails_without_exception_is_a_refusal(memory: Any) -> None:
    table = foreign_table(aligned(memory), describe=TENSOR_FROM_OBJECT(lambda _object, _out: -1))
    with pytest.raises(BufferError, match="not export"):
        _C.describe(table_type(table)())


def test_table_byte_offset_is_added(memory: Any) -> None:
    inner = foreign_table(aligned(memory))

    @TENSOR_FROM_OBJECT
    def describe(given: object, out: Any) -> int:
        inner.tensor_from_object(given, out)
        out[0].byte_offset = 16
        return 0

    assert _C.describe(table_type(foreign_table(0, describe=describe))())["data"] == aligned(memory) + 16


def test_current_stream_is_asked_of_the_table_each_time(memory: Any) -> None:
    asked = []

    @TENSOR_FROM_OBJECT
    def describe(given: object, out: Any) -> int:
        inner.tensor_from_object(given, out)
        out[0].device_type, out[0].device_index = CUDA, 3
        return 0

    @CURRENT_STREAM
    def stream(device_type: int, device_index: int, out: Any) -> int:
        asked.append((device_type, device_index))
        out[0] = 0x1000 * len(asked)
        return 0

    inner = foreign_table(aligned(memory))
    tensor = table_type(foreign_table(0, describe=describe, current_stream=stream))()
    assert [_C.current_stream(tensor) for _ in range(3)] == [0x1000, 0x2000, 0x3000]
    assert asked == [(CUDA, 3)] * 3


def test_current_stream_of_the_host_is_0() -> None:
    assert _C.current_stream(torch.zeros(3)) == 0


# --- the cache of types, references --------------------------------------------------------------------------------


def test_type_cache_more_types_than_places_reads_all(memory: Any) -> None:
    kinds = [table_type(foreign_table(aligned(memory), (size,))) for size in range(1, 50)]
    for _ in range(2):
        assert [_C.describe(kind())["numel"] for kind in kinds] == list(range(1, 50))


def test_type_cache_lets_go_of_types() -> None:
    def made() -> weakref.ref[type]:
        kind = type("Passing", (torch.Tensor,), {})
        _C.describe(torch.zeros(1).as_subclass(kind))
        return weakref.ref(kind)

    first = made()
    for _ in range(40):
        made()
    gc.collect()
    assert first() is None


def test_describe_keeps_no_reference() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    before = sys.getrefcount(tensor)
    for _ in range(100):
        _C.describe(tensor)
        _C.current_stream(tensor)
    assert sys.getrefcount(tensor) == before


@pytest.mark.parametrize("kind", ["freed storage", "meta", "negative"])
def test_describe_refused_keeps_no_reference(kind: str) -> None:
    tensor = REFUSED[kind][0]()
    before = sys.getrefcount(tensor)
    for _ in range(100):
        with pytest.raises(BufferError):
            _C.describe(tensor)
    assert sys.getrefcount(tensor) == before
