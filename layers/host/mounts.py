"""The file system of a path, if the platform shows it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

#: Types with unreliable locks and access times of other machines.
_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "afs", "9p", "glusterfs"}
    | {"fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.sshfs"}
)
MOUNTS: Final = Path("/proc/self/mountinfo")


class Mount(NamedTuple):
    """A mount: the type of the file system, and its source (a device, a server's export)."""

    kind: str
    source: str

    @property
    def is_network(self) -> bool:
        """Return whether other machines see it too."""
        return self.kind in _NETWORK


def network_file_system(path: Path, *, mounts: Path = MOUNTS) -> str | None:
    """Return the type of the network file system a path lies on; ``None`` on a local or unknown one."""
    mount = mount_of(path, mounts=mounts)
    return mount.kind if mount is not None and mount.is_network else None


def mount_of(path: Path, *, mounts: Path = MOUNTS) -> Mount | None:
    """Return the mount of a path, or of the nearest folder above it; ``None`` is unknown."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    real, best, mount = os.path.realpath(path), "", None
    for line in lines:
        before, _, after = line.partition(" - ")
        point = (before.split(" ")[4:] or [""])[0]
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
        is_above = real == point or real.startswith(point.rstrip("/") + "/")
        # A later mount on the same point hides the earlier one.
        if point and is_above and len(point) >= len(best):
            best, mount = point, Mount(*(*after.split(" "), "", "")[:2])
    return mount
