"""The doctor: variables, places and ranks."""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support.doctor import HOMELY, after, coded, environment_of, examine, make, on_file_system, only, shell, with_miopen
from support.drivers import register_driver
from tiers import thorough

from cachectl.layers import cuda as cuda_compute_cache
from cachectl.layers.base.facts import Severity
from cachectl.verbs.doctor import job_of


@pytest.mark.parametrize(
    ("layer", "variable", "value", "code", "severity"),
    [
        ("loopy", "XDG_CACHE_HOME", "relative", "variable", Severity.HARMLESS),
        ("pyopencl-invoker", "PYOPENCL_NO_CACHE", "1", "off", Severity.RECOMPILES),
        ("pyopencl-invoker", "PYOPENCL_NO_CACHE", "", "variable", Severity.FAILS),
        ("pyopencl", "PYOPENCL_NO_CACHE", "true", "off", Severity.RECOMPILES),
        ("pyopencl", "PYOPENCL_NO_CACHE", "2", "variable", Severity.FAILS),
        ("pytools", "SUMPY_NO_CACHE", "1", "off", Severity.RECOMPILES),
        ("pytools", "SUMPY_NO_CACHE", "0", "variable", Severity.RECOMPILES),
        ("pytools", "SUMPY_NO_CACHE", "", "variable", Severity.RECOMPILES),
        ("miopen", "MIOPEN_DISABLE_CACHE", "1", "off", Severity.RECOMPILES),
        ("miopen-system", "MIOPEN_DISABLE_CACHE", "yes", "off", Severity.RECOMPILES),
        ("miopen", "MIOPEN_DISABLE_CACHE", "on", "off", Severity.RECOMPILES),
        ("miopen", "MIOPEN_DISABLE_CACHE", "", "variable", Severity.FAILS),
        ("miopen", "MIOPEN_DISABLE_CACHE", "banana", "variable", Severity.FAILS),
        ("miopen-tuning", "MIOPEN_DEBUG_DISABLE_FIND_DB", "1", "off", Severity.RECOMPILES),
        ("miopen-system-tuning", "MIOPEN_DEBUG_DISABLE_FIND_DB", "", "variable", Severity.FAILS),
        ("miopen-tuning", "MIOPEN_FIND_ENFORCE", "5", "tuning", Severity.RECOMPILES),
        ("miopen-tuning", "MIOPEN_FIND_ENFORCE", "db_clean", "tuning", Severity.RECOMPILES),
        ("miopen-tuning", "MIOPEN_FIND_ENFORCE", "4", "tuning", Severity.RECOMPILES),
        ("miopen-tuning", "MIOPEN_FIND_ENFORCE", "SEARCH", "tuning", Severity.HARMLESS),
        ("miopen-tuning", "MIOPEN_FIND_ENFORCE", "9", "variable", Severity.FAILS),
        ("miopen-tuning", "MIOPEN_FIND_ENFORCE", "often", "variable", Severity.FAILS),
        ("miopen-tuning", "MIOPEN_DEBUG_FIND_ONLY_SOLVER", "ConvAsm1x1U", "tuning", Severity.HARMLESS),
    ],
)
def test_a_variable_is_found_and_fixed(  # noqa: PLR0917 - a table
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
    fixed = {name: text for name, text in variables.items() if name in (variable, "HOME")}
    assert examine(replace(environment_of(tmp_path), variables=fixed), layer) == []


@pytest.mark.parametrize(
    "setting",
    [
        *("LOOPY_NO_CACHE=0", "PYOPENCL_NO_CACHE=false", "POCL_KERNEL_CACHE=1", "CUDA_CACHE_DISABLE=0"),
        *("CUDA_CACHE_MAXSIZE=4294967296", "CUDA_CACHE_MAXSIZE= 1000000", "CUDA_CACHE_MAXSIZE=-1"),
        *("MIOPEN_DISABLE_CACHE=off", "MIOPEN_FIND_ENFORCE=1", "MIOPEN_FIND_ENFORCE="),
    ],
)
def test_correct_settings_give_no_finding(tmp_path: Path, setting: str) -> None:
    variable, value = setting.split("=")
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
        ("rocm-6.2.0", "libMIOpen.so.1.0.60200", "on", "off", Severity.RECOMPILES),
        ("rocm-7.0.0", "libMIOpen.so.1", "", "variable", Severity.FAILS),
        ("torch", "libMIOpen.so", "on", "off", Severity.RECOMPILES),
    ],
)
def test_a_value_means_what_the_miopen_that_is_here_makes_of_it(  # noqa: PLR0917 - a table
    tmp_path: Path, folder: str, library: str, value: str, code: str, severity: Severity
) -> None:
    found = only(examine(with_miopen(tmp_path, folder, library, MIOPEN_DISABLE_CACHE=value), "miopen"), code)
    assert found.severity is severity
    assert found.fix in ("unset MIOPEN_DISABLE_CACHE", "export MIOPEN_DISABLE_CACHE=1")


