"""The layer ``mesa``: the shader cache of Rusticl and of Mesa's drivers."""
