"""The layer ``pyopencl``: PyOpenCL's cache of program binaries."""

from cachectl.layers.pyopencl.cache import PyOpenCLBinaries as PyOpenCLBinaries
