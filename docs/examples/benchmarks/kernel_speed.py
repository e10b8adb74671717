"""Time from the source of a kernel to its first result, with cold and with warm caches."""

from contextlib import ExitStack

import cachectl


class Kernel:
    """One build per sample; asv calls ``setup`` before each sample."""

    params = ["cold", "warm"]
    param_names = ["caches"]
    number = 1
    warmup_time = 0

    def setup(self, caches):
        import pyopencl as cl

        # The driver starts here, with its cache on; cold builds miss because they are salted.
        self.context = cl.create_some_context(interactive=False)
        self.queue = cl.CommandQueue(self.context)
        self.block = ExitStack()
        if caches == "cold":
            self.block.enter_context(cachectl.disabled())
        # The first build loads the compiler and, if caches are on, fills them.
        self.build()

    def teardown(self, caches):
        self.block.close()

    def build(self):
        import loopy
        import numpy as np

        kernel = loopy.make_kernel("{[i]: 0 <= i < 16}", "out[i] = 2 * a[i]", name="twice", lang_version=(2018, 2))
        _, (out,) = kernel.executor(self.context)(self.queue, a=np.arange(16.0))
        assert out[15] == 30

    def time_from_source_to_result(self, caches):
        self.build()
