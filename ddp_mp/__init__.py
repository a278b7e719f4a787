"""Correct and nearly free mixed precision for PyTorch's DistributedDataParallel.

Call :func:`patch` with a model, or :func:`install` before models are built.
"""

from __future__ import annotations

from . import versions as _versions  # first: it says what is missing  # noqa: F401
from ._C import DeviceError
from ._version import __version__
from .installing import install, uninstall
from .options import MixedPrecision, Options
from .patching import full_precision, is_patched, masters_changed, patch, unpatch
from .stats import Stats, build_info, stats

__all__ = [
    "DeviceError",
    "MixedPrecision",
    "Options",
    "Stats",
    "__version__",
    "build_info",
    "full_precision",
    "install",
    "is_patched",
    "masters_changed",
    "patch",
    "stats",
    "uninstall",
    "unpatch",
]
