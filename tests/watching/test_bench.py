"""``cachectl bench``: real programs on PoCL in every setting, and what the figures say of each layer."""

import json
import statistics
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from homes import PROGRAMS, Home
from tiers import real, thorough_only

from cachectl.layers.core.conformance import snapshot
from cachectl.show.table import Table
from cachectl.verbs.bench import Bench, BenchSetting, Machine, Saved, show


def bench(home: Home, *arguments: str, command: tuple[str, ...]) -> Any:  # noqa: ANN401 - JSON
    done = home.cachectl("bench", *arguments, "--json", "-", "--", *command)
    return {**json.loads(done.stdout), "said": done.stderr}


def program(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(PROGRAMS / name), *arguments)


@thorough_only
@real
def test_seconds_saved_are_differences_of_medians_and_a_warm_home_is_neither_read_nor_written(warm: Home) -> None:
    # The first command in a home records the Pythons.
    warm.cachectl("report")
    before = snapshot(warm.path, times=True)
    measured = bench(warm, "-n", "2", command=program("kernels.py", "1"))
    assert snapshot(warm.path, times=True) == before
    settings = {one["setting"]: one for one in measured["settings"]}
    assert all(one["median"] == statistics.median(one["seconds"]) > 0 for one in settings.values())
    assert {one["layer"] for one in measured["saved_by_layer"]} == {"loopy", "pyopencl-invoker", "pocl"}
    filled = settings["warm"]
    for one in measured["saved_by_layer"]:
        off = settings[f"{one['layer']} off"]
        assert one["seconds"] == off["median"] - filled["median"]
        assert one["seen"] == (min(off["seconds"]) > max(filled["seconds"]))
        assert one["by_round"] == [cold - hot for cold, hot in zip(off["seconds"], filled["seconds"], strict=True)]
    assert measured["not_used"]["cuda"] == "the command stores nothing in it"
    assert "PoCL" in measured["machine"]["drivers"]


@thorough_only
@real
def test_layers_of_one_switch_are_emptied_one_at_a_time(home: Home, tmp_path: Path) -> None:
    """PyOpenCL has one switch for both of its caches, so off is off for both: each is emptied for its turn."""
    log = tmp_path / "log"
    script = f"{' '.join(program('binaries.py', '2'))} | tail -n 1 >> {log}"
    measured = bench(home, "-n", "1", command=("sh", "-c", script))
    settings = {one["setting"]: one for one in measured["settings"]}
    assert settings["pyopencl off"]["how"] == "emptied: it shares its switch with pyopencl-invoker"
    assert settings["pyopencl-invoker off"]["how"] == "emptied: it shares its switch with pyopencl"
    fills = len(log.read_text().splitlines()) - len(settings)
    said = [json.loads(line)["said"] for line in log.read_text().splitlines()[fills:]]
    hits = {name: sum("cache hit" in line for line in lines) for name, lines in zip(settings, said, strict=True)}
    assert hits == {name: 0 if name in ("pyopencl off", "cold", "off") else 2 for name in settings}


def test_rounds_begin_with_another_setting_each(home: Home, tmp_path: Path) -> None:
    log = tmp_path / "log"
    # It is given nothing to read.
    script = f'echo "${{POCL_KERNEL_CACHE}}$(cat)" >> {log}'
    measured = bench(home, "-n", "3", command=("sh", "-c", script))
    assert [one["setting"] for one in measured["settings"]] == ["warm", "cold", "off"]
    assert measured["saved_by_layer"] == []
    # After two runs that fill nothing: warm cold off, cold off warm, off warm cold.
    assert "".join(log.read_text().split()) == "11" + "110" + "101" + "011"


def test_a_failing_command_ends_it_with_its_own_status(home: Home, tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    script = "echo of no use; echo what went wrong >&2; exit 7"
    done = home.cachectl(f"bench --json {target} -- sh -c", script, check=False)
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.splitlines() == [
        "command: what went wrong",
        "cachectl: the command ended with status 7 in its first run, so nothing is compared",
    ]
    assert not target.exists()
    assert home.cachectl("bench -- sh -c", "kill -9 $$", check=False).returncode == 137


@thorough_only
def test_plots_name_the_command_and_every_setting(home: Home, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, svg = tmp_path / "bars.png", tmp_path / "bars.svg"
    # A picture that bench drew may be replaced.
    for file in (png, svg, svg):
        home.cachectl(f"bench -n 2 --plot {file} -- sh -c", ": $x_1$ 10%")
    assert png.read_bytes().startswith(b"\x89PNG\r\n")
    words = [element.text for element in ET.parse(svg).iter() if element.tag.endswith("}text")]  # noqa: S314 - our own
    assert {"sh -c ': $x_1$ 10%'", "all caches warm", "all caches cold", "all caches off"} <= set(words)
    assert any(word and word.endswith("2 times each") for word in words)


def test_a_difference_within_the_range_of_warm_runs_is_not_seen() -> None:
    settings = (BenchSetting("warm", "", None, [1.0, 3.0]),)
    saved = (Saved("loopy", 1.35, (-0.1, 2.8), 3, seen=False), Saved("pocl", 2.0, (1.9, 2.1), 3, seen=True))
    measured = Bench((), settings, saved, {}, Machine(None, None, (), "", ()))
    shown = [part for part in show(measured) if isinstance(part, Table)]
    assert [row[-1] for row in shown[1].rows] == ["no difference seen", ""]
