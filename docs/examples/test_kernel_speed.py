"""Time from the source of a kernel to its first result, with cold and with warm caches."""

import loopy
import numpy as np
import pyopencl as cl

# The driver starts here, with its cache on; cold builds miss because they are salted.
CONTEXT = cl.create_some_context(interactive=False)
QUEUE = cl.CommandQueue(CONTEXT)


def build():
    kernel = loopy.make_kernel("{[i]: 0 <= i < 16}", "out[i] = 2 * a[i]", name="twice", lang_version=(2018, 2))
    _, (out,) = kernel.executor(CONTEXT)(QUEUE, a=np.arange(16.0))
    assert out[15] == 30


def test_cold(benchmark, disabled_caches):
    benchmark.pedantic(build, rounds=5)


def test_warm(benchmark):
    benchmark.pedantic(build, rounds=5, warmup_rounds=1)
