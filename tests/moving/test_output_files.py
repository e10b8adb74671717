"""Files that commands write: no layer's name, nothing replaced that cachectl did not write, standard streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cachectl.moving.output_files import BUNDLE, json_kind

if TYPE_CHECKING:
    from homes import Home

THESIS = "\\documentclass{book}\n" * 400
COMMAND = ("--", sys.executable, "-c", "pass")


def key_of(home: Home) -> str:
    """Return the key of one program of PoCL."""
    return home.cachectl("ls", "pocl", "-q", "--limit", "1").stdout.strip()


def thesis(home: Home) -> Path:
    """Write a file that nobody wants to lose."""
    file = home.path / "thesis.tex"
    file.write_text(THESIS)
    return file


def cachectl(home: Home, *arguments: str, data: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run the command with bytes on its standard streams."""
    command = [sys.executable, "-m", "cachectl", *arguments]
    return subprocess.run(command, env=home.variables, cwd=home.path, input=data, capture_output=True, check=False)


@pytest.mark.real
@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "pocl"),
        ("export", "pocl", "loopy"),
        ("export", "pocl", "--force"),
        ("export", "--as-kdb", "miopen"),
        ("get", "pocl", "KEY", "-o", "loopy"),
        ("trace", "--json", "pocl", *COMMAND),
        ("bench", "--json", "pocl", *COMMAND),
        ("merge", ".", "pocl"),
    ],
)
def test_a_layers_name_is_no_file(warm: Home, arguments: tuple[str, ...]) -> None:
    wanted = [key_of(warm) if word == "KEY" else word for word in arguments]
    done = warm.cachectl(*wanted, check=False)
    assert done.returncode == 2
    assert "is a layer" in done.stderr
    assert not any((warm.path / name).exists() for name in ("pocl", "loopy", "miopen"))


@pytest.mark.real
def test_a_path_says_that_a_file_is_meant(warm: Home) -> None:
    warm.cachectl("export", "./pocl", "pocl")
    assert BUNDLE.is_begun_by((warm.path / "pocl").read_bytes())


