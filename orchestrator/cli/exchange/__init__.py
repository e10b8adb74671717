"""The verbs of ``cachectl.exchange``: options, call and rendering, one file each."""
