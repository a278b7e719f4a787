"""What this build is and what it found on this machine."""

from __future__ import annotations

from typing import Any

import torch

from . import _C


def build_info() -> dict[str, Any]:
    """What this build is, and what it found on this machine.

    Calls no driver: what is not known before a first CUDA tensor is said to be so.  May be called from any thread.

    What it returns is new in each call.  Of the build: ``version``, ``python``, ``compiler``, ``debug``, and ``cuda_image``,
    the kernels inside it, with their size in bytes and a note.  Of the machine: ``simd``, the instruction set that casts on
    the CPU, and ``simd_available``; ``cuda``, which kernels are used or why none are, and ``cuda_driver``, its version as
    CUDA writes it (0: not loaded); ``torch``, PyTorch's version.
    """
    return {**_C.build_info(), "torch": torch.__version__}
