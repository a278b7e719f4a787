"""What ddp_mp logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[str]]:
    """The messages inside, as ``LEVEL text``."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(f"{record.levelname} {record.getMessage()}")

    logger, handler, before = logging.getLogger("ddp_mp"), Handler(), logging.root.manager.disable
    logging.disable(logging.NOTSET)
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logging.disable(before)
