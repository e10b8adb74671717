"""Verbs that only look: the report, entries, the doctor, and caches that are no layer's."""
