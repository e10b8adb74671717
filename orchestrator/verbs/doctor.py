"""``cachectl doctor``: find problems with this setup, and the command that fixes each.

Each layer reports its own problems (:meth:`Layer.diagnose`). This module checks what concerns every layer: full file
systems, places (judged by :mod:`cachectl.layers.disk.place`), roots that ranks share, stale entries and leaked files.
It only reads, and leaves damage to ``verify``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cachectl import layer_set, listing, verbs
from cachectl.layers.base import processes
from cachectl.layers.base.environment import Environment, node
from cachectl.layers.base.errors import FAILURES, LayerError
from cachectl.layers.base.text import plural
from cachectl.layers.core import codes, spelling
from cachectl.layers.core.entry import UNCOUNTED, Usage, unknown_words
from cachectl.layers.core.finding import FAILS, HARMLESS, RISKS, UNSAFE, WASTES, Code, Finding, Hazard, Severity
from cachectl.layers.core.layer import Layer, every_root, moved_to
from cachectl.layers.core.root import ENABLED, UNKNOWN, Root, Scope
from cachectl.layers.core.store import finding_of
from cachectl.layers.core.switch import Ability
from cachectl.layers.disk import place as places
from cachectl.layers.disk import plain, room, trust
from cachectl.layers.disk.place import Use
from cachectl.layers.host import launcher
from cachectl.layers.stores.old_locks import find_old_locks
from cachectl.verbs import verify

EXAMPLE = "cachectl doctor"
PLACE = ("--place", "DIR", "check whether a folder suits caches, before they are moved there", {"type": verbs.folder})
OPTIONS = (verbs.LAYERS, PLACE, verbs.VERBOSE_FINDINGS, verbs.PLACES, verbs.FORM)

_WORST_FIRST = tuple(Severity)
#: Free bytes and files: below the first limits nothing can be stored, below the second a program may run out of space.
_FULL = (1 << 20, 10)
_NEARLY_FULL = (16 << 20, 100)
#: This many empty files matter, because they use up a quota of files.
_MANY_FILES = 1000
#: Folders of this user, as shell words.
_OWN = '"$HOME/.cachectl"'
_TEMPORARY = '"$(mktemp -d)"'
#: The fix if no folder is known that suits a layer.
_JUDGE = "use another folder, after checking it with cachectl doctor --place DIR"
_KEEP = "docker run -v kernels:/kernels ..., with the variables that cachectl env --root /kernels prints"


class _Placed(NamedTuple):
    """A finding, the state that it describes, and the effect on its layer.

    Findings of one code about one ``state`` are joined. ``folder`` is the folder to which the fix moves the layer, as
    shell words; it is empty if the fix moves nothing.
    """

    state: object
    finding: Finding
    effect: str = ""
    folder: str = ""


class _Holding(NamedTuple):
    """A root of a layer, whether it is the layer's first and exists, and its usage or the error in counting it."""

    layer: Layer
    root: Root
    first: bool
    exists: bool
    usage: Usage
    error: Exception | None

    @property
    def is_filled(self) -> bool:
        """Return whether it holds anything, or cannot be counted."""
        usage = self.usage
        return self.error is not None or bool(usage.entries or usage.files or usage.orphan_files)

    @property
    def in_use(self) -> bool:
        """Return whether programs use it: an empty fallback, such as the temporary folder, is not in use."""
        return self.first or (self.exists and self.is_filled)

    @property
    def is_readable(self) -> bool:
        """Return whether its folder can be read."""
        problems = ((problem.code, problem.path) for problem in self.usage.problems)
        return self.error is None and (codes.UNREADABLE.name, self.root.path) not in problems

    @property
    def clearable(self) -> bool:
        """Return whether its content is known and can be removed."""
        return self.error is None and self.layer.abilities()[Ability.CLEAR] is None

    def finding(self, state: object, code: Code, severity: Severity | None, message: str, fix: str) -> _Placed:
        """Return a finding about this root."""
        return _Placed(state, code.finding(self.layer.name, self.root.path, message, fix, severity=severity))

    def moved(self, state: object, code: Code, hazard: Hazard, message: str, folder: str) -> _Placed:
        """Return a finding about this root, with a fix that moves the layer to ``folder``, which is already quoted."""
        fix = _move((self.layer.name,), folder) if folder else _JUDGE
        if (reason := self.layer.abilities()[Ability.RELOCATE]) is not None:
            fix, folder = f"nothing moves it: {reason}", ""
        placed = self.finding(state, code, hazard.severity, message, fix)
        return placed._replace(effect=hazard.message, folder=folder)

    def free_folder(self, *, local: bool = False) -> str:
        """Return a folder that suits the layer and has room, as shell words; empty if there is none.

        The one in the home folder is preferred, or if ``local`` a temporary one.
        """
        environment = self.layer.environment
        home, uses = environment.home_folder, self.layer.about.uses
        choices = [(home, _OWN), (environment.temporary, _TEMPORARY)]
        if local:
            choices.reverse()
        return next((words for folder, words in choices if places.serves(folder, uses, home)), "")


