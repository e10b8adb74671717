"""Lookups and stores that show by files.

Programs use the caches of CUDA, NEO, comgr and MIOpen as the drivers do, with entries that the drivers made; Rusticl
uses Mesa's itself.
"""

import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from homes import CACHECTL, Home, unpack_compute_cache
from support.layers import on_disk, running
from support.products import comgr_entry, unpack
from support.tracing import layer_of, numbers, trace
from tiers import real, thorough, thorough_only

from cachectl.layer_set import LayerSet
from cachectl.layers.base.environment import Environment
from cachectl.watching import events
from cachectl.watching.events import LOST, EntryEvents
from cachectl.watching.evidence import Evidence

#: The folder of each kind below the home.
PLACES = {
    "cuda": ".nv/ComputeCache",
    "neo": ".cache/neo_compiler_cache",
    "comgr": ".cache/comgr",
    "miopen": ".cache/miopen/3.3.0.a85ca8a54",
}


Sources = Mapping[str, Path]


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    top = tmp_path_factory.mktemp("sources")
    cuda = top / "cuda"
    unpack_compute_cache(cuda)
    (cuda / "index").unlink()
    unpack("neo-ocloc-22.43", top / "ocloc")
    for path in (top / "ocloc").rglob("*.ocloc_cache"):
        target = top / "neo" / path.name[0] / path.name[1] / path.name.replace("ocloc", "cl")
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    comgr = top / "comgr"
    comgr.mkdir()
    for number in range(5):
        (comgr / f"llvmcache-{number:064x}").write_bytes(comgr_entry(f"output {number}".encode() * 3000))
    return {"cuda": cuda, "neo": top / "neo", "comgr": comgr, "miopen": comgr}


def arguments(home: Home, sources: Sources, kind: str) -> tuple[str, ...]:
    return "entry_stores.py", kind, str(home.path / PLACES[kind]), str(sources[kind])


def traced(home: Home, sources: Sources, kind: str, **options: Any) -> dict[str, Any]:  # noqa: ANN401 - of trace
    return trace(home, *arguments(home, sources, kind), **options)


def used(document: Mapping[str, Any], kind: str, what: str) -> set[str]:
    return {entry["key"] for entry in document["entries"] if entry["layer"] == kind and entry[what]}


@pytest.mark.parametrize("kind", ["neo", *thorough("comgr")])
def test_cold_warm_one_missing_and_one_damaged(home: Home, sources: Sources, kind: str) -> None:
    """Each entry is a miss and a store, then a hit; of a purged one, the entry itself is named."""
    (home.path / ".cache/neo_compiler_cache").mkdir(parents=True)
    keys = {str(path.relative_to(sources[kind])) for path in sources[kind].rglob("*") if path.is_file()}
    cold = traced(home, sources, kind)
    assert numbers(cold, kind) == (0, len(keys), len(keys))
    # Folders of entries are new, and may have been watched too late for a hit right after a store.
    assert layer_of(cold, kind)["evidence"] == "exact" or events._EARLY in layer_of(cold, kind)["why"]
    assert used(cold, kind, "stores") == keys
    warm = traced(home, sources, kind)
    assert numbers(warm, kind) == (len(keys), 0, 0)
    assert (used(warm, kind, "hits"), used(warm, kind, "stores")) == (keys, set())
    gone = min(keys)
    (home.path / PLACES[kind] / gone).unlink()
    purged = traced(home, sources, kind)
    assert (numbers(purged, kind), used(purged, kind, "stores")) == ((len(keys) - 1, 1, 1), {gone})
    assert {layer["layer"] for layer in purged["layers"] if layer["hits"] and layer["evidence"] == "exact"} == {kind}
    # A damaged entry is a miss, which is not written again.
    victim = home.path / PLACES[kind] / gone
    victim.write_bytes(victim.read_bytes()[:100])
    assert numbers(traced(home, sources, kind), kind) == (len(keys) - 1, 1, 0)


#: The path of an entry that a program opens.
OPENED = re.compile(r".*/ComputeCache/([0-9a-f]/[0-9a-f]/[0-9a-f]{14})")


