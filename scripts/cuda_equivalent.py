"""Mutants that no test can tell from the code, and why.  The key is the file, and what the mutant is called in the report.

Registers of PTX have the names that this version of nvcc gives them; another one needs other keys.
"""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {
    "cuda/backend.c: 'status != MP_OK' never fails in cuda_event_wait": (
        "Of an event that was never recorded the same status is returned; otherwise entering the context asks again."
    ),
    "cuda/image.c: 'named == CU_OK' never fails in mp_cuda_module_load": (
        "The text stays NULL where the driver has no name for a code, and that is tested too."
    ),
}
