"""The program that ``cachectl demo`` runs: real loopy kernels, compiled and checked on PoCL.

``python -m cachectl.verbs.demo_kernels N`` prints, as JSON, the seconds that each of N kernels took from its
definition to its checked result.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any


def main(count: int) -> None:
    """Compile and run the kernels, which differ in name and arithmetic."""
    import loopy
    import numpy as np
    import pyopencl as cl

    warnings.filterwarnings("ignore")
    context = cl.Context([_pocl_device(cl)])
    queue = cl.CommandQueue(context)
    numbers = np.arange(1024, dtype=np.float64)
    seconds = {}
    for index in range(count):
        name = f"demo{index}"
        started = time.perf_counter()
        kernel = loopy.make_kernel(
            "{[i]: 0 <= i < 1024}", f"out[i] = {index + 2} * a[i] + {index}", name=name, lang_version=(2018, 2)
        )
        _, (out,) = kernel.executor(context)(queue, a=numbers)
        if not np.allclose(out, (index + 2) * numbers + index):
            sys.exit(f"{name} computed wrong numbers")
        seconds[name] = time.perf_counter() - started
    sys.stdout.write(json.dumps(seconds))


def _pocl_device(cl: Any) -> Any:  # noqa: ANN401 - PyOpenCL is imported only by the caller
    """Return the first PoCL device that compiles: version 3.0 refuses processors newer than its LLVM."""
    try:
        platforms = cl.get_platforms()
    except cl.LogicError:
        platforms = []
    refused = None
    for platform in platforms:
        if platform.name == "Portable Computing Language":
            device = platform.get_devices()[0]
            try:
                cl.Program(cl.Context([device]), "kernel void probe() {}").build()
            except cl.RuntimeError as error:
                refused = next((line for line in str(error).splitlines() if line.startswith("error:")), str(error))
            else:
                return device
    if refused:
        sys.exit(f"PoCL cannot compile for this processor ({refused}); a newer PoCL: apt install pocl-opencl-icd")
    sys.exit("no PoCL is registered here: pip install 'opencl-cachectl[demo]'")


if __name__ == "__main__":
    main(int(sys.argv[1]))
