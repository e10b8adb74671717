"""What everything else stands on: errors, texts, limits, and the environment. It imports nothing of cachectl's."""
