"""The interpreters of a user: each is asked once, remembered, and looked for again after it was removed."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from homes import Home
from support.dictionaries import NONE, dictionary
from support.layers import write
from tiers import NOBODY, as_root, real

from cachectl.layers.core import Environment, user_state_folder
from cachectl.layers.host.pythons import RECORD, Python, PythonRecord, candidates, look
from cachectl.stack import Stack

VERSION = ".".join(map(str, sys.version_info))
SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def installs(prefix: Path, **packages: str) -> None:
    """Lay out the metadata of packages in place of all that a prefix has, as pip does."""
    shutil.rmtree(prefix / SITE)
    for name, version in packages.items():
        folder = prefix / SITE / f"{name}-{version}.dist-info"
        write(folder / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


#: What is installed where nothing else is said.
PACKAGES = {"loopy": "2024.1", "pytools": "2026.1.1", "islpy": "2024.2", "cgen": "2020.1"}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Return the folder of a virtual environment of this Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    installs(tmp_path / "venv", **PACKAGES)
    return tmp_path / "venv"


def row(home: Home, loopy: str, version: str = VERSION) -> None:
    """Make a dictionary with one row, as a loopy of this version names it under a Python of a version."""
    name = f"pdict-v5-loopy-schedule-cache-v4-{loopy}-islpy2024.2-cgen2020.1-v2-{version}.sqlite"
    dictionary(home.path / ".cache/pytools" / name, {"0" * 16: NONE})


def user(home: Home, *folders: Path, **changes: str) -> Environment:
    """Return the environment of a user whose own Python has no loopy, with these folders on PATH."""
    variables = {"PATH": os.pathsep.join(map(str, folders)), "VIRTUAL_ENV": "", "CONDA_PREFIX": "", **changes}
    environment = home.environment(**variables)
    return environment._replace(searches_pythons=True, installed=lambda _: None, site=())


def asked(path: Path, records: dict[str, PythonRecord], *, named: bool = True) -> Python:
    python = look(path, records, named=named)
    assert python is not None
    return python


def staleness(environment: Environment) -> dict[str, tuple[bool | None, str | None]]:
    """Return whether the rows of each version of loopy are stale, and why."""
    entries = Stack(environment).ls(layers=["loopy"]).entries
    return {str(entry.versions["loopy"]): (entry.stale, entry.stale_because) for entry in entries}


def test_an_interpreter_is_asked_once_for_its_version_and_packages_and_remembered(prefix: Path) -> None:
    records: dict[str, PythonRecord] = {}
    counting = prefix / "bin/counting"
    counting.write_text(f'#!/bin/sh\necho started >> {prefix}/starts\nexec {prefix}/bin/python "$@"\n')
    counting.chmod(0o755)

    def starts() -> int:
        return (prefix / "starts").read_text().count("started")

    for _ in range(2):
        python = asked(counting, records)
        assert (python.version, python.installed("loopy"), starts()) == (VERSION, "2024.1", 1)
    # Packages are read again without it.
    installs(prefix, loopy="2025.2")
    python = asked(counting, records)
    assert (python.installed("loopy"), python.installed("pytools"), starts()) == ("2025.2", None, 1)
    assert python.has_had("loopy", "2024.1")
    os.utime(counting, (1, 1))
    # Without a user who names it, it is a script that another user could replace.
    assert (asked(counting, records, named=False).present, starts()) == (None, 1)
    asked(counting, records)
    assert starts() == 2
    before = dict(records)
    counting.write_text("#!/bin/sh\nexit 1\n")
    python = asked(counting, records)
    assert (python.present, python.version, records) == (None, VERSION, before)


def test_code_in_a_folder_of_packages_is_not_run(prefix: Path, tmp_path: Path) -> None:
    """Others may have written it there, as in an environment that a group shares."""
    run = tmp_path / "run"
    for name in ("by.pth", "sitecustomize.py", "usercustomize.py"):
        (prefix / SITE / name).write_text(f"import os; open({str(run)!r}, 'a').close()\n")
    (prefix / SITE).chmod(0o777)
    assert asked(prefix / "bin/python", {}, named=False).installed("loopy") == "2024.1"
    assert not run.exists()
    # It is run by whoever starts the interpreter otherwise.
    subprocess.run([prefix / "bin/python", "-I", "-c", ""], check=True)
    assert run.exists()


@pytest.mark.parametrize("where", ["{}.pth", "{}.egg-info", "{}.dist-info/METADATA", "{}.egg-info/PKG-INFO"])
def test_pipes_and_devices_among_packages_are_unread(prefix: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Others may have put it there; a line of the device has no end."""
    pipe, device = (prefix / SITE / where.format(name) for name in ("pipe", "device"))
    for path in (pipe, device):
        path.parent.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    monkeypatch.setattr("cachectl.layers.host.pythons._SECONDS", 5.0)
    assert asked(prefix / "bin/python", {}, named=False).installed("loopy") == "2024.1"


