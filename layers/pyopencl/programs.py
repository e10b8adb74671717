"""The store of PyOpenCL's binary cache: a folder of source, binary and info for each program, and a lock file.

Source: ``pyopencl/cache.py`` (layout, lock, header check).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby

from cachectl.layers.base.errors import LayerError
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.entry import Entry, Found, Problem
from cachectl.layers.core.finding import FAILS, HEALS, RECOMPILES, RISKS
from cachectl.layers.core.root import Root
from cachectl.layers.core.selection import Selection
from cachectl.layers.core.store import ENTRY, FOREIGN, OWN, Damage, Doubt, unreadable
from cachectl.layers.disk import handles, locks, plain
from cachectl.layers.formats import opencl_source, pickles
from cachectl.layers.formats.details import Details
from cachectl.layers.pytools import dictionaries
from cachectl.layers.stores import files
from cachectl.layers.stores import tree_read as trees

_BASE = regex(r"pyopencl-compiler-cache-v[12]-(?:uid\w+-)?py(?P<python>[\w.]+)")
#: Folders of other versions, and names in any folder that are not those of programs.
_LIKE = (
    trees.resembling(r"pyopencl-compiler-cache-.+"),
    trees.resembling(_BASE, r"[0-9a-f]{8,}[\w.-]*"),
    trees.resembling(_BASE, "[0-9a-f]{1,4}", r"[0-9a-f]{8,}[\w.-]*"),
)
_MEMBERS = regex("source\\.cl|binary|info")
_LOCK = "lock"
#: The constant that PyOpenCL adds to the source of each build, and that drivers keep.
_TAG = regex(rb"pyopencl_defeat_cache_[0-9a-f]{32}")
#: The largest header that is read, in bytes.
_HEADER = 1 << 26


class ProgramFolders(files.Files):
    """A folder for each program, below a folder for each Python, which PyOpenCL locks with one lock file."""

    # Without info an entry is a miss to PyOpenCL; with info but no binary it fails.
    shapes = (trees.Shape((_BASE, regex("[0-9a-f]{32}")), folders=True, members=_MEMBERS, first=("info",)), *_LIKE)
    forms = ("pyopencl-binary/2",)
    no_entry = frozenset()
    unread = Damage(FAILS, "")
    # PyOpenCL's lock is a file, which it holds for milliseconds.
    clearing_needs_room = True
    lock_shape = trees.Shape((_BASE, regex(_LOCK)), because="a lock that nobody holds any more")
    lock_waits = dictionaries.LOCK_WAITS

    def described(self, tree: trees.Tree, leaf: trees.Leaf, selection: Selection, *, contents: bool) -> Iterator[Found]:
        """Yield a program, with a problem for each missing or empty half."""
        key, path = leaf.entry.key, tree.root / leaf.entry.key
        for half in ("info", "binary"):
            status = leaf.members.get(half)
            if status is None or not status.st_size:
                yield Problem(path, "half", f"{half} is {'missing' if status is None else 'empty'}")
        # The key has no version but that of Python.
        python, source = _python_of(key), None
        stale = dictionaries.staleness(self.environment, "built under", dictionaries.Needs(python))
        try:
            if contents:
                if change := change_of_headers(tree.read_file(key, "info") or b""):
                    stale = None, f"unknown: {change}"
                source = tree.read_file(key, "source.cl")
        except LayerError as error:
            yield unreadable(path, error)
            stale = None, "unknown: the entry could not be read"
        about = Details(None if source is None else opencl_source.kernel_names(source), versions={"python": python})
        yield leaf.entry._replace(details=about, stale=stale[0], because=stale[1])

    def kind_of(self, root: Root, path: str) -> str:
        """Compare with the names of the folders of each Python."""
        if trees.entry_shape(self.shapes, path) is not None:
            return ENTRY
        return OWN if _BASE.fullmatch(path.partition("/")[0]) else FOREIGN

    def detail(self, key: str, files: Mapping[str, bytes]) -> Mapping[str, str]:
        """Return the version of Python."""
        return {"python": _python_of(key)}

    def damages(self, key: str, files: Mapping[str, bytes]) -> Iterator[Damage]:
        """Yield damage of the binary, if its kind is known, and of the pickle in info."""
        from cachectl.layers.formats import device_binaries

        binary, info = files.get("binary"), files.get("info")
        wrong = device_binaries.refusal(binary) if binary else "is missing or empty"
        tags = [tag[0] for name in ("source.cl", "binary") if (tag := _TAG.search(files.get(name, b"")))]
        if wrong is not None:
            yield Damage(FAILS, f"binary: {wrong}")
        elif (wrong := device_binaries.part_complaint(binary or b"")) is not None:
            yield Damage(RECOMPILES, f"binary: {wrong}; PyOpenCL builds the program again")
        elif len(set(tags)) > 1:
            yield Doubt(RISKS, "binary: is of another build than source.cl: one of the two is another program's")
        if not info:
            yield Damage(HEALS, "info is missing or empty: PyOpenCL builds the program again")
        elif (complaint := pickles.complaint(info)) is not None:
            yield Damage(FAILS, f"info: {complaint}")

    def guarded(self, root: Root, keys: Iterable[str]) -> Iterator[tuple[str, trees.Guard, list[str]]]:
        """Yield the programs of each Python, with its lock."""
        for base, own in groupby(sorted(keys), lambda key: key.partition("/")[0]):
            yield base, partial(self._locked, root, base) if _BASE.fullmatch(base) else nullcontext, list(own)

    @contextmanager
    def _locked(self, root: Root, base: str, handle: int) -> Iterator[None]:
        """Hold PyOpenCL's lock in a folder of the open root, after removing an abandoned one."""
        lock = root.path / base / _LOCK
        with (
            handles.opened(base, handle) as inside,
            locks.presence_lock(self.name, lock, self.environment, self.lock_waits, folder=inside),
        ):
            yield

    def tagged_text(self, tree: trees.Tree, entry: Entry) -> bytes | None:
        """Return the source, which PyOpenCL keeps next to the binary."""
        return tree.read_file(entry.key, "source.cl") if not entry.is_orphan else None


def _python_of(key: str) -> str:
    match = _BASE.fullmatch(key.partition("/")[0])
    return "" if match is None else match["python"]


def change_of_headers(info: bytes) -> str | None:
    """Return how a header that an entry includes differs here, or ``None``.

    PyOpenCL rebuilds the entry if it finds that, but a container, or another machine with the same home, may have the
    old header. Like ``check_dependencies`` this compares times, then md5 of the text.
    """
    import hashlib

    for path, changed, digest in opencl_source.dependencies(info):
        try:
            if os.stat(path).st_mtime == changed:
                continue
            data = plain.read_plain(os.path.realpath(path), limit=_HEADER)
        except (OSError, ValueError) as error:
            is_missing = isinstance(error, ValueError) or plain.means_no_file(error)
            return f"{path}, which it includes, {'is not here' if is_missing else 'cannot be read'}"
        # PyOpenCL reads it as text, with universal newlines.
        text = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if hashlib.md5(text, usedforsecurity=False).hexdigest() != digest:
            return f"{path}, which it includes, has changed here"
    return None
