"""Scratch folders are where nobody else can write, whatever another user has put there before."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from homes import Home
from tiers import AS_NOBODY, NOBODY, as_root, thorough

from cachectl.exchange.node_root import NodeRoot
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.disk.temporaries import private_folder, temporary_folder


@pytest.fixture
def shared(open_folder: Path) -> Path:
    """Return a folder that everybody can write to, like /tmp."""
    folder = open_folder.resolve() / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def own(folder: Path) -> Path:
    return folder / f"cachectl-{os.geteuid()}"


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.lstat().st_mode)


def test_a_private_folder_is_used_itself_and_created_if_missing(tmp_path: Path, shared: Path) -> None:
    assert private_folder(tmp_path / "a/b", make=True) == tmp_path / "a/b"
    assert mode(tmp_path / "a/b") == 0o700
    assert private_folder(shared / "job", make=True) == shared / "job"
    with pytest.raises(CachectlError, match="No such file"):
        private_folder(tmp_path / "missing")
    # Others can read this one but not write to it: a private folder is created in it.
    (tmp_path / "open").mkdir(mode=0o755)
    assert private_folder(tmp_path / "open") == own(tmp_path / "open")
    # In a shared folder it is created once.
    assert private_folder(shared) == private_folder(shared) == own(shared)
    assert mode(own(shared)) == 0o700


@pytest.mark.parametrize("planted", ["link", "file", "wide", pytest.param("theirs", marks=as_root)])
def test_a_planted_folder_is_refused_and_the_home_takes_its_place(home: Home, shared: Path, planted: str) -> None:
    place = own(shared)
    if planted == "link":
        (shared / "theirs").mkdir(mode=0o700)
        place.symlink_to(shared / "theirs")
    elif planted == "file":
        place.touch(mode=0o700)
    else:
        place.mkdir()
        place.chmod(0o750 if planted == "wide" else 0o700)
    if planted == "theirs":
        os.chown(place, NOBODY, NOBODY)
    with pytest.raises(CachectlError, match=f"^{place}: "):
        private_folder(shared)
    done = home.cachectl("run --isolated -- sh -c", 'echo "$XDG_CACHE_HOME"', TMPDIR=str(shared))
    scratch = home.path / ".local/state/cachectl/scratch"
    assert done.stdout.startswith(str(scratch))
    assert (len(done.stderr.splitlines()), str(place) in done.stderr) == (1, True)
    assert os.listdir(scratch) == []


def test_without_any_place_one_line_says_so(home: Home, shared: Path) -> None:
    shared.chmod(0o777)
    with pytest.raises(CachectlError, match="other users can write to"):
        private_folder(shared)
    environment = home.environment(XDG_STATE_HOME=str(shared))._replace(temporary=shared)
    with pytest.raises(CachectlError, match="no place for temporary folders"), temporary_folder(environment):
        pass
    done = home.cachectl("run --isolated -- true", check=False, TMPDIR=str(shared), XDG_STATE_HOME=str(shared))
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


@as_root
@pytest.mark.parametrize("scratch", ["job", "job/deeper", "new"])
def test_a_node_stages_only_in_a_folder_of_its_own(home: Home, shared: Path, scratch: str) -> None:
    """A missing one is created for this user only; one that another user created is not used."""
    (shared / "job").mkdir(mode=0o700)
    os.chown(shared / "job", NOBODY, NOBODY)
    root = NodeRoot(home.environment()._replace(temporary=shared / scratch))
    if scratch == "new":
        assert root.root is not None
        assert (root.root.parent, mode(shared / "new")) == (shared / "new", 0o700)
        root.remove()
        assert os.listdir(shared / "new") == []
        return
    assert (root.root, root.variables, os.listdir(shared / "job")) == (None, {}, [])
    assert ["belongs to nobody" in note for note in root.notes] == [True]


@as_root
@pytest.mark.parametrize(
    ("verb", "variable"),
    thorough(("trace", "PYTHONPATH"), ("run --isolated", "XDG_CACHE_HOME"), ("run --no-cache", "POCL_CACHE_DIR")),
)
def test_nobody_else_can_recreate_a_used_folder(home: Home, shared: Path, verb: str, variable: str) -> None:
    """A program that another user puts there would run as this user."""
    script = f'(sleep 5; "{sys.executable}" -c "import planted") >"$HOME/said" 2>&1 & echo "${variable}"'
    done = home.cachectl(f"{verb} -- sh -c", script, TMPDIR=str(shared))
    folder = Path(next(line for line in done.stdout.splitlines() if line.startswith(str(shared))).partition(":")[0])
    assert not folder.exists()
    attack = f'mkdir -p "{folder}" && echo "print(\'planted\')" >"{folder}/sitecustomize.py"'
    assert subprocess.run([*AS_NOBODY, "sh", "-c", attack], capture_output=True, check=False).returncode != 0
    # The shell in the background writes the file later.
    said, deadline = home.path / "said", time.monotonic() + 60
    while not (said.exists() and "planted'" in said.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "planted'" in said.read_text()
    assert not folder.exists()
