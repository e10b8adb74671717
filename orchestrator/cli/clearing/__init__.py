"""The verbs of ``cachectl.clearing``: options, call and rendering, one file each."""
