"""What the superuser may do beside the caches of other users, and what others may do beside a user's."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.mesa import contents, fill, key, layer_of

from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.errors import Refused
from cachectl.layers.base.facts import Artifact
from cachectl.layers.mesa.cache import MesaShaderCache
from cachectl.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Callable

    from homes import Home

    from cachectl.layers.base.environment import Environment

KEY = "3/f/433a72c95049e7"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give files away")


@as_root
def test_the_superuser_leaves_other_peoples_caches_alone(cuda: Home) -> None:
    cache = cuda.path / ".nv" / "ComputeCache"
    cuda.cachectl("get", "cuda", KEY, "-o", "entry")
    for path in (cache, *cache.rglob("*")):
        os.chown(path, 65534, 65534)
    for verb in (("purge", "--all"), ("purge", "--all", "--shared"), ("prune", "--max-size", "0B")):
        for dry_run in (("--dry-run",), ()):
            done = cuda.cachectl(*verb, *dry_run, check=False)
            assert done.returncode == 1
            assert "belongs to nobody: sudo -u nobody cachectl …" in done.stderr
    assert cuda.cachectl("put", "cuda", KEY, "entry", check=False).returncode == 1
    assert len(cuda.json("ls", "cuda")["entries"]) == 40


@as_root
def test_the_superuser_leaves_single_entries_of_others_in_a_root_of_its_own(cuda: Home) -> None:
    cache = cuda.path / ".nv" / "ComputeCache"
    entries = sorted(entry["key"] for entry in cuda.json("ls", "cuda")["entries"])
    cuda.cachectl("get", "cuda", entries[0], "-o", "entry")
    for name in entries[:3]:
        os.chown(cache / name, 65534, 65534)
    for dry_run in (("--dry-run",), ()):
        (layer,) = json.loads(cuda.cachectl("purge", "cuda", "--json", *dry_run).stdout)["layers"]
        assert layer["removed"] == 37
        assert {note["key"]: note["because"] for note in layer["skipped"]} == dict.fromkeys(
            entries[:3], "belongs to nobody: sudo -u nobody cachectl …"
        )
    assert sorted(entry["key"] for entry in cuda.json("ls", "cuda")["entries"]) == entries[:3]
    (cache / entries[0]).write_bytes((cache / entries[1]).read_bytes())
    refused = cuda.cachectl("put", "cuda", entries[0], "entry", "--replace", check=False)
    assert refused.returncode == 1
    assert "belongs to nobody" in refused.stderr


@as_root
def test_the_rows_of_a_database_are_its_owners(home: Home, fill_sumpy: Callable[[Environment], None]) -> None:
    fill_sumpy(home.environment())
    (database,) = (home.path / ".cache" / "pytools").glob("*.sqlite")
    (row, *_) = [entry["key"] for entry in home.json("ls", "pytools")["entries"]]
    home.cachectl("get", "pytools", row, "-o", "row")
    home.cachectl("purge", "pytools", "--key", row)
    os.chown(database, 65534, 65534)
    before = database.read_bytes()
    for arguments in (("purge", "pytools"), ("put", "pytools", row, "row")):
        assert "belongs to nobody" in home.cachectl(*arguments, check=False).stderr
    assert database.read_bytes() == before


@as_root
def test_the_records_of_a_text_file_are_its_owners(home: Home) -> None:
    folder = home.path / ".config" / "miopen"
    folder.mkdir(parents=True)
    theirs, own = folder / "gfx90a6e.HIP.3_3_0.ufdb.txt", folder / "gfx90878.HIP.3_3_0.ufdb.txt"
    line = f"{'1-2-3-' * 60}F=miopenConvolutionFwdAlgoGEMM:1,2,3,gemm,x\n"
    for file in (theirs, own):
        file.write_text(line)
    (theirs_key, *_) = [
        entry["key"] for entry in home.json("ls", "miopen-tuning")["entries"] if "gfx90a6e" in entry["key"]
    ]
    home.cachectl("get", "miopen-tuning", theirs_key, "-o", "record")
    os.chown(theirs, 65534, 65534)
    done = home.cachectl("purge", "miopen-tuning", check=False)
    assert "belongs to nobody" in done.stderr
    assert (theirs.read_text(), theirs.stat().st_uid, own.exists()) == (line, 65534, False)
    theirs.write_text("another=a:b\n")
    assert "belongs to nobody" in home.cachectl("put", "miopen-tuning", theirs_key, "record", check=False).stderr
    assert theirs.read_text() == "another=a:b\n"


@as_root
@pytest.mark.parametrize("store", ["single-file", "database"])
def test_the_entries_of_mesas_files_are_their_owners(tmp_path: Path, store: str) -> None:
    layer = layer_of(tmp_path / "home", store)
    root = fill(tmp_path / "home" / ".cache", store, contents())
    for path in root.rglob("*"):
        if path.is_file():
            os.chown(path, 65534, 65534)
    before = snapshot(root)
    layer = MesaShaderCache(replace(layer.environment, superuser=True))
    outcome = layer.clear(layer.plan_clear())
    assert outcome.removed == 0
    assert {note.because for note in outcome.failed} == {"belongs to nobody: sudo -u nobody cachectl …"}
    artifact = Artifact("mesa", key("n"), "mesa-entry/1", contents()[key("a")])
    if store == "database":
        with pytest.raises(Refused, match="belongs to nobody"):
            layer.put(key("n"), artifact)
    assert snapshot(root) == before


@pytest.mark.parametrize("way", ["root", "above", "link"])
def test_a_cache_that_others_can_write_is_read_and_changed_only_if_shared(
    new_home: Callable[[Path], Home], compute_cache: Callable[[Path], None], open_folder: Path, way: str
) -> None:
    """Whoever can write to a folder on the way decides which folder is changed."""
    home = new_home(open_folder / "home")
    cache = home.path / ".nv" / "ComputeCache"
    compute_cache(cache)
    home.cachectl("get", "cuda", KEY, "-o", "entry")
    home.cachectl("purge", "cuda", "--key", KEY)
    if way == "link":
        cache.rename(home.path / "elsewhere")
        cache.symlink_to(home.path / "elsewhere")
        cache = home.path / "elsewhere"
    (cache.parent if way == "above" else cache).chmod(0o777)
    for verb in (("purge", "cuda"), ("prune", "--max-size", "0B"), ("put", "cuda", KEY, "entry")):
        done = home.cachectl(*verb, check=False)
        assert done.returncode == 1
        assert "other users can write to" in done.stderr
    assert len(home.json("ls", "cuda")["entries"]) == 39
    if os.geteuid() == 0:
        for verb in (("purge", "cuda"), ("put", "cuda", KEY, "entry")):
            assert home.cachectl(*verb, "--shared", check=False).returncode == 1
        stack = Stack(replace(home.environment(), superuser=False), shared=True)
        assert stack.purge(layers=["cuda"]).total.removed == 39
    else:
        assert "--shared" in done.stderr
        home.cachectl("put", "cuda", KEY, "entry", "--shared")
        assert home.json("purge", "cuda", "--shared")["total"]["removed"] == 40


@pytest.mark.parametrize("layer", ["pytools", "miopen"])
def test_rows_that_others_can_write_go_only_if_they_are_trusted(
    new_home: Callable[[Path], Home], open_folder: Path, layer: str, fill_sumpy: Callable[[Environment], None]
) -> None:
    home = new_home(open_folder / "home")
    environment = replace(home.environment(), superuser=False)
    if layer == "pytools":
        fill_sumpy(environment)
        folder = home.path / ".cache" / "pytools"
    else:
        path = Path(__file__).parents[1] / "faults"
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(path))
            import_module("worlds").module("support/products.py").fill_kernels(home.path)
        folder = home.path / ".cache" / "miopen"
    folder.chmod(0o777)
    refused = Stack(environment).purge(layers=[layer])
    assert refused.total.removed == 0
    assert "other users can write to" in refused.layers[0].failed[0].because
    assert Stack(environment, shared=True).purge(layers=[layer]).total.removed > 0


@as_root
def test_damage_in_an_entry_of_another_user_stays(cuda: Home) -> None:
    cache = cuda.path / ".nv" / "ComputeCache"
    mine, theirs, *_ = (cache / entry["key"] for entry in cuda.json("ls", "cuda")["entries"])
    for path in (mine, theirs):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    os.chown(theirs, 65534, 65534)
    total = cuda.json("purge", "cuda", "--damaged")["total"]
    assert (total["removed"], total["skipped"], total["failed"]) == (1, 1, 0)
    assert theirs.exists()
    assert not mine.exists()
