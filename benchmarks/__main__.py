"""Runs every benchmark in a process of its own: ``python -m benchmarks [--quick] [--device cuda] [--tag NAME]``."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("hooks", "parts", "step", "forward", "cast", "memory", "scaling", "launches")


def main() -> int:
    if "-h" in sys.argv or "--help" in sys.argv:
        print(__doc__, "\nBenchmarks:", ", ".join(BENCHMARKS))
        return 0
    failed = []
    for name in BENCHMARKS:
        print(f"-- {name}", flush=True)
        if subprocess.call([sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]]):
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
