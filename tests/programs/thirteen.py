"""Compile and check LOOPY loopy kernels (8) and PLAIN plain PyOpenCL programs (5) on PoCL; print what came of it.

A third argument lifts PyOpenCL's bypass of its own binary cache, as ``binaries.py`` does: ``live`` for all, ``plain``
for the plain programs. Printed as JSON are the libraries' messages about their caches, and the seconds of each kernel
from its source to its checked result; ``total`` is their sum, imports left out.
"""

import json
import sys
import time

from binaries import build_and_check, listen, started
from kernels import compile_and_check
from pyopencl import characterize


def timed(make, context, queue, index):
    started = time.perf_counter()
    make(context, queue, index)
    return time.perf_counter() - started


if __name__ == "__main__":
    loopy_count, plain_count, *live = (*sys.argv[1:], *("8", "5")[len(sys.argv) - 1 :])
    said = listen("loopy", "pyopencl.cache")
    if live == ["live"]:
        characterize.has_src_build_cache = lambda _device: None
    context, queue = started()
    seconds = {f"lk{index}": timed(compile_and_check, context, queue, index) for index in range(int(loopy_count))}
    if live == ["plain"]:
        characterize.has_src_build_cache = lambda _device: None
    seconds.update({f"pk{index}": timed(build_and_check, context, queue, index) for index in range(int(plain_count))})
    print()
    print(json.dumps({"seconds": seconds, "total": sum(seconds.values()), "said": said}))
