"""Tests of pytools and PyOpenCL end under ``cachectl run`` as they do without.

A quick part of both suites. A test that ends differently in two plain runs says nothing about cachectl.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "upstream/run_upstream.py"
#: These take most of the time, and are about pytools alone.
QUICK = ("-k", "not concurrency and not speed")


@pytest.fixture(scope="module")
def upstream() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_upstream", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def suites(upstream: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the tests of both; PyOpenCL's come from the index, which CI must reach."""
    try:
        folder = upstream.fetch_pyopencl(tmp_path_factory.mktemp("pyopencl"))
    except subprocess.CalledProcessError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"PyOpenCL's source archive is not to be had: {error}")
    return {"pytools": upstream.pytools_tests(), "pyopencl": folder / "test_wrapper.py"}


@pytest.mark.upstream
@pytest.mark.real
@pytest.mark.parametrize("suite", ["pytools", "pyopencl"])
def test_upstream_tests_end_as_they_do_without(
    upstream: ModuleType, suites: dict[str, Path], suite: str, tmp_path: Path
) -> None:
    only = QUICK if suite == "pytools" else ()
    plain, *others = (
        upstream.run_suite(suites[suite], mode, tmp_path, only=only)
        for mode in ("", "run --no-cache", "run --isolated", "trace")
    )
    assert list(plain.values()).count("PASSED") > 20
    assert others == [plain] * len(others)
