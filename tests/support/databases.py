"""Helpers shared by the tests of databases."""

import subprocess
import sys
from pathlib import Path

from support import dictionaries
from support.layers import select

PYTHON = ".".join(str(part) for part in sys.version_info)
FILE = f"pdict-v5-mine-{PYTHON}.sqlite"
CREATE = dictionaries.CREATE


def dictionary(path: Path, rows: int = 20, value: bytes = b"\x80\x04N." + bytes(500)) -> Path:
    return dictionaries.dictionary(path.parent, path.name, {f"{number:016x}": value for number in range(rows)})


#: Fills the dictionary that it is given, and is killed before the end.
INTERRUPTED = (
    "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
    "c.execute('pragma cache_size = 1'); c.execute('begin immediate')\n"
    "for n in range(300): c.execute('insert into dict values (?, ?)', (str(n), b'x' * 4000))\n"
    "os.kill(os.getpid(), 9)"
)


def interrupted(path: Path) -> Path:
    dictionary(path)
    subprocess.run([sys.executable, "-c", INTERRUPTED, str(path)], check=False)
    assert Path(f"{path}-journal").stat().st_size
    return path


def rows_of(path: Path) -> int:
    ((count,),) = select(path, "count(*) from dict")
    return int(count)
