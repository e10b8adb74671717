"""The contract every layer keeps: a uniform face, and the few things a product must say for itself.

A layer is a small class that knows one product. What users call (:meth:`Layer.get`, :meth:`Layer.put`,
:meth:`Layer.plan_clear`, :meth:`Layer.clear`, :meth:`Layer.disable`) is written once, here; an adapter
supplies what differs, and composes a store of :mod:`cachectl.layers.stores` for everything that touches a
disk.
"""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, TypeVar, final

from cachectl.layers.base.environment import Environment, user_name
from cachectl.layers.base.errors import (
    Damaged,
    EntryExists,
    ForeignForm,
    LayerError,
    Refused,
    Unreachable,
    Unsettled,
    not_a_key,
    reason_of,
)
from cachectl.layers.base.facts import (
    Ability,
    Artifact,
    Bulk,
    Census,
    ClearPlan,
    Counted,
    Entry,
    Finding,
    Foresight,
    Found,
    Hazard,
    Housekeeping,
    Note,
    Orphan,
    Outcome,
    Problem,
    Quarantined,
    Removable,
    Root,
    Scope,
    Severity,
    State,
    Switch,
    Target,
    Unverified,
)
from cachectl.layers.base.keys import key_complaint
from cachectl.layers.base.parts import Lookups, Portability, Tagging
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.host.handles import NO_ROOM, owners
from cachectl.layers.stores.foresight import closed_because, wait_until_free
from cachectl.layers.stores.quarantine import Quarantine, label

T = TypeVar("T")

_NO_QUARANTINE: Final = "the layer does not say how to move an entry aside; purge it"


