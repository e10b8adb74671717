"""Verbs that remove or move aside: purge, prune and quarantine."""
