"""The main job on real input: a loopy program on PoCL, seen, cleared and carried, layer by layer."""

import subprocess
from pathlib import Path

import pytest
from homes import Home, unpack_compute_cache
from support.dictionaries import rows_of
from support.layers import on_disk
from tiers import thorough, thorough_only

pytestmark = pytest.mark.real

LAYERS = ("loopy", "pyopencl-invoker", "pyopencl", "pocl")
KERNELS = [f"lk{index}" for index in range(8)]


def counted(home: Home) -> dict[str, int]:
    """Count every layer directly: rows, programs of PoCL by their bitcode, and binaries of PyOpenCL."""
    cache = home.path / ".cache"
    return {
        "loopy": sum(map(rows_of, (cache / "pytools").glob("pdict-v5-loopy-*.sqlite"))),
        "pyopencl-invoker": sum(map(rows_of, (cache / "pytools").glob("pdict-v5-pyopencl-*.sqlite"))),
        "pyopencl": len(list((cache / "pyopencl").glob("*/*/binary"))),
        "pocl": len(list((cache / "pocl/kcache").glob("??/*/program.bc"))),
    }


@pytest.mark.parametrize("layers", ["loopy pyopencl-invoker pytools", "pocl", "cuda"])
def test_sizes_are_those_of_du(warm: Home, layers: str) -> None:
    unpack_compute_cache(warm.path / ".nv/ComputeCache")
    # A hole takes no block.
    with (warm.path / ".nv/ComputeCache/index").open("r+b") as index:
        index.truncate(4 << 20)
    roots = [root["path"] for layer in warm.json(f"report {layers}")["layers"] for root in layer["roots"]]
    (root,) = {Path(path) for path in roots if Path(path).is_dir()}
    # The root itself stays when it is purged, and several layers may share it.
    counted = int(subprocess.check_output(("du", "-s", "--block-size=1", root)).split()[0]) - on_disk(root)
    assert warm.json(f"report {layers}")["total"]["bytes"] == counted


def run_again(home: Home, kernels: int = 8, plain: int = 3) -> list[str]:
    """Run the program, or a part of it, and return the libraries' messages about their caches."""
    said: list[str] = home.python(f"thirteen.py {kernels} {plain} plain")["said"]
    return said


def test_purge_all_makes_everything_compile_again(warm: Home) -> None:
    full = counted(warm)
    assert full == {"loopy": 40, "pyopencl-invoker": 11, "pyopencl": 3, "pocl": 11}
    run_again(warm, 2, 1)
    assert counted(warm) == full
    assert {layer["layer"]: layer["entries"] for layer in warm.json("report", *LAYERS)["layers"]} == full
    purged = warm.json("purge --all")
    assert {**purged["total"], "removed": sum(full.values()), "failed": 0, "skipped": 0} == purged["total"]
    assert set(counted(warm).values()) == {0}
    compiled = {"loopy": 5, "pyopencl-invoker": 2, "pyopencl": 1, "pocl": 2}
    for hit in (False, True):
        said = run_again(warm, 1, 1)
        assert (counted(warm), any("binary cache hit" in line for line in said)) == (compiled, hit)


@pytest.mark.parametrize("layer", thorough(*LAYERS))
def test_purging_one_layer_leaves_the_others_alone(warm: Home, layer: str) -> None:
    full = counted(warm)
    warm.cachectl("purge", layer)
    assert counted(warm) == {**full, layer: 0}
    run_again(warm)
    after = counted(warm)
    if layer == "pyopencl":
        # A miss there gives the driver a source of its own (a random line), so PoCL compiles it again.
        assert after.pop("pocl") == full.pop("pocl") + 3
    assert after == full


@thorough_only
def test_purging_one_kernel_recompiles_that_kernel_alone(warm: Home) -> None:
    full = counted(warm)
    result = warm.cachectl("purge --all --kernel lk3")
    assert counted(warm) == {"loopy": 35, "pyopencl-invoker": 10, "pyopencl": 3, "pocl": 10}, result.stderr
    kcache = warm.path / ".cache/pocl/kcache"
    untouched = {path: path.stat().st_mtime_ns for path in kcache.glob("??/*/program.bc")}
    said = run_again(warm, 4, 1)
    assert counted(warm) == full
    assert {path: path.stat().st_mtime_ns for path in untouched} == untouched
    recompiled = {
        path.name for path in kcache.glob("??/*/*") if path.is_dir() and path.parent / "program.bc" not in untouched
    }
    assert recompiled == {"lk3"}
    assert [line for line in said if line.endswith(" miss")] == [
        "frozenset({'lk3'}): typed-and-scheduled cache miss",
        "lk3: schedule cache miss",
        "TranslationUnit with entrypoints frozenset({'lk3'}): code generation cache miss",
        "lk3: invoker cache miss",
    ]


def carried(home: Home, layer: str, keys: list[str], folder: Path) -> None:
    folder.mkdir()
    for number, key in enumerate(keys):
        home.cachectl("get", layer, key, "-o", str(folder / str(number)))
    home.cachectl("purge", layer)
    for number, key in enumerate(keys):
        home.cachectl("put", layer, key, str(folder / str(number)))


@pytest.mark.parametrize("layer", ["pocl", *thorough("loopy", "pyopencl-invoker", "pyopencl")])
def test_the_library_hits_what_put_wrote(warm: Home, layer: str, tmp_path: Path) -> None:
    full = counted(warm)
    kernel = {"pyopencl": "pk1"}.get(layer, "lk1")
    keys = warm.cachectl("ls", layer, "--kernel", kernel, "-q").stdout.splitlines()
    carried(warm, layer, keys, tmp_path / "carried")
    before = counted(warm)
    assert before == {**full, layer: len(keys)}
    if layer == "pyopencl":
        said = warm.python("binaries.py 2")["said"]
        # pk0 was purged and misses, pk1 was put back and hits.
        assert [("hit" in line) for line in said if "binary cache" in line] == [False, True]
        assert counted(warm)[layer] == len(keys) + 1
        return
    # Two kernels: lk0 was purged and misses, lk1 was put back and hits.
    debug = warm.python("kernels.py 2", POCL_DEBUG="general,llvm")
    assert counted(warm) == {**before, layer: before[layer] + (5 if layer == "loopy" else 1)}
    if layer == "pocl":
        assert debug["stderr"].count("Writing program.bc") == 1
        assert debug["stderr"].count("Using a cached WG function") == 1
    if layer == "loopy":
        assert [line for line in debug["said"] if "code generation cache" in line] == [
            "TranslationUnit with entrypoints frozenset({'lk0'}): code generation cache miss",
            "TranslationUnit with entrypoints frozenset({'lk1'}): code generation cache hit",
        ]
