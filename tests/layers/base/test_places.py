"""Where every cache is: our rule held against where the real library wrote, under odd environments."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import Any

import pytest
from homes import Home
from support.layers import assigned, keys_of
from tiers import thorough

from cachectl.layers.comgr import ComgrCache
from cachectl.layers.core.environment import Environment, user_cache_folder, user_state_folder
from cachectl.layers.core.layer import Layer
from cachectl.layers.cuda import CudaComputeCache
from cachectl.layers.mesa.cache import MesaShaderCache
from cachectl.layers.neo import NeoCompilerCache
from cachectl.layers.pocl import PoclKernels
from cachectl.layers.pyopencl import PyOpenCLBinaries, PyOpenCLInvoker
from cachectl.layers.pytools import LoopyDictionaries

OVERRIDE = "WIN_PD_OVERRIDE_LOCAL_APPDATA"


def pytools(environment: Environment) -> Path:
    return user_cache_folder(environment, "pytools")[0]


ODD = [
    "XDG_CACHE_HOME={home}/moved POCL_CACHE_DIR='{home}/pocl here'",
    *thorough(
        *("", "XDG_CACHE_HOME={home}/moved", "XDG_CACHE_HOME=", "XDG_CACHE_HOME=relative/cache"),
        *("POCL_CACHE_DIR='{home}/pocl here'", "POCL_CACHE_DIR=pocl-there"),
        *("POCL_KERNEL_CACHE=0", "POCL_KERNEL_CACHE=true"),
    ),
]


@pytest.mark.real
@pytest.mark.parametrize("odd", ODD)
def test_every_library_writes_where_we_say(home: Home, odd: str) -> None:
    changes = assigned(odd.format(home=home.path))
    environment = home.environment(**changes)
    layers = [layer(environment) for layer in (LoopyDictionaries, PyOpenCLInvoker, PyOpenCLBinaries, PoclKernels)]
    before = set(home.path.rglob("*"))
    home.python("kernels.py 1", **changes)
    home.python("binaries.py 1", **changes)
    written = [path for path in home.path.rglob("*") if path.is_file() and path not in before]
    for layer in layers:
        assert any(root.path in path.parents for root in layer.roots() for path in written), layer.roots()
    roots = [root.path for layer in layers for root in layer.roots()]
    assert [path for path in written if not any(root in path.parents for root in roots)] == []
    assert [len(keys_of(layer)) for layer in layers] == [5, 2, 1, 0 if "POCL_KERNEL_CACHE" in changes else 2]


@pytest.mark.real
@pytest.mark.parametrize("home_variable", ["", "relative/home"])
def test_an_odd_home_is_what_platformdirs_makes_of_it(home: Home, home_variable: str) -> None:
    # Asked without writing: the folder is the tester's own.
    asked = home.python("user_cache.py", HOME=home_variable)["path"]
    account = Path(pwd.getpwuid(os.getuid()).pw_dir)
    installed = home.environment().installed
    environment = Environment({"HOME": home_variable}, home=account, cwd=home.path, installed=installed)
    assert user_cache_folder(environment, "pytools")[0] == home.path / asked


RECORDED = json.loads((Path(__file__).parents[2] / "data/platformdirs.json").read_text())


@pytest.mark.parametrize("release", RECORDED[0][2])
def test_the_rule_for_other_environments_is_that_of_the_installed_platformdirs(release: str) -> None:
    for platform, variables, answers in RECORDED:
        given = {name: value for name, value in variables.items() if value is not None}
        environment = Environment(given, Path("/account"), platform, cwd=Path("/here"), installed=lambda _: release)
        folder, source = user_cache_folder(environment, "app")
        assert folder in (Path(answers[release]), Path("/here", answers[release])), given
        assert ("is ignored" in source) == ("XDG_CACHE_HOME" in given and "/.cache/" in str(folder))


@pytest.mark.real
@pytest.mark.parametrize("home_variable", ["", None])
def test_an_empty_or_missing_home_is_taken_literally_by_pocl(home: Home, home_variable: str | None) -> None:
    variables = {name: value for name, value in home.variables.items() if name != "HOME"}
    if home_variable is not None:
        variables["HOME"] = home_variable
    root = PoclKernels(Environment(variables, home=home.path, cwd=home.path)).roots()[0].path
    made = [folder for folder in (root, *root.parents) if not folder.exists()]
    before = set(root.iterdir()) if root.exists() else set()
    try:
        devices = type(home)(home.path, variables).python("devices.py")["devices"]
        # Where this user may not write, PoCL finds no device at all: the dossier's own words for it.
        assert devices == 0 or set(root.iterdir()) - before
    finally:
        for leaked in set(root.glob("tempfile_??????")) - before:
            leaked.unlink()
        for folder in made:
            if folder.exists():
                folder.rmdir()


@pytest.mark.real
def test_an_empty_pocl_cache_dir_leaves_pocl_without_a_device(home: Home) -> None:
    layer = PoclKernels(home.environment(POCL_CACHE_DIR=""))
    assert layer.roots() == ()
    assert "unset it" in layer.state().why
    assert home.python("devices.py", POCL_CACHE_DIR="")["devices"] == 0


#: A layer, or a function that returns a folder; the platform; its variables; and the place, if there is one.
PLACES: list[tuple[Any, str, str, str | None]] = [
    (pytools, "darwin", "HOME=/u", "/u/Library/Caches/pytools"),
    (pytools, "darwin", "HOME=/u XDG_CACHE_HOME=/x", "/x/pytools"),
    (pytools, "darwin", "HOME=/u XDG_CACHE_HOME=relative", "/here/relative/pytools"),
    # pytools tests for None only: an empty value gives a path relative to where the program runs.
    (pytools, "darwin", "HOME=/u XDG_CACHE_HOME=", "/here/pytools"),
    (pytools, "win32", "LOCALAPPDATA=C:/L", "C:/L/pytools/pytools/Cache"),
    (pytools, "win32", f"LOCALAPPDATA=C:/L {OVERRIDE}=D:/O", "D:/O/pytools/pytools/Cache"),
    (CudaComputeCache, "linux", "HOME=/u", "/u/.nv/ComputeCache"),
    (CudaComputeCache, "linux", "HOME=/u CUDA_CACHE_PATH=/fast", "/fast"),
    (CudaComputeCache, "linux", "HOME=/u CUDA_CACHE_PATH=relative", None),
    (CudaComputeCache, "linux", "HOME=/u CUDA_CACHE_PATH=", None),
    (CudaComputeCache, "linux", "", None),
    (CudaComputeCache, "win32", "APPDATA=C:/R", "C:/R/NVIDIA/ComputeCache"),
    (PoclKernels, "win32", "LOCALAPPDATA=C:/L", "C:/L/pocl"),
    (PoclKernels, "win32", "TEMP=C:/T", "C:/T/pocl"),
    (PoclKernels, "win32", "", None),
    (ComgrCache, "linux", "LOCALAPPDATA=/l", "/account/.cache/comgr"),
    (ComgrCache, "darwin", "LOCALAPPDATA=/l", None),
    (ComgrCache, "win32", "LOCALAPPDATA=/l", "/l/comgr"),
    (NeoCompilerCache, "linux", "LOCALAPPDATA=/l", None),
    (NeoCompilerCache, "darwin", "LOCALAPPDATA=/l", None),
    (NeoCompilerCache, "win32", "LOCALAPPDATA=/l", "/l/NEO/neo_compiler_cache"),
    (MesaShaderCache, "win32", "LOCALAPPDATA=/l", None),
    (user_state_folder, "linux", "HOME=/h", "/h/.local/state/cachectl"),
    (user_state_folder, "linux", "HOME=/h XDG_CACHE_HOME=/moved", "/h/.local/state/cachectl"),
    (user_state_folder, "linux", "HOME=/h XDG_STATE_HOME=relative", "/h/.local/state/cachectl"),
    (user_state_folder, "linux", "HOME=/h XDG_STATE_HOME=/state", "/state/cachectl"),
]


@pytest.mark.parametrize(("what", "platform", "variables", "path"), PLACES)
def test_a_place_follows_from_the_environment(
    what: Any,  # noqa: ANN401 - a class, or a function
    platform: str,
    variables: str,
    path: str | None,
) -> None:
    environment = Environment(assigned(variables), Path("/account"), platform, cwd=Path("/here"))
    answer = what(environment)
    places = [root.path for root in answer.roots()] if isinstance(answer, Layer) else [answer]
    assert places == ([] if path is None else [Path(path)])
