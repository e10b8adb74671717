"""Completion in real shells, and the files that the wheel installs for them."""

import os
import pty
import re
import runpy
import select
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from homes import Home
from support.miopen_kernels import ARGS, CODE, packed, store, user_file
from tiers import absent, real, thorough_only

from cachectl.cli import completion

PACKAGING = Path(__file__).parents[2] / "packaging"
BASH = """
source <(cachectl completion bash)
COMP_LINE={line} COMP_POINT=9999
_cachectl
for offer in "${{COMPREPLY[@]}}"; do eval "printf '%s\\n' $offer"; done
"""
#: Prints what zsh would insert, once for each offer.
ZSH = """
autoload -Uz compinit
compinit -u -D
source <(cachectl completion zsh)
compadd() { builtin compadd -O found "$@"; print -rl -- $found >>offers; builtin compadd "$@" }
PS1='ready> '
"""
#: A name that a shell must not expand, with characters at which bash splits words.
HOSTILE = "$(touch ran)`touch ran`::a=b c'd\"*"


def completed(home: Home, shell: str, *words: str) -> list[str]:
    if shell == "fish":
        line = shlex.join(["cachectl", *words])
        program = f"cachectl completion fish | source; complete -C {shlex.quote(line)}"
    else:
        line = " ".join(["cachectl", *(re.sub(r"([^\w./:=-])", r"\\\1", word) for word in words)])
        if shell == "zsh":
            return zsh_offers(home, line)
        program = BASH.format(line=shlex.quote(line))
    done = home.run(shell, "-c", program, PATH=path(home))
    return sorted({offer.split("\t")[0].rstrip() for offer in done.stdout.splitlines()} - {""})


def path(home: Home) -> str:
    return f"{Path(sys.executable).parent}:{home.variables['PATH']}"


def zsh_offers(home: Home, line: str) -> list[str]:
    """Type a line into zsh on a terminal, press TAB, and return what is offered."""
    (home.path / ".zshrc").write_text(ZSH)
    offers = home.path / "offers"
    offers.write_text("")
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(home.path)
        os.execvpe("zsh", ["zsh", "-d", "-i"], {**home.variables, "PATH": path(home), "TERM": "dumb"})  # noqa: S606 - a shell on a terminal
    screen = b""
    while b"ready> " not in screen:
        screen += os.read(terminal, 65536)
    os.write(terminal, line.encode() + b"\t")
    while screen.count(b"done") < 2:
        # What is typed while zsh completes may be lost, or answer a question of zsh.
        os.write(terminal, b"\x15print done\n")
        while select.select([terminal], [], [], 20)[0]:
            screen += os.read(terminal, 65536)
            if screen.count(b"done") >= 2:
                break
    os.close(terminal)
    os.waitpid(pid, 0)
    return sorted({offer.replace("\\", "") for offer in offers.read_text().splitlines()} - {""})


@pytest.fixture(params=["bash", *(pytest.param(name, marks=pytest.mark.environment) for name in ("fish", "zsh"))])
def shell(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name if shutil.which(name) else absent(f"lacks {name}")


def test_commands_layers_and_options_are_completed(home: Home, shell: str) -> None:
    assert completed(home, shell, "rep") == ["report"]
    assert completed(home, shell, "purge", "miopen-t") == ["miopen-tuning"]
    assert completed(home, shell, "run", "--iso")[0].startswith("--isolated")


@thorough_only
@real
def test_keys_and_kernels_are_completed(home: Home, shell: str) -> None:
    home.python("kernels.py 1")
    (key,) = home.cachectl("ls -q pocl").stdout.split()
    # Words that take too long to find are left out, which on a busy machine may be all.
    for words, whole in ((("ls", "--kernel", "lk"), "lk0"), (("get", "pocl", key[:-3]), key)):
        offers = (completed(home, shell, *words) for _ in range(20))
        assert next(filter(None, offers), []) == [whole]


def test_a_shell_runs_nothing_that_a_cache_names(home: Home, shell: str) -> None:
    store(user_file(home.path), {(HOSTILE, ARGS): packed(CODE)})
    (key,) = home.cachectl("ls -q miopen").stdout.splitlines()
    (offer,) = completed(home, shell, "get", "miopen", key[:-3])
    # bash replaces what follows the last =.
    assert offer == (key.rpartition("=")[2] if shell == "bash" else key)
    assert HOSTILE in completed(home, shell, "ls", "--kernel", "$")
    assert not (home.path / "ran").exists()


def test_words_after_a_verb_that_runs_a_command_are_the_command(home: Home, shell: str) -> None:
    (home.path / "my program.py").touch()
    words = ("run", f"--isolated={home.path}/cold", "--", "cat", "my")
    # In bash, readline completes names of files if the script offers nothing.
    assert completed(home, shell, *words) == ([] if shell == "bash" else ["my program.py"])
    assert completed(home, shell, "run", "--no-cache", "--", "printe") == ["printenv"]


def test_installed_files_follow_the_grammar() -> None:
    """After a change of the command line, run packaging/share.py."""
    made = runpy.run_path(f"{PACKAGING}/share.py")["files"]()
    there = {name: (PACKAGING / "share" / name).read_text() for name in made}
    assert made == there


@real
def test_words_that_take_too_long_to_find_are_left_out(warm: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for patience, is_whole in ((600.0, True), (-1.0, False)):
        monkeypatch.setattr(completion, "_PATIENCE", patience)
        assert (len(warm.cachectl("completion --words keys").stdout.splitlines()) > 1) is is_whole
