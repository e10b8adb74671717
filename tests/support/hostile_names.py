"""Names that try to leave the place where a page shows them."""

HOSTILE = (
    "</script><script>document.title = 'taken'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "]]>'\"&amp;`${document.title='taken'}`",
    "line\u2028separator\u2029paragraph",
    "right\u202eto left",
    "undecodable\udcff",
    "null\0byte\x1b[31m",
    "https://example.org/kernel.js",
    "__proto__",
    "constructor",
)
