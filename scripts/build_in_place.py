"""Builds ``ddp_mp._C`` in the checkout: ``python scripts/build_in_place.py``.  Nothing is fetched or installed.
The functions that tests and benchmarks need are in it.

Like ``python setup.py build_ext --inplace``, except that pyproject.toml is not read: setuptools before 77 refuses the way in
which it names the licence, and nothing in it is about the extension.
"""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path

import setuptools  # noqa: F401  (brings distutils, which Python 3.12 no longer has)


def main() -> None:
    """The command."""
    os.chdir(Path(__file__).resolve().parents[1])
    os.environ.setdefault("DDP_MP_TESTING", "1")
    distribution = importlib.import_module("distutils.core").run_setup(
        "setup.py", stop_after="init"
    )  # configuration files are read after this
    logging.disable(logging.INFO)  # the compiler's commands
    distribution.get_command_obj("build_ext").inplace = True
    distribution.run_command("build_ext")


if __name__ == "__main__":
    main()
