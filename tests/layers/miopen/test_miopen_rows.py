"""Rows and names that MIOpen loads although it would not have stored them, and what stands in a database's place.

MIOpen 3.3.0's own ``KernDb``, compiled as a program, was asked for every row below.
"""

from __future__ import annotations

import bz2
import hashlib
import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import Damaged, LayerError, Refused
from cachectl.layers.base.facts import Artifact, Problem, Severity
from cachectl.layers.base.selection import Selection
from cachectl.layers.miopen import kernel_db
from cachectl.layers.miopen.kernels import MIOpenKernels
from cachectl.layers.miopen.places import kernel_key, split_kernel_key
from cachectl.layers.miopen.system_kernels import MIOpenSystemKernels, lookup
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home

VERSION: Final = "3.3.0.a85ca8a54"
ARGS: Final = " -DNS=a::b -mcpu=gfx90a"
CODE: Final = b"\x7fELF" + b"some code that packs well " * 400
BLOB: Final = bz2.compress(CODE, 9)
SIZE: Final = len(CODE)
TWO: Final = bz2.compress(CODE[:100]) + bz2.compress(CODE[100:])


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()  # noqa: S324 - MIOpen's choice


MD5: Final = md5(CODE)
Values = tuple[object, ...]
#: Values of a row, and the codes of what is odd about it.
LOADED: Final[dict[str, tuple[Values, list[str]]]] = {
    "bytes after the stream": ((BLOB + b"junk", MD5, SIZE), ["trailing"]),
    "zeros after the stream": ((BLOB + bytes(9), MD5, SIZE), ["trailing"]),
    "another stream after it": ((BLOB + bz2.compress(b"x"), MD5, SIZE), ["trailing"]),
    "the md5 of the first stream": ((TWO, md5(CODE[:100]), 100), ["trailing"]),
    "a size too large": ((BLOB, MD5, SIZE + 7), ["size"]),
    "a negative size": ((BLOB, MD5, -1), ["size"]),
    "its lower 32 bits": ((BLOB, MD5, (1 << 32) + SIZE), ["size"]),
    "negative, its lower 32 bits": ((BLOB, MD5, SIZE - (1 << 32)), ["size"]),
    "a fraction": ((BLOB, MD5, SIZE + 0.7), ["size"]),
    "less than one": ((CODE, MD5, 0.5), ["size"]),
    "infinite": ((BLOB, MD5, float("inf")), ["size"]),
    "a text that begins with a number": ((BLOB, MD5, f" +{SIZE}.9 bytes"), ["size"]),
    "a text that does not": ((CODE, MD5, "unknown"), ["size"]),
    "hexadecimal": ((CODE, MD5, "0x10"), ["size"]),
    "a text of many digits": ((BLOB, MD5, "9" * 5000 + "x"), ["size"]),
    "a size in a blob": ((BLOB, MD5, str(SIZE).encode()), ["size"]),
    "an md5 in a blob": ((BLOB, MD5.encode(), SIZE), ["type"]),
    "a text for a blob": (("plain", md5(b"plain"), 0), ["type"]),
    "a number for a blob": ((12345, md5(b"12345"), 0), ["type"]),
}
THROWN: Final[dict[str, Values]] = {
    "a fraction too small": (BLOB, MD5, SIZE - 0.5),
    "lower 32 bits too small": (BLOB, MD5, (1 << 32) + SIZE - 1),
    "lower 32 bits of a negative one too small": (BLOB, MD5, SIZE - (1 << 32) - 1),
    "lower 32 bits of zero": (BLOB, MD5, 1 << 32),
    "a large negative text": (BLOB, MD5, "-" + "9" * 30 + "x"),
    "a text of a small number": (BLOB, MD5, "1e9x"),
    "packed, and a text without a number": (BLOB, MD5, "unknown"),
    "joined streams": (TWO, MD5, SIZE),
    "an upper-case md5": (BLOB, MD5.upper(), SIZE),
    "more after the md5": (BLOB, f"{MD5} ", SIZE),
    "a zero byte after the md5": (BLOB, f"{MD5}\0x", SIZE),
}


def environment_of(home: Path, **variables: str) -> Environment:
    return Environment({"HOME": str(home), **variables}, home=home, cwd=home, temporary=home / "tmp")


def user_file(home: Path) -> Path:
    return home / ".cache" / "miopen" / VERSION / "gfx90a6e.ukdb"


