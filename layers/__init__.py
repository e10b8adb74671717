"""The caches of the OpenCL stack, one adapter per file. Nothing here imports the orchestrator or prints."""
