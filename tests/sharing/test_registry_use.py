"""Machines that share their caches by a real registry: what travels, what is refused, what the registry keeps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.bundles import keys
from support.registries import RealRegistry

from cachectl.sharing.oci.registry import RegistryPlace
from cachectl.sharing.oci.repository import Reference, Repository
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home

DAY = 86400.0


def programs(home: Home) -> set[Path]:
    return {path.relative_to(home.path) for path in home.path.rglob("program.bc")}


def parts(url: str) -> list[str]:
    return sorted(one.name for one in RegistryPlace(url).names() if one.name[len("index/")].isdigit())


@pytest.fixture
def there(tmp_path: Path, new_home: Callable[[Path], Home]) -> Home:
    return new_home(tmp_path / "there")


@pytest.mark.real
def test_only_what_is_missing_travels(
    source: Home, there: Home, real_registry: RealRegistry, tmp_path: Path, new_home: Callable[[Path], Home]
) -> None:
    url = real_registry.url("team/store:main")
    done = source.json("push", url)
    assert done["total"]["pushed"] == len(keys(source))
    # This reads the parts, which no later command does again.
    assert source.json("push", url)["written"] == 0
    before = len(real_registry.requests())
    assert source.json("push", url)["written"] == 0
    assert len(real_registry.requests()) == before + 1

    pulled = there.json("pull", url, "--trust")
    assert pulled["digest"] == done["digest"]
    assert keys(there) == keys(source)
    compiled = programs(there)
    there.python("thirteen.py", "4", "2")
    assert programs(there) == compiled
    before = len(real_registry.requests())
    assert there.json("pull", url, "--trust")["read"] == 0
    assert len(real_registry.requests()) == before + 1

    there.python("thirteen.py", "5", "2")
    before = len(real_registry.requests())
    again = there.json("push", url)
    requests = real_registry.requests()[before:]
    # The kernel goes through three layers.
    assert len(again["parts"]) == 3
    assert len(requests) < 10, requests
    assert again["written"] < done["written"]
    assert not there.json("store", "verify", url)["findings"]
    third = new_home(tmp_path / "third")
    assert third.json("pull", url, "--trust")["total"]["placed"] == len(keys(source)) + again["total"]["pushed"]
    assert keys(third) >= keys(there)


@pytest.mark.real
def test_a_pinned_digest_is_trusted_and_is_one_state(source: Home, there: Home, real_registry: RealRegistry) -> None:
    url = real_registry.url("team/store:main")
    source.cachectl("push", url, "loopy")
    pinned = source.json("store", "ls", url)["pinned"]
    source.cachectl("push", url)
    assert there.cachectl("pull", url, check=False).returncode == 2
    done = there.json("pull", pinned)
    assert done["trusted"] == ["its digest is the given one"]
    assert {layer for layer, _ in keys(there)} == {"loopy"}
    there.python("thirteen.py", "1", "1")
    line = there.cachectl("push", pinned, check=False)
    assert line.returncode == 2
    assert line.stderr.endswith("is pinned by its digest and cannot be written to; name a tag\n")
    line = there.cachectl("run", "--store", pinned, "--", "true")
    assert (line.returncode, line.stderr) == (0, "")


@pytest.mark.real
def test_tags_that_were_moved_place_nothing(source: Home, there: Home, real_registry: RealRegistry) -> None:
    url, other = real_registry.url("team/store:main"), real_registry.url("team/store:other")
    source.cachectl("push", url)
    source.cachectl("push", other, "pocl")
    repository = Repository(Reference.parse(url))
    mine = parts(url)
    foreign = repository.manifest(parts(other)[0].replace("index/", "other."))
    for name in mine:
        tag = name.replace("index/", "main.")
        kept = repository.manifest(tag)
        # Also with the names changed so that they fit.
        fitting = json.loads(json.dumps(foreign.content).replace("other.", "main.").replace(parts(other)[0], name))
        for moved in (foreign.content, fitting):
            repository.put_manifest(tag, moved)
            line = there.cachectl("pull", url, "--trust", check=False)
            assert line.returncode == 1
            assert len(line.stderr.splitlines()) == 1
            assert not keys(there)
            assert there.cachectl("store", "verify", url, check=False).returncode == 1
        repository.put_manifest(tag, kept.content)
    assert there.json("pull", url, "--trust")["total"]["placed"] == len(keys(source))


@pytest.mark.real
def test_the_registry_collects_only_what_gc_has_given_up(
    source: Home, there: Home, real_registry: RealRegistry, tmp_path: Path, new_home: Callable[[Path], Home]
) -> None:
    url = real_registry.url("team/store:main")
    source.cachectl("push", url, "pocl")
    before = parts(url)
    real_registry.collect()
    there.cachectl("pull", url, "--trust")
    assert {layer for layer, _ in keys(there)} == {"pocl"}

    source.cachectl("push", url, "loopy")
    first = Stack(source.environment()).store(url)
    removed = first.gc(max_size=0)
    assert len(removed.parts) == 2
    assert not parts(url)
    # A reader that listed the store before still gets the packs.
    reader = RegistryPlace(url)
    real_registry.collect()
    held = [one.name for one in reader.contents() if one.name.startswith(("packs/", "objects/"))]
    assert len(held) == removed.condemned > 0
    assert all(RegistryPlace(url).read(name, 1 << 30) for name in held)
    # After the grace period they go.
    assert Stack(source.environment()).store(url).gc(grace=0.0).removed in (0, len(held))
    Stack(source.environment()).store(url).gc(grace=-1.0)
    real_registry.collect()
    assert not [one.name for one in RegistryPlace(url).contents() if one.name in held]
    blobs = list((real_registry.folder / "data").rglob("blobs/sha256/*/*/data"))
    assert sum(blob.stat().st_size for blob in blobs) < 20_000
    source.cachectl("push", url, "pocl")
    third = new_home(tmp_path / "third")
    third.cachectl("pull", url, "--trust", "--accept-older")
    assert keys(third) == keys(there)
    assert parts(url) != before
    shutil.rmtree(third.path)