class Layer(ABC):
    """One cache of the OpenCL stack, as one environment would meet it."""

    #: The version of this interface that a layer was written for; one that does not say was written for the first.
    interface: ClassVar[int] = 1
    #: What users type.
    name: ClassVar[str]
    #: One line for tables.
    title: ClassVar[str]
    #: Whose the entries are: what a package owns is read, never cleared.
    scope: ClassVar[Scope] = Scope.USER
    #: Hours of tuning rather than a cache that a rerun refills: removed only when named.
    precious: ClassVar[bool] = False
    #: Artifact forms that :meth:`put` takes; the first is what :meth:`get` gives.
    forms: ClassVar[tuple[str, ...]]
    #: What goes wrong with a root on a network file system, ``None`` where nothing does.
    on_network: ClassVar[Hazard | None] = Hazard(
        Severity.HARMLESS, "every lookup goes over the network, and locks of other machines may not hold there"
    )
    #: What goes wrong where the ranks of one job share a root, ``None`` where nothing does.
    among_ranks: ClassVar[Hazard | None] = Hazard(Severity.HARMLESS, "they may wait for each other")
    #: What goes wrong where this user cannot write to a root, or make it; ``None`` where nothing does.
    when_closed: ClassVar[Hazard | None] = Hazard(Severity.RISKS, "nothing that is new can be stored")

    #: Whether removing entries needs room on the disk first; layers that need none are cleared before.
    clearing_needs_room: ClassVar[bool] = False
    #: What an exported entry reveals about its user, in words; ``None`` if that is not known.
    reveals: ClassVar[str | None] = None

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    # ------------------------------------------------------------------ what a product says for itself

    @abstractmethod
    def roots(self) -> tuple[Root, ...]:
        """Resolve every place the library would use, whether or not it exists, the one it writes to first.

        Pure: an answer of the environment alone.
        """

    @abstractmethod
    def state(self) -> State:
        """Say whether a program started in this environment would use the cache, and why."""

    @abstractmethod
    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield what lies in a root, a thing at a time; damage is yielded as a problem, never raised.

        With ``contents=False`` entries are not looked into: no kernel names, and stale only if the name tells.
        """

    @abstractmethod
    def read(self, root: Root, key: str) -> Artifact | None:
        """Read one entry, or return ``None`` where the root has no such key."""

    @abstractmethod
    def write(self, root: Root, key: str, artifact: Artifact, *, replace: bool) -> None:
        """Verify, stage and place an entry; the form has been checked."""

    @abstractmethod
    def remove(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        """Remove what a plan lists in one root, skipping what has changed since."""

    def is_key(self, key: str) -> bool:
        """Tell by its form alone whether a text may be the key of an entry here.

        Asked before an artifact is placed: its key may be a stranger's, and becomes the name of a file. Control
        characters, which :func:`key_complaint` refuses, need no test.
        """
        del key
        return True

    def held_in(self, root: Root, keys: Sequence[str]) -> Mapping[str, tuple[Path, ...]]:
        """Map each key to the files and folders that removing or replacing its entry changes; they need not exist.

        Their owners decide whether the superuser may do it. The default is for layers whose keys are paths below the
        root; layers that keep many entries in one file override this.
        """
        return {key: (root.path / key,) for key in keys}

    def lock_files(self, root: Root, keys: Iterable[str]) -> Iterable[Path]:
        """Name the files that a change of entries locks, whether or not they exist."""
        del root, keys
        return ()

    def foresee_removal(self, root: Root, targets: tuple[Target, ...]) -> Foresight:
        """Say what :meth:`remove` would do, as far as file modes, file systems and locks show it. Touch nothing.

        The default is for layers whose keys are paths below the root, and whose entries free the bytes they have.
        Raises :class:`LayerError` where nothing in the root could be removed.
        """
        for path in self.lock_files(root, [target.key for target in targets]):
            wait_until_free(self.name, path, self.environment.patience)
        failed: list[Note] = []
        going: list[Target] = []
        known: dict[Path, str | None] = {}
        for target in targets:
            because = closed_because(root.path, target.key, known)
            if because is None:
                going.append(target)
            else:
                failed.append(Note(target.key, f"cannot be removed: {because}"))
        return Foresight(tuple(going), sum(target.bytes for target in going), failed=tuple(failed))

    def foresee_write(self, root: Root, keys: Sequence[str]) -> Mapping[str, LayerError]:
        """Return why entries of these keys could not be written, whatever is in them. Touch nothing.

        Looks at what :meth:`foresee_removal` looks at. Raises :class:`LayerError` where none could be written.
        """
        for path in self.lock_files(root, keys):
            wait_until_free(self.name, path, self.environment.patience)
        known: dict[Path, str | None] = {}
        found = ((key, closed_because(root.path, key, known)) for key in keys)
        return {
            key: Unreachable(self.name, f"cannot write: {because}", root.path / key)
            for key, because in found
            if because is not None
        }

    @abstractmethod
    def switch(self, *, on: bool) -> Switch:
        """Say how to turn the layer on or off."""

    @abstractmethod
    def relocate(self, folder: Path) -> Switch:
        """Say how to make the layer keep everything under another folder."""

    @abstractmethod
    def verify(self, root: Root) -> Iterator[Finding]:
        """Check every entry the way its library would, and yield what it could not use."""

    def examine(self, root: Root, *, deep: bool) -> Iterator[Finding | Unverified]:
        """Verify a root, and yield what was not checked; ``deep`` also runs installed tools that can check more.

        A layer overrides this where its entries hold content that :meth:`verify` cannot check.
        """
        del deep
        yield from self.verify(root)

    @final
    def told(self, root: Root, problem: Problem) -> Finding:
        """Put a problem of a root into a finding: what cannot be looked at may hold entries that fail a program."""
        if problem.code == "unreadable":
            severity, fix = Severity.FAILS, f"chmod u+rwx {shlex.quote(str(problem.path))}"
        else:
            severity, fix = Severity.HARMLESS, f"nothing, or move {shlex.quote(str(problem.path))} elsewhere"
        key = os.path.relpath(problem.path, root.path)
        return Finding(self.name, root.path, None if key == "." else key, severity, problem.code, problem.message, fix)

    @final
    def unreadable(self, root: Root, key: str, error: LayerError | OSError) -> Finding:
        """Return the finding of an entry that could not be read. It names nothing to move aside: it may be whole."""
        return self.told(root, Problem(root.path / key, "unreadable", reason_of(error)))

    def set_aside(self, root: Root, target: Target, thing: Quarantined) -> str | None:
        """Move what a plan lists into quarantine, and return ``None``, or why it was left where it is."""
        del root, target
        raise Refused(self.name, _NO_QUARANTINE, thing.root)

    def bring_back(self, root: Root, thing: Quarantined, *, replace: bool) -> None:
        """Move a thing out of quarantine into its old place; the folder it lay in goes."""
        del root, replace
        raise Refused(self.name, _NO_QUARANTINE, thing.root)

    def diagnose(self) -> Iterator[Finding]:
        """Yield what is wrong with how the layer is set up here: its variables, its surroundings. Changes nothing."""
        yield from ()

    def refusals(self) -> Mapping[Ability, str]:
        """Name what cannot be done here and now, each with the reason."""
        return {}

    def idle_gate(self, targets: Iterable[Removable]) -> Iterator[tuple[Removable, str | None]]:
        """Pair each thing to be cleared with the reason to leave it alone for now, or ``None``.

        A layer adds what no later scan could recognise once those things have gone.
        """
        for target in targets:
            yield target, None

    def claims(self, root: Root, parts: tuple[str, ...]) -> bool | None:
        """Tell by name alone whether a path below a root is this layer's, or on the way to what is.

        Asked where a root is not the layer's alone. ``None``: the layer does not say.
        """
        del root, parts
        return None

    def lacking(self) -> tuple[Root, ...]:
        """Name the roots that have gone, and without which programs that are running now fail."""
        return ()

    def recover(self, root: Root) -> None:
        """Finish, or roll back, the writes to a root that were interrupted, as the next program there would.

        Raises :class:`LayerError` for what cannot be finished.
        """
        del root

    def plan_everything(self, root: Root) -> ClearPlan | None:
        """Plan a whole root without listing its entries, where the store can; else ``None``."""
        del root
        return None

    def refresher(self) -> Switch | None:
        """Say how to make the library store without reading, in this process; ``None`` where nothing does."""
        return None

    def searched(self, root: Root, selection: Selection) -> Iterator[Found]:
        """Yield at least what a selection matches. Stores that can find a kernel without reading all override this."""
        del selection
        yield from self.scan(root, contents=True)

    def read_many(self, root: Root, keys: Sequence[str]) -> Mapping[str, Artifact | LayerError | OSError]:
        """Read several entries, each or why it cannot be; a key that the root has not is left out.

        Stores that are opened once for many entries override this.
        """
        found: dict[str, Artifact | LayerError | OSError] = {}
        for key in keys:
            artifact = _attempt(partial(self.read, root, key))
            if artifact is not None:
                found[key] = artifact
        return found

    def write_new(self, root: Root, artifacts: Sequence[Artifact]) -> list[bool | LayerError | OSError]:
        """Place several entries, none over another, as :meth:`put_new` says; their forms have been checked.

        Stores that are opened once for many entries override this.
        """
        tells = self.refusals().get(Ability.GET) is None
        return [self._write_one(root, artifact, tells=tells) for artifact in artifacts]

    def _write_one(self, root: Root, artifact: Artifact, *, tells: bool) -> bool | LayerError | OSError:
        # What cannot be read is left to the writing: it mends an interrupted write, and is in the way of damage.
        standing = _attempt(partial(self.read, root, artifact.key)) if tells else None
        if isinstance(standing, Artifact):
            return False if standing.data == artifact.data else EntryExists(self.name, root.path)
        failure = _attempt(partial(self.write, root, artifact.key, artifact, replace=False))
        return True if failure is None else failure

    def counted(self, root: Root) -> Iterator[Counted]:
        """Yield what there is to count in a root. Stores that can weigh without listing override this."""
        yield from self.scan(root, contents=False)

    def census(self, root: Root) -> Census:
        """Count a root."""
        return tally(self.counted(root))

    # ------------------------------------------------------------------ optional parts

    @property
    def portability(self) -> Portability | None:
        """What decides whether a program elsewhere can hit an entry."""
        return None

    @property
    def lookups(self) -> Lookups | None:
        """How the lookups and stores of a run are observed."""
        return None

    @property
    def tagging(self) -> Tagging | None:
        """How entries of tagged builds are recognised."""
        return None

    def elsewhere(self, environment: Environment) -> Layer:
        """Return the same layer in another environment."""
        return type(self)(environment)

    # ------------------------------------------------------------------ the face, the same for every layer

    @final
    def abilities(self) -> Mapping[Ability, str | None]:
        """Map every ability to ``None`` where the layer has it here, else to the reason it has not."""
        # A layer by others need not know of this.
        can_quarantine = type(self).set_aside is not Layer.set_aside
        refusals = {**({} if can_quarantine else {Ability.QUARANTINE: _NO_QUARANTINE}), **self.refusals()}
        return {ability: refusals.get(ability) for ability in Ability}

    @final
    def entries(self, selection: Selection = ALL) -> Iterator[Entry]:
        """Yield the selected entries of every root."""
        for root in self.roots():
            for found in self.searched(root, selection):
                if isinstance(found, Entry) and selection.matches(found):
                    yield found

    @final
    def get(self, key: str) -> Artifact | None:
        """Return the artifact of a key, or ``None`` where no root has it.

        Raises :class:`Refused` where the layer cannot, :class:`Damaged` where the entry is not whole.
        """
        self._demand(Ability.GET)
        for root in self.roots():
            artifact = self.read(root, key)
            if artifact is not None:
                return artifact
        return None

    @final
    def put(self, key: str, artifact: Artifact, *, replace: bool = False) -> None:
        """Place an artifact under a key, so that the library itself would hit it.

        Raises :class:`Refused`, :class:`ForeignForm`, :class:`Damaged`, or :class:`EntryExists` where a
        different entry has the key and ``replace`` is not set. Putting equal bytes again does nothing.
        """
        self._demand(Ability.PUT)
        self._demand_form(artifact)
        if artifact.key != key:
            # A library that looks a key up takes whatever lies there for its own.
            raise ForeignForm(self.name, f"the artifact was taken from the key {artifact.key!r}; put it there")
        self._demand_key(key)
        root = self._root_to_put()
        self._demand_own_entry(root, key)
        self.write(root, key, artifact, replace=replace)

    @final
    def get_many(self, keys: Sequence[str]) -> Mapping[str, Artifact | LayerError | OSError]:
        """Return the artifact of each key, or why it cannot be read; a key that no root has is left out.

        Raises :class:`Refused` where the layer cannot.
        """
        self._demand(Ability.GET)
        found: dict[str, Artifact | LayerError | OSError] = {}
        for root in self.roots():
            found.update(self.read_many(root, [key for key in keys if key not in found]))
        return found

    @final
    def put_new(self, artifacts: Sequence[Artifact], *, dry_run: bool = False) -> list[bool | LayerError | OSError]:
        """Place those artifacts whose keys are free, each whole or not at all, each under its own key.

        For each: ``True`` where it was placed, ``False`` where the same is there, else what :meth:`put` would have
        raised. A ``dry_run`` answers the same as far as it can be known, and touches nothing. Raises :class:`Refused`
        where the layer cannot.
        """
        self._demand(Ability.PUT)
        root = self._root_to_put()
        refused = [_attempt(partial(self._demand_fit, root, artifact)) for artifact in artifacts]
        fit = [artifact for artifact, reason in zip(artifacts, refused, strict=True) if reason is None]
        written = iter(self._foresee_new(root, fit) if dry_run else self.write_new(root, fit))
        return [next(written) if reason is None else reason for reason in refused]

    def _foresee_new(self, root: Root, artifacts: Sequence[Artifact]) -> list[bool | LayerError | OSError]:
        keys = [artifact.key for artifact in artifacts]
        standing = self.get_many(keys) if self.refusals().get(Ability.GET) is None else {}
        new = [key for key in keys if key not in standing]
        try:
            refused = self.foresee_write(root, new)
        except LayerError as error:
            refused = dict.fromkeys(new, error)
        done: list[bool | LayerError | OSError] = []
        for artifact in artifacts:
            here = standing.get(artifact.key)
            if isinstance(here, Artifact):
                done.append(False if here.data == artifact.data else EntryExists(self.name, root.path))
            else:
                done.append(here or refused.get(artifact.key) or True)
        return done

    def _demand_fit(self, root: Root, artifact: Artifact) -> None:
        self._demand_form(artifact)
        self._demand_key(artifact.key)
        # What stands under the key itself is not replaced; a file of many entries would be changed.
        self._demand_own_entry(root, artifact.key, beside=root.path / artifact.key)

    def _demand_key(self, key: str) -> None:
        if key_complaint(key) is not None or not self.is_key(key):
            raise not_a_key(self.name, key)

    def _demand_form(self, artifact: Artifact) -> None:
        if artifact.layer != self.name or artifact.form not in self.forms:
            expected = " or ".join(self.forms)
            raise ForeignForm(
                self.name, f"takes {expected}, this is {artifact.form} of layer {artifact.layer}; put it there instead"
            )

    def _root_to_put(self) -> Root:
        roots = self.roots()
        if not roots:
            raise Refused(self.name, f"cannot put: no place to keep entries in this environment ({self.state().why})")
        self._demand_own(roots[0])
        return roots[0]

    @final
    def recover_all(self, within: Callable[[Root], bool] = lambda _root: True) -> None:
        """Finish the writes that were interrupted, in those roots that are ``within`` and may be changed.

        A verb that removes entries does so first: reading alone cannot always see past such a write. What cannot be
        finished is left to the verb, which says what is wrong.
        """
        if self.abilities()[Ability.CLEAR] is not None:
            return
        for root in filter(within, self.roots()):
            with suppress(LayerError, OSError):
                self._demand_own(root)
                self.recover(root)

    @final
    def plan_clear(
        self, selection: Selection = ALL, *, within: Callable[[Root], bool] | None = None, listed: bool = False
    ) -> ClearPlan:
        """List exactly what clearing the selection would remove, in those roots that are ``within``. Touch nothing.

        With ``listed`` each entry is looked into and named, also where a store could plan a whole root at once.
        Raises :class:`Refused` where the layer must not be cleared.
        """
        self._demand(Ability.CLEAR)
        if selection.kernel is not None and (reason := self.refusals().get(Ability.KERNELS)) is not None:
            return ClearPlan(self.name, skipped=(Note("*", f"cannot be selected by kernel: {reason}"),))
        targets: list[Target] = []
        skipped: list[Note] = []
        failed: list[Note] = []
        things: list[Removable] = []
        for root in self.roots() if within is None else filter(within, self.roots()):
            try:
                self._demand_own(root)
                part = self._without_others(self._plan_root(root, selection, listed=listed))
            except (LayerError, OSError) as error:
                failed.append(Note(str(root.path), reason_of(error)))
                continue
            targets.extend(part.targets)
            skipped.extend(part.skipped)
            failed.extend(part.failed)
            things.extend(part.things)
        remake = tuple(root.path for root in self.lacking() if within is None or within(root))
        return ClearPlan(self.name, tuple(targets), tuple(skipped), tuple(failed), remake, tuple(things))

    @final
    def plan_removal(self, things: Iterable[Removable]) -> ClearPlan:
        """Plan the removal of exactly these things, as a scan gave them. Nothing is touched.

        Raises :class:`Refused` where the layer must not be cleared.
        """
        self._demand(Ability.CLEAR)
        return self._planned(things)

    @final
    def plan_spent(self, things: Iterable[Removable]) -> ClearPlan:
        """Plan the removal of what only this very process could hit, and is done with: idle or not. Nothing is touched.

        Raises :class:`Refused` where the layer must not be cleared.
        """
        self._demand(Ability.CLEAR)
        listed = self._listed(things)
        return ClearPlan(self.name, tuple(map(target_of, listed)))

    @final
    def clear(self, plan: ClearPlan) -> Outcome:
        """Remove what a plan lists, and make again what it says; what has changed since is skipped, and said."""
        self._demand(Ability.CLEAR)
        outcome = Outcome(self.name, skipped=plan.skipped, failed=plan.failed)
        for root in self.roots():
            if root.path in plan.remake:
                outcome = outcome.plus(self._remake(root))
            targets = tuple(target for target in plan.targets if target.root == root.path)
            if not targets:
                continue
            try:
                outcome = outcome.plus(self.remove(root, targets))
            except (LayerError, OSError) as error:
                outcome = outcome.plus(Outcome(self.name, failed=(Note(str(root.path), reason_of(error)),)))
        return outcome

    @final
    def foresee(self, plan: ClearPlan) -> Outcome:
        """Say what :meth:`clear` would do with a plan, as far as that can be known. Touch nothing."""
        self._demand(Ability.CLEAR)
        outcome = Outcome(self.name, skipped=plan.skipped, failed=plan.failed)
        described = {(thing.root, thing.key): thing for thing in plan.things}
        for root in self.roots():
            if root.path in plan.remake:
                outcome = outcome.plus(self._foresee_remake(root))
            targets = tuple(target for target in plan.targets if target.root == root.path)
            if not targets:
                continue
            try:
                self._demand_own(root)
                seen = self.foresee_removal(root, targets)
            except (LayerError, OSError) as error:
                outcome = outcome.plus(Outcome(self.name, failed=(Note(str(root.path), reason_of(error)),)))
                continue
            named = (described.get((target.root, target.key)) for target in seen.going)
            outcome = outcome.plus(
                Outcome(
                    self.name,
                    sum(target.entries for target in seen.going),
                    seen.bytes_freed,
                    seen.skipped,
                    seen.failed,
                    things=tuple(thing for thing in named if thing is not None),
                )
            )
        return outcome

    def _foresee_remake(self, root: Root) -> Outcome:
        try:
            self._demand_own(root)
        except (LayerError, OSError) as error:
            return Outcome(self.name, failed=(Note(str(root.path), reason_of(error)),))
        if (because := closed_because(root.path.parent, root.path.name)) is not None:
            return Outcome(self.name, failed=(Note(str(root.path), because),))
        return Outcome(self.name, remade=(root.path,))

    def _remake(self, root: Root) -> Outcome:
        try:
            self._demand_own(root)
            root.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (LayerError, OSError) as error:
            return Outcome(self.name, failed=(Note(str(root.path), reason_of(error)),))
        return Outcome(self.name, remade=(root.path,))

    @final
    def disable(self) -> Switch:
        """Say, as data, how to turn the layer off. Raises :class:`Refused` where nothing does."""
        self._demand(Ability.DISABLE)
        return self.switch(on=False)

    @final
    def enable(self) -> Switch:
        """Say, as data, how to turn the layer on."""
        self._demand(Ability.DISABLE)
        return self.switch(on=True)

    @final
    def plan_quarantine(self, findings: Iterable[Finding]) -> ClearPlan:
        """Plan to move aside what findings name, each thing once. Nothing is touched.

        Raises :class:`Refused` where the layer cannot.
        """
        self._demand(Ability.QUARANTINE)
        return self._planned(finding.thing for finding in findings if finding.thing is not None)

    @final
    def quarantine(self, plan: ClearPlan, findings: Iterable[Finding]) -> Outcome:
        """Move aside what a plan lists, labelled with what was found; what has changed since is skipped, and said."""
        self._demand(Ability.QUARANTINE)
        known = {(one.thing.root, one.thing.key): one for one in findings if one.thing is not None}
        outcome = Outcome(self.name, skipped=plan.skipped, failed=plan.failed)
        for root in self.roots():
            for target in plan.targets:
                finding = known.get((target.root, target.key))
                if target.root == root.path and finding is not None:
                    outcome = outcome.plus(self._set_one_aside(root, target, finding))
        return outcome

    def _set_one_aside(self, root: Root, target: Target, finding: Finding) -> Outcome:
        thing = label(root.path, target, finding, self.environment.clock())
        try:
            because = self.set_aside(root, target, thing)
        except Unsettled as error:
            return Outcome(self.name, 1, failed=(Note(target.key, error.message),))
        except (LayerError, OSError) as error:
            return Outcome(self.name, failed=(Note(target.key, reason_of(error)),))
        return Outcome(self.name, 1) if because is None else Outcome(self.name, skipped=(Note(target.key, because),))

    @final
    def quarantined(self) -> Iterator[Quarantined | Problem]:
        """Yield what this layer has in quarantine, root by root; what cannot be read of it is a problem."""
        for path in dict.fromkeys(root.path for root in self.roots()):
            yield from Quarantine(self.name, path).held()

    @final
    def restore(self, thing: Quarantined, *, replace: bool = False) -> None:
        """Bring a thing back from quarantine.

        Raises :class:`Refused`, or :class:`EntryExists` where another entry has taken its place and ``replace`` is
        not set.
        """
        self.bring_back(self._root_to_restore(thing), thing, replace=replace)

    @final
    def foresee_restore(self, thing: Quarantined, *, replace: bool = False) -> None:
        """Raise what :meth:`restore` would raise, as far as that can be known. Touch nothing."""
        root = self._root_to_restore(thing)
        for error in self.foresee_write(root, [thing.key]).values():
            raise error
        # The folder that it lies in goes.
        if (because := closed_because(root.path, ".")) is not None:
            raise Unreachable(self.name, f"cannot put it back: {because}", root.path)
        if not replace and (os.path.lexists(root.path / thing.key) or self._is_taken(root, thing.key)):
            raise EntryExists(self.name, root.path / thing.key)

    def _is_taken(self, root: Root, key: str) -> bool:
        """Tell whether an entry stands in a place; one that cannot be read does, too."""
        return self.refusals().get(Ability.GET) is None and _attempt(partial(self.read, root, key)) is not None

    def _root_to_restore(self, thing: Quarantined) -> Root:
        self._demand(Ability.QUARANTINE)
        root = next((root for root in self.roots() if root.path == thing.root), None)
        if root is None:
            raise Refused(self.name, "is no root of this environment", thing.root)
        self._demand_own(root)
        self._demand_own_entry(root, thing.key)
        return root

    def _demand(self, ability: Ability) -> None:
        # The one ability that is not for the product alone to refuse needs the whole table.
        reason = self.abilities()[ability] if ability is Ability.QUARANTINE else self.refusals().get(ability)
        if reason is not None:
            raise Refused(self.name, f"cannot {ability.value}: {reason}")

    def _demand_own(self, root: Root) -> None:
        """Refuse to let the superuser change what belongs to somebody else, unless that is meant.

        Files that the superuser leaves in another user's cache are files that user's programs cannot replace.
        """
        if not self.environment.superuser or self.environment.over_others:
            return
        place = next(folder for folder in (root.path, *root.path.parents) if os.path.lexists(folder))
        owner = place.stat().st_uid
        if owner != 0:
            name = user_name(owner)
            raise Refused(
                self.name,
                f"belongs to {name}, and you are the superuser; do it as {name}, or say --over-others",
                root.path,
            )

    def _demand_own_entry(self, root: Root, key: str, *, beside: Path | None = None) -> None:
        """Refuse to let the superuser change an entry that is somebody else's; ``beside`` is a path that may be."""
        if not self.environment.superuser or self.environment.over_others:
            return
        for path in self.held_in(root, [key]).get(key, ()):
            if path != beside and (others := owners(path) - {0}):
                name = user_name(min(others))
                message = f"belongs to {name}, and you are the superuser; do it as {name}, or say --over-others"
                raise Refused(self.name, message, path)

    def _without_others(self, plan: ClearPlan) -> ClearPlan:
        """Take out of the superuser's plan what is somebody else's, and say how much that is of whom."""
        if not self.environment.superuser or self.environment.over_others or not plan.targets:
            return plan
        kept: list[Target] = []
        failed: list[Note] = []
        for root in {target.root: None for target in plan.targets}:
            targets = [target for target in plan.targets if target.root == root]
            theirs: Counter[int] = Counter()
            for target, others in self._owned_by_others(root, targets):
                if others:
                    theirs[min(others)] += max(1, target.entries)
                else:
                    kept.append(target)
            if theirs:
                whose = ", ".join(f"{count} to {user_name(owner)}" for owner, count in sorted(theirs.items()))
                total = sum(max(1, target.entries) for target in targets)
                message = f"{theirs.total()} of {total} belong to others ({whose}) and stay, as you are the superuser"
                failed.append(Note(str(root), f"{message}; --over-others takes them too"))
        keys = {(target.root, target.key) for target in kept}
        things = tuple(thing for thing in plan.things if (thing.root, thing.key) in keys)
        return replace(plan, targets=tuple(kept), failed=(*plan.failed, *failed), things=things)

    def _owned_by_others(self, root: Path, targets: Sequence[Target]) -> Iterator[tuple[Target, frozenset[int]]]:
        place = next(one for one in self.roots() if one.path == root)
        held = self.held_in(place, [target.key for target in targets])
        known: dict[Path, frozenset[int]] = {}
        for target in targets:
            others: frozenset[int] = frozenset()
            for path in held.get(target.key, (root / target.key,)):
                if path not in known:
                    known[path] = owners(path) - {0}
                others |= known[path]
            yield target, others

    def _planned(self, things: Iterable[Removable]) -> ClearPlan:
        return self._without_others(self._gated(self._listed(things)))

    def _listed(self, things: Iterable[Removable]) -> tuple[Removable, ...]:
        """Return each thing once. Raises :class:`Refused` where one belongs to somebody else."""
        listed = tuple({(thing.root, thing.key): thing for thing in things}.values())
        for root in self.roots():
            if any(thing.root == root.path for thing in listed):
                self._demand_own(root)
        return listed

    @final
    def with_cure(self, error: LayerError) -> str:
        """Return an error's message; for damage, with the command that moves the damaged thing aside."""
        if not isinstance(error, Damaged) or self.abilities()[Ability.QUARANTINE] is not None:
            return error.message
        return f"{error.message}; to move it aside: cachectl verify --quarantine {self.name}"

    def _plan_root(self, root: Root, selection: Selection, *, listed: bool) -> ClearPlan:
        if selection.everything and not listed and (whole := self.plan_everything(root)) is not None:
            return whole
        chosen: list[Removable] = []
        problems: list[Problem] = []
        nameless: set[str] = set()
        guests: Counter[str] = Counter()
        for found in self.scan(root, contents=listed or selection.needs_contents):
            if isinstance(found, Entry):
                if selection.kernel is not None and found.kernels is None and found.guest is None:
                    nameless.add(found.key)
                if selection.matches(found):
                    if found.guest is None or selection.key is not None:
                        chosen.append(found)
                    else:
                        guests[found.guest] += 1
            elif isinstance(found, Orphan) and selection.matches_orphan(found):
                chosen.append(found)
            elif isinstance(found, Problem):
                problems.append(found)
        plan = self._gated(chosen)
        nameless -= {target.key for target in plan.targets}
        skipped = (*_notes_of_nameless(len(nameless), root), *plan.skipped)
        skipped += tuple(
            Note("*", f"{count} in {root.path} left, each {whose}; --key names one") for whose, count in guests.items()
        )
        # The selection cannot be decided for what a problem hides.
        failed = tuple(problem.note for problem in problems if problem.hides)
        if selection.everything:
            skipped += tuple(problem.note for problem in problems if problem.stays)
        return ClearPlan(self.name, plan.targets, skipped, failed, things=plan.things)

    def _gated(self, things: Iterable[Removable]) -> ClearPlan:
        idle: list[Removable] = []
        skipped: list[Note] = []
        for thing, reason in self.idle_gate(things):
            if reason is not None:
                skipped.append(Note(thing.key, reason))
            else:
                idle.append(thing)
        return ClearPlan(self.name, tuple(map(target_of, idle)), tuple(skipped), things=tuple(idle))


