"""Proofs over real programs, over programs that cheat, and on systems that run out of events."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from homes import CACHECTL, PROGRAMS, Home, unpack_compute_cache
from support.miopen_kernels import add_kernels
from support.products import fill_tuning
from support.tracing import no_file_events
from tiers import amount, real, thorough, thorough_only

from cachectl.layers.base.environment import Environment
from cachectl.layers.core.conformance import snapshot
from cachectl.watching import events
from cachectl.watching.proof import FAILS, UNKNOWN, Proof

#: The layers that a user's programs fill, and a file of each in the home that ``rich`` makes.
FILES = {
    "loopy": ".cache/pytools/pdict-v5-loopy-*.sqlite",
    "cuda": ".nv/ComputeCache/?/?/*",
    "pyopencl-invoker": ".cache/pytools/pdict-v5-pyopencl-invoker-*.sqlite",
    "pytools": ".cache/pytools/pdict-v5-sumpy-*.sqlite",
    "pyopencl": ".cache/pyopencl/*/*/binary",
    "pocl": ".cache/pocl/kcache/*/*/program.bc",
    "miopen": ".cache/miopen/*/*.ukdb",
    "miopen-tuning": ".config/miopen/*.ufdb.txt",
}
READ = "open({file!r}, 'rb').read(1)"
LIST = "import os; [os.lstat(os.path.join(f, n)) for f, _, names in os.walk({folder!r}) for n in names]"
WRITE = "f = open({file!r}, 'ab'); f.write(b'!'); f.close()"
HIDDEN_WRITE = (
    "import os; s = os.stat({file!r}); f = os.open({file!r}, os.O_WRONLY); os.pwrite(f, b'!', 0); os.close(f);"
    "os.utime({file!r}, ns=(s.st_atime_ns, s.st_mtime_ns))"
)
COME_AND_GO = "import os; open({file!r} + '-journal', 'w').close(); os.unlink({file!r} + '-journal')"
HOLDS = "cachectl: proof holds"


def program(count: int, plain: int) -> list[str]:
    return [sys.executable, f"{PROGRAMS}/thirteen.py", str(count), str(plain)]


def prove(home: Home, code: str, *how: str, **changes: str) -> tuple[int, list[str]]:
    """Run a line of Python under ``run --no-cache --prove``; return the status, and what was said."""
    command = ["run", *(how or ("--no-cache",)), "--prove", "--", sys.executable, "-c", code]
    done = home.cachectl(*command, check=False, **changes)
    return done.returncode, done.stderr.splitlines()


def said_of(layer: str, lines: list[str]) -> str:
    return next(line for line in lines if line.startswith(f"cachectl: proof: {layer}: "))


@pytest.fixture
def rich(warm: Home, fill_sumpy: Callable[[Environment], None]) -> Home:
    fill_sumpy(warm.environment())
    unpack_compute_cache(warm.path / ".nv/ComputeCache")
    add_kernels(warm, [1])
    fill_tuning(warm.path)
    return warm


# ---------------------------------------------------------------------- the real thing


@real
def test_a_cold_run_compiles_everything_leaves_everything_and_is_proved(rich: Home, tmp_path: Path) -> None:
    kernels, plain = amount(1, 3), amount(1, 2)
    rich.run(*program(kernels, plain))
    before = snapshot(rich.path, times=True)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = ("run", "--no-cache", "--prove", "--", *program(kernels, plain))
    for _ in range(amount(1, 2)):
        done = rich.cachectl(*command, POCL_DEBUG="general,llvm", TMPDIR=str(temporary))
        assert done.stderr.count("Writing program.bc") == kernels + plain
        lines = done.stderr.splitlines()
        assert lines[-1] == HOLDS
        # On a busy machine the processes are not looked at often enough to know that.
        unused = next((line for line in lines if "proof: not used: " in line), "")
        for layer in FILES:
            said = unused if f" {layer}," in unused or f" {layer} (" in unused else said_of(layer, lines)
            assert said == unused or ("not written (" in said, "not read (file events on " in said) == (True, True)
        assert {layer for layer in ("pocl", "loopy", "pyopencl") if f" {layer}," in unused} == set()
        assert snapshot(rich.path, times=True) == before
        assert [path.name for path in temporary.rglob("*")] == [f"cachectl-{os.getuid()}"]


@thorough_only
@real
def test_runs_that_are_isolated_or_have_no_home_are_proved_too(warm: Home) -> None:
    before = snapshot(warm.path, times=True)
    done = warm.cachectl("run --isolated=../kept --prove --", *program(2, 1))
    assert done.stderr.splitlines()[-1] == HOLDS
    # A layer that is not moved is not proved.
    stays = "stays in use, so nothing is proved about it"
    assert said_of("miopen-system", done.stderr.splitlines()).endswith(stays)
    assert any((warm.path.parent / "kept/pocl").iterdir())
    # Libraries fail without a cache folder.
    assert warm.run(*program(1, 1), check=False, HOME="/dev/null").returncode != 0
    done = warm.cachectl("run --no-cache --prove --", *program(1, 1), HOME="/dev/null")
    assert done.stderr.splitlines()[-1] == HOLDS
    assert snapshot(warm.path, times=True) == before


@real
def test_the_proof_holds_for_nvidias_opencl(home: Home) -> None:
    nvidia = [sys.executable, f"{PROGRAMS}/nvidia.py", "4"]
    if home.python("nvidia.py 4")["seconds"] is None:
        pytest.skip("PyOpenCL sees no NVIDIA platform here")
    before = snapshot(home.path, times=True)
    done = home.cachectl("run --no-cache --prove --", *nvidia)
    assert "not read (file events on " in said_of("cuda", done.stderr.splitlines())
    assert done.stderr.splitlines()[-1] == HOLDS
    assert snapshot(home.path, times=True) == before
    done = home.cachectl("run --prove --", *nvidia, check=False)
    assert "ComputeCache" in said_of("cuda", done.stderr.splitlines())
    assert done.returncode == 1


# ---------------------------------------------------------------------- cheats


@real
@pytest.mark.parametrize("layer", ["loopy", *thorough(*[*FILES][1:])])
def test_every_read_and_write_is_found(rich: Home, layer: str) -> None:
    file = min(rich.path.glob(FILES[layer]))
    cheats = {
        READ: f"{file} was opened",
        WRITE: f"{file} was changed",
        HIDDEN_WRITE: f"{file} was changed",
        COME_AND_GO: f"{file}-journal appeared, vanished",
    }
    for code, happened in cheats.items():
        # Listing every folder is no reading.
        status, lines = prove(rich, f"{LIST}; {code}".format(file=str(file), folder=str(rich.path)))
        assert happened in said_of(layer, lines)
        assert (status, lines[-1]) == (1, f"cachectl: proof fails for {layer}")
    # Changes of other layers are not ascribed to a named one.
    status, lines = prove(rich, READ.format(file=str(file)), "--no-cache", "--layer", "comgr")
    assert (status, lines[-1]) == (0, HOLDS)


#: A folder that is there, what a program does, its status, the layer, and the end of what is said of it.
COMING: list[tuple[str, str, tuple[int, str, str]]] = [
    (".cache", "os.makedirs('.cache/pocl/kcache/AB')", (1, "pocl", ".cache/pocl/kcache appeared")),
    (
        ".cache",
        "os.mkdir('.cache/pytools'); os.mkdir('.cache/pyopencl'); os.rmdir('.cache/pyopencl')",
        (1, "pyopencl", ".cache/pyopencl appeared, vanished"),
    ),
    # Another folder in the place of the one above a root: whether the root in it is seen depends on who is faster.
    (
        ".nv",
        "os.rename('.nv', 'x'); os.makedirs('.nv/ComputeCache'); shutil.rmtree('.nv'); os.rename('x', '.nv')",
        (1, "cuda", ""),
    ),
    # All that is above a root comes and goes: whether the root itself was seen depends on who is faster.
    (
        "",
        "os.makedirs('.cache/pocl/kcache/AB'); shutil.rmtree('.cache')",
        (1, "pyopencl", ".cache vanished; its content meanwhile is unknown"),
    ),
    # Files of others above a root do not affect the proof, and the status is the child's.
    (
        "",
        "os.makedirs('.cache/fonts'); open('.cache/fonts/x', 'w').close(); os.mkdir('.config'); os._exit(7)",
        (7, "", ""),
    ),
]


@pytest.mark.parametrize(("folder", "code", "expected"), COMING)
def test_a_root_that_was_not_there_is_awaited(
    home: Home, folder: str, code: str, expected: tuple[int, str, str]
) -> None:
    (home.path / folder).mkdir(exist_ok=True)
    status, layer, said = expected
    ended, lines = prove(home, f"import os, shutil; {code}")
    assert (ended, lines[-1] == HOLDS) == (status, not layer)
    assert not layer or said in said_of(layer, lines)


def test_links_and_other_names_hide_nothing(home: Home) -> None:
    real, root = home.path / "real/ComputeCache", home.path / ".nv"
    for folder in (real, home.path / "other/ComputeCache", home.path / "elsewhere"):
        folder.mkdir(parents=True)
    (real / "index").write_text("")
    for make in (os.link, os.symlink):
        (home.path / make.__name__).write_text("an entry")
        make(home.path / make.__name__, real / make.__name__)
    root.symlink_to("real")
    seen = root / "ComputeCache"
    for code, said in (
        (f"open({str(real / 'index')!r}, 'w').close()", f"{seen / 'index'} was changed"),
        (READ.format(file="link"), f"{seen / 'link'} was opened"),
        (READ.format(file="symlink"), f"{seen / 'symlink'} was opened"),
        ("import os; os.unlink('.nv'); os.symlink('other', '.nv')", "ComputeCache was moved"),
    ):
        assert said in said_of("cuda", prove(home, code)[1])
    (seen / "a").symlink_to(home.path / "elsewhere")
    status, lines = prove(home, "")
    assert f"reads are unknown: {seen / 'a'} is a link to a folder" in said_of("cuda", lines)
    assert (status, lines[-1]) == (1, "cachectl: proof cannot be given for cuda")


def test_only_recognised_files_of_a_home_count(home: Home) -> None:
    mine = {"MIOPEN_CUSTOM_CACHE_DIR": str(home.path), "CUDA_CACHE_PATH": str(home.path)}
    (home.path / "letters").mkdir()
    for name in ("letters/one", "notes"):
        (home.path / name).write_text("mine")
    code = f"{WRITE.format(file='letters/one')};{READ.format(file='notes')}; open('new', 'w').close()"
    assert prove(home, code, **mine)[1][-1] == HOLDS
    for name, layer in (("gfx90a6e.ukdb", "miopen"), ("index", "cuda")):
        _, lines = prove(home, f"open({name!r}, 'w').close()", **mine)
        assert f"{home.path / name} appeared" in said_of(layer, lines)
        _, lines = prove(home, READ.format(file=name), **mine)
        assert lines[-1] == f"cachectl: proof fails for {layer}"


# ---------------------------------------------------------------------- where events cannot be had


def watched(home: Home, act: Callable[[], object]) -> Proof:
    stack = home.stack
    proof = Proof(stack, [stack["cuda"]], stack.environment)
    act()
    return proof.end()


def test_without_events_no_reading_is_excluded(cuda: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = min(cuda.path.glob(FILES["cuda"]))
    monkeypatch.setattr(events, "open_queue", no_file_events)
    proof = watched(cuda, entry.read_bytes)
    assert (proof.of(UNKNOWN), proof.holds) == (("cuda",), False)
    assert proof.attestations[0].unknown == ("no file events (not here)",)
    assert watched(cuda, entry.unlink).of(FAILS) == ("cuda",)


def test_a_system_without_a_thread_for_us_has_no_file_events(cuda: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    proof = watched(cuda, lambda: None)
    reasons = [reason.partition(" (")[0] for reason in proof.attestations[0].unknown]
    assert reasons == ["no file events", "the processes of the command were not looked at"]


@thorough_only
def test_lost_events_are_admitted(cuda: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is too slow: the kernel drops what it cannot hold."""
    monkeypatch.setattr(events.FileEvents, "_drain", lambda *_: None)
    neighbour = min(cuda.path.glob(FILES["cuda"])).with_name("neighbour")

    def storm() -> None:
        for _ in range(8_000):
            neighbour.touch()
            neighbour.unlink()

    proof = watched(cuda, storm)
    assert "file events came faster" in proof.attestations[0].unknown[0]
    assert not proof.holds


