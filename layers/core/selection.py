"""The selection of entries: by kernel, key, age or staleness."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase, translate
from typing import NamedTuple, NoReturn

from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.text import did_you_mean
from cachectl.layers.core.entry import Entry

_MOST = 2.0**63
_AGE_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZE_UNITS = {
    "B": 1,
    **{f"{letter}{suffix}": 1024**power for power, letter in enumerate("KMGT", 1) for suffix in ("", "B", "IB")},
}
_SHORT_KEY = regex(r"[0-9a-f]{12}")


def short_key(key: str) -> str:
    """Return the short form of a key, for typing: the first 12 hexadecimal digits of its SHA-256."""
    import hashlib

    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:12]


def is_short_key(text: str) -> bool:
    """Return whether a text has the form of a short key."""
    return _SHORT_KEY.fullmatch(text) is not None


def names_key(given: str, key: str) -> bool:
    """Return whether ``given`` is a key or its short form."""
    return given == key or (is_short_key(given) and given == short_key(key))


class _Conditions(NamedTuple):
    kernel: str | None = None
    key: str | None = None
    before: float | None = None
    stale: bool = False


class Selection(_Conditions):
    """A conjunction of conditions; the empty one selects everything.

    :param kernel: a shell pattern for kernel names
    :param key: the full or the short key
    :param older_than: an age such as ``"30d"``, or seconds: not changed or used since ``before``, that time
    :param stale: only entries of a driver that was seen here and is gone
    :param now: the time in epoch seconds, by default the present
    :raises BadRequest: for an age that cannot be read
    """

    def __new__(  # noqa: PYI034 - Python 3.10 has no Self
        cls,
        kernel: str | None = None,
        key: str | None = None,
        older_than: str | float | None = None,
        stale: bool = False,  # noqa: FBT002 - like the options
        *,
        now: float | None = None,
        **wrong: NoReturn,
    ) -> Selection:
        """Make a selection. Raises :class:`TypeError` for an unknown keyword, with the name of the right one."""
        if wrong:
            refuse_keywords(cls, wrong)
        before = None if older_than is None else moment_before(older_than, now)
        return super().__new__(cls, kernel, key, before, stale)

    @property
    def kernel_pattern(self) -> re.Pattern[str] | None:
        """Return the pattern that a kernel's name must match; ``None`` if any name matches."""
        return None if self.kernel is None else re.compile(translate(self.kernel))

    @property
    def kernel_part(self) -> str:
        """Return the longest literal part of the pattern, which every selected kernel's name contains; may be empty."""
        # Only fnmatch knows where a set in brackets begins and ends.
        return max(re.split(r"[*?]", (self.kernel or "").partition("[")[0]), key=len)

    @property
    def needs_contents(self) -> bool:
        """Return whether entries must be read: their bytes have the kernel names and some signs of staleness."""
        return self.kernel is not None or self.stale

    def matches(self, item: Entry) -> bool:
        """Return whether an item meets every condition. An unknown value meets none."""
        pattern, moment = self.kernel, item.latest
        return (
            (pattern is None or any(fnmatchcase(kernel, pattern) for kernel in item.details.kernels or ()))
            and (self.key is None or names_key(self.key, item.key))
            and (self.before is None or (moment is not None and moment < self.before))
            and (item.stale is True or not self.stale)
        )


def parse_age(text: str) -> float:
    """Read ``30d``, ``12h``, ``2w``, ``90m`` or ``45s`` as seconds. Raises :class:`BadRequest` for anything else."""
    return _parsed(text, text, _AGE_UNITS, "an age; write a number and s, m, h, d or w, such as 30d")


def moment_before(age: str | float | None, now: float | None) -> float | None:
    """Return the time, in epoch seconds, that is an age before now; the age is a text or in seconds."""
    if age is None:
        return None
    return (time.time() if now is None else now) - (parse_age(age) if isinstance(age, str) else age)


def refuse_keywords(kind: type, wrong: Iterable[str]) -> None:
    """Raise :class:`TypeError` for keywords that a class does not accept, with those that it does."""
    for word in wrong:
        code = kind.__new__.__code__
        names = code.co_varnames[1 : code.co_argcount]
        advice = did_you_mean(word, names) or f"; it has {', '.join(names)}"
        raise TypeError(f"{kind.__name__} has no keyword {word!r}{advice}")


ALL = Selection()


def parse_size(text: str) -> int:
    """Read ``500M``, ``2GiB`` or ``300B`` as bytes; units are powers of 1024.

    Raises :class:`BadRequest` for anything else: a number without a unit is bytes to one reader, megabytes to another.
    """
    advice = "a size; write a number and B, K, M, G or T, such as 500M"
    return int(_parsed(text, text.upper(), _SIZE_UNITS, advice, gap=r"\s*"))


def _parsed(text: str, word: str, units: Mapping[str, int], advice: str, gap: str = "") -> float:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?){gap}([A-Za-z]+)", word.strip())
    if match is None or match[2] not in units:
        raise BadRequest(f"cannot read {text!r} as {advice}")
    amount = float(match[1]) * units[match[2]]
    if amount > _MOST:
        raise BadRequest(f"{text.strip()[:20]!r} is too large")
    return amount


def moment_text(moment: float) -> str:
    """Format epoch seconds as a date and time in UTC."""
    from datetime import datetime, timezone

    try:
        return datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return f"{moment:.0f} s after 1970"
