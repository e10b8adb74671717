"""Enter ``cachectl.disabled()`` after PoCL has started; the argument names the scene; print what came of it."""

import json
import multiprocessing
import os
import sys
import threading
import warnings
from pathlib import Path

import salted_caches
from salting import PLAIN, SEEN, built, launched, loopy_executor, said, started, timed, tree

import cachectl


def rebuilt():
    """Run kernels before, in and after a block; the marks on standard error part PoCL's log."""
    import numpy as np
    import pyopencl as cl

    context, queue = started()
    executor = loopy_executor(context)
    numbers = np.arange(16, dtype=np.float64)
    executor(queue, a=numbers)
    launched(queue, cl.Kernel(built(context), "plain"))
    variables, before = dict(os.environ), tree()
    methods = (dict(vars(cl.Program)), cl.link_program, dict(vars(type(executor))))
    said("warm")
    SEEN["warm"] = min(timed(lambda: launched(queue, cl.Kernel(built(context), "plain"))) for _ in range(3))
    executor(queue, a=numbers)
    said("block")
    with cachectl.disabled() as layers:
        SEEN["status"] = {name: [held.status, held.why] for name, held in layers.items()}
        SEEN["cold"] = timed(lambda: launched(queue, cl.Kernel(built(context), "plain")))
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
    import pyopencl as cl

    context, queue = started()
    launched(queue, cl.Kernel(built(context), "plain"))
    before = tree()
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


def command_in_flight():
    """Leave the block while a command waits to be run: what it may yet have to compile stays."""
    import pyopencl as cl

    context, queue = started()
    before = tree()
    event = cl.UserEvent(context)
    with cachectl.disabled():
        kernel = cl.Kernel(built(context), "plain")
        buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, 256)
        kernel(queue, (64,), (8,), buffer, wait_for=[event])
        queue.flush()
    SEEN["stays"] = tree() != before
    event.set_status(cl.command_execution_status.COMPLETE)
    queue.finish()


def others_entries_stay():
    """Let another program store the same kernel, and one of its own, while the block lasts."""
    import subprocess

    context, queue = started()
    import pyopencl as cl

    command = [sys.executable, os.path.join(os.path.dirname(__file__), "kernels.py"), "2"]
    outside = dict(os.environ)
    before = tree()
    with cachectl.disabled():
        launched(queue, cl.Kernel(built(context), "plain"))
        subprocess.run(command, check=True, capture_output=True, env=outside)
        theirs = tree().keys() - before.keys()
    left = tree().keys() - before.keys()
    SEEN["kept"] = sum(name.endswith("program.bc") for name in left)
    SEEN["removed"] = sum(name.endswith("program.bc") for name in theirs - left)


def threads_and_exceptions():
    import pyopencl as cl

    context, queue = started()
    launched(queue, cl.Kernel(built(context), "plain"))
    before, variables, build = tree(), dict(os.environ), cl.Program.build
    sums = []

    def work(index):
        with cachectl.disabled("pocl"):
            sums.append(launched(queue, cl.Kernel(built(context, f"t{index}"), f"t{index}")))

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
    import pyopencl as cl

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
        main = cl.Program(context, "float one(); __kernel void l(__global float *a) { a[get_global_id(0)] += one(); }")
        linked = cl.link_program(context, [library, main.compile()])
        SEEN["sums"].append(launched(queue, cl.Kernel(linked, "l")))
        SEEN["stored"] = sum(name.endswith("program.bc") for name in tree().keys() - before.keys())
        SEEN["failed"] = []
        for source in ("__kernel void broken() { nonsense }", "#error on purpose"):
            try:
                cl.Program(context, source).build()
            except cl.RuntimeError as error:
                SEEN["failed"].append(str(error))
    SEEN["left"] = sorted(tree().keys() ^ before.keys())
    SEEN["sources"] = [p.name for p in Path(os.environ["HOME"], ".cache/pocl/kcache").glob("tempfile_*.cl")]


def options_and_units():
    """Build with the options that are hard on a salt, and link a program of two units that are both salted."""
    import pyopencl as cl

    context, queue = started()
    warnings.simplefilter("always", RuntimeWarning)
    launched(queue, cl.Kernel(built(context), "plain"))
    before = tree()
    with cachectl.disabled():
        for index, options in enumerate(SEEN.setdefault("options", sys.argv[2:])):
            name = f"k{index}"
            kernel = cl.Kernel(built(context, name, options=options), name)
            SEEN.setdefault("sums", []).append(launched(queue, kernel))
        library = cl.Program(context, "float one() { return 1; }").compile()
        main = cl.Program(context, "float one(); __kernel void l(__global float *a) { a[get_global_id(0)] += one(); }")
        linked = cl.link_program(context, [library, main.compile()])
        SEEN["sums"].append(launched(queue, cl.Kernel(linked, "l")))
        SEEN["stored"] = sum(name.endswith("program.bc") for name in tree().keys() - before.keys())
    SEEN["same"] = tree() == before


