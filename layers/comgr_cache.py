"""The layer ``comgr``: what AMD's code object manager has compiled, for ROCm's OpenCL and for hipRTC.

Sources, in ROCm/llvm-project: ``amd/comgr/src/{comgr-env,comgr-cache,comgr-cache-command}.cpp`` and
``amd/comgr/README.md``; LLVM's ``Support/{Caching,CachePruning,Path}``. What is in entries:
:mod:`cachectl.layers.formats.comgr_entries`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from cachectl.layers.drivers import opencl_drivers
from cachectl.layers.errors import Damaged, LayerError, not_a_key
from cachectl.layers.facts import (
    Ability,
    Artifact,
    Condition,
    Entry,
    Finding,
    Found,
    Hazard,
    Housekeeping,
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
)
from cachectl.layers.formats import comgr_entries
from cachectl.layers.layer import Layer
from cachectl.layers.mounts import network_file_system
from cachectl.layers.processes import spell, using
from cachectl.layers.stores.tree import REFUSALS, Leaf, Shape, StrayRule, Tree
from cachectl.layers.switches import misread, off

LIBRARIES: Final = ("libamd_comgr.so",)
TIMESTAMP: Final = "llvmcache.timestamp"
_TEMPORARY: Final = StrayRule(
    re.compile(r"amdgpu-compiler-[0-9a-f]{6}\.tmp\.o"), "left by a program that was killed", private=True
)
_SHAPE: Final = Shape((re.compile("llvmcache-[0-9a-f]{64}"),), folders=False, strays=(_TEMPORARY,))
_BOOK: Final = Shape((re.compile(re.escape(TIMESTAMP)),), folders=False)


class ComgrCache(Layer):
    """Outputs of single commands of AMD's compiler: bitcode and code objects, one file each."""

    name = "comgr"
    title = "AMD comgr cache"
    forms = ("comgr-entry/1",)
    on_network = Hazard(
        Severity.RISKS,
        "programs map its files, and have been killed (SIGBUS) where others changed them; the newest releases keep no "
        "cache there unless AMD_COMGR_CACHE_DIR names it",
    )

    # ------------------------------------------------------------------ where and whether

    def roots(self) -> tuple[Root, ...]:
        """Resolve as comgr and LLVM do: what is empty or relative counts from the working folder."""
        environment = self.environment
        if environment.platform == "darwin":
            return ()
        if named := environment.get("AMD_COMGR_CACHE_DIR"):
            return (Root(environment.absolute(named), Scope.USER, "AMD_COMGR_CACHE_DIR"),)
        if environment.platform == "win32":
            base = environment.get("LOCALAPPDATA")
            return (Root(Path(base, "comgr"), Scope.USER, "LOCALAPPDATA"),) if base else ()
        xdg, home = environment.get("XDG_CACHE_HOME"), environment.get("HOME")
        if xdg is not None:
            return (Root(environment.absolute(xdg) / "comgr", Scope.USER, "XDG_CACHE_HOME"),)
        if home is not None:
            return (Root(environment.absolute(home) / ".cache" / "comgr", Scope.USER, "default (HOME)"),)
        return (Root(environment.home / ".cache" / "comgr", Scope.USER, "default (the account's home)"),)

    def state(self) -> State:
        """Judge the switch, which knows one value, the policy, and the place."""
        if self.environment.get("AMD_COMGR_CACHE") == "0":
            return State(Condition.DISABLED, "AMD_COMGR_CACHE=0")
        if not self._is_here():
            return State(Condition.ABSENT, "no driver or GPU of AMD's is here, and none has left a cache")
        if (wrong := self._policy_complaint()) is not None:
            return State(Condition.DISABLED, f"AMD_COMGR_CACHE_POLICY cannot be read, so nothing is kept: {wrong}")
        if not (roots := self.roots()):
            return State(Condition.DISABLED, "LOCALAPPDATA is not set: there is no place to keep a cache")
        kind = network_file_system(roots[0].path, mounts=self.environment.mounts)
        if kind is not None and roots[0].source != "AMD_COMGR_CACHE_DIR":
            why = f"the default place is on a network file system ({kind}): the newest releases keep no cache there"
            return State(Condition.UNKNOWN, why)
        value = self.environment.get("AMD_COMGR_CACHE")
        ignored = f"; AMD_COMGR_CACHE={value!r} is not 0" if value is not None else ""
        return State(Condition.ENABLED, f"on by default since ROCm 7{ignored}")

    def _is_here(self) -> bool:
        registered = "AMD" in opencl_drivers(self.environment) or self.environment.topology.exists()
        return registered or any(root.exists for root in self.roots())

    def _policy_complaint(self) -> str | None:
        return comgr_entries.policy_complaint(self.environment.get("AMD_COMGR_CACHE_POLICY") or "")

    def diagnose(self) -> Iterator[Finding]:
        """Yield what is wrong with the variables."""
        value = self.environment.get("AMD_COMGR_CACHE")
        if value == "0":
            yield off(self, "AMD_COMGR_CACHE")
        if not self._is_here():
            return
        if value not in (None, "0", "1"):
            yield misread(self, "AMD_COMGR_CACHE", Severity.HARMLESS, "is not 0, so it does not switch the cache off")
        yield from self._unfit_policy()
        yield from self._unfit_place()
        if self.environment.get("AMD_COMGR_EMIT_VERBOSE_LOGS") not in (None, "0"):
            outcome = "is part of every key: what was stored without it is compiled again"
            yield misread(self, "AMD_COMGR_EMIT_VERBOSE_LOGS", Severity.RECOMPILES, outcome)

    def _unfit_policy(self) -> Iterator[Finding]:
        policy, wrong = self.environment.get("AMD_COMGR_CACHE_POLICY"), self._policy_complaint()
        if policy is None or wrong is None:
            return
        # The manual of comgr spells it so; LLVM, which reads it, does not.
        mended = policy.replace("prune_expiration=", "prune_after=")
        fix = None
        if comgr_entries.policy_complaint(mended) is None:
            fix = f"export AMD_COMGR_CACHE_POLICY={shlex.quote(mended)}"
        outcome = f"cannot be read ({wrong}): nothing is kept, and every run compiles"
        yield misread(self, "AMD_COMGR_CACHE_POLICY", Severity.RECOMPILES, outcome, fix)

    def _unfit_place(self) -> Iterator[Finding]:
        if self.environment.get("AMD_COMGR_CACHE_DIR") == "":
            outcome = "is empty: older releases keep nothing then, newer ones use the default place"
            yield misread(self, "AMD_COMGR_CACHE_DIR", Severity.RECOMPILES, outcome)
        for root in self.roots():
            variable = root.source if root.source in ("AMD_COMGR_CACHE_DIR", "XDG_CACHE_HOME") else "HOME"
            value = self.environment.get(variable)
            if self.environment.platform != "win32" and value is not None and not Path(value).is_absolute():
                outcome = "is not absolute: each working folder gets a cache of its own"
                fix = f"export {variable}={shlex.quote(str(self.environment.absolute(value)))}" if value else None
                if variable == "HOME":
                    fix = f"export HOME={shlex.quote(str(self.environment.home))}"
                yield misread(self, variable, Severity.RECOMPILES, outcome, fix)

    def switch(self, *, on: bool) -> Switch:
        """Give the variable, which comgr reads when it first compiles."""
        if on:
            return Switch(self.name, unset=frozenset({"AMD_COMGR_CACHE"}), latches=LIBRARIES)
        return Switch(self.name, {"AMD_COMGR_CACHE": "0"}, latches=LIBRARIES)

    def relocate(self, folder: Path) -> Switch:
        """Give the path; comgr makes the folder."""
        return Switch(self.name, {"AMD_COMGR_CACHE_DIR": str(folder / "comgr")}, latches=LIBRARIES)

    def refusals(self) -> Mapping[Ability, str]:
        """Refuse what needs directory handles where there are none."""
        return REFUSALS

    # ------------------------------------------------------------------ listing

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Yield entries, left temporaries, and the file that tells when entries were last dropped."""
        tree = self._tree(root)
        for leaf in tree.scan():
            if isinstance(leaf, Problem):
                yield leaf
            elif leaf.stray is not None:
                yield leaf.orphan(root.path)
            elif not contents:
                yield leaf.entry(self.name, root.path)
            else:
                yield from self._describe(root, tree, leaf)
        for leaf in Tree(self.name, root.path, _BOOK).scan():
            if isinstance(leaf, Leaf) and leaf.stray is None:
                yield Housekeeping(leaf.key, root.path, leaf.bytes, modified=leaf.modified)

    def _describe(self, root: Root, tree: Tree, leaf: Leaf) -> Iterator[Found]:
        try:
            data = tree.read_file(leaf.key)
        except LayerError as error:
            yield Problem(root.path / leaf.key, "unreadable", error.message)
            data = b""
        if data is None:
            return
        output = comgr_entries.output_of(data)
        if data and output is None:
            yield Problem(root.path / leaf.key, "damaged", _NOT_WHOLE)
        about = comgr_entries.describe(output or b"")
        yield Entry(
            layer=self.name,
            key=leaf.key,
            root=root.path,
            bytes=leaf.bytes,
            files=1,
            modified=leaf.modified,
            kernels=about.kernels,
            device=about.device,
            detail={"kind": about.kind},
            mark=leaf.mark,
        )

    def claims(self, root: Root, parts: tuple[str, ...]) -> bool:
        """Tell by the names of entries, temporaries and the time of dropping."""
        del root
        return _SHAPE.claims(parts) or _BOOK.claims(parts)

    def _tree(self, root: Root) -> Tree:
        return Tree(self.name, root.path, _SHAPE)

    # ------------------------------------------------------------------ get and put

    def read(self, root: Root, key: str) -> Artifact | None:
        """Read an entry file as it stands."""
        data = self._tree(root).read(key)
        if data is None:
            return None
        if (complaint := _complaint(data)) is not None:
            raise Damaged(self.name, complaint[1], root.path / key)
        about = comgr_entries.describe(comgr_entries.output_of(data) or b"")
        detail = {"kind": about.kind, "kernels": " ".join(about.kernels or ()), "device": about.device or ""}
        return Artifact(self.name, key, self.forms[0], data, detail)

    def write(self, root: Root, key: str, artifact: Artifact, *, replace: bool) -> None:
        """Place a whole entry under the name it was taken from, which is a hash of what is not in it."""
        if not _SHAPE.accepts(key):
            raise not_a_key(self.name, key)
        if (complaint := _complaint(artifact.data)) is not None:
            raise Damaged(self.name, complaint[1], key)
        self._tree(root).write(key, artifact.data, replace=replace)

    # ------------------------------------------------------------------ clear

    def idle_gate(self, targets: Iterable[Removable]) -> Iterator[tuple[Removable, str | None]]:
        """Leave a temporary alone that a program may still be writing."""
        users = using(LIBRARIES, processes=self.environment.processes)
        reason = None if users == () else f"{spell(users)} may be writing it"
        for target in targets:
            yield target, reason if isinstance(target, Orphan) and target.idle_only else None

    def remove(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        """Remove entries: to a program that looks for one it is a miss, and one that has it mapped keeps it."""
        return self._tree(root).remove(targets)

    # ------------------------------------------------------------------ quarantine

    def set_aside(self, root: Root, target: Target, thing: Quarantined) -> str | None:
        """Rename an entry into quarantine."""
        return self._tree(root).set_aside(target, thing)

    def bring_back(self, root: Root, thing: Quarantined, *, replace: bool) -> None:
        """Rename an entry back."""
        self._tree(root).bring_back(thing, replace=replace)

    # ------------------------------------------------------------------ verify

    def verify(self, root: Root) -> Iterator[Finding]:
        """Check that every entry is exactly an output and a log, and that bitcode and code objects are whole."""
        tree = self._tree(root)
        for leaf in tree.scan():
            if isinstance(leaf, Problem):
                yield self.told(root, leaf)
            elif leaf.stray is None:
                yield from self._examined(root, tree, leaf)

    def _examined(self, root: Root, tree: Tree, leaf: Leaf) -> Iterator[Finding]:
        try:
            data = tree.read_file(leaf.key)
            complaint = None if data is None else _complaint(data)
        except LayerError as error:
            complaint = Severity.RECOMPILES, error.message
        if complaint is not None:
            severity, message = complaint
            fix, thing = f"cachectl purge comgr --key {leaf.key}", leaf.entry(self.name, root.path)
            yield Finding(self.name, root.path, leaf.key, severity, "damaged", message, fix, thing)


_NOT_WHOLE: Final = (
    "is not exactly an output and a log, each of the length it says; comgr compiles it again at every run, and never "
    "replaces it"
)


def _complaint(data: bytes) -> tuple[Severity, str] | None:
    """Say what is wrong with an entry, and what comgr makes of it."""
    output = comgr_entries.output_of(data)
    if output is None:
        return Severity.RECOMPILES, _NOT_WHOLE
    wrong = comgr_entries.complaint(output)
    return None if wrong is None else (Severity.FAILS, f"{wrong}; comgr hands it on as it is")
