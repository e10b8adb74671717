"""How each driver reads its variables, as a table: whether its cache is on, and what doctor says."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import layers
from support.dictionaries import dictionary
from support.layers import assigned, register_driver

from cachectl.layers.base.environment import Environment
from cachectl.layers.core.finding import HEALS, RISKS, Finding, Severity
from cachectl.layers.core.root import Condition
from cachectl.layers.host.pythons import Python, own_python
from cachectl.layers.registry import built_in_layer
from cachectl.stack import Stack
from cachectl.verbs.doctor import doctor

#: A library of the driver of each layer.
DRIVERS = {
    "neo": "libigdrcl.so",
    "comgr": "libamdocl64.so",
    "mesa": "libRusticlOpenCL.so.1",
    "pocl": "libpocl.so.2",
    "cuda": "libnvidia-opencl.so.1",
}


def environment_of(folder: Path, **variables: str) -> Environment:
    """Return an environment in ``folder/home`` whose programs run in ``folder/cwd``."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    values = {"HOME": str(home), **{name: value.format(tmp=folder) for name, value in variables.items()}}
    return layers.environment_of(home)._replace(variables=values, cwd=folder / "cwd")


ON, OFF, UNKNOWN, ABSENT = Condition.ENABLED, Condition.DISABLED, Condition.UNKNOWN, Condition.ABSENT
FAILS, RECOMPILES, HARMLESS = Severity.FAILS, Severity.RECOMPILES, Severity.HARMLESS
#: Of each layer, the variables, where "|" stands between values that mean the same; the condition, a part of the reason
#: ("@" stands for the variable and its value), and the one finding with its severity, if it is not RECOMPILES.
VALUES: dict[str, list[tuple[Any, ...]]] = {
    "neo": [
        ("", ON, "default"),
        ("NEO_CACHE_PERSISTENT=1", ON, "=1"),
        ("NEO_CACHE_PERSISTENT=0", OFF, "@", "off"),
        ("NEO_CACHE_PERSISTENT=true|", OFF, "reads it as 0", "variable"),
        ("NEO_CACHE_DIR={tmp}/new/er", OFF, "er is missing (NEO_CACHE_DIR)", "folder"),
        ("XDG_CACHE_HOME={tmp}/new", OFF, "new is missing (XDG_CACHE_HOME)", "folder"),
        ("HOME=", OFF, "HOME is not set", "variable"),
        ("NEO_CACHE_MAX_SIZE=1G", ON, "takes it for 1", "variable"),
        ("NEO_CACHE_MAX_SIZE=big", ON, "takes it for 0", "variable", Severity.WASTES),
        ("NEO_CACHE_MAX_SIZE=30000", ON, "default", "cap"),
        ("IGC_Dump=1", UNKNOWN, "in compute-runtime 25.31 to 26.31", "variable"),
        ("MIGC_=1", ON, "default"),
    ],
    "comgr": [
        ("", ON, "default"),
        ("AMD_COMGR_CACHE=0", OFF, "@", "off"),
        ("AMD_COMGR_CACHE=false|00", ON, "is not 0", "variable", HARMLESS),
        ("AMD_COMGR_CACHE_POLICY=keep=all", OFF, "it knows no 'keep'", "variable"),
        ("AMD_COMGR_CACHE_POLICY=prune_after=1h", ON, "default"),
        ("AMD_COMGR_CACHE_DIR=", ON, "is empty", "variable"),
        ("AMD_COMGR_CACHE_DIR=here", ON, "not absolute", "variable"),
        ("XDG_CACHE_HOME=|here", ON, "not absolute", "variable"),
        ("HOME=here", ON, "not absolute", "variable"),
        ("AMD_COMGR_EMIT_VERBOSE_LOGS=1", ON, "part of every key", "variable"),
        ("TMP={tmp}/none", ON, "default", "closed", RISKS),
    ],
    "mesa": [
        ("MESA_SHADER_CACHE_DISABLE=true|1|yes|y|t|TRUE", OFF, "@", "off"),
        ("MESA_SHADER_CACHE_DISABLE=false|0|no|n|f", ON, "@"),
        ("MESA_SHADER_CACHE_DISABLE=|on|2|ye\N{LATIN SMALL LETTER LONG S}", ON, "default", "variable", HARMLESS),
        ("MESA_GLSL_CACHE_DISABLE=true", OFF, "@", "off"),
        ("MESA_GLSL_CACHE_DISABLE=true MESA_SHADER_CACHE_DISABLE=false", ON, "=false"),
        ("MESA_GLSL_CACHE_DIR={tmp}/old", ON, "default", "variable", HARMLESS),
        ("XDG_CACHE_HOME=", OFF, "is empty", "variable"),
        ("XDG_CACHE_HOME=rel", ON, "default", "variable"),
        ("MESA_SHADER_CACHE_DIR=", OFF, "is empty", "variable"),
        ("MESA_SHADER_CACHE_DIR={tmp}/not/there", ON, "default", "variable"),
        ("MESA_SHADER_CACHE_MAX_SIZE=500", ON, "default", "variable", HARMLESS),
        ("MESA_DISK_CACHE_READ_ONLY_FOZ_DBS=ship", ON, "default", "variable", HARMLESS),
        ("MESA_GLSL_DISABLE_IO_OPT=yes", ON, "default", "variable"),
        # Older releases use the home of the account.
        ("HOME={tmp}", ON, "default", "variable", HARMLESS),
    ],
    "cuda": [
        ("CUDA_CACHE_DISABLE=1", OFF, "@", "off"),
        ("CUDA_CACHE_DISABLE=true|", ON, "does nothing", "variable", HARMLESS),
        ("CUDA_CACHE_DISABLE=0", ON, "@"),
        ("CUDA_CACHE_MAXSIZE=4294967296|' 1000000'|-1", ON, ""),
        ("CUDA_CACHE_MAXSIZE=0", OFF, "@", "off"),
        ("CUDA_CACHE_MAXSIZE=none|", OFF, "takes it for 0", "variable"),
        ("CUDA_CACHE_MAXSIZE=30000k", ON, "takes it for 30000", "variable"),
        ("CUDA_CACHE_PATH=here|", OFF, "not absolute", "variable"),
    ],
    # Only a value that begins with 1 means on.
    "pocl": [
        ("POCL_KERNEL_CACHE=1|10", ON, "POCL_KERNEL_CACHE=1"),
        ("POCL_KERNEL_CACHE=0", OFF, "@", "off"),
        ("POCL_KERNEL_CACHE=true|", OFF, "begins with 1", "variable"),
        ("POCL_CACHE_DIR=", OFF, "no device", "variable", FAILS),
        ("POCL_CACHE_DIR=here", ON, "not absolute", "variable"),
        ("HOME={tmp}/home 'POCL_CACHE_DIR=~/pc'", ON, "not absolute", "variable"),
        ("HOME={tmp}/home 'POCL_CACHE_DIR={tmp}/$HOME/pc'", ON, "default", "variable", HARMLESS),
        ("XDG_CACHE_HOME=here", ON, "not absolute", "variable"),
    ],
    "loopy": [
        ("LOOPY_NO_CACHE=1", OFF, "@", "off"),
        ("CG_NO_CACHE=ON", OFF, "@", "off"),
        ("LOOPY_NO_CACHE=0", ON, "LOOPY_NO_CACHE"),
        ("LOOPY_NO_CACHE=banana|", OFF, "import loopy raises ValueError", "variable", FAILS),
        ("XDG_CACHE_HOME=relative", ON, "LOOPY_NO_CACHE", "variable", HARMLESS),
    ],
    "pyopencl-invoker": [
        ("PYOPENCL_NO_CACHE=1", OFF, "@", "off"),
        ("PYOPENCL_NO_CACHE=false", ABSENT, "left no dictionary"),
        ("PYOPENCL_NO_CACHE=", OFF, "import pyopencl raises ValueError", "variable", FAILS),
    ],
    "pyopencl": [
        ("PYOPENCL_NO_CACHE=true", OFF, "@", "off"),
        ("PYOPENCL_NO_CACHE=2", OFF, "import pyopencl raises ValueError", "variable", FAILS),
    ],
    "pytools": [
        ("SUMPY_NO_CACHE=1", ON, "off for sumpy only", "off"),
        ("SUMPY_NO_CACHE=0|", ON, "its value is ignored", "variable"),
    ],
    "miopen": [
        ("MIOPEN_DISABLE_CACHE=1|enable", OFF, "@", "off"),
        ("MIOPEN_DISABLE_CACHE=off|0|Disable|disabled|no|FALSE", ABSENT, "no libMIOpen"),
        ("MIOPEN_DISABLE_CACHE=|banana", OFF, "MIOpen throws", "variable", FAILS),
        ("'MIOPEN_CUSTOM_CACHE_DIR=~/kernels'", ABSENT, ""),
        ("MIOPEN_CUSTOM_CACHE_DIR=kernels", ABSENT, "", "variable"),
    ],
    "miopen-system": [
        ("MIOPEN_DISABLE_CACHE=yes", OFF, "@", "off"),
        ("MIOPEN_SYSTEM_DB_PATH={tmp}/none", ABSENT, "", "variable", HEALS),
    ],
    "miopen-tuning": [
        ("MIOPEN_DEBUG_DISABLE_FIND_DB=1", OFF, "the perf-db stays on", "off"),
        ("MIOPEN_DEBUG_DISABLE_USER_DB=1", ABSENT, "the perf-db stays on before MIOpen 3.6.1"),
        ("MIOPEN_USER_DB_PATH=.", ON, "", "variable"),
        ("MIOPEN_FIND_ENFORCE=5|db_clean", ABSENT, "erases the user's results", "tuning"),
        ("MIOPEN_FIND_ENFORCE=4", ABSENT, "", "tuning"),
        ("MIOPEN_FIND_ENFORCE=SEARCH", ABSENT, "", "tuning", HARMLESS),
        ("MIOPEN_FIND_ENFORCE=9|often", ABSENT, "", "variable", FAILS),
        ("MIOPEN_FIND_ENFORCE=1|", ABSENT, ""),
        ("MIOPEN_DEBUG_FIND_ONLY_SOLVER=ConvAsm1x1U", ABSENT, "", "tuning", HARMLESS),
    ],
    "miopen-system-tuning": [
        ("HOME={tmp} 'MIOPEN_SYSTEM_DB_PATH=~/home'", ABSENT, "", "variable", HEALS),
        ("MIOPEN_DEBUG_DISABLE_FIND_DB=", OFF, "MIOpen throws", "variable", FAILS),
    ],
}


