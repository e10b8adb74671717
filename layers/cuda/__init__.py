"""The layer ``cuda``: the CUDA ComputeCache."""

from cachectl.layers.cuda.cache import CudaComputeCache as CudaComputeCache
