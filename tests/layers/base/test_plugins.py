"""Layers by other people: found, installed, used like ours, and named where they are broken."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from homes import Home
from plugin.cachectl_test_plugin import Notes, NotesCodec
from support.layers import got, root_of, verified, write
from tiers import thorough

from cachectl.layers.core.conformance import LayerConformance
from cachectl.layers.core.environment import Environment
from cachectl.layers.core.errors import Damaged
from cachectl.layers.core.facts import Severity
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.registry import plugged_in
from cachectl.layers.core.store import Damage, Store
from cachectl.layers.formats.details import Details
from cachectl.layers.stores.archive import pack, unpack
from cachectl.layers.stores.files import Files
from cachectl.layers.stores.tree import Shape

#: A folder as pip installs one: a module and its dist-info with entry points.
NOTES = ["00000001.note", "00000002.note"]
PLUGIN = Path(__file__).parents[2] / "plugin"
SAMPLE = Path(__file__).parents[2] / "sample_plugin"
PAGE = Path(__file__).parents[3] / "docs/adding-a-layer.md"
TOYC = (sys.executable, str(SAMPLE / "toyc.py"))


@pytest.fixture
def plugged(home: Home) -> Home:
    """Return a home whose programs have the plug-in installed, and two notes in it."""
    for name in (*NOTES, "stranger.txt"):
        write(home.path / ".cache/notes" / name, name)
    return beside(home, PLUGIN)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which pip has installed the sample."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("needs pip")
    source, target = tmp_path_factory.mktemp("sample") / "source", tmp_path_factory.mktemp("site")
    # A build leaves its own files beside the source.
    shutil.copytree(SAMPLE, source)
    # setuptools of this environment builds it: pip would make an environment for the build, and download into it.
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", target)
    subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True)
    return target


@pytest.fixture
def sampled(home: Home, installed: Path) -> Home:
    return beside(home, installed)


def beside(home: Home, *folders: Path) -> Home:
    """Have the programs of a home find what lies in some folders."""
    path = os.pathsep.join(filter(None, (*map(str, folders), home.variables.get("PYTHONPATH"))))
    return type(home)(home.path, {**home.variables, "PYTHONPATH": path})


def test_a_broken_plug_in_is_named_and_fatal_to_nothing(plugged: Home) -> None:
    done, report = plugged.cachectl("report -v", check=False), plugged.json("report", check=False)
    assert {plugin["name"]: plugin["why"].partition(" ")[2] for plugin in report["broken"]} == {
        "exiting": "failed: SystemExit: no licence",
        "missing": "failed: ModuleNotFoundError: No module named 'cachectl_test_plugin_that_is_not_there'",
        "raising": "failed: RuntimeError: on purpose",
        "stranger": "is not a cachectl layer",
    }
    assert "pocl" in done.stdout
    assert done.stderr.count("cachectl: plug-in ") == 4
    assert "Traceback" not in done.stderr
    named = plugged.cachectl("ls missing", check=False)
    words = r"cachectl: the plug-in missing was left out: .*No module named 'cachectl_test_plugin_that_is_not_there'"
    assert (named.returncode, bool(re.search(words, named.stderr))) == (2, True)


@pytest.mark.parametrize("wrong", ["", *thorough("roots")])
def test_a_layer_that_fails_in_every_call_stops_no_other(plugged: Home, wrong: str) -> None:
    home = type(plugged)(plugged.path, {**plugged.variables, "TALKING": wrong})
    (notes, talking) = home.json("report", "notes", "talking", check=False)["layers"]
    assert notes["entries"] == 2
    assert talking["state"] == "unknown"
    assert "TypeError: no state" in talking["failures"]
    listed = home.json("ls", "notes", "talking", check=False)
    assert [entry["key"] for entry in listed["entries"]] == [*NOTES, *([] if wrong else ["a"])]
    assert [problem["layer"] for problem in listed["problems"] if problem["failed"]] == ["talking"]
    purged = home.json("purge", "talking", "notes", check=False)
    assert [(layer["removed"], len(layer["failed"])) for layer in purged["layers"]] == [(0, 1), (2, 0)]
    asked = ("get talking a", "report", "ls", "verify", "doctor", "layers", "purge --all -n", "env --disable")
    for line in asked:
        done = home.cachectl(line, check=False)
        assert "Traceback" not in done.stderr
        assert "talking" in done.stdout + done.stderr
        assert done.returncode == (not line.startswith(("layers", "env"))), line


@pytest.mark.parametrize(
    ("attribute", "value", "why"),
    [
        ("name", None, "has the name None; a name is letters, digits, dots and dashes"),
        ("name", "--all", "has the name '--all'; a name is letters, digits, dots and dashes"),
        ("name", "pocl", "takes the name of the built-in layer pocl"),
        ("title", None, "has no title, or no store"),
    ],
)
def test_what_cannot_be_a_layer_is_named(
    monkeypatch: pytest.MonkeyPatch, attribute: str, value: object, why: str
) -> None:
    class Point:
        name = value = "mine"

        @staticmethod
        def load() -> type[Layer]:
            return type("Mine", (Notes,), {attribute: value})

    monkeypatch.setattr("cachectl.layers.core.registry.entry_points", lambda _: [Point])
    (broken,) = plugged_in(Environment({}, Path("/here")))
    assert broken == {"name": "mine", "why": f"mine {why}"}


def test_a_run_says_which_plug_in_it_could_not_switch(plugged: Home) -> None:
    done = plugged.cachectl("run --no-cache -- sh -c", "echo $NOTES_OFF")
    assert done.stdout == "1\n"
    assert "cachectl: talking stays as it is: the layer failed: KeyError: 'switch'" in done.stderr
    named = plugged.cachectl("run --isolated --layer talking -- true", check=False)
    assert named.returncode == 1
    assert named.stderr.splitlines()[-1].startswith("cachectl: talking: stays as it is: the layer failed")


@pytest.mark.parametrize("kind", ["number", *thorough("mixture")])
def test_an_entry_that_no_bundle_can_hold_does_not_stop_other_layers(plugged: Home, kind: str) -> None:
    """A layer whose details are no text is named by the push, and the rest is pulled."""
    bundle = str(plugged.path / "bundle.zip")
    done = plugged.cachectl("push", bundle, "notes", "Telling", check=False, TELLING=kind)
    assert (done.returncode, "Telling: failed: 00000001.note: " in done.stderr) == (1, True)
    assert "Traceback" not in done.stderr
    assert plugged.json("pull", bundle, "--trust", "--dry-run")["layers"][0]["layer"] == "notes"


def test_the_first_of_an_entry_in_two_roots_is_reported_and_exported(plugged: Home) -> None:
    """A library would find the first one, so the facts of another root must not decide what can be hit."""
    once, twice = plugged.path / "once.zip", plugged.path / "twice.zip"
    plugged.cachectl("push", str(once), "Telling", TELLING="text")
    shutil.copytree(plugged.path / ".cache/notes", plugged.path / ".cache/more")
    (plugged.path / ".cache/more/00000002.note").write_text("another two")
    plugged.cachectl("push", str(twice), "Telling", TELLING="twice")
    assert twice.read_bytes() == once.read_bytes()


def test_the_sample_is_what_the_page_says() -> None:
    (listing,) = re.findall(r":caption: toyc_cachectl\.py\n\n(.*?\n)```", PAGE.read_text(), re.DOTALL)
    assert (SAMPLE / "toyc_cachectl.py").read_text() == listing
    assert listing.count("\n") <= 40


def test_an_installed_plug_in_is_part_of_every_verb(sampled: Home) -> None:
    for kernels, counted in ((("axpy", "dot"), [0, 2, 2, "exact"]), (("axpy", "other"), [1, 1, 1, "exact"])):
        sampled.cachectl("trace --json trace.json --", *TOYC, *kernels)
        layers = {layer["layer"]: layer for layer in json.loads((sampled.path / "trace.json").read_text())["layers"]}
        assert [layers["toyc"][name] for name in ("hits", "misses", "stores", "evidence")] == counted
    sampled.cachectl("purge toyc --kernel other")
    (reported,) = sampled.json("report", "toyc")["layers"]
    assert (reported["state"], reported["entries"], reported["title"]) == ("enabled", 2, "toyc kernels")
    assert "toyc" in {layer["layer"] for layer in sampled.json("report")["layers"]}
    assert {kernel for one in sampled.json("ls", "toyc")["entries"] for kernel in one["kernels"]} == {"axpy", "dot"}
    (able,) = (layer for layer in sampled.json("layers")["layers"] if layer["layer"] == "toyc")
    assert set(able["abilities"].values()) == {None}
    assert "export TOYC_CACHE=0" in sampled.cachectl("env --disable --shell sh").stdout


def test_it_is_switched_carried_fixed_and_purged(sampled: Home) -> None:
    sampled.run(*TOYC, "axpy", "dot")
    assert sampled.cachectl("run --isolated --", *TOYC, "axpy").stdout == "axpy made\n"
    assert sampled.cachectl("run --no-cache --prove --", *TOYC, "axpy").stdout == "axpy made\n"
    (key,) = sampled.cachectl("ls toyc --kernel axpy -q").stdout.split()
    sampled.cachectl("get toyc -o entry", key)
    (sampled.path / ".cache/toyc" / key).write_bytes(b"garbage")
    assert sampled.cachectl("verify toyc", check=False).returncode == 1
    sampled.cachectl("purge toyc --damaged")
    sampled.cachectl("put toyc", key, "entry")
    assert sampled.run(*TOYC, "axpy").stdout == "axpy found\n"
    purged = {layer["layer"]: layer["removed"] for layer in sampled.json("purge", "--all")["layers"]}
    assert purged["toyc"] == 2
    assert sampled.run(*TOYC, "axpy", "dot").stdout == "axpy made\ndot made\n"


def test_it_travels(sampled: Home, installed: Path, tmp_path: Path, new_home: Callable[[Path], Home]) -> None:
    sampled.run(*TOYC, "axpy", "dot")
    bundle = str(tmp_path / "bundle.zip")
    pushed = {layer["layer"]: layer for layer in sampled.json("push", bundle)["layers"]}
    assert (pushed["toyc"]["placed"], pushed["toyc"]["sensitive"]) == (2, "names of your kernels")
    elsewhere = beside(new_home(tmp_path / "elsewhere"), installed)
    assert "toyc: 2 will hit" in elsewhere.cachectl("pull --trust --dry-run", bundle).stdout
    assert not (elsewhere.path / ".cache").exists()
    elsewhere.cachectl("pull --trust", bundle)
    assert elsewhere.run(*TOYC, "axpy", "dot").stdout == "axpy found\ndot found\n"
    # Without the plug-in it is named, and nothing else is lost.
    plain = new_home(tmp_path / "plain")
    assert "no layer of this name exists here" in plain.cachectl("pull --trust", bundle).stdout


class FolderCodec(NotesCodec):
    """Reads the names of the files in the tar of a folder."""

    def describe(self, data: bytes) -> Details:
        return Details(kernels=tuple(sorted(unpack(data))))

    def check(self, data: bytes) -> Damage | None:
        return None if "a" in unpack(data) else Damage(Severity.RECOMPILES, "has no file a")


class TestFoldersOfTwo(LayerConformance):
    """The same with entries of two files each: an artifact cut in half ends between them."""

    store: ClassVar[Store] = Files(
        Shape((re.compile(r"[0-9a-f]{8}\.note"),), folders=True, members=re.compile("[ab]")), codec=FolderCodec()
    )

    def make(self, environment: Environment) -> Layer:
        layer: Layer = type("InFolders", (Notes,), {"store": self.store})(environment)
        return layer

    def seed(self, environment: Environment) -> None:
        for name in NOTES:
            for file in "ab":
                write(environment.home / ".cache/notes" / name / file, f"{name} {file}")

    def test_the_codec_reads_the_tar_of_a_folder(self, tmp_path: Path) -> None:
        seeded = self.seeded(tmp_path)
        assert [entry.kernels for entry in seeded.entries()] == [("a", "b")] * 2
        artifact = got(seeded, NOTES[0])
        for wrong, message in ((pack({"b": b""}), "has no file a"), (pack({"a": b"", "c": b""}), "'c' is no file")):
            with pytest.raises(Damaged, match=message):
                seeded.put(NOTES[0], replace(artifact, data=wrong), replace=True)
        (root_of(seeded) / NOTES[0] / "a").unlink()
        (finding,) = verified(seeded)
        assert (finding.key, finding.message) == (NOTES[0], "has no file a")

    def test_a_store_of_four_methods_takes_any_key_and_finds_what_its_scan_finds(self, tmp_path: Path) -> None:
        seeded = self.seeded(tmp_path)
        root = seeded.roots()[0]
        (root.path / "00000003.note").symlink_to(tmp_path)
        assert [finding.code for finding in Store.verify(seeded.store, root)] == ["link"]
        assert Store.kind_of(seeded.store, root, "any") is None
