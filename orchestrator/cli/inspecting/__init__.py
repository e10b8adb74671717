"""The verbs of ``cachectl.inspecting``: options, call and rendering, one file each."""
