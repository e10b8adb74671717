"""The machine: files, processes, mounts, OpenCL drivers, GPUs, and what is installed."""
