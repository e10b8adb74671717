"""Completion in real shells, and the files that the wheel installs for them."""

from __future__ import annotations

import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tiers import absent

if TYPE_CHECKING:
    from homes import Home

PACKAGING = Path(__file__).parents[2] / "packaging"
BASH = """
source <(cachectl completion bash)
COMP_WORDS=({words}) COMP_CWORD={last} COMPREPLY=()
_shtab_cachectl
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(home: Home, shell: str, *words: str) -> list[str]:
    """Return what a shell offers for the last word of a line."""
    path = f"{Path(sys.executable).parent}:{home.variables['PATH']}"
    line = shlex.join(["cachectl", *words])
    if shell == "fish":
        program = f"cachectl completion fish | source; complete -C {shlex.quote(line)}"
    else:
        program = BASH.format(words=line, last=len(words))
    done = home.run(shell, "-c", program, PATH=path)
    return sorted({offer.split("\t")[0].rstrip() for offer in done.stdout.splitlines()})


@pytest.fixture(params=["bash", pytest.param("fish", marks=pytest.mark.environment)])
def shell(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name if shutil.which(name) else absent(f"lacks {name}")


def test_commands_layers_and_options_are_completed(home: Home, shell: str) -> None:
    assert completed(home, shell, "rep") == ["report"]
    assert completed(home, shell, "purge", "miopen-t") == ["miopen-tuning"]
    assert completed(home, shell, "run", "--iso")[0].startswith("--isolated")


@pytest.mark.real
def test_keys_and_kernels_are_completed(home: Home, shell: str) -> None:
    home.python("kernels.py", "1")
    kernels = {name for entry in home.json("ls")["entries"] for name in entry["kernels"] or ()}
    assert set(completed(home, shell, "ls", "--kernel", "lk")) == {name for name in kernels if name[:2] == "lk"}
    (key, *_) = home.cachectl("ls", "-q", "pocl").stdout.split()
    assert completed(home, shell, "get", "pocl", key[:-3]) == [key]


@pytest.mark.environment
def test_zsh_accepts_its_script() -> None:
    if not shutil.which("zsh"):
        absent("lacks zsh")
    script = PACKAGING / "share" / "zsh" / "site-functions" / "_cachectl"
    subprocess.run(["zsh", "-n", str(script)], check=True)


def test_installed_files_follow_the_grammar() -> None:
    """After a change of the command line, run packaging/share.py."""
    made = runpy.run_path(str(PACKAGING / "share.py"))["files"]()
    there = {name: (PACKAGING / "share" / name).read_text() for name in made}
    assert made == there
