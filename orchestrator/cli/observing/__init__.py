"""The verbs of ``cachectl.watching``: options, call and rendering, one file each."""
