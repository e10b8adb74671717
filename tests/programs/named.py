"""Build one program with a kernel of each name given, launch each once on PoCL; print the results as JSON."""

import json
import sys

import numpy as np
import pyopencl as cl
from binaries import device

if __name__ == "__main__":
    names = sys.argv[1:]
    context = cl.Context([device()])
    queue = cl.CommandQueue(context)
    kernels = (f"__kernel void {name}(__global int *a) {{ a[0] = {number}; }}" for number, name in enumerate(names))
    program = cl.Program(context, "\n".join(kernels)).build(cache_dir=False)
    result = np.zeros(1, np.int32)
    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, result.nbytes)
    results = []
    for name in names:
        cl.Kernel(program, name)(queue, (1,), (1,), buffer)
        cl.enqueue_copy(queue, result, buffer)
        results.append(int(result[0]))
    print(json.dumps({"results": results}))
