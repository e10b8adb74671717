"""Neighbours: places by their own variables, and sizes, shown only on request."""

import os
from pathlib import Path

import pytest
from homes import Home
from support.layers import write

from cachectl.layers.base.environment import Environment
from cachectl.layers.host.neighbours import neighbours

DEFAULTS = {
    "Triton": "{home}/.triton/cache",
    "CuPy": "{home}/.cupy/kernel_cache",
    "Numba": "{home}/.cache/numba",
    "PyOP2": "{home}/scratch/pyop2-cache-uid{uid}",
    "TSFC": "{home}/scratch/firedrake-tsfc-kernel-cache-uid{uid}",
    "torch inductor": "{home}/scratch/torchinductor_a_b",
}
#: A library, the variable that moves its cache, the value, and the place; the other libraries have their defaults.
PLACES = [
    ("Triton", "TRITON_CACHE_DIR", "/t", "/t"),
    ("Triton", "TRITON_HOME", "/t", "/t/.triton/cache"),
    ("CuPy", "CUPY_CACHE_DIR", "/t", "/t"),
    ("Numba", "NUMBA_CACHE_DIR", "/t", "/t"),
    ("Numba", "XDG_CACHE_HOME", "/x", "/x/numba"),
    ("PyOP2", "PYOP2_CACHE_DIR", "/t", "/t"),
    ("PyOP2", "VIRTUAL_ENV", "{home}/venv", "{home}/venv/.cache/pyop2"),
    ("TSFC", "FIREDRAKE_TSFC_KERNEL_CACHE_DIR", "/t", "/t"),
    ("torch inductor", "TORCHINDUCTOR_CACHE_DIR", "/t", "/t"),
    ("JAX", "JAX_COMPILATION_CACHE_DIR", "/t", "/t"),
    # A URL is not a local path.
    ("", "JAX_COMPILATION_CACHE_DIR", "gs://bucket/cache", ""),
]


@pytest.mark.parametrize(("library", "variable", "value", "place"), PLACES)
def test_places(tmp_path: Path, library: str, variable: str, value: str, place: str) -> None:
    (tmp_path / "venv/.cache/pyop2").mkdir(parents=True)
    expected = {name: (path, "default") for name, path in DEFAULTS.items()}
    expected["Triton"] = ("/x/.triton/cache", "TRITON_HOME")
    expected |= {library: (place, variable)} if library else {}
    filled = {name: (path.format(home=tmp_path, uid=os.getuid()), why) for name, (path, why) in expected.items()}
    # The variable of the cache takes precedence over TRITON_HOME.
    given = {"HOME": str(tmp_path), "USER": "a/b", "TRITON_HOME": "/x", variable: value.format(home=tmp_path)}
    environment = Environment(given, tmp_path, cwd=tmp_path, temporary=tmp_path / "scratch")
    assert {one.name: (str(one.path), one.source) for one in neighbours(environment)} == filled


def test_sizes_are_those_of_plain_files(tmp_path: Path) -> None:
    write(tmp_path / ".triton/cache/one", bytes(100))
    write(tmp_path / ".triton/cache/below/two", bytes(23))
    (tmp_path / ".triton/cache/link").symlink_to("/usr")
    environment = Environment({"HOME": str(tmp_path)}, tmp_path, cwd=tmp_path, temporary=tmp_path / "tmp")
    triton, *others = neighbours(environment)
    assert triton.source == "default"
    assert (triton.files, triton.bytes, triton.exists) == (2, 123, True)
    assert not any(one.exists for one in others)


def test_the_report_shows_them_on_request(home: Home) -> None:
    write(home.path / ".cupy/kernel_cache/kernel.cubin", bytes(2048))
    assert "neighbours" not in home.json("report")
    shown = home.cachectl("report --neighbours").stdout.splitlines()
    assert ["CuPy", "1", "2.0", "KiB", "~/.cupy/kernel_cache", "(default)"] in [line.split() for line in shown]
