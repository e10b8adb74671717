"""The doctor: what it says of a home, of what a root holds, and what fails stops nothing."""

import os
import re
import signal
from pathlib import Path

import pytest
from homes import CACHECTL, Home
from support.dictionaries import FILE, interrupted
from support.doctor import (
    ALONE,
    HOMELY,
    after,
    coded,
    dictionary,
    environment_of,
    examine,
    leak,
    make,
    on_file_system,
    only,
    shell,
    stale_lock,
    with_miopen,
)
from support.layers import python, register_driver, running, write
from support.miopen_kernels import store, stored_whole
from tiers import as_root

from cachectl.layers.base.environment import Environment, user_name
from cachectl.layers.core.conformance import nobody, snapshot
from cachectl.layers.core.finding import Severity
from cachectl.layers.core.selection import ALL
from cachectl.layers.cuda import CudaComputeCache
from cachectl.layers.disk.locks import presence_lock
from cachectl.layers.host.hardware import amd_gpus
from cachectl.layers.host.here import this_environment
from cachectl.layers.pyopencl import PyOpenCLBinaries
from cachectl.stack import Stack
from cachectl.verbs.doctor import doctor


@pytest.mark.real
def test_a_filled_home_is_well(warm: Home) -> None:
    # The first one records which Pythons there are.
    warm.cachectl("doctor", *HOMELY)
    before = snapshot(warm.path, times=True)
    findings = warm.json("doctor", *HOMELY)["findings"]
    # PoCL leaks an empty file in every process, and this machine may have several Pythons with a PyOpenCL.
    expected = {("harmless", "leaked"), ("harmless", "paths")}
    assert {(finding["severity"], finding["code"]) for finding in findings} <= expected
    assert snapshot(warm.path, times=True) == before


def test_space_is_told_where_it_is_short(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachectl.verbs.doctor._NEARLY_FULL", (1 << 62, 0))
    finding, fix, *_ = home.cachectl("doctor", *HOMELY, check=False).stdout.splitlines()
    assert "the file system has room for " in finding
    assert fix == "  fix: remove other files there"


def test_where_clearing_everything_frees_too_little_the_fix_moves_the_layer(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    leak(home.path, b"text")
    monkeypatch.setattr("cachectl.verbs.doctor._FULL", (1 << 62, 0))
    finding, fix, *_ = home.cachectl("doctor pocl", check=False).stdout.splitlines()
    assert "pocl holds most of what can be cleared there" in finding
    assert fix == '  fix: eval "$(cachectl env --root "$HOME/.cachectl" --layer pocl --shell sh)"'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/ / rw - overlay overlay rw,upperdir=/u", "the container, in whose own layer it is (overlay)"),
        ("/ /home rw - tmpfs tmpfs rw", "the memory in which the home is (tmpfs)"),
        ("/ / rw - tmpfs tmpfs rw", "the memory in which the home is (tmpfs)"),
        ("/ / rw - ext4 /dev/vda rw", ""),
        ("/ /data rw - overlay overlay rw,upperdir=/u", ""),
    ],
)
def test_what_is_lost_with_a_container_is_one_finding(tmp_path: Path, line: str, words: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"23 28 0:21 {line}\n")
    environment = Environment({"HOME": "/home/no-one"}, Path("/home/no-one"), mounts=mounts)
    found = coded(examine(environment), "volatile")
    assert [words in finding.message for finding in found] == [True] * bool(words)
    assert all(finding.layers and "pocl" in finding.layers for finding in found)
    # What lies in a temporary folder is not meant to stay.
    assert coded(examine(environment._replace(temporary=Path("/home")), "loopy"), "volatile") == []


def test_text_names_the_cause_and_the_command_the_worst_first_and_harmless_findings_are_status_0(home: Home) -> None:
    leak(home.path)
    assert home.cachectl("doctor pocl").returncode == 0
    done = home.cachectl("doctor pocl", check=False, POCL_KERNEL_CACHE="0")
    first, second, *_ = done.stdout.splitlines()
    assert re.fullmatch(r".*POCL_KERNEL_CACHE=0 switches .* off \(recompiles every run\)", first)
    assert (done.returncode, second) == (1, "  fix: unset POCL_KERNEL_CACHE")


