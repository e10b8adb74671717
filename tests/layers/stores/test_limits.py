"""Sizes chosen by others: what is too large is refused in one line, and takes neither memory nor disk space."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from homes import Home
from support.layers import write
from tiers import thorough, thorough_only
from worlds import synthetic_world

from benchmarks.commands import at_home
from cachectl.exchange.place import FolderPlace
from cachectl.exchange.wire import PACKS, Pack, StoredEntry, StoreKey, file_of, part_of
from cachectl.layers.core.entry import Entry
from cachectl.layers.formats.details import Details

pytest.importorskip("resource")

MIB = 1 << 20
#: The memory of a verb without large inputs: Python, its imports, and zstd's buffers.
PLAIN = 160 * MIB
#: The size of one large entry: several times what else is in memory.
LARGE = 128 * MIB
_MEASURED = """
import resource, sys
status = 70
try:
    from cachectl.cli.main import main; status = main(sys.argv[1:])
finally:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    sys.stderr.write(f"peak {peak}\\n")
sys.exit(status)
"""


class Done(NamedTuple):
    status: int
    stdout: str
    stderr: str
    #: The most memory that it had, in bytes.
    peak: int


def cachectl(home: Path, *arguments: str, source: Any = subprocess.DEVNULL, **variables: str) -> Done:  # noqa: ANN401 - as of subprocess
    """Run a command in a child. The shell between keeps the size of this process out of the measurement."""
    command = ["/bin/sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", _MEASURED, *arguments]
    given = {**at_home(home), "PATH": os.environ["PATH"], "RUSTICL_ENABLE": "llvmpipe", **variables}
    done = subprocess.run(command, stdin=source, env=given, capture_output=True, text=True, check=False, timeout=600)
    stderr, _, peak = done.stderr.rstrip("\n").rpartition("peak ")
    assert peak, done
    return Done(done.returncode, done.stdout, stderr, int(peak))


@thorough_only
def test_an_untrusted_part_takes_little_memory(home: Home, tmp_path: Path) -> None:
    """It is unpacked up to a limit, and not parsed."""
    digests = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(25_000)]
    details = Details(detail={f"d{place}": "" for place in range(60)})
    made = (Entry("pocl", digest, Path(), 0, 0, details=details) for digest in digests)
    entries = [StoredEntry(entry, "f", entry.key, Pack(PACKS + "0" * 64, 1, 1)) for entry in made]
    text = part_of(1, StoreKey("pocl"), entries)
    assert 16 * MIB < len(text) < 32 * MIB
    (tmp_path / "allowed").touch()
    for name, content, trust in (
        ("not signed", text, ("--allowed-signers", str(tmp_path / "allowed"))),
        ("bomb", b"[[]" + b",[]" * (22 << 20) + b"]", ("--trust",)),
    ):
        store, key, file = FolderPlace(tmp_path / name), StoreKey("pocl"), file_of(content)
        store.write(f"index/key-{key.name}", key.to_bytes())
        store.write(f"index/1-{key.name}-{hashlib.sha256(file).hexdigest()}", file)
        done = cachectl(home.path, "pull", str(tmp_path / name), *trust)
        assert (done.status, name in done.stderr, len(done.stderr.splitlines())) == (1, True, 1)
        assert done.peak < PLAIN


@thorough_only
def test_a_push_holds_a_large_entry_once_more_than_its_file(home: Home, tmp_path: Path) -> None:
    folder = home.path / ".cache/pocl/kcache/AB/ABCDEFGHIJKLMNOPABCDEFGHIJKLMNOPABCDE"
    os.truncate(write(folder / "program.spv", ""), LARGE)
    done = cachectl(home.path, "push", str(tmp_path / "bundle.zip"), "pocl")
    assert (done.status, done.peak < 2 * LARGE + PLAIN) == (0, True)


@thorough_only
def test_a_source_without_end_costs_nothing(home: Home, mount: Callable[..., Path], tmp_path: Path) -> None:
    with open("/dev/zero", "rb") as endless:
        done = cachectl(home.path, "pull", "-", "--trust", source=endless)
    assert (done.status, "is not a bundle" in done.stderr, done.peak < PLAIN) == (1, True, True)
    small = mount("-t", "tmpfs", "-o", "size=40m", "tmpfs", on=tmp_path / "small")
    begun = "PK\\003\\004" + "\\000" * 26 + f"packs/{'0' * 64}"
    with subprocess.Popen(["sh", "-c", f'printf "{begun}"; cat /dev/zero'], stdout=subprocess.PIPE) as writer:
        done = cachectl(home.path, "pull", "-", "--trust", source=writer.stdout, TMPDIR=str(small))
        writer.kill()
    assert (done.status, f"{small} has no room for -" in done.stderr) == (1, True)
    # The copy has no name, and ends with the process.
    assert os.statvfs(small).f_bavail * os.statvfs(small).f_frsize == 40 * MIB


@pytest.mark.parametrize("part", thorough(0, 1, 2))
def test_files_of_holes_end_no_verb(tmp_path: Path, part: int) -> None:
    home = synthetic_world(tmp_path).path
    places = (home / ".cache", home / ".config", home / ".nv")
    found = sorted(path for place in places for path in place.rglob("*") if path.is_file())
    for path in found[part::3]:
        os.truncate(path, 1 << 41)
    reported = json.loads(cachectl(home, "report", "--json").stdout)["layers"]
    problems = {one["path"] for layer in reported for root in layer["roots"] for one in root["problems"]}
    assert problems >= {str(path) for path in found[part::3] if path.match("miopen/*.txt")}
    bundle = str(tmp_path / "bundle.zip")
    for line in ("ls", "verify", "doctor", "ls --kernel *", f"push {bundle}", "purge --all", "purge miopen-tuning"):
        done = cachectl(home, *line.split(), "--json")
        assert done.status in (0, 1), (line, done)
        assert "Traceback" not in done.stderr
        assert done.peak < 2 * PLAIN, (line, done)
