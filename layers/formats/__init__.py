"""How the bytes of each cache are laid out: pure readers, no disk and no product policy."""
