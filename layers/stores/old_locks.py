"""Locks that are held too long, and lock files that outlived their holder."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cachectl.layers.base.processes import lockers_of, process_names, stat_fields
from cachectl.layers.core.codes import LOCK
from cachectl.layers.core.entry import Problem
from cachectl.layers.core.finding import RISKS, Finding
from cachectl.layers.core.root import Root
from cachectl.layers.core.store import Store
from cachectl.layers.disk import handles
from cachectl.layers.stores.files import Files, locks_of
from cachectl.layers.stores.row_store import Rows


def find_old_locks(store: Store, root: Root) -> Iterator[Finding]:
    """Yield databases locked for as long as a command waits, and lock files older than their library waits."""
    if isinstance(store, Rows):
        yield from _of_files(store.rest, root)
        for file in store.tables.tables(root):
            if not isinstance(file, Problem):
                yield from _of_table(store, root, file)
    elif isinstance(store, Files):
        yield from _of_files(store, root)


def _of_files(store: Files, root: Root) -> Iterator[Finding]:
    shown, cure = store.environment.processes, f"cachectl prune --stale {store.name}"
    for entry, (holders, reason) in locks_of(store, root):
        path, age = shlex.quote(str(root.path / entry.key)), store.environment.clock() - (entry.modified or 0)
        message, fix = f"an abandoned lock, {age:.0f} s old, which no program has open", cure
        if holders:
            message = f"a lock that {process_names(holders, shown)} has held for {age:.0f} s"
            fix = _release(holders, shown, f"; then: {cure}")
        elif reason:
            message = f"a lock, {age:.0f} s old, whose holder is unknown ({reason})"
            fix = f"as root, outside containers, on each machine here: fuser {path}; if nobody has it: rm {path}"
        if age > store.lock_waits:
            message, severity = f"{message}: {store.lock_effect.message}", store.lock_effect.severity
            severity = RISKS if holders or reason else severity
            yield LOCK.finding(store.name, root.path, message, fix, key=entry.key, severity=severity)


def _of_table(store: Rows, root: Root, file: str) -> Iterator[Finding]:
    seconds, shown = store.environment.lock_timeout, store.environment.processes
    lockers = partial(lockers_of, store.tables.lock_files(root, file), processes=shown)
    # A program that writes repeatedly releases the lock in between.
    if (holders := lockers()) and not handles.wait_until(lambda: lockers() != holders, seconds):
        message = f"locked for more than {seconds:g} s by {process_names(holders, shown)}; programs wait for it"
        yield LOCK.finding(store.name, root.path, message, _release(holders, shown), key=file, severity=RISKS)


def _release(holders: tuple[int, ...], shown: Path, after: str = "") -> str:
    """Return how to make processes release a lock, and what to do ``after`` they have ended."""
    if all(stat_fields(pid, shown)[:1] == [b"T"] for pid in holders):
        return f"kill -CONT {' '.join(map(str, holders))}"
    return f"wait for {process_names(holders, shown)} to end, or end it{after}"
