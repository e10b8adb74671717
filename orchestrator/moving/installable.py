"""Write entries of a selection as files that a package can install."""

from __future__ import annotations

from collections.abc import Sequence

from cachectl.inspecting.entries import Trouble, listed
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Note
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.selection import ALL, Selection
from cachectl.layers.miopen.exporting import FilesExport, write_files


def export_files(
    environment: Environment,
    folder: str,
    selection: Selection = ALL,
    *,
    layers: Sequence[str] = (),
    force: bool = False,
) -> FilesExport:
    """Write the selected entries of layers that have such files. Raises what :func:`write_files` raises."""

    def select(chosen: tuple[Layer, ...]) -> tuple[frozenset[str], list[Note]]:
        troubles: list[Trouble] = []
        keys = frozenset(entry.key for entry in listed(chosen, selection, troubles.append))
        return keys, [Note(_where(trouble), trouble.message) for trouble in troubles if trouble.failed]

    return write_files(environment, folder, select, layers=layers, force=force)


def _where(trouble: Trouble) -> str:
    return "*" if trouble.path is None else str(trouble.path)
