"""The verbs of ``cachectl.switching``: options, call and rendering, one file each."""
