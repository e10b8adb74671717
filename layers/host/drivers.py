"""The OpenCL drivers registered in an environment, from their ICD files: no OpenCL call is made.

An OpenCL call would start every driver, and PoCL's start creates folders and leaks a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cachectl.layers.base.environment import Environment
from cachectl.layers.disk.plain import read_installed

#: Parts of file names of driver libraries, and their makers.
_MAKERS: Final = (
    ("pocl", "PoCL"),
    ("nvidia-opencl", "NVIDIA"),
    ("igdrcl", "Intel NEO"),
    ("intelocl", "Intel CPU"),
    ("rusticl", "Rusticl"),
    ("mesaopencl", "Mesa Clover"),
    ("amdocl", "AMD"),
)
_SYSTEM: Final = Path("/etc/OpenCL/vendors")
#: The same in a conda prefix (conda-forge's recipe of ``ocl-icd``).
_IN_PREFIX: Final = Path("etc/OpenCL/vendors")


def opencl_drivers(environment: Environment) -> tuple[str, ...]:
    """Return the makers of the registered drivers, each once.

    A driver counts if either loader would find it: the one in PyOpenCL's wheel, which reads the system's folder and its
    own, or conda-forge's, which reads the folder of its prefix instead of the system's.
    """
    return tuple(dict.fromkeys(_maker(library) for library in _libraries(environment)))


def driver_libraries(environment: Environment, maker: str) -> tuple[str, ...]:
    """Return the libraries of one maker's drivers, each once, as their ICD files name them."""
    return tuple(library for library in _libraries(environment) if _maker(library) == maker)


def _libraries(environment: Environment) -> list[str]:
    named = environment.get("OCL_ICD_VENDORS") or environment.get("OPENCL_VENDOR_PATH")
    if named and not Path(named).is_dir():
        return _read(Path(named)) if named.endswith(".icd") else [named]
    folders = [Path(named)] if named else [_SYSTEM, *_conda_folders(environment)]
    folders += [site / "pyopencl" / ".libs" for site in environment.site]
    files = (file for folder in folders for file in sorted(folder.glob("*.icd")))
    # The package ocl-icd-system links the system's folder into the prefix.
    return list(dict.fromkeys(library for file in files for library in _read(file)))


def _conda_folders(environment: Environment) -> list[Path]:
    """Return where conda packages register drivers: in the activated prefix, and in that of the Python that runs."""
    activated = environment.get("CONDA_PREFIX")
    prefixes = [Path(activated)] if activated else []
    if environment.prefix is not None and environment.prefix not in prefixes:
        prefixes.append(environment.prefix)
    return [prefix / _IN_PREFIX for prefix in prefixes]


def _read(file: Path) -> list[str]:
    try:
        return [line.strip() for line in read_installed(file).decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def _maker(library: str) -> str:
    # A folder in the path may have another maker's name, such as a conda environment called "pocl".
    name = Path(library).name
    return next((maker for part, maker in _MAKERS if part in name.lower()), name)
