"""Build a program, compile and link another on PoCL while C code prints; print how many lines that were, as JSON.

With an argument the program does so in a block of :func:`cachectl.traced`, and prints what the block counted as well.
"""

import ctypes
import json
import sys
import threading
import time
import warnings
from contextlib import nullcontext

import pyopencl as cl
from binaries import device

warnings.filterwarnings("ignore")
library = ctypes.CDLL(None)
ended = threading.Event()
lines = []


def chat():
    while not ended.is_set():
        # C code looks at its stream when it prints.
        library.fputs(b"\033[1mfrom C %d\033[0m\n" % len(lines), ctypes.c_void_p.in_dll(library, "stderr"))
        lines.append(None)
        time.sleep(0.0002)


def source(name):
    return f"__kernel void {name}(__global int *a) {{ a[0] = 1; }}"


def build_all():
    context = cl.Context([device()])
    thread = threading.Thread(target=chat)
    thread.start()
    cl.Program(context, source("built")).build()
    cl.link_program(context, [cl.Program(context, source("compiled")).compile()])
    ended.set()
    thread.join()


if __name__ == "__main__":
    block = nullcontext()
    if sys.argv[1:]:
        import cachectl

        block = cachectl.traced()
    with block as traced:
        build_all()
    counted = None
    if traced is not None:
        pocl = traced["pocl"]
        counted = [pocl.hits, pocl.misses, pocl.stores, pocl.evidence, [one.served_by for one in traced.kernels]]
    print()
    print(json.dumps({"lines": len(lines), "counted": counted}))
