"""The interface of adapters: layer, facts and errors, environment, and the guard around plug-ins."""
