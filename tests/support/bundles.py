"""Helpers shared by the tests of stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cachectl.exchange.bundle import BundlePlace
from cachectl.exchange.index import StoreIndex
from cachectl.exchange.trust import Trust
from cachectl.layers.base.environment import Environment
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home

TRUSTED = Trust(blindly=True)


def keys(home: Home) -> set[tuple[str, str]]:
    return {(entry.layer, entry.key) for entry in Stack(home.environment()).entries()}


def listed(bundle: Path) -> list[tuple[str, str]]:
    """Return layer and key of every entry in a bundle."""
    here = Environment.here()
    index = StoreIndex(BundlePlace(bundle, here), here)
    found = [one for name in index.names.parts for one in index.read(name).part.entries]
    return sorted((item.layer, item.key) for item in found)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory, new_home: Callable[[Path], Home]) -> Home:
    """Return a home in which four loopy kernels and two plain programs have run once."""
    home = new_home(tmp_path_factory.mktemp("source") / "home")
    home.python("thirteen.py", "4", "2")
    return home


@pytest.fixture(scope="session")
def packed(source: Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle of that home."""
    file = tmp_path_factory.mktemp("packed") / "warm.zip"
    Stack(source.environment()).push(str(file))
    return file
