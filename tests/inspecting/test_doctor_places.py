"""The doctor: variables, places and ranks; roots that cannot be used or read, or that others can write."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from homes import CACHECTL, Home
from support.accounts import install_for_all
from support.doctor import (
    after,
    coded,
    dictionary,
    environment_of,
    examine,
    make,
    on_file_system,
    only,
    shell,
    with_miopen,
)
from support.layers import register_driver
from tiers import AS_NOBODY, NOBODY, as_root, real, thorough

from benchmarks.commands import at_home
from cachectl.layers.base.environment import user_name
from cachectl.layers.core.finding import Severity
from cachectl.layers.host.launcher import parallel_job
from cachectl.stack import Stack

Mount = Callable[..., Path]


def test_sumpy_reads_another_libraries_variable_where_it_is_installed(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, CG_NO_CACHE="0")
    assert examine(environment, "pytools") == []
    sumpy = environment._replace(installed=lambda name: "2026.1" if name == "sumpy" else None)
    assert "checks only whether it is set" in only(examine(sumpy, "pytools"), "variable").message


@pytest.mark.parametrize(
    ("folder", "library", "value", "code", "severity"),
    [
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
    make(cache / "pytools", cache / "pyopencl", cache / "pocl/kcache", tmp_path / ".nv/ComputeCache")
    make(cache / "miopen", tmp_path / ".config/miopen")
    environment = on_file_system(environment_of(tmp_path), kind, tmp_path)
    # An AMD driver: PyOpenCL's own cache is used on it.
    variables = {**environment.variables, "OCL_ICD_VENDORS": register_driver(tmp_path, "libamdocl64.so")}
    environment = environment._replace(variables=variables, installed=lambda _: "2026.1")
    found = {finding.layer: finding for finding in coded(examine(environment), "network")}
    # Three layers keep their entries in the folder of the first.
    assert list(found) == ["loopy", "pyopencl", "pocl", "cuda", "comgr", "miopen", "miopen-tuning"]
    assert all(f"({kind})" in finding.message for finding in found.values())
    severities = {name: finding.severity for name, finding in found.items()}
    assert severities == {**dict.fromkeys(found, Severity.RISKS), "pocl": Severity.HARMLESS}
    assert ("sqlite" in found["loopy"].message, "lock is a file" in found["pyopencl"].message) == (True, True)


def test_a_root_on_the_network_is_fixed_by_moving_and_safe_if_it_is_off_or_local(tmp_path: Path) -> None:
    make(tmp_path / ".cache/pocl/kcache")
    off = on_file_system(environment_of(tmp_path, POCL_KERNEL_CACHE="0"), "nfs", tmp_path)
    assert [finding.code for finding in examine(off, "pocl")] == ["off"]
    found = only(examine(on_file_system(environment_of(tmp_path), "nfs", tmp_path), "pocl"), "network")
    assert found.fix == 'eval "$(cachectl env --root "$(mktemp -d)" --layer pocl --shell sh)"'
    moved = Path(shell(tmp_path, f'{found.fix}\nprintf %s "$POCL_CACHE_DIR"', TMPDIR=str(tmp_path)).stdout)
    assert moved.parent.stat().st_mode & 0o777 == 0o700
    make(moved)
    environment = environment_of(tmp_path, POCL_CACHE_DIR=str(moved))
    assert examine(on_file_system(environment, "nfs", tmp_path / ".cache"), "pocl") == []


def test_miopen_falls_back_to_everybodys_folder_where_the_home_is_on_the_network(open_folder: Path) -> None:
    environment = on_file_system(with_miopen(open_folder), "nfs", open_folder)
    temporary = environment.temporary
    make(temporary)
    assert coded(examine(environment, "miopen"), "fallback") == []
    temporary.chmod(0o1777)
    found = only(examine(environment, "miopen"), "fallback")
    assert (found.severity, found.root) == (Severity.UNSAFE, temporary / ".cache/miopen")
    assert found.fix == 'export MIOPEN_CUSTOM_CACHE_DIR="$(mktemp -d)"'
    named = {**environment.variables, "MIOPEN_CUSTOM_CACHE_DIR": str(open_folder / "own")}
    assert coded(examine(environment._replace(variables=named), "miopen"), "fallback") == []
    # MIOpen up to 3.3 still takes what anybody puts next to this user's own folder.
    make(temporary / ".cache/miopen")
    assert only(examine(environment, "miopen"), "fallback").root == temporary


@pytest.mark.parametrize(
    ("kind", "is_left"), [("ocfs2", True), *((kind, False) for kind in ("gpfs", "beegfs", "9p", "fuse.sshfs"))]
)
def test_miopen_leaves_the_file_systems_of_its_own_list(open_folder: Path, kind: str, is_left: bool) -> None:
    environment = on_file_system(with_miopen(open_folder), kind, open_folder)
    make(environment.temporary)
    environment.temporary.chmod(0o1777)
    found = examine(environment, "miopen")
    assert ([one.code for one in found], f"({kind})" in found[-1].message) == (
        ["fallback"] * is_left + ["network"],
        True,
    )


@as_root
def test_the_fallback_of_the_newest_miopen_may_be_another_users(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = on_file_system(with_miopen(open_folder), "nfs", open_folder)
    theirs = environment.temporary / ".cache"
    make(theirs)
    os.chown(theirs, 54321, -1)
    found = only(examine(environment, "miopen"), "fallback")
    assert (found.severity, found.root) == (Severity.UNSAFE, theirs / "miopen")
    assert f"{theirs} belongs to user 54321" in found.message
    # The modes of files do not bind root, who runs this.
    monkeypatch.setattr(os, "access", lambda place, *_, **__: place != theirs)
    closed = only(examine(environment, "miopen"), "closed")
    assert (closed.severity, closed.fix) == (Severity.FAILS, found.fix)
    assert f"it throws, because you cannot write to {theirs}" in closed.message


@pytest.mark.parametrize("home", ["nfs", "ext4"])
def test_one_folder_cures_ranks_and_the_network(tmp_path: Path, home: str) -> None:
    """The line about the ranks does not lead to the file system that the line about the network warns of."""
    job = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5"}
    variables = {"OCL_ICD_VENDORS": register_driver(tmp_path, "libpocl.so.2"), **job}
    environment = on_file_system(environment_of(tmp_path, **variables), home, tmp_path)
    (found,) = examine(environment, "pocl")
    assert (found.code, found.severity) == ("ranks", Severity.RISKS)
    assert ("network file system (nfs)" in found.message) == (home == "nfs")
    assert "the 8 ranks of this job share it" in found.message
    script = f'{found.fix}\nmkdir -p "$POCL_CACHE_DIR"; printf %s "$POCL_CACHE_DIR"'
    place = Path(shell(tmp_path, script, TMPDIR=tempfile.gettempdir(), **job).stdout)
    assert (tmp_path in place.parents, place.parent.name) == (home == "ext4", "rank5")
    assert place.parents[home == "nfs"].stat().st_mode & 0o077 == (0 if home == "nfs" else 0o055)
    moved = environment._replace(variables={**environment.variables, "POCL_CACHE_DIR": str(place)})
    assert examine(moved, "pocl") == []


@pytest.mark.parametrize(
    ("variables", "ranks", "variable"),
    [
        ({"SLURM_NTASKS": "64", "SLURM_PROCID": "0"}, 64, "SLURM_PROCID"),
        *thorough(
            ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0"}, 8, "OMPI_COMM_WORLD_RANK"),
            ({"PMIX_RANK": "3"}, None, "PMIX_RANK"),
            ({"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "0"}, 4, "MPI_LOCALRANKID"),
        ),
    ],
)
def test_ranks_share_a_root(tmp_path: Path, variables: Mapping[str, str], ranks: int | None, variable: str) -> None:
    # The first run on a cluster is the one that matters: PoCL's folder is not there yet.
    make(tmp_path / ".cache/pytools", tmp_path / ".nv/ComputeCache")
    environment = environment_of(tmp_path, OCL_ICD_VENDORS=register_driver(tmp_path, "libpocl.so.2"), **variables)
    job = parallel_job(environment)
    assert job is not None
    assert (job.ranks, job.rank_variable) == (ranks, variable)
    found = coded(examine(environment._replace(installed=lambda _: "2026.1")), "ranks")
    severities = {finding.layer: finding.severity for finding in found}
    assert severities == {"loopy": Severity.HARMLESS, "pocl": Severity.RISKS, "cuda": Severity.RISKS}
    own = f"rank$(hostname)-${{{variable}:?}}" if variable == "MPI_LOCALRANKID" else f"rank${{{variable}:?}}"
    fix = f'eval "$(cachectl env --root "$HOME/.cachectl/{own}" --layer pocl --shell sh)"'
    (of_pocl,) = (finding for finding in found if finding.layer == "pocl")
    assert of_pocl.fix == fix
    assert "(fix this in the script that each rank runs): PoCL before 6.0" in of_pocl.message
    assert after(tmp_path, f'{fix}\nmkdir -p "$POCL_CACHE_DIR"', "pocl", **{variable: "0", **variables}) == []
    # Without a rank all would get one folder: nothing is moved, and the shell prints the reason.
    unset = {name: value for name, value in variables.items() if name != variable}
    alone = shell(tmp_path, f'{fix}\nprintf %s "${{POCL_CACHE_DIR-unmoved}}"', **unset)
    assert (alone.stdout, variable in alone.stderr) == ("unmoved", True)


def test_a_rank_of_a_node_has_a_root_of_its_own_where_the_name_of_its_folder_says_so(tmp_path: Path) -> None:
    slurm = {"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
    local = {"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"}
    for variables, name, kind, shared in (
        (slurm, "rank-1", "ext4", False),
        (slurm, "rank-1", "nfs", True),
        (slurm, "rank-3", "ext4", True),
        (local, f"rank{platform.node()}-1", "nfs", False),
        (local, f"rank{platform.node()}-2", "nfs", True),
    ):
        make(tmp_path / name)
        environment = environment_of(tmp_path, POCL_CACHE_DIR=str(tmp_path / name), **variables)
        found = coded(examine(on_file_system(environment, kind, tmp_path), "pocl"), "ranks")
        assert bool(found) is shared, name


def test_a_root_that_is_not_a_folder_is_reported_and_fixed(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("something")
    found = only(examine(environment_of(tmp_path, POCL_CACHE_DIR=str(file)), "pocl"), "no-folder")
    assert (found.severity, found.fix) == (Severity.FAILS, "unset POCL_CACHE_DIR")
    icd = {"OCL_ICD_VENDORS": register_driver(tmp_path, "libpocl.so.2")}
    below = only(examine(environment_of(tmp_path, POCL_CACHE_DIR=str(file / "below"), **icd), "pocl"), "no-folder")
    assert f"something other than a directory at {file}: PoCL finds no device" in below.message
    assert after(tmp_path, below.fix, "pocl", POCL_CACHE_DIR=str(file / "below"), **icd) == []
    assert file.read_text() == "something"


@pytest.mark.parametrize("how", ["file", "link"])
def test_a_default_place_that_is_no_folder_is_cleared_or_made(tmp_path: Path, how: str) -> None:
    place = tmp_path / ".cache/pytools"
    make(place.parent)
    if how == "file":
        place.write_text("something")
    else:
        place.symlink_to(tmp_path / "gone" / "with the scratch disk")
    environment = environment_of(tmp_path)._replace(installed=lambda _: "2026.1")
    # Three layers share it: it is said once.
    found = only(examine(environment), "no-folder")
    assert (found.layer, found.severity, found.root) == ("loopy", Severity.FAILS, place)
    shell(tmp_path, found.fix)
    assert coded(examine(environment), "no-folder") == []
    assert how == "link" or (place.parent / "pytools.aside").read_text() == "something"


@pytest.fixture(scope="module")
def nobody() -> Iterator[tuple[str, ...]]:
    """Return how to start cachectl as another user, who may not reach the interpreter that runs the tests."""
    with tempfile.TemporaryDirectory(prefix="for-all-") as folder:
        Path(folder).chmod(0o755)
        yield (*AS_NOBODY, *install_for_all(Path(folder)))


def asked(home: Path, cachectl: tuple[str, ...], *words: str, **variables: str) -> list[dict[str, str]]:
    """Ask as a user whom the modes of files bind."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    own, command = {**kept, **at_home(home), **variables}, (*cachectl, *words, "--json")
    done = subprocess.run(command, env=own, cwd="/", capture_output=True, text=True, check=False)
    assert done.stderr == ""
    found: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    assert done.returncode == any(finding["severity"] != "harmless" for finding in found)
    return found


