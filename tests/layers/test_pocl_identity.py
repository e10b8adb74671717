"""An entry of PoCL belongs to its key: code to its kernel and its machine, bitcode to the kernels."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from homes import PROGRAMS, Home
from support.layers import clear_damaged, environment_of, findings, got, root_of, verified
from support.products import BITCODE, POCL_KEY, place, unpack
from tiers import needing, real, thorough, thorough_only

from benchmarks.trees import native
from cachectl.layers.base.errors import Damaged
from cachectl.layers.core.finding import Severity
from cachectl.layers.pocl import PoclKernels
from cachectl.layers.stores import archive

RUN = (sys.executable, str(PROGRAMS / "named.py"))
#: Makes PoCL 7.2 and newer keep libraries, as all others do.
LIBRARIES = {"POCL_CPU_JIT": "0"}


def code_of(root: Path, kernel: str) -> Path:
    (path,) = root.glob(f"*/*/{kernel}/*/{kernel}.so")
    return path


def other_code(root: Path) -> str:
    shutil.copyfile(code_of(root, "bar"), code_of(root, "foo"))
    return "foo.so: has no function of foo, but of bar"


def other_program(root: Path) -> str:
    path, another = (code_of(root, kernel).parents[2] / "program.bc" for kernel in ("foo", "other"))
    shutil.copyfile(another, path)
    return "program.bc: is of another program: it does not define the kernel "


def patched(at: int, number: int, words: str, root: Path) -> str:
    path = code_of(root, "foo")
    data = bytearray(path.read_bytes())
    data[at] = number
    path.write_bytes(data)
    return words


#: What damages an entry below a root, and returns the words of its finding.
SPOILS: dict[str, Callable[[Path], str]] = {
    "other code": other_code,
    "other program": other_program,
    "relocatable": partial(patched, 16, 1, "foo.so: has the ELF type 1, not 3"),
    "other machine": partial(patched, 18, 243, "foo.so: is 64-bit code of the ELF machine 243, not for "),
    "other class": partial(patched, 4, 1, "foo.so: is 32-bit code of the ELF machine "),
}


@real
@pytest.mark.usefixtures("wheel_pocl")
@pytest.mark.parametrize("name", ["other code", *thorough(*list(SPOILS)[1:])])
def test_a_file_of_another_entry_fails_the_library_and_is_damage(
    home: Home, any_pocl: dict[str, str], name: str
) -> None:
    variables = {**any_pocl, **LIBRARIES}
    for names in (("bar", "foo"), ("other",)):
        assert home.python("named.py", *names, **variables)["results"] == [*range(len(names))]
    layer = PoclKernels(home.environment())
    assert verified(layer) == []
    words = SPOILS[name](root_of(layer))
    met = home.run(*RUN, "bar", "foo", check=False, **variables)
    # Since PoCL 7.0 only the launch fails, and the result remains 0.
    assert met.returncode or json.loads(met.stdout)["results"] != [0, 1]
    (finding,) = verified(layer)
    assert (finding.severity, words in finding.message) == (Severity.FAILS, True), finding

    def copy_entry() -> None:
        """Code of another ELF class cannot even be read."""
        artifact, other = got(layer, str(finding.key)), str(finding.key)[:-2] + "AA"
        layer.put(other, artifact._replace(key=other))

    with pytest.raises(Damaged):
        copy_entry()
    assert clear_damaged(layer).removed == 1
    assert home.python("named.py", "bar", "foo", **variables)["results"] == [0, 1]
    assert verified(layer) == []


#: Compiles a program, and builds it in another process: PoCL 3.0 keeps both under one key.
COMPILE = """
import sys, pyopencl as cl
from binaries import started
context, queue = started()
program = cl.Program(context, "__kernel void foo(__global float *a) { a[0] = sin(a[0]); }")
if sys.argv[1] == "compile":
    program.compile()
else:
    memory = cl.Buffer(context, cl.mem_flags.READ_WRITE, 64)
    program.build(cache_dir=False).foo(queue, (16,), (16,), memory).wait()
