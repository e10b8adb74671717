"""What each driver makes of its variables, as tables: where its cache is, whether it is on, and what doctor says."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support import layers
from support.dictionaries import dictionary
from support.layers import assigned

from cachectl.layers.core.environment import Environment
from cachectl.layers.core.facts import Condition, Finding, Severity
from cachectl.layers.core.registry import built_in_layer
from cachectl.stack import Stack
from cachectl.verbs.doctor import diagnosis

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
    return replace(layers.environment_of(home), variables=values, cwd=folder / "cwd")


def driver(folder: Path, layer: str) -> str:
    """Register a layer's driver; return the ICD file."""
    library = folder / DRIVERS[layer]
    library.write_bytes(Path(sys.executable).read_bytes()[:64])
    (folder / "driver.icd").write_text(str(library))
    return str(folder / "driver.icd")


# ---------------------------------------------------------------------- places

PLACES = [
    ("neo", "", ["home/.cache/neo_compiler_cache"], "default (HOME)"),
    ("neo", "XDG_CACHE_HOME=", ["home/.cache/neo_compiler_cache"], "default (HOME)"),
    ("neo", "XDG_CACHE_HOME={tmp}/x", ["x/neo_compiler_cache"], "XDG_CACHE_HOME"),
    ("neo", "XDG_CACHE_HOME=x", ["cwd/x/neo_compiler_cache"], "XDG_CACHE_HOME"),
    ("neo", "NEO_CACHE_DIR={tmp}/n", ["n"], "NEO_CACHE_DIR"),
    ("neo", "NEO_CACHE_DIR=n XDG_CACHE_HOME={tmp}/x", ["cwd/n"], "NEO_CACHE_DIR"),
    ("neo", "NEO_CACHE_DIR=", ["home/.cache/neo_compiler_cache"], "default (HOME)"),
    ("neo", "HOME=", [], ""),
    ("comgr", "", ["home/.cache/comgr"], "default (HOME)"),
    ("comgr", "XDG_CACHE_HOME={tmp}/x", ["x/comgr"], "XDG_CACHE_HOME"),
    ("comgr", "XDG_CACHE_HOME=", ["cwd/comgr"], "XDG_CACHE_HOME"),
    ("comgr", "XDG_CACHE_HOME=x", ["cwd/x/comgr"], "XDG_CACHE_HOME"),
    ("comgr", "HOME=", ["cwd/.cache/comgr"], "default (HOME)"),
    ("comgr", "AMD_COMGR_CACHE_DIR={tmp}/n XDG_CACHE_HOME=/x", ["n"], "AMD_COMGR_CACHE_DIR"),
    ("comgr", "AMD_COMGR_CACHE_DIR=n", ["cwd/n"], "AMD_COMGR_CACHE_DIR"),
    ("comgr", "AMD_COMGR_CACHE_DIR=", ["home/.cache/comgr"], "default (HOME)"),
    ("mesa", "MESA_SHADER_CACHE_DIR={tmp}/m XDG_CACHE_HOME=/x", ["m"], "MESA_SHADER_CACHE_DIR"),
    ("mesa", "MESA_GLSL_CACHE_DIR={tmp}/g XDG_CACHE_HOME=/x", ["g"], "MESA_GLSL_CACHE_DIR"),
    ("mesa", "MESA_GLSL_CACHE_DIR=/g MESA_SHADER_CACHE_DIR={tmp}/m", ["m"], "MESA_SHADER_CACHE_DIR"),
    ("mesa", "XDG_CACHE_HOME={tmp}/x", ["x"], "XDG_CACHE_HOME"),
    ("mesa", "XDG_CACHE_HOME=rel", ["cwd/rel"], "XDG_CACHE_HOME"),
    ("mesa", "", ["home/.cache"], "default (home folder)"),
    ("mesa", "HOME={tmp}/else", ["else/.cache", "home/.cache"], "default (HOME)"),
    ("mesa", "XDG_CACHE_HOME=", [], ""),
    ("mesa", "MESA_SHADER_CACHE_DIR=", [], ""),
]


