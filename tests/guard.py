"""An audit hook that keeps the tests, and every Python that they start, within temporary folders.

Whatever would remove, rename, make, cut or open for writing something elsewhere is refused, and listed for the test,
which fails: a tester may have caches of every layer in the account's home, which no variable moves for all releases of
all libraries.

:func:`install` copies this file as ``sitecustomize`` into a folder on ``PYTHONPATH``, so it needs nothing but the
standard library. Handles are resolved where the event has them; an ``open`` relative to one is not seen.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_FOLDER = Path(__file__).parent
#: The list of what was touched, and where temporary folders are made, in the copy's folder.
_TOUCHED, _TEMPORARY = "touched", "temporary"
#: What MIOpen and PoCL use in a temporary folder without a usable home.
_OF_LIBRARIES = re.compile(r"\.|gfx|batchnorm_gfx|miopen|pocl|\d+\.\d+\.")
#: Where Python keeps compiled modules, and pytest and hypothesis what they remember; and what is no file.
_FREE_NAMES = ("__pycache__", ".pytest_cache", ".hypothesis", ".ruff_cache", ".mypy_cache")
_NO_FILES = ("/dev/", "/proc/", "/sys/")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
#: The places of paths in the arguments of an event, each with that of its handle, 0 if it has none.
_PATHS: dict[str, tuple[tuple[int, int], ...]] = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.truncate": ((0, 0),),
}


#: The folder of the copy, once it is installed.
installed: list[Path] = []


class Outside(RuntimeError):
    """A test would have changed something outside of the temporary folders."""


def _absolute(path: object, handle: object) -> str | None:
    """Return where a path leads, its last part not followed; ``None`` if that is not known."""
    if isinstance(path, int):
        with suppress(OSError):
            return os.readlink(f"/proc/self/fd/{path}")
        return None
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    if not text:
        return None
    if not os.path.isabs(text) and isinstance(handle, int) and handle >= 0:
        with suppress(OSError):
            text = f"{os.readlink(f'/proc/self/fd/{handle}')}/{text}"
    above, name = os.path.split(os.path.abspath(text))
    return os.path.join(os.path.realpath(above), name)


def _changed(event: str, arguments: tuple[object, ...]) -> Iterator[str | None]:
    """Yield the paths that an event changes."""
    if event == "open":
        path, _, flags = arguments
        # Relative ones may belong to a handle, which the event does not have.
        if isinstance(flags, int) and flags & _WRITING and isinstance(path, str | bytes) and os.path.isabs(path):
            yield _absolute(path, None)
    elif event == "sqlite3.connect":
        name = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        file, _, options = name.removeprefix("file:").partition("?")
        if file not in ("", ":memory:") and "mode=ro" not in options and "immutable=1" not in options:
            yield _absolute(file, None)
    for place, handle in _PATHS.get(event, ()):
        yield _absolute(arguments[place], arguments[handle] if handle else None)


def _is_free(path: str, folders: tuple[str, ...]) -> bool:
    """Return whether tests may change a path."""
    if path.startswith(_NO_FILES) or any(f"/{name}" in path for name in _FREE_NAMES):
        return True
    for folder in folders:
        if path == folder or (path.startswith(f"{folder}/") and not _OF_LIBRARIES.match(path[len(folder) + 1 :])):
            return True
    return False


def watch(folder: Path) -> None:
    """Refuse changes elsewhere in this process from now on, and list them in a folder made by :func:`install`."""
    folders = tuple((folder / _TEMPORARY).read_text().splitlines())
    touched = folder / _TOUCHED
    watched = frozenset((*_PATHS, "open", "sqlite3.connect"))

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in watched:
            for path in _changed(event, arguments):
                if path is not None and not _is_free(path, folders):
                    with touched.open("a", errors="replace") as file:
                        file.write(f"{event} {path}\n")
                    raise Outside(f"{event} {path}: tests change temporary folders only")

    sys.addaudithook(hook)


def install(*temporary: Path) -> None:
    """Watch this process, and through ``PYTHONPATH`` the Pythons that it starts."""
    folder = Path(tempfile.mkdtemp(prefix="cachectl-guard-"))
    installed.append(folder)
    (folder / _TEMPORARY).write_text("".join(f"{os.path.realpath(place)}\n" for place in temporary))
    (folder / _TOUCHED).touch()
    (folder / "sitecustomize.py").write_bytes(Path(__file__).read_bytes())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    watch(folder)


def take_touched() -> list[str]:
    """Return what was touched since the last call."""
    file = installed[0] / _TOUCHED
    touched = file.read_text().splitlines()
    os.truncate(file, 0)
    return touched


if __name__ == "sitecustomize":
    watch(_FOLDER)
