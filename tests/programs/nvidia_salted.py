"""Build kernels on an NVIDIA GPU before, in and after ``cachectl.disabled()``; print what came of it, as JSON."""

import hashlib
import json
import sys
import time
import warnings

import numpy as np
import pyopencl as cl
from nvidia import device

import cachectl

warnings.filterwarnings("ignore")


def tree():
    root = cachectl.Stack()["cuda"].roots()[0].path
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.glob("?/?/*"))
        if path.is_file()
    }


def built(context):
    steps = "".join(f"x = sin(x) * 3.0f + {step}.0f; " for step in range(200))
    code = f"""__kernel void s(__global float *a)
    {{ int i = get_global_id(0); float x = a[i]; {steps} a[i] = 2 + 0.0f * x; }}"""
    started = time.perf_counter()
    program = cl.Program(context, code).build()
    return time.perf_counter() - started, cl.Kernel(program, "s")


def launched(queue, kernel, shape=None):
    numbers = np.zeros(64, np.float32)
    buffer = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=numbers)
    kernel(queue, numbers.shape, shape, buffer)
    cl.enqueue_copy(queue, numbers, buffer)
    return float(numbers.sum())


if __name__ == "__main__":
    found = device()
    if found is None:
        print(json.dumps({"seconds": None}))
        sys.exit()
    context = cl.Context([found])
    queue = cl.CommandQueue(context)
    seen = {"seconds": [built(context)[0], built(context)[0]]}
    before = tree()
    with cachectl.disabled() as layers:
        seen["status"] = layers["cuda"].status
        for _ in range(2):
            seconds, kernel = built(context)
            seen["seconds"].append(seconds)
        seen["sums"] = [launched(queue, kernel)]
        seen["stored"] = len(tree().keys() - before.keys())
        root = cachectl.Stack()["cuda"].roots()[0].path
        new = [(root / name).read_bytes() for name in tree().keys() - before.keys()]
        seen["marked"] = sum(b"cachectl_salt_" in data for data in new)
    seen["left"] = sorted(tree().keys() ^ before.keys())
    seen["same"] = tree() == before
    seen["sums"] += [launched(queue, kernel), launched(queue, kernel, (16,))]
    seen["seconds"].append(built(context)[0])
    print()
    print(json.dumps(seen))