def cases() -> Iterator[tuple[Any, ...]]:
    """Yield each value of the table separately."""
    for layer, rows in VALUES.items():
        for variables, *expected in rows:
            first, *others = variables.split("|")
            name = first.partition("=")[0]
            for variable in (first, *(f"{name}={value}" for value in others)):
                yield layer, variable, *expected


def examine(folder: Path, name: str, variables: dict[str, str]) -> list[Finding]:
    environment = environment_of(folder, **variables)
    return list(doctor(Stack(environment), [name]).findings)


@pytest.mark.parametrize("row", list(cases()), ids=lambda row: f"{row[0]} {row[1]}")
def test_a_value_has_a_state_and_a_wrong_one_a_finding_whose_fix_works(tmp_path: Path, row: tuple[Any, ...]) -> None:
    layer, variables, condition, words, *what = row
    expected = [(layer, *(*what, RECOMPILES)[:2])] if what else []
    programs = tmp_path / "home/.cache/neo_compiler_cache"
    programs.mkdir(parents=True)
    for folder in ("cwd", "home/tmp"):
        (tmp_path / folder).mkdir()
    if "cap" in what:
        (programs / "0123456789abcdef.cl_cache").write_bytes(b"!<arch>\n" + bytes(29_000))
    set_to = {key: value.format(tmp=tmp_path) for key, value in assigned(variables).items()}
    if layer in DRIVERS:
        set_to["OCL_ICD_VENDORS"] = register_driver(tmp_path, DRIVERS[layer])
    environment = environment_of(tmp_path, **set_to)
    dictionary(tmp_path / f"home/.cache/pytools/pdict-v5-loopy-x-{environment.python}.sqlite", {})
    state = built_in_layer(layer, environment).state()
    assert (state.condition, words.replace("@", variables) in state.why) == (condition, True), state.why
    found = examine(tmp_path, layer, set_to)
    assert [(one.layer, one.code, one.severity) for one in found] == expected
    place = next((root.path for root in built_in_layer(layer, environment).roots()), Path("*"))
    assert {one.root for one in found if one.code == "off"} <= {place}
    for finding in found:
        script = f"{finding.fix}; env -0"
        done = subprocess.run(["sh", "-c", script], env={"PATH": os.defpath, **set_to}, capture_output=True, check=True)
        after = dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if pair)
        assert examine(tmp_path, layer, after) == []


