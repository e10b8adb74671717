"""Salted builds against NVIDIA's own driver, on machines that have one."""

from __future__ import annotations

import ctypes.util
from typing import TYPE_CHECKING

import pytest

from cachectl.layers.cuda import CudaComputeCache

if TYPE_CHECKING:
    from homes import Home

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        ctypes.util.find_library("nvidia-opencl") is None and ctypes.util.find_library("cuda") is None,
        reason="no NVIDIA driver is installed here",
    ),
]


def test_a_started_driver_answers_no_build_of_the_block_and_keeps_none(home: Home) -> None:
    seen = home.python("nvidia_salted.py")
    if seen["seconds"] is None:
        pytest.skip("PyOpenCL sees no NVIDIA platform here (set OCL_ICD_VENDORS)")
    assert seen["status"] == "salted"
    assert seen["sums"] == [128.0] * 3
    _, warm, first, second, after = seen["seconds"]
    # The same source again and again: a front end or a back end that were served would show.
    assert min(first, second) > 5 * max(warm, after)
    assert seen["stored"] >= 4
    assert seen["marked"] == seen["stored"]
    assert seen["left"] == []
    assert seen["same"]
    layer = CudaComputeCache(home.environment())
    assert list(layer.verify(layer.roots()[0])) == []
