"""The verbs, one file each: its function, its result, and as data its options and its table."""
