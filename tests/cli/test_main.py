"""The real command: what it prints, where, and with which status."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from typing import Any

import pytest
from homes import CACHECTL, Home

from cachectl.layers.base.registry import BUILT_IN

KEY = "3/f/433a72c95049e7"
HEAVY = {"pyopencl", "loopy", "numpy", "mpi4py", "json", "hashlib", "base64", "tarfile", "platform", "bz2"}


@pytest.mark.parametrize("command", [["-c", "import cachectl"], ["-m", "cachectl", "report"]])
def test_nothing_heavy_is_imported(home: Home, command: list[str]) -> None:
    said = home.run(sys.executable, "-X", "importtime", *command).stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in said.splitlines() if "|" in line}
    assert "cachectl" in imported
    assert imported.isdisjoint(HEAVY)


def test_json_has_the_keys_of_the_contract(cuda: Home) -> None:
    report = cuda.json("report")
    assert report["schema"] == "cachectl/report/1"
    assert {"generated", "layers", "total"} <= report.keys()
    assert [layer["layer"] for layer in report["layers"]] == list(BUILT_IN)
    of_layer = "layer title state why scope precious entries files bytes stale_entries stale_bytes roots"
    of_root = "path source scope exists entries files bytes orphan_files orphan_bytes oldest newest problems"
    for layer in report["layers"]:
        assert layer.keys() >= set(of_layer.split())
        assert all(root.keys() >= set(of_root.split()) for root in layer["roots"])
    entry = cuda.json("ls cuda --limit 1")["entries"][0]
    of_entry = "layer key root bytes files created modified used kernels device versions stale stale_because"
    assert entry.keys() >= set(of_entry.split())
    assert entry["created"] is None
    purged = cuda.json("purge cuda --dry-run")
    assert purged["dry_run"] is True
    # Layers may stand behind options.
    behind = cuda.json("purge pocl --dry-run cuda")
    assert [layer["layer"] for layer in behind["layers"]] == ["pocl", "cuda"]
    freed = purged["total"]["bytes_freed"]
    assert purged["total"] == {"removed": 40, "orphans_removed": 0, "bytes_freed": freed, "skipped": 0, "failed": 0}
    keys = {"layer", "removed", "orphans_removed", "bytes_freed", "skipped", "failed"}
    assert purged["layers"][0].keys() == keys | {"entries"}
    assert cuda.json("purge cuda")["layers"][0].keys() == keys


def test_dir_prints_places_alone(cuda: Home) -> None:
    cache = cuda.path / ".nv/ComputeCache"
    assert cuda.cachectl("dir").stdout == f"{cache}\n"
    assert cuda.cachectl("dir cuda pocl").stdout == f"{cache}\n{cuda.path}/.cache/pocl/kcache\n"
    # A temporary folder is MIOpen's fallback, and no place of it as long as it keeps nothing there.
    every = cuda.cachectl("dir", *BUILT_IN).stdout.splitlines()
    assert all(line.startswith(str(cuda.path)) for line in every)


def test_ls_sorts_limits_and_selects(cuda: Home) -> None:
    cache = cuda.path / ".nv/ComputeCache"
    sizes = [entry["bytes"] for entry in cuda.json("ls cuda --sort size --limit 5")["entries"]]
    everything = sorted((path.stat().st_size for path in cache.glob("?/?/*")), reverse=True)
    assert sizes == everything[:5]
    oldest = next(cache.glob("?/?/*"))
    os.utime(oldest, (1, 1))
    keys = cuda.cachectl("ls cuda --older-than 52w -q").stdout.split()
    assert keys == [str(oldest.relative_to(cache))]
    assert cuda.json("ls cuda --sort age --limit 1")["entries"][0]["key"] == keys[0]


def test_isolated_alone_takes_no_word_for_its_folder(home: Home) -> None:
    done = home.cachectl("run --isolated --layer pocl -- sh -c", 'echo "$POCL_CACHE_DIR"')
    assert done.stdout.startswith("/")
    assert list(home.path.iterdir()) == []
    done = home.cachectl("run --layer pocl --isolated=kept -- sh -c", 'echo "$POCL_CACHE_DIR"')
    assert done.stdout.startswith(str(home.path / "kept"))


@pytest.mark.parametrize(
    ("shell", "lines"),
    [
        ("sh", ["export LOOPY_NO_CACHE=1", "export POCL_KERNEL_CACHE=0"]),
        ("fish", ["set -gx LOOPY_NO_CACHE '1'", "set -gx POCL_KERNEL_CACHE '0'"]),
        ("csh", ["setenv LOOPY_NO_CACHE 1;", "setenv POCL_KERNEL_CACHE 0;"]),
        ("powershell", ["$env:LOOPY_NO_CACHE = '1'", "$env:POCL_KERNEL_CACHE = '0'"]),
    ],
)
def test_env_speaks_four_shells(home: Home, shell: str, lines: list[str]) -> None:
    said = home.cachectl("env --disable --layer pocl --layer loopy --shell", shell)
    assert said.stdout.splitlines() == lines


def test_env_can_be_evaluated(home: Home) -> None:
    folder = home.path / "it's a root"
    cachectl = f"{shlex.quote(sys.executable)} -m cachectl"
    program = f'eval "$({cachectl} env --root {shlex.quote(str(folder))} --shell sh)"; {cachectl} report --json'
    report = json.loads(home.run("sh", "-c", program).stdout)
    writable = [layer for layer in report["layers"] if layer["scope"] == "user"]
    assert all(layer["roots"][0]["path"].startswith(str(folder)) for layer in writable)
    program = f'eval "$({cachectl} env --disable --shell sh)"; eval "$({cachectl} env --enable --shell sh)"; env'
    after = set(home.run("sh", "-c", program).stdout.splitlines())
    assert not [line for line in after if line.startswith(("LOOPY_NO_CACHE", "CUDA_CACHE_DISABLE"))]


def test_a_terminal_gets_the_same_table_in_bold_unless_it_wants_no_colour(cuda: Home) -> None:
    plain = cuda.cachectl("ls cuda --limit 4").stdout.splitlines()
    bold = on_a_terminal(cuda, "ls", "cuda", "--limit", "4")
    assert "\x1b[1m" in bold[0]
    # A second may pass between the two.
    assert [re.sub(r"\b\d+s\b", "", line).split() for line in bold[1:]] == [
        re.sub(r"\b\d+s\b", "", line).split() for line in plain[1:]
    ]
    uncoloured = "".join(on_a_terminal(cuda, "report", "cuda", NO_COLOR="1"))
    assert "\x1b[" not in uncoloured.replace("\x1b[1m", "").replace("\x1b[0m", "")


def on_a_terminal(home: Home, *arguments: str, **changes: Any) -> list[str]:  # noqa: ANN401 - variables
    return home.terminal(*CACHECTL, *arguments, only_output=True, **changes).stdout.splitlines()


def test_without_a_command_the_help_is_printed(home: Home) -> None:
    done = home.cachectl(check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == home.cachectl("--help").stdout
