"""The layers of pytools' persistent dictionaries: ``loopy``, and ``pytools`` for those of sumpy, pytato and user code.

:class:`PytoolsDictionaries` is also the base of ``pyopencl-invoker``. A dictionary belongs to one of the three by the
beginning of its identifier.

Sources: ``pytools/persistent_dict.py``, ``loopy/__init__.py`` (switches), ``loopy/tools.py`` (loopy's dictionaries).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from cachectl.layers.base.environment import Environment, is_common_cache_home, release_of, user_cache_folder
from cachectl.layers.core.declarations import EnvSwitch, Family, Places
from cachectl.layers.core.finding import FAILS, HARMLESS, RECOMPILES, RISKS, Code, Finding, Hazard
from cachectl.layers.core.layer import Layer, faults_of, misread
from cachectl.layers.core.parts import About, Facts, Lookups, Outlook, Portability
from cachectl.layers.core.root import ABSENT, DISABLED, ENABLED, UNKNOWN, Root, Scope, State
from cachectl.layers.core.store import Store
from cachectl.layers.core.switch import NEXT_IMPORT, NOW, Switch
from cachectl.layers.disk import distributions
from cachectl.layers.disk.place import Use

if TYPE_CHECKING:
    from cachectl.layers.pytools.dictionaries import Dictionaries

#: The beginnings of identifiers, and the layers of their dictionaries; others belong to ``pytools``.
_PREFIXES = {"loopy-": "loopy", "pyopencl-": "pyopencl-invoker"}
_INSIDE = Path(__file__).parents[1] / "inside"
_LOOPY_FLAG = ("loopy", "CACHING_ENABLED")
#: Loopy's executors remember what they have compiled.
_EXECUTORS = (
    ("loopy.target.pyopencl_execution", "PyOpenCLExecutor"),
    ("loopy.target.c.c_execution", "CExecutor"),
)
#: The packages whose versions are in the names of loopy's dictionaries (``loopy/version.py``, DATA_MODEL_VERSION).
_NAMED = ("loopy", "islpy", "cgen")
EDITABLE = Code(
    "editable",
    (RISKS,),
    "A package is installed as editable, and was changed after the entries were stored. Its version, by which loopy "
    "names its dictionaries, is the same: programs get what the old sources made.",
    "`cachectl purge loopy` after each change.",
)
#: The first releases that read the value of their variables.
_BOOLEAN_SINCE = {"loopy": (2025, 1), "pyopencl": (2024, 2)}
#: Sumpy asks only whether its variables are set.
_SETTINGS = tuple(
    EnvSwitch(
        variable,
        "y|yes|t|true|on|1",
        "(?!)",
        RECOMPILES,
        "switches sumpy's dictionaries off all the same: sumpy asks only whether it is set",
        what="sumpy's dictionaries",
    )
    for variable in ("SUMPY_NO_CACHE", "CG_NO_CACHE")
)


def layer_of(identifier: str) -> str:
    """Return the name of the layer to which the dictionaries of an identifier belong."""
    return next((name for prefix, name in _PREFIXES.items() if identifier.startswith(prefix)), "pytools")


def _facts(environment: Environment) -> Facts:
    """Return the versions of Python and of the packages that dictionaries are named by."""
    packages = ("loopy", "islpy", "cgen", "pytools", "pyopencl", "numpy")
    return {"python": environment.python, **{name: environment.installed(name) for name in packages}}


def _outlook(versions: Mapping[str, str], there: Facts, environment: Environment) -> Outlook | None:
    """Judge a row by the versions in its dictionary's name, as ``ls`` decides which rows are stale."""
    from cachectl.layers.formats import pdict

    del there
    for name, version in sorted(versions.items()):
        here = environment.python if name == "python" else environment.installed(name)
        if here is None:
            return Outlook(None, f"{name} {version} is not installed next to cachectl")
        if version not in (here, pdict.UNKNOWN):
            return Outlook(False, f"stored with {name} {version}, here {here}")  # noqa: FBT003
    return None


def _owns(noted: str, dictionary: str, layer: str) -> bool:
    """Return whether a dictionary is the layer's."""
    return noted == "pytools" and layer_of(dictionary) == layer


#: Dictionaries are watched by the methods of pytools; the identifier says to which layer each belongs.
_WATCHERS = {"pytools.persistent_dict": _INSIDE / "dictionaries.py"}
LOOKUPS = Lookups(
    "pytools",
    watchers=_WATCHERS,
    modules=tuple(_WATCHERS),
    imports=("pytools",),
    opened=("/pdict-v5-",),
    owns=_owns,
    saves=(),
)
#: The stages of loopy are timed, too.
_STAGES = dict.fromkeys(
    ("loopy", "loopy.target.pyopencl_execution", "loopy.target.c.c_execution"), _INSIDE / "loopy_stages.py"
)