def store(path: Path, rows: dict[str, Values]) -> Path:
    """Write rows by their names, all with the same arguments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        for statement in kernel_db.SCHEMA.create:
            connection.execute(statement)
        columns = ", ".join(kernel_db.SCHEMA.columns)
        for name, values in rows.items():
            connection.execute(f"INSERT INTO kern_db({columns}) VALUES(?, ?, ?, ?, ?)", (name, ARGS, *values))
        connection.commit()
    return path


def stored(path: Path) -> dict[str, Values]:
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(f"SELECT {', '.join(kernel_db.SCHEMA.columns)} FROM kern_db").fetchall()
    assert {row[1] for row in rows} <= {ARGS}
    return {row[0]: row[2:] for row in rows}


def key_of(name: str, file: str = f"{VERSION}/gfx90a6e.ukdb") -> str:
    return f"{file}::{name}::{ARGS}"


# ---------------------------------------------------------------------- rows


@pytest.mark.parametrize(("values", "codes"), LOADED.values(), ids=LOADED)
def test_a_row_that_miopen_loads_is_no_damage(tmp_path: Path, values: Values, codes: list[str]) -> None:
    store(user_file(tmp_path), {"odd.cl.o": values})
    layer = MIOpenKernels(environment_of(tmp_path))
    findings = list(layer.verify(layer.roots()[0]))
    assert [(finding.code, finding.severity) for finding in findings] == [(code, Severity.HARMLESS) for code in codes]
    # Nothing that could be moved into quarantine.
    assert [finding.thing for finding in findings] == [None] * len(codes)
    got = layer.get(key_of("odd.cl.o"))
    assert got is not None
    kernel = got.data
    # What is pushed is as MIOpen itself stores it.
    Stack(environment_of(tmp_path)).push(str(tmp_path / "gfx90a6e.kdb"), layers=["miopen"])
    assert stored(tmp_path / "gfx90a6e.kdb") == {"odd.cl.o": kernel_db.encode(kernel)}


@pytest.mark.parametrize("values", THROWN.values(), ids=THROWN)
def test_a_row_that_miopen_throws_on_is_damage(tmp_path: Path, values: Values) -> None:
    store(user_file(tmp_path), {"odd.cl.o": values})
    layer = MIOpenKernels(environment_of(tmp_path))
    (finding,) = layer.verify(layer.roots()[0])
    assert (finding.code, finding.severity) == ("content", Severity.FAILS)
    with pytest.raises(Damaged):
        layer.get(key_of("odd.cl.o"))


# ---------------------------------------------------------------------- names

NAMES: Final = ("ns::name.cl.o", "ns", "a:b%3A.s.o", "::", ":", "100%.cl.o", "%25", "colon:", "plain.cl.o")


def test_a_key_names_one_kernel() -> None:
    keys = {kernel_key(name, args): (name, args) for name in NAMES for args in ("", ":x", "::", ARGS, "ns::name.cl.o")}
    assert len(keys) == len(NAMES) * 5
    assert {key: split_kernel_key(key) for key in keys} == keys
    # As they always were.
    assert kernel_key("plain.cl.o", ARGS) == f"plain.cl.o::{ARGS}"


def test_kernels_with_colons_in_their_names_come_and_go(tmp_path: Path) -> None:
    odd = {name: kernel_db.encode(CODE + name.encode()) for name in NAMES}
    path = store(user_file(tmp_path), odd)
    environment = environment_of(tmp_path)
    layer = MIOpenKernels(environment)
    entries = {entry.detail["kernel_name"]: entry for entry in layer.entries()}
    assert entries["ns::name.cl.o"].key == key_of("ns%3A%3Aname.cl.o")
    assert entries["ns::name.cl.o"].kernels == ("ns::name.cl", "ns::name")
    read = layer.get_many([entry.key for entry in entries.values()])
    artifacts = {name: read[entry.key] for name, entry in entries.items()}
    assert {name: getattr(one, "data", one) for name, one in artifacts.items()} == {
        name: CODE + name.encode() for name in NAMES
    }
    # One of them alone, by its key.
    assert layer.clear(layer.plan_clear(Selection(key=entries["ns::name.cl.o"].key))).removed == 1
    assert set(stored(path)) == set(NAMES) - {"ns::name.cl.o"}
    # And back, singly and many at once.
    artifact = artifacts["ns::name.cl.o"]
    assert isinstance(artifact, Artifact)
    layer.put(artifact.key, artifact)
    assert stored(path) == odd
    whole = [one for name, one in artifacts.items() if isinstance(one, Artifact) and name.endswith(".o")]
    outcome = layer.clear(layer.plan_clear())
    assert (outcome.removed, outcome.skipped, outcome.failed) == (len(NAMES), (), ())
    assert stored(path) == {}
    assert layer.put_new(whole) == [True] * len(whole)
    # Installed under the same names, and found there.
    file = tmp_path / "system" / "gfx90a6e.kdb"
    file.parent.mkdir()
    Stack(environment).push(str(file), Selection(key=artifact.key), layers=["miopen"])
    assert set(stored(file)) == {"ns::name.cl.o"}
    other = environment_of(tmp_path / "other", MIOPEN_SYSTEM_DB_PATH=str(tmp_path / "system"))
    found = lookup(MIOpenKernels(other), MIOpenSystemKernels(other), "gfx90a6e", "ns::name.cl.o", ARGS)
    assert found is not None
    assert found.data == CODE + b"ns::name.cl.o"


def test_a_kernel_with_colons_in_its_name_is_moved_brought_back_and_purged(home: Home) -> None:
    odd: dict[str, Values] = {"ns::name.cl.o": (BLOB, "0" * 32, SIZE)}
    path = store(user_file(home.path), odd)
    (finding,) = home.json("verify", "miopen", check=False)["findings"]
    assert finding["fix"] == f"cachectl purge miopen --key '{key_of('ns%3A%3Aname.cl.o')}'"
    pushed = Stack(home.environment()).push(str(home.path / "gfx90a6e.kdb"), layers=["miopen"])
    assert [note.key for note in pushed.layers[0].failed] == [key_of("ns%3A%3Aname.cl.o")]
    home.cachectl("verify", "--quarantine", "miopen")
    assert stored(path) == {}
    home.cachectl("restore", "--all")
    assert stored(path) == odd
    assert home.json("purge", "--all")["total"]["removed"] == 1
    assert stored(path) == {}


def test_a_version_folder_with_a_colon_is_not_miopens(tmp_path: Path) -> None:
    """Its files would have keys that mean another file."""
    store(tmp_path / ".cache" / "miopen" / "3.3.0.a::b" / "gfx90a6e.ukdb", {"k.cl.o": kernel_db.encode(CODE)})
    assert list(MIOpenKernels(environment_of(tmp_path)).entries()) == []


# ---------------------------------------------------------------------- no file


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_file_in_the_place_of_a_database_is_named(tmp_path: Path, kind: str) -> None:
    """MIOpen throws at every lookup and every store."""
    path = user_file(tmp_path)
    path.parent.mkdir(parents=True)
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    layer = MIOpenKernels(environment_of(tmp_path))
    (problem,) = (found for found in layer.scan(layer.roots()[0]) if isinstance(found, Problem))
    assert (problem.path, problem.code) == (path, "no-file")
    (finding,) = layer.verify(layer.roots()[0])
    assert (finding.key, finding.severity) == (f"{VERSION}/gfx90a6e.ukdb", Severity.FAILS)
    artifact = Artifact("miopen", key_of("k.cl.o"), "miopen-kernel/1", CODE)
    with pytest.raises(Refused, match="a folder"):
        layer.put(artifact.key, artifact)
    subprocess.run(finding.fix, shell=True, check=True)  # noqa: S602 - the command is what is tested
    layer.put(artifact.key, artifact)
    assert list(layer.verify(layer.roots()[0])) == []


def test_a_folder_in_the_place_of_a_packages_database_is_the_packages_to_fix(tmp_path: Path) -> None:
    (tmp_path / "db" / "gfx90a.kdb").mkdir(parents=True)
    layer = MIOpenSystemKernels(environment_of(tmp_path, MIOPEN_SYSTEM_DB_PATH=str(tmp_path / "db")))
    (finding,) = layer.verify(layer.roots()[0])
    assert (finding.code, finding.severity) == ("no-file", Severity.FAILS)
    assert "reinstall the package" in finding.fix
    with pytest.raises(LayerError):
        layer.put("gfx90a.kdb::k.cl.o::", Artifact("miopen-system", "gfx90a.kdb::k.cl.o::", "miopen-kernel/1", CODE))