def test_cap_of_cuda(cuda: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    held = sum(path.stat().st_size for path in (cuda.path / ".nv/ComputeCache").glob("?/?/*"))
    at = held * 100 // 95
    found = only(examine(cuda.environment(CUDA_CACHE_MAXSIZE=str(at)), "cuda"), "cap")
    assert (found.severity, f"{held:,} of at most {at:,} bytes" in found.message) == (Severity.RECOMPILES, True)
    assert found.fix == f"export CUDA_CACHE_MAXSIZE={2 * at}"
    assert after(cuda.path, found.fix, "cuda", CUDA_CACHE_MAXSIZE=str(at)) == []
    monkeypatch.setattr(CudaComputeCache, "limit_highest", 200_000)
    found = only(examine(cuda.environment(CUDA_CACHE_MAXSIZE="200000"), "cuda"), "cap")
    assert found.fix == "cachectl prune --max-size 100000B cuda"
    assert after(cuda.path, found.fix, "cuda") == []


@pytest.fixture
def locked(home: Home) -> tuple[Environment, Path]:
    """Return an environment in which PyOpenCL keeps binaries, and an old lock there."""
    return home.environment(OCL_ICD_VENDORS=register_driver(home.path, "libamdocl64.so")), stale_lock(home.path)


def test_a_stale_lock_fails_every_build_until_it_is_removed(home: Home, locked: tuple[Environment, Path]) -> None:
    environment, lock = locked
    found = only(examine(environment, "pyopencl"), "lock")
    assert (found.severity, found.key, found.fix) == (
        Severity.FAILS,
        f"{lock.parent.name}/lock",
        "cachectl prune --stale pyopencl",
    )
    unused = home.environment(PYOPENCL_NO_CACHE="1")
    assert only(examine(unused, "pyopencl"), "lock").severity is Severity.HARMLESS
    os.utime(lock)
    assert examine(environment, "pyopencl") == [], "it may be held"
    os.utime(lock, (1_700_000_000, 1_700_000_000))
    shell(home.path, found.fix, ALONE)
    assert examine(environment, "pyopencl") == []


#: Makes a lock as PyOpenCL and pytools do, keeps it open, and may hide that, as a program that has changed its user.
KEEPER = """
import ctypes, os, sys, time
handle = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_EXCL)
os.utime(handle, (1_700_000_000, 1_700_000_000))
if len(sys.argv) > 2:
    assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0
print(flush=True)
time.sleep(600)
"""


def test_an_old_lock_names_who_has_it_open(home: Home, locked: tuple[Environment, Path]) -> None:
    """A program that has only loaded PyOpenCL does not have it, and one that is stopped can go on."""
    environment, lock = locked
    environment = environment._replace(processes=Path("/proc"))
    lock.unlink()
    with running(*python("import pyopencl; print(flush=True); input()")), running(*python(KEEPER, lock)) as keeper:
        found = only(examine(environment, "pyopencl"), "lock")
        named = f"PID {keeper.pid} (python -c \\nimport ctypes"
        assert (found.severity, f"a lock that {named}" in found.message) == (Severity.RISKS, True)
        assert (found.fix.startswith(f"wait for {named}"), found.fix_tested) == (True, False)
        keeper.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, keeper.pid, os.WSTOPPED | os.WNOWAIT)
        assert only(examine(environment, "pyopencl"), "lock").fix == f"kill -CONT {keeper.pid}"
        home.cachectl("prune --stale pyopencl")
        assert lock.exists()


def test_a_lock_whose_holder_cannot_be_known_stays(
    home: Home, locked: tuple[Environment, Path], tmp_path: Path
) -> None:
    """One of another machine, or of another container; one of a program that hides what it has open."""
    environment, lock = locked
    shown = tmp_path / "shown"
    make(shown / "self")
    unseen = "programs of this machine are hidden here, as in a container"
    for kind, reason in (("ext4", unseen), ("nfs", "it is on nfs, and "), ("fuse.ours", "it is on fuse.ours, ")):
        seen = on_file_system(environment._replace(processes=shown), kind, home.path)
        found = only(examine(seen, "pyopencl"), "lock")
        assert (found.severity, found.fix_tested) == (Severity.RISKS, False)
        assert f"whose holder is unknown ({reason}" in found.message
        assert found.fix.endswith(f"if nobody has it: rm {lock}")
        assert [*PyOpenCLBinaries(seen).plan_clear(ALL).entries] == []
    lock.unlink()
    with presence_lock("pyopencl", lock, environment):
        os.utime(lock, (1_700_000_000, 1_700_000_000))
        found = only(examine(environment._replace(clock=lambda: 1_700_000_901.0), "pyopencl"), "lock")
        assert (found.severity, "901 s old, whose holder is unknown" in found.message) == (Severity.RISKS, True)
        # It shows no folder of open files.
        write(nobody(shown) / "4711/fd", "")
        write(shown / "4711/status", f"Name:\tkeeper\nUid:\t{os.getuid()}\t0\t0\t0\n")
        write(shown / "4711/comm", "keeper\n")
        found = only(examine(environment._replace(processes=shown, clock=lambda: 1_700_000_901.0), "pyopencl"), "lock")
        assert f"a process of {user_name(os.getuid())} that hides its files may have it open" in found.message
        assert "PID 4711 (keeper)" in found.message
    assert examine(environment, "pyopencl") == []


