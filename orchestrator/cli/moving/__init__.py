"""The verbs of ``cachectl.moving``: options, call and rendering, one file each."""
