"""Verbs that only read: report, ls, verify, doctor, layers, and caches that belong to no layer."""
