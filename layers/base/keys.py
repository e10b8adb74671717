"""What every key must be, whatever the layer: keys become names of files, and come from strangers' bundles."""

from __future__ import annotations

import re
from typing import Final

from cachectl.layers.base.limits import LONGEST_KEY

#: Control characters, also those of Unicode that end a line or turn the direction of text.
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def key_complaint(key: str) -> str | None:
    """Say why a text cannot be a key of any layer; ``None`` where it can be one."""
    if not key:
        return "is empty"
    if len(key) > LONGEST_KEY:
        return f"is longer than {LONGEST_KEY:,} characters"
    if _CONTROL.search(key):
        return "holds control characters"
    return None
