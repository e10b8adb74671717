"""The layer ``pocl``: the places and switch of PoCL's kernel cache, and the evidence of its use.

Sources: ``lib/CL/pocl_cache.c`` (places, keys), ``lib/CL/devices/devices.c`` (when the variables are read).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.lazy import regex
from cachectl.layers.core.declarations import NOWHERE, TOP, EnvSwitch, Family, Places, Rule, at_load
from cachectl.layers.core.finding import FAILS, HARMLESS, RECOMPILES, RISKS, Code, Finding, Hazard
from cachectl.layers.core.layer import first_place
from cachectl.layers.core.parts import OR, About, Compilation, Facts, Lookups, Portability
from cachectl.layers.core.root import Root, Scope
from cachectl.layers.core.store import Store
from cachectl.layers.core.switch import Switch
from cachectl.layers.disk import distributions
from cachectl.layers.disk.place import Use
from cachectl.layers.host import drivers

LIBRARIES = ("libpocl",)
_PLATFORMS = ("Portable Computing Language",)
_DRIVER = ("PoCL", "PoCL library")
NO_HOME = "default (HOME is not set)"
DRIVERS = Code(
    "drivers",
    (HARMLESS,),
    "Several drivers of PoCL are registered. An entry records [its "
    "LLVM](layers/drivers.md#several-drivers-of-one-maker); if two have the same, it is unknown which built it.",
    "Nothing to do.",
    advice="nothing needs to be done",
)
BITCODE = "program.bc"
#: Suffixes of native code; since version 7.2 PoCL links objects itself.
OBJECT = ".o"
NATIVE = (".so", OBJECT)
# Constants of statx (linux/stat.h, linux/fcntl.h); the birth time is seconds, then nanoseconds.
_HERE, _NO_FOLLOW, _BIRTH, _BIRTH_AT, _STATX_SIZE = -100, 0x100, 0x800, 80, 256


def _facts(environment: Environment) -> Facts:
    """Return versions, the name of each PoCL's library (with a version or a digest), and the processor."""
    from cachectl.layers.host import hardware
    from cachectl.layers.pocl import releases

    libraries = drivers.driver_libraries(environment, "PoCL")
    known = [release for library in libraries if (release := releases.read_release(library)) is not None]
    model, features = hardware.processor(environment)
    return {
        "PoCL": OR.join(known) if known and len(known) == len(libraries) else None,
        "PoCL library": OR.join(Path(library).resolve().name for library in libraries) or None,
        "processor": model,
        "processor features": features,
        "pyopencl": environment.installed("pyopencl"),
        distributions.PYOPENCL_INCLUDES: distributions.pyopencl_includes(environment.site),
    }


def _of_entry(versions: Mapping[str, str], there: Facts) -> Facts:
    """Keep only the PoCL whose LLVM compiled an entry, by the major version; it is unknown if none has it."""
    compiler = f"LLVM {versions.get('llvm', '').partition('.')[0]}."
    pairs = zip(*((there.get(name) or "").split(OR) for name in _DRIVER), strict=False)
    built = [dict(zip(_DRIVER, pair, strict=True)) for pair in pairs if compiler in pair[0]]
    if len(built) > 1 or "llvm" not in versions:
        return there
    return {**there, **(built[0] if built else dict.fromkeys(_DRIVER))}


#: PoCL hashes options with its version, LLVM and the processor (``lib/CL/pocl_cache.c``).
_PORTABILITY = Portability(
    _facts,
    deciding={
        "PoCL": "PoCL's version is part of every key",
        "processor": "the code is for another processor, and some builds of PoCL would run it all the same",
        "processor features": "the code is for another processor, and some builds of PoCL would run it all the same",
        distributions.PYOPENCL_INCLUDES: "PyOpenCL names its folder in the build options, a part of every key",
    },
    bound=distributions.PYOPENCL_INCLUDES,
    needed=("PoCL library", "processor features"),
    informing=("pyopencl",),
    of_entry=_of_entry,
)


def _weigh(path: str) -> int | None:
    """Return the bytes of a program's folder, ``None`` without a program: with its cache off PoCL removes it."""
    if not os.path.exists(os.path.join(path, BITCODE)):
        return None
    try:
        return sum(item.stat().st_size for item in Path(path).rglob("*") if item.is_file())
    except OSError:
        return 0


def _natives(path: str) -> Iterator[tuple[str, str, float]]:
    """Yield kernel, launch in words, and time of each native file of a program. Raises :class:`OSError`.

    Its folder is named after size, offset and grid: ``16-1-1-goffs0-smallgrid``.
    """
    for suffix in NATIVE:
        for native in sorted(Path(path).glob(f"*/*/*{suffix}")):
            parts = native.parent.name.split("-")
            offset = [] if "goffs0" in parts else ["with an offset"]
            launch = ["x".join(parts[:3]), *offset, *([] if "smallgrid" in parts else ["a large grid"])]
            yield native.parents[1].name, ", ".join(launch), native.stat().st_ctime


def _compilations(path: str) -> tuple[Compilation, ...]:
    """Return the compilations in a program's folder: a kernel is compiled for each work-group shape at launch."""
    with suppress(OSError):
        born, compiled = birth_time(path), os.stat(os.path.join(path, BITCODE)).st_mtime
        of_program: list[Compilation] = [] if born is None else [(None, born, compiled)]
        return (*of_program, *((kernel, None, moment) for kernel, _, moment in _natives(path)))
    return ()


def _compiled_since(path: str, moment: float) -> tuple[tuple[str, str, float], ...]:
    with suppress(OSError):
        return tuple(native for native in _natives(path) if native[-1] >= moment)
    return ()


