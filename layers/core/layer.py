"""The base class of all layers: the declaration of one cache, and the methods that users call."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, final

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES, LayerError, Refused, UnknownFormat, not_a_key, reason_of
from cachectl.layers.base.text import key_complaint
from cachectl.layers.core.codes import OFF, VARIABLE
from cachectl.layers.core.declarations import EnvSwitch, Family, Places, at_once
from cachectl.layers.core.entry import Artifact, Entry, Note, Problem
from cachectl.layers.core.finding import Finding, Severity
from cachectl.layers.core.parts import About
from cachectl.layers.core.plan import Outcome, Plan
from cachectl.layers.core.root import DISABLED, ENABLED, Condition, Root, State
from cachectl.layers.core.selection import ALL, Selection, is_short_key, names_key
from cachectl.layers.core.store import ENTRY, Store, attempt, bound, noted
from cachectl.layers.core.switch import Ability, Switch
from cachectl.layers.disk import trust
from cachectl.layers.disk.own_roots import own_roots


class Layer:
    """One cache of the OpenCL stack in one environment.

    A layer sets ``name``, ``title``, ``places``, ``switch`` and ``store``, and can override methods that are not final.
    """

    #: The name that users type.
    name: ClassVar[str]
    #: One line for tables.
    title: ClassVar[str]
    #: The places of the library's entries.
    places: ClassVar[Places]
    #: The switch of the cache, if it has one.
    switch: ClassVar[EnvSwitch | None] = None
    #: The names of the product's variables, if names that nothing reads can be reported.
    family: ClassVar[Family | None] = None
    #: Everything else that is known about the library and its entries.
    about: ClassVar[About] = About()

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        # A third-party layer may have its store as an attribute of the class.
        if isinstance(declared := type(self).store, Store):
            self.store = bound(declared, self.name, environment)

    def __repr__(self) -> str:
        return f"<layer {self.name}>"

    @cached_property
    def store(self) -> Store:
        """The store, bound to the layer's name and environment; it is imported on first use."""
        return bound(self.load_store(), self.name, self.environment)

    def load_store(self) -> Store:
        """Return the store of a layer whose class has none as an attribute."""
        raise NotImplementedError("the layer has no store")

    def roots(self) -> tuple[Root, ...]:
        """Return every place that the library would use, existing or not, starting with the one that it writes to."""
        return self.places.roots(self.environment)

    def state(self) -> State:
        """Return whether a program started in this environment would use the cache, and the reason."""
        if self.switch is None:
            return State(ENABLED, "has no switch")
        variable, value = self.switch.variable, self.environment.get(self.switch.variable)
        if self.switch.is_off(value):
            return State(DISABLED, f"{variable}={value}")
        return State(ENABLED, f"on unless {variable}={self.switch.off_value}")

    @property
    def limit(self) -> int | None:
        """The bytes above which the library drops entries; ``None`` if there is no known limit."""
        return None

    def disable(self) -> Switch:
        """Return how to turn the layer off; changes nothing. Raises :class:`Refused` if that is impossible."""
        return _switched(self, on=False)

    def enable(self) -> Switch:
        """Return how to turn the layer on; changes nothing. Raises :class:`Refused` if that is impossible."""
        return _switched(self, on=True)

    def relocate(self, folder: Path) -> Switch:
        """Return how to move the whole cache below a folder; changes nothing. Raises :class:`Refused` if impossible."""
        read = at_once() if self.switch is None else self.switch.read
        return read._replace(layer=self.name, set=self.places.moved(self.name, folder))

    def diagnose(self) -> Iterator[Finding]:
        """Yield problems with the layer's variables and environment. Changes nothing."""
        yield from ()

    def unexamined(self) -> Iterator[str]:
        """Yield what :meth:`diagnose` could not check, with what the user can do about it."""
        yield from ()

    @final
    def abilities(self) -> Mapping[Ability, str | None]:
        """Map every ability to ``None`` if the layer has it here, else to the reason why it does not.

        A layer that fails to answer, as third-party layers may, has none.
        """
        return self._abilities

    @cached_property
    def _abilities(self) -> Mapping[Ability, str | None]:
        reasons: dict[Ability, str | None] = dict.fromkeys(Ability)
        changes = (
            (Ability.DISABLE, self.disable),
            (Ability.DISABLE, self.enable),
            (Ability.RELOCATE, partial(self.relocate, self.environment.temporary)),
        )
        try:
            reasons.update(self.store.refusals)
            for ability, change in changes:
                try:
                    if not isinstance(change(), Switch):
                        raise TypeError("no Switch")
                except Refused as error:  # noqa: PERF203 - one must not end the rest
                    reasons[ability] = error.message.removeprefix(f"cannot {ability.value}: ")
        except KeyboardInterrupt:
            raise
        # A third-party layer raises anything, as when the registry creates it.
        except BaseException as error:  # noqa: BLE001
            return dict.fromkeys(Ability, f"the layer failed: {reason_of(error)}")
        return reasons

    @final
    def entries(self, selection: Selection = ALL) -> Iterator[Entry]:
        """Yield the selected entries of every root."""
        for root in every_root(self):
            for item in self.store.scan(root, selection):
                if isinstance(item, Entry) and item.is_listed and selection.matches(item):
                    yield item

    @final
    def get(self, key: str) -> Artifact | None:
        """Return the artifact of a key, or ``None`` if no root has it.

        :param key: the full or the short key
        :raises Refused: if the layer cannot read entries
        :raises Damaged: if the entry is damaged
        """
        with _named(self):
            artifact = get_many(self, [key]).get(key)
            if artifact is None and is_short_key(key):
                full = next((item.key for item in _scanned(self) if item.is_listed and names_key(key, item.key)), key)
                artifact = get_many(self, [full]).get(full)
            if isinstance(artifact, Exception):
                raise artifact
            return artifact

    @final
    def put(self, key: str, artifact: Artifact, *, replace: bool = False) -> None:
        """Place an artifact so that the library itself would hit it. Putting equal bytes again does nothing.

        :param key: the full or the short key
        :param replace: replace a different entry
        :raises Refused: if the layer cannot, or the artifact belongs to another layer or key
        :raises Damaged: if the artifact is damaged
        :raises EntryExists: if a different entry has the key
        """
        with _named(self):
            if not names_key(key, artifact.key):
                # A library accepts any file that has the name of a key.
                raise Refused(self.name, f"the artifact belongs to the key {artifact.key!r}; put it there")
            (result,) = put_many(self, [artifact], replace=replace)
            if isinstance(result, Exception):
                raise result

    @final
    def plan_clear(self, selection: Selection = ALL, *, damaged: bool = False, contents: bool = False) -> Plan:
        """List exactly the entries that clearing the selection would remove. Changes nothing.

        :param damaged: only those that :meth:`Store.verify` finds damaged
        :param contents: read entries for their kernels even if the selection does not need that
        :raises Refused: if the layer must not be cleared
        """
        _require(self, Ability.CLEAR)
        if selection.kernel is not None and (reason := self.store.refusals.get(Ability.KERNELS)) is not None:
            return plan_of(self, skipped=(Note("*", f"cannot be selected by kernel: {reason}"),))
        plan_root = _plan_damaged if damaged else partial(_plan_root, contents=contents)
        plan, failed = plan_of(self), list[Note]()
        for root in every_root(self):
            with noted(failed, str(root.path)):
                plan = plan.plus(plan_root(self, root, selection))
        return plan._replace(failed=(*plan.failed, *failed))

    @final
    def clear(self, plan: Plan) -> Outcome:
        """Remove the entries of a plan. Entries that have changed since are skipped."""
        _require(self, Ability.CLEAR)
        # Before any removal: a folder of roots that cannot be listed must not hide what was removed.
        roots, failed = tuple(every_root(self)), list(plan.failed)
        outcome = Outcome(self.name, skipped=plan.skipped)
        for root in roots:
            entries = tuple(entry for entry in plan.entries if entry.root == root.path)
            if not entries:
                continue
            with noted(failed, str(root.path)):
                require_changeable(self, root)
                removed = self.store.remove(root, entries)
                orphans = {entry.key for entry in entries if entry.is_orphan} - {note.key for note in removed.skipped}
                gone = sum(not os.path.lexists(root.path / key) for key in orphans)
                places = (root.path,) if removed.removed or gone else ()
                outcome = outcome.plus(removed._replace(orphans_removed=gone, roots=places))
        return outcome._replace(failed=(*failed, *outcome.failed))


