"""JSON Schemas of what ``--json`` prints, made from the facts. Sphinx writes them to ``schemas/`` beside the pages.

Each document is a class of facts with a schema name. Keys follow from its fields as
:mod:`cachectl.layers.core.json_form` has it, and types from their annotations.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from cachectl import grouping, listing
from cachectl.layers.core.finding import Finding
from cachectl.layers.core.json_form import declared, json_keys
from cachectl.layers.host.neighbours import Neighbour
from cachectl.layers.registry import catalogue
from cachectl.watching import ledger

#: Every class that a verb shows with ``--json``.
DOCUMENTS = (
    "cachectl.verbs.report:Report",
    "cachectl.listing:Listing",
    "cachectl.listing:Findings",
    "cachectl.removal:RemovalPlan",
    "cachectl.removal:Removal",
    "cachectl.watching.timeline:Trace",
    "cachectl.verbs.bench:Bench",
    "cachectl.transfer:Transfer",
    "cachectl.verbs.store:StoreListing",
    "cachectl.verbs.store:Collection",
    "cachectl.verbs.store:StoreCheck",
    "cachectl.cli.users:Answers",
)

#: What modules import for type checkers only.
_NAMES = {
    "Neighbour": Neighbour,
    "grouping": grouping,
    "listing": listing,
    "ledger": ledger,
}
_PLAIN = {str: "string", Path: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}

Schema = dict[str, Any]


def schemas(*, closed: bool = False) -> dict[str, Schema]:
    """Return the JSON Schema of each document by its name, ``cachectl/report/1``.

    More keys may be added to a document of one name; ``closed`` allows only those of today.
    """
    makers: dict[str, _Maker] = {}
    documents: dict[str, list[Schema]] = {}
    for path in DOCUMENTS:
        module, _, name = path.partition(":")
        kind = getattr(import_module(module), name)
        title = declared(kind).schema
        document = makers.setdefault(title, _Maker(closed)).of_class(kind)
        document["properties"] = {"schema": {"const": title}, **document["properties"]}
        document["required"] = ["schema", *document["required"]]
        documents.setdefault(title, []).append(document)
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {
        title: {"$schema": dialect, "title": title, "anyOf": forms, "$defs": makers[title].classes}
        for title, forms in documents.items()
    }


class _Maker:
    """Makes one schema; ``classes`` are those of the facts in it."""

    def __init__(self, closed: bool) -> None:
        self._closed = closed
        self.classes: dict[str, Schema] = {}

    def of_class(self, kind: type) -> Schema:
        """Return the schema of a class of facts."""
        keys = dict(self._keys(kind))
        return {
            "type": "object",
            "description": (kind.__doc__ or "").partition("\n")[0],
            "properties": {key: schema for key, (schema, _) in keys.items()},
            "required": [key for key, (_, required) in keys.items() if required],
            "additionalProperties": not self._closed,
        }

    def _keys(self, kind: type) -> Iterator[tuple[str, tuple[Schema, bool]]]:
        """Yield each key with its schema, and whether it is always there."""
        hints, say = get_type_hints(kind, localns=_NAMES), declared(kind)
        for name, key in json_keys(kind).items():
            own = getattr(kind, name, None)
            hint = get_type_hints(own.fget)["return"] if isinstance(own, property) else hints[name]
            if name in say.flat:
                yield from self._keys(hint)
                continue
            if hint is types.SimpleNamespace:
                sums = {name: {"type": "integer"} for name in say.sums}
                closed = {"required": list(say.sums), "additionalProperties": not self._closed}
                yield key, ({"type": "object", "properties": sums, **closed}, True)
                continue
            is_optional = name in say.optional
            if is_optional:
                hint = Union[tuple(one for one in get_args(hint) if one is not type(None))]  # noqa: UP007
            schema = self._of_hint(hint)
            if kind is Finding and name == "code":
                # A plug-in may have others.
                schema["enum" if self._closed else "examples"] = [code.name for code in catalogue()]
            yield key, (schema, not is_optional)

    def _of_hint(self, hint: Any) -> Schema:  # noqa: ANN401 - whatever an annotation says
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return {"anyOf": [self._of_hint(one) for one in arguments]}
        if origin in (tuple, list, Sequence):
            return {"type": "array", "items": self._of_hint(arguments[0])}
        if origin is Mapping:
            return {"type": "object", "additionalProperties": self._of_hint(arguments[1])}
        if hint is object or hint in _PLAIN:
            return {} if hint is object else {"type": _PLAIN[hint]}
        if issubclass(hint, Enum):
            return {"enum": [one.value for one in hint]}
        if not hasattr(hint, "__match_args__"):
            message = f"no fact is of the type {hint}"
            raise TypeError(message)
        if hint.__name__ not in self.classes:
            self.classes[hint.__name__] = {}
            self.classes[hint.__name__] = self.of_class(hint)
        return {"$ref": f"#/$defs/{hint.__name__}"}


def file_name(title: str) -> str:
    """Return the file of a schema: ``report.json`` of ``cachectl/report/1``."""
    return f"{title.split('/')[1]}.json"


def setup(app: Any) -> dict[str, bool]:  # noqa: ANN401 - Sphinx, which the tests do without
    """Let Sphinx write the schemas when it has built the pages."""
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _write(app: Any, error: Exception | None) -> None:  # noqa: ANN401 - Sphinx
    if error is not None or app.builder.name != "html":
        return
    folder = Path(app.outdir) / "schemas"
    folder.mkdir(exist_ok=True)
    for title, schema in schemas().items():
        (folder / file_name(title)).write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")
