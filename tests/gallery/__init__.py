"""Small models in the shape of public training programs, one a file.

python tests/gallery            # trains them all in three ways, and writes docs/gallery.md
"""

from __future__ import annotations

import importlib

from .training import Program

#: The files, in the order of the page.
NAMES = (
    "causal_lm",
    "masked_autoencoder",
    "momentum_teacher",
    "momentum_inside",
    "contrastive_towers",
    "detection",
    "diffusion",
    "gan",
    "lightning_gan",
    "distillation",
    "mixture_of_experts",
    "sparse_embeddings",
    "lora",
    "tagger",
)


def program(name: str) -> type[Program]:
    """The program in that file; other packages that it needs are imported now."""
    module = importlib.import_module(f"{__name__}.{name}")
    found = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    return next(value for value in found if isinstance(value, type) and issubclass(value, Program))