@pytest.mark.parametrize("base", dict.fromkeys([os.path.realpath(sys.executable), "/usr/bin/python3"]))
@pytest.mark.parametrize("options", [None, [], ["--system-site-packages"]])
def test_folders_of_packages_are_those_on_its_path(tmp_path: Path, base: str, options: list[str] | None) -> None:
    python = Path(base)
    if options is not None:
        made = [base, "-m", "venv", "--without-pip", *options, str(tmp_path / "venv")]
        if not python.exists() or subprocess.run(made, check=False).returncode:
            pytest.skip(f"needs {base} with its module venv")
        python = tmp_path / "venv/bin/python"
        (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
        for name in ("named", "commented"):
            (tmp_path / name / "site-packages").mkdir(parents=True)
        lines = "{0}/named/site-packages;{0}/not there/site-packages;../elsewhere;;#{0}/commented/site-packages"
        (site / "parent.pth").write_text(lines.replace(";", "\n").format(tmp_path))
    records: dict[str, PythonRecord] = {}
    asked(python, records)
    folders = [os.path.normpath(folder) for folder in records[str(python)].folders if os.path.isdir(folder)]
    # Without -I, the user's own packages count.
    ask = "import json, sys; print(json.dumps(sys.path))"
    started = {"HOME": os.environ["HOME"], "PATH": ""}
    path = json.loads(subprocess.check_output([python, "-c", ask], env=started, cwd="/"))
    assert folders == [os.path.normpath(folder) for folder in path if folder.endswith("-packages")]


#: What is below the folder of a Python and of a virtual environment of it.
PARTS = ("", "bin", "base/bin", "base/lib/python3.11", "base/lib64/python3.11", "pyvenv.cfg")


@pytest.mark.parametrize("planted", [None, "script", pytest.param("link", marks=as_root), *PARTS])
@pytest.mark.parametrize("variable", ["PATH", "VIRTUAL_ENV"])
def test_what_others_can_replace_is_not_started(planted: str | None, variable: str, tmp_path: Path) -> None:
    """Nor a program whose modules they can replace, nor one behind a link that they could lead elsewhere."""
    # Others cannot enter the folder of a test.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in PARTS:
            (folder / part).mkdir(parents=True, exist_ok=True)
            (folder / part).chmod(0o755)
        (folder / "pyvenv.cfg").rmdir()
        (folder / "pyvenv.cfg").touch()
        real = Path(shutil.copy(sys.executable, folder / "base/bin/python3.11"))
        program = folder / "bin/python3.11"
        program.symlink_to(folder / "middle")
        (folder / "middle").symlink_to(real)
        if planted == "script":
            real.write_text("#!/bin/sh\n")
        elif planted == "link":
            os.lchown(folder / "middle", NOBODY, NOBODY)
        elif planted is not None:
            (folder / planted).chmod(0o777)
        named = folder if variable == "VIRTUAL_ENV" else f"relative:{tmp_path}:{program.parent}"
        assert list(candidates({variable: str(named)})) == ([program] if planted is None else [])


@pytest.mark.parametrize(
    "script", ["exec yes", "exec head -c 10000000 /dev/zero", "sleep 100 & echo x", "kill -STOP $$", "echo hello"]
)
def test_a_program_that_is_no_python_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr("cachectl.layers.host.pythons._SECONDS", 0.3)
    records, started = dict[str, PythonRecord](), time.monotonic()
    broken = write(tmp_path / "python3", f"#!/bin/sh\n{script}\n")
    broken.chmod(0o755)
    assert look(broken, records, named=True) is None
    assert time.monotonic() - started < 5
    # It is not started again.
    broken.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    os.utime(broken, ns=(0, records[str(broken)].time))
    records[str(broken)] = records[str(broken)]._replace(size=broken.stat().st_size)
    assert look(broken, records) is None
    assert not (tmp_path / "started").exists()
    # Only the user may know that it answers now.
    monkeypatch.undo()
    broken.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    assert look(broken, records, named=True) is not None


#: What happens to a Python that was looked for, and whether its rows are stale then, with words of the reason.
CHANGES: list[tuple[str, bool | None, str]] = [
    ("nothing", False, "None"),
    ("package replaced", True, "written with loopy 2024.1, 2025.2 is installed"),
    ("removed", True, "was removed"),
    ("upgraded", True, "was removed"),
    # Machines with one home may each have a Python of one path and version, with packages of their own.
    ("not mounted", None, "is not mounted"),
    ("base not mounted", None, "unknown"),
    ("another machine", None, "unknown"),
]


@pytest.mark.parametrize(("change", "stale", "because"), CHANGES)
def test_rows_are_stale_only_if_a_known_python_made_them_and_none_can_hit_them(
    home: Home, prefix: Path, change: str, stale: bool | None, because: str
) -> None:
    """The Python is remembered, and need not be on PATH again."""
    version = "3.11.0.final.0" if change == "upgraded" else VERSION
    row(home, "2024.1", version)
    # Nobody has seen this version of loopy.
    row(home, "2023.1", version)
    environment = user(home, prefix / "bin")
    before = {whether for whether, _ in staleness(environment).values()}
    assert before == ({None} if change == "upgraded" else {False, None})
    moved = {"not mounted": [0], "base not mounted": [1], "another machine": [0, 1]}.get(change, [])
    file = user_state_folder(environment) / RECORD
    document = json.loads(file.read_text())
    for record in document["pythons"].values():
        record["places"] = [f"{place}0" if i in moved else place for i, place in enumerate(record["places"])]
        if change == "upgraded" and "2024.1" in record["seen"].get("loopy", ()):
            record.update(version=version, size=1)
    file.write_text(json.dumps(document))
    if change in ("removed", "not mounted"):
        shutil.rmtree(prefix)
    elif change in ("package replaced", "another machine"):
        installs(prefix, **PACKAGES | {"loopy": "2025.2"})
    elif change == "base not mounted":
        (prefix / "bin/python").unlink()
        (prefix / "bin/python").symlink_to(prefix.parent / "modules/python")
    found = staleness(user(home, *[prefix / "bin"] * (change == "upgraded")))
    assert {name: whether for name, (whether, _) in found.items()} == {"2024.1": stale, "2023.1": None}
    assert because in str(found["2024.1"][1])


def test_named_pythons_are_all_there_are(home: Home, prefix: Path) -> None:
    row(home, "2023.1")
    named = user(home)._replace(python_paths=(prefix / "bin/python",))
    assert staleness(named) == {"2023.1": (True, "written with loopy 2023.1, 2024.1 is installed")}


def test_a_damaged_record_is_written_again(home: Home, prefix: Path) -> None:
    row(home, "2024.1")
    file = user_state_folder(home.environment()) / RECORD
    for content in ("", "{", '{"pythons": {"/x": {"version": 3}}}', '{"pythons": []}', "[]", "\0" * 512):
        write(file, content)
        assert staleness(user(home, prefix / "bin")) == {"2024.1": (False, None)}
        assert str(prefix / "bin/python") in json.loads(file.read_text())["pythons"]


def test_the_sums_of_each_python(home: Home, prefix: Path) -> None:
    row(home, "2024.1", "3.99.0.final.0")
    row(home, "2024.1")
    shares = Stack(user(home, prefix / "bin")).report(by="python").pythons or ()
    assert sorted((share.python, share.packages["loopy"], share.entries) for share in shares) == [
        (VERSION, "2024.1", 1),
        ("3.99.0.final.0", "2024.1", 1),
    ]
    assert [prefix / "bin/python" in share.interpreters for share in shares if share.python == VERSION] == [True]
    assert "3.99.0" in home.cachectl("report --by python loopy").stdout


@real
def test_an_interpreter_is_listed_once(warm: Home) -> None:
    """The rows of loopy and of PyOpenCL have different packages, and one Python."""
    said = warm.cachectl("report --by python").stdout.splitlines()
    places = [line for line in said if ": Python 3." in line]
    assert len(places) == len({*places}) > 0


def test_a_relative_cache_home_is_where_each_platformdirs_puts_it(home: Home, prefix: Path) -> None:
    """Releases until 4.11.7 follow it, later ones do not."""
    installs(prefix, platformdirs="4.3.6")
    environment = user(home, prefix / "bin", XDG_CACHE_HOME="relative")._replace(
        installed=lambda name: "4.14.0" if name == "platformdirs" else None,
    )
    roots = {root.path: root.source for root in Stack(environment)["loopy"].roots()}
    assert list(roots) == [home.path / ".cache/pytools", home.path / "relative/pytools"]
    assert str(prefix / "bin") in list(roots.values())[1]
