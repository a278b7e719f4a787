"""Single instructions against numpy and PyTorch, bit for bit."""

from __future__ import annotations

import ctypes as C

import numpy as np
import pytest
import torch

from .driver import Driver, DriverError
from .fixtures import Checked
from .images import kernel
from .sim import Schedule, Simulator

pytestmark = pytest.mark.long

MANY = 1 << 20
BITS = {"u8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
REGISTERS = {"u8": "%h", "b16": "%h", "b32": "%r", "b64": "%d"}


@pytest.fixture
def device(simulator: Simulator, cu: Driver) -> Checked:
    simulator.reset(Schedule.EAGER)
    cu.start()
    return Checked(simulator, Schedule.EAGER, 1)


class Elementwise:
    """Applies instructions to every element: `{a}`, `{b}` and `{c}` are the inputs, `{y}` is the result."""

    def __init__(self, sim: Checked, cu: Driver) -> None:
        self.sim, self.cu = sim, cu

    def __call__(self, code: str, result: str, *inputs: tuple[str, np.ndarray]) -> np.ndarray:
        n = len(inputs[0][1])
        out = np.zeros(n, BITS[result])
        arrays = [out, *(values.view(BITS[width]).copy() for width, values in inputs)]
        widths = [result, *(width for width, _ in inputs)]
        for i, array in enumerate(arrays):
            self.sim.register(array.ctypes.data, array.nbytes, f"array {i}", keep=array)
        image = kernel(*self._body(code, widths))
        module, function = self.cu.function(image, "k")
        arguments = [C.c_uint64(array.ctypes.data) for array in arrays]
        arguments += [C.c_uint64(0)] * (4 - len(arguments)) + [C.c_uint32(n)]
        self.cu.launch(function, None, arguments, grid=(n + 1023) // 1024, block=min(n, 1024))
        self.cu.cuStreamSynchronize(None)
        self.cu.cuModuleUnload(module)
        assert self.sim.report() == []
        for array in arrays:
            self.sim.unregister(array.ctypes.data)
        return out

    @staticmethod
    def _body(code: str, widths: list[str]) -> tuple[str, str]:
        names = ["y", "a", "b", "c"]
        # Registers 4.. of each class are the operands; %d4.. are addresses until they are loaded over.
        operand = {name: f"{REGISTERS[w]}{4 + i}" for i, (name, w) in enumerate(zip(names, widths, strict=False))}
        lines = [
            "mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r3, %r0, %r1, %r2;",
            "ld.param.u32 %r0, [n]; setp.ge.u32 %p0, %r3, %r0; @%p0 ret;",
            f"mad.wide.u32 %d0, %r3, {BITS[widths[0]](0).nbytes}, %d0;",
        ]
        for name, width in list(zip(names, widths, strict=False))[1:]:
            lines += [
                f"ld.param.u64 %d1, [q{name}]; mad.wide.u32 %d1, %r3, {BITS[width](0).nbytes}, %d1;",
                f"ld.global.{width} {operand[name]}, [%d1];",
            ]
        lines += [code.format(**operand), f"st.global.{widths[0]} [%d0], {operand['y']};"]
        return "\n".join(lines), ".param .u64 p, .param .u64 qa, .param .u64 qb, .param .u64 qc, .param .u32 n"


@pytest.fixture
def apply(device: Checked, cu: Driver) -> Elementwise:
    return Elementwise(device, cu)


def random_bits(dtype: type, n: int, seed: int = 0) -> np.ndarray:
    """Random patterns, with every special pattern of the type among them."""
    info = np.iinfo(dtype)
    values = np.random.default_rng(seed).integers(0, info.max, n, dtype=dtype, endpoint=True)
    edges = [0, 1, 2, info.max, info.max - 1, info.max // 2, info.max // 2 + 1]
    values[: len(edges)] = edges
    return values


def floats(n: int, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    """Random bit patterns as floats, with ties and range borders of the 16-bit types mixed in."""
    bits = np.uint32 if dtype is np.float32 else np.uint64
    values = random_bits(bits, n, seed).view(dtype)
    rng = np.random.default_rng(seed + 1)
    halves = rng.integers(0, 1 << 16, n // 4, dtype=np.uint16).view(np.float16).astype(dtype)
    with np.errstate(all="ignore"):
        values[n // 4 : n // 2] = (halves + np.roll(halves, 1).astype(dtype)) / dtype(2)  # many of them ties
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, 2**-24, 2**-25, 2**-14, 3.3895e38, 1e-45]
    values[n // 2 : n // 2 + len(special)] = special
    return values


def assert_same_floats(actual: np.ndarray, expected: np.ndarray) -> None:
    """Bit for bit, except that NaN is NaN."""
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[expected.dtype.itemsize]
    both_nan = np.isnan(actual) & np.isnan(expected)
    different = (actual.view(bits) != expected.view(bits)) & ~both_nan
    assert not different.any(), (different.sum(), actual[different][:4], expected[different][:4])


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, by PyTorch."""
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    """The bits of bfloat16 as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


# Conversions


def test_cvt_f32_to_f16_matches_numpy_on_many_patterns(apply):
    x = floats(MANY)
    with np.errstate(over="ignore"):
        assert_same_floats(apply("cvt.rn.f16.f32 {y}, {a};", "b16", ("b32", x)).view(np.float16), x.astype(np.float16))


def test_cvt_f32_to_bf16_matches_torch_on_many_patterns(apply):
    x = floats(MANY, seed=5)
    y = apply("cvt.rn.bf16.f32 {y}, {a};", "b16", ("b32", x))
    assert_same_floats(widened(y), widened(bf16(x)))


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_cvt_towards_zero_never_grows(apply, kind, dtype):
    x = floats(100_000)
    x = x[np.isfinite(x)]
    towards = torch.from_numpy(apply(f"cvt.rz.{kind}.f32 {{y}}, {{a}};", "b16", ("b32", x)).view(np.int16)).view(dtype)
    exact, nearest = torch.from_numpy(x), torch.from_numpy(x).to(dtype)
    assert (towards.abs() <= exact.abs()).all()
    kept = nearest.abs() <= exact.abs()
    assert torch.equal(towards[kept], nearest[kept])
    assert kept.any()
    assert not kept.all()
    # Else it is the neighbour: one unit of the narrow type below what nearest gives.
    assert torch.equal(towards.view(torch.int16)[~kept], nearest.view(torch.int16)[~kept] - 1)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_cvt_pair_puts_the_first_source_into_the_upper_half(apply, kind):
    a, b = floats(4096, 1), floats(4096, 2)
    pair = apply(f"cvt.rn.{kind}x2.f32 {{y}}, {{a}}, {{b}};", "b32", ("b32", a), ("b32", b))
    for bits, x in ((pair >> 16, a), (pair & 0xFFFF, b)):
        one = apply(f"cvt.rn.{kind}.f32 {{y}}, {{a}};", "b16", ("b32", x))
        assert (bits == one).all()


def test_cvt_f16_to_f32_matches_numpy_on_all_patterns(apply):
    h = np.arange(1 << 16, dtype=np.uint16)
    assert_same_floats(
        apply("cvt.f32.f16 {y}, {a};", "b32", ("b16", h)).view(np.float32), h.view(np.float16).astype(np.float32)
    )


def test_cvt_bf16_to_f32_is_a_shift_on_all_patterns(apply):
    h = np.arange(1 << 16, dtype=np.uint16)
    assert_same_floats(apply("cvt.f32.bf16 {y}, {a};", "b32", ("b16", h)).view(np.float32), widened(h))


def test_cvt_f64_to_f32_and_back_matches_numpy(apply):
    x = floats(1 << 16, 3, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = x.astype(np.float32)
    assert_same_floats(apply("cvt.rn.f32.f64 {y}, {a};", "b32", ("b64", x)).view(np.float32), narrow)
    assert_same_floats(apply("cvt.f64.f32 {y}, {a};", "b64", ("b32", narrow)).view(np.float64), narrow.astype(np.float64))


def test_cvt_f64_to_f16_rounds_once(apply):
    x = floats(1 << 16, 4, np.float64)
    x[:2] = [1 + 2**-11 + 2**-40, 1 + 2**-11 - 2**-40]  # through float both would become the tie
    with np.errstate(over="ignore"):
        assert_same_floats(apply("cvt.rn.f16.f64 {y}, {a};", "b16", ("b64", x)).view(np.float16), x.astype(np.float16))


def test_cvt_f64_to_bf16_rounds_once(apply):
    x = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, 1 + 2**-8])
    assert apply("cvt.rn.bf16.f64 {y}, {a};", "b16", ("b64", x)).tolist() == [0x3F81, 0x3F80, 0x3F80]


@pytest.mark.parametrize(("target", "dtype"), [("s32", np.int32), ("u32", np.uint32)])
def test_cvt_float_to_int_truncates_and_saturates(apply, target, dtype):
    x = floats(1 << 14, 6)
    x[np.isnan(x)] = np.nan  # a quiet one: numpy warns of the others
    info = np.iinfo(dtype)
    expected = np.clip(np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0, posinf=1e30, neginf=-1e30), info.min, info.max)
    y = apply(f"cvt.rzi.{target}.f32 {{y}}, {{a}};", "b32", ("b32", x)).view(dtype)
    assert (y == expected.astype(dtype)).all()


@pytest.mark.parametrize(("mode", "round_"), [("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil), ("rzi", np.trunc)])
def test_cvt_float_to_whole_float_rounds_as_asked(apply, mode, round_):
    x = floats(1 << 14, 7)
    x[np.isnan(x)] = np.nan
    assert_same_floats(apply(f"cvt.{mode}.f32.f32 {{y}}, {{a}};", "b32", ("b32", x)).view(np.float32), round_(x))


@pytest.mark.parametrize(
    ("source", "width", "dtype"), [("s64", "b64", np.int64), ("u64", "b64", np.uint64), ("s32", "b32", np.int32)]
)
def test_cvt_int_to_float_rounds_to_nearest(apply, source, width, dtype):
    x = random_bits(BITS[width], 1 << 14).view(dtype)
    y = apply(f"cvt.rn.f32.{source} {{y}}, {{a}};", "b32", (width, x)).view(np.float32)
    assert (y == x.astype(np.float32)).all()


def test_cvt_extends_by_the_source_type(apply):
    x = random_bits(np.uint16, 1 << 12)
    assert (apply("cvt.s32.s16 {y}, {a};", "b32", ("b16", x)).view(np.int32) == x.view(np.int16)).all()
    assert (apply("cvt.u64.u16 {y}, {a};", "b64", ("b16", x)) == x).all()


# Arithmetic

BINARY_FLOAT = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div.rn": np.divide,
    "min": np.fmin,
    "max": np.fmax,
}


@pytest.mark.parametrize("name", BINARY_FLOAT)
@pytest.mark.parametrize(("kind", "width", "dtype"), [("f32", "b32", np.float32), ("f64", "b64", np.float64)])
def test_float_arithmetic_matches_numpy(apply, name, kind, width, dtype):
    a, b = floats(1 << 14, 8, dtype), floats(1 << 14, 9, dtype)
    with np.errstate(all="ignore"):
        expected = BINARY_FLOAT[name](a, b)
    y = apply(f"{name}.{kind} {{y}}, {{a}}, {{b}};", width, (width, a), (width, b)).view(dtype)
    zeros = (y == 0) & (expected == 0) if name in ("min", "max") else np.zeros(len(y), bool)  # their sign: own test
    assert_same_floats(np.where(zeros, dtype(0), y), np.where(zeros, dtype(0), expected))


def test_min_and_max_know_negative_zero(apply):
    a, b = np.array([0.0, -0.0], np.float32), np.array([-0.0, 0.0], np.float32)
    assert np.signbit(apply("min.f32 {y}, {a}, {b};", "b32", ("b32", a), ("b32", b)).view(np.float32)).all()
    assert not np.signbit(apply("max.f32 {y}, {a}, {b};", "b32", ("b32", a), ("b32", b)).view(np.float32)).any()


def test_fma_rounds_once(apply):
    a, b, c = (np.full(1, v, np.float32) for v in (1 + 2**-12, 1 + 2**-12, -1 - 2**-11))
    y = apply("fma.rn.f32 {y}, {a}, {b}, {c};", "b32", ("b32", a), ("b32", b), ("b32", c)).view(np.float32)
    assert y[0] == np.float32(2**-24)


def test_ftz_flushes_inputs_and_results(apply):
    a = np.array([1e-40, -1e-40, 1e-20], np.float32)
    b = np.array([1.0, 1.0, 1e-20], np.float32)
    y = apply("mul.ftz.f32 {y}, {a}, {b};", "b32", ("b32", a), ("b32", b))
    assert y.tolist() == [0, 0x80000000, 0]
    kept = apply("mul.f32 {y}, {a}, {b};", "b32", ("b32", a), ("b32", b)).view(np.float32)
    assert kept[0] == np.float32(1e-40)


def test_float_result_has_the_canonical_nan(apply):
    a = np.array([0xFFC12345], np.uint32)
    assert apply("add.f32 {y}, {a}, {a};", "b32", ("b32", a)).tolist() == [0x7FFFFFFF]


INTEGER = {
    "add.{t}": lambda a, b: a + b,
    "sub.{t}": lambda a, b: a - b,
    "mul.lo.{t}": lambda a, b: a * b,
    "min.{t}": np.minimum,
    "max.{t}": np.maximum,
    "and.{b}": np.bitwise_and,
    "or.{b}": np.bitwise_or,
    "xor.{b}": np.bitwise_xor,
}
INTEGER_TYPES = [("u16", "b16", np.uint16), ("s16", "b16", np.int16), ("u32", "b32", np.uint32)]
INTEGER_TYPES += [("s32", "b32", np.int32), ("u64", "b64", np.uint64), ("s64", "b64", np.int64)]


@pytest.mark.parametrize("name", INTEGER)
@pytest.mark.parametrize(("kind", "width", "dtype"), INTEGER_TYPES)
def test_integer_arithmetic_wraps(apply, name, kind, width, dtype):
    a, b = (random_bits(BITS[width], 1 << 12, seed).view(dtype) for seed in (1, 2))
    with np.errstate(over="ignore"):
        expected = INTEGER[name](a, b).astype(dtype)
    code = name.format(t=kind, b=width) + " {y}, {a}, {b};"
    assert (apply(code, width, (width, a), (width, b)).view(dtype) == expected).all()


@pytest.mark.parametrize(("kind", "dtype"), [("u32", np.uint32), ("s32", np.int32)])
def test_mul_wide_and_hi_keep_all_bits(apply, kind, dtype):
    a, b = (random_bits(np.uint32, 1 << 12, seed).view(dtype) for seed in (3, 4))
    exact = a.astype(object) * b.astype(object)
    wide = apply(f"mul.wide.{kind} {{y}}, {{a}}, {{b}};", "b64", ("b32", a), ("b32", b))
    assert all(int(w) == int(e) & 2**64 - 1 for w, e in zip(wide, exact, strict=True))
    high = apply(f"mul.hi.{kind} {{y}}, {{a}}, {{b}};", "b32", ("b32", a), ("b32", b))
    assert all(int(h) == (int(e) >> 32) & 2**32 - 1 for h, e in zip(high, exact, strict=True))


def test_mul_hi_u64_and_mad_wide(apply):
    a, b = (random_bits(np.uint64, 1 << 10, seed) for seed in (5, 6))
    high = apply("mul.hi.u64 {y}, {a}, {b};", "b64", ("b64", a), ("b64", b))
    assert all(int(h) == int(x) * int(y) >> 64 for h, x, y in zip(high, a, b, strict=True))
    x = a.astype(np.uint32)
    sums = apply("mad.wide.u32 {y}, {a}, {a}, {b};", "b64", ("b32", x), ("b64", b))
    assert all(int(s) == (int(u) * int(u) + int(v)) % 2**64 for s, u, v in zip(sums, x, b, strict=True))


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_integer_division_has_the_devices_corner_cases(apply, kind):
    dtype = np.int32 if kind == "s32" else np.uint32
    a = np.array([7, -7, -(2**31), 5], np.int64).astype(dtype)
    b = np.array([2, 2, -1, 0], np.int64).astype(dtype)
    quotient = apply(f"div.{kind} {{y}}, {{a}}, {{b}};", "b32", ("b32", a), ("b32", b)).view(dtype).tolist()
    remainder = apply(f"rem.{kind} {{y}}, {{a}}, {{b}};", "b32", ("b32", a), ("b32", b)).view(dtype).tolist()
    if kind == "s32":
        assert (quotient, remainder) == ([3, -3, -(2**31), -1], [1, -1, 0, 5])
    else:
        assert (quotient, remainder) == ([3, 2**31 - 4, 0, 2**32 - 1], [1, 1, 2**31, 5])


def test_shifts_clamp_their_amount(apply):
    a = np.array([0x80000001] * 4, np.uint32)
    by = np.array([0, 31, 32, 1000], np.uint32)
    assert apply("shl.b32 {y}, {a}, {b};", "b32", ("b32", a), ("b32", by)).tolist() == [0x80000001, 0x80000000, 0, 0]
    assert apply("shr.u32 {y}, {a}, {b};", "b32", ("b32", a), ("b32", by)).tolist() == [0x80000001, 1, 0, 0]
    assert apply("shr.s32 {y}, {a}, {b};", "b32", ("b32", a), ("b32", by)).tolist() == [0x80000001] + [0xFFFFFFFF] * 3


def test_bit_instructions_match_python(apply):
    a, b = (random_bits(np.uint32, 256, seed) for seed in (7, 8))
    one = [("b32", a)]
    two = [*one, ("b32", b)]
    assert apply("popc.b32 {y}, {a};", "b32", *one).tolist() == [int(v).bit_count() for v in a]
    assert apply("clz.b32 {y}, {a};", "b32", *one).tolist() == [32 - int(v).bit_length() for v in a]
    assert apply("brev.b32 {y}, {a};", "b32", *one).tolist() == [int(f"{int(v):032b}"[::-1], 2) for v in a]
    assert (apply("bfe.u32 {y}, {a}, 5, 9;", "b32", *one) == a >> 5 & 511).all()
    assert (apply("bfe.s32 {y}, {a}, 5, 9;", "b32", *one).view(np.int32) == a.view(np.int32) << 18 >> 23).all()
    assert (apply("bfi.b32 {y}, {a}, {b}, 5, 9;", "b32", *two) == (b & ~np.uint32(511 << 5) | (a & 511) << 5)).all()
    assert (apply("lop3.b32 {y}, {a}, {b}, {a}, 0x3c;", "b32", *two) == a ^ b).all()
    assert (apply("prmt.b32 {y}, {a}, {b}, 0x5410;", "b32", *two) == (a & 0xFFFF | b << 16)).all()
    assert (apply("shf.l.wrap.b32 {y}, {a}, {b}, 8;", "b32", *two) == (b << 8 | a >> 24)).all()
    assert (apply("mov.b32 {{%h0, %h1}}, {a}; mov.b32 {y}, {{%h1, %h0}};", "b32", *one) == (a >> 16 | a << 16)).all()


def test_setp_compares_unordered_values_as_asked(apply):
    a, b = np.array([1, 2, np.nan, 0.0], np.float32), np.array([2, 1, 1, -0.0], np.float32)
    expected = {"lt": [1, 0, 0, 0], "ltu": [1, 0, 1, 0], "ne": [1, 1, 0, 0], "neu": [1, 1, 1, 0], "eq": [0, 0, 0, 1]}
    expected |= {"equ": [0, 0, 1, 1], "num": [1, 1, 0, 1], "nan": [0, 0, 1, 0], "ge": [0, 1, 0, 1], "gtu": [0, 1, 1, 0]}
    for name, values in expected.items():
        code = f"setp.{name}.f32 %p1, {{a}}, {{b}}; selp.b32 {{y}}, 1, 0, %p1;"
        assert apply(code, "b32", ("b32", a), ("b32", b)).tolist() == values, name


def test_setp_combines_and_gives_the_complement(apply):
    a = np.arange(4, dtype=np.uint32)
    code = """setp.lt.u32 %p1, {a}, 2; setp.eq.and.u32 %p2|%p3, {a}, 1, %p1; not.pred %p4, %p1;
              selp.b32 %r8, 1, 0, %p2; selp.b32 %r9, 2, 0, %p3; selp.b32 %r10, 4, 0, %p4; selp.b32 %r11, 8, 0, !%p1;
              or.b32 {y}, %r8, %r9; or.b32 {y}, {y}, %r10; or.b32 {y}, {y}, %r11;"""
    assert apply(code, "b32", ("b32", a)).tolist() == [2, 1, 12, 12]


def test_signed_narrow_load_extends(apply):
    x = random_bits(np.uint16, 256)
    y = apply("cvt.s32.s16 {y}, {a};", "b32", ("b16", x))
    assert (y.view(np.int32) == x.view(np.int16)).all()


# What is not simulated


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("activemask.b32 %r1;", "activemask.b32"),
        ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;", "shfl.sync.bfly.b32"),
        ("add.rz.f32 %f1, %f2, %f3;", ".rz"),
        ("div.approx.f32 %f1, %f2, %f3;", ".approx"),
        ("cvt.rn.satfinite.f16.f32 %h1, %f1;", ".satfinite"),
        ("cvt.rm.f16.f32 %h1, %f1;", ".rm"),
        ("cvt.f16.f32 %h1, %f1;", "cvt.f16.f32"),
        ("add.sat.s32 %r1, %r2, %r3;", "add.sat.s32"),
        ("add.f16 %h1, %h2, %h3;", "add.f16"),
        ("bar.sync 1;", "bar.sync"),
        (".tex .u32 t;", ".tex"),
        ("mov.u32 %r1, %clock;", "%clock"),
        ("ld.global.v4.u64 {%d1, %d2}, [%d0];", "ld.global.v4.u64"),
        ("bra nowhere;", "nowhere"),
    ],
)
def test_what_is_not_simulated_is_a_load_error_that_names_it(device, cu, body, named):
    with pytest.raises(DriverError) as raised:
        cu.cuModuleLoadData(kernel(body))
    assert raised.value.code == 218
    found = device.expect("LOAD", named)
    assert "line" in found


@pytest.mark.parametrize("declaration", [".func f() { ret; }", ".extern .func g;", ".global .texref t;"])
def test_module_directives_that_are_not_simulated_are_named(device, cu, declaration):
    assert cu.code("cuModuleLoadData", kernel("", declarations=declaration)) == 218
    device.expect("LOAD", declaration.split()[0].replace(".global", ".texref"))
