"""The shipped suite over every built-in layer, on content that the real library made where it runs here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cachectl.layers.base.conformance import LayerConformance
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.layer import Layer
from cachectl.layers.cuda import CudaComputeCache
from cachectl.layers.loopy import LoopyDictionaries
from cachectl.layers.pocl import PoclKernels
from cachectl.layers.pyopencl import PyOpenCLBinaries
from cachectl.layers.pyopencl_invoker import PyOpenCLInvoker
from cachectl.layers.pytools import PytoolsDictionaries

Fill = Callable[[Environment], None]


class OnContent(LayerConformance):
    """A layer over what a real program left behind."""

    layer: type[Layer]
    fill: Fill

    def make(self, environment: Environment) -> Layer:
        return self.layer(environment)

    def seed(self, environment: Environment) -> None:
        self.fill(environment)


@pytest.mark.real
class TestOnRealContent(OnContent):
    @pytest.fixture(autouse=True, params=[LoopyDictionaries, PyOpenCLInvoker, PyOpenCLBinaries, PoclKernels])
    def _filled(self, request: pytest.FixtureRequest, fill: Fill) -> None:
        self.layer, self.fill = request.param, fill


@pytest.mark.real
class TestPytools(OnContent):
    layer = PytoolsDictionaries

    @pytest.fixture(autouse=True)
    def _filled(self, fill_sumpy: Fill) -> None:
        self.fill = fill_sumpy


class TestCuda(OnContent):
    layer = CudaComputeCache

    @pytest.fixture(autouse=True)
    def _filled(self, compute_cache: Callable[[Path], None]) -> None:
        self.fill = lambda environment: compute_cache(environment.home / ".nv" / "ComputeCache")
