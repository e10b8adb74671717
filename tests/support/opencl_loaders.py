"""Real OpenCL loaders, environments in which they look for real drivers, and what each finds there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Condition
from cachectl.layers.host.drivers import find_drivers
from cachectl.layers.pocl import PoclKernels

#: For each environment of standard input, the libraries of the drivers whose platforms the loader finds, as a line of
#: JSON. Each has a child of its own, because a loader looks once.
PROBE = """
import ctypes, json, os, sys

class Place(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), *((name, ctypes.c_void_p) for name in ("base", "name", "at"))]

def find_platforms():
    for library in sys.argv[1:]:
        loader = ctypes.CDLL(library)
    count = ctypes.c_uint()
    loader.clGetPlatformIDs(0, None, ctypes.byref(count))
    platforms = (ctypes.c_void_p * count.value)()
    loader.clGetPlatformIDs(count, platforms, None)
    for platform in platforms:
        # A platform begins with the address of its driver's functions, of which clGetPlatformIDs is the first.
        functions = ctypes.cast(platform, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]
        place = Place()
        ctypes.CDLL(None).dladdr(ctypes.c_void_p(functions[0]), ctypes.byref(place))
        yield os.path.realpath(os.fsdecode(place.file))

for number, (variables, folder) in enumerate(json.load(sys.stdin)):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.environ.update(variables)
        os.chdir(folder)
        os.write(1, f"{json.dumps([number, sorted(set(find_platforms()))])}\\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
"""


@dataclass(frozen=True)
class RealLoader:
    """A loader's library behind those to load before it, the Python that has it, and what its programs need."""

    libraries: tuple[Path, ...]
    site: tuple[Path, ...] = ()
    prefix: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    handles: tuple[int, ...] = ()

    def environment(self, case: Case, home: Path) -> Environment:
        """Return the environment in which a program of this loader is started, with a home that has no caches."""
        home = home / "new"
        variables = {**self.variables, "HOME": str(home), **case.variables}
        return Environment(variables, home=home, cwd=case.cwd, site=self.site, prefix=self.prefix)

    def platforms(self, cases: Sequence[Case], home: Path) -> list[list[str] | None]:
        """Return the driver libraries of the platforms that the loader finds in each case, ``None`` if it crashed."""
        command = [sys.executable, "-c", PROBE, *map(str, self.libraries)]
        started = {**self.variables, "HOME": str(home), "PATH": os.environ["PATH"]}
        asked = json.dumps([[dict(case.variables), str(case.cwd)] for case in cases])
        done = subprocess.run(
            command, env=started, input=asked, capture_output=True, text=True, check=True, pass_fds=self.handles
        )
        found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
        return [found.get(number) for number in range(len(cases))]


@dataclass(frozen=True)
class Case:
    """Variables and the working folder of a program."""

    name: str
    variables: Mapping[str, str]
    cwd: Path


def lay_out(folder: Path, pocl: Path, other: Path) -> None:
    """Write ICD files of two drivers in many forms, each in a folder of its own."""

    def write(name: str, content: str) -> None:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode())

    write("pocl/pocl.icd", f"{pocl}\n")
    write("other/other.icd", f"{other}\n")
    write("both/pocl.icd", f"{pocl}\n")
    write("both/other.icd", f"{other}\n")
    write("no line end/pocl.icd", str(pocl))
    write("two lines/pocl.icd", f"{pocl}\n{other}\n")
    write("empty line first/pocl.icd", f"\n{pocl}\n")
    write("two line ends/pocl.icd", f"{pocl}\n\n")
    write("windows line end/pocl.icd", f"{pocl}\r\n")
    write("blank behind/pocl.icd", f"{pocl} \n")
    write("zero byte/pocl.icd", f"{pocl}\0{other}\n")
    write("empty file/pocl.icd", "")
    write("not there/pocl.icd", "/nowhere/libpocl.so\nlibpocl-of-nobody.so\n")
    write("by name/other.icd", f"{other.name}\n")
    write("by unknown name/pocl.icd", "libpocl-of-nobody.so.2\n")
    write("relative/pocl.icd", f"./libraries/{pocl.name}\n")
    write("upper case/POCL.ICD", f"{pocl}\n")
    write("no stem/.icd", f"{pocl}\n")
    write("hidden/.pocl.icd", f"{pocl}\n")
    write("other suffix/pocl.icd.off", f"{pocl}\n")
    write("within/folder/pocl.icd", f"{pocl}\n")
    (folder / "a folder" / "pocl.icd").mkdir(parents=True)
    for name, target in (("linked/pocl.icd", "pocl/pocl.icd"), ("linked folder/system", "both")):
        (folder / name).parent.mkdir()
        (folder / name).symlink_to(folder / target)
    (folder / "libraries").symlink_to(pocl.parent)
    (folder / "void").mkdir()