@as_root
@pytest.mark.real
def test_no_command_in_a_namespace_of_processes_removes_a_lock(home: Home, locked: tuple[Environment, Path]) -> None:
    """A container may share the home with programs that it does not see; as soon as they are seen, the lock goes."""
    _, lock = locked
    alone = ("unshare", "-p", "-f", "--mount-proc")
    done = home.run(*alone, *CACHECTL, "doctor", "-v", "pyopencl", check=False)
    assert "whose holder is unknown (programs of this machine" in done.stdout
    for verb in ("prune --stale pyopencl", "purge pyopencl"):
        home.run(*alone, *CACHECTL, *verb.split())
        assert lock.exists()
    shell(home.path, "cachectl prune --stale pyopencl", ALONE)
    assert not lock.exists()


@pytest.mark.parametrize(("layer", "identifier"), [("pytools", "mine"), ("loopy", "loopy-code-gen-cache-v3")])
def test_a_lock_of_an_older_dictionary_is_its_layers_and_goes_when_nobody_has_it(
    home: Home, layer: str, identifier: str
) -> None:
    folder = home.path / f".cache/pytools/pdict-v4-{identifier}-py{this_environment().python}"
    make(folder)
    lock = folder / f"{'a1' * 32}.lock"
    seen = home.environment()._replace(processes=Path("/proc"))
    with running(*python(KEEPER, lock)) as keeper:
        assert f"a lock that PID {keeper.pid} " in only(examine(seen, layer), "lock").message
        assert not [*Stack(seen)[layer].plan_clear(ALL).entries]
    other = "loopy" if layer == "pytools" else "pytools"
    environment = home.environment()
    assert coded(examine(environment, other), "lock") == []
    found = only(examine(environment, layer), "lock")
    assert (found.severity, found.key) == (Severity.RISKS, f"{folder.name}/{lock.name}")
    assert found.fix == f"cachectl prune --stale {layer}"
    # It may be a minute old, and its program only slow.
    assert coded(examine(environment._replace(clock=lambda: 1_700_000_100.0), layer), "lock") == []
    shell(home.path, found.fix, ALONE)
    assert (os.listdir(folder), coded(examine(environment, layer), "lock")) == ([], [])


def test_a_database_that_stays_locked_names_who_has_the_lock(home: Home) -> None:
    """Not one that is locked for a moment, nor who has it open."""
    path = dictionary(home.path, f"-{this_environment().python}") / f"pdict-v5-mine-{this_environment().python}.sqlite"
    program = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute(sys.argv[2])\n"
    program += "c.execute('select * from dict').fetchall(); print(flush=True); input()"
    environment = home.environment()._replace(lock_timeout=0.3, processes=Path("/proc"))
    with running(*python(program, path, "begin")):
        assert coded(examine(environment, "pytools"), "lock") == []
        with running(*python(program, path, "begin immediate")) as writer:
            found = only(examine(environment, "pytools"), "lock")
            assert f"locked for more than 0.3 s by PID {writer.pid} (python" in found.message
            assert (found.severity, found.fix.startswith(f"wait for PID {writer.pid}")) == (Severity.RISKS, True)
            writer.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
            assert only(examine(environment, "pytools"), "lock").fix == f"kill -CONT {writer.pid}"
    assert coded(examine(environment, "pytools"), "lock") == []


@pytest.mark.parametrize(
    ("data", "severity", "words"),
    [
        (b"", Severity.HARMLESS, "1 leaked file of 0 bytes"),
        (b"__kernel", Severity.WASTES, "1 leaked file of 4,096 bytes"),
    ],
)
def test_what_programs_leaked_is_reported_with_its_bytes(
    home: Home, data: bytes, severity: Severity, words: str
) -> None:
    # What a running compile might be using is not pruned.
    os.utime(leak(home.path, data), (1_700_000_000, 1_700_000_000))
    found = only(examine(home.environment(), "pocl"), "leaked")
    assert (found.severity, found.fix) == (severity, "cachectl prune --stale pocl")
    assert words in found.message
    assert after(home.path, found.fix, "pocl") == []


