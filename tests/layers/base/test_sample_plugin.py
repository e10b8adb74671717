"""A third party's distribution, installed as one, is a layer of every verb; and what a plug-in does wrong is named."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from tiers import thorough

from cachectl.layers.base.declarations import EnvPath, EnvSwitch, at_load, user_cache
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import PluginFailed
from cachectl.layers.base.facts import (
    Ability,
    Artifact,
    Entry,
    Finding,
    Found,
    Problem,
    Root,
    Scope,
    Severity,
    Switch,
)
from cachectl.layers.base.guard import guarded
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.registry import TookTooLong, limited
from cachectl.layers.base.store import Codec, Damage, Store
from cachectl.layers.formats.details import Details
from cachectl.layers.stores.files import Files

if TYPE_CHECKING:
    from collections.abc import Callable

    from homes import Home

SAMPLE = Path(__file__).parents[2] / "sample_plugin"
PAGE = Path(__file__).parents[3] / "docs" / "adding-a-layer.md"
TOYC = (sys.executable, str(SAMPLE / "toyc.py"))


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which pip has installed the sample."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("needs pip")
    source, target = tmp_path_factory.mktemp("sample") / "source", tmp_path_factory.mktemp("site")
    # A build leaves its own files beside the source.
    shutil.copytree(SAMPLE, source)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(source)]
    # setuptools of this environment builds it: pip would make an environment for the build, and download into it.
    command += ["--no-build-isolation", "--no-index"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def plugged(home: Home, installed: Path) -> Home:
    return beside(home, installed)


def beside(home: Home, *folders: Path) -> Home:
    """Have the programs of a home find what lies in some folders."""
    path = os.pathsep.join(filter(None, (*map(str, folders), home.variables.get("PYTHONPATH"))))
    return type(home)(home.path, {**home.variables, "PYTHONPATH": path})


def test_the_sample_is_what_the_page_says() -> None:
    listing = re.search(r":caption: toyc_cachectl\.py\n\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert listing is not None
    assert (SAMPLE / "toyc_cachectl.py").read_text() == listing[1] + "\n"


def test_an_installed_plug_in_is_part_of_every_verb(plugged: Home) -> None:
    plugged.cachectl("trace", "--json", "trace.json", "--", *TOYC, "axpy", "dot")
    layers = {layer["layer"]: layer for layer in json.loads((plugged.path / "trace.json").read_text())["layers"]}
    assert [layers["toyc"][name] for name in ("hits", "misses", "stores", "evidence")] == [0, 2, 2, "exact"]
    plugged.cachectl("trace", "--json", "trace.json", "--", *TOYC, "axpy", "other")
    layers = {layer["layer"]: layer for layer in json.loads((plugged.path / "trace.json").read_text())["layers"]}
    assert [layers["toyc"][name] for name in ("hits", "misses", "stores", "evidence")] == [1, 1, 1, "exact"]
    plugged.cachectl("purge", "toyc", "--kernel", "other")
    (reported,) = plugged.json("report", "toyc")["layers"]
    assert (reported["state"], reported["entries"], reported["title"]) == ("enabled", 2, "toyc kernels")
    assert "toyc" in {layer["layer"] for layer in plugged.json("report")["layers"]}
    assert {kernel for one in plugged.json("ls", "toyc")["entries"] for kernel in one["kernels"]} == {"axpy", "dot"}
    (able,) = (layer for layer in plugged.json("layers")["layers"] if layer["layer"] == "toyc")
    assert set(able["abilities"].values()) == {None}
    assert "export TOYC_CACHE=0" in plugged.cachectl("env", "--disable", "--shell", "sh").stdout


def test_it_is_switched_carried_fixed_and_purged(plugged: Home) -> None:
    plugged.run(*TOYC, "axpy", "dot")
    assert plugged.cachectl("run", "--isolated", "--", *TOYC, "axpy").stdout == "axpy made\n"
    assert plugged.cachectl("run", "--no-cache", "--prove", "--", *TOYC, "axpy").stdout == "axpy made\n"
    (key,) = plugged.cachectl("ls", "toyc", "--kernel", "axpy", "-q").stdout.split()
    plugged.cachectl("get", "toyc", key, "-o", "entry")
    (plugged.path / ".cache" / "toyc" / key).write_bytes(b"garbage")
    assert plugged.cachectl("verify", "toyc", check=False).returncode == 1
    plugged.cachectl("verify", "toyc", "--quarantine")
    plugged.cachectl("put", "toyc", key, "entry")
    assert plugged.run(*TOYC, "axpy").stdout == "axpy found\n"
    purged = {layer["layer"]: layer["removed"] for layer in plugged.json("purge", "--all")["layers"]}
    assert purged["toyc"] == 2
    assert plugged.run(*TOYC, "axpy", "dot").stdout == "axpy made\ndot made\n"


def test_it_travels_with_all_others(
    plugged: Home, installed: Path, tmp_path: Path, new_home: Callable[[Path], Home]
) -> None:
    plugged.run(*TOYC, "axpy", "dot")
    bundle = str(tmp_path / "bundle.zip")
    pushed = {layer["layer"]: layer for layer in plugged.json("push", bundle)["layers"]}
    assert (pushed["toyc"]["pushed"], pushed["toyc"]["sensitive"]) == (2, "names of your kernels")
    elsewhere = beside(new_home(tmp_path / "elsewhere"), installed)
    said = elsewhere.cachectl("pull", bundle, "--trust", "--dry-run").stdout
    assert "toyc: 2 will hit" in said
    assert not (elsewhere.path / ".cache").exists()
    elsewhere.cachectl("pull", bundle, "--trust")
    assert elsewhere.run(*TOYC, "axpy", "dot").stdout == "axpy found\ndot found\n"
    # Without the plug-in it is named, and nothing else is lost.
    plain = new_home(tmp_path / "plain")
    assert "no layer of this name exists here" in plain.cachectl("pull", bundle, "--trust").stdout


# ---------------------------------------------------------------------- versions of the interface

MODULE = """
import sys
sys.path.insert(0, {sample!r})
from toyc_cachectl import Toyc