def doctor(stack: layer_set.LayerSet, layers: Iterable[str] = (), *, place: Path | None = None) -> listing.Findings:
    """Return the problems with this setup, the command that fixes each, and what was not checked.

    Full file systems come first, then the layers, the worst problems of each first. A state that affects several layers
    is one finding.

    :param layers: names; none means all, and broken plug-ins
    :param place: an absolute path: check only whether this folder suits the layers that can be moved
    :raises BadRequest: for an unknown layer
    """
    names = tuple(layers)
    if place is not None:
        return _judge(place, stack.named(names))
    roots = {layer: list(_holdings(layer)) for layer in stack.named(names)}
    found = list(_of_space([holding for of_layer in roots.values() for holding in of_layer]))
    for plugin in () if names else stack.broken:
        fix = f"fix or uninstall the plug-in {plugin['name']}"
        found.append(codes.PLUGIN.finding(plugin["name"], Path("*"), plugin["why"], fix))
    placed: list[_Placed] = []
    not_checked: dict[str, str] = {}
    for layer, of_layer in roots.items():
        # A problem with a variable that layers share is one state.
        diagnosed = (_Placed((finding.message, finding.fix), finding) for finding in spelling.diagnosed(layer))
        own = (
            *_guarded(layer, None, _of_roots(layer, of_layer)),
            *_guarded(layer, None, diagnosed, unread=not all(holding.is_readable for holding in of_layer)),
        )
        placed += sorted(own, key=lambda each: _WORST_FIRST.index(each.finding.severity))
        if unexamined := "; ".join(_unexamined(layer, of_layer)):
            not_checked[layer.name] = unexamined
    with suppress(*FAILURES):
        placed += (
            _Placed((finding.message, finding.fix), finding)
            for finding in spelling.unread(stack.named(()), {layer.name for layer in roots})
        )
    return listing.Findings((*found, *_joined(placed)), not_checked)


def _unexamined(layer: Layer, roots: Iterable[_Holding]) -> Iterator[str]:
    """Yield what was not examined, for a layer that holds anything."""
    filled = [holding for holding in roots if holding.is_filled]
    for holding in filled:
        for problem in holding.usage.problems:
            if problem.hides and problem.code != codes.UNREADABLE.name:
                yield f"{problem.path}: {problem.message}"
        if holding.usage.unknown_files:
            yield f"{holding.root.path}: {unknown_words(holding.usage.unknown_files)}"
    if filled:
        yield from layer.unexamined()


def _judge(folder: Path, layers: Iterable[Layer]) -> listing.Findings:
    """Return why a folder does not suit the layers that can be moved there."""
    roots: list[_Holding] = []
    placed: list[_Placed] = []

    def examine(layer: Layer) -> Iterator[_Placed]:
        moved = moved_to(layer, folder)
        holding = _Holding(moved, moved.roots()[0], True, False, UNCOUNTED, None)  # noqa: FBT003
        roots.append(holding)
        yield from _of_use(holding)
        yield from _of_sharing(holding)

    for layer in layers:
        if layer.about.scope is not Scope.USER or layer.abilities()[Ability.RELOCATE] is not None:
            continue
        for each in _guarded(layer, folder, examine(layer)):
            finding = each.finding
            # It would unset the variable that names the folder.
            if each.folder or finding.fix.startswith("unset "):
                finding = finding._replace(fix="name another folder", fix_tested=False)
            placed.append(each._replace(finding=finding, folder=""))
    return listing.Findings((*_of_space(roots), *_joined(placed)), {})


