"""Counts lookups and stores of PyOpenCL's binary cache, and times builds and first launches, inside the program.

A trace copies this file beside its observer: it imports the standard library alone, and runs on Python 3.8. ``notes``
is the ``Notes`` of :mod:`cachectl.layers.inside.observer`.
"""

from __future__ import annotations

import binascii
import functools
import os
import re
import threading
from collections.abc import Callable
from typing import Any

# As in cachectl.layers.formats.opencl_source, which this file does not import.
_ATTRIBUTE = r"(?:__attribute__\s{0,9}\(\((?:(?!\)\)).){0,200}\){2,9}\s{0,99}){0,9}"
_KERNEL = re.compile(
    r"\b(?:__)?kernel\s{1,99}" + _ATTRIBUTE + r"void\s{1,99}" + _ATTRIBUTE + r"(\w{1,999})\s{0,99}\(", re.DOTALL
)
_WORSE = ("miss", "hit")
#: Functions of PyOpenCL's extension module that may wait for kernels.
_WAITS = ("wait_for_events", "enqueue_map_buffer", "_enqueue_read_buffer", "_enqueue_svm_memcpy")
_here = threading.local()


def watch(module: Any, notes: Any) -> None:
    """Watch builds in ``pyopencl`` itself, lookups and stores in ``pyopencl.cache``."""
    if module.__name__ == "pyopencl.cache":
        watch_binaries(module, notes)
    else:
        watch_builds(module, notes)
        # Only the timeline lacks what these two cannot watch.
        notes.fit("pyopencl (launches)", watch_launches, module)
        notes.fit("pyopencl (drivers)", _watch_driver, module)


def watch_binaries(module: Any, notes: Any) -> None:
    """Count lookups and stores of PyOpenCL's own cache."""
    retrieve, create = module.retrieve_from_cache, module._create_built_program_from_source_cached  # noqa: SLF001

    @functools.wraps(retrieve)
    def retrieve_and_note(*arguments: Any, **options: Any) -> Any:
        start = notes.now()
        found = retrieve(*arguments, **options)
        about = getattr(_here, "about", {})
        event = "miss" if found is None else "hit"
        folder, key = notes.quietly(_place, *arguments, **options) or ("", "")
        if found is None:
            getattr(_here, "missed", []).append(os.path.join(folder, key))
        notes.add(event=event, layer="pyopencl", key=key, **notes.timing(start), **about)
        # A program for several devices is a hit if the binaries of all devices are.
        _here.binary = event if getattr(_here, "binary", None) is None else min(_here.binary, event, key=_WORSE.index)
        return found

    @functools.wraps(create)
    def create_and_note(*arguments: Any, **options: Any) -> Any:
        _here.missed = []
        made = create(*arguments, **options)
        # The driver is asked for binaries when it has compiled.
        start = max([end for _, end in getattr(_here, "compiles", ())], default=notes.now())
        for folder in _here.missed:
            size = notes.quietly(lambda folder=folder: sum(item.stat().st_size for item in os.scandir(folder)))
            if size is not None:
                key = os.path.basename(folder)
                notes.add(event="store", layer="pyopencl", key=key, bytes=size, **notes.timing(start))
        return made

    notes.put(module, "retrieve_from_cache", retrieve_and_note)
    notes.put(module, "_create_built_program_from_source_cached", create_and_note)


def _place(cache_dir: Any, cache_key: Any) -> tuple[str, str]:
    """Return the folder and the key that a lookup was called with."""
    return str(cache_dir), str(cache_key)


