"""Kernels as nvcc makes them, for every architecture, against PyTorch."""

from __future__ import annotations

import ctypes as C

import numpy as np
import pytest
import torch

from .images import ARCHITECTURES, kernel, sample
from .sim import Schedule
from .test_instructions import floats

pytestmark = pytest.mark.long

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
PAIRS = ["f32 bf16", "f32 f16", "f32 f64", "bf16 f32", "f16 f32", "f64 f32", "bf16 f16", "f16 bf16"]


@pytest.fixture(params=ARCHITECTURES)
def arch(request, simulator, cu):
    """A stream on a device of every architecture, blocks and threads shuffled."""
    simulator.reset(Schedule.LAZY, seed=3)
    simulator.set_devices(request.param)
    cu.start()
    yield cu.stream()
    assert simulator.report() == []


def register(simulator, *tensors: torch.Tensor) -> None:
    for i, tensor in enumerate(tensors):
        simulator.register(tensor.data_ptr(), tensor.nbytes, f"tensor {i}", keep=tensor)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    same = (bits(actual) == bits(expected)) | (actual.isnan() & expected.isnan())
    assert same.all(), ((~same).sum(), actual[~same][:4], expected[~same][:4])


def patterns(dtype: torch.dtype, n: int, seed: int) -> torch.Tensor:
    if dtype in (torch.float32, torch.float64):
        return torch.from_numpy(floats(max(n, 64), seed, np.float32 if dtype == torch.float32 else np.float64)[:n])
    return torch.randint(-(2**15), 2**15, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.int16).view(dtype)


def run_rows(simulator, cu, stream, name: str, sources, targets, grid: int = 5, block: int = 96) -> None:
    table = np.array([[s.data_ptr(), d.data_ptr(), s.numel()] for s, d in zip(sources, targets, strict=True)], np.uint64)
    simulator.register(table.ctypes.data, table.nbytes, "table", keep=table)
    _, function = cu.function(sample(), name)
    arguments = [C.c_uint64(table.ctypes.data), C.c_int(len(sources))]
    cu.launch(function, stream, arguments, grid=grid, block=block)
    cu.cuStreamSynchronize(stream)


@pytest.mark.parametrize("pair", PAIRS)
def test_cast_of_rows_matches_tensor_to(simulator, cu, arch, pair):
    source, target = (DTYPES[name] for name in pair.split())
    sizes = [1, 7, 1024, 1025, 20000]
    sources = [patterns(source, n, i) for i, n in enumerate(sizes)]
    targets = [torch.zeros(n, dtype=target) for n in sizes]
    register(simulator, *sources, *targets)
    run_rows(simulator, cu, arch, "cast_{}_{}".format(*pair.split()), sources, targets)
    for s, t in zip(sources, targets, strict=True):
        assert_equal(t, s.to(target))


@pytest.mark.parametrize("target", ["bf16", "f16"])
def test_cast_of_double_rounds_once(simulator, cu, arch, target):
    x = patterns(torch.float64, 4096, 1)
    y = torch.zeros(4096, dtype=DTYPES[target])
    register(simulator, x, y)
    run_rows(simulator, cu, arch, f"cast_f64_{target}", [x], [y])
    # PyTorch goes through float; an odd significand bit kept from what float would drop makes that one rounding.
    single = x.float()
    inexact = (single.double() != x) & x.isfinite() & single.isfinite() & (single != 0)
    towards_zero = torch.where(single.double().abs() > x.abs(), bits(single) - 1, bits(single))
    sticky = torch.where(inexact, towards_zero | 1, bits(single)).view(torch.float32)
    assert_equal(y, sticky.to(DTYPES[target]))


