"""Proofs over real programs and over programs that cheat."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from homes import PROGRAMS, Home
from support.proof import FILES, READ, one_file, program, prove, said_of
from tiers import amount

from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Artifact
from cachectl.layers.miopen.databases import SEPARATOR
from cachectl.stack import Stack

UPSTREAM = {
    "LOOPY_NO_CACHE": "1",
    "CG_NO_CACHE": "1",
    "PYOPENCL_NO_CACHE": "1",
    "POCL_KERNEL_CACHE": "0",
    "CUDA_CACHE_DISABLE": "1",
}
LIST = "import os; [os.lstat(os.path.join(f, n)) for f, _, names in os.walk({folder!r}) for n in names]"
WRITE = "f = open({file!r}, 'ab'); f.write(b'!'); f.close()"
HIDDEN_WRITE = (
    "import os; s = os.stat({file!r}); f = os.open({file!r}, os.O_WRONLY); os.pwrite(f, b'!', 0); os.close(f);"
    "os.utime({file!r}, ns=(s.st_atime_ns, s.st_mtime_ns))"
)
COME_AND_GO = "import os; open({file!r} + '-journal', 'w').close(); os.unlink({file!r} + '-journal')"


@pytest.fixture
def rich(warm: Home, compute_cache: Callable[[Path], None], fill_sumpy: Callable[[Environment], None]) -> Home:
    fill_sumpy(warm.environment())
    compute_cache(warm.path / ".nv" / "ComputeCache")
    key = SEPARATOR.join(("3.3.0.a85ca8a54/gfx90a6e.ukdb", "MIOpenConvUni.cl.o", " -mcpu=gfx90a"))
    kernel = Artifact("miopen", key, "miopen-kernel/1", b"\x7fELF" + bytes(range(256)) * 9)
    Stack(warm.environment())["miopen"].put(key, kernel)
    record = warm.path / ".config" / "miopen" / "gfx90a68.HIP.3_3_0_a85ca8a54.ufdb.txt"
    record.parent.mkdir(parents=True)
    record.write_text("1-2-3=miopenConvolutionFwdAlgoGEMM:0.1,0,0,miopenConvolutionFwdAlgoGEMM,x\n")
    return warm


# ---------------------------------------------------------------------- the real thing


@pytest.mark.real
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
        assert lines[-1] == "cachectl: proof holds"
        for layer in FILES:
            assert "not written (" in said_of(layer, lines)
            assert "not read (file events on " in said_of(layer, lines)
        assert snapshot(rich.path, times=True) == before
        assert [path.name for path in temporary.rglob("*")] == [f"cachectl-{os.getuid()}"]


@pytest.mark.thorough
@pytest.mark.real
def test_the_upstream_switches_alone_leave_no_proof(warm: Home) -> None:
    warm.run(*program(2, 1))
    done = warm.cachectl("run", "--prove", "--", *program(2, 1), check=False, **UPSTREAM, POCL_DEBUG="general,llvm")
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    # Everything is compiled, as it should be; but loopy opens its dictionaries, and PoCL makes a folder.
    assert done.stderr.count("Writing program.bc") == 3
    assert lines[-1] == "cachectl: proof fails for loopy, pocl"
    assert "pdict-v5-loopy-" in said_of("loopy", lines)
    assert ".sqlite was read" in said_of("loopy", lines)
    assert ".cache/pocl/uncached appeared" in said_of("pocl", lines)
    assert "not read" in said_of("pyopencl-invoker", lines)


@pytest.mark.thorough
@pytest.mark.real
def test_an_isolated_run_is_proved_too(warm: Home) -> None:
    before = snapshot(warm.path, times=True)
    done = warm.cachectl("run", "--isolated=../kept", "--prove", "--", *program(2, 1))
    assert done.stderr.splitlines()[-1] == "cachectl: proof holds"
    assert snapshot(warm.path, times=True) == before
    assert any((warm.path.parent / "kept" / "pocl").iterdir())


@pytest.mark.thorough
@pytest.mark.real
def test_libraries_that_fail_without_a_cache_folder_run(home: Home) -> None:
    assert home.run(*program(1, 1), check=False, HOME="/dev/null").returncode != 0
    done = home.cachectl("run", "--no-cache", "--prove", "--", *program(1, 1), HOME="/dev/null")
    assert done.stderr.splitlines()[-1] == "cachectl: proof holds"


@pytest.mark.real
def test_the_proof_holds_for_nvidias_opencl(home: Home) -> None:
    nvidia = [sys.executable, str(PROGRAMS / "nvidia.py"), "4"]
    if home.python("nvidia.py", "4")["seconds"] is None:
        pytest.skip("PyOpenCL sees no NVIDIA platform here")
    before = snapshot(home.path, times=True)
    done = home.cachectl("run", "--no-cache", "--prove", "--", *nvidia)
    assert "not read (file events on " in said_of("cuda", done.stderr.splitlines())
    assert done.stderr.splitlines()[-1] == "cachectl: proof holds"
    assert snapshot(home.path, times=True) == before
    done = home.cachectl("run", "--prove", "--", *nvidia, check=False)
    assert "ComputeCache" in said_of("cuda", done.stderr.splitlines())
    assert done.returncode == 1


# ---------------------------------------------------------------------- cheats


@pytest.mark.real
@pytest.mark.parametrize("layer", FILES)
def test_every_read_and_write_is_found(rich: Home, layer: str) -> None:
    file = one_file(rich, layer)
    cheats = {
        READ: f"{file} was read",
        WRITE: f"{file} was written",
        HIDDEN_WRITE: f"{file} was written",
        COME_AND_GO: f"{file}-journal appeared, vanished",
    }
    for code, happened in cheats.items():
        # Listing every folder is no reading.
        status, lines = prove(rich, ["--no-cache"], f"{LIST}; {code}".format(file=str(file), folder=str(rich.path)))
        assert status == 1
        assert happened in said_of(layer, lines)
        assert lines[-1] == f"cachectl: proof fails for {layer}"


@pytest.mark.real
def test_changes_of_other_layers_are_not_ascribed_to_a_named_one(rich: Home) -> None:
    code = READ.format(file=str(one_file(rich, "loopy")))
    status, lines = prove(rich, ["--no-cache", "--layer", "pocl", "--layer", "pyopencl-invoker"], code)
    assert (status, lines[-1]) == (0, "cachectl: proof holds")
    assert len(lines) == 3


@pytest.mark.real
def test_a_few_paths_are_named_and_the_rest_counted(rich: Home) -> None:
    folder = str(rich.path / ".cache" / "pocl" / "kcache")
    code = f"import pathlib; [p.read_bytes() for p in pathlib.Path({folder!r}).rglob('program.bc')]"
    _, lines = prove(rich, ["--isolated"], code)
    assert said_of("pocl", lines).count(" was read") == 3
    assert said_of("pocl", lines).endswith(" more")


#: What a program does in an empty home, the layer, and the end of what is said of it.
COMING = {
    "comes": ("os.makedirs('.cache/pocl/kcache/AB')", "pocl", ".cache/pocl/kcache appeared"),
    "comes and goes": (
        "os.mkdir('.nv/ComputeCache'); os.rmdir('.nv/ComputeCache')",
        "cuda",
        ".nv/ComputeCache appeared, vanished",
    ),
    "comes and goes with a neighbour": (
        "os.mkdir('.cache/pytools'); os.mkdir('.cache/pyopencl'); os.rmdir('.cache/pyopencl')",
        "pyopencl",
        ".cache/pyopencl appeared, vanished",
    ),
}


@pytest.mark.parametrize("how", COMING)
def test_a_root_that_was_not_there_is_awaited(home: Home, how: str) -> None:
    code, layer, said = COMING[how]
    for name in (".nv", ".cache"):
        (home.path / name).mkdir()
    status, lines = prove(home, ["--no-cache"], f"import os; {code}")
    assert status == 1
    assert f"{home.path / said}" in said_of(layer, lines)
    assert lines[-2].startswith("cachectl: proof: other programs that use these caches count too; ")


def test_a_root_that_is_a_link_is_followed_and_held_to_it(home: Home) -> None:
    real, other, root = home.path / "real", home.path / "other", home.path / ".nv"
    (real / "ComputeCache").mkdir(parents=True)
    (other / "ComputeCache").mkdir(parents=True)
    (real / "ComputeCache" / "index").write_text("")
    root.symlink_to(real)
    index = root / "ComputeCache" / "index"
    _, lines = prove(home, ["--no-cache"], f"open({str(real / 'ComputeCache' / 'index')!r}, 'w').close()")
    assert str(index) in said_of("cuda", lines)
    code = f"import os; os.unlink({str(root)!r}); os.symlink({str(other)!r}, {str(root)!r})"
    _, lines = prove(home, ["--no-cache"], code)
    assert said_of("cuda", lines).endswith("ComputeCache was moved")


def test_other_names_of_an_entry_do_not_hide_its_reader(home: Home) -> None:
    folder = home.path / ".nv" / "ComputeCache"
    folder.mkdir(parents=True)
    for link in (os.link, os.symlink):
        outside = home.path / link.__name__
        outside.write_text("an entry")
        link(outside, folder / link.__name__)
        _, lines = prove(home, ["--no-cache"], READ.format(file=str(outside)))
        assert said_of("cuda", lines).endswith(f"{folder / link.__name__} was read")


def test_a_link_to_a_folder_elsewhere_leaves_the_proof_open(home: Home) -> None:
    (home.path / "elsewhere").mkdir()
    link = home.path / ".nv" / "ComputeCache" / "a"
    link.parent.mkdir(parents=True)
    link.symlink_to(home.path / "elsewhere")
    status, lines = prove(home, ["--no-cache"], "")
    assert status == 1
    assert f"reads are unknown: {link} is a link to a folder" in said_of("cuda", lines)
    assert lines[-1] == "cachectl: proof cannot be given for cuda"


# ---------------------------------------------------------------------- roots that are not a layer's alone


def test_only_recognised_files_of_a_home_count(home: Home) -> None:
    mine = {"MIOPEN_CUSTOM_CACHE_DIR": str(home.path), "CUDA_CACHE_PATH": str(home.path)}
    (home.path / "letters").mkdir()
    letter = home.path / "letters" / "one"
    letter.write_text("dear")
    (home.path / "notes").write_text("mine")
    code = ";".join(
        (WRITE.format(file=str(letter)), READ.format(file=str(home.path / "notes")), "open('new', 'w').close()")
    )
    status, lines = prove(home, ["--no-cache"], code, **mine)
    assert (status, lines[-1]) == (0, "cachectl: proof holds")
    for name, layer in (("gfx90a6e.ukdb", "miopen"), ("index", "cuda")):
        _, lines = prove(home, ["--no-cache"], f"open({name!r}, 'w').close()", **mine)
        assert f"{home.path / name} appeared" in said_of(layer, lines)
        _, lines = prove(home, ["--no-cache"], READ.format(file=name), **mine)
        assert lines[-1] == f"cachectl: proof fails for {layer}"


@pytest.mark.real
def test_layers_claim_what_they_list(rich: Home) -> None:
    for layer in Stack(rich.environment()):
        for root in layer.roots()[:1]:
            for file in filter(Path.is_file, root.path.rglob("*")):
                parts = file.relative_to(root.path).parts
                shared = root.path.name == "pytools"
                assert shared or layer.store.owns(root, parts), (layer.name, parts)
            assert layer.store.owns(root, ("letters", "to", "aunt")) in (None, layer.name == "pytools")


# ---------------------------------------------------------------------- the status


def test_the_childs_status_stands_where_the_proof_holds(home: Home) -> None:
    assert prove(home, ["--no-cache"], "raise SystemExit(7)")[0] == 7
    code = f"import os; os.makedirs({str(home.path / '.nv' / 'ComputeCache')!r}); os._exit(7)"
    assert prove(home, ["--no-cache"], code)[0] == 1


def test_a_command_that_cannot_start_is_no_proof(home: Home) -> None:
    done = home.cachectl("run", "--prove", "--", "no-such-command", check=False)
    assert done.returncode == 127
    assert "proof" not in done.stderr


def test_a_layer_that_is_not_moved_is_not_proved(home: Home) -> None:
    _, lines = prove(home, ["--isolated"], "")
    assert said_of("miopen-system", lines).endswith("stays in use, so nothing is proved of it")
    assert lines[-1] == "cachectl: proof holds"
