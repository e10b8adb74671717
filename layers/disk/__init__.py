"""Files and folders, opened so that nobody else decides what is read, written or deleted."""
