"""The place of every cache: our rule compared with where the real library wrote, in unusual environments."""

import json
import sys
from pathlib import Path

import pytest
from homes import PROGRAMS, Home
from support.layers import assigned, keys_of
from tiers import as_root, real, thorough, thorough_only

from cachectl.layers.base.environment import Environment, user_cache_folder, user_state_folder
from cachectl.layers.registry import built_in_layer

ODD = [
    "XDG_CACHE_HOME={home}/moved POCL_CACHE_DIR='{home}/pocl here'",
    *thorough(
        *("", "XDG_CACHE_HOME={home}/moved", "XDG_CACHE_HOME=", "XDG_CACHE_HOME=relative/cache"),
        *("POCL_CACHE_DIR='{home}/pocl here'", "POCL_CACHE_DIR=pocl-there"),
        *("POCL_KERNEL_CACHE=0", "POCL_KERNEL_CACHE=true"),
    ),
]


@real
@pytest.mark.parametrize("odd", ODD)
@thorough_only
def test_every_library_writes_where_we_say(home: Home, odd: str) -> None:
    changes = assigned(odd.format(home=home.path))
    environment = home.environment(**changes)
    layers = [built_in_layer(name, environment) for name in ("loopy", "pyopencl-invoker", "pyopencl", "pocl")]
    before = set(home.path.rglob("*"))
    home.python("thirteen.py 1 1 plain", **changes)
    written = [path for path in home.path.rglob("*") if path.is_file() and path not in before]
    for layer in layers:
        assert any(root.path in path.parents for root in layer.roots() for path in written), layer.roots()
    roots = [root.path for layer in layers for root in layer.roots()]
    assert [path for path in written if not any(root in path.parents for root in roots)] == []
    assert [len(keys_of(layer)) for layer in layers] == [5, 2, 1, 0 if "POCL_KERNEL_CACHE" in changes else 2]


RECORDED = json.loads((Path(__file__).parents[2] / "data/platformdirs.json").read_text())


@pytest.mark.parametrize("release", RECORDED[0][2])
def test_the_rule_for_other_environments_is_that_of_the_installed_platformdirs(release: str) -> None:
    for platform, variables, answers in RECORDED:
        given = {name: value for name, value in variables.items() if value is not None}
        environment = Environment(given, Path("/account"), platform, cwd=Path("/here"), installed=lambda _: release)
        folder, source = user_cache_folder(environment, "app")
        assert folder in (Path(answers[release]), Path("/here", answers[release])), given
        assert ("is ignored" in source) == ("XDG_CACHE_HOME" in given and "/.cache/" in str(folder))


#: Runs a program in a temporary copy of the root folder: without a home, PoCL uses folders of the system.
OVER_A_COPY = """
mount -t tmpfs tmpfs "$0" && mkdir "$0/new" "$0/work" "$0/copy" &&
mount -t overlay -o "lowerdir=/,upperdir=$0/new,workdir=$0/work" overlay "$0/copy" &&
for folder in proc dev; do mount --rbind "/$folder" "$0/copy/$folder" || exit; done
cd / && exec chroot "$0/copy" "$@"
"""


@real
@as_root
@pytest.mark.environment
@pytest.mark.parametrize("home_variable", ["", None])
def test_an_empty_or_missing_home_is_taken_literally_by_pocl(
    home: Home, tmp_path: Path, home_variable: str | None
) -> None:
    variables = {name: value for name, value in home.variables.items() if name != "HOME"}
    if home_variable is not None:
        variables["HOME"] = home_variable
    environment = Environment(variables, home=home.path, cwd=home.path)
    root = str(built_in_layer("pocl", environment).roots()[0].path)
    (tmp_path / "copy").mkdir()
    over = ("unshare", "--mount", "sh", "-c", OVER_A_COPY, str(tmp_path / "copy"), "env", "--chdir=/")
    there = type(home)(home.path, variables)
    if there.run(*over, sys.executable, "-c", "import pyopencl", check=False).returncode:
        pytest.skip("this system cannot make such a copy, or the copy lacks the folder of this Python")
    listing = 'rm -rf "$1"; "$0" "$2" >"$3" || exit; cat "$3"; ls -A "$1"'
    program = str(PROGRAMS / "devices.py")
    done = there.run(*over, "sh", "-c", listing, sys.executable, root, program, "/answer")
    answer, _, listed = done.stdout.partition("\n")
    # If this user cannot write to the place, PoCL finds no device.
    assert json.loads(answer)["devices"] == 0 or listed


