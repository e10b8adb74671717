"""Have loopy generate code for a kernel, without a device; print how many seconds that took."""

import json
import time

import loopy

started = time.perf_counter()
kernel = loopy.make_kernel("{[i]: 0<=i<n}", "b[i] = 2*a[i]", name="twice", target=loopy.CTarget())
code = loopy.generate_code_v2(loopy.add_dtypes(kernel, {"a": "float32"})).device_code()
print(json.dumps({"code": code, "seconds": time.perf_counter() - started}))
