"""The machine: processes, mounts, OpenCL drivers, GPUs, and what is installed."""