def _notes_of_nameless(count: int, root: Root) -> Iterator[Note]:
    """Say how many entries a selection by kernel has left because their kernels are unknown."""
    if count:
        have = "entry has no known kernel name and was" if count == 1 else "entries have no known kernel name and were"
        yield Note("*", f"{count} {have} left, in {root.path}")


def each_part(layer: str, parts: Iterable[tuple[str, Callable[[], Outcome]]]) -> Outcome:
    """Do the parts of a removal, each under a name for its failures, and return what all of them did.

    A part that fails keeps no other from being done, and no count of another is lost.
    """
    outcome = Outcome(layer)
    for name, act in parts:
        try:
            outcome = outcome.plus(act())
        except (LayerError, OSError) as error:  # noqa: PERF203 - one must not end the rest
            outcome = outcome.plus(Outcome(layer, failed=(Note(name, reason_of(error)),)))
    return outcome


@contextmanager
def counting(layer: str, index: Path, recount: Callable[[], None]) -> Iterator[None]:
    """Recount the entries into an index after a change, and also after a change that fails: it may have got halfway.

    Raises :class:`Unsettled` where only the recount fails.
    """
    try:
        yield
    except BaseException:
        with suppress(LayerError, OSError):
            recount()
        raise
    try:
        recount()
    except (LayerError, OSError) as error:
        advice = "make room, then " if isinstance(error, OSError) and error.errno in NO_ROOM else ""
        message = f"cannot count the entries again: {reason_of(error)}; {advice}put or purge any entry"
        raise Unsettled(layer, message, index) from error


