"""Disk blocks beside bytes: what a file system with a quota counts."""

import os
from pathlib import Path

import pytest
from homes import Home, unpack_compute_cache


def blocks(*folders: Path) -> tuple[int, int]:
    """Count the files below some folders, and the bytes of their disk blocks."""
    files = [Path(above, name).lstat() for folder in folders for above, _, names in os.walk(folder) for name in names]
    return len(files), sum(512 * file.st_blocks for file in files)


@pytest.mark.real
def test_every_file_of_the_real_libraries_is_measured(warm: Home) -> None:
    unpack_compute_cache(warm.path / ".nv/ComputeCache")
    # A hole takes no block.
    with (warm.path / ".nv/ComputeCache/index").open("ab") as index:
        index.truncate(4 << 20)
    done = warm.json("report")
    report = {layer["layer"]: layer for layer in done["layers"]}
    cache = warm.path / ".cache"
    for folder, names in {
        cache / "pytools": ("loopy", "pyopencl-invoker", "pytools"),
        cache / "pocl": ("pocl",),
        warm.path / ".nv": ("cuda",),
    }.items():
        measured = [sum(report[name][number] for name in names) for number in ("files", "disk_bytes")]
        assert tuple(measured) == blocks(folder), folder
    assert report["cuda"]["bytes"] > (4 << 20) > report["cuda"]["disk_bytes"]
    assert done["total"]["disk_bytes"] == sum(layer["disk_bytes"] for layer in report.values())
