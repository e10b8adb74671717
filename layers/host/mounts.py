"""The file system of a path, if the platform shows it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from cachectl.layers.base.environment import MOUNTS

#: Types with unreliable locks and access times of other machines.
NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "afs", "9p", "glusterfs"}
    | {"fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.sshfs"}
)


def network_file_system(path: Path, *, mounts: Path = MOUNTS) -> str | None:
    """Return the type of the network file system a path lies on; ``None`` on a local or unknown one."""
    kind, _ = mount_of(path, mounts=mounts)
    return kind if kind in NETWORK else None


def mount_of(path: Path, *, mounts: Path = MOUNTS) -> tuple[str, str]:
    """Return the type and the source (a device, a server's export) of the mount that a path lies on.

    Both are empty if they are unknown.
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return "", ""
    real, best, mount = os.path.realpath(path), "", ("", "")
    for line in lines:
        before, _, after = line.partition(" - ")
        point = (before.split(" ")[4:] or [""])[0]
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
        is_above = real == point or real.startswith(point.rstrip("/") + "/")
        # A later mount on the same point hides the earlier one.
        if point and is_above and len(point) >= len(best):
            kind, source, *_ = *after.split(" "), "", ""
            best, mount = point, (kind, source)
    return mount
