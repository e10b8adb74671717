"""Forecast whether an entry made in one place can be hit in another.

Each layer declares the facts that its keys depend on (:class:`cachectl.layers.core.parts.Portability`). This module
compares the facts of two places, which come from names, the system's tables and installed packages. An unknown fact is
``None``, and never equal to another.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping

from cachectl import layer_set
from cachectl.layers.base.documents import encode_json
from cachectl.layers.base.environment import Environment
from cachectl.layers.core.parts import OR, UNFORESEEN, Facts, Outlook, Portability

_EVERYWHERE = ("platform", "machine")
#: Makes entries that hit wherever the bound fact of others has another value.
COMMAND = "cachectl run --portable"

#: A fact that differs here: its name, its value there and here, and whether that prevents every hit in the layer.
Difference = tuple[str, str | None, str | None, bool]


def portability_key(portability: Portability | None, environment: Environment) -> dict[str, str | None]:
    """Return the facts of an environment that decide whether entries of a layer can be hit elsewhere."""
    own = {} if portability is None else portability.facts(environment)
    return {"platform": environment.platform, "machine": platform.machine() or None, **own}


def portability_digest(stack: layer_set.LayerSet) -> str:
    """Return 16 hexadecimal digits that are equal in places where the same entries of clearable layers can be hit."""
    keys = {layer.name: portability_key(layer.about.portability, stack.environment) for layer in stack.clearable()}
    return hashlib.sha256(encode_json(keys, sort_keys=True)).hexdigest()[:16]


def differences(portability: Portability | None, elsewhere: Facts, environment: Environment) -> tuple[Difference, ...]:
    """List the facts of a place that differ in an environment, or that are unknown in either."""
    deciding = {*_EVERYWHERE, *(() if portability is None else portability.deciding)}
    here = portability_key(portability, environment)
    differing = []
    for name, value in sorted(elsewhere.items()):
        own = here.get(name)
        theirs, ours = ({*(fact or "").split(OR)} for fact in (value, own))
        is_known = None not in (value, own)
        if not (is_known and theirs <= ours):
            differing.append((name, value, own, is_known and name in deciding and theirs.isdisjoint(ours)))
    return tuple(differing)


def why_not(portability: Portability | None, differing: Iterable[Difference]) -> Outlook | None:
    """Return the outlook that no entry can be hit here, with the reason and a remedy; ``None`` if some may be hit."""
    deciding = {name: f"{name} {elsewhere}, here {here}" for name, elsewhere, here, decides in differing if decides}
    if portability is not None and [*deciding] == [portability.bound]:
        deciding[""] = f"entries of {COMMAND} hit at any"
    return Outlook(False, ", ".join(deciding.values())) if deciding else None  # noqa: FBT003


def outlook(
    portability: Portability | None,
    versions: Mapping[str, str],
    elsewhere: Facts,
    environment: Environment,
    differing: Iterable[Difference],
) -> Outlook:
    """Forecast whether a program here would compute the key of an entry with these versions.

    ``differing`` is the result of :func:`differences` for the entry's layer.
    """
    if portability is None:
        return UNFORESEEN
    own = portability.outlook(versions, elsewhere, environment)
    if own is not None:
        return own
    its = portability.of_entry(versions, elsewhere)
    differing = differing if its == elsewhere else differences(portability, its, environment)
    if (denied := why_not(portability, differing)) is not None:
        return denied
    for name, value, here, _ in differing:
        informs = name in portability.informing or name in versions
        if not informs and (value, here) != (None, None):
            return Outlook(None, f"{name} {value or 'unknown'}, here {here or 'unknown'}")
    unknown = [name for name, *_ in differing if name in portability.needed and name not in versions]
    return Outlook(None, f"{', '.join(unknown)} unknown") if unknown else Outlook(True)  # noqa: FBT003
