"""A third party's layers that lack something which the guide lets them lack, and two that fail in every method."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, NoReturn

from cachectl.layers import core
from cachectl.layers.formats.details import Details
from cachectl.layers.stores.files import Files

NAMES = r"[0-9a-f]{8}\.note"


class AnyBytes(core.Codec):
    form = "limited/1"

    def describe(self, data: bytes) -> Details:
        return Details()

    def check(self, data: bytes) -> core.Damage | None:
        return None


def _folder(environment: core.Environment) -> tuple[Path, str]:
    return environment.home_folder / ".cache/limited", "default"


class Switchless(core.Layer):
    """Moves, and nothing switches it off."""

    name, title = "switchless", "no switch"
    places = core.Places("SWITCHLESS_DIR", default=_folder)
    store = Files(NAMES, codec=AnyBytes())


class Placeless(core.Layer):
    """Exists on another platform only."""

    name, title = "placeless", "no place here"
    places = core.Places("", linux=(), windows=(core.Rule("LOCALAPPDATA", "limited"),), unmoved="is for Windows only")
    store = Files(NAMES, codec=AnyBytes())


class ReadOnlyFiles(Files):
    refusals: ClassVar[Mapping[core.Ability, str]] = {
        **Files.refusals,
        core.Ability.PUT: "is only read",
        core.Ability.CLEAR: "is only read",
    }


class ReadOnly(Switchless):
    """Is neither changed, nor moved, nor switched off."""

    name, title = "readonly", "only read"
    places = core.Places("READONLY_DIR", default=_folder, unmoved="lies on a disk of its own")
    store = ReadOnlyFiles(NAMES, codec=AnyBytes())


class FailingFiles(Files):
    error: type[BaseException] = RuntimeError

    def _fail(self, *_: object, **__: object) -> NoReturn:
        raise self.error("on purpose")

    scan = usage = read = write = remove = verify = kind_of = in_use = _fail  # type: ignore[assignment]


class EndingFiles(FailingFiles):
    error = SystemExit


class Failing(core.Layer):
    """Fails in every method."""

    name, title = "failing", "fails"
    places = core.Places("FAILING_DIR", default=_folder)
    about = core.About(lookups=core.Lookups(watchers={"failing": Path("/nowhere/watcher.py")}))
    store = FailingFiles(NAMES, codec=AnyBytes())
    error: type[BaseException] = RuntimeError

    def _fail(self, *_: object, **__: object) -> NoReturn:
        raise self.error("on purpose")

    roots = state = disable = enable = relocate = diagnose = _fail  # type: ignore[assignment]


class Ending(Failing):
    """Ends the program in every method."""

    name, title = "ending", "ends the program"
    store = EndingFiles(NAMES, codec=AnyBytes())
    error = SystemExit