class UserCacheLayer(Layer):
    """A layer of a Python library in the user's cache folder, whose variables switch it off when it is imported."""

    #: The distribution, and the application by which platformdirs names the folder.
    library: ClassVar[str]
    application: ClassVar[str]
    places = Places("XDG_CACHE_HOME")
    family = Family(
        "(?:LOOPY|PYOPENCL|PYTOOLS|SUMPY)_(?:.*_)?CACHE.*",
        "LOOPY_NO_CACHE CG_NO_CACHE SUMPY_NO_CACHE SUMPY_NO_CACHE_KERNELS LOOPY_ABORT_ON_CACHE_MISS PYOPENCL_NO_CACHE "
        "PYOPENCL_CACHE_FAILURE_FATAL",
    )
    #: Variables that are read with ``pytools.strtobool``.
    variables: ClassVar[tuple[str, ...]] = ()
    #: Modules that open the layer's dictionaries when they are imported.
    opened_by: ClassVar[tuple[str, ...]] = ()

    def roots(self) -> tuple[Root, ...]:
        """Return the places in the user's cache folder, that of the environment's own Python first.

        There are several only if releases of platformdirs disagree about the environment, and known Pythons differ in
        it.
        """
        environment, application = self.environment, self.application
        path, source = user_cache_folder(environment, application)
        roots = {path: Root(path, Scope.USER, source)}
        if not is_common_cache_home(environment):
            from cachectl.layers.host.pythons import pythons_of

            for python in pythons_of(environment)[1:]:
                if python.present and python.installed("platformdirs") is not None:
                    path, source = user_cache_folder(environment._replace(installed=python.installed), application)
                    roots.setdefault(path, Root(path, Scope.USER, f"{source}, of {python.path}"))
        return tuple(roots.values())

    def switched_off(self) -> Iterator[tuple[str | None, Finding]]:
        """Yield the releases of the library for which the variables switch the layer off, and how."""
        is_set = any(self.environment.get(variable) is not None for variable in self.variables)
        for version in self._releases() if is_set else ():
            fine, severity = "n|no|f|false|off|0", FAILS
            outcome = f"is not a boolean: import {self.library} raises ValueError"
            if self._asks_only(version):
                fine, severity = "(?!)", RECOMPILES
                outcome = (
                    f"switches {self.title} off all the same: {self.library} {version} asks only whether it is set"
                )
            for variable in self.variables:
                switch = EnvSwitch(variable, "y|yes|t|true|on|1", fine, severity, outcome)
                yield from ((version, finding) for _, finding in faults_of(self, (switch,)))

    def _asks_only(self, version: str | None) -> bool:
        return (release_of(version) or (9999,)) < _BOOLEAN_SINCE.get(self.library, ())

    def _releases(self) -> tuple[str | None, ...]:
        """Return one of those releases, which known Pythons have, that read the variables alike; that of this first."""
        from cachectl.layers.host.pythons import pythons_of

        releases = (python.installed(self.library) for python in pythons_of(self.environment))
        alike = {self._asks_only(release): release for release in reversed([*filter(None, releases)])}
        return tuple(reversed(alike.values())) or (None,)

    def off_state(self) -> State | None:
        """Return that the variables switch the layer off; unknown if some known Pythons take them otherwise."""
        if all(self.environment.get(variable) is None for variable in self.variables):
            return None
        if not (off := dict(self.switched_off())):
            return None
        message = next(iter(off.values())).message
        others = ", ".join(f"{self.library} {release}" for release in self._releases() if release not in off)
        return State(UNKNOWN, f"{message}; not for {others}") if others else State(DISABLED, message)

    def relocate(self, folder: Path) -> Switch:
        """Return the variable that moves the user cache folder; open dictionaries stay where they are."""
        variable = "WIN_PD_OVERRIDE_LOCAL_APPDATA" if self.environment.platform == "win32" else "XDG_CACHE_HOME"
        moved = {variable: str(folder / "xdg")}
        return Switch(self.name, moved, read_at_import=self.opened_by, takes_effect=NEXT_IMPORT)

    def diagnose(self) -> Iterator[Finding]:
        """Yield problems with the variables, and an ``XDG_CACHE_HOME`` that is ignored, or resolved anywhere."""
        yield from dict.fromkeys(finding for _, finding in self.switched_off())
        value = self.environment.get("XDG_CACHE_HOME")
        if self.environment.platform == "linux" and value and not Path(value).is_absolute():
            outcome = "is not absolute: pytools and PyOpenCL ignore it, and use ~/.cache"
            if self.environment.follows_relative_cache_home:
                outcome = "is not absolute: pytools and PyOpenCL make a cache in every folder that a program starts in"
            yield misread(self, "XDG_CACHE_HOME", HARMLESS, outcome)