def _joined(placed: Iterable[_Placed]) -> Iterator[Finding]:
    """Yield one finding for each state: the most severe one of its layers, with the effects on all of them."""
    states: dict[object, list[_Placed]] = {}
    for each in placed:
        states.setdefault((each.finding.code, each.state), []).append(each)
    for same in states.values():
        worst = min(same, key=lambda each: _WORST_FIRST.index(each.finding.severity))
        finding, layers = worst.finding, tuple(dict.fromkeys(each.finding.layer for each in same))
        if effects := "; ".join(dict.fromkeys(each.effect for each in same if each.effect)):
            finding = finding._replace(message=f"{finding.message}: {effects}")
        if worst.folder:
            movable = dict.fromkeys(each.finding.layer for each in same if each.folder)
            finding = finding._replace(fix=_move(movable, worst.folder))
        yield finding._replace(layers=layers if len(layers) > 1 else None)


def _move(layers: Iterable[str], folder: str) -> str:
    """Return the shell command that moves layers to ``folder``, which is already quoted."""
    options = " ".join(f"--layer {layer}" for layer in layers)
    return f'eval "$(cachectl env --root {folder} {options} --shell sh)"'


def _holdings(layer: Layer) -> Iterator[_Holding]:
    """Yield the roots of a layer; if it is unknown whether one exists, reading it reports the error."""
    with suppress(*FAILURES):
        for number, root in enumerate(every_root(layer)):
            exists, usage, failure = True, UNCOUNTED, None
            with suppress(OSError):
                exists = root.exists
            try:
                usage = layer.store.usage(root) if exists else usage
            except FAILURES as error:
                failure = error
            yield _Holding(layer, root, not number, exists, usage, failure)


def _guarded(layer: Layer, path: Path | None, placed: Iterable[_Placed], *, unread: bool = False) -> Iterator[_Placed]:
    """Yield findings, and an error that ends them as one more; repeated errors are joined.

    Errors that the finding of an ``unread`` root explains are not repeated.
    """
    try:
        yield from placed
    except FAILURES as error:
        if not (unread and isinstance(error, (LayerError, OSError))):
            yield _Placed((layer, path), listing.failure(layer, path, error))


def _of_roots(layer: Layer, roots: Iterable[_Holding]) -> Iterator[_Placed]:
    first_failed = False
    for holding in roots:
        path = holding.root.path
        if first_failed and not holding.is_readable:
            # It is usually next to the first root, with the same cause.
            continue
        first_failed |= holding.first and not holding.is_readable
        if holding.error is not None:
            yield _unread(holding, listing.failure(layer, path, holding.error))
        unread = {problem.path: problem for problem in holding.usage.problems if problem.code == codes.UNREADABLE.name}
        yield from (_unread(holding, finding_of(layer.store, holding.root, problem)) for problem in unread.values())
        if holding.in_use:
            yield from (each for each in _guarded(layer, path, _of_place(holding)) if each.state not in unread)
        if holding.exists and holding.clearable and not layer.about.precious:
            fix, usage = f"cachectl prune --stale {layer.name}", holding.usage
            if usage.stale_entries:
                amount = plural(usage.stale_entries, "stale entry", "stale entries")
                message = f"{amount} of {usage.stale_bytes or 0:,} bytes, of a driver that was seen here and is gone"
                yield holding.finding(holding.root, codes.STALE, WASTES, message, fix)
            if usage.orphan_files:
                wastes = usage.orphan_bytes or usage.orphan_files >= _MANY_FILES
                amount = plural(usage.orphan_files, "leaked file")
                message = f"{amount} of {usage.orphan_bytes or 0:,} bytes, which nothing reads"
                yield holding.finding(holding.root, codes.LEAKED, WASTES if wastes else HARMLESS, message, fix)
    # Raises the error that kept roots from being listed.
    tuple(every_root(layer))


def _unread(holding: _Holding, finding: Finding) -> _Placed:
    """Return a finding about an unreadable path, with a fix that allows the library to write too."""
    judged = listing.judged(holding.layer, finding)
    place = finding.root if finding.key is None else finding.root / finding.key
    if not holding.first or finding.code != codes.UNREADABLE.name:
        return _Placed((holding.layer, place), judged)
    hazard = Hazard(judged.severity, "")
    if finding.key is None:
        hazard = holding.layer.about.uses.get(Use.WRITE, hazard)
    if not finding.fix.startswith("as "):
        return _Placed(place, judged, hazard.message)
    if holding.layer.abilities()[Ability.RELOCATE] is not None:
        return _Placed(place, finding, hazard.message)
    closed = trust.closed_by_another(place, holding.layer.environment.home_folder)
    message = f"cannot be read, because {closed.place} is closed to you{closed.owner}"
    return holding.moved(closed.place, codes.UNREADABLE, hazard, message, holding.free_folder())