@pytest.mark.parametrize(("name", "variables", "paths", "source"), PLACES)
def test_places(tmp_path: Path, name: str, variables: str, paths: list[str], source: str) -> None:
    roots = built_in_layer(name, environment_of(tmp_path, **assigned(variables))).roots()
    # Mesa has three roots in each folder.
    listed = list(dict.fromkeys(root.path.parent if name == "mesa" else root.path for root in roots))
    assert listed == [tmp_path / path for path in paths]
    assert not roots or roots[0].source == source
    assert len(roots) == len(paths) * (3 if name == "mesa" else 1)


# ---------------------------------------------------------------------- values

ON, OFF, UNKNOWN, ABSENT = Condition.ENABLED, Condition.DISABLED, Condition.UNKNOWN, Condition.ABSENT
FAILS, RECOMPILES, RISKS, HARMLESS = Severity.FAILS, Severity.RECOMPILES, Severity.RISKS, Severity.HARMLESS
MESA_OFF = ("true", "1", "yes", "y", "t", "TRUE")
MESA_ON = ("false", "0", "no", "n", "f")
MESA_ODD = ("", "on", "2", "ye\N{LATIN SMALL LETTER LONG S}")
#: A layer and variables; the condition, a part of the reason, and the one finding.
Row = tuple[str, str, Condition, str, str, Severity | None]
VALUES: list[Row] = [
    ("neo", "", ON, "default", "", None),
    ("neo", "NEO_CACHE_PERSISTENT=1", ON, "=1", "", None),
    ("neo", "NEO_CACHE_PERSISTENT=0", OFF, "NEO_CACHE_PERSISTENT=0", "off", RECOMPILES),
    ("neo", "NEO_CACHE_PERSISTENT=true", OFF, "takes it for 0", "variable", RECOMPILES),
    ("neo", "NEO_CACHE_PERSISTENT=", OFF, "takes it for 0", "variable", RECOMPILES),
    ("neo", "NEO_CACHE_DIR={tmp}/new/er", OFF, "er is not there (NEO_CACHE_DIR)", "folder", RECOMPILES),
    ("neo", "XDG_CACHE_HOME={tmp}/new", OFF, "new is not there (XDG_CACHE_HOME)", "folder", RECOMPILES),
    ("neo", "HOME=", OFF, "HOME is not set", "variable", RECOMPILES),
    ("neo", "NEO_CACHE_MAX_SIZE=1G", ON, "takes it for 1", "variable", RECOMPILES),
    ("neo", "NEO_CACHE_MAX_SIZE=big", ON, "takes it for 0", "variable", Severity.WASTES),
    ("neo", "NEO_CACHE_MAX_SIZE=30000", ON, "default", "cap", RECOMPILES),
    ("neo", "IGC_Dump=1", UNKNOWN, "in compute-runtime 25.31 to 26.31", "variable", RECOMPILES),
    ("neo", "MIGC_=1", ON, "default", "", None),
    ("comgr", "", ON, "default", "", None),
    ("comgr", "AMD_COMGR_CACHE=0", OFF, "AMD_COMGR_CACHE=0", "off", RECOMPILES),
    ("comgr", "AMD_COMGR_CACHE=false", ON, "'false' is not 0", "variable", HARMLESS),
    ("comgr", "AMD_COMGR_CACHE=00", ON, "is not 0", "variable", HARMLESS),
    ("comgr", "AMD_COMGR_CACHE_POLICY=keep=all", OFF, "it knows no 'keep'", "variable", RECOMPILES),
    ("comgr", "AMD_COMGR_CACHE_POLICY=prune_expiration=1h", OFF, "cannot be read", "variable", RECOMPILES),
    ("comgr", "AMD_COMGR_CACHE_POLICY=prune_after=1h", ON, "default", "", None),
    ("comgr", "AMD_COMGR_CACHE_DIR=", ON, "is empty", "variable", RECOMPILES),
    ("comgr", "AMD_COMGR_CACHE_DIR=here", ON, "not absolute", "variable", RECOMPILES),
    ("comgr", "XDG_CACHE_HOME=", ON, "not absolute", "variable", RECOMPILES),
    ("comgr", "XDG_CACHE_HOME=here", ON, "not absolute", "variable", RECOMPILES),
    ("comgr", "HOME=here", ON, "not absolute", "variable", RECOMPILES),
    ("comgr", "AMD_COMGR_EMIT_VERBOSE_LOGS=1", ON, "part of every key", "variable", RECOMPILES),
    *(("mesa", f"MESA_SHADER_CACHE_DISABLE={value}", OFF, f"={value}", "off", RECOMPILES) for value in MESA_OFF),
    *(("mesa", f"MESA_SHADER_CACHE_DISABLE={value}", ON, f"={value}", "", None) for value in MESA_ON),
    *(("mesa", f"MESA_SHADER_CACHE_DISABLE={value}", ON, "default", "variable", HARMLESS) for value in MESA_ODD),
    ("mesa", "MESA_GLSL_CACHE_DISABLE=true", OFF, "MESA_GLSL_CACHE_DISABLE=true", "off", RECOMPILES),
    ("mesa", "MESA_GLSL_CACHE_DISABLE=true MESA_SHADER_CACHE_DISABLE=false", ON, "=false", "", None),
    ("mesa", "XDG_CACHE_HOME=", OFF, "is empty", "variable", RECOMPILES),
    ("mesa", "XDG_CACHE_HOME=rel", ON, "default", "variable", RECOMPILES),
    ("mesa", "MESA_SHADER_CACHE_DIR=", OFF, "is empty", "variable", RECOMPILES),
    ("mesa", "MESA_SHADER_CACHE_DIR={tmp}/not/there", ON, "default", "variable", RECOMPILES),
    ("mesa", "MESA_SHADER_CACHE_MAX_SIZE=500", ON, "default", "variable", HARMLESS),
    ("mesa", "MESA_DISK_CACHE_READ_ONLY_FOZ_DBS=ship", ON, "default", "variable", HARMLESS),
    ("mesa", "MESA_GLSL_DISABLE_IO_OPT=yes", ON, "default", "variable", RECOMPILES),
    ("cuda", "CUDA_CACHE_DISABLE=1", OFF, "CUDA_CACHE_DISABLE=1", "off", RECOMPILES),
    ("cuda", "CUDA_CACHE_DISABLE=true", ON, "does nothing", "variable", HARMLESS),
    ("cuda", "CUDA_CACHE_DISABLE=", ON, "does nothing", "variable", HARMLESS),
    ("cuda", "CUDA_CACHE_DISABLE=0", ON, "CUDA_CACHE_DISABLE=0", "", None),
    ("cuda", "CUDA_CACHE_MAXSIZE=4294967296", ON, "", "", None),
    ("cuda", "CUDA_CACHE_MAXSIZE=' 1000000'", ON, "", "", None),
    ("cuda", "CUDA_CACHE_MAXSIZE=-1", ON, "", "", None),
    ("cuda", "CUDA_CACHE_MAXSIZE=0", OFF, "CUDA_CACHE_MAXSIZE=0", "off", RECOMPILES),
    ("cuda", "CUDA_CACHE_MAXSIZE=none", OFF, "takes it for 0", "variable", RECOMPILES),
    ("cuda", "CUDA_CACHE_MAXSIZE=", OFF, "takes it for 0", "variable", RECOMPILES),
    ("cuda", "CUDA_CACHE_MAXSIZE=30000k", ON, "takes it for 30000", "variable", RECOMPILES),
    ("cuda", "CUDA_CACHE_PATH=here", OFF, "not absolute", "variable", RECOMPILES),
    ("cuda", "CUDA_CACHE_PATH=", OFF, "not absolute", "variable", RECOMPILES),
    # Only a value that begins with 1 means on.
    ("pocl", "POCL_KERNEL_CACHE=1", ON, "POCL_KERNEL_CACHE=1", "", None),
    ("pocl", "POCL_KERNEL_CACHE=10", ON, "POCL_KERNEL_CACHE=1", "", None),
    ("pocl", "POCL_KERNEL_CACHE=0", OFF, "POCL_KERNEL_CACHE=0", "off", RECOMPILES),
    ("pocl", "POCL_KERNEL_CACHE=true", OFF, "begins with 1", "variable", RECOMPILES),
    ("pocl", "POCL_KERNEL_CACHE=", OFF, "begins with 1", "variable", RECOMPILES),
    ("pocl", "POCL_CACHE_DIR=", OFF, "no device", "variable", FAILS),
    ("pocl", "POCL_CACHE_DIR=here", ON, "not absolute", "variable", RECOMPILES),
    ("pocl", "XDG_CACHE_HOME=here", ON, "not absolute", "variable", RECOMPILES),
    ("loopy", "LOOPY_NO_CACHE=1", OFF, "LOOPY_NO_CACHE=1", "off", RECOMPILES),
    ("loopy", "CG_NO_CACHE=ON", OFF, "CG_NO_CACHE=ON", "off", RECOMPILES),
    ("loopy", "LOOPY_NO_CACHE=0", ON, "LOOPY_NO_CACHE", "", None),
    ("loopy", "LOOPY_NO_CACHE=banana", OFF, "import loopy raises ValueError", "variable", FAILS),
    ("loopy", "LOOPY_NO_CACHE=", OFF, "import loopy raises ValueError", "variable", FAILS),
    ("loopy", "XDG_CACHE_HOME=relative", ON, "LOOPY_NO_CACHE", "variable", HARMLESS),
    ("pyopencl-invoker", "PYOPENCL_NO_CACHE=1", OFF, "PYOPENCL_NO_CACHE=1", "off", RECOMPILES),
    ("pyopencl-invoker", "PYOPENCL_NO_CACHE=false", ABSENT, "left no dictionary", "", None),
    ("pyopencl-invoker", "PYOPENCL_NO_CACHE=", OFF, "import pyopencl raises ValueError", "variable", FAILS),
    ("pyopencl", "PYOPENCL_NO_CACHE=true", OFF, "PYOPENCL_NO_CACHE=true", "off", RECOMPILES),
    ("pyopencl", "PYOPENCL_NO_CACHE=2", OFF, "import pyopencl raises ValueError", "variable", FAILS),
    ("pytools", "SUMPY_NO_CACHE=1", ON, "off for sumpy alone", "off", RECOMPILES),
    ("pytools", "SUMPY_NO_CACHE=0", ON, "its value is not read", "variable", RECOMPILES),
    ("pytools", "SUMPY_NO_CACHE=", ON, "its value is not read", "variable", RECOMPILES),
    ("miopen", "MIOPEN_DISABLE_CACHE=1", OFF, "MIOPEN_DISABLE_CACHE=1", "off", RECOMPILES),
    ("miopen-system", "MIOPEN_DISABLE_CACHE=yes", OFF, "MIOPEN_DISABLE_CACHE=yes", "off", RECOMPILES),
    ("miopen", "MIOPEN_DISABLE_CACHE=off", ABSENT, "no libMIOpen", "", None),
    ("miopen", "MIOPEN_DISABLE_CACHE=", OFF, "MIOpen throws", "variable", FAILS),
    ("miopen", "MIOPEN_DISABLE_CACHE=banana", OFF, "MIOpen throws", "variable", FAILS),
    ("miopen-tuning", "MIOPEN_DEBUG_DISABLE_FIND_DB=1", OFF, "the perf-db stays on", "off", RECOMPILES),
    ("miopen-system-tuning", "MIOPEN_DEBUG_DISABLE_FIND_DB=", OFF, "MIOpen throws", "variable", FAILS),
    ("miopen-tuning", "MIOPEN_FIND_ENFORCE=5", ABSENT, "erases the user's results", "tuning", RECOMPILES),
    ("miopen-tuning", "MIOPEN_FIND_ENFORCE=db_clean", ABSENT, "erases the user's", "tuning", RECOMPILES),
    ("miopen-tuning", "MIOPEN_FIND_ENFORCE=4", ABSENT, "", "tuning", RECOMPILES),
    ("miopen-tuning", "MIOPEN_FIND_ENFORCE=SEARCH", ABSENT, "", "tuning", HARMLESS),
    ("miopen-tuning", "MIOPEN_FIND_ENFORCE=9", ABSENT, "", "variable", FAILS),
    ("miopen-tuning", "MIOPEN_FIND_ENFORCE=often", ABSENT, "", "variable", FAILS),
    ("miopen-tuning", "MIOPEN_FIND_ENFORCE=1", ABSENT, "", "", None),
    ("miopen-tuning", "MIOPEN_FIND_ENFORCE=", ABSENT, "", "", None),
    ("miopen-tuning", "MIOPEN_DEBUG_FIND_ONLY_SOLVER=ConvAsm1x1U", ABSENT, "", "tuning", HARMLESS),
]


