"""Which file system a path lies on, as far as the platform tells."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

#: Types on which locks and access times of other machines cannot be relied on.
_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "afs", "9p", "glusterfs", "fuse.sshfs"}
)
MOUNTS: Final = Path("/proc/self/mountinfo")


def network_file_system(path: Path, *, mounts: Path = MOUNTS) -> str | None:
    """Return the type of the network file system a path lies on; ``None`` on a local or unknown one."""
    kind = file_system(path, mounts=mounts)
    return kind if kind in _NETWORK else None


def file_system(path: Path, *, mounts: Path = MOUNTS) -> str | None:
    """Return the type of the file system a path, or the nearest folder above it, lies on; ``None`` is unknown."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    real = os.path.realpath(path)
    best, kind = "", None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]) if len(fields) > 4 else ""  # noqa: PLR2004
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # A later mount on the same point hides the earlier one.
        if point and inside and len(point) >= len(best):
            best, kind = point, after.split(" ")[0]
    return kind
