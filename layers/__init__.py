"""The caches of the OpenCL stack, one adapter a file, behind one interface.

Nothing here imports the orchestrator, prints, or reads the process environment on its own.
"""
