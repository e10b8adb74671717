"""``cachectl pull``: place the entries of stores, roots and database files that are missing here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from cachectl.layers.base.errors import plural
from cachectl.options import CLEARABLE, FORM, ROOT, SELECTION, SHARED, TRUST, WAIT, Option, Request
from cachectl.table import Column, Table, Whole, counts, size, sizes
from cachectl.table import count as number

if TYPE_CHECKING:
    from cachectl.exchange.pull import Pull, PulledLayer
    from cachectl.layers.base.facts import Entry

OPTIONS: Final = (
    Option(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="a bundle FILE or - (standard input), a folder, s3://, ssh://, oci://; an isolated root; or a database "
        "file of MIOpen. Layers follow",
    ),
    CLEARABLE,
    SELECTION,
    ROOT,
    TRUST,
    Option("-n", "--dry-run", action="store_true", help="list what would be placed, and touch nothing"),
    WAIT,
    SHARED,
    FORM,
)
USAGE: Final = """\
cachectl pull SOURCE... [LAYER...] [selection]
       [--allowed-signers LIST | --digest HEX | --trust] [-n]"""


def run(request: Request) -> Pull:
    """Carry out ``cachectl pull``."""
    from cachectl.exchange.pull import pull

    options = request.options
    sources = [word for word in options.sources if word not in request.stack]
    # argparse takes all words before the first option for sources.
    options.layers = [*(word for word in options.sources if word in request.stack), *options.layers]
    if not sources:
        request.misuse("name a SOURCE before the layers; ./NAME is a folder that has the name of a layer")
    selected = request.selection()
    with request.working("pulling"):
        return pull(request.stack, sources, request.trust(), selected, layers=options.layers, dry_run=options.dry_run)


def table(done: Pull, request: Request) -> Table[Any]:
    """Return what was placed: layers, or in a dry run entries."""
    return _entries(done, request) if done.dry_run else Table(_columns("placed"), done.layers)


def _entries(done: Pull, request: Request) -> Table[Entry]:
    from cachectl.verbs.ls import columns

    return Table(columns(request.now), [entry for layer in done.layers for entry in layer.entries or ()])


def _columns(verb: str) -> tuple[Column[PulledLayer], ...]:
    return (
        Column("layer", lambda layer: layer.layer),
        counts(verb, lambda layer: layer.placed),
        sizes("size", lambda layer: layer.bytes),
        counts("there", lambda layer: layer.there),
        counts("differ", lambda layer: len(layer.kept)),
        counts("cannot hit", lambda layer: layer.cannot_hit),
        counts("failed", lambda layer: len(layer.failed)),
    )


def show(done: Pull, request: Request) -> Iterator[object]:
    """Yield what was or would be placed, whether programs here will hit it, and what was left alone."""
    entries = _entries(done, request)
    if entries.rows:
        yield entries
        yield ""
    if done.layers:
        yield Table(_columns("would place" if done.dry_run else "placed"), done.layers)
    else:
        request.notice("no entry to pull: there is none for the layers here")
    yield ""
    yield Whole(f"{done.url}: {size(done.read)} read")
    if done.digest is not None:
        yield Whole(f"digest {done.digest}")
    for why in done.trusted:
        yield Whole(f"trusted: {why}")
    for layer in done.layers:
        for seen in layer.foreseen:
            yield Whole(f"{layer.layer}: {number(seen.entries)} {seen.outlook.words}")
        if layer.exposed:
            request.notice(f"{layer.layer}: others could write to its folder where entries were pushed")
        request.warn_notes(f"{layer.layer}: kept:", layer.kept)
        request.warn_notes(f"{layer.layer}: failed:", layer.failed)
    for key in done.unread:
        yield Whole(f"{key.layer}: {plural(key.parts, 'part')} of the index left alone: {key.because}")
    request.warn_notes("not trusted:", done.left_out)