def unnamed():
    """Take the names of the salts out of what PoCL stores in one block, and remove all of it in the next."""
    import shutil

    context, _ = started()
    built(context, "before")
    before, folder = tree(), Path(os.environ["HOME"], ".cache/pocl/kcache")
    for index, spoil in enumerate((anonymise, shutil.rmtree)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with cachectl.disabled("pocl"):
                built(context, f"one{index}")
                built(context, f"two{index}")
                for part in folder.glob("??"):
                    spoil(part)
        SEEN.setdefault("warned", []).append([str(warning.message) for warning in caught])
        SEEN.setdefault("left", []).append(len(tree().keys() - before.keys()))


def anonymise(part):
    for path in part.rglob("program.bc"):
        path.write_bytes(path.read_bytes().replace(b"cachectl_salt", b"cachectl_tlas"))


def other_platform():
    """Salt the builds of PoCL alone, in a process that builds for another platform too."""
    import pyopencl as cl

    context, queue = started()
    launched(queue, cl.Kernel(built(context), "plain"))
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
        library = cl.Program(elsewhere, "float one() { return 1; }").compile()
        main = cl.Program(elsewhere, "float one(); kernel void l(global float *a) { a[get_global_id(0)] += one(); }")
        linked = cl.link_program(elsewhere, [library, main.compile()])
        SEEN["sums"].append(launched(queues[1], cl.Kernel(linked, "l")))


def binary_cache():
    """Salt the driver's layer alone, while PyOpenCL's own binary cache is live."""
    import pyopencl as cl
    from pyopencl import characterize

    characterize.has_src_build_cache = lambda _device: None
    context, queue = started()
    launched(queue, cl.Kernel(built(context), "plain"))
    before = tree()
    with cachectl.disabled("pocl") as layers:
        SEEN["status"] = {name: held.status for name, held in layers.items()}
        program = built(context)
        SEEN["how"] = program._build_duration_info[:2]
        SEEN["stored"] = any("pyopencl" in name for name in tree().keys() - before.keys())
        launched(queue, cl.Kernel(program, "plain"))
        del program
    SEEN["same"] = tree() == before


def _build_in_child(_):
    import pyopencl as cl

    context, queue = started()
    return launched(queue, cl.Kernel(built(context, "child"), "child"))


def spawned():
    """Start children by spawn and by subprocess from a salted block."""
    import subprocess

    started()
    before = tree()
    command = [sys.executable, os.path.join(os.path.dirname(__file__), "kernels.py"), "2"]
    with cachectl.disabled() as layers:
        SEEN["status"] = layers["pocl"].status
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            SEEN["sums"] = pool.map(_build_in_child, range(2))
        subprocess.run(command, check=True, capture_output=True)
    SEEN["new"] = sorted(name for name in tree().keys() - before.keys() if not name.startswith("pytools/"))
    SEEN["rows"] = {
        layer.layer: layer.total.entries
        for layer in cachectl.Stack().report(layers=["loopy", "pyopencl-invoker"]).layers
    }


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
        SEEN["stored"] = sum(name.endswith("program.bc") for name in tree().keys() - before.keys())
    SEEN["same"] = tree() == before


def fork_before_start():
    """Let multiprocessing fork children that start the driver themselves, in a block entered before."""
    before = tree() if Path(os.environ["HOME"], ".cache").exists() else {}
    with cachectl.disabled() as layers:
        SEEN["status"] = layers["pocl"].status
        with multiprocessing.get_context("fork").Pool(2) as pool:
            SEEN["sums"] = pool.map(_build_in_child, range(2))
    SEEN["new"] = sorted(tree().keys() - before.keys())


def without_pyopencl():
    """Load PoCL as another library would: nothing can be salted."""
    import ctypes
    import importlib.util

    folder = Path(importlib.util.find_spec("pyopencl").origin).parent
    places = (folder / ".libs", folder.parent / "pyopencl.libs")
    library = next(path for place in places for path in place.glob("libpocl*"))
    ctypes.CDLL(str(library))
    try:
        with cachectl.disabled("pocl"):
            SEEN["entered"] = True
    except cachectl.switching.disabled.StillOn as error:
        SEEN["still_on"] = error.layers
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with cachectl.disabled("pocl", strict=False) as layers:
            SEEN["status"] = layers["pocl"].status
    SEEN["warned"] = [str(warning.message) for warning in caught]


if __name__ == "__main__":
    scene = sys.argv[1]
    (globals().get(scene) or getattr(salted_caches, scene))()
    print()
    print(json.dumps(SEEN))
