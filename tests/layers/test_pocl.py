"""PoCL's tree: variants, orphans, failed builds, what must be left alone, what is damaged."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from homes import Driver, Home
from support.layers import clear, orphans, programs, root_of, usage_of, verified, write
from support.products import BITCODE, NATIVE
from support.products import POCL_KEY as NAME
from support.products import place as lay_out
from tiers import real

from benchmarks.trees import native
from cachectl.layers.core.finding import Severity
from cachectl.layers.core.layer import put_many
from cachectl.layers.pocl import PoclKernels
from cachectl.layers.stores.archive import unpack
from cachectl.layers.stores.files import Files


def place(layer: PoclKernels, name: str, files: dict[str, bytes]) -> Path:
    return lay_out(root_of(layer), name, files)


@pytest.fixture
def layer(home: Home) -> PoclKernels:
    return PoclKernels(home.environment())


@pytest.mark.parametrize("suffix", [".so", ".so.o"])
def test_kernels_and_variants_of_both_layouts(layer: PoclKernels, suffix: str) -> None:
    code = native("add", "mul", linked=suffix == ".so")
    files = {
        f"{kernel}/{variant}/{kernel}{suffix}": code for kernel in ("add", "mul") for variant in ("0-0-0", "16-1-1")
    }
    small = f"add/8-1-1-goffs0-smallgrid/add{suffix}"
    place(layer, NAME, {"program.bc": BITCODE, "last_accessed": b"", small: code, **files})
    (entry,) = layer.entries()
    assert entry.details.kernels == ("add", "mul")
    assert entry.details.detail == {"add": "0-0-0 16-1-1 8-1-1-goffs0-smallgrid", "mul": "0-0-0 16-1-1"}
    assert entry.files == 7
    assert verified(layer) == []


def test_a_file_that_no_lookup_reaches_is_an_orphan_and_goes(layer: PoclKernels) -> None:
    root, uncached = layer.roots()
    place(layer, NAME, {"build.log": b"error: expected ';'"})
    (root.path / "CD").mkdir(mode=0o700)
    for name, content in (("tempfile_a1B2c3", b""), ("tempfile_a1B2c4.cl", b"kernel source")):
        (root.path / name).write_bytes(content)
        (root.path / name).chmod(0o600)
    for folder in (root.path, uncached.path):
        (folder / "_UNCACHED_a1B2c3").mkdir(mode=0o700, parents=True)
        (folder / "_UNCACHED_a1B2c3/program.bc").write_bytes(BITCODE)
    assert orphans(layer) == {
        NAME: "a build that failed",
        "CD": "an empty folder of programs",
        "_UNCACHED_a1B2c3": "a program built with the cache off",
        "tempfile_a1B2c3": "leaked by a PoCL process",
        "tempfile_a1B2c4.cl": "a compile's temporary file",
    }
    assert (uncached.path.name, layer.store.usage(uncached).orphan_files) == ("uncached", 1)
    assert clear(layer).failed == ()
    assert orphans(layer) == {}
    assert [*root.path.iterdir(), *uncached.path.iterdir()] == []


@pytest.mark.parametrize(
    ("folder", "mode", "files", "folders"),
    [("kcache", 0o700, 3, 1), ("pocl-of-mine", 0o700, 0, 1), ("pocl-of-mine", 0o755, 0, 0), ("mine", 0o700, 0, 0)],
)
def test_a_draw_of_letters_may_be_a_word(home: Home, folder: str, mode: int, files: int, folders: int) -> None:
    """Empty folders and files with such names may be somebody's own in a folder that PoCL did not make."""
    root = home.path / folder
    (root / "DE").mkdir(parents=True)
    (root / "DE").chmod(mode)
    for drawn in ("Vhocea", "thesis", "Backup"):
        os.close(os.open(root / f"tempfile_{drawn}.cl", os.O_CREAT | os.O_WRONLY, 0o600))
    layer = PoclKernels(home.environment(POCL_CACHE_DIR=str(root)))
    assert usage_of(layer).orphan_files == files
    assert len(layer.plan_clear().entries) == len(orphans(layer)) == files + folders


