"""The persistent dictionaries of pytools: names, generations, staleness, damage, links, purges while programs run."""

import json
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
from homes import Home
from support.dictionaries import NONE, dictionary, mine
from support.layers import clear, got, keys_of, orphans, problems, sql, usage_of, verified, write
from tiers import real, thorough_only

from cachectl.layers.base.errors import Busy, Damaged, LayerError
from cachectl.layers.core.conformance import snapshot
from cachectl.layers.core.entry import Artifact
from cachectl.layers.core.finding import Finding
from cachectl.layers.core.layer import get_many, put_many
from cachectl.layers.core.selection import Selection
from cachectl.layers.formats import pdict
from cachectl.layers.pyopencl import PyOpenCLInvoker
from cachectl.layers.pytools import LoopyDictionaries, PytoolsDictionaries

PYTHON = "3.11.7.final.0"
LAYERS = (LoopyDictionaries, PyOpenCLInvoker, PytoolsDictionaries)


def folder_of(home: Home) -> Path:
    return home.path / ".cache/pytools"


@pytest.mark.parametrize(
    ("file", "parts"),
    [
        (f"pdict-v5-loopy-x-v2-{PYTHON}.sqlite", ("v5", "loopy-x-v2", PYTHON, True)),
        (f"pdict-v5-loopy-x-v2{PYTHON}.sqlite", ("v5", "loopy-x-v2", PYTHON, False)),
        ("pdict-v5-mine3.8.1.final.0.sqlite", ("v5", "mine", "3.8.1.final.0", False)),
        ("pdict-v5-mine-3.13.0.candidate.2.sqlite", ("v5", "mine", "3.13.0.candidate.2", True)),
        ("pdict-v4-loopy-y-py3.9.2.final.0", ("v4", "loopy-y", "3.9.2.final.0", True)),
        ("pdict-v5-two\nlines-3.8.1.final.0.sqlite", ("v5", "two\nlines", "3.8.1.final.0", True)),
        *((name, None) for name in ("pdict-v5-.sqlite", f"pdict-v9-x-{PYTHON}.sqlite", "notes.sqlite", "pdict-v5-x")),
    ],
)
def test_names_of_every_generation(file: str, parts: tuple[str, str, str, bool] | None) -> None:
    assert pdict.parse_name(file, PYTHON) == (None if parts is None else pdict.DictionaryName(*parts))


