"""A third party's distribution, installed as one, is a layer of every verb; and what a plug-in does wrong is named."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tiers import thorough

from cachectl.layers.base.layer import Layer

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
    plugged.cachectl("purge", "toyc", "--damaged")
    plugged.cachectl("put", "toyc", key, "entry")
    assert plugged.run(*TOYC, "axpy").stdout == "axpy found\n"
    purged = {layer["layer"]: layer["removed"] for layer in plugged.json("purge", "--all")["layers"]}
    assert purged["toyc"] == 2
    assert plugged.run(*TOYC, "axpy", "dot").stdout == "axpy made\ndot made\n"


def test_it_travels_with_all_others(
    plugged: Home, installed: Path, tmp_path: Path, new_home: Callable[[Path], Home]
) -> None:
    plugged.run(*TOYC, "axpy", "dot")
    bundle = str(tmp_path / "bundle")
    exported = {layer["layer"]: layer for layer in plugged.json("export", bundle)["layers"]}
    assert (exported["toyc"]["entries"], exported["toyc"]["sensitive"]) == (2, "names of your kernels")
    elsewhere = beside(new_home(tmp_path / "elsewhere"), installed)
    said = elsewhere.cachectl("import", bundle, "--trust", "--dry-run").stdout
    assert "toyc: 2 will hit" in said
    assert not (elsewhere.path / ".cache").exists()
    elsewhere.cachectl("import", bundle, "--trust")
    assert elsewhere.run(*TOYC, "axpy", "dot").stdout == "axpy found\ndot found\n"
    # Without the plug-in it is named, and nothing else is lost.
    plain = new_home(tmp_path / "plain")
    done = plain.cachectl("import", bundle, "--trust", check=False)
    assert done.returncode == 1
    assert "no layer of this name exists here" in done.stderr


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


@pytest.mark.parametrize("interface", ["2", *thorough("0", "'1'", "None")])
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
    assert done.stdout == "10 layers: nothing to remove\n"
