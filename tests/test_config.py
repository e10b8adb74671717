"""Config files: which value counts, what is wrong with one, and which files are refused."""

import os
import sys
from pathlib import Path

import pytest
from homes import Home, make_home
from tiers import NOBODY, as_root

from cachectl.config import load, with_interpreters
from cachectl.layers.base.environment import config_paths
from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.layers.host.here import this_environment


def test_the_users_file_counts_more_than_a_sites(home: Home, tmp_path: Path) -> None:
    user = home.configure('wait = 3\n\n[prune] # mine\nolder-than = "30d"\n')
    site = tmp_path / "site/cachectl/config.toml"
    site.parent.mkdir(parents=True)
    site.write_text('python = ["/usr/bin/python3"]\nwait = 9\nprune = { max-size = "2G", stale = true }\n')
    document = home.json("config", XDG_CONFIG_DIRS=str(tmp_path / "site"))
    assert {setting["key"]: (setting["value"], setting["path"]) for setting in document["settings"]} == {
        "wait": (3, str(user)),
        "prune.older-than": ("30d", str(user)),
        "python": (["/usr/bin/python3"], str(site)),
        "prune.max-size": ("2G", str(site)),
        "prune.stale": (True, str(site)),
    }
    assert [(file["origin"], file["exists"]) for file in document["files"]] == [("user", True), ("site", True)]
    assert "prune.older-than  30d" in home.cachectl("config").stdout
    assert home.cachectl("config", CACHECTL_CONFIG=os.devnull).stdout.startswith("nothing is set\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wiat = 3\n", "wiat: unknown key; the keys are wait, python, shared, portable, prune.max-size"),
        ("[prune]\nmax-size = []\n", "such as 500M"),
        ("[prune]\nmax-size = 5\n", "prune.max-size: cannot read '5' as a size"),
        ("shared = 1\n", "neither true nor false"),
        ("wait = 100000\n", "not a number of seconds between 0 and 86400"),
        ('python = ["python3"]\n', "not absolute"),
        ('python = ["/nowhere/python"]\n', "/nowhere/python: no such file"),
    ],
)
def test_a_wrong_key_or_value_is_one_line(home: Home, text: str, words: str) -> None:
    file = home.configure(text)
    done = home.cachectl("report", check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr
    assert str(file) in done.stderr or "no such file" in words


def test_a_wait_and_interpreters_are_defaults_of_options(home: Home) -> None:
    home.configure('python = ["~/venv/bin/python", "/none/python"]\n')
    known = with_interpreters(home.environment())
    assert known.python_paths == (home.path / "venv/bin/python", Path("/none/python"))
    assert with_interpreters(known) is known
    assert home.cachectl("report --python", sys.executable).returncode == 0


def test_a_variable_names_another_file(home: Home) -> None:
    home.configure("wait = 3\n")
    (home.path / "other.toml").write_text("wait = 4\n")
    assert load(home.environment(CACHECTL_CONFIG="~/other.toml")).get("wait") == 4
    home.refused("report", says="missing.toml: No such file", CACHECTL_CONFIG="~/missing.toml")


def test_a_config_that_is_not_a_file_is_refused(home: Home) -> None:
    file = home.configure("")
    file.unlink()
    # A link that leads nowhere is none.
    file.symlink_to(home.path / "not mounted")
    assert home.cachectl("report").stderr == ""
    file.unlink()
    for make, remove in ((os.mkfifo, os.unlink), (os.mkdir, os.rmdir)):
        make(file)
        with pytest.raises(CachectlError, match="not a file"):
            load(home.environment())
        remove(file)
    file.write_bytes(b"# " + bytes([0xE9]))
    with pytest.raises(BadRequest, match=r"config\.toml: 'utf-8' codec"):
        load(home.environment())


@pytest.fixture
def reachable(open_folder: Path) -> Home:
    """Return a home that other users can enter."""
    return make_home(open_folder / "home")


def test_a_file_that_others_can_write_is_refused(reachable: Home) -> None:
    file = reachable.configure("wait = 3\n")
    assert load(reachable.environment()).settings
    for place in (file, file.parent, file.parent.parent):
        mode = place.stat().st_mode
        place.chmod(mode | 0o002)
        reachable.refused("report", says=f"cachectl: {file}: refused: other users can write to {place};")
        place.chmod(mode)
    elsewhere = reachable.path.parent / "dotfiles.toml"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert load(reachable.environment()).settings
    elsewhere.chmod(0o666)
    with pytest.raises(CachectlError, match=r"can write to .*dotfiles\.toml"):
        load(reachable.environment())


@as_root
def test_a_file_of_another_user_is_refused(reachable: Home) -> None:
    file = reachable.configure("wait = 3\n")
    os.chown(file, NOBODY, NOBODY)
    with pytest.raises(CachectlError, match=r"belongs to nobody; .*CACHECTL_CONFIG=/dev/null"):
        load(reachable.environment())


@pytest.mark.parametrize(
    "variables",
    [{}, {"XDG_CONFIG_HOME": "/c", "XDG_CONFIG_DIRS": "/a:/d"}, {"XDG_CONFIG_HOME": "", "XDG_CONFIG_DIRS": ""}],
)
def test_files_are_where_platformdirs_says(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    for name in ("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    user, *sites = (path.parent for _, path in config_paths(this_environment()))
    assert user == platformdirs.user_config_path("cachectl", appauthor=False)
    assert ":".join(map(str, sites)) == platformdirs.site_config_dir("cachectl", multipath=True)