#: The six letters at the end of ``matmul_fp32x4`` are the kernel's own.
MATMUL = "matmul_fp32x4/0-0-0-goffs0/matmul_fp32x4.so"


@pytest.mark.parametrize(
    ("members", "exported"),
    [
        ({"program.bc": BITCODE, "build.log": b"warning", "program.bc_a1B2c3.temp": b"half"}, {"program.bc": BITCODE}),
        ({"program.bc": BITCODE, MATMUL: NATIVE, f"{MATMUL}_a1B2c3.so": b""}, {"program.bc": BITCODE, MATMUL: NATIVE}),
        ({"last_accessed": b""}, None),
        ({"build.log": b"error"}, None),
    ],
)
def test_get_leaves_temporaries(
    layer: PoclKernels, members: dict[str, bytes], exported: dict[str, bytes] | None
) -> None:
    place(layer, NAME, members)
    artifact = layer.get(NAME)
    assert (None if artifact is None else unpack(artifact.data)) == exported
    assert put_many(layer, [artifact] if artifact else []) == ([False] if artifact else [])
    assert (verified(layer), layer.plan_clear(damaged=True).entries) == ([], ())


def test_innocent_things_with_confusing_names_stay(home: Home) -> None:
    for place_of_cache in ({}, {"POCL_CACHE_DIR": str(home.path / "mine")}):
        layer = PoclKernels(home.environment(**place_of_cache))
        root = root_of(layer)
        for name, content, mode in (
            ("tempfile_reports", b"", 0o600),  # seven letters
            ("tempfile_a1B2c3", b"my notes", 0o600),  # not empty
            ("tempfile_d1B2c3", b"", 0o644),  # mkstemp makes none like this
            ("AB", b"a file", 0o600),
            ("tempfile_thesis.tex", b"", 0o600),
            ("tempfile_backup.tar.gz", b"", 0o600),
            ("tempfile_aB3dE6.tex", b"", 0o600),
            ("AA/" + "B" * 37 + "/program.py", b"", 0o600),
        ):
            write((root / name), content)
            (root / name).chmod(mode)
        # PoCL has folders with headers of any name only in its own folder.
        drawn = ("tempdir_photos", "tempdir_aB3dE6") if place_of_cache else ()
        for name in ("tempfile_backup.d", *drawn, "_UNCACHED_mydata", "_UNCACHED_aB3dE6"):
            (root / name).mkdir(mode=0o700)
            (root / name / "holiday.jpg").write_bytes(b"innocent")
        os.mkfifo(root / "tempfile_aB3dE6", 0o600)
        before = sorted(root.rglob("*"))
        assert layer.store.usage(layer.roots()[0]).unknown_files == 1
        clear(layer)
        assert sorted(root.rglob("*")) == before


@real
def test_a_failed_build_is_an_orphan(home: Home) -> None:
    program = (
        "import pyopencl as cl; from binaries import device\n"
        "try: cl.Program(cl.Context([device()]), 'not OpenCL at all').build()\n"
        "except cl.RuntimeError: print('failed')"
    )
    path = f"{home.programs}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    assert "failed" in home.run(sys.executable, "-c", program, PYTHONPATH=path).stdout
    assert "a build that failed" in orphans(PoclKernels(home.environment())).values()


def test_programs_are_found_by_the_tag_of_their_build(layer: PoclKernels) -> None:
    for letter, text in (("C", b"tag-1"), ("D", b"tag-22"), ("E", b""), ("F", b"")):
        place(layer, f"AB/{letter * 37}", {"program.bc": BITCODE + text})
    assert isinstance(layer.store, Files)
    for since, expected in ((0.0, {"C": "tag-1", "D": "tag-22", "E": ""}), (2e10, {})):
        found = layer.store.find_tagged(layer.roots()[0], re.compile(rb"tag-\d+"), since, {f"AB/{'E' * 37}"})
        assert {entry.key[3]: tag for entry, tag in found} == expected


