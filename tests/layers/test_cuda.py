"""The ComputeCache that a real driver wrote on an H200: read, damaged, carried, cleared."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from homes import Home, run_in
from support.layers import clear, fill_up, findings, got, keys_of, problems, root_of, usage_of, verified, write
from support.products import PRODUCTS

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import Damaged, LayerError, Unsettled
from cachectl.layers.core.conformance import snapshot
from cachectl.layers.core.entry import Artifact
from cachectl.layers.core.finding import Severity
from cachectl.layers.core.layer import Layer
from cachectl.layers.cuda import CudaComputeCache
from cachectl.layers.cuda import entries as form
from cachectl.layers.disk.locks import record_lock


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    return PRODUCTS["cuda"].filled(tmp_path)


def index(layer: Layer) -> form.SizeIndex:
    data = (root_of(layer) / "index").read_bytes()
    records, _ = form.split_index(data)
    assert form.write_index(records) == data
    return records


def test_every_entry_is_decoded(layer: Layer) -> None:
    entries = list(layer.entries())
    named = sorted((entry.details.detail["half"], entry.details.kernels) for entry in entries)
    assert named == sorted((half, (f"ka{n}",)) for half in ("back end", "front end") for n in range(20))
    assert {entry.details.device for entry in entries} == {"sm_90"}
    front = [entry.details for entry in entries if entry.details.detail["half"] == "front end"]
    assert {details.versions["driver"] for details in front} == {"580.159.04"}
    assert (verified(layer), problems(layer), usage_of(layer).files) == ([], [], 41)
    times = sorted(entry.modified or 0 for entry in entries)
    assert (usage_of(layer).oldest, usage_of(layer).newest) == (times[0], times[-1])


def test_an_index_is_made_in_the_opened_folder(layer: Layer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that takes the root's name while an entry is placed gets no index."""
    root = root_of(layer)
    entry = next(layer.entries())
    artifact = got(layer, entry.key)
    (root / entry.key).unlink()
    (root / "index").unlink()
    (tmp_path / "outside").mkdir()
    lock = record_lock

    def exchange_and_lock(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - as what it stands in for
        root.rename(tmp_path / "moved")
        root.symlink_to(tmp_path / "outside")
        return lock(*arguments, **options)

    monkeypatch.setattr("cachectl.layers.disk.locks.record_lock", exchange_and_lock)
    layer.put(entry.key, artifact)
    assert os.listdir(tmp_path / "outside") == []
    assert len(form.split_index((tmp_path / "moved/index").read_bytes())[0]) == 40


def made_up_entry(number: int) -> tuple[str, bytes]:
    """Make a valid entry: lengths, name and checksum are right."""
    key, payload = b"key %d" % number, b"payload"
    data = form.HEADER.pack(form.VERSION, len(key), len(payload), form.fnv1a(payload)) + key + payload
    return form.key_from(form.fnv1a(key)), data


def test_an_index_that_has_no_room_to_grow_stays_whole(disk: Path) -> None:
    """With 255 entries the index fills its page, and a full disk has no other page for one more."""
    layer = CudaComputeCache(Environment({"CUDA_CACHE_PATH": str(disk / "cache")}, disk))
    for key, data in map(made_up_entry, range(255)):
        write(root_of(layer) / key, data)
    key, data = made_up_entry(255)
    artifact = Artifact("cuda", key, "cuda-entry/65", data)
    layer.put(key, artifact)
    clear(layer, key=key)
    before = (root_of(layer) / "index").read_bytes()
    assert len(before) == os.sysconf("SC_PAGE_SIZE")
    filler = fill_up(disk)
    os.truncate(filler, filler.stat().st_size - os.sysconf("SC_PAGE_SIZE"))
    with pytest.raises(Unsettled, match=r"index: No space left.*; free some disk space, then put or purge"):
        layer.put(key, artifact)
    assert (root_of(layer) / key).read_bytes() == data
    assert (root_of(layer) / "index").read_bytes() == before
    assert [finding.code for finding in verified(layer)] == ["index"]
    filler.unlink()
    layer.put(key, artifact)
    assert clear(layer, key=made_up_entry(0)[0]).removed == 1
    assert verified(layer) == []


@pytest.mark.parametrize("kept", [None, b"", b"\0" * 200, b"\x41\0\0\0" + b"\xff" * 12, 300])
def test_purge_damaged_writes_a_bad_index_again(cuda: Home, kept: bytes | int | None) -> None:
    """A cut index keeps its records in their order, by which the driver evicts.

    Without an index, or with an empty one, a real driver drops every entry at its next store.
    """
    path = cuda.path / ".nv/ComputeCache/index"
    order = path.read_bytes()[16:]
    path.write_bytes(path.read_bytes()[:kept] if isinstance(kept, int) else kept or b"")
    if kept is None:
        path.unlink()
    (finding,) = cuda.json("verify cuda", check=False)["findings"]
    assert (finding["severity"], finding["fix"]) == ("recompiles once", "cachectl purge --damaged cuda")
    assert "drops every entry" in finding["message"]
    assert problems(cuda.stack["cuda"]) == (["index"] if kept else [])
    assert cuda.cachectl("purge --damaged cuda").returncode == 0
    assert cuda.cachectl("verify cuda").stdout == "no damage found\n"
    known = 16 * (284 // 16) if isinstance(kept, int) else 0
    assert (path.stat().st_size, path.read_bytes()[16 : 16 + known]) == (16 + len(order), order[:known])
    # So does any other purge.
    path.write_bytes(path.read_bytes()[:300])
    assert clear(cuda.stack["cuda"], kernel="ka3").removed == 2
    assert cuda.cachectl("verify cuda").stdout == "no damage found\n"


@pytest.mark.parametrize("behind", [b"strange", bytes(16), b"a later version's own bytes, 32.."])
def test_bytes_behind_the_counted_records_stay_behind_them(layer: Layer, behind: bytes) -> None:
    """Driver 580 then hits, and keeps all entries when it stores one."""
    path = root_of(layer) / "index"
    path.write_bytes(path.read_bytes() + behind)
    order = [number for number, _ in form.split_index(path.read_bytes())[0]]
    assert (verified(layer), problems(layer)) == ([], [])
    gone = {form.identifier_of(entry.key) for entry in layer.entries() if entry.details.kernels == ("ka3",)}
    assert clear(layer, kernel="ka3").removed == 2
    records, rest = form.split_index(path.read_bytes())
    assert ([number for number, _ in records], rest) == ([number for number in order if number not in gone], behind)


@pytest.mark.parametrize("total", [0, 1 << 40])
def test_a_wrong_total_is_named_and_the_order_of_the_records_stays(layer: Layer, total: int) -> None:
    path = root_of(layer) / "index"
    data, before = path.read_bytes(), index(layer)
    path.write_bytes(data[:8] + struct.pack("<Q", total) + data[16:])
    assert findings(layer) == [("index", Severity.WASTES)]
    key = form.key_from(before[-1][0])
    artifact = got(layer, key)
    assert clear(layer, key=key).removed == 1
    layer.put(key, artifact)
    assert (index(layer), verified(layer)) == (before, [])


def test_a_text_called_index_stays_when_the_entries_beside_it_go(layer: Layer) -> None:
    """A purge rewrites only CUDA's own index."""
    file = write(root_of(layer) / "index", "years of work, and no cache at all\n" * 3)
    before = file.read_bytes()
    assert (clear(layer).removed, file.read_bytes()) == (40, before)
    file.write_bytes(bytes(4) + before)
    assert layer.plan_clear(damaged=True).entries == ()


def test_another_version_is_unknown_and_stays(layer: Layer) -> None:
    zeros, *others = sorted(root_of(layer).glob("?/?/*"))
    artifact = got(layer, str(others[0].relative_to(root_of(layer))))
    whole, unknown = zeros.read_bytes(), struct.pack("<I", 0x42)
    zeros.write_bytes(bytes(len(whole)))
    others[0].write_bytes(unknown + others[0].read_bytes()[4:])
    assert [root_of(layer) / entry.key for entry in layer.plan_clear(damaged=True).entries] == [zeros]
    zeros.write_bytes(whole)
    for path in (zeros, *others, root_of(layer) / "index"):
        path.write_bytes(unknown + path.read_bytes()[4:])
    before, usage = snapshot(root_of(layer)), usage_of(layer)
    assert (usage.entries, usage.files, usage.unknown_files, usage.problems) == (0, 41, 41, ())
    assert {(one.code, one.thing) for one in verified(layer)} == {("unknown", None)}
    key = str(others[0].relative_to(root_of(layer)))
    with pytest.raises(Damaged, match="format version 0x42"):
        layer.get(key)
    with pytest.raises(LayerError, match="format version 0x42"):
        layer.put(key, artifact._replace(key=key), replace=True)
    assert (clear(layer).removed, len(clear(layer).skipped), layer.plan_clear(damaged=True).entries) == (0, 41, ())
    assert snapshot(root_of(layer)) == before


def test_an_index_keeps_its_word_on_unreadable_entries(layer: Layer, held_to_modes: tuple[str, ...]) -> None:
    keys = keys_of(layer)
    closed = root_of(layer) / keys[0].split("/")[0]
    hidden = [key for key in keys if key.startswith(f"{closed.name}/")]
    closed.chmod(0)
    done = run_in(layer.environment.home, "purge", "cuda", "--json", by=held_to_modes)
    closed.chmod(0o700)
    said = json.loads(done.stdout)["layers"][0]
    assert (done.returncode, said["removed"]) == (1, len(keys) - len(hidden))
    assert [note["key"] for note in said["failed"]] == [str(closed)]
    assert {key for key, _ in index(layer)} == set(map(form.identifier_of, hidden))


def test_an_index_is_recounted_also_after_a_put_that_fails(layer: Layer) -> None:
    entry, gone = list(layer.entries())[:2]
    artifact = got(layer, entry.key)
    for key in (gone.key, entry.key):
        (root_of(layer) / key).unlink()
    # A folder is in the way of the put.
    (root_of(layer) / entry.key).mkdir()
    with pytest.raises(LayerError):
        layer.put(entry.key, artifact)
    left = dict(index(layer))
    assert (form.identifier_of(gone.key) in left, len(left)) == (False, 38)


def test_an_index_whose_sizes_exceed_every_total_is_read_and_written() -> None:
    """With a flipped bit in two sizes their sum does not fit into the field."""
    records = ((1, 2**64 - 1), (2, 2**64 - 1))
    assert form.split_index(form.write_index(records))[0] == records
    assert form.split_index(form.write_index(((1, 5),))[:16] + b"\xff" * 16)[0] == ((2**64 - 1, 2**64 - 1),)
