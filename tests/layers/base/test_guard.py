"""The guard around a plug-in's layer: it passes on every member of the interface, and checks every answer."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import LayerError
from cachectl.layers.base.facts import (
    Artifact,
    Bulk,
    Census,
    ClearPlan,
    Condition,
    Entry,
    Finding,
    Foresight,
    Hazard,
    Orphan,
    Outcome,
    Patch,
    Quarantined,
    Root,
    Scope,
    Severity,
    State,
    Switch,
    Target,
    Unverified,
)
from cachectl.layers.base.guard import Contained, PluginFailed
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.registry import Broken, plugged_in
from cachectl.layers.base.selection import ALL

if TYPE_CHECKING:
    from homes import Home

PLUGIN = Path(__file__).parents[2] / "plugin"

PLACE = Path("/somewhere/notes")
ROOT = Root(PLACE, Scope.USER, "default")
ENTRY = Entry("notes", "k", PLACE, 1, 1)
ARTIFACT = Artifact("notes", "k", "notes/1", b"x")
TARGET = Target(PLACE, "k", 1, 1, ())
FINDING = Finding("notes", PLACE, "k", Severity.FAILS, "code", "message", "fix", ENTRY)
SWITCH = Switch("notes", {"NOTES_OFF": "1"})
UNVERIFIED = Unverified("notes", "machine code of", 1, "file")
HELD = Quarantined("1", "notes", PLACE, "k", 1, 0.0, "code", "message")
ELSEWHERE = Environment({"HOME": "/elsewhere"}, Path("/elsewhere"))


@dataclass(frozen=True)
class Question:
    """How a member is asked, what a right answer is, and what the caller of the guard then gets."""

    ask: Callable[[Layer], Any]
    answer: Any
    #: ``None`` is a right answer too.
    optional: bool = False


QUESTIONS = {
    "roots": Question(lambda layer: layer.roots(), (ROOT,)),
    "state": Question(lambda layer: layer.state(), State(Condition.ENABLED, "on")),
    "scan": Question(lambda layer: layer.scan(ROOT), [ENTRY]),
    "searched": Question(lambda layer: layer.searched(ROOT, ALL), [ENTRY]),
    "counted": Question(lambda layer: layer.counted(ROOT), [ENTRY, Bulk(2, 2, 5, None, 1.0)]),
    "census": Question(lambda layer: layer.census(ROOT), Census(1, 1, 1)),
    "read": Question(lambda layer: layer.read(ROOT, "k"), ARTIFACT, optional=True),
    "read_many": Question(lambda layer: layer.read_many(ROOT, ["k", "l"]), {"k": ARTIFACT}),
    "write": Question(lambda layer: layer.write(ROOT, "k", ARTIFACT, replace=True), None, optional=True),
    "write_new": Question(lambda layer: layer.write_new(ROOT, [ARTIFACT]), [True]),
    "remove": Question(lambda layer: layer.remove(ROOT, (TARGET,)), Outcome("notes", 1, 1)),
    "is_key": Question(lambda layer: layer.is_key("k"), answer=True),
    "held_in": Question(lambda layer: layer.held_in(ROOT, ["k"]), {"k": (PLACE,)}),
    "lock_files": Question(lambda layer: layer.lock_files(ROOT, ["k"]), (PLACE,)),
    "foresee_removal": Question(lambda layer: layer.foresee_removal(ROOT, (TARGET,)), Foresight((TARGET,), 1)),
    "foresee_write": Question(lambda layer: layer.foresee_write(ROOT, ["k"]), {"k": LayerError("notes", "full")}),
    "switched": Question(lambda layer: layer.switched(on=False), SWITCH),
    "relocate": Question(lambda layer: layer.relocate(PLACE), SWITCH),
    "refresher": Question(lambda layer: layer.refresher(), SWITCH, optional=True),
    "verify": Question(lambda layer: layer.verify(ROOT), [FINDING]),
    "examine": Question(lambda layer: layer.examine(ROOT, deep=True), [FINDING, UNVERIFIED]),
    "diagnose": Question(lambda layer: layer.diagnose(), [FINDING]),
    "set_aside": Question(lambda layer: layer.set_aside(ROOT, TARGET, HELD), "why", optional=True),
    "bring_back": Question(lambda layer: layer.bring_back(ROOT, HELD, replace=True), None, optional=True),
    "marked": Question(lambda layer: layer.marked(ROOT, re.compile(b"salt_1_"), 0.0, {"k"}), [(ENTRY, "salt_1_")]),
    "idle_gate": Question(lambda layer: layer.idle_gate([ENTRY]), [(ENTRY, "in use")]),
    "claims": Question(lambda layer: layer.claims(ROOT, ("a",)), answer=True, optional=True),
    "lacking": Question(lambda layer: layer.lacking(), (ROOT,)),
    "recover": Question(lambda layer: layer.recover(ROOT), None, optional=True),
    "plan_everything": Question(
        lambda layer: layer.plan_everything(ROOT), ClearPlan("notes", (TARGET,)), optional=True
    ),
}

#: Members that are asked otherwise: what cannot be done, and the same layer in another environment.
APART = {"refusals", "elsewhere"}


def notes() -> type[Layer]:
    """Load the plug-in's layer."""
    spec = importlib.util.spec_from_file_location("cachectl_test_plugin", PLUGIN / "cachectl_test_plugin.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    layer: type[Layer] = module.Notes
    return layer


def guarded(tmp_path: Path, **members: Any) -> Contained:  # noqa: ANN401 - whatever a plug-in says
    """Guard a layer whose members are these."""
    environment = Environment({"HOME": str(tmp_path)}, tmp_path)
    return Contained(type("Mine", (notes(),), members)(environment), environment)


def members() -> set[str]:
    """Name the methods of the interface that a plug-in may write."""
    return {
        name
        for name, member in vars(Layer).items()
        if inspect.isfunction(member) and not name.startswith("_") and "@final" not in inspect.getsource(member)
    }


def attributes() -> dict[str, Any]:
    """Map every attribute of the interface to another value than that of the base and of the guard."""
    values: dict[str, Any] = {"interface": 1, "name": "mine", "title": "another", "forms": ("mine/2",)}
    values |= {"scope": Scope.SYSTEM, "precious": True, "failure_mark": re.compile("mine-[0-9]+")}
    values |= {"clearing_needs_room": True}
    return values | dict.fromkeys(("on_network", "among_ranks", "when_closed"), Hazard(Severity.UNSAFE, "is unsafe"))


def test_every_member_of_the_interface_is_guarded() -> None:
    assert members() == QUESTIONS.keys() | APART
    assert members() <= vars(Contained).keys()
    assert {name for name in Layer.__annotations__ if not name.startswith("_")} == attributes().keys()


def test_every_attribute_is_the_plug_ins_own(tmp_path: Path) -> None:
    layer = guarded(tmp_path, **attributes())
    assert {name: getattr(layer, name) for name in attributes()} == attributes()


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_plug_ins_own_answer_is_passed_on(tmp_path: Path, name: str) -> None:
    question = QUESTIONS[name]
    asked: list[str] = []

    def own(_: Layer, *__: object, **___: object) -> object:
        asked.append(name)
        return question.answer

    answer = question.ask(guarded(tmp_path, **{name: own}))
    assert (list(answer) if isinstance(answer, Iterator) else answer) == question.answer
    assert asked == [name]


def consume(answer: object) -> None:
    """Iterate over an answer that is made while somebody does."""
    if isinstance(answer, Iterator):
        deque(answer, maxlen=0)


def fails(tmp_path: Path, name: str, wrong: object) -> PluginFailed:
    """Have a plug-in answer one question so, and return the error."""
    question = QUESTIONS[name]
    layer = guarded(tmp_path, **{name: lambda _, *__, **___: wrong})
    with pytest.raises(PluginFailed) as caught:
        consume(question.ask(layer))
    return caught.value


@pytest.mark.parametrize("name", [name for name, question in QUESTIONS.items() if not question.optional])
def test_none_is_an_error_that_names_the_plug_in(tmp_path: Path, name: str) -> None:
    assert str(fails(tmp_path, name, None)).startswith("notes: the plug-in failed: TypeError")


STRAY = replace(ENTRY, key="../outside")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("remove", Outcome("notes", remade=None)),  # type: ignore[arg-type]
        ("remove", Outcome("notes", remade=("a",))),  # type: ignore[arg-type]
        ("remove", Outcome("pocl")),
        ("plan_everything", ClearPlan("notes", remake=None)),  # type: ignore[arg-type]
        ("plan_everything", ClearPlan("notes", (replace(TARGET, key="../outside"),))),
        ("plan_everything", ClearPlan("notes", (replace(TARGET, bytes=None),))),  # type: ignore[arg-type]
        ("searched", [STRAY]),
        ("searched", [Bulk(1, 1, 1, None, None)]),
        ("counted", [STRAY]),
        ("counted", [Bulk(-1, 1, 1, None, None)]),
        ("counted", [Bulk(1, 1, 1, float("nan"), None)]),
        ("read_many", ["k"]),
        ("read_many", {"other": ARTIFACT}),
        ("write_new", [True, True]),
        ("write_new", [None]),
        ("write_new", True),
        ("marked", [(STRAY, "salt_1_")]),
        ("marked", [(ENTRY, "no such mark")]),
        ("marked", [(replace(ENTRY, key="l"), "")]),
        ("idle_gate", [(Orphan("other", PLACE, 1, 1, 0.0, "why"), None)]),
        ("lacking", (replace(ROOT, path=Path("relative")),)),
        ("switch", Switch("notes", drops=((1, 2),))),  # type: ignore[arg-type]
        ("switch", Switch("notes", reloads=("ab",))),  # type: ignore[arg-type]
        ("switch", Switch("notes", platforms=(1,))),  # type: ignore[arg-type]
        ("switch", Switch("notes", patches=(Patch("m", None, "f", None),))),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_answer_is_an_error_that_names_the_plug_in(tmp_path: Path, name: str, wrong: object) -> None:
    assert str(fails(tmp_path, name, wrong)).startswith("notes: the plug-in failed: ")


def test_one_entry_that_is_wrong_keeps_no_other_from_being_read(tmp_path: Path) -> None:
    other = replace(ARTIFACT, key="l")
    wrong = replace(other, detail={"n": 3})  # type: ignore[dict-item]
    answer = {"k": ARTIFACT, "l": wrong, "m": None, "n": OSError("gone"), "o": other}
    layer = guarded(tmp_path, read_many=lambda *_: answer)
    found = layer.read_many(ROOT, list(answer))
    assert (found["k"], found["n"]) == (ARTIFACT, answer["n"])
    assert {key for key, one in found.items() if isinstance(one, PluginFailed)} == {"l", "m", "o"}


def test_without_an_answer_of_its_own_every_entry_is_guarded(tmp_path: Path) -> None:
    """Layer's own code asks the guard then, and not the plug-in past it."""

    def read(_: Layer, __: Root, key: str) -> Artifact:
        if key == "l":
            raise RuntimeError("on purpose")
        return replace(ARTIFACT, key=key)

    layer = guarded(tmp_path, read=read, scan=lambda *_, **__: iter([ENTRY, STRAY]))
    found = layer.read_many(ROOT, ["k", "l"])
    assert found["k"] == ARTIFACT
    assert isinstance(found["l"], PluginFailed)
    for ask in (layer.census, layer.counted, lambda root: layer.searched(root, ALL)):
        with pytest.raises(PluginFailed, match="which is not in its root"):
            consume(ask(ROOT))


def test_what_is_wrong_with_one_artifact_leaves_the_others_to_be_placed(tmp_path: Path) -> None:
    def write(_: Layer, __: Root, key: str, ___: Artifact, *, replace: bool) -> None:
        del replace
        if key == "l":
            raise RuntimeError("on purpose")

    layer = guarded(tmp_path, read=lambda *_: None, write=write)
    first, second, third = layer.put_new([replace(ARTIFACT, key=key) for key in "klm"])
    assert (first, third) == (True, True)
    assert isinstance(second, PluginFailed)


def test_a_layer_in_another_environment_is_guarded_too(tmp_path: Path) -> None:
    moved = guarded(tmp_path).elsewhere(ELSEWHERE)
    assert isinstance(moved, Contained)
    assert moved.environment is ELSEWHERE
    assert moved.roots()[0].path == Path("/elsewhere/.cache/notes")
    for wrong in (None, "a layer"):
        with pytest.raises(PluginFailed):
            guarded(tmp_path, elsewhere=lambda *_, wrong=wrong: wrong).elsewhere(ELSEWHERE)
    with pytest.raises(LayerError):
        guarded(tmp_path, __init__=_takes_one).elsewhere(ELSEWHERE)


def _takes_one(layer: Layer, environment: Environment) -> None:
    if environment is ELSEWHERE:
        raise RuntimeError("only one")
    Layer.__init__(layer, environment)


OPTIONAL = ("on_network", "among_ranks", "when_closed", "failure_mark")


@pytest.mark.parametrize("wrong", ["nonsense", 7, re.compile(b"bytes")])
@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_attribute_that_is_wrong_has_its_default(tmp_path: Path, name: str, wrong: object) -> None:
    assert getattr(guarded(tmp_path, **{name: wrong}), name) == getattr(Layer, name)


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_attribute_may_be_none(tmp_path: Path, name: str) -> None:
    assert getattr(guarded(tmp_path, **{name: None}), name) is None


@pytest.mark.parametrize("name", sorted(attributes().keys() - set(OPTIONAL)))
def test_an_attribute_that_is_none_is_named_when_the_plug_in_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    environment = Environment({"HOME": str(tmp_path)}, tmp_path)

    class Point:
        name = value = "mine"

        @staticmethod
        def load() -> type[Layer]:
            return type("Mine", (notes(),), {name: None})

    monkeypatch.setattr("cachectl.layers.base.registry.entry_points", lambda _: [Point])
    (broken,) = plugged_in(environment)
    assert isinstance(broken, Broken)


def test_a_started_library_of_a_plug_in_is_judged(home: Home) -> None:
    """``disabled()`` asks such a layer for the variables that its process began with."""
    (home.path / "latched.py").write_text(
        "from cachectl_test_plugin import Notes\n"
        "from cachectl.layers.base.facts import Switch\n"
        "class Latched(Notes):\n"
        "    name = 'latched'\n"
        "    def switched(self, *, on):\n"
        "        return Switch(self.name, {'NOTES_OFF': '' if on else '1'}, latches=('libc',))\n"
    )
    installed = home.path / "latched-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: latched\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[cachectl.layers]\nlatched = latched:Latched\n")
    program = (
        "import cachectl, json\n"
        "with cachectl.disabled('latched', strict=False) as held:\n"
        "    print(json.dumps([held['latched'].status, held['latched'].why]))\n"
    )
    path = os.pathsep.join([str(home.path), str(PLUGIN), *filter(None, [home.variables.get("PYTHONPATH")])])
    for off, status in (("1", "off"), ("", "on")):
        done = home.run(sys.executable, "-W", "ignore", "-c", program, PYTHONPATH=path, NOTES_OFF=off)
        assert json.loads(done.stdout)[0] == status
