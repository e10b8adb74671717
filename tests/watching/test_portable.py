"""Portable builds: what is left out and put in, and that entries hit in another environment, with the same numbers."""

import json
import sys
from pathlib import Path

import pytest
from homes import Home, make_home
from support.environments import another_venv
from support.tracing import numbers, trace
from tiers import real, thorough_only

from cachectl.layers.inside.portable_builds import Headers, Needed
from cachectl.watching import ledger, portable
from cachectl.watching.program_events import PORTABLE

#: Builds a plain kernel, some with PyOpenCL's headers, and what needs a header of its own; prints what they compute.
PROGRAM = """
import hashlib, sys, warnings
import numpy as np, pyopencl as cl, pyopencl.array as cla, pyopencl.clmath as clmath, pyopencl.clrandom as clrandom
warnings.filterwarnings("ignore")
context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
queue = cl.CommandQueue(context)
plain = "__kernel void plain(__global float *a) { a[get_global_id(0)] *= 3; }"
own = '#include "own.h"\\n__kernel void own(__global float *a) { a[get_global_id(0)] += OWN; }'
both = '#include <pyopencl-complex.h>\\n__kernel void both(__global float *a) { a[0] += cfloat_abs(cfloat_new(3, 4)); }'
if "failing" in sys.argv:
    cl.Program(context, both + "\\n\\n  int nowhere = missing;").build()
a = cla.to_device(queue, np.linspace(0.1, 2, 16).astype(np.float32))
for source, name, options in ((plain, "plain", []), (own, "own", ["-I", "."]), (both, "both", "-DX=1")):
    cl.Kernel(cl.Program(context, source).build(options), name)(queue, (16,), None, a.data)
z = (a + 1j * a).astype(np.complex64)
numbers = [a, clmath.exp(z), z * z, clrandom.PhiloxGenerator(context, seed=3).uniform(queue, 64, np.float32)]
print(hashlib.sha256(b"".join(each.get().tobytes() for each in numbers)).hexdigest())
"""


