"""Stores of entries that many machines fill and use."""
