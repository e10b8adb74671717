"""``cachectl doctor``: find problems of this set-up, each with the command that fixes it.

Each layer reports its own problems (:meth:`Layer.diagnose`) and damage (:meth:`Layer.verify`). This module checks what
holds for every layer: who may write a root, network file systems, roots that ranks share, stale entries and leaked
files. It only reads.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl.inspecting.space import WORST_FIRST, Space, cached_usage, may_exist, shortage, spaces
from cachectl.inspecting.verify import failure, findings
from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.environment import user_name
from cachectl.layers.base.errors import FAILURES, LayerError, PluginFailed
from cachectl.layers.base.facts import Ability, Condition, Finding, Hazard, Root, Scope, Severity, Usage
from cachectl.layers.base.texts import plural
from cachectl.layers.disk.presence import nearest
from cachectl.layers.disk.trust import closed_by_another, open_to_others
from cachectl.layers.host.launcher import RANKS, number_of
from cachectl.layers.host.mounts import network_file_system

if TYPE_CHECKING:
    from cachectl.inspecting.space import UsageOf
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer
    from cachectl.layers.base.registry import Broken

#: This many empty files have no bytes, but they use up a quota of files.
_MANY_FILES: Final = 1000

#: Ranks within a node: these distinguish roots if each node has its own disk.
_LOCAL_RANKS: Final = (
    *("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID"),
    *("FLUX_TASK_LOCAL_ID", "MPI_LOCALRANKID"),
)

#: Identifies a finding, so that a problem that several layers report appears once.
Identity = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """The parallel job of the environment: the number of ranks if known, and the variable with the rank."""

    ranks: int | None
    variable: str

    @property
    def own_folder(self) -> str:
        """Return a shell word for a folder of each rank; the shell stops with an error if the variable is not set."""
        node = "$(hostname)-" if self.variable in _LOCAL_RANKS else ""
        return f'"$HOME/.cachectl/rank{node}${{{self.variable}:?}}"'


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings, worst first in each layer, after those about space; ``space`` has every file system and quota."""

    findings: tuple[Finding, ...]
    space: tuple[Space, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/findings/1")

    @property
    def failed(self) -> bool:
        """Return whether any finding is worse than harmless."""
        return any(map(is_grave, self.findings))


def diagnosis(layers: Iterable[Layer], broken: Iterable[Broken] = ()) -> Diagnosis:
    """Return the findings: full file systems first, then layer by layer, the worst of each first.

    A problem that several layers share is reported once.
    """
    layers, usage_of = tuple(layers), cached_usage()
    space = spaces(layers, usage_of)
    found = [finding for one in space for finding in shortage(one)]
    found += [
        Finding(plugin.name, Path("*"), None, Severity.HARMLESS, "plugin", plugin.why, _fix_plugin(plugin.name))
        for plugin in broken
    ]
    said: set[Identity] = set()
    for layer in layers:
        of_layer: list[Finding] = []
        for identity, finding in _everything(layer, usage_of):
            if identity not in said:
                said.add(identity)
                of_layer.append(finding)
        found += sorted(of_layer, key=lambda finding: WORST_FIRST.index(finding.severity))
    return Diagnosis(tuple(found), space)


def is_grave(finding: Finding) -> bool:
    """Return whether a finding is worse than harmless."""
    return finding.severity is not Severity.HARMLESS


def _fix_plugin(name: str) -> str:
    return f"fix or uninstall the plug-in {name}"


def _everything(layer: Layer, usage_of: UsageOf) -> Iterator[tuple[Identity, Finding]]:
    found: list[tuple[Identity, Finding]] = []
    errors: list[LayerError | OSError] = []
    try:
        # Layers that share a variable report its problem once.
        found.extend(((finding.code, finding.message, finding.fix), finding) for finding in layer.diagnose())
    except FAILURES as error:
        errors.append(error)
    found += _of_roots(layer, usage_of)
    found += map(_own, findings((layer,)))
    # The finding of a root that cannot be read names it.
    known = any(finding.code == "unreadable" for _, finding in found)
    unknown = (error for error in errors if isinstance(error, PluginFailed) or not known)
    yield from (*found, *(_own(failure(layer, Path("*"), error)) for error in unknown))


def _own(finding: Finding) -> tuple[Identity, Finding]:
    # Several attempts to read one thing fail with messages of their own.
    message = None if finding.code == "unreadable" else finding.message
    return (finding.layer, finding.root, finding.key, finding.code, message), finding


def _of_roots(layer: Layer, usage_of: UsageOf) -> Iterator[tuple[Identity, Finding]]:
    try:
        roots = layer.roots()
    except FAILURES:
        # `verify` reports the same error.
        return
    for root in roots:
        first = root is roots[0]
        if may_exist(root):
            yield from _of_root(layer, root, usage_of, first=first)
        elif first:
            # The library will make this root at its first use.
            yield from _of_surroundings(layer, root, reachable=True)


def _of_root(layer: Layer, root: Root, usage_of: UsageOf, *, first: bool) -> Iterator[tuple[Identity, Finding]]:
    usage: Usage | None = None
    try:
        usage = usage_of(layer, root)
    except FAILURES as error:
        yield _own(failure(layer, root.path, error))
    else:
        # `verify` may not meet this error.
        yield from (_own(layer.store.to_finding(root, one)) for one in usage.problems if one.code == "unreadable")
    # A fallback that holds nothing, the temporary folder for instance, is not in use.
    if first or usage is None or usage.entries or usage.files or usage.orphan_files:
        try:
            if hasattr(os, "geteuid"):
                yield from _of_writers(layer, root)
        except FAILURES as error:
            yield _own(failure(layer, root.path, error))
        yield from _of_surroundings(layer, root, reachable=first and usage is not None)
    if usage is not None and layer.abilities()[Ability.CLEAR] is None:
        yield from map(_own, _of_content(layer, root, usage))


# ---------------------------------------------------------------------- stale entries, orphans


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


def _of_surroundings(layer: Layer, root: Root, *, reachable: bool) -> Iterator[tuple[Identity, Finding]]:
    """Report problems with the place of an active layer's root, whether or not the root exists yet."""
    if not _takes_part(layer):
        return
    try:
        if reachable and root.scope is Scope.USER and layer.when_closed is not None:
            yield from _of_use(layer, root, layer.when_closed)
        yield from _of_network(layer, root)
        yield from _of_ranks(layer, root)
    except FAILURES as error:
        yield _own(failure(layer, root.path, error))


def _takes_part(layer: Layer) -> bool:
    try:
        return layer.state().condition in (Condition.ENABLED, Condition.UNKNOWN)
    except FAILURES:
        return True


def _of_network(layer: Layer, root: Root) -> Iterator[tuple[Identity, Finding]]:
    kind = network_file_system(root.path, mounts=layer.environment.mounts)
    hazard = layer.on_network
    if kind is not None and hazard is not None:
        message = f"lies on a network file system ({kind}): {hazard.message}"
        fix = _elsewhere(layer, '"$(mktemp -d)"')
        yield (
            ("network", root.path),
            Finding(layer.name, root.path, None, hazard.severity, "network", message, fix),
        )


def _of_ranks(layer: Layer, root: Root) -> Iterator[tuple[Identity, Finding]]:
    job, hazard = job_of(layer.environment), layer.among_ranks
    if job is None or hazard is None or _apart(layer.environment, root.path):
        return
    several = "the ranks" if job.ranks is None else f"the {job.ranks} ranks"
    message = f"{several} of this job share it: {hazard.message}"
    if layer.abilities()[Ability.RELOCATE] is None:
        message += "; fix it in the script that each rank runs"
    fix = _elsewhere(layer, job.own_folder)
    yield ("ranks", root.path), Finding(layer.name, root.path, None, hazard.severity, "ranks", message, fix)


def _elsewhere(layer: Layer, folder: str) -> str:
    """Return the shell command that moves a layer to ``folder``, which is already quoted."""
    if (reason := layer.abilities()[Ability.RELOCATE]) is not None:
        return f"nothing moves it: {reason}"
    return f'eval "$(cachectl env --root {folder} --layer {layer.name} --shell sh)"'


def job_of(environment: Environment) -> Job | None:
    """Return the job of several ranks that the variables describe; ``None`` outside of one."""
    for size, rank in RANKS:
        ranks, own = number_of(environment, size), number_of(environment, rank)
        if (ranks or 0) > 1 or (own or 0) > 0:
            return Job(ranks, rank)
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


def _of_use(layer: Layer, root: Root, hazard: Hazard) -> Iterator[tuple[Identity, Finding]]:
    """Report why nothing can be stored in a root: its path is blocked by something else, or is not writable."""
    place = nearest(root.path, follow=False)
    if not place.is_dir():
        which = "there" if place == root.path else f"at {place}"
        message = f"something that is no folder is {which}, so {hazard.message}"
        fix = _make_way(layer, root, place)
        yield ("no-folder", place), Finding(layer.name, root.path, None, hazard.severity, "no-folder", message, fix)
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
        yield ("closed", place), Finding(layer.name, root.path, None, hazard.severity, "closed", message, fix)


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


def _of_writers(layer: Layer, root: Root) -> Iterator[tuple[Identity, Finding]]:
    """Report who else may write or replace a root: a cache is code, which runs as its user."""
    real = Path(os.path.realpath(root.path))
    owner = real.stat().st_uid
    if root.scope is Scope.USER and owner not in (0, os.geteuid()):
        message = f"belongs to {user_name(owner)}, whose code runs as you"
        fix = _elsewhere(layer, '"$HOME/.cachectl"')
        yield ("owner", root.path), Finding(layer.name, root.path, None, Severity.UNSAFE, "owner", message, fix)
    for folder in open_to_others(root.path):
        status = folder.stat()
        identity = ("writable", status.st_dev, status.st_ino)
        yield identity, _writable(layer, root, folder, itself=folder == real)


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