def watch_builds(module: Any, notes: Any) -> None:
    """Time every build, and listen to the driver that builds, if a layer knows how."""
    listeners = notes.listeners()

    def building(kind: str, build: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(build)
        def build_and_note(*arguments: Any, **options: Any) -> Any:
            _here.binary = None
            _here.compiles = []
            about = _here.about = notes.quietly(_about, kind, arguments, options) or {}
            unknown = next(iter(listeners.values()), None)
            driver = listeners.get(about["platform"]) if "platform" in about else unknown
            ticket = notes.quietly(driver.listen) if driver else None
            start = notes.now()
            failed = True
            try:
                built = build(*arguments, **options)
                failed = False
                return built
            finally:
                when = notes.timing(start)
                said = notes.quietly(driver.heard, ticket, kind, failed=failed) if driver and ticket else None
                compiled, heard = said or (None, False)
                outcome = {"failed": failed, "binary": _here.binary, "heard": heard, "compiled": compiled}
                of_driver = {"driver": driver.layer if driver else None, "compiles": _here.compiles}
                when["seconds"] = (when["end"] - start) / 1e9
                notes.add(event="build", layer="pyopencl", kind=kind, **when, **outcome, **of_driver, **about)

        return build_and_note

    notes.put(module.Program, "build", building("build", module.Program.build))
    notes.put(module.Program, "compile", building("compile", module.Program.compile))
    notes.put(module, "link_program", building("link", module.link_program))


def _watch_driver(module: Any, notes: Any) -> None:
    """Time the start of drivers, and their part of builds."""
    driver = module._cl  # noqa: SLF001
    for owner, name in ((module, "get_platforms"), (module, "create_some_context"), (driver.Platform, "get_devices")):
        notes.put(owner, name, notes.timed(vars(owner)[name], "driver"))
    for owner, name in ((driver._Program, "_build"), (driver._Program, "compile")):  # noqa: SLF001
        notes.put(owner, name, _compiling(notes, vars(owner)[name]))


def _compiling(notes: Any, compile_it: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_it)
    def compile_and_time(*arguments: Any, **options: Any) -> Any:
        start = notes.now()
        try:
            return compile_it(*arguments, **options)
        finally:
            getattr(_here, "compiles", []).append([start, notes.now()])

    return compile_and_time


def watch_launches(module: Any, notes: Any) -> None:
    """Time the first launch of each kernel, and the next call that waits for kernels anyway."""
    driver = module._cl  # noqa: SLF001
    launch = driver.enqueue_nd_range_kernel

    @functools.wraps(launch)
    def launch_and_time(*arguments: Any, **options: Any) -> Any:
        kernel = arguments[1] if arguments[1:] else options.get("kernel")
        if getattr(kernel, "_cachectl_launched", False):
            return launch(*arguments, **options)
        start = notes.now()
        try:
            return launch(*arguments, **options)
        finally:
            name = notes.quietly(_mark_launched, kernel)
            if name is not None:
                notes.here.launched = getattr(notes.here, "launched", 0) + 1
                vars(notes.here).setdefault("running", []).append(name)
                notes.span("launch", start, name="enqueue", kernels=[name])

    waits = [(owner, name) for owner in (driver, module) for name in _WAITS if name in vars(owner)]
    for owner, name in (*waits, (driver.Event, "wait"), (driver.CommandQueue, "finish")):
        notes.put(owner, name, _waiting(notes, vars(owner)[name]))
    for owner in (driver, module):
        if "enqueue_nd_range_kernel" in vars(owner):
            notes.put(owner, "enqueue_nd_range_kernel", launch_and_time)


def _waiting(notes: Any, wait: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def wait_and_time(*arguments: Any, **options: Any) -> Any:
        running = vars(notes.here).get("running")
        if not running or options.get("is_blocking") is False:
            return wait(*arguments, **options)
        start = notes.now()
        try:
            return wait(*arguments, **options)
        finally:
            notes.span("launch", start, name="wait", kernels=list(dict.fromkeys(running)))
            running.clear()

    return wait_and_time


def _mark_launched(kernel: Any) -> str:
    kernel._cachectl_launched = True  # noqa: SLF001
    return str(kernel.function_name)


def _about(kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    program, *rest = arguments
    # The first argument of link_program is a context. A program that is made of binaries has no source.
    context = program if kind == "link" else program._context  # noqa: SLF001
    source = getattr(program, "_source", "")
    text = source.decode(errors="replace") if isinstance(source, bytes) else source
    place = 1 if kind == "link" else 0
    return {
        "kernels": _KERNEL.findall(text),
        "source": checksum(text),
        "options": str(rest[place] if rest[place:] else options.get("options", "")),
        "devices": [device.name for device in context.devices],
        "platform": context.devices[0].platform.name,
    }


def checksum(source: str) -> str:
    """Return CRC-32 and length of a source: :mod:`hashlib` takes longer to import than all of this file."""
    data = source.encode(errors="replace")
    return f"{binascii.crc32(data):08x}-{len(data)}"
