"""``cachectl doctor``: find problems of this set-up, each with the command that fixes it.

Each layer reports its own problems (:meth:`Layer.diagnose`) and damage. This module checks what holds for every layer:
full file systems, who may write a root, network file systems, roots that ranks share, stale entries and leaked files.
It only reads.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.findings import Findings, damage, failure, lines, table
from cachectl.layers.base.environment import user_name
from cachectl.layers.base.errors import FAILURES, LayerError, plural
from cachectl.layers.base.facts import Ability, Condition, Finding, Hazard, Root, Scope, Severity, Usage
from cachectl.layers.disk.presence import nearest
from cachectl.layers.disk.room import room_at
from cachectl.layers.disk.trust import closed_by_another, open_to_others
from cachectl.layers.host.launcher import RANKS, number_of
from cachectl.layers.host.mounts import network_file_system
from cachectl.options import FORM, LAYERS, PLACES, PYTHON, Request

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer
    from cachectl.layers.base.registry import Broken

__all__ = ["OPTIONS", "diagnosis", "doctor", "job_of", "run", "show", "table"]

OPTIONS: Final = (LAYERS, PYTHON, PLACES, FORM)

_WORST_FIRST: Final = (
    Severity.UNSAFE,
    Severity.FAILS,
    Severity.RISKS,
    Severity.RECOMPILES,
    Severity.HEALS,
    Severity.WASTES,
    Severity.HARMLESS,
)
#: Free bytes and files: below the first nothing can be stored, below the second the next program may run out of space.
_FULL: Final = (1 << 20, 10)
_NEARLY_FULL: Final = (16 << 20, 100)
#: This many empty files have no bytes, but they use up a quota of files.
_MANY_FILES: Final = 1000
#: Ranks within a node: these distinguish roots if each node has its own disk.
_LOCAL_RANKS: Final = (
    *("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID"),
    *("FLUX_TASK_LOCAL_ID", "MPI_LOCALRANKID"),
)

#: A finding, and the place that it is about; of several layers with the same problem of a place, one reports it.
Placed = tuple[object, Finding]


@dataclass(frozen=True, slots=True)
class RankOfJob:
    """The parallel job of the environment: the number of ranks if known, and the variable with the rank."""

    ranks: int | None
    variable: str

    @property
    def own_folder(self) -> str:
        """Return a shell word for a folder of each rank; the shell stops with an error if the variable is not set."""
        node = "$(hostname)-" if self.variable in _LOCAL_RANKS else ""
        return f'"$HOME/.cachectl/rank{node}${{{self.variable}:?}}"'


@dataclass(frozen=True, slots=True)
class _Held:
    """A root of a layer, whether it is the layer's first, and what it holds, or the error of counting it."""

    layer: Layer
    root: Root
    first: bool
    exists: bool
    usage: Usage | Exception

    @property
    def in_use(self) -> bool:
        """Return whether programs use it: a fallback that is empty, such as the temporary folder, is not in use."""
        if self.first or not self.exists or not isinstance(self.usage, Usage):
            return self.first or self.exists
        return bool(self.usage.entries or self.usage.files or self.usage.orphan_files)


def doctor(stack: LayerSet, layers: Iterable[str] = ()) -> Findings:
    """Return the problems of the named layers, or of all and of plug-ins, each with the command that fixes it."""
    named = tuple(layers)
    return diagnosis(stack.named(named), () if named else stack.broken)


def diagnosis(layers: Iterable[Layer], broken: Iterable[Broken] = ()) -> Findings:
    """Return the findings: full file systems first, then layer by layer, the worst of each first."""
    roots = {layer: list(_held(layer)) for layer in layers}
    found = list(_of_space([held for of_layer in roots.values() for held in of_layer]))
    for plugin in broken:
        fix = f"fix or uninstall the plug-in {plugin.name}"
        found.append(Finding(plugin.name, Path("*"), None, Severity.HARMLESS, "plugin", plugin.why, fix))
    said: set[object] = set()
    for layer, held in roots.items():
        of_layer: list[Finding] = []
        for place, finding in _everything(layer, held):
            # Several attempts to read one thing fail with messages of their own.
            message = None if finding.code == "unreadable" else finding.message
            identity = (finding.code, place) if place else (finding.layer, finding.root, finding.key, message)
            if identity not in said:
                said.add(identity)
                of_layer.append(finding)
        found += sorted(of_layer, key=lambda finding: _WORST_FIRST.index(finding.severity))
    return Findings(tuple(found), any(finding.severity is not Severity.HARMLESS for finding in found))


