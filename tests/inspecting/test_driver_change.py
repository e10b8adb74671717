"""After a driver that was seen here has gone, its entries are stale, and ``report`` says so first."""

import os
import sys
from pathlib import Path

import pytest
from homes import Driver, Home, unpack_compute_cache
from support.doctor import examine, on_file_system, only
from support.layers import write
from tiers import real

from cachectl import Limits, Stack
from cachectl.layers.base.environment import Environment
from cachectl.layers.core.finding import Severity
from cachectl.layers.host.record import record_of
from cachectl.verbs.report import lines

#: So much of a library that the linker of this Python takes it for one.
LIBRARY = Path(sys.executable).read_bytes()[:64]
POCL = b"\0OpenCL 3.0 PoCL %s  Linux, Release, RELOC, LLVM %s, SLEEF\0"


def stack_of(home: Path, library: Path) -> Stack:
    """Return the layers of a home in which this is the only driver, and no Python is known."""
    write(home / "vendors/one.icd", f"{library}\n")
    environment = Environment({"HOME": str(home), "OCL_ICD_VENDORS": str(home / "vendors")}, home=home)
    there = environment._replace(executable=home / "bin/python", processes=home / "proc", searches_pythons=True)
    return Stack(there)


def said(stack: Stack, *layers: str) -> list[str]:
    return [line for line in lines(stack.report(layers), "/") if isinstance(line, str) and " are stale: " in line]


def stale_in(stack: Stack, layer: str) -> int | None:
    count: int | None = stack.report([layer]).total.stale_entries
    return count


@real
def test_programs_of_a_pocl_that_was_seen_here_and_has_gone_are_stale(warm: Home) -> None:
    """PoCL's own entries. Another PoCL alone, however new, proves nothing: programs may find theirs by its path."""
    newer = write(warm.path / "new/libpocl.so", LIBRARY + POCL % (b"99.1+x", b"99.0.1"))
    stack = stack_of(warm.path, newer)
    assert stale_in(stack, "pocl") is None
    messages: list[str] = []
    removal = stack.prune(Limits(stale=True), layers=["pocl"], notice=messages.append)
    assert (removal.total.removed, removal.failed) == (0, False)
    (message,) = messages
    assert message.startswith("no entry is known to be stale; for ")
    assert message.endswith("it is unknown; to free space, use --older-than 30d or --max-size 1G")

    own = write(warm.path / "own/libpocl.so", LIBRARY + POCL % (b"3.0", b"14.0.6"))
    assert stale_in(stack_of(warm.path, own), "pocl") is None
    own.unlink()
    stack = stack_of(warm.path, newer)
    total = stack.report(["pocl"]).total
    assert total.entries is not None
    assert total.stale_entries == total.entries > 5
    (line,) = said(stack, "pocl")
    assert line.startswith(f"pocl: {total.entries} of {total.entries} entries (")
    assert f"compiled by LLVM 14.0.6; {own} had PoCL 3.0 with LLVM 14.0.6 until 20" in line
    assert line.endswith("; cachectl prune --stale pocl removes them")
    first = next(warm.path.rglob("program.bc"))
    os.utime(first)
    assert stale_in(stack, "pocl") == total.entries - 1, "somebody builds with LLVM 14 still"
    away = write(warm.path / "vendors/two.icd", "/not/mounted/libpocl.so\n")
    assert stale_in(stack_of(warm.path, newer), "pocl") is None
    away.unlink()
    write(own, LIBRARY + POCL % (b"3.1", b"14.0.6"))
    write(warm.path / "vendors/two.icd", f"{own}\n")
    assert stale_in(stack_of(warm.path, newer), "pocl") is None, "another release with the same LLVM"
    own.unlink()
    (warm.path / "vendors/two.icd").unlink()
    assert stack_of(warm.path, newer).prune(Limits(stale=True), layers=["pocl"]).total.removed == total.entries - 1
    assert [*warm.path.rglob("program.bc")] == [first]


@real
@pytest.mark.environment
@pytest.mark.parametrize("driver", ["debian_pocl", "built_pocl"])
def test_real_drivers_say_which_llvm_they_have(warm: Home, driver: str, request: pytest.FixtureRequest) -> None:
    found: Driver = request.getfixturevalue(driver)
    library = Path(found["OCL_ICD_VENDORS"]).read_text().strip()
    for path in (warm.path / ".cache/pocl").rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert stale_in(stack_of(warm.path, Path(library)), "pocl") is None
    assert [sighting.path for sighting in record_of(stack_of(warm.path, Path(library)).environment).here("PoCL")] == [
        library
    ]


def test_entries_of_an_earlier_driver_of_nvidia_are_stale(tmp_path: Path) -> None:
    """Those of the front end name the driver in their keys, those of the back end do not."""
    unpack_compute_cache(tmp_path / ".nv/ComputeCache")
    library = write(tmp_path / "libnvidia-opencl.so.1", LIBRARY)
    version = tmp_path / "proc/driver/nvidia/version"
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\n"
    write(version, text.format("590.48.01"))
    assert stale_in(stack_of(tmp_path, library), "cuda") is None, "a newer driver alone proves nothing"
    for number, stale in (("580.159.04", None), ("590.48.01", 20), ("580.159.04", None)):
        write(version, text.format(number))
        assert stale_in(stack_of(tmp_path, library), "cuda") == stale
    write(version, text.format("590.48.01"))
    (line,) = said(stack_of(tmp_path, library), "cuda")
    assert line.startswith("cuda: 20 of 40 entries (")
    assert f"compiled by driver 580.159.04; {version} had NVIDIA 580.159.04 until 20" in line
    stack = stack_of(tmp_path, library)
    found = only(examine(stack.environment, "cuda"), "stale")
    assert (found.severity, found.fix) == (Severity.WASTES, "cachectl prune --stale cuda")
    assert found.message.startswith("20 stale entries of ")
    # A machine that has this home, and that nobody looked at, may have the driver.
    shared = on_file_system(stack.environment, "nfs", tmp_path)
    assert Stack(shared).report(["cuda"]).total.stale_entries is None
    assert stack.prune(Limits(stale=True), layers=["cuda"]).total.removed == 20
    assert examine(stack_of(tmp_path, library).environment, "cuda") == []
