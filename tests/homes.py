"""Homes in which tests run programs and commands; a command runs inside the test's process unless it needs its own."""

import fcntl
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from documents import validate_output

from benchmarks.commands import at_home
from cachectl.cli.main import main
from cachectl.layers.base.environment import Environment
from cachectl.layers.core.conformance import nobody
from cachectl.layers.host.here import this_environment
from cachectl.stack import Stack
from cachectl.switching.child import FAULT

#: Another OpenCL driver than the wheel's PoCL: the variables that make PyOpenCL load it alone.
Driver = dict[str, Any]
#: How a command is started as a process of its own.
CACHECTL = (sys.executable, "-m", "cachectl")
PROGRAMS = Path(__file__).parent / "programs"
#: A program that ends with 7.
SAYS_SEVEN = (sys.executable, "-c", "print('RAN'); raise SystemExit(7)")
#: pytest with our plug-in, which it loads by itself where cachectl is installed.
_LOADED = any(point.value == "cachectl.pytest_plugin" for point in entry_points(group="pytest11"))
_PLUGIN = () if _LOADED else ("-p", "cachectl.pytest_plugin")
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *_PLUGIN)

#: How the names of variables begin that move or switch a layer, or make a rank of a process: none of the tester's own
#: may leak into a test.
SWITCHES = (
    *("XDG_CACHE_HOME", "XDG_CONFIG_", "LOOPY_NO_CACHE", "CG_NO_CACHE", "SUMPY_NO_CACHE", "PYOPENCL_NO_CACHE"),
    *("POCL_CACHE_DIR", "POCL_KERNEL_CACHE", "CUDA_CACHE_", "NEO_CACHE_", "AMD_COMGR_", "MIOPEN_", "MESA_", "RUSTICL_"),
    *("OMPI_COMM_WORLD_", "PMI_", "PMIX_RANK", "PALS_", "SLURM_", "FLUX_", "MPI_LOCAL", "MV2_COMM_", "CONDA_PREFIX"),
    *("TORCHELASTIC_", "LOCAL_WORLD_SIZE", "PYTEST_XDIST_", "ROCR_VISIBLE_", "HIP_VISIBLE_", "CUDA_VISIBLE_"),
)

#: Variables that the interpreter, the loader or the C library read when a process starts, by how their names begin.
_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "COVERAGE")


