"""What the documentation publishes: the schemas that JSON documents are held against, and listings that tests run."""

import importlib.util
import json
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "adding-a-layer.md"


def listing(caption: str) -> str:
    """Return a listing of the page about adding layers."""
    (block,) = re.findall(rf":caption: {re.escape(caption)}\n\n(.*?\n)```", PAGE.read_text(), re.DOTALL)
    return str(block)


@cache
def validators() -> dict[str, Draft202012Validator]:
    """Return what checks a document of each schema; keys that the schema does not have are refused."""
    schemas = module_of_docs("schemas").schemas(closed=True)
    return {title: Draft202012Validator(schema) for title, schema in schemas.items()}


def module_of_docs(name: str) -> Any:  # noqa: ANN401 - a module
    """Return a module that the documentation is made with."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def validated(document: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a document of a verb if it is as its schema says. Raises :class:`jsonschema.ValidationError`."""
    validators()[document["schema"]].validate(document)
    return document


def validate_output(text: str) -> None:
    """Validate the document that begins the output of a command, if one does and it is whole."""
    if text.startswith('{\n  "schema": "cachectl/'):
        with suppress(json.JSONDecodeError):
            validated(json.JSONDecoder().raw_decode(text)[0])
