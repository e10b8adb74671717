"""``cachectl doctor``: each cause is planted, found with its code and severity, and mended by the fix it names."""

from __future__ import annotations

import json
import os
import pickle
import platform
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
from homes import run_as

from cachectl.inspecting.doctor import diagnosis, is_grave, job_of
from cachectl.inspecting.entries import findings
from cachectl.layers import cuda as cuda_compute_cache
from cachectl.layers.base.conformance import nobody, snapshot
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Finding, Hazard, Root, Scope, Severity, State
from cachectl.layers.base.guard import Contained
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.registry import Broken
from cachectl.layers.disk.locks import presence_lock
from cachectl.layers.host.gpus import amd_gpus
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home

#: What lies in a home; what came with the tester's MIOpen is another matter.
HOMELY = ("loopy", "pyopencl-invoker", "pytools", "pyopencl", "pocl", "cuda", "miopen", "miopen-tuning")
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
MIOPEN_TABLE = (
    "CREATE TABLE `kern_db` (`id` INTEGER PRIMARY KEY ASC,`kernel_name` TEXT NOT NULL,`kernel_args` TEXT NOT NULL,"
    "`kernel_blob` BLOB NOT NULL,`kernel_hash` TEXT NOT NULL,`uncompressed_size` INT NOT NULL);"
    "CREATE UNIQUE INDEX `idx_kern_db` ON kern_db(kernel_name, kernel_args);"
)


@pytest.fixture
def open_home() -> Iterator[Path]:
    """Return a home that every user of the machine can reach, as pytest's own folders are not."""
    home = Path(tempfile.mkdtemp(prefix="cachectl-doctor-"))
    home.chmod(0o755)
    yield home
    shutil.rmtree(home)


def environment_of(home: Path, **variables: str) -> Environment:
    return Environment(
        {"HOME": str(home), **variables},
        home=home,
        cwd=home,
        temporary=home / "tmp",
        processes=nobody(home.parent / "processes")
        if home.parent != Path(tempfile.gettempdir())
        else nobody(home / "p"),
        mounts=home / "no-mounts",
        topology=home / "no-gpus",
    )


def examine(environment: Environment, *names: str) -> list[Finding]:
    return diagnosis(Stack(environment, plugins=False).named(names))


def coded(findings: list[Finding], code: str) -> list[Finding]:
    return [finding for finding in findings if finding.code == code]


def only(findings: list[Finding], code: str) -> Finding:
    (finding,) = coded(findings, code)
    return finding


