"""Counts lookups and stores of PyOpenCL's binary cache, and times builds and first launches, inside the program.

A trace copies this file next to its observer: it imports only the standard library, and runs on Python 3.8.
"""

from __future__ import annotations

import binascii
import functools
import os
import re
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from cachectl.layers.inside.observer import Invocation, Notes

# As in cachectl.layers.formats.opencl_source, which this file does not import.
_ATTRIBUTE = r"(?:__attribute__\s{0,9}\(\((?:(?!\)\)).){0,200}\){2,9}\s{0,99}){0,9}"
_KERNEL = re.compile(
    r"\b(?:(?:__)?kernel|KERNEL)\s{1,99}(?:REQD_WG_SIZE\([^()]{0,99}\)\s{0,99})?"
    + _ATTRIBUTE
    + r"void\s{1,99}"
    + _ATTRIBUTE
    + r"(\w{1,999})\s{0,99}\(",
    re.DOTALL,
)
#: Functions of PyOpenCL's extension module that may wait for kernels.
_WAITS = ("wait_for_events", "enqueue_map_buffer", "_enqueue_read_buffer", "_enqueue_svm_memcpy")
_here = threading.local()
#: The checksums of sources whose text was noted; longer ones are not (characters).
_sources: set[str] = set()
_LONGEST = 1 << 20


def watch(module: ModuleType, notes: Notes) -> None:
    """Watch builds in ``pyopencl`` itself, lookups and stores in ``pyopencl.cache``."""
    if module.__name__ == "pyopencl.cache":
        _watch_binaries(module, notes)
    else:
        _watch_builds(module, notes)
        # If these two fail, only the timeline is incomplete.
        notes.fit("pyopencl (launches)", _watch_launches, module, notes)
        notes.fit("pyopencl (drivers)", _watch_driver, module, notes)


def _watch_binaries(module: ModuleType, notes: Notes) -> None:

    def looked(call: Invocation) -> None:
        if call.error is not None:
            return
        event = "miss" if call.value is None else "hit"
        folder, key = str(call.get(0, "cache_dir")), str(call.get(1, "cache_key"))
        # A program for several devices is a hit if the binaries of all devices are.
        if event == "miss" or getattr(_here, "binary", None) is None:
            _here.binary = event
        kernels = getattr(_here, "about", {}).get("kernels")
        notes.add(call.start, event=event, layer="pyopencl", key=key, kernels=kernels)
        if call.value is None:
            _here.missed.append(os.path.join(folder, key))

    def begin(_: Invocation) -> None:
        _here.missed = []

    def made(call: Invocation) -> None:
        # PyOpenCL requests the binaries after the driver has compiled.
        start = max([end for _, end in getattr(_here, "compiles", ())], default=notes.now())
        for folder in _here.missed if call.error is None else ():
            size = notes.quietly(_size, folder)
            if size is not None:
                notes.add(start, event="store", layer="pyopencl", key=os.path.basename(folder), bytes=size)

    notes.wrap(module, "retrieve_from_cache", looked)
    notes.wrap(module, "_create_built_program_from_source_cached", made, begin)


def _size(folder: str) -> int:
    """Return the bytes that a program takes on disk, as counted for its entry."""
    return 512 * sum(item.st_blocks for item in (os.stat(folder), *map(os.stat, os.scandir(folder))))


def _watch_builds(module: ModuleType, notes: Notes) -> None:
    """Time every build, and listen to its driver, if a layer has a listener."""
    listeners = notes.listeners()
    unknown = next(iter(listeners.values()), None)

    def before(kind: str, call: Invocation) -> tuple[Any, Any]:
        _here.binary = None
        _here.compiles = []
        about = _here.about = notes.quietly(_about, notes, kind, call) or {}
        # If the program is killed during the build, this remains.
        notes.add(event="begun", platform=about.get("platform"))
        driver = listeners.get(about["platform"]) if "platform" in about else unknown
        return driver, notes.quietly(driver.listen) if driver else None

    def after(kind: str, call: Invocation) -> None:
        driver, listens = call.before
        failed = call.error is not None
        end = notes.now()
        compiled, heard = (notes.quietly(driver.heard, failed=failed) if listens else None) or (None, False)
        notes.add(
            call.start,
            end=end,
            event="build",
            layer="pyopencl",
            kind=kind,
            failed=failed,
            binary=_here.binary,
            heard=heard,
            compiled=compiled,
            driver=driver.layer if driver else None,
            # The driver takes all of the time of a link.
            compiles=[[call.start, end]] if kind == "link" else _here.compiles,
            **_here.about,
        )

    for owner, name in ((module.Program, "build"), (module.Program, "compile"), (module, "link_program")):
        kind = name.partition("_")[0]
        notes.wrap(owner, name, functools.partial(after, kind), functools.partial(before, kind))


