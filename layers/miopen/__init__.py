"""The four layers of MIOpen: compiled kernels and tuning results, the user's and those that came with MIOpen."""
