"""How long a kernel takes from its source to its first result: with caches that cannot answer, and with full ones."""

from contextlib import ExitStack

import cachectl


class Kernel:
    """One build a sample; asv calls ``setup`` before each."""

    params = ["cold", "warm"]
    param_names = ["caches"]
    number = 1
    warmup_time = 0

    def setup(self, caches):
        import pyopencl as cl

        # The driver starts here, with its cache on: cold builds are kept from it by salt.
        self.context = cl.create_some_context(interactive=False)
        self.queue = cl.CommandQueue(self.context)
        self.block = ExitStack()
        if caches == "cold":
            self.block.enter_context(cachectl.disabled())
        # Cold: the compiler is loaded, which happens once. Warm: the caches are filled.
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