# ---------------------------------------------------------------------- full file systems


def _of_space(roots: Iterable[_Holding]) -> Iterator[Finding]:
    """Report each full or nearly full file system or quota of a user's roots."""
    devices: dict[int, list[_Holding]] = {}
    for holding in roots:
        if holding.root.scope is Scope.USER and holding.in_use:
            with suppress(OSError):
                devices.setdefault(plain.nearest(holding.root.path).stat().st_dev, []).append(holding)
    for same in devices.values():
        with suppress(OSError):
            for free in room.room_at(same[0].root.path):
                yield from _shortage(same, free)


def _shortage(roots: list[_Holding], free: room.Room) -> Iterator[Finding]:
    grades = [
        sum(amount is not None and amount < limits[unit] for limits in (_FULL, _NEARLY_FULL))
        for unit, amount in enumerate(free[:2])
    ]
    if not any(grades):
        return
    short = [f"{free[0]:,} more bytes"] if grades[0] else []
    short += [f"{free[1]:,} more files"] if grades[1] else []
    unit = "files" if grades[1] > grades[0] else "bytes"

    def amount(holding: _Holding) -> int:
        has_any = holding.usage.entries or holding.usage.orphan_files
        is_clearable = bool(has_any) and holding.clearable and not holding.layer.about.precious
        return is_clearable * sum(getattr(holding.usage, name) or 0 for name in (unit, f"orphan_{unit}"))

    largest = max(roots, key=amount)
    owner, fix = "no layer holds anything there that can be cleared", "remove other files there"
    if most := amount(largest):
        owner = f"{largest.layer.name} holds most of what can be cleared there, {most:,} {unit}"
        fix = f"cachectl purge {largest.layer.name}"
    severity = FAILS if max(grades) > 1 else RISKS
    left, needed = (free[0], _FULL[0]) if unit == "bytes" else (free[1], _FULL[1])
    # If clearing everything would not help, move the layers.
    if (left or 0) + sum(map(amount, roots)) < needed and (folder := largest.free_folder()):
        movable = (holding.layer for holding in roots if holding.layer.abilities()[Ability.RELOCATE] is None)
        fix = _move(dict.fromkeys(layer.name for layer in movable), folder)
    message = f"{free[2]} has room for {' and '.join(short)}; {owner}"
    yield largest.finding(None, codes.FULL, severity, message, fix).finding


# ---------------------------------------------------------------------- places


def _of_place(holding: _Holding) -> Iterator[_Placed]:
    """Report old locks and problems with the place of a root; problems of use only if the layer is on."""
    is_on = True
    with suppress(*FAILURES):
        is_on = holding.layer.state().condition in (ENABLED, UNKNOWN)
    is_needed = is_on or holding.layer.about.needs_place
    yield from (each for each in _of_use(holding) if is_needed or each.finding.severity is UNSAFE)
    if is_on:
        yield from _of_sharing(holding)
        keeper = processes.lost_with(holding.layer.environment, holding.root.path)
        if keeper is not None and holding.root.scope is Scope.USER:
            fix = _KEEP if keeper.startswith("the container") else "name a folder on a disk"
            yield holding.finding(keeper, codes.VOLATILE, None, f"is lost with {keeper}", fix)
    for finding in find_old_locks(holding.layer.store, holding.root) if holding.exists else ():
        severity = finding.severity if is_on else HARMLESS
        yield _Placed((finding.root, finding.key), finding._replace(severity=severity))


