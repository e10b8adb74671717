"""Pages for a browser: the parts that every page shares, and the files that are written into each."""

from typing import Final

#: How each page begins: a page that cachectl wrote may be replaced by another.
BEGINNING: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="generator" content="cachectl """
