"""What goes to the standard ``logging`` module, under the name ``ddp_mp``.

WARNING: casting ahead of a forward (``Options.prefetch``) failed.
INFO: a model is patched or unpatched, with a summary; a plan is built anew, and why; what the engine leaves to PyTorch.
DEBUG: rare events in training: leaves that somebody keeps, a backward that failed, ranks that cannot be compared.
Nothing is said in a step that goes as the one before.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("ddp_mp")
logger.addHandler(logging.NullHandler())  # without a configuration of the user nothing is printed