def _held(layer: Layer) -> Iterator[_Held]:
    """Yield the roots of a layer; one that cannot be asked whether it exists is read, which reports the error."""
    # `verify` reports the error of a layer whose roots are unknown.
    with suppress(*FAILURES):
        for number, root in enumerate(layer.roots()):
            exists = True
            with suppress(OSError):
                exists = root.exists
            try:
                usage: Usage | Exception = layer.store.usage(root) if exists else Usage()
            except FAILURES as error:
                usage = error
            yield _Held(layer, root, not number, exists, usage)


def _everything(layer: Layer, roots: Iterable[_Held]) -> Iterator[Placed]:
    found: list[Placed] = []
    unknown: Exception | None = None
    try:
        # Layers that share a variable report its problem once.
        found.extend(((finding.message, finding.fix), finding) for finding in layer.diagnose())
    except FAILURES as error:
        unknown = error
    # First, since those of `verify` name the command that fixes them.
    found += ((None, finding) for finding in damage((layer,)).findings)
    for held in roots:
        if held.exists:
            found += _of_root(held)
        elif held.first:
            # The library will make this root at its first use.
            found += _of_surroundings(layer, held.root, reachable=True)
    # The finding of a root that cannot be read names it.
    named = any(finding.code == "unreadable" for _, finding in found) and isinstance(unknown, (LayerError, OSError))
    if unknown is not None and not named:
        found.append((None, failure(layer, Path("*"), unknown)))
    yield from found


def _of_root(held: _Held) -> Iterator[Placed]:
    layer, root, usage = held.layer, held.root, held.usage
    counted = isinstance(usage, Usage)
    if isinstance(usage, Usage):
        # `verify` may not meet this error.
        yield from ((None, layer.store.to_finding(root, one)) for one in usage.problems if one.code == "unreadable")
    else:
        yield None, failure(layer, root.path, usage)
    if held.in_use:
        try:
            if hasattr(os, "geteuid"):
                yield from _of_writers(layer, root)
        except FAILURES as error:
            yield None, failure(layer, root.path, error)
        yield from _of_surroundings(layer, root, reachable=held.first and counted)
    if isinstance(usage, Usage) and layer.abilities()[Ability.CLEAR] is None:
        yield from ((None, finding) for finding in _of_content(layer, root, usage))


# ---------------------------------------------------------------------- full file systems


def _of_space(roots: Iterable[_Held]) -> Iterator[Finding]:
    """Report each file system or quota of a user's root that is full or nearly full."""
    devices: dict[int, list[_Held]] = {}
    for held in roots:
        if held.root.scope is Scope.USER and held.in_use:
            with suppress(OSError):
                devices.setdefault(nearest(held.root.path).stat().st_dev, []).append(held)
    for there in devices.values():
        with suppress(OSError):
            for room in room_at(there[0].root.path):
                yield from _shortage(there, room.source, (room.bytes, room.files))


def _shortage(roots: Iterable[_Held], source: str, free: tuple[int | None, int | None]) -> Iterator[Finding]:
    grades = [
        sum(amount is not None and amount < limits[unit] for limits in (_FULL, _NEARLY_FULL))
        for unit, amount in enumerate(free)
    ]
    if not any(grades):
        return
    unit = grades[1] > grades[0]
    short = [
        f"{amount:,} more {word}" for amount, word, grade in zip(free, ("bytes", "files"), grades, strict=True) if grade
    ]
    sizes: dict[str, int] = {}
    for held in roots:
        layer, usage = held.layer, held.usage
        if isinstance(usage, Usage) and not layer.about.precious and layer.abilities()[Ability.CLEAR] is None:
            held_there = (usage.files, usage.orphan_files) if unit else (usage.bytes, usage.orphan_bytes)
            sizes[layer.name] = sizes.get(layer.name, 0) + sum(amount or 0 for amount in held_there)
    message = f"{source} has room for {' and '.join(short)}"
    largest = max(sizes, key=sizes.__getitem__, default="")
    if sizes.get(largest):
        fix = f"cachectl purge {largest}"
        most = f"{sizes[largest]:,} {'files' if unit else 'bytes'}"
        message += f"; {largest} holds most of what can be cleared there, {most}"
    else:
        fix = "remove other files there"
        message += "; no layer holds anything there that can be cleared"
    place = next((held for held in roots if held.layer.name == largest), next(iter(roots)))
    severity = Severity.FAILS if max(grades) > 1 else Severity.RISKS
    yield Finding(place.layer.name, place.root.path, None, severity, "full", message, fix)


