"""``cachectl doctor``: find problems of this set-up, each with the command that fixes it.

Each layer reports its own problems (:meth:`Layer.diagnose`). This module checks what holds for every layer: full file
systems, who may write a root, network file systems, roots that ranks share, stale entries and leaked files. It only
reads; damage is the affair of ``verify``.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cachectl import layer_set, listing, verbs
from cachectl.layers.base import processes
from cachectl.layers.base.environment import Environment, node, user_name
from cachectl.layers.base.errors import FAILURES, LayerError
from cachectl.layers.base.text import plural
from cachectl.layers.core import spelling
from cachectl.layers.core.entry import UNCOUNTED, Usage
from cachectl.layers.core.finding import FAILS, HARMLESS, RISKS, UNSAFE, WASTES, Finding, Hazard, Severity
from cachectl.layers.core.layer import Layer, every_root
from cachectl.layers.core.root import ENABLED, UNKNOWN, Root, Scope
from cachectl.layers.core.store import finding_of
from cachectl.layers.core.switch import Ability
from cachectl.layers.disk import plain, room, trust
from cachectl.layers.host import launcher
from cachectl.verbs import verify

EXAMPLE = "cachectl doctor"
OPTIONS = (verbs.LAYERS, verbs.PLACES, verbs.FORM)

_WORST_FIRST = tuple(Severity)
#: Free bytes and files: below the first nothing can be stored, below the second the next program may run out of space.
_FULL = (1 << 20, 10)
_NEARLY_FULL = (16 << 20, 100)
#: This many empty files have no bytes, but they use up a quota of files.
_MANY_FILES = 1000
#: Shell words for folders of this user.
_OWN = '"$HOME/.cachectl"'
_TEMPORARY = '"$(mktemp -d)"'

#: A finding, and the place that it is about; of several layers with the same problem of a place, one reports it.
Placed = tuple[object, Finding]


class _Held(NamedTuple):
    """A root of a layer, whether it is the layer's first and exists, and what it holds, or the error of counting it."""

    layer: Layer
    root: Root
    first: bool
    exists: bool
    usage: Usage
    error: Exception | None

    @property
    def in_use(self) -> bool:
        """Return whether programs use it: a fallback that is empty, such as the temporary folder, is not in use."""
        usage = self.usage
        is_filled = self.error is not None or usage.entries or usage.files or usage.orphan_files
        return self.first or (self.exists and bool(is_filled))

    @property
    def clearable(self) -> bool:
        """Return whether what is there is known, and can be removed."""
        return self.error is None and self.layer.abilities()[Ability.CLEAR] is None

    def finding(self, place: object, severity: Severity, code: str, message: str, fix: str) -> Placed:
        """Return a finding about this root."""
        return place, Finding(self.layer.name, self.root.path, None, severity, code, message, fix)

    def elsewhere(self, folder: str) -> str:
        """Return the shell command that moves the layer to ``folder``, which is already quoted."""
        if (reason := self.layer.abilities()[Ability.RELOCATE]) is not None:
            return f"nothing moves it: {reason}"
        return f'eval "$(cachectl env --root {folder} --layer {self.layer.name} --shell sh)"'


def doctor(stack: layer_set.LayerSet, layers: Iterable[str] = ()) -> listing.Findings:
    """Return the problems of this set-up, each with the command that fixes it.

    Full file systems come first, then layer by layer, the worst of each first.

    :param layers: names; none means all, and broken plug-ins
    :raises BadRequest: for an unknown layer
    """
    names = tuple(layers)
    roots = {layer: list(_held(layer)) for layer in stack.named(names)}
    found = list(_of_space([held for of_layer in roots.values() for held in of_layer]))
    for plugin in () if names else stack.broken:
        name, why = plugin["name"], plugin["why"]
        fix = f"fix or uninstall the plug-in {name}"
        found.append(Finding(name, Path("*"), None, HARMLESS, "plugin", why, fix))
    said: dict[object, Finding] = {}
    for layer, of_layer in roots.items():
        before = len(said)
        for place, finding in (*_guarded(layer, None, _of_roots(layer, of_layer)), *_of_layer(layer, of_layer)):
            # Another layer may have reported the same problem of a place.
            said.setdefault((finding.code, place), finding)
        found += sorted([*said.values()][before:], key=lambda finding: _WORST_FIRST.index(finding.severity))
    with suppress(*FAILURES):
        found += spelling.unread(roots)
    return listing.Findings(tuple(found))


def _held(layer: Layer) -> Iterator[_Held]:
    """Yield the roots of a layer; one that cannot be asked whether it exists is read, which reports the error."""
    with suppress(*FAILURES):
        for number, root in enumerate(every_root(layer)):
            exists, usage, failure = True, UNCOUNTED, None
            with suppress(OSError):
                exists = root.exists
            try:
                usage = layer.store.usage(root) if exists else usage
            except FAILURES as error:
                failure = error
            yield _Held(layer, root, not number, exists, usage, failure)


