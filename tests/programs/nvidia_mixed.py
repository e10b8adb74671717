"""Build and check PLAIN OpenCL kernels ``nv0`` … and LOOPY loopy kernels ``lk0`` … on an NVIDIA GPU."""

import sys

import pyopencl as cl
from kernels import compile_and_check
from nvidia import build_and_check, device

if __name__ == "__main__":
    context = cl.Context([device()])
    queue = cl.CommandQueue(context)
    for index in range(int(sys.argv[1])):
        build_and_check(context, queue, index)
    for index in range(int(sys.argv[2])):
        compile_and_check(context, queue, index)
