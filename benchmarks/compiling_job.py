"""A program that compiles kernels of its own on PoCL and checks their results: the user in every comparison here.

``python compiling_job.py loopy|pyopencl FIRST COUNT`` compiles the kernels with the numbers from FIRST on.
``pyopencl`` has PyOpenCL's own binary cache live: PyOpenCL leaves PoCL to the driver's cache, and its own suite lifts
that bypass in the same way. At the end it prints, as JSON, how often it found the lock of that cache taken, by whom.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyopencl as cl

    #: Compile and run the kernel of a number; return what it made of the numbers it was given.
    Kernel = Callable[[cl.Context, cl.CommandQueue, int, np.ndarray], np.ndarray]


def loopy_kernel(context: cl.Context, queue: cl.CommandQueue, index: int, numbers: np.ndarray) -> np.ndarray:
    """Let loopy make, compile and run a kernel."""
    import loopy

    kernel = loopy.make_kernel(
        "{[i]: 0 <= i < 16}", f"out[i] = {index + 2} * a[i] + {index}", name=f"job{index}", lang_version=(2018, 2)
    )
    _, (out,) = kernel.executor(context)(queue, a=numbers)
    return np.asarray(out)


def pyopencl_program(context: cl.Context, queue: cl.CommandQueue, index: int, numbers: np.ndarray) -> np.ndarray:
    """Let PyOpenCL build a program from source, twice: the second time its cache may have it."""
    import pyopencl as cl

    flags = cl.mem_flags
    given = cl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=numbers)
    made = cl.Buffer(context, flags.WRITE_ONLY, numbers.nbytes)
    source = f"""__kernel void job{index}(__global const double *a, __global double *b)
    {{ int i = get_global_id(0); b[i] = a[i] * {index + 2} + {index}; }}"""
    for _ in range(2):
        program = cl.Program(context, source).build()
        cl.Kernel(program, f"job{index}")(queue, numbers.shape, None, given, made)
    out = np.empty_like(numbers)
    cl.enqueue_copy(queue, out, made)
    return out


KERNELS: dict[str, Kernel] = {"loopy": loopy_kernel, "pyopencl": pyopencl_program}


def watch_lock() -> Counter[str]:
    """Count how often this process finds the lock of PyOpenCL's cache taken when it is about to take it."""
    found: Counter[str] = Counter()
    looking = False

    def look(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal looking
        if event != "open" or looking or not str(arguments[0]).endswith("/lock"):
            return
        looking = True
        try:
            holder = Path(str(arguments[0])).read_bytes()
            found["cachectl" if holder.startswith(b"cachectl") else "program"] += 1
        except OSError:
            found["nobody"] += 1
        finally:
            looking = False

    sys.addaudithook(look)
    return found


def main() -> None:
    """Compile, check, and say what was met."""
    import pyopencl as cl
    from pyopencl import characterize

    warnings.filterwarnings("ignore")
    which, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if which == "pyopencl":
        characterize.has_src_build_cache = lambda _device: None
    found = watch_lock()
    pocl = next(platform for platform in cl.get_platforms() if platform.name == "Portable Computing Language")
    context = cl.Context(pocl.get_devices())
    queue = cl.CommandQueue(context)
    numbers = np.arange(16, dtype=np.float64)
    for index in range(first, first + count):
        if not np.allclose(KERNELS[which](context, queue, index, numbers), (index + 2) * numbers + index):
            sys.exit(f"kernel {index} gives wrong results")
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
