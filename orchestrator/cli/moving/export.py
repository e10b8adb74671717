"""``cachectl export``: pack entries into one file, for another machine."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import Parser

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cachectl.layers.miopen.exporting import FilesExport, InstallableFile
    from cachectl.moving.exporting import Export, ExportedLayer


def add_options(parser: Parser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE", help="the bundle to write, - or a URL: s3://, gs://, ssh://")
    parser.add_selection(layers=True)
    parser.add_places(root=True)
    parser.add_shared("--sign")
    parser.add_argument(
        "--as-kdb", metavar="DIR", help="no bundle: write the databases of miopen or miopen-tuning as files to install"
    )
    parser.add_force("a bundle")
    parser.add_form("--all-layers")


def run(call: Call) -> int:
    given = call.options
    if given.as_kdb is not None:
        if given.sign is not None:
            call.misuse("--sign needs a bundle, and --as-kdb writes none")
        return _export_files(call)
    if given.file is None:
        call.misuse("name the FILE to write, or --as-kdb DIR")
    if given.file == "-" and call.form != "table":
        call.misuse(f"{call.form.upper()} and the bundle cannot both go to standard output; name a FILE")
    selected = call.selection()
    with output.working("exporting"):
        done = call.stack.export(given.file, selected, layers=given.layers, sign=given.sign, force=given.force)
    # Standard output holds the bundle.
    with redirect_stdout(sys.stderr) if given.file == "-" else nullcontext():
        show = partial(_show, all_layers=given.all_layers)
        return call.show(done, show, lambda done: (COLUMNS, done.layers))


COLUMNS: Final[tuple[output.Column[ExportedLayer], ...]] = (
    output.Column("layer", lambda layer: layer.layer),
    output.counts("entries", lambda layer: layer.entries),
    output.sizes("size", lambda layer: layer.bytes),
)


def _show(done: Export, *, all_layers: bool) -> None:
    """Print what was exported, its checksum, and what it reveals."""
    if done.sha256 is None:
        nothing = "nothing was written" if done.file == "-" else f"{done.file} was not written"
        output.warn(f"no entry to export in {', '.join(layer.layer for layer in done.layers)}; {nothing}")
    else:
        last = ("total", output.count(done.entries), output.size(done.total.bytes))
        shown = [layer for layer in done.layers if all_layers or layer.entries]
        output.show_table(COLUMNS, shown, last)
        output.show_more_layers(len(done.layers) - len(shown), shown)
        output.show_lines(["", f"{done.file}: {output.size(done.bytes)}", f"SHA-256 {done.sha256}"])
    if done.signature is not None:
        output.show_lines([f"signed: {done.signature}"])
    _warn_about(done.layers, "bundle")


def _warn_about(layers: Iterable[ExportedLayer], where: str) -> None:
    """Print what the exported entries reveal, who may have put them there, and what was left out."""
    for layer in layers:
        if layer.sensitive is not None:
            output.warn(f"{layer.layer}: the {where} holds {layer.sensitive}")
        for folder in layer.exposed:
            output.warn(f"{layer.layer}: others can write to {folder}, and may have put code there")
        output.warn_notes(f"{layer.layer}: not exported:", layer.skipped)
        output.warn_notes(f"{layer.layer}: failed:", layer.failed)


def _layers(call: Call) -> list[str]:
    """Return the named layers of a call without a FILE: its first word is a layer."""
    given = call.options
    return [given.file, *given.layers] if given.file is not None else []


# ---------------------------------------------------------------------- --as-kdb


def _export_files(call: Call) -> int:
    from cachectl.moving.installable import export_files

    given = call.options
    if given.as_kdb in call.stack:
        call.misuse(f"{given.as_kdb!r} is a layer, not a folder; write ./{given.as_kdb} for a folder of that name")
    with output.working("exporting"):
        done = export_files(call.environment, given.as_kdb, call.selection(), layers=_layers(call), force=given.force)
    return call.show(done, _show_files, lambda done: (FILE_COLUMNS, done.files))


FILE_COLUMNS: Final[tuple[output.Column[InstallableFile], ...]] = (
    output.Column("file", lambda file: file.file.name),
    output.counts("entries", lambda file: file.entries),
    output.counts("of the system's", lambda file: file.from_system),
    output.sizes("size", lambda file: file.bytes),
)


def _show_files(done: FilesExport) -> None:
    output.show_table(FILE_COLUMNS, done.files)
    output.show_lines(["", f"in {done.folder}"])
    for about, notes in (("not exported:", done.skipped), ("failed:", done.failures), ("note:", done.hints)):
        output.warn_notes(about, notes)