@real
def test_an_empty_pocl_cache_dir_leaves_pocl_without_a_device(home: Home) -> None:
    layer = built_in_layer("pocl", home.environment(POCL_CACHE_DIR=""))
    assert layer.roots() == ()
    assert "unset it" in layer.state().why
    program = home.run(sys.executable, str(PROGRAMS / "devices.py"), check=False, POCL_CACHE_DIR="")
    # A build with assertions, like Debian's, ends the program.
    assert "cache_topdir" in program.stderr if program.returncode else json.loads(program.stdout)["devices"] == 0


#: The folders of MIOpen's kernels and tuning in a home.
MIOPEN = {"miopen": ".cache/miopen", "miopen-tuning": ".config/miopen"}


def in_miopen(folder: str) -> dict[str, str]:
    """Return where MIOpen keeps kernels or tuning; its fallbacks are in the temporary folder."""
    newer, older = (f"/spare/{folder} (MIOpen 3.5's fallback (", "/spare (the fallback of MIOpen up to 3.3 (")
    reason = "where the home is on a network file system))"
    both = f"/h/{folder} (default); {newer}{reason}; {older}{reason}"
    return {
        "HOME=/h MIOPEN_CUSTOM_CACHE_DIR= MIOPEN_USER_DB_PATH=": both,
        "HOME=/h TMPDIR=/scratch XDG_CACHE_HOME=/x": both.replace("/spare", "/scratch"),
        **dict.fromkeys(
            ("", "HOME=", "HOME=/"), "; ".join(f"{one}HOME is not set, empty or /))" for one in (newer, older))
        ),
        "HOME=/spare": f"/spare/{folder} (default); {older}{reason}",
        "HOME=/h MIOPEN_CUSTOM_CACHE_DIR=~/c MIOPEN_USER_DB_PATH=c": (
            "/h/c (MIOPEN_CUSTOM_CACHE_DIR)" if "cache" in folder else "/here/c (MIOPEN_USER_DB_PATH)"
        ),
        "MIOPEN_CUSTOM_CACHE_DIR=~/c MIOPEN_USER_DB_PATH=/c/~": (
            "/spare/c (MIOPEN_CUSTOM_CACHE_DIR)" if "cache" in folder else "/c/spare (MIOPEN_USER_DB_PATH)"
        ),
    }