def _guarded(layer: Layer, path: Path | None, placed: Iterable[Placed]) -> Iterator[Placed]:
    """Yield findings, and the error that ends them as one more; of an error met several times, one is shown."""
    try:
        yield from placed
    except FAILURES as error:
        yield (layer, path), listing.failure(layer, path, error)


def _of_layer(layer: Layer, roots: Iterable[_Held]) -> Iterator[Placed]:
    """Yield what the layer itself reports."""
    try:
        # Layers that share a variable report its problem once.
        yield from (((finding.message, finding.fix), finding) for finding in spelling.diagnosed(layer))
    except FAILURES as error:
        # The finding of a root that cannot be read names it.
        if not isinstance(error, (LayerError, OSError)) or all(held.error is None for held in roots):
            yield (layer, None), listing.failure(layer, None, error)


def _of_roots(layer: Layer, roots: Iterable[_Held]) -> Iterator[Placed]:
    for held in roots:
        path = held.root.path
        if held.error is not None:
            yield (layer, path), listing.failure(layer, path, held.error)
        for problem in held.usage.problems:
            if problem.code == "unreadable":
                yield (layer, problem.path), finding_of(layer.store, held.root, problem)
        if held.exists and held.in_use and hasattr(os, "geteuid"):
            yield from _guarded(layer, path, _of_writers(held))
        # The library will make its first root at its first use.
        if held.in_use:
            yield from _guarded(layer, path, _of_surroundings(held))
        if held.exists and held.clearable and not layer.about.precious:
            yield from _of_waste(held)
    # The error that kept them from being listed.
    tuple(every_root(layer))


def _of_waste(held: _Held) -> Iterator[Placed]:
    root, usage, fix = held.root, held.usage, f"cachectl prune --stale {held.layer.name}"
    if usage.stale_entries:
        amount = plural(usage.stale_entries, "stale entry", "stale entries")
        message = f"{amount} of {usage.stale_bytes or 0:,} bytes, whose driver was seen here and has gone"
        yield held.finding(root, WASTES, "stale", message, fix)
    if usage.orphan_files:
        wastes = usage.orphan_bytes or usage.orphan_files >= _MANY_FILES
        amount = plural(usage.orphan_files, "leaked file")
        message = f"{amount} of {usage.orphan_bytes or 0:,} bytes, which nothing reads"
        yield held.finding(root, WASTES if wastes else HARMLESS, "leaked", message, fix)


# ---------------------------------------------------------------------- full file systems


def _of_space(roots: Iterable[_Held]) -> Iterator[Finding]:
    """Report each file system or quota of a user's root that is full or nearly full."""
    devices: dict[int, list[_Held]] = {}
    for held in roots:
        if held.root.scope is Scope.USER and held.in_use:
            with suppress(OSError):
                devices.setdefault(plain.nearest(held.root.path).stat().st_dev, []).append(held)
    for same in devices.values():
        with suppress(OSError):
            for free in room.room_at(same[0].root.path):
                yield from _shortage(same, free)


def _shortage(roots: list[_Held], free: room.Room) -> Iterator[Finding]:
    grades = [
        sum(amount is not None and amount < limits[unit] for limits in (_FULL, _NEARLY_FULL))
        for unit, amount in enumerate(free[:2])
    ]
    if not any(grades):
        return
    short = [f"{free[0]:,} more bytes"] if grades[0] else []
    short += [f"{free[1]:,} more files"] if grades[1] else []
    unit = "files" if grades[1] > grades[0] else "bytes"

    def amount(held: _Held) -> int:
        is_clearable = held.clearable and not held.layer.about.precious
        return is_clearable * sum(getattr(held.usage, name) or 0 for name in (unit, f"orphan_{unit}"))

    largest = max(roots, key=amount)
    owner, fix = "no layer holds anything there that can be cleared", "remove other files there"
    if most := amount(largest):
        owner = f"{largest.layer.name} holds most of what can be cleared there, {most:,} {unit}"
        fix = f"cachectl purge {largest.layer.name}"
    severity = FAILS if max(grades) > 1 else RISKS
    yield largest.finding(None, severity, "full", f"{free[2]} has room for {' and '.join(short)}; {owner}", fix)[1]


# ---------------------------------------------------------------------- network file systems and shared roots


