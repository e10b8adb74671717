"""What the superuser may do beside the caches of other users."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from homes import Home

    from cachectl.layers.base.environment import Environment

KEY = "3/f/433a72c95049e7"


def let_others_in(folder: Path) -> None:
    """Let every user reach a folder of pytest's."""
    for path in (folder, *folder.parents):
        if path.stat().st_mode & 0o001 == 0:
            path.chmod(path.stat().st_mode | 0o011)


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can own nothing of what is there")
def test_the_superuser_leaves_other_peoples_caches_alone(home: Home, compute_cache: Callable[[Path], None]) -> None:
    cache = home.path / ".nv" / "ComputeCache"
    compute_cache(cache)
    home.cachectl("get", "cuda", KEY, "-o", "entry")
    for path in (cache, *cache.rglob("*")):
        os.chown(path, 65534, 65534)
    done = home.cachectl("purge", "--all", check=False)
    assert done.returncode == 1
    assert "and you are the superuser" in done.stderr
    assert home.cachectl("prune", "--max-size", "0", check=False).returncode == 1
    assert home.cachectl("put", "cuda", KEY, "entry", check=False).returncode == 1
    assert len(home.json("ls", "cuda")["entries"]) == 40
    # With --over-others the superuser works as the owner, who must get there.
    done = home.cachectl("purge", "cuda", "--over-others", check=False)
    assert (done.returncode, "Permission denied" in done.stderr) == (1, True)
    let_others_in(home.path)
    assert home.json("purge", "cuda", "--over-others", process=True)["total"]["removed"] == 40


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give files away")
def test_the_superuser_leaves_single_entries_of_others_in_a_root_of_its_own(
    home: Home, compute_cache: Callable[[Path], None]
) -> None:
    cache = home.path / ".nv" / "ComputeCache"
    compute_cache(cache)
    cache.chmod(0o1777)
    entries = sorted(entry["key"] for entry in home.json("ls", "cuda")["entries"])
    home.cachectl("get", "cuda", entries[0], "-o", "entry")
    for key in entries[:3]:
        os.chown(cache / key, 65534, 65534)
    os.chown(cache / entries[3], 1234, 1234)
    for dry_run in (("--dry-run",), ()):
        done = home.cachectl("purge", "cuda", "--json", *dry_run, check=False)
        assert done.returncode == 1
        (layer,) = json.loads(done.stdout)["layers"]
        assert layer["removed"] == 36
        (failed,) = layer["failed"]
        assert failed["key"] == str(cache)
        assert "4 of 40 belong to others (1 to user 1234, 3 to nobody) and stay" in failed["because"]
        assert "--over-others" in failed["because"]
    assert sorted(entry["key"] for entry in home.json("ls", "cuda")["entries"]) == entries[:4]
    assert home.cachectl("prune", "--max-size", "0", check=False).returncode == 1
    (cache / entries[0]).write_bytes((cache / entries[1]).read_bytes())
    refused = home.cachectl("put", "cuda", entries[0], "entry", "--replace", check=False)
    assert refused.returncode == 1
    assert "belongs to nobody" in refused.stderr
    assert home.json("purge", "cuda", "--over-others", process=True)["total"]["removed"] == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give files away")
def test_the_rows_of_a_database_are_its_owners(
    home: Home, fill_sumpy: Callable[[Environment], None], tmp_path: Path
) -> None:
    fill_sumpy(home.environment())
    (database,) = (home.path / ".cache" / "pytools").glob("*.sqlite")
    (key, *_) = [entry["key"] for entry in home.json("ls", "pytools")["entries"]]
    home.cachectl("push", str(tmp_path / "bundle.zip"), "pytools")
    home.cachectl("get", "pytools", key, "-o", "row")
    home.cachectl("purge", "pytools", "--key", key)
    os.chown(database, 65534, 65534)
    before = database.read_bytes()
    for arguments in (
        ("purge", "pytools"),
        ("purge", "pytools", "--larger-than", "1"),
        ("put", "pytools", key, "row"),
        ("pull", str(tmp_path / "bundle.zip"), "--trust"),
    ):
        done = home.cachectl(*arguments, check=False)
        assert done.returncode == 1, arguments
        assert "nobody" in done.stderr
        assert "--over-others" in done.stderr
    assert database.read_bytes() == before
    # In a folder of the superuser's, its owner could not make a journal: nobody's database is closed to everybody else.
    done = home.cachectl("pull", str(tmp_path / "bundle.zip"), "--trust", "--over-others", check=False)
    assert done.returncode == 1
    assert "belongs to nobody" in done.stderr
    assert database.read_bytes() == before
    os.chown(database.parent, 65534, 65534)
    let_others_in(home.path)
    assert home.json("purge", "pytools", "--over-others")["total"]["removed"] == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give files away")
def test_quarantine_leaves_what_is_anothers(home: Home, compute_cache: Callable[[Path], None]) -> None:
    cache = home.path / ".nv" / "ComputeCache"
    compute_cache(cache)
    mine, theirs = (cache / entry["key"] for entry in home.json("ls", "cuda")["entries"][:2])
    for path in (mine, theirs):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    os.chown(theirs, 65534, 65534)
    done = home.cachectl("verify", "cuda", "--quarantine", check=False)
    assert done.returncode == 1
    assert "1 of 2 belong to others (1 to nobody) and stay" in done.stderr
    assert theirs.exists()
    assert not mine.exists()


#: An entry of the recorded ComputeCache.
KEY = "3/f/433a72c95049e7"