@pytest.mark.parametrize("kind", ["nfs4", "lustre"])
def test_roots_on_the_network_are_reported_once_with_their_hazards(tmp_path: Path, kind: str) -> None:
    cache = tmp_path / ".cache"
    make(cache / "pytools", cache / "pyopencl", cache / "pocl" / "kcache", tmp_path / ".nv" / "ComputeCache")
    make(cache / "miopen", tmp_path / ".config" / "miopen")
    environment = on_file_system(environment_of(tmp_path), kind, tmp_path)
    # An AMD driver: PyOpenCL's own cache is used on it.
    variables = {**environment.variables, "OCL_ICD_VENDORS": register_driver(tmp_path, "libamdocl64.so")}
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


def test_caches_that_are_off_or_local_are_safe_on_the_network(tmp_path: Path) -> None:
    make(tmp_path / ".cache" / "pocl" / "kcache")
    local = on_file_system(environment_of(tmp_path), "ext4", tmp_path)
    assert examine(local, "pocl") == []
    off = on_file_system(environment_of(tmp_path, POCL_KERNEL_CACHE="0"), "nfs", tmp_path)
    assert [finding.code for finding in examine(off, "pocl")] == ["off"]


def test_moving_fixes_a_root_on_the_network(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("variables", "ranks", "variable"),
    [
        ({"SLURM_NTASKS": "64", "SLURM_PROCID": "0"}, 64, "SLURM_PROCID"),
        *thorough(
            ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0"}, 8, "OMPI_COMM_WORLD_RANK"),
            ({"PMI_SIZE": "2", "PMI_RANK": "1"}, 2, "PMI_RANK"),
            ({"PMIX_RANK": "3"}, None, "PMIX_RANK"),
            ({"PALS_RANKID": "3"}, None, "PALS_RANKID"),
            ({"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "0"}, 4, "MPI_LOCALRANKID"),
        ),
    ],
)
def test_ranks_that_share_a_root_are_reported(
    tmp_path: Path, variables: Mapping[str, str], ranks: int | None, variable: str
) -> None:
    cache = tmp_path / ".cache"
    make(cache / "pytools", cache / "pocl" / "kcache", tmp_path / ".nv" / "ComputeCache")
    environment = environment_of(tmp_path, OCL_ICD_VENDORS=register_driver(tmp_path, "libpocl.so.2"), **variables)
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
    assert of_pocl.message.endswith("; fix it in the script that each rank runs")
    left = after(tmp_path, f'{fix}\nmkdir -p "$POCL_CACHE_DIR"', "pocl", **{variable: "0", **variables})
    assert left == []
    # Without a rank all would get one folder: nothing is moved, and the shell prints the reason.
    unset = {name: value for name, value in variables.items() if name != variable}
    alone = shell(tmp_path, f'{fix}\nprintf %s "${{POCL_CACHE_DIR-unmoved}}"', **unset)
    assert alone.stdout == "unmoved"
    assert variable in alone.stderr


def test_a_rank_of_a_node_has_a_root_of_its_own_where_the_name_of_its_folder_says_so(tmp_path: Path) -> None:
    slurm = {"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
    local = {"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"}
    for variables, name, kind, shared in (
        (slurm, "rank-1", "ext4", False),
        (slurm, "rank-1", "nfs", True),
        (local, "rank1", "nfs", True),
        (local, f"rank{platform.node()}-1", "nfs", False),
        (local, f"rank{platform.node()}-2", "nfs", True),
    ):
        make(tmp_path / name)
        environment = environment_of(tmp_path, POCL_CACHE_DIR=str(tmp_path / name), **variables)
        found = coded(examine(on_file_system(environment, kind, tmp_path), "pocl"), "ranks")
        assert bool(found) is shared, name


def test_a_folder_is_judged_before_it_is_made(tmp_path: Path) -> None:
    """The first run on a cluster is the one that matters: no root is there yet."""
    quiet = environment_of(tmp_path, OCL_ICD_VENDORS=register_driver(tmp_path, "libpocl.so.2"))
    assert examine(quiet, *HOMELY) == []
    ranks = {**quiet.variables, "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    job = replace(on_file_system(quiet, "nfs", tmp_path), variables=ranks)
    found = examine(job, "pocl")
    assert sorted(finding.code for finding in found) == ["network", "ranks"]
    assert {finding.root for finding in found} == {tmp_path / ".cache" / "pocl" / "kcache"}
    assert examine(replace(job, variables={**ranks, "POCL_KERNEL_CACHE": "0"}), "pocl")[0].code == "off"
