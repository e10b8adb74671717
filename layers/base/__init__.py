"""The foundation: errors, texts, limits, processes and the environment. It imports nothing else from cachectl."""
