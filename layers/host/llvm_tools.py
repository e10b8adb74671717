"""LLVM's disassembler, if installed: it checks bitcode completely.

It reads bitcode from standard input and executes nothing of it; its output is discarded. ``llvm-dis`` reads the bitcode
of its own release and of older ones, so the oldest one that is new enough is used.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from cachectl.layers.base.environment import Environment

T = TypeVar("T")

_NAME: Final = re.compile(r"llvm-dis(?:-\d+)?(?:\.exe)?")
#: Where packages keep the tools of several releases side by side: Debian and Ubuntu, Fedora, Gentoo, ROCm.
_FOLDERS: Final = ("/usr/lib/llvm-*/bin", "/usr/lib64/llvm*/bin", "/usr/lib/llvm/*/bin", "/opt/rocm*/llvm/bin")
_VERSION: Final = re.compile(rb"LLVM version (\d+)\.")
#: Limits for one program, in seconds and bytes of memory; real ones take 0.1 s and 100 MB.
_SECONDS: Final = 60.0
_MEMORY: Final = 1 << 32
_MOST_AT_ONCE: Final = 4


class Disassembler(NamedTuple):
    """One ``llvm-dis``, with its major release."""

    release: int
    path: str
    variables: Mapping[str, str]

    def reads(self, bitcode: bytes) -> bool | None:
        """Return whether it can read bitcode; ``None`` if it could not be run, or not in time."""
        try:
            process = subprocess.Popen(  # noqa: S603 - no shell, and a path that we found
                [self.path, "-o", os.devnull, "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Otherwise LLVM starts a symbolizer when it crashes.
                env={**self.variables, "LLVM_DISABLE_SYMBOLIZATION": "1"},
            )
        except OSError:
            return None
        with process:
            _limit_memory(process.pid)
            try:
                # The process may end before it has read everything.
                process.communicate(bitcode, timeout=_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                return None
        return process.returncode == 0


class Disassemblers:
    """Every ``llvm-dis`` on the path of an environment, and in the folders that packages use."""

    def __init__(self, environment: Environment) -> None:
        self._variables = environment.variables
        self._path = environment.get("PATH") or os.defpath

    @cached_property
    def _found(self) -> list[Disassembler]:
        folders = [Path(folder) for folder in self._path.split(os.pathsep) if os.path.isabs(folder)]
        folders += [folder for pattern in _FOLDERS for folder in sorted(Path("/").glob(pattern[1:]))]
        files = {os.path.realpath(path) for folder in folders for path in _named(folder)}
        releases = ((_release(path), path) for path in sorted(files))
        found = [Disassembler(release, path, self._variables) for release, path in releases if release is not None]
        return sorted(found, key=lambda one: one.release)

    def of(self, release: int) -> Disassembler | None:
        """Return the oldest one that reads bitcode of a release."""
        return next((one for one in self._found if one.release >= release), None)


def in_parallel(check: Callable[[T], bool | None], items: Iterable[T]) -> Iterator[tuple[T, bool | None]]:
    """Pair each item with the result of its check, in order; a few are checked at once, and few are kept in memory."""
    workers = min(_MOST_AT_ONCE, os.cpu_count() or 1)
    waiting: deque[tuple[T, Future[bool | None]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for item in items:
            waiting.append((item, pool.submit(check, item)))
            if len(waiting) > workers:
                first, result = waiting.popleft()
                yield first, result.result()
        for first, result in waiting:
            yield first, result.result()


def _named(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    except OSError:
        return []


def _release(path: str) -> int | None:
    try:
        done = subprocess.run(  # noqa: S603 - as above
            (path, "--version"), capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(done.stdout) if done.returncode == 0 else None
    return None if match is None else int(match[1])


def _limit_memory(process: int) -> None:
    """Limit the memory of a process if the system can: damaged counts make LLVM request any amount."""
    with suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        resource.prlimit(process, resource.RLIMIT_AS, (_MEMORY, _MEMORY))
