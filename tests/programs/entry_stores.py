"""Look entries up as a driver does, and store those that are missing: KIND ROOT SOURCE [KEY...].

Entries are the files below SOURCE; without KEYs all are looked up, one after the other. It prints what it found, as
JSON. What each kind does stands in the pages of the layers under docs/layers.
"""

import bz2
import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import sqlite3
import sys
import tempfile
from pathlib import Path


def cuda(root, key, data):
    """Open the index, then the entry; a missing or broken entry is made anew, under the index's lock."""
    if not os.access(root if root.exists() else root.parents[1], os.W_OK):
        return read(root / key) == data
    root.mkdir(parents=True, exist_ok=True)
    index = os.open(root / "index", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        found = read(root / key)
        if found != data:
            fcntl.lockf(index, fcntl.LOCK_EX)
            (root / key).parent.mkdir(parents=True, exist_ok=True)
            (root / key).unlink(missing_ok=True)
            entry = os.open(root / key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.write(entry, data[:20])
            os.write(entry, data[20:])
            os.close(entry)
        return found == data
    finally:
        os.close(index)


def neo(root, key, data):
    """Read the entry; a missing one is written beside the account, under its lock, and renamed."""
    if (found := read(root / key)) is not None:
        return found == data
    account = os.open(root / "config.file", os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(account, fcntl.LOCK_EX)
    handle, temporary = tempfile.mkstemp(prefix="cl_cache.", dir=root)
    os.write(handle, data)
    os.close(handle)
    (root / key).parent.mkdir(parents=True, exist_ok=True)
    os.rename(temporary, root / key)
    os.pwrite(account, sum(path.stat().st_size for path in root.rglob("*.cl_cache")).to_bytes(8, "little"), 0)
    os.close(account)
    return False


def comgr(root, key, data):
    """Map the entry; a missing one is written to a temporary and renamed."""
    with contextlib.suppress(FileNotFoundError), open(root / key, "rb") as entry:
        return mmap.mmap(entry.fileno(), 0, access=mmap.ACCESS_READ)[:] == data
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f"amdgpu-compiler-{os.getpid() % 0xFFFFFF:06x}.tmp.o"
    with open(temporary, "w+b") as file:
        file.write(data)
    temporary.rename(root / key)
    return False


def miopen(root, key, data):
    """Open the database to look up, which makes it; open it again to store."""
    root.mkdir(parents=True, exist_ok=True)
    arguments = " -DMLO_HW_WAVE_SZ=64 -mcpu=gfx90a"
    with contextlib.closing(database(root)) as connection:
        asked = "SELECT kernel_blob FROM kern_db WHERE kernel_name = ? AND kernel_args = ?"
        found = connection.execute(asked, (f"{key}.o", arguments)).fetchone()
    if found is None:
        with contextlib.closing(database(root)) as connection:
            row = (f"{key}.o", arguments, bz2.compress(data), hashlib.md5(data).hexdigest(), len(data))  # noqa: S324
            connection.execute("INSERT OR REPLACE INTO kern_db VALUES(NULL, ?, ?, ?, ?, ?)", row)
            connection.commit()
    return found is not None


def database(root):
    connection = sqlite3.connect(root / "gfx90a6e.ukdb")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.executescript(
        "CREATE TABLE IF NOT EXISTS `kern_db` (`id` INTEGER PRIMARY KEY ASC,`kernel_name` TEXT NOT NULL,"
        "`kernel_args` TEXT NOT NULL,`kernel_blob` BLOB NOT NULL,`kernel_hash` TEXT NOT NULL,"
        "`uncompressed_size` INT NOT NULL);"
        "CREATE UNIQUE INDEX IF NOT EXISTS `idx_kern_db` ON kern_db(kernel_name, kernel_args);"
    )
    return connection


def read(path):
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDONLY)
        try:
            return os.read(handle, 1 << 24)
        finally:
            os.close(handle)
    return None


if __name__ == "__main__":
    kind, root, source = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    keys = sys.argv[4:] or [str(path.relative_to(source)) for path in sorted(source.rglob("*")) if path.is_file()]
    outcomes = {key: globals()[kind](root, key, (source / key).read_bytes()) for key in keys}
    print(json.dumps({"hits": sum(outcomes.values()), "misses": len(outcomes) - sum(outcomes.values())}))