def shell(home: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a user's shell would, with the real command in it."""
    command = f'cachectl() {{ {shlex.quote(sys.executable)} -m cachectl "$@"; }}\n'
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return subprocess.run(
        ["sh", "-ec", command + script],
        env={**kept, "HOME": str(home), **variables},
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
        timeout=1200,
    )


def after(home: Path, fix: str, *names: str, **variables: str) -> list[dict[str, str]]:
    """Apply a fix in a shell and return what the doctor, asked there, finds then."""
    done = shell(home, f"{fix} >&2\ncachectl doctor {' '.join(names)} --json || test $? = 1", **variables)
    document = json.loads(done.stdout)
    assert document["schema"] == "cachectl/findings/1"
    found: list[dict[str, str]] = document["findings"]
    return found


# ---------------------------------------------------------------------- as a whole


@pytest.mark.real
def test_a_filled_home_is_well(warm: Home) -> None:
    before = snapshot(warm.path, times=True)
    done = warm.cachectl("doctor", *HOMELY, "--json")
    findings = json.loads(done.stdout)["findings"]
    assert {finding["severity"] for finding in findings} <= {"harmless"}
    # PoCL leaks an empty file in every process.
    assert {finding["code"] for finding in findings} <= {"leaked"}
    assert snapshot(warm.path, times=True) == before


def test_an_empty_home_is_well(home: Home) -> None:
    assert home.cachectl("doctor", *HOMELY).stdout == "nothing is wrong\n"
    assert home.json("doctor", *HOMELY) == {"schema": "cachectl/findings/1", "findings": []}


def test_nothing_changes_on_disk_however_much_is_wrong(home: Home, compute_cache: Callable[[Path], None]) -> None:
    compute_cache(home.path / ".nv" / "ComputeCache")
    wreck(home.path)
    before = snapshot(home.path, times=True)
    done = home.cachectl(
        "doctor", "--json", check=False, CUDA_CACHE_MAXSIZE="1000", SLURM_NTASKS="4", LOOPY_NO_CACHE="x"
    )
    codes = {finding["code"] for finding in json.loads(done.stdout)["findings"]}
    assert codes >= {"variable", "cap", "ranks", "stale", "lock", "leaked", "sqlite"}
    assert done.returncode == 1
    assert done.stderr == ""
    assert snapshot(home.path, times=True) == before


def wreck(home: Path) -> None:
    """Make something stale, something leaked, a lock nobody holds and a damaged file."""
    dictionary(home, Environment.here().python)
    leak(home)
    stale_lock(home)
    (home / ".cache" / "pytools" / f"pdict-v5-loopy-x-{Environment.here().python}.sqlite").write_bytes(
        b"not sqlite" * 99
    )


def test_text_names_the_cause_and_the_command(home: Home) -> None:
    done = home.cachectl("doctor", "loopy", check=False, LOOPY_NO_CACHE="1")
    assert done.returncode == 1
    first, second = done.stdout.splitlines()
    assert "LOOPY_NO_CACHE=1 switches loopy code generation off (recompiles every run)" in first
    assert second == "  fix: unset LOOPY_NO_CACHE"


def test_the_worst_comes_first_and_what_is_damaged_is_among_it(home: Home) -> None:
    wreck(home.path)
    found = examine(home.environment(LOOPY_NO_CACHE="1"), "loopy")
    assert [finding.code for finding in found] == ["sqlite", "off"]
    assert found[0].severity is Severity.FAILS


def test_harmless_findings_are_status_0(home: Home) -> None:
    leak(home.path)
    assert home.cachectl("doctor", "pocl").returncode == 0
    assert home.cachectl("doctor", "pocl", check=False, POCL_KERNEL_CACHE="0").returncode == 1


def test_a_layer_that_does_not_exist_is_a_misuse(home: Home) -> None:
    assert home.cachectl("doctor", "nosuch", check=False).returncode == 2


# ---------------------------------------------------------------------- variables


@pytest.mark.parametrize(
    ("layer", "variable", "value", "code", "severity"),
    [
        ("loopy", "LOOPY_NO_CACHE", "1", "off", Severity.RECOMPILES),
        ("loopy", "CG_NO_CACHE", "yes", "off", Severity.RECOMPILES),
        ("loopy", "LOOPY_NO_CACHE", "", "variable", Severity.FAILS),
        ("loopy", "LOOPY_NO_CACHE", "banana", "variable", Severity.FAILS),
        ("loopy", "XDG_CACHE_HOME", "relative", "variable", Severity.HARMLESS),
        ("pyopencl-invoker", "PYOPENCL_NO_CACHE", "1", "off", Severity.RECOMPILES),
        ("pyopencl-invoker", "PYOPENCL_NO_CACHE", "", "variable", Severity.FAILS),
        ("pyopencl", "PYOPENCL_NO_CACHE", "true", "off", Severity.RECOMPILES),
        ("pyopencl", "PYOPENCL_NO_CACHE", "2", "variable", Severity.FAILS),
        ("pytools", "SUMPY_NO_CACHE", "1", "off", Severity.RECOMPILES),
        ("pytools", "SUMPY_NO_CACHE", "0", "variable", Severity.RECOMPILES),
        ("pytools", "SUMPY_NO_CACHE", "", "variable", Severity.RECOMPILES),
        ("pocl", "POCL_KERNEL_CACHE", "0", "off", Severity.RECOMPILES),
        ("pocl", "POCL_KERNEL_CACHE", "true", "variable", Severity.RECOMPILES),
        ("pocl", "POCL_KERNEL_CACHE", "", "variable", Severity.RECOMPILES),
        ("pocl", "POCL_CACHE_DIR", "", "variable", Severity.FAILS),
        ("pocl", "POCL_CACHE_DIR", "here", "variable", Severity.RECOMPILES),
        ("pocl", "XDG_CACHE_HOME", "relative", "variable", Severity.RECOMPILES),
        ("cuda", "CUDA_CACHE_DISABLE", "1", "off", Severity.RECOMPILES),
        ("cuda", "CUDA_CACHE_DISABLE", "true", "variable", Severity.HARMLESS),
        ("cuda", "CUDA_CACHE_PATH", "", "variable", Severity.RECOMPILES),
        ("cuda", "CUDA_CACHE_PATH", "here", "variable", Severity.RECOMPILES),
        ("cuda", "CUDA_CACHE_MAXSIZE", "0", "off", Severity.RECOMPILES),
        ("cuda", "CUDA_CACHE_MAXSIZE", "1G", "variable", Severity.RECOMPILES),
        ("cuda", "CUDA_CACHE_MAXSIZE", "", "variable", Severity.RECOMPILES),
        ("cuda", "CUDA_CACHE_MAXSIZE", "30000k", "variable", Severity.RECOMPILES),
        ("miopen", "MIOPEN_DISABLE_CACHE", "1", "off", Severity.RECOMPILES),
        ("miopen-system", "MIOPEN_DISABLE_CACHE", "yes", "off", Severity.RECOMPILES),
        ("miopen", "MIOPEN_DISABLE_CACHE", "on", "variable", Severity.RECOMPILES),
        ("miopen", "MIOPEN_DISABLE_CACHE", "", "variable", Severity.FAILS),
        ("miopen", "MIOPEN_DISABLE_CACHE", "banana", "variable", Severity.FAILS),
        ("miopen-tuning", "MIOPEN_DEBUG_DISABLE_FIND_DB", "1", "off", Severity.RECOMPILES),
        ("miopen-system-tuning", "MIOPEN_DEBUG_DISABLE_FIND_DB", "", "variable", Severity.FAILS),
        ("miopen-tuning", "MIOPEN_FIND_ENFORCE", "5", "tuning", Severity.RECOMPILES),
        ("miopen-tuning", "MIOPEN_FIND_ENFORCE", "db_clean", "tuning", Severity.RECOMPILES),
        ("miopen-tuning", "MIOPEN_FIND_ENFORCE", "4", "tuning", Severity.RECOMPILES),
        ("miopen-tuning", "MIOPEN_FIND_ENFORCE", "SEARCH", "tuning", Severity.HARMLESS),
        ("miopen-tuning", "MIOPEN_FIND_ENFORCE", "9", "variable", Severity.HARMLESS),
        ("miopen-tuning", "MIOPEN_FIND_ENFORCE", "often", "variable", Severity.FAILS),
        ("miopen-tuning", "MIOPEN_DEBUG_FIND_ONLY_SOLVER", "ConvAsm1x1U", "tuning", Severity.HARMLESS),
    ],
)
def test_a_variable_is_found_and_mended(  # noqa: PLR0917 - a table
    tmp_path: Path, layer: str, variable: str, value: str, code: str, severity: Severity
) -> None:
    found = only(examine(environment_of(tmp_path, **{variable: value}), layer), code)
    assert found.severity is severity
    assert found.message.startswith((f"{variable}={value} ", f"{variable}={value!r} "))
    assert found.layer == layer
    assert found.fix.startswith((f"unset {variable}", f"export {variable}="))
    # The command, run by a shell, leaves variables in which nothing is wrong.
    printed = shell(tmp_path, f"{found.fix}\nenv -0", **{variable: value}).stdout
    variables = dict(item.partition("=")[::2] for item in printed.split("\0") if item)
    mended = {name: text for name, text in variables.items() if name in (variable, "HOME")}
    assert examine(replace(environment_of(tmp_path), variables=mended), layer) == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LOOPY_NO_CACHE", "0"),
        ("PYOPENCL_NO_CACHE", "false"),
        ("POCL_KERNEL_CACHE", "1"),
        ("CUDA_CACHE_DISABLE", "0"),
        ("CUDA_CACHE_MAXSIZE", "4294967296"),
        ("CUDA_CACHE_MAXSIZE", " 1000000"),
        ("CUDA_CACHE_MAXSIZE", "-1"),
        ("MIOPEN_DISABLE_CACHE", "off"),
        ("MIOPEN_FIND_ENFORCE", "1"),
        ("MIOPEN_FIND_ENFORCE", ""),
    ],
)
def test_what_is_well_set_is_no_finding(tmp_path: Path, variable: str, value: str) -> None:
    assert examine(environment_of(tmp_path, **{variable: value})) == []


def test_an_empty_place_is_none_to_mesa_alone(tmp_path: Path) -> None:
    """Every other library passes over an empty ``XDG_CACHE_HOME``; Mesa counts where a driver of it is here."""
    assert {finding.layer for finding in examine(environment_of(tmp_path, XDG_CACHE_HOME=""))} <= {"mesa"}


def test_one_variable_of_several_layers_fails_once_and_switches_each_off(tmp_path: Path) -> None:
    assert only(examine(environment_of(tmp_path, PYOPENCL_NO_CACHE="")), "variable").layer == "pyopencl-invoker"
    off = coded(examine(environment_of(tmp_path, PYOPENCL_NO_CACHE="1")), "off")
    assert [finding.layer for finding in off] == ["pyopencl-invoker", "pyopencl"]


def test_sumpy_reads_another_libraries_variable_where_it_is_installed(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, CG_NO_CACHE="0")
    assert examine(environment, "pytools") == []
    sumpy = replace(environment, installed=lambda name: "2026.1" if name == "sumpy" else None)
    assert "asks only whether it is set" in only(examine(sumpy, "pytools"), "variable").message


