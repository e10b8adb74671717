"""Counts lookups and stores of pytools' persistent dictionaries, inside the program that makes them.

A trace copies this file beside its observer: it imports the standard library alone, and runs on Python 3.8. ``notes``
is the ``Notes`` of :mod:`cachectl.observing.observer`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

_here = threading.local()


def watch(module: Any, notes: Any) -> None:
    """Count lookups on disk, and stores, of every persistent dictionary."""
    once, plain = module.WriteOncePersistentDict, module.PersistentDict
    missing = module.NoSuchEntryError
    notes.put(plain, "fetch", _looking(notes, plain.fetch, missing))
    if hasattr(once, "_fetch_uncached"):
        # Lookups that its memory answers do not count.
        notes.put(once, "_fetch_uncached", _looking(notes, once._fetch_uncached, KeyError))  # noqa: SLF001
        notes.put(once, "fetch", _remembering(notes, once.fetch, missing))
    else:
        notes.put(once, "fetch", _looking(notes, once.fetch, missing))
    notes.put(plain, "store", _storing(notes, plain.store))
    notes.put(once, "store", _storing(notes, once.store))


def _note(notes: Any, dictionary: Any, event: str, key: object, start: int, **more: object) -> None:
    notes.add(
        event=event,
        layer="pytools",
        **notes.timing(start),
        dictionary=notes.quietly(lambda: dictionary.identifier),
        kernels=notes.quietly(kernels_of, key),
        **more,
    )


def _looking(notes: Any, fetch: Callable[..., Any], absent: type[Exception]) -> Callable[..., Any]:
    @functools.wraps(fetch)
    def fetch_and_note(self: Any, key: Any) -> Any:
        start = notes.now()
        outer = getattr(_here, "outer", None)
        found = "hit"
        try:
            return fetch(self, key)
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
                _note(notes, self, found, key, start)

    return fetch_and_note


def _storing(notes: Any, store: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(store)
    def store_and_note(self: Any, key: Any, *arguments: Any, **options: Any) -> Any:
        start = notes.now()
        before = notes.quietly(_changes, self)
        value = store(self, key, *arguments, **options)
        # A dictionary that is written once does not store a value again.
        if before is None or notes.quietly(_changes, self) != before:
            _note(notes, self, "store", key, start, bytes=notes.quietly(_newest, self))
        return value

    return store_and_note


def _remembering(notes: Any, fetch: Callable[..., Any], missing: type[Exception]) -> Callable[..., Any]:
    @functools.wraps(fetch)
    def fetch_with_key(self: Any, key: Any) -> Any:
        start = notes.now()
        outer = getattr(_here, "outer", None)
        noted: list[str] = []
        _here.outer = noted
        before = notes.quietly(_lookups, self)
        found = "hit"
        try:
            return fetch(self, key)
        except missing:
            found = "miss"
            raise
        finally:
            _here.outer = outer
            # A dictionary that was opened before the trace began does not call the watched method.
            if noted:
                found = noted[0]
            elif before is None or notes.quietly(_lookups, self) == before:
                found = ""
            if found:
                _note(notes, self, found, key, start)

    return fetch_with_key


def _changes(dictionary: Any) -> int:
    """Count the changes that a dictionary's connection has made."""
    return int(dictionary.conn.total_changes)


def _newest(dictionary: Any) -> int:
    """Return the bytes of the value that a dictionary's connection has stored last."""
    newest = "SELECT length(key_value) FROM dict WHERE rowid = last_insert_rowid()"
    with dictionary.mutex:
        return int(dictionary.conn.execute(newest).fetchone()[0])


def _lookups(dictionary: Any) -> int:
    """Count how often a write-once dictionary had to ask the disk."""
    return int(dictionary._fetch.cache_info().misses)  # noqa: SLF001


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
