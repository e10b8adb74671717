"""FIFOs and sockets under the names that a layer may open: no verb waits for one, and none is changed."""

import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path

import pytest
from homes import Home
from injector import Ended, Fault, Injector
from support import mesa
from worlds import synthetic_world

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")

#: Longer than any verb takes here, in seconds; a blocking open is ended after twice that.
SECONDS = 30
LAYERS = ("loopy", "pyopencl-invoker", "pyopencl", "pocl", "cuda", "neo", "mesa", "comgr", "miopen", "miopen-tuning")
VARIABLES = {"RUSTICL_ENABLE": "llvmpipe", "PYOPENCL_NO_CACHE": ""}


Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def cachectl(injector: Injector) -> Run:
    """Return a function that runs a command in a home; status -14 means that it hung."""

    def run(home: Path, *arguments: str) -> Ended:
        return injector.run(*arguments, home=home, fault=Fault(0), variables={**VARIABLES, "TMPDIR": str(home / "tmp")})

    return run


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory, filled: Home, cachectl: Run) -> tuple[Path, Mapping[str, str]]:
    """Return a home in which every layer has entries, next to a bundle and artifacts; and a key of each layer."""
    folder = tmp_path_factory.mktemp("crowded")
    home = synthetic_world(folder).path
    shutil.copytree(filled.path, home, symlinks=True, dirs_exist_ok=True)
    mesa.fill(home / ".cache", "single-file", mesa.contents())
    assert cachectl(home, "push", str(folder / "bundle.zip")).status == 0
    keys: dict[str, str] = {}
    for layer in LAYERS:
        keys[layer] = cachectl(home, "ls", layer, "--json", "--limit", "1").json["entries"][0]["key"]
        assert cachectl(home, "get", layer, keys[layer], "-o", str(folder / f"{layer}.artifact")).status == 0
    # What writing verbs make besides entries: lock files, and marks of changes.
    assert cachectl(home, "purge", "miopen-tuning", "--key", keys["miopen-tuning"]).status == 0
    return home, keys


def verbs(folder: Path, keys: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield every verb that opens caches, those that change something last."""
    bundle, exported, got = folder / "bundle.zip", folder / "exported.zip", folder / "got"

    def lines(text: str) -> Iterator[tuple[str, ...]]:
        yield from (tuple(line.split()) for line in text.split(";"))

    yield from lines(
        "report --json; ls --json; verify --json; doctor --json; layers --json; report --neighbours; ls --kernel *"
    )
    yield from (("get", layer, key, "-o", str(got), "--force") for layer, key in keys.items())
    yield from lines(f"push {exported} --force; push {exported} miopen-tuning mesa --force")
    for dry in ("--dry-run", ""):
        yield from lines(f"prune --max-size 20K --wait 0.2 {dry}; pull {bundle} --trust {dry}")
        yield from lines(f"purge --damaged --all {dry}")
    yield from lines("run --isolated -- true; run --no-cache --prove -- true; trace -- true")
    for layer, key in keys.items():
        yield ("put", layer, key, str(folder / f"{layer}.artifact"), "--replace", "--wait", "0.2")
    for chosen in ("--all", "miopen-tuning"):
        yield from lines(f"purge {chosen} --wait 0.2 --dry-run; purge {chosen} --wait 0.2")


def files(home: Path) -> list[Path]:
    """List the files that belong to some cache."""
    places = (home / ".cache", home / ".nv", home / ".config", home / "tmp")
    found = (path for place in places for path in place.rglob("*") if path.is_file())
    return sorted(path for path in found if path.read_bytes()[:8] != b"this is ")


def _beside(home: Path) -> list[Path]:
    """Name in turn a journal, a log or the index of a log next to each database."""
    endings = ("-journal", "-wal", "-shm")
    databases = (path for path in files(home) if path.read_bytes()[:15] == b"SQLite format 3")
    return [path.with_name(path.name + ending) for path, ending in zip(databases, cycle(endings), strict=False)]


def _unborn(home: Path) -> list[Path]:
    """Name the files that are not always there: locks, marks of changes, policies, temporaries of the libraries."""
    cache = home / ".cache"
    names = [cache / "pyopencl/lock", *cache.glob("pyopencl/*/lock"), *cache.glob("mesa_shader_cache*/*.foz")]
    names += [cache / "neo_compiler_cache" / name for name in ("config.file", "stats", "sizes.file")]
    names += [cache / "comgr" / name for name in ("llvmcache.timestamp", "llvmcache-policy")]
    tuning = home / ".config/miopen"
    digest = hashlib.md5(os.fsencode(tuning), usedforsecurity=False).hexdigest()
    for record in tuning.glob("*.txt"):
        names += [record.with_name(record.name + ending) for ending in (".time", ".temp")]
        names.append(tuning / f"miopen-lockfiles/{record.name}.lock")
        names.append(home / f"tmp/miopen-lockfiles/{digest}_{record.name}.lock")
    return [*names, *home.rglob("label.json"), home / ".nv/ComputeCache/index"]


WORLDS: Mapping[str, Callable[[Path], Sequence[Path]]] = {"files": files, "beside": _beside, "unborn": _unborn}


@pytest.mark.real
@pytest.mark.parametrize(
    "world", ["files", *(pytest.param(name, marks=pytest.mark.hazard) for name in WORLDS if name != "files")]
)
def test_no_verb_opens_a_special_file(
    cachectl: Run, crowded: tuple[Path, Mapping[str, str]], tmp_path: Path, world: str
) -> None:
    kept, keys = crowded
    home = Path(shutil.copytree(kept.parent, tmp_path / "world", symlinks=True), "home")
    planted = WORLDS[world](home)
    assert planted
    for path in planted:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
    for path in home.rglob("*"):
        os.utime(path, (1.7e9, 1.7e9), follow_symlinks=False)
    for arguments in verbs(home.parent, keys):
        began = time.monotonic()
        done = cachectl(home, *arguments)
        assert (done.status in (0, 1), "Traceback" in done.stderr) == (True, False), (arguments, done)
        assert time.monotonic() - began < SECONDS, arguments
    for path in planted:
        assert stat.S_ISFIFO(path.lstat().st_mode), path
