"""The doctor: what it says of a home, of what a root holds, and what fails stops nothing."""

import os
import re
from pathlib import Path

import pytest
from homes import Home
from support.dictionaries import FILE, interrupted
from support.doctor import (
    HOMELY,
    after,
    coded,
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
from support.layers import register_driver
from support.miopen_kernels import store, stored_whole

from cachectl.layers.base.environment import Environment
from cachectl.layers.core.conformance import snapshot
from cachectl.layers.core.finding import Severity
from cachectl.layers.cuda import CudaComputeCache
from cachectl.layers.disk.locks import presence_lock
from cachectl.layers.host.hardware import amd_gpus
from cachectl.stack import Stack
from cachectl.verbs.doctor import doctor


@pytest.mark.real
def test_a_filled_home_is_well(warm: Home) -> None:
    # The first command records which Pythons there are.
    warm.cachectl("ls")
    before = snapshot(warm.path, times=True)
    findings = warm.json("doctor", *HOMELY)["findings"]
    # PoCL leaks an empty file in every process.
    assert {(finding["severity"], finding["code"]) for finding in findings} <= {("harmless", "leaked")}
    assert snapshot(warm.path, times=True) == before


def test_space_is_told_where_it_is_short(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachectl.verbs.doctor._NEARLY_FULL", (1 << 62, 0))
    finding, fix, _ = home.cachectl("doctor", *HOMELY, check=False).stdout.splitlines()
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
        ("/ / rw - overlay overlay rw,upperdir=/u", "the container, on whose own layer it lies (overlay)"),
        ("/ /home rw - tmpfs tmpfs rw", "the memory in which the home lies (tmpfs)"),
        ("/ / rw - tmpfs tmpfs rw", "the memory in which the home lies (tmpfs)"),
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
    assert (found.severity, found.key, found.fix) == (Severity.FAILS, f"{lock.parent.name}/lock", f"rm {lock}")
    unused = home.environment(PYOPENCL_NO_CACHE="1")
    assert only(examine(unused, "pyopencl"), "lock").severity is Severity.HARMLESS
    os.utime(lock)
    assert examine(environment, "pyopencl") == [], "it may be held"
    os.utime(lock, (1_700_000_000, 1_700_000_000))
    shell(home.path, found.fix)
    assert examine(environment, "pyopencl") == []


def test_an_old_lock_that_may_be_held_stays(home: Home, locked: tuple[Environment, Path], tmp_path: Path) -> None:
    """By a living cachectl however long it takes, by a running program, and by one that cannot be seen."""
    environment, lock = locked
    shown = tmp_path / "shown"
    for process in ("self", "4711"):
        make(shown / process)
        (shown / process / "maps").write_text("" if process == "self" else "7f00 r-xp /lib/pyopencl/_cl.abi3.so\n")
    for seen, message, holder in (
        (environment._replace(processes=shown), "", "process 4711"),
        (environment._replace(processes=tmp_path / "nothing"), "this platform does not show", ""),
        (on_file_system(environment, "nfs", home.path), "", "a program of another machine"),
    ):
        found = only(examine(seen, "pyopencl"), "lock")
        assert (found.severity, message in found.message) == (Severity.RISKS, True)
        assert found.fix.startswith(f"end {holder}")
        assert found.fix.endswith(f", then: rm {lock}")
    lock.unlink()
    with presence_lock("pyopencl", lock):
        os.utime(lock, (1_700_000_000, 1_700_000_000))
        found = only(examine(environment._replace(clock=lambda: 1_700_000_901.0), "pyopencl"), "lock")
        assert (found.severity, "held for 901 s" in found.message) == (Severity.RISKS, True)
        assert found.fix.endswith(f", then: rm {lock}")
    assert examine(environment, "pyopencl") == []


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
