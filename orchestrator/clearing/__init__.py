"""Verbs that remove or move aside: purge and prune."""
