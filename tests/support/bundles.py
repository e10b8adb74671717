"""Helpers shared by the tests of stores."""

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from homes import Home, make_home

from cachectl.exchange import place, trust
from cachectl.exchange.bundle import BundlePlace
from cachectl.exchange.store import StoreCollection
from cachectl.layers.host.here import this_environment

TRUSTED = trust.Trust(trust=True)


def keys(home: Home) -> set[tuple[str, str]]:
    return {(entry.layer, entry.key) for entry in home.stack.entries()}


def count(home: Home) -> dict[str, int]:
    """Return the number of entries of each layer that has some."""
    return Counter(layer for layer, _ in keys(home))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(home: Home, store: Path, reason: trust.Trust = TRUSTED) -> str:
    """See that nothing of a store is taken and nothing is written, and return the message."""
    before = files(home.path)
    with pytest.raises((place.BadStore, trust.Untrusted, place.Missing)) as raised:
        home.stack.pull(store, reason)
    assert files(home.path) == before
    (message,) = str(raised.value).splitlines()
    return message


def programs(home: Home) -> set[Path]:
    return {path.relative_to(home.path) for path in home.path.rglob("program.bc")}


def listed(bundle: Path) -> list[tuple[str, str]]:
    here = this_environment()
    index = StoreCollection(BundlePlace(bundle, here), here)
    found = [one for name in index.parts for one in index.part(name).entries]
    return sorted((item.entry.layer, item.key) for item in found)


@pytest.fixture
def other(tmp_path: Path) -> Home:
    return make_home(tmp_path / "other")


@pytest.fixture(scope="session")
def keygen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return what makes a key of a name and returns its path; beside it lies ``allowed``, a list that allows it."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")

    def make(name: str) -> str:
        path = tmp_path_factory.mktemp("keys") / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        path.with_name("allowed").write_text(f"{name}@example.org {path.with_suffix('.pub').read_text()}")
        return str(path)

    return make


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Return a home in which four loopy kernels and two plain programs have run once."""
    home = make_home(tmp_path_factory.mktemp("source") / "home")
    home.python("thirteen.py 4 2")
    return home


@pytest.fixture(scope="session")
def packed(source: Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("packed") / "warm.zip"
    source.stack.push(file)
    return file
