"""A third party's module that talks and ends the program while it is imported."""

raise SystemExit("no licence")
