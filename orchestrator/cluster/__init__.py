"""Many nodes at once: staging, and one report or purge over all of them."""
