"""The layer ``pytools``: persistent dictionaries of sumpy, pytato and user code.

It is the base of ``loopy`` and ``pyopencl-invoker``, whose dictionaries have identifiers that begin with their names.

Source: ``pytools/persistent_dict.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary

from cachectl.layers.base import declarations, facts, lazy, parts
from cachectl.layers.base.environment import Environment, is_common_cache_home, release_of, user_cache_folder
from cachectl.layers.base.facts import Condition, Severity, State
from cachectl.layers.base.layer import Layer, faults_of, misread

#: The first releases that read the value of their variables.
_BOOLEAN_SINCE: Final = {"loopy": (2025, 1), "pyopencl": (2024, 2)}
#: Sumpy asks only whether its variables are set.
_SETTINGS: Final = tuple(
    declarations.EnvSwitch(
        variable,
        "y|yes|t|true|on|1",
        "(?!)",
        Severity.RECOMPILES,
        "switches sumpy's dictionaries off all the same: sumpy asks only whether it is set",
        what="sumpy's dictionaries",
    )
    for variable in ("SUMPY_NO_CACHE", "CG_NO_CACHE")
)


def dictionary_store(layer: str, owns_identifier: Callable[[str], bool]) -> Any:  # noqa: ANN401 - loaded when it is used
    """Return the store of the dictionaries that belong to a layer by their identifiers."""
    return lazy.later("cachectl.layers.pytools.dictionaries", "Dictionaries", f"{layer}-pdict", owns_identifier)


class DictionaryPortability(parts.Portability):
    """A dictionary's name bears Python and the versions of the libraries whose code its values depend on."""

    def facts(self, environment: Environment) -> parts.Facts:
        """Return the versions of Python and of the packages that dictionaries are named by."""
        packages = ("loopy", "islpy", "cgen", "pytools", "pyopencl", "numpy")
        return {"python": environment.python, **{name: environment.installed(name) for name in packages}}

    def outlook(
        self, versions: Mapping[str, str], there: parts.Facts, environment: Environment
    ) -> parts.Outlook | None:
        """Judge a row by the versions in its dictionary's name, as ``ls`` decides which rows are stale."""
        from cachectl.layers.formats.pdict import UNKNOWN

        del there
        for name, version in sorted(versions.items()):
            here = environment.python if name == "python" else environment.installed(name)
            if here is None:
                return parts.Outlook(None, f"{name} {version} is not installed beside cachectl")
            if version not in (here, UNKNOWN):
                return parts.Outlook(False, f"stored with {name} {version}, here {here}")  # noqa: FBT003
        return None


class DictionaryLookups(parts.Lookups):
    """Dictionaries are watched by the methods of pytools; the identifier says to which layer each belongs."""

    by = "pytools"
    modules = ("pytools.persistent_dict",)
    watchers: Mapping[str, Path] = dict.fromkeys(modules, Path(__file__).parents[1] / "inside" / "dictionaries.py")
    imports: tuple[str, ...] = ("pytools",)
    opened = ("/pdict-v5-",)

    def __init__(self, owns_identifier: Callable[[str], bool]) -> None:
        super().__init__()
        self._owns = owns_identifier

    def owns(self, event: Mapping[str, Any], layer: str) -> bool:
        """Return whether the dictionary of an event is the layer's."""
        del layer
        return event["layer"] == "pytools" and self._owns(str(event.get("dictionary") or ""))

    def part_of(self, detail: Mapping[str, Any]) -> str | None:
        """Return the dictionary's identifier without the versions that loopy and PyOpenCL append."""
        return re.sub(r"-v\d.*", "", str(detail["dictionary"])) if detail.get("dictionary") else None

    def difference(self, alike: Sequence[facts.Entry], event: Mapping[str, Any]) -> str:
        """Compare the versions in the identifiers of the dictionaries; the keys themselves are hashes."""
        from cachectl.layers.formats.pdict import packages_of

        here = packages_of(str(event.get("dictionary") or ""))
        differing = [parts.named_parts(entry.versions, here) for entry in alike]
        named = [words for words in differing if words is not None]
        if here and len(named) == len(alike):
            return f"an entry of the same kernel is there, but it {min(named, key=len)}"
        return super().difference(alike, event)


