"""Verbs in the homes of other users: each by a child that has become that user, however hostile the home is."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from documents import validated
from homes import PROGRAMS
from support.accounts import account, install_for_all
from support.hostile import PYTHON, database, hash_tree, link

from cachectl.homes import Account, Homes, accounts_of
from cachectl.homes.child import Answer, ask
from cachectl.homes.gathering import understood, words_of

if TYPE_CHECKING:
    from homes import Home

ME = pwd.getpwuid(os.geteuid()).pw_name
SUPERUSER = ME == "root"


def test_a_home_is_one_user_of_a_document(home: Home) -> None:
    (home.path / ".cache" / "pytools").mkdir(parents=True)
    document = validated(home.json("report", "--home", str(home.path)))
    (only,) = document["users"]
    assert (document["schema"], only["user"], only["home"]) == ("cachectl/homes/1", ME, str(home.path))
    assert only["schema"] == "cachectl/report/1"
    for layer in ("pocl", "mesa", "miopen", "cuda"):
        (roots,) = (found["roots"] for found in only["layers"] if found["layer"] == layer)
        assert roots[0]["path"].startswith(f"{home.path}/")
    assert document["total"] == {"homes": 1, "homes_failed": 0, "entries": 0, "files": 0, "bytes": 0}
    assert document["complete"]


def test_other_users_are_named_by_accounts(home: Home) -> None:
    refused = home.cachectl("report", "--user", "nobody of this name", check=False)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2 if SUPERUSER else 1, "", 1)
    missing = home.cachectl("purge", "--all", "--home", str(home.path / "missing"), check=False)
    assert (missing.returncode, missing.stderr) == (
        1,
        f"cachectl: {home.path}/missing: No such file or directory; --home takes a folder\n",
    )


@pytest.mark.parametrize("option", ["--home", "--root"])
def test_an_empty_folder_is_not_the_working_folder(home: Home, option: str) -> None:
    """A script may write ``--home "$FOLDER"`` without that variable."""
    refused = home.cachectl("report", f"{option}=", check=False)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert f"argument {option}: no folder is named" in refused.stderr


@pytest.mark.skipif(not SUPERUSER, reason="needs root")
def test_root_does_not_open_the_settings_of_a_home(home: Home) -> None:
    folder = home.path / "nobody" / ".config" / "cachectl"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "config.toml")
    for path in (home.path / "nobody", folder, folder / "config.toml"):
        os.chown(path, pwd.getpwnam("nobody").pw_uid, -1)
    done = home.cachectl("report", "--home", str(home.path / "nobody"), check=False)
    assert done.stderr.startswith("cachectl: nobody: "), done.stderr


@pytest.mark.skipif(not SUPERUSER, reason="needs root")
def test_a_home_that_was_not_seen_is_not_fine(home: Home) -> None:
    for verb in ("doctor", "verify"):
        done = home.cachectl(verb, "--user", "nobody", check=False)
        assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.skipif(not SUPERUSER, reason="needs root")
def test_a_parent_that_ignores_its_children_still_hears_them() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        answer = ask(accounts_of(["root"])[0], ["layers", "--json"], seconds=100, stop=threading.Event())
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert (answer.problem, answer.status) == (None, 0)
    assert json.loads(answer.output)["layers"]


def test_options_become_words_again() -> None:
    options = {
        "layers": ["pocl", "-odd"],
        "stale": True,
        "all": False,
        "older_than": "30d",
        "kernel": "-a*",
        "sort": None,
    }
    assert list(words_of(options)) == ["--stale", "--older-than=30d", "--kernel=-a*", "--", "pocl", "-odd"]


LAYER = {"removed": 1, "orphans_removed": 0, "bytes_freed": 5, "skipped": [], "failed": [], "remade": []}
FORGED: Any = {
    "schema": "cachectl/purge/1",
    "dry_run": False,
    "total": {"removed": 10**9, "orphans_removed": 0, "bytes_freed": 10**9, "skipped": 0, "failed": 0},
}


@pytest.mark.parametrize(
    ("status", "output", "errors", "error", "removed"),
    [
        (0, {**FORGED, "layers": [{**LAYER, "layer": "pocl"}]}, b"", None, 1),
        (0, {**FORGED, "layers": [{**LAYER, "layer": "x"}] * 201}, b"", "its answer has more than 200 layers", 0),
        (0, {"schema": "cachectl/report/1"}, b"", "its answer is no document cachectl/purge/1", 0),
        (2, None, b"noise\ncachectl purge: name the \x1b[31mlayers\n", r"name the \x1b[31mlayers", 0),
        (1, None, b"", "ended with status 1 and no answer", 0),
        (-9, None, b"", "was ended by signal 9", 0),
        (77, None, b"", "its home /home/ann does not exist", 0),
    ],
)
def test_the_answer_of_a_child_is_what_its_items_say(
    status: int, output: object, errors: bytes, error: str | None, removed: int
) -> None:
    account = Account("ann", 1000, 1000, Path("/home/ann"))
    written = b"" if output is None else json.dumps(output).encode()
    found = understood(account, "purge", Answer(status, written, errors))
    assert found is not None
    assert (found.error, found.status) == (error, status)
    homes = Homes("purge", (found,))
    assert (homes.failed, homes.total.get("removed", 0)) == (status != 0 or error is not None, removed)
    if status == 77:
        assert understood(replace(account, optional=True), "purge", Answer(status, b"", b"")) is None


# ---------------------------------------------------------------------- real users


@dataclass(frozen=True)
class Person:
    """A user of this machine, and a cachectl that everybody can start."""

    name: str
    home: Path
    cachectl: tuple[str, ...]

    def run(self, *command: str) -> subprocess.Popen[str]:
        """Start a program as this user."""
        account = pwd.getpwnam(self.name)
        return subprocess.Popen(
            command,
            env={"HOME": str(self.home), "PATH": os.defpath},
            cwd=self.home,
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=[],
            stdout=subprocess.PIPE,
            text=True,
        )

    def json(self, *words: str) -> Any:  # noqa: ANN401 - JSON
        """Run a verb as this user would."""
        return json.loads(self.run(*self.cachectl, *words, "--json").communicate()[0])

    def own(self) -> None:
        """Give the user everything in the home, and nobody else a way into it."""
        account = pwd.getpwnam(self.name)
        for above, names, files in os.walk(self.home):
            for name in (".", *names, *files):
                os.lchown(os.path.join(above, name), account.pw_uid, account.pw_gid)
        self.home.chmod(0o700)


@dataclass(frozen=True)
class People:
    """Two users and a hostile third, alone in a password file of their own, and a folder of root's."""

    ann: Person
    bob: Person
    eve: Person
    base: Path
    command: tuple[str, ...]

    def cachectl(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command as root, in a system whose only people are these, without root's power over files."""
        variables = {"HOME": str(self.base / "root"), "PATH": os.environ["PATH"]}
        return subprocess.run(
            [*self.command, *self.ann.cachectl, *words],
            env=variables,
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    def json(self, *words: str) -> Any:  # noqa: ANN401 - JSON
        """Run a command as root and return its document."""
        return validated(json.loads(self.cachectl(*words, "--json").stdout))


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """Make a folder that everybody can enter; the temporary folders of a test belong to its user alone."""
    if not SUPERUSER or shutil.which("useradd") is None:
        pytest.skip("needs root and useradd")
    with tempfile.TemporaryDirectory(prefix="cachectl-people-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture(scope="module")
def installed(base: Path) -> tuple[str, ...]:
    """Return how to start a cachectl that every user can read."""
    return install_for_all(base)


@pytest.fixture
def people(base: Path, installed: tuple[str, ...], filled: Home) -> Iterator[People]:
    """Make the users, with caches that real programs filled, and a system in which there are no others."""
    for tool in ("unshare", "setpriv"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    with ExitStack() as stack:
        ann, bob, eve = (stack.enter_context(_person(base, name, installed)) for name in ("ann", "bob", "eve"))
        for person in (ann, bob):
            shutil.copytree(filled.path / ".cache", person.home / ".cache", symlinks=True)
            person.own()
        (base / "passwd").write_text(
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/nonexistent:/bin/sh\n"
            + "".join(f"{':'.join(map(str, pwd.getpwnam(one.name)))}\n" for one in (ann, bob, eve))
            + "away:x:1999:1999::/nonexistent:/bin/sh\n"
        )
        mounted = f'mount --bind {base}/passwd /etc/passwd && exec setpriv --bounding-set={WITHOUT} "$@"'
        yield People(ann, bob, eve, base, ("unshare", "--mount", "sh", "-c", mounted, "sh"))


#: Without these root cannot touch the files of others: what is removed was removed by its owner.
WITHOUT = "-dac_override,-dac_read_search,-fowner,-chown"


@contextmanager
def _person(base: Path, name: str, installed: tuple[str, ...]) -> Iterator[Person]:
    with account(f"cctl{secrets.token_hex(3)}{name}", base / name) as made:
        yield Person(made, base / name, installed)


def _make_hostile(people: People) -> Path:
    """Fill the home of the third with traps; return a folder of root's that they lead to."""
    eve, outside = people.eve.home, people.base / "outside"
    shutil.copytree(people.ann.home / ".cache", outside, symlinks=True)
    (outside / "thesis.tex").write_text("years of work")
    database(outside / f"pdict-v5-far-{PYTHON}.sqlite", "create table dict (keyhash text)")
    places = (".cache/pytools", ".cache/pyopencl", ".cache/comgr", ".nv/ComputeCache", ".config/miopen")
    for place in places:
        (eve / place).mkdir(parents=True, exist_ok=True)
        link(eve / place, outside)
    # Whole roots: one of another user, one of root's, one of the system.
    (eve / ".cache" / "pocl").symlink_to(people.bob.home / ".cache" / "pocl")
    (eve / ".cache" / "neo_compiler_cache").symlink_to(outside)
    (eve / ".cache" / "mesa_shader_cache").symlink_to("/etc")
    # Code that a Python of this user would run.
    code = f"import os; os.close(os.open({str(eve / 'ran')!r}, os.O_CREAT | os.O_WRONLY))\n"
    for version in range(10, 16):
        site = eve / ".local" / "lib" / f"python3.{version}" / "site-packages"
        (site / "evil-1.dist-info").mkdir(parents=True)
        (site / "evil-1.dist-info" / "METADATA").write_text("Name: evil\nVersion: 1\n")
        (site / "evil-1.dist-info" / "entry_points.txt").write_text("[cachectl.layers]\nevil = evil:Evil\n")
        (site / "evil.pth").write_text(code.replace("\n", "") + "\n")
        for module in ("sitecustomize", "usercustomize", "evil", "cachectl", "platformdirs"):
            (site / f"{module}.py").write_text(code)
    for module in ("sitecustomize", "cachectl", "platformdirs", "json"):
        (eve / f"{module}.py").write_text(code)
    people.eve.own()
    # A hard link to it is in that home.
    os.chown(outside / "thesis.tex", 0, 0)
    return outside


@pytest.mark.real
@pytest.mark.environment
def test_all_users_are_counted_and_cleared_each_as_themselves(people: People) -> None:
    outside = _make_hostile(people)
    everybody = (people.ann, people.bob, people.eve)
    totals = [person.json("report")["total"] for person in everybody]
    assert totals[0] == totals[1]
    assert totals[0]["entries"] > 20
    before = hash_tree(outside, people.bob.home / ".cache")

    document = people.json("report", "--all-users")
    assert [user["user"] for user in document["users"]] == [person.name for person in everybody]
    assert [user["total"] for user in document["users"]] == totals
    for number in ("entries", "files", "bytes"):
        assert document["total"][number] == sum(total[number] or 0 for total in totals)

    assert document["complete"] == all(total["complete"] for total in totals)

    for verb in ("ls", "verify", "doctor"):
        assert len(people.json(verb, "--all-users")["users"]) == 3
    assert people.json("prune", "--max-size=0B", "--dry-run", "--all-users")["total"]["removed"] > 40
    assert hash_tree(outside, people.bob.home / ".cache") == before

    # A lock that its owner never gives back holds up nobody else.
    hold = (
        "import sqlite3, sys, time; c = sqlite3.connect(sys.argv[1]); c.execute('create table if not exists t (a)'); "
    )
    hold += "c.execute('begin exclusive'); print('held', flush=True); time.sleep(600)"
    held = people.eve.home / ".cache" / "pytools" / f"pdict-v5-held-{PYTHON}.sqlite"
    holder = people.eve.run(people.ann.cachectl[0], "-c", hold, str(held))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    try:
        people.cachectl("purge", "--all", "--user", people.eve.name, "--wait=0.1")
        assert hash_tree(outside, people.bob.home / ".cache") == before
        document = people.json("purge", "--all", "--all-users", "--wait=0.1")
    finally:
        holder.kill()
        holder.communicate()
    removed = {user["user"]: user["total"]["removed"] for user in document["users"]}
    assert removed[people.ann.name] == removed[people.bob.name] == totals[0]["entries"]
    assert [person.json("report")["total"]["entries"] for person in (people.ann, people.bob)] == [0, 0]
    assert hash_tree(outside) == {path: what for path, what in before.items() if path.startswith(bytes(outside))}
    assert not (people.eve.home / "ran").exists()
    assert not list((people.base / "root").glob("**/*"))


@pytest.mark.real
@pytest.mark.environment
def test_each_user_has_settings_of_his_own(people: People) -> None:
    limits = {
        people.base / "root": "[prune]\nmax-size = '0B'\n",
        people.ann.home: '[prune]\nolder-than = "99d"\n[prune.pocl]\nmax-size = "1B"\n',
        people.eve.home: "[prune]\nmax-sise = 0\n",
    }
    for home, text in limits.items():
        file = home / ".config" / "cachectl" / "config.toml"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (people.bob.home / ".config" / "cachectl" / "config.toml").mkdir(parents=True)
    for person in (people.ann, people.bob, people.eve):
        person.own()
    found = {one["user"]: one for one in people.json("prune", "--all-users", "--dry-run")["users"]}
    ann = found[people.ann.name]["layers"]
    assert {layer["layer"] for layer in ann if layer["removed"]} == {"pocl"}
    assert "config.toml: not a file" in found[people.bob.name]["error"]
    assert "config.toml:2: prune.max-sise: no limit" in found[people.eve.name]["error"]
    by_home = people.json("prune", "--dry-run", "--home", str(people.ann.home))
    assert [layer["removed"] for layer in by_home["users"][0]["layers"]] == [layer["removed"] for layer in ann]
    shutil.rmtree(people.base / "root" / ".config")


@pytest.mark.real
@pytest.mark.environment
def test_tables_name_the_user_and_the_owner_decides_about_a_home(people: People) -> None:
    ann, bob = people.ann.name, people.bob.name
    table = people.cachectl("report", "--user", ann, "--user", bob).stdout.splitlines()
    assert table[0].split() == ["user", "layer", "entries", "files", "size", "stale"]
    assert {line.split()[0] for line in table[1:-1]} == {ann, bob}
    assert table[-1].startswith("total ")
    listed = people.cachectl("ls", "--home", str(people.ann.home), "--limit=2")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["user", ann, ann]
    # A home that belongs to one user, on a path that another can change.
    (people.eve.home / "way").symlink_to(people.bob.home)
    people.eve.home.chmod(0o755)
    os.lchown(people.eve.home, pwd.getpwnam(people.eve.name).pw_uid, -1)
    os.lchown(people.eve.home / "way", pwd.getpwnam(people.eve.name).pw_uid, -1)
    refused = people.cachectl("purge", "--all", "--home", str(people.eve.home / "way"))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"belongs to {bob}, but {people.eve.name} decides" in refused.stderr
    shut = people.cachectl("report", "--user", "away", "--user", ann)
    assert (shut.returncode, "cachectl: away: its home /nonexistent does not exist" in shut.stderr) == (1, True)
    assert ann in shut.stdout


@pytest.mark.real
@pytest.mark.environment
@pytest.mark.parametrize(("flood", "because"), [((), "took longer than 10 s"), (("80",), "wrote more than 64 MiB")])
def test_a_child_that_its_user_has_taken_over_fails_alone(flood: Sequence[str], because: str, people: People) -> None:
    program = people.base / "captor.py"
    shutil.copy(PROGRAMS / "captor.py", program)
    captor = people.eve.run(people.ann.cachectl[0], str(program), *flood)
    assert captor.stdout is not None
    assert captor.stdout.readline() == "waiting\n"
    try:
        started = time.monotonic()
        done = people.cachectl("report", "--all-users", f"--time-limit={60 if flood else 10}")
        assert time.monotonic() - started < 40
    finally:
        captor.kill()
        captor.communicate()
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if because in line] == done.stderr.splitlines()
    assert done.stderr.startswith(f"cachectl: {people.eve.name}: ")
    assert people.ann.name in done.stdout
    assert people.bob.name in done.stdout
    assert not _processes_of(people.eve)


def _processes_of(person: Person) -> list[str]:
    uid = pwd.getpwnam(person.name).pw_uid
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                found.append(Path(f"/proc/{name}/cmdline").read_text())
        except OSError:
            continue
    return found
