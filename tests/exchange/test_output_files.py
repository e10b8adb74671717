"""Files that commands write: nothing replaced that cachectl did not write, standard streams."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from homes import CACHECTL, Home

from cachectl.exchange.bundle import is_begun_by

pytestmark = pytest.mark.real
THESIS = "\\documentclass{book}\n" * 400


def key_of(home: Home) -> str:
    """Return the key of one program of PoCL."""
    return home.cachectl("ls pocl -q --limit 1").stdout.strip()


@pytest.fixture
def thesis(warm: Home) -> Path:
    file = warm.path / "thesis.tex"
    file.write_text(THESIS)
    return file


def cachectl(home: Home, line: str, data: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run the command with bytes on its standard streams."""
    command = [*CACHECTL, *line.split()]
    return subprocess.run(command, env=home.variables, cwd=home.path, input=data, capture_output=True, check=False)


@pytest.mark.parametrize(
    "line",
    [
        *("push thesis.tex pocl", "get pocl KEY -o thesis.tex"),
        *("trace --json thesis.tex -- true", "bench -n 1 --json thesis.tex -- true", "report --html thesis.tex"),
    ],
)
def test_files_that_cachectl_did_not_write_stay(warm: Home, thesis: Path, line: str) -> None:
    line = line.replace("KEY", key_of(warm))
    assert warm.refused(line, says="name another file, or replace it with --force\n").count("\n") == 1
    assert thesis.read_text() == THESIS
    warm.cachectl(line.replace(" thesis.tex", " thesis.tex --force"))
    assert thesis.read_bytes() != THESIS.encode()
    # What it wrote itself, it replaces.
    warm.cachectl(line)


def test_new_folders_and_empty_files_are_written_and_another_kind_of_file_stays(warm: Home) -> None:
    warm.cachectl("push ./pocl pocl")
    assert (warm.path / "pocl/index").is_dir()
    (warm.path / "fresh").touch()
    warm.cachectl("push fresh pocl")
    before = (warm.path / "fresh").read_bytes()
    assert is_begun_by(before)
    warm.refused(f"get pocl {key_of(warm)} -o fresh", says="is not an artifact")
    assert (warm.path / "fresh").read_bytes() == before


def test_a_file_that_comes_meanwhile_stays(warm: Home) -> None:
    program = f"import pathlib; pathlib.Path('mine.json').write_text({THESIS!r})"
    done = warm.cachectl("trace --json mine.json --", sys.executable, "-c", program, check=False)
    assert (done.returncode, (warm.path / "mine.json").read_text()) == (1, THESIS)


def test_a_file_that_cannot_be_read_stays(warm: Home, thesis: Path, held_to_modes: tuple[str, ...]) -> None:
    thesis.chmod(0)
    done = warm.run(*held_to_modes, *CACHECTL, "push", "thesis.tex", "pocl", check=False)
    assert (done.returncode, "Permission denied" in done.stderr, thesis.read_text()) == (1, True, THESIS)


@pytest.mark.thorough
def test_bundles_and_artifacts_go_through_the_standard_streams(warm: Home, home: Home) -> None:
    packed = cachectl(warm, "push - pocl")
    assert packed.returncode == 0
    assert f"digest {hashlib.sha256(packed.stdout).hexdigest()}".encode() in packed.stderr
    assert is_begun_by(packed.stdout)
    placed = cachectl(home, "pull - --trust --json", packed.stdout)
    assert json.loads(placed.stdout)["total"]["failed"] == 0
    assert home.json("report pocl")["total"]["entries"] == 11
    assert not (warm.path / "-").exists()
    assert cachectl(home, "pull - --trust", packed.stdout[:-1]).returncode == 1
    key = key_of(warm)
    data = cachectl(warm, f"get pocl {key} -o -").stdout
    assert data == cachectl(warm, f"get pocl {key}").stdout
    warm.cachectl("purge pocl")
    assert cachectl(warm, f"put pocl {key} -", data).returncode == 0
    assert warm.cachectl("ls pocl -q").stdout.strip() == key


def test_nothing_binary_meets_a_terminal(warm: Home) -> None:
    for line in ("push - pocl", f"get pocl {key_of(warm)} -o -", "pull - --trust"):
        done = warm.terminal(*CACHECTL, *line.split(), check=False)
        assert (done.returncode, "binary" in done.stdout, "PK" in done.stdout) == (2, True, False)
