"""The verbs of ``cachectl.sharing``: options, call and rendering, one file each."""
