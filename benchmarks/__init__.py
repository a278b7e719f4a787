"""Measurements of ddp_mp.  ``python -m benchmarks`` runs them all; each file can be run by itself, with ``--help``."""
