"""Installed distributions by names: the same answers as ``importlib.metadata``, which is the fallback."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from cachectl.layers.host import distributions

if TYPE_CHECKING:
    from pathlib import Path


def asked(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def layers() -> set[str]:
    return {point.name for point in distributions.entry_points("cachectl.layers")}


def install(folder: Path, name: str, version: str = "1.0", points: str = "") -> None:
    """Lay down what an installer leaves beside a module."""
    (folder / name).mkdir(parents=True)
    (folder / name / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.partition('-')[0]}\nVersion: {version}\n"
    )
    if points:
        (folder / name / "entry_points.txt").write_text(points)


def test_everything_that_is_installed_here_is_known() -> None:
    """Any installer may have installed it."""
    names = {found.metadata["Name"] for found in metadata.distributions() if found.metadata["Name"]}
    assert {name: distributions.version_of(name) for name in names} == {name: asked(name) for name in names}
    assert distributions.version_of("no-such-distribution") is None


#: Metadata of version 1.0 in a folder of this name. Of the last two a name and its file differ, as no installer makes
#: them.
SPELLED = {
    "mine-1.0.dist-info": None,
    "Mine-1.0.dist-info": None,
    "mine.dist-info": None,
    "mine-1.0-1.dist-info": None,
    "mine-1.0_1.dist-info": None,
    "mine-1.0.DIST-INFO": None,
    "mine-1.0+local.dist-info": "1.0+local",
    "mine-1!2.0.post1.dist-info": "1!2.0.post1",
}


@pytest.mark.parametrize(("name", "expected"), SPELLED.items())
def test_odd_spellings_are_read_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str | None
) -> None:
    install(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert distributions.version_of("mine") == (expected or asked("mine"))
    # An empty folder, and two versions of one name.
    (tmp_path / "empty-1.0.dist-info").mkdir()
    install(tmp_path, "twice-1.0.dist-info", "1.0")
    install(tmp_path, "twice-2.0.dist-info", "2.0")
    for other in ("empty", "twice"):
        assert distributions.version_of(other) == asked(other)


def test_entry_points_are_found_a_moment_after_they_were_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert "mine" not in layers()
    install(tmp_path, "mine-1.0.dist-info", points="[cachectl.layers]\nmine = mine:Mine\n")
    assert "mine" in layers()


def test_the_library_is_not_imported_if_folder_names_suffice() -> None:
    """It takes longer to import than a report of every cache."""
    program = (
        "import sys; from cachectl.layers.host import distributions; distributions.version_of('pytest');"
        "distributions.entry_points('no.such.group'); print('importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
