"""Optional parts of the layer ``pyopencl``: portability, lookups, and tagged builds."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Entry, Removable, Root
from cachectl.layers.base.parts import Facts, Lookups, Portability, Tagging
from cachectl.layers.disk.plain import read_plain
from cachectl.layers.host.drivers import driver_libraries, opencl_drivers
from cachectl.layers.pyopencl.programs import ProgramFolders, bypassed_on

#: The fact that names the folder which PyOpenCL adds with ``-I`` to the options of every build
#: (``pyopencl/__init__.py``, ``_DEFAULT_INCLUDE_OPTIONS``), and so to every key that is made from options.
INCLUDE: Final = "pyopencl include path"


def include_path(environment: Environment) -> str | None:
    """Return that folder as it is installed beside an environment's Python; ``None`` if there is none."""
    folders = (site / "pyopencl" / "cl" for site in environment.site)
    return next((str(folder) for folder in folders if folder.is_dir()), None)


class BinaryPortability(Portability):
    """PyOpenCL's keys hash the source, the options and the devices; their folder bears the version of Python."""

    deciding: ClassVar[Mapping[str, str]] = {
        "python": "PyOpenCL's folder bears the version of Python",
        INCLUDE: "PyOpenCL names its folder in the options of every build, which its keys are made from",
    }
    needed = ("OpenCL drivers",)

    def facts(self, environment: Environment) -> Facts:
        """Return versions, the include folder, and the names of the OpenCL drivers.

        The names say nothing if several drivers that PyOpenCL keeps binaries of have one name.
        """
        packages = {name: environment.installed(name) for name in ("pyopencl", "pytools")}
        names = sorted(opencl_drivers(environment))
        kept = [name for name in names if name not in bypassed_on(environment)]
        several = any(len(driver_libraries(environment, name)) > 1 for name in kept)
        drivers = None if several else ", ".join(names) or None
        return {
            "python": environment.python,
            **packages,
            INCLUDE: include_path(environment),
            "OpenCL drivers": drivers,
        }


class BinaryLookups(Lookups):
    """PyOpenCL's own cache is watched by its functions, and every build by the methods of its programs."""

    by = "PyOpenCL"
    modules = ("pyopencl.cache",)
    watchers: Mapping[str, Path] = dict.fromkeys(
        ("pyopencl.cache", "pyopencl"), Path(__file__).parents[1] / "inside" / "builds.py"
    )
    imports = ("pyopencl", "numpy")
    mapped = ("/pyopencl/_cl.",)

    def difference(self, alike: Sequence[Entry], event: Mapping[str, Any]) -> str:
        """Compare sources and included headers: PyOpenCL keeps them beside the binaries. The rest is a hash."""
        same = [entry for entry in alike if _source_checksum(entry) == event.get("source")]
        if not same:
            return "an entry of the same kernel is there, but its source is another"
        headers = [_changed_header(entry) for entry in same]
        if (header := next(filter(None, headers), None)) is not None:
            return f"an entry of the same source is there, but the header {header}, which it includes, has changed"
        return "an entry of the same source is there, but build options, include path, device or driver differ"


def _changed_header(entry: Entry) -> str | None:
    """Return a header that is not as it was when an entry was built; ``None`` if all are, or none is known."""
    from cachectl.layers.pyopencl.info import dependencies

    try:
        included = list(dependencies(read_plain(entry.root / entry.key / "info")))
    except OSError:
        return None
    return next((path for path, _, digest in included if _digest(path) != digest), None)


def _digest(path: str) -> str | None:
    """Return the digest of a header as PyOpenCL computes it, ``None`` if it cannot be read."""
    import hashlib

    with suppress(OSError):
        return hashlib.md5(read_plain(Path(path)), usedforsecurity=False).hexdigest()
    return None


def _source_checksum(entry: Entry) -> str | None:
    """Return the checksum of the source that an entry was built from.

    PyOpenCL adds a constant to what it builds, so that the driver's cache cannot answer (``pyopencl/cache.py``).
    """
    from cachectl.layers.inside.builds import checksum

    try:
        text = read_plain(entry.root / entry.key / "source.cl")
    except OSError:
        return None
    own = text.partition(b"\n\n__constant int pyopencl_defeat_cache_")[0].decode(errors="replace")
    return checksum(own)


class BinaryTagging(Tagging):
    """PyOpenCL keeps the source beside the binaries, whatever platform it builds for."""

    def __init__(self, store: ProgramFolders) -> None:
        self._store = store

    def find_tagged(
        self, root: Root, tag: re.Pattern[bytes], since: float, known: Container[str]
    ) -> Iterator[tuple[Removable, str]]:
        """Look for the tag in the sources."""
        del known
        tree = self._store.tree(root)
        yield from tree.tagged(tag, since, lambda leaf: tree.read_file(leaf.key, "source.cl"))