def _watch_driver(module: ModuleType, notes: Notes) -> None:
    """Time the start of drivers, and their share of builds."""
    driver = module._cl  # noqa: SLF001

    def compiled(call: Invocation) -> None:
        getattr(_here, "compiles", []).append([call.start, notes.now()])

    for owner, name in ((module, "get_platforms"), (module, "create_some_context"), (driver.Platform, "get_devices")):
        notes.put(owner, name, notes.timed(vars(owner)[name], "driver"))
    for name in ("_build", "compile"):
        notes.wrap(driver._Program, name, compiled)  # noqa: SLF001


def _watch_launches(module: ModuleType, notes: Notes) -> None:
    """Time the first launch of each kernel, and the next call that waits for kernels anyway."""
    driver = module._cl  # noqa: SLF001

    def launched(call: Invocation) -> None:
        kernel, grid, local = call.get(1, "kernel"), call.get(2, "global_work_size"), call.get(3, "local_work_size")
        # A driver may compile again for another work-group size, an offset, or a large grid.
        sizes = grid if hasattr(grid, "__iter__") else (grid,)
        variant = (str(local), str(call.get(4, "global_work_offset")), [int(size).bit_length() for size in sizes])
        variants = getattr(kernel, "_cachectl_launched", ())
        if variant not in variants:
            kernel._cachectl_launched = (*variants, variant)  # noqa: SLF001
            name = str(kernel.function_name)
            notes.here.launched = getattr(notes.here, "launched", 0) + 1
            vars(notes.here).setdefault("running", []).append(name)
            notes.span("launch", call.start, name="enqueue", kernels=[name])

    def waited(call: Invocation) -> None:
        running = vars(notes.here).get("running")
        if running and call.options.get("is_blocking") is not False:
            notes.span("launch", call.start, name="wait", kernels=list(dict.fromkeys(running)))
            running.clear()

    # The module has functions of the driver under the same names.
    launch = notes.around(driver.enqueue_nd_range_kernel, launched)
    waits = [(owner, name) for owner in (driver, module) for name in _WAITS if name in vars(owner)]
    for owner, name in (*waits, (driver.Event, "wait"), (driver.CommandQueue, "finish")):
        notes.wrap(owner, name, waited)
    for owner in (driver, module):
        if "enqueue_nd_range_kernel" in vars(owner):
            notes.put(owner, "enqueue_nd_range_kernel", launch)


def _about(notes: Notes, kind: str, call: Invocation) -> dict[str, object]:
    # The first argument of link_program is a context. A program made of binaries has no source.
    program = call.arguments[0]
    context = program if kind == "link" else program._context  # noqa: SLF001
    sources = [getattr(part, "_source", "") for part in (call.get(1, "programs") if kind == "link" else [program])]
    text = "\n".join(part.decode(errors="replace") if isinstance(part, bytes) else part for part in sources)
    source, device = checksum(text), context.devices[0]
    if source not in _sources and len(text) <= _LONGEST:
        _sources.add(source)
        notes.add(event="source", source=source, text=text)
    folder = call.get(3, "cache_dir") if kind == "build" else None
    options = call.get(2 if kind == "link" else 1, "options", "")
    return {
        "cache_dir": "" if folder is False else os.path.abspath(folder) if folder else None,
        "kernels": _KERNEL.findall(text),
        "source": source,
        # PyOpenCL takes a text, a list of words, or neither.
        "options": " ".join(options.split() if isinstance(options, str) else map(os.fsdecode, options or ())),
        "devices": [device.name for device in context.devices],
        "platform": device.platform.name,
        "version": f"{device.platform.version.strip()} ({device.driver_version.strip()})",
    }


def checksum(source: str) -> str:
    """Return CRC-32 and length of a source: importing :mod:`hashlib` takes longer than importing this file."""
    data = source.encode(errors="replace")
    return f"{binascii.crc32(data):08x}-{len(data)}"
