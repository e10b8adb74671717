"""The three kinds of store of all layers.

``rows`` is sqlite, ``tree`` is entries in a folder tree, ``records`` is a text file. Stores list, read, stage, lock and
remove bytes safely, without knowledge of any product.
"""
