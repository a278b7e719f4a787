"""What this build is and what it found on this machine."""

from __future__ import annotations

from typing import Any

import torch

from . import _C


def build_info() -> dict[str, Any]:
    """What this build is, and what it found on this machine.

    No driver is called: before the first CUDA tensor, ``cuda`` says that CUDA is not used yet.  Any thread may call it.

    The result is a new dictionary in each call.  Of the build it holds ``version``, ``python``, ``compiler``, ``debug``, and
    ``cuda_image``: the size in bytes of the compiled kernels inside it and of their source, and a note that says how they
    were compiled or why they were not.  Of the machine it holds ``simd``, the instruction set that casts on the CPU, and
    ``simd_available``; ``cuda``, which kernels are used or why none are; ``cuda_driver``, the driver's version as CUDA writes
    it (0: not loaded); and ``torch``, PyTorch's version.
    """
    return {**_C.build_info(), "torch": torch.__version__}
