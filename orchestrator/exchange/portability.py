"""Forecast whether an entry made in one place can be hit in another.

Each layer names the facts that its keys depend on (:class:`cachectl.layers.base.parts.Portability`); here the facts of
two places are compared. They are read from names, the system's own tables and what is installed. A fact that is unknown
in either place is ``None``, and never equal to another.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from cachectl import layer_set
from cachectl.exchange.format import Item
from cachectl.layers.base import parts
from cachectl.layers.base.environment import Environment

_EVERYWHERE: Final = {"platform": "another system's", "machine": "another kind of processor's"}


class Difference(NamedTuple):
    """A fact that differs here, and whether it keeps every entry of the layer from being hit."""

    name: str
    there: str | None
    here: str | None
    decides: bool


def portability_key(portability: parts.Portability | None, environment: Environment) -> dict[str, str | None]:
    """Return the facts of an environment that decide whether entries of a layer can be hit elsewhere."""
    facts: dict[str, str | None] = {"platform": environment.platform, "machine": platform.machine() or None}
    if portability is not None:
        facts |= portability.facts(environment)
    return facts


def portability_digest(stack: layer_set.LayerSet) -> str:
    """Return 16 hexadecimal digits that are equal where the same entries of all clearable layers can be hit."""
    keys = {
        layer.name: portability_key(stack.portability(layer.name), stack.environment) for layer in stack.clearable()
    }
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:16]


def _deciding(portability: parts.Portability | None) -> Mapping[str, str]:
    return _EVERYWHERE if portability is None else {**_EVERYWHERE, **portability.deciding}


def differences(portability: parts.Portability | None, there: parts.Facts, here: parts.Facts) -> tuple[Difference, ...]:
    """List the facts of a place that differ here, or that either place does not know."""
    deciding = _deciding(portability)
    return tuple(
        Difference(name, value, here.get(name), name in deciding and None not in (value, here.get(name)))
        for name, value in sorted(there.items())
        if value is None or here.get(name) != value
    )


def why_not(differing: Iterable[Difference]) -> str | None:
    """Return why no entry can be hit here; ``None`` if some may be."""
    deciding = [f"{one.name} {one.there}, here {one.here}" for one in differing if one.decides]
    return f"cannot hit: {', '.join(deciding)}" if deciding else None


def outlook(
    portability: parts.Portability | None,
    item: Item,
    there: parts.Facts,
    environment: Environment,
    differing: Iterable[Difference],
) -> parts.Outlook:
    """Forecast whether a program here that asks for an entry would compute its key.

    ``differing`` is the result of :func:`differences` for the item's layer.
    """
    deciding = _deciding(portability)
    for one in differing:
        if one.decides:
            return parts.Outlook(False, f"{one.name} {one.there}, here {one.here}: {deciding[one.name]}")  # noqa: FBT003
    if portability is None:
        return parts.UNFORESEEN
    own = portability.outlook(item.versions, there, environment)
    if own is not None:
        return own
    for one in differing:
        informs = one.name in portability.informing or one.name in item.versions
        if not informs and (one.there, one.here) != (None, None):
            return parts.Outlook(None, f"{one.name} {one.there or 'unknown'}, here {one.here or 'unknown'}")
    unknown = [one.name for one in differing if one.name in portability.needed and one.name not in item.versions]
    return parts.Outlook(None, f"{', '.join(unknown)} unknown") if unknown else parts.Outlook(True)  # noqa: FBT003