def test_a_home_that_is_none_leaves_cuda_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compute_cache, "_KERNEL_MODULE", tmp_path)
    found = only(examine(replace(environment_of(tmp_path), variables={"HOME": "here"}), "cuda"), "variable")
    assert (found.severity, found.fix) == (Severity.RECOMPILES, f"export HOME={tmp_path}")
    assert found.root == Path("*")


@pytest.mark.parametrize(
    ("folder", "library", "value", "code", "severity"),
    [
        ("rocm-6.0.2", "libMIOpen.so.1", "on", "variable", Severity.HARMLESS),
        ("rocm", "libMIOpen.so.1.0.60002", "TRUE", "variable", Severity.HARMLESS),
        ("rocm", "libMIOpen.so.1.0.60002", "", "variable", Severity.HARMLESS),
        ("rocm-6.2.0", "libMIOpen.so.1.0.60200", "on", "off", Severity.RECOMPILES),
        ("rocm-7.0.0", "libMIOpen.so.1", "", "variable", Severity.FAILS),
        ("torch", "libMIOpen.so", "on", "variable", Severity.RECOMPILES),
    ],
)
def test_a_value_means_what_the_miopen_that_is_here_makes_of_it(  # noqa: PLR0917 - a table
    tmp_path: Path, folder: str, library: str, value: str, code: str, severity: Severity
) -> None:
    found = only(examine(with_miopen(tmp_path, folder, library, MIOPEN_DISABLE_CACHE=value), "miopen"), code)
    assert found.severity is severity
    assert found.fix in ("unset MIOPEN_DISABLE_CACHE", "export MIOPEN_DISABLE_CACHE=1")


def with_miopen(home: Path, folder: str = "rocm-6.2.0", name: str = "libMIOpen.so.1", **variables: str) -> Environment:
    library = home / folder / "lib" / name
    library.parent.mkdir(parents=True)
    library.touch()
    (home / folder / "share" / "miopen" / "db").mkdir(parents=True)
    return environment_of(home, LD_LIBRARY_PATH=str(library.parent), **variables)


# ---------------------------------------------------------------------- where roots lie


def on_file_system(environment: Environment, kind: str, point: Path) -> Environment:
    mounts = point / "mounts"
    line = "23 28 0:21 / {} rw - {} server:/export rw\n"
    mounts.write_text(line.format("/", "ext4") + line.format(str(point).replace(" ", "\\040"), kind))
    return replace(environment, mounts=mounts)


def make(*folders: Path) -> None:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("kind", ["nfs4", "lustre"])
def test_roots_on_the_network_are_told_once_with_what_is_unsafe_there(tmp_path: Path, kind: str) -> None:
    cache = tmp_path / ".cache"
    make(cache / "pytools", cache / "pyopencl", cache / "pocl" / "kcache", tmp_path / ".nv" / "ComputeCache")
    make(cache / "miopen", tmp_path / ".config" / "miopen")
    environment = on_file_system(environment_of(tmp_path), kind, tmp_path)
    # An AMD driver: PyOpenCL's own cache is used on it.
    (tmp_path / "amd.icd").write_text("libamdocl64.so")
    variables = {**environment.variables, "OCL_ICD_VENDORS": str(tmp_path / "amd.icd")}
    environment = replace(environment, variables=variables, installed=lambda _: "2026.1")
    found = {finding.layer: finding for finding in coded(examine(environment), "network")}
    # Three layers keep their entries in the folder of the first.
    assert list(found) == ["loopy", "pyopencl", "pocl", "cuda", "comgr", "miopen", "miopen-tuning"]
    assert all(f"({kind})" in finding.message for finding in found.values())
    severities = {name: finding.severity for name, finding in found.items()}
    assert {name for name, severity in severities.items() if severity is Severity.HARMLESS} == {"pocl"}
    assert set(severities.values()) == {Severity.RISKS, Severity.HARMLESS}
    assert "sqlite" in found["loopy"].message
    assert "lock is a file" in found["pyopencl"].message


def test_what_is_off_or_local_is_safe_on_the_network(tmp_path: Path) -> None:
    make(tmp_path / ".cache" / "pocl" / "kcache")
    local = on_file_system(environment_of(tmp_path), "ext4", tmp_path)
    assert examine(local, "pocl") == []
    off = on_file_system(environment_of(tmp_path, POCL_KERNEL_CACHE="0"), "nfs", tmp_path)
    assert [finding.code for finding in examine(off, "pocl")] == ["off"]


def test_moving_mends_a_root_on_the_network(tmp_path: Path) -> None:
    make(tmp_path / ".cache" / "pocl" / "kcache")
    found = only(examine(on_file_system(environment_of(tmp_path), "nfs", tmp_path), "pocl"), "network")
    assert found.fix == 'eval "$(cachectl env --root "$(mktemp -d)" --layer pocl --shell sh)"'
    moved = shell(tmp_path, f'{found.fix}\nprintf %s "$POCL_CACHE_DIR"', TMPDIR=tempfile.gettempdir()).stdout
    try:
        assert Path(moved).parent.stat().st_mode & 0o777 == 0o700
        make(Path(moved))
        environment = environment_of(tmp_path, POCL_CACHE_DIR=moved)
        assert examine(on_file_system(environment, "nfs", tmp_path / ".cache"), "pocl") == []
    finally:
        shutil.rmtree(Path(moved).parent)


def test_miopen_falls_back_to_everybodys_folder_where_the_home_is_on_the_network(tmp_path: Path) -> None:
    environment = on_file_system(with_miopen(tmp_path), "nfs", tmp_path)
    make(environment.temporary)
    assert coded(examine(environment, "miopen"), "fallback") == []
    environment.temporary.chmod(0o1777)
    found = only(examine(environment, "miopen"), "fallback")
    assert (found.severity, found.root) == (Severity.UNSAFE, environment.temporary)
    assert found.fix == 'export MIOPEN_CUSTOM_CACHE_DIR="$(mktemp -d)"'
    named = {**environment.variables, "MIOPEN_CUSTOM_CACHE_DIR": str(tmp_path / "own")}
    assert coded(examine(replace(environment, variables=named), "miopen"), "fallback") == []


