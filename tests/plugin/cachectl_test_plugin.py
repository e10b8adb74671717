"""A third party's layers: one good (a flat folder of notes), and every bad one that can be thought of."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from cachectl.layers.base.environment import Environment
from cachectl.layers.core.declarations import EnvSwitch, Places, at_load
from cachectl.layers.core.entry import Entry, Found, Usage
from cachectl.layers.core.finding import Finding
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.root import Root, Scope, State
from cachectl.layers.core.selection import ALL, Selection
from cachectl.layers.core.store import Codec
from cachectl.layers.core.switch import Switch
from cachectl.layers.formats.details import Details
from cachectl.layers.stores.files import Files


def _folder(environment: Environment) -> tuple[Path, str]:
    return environment.home_folder / ".cache/notes", "default"


class Notes(Layer):
    name = "notes"
    title = "a third party's notes"
    places = Places("NOTES_DIR", default=_folder)
    switch = EnvSwitch("NOTES_OFF", off="1", read=at_load())
    store = Files(r"[0-9a-f]{8}\.note", codec=Codec("notes/1"))


class TellingStore(Files):
    def scan(self, root: Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[Found]:
        for found in super().scan(root, selection, contents=contents):
            yield found._replace(details=Details(device=root.path.name)) if isinstance(found, Entry) else found


class Telling(Notes):
    """Names the root of each entry as its device; it has roots only if ``TELLING`` is set."""

    name = "Telling"
    store = TellingStore(r"[0-9a-f]{8}\.note", codec=Codec("notes/1"))

    def roots(self) -> tuple[Root, ...]:
        value = self.environment.get("TELLING")
        roots = super().roots() if value else ()
        return (*roots, *(root._replace(path=root.path.with_name("more")) for root in roots if value == "twice"))


class TalkingStore(Files):
    def usage(self, root: Root) -> Usage:
        raise ZeroDivisionError

    def scan(self, root: Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[Found]:
        yield Entry(self.name, "a", root.path, 1, 1)
        raise ValueError("no more")

    def verify(self, root: Root) -> Iterator[Finding]:
        raise ValueError("two\nlines")


#: What is no answer to any question.
ANSWERS = {"nothing": None, "text": "text"}


class Talking(Notes):
    """Fails in every call, each time in another way."""

    name = "talking"
    title = "a layer that is wrong"
    store = TalkingStore(r"[0-9a-f]{8}\.note", codec=Codec("notes/1"))

    def roots(self) -> tuple[Root, ...]:
        if self.environment.get("TALKING") == "roots":
            raise ZeroDivisionError
        if self.environment.get("TALKING") in ANSWERS:
            return cast("tuple[Root, ...]", ANSWERS[self.environment.variables["TALKING"]])
        return (Root(self.environment.home_folder, Scope.USER, "default"),)

    def state(self) -> State:
        if self.environment.get("TALKING") in ANSWERS:
            return cast("State", ANSWERS[self.environment.variables["TALKING"]])
        raise TypeError("no state")

    def disable(self) -> Switch:
        raise KeyError("switch")

    def relocate(self, folder: Path) -> Switch:
        raise RecursionError


class Raising(Notes):
    def __init__(self, environment: object) -> None:
        raise RuntimeError("on purpose")


class NoLayer:
    def __init__(self, environment: object) -> None:
        pass
