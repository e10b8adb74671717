"""Enter ``cachectl.disabled()`` after PoCL has started; the argument names the scene; print what came of it."""

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import cachectl

warnings.filterwarnings("ignore")
SEEN = {}
#: What lives to the end of the process.
HELD = []
PLAIN = "__kernel void {name}(__global float *a) {{ a[get_global_id(0)] += {value}; }}"
CACHE = Path(os.environ["HOME"], ".cache")
KERNELS = [sys.executable, os.path.join(os.path.dirname(__file__), "kernels.py"), "2"]


def tree():
    """Hash every file of every cache, by its path; placeholders that PoCL leaks at each start apart."""
    return {
        str(path.relative_to(CACHE)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(CACHE.rglob("*"))
        if path.is_file() and not path.name.startswith("tempfile_")
    }


def started():
    """Start PoCL, and return a context and a queue. Some scenes need a process that has not imported PyOpenCL yet."""
    global cl  # noqa: PLW0603
    import kernels
    import pyopencl as cl

    return kernels.started()


def warmed():
    """Start PoCL, launch a kernel, and return a context, a queue, and what is in the caches."""
    context, queue = started()
    launched(queue, compiled(context))
    return context, queue, tree()


def built(context, name="plain", value=1, **options):
    return cl.Program(context, PLAIN.format(name=name, value=value)).build(**options)


def compiled(context, name="plain", **options):
    return cl.Kernel(built(context, name, **options), name)


def linked(context, library=None):
    """Compile and link a program of two units, and return its kernel."""
    library = library or cl.Program(context, "float one() { return 1; }").compile()
    main = cl.Program(context, "float one(); __kernel void l(__global float *a) { a[get_global_id(0)] += one(); }")
    return cl.Kernel(cl.link_program(context, [library, main.compile()]), "l")


def programs(names):
    return sum(name.endswith("program.bc") for name in names)


def launched(queue, kernel, shape=None):
    """Launch a kernel on 64 zeros and return the sum of what it left."""
    import numpy as np

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


def rebuilt():
    """Run kernels before, in and after a block; the marks on standard error part PoCL's log."""
    import numpy as np

    context, queue = started()
    executor = loopy_executor(context)
    numbers = np.arange(16, dtype=np.float64)
    executor(queue, a=numbers)
    launched(queue, compiled(context))
    variables, before = dict(os.environ), tree()
    methods = (dict(vars(cl.Program)), cl.link_program, dict(vars(type(executor))))
    said("warm")
    SEEN["warm"] = min(timed(lambda: launched(queue, compiled(context))) for _ in range(3))
    executor(queue, a=numbers)
    said("block")
    with cachectl.disabled() as layers:
        SEEN["status"] = {name: [held.status, held.why] for name, held in layers.items()}
        SEEN["cold"] = timed(lambda: launched(queue, compiled(context)))
        _, (out,) = executor(queue, a=numbers)
        SEEN["right"] = bool(np.allclose(out, 2 * numbers))
        said("again")
        executor(queue, a=numbers)
        SEEN["stored"] = len(tree().keys() - before.keys()) > 0
        said("left")
    SEEN["same"] = tree() == before
    executor(queue, a=numbers)
    said("end")
    SEEN["restored"] = dict(os.environ) == variables
    SEEN["methods"] = methods == (dict(vars(cl.Program)), cl.link_program, dict(vars(type(executor))))


def kernel_lives_on():
    """Keep a kernel that was built in the block, and launch it after, in its shape and in another."""
    context, queue, before = warmed()
    with cachectl.disabled():
        program = built(context)
        kernel = cl.Kernel(program, "plain")
        launched(queue, kernel, (8,))
    SEEN["same"] = tree() == before
    SEEN["sums"] = [launched(queue, kernel, (8,)), launched(queue, kernel, (16,)), launched(queue, kernel)]
    SEEN["from_program"] = launched(queue, program.plain, (32,))
    SEEN["came_back"] = tree() != before
    with cachectl.disabled():
        pass
    SEEN["swept"] = tree() == before
    SEEN["once_more"] = launched(queue, kernel, (4,))


def launched_for_later(context, queue):
    """Launch a kernel of a block when an event allows it, and leave the block before."""
    event = cl.UserEvent(context)
    with cachectl.disabled():
        kernel = compiled(context)
        buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, 256)
        kernel(queue, (64,), (8,), buffer, wait_for=[event])
        queue.flush()
    return kernel, event


