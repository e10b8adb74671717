"""``cachectl prune``: the dead, the old, and the longest unused until the rest fits."""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from homes import Home
from support.doctor import dictionary, leak
from support.layers import on_disk, root_of, write
from support.products import place

from cachectl.config import Limits
from cachectl.stack import Stack
from cachectl.verbs.prune import plan_prune
from cachectl.watching import ledger


@pytest.fixture
def cuda(cuda: Home) -> Path:
    """Return a real ComputeCache whose entries were stored an hour apart, in the order of their names."""
    cache = cuda.path / ".nv/ComputeCache"
    for hour, path in enumerate(sorted(cache.glob("?/?/*"))):
        os.utime(path, (1_700_000_000 + 3600 * hour, 1_700_000_000 + 3600 * hour))
    return cache


def size(cache: Path) -> int:
    return on_disk(*(path for path in cache.rglob("*") if path.is_file()))


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("?/?/*"))


def test_the_oldest_go_until_the_rest_fits(home: Home, cuda: Path) -> None:
    before = entries(cuda)
    done = home.json("prune --max-size 100K")
    left = entries(cuda)
    assert left == before[len(before) - len(left) :]
    assert size(cuda) <= 100 << 10
    assert done["total"]["removed"] == len(before) - len(left) > 0
    assert home.json("prune --max-size 100K")["total"]["removed"] == 0


@pytest.mark.parametrize(("seconds", "first"), [((), 0), ((2.0, 2.0), 1), ((1e-6, 0.5), 0)])
def test_what_is_large_for_its_seconds_goes_first_once_a_run_measured_them(
    home: Home, seconds: tuple[float, ...], first: int
) -> None:
    layer, now = home.stack["pocl"], time.time()
    for letter, size, days in (("C", 1, 3), ("D", 1 << 20, 2)):
        program = {"program.bc": bytes(size), f"{letter}/0-0-0/{letter}.so": b""}
        folder = place(root_of(layer), f"AB/{letter * 37}", program)
        for path in (*folder.rglob("*"), folder):
            os.utime(path, (now - 86400 * days,) * 2)
    small, large = layer.entries()
    measured = {name: ledger.Known(now, seconds={"pocl": one}) for name, one in zip("CD", seconds, strict=False)}
    ledger.change(layer.environment, lambda known: known.kernels.update(measured))
    (plan,) = plan_prune([layer], Limits(max_size=small.bytes + large.bytes - 1)).layers
    assert [entry.key for entry in plan.entries] == [(small, large)[first].key]


def test_orphans_go_and_dictionaries_of_a_python_that_was_removed_stay(home: Home, tmp_path: Path) -> None:
    """A Python of that version that nobody looked for may read them, which leaves no trace."""
    alive, program = home.environment().python, write(tmp_path / "env/bin/python3.8", "\x7fELF\0003.8.1\0")
    program.chmod(0o755)
    write(tmp_path / "env/lib/python3.8/site-packages/pytools-2026.1.1.dist-info/METADATA", "Version: 2026.1.1\n")
    # pytools before 2026.1 wrote no dash.
    for ending in (f"-{alive}", alive, "-3.8.1.final.0", "-3.8.2.final.0"):
        dictionary(home.path, ending)
    leaked = leak(home.path)
    said: list[str] = []
    for configured in ("", f"python = ['{program}']"):
        file = home.configure(configured)
        here = home.environment()._replace(searches_pythons=True)
        Stack(here).prune(dry_run=True, notice=said.append)
    assert [line.split(" entries")[0][-1:] for line in said] == ["3", "2"]
    file.unlink()
    path = f"{program.parent}:{home.variables['PATH']}"
    assert home.json("ls pytools --stale", PATH=path)["entries"] == []
    shutil.rmtree(tmp_path / "env")
    # Without a limit, typed or configured, it is what is stale.
    planned = home.json("prune --dry-run", PATH=path)["total"]
    assert (planned["removed"], planned["orphans_removed"]) == (0, 1)
    pruned = home.json("prune --stale --python", sys.executable, PATH=path)["layers"]
    assert [layer["removed"] for layer in pruned if layer["layer"] == "pytools"] == [0]
    assert not leaked.exists()
    left = home.json("ls pytools")["entries"]
    assert {entry["key"].partition("/")[0]: entry["stale"] for entry in left} == {
        f"pdict-v5-mine-{alive}.sqlite": False,
        f"pdict-v5-mine{alive}.sqlite": None,
        "pdict-v5-mine-3.8.1.final.0.sqlite": None,
        "pdict-v5-mine-3.8.2.final.0.sqlite": None,
    }


@pytest.mark.usefixtures("cuda")
def test_configured_limits_apply_without_an_option(home: Home) -> None:
    total = home.json("report cuda")["total"]["bytes"]
    home.configure("[prune]\nmax-size = '100K'\n")
    removed = home.json("prune --dry-run")["total"]["removed"]
    assert 0 < removed < 40
    assert home.json(f"prune --dry-run --max-size {total}B")["total"]["removed"] == 0
    assert home.json("prune pocl")["total"]["removed"] == 0
    done = home.json("prune cuda")["total"]["removed"]
    assert removed <= done < 40
    assert home.json("report cuda")["total"]["bytes"] <= 100 << 10
    home.configure('[prune]\nolder-than = "30d"\n')
    assert home.json("prune")["total"]["removed"] == 40 - done


def test_tuning_is_pruned_only_by_name(home: Home) -> None:
    tuned = home.path / ".config/miopen/gfx90a6e.HIP.3_3_0_a85ca8a54.ufdb.txt"
    write(tuned, b"1-2=Solver:1,0,Algorithm\n")
    os.utime(tuned, (1, 1))
    home.configure('[prune]\nolder-than = "1d"\n')
    for limit in ("", "--max-size 0B"):
        home.cachectl(f"prune {limit}")
        assert tuned.exists()
    home.cachectl("prune --max-size 0B miopen-tuning")
    assert not tuned.exists()
