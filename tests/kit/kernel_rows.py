"""Rows for the kernel: every combination of types, in every position that it treats differently, with every scaling.

    python tests/kit/kernel_rows.py PTX CAPABILITY RESULT

runs PTX text on the simulated driver and compares with RESULT, or makes it when it does not exist.  Exit status 1 when they
differ, in memory or in the number of wide accesses, or when the driver reports something; 2 when the text is not loaded at
all.  That is how scripts/mutate_cuda.py tries thousands of kernels: without PyTorch and without the extension.
"""

from __future__ import annotations

import ctypes as C
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

SIZES = (8, 4, 2, 2)  # of float64, float32, bfloat16, float16: mp_dtype of csrc/core/dtype.h
NAMES = ("float64", "float32", "bfloat16", "float16")
NONE = 255
SHIFT = 10  # chunks of 1024 elements: one full step of the loop with the most loads in flight
MOST_ROWS = 101  # of one launch: MP_CUDA_ROWS of csrc/cuda/launch.h
GRID = 3

#: Divisor, and the factor and scaling that the extension makes of it.
Scaling = tuple[float, float, int]
SCALINGS: tuple[Scaling, ...] = ((1.0, 1.0, 0), (8.0, 0.125, 1), (3.0, 3.0, 2), (0.1, 0.1, 2))

#: Elements, where the destination begins (elements behind 16 bytes), what is added to where src and add would be aligned;
#: START: they are aligned where they begin, as if the destination began there too.
Shape = tuple[int, int, int, int]
START = -1
CONVERTED: tuple[Shape, ...] = (
    (2400, 0, 0, 0),
    (1330, 1, 0, 0),
    (1330, 3, 1, 0),
    (1330, 2, 4, 0),
    (1928, 0, 0, 0),
    (1928, 3, 1, 0),
    (5, 1, 0, 0),
    (1, 0, 0, 0),
    (40, 1, START, 0),
)
COMBINED: tuple[Shape, ...] = (
    (1100, 0, 0, 0),
    (531, 3, 1, 0),
    (531, 2, 0, 1),
    (531, 2, 4, 4),
    (1160, 0, 0, 0),
    (1424, 1, 1, 1),
    (525, 1, 3, 1),
    (5, 1, 0, 0),
    (300, 1, START, 0),
    (300, 3, 0, START),
)
DOUBLE: tuple[Shape, ...] = ((1070, 1, 0, 0), (40, 0, 0, 0), (1, 0, 0, 0))


def shapes(src: int, add: int, dst: int) -> tuple[Shape, ...]:
    """What the kernel treats differently for rows of these types."""
    if 0 in (src, add, dst):
        return DOUBLE
    return CONVERTED if src != NONE and add == NONE else COMBINED


ROW = np.dtype([("src", "u8"), ("add", "u8"), ("dst", "u8"), ("numel", "i8"), ("first", "u4"), ("types", "u4")])