def test_a_planted_pickle_is_read_and_not_run(tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {tmp_path}/ran",)

    assert pdict.kernel_names(b"loopy" + pickle.dumps(Planted())) is None
    assert pdict.kernel_names(pickle.dumps(("loopy", Planted(), "_lpy_host_seen"))) == ("seen",)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real
def test_every_row_of_loopy_names_its_kernel(filled: Home) -> None:
    entries = list(LoopyDictionaries(filled.environment()).entries())
    assert len({entry.details.detail["dictionary"] for entry in entries}) >= 5
    assert all(entry.details.kernels for entry in entries)
    assert {name for entry in entries for name in entry.details.kernels or ()} == {f"lk{number}" for number in range(8)}


def test_each_dictionary_and_what_cachectl_left_has_one_layer(home: Home) -> None:
    environment = home.environment()
    left = folder_of(home) / (".cachectl-stage-" + "0" * 32)
    for identifier in ("loopy-a", "pyopencl-b", "sumpy-c", "mine"):
        dictionary(folder_of(home) / f"pdict-v5-{identifier}-{environment.python}.sqlite", {"0" * 16: NONE})
    left.mkdir()
    layers = [layer(environment) for layer in LAYERS]
    assert {layer.name: [entry.details.detail["dictionary"] for entry in layer.entries()] for layer in layers} == {
        "loopy": ["loopy-a"],
        "pyopencl-invoker": ["pyopencl-b"],
        "pytools": ["mine", "sumpy-c"],
    }
    assert [list(orphans(layer)) for layer in layers] == [[], [], [left.name]]
    clear(layers[2])
    assert not left.exists()


OLD, OLD_WORDS = "2020.1-islpy2021.1-cgen2020.1-v2", " with loopy 2020.1, islpy 2021.1, cgen 2020.1"


@pytest.mark.parametrize(
    ("file", "stale", "maker"),
    [
        # Other Pythons, even of this version, may have other packages.
        ("x{python}", None, "{short}"),
        (f"x-{OLD}-{{python}}", None, f"{{short}}{OLD_WORDS}"),
        ("x-2025.2-islpy2026.2.2-cgen2025.1-v2-{python}", False, None),
        ("x-3.8.1.final.0", None, "3.8.1"),
        ("x3.8.1.final.0", None, "3.8.1"),
        (f"x-{OLD}-3.8.1.final.0", None, f"3.8.1{OLD_WORDS}"),
    ],
)
def test_rows_that_this_python_does_not_open_are_unknown(
    home: Home, file: str, stale: bool | None, maker: str | None
) -> None:
    versions = {"pytools": "2026.1.1", "loopy": "2025.2", "islpy": "2026.2.2", "cgen": "2025.1"}
    environment = home.environment()._replace(installed=versions.get)
    name = f"pdict-v5-loopy-{file.format(python=environment.python)}.sqlite"
    dictionary(folder_of(home) / name, {"0" * 16: pickle.dumps((1, 2))})
    layer = LoopyDictionaries(environment)
    (entry,) = layer.entries()
    because = None if maker is None else f"unknown: written by Python {maker}, and other Pythons were not looked for"
    short = ".".join(environment.python.split(".")[:3])
    assert (entry.stale, entry.stale_because) == (stale, because and because.format(short=short))
    usage = usage_of(layer)
    expected = (None, None, 1) if stale is None else (0, 0, 0)
    assert (usage.entries, usage.stale_entries, usage.stale_bytes, usage.stale_unknown) == (1, *expected)
    assert layer.plan_clear(Selection(stale=True)).entries == ()
    assert len(layer.plan_clear().entries) == 1


def older(home: Home, *kernels: str, generation: str = "v4") -> tuple[LoopyDictionaries, Path]:
    """Make an older dictionary with an entry for each kernel; return the layer and its folder."""
    folder = folder_of(home) / f"pdict-{generation}-loopy-x-py3.8.1.final.0"
    for number, kernel in enumerate(kernels):
        write(folder / f"abc/def/012345678{number}/key", pickle.dumps("key"))
        write(folder / f"abc/def/012345678{number}/contents", pickle.dumps(f"_lpy_host_{kernel}"))
    return LoopyDictionaries(home.environment()), folder


def test_folders_of_old_generations_are_entries(home: Home) -> None:
    older(home, "double", generation="v3")
    layer, folder = older(home, "double", "halve")
    entries = list(layer.entries())
    assert [(entry.stale, entry.files) for entry in entries] == [(None, 2)] * 3
    assert sorted(entry.details.kernels or () for entry in entries) == [("double",), ("double",), ("halve",)]
    assert clear(layer, kernel="dou*").removed == 2
    artifact = got(layer, entries[-1].key)
    assert artifact.form == "loopy-pdict/4"
    # An empty one is left to the program that fills it.
    (folder / "abc/def/0123456789ab").mkdir()
    assert orphans(layer) == {}
    assert layer.plan_clear(Selection(stale=True)).entries == ()
    assert clear(layer).removed == 2
    # Programs make their locks in them.
    assert len(list(folder_of(home).iterdir())) == 2
    layer.put(artifact.key, artifact)
    assert layer.get(artifact.key) == artifact


def test_the_entry_of_a_held_lock_is_left(home: Home) -> None:
    """A live program with an older pytools would fail without the folder to which it writes."""
    layer, folder = older(home, "double", "halve")
    (folder / "abcdef0123456780.lock").touch()
    outcome = clear(layer)
    assert (outcome.removed, [note.key.rpartition("/")[2] for note in outcome.skipped]) == (1, ["0123456780"])
    assert "a program may be writing it" in outcome.skipped[0].because


#: Keeps an object of a module that only PYTHONPATH finds.
PROGRAM = """
import sys
from pytools.persistent_dict import NoSuchEntryError, WriteOncePersistentDict
rows = WriteOncePersistentDict("mine", safe_sync=False)
if "fill" in sys.argv:
    import simlib, numpy
    for key, value in {"grid": simlib.Grid(), "array": numpy.ones(3), "number": 1}.items():
        rows.store_if_not_present(key, value)
try:
    rows.fetch("grid")
except NoSuchEntryError:
    print("missed")
"""


@real
@thorough_only
def test_a_row_of_a_module_that_is_gone_is_unknown_and_can_be_purged(home: Home, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/simlib.py").write_text("class Grid: pass")

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-c", PROGRAM, *words)
        return subprocess.run(command, env={**home.variables, **variables}, capture_output=True, text=True, check=False)

    library = str(tmp_path / "lib")
    assert run("fill", PYTHONPATH=library).returncode == 0
    assert "No module named 'simlib'" in run().stderr
    assert home.json("verify pytools", PYTHONPATH=library)["findings"] == []
    (finding,) = home.json("verify pytools", check=False)["findings"]
    assert (finding["code"], finding["severity"]) == ("unknown", "may fail a run")
    assert "needs module simlib, which no Python " in finding["message"]
    home.cachectl("purge --damaged pytools")
    assert "No module named 'simlib'" in run().stderr
    home.cachectl(finding["fix"].removeprefix("cachectl "))
    assert run().stdout == "missed\n"
    assert home.json("verify pytools")["findings"] == []


#: Prints the code that loopy makes of one kernel.
LOOPY = """
import loopy as lp
kernel = lp.make_kernel("{[i]: 0<=i<4}", "a[i] = i", lang_version=(2018, 2), name="fill")
print(lp.generate_code_v2(kernel).device_code())
"""


@real
@thorough_only
def test_an_editable_loopy_that_was_changed_is_found_and_the_purge_makes_it_count(home: Home, tmp_path: Path) -> None:
    """On a copy of the real loopy."""
    specification, sources = find_spec("loopy"), tmp_path / "sources"
    assert specification is not None
    installed = Path(str(specification.origin)).parents[1]
    shutil.copytree(installed / "loopy", sources / "loopy")
    (metadata,) = installed.glob("loopy-*.dist-info")
    shutil.copytree(metadata, sources / metadata.name)
    origin = {"url": sources.as_uri(), "dir_info": {"editable": True}}
    (sources / metadata.name / "direct_url.json").write_text(json.dumps(origin))

    def generated() -> str:
        variables = {**home.variables, "PYTHONPATH": str(sources)}
        done = subprocess.run([sys.executable, "-c", LOOPY], env=variables, capture_output=True, text=True, check=True)
        return done.stdout

    def findings() -> list[Finding]:
        environment = home.environment()._replace(site=(sources, *home.environment().site))
        return [one for one in LoopyDictionaries(environment).diagnose() if one.code == "editable"]

    before = generated()
    assert findings() == []
    target = sources / "loopy/target/opencl.py"
    target.write_text(target.read_text().replace("get_local_id(N)", "get_local_id((N))"))
    os.utime(target, (time.time() + 5, time.time() + 5))
    assert "get_local_id(N)" in before
    assert generated() == before
    (finding,) = findings()
    assert f"loopy is editable and newer than its entries ({target})" in finding.message
    home.cachectl(finding.fix.removeprefix("cachectl "))
    assert findings() == []
    assert "get_local_id((N))" in generated()


@pytest.mark.parametrize("first", [False, True])
def test_rows_that_came_after_the_plan_stay(home: Home, first: bool) -> None:
    """Even one that took the number of a deleted row."""
    layer, path = mine(home, {"a" * 16: NONE})
    plan = layer.plan_clear()
    if first:
        clear(layer)
    sql(path, f"insert into dict values ('{'b' * 16}', x'80044b012e')")
    assert layer.clear(plan).removed == (not first)
    assert keys_of(layer) == [f"{path.name}/{'b' * 16}"]


def test_a_purge_gives_the_space_back_and_keeps_the_file(home: Home) -> None:
    row = b"\x80\x04B" + (4096).to_bytes(4, "little") + bytes(4096) + b"."
    layer, path = mine(home, {f"{n:016x}": row for n in range(200)})
    inode, size = path.stat().st_ino, path.stat().st_size
    outcome = clear(layer)
    assert path.stat().st_ino == inode
    assert outcome.bytes_freed == size - path.stat().st_size > 200 * 4096


def test_a_locked_dictionary_fails_alone_and_once(home: Home) -> None:
    environment = home.environment()._replace(lock_timeout=0.2)
    free, held = (f"pdict-v5-{name}-{environment.python}.sqlite" for name in ("free", "held"))
    dictionary(folder_of(home) / free, {"a" * 16: NONE})
    keys = [f"{held}/{number:064}" for number in range(300)]
    path = dictionary(folder_of(home) / held, {key.partition("/")[2]: pickle.dumps(key) for key in keys})
    layer = PytoolsDictionaries(environment)
    plan = layer.plan_clear()
    artifacts = [Artifact("pytools", f"{key}0", "pytools-pdict/5", pickle.dumps(1)) for key in keys]
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        outcome = layer.clear(plan)
        assert (outcome.removed, len(outcome.failed)) == (1, 1)
        assert problems(layer) == ["busy"]
        read, placed = get_many(layer, keys), put_many(layer, artifacts)
    # The same error for all: it occurred once.
    for errors in (list(read.values()), list(placed)):
        assert (len(errors), [type(error) for error in set(errors)]) == (300, [Busy])
    assert layer.clear(plan).removed == 300


def test_nothing_is_known_of_the_rows_of_a_damaged_file_and_one_just_made_is_no_damage(home: Home) -> None:
    layer, path = mine(home, {"a" * 16: NONE})
    path.write_bytes(b"no database at all" * 99)
    usage = usage_of(layer)
    assert (usage.entries, usage.stale_entries, usage.stale_bytes, usage.files) == (None, None, None, 1)
    # It is empty until its program makes the table in it.
    path.write_bytes(b"")
    assert (problems(layer), verified(layer), layer.plan_clear().failed) == ([], [], ())


def test_a_broken_dictionary_stops_no_other_and_its_cure_is_named(home: Home) -> None:
    rows = {f"{n:016x}": pickle.dumps((n, bytes(9000))) for n in range(30)}
    names = [f"pdict-v5-{name}-{home.environment().python}.sqlite" for name in ("a-header", "b-inside", "c-whole")]
    header, inside, _ = (dictionary(folder_of(home) / name, rows) for name in names)
    header.write_bytes(b"no database at all" * 99)
    # Counting reads the tree down to its leaves, but no further.
    content = inside.read_bytes()
    inside.write_bytes(content[:4096] + b"\xff" * 4096 + content[8192:])
    done = home.cachectl("purge --all", check=False)
    said, cure = done.stderr.splitlines(), "cachectl purge --damaged pytools"
    assert (done.returncode, len(said)) == (1, 2), said
    assert all(line.startswith("cachectl: pytools: ") and cure in line for line in said)
    assert home.json("ls pytools", check=False)["entries"] == []
    home.cachectl(*cure.split()[1:])
    assert (header.exists(), inside.exists()) == (False, False)
    assert home.cachectl("purge --all").stderr == ""


@pytest.mark.parametrize("data", [b"", b"junk", b"\x80\x04N"])
def test_a_broken_pickle_is_found_and_not_put(home: Home, data: bytes) -> None:
    """A pickle of a later protocol is not removed as damaged."""
    later = bytes([0x80, pickle.HIGHEST_PROTOCOL + 1]) + b"\xfe."
    layer, path = mine(home, {"a" * 16: later, "x'; touch pwned; '": data})
    unknown, damaged = verified(layer)
    assert (unknown.code, damaged.code) == ("unknown", "damaged")
    assert damaged.fix == "cachectl purge --damaged pytools"
    assert [entry.key for entry in layer.plan_clear(damaged=True).entries] == [damaged.key]
    key = f"{path.name}/{'b' * 16}"
    with pytest.raises(Damaged):
        layer.put(key, Artifact("pytools", key, "pytools-pdict/5", data))


def test_nothing_is_read_or_written_through_a_link(home: Home) -> None:
    """Nor through one that replaced the dictionary after the plan."""
    innocent = dictionary(home.path / "elsewhere/innocent.db", {"a" * 16: NONE})
    layer, path = mine(home, {"a" * 16: NONE})
    plan = layer.plan_clear()
    path.unlink()
    path.symlink_to(innocent)
    before = innocent.read_bytes()
    key = f"{path.name}/{'a' * 16}"
    with pytest.raises(LayerError, match="link"):
        layer.get(key)
    with pytest.raises(LayerError, match="link"):
        layer.put(key, Artifact("pytools", key, "pytools-pdict/5", NONE), replace=True)
    assert len(verified(layer)) == 1
    assert problems(layer) == ["link"]
    clear(layer)
    outcome = layer.clear(plan)
    assert (outcome.removed, len(outcome.failed)) == (0, 1)
    assert innocent.read_bytes() == before


@pytest.mark.parametrize("size", [0, 100, 8192])
def test_looking_at_a_file_with_a_stray_log_writes_nothing(home: Home, size: int) -> None:
    """Sqlite makes a shared-memory file, or deletes the log, next to any database that has one, even if empty."""
    layer, path = mine(home, {"b" * 16: NONE})
    os.truncate(path, size)
    Path(f"{path}-wal").write_bytes(b"no log at all" * 100)
    before = snapshot(home.path, times=True)
    root = layer.roots()[0]
    assert [list(look(root)) for look in (layer.store.scan, layer.store.verify)]
    layer.plan_clear()
    assert snapshot(home.path, times=True) == before


@pytest.mark.parametrize("glob", ["foo*", "[!]]oo_bar", "[!]x]oo_bar", "[]f]oo_bar", "*o_b?r", "foo_bar", "[a-z]*_bar"])
def test_no_kernel_is_missed_by_looking_for_a_part_of_its_name(glob: str) -> None:
    """Every name that a pattern selects contains the literal part, also with brackets."""
    selection = Selection(kernel=glob)
    assert selection.kernel_pattern is not None
    assert selection.kernel_pattern.fullmatch("foo_bar")
    assert selection.kernel_part in "foo_bar"


#: Prints the pickles of four merged kernels in two protocols.
MERGED = """
import pickle
import loopy as lp
options = {"lang_version": lp.MOST_RECENT_LANGUAGE_VERSION}
kernels = [lp.make_kernel("{[i]: 0<=i<8}", f"a[i] = {n}", name=f"kern{n}", **options) for n in range(4)]
for protocol in (4, 5):
    print(pickle.dumps((lp.merge(kernels), None), protocol).hex())
"""


@real
def test_the_names_of_many_merged_kernels_are_found(home: Home) -> None:
    """With three kernels or more, loopy's key names some only by their index in the memo of the pickle."""
    for line in home.run(sys.executable, "-c", MERGED).stdout.split():
        assert pdict.kernel_names(bytes.fromhex(line)) == ("kern0", "kern1", "kern2", "kern3")
