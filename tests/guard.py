"""An audit hook that keeps the tests, and every Python that they start, within temporary folders.

Whatever would remove, rename, make, cut or open for writing something elsewhere is refused, and listed for the test,
which fails: a tester may have caches of every layer in the account's home, which no variable moves for all releases of
all libraries.

:func:`install` copies this file as ``sitecustomize`` into a folder on ``PYTHONPATH``. Each start of a Python imports
it, so it needs nothing but what is loaded anyway. Handles are resolved where the event has them; an ``open`` relative
to one is not seen.
"""

import os
import sys

#: The list of what was touched, and where temporary folders are made, in the copy's folder.
_TOUCHED, _TEMPORARY = "touched", "temporary"
#: What MIOpen and PoCL use in a temporary folder without a usable home; of MIOpen's versions only the folders.
_OF_LIBRARIES = (".", "gfx", "batchnorm_gfx", "miopen", "pocl")
#: What tools of the tests keep in a home, where no layer has anything.
_OF_TOOLS = (".ipython", ".jupyter", ".cache/pip", ".cache/matplotlib", ".config/matplotlib")
#: Where Python keeps compiled modules, and pytest and hypothesis what they remember; and what is no file.
_FREE_NAMES = ("__pycache__", ".pytest_cache", ".hypothesis", ".ruff_cache", ".mypy_cache", *_OF_TOOLS)
_NO_FILES = ("/dev/", "/proc/", "/sys/")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
#: A file without a name is in no folder.
_NAMELESS = getattr(os, "O_TMPFILE", -1)
#: The places of paths in the arguments of an event, each with that of its handle, 0 if it has none.
_PATHS: "dict[str, tuple[tuple[int, int], ...]]" = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.truncate": ((0, 0),),
}
_WATCHED = frozenset((*_PATHS, "open", "sqlite3.connect"))
#: The folder of the copy, once it is installed.
installed: "list[str]" = []


class Outside(RuntimeError):
    """A test would have changed something outside of the temporary folders."""


def _folder_of(handle: object) -> str:
    """Return the path of an open file or folder; nothing if it is not known."""
    try:
        return os.readlink(f"/proc/self/fd/{handle}")
    except OSError:
        return ""


def _absolute(path: object, handle: object) -> str:
    """Return where a path leads, its last part not followed; nothing if that is not known."""
    if isinstance(path, int):
        return _folder_of(path)
    text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    if text and not os.path.isabs(text) and isinstance(handle, int) and handle >= 0:
        text = os.path.join(_folder_of(handle), text)
    above, name = os.path.split(os.path.abspath(text))
    return os.path.join(os.path.realpath(above), name) if text else ""


def _changed(event: str, arguments: "tuple[object, ...]") -> "list[str]":
    """Return the paths that an event changes."""
    if event == "open":
        path, _, flags = arguments
        # Relative ones may belong to a handle, which the event does not have.
        is_known = isinstance(path, (str, bytes)) and os.path.isabs(path)
        if not is_known or not isinstance(flags, int) or flags & _NAMELESS == _NAMELESS:
            return []
        return [_absolute(path, None)] if flags & _WRITING else []
    if event == "sqlite3.connect":
        name = os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes, os.PathLike)) else ""
        file, _, options = name.removeprefix("file:").partition("?")
        reads = file in ("", ":memory:") or "mode=ro" in options or "immutable=1" in options
        return [] if reads else [_absolute(file, None)]
    return [_absolute(arguments[place], arguments[handle] if handle else None) for place, handle in _PATHS[event]]


def _is_free(path: str, folders: "tuple[str, ...]") -> bool:
    """Return whether tests may change a path."""
    if path.startswith(_NO_FILES) or any(f"/{name}" in path for name in _FREE_NAMES):
        return True
    for folder in folders:
        name = path[len(folder) + 1 :].partition("/")[0]
        is_version = name.partition(".")[0].isdigit() and "." in name
        if path == folder or (path.startswith(f"{folder}/") and not (name.startswith(_OF_LIBRARIES) or is_version)):
            return True
    return False


def watch(folder: str) -> None:
    """Refuse changes elsewhere in this process from now on, and list them in a folder made by :func:`install`."""
    with open(os.path.join(folder, _TEMPORARY)) as file:
        folders = tuple(file.read().splitlines())

    def hook(event: str, arguments: "tuple[object, ...]") -> None:
        if event in _WATCHED:
            for path in _changed(event, arguments):
                if path and not _is_free(path, folders):
                    with open(os.path.join(folder, _TOUCHED), "a", errors="replace") as file:
                        file.write(f"{event} {path}\n")
                    raise Outside(f"{event} {path}: tests change temporary folders only")

    sys.addaudithook(hook)


def install(*temporary: str) -> None:
    """Watch this process, and through ``PYTHONPATH`` the Pythons that it starts."""
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix="cachectl-guard-")
    installed.append(folder)
    with open(os.path.join(folder, _TEMPORARY), "w") as file:
        file.write("".join(f"{os.path.realpath(place)}\n" for place in temporary))
    open(os.path.join(folder, _TOUCHED), "w").close()
    shutil.copyfile(__file__, os.path.join(folder, "sitecustomize.py"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    watch(folder)


def take_touched() -> "list[str]":
    """Return what was touched since the last call."""
    file = os.path.join(installed[0], _TOUCHED)
    if not os.path.getsize(file):
        return []
    with open(file) as opened:
        touched = opened.read().splitlines()
    os.truncate(file, 0)
    return touched


if __name__ == "sitecustomize":
    watch(os.path.dirname(__file__))