# ---------------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    ("variables", "ranks", "variable"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0"}, 8, "OMPI_COMM_WORLD_RANK"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, 2, "PMI_RANK"),
        ({"PMIX_RANK": "3"}, None, "PMIX_RANK"),
        ({"PALS_RANKID": "3"}, None, "PALS_RANKID"),
        ({"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "0"}, 4, "MPI_LOCALRANKID"),
        ({"SLURM_NTASKS": "64", "SLURM_PROCID": "0"}, 64, "SLURM_PROCID"),
    ],
)
def test_ranks_that_share_a_root_are_told(
    tmp_path: Path, variables: Mapping[str, str], ranks: int | None, variable: str
) -> None:
    cache = tmp_path / ".cache"
    make(cache / "pytools", cache / "pocl" / "kcache", tmp_path / ".nv" / "ComputeCache")
    (tmp_path / "pocl.icd").write_text("libpocl.so.2")
    environment = environment_of(tmp_path, OCL_ICD_VENDORS=str(tmp_path / "pocl.icd"), **variables)
    job = job_of(environment)
    assert job is not None
    assert (job.ranks, job.variable) == (ranks, variable)
    found = coded(examine(replace(environment, installed=lambda _: "2026.1")), "ranks")
    severities = {finding.layer: finding.severity for finding in found}
    assert severities.pop("loopy") is Severity.HARMLESS
    assert severities == {"pocl": Severity.RISKS, "cuda": Severity.RISKS}
    own = f"rank$(hostname)-${{{variable}:?}}" if variable == "MPI_LOCALRANKID" else f"rank${{{variable}:?}}"
    fix = f'eval "$(cachectl env --root "$HOME/.cachectl/{own}" --layer pocl --shell sh)"'
    of_pocl = only([finding for finding in found if finding.layer == "pocl"], "ranks")
    assert of_pocl.fix == fix
    assert of_pocl.message.endswith("; mend it in the script that each rank runs")
    left = after(tmp_path, f'{fix}\nmkdir -p "$POCL_CACHE_DIR"', "pocl", **{variable: "0", **variables})
    assert left == []
    # Where no rank is told, all would get one folder: nothing is moved, and the shell says why.
    unset = {name: value for name, value in variables.items() if name != variable}
    alone = shell(tmp_path, f'{fix}\nprintf %s "${{POCL_CACHE_DIR-unmoved}}"', **unset)
    assert alone.stdout == "unmoved"
    assert variable in alone.stderr


def test_ranks_of_a_node_that_several_nodes_count_alike_are_told_apart_by_the_node(tmp_path: Path) -> None:
    variables = {"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"}
    for name, apart in (("rank1", False), (f"rank{platform.node()}-1", True), (f"rank{platform.node()}-2", False)):
        root = tmp_path / name
        make(root)
        environment = environment_of(tmp_path, POCL_CACHE_DIR=str(root), **variables)
        shared = coded(examine(on_file_system(environment, "nfs", tmp_path), "pocl"), "ranks")
        assert (not shared) is apart, name


