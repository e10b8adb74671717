"""Bundles: warm in another home, what import foresees, and merges."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.bundles import TRUSTED, keys, write

from cachectl.layers.base.facts import Scope
from cachectl.moving.bundle import Manifest
from cachectl.moving.importing import import_bundle
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home


# ---------------------------------------------------------------------- merging


@pytest.mark.real
def test_a_different_entry_that_is_here_is_never_replaced(
    parts: tuple[Manifest, list[bytes]], home: Home, tmp_path: Path
) -> None:
    manifest, contents = parts
    file = write(tmp_path / "bundle", manifest, contents)
    stack = Stack(home.environment())
    number = next(n for n, item in enumerate(manifest.items) if item.layer == "loopy")
    item, donor = manifest.items[number], contents[number + 1]
    assert donor != contents[number]
    forged = replace(item, bytes=len(donor), sha256=hashlib.sha256(donor).hexdigest())
    one = Manifest((forged,), {"loopy": manifest.portability_keys["loopy"]})
    import_bundle(stack, write(tmp_path / "one", one, [donor]), TRUSTED)

    done = {layer.layer: layer for layer in import_bundle(stack, file, TRUSTED).layers}

    assert [note.key for note in done["loopy"].kept] == [item.key]
    kept = stack["loopy"].get(item.key)
    assert kept is not None
    assert kept.data == donor
    assert sum(layer.placed for layer in done.values()) == len(contents) - 1


@pytest.mark.thorough
@pytest.mark.real
def test_two_imports_at_once_are_fine(packed: Path, source: Home, home: Home) -> None:
    # Each waits for the others' locks, however slow the machine.
    command = [sys.executable, "-m", "cachectl", "import", str(packed), "--trust", "--wait", "600"]
    running = [subprocess.Popen(command, env=dict(home.variables), stdout=-3, stderr=-1) for _ in range(3)]
    for one in running:
        _, said = one.communicate(timeout=1200)
        assert one.returncode == 0, said
    assert keys(home) == keys(source)
    assert home.json("verify")["findings"] == []


@pytest.mark.real
def test_an_import_that_is_killed_is_completed_by_another(
    packed: Path, source: Home, tmp_path: Path, new_home: Callable[[Path], Home], moments: int
) -> None:
    command = [sys.executable, "-m", "cachectl", "import", str(packed), "--trust"]
    draw = random.Random(6)  # noqa: S311 - moments, no secrets
    partly = 0
    placing = 60.0
    # The moments are random: some must find a part of the bundle placed.
    for number in range(10 * moments):
        if number > moments // 2 and partly:
            break
        home = new_home(tmp_path / f"home{number}")
        with subprocess.Popen(command, env=dict(home.variables), stdout=-3, stderr=-3) as running:
            # Before the first entry is placed nothing can be lost.
            while not (home.path / ".cache").exists() and running.poll() is None:
                time.sleep(0.001)
            started = time.monotonic()
            if number == 0:
                # The first is left alone, to measure how long it takes.
                assert running.wait(1200) == 0
                placing = time.monotonic() - started
            else:
                time.sleep(placing * draw.uniform(0, 0.9))
                running.kill()
                # The machine is now faster, now slower: the moments go with it.
                placing *= 1.06 if running.wait() else 0.8
        stack = Stack(home.environment())
        partly += 0 < len(keys(home)) < len(keys(source))
        done = import_bundle(stack, str(packed), TRUSTED)
        assert not done.failed
        assert not any(layer.kept for layer in done.layers)
        assert keys(home) == keys(source)
        found = [finding for layer in stack for root in layer.roots() for finding in layer.verify(root)]
        assert [one for one in found if layer_of(stack, one.layer) is Scope.USER] == []
    assert partly > 0


def layer_of(stack: Stack, name: str) -> Scope:
    return stack[name].scope
