"""Entries and findings in several layers: what ``ls``, ``verify`` and ``doctor`` share."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cachectl import layer_set
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import LayerError, reason_of
from cachectl.layers.core.codes import PLUGIN, UNREADABLE
from cachectl.layers.core.entry import Entry, Found, Problem, unknown_words
from cachectl.layers.core.finding import FAILS, HARMLESS, Finding
from cachectl.layers.core.json_form import as_json
from cachectl.layers.core.layer import Layer, every_root, first_place
from cachectl.layers.core.root import Root
from cachectl.layers.core.selection import ALL, Selection
from cachectl.layers.disk import trust
from cachectl.layers.disk.place import Use

if TYPE_CHECKING:
    from cachectl.watching import ledger


class Trouble(NamedTuple):
    """A problem of a listing; ``failed`` if it kept entries from being listed.

    ``path`` is ``None`` if the layer as a whole failed. ``unknown_files`` counts files of an unknown format below it.
    """

    layer: str
    path: Path | None
    code: str
    message: str
    failed: bool
    unknown_files: int = 0


class Kernel(NamedTuple):
    """A kernel with its entries in all layers; kernels that share an entry are one.

    ``kernels`` is empty for the entries of one layer whose kernels are unknown. Times are the latest. ``saves`` are the
    seconds that misses took when last traced, ``None`` if unknown, and ``saves_in`` the same by layer.
    """

    kernels: tuple[str, ...]
    layers: tuple[str, ...]
    entries: int
    bytes: int
    modified: float | None
    used: float | None
    saves: float | None
    saves_in: Mapping[str, float] = {}


@as_json("cachectl/ls/1", also=("unknown_files",), hidden=("unmatched",))
class Listing(NamedTuple):
    """The selected entries, and the problems met; ``kernels`` are the same entries by kernel, if requested.

    ``unmatched`` says that no entry has the requested kernel or key.
    """

    entries: tuple[Entry, ...]
    problems: tuple[Trouble, ...]
    kernels: tuple[Kernel, ...] = ()
    unmatched: str | None = None

    @property
    def unknown_files(self) -> int:
        """Return the number of files of an unknown format, which are not among the entries."""
        return sum(trouble.unknown_files for trouble in self.problems)

    @property
    def failed(self) -> bool:
        """Return whether entries may be missing, or no entry matched."""
        return self.unmatched is not None or any(trouble.failed for trouble in self.problems)


@as_json("cachectl/findings/1", optional=("not_checked",))
class Findings(NamedTuple):
    """What ``verify`` or ``doctor`` found, and by layer what was not checked."""

    findings: tuple[Finding, ...]
    not_checked: Mapping[str, str] | None = None

    @property
    def failed(self) -> bool:
        """Return whether any finding is not harmless."""
        return not all(map(is_harmless, self.findings))


def is_harmless(finding: Finding) -> bool:
    """Return whether a finding is neither damage, nor an unknown format in an entry's place, nor a problem."""
    return finding.severity is HARMLESS and finding.thing is None and finding.code != "unknown"


def _warn_of_failures(trouble: Trouble) -> None:
    if trouble.failed:
        layer_set.warn_user(f"{trouble.layer}: {trouble.message}")


def entries(
    stack: layer_set.LayerSet,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    **options: Any,  # noqa: ANN401 - those of listed
) -> Iterator[Entry]:
    """Yield the selected entries of the named layers, or of all: :func:`listed`."""
    return listed(stack.named(layers), selection, **options)


def listed(
    layers: Iterable[Layer],
    selection: Selection,
    notice: Callable[[Trouble], None] = _warn_of_failures,
    *,
    contents: bool = True,
    roots: Callable[[Layer], Iterable[Root]] = every_root,
) -> Iterator[Entry]:
    """Yield the selected entries of every root, or of some ``roots``; after a root that fails the next one follows.

    ``notice`` gets what could not be listed, what looks damaged, and how many files of a root are of an unknown format;
    by default it warns of what could not be listed. Without ``contents``, entries are not opened (:meth:`Store.scan`).
    """

    def scan(layer: Layer, root: Root) -> Iterator[Found]:
        unknown = 0
        for item in layer.store.scan(root, selection, contents=contents):
            if isinstance(item, Entry) and item.is_unknown:
                unknown += item.files or 1
            else:
                yield item
        if unknown:
            words = unknown_words(unknown)
            notice(Trouble(layer.name, root.path, "unknown", words, failed=False, unknown_files=unknown))

    for layer, root, thing in layer_set.in_each_root(layers, scan, roots):
        if isinstance(thing, Entry):
            if thing.is_listed and selection.matches(thing):
                yield thing
        elif isinstance(thing, Problem):
            notice(Trouble(layer.name, thing.path, thing.code, thing.message, failed=thing.hides))
        elif isinstance(thing, Exception):
            path, code = (None, "failed") if root is None else (root.path, "unreadable")
            notice(Trouble(layer.name, path, code, reason_of(thing), failed=True))


