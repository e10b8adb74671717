"""Optional parts of the layer ``pocl``: portability, lookups, and tagged builds."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Entry, Problem, Removable, Root
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.parts import Compilation, Facts, Lookups, Portability, Tagging
from cachectl.layers.formats.pocl_programs import BITCODE, DRAWN
from cachectl.layers.host.drivers import only_library
from cachectl.layers.host.hardware import processor
from cachectl.layers.pocl.birth import birth_time
from cachectl.layers.pocl.programs import Programs
from cachectl.layers.pocl.roots import LIBRARIES
from cachectl.layers.pyopencl.parts import INCLUDE, include_path

_PLATFORMS: Final = ("Portable Computing Language",)


class PoclPortability(Portability):
    """PoCL hashes options with its version, LLVM and the processor (``lib/CL/pocl_cache.c``)."""

    deciding: ClassVar[Mapping[str, str]] = {
        "PoCL": "PoCL's version is part of every key",
        "processor": "the code is another processor's, which some builds of PoCL would run all the same",
        "processor features": "the code is another processor's, which some builds of PoCL would run all the same",
        INCLUDE: "PyOpenCL names its folder in the options of every build, which PoCL's keys are made from",
    }
    needed = ("PoCL library", "processor features")
    informing = ("pyopencl",)

    def facts(self, environment: Environment) -> Facts:
        """Return versions, the name of the library (which bears a version or a digest), and the processor.

        The version is that of the wheel, which is known to have built the entries if no other PoCL is registered.
        """
        library = only_library(environment, "PoCL")
        real = None if library is None else Path(library).resolve()
        of_wheel = real is not None and any(real.is_relative_to(site.resolve()) for site in environment.site)
        model, features = processor(environment)
        return {
            "PoCL": environment.installed("pocl-binary-distribution") if of_wheel else None,
            "PoCL library": None if real is None else real.name,
            "processor": model,
            "processor features": features,
            "pyopencl": environment.installed("pyopencl"),
            INCLUDE: include_path(environment),
        }


def _is_folder(item: os.DirEntry[str]) -> bool:
    return item.is_dir(follow_symlinks=False)


class PoclLookups(Lookups):
    """PoCL prints what it looks up and stores, if its messages are on while it builds."""

    by = "PoCL's own messages"
    listeners: Mapping[str, Path] = dict.fromkeys(_PLATFORMS, Path(__file__).parents[1] / "inside" / "pocl_messages.py")
    mapped = ("/libpocl",)
    keeps_use = True

    def weigh(self, path: str) -> int | None:
        """Return the bytes of a program's folder; with its cache off, PoCL removes the program that it has written."""
        if not os.path.exists(os.path.join(path, BITCODE)):
            return None
        try:
            return sum(item.stat().st_size for item in Path(path).rglob("*") if item.is_file())
        except OSError:
            return 0

    def compilations(self, path: str) -> tuple[Compilation, ...]:
        """Read the times of a program's folder, which PoCL makes when it has missed.

        A kernel is compiled for each shape of its work-groups when it is first launched with it.
        """
        try:
            born, compiled = birth_time(path), os.stat(os.path.join(path, BITCODE)).st_mtime
            found: list[Compilation] = [] if born is None else [(None, born, compiled)]
            for kernel in filter(_is_folder, os.scandir(path)):
                for shape in filter(_is_folder, os.scandir(kernel)):
                    objects = (item for item in os.scandir(shape) if item.name.endswith(".so"))
                    found += [(kernel.name, None, item.stat().st_ctime) for item in objects]
        except OSError:
            return ()
        return tuple(found)

    def other_output(self, heard: bytes) -> bytes:
        """Return the output that is not PoCL's."""
        from cachectl.layers.inside.pocl_messages import Messages

        return Messages(heard).others

    def difference(self, alike: Sequence[Entry], event: Mapping[str, Any]) -> str:
        """Return an explanation that names the inputs of PoCL's keys."""
        del alike, event
        return "a program with this kernel is there, but its source, build options or device differ"


class PoclTagging(Tagging):
    """PoCL keeps the names of constants in bitcode, and in the log of a build that failed."""

    drivers = LIBRARIES
    platforms = _PLATFORMS
    failure_trace = regex(f"tempfile_{DRAWN}")

    def __init__(self, store: Programs) -> None:
        self._store = store

    def find_tagged(
        self, root: Root, tag: re.Pattern[bytes], since: float, known: Container[str]
    ) -> Iterator[tuple[Removable, str]]:
        """Look for the tag in the bitcode, and in the log of a build that failed.

        A kernel launched in a new work-group shape after its program was removed leaves a folder without bitcode.
        """
        tree = self._store.tree(root)
        for leaf in tree.scan():
            if isinstance(leaf, Problem) or leaf.modified < since:
                continue
            if leaf.orphan_rule is not None:
                # The source of a build that failed in the preprocessor.
                if (found := tag.search(leaf.key.encode())) is not None:
                    yield leaf.orphan(root.path), found[0].decode()
                continue
            found = tag.search(b"".join(tree.read_file(leaf.key, file) or b"" for file in ("program.bc", "build.log")))
            if found is not None or leaf.key in known:
                yield leaf.entry(self._store.name, root.path), "" if found is None else found[0].decode()