def _switched(layer: Layer, *, on: bool) -> Switch:
    if layer.switch is None:
        raise Refused(layer.name, "cannot disable: nothing turns this cache off")
    return layer.switch.change(layer.name, on=on)


# ---------------------------------------------------------------------- roots


def roots_of(layer: Layer) -> Iterator[Root]:
    """Yield the roots of a layer, each folder once: several paths may lead to it."""
    return _distinct(layer.roots())


def every_root(layer: Layer) -> Iterator[Root]:
    """Yield the roots of a layer, and its roots within those of ``cachectl run --base``, each folder once."""
    roots, folders = [*layer.roots()], own_roots(layer.environment)
    if folders and layer.abilities()[Ability.RELOCATE] is None:
        for folder in folders:
            source, moved = f"own root of a base ({folder})", moved_to(layer, folder).roots()
            inside = (root for root in moved if folder in root.path.parents and root.may_exist)
            roots += (root._replace(source=source) for root in inside)
    return _distinct(roots)


def moved_to(layer: Layer, folder: Path) -> Layer:
    """Return a layer whose whole cache is moved below a folder. Raises :class:`Refused` if nothing can move it."""
    return type(layer)(layer.environment.with_variables(layer.relocate(folder).set))


def _distinct(roots: Iterable[Root]) -> Iterator[Root]:
    met = set[object]()
    for root in roots:
        place: object = root.path
        with suppress(OSError):
            status = os.stat(root.path)
            place = status.st_dev, status.st_ino
        if place not in met:
            met.add(place)
            yield root


