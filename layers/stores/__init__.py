"""The three kinds of store that carry all layers.

``rows`` is sqlite, ``tree`` is entries in a folder tree, ``records`` is a text file. A store knows how bytes
are listed, read, staged, locked and removed safely; it knows no product.
"""
