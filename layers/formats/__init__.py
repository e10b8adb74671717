"""Readers of the bytes of each cache: pure functions without disk access or product policy."""