def command_in_flight():
    """Leave the block while a command waits to be run: what it may yet have to compile stays."""
    context, queue = started()
    before = tree()
    _kernel, event = launched_for_later(context, queue)
    SEEN["stays"] = tree() != before
    event.set_status(cl.command_execution_status.COMPLETE)
    queue.finish()


def others_entries_stay():
    """Let another program store the same kernel, and one of its own, while the block lasts."""
    context, queue = started()
    outside = dict(os.environ)
    before = tree()
    with cachectl.disabled():
        launched(queue, compiled(context))
        subprocess.run(KERNELS, check=True, capture_output=True, env=outside)
        theirs = tree().keys() - before.keys()
    left = tree().keys() - before.keys()
    SEEN["kept"] = programs(left)
    SEEN["removed"] = programs(theirs - left)


def threads_and_exceptions():
    context, queue = started()
    launched(queue, compiled(context))
    before, variables, build = tree(), dict(os.environ), cl.Program.build
    sums = []

    def work(index):
        with cachectl.disabled("pocl"):
            sums.append(launched(queue, compiled(context, f"t{index}")))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    try:
        with cachectl.disabled(), cachectl.disabled("pocl"):
            for thread in threads:
                thread.start()
            built(context, "outer")
            for thread in threads:
                thread.join()
            raise KeyError("on purpose")
    except KeyError:
        pass
    SEEN["sums"] = sums
    SEEN["same"] = tree() == before
    SEEN["restored"] = dict(os.environ) == variables and cl.Program.build is build


def ways_to_build():
    """Build in every way that PyOpenCL has for source: touched before, again, compiled and linked, failing."""
    context, queue = started()
    old = built(context, "old")
    launched(queue, cl.Kernel(old, "old"))
    unbuilt = cl.Program(context, PLAIN.format(name="touched", value=1))
    unbuilt.get_info(cl.program_info.SOURCE)
    library = cl.Program(context, "float one() { return 1; }").compile()
    before = tree()
    with cachectl.disabled():
        SEEN["sums"] = [launched(queue, cl.Kernel(unbuilt.build("-DA=1"), "touched"))]
        SEEN["sums"].append(launched(queue, cl.Kernel(old.build(options=["-DB=1"]), "old")))
        SEEN["sums"].append(launched(queue, linked(context, library)))
        SEEN["stored"] = programs(tree().keys() - before.keys())
        SEEN["failed"] = []
        for source in ("__kernel void broken() { nonsense }", "#error on purpose"):
            try:
                cl.Program(context, source).build()
            except cl.RuntimeError as error:
                SEEN["failed"].append(str(error))
    SEEN["left"] = sorted(tree().keys() ^ before.keys())
    SEEN["sources"] = [p.name for p in (CACHE / "pocl/kcache").glob("tempfile_*.cl")]


def options_and_units():
    """Build with the options that are hard on a salt, and link a program of two units that are both salted."""
    context, queue, before = warmed()
    warnings.simplefilter("always", RuntimeWarning)
    with cachectl.disabled():
        for index, options in enumerate(SEEN.setdefault("options", sys.argv[2:])):
            SEEN.setdefault("sums", []).append(launched(queue, compiled(context, f"k{index}", options=options)))
        SEEN["sums"].append(launched(queue, linked(context)))
        SEEN["stored"] = programs(tree().keys() - before.keys())
    SEEN["same"] = tree() == before


def other_platform():
    """Salt the builds of PoCL alone, in a process that builds for another platform too."""
    context, queue = started()
    launched(queue, compiled(context))
    others = (device for p in cl.get_platforms() if p.name == sys.argv[2] for device in p.get_devices())
    other = next(others, None)
    SEEN["found"] = other is not None
    if other is None:
        return
    elsewhere = cl.Context([other])
    with cachectl.disabled("pocl") as layers:
        SEEN["status"] = layers["pocl"].status
        programs = [built(context, cache_dir=False), built(elsewhere, cache_dir=False)]
        sources = [program.get_info(cl.program_info.SOURCE) for program in programs]
        SEEN["salted"] = ["cachectl_salt_" in source for source in sources]
        queues = (queue, cl.CommandQueue(elsewhere))
        kernels = [cl.Kernel(program, "plain") for program in programs]
        SEEN["sums"] = [launched(own, kernel) for own, kernel in zip(queues, kernels, strict=True)]
        SEEN["sums"].append(launched(queues[1], linked(elsewhere)))


