"""What a layer is: its facts, its declaration, its store, and what is done with it."""
