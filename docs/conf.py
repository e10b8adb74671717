"""Sphinx settings; build with ``sphinx-build -W -b html docs docs/_build/html``."""

import sys
from pathlib import Path

from cachectl import __version__

# The directives and schemas of this folder.
sys.path.insert(0, str(Path(__file__).parent))

project: str = "cachectl"
version: str = __version__
release: str = __version__

extensions: list[str] = ["myst_parser", "sphinx.ext.autodoc", "sphinxarg.ext", "abilities", "floor_plan", "schemas"]
exclude_patterns: list[str] = ["_build"]

# Pages point at each other's sections.
myst_heading_anchors: int = 3

html_theme: str = "furo"
html_title: str = f"cachectl {__version__}"

# Options of a command line begin with two hyphens, not with a dash.
smartquotes: bool = False
# Sphinx takes attributes called bytes for targets of references to the builtin type.
suppress_warnings: list[str] = ["ref.python"]

autodoc_member_order: str = "bysource"
autodoc_default_options: dict[str, bool] = {"members": True, "show-inheritance": True}
