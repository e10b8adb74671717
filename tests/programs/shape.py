"""Launch one kernel with work-groups of the size given."""

import json
import sys

import numpy as np
import pyopencl as cl
from binaries import started

SOURCE = "__kernel void shape(__global int *a) { a[get_global_id(0)] = get_local_id(0); }"

if __name__ == "__main__":
    context, queue = started()
    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, 4 * 64)
    cl.Program(context, SOURCE).build(cache_dir=False).shape(queue, (64,), (int(sys.argv[1]),), buffer)
    result = np.empty(64, np.int32)
    cl.enqueue_copy(queue, result, buffer)
    print(json.dumps({"results": [int(result.max())]}))
