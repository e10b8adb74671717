"""The verbs of ``cachectl.cluster``: options, call and rendering, one file each."""
