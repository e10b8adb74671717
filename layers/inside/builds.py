"""Counts lookups and stores of PyOpenCL's binary cache, and times its builds, inside the program that builds.

A trace copies this file beside its observer: it imports the standard library alone, and runs on Python 3.8. ``notes``
is the ``Notes`` of :mod:`cachectl.observing.observer`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from cachectl.layers.base.lazy import regex

# As in cachectl.layers.formats.opencl_source, which this file does not import.
_ATTRIBUTE = r"(?:__attribute__\s{0,9}\(\((?:(?!\)\)).){0,200}\){2,9}\s{0,99}){0,9}"
_KERNEL = regex(
    r"\b(?:__)?kernel\s{1,99}" + _ATTRIBUTE + r"void\s{1,99}" + _ATTRIBUTE + r"(\w{1,999})\s{0,99}\(", re.DOTALL
)
_WORSE = ("miss", "hit")
_here = threading.local()


def watch(module: Any, notes: Any) -> None:
    """Watch builds in ``pyopencl`` itself, lookups and stores in ``pyopencl.cache``."""
    if module.__name__ == "pyopencl.cache":
        watch_binaries(module, notes)
    else:
        watch_builds(module, notes)


def watch_binaries(module: Any, notes: Any) -> None:
    """Count lookups and stores of PyOpenCL's own cache."""
    retrieve, create = module.retrieve_from_cache, module._create_built_program_from_source_cached  # noqa: SLF001

    @functools.wraps(retrieve)
    def retrieve_and_note(cache_dir: Any, cache_key: Any) -> Any:
        found = retrieve(cache_dir, cache_key)
        about = getattr(_here, "about", {})
        event = "miss" if found is None else "hit"
        if found is None:
            getattr(_here, "missed", []).append(os.path.join(str(cache_dir), str(cache_key)))
        notes.add(event=event, layer="pyopencl", key=cache_key, **about)
        # A program for several devices is a hit if the binaries of all devices are.
        _here.binary = event if getattr(_here, "binary", None) is None else min(_here.binary, event, key=_WORSE.index)
        return found

    @functools.wraps(create)
    def create_and_note(ctx: Any, src: Any, *arguments: Any, **options: Any) -> Any:
        _here.missed = []
        made = create(ctx, src, *arguments, **options)
        for folder in _here.missed:
            size = notes.quietly(lambda folder=folder: sum(item.stat().st_size for item in os.scandir(folder)))
            if size is not None:
                notes.add(event="store", layer="pyopencl", key=os.path.basename(folder), bytes=size)
        return made

    notes.put(module, "retrieve_from_cache", retrieve_and_note)
    notes.put(module, "_create_built_program_from_source_cached", create_and_note)


def watch_builds(module: Any, notes: Any) -> None:
    """Time every build, and listen to the driver that builds, if a layer knows how."""
    listeners = notes.listeners()

    def building(kind: str, build: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(build)
        def build_and_note(*arguments: Any, **options: Any) -> Any:
            _here.binary = None
            about = _here.about = notes.quietly(_about, kind, arguments, options) or {}
            unknown = next(iter(listeners.values()), None)
            driver = listeners.get(about["platform"]) if "platform" in about else unknown
            ticket = driver.listen() if driver else None
            started = time.perf_counter()
            failed = True
            try:
                built = build(*arguments, **options)
                failed = False
                return built
            finally:
                seconds = time.perf_counter() - started
                compiled, heard = driver.heard(ticket, kind, failed=failed) if driver else (None, False)
                outcome = {"failed": failed, "binary": _here.binary, "heard": heard, "compiled": compiled}
                outcome["driver"] = driver.layer if driver else None
                notes.add(event="build", layer="pyopencl", kind=kind, seconds=seconds, **outcome, **about)

        return build_and_note

    notes.put(module.Program, "build", building("build", module.Program.build))
    notes.put(module.Program, "compile", building("compile", module.Program.compile))
    notes.put(module, "link_program", building("link", module.link_program))


def _about(kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    program, *rest = arguments
    # The first argument of link_program is a context. A program that is made of binaries has no source.
    context = program if kind == "link" else program._context  # noqa: SLF001
    source = getattr(program, "_source", "")
    text = source.decode(errors="replace") if isinstance(source, bytes) else source
    place = 1 if kind == "link" else 0
    return {
        "kernels": _KERNEL.findall(text),
        "source": hashlib.sha256(text.encode(errors="replace")).hexdigest(),
        "options": str(rest[place] if rest[place:] else options.get("options", "")),
        "devices": [device.name for device in context.devices],
        "platform": context.devices[0].platform.name,
    }
