"""Self-contained HTML pages: markup, style, script and data in one file, which loads nothing else.

The sources of a page are in this folder: ``NAME.html``, ``NAME.css`` and ``NAME.js``, and ``shared.css`` and
``shared.js`` for all pages. The Content Security Policy of a page allows exactly its own style and script, by their
hashes: the browser runs nothing that a name in the data could inject, and connects to nothing.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections import defaultdict
from importlib.resources import files

from cachectl import __version__
from cachectl.layers.base.documents import encode_json
from cachectl.show.output_files import Kind

#: The beginning of each page, by which cachectl recognizes pages that it may replace.
BEGINNING = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="generator" content="cachectl """
PAGE = Kind("a page of cachectl", lambda head: head.startswith(BEGINNING.encode()), is_binary=False)
_PAGE = (
    BEGINNING
    + """{version}">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
{body}
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</html>
"""
)


def numbered() -> defaultdict[str, int]:
    """Return the numbers of repeated texts in the data of a page: a new text gets the next number."""
    words: defaultdict[str, int] = defaultdict()
    words.default_factory = words.__len__
    return words


def build_page(name: str, title: str, data: object) -> bytes:
    """Return the page of the sources ``name``; its script reads ``data`` as JSON.

    ``title`` is constant text. Raises :class:`ValueError` for a number that JSON does not have.
    """
    style = _read("shared.css") + _read(f"{name}.css")
    script = _read("shared.js") + _read(f"{name}.js")
    # An empty icon keeps the browser from requesting one from a server.
    policy = (
        f"default-src 'none'; style-src '{_hash_of(style)}'; script-src '{_hash_of(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _PAGE.format(
        version=__version__,
        policy=policy,
        title=title,
        style=style,
        body=_read(f"{name}.html"),
        data=embeddable(data),
        script=script,
    )
    return page.encode()


def embeddable(data: object) -> str:
    """Return JSON that is safe in a script element, whatever its texts contain.

    Only ``<`` can end the element or begin a comment in it. Non-ASCII characters are escaped too, including undecodable
    bytes of file names.
    """
    return encode_json(data, separators=(",", ":")).decode().replace("<", "\\u003c")


def _read(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _hash_of(text: str) -> str:
    """Return the hash of an inline style or script, as a Content Security Policy names it."""
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
