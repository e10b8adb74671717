"""Neighbours: places by their own variables, sizes counted and bounded, and nothing but on request."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.environment import Environment
from cachectl.layers.host.neighbours import neighbours

if TYPE_CHECKING:
    from homes import Home


def places(variables: dict[str, str], home: Path) -> dict[str, tuple[str, str]]:
    given = {"HOME": str(home), "USER": "a/b", **variables}
    environment = Environment(given, home, cwd=home, temporary=home / "scratch")
    return {one.name: (str(one.path), one.source) for one in neighbours(environment)}


#: Variables, and the places that they give; the other libraries have their defaults.
PLACES: list[tuple[dict[str, str], dict[str, tuple[str, str]]]] = [
    (
        {},
        {
            "Triton": ("{home}/.triton/cache", "default"),
            "CuPy": ("{home}/.cupy/kernel_cache", "default"),
            "Numba": ("{home}/.cache/numba", "default"),
            "PyOP2": ("{home}/scratch/pyop2-cache-uid{uid}", "default"),
            "TSFC": ("{home}/scratch/firedrake-tsfc-kernel-cache-uid{uid}", "default"),
            "torch inductor": ("{home}/scratch/torchinductor_a_b", "default"),
        },
    ),
    ({"TRITON_CACHE_DIR": "/t", "TRITON_HOME": "/x"}, {"Triton": ("/t", "TRITON_CACHE_DIR")}),
    ({"TRITON_HOME": "/t"}, {"Triton": ("/t/.triton/cache", "TRITON_HOME")}),
    ({"CUPY_CACHE_DIR": "/t"}, {"CuPy": ("/t", "CUPY_CACHE_DIR")}),
    ({"NUMBA_CACHE_DIR": "/t"}, {"Numba": ("/t", "NUMBA_CACHE_DIR")}),
    ({"XDG_CACHE_HOME": "/x"}, {"Numba": ("/x/numba", "XDG_CACHE_HOME")}),
    ({"PYOP2_CACHE_DIR": "/t"}, {"PyOP2": ("/t", "PYOP2_CACHE_DIR")}),
    ({"VIRTUAL_ENV": "{home}/venv"}, {"PyOP2": ("{home}/venv/.cache/pyop2", "VIRTUAL_ENV")}),
    ({"FIREDRAKE_TSFC_KERNEL_CACHE_DIR": "/t"}, {"TSFC": ("/t", "FIREDRAKE_TSFC_KERNEL_CACHE_DIR")}),
    ({"TORCHINDUCTOR_CACHE_DIR": "/t"}, {"torch inductor": ("/t", "TORCHINDUCTOR_CACHE_DIR")}),
    ({"JAX_COMPILATION_CACHE_DIR": "/t"}, {"JAX": ("/t", "JAX_COMPILATION_CACHE_DIR")}),
    ({"JAX_COMPILATION_CACHE_DIR": "gs://bucket/cache"}, {}),
]


@pytest.mark.parametrize(("variables", "expected"), PLACES)
def test_places(tmp_path: Path, variables: dict[str, str], expected: dict[str, tuple[str, str]]) -> None:
    (tmp_path / "venv" / ".cache" / "pyop2").mkdir(parents=True)

    def filled(text: str) -> str:
        return text.format(home=tmp_path, uid=os.getuid())

    defaults = PLACES[0][1]
    found = places({name: filled(value) for name, value in variables.items()}, tmp_path)
    assert found == {name: (filled(path), source) for name, (path, source) in {**defaults, **expected}.items()}


def test_sizes_are_counted_to_the_end_or_unknown(tmp_path: Path) -> None:
    folder = tmp_path / ".triton" / "cache"
    (folder / "below").mkdir(parents=True)
    (folder / "one").write_bytes(bytes(100))
    (folder / "below" / "two").write_bytes(bytes(23))
    (folder / "link").symlink_to("/usr")
    environment = Environment({"HOME": str(tmp_path)}, tmp_path, cwd=tmp_path, temporary=tmp_path / "tmp")
    triton, *others = neighbours(environment)
    assert (triton.files, triton.bytes, triton.exists) == (2, 123, True)
    assert not any(one.exists for one in others)
    assert replace(triton, files=None, bytes=None) == neighbours(environment, most=1)[0]


def test_the_report_names_them_when_asked_and_touches_nothing(home: Home) -> None:
    folder = home.path / ".cupy" / "kernel_cache"
    folder.mkdir(parents=True)
    (folder / "kernel.cubin").write_bytes(bytes(2048))
    before = snapshot(home.path, times=True)
    assert "neighbours" not in home.json("report")
    (cupy,) = (one for one in home.json("report", "--neighbours")["neighbours"] if one["name"] == "CuPy")
    assert cupy == {
        "name": "CuPy",
        "path": str(folder),
        "source": "default",
        "exists": True,
        "files": 1,
        "bytes": 2048,
    }
    shown = home.cachectl("report", "--neighbours").stdout
    assert "neighbours" not in home.cachectl("report").stdout
    (line,) = (line for line in shown.splitlines() if line.startswith("CuPy"))
    assert line.split()[1:] == ["1", "2.0", "KiB", "~/.cupy/kernel_cache", "(default)"]
    assert snapshot(home.path, times=True) == before
