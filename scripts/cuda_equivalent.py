"""Mutants that no test can tell from the code, and why.  The key is the file, and what the mutant is called in the report."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
