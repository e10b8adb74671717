"""The layer ``pocl``: PoCL's kernel cache."""

from cachectl.layers.pocl.cache import PoclKernels as PoclKernels
