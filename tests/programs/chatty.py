"""Build a program, compile and link another on PoCL while C code prints; print how many lines that were, as JSON."""

import ctypes
import json
import threading
import time
import warnings

import pyopencl as cl
from binaries import started

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
    context, _ = started()
    thread = threading.Thread(target=chat)
    thread.start()
    cl.Program(context, source("built")).build()
    cl.link_program(context, [cl.Program(context, source("compiled")).compile()])
    ended.set()
    thread.join()


if __name__ == "__main__":
    build_all()
    print()
    print(json.dumps({"lines": len(lines)}))
