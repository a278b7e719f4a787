"""The module itself: its functions over tensors, its knobs, and what the shared object shows to the outside."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.inside import _C

import ddp_mp

FLOATING = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def knobs() -> Iterator[None]:
    """Leaves the host backend as it was."""
    inline, stream, isa = _C.host_set_inline_bytes(0), _C.host_set_stream_bytes(0), _C.host_isa()
    _C.host_set_inline_bytes(inline)
    _C.host_set_stream_bytes(stream)
    yield
    _C.host_hold(False)
    _C.host_fail_at(0)
    _C.host_set_inline_bytes(inline)
    _C.host_set_stream_bytes(stream)
    _C.host_set_isa(isa)


# --- cast ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("src", FLOATING, ids=str)
@pytest.mark.parametrize("dst", FLOATING, ids=str)
def test_cast_gives_the_bits_of_to(src: torch.dtype, dst: torch.dtype) -> None:
    values = torch.randn(1000, dtype=torch.float64).to(src)
    out = torch.empty(1000, dtype=dst)
    _C.cast(values, out)
    assert torch.equal(out, values.to(dst))


def test_cast_of_other_shape_is_in_memory_order() -> None:
    values = torch.randn(3, 4).t()
    flat = torch.empty(12, dtype=torch.bfloat16)
    _C.cast(values, flat)
    assert torch.equal(flat, values.t().reshape(-1).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("src", "dst", "error", "text"),
    [
        (torch.zeros(3), torch.zeros(4), ValueError, "src: expected 4 elements, as dst has, got 3"),
        (torch.zeros(3, 4).t(), torch.zeros(4, 3), ValueError, "src: expected the strides of dst"),
        (torch.zeros(8)[::2], torch.zeros(4), ValueError, "src: expected a dense tensor"),
        (torch.zeros(4), torch.zeros(8)[::2], ValueError, "dst: expected a dense tensor"),
        (torch.zeros(4, dtype=torch.int32), torch.zeros(4), TypeError, "src: expected float64, .* or float16, got int32"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.bool), TypeError, "dst: expected float64, .* or float16, got bool"),
        (torch.zeros(4), torch.zeros(4, device="meta"), BufferError, "dst cannot be read: a meta tensor"),
        (None, torch.zeros(4), TypeError, "src: expected a tensor, got None"),
        (torch.zeros(4), None, BufferError, "dst cannot be read"),
    ],
)
def test_cast_bad_operand_is_named(src: Any, dst: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _C.cast(src, dst)


def test_cast_of_nothing_is_legal() -> None:
    _C.cast(torch.empty(0), torch.empty(0, dtype=torch.float16))


def test_cast_wrong_number_of_arguments_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="takes 2 arguments, src and dst, got 1"):
        _C.cast(torch.zeros(1))  # type: ignore[call-arg]


def test_cast_long_lets_other_threads_run() -> None:
    """A counter in another thread goes on while one cast of many runs here."""
    values, out = torch.randn(1 << 25), torch.empty(1 << 25, dtype=torch.bfloat16)
    _C.cast(values, out)  # the pages are there now
    count, go = [0], [True]

    def counting() -> None:
        while go[0]:
            count[0] += 1
            time.sleep(0)  # gives the GIL up

    thread = threading.Thread(target=counting, daemon=True)
    # With this interval nobody takes the GIL from a thread that does not give it up.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        while not count[0]:
            time.sleep(0)
        before = count[0]
        _C.cast(values, out)
        during = count[0] - before
    finally:
        go[0] = False
        sys.setswitchinterval(interval)
    assert during > 0
    assert torch.equal(out, values.to(torch.bfloat16))


# --- fuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [False, True])
def test_fuse_is_sum_over_divisor(private: bool) -> None:
    _C.host_set_inline_bytes(0)
    sizes = [5, 0, 1000, 1]
    src = [torch.randn(n, dtype=torch.bfloat16) for n in sizes]
    add = [torch.randn(5), torch.randn(0), torch.randn(1000), None]
    dst = [torch.full((n,), 7.0) for n in sizes]
    _C.fuse(src, add, dst, 4.0, private=private)
    for one, other, out in zip(src, add, dst, strict=True):
        expected = one.float() if other is None else one.float() + other
        assert torch.equal(out, expected / 4)


def test_fuse_none_counts_as_zeros() -> None:
    out = [torch.full((3,), 7.0), torch.full((2,), 7.0)]
    _C.fuse([None, None], [torch.ones(3), None], out, 2.0)
    assert [one.tolist() for one in out] == [[0.5] * 3, [0.0] * 2]


@settings(deadline=None)
@given(st.lists(st.integers(0, 70), max_size=12), st.sampled_from([1.0, 2.0, 3.0]))
def test_fuse_any_list_converts_every_row(sizes: list[int], divisor: float) -> None:
    src = [torch.randn(n) for n in sizes]
    dst = [torch.empty(n) for n in sizes]
    _C.fuse(src, [None] * len(sizes), dst, divisor)
    assert all(torch.equal(out, one / divisor) for one, out in zip(src, dst, strict=True))


def test_fuse_lists_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="add: expected 2 tensors, as src has, got 1"):
        _C.fuse([None] * 2, [None], [torch.zeros(1)] * 2, 1.0)
    with pytest.raises(ValueError, match="dst: expected 0 tensors, as src has, got 1"):
        _C.fuse([], [], [torch.zeros(1)], 1.0)


def test_fuse_failure_is_a_device_error_and_the_next_call_works() -> None:
    """Whatever step fails: an error, and nothing is left behind that keeps the next call from working."""
    _C.host_set_inline_bytes(0)
    one, out = torch.ones(4), torch.zeros(4)
    failures = 0
    for nth in range(1, 20):
        _C.host_fail_at(nth)
        try:
            _C.fuse([one], [None], [out], 1.0, private=True)
        except _C.DeviceError:
            failures += 1
        finally:
            _C.host_fail_at(0)
        _C.fuse([one], [None], [out], 1.0, private=True)
        assert torch.equal(out, one)
    assert 4 <= failures < 19


def test_fuse_gives_its_event_back() -> None:
    """Else every call would take another one from the pool."""
    module = torch.nn.Linear(1, 1, bias=False)
    sites = [(module._parameters, "weight", 0)]
    engine = _C.Engine([module.weight], ["weight"], sites, "bfloat16", 1024, 1024)
    one, out, handles = torch.ones(4), torch.zeros(4), set()
    for _ in range(300):
        _C.fuse([one], [None], [out], 1.0, private=True)
        handles.add(engine.event(0).native_handle)
    assert len(handles) < 30


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif("DDP_MP_UNDER_SANITIZER" in os.environ, reason="a sanitizer keeps freed memory")
def test_fuse_frees_its_table() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    rows = 4000
    src, dst = list(torch.ones(rows, 1)), list(torch.zeros(rows, 1))
    for _ in range(5):
        _C.fuse(src, [None] * rows, dst, 1.0)
    before = resident()
    for _ in range(100):  # 25 MB of rows
        _C.fuse(src, [None] * rows, dst, 1.0)
    assert resident() - before < 10e6


# --- unshared ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", [list, tuple])
def test_unshared_sees_every_other_owner(container: type) -> None:
    made = container(torch.zeros(1) for _ in range(3))
    assert _C.unshared(made) is True
    other = made[2]
    assert _C.unshared(made) is False
    assert _C.unshared(made, 2) is True
    assert _C.unshared(made, references=2) is True
    del other
    assert _C.unshared(made) is True
    held = [made[0]]
    assert _C.unshared(made) is False
    held.clear()
    assert _C.unshared(made) is True


def test_unshared_of_nothing_is_true() -> None:
    assert _C.unshared([]) is True


def test_unshared_takes_lists_and_tuples_only() -> None:
    with pytest.raises(TypeError, match="tensors: expected a list or tuple, got generator"):
        _C.unshared(torch.zeros(1) for _ in range(2))  # type: ignore[arg-type]


# --- plan ----------------------------------------------------------------------------------------------------------


def test_plan_rows_tile_their_buckets() -> None:
    planned = _C.plan([100, 0, 5000, 70], "bfloat16", 512, 4096)
    assert len(planned["rows"]) == 4
    assert [first for first, _, _ in planned["buckets"]] == sorted({first for first, _, _ in planned["buckets"]})
    assert sum(count for _, count, _ in planned["buckets"]) == 4
    for first, count, size in planned["buckets"]:
        for numel, (bucket, offset) in list(zip([100, 0, 5000, 70], planned["rows"], strict=True))[first:][:count]:
            assert planned["buckets"][bucket] == (first, count, size)
            assert offset % 256 == 0
            assert offset + 2 * numel <= size or numel == 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1], "int8", 1, 1), TypeError, "low_dtype 'int8': expected float64, float32, bfloat16 or float16"),
        (([3, -1], "bfloat16", 1, 1), ValueError, r"numels\[1\]: expected at least 0 elements, got -1"),
        (([1], "bfloat16", 0, 1), ValueError, "limits of at least 1 byte, got 0 and 1"),
        (([1], "bfloat16", 1, 0), ValueError, "limits of at least 1 byte, got 1 and 0"),
        (([2**62], "bfloat16", 1, 1), OverflowError, "63 bits"),
        (([2**63], "bfloat16", 1, 1), OverflowError, "too (big|large)"),
        ((["1"], "bfloat16", 1, 1), TypeError, "integer"),
        ((5, "bfloat16", 1, 1), TypeError, "iterable"),
    ],
)
def test_plan_bad_argument_is_refused(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _C.plan(*arguments)


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16"])
def test_plan_rows_have_the_bytes_of_every_type_that_is_cast(name: str) -> None:
    size = 64 * getattr(torch, name).itemsize
    assert _C.plan([64, 64], name, 1 << 20, 1 << 20)["buckets"] == [(0, 2, 2 * -(-size // 256) * 256)]


# --- knobs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knob", [_C.host_set_inline_bytes, _C.host_set_stream_bytes])
def test_host_size_returns_the_previous_value(knob: Any) -> None:
    first = knob(123)
    assert knob(2**64 - 1) == 123
    assert knob(first) == 2**64 - 1
    for bad, error in ((-1, OverflowError), (2**64, OverflowError), ("1", TypeError), (None, TypeError)):
        with pytest.raises(error):
            knob(bad)
    assert knob(first) == first


def test_host_isa_every_available_one_can_be_chosen() -> None:
    available = _C.build_info()["simd_available"]
    assert "scalar" in available
    values, out = torch.randn(1000), torch.empty(1000, dtype=torch.bfloat16)
    for name in available:
        _C.host_set_isa(name)
        assert _C.host_isa() == _C.build_info()["simd"] == name
        _C.cast(values, out)
        assert torch.equal(out, values.to(torch.bfloat16))
    _C.host_set_isa(None)
    assert _C.host_isa() == available[0]
    with pytest.raises(ValueError, match=r"'sse9' cannot run here: expected one of .*'scalar'"):
        _C.host_set_isa("sse9")
    with pytest.raises(TypeError):
        _C.host_set_isa(5)  # type: ignore[arg-type]
    assert _C.host_isa() == available[0]


def test_host_hold_stops_and_lets_go() -> None:
    _C.host_set_inline_bytes(0)
    one, out = torch.ones(4), torch.zeros(4)
    _C.host_hold(True)
    thread = threading.Thread(target=_C.fuse, args=([one], [None], [out], 1.0, True), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    assert torch.equal(out, torch.zeros(4))
    _C.host_hold(False)
    thread.join(30)
    assert not thread.is_alive()
    assert torch.equal(out, one)


# --- the shared object ---------------------------------------------------------------------------------------------


def test_build_info_says_how_it_was_built() -> None:
    from ddp_mp._version import __version__

    info = _C.build_info()
    assert info["version"] == __version__
    assert info["python"].startswith(".".join(map(str, sys.version_info[:2])))
    assert info["compiler"].split()[0] in ("gcc", "clang")
    assert info["simd"] in info["simd_available"]
    assert info["cuda_image"]["note"]
    assert info["cuda"]
    assert (info["cuda_image"]["size"] > 0) <= (info["cuda_image"]["source"] > 0)


def test_constants_are_those_of_the_stub() -> None:
    assert (_C.UNCHANGED, _C.MOVED, _C.REPLACED) == (0, 1, 2)


def test_device_error_is_found_where_tracebacks_say_it_is() -> None:
    error = _C.DeviceError
    assert error is getattr(ddp_mp, error.__name__)
    assert error.__module__ == "ddp_mp"


def output(*command: str, **options: Any) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="nm and ldd of Linux")
def test_shared_object_exports_its_init_alone() -> None:
    names = {line.split()[-1] for line in output("nm", "--dynamic", "--defined-only", _C.__file__).splitlines()}
    assert {name for name in names if not name.startswith(("_init", "_fini", "__"))} == {"PyInit__C"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="nm and ldd of Linux")
def test_shared_object_links_neither_cuda_nor_torch() -> None:
    linked = output("ldd", _C.__file__)
    assert "libc.so" in linked
    for library in ("libcuda", "libcudart", "libnvrtc", "libtorch", "libc10", "libpython"):
        assert library not in linked


def test_import_opens_no_driver(tmp_path: Path) -> None:
    """In a process of its own: neither the import nor a cast on the host loads the driver."""
    program = (
        "import torch\n"
        "before = 'libcuda.so' in open('/proc/self/maps').read()\n"
        "from ddp_mp import _C\n"
        "_C.cast(torch.ones(4), torch.zeros(4, dtype=torch.bfloat16))\n"
        "_C.build_info()\n"
        "assert before or 'libcuda.so' not in open('/proc/self/maps').read()\n"
        "print(_C.build_info()['cuda_driver'])\n"
    )
    # The current folder comes first on the path of `python -c`.
    assert output(sys.executable, "-c", program, cwd=tmp_path).strip() == "0"


def test_import_twice_gives_modules_that_work_side_by_side() -> None:
    """State is the module's: a second copy shares none of it, and its types keep it as long as they need it."""
    spec = importlib.util.spec_from_file_location("ddp_mp._C", _C.__file__)
    assert spec is not None
    assert spec.loader is not None
    second = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(second)
    assert second is not _C
    assert second.DeviceError is not _C.DeviceError
    tensor = torch.zeros(3)
    assert second.describe(tensor) == _C.describe(tensor)
    engine = second.Engine([tensor], ["tensor"], [], "bfloat16", 1, 1)
    device_error = second.DeviceError
    del second, spec
    gc.collect()
    assert engine.check() == _C.UNCHANGED
    assert issubclass(device_error, RuntimeError)


