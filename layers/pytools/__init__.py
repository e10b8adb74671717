"""The layers of pytools' persistent dictionaries: ``loopy``, and ``pytools`` for those of sumpy, pytato and user code.

:class:`PytoolsDictionaries` is also the base of ``pyopencl-invoker``. The beginning of a dictionary's identifier
decides to which of the three it belongs.

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
#: Loopy's executors memoize what they compiled.
_EXECUTORS = (("loopy.target.pyopencl_execution", "PyOpenCLExecutor"), ("loopy.target.c.c_execution", "CExecutor"))
#: The packages whose versions are in the names of loopy's dictionaries (``loopy/version.py``, DATA_MODEL_VERSION).
_NAMED = ("loopy", "islpy", "cgen")
EDITABLE = Code(
    "editable",
    (RISKS,),
    "A package is installed as editable, and was changed after the entries were stored. Its version, by which loopy "
    "names its dictionaries, is the same, so programs get what the old sources made.",
    "`cachectl purge loopy` after each change.",
)
#: The first releases that read the values of their variables.
_BOOLEAN_SINCE = {"loopy": (2025, 1), "pyopencl": (2024, 2)}
#: Sumpy checks only whether its variables are set.
_SETTINGS = tuple(
    EnvSwitch(
        variable,
        "y|yes|t|true|on|1",
        "(?!)",
        RECOMPILES,
        "switches sumpy's dictionaries off all the same: sumpy checks only whether it is set",
        what="sumpy's dictionaries",
    )
    for variable in ("SUMPY_NO_CACHE", "CG_NO_CACHE")
)


def layer_of(identifier: str) -> str:
    """Return the name of the layer that has the dictionaries of an identifier."""
    return next((name for prefix, name in _PREFIXES.items() if identifier.startswith(prefix)), "pytools")


def _facts(environment: Environment) -> Facts:
    """Return the versions of Python and of the packages that are in the names of dictionaries."""
    packages = ("loopy", "islpy", "cgen", "pytools", "pyopencl", "numpy")
    return {"python": environment.python, **{name: environment.installed(name) for name in packages}}


def _outlook(versions: Mapping[str, str], there: Facts, environment: Environment) -> Outlook | None:
    """Judge a row by the versions in its dictionary's name."""
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
    return noted == "pytools" and layer_of(dictionary) == layer


#: Methods of pytools' dictionaries are watched; the identifier decides to which layer each belongs.
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
#: The stages of loopy are timed too.
_STAGES = dict.fromkeys(
    ("loopy", "loopy.target.pyopencl_execution", "loopy.target.c.c_execution"), _INSIDE / "loopy_stages.py"
)