@pytest.fixture
def headers(tmp_path: Path) -> Headers:
    for name, text in {
        "pyopencl-a.h": "#pragma once\nint a;\n",
        "pyopencl-b.cl": '#include <pyopencl-a.h>\n#include "pyopencl-x/c.h"\n',
        "pyopencl-x/c.h": '#ifndef C\n#define C\n#include "d.h"\n#include <stddef.h>\n#endif\n',
        "pyopencl-x/d.h": "int d;",
        "pyopencl-nested.h": "#if 0\n#include <pyopencl-a.h>\n#endif\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "others").mkdir()
    (tmp_path / "others/pyopencl-b.cl").touch()
    return Headers(str(tmp_path), [".", str(tmp_path)])


def test_headers_stand_in_place_of_their_includes(headers: Headers) -> None:
    source = "int before;\n#include <pyopencl-b.cl>\r\n  # include <pyopencl-a.h>\nint after;"
    assert headers.put_into(source).split("\n") == [
        *("int before;", '# 1 "pyopencl-b.cl" 1', '# 1 "pyopencl-a.h" 1', "", "int a;", "", '# 2 "" 2'),
        *('# 1 "pyopencl-x/c.h" 1', "#ifndef C", "#define C", '# 1 "pyopencl-x/d.h" 1', "int d;", '# 4 "" 2'),
        *("#include <stddef.h>", "#endif", "", '# 3 "" 2', "", '# 3 "" 2', "", "int after;"),
    ]


@pytest.mark.parametrize(
    "source",
    [
        *("int x; // #include <pyopencl-a.h>", '/* #include "x.h"\n */ int x;', 'char *s = "#include <pyopencl-a.h>";'),
        *(
            "int x; // it's\n// include",
            "// one \\\n#include <pyopencl-a.h>",
            "#error don't /* \nint included;",
            "int x;",
        ),
        *("#include <x.h>", "#ifdef X\n#include <pyopencl-missing.h>\n#endif"),
    ],
)
def test_an_include_that_is_none_or_of_nothing_there_needs_nothing(headers: Headers, source: str) -> None:
    assert headers.put_into(source) == source


@pytest.mark.parametrize(
    "source",
    [
        *('#include "x.h"', '#include "pyopencl-a.h"', "#if 1\n# include <pyopencl-b.cl>\n#endif"),
        *("#define H <pyopencl-a.h>\n#include H", "%:include <x.h>", "??=include <x.h>", "#inc??/\nlude <x.h>"),
        *("#inc\\\nlude <x.h>", "#define X \\\n#include <pyopencl-a.h>", "#include <pyopencl-a.h> /* more"),
        *("/* a */ #include <pyopencl-a.h>", "#include <pyopencl-nested.h>", "#if __has_include(<x.h>)\n#endif"),
        *('#error don\'t /*\n#include "x.h"\n/* */', "#import <x.h>", 'R"(/*)";\n#include <pyopencl-a.h>\n/**/'),
        *("// old\r#include <x.h>", "/\\\n/ a\n#include <pyopencl-a.h>"),
    ],
)
def test_every_other_include_keeps_the_folder(headers: Headers, source: str) -> None:
    with pytest.raises(Needed):
        headers.put_into(source)


@pytest.mark.usefixtures("headers")
def test_a_header_that_the_programs_own_folder_has_keeps_the_folder(tmp_path: Path) -> None:
    (tmp_path / "others/own.h").touch()
    others = Headers(str(tmp_path), [".", str(tmp_path / "others"), str(tmp_path)])
    for name in ("pyopencl-b.cl", "own.h"):
        with pytest.raises(Needed, match=f"{name}, which a folder"):
            others.put_into(f"#include <{name}>")


@pytest.fixture
def program(home: Home) -> str:
    (home.path / "own.h").write_text("#define OWN 2\n")
    file = home.path / "program.py"
    file.write_text(PROGRAM)
    return str(file)


@real
@thorough_only
def test_numbers_and_errors_are_those_of_other_builds(home: Home, program: str) -> None:
    """Line, column and file of an error after a header are those of the program's source."""
    plain = home.run(sys.executable, program).stdout
    portable = home.cachectl("run --portable --", sys.executable, program)
    assert portable.stdout == plain
    assert portable.stderr == 'cachectl: not portable: own needs #include "own.h"\n'
    failed = [
        home.cachectl(*("run", *options, "--"), sys.executable, program, "failing", check=False).stderr
        for options in (("--prove", "--portable"), ("--prove",))
    ]
    for said in failed:
        assert ".cl:4:17: " in said
        assert "missing" in said
    assert "-I" not in failed[0].partition("(options:")[2].partition(")")[0]


@real
@thorough_only
def test_every_mode_and_the_settings_build_portably(home: Home, program: str) -> None:
    root = str(home.path / "root")
    home.cachectl(f"run --isolated={root} --portable --", sys.executable, program)
    home.configure("portable = true\n")
    # What a portable run has made is hit by others of all modes.
    again = home.cachectl(f"run --base {root} --prove --", sys.executable, program)
    assert "proof holds" in again.stderr
    traced = trace(home, sys.executable, program, options=("--portable",))
    assert 'not portable: own needs #include "own.h"' in traced["said"]


def test_block_restores_everything(home: Home) -> None:
    lines = """
import cachectl, pyopencl
before = vars(pyopencl.Program)["build"]
with cachectl.portable():
    assert vars(pyopencl.Program)["build"] is not before
    with cachectl.portable():
        pass
assert vars(pyopencl.Program)["build"] is before
"""
    assert not home.run(sys.executable, "-W", "error", "-c", lines).stderr


@real
@thorough_only
def test_pytest_and_salted_builds(home: Home) -> None:
    """A session builds portably, and a block in which caches are off salts such builds."""
    (home.path / "test_it.py").write_text(
        """
import warnings, cachectl, pyopencl as cl
def test_it():
    context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
    program = cl.Program(context, "#include <pyopencl-complex.h>\\n__kernel void once(__global float *a) {}").build()
    assert "-I" not in program.get_build_info(context.devices[0], cl.program_build_info.OPTIONS)
    with cachectl.disabled(strict=False):
        program = cl.Program(context, "__kernel void never(__global float *a) {}").build("-DY=1")
        assert "CACHECTL_SALT" in program.get_build_info(context.devices[0], cl.program_build_info.OPTIONS)
        assert "-I" not in program.get_build_info(context.devices[0], cl.program_build_info.OPTIONS)
"""
    )
    plain = ("-p", "no:cacheprovider", "-q", "-p", "no:randomly", "test_it.py")
    home.run(sys.executable, "-m", "pytest", "--portable-builds", *plain)
    home.run(sys.executable, "-m", "pytest", "--portable-builds", *plain)
    assert len(list((home.path / ".cache/pocl/kcache").rglob("program.bc"))) == 1


def test_another_pyopencl_is_left_alone_with_a_line(home: Home) -> None:
    (home.path / "pyopencl.py").write_text("class Program:\n    def build(self):\n        print('built')\n")
    lines = "import pyopencl; pyopencl.Program().build()"
    done = home.cachectl("run --portable --", sys.executable, "-c", lines, PYTHONPATH=str(home.path))
    assert done.stdout == "built\n"
    assert "no build is portable: AttributeError" in done.stderr


@pytest.mark.thorough
@real
def test_entries_hit_in_another_environment(home: Home, program: str, tmp_path: Path) -> None:
    """After push and pull every lookup hits, but for the kernel that says why; without it the part cannot hit."""
    python, packed = another_venv(tmp_path / "venv"), str(tmp_path / "packed.zip")
    expected = home.cachectl(f"run --store {packed} --trust --portable --", sys.executable, program).stdout
    other = make_home(tmp_path / "other")
    other.run("cp", f"{home.path}/own.h", ".")
    pulled = other.run(python, "-m", "cachectl", "pull", packed, "--trust")
    assert "entries of cachectl run --portable hit at any" in pulled.stdout
    command = (python, "-m", "cachectl", "trace", "--portable", "--json", "trace.json", "--", python, program)
    assert other.run(*command).stdout == expected
    traced = json.loads((other.path / "trace.json").read_text())
    hits, misses, _ = numbers(traced, "pocl")
    assert (hits, misses) == (7, 1)
    # What is not portable is counted, and named.
    home.run(sys.executable, program)
    pushed = home.cachectl("push", packed).stdout
    assert "7 entries may need the pyopencl include path " in pushed
    assert 'not portable: own needs #include "own.h"' in pushed


def test_a_build_longer_than_all_time_leaves_a_ledger_that_can_be_read(home: Home, tmp_path: Path) -> None:
    """A program can write any event."""
    line = {"event": "portable", "pid": 1, "kernels": [], "kept": "", "start": 0, "end": 1 << 62, "thread": 1, "at": 5}
    (tmp_path / "1.events").write_text(json.dumps(line) + "\n")
    portable.remember(home.environment().with_variables({PORTABLE: str(tmp_path)}))
    assert ledger.read(home.environment()).portable == [(0.0, 5)]
