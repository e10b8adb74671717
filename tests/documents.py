"""JSON documents held against the schemas that the documentation publishes."""

import importlib.util
import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).parents[1] / "docs/schemas.py"


@cache
def validators() -> dict[str, Draft202012Validator]:
    """Return what checks a document of each schema; keys that the schema does not have are refused."""
    spec = importlib.util.spec_from_file_location("schemas", SCHEMAS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {title: Draft202012Validator(schema) for title, schema in module.schemas(closed=True).items()}


def validated(document: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a document of a verb if it is as its schema says. Raises :class:`jsonschema.ValidationError`."""
    validators()[document["schema"]].validate(document)
    return document


def validate_output(text: str) -> None:
    """Validate the document that begins the output of a command, if one does and it is whole."""
    if text.startswith('{\n  "schema": "cachectl/'):
        with suppress(json.JSONDecodeError):
            validated(json.JSONDecoder().raw_decode(text)[0])