#: As many layers or more are not named if nothing matches in them.
_FEW = 4


def unmatched(layers: Iterable[Layer], selection: Selection) -> str | None:
    """Return the message that no entry has the kernel or the key of a selection; ``None`` if one has."""
    if selection.kernel is None and selection.key is None:
        return None
    from difflib import get_close_matches

    layers, named, names = tuple(layers), Selection(selection.kernel, selection.key), set[str]()
    for entry in listed(layers, ALL, lambda _: None, contents=selection.kernel is not None):
        if named.matches(entry):
            return None
        names.update(entry.details.kernels or ())
    if selection.key is not None:
        return f"no entry has the key {selection.key!r}; cachectl ls -q lists keys"
    lower = {name.lower(): name for name in names}
    near = [lower[name] for name in get_close_matches(selection.kernel_part.lower(), lower, cutoff=0.5)]
    hint = f"similar names: {', '.join(near)}" if near else "cachectl ls lists kernels"
    where = f" of {', '.join(layer.name for layer in layers)}" if len(layers) < _FEW else ""
    return f"no entry{where} has a kernel {selection.kernel!r}; {hint}"


def failure(layer: Layer, path: Path | None, error: Exception) -> Finding:
    """Return the finding that a layer, or one of its places, could not be read."""
    named = getattr(error, "path", None) or getattr(error, "filename", None)
    place = path or Path(named or "*")
    code, message, fix = UNREADABLE, reason_of(error), f"make {place} readable"
    if not isinstance(error, (LayerError, OSError)):
        code, fix = PLUGIN, f"fix or uninstall the plug-in {layer.name}"
    elif place.is_absolute():
        closed = trust.closed_by_another(place, layer.environment.home_folder)
        message, fix = message + closed.owner, closed.cure or f"chmod u+rwX {shlex.quote(str(place))}"
    return code.finding(layer.name, place, message, fix, severity=FAILS)


def judged(layer: Layer, finding: Finding) -> Finding:
    """Return a finding; an unreadable root is as serious as the loss of its place is for the layer's library.

    A library that writes needs more than read access, so the fix is ``doctor``, which names another place. Libraries
    use only their first root.
    """
    hazard = layer.about.uses.get(Use.WRITE)
    if finding.code != UNREADABLE.name or hazard is None:
        return finding
    is_used = finding.root == first_place(layer)
    fix = f"cachectl doctor {layer.name}" if finding.fix.startswith("as ") else finding.fix
    return finding._replace(severity=hazard.severity if is_used else HARMLESS, fix=fix)


def by_kernel(entries: Iterable[Entry], environment: Environment) -> tuple[Kernel, ...]:
    """Sum entries by their kernels, the largest sum first, with what the ledger of traces knows of them."""
    from cachectl.watching import ledger

    kernels_known = ledger.readable(environment).kernels
    # The group of each name (or of a layer's entries without one); all names of a group share its set and list.
    groups: dict[str, tuple[set[str], list[Entry]]] = {}
    for entry in entries:
        names = entry.details.kernels or (f"\0{entry.layer}",)
        joined, members = groups.setdefault(names[0], ({names[0]}, []))
        for name in names:
            names_seen, more = groups.get(name, ({name}, []))
            if names_seen is not joined:
                joined |= names_seen
                members += more
                groups.update(dict.fromkeys(names_seen, (joined, members)))
        members.append(entry)
    sums = {id(members): (joined, members) for joined, members in groups.values()}.values()
    rows = [
        _kernel(() if min(names).startswith("\0") else tuple(sorted(names)), members, kernels_known)
        for names, members in sums
    ]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.kernels)))


def _kernel(names: tuple[str, ...], entries: Sequence[Entry], kernels_known: Mapping[str, ledger.Known]) -> Kernel:
    layers = tuple(dict.fromkeys(entry.layer for entry in entries))
    # The ledger knows a build of several kernels by their joined names.
    seconds = (kernels_known[name].seconds for name in kernels_known.keys() & {*names, " ".join(names)})
    saved: dict[str, float] = {}
    for layer, taken in (item for each in seconds for item in each.items() if item[0] in layers):
        saved[layer] = saved.get(layer, 0) + taken

    def latest(moments: Iterable[float | None]) -> float | None:
        return max((moment for moment in moments if moment is not None), default=None)

    return Kernel(
        names,
        layers,
        len(entries),
        sum(entry.bytes for entry in entries),
        latest(entry.modified or entry.written_before for entry in entries),
        latest(entry.used for entry in entries),
        sum(saved.values()) if saved else None,
        saved,
    )
