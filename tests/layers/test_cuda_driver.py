"""The layer ``cuda`` against the driver itself, on machines that have one."""

import ctypes.util
import subprocess
import sys

import pytest
from homes import Home
from support.layers import clear, got, root_of, verified

from cachectl.layers.core.layer import Layer
from cachectl.layers.core.selection import Selection

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        ctypes.util.find_library("nvidia-opencl") is None and ctypes.util.find_library("cuda") is None,
        reason="no NVIDIA driver is installed here",
    ),
]

COUNT = 6


@pytest.fixture
def layer(home: Home) -> Layer:
    if home.python("nvidia.py", str(COUNT))["seconds"] is None:
        pytest.skip("PyOpenCL sees no NVIDIA platform here (set OCL_ICD_VENDORS)")
    return home.stack["cuda"]


def files(layer: Layer) -> dict[str, tuple[int, int]]:
    """Return inode and change time of every entry: a rewritten one has another."""
    root = root_of(layer)
    found = {str(path.relative_to(root)): path.stat() for path in root.glob("?/?/*") if path.is_file()}
    return {key: (status.st_ino, status.st_mtime_ns) for key, status in found.items()}


def test_the_driver_hits_what_put_wrote_and_replaces_damage(home: Home, layer: Layer) -> None:
    kept = [got(layer, entry.key) for entry in layer.entries(Selection(kernel="nv[012]"))]
    everything = files(layer)
    clear(layer)
    assert files(layer) == {}
    for artifact in kept:
        layer.put(artifact.key, artifact)
    placed = files(layer)
    assert len(placed) == 6
    home.python("nvidia.py", str(COUNT))
    after = files(layer)
    assert after.keys() == everything.keys()
    # The placed entries were hit, so they were not written again.
    assert {path: after[path] for path in placed} == placed
    assert verified(layer) == []
    assert clear(layer, kernel="nv3").removed == 2
    path = root_of(layer) / kept[0].key
    path.write_bytes(kept[0].data[:-1] + bytes([kept[0].data[-1] ^ 1]))
    assert [finding.key for finding in verified(layer)] == [kept[0].key]
    left = {key: entry for key, entry in files(layer).items() if key != kept[0].key}
    home.python("nvidia.py", str(COUNT))
    after = files(layer)
    assert after.keys() == everything.keys()
    assert {path: after[path] for path in left} == left
    assert path.read_bytes() == kept[0].data
    assert verified(layer) == []


def test_purging_beside_a_compiling_program_costs_it_nothing(home: Home, layer: Layer) -> None:
    program = [sys.executable, str(home.programs / "nvidia.py"), "60"]
    with subprocess.Popen(program, env=home.variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        rounds = 0
        while child.poll() is None:
            assert not clear(layer).failed
            rounds += 1
        assert child.stderr is not None
        assert child.returncode == 0, child.stderr.read()
    assert rounds > 1
    home.python("nvidia.py", str(COUNT))
    assert verified(layer) == []


def test_switched_off_the_driver_writes_nothing(home: Home) -> None:
    layer = home.stack["cuda"]
    home.cachectl("run --no-cache --", sys.executable, str(home.programs / "nvidia.py"), str(COUNT))
    assert not layer.roots()[0].exists


def test_a_started_driver_answers_no_build_of_the_block_and_keeps_none(home: Home) -> None:
    seen = home.python("nvidia_salted.py")
    if seen["seconds"] is None:
        pytest.skip("PyOpenCL sees no NVIDIA platform here (set OCL_ICD_VENDORS)")
    assert seen["status"] == "salted"
    assert seen["sums"] == [128.0] * 3
    _, warm, first, second, after = seen["seconds"]
    # The same source every time: a hit of the front end or the back end would show.
    assert min(first, second) > 5 * max(warm, after)
    assert seen["stored"] >= 4
    assert seen["marked"] == seen["stored"]
    assert seen["left"] == []
    assert seen["same"]
    layer = home.stack["cuda"]
    assert verified(layer) == []