@as_root
@pytest.mark.parametrize(("mode", "code"), [(0o700, "unreadable"), (0o755, "closed")])
@pytest.mark.parametrize("slip", ["", ".cache/pocl", ".cache/pocl/kcache"])
def test_folders_of_a_slip_of_sudo(open_folder: Path, mode: int, code: str, slip: str, nobody: tuple[str, ...]) -> None:
    """Folders of the superuser in the home of a user, who can change no mode of theirs."""
    home, slipped = open_folder / "home", open_folder / "home" / (slip or ".cache")
    make(home / ".cache/pocl/kcache/AB")
    for folder in (home, *(home / part for part in (".cache", ".cache/pocl"))):
        if folder != slipped and slipped.is_relative_to(folder):
            os.chown(folder, NOBODY, NOBODY)
    slipped.chmod(mode)
    variables = {"OCL_ICD_VENDORS": register_driver(open_folder, "libpocl.so.2")}
    found = asked(home, nobody, "doctor", "pocl", **variables)
    assert {(one["code"], one["fix"]) for one in found} == {(code, f"sudo chown -R {user_name(NOBODY)} {slipped}")}
    assert len({one["root"] for one in found}) == len(found)
    assert all("; it belongs to root" in one["message"] for one in found)
    shell(home, found[0]["fix"].removeprefix("sudo "))
    assert asked(home, nobody, "doctor", "pocl", **variables) == []


