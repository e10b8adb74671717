"""Helpers shared by the tests of databases."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from homes import CACHECTL

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


def purge(home: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Purge the dictionaries of a home as the superuser."""
    done = subprocess.run(
        [*CACHECTL, "purge", "pytools", "--wait", "0.5", "--json", *arguments],
        env={"HOME": str(home)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    (layer,) = json.loads(done.stdout)["layers"]
    return done.returncode, layer