def _other_output(heard: bytes) -> bytes:
    from cachectl.layers.inside.pocl_messages import read_messages

    return read_messages(heard)[0]


#: PoCL prints its lookups and stores if its messages are on during a build.
_LOOKUPS = Lookups(
    "PoCL's own messages",
    listeners=dict.fromkeys(_PLATFORMS, Path(__file__).parents[1] / "inside" / "pocl_messages.py"),
    mapped=("/libpocl",),
    variables=("POCL_WORK_GROUP_METHOD", "POCL_EXTRA_BUILD_FLAGS"),
    keeps_use=True,
    relinks=True,
    weigh=_weigh,
    compilations=_compilations,
    compiled_since=_compiled_since,
    other_output=_other_output,
)


def birth_time(path: str) -> float | None:
    """Return when a file or folder, not a link, was made (epoch seconds), ``None`` if the system does not record it."""
    import ctypes
    import struct

    # glibc has the function since 2.28, and musl since 1.2.5.
    statx = getattr(ctypes.CDLL(None), "statx", None) if os.name == "posix" else None
    answer = ctypes.create_string_buffer(_STATX_SIZE)
    if statx is None or statx(_HERE, os.fsencode(path), _NO_FOLLOW, _BIRTH, answer) != 0:
        return None
    if not struct.unpack_from("=I", answer)[0] & _BIRTH:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", answer, _BIRTH_AT)
    return int(seconds) + int(nanoseconds) / 1e9


class PoclKernels(drivers.DriverLayer):
    """Programs and work-group functions compiled by PoCL."""

    name = "pocl"
    title = "PoCL kernel cache"
    about = About(
        on_network=Hazard(
            HARMLESS,
            "every lookup goes over the network, and some builds of PoCL load code compiled for another processor",
        ),
        among_ranks=Hazard(
            RISKS,
            "PoCL before 6.0 removes a program before it replaces it, so ranks that build it at once may miss it",
        ),
        uses={
            Use.WRITE: Hazard(FAILS, "PoCL finds no device, or builds no program"),
            Use.CHANGE: Hazard(RISKS, "PoCL cannot build the programs that belong there"),
            Use.EXECUTE: Hazard(FAILS, "PoCL aborts when it loads a kernel"),
        },
        needs_place=True,
        unchecked="machine code, the records of LLVM bitcode, and whether an intact program has its own key",
        reveals="paths of your home, in bitcode",
        portability=_PORTABILITY,
        lookups=_LOOKUPS,
        # PoCL keeps the names of constants in bitcode, and in the log of a failed build.
        finds_tags=True,
        libraries=LIBRARIES,
        platforms=_PLATFORMS,
        codes=(DRIVERS,),
        failure_trace=regex("tempfile_[A-Za-z0-9]{6}"),
    )
    places = Places(
        "POCL_CACHE_DIR",
        linux=(
            Rule("POCL_CACHE_DIR", empty=NOWHERE),
            Rule("XDG_CACHE_HOME", "pocl"),
            Rule("HOME", ".cache/pocl", empty=TOP, source="default (HOME)"),
        ),
        windows=(Rule("POCL_CACHE_DIR", empty=NOWHERE), Rule("LOCALAPPDATA", "pocl"), Rule("TEMP", "pocl")),
    )
    family = Family("POCL_.*CACHE.*")
    placeless = Hazard(FAILS, "is empty: PoCL finds no device; unset it")
    makers = ("PoCL",)
    # PoCL reads it once, when its first device is opened.
    switch = EnvSwitch(
        "POCL_KERNEL_CACHE",
        "n|no|f|false|off|0",
        "1.*",
        RECOMPILES,
        "switches the cache off: only a value that begins with 1 means on",
        "export POCL_KERNEL_CACHE=1",
        disables=True,
        read=at_load(*LIBRARIES),
        value="0",
    )

    def load_store(self) -> Store:
        """Import the store."""
        from cachectl.layers.pocl.programs import Programs

        return Programs()

    def roots(self) -> tuple[Root, ...]:
        """Resolve as PoCL does when its first device is opened.

        ``POCL_CACHE_DIR`` is used as is, with the cache on or off; every other rule appends a leaf for each.
        """
        environment, place = self.environment, self.places.place(self.environment)
        if place is None:
            if environment.platform == "win32" or environment.get("POCL_CACHE_DIR") is not None:
                return ()
            place = Path("/tmp/pocl"), NO_HOME  # noqa: S108 - PoCL's own rule
        path, source = place
        if environment.platform == "win32" or source == "POCL_CACHE_DIR":
            return (Root(path, Scope.USER, source, "kcache"),)
        return tuple(Root(path / leaf, Scope.USER, source, leaf) for leaf in ("kcache", "uncached"))

    def diagnose(self) -> Iterator[Finding]:
        """Add that several drivers are registered."""
        libraries = drivers.driver_libraries(self.environment, "PoCL")
        if len(libraries) > 1:
            from cachectl.layers.pocl import releases

            read = {library: releases.read_release(library) or "unknown" for library in libraries}
            named = ", ".join(f"{library}: {release}" for library, release in read.items())
            compilers = {release.partition(" with ")[2] for release in read.values()}
            witness = "only its LLVM shows" if len(compilers) == len(read) else "with equal LLVMs nothing shows"
            message = f"{len(libraries)} drivers of PoCL are registered ({named}): {witness} which built an entry"
            yield DRIVERS.finding(self.name, first_place(self), message, "cachectl report --by driver")
        yield from super().diagnose()

    def enable(self) -> Switch:
        """Set the variable to a value that means on, whatever the default."""
        return self.switch.read._replace(layer=self.name, set={self.switch.variable: "1"})