def examine(folder: Path, name: str, variables: dict[str, str]) -> list[Finding]:
    environment = environment_of(folder, **variables)
    return list(diagnosis(Stack(environment, plugins=False).named([name])).findings)


@pytest.mark.parametrize("row", VALUES, ids=[f"{row[0]} {row[1]}" for row in VALUES])
def test_a_value_has_a_state_and_a_wrong_one_a_finding_whose_fix_works(tmp_path: Path, row: Row) -> None:
    layer, variables, condition, words, code, severity = row
    programs = tmp_path / "home/.cache/neo_compiler_cache"
    programs.mkdir(parents=True)
    (tmp_path / "cwd").mkdir()
    if code == "cap":
        (programs / "0123456789abcdef.cl_cache").write_bytes(b"!<arch>\n" + bytes(29_000))
    set_to = {key: value.format(tmp=tmp_path) for key, value in assigned(variables).items()}
    if layer in DRIVERS:
        set_to["OCL_ICD_VENDORS"] = driver(tmp_path, layer)
    environment = environment_of(tmp_path, **set_to)
    dictionary(tmp_path / "home/.cache/pytools", f"pdict-v5-loopy-x-{environment.python}.sqlite", {})
    state = built_in_layer(layer, environment).state()
    assert (state.condition, words in state.why) == (condition, True), state.why
    found = examine(tmp_path, layer, set_to)
    assert [(one.layer, one.code, one.severity) for one in found] == ([(layer, code, severity)] if code else [])
    for finding in found:
        script = f"{finding.fix}; env -0"
        done = subprocess.run(["sh", "-c", script], env={"PATH": os.defpath, **set_to}, capture_output=True, check=True)
        after = dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if pair)
        assert examine(tmp_path, layer, {name: after[name] for name in set_to if name in after}) == []


