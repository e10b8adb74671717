"""NEO's and comgr's caches with what the real compilers wrote: entries, policies, accounts."""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from homes import Home
from support.layers import clear, environment_of, keys_of, problems, root_of, usage_of, verified
from support.products import BARE, DEEP, PRODUCTS, SPIRV, WRAPPED, comgr_key, fill_neo
from support.tracing import layer_of, no_file_events, numbers, trace

from cachectl.layers.comgr import policy_complaint
from cachectl.layers.core.finding import Severity
from cachectl.layers.core.layer import Layer, moved_to
from cachectl.layers.core.selection import Selection
from cachectl.layers.neo import NeoCompilerCache
from cachectl.layers.neo.entries import NeoCodec


@pytest.fixture
def neo(tmp_path: Path) -> Layer:
    return PRODUCTS["neo"].filled(tmp_path)


#: The numbers of entries, of those that name kernels, and of all files.
COUNTS = {"neo": (8, 8, 12), "comgr": (4, 3, 5)}


@pytest.mark.parametrize("name", COUNTS)
def test_every_entry_and_file_is_counted_and_one_kernel_goes_from_all_that_name_it(tmp_path: Path, name: str) -> None:
    layer, (entries, named, files) = PRODUCTS[name].filled(tmp_path), COUNTS[name]
    usage = usage_of(layer)
    assert (usage.entries, usage.files, verified(layer)) == (entries, files, [])
    assert [entry.details.kernels for entry in layer.entries() if entry.details.kernels] == [("axpy", "scale")] * named
    plan = layer.plan_clear(Selection(kernel="axpy"))
    left = f"{entries - named} entry has no known kernel name and was left, in {root_of(layer)}"
    assert [note.because for note in plan.skipped] == ([left] if entries > named else [])
    assert layer.clear(plan).removed == named
    assert len(keys_of(layer)) == entries - named


@pytest.mark.parametrize(
    ("name", "key", "about"),
    [
        ("comgr", comgr_key("axpy.bc"), ("LLVM bitcode", None)),
        ("comgr", comgr_key("axpy-gfx906.o"), ("code object", "gfx906")),
        ("comgr", comgr_key("spirv"), ("SPIR-V", None)),
        ("neo", f"{SPIRV[0]}.ocloc_cache", ("SPIR-V", None)),
        ("neo", f"{BARE[0]}.ocloc_cache", ("patch tokens", "graphics core 12")),
        ("neo", f"{WRAPPED[1]}.ocloc_cache", ("patch tokens", "graphics core 3079")),
        ("neo", DEEP, ("patch tokens", "graphics core 12")),
    ],
)
def test_entries_name_their_kind_and_device(tmp_path: Path, name: str, key: str, about: tuple[str, str]) -> None:
    (found,) = PRODUCTS[name].filled(tmp_path).entries(Selection(key=key))
    assert (found.details.detail["kind"], found.details.device) == about


@pytest.mark.parametrize(
    ("policy", "wrong"),
    [
        ("", None),
        ("prune_interval=30s:prune_after=24h:cache_size=50%", None),
        ("cache_size_bytes=30g:cache_size_files=0", None),
        ("prune_interval=1h:", None),
        ("prune_interval=1h:prune_expiration=0h", "it knows no 'prune_expiration'"),
        ("cache_size=101%", "cache_size=101%"),
        ("cache_size=5", "cache_size=5 is not an integer with %"),
        ("cache_size_bytes=5GB", "cache_size_bytes=5GB"),
        ("cache_size_bytes=99999999999999999999", "no number"),
        ("cache_size_files=-1", "not an integer"),
        ("prune_after=1d", "of s, m or h"),
        ("1g", "it knows no '1g'"),
    ],
)
def test_the_policy_is_read_as_llvm_reads_it(policy: str, wrong: str | None) -> None:
    said = policy_complaint(policy)
    assert (said is None) if wrong is None else (said is not None and wrong in said)


ZEBIN = r"""
.section .text.axpy,"ax"
.byte 1,2,3
.section .text.dot,"ax"
.byte 4
.section .text.Intel_Symbol_Table_Void_Program,"ax"
.byte 5
.section .note.intelgt.compat,"",@note
.long 8, 4, {kind}
.asciz "IntelGT"
.long {value}
.long 8, 5, 4
.asciz "IntelGT"
.asciz "1.32"
.balign 4
.section .ze_info,""
.ascii "kernels:\n  - name: axpy\n"
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize(
    ("kind", "value", "device"),
    [(6, 12 << 22 | 55 << 14 | 8, "12.55.8"), (1, 1270, "product family 1270"), (2, 9, "graphics core 9")],
)
def test_a_zebin_names_kernels_device_and_version(tmp_path: Path, kind: int, value: int, device: str) -> None:
    """The system's assembler makes an ELF file with the sections of a zebin; it gets the type of one."""
    (tmp_path / "zebin.s").write_text(ZEBIN.format(kind=kind, value=value))
    subprocess.run(["gcc", "-c", "zebin.s", "-o", "zebin.o"], cwd=tmp_path, check=True)
    data = bytearray((tmp_path / "zebin.o").read_bytes())
    data[16:20] = struct.pack("<HH", 0xFF12, 205)
    about = NeoCodec().describe(bytes(data))
    assert (about.detail["kind"], about.kernels, about.device) == ("zebin", ("axpy", "dot"), device)
    assert about.versions == {"zebin": "1.32"}
    assert NeoCodec().check(bytes(data)) is None
    assert "cut short" in str(NeoCodec().check(bytes(data[:-100])))


