"""Helpers shared by the tests of bundles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cachectl.moving.bundle import Manifest, Reader, write_bundle
from cachectl.moving.importing import Trust
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home

TRUSTED = Trust(blindly=True)


def keys(home: Home) -> set[tuple[str, str]]:
    return {(entry.layer, entry.key) for entry in Stack(home.environment()).entries()}


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory, new_home: Callable[[Path], Home]) -> Home:
    """Return a home in which four loopy kernels and two plain programs have run once."""
    home = new_home(tmp_path_factory.mktemp("source") / "home")
    home.python("thirteen.py", "4", "2")
    return home


@pytest.fixture(scope="session")
def packed(source: Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle of that home."""
    file = tmp_path_factory.mktemp("packed") / "warm.cachectl"
    Stack(source.environment()).export(str(file))
    return file


@pytest.fixture(scope="session")
def parts(packed: Path) -> tuple[Manifest, list[bytes]]:
    with packed.open("rb") as file:
        reader = Reader(file, packed.stat().st_size)
        return reader.manifest, [data for _, data in reader.contents()]


def write(path: Path, manifest: Manifest, contents: list[bytes]) -> str:
    with path.open("wb") as file:
        write_bundle(file, manifest, contents)
    return str(path)