def binary_cache():
    """Salt the driver's layer alone, while PyOpenCL's own binary cache is live."""
    from pyopencl import characterize

    characterize.has_src_build_cache = lambda _device: None
    context, queue, before = warmed()
    with cachectl.disabled("pocl") as layers:
        SEEN["status"] = {name: held.status for name, held in layers.items()}
        program = built(context)
        SEEN["how"] = program._build_duration_info[:2]
        SEEN["stored"] = any("pyopencl" in name for name in tree().keys() - before.keys())
        launched(queue, cl.Kernel(program, "plain"))
        del program
    SEEN["same"] = tree() == before


def _build_in_child(_):
    context, queue = started()
    return launched(queue, compiled(context, "child"))


def spawned():
    """Start children by spawn and by subprocess from a salted block."""
    started()
    before = tree()
    with cachectl.disabled() as layers:
        SEEN["status"] = layers["pocl"].status
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            SEEN["sums"] = pool.map(_build_in_child, range(2))
        subprocess.run(KERNELS, check=True, capture_output=True)
    SEEN["new"] = sorted(name for name in tree().keys() - before.keys() if not name.startswith("pytools/"))
    SEEN["rows"] = cachectl.Stack().report(layers=["loopy", "pyopencl-invoker"]).total.entries


def forked():
    """Fork a child, started or not, in which builds go on being salted."""
    context, _ = started()
    before = tree()
    with cachectl.disabled():
        for _ in range(2):
            child = os.fork()
            if child == 0:
                # PoCL's threads are not in the child, so it builds and launches nothing.
                built(context, "child")
                os._exit(0)
            SEEN["ended"] = os.waitpid(child, 0)[1]
        SEEN["stored"] = programs(tree().keys() - before.keys())
    SEEN["same"] = tree() == before


def without_pyopencl():
    """Load PoCL as another library would: nothing can be salted."""
    import ctypes
    import importlib.util

    folder = Path(importlib.util.find_spec("pyopencl").origin).parent
    places = (folder / ".libs", folder.parent / "pyopencl.libs")
    library = next(path for place in places for path in place.glob("libpocl*"))
    ctypes.CDLL(str(library))
    # A block that is refused, and then one that warns.
    try:
        with cachectl.disabled("pocl"):
            SEEN["entered"] = True
    except cachectl.StillOn as error:
        SEEN["refused"] = error.layers
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with cachectl.disabled("pocl", strict=False) as held:
            pass
    SEEN["held"] = {name: hold.status for name, hold in held.items()}
    SEEN["warned"] = [str(warning.message) for warning in caught]


def at_the_end():
    """Hold a kernel to the end of the process, and bring its folder back after the block."""
    context, queue = started()
    # Entries that cannot be removed are named on standard error.
    warnings.simplefilter("always", RuntimeWarning)
    before = tree()
    with cachectl.disabled():
        HELD.append(compiled(context))
        launched(queue, HELD[0])
    launched(queue, HELD[0], (16,))
    SEEN["came_back"] = tree() != before


def never_done():
    context, queue = started()
    warnings.simplefilter("always", RuntimeWarning)
    kernel, event = launched_for_later(context, queue)
    HELD[:] = (kernel, queue, event)
    SEEN["stays"] = programs(tree()) > 0


def binaries_after():
    """Take the binary of a program from the block after it, and load that here; it is left for another process."""
    context, queue, before = warmed()
    source = PLAIN.format(name="one", value=1) + PLAIN.format(name="two", value=2)
    with cachectl.disabled():
        program = cl.Program(context, source).build()
        launched(queue, cl.Kernel(program, "one"), (8,))
    SEEN["same"] = tree() == before
    binary = program.get_info(cl.program_info.BINARIES)[0]
    Path("binary").write_bytes(binary)
    SEEN["sums"] = loaded(context, queue)


def loaded(context, queue):
    program = cl.Program(context, context.devices, [Path("binary").read_bytes()]).build()
    return [launched(queue, cl.Kernel(program, name), shape) for name, shape in (("one", (8,)), ("two", (16,)))]


def binaries_elsewhere():
    SEEN["sums"] = loaded(*started())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print()
    print(json.dumps(SEEN))
