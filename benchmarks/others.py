"""Caches of other tools, filled with files so that those tools count them: for the record only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: Models of the cache of Hugging Face, and files of a folder where nothing says how many there are.
_MODELS = 100
_CONTENT = b"x" * 1000


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool with a cache of its own: its command, the variables that say where, and how to fill it."""

    name: str
    command: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    fill: Callable[[Path, int], None]


def _name(number: int) -> str:
    return hashlib.blake2b(b"%d" % number, digest_size=28).hexdigest()


def _put(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_CONTENT)


def _fill_hub(folder: Path, files: int) -> None:
    """Make models of blobs, each with a snapshot of links: a link is a file here."""
    blobs = max(1, files // _MODELS // 2)
    for model in range(min(_MODELS, max(1, files // 2))):
        place = folder / "hub" / f"models--bench--m{model}"
        revision = _name(model)[:40]
        (place / "snapshots" / revision).mkdir(parents=True)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text(revision)
        for number in range(blobs):
            blob = place / "blobs" / _name(model * blobs + number)
            _put(blob)
            (place / "snapshots" / revision / f"part{number}").symlink_to(f"../../blobs/{blob.name}")


def _fill_uv(folder: Path, files: int) -> None:
    """Make unpacked wheels of fifty files each."""
    for number in range(files):
        _put(folder / "archive-v0" / _name(number // 50)[:20] / "package" / f"module{number % 50}.py")


def _fill_ccache(folder: Path, files: int) -> None:
    """Make results in two levels of folders."""
    for number in range(files):
        name = _name(number)
        _put(folder / name[0] / name[1] / f"{name[2:]}R")


def _fill_pip(folder: Path, files: int) -> None:
    """Make answers of an index in five levels of folders."""
    for number in range(files):
        name = _name(number)
        _put(folder / "http-v2" / Path(*name[:5]) / name)


#: ``{}`` stands for the folder.
TOOLS = (
    Tool("hf", ("hf", "cache", "ls"), (("HF_HOME", "{}"), ("HF_HUB_OFFLINE", "1")), _fill_hub),
    Tool("uv", ("uv", "cache", "size"), (("UV_CACHE_DIR", "{}"),), _fill_uv),
    Tool("ccache", ("ccache", "-c"), (("CCACHE_DIR", "{}"), ("CCACHE_MAXSIZE", "100G")), _fill_ccache),
    Tool("pip", ("pip", "cache", "info"), (("PIP_CACHE_DIR", "{}"),), _fill_pip),
)
