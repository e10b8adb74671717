"""Every verb is a method of the stack, with the words of the command line, and returns what ``--json`` prints."""

import ast
import inspect
import json
import sys
from typing import Any

import pytest
from documents import validated
from homes import Home
from tiers import real

import cachectl
from cachectl.config import Limits
from cachectl.layers.base import errors as errors_of_layers
from cachectl.layers.core.selection import Selection
from cachectl.layers.disk.own_roots import own_root
from cachectl.show.document import json_bytes
from cachectl.stack import Stack
from cachectl.watching.proof import HOLDS

ENDING_WITH_3 = (sys.executable, "-c", "raise SystemExit(3)")


def as_json(fact: object) -> Any:  # noqa: ANN401 - JSON
    return json.loads(json_bytes(fact))


@real
def test_looking_returns_the_documents_of_the_command_line(warm: Home) -> None:
    stack = warm.stack
    for line, facts in (
        ("ls pocl --sort size --limit 3", stack.ls(layers=["pocl"], sort="size", limit=3)),
        ("verify loopy pocl", stack.verify(layers=["loopy", "pocl"])),
        ("doctor pocl", stack.doctor(layers=["pocl"])),
    ):
        assert validated(as_json(facts)) == warm.json(line)
    report = validated(as_json(stack.report(layers=["pocl"], neighbours=True)))
    printed = warm.json("report pocl --neighbours")
    assert (report["total"], report["layers"]) == (printed["total"], printed["layers"])
    assert {one["name"] for one in report["neighbours"]} >= {"Triton", "CuPy"}


@real
def test_clearing_returns_what_it_did_and_says_what_killed_commands_left(warm: Home) -> None:
    stack = warm.stack
    held = len(stack.ls(layers=["loopy"]).entries)
    foreseen = stack.purge(Selection(kernel="lk0"), layers=["loopy"], dry_run=True)
    assert validated(as_json(foreseen))["layers"][0]["entries"]
    # Names may come from an iterator, which is read once.
    done = stack.purge(Selection(kernel="lk0"), layers=iter(["loopy"]))
    assert [(one.layer, one.removed) for one in done.layers] == [("loopy", foreseen.total.removed)]
    left: list[str] = []
    rest = stack.prune(Limits(max_size=0), layers=["loopy"], notice=left.append)
    assert done.total.removed + rest.total.removed == held
    assert stack.ls(layers=["loopy"]).entries == ()
    assert [line.partition(" stay, although the limit is 0 B: ")[1] != "" for line in left] == [True]


def test_running_returns_the_status_and_the_proof(home: Home) -> None:
    stack = Stack(home.environment())
    said: list[str] = []
    status, proof = stack.run_isolated(ENDING_WITH_3, layers=["loopy"], prove=True, notice=said.append)
    assert status == 3
    assert proof is not None
    assert proof.of(HOLDS) == ("loopy",)
    assert any("is isolated too" in line for line in said)
    assert stack.run_without_cache(ENDING_WITH_3, layers=["pocl"], notice=said.append)[1] is None
    (home.path / "base").mkdir()
    assert stack.run_from(ENDING_WITH_3, home.path / "base", temporary=True, notice=said.append) == (3, None)
    assert "has no entry of any layer" in said[-1]
    assert not own_root(stack.environment, home.path / "base").exists()
    assert stack.run(ENDING_WITH_3, notice=said.append) == (3, None)
    traced = stack.trace(ENDING_WITH_3, explain=True, notice=said.append)
    assert (traced.exit_status, traced.kernels, traced.missed) == (3, (), ())


def test_wrong_calls_are_errors_for_a_type_checker_too(home: Home) -> None:
    """Where mypy does not see one of these errors, it reports the comment as unused."""
    stack = cachectl.Stack(home.environment())
    with pytest.raises(TypeError):
        stack.purge(selecton=cachectl.Selection())  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        stack.pull()  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        stack.prune(limits="30d", dry_run=True)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        stack.report().totals  # type: ignore[attr-defined] # noqa: B018 - it is read
    with pytest.raises(TypeError):
        stack.store()  # type: ignore[call-arg]


def test_a_type_checker_sees_every_verb_of_a_stack() -> None:
    (checked,) = (node for node in ast.walk(ast.parse(inspect.getsource(cachectl.Stack))) if isinstance(node, ast.If))

    def names(statements: list[ast.stmt]) -> list[str]:
        return [ast.unparse(one.targets[0]) if isinstance(one, ast.Assign) else "store" for one in statements]

    assert names(checked.body) == names(checked.orelse)


def test_public_names_are_there_and_what_is_shown_of_results_is_short(home: Home) -> None:
    names = {"Stack", "disabled", "isolated", "traced", "Selection", "Trust", "Limits", "CachectlError", "StillOn"}
    assert names < set(cachectl.__all__)
    assert all(getattr(cachectl, name) for name in cachectl.__all__)
    errors = {name for name, thing in vars(errors_of_layers).items() if isinstance(thing, type)}
    assert errors < set(cachectl.__all__)
    stack = cachectl.Stack(home.environment())
    plan = stack.plan_clear()
    for result in (stack, stack["pocl"], stack.report(), plan, plan.layers[4], plan.apply()):
        assert len(repr(result)) < 200
