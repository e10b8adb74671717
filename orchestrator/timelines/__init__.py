"""Timelines outside of a run: as files, and two of them compared."""
