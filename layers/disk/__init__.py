"""Safe access to files and folders: no other user can redirect what is read, written or deleted."""