@pytest.mark.real
@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "thesis.tex", "pocl"),
        ("get", "pocl", "KEY", "-o", "thesis.tex"),
        ("trace", "--json", "thesis.tex", *COMMAND),
        ("bench", "-n", "1", "--json", "thesis.tex", *COMMAND),
    ],
)
def test_files_that_cachectl_did_not_write_stay(warm: Home, arguments: tuple[str, ...]) -> None:
    file = thesis(warm)
    wanted = [key_of(warm) if word == "KEY" else word for word in arguments]
    done = warm.cachectl(*wanted, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("name another file, or replace it with --force")
    assert len(done.stderr.splitlines()) == 1
    assert file.read_text() == THESIS
    at = wanted.index("--") if "--" in wanted else len(wanted)
    warm.cachectl(*wanted[:at], "--force", *wanted[at:])
    assert file.read_bytes() != THESIS.encode()
    # What it wrote itself, it replaces.
    warm.cachectl(*wanted)


@pytest.mark.real
def test_another_kind_of_file_is_not_replaced(warm: Home) -> None:
    warm.cachectl("export", "bundle", "pocl")
    before = (warm.path / "bundle").read_bytes()
    done = warm.cachectl("get", "pocl", key_of(warm), "-o", "bundle", check=False)
    assert (done.returncode, (warm.path / "bundle").read_bytes()) == (1, before)
    assert "is not an artifact" in done.stderr


@pytest.mark.real
def test_an_empty_file_may_be_replaced(warm: Home) -> None:
    (warm.path / "fresh").touch()
    warm.cachectl("export", "fresh", "pocl")
    assert BUNDLE.is_begun_by((warm.path / "fresh").read_bytes())


@pytest.mark.real
def test_a_file_that_comes_meanwhile_stays(warm: Home) -> None:
    program = f"import pathlib; pathlib.Path('mine.json').write_text({THESIS!r})"
    done = warm.cachectl("trace", "--json", "mine.json", "--", sys.executable, "-c", program, check=False)
    assert done.returncode == 1
    assert (warm.path / "mine.json").read_text() == THESIS


@pytest.mark.real
def test_a_file_that_cannot_be_read_stays(warm: Home, held_to_modes: tuple[str, ...]) -> None:
    file = thesis(warm)
    file.chmod(0)
    command = (*held_to_modes, sys.executable, "-m", "cachectl", "export", "thesis.tex", "pocl")
    done = warm.run(*command, check=False)
    assert done.returncode == 1
    assert "cannot be read" in done.stderr
    assert file.read_text() == THESIS


def test_a_kind_of_json_knows_its_own() -> None:
    trace = json_kind("cachectl/trace")
    assert trace.is_begun_by(json.dumps({"schema": "cachectl/trace/1"}, indent=2).encode())
    assert not trace.is_begun_by(json.dumps({"schema": "cachectl/bench/1"}).encode())
    assert not trace.is_begun_by(b"{}")


@pytest.mark.real
def test_bundles_go_through_the_standard_streams(warm: Home, home: Home) -> None:
    packed = cachectl(warm, "export", "-", "pocl")
    assert packed.returncode == 0
    assert b"SHA-256" in packed.stderr
    assert BUNDLE.is_begun_by(packed.stdout)
    placed = cachectl(home, "import", "-", "--trust", "--json", data=packed.stdout)
    assert json.loads(placed.stdout)["total"]["failed"] == 0
    assert home.json("report", "pocl")["total"]["entries"] == 11
    assert not (warm.path / "-").exists()
    assert cachectl(home, "import", "-", "--allowed-signers", "x", data=packed.stdout).returncode == 2
    assert cachectl(warm, "export", "-", "pocl", "--json").returncode == 2


@pytest.mark.real
def test_an_artifact_goes_through_the_standard_streams(warm: Home) -> None:
    key = key_of(warm)
    data = cachectl(warm, "get", "pocl", key, "-o", "-").stdout
    assert data == cachectl(warm, "get", "pocl", key).stdout
    warm.cachectl("purge", "pocl")
    assert cachectl(warm, "put", "pocl", key, "-", data=data).returncode == 0
    assert warm.cachectl("ls", "pocl", "-q").stdout.strip() == key


@pytest.mark.real
@pytest.mark.parametrize(
    "arguments", [("export", "-", "pocl"), ("get", "pocl", "KEY", "-o", "-"), ("import", "-", "--trust")]
)
def test_nothing_binary_meets_a_terminal(warm: Home, arguments: tuple[str, ...]) -> None:
    words = (key_of(warm) if word == "KEY" else word for word in arguments)
    done = warm.terminal(sys.executable, "-m", "cachectl", *words, check=False)
    assert done.returncode == 2
    assert "binary" in done.stdout
    assert "\x28\xb5" not in done.stdout


@pytest.mark.real
@pytest.mark.parametrize("more", [("--kernel", "no such kernel"), ("miopen",)])
def test_an_empty_export_writes_nothing(warm: Home, more: tuple[str, ...]) -> None:
    done = warm.cachectl("export", "bundle", *more, check=False)
    assert done.returncode == 1
    assert "bundle was not written" in done.stderr
    assert not (warm.path / "bundle").exists()
    document = warm.json("export", "bundle", *more, check=False)
    assert (document["file"], document["sha256"], document["bytes"]) == (None, None, 0)


@pytest.mark.real
def test_another_signature_file_stays(warm: Home) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "key"], cwd=warm.path, check=True)
    (warm.path / "bundle.sig").write_text(THESIS)
    done = warm.cachectl("export", "bundle", "pocl", "--sign", "key", check=False)
    assert done.returncode == 1
    assert not (warm.path / "bundle").exists()
    (warm.path / "bundle.sig").unlink()
    for _ in range(2):
        warm.cachectl("export", "bundle", "pocl", "--sign", "key")
