"""What the superuser may do to the caches of other users, and what others may do to a user's."""

import os
from pathlib import Path

import pytest
from homes import Home, make_home, unpack_compute_cache
from support import mesa
from support.products import PRODUCTS
from tiers import NOBODY, as_root

from cachectl.layers.core.conformance import snapshot
from cachectl.stack import Stack

KEY = "3/f/433a72c95049e7"
THEIRS = "belongs to nobody: sudo -u nobody cachectl …"


@as_root
@pytest.mark.parametrize("name", ["cuda", "pytools", "miopen-tuning", *(f"mesa {store}" for store in mesa.STORES)])
def test_the_superuser_leaves_other_peoples_caches_alone(home: Home, name: str) -> None:
    layer, fill, variables = PRODUCTS[name]
    fill(home.path)
    home = Home(home.path, {**home.variables, **variables})
    key, *others = home.cachectl(f"ls -q {layer}").stdout.splitlines()
    home.cachectl(f"get {layer} -o artifact", key)
    home.cachectl(f"purge {layer} --key", key)
    folder = home.path / {"cuda": ".nv", "miopen-tuning": ".config"}.get(layer, ".cache")
    for path in folder.rglob("*"):
        os.chown(path, NOBODY, NOBODY)
    before = snapshot(folder)
    for line in (f"purge {layer}", f"purge {layer} --shared", f"prune {layer} --max-size 0B"):
        for dry_run in ("", " --dry-run"):
            home.refused(line + dry_run, says=THEIRS)
    home.refused(f"put {layer}", key, "artifact", says=THEIRS)
    assert snapshot(folder) == before
    assert len(home.json("ls", layer)["entries"]) == len(others) > 0


@as_root
def test_the_superuser_leaves_single_entries_of_others_in_a_root_of_its_own(cuda: Home) -> None:
    cache = cuda.path / ".nv/ComputeCache"
    entries = sorted(entry["key"] for entry in cuda.json("ls cuda")["entries"])
    cuda.cachectl("get cuda", entries[0], "-o", "entry")
    for name in entries[:3]:
        os.chown(cache / name, NOBODY, NOBODY)
    for name in (entries[2], entries[3]):
        (cache / name).write_bytes((cache / name).read_bytes()[:-1] + b"?")
    total = cuda.json("purge cuda --damaged")["total"]
    assert (total["removed"], total["skipped"], total["failed"]) == (1, 1, 0)
    for line in ("purge cuda --dry-run", "purge cuda"):
        (layer,) = cuda.json(line)["layers"]
        assert layer["removed"] == 36
        assert {note["key"]: note["because"] for note in layer["skipped"]} == dict.fromkeys(entries[:3], THEIRS)
    assert sorted(path.name for path in cache.glob("?/?/*")) == sorted(Path(name).name for name in entries[:3])
    (cache / entries[0]).write_bytes((cache / entries[1]).read_bytes())
    cuda.refused("put cuda", entries[0], "entry", "--replace", says="belongs to nobody")


def test_a_cache_that_others_can_write_is_read_and_changed_only_if_shared(open_folder: Path) -> None:
    home = make_home(open_folder / "home")
    cache = home.path / ".nv/ComputeCache"
    unpack_compute_cache(cache)
    home.cachectl(f"get cuda {KEY} -o entry")
    home.cachectl(f"purge cuda --key {KEY}")
    cache.chmod(0o777)
    for line in ("purge cuda", "prune --max-size 0B", f"put cuda {KEY} entry"):
        said = home.refused(line, says="other users can write to")
    assert len(home.json("ls cuda")["entries"]) == 39
    if os.geteuid() == 0:
        for line in ("purge cuda", f"put cuda {KEY} entry"):
            home.refused(f"{line} --shared", says="cachectl: ")
        stack = Stack(home.environment()._replace(superuser=False), shared=True)
        assert stack.purge(layers=["cuda"]).total.removed == 39
    else:
        assert "--shared" in said
        home.cachectl("put cuda", KEY, "entry", "--shared")
        assert home.json("purge cuda --shared")["total"]["removed"] == 40
