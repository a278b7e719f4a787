"""Patches models in the processes that are started by a program which runs under ``python -m ddp_mp run``.

``run`` puts the folder of this file first on ``PYTHONPATH`` and its own settings into ``DDP_MP_RUN``.  Python imports a module
of the name ``sitecustomize`` at every start, so that a child process gets here before its program begins.  PyTorch is not
imported for that: a finder waits until the program imports it, and ``ddp_mp.install`` is called when that import is complete.
The folder is then taken off ``sys.path``, and the ``sitecustomize`` that Python would have found without it is executed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import warnings
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))  # the folder that ddp_mp is in


class AfterTorch:
    """A finder that finds nothing by itself, but adds :func:`install` to what is executed when PyTorch is imported.

    A program may look for PyTorch without importing it, so the finder stays until an import has come to its end.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The specification that the other finders have for PyTorch, and nothing for any other module."""
        if name != "torch":
            return None
        for finder in sys.meta_path:
            find: Any = getattr(finder, "find_spec", None)
            spec: Any = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None and spec.origin is not None:
                    self._extend(spec.loader)
                found: importlib.machinery.ModuleSpec = spec
                return found
        return None

    def _extend(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                install()

        loader.exec_module = exec_module


def install() -> None:
    """``ddp_mp.install`` as ``run`` called it.  Another Python, which cannot load the package, gets a warning."""
    try:
        run = _tools_run()
    except ImportError as error:
        warnings.warn(
            f"python -m ddp_mp run: a process that it started cannot import ddp_mp, and patches no model: {error}", stacklevel=2
        )
        return
    run.install_in_child(os.environ["DDP_MP_RUN"])


def _tools_run() -> Any:
    try:
        return importlib.import_module("ddp_mp.tools.run")
    except ModuleNotFoundError as error:
        if error.name != "ddp_mp":
            raise
    # The parent found the package in its current folder, which is not on the child's path.
    sys.path.append(PACKAGES)
    try:
        return importlib.import_module("ddp_mp.tools.run")
    finally:
        sys.path.remove(PACKAGES)


def execute_next() -> None:
    """Executes the ``sitecustomize`` that this one stands in front of, if there is one, and leaves the name to it."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.curdir) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("DDP_MP_RUN"):
    if "torch" in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, AfterTorch())
execute_next()
