"""Neighbours: places by their own variables, sizes counted and bounded, and nothing but on request."""

from __future__ import annotations

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


def test_without_variables_each_has_its_default(tmp_path: Path) -> None:
    found = places({}, tmp_path)
    assert list(found) == ["Triton", "CuPy", "Numba", "PyOP2", "TSFC", "torch inductor"]
    assert found["Triton"] == (f"{tmp_path}/.triton/cache", "default")
    assert found["CuPy"] == (f"{tmp_path}/.cupy/kernel_cache", "default")
    assert found["Numba"][0] == f"{tmp_path}/.cache/numba"
    assert found["PyOP2"][0].startswith(f"{tmp_path}/scratch/pyop2-cache-uid")
    assert found["torch inductor"][0] == f"{tmp_path}/scratch/torchinductor_a_b"


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("Triton", "TRITON_CACHE_DIR"),
        ("CuPy", "CUPY_CACHE_DIR"),
        ("Numba", "NUMBA_CACHE_DIR"),
        ("PyOP2", "PYOP2_CACHE_DIR"),
        ("TSFC", "FIREDRAKE_TSFC_KERNEL_CACHE_DIR"),
        ("torch inductor", "TORCHINDUCTOR_CACHE_DIR"),
        ("JAX", "JAX_COMPILATION_CACHE_DIR"),
    ],
)
def test_a_variable_says_where(name: str, variable: str, tmp_path: Path) -> None:
    assert places({variable: "/elsewhere"}, tmp_path)[name] == ("/elsewhere", variable)


def test_a_home_of_triton_s_and_a_virtual_environment_count(tmp_path: Path) -> None:
    (tmp_path / "venv" / ".cache" / "pyop2").mkdir(parents=True)
    found = places({"TRITON_HOME": "/t", "VIRTUAL_ENV": f"{tmp_path}/venv", "XDG_CACHE_HOME": "/x"}, tmp_path)
    assert found["Triton"] == ("/t/.triton/cache", "TRITON_HOME")
    assert found["PyOP2"] == (f"{tmp_path}/venv/.cache/pyop2", "VIRTUAL_ENV")
    assert found["Numba"][0] == "/x/numba"


def test_a_cache_in_a_bucket_is_no_folder(tmp_path: Path) -> None:
    assert "JAX" not in places({"JAX_COMPILATION_CACHE_DIR": "gs://bucket/cache"}, tmp_path)


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
