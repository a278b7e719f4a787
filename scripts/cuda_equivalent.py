"""Mutants that no test can tell from the code, and why.  The key is the file, and what the mutant is called in the report.

Registers of PTX have the names that this version of nvcc gives them; another one needs other keys.
"""

from __future__ import annotations

SEARCH = "A row that is the last one has left by the branch before, so that the two are never equal here."
SHORTCUT = "The branch is a shortcut: where it is not taken the search runs, and ends at the row where it began."
UNUSED = "Words of an operand that is not there, and four of the eight words of 16-bit elements, are set and read by nobody."

EQUIVALENT: dict[str, str] = {
    "cuda/backend.c: 'status != MP_OK' never fails in cuda_event_wait": (
        "Of an event that was never recorded the same status is returned; otherwise entering the context asks again."
    ),
    "cuda/image.c: 'named == CU_OK' never fails in mp_cuda_module_load": (
        "The text stays NULL where the driver has no name for a code, and that is tested too."
    ),
    "sm_75.ptx: `setp.le.u32 %p5, %r1706, %r1708;` becomes `setp.lt.u32 %p5, %r1706, %r1708;`": SEARCH,
    "sm_75.ptx: `or.pred %p6, %p4, %p5;` becomes `and.pred %p6, %p4, %p5;`": SHORTCUT,
    "sm_75.ptx: `mov.u32 %r1709, 0;` becomes `mov.u32 %r1709, 1;`": UNUSED,
    "sm_80.ptx: `setp.le.u32 %p5, %r1234, %r1236;` becomes `setp.lt.u32 %p5, %r1234, %r1236;`": SEARCH,
    "sm_80.ptx: `or.pred %p6, %p4, %p5;` becomes `and.pred %p6, %p4, %p5;`": SHORTCUT,
    "sm_80.ptx: `mov.u32 %r1245, 0;` becomes `mov.u32 %r1245, 1;`": UNUSED,
    "sm_100.ptx: `mov.b32 %r895, 0;` becomes `mov.b32 %r895, 1;`": UNUSED,
}
