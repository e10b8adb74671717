"""Lookups and stores that show by files.

Programs use the caches of CUDA, NEO, comgr and MIOpen as the drivers do, with entries that the drivers made; Rusticl
uses Mesa's itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.tracing import numbers
from tiers import thorough

from cachectl.entry_files import events as entry_events
from cachectl.entry_files.events import EntryEvents, Members
from cachectl.entry_files.fanotify import Access, Fanotify
from cachectl.entry_files.history import History, counted
from cachectl.entry_files.lookups import EntryTrace
from cachectl.layer_set import LayerSet
from cachectl.layers.base.environment import Environment
from cachectl.observing.summary import summarize
from cachectl.observing.timeline import Clock, DriverFacts, read_timeline
from cachectl.observing.trace import with_files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from homes import Home

DATA = Path(__file__).parents[1] / "data"
#: The folder of each kind below the home.
PLACES = {
    "cuda": ".nv/ComputeCache",
    "neo": ".cache/neo_compiler_cache",
    "comgr": ".cache/comgr",
    "miopen": ".cache/miopen/3.3.0.a85ca8a54",
}


def fanotify_works() -> bool:
    try:
        Fanotify().close()
    except OSError:
        return False
    return True


sees_processes = pytest.mark.skipif(not fanotify_works(), reason="only root of the machine learns who opens a file")


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return a folder of entries of each kind, by their keys."""
    top = tmp_path_factory.mktemp("sources")
    for name in ("computecache-h200-opencl", "neo-ocloc-22.43"):
        with tarfile.open(DATA / f"{name}.tar.gz") as archive:
            archive.extractall(top / name)  # noqa: S202 - our own
    cuda = top / "computecache-h200-opencl"
    cuda = next(path for path in (cuda, *cuda.iterdir()) if (path / "index").exists())
    (cuda / "index").unlink()
    deep = top / "neo"
    for path in (top / "neo-ocloc-22.43").rglob("*.ocloc_cache"):
        target = deep / path.name[0] / path.name[1] / path.name.replace("ocloc", "cl")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    comgr = top / "comgr"
    comgr.mkdir()
    for number in range(5):
        output = f"output {number}".encode() * 3000
        lengths = len(output).to_bytes(8, "little"), (0).to_bytes(8, "little")
        (comgr / f"llvmcache-{number:064x}").write_bytes(lengths[0] + output + lengths[1])
    return {"cuda": cuda, "neo": deep, "comgr": comgr, "miopen": comgr}


def arguments(home: Home, sources: Mapping[str, Path], kind: str, *keys: str) -> tuple[str, ...]:
    return "entry_stores.py", kind, str(home.path / PLACES[kind]), str(sources[kind]), *keys


