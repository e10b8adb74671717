"""Stand-ins for methods that remember what they returned: with one in place, an object starts from nothing.

What it remembers meanwhile goes with the stand-in, and what it remembered before is there again without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def forgetting(method: Callable[..., object]) -> Callable[..., object]:
    """Make a stand-in for a method that pytools' ``memoize_method`` wraps."""
    from inspect import unwrap
    from weakref import WeakKeyDictionary

    bare = unwrap(method)
    memo: WeakKeyDictionary[Any, dict[object, object]] = WeakKeyDictionary()

    @wraps(method)
    def remember_anew(owner: object, *arguments: object, **options: object) -> object:
        remembered = memo.setdefault(owner, {})
        key = (arguments, tuple(sorted(options.items())))
        if key not in remembered:
            remembered[key] = bare(owner, *arguments, **options)
        return remembered[key]

    return remember_anew
