"""One entry at a time in one process: what :class:`cachectl.Stack` takes, and what doing it by hand does.

``python one_entry.py WAY COUNT`` prints the median wall seconds of both, as JSON; its home is made by the table.
By hand means: a connection to sqlite that is opened, used and closed, or plain files read or written one by one.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import cachectl

if TYPE_CHECKING:
    from cachectl.layers.core.entry import Artifact
    from cachectl.layers.core.layer import Layer

#: Does something with the entry of a number.
Act = Callable[[int], object]

#: How the keys of the entries that are put begin: no entry of the home has such a one.
_NEW_FOLDER = "PP/" + "P" * 31


def get_row() -> tuple[Act, Act]:
    """Get a row of a dictionary."""
    layer, path, keys = _rows()

    def by_hand(number: int) -> object:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            query = "select key_value from dict where keyhash = ?"
            return connection.execute(query, (keys[number % len(keys)],)).fetchone()[0]

    return lambda number: _whole(layer.get(f"{path.name}/{keys[number % len(keys)]}")), by_hand


def put_row() -> tuple[Act, Act]:
    """Put a row that is not there yet."""
    layer, path, keys = _rows()
    artifact = _whole(layer.get(f"{path.name}/{keys[0]}"))

    def ours(number: int) -> None:
        key = f"{path.name}/{number:016x}"
        layer.put(key, artifact._replace(key=key))

    def by_hand(number: int) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("insert or ignore into dict values (?, ?)", (f"f{number:015x}", artifact.data))

    return ours, by_hand


def get_folder() -> tuple[Act, Act]:
    """Get a program of PoCL's: a folder of three files."""
    layer, root, keys = _folders()
    files = [[str(file) for file in sorted((root / key).rglob("*")) if file.is_file()] for key in keys]

    def by_hand(number: int) -> object:
        return [_read(file) for file in files[number % len(files)]]

    return lambda number: _whole(layer.get(keys[number % len(keys)])), by_hand


def put_folder() -> tuple[Act, Act]:
    """Put a program of PoCL's that is not there yet."""
    layer, root, keys = _folders()
    artifact = _whole(layer.get(keys[0]))
    source = root / keys[0]
    files = {str(file.relative_to(source)): file.read_bytes() for file in source.rglob("*") if file.is_file()}

    def ours(number: int) -> None:
        key = f"{_NEW_FOLDER}{_letters(number)}"
        layer.put(key, artifact._replace(key=key))

    def by_hand(number: int) -> None:
        for name, data in files.items():
            file = root / "OO" / f"{number}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)

    return ours, by_hand


def disabled() -> tuple[Act, Act]:
    """Enter and leave a block in which every layer is off; the first time imports what must be imported."""

    def ours(_: int) -> None:
        with cachectl.disabled():
            pass

    return ours, lambda _: None


WAYS = {way.__name__: way for way in (get_row, put_row, get_folder, put_folder, disabled)}


def _rows() -> tuple[Layer, Path, list[str]]:
    layer = cachectl.Stack()["loopy"]
    path = next(layer.roots()[0].path.glob("*.sqlite"))
    with closing(sqlite3.connect(path)) as connection:
        keys = [str(key) for (key,) in connection.execute("select keyhash from dict limit 500")]
    return layer, path, keys


def _folders() -> tuple[Layer, Path, list[str]]:
    layer = cachectl.Stack()["pocl"]
    root = layer.roots()[0].path
    return layer, root, [str(folder.relative_to(root)) for folder in sorted(root.glob("*/*"))[:500]]


def _whole(artifact: Artifact | None) -> Artifact:
    if artifact is None:
        raise KeyError("an entry that is there was not found")
    return artifact


def _read(file: str) -> bytes:
    with open(file, "rb") as opened:
        return opened.read()


def _letters(number: int) -> str:
    return "".join("ABCDEFGHIJKLMNOP"[int(digit, 16)] for digit in f"{number:06x}")


def _timed(act: Act, number: int) -> float:
    started = time.perf_counter()
    act(number)
    return time.perf_counter() - started


def main() -> None:
    """Run both by turns and print the medians; the first run of each is not counted."""
    way, count = sys.argv[1], int(sys.argv[2])
    ours, by_hand = WAYS[way]()
    taken = [(_timed(ours, number), _timed(by_hand, number)) for number in range(count + 1)][1:]
    medians = {
        "ours": statistics.median(one for one, _ in taken),
        "by_hand": statistics.median(one for _, one in taken),
    }
    sys.stdout.write(json.dumps(medians) + "\n")


if __name__ == "__main__":
    main()
