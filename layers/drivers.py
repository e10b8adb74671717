"""Which OpenCL drivers are registered in an environment, from their ICD files: no OpenCL call is made.

Asking OpenCL itself would start every driver, and starting PoCL alone creates folders and leaks a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cachectl.layers.environment import Environment

#: What the file name of a driver library contains, and whose it is.
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


def opencl_drivers(environment: Environment) -> tuple[str, ...]:
    """Name the registered drivers, each once, as the loader bundled with PyOpenCL would find them."""
    return tuple(dict.fromkeys(_maker(library) for library in _libraries(environment)))


def driver_libraries(environment: Environment, maker: str) -> tuple[str, ...]:
    """Return the libraries of one maker's drivers, as their ICD files spell them."""
    return tuple(library for library in _libraries(environment) if _maker(library) == maker)


def _libraries(environment: Environment) -> list[str]:
    named = environment.get("OCL_ICD_VENDORS") or environment.get("OPENCL_VENDOR_PATH")
    if named and not Path(named).is_dir():
        return _read(Path(named)) if named.endswith(".icd") else [named]
    folders = [Path(named)] if named else [_SYSTEM]
    folders += [site / "pyopencl" / ".libs" for site in environment.site]
    return [library for folder in folders for file in sorted(folder.glob("*.icd")) for library in _read(file)]


def _read(file: Path) -> list[str]:
    try:
        return [line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def _maker(library: str) -> str:
    lowered = library.lower()
    return next((maker for part, maker in _MAKERS if part in lowered), Path(library).name)
