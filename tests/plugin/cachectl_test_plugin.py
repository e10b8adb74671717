"""A third party's layers: one good (a flat folder of notes), and every bad one that can be thought of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cachectl.layers.base.facts import (
    Artifact,
    Census,
    Condition,
    Entry,
    Finding,
    Found,
    Outcome,
    Problem,
    Root,
    Scope,
    State,
    Switch,
    Target,
)
from cachectl.layers.base.layer import Layer
from cachectl.layers.stores.tree import Shape, Tree


class Notes(Layer):
    name = "notes"
    title = "a third party's notes"
    forms = ("notes/1",)
    shape = Shape((re.compile(r"[0-9a-f]{8}\.note"),), folders=False)

    def roots(self) -> tuple[Root, ...]:
        named = self.environment.get("NOTES_DIR")
        path = Path(named) if named else self.environment.home_folder / ".cache" / "notes"
        return (Root(path, Scope.USER, "NOTES_DIR" if named else "default"),)

    def state(self) -> State:
        if self.environment.get("NOTES_OFF") == "1":
            return State(Condition.DISABLED, "NOTES_OFF=1")
        return State(Condition.ENABLED, "on by default")

    def tree(self, root: Root) -> Tree:
        return Tree(self.name, root.path, self.shape)

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        for leaf in self.tree(root).scan():
            if isinstance(leaf, Problem):
                yield leaf
            else:
                yield Entry(self.name, leaf.key, root.path, leaf.bytes, 1, modified=leaf.modified, mark=leaf.mark)

    def read(self, root: Root, key: str) -> Artifact | None:
        data = self.tree(root).read(key)
        return None if data is None else Artifact(self.name, key, self.forms[0], data)

    def write(self, root: Root, key: str, artifact: Artifact, *, replace: bool) -> None:
        self.tree(root).write(key, artifact.data, replace=replace)

    def remove(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        return self.tree(root).remove(targets)

    def switched(self, *, on: bool) -> Switch:
        return Switch(self.name, {} if on else {"NOTES_OFF": "1"}, frozenset({"NOTES_OFF"} if on else ()))

    def relocate(self, folder: Path) -> Switch:
        return Switch(self.name, {"NOTES_DIR": str(folder / "notes")})

    def verify(self, root: Root) -> Iterator[Finding]:
        yield from ()


class Telling(Notes):
    """Tells of its entries what ``TELLING`` says, and is there for those who set it."""

    name = "Telling"
    forms = ("telling/1",)

    def roots(self) -> tuple[Root, ...]:
        told = self.environment.get("TELLING")
        roots = super().roots() if told else ()
        return (*roots, *(replace(root, path=root.path.with_name("more")) for root in roots if told == "twice"))

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        for found in super().scan(root, contents=contents):
            yield replace(found, device=root.path.name) if isinstance(found, Entry) else found

    def read(self, root: Root, key: str) -> Artifact | None:
        artifact = super().read(root, key)
        kinds: dict[str | None, Any] = {"number": {"n": 3}, "mixture": {1: "a", "b": "c"}, "nothing": None}
        detail = kinds.get(self.environment.get("TELLING"), {})
        return artifact and replace(artifact, form=self.forms[0], detail=detail)


class Talking(Notes):
    """Wrong in every call, each time in another way."""

    name = "talking"
    title = "a layer that is wrong"

    def roots(self) -> tuple[Root, ...]:
        print("roots, said on standard output")  # noqa: T201
        wrong = self.environment.get("TALKING") or ""
        if wrong == "roots":
            raise SystemExit(3)
        if wrong == "none":
            return None  # type: ignore[return-value]
        return (Root(self.environment.home_folder, Scope.USER, "default"),)

    def state(self) -> State:
        return "enabled"  # type: ignore[return-value]

    def census(self, root: Root) -> Census:
        raise ZeroDivisionError

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        yield Entry(self.name, "a", root.path, 1, 1)
        yield Entry(self.name, "b", str(root.path), "two", 1)  # type: ignore[arg-type]

    def switched(self, *, on: bool) -> Switch:
        raise KeyError("switch")

    def relocate(self, folder: Path) -> Switch:
        raise RecursionError

    def verify(self, root: Root) -> Iterator[Finding]:
        raise ValueError("two\nlines")


class Untitled(Notes):
    name = "untitled"
    title = None  # type: ignore[assignment]


class Nameless(Notes):
    name = "--all"


class Raising(Notes):
    def __init__(self, environment: object) -> None:
        raise RuntimeError("on purpose")


class NoLayer:
    def __init__(self, environment: object) -> None:
        pass


class Usurper(Notes):
    name = "pocl"
