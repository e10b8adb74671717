"""The doctor as a whole: what it says of a home, and what fails stops nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
from support.doctor import HOMELY, ROOT, coded, dictionary, environment_of, examine, leak, make, only, stale_lock

from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Finding, Hazard, Root, Scope, Severity
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.parts import About
from cachectl.layers.base.registry import Broken
from cachectl.layers.comgr import ComgrCodec
from cachectl.layers.stores.files import Files
from cachectl.stack import Stack
from cachectl.verbs.doctor import diagnosis

if TYPE_CHECKING:
    from homes import Home


@pytest.mark.real
def test_a_filled_home_is_well(warm: Home) -> None:
    # The first command records which Pythons there are.
    warm.cachectl("ls")
    before = snapshot(warm.path, times=True)
    done = warm.cachectl("doctor", *HOMELY, "--json")
    findings = json.loads(done.stdout)["findings"]
    assert {finding["severity"] for finding in findings} <= {"harmless"}
    # PoCL leaks an empty file in every process.
    assert {finding["code"] for finding in findings} <= {"leaked"}
    assert snapshot(warm.path, times=True) == before


def test_an_empty_home_is_well(home: Home) -> None:
    assert home.cachectl("doctor", *HOMELY).stdout == "nothing is wrong\n"
    assert home.json("doctor", *HOMELY) == {"schema": "cachectl/findings/1", "findings": []}


def test_space_is_told_where_it_is_short(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachectl.verbs.doctor._NEARLY_FULL", (1 << 62, 0))
    finding, fix = home.cachectl("doctor", *HOMELY, check=False).stdout.splitlines()
    assert "the file system has room for " in finding
    assert fix == "  fix: remove other files there"


def test_nothing_changes_on_disk_however_much_is_wrong(cuda: Home) -> None:
    wreck(cuda.path)
    # The first command records which Pythons there are.
    cuda.cachectl("ls", check=False)
    before = snapshot(cuda.path, times=True)
    wrong = {"CUDA_CACHE_MAXSIZE": "1000", "SLURM_NTASKS": "4", "LOOPY_NO_CACHE": "x"}
    done = cuda.cachectl("doctor", "--python", sys.executable, "--json", check=False, **wrong)
    codes = {finding["code"] for finding in json.loads(done.stdout)["findings"]}
    assert codes >= {"variable", "cap", "ranks", "stale", "lock", "leaked", "sqlite"}
    assert done.returncode == 1
    assert done.stderr == ""
    assert snapshot(cuda.path, times=True) == before


def wreck(home: Path) -> None:
    dictionary(home, Environment.here().python)
    leak(home)
    stale_lock(home)
    file = home / ".cache" / "pytools" / f"pdict-v5-loopy-x-{Environment.here().python}.sqlite"
    file.write_bytes(b"not sqlite" * 99)


def test_text_names_the_cause_and_the_command(home: Home) -> None:
    done = home.cachectl("doctor", "loopy", check=False, LOOPY_NO_CACHE="1")
    assert done.returncode == 1
    first, second = done.stdout.splitlines()
    assert "LOOPY_NO_CACHE=1 switches loopy code generation off (recompiles every run)" in first
    assert second == "  fix: unset LOOPY_NO_CACHE"


def test_the_worst_comes_first_and_what_is_damaged_is_among_it(home: Home) -> None:
    wreck(home.path)
    found = examine(home.environment(LOOPY_NO_CACHE="1"), "loopy")
    assert [finding.code for finding in found] == ["sqlite", "off"]
    assert found[0].severity is Severity.FAILS


def test_harmless_findings_are_status_0(home: Home) -> None:
    leak(home.path)
    assert home.cachectl("doctor", "pocl").returncode == 0
    assert home.cachectl("doctor", "pocl", check=False, POCL_KERNEL_CACHE="0").returncode == 1


def sick(environment: Environment, failing: str = "", **members: object) -> Layer:
    """Return a layer of somebody else that is wrong: its state, and one other answer, are exceptions."""
    root = Root(environment.home, Scope.USER, "default")

    def failed(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(failing)

    def told(code: str) -> Callable[..., Iterator[Finding]]:
        finding = Finding("sick", root.path, code, Severity.FAILS, code, "something", "nothing")
        return lambda *_: iter((finding,))

    missing = dict.fromkeys(("read", "write", "remove"))
    of_store: dict[str, object] = {"scan": lambda *_, **__: iter(()), "verify": told("damaged")}
    of_layer: dict[str, object] = {"roots": lambda _: (root,), "diagnose": told("reported")}
    (of_store if failing in of_store else of_layer)[failing or "state"] = failed
    store = type("SickStore", (Files,), {**missing, **of_store})("sick", codec=ComgrCodec())
    failures = dict.fromkeys(("state", "switched", "relocate"), failed)
    own = {"name": "sick", "title": "a sick layer", "store": store, **failures}
    layer: Layer = type("Sick", (Layer,), {**own, **of_layer, **members})(environment)
    return layer


@pytest.mark.parametrize(
    ("failing", "codes"),
    [("roots", {"reported"}), ("scan", {"reported", "damaged"}), ("diagnose", {"damaged"}), ("verify", {"reported"})],
)
def test_a_plugin_that_fails_stops_neither_itself_nor_the_others(tmp_path: Path, failing: str, codes: set[str]) -> None:
    environment = environment_of(tmp_path, LOOPY_NO_CACHE="1")
    found = diagnosis((sick(environment, failing), *Stack(environment, plugins=False))).findings
    failed = only([finding for finding in found if finding.layer == "sick"], "plugin")
    assert failing in failed.message
    assert {finding.code for finding in found if finding.layer == "sick"} == {*codes, "plugin"}
    assert only(found, "off").layer == "loopy"


def test_the_hazard_of_a_plugin_is_reported(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, PMI_SIZE="2")
    hazard = Hazard(Severity.RISKS, "it was not made for this")
    found = only(diagnosis((sick(environment, about=About(among_ranks=hazard)),)).findings, "ranks")
    assert found.message == "the ranks of this job share it: it was not made for this".replace("ranks", "2 ranks")
    assert found.fix.startswith("nothing moves it: ")


def test_a_plugin_without_a_layer_is_reported() -> None:
    (found,) = diagnosis((), (Broken("odd", "it cannot be imported"),)).findings
    assert (found.code, found.layer) == ("plugin", "odd")
    assert found.severity is Severity.HARMLESS


@pytest.mark.skipif(ROOT, reason="the superuser reads everything")
def test_an_unreadable_root_is_reported_once_by_each_layer(home: Home) -> None:
    unreadable, closed = home.path / ".cache" / "pytools", home.path / ".cache" / "pocl"
    make(unreadable, closed / "kcache")
    unreadable.chmod(0)
    closed.chmod(0)
    try:
        found = examine(home.environment(LOOPY_NO_CACHE="1"))
    finally:
        unreadable.chmod(0o700)
        closed.chmod(0o700)
    reported = [finding.layer for finding in coded(found, "unreadable")]
    # PoCL has two roots there.
    assert reported == ["loopy", "pyopencl-invoker", "pytools", "pocl", "pocl"]
    assert {finding.code for finding in found} == {"off", "unreadable"}
