"""A program that runs under MPI itself, and stages its caches: BUNDLE OUT, then ``late`` or ``fails``, or nothing."""

import sys
import traceback

from mpi4py import MPI

from cachectl.layers.base.errors import CachectlError
from cachectl.stage import staged

BUNDLE, OUT, *HOW = sys.argv[1:]
RANK = MPI.COMM_WORLD.rank

if __name__ == "__main__":
    if HOW == ["late"] and RANK == 1:
        import loopy  # noqa: F401
    try:
        with staged(BUNDLE, trust=True, out=OUT, notice=lambda line: print(line, file=sys.stderr)) as root:
            if HOW == ["fails"] and RANK == 1:
                message = "this rank fails"
                raise ValueError(message)
            from kernels import compile_and_check, started

            programs = len(list(root.rglob("program.bc")))
            compile_and_check(*started(), 0)
            MPI.COMM_WORLD.Barrier() if not HOW else None
            print(f"rank {RANK}: {len(list(root.rglob('program.bc'))) - programs} compiled", flush=True)
    except (CachectlError, ValueError):
        print(f"rank {RANK}: {traceback.format_exc().splitlines()[-1]}", flush=True)