# ---------------------------------------------------------------------- stale entries and orphans


def _of_content(layer: Layer, root: Root, usage: Usage) -> Iterator[Finding]:
    fix = f"cachectl prune --stale {layer.name}"
    if usage.stale_entries:
        amount = plural(usage.stale_entries, "stale entry", "stale entries")
        message = f"{amount} of {usage.stale_bytes or 0:,} bytes, which no known Python or driver can hit"
        yield Finding(layer.name, root.path, None, Severity.WASTES, "stale", message, fix)
    if usage.orphan_files:
        orphan_bytes = usage.orphan_bytes or 0
        harm = orphan_bytes or usage.orphan_files >= _MANY_FILES
        severity = Severity.WASTES if harm else Severity.HARMLESS
        amount = plural(usage.orphan_files, "leaked file")
        message = f"{amount} of {orphan_bytes:,} bytes, which nothing reads"
        yield Finding(layer.name, root.path, None, severity, "leaked", message, fix)


# ---------------------------------------------------------------------- network file systems and shared roots


def _of_surroundings(layer: Layer, root: Root, *, reachable: bool) -> Iterator[Placed]:
    """Report problems with the place of an active layer's root, whether or not the root exists yet."""
    if not _takes_part(layer):
        return
    try:
        if reachable and root.scope is Scope.USER and layer.about.when_closed is not None:
            yield from _of_use(layer, root, layer.about.when_closed)
        yield from _of_network(layer, root)
        yield from _of_ranks(layer, root)
    except FAILURES as error:
        yield None, failure(layer, root.path, error)


def _takes_part(layer: Layer) -> bool:
    try:
        return layer.state().condition in (Condition.ENABLED, Condition.UNKNOWN)
    except FAILURES:
        return True


def _of_network(layer: Layer, root: Root) -> Iterator[Placed]:
    kind = network_file_system(root.path, mounts=layer.environment.mounts)
    hazard = layer.about.on_network
    if kind is not None and hazard is not None:
        message = f"lies on a network file system ({kind}): {hazard.message}"
        fix = _elsewhere(layer, '"$(mktemp -d)"')
        yield root.path, Finding(layer.name, root.path, None, hazard.severity, "network", message, fix)


def _of_ranks(layer: Layer, root: Root) -> Iterator[Placed]:
    job, hazard = job_of(layer.environment), layer.about.among_ranks
    if job is None or hazard is None or _apart(layer.environment, root.path):
        return
    several = "the ranks" if job.ranks is None else f"the {job.ranks} ranks"
    message = f"{several} of this job share it: {hazard.message}"
    if layer.abilities()[Ability.RELOCATE] is None:
        message += "; fix it in the script that each rank runs"
    fix = _elsewhere(layer, job.own_folder)
    yield root.path, Finding(layer.name, root.path, None, hazard.severity, "ranks", message, fix)


def _elsewhere(layer: Layer, folder: str) -> str:
    """Return the shell command that moves a layer to ``folder``, which is already quoted."""
    if (reason := layer.abilities()[Ability.RELOCATE]) is not None:
        return f"nothing moves it: {reason}"
    return f'eval "$(cachectl env --root {folder} --layer {layer.name} --shell sh)"'


def job_of(environment: Environment) -> RankOfJob | None:
    """Return the job of several ranks that the variables describe; ``None`` outside of one."""
    for size, rank in RANKS:
        ranks, own = number_of(environment, size), number_of(environment, rank)
        if (ranks or 0) > 1 or (own or 0) > 0:
            return RankOfJob(ranks, rank)
    return None


def _apart(environment: Environment, path: Path) -> bool:
    """Return whether a root is this rank's own: whether a folder's name, the home's path apart, ends with the rank.

    The rank within the node counts on a local disk, and elsewhere only if the path also names the node.
    """
    local = network_file_system(path, mounts=environment.mounts) is None
    home = environment.home_folder
    for part in path.relative_to(home).parts if path.is_relative_to(home) else path.parts:
        end = re.search(r"[0-9]{1,12}$", part)
        variables = {rank for _, rank in RANKS} - set(_LOCAL_RANKS)
        if local or platform.node() in part:
            variables |= set(_LOCAL_RANKS)
        if end is not None and int(end[0]) in {number_of(environment, name) for name in variables}:
            return True
    return False


