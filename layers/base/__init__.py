"""What an adapter is made of: the layer, its facts and errors, the environment, and the guard around plug-ins."""
