"""The interpreters of a user: what their files show, and which entries are stale according to the record."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from homes import Home
from support.dictionaries import NONE, dictionary
from support.layers import write
from tiers import NOBODY, as_root, real, thorough

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.host.pythons import Python, candidates, look, named_pythons
from cachectl.layers.host.record import record_of
from cachectl.stack import Stack

VERSION = ".".join(map(str, sys.version_info))
SITE = "lib/python3.11/site-packages"
PACKAGES = {"loopy": "2024.1", "pytools": "2026.1.1", "islpy": "2024.2", "cgen": "2020.1"}
#: Prints the version of an interpreter, and those of all distributions that it imports.
ASK = """
import json, sys
from importlib import metadata
versions = {}
for found in metadata.distributions():
    versions.setdefault(found.metadata["Name"], found.version)
print(json.dumps([".".join(map(str, sys.version_info)), versions]))
"""


def install(site: Path, **packages: str) -> None:
    """Replace the contents of a folder by the metadata of packages, as pip writes it."""
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    for name, version in packages.items():
        write(
            site / f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )


def interpreter(prefix: Path, content: bytes = b"\x7fELF\0003.11.4\0", minor: str = "3.11", **packages: str) -> Path:
    """Lay out an installation like one of conda: a program with this content, and packages; return the program."""
    program = prefix / f"bin/python{minor}"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_bytes(content)
    program.chmod(0o755)
    install(prefix / f"lib/python{minor}/site-packages", **packages or PACKAGES)
    return program


def row(home: Home, loopy: str = "2024.1", version: str = "3.11.4.final.0") -> Path:
    """Make a dictionary with one row, named like one of these versions of loopy and Python."""
    name = f"pdict-v5-loopy-schedule-cache-v4-{loopy}-islpy2024.2-cgen2020.1-v2-{version}.sqlite"
    return dictionary(home.path / ".cache/pytools" / name, {"0" * 16: NONE})


def user(home: Home, *folders: Path, **changes: str) -> Environment:
    """Return the environment of a user whose own Python lacks loopy, with these folders on PATH."""
    variables = {"PATH": os.pathsep.join(map(str, folders)), "VIRTUAL_ENV": "", "CONDA_PREFIX": "", **changes}
    return home.environment(**variables)._replace(searches_pythons=True, installed=lambda _: None, site=())


def examined(path: Path, home: Home) -> Python:
    python = look(path, user(home))
    assert python is not None
    return python


def staleness(environment: Environment) -> dict[str, tuple[bool | None, str | None]]:
    """Return whether the rows of each version of loopy are stale, and why."""
    entries = Stack(environment).ls(layers=["loopy"]).entries
    return {str(entry.details.versions["loopy"]): (entry.stale, entry.stale_because) for entry in entries}


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("base", dict.fromkeys([os.path.realpath(sys.executable), "/usr/bin/python3"]))
@pytest.mark.parametrize(
    "options", [None, ["--copies", "nested"], *thorough([], ["--system-site-packages"], ["--copies"])]
)
def test_version_and_packages_are_what_the_interpreter_says(
    home: Home, tmp_path: Path, base: str, options: list[str] | None
) -> None:
    program = Path(base)
    for number, option in enumerate([] if options is None else options or [""]):
        folder = tmp_path / f"venv{number}"
        chosen = [option.replace("nested", "--copies")] if option else []
        made = (str(program), "-m", "venv", "--without-pip", *chosen, str(folder))
        if not program.exists() or subprocess.run(made, check=False).returncode:
            pytest.skip(f"needs {base} with its module venv")
        program = folder / "bin/python"
        (site,) = folder.glob("lib/python3*/site-packages")
        for name in ("named", "commented"):
            install(tmp_path / name, **{name: "1.0"})
        write(tmp_path / "editable/old.egg-info/PKG-INFO", "Metadata-Version: 1.0\nName: old\nVersion: 3.0\n")
        lines = f"{tmp_path}/named\n{tmp_path}/not there\n../elsewhere\n\n#{tmp_path}/commented\n{tmp_path}/editable\n"
        (site / "__editable__.pth").write_text(
            f"{lines}import sys; sys.path.append({str(tmp_path / 'commented')!r}) if 0 else 0\n"
        )
    own = home.path / f".local/lib/{program.resolve().name}/site-packages"
    install(own, mine="7.0")
    started = {"HOME": str(home.path), "PATH": ""}
    version, packages = json.loads(subprocess.check_output([program, "-c", ASK], env=started, cwd="/"))
    python = examined(program, home)
    assert (python.version, python.reason) == (version, None)
    names = {*packages, "named", "commented", "old", "mine", "pytest", "apt"}
    assert {name: python.installed(name) for name in names} == {name: packages.get(name) for name in names}


#: The strings of a program, and its version according to them.
STRINGS: list[tuple[bytes, str]] = [
    (b"\0003.11.2\0", "3.11.2.final.0"),
    (b"\0003.11.0rc2+\0", "3.11.0.candidate.2"),
    (b"\0003.11.0a10\0", "3.11.0.alpha.10"),
    (b"\0003.11.0b1\0", "3.11.0.beta.1"),
    # Linkers store a string as the end of a longer one.
    (b"\0/opt/versions/3.11.7\0", "3.11.7.final.0"),
    (b"\0/opt/versions/3.11.5\0/src/Python-3.11.6\0003.11.7\0", "3.11.7.final.0"),
    (b"\0/opt/versions/3.11.5\0/src/Python-3.11.7\0", ""),
    (b"\0003.11.5\0003.11.7\0", ""),
    (b"\00013.11.2\0001.3.11.2\0003.11.2.1\0003.12.1\0003.11\0", ""),
    (b"\0", ""),
    (b"", ""),
]


@pytest.mark.parametrize(("strings", "version"), STRINGS)
@pytest.mark.parametrize("layout", ["static", "shared", "copy", "renamed"])
def test_a_version_is_read_from_bytes_or_is_unknown(
    home: Home, tmp_path: Path, strings: bytes, version: str, layout: str
) -> None:
    base = tmp_path / "base"
    program = interpreter(base, strings, loopy="2024.1")
    if layout == "shared":
        # The name of the folder in which it was built is not its version.
        program.write_bytes(b"\x7fELF\0libpython3.11.so.1.0\0/src/Python-3.11.8\0")
        (base / "lib/libpython3.11.so.1.0").write_bytes(strings)
        # It does not load this one.
        (base / "lib/libpython3.11d.so.1.0").write_bytes(b"\0003.11.9\0")
    elif layout == "copy":
        install(tmp_path / "venv/lib/python3.11/site-packages", loopy="2024.1")
        # The file keeps the version of its creation.
        write(tmp_path / "venv/pyvenv.cfg", f"home = {base}/bin\nversion = 3.11.0\n")
        (tmp_path / "venv/bin").mkdir()
        program = Path(shutil.copy(program, tmp_path / "venv/bin/python"))
    elif layout == "renamed":
        program = program.rename(base / "bin/python")
    python = examined(program, home)
    assert (python.version, python.present) == (version, True if version else None)
    assert python.installed("loopy") == ("2024.1" if version else None)


def test_bytes_are_read_again_only_if_the_file_changed(home: Home, tmp_path: Path) -> None:
    environment, program = user(home), interpreter(tmp_path)
    status = program.stat()
    assert [python.version for python in (look(program, environment),) if python] == ["3.11.4.final.0"]
    program.write_bytes(b"\x7fELF\0003.11.5\0")
    for time, version in ((status.st_mtime_ns, "3.11.4.final.0"), (status.st_mtime_ns + 1, "3.11.5.final.0")):
        os.utime(program, ns=(0, time))
        assert [python.version for python in (look(program, environment),) if python] == [version]


def test_a_pypy_has_its_version_in_its_header(home: Home, tmp_path: Path) -> None:
    program = write(tmp_path / "bin/pypy3.10", "\x7fELF\0")
    install(tmp_path / "lib/pypy3.10/site-packages", loopy="2024.1")
    assert examined(program, home).version == ""
    write(tmp_path / "include/pypy3.10/patchlevel.h", '#define PY_VERSION "3.10.13"\n#define PYPY_VERSION "7.3.15"\n')
    python = examined(program, home)
    assert (python.version, python.installed("loopy")) == ("3.10.13.final.0", "2024.1")


def test_folders_of_fedora_and_debian(home: Home, tmp_path: Path) -> None:
    """Fedora has two folders of each kind, the second of which may be a link to the first; Debian has others."""
    for folder in ("usr/lib64/python3.11/site-packages", "usr/local/lib/python3.11/site-packages"):
        install(tmp_path / "fedora" / folder, **{folder.split("/")[1]: "1.0"})
    fedora = examined(interpreter(tmp_path / "fedora/usr"), home)
    assert [fedora.installed(name) for name in ("lib64", "local", "loopy")] == ["1.0", "1.0", "2024.1"]
    install(tmp_path / "arch/usr/local/lib/python3.11/site-packages", local="1.0")
    arch = interpreter(tmp_path / "arch/usr")
    (tmp_path / "arch/usr/lib64").symlink_to("lib")
    assert [examined(arch, home).installed(name) for name in ("local", "loopy")] == [None, "2024.1"]
    debian = interpreter(tmp_path / "debian/usr")
    shutil.rmtree(tmp_path / "debian/usr/lib/python3.11/site-packages")
    install(tmp_path / "debian/usr/lib/python3/dist-packages", apt="2.0")
    assert [examined(debian, home).installed(name) for name in ("apt", "loopy")] == ["2.0", None]


@pytest.mark.parametrize("where", ["{}.pth", "{}.egg-info", "{}.dist-info/METADATA", "{}.egg-info/PKG-INFO"])
def test_pipes_and_devices_among_packages_are_unread(home: Home, tmp_path: Path, where: str) -> None:
    """Others may have put them there, and the device is endless."""
    program = interpreter(tmp_path)
    pipe, device = (tmp_path / "lib/python3.11/site-packages" / where.format(name) for name in ("pipe", "device"))
    for path in (pipe, device):
        path.parent.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    python = examined(program, home)
    # Without the ``.pth`` file, the folders that it names are unknown.
    assert python.installed("loopy") == (None if where == "{}.pth" else "2024.1")
    assert python.present is (None if where == "{}.pth" else True)


# ---------------------------------------------------------------------- other users' files


@pytest.mark.parametrize(
    "arguments", ["report", "ls loopy --python {}", "report --by python", "prune --stale -n", "doctor"]
)
def test_no_interpreter_is_started(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    """The base of a virtual environment of copies has a standard library that others can write."""
    row(home)
    started = tmp_path / "started"
    base, script = tmp_path / "base", write(tmp_path / "other/python3", f"#!/bin/sh\ntouch {started}\n")
    script.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--copies", tmp_path / "venv"], check=True)
    modules = base / f"lib/python3.{sys.version_info[1]}"
    write(modules / "os.py", "")
    write(modules / "encodings/__init__.py", f"import posix; posix.open({str(started)!r}, posix.O_CREAT)\n")
    shutil.copytree(tmp_path / "venv/bin", base / "bin")
    write(tmp_path / "venv/pyvenv.cfg", f"home = {base}/bin\n")
    (base / "lib").chmod(0o777)
    # Starting it would run that code.
    subprocess.run([tmp_path / "venv/bin/python", "-c", ""], check=False, stderr=subprocess.DEVNULL)
    assert started.exists()
    started.unlink()
    monkeypatch.setattr(subprocess, "Popen", None)
    home.cachectl(
        arguments.format(tmp_path / "venv/bin/python"), check=False, PATH=f"{tmp_path}/venv/bin:{script.parent}"
    )
    assert not started.exists()


#: The parts of a Python and of a virtual environment of it.
PARTS = ("", "bin", "base/bin", "base/bin/python3.11", "base/lib", "base/lib/libpython3.11.so.1.0", "pyvenv.cfg")


@pytest.mark.parametrize("planted", [None, pytest.param("link", marks=as_root), *PARTS, SITE, f"{SITE}/x.pth", "extra"])
@pytest.mark.parametrize("variable", ["PATH", "VIRTUAL_ENV"])
def test_what_others_can_replace_is_unknown(home: Home, planted: str | None, variable: str) -> None:
    # Others cannot enter the folder of a test.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        interpreter(folder / "base", b"\x7fELF\0libpython3.11.so.1.0\0")
        (folder / "base/lib/libpython3.11.so.1.0").write_bytes(b"\0003.11.4\0")
        install(folder / SITE, **PACKAGES)
        write(folder / "pyvenv.cfg", f"home = {folder}/base/bin\n")
        (folder / "extra").mkdir()
        write(folder / SITE / "x.pth", f"{folder}/extra\n")
        program = write(folder / "bin/python3.11", "")
        program.unlink()
        program.symlink_to(folder / "middle")
        (folder / "middle").symlink_to(folder / "base/bin/python3.11")
        for above, folders, _ in os.walk(folder):
            for path in (Path(above), *(Path(above, inner) for inner in folders)):
                path.chmod(0o755)
        if planted == "link":
            os.lchown(folder / "middle", NOBODY, NOBODY)
        elif planted is not None:
            (folder / planted).chmod(0o777)
        on_path = folder if variable == "VIRTUAL_ENV" else f"relative:{program.parent}"
        environment = user(home, **{variable: str(on_path)})
        assert list(candidates(environment.variables)) == [program]
        python = look(program, environment)
        assert python is not None
        packages_only = planted in (SITE, f"{SITE}/x.pth", "extra")
        assert python.version == ("3.11.4.final.0" if planted is None or packages_only else "")
        assert python.installed("loopy") == ("2024.1" if planted is None else None)
        words = {None: "None", "link": "belongs to"}.get(planted, "other users can write to")
        assert words in str(python.reason)
        if planted is not None:
            with pytest.raises(BadRequest, match=words):
                named_pythons(environment, [str(program)])


def test_shims_are_replaced_by_the_interpreters_that_they_start(home: Home, tmp_path: Path) -> None:
    shims = write(tmp_path / "pyenv/shims/python3", "#!/bin/sh\n").parent
    (shims / "python3").chmod(0o755)
    assert list(candidates(user(home, shims).variables)) == [shims / "python3"]
    for place in ("versions/3.11.4", "installs/python/3.11.4"):
        program = interpreter(tmp_path / "pyenv" / place)
        assert list(candidates(user(home, shims).variables)) == [program]
        shutil.rmtree(program.parent.parent)


# ---------------------------------------------------------------------- staleness


def change_record(prefix: Path, home: Home, **changes: object) -> None:
    """Change the sightings below a prefix."""
    file = record_of(user(home)).file
    document = json.loads(file.read_text())
    for sighting in document["sightings"]:
        if sighting["path"].startswith(str(prefix)):
            sighting.update(changes)
    file.write_text(json.dumps(document))


def carry_out(change: str, prefix: Path, home: Home) -> None:
    """Change a Python that was seen at a prefix, or its sightings."""
    if change == "unmounted":
        change_record(prefix, home, places=["0", "0"])
    if change == "package replaced":
        install(prefix / SITE, **PACKAGES | {"loopy": "2025.2"})
    elif change == "upgraded":
        interpreter(prefix, b"\x7fELF\0003.11.15\0")
    elif change != "nothing":
        shutil.rmtree(prefix)
    if change == "second":
        interpreter(prefix.parent / "second")
    elif change == "script":
        write(prefix.parent / "second/bin/python3", "#!/bin/sh\n").chmod(0o755)


MAKER = "written by Python 3.11.4 with loopy 2024.1, islpy 2024.2, cgen 2020.1, "
#: What happens to a Python that was seen, whether its rows are stale then, and the beginning of the reason.
CHANGES: list[tuple[str, bool | None, str]] = [
    ("nothing", False, "None"),
    *(
        (change, None, f"unknown: {MAKER}which no known Python has")
        for change in ("package replaced", "removed", "upgraded")
    ),
    ("second", False, "None"),
    ("script", None, f"unknown: {MAKER}and {{second}} cannot be examined: it is a script"),
    ("unmounted", None, f"unknown: {MAKER}and {{}} cannot be examined: it is not mounted here"),
]


@pytest.mark.parametrize(("change", "stale", "because"), CHANGES)
def test_rows_are_live_if_a_known_python_has_what_they_need_and_else_unknown(
    home: Home, tmp_path: Path, change: str, stale: bool | None, because: str
) -> None:
    """A Python that was seen need not be on PATH again; hits of one that was never seen leave no trace."""
    program, second = interpreter(tmp_path / "first"), tmp_path / "second/bin"
    row(home)
    # Nobody has seen this version of loopy.
    row(home, "2023.1")
    before = staleness(user(home, program.parent))
    assert {loopy: is_stale for loopy, (is_stale, _) in before.items()} == {"2024.1": False, "2023.1": None}
    assert "which no known Python has" in str(before["2023.1"][1])
    carry_out(change, tmp_path / "first", home)
    # The second command reads in the record what the first one saw.
    for environment in (user(home, second), user(home, second)):
        after = staleness(environment)
        assert {loopy: is_stale for loopy, (is_stale, _) in after.items()} == {"2024.1": stale, "2023.1": None}
        assert str(after["2024.1"][1]).startswith(because.format(program, second=second / "python3"))
    # Without a search for other Pythons, nothing is stale.
    assert not any(is_stale for is_stale, _ in staleness(user(home)._replace(searches_pythons=False)).values())


def test_a_named_python_makes_nothing_stale(home: Home, tmp_path: Path) -> None:
    """It may be another one that can hit an entry."""
    program = interpreter(tmp_path / "first")
    row(home)
    row(home, "2023.1")
    assert staleness(user(home)) == {
        loopy: (None, f"unknown: written by Python 3.11.4 with loopy {loopy}, islpy 2024.2, cgen 2020.1, {words}")
        for loopy in ("2023.1", "2024.1")
        for words in ["which no known Python has; --python PATH names one"]
    }
    after = staleness(user(home)._replace(python_paths=(program,)))
    assert {loopy: is_stale for loopy, (is_stale, _) in after.items()} == {"2024.1": False, "2023.1": None}


def test_a_name_of_no_python_is_refused(home: Home, tmp_path: Path) -> None:
    environment = user(home, tmp_path)
    script = write(tmp_path / "python3", "#!/bin/sh\n")
    script.chmod(0o755)
    for name, words in (
        ("python3", "it is a script"),
        ("/nowhere/python", "no such file"),
        ("/bin/true", "does not have the name of a Python"),
    ):
        with pytest.raises(BadRequest, match=words):
            named_pythons(environment, [name])
    program = interpreter(tmp_path / "first")
    assert named_pythons(environment, [str(program)]) == (program,)
    # One that was seen may be gone while a config file still names it.
    staleness(user(home, program.parent))
    row(home)
    staleness(user(home, program.parent))
    shutil.rmtree(tmp_path / "first")
    assert named_pythons(user(home), [str(program)]) == (program,)


def test_the_packages_of_cachectls_own_python_are_seen(home: Home, tmp_path: Path) -> None:
    """Packages that a variable adds only in this run are no witness later."""
    row(home)
    row(home, "2023.1")
    program = interpreter(tmp_path / "first")
    own = user(home)._replace(executable=program, python="3.11.4.final.0", installed=PACKAGES.get)
    by_path = own._replace(installed={**PACKAGES, "loopy": "2023.1"}.get)
    assert [stale for stale, _ in staleness(own).values()] == [None, False]
    # Without the variable it still has the other version.
    assert [stale for stale, _ in staleness(by_path).values()] == [False, False]
    assert [stale for stale, _ in staleness(own).values()] == [None, False]


def test_programs_of_pyopencl_are_live_with_their_python(home: Home, tmp_path: Path) -> None:
    program = interpreter(tmp_path / "first")
    for name in ("info", "binary"):
        write(home.path / ".cache/pyopencl/pyopencl-compiler-cache-v2-py3.11.4.final.0" / ("0" * 32) / name, "x")

    def judged(*folders: Path) -> tuple[bool | None, str | None]:
        (entry,) = Stack(user(home, *folders)).ls(layers=["pyopencl"]).entries
        return entry.stale, entry.stale_because

    assert judged()[0] is None
    assert judged(program.parent) == (False, None)
    shutil.rmtree(tmp_path / "first")
    assert judged() == (None, "unknown: built under Python 3.11.4, which no known Python has; --python PATH names one")


def test_the_sums_of_each_python(home: Home, tmp_path: Path) -> None:
    program = interpreter(tmp_path / "first")
    row(home, "2024.1", "3.99.0.final.0")
    row(home)
    shares = Stack(user(home, program.parent)).report(by="python").pythons or ()
    assert sorted((share.python, share.packages["loopy"], share.entries, share.interpreters) for share in shares) == [
        ("3.11.4.final.0", "2024.1", 1, (program,)),
        ("3.99.0.final.0", "2024.1", 1, ()),
    ]
    assert "3.99.0" in home.cachectl("report --by python loopy").stdout


@real
def test_an_interpreter_is_listed_once(warm: Home) -> None:
    """The rows of loopy and of PyOpenCL have different packages but the same Python."""
    said = warm.cachectl("report --by python").stdout.splitlines()
    places = [line for line in said if ": Python 3." in line]
    assert len(places) == len({*places}) > 0


def test_a_relative_cache_home_is_where_each_platformdirs_puts_it(home: Home, tmp_path: Path) -> None:
    """Releases up to 4.11.7 follow it, later ones do not."""
    program = interpreter(tmp_path / "first", platformdirs="4.3.6")
    environment = user(home, program.parent, XDG_CACHE_HOME="relative")._replace(
        installed=lambda name: "4.14.0" if name == "platformdirs" else None,
    )
    roots = {root.path: root.source for root in Stack(environment)["loopy"].roots()}
    assert list(roots) == [home.path / ".cache/pytools", home.path / "relative/pytools"]
    assert str(program) in list(roots.values())[1]