def traced(
    home: Home,
    sources: Mapping[str, Path],
    kind: str,
    *keys: str,
    explain: bool = False,
    within: tuple[str, ...] = (),
    variables: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Trace the program, with some variables of its own, and return the document."""
    document = home.path / "trace.json"
    program, *rest = arguments(home, sources, kind, *keys)
    options = ("--kernels", *(("--explain",) if explain else ()), "--json", str(document), "--force")
    home.cachectl(
        "trace",
        *options,
        "--",
        "env",
        *within,
        sys.executable,
        str(home.programs / program),
        *rest,
        **(variables or {}),
    )
    return dict(json.loads(document.read_text()))


def layer_of(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    (found,) = [layer for layer in document["layers"] if layer["layer"] == name]
    return dict(found)


def used(document: Mapping[str, Any], kind: str, what: str) -> set[str]:
    return {entry["key"] for entry in document["entries"] if entry["layer"] == kind and entry[what]}


@pytest.mark.parametrize("kind", ["cuda", *thorough("neo", "comgr")])
def test_cold_warm_and_one_missing(home: Home, sources: Mapping[str, Path], kind: str) -> None:
    """Each entry is a miss and a store, then a hit; of a purged one, the entry itself is named."""
    (home.path / ".cache" / "neo_compiler_cache").mkdir(parents=True)
    keys = {str(path.relative_to(sources[kind])) for path in sources[kind].rglob("*") if path.is_file()}
    cold = traced(home, sources, kind)
    assert numbers(cold, kind) == (0, len(keys), len(keys))
    assert layer_of(cold, kind)["evidence"] == "exact"
    assert used(cold, kind, "stores") == keys
    warm = traced(home, sources, kind)
    assert numbers(warm, kind) == (len(keys), 0, 0)
    assert (used(warm, kind, "hits"), used(warm, kind, "stores")) == (keys, set())
    gone = min(keys)
    (home.path / PLACES[kind] / gone).unlink()
    purged = traced(home, sources, kind)
    assert numbers(purged, kind) == (len(keys) - 1, 1, 1)
    assert used(purged, kind, "stores") == {gone}
    assert {layer["layer"] for layer in purged["layers"] if layer["hits"] and layer["evidence"] == "exact"} == {kind}


def test_names_devices_and_sizes_of_entries(home: Home, sources: Mapping[str, Path]) -> None:
    """Both halves of each of CUDA's kernels are listed; a damaged one that is written again is a miss."""
    traced(home, sources, "cuda")
    key = min(str(path.relative_to(sources["cuda"])) for path in sources["cuda"].rglob("?" * 14))
    with (home.path / PLACES["cuda"] / key).open("r+b") as file:
        file.truncate(100)
    read = traced(home, sources, "cuda", explain=True)
    assert numbers(read, "cuda") == (39, 1, 1)
    assert used(read, "cuda", "stores") == {key}
    assert {kernel for entry in read["entries"] for kernel in entry["kernels"]} == {f"ka{n}" for n in range(20)}
    assert {entry["device"] for entry in read["entries"]} == {"sm_90"}
    assert all(
        entry["bytes"] == (home.path / PLACES["cuda"] / entry["key"]).stat().st_size for entry in read["entries"]
    )
    (miss,) = [miss for miss in read["misses"] if miss["layer"] == "cuda"]
    assert miss["because"] == "its entry was there before, and was damaged or removed"


@pytest.mark.thorough
def test_a_damaged_entry_that_nobody_writes_again_is_a_miss(home: Home, sources: Mapping[str, Path]) -> None:
    """AMD's compiler reads it in each run, and compiles."""
    traced(home, sources, "comgr")
    victim = next((home.path / PLACES["comgr"]).glob("llvmcache-*"))
    victim.write_bytes(victim.read_bytes()[:-9])
    read = traced(home, sources, "comgr")
    assert numbers(read, "comgr") == (4, 1, 0)
    assert layer_of(read, "comgr")["evidence"] == "exact"


@pytest.mark.thorough
def test_differences_of_two_cuda_keys_are_named(home: Home, sources: Mapping[str, Path]) -> None:
    """A front end's key holds the include path, a back end's the date of the compiler: each is named, once."""
    from cachectl.layers.formats import compute_cache

    for path in sources["cuda"].rglob("?" * 14):
        data = path.read_bytes()
        key = compute_cache.key_of(data)
        header = compute_cache.read_header(data)
        assert key is not None
        assert header is not None
        other = key.replace(b"/tmp/site/", b"/old/venv/").replace(b"Apr 29 2026", b"Mar 11 2026")
        target = home.path / PLACES["cuda"] / compute_cache.key_from(compute_cache.fnv1a(other))
        target.parent.mkdir(parents=True, exist_ok=True)
        fields = (header.version, len(other), len(data) - len(key) - 28, header.checksum)
        target.write_bytes(compute_cache.HEADER.pack(*fields) + other + data[28 + len(key) :])
    program, *rest = arguments(home, sources, "cuda")
    done = home.cachectl("trace", "--explain", "--", sys.executable, str(home.programs / program), *rest)
    lines = [line for line in done.stderr.splitlines() if line.startswith(("cuda: ", "  … and"))]
    assert len(lines) == 4
    text = "\n".join(lines)
    assert "include path (-I /old/venv/pyopencl/cl there, -I /tmp/site/pyopencl/cl here)" in text
    assert "compiler built (Mar 11 2026 17:12:06 there, Apr 29 2026 17:12:06 here)" in text
    assert text.count("… and 19 more kernels: the same") == 2


@pytest.mark.thorough
def test_the_database_of_miopen(home: Home, sources: Mapping[str, Path]) -> None:
    """Its openings count the lookups, which is an inference; if it is not opened, nothing was asked."""
    cold = traced(home, sources, "miopen")
    assert numbers(cold, "miopen") == (0, 5, 5)
    warm = traced(home, sources, "miopen")
    assert numbers(warm, "miopen") == (5, 0, 0)
    assert layer_of(warm, "miopen")["evidence"] == "inferred"
    assert "no event says which records are read" in layer_of(warm, "miopen")["why"]
    other = traced(home, sources, "comgr")
    assert numbers(other, "miopen") == (0, 0, 0)
    assert layer_of(other, "miopen")["evidence"] == "exact"


@pytest.mark.thorough
@sees_processes
def test_another_program_on_the_same_entries(home: Home, sources: Mapping[str, Path]) -> None:
    """Another program reads and stores at the same time, over and over: only the run's uses count."""
    traced(home, sources, "cuda")
    keys = sorted(str(path.relative_to(sources["cuda"])) for path in sources["cuda"].rglob("?" * 14))
    for key in keys[:5]:
        (home.path / PLACES["cuda"] / key).unlink()
    script = (
        "import os, sys, time\n"
        "while True:\n"
        f"    for key in {keys[10:]!r}:\n"
        f"        os.close(os.open({str(home.path / PLACES['cuda'])!r} + '/' + key, os.O_RDONLY))\n"
        f"    os.close(os.open({str(home.path / PLACES['cuda'])!r} + '/0/0/{'0' * 14}', os.O_WRONLY | os.O_CREAT))\n"
        "    time.sleep(0.02)\n"
    )
    (home.path / PLACES["cuda"] / "0" / "0").mkdir(parents=True, exist_ok=True)
    with subprocess.Popen((sys.executable, "-c", script)) as stranger:
        try:
            read = traced(home, sources, "cuda")
        finally:
            stranger.kill()
    assert numbers(read, "cuda") == (35, 5, 5), layer_of(read, "cuda")
    assert used(read, "cuda", "stores") == set(keys[:5])


def test_without_the_right_to_see_processes(
    home: Home, sources: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An ordinary user gets the same numbers, and reads that other programs are counted too."""
    monkeypatch.setattr(entry_events, "Fanotify", refuse)
    for expected in ((0, 5, 5), (5, 0, 0)):
        with watched(home, tmp_path) as found:
            done(home, sources, "comgr")
        seen = found["comgr"]
        hits = sum(len(entry.hits) for entry in seen.entries)
        stores = sum(len(entry.stores) for entry in seen.entries)
        assert (hits, stores, stores) == expected
        assert not seen.by_process


def refuse() -> None:
    raise PermissionError(1, "not permitted")


class watched:  # noqa: N801 - used as a function
    """Watches a block, and has what was seen afterwards."""

    def __init__(self, home: Home, folder: Path) -> None:
        environment = Environment({"HOME": str(home.path)}, home=home.path, cwd=home.path)
        stack = LayerSet(environment)
        files = [(layer, layer.lookups.files) for layer in stack if layer.lookups and layer.lookups.files]
        self.events = EntryEvents(files, Members(folder, here=True))
        self.block = self.events.watching()
        self.found: dict[str, Any] = {}

    def __enter__(self) -> dict[str, Any]:
        self.block.__enter__()
        return self.found

    def __exit__(self, *error: object) -> None:
        self.block.__exit__(None, None, None)
        self.found.update(self.events.seen())


def done(home: Home, sources: Mapping[str, Path], kind: str, *keys: str) -> None:
    program, *rest = arguments(home, sources, kind, *keys)
    subprocess.run((sys.executable, str(home.programs / program), *rest), check=True, capture_output=True)


@pytest.mark.thorough
def test_folders_that_come_and_go(home: Home, sources: Mapping[str, Path], tmp_path: Path) -> None:
    """The whole cache is removed and made again, several times, while it is watched."""
    with watched(home, tmp_path) as found:
        for _ in range(4):
            done(home, sources, "cuda")
            done(home, sources, "cuda")
            shutil.rmtree(home.path / ".nv")
    hits = sum(len(entry.hits) for entry in found["cuda"].entries)
    stores = sum(len(entry.stores) for entry in found["cuda"].entries)
    assert (hits, stores) == (160, 160)
    assert not found["cuda"].gaps


@pytest.mark.thorough
def test_lost_events_make_a_lower_bound(home: Home, sources: Mapping[str, Path], tmp_path: Path) -> None:
    """If the kernel drops events, the layer says so."""
    block = watched(home, tmp_path)
    with block as found:
        done(home, sources, "comgr")
        block.events._lost = True
    assert found["comgr"].gaps == ["file events came faster than they could be read"]


def test_histories() -> None:
    """A file that is read and then written again was broken; one that vanished first was not."""
    history = History()
    history.opened(1.0)
    history.opened(2.0)
    history.modified()
    history.written()
    hits, stores = counted(history.uses)
    assert ([use.at for use in hits], [use.at for use in stores]) == ([], [2.0])
    history = History()
    history.opened(1.0)
    history.gone()
    history.created(2.0)
    history.opened(2.0)
    history.modified()
    history.written()
    hits, stores = counted(history.uses)
    assert ([use.at for use in hits], [use.at for use in stores]) == ([1.0], [2.0])
    history = History()
    history.listed(1.0)
    history.created(1.0)
    history.opened(1.0)
    history.modified()
    history.written()
    history.opened(3.0)
    hits, stores = counted(history.uses)
    assert ([use.at for use in hits], [use.at for use in stores]) == ([3.0], [1.0])


def test_openings_that_were_reported_as_one() -> None:
    """Three openings by two processes, of which each is named once: the third may be either's, unless one was alone."""
    path = Path("entry")

    def uses(*moments: int) -> tuple[int, bool]:
        history = History()
        for moment in moments:
            history.openings[moment] += 1
            history.opened(0.0)
        accesses = [Access(path, one, True, False, False, moment, 0.0) for one, moment in ((1, 0), (2, moments[-1]))]  # noqa: FBT003
        found, doubt = entry_events._Processes({path: accesses}, {1: True, 2: False}).of_run(path, history)
        return len(found), doubt is None

    assert uses(0, 0, 0) == (1, False)
    # The event of the stranger's opening may have come in another moment.
    assert uses(0, 0, 1) == (1, False)
    assert uses(0, 0, 2) == (2, True)
    assert uses(0, 0, 0, 0, 2) == (4, True)


@pytest.mark.parametrize(("order", "fewest"), [("oc", 100), ("oo.c.c", 100), ("o.o.c.c", 200)])
@pytest.mark.parametrize("right", [pytest.param(True, marks=sees_processes), False])
def test_openings_at_once_make_a_lower_bound(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, fewest: int, *, right: bool
) -> None:
    """Openings in a tight loop are counted exactly; two of one entry at the same time may be reported as one."""
    if not right:
        monkeypatch.setattr(entry_events, "Fanotify", refuse)
    entry, other = (home.path / PLACES["comgr"] / f"llvmcache-{number:064x}" for number in range(2))
    entry.parent.mkdir(parents=True)
    entry.write_bytes(b"entry")
    other.write_bytes(b"entry")
    handles = []
    with watched(home, tmp_path) as found:
        for step in order * 100:
            if step == "o":
                handles.append(os.open(entry, os.O_RDONLY))
            else:
                os.close(handles.pop() if step == "c" else os.open(other, os.O_RDONLY))
    hits = len(found["comgr"].entries[0].hits)
    assert fewest <= hits <= order.count("o") * 100
    assert found["comgr"].doubts == ([] if order == "oc" else [entry_events._TOGETHER])


@pytest.mark.parametrize("right", [pytest.param(True, marks=sees_processes), False])
@pytest.mark.parametrize("pause", [0, 0.1])
def test_entries_that_are_read_before_their_folder_is_watched(
    home: Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sources: Mapping[str, Path],
    pause: float,
    *,
    right: bool,
) -> None:
    """Hits right after a store in a new folder may be missing: no count without them is exact."""
    if not right:
        monkeypatch.setattr(entry_events, "Fanotify", refuse)
    keys = sorted(str(path.relative_to(sources["cuda"])) for path in sources["cuda"].rglob("?" * 14))[:5]
    with watched(home, tmp_path) as found:
        for key in keys:
            path = home.path / PLACES["cuda"] / key
            path.parent.mkdir(parents=True, exist_ok=True)
            for flags in (os.O_WRONLY | os.O_CREAT, os.O_RDONLY):
                handle = os.open(path, flags)
                os.write(handle, b"entry") if flags != os.O_RDONLY else os.read(handle, 5)
                os.close(handle)
                time.sleep(pause)
    hits, stores = (sum(len(getattr(entry, what)) for entry in found["cuda"].entries) for what in ("hits", "stores"))
    assert stores == 5
    exact = not found["cuda"].doubts
    assert hits == 5 or (not pause and not exact)
    assert exact or not (pause and right)


@pytest.mark.thorough
def test_a_program_that_never_stops_opening_an_entry(home: Home, sources: Mapping[str, Path]) -> None:
    """The trace ends, and its numbers are a lower bound."""
    traced(home, sources, "comgr")
    entry = home.path / PLACES["comgr"] / f"llvmcache-{0:064x}"
    script = f"import os\nwhile True:\n    os.close(os.open({str(entry)!r}, os.O_RDONLY))"
    with subprocess.Popen((sys.executable, "-c", script)) as stranger:
        try:
            read = layer_of(traced(home, sources, "comgr"), "comgr")
        finally:
            stranger.kill()
    assert read["evidence"] == "inferred"
    assert read["hits"] <= 5 or not fanotify_works()
    assert (read["misses"], read["stores"]) == (0, 0)


def test_processes_that_open_at_once_make_a_lower_bound() -> None:
    """Two processes of the run opened a file, and one opening was reported."""
    path = Path("entry")
    history = History()
    history.openings[0] += 1
    history.opened(0.0)
    history.closed()
    accesses = [Access(path, process, True, False, False, 0, 0.0) for process in (1, 2)]  # noqa: FBT003
    processes = entry_events._Processes({path: accesses}, {1: True, 2: True})
    assert processes.of_run(path, history) == (history.uses, entry_events._TOGETHER)


def test_a_process_that_ended_unseen_makes_no_count_exact() -> None:
    """Nobody else used the entries, so it counts; it may be another program all the same."""
    history = History()
    history.openings[0] += 1
    history.opened(0.0)
    history.closed()
    path = Path("entry")
    processes = entry_events._Processes({path: [Access(path, 1, True, False, False, 0, 0.0)]}, {1: None})  # noqa: FBT003
    assert processes.of_run(path, history) == (history.uses, entry_events._UNSEEN)


def test_a_process_that_has_ended_may_be_of_the_run(tmp_path: Path) -> None:
    """A process that nobody has waited for yet shows no variables."""
    with subprocess.Popen(("sleep", "0"), env={"CACHECTL_TRACE": str(tmp_path)}) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert Members(tmp_path, here=False)(ended.pid) is None
        assert Members(tmp_path, here=True)(ended.pid)


@pytest.mark.thorough
@pytest.mark.real
def test_rusticl(home: Home) -> None:
    """Mesa's own hits and stores, kernel by kernel: its machine code bears no name."""
    (home.path / ".cache").mkdir(exist_ok=True)
    document = home.path / "trace.json"
    aside: dict[str, Any] = {"POCL_CACHE_DIR": str(home.path / "pocl"), "RUSTICL_ENABLE": "llvmpipe"}

    def run(*, single: str = "0") -> dict[str, Any]:
        program = (sys.executable, str(home.programs / "rusticl.py"), "3")
        options = ("--kernels", "--json", str(document), "--force", "--")
        home.cachectl("trace", *options, *program, **aside, MESA_DISK_CACHE_SINGLE_FILE=single)
        return dict(json.loads(document.read_text()))

    cold = run()
    files = [path for path in (home.path / ".cache" / "mesa_shader_cache").glob("??/*") if not path.suffix]
    if not files:
        pytest.skip("no Rusticl here")
    assert numbers(cold, "mesa") == (0, len(files), len(files))
    assert [(kernel["served_by"], kernel["compiled"]) for kernel in cold["kernels"]] == [(None, True)] * 3
    warm = run()
    assert numbers(warm, "mesa") == (len(files), 0, 0)
    assert layer_of(warm, "mesa")["evidence"] == "exact"
    assert [(kernel["served_by"], kernel["compiled"]) for kernel in warm["kernels"]] == [("mesa", False)] * 3
    named = next(entry for entry in warm["entries"] if entry["kernels"] == ["rk1"])
    (home.path / ".cache" / "mesa_shader_cache" / named["key"]).unlink()
    purged = run()
    assert numbers(purged, "mesa") == (len(files) - 1, 1, 1)
    assert [kernel["kernels"] for kernel in purged["kernels"] if kernel["compiled"]] == [["rk1"]]
    shutil.rmtree(home.path / ".cache" / "mesa_shader_cache")
    single = run(single="1")
    assert layer_of(single, "mesa")["evidence"] == "inferred"
    assert numbers(single, "mesa")[0] is None
    assert "Mesa keeps it open" in layer_of(single, "mesa")["why"]


@pytest.mark.thorough
@pytest.mark.parametrize("options", ["ro", "size=1m"])
def test_a_miss_that_stores_nothing_is_unknown(home: Home, sources: Mapping[str, Path], options: str) -> None:
    """In a folder that cannot be written, and on a full file system, the numbers are a lower bound."""
    root = home.path / PLACES["cuda"]
    root.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(root)], check=False).returncode:
        pytest.skip("mounting takes privileges")
    try:
        read = traced(home, sources, "cuda")
    finally:
        subprocess.run(["umount", str(root)], check=True)
    layer = layer_of(read, "cuda")
    assert layer["evidence"] == "inferred"
    assert layer["why"].endswith(": a miss that stores nothing does not show")
    assert numbers(read, "cuda") == ((0, 0, 0) if options == "ro" else (0, 40, 40))


