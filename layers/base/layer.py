"""The class of all layers: the declaration of one cache, and the methods that users call.

An adapter declares the properties of its library. A store (:mod:`cachectl.layers.base.store`) does all work on the
disk.
"""

from __future__ import annotations

import os
from abc import ABC
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, final

from cachectl.layers.base import facts
from cachectl.layers.base.declarations import EnvSwitch, Places, at_once
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import ForeignForm, LayerError, Refused, not_a_key, reason_of
from cachectl.layers.base.facts import (
    Ability,
    Condition,
    Entry,
    Found,
    Hazard,
    Orphan,
    Problem,
    Removable,
    Root,
    Scope,
    Severity,
    State,
    Usage,
)
from cachectl.layers.base.limits import key_complaint
from cachectl.layers.base.parts import Lookups, Portability, Tagging
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.base.store import Store, attempt, sum_usage
from cachectl.layers.disk.presence import status_at
from cachectl.layers.disk.trust import belonging_to, closed_to_changes, owner_of

_NO_SWITCH: Final = "nothing turns this cache off"
_TUNING: Final = "results of tuning are never removed as damaged"


class Declaration(ABC):
    """The properties of a layer's library.

    A plain layer sets ``name``, ``title``, ``places``, ``switch`` and ``store``. A layer whose library has special
    rules overrides methods. :mod:`cachectl.layers.base.registry` guards exactly the public members of this class.
    """

    #: The version of this interface that a layer was written for.
    interface: ClassVar[int] = 1
    #: The name that users type.
    name: ClassVar[str]
    #: One line for tables.
    title: ClassVar[str]
    #: The places of the library's entries.
    places: ClassVar[Places]
    #: The switch of the cache; ``None`` if it has none.
    switch: ClassVar[EnvSwitch | None] = None
    #: The store. The class declares it; an instance has it bound to its name and environment.
    store: Store
    #: The owner of the entries. Entries of a package are read, never changed.
    scope: ClassVar[Scope] = Scope.USER
    #: Whether this holds tuning results that no rerun refills: it is cleared only when named.
    precious: ClassVar[bool] = False
    #: The problem with a root on a network file system, ``None`` if there is none.
    on_network: ClassVar[Hazard | None] = Hazard(
        Severity.HARMLESS, "every lookup goes over the network, and locks of other machines may not hold there"
    )
    #: The problem with a root that the ranks of one job share, ``None`` if there is none.
    among_ranks: ClassVar[Hazard | None] = Hazard(Severity.HARMLESS, "they may wait for each other")
    #: The problem with a root that this user cannot write to or make, ``None`` if there is none.
    when_closed: ClassVar[Hazard | None] = Hazard(Severity.RISKS, "nothing that is new can be stored")
    #: Distributions whose versions belong to a measurement of the cache.
    distributions: ClassVar[tuple[str, ...]] = ()
    #: What a pushed entry reveals about its user, in words; ``None`` if that is not known.
    reveals: ClassVar[str | None] = None

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.store = type(self).store.bound(self.name, environment)

    def __repr__(self) -> str:
        return f"<layer {self.name}>"

    def roots(self) -> tuple[Root, ...]:
        """Return every place the library would use, existing or not; the one it writes to comes first.

        A pure function of the environment.
        """
        return self.places.roots(self.environment)

    def state(self) -> State:
        """Return whether a program started in this environment would use the cache, and why."""
        return State(Condition.ENABLED, "has no switch") if self.switch is None else self.switch.state(self.environment)

    def switched(self, *, on: bool) -> facts.Switch:
        """Return how to turn the layer on or off. Called only if :meth:`refusals` does not forbid it."""
        if self.switch is None:
            raise Refused(self.name, _NO_SWITCH)
        return self.switch.change(self.name, on=on)

    def relocate(self, folder: Path) -> facts.Switch:
        """Return how to make the layer keep everything under another folder."""
        read = at_once() if self.switch is None else self.switch.read
        return read.applied(self.name, self.places.moved(self.name, folder))

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the layer's variables and surroundings. Changes nothing."""
        yield from ()

    def refusals(self) -> Mapping[Ability, str]:
        """Return the abilities that the layer lacks here and now, each with the reason."""
        without = {} if self.switch is not None or _overrides(self, "switched") else {Ability.DISABLE: _NO_SWITCH}
        return {**without, **self.store.refusals()}

    def required_roots(self) -> tuple[Root, ...]:
        """Return the missing roots without which programs that are running now fail."""
        return ()

    def place_of_file(self, file: Path) -> Path | None:
        """Return where in the first root a file of the library belongs that lies elsewhere; ``None`` for other files.

        The keys of its entries begin with that relative path.
        """
        del file
        return None

    @property
    def portability(self) -> Portability | None:
        """The facts that decide whether a program elsewhere can hit an entry."""
        return None

    @property
    def lookups(self) -> Lookups | None:
        """How the lookups and stores of a run are observed."""
        return None

    @property
    def tagging(self) -> Tagging | None:
        """How entries of tagged builds are recognised."""
        return None