@as_root
def test_a_home_that_is_closed_to_this_user_is_one_state(open_folder: Path, nobody: tuple[str, ...]) -> None:
    """No right to read helps libraries that write: the caches have to be somewhere else."""
    home, own = open_folder / "home", open_folder / "tmp"
    make(home / ".cache", own)
    os.chown(own, NOBODY, NOBODY)
    home.chmod(0o700)
    variables = {"OCL_ICD_VENDORS": register_driver(open_folder, "libpocl.so.2"), "TMPDIR": str(own)}
    closed = [one for one in asked(home, nobody, "doctor", **variables) if one["code"] == "unreadable"]
    (found,) = closed
    assert {"pocl", "loopy"} <= set(found["layers"])
    assert f"because {home} is closed to you; it belongs to root" in found["message"]
    assert found["fix"].startswith('eval "$(cachectl env --root "$(mktemp -d)" --layer ')
    used = {one["layer"]: one for one in asked(home, nobody, "verify", **variables) if one["severity"] != "harmless"}
    assert (used["pocl"]["root"], used["pocl"]["fix"]) == (str(home / ".cache/pocl/kcache"), "cachectl doctor pocl")


FAILS, RECOMPILES, UNREAD = "fails every run", "recompiles every run", "Permission denied"
#: A folder or file that is closed to its owner, its mode, and the severity and words of the finding.
UNUSABLE = [
    ("pocl", "above/pocl", 0o500, FAILS, ""),
    ("pocl", "above", 0o500, FAILS, ""),
    ("pocl", ".cache/pocl/kcache/AB", 0o500, "may fail a run", "PoCL cannot build the programs that belong there"),
    ("pocl", ".cache/pocl/kcache/AB", 0, FAILS, UNREAD),
    ("mesa", ".cache/mesa_shader_cache/index", 0, RECOMPILES, UNREAD),
    *thorough(
        ("pyopencl", ".cache/pyopencl/pyopencl-compiler-cache-v2-py3.11.0.final.0", 0, FAILS, UNREAD),
        ("pytools", ".cache/pytools/pdict-v4-mine-py3.11.0.final.0", 0, FAILS, UNREAD),
        ("miopen", ".cache/miopen/3.3.0.a85ca8a54", 0, FAILS, UNREAD),
        ("cuda", ".nv/ComputeCache/a", 0, RECOMPILES, UNREAD),
        ("neo", ".cache/neo_compiler_cache/a", 0, RECOMPILES, UNREAD),
        ("miopen-tuning", ".config/miopen", 0, RECOMPILES, UNREAD),
    ),
]