def gpu(environment: Environment, *properties: int, more: str = "") -> Environment:
    """Add two equal GPUs with a target version, and with SIMD units, of which some are in each compute unit."""
    version, simds, each = properties or (90010, 440, 4)
    own = f"simd_count {simds}\nsimd_per_cu {each}\ngfx_target_version {version}\n{more}"
    nodes = environment.home / "nodes"
    for number, text in enumerate(("cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n", own, own)):
        make(nodes / str(number))
        (nodes / str(number) / "properties").write_text(text)
    return environment._replace(topology=nodes)


#: Properties of a GPU, variables that set another one for MIOpen, and the bases of its files.
GPUS: list[tuple[tuple[int, ...], dict[str, str], tuple[str, ...]]] = [
    ((90010, 440, 4), {}, ("gfx90a6e",)),
    ((90006, 240, 4), {}, ("gfx906_60",)),
    ((90402, 1216, 4), {}, ("gfx942130",)),
    ((100300, 144, 2), {}, ("gfx1030_36", "gfx103048")),
    ((), {"HSA_OVERRIDE_GFX_VERSION": "10.3.0", "MIOPEN_DEVICE_CU": "36"}, ("gfx1030_36",)),
    ((), {"MIOPEN_DEBUG_ENFORCE_DEVICE": "gfx908"}, ("gfx9086e",)),
    # What is no number is passed over.
    *(
        ((), {"MIOPEN_DEVICE_CU": units, "HSA_OVERRIDE_GFX_VERSION": "\u0663.0.0"}, ("gfx90a6e",))
        for units in ("\u00b2", "9" * 5000, "-1", "many")
    ),
]


@pytest.mark.parametrize(("properties", "variables", "bases"), GPUS)
def test_gpus_are_named_as_miopen_names_files(
    tmp_path: Path, properties: tuple[int, ...], variables: dict[str, str], bases: tuple[str, ...]
) -> None:
    more = f"max_waves_per_simd \u00b2\nmem_banks_count {'9' * 5000}\n"
    ((arch, found),) = amd_gpus(gpu(environment_of(tmp_path, **variables), *properties, more=more))
    assert (found, bool(variables) or bases[0].startswith(arch)) == (bases, True)


@pytest.mark.parametrize(
    ("names", "is_served"),
    [
        *((name, True) for name in ("gfx90a6e.kdb", "gfx90a.kdb", "gfx90a_xnack.kdb")),
        ("gfx90a68.kdb gfx908.kdb", False),
        ("", False),
    ],
)
def test_a_gpu_without_a_database_of_its_own_is_named_once(tmp_path: Path, names: str, is_served: bool) -> None:
    environment = gpu(with_miopen(tmp_path))
    for name in names.split():
        store(tmp_path / "rocm-6.2.0/share/miopen/db" / name, {})
    # Both GPUs are equal.
    found = examine(environment, "miopen-system")
    assert [one.code for one in found] == ([] if is_served else ["no-database"])
    assert all("looks for gfx90a6e.kdb or gfx90a.kdb in " in one.message for one in found)


def test_what_could_not_be_looked_at_is_said(home: Home) -> None:
    """A write that was interrupted is harmless to both verbs; until it is finished nothing is known of its rows."""
    path = interrupted(home.path / ".cache/pytools" / FILE)
    document = home.json("doctor", "pytools")
    assert document["findings"] == []
    assert document["not_checked"]["pytools"].startswith(f"{path}: an interrupted write is pending")
    assert "pytools: not checked: " in home.cachectl("doctor pytools").stdout
    (finding,) = home.json("verify", "pytools")["findings"]
    assert (finding["code"], finding["severity"]) == ("pending", "harmless")


def test_no_gpu_is_no_reason_to_find_nothing_wrong(tmp_path: Path) -> None:
    environment = with_miopen(tmp_path)
    folder = tmp_path / "rocm-6.2.0/share/miopen/db"
    store(folder / "gfx90a6e.kdb", {("a.o", "-x"): stored_whole(b"code")})
    result = doctor(Stack(environment), ["miopen-system"])
    assert result.findings == ()
    assert "no AMD GPU is visible here" in (result.not_checked or {})["miopen-system"]