def _owns(identifier: str) -> bool:
    # Dictionaries of loopy and PyOpenCL belong to other layers.
    return not identifier.startswith(("loopy-", "pyopencl-"))


class PytoolsDictionaries(Layer):
    """Persistent dictionaries that belong to neither loopy nor PyOpenCL."""

    name = "pytools"
    title = "other pytools persistent dictionaries"
    about = parts.About(
        on_network=facts.Hazard(
            Severity.RISKS,
            "the locks of sqlite may not hold there, so programs of several nodes may stall, or damage a dictionary",
        ),
        among_ranks=facts.Hazard(Severity.HARMLESS, "sqlite lets one of them write at a time, and the others wait"),
        when_closed=facts.Hazard(Severity.FAILS, "no dictionary can be made or extended, and programs that try fail"),
        reveals="whatever the programs keep in their dictionaries",
        portability=DictionaryPortability(),
        lookups=DictionaryLookups(_owns),
    )
    store: Any = dictionary_store("pytools", _owns)
    #: Modules that open the layer's dictionaries when they are imported.
    opened_by: ClassVar[tuple[str, ...]] = ()
    #: The distribution that opens them.
    library: ClassVar[str] = "pytools"
    #: Variables that switch the dictionaries off when the library is imported.
    variables: ClassVar[tuple[str, ...]] = ()

    def roots(self) -> tuple[facts.Root, ...]:
        """Return the pytools folder; pytools reads the environment whenever it opens a dictionary."""
        return user_cache_roots(self.environment, "pytools")

    def state(self) -> State:
        """Read the variables as the library does when it is imported; pytools has none, but sumpy has one."""
        library, root = self.library, self.roots()[0]
        for finding in diagnosed(self, library, self.variables):
            return State(Condition.DISABLED, finding.message)
        if not self.variables and self.environment.get("SUMPY_NO_CACHE") is not None:
            return State(Condition.ENABLED, "off for sumpy alone (SUMPY_NO_CACHE is set, its value is not read)")
        if self.environment.installed(library) is None and next(self.store.dictionaries(root), None) is None:
            return State(Condition.ABSENT, f"{library} is not installed here and has left no dictionary")
        named = " or ".join(self.variables)
        return State(Condition.ENABLED, f"not switched off by {named}" if named else "pytools has no switch")

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the variables, those of sumpy for pytools."""
        yield from diagnosed(self, self.library, self.variables)
        if not self.variables:
            known = 1 if self.environment.installed("sumpy") is None else 2
            yield from (finding for _, finding in faults_of(self, _SETTINGS[:known]))
        yield from relative_cache_home(self)

    def enable(self) -> facts.Switch:
        """Return sumpy's variable."""
        return facts.Switch(self.name, unset=frozenset({"SUMPY_NO_CACHE"}), takes_effect=facts.When.NEXT_IMPORT)

    def disable(self) -> facts.Switch:
        """Return sumpy's variable, and patches that replace the switch that pytools lacks in this process."""
        patches = tuple(
            facts.Patch("pytools.persistent_dict", owner, name, partial(_without, self.store.owns_identifier, name))
            for owner in ("PersistentDict", "WriteOncePersistentDict")
            for name in ("fetch", "store", "store_if_not_present")
        )
        return facts.Switch(self.name, {"SUMPY_NO_CACHE": "1"}, patches=patches, takes_effect=facts.When.NOW)

    def relocate(self, folder: Path) -> facts.Switch:
        """Return the user cache folder; open dictionaries stay where they are."""
        return relocate_user_cache(self, folder, self.opened_by)