def test_what_will_be_made_is_judged_before_it_is_there(tmp_path: Path) -> None:
    """The first run on a cluster is the one that matters: no root is there yet."""
    (tmp_path / "pocl.icd").write_text("libpocl.so.2")
    quiet = environment_of(tmp_path, OCL_ICD_VENDORS=str(tmp_path / "pocl.icd"))
    assert examine(quiet, *HOMELY) == []
    ranks = {**quiet.variables, "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    job = replace(on_file_system(quiet, "nfs", tmp_path), variables=ranks)
    found = examine(job, "pocl")
    assert sorted(finding.code for finding in found) == ["network", "ranks"]
    assert {finding.root for finding in found} == {tmp_path / ".cache" / "pocl" / "kcache"}
    assert examine(replace(job, variables={**ranks, "POCL_KERNEL_CACHE": "0"}), "pocl")[0].code == "off"


def test_a_number_that_is_none_is_no_traceback(tmp_path: Path) -> None:
    assert job_of(environment_of(tmp_path, SLURM_NTASKS="9" * 5000, PMI_SIZE="\u00b2")) is None


# ---------------------------------------------------------------------- whether a root can be used


def test_what_is_no_folder_is_told_and_mended(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("something")
    found = only(examine(environment_of(tmp_path, POCL_CACHE_DIR=str(file)), "pocl"), "no-folder")
    assert (found.severity, found.fix) == (Severity.FAILS, "unset POCL_CACHE_DIR")
    assert found.message == "no folder stands there, so PoCL can build no program"
    (tmp_path / "pocl.icd").write_text("libpocl.so.2")
    icd = {"OCL_ICD_VENDORS": str(tmp_path / "pocl.icd")}
    below = only(examine(environment_of(tmp_path, POCL_CACHE_DIR=str(file / "below"), **icd), "pocl"), "no-folder")
    assert f"no folder stands at {file}" in below.message
    assert after(tmp_path, below.fix, "pocl", POCL_CACHE_DIR=str(file / "below"), **icd) == []
    assert file.read_text() == "something"


@pytest.mark.parametrize("how", ["file", "link"])
def test_a_default_place_that_is_no_folder_is_cleared_or_made(tmp_path: Path, how: str) -> None:
    place = tmp_path / ".cache" / "pytools"
    make(place.parent)
    if how == "file":
        place.write_text("something")
    else:
        place.symlink_to(tmp_path / "gone" / "with the scratch disk")
    environment = replace(environment_of(tmp_path), installed=lambda _: "2026.1")
    # Three layers share it: it is said once.
    found = only(examine(environment), "no-folder")
    assert (found.layer, found.severity, found.root) == ("loopy", Severity.FAILS, place)
    shell(tmp_path, found.fix)
    assert coded(examine(environment), "no-folder") == []
    assert how == "link" or (place.parent / "pytools.aside").read_text() == "something"


def asked(home: Path, by: tuple[str, ...], *arguments: str, **variables: str) -> list[dict[str, str]]:
    """Ask as a user whom the modes of files bind."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    done = run_as(by, (*arguments, "--json"), {**kept, "HOME": str(home), **variables})
    assert done.stderr == ""
    found: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    assert done.returncode == any(finding["severity"] != "harmless" or arguments[0] == "verify" for finding in found)
    return found


@pytest.mark.parametrize("made", [True, False])
def test_a_root_that_is_closed_to_me_is_told_and_opened(
    tmp_path: Path, held_to_modes: tuple[str, ...], *, made: bool
) -> None:
    root = tmp_path / "above" / "pocl"
    closed = root if made else root.parent
    make(closed)
    (tmp_path / "pocl.icd").write_text("libpocl.so.2")
    variables = {"POCL_CACHE_DIR": str(root), "OCL_ICD_VENDORS": str(tmp_path / "pocl.icd")}
    closed.chmod(0o500)
    (found,) = asked(tmp_path, held_to_modes, "doctor", "pocl", **variables)
    assert (found["code"], found["severity"]) == ("closed", "fails every run")
    assert found["fix"] == f"chmod u+w {closed}"
    shell(tmp_path, found["fix"])
    assert asked(tmp_path, held_to_modes, "doctor", "pocl", **variables) == []


def test_a_root_that_no_mode_opens_is_left_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only mount."""
    root = tmp_path / "mounted"
    make(root)
    monkeypatch.setattr(os, "access", lambda path, *_, **__: Path(path) != root)
    monkeypatch.setattr(os, "supports_effective_ids", {os.access})
    found = only(examine(environment_of(tmp_path, POCL_CACHE_DIR=str(root)), "pocl"), "closed")
    assert found.fix.startswith('eval "$(cachectl env --root "$HOME/.cachectl" --layer pocl')


# ---------------------------------------------------------------------- what cannot be looked at

_ENTRY = "pyopencl-compiler-cache-v2-py3.11.0.final.0"
#: A folder below a home that a layer would have to look into, and what it is to that layer.
CLOSED = {
    "pocl": ".cache/pocl/kcache/AB",
    "cuda": ".nv/ComputeCache/a",
    "pyopencl": f".cache/pyopencl/{_ENTRY}",
    "pytools": ".cache/pytools/pdict-v4-mine-py3.11.0.final.0",
    "neo": ".cache/neo_compiler_cache/a",
    "miopen": ".cache/miopen/3.3.0.a85ca8a54",
    "miopen-tuning": ".config/miopen",
}


@pytest.mark.parametrize("layer", CLOSED)
def test_a_folder_that_cannot_be_read_is_no_clean_bill(
    tmp_path: Path, held_to_modes: tuple[str, ...], layer: str
) -> None:
    closed = tmp_path / CLOSED[layer]
    make(closed)
    closed.chmod(0)
    (found,) = asked(tmp_path, held_to_modes, "verify", layer)
    assert (found["code"], found["severity"]) == ("unreadable", "fails every run")
    assert found["fix"] == f"chmod u+rwx {closed}"
    assert "Permission denied" in found["message"]
    assert found in asked(tmp_path, held_to_modes, "doctor", layer)
    shell(tmp_path, found["fix"])
    assert closed.stat().st_mode & 0o777 == 0o700
    assert asked(tmp_path, held_to_modes, "verify", layer) == []


@pytest.mark.parametrize("layer", [layer for layer in CLOSED if layer != "miopen-tuning"])
def test_a_link_inside_a_root_is_told_and_harmless(tmp_path: Path, layer: str) -> None:
    link = tmp_path / CLOSED[layer]
    make(link.parent, tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    (found,) = findings((Stack(environment_of(tmp_path), plugins=False)[layer],))
    assert (found.code, found.severity, found.thing) == ("link", Severity.HARMLESS, None)
    assert found.root / (found.key or "") == link


def test_what_does_not_belong_into_an_entry_is_told_and_harmless(tmp_path: Path) -> None:
    program = tmp_path / ".cache" / "pocl" / "kcache" / "AB" / "ABCDEFGHIJKLMNOPABCDEFGHIJKLMNOPABCDE"
    make(program)
    (program / "thesis.tex").write_text("mine")
    (found,) = findings((Stack(environment_of(tmp_path), plugins=False)["pocl"],))
    assert (found.code, found.severity) == ("unrecognised", Severity.HARMLESS)
    assert "thesis.tex" in found.message
    assert not is_grave(found)


@pytest.mark.parametrize(
    "variables", [{}, {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {"PMI_SIZE": "many"}, {"PMIX_RANK": "0"}]
)
def test_one_rank_shares_with_nobody(tmp_path: Path, variables: Mapping[str, str]) -> None:
    make(tmp_path / ".cache" / "pocl" / "kcache")
    assert job_of(environment_of(tmp_path, **variables)) is None
    assert examine(environment_of(tmp_path, **variables), "pocl") == []


def test_a_rank_of_a_node_parts_roots_of_that_node_only(tmp_path: Path) -> None:
    root = tmp_path / "rank-1"
    make(root)
    variables = {"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "POCL_CACHE_DIR": str(root)}
    environment = environment_of(tmp_path, **variables)
    assert examine(environment, "pocl") == []
    assert coded(examine(on_file_system(environment, "nfs", tmp_path), "pocl"), "ranks") != []


# ---------------------------------------------------------------------- who may write


def test_a_root_that_others_can_write_is_unsafe_until_the_command_is_run(open_home: Path) -> None:
    root = open_home / ".cache" / "pytools"
    make(root)
    root.chmod(0o777)
    environment = environment_of(open_home)
    # Three layers share it: it is said once.
    found = only(examine(environment), "writable")
    assert (found.severity, found.root, found.layer) == (Severity.UNSAFE, root, "loopy")
    assert found.fix == f"chmod go-w {root}"
    assert "everybody" in found.message
    assert coded_json(after(open_home, found.fix), "writable") == []
    assert root.stat().st_mode & 0o777 == 0o755


def coded_json(findings: list[dict[str, str]], code: str) -> list[dict[str, str]]:
    return [finding for finding in findings if finding["code"] == code]


def test_a_folder_above_that_others_can_write_lets_them_swap_the_root(open_home: Path) -> None:
    root = open_home / "a folder" / "pocl"
    make(root)
    root.parent.chmod(0o777)
    environment = environment_of(open_home, POCL_CACHE_DIR=str(root))
    found = only(examine(environment, "pocl"), "writable")
    assert (found.severity, found.root) == (Severity.UNSAFE, root)
    assert found.fix == f"chmod go-w '{root.parent}'"
    assert "in its place" in found.message
    assert after(open_home, found.fix, "pocl", POCL_CACHE_DIR=str(root)) == []
    root.parent.chmod(0o1777)
    # Sticky: others cannot rename what is not theirs.
    assert examine(environment, "pocl") == []


def test_a_sticky_root_is_left_for_another(open_home: Path) -> None:
    root = open_home / "shared"
    make(root)
    root.chmod(0o1777)
    found = only(examine(environment_of(open_home, POCL_CACHE_DIR=str(root)), "pocl"), "writable")
    assert found.fix.startswith('eval "$(cachectl env --root "$HOME/.cachectl" --layer pocl')
    assert after(open_home, found.fix + '\nmkdir -p "$POCL_CACHE_DIR"', "pocl", POCL_CACHE_DIR=str(root)) == []


def test_what_nobody_else_can_reach_is_safe(open_home: Path) -> None:
    root = open_home / "private" / "pocl"
    make(root)
    root.chmod(0o777)
    environment = environment_of(open_home, POCL_CACHE_DIR=str(root))
    assert coded(examine(environment, "pocl"), "writable") != []
    root.parent.chmod(0o700)
    assert examine(environment, "pocl") == []


def test_a_link_to_a_folder_that_others_can_write_is_followed_to_it(open_home: Path) -> None:
    make(open_home / "elsewhere", open_home / ".cache")
    (open_home / "elsewhere").chmod(0o777)
    (open_home / ".cache" / "pocl").symlink_to(open_home / "elsewhere")
    make(open_home / ".cache" / "pocl" / "kcache")
    found = only(examine(environment_of(open_home), "pocl"), "writable")
    assert found.fix == f"chmod go-w {open_home / 'elsewhere'}"
    assert after(open_home, found.fix, "pocl") == []


@pytest.mark.skipif(not ROOT, reason="only the superuser gives files away")
def test_a_group_of_others_is_somebody_and_a_private_one_is_not(open_home: Path) -> None:
    root = open_home / ".cache" / "pocl" / "kcache"
    make(root)
    root.chmod(0o775)
    assert examine(environment_of(open_home), "pocl") == []
    os.chown(root, -1, 54321)
    found = only(examine(environment_of(open_home), "pocl"), "writable")
    assert "the group 54321" in found.message
    assert after(open_home, found.fix, "pocl") == []


@pytest.mark.skipif(not ROOT, reason="only the superuser gives files away")
def test_a_root_of_somebody_else_is_unsafe_and_left_for_an_own(open_home: Path) -> None:
    root = open_home / ".cache" / "pocl" / "kcache"
    make(root)
    os.chown(root, 54321, -1)
    found = only(examine(environment_of(open_home), "pocl"), "owner")
    assert (found.severity, found.root) == (Severity.UNSAFE, root)
    assert "belongs to user 54321" in found.message
    assert after(open_home, found.fix + '\nmkdir -p "$POCL_CACHE_DIR"', "pocl") == []


def test_a_root_that_is_not_mine_is_unsafe(open_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For testers who are not the superuser: the files stay, the user changes."""
    if ROOT:
        pytest.skip("the superuser's files are trusted")
    root = open_home / ".cache" / "pocl" / "kcache"
    make(root)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert only(examine(environment_of(open_home), "pocl"), "owner").severity is Severity.UNSAFE


# ---------------------------------------------------------------------- what a root holds


@pytest.mark.parametrize("limit", ["set", "default"])
def test_near_the_cap_of_cuda(
    home: Home, compute_cache: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    cache = home.path / ".nv" / "ComputeCache"
    compute_cache(cache)
    held = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    at = held * 100 // 95
    if limit == "default":
        monkeypatch.setattr(cuda_compute_cache, "_DEFAULT_CAP", at)
        environment = home.environment()
    else:
        environment = home.environment(CUDA_CACHE_MAXSIZE=str(at))
    found = only(examine(environment, "cuda"), "cap")
    assert found.severity is Severity.RECOMPILES
    assert f"{held:,} of at most {at:,} bytes" in found.message
    assert ("default" in found.message) == (limit == "default")
    assert found.fix == f"export CUDA_CACHE_MAXSIZE={2 * at}"
    mended = found.fix.partition("=")[2]
    assert examine(home.environment(CUDA_CACHE_MAXSIZE=mended), "cuda") == []
    assert after(home.path, found.fix, "cuda", CUDA_CACHE_MAXSIZE=str(at)) == []


def test_a_cap_that_cannot_be_raised_is_pruned_under(
    home: Home, compute_cache: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_cache(home.path / ".nv" / "ComputeCache")
    monkeypatch.setattr(cuda_compute_cache, "_HIGHEST_CAP", 200_000)
    found = only(examine(home.environment(CUDA_CACHE_MAXSIZE="200000"), "cuda"), "cap")
    assert found.fix == "cachectl prune --max-size 100000 cuda"
    assert after(home.path, found.fix, "cuda") == []


def dictionary(home: Path, ending: str) -> Path:
    folder = home / ".cache" / "pytools"
    folder.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(folder / f"pdict-v5-mine{ending}.sqlite")) as connection:
        connection.execute("create table dict (keyhash text not null primary key, key_value text not null)")
        connection.execute("insert into dict values ('0123456789abcdef', ?)", (pickle.dumps((1, 2)),))
        connection.commit()
    return folder


def leak(home: Path, data: bytes = b"") -> Path:
    leaked = home / ".cache" / "pocl" / "kcache" / ("tempfile_aB3dE6" + (".cl" if data else ""))
    leaked.parent.mkdir(parents=True, exist_ok=True)
    leaked.touch(mode=0o600)
    leaked.write_bytes(data)
    return leaked


def test_another_pythons_dictionary_is_no_finding(home: Home) -> None:
    """Whether its rows are dead is unknown, so no command that removes them is offered."""
    folder = dictionary(home.path, "-3.8.1.final.0")
    before = snapshot(folder)
    assert examine(home.environment(), "pytools") == []
    home.cachectl("prune", "--stale", "pytools")
    assert snapshot(folder) == before


def test_stale_generations_are_told_with_their_bytes_and_pruned(home: Home) -> None:
    dictionary(home.path, Environment.here().python)
    found = only(examine(home.environment(), "pytools"), "stale")
    assert found.severity is Severity.WASTES
    assert found.message.startswith("1 stale entry of ")
    assert found.fix == "cachectl prune --stale pytools"
    assert after(home.path, found.fix, "pytools") == []


@pytest.mark.parametrize(("data", "severity"), [(b"", Severity.HARMLESS), (b"__kernel", Severity.WASTES)])
def test_leaked_temporaries_are_told_and_pruned(home: Home, data: bytes, severity: Severity) -> None:
    leaked = leak(home.path, data)
    # What a running compile might be using is not pruned.
    os.utime(leaked, (1_700_000_000, 1_700_000_000))
    found = only(examine(home.environment(), "pocl"), "leaked")
    assert (found.severity, found.fix) == (severity, "cachectl prune --stale pocl")
    assert f"1 leaked file of {len(data)} bytes" in found.message
    assert after(home.path, found.fix, "pocl") == []
    assert not leaked.exists()


def test_what_is_in_quarantine_has_not_leaked_and_is_not_pruned(home: Home) -> None:
    """No command that the doctor names destroys what waits to be brought back; purging the layer does."""
    program = home.path / ".cache" / "pocl" / "kcache" / "AB" / "ABCDEFGHIJKLMNOPABCDEFGHIJKLMNOPABCDE"
    make(program)
    (program / "program.bc").write_bytes(b"no bitcode")
    done = home.cachectl("verify", "--quarantine", "pocl")
    assert "fix:" not in done.stdout
    assert "\n  moved aside\n" in done.stdout
    # The empty folder that remains is no entry: a prune removes it.
    program.parent.rmdir()
    found = only(examine(home.environment(), "pocl"), "quarantine")
    assert examine(home.environment(), "pocl") == [found]
    assert (found.severity, found.fix) == (Severity.HARMLESS, "cachectl restore")
    assert found.message == "1 thing of 10 bytes in quarantine; cachectl restore lists them"
    quarantine = snapshot(program.parent.parent)
    for limit in (("--stale",), ("--older-than", "0s"), ("--max-size", "0"), ("--max-files", "1")):
        home.cachectl("prune", *limit, "pocl")
    assert snapshot(program.parent.parent) == quarantine
    assert home.json("restore")["quarantine"] != []
    home.cachectl("purge", "pocl")
    assert home.json("restore")["quarantine"] == []
    assert examine(home.environment(), "pocl") == []


def test_what_was_left_in_place_is_still_to_be_mended(home: Home) -> None:
    broken = home.path / ".config" / "miopen" / "gfx90a6e.HIP.3_3_0_a85ca8a54.ufdb.txt"
    make(broken.parent)
    broken.write_text("no record at all\n")
    assert "  fix: " in home.cachectl("verify", "--quarantine", check=False).stdout
    assert "  moved aside\n" in home.cachectl("verify", "--quarantine", "miopen-tuning", check=False).stdout


def test_many_empty_files_waste_a_quota(home: Home) -> None:
    folder = leak(home.path).parent
    for number in range(1000):
        (folder / f"tempfile_aB{number:04}").touch(mode=0o600)
    found = only(examine(home.environment(), "pocl"), "leaked")
    assert (found.severity, found.message) == (Severity.WASTES, "1,001 leaked files of 0 bytes, which nothing reads")


def stale_lock(home: Path) -> Path:
    lock = home / ".cache" / "pyopencl" / f"pyopencl-compiler-cache-v2-py{Environment.here().python}" / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    return lock


def test_a_stale_lock_fails_every_build_until_it_is_removed(home: Home) -> None:
    lock = stale_lock(home.path)
    (home.path / "amd.icd").write_text("libamdocl64.so")
    environment = home.environment(OCL_ICD_VENDORS=str(home.path / "amd.icd"))
    found = only(examine(environment, "pyopencl"), "lock")
    assert (found.severity, found.key) == (Severity.FAILS, f"{lock.parent.name}/lock")
    assert found.fix == f"rm {lock}"
    os.utime(lock)
    assert examine(environment, "pyopencl") == [], "it may be held"
    os.utime(lock, (1_700_000_000, 1_700_000_000))
    shell(home.path, found.fix)
    assert examine(environment, "pyopencl") == []


def test_an_old_lock_that_a_living_cachectl_holds_is_not_to_be_removed(home: Home) -> None:
    lock = stale_lock(home.path)
    (home.path / "amd.icd").write_text("libamdocl64.so")
    environment = home.environment(OCL_ICD_VENDORS=str(home.path / "amd.icd"))
    lock.unlink()
    with presence_lock("pyopencl", lock):
        os.utime(lock, (1_700_000_000, 1_700_000_000))
        # However long it takes until somebody looks.
        found = only(examine(replace(environment, clock=lambda: 1_700_000_901.0), "pyopencl"), "lock")
        assert found.severity is Severity.RISKS
        assert f"held for 901 s, perhaps by process {os.getpid()} (stopped?)" in found.message
        assert found.fix == f"end process {os.getpid()}, then: rm {lock}"
    assert examine(environment, "pyopencl") == []


def test_an_old_lock_that_a_running_program_may_hold_is_not_to_be_removed(home: Home, tmp_path: Path) -> None:
    lock = stale_lock(home.path)
    (home.path / "amd.icd").write_text("libamdocl64.so")
    environment = home.environment(OCL_ICD_VENDORS=str(home.path / "amd.icd"))
    shown = tmp_path / "shown"
    for process in ("self", "4711"):
        make(shown / process)
        (shown / process / "maps").write_text("" if process == "self" else "7f00 r-xp /lib/pyopencl/_cl.abi3.so\n")
    found = only(examine(replace(environment, processes=shown), "pyopencl"), "lock")
    assert (found.severity, found.fix) == (Severity.RISKS, f"end process 4711, then: rm {lock}")
    hidden = only(examine(replace(environment, processes=tmp_path / "nothing"), "pyopencl"), "lock")
    assert "this platform does not show" in hidden.message
    network = on_file_system(environment, "nfs", home.path)
    remote = only(examine(network, "pyopencl"), "lock")
    assert (remote.severity, remote.fix) == (Severity.RISKS, f"end a program of another machine, then: rm {lock}")


def test_a_stale_lock_that_nothing_asks_for_is_harmless(home: Home) -> None:
    stale_lock(home.path)
    found = only(examine(home.environment(PYOPENCL_NO_CACHE="1"), "pyopencl"), "lock")
    assert found.severity is Severity.HARMLESS


# ---------------------------------------------------------------------- MIOpen's system kernels


def gpu(environment: Environment, folder: Path, version: int = 90010, simds: int = 440, each: int = 4) -> Environment:
    for number, text in enumerate(
        (
            "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n",
            f"simd_count {simds}\nsimd_per_cu {each}\ngfx_target_version {version}\n",
            f"simd_count {simds}\nsimd_per_cu {each}\ngfx_target_version {version}\n",
        )
    ):
        node = folder / str(number)
        node.mkdir(parents=True, exist_ok=True)
        (node / "properties").write_text(text)
    return replace(environment, topology=folder)


def kernels(path: Path, *, wal: bool = False) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        if wal:
            connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(MIOPEN_TABLE)
        connection.commit()
    return path


@pytest.mark.parametrize(
    ("version", "simds", "each", "arch", "bases"),
    [
        (90010, 440, 4, "gfx90a", ("gfx90a6e",)),
        (90006, 240, 4, "gfx906", ("gfx906_60",)),
        (90008, 480, 4, "gfx908", ("gfx90878",)),
        (90402, 1216, 4, "gfx942", ("gfx942130",)),
        (100300, 144, 2, "gfx1030", ("gfx1030_36", "gfx103048")),
        (110501, 80, 2, "gfx1151", ("gfx1151_20", "gfx1151_40")),
    ],
)
def test_gpus_are_named_as_miopen_names_files(  # noqa: PLR0917 - a table
    tmp_path: Path, version: int, simds: int, each: int, arch: str, bases: tuple[str, ...]
) -> None:
    (found,) = amd_gpus(gpu(environment_of(tmp_path), tmp_path / "nodes", version, simds, each))
    assert (found.arch, found.bases) == (arch, bases)


def test_variables_tell_miopen_of_another_gpu(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    enforced = environment_of(tmp_path, HSA_OVERRIDE_GFX_VERSION="10.3.0", MIOPEN_DEVICE_CU="36")
    assert [found.bases for found in amd_gpus(gpu(enforced, nodes))] == [("gfx1030_36",)]
    named = environment_of(tmp_path, MIOPEN_DEBUG_ENFORCE_DEVICE="gfx908")
    assert [found.bases for found in amd_gpus(gpu(named, nodes))] == [("gfx9086e",)]


@pytest.mark.parametrize("units", ["\u00b2", "\u0663", "9" * 5000, "-1", "many"])
def test_units_that_are_no_number_are_passed_over(tmp_path: Path, units: str) -> None:
    environment = environment_of(tmp_path, MIOPEN_DEVICE_CU=units, HSA_OVERRIDE_GFX_VERSION="\u0663.0.0")
    nodes = tmp_path / "nodes"
    environment = gpu(environment, nodes)
    with (nodes / "1" / "properties").open("a") as file:
        file.write(f"max_waves_per_simd \u00b2\nmem_banks_count {'9' * 5000}\n")
    assert {found.bases for found in amd_gpus(environment)} == {("gfx90a6e",)}


@pytest.mark.parametrize("name", ["gfx90a6e.kdb", "gfx90a.kdb", "gfx90a_xnack.kdb"])
def test_a_database_for_this_gpu_is_no_finding(tmp_path: Path, name: str) -> None:
    environment = gpu(with_miopen(tmp_path), tmp_path / "nodes")
    kernels(tmp_path / "rocm-6.2.0" / "share" / "miopen" / "db" / name)
    assert examine(environment, "miopen-system") == []


def test_the_nearest_database_of_the_same_architecture_is_copied(tmp_path: Path) -> None:
    environment = gpu(with_miopen(tmp_path), tmp_path / "nodes")
    folder = tmp_path / "rocm-6.2.0" / "share" / "miopen" / "db"
    for name in ("gfx90a68.kdb", "gfx90a50.kdb", "gfx908.kdb"):
        kernels(folder / name)
    # Both GPUs are equal: it is said once.
    found = only(examine(environment, "miopen-system"), "no-database")
    assert found.severity is Severity.RECOMPILES
    assert "neither gfx90a6e.kdb nor gfx90a.kdb" in found.message
    assert "the nearest is gfx90a68.kdb" in found.message
    shell(tmp_path, found.fix)
    assert (folder / "gfx90a6e.kdb").exists()
    assert examine(environment, "miopen-system") == []


def test_a_packages_folder_takes_the_superuser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = gpu(with_miopen(tmp_path), tmp_path / "nodes")
    folder = tmp_path / "rocm-6.2.0" / "share" / "miopen" / "db"
    kernels(folder / "gfx90a68.kdb")
    assert only(examine(environment, "miopen-system"), "no-database").fix.startswith("cp ")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert only(examine(environment, "miopen-system"), "no-database").fix.startswith(f"sudo cp {folder}")


def test_another_architectures_database_is_no_help(tmp_path: Path) -> None:
    environment = gpu(with_miopen(tmp_path), tmp_path / "nodes")
    assert "there is no other" in only(examine(environment, "miopen-system"), "no-database").message
    folder = tmp_path / "rocm-6.2.0" / "share" / "miopen" / "db"
    for name in ("gfx1030.kdb", "gfx908.kdb"):
        kernels(folder / name)
    found = only(examine(environment, "miopen-system"), "no-database")
    assert "the nearest is gfx908.kdb, whose code does not run on it" in found.message
    assert found.fix == "sudo apt-get install miopen-hip-gfx90akdb || sudo dnf install miopen-hip-gfx90akdb"


def test_without_miopen_a_gpu_lacks_nothing(tmp_path: Path) -> None:
    environment = gpu(environment_of(tmp_path), tmp_path / "nodes")
    if Stack(environment, plugins=False)["miopen-system"].roots():
        pytest.skip("a MIOpen is installed here")
    assert examine(environment, "miopen-system") == []


def test_a_system_database_in_wal_mode_is_told_once_and_converted(tmp_path: Path) -> None:
    environment = with_miopen(tmp_path)
    path = kernels(tmp_path / "rocm-6.2.0" / "share" / "miopen" / "db" / "gfx90a.kdb", wal=True)
    (found,) = examine(environment, "miopen-system")
    assert (found.code, found.severity) == ("wal", Severity.FAILS)
    command = shlex.split(found.fix.partition(": ")[2])
    assert command[:2] == ["sqlite3", str(path)]
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(command[2])
    assert examine(environment, "miopen-system") == []


# ---------------------------------------------------------------------- what fails stops nothing


class Sick(Layer):
    """A layer of somebody else, whose every answer may be an exception."""

    name = "sick"
    title = "a sick layer"
    forms = ("sick/1",)
    failing: ClassVar[str] = ""

    def _perhaps(self, method: str) -> None:
        if method == self.failing:
            raise RuntimeError(method)

    def roots(self) -> tuple[Root, ...]:
        self._perhaps("roots")
        return (Root(self.environment.home, Scope.USER, "default"),)

    def state(self) -> State:
        raise RuntimeError

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[object]:  # type: ignore[override]
        del root, contents
        self._perhaps("scan")
        return iter(())

    def diagnose(self) -> Iterator[Finding]:
        self._perhaps("diagnose")
        yield Finding(self.name, Path("*"), None, Severity.HARMLESS, "told", "something", "nothing")

    def verify(self, root: Root) -> Iterator[Finding]:
        self._perhaps("verify")
        yield Finding(self.name, root.path, "key", Severity.FAILS, "damaged", "something else", "nothing")

    read = write = remove = switch = relocate = state  # type: ignore[assignment]


@pytest.mark.parametrize("failing", ["roots", "scan", "diagnose", "verify"])
def test_a_plugin_that_fails_stops_neither_itself_nor_the_others(tmp_path: Path, failing: str) -> None:
    environment = environment_of(tmp_path, LOOPY_NO_CACHE="1")
    sick = type("Sick", (Sick,), {"failing": failing})(environment)
    found = diagnosis((Contained(sick, environment), *Stack(environment, plugins=False)))
    failed = only([finding for finding in found if finding.layer == "sick"], "plugin")
    assert failing in failed.message
    told = {finding.code for finding in found if finding.layer == "sick"} - {"plugin"}
    assert (
        told
        == {
            "roots": {"told"},
            "scan": {"told", "damaged"},
            "diagnose": {"damaged"},
            "verify": {"told"},
        }[failing]
    )
    assert only(found, "off").layer == "loopy"


def test_a_plugins_own_hazard_is_told(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, PMI_SIZE="2")
    hazard = Hazard(Severity.RISKS, "it was not made for this")
    sick = type("Sick", (Sick,), {"among_ranks": hazard, "on_network": "nonsense"})(environment)
    layer = Contained(sick, environment)
    assert layer.on_network == Layer.on_network
    found = only(diagnosis((layer,)), "ranks")
    assert found.message == "the ranks of this job share it: it was not made for this".replace("ranks", "2 ranks")
    assert found.fix.startswith("nothing moves it: ")


def test_a_plugin_that_gives_no_layer_is_told(tmp_path: Path) -> None:
    (found,) = diagnosis((), (Broken("odd", "it cannot be imported"),))
    assert (found.code, found.layer) == ("plugin", "odd")
    assert not is_grave(found)
    del tmp_path


@pytest.mark.skipif(ROOT, reason="the superuser reads everything")
def test_a_root_that_cannot_be_read_is_told_once_by_each_layer(home: Home) -> None:
    unreadable, closed = home.path / ".cache" / "pytools", home.path / ".cache" / "pocl"
    make(unreadable, closed / "kcache")
    unreadable.chmod(0)
    closed.chmod(0)
    try:
        found = examine(home.environment(LOOPY_NO_CACHE="1"))
    finally:
        unreadable.chmod(0o700)
        closed.chmod(0o700)
    told = [finding.layer for finding in coded(found, "unreadable")]
    # PoCL has two roots there.
    assert told == ["loopy", "pyopencl-invoker", "pytools", "pocl", "pocl"]
    assert {finding.code for finding in found} == {"off", "unreadable"}
