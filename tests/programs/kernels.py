"""Compile and check N loopy kernels ``lk0`` … on PoCL; print loopy's messages about its caches as JSON."""

import json
import sys
import warnings

import loopy
import numpy as np
from binaries import listen, started

warnings.filterwarnings("ignore")


def compile_and_check(context, queue, index):
    numbers = np.arange(16, dtype=np.float64)
    kernel = loopy.make_kernel(
        "{[i]: 0 <= i < 16}", f"out[i] = {index + 2} * a[i] + {index}", name=f"lk{index}", lang_version=(2018, 2)
    )
    _, (out,) = kernel.executor(context)(queue, a=numbers)
    assert np.allclose(out, (index + 2) * numbers + index)


if __name__ == "__main__":
    said, (context, queue) = listen("loopy", "pyopencl.cache"), started()
    for index in range(int(sys.argv[1])):
        compile_and_check(context, queue, index)
    print()
    print(json.dumps({"said": said}))
