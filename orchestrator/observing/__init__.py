"""What a run did with its caches: proof, trace and bench."""