def require_changeable(layer: Layer, root: Root) -> None:
    """Raise :class:`Refused` for a root that another user owns, or can write to without being trusted."""
    here = layer.environment
    if reason := trust.closed_to_changes(root.path, superuser=here.superuser, shared=here.trusts_writers):
        raise Refused(layer.name, reason, root.path)


def _require(layer: Layer, ability: Ability) -> None:
    if (reason := layer.store.refusals.get(ability)) is not None:
        raise Refused(layer.name, f"cannot {ability.value}: {reason}")


def _owner_reason(layer: Layer, root: Path, key: str) -> str | None:
    """Return why root must leave an entry to its owner; ``None`` for root's own entries, and for other users."""
    if not layer.environment.superuser:
        return None
    # An entry in a file belongs to the owner of the file.
    owner = trust.owner_of(root, key.replace(layer.store.separator, "/"))
    return trust.belonging_to(owner) if owner else None


# ---------------------------------------------------------------------- get and put


def _scanned(layer: Layer) -> Iterator[Entry]:
    """Yield everything in the roots that has a key, without reading it."""
    for root in every_root(layer):
        yield from (item for item in layer.store.scan(root, contents=False) if isinstance(item, Entry))


def require_known(layer: Layer, key: str) -> None:
    """Raise :class:`UnknownFormat` if the item with this full or short key is of an unknown format."""
    with _named(layer):
        for item in _scanned(layer):
            if item.is_unknown and names_key(key, item.key):
                raise UnknownFormat(layer.name, str(item.because), item.root / item.key)


