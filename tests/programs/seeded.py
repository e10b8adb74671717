"""Build the program ``stamp.cl`` of the working folder with the options given, and launch it; then a loopy kernel."""

import contextlib
import json
import os
import sys
import warnings

import loopy
import numpy as np
import pyopencl as cl
from binaries import number_from, started

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "SET" in os.environ:
        name, _, value = os.environ["SET"].partition("=")
        os.environ[name] = value
    if "PUTENV" in os.environ:
        os.putenv(*os.environ["PUTENV"].split("="))
    context, queue = started()
    if "BROKEN" in os.environ:
        with contextlib.suppress(cl.RuntimeError):
            cl.Program(context, "__kernel void broken(").build(cache_dir=False)
    with open("stamp.cl", encoding="utf-8") as source:
        program = cl.Program(context, source.read()).build(options=sys.argv[1:], cache_dir=False)
    number = number_from(queue, program, "stamp")
    twice = loopy.make_kernel("{[i]: 0 <= i < n}", "out[i] = 2 * a[i]", name="twice", lang_version=(2018, 2))
    # An option of loopy that leaves the source as it is.
    twice = loopy.set_options(twice, disable_global_barriers="BARRIERS" in os.environ)
    loopy.add_dtypes(twice, {"a": np.float32})(queue, a=np.ones(16, np.float32))
    print(json.dumps({"results": [number]}))
