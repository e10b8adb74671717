"""The main verbs on a wide and a narrow terminal, held against kept screens.

``CACHECTL_SCREENS=write pytest tests/cli/test_screens.py tests/cli/test_edges.py`` writes the screens again. Look at
them before they are kept.
"""

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from homes import CACHECTL, Home, make_home, unpack_compute_cache
from tiers import thorough

from cachectl.layers.host.here import this_environment

SCREENS = Path(__file__).parent / "screens"
#: What is typed, in the order of a first hour. The numbers of a home are the same on every machine.
LINES = (
    "report",
    "report -v",
    "report neo",
    "dir",
    "ls --sort size --limit 8",
    "ls --long --sort size --limit 4",
    "ls cuda --older-than 37d --sort age -q",
    *(f"env --disable --layer pocl --layer loopy --shell {shell}" for shell in ("sh", "fish", "csh", "powershell")),
    "purge cuda --kernel 'ka1?' --dry-run",
    "prune --older-than 30d --max-size 130K --dry-run",
    "verify cuda",
    "purge cuda --damaged",
    "layers cuda neo",
    "purge --all",
    "report",
)
#: A name as long as that of the folder in which the home is made: paths take as much room on every machine.
SHOWN = "/home/annemarie-becker"
#: A disk in memory, with blocks of 4 KiB.
MEMORY = Path("/dev/shm")  # noqa: S108 - the folder made there has a random name
KEY = "3/f/433a72c95049e7"


@pytest.fixture
def ann() -> Iterator[Home]:
    """Return a home with caches of CUDA, some entries of which are old and one is damaged."""
    folder = Path(tempfile.mkdtemp(prefix="home-", dir=MEMORY))
    assert len(str(folder)) == len(SHOWN)
    try:
        home = make_home(folder)
        cache = folder / ".nv/ComputeCache"
        unpack_compute_cache(cache)
        (cache / KEY).write_bytes((cache / KEY).read_bytes()[:-1] + b"?")
        (cache / "0/0").mkdir(parents=True, exist_ok=True)
        now = this_environment().clock()
        for number, path in enumerate(sorted(cache.glob("?/?/*"))):
            then = now - 86400 * (number + 1) + 3600
            os.utime(path, (then, then))
        (folder / "tmp").mkdir(mode=0o700)
        yield Home(folder, {**home.variables, "OCL_ICD_VENDORS": f"{folder}/none", "TMPDIR": str(folder / "tmp")})
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(not MEMORY.is_dir(), reason="needs a disk in memory")
@pytest.mark.parametrize("columns", [80, *thorough(40)])
def test_screens_are_as_they_were_kept(ann: Home, columns: int) -> None:
    shown = "".join(f"$ cachectl {line}\n{screen(ann, columns, line)}\n" for line in LINES)
    kept = SCREENS / f"{columns}.txt"
    if os.environ.get("CACHECTL_SCREENS") == "write":
        kept.write_text(shown, encoding="utf-8")
    assert shown == kept.read_text(encoding="utf-8")


def screen(home: Home, columns: int, line: str) -> str:
    """Return what a command writes on a terminal, then its messages, and its status if that is not 0."""
    with tempfile.TemporaryFile() as errors:
        done = home.terminal(*CACHECTL, *shlex.split(line), columns=columns, errors=errors.fileno(), check=False)
        errors.seek(0)
        text = done.stdout + errors.read().decode()
    text = re.sub("\x1b\\[[0-9;]*m", "", text).replace(str(home.path), SHOWN)
    return re.sub(r"\b\ds\b", "1s", text) + (f"status {done.returncode}\n" if done.returncode else "")
