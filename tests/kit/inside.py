"""What tests look into and users do not: no other file of the tests names private modules of ddp_mp.

The one exception is `cuda/test_cuda_streams.py`, whose programs run without PyTorch and so without the package.
"""

from __future__ import annotations

from ddp_mp import _C, agreement, guards, installing, leaves, versions
from ddp_mp.comm import Communicator
from ddp_mp.leaves import LeafPool
from ddp_mp.model import model_of
from ddp_mp.tensors import cast_tensors, tensors_in

__all__ = [
    "_C",
    "Communicator",
    "LeafPool",
    "agreement",
    "cast_tensors",
    "guards",
    "installing",
    "leaves",
    "model_of",
    "tensors_in",
    "versions",
]
