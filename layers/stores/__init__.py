"""The stores of all layers, and what they have: trees of files, and tables.

``files`` and ``row_store`` are the stores; ``rows`` is a table of sqlite, ``records`` one in a text file. Stores list,
read, stage, lock and remove bytes safely, without knowledge of any product.
"""
