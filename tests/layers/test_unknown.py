"""What is in an entry's place in an unknown format is never nothing, never damaged, never changed."""

import json
import os
import random
import re
import shutil
import zlib
from pathlib import Path

import pytest
from homes import run_in
from support.dictionaries import FILE
from support.layers import clear, got, keys_of, root_of, usage_of, verified, write
from support.products import BITCODE, PRODUCTS, Product, place
from tiers import amount

from cachectl.config import Limits
from cachectl.layers.base.errors import UnknownFormat
from cachectl.layers.core.entry import Entry
from cachectl.layers.core.layer import put_many
from cachectl.layers.core.switch import Ability
from cachectl.layers.registry import built_in_layer
from cachectl.verbs.prune import plan_prune

BASE = "pyopencl-compiler-cache-v2-py3.11.7.final.0"


def fill_pyopencl(home: Path) -> None:
    place(home / ".cache/pyopencl" / BASE, "ab" * 16, {"source.cl": b"", "binary": b"\x7fELF", "info": b"\x80\4N."})


GOLDEN = {**PRODUCTS, "pyopencl": Product("pyopencl", fill_pyopencl)}
#: Files of a cache as a whole, and of sqlite.
OF_THE_WHOLE = ("stats", "index", "_idx.foz", "-wal", "-shm")
#: Parts of names of what may be an entry, and what a later release might write in their place.
CHANGES: dict[str, tuple[str, ...]] = {
    r"\b((?:[0-9a-f]{2}){7,}|[A-P]{14,})([0-9a-f]{2}|[A-P]{2})\b": (r"\1", r"\1\2\2", r"\1\1\2"),
    r"^(?:[0-9a-f]{1,2}|[A-P]{2})$": (r"\g<0>\g<0>",),
    r"(?<=-v)\d(?=-)": ("9", "12"),
    r"^\d+\.\d+\.\d+": ("9.9", r"v\g<0>"),
    r"(?<=[0-9a-f])(?=(?:\.HIP[\w.]*)?\.u?(?:kdb|fdb\.txt|db\.txt)$)": ("_", "_1_2_3_4"),
    r"(?<=fdb|udb)(?=\.txt$)": ("2",),
    r"(?<=_cache)$": ("2", "_zst"),
    r"(?<=^mesa_cache)(?=\.db$)|(?<=^foz_cache)(?=\.foz$)": ("2", "-3"),
}


def mutate(root: Path, chance: random.Random) -> Path:
    """Give one thing of a root another width, version or name; return its new path."""
    mutants = [
        (path, path.name[: match.start()] + match.expand(new) + path.name[match.end() :])
        for path in sorted(root.rglob("*"))
        for pattern, changes in CHANGES.items()
        for match in re.finditer(pattern, path.name)
        for new in changes
    ]
    path, name = chance.choice(mutants)
    return path.rename(path.with_name(name))


@pytest.mark.parametrize("name", GOLDEN)
def test_another_width_version_or_name_is_counted_not_damaged_and_stays(name: str, tmp_path: Path) -> None:
    product = GOLDEN[name]
    product.fill(tmp_path / "golden")
    for seed in range(amount(6, 80)):
        home = tmp_path / str(seed) / "home"
        shutil.copytree(tmp_path / "golden", home)
        layer = built_in_layer(product.layer, product.environment(home))
        root = root_of(layer)
        path = mutate(root, random.Random(zlib.crc32(name.encode()) + seed))  # noqa: S311
        scanned = [entry for entry in layer.store.scan(layer.roots()[0]) if isinstance(entry, Entry)]
        kinds = {entry.key.partition("::")[0]: entry.kind for entry in scanned}
        files = [str(file.relative_to(root)) for file in (path, *path.rglob("*")) if file.is_file()]
        covering = {file: [key for key in kinds if f"{file}/".startswith(f"{key}/")] for file in files}
        said = f"{seed}: {path.relative_to(root)}: {covering}"
        assert all(keys for file, keys in covering.items() if not file.endswith(OF_THE_WHOLE)), said
        codes = {(str(finding.key).partition("::")[0], finding.code) for finding in verified(layer)}
        assert codes.isdisjoint((key, "damaged") for keys in covering.values() for key in keys), said
        unknown = {key for key, kind in kinds.items() if kind == "unknown"}
        assert {key for key, code in codes if code == "unknown"} == unknown, said
        before = {file: (root / file).read_bytes() for file, keys in covering.items() if unknown.intersection(keys)}
        assert usage_of(layer).unknown_files == len(before), said
        if layer.abilities()[Ability.CLEAR] is None:
            artifacts = [*map(layer.get, keys_of(layer)[:1])]
            assert all(clear(layer, key=key).failed for key in unknown), said
            assert unknown <= {note.key for note in clear(layer).skipped}, said
            put_many(layer, list(filter(None, artifacts)))
            plan_prune([layer], Limits(max_size=0), lambda _: None).apply()
        assert {file: (root / file).read_bytes() for file in before} == before, said
        shutil.rmtree(home)


