"""Sphinx's settings; `make docs` builds the site with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import ddp_mp

project = "ddp_mp"
author = "the ddp_mp contributors"
release = ddp_mp.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["requirements.txt"]
nitpicky = True
# Names of PyTorch and of Python, whose documentation is not at hand when the site is built.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|DistributedDataParallel|DDP|DDPType|Literal|Iterator|Any)\b.*"),
    ("py:.*", r"(float|int|str|bool|dict|None|object|TypeError|ValueError|RuntimeError)"),
    ("py:.*", r"(ddp_mp\.\w+\.DDP|_MixedPrecision|.*\._MixedPrecision|_Installation|.*\._Installation|.*\.Entry)"),
    ("py:.*", r"(typing|collections|contextlib)\..*"),
]

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = f"ddp_mp {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
pygments_style = "tango"
pygments_dark_style = "monokai"
