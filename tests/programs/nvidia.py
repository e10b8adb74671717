"""Build and check N OpenCL kernels ``nv0`` … on an NVIDIA GPU; print the seconds of each build, as JSON."""

import json
import sys
import time

import numpy as np
import pyopencl as cl


def device():
    platforms = [p for p in cl.get_platforms() if "NVIDIA" in p.name]
    return platforms[0].get_devices()[0] if platforms else None


def build_and_check(context, queue, index):
    numbers = np.arange(256, dtype=np.float32)
    result = np.empty_like(numbers)
    flags = cl.mem_flags
    source = cl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=numbers)
    target = cl.Buffer(context, flags.WRITE_ONLY, result.nbytes)
    code = f"""__kernel void nv{index}(__global const float *a, __global float *b)
    {{ int i = get_global_id(0); float x = a[i];
    {"".join(f"x = sin(x) * {index + 2}.0f + {step}.0f; " for step in range(40))}
    b[i] = a[i] * {index + 2} + {index} + 0.0f * x; }}"""
    started = time.perf_counter()
    program = cl.Program(context, code).build()
    seconds = time.perf_counter() - started
    cl.Kernel(program, f"nv{index}")(queue, numbers.shape, None, source, target)
    cl.enqueue_copy(queue, result, target)
    assert np.allclose(result, numbers * (index + 2) + index)
    return seconds


if __name__ == "__main__":
    found = device()
    if found is None:
        print(json.dumps({"seconds": None}))
        sys.exit()
    context = cl.Context([found])
    queue = cl.CommandQueue(context)
    print()
    print(json.dumps({"seconds": [build_and_check(context, queue, index) for index in range(int(sys.argv[1]))]}))
