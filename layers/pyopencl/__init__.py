"""The layers of PyOpenCL: ``pyopencl`` for program binaries, ``pyopencl-invoker`` for dictionaries of its wrappers.

Sources: ``pyopencl/cache.py`` (places, locks), ``pyopencl/__init__.py`` (when the cache is bypassed),
``pyopencl/invoker.py``, ``pyopencl/scan.py`` (dictionaries).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl.layers import pytools
from cachectl.layers.base.environment import Environment, release_of
from cachectl.layers.core.finding import FAILS, HARMLESS, RISKS, Code, Finding, Hazard
from cachectl.layers.core.parts import About, Facts, Lookups, Portability
from cachectl.layers.core.root import ABSENT, BYPASSED, ENABLED, UNKNOWN, State
from cachectl.layers.core.store import Store
from cachectl.layers.core.switch import NOW, Switch
from cachectl.layers.disk import distributions
from cachectl.layers.disk.place import Use
from cachectl.layers.host import drivers

if TYPE_CHECKING:
    from cachectl.layers.pyopencl.programs import ProgramFolders

_VARIABLES = ("PYOPENCL_NO_CACHE",)
#: Methods that memoize compiled kernels, with module and class.
_MEMOS = (
    ("elementwise", "ElementwiseKernel", "get_kernel"),
    ("clrandom", "Random123GeneratorBase", "get_gen_kernel"),
    ("algorithm", "ListOfListsBuilder", "get_scan_kernel"),
    ("algorithm", "ListOfListsBuilder", "get_compress_kernel"),
    ("algorithm", "ListOfListsBuilder", "get_count_kernel"),
    ("algorithm", "ListOfListsBuilder", "get_write_kernel"),
    ("algorithm", "KeyValueSorter", "get_kernels"),
    ("bitonic_sort", "BitonicSort", "get_program"),
    ("bitonic_sort", "BitonicSort", "sort_b_prepare_wl"),
)
#: The first release that stores no invokers while its cache is off.
_STORES_NOTHING_SINCE = (2024, 2)
#: Platforms whose drivers cache source builds, so that PyOpenCL bypasses its own cache
#: (``pyopencl/characterize/__init__.py``, ``has_src_build_cache``).
_BYPASSED_ON = frozenset({"PoCL", "NVIDIA"})
#: The first release that does so: 2024.2.2 still keeps the programs of every driver.
_BYPASSES_SINCE = (2024, 2, 3)


def bypassed_on(environment: Environment) -> frozenset[str]:
    """Return the makers of drivers whose programs PyOpenCL does not keep, by its release here or in known Pythons."""
    versions = [environment.installed("pyopencl")]
    if versions == [None]:
        from cachectl.layers.host.pythons import pythons_of

        versions = [python.installed("pyopencl") for python in pythons_of(environment) if python.present]
    releases = filter(None, map(release_of, versions))
    return frozenset() if any(release < _BYPASSES_SINCE for release in releases) else _BYPASSED_ON


def _facts(environment: Environment) -> Facts:
    """Return versions, include folder, and names of drivers, unless several whose binaries are kept share one."""
    packages = {name: environment.installed(name) for name in ("pyopencl", "pytools")}
    names = sorted(drivers.opencl_drivers(environment))
    kept = [name for name in names if name not in bypassed_on(environment)]
    several = any(len(drivers.driver_libraries(environment, name)) > 1 for name in kept)
    return {
        "python": environment.python,
        **packages,
        distributions.PYOPENCL_INCLUDES: distributions.pyopencl_includes(environment.site),
        "OpenCL drivers": None if several else ", ".join(names) or None,
    }


#: PyOpenCL's keys hash the source, the options and the devices; their folder's name has the version of Python.
_PORTABILITY = Portability(
    _facts,
    deciding={
        "python": "PyOpenCL's folder has the version of Python in its name",
        distributions.PYOPENCL_INCLUDES: "PyOpenCL names its folder in the build options, which its keys are made from",
    },
    bound=distributions.PYOPENCL_INCLUDES,
    needed=("OpenCL drivers",),
)
PATHS = Code(
    "paths",
    (HARMLESS,),
    "PyOpenCL is at several paths, and adds its own to each build: entries of one cannot hit in another.",
    "`cachectl run --portable -- COMMAND`.",
    advice="the command is the user's",
)


class PyOpenCLBinaries(pytools.UserCacheLayer):
    """Programs that PyOpenCL built from source, with the binaries that the driver returned."""

    if TYPE_CHECKING:
        store: ProgramFolders

    name = "pyopencl"
    title = "PyOpenCL program binaries"
    about = About(
        on_network=Hazard(
            RISKS,
            "its lock is a file, which a program killed on any node leaves behind; then every build waits a minute "
            "and fails",
        ),
        among_ranks=Hazard(
            RISKS,
            "they share one lock file: if a rank is killed while it holds it, the builds of the others fail",
        ),
        uses=dict.fromkeys(
            (Use.WRITE, Use.CHANGE),
            Hazard(FAILS, "every build by PyOpenCL fails, after a minute where its lock cannot be made"),
        ),
        unchecked="machine code, the records of LLVM bitcode, whether an intact program has its own key, and binaries "
        "whose format only their driver knows",
        reveals="source text of your kernels, paths of included headers",
        # PyOpenCL adds a random constant to each build, so the cache of these drivers never answers (``cache.py``).
        ahead_of=("mesa", "neo", "comgr"),
        portability=_PORTABILITY,
        # Functions of PyOpenCL's own cache are watched, and the methods of programs for every build.
        lookups=Lookups(
            "PyOpenCL",
            watchers=dict.fromkeys(("pyopencl.cache", "pyopencl"), Path(__file__).parents[1] / "inside" / "builds.py"),
            modules=("pyopencl.cache",),
            imports=("pyopencl", "numpy"),
            # PyOpenCL adds it to the options of each build.
            variables=("PYOPENCL_BUILD_OPTIONS",),
            mapped=("/pyopencl/_cl.",),
        ),
        # Whatever platform PyOpenCL builds for.
        finds_tags=True,
        codes=(PATHS,),
    )
    # The ``cache_dir`` of a build is unknown here.
    library = application = "pyopencl"
    variables = _VARIABLES

    def load_store(self) -> Store:
        """Import the store."""
        from cachectl.layers.pyopencl.programs import ProgramFolders

        return ProgramFolders()

    def state(self) -> State:
        """Read the variable, then the drivers: PyOpenCL does not use this cache with PoCL and NVIDIA."""
        if (off := self.off_state()) is not None:
            return off
        if self.environment.installed("pyopencl") is None and not self.roots()[0].exists:
            return State(ABSENT, "pyopencl is not installed here and has left no binaries")
        registered = drivers.find_drivers(self.environment)
        makers = tuple(dict.fromkeys(maker for maker, *_ in registered))
        others = bypassed_on(self.environment)
        bypassed, used = ([maker for maker in makers if (maker in others) is left] for left in (True, False))
        if not makers:
            return State(UNKNOWN, "no OpenCL driver is registered here")
        if not used:
            return State(BYPASSED, f"PyOpenCL leaves {' and '.join(bypassed)} to the driver's own cache")
        reason = f"on for {' and '.join(used)}" + (f", but not {' and '.join(bypassed)}" if bypassed else "")
        files = dict.fromkeys(file for maker, _, file in registered if maker in used)
        return State(ENABLED, reason, tuple(files))

    def diagnose(self) -> Iterator[Finding]:
        """Yield problems with variables, and several known Pythons with a PyOpenCL of their own."""
        from cachectl.layers.host.pythons import pythons_of

        yield from super().diagnose()
        pythons = pythons_of(self.environment)
        places = (distributions.pyopencl_includes([Path(path) for path in python.folders]) for python in pythons)
        if len(paths := list(dict.fromkeys(filter(None, places)))) > 1:
            message = f"an include path of each build is {' or '.join(paths[:3])}: entries of one cannot hit in another"
            yield PATHS.finding(self.name, self.roots()[0].path, message, "cachectl run --portable -- COMMAND")

    def disable(self) -> Switch:
        """Return the switch that PyOpenCL reads at every build."""
        return _no_cache_switch(self.name, on=False)

    def enable(self) -> Switch:
        """Return the same switch."""
        return _no_cache_switch(self.name, on=True)


class PyOpenCLInvoker(pytools.PytoolsDictionaries):
    """Python code, generated by PyOpenCL, that calls a kernel."""

    name = "pyopencl-invoker"
    title = "PyOpenCL kernel invokers"
    about = pytools.PytoolsDictionaries.about._replace(
        reveals="source text of your kernels", lookups=pytools.LOOKUPS._replace(opened=("/pdict-v5-pyopencl-",))
    )
    library = "pyopencl"
    variables = _VARIABLES
    opened_by = ("pyopencl.invoker", "pyopencl.scan")

    def disable(self) -> Switch:
        """Return PyOpenCL's switch; patches keep releases up to 2024.1 from storing invokers all the same."""
        release = release_of(self.environment.installed("pyopencl"))
        stores_nothing = release is None or release >= _STORES_NOTHING_SINCE
        patches = () if stores_nothing else super().disable().patches
        return _no_cache_switch(self.name, on=False)._replace(patches=patches)

    def enable(self) -> Switch:
        """Return PyOpenCL's switch."""
        return _no_cache_switch(self.name, on=True)


def _no_cache_switch(layer: str, *, on: bool) -> Switch:
    """Return PyOpenCL's switch, the same for invokers and binaries.

    ``pyopencl.invoker`` makes its dictionary only if the flag is off at import, but uses it whenever the flag is off.
    So the modules are reloaded.
    """
    return Switch(
        layer,
        set={} if on else dict.fromkeys(_VARIABLES, "1"),
        unset=frozenset(_VARIABLES) if on else frozenset(),
        flags={("pyopencl", "_PYOPENCL_NO_CACHE"): not on},
        memo_patches=tuple(
            (f"pyopencl.{module}", owner, method, pytools.forgetting) for module, owner, method in _MEMOS
        ),
        clear_functions=(("pyopencl.tools", "clear_first_arg_caches"),),
        reloads=(("pyopencl.invoker", "invoker_cache"), ("pyopencl.scan", "generic_scan_kernel_cache")),
        takes_effect=NOW,
    )