SYSTEM = (".nfs0000000000000001", "CACHEDIR.TAG", ".DS_Store", "lost+found", "README.md", "thesis.tex")


@pytest.mark.parametrize("name", GOLDEN)
def test_names_that_systems_and_people_make_are_not_unknown(name: str, tmp_path: Path) -> None:
    layer = GOLDEN[name].filled(tmp_path)
    root = root_of(layer)
    for folder in {root, *(path.parent for path in root.rglob("*") if path.is_file())}:
        # Such a file in a program's folder is in the way.
        for file in SYSTEM if not {"program.bc", "info"} & {*os.listdir(folder)} else ():
            write(folder / file, "years of work")
    assert usage_of(layer).unknown_files == 0
    assert "unknown" not in {finding.code for finding in verified(layer)}


def test_every_verb_says_it(tmp_path: Path) -> None:
    place(tmp_path / ".cache/pocl/kcache", "AB/" + "C" * 37, {"program.bc": BITCODE})
    file = place(tmp_path / ".cache/pocl/kcache", key := "AB/" + "C" * 62, {"program.bc": BITCODE}) / "program.bc"
    words = "1 file in a format that this cachectl does not know"
    done = run_in(tmp_path, "report")
    assert (done.returncode, done.stdout.count(f"pocl: ~/.cache/pocl/kcache: {words}\n")) == (0, 1)
    (layer,) = json.loads(run_in(tmp_path, "report", "pocl", "--json").stdout)["layers"]
    for counted in (layer, layer["roots"][0]):
        assert (counted["unknown_files"], counted["entries"], counted["files"]) == (1, 1, 2)
    done = run_in(tmp_path, "ls", "--json")
    listed = json.loads(done.stdout)
    assert (done.returncode, listed["unknown_files"], len(listed["entries"])) == (0, 1, 1)
    assert done.stderr == f"cachectl: pocl: {tmp_path}/.cache/pocl/kcache: {words}\n"
    done = run_in(tmp_path, "verify", "pocl")
    assert (done.returncode, f"pocl: {key}: has a name of another length" in done.stdout) == (1, True)
    artifact = str(tmp_path / "artifact")
    assert run_in(tmp_path, "get", "pocl", "AB/" + "C" * 37, "-o", artifact).returncode == 0
    refused = (("get", "pocl", key), ("put", "pocl", key, artifact), ("purge", "pocl", "--key", key))
    for command, status in (*((command, 1) for command in refused), (("purge", "pocl"), 0)):
        done = run_in(tmp_path, *command)
        assert (done.returncode, "has a name of another length" in done.stderr) == (status, True)
    assert file.read_bytes() == BITCODE


def test_a_database_of_a_later_sqlite_is_unknown(tmp_path: Path) -> None:
    layer = PRODUCTS["pytools"].filled(tmp_path)
    artifact, file = got(layer, keys_of(layer)[0]), root_of(layer) / FILE
    data = file.read_bytes()
    file.write_bytes(data[:18] + b"\3\3" + data[20:])
    assert (usage_of(layer).entries, usage_of(layer).unknown_files) == (0, 1)
    assert [(one.code, one.thing) for one in verified(layer)] == [("unknown", None)]
    with pytest.raises(UnknownFormat):
        layer.put(artifact.key, artifact)
    assert clear(layer).removed == 0
    assert file.read_bytes()[20:] == data[20:]
