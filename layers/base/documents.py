"""Strict JSON in both directions: no NaN, no infinity, no number outside the range of a float."""

from __future__ import annotations

import json
import math
from typing import Any


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a JSON number")
    return number


# Python's own decoder accepts NaN and Infinity, and turns 1e999 into infinity.
_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def parse_json(text: bytes | str) -> Any:  # noqa: ANN401 - JSON
    """Return the value of a JSON text in UTF-8. Raises :class:`ValueError` for anything else."""
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def encode_json(value: object, **form: Any) -> bytes:  # noqa: ANN401 - of json.dumps
    """Encode a value with the options of :func:`json.dumps`. Raises :class:`ValueError` for NaN and infinity."""
    return json.dumps(value, allow_nan=False, **form).encode()
