"""``cachectl export``: pack entries into one file, for another machine."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Final

from cachectl.cli import options
from cachectl.cli.output import Column, count, counts, show_lines, show_table, size, sizes, warn, warn_notes, working

if TYPE_CHECKING:
    from cachectl.cli.call import Call
    from cachectl.moving.exporting import Export, ExportedLayer
    from cachectl.moving.miopen_files import FilesExport, InstallableFile


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", nargs="?", metavar="FILE", help="the bundle to write, - or a URL: s3://, gs://, ssh://")
    parser.add_argument(
        "layers", nargs="*", metavar="LAYER", help="a layer of cachectl layers (default: all but tuning results)"
    )
    options.add_selection(parser)
    options.add_sign(parser)
    parser.add_argument(
        "--as-kdb", metavar="DIR", help="no bundle: write the databases of miopen or miopen-tuning as files to install"
    )
    options.add_force(parser, "a bundle")
    options.add_json(parser)


def run(call: Call) -> int:
    """Write a bundle, or with ``--as-kdb`` files that can be installed."""
    given = call.options
    if given.as_kdb is not None:
        return _export_files(call)
    if given.file is None:
        call.misuse("name the FILE to write, or say --as-kdb DIR")
    if given.file == "-" and given.json:
        call.misuse("--json prints to standard output, where the bundle goes; name a FILE")
    selected = call.selection()
    with working("exporting"):
        done = call.stack.export(given.file, selected, layers=given.layers, sign=given.sign, force=given.force)
    # Standard output holds the bundle.
    with redirect_stdout(sys.stderr) if given.file == "-" else nullcontext():
        return call.show(done, _show)


COLUMNS: Final[tuple[Column[ExportedLayer], ...]] = (
    Column("layer", lambda layer: layer.layer),
    counts("entries", lambda layer: layer.entries),
    sizes("size", lambda layer: layer.bytes),
)


def _show(done: Export) -> None:
    """Print what was exported, its checksum, and what it reveals to readers."""
    if done.sha256 is None:
        nothing = "nothing was written" if done.file == "-" else f"{done.file} was not written"
        warn(f"no entry to export in {', '.join(layer.layer for layer in done.layers)}; {nothing}")
    else:
        last = ("total", count(done.entries), size(done.total.bytes))
        show_table(COLUMNS, [layer for layer in done.layers if layer.entries], last)
        show_lines(["", f"{done.file}: {size(done.bytes)}", f"SHA-256 {done.sha256}"])
    if done.signature is not None:
        show_lines([f"signed: {done.signature}"])
    for layer in done.layers:
        if layer.sensitive is not None:
            warn(f"{layer.layer}: the bundle holds {layer.sensitive}")
        for folder in layer.exposed:
            warn(f"{layer.layer}: others can write to {folder}, and may have put code there")
        warn_notes(f"{layer.layer}: not exported:", layer.skipped)
        warn_notes(f"{layer.layer}: failed:", layer.failed)


# ---------------------------------------------------------------------- --as-kdb


def _export_files(call: Call) -> int:
    from cachectl.moving.miopen_files import export_files

    given = call.options
    if given.sign is not None:
        call.misuse("--as-kdb writes no bundle that could be signed")
    if given.as_kdb in call.stack:
        call.misuse(f"{given.as_kdb!r} is a layer, and no DIR; write ./{given.as_kdb} for a folder")
    # There is no FILE: the first word is a layer.
    layers = [given.file, *given.layers] if given.file is not None else []
    with working("exporting"):
        done = export_files(call.environment, given.as_kdb, call.selection(), layers=layers, force=given.force)
    return call.show(done, _show_files)


FILE_COLUMNS: Final[tuple[Column[InstallableFile], ...]] = (
    Column("file", lambda file: file.file.name),
    counts("entries", lambda file: file.entries),
    counts("of the system's", lambda file: file.from_system),
    sizes("size", lambda file: file.bytes),
)


def _show_files(done: FilesExport) -> None:
    show_table(FILE_COLUMNS, done.files)
    show_lines(["", f"in {done.folder}"])
    for about, notes in (("not exported:", done.skipped), ("failed:", done.failures), ("note:", done.hints)):
        warn_notes(about, notes)