def _of_surroundings(held: _Held) -> Iterator[Placed]:
    """Report problems with the place of an active layer's root, whether or not the root exists yet."""
    layer, root, environment = held.layer, held.root, held.layer.environment
    with suppress(*FAILURES):
        if layer.state().condition not in (ENABLED, UNKNOWN):
            return
    is_reachable = held.first and held.error is None
    if is_reachable and root.scope is Scope.USER and layer.about.when_closed is not None:
        yield from _of_use(held, layer.about.when_closed)
    kind, job = processes.network_file_system(environment, root.path), launcher.parallel_job(environment)
    problems: dict[str, tuple[Severity, str]] = {}
    if kind is not None and (hazard := layer.about.on_network) is not None:
        problems["network"] = hazard.severity, f"lies on a network file system ({kind}): {hazard.message}"
    if job is not None and (hazard := layer.about.among_ranks) is not None and not _apart(environment, root.path):
        several = "the ranks" if job.ranks is None else f"the {job.ranks} ranks"
        script = "a conftest.py, by os.environ" if "XDIST" in job.rank_variable else "the script that each rank runs"
        how = "" if layer.abilities()[Ability.RELOCATE] else f"; fix it in {script}"
        problems["ranks"] = hazard.severity, f"{several} of this job share it: {hazard.message}{how}"
    if problems:
        # One folder cures both.
        own = _TEMPORARY if job is None else launcher.own_folder(environment, job)
        severities, texts = zip(*problems.values(), strict=True)
        severity, code = min(severities, key=_WORST_FIRST.index), [*problems][-1]
        yield held.finding(root.path, severity, code, "; ".join(texts), held.elsewhere(own))


def _apart(environment: Environment, path: Path) -> bool:
    """Return whether a root is this rank's own: whether a folder's name, the home's path apart, ends with the rank.

    The rank within the node counts on a local disk, and elsewhere only if the name has the node too.
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


# ---------------------------------------------------------------------- unusable roots


def _of_use(held: _Held, hazard: Hazard) -> Iterator[Placed]:
    """Report why nothing can be stored in a root: its path is blocked by something else, or is not writable."""
    root, environment = held.root, held.layer.environment
    place = plain.nearest(root.path, follow=False)
    quoted, itself = shlex.quote(str(place)), place == root.path
    if not place.is_dir():
        fix = f"mv {quoted} {shlex.quote(f'{place}.aside')}"
        if place.is_symlink() and not place.exists() and (target := os.path.realpath(place)) != str(place):
            fix = f"mkdir -p {shlex.quote(target)}"
        elif environment.get(root.source) is not None:
            fix = f"unset {root.source}"
        which = "there" if itself else f"at {place}"
        message = f"something that is not a directory is {which}, so {hazard.message}"
        yield held.finding(place, hazard.severity, "no-folder", message, fix)
    elif not _writable_for_us(place):
        (owner, command, _), status = trust.closed_by_another(place, environment.home_folder), place.stat()
        state = "is" if itself else f"cannot be made, because {place} is"
        message = f"{state} not writable for you, so {hazard.message}{owner}"
        fix = held.elsewhere(_OWN if _writable_for_us(environment.home_folder) else _TEMPORARY)
        if command:
            fix = command
        elif hasattr(os, "geteuid") and status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWUSR:
            fix = f"chmod u+w {quoted}"
        yield held.finding(place, hazard.severity, "closed", message, fix)


def _writable_for_us(place: Path) -> bool:
    return os.access(place, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


# ---------------------------------------------------------------------- other writers


def _of_writers(held: _Held) -> Iterator[Placed]:
    """Report who else may write or replace a root: a cache is code, which runs as its user."""
    root = held.root
    real = Path(os.path.realpath(root.path))
    owner = real.stat().st_uid
    if root.scope is Scope.USER and owner not in (0, os.geteuid()):
        message = f"belongs to {user_name(owner)}, whose code runs as you"
        yield held.finding(root.path, UNSAFE, "owner", message, held.elsewhere(_OWN))
    for folder in trust.open_to_others(root.path):
        status = folder.stat()
        whose = "everybody" if status.st_mode & stat.S_IWOTH else f"the group {_group_name(status.st_gid)}"
        message = f"is writable by {whose}, who can put code there that runs as you"
        if folder != real:
            message = f"lies below {folder}, which is writable by {whose}, who can put another folder in its place"
        fix = f"chmod go-w {shlex.quote(str(folder))}"
        if status.st_mode & stat.S_ISVTX:
            # Writable by everybody on purpose.
            fix = held.elsewhere(_OWN)
        elif os.geteuid() not in (0, status.st_uid):
            fix = f"as {user_name(status.st_uid)}: {fix}"
        yield held.finding((status.st_dev, status.st_ino), UNSAFE, "writable", message, fix)


def _group_name(number: int) -> str:
    import grp

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


# ---------------------------------------------------------------------- the command line


def run(request: verbs.Request) -> listing.Findings:
    """Carry out ``cachectl doctor``."""
    with request.output.progress("examining"):
        return doctor(request.stack, request.options.layers)


table, OF_USERS = verify.table, verify.OF_USERS


def show(result: listing.Findings, _request: verbs.Request) -> Iterator[object]:
    """Yield each finding."""
    return verify.findings_lines(result, "nothing is wrong with this set-up; cachectl verify checks the entries")