def run_command(
    arguments: tuple[str, ...], variables: Mapping[str, str], cwd: Path, processes: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a cachectl command inside this process, as a new process with these variables would.

    Programs that the command starts get the same variables, working folder and standard streams. ``processes``
    replaces the system's folder of running programs. An exception that ``main`` does not handle becomes a traceback
    and status 1, as the interpreter does.
    """
    with _standing_in(variables, cwd) as (out, err):
        try:
            here = this_environment()
            status = main(arguments, environment=here if processes is None else here._replace(processes=processes))
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:  # noqa: BLE001 - the interpreter reports every exception in this way
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        read = [os.pread(file, os.fstat(file).st_size, 0) for file in (out, err)]
    return subprocess.CompletedProcess(["cachectl", *arguments], status, *read)


def run_in(home: Path, *arguments: str, by: Sequence[str] = (), **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a home with few variables: inside this process, or as a process that ``by`` starts."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    variables = {**kept, **at_home(home), "TMPDIR": str(home), **changes}
    if by:
        done = Home(home, variables).run(*by, *CACHECTL, *arguments, check=False)
    else:
        done = _as_text(run_command(arguments, variables, home))
    assert "Traceback" not in done.stderr
    return done


def _as_text(done: subprocess.CompletedProcess[bytes]) -> subprocess.CompletedProcess[str]:
    streams = (stream.decode().replace("\r\n", "\n").replace("\r", "\n") for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, *streams)


@contextmanager
def _standing_in(variables: Mapping[str, str], cwd: Path) -> Iterator[tuple[int, int]]:
    """Give this process other variables, another working folder, and files in place of its output."""
    before, folder, streams = dict(os.environ), os.open(".", os.O_RDONLY), (sys.stdin, sys.stdout, sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (0, 1, 2)]
    mask = os.umask(0o022)
    os.umask(mask)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
        temporary, tempfile.tempdir = tempfile.tempdir, None
        try:
            os.environ.clear()
            os.environ.update(variables)
            os.chdir(cwd)
            for number, file in enumerate((nothing, out, err)):
                os.dup2(file.fileno(), number)
            sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            yield out.fileno(), err.fileno()
        finally:
            tempfile.tempdir = temporary
            sys.stdin, sys.stdout, sys.stderr = streams
            for number, copy in enumerate(kept):
                os.dup2(copy, number)
                os.close(copy)
            os.fchdir(folder)
            os.close(folder)
            os.umask(mask)
            os.environ.clear()
            os.environ.update(before)


@dataclass(frozen=True)
class OtherMpi:
    """Another MPI than the one that mpi4py loads by default: its launcher, and variables that make mpi4py load it."""

    mpiexec: str
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Home:
    """A home folder, and programs run in it."""

    path: Path
    variables: Mapping[str, str]
    programs: Path = PROGRAMS

    def environment(self, **changes: str) -> Environment:
        here = this_environment()
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

    @property
    def stack(self) -> Stack:
        return Stack(self.environment())

    def configure(self, text: str) -> Path:
        file = self.path / ".config/cachectl/config.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def run(self, *command: str, check: bool = True, **changes: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            env={**self.variables, **changes},
            cwd=self.path,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        return _checked(done, check=check)

    def python(self, program: str, *arguments: str, **changes: str) -> Any:  # noqa: ANN401 - whatever JSON it prints
        """Run a program of tests/programs, and more words, and read the JSON it prints last."""
        program, *words = program.split()
        done = self.run(sys.executable, str(PROGRAMS / program), *words, *arguments, check=True, **changes)
        return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}

    def cachectl(
        self, line: str = "", *words: str, check: bool = True, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command: inside this process, unless what differs is read when a process starts.

        The command begins with the words of a line, without quotes; more may follow, as they are. Two users of a lock
        in one process do not exclude each other.
        """
        arguments, variables = (*line.split(), *words), {**self.variables, **changes}
        if _needs_process(arguments, variables):
            return self.run(*CACHECTL, *arguments, check=check, **changes)
        with self._processes() as processes:
            done = run_command(arguments, variables, self.path, processes)
        return _checked(_as_text(done), check=check)

    def terminal(
        self, *command: str, columns: int = 80, errors: int | None = None, check: bool = True, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a terminal of some columns; ``stdout`` is what the screen was sent.

        Its standard error goes to ``errors``, and its input is empty then; else both are the terminal too.
        """
        # A variable would count more than the terminal's own size.
        variables = {name: value for name, value in self.variables.items() if name != "COLUMNS"}
        variables |= {"TERM": "xterm", **changes}
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        stdin, stderr = (theirs, theirs) if errors is None else (subprocess.DEVNULL, errors)
        with subprocess.Popen(
            command, env=variables, cwd=self.path, stdin=stdin, stdout=theirs, stderr=stderr
        ) as child:
            os.close(theirs)
            screen = b""
            # Linux reports the end of a terminal as an error.
            with suppress(OSError):
                while piece := os.read(ours, 65536):
                    screen += piece
            os.close(ours)
        shown = screen.decode(errors="replace").replace("\r\n", "\n")
        return _checked(subprocess.CompletedProcess(command, child.returncode, shown, ""), check=check)

    @contextmanager
    def _processes(self) -> Iterator[Path | None]:
        """Yield a folder like ``/proc`` without the programs of other tests and of the tester."""
        real = Path("/proc")
        if not (real / "self/maps").exists():
            yield None
            return
        folder = Path(tempfile.mkdtemp(prefix="proc-", dir=self.path.parent))
        mark = os.fsencode(self.path.parent) + b"/"
        try:
            for name in os.listdir(real):
                if not name.isdigit() or (name != str(os.getpid()) and _belongs(real / name, mark)):
                    (folder / name).symlink_to(real / name)
            # The process of the tests is there, but the libraries it has loaded are not the command's.
            me = folder / str(os.getpid())
            me.mkdir()
            (me / "stat").symlink_to("/proc/self/stat")
            yield folder
        finally:
            shutil.rmtree(folder)

    def refused(self, line: str, *words: str, says: str, status: int = 1, **changes: str) -> str:
        """Run a command that is to fail with a status, and to say something; return all that it said."""
        done = self.cachectl(line, *words, check=False, **changes)
        assert (done.returncode, says in done.stderr) == (status, True), (line, done.stderr)
        return done.stderr

    def json(self, *arguments: str, check: bool = True, **changes: str) -> Any:  # noqa: ANN401 - JSON
        return json.loads(self.cachectl(*arguments, "--json", check=check, **changes).stdout)


def _checked(done: subprocess.CompletedProcess[str], *, check: bool) -> subprocess.CompletedProcess[str]:
    if check and done.returncode:
        pytest.fail(f"{done.args} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    # On a terminal this is one line like others, and the command goes on: a test must see it.
    assert FAULT not in done.stderr, done.stderr
    validate_output(done.stdout)
    return done


def _needs_process(arguments: tuple[str, ...], variables: Mapping[str, str]) -> bool:
    """Return whether a command must run as a process: for what is read at start, for threads, and for connections."""
    names = (name for name in {*variables, *os.environ} if name.startswith(_READ_AT_START))
    return (
        any(variables.get(name) != os.environ.get(name) for name in names)
        or arguments[:1] == ("stage",)
        or any("://" in word for word in arguments)
        or threading.current_thread() is not threading.main_thread()
    )


def _belongs(process: Path, mark: bytes) -> bool:
    """Return whether a process is a child of this one, or was started with a folder of the test in its environment."""
    try:
        # Field 4 of proc(5)'s stat is the parent; the name before it may hold spaces.
        parent = int((process / "stat").read_bytes().rpartition(b") ")[2].split()[1])
        return parent == os.getpid() or mark in (process / "environ").read_bytes()
    except (OSError, IndexError):
        # It has ended meanwhile, or is another user's.
        return False


def make_home(path: Path) -> Home:
    path.mkdir(parents=True, exist_ok=True)
    tester = {name: value for name, value in os.environ.items() if not name.startswith("CACHECTL_")}
    kept = {name: value for name, value in tester.items() if not name.startswith(SWITCHES)}
    temporary = path.with_name(f"{path.name}-tmp")
    temporary.mkdir(mode=0o700, exist_ok=True)
    return Home(path, {**pocl_driver(), **kept, **at_home(path), "TMPDIR": str(temporary)})


def beside(home: Home, *folders: Path) -> Home:
    """Have the programs of a home find what lies in some folders."""
    path = os.pathsep.join(filter(None, (*map(str, folders), home.variables.get("PYTHONPATH"))))
    return Home(home.path, {**home.variables, "PYTHONPATH": path})


def made_once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]) -> Path:
    """Return a home that the first worker of pytest-xdist fills, while the others wait, and that no test changes."""
    folder = factory.getbasetemp()
    # Workers share one, next to their own folders.
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            fill(folder / "home")
            # Beside other PoCL programs of the tester, purge leaves alone what may be in use.
            age(folder / "home/.cache/pocl")
            (folder / "done").touch()
    return folder / "home"


def age(folder: Path) -> None:
    """Make everything in a folder two hours old."""
    then = time.time() - 7200
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then), follow_symlinks=False)


def unpack_compute_cache(folder: Path) -> None:
    """Unpack the ComputeCache that a real driver wrote on an H200."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(PROGRAMS.with_name("data") / "computecache-h200-opencl.tar.gz") as tar:
        for member in tar:
            tar.extract(member, folder, set_attrs=False)


def wheel() -> Path:
    """Return the folder of PyOpenCL from its wheel; it need not exist."""
    spec = importlib.util.find_spec("pyopencl")
    return Path(str(spec.origin if spec else "/none")).parent


def working_pocl() -> str | None:
    """Return the ICD file of a PoCL that compiles for this processor: the wheel's, or else the system's.

    PoCL 3.0 of the wheel refuses processors that are newer than its LLVM 14. The workers of pytest-xdist take what
    was found from the variable ``CACHECTL_TEST_ICD``.
    """
    build = "import pyopencl as cl; cl.Program(cl.create_some_context(False), 'kernel void f() {}').build()"
    for file in () if "CACHECTL_TEST_ICD" in os.environ else ICD_FILES:
        with tempfile.TemporaryDirectory() as folder:
            variables = {**os.environ, "OCL_ICD_VENDORS": str(file), "HOME": folder, "XDG_CACHE_HOME": folder}
            command = (sys.executable, "-c", build)
            if file.exists() and not subprocess.run(command, env=variables, stderr=-3, check=False).returncode:
                os.environ["CACHECTL_TEST_ICD"] = str(file)
                break
    return os.environ.setdefault("CACHECTL_TEST_ICD", "") or None


def pocl_driver() -> dict[str, str]:
    """Return the variable that makes PyOpenCL load one PoCL alone, whatever else the system registers."""
    return {"OCL_ICD_VENDORS": working_pocl() or str(ICD_FILES[0])} if any(map(Path.exists, ICD_FILES)) else {}


#: The files that register the PoCL of the wheel, and that of the system.
ICD_FILES = (wheel() / ".libs/pocl.icd", Path("/etc/OpenCL/vendors/pocl.icd"))
