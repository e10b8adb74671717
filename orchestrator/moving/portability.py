"""What decides whether an entry can be hit elsewhere, and whether it can be hit here.

Read from names, the system's own tables and what is installed; no library is imported and no driver started. What
cannot be known so is ``None``, and never taken for equal.

Sources: the keys of each cache. pytools puts Python and the versions of loopy, islpy and cgen into the names of its
dictionaries; PyOpenCL adds ``-I`` with its own folder to the options of every build (``pyopencl/__init__.py``,
``_DEFAULT_INCLUDE_OPTIONS``), and PoCL hashes the options with its version, LLVM and the processor
(``lib/CL/pocl_cache.c``); NVIDIA's driver spells its version and the architecture in its keys.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachectl.layers.base.environment import Environment
from cachectl.layers.host.drivers import driver_libraries, opencl_drivers
from cachectl.moving.bundle import Item

Fingerprint = Mapping[str, str | None]

_INCLUDE: Final = "pyopencl include path"
_PACKAGES: Final = ("loopy", "islpy", "cgen", "pytools", "pyopencl", "numpy")
_DICTIONARIES: Final = ("loopy", "pyopencl-invoker", "pytools")
_MIOPEN: Final = ("miopen", "miopen-tuning", "miopen-system", "miopen-system-tuning")
_NVIDIA: Final = re.compile(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)")
#: How loopy spells the version of a package that does not tell its own.
_UNTOLD: Final = "_UNKNOWN_"


@dataclass(frozen=True, slots=True)
class Outlook:
    """Whether a program here can hit an entry: yes, no, or ``None`` for not known; ``because`` is the reason."""

    hits: bool | None
    because: str = ""

    @property
    def words(self) -> str:
        """Say it in words."""
        if self.hits:
            return "will hit"
        return f"not known: {self.because}" if self.hits is None else f"cannot hit: {self.because}"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same here, and whether it keeps every entry of the layer from being hit."""

    name: str
    there: str | None
    here: str | None
    decides: bool


def fingerprint(layer: str, environment: Environment, items: Iterable[Item] = ()) -> dict[str, str | None]:
    """Describe what decides about the entries of a layer; ``items`` tell what only entries know."""
    told: dict[str, str | None] = {"platform": environment.platform, "machine": platform.machine() or None}
    told |= _ADDITIONS.get(layer, _nothing)(environment)
    return described(layer, told, items)


def _nothing(environment: Environment) -> dict[str, str | None]:
    del environment
    return {}


def _of_dictionaries(environment: Environment) -> dict[str, str | None]:
    return {"python": environment.python, **{name: environment.installed(name) for name in _PACKAGES}}


def _of_binaries(environment: Environment) -> dict[str, str | None]:
    packages = {name: environment.installed(name) for name in ("pyopencl", "pytools")}
    drivers = ", ".join(sorted(opencl_drivers(environment))) or None
    return {"python": environment.python, **packages, _INCLUDE: include_path(environment), "OpenCL drivers": drivers}


def _of_pocl(environment: Environment) -> dict[str, str | None]:
    model, flags = _processor(environment)
    return {
        "PoCL": environment.installed("pocl-binary-distribution"),
        "PoCL library": _libraries(environment),
        "processor": model,
        "processor features": flags,
        "pyopencl": environment.installed("pyopencl"),
        _INCLUDE: include_path(environment),
    }


def _of_cuda(environment: Environment) -> dict[str, str | None]:
    return {"NVIDIA driver": nvidia_driver(environment), "GPUs": _gpus(environment)}


_ADDITIONS: Final[Mapping[str, Callable[[Environment], dict[str, str | None]]]] = {
    **dict.fromkeys(_DICTIONARIES, _of_dictionaries),
    "pyopencl": _of_binaries,
    "pocl": _of_pocl,
    "cuda": _of_cuda,
}


def _of_items(items: tuple[Item, ...]) -> dict[str, str | None]:
    """Gather what entries say of devices and versions; MIOpen's tell its version, backend, architecture and units."""
    told: dict[str, set[str]] = {}
    for item in items:
        if item.device is not None:
            told.setdefault("devices", set()).add(item.device)
        named = {**item.detail, **item.versions} if item.layer in _MIOPEN else item.versions
        for name, value in named.items():
            if name not in ("kernel_name", "kernel_args"):
                told.setdefault(f"of entries: {name}", set()).add(value)
    return {name: ", ".join(sorted(values)) for name, values in told.items()}


def include_path(environment: Environment) -> str | None:
    """Return the folder that PyOpenCL names among the options of every build."""
    folders = (site / "pyopencl" / "cl" for site in environment.site)
    return next((str(folder) for folder in folders if folder.is_dir()), None)


def nvidia_driver(environment: Environment) -> str | None:
    """Return the version of NVIDIA's driver that the kernel has loaded."""
    match = _NVIDIA.search(_text(environment.processes / "driver" / "nvidia" / "version"))
    return None if match is None else match[1]


def _gpus(environment: Environment) -> str | None:
    files = (environment.processes / "driver" / "nvidia" / "gpus").glob("*/information")
    models = {match[1].strip() for file in files if (match := re.search(r"(?m)^Model:(.*)$", _text(file)))}
    return ", ".join(sorted(models)) or None


