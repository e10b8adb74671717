"""Switching caches off, or moving them, for a block of Python or for a command."""