@pytest.mark.parametrize("content", [None, b"size = 5 # somebody's own"])
def test_an_account_that_is_missing_or_not_the_drivers_is_not_written(neo: Layer, content: bytes | None) -> None:
    """Without one the driver counts the entries."""
    path = root_of(neo) / "config.file"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    findings = verified(neo)
    assert [(one.key, one.severity) for one in findings] == ([("config.file", Severity.WASTES)] if content else [])
    assert clear(neo).removed == 8
    assert (path.read_bytes() if path.exists() else None) == content
    for finding in findings:
        subprocess.run(["sh", "-c", finding.fix], check=True)
    assert verified(neo) == []


@pytest.mark.parametrize(("counted", "words"), [(10**9, "too early"), (1, "beyond its limit")])
def test_an_account_with_a_wrong_sum_is_reported(neo: Layer, counted: int, words: str) -> None:
    (root_of(neo) / "config.file").write_bytes(struct.pack("=Q", counted))
    (found,) = verified(neo)
    assert (found.code, words in found.message) == ("index", True)


def test_the_sum_is_compared_only_if_every_entry_was_read(neo: Layer) -> None:
    (root_of(neo) / "config.file").write_bytes(struct.pack("=Q", 10**9))
    assert [one.code for one in verified(neo)] == ["index"]
    os.truncate(root_of(neo) / keys_of(neo)[0], 2 << 30)
    (root_of(neo) / "config.file").write_bytes(struct.pack("=Q", 1))
    assert [one.code for one in verified(neo)] == problems(neo) == ["unreadable"]


def test_a_move_makes_the_folder_without_which_nothing_is_kept(home: Home) -> None:
    program = 'test -d "$NEO_CACHE_DIR" && echo "$NEO_CACHE_PERSISTENT."'
    assert home.cachectl("run --isolated -- sh -c", program).stdout == ".\n"
    home.cachectl("env --root", str(home.path / "moved"), "--layer", "neo", "--shell", "sh")
    assert (home.path / "moved/neo").is_dir()


DRIVER = """
import os, struct, sys
from pathlib import Path
folder = Path.home() / ".cache/neo_compiler_cache"
(folder / "0123456789abcdef.cl_cache").write_bytes((folder / "7accbe5d8c3df6d1.ocloc_cache").read_bytes())
"""


def test_a_trace_without_file_events_compares_the_entries(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachectl.watching.events.open_queue", no_file_events)
    fill_neo(home.path)
    document = trace(home, "python3", "-I", "-S", "-c", DRIVER)
    assert (numbers(document, "neo"), layer_of(document, "neo")["evidence"]) == ((None, None, 1), "inferred")


@pytest.mark.parametrize(
    ("reads", "folder", "variables", "first", "state", "off"),
    [
        ("cl_cache_dir", "", "", None, "DISABLED", True),
        ("cl_cache_dir", "cl_cache", "", "cl_cache", "ENABLED", True),
        ("cl_cache_dir", "cl_cache", "NEO_CACHE_PERSISTENT=0", "cl_cache", "ENABLED", True),
        ("cl_cache_dir", "mine", "cl_cache_dir=mine", "mine", "ENABLED", True),
        ("cl_cache_dir", "cl_cache", "cl_cache_dir=/dev/null/cl_cache", None, "DISABLED", True),
        ("cl_cache_dir NEO_CACHE_PERSISTENT", "cl_cache", "NEO_CACHE_PERSISTENT=0", ".cache/", "ENABLED", True),
        ("cl_cache_dir NEO_CACHE_PERSISTENT", "", "NEO_CACHE_PERSISTENT=0", ".cache/", "DISABLED", True),
        ("NEO_CACHE_PERSISTENT", "cl_cache", "", ".cache/", "ENABLED", False),
    ],
)
def test_older_releases_of_neo_keep_a_cache_in_the_working_folder(  # noqa: PLR0917 - a table
    tmp_path: Path, reads: str, folder: str, variables: str, first: str | None, state: str, *, off: bool
) -> None:
    library = tmp_path / "libigdrcl.so"
    names = b"".join(f"\0{name}\0".encode() for name in reads.split())
    library.write_bytes(Path(sys.executable).read_bytes() + names)
    (tmp_path / "intel.icd").write_text(f"{library}\n")
    (tmp_path / (folder or "other")).mkdir()
    (tmp_path / (folder or "other") / "0123456789abcdef.cl_cache").write_bytes(b"!<arch>\n")
    named = dict(word.split("=", 1) for word in variables.split())
    layer = NeoCompilerCache(environment_of(tmp_path, OCL_ICD_VENDORS=str(tmp_path / "intel.icd"), **named))
    assert next((str(root.path.relative_to(tmp_path)) for root in layer.roots()), None) == (
        ".cache/neo_compiler_cache" if first == ".cache/" else first
    )
    assert layer.state().condition.name == state
    keeps_nothing = [one.fix for one in layer.diagnose() if "keeps a cache only in" in one.message]
    assert bool(keeps_nothing) == (state == "DISABLED" and reads == "cl_cache_dir")
    entries = keys_of(layer)
    assert bool(entries) == (bool(folder) and off and "/dev/null" not in variables)
    disabled = NeoCompilerCache(layer.environment.with_variables(layer.disable().set))
    assert (disabled.state().condition.name, ("cl_cache_dir" in layer.disable().set)) == ("DISABLED", off)
    assert all(root.path.is_relative_to(tmp_path / ".cache") for root in disabled.roots())
    assert "cl_cache_dir" in NeoCompilerCache(disabled.environment).enable().unset or not off
    (moved, *_) = moved_to(layer, tmp_path / "moved").roots()
    assert moved.path == tmp_path / "moved/neo"
