"""Config files and variables: which value counts, where it comes from, and which files are refused."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from homes import make_home

from cachectl import Stack
from cachectl.cli.defaults import LIMITED, options_of, parser_of
from cachectl.cli.parser import VERBS
from cachectl.config import BadConfig, ConfigRefused, load, with_interpreters
from cachectl.layers.base.environment import Environment, config_paths
from cachectl.layers.base.errors import BadRequest

if TYPE_CHECKING:
    from homes import Home


def write(home: Home, text: str) -> Path:
    file = home.path / ".config" / "cachectl" / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def settings(home: Home, **variables: str) -> dict[str, tuple[object, str, int | None]]:
    found = json.loads(home.cachectl("config", "--json", check=True, **variables).stdout)["settings"]
    return {one["key"]: (one["value"], one["variable"] or one["origin"], one["line"]) for one in found}


def test_every_value_has_its_origin(home: Home, tmp_path: Path) -> None:
    write(home, 'wait = 3\n\n[prune] # mine\nolder-than = "30d"\npocl.max-size = "5M"\n\n[bench]\nrounds = 4\n')
    site = tmp_path / "site" / "cachectl" / "config.toml"
    site.parent.mkdir(parents=True)
    site.write_text(
        'python = [\n  "/usr/bin/python3", # Debian\n]\nwait = 9\nprune = { max-size = "2G", stale = true }\n'
    )
    variables = {"XDG_CONFIG_DIRS": str(tmp_path / "site"), "CACHECTL_PRUNE_STALE": "no"}
    found = settings(home, **variables, CACHECTL_PRUNE_MIOPEN_TUNING_OLDER_THAN="1w")
    assert found["python"] == (["/usr/bin/python3"], "site", 1)
    assert found["wait"] == (3, "user", 1)
    assert found["prune.max-size"] == ("2G", "site", 5)
    assert found["prune.older-than"] == ("30d", "user", 4)
    assert found["prune.pocl.max-size"] == ("5M", "user", 5)
    assert found["prune.stale"] == ("no", "CACHECTL_PRUNE_STALE", None)
    assert found["prune.miopen-tuning.older-than"][1] == "CACHECTL_PRUNE_MIOPEN_TUNING_OLDER_THAN"
    assert found["bench.rounds"] == (4, "user", 8)
    assert found["report.neighbours"] == (False, "default", None)
    text = home.cachectl("config", check=True, **variables).stdout
    assert "site:5" in text
    assert str(site) in text


def test_an_option_counts_more_than_a_variable_and_that_more_than_a_file(home: Home) -> None:
    write(home, '[env]\nshell = "fish"\nlayer = ["pocl"]\n')
    assert home.cachectl("env", "--disable").stdout == "set -gx POCL_KERNEL_CACHE '0'\n"
    assert "export POCL" in home.cachectl("env", "--disable", CACHECTL_ENV_SHELL="sh").stdout
    csh = home.cachectl("env", "--disable", "--shell", "csh", "--layer", "cuda", CACHECTL_ENV_SHELL="sh").stdout
    assert "setenv CUDA_CACHE_DISABLE" in csh
    assert "POCL" not in csh


def test_a_typed_value_that_is_the_usual_default_counts(home: Home) -> None:
    write(home, "[bench]\nrounds = 1\n")
    command = ("--", sys.executable, "-c", "")
    one, three = (home.json("bench", "--json", "-", *words, *command) for words in ((), ("-n", "3")))
    assert [len(done["settings"][0]["seconds"]) for done in (one, three)] == [1, 3]


GENERAL = [
    ("wiat = 3\n", 1, "no command, and no option of all commands"),
    ("\n[reprot]\n", 2, "no command"),
    ("a = 1\n\n[prune\n", 3, "Expected"),
    ("\na = [\n", 2, ""),
    ('a = "\xe9"\n', 1, "no command"),
]
LIMITS = [
    ('[prune]\n\nmax-sise = "5G"\n', 3, "prune.max-sise: no limit; there are max-size"),
    ('[prune]\nmax-size = "much"\n', 2, "such as 500M"),
    ("[prune]\nmax-size = []\n", 2, "such as 500M"),
    ("[prune]\nmax-size = 5\n", 2, "cannot read '5' as a size; write a number and B, K, M, G or T, such as 500M"),
    ("[prune]\nstale = 3\n", 2, "neither true nor false"),
    ("[prune]\nolder-than = 3\n", 2, "such as 30d"),
    ("[prune.pocl]\nolder-then = 3\n", 2, "no limit"),
    ("# Windows\r\n[prune.pocl]\r\nolder-then = 3\r\n", 3, "no limit"),
    ("prune = 3\n", 1, "a table; write [prune]"),
]
DEFAULTS = [
    ("wait = 100000\n", 1, "not between 0 and 86400"),
    ("[verify]\nwait = true\n", 2, "True is no SECONDS"),
    ("[verify]\nquarantine = true\n", 2, "no option of verify that can be set; there are wait"),
    ('python = ["python3"]\n', 1, "not absolute"),
    ("python = 3\n", 1, "a list of paths"),
    ('[report]\nneighbours = "maybe"\n', 2, "neither true nor false"),
]


def refused(home: Home, verb: str, case: tuple[str, int, str]) -> None:
    text, line, words = case
    file = write(home, text)
    done = home.cachectl(verb, check=False)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith(f"cachectl: {file}:{line}: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("case", [*GENERAL, *LIMITS, *DEFAULTS])
def test_config_finds_what_is_wrong_anywhere(home: Home, case: tuple[str, int, str]) -> None:
    refused(home, "config", case)


@pytest.mark.parametrize("case", [*GENERAL, *LIMITS])
def test_prune_needs_right_limits(home: Home, case: tuple[str, int, str]) -> None:
    refused(home, "prune", case)


@pytest.mark.parametrize("case", [*GENERAL, *DEFAULTS[:3]])
def test_a_command_needs_its_own_table(home: Home, case: tuple[str, int, str]) -> None:
    refused(home, "verify", case)


def test_a_wrong_table_stops_no_other_command(home: Home) -> None:
    write(home, "[verify]\nwait = true\n")
    home.cachectl("report")
    assert home.cachectl("verify", check=False).returncode == 2


def test_a_wrong_variable_is_named(home: Home) -> None:
    done = home.cachectl("prune", CACHECTL_PRUNE_POCL_MAX_SIZE="huge", check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "CACHECTL_PRUNE_POCL_MAX_SIZE: prune.pocl.max-size: cannot read 'huge'" in done.stderr


def test_a_variable_names_another_file_or_none(home: Home) -> None:
    write(home, "wait = 3\n")
    other = home.path / "other.toml"
    other.write_text("wait = 4\n")
    assert settings(home, CACHECTL_CONFIG="~/other.toml")["wait"] == (4, "named", 1)
    assert settings(home, CACHECTL_CONFIG=os.devnull)["wait"][1] == "default"
    missing = home.cachectl("report", CACHECTL_CONFIG="~/missing.toml", check=False)
    assert (missing.returncode, "missing.toml: No such file" in missing.stderr) == (1, True)


def test_python_takes_an_environment(home: Home) -> None:
    write(home, 'python = ["~/venv/bin/python", "/usr/bin/python3"]\n')
    found = load(home.environment())
    assert found.find_interpreters() == (home.path / "venv/bin/python", Path("/usr/bin/python3"))
    assert load(home.environment(CACHECTL_PYTHON="/a:/b")).find_interpreters() == (Path("/a"), Path("/b"))
    write(home, "[prune]\nstale = 1.5\n")
    with pytest.raises(BadConfig, match=r"config\.toml:2: prune\.stale"):
        Stack(home.environment()).prune()
    write(home, "wait = 1\n")
    with pytest.raises(BadRequest, match="name a limit"):
        Stack(home.environment()).prune()


def test_staleness_depends_on_the_configured_interpreters(home: Home) -> None:
    write(home, 'python = ["/none/python"]\n[prune]\nstale = true\n')
    for words in (("prune",), ("purge", "--all", "--stale"), ("report",)):
        done = home.cachectl(*words, check=False)
        assert (done.returncode, "/none/python did not answer" in done.stderr) == (2, True)
    assert home.cachectl("report", "--python", sys.executable).returncode == 0
    known = with_interpreters(home.environment())
    assert known.python_paths == (Path("/none/python"),)
    assert with_interpreters(known) is known


def test_an_interpreter_of_the_settings_that_does_not_answer_is_found(home: Home) -> None:
    file = write(home, 'wait = 1\npython = ["/nowhere/python"]\n')
    done = home.cachectl("report", check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"cachectl: {file}:2: python: --python /nowhere/python: ")


def test_a_config_that_is_not_a_file_is_refused(home: Home) -> None:
    file = write(home, "")
    file.unlink()
    for make, remove in ((os.mkfifo, os.unlink), (os.mkdir, os.rmdir)):
        make(file)
        with pytest.raises(ConfigRefused, match="not a file"):
            load(home.environment())
        remove(file)
    file.write_bytes(b"# " + bytes([0xE9]))
    with pytest.raises(BadConfig, match=r"config\.toml:1: not UTF-8"):
        load(home.environment())
    file.write_bytes(b"#" * 100_000)
    with pytest.raises(ConfigRefused, match="at most 65536 bytes"):
        load(home.environment())
    for nested in (".".join("a" * 2_000) + " = 1", "a = " + "[" * 2_000):
        file.write_text(nested)
        with pytest.raises(BadConfig, match="nested too deeply"):
            load(home.environment())
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigRefused, match="not a file"):
        load(home.environment())


def test_the_lines_of_a_long_file_are_found_at_once(home: Home) -> None:
    file = write(home, "#\n" * 20_000 + "[prune]\nwith = [\n1,\n]\nmax-sise = 1\n")
    started = time.monotonic()
    lines = {setting.key: setting.line for setting in load(home.environment()).below("prune")}
    assert lines == {"prune.with": 20_002, "prune.max-sise": 20_005}
    assert time.monotonic() - started < 10, file


@pytest.fixture
def reachable() -> Iterator[Home]:
    """Return a home that other users can enter."""
    with tempfile.TemporaryDirectory(prefix="reachable-") as folder:
        os.chmod(folder, 0o755)  # noqa: S103
        yield make_home(Path(folder) / "home")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs modes of files")
def test_a_file_that_others_can_write_is_refused(reachable: Home) -> None:
    file = write(reachable, "wait = 3\n")
    assert load(reachable.environment()).files
    for place in (file, file.parent, file.parent.parent):
        mode = place.stat().st_mode
        place.chmod(mode | 0o002)
        done = reachable.cachectl("report", check=False)
        assert done.returncode == 1
        assert done.stderr.startswith(f"cachectl: {file}: refused: other users can write to {place};")
        place.chmod(mode)
    elsewhere = reachable.path.parent / "dotfiles.toml"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert load(reachable.environment()).files
    elsewhere.chmod(0o666)
    with pytest.raises(ConfigRefused, match=r"can write to .*dotfiles\.toml"):
        load(reachable.environment())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs the superuser, who gives files away")
def test_a_file_of_another_user_is_refused(reachable: Home) -> None:
    file = write(reachable, "wait = 3\n")
    os.chown(file, 65534, 65534)
    with pytest.raises(ConfigRefused, match=r"belongs to nobody; .*CACHECTL_CONFIG=/dev/null"):
        load(reachable.environment())


@pytest.mark.parametrize(
    ("variables", "paths"),
    [
        ({}, ["/h/.config", "/etc/xdg"]),
        ({"XDG_CONFIG_HOME": "/c", "XDG_CONFIG_DIRS": "/a:b:/d"}, ["/c", "/a", "/d"]),
        ({"XDG_CONFIG_HOME": "", "XDG_CONFIG_DIRS": "relative"}, ["/h/.config", "/etc/xdg"]),
    ],
)
def test_files_are_where_platformdirs_says(variables: dict[str, str], paths: list[str]) -> None:
    environment = Environment({"HOME": "/h", **variables}, Path("/h"))
    assert [str(path) for _, path in config_paths(environment)] == [f"{one}/cachectl/config.toml" for one in paths]


def test_this_process_has_the_files_of_platformdirs(monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    monkeypatch.setenv("XDG_CONFIG_DIRS", "/one:/two")
    user, *site = (path.parent for _, path in config_paths(Environment.here()))
    assert user == platformdirs.user_config_path("cachectl", appauthor=False)
    assert site[0] == platformdirs.site_config_path("cachectl", appauthor=False)


def test_the_page_lists_every_key() -> None:
    page = (Path(__file__).parents[1] / "docs" / "config.md").read_text()
    rows = [
        [re.findall("`([^`]+)`", cell) for cell in row.split("|")[1:3]] for row in page.splitlines() if row[:2] == "| "
    ]
    listed = {f"{table[1:-1]}.{key}" for tables, keys in rows for table in tables for key in keys if table[0] == "["}
    assert listed == {f"{verb}.{name}" for verb in VERBS if verb != LIMITED for name in options_of(parser_of(verb))}


def test_without_a_file_nothing_is_read(home: Home) -> None:
    program = "import sys; from cachectl.cli.main import main; main(['report']); print(*sys.modules)"
    loaded = home.run(sys.executable, "-c", program).stdout.split()
    assert not {"cachectl.config", "cachectl.cli.defaults", "tomllib", "tomli"}.intersection(loaded)
