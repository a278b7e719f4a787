"""The version.  setup.py and pyproject.toml read it from here; the extension carries it too."""

__version__ = "0.1.0"