def diagnosed(layer: Layer, distribution: str, variables: tuple[str, ...]) -> Iterator[facts.Finding]:
    """Yield how variables switch a layer off that are read with ``pytools.strtobool`` at import."""
    version = layer.environment.installed(distribution)
    fine, severity = "n|no|f|false|off|0", Severity.FAILS
    outcome = f"is not a boolean: import {distribution} raises ValueError"
    if (release_of(version) or (9999,)) < _BOOLEAN_SINCE.get(distribution, ()):
        fine, severity = "(?!)", Severity.RECOMPILES
        outcome = f"switches {layer.title} off all the same: {distribution} {version} asks only whether it is set"
    settings = (
        declarations.EnvSwitch(variable, "y|yes|t|true|on|1", fine, severity, outcome) for variable in variables
    )
    yield from (finding for _, finding in faults_of(layer, settings))


def relative_cache_home(layer: Layer) -> Iterator[facts.Finding]:
    """Yield a finding if ``XDG_CACHE_HOME`` is not absolute: pytools and PyOpenCL ignore it, or resolve it anywhere."""
    value = layer.environment.get("XDG_CACHE_HOME")
    if layer.environment.platform == "linux" and value and not Path(value).is_absolute():
        outcome = "is not absolute: pytools and PyOpenCL ignore it, and use ~/.cache"
        if layer.environment.follows_relative_cache_home:
            outcome = "is not absolute: pytools and PyOpenCL make a cache in every folder that a program starts in"
        yield misread(layer, "XDG_CACHE_HOME", Severity.HARMLESS, outcome)


def user_cache_roots(environment: Environment, application: str) -> tuple[facts.Root, ...]:
    """Return the places of an application in the user's cache folder, that of the environment's own Python first.

    There are several only if releases of platformdirs disagree about the environment, and known Pythons differ in it.
    """
    path, source = user_cache_folder(environment, application)
    roots = {path: facts.Root(path, facts.Scope.USER, source)}
    if not is_common_cache_home(environment):
        from cachectl.layers.host.pythons import pythons_of

        for python in pythons_of(environment)[1:]:
            if python.present and python.installed("platformdirs") is not None:
                path, source = user_cache_folder(replace(environment, installed=python.installed), application)
                roots.setdefault(path, facts.Root(path, facts.Scope.USER, f"{source}, of {python.path}"))
    return tuple(roots.values())


def relocate_user_cache(layer: Layer, folder: Path, opened_by: tuple[str, ...] = ()) -> facts.Switch:
    """Return the variable that moves the user cache folder, which pytools and PyOpenCL follow."""
    variable = "WIN_PD_OVERRIDE_LOCAL_APPDATA" if layer.environment.platform == "win32" else "XDG_CACHE_HOME"
    return facts.Switch(
        layer.name, {variable: str(folder / "xdg")}, read_at_import=opened_by, takes_effect=facts.When.NEXT_IMPORT
    )


def _without(owns_identifier: Callable[[str], bool], name: str, method: Callable[..., object]) -> Callable[..., object]:
    """Return a ``fetch`` that misses, or a ``store`` that does nothing, in the dictionaries that a layer owns."""

    @wraps(method)
    def elsewhere(dictionary: Any, *arguments: object, **options: object) -> object:  # noqa: ANN401 - pytools'
        if not owns_identifier(dictionary.identifier):
            return method(dictionary, *arguments, **options)
        if name == "fetch":
            from pytools.persistent_dict import NoSuchEntryError

            raise NoSuchEntryError(*arguments[:1])
        return None

    return elsewhere


def forgetting(method: Callable[..., object]) -> Callable[..., object]:
    """Return a replacement for a method that pytools' ``memoize_method`` wraps: every object starts with no memory.

    What an object remembers meanwhile goes with the replacement. What it remembered before is kept for the original.
    """
    from inspect import unwrap

    bare = unwrap(method)
    memo: WeakKeyDictionary[Any, dict[object, object]] = WeakKeyDictionary()

    @wraps(method)
    def remember_again(owner: object, *arguments: object, **options: object) -> object:
        remembered = memo.setdefault(owner, {})
        key = (arguments, tuple(sorted(options.items())))
        if key not in remembered:
            remembered[key] = bare(owner, *arguments, **options)
        return remembered[key]

    return remember_again
