"""Quarantine and put, killed at random moments."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from support.quarantine import (
    BREAKAGES,
    held,
    junk_native,
    quarantine_all,
    works,
)
from tiers import amount

from cachectl.inspecting.verify import findings
from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.errors import EntryExists
from cachectl.layers.base.facts import Entry, Finding
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.selection import Selection
from cachectl.layers.stores.archive import pack, unpack
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home

#: How much of the programs that filled the home runs again.
KERNELS, PROGRAMS = amount("2", "8"), amount("1", "3")


# ---------------------------------------------------------------------- SIGKILL


class Killer:
    """Runs something in a child that is killed at a random moment of the time it takes.

    How long that is, is learned as it goes: a machine is now faster, now slower, and moments that all lie before or
    behind the work would show nothing.
    """

    def __init__(self, seed: int, seconds: float) -> None:
        self.random = Random(seed)  # noqa: S311 - moments, not secrets
        self.seconds = seconds

    def kill(self, work: Callable[[], None]) -> None:
        child = os.fork()
        if child == 0:
            try:
                work()
            finally:
                os._exit(0)
        time.sleep(self.random.uniform(0, self.seconds))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        self.seconds *= 1.06 if os.WIFSIGNALED(status) else 0.8


def settle(home: Home) -> None:
    """Open every dictionary as the next program would: sqlite rolls an interrupted write back."""
    for journal in home.path.rglob("*.sqlite-journal"):
        with closing(sqlite3.connect(str(journal).removesuffix("-journal"))) as connection:
            connection.execute("select count(*) from dict").fetchone()


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def present(layer: Layer, key: str) -> bytes | None:
    artifact = layer.get(key)
    return None if artifact is None else artifact.data


@pytest.mark.real
def test_put_killed_at_any_moment(warm: Home, moments: int) -> None:
    """A put that is killed leaves the old entry, the new one or none, and the real programs run."""
    stack = Stack(warm.environment())
    variants: dict[str, tuple[str, list[Any]]] = {}
    for name in ("pocl", "pyopencl", "loopy", "pyopencl-invoker"):
        layer = stack[name]
        entry = next(iter(layer.entries()))
        whole = layer.get(entry.key)
        assert whole is not None
        variants[name] = (entry.key, [whole, smaller(layer, whole)])

    def put_all(turn: int) -> None:
        for name, (key, artifacts) in variants.items():
            stack[name].put(key, artifacts[turn % 2], replace=True)

    killer = Killer(3, timed(lambda: put_all(1)))
    outcomes: set[tuple[str, bool]] = set()
    turns = 0
    # The moments are spread: every layer is met before and after its turn, however many kills that takes.
    while turns < moments or len(outcomes) < 2 * len(variants):
        assert turns < 20 * moments, outcomes
        turn, turns = turns, turns + 1
        killer.kill(lambda turn=turn: put_all(turn))  # type: ignore[misc]
        settle(warm)
        for name, (key, artifacts) in variants.items():
            data = present(stack[name], key)
            assert data is None or data in [artifact.data for artifact in artifacts]
            outcomes.add((name, data == artifacts[turn % 2].data))
        assert findings(stack) == []
        if turn % 20 == 9:
            assert works(warm, ("kernels.py", KERNELS))
            assert works(warm, ("binaries.py", PROGRAMS))
    assert works(warm, ("kernels.py", KERNELS))


def smaller(layer: Layer, whole: Any) -> Any:  # noqa: ANN401 - an artifact
    """Return another entry of the same key that the library can use as well."""
    if layer.name in ("pocl", "pyopencl"):
        spare = {"pocl": "last_accessed", "pyopencl": "source.cl"}[layer.name]
        members = {path: data for path, data in unpack(whole.data).items() if path != spare}
        return replace(whole, data=pack(members))
    return replace(whole, data=pickle.dumps(pickle.loads(whole.data), protocol=4))  # noqa: S301 - made by this test


@pytest.mark.real
@pytest.mark.hazard
def test_quarantine_killed_at_any_moment(filled: Home, tmp_path: Path, moments: int) -> None:
    """A move into quarantine that is killed leaves the thing in its place or wholly aside, never half."""
    broken = tmp_path / "broken"
    shutil.copytree(filled.path, broken, symlinks=True)
    home_at(filled, broken).cachectl("purge", "--all", "--kernel", "lk[2-7]")
    for breakage in ("truncated info", "truncated pdict", "truncated rows", "junk .so"):
        BREAKAGES[breakage].make(broken)
    damage = {finding.key for finding in found_in(home_at(filled, broken))}
    work = tmp_path / "work"

    def fresh() -> Home:
        shutil.rmtree(work / "home", ignore_errors=True)
        shutil.copytree(broken, work / "home", symlinks=True)
        return home_at(filled, work / "home")

    first = fresh()
    killer = Killer(4, timed(lambda: quarantine_all(first)))
    seen: set[int] = set()
    turns = 0
    # The moments are spread: it is met with nothing aside, with everything, and with a part.
    while turns < moments or len(seen) < 3:
        assert turns < 20 * moments, seen
        turn, turns = turns, turns + 1
        home = fresh()
        killer.kill(lambda home=home: quarantine_all(home))  # type: ignore[misc]
        settle(home)
        left = {finding.key for finding in found_in(home)}
        aside = {thing.key for layer in Stack(home.environment()) for thing in held(layer)}
        # A row is copied before it is deleted, so that it may be in both places, never in none.
        assert left | aside == damage
        assert all("/" in (key or "") for key in left & aside)
        seen.add(len(aside))
        quarantine_all(home)
        assert found_in(home) == []
        if turn % 20 == 9:
            assert works(home, ("kernels.py", KERNELS))
            assert works(home, ("binaries.py", PROGRAMS))


def home_at(home: Home, path: Path) -> Home:
    return replace(home, path=path, variables={**home.variables, "HOME": str(path)})


def found_in(home: Home) -> list[Finding]:
    return findings(Stack(home.environment()))


@pytest.mark.real
def test_restore_over_another_entry_is_asked_for(warm: Home) -> None:
    """From Python: what stands in the place is not replaced unless asked, and both sides are whole meanwhile."""
    broken = junk_native(warm.path)
    stack = Stack(warm.environment())
    layer = stack["pocl"]
    quarantine_all(warm)
    (thing,) = held(layer)
    artifact = other_entry(layer)
    shutil.copytree(artifact.root / artifact.key, artifact.root / thing.key)
    before = snapshot(warm.path)
    with pytest.raises(EntryExists):
        layer.restore(thing)
    assert snapshot(warm.path) == before
    layer.restore(thing, replace=True)
    assert broken.read_bytes() == b"no shared object at all"
    assert list(layer.quarantined()) == []


def other_entry(layer: Layer) -> Entry:
    return next(iter(layer.entries(Selection())))
