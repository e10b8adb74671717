"""File names of pytools persistent dictionaries, and the kernel names in their rows.

Source: ``pytools/persistent_dict.py`` of every generation. v3 and v4 are folders, v5 is one sqlite file with
(2026.1 on) or without (2024.1.4 to 2025.2.5) a dash between identifier and Python version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from cachectl.layers.base.lazy import regex
from cachectl.layers.formats.details import names_or_none
from cachectl.layers.formats.pickles import Thing, attributes, things, walk

#: What loopy writes for a package without a version.
UNKNOWN = "_UNKNOWN_"
_VERSION = r"\d+\.\d+\.\d+\.(?:alpha|beta|candidate|final)\.\d+"
_SQLITE = regex(rf"pdict-v5-(?P<identifier>.+?)(?P<dash>-?)(?P<python>{_VERSION})\.sqlite", re.DOTALL)
_FOLDER = regex(rf"pdict-v(?P<generation>[34])-(?P<identifier>.+)-py(?P<python>{_VERSION})", re.DOTALL)
#: The folder levels of an entry in a v3 or v4 dictionary, which split its hash, and the entry's files.
V4_LEVELS = regex(r"pdict-v[34]-.+"), regex(r"[0-9a-f]{3}"), regex(r"[0-9a-f]{3}"), regex(r"[0-9a-f]{10,58}")
V4_MEMBERS = regex("key|contents|lock")
#: The prefix of dictionary names of any generation, before the identifier.
ANY_GENERATION = regex(r"pdict-v\d+-")
# Releases up to 2024.1 add the git revision, or "None".
_DATA_MODEL = regex(r"-(?P<loopy>\d[^-]*)-islpy(?P<islpy>[^-]+)-cgen(?P<cgen>[^-]+)(?:-[^-]+)?-v\d+$")
# Names that loopy and PyOpenCL derive from a kernel's. A pickled short string has its length in the byte before it.
_DERIVED = regex(rb"\x8c(.)(?=(invoke_|_lpy_host_|enqueue_knl_))", re.DOTALL)
# Where loopy's keys contain names: in the set of a translation unit, and in the first attributes of a kernel.
_ENTRYPOINTS = b"\x8c\x0bentrypoints\x94("
_KERNEL_NAME = regex(rb"\x8c(.)([^\x00-\x1f]{1,255})\x94\x8c\x09preambles\x94", re.DOTALL)
#: Opcodes of a set of names, and of references to earlier names in the pickle.
_IN_SET = frozenset({"MARK", "MEMOIZE", "SHORT_BINUNICODE", "BINGET", "LONG_BINGET"})
#: The number of objects at the beginning of a pickle that are searched for such an earlier name.
_REMEMBERED = 300


class DictionaryName(NamedTuple):
    """The parts of a dictionary's name."""

    generation: str
    identifier: str
    python: str
    dash: bool


def packages_of(identifier: str) -> dict[str, str]:
    """Return the versions of loopy, islpy and cgen in the identifier of a dictionary of loopy."""
    match = _DATA_MODEL.search(identifier)
    return {} if match is None else match.groupdict()


def parse_name(file: str, python: str) -> DictionaryName | None:
    """Read a file or folder name; ``None`` if it is not that of a dictionary.

    ``python`` is the running version, which is tried first: without a dash, an identifier that ends in a digit is
    ambiguous (``…-v2`` followed by ``3.11…``).
    """
    if file.startswith("pdict-v5-") and file.endswith(f"{python}.sqlite"):
        identifier = file[len("pdict-v5-") : -len(f"{python}.sqlite")]
        if identifier.rstrip("-"):
            return DictionaryName("v5", identifier.removesuffix("-"), python, identifier.endswith("-"))
    if (match := _SQLITE.fullmatch(file)) is not None:
        return DictionaryName("v5", match["identifier"], match["python"], bool(match["dash"]))
    if (match := _FOLDER.fullmatch(file)) is not None:
        return DictionaryName(f"v{match['generation']}", match["identifier"], match["python"], dash=True)
    return None


def kernel_names(data: bytes) -> tuple[str, ...] | None:
    """Find the kernel names in a pickled row of loopy or PyOpenCL without unpickling it; ``None`` if it names none.

    Values contain names derived from the kernel's. loopy's keys contain a translation unit (``entrypoints``) or, in the
    schedule dictionary, a kernel (``name``).
    """
    if derived := names_or_none(_derived_names(data)):
        return derived
    if b"loopy" not in data:
        return None
    if (quick := _names_at_known_places(data)) is not None:
        return quick
    # A truncated row has no names; verify reports the damage.
    with suppress(ValueError):
        return names_or_none(_names_in(walk(data)[0]))
    return None


def _derived_names(data: bytes) -> Iterator[str]:
    for match in _DERIVED.finditer(data):
        text = data[match.end() : match.end() + match[1][0]].decode(errors="replace")
        name = text.removeprefix(match[2].decode())
        if match[2] != b"invoke_":
            yield name
        elif name.endswith("_loopy_kernel"):
            yield name.removesuffix("_loopy_kernel")


def _names_at_known_places(data: bytes) -> tuple[str, ...] | None:
    """Return the names in a key of loopy without walking the pickle; ``None`` if only a walk finds them."""
    if (place := data.find(_ENTRYPOINTS)) < 0:
        match = _KERNEL_NAME.search(data)
        known = match is not None and match[1][0] == len(match[2])
        return (match[2].decode(errors="replace"),) if match is not None and known else None
    import pickletools

    names: set[str] = set()
    slots: set[int] = set()
    with suppress(ValueError):
        for opcode, argument, _ in pickletools.genops(data[place + len(_ENTRYPOINTS) - 1 :]):
            if opcode.name == "FROZENSET":
                remembered = _remembered(data, slots)
                return tuple(sorted(names | remembered)) if len(remembered) == len(slots) else None
            if opcode.name not in _IN_SET:
                break
            if isinstance(argument, str):
                names.add(argument)
            elif isinstance(argument, int):
                slots.add(argument)
    return None


def _remembered(data: bytes, slots: set[int]) -> set[str]:
    """Return the names among the first objects of a pickle that are referenced by these numbers."""
    import pickletools

    names: set[str] = set()
    count, last = 0, None
    for opcode, argument, _ in pickletools.genops(data):
        if len(names) == len(slots) or count > _REMEMBERED:
            break
        if opcode.name == "MEMOIZE":
            if count in slots and isinstance(last, str):
                names.add(last)
            count += 1
        last = argument
    return names


def _names_in(top: object) -> Iterator[str]:
    sets: list[Thing] = []
    for thing in things(top):
        match attributes(thing):
            case {"entrypoints": Thing() as entrypoints}:
                sets.append(entrypoints)
            case {"name": str(name), "instructions": _}:
                yield name
    # A set is pickled as a frozenset, or as a call of one on a list.
    for part in things(Thing("list", list(sets))):
        if part.kind != "global":
            yield from (item for item in part.items if isinstance(item, str) and item)
