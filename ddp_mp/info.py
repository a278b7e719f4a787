"""What this build is and what it found on this machine."""

from __future__ import annotations

from typing import Any

import torch

from . import _C


def build_info() -> dict[str, Any]:
    """Version, compiler, instruction sets, and for CUDA the driver and the kernel image, or why it is off.

    Calls no driver: what is not known before a first CUDA tensor is said to be so.
    """
    return {**_C.build_info(), "torch": torch.__version__}
