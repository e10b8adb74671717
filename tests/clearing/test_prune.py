"""``cachectl prune``: the dead, the old, and the longest unused until the rest fits."""

from __future__ import annotations

import os
import pickle
import sqlite3
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from cachectl.layers.base.conformance import snapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from homes import Home


@pytest.fixture
def cuda(home: Home, compute_cache: Callable[[Path], None]) -> Path:
    """Return a real ComputeCache whose entries were stored an hour apart, in the order of their names."""
    cache = home.path / ".nv" / "ComputeCache"
    compute_cache(cache)
    for hour, path in enumerate(sorted(cache.glob("?/?/*"))):
        os.utime(path, (1_700_000_000 + 3600 * hour, 1_700_000_000 + 3600 * hour))
    return cache


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("?/?/*"))


def test_the_oldest_go_until_the_rest_fits(home: Home, cuda: Path) -> None:
    before = entries(cuda)
    done = home.json("prune", "--max-size", "100K")
    left = entries(cuda)
    assert left == before[len(before) - len(left) :]
    held = sum(path.stat().st_size for path in cuda.rglob("*") if path.is_file())
    assert held <= 100 * 1024
    assert done["total"]["removed"] == len(before) - len(left) > 0
    assert home.json("prune", "--max-size", "100K")["total"]["removed"] == 0


def test_no_more_goes_than_has_to(home: Home, cuda: Path) -> None:
    sizes = [path.stat().st_size for path in entries(cuda)]
    index = (cuda / "index").stat().st_size
    # Room for the index and all but the three oldest: those three go, and no fourth.
    home.cachectl("prune", "--max-size", f"{index + sum(sizes[3:])}B")
    assert len(entries(cuda)) == len(sizes) - 3


def test_old_entries_are_removed_and_a_dry_run_changes_nothing(home: Home, cuda: Path) -> None:
    for path in entries(cuda)[30:]:
        os.utime(path)
    before = snapshot(home.path, times=True)
    assert home.json("prune", "--older-than", "30d", "--dry-run")["total"]["removed"] == 30
    assert snapshot(home.path, times=True) == before
    assert home.json("prune", "--older-than", "30d")["total"]["removed"] == 30
    assert len(entries(cuda)) == 10


def test_dead_dictionaries_and_orphans_are_stale(home: Home) -> None:
    folder = home.path / ".cache" / "pytools"
    folder.mkdir(parents=True)
    alive = home.environment().python
    # pytools before 2026.1 wrote no dash; whether another Python's dictionary is dead is unknown.
    for ending in (f"-{alive}", alive, "-3.8.1.final.0"):
        with closing(sqlite3.connect(folder / f"pdict-v5-mine{ending}.sqlite")) as connection:
            connection.execute("create table dict (keyhash text not null primary key, key_value text not null)")
            connection.execute("insert into dict values ('0123456789abcdef', ?)", (pickle.dumps((1, 2)),))
            connection.commit()
    leaked = home.path / ".cache" / "pocl" / "kcache" / "tempfile_aB3dE6"
    leaked.parent.mkdir(parents=True)
    leaked.touch(mode=0o600)
    done = {
        layer["layer"]: layer["removed"]
        for layer in home.json("prune", "--stale", "--python", sys.executable)["layers"]
    }
    assert done["pytools"] == 1
    assert not leaked.exists()
    left = home.json("ls", "pytools")["entries"]
    assert {entry["key"].partition("/")[0]: entry["stale"] for entry in left} == {
        f"pdict-v5-mine-{alive}.sqlite": False,
        "pdict-v5-mine-3.8.1.final.0.sqlite": None,
    }


def configure(home: Home, text: str) -> None:
    file = home.path / ".config" / "cachectl" / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_configured_limits_apply_without_an_option(home: Home, cuda: Path) -> None:
    total = sum(path.stat().st_size for path in cuda.rglob("*") if path.is_file())
    configure(home, "[prune]\nmax-size = '1G'\n[prune.cuda]\nmax-size = '50K'\n")
    left = 50 << 10
    removed = home.json("prune", "--dry-run")["total"]["removed"]
    assert 0 < removed < 40
    assert home.json("prune", "--dry-run", "--max-size", f"{total}B")["total"]["removed"] == 0
    assert home.json("prune", "pocl")["total"]["removed"] == 0
    assert home.json("prune", "cuda")["total"]["removed"] == removed
    assert sum(path.stat().st_size for path in cuda.rglob("*") if path.is_file()) <= left
    assert home.json("prune")["total"]["removed"] == 0


def test_a_layer_has_an_age_and_staleness_of_its_own(home: Home, cuda: Path) -> None:
    configure(home, '[prune]\nolder-than = "30d"\n[prune.cuda]\nolder-than = false\n')
    assert home.json("prune")["total"]["removed"] == 0
    configure(home, '[prune]\nolder-than = "9000d"\n[prune.cuda]\nolder-than = "30d"\n')
    assert home.json("prune")["total"]["removed"] == 40
    assert not entries(cuda)


def test_tuning_has_only_limits_of_its_own(home: Home) -> None:
    tuned = home.path / ".config" / "miopen" / "gfx90a6e.HIP.3_3_0_a85ca8a54.ufdb.txt"
    tuned.parent.mkdir(parents=True)
    tuned.write_bytes(b"1-2=Solver:1,0,Algorithm\n")
    os.utime(tuned, (1, 1))
    configure(home, '[prune]\nolder-than = "1d"\nmax-size = "0B"\n')
    assert home.json("prune")["total"]["removed"] == 0
    configure(home, '[prune]\nolder-than = "1d"\nmax-size = "0B"\n[prune.miopen-tuning]\nmax-size = "1M"\n')
    assert home.json("prune")["total"]["removed"] == 0
    configure(home, '[prune.miopen-tuning]\nolder-than = "1d"\n')
    assert home.json("prune")["total"]["removed"] == 1
    assert not tuned.exists()


def test_tuning_is_pruned_only_by_name(home: Home) -> None:
    tuned = home.path / ".config" / "miopen" / "gfx90a6e.HIP.3_3_0_a85ca8a54.ufdb.txt"
    tuned.parent.mkdir(parents=True)
    tuned.write_bytes(b"1-2=Solver:1,0,Algorithm\n")
    home.cachectl("prune", "--max-size", "0B")
    assert tuned.exists()
    home.cachectl("prune", "--max-size", "0B", "miopen-tuning")
    assert not tuned.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a limit: --stale"),
        (["--max-size", "much"], "such as 500M"),
        (["--max-size", "5"], "cannot read '5' as a size; write a number and B, K, M, G or T, such as 500M"),
        (["--older-than", "long"], "such as 30d"),
        (["nosuch", "--stale"], "unknown layer"),
    ],
)
def test_misuse_is_said(home: Home, arguments: list[str], words: str) -> None:
    done = home.cachectl("prune", *arguments, check=False)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_system_layer_is_refused(home: Home) -> None:
    done = home.cachectl("prune", "miopen-system", "--stale", check=False)
    assert done.returncode == 1
    assert "belong to the package" in done.stderr
