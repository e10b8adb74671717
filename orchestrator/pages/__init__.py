"""Pages for a browser: the parts that every page shares, and the files that are written into each."""
