"""Optional parts of the layers of dictionaries: portability and lookups."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Entry
from cachectl.layers.base.parts import Facts, Lookups, Outlook, Portability, named_parts
from cachectl.layers.formats.pdict import packages_of
from cachectl.layers.pytools.dictionaries import UNKNOWN


class DictionaryPortability(Portability):
    """A dictionary's name bears Python and the versions of the libraries whose code its values depend on."""

    def facts(self, environment: Environment) -> Facts:
        """Return the versions of Python and of the packages that dictionaries are named by."""
        packages = ("loopy", "islpy", "cgen", "pytools", "pyopencl", "numpy")
        return {"python": environment.python, **{name: environment.installed(name) for name in packages}}

    def outlook(self, versions: Mapping[str, str], there: Facts, environment: Environment) -> Outlook | None:
        """Judge a row by the versions in its dictionary's name, as ``ls`` decides which rows are stale."""
        del there
        for name, version in sorted(versions.items()):
            here = environment.python if name == "python" else environment.installed(name)
            if here is None:
                return Outlook(None, f"{name} {version} is not installed beside cachectl")
            if version not in (here, UNKNOWN):
                return Outlook(False, f"stored with {name} {version}, here {here}")  # noqa: FBT003
        return None


class DictionaryLookups(Lookups):
    """Dictionaries are watched by the methods of pytools; the identifier says to which layer each belongs."""

    by = "pytools"
    modules = ("pytools.persistent_dict",)
    watchers: Mapping[str, Path] = dict.fromkeys(modules, Path(__file__).parents[1] / "inside" / "dictionaries.py")
    family = "pytools"
    imports: tuple[str, ...] = ("pytools",)
    opened = ("/pdict-v5-",)

    def __init__(self, owns_identifier: Callable[[str], bool]) -> None:
        super().__init__()
        self._owns = owns_identifier

    def owns(self, event: Mapping[str, Any]) -> bool:
        """Return whether the dictionary of an event is the layer's."""
        return self._owns(str(event.get("dictionary") or ""))

    def is_alike(self, entry: Entry, event: Mapping[str, Any]) -> bool:
        """Return whether an entry lies in the dictionary of the event, whatever versions its name bears."""
        named = event.get("dictionary")
        return named is None or _without_versions(entry.detail.get("dictionary")) == _without_versions(named)

    def part_of(self, event: Mapping[str, Any]) -> str | None:
        """Return the dictionary's identifier without versions."""
        return _without_versions(event["dictionary"]) if event.get("dictionary") else None

    def difference(self, alike: Sequence[Entry], event: Mapping[str, Any]) -> str:
        """Compare the versions in the identifiers of the dictionaries; the keys themselves are hashes."""
        here = packages_of(str(event.get("dictionary") or ""))
        differing = [named_parts(entry.versions, here) for entry in alike]
        named = [words for words in differing if words is not None]
        if here and len(named) == len(alike):
            return f"an entry of the same kernel is there, but it {min(named, key=len)}"
        return super().difference(alike, event)


def _without_versions(identifier: object) -> str:
    """Return an identifier without the versions that loopy and PyOpenCL append."""
    return re.sub(r"-v\d.*", "", str(identifier))
