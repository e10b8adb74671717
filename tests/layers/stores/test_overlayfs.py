"""A cache in the lower layer of overlayfs, as an image gives it to every container: no folder of it can be renamed.

The mounts are real, in a file system of their own, and need the superuser.
"""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from homes import Home
from injector import KILL, WRITES, Fault, Injector
from support.bundles import files
from support.layers import got, keys_of, root_of
from support.tracing import layer_of, trace
from tiers import real, thorough_only
from worlds import leftovers

from cachectl.layers.core.selection import Selection

Mounter = Callable[[Path], None]


@pytest.fixture
def mounted(mount: Callable[..., Path], tmp_path: Path) -> Mounter:
    """Return a function that mounts a new upper layer over a folder."""
    disk, numbers = mount("-t", "tmpfs", "tmpfs", on=tmp_path / "disk"), itertools.count()

    def lay(folder: Path) -> None:
        if not (disk / "lower").exists():
            shutil.copytree(folder, disk / "lower", symlinks=True)
        fresh = disk / str(next(numbers))
        for name in ("upper", "work"):
            (fresh / name).mkdir(parents=True)
        layers = f"lowerdir={disk / 'lower'},upperdir={fresh / 'upper'},workdir={fresh / 'work'}"
        mount("-t", "overlay", "overlay", "-o", f"redirect_dir=off,{layers}", on=folder)

    return lay


@pytest.fixture
def image(warm: Home, mounted: Mounter) -> Home:
    """Return a filled home with all files in a lower layer."""
    mounted(warm.path)
    entry = next(warm.stack["pocl"].entries())
    with pytest.raises(OSError, match="cross-device"):
        os.rename(entry.root / entry.key, warm.path / "elsewhere")
    return warm


def keys(home: Home, layer: str) -> set[str]:
    return set(keys_of(home.stack[layer]))


def built(home: Home, layer: str) -> int:
    """Run a part of the programs that filled the home again; return how many entries of a layer they stored."""
    program, number = {"pocl": ("kernels.py", "2"), "pyopencl": ("binaries.py", "3")}[layer]
    return int(layer_of(trace(home, program, number), layer)["stores"])


@real
@thorough_only
@pytest.mark.parametrize("layer", ["pocl", "pyopencl"])
def test_entries_of_an_image_are_replaced_and_removed(image: Home, layer: str) -> None:
    """After removal one by one (damage, a selection) and at once, real programs miss, then hit again."""
    adapter = image.stack[layer]
    assert built(image, layer) == 0
    here, there, *others = sorted(keys(image, layer))
    other = got(adapter, there)
    adapter.put(here, other._replace(key=here), replace=True)
    assert got(adapter, here).data == other.data
    (root_of(adapter) / there / {"pocl": "program.bc", "pyopencl": "binary"}[layer]).write_bytes(b"")
    image.cachectl("purge --damaged", layer)
    assert keys(image, layer) == {here, *others}
    assert leftovers(image.path / ".cache") == []
    totals = [image.json("purge", layer, *more)["total"] for more in (("--key", here), ())]
    assert [(total["removed"], total["failed"]) for total in totals] == [(1, 0), (len(others), 0)]
    assert keys(image, layer) == set()
    assert built(image, layer) > 0
    assert built(image, layer) == 0


@pytest.mark.hazard
@real
@pytest.mark.parametrize(("layer", "first"), [("pocl", "program.bc"), ("pyopencl", "info")])
def test_a_killed_purge_leaves_all_or_a_miss(
    image: Home, mounted: Mounter, injector: Injector, layer: str, first: str
) -> None:
    """Killed at each call in turn. No half may look valid to the library, so the file that it looks for goes first."""
    # Only those that the program stores again: to PoCL each build for PyOpenCL's own cache is a new program.
    kernel = "lk[01]" if layer == "pocl" else None
    entry = max(image.stack[layer].entries(Selection(kernel=kernel)), key=lambda entry: entry.files)
    folder = entry.root / entry.key
    whole = files(folder)
    command = ("purge", layer, "--key", entry.key, "--wait", "0.2")
    states: set[int] = set()
    calls = injector.run(*command, home=image.path, fault=Fault(WRITES)).seen
    assert not folder.exists()
    for nth in range(1, calls + 1):
        mounted(image.path)
        done = injector.run(*command, home=image.path, fault=Fault(WRITES, nth, KILL))
        assert done.status == -9
        left = files(folder)
        assert left == whole or first not in left
        if 0 < len(left) < len(whole):
            states.add(len(left))
        if left and len(left) in (1, len(whole) - 1) and first not in left:
            # A real program compiles again, and what it stores is whole. PyOpenCL asks its user to remove the lock of a
            # killed program; the next command of cachectl does.
            for lock in (image.path / ".cache/pyopencl").rglob("lock"):
                lock.unlink()
            assert built(image, layer) == 1
            assert files(folder).keys() == whole.keys()
            assert built(image, layer) == 0
        again = injector.run(*command, home=image.path, fault=Fault(0))
        assert again.status == 0 or not left, again
        assert not folder.exists()
    assert len(states) == len(whole) - 1
