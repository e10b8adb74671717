"""The layer ``toyc``: compiled kernels, one file each, in a flat folder."""

import re
from collections.abc import Iterator
from pathlib import Path

from cachectl.layers.base import errors, facts
from cachectl.layers.base.environment import Environment, user_cache_folder
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.parts import Call, Facts, Lookups, Portability
from cachectl.layers.stores.tree import Shape, Tree

SHAPE = Shape((re.compile(r"[0-9a-f]{16}\.toyc"),), folders=False)


def kernels_in(data: bytes) -> tuple[str, ...] | None:
    return tuple(map(bytes.decode, re.findall(rb"\ATOYC (\w+)\n", data))) or None  # "TOYC", the kernel's name, its code


class ToycPortability(Portability):
    def facts(self, environment: Environment) -> Facts:
        return {}  # a kernel fits every processor of one kind, which is compared anyway


class ToycLookups(Lookups):
    by = "toyc"
    calls = (Call("toyc", "find"), Call("toyc", "keep", stores=True))


class Toyc(Layer):
    interface = 1
    name = "toyc"
    title = "toyc kernels"
    forms = ("toyc-kernel/1",)
    reveals = "names of your kernels"
    portability = ToycPortability()
    lookups = ToycLookups()

    def roots(self) -> tuple[facts.Root, ...]:
        path, source = user_cache_folder(self.environment, "toyc")
        if named := self.environment.get("TOYC_CACHE_DIR"):
            path, source = self.environment.absolute(named), "TOYC_CACHE_DIR"
        return (facts.Root(path, facts.Scope.USER, source),)

    def state(self) -> facts.State:
        off = self.environment.get("TOYC_CACHE") == "0"
        condition = facts.Condition.DISABLED if off else facts.Condition.ENABLED
        return facts.State(condition, "TOYC_CACHE=0" if off else "on unless TOYC_CACHE=0")

    def switch(self, *, on: bool) -> facts.Switch:
        put, unset = ({}, {"TOYC_CACHE"}) if on else ({"TOYC_CACHE": "0"}, set())
        return facts.Switch(self.name, put, frozenset(unset), latches=("libtoyc.so",))

    def relocate(self, folder: Path) -> facts.Switch:
        return facts.Switch(self.name, {"TOYC_CACHE_DIR": str(folder / "toyc")}, latches=("libtoyc.so",))

    def scan(self, root: facts.Root, *, contents: bool = True) -> Iterator[facts.Found]:
        for leaf in self.tree(root).scan():
            if isinstance(leaf, facts.Problem) or leaf.stray is not None:  # what cachectl itself left, or moved aside
                yield leaf if isinstance(leaf, facts.Problem) else leaf.orphan(root.path)
                continue
            head = self.tree(root).read_file(leaf.key, limit=100) if contents else None
            about = (self.name, leaf.key, root.path, leaf.bytes, len(leaf.members))
            yield facts.Entry(*about, modified=leaf.modified, kernels=kernels_in(head or b""), mark=leaf.mark)

    def read(self, root: facts.Root, key: str) -> facts.Artifact | None:
        data = self.tree(root).read(key)
        return None if data is None else facts.Artifact(self.name, key, self.forms[0], data)

    def write(self, root: facts.Root, key: str, artifact: facts.Artifact, *, replace: bool) -> None:
        if kernels_in(artifact.data) is None:
            raise errors.Damaged(self.name, "is no toyc kernel", key)
        self.tree(root).write(key, artifact.data, replace=replace)

    def remove(self, root: facts.Root, targets: tuple[facts.Target, ...]) -> facts.Outcome:
        return self.tree(root).remove(targets)

    def verify(self, root: facts.Root) -> Iterator[facts.Finding]:
        for found in self.scan(root):
            if isinstance(found, facts.Problem):
                yield self.told(root, found)
            elif isinstance(found, facts.Entry) and found.kernels is None:
                why, fix = "has no toyc header", f"cachectl purge toyc --key {found.key}"
                yield facts.Finding(self.name, root.path, found.key, facts.Severity.FAILS, "magic", why, fix, found)

    def set_aside(self, root: facts.Root, target: facts.Target, thing: facts.Quarantined) -> str | None:
        return self.tree(root).set_aside(target, thing)

    def bring_back(self, root: facts.Root, thing: facts.Quarantined, *, replace: bool) -> None:
        self.tree(root).bring_back(thing, replace=replace)

    def tree(self, root: facts.Root) -> Tree:
        return Tree(self.name, root.path, SHAPE)
