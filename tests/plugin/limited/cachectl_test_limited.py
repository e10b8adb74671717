"""A third party's layers that lack something which the guide lets them lack, and two that fail in every method."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, NoReturn

from cachectl.layers.base.environment import Environment
from cachectl.layers.core.declarations import Places, Rule
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.parts import About, Lookups
from cachectl.layers.core.store import Codec
from cachectl.layers.core.switch import Ability
from cachectl.layers.stores.files import Files

NAMES = r"[0-9a-f]{8}\.note"
ANY_BYTES = Codec("limited/1")


def _folder(environment: Environment) -> tuple[Path, str]:
    return environment.home_folder / ".cache/limited", "default"


class Switchless(Layer):
    """Moves, and nothing switches it off."""

    name, title = "switchless", "no switch"
    places = Places("SWITCHLESS_DIR", default=_folder)
    store = Files(NAMES, codec=ANY_BYTES)


class Placeless(Layer):
    """Exists on another platform only."""

    name, title = "placeless", "no place here"
    places = Places("", linux=(), windows=(Rule("LOCALAPPDATA", "limited"),), unmoved="is for Windows only")
    store = Files(NAMES, codec=ANY_BYTES)


class ReadOnlyFiles(Files):
    refusals: ClassVar[Mapping[Ability, str]] = {
        **Files.refusals,
        Ability.PUT: "is only read",
        Ability.CLEAR: "is only read",
    }


class ReadOnly(Switchless):
    """Is neither changed, nor moved, nor switched off."""

    name, title = "readonly", "only read"
    places = Places("READONLY_DIR", default=_folder, unmoved="lies on a disk of its own")
    store = ReadOnlyFiles(NAMES, codec=ANY_BYTES)


class Raising:
    error: type[BaseException] = RuntimeError

    def fail(self, *_: object, **__: object) -> NoReturn:
        raise self.error("on purpose")


class FailingFiles(Raising, Files):
    scan = usage = read = write = remove = verify = kind_of = in_use = Raising.fail  # type: ignore[assignment]


class EndingFiles(FailingFiles):
    error = SystemExit


class Failing(Raising, Layer):
    """Fails in every method."""

    name, title = "failing", "fails"
    places = Places("FAILING_DIR", default=_folder)
    about = About(lookups=Lookups(watchers={"failing": Path("/nowhere/watcher.py")}))
    store = FailingFiles(NAMES, codec=ANY_BYTES)
    roots = state = disable = enable = relocate = diagnose = Raising.fail  # type: ignore[assignment]


class Ending(Failing):
    """Ends the program in every method."""

    name, title = "ending", "ends the program"
    store = EndingFiles(NAMES, codec=ANY_BYTES)
    error = SystemExit
