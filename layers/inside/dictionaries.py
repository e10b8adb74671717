"""Counts lookups and stores of pytools' persistent dictionaries, inside the program that makes them.

A trace copies this file beside its observer: it imports the standard library alone, and runs on Python 3.8. ``notes``
is the ``Notes`` of :mod:`cachectl.layers.inside.observer`.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

_here = threading.local()


def watch(module: Any, notes: Any) -> None:
    """Count lookups on disk, and stores, of every persistent dictionary."""
    once, plain = module.WriteOncePersistentDict, module.PersistentDict
    missing = module.NoSuchEntryError
    # Lookups that its memory answers do not count. The second name is that of pytools until 2024.1.3.
    uncached = "_fetch_uncached" if hasattr(once, "_fetch_uncached") else "_fetch"
    notes.put(plain, "fetch", _looking(notes, plain.fetch, missing))
    notes.put(once, uncached, _looking(notes, getattr(once, uncached), KeyError))
    notes.put(once, "fetch", _remembering(notes, once.fetch, missing))
    for owner in (plain, once):
        notes.put(owner, "store", _storing(notes, owner.store))


def _note(notes: Any, event: str, call: tuple[Any, ...], options: dict[str, Any], start: int, **more: object) -> None:
    """Note what a call of a dictionary's method did."""
    notes.add(
        event=event,
        layer="pytools",
        **notes.timing(start),
        dictionary=notes.quietly(lambda: call[0].identifier),
        kernels=notes.quietly(lambda: kernels_of(_key(call, options))),
        **more,
    )


def _key(call: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return call[1] if call[1:] else options["key"]


def _looking(notes: Any, fetch: Callable[..., Any], absent: type[Exception]) -> Callable[..., Any]:
    @functools.wraps(fetch)
    def fetch_and_note(*call: Any, **options: Any) -> Any:
        start = notes.now()
        outer = getattr(_here, "outer", None)
        found = "hit"
        try:
            return fetch(*call, **options)
        except absent:
            found = "miss"
            raise
        except BaseException:
            found = ""
            raise
        finally:
            if outer is not None:
                # It is noted when the key has been compared too.
                outer.append(found)
            elif found:
                _note(notes, found, call, options, start)

    return fetch_and_note


def _storing(notes: Any, store: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(store)
    def store_and_note(*call: Any, **options: Any) -> Any:
        start = notes.now()
        before = notes.quietly(_changes, call, options)
        value = store(*call, **options)
        # A dictionary that is written once does not store a value again.
        if before is None or notes.quietly(_changes, call, options) != before:
            _note(notes, "store", call, options, start, bytes=notes.quietly(_newest, call, options))
        return value

    return store_and_note


def _remembering(notes: Any, fetch: Callable[..., Any], missing: type[Exception]) -> Callable[..., Any]:
    @functools.wraps(fetch)
    def fetch_with_key(*call: Any, **options: Any) -> Any:
        start = notes.now()
        outer = getattr(_here, "outer", None)
        noted: list[str] = []
        _here.outer = noted
        before = notes.quietly(_lookups, call)
        found = "hit"
        try:
            return fetch(*call, **options)
        except missing:
            found = "miss"
            raise
        finally:
            _here.outer = outer
            # A dictionary that was opened before the trace began does not call the watched method.
            if noted:
                found = noted[0]
            elif before is None or notes.quietly(_lookups, call) == before:
                found = ""
            if found:
                _note(notes, found, call, options, start)

    return fetch_with_key


def _changes(call: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return what differs after a store: the count of a connection's changes, or what identifies the value's file."""
    dictionary = call[0]
    if hasattr(dictionary, "conn"):
        return int(dictionary.conn.total_changes)
    try:
        file = os.stat(os.path.join(_folder(dictionary, _key(call, options)), "contents"))
    except FileNotFoundError:
        return ()
    return file.st_ino, file.st_mtime_ns


def _newest(call: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Return the bytes of the value that a dictionary has stored last."""
    dictionary = call[0]
    if not hasattr(dictionary, "conn"):
        return sum(item.stat().st_size for item in os.scandir(_folder(dictionary, _key(call, options))))
    newest = "SELECT length(key_value) FROM dict WHERE rowid = last_insert_rowid()"
    with dictionary.mutex:
        return int(dictionary.conn.execute(newest).fetchone()[0])


def _folder(dictionary: Any, key: Any) -> str:
    """Return the folder of an entry; pytools until 2024.1.3 has one for each."""
    return str(dictionary._item_dir(dictionary.key_builder(key)))  # noqa: SLF001


def _lookups(call: tuple[Any, ...]) -> int:
    """Count how often a write-once dictionary had to ask the disk."""
    return int(call[0]._fetch.cache_info().misses)  # noqa: SLF001


def kernels_of(key: Any, depth: int = 3) -> list[str]:
    """Return the names of the kernels in a key of loopy's."""
    kind = type(key).__name__
    if kind == "TranslationUnit":
        return sorted(str(name) for name in key.entrypoints)
    if kind == "LoopKernel":
        return [str(key.name)]
    if isinstance(key, (tuple, list)) and depth:
        for part in key[:8]:
            names = kernels_of(part, depth - 1)
            if names:
                return names
    return []