SUB_INTERPRETER = """
import importlib.util
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import torch
from ddp_mp import _C

text = f'''
import importlib.util, sys
spec = importlib.util.spec_from_file_location("ddp_mp._C", {_C.__file__!r})
try:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    print("imported")
except ImportError as error:
    print(error)
sys.stdout.flush()
'''
for _ in range(3):
    interpreter = interpreters.create()
    interpreters.run_string(interpreter, text)
    interpreters.destroy(interpreter)
out = torch.zeros(4, dtype=torch.bfloat16)
_C.cast(torch.arange(4.0), out)
print(out.tolist())
"""


def test_import_in_a_sub_interpreter_is_refused_and_the_main_one_goes_on(tmp_path: Path) -> None:
    if not any(importlib.util.find_spec(name) for name in ("_interpreters", "_xxsubinterpreters")):
        pytest.skip("this Python cannot make sub-interpreters")
    lines = output(sys.executable, "-c", SUB_INTERPRETER, cwd=tmp_path).splitlines()
    assert len(lines) == 4
    # two texts: that of the extension, and that of the interpreter since Python 3.12
    assert all(re.search(r"ddp_mp\._C.* (a sub-interpreter|subinterpreters)", line) for line in lines[:3]), lines
    assert lines[3] == "[0.0, 1.0, 2.0, 3.0]"


def test_import_makes_no_tensor_on_the_default_device() -> None:
    """Which may be one that is not there, or must not be opened before a fork."""
    output(sys.executable, "-c", "import torch; torch.set_default_device('cuda'); import ddp_mp")
