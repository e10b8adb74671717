"""Counts lookups and stores of PyOpenCL's binary cache, and times builds and first launches, inside the program.

A trace copies this file next to its observer: it imports only the standard library, and runs on Python 3.8. ``notes``
is the ``Notes`` of :mod:`cachectl.layers.inside.observer`, and ``call`` its ``Invocation``.
"""

from __future__ import annotations

import binascii
import functools
import os
import re
import threading
from typing import Any

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
#: The sources whose text was noted, by checksum; longer ones are not, in characters.
_sources: set[str] = set()
_LONGEST = 1 << 20


def watch(module: Any, notes: Any) -> None:
    """Watch builds in ``pyopencl`` itself, lookups and stores in ``pyopencl.cache``."""
    if module.__name__ == "pyopencl.cache":
        _watch_binaries(module, notes)
    else:
        _watch_builds(module, notes)
        # Only the timeline lacks what these two cannot watch.
        notes.fit("pyopencl (launches)", _watch_launches, module, notes)
        notes.fit("pyopencl (drivers)", _watch_driver, module, notes)


def _watch_binaries(module: Any, notes: Any) -> None:
    """Count lookups and stores of PyOpenCL's own cache."""

    def looked(call: Any) -> None:
        if call.error is not None:
            return
        event = "miss" if call.value is None else "hit"
        folder, key = str(call.get(0, "cache_dir")), str(call.get(1, "cache_key"))
        # A program for several devices is a hit if the binaries of all devices are.
        if event == "miss" or getattr(_here, "binary", None) is None:
            _here.binary = event
        notes.add(call.start, event=event, layer="pyopencl", key=key, **getattr(_here, "about", {}))
        if call.value is None:
            _here.missed.append(os.path.join(folder, key))

    def begin(_: Any) -> None:
        _here.missed = []

    def made(call: Any) -> None:
        # The driver is asked for binaries when it has compiled.
        start = max([end for _, end in getattr(_here, "compiles", ())], default=notes.now())
        for folder in _here.missed if call.error is None else ():
            size = notes.quietly(_size, folder)
            if size is not None:
                notes.add(start, event="store", layer="pyopencl", key=os.path.basename(folder), bytes=size)

    notes.wrap(module, "retrieve_from_cache", looked)
    notes.wrap(module, "_create_built_program_from_source_cached", made, begin)


def _size(folder: str) -> int:
    """Return the bytes that a program takes on the disk, as its entry does."""
    return 512 * sum(item.st_blocks for item in (os.stat(folder), *map(os.stat, os.scandir(folder))))


def _watch_builds(module: Any, notes: Any) -> None:
    """Time every build, and listen to the driver that builds, if a layer knows how."""
    listeners = notes.listeners()
    unknown = next(iter(listeners.values()), None)

    def before(kind: str, call: Any) -> tuple[Any, Any]:
        _here.binary = None
        _here.compiles = []
        about = _here.about = notes.quietly(_about, notes, kind, call) or {}
        # What kills the program in the build leaves this alone.
        notes.add(event="begun", kind=kind, kernels=about.get("kernels"), platform=about.get("platform"))
        driver = listeners.get(about["platform"]) if "platform" in about else unknown
        return driver, notes.quietly(driver.listen) if driver else None

    def after(kind: str, call: Any) -> None:
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
            # A link is all the driver's.
            compiles=[[call.start, end]] if kind == "link" else _here.compiles,
            **_here.about,
        )

    for owner, name in ((module.Program, "build"), (module.Program, "compile"), (module, "link_program")):
        kind = name.partition("_")[0]
        notes.wrap(owner, name, functools.partial(after, kind), functools.partial(before, kind))


def _watch_driver(module: Any, notes: Any) -> None:
    """Time the start of drivers, and their part of builds."""
    driver = module._cl  # noqa: SLF001

    def compiled(call: Any) -> None:
        getattr(_here, "compiles", []).append([call.start, notes.now()])

    for owner, name in ((module, "get_platforms"), (module, "create_some_context"), (driver.Platform, "get_devices")):
        notes.put(owner, name, notes.timed(vars(owner)[name], "driver"))
    for name in ("_build", "compile"):
        notes.wrap(driver._Program, name, compiled)  # noqa: SLF001


def _watch_launches(module: Any, notes: Any) -> None:
    """Time the first launch of each kernel, and the next call that waits for kernels anyway."""
    driver = module._cl  # noqa: SLF001

    def launched(call: Any) -> None:
        kernel, grid, size = call.get(1, "kernel"), call.get(2, "global_work_size"), call.get(3, "local_work_size")
        # A driver may compile for another size of the work-groups, an offset, or a large grid.
        sizes = grid if hasattr(grid, "__iter__") else (grid,)
        variant = (str(size), str(call.get(4, "global_work_offset")), [int(one).bit_length() for one in sizes])
        variants = getattr(kernel, "_cachectl_launched", ())
        if variant not in variants:
            kernel._cachectl_launched = (*variants, variant)  # noqa: SLF001
            name = str(kernel.function_name)
            notes.here.launched = getattr(notes.here, "launched", 0) + 1
            vars(notes.here).setdefault("running", []).append(name)
            notes.span("launch", call.start, name="enqueue", kernels=[name])

    def waited(call: Any) -> None:
        running = vars(notes.here).get("running")
        if running and call.options.get("is_blocking") is not False:
            notes.span("launch", call.start, name="wait", kernels=list(dict.fromkeys(running)))
            running.clear()

    # A function of the driver has the same name in the module.
    launch = notes.around(driver.enqueue_nd_range_kernel, launched)
    waits = [(owner, name) for owner in (driver, module) for name in _WAITS if name in vars(owner)]
    for owner, name in (*waits, (driver.Event, "wait"), (driver.CommandQueue, "finish")):
        notes.wrap(owner, name, waited)
    for owner in (driver, module):
        if "enqueue_nd_range_kernel" in vars(owner):
            notes.put(owner, "enqueue_nd_range_kernel", launch)


def _about(notes: Any, kind: str, call: Any) -> dict[str, Any]:
    # The first argument of link_program is a context. A program that is made of binaries has no source.
    program = call.arguments[0]
    context = program if kind == "link" else program._context  # noqa: SLF001
    sources = [getattr(part, "_source", "") for part in (call.get(1, "programs") if kind == "link" else [program])]
    text = "\n".join(part.decode(errors="replace") if isinstance(part, bytes) else part for part in sources)
    source, device = checksum(text), context.devices[0]
    if source not in _sources and len(text) <= _LONGEST:
        _sources.add(source)
        notes.add(event="source", source=source, text=text)
    folder = call.get(3, "cache_dir") if kind == "build" else None
    return {
        "cache_dir": "" if folder is False else os.path.abspath(folder) if folder else None,
        "kernels": _KERNEL.findall(text),
        "source": source,
        "options": _options(call.get(2 if kind == "link" else 1, "options", "")),
        "devices": [device.name for device in context.devices],
        "platform": device.platform.name,
        "version": f"{device.platform.version.strip()} ({device.driver_version.strip()})",
    }


def _options(given: Any) -> str:
    """Return the options of a build as one text: PyOpenCL takes a text, a list of words, or neither."""
    words = given.split() if isinstance(given, str) else [os.fsdecode(word) for word in given or ()]
    return " ".join(words)


def checksum(source: str) -> str:
    """Return CRC-32 and length of a source: :mod:`hashlib` takes longer to import than all of this file."""
    data = source.encode(errors="replace")
    return f"{binascii.crc32(data):08x}-{len(data)}"
