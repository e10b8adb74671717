"""A store of entries that many machines fill and use."""
