"""``cachectl pull``: place the entries of stores, roots and database files that are missing here."""

from __future__ import annotations

from cachectl import transfer, verbs
from cachectl.verbs import push

_STORES = "a bundle FILE or - (standard input), a folder, s3://, ssh://, oci://"
EXAMPLE = "cachectl pull warm.zip --trust"
OPTIONS = (
    ("sources", "SOURCE", f"{_STORES}; an isolated root; or a MIOpen database file", {"nargs": "+"}),
    verbs.CLEARABLE,
    verbs.SELECTION,
    verbs.ROOT,
    verbs.TRUST,
    ("-n --dry-run", "show what would be placed, but write nothing"),
    verbs.WAIT,
    verbs.SHARED,
    verbs.VERBOSE_MESSAGES,
    verbs.FORM,
)
USAGE = """\
cachectl pull SOURCE... [LAYER...] [selection]
       [--allowed-signers LIST | --digest HEX | --trust] [-n]"""


show, table = push.show, push.table


def run(request: verbs.Request) -> transfer.Transfer:
    """Carry out ``cachectl pull``."""
    from cachectl.exchange.push_pull import pull

    options = request.options
    # argparse takes all words before the first option as sources.
    lists = {word: word.split(",") for word in options.sources}
    sources = [word for word, names in lists.items() if not all(name in request.stack for name in names)]
    options.layers = [*(name for word in lists.keys() - set(sources) for name in lists[word]), *options.layers]
    if not sources:
        request.misuse("write a SOURCE before the layers, or ./NAME for a folder with the name of a layer")
    selected = request.selection()
    with request.output.progress("pulling"):
        return pull(request.stack, sources, request.trust(), selected, layers=options.layers, dry_run=options.dry_run)
