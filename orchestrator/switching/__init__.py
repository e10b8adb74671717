"""Caches off, or on in another place: for a block of Python, and for a command."""
