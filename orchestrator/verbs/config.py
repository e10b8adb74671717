"""``cachectl config``: the settings, and where each was set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cachectl import verbs
from cachectl.show.table import Table

EXAMPLE = "cachectl config"
OPTIONS = (verbs.FORM,)
_Document = Mapping[str, Any]


def run(request: verbs.Request) -> _Document:
    """Carry out ``cachectl config``. Raises as :func:`cachectl.config.load` does."""
    config = request.config
    return {
        "files": [{"path": path, "origin": origin, "exists": exists} for path, origin, exists in config.files],
        "settings": [{"key": key, "value": value, "path": path} for key, (value, path) in config.settings.items()],
    }


def table(document: _Document, _request: verbs.Request) -> Table:
    """Return the settings."""
    rows = []
    for setting in document["settings"]:
        value = setting["value"]
        text = " ".join(value) if isinstance(value, list) else str(value)
        rows.append((setting["key"], text.lower() if isinstance(value, bool) else text, str(setting["path"])))
    return Table(dict.fromkeys(("setting", "value", "from"), str), rows)


def show(document: _Document, request: verbs.Request) -> Iterator[object]:
    """Yield the settings, and the files that are looked for."""
    yield table(document, request) if document["settings"] else "nothing is set"
    yield ""
    for file in document["files"]:
        yield [f"{file['origin']}: {file['path']}{'' if file['exists'] else ' (missing)'}"]
