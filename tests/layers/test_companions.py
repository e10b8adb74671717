"""Entries with files next to them, such as Numba's functions, are read, carried and removed as one."""

import errno
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.layers import clear, got, listed, orphans, root_of

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import LayerError, Unreachable
from cachectl.layers.core.conformance import LayerConformance
from cachectl.layers.core.declarations import Places, user_cache
from cachectl.layers.core.entry import Entry
from cachectl.layers.core.finding import Severity
from cachectl.layers.core.layer import Layer, plan_removal
from cachectl.layers.core.selection import Selection
from cachectl.layers.core.store import Codec, Damage
from cachectl.layers.disk import atomic
from cachectl.layers.formats.details import Details
from cachectl.layers.stores.archive import pack, unpack
from cachectl.layers.stores.files import Files
from cachectl.layers.stores.tree_read import Shape


class FunctionCodec(Codec):
    """An index, NAME.nbi, which begins with Numba's version, and the machine code of each signature."""

    form = "numba-function/1"

    def describe(self, data: bytes) -> Details:
        index = next(name for name in unpack(data) if name.endswith(".nbi"))
        return Details(kernels=(index.split("-")[0].rpartition(".")[2],))

    def check(self, data: bytes) -> Damage | None:
        heads = (content[:1] == b"\x80" for name, content in unpack(data).items() if name.endswith(".nbi"))
        return None if any(heads) else Damage(Severity.RECOMPILES, "its index is no pickle")


FUNCTIONS = Shape(
    (re.compile(r"\w+_[0-9a-f]{40}"), re.compile(r"(.+)\.nbi")), folders=False, companions=re.compile(r"(.+)\.\d+\.nbc")
)


class Numba(Layer):
    """Functions that Numba compiled with ``cache=True``."""

    name, title = "numba", "Numba functions"
    places = Places("NUMBA_CACHE_DIR", default=user_cache("numba"))
    store = Files(FUNCTIONS, codec=FunctionCodec())


FOLDER = f"nb_{'0' * 40}"


class TestNumba(LayerConformance):
    def make(self, environment: Environment) -> Layer:
        return Numba(environment)

    def seed(self, environment: Environment) -> None:
        folder = environment.home_folder / ".cache/numba" / FOLDER
        folder.mkdir(parents=True)
        for name, signatures in (("k.f-2.py311", 2), ("k.g-9.py311", 1), ("k.f-2.py312", 0)):
            (folder / f"{name}.nbi").write_bytes(b"\x80\x04" + name.encode())
            for number in range(signatures):
                (folder / f"{name}.{number + 1}.nbc").write_bytes(f"code {name} {number}".encode())

    def test_an_entry_is_its_files_together(self, tmp_path: Path) -> None:
        layer = self.seeded(tmp_path)
        folder = tmp_path / "home/.cache/numba" / FOLDER
        entries = listed(layer)
        key = f"{FOLDER}/k.f-2.py311.nbi"
        assert {entry.files for entry in entries.values()} == {1, 2, 3}
        assert (entries[key].files, entries[key].details.kernels) == (3, ("f",))
        artifact = got(layer, key)
        assert sorted(unpack(artifact.data)) == ["k.f-2.py311.1.nbc", "k.f-2.py311.2.nbc", "k.f-2.py311.nbi"]
        removed = layer.clear(plan_removal(layer, [entries[key]]))
        assert (removed.removed, removed.bytes_freed) == (1, entries[key].bytes)
        assert not list(folder.glob("k.f-2.py311.*"))

    def test_a_replacement_that_fails_leaves_the_old_entry(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = self.seeded(tmp_path)
        key = f"{FOLDER}/k.f-2.py311.nbi"
        one, place_new, placed = got(layer, key), atomic.place_new, list[str]()

        def fails(source: str, target: str, **folders: int) -> None:
            if target.endswith(".nbi") and target not in placed:
                placed.append(target)
                raise OSError(errno.ENOSPC, "No space left on device")
            place_new(source, target, **folders)

        monkeypatch.setattr(atomic, "place_new", fails)
        other = {"k.f-2.py311.nbi": b"\x80other", "k.f-2.py311.1.nbc": b"other", "k.f-2.py311.3.nbc": b"new"}
        with pytest.raises(Unreachable, match="No space left"):
            layer.put(key, one._replace(data=pack(other)), replace=True)
        assert layer.get(key) == one
        layer.put(key, one._replace(data=pack(other)), replace=True)
        assert {entry.files for entry in layer.entries(Selection(key=key))} == {3}

    def test_a_file_without_its_entry_is_an_orphan_and_said_when_that_is_put(self, tmp_path: Path) -> None:
        layer = self.seeded(tmp_path)
        key = f"{FOLDER}/k.g-9.py311.nbi"
        artifact = got(layer, key)
        (root_of(layer) / key).unlink()
        with pytest.raises(LayerError, match="files of a missing entry"):
            layer.put(key, artifact)
        folder = root_of(layer) / FOLDER
        (folder / "k.h-1.py311.1.nbc").mkdir()
        (folder / "k.h-1.py311.1.nbc/mine").write_text("not Numba's")
        assert list(orphans(layer)) == [f"{FOLDER}/k.g-9.py311.1.nbc"]
        outcome = clear(layer)
        assert (outcome.removed, outcome.orphans_removed) == (2, 1)
        assert [path.name for path in folder.rglob("*")] == ["k.h-1.py311.1.nbc", "mine"]
        layer.put(key, artifact)
        assert layer.get(key) == artifact


PROGRAM = """
from numba import njit

@njit(cache=True)
def f(x):
    return x * 2 + 1

assert (f(3), f(2.5)) == (7, 6.0)
print(sum(f.stats.cache_hits.values()))
"""


@pytest.mark.skipif(find_spec("numba") is None, reason="Numba is not installed")
def test_numba_hits_what_put_wrote_and_misses_what_clear_removed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def hits() -> int:
        run = subprocess.run([sys.executable, program], env=variables, capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert (hits(), hits()) == (0, 2)
    layer = Numba(Environment(variables, home=tmp_path, cwd=tmp_path, temporary=tmp_path))
    (entry,) = layer.entries()
    assert isinstance(entry, Entry)
    artifact = got(layer, entry.key)
    assert clear(layer).removed == 1
    layer.put(artifact.key, artifact)
    assert hits() == 2
    assert clear(layer).removed == 1
    assert hits() == 0
