"""Places and sizes of caches of compiled code that no layer covers. They are only read."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base.environment import Environment, user_name
from cachectl.layers.disk import handles

_TSFC = "FIREDRAKE_TSFC_KERNEL_CACHE_DIR"


class Neighbour(NamedTuple):
    """One place of a library; ``files`` and ``bytes`` are ``None`` if they could not be counted completely."""

    name: str
    path: Path
    source: str
    exists: bool
    files: int | None
    bytes: int | None


#: A library, the variable that moves its cache, and its default places, several if releases differ. A place begins with
#: a variable, the home (~) or the temporary folder (TMP). Of several places in a text, the first known one counts.
_ROWS = (
    # By triton/knobs.py (cache_knobs)
    ("Triton", "TRITON_CACHE_DIR", ("$TRITON_HOME/.triton/cache ~/.triton/cache",)),
    # By cupy/cuda/compiler.py (get_cache_dir)
    ("CuPy", "CUPY_CACHE_DIR", ("~/.cupy/kernel_cache",)),
    # numba/core/caching.py: next to the source, in __pycache__, or here if that is not writable
    ("Numba", "NUMBA_CACHE_DIR", ("$XDG_CACHE_HOME/numba ~/.cache/numba",)),
    # pyop2/configuration.py (cache_dir); Firedrake's own environment names a folder within it
    ("PyOP2", "PYOP2_CACHE_DIR", ("$VIRTUAL_ENV/.cache/pyop2", "TMP/pyop2-cache-uid{uid}")),
    # By firedrake/tsfc_interface.py (TSFCKernel._cachedir)
    ("TSFC", _TSFC, ("$VIRTUAL_ENV/.cache/tsfc", "TMP/firedrake-tsfc-kernel-cache-uid{uid}")),
    # By torch/_inductor/runtime/cache_dir_utils.py (default_cache_dir)
    ("torch inductor", "TORCHINDUCTOR_CACHE_DIR", ("TMP/torchinductor_{login}",)),
    # jax/_src/config.py (jax_compilation_cache_dir): none by default
    ("JAX", "JAX_COMPILATION_CACHE_DIR", ()),
)


def neighbours(environment: Environment) -> list[Neighbour]:
    """Return every place that a variable names, else the existing default places of a library, or one of them."""
    folders = []
    for name, variable, defaults in _ROWS:
        if value := environment.get(variable):
            # A URL is not a local path.
            places = [] if "://" in value else [(environment.expand(value), variable)]
        else:
            known = [place for text in defaults if (place := _default(text, environment)) is not None]
            places = [place for place in known if place[0].is_dir()] or known[-1:]
        for path, source in places:
            folders.append(Neighbour(name, path, source, path.exists(), *_measured(path)))
    return folders


def _default(text: str, environment: Environment) -> tuple[Path, str] | None:
    """Return the first place in a text with a known beginning, and the variable that it begins with."""
    for place in text.split():
        start, _, below = place.partition("/")
        if start[0] != "$":
            user = os.getuid() if hasattr(os, "getuid") else 0
            login = environment.get("LOGNAME") or environment.get("USER") or user_name(user)
            folder = environment.home_folder if start == "~" else environment.temporary
            return folder / below.format(uid=user, login=re.sub(r'[\\/:*?"<>|]', "_", login)), "default"
        if value := environment.get(start[1:]):
            return environment.absolute(value) / below, start[1:]
    return None


def _measured(folder: Path) -> tuple[int | None, int | None]:
    """Return number and total size of the plain files below a folder, ``None`` if it cannot be read completely."""
    files: handles.Statuses = {}
    with suppress(OSError), handles.opened_root(folder) as root:
        if root is not None:
            handles.gather(root, ".", files, {})
        sizes = [status.st_size for status in files.values() if stat.S_ISREG(status.st_mode)]
        return len(sizes), sum(sizes)
    return None, None