class Layer(Declaration):
    """One cache of the OpenCL stack in one environment.

    Layers subclass this class. The verbs call its methods, and no layer overrides them: they use the declaration and
    the store.
    """

    @final
    def abilities(self) -> Mapping[Ability, str | None]:
        """Map every ability to ``None`` if the layer has it here, else to the reason why it has not."""
        refusals = self.refusals()
        return {ability: refusals.get(ability) for ability in Ability}

    @final
    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield each thing in a root; see :meth:`Store.scan`."""
        return self.store.scan(root, contents=contents)

    @final
    def usage(self, root: Root) -> Usage:
        """Count a root. The store of a missing one is not asked, and so not loaded."""
        missing = False
        with suppress(OSError):
            missing = status_at(root.path) is None
        return sum_usage(() if missing else self.store.iter_usage(root))

    @final
    def verify(self, root: Root) -> Iterator[facts.Finding]:
        """Check every entry of a root as its library would, and yield those it could not use."""
        return self.store.verify(root)

    @final
    def entries(self, selection: Selection = ALL) -> Iterator[Entry]:
        """Yield the selected entries of every root."""
        for root in self.roots():
            for found in self.store.find(root, selection):
                if isinstance(found, Entry) and selection.matches(found):
                    yield found

    @final
    def get(self, key: str) -> facts.Artifact | None:
        """Return the artifact of a key, or ``None`` if no root has it.

        Raises :class:`Refused` if the layer cannot, :class:`Damaged` if the entry is not whole.
        """
        self._require(Ability.GET)
        return next(filter(None, (self.store.read(root, key) for root in self.roots())), None)

    @final
    def put(self, key: str, artifact: facts.Artifact, *, replace: bool = False) -> None:
        """Place an artifact under a key, so that the library itself would hit it.

        Raises :class:`Refused`, :class:`ForeignForm`, :class:`Damaged`, or :class:`EntryExists` if a
        different entry has the key and ``replace`` is not set. Putting equal bytes again does nothing.
        """
        self._require(Ability.PUT)
        if artifact.key != key:
            # A library accepts any file with the name of a key as the entry.
            raise ForeignForm(self.name, f"the artifact was taken from the key {artifact.key!r}; put it there")
        root = self._root_to_put()
        self._require_fit(artifact, root)
        self.store.write(root, key, artifact, replace=replace)

    @final
    def get_many(self, keys: Sequence[str]) -> Mapping[str, facts.Artifact | LayerError | OSError]:
        """Return the artifact of each key, or the reading error; a key that no root has is left out.

        Raises :class:`Refused` if the layer cannot.
        """
        self._require(Ability.GET)
        found: dict[str, facts.Artifact | LayerError | OSError] = {}
        for root in self.roots():
            found.update(self.store.read_many(root, [key for key in keys if key not in found]))
        return found

    @final
    def put_new(self, artifacts: Sequence[facts.Artifact]) -> list[bool | LayerError | OSError]:
        """Place the artifacts whose keys are free, each whole or not at all, each under its own key.

        Returns for each: ``True`` if it was placed, ``False`` if the same entry is present, else the error that
        :meth:`put` would raise. Raises :class:`Refused` if the layer cannot.
        """
        self._require(Ability.PUT)
        root = self._root_to_put()
        refused = [attempt(partial(self._require_fit, artifact, root)) for artifact in artifacts]
        fit = [artifact for artifact, reason in zip(artifacts, refused, strict=True) if reason is None]
        written = iter(self.store.write_new(root, fit))
        return [next(written) if reason is None else reason for reason in refused]

    def _require_fit(self, artifact: facts.Artifact, root: Root) -> None:
        if artifact.layer != self.name or artifact.form not in self.store.forms:
            expected = " or ".join(self.store.forms)
            raise ForeignForm(
                self.name, f"takes {expected}, this is {artifact.form} of layer {artifact.layer}; put it there instead"
            )
        if key_complaint(artifact.key) is not None or not self.store.is_key(artifact.key):
            raise not_a_key(self.name, artifact.key)
        if (owner := self._other_owner(root.path, artifact.key)) is not None:
            raise Refused(self.name, belonging_to(owner), root.path / artifact.key)

    def _root_to_put(self) -> Root:
        roots = self.roots()
        if not roots:
            raise Refused(self.name, f"cannot put: no place to keep entries in this environment ({self.state().why})")
        self._require_changeable(roots[0])
        return roots[0]

    @final
    def recover_all(self) -> None:
        """Finish interrupted writes in the roots that may be changed.

        Verbs that remove entries call this first, because such a write can hide entries from a read-only scan. The
        verb itself reports a write that cannot be finished.
        """
        if self.abilities()[Ability.CLEAR] is not None:
            return
        for root in self.roots():
            with suppress(LayerError, OSError):
                self._require_changeable(root)
                self.store.recover(root)

    @final
    def plan_clear(self, selection: Selection = ALL, *, damaged: bool = False) -> facts.Plan:
        """List exactly the entries that clearing the selection would remove. Changes nothing.

        With ``damaged`` only those that :meth:`verify` finds damaged. Raises :class:`Refused` if the layer must not be
        cleared.
        """
        self._require(Ability.CLEAR)
        if selection.kernel is not None and (reason := self.refusals().get(Ability.KERNELS)) is not None:
            return facts.Plan(self.name, skipped=(facts.Note("*", f"cannot be selected by kernel: {reason}"),))
        plan = facts.Plan(self.name)
        for root in self.roots():
            try:
                part = self._plan_damaged(root, selection) if damaged else self._plan_root(root, selection)
            except (LayerError, OSError) as error:
                part = facts.Plan(self.name, failed=(facts.Note(str(root.path), reason_of(error)),))
            plan = plan.plus(part)
        return replace(plan, recreate=tuple(root.path for root in self.required_roots()))

    @final
    def plan_removal(self, things: Iterable[Removable], *, in_use: bool = False) -> facts.Plan:
        """Plan the removal of exactly these things, as a scan yielded them. Changes nothing.

        With ``in_use`` those go too that a program may be using: entries that only this process could hit. Raises
        :class:`Refused` if the layer must not be cleared.
        """
        self._require(Ability.CLEAR)
        unique = tuple({(thing.root, thing.key): thing for thing in things}.values())
        for root in self.roots():
            if any(thing.root == root.path for thing in unique):
                self._require_changeable(root)
        return self._without_others(facts.Plan(self.name, unique) if in_use else self._idle(unique))

    @final
    def clear(self, plan: facts.Plan) -> facts.Outcome:
        """Remove the entries of a plan and recreate its folders. Entries that have changed since are skipped."""
        self._require(Ability.CLEAR)
        outcome = facts.Outcome(self.name, skipped=plan.skipped, failed=plan.failed)
        for root in self.roots():
            entries = tuple(entry for entry in plan.entries if entry.root == root.path)
            if entries or root.path in plan.recreate:
                try:
                    self._require_changeable(root)
                    if root.path in plan.recreate:
                        root.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                        outcome = outcome.plus(facts.Outcome(self.name, recreated=(root.path,)))
                    if entries:
                        outcome = outcome.plus(self._remove(root, entries))
                except (LayerError, OSError) as error:
                    failed = (facts.Note(str(root.path), reason_of(error)),)
                    outcome = outcome.plus(facts.Outcome(self.name, failed=failed))
        return outcome

    def _remove(self, root: Root, entries: tuple[Removable, ...]) -> facts.Outcome:
        orphans = [
            entry.key for entry in entries if isinstance(entry, Orphan) and os.path.lexists(root.path / entry.key)
        ]
        outcome = self.store.remove(root, entries)
        left = {note.key for note in outcome.skipped}
        gone = sum(key not in left and not os.path.lexists(root.path / key) for key in orphans)
        return replace(outcome, orphans_removed=gone)

    @final
    def disable(self) -> facts.Switch:
        """Return how to turn the layer off; changes nothing. Raises :class:`Refused` if that is impossible."""
        self._require(Ability.DISABLE)
        return self.switched(on=False)

    @final
    def enable(self) -> facts.Switch:
        """Return how to turn the layer on; changes nothing. Raises :class:`Refused` if that is impossible."""
        self._require(Ability.DISABLE)
        return self.switched(on=True)

    def _require(self, ability: Ability) -> None:
        reason = self.refusals().get(ability)
        if reason is not None:
            raise Refused(self.name, f"cannot {ability.value}: {reason}")

    def _require_changeable(self, root: Root) -> None:
        """Raise :class:`Refused` for a root that another user owns, or can write to and is not trusted to."""
        environment = self.environment
        reason = closed_to_changes(root.path, superuser=environment.superuser, shared=environment.trusts_writers)
        if reason is not None:
            raise Refused(self.name, reason, root.path)

    def _other_owner(self, root: Path, key: str) -> int | None:
        """Return the user whose entry the superuser must leave alone; ``None`` for any other entry and user."""
        return (owner_of(root, self.store.file_of(root, key)) or None) if self.environment.superuser else None

    def _without_others(self, plan: facts.Plan) -> facts.Plan:
        """Leave entries of other users out of the superuser's plan."""
        if not self.environment.superuser:
            return plan
        if not self.environment.superuser:
            return plan
        pairs = [(entry, self._other_owner(entry.root, entry.key)) for entry in plan.entries]
        skipped = tuple(facts.Note(entry.key, belonging_to(owner)) for entry, owner in pairs if owner)
        own = tuple(entry for entry, owner in pairs if not owner)
        return replace(plan, entries=own, skipped=(*plan.skipped, *skipped))

    def _plan_damaged(self, root: Root, selection: Selection) -> facts.Plan:
        damaged = [(finding, finding.thing) for finding in self.store.verify(root) if finding.thing is not None]
        if self.precious:
            notes = tuple(facts.Note(finding.key or "*", f"{_TUNING}; {finding.message}") for finding, _ in damaged)
            return facts.Plan(self.name, skipped=notes)
        return self.plan_removal(thing for _, thing in damaged if selection.selects(thing))

    def _plan_root(self, root: Root, selection: Selection) -> facts.Plan:
        chosen: list[Removable] = []
        problems: list[Problem] = []
        nameless: set[str] = set()
        skipped: list[facts.Note] = []
        guests: Counter[str] = Counter()
        for found in self.store.scan(root, contents=selection.needs_contents):
            if isinstance(found, Problem):
                problems.append(found)
            elif isinstance(found, (Entry, Orphan)) and selection.selects(found):
                if isinstance(found, Orphan) or found.guest is None or selection.key is not None:
                    chosen.append(found)
                else:
                    guests[found.guest] += 1
            elif isinstance(found, Entry) and selection.kernel is not None and found.kernels is None:
                nameless |= {found.key} if found.guest is None else set()
        plan = self._idle(chosen)
        if plan.entries:
            self._require_changeable(root)
        plan = self._without_others(plan)
        nameless -= {entry.key for entry in plan.entries}
        if nameless:
            have, were = ("entry has", "was") if len(nameless) == 1 else ("entries have", "were")
            left = f"{len(nameless)} {have} no known kernel name and {were} left, in {root.path}"
            skipped.append(facts.Note("*", left))
        skipped += plan.skipped
        for whose, count in guests.items():
            skipped.append(facts.Note("*", f"{count} in {root.path} left, each {whose}; --key names one"))
        if selection.everything:
            skipped += [facts.note_of(problem) for problem in problems if problem.stays]
        # Entries hidden by such a problem may match the selection.
        failed = tuple(facts.note_of(problem) for problem in problems if problem.hides)
        return replace(plan, skipped=tuple(skipped), failed=failed)

    def _idle(self, things: Iterable[Removable]) -> facts.Plan:
        """Plan the things that no program is using, and note the others."""
        asked = list(self.store.in_use(things))
        skipped = tuple(facts.Note(thing.key, reason) for thing, reason in asked if reason is not None)
        return facts.Plan(self.name, tuple(thing for thing, reason in asked if reason is None), skipped)


def _overrides(declaration: Declaration, method: str) -> bool:
    return getattr(type(declaration), method) is not getattr(Declaration, method)