def test_vector_cast_matches_tensor_to_on_many_patterns(simulator, cu, arch):
    n = 1 << 20
    x, y = torch.from_numpy(floats(n, 11)), torch.zeros(n, dtype=torch.bfloat16)
    register(simulator, x, y)
    _, function = cu.function(sample(), "cast_f32_bf16_vector")
    arguments = [C.c_uint64(x.data_ptr()), C.c_uint64(y.data_ptr()), C.c_uint32(n // 8)]
    cu.launch(function, arch, arguments, grid=16, block=256)
    cu.cuStreamSynchronize(arch)
    assert_equal(y, x.to(torch.bfloat16))
    assert simulator.executed("cast_f32_bf16_vector", "ld.global.nc.v4") == n // 4
    assert simulator.executed("cast_f32_bf16_vector", "st.global.v4") == n // 8


def test_accumulate_divides_and_flags(simulator, cu, arch):
    n = 5000
    src = torch.randn(n, generator=torch.Generator().manual_seed(0)).half()
    dst = torch.randn(n, generator=torch.Generator().manual_seed(1))
    src[17] = torch.inf
    found = torch.zeros(1, dtype=torch.int32)
    expected = (dst + src.float()) / 3
    register(simulator, src, dst, found)
    _, function = cu.function(sample(), "accumulate_f16")
    arguments = [C.c_uint64(src.data_ptr()), C.c_uint64(dst.data_ptr()), C.c_uint32(n), C.c_float(3)]
    cu.launch(function, arch, [*arguments, C.c_uint64(found.data_ptr())], grid=40, block=128)
    cu.cuStreamSynchronize(arch)
    assert_equal(dst, expected)
    assert found.item() == 1


def test_table_passed_by_value(simulator, cu, arch):
    sizes = [3, 300, 0, 17]
    sources = [patterns(torch.float32, n, n) for n in sizes]
    targets = [torch.zeros(n, dtype=torch.bfloat16) for n in sizes]
    register(simulator, *(t for t in (*sources, *targets) if t.numel()))

    class Table(C.Structure):
        _fields_ = (("src", C.c_uint64 * 40), ("dst", C.c_uint64 * 40), ("numel", C.c_uint32 * 40))

    table = Table()
    for i, (s, t) in enumerate(zip(sources, targets, strict=True)):
        table.src[i], table.dst[i], table.numel[i] = s.data_ptr(), t.data_ptr(), s.numel()
    _, function = cu.function(sample(), "cast_by_value")
    cu.launch(function, arch, [table, C.c_int(len(sizes))], grid=2, block=64)
    C.memset(C.byref(table), 0, C.sizeof(table))  # parameters were copied at the call
    cu.cuStreamSynchronize(arch)
    for s, t in zip(sources, targets, strict=True):
        assert_equal(t, s.to(torch.bfloat16))


@pytest.mark.parametrize(("name", "shared"), [("sum_static", 0), ("sum_dynamic", 1024)])
def test_block_sum_through_shared_memory(simulator, cu, arch, name, shared):
    x, y = torch.arange(1024.0), torch.zeros(4)
    register(simulator, x, y)
    _, function = cu.function(sample(), name)
    arguments = [C.c_uint64(x.data_ptr()), C.c_uint64(y.data_ptr())]
    cu.launch(function, arch, arguments, grid=4, block=256, shared=shared)
    cu.cuStreamSynchronize(arch)
    assert y.tolist() == x.view(4, 256).sum(1).tolist()


def control_flow(x: int, i: int) -> int:
    digits, weights = [x >> (4 * k) & 15 for k in range(8)], [10**k for k in range(8)]
    cases = [
        lambda: digits[x & 7],
        lambda: x * 3 & 0xFFFFFFFF,
        lambda: x.bit_count(),
        lambda: 32 - x.bit_length(),
        lambda: int(f"{x:032b}"[::-1], 2),
        lambda: x // (i + 1),
        lambda: weights[x & 7],
        lambda: x * 0x9E3779B9 >> 32,
        lambda: min(x, 77) + max(x, 5) & 0xFFFFFFFF,
    ]
    return cases[x % 9]()


def test_branch_tables_local_and_constant_memory_and_atomics(simulator, cu, arch):
    n = 1000
    src = np.random.default_rng(0).integers(0, 2**32, n, dtype=np.uint32)
    dst, total = np.zeros(n, np.uint32), np.zeros(1, np.uint32)
    for name, array in (("src", src), ("dst", dst), ("total", total)):
        simulator.register(array.ctypes.data, array.nbytes, name, keep=array)
    _, function = cu.function(sample(), "control_flow")
    arguments = [*(C.c_uint64(a.ctypes.data) for a in (src, dst, total)), C.c_uint32(n)]
    cu.launch(function, arch, arguments, grid=8, block=128)
    cu.cuStreamSynchronize(arch)
    expected = [control_flow(int(x), i) for i, x in enumerate(src)]
    assert dst.tolist() == expected
    assert total[0] == sum(expected) % 2**32


@pytest.mark.parametrize("options", [("-lineinfo",), ("-O0",), ("-Xptxas=-O0",), ("--maxrregcount=32",)])
def test_other_compiler_options_run_too(simulator, cu, options):
    simulator.reset()
    cu.start()
    x, y = torch.from_numpy(floats(2048, 1)), torch.zeros(2048, dtype=torch.float16)
    register(simulator, x, y)
    table = np.array([x.data_ptr(), y.data_ptr(), 2048], np.uint64)
    simulator.register(table.ctypes.data, table.nbytes, "table", keep=table)
    _, function = cu.function(sample(*options), "cast_f32_f16")
    cu.launch(function, None, [C.c_uint64(table.ctypes.data), C.c_int(1)], grid=2, block=64)
    cu.cuStreamSynchronize(None)
    assert_equal(y, x.half())
    assert simulator.report() == []


# What threads of one kernel must not do to each other


@pytest.fixture
def run(simulator, cu):
    """Runs a body with one buffer as parameter; returns the result of synchronising."""

    def run(body: str, threads: int = 1, offset: int = 0, schedule: Schedule = Schedule.EAGER, grid: int = 1) -> int:
        simulator.reset(schedule, 3)
        cu.start()
        raw = np.zeros(256, np.uint8)
        base = raw.ctypes.data + -raw.ctypes.data % 64
        simulator.register(base, 64, "buffer", keep=raw)
        _, function = cu.function(kernel(f"mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; {body}"), "k")
        cu.launch(function, None, [C.c_uint64(base + offset)], grid=grid, block=threads)
        return cu.code("cuStreamSynchronize", None)

    return run


@pytest.mark.parametrize("schedule", [Schedule.EAGER, Schedule.LAZY])
def test_missing_barrier_is_reported(simulator, cu, schedule):
    simulator.reset(schedule)
    cu.start()
    x, y = torch.arange(256.0), torch.zeros(1)
    register(simulator, x, y)
    _, function = cu.function(sample(), "sum_without_barrier")
    cu.launch(function, None, [C.c_uint64(x.data_ptr()), C.c_uint64(y.data_ptr())], block=256)
    cu.cuStreamSynchronize(None)
    assert simulator.count("INTRA-KERNEL") > 0


def test_two_threads_with_different_values_for_one_word_race(simulator, run):
    assert run("st.global.u32 [%d0], %r0;", threads=2) == 0
    assert "threads race in buffer" in simulator.report()[0]


def test_two_threads_with_the_same_value_do_not_race(simulator, run):
    assert run("mov.u32 %r2, 7; st.global.u32 [%d0], %r2;", threads=2) == 0
    assert simulator.report() == []


def test_reader_of_another_threads_word_races_in_either_order(simulator, run):
    # Thread 0 reads what thread 1 writes, and the other way round.
    for writer in (0, 1):
        body = f"setp.eq.u32 %p0, %r0, {writer}; mov.u32 %r2, 5; @%p0 st.global.u32 [%d0], %r2; @!%p0 ld.global.u32 %r3, [%d0];"
        run(body, threads=2)
        assert simulator.count("INTRA-KERNEL") == 1, writer


def test_barrier_orders_threads_of_a_block_but_not_of_a_grid(simulator, run):
    body = """setp.eq.u32 %p0, %r0, 0; mov.u32 %r2, 5; @%p0 st.global.u32 [%d0], %r2; bar.sync 0;
              ld.global.u32 %r3, [%d0]; bar.sync 0; setp.eq.u32 %p0, %r0, 1; mov.u32 %r2, 6; @%p0 st.global.u32 [%d0], %r2;"""
    run(body, threads=4)
    assert simulator.report() == []
    run(body, threads=4, grid=2)
    assert simulator.count("INTRA-KERNEL") > 0


def test_atomics_do_not_race_with_each_other(simulator, run):
    assert run("red.global.add.u32 [%d0], 1;", threads=32) == 0
    assert simulator.report() == []


def test_atomic_races_with_a_plain_write(simulator, run):
    run("setp.eq.u32 %p0, %r0, 0; mov.u32 %r2, 9; @%p0 st.global.u32 [%d0], %r2; @!%p0 red.global.add.u32 [%d0], 1;", 2)
    assert simulator.count("INTRA-KERNEL") > 0


def test_read_only_load_of_written_bytes_is_reported(simulator, run):
    run("ld.global.nc.u32 %r2, [%d0]; st.global.u32 [%d0+32], %r2;")
    assert simulator.report() == []
    run("ld.global.nc.u32 %r2, [%d0]; st.global.u32 [%d0], %r2;")
    assert "ld.global.nc" in simulator.report()[0]


@pytest.mark.parametrize(
    ("access", "size"),
    [
        ("ld.global.v4.u32 {%r2,%r3,%r4,%r5}, [%d0];", 16),
        ("ld.global.v2.u32 {%r2,%r3}, [%d0];", 8),
        ("st.global.u64 [%d0], %d1;", 8),
        ("st.global.u32 [%d0], %r1;", 4),
        ("ld.global.v2.u16 {%h2,%h3}, [%d0];", 4),
        ("ld.global.u16 %h2, [%d0];", 2),
        ("ld.global.v8.u32 {%r2,%r3,%r4,%r5,%r6,%r7,%r8,%r9}, [%d0];", 32),
    ],
)
def test_misaligned_access_is_716_and_an_aligned_one_is_fine(simulator, run, access, size):
    assert run(access) == 0
    assert run(access, offset=64 - size) == 0
    assert simulator.report() == []
    assert run(access, offset=size // 2) == 716
    assert "misaligned" in simulator.report()[0]


@pytest.mark.parametrize("offset", [64, -4, 4096])
def test_access_outside_every_range_is_700(simulator, run, offset):
    assert run("ld.global.u32 %r2, [%d0];", offset=offset) == 700
    assert "DEVICE-FAULT" in simulator.report()[0]


def test_access_across_the_end_is_700(simulator, run):
    assert run("ld.global.v4.u32 {%r2,%r3,%r4,%r5}, [%d0];", offset=64) == 700


def test_endless_loop_times_out(simulator, run):
    assert run("again: bra again;") == 702


def test_trap_is_719(simulator, run):
    assert run("trap;") == 719


def test_shared_memory_out_of_bounds_is_700(simulator, run):
    assert run(".shared .align 4 .b8 s[16]; mov.u32 %r2, s; ld.shared.u32 %r3, [%r2+12];") == 0
    assert run(".shared .align 4 .b8 s[16]; mov.u32 %r2, s; ld.shared.u32 %r3, [%r2+16];") == 700