"""


@real
@pytest.mark.usefixtures("wheel_pocl")
def test_code_that_lacks_a_built_in_function_is_damage(home: Home) -> None:
    path = str(PROGRAMS)
    home.run(sys.executable, "-c", COMPILE, "compile", PYTHONPATH=path)
    layer = PoclKernels(home.environment())
    assert verified(layer) == []
    assert home.run(sys.executable, "-c", COMPILE, "build", check=False, PYTHONPATH=path).returncode
    (finding,) = verified(layer)
    assert (finding.severity, "needs _Z7_cl_sinf, which nothing defines" in finding.message) == (Severity.FAILS, True)
    assert clear_damaged(layer).removed == 1
    home.run(sys.executable, "-c", COMPILE, "build", PYTHONPATH=path)
    assert verified(layer) == []


@real
@pytest.mark.usefixtures("wheel_pocl")
@thorough_only
def test_what_no_lookup_reads_or_only_elsewhere_fails_is_left(home: Home) -> None:
    """A renamed folder, and a missing library, which the program may find."""
    home.python("named.py", "foo")
    layer = PoclKernels(home.environment())
    code = code_of(root_of(layer), "foo")
    data = code.read_bytes()
    assert b"libc.so.6\0" in data
    code.write_bytes(data.replace(b"libc.so.6\0", b"libc.so.9\0"))
    (missing,) = verified(layer)
    assert (missing.code, missing.severity, missing.thing) == ("doubtful", Severity.RISKS, None)
    assert missing.message.endswith("foo.so: needs libc.so.9, which is missing here")
    assert home.run(*RUN, "foo", check=False).returncode
    assert home.cachectl("purge --damaged pocl").returncode == 0
    assert code.exists()
    # The printed fix.
    assert home.cachectl(missing.fix.removeprefix("cachectl ")).returncode == 0
    assert home.python("named.py", "foo")["results"] == [0]
    code.rename(code.with_name("bar.so"))
    code.parents[1].rename(code.parents[2] / "bar")
    (renamed,) = verified(layer)
    assert (renamed.code, "has the kernel bar" in renamed.message) == ("doubtful", True)
    assert home.python("named.py", "foo")["results"] == [0]


def test_entries_of_two_machines_share_a_home(tmp_path: Path) -> None:
    """Those of Arm were made by clang 19: bitcode of one kernel, and a library with its function."""
    layer = PoclKernels(environment_of(tmp_path))
    unpack("pocl-aarch64", root_of(layer))
    other = POCL_KEY.replace("C", "D")
    place(root_of(layer), other, {"program.bc": BITCODE, "k/0-0-0/k.so": native("k")})
    assert (verified(layer), clear_damaged(layer).removed) == ([], 0)
    layer.put("AC" + POCL_KEY[2:], got(layer, POCL_KEY)._replace(key="AC" + POCL_KEY[2:]))
    # This machine's code in the other's entry is just as wrong.
    artifact = got(layer, POCL_KEY)
    files = {**archive.unpack(artifact.data), "foo/0-0-0/foo.so": native("foo")}
    with pytest.raises(Damaged, match="ELF machine 62, not for aarch64"):
        layer.put("AD" + POCL_KEY[2:], artifact._replace(key="AD" + POCL_KEY[2:], data=archive.pack(files)))
    place(root_of(layer), POCL_KEY, {"foo/0-0-0/foo.so": native("foo")})
    assert [finding.severity for finding in verified(layer)] == [Severity.FAILS]


@real
@pytest.mark.parametrize("driver", needing("built_pocl"))
def test_an_object_of_another_machine_fails_where_others_are_replaced(
    home: Home, driver: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """PoCL 7.2 and newer links an object for any machine."""
    variables = request.getfixturevalue(driver)
    home.python("named.py", "foo", "bar", **variables)
    layer = PoclKernels(home.environment())
    (foo,), (bar,) = (list(root_of(layer).glob(f"*/*/{name}/*/*.so.o")) for name in ("foo", "bar"))
    shutil.copyfile(bar, foo)
    assert findings(layer) == [("damaged", Severity.HEALS)]
    assert home.python("named.py", "foo", "bar", **variables)["results"] == [0, 1]
    assert verified(layer) == []
    unpack("pocl-aarch64", tmp_path / "arm")
    data = bytearray((tmp_path / "arm" / POCL_KEY / "foo/0-0-0/foo.so").read_bytes())
    foo.write_bytes(data)
    assert findings(layer) == [("damaged", Severity.HEALS)]
    data[16] = 1
    foo.write_bytes(data)
    assert findings(layer) == [("damaged", Severity.FAILS)]