class UserCacheLayer(Layer):
    """A layer of a Python library in the user's cache folder, whose off switches are variables read at import."""

    #: The distribution, and the application by which platformdirs names the folder.
    library: ClassVar[str]
    application: ClassVar[str]
    places = Places("XDG_CACHE_HOME")
    family = Family(
        "(?:LOOPY|PYOPENCL|PYTOOLS|SUMPY)_(?:.*_)?CACHE.*",
        "LOOPY_NO_CACHE CG_NO_CACHE SUMPY_NO_CACHE SUMPY_NO_CACHE_KERNELS LOOPY_ABORT_ON_CACHE_MISS PYOPENCL_NO_CACHE "
        "PYOPENCL_CACHE_FAILURE_FATAL",
    )
    #: The variables, which are read with ``pytools.strtobool``.
    variables: ClassVar[tuple[str, ...]] = ()
    #: Modules that open the layer's dictionaries when they are imported.
    opened_by: ClassVar[tuple[str, ...]] = ()

    def roots(self) -> tuple[Root, ...]:
        """Return the places, that of this Python first; others if known Pythons' releases of platformdirs disagree."""
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
        """Yield each release of the library for which a variable switches the layer off, with the finding."""
        is_set = any(self.environment.get(variable) is not None for variable in self.variables)
        for version in self._releases() if is_set else ():
            fine, severity = "n|no|f|false|off|0", FAILS
            outcome = f"is not a boolean: import {self.library} raises ValueError"
            if self._asks_only(version):
                fine, severity = "(?!)", RECOMPILES
                outcome = (
                    f"switches {self.title} off all the same: {self.library} {version} checks only whether it is set"
                )
            for variable in self.variables:
                switch = EnvSwitch(variable, "y|yes|t|true|on|1", fine, severity, outcome)
                yield from ((version, finding) for _, finding in faults_of(self, (switch,)))

    def _asks_only(self, version: str | None) -> bool:
        return (release_of(version) or (9999,)) < _BOOLEAN_SINCE.get(self.library, ())

    def _releases(self) -> tuple[str | None, ...]:
        """Return, of releases in known Pythons that read the variables alike, one each; that of this Python first."""
        from cachectl.layers.host.pythons import pythons_of

        releases = (python.installed(self.library) for python in pythons_of(self.environment))
        alike = {self._asks_only(release): release for release in reversed([*filter(None, releases)])}
        return tuple(reversed(alike.values())) or (None,)

    def off_state(self) -> State | None:
        """Return that the variables switch the layer off; unknown if they do so only for some known Pythons."""
        if not (off := dict(self.switched_off())):
            return None
        message = next(iter(off.values())).message
        others = ", ".join(f"{self.library} {release}" for release in self._releases() if release not in off)
        return State(UNKNOWN, f"{message}; not for {others}") if others else State(DISABLED, message)

    def relocate(self, folder: Path) -> Switch:
        """Return the variable that moves the user cache folder; open dictionaries stay in place."""
        variable = "WIN_PD_OVERRIDE_LOCAL_APPDATA" if self.environment.platform == "win32" else "XDG_CACHE_HOME"
        moved = {variable: str(folder / "xdg")}
        return Switch(self.name, moved, read_at_import=self.opened_by, takes_effect=NEXT_IMPORT)

    def diagnose(self) -> Iterator[Finding]:
        """Yield problems with the variables, and a relative ``XDG_CACHE_HOME``."""
        yield from dict.fromkeys(finding for _, finding in self.switched_off())
        value = self.environment.get("XDG_CACHE_HOME")
        if self.environment.platform == "linux" and value and not Path(value).is_absolute():
            outcome = "is not absolute: pytools and PyOpenCL ignore it, and use ~/.cache"
            if self.environment.follows_relative_cache_home:
                outcome = "is not absolute: pytools and PyOpenCL make a cache in every folder in which a program starts"
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
            "the locks of sqlite may not work there, so programs on several nodes may stall, or damage a dictionary",
        ),
        among_ranks=Hazard(HARMLESS, "sqlite lets one of them write at a time; the others wait"),
        uses={
            Use.WRITE: Hazard(FAILS, "pytools can make no dictionary, and programs that need one fail"),
            Use.CHANGE: Hazard(FAILS, "pytools can add nothing to it, and programs that try fail"),
        },
        unchecked="the contents of intact pickles",
        reveals="whatever programs keep in their dictionaries",
        # A dictionary's name has the versions of Python and of the libraries on whose code its values depend.
        portability=Portability(_facts, outlook=_outlook),
        lookups=LOOKUPS,
    )
    library = application = "pytools"

    def load_store(self) -> Store:
        """Import the store."""
        from cachectl.layers.pytools.dictionaries import Dictionaries

        return Dictionaries(self.name)

    def state(self) -> State:
        """Read the variables as the library does at import; pytools has none, but sumpy does."""
        library, root = self.library, self.roots()[0]
        if (off := self.off_state()) is not None:
            return off
        reason = f"not switched off by {' or '.join(self.variables)}" if self.variables else "pytools has no switch"
        if not self.variables and self.environment.get("SUMPY_NO_CACHE") is not None:
            reason = "off for sumpy only (SUMPY_NO_CACHE is set; its value is ignored)"
        elif self.environment.installed(library) is None and not (
            # The store of a missing root is not loaded.
            root.exists and self.store.tables.has_any(root)
        ):
            return State(ABSENT, f"{library} is not installed here and has left no dictionary")
        return State(ENABLED, reason)

    def diagnose(self) -> Iterator[Finding]:
        """Add problems with sumpy's variables."""
        yield from super().diagnose()
        if not self.variables:
            known = 1 if self.environment.installed("sumpy") is None else 2
            yield from (finding for _, finding in faults_of(self, _SETTINGS[:known]))

    def enable(self) -> Switch:
        """Return sumpy's variable."""
        return Switch(self.name, unset=frozenset({"SUMPY_NO_CACHE"}), takes_effect=NEXT_IMPORT)

    def disable(self) -> Switch:
        """Return sumpy's variable, and patches for this process, since pytools has no switch."""
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
        # A dictionary opens its file when it is made, which loopy does at import.
        opens_while_off=True,
        codes=(EDITABLE,),
        lookups=LOOKUPS._replace(
            opened=("/pdict-v5-loopy-",),
            imports=("loopy", "islpy", "pymbolic"),
            # Their versions are in the names of loopy's databases; pytools makes the keys.
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
        """Add editable packages with sources newer than every row: their version does not change."""
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
        """Return the opposite switch."""
        return self.disable()._replace(set={}, unset=frozenset(self.variables), flags={_LOOPY_FLAG: True})


def _without(layer: str, name: str, method: Callable[..., object]) -> Callable[..., object]:
    """Return a ``fetch`` that misses, or a ``store`` that does nothing, in a layer's dictionaries."""

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
    """Return a replacement, with an empty memory for each object, for a method wrapped by pytools' ``memoize_method``.

    The replacement's memory ends with it; the original keeps its own.
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
