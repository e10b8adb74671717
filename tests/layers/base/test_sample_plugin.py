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
