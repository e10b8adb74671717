"""Sphinx settings; build with ``sphinx-build -W -b html docs docs/_build/html``."""

import sys
from pathlib import Path

from sphinx.application import Sphinx

from cachectl import __version__

# The directives and schemas of this folder.
sys.path.insert(0, str(Path(__file__).parent))

project: str = "cachectl"
version: str = __version__
release: str = __version__

extensions: list[str] = [
    *("myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinxarg.ext"),
    *("tables", "schemas", "sphinx_copybutton"),
]
# The button copies commands without their prompts and outputs.
copybutton_prompt_text = "$ "
# The inventories hold the few names that these pages refer to: a build needs no network and gives the same pages.
intersphinx_mapping: dict[str, tuple[str, str]] = {
    "python": ("https://docs.python.org/3", "inventories/python.inv"),
    "pytools": ("https://documen.tician.de/pytools", "inventories/pytools.inv"),
    "pyopencl": ("https://documen.tician.de/pyopencl", "inventories/pyopencl.inv"),
    "loopy": ("https://documen.tician.de/loopy", "inventories/loopy.inv"),
}
exclude_patterns: list[str] = ["_build"]

# Pages point at each other's sections.
myst_heading_anchors: int = 3

html_theme: str = "furo"
html_static_path: list[str] = ["_static"]
html_css_files: list[str] = ["wide.css"]
# No holder is named, so that the line would be empty.
html_show_copyright: bool = False
# Usages of commands are no Python.
highlight_language: str = "text"
html_title: str = f"cachectl {__version__}"

# Options of a command line begin with two hyphens, not with a dash.
smartquotes: bool = False
# Sphinx takes attributes called bytes for targets of references to the builtin type.
suppress_warnings: list[str] = ["ref.python"]

autodoc_member_order: str = "bysource"
autodoc_default_options: dict[str, bool] = {"members": True, "show-inheritance": True}


def _is_only_numbered(
    _app: object, _what: str, _name: str, member: object, _skip: bool, _options: object
) -> bool | None:
    """Leave out fields of named tuples, which the signature lists with their types."""
    return True if str(getattr(member, "__doc__", "")).startswith("Alias for field number") else None


def setup(app: Sphinx) -> None:
    """Register the above."""
    app.connect("autodoc-skip-member", _is_only_numbered)