def _of_use(holding: _Holding) -> Iterator[_Placed]:
    """Report why the library cannot use a root, and who else can change its content."""
    layer, root, environment = holding.layer, holding.root, holding.layer.environment
    is_used = holding.first and holding.is_readable and root.scope is Scope.USER
    uses = layer.about.uses if is_used else {}
    written = layer.store.written(root) if holding.exists and Use.CHANGE in uses else ()
    for obstacle in places.find_obstacles(root.path, uses, environment.home_folder, written):
        code, hazard = codes.COMMON[obstacle.code], Hazard(UNSAFE, "")
        if obstacle.use is not None:
            # All other uses are kinds of writing.
            effect = uses.get(obstacle.use) or uses.get(Use.WRITE)
            if effect is None:
                continue
            hazard = effect
        elif code is codes.OWNER and root.scope is not Scope.USER:
            continue
        fix = obstacle.command
        if code is codes.NO_FOLDER and fix.startswith("mv ") and environment.get(root.source) is not None:
            fix = f"unset {root.source}"
        elif code is codes.OWNER and environment.superuser and (user := environment.get("SUDO_USER")):
            fix = f"use sudo -H instead of sudo -E, which keeps the home of {user}"
        if fix:
            placed = holding.finding(obstacle.place, code, hazard.severity, obstacle.message, fix)
            yield placed._replace(effect=hazard.message)
        else:
            yield holding.moved(obstacle.place, code, hazard, obstacle.message, holding.free_folder())


def _of_sharing(holding: _Holding) -> Iterator[_Placed]:
    """Report a root on a network file system, or one that the ranks of this job share; one folder fixes both."""
    layer, root, environment = holding.layer, holding.root, holding.layer.environment
    kind, job = processes.network_file_system(environment, root.path), launcher.parallel_job(environment)
    code, states, hazards = codes.NETWORK, list[str](), list[Hazard]()
    if kind is not None and (hazard := layer.about.on_network) is not None:
        states.append(f"is on a network file system ({kind})")
        hazards.append(hazard)
    # Tuning results cannot be rebuilt, so they stay in the home folder.
    folder = '"$HOME/.cachectl/$(hostname)"' if layer.about.precious else holding.free_folder(local=True)
    if job is not None and (hazard := layer.about.among_ranks) is not None and not _apart(environment, root.path):
        several = "the ranks" if job.ranks is None else f"the {job.ranks} ranks"
        script = "a conftest.py, by os.environ" if "XDIST" in job.rank_variable else "the script that each rank runs"
        where = "" if layer.abilities()[Ability.RELOCATE] else f" (fix this in {script})"
        code, folder = codes.RANKS, launcher.own_folder(environment, job)
        states.append(f"{several} of this job share it{where}")
        hazards.append(hazard)
    if hazards:
        severity = min((hazard.severity for hazard in hazards), key=_WORST_FIRST.index)
        hazard = Hazard(severity, "; ".join(hazard.message for hazard in hazards))
        yield holding.moved(root.path, code, hazard, "; ".join(states), folder)


def _apart(environment: Environment, path: Path) -> bool:
    """Return whether a root is only this rank's: a name in its path, below the home folder, ends with the rank.

    The rank within the node counts on a local disk; elsewhere it counts only if the name contains the node's name too.
    """
    home, machine = environment.home_folder, node()
    local = processes.network_file_system(environment, path) is None
    for part in path.relative_to(home).parts if path.is_relative_to(home) else path.parts:
        end = re.search(r"[0-9]{1,12}$", part)
        within = launcher.LOCAL_RANKS if local or machine in part else frozenset[str]()
        variables = {rank for _, rank in (*launcher.RANKS, *launcher.OTHERS.values())} - launcher.LOCAL_RANKS | within
        if end is not None and int(end[0]) in {launcher.number_of(environment, name) for name in variables}:
            return True
    return False


def run(request: verbs.Request) -> listing.Findings:
    """Carry out ``cachectl doctor``."""
    folder = request.options.place
    with request.output.progress("examining"):
        place = None if folder is None else request.environment.absolute(folder)
        return doctor(request.stack, request.options.layers, place=place)


table, of_users = verify.table, verify.of_users


def show(result: listing.Findings, request: verbs.Request) -> Iterator[object]:
    """Yield each finding, and what was not checked."""
    folder = request.options.place
    nothing = "no problem with this setup was found; cachectl verify checks the entries"
    nothing = nothing if folder is None else f"{folder} suits the layers"
    yield from verify.findings_lines(result, nothing, verbose=request.options.verbose)
    if result.failed and folder is None:
        yield "cachectl verify checks the entries"
    yield from verify.not_checked_lines(result.not_checked)
    if request.options.verbose:
        limits = "quotas that only a server knows, and programs of other users or on other machines"
        yield from verify.not_checked_lines({"every layer": limits})