#: For each driver, variables that are wrong if it is there.
WRONG = {
    "neo": "NEO_CACHE_DIR=/nowhere IGC_X=1 NEO_CACHE_MAX_SIZE=1G",
    "comgr": "AMD_COMGR_CACHE_POLICY=big AMD_COMGR_CACHE=off",
    "mesa": "MESA_GLSL_DISABLE_IO_OPT=abc",
    "pocl": "",
    "cuda": "",
}


@pytest.mark.parametrize("name", DRIVERS)
def test_absent_without_driver_gpu_and_cache(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachectl.layers.cuda._KERNEL_MODULE", tmp_path / "none")
    variables = {"OCL_ICD_VENDORS": str(tmp_path / "none.icd")}
    environment = environment_of(tmp_path, **variables)
    assert built_in_layer(name, environment).state().condition is Condition.ABSENT
    (tmp_path / "gpus").mkdir()
    has_gpu = built_in_layer(name, environment._replace(topology=tmp_path / "gpus")).state()
    assert has_gpu.condition is (Condition.ENABLED if name == "comgr" else Condition.ABSENT)
    assert examine(tmp_path, name, {**variables, **assigned(WRONG[name])}) == []


#: A variable that no release reads, with a value, and what fixes it; in brackets the name that may be meant.
IMAGINED = [
    ("CUDA_CACHE_MAX_SIZE=4294967296", 'unset CUDA_CACHE_MAX_SIZE; export CUDA_CACHE_MAXSIZE="4294967296"'),
    ("CUDA_CACHE_DIR=/x", 'unset CUDA_CACHE_DIR; export CUDA_CACHE_PATH="/x"'),
    ("POCL_CACHEDIR=/x", 'unset POCL_CACHEDIR; export POCL_CACHE_DIR="/x"'),
    ("POCL_CACHEDIR=~/x", "unset POCL_CACHEDIR"),
    ("MIOPEN_USER_DB=/x", 'unset MIOPEN_USER_DB; export MIOPEN_USER_DB_PATH="/x"'),
    ("NEO_CACHE_SIZE=9", 'unset NEO_CACHE_SIZE; export NEO_CACHE_MAX_SIZE="9"'),
    ("MESA_SHADER_CACHE_DISABLED=true", "unset MESA_SHADER_CACHE_DISABLED (MESA_SHADER_CACHE_DISABLE)"),
    ("POCL_DISABLE_CACHE=1", "unset POCL_DISABLE_CACHE (POCL_KERNEL_CACHE)"),
    ("MIOPEN_DISABLE_CACHES=banana", "unset MIOPEN_DISABLE_CACHES (MIOPEN_DISABLE_CACHE)"),
    ("PYOPENCL_CACHE_DIR=/x", "unset PYOPENCL_CACHE_DIR (XDG_CACHE_HOME)"),
    ("POCL_CACHE_MAX_SIZE=9", "unset POCL_CACHE_MAX_SIZE"),
]


@pytest.mark.parametrize(("variable", "fix"), IMAGINED, ids=lambda value: value)
def test_a_name_that_no_release_reads_is_told_with_the_one_that_is_meant(
    tmp_path: Path, variable: str, fix: str
) -> None:
    (found,) = doctor(Stack(environment_of(tmp_path, **assigned(variable)))).findings
    assert (found.code, found.severity, found.fix) == ("variable", HARMLESS, fix.partition(" (")[0])
    assert "no release reads it" in found.message
    assert fix.partition(" (")[2].removesuffix(")") in found.message


def test_no_variable_that_a_product_reads_is_taken_for_another(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "data/variables.txt").read_text()
    names = [name for line in text.splitlines() if not line.startswith("#") for name in line.split()]
    found = doctor(Stack(environment_of(tmp_path, **dict.fromkeys(names, "/x/y")))).findings
    assert [one.message for one in found if "no release reads it" in one.message] == []


def test_a_folder_that_no_shell_expanded_is_told_with_the_place_that_is_used(tmp_path: Path) -> None:
    def said(layer: str, **variables: str) -> tuple[str, str]:
        (found,) = examine(tmp_path, layer, {"OCL_ICD_VENDORS": str(tmp_path / "none.icd"), **variables})
        return found.message, found.fix

    used = f"no shell expanded ~, so the cache is {tmp_path}/cwd/~/pc"
    assert said("pocl", POCL_CACHE_DIR="~/pc") == (f"POCL_CACHE_DIR='~/pc': {used}", 'export POCL_CACHE_DIR="$HOME/pc"')
    message, fix = said("cuda", CUDA_CACHE_PATH='${{SCRATCH}}/a"b')
    assert (message[-41:], fix) == (
        "shell expanded ${SCRATCH}, so there is no cache"[-41:],
        'export CUDA_CACHE_PATH="${SCRATCH:?}/a\\"b"',
    )
    # Of systemd, which expands it in a unit's ``Environment`` only, and of another account.
    assert said("cuda", CUDA_CACHE_PATH="%h/.cache") == (
        "CUDA_CACHE_PATH='%h/.cache': systemd has not expanded %h, so there is no cache",
        'export CUDA_CACHE_PATH="$HOME/.cache"',
    )
    assert said("cuda", CUDA_CACHE_PATH="~root/nv")[1] == f'export CUDA_CACHE_PATH="{Path("~root").expanduser()}/nv"'
    assert said("loopy", XDG_CACHE_HOME="~/x")[0].endswith(f"the cache is {tmp_path}/home/.cache/pytools")
    # A driver that is not here, and a place that another variable decides about.
    nothing = {"OCL_ICD_VENDORS": str(tmp_path / "none.icd"), "XDG_CACHE_HOME": "~/x"}
    assert examine(tmp_path, "comgr", nothing) == []
    assert examine(tmp_path, "pocl", {**nothing, "POCL_CACHE_DIR": str(tmp_path)}) == []


def test_a_variable_is_judged_by_the_releases_that_known_pythons_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cachectl's own environment may have none, or another."""
    environment = environment_of(tmp_path, LOOPY_NO_CACHE="0")._replace(searches_pythons=True)
    python = Python(Path("/venv/bin/python"), "3.11.2.final.0", {"loopy": "2024.1"}.get)
    known = [own_python(environment), python]
    monkeypatch.setattr("cachectl.layers.host.pythons.pythons_of", lambda _: known)
    layer = built_in_layer("loopy", environment)
    assert "loopy 2024.1 checks only whether it is set" in layer.state().why
    assert layer.state().condition is OFF
    newer = python._replace(installed={"loopy": "2025.2"}.get)
    known.insert(1, newer)
    assert (layer.state().condition, "; not for loopy 2025.2" in layer.state().why) == (UNKNOWN, True)
    (finding,) = layer.diagnose()
    assert (finding.severity, finding.fix) == (RECOMPILES, "unset LOOPY_NO_CACHE")