#: For a layer, or the folder of the user's state, on a platform: the variables, and the places with their reasons.
PLACES = {
    ("loopy", "darwin"): {
        "HOME=/h": "/h/Library/Caches/pytools (default)",
        "HOME=/h XDG_CACHE_HOME=/x": "/x/pytools (XDG_CACHE_HOME)",
        "HOME=/h XDG_CACHE_HOME=x": "/here/x/pytools (XDG_CACHE_HOME)",
        # pytools only tests for None: an empty value gives a path relative to the working directory.
        "HOME=/h XDG_CACHE_HOME=": "/here/pytools (XDG_CACHE_HOME)",
    },
    ("loopy", "win32"): {
        "LOCALAPPDATA=C:/L": "C:/L/pytools/pytools/Cache (LOCALAPPDATA)",
        "LOCALAPPDATA=/l WIN_PD_OVERRIDE_LOCAL_APPDATA=D:/": "D:/pytools/pytools/Cache (WIN_PD_OVERRIDE_LOCAL_APPDATA)",
    },
    ("cuda", "linux"): {
        "HOME=/h": "/h/.nv/ComputeCache (default (HOME))",
        "HOME=/h CUDA_CACHE_PATH=/fast": "/fast (CUDA_CACHE_PATH)",
        "HOME=/h CUDA_CACHE_PATH=relative": "",
        "HOME=/h CUDA_CACHE_PATH=": "",
        "": "",
    },
    ("cuda", "win32"): {"APPDATA=C:/R": "C:/R/NVIDIA/ComputeCache (APPDATA)"},
    ("pocl", "win32"): {"LOCALAPPDATA=C:/L": "C:/L/pocl (LOCALAPPDATA)", "TEMP=C:/T": "C:/T/pocl (TEMP)", "": ""},
    ("comgr", "linux"): {
        "LOCALAPPDATA=/l": "/account/.cache/comgr (default (the account's home))",
        "HOME=/h": "/h/.cache/comgr (default (HOME))",
        "HOME=/h XDG_CACHE_HOME=/x": "/x/comgr (XDG_CACHE_HOME)",
        "HOME=/h XDG_CACHE_HOME=": "/here/comgr (XDG_CACHE_HOME)",
        "HOME=/h XDG_CACHE_HOME=x": "/here/x/comgr (XDG_CACHE_HOME)",
        "HOME=": "/here/.cache/comgr (default (HOME))",
        "HOME=/h AMD_COMGR_CACHE_DIR=/n XDG_CACHE_HOME=/x": "/n (AMD_COMGR_CACHE_DIR)",
        "HOME=/h AMD_COMGR_CACHE_DIR=n": "/here/n (AMD_COMGR_CACHE_DIR)",
        "HOME=/h AMD_COMGR_CACHE_DIR=": "/h/.cache/comgr (default (HOME))",
    },
    ("comgr", "darwin"): {"LOCALAPPDATA=/l": ""},
    ("comgr", "win32"): {"LOCALAPPDATA=/l": "/l/comgr (LOCALAPPDATA)"},
    ("neo", "linux"): {
        "LOCALAPPDATA=/l": "",
        "HOME=": "",
        "HOME=/h": "/h/.cache/neo_compiler_cache (default (HOME))",
        "HOME=/h XDG_CACHE_HOME=": "/h/.cache/neo_compiler_cache (default (HOME))",
        "HOME=/h XDG_CACHE_HOME=/x": "/x/neo_compiler_cache (XDG_CACHE_HOME)",
        "HOME=/h XDG_CACHE_HOME=x": "/here/x/neo_compiler_cache (XDG_CACHE_HOME)",
        "HOME=/h NEO_CACHE_DIR=/n": "/n (NEO_CACHE_DIR)",
        "HOME=/h NEO_CACHE_DIR=n XDG_CACHE_HOME=/x": "/here/n (NEO_CACHE_DIR)",
        "HOME=/h NEO_CACHE_DIR=": "/h/.cache/neo_compiler_cache (default (HOME))",
    },
    ("neo", "darwin"): {"LOCALAPPDATA=/l": ""},
    ("neo", "win32"): {"LOCALAPPDATA=/l": "/l/NEO/neo_compiler_cache (LOCALAPPDATA)"},
    # Mesa has three roots in each folder.
    ("mesa", "linux"): {
        "MESA_SHADER_CACHE_DIR=/m XDG_CACHE_HOME=/x": "/m (MESA_SHADER_CACHE_DIR)",
        "MESA_GLSL_CACHE_DIR=/g XDG_CACHE_HOME=/x": "/g (MESA_GLSL_CACHE_DIR)",
        "MESA_GLSL_CACHE_DIR=/g MESA_SHADER_CACHE_DIR=/m": "/m (MESA_SHADER_CACHE_DIR)",
        "HOME=/h XDG_CACHE_HOME=/x": "/x (XDG_CACHE_HOME)",
        "HOME=/h XDG_CACHE_HOME=x": "/here/x (XDG_CACHE_HOME)",
        "HOME=/account": "/account/.cache (default (home folder))",
        "HOME=/h": "/h/.cache (default (HOME)); /account/.cache (default of older Mesa (account))",
        "XDG_CACHE_HOME=": "",
        "MESA_SHADER_CACHE_DIR=": "",
    },
    ("mesa", "win32"): {"LOCALAPPDATA=/l": ""},
    **{(layer, "linux"): in_miopen(folder) for layer, folder in MIOPEN.items()},
    ("miopen", "win32"): {"USERPROFILE=/profile": "/profile/.miopen/cache (default (USERPROFILE))"},
    ("miopen-tuning", "win32"): {"USERPROFILE=/profile": "/profile/.miopen/db (default (USERPROFILE))"},
    ("miopen-system", "linux"): {"HOME=/h MIOPEN_SYSTEM_DB_PATH=~/db": "/h/db (MIOPEN_SYSTEM_DB_PATH)"},
    ("miopen-system-tuning", "linux"): {
        "HOME=/h MIOPEN_SYSTEM_DB_PATH=~/db": "/here/~/db (MIOPEN_SYSTEM_DB_PATH (its ~ is taken literally))"
    },
    ("state", "linux"): {
        "HOME=/h XDG_CACHE_HOME=/moved": "/h/.local/state/cachectl",
        "HOME=/h XDG_STATE_HOME=relative": "/h/.local/state/cachectl",
        "HOME=/h XDG_STATE_HOME=/state": "/state/cachectl",
    },
}


@pytest.mark.parametrize(
    ("where", "variables", "places"), [(where, *row) for where, rows in PLACES.items() for row in rows.items()]
)
def test_places_follow_from_the_environment(where: tuple[str, str], variables: str, places: str) -> None:
    name, platform = where
    environment = Environment(
        assigned(variables), Path("/account"), platform, cwd=Path("/here"), temporary=Path("/spare")
    )
    if name == "state":
        assert str(user_state_folder(environment)) == places
        return
    roots = built_in_layer(name, environment).roots()
    found = [f"{root.path.parent if name == 'mesa' else root.path} ({root.source})" for root in roots]
    assert found == [place for place in places.split("; ") if place for _ in range(3 if name == "mesa" else 1)]