def remove_counted(layer: str, change: AbstractContextManager[T], remove: Callable[[T], Outcome]) -> Outcome:
    """Remove entries within a change that ends with :func:`counting`; what fails then is added to what was done."""
    outcome: Outcome | None = None
    try:
        with change as given:
            outcome = remove(given)
    except (LayerError, OSError) as error:
        if outcome is None:
            raise
        where = error.path if isinstance(error, LayerError) else error.filename
        outcome = outcome.plus(Outcome(layer, failed=(Note(str(where or "*"), reason_of(error)),)))
    return outcome


def _attempt(act: Callable[[], T]) -> T | LayerError | OSError:
    """Return what something gives, or what it raises of the kind that concerns one entry alone."""
    try:
        return act()
    except (LayerError, OSError) as error:
        return error


def target_of(thing: Removable) -> Target:
    """Spell a thing that a scan has found as what a plan lists."""
    return Target(thing.root, thing.key, thing.bytes, 1 if isinstance(thing, Entry) else 0, thing.mark)


def tally(found: Iterable[Counted]) -> Census:
    """Fold a scan into numbers, holding no more than one thing at a time."""
    entries = files = total = orphan_files = orphan_bytes = stale_entries = stale_bytes = 0
    knows_stale = False
    moments: list[float] = []
    problems: list[Problem] = []
    for thing in found:
        if isinstance(thing, Problem):
            problems.append(thing)
            continue
        if isinstance(thing, Orphan):
            # What is in quarantine has not leaked.
            if not thing.kept:
                orphan_files += thing.files
                orphan_bytes += thing.bytes
            continue
        if isinstance(thing, Entry) and thing.guest is not None:
            continue
        count = _count_of(thing)
        entries += count
        files += thing.files
        total += thing.bytes
        moments = _extremes([*moments, *_moments_of(thing)])
        if thing.stale is not None:
            knows_stale = True
            stale_entries += count if thing.stale else 0
            stale_bytes += thing.bytes if thing.stale else 0
    complete = not any(problem.hides for problem in problems)
    # Where something could not be counted, a number is a lower bound, and zero says nothing.
    return Census(
        entries=entries if entries or complete else None,
        files=files if files or complete else None,
        bytes=total if total or complete else None,
        orphan_files=orphan_files if orphan_files or complete else None,
        orphan_bytes=orphan_bytes if orphan_bytes or complete else None,
        stale_entries=stale_entries if knows_stale else None,
        stale_bytes=stale_bytes if knows_stale else None,
        oldest=moments[0] if moments else None,
        newest=moments[-1] if moments else None,
        problems=tuple(problems),
    )


def uncounted(*problems: Problem) -> Census:
    """Return the numbers of a root of which nothing could be counted: all unknown."""
    return Census(entries=None, files=None, bytes=None, orphan_files=None, orphan_bytes=None, problems=problems)


def _count_of(thing: Entry | Housekeeping | Bulk) -> int:
    return thing.entries if isinstance(thing, Bulk) else int(isinstance(thing, Entry))


def _moments_of(thing: Entry | Housekeeping | Bulk) -> Iterator[float]:
    if isinstance(thing, Bulk):
        known = (thing.oldest, thing.newest)
    elif isinstance(thing, Entry):
        known = (thing.modified if thing.modified is not None else thing.written_before, None)
    else:
        # Its age is no entry's.
        known = (None, None)
    yield from (moment for moment in known if moment is not None)


def _extremes(moments: list[float]) -> list[float]:
    return [min(moments), max(moments)] if moments else []
