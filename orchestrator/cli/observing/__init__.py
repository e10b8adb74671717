"""The verbs of ``cachectl.observing``: options, call and rendering, one file each."""
