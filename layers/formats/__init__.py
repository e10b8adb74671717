"""Readers of the bytes of each cache: pure functions, no disk and no product policy."""
