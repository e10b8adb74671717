"""Optional parts of a layer: what a product has beyond entries and a switch, each an object with one purpose.

A layer that lacks a part has ``None`` in its place. Verbs then do without: a forecast says that it is unknown, a trace
compares entries before and after the run, and a started driver cannot be salted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from cachectl.layers.base.environment import Environment

#: What a place or an entry says of itself, by name. ``None`` is unknown, and equals nothing.
Facts = Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Outlook:
    """Whether a program here can hit an entry: yes, no, or ``None`` for unknown; ``because`` is the reason."""

    hits: bool | None
    because: str = ""

    @property
    def words(self) -> str:
        """Return it as text."""
        if self.hits:
            return "will hit"
        return f"not known: {self.because}" if self.hits is None else f"cannot hit: {self.because}"


#: The outlook of an entry whose layer does not say what its key depends on.
UNFORESEEN: Final = Outlook(None, "what decides about this layer cannot be read without its driver")


class Portability(ABC):
    """What decides whether a program elsewhere computes the key of an entry.

    Facts are compared by name between the place where a bundle was made and the place where it is imported.
    """

    #: Facts on which every key depends, each with the reason. If one differs, no entry can be hit.
    deciding: ClassVar[Mapping[str, str]] = {}
    #: Facts without which nothing can be foreseen, even if neither place knows them.
    needed: ClassVar[tuple[str, ...]] = ()
    #: Facts that are shown to readers and decide nothing.
    informing: ClassVar[tuple[str, ...]] = ()
    #: Whether a listing without contents has the device and versions of each entry.
    named: ClassVar[bool] = False

    @abstractmethod
    def facts(self, environment: Environment) -> Facts:
        """Describe an environment. Import no library and start no driver; raise nothing."""

    def entry_facts(self, versions: Mapping[str, str], detail: Mapping[str, str]) -> Mapping[str, str]:
        """Return what an entry adds to the description of the place where it was made."""
        del detail
        return versions

    def outlook(self, versions: Mapping[str, str], there: Facts, environment: Environment) -> Outlook | None:
        """Judge an entry by its own versions; return ``None`` if the facts of the two places decide."""
        del versions, there, environment
        return None
