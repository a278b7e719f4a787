"""What a release needs before it is published: python scripts/release.py v0.2.0

The tag must be that of ddp_mp/_version.py, and CHANGELOG.md must have a section for the version, which is printed: the release
notes.  Otherwise it is an error that says what to change.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(tag: str, version: str, changelog: str) -> str:
    """The changelog's section for the version; SystemExit says what does not fit the tag."""
    if tag != f"v{version}":
        raise SystemExit(f"release: the tag is {tag}, ddp_mp/_version.py says {version}: tag v{version}, or change the file")
    section = re.search(rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None or not section[1].strip():
        raise SystemExit(f"release: CHANGELOG.md has no section {version}: give the one that is called Unreleased this name")
    return section[1].strip()


def main() -> None:
    """The command."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    version = runpy.run_path(str(ROOT / "ddp_mp/_version.py"))["__version__"]
    print(notes(sys.argv[1], version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
