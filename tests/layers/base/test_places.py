"""Where every cache is: our rule held against where the real library wrote, under odd environments."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

import pytest
from homes import Home
from support.layers import assigned, keys_of
from tiers import thorough

from cachectl.layers.core import Environment, user_cache_folder, user_state_folder
from cachectl.layers.core.registry import built_in_layer

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
    layers = [built_in_layer(name, environment) for name in ("loopy", "pyopencl-invoker", "pyopencl", "pocl")]
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


@pytest.mark.parametrize("value", ["relative", "~/cache", " "])
def test_platformdirs_itself_answers_for_this_process(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name, author: f"/asked/{name}/{author}")
    here = Environment.here()
    assert user_cache_folder(here, "app") == (Path("/asked/app/app"), "platformdirs")
    elsewhere = here.with_variables({"HOME": "/elsewhere"})
    assert user_cache_folder(elsewhere, "app")[0] == Path("/elsewhere/.cache/app")


@pytest.mark.real
@pytest.mark.parametrize("home_variable", ["", None])
def test_an_empty_or_missing_home_is_taken_literally_by_pocl(home: Home, home_variable: str | None) -> None:
    variables = {name: value for name, value in home.variables.items() if name != "HOME"}
    if home_variable is not None:
        variables["HOME"] = home_variable
    root = built_in_layer("pocl", Environment(variables, home=home.path, cwd=home.path)).roots()[0].path
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
    layer = built_in_layer("pocl", home.environment(POCL_CACHE_DIR=""))
    assert layer.roots() == ()
    assert "unset it" in layer.state().why
    assert home.python("devices.py", POCL_CACHE_DIR="")["devices"] == 0


#: Of a layer, or the folder of the user's state, on a platform: its variables, and the place, if there is one.
PLACES: dict[tuple[str, str], dict[str, str | None]] = {
    ("loopy", "darwin"): {
        "HOME=/u": "/u/Library/Caches/pytools",
        "HOME=/u XDG_CACHE_HOME=/x": "/x/pytools",
        "HOME=/u XDG_CACHE_HOME=relative": "/here/relative/pytools",
        # pytools tests for None only: an empty value gives a path relative to where the program runs.
        "HOME=/u XDG_CACHE_HOME=": "/here/pytools",
    },
    ("loopy", "win32"): {
        "LOCALAPPDATA=C:/L": "C:/L/pytools/pytools/Cache",
        "LOCALAPPDATA=C:/L WIN_PD_OVERRIDE_LOCAL_APPDATA=D:/O": "D:/O/pytools/pytools/Cache",
    },
    ("cuda", "linux"): {
        "HOME=/u": "/u/.nv/ComputeCache",
        "HOME=/u CUDA_CACHE_PATH=/fast": "/fast",
        "HOME=/u CUDA_CACHE_PATH=relative": None,
        "HOME=/u CUDA_CACHE_PATH=": None,
        "": None,
    },
    ("cuda", "win32"): {"APPDATA=C:/R": "C:/R/NVIDIA/ComputeCache"},
    ("pocl", "win32"): {"LOCALAPPDATA=C:/L": "C:/L/pocl", "TEMP=C:/T": "C:/T/pocl", "": None},
    ("comgr", "linux"): {"LOCALAPPDATA=/l": "/account/.cache/comgr"},
    ("comgr", "darwin"): {"LOCALAPPDATA=/l": None},
    ("comgr", "win32"): {"LOCALAPPDATA=/l": "/l/comgr"},
    ("neo", "linux"): {"LOCALAPPDATA=/l": None},
    ("neo", "darwin"): {"LOCALAPPDATA=/l": None},
    ("neo", "win32"): {"LOCALAPPDATA=/l": "/l/NEO/neo_compiler_cache"},
    ("mesa", "win32"): {"LOCALAPPDATA=/l": None},
    ("state", "linux"): {
        "HOME=/h": "/h/.local/state/cachectl",
        "HOME=/h XDG_CACHE_HOME=/moved": "/h/.local/state/cachectl",
        "HOME=/h XDG_STATE_HOME=relative": "/h/.local/state/cachectl",
        "HOME=/h XDG_STATE_HOME=/state": "/state/cachectl",
    },
}


@pytest.mark.parametrize(
    ("where", "variables", "path"), [(where, *row) for where, rows in PLACES.items() for row in rows.items()]
)
def test_a_place_follows_from_the_environment(where: tuple[str, str], variables: str, path: str | None) -> None:
    name, platform = where
    environment = Environment(assigned(variables), Path("/account"), platform, cwd=Path("/here"))
    if name == "state":
        places = [user_state_folder(environment)]
    else:
        places = [root.path for root in built_in_layer(name, environment).roots()]
    assert places == ([] if path is None else [Path(path)])
