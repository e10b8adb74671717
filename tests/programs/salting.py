"""Helpers shared by the scenes of ``salted.py``."""

import hashlib
import os
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
SEEN = {}
PLAIN = "__kernel void {name}(__global float *a) {{ a[get_global_id(0)] += {value}; }}"


def tree():
    """Hash every file of every cache, by its path; placeholders that PoCL leaks at each start apart."""
    root = Path(os.environ["HOME"], ".cache")
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.startswith("tempfile_")
    }


def started():
    """Start PoCL, and return a context and a queue."""
    import pyopencl as cl
    from kernels import device

    context = cl.Context([device()])
    return context, cl.CommandQueue(context)


def built(context, name="plain", value=1, **options):
    import pyopencl as cl

    return cl.Program(context, PLAIN.format(name=name, value=value)).build(**options)


def launched(queue, kernel, shape=None):
    """Launch a kernel on 64 zeros and return the sum of what it left."""
    import numpy as np
    import pyopencl as cl

    numbers = np.zeros(64, np.float32)
    buffer = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=numbers)
    kernel(queue, numbers.shape, shape, buffer)
    cl.enqueue_copy(queue, numbers, buffer)
    return float(numbers.sum())


def loopy_executor(context):
    import loopy

    kernel = loopy.make_kernel("{[i]: 0 <= i < 16}", "out[i] = 2 * a[i]", name="twice", lang_version=(2018, 2))
    return kernel.executor(context)


def said(text):
    """Write a line where PoCL's debug log goes."""
    sys.stderr.write(f"-- {text}\n")
    sys.stderr.flush()


def timed(action):
    """Return the seconds of work, of all threads: those in which other programs had the processors do not count."""
    started_at = time.process_time()
    action()
    return time.process_time() - started_at
