"""Replacements for memoised methods: with one in place, an object starts with an empty memo.

Results memoised meanwhile are dropped with the replacement, and the earlier ones are visible again without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from typing import Any
from weakref import WeakKeyDictionary


def forgetting(method: Callable[..., object]) -> Callable[..., object]:
    """Make a replacement for a method that pytools' ``memoize_method`` wraps."""
    bare = unwrap(method)
    memo: WeakKeyDictionary[Any, dict[object, object]] = WeakKeyDictionary()

    @wraps(method)
    def call(owner: object, *arguments: object, **options: object) -> object:
        remembered = memo.setdefault(owner, {})
        key = (arguments, tuple(sorted(options.items())))
        if key not in remembered:
            remembered[key] = bare(owner, *arguments, **options)
        return remembered[key]

    return call
