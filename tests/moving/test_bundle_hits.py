"""Bundles: what another home and another environment hit."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.bundles import TRUSTED, keys

from cachectl.layers.cuda.parts import CudaPortability
from cachectl.layers.pocl.parts import PoclPortability
from cachectl.moving.bundle import Item
from cachectl.moving.importing import import_bundle
from cachectl.moving.portability import differences, outlook, portability_key
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home


def content(home: Home) -> dict[str, bytes]:
    """Read every file of a home's caches."""
    folder = home.path / ".cache"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def counts(home: Home) -> dict[str, int]:
    layers = home.json("report")["layers"]
    return {layer["layer"]: layer["entries"] for layer in layers if layer["entries"]}


def programs(home: Home) -> set[Path]:
    return {path.relative_to(home.path) for path in home.path.rglob("program.bc")}


def traced(home: Home, *command: str) -> dict[str, Any]:
    done = home.cachectl("trace", "--json", str(home.path / "trace.json"), "--", sys.executable, *command)
    assert done.returncode == 0
    return {layer["layer"]: layer for layer in json.loads((home.path / "trace.json").read_text())["layers"]}


# ---------------------------------------------------------------------- warm elsewhere


@pytest.mark.real
def test_the_first_run_at_an_empty_home_compiles_nothing(source: Home, packed: Path, home: Home) -> None:
    document = home.json("import", str(packed), "--trust")
    assert document["total"]["placed"] == len(keys(source))
    assert {one["hits"] for layer in document["layers"] for one in layer["outlook"]} == {True}
    before, compiled = counts(home), programs(home)
    assert before == counts(source)
    assert compiled == programs(source)

    layers = traced(home, str(home.programs / "thirteen.py"), "4", "2")

    assert counts(home) == before
    assert programs(home) == compiled
    for name in ("loopy", "pocl"):
        assert layers[name]["hits"] > 0
        assert layers[name]["stores"] == 0
    assert home.json("verify")["findings"] == []


@pytest.mark.real
def test_the_same_content_is_the_same_bytes(source: Home, packed: Path, home: Home, tmp_path: Path) -> None:
    Stack(home.environment()).import_bundle(str(packed), TRUSTED)
    for name, one in (("again", source), ("elsewhere", home)):
        Stack(one.environment()).export(str(tmp_path / name))
        assert (tmp_path / name).read_bytes() == packed.read_bytes()


@pytest.mark.thorough
@pytest.mark.real
def test_bundles_of_two_programs_merge(
    packed: Path, source: Home, home: Home, tmp_path: Path, new_home: Callable[[Path], Home]
) -> None:
    other = new_home(tmp_path / "other")
    other.python("binaries.py", "3")
    other.cachectl("export", str(tmp_path / "other.bundle"))
    for file in (packed, tmp_path / "other.bundle"):
        assert home.json("import", str(file), "--trust")["total"]["failed"] == 0
    assert keys(home) == keys(source) | keys(other)
    compiled = programs(home)

    home.python("thirteen.py", "4", "2")
    home.python("binaries.py", "3")

    assert keys(home) == keys(source) | keys(other)
    assert programs(home) == compiled


@pytest.mark.real
def test_a_selection_of_one_layer_is_exported(source: Home, tmp_path: Path) -> None:
    document = source.json("export", str(tmp_path / "one"), "pocl", "--kernel", "lk1")
    assert [(layer["layer"], layer["entries"]) for layer in document["layers"]] == [("pocl", 1)]
    assert "home" in document["layers"][0]["sensitive"]
    assert document["sha256"] == hashlib.sha256((tmp_path / "one").read_bytes()).hexdigest()
    assert document["bytes"] == (tmp_path / "one").stat().st_size


@pytest.mark.real
def test_a_root_that_others_can_write_is_flagged_there_and_here(
    source: Home, home: Home, new_home: Callable[[Path], Home]
) -> None:
    # Not below the tester's own folder, which nobody else gets into.
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        if not all(path.stat().st_mode & 0o001 for path in Path(place).parents):
            pytest.skip("nobody else gets to the folder of temporary files")
        shutil.copytree(source.path, Path(place) / "home")
        open_home, file = new_home(Path(place) / "home"), str(home.path / "bundle")
        folder = open_home.path / ".cache" / "pocl" / "kcache"
        for path in (folder, *folder.parents[:3]):
            path.chmod(0o755)
        assert open_home.json("export", file, "pocl")["layers"][0]["writable_by_others"] == []
        folder.chmod(0o777)
        assert open_home.json("export", file, "pocl")["layers"][0]["writable_by_others"] == [str(folder)]
    assert "others could write" in home.cachectl("import", file, "--trust").stderr


