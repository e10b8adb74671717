"""A third party's module that talks and ends the program while it is imported."""

print("imported, said on standard output")  # noqa: T201
raise SystemExit("no licence")