@pytest.mark.parametrize("files", [{}, {"build.log": b"error: expected ';'"}], ids=["empty", "failed"])
def test_a_build_without_a_program_stays_while_it_may_go_on(
    layer: PoclKernels, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root_of(layer) / NAME).mkdir(mode=0o700, parents=True)
    place(layer, NAME, files)
    # Six letters that PoCL drew: a leaked temporary may be removed at any time.
    (root_of(layer) / "tempfile_thesis").touch(0o600)
    programs(monkeypatch, 4711)
    plan = layer.plan_clear()
    assert [target.key for target in plan.entries] == ["tempfile_thesis"]
    assert [(note.key, "PID 4711" in note.because) for note in plan.skipped] == [(NAME, True)]
    programs(monkeypatch)
    assert [target.key for target in layer.plan_clear().entries] == [NAME, "tempfile_thesis"]


def test_empty_folders_stay_while_a_program_may_build(layer: PoclKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any age: PoCL makes a program's folder after it has seen the folder above."""
    folder = root_of(layer) / "AB"
    folder.mkdir(mode=0o700, parents=True)
    os.utime(folder, (1, 1))
    planned_before = layer.plan_clear()
    assert [target.key for target in planned_before.entries] == ["AB"]
    programs(monkeypatch, 4711)
    plan = layer.plan_clear()
    assert plan.entries == ()
    assert [(note.key, "PID 4711" in note.because) for note in plan.skipped] == [("AB", True)]
    # PoCL may also start between the plan and its application, and build.
    for _ in range(2):
        outcome = layer.clear(planned_before)
        assert [note.key for note in outcome.skipped] == ["AB"]
        assert folder.is_dir()
        programs(monkeypatch)
        program = place(layer, NAME, {"program.bc": BITCODE}) / "program.bc"
        os.utime(folder, (1, 1))
    assert program.is_file()


@real
def test_a_users_file_beside_native_code_is_never_removed(warm: Home) -> None:
    code = next((warm.path / ".cache/pocl").rglob("*.so"))
    own = code.with_name("thesis.tex")
    own.write_text("ten years of work")
    ((left,),) = (layer["skipped"] for layer in warm.json("purge pocl")["layers"])
    assert own.read_text() == "ten years of work"
    words = "thesis.tex', which does not belong there; left alone"
    assert (left["key"], words in left["because"]) == ("/".join(code.parts[-5:-3]), True)


@real
def test_what_is_not_checked_is_said(warm: Home) -> None:
    said = "machine code, the records of LLVM bitcode, and whether an intact program has its own key"
    assert warm.cachectl("verify loopy pyopencl-invoker pocl").stdout == "no damage found\n"
    assert warm.cachectl("verify -v loopy pyopencl-invoker pocl").stdout.splitlines() == [
        "no damage found",
        "loopy, pyopencl-invoker: not checked: the contents of intact pickles",
        f"pocl: not checked: {said}",
    ]
    assert json.loads(warm.cachectl("verify pocl --json").stdout)["not_checked"] == {"pocl": said}


@real
def test_a_pocl_that_links_itself_replaces_a_damaged_object(home: Home, built_pocl: Driver) -> None:
    home.python("kernels.py", "1", **built_pocl)
    layer = PoclKernels(home.environment())
    assert verified(layer) == []
    path = next(root_of(layer).glob("*/*/*/*/*.so.o"))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert [finding.severity for finding in verified(layer)] == [Severity.HEALS]
    shutil.rmtree(home.path / ".cache/pytools")
    home.python("kernels.py", "1", **built_pocl)
    assert verified(layer) == []