def _processor(environment: Environment) -> tuple[str | None, str | None]:
    """Return the name of the processor, and a digest of its features in any order."""
    text = _text(environment.processes / "cpuinfo") or _text(Path("/proc/cpuinfo"))
    fields = {}
    for line in text.partition("\n\n")[0].splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields[name.strip()] = " ".join(value.split())
    flags = sorted((fields.get("flags") or fields.get("Features") or "").split())
    digest = hashlib.sha256(" ".join(flags).encode()).hexdigest()[:16] if flags else None
    return fields.get("model name"), digest


def _libraries(environment: Environment) -> str | None:
    """Spell PoCL's libraries by the names of the files they lead to, which bear a version or a digest."""
    named = driver_libraries(environment, "PoCL")
    return ", ".join(sorted({Path(library).resolve().name for library in named})) or None


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


# ---------------------------------------------------------------------- comparing


#: What keeps every entry of a layer from being hit where it differs, with the reason; elsewhere it is only told.
_DECIDING: Final[Mapping[str, Mapping[str, str]]] = {
    "pocl": {
        "PoCL": "PoCL's version is part of every key",
        "processor": "the code is another processor's, which some builds of PoCL would run all the same",
        "processor features": "the code is another processor's, which some builds of PoCL would run all the same",
        _INCLUDE: "PyOpenCL names its folder in the options of every build, which PoCL's keys are made from",
    },
    "pyopencl": {
        "python": "PyOpenCL's folder bears the version of Python",
        _INCLUDE: "PyOpenCL names its folder in the options of every build, which its keys are made from",
    },
    "cuda": {"NVIDIA driver": "the driver's version is part of every key"},
}
_EVERYWHERE: Final = {"platform": "another system's", "machine": "another kind of processor's"}
#: What is told of a layer for people to read, and decides nothing by itself.
_TOLD_ONLY: Final[Mapping[str, tuple[str, ...]]] = {"pocl": ("pyopencl",)}
#: Without which nothing can be foreseen, even if neither place knows it.
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "pocl": ("PoCL library", "processor features"),
    "pyopencl": ("OpenCL drivers",),
    "cuda": ("NVIDIA driver", "GPUs"),
}


def differences(layer: str, there: Fingerprint, here: Fingerprint) -> tuple[Difference, ...]:
    """List what a bundle's fingerprint of a layer says otherwise than this place, or one of both does not know."""
    deciding = {**_EVERYWHERE, **_DECIDING.get(layer, {})}
    return tuple(
        Difference(name, value, here.get(name), name in deciding and None not in (value, here.get(name)))
        for name, value in sorted(there.items())
        if not _of_entries(name) and (value is None or here.get(name) != value)
    )


def combined(layer: str, one: Fingerprint, other: Fingerprint) -> dict[str, str | None] | None:
    """Describe two places together, or return ``None`` where something that decides is not the same.

    What differs and does not decide is ``None``: of entries of both together it is not known.
    """
    if any(each.decides for each in differences(layer, one, other)):
        return None
    return {name: one.get(name) if one.get(name) == other.get(name) else None for name in {**one, **other}}


def described(layer: str, told: Fingerprint, items: Iterable[Item]) -> dict[str, str | None]:
    """Describe a place and these entries of it, whatever others it was told of with."""
    place = {name: value for name, value in told.items() if not _of_entries(name)}
    return place if layer in _DICTIONARIES else place | _of_items(tuple(items))


def _of_entries(name: str) -> bool:
    return name == "devices" or name.startswith("of entries: ")


def outlook(item: Item, there: Fingerprint, environment: Environment, differing: tuple[Difference, ...]) -> Outlook:
    """Foresee whether a program here that asks for an entry would compute its key.

    ``differing`` is what :func:`differences` gave for the item's layer.
    """
    deciding = {**_EVERYWHERE, **_DECIDING.get(item.layer, {})}
    for one in differing:
        if one.decides:
            return Outlook(False, f"{one.name} {one.there}, here {one.here}: {deciding[one.name]}")  # noqa: FBT003
    if item.layer in _DICTIONARIES:
        return _of_row(item, environment, differing)
    if item.layer == "cuda" and (version := item.versions.get("driver")) not in (None, there.get("NVIDIA driver")):
        here = nvidia_driver(environment)
        if here is not None and version != here:
            return Outlook(False, f"compiled by driver {version}, here {here}")  # noqa: FBT003
    if item.layer not in _ADDITIONS:
        return Outlook(None, "what decides about this layer cannot be read without its driver")
    return _rest(item.layer, differing)


def _of_row(item: Item, environment: Environment, differing: tuple[Difference, ...]) -> Outlook:
    """Judge a row by the versions in its dictionary's name, as ``ls`` judges what is stale."""
    for name, version in sorted(item.versions.items()):
        here = environment.python if name == "python" else environment.installed(name)
        if here is None:
            return Outlook(None, f"{name} {version} is not installed beside cachectl")
        if version not in (here, _UNTOLD):
            return Outlook(False, f"stored with {name} {version}, here {here}")  # noqa: FBT003
    return _rest(item.layer, tuple(one for one in differing if one.name not in item.versions))


def _rest(layer: str, differing: tuple[Difference, ...]) -> Outlook:
    for one in differing:
        if one.name not in _TOLD_ONLY.get(layer, ()) and (one.there, one.here) != (None, None):
            return Outlook(None, f"{one.name} {one.there or 'unknown'}, here {one.here or 'unknown'}")
    unknown = [one.name for one in differing if one.name in _NEEDED.get(layer, ())]
    return Outlook(None, f"{', '.join(unknown)} unknown") if unknown else Outlook(True)  # noqa: FBT003