def test_a_cache_that_is_off_shows_no_lookup(home: Home, sources: Mapping[str, Path]) -> None:
    """A driver that is told not to use it compiles in silence."""
    read = traced(home, sources, "comgr", variables={"CUDA_CACHE_DISABLE": "1"})
    assert (layer_of(read, "cuda")["evidence"], layer_of(read, "comgr")["evidence"]) == ("inferred", "exact")
    assert "it is off (CUDA_CACHE_DISABLE" in layer_of(read, "cuda")["why"]


@pytest.mark.parametrize("compiled", [True, False, None])
def test_a_build_by_a_driver_that_says_nothing(*, compiled: bool | None) -> None:
    """The entries of its kernels show whether it compiled; the summary and the forecast use that."""
    build: dict[str, Any] = {"event": "build", "pid": 1, "thread": 1, "layer": "pyopencl", "kernels": ["k"]}
    clock = Clock(0, 0, "here")
    build |= {"start": 0, "end": 10**10, "at": 10.0, "seconds": 10.0, "failed": False, "compiles": [[10**9, 9 * 10**9]]}
    stores = int(compiled is True)
    entry = EntryTrace("drv", "key", 1 - stores, stores, None, ("k",), "gpu", at=(5.0,))
    events = with_files([build], [entry] if compiled is not None else [])
    events.insert(0, {"event": "started", "pid": 1, "monotonic": 0, "epoch": 0, "host": "here"})
    known = DriverFacts(lambda event: str(event["layer"]), lambda _, __: None, lambda _, __: ())
    timeline = read_timeline((), clock, 12.0, events, known)
    (span,) = [span for span in timeline.spans if span.name == "driver"]
    stage, outcome = {True: ("compile", "miss"), False: ("lookup", "hit"), None: ("compile", None)}[compiled]
    assert (span.stage, span.outcome, span.layer) == (stage, outcome, "drv" if compiled is not None else None)
    summary = summarize(timeline)
    assert summary.slowest[0].warm is {True: False, False: True, None: None}[compiled]
    assert summary.warm.at_least is (compiled is None)
    assert summary.warm.saves == pytest.approx(8 * 0.96 if compiled else 0)


