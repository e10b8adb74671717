"""Scenes of ``salted.py`` about what is in the caches during and after the block."""

import os
import warnings
from pathlib import Path

from salting import PLAIN, SEEN, built, launched, started, tree

import cachectl


def at_the_end():
    """Hold a kernel to the end of the process, and bring its folder back after the block."""
    import pyopencl as cl

    context, queue = started()
    # Entries that cannot be removed are named on standard error.
    warnings.simplefilter("always", RuntimeWarning)
    SEEN["before"] = tree()
    with cachectl.disabled():
        globals()["HELD"] = cl.Kernel(built(context), "plain")
        launched(queue, HELD)  # noqa: F821 - made just above
    launched(queue, HELD, (16,))  # noqa: F821 - the same
    SEEN["came_back"] = tree() != SEEN["before"]


def never_done():
    """End while a command waits for what never comes."""
    import pyopencl as cl

    context, queue = started()
    warnings.simplefilter("always", RuntimeWarning)
    event = cl.UserEvent(context)
    with cachectl.disabled():
        kernel = cl.Kernel(built(context), "plain")
        buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, 256)
        kernel(queue, (64,), (8,), buffer, wait_for=[event])
        queue.flush()
    globals()["HELD"] = (kernel, queue, event)
    SEEN["stays"] = any(name.endswith("program.bc") for name in tree())


def binaries_after():
    """Take the binary of a program from the block after it, and load that here; it is left for another process."""
    import pyopencl as cl

    context, queue = started()
    launched(queue, cl.Kernel(built(context), "plain"))
    source = PLAIN.format(name="one", value=1) + PLAIN.format(name="two", value=2)
    before = tree()
    with cachectl.disabled():
        program = cl.Program(context, source).build()
        launched(queue, cl.Kernel(program, "one"), (8,))
    SEEN["same"] = tree() == before
    binary = program.get_info(cl.program_info.BINARIES)[0]
    Path("binary").write_bytes(binary)
    SEEN["sums"] = loaded(context, queue)


def loaded(context, queue):
    """Launch what the binary holds."""
    import pyopencl as cl

    program = cl.Program(context, context.devices, [Path("binary").read_bytes()]).build()
    return [launched(queue, cl.Kernel(program, name), shape) for name, shape in (("one", (8,)), ("two", (16,)))]


def binaries_elsewhere():
    """Load the binary that another process has left."""
    SEEN["sums"] = loaded(*started())


def another_holder():
    """Hold programs in every way that there is; none of them is taken for a command that is not done."""
    import pyopencl as cl

    context, queue = started()
    launched(queue, cl.Kernel(built(context), "plain"))
    warnings.simplefilter("always", RuntimeWarning)
    before = tree()
    with cachectl.disabled():
        kernel = cl.Kernel(built(context), "plain")
        launched(queue, kernel)
        again = kernel.get_info(cl.kernel_info.PROGRAM)
        twin = cl.Program(built(context, "twin")._prg)
        foreign = cl.Program.from_int_ptr(built(context, "foreign").int_ptr)
    SEEN["same"] = tree() == before
    SEEN["sums"] = [launched(queue, held, (4,)) for held in (kernel, again.plain, twin.twin, foreign.foreign)]
    globals()["HELD"] = (kernel, again, twin, foreign)


def unremovable():
    """Let what a block stored be beyond removal, where warnings are errors."""
    import pyopencl as cl

    context, queue = started()
    launched(queue, cl.Kernel(built(context), "plain"))
    folder = Path(os.environ["HOME"], ".cache/pocl/kcache")
    warnings.simplefilter("error", RuntimeWarning)
    variables, methods, before = dict(os.environ), dict(vars(cl.Program)), tree()
    for own in (KeyError("mine"), None):
        try:
            with cachectl.disabled(), cachectl.disabled("pocl"):
                launched(queue, cl.Kernel(built(context), "plain"))
                for part in folder.glob("??"):
                    part.chmod(0o500)
                if own is not None:
                    raise own
        except (KeyError, RuntimeWarning) as error:
            SEEN.setdefault("raised", []).append(type(error).__name__)
            SEEN.setdefault("said", []).append(" ".join([str(error), *getattr(error, "__notes__", ())]))
        SEEN.setdefault("restored", []).append((dict(os.environ), dict(vars(cl.Program))) == (variables, methods))
        for part in folder.glob("??"):
            part.chmod(0o700)
    with cachectl.disabled():
        pass
    SEEN["swept"] = tree() == before


def unremovable_after():
    """Let a build outlive its block, and fail, while what it stored is beyond removal and warnings are errors."""
    import pyopencl as cl

    context, _ = started()
    warnings.simplefilter("error", RuntimeWarning)
    folder = Path(os.environ["HOME"], ".cache/pocl/kcache")
    try:
        with cachectl.disabled():
            built(context)
            build = cl.Program.build
            for part in folder.glob("??"):
                part.chmod(0o500)
    except RuntimeWarning as error:
        SEEN["left"] = str(error)
    try:
        build(cl.Program(context, "__kernel void broken() { nonsense }"))
    except (cl.RuntimeError, RuntimeWarning) as error:
        SEEN["raised"] = [type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", ())])]
    for part in folder.glob("??"):
        part.chmod(0o700)
