"""Build N plain PyOpenCL programs ``pk0`` … with PyOpenCL's own binary cache live; print what it said, as JSON.

PyOpenCL leaves PoCL to the driver's cache. Its own suite lifts that bypass in the same way (test_array.py), so
this is PyOpenCL's real code path.
"""

import json
import logging
import sys
import warnings

import numpy as np
import pyopencl as cl
from pyopencl import characterize

warnings.filterwarnings("ignore")


def device():
    return next(p for p in cl.get_platforms() if p.name == "Portable Computing Language").get_devices()[0]


def started():
    """Return a context of PoCL and a queue."""
    context = cl.Context([device()])
    return context, cl.CommandQueue(context)


def number_from(queue, program, name):
    """Launch a kernel that writes one number, and return it."""
    result = np.zeros(1, np.int32)
    buffer = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, result.nbytes)
    cl.Kernel(program, name)(queue, (1,), (1,), buffer)
    cl.enqueue_copy(queue, result, buffer)
    return int(result[0])


def build_and_check(context, queue, index):
    numbers = np.arange(16, dtype=np.float32)
    result = np.empty_like(numbers)
    flags = cl.mem_flags
    source = cl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=numbers)
    target = cl.Buffer(context, flags.WRITE_ONLY, result.nbytes)
    program = cl.Program(
        context,
        f"""__kernel void pk{index}(__global const float *a, __global float *b)
        {{ int i = get_global_id(0); b[i] = a[i] * {index + 2} + {index}; }}""",
    ).build()
    cl.Kernel(program, f"pk{index}")(queue, numbers.shape, None, source, target)
    cl.enqueue_copy(queue, result, target)
    assert np.allclose(result, numbers * (index + 2) + index)


def listen(*names):
    """Return a list that fills with what these loggers say."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    for name in names:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.DEBUG)
    return said


if __name__ == "__main__":
    characterize.has_src_build_cache = lambda _device: None
    said, (context, queue) = listen("pyopencl.cache"), started()
    for index in range(int(sys.argv[1])):
        build_and_check(context, queue, index)
    print()
    print(json.dumps({"said": said}))
