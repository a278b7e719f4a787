"""Writes compile_commands.json, which tells clangd and editors how each C file of the extension is compiled.

    python scripts/compile_commands.py

The flags are those that setup.py hands to setuptools, with warnings as errors.  Nothing is compiled.
"""

from __future__ import annotations

import json
import os
import runpy
import sysconfig
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]


def entries() -> list[dict[str, object]]:
    """One entry for each C file of the extension.  The current folder is the root of the checkout."""
    with mock.patch.dict(os.environ, DDP_MP_DEVELOP="1"), mock.patch("setuptools.setup") as setup:
        runpy.run_path("setup.py")
    (extension,) = setup.call_args.kwargs["ext_modules"]
    includes = [*extension.include_dirs, sysconfig.get_path("include")]
    flags = [
        *(f"-D{name}={value}" for name, value in extension.define_macros),
        *(f"-I{folder}" for folder in includes),
        *extension.extra_compile_args,
    ]
    compiler = os.environ.get("CC", "cc")
    return [
        {"directory": str(ROOT), "file": source, "arguments": [compiler, *flags, "-c", source]} for source in extension.sources
    ]


def main() -> None:
    os.chdir(ROOT)
    found = entries()
    Path("compile_commands.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"compile_commands.json: {len(found)} files")


if __name__ == "__main__":
    main()
