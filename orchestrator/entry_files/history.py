"""What happened to one file of a cache, from the kernel's events about it: lookups that read it, and stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass
class Use:
    """One reading or storing of a file, when it was seen (epoch seconds), and by which process, if that is known.

    ``redone`` says that the file was written again right after this reading: the reading program may have found it
    broken.
    """

    at: float
    stored: bool
    process: int | None = None
    redone: bool = False


@dataclass
class History:
    """The uses of one file, in order: it is stored by its creation, by writing to it, or by renaming another to it.

    ``openings`` counts its openings, those of storing programs too, by the moments at which events were read.
    ``changed`` is the first moment at which it was created or written to. ``together`` says that it was open twice at
    once: the kernel may have reported such openings as one; ``early`` that it was stored, and perhaps read, before its
    new folder was watched.
    """

    uses: list[Use] = field(default_factory=list)
    openings: Counter[int] = field(default_factory=Counter)
    changed: int | None = None
    together: bool = False
    early: bool = False
    #: How often it is open now; ``None`` if its openings began before its events.
    _open: int | None = 0
    #: The next opening is that of the program that creates the file.
    _creating: bool = False
    _writing: bool = False
    _dirty: bool = False
    _gone: bool = False
    #: The file was found when its new folder was listed; its creation may be reported again.
    _listed: bool = False

    def listed(self, at: float) -> None:
        """Record a file that was in a new folder already: its events are missing, or the last ones will come."""
        if not self.uses or self._gone:
            self._gone = False
            self._open = None
            self.uses.append(Use(at, stored=True))
            self._listed = self._writing = self.early = True

    def created(self, at: float) -> None:
        """Record its creation."""
        if not self._listed:
            self.uses.append(Use(at, stored=True))
        self._creating = self._writing = True
        self._gone = False
        self._open = None

    def arrived(self, at: float) -> None:
        """Record that another file was renamed to its name."""
        if not self._listed:
            self.uses.append(Use(at, stored=True))
        self._gone = False
        self._open = None
        self._settle()

    def opened(self, at: float) -> None:
        """Record that it was opened."""
        self.together = self.together or bool(self._open)
        self._open = (self._open or 0) + 1
        if self._creating:
            self._creating = False
        else:
            self.uses.append(Use(at, stored=False))
            self._dirty = False

    def modified(self) -> None:
        """Record that it was written to, or cut."""
        self._dirty = True

    def closed(self) -> None:
        """Record that it was closed."""
        self.together = self.together or self._open == 0
        self._open = max(0, (self._open or 0) - 1)

    def written(self) -> None:
        """Record that a program which could write to it has closed it."""
        self.early = self.early and not self._listed
        if self._listed and self._dirty and not self.uses[-1].stored:
            # It was opened by the program that made it.
            self.uses.pop()
        elif not self._writing and self._dirty and self.uses and not self.uses[-1].stored:
            self.uses[-1].stored = True
            if self.uses[-2:-1] and not self.uses[-2].stored:
                self.uses[-2].redone = True
        self._settle()

    def gone(self) -> None:
        """Record that its name is gone."""
        self._settle()
        self._gone = True

    def _settle(self) -> None:
        self._creating = self._writing = self._dirty = self._listed = False


def counted(uses: Sequence[Use]) -> tuple[list[Use], list[Use]]:
    """Return the readings that were hits, and the stores. Who stores a file right after reading it found it broken."""
    hits, stores = [], []
    for use, following in zip_longest(uses, uses[1:]):
        if use.stored:
            stores.append(use)
        elif not (use.redone and following is not None and following.process == use.process):
            hits.append(use)
    return hits, stores