class Mine(Toyc):
    {body}
"""


def offered(home: Home, tmp_path: Path, body: str) -> Home:
    """Have a distribution beside the programs of a home that offers one layer, written here."""
    site = tmp_path / "site"
    (site / "mine-1.0.dist-info").mkdir(parents=True)
    (site / "mine-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (site / "mine-1.0.dist-info" / "entry_points.txt").write_text("[cachectl.layers]\nmine = mine_cachectl:Mine\n")
    (site / "mine_cachectl.py").write_text(MODULE.format(sample=str(SAMPLE), body=body))
    return beside(home, site)


@pytest.mark.parametrize("interface", ["2", *thorough("0", "'1'", "True", "None")])
def test_a_layer_for_another_interface_is_refused_with_both_numbers(home: Home, tmp_path: Path, interface: str) -> None:
    plugged = offered(home, tmp_path, f"name, interface = 'mine', {interface}")
    (broken,) = plugged.json("report")["broken"]
    assert broken["why"].endswith(f"was written for version {interface} of the interface; this cachectl knows 1")


def test_a_layer_that_does_not_say_was_written_for_the_first(home: Home, tmp_path: Path) -> None:
    plugged = offered(home, tmp_path, "name = 'mine'")
    assert plugged.json("report", "mine")["layers"][0]["state"] == "enabled"
    assert Layer.interface == 1


# ---------------------------------------------------------------------- what raises

#: What the sample's store is made with.
FILES = "r'[0-9a-f]{16}.toyc', codec=Toyc.store.codec"

#: As a panic of Rust's and a skip of pytest's are: no Exception.
PANIC = "class Panic(BaseException): pass\n    "


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["", "def __init__(self, environment): raise Mine.Panic('x')"])
def test_a_base_exception_stops_no_verb_and_is_named_by_each(home: Home, tmp_path: Path, where: str) -> None:
    plugged = offered(home, tmp_path, PANIC + (where or "raise Panic('x')"))
    for arguments in (["report"], ["ls"], ["verify"], ["layers"], ["purge", "--all"], ["env", "--disable"], ["doctor"]):
        done = plugged.cachectl(*arguments, check=False)
        assert "Traceback" not in done.stderr
        assert "plug-in mine" in done.stderr + done.stdout, arguments
    assert "plug-in" not in plugged.cachectl("ls", "pocl").stderr


@pytest.mark.parametrize(
    "question", ["roots(self)", *thorough("scan(self, root, *, contents=True)", "remove(self, root, targets)")]
)
def test_nor_does_it_in_a_question(home: Home, tmp_path: Path, question: str) -> None:
    raising = f"def {question}: raise Mine.Panic('x')"
    if question != "roots(self)":
        raising = f"class MineStore(type(Toyc.store)):\n        {raising}\n    store = MineStore({FILES})"
    plugged = offered(home, tmp_path, f"{PANIC}name = 'mine'\n    {raising}")
    plugged.run(*TOYC, "axpy")
    done = plugged.cachectl("purge", "--all", check=False)
    assert done.returncode == 1
    assert "the plug-in failed: Panic: x" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "10 layers: nothing to remove; --all-layers\n"


# ---------------------------------------------------------------------- what hangs


@pytest.mark.parametrize(
    "body",
    [
        "import subprocess; subprocess.run(['sleep', '600'])",
        *thorough(
            "import time; time.sleep(600)",
            "while True: pass",
            "name = 'mine'\n    def __init__(self, environment):\n        import time; time.sleep(600)",
        ),
    ],
)
def test_a_plug_in_that_hangs_is_interrupted_and_named(home: Home, tmp_path: Path, body: str) -> None:
    plugged = offered(home, tmp_path, body)
    done = plugged.cachectl("report", "--json", CACHECTL_PLUGIN_TIMEOUT="0.5")
    report = json.loads(done.stdout)
    why = "mine_cachectl:Mine took longer than 0.5 s; CACHECTL_PLUGIN_TIMEOUT sets how long it may"
    assert report["broken"] == [{"name": "mine", "why": why}]
    assert "pocl" in {layer["layer"] for layer in report["layers"]}


#: Long, so that the answers of other questions come in time on a loaded machine too.
LONG_LIMIT = "3"
GIVEN_UP = "the plug-in failed: took longer than 3 s; CACHECTL_PLUGIN_TIMEOUT sets how long it may"


@pytest.mark.parametrize("question", ["roots(self)", *thorough("state(self)")])
def test_a_question_of_the_report_that_is_never_answered_is_given_up(home: Home, tmp_path: Path, question: str) -> None:
    plugged = offered(home, tmp_path, f"name = 'mine'\n    def {question}:\n        while True: pass")
    done = plugged.cachectl("report", "--json", check=False, CACHECTL_PLUGIN_TIMEOUT=LONG_LIMIT)
    failures = {layer["layer"]: layer["failures"] for layer in json.loads(done.stdout)["layers"]}
    assert (done.returncode, failures["mine"], failures["pocl"]) == (1, [GIVEN_UP], [])


@pytest.mark.thorough
@pytest.mark.parametrize(("question", "refused"), [("switched(self, *, on)", {"disable"}), ("refusals(self)", None)])
def test_a_question_of_abilities_that_is_never_answered_is_given_up(
    home: Home, tmp_path: Path, question: str, refused: set[str] | None
) -> None:
    plugged = offered(home, tmp_path, f"name = 'mine'\n    def {question}:\n        while True: pass")
    # Only `layers` asks these; what is refused is its answer, so its status is 0.
    done = plugged.cachectl("layers", "--json", CACHECTL_PLUGIN_TIMEOUT=LONG_LIMIT)
    abilities = {layer["layer"]: layer["abilities"] for layer in json.loads(done.stdout)["layers"]}
    given_up = {ability for ability, because in abilities["mine"].items() if because == GIVEN_UP}
    assert given_up == (set(abilities["mine"]) if refused is None else refused)
    assert GIVEN_UP not in abilities["pocl"].values()


def test_an_alarm_of_the_program_itself_is_left_alone() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with limited(0.01):
            while not rung:
                time.sleep(0.01)
        assert rung == [signal.SIGALRM]
        with pytest.raises(TookTooLong), limited(0.01):
            signal.pause()
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        signal.raise_signal(signal.SIGALRM)
        assert rung == [signal.SIGALRM] * 2
    finally:
        signal.signal(signal.SIGALRM, before)


def test_another_thread_is_not_interrupted_and_not_failed() -> None:
    done: list[bool] = []

    def work() -> None:
        with limited(0.01):
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


# ---------------------------------------------------------------------- what lies


def lying(tmp_path: Path, *found: Found, roots: tuple[Root, ...] | None = None, **members: object) -> Layer:
    """Guard a layer whose scan, or whose roots, are what is given; ``members`` are answers of its store or its own."""
    spec = importlib.util.spec_from_file_location("toyc_cachectl", SAMPLE / "toyc_cachectl.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    places = (Root(tmp_path, Scope.USER, "default"),) if roots is None else roots
    answers = {name: lambda *_, answer=answer, **__: answer for name, answer in members.items()}
    own = {name: member for name, member in answers.items() if hasattr(Store, name)}
    store = type("LyingStore", (Files,), {"scan": lambda *_, **__: iter(found), **own})(codec=module.ToycCodec())
    others = {name: member for name, member in answers.items() if name not in own}
    lying = type("Lying", (module.Toyc,), {"store": store, "roots": lambda _: places, **others})
    environment = Environment({"HOME": str(tmp_path)}, tmp_path)
    return guarded(lying(environment), environment)


@pytest.mark.parametrize(
    ("root", "key"),
    [("/etc", "passwd"), ("{tmp}", "../outside"), ("{tmp}", "a/../../outside"), ("{tmp}", "/etc/passwd")],
)
def test_an_entry_outside_the_root_is_named_and_never_planned(tmp_path: Path, root: str, key: str) -> None:
    place = Path(root.format(tmp=tmp_path))
    layer = lying(tmp_path, Entry("toyc", "good", tmp_path, 1, 1), Entry("toyc", key, place, 1, 1))
    with pytest.raises(PluginFailed, match="which is not in its root"):
        list(layer.entries())
    plan = layer.plan_clear()
    assert plan.targets == ()
    assert [key in note.because for note in plan.failed] == [True]


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": "pocl"},
        {"bytes": -5},
        {"files": -1},
        {"modified": float("nan")},
        {"used": float("inf")},
        {"device": 7},
        {"versions": {"driver": object()}},
        {"detail": {1: "x"}},
        {"stale": "perhaps"},
    ],
)
def test_an_entry_that_no_report_can_print_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    good = Entry("toyc", "good", tmp_path, 1, 1, modified=1.5, device="d", versions={"a": "b"}, stale=True)
    assert list(lying(tmp_path, good).entries()) == [good]
    with pytest.raises(PluginFailed, match="the plug-in failed: "):
        list(lying(tmp_path, replace(good, **changes)).entries())


@pytest.mark.parametrize(
    ("put", "unset"), [({"A B;rm": "x"}, ()), ({"A": "x\0y"}, ()), ({1: "x"}, ()), ({"A": 1}, ()), ({}, ("P=Q",))]
)
def test_a_variable_that_no_shell_can_set_is_refused(tmp_path: Path, put: dict[Any, Any], unset: tuple[str]) -> None:
    """``eval "$(cachectl env --disable)"`` would run what is no name."""
    layer = lying(tmp_path, switched=Switch("toyc", put, frozenset(unset)))
    with pytest.raises(PluginFailed, match="the plug-in failed: "):
        layer.switched(on=False)
    assert layer.refusals().keys() == {Ability.DISABLE}


def test_an_artifact_of_something_else_is_refused(tmp_path: Path) -> None:
    for layer_name, key in (("pocl", "k"), ("toyc", "other")):
        layer = lying(tmp_path, read=Artifact(layer_name, key, "toyc-kernel/1", b"x"))
        with pytest.raises(PluginFailed, match="returned"):
            layer.get("k")


@pytest.mark.parametrize("place", ["/etc", "{tmp}"])
def test_a_fault_elsewhere_is_not_passed_on(tmp_path: Path, place: str) -> None:
    root = Path(place.format(tmp=tmp_path))
    thing = Entry("toyc", "../etc/passwd", root, 1, 1)
    finding = Finding("toyc", root, "k", Severity.FAILS, "c", "m", "f", thing)
    layer = lying(tmp_path, verify=[finding])
    with pytest.raises(PluginFailed, match=r"returned .*, which is not in its root"):
        list(layer.verify(layer.roots()[0]))


def test_a_problem_elsewhere_is_none_of_its_business(tmp_path: Path) -> None:
    layer = lying(tmp_path, Problem(tmp_path / "x", "damaged", "is"), Problem(Path("/etc"), "damaged", "is"))
    things = layer.scan(layer.roots()[0])
    assert isinstance(next(things), Problem)
    with pytest.raises(PluginFailed, match="returned /etc, which is not in its root"):
        next(things)


@pytest.mark.parametrize("path", ["relative", "/tmp/../etc"])  # noqa: S108 - a name
def test_a_root_that_is_no_place_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(PluginFailed, match="is no absolute path"):
        lying(tmp_path, roots=(Root(Path(path), Scope.USER, "default"),)).roots()


@pytest.mark.parametrize("part", ["lookups = 5", *thorough("portability = 'x'", "tagging = 5")])
def test_a_wrong_part_stops_no_verb_of_all_layers(home: Home, tmp_path: Path, part: str) -> None:
    plugged = offered(home, tmp_path, f"name = 'mine'\n    {part}")
    plugged.run(*TOYC, "axpy")
    traced = plugged.cachectl("trace", "--json", "trace.json", "--", sys.executable, "-c", "print('ran')", check=False)
    assert (traced.returncode, traced.stdout.strip()) == (0, "ran")
    assert plugged.cachectl("push", "all.zip", check=False).returncode == 0


# ---------------------------------------------------------------------- a codec that is wrong


class Wordy(Codec):
    form = "toyc-kernel/1"
    described: Any = Details()
    checked: Any = None

    def describe(self, data: bytes) -> Details:
        del data
        return cast("Details", self.described)

    def check(self, data: bytes) -> Damage | None:
        del data
        return cast("Damage | None", self.checked)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"described": "axpy"}, "Wordy.describe returned str instead of Details"),
        (
            {"described": Details(device=cast("str", 7))},
            "Wordy.describe returned Details whose device is int instead of str or None",
        ),
        ({"checked": "bad"}, "Wordy.check returned str instead of Damage or None"),
        (
            {"checked": Damage(Severity.FAILS, cast("str", 7))},
            "Wordy.check returned Damage whose message is int instead of str",
        ),
    ],
)
def test_a_wrong_answer_of_a_codec_names_its_method(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    codec = Wordy()
    vars(codec).update(wrong)

    class Toyc(Layer):
        name, title = "toyc", "toyc kernels"
        places = EnvPath("TOYC_CACHE_DIR", default=user_cache("toyc"))
        switch = EnvSwitch("TOYC_CACHE", off="0", read=at_load("libtoyc.so"))
        store = Files(r"[0-9a-f]{16}\.toyc", codec=codec)

    environment = Environment({"TOYC_CACHE_DIR": str(tmp_path)}, tmp_path)
    layer = guarded(Toyc(environment), environment)
    (tmp_path / ("0" * 16 + ".toyc")).write_bytes(b"TOYC axpy\n")
    with pytest.raises(PluginFailed) as caught:
        list(layer.entries())
    assert str(caught.value) == f"toyc: the plug-in failed: {words}"
    assert repr(layer).startswith("<GuardedLayer of ")
    assert repr(layer).endswith("Toyc>")
    assert type(layer).__module__ == "cachectl.layers.base.guard"
    # The declaration itself is unchanged.
    assert Toyc.store.codec is codec
