"""The class of all layers: the declaration of one cache, and the methods that users call.

An adapter declares the properties of its library. A store (:mod:`cachectl.layers.base.store`) does all work on the
disk.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, final

from cachectl.layers.base import declarations, errors, facts
from cachectl.layers.base.environment import Environment, own_roots_folder
from cachectl.layers.base.facts import Ability, Entry, Note, Orphan, Outcome, Plan, Problem, Removable, Root
from cachectl.layers.base.parts import About
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.base.store import Store, attempt
from cachectl.layers.disk import trust

_NO_SWITCH: Final = "nothing turns this cache off"
_TUNING: Final = "results of tuning are never removed as damaged"


class Layer:
    """One cache of the OpenCL stack in one environment.

    A plain layer sets ``name``, ``title``, ``places``, ``switch`` and ``store``. A layer whose library has special
    rules overrides the methods that are not final. The verbs call all of them.
    """

    #: The name that users type.
    name: ClassVar[str]
    #: One line for tables.
    title: ClassVar[str]
    #: The places of the library's entries.
    places: ClassVar[declarations.Places]
    #: The switch of the cache; ``None`` if it has none.
    switch: ClassVar[declarations.EnvSwitch | None] = None
    #: The store. The class declares it; an instance has it bound to its name and environment.
    store: Store
    #: What else is known of the library and its entries.
    about: ClassVar[About] = About()

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

    def state(self) -> facts.State:
        """Return whether a program started in this environment would use the cache, and why."""
        if self.switch is None:
            return facts.State(facts.Condition.ENABLED, "has no switch")
        return self.switch.state(self.environment)

    def switched(self, *, on: bool) -> facts.Switch:
        """Return how to turn the layer on or off. Called only if :meth:`refusals` does not forbid it."""
        if self.switch is None:
            raise errors.Refused(self.name, _NO_SWITCH)
        return self.switch.change(self.name, on=on)

    def relocate(self, folder: Path) -> facts.Switch:
        """Return how to make the layer keep everything under another folder."""
        read = declarations.at_once() if self.switch is None else self.switch.read
        return read.applied(self.name, self.places.moved(self.name, folder))

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the layer's variables and surroundings. Changes nothing."""
        yield from ()

    def refusals(self) -> Mapping[Ability, str]:
        """Return the abilities that the layer lacks here and now, each with the reason."""
        own_switch = type(self).switched is not Layer.switched
        without = {} if self.switch is not None or own_switch else {Ability.DISABLE: _NO_SWITCH}
        return {**without, **self.store.refusals()}

    def place_of_file(self, file: Path) -> Path | None:
        """Return where in the first root a file of the library belongs that lies elsewhere; ``None`` for other files.

        The keys of its entries begin with that relative path.
        """
        del file
        return None

    @final
    def abilities(self) -> Mapping[Ability, str | None]:
        """Map every ability to ``None`` if the layer has it here, else to the reason why it has not.

        A layer that cannot answer, as some of other people may, has none.
        """
        try:
            refusals = dict(self.refusals())
            if Ability.DISABLE not in refusals:
                self.switched(on=False)
                self.switched(on=True)
            if Ability.RELOCATE not in refusals:
                self.relocate(self.environment.temporary)
        except errors.FAILURES as error:
            return dict.fromkeys(Ability, f"the layer failed: {errors.reason_of(error)}")
        return {ability: refusals.get(ability) for ability in Ability}

    @final
    def entries(self, selection: Selection = ALL) -> Iterator[Entry]:
        """Yield the selected entries of every root."""
        for root in self.roots():
            for found in self.store.scan(root, selection):
                if isinstance(found, Entry) and selection.matches(found):
                    yield found

    @final
    def get(self, key: str) -> facts.Artifact | None:
        """Return the artifact of a key, or ``None`` if no root has it.

        Raises :class:`Refused` if the layer cannot, :class:`Damaged` if the entry is not whole.
        """
        with self._named():
            found = self.get_many([key]).get(key)
            if isinstance(found, Exception):
                raise found
            return found

    @final
    def get_many(self, keys: Sequence[str]) -> Mapping[str, facts.Artifact | Exception]:
        """Return the artifact of each key, or the reading error; a key that no root has is left out.

        Raises :class:`Refused` if the layer cannot.
        """
        self._require(Ability.GET)
        found: dict[str, facts.Artifact | Exception] = {}
        for root in self.roots():
            found.update(self.store.read(root, [key for key in keys if key not in found]))
        return found

    @final
    def put(self, key: str, artifact: facts.Artifact, *, replace: bool = False) -> None:
        """Place an artifact under a key, so that the library itself would hit it.

        Raises :class:`Refused`, :class:`ForeignForm`, :class:`Damaged`, or :class:`EntryExists` if a different entry
        has the key and ``replace`` is not set. Putting equal bytes again does nothing.
        """
        with self._named():
            root = self._root_to_put()
            if artifact.key != key:
                # A library accepts any file with the name of a key as the entry.
                raise errors.ForeignForm(
                    self.name, f"the artifact was taken from the key {artifact.key!r}; put it there"
                )
            (result,) = self._write(root, [artifact], replace=replace)
            if isinstance(result, Exception):
                raise result

    @final
    def put_new(self, artifacts: Sequence[facts.Artifact]) -> list[bool | Exception]:
        """Place the artifacts whose keys are free, each whole or not at all, under its own key.

        Returns for each: ``True`` if it was placed, ``False`` if the same entry is present, else the error that
        :meth:`put` would raise. Raises :class:`Refused` if the layer cannot.
        """
        return self._write(self._root_to_put(), artifacts, replace=False)

    def _write(self, root: Root, artifacts: Sequence[facts.Artifact], *, replace: bool) -> list[bool | Exception]:
        placed: list[bool | Exception | None] = [
            attempt(partial(self._require_fit, root, artifact)) for artifact in artifacts
        ]
        while waiting := [index for index, result in enumerate(placed) if result is None]:
            # Of artifacts with one key, the first is placed before the others are compared with it.
            first = {artifacts[index].key: index for index in reversed(waiting)}
            batch = [artifacts[index] for index in sorted(first.values())]
            written = self.store.write(root, batch, replace=replace)
            for key, index in first.items():
                placed[index] = written[key]
        return [result for result in placed if result is not None]

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the layer, which may be of other people, in an error that no layer should raise."""
        try:
            yield
        except (errors.LayerError, OSError):
            raise
        except errors.FAILURES as error:
            raise errors.LayerError(self.name, f"the layer failed: {errors.reason_of(error)}") from error

    def _root_to_put(self) -> Root:
        self._require(Ability.PUT)
        root = next(iter(self.roots()), None)
        if root is None:
            raise errors.Refused(
                self.name, f"cannot put: no place to keep entries in this environment ({self.state().why})"
            )
        require_changeable(self, root)
        return root

    def _require_fit(self, root: Root, artifact: facts.Artifact) -> None:
        if artifact.layer != self.name or artifact.form not in self.store.forms:
            message = f"takes {' or '.join(self.store.forms)}, this is {artifact.form} of layer {artifact.layer}"
            raise errors.ForeignForm(self.name, f"{message}; put it there instead")
        if errors.key_complaint(artifact.key) is not None or not self.store.is_key(artifact.key):
            raise errors.not_a_key(self.name, artifact.key)
        if owner := self._other_owner(root.path, artifact.key):
            raise errors.Refused(self.name, trust.belonging_to(owner), root.path / artifact.key)

    @final
    def plan_clear(self, selection: Selection = ALL, *, damaged: bool = False) -> Plan:
        """List exactly the entries that clearing the selection would remove. Changes nothing.

        With ``damaged`` only those that :meth:`Store.verify` finds damaged. Raises :class:`Refused` if the layer must
        not be cleared.
        """
        self._require(Ability.CLEAR)
        plan = Plan(self.name)
        if selection.kernel is not None and (reason := self.refusals().get(Ability.KERNELS)) is not None:
            return replace(plan, skipped=(Note("*", f"cannot be selected by kernel: {reason}"),))
        plan_root = self._plan_damaged if damaged else self._plan_root
        for root in every_root(self):
            try:
                plan = plan.plus(plan_root(root, selection))
            except errors.FAILURES as error:  # noqa: PERF203 - one must not end the rest
                plan = plan.plus(Plan(self.name, failed=(Note(str(root.path), errors.reason_of(error)),)))
        return plan

    @final
    def plan_removal(self, things: Iterable[Removable], *, in_use: bool = False) -> Plan:
        """Plan the removal of exactly these things, as a scan yielded them. Changes nothing.

        With ``in_use`` those go too that a program may be using: entries that only this process could hit. Raises
        :class:`Refused` if the layer must not be cleared.
        """
        self._require(Ability.CLEAR)
        unique = {(thing.root, thing.key): thing for thing in things}.values()
        changed = {thing.root for thing in unique}
        for root in every_root(self):
            if root.path in changed:
                require_changeable(self, root)
        return self._planned([(thing, None) for thing in unique] if in_use else self.store.in_use(unique))

    @final
    def clear(self, plan: Plan) -> Outcome:
        """Remove the entries of a plan. Entries that have changed since are skipped."""
        self._require(Ability.CLEAR)
        outcome = Outcome(self.name, skipped=plan.skipped, failed=plan.failed)
        # Listed first: a folder of roots that cannot be listed must not hide what was removed.
        for root in tuple(every_root(self)):
            entries = tuple(entry for entry in plan.entries if entry.root == root.path)
            try:
                if entries:
                    require_changeable(self, root)
                    removed = self.store.remove(root, entries)
                    left = {note.key for note in removed.skipped}
                    orphans = [entry.key for entry in entries if isinstance(entry, Orphan) and entry.key not in left]
                    gone = sum(not os.path.lexists(root.path / key) for key in orphans)
                    outcome = outcome.plus(replace(removed, orphans_removed=gone))
            except errors.FAILURES as error:
                outcome = outcome.plus(Outcome(self.name, failed=(Note(str(root.path), errors.reason_of(error)),)))
        return outcome

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
        if (reason := self.refusals().get(ability)) is not None:
            raise errors.Refused(self.name, f"cannot {ability.value}: {reason}")

    def _other_owner(self, root: Path, key: str) -> int | None:
        """Return the user whose entry the superuser must leave alone; nothing for any other entry and user."""
        return trust.owner_of(root, self.store.file_of(root, key)) if self.environment.superuser else None

    def _plan_damaged(self, root: Root, selection: Selection) -> Plan:
        findings = list(self.store.verify(root))
        damaged = [(finding, finding.thing) for finding in findings if finding.thing is not None]
        if self.about.precious:
            notes = tuple(Note(finding.key or "*", f"{_TUNING}; {finding.message}") for finding, _ in damaged)
            return Plan(self.name, skipped=notes)
        plan = self.plan_removal(thing for _, thing in damaged if selection.matches(thing))
        # Whether these are damaged is unknown.
        unread = (finding for finding in findings if finding.code == "unreadable")
        return replace(plan, failed=tuple(Note(finding.key or str(root.path), finding.message) for finding in unread))

    def _plan_root(self, root: Root, selection: Selection) -> Plan:
        chosen: list[Removable] = []
        problems: list[Problem] = []
        nameless: set[str] = set()
        guests: Counter[str] = Counter()
        for found in self.store.scan(root, contents=selection.needs_contents):
            if isinstance(found, Problem):
                problems.append(found)
            elif isinstance(found, facts.Housekeeping):
                continue
            elif selection.matches(found):
                if isinstance(found, Orphan) or found.guest is None or selection.key is not None:
                    chosen.append(found)
                else:
                    guests[found.guest] += 1
            elif isinstance(found, Entry) and selection.kernel and found.kernels is None and found.guest is None:
                nameless.add(found.key)
        asked = list(self.store.in_use(chosen))
        if any(reason is None for _, reason in asked):
            require_changeable(self, root)
        plan = self._planned(asked)
        nameless -= {entry.key for entry in plan.entries}
        left = []
        if nameless:
            have, were = ("entry has", "was") if len(nameless) == 1 else ("entries have", "were")
            left.append(f"{len(nameless)} {have} no known kernel name and {were} left, in {root.path}")
        left += [f"{count} in {root.path} left, each {whose}; --key names one" for whose, count in guests.items()]
        skipped = [*plan.skipped, *(Note("*", words) for words in left)]
        if selection.everything:
            skipped += [problem.note for problem in problems if problem.stays]
        # Entries hidden by such a problem may match the selection.
        failed = tuple(problem.note for problem in problems if problem.hides)
        return replace(plan, skipped=tuple(skipped), failed=failed)

    def _planned(self, asked: Iterable[tuple[Removable, str | None]]) -> Plan:
        """Plan the things without a reason to stay; a superuser's plan leaves those of other users."""
        things: list[Removable] = []
        skipped: list[Note] = []
        for thing, reason in asked:
            why = reason
            if why is None and (owner := self._other_owner(thing.root, thing.key)):
                why = trust.belonging_to(owner)
            if why is None:
                things.append(thing)
            else:
                skipped.append(Note(thing.key, why))
        return Plan(self.name, tuple(things), tuple(skipped))


def require_changeable(layer: Layer, root: Root) -> None:
    """Raise :class:`Refused` for a root that another user owns, or can write to and is not trusted to."""
    environment = layer.environment
    reason = trust.closed_to_changes(root.path, superuser=environment.superuser, shared=environment.trusts_writers)
    if reason is not None:
        raise errors.Refused(layer.name, reason, root.path)


def every_root(layer: Layer) -> Iterator[Root]:
    """Yield the roots of a layer, and those that it has in the own roots of ``cachectl run --base``."""
    yield from layer.roots()
    folder = own_roots_folder(layer.environment)
    # In an isolated root it is a link to that of the user.
    if not folder.is_dir() or folder.parent.is_symlink() or Ability.RELOCATE in layer.refusals():
        return
    for own in sorted(path for path in (*folder.glob("*"), *folder.glob("*/cachectl-*")) if not path.is_symlink()):
        moved = type(layer)(layer.environment.with_variables(layer.relocate(own).set))
        for root in moved.roots():
            if own in root.path.parents and root.exists:
                yield replace(root, source=f"own root of a base ({own})")
