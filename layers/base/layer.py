"""The class of all layers: the declaration of one cache, and the methods that users call.

An adapter declares the properties of its library. A store (:mod:`cachectl.layers.base.store`) does all work on the
disk.
"""

from __future__ import annotations

import os
from abc import ABC
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, TypeVar, cast, final

from cachectl.layers.base import facts
from cachectl.layers.base.declarations import EnvSwitch, Places, at_once
from cachectl.layers.base.environment import Environment, user_name
from cachectl.layers.base.errors import (
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
from cachectl.layers.base.store import Store, attempt, target_of
from cachectl.layers.disk.foresight import closed_because
from cachectl.layers.disk.handles import owners
from cachectl.layers.disk.presence import nearest
from cachectl.layers.disk.trust import as_owner
from cachectl.layers.stores.quarantine import Quarantine, label

T = TypeVar("T")

_NO_SWITCH: Final = "nothing turns this cache off"


class Declaration(ABC):
    """The properties of a layer's library.

    A plain layer sets ``name``, ``title``, ``places``, ``switch`` and ``store``. A layer whose library has special
    rules overrides methods. :mod:`cachectl.layers.base.guard` guards exactly the public members of this class.
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
    #: What an exported entry reveals about its user, in words; ``None`` if that is not known.
    reveals: ClassVar[str | None] = None

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.store = type(self).store.bound(self.name, environment)

    @property
    def forms(self) -> tuple[str, ...]:
        """Artifact forms that :meth:`put` takes; the first is what :meth:`get` gives."""
        return self.store.forms

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

    def refresher(self) -> facts.Switch | None:
        """Return how to make the library store without reading, in this process; ``None`` if that is impossible."""
        return None

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

    def elsewhere(self, environment: Environment) -> Layer:
        """Return the same layer in another environment."""
        return cast("Layer", type(self)(environment))


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
        """Count a root."""
        return self.store.usage(root)

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
        self._demand(Ability.GET)
        for root in self.roots():
            artifact = self.store.read(root, key)
            if artifact is not None:
                return artifact
        return None

    @final
    def put(self, key: str, artifact: facts.Artifact, *, replace: bool = False) -> None:
        """Place an artifact under a key, so that the library itself would hit it.

        Raises :class:`Refused`, :class:`ForeignForm`, :class:`Damaged`, or :class:`EntryExists` if a
        different entry has the key and ``replace`` is not set. Putting equal bytes again does nothing.
        """
        self._demand(Ability.PUT)
        self._demand_form(artifact)
        if artifact.key != key:
            # A library accepts any file with the name of a key as the entry.
            raise ForeignForm(self.name, f"the artifact was taken from the key {artifact.key!r}; put it there")
        self._demand_key(key)
        root = self._root_to_put()
        self._demand_own_entry(root, key)
        with as_owner(root.path):
            self.store.write(root, key, artifact, replace=replace)

    @final
    def get_many(self, keys: Sequence[str]) -> Mapping[str, facts.Artifact | LayerError | OSError]:
        """Return the artifact of each key, or the reading error; a key that no root has is left out.

        Raises :class:`Refused` if the layer cannot.
        """
        self._demand(Ability.GET)
        found: dict[str, facts.Artifact | LayerError | OSError] = {}
        for root in self.roots():
            found.update(self.store.read_many(root, [key for key in keys if key not in found]))
        return found

    @final
    def put_new(
        self, artifacts: Sequence[facts.Artifact], *, dry_run: bool = False
    ) -> list[bool | LayerError | OSError]:
        """Place the artifacts whose keys are free, each whole or not at all, each under its own key.

        Returns for each: ``True`` if it was placed, ``False`` if the same entry is present, else the error that
        :meth:`put` would raise. A ``dry_run`` predicts the same as far as possible, and changes nothing. Raises
        :class:`Refused` if the layer cannot.
        """
        self._demand(Ability.PUT)
        root = self._root_to_put()
        unfit = [attempt(partial(self._demand_fit, artifact)) for artifact in artifacts]
        keys = [artifact.key for artifact, reason in zip(artifacts, unfit, strict=True) if reason is None]
        # An entry with its key is not replaced, but a file of many entries would be changed.
        others = self._of_others(root, keys, new=True)
        refused = [reason or others.get(artifact.key) for artifact, reason in zip(artifacts, unfit, strict=True)]
        fit = [artifact for artifact, reason in zip(artifacts, refused, strict=True) if reason is None]
        with as_owner(root.path):
            written = iter(self._foresee_new(root, fit) if dry_run else self.store.write_new(root, fit))
        return [next(written) if reason is None else reason for reason in refused]

    def _foresee_new(self, root: Root, artifacts: Sequence[facts.Artifact]) -> list[bool | LayerError | OSError]:
        keys = [artifact.key for artifact in artifacts]
        standing = self.get_many(keys) if self.refusals().get(Ability.GET) is None else {}
        new = [key for key in keys if key not in standing]
        try:
            refused = self.store.foresee_write(root, new)
        except LayerError as error:
            refused = dict.fromkeys(new, error)
        done: list[bool | LayerError | OSError] = []
        for artifact in artifacts:
            here = standing.get(artifact.key)
            if isinstance(here, facts.Artifact):
                done.append(False if here.data == artifact.data else EntryExists(self.name, root.path))
            else:
                done.append(here or refused.get(artifact.key) or True)
        return done

    def _demand_fit(self, artifact: facts.Artifact) -> None:
        self._demand_form(artifact)
        self._demand_key(artifact.key)

    def _demand_key(self, key: str) -> None:
        if key_complaint(key) is not None or not self.store.is_key(key):
            raise not_a_key(self.name, key)

    def _demand_form(self, artifact: facts.Artifact) -> None:
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
        """Finish interrupted writes in the roots that are ``within`` and may be changed.

        Verbs that remove entries call this first, because such a write can hide entries from a read-only scan. The
        verb itself reports a write that cannot be finished.
        """
        if self.abilities()[Ability.CLEAR] is not None:
            return
        for root in filter(within, self.roots()):
            with suppress(LayerError, OSError):
                self._demand_own(root)
                with as_owner(root.path):
                    self.store.recover(root)

    @final
    def plan_clear(
        self, selection: Selection = ALL, *, within: Callable[[Root], bool] | None = None, listed: bool = False
    ) -> facts.ClearPlan:
        """List exactly the things that clearing the selection would remove in roots ``within``. Changes nothing.

        With ``listed`` each entry is named, even if the store could plan a whole root at once.
        Raises :class:`Refused` if the layer must not be cleared.
        """
        self._demand(Ability.CLEAR)
        if selection.kernel is not None and (reason := self.refusals().get(Ability.KERNELS)) is not None:
            return facts.ClearPlan(self.name, skipped=(facts.Note("*", f"cannot be selected by kernel: {reason}"),))
        targets: list[facts.Target] = []
        skipped: list[facts.Note] = []
        failed: list[facts.Note] = []
        things: list[Removable] = []
        for root in self.roots() if within is None else filter(within, self.roots()):
            try:
                self._demand_own(root)
                part = self._without_others(self._plan_root(root, selection, listed=listed))
            except (LayerError, OSError) as error:
                failed.append(facts.Note(str(root.path), reason_of(error)))
                continue
            targets.extend(part.targets)
            skipped.extend(part.skipped)
            failed.extend(part.failed)
            things.extend(part.things)
        recreate = tuple(root.path for root in self.required_roots() if within is None or within(root))
        return facts.ClearPlan(self.name, tuple(targets), tuple(skipped), tuple(failed), recreate, tuple(things))

    @final
    def plan_removal(self, things: Iterable[Removable]) -> facts.ClearPlan:
        """Plan the removal of exactly these things, as a scan yielded them. Changes nothing.

        Raises :class:`Refused` if the layer must not be cleared.
        """
        self._demand(Ability.CLEAR)
        return self._planned(things)

    @final
    def plan_spent(self, things: Iterable[Removable]) -> facts.ClearPlan:
        """Plan the removal of entries that only this process could hit and no longer needs, in use or not.

        Changes nothing. Raises :class:`Refused` if the layer must not be cleared.
        """
        self._demand(Ability.CLEAR)
        listed = self._listed(things)
        return facts.ClearPlan(self.name, tuple(map(target_of, listed)))

    @final
    def clear(self, plan: facts.ClearPlan) -> facts.Outcome:
        """Remove the targets of a plan and recreate its folders. Targets that have changed since are skipped."""
        self._demand(Ability.CLEAR)
        return self._applied(plan, self._recreate, self._remove)

    def _remove(self, root: Root, targets: tuple[facts.Target, ...]) -> facts.Outcome:
        """Remove targets from a root; count the orphans that have gone."""
        orphans = [one.key for one in targets if not one.entries and os.path.lexists(one.root / one.key)]
        outcome = self.store.remove(root, targets)
        left = {note.key for note in outcome.skipped}
        gone = sum(key not in left and not os.path.lexists(root.path / key) for key in orphans)
        return replace(outcome, orphans_removed=gone)

    @final
    def foresee(self, plan: facts.ClearPlan) -> facts.Outcome:
        """Predict the outcome of :meth:`clear`, as far as possible. Changes nothing."""
        self._demand(Ability.CLEAR)

        def removal(root: Root, targets: tuple[facts.Target, ...]) -> facts.Outcome:
            seen = self.store.foresee_removal(root, targets)
            described = {(thing.root, thing.key): thing for thing in plan.things}
            # The plan has not read contents, without which an entry has no kernels; what cannot be read goes too.
            read = () if described.keys().isdisjoint((root.path, one.key) for one in targets) else self.store.scan(root)
            described |= {(one.root, one.key): one for one in read if isinstance(one, Entry)}
            removed = sum(target.entries for target in seen.going)
            orphans = sum(not target.entries for target in seen.going)
            named = (described.get((target.root, target.key)) for target in seen.going)
            things = tuple(thing for thing in named if thing is not None)
            return facts.Outcome(
                self.name, removed, seen.bytes_freed, seen.skipped, seen.failed, things=things, orphans_removed=orphans
            )

        return self._applied(plan, self._foresee_recreation, removal)

    def _applied(
        self,
        plan: facts.ClearPlan,
        recreate: Callable[[Root], facts.Outcome],
        remove: Callable[[Root, tuple[facts.Target, ...]], facts.Outcome],
    ) -> facts.Outcome:
        outcome = facts.Outcome(self.name, skipped=plan.skipped, failed=plan.failed)
        for root in self.roots():
            if root.path in plan.recreate:
                outcome = outcome.plus(self._attempted(root, partial(recreate, root)))
            if targets := tuple(target for target in plan.targets if target.root == root.path):
                outcome = outcome.plus(self._attempted(root, partial(remove, root, targets)))
        return outcome

    def _attempted(self, root: Root, act: Callable[[], facts.Outcome]) -> facts.Outcome:
        """Act on a root as its owner; an error becomes the root's failure."""
        try:
            self._demand_own(root)
            with as_owner(root.path):
                return act()
        except (LayerError, OSError) as error:
            return facts.Outcome(self.name, failed=(facts.Note(str(root.path), reason_of(error)),))

    def _recreate(self, root: Root) -> facts.Outcome:
        root.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return facts.Outcome(self.name, recreated=(root.path,))

    def _foresee_recreation(self, root: Root) -> facts.Outcome:
        if (because := closed_because(root.path.parent, root.path.name)) is not None:
            return facts.Outcome(self.name, failed=(facts.Note(str(root.path), because),))
        return facts.Outcome(self.name, recreated=(root.path,))

    @final
    def disable(self) -> facts.Switch:
        """Return how to turn the layer off; changes nothing. Raises :class:`Refused` if that is impossible."""
        self._demand(Ability.DISABLE)
        return self.switched(on=False)

    @final
    def enable(self) -> facts.Switch:
        """Return how to turn the layer on; changes nothing. Raises :class:`Refused` if that is impossible."""
        self._demand(Ability.DISABLE)
        return self.switched(on=True)

    @final
    def plan_quarantine(self, findings: Iterable[facts.Finding]) -> facts.ClearPlan:
        """Plan to quarantine the things that findings name, each once. Changes nothing.

        Raises :class:`Refused` if the layer cannot.
        """
        self._demand(Ability.QUARANTINE)
        return self._planned(finding.thing for finding in findings if finding.thing is not None)

    @final
    def quarantine(self, plan: facts.ClearPlan, findings: Iterable[facts.Finding]) -> facts.Outcome:
        """Quarantine the targets of a plan, each labelled with its finding. Changed targets are skipped."""
        self._demand(Ability.QUARANTINE)
        known = {(one.thing.root, one.thing.key): one for one in findings if one.thing is not None}
        outcome = facts.Outcome(self.name, skipped=plan.skipped, failed=plan.failed)
        for root in self.roots():
            for target in plan.targets:
                finding = known.get((target.root, target.key))
                if target.root == root.path and finding is not None:
                    outcome = outcome.plus(self._set_one_aside(root, target, finding))
        return outcome

    def _set_one_aside(self, root: Root, target: facts.Target, finding: facts.Finding) -> facts.Outcome:
        thing = label(root.path, target, finding, self.environment.clock())
        try:
            with as_owner(root.path):
                because = self.store.quarantine(root, target, thing)
        except Unsettled as error:
            return facts.Outcome(self.name, 1, failed=(facts.Note(target.key, error.message),))
        except (LayerError, OSError) as error:
            return facts.Outcome(self.name, failed=(facts.Note(target.key, reason_of(error)),))
        return (
            facts.Outcome(self.name, 1)
            if because is None
            else facts.Outcome(self.name, skipped=(facts.Note(target.key, because),))
        )

    @final
    def quarantined(self) -> Iterator[facts.Quarantined | Problem]:
        """Yield this layer's things in quarantine, and a problem for each that cannot be read."""
        for path in dict.fromkeys(root.path for root in self.roots()):
            yield from Quarantine(self.name, path).held()

    @final
    def restore(self, thing: facts.Quarantined, *, replace: bool = False) -> None:
        """Restore a thing from quarantine.

        Raises :class:`Refused`, or :class:`EntryExists` if another entry has taken its place and ``replace`` is
        not set.
        """
        root = self._root_to_restore(thing)
        with as_owner(root.path):
            self.store.restore(root, thing, replace=replace)

    @final
    def foresee_restore(self, thing: facts.Quarantined, *, replace: bool = False) -> None:
        """Raise the error that :meth:`restore` would raise, as far as it can be predicted. Changes nothing."""
        root = self._root_to_restore(thing)
        with as_owner(root.path):
            for error in self.store.foresee_write(root, [thing.key]).values():
                raise error
            # The folder that it lies in is removed.
            because = closed_because(root.path, ".")
        if because is not None:
            raise Unreachable(self.name, f"cannot restore it: {because}", root.path)
        if not replace and (os.path.lexists(root.path / thing.key) or self._is_taken(root, thing.key)):
            raise EntryExists(self.name, root.path / thing.key)

    def _is_taken(self, root: Root, key: str) -> bool:
        """Return whether a root has an entry of a key, readable or not."""
        return self.refusals().get(Ability.GET) is None and attempt(partial(self.store.read, root, key)) is not None

    def _root_to_restore(self, thing: facts.Quarantined) -> Root:
        self._demand(Ability.QUARANTINE)
        root = next((root for root in self.roots() if root.path == thing.root), None)
        if root is None:
            raise Refused(self.name, "is no root of this environment", thing.root)
        self._demand_own(root)
        self._demand_own_entry(root, thing.key)
        return root

    def _demand(self, ability: Ability) -> None:
        reason = self.refusals().get(ability)
        if reason is not None:
            raise Refused(self.name, f"cannot {ability.value}: {reason}")

    def _demand_own(self, root: Root) -> None:
        """Forbid the superuser to change another user's root without ``--over-others``.

        Programs of that user could not replace files that the superuser leaves there.
        """
        if not self.environment.superuser or self.environment.over_others:
            return
        place = nearest(root.path, follow=False)
        owner = place.stat().st_uid
        if owner != 0:
            name = user_name(owner)
            raise Refused(
                self.name,
                f"belongs to {name}, and you are the superuser; do it as {name}, or use --over-others",
                root.path,
            )

    def _demand_own_entry(self, root: Root, key: str) -> None:
        """Forbid the superuser to change another user's entry."""
        for error in self._of_others(root, [key]).values():
            raise error

    def _of_others(self, root: Root, keys: Sequence[str], *, new: bool = False) -> dict[str, Refused | OSError]:
        """Return for each entry of another user why the superuser must not change it.

        With ``new`` the owners of the entries themselves do not matter, only those of files that they share.
        """
        if not self.environment.superuser or self.environment.over_others:
            return {}
        users: dict[Path, frozenset[int]] = {}
        found: dict[str, Refused | OSError] = {}
        for key, paths in self.store.held_in(root, keys).items():
            own = root.path / key if new else None
            for path in paths:
                if path == own or key in found:
                    continue
                try:
                    if path not in users:
                        users[path] = owners(path) - {0}
                except OSError as error:
                    found[key] = error
                    continue
                if users[path]:
                    name = user_name(min(users[path]))
                    message = f"belongs to {name}, and you are the superuser; do it as {name}, or use --over-others"
                    found[key] = Refused(self.name, message, path)
        return found

    def _without_others(self, plan: facts.ClearPlan) -> facts.ClearPlan:
        """Remove entries of other users from the superuser's plan, and note how many belong to each user."""
        if not self.environment.superuser or self.environment.over_others or not plan.targets:
            return plan
        kept: list[facts.Target] = []
        failed: list[facts.Note] = []
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
                failed.append(facts.Note(str(root), f"{message}; --over-others takes them too"))
        keys = {(target.root, target.key) for target in kept}
        things = tuple(thing for thing in plan.things if (thing.root, thing.key) in keys)
        return replace(plan, targets=tuple(kept), failed=(*plan.failed, *failed), things=things)

    def _owned_by_others(
        self, root: Path, targets: Sequence[facts.Target]
    ) -> Iterator[tuple[facts.Target, frozenset[int]]]:
        place = next(one for one in self.roots() if one.path == root)
        held = self.store.held_in(place, [target.key for target in targets])
        known: dict[Path, frozenset[int]] = {}
        for target in targets:
            others: frozenset[int] = frozenset()
            for path in held.get(target.key, (root / target.key,)):
                if path not in known:
                    known[path] = owners(path) - {0}
                others |= known[path]
            yield target, others

    def _planned(self, things: Iterable[Removable]) -> facts.ClearPlan:
        return self._without_others(self._gated(self._listed(things)))

    def _listed(self, things: Iterable[Removable]) -> tuple[Removable, ...]:
        """Return each thing once. Raises :class:`Refused` if a root belongs to another user."""
        listed = tuple({(thing.root, thing.key): thing for thing in things}.values())
        for root in self.roots():
            if any(thing.root == root.path for thing in listed):
                self._demand_own(root)
        return listed

    def _plan_root(self, root: Root, selection: Selection, *, listed: bool) -> facts.ClearPlan:
        if selection.everything and not listed and (whole := self.store.plan_everything(root)) is not None:
            return whole
        chosen: list[Removable] = []
        problems: list[Problem] = []
        nameless: set[str] = set()
        guests: Counter[str] = Counter()
        for found in self.store.scan(root, contents=selection.needs_contents):
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
            facts.Note("*", f"{count} in {root.path} left, each {whose}; --key names one")
            for whose, count in guests.items()
        )
        # Entries hidden by such a problem may match the selection.
        failed = tuple(facts.note_of(problem) for problem in problems if problem.hides)
        if selection.everything:
            skipped += tuple(facts.note_of(problem) for problem in problems if problem.stays)
        return facts.ClearPlan(self.name, plan.targets, skipped, failed, things=plan.things)

    def _gated(self, things: Iterable[Removable]) -> facts.ClearPlan:
        idle: list[Removable] = []
        skipped: list[facts.Note] = []
        for thing, reason in self.store.in_use(things):
            if reason is not None:
                skipped.append(facts.Note(thing.key, reason))
            else:
                idle.append(thing)
        return facts.ClearPlan(self.name, tuple(map(target_of, idle)), tuple(skipped), things=tuple(idle))


def _notes_of_nameless(count: int, root: Root) -> Iterator[facts.Note]:
    """Yield a note with the number of entries that a selection by kernel has left because their kernels are unknown."""
    if count:
        have = "entry has no known kernel name and was" if count == 1 else "entries have no known kernel name and were"
        yield facts.Note("*", f"{count} {have} left, in {root.path}")


def _overrides(declaration: Declaration, method: str) -> bool:
    return getattr(type(declaration), method) is not getattr(Declaration, method)
