"""The parts of a layer: facts, declarations, stores, plans and findings."""
