"""``cachectl layers``: what each layer can and cannot do here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cachectl import verbs
from cachectl.layers.core.switch import Ability
from cachectl.show.table import Table

EXAMPLE = "cachectl layers"
OPTIONS = (verbs.LAYERS, verbs.FORM)
_Document = Mapping[str, Any]


def run(request: verbs.Request) -> _Document:
    """Carry out ``cachectl layers``: abilities with ``None`` or the reason for their lack, and broken plug-ins."""
    names = request.options.layers
    layers = [
        {
            "layer": layer.name,
            "title": layer.title,
            "scope": layer.about.scope,
            "precious": layer.about.precious,
            "abilities": {ability.value: reason for ability, reason in layer.abilities().items()},
        }
        for layer in request.stack.named(names)
    ]
    return {"layers": layers, "broken": () if names else request.stack.broken}


def table(document: _Document, _request: verbs.Request) -> Table:
    """Return whether each layer has each ability."""
    rows = [
        (layer["layer"], *("no" if reason else "yes" for reason in layer["abilities"].values()))
        for layer in document["layers"]
    ]
    return Table(dict.fromkeys(("layer", *(ability.value for ability in Ability)), str), rows)


def show(document: _Document, request: verbs.Request) -> Iterator[object]:
    """Yield the table, and the reason for each missing ability."""
    yield table(document, request)
    for layer in document["layers"]:
        for ability, reason in layer["abilities"].items():
            if reason is not None:
                yield f"{layer['layer']}: no {ability}: {reason}"
