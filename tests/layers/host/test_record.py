"""The record of what was seen on this host: the only witness that something is gone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.layers import write
from tiers import NOBODY, as_root

from cachectl.layers.base.environment import Environment, user_state_folder
from cachectl.layers.host import record
from cachectl.layers.host.record import FILE, Record, Staleness

NOW = 2_000_000_000.0


def environment_of(home: Path) -> Environment:
    return Environment({"HOME": str(home)}, home, searches_pythons=True, clock=lambda: NOW)


def seen_again(home: Path) -> Record:
    """Return the record that the next command reads."""
    return Record(environment_of(home))


def noted(home: Path, path: Path, version: str) -> Record:
    seen = seen_again(home)
    seen.note("PoCL", write(path, version.encode()), version)
    seen.save()
    return seen


def judged(seen: Record, version: str, used: float | None = 1e9) -> Staleness:
    return seen.judge("PoCL", used, f"compiled by {version}", version.__eq__, version.__eq__)


def test_a_version_that_was_replaced_or_removed_is_stale(tmp_path: Path) -> None:
    library = tmp_path / "lib/libpocl.so"
    assert judged(noted(tmp_path, library, "3.0"), "3.0") == (None, None), "it is there"
    seen = noted(tmp_path, library, "3.1")
    stale, because = judged(seen, "3.0")
    assert stale is True
    assert because is not None
    assert because.startswith(f"compiled by 3.0; {library} had PoCL 3.0 until ")
    library.unlink()
    assert judged(seen_again(tmp_path), "3.1")[0] is True
    noted(tmp_path, library, "3.0")
    assert judged(seen_again(tmp_path), "3.0") == (None, None), "it came back"


def test_a_changed_link_makes_nothing_stale_until_its_old_target_is_gone(tmp_path: Path) -> None:
    old, new, current = tmp_path / "v30/libpocl.so", tmp_path / "v31/libpocl.so", tmp_path / "current"
    for target, version in ((old, "3.0"), (new, "3.1 of 2023")):
        write(target, version.encode())
        current.unlink(missing_ok=True)
        current.symlink_to(target)
        seen = seen_again(tmp_path)
        seen.note("PoCL", current, version)
        seen.save()
    assert judged(seen_again(tmp_path), "3.0") == (None, None)
    old.unlink()
    assert judged(seen_again(tmp_path), "3.0")[0] is True


def record_of(home: Path) -> Path:
    return user_state_folder(environment_of(home)) / FILE


def alter(home: Path, field: str, value: object) -> None:
    """Change a field of the first sighting in a record."""
    file = record_of(home)
    document = json.loads(file.read_text())
    document["sightings"][0][field] = value
    file.write_text(json.dumps(document))


def test_a_time_in_the_future_is_no_witness(tmp_path: Path) -> None:
    noted(tmp_path, tmp_path / "libpocl.so", "3.0")
    alter(tmp_path, "gone", NOW + 1)
    assert judged(seen_again(tmp_path), "3.0") == (None, None)


def test_another_path_with_the_version_or_a_use_since_leaves_it_unknown(tmp_path: Path) -> None:
    first, second = tmp_path / "one/libpocl.so", tmp_path / "two/libpocl.so"
    for path in (first, second):
        noted(tmp_path, path, "3.0")
    first.unlink()
    assert judged(seen_again(tmp_path), "3.0") == (None, None)
    second.unlink()
    seen = seen_again(tmp_path)
    assert judged(seen, "3.0")[0] is True
    for used, words in ((NOW, "it was used since"), (None, "a hit since would have left no trace")):
        stale, because = judged(seen, "3.0", used)
        assert (stale, str(because).endswith(f", and {words}")) == (None, True)
    assert judged(seen, "2.9") == (None, "unknown: compiled by 2.9, which was never seen on this host")


def test_another_host_or_container_over_the_home_keeps_its_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same path can have another version there, such as /opt/rocm in two images."""
    library = tmp_path / "lib/libpocl.so"
    with monkeypatch.context() as patched:
        patched.setattr(record, "_system", lambda _: "other 1 2 3")
        noted(tmp_path, library, "3.0")
    seen = noted(tmp_path, library, "3.1")
    assert judged(seen, "3.0") == (None, f"unknown: compiled by 3.0, which other has at {library}")
    library.unlink()
    assert judged(seen_again(tmp_path), "3.0")[0] is None


def test_a_container_is_not_its_host(tmp_path: Path) -> None:
    """Apptainer keeps the host's name; only the root folder differs."""
    systems = {
        kind: Record(environment_of(tmp_path)._replace(mounts=write(tmp_path / kind, f"1 0 0:1 / / rw - {kind} x\n")))
        for kind in ("ext4", "overlay")
    }
    assert systems["ext4"].system != systems["overlay"].system


def test_a_path_on_an_unmounted_file_system_is_not_gone(tmp_path: Path) -> None:
    library = tmp_path / "lib/libpocl.so"
    noted(tmp_path, library, "3.0")
    alter(tmp_path, "places", ["nfs:server:/export"] * 2)
    library.unlink()
    assert judged(seen_again(tmp_path), "3.0") == (None, None)


@as_root
def test_a_folder_that_is_mounted_over_another_is_not_the_one_that_was_seen(tmp_path: Path) -> None:
    """Only one program may see that mount, in its own mount namespace."""
    library = tmp_path / "lib/libpocl.so"
    noted(tmp_path, library, "3.0")
    (tmp_path / "other").mkdir()
    code = (
        "import subprocess, sys; from pathlib import Path\n"
        "from cachectl.layers.base.environment import Environment; from cachectl.layers.host.record import Record\n"
        "home = Path(sys.argv[1])\n"
        "subprocess.run(['mount', '--bind', home / 'other', home / 'lib'], check=True)\n"
        "seen = Record(Environment({'HOME': sys.argv[1]}, home, searches_pythons=True))\n"
        "print([(sighting.version, sighting.gone) for sighting in seen.here('PoCL')])"
    )
    command = ["unshare", "--mount", sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if "permitted" in done.stderr or "denied" in done.stderr:
        pytest.skip("nothing can be mounted here")
    assert (done.stdout, done.stderr) == ("[('3.0', None)]\n", "")


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "[]", "{", '{"sightings": [{}]}', '{"sightings": [[1]]}', "[" * 100_000),
        *(("gone", "yesterday"), ("path", 1), ("path", "/a\0"), ("target", "a"), ("places", ["a"]), ("packages", {})),
        pytest.param(NOBODY, marks=as_root),
    ],
)
def test_a_record_that_is_damaged_or_of_another_user_has_no_witness(
    tmp_path: Path, wrong: str | tuple[str, object] | int
) -> None:
    noted(tmp_path, tmp_path / "libpocl.so", "3.0")
    if isinstance(wrong, str):
        record_of(tmp_path).write_text(wrong)
    elif isinstance(wrong, int):
        os.chown(record_of(tmp_path), wrong, wrong)
    else:
        alter(tmp_path, *wrong)
    assert seen_again(tmp_path).sightings == {}


def test_a_record_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / ".local/state", b"no folder")
    seen = noted(tmp_path, tmp_path / "libpocl.so", "3.0")
    assert [sighting.version for sighting in seen.here("PoCL")] == ["3.0"]


def test_a_library_is_not_read_again_unless_it_changed(tmp_path: Path) -> None:
    library = tmp_path / "libpocl.so"
    noted(tmp_path, library, "3.0")
    assert seen_again(tmp_path).version_at("PoCL", library) == "3.0"
    os.utime(library, (1, 1))
    assert seen_again(tmp_path).version_at("PoCL", library) is None