@pytest.mark.parametrize("limit", ["watches", "instances"])
def test_the_systems_limits_are_met_and_named(cuda: Home, limit: str) -> None:
    # A user namespace may lower its own limits, and no program outside it is touched.
    program = f'echo 0 > /proc/sys/user/max_inotify_{limit} && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", program, "sh"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("user namespaces are closed here")
    ours = [*CACHECTL, "run", "--no-cache", "--layer", "cuda", "--prove", "--"]
    done = cuda.run(*inside, *ours, "true", check=False)
    assert (done.returncode, f"max_user_{limit}" in done.stderr) == (1, True)


@real
@thorough_only
def test_a_command_that_brings_its_own_variables_is_not_proved(home: Home, tmp_path: Path) -> None:
    """A wrapper switches PoCL's cache on again, in a place that nobody watches."""
    program = f"{sys.executable} {PROGRAMS}/kernels.py 1"
    wrapped = f"export POCL_KERNEL_CACHE=1 POCL_CACHE_DIR={tmp_path}; {program}; true"
    done = home.cachectl("run --no-cache --prove --layer pocl -- sh -c", wrapped, check=False)
    assert done.returncode == 1
    assert re.search(
        rf"reads are unknown: PID \d+ has POCL_CACHE_DIR={tmp_path}; PID \d+ has POCL_KERNEL_CACHE=1", done.stderr
    )
    assert done.stderr.endswith("proof cannot be given for pocl\n")
    assert home.cachectl("run --no-cache --prove --layer pocl --", *program.split()).stderr.endswith("proof holds\n")


