"""Installed distributions by their names: the same answers as ``importlib.metadata``."""

import os
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from support.layers import write

from cachectl.layers.disk import distributions
from cachectl.layers.disk.distributions import version_in


def asked(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def test_everything_that_is_installed_here_is_known() -> None:
    """By any installer."""
    names = {found.metadata["Name"] for found in metadata.distributions() if found.metadata["Name"]}
    assert {name: version_in(sys.path, name) for name in names} == {name: asked(name) for name in names}
    normal = {distributions.normal(name): asked(name) for name in names}
    assert distributions.versions_in(sys.path).items() >= normal.items()
    assert version_in(sys.path, "no-such-distribution") is None


def test_a_folder_that_changes_within_a_tick_of_the_clock_is_listed_again(tmp_path: Path) -> None:
    now = time.time_ns()
    for names in ((), ("mine",), ("mine", "other")):
        for name in names:
            (tmp_path / name).touch()
        os.utime(tmp_path, ns=(now, now))
        assert distributions.names_in(str(tmp_path)) == names
    assert distributions.names_in(str(tmp_path), "ot") == ("other",)


def test_a_relative_folder_is_that_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        write(tmp_path / name / "same" / name, "")
        os.utime(tmp_path / name / "same", (1, 1))
        monkeypatch.chdir(tmp_path / name)
        assert distributions.names_in("same") == (name,)


def test_a_version_is_read_from_metadata_of_any_bytes(tmp_path: Path) -> None:
    write(tmp_path / "mine.dist-info/METADATA", b"Name: mine\nAuthor: Andr\xe9\nVersion: 1.0\n\nVersion: 2.0\n")
    assert version_in([str(tmp_path)], "mine") == "1.0"


#: The last two are two versions of one name, and an empty folder.
@pytest.mark.parametrize(
    "names",
    [
        *("mine-1.0.dist-info", "Mine-1.0.dist-info", "mine.dist-info", "mine-1.0.DIST-INFO", "mine-1.0-1.dist-info"),
        *("mine-1.0_1.dist-info", "mine-1.0+local.dist-info", "mine-1!2.0.post1.dist-info"),
        *("mine-1.0.dist-info mine-2.0.dist-info", "empty-1.0.dist-info"),
    ],
)
def test_odd_names_are_read_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    for name in names.split():
        version = name.rpartition(".")[0].partition("-")[2] or "1.0"
        (tmp_path / name).mkdir()
        if not name.startswith("empty"):
            write(tmp_path / name / "METADATA", f"Metadata-Version: 2.1\nName: mine\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for distribution in ("mine", "empty"):
        assert version_in(sys.path, distribution) == asked(distribution)
