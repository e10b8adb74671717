"""Four loopy kernels, as the examples of the documentation run them."""

import warnings

import loopy as lp
import numpy as np
import pyopencl as cl

warnings.filterwarnings("ignore")
LINES = {
    "axpy": "out[i] = 2 * a[i] + 1",
    "gradient": "out[i] = a[i] - a[15 - i]",
    "flux": "out[i] = 0.5 * (a[i] + a[15 - i])",
    "norm": "out[i] = sqrt(a[i] * a[i])",
}
queue = cl.CommandQueue(cl.create_some_context(interactive=False))
for name, line in LINES.items():
    kernel = lp.make_kernel("{[i]: 0 <= i < 16}", line, name=name, lang_version=(2018, 2))
    _, (out,) = kernel.executor(queue.context)(queue, a=np.arange(16.0))
    print(f"{name}: {out.sum():.1f}")