@real
def test_a_program_that_sets_variables_itself_is_not_proved(home: Home, tmp_path: Path) -> None:
    code = (
        "import os, runpy, sys; os.environ.update(POCL_KERNEL_CACHE='1', POCL_CACHE_DIR=sys.argv[1]);"
        f"sys.path.insert(0, {str(PROGRAMS)!r}); sys.argv[1:] = ['1'];"
        f"runpy.run_path({str(PROGRAMS / 'kernels.py')!r}, run_name='__main__')"
    )
    command = (sys.executable, "-c", code, str(tmp_path))
    done = home.cachectl("run --no-cache --prove --layer pocl --", *command, check=False)
    assert (done.returncode, f"has POCL_CACHE_DIR={tmp_path}; PID" in done.stderr) == (1, True)
    assert done.stderr.endswith("proof cannot be given for pocl\n")


@real
def test_another_programs_use_of_what_the_command_did_not_load_is_told_from_its_own(home: Home) -> None:
    fifo = home.path / "fifo"
    os.mkfifo(fifo)
    held = [sys.executable, f"{PROGRAMS}/holding.py", "1", "2"]
    unused = "not used: no process of the command loaded /libpocl"
    command = ["sh", "-c", 'exec "$@" <> fifo', "sh", *held]
    # On a busy machine the processes are not always looked at often enough to know that.
    for _ in range(3):
        with subprocess.Popen(command, env=home.variables, cwd=home.path, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"built\n"
            waits = (
                f"echo > {fifo}; while kill -0 {other.pid} && ! grep -q Z /proc/{other.pid}/stat; do sleep 0.1; done"
            )
            done = home.cachectl("run --prove --layer pocl -- sh -c", waits, check=False)
            assert b"results" in other.stdout.read()
        if unused in done.stderr:
            break
    assert f"{unused}; PID {other.pid} (" in done.stderr, done.stderr
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, HOLDS)


def test_a_choice_of_layers_that_cannot_be_proved_is_refused_at_the_start(home: Home) -> None:
    done = home.cachectl("run --no-cache --prove --layer loopy --layer pocl -- echo ran", check=False)
    assert (done.returncode, "ran" in done.stdout) == (1, False)
    assert "loopy: cannot be proved: its files are opened while it is off" in done.stderr
    layers = done.stderr.partition("write --layer ")[2].partition(",")[0]
    assert layers == "loopy"
    assert done.stderr.endswith("or only --layer pocl\n")
