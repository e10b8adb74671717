"""A start like that of MIRGE-Com: make, transform and launch N (100) loopy kernels of a DG solver on PoCL.

Kernels are generated: gradients, divergences, lifts and updates of several sizes. Prints the seconds from the first
import to the end of the last first launch, as JSON.
"""

import functools
import json
import sys
import time

STARTED = time.perf_counter()

import warnings  # noqa: E402

import loopy as lp  # noqa: E402
import numpy as np  # noqa: E402
import pyopencl as cl  # noqa: E402
import pyopencl.array  # noqa: E402
from kernels import device  # noqa: E402

warnings.filterwarnings("ignore")
ELEMENTS = 24


def gradient(name, nodes, scale):
    kernel = lp.make_kernel(
        "{[e, i, j, d]: 0 <= e < n and 0 <= i, j < nodes and 0 <= d < 2}",
        f"out[d, e, i] = sum(j, {scale} * D[d, i, j] * u[e, j])",
        name=name,
        lang_version=(2018, 2),
    )
    kernel = lp.fix_parameters(kernel, nodes=nodes)
    return lp.tag_inames(kernel, {"e": "g.0", "i": "l.0"}), {"D": (2, nodes, nodes), "u": (ELEMENTS, nodes)}


def divergence(name, nodes, scale):
    kernel = lp.make_kernel(
        "{[e, i, j]: 0 <= e < n and 0 <= i, j < nodes}",
        f"""
        <> dx = sum(j, D[0, i, j] * u[e, j])
        <> dy = sum(j, D[1, i, j] * v[e, j])
        out[e, i] = {scale} * (dx + dy) * jac[e]
        """,
        name=name,
        lang_version=(2018, 2),
    )
    kernel = lp.fix_parameters(kernel, nodes=nodes)
    kernel = lp.tag_inames(lp.split_iname(kernel, "e", 4, outer_tag="g.0", inner_tag="l.0"), {"i": "for"})
    return kernel, {"D": (2, nodes, nodes), "u": (ELEMENTS, nodes), "v": (ELEMENTS, nodes), "jac": (ELEMENTS,)}


def lift(name, nodes, scale):
    kernel = lp.make_kernel(
        "{[e, i, f]: 0 <= e < n and 0 <= i < nodes and 0 <= f < 3}",
        f"out[e, i] = u[e, i] - {scale} * sum(f, L[i, f] * flux[e, f])",
        name=name,
        lang_version=(2018, 2),
    )
    kernel = lp.fix_parameters(kernel, nodes=nodes)
    return lp.tag_inames(kernel, "e:g.0, i:l.0"), {"u": (ELEMENTS, nodes), "L": (nodes, 3), "flux": (ELEMENTS, 3)}


def update(name, nodes, scale):
    kernel = lp.make_kernel(
        "{[e, i]: 0 <= e < n and 0 <= i < nodes}",
        f"""
        <> pressure = 0.4 * (energy[e, i] - 0.5 * (u[e, i] ** 2 + v[e, i] ** 2) / rho[e, i])
        out[e, i] = rho[e, i] + {scale} * (pressure + sqrt(fabs(1.4 * pressure / rho[e, i])))
        """,
        name=name,
        lang_version=(2018, 2),
    )
    kernel = lp.fix_parameters(kernel, nodes=nodes)
    kernel = lp.split_iname(kernel, "e", 8, outer_tag="g.0", inner_tag="l.1")
    return lp.tag_inames(kernel, "i:l.0"), dict.fromkeys(("energy", "rho", "u", "v"), (ELEMENTS, nodes))


KINDS = (gradient, divergence, lift, update)


@functools.cache
def array(queue, shape):
    return cl.array.to_device(queue, np.full(shape, 1.5))


def launch(queue, index):
    make = KINDS[index % len(KINDS)]
    kernel, shapes = make(f"{make.__name__}{index}", 3 + index % 5, index + 1)
    arrays = {name: array(queue, shape) for name, shape in shapes.items()}
    _, (out,) = kernel.executor(queue.context)(queue, **arrays)
    assert np.isfinite(out.get()).all()


if __name__ == "__main__":
    queue = cl.CommandQueue(cl.Context([device()]))
    for number in range(int(sys.argv[1]) if sys.argv[1:] else 100):
        launch(queue, number)
    print(json.dumps({"seconds": time.perf_counter() - STARTED, "processor_seconds": time.process_time()}))
