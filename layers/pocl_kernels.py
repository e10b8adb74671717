"""The layer ``pocl``: PoCL's kernel cache, its ``uncached`` folder and its leaked temporaries.

A tree of programs, each a folder of linked bitcode and native work-group functions. Sources:
``lib/CL/pocl_cache.c`` (places, names), ``lib/CL/devices/devices.c`` (when the variables are read).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from cachectl.layers.drivers import opencl_drivers
from cachectl.layers.errors import Damaged
from cachectl.layers.facts import (
    Ability,
    Artifact,
    Condition,
    Entry,
    Finding,
    Found,
    Orphan,
    Outcome,
    Problem,
    Removable,
    Root,
    Scope,
    Severity,
    State,
    Switch,
    Target,
)
from cachectl.layers.layer import Layer
from cachectl.layers.processes import using
from cachectl.layers.stores.archive import pack, unpack
from cachectl.layers.stores.tree import HANDLES, NO_HANDLES, Leaf, Shape, StrayRule, Tree

#: Seconds without change after which an entry is idle although PoCL is running: longer than any one compile.
ENTRY_REST: Final = 600.0
#: The same for temporaries, which a slow compile may hold longer.
ORPHAN_REST: Final = 3600.0
LIBRARIES: Final = ("libpocl",)

_RANDOM: Final = "[A-Za-z0-9]{6}"
_STRAYS: Final = (
    StrayRule(
        0, re.compile(f"tempfile_{_RANDOM}"), "leaked by a PoCL process", idle_only=False, empty=True, private=True
    ),
    StrayRule(0, re.compile(rf"tempfile_{_RANDOM}\.[\w.]+"), "a compile's temporary file", private=True),
    StrayRule(0, re.compile(f"tempdir_{_RANDOM}"), "a compile's temporary folder", private=True),
    StrayRule(0, re.compile(f"_UNCACHED_{_RANDOM}"), "a program built with the cache off", private=True),
)
_SHAPE: Final = Shape((re.compile("[A-P]{2}"), re.compile("[A-P]{37}")), folders=True, strays=_STRAYS)
_VARIANT: Final = re.compile(r"(?P<kernel>[^/]+)/(?P<variant>\d+-\d+-\d+(?:-goffs0)?(?:-smallgrid)?)/(?P<file>[^/]+)")
_TEMPORARY: Final = re.compile(rf".*_{_RANDOM}\.(?:temp|so)")
_PROGRAM: Final = re.compile(r"program\.[\w.]+|last_accessed|build\.log|native/[^/]+")
_BITCODE: Final = b"BC\xc0\xde"
_NATIVE: Final = {".so": b"\x7fELF", ".o": b"\x7fELF"}


class PoclKernels(Layer):
    """Programs and work-group functions that PoCL has compiled."""

    name = "pocl"
    title = "PoCL kernel cache"
    forms = ("pocl-entry/1",)

    # ------------------------------------------------------------------ where and whether

    def roots(self) -> tuple[Root, ...]:
        """Resolve as PoCL does when its first device is asked for.

        ``POCL_CACHE_DIR`` serves both modes as it stands; every other rule has a leaf for each.
        """
        environment = self.environment
        named = environment.get("POCL_CACHE_DIR")
        if named is not None:
            return (Root(environment.absolute(named), Scope.USER, "POCL_CACHE_DIR", "kcache"),) if named else ()
        if environment.platform == "win32":
            return self._windows_roots()
        xdg, home = environment.get("XDG_CACHE_HOME"), environment.get("HOME")
        if xdg:
            base, source = environment.absolute(xdg) / "pocl", "XDG_CACHE_HOME"
        elif home is not None:
            base, source = environment.absolute(home + "/.cache/pocl"), "default (HOME)"
        else:
            base, source = Path("/tmp/pocl"), "default (HOME is not set)"  # noqa: S108 - PoCL's own rule
        return tuple(Root(base / leaf, Scope.USER, source, leaf) for leaf in ("kcache", "uncached"))

    def _windows_roots(self) -> tuple[Root, ...]:
        for variable in ("LOCALAPPDATA", "TEMP"):
            value = self.environment.get(variable)
            if value:
                return (Root(Path(value, "pocl"), Scope.USER, variable, "kcache"),)
        return ()

    def _switched_on(self) -> bool | None:
        value = self.environment.get("POCL_KERNEL_CACHE")
        return None if value is None else value.startswith("1")

    def state(self) -> State:
        """Judge the variables: only a value that begins with 1 means on."""
        environment = self.environment
        if environment.get("POCL_CACHE_DIR") == "":
            return State(Condition.DISABLED, "POCL_CACHE_DIR is set but empty: PoCL finds no device; unset it")
        if self._switched_on() is False:
            value = environment.get("POCL_KERNEL_CACHE")
            hint = "" if value == "0" else " (only a value that begins with 1 means on)"
            return State(Condition.DISABLED, f"POCL_KERNEL_CACHE={value}{hint}")
        if "PoCL" not in opencl_drivers(environment) and not any(root.exists for root in self.roots()):
            return State(Condition.ABSENT, "no PoCL driver is registered here, and none has left a cache")
        return State(Condition.ENABLED, "on by default" if self._switched_on() is None else "POCL_KERNEL_CACHE=1")

    def switch(self, *, on: bool) -> Switch:
        """Give the variable, which PoCL reads once, when its first device is asked for."""
        return Switch(self.name, {"POCL_KERNEL_CACHE": "1" if on else "0"}, latches=LIBRARIES)

    def relocate(self, folder: Path) -> Switch:
        """Give PoCL's own variable; the folder is made by PoCL."""
        return Switch(self.name, {"POCL_CACHE_DIR": str(folder / "pocl")}, latches=LIBRARIES)

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse what needs directory handles where there are none."""
        return {} if HANDLES else {Ability.PUT: NO_HANDLES, Ability.CLEAR: NO_HANDLES}

    # ------------------------------------------------------------------ listing

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield programs as entries; failed builds, temporaries and uncached programs as orphans."""
        del contents
        for leaf in self._tree(root).scan():
            yield leaf if isinstance(leaf, Problem) else self._describe(root, leaf)

    def _describe(self, root: Root, leaf: Leaf) -> Found:
        if leaf.stray is not None:
            return self._orphan(root, leaf, leaf.stray.why, idle_only=leaf.stray.idle_only)
        paths = [member.path for member in leaf.members]
        foreign = [path for path in paths if not _recognised(path)]
        if foreign:
            message = f"holds {foreign[0]!r}, which PoCL does not make; left alone"
            return Problem(root.path / leaf.key, "unrecognised", message)
        if not any(path not in ("build.log", "last_accessed") for path in paths):
            return self._orphan(root, leaf, "a build that failed" if paths else "an empty program folder")
        variants: dict[str, list[str]] = {}
        for match in map(_VARIANT.fullmatch, paths):
            if match is not None:
                variants.setdefault(match["kernel"], []).append(match["variant"])
        program, used = leaf.member("program.bc"), leaf.member("last_accessed")
        return Entry(
            layer=self.name,
            key=leaf.key,
            root=root.path,
            bytes=leaf.bytes,
            files=len(leaf.members),
            created=None if program is None else program.modified,
            modified=leaf.modified,
            used=None if used is None else used.modified,
            # Only kernels that were launched have a folder: a program never launched names none.
            kernels=tuple(sorted(variants)) or None,
            detail={kernel: " ".join(sorted(set(found))) for kernel, found in sorted(variants.items())},
        )

    def _orphan(self, root: Root, leaf: Leaf, why: str, *, idle_only: bool = True) -> Orphan:
        return Orphan(leaf.key, root.path, leaf.bytes, len(leaf.members), leaf.modified, why, idle_only)

    def _tree(self, root: Root) -> Tree:
        return Tree(self.name, root.path, _SHAPE)

    # ------------------------------------------------------------------ get and put

    def read(self, root: Root, key: str) -> Artifact | None:
        """Read a program folder as a deterministic tar, temporaries left out."""
        members = self._tree(root).read_members(key)
        if members is None:
            return None
        kept = {path: data for path, data in members.items() if not _TEMPORARY.fullmatch(path) and path != "build.log"}
        kernels = sorted({match["kernel"] for match in map(_VARIANT.fullmatch, kept) if match is not None})
        return Artifact(self.name, key, self.forms[0], pack(kept), {"kernels": " ".join(kernels)})

    def write(self, root: Root, key: str, artifact: Artifact, *, replace: bool) -> None:
        """Place a program folder whole; PoCL tests only whether files exist, so each is checked here."""
        try:
            members = unpack(artifact.data)
        except ValueError as error:
            raise Damaged(self.name, str(error), key) from error
        for path, data in members.items():
            if not _recognised(path):
                raise Damaged(self.name, f"{path!r} is no file of a PoCL program", key)
            if complaint := _complaint(path, data):
                raise Damaged(self.name, f"{path}: {complaint}", key)
        self._tree(root).write(key, artifact.data, replace=replace)

    # ------------------------------------------------------------------ clear

    def idle_gate(self, targets: Iterable[Removable]) -> Iterator[tuple[Removable, str | None]]:
        """Leave alone what a live compile may be using.

        A program whose file vanishes under it fails or, before PoCL 7, aborts. Where no process of this user
        has PoCL loaded, nothing can be in use.
        """
        users = using(LIBRARIES)
        now = self.environment.clock()
        for target in targets:
            rest = ENTRY_REST if isinstance(target, Entry) else ORPHAN_REST
            age = now - (target.modified or now)
            safe = users == () or age > rest or (isinstance(target, Orphan) and not target.idle_only)
            yield target, None if safe else f"changed {max(0, age):.0f} s ago, and PoCL is in use by {_spell(users)}"

    def mark(self, root: Root, found: Removable) -> tuple[int, ...] | None:
        """Fingerprint files, bytes and newest change of the folder."""
        leaf = self._tree(root).find(found.key)
        return None if leaf is None else leaf.mark

    def remove(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        """Rename programs away, then delete them; the top folder itself always stays."""
        return self._tree(root).remove(targets, tidy=using(LIBRARIES) == ())

    # ------------------------------------------------------------------ verify

    def verify(self, root: Root) -> Iterator[Finding]:
        """Check the magic of bitcode and native files: PoCL checks nothing, and a bad one poisons its program."""
        tree = self._tree(root)
        for leaf in tree.scan():
            if isinstance(leaf, Problem) or leaf.stray is not None:
                continue
            for member in leaf.members:
                head = tree.read_file(leaf.key, member.path, 4) if _recognised(member.path) else None
                complaint = None if head is None else _complaint(member.path, head)
                if complaint:
                    message = f"{member.path}: {complaint}"
                    fix = f"cachectl purge pocl --key {leaf.key}"
                    yield Finding(self.name, root.path, leaf.key, Severity.FAILS, "magic", message, fix)


def _recognised(path: str) -> bool:
    return bool(_VARIANT.fullmatch(path) or _PROGRAM.fullmatch(path) or _TEMPORARY.fullmatch(path))


def _complaint(path: str, head: bytes) -> str | None:
    """Say what is wrong with the first bytes of a file, as far as its name promises anything."""
    if path == "program.bc" and not head.startswith(_BITCODE):
        return "is not LLVM bitcode" if head else "is empty"
    if _VARIANT.fullmatch(path):
        magic = _NATIVE.get(Path(path).suffix)
        if magic is not None and not head.startswith(magic):
            return "is not an ELF file" if head else "is empty"
    return None


def _spell(users: tuple[int, ...] | None) -> str:
    if users is None:
        return "programs that this platform does not show"
    shown = ", ".join(str(pid) for pid in users[:5])
    return f"process {shown}" if len(users) == 1 else f"processes {shown}" + ("…" if len(users) > 5 else "")  # noqa: PLR2004
