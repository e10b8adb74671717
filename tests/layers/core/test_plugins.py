"""Third-party layers: found, installed, used like ours, and named if they are broken."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import listing
from homes import PROGRAMS, Home, beside, make_home
from plugin.cachectl_test_plugin import Notes
from support.layers import write
from support.tracing import layer_of, trace
from tiers import thorough, thorough_only

from cachectl.layers.base.environment import Environment
from cachectl.layers.core.layer import Layer
from cachectl.layers.registry import plugged_in

#: A folder like one that pip installs into: a module and its dist-info with entry points.
NOTES = ["00000001.note", "00000002.note"]
PLUGIN = Path(__file__).parents[2] / "plugin"
TOYC = (sys.executable, str(PROGRAMS / "toyc.py"))


@pytest.fixture
def plugged(home: Home) -> Home:
    """Return a home whose programs have the plug-in installed, and two notes in it."""
    for name in (*NOTES, "stranger.txt"):
        write(home.path / ".cache/notes" / name, name)
    return beside(home, PLUGIN)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which pip installed the distribution on the page about adding layers."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("needs pip")
    source, target = tmp_path_factory.mktemp("sample") / "source", tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "toyc_cachectl.py", "toyc_watcher.py"):
        write(source / name, listing(name))
    # This environment's setuptools builds it: pip would download it into an environment for the build.
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", target)
    subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True)
    return target


@pytest.fixture
def sampled(home: Home, installed: Path) -> Home:
    return beside(home, installed)


def test_a_broken_plug_in_is_named_and_stops_nothing(plugged: Home) -> None:
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
    words = r"cachectl: the plug-in missing was not loaded: .*No module named 'cachectl_test_plugin_that_is_not_there'"
    assert (named.returncode, bool(re.search(words, named.stderr))) == (2, True)


@thorough_only
@pytest.mark.parametrize("wrong", ["", *thorough("roots", "nothing", "text")])
def test_a_layer_that_fails_in_every_call_stops_no_other(plugged: Home, wrong: str) -> None:
    home = type(plugged)(plugged.path, {**plugged.variables, "TALKING": wrong})
    (notes, talking) = home.json("report notes talking", check=False)["layers"]
    assert notes["entries"] == 2
    assert talking["state"] == "unknown"
    states = {"nothing": "TypeError: its state is a NoneType", "text": "TypeError: its state is a str"}
    assert states.get(wrong, "TypeError: no state") in talking["failures"]
    listed = home.json("ls notes talking", check=False)
    assert [entry["key"] for entry in listed["entries"]] == [*NOTES, *([] if wrong else ["a"])]
    assert [problem["layer"] for problem in listed["problems"] if problem["failed"]] == ["talking"]
    purged = home.json("purge talking notes", check=False)
    assert [(layer["removed"], len(layer["failed"])) for layer in purged["layers"]] == [(0, 1), (2, 0)]
    pruned = home.json("prune talking notes --max-size 1G", check=False)
    assert [len(layer["failed"]) for layer in pruned["layers"]] == [1, 0]
    push = f"push {home.path}/bundle.zip talking"
    lines = ("get talking a", "report", "ls", "verify", "doctor", "layers", "purge --all -n", "env --disable", push)
    for line in (*lines, *(["dir"] if wrong else [])):
        done = home.cachectl(line, check=False)
        assert "Traceback" not in done.stderr
        assert "talking" in done.stdout + done.stderr
        assert done.returncode == (not line.startswith(("layers", "env"))), line


@pytest.mark.parametrize(
    ("attribute", "value", "why"),
    [
        ("name", None, "has the invalid name None; use letters, digits, dots and dashes"),
        ("name", "--all", "has the invalid name '--all'; use letters, digits, dots and dashes"),
        ("name", "pocl", "has the name of the built-in layer pocl"),
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

    monkeypatch.setattr("cachectl.layers.registry.entry_points", lambda _: [Point])
    (broken,) = plugged_in(Environment({}, Path("/here")))
    assert broken == {"name": "mine", "why": f"mine {why}"}


def test_a_run_says_which_plug_in_it_could_not_switch(plugged: Home) -> None:
    done = plugged.cachectl("run --no-cache -- sh -c", "echo $NOTES_OFF")
    assert done.stdout == "1\n"
    assert "cachectl: talking stays as it is: the layer failed: KeyError: 'switch'" in done.stderr
    named = plugged.cachectl("run --isolated --layer talking -- true", check=False)
    assert named.returncode == 1
    assert named.stderr.splitlines()[-1].startswith("cachectl: talking: stays as it is: the layer failed")


def test_the_first_of_an_entry_in_two_roots_is_reported_and_exported(plugged: Home) -> None:
    """The library would find the first one, so the facts of another root must not decide what can be hit."""
    once, twice = plugged.path / "once.zip", plugged.path / "twice.zip"
    plugged.cachectl("push", str(once), "Telling", TELLING="text")
    shutil.copytree(plugged.path / ".cache/notes", plugged.path / ".cache/more")
    (plugged.path / ".cache/more/00000002.note").write_text("another two")
    plugged.cachectl("push", str(twice), "Telling", TELLING="twice")
    assert twice.read_bytes() == once.read_bytes()


@thorough_only
def test_an_installed_plug_in_is_part_of_every_verb(sampled: Home) -> None:
    for kernels, counted in ((("axpy", "dot"), [0, 2, 2, "exact"]), (("axpy", "other"), [1, 1, 1, "exact"])):
        toyc = layer_of(trace(sampled, *TOYC, *kernels), "toyc")
        assert [toyc[name] for name in ("hits", "misses", "stores", "evidence")] == counted
    sampled.cachectl("purge toyc --kernel other")
    (reported,) = sampled.json("report toyc")["layers"]
    assert (reported["state"], reported["entries"], reported["title"]) == ("enabled", 2, "toyc kernels")
    assert layer_of(sampled.json("report"), "toyc")
    assert {kernel for one in sampled.json("ls toyc")["entries"] for kernel in one["kernels"]} == {"axpy", "dot"}
    assert set(layer_of(sampled.json("layers"), "toyc")["abilities"].values()) == {None}
    assert "export TOYC_CACHE=0" in sampled.cachectl("env --disable --shell sh").stdout


@thorough_only
def test_it_is_switched_and_carried(sampled: Home, installed: Path, tmp_path: Path, other: Home) -> None:
    sampled.run(*TOYC, "axpy", "dot")
    assert sampled.cachectl("run --isolated --", *TOYC, "axpy").stdout == "axpy made\n"
    assert sampled.cachectl("run --no-cache --prove --", *TOYC, "axpy").stdout == "axpy made\n"
    bundle = str(tmp_path / "bundle.zip")
    pushed = layer_of(sampled.json("push", bundle), "toyc")
    assert (pushed["placed"], pushed["sensitive"]) == (2, "names of your kernels")
    elsewhere = beside(other, installed)
    assert "toyc: 2 will hit" in elsewhere.cachectl("pull --trust --dry-run", bundle).stdout
    assert not (elsewhere.path / ".cache").exists()
    elsewhere.cachectl("pull --trust", bundle)
    assert elsewhere.run(*TOYC, "axpy", "dot").stdout == "axpy found\ndot found\n"
    # Without the plug-in, the layer is named and nothing else is lost.
    plain = make_home(tmp_path / "plain")
    assert "there is no layer with this name here" in plain.cachectl("pull --trust", bundle).stdout