def get_many(layer: Layer, keys: Sequence[str]) -> dict[str, Artifact | Exception]:
    """Return the artifact of each key that a root has, or the reading error. Raises :class:`Refused`."""
    _require(layer, Ability.GET)
    artifacts: dict[str, Artifact | Exception] = {}
    for root in every_root(layer):
        artifacts.update(layer.store.read(root, [key for key in keys if key not in artifacts]))
    return artifacts


def put_many(layer: Layer, artifacts: Sequence[Artifact], *, replace: bool = False) -> list[bool | Exception]:
    """Place artifacts under their keys, which differ; each is placed completely or not at all.

    Returns ``True`` for each that was placed, ``False`` if the same entry is present, else the error that
    :meth:`Layer.put` would raise. Raises :class:`Refused` if the layer cannot store entries.
    """
    _require(layer, Ability.PUT)
    root = next(iter(layer.roots()), None)
    if root is None:
        raise Refused(layer.name, f"cannot put: this environment has no place for entries ({layer.state().why})")
    require_changeable(layer, root)
    unfit = [attempt(partial(_require_fit, layer, root, artifact)) for artifact in artifacts]
    fit = [artifact for artifact, error in zip(artifacts, unfit, strict=True) if error is None]
    written = layer.store.write(root, fit, replace=replace) if fit else {}
    return [written[artifact.key] if error is None else error for artifact, error in zip(artifacts, unfit, strict=True)]


def _require_fit(layer: Layer, root: Root, artifact: Artifact) -> None:
    if artifact.layer != layer.name or artifact.form not in layer.store.forms:
        message = f"accepts {' or '.join(layer.store.forms)}, not {artifact.form} of layer {artifact.layer}"
        raise Refused(layer.name, f"{message}; put it there instead")
    # Text after a separator other than a slash is within the file and not part of a path.
    path = artifact.key if (separator := layer.store.separator) == "/" else artifact.key.partition(separator)[0]
    if key_complaint(path) or layer.store.kind_of(root, artifact.key) not in (ENTRY, None):
        raise not_a_key(layer.name, artifact.key)
    if reason := _owner_reason(layer, root.path, artifact.key):
        raise Refused(layer.name, reason, root.path / artifact.key)


@contextmanager
def _named(layer: Layer) -> Iterator[None]:
    """Name the layer, which may be a third party's, in an error that no layer should raise."""
    try:
        yield
    except (LayerError, OSError):
        raise
    except FAILURES as error:
        raise LayerError(layer.name, f"the layer failed: {reason_of(error)}") from error


# ---------------------------------------------------------------------- plans


def plan_of(layer: Layer, entries: tuple[Entry, ...] = (), skipped: tuple[Note, ...] = ()) -> Plan:
    """Return the plan to remove entries of a layer."""
    return Plan(layer.name, layer.clear, entries, skipped, needs_room=layer.store.clearing_needs_room)


def plan_removal(layer: Layer, items: Iterable[Entry], *, in_use: bool = False) -> Plan:
    """Plan the removal of exactly these items of a scan. Changes nothing.

    ``in_use`` includes entries that a program may be using, for entries that only this process can hit. Items of
    unknown formats are skipped, and so are other users' items in root's plan. Raises :class:`Refused` if the layer or a
    root must not be changed.
    """
    _require(layer, Ability.CLEAR)
    unique = {(entry.root, entry.key): entry for entry in items}.values()
    skipped = [Note(entry.key, str(entry.because)) for entry in unique if entry.is_unknown]
    understood = [entry for entry in unique if not entry.is_unknown]
    entries, changed = list[Entry](), set[Path]()
    for entry, used in ((entry, None) for entry in understood) if in_use else layer.store.in_use(understood):
        if used is None:
            changed.add(entry.root)
        if reason := used or _owner_reason(layer, entry.root, entry.key):
            skipped.append(Note(entry.key, reason))
        else:
            entries.append(entry)
    for root in every_root(layer):
        if root.path in changed:
            require_changeable(layer, root)
    return plan_of(layer, tuple(entries), tuple(skipped))


