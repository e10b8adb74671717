"""Code of layers that runs inside programs that use their caches: watchers, and builds with a tag."""