def make_cases(folder: Path, pocl: Path, other: Path) -> list[Case]:
    """Return environments that name what :func:`lay_out` has written in each of the ways that loaders know."""
    vendors, path, names = "OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH", "OCL_ICD_FILENAMES"
    at: Callable[[str], str] = lambda name: str(folder / name)  # noqa: E731
    ways: list[tuple[dict[str, str], str]] = [
        ({}, ""),
        ({vendors: ""}, ""),
        ({vendors: at("pocl")}, ""),
        ({vendors: at("pocl") + "/"}, ""),
        ({vendors: at("void")}, ""),
        ({vendors: at("nowhere")}, ""),
        ({vendors: at("nowhere.icd")}, ""),
        ({vendors: at("pocl/pocl.icd")}, ""),
        ({vendors: at("two lines/pocl.icd")}, ""),
        ({vendors: at("other suffix/pocl.icd.off")}, ""),
        ({vendors: f"{at('pocl')}:{at('other')}"}, ""),
        ({vendors: f"{at('pocl/pocl.icd')}:{at('other/other.icd')}"}, ""),
        ({vendors: "both"}, ""),
        ({vendors: "."}, "both"),
        ({vendors: "pocl/pocl.icd"}, ""),
        ({vendors: "pocl.icd"}, "pocl"),
        ({vendors: "pocl.icd"}, ""),
        ({vendors: "pocl.icd", path: at("pocl")}, ""),
        ({vendors: "pocl.icd", path: at("not there")}, "pocl"),
        ({vendors: ".icd"}, "no stem"),
        ({vendors: str(pocl)}, ""),
        ({vendors: other.name}, ""),
        ({vendors: f"libraries/{pocl.name}"}, ""),
        ({vendors: pocl.name}, "libraries"),
        ({path: ""}, ""),
        ({path: at("pocl")}, ""),
        ({path: "both"}, ""),
        ({path: at("nowhere")}, ""),
        ({path: at("pocl/pocl.icd")}, ""),
        ({vendors: at("other"), path: at("pocl")}, ""),
        ({vendors: "", path: at("pocl")}, ""),
        ({vendors: at("nowhere"), path: at("pocl")}, ""),
        ({names: ""}, ""),
        ({names: str(pocl)}, ""),
        ({names: f"{pocl}:{other}", vendors: at("void")}, ""),
        ({names: f"::{pocl}::{other.name}:", vendors: at("void")}, ""),
        ({names: at("pocl/pocl.icd"), vendors: at("void")}, ""),
        ({names: "/nowhere/libpocl.so", vendors: at("void")}, ""),
        ({names: f"libraries/{pocl.name}", vendors: ""}, ""),
        ({names: str(pocl), vendors: at("other")}, ""),
        ({names: str(pocl), path: at("other")}, ""),
        ({names: str(pocl), vendors: at("other"), path: at("both")}, ""),
    ]
    forms = sorted(item.name for item in folder.iterdir() if any(item.iterdir()) and item.name != "libraries")
    ways += [({vendors: at(form)}, "") for form in forms]
    return [Case(_name(way, cwd, folder), way, folder / cwd) for way, cwd in ways]


def make_few_cases(folder: Path, pocl: Path) -> list[Case]:
    """Return environments with PoCL alone: none, a folder, a file, a library, and a path with nothing there."""
    file = folder / "vendors" / "pocl.icd"
    file.parent.mkdir()
    file.write_text(f"{pocl}\n")
    values = (None, "", str(file.parent), "vendors/pocl.icd", str(pocl), str(folder / "nowhere"))
    ways = [{} if value is None else {"OCL_ICD_VENDORS": value} for value in values]
    return [Case(_name(way, "", folder), way, folder) for way in ways]


def _name(variables: Mapping[str, str], cwd: str, folder: Path) -> str:
    words = " ".join(f"{name}={value}" for name, value in variables.items()).replace(f"{folder}/", "@")
    return f"{words or 'nothing'}{cwd and f' in {cwd}'}"


def differences(loader: RealLoader, cases: Sequence[Case], known: Sequence[Path], home: Path) -> dict[str, object]:
    """Return where the drivers that cachectl finds differ from the platforms that the loader finds.

    Of other drivers than the known ones, such as the system's, some may give no platform on this machine.
    """
    differing: dict[str, object] = {}
    expected = {os.path.realpath(library) for library in known}
    for case, platforms in zip(cases, loader.platforms(cases, home), strict=True):
        environment = loader.environment(case, home)
        drivers = {os.path.realpath(driver.library) for driver in find_drivers(environment)}
        real = None if platforms is None else set(platforms)
        if real is None or not real <= drivers or drivers & expected - real:
            differing[case.name] = {"loader": platforms, "cachectl": sorted(drivers)}
            continue
        has_pocl = any(os.path.basename(library).startswith("libpocl") for library in real)
        state = PoclKernels(environment).state()
        wanted = Condition.ENABLED if has_pocl else Condition.ABSENT
        # It must say whether PoCL was found, and by which file.
        if state.condition is not wanted or bool(state.drivers) is not has_pocl:
            differing[case.name] = state
    return differing
