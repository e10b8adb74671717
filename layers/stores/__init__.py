"""The stores of all layers: ``files`` for trees of files, ``row_store`` for tables in sqlite or in text files.

They list, read, stage, lock and remove bytes safely, and know no product.
"""
