"""Two interpreters with different versions of Python and loopy fill one home."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from homes import PROGRAMS
from tiers import absent

if TYPE_CHECKING:
    from homes import Home

pytestmark = [pytest.mark.real, pytest.mark.environment]

#: Not the newest one, and what it needs.
LOOPY = ("loopy==2025.1", "islpy<2026", "setuptools", "numpy")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a virtual environment with another Python and another loopy."""
    names = [shutil.which(f"python3.{minor}") for minor in range(10, 15)]
    installed = sorted(Path(sys.base_prefix).parent.glob("3.1*/bin/python"))
    ask = "import sys; print(sys.version_info >= (3, 10), *sys.version_info)"
    for python in ("/usr/bin/python3", *map(str, installed), *filter(None, names)):
        answer = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False).stdout.split()
        if answer[:1] == ["True"] and answer[1:4] != [*map(str, sys.version_info[:3])]:
            break
    else:
        absent("needs a second Python, of another version and not before 3.10")
    prefix = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([python, "-m", "venv", "--without-pip", prefix], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(prefix / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, *LOOPY], check=True)
    return prefix / "bin" / "python"


def test_only_rows_of_a_removed_python_are_stale(home: Home, other: Path) -> None:
    prefix = home.path / "other"
    shutil.copytree(other.parent.parent, prefix, symlinks=True)
    moved = prefix / "bin" / "python"
    for python in (Path(sys.executable), moved):
        home.run(str(python), str(PROGRAMS / "generating.py"))
    searched = os.pathsep.join(str(python.parent) for python in (Path(sys.executable), moved))

    def rows(path: str = searched) -> dict[str, set[bool | None]]:
        found: dict[str, set[bool | None]] = {}
        for entry in home.json("ls", "loopy", PATH=path)["entries"]:
            found.setdefault(entry["versions"]["python"].rpartition(".final")[0], set()).add(entry["stale"])
        return found

    own = ".".join(map(str, sys.version_info[:3]))
    known = rows()
    assert len(known) == 2
    assert set.union(*known.values()) == {False}
    # Both are remembered.
    assert rows("/nowhere") == known
    shutil.rmtree(prefix)
    gone = {version: {version != own} for version in known}
    assert rows() == gone
    home.cachectl("prune", "--stale", "loopy", PATH="/nowhere")
    assert rows() == {own: {False}}


def test_doctor_never_advises_to_remove_rows_of_a_neighbour(home: Home, other: Path) -> None:
    home.run(str(other), str(PROGRAMS / "generating.py"))
    done = home.cachectl("doctor", "--json", check=False, PATH="/nowhere")
    assert "stale" not in {finding["code"] for finding in json.loads(done.stdout)["findings"]}