@pytest.mark.parametrize(("layer", "place", "mode", "severity", "words"), UNUSABLE)
def test_a_folder_that_is_closed_to_its_owner_is_reported_and_opened(  # noqa: PLR0917 - a table
    tmp_path: Path, held_to_modes: tuple[str, ...], layer: str, place: str, mode: int, severity: str, words: str
) -> None:
    verb, code, right = ("doctor", "closed", "u+w") if mode else ("verify", "unreadable", "u+rwX")
    closed = tmp_path / place
    make(closed.parent if closed.name == "index" else closed)
    closed.touch()
    variables = {"OCL_ICD_VENDORS": register_driver(tmp_path, "libpocl.so.2")}
    if place.startswith("above"):
        variables["POCL_CACHE_DIR"] = str(tmp_path / "above/pocl")
    closed.chmod(mode)
    cachectl = (*held_to_modes, *CACHECTL)
    (found,) = asked(tmp_path, cachectl, verb, layer, **variables)
    assert (found["code"], found["severity"], found["fix"]) == (code, severity, f"chmod {right} {closed}")
    assert words in found["message"]
    shell(tmp_path, found["fix"])
    assert asked(tmp_path, cachectl, verb, layer, **variables) == []


@pytest.mark.parametrize(
    "variables",
    [
        *({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {"PMI_SIZE": "many"}, {"PMIX_RANK": "0"}),
        {"SLURM_NTASKS": "9" * 5000, "PMI_SIZE": "\u00b2"},
    ],
)
def test_one_rank_shares_with_nobody(tmp_path: Path, variables: Mapping[str, str]) -> None:
    make(tmp_path / ".cache/pocl/kcache")
    assert examine(environment_of(tmp_path, **variables), "pocl") == []


@pytest.mark.parametrize(
    ("way", "mode", "words", "fix"),
    [
        ("root", 0o777, "is writable by everybody", "chmod go-w '{}'"),
        ("above", 0o777, "in its place", "chmod go-w '{}'"),
        ("link", 0o777, "is writable by everybody", "chmod go-w '{}'"),
        ("root", 0o1777, "is writable by everybody", 'eval "$(cachectl env --root "$HOME/.cachectl" --layer pocl'),
        # Sticky: others cannot rename what is not theirs.
        ("above", 0o1777, "", ""),
        ("private", 0o777, "", ""),
    ],
)
def test_a_root_that_others_can_write_is_unsafe(open_folder: Path, way: str, mode: int, words: str, fix: str) -> None:
    root = open_folder / "a folder" / "pocl"
    make(root)
    place = root.parent if way == "above" else root
    if way == "link":
        place = root.rename(open_folder / "else where")
        root.symlink_to(place)
    place.chmod(mode)
    if way == "private":
        root.parent.chmod(0o700)
    findings = examine(environment_of(open_folder, POCL_CACHE_DIR=str(root)), "pocl")
    if not words:
        assert findings == []
        return
    found = only(findings, "writable")
    assert (found.severity, found.root, words in found.message) == (Severity.UNSAFE, root, True)
    assert found.fix.startswith(fix.format(place))
    assert after(open_folder, found.fix + '\nmkdir -p "${POCL_CACHE_DIR:-.}"', "pocl", POCL_CACHE_DIR=str(root)) == []


@as_root
@pytest.mark.parametrize(
    ("user", "group", "code", "words"),
    [(-1, 0, "", ""), (-1, 54321, "writable", "the group 54321"), (54321, -1, "owner", "belongs to user 54321")],
)
def test_a_root_of_others_is_unsafe(open_folder: Path, user: int, group: int, code: str, words: str) -> None:
    root = open_folder / ".cache/pocl/kcache"
    make(root)
    root.chmod(0o755 if code == "owner" else 0o775)
    os.chown(root, user, group)
    findings = examine(environment_of(open_folder), "pocl")
    assert [(one.code, one.severity, one.root) for one in findings] == [(code, Severity.UNSAFE, root)] * bool(code)
    for found in findings:
        assert words in found.message
        assert after(open_folder, found.fix + '\nmkdir -p "${POCL_CACHE_DIR:-.}"', "pocl") == []


@as_root
def test_what_another_user_closes_outside_the_home_is_left_to_him(open_folder: Path, nobody: tuple[str, ...]) -> None:
    root = open_folder / "theirs/pocl"
    make(root / "AB", open_folder / "mine")
    os.chown(open_folder / "mine", NOBODY, NOBODY)
    (root / "AB").chmod(0o700)
    found = asked(open_folder / "mine", nobody, "doctor", "pocl", POCL_CACHE_DIR=str(root))
    fixes = {one["code"]: one["fix"] for one in found if one["code"] in ("closed", "unreadable")}
    # A right to read is of no use to PoCL.
    assert all(fix.startswith('eval "$(cachectl env --root "$HOME/.cachectl"') for fix in fixes.values())
    assert set(fixes) == {"closed", "unreadable"}
    # Nor is what lies in the home of another to be taken from him.
    assert "sudo" not in str(asked(root.parent, nobody, "doctor", "pocl", POCL_CACHE_DIR=str(root)))


@as_root
def test_a_folder_of_another_user_on_the_way_is_told_where_purge_refuses(open_folder: Path) -> None:
    """One rule of trust for both."""
    theirs = open_folder / "theirs"
    root = theirs / "mine/pocl/kcache"
    make(root / "AB")
    os.chown(theirs, 54321, -1)
    environment = environment_of(open_folder, XDG_CACHE_HOME=str(theirs / "mine"))
    found = only(examine(environment, "pocl"), "owner")
    assert (found.severity, found.message) == (
        Severity.UNSAFE,
        f"is below {theirs}, which belongs to user 54321, whose code runs as you",
    )
    (failed,) = Stack(environment).purge(layers=["pocl"]).layers[0].failed
    assert f"{theirs} belongs to user 54321" in failed.because
    assert after(open_folder, found.fix + '\nmkdir -p "$POCL_CACHE_DIR"', "pocl") == []


def test_a_folder_is_judged_before_a_job_uses_it(tmp_path: Path, mount: Mount) -> None:
    mount("-t", "tmpfs", "-o", "noexec", "none", on=tmp_path / "scratch")
    stack = Stack(environment_of(tmp_path))
    (found,) = stack.doctor(place=tmp_path / "scratch/job 7").findings
    assert (found.layer, found.code, found.layers) == ("pocl", "noexec", None)
    assert (found.fix, found.fix_tested) == ("name another folder", False)
    assert stack.doctor(["loopy"], place=tmp_path / "scratch").findings == ()
    found = only(stack.doctor(["loopy", "pytools", "pocl"], place=Path("/proc/job")).findings, "closed")
    assert found.layers == ("loopy", "pytools", "pocl")
    assert "no file can be created there (Operation not supported): pytools can make no" in found.message
    assert found.message.endswith("; PoCL finds no device, or builds no program")
    (tmp_path / "file").touch()
    found = only(stack.doctor(["loopy"], place=tmp_path / "file").findings, "no-folder")
    assert found.fix == "name another folder"
    assert not (tmp_path / "scratch/job 7").exists()


def test_a_layer_that_fails_while_a_folder_is_judged_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    stack = Stack(environment_of(tmp_path))
    monkeypatch.setattr(stack["pocl"].__class__, "roots", fail)
    found = only(stack.doctor(["pocl", "loopy"], place=tmp_path).findings, "plugin")
    assert (found.layer, found.message) == ("pocl", "ZeroDivisionError")


def test_scratch_folders_are_made_where_code_can_be_mapped(home: Home, mount: Mount) -> None:
    mount("-t", "tmpfs", "-o", "noexec", "none", on=home.path / "tmp")
    done = home.cachectl("run --isolated -- printenv POCL_CACHE_DIR", TMPDIR=str(home.path / "tmp"))
    assert done.stdout.startswith(f"{home.path}/.local/state/cachectl/scratch/")
    assert "is on a file system that is mounted with noexec; using" in done.stderr
    done = home.cachectl("env --root /proc/job --layer pocl --shell sh")
    assert done.stderr.endswith("; see cachectl doctor --place /proc/job\n")


def test_pocl_needs_its_place_with_the_cache_off_too(tmp_path: Path, mount: Mount) -> None:
    mount("-t", "tmpfs", "-o", "ro", "none", on=tmp_path / ".cache")
    variables = {"POCL_KERNEL_CACHE": "0", "PYOPENCL_NO_CACHE": "1", "LOOPY_NO_CACHE": "1"}
    found = {finding.layer: finding.code for finding in examine(environment_of(tmp_path, **variables), "pocl", "loopy")}
    assert found == {"pocl": "off", "loopy": "off"}
    assert only(examine(environment_of(tmp_path, **variables), "pocl", "loopy"), "closed").layer == "pocl"


def test_a_variable_of_a_layer_that_was_not_named_is_known(tmp_path: Path) -> None:
    environment = with_miopen(tmp_path, MIOPEN_SYSTEM_DB_PATH=str(tmp_path), POCL_CACHEDIR="/x")
    assert "MIOPEN_SYSTEM_DB_PATH" not in str(examine(environment, "miopen"))
    assert only(examine(environment, "miopen", "pocl"), "variable").layer == "pocl"


def test_closed_files_are_one_finding_with_one_command(tmp_path: Path, held_to_modes: tuple[str, ...]) -> None:
    for number in range(3):
        dictionary(tmp_path, f"-v{number}-py3.11.7.final.0")
    files = sorted((tmp_path / ".cache/pytools").iterdir())
    for file in files:
        file.chmod(0o400)
    (found,) = asked(tmp_path, (*held_to_modes, *CACHECTL), "doctor", "pytools")
    assert (found["code"], found["fix"]) == ("closed", f"chmod u+w {' '.join(map(str, files))}")
    assert "which is not writable by you (2 more like it): pytools can add nothing" in found["message"]
    shell(tmp_path, found["fix"])
    assert asked(tmp_path, (*held_to_modes, *CACHECTL), "doctor", "pytools") == []


@real
def test_a_name_that_is_too_long_for_the_file_system_leaves_pocl_without_a_cache(home: Home) -> None:
    home = Home(home.path, {**home.variables, "POCL_CACHE_DIR": f"{home.path}/kernels/{'long' * 64}"})
    (home.path / "starts.py").write_text(
        "import pyopencl as cl\n"
        "pocl = next(p for p in cl.get_platforms() if p.name == 'Portable Computing Language')\n"
        "cl.Context(pocl.get_devices())\n"
    )
    assert home.run(sys.executable, "starts.py", check=False).returncode == 1
    (found,) = (one for one in home.json("doctor", "pocl", check=False)["findings"] if one["code"] == "closed")
    assert (found["severity"], found["message"].partition(":")[0]) == ("fails every run", "cannot be created")
    shell(home.path, f"{found['fix']}; {sys.executable} starts.py", **home.variables)


def test_a_home_of_the_account_that_is_closed_keeps_nothing_of_older_mesas(tmp_path: Path, mount: Mount) -> None:
    mount("-t", "tmpfs", "-o", "ro", "none", on=tmp_path / "account")
    environment = environment_of(tmp_path, OCL_ICD_VENDORS=register_driver(tmp_path, "libRusticlOpenCL.so.1"))
    found = [one for one in examine(environment._replace(home=tmp_path / "account"), "mesa") if "HOME=" in one.message]
    assert [one.severity for one in found] == [Severity.RECOMPILES]