def _plan_damaged(layer: Layer, root: Root, selection: Selection) -> Plan:
    findings = list(layer.store.verify(root))
    if layer.about.precious:
        reason = "damaged tuning results are never removed"
        damaged = (finding for finding in findings if finding.thing is not None)
        return plan_of(layer, skipped=tuple(Note(each.key or "*", f"{reason}; {each.message}") for each in damaged))
    plan = plan_removal(layer, (item for finding in findings if (item := finding.thing) and selection.matches(item)))
    # Whether these are damaged is unknown.
    unread = (finding for finding in findings if finding.code == "unreadable")
    return plan._replace(failed=tuple(Note(finding.key or str(root.path), finding.message) for finding in unread))


def _plan_root(layer: Layer, root: Root, selection: Selection, *, contents: bool) -> Plan:
    items = list(layer.store.scan(root, contents=contents or selection.needs_contents))
    problems = [item for item in items if isinstance(item, Problem)]
    entries = [item for item in items if isinstance(item, Entry)]
    matching = [entry for entry in entries if selection.matches(entry)]
    # Foreign items are removed only by key. Unknown ones are not, and to name one is an error.
    others = "foreign" if selection.key is None else "unknown"
    plan = plan_removal(layer, (entry for entry in matching if entry.kind != others))
    guests = Counter(entry.because for entry in matching if entry.is_foreign and selection.key is None)
    left = [f"{count} in {root.path} left, each {whose}; --key names one" for whose, count in guests.items()]
    unnamed = (entry for entry in entries if entry.details.kernels is None and not entry.is_foreign)
    if selection.kernel and (nameless := {entry.key for entry in unnamed} - {entry.key for entry in plan.entries}):
        have, were = ("entry has", "was") if len(nameless) == 1 else ("entries have", "were")
        left.insert(0, f"{len(nameless)} {have} no known kernel name and {were} left, in {root.path}")
    skipped = [*plan.skipped, *(Note("*", words) for words in left)]
    if selection == ALL:
        # These have the name of an entry but are none, or contain a foreign file.
        skipped += [problem.note for problem in problems if problem.code == "unrecognised"]
    # Entries hidden by such a problem may match the selection.
    failed = [problem.note for problem in problems if problem.hides]
    if selection.key is not None:
        failed += [Note(entry.key, str(entry.because)) for entry in matching if entry.is_unknown]
    return plan._replace(skipped=tuple(skipped), failed=tuple(failed))


# ---------------------------------------------------------------------- variables


def off(layer: Layer, variable: str, what: str | None = None) -> Finding:
    """Return the finding that a variable switches off a layer on purpose, or only ``what``."""
    message = f"{variable}={layer.environment.get(variable)} switches {what or layer.title} off"
    return OFF.finding(layer.name, first_place(layer), message, f"unset {variable}")


def misread(layer: Layer, variable: str, severity: Severity, outcome: str, fix: str | None = None) -> Finding:
    """Return the finding that a library does not understand a value, or not as it was probably intended."""
    message, fix = f"{variable}={layer.environment.get(variable)!r} {outcome}", fix or f"unset {variable}"
    return VARIABLE.finding(layer.name, first_place(layer), message, fix, severity=severity)


def first_place(layer: Layer) -> Path:
    """Return the root to name in a finding about a layer as a whole."""
    return next((root.path for root in layer.roots()), Path("*"))


#: A problem, and the resulting condition of the cache, if any.
Fault = tuple[Condition | None, Finding]


def faults_of(layer: Layer, switches: Iterable[EnvSwitch]) -> Iterator[Fault]:
    """Yield the problems with variables that are set."""
    for switch in switches:
        value = layer.environment.get(switch.variable)
        if switch.is_off(value):
            yield DISABLED, off(layer, switch.variable, switch.what)
        elif value is not None and not switch.is_fine(value):
            finding = misread(layer, switch.variable, switch.severity, switch.outcome, switch.fix)
            yield DISABLED if switch.disables else None, finding
