"""The use of caches by a run: proof, trace and bench."""
