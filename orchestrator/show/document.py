"""The JSON of a fact, which follows from its class (:mod:`cachectl.layers.core.json_form`)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any

from cachectl.layers.base.documents import encode_json
from cachectl.layers.core.json_form import declared, json_keys


def json_bytes(fact: object) -> bytes:
    """Return a fact as the JSON document of a file."""
    return encode_json(_plain(fact), indent=2) + b"\n"


def _plain(fact: Any) -> Any:  # noqa: ANN401 - a fact of any class, and what JSON has
    """Return the fact in types that JSON has."""
    if fact is None or isinstance(fact, (str, int, float)):
        # JSON has no NaN and no infinity: they are unknown.
        return None if isinstance(fact, float) and not math.isfinite(fact) else fact
    if isinstance(fact, Enum):
        return fact.value
    if isinstance(fact, os.PathLike):
        return os.fspath(fact)
    if isinstance(fact, SimpleNamespace):
        fact = vars(fact)
    if isinstance(fact, Mapping):
        return {key: _plain(value) for key, value in fact.items()}
    if isinstance(fact, (list, tuple)) and not hasattr(fact, "_fields"):
        return [_plain(value) for value in fact]
    say = declared(type(fact))
    document: dict[str, object] = {} if say.schema is None else {"schema": say.schema}
    for attribute, key in json_keys(type(fact)).items():
        value = getattr(fact, attribute)
        if attribute in say.flat:
            document.update(_plain(value))
        elif value is not None or attribute not in say.optional:
            document[key] = _plain(value)
    return document


def json_rows(fact: object) -> bytes:
    """Return a fact as one JSON document per line: all but its lists, with the lengths of these, then each item."""
    document = _plain(fact)
    lists = {name: value for name, value in document.items() if isinstance(value, list)}
    head = {name: value for name, value in document.items() if name not in lists}
    rows = [{name: item} for name, items in lists.items() for item in items]
    counts = {name: len(items) for name, items in lists.items()}
    return b"".join(encode_json(row) + b"\n" for row in ({**head, "rows": counts}, *rows))