def values(type_: int, count: int, seed: int) -> np.ndarray:
    """Bytes of ``count`` numbers: ordinary ones of several magnitudes, and every kind of special one."""
    make = np.random.default_rng(seed)
    ordinary = make.standard_normal(count) * 2.0 ** make.integers(-12, 12, count)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-7, -6e-8, 1e-41, -1e-39, 65519.9, 65520.1, 1e38, 3.5e38, 1e300])
    chosen = np.where(make.random(count) < 0.15, special[make.integers(0, len(special), count)], ordinary)
    # Ties of bfloat16 and of float16, to even and to odd, and what lies just beside them.
    steps = np.where(make.random(count) < 0.5, make.integers(0, 128, count) * 16 + 8, make.integers(0, 1024, count) * 2 + 1)
    near = np.float32(1.0 + steps / 2048) * (1 + make.choice([-1, 0, 0, 1], count) * 2.0**-23)
    chosen = np.where(make.random(count) < 0.5, near, chosen)
    with np.errstate(over="ignore"):
        if type_ == 0:
            return chosen.astype(np.float64).view(np.uint8)
        if type_ == 1:
            return chosen.astype(np.float32).view(np.uint8)
        if type_ == 2:
            return (chosen.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return chosen.astype(np.float16).view(np.uint8)


class Table:
    """Rows, and the memory that they lie in."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int, int, int]] = []  # types and offsets of src, add, dst; elements
        self.vectors: list[int] = []  # accesses of several words so far: loads and stores
        self._parts: list[np.ndarray] = []
        self._size = 0

    def _place(self, offset: int, content: np.ndarray) -> int:
        """Bytes with guards around them; ``offset`` is behind a multiple of 16."""
        room = -(-(offset + len(content) + 32) // 16) * 16
        block = np.full(room, 0xA5, np.uint8)
        block[offset : offset + len(content)] = content
        self._parts.append(block)
        at = self._size + offset
        self._size += room
        return at

    def add(
        self, types: tuple[int, int, int], shape: Shape, contents: Sequence[np.ndarray] | None = None, in_place: bool = False
    ) -> None:
        """A row of these types (src, add, dst); ``contents`` are the bytes of src and add."""
        src, add, dst = types
        numel, begin, src_off, add_off = shape
        head = -begin % (16 // SIZES[dst])
        places = []
        for i, (type_, off) in enumerate(((src, src_off), (add, add_off))):
            if type_ == NONE:
                places.append(0)
                continue
            offset = 0 if off == START else ((-head + off) % (16 // SIZES[type_])) * SIZES[type_]
            places.append(self._place(offset, contents[i] if contents else values(type_, numel, len(self._parts))))
        offset = begin % (16 // SIZES[dst]) * SIZES[dst]
        target = places[0] if in_place else self._place(offset, np.full(numel * SIZES[dst], 0xA5, np.uint8))
        self.rows.append((src, add, dst, places[0], places[1], target, numel))

    def settle(self) -> None:
        """All rows are there: makes the memory, aligned to 256 bytes, which an array of NumPy is not."""
        self.initial = np.concatenate(self._parts)
        self._parts.clear()
        self._kept = np.zeros(len(self.initial) + 256, np.uint8)
        start = -self._kept.ctypes.data % 256
        self.memory = self._kept[start : start + len(self.initial)]
        self.memory[:] = self.initial

    def launches(self) -> list[tuple[int, int, int]]:
        """Rows from, to, and the grid."""
        return [(at, min(at + MOST_ROWS, len(self.rows)), GRID) for at in range(0, len(self.rows), MOST_ROWS)]

    def _table(self, begin: int, end: int) -> tuple[np.ndarray, int]:
        """What the kernel gets for some of the rows, and the chunks in all.  As csrc/cuda/launch.c makes it; rows that are
        not there would write far away."""
        base, chunk = self.memory.ctypes.data, 0
        table = np.full(MOST_ROWS, np.array((8, 8, 8, 1, 0, 0x010101), ROW))
        for i, (src, add, dst, s, a, d, numel) in enumerate(self.rows[begin:end]):
            types = src | add << 8 | dst << 16
            addresses = (base + s if src != NONE else 0, base + a if add != NONE else 0, base + d)
            table[i] = (*addresses, numel, chunk, types)
            head = min(numel, (-(base + d) % 16) // SIZES[dst])
            chunk += max(1, -((head - numel) >> SHIFT))
        return table, chunk

    def run(self, image: bytes, capability: int, scalings: Sequence[Scaling] = SCALINGS) -> Iterator[np.ndarray]:
        """The memory after all rows, with each scaling.  Raises AssertionError for whatever the driver reports."""
        from simulator.driver import Driver
        from simulator.fixtures import load
        from simulator.sim import Schedule

        sim = load()
        sim.reset(Schedule.LAZY, 1)
        sim.set_devices(capability)
        driver = Driver(sim.functions)
        driver.start()
        stream = driver.stream()
        sim.register(self.memory.ctypes.data, self.memory.nbytes, "rows", keep=self)
        tables = [(*self._table(begin, end), end - begin, grid) for begin, end, grid in self.launches()]
        _, function = driver.function(image, "mp_cast")
        for _, factor, scaling in scalings:
            self.memory[:] = self.initial
            for table, chunks, count, grid in tables:
                arguments = [(C.c_char * table.nbytes).from_buffer(table), C.c_uint32(count), C.c_uint32(SHIFT)]
                arguments += [C.c_uint32(chunks), C.c_uint32(scaling), C.c_double(factor)]
                driver.launch(function, stream, arguments, grid=grid, block=256)
            driver.cuStreamSynchronize(stream)
            assert sim.report() == []
            self.vectors = [sim.executed("mp_cast", name) for name in ("ld.global.v", "st.global.v")]
            yield self.memory.copy()


class Rows(Table):
    """Every combination of types in every shape."""

    def __init__(self) -> None:
        super().__init__()
        for src in (0, 1, 2, 3, NONE):
            for add in (0, 1, 2, 3, NONE):
                for dst in range(4):
                    for shape in shapes(src, add, dst):
                        self.add((src, add, dst), shape)
        self._many = len(self.rows)
        # Fewer chunks than the grid has warps and more, into memory that would tell if any of it were done twice.
        self.add((1, 1, 1), (2 * 1024 + 5, 0, 0, 0), in_place=True)
        self.add((1, 1, 1), (10 * 1024 + 5, 0, 0, 0), in_place=True)
        self.settle()

    def launches(self) -> list[tuple[int, int, int]]:
        return [(at, min(at + MOST_ROWS, self._many), GRID) for at in range(0, self._many, MOST_ROWS)] + [
            (self._many, self._many + 1, 1),
            (self._many + 1, self._many + 2, 1),
        ]


def main(image: str, capability: str, expected: str) -> int:
    """The command."""
    from simulator.driver import DriverError

    rows = Rows()
    try:
        results = list(rows.run(Path(image).read_bytes() + b"\0", int(capability)))
    except DriverError as error:
        if error.function == "cuModuleLoadData":
            return 2
        raise
    if not Path(expected).exists():
        np.savez(expected, memory=np.stack(results), vectors=rows.vectors)
        return 0
    wanted = np.load(expected)
    return int(not np.array_equal(np.stack(results), wanted["memory"]) or rows.vectors != wanted["vectors"].tolist())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
