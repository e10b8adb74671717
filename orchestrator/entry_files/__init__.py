"""Lookups and stores of caches that keep each entry in a file, seen from outside while a command runs."""