@pytest.mark.parametrize("name", DRIVERS)
def test_absent_without_driver_gpu_and_cache(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachectl.layers.cuda._KERNEL_MODULE", tmp_path / "none")
    environment = environment_of(tmp_path, OCL_ICD_VENDORS=str(tmp_path / "none.icd"))
    assert built_in_layer(name, environment).state().condition is Condition.ABSENT
    (tmp_path / "gpus").mkdir()
    has_gpu = built_in_layer(name, replace(environment, topology=tmp_path / "gpus")).state()
    assert has_gpu.condition is (Condition.ENABLED if name == "comgr" else Condition.ABSENT)


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("neo", "NEO_CACHE_DIR=/nowhere IGC_X=1 NEO_CACHE_MAX_SIZE=1G"),
        ("comgr", "AMD_COMGR_CACHE_POLICY=big AMD_COMGR_CACHE=off"),
        ("mesa", "MESA_GLSL_DISABLE_IO_OPT=abc"),
    ],
)
def test_no_finding_without_such_a_driver(tmp_path: Path, name: str, variables: str) -> None:
    assert examine(tmp_path, name, {"OCL_ICD_VENDORS": str(tmp_path / "none.icd"), **assigned(variables)}) == []


def test_mesa_keeps_no_cache_on_windows(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, OCL_ICD_VENDORS=driver(tmp_path, "mesa"), RUSTICL_ENABLE="llvmpipe")
    state = built_in_layer("mesa", replace(environment, platform="win32")).state()
    assert (state.condition, state.why) == (Condition.ABSENT, "Mesa keeps no cache on Windows")


def test_another_home_than_the_accounts_is_said_to_matter_to_older_mesa(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, HOME="/else", OCL_ICD_VENDORS=driver(tmp_path, "mesa"))
    (found,) = built_in_layer("mesa", environment).diagnose()
    assert (found.code, found.fix) == ("variable", "export MESA_SHADER_CACHE_DIR=/else/.cache")