def opened(log: Path) -> tuple[Counter[str], Counter[str], int]:
    """Return the hits and the stores of each entry, and the number of misses, from the log that ``opens.c`` wrote.

    An entry that is written again right after it was read was not complete, so that this was no hit.
    """
    hits, stores, misses = Counter[str](), Counter[str](), 0
    was_read: set[str] = set()
    for line in log.read_text().splitlines():
        _, flags, error, path = line.split(" ", 3)
        if (matched := OPENED.fullmatch(path)) is None:
            continue
        key, writes = matched[1], int(flags) & os.O_ACCMODE != os.O_RDONLY
        if int(error):
            misses += not writes
        elif writes:
            stores[key] += 1
            hits[key] -= key in was_read
            misses += key in was_read
        else:
            hits[key] += 1
        (was_read.discard if int(error) or writes else was_read.add)(key)
    return +hits, stores, misses


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("kernel", "program"),
    [("ka3", ()), pytest.param("nv3", ("nvidia_mixed.py", "20", "8"), marks=pytest.mark.real)],
)
def test_the_numbers_are_those_of_openings_counted_in_the_process(
    home: Home, sources: Sources, tmp_path: Path, kernel: str, program: tuple[str, ...]
) -> None:
    """Cold, warm, with one kernel purged and one damaged, entry by entry: of an imitation, and of NVIDIA's driver."""
    if program and home.python("nvidia.py 0")["seconds"] is None:
        pytest.skip("PyOpenCL sees no NVIDIA platform here (set OCL_ICD_VENDORS)")
    library, log = tmp_path / "opens.so", tmp_path / "opens.log"
    home.run("cc", "-shared", "-fPIC", "-o", str(library), f"{home.programs}/opens.c", "-ldl")
    script, *words = program or arguments(home, sources, "cuda")
    command = (f"OPENS_LOG={log}", "OPENS_IN=/ComputeCache/", sys.executable, f"{home.programs}/{script}", *words)
    warm, root = 0, home.path / PLACES["cuda"]
    for state in ("cold", "warm", "purged", "damaged"):
        if state == "purged":
            home.cachectl("purge cuda --kernel", kernel)
        if state == "damaged":
            # The driver writes it again.
            victim = max(path for path in root.glob("?/?/*") if len(path.name) == 14)
            victim.write_bytes(victim.read_bytes()[:100])
        document = trace(home, "env", f"LD_PRELOAD={library}", *command, options=("--explain",))
        hits, stores, misses = opened(log)
        log.unlink()
        entries = [entry for entry in document["entries"] if entry["layer"] == "cuda"]
        found, stored = ({entry["key"]: entry[kind] for entry in entries if entry[kind]} for kind in ("hits", "stores"))
        traced, exact = numbers(document, "cuda"), layer_of(document, "cuda")["evidence"] == "exact"
        assert stored == stores
        # In a new folder, a hit right after a store may be missed, and is no longer called exact.
        if state != "cold" or exact:
            assert (found, traced) == (hits, (sum(hits.values()), misses, sum(stores.values()))), state
        assert exact or state != "warm"
        assert traced == (warm - 2, 2, 2) or state != "purged"
        warm = sum(hits.values())
    # Both halves of each kernel are listed.
    names = [kernel, *(["lk0"] if program else [f"ka{number}" for number in range(20)])]
    assert {*names} <= {kernel for entry in entries for kernel in entry["kernels"] or ()}
    assert all((entry["device"] or "sm_").startswith("sm_") for entry in entries)
    assert str(victim.relative_to(root)) in stored
    assert all(entry["bytes"] == on_disk(root / entry["key"]) for entry in entries)


@thorough_only
def test_the_database_of_miopen(home: Home, sources: Sources) -> None:
    """Its openings count the lookups, which is an inference; if it is not opened, nothing was asked."""
    cold = traced(home, sources, "miopen")
    assert numbers(cold, "miopen") == (0, 5, 5)
    warm = traced(home, sources, "miopen")
    assert numbers(warm, "miopen") == (5, 0, 0)
    assert layer_of(warm, "miopen")["evidence"] == "inferred"
    other = traced(home, sources, "comgr")
    assert (numbers(other, "miopen"), layer_of(other, "miopen")["evidence"]) == ((0, 0, 0), "exact")


@contextmanager
def watched(home: Home, *, lost: bool = False) -> Iterator[dict[str, Evidence]]:
    """Yield what is completed with what was seen when the block has ended."""
    stack = LayerSet(Environment({"HOME": str(home.path)}, home=home.path, cwd=home.path))
    layers = [layer for layer in stack if layer.about.lookups and layer.about.lookups.files]
    watching = EntryEvents(layers)
    seen = {layer.name: Evidence(layer) for layer in layers}
    with watching.watching():
        yield seen
        if lost:
            watching._events.lost = True
    for name, what in seen.items():
        what.take(watching.uses_of(name), watching.doubts[name], frozenset())


@pytest.mark.parametrize(("order", "fewest"), [("oc", 100), ("oo.c.c", 100), ("o.o.c.c", 200), ("", 0)])
def test_openings_at_once_are_doubtful(home: Home, order: str, fewest: int) -> None:
    """Openings in a tight loop are counted; two of one entry at the same time may be reported as one. None: a loss."""
    entry, other = (home.path / PLACES["comgr"] / f"llvmcache-{number:064x}" for number in range(2))
    entry.parent.mkdir(parents=True)
    entry.write_bytes(b"entry")
    other.write_bytes(b"entry")
    handles = []
    with watched(home, lost=order == "") as found:
        for step in order * 100:
            if step == "o":
                handles.append(os.open(entry, os.O_RDONLY))
            else:
                os.close(handles.pop() if step == "c" else os.open(other, os.O_RDONLY))
    used = found["comgr"].used or []
    hits = used[0].hits if order else 0
    assert fewest <= hits <= order.count("o") * 100
    assert [*found["comgr"].doubts] == {"oc": [], "": [LOST]}.get(order, [events._TOGETHER])