# ---------------------------------------------------------------------- unusable roots


def _of_use(layer: Layer, root: Root, hazard: Hazard) -> Iterator[Placed]:
    """Report why nothing can be stored in a root: its path is blocked by something else, or is not writable."""
    place = nearest(root.path, follow=False)
    if not place.is_dir():
        which = "there" if place == root.path else f"at {place}"
        message = f"something that is not a directory is {which}, so {hazard.message}"
        fix = _make_way(layer, root, place)
        yield place, Finding(layer.name, root.path, None, hazard.severity, "no-folder", message, fix)
    elif not _writable_for_us(place):
        state = "is" if place == root.path else f"cannot be made, because {place} is"
        home = layer.environment.home_folder
        closed = closed_by_another(place, home)
        owned = f"; it belongs to {closed.owner}" if closed else ""
        message = f"{state} not writable for you, so {hazard.message}{owned}"
        fix = f"chmod u+w {shlex.quote(str(place))}"
        if closed and closed.command:
            fix = closed.command
        elif not _forbidden_by_mode(place):
            fix = _elsewhere(layer, '"$HOME/.cachectl"' if _writable_for_us(home) else '"$(mktemp -d)"')
        yield place, Finding(layer.name, root.path, None, hazard.severity, "closed", message, fix)


def _make_way(layer: Layer, root: Root, place: Path) -> str:
    """Return the command that fixes a root whose path leads to, or through, something other than a folder."""
    quoted = shlex.quote(str(place))
    if place.is_symlink() and not place.exists() and (target := os.path.realpath(place)) != str(place):
        return f"mkdir -p {shlex.quote(target)}"
    if layer.environment.get(root.source) is not None:
        return f"unset {root.source}"
    return f"mv {quoted} {shlex.quote(f'{place}.aside')}"


def _writable_for_us(place: Path) -> bool:
    return os.access(place, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def _forbidden_by_mode(place: Path) -> bool:
    """Return whether the mode of a folder of this user denies its owner to write."""
    status = place.stat()
    return hasattr(os, "geteuid") and status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWUSR


# ---------------------------------------------------------------------- other writers


def _of_writers(layer: Layer, root: Root) -> Iterator[Placed]:
    """Report who else may write or replace a root: a cache is code, which runs as its user."""
    real = Path(os.path.realpath(root.path))
    owner = real.stat().st_uid
    if root.scope is Scope.USER and owner not in (0, os.geteuid()):
        message = f"belongs to {user_name(owner)}, whose code runs as you"
        fix = _elsewhere(layer, '"$HOME/.cachectl"')
        yield root.path, Finding(layer.name, root.path, None, Severity.UNSAFE, "owner", message, fix)
    for folder in open_to_others(root.path):
        status = folder.stat()
        yield (status.st_dev, status.st_ino), _writable(layer, root, folder, itself=folder == real)


def _writable(layer: Layer, root: Root, folder: Path, *, itself: bool) -> Finding:
    status = folder.stat()
    whose = "everybody" if status.st_mode & stat.S_IWOTH else f"the group {_group_name(status.st_gid)}"
    does = "is" if itself else f"lies below {folder}, which is"
    can = "put code there that runs as you" if itself else "put another folder in its place, whose code runs as you"
    message = f"{does} writable by {whose}, who can {can}"
    fix = f"chmod go-w {shlex.quote(str(folder))}"
    if status.st_mode & stat.S_ISVTX:
        # Writable by everybody on purpose.
        fix = _elsewhere(layer, '"$HOME/.cachectl"')
    elif os.geteuid() not in (0, status.st_uid):
        fix = f"as {user_name(status.st_uid)}: {fix}"
    return Finding(layer.name, root.path, None, Severity.UNSAFE, "writable", message, fix)


def _group_name(number: int) -> str:
    import grp

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


# ---------------------------------------------------------------------- the command line


def run(request: Request) -> Findings:
    """Carry out ``cachectl doctor``."""
    with request.working("examining"):
        return doctor(request.stack, request.options.layers)


def show(result: Findings, _request: Request) -> Iterator[object]:
    """Yield each finding."""
    return lines(result, "nothing is wrong")