class PytoolsDictionaries(UserCacheLayer):
    """Persistent dictionaries that belong to neither loopy nor PyOpenCL."""

    if TYPE_CHECKING:
        store: Dictionaries

    name = "pytools"
    title = "other pytools persistent dictionaries"
    about = About(
        on_network=Hazard(
            RISKS,
            "the locks of sqlite may not hold there, so programs of several nodes may stall, or damage a dictionary",
        ),
        among_ranks=Hazard(HARMLESS, "sqlite lets one of them write at a time, and the others wait"),
        uses={
            Use.WRITE: Hazard(FAILS, "pytools can make no dictionary, and programs that need one fail"),
            Use.CHANGE: Hazard(FAILS, "pytools can add nothing to it, and programs that try fail"),
        },
        unchecked="what is in whole pickles",
        reveals="whatever the programs keep in their dictionaries",
        # A dictionary's name bears Python and the versions of the libraries whose code its values depend on.
        portability=Portability(_facts, outlook=_outlook),
        lookups=LOOKUPS,
    )
    library = application = "pytools"

    def load_store(self) -> Store:
        """Import the store."""
        from cachectl.layers.pytools.dictionaries import Dictionaries

        return Dictionaries(self.name)

    def state(self) -> State:
        """Read the variables as the library does when it is imported; pytools has none, but sumpy has one."""
        library, root = self.library, self.roots()[0]
        if (off := self.off_state()) is not None:
            return off
        reason = f"not switched off by {' or '.join(self.variables)}" if self.variables else "pytools has no switch"
        if not self.variables and self.environment.get("SUMPY_NO_CACHE") is not None:
            reason = "off for sumpy only (SUMPY_NO_CACHE is set, its value is not read)"
        elif self.environment.installed(library) is None and not (
            # The store of a missing root is not loaded.
            root.exists and self.store.tables.has_any(root)
        ):
            reason = f"{library} is not installed here and has left no dictionary"
            return State(ABSENT, reason)
        return State(ENABLED, reason)

    def diagnose(self) -> Iterator[Finding]:
        """Add problems with the variables of sumpy."""
        yield from super().diagnose()
        if not self.variables:
            known = 1 if self.environment.installed("sumpy") is None else 2
            yield from (finding for _, finding in faults_of(self, _SETTINGS[:known]))

    def enable(self) -> Switch:
        """Return sumpy's variable."""
        return Switch(self.name, unset=frozenset({"SUMPY_NO_CACHE"}), takes_effect=NEXT_IMPORT)

    def disable(self) -> Switch:
        """Return sumpy's variable, and patches that replace the switch that pytools lacks in this process."""
        patches = tuple(
            ("pytools.persistent_dict", owner, name, partial(_without, self.name, name))
            for owner in ("PersistentDict", "WriteOncePersistentDict")
            for name in ("fetch", "store", "store_if_not_present")
        )
        return Switch(self.name, {"SUMPY_NO_CACHE": "1"}, patches=patches, takes_effect=NOW)


class LoopyDictionaries(PytoolsDictionaries):
    """Schedules, generated code and wrappers of loopy's kernels."""

    name = "loopy"
    title = "loopy code generation"
    about = PytoolsDictionaries.about._replace(
        reveals="source text of your kernels",
        # A dictionary opens its file when it is made, which loopy does at its import.
        opens_while_off=True,
        codes=(EDITABLE,),
        lookups=LOOKUPS._replace(
            opened=("/pdict-v5-loopy-",),
            imports=("loopy", "islpy", "pymbolic"),
            # They are in the names of loopy's databases, or (pytools) make the keys.
            packages=("loopy", "islpy", "cgen", "pytools"),
            watchers={**_WATCHERS, **_STAGES},
            saves=("preprocess", "schedule", "codegen"),
        ),
    )
    library = "loopy"
    variables = ("LOOPY_NO_CACHE", "CG_NO_CACHE")
    opened_by = ("loopy",)

    def disable(self) -> Switch:
        """Return the variable for the next import, and the flag that loopy reads at each call in a running process."""
        return Switch(
            self.name,
            set={"LOOPY_NO_CACHE": "1"},
            flags={_LOOPY_FLAG: False},
            memo_patches=tuple((*executor, "translation_unit_info", forgetting) for executor in _EXECUTORS),
            clear_functions=(("loopy", "clear_in_mem_caches"),),
            takes_effect=NOW,
        )

    def diagnose(self) -> Iterator[Finding]:
        """Add sources that are newer than every row: the version of an editable package does not change."""
        yield from super().diagnose()
        for root, package in product(self.roots(), _NAMED):
            folder = distributions.editable_folder(self.environment.site, package)
            span = None if folder is None or not root.exists else self.store.usage(root).span
            sources = () if folder is None or span is None else folder.rglob("*.py")
            newest = max(sources, key=lambda file: file.stat().st_mtime, default=None)
            if newest is not None and span is not None and newest.stat().st_mtime > span[1]:
                message = f"{package} is editable and newer than its entries ({newest}), which are hit all the same"
                yield EDITABLE.finding(self.name, root.path, message, f"cachectl purge {self.name}")

    def enable(self) -> Switch:
        """Return the same, the other way round."""
        return self.disable()._replace(set={}, unset=frozenset(self.variables), flags={_LOOPY_FLAG: True})


def _without(layer: str, name: str, method: Callable[..., object]) -> Callable[..., object]:
    """Return a ``fetch`` that misses, or a ``store`` that does nothing, in the dictionaries of a layer."""

    @wraps(method)
    def elsewhere(dictionary: Any, *arguments: object, **options: object) -> object:  # noqa: ANN401 - pytools'
        if layer_of(dictionary.identifier) != layer:
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