MAPS = """
import mmap, os, sys, time
with open(sys.argv[1], "rb") as file:
    driver = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux shows what a process has loaded")
def test_another_process_that_has_the_driver_loaded_is_doubtful(home: Home, sources: Sources, tmp_path: Path) -> None:
    """It may have used the cache. A process of the run counts, whatever its parent does."""
    driver = tmp_path / "libcuda.so.1"
    driver.write_bytes(b"driver")
    maps = (sys.executable, "-c", MAPS, str(driver))
    program = f"import subprocess; subprocess.run({[*maps, '0.3']!r})"
    assert layer_of(trace(home, sys.executable, "-c", program), "cuda")["evidence"] == "exact"
    program, *rest = arguments(home, sources, "cuda")
    with running(*maps, "600"):
        command = (*CACHECTL, "trace", "--json", "trace.json", "--force", "--")
        home.run(*command, sys.executable, str(home.programs / program), *rest)
    read = json.loads((home.path / "trace.json").read_text())
    cuda = layer_of(read, "cuda")
    assert (cuda["evidence"], numbers(read, "cuda")) == ("inferred", (0, 40, 40))
    assert "another program that may use the cache ran meanwhile: PID " in cuda["why"]


@thorough_only
@real
def test_rusticl(home: Home) -> None:
    """Mesa's own hits and stores, kernel by kernel: its machine code bears no name."""
    (home.path / ".cache").mkdir(exist_ok=True)
    variables: dict[str, Any] = {"POCL_CACHE_DIR": f"{home.path}/pocl", "RUSTICL_ENABLE": "llvmpipe"}

    def run(*, single: str = "0") -> dict[str, Any]:
        return trace(home, "rusticl.py", "3", **variables, MESA_DISK_CACHE_SINGLE_FILE=single)

    cold = run()
    files = [path for path in (home.path / ".cache/mesa_shader_cache").glob("??/*") if not path.suffix]
    if not files:
        pytest.skip("no Rusticl here")
    assert numbers(cold, "mesa") == (0, len(files), len(files))
    assert [(kernel["served_by"], kernel["compiled"]) for kernel in cold["kernels"]] == [(None, True)] * 3
    warm = run()
    assert numbers(warm, "mesa") == (len(files), 0, 0)
    assert layer_of(warm, "mesa")["evidence"] == "exact"
    assert [(kernel["served_by"], kernel["compiled"]) for kernel in warm["kernels"]] == [("mesa", False)] * 3
    named = next(entry for entry in warm["entries"] if entry["kernels"] == ["rk1"])
    (home.path / ".cache/mesa_shader_cache" / named["key"]).unlink()
    purged = run()
    assert numbers(purged, "mesa") == (len(files) - 1, 1, 1)
    assert [kernel["kernels"] for kernel in purged["kernels"] if kernel["compiled"]] == [["rk1"]]
    shutil.rmtree(home.path / ".cache/mesa_shader_cache")
    single = layer_of(run(single="1"), "mesa")
    assert (single["evidence"], single["hits"], "Mesa keeps it open" in single["why"]) == ("inferred", None, True)


@thorough_only
@pytest.mark.parametrize("options", ["ro", "size=1m"])
def test_a_miss_that_stores_nothing_is_unknown(
    home: Home, sources: Sources, mount: Callable[..., Path], options: str
) -> None:
    """In a folder that cannot be written, and on a full file system, the numbers are a lower bound."""
    mount("-t", "tmpfs", "-o", options, "none", on=home.path / PLACES["cuda"])
    read = traced(home, sources, "cuda")
    layer = layer_of(read, "cuda")
    assert layer["evidence"] == "inferred"
    assert ": a miss that stores nothing does not show" in layer["why"]
    assert numbers(read, "cuda") == ((0, 0, 0) if options == "ro" else (0, 40, 40))


def test_a_cache_that_is_off_shows_no_lookup(home: Home, sources: Sources) -> None:
    """A driver that is told not to use it compiles in silence."""
    traced(home, sources, "comgr")
    read = traced(home, sources, "comgr", CUDA_CACHE_DISABLE="1")
    assert (layer_of(read, "cuda")["evidence"], layer_of(read, "comgr")["evidence"]) == ("inferred", "exact")
    assert "it is off (CUDA_CACHE_DISABLE" in layer_of(read, "cuda")["why"]
