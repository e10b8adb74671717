"""Warm caches in a file: bundles, their signatures, and where they are read and written."""
