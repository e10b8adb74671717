"""Counts lookups and stores of pytools' persistent dictionaries, inside the program that makes them.

A trace copies this file next to its observer: it imports only the standard library, and runs on Python 3.8.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from cachectl.layers.inside.observer import Invocation, Notes

#: ``on_disk`` says whether the present lookup went to the disk.
_here = threading.local()


def watch(module: ModuleType, notes: Notes) -> None:
    """Count the lookups on disk and the stores of every persistent dictionary."""
    once, plain = module.WriteOncePersistentDict, module.PersistentDict

    def looked(call: Invocation) -> None:
        if call.error is None or issubclass(call.error, KeyError):
            more = {"collision": True} if call.error and "Collision" in call.error.__name__ else {}
            _note(notes, "miss" if call.error else "hit", call, **more)
        else:
            # Such as when a module that the row needs is missing.
            _raised(notes, call, "lookup")

    def note_disk(_: Invocation) -> None:
        _here.on_disk = True

    def begin(call: Invocation) -> object:
        _here.on_disk = False
        return notes.quietly(_lookups, call)

    def remembered(call: Invocation) -> None:
        # Lookups that its memory answers do not count. A dictionary opened before the trace began does not call the
        # watched method.
        if _here.on_disk or notes.quietly(_lookups, call) != call.before:
            looked(call)
        _here.on_disk = False

    notes.wrap(plain, "fetch", looked)
    # The second name is that of pytools until 2024.1.3.
    notes.wrap(once, "_fetch_uncached" if hasattr(once, "_fetch_uncached") else "_fetch", note_disk)
    notes.wrap(once, "fetch", remembered, begin)
    for owner in (plain, once):
        notes.wrap(owner, "store", functools.partial(_stored, notes), _changes)


def _stored(notes: Notes, call: Invocation) -> None:
    if call.error is not None:
        _raised(notes, call, "store")
    # A write-once dictionary does not store a value again.
    elif call.before is None or notes.quietly(_changes, call) != call.before:
        _note(notes, "store", call, bytes=notes.quietly(_newest, call))


def _raised(notes: Notes, call: Invocation, use: str) -> None:
    """Note the exception of a lookup or a store, unless it says only that the key is there or is missing."""
    if call.error is not None and issubclass(call.error, Exception) and not issubclass(call.error, KeyError):
        dictionary, key = call.arguments[0], call.get(1, "key")
        about = {"dictionary": dictionary.identifier, "key": dictionary.key_builder(key), "use": use}
        file = os.path.basename(str(getattr(dictionary, "filename", "")))
        error = f"{call.error.__module__}.{call.error.__qualname__}".replace("builtins.", "", 1)
        notes.add(call.start, event="raised", layer="pytools", error=error, file=file, **about)


def _note(notes: Notes, event: str, call: Invocation, **more: object) -> None:
    dictionary, key = call.arguments[0], call.get(1, "key")
    name, kernels = notes.quietly(getattr, dictionary, "identifier"), notes.quietly(notes.kernels_of, key)
    # Only the keys of kernels are compared with earlier runs.
    hashed = notes.quietly(lambda: dictionary.key_builder(key)) if kernels else None
    notes.add(call.start, event=event, layer="pytools", dictionary=name, kernels=kernels, key=hashed, **more)


def _changes(call: Invocation) -> int | tuple[int, ...]:
    """Return what a store changes: the count of a connection's changes, or inode and time of the value's file."""
    dictionary = call.arguments[0]
    if hasattr(dictionary, "conn"):
        return int(dictionary.conn.total_changes)
    try:
        file = os.stat(os.path.join(_folder(call), "contents"))
    except FileNotFoundError:
        return ()
    return file.st_ino, file.st_mtime_ns


def _newest(call: Invocation) -> int:
    dictionary = call.arguments[0]
    if not hasattr(dictionary, "conn"):
        return sum(item.stat().st_size for item in os.scandir(_folder(call)))
    newest = "SELECT length(key_value) FROM dict WHERE rowid = last_insert_rowid()"
    with dictionary.mutex:
        return int(dictionary.conn.execute(newest).fetchone()[0])


def _folder(call: Invocation) -> str:
    """Return the folder of an entry; up to 2024.1.3 pytools has one for each."""
    dictionary = call.arguments[0]
    return str(dictionary._item_dir(dictionary.key_builder(call.get(1, "key"))))  # noqa: SLF001


def _lookups(call: Invocation) -> int:
    """Count the lookups of a write-once dictionary that its memory did not answer."""
    return int(call.arguments[0]._fetch.cache_info().misses)  # noqa: SLF001
