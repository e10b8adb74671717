"""Use cachectl's context managers in a real program; the argument names the scene; print what came of it."""

import json
import os
import sys
import threading
import warnings

import cachectl

warnings.filterwarnings("ignore")
SEEN = {}


def counted():
    names = ("loopy", "pyopencl-invoker", "pyopencl", "pocl")
    return {layer.layer: layer.total.entries for layer in cachectl.Stack().report(layers=names).layers}


def compile_kernels(*indices):
    from kernels import compile_and_check, started

    context, queue = started()
    for index in indices:
        compile_and_check(context, queue, index)


def pocl_status(**options):
    with cachectl.disabled(**options) as layers:
        return layers["pocl"].status


def my_dictionary():
    from pytools.persistent_dict import WriteOncePersistentDict

    return WriteOncePersistentDict("mine", safe_sync=False)


def before_first_use():
    with cachectl.disabled() as layers:
        compile_kernels(0)
        SEEN.update(status=sorted({held.status for held in layers.values()}), inside=counted())
    compile_kernels(0)
    SEEN["after"] = counted()


def after_first_use():
    compile_kernels(0)
    SEEN["before"] = counted()
    with cachectl.disabled("loopy", "pyopencl-invoker"):
        compile_kernels(1)
        SEEN["inside"] = counted()
    compile_kernels(1)
    SEEN["after"] = counted()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SEEN["pocl"] = pocl_status()
    SEEN["warned"] = [str(warning.message) for warning in caught]


def isolated():
    outside = counted()
    with cachectl.isolated() as root:
        compile_kernels(0)
        roots = [cachectl.Stack()[name].roots()[0] for name in ("loopy", "pocl")]
        SEEN.update(inside=counted(), under_root=all(str(root) in str(own.path) for own in roots))
    SEEN.update(outside=[outside, counted()], root=str(root))


def kernels_after_isolated():
    with cachectl.isolated() as root:
        compile_kernels(0)
    compile_kernels(0, 1, 2)
    SEEN.update(root=str(root), goes_on=os.path.isdir(root), outside=counted()["pocl"])


def too_late_a_variable():
    compile_kernels(0)
    os.environ["POCL_KERNEL_CACHE"] = "0"
    SEEN["pocl"] = pocl_status(strict=False)


def off_from_the_first():
    compile_kernels(0)
    SEEN["pocl"] = pocl_status()


def off_until_it_started():
    del os.environ["POCL_KERNEL_CACHE"]
    off_from_the_first()


def isolated_too_late():
    compile_kernels(0)
    before = dict(os.environ)
    for folder in (None, "named"):
        try:
            with cachectl.isolated(folder):
                SEEN["entered"] = True
        except cachectl.StillOn as error:
            SEEN.update(still_on=sorted(error.layers), said=str(error))
    SEEN["made"] = os.path.exists("named")
    with cachectl.disabled() as layers:
        SEEN["instead"] = sorted({held.status for held in layers.values()})
    SEEN["restored"] = dict(os.environ) == before


def threads():
    import loopy

    started, go_on = threading.Event(), threading.Event()

    def overlap():
        with cachectl.disabled("loopy"):
            started.set()
            go_on.wait(60)

    before = dict(os.environ)
    other = threading.Thread(target=overlap)
    with cachectl.disabled("loopy"):
        other.start()
        started.wait(60)
    SEEN["one_left"] = [loopy.CACHING_ENABLED, os.environ.get("LOOPY_NO_CACHE")]
    go_on.set()
    other.join()
    SEEN["none_left"] = [loopy.CACHING_ENABLED, os.environ.get("LOOPY_NO_CACHE")]
    SEEN["restored"] = dict(os.environ) == before


def nested_and_raising():
    import loopy
    import pyopencl

    before = dict(os.environ)
    try:
        with cachectl.disabled(), cachectl.disabled("loopy"):
            SEEN["inside"] = [loopy.CACHING_ENABLED, pyopencl._PYOPENCL_NO_CACHE]
            raise KeyError("on purpose")
    except KeyError:
        pass
    SEEN["outside"] = [loopy.CACHING_ENABLED, pyopencl._PYOPENCL_NO_CACHE]
    SEEN["restored"] = dict(os.environ) == before


def isolated_inside():
    from cachectl.switching import disabled

    with cachectl.disabled() as layers:
        with cachectl.isolated():
            compile_kernels(0)
            SEEN["started"] = counted()["pocl"]
        SEEN["pocl"] = layers["pocl"].status
        compile_kernels(0)
        SEEN["after"] = counted()
    SEEN["notes"] = [*disabled.STAY_OFF]


def user_dictionary():
    mine = my_dictionary()
    mine.store_if_not_present(1, "one")
    methods = dict(vars(type(mine)))
    with cachectl.disabled("pytools"):
        mine.store_if_not_present(2, "two")
        SEEN["inside"] = [1 in mine, 2 in mine]
    SEEN["outside"] = [1 in mine, 2 in mine]
    SEEN["restored"] = dict(vars(type(mine))) == methods


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print()
    print(json.dumps(SEEN))