STRANGER = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {programs!r})
import entry_stores
root, source, begin = Path({root!r}), Path({source!r}), {begin!r}
keys = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
data = {{key: (source / key).read_bytes() for key in keys}}
while not (root / begin).exists():
    time.sleep(0)
for key in keys:
    entry_stores.{kind}(root, key, data[key])
    entry_stores.{kind}(root, key[:-2] + "zz" if {kind!r} == "neo" else key[:-1] + "0", data[key])
"""


@pytest.mark.thorough
@sees_processes
@pytest.mark.parametrize(("kind", "begin"), [("cuda", "index"), ("neo", "config.file"), ("comgr", "")])
def test_another_program_that_stores_the_same_entries(
    home: Home, sources: Mapping[str, Path], tmp_path: Path, kind: str, begin: str
) -> None:
    """It fills the new cache at the same time: nothing of it is counted, as openings seen inside the run show."""
    root = home.path / PLACES[kind]
    library, log = tmp_path / "opens.so", tmp_path / "opens.log"
    compiler = ("cc", "-shared", "-fPIC", "-o", str(library), str(home.programs / "opens.c"), "-ldl")
    subprocess.run(compiler, check=True)
    places = {"programs": str(home.programs), "root": str(root), "source": str(sources[kind])}
    stranger = (sys.executable, "-c", STRANGER.format(**places, begin=begin, kind=kind))
    for _ in range(3):
        shutil.rmtree(root, ignore_errors=True)
        if kind == "neo":
            root.mkdir(parents=True)
        log.unlink(missing_ok=True)
        with subprocess.Popen(stranger) as other:
            counting = {"LD_PRELOAD": str(library), "OPENS_LOG": str(log), "OPENS_IN": str(root)}
            read = traced(home, sources, kind, within=tuple(f"{name}={value}" for name, value in counting.items()))
            other.wait()
        direct = {key: count for key, count in opened(log, root).items() if (sources[kind] / key).exists()}
        found = {entry["key"]: (entry["hits"], entry["stores"]) for entry in read["entries"] if entry["layer"] == kind}
        if entry_events._UNSEEN not in layer_of(read, kind)["why"]:
            assert all(
                one <= true for key in found for one, true in zip(found[key], direct.get(key, (0, 0)), strict=True)
            )
        if layer_of(read, kind)["evidence"] == "exact":
            assert found == direct


def opened(log: Path, root: Path) -> dict[str, tuple[int, int]]:
    """Return how often each entry was read and stored; who renames one to its place has looked for it in vain."""
    uses: dict[str, list[bool]] = {}
    for line in log.read_text().splitlines():
        _, flags, error, path = line.split(" ", 3)
        of_key = uses.setdefault(str(Path(path).relative_to(root)), [])
        if int(flags) & os.O_ACCMODE != os.O_RDONLY:
            # It was broken.
            of_key[-1:] = [True]
        else:
            of_key.append(bool(int(error)))
    return {key: (of_key.count(False), of_key.count(True)) for key, of_key in uses.items()}
