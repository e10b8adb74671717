"""Variables without the expected effect: a path that no shell has expanded, and a name that nothing reads."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator
from functools import partial
from pathlib import Path

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.codes import VARIABLE
from cachectl.layers.core.finding import HARMLESS, Finding, Severity
from cachectl.layers.core.layer import Layer, first_place
from cachectl.layers.core.root import ABSENT

#: What a shell expands (systemd expands ``%h``), and the other special characters between double quotes.
_SPECIAL = regex(r"\A(?:~[A-Za-z_]?[\w-]*|%h)(?=/|\Z)|\$\{[A-Za-z_]\w*\}|\$[A-Za-z_]\w*|[\"\\`$]", re.ASCII)
#: Words in a name that reveal the purpose of the variable.
_PURPOSE = regex(
    r"\b(?:(?P<place>(?:CACHE)?(?:DIR|PATH)|DIRECTORY|FOLDER|ROOT|HOME|LOCATION)"
    r"|(?P<switch>(?:DIS|EN)ABLED?|NO|OFF|ON)|(?P<size>(?:MAX)?SIZE|MAX|LIMIT))\b"
)
#: The most letters that are wrong in a misspelt name.
_MISSPELT = 2


def diagnosed(layer: Layer) -> Iterator[Finding]:
    """Yield a layer's findings; for a path that no shell expanded only that one, as serious as its consequences."""
    unexpanded, order = dict(_unexpanded(layer)), tuple(Severity)
    worst = dict.fromkeys(unexpanded, HARMLESS)
    for finding in layer.diagnose():
        variable = next((name for name in unexpanded if re.search(rf"\b{name}\b", finding.message)), None)
        if variable is None:
            yield finding
        else:
            worst[variable] = min(finding.severity, worst[variable], key=order.index)
    place = first_place(layer)
    outcome = "there is no cache" if place == Path("*") else f"the cache is {place}"
    for variable, sign in unexpanded.items():
        value = layer.environment.variables[variable]
        expander = "systemd did not expand" if sign == "%h" else "no shell expanded"
        message = f"{variable}={value!r}: {expander} {sign}, so {outcome}"
        fix = f"export {variable}={_in_quotes(layer.environment, value)}"
        yield VARIABLE.finding(layer.name, place, message, fix, severity=worst[variable])


def _unexpanded(layer: Layer) -> Iterator[tuple[str, str]]:
    """Yield the variables that decide a layer's place, each with the first part that a shell would have expanded."""
    environment, places = layer.environment, getattr(layer, "places", None)
    if places is None or environment.platform == "win32":
        return
    for variable in dict.fromkeys((places.variable, *(rule.variable for rule in places.rules(environment.platform)))):
        special = _SPECIAL.findall(environment.get(variable) or "")
        signs = [sign for sign in special if len(sign) > 1 or (sign == "~" and not places.expands_home)]
        # A variable that all programs read is not reported for a driver that is absent.
        if signs and variable != "HOME" and (variable == places.variable or layer.state().condition is not ABSENT):
            elsewhere = type(layer)(environment.with_variables({variable: "/"}))
            if elsewhere.roots() != layer.roots():
                yield variable, signs[0]


def _in_quotes(environment: Environment, value: str) -> str:
    """Quote a value so that a shell expands it, and stops at a variable that is not set here."""

    def quoted(match: re.Match[str]) -> str:
        sign = match[0]
        if sign in ("~", "%h"):
            return "$HOME"
        if sign.startswith("~"):
            return os.path.expanduser(sign)
        if len(sign) == 1:
            return f"\\{sign}"
        return sign if environment.get(name := sign.strip("${}")) else f"${{{name}:?}}"

    return f'"{_SPECIAL.sub(quoted, value)}"'


# ---------------------------------------------------------------------- names that nothing reads


def read_by(layer: Layer) -> dict[str, str]:
    """Return the variables that a layer's library reads, each with its purpose: ``place``, ``switch``, ``size``."""
    purposes = {name: _purpose(name) for name in (layer.family.read.split() if layer.family is not None else ())}
    if layer.switch is not None:
        purposes[layer.switch.variable] = "switch"
    return {**purposes, layer.places.variable: "place"}


def unread(layers: Iterable[Layer], asked: Container[str]) -> Iterator[Finding]:
    """Yield findings about variables of the ``asked`` layers' products that no known release reads.

    They name the variables that were probably intended. All ``layers`` define what is read.
    """
    families: dict[str, list[Layer]] = {}
    for layer in layers:
        if layer.family is not None:
            families.setdefault(layer.family.pattern, []).append(layer)
    for pattern, relatives in families.items():
        named = next((layer for layer in relatives if layer.name in asked), None)
        if named is None:
            continue
        purposes = {name: purpose for layer in relatives for name, purpose in read_by(layer).items()}
        variables = relatives[0].environment.variables
        for name in sorted(variables.keys() - purposes.keys()):
            value = variables[name]
            alike = [right for right in purposes if _wrong_letters(name, right) <= _MISSPELT]
            if alike or (re.fullmatch(pattern, name) and (purpose := _purpose(name, value, purposes))):
                alike = alike or [right for right in purposes if purposes[right] == purpose]
                right = min(alike, key=partial(_wrong_letters, name), default="")
                message = f"{name}={value!r}: no release reads it" + f"; did you mean {right}?" * bool(right)
                fix = f"unset {name}"
                # The right variable gets the value if that suits it.
                is_plain = re.fullmatch(r"/[^$]*|\d+", value) and purposes.get(right) in ("place", "size")
                if is_plain and name.partition("_")[0] in right and right not in variables:
                    fix += f"; export {right}={_in_quotes(named.environment, value)}"
                yield VARIABLE.finding(named.name, first_place(named), message, fix)


def _purpose(name: str, value: str = "", names: Iterable[str] = ()) -> str:
    """Return a variable's purpose by the words in its name, or by its value if it is a prefix of one of ``names``."""
    if (match := _PURPOSE.search(name.replace("_", " "))) is not None:
        return str(match.lastgroup)
    purpose = "place" if "/" in value else "switch"
    return purpose if any(right.startswith(f"{name}_") for right in names) else ""


def _wrong_letters(name: str, right: str) -> int:
    """Return the number of letters that differ: all, if the names do not begin with the same word."""
    from difflib import SequenceMatcher

    longest = max(len(name), len(right))
    if name.partition("_")[0] != right.partition("_")[0]:
        return longest
    return longest - sum(block.size for block in SequenceMatcher(None, name, right).get_matching_blocks())