@pytest.mark.hazard
@pytest.mark.real
def test_an_export_beside_a_running_program_is_whole(
    home: Home, tmp_path: Path, new_home: Callable[[Path], Home]
) -> None:
    program = [sys.executable, str(home.programs / "thirteen.py"), "6", "2"]
    with subprocess.Popen(program, env=dict(home.variables), stdout=-3, stderr=-3) as running:
        number = 0
        while running.poll() is None:
            done = home.cachectl("export", str(tmp_path / f"{number}"), check=False)
            assert "Traceback" not in done.stderr
            # Before the program has stored anything, there is nothing to write.
            assert (tmp_path / f"{number}").exists() or "was not written" in done.stderr
            number += (tmp_path / f"{number}").exists()
        assert running.returncode == 0
    assert number > 2
    for one in range(number):
        other = new_home(tmp_path / f"home{one}")
        placed = Stack(other.environment()).import_bundle(str(tmp_path / f"{one}"), TRUSTED)
        assert [(layer.layer, layer.failed) for layer in placed.layers if layer.failed] == []
        assert other.json("verify")["findings"] == []


# ---------------------------------------------------------------------- what is foreseen


@pytest.mark.real
def test_a_dry_run_places_nothing_and_says_the_same(packed: Path, home: Home) -> None:
    said = home.json("import", str(packed), "--trust", "--dry-run")
    assert not (home.path / ".cache").exists()
    done = home.json("import", str(packed), "--trust")
    assert said["dry_run"] is True
    assert said["total"] == done["total"]
    again = home.json("import", str(packed), "--trust", "--dry-run")["total"]
    assert (again["placed"], again["there"]) == (0, done["total"]["placed"])


@pytest.mark.real
def test_entries_that_cannot_be_hit_are_foreseen_and_left_out(packed: Path, home: Home) -> None:
    environment = replace(home.environment(), python="3.9.1.final.0")
    done = import_bundle(Stack(environment), str(packed), TRUSTED)
    layers = {layer.layer: layer for layer in done.layers}
    assert layers["loopy"].placed == 0
    assert [one.outlook.hits for one in layers["loopy"].foreseen] == [False]
    assert "3.9.1.final.0" in layers["loopy"].foreseen[0].outlook.words
    assert layers["pocl"].cannot_hit == 0
    assert layers["pocl"].placed > 0


def another_venv(path: Path) -> str:
    """Make a virtual environment with a PyOpenCL of its own, the rest being that of this one; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    site = next(path.glob("lib/python*/site-packages"))
    package = importlib.util.find_spec("pyopencl")
    assert package is not None
    assert package.origin is not None
    here = Path(package.origin).parents[1]
    # PyOpenCL looks for PoCL beside itself.
    for folder in (here / "pyopencl", *here.glob("pyopencl-*.dist-info"), *here.glob("pocl*")):
        shutil.copytree(folder, site / folder.name)
    (site / "others.pth").write_text("\n".join(entry for entry in sys.path if entry.startswith("/")) + "\n")
    return str(path / "bin" / "python")


@pytest.mark.thorough
@pytest.mark.real
def test_misses_in_another_virtual_environment_are_those_foreseen(packed: Path, home: Home, tmp_path: Path) -> None:
    python = another_venv(tmp_path / "venv")
    document = json.loads(home.run(python, "-m", "cachectl", "import", str(packed), "--trust", "-n", "--json").stdout)

    seen = {layer["layer"]: layer["outlook"] for layer in document["layers"]}
    assert [one["hits"] for one in seen["pocl"]] == [False]
    assert f"{tmp_path}/venv/lib/" in seen["pocl"][0]["because"]
    assert [one["hits"] for one in seen["loopy"]] == [True]
    # Placed nevertheless, by a cachectl that sees the other PyOpenCL, they are missed there, and only they.
    Stack(home.environment()).import_bundle(str(packed), TRUSTED)
    already, compiled = counts(home), programs(home)
    home.run(python, str(home.programs / "thirteen.py"), "4", "2")
    assert not compiled & (programs(home) - compiled)
    assert len(programs(home)) == 2 * len(compiled)
    assert {**counts(home), "pocl": 0} == {**already, "pocl": 0}


def test_another_driver_or_processor_decides_and_an_unknown_one_does_not(home: Home) -> None:
    environment = home.environment()
    (environment.processes / "driver" / "nvidia").mkdir(parents=True)
    version = environment.processes / "driver" / "nvidia" / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n")
    item = Item("cuda", "0/1/2", "cuda-entry/65", 1, "0" * 64, {}, "sm_90", {"driver": "535.104.05"})
    cuda, pocl = CudaPortability(), PoclPortability()
    there = portability_key(cuda, environment, [item])
    assert there["NVIDIA driver"] == "535.104.05"
    assert there["devices"] == "sm_90"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n")
    differing = differences(cuda, there, portability_key(cuda, environment))
    assert outlook(cuda, item, there, environment, differing).hits is False
    version.unlink()
    differing = differences(cuda, there, portability_key(cuda, environment))
    assert outlook(cuda, item, there, environment, differing).hits is None

    program = Item("pocl", "AA/B", "pocl-entry/1", 1, "0" * 64)
    there = {**portability_key(pocl, environment), "processor": "another"}
    differing = differences(pocl, there, portability_key(pocl, environment))
    assert outlook(pocl, program, there, environment, differing).hits is False
