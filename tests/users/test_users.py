"""``--user`` and ``--all-users``: each user by a child that has become that user, however hostile the home is."""

import json
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from documents import validated
from homes import PROGRAMS, Home
from support.accounts import account, install_for_all
from support.hostile import PYTHON, database, hash_tree, link
from tiers import real

from benchmarks.commands import at_home
from cachectl.cli import users

ME = pwd.getpwuid(os.geteuid()).pw_name
SUPERUSER = ME == "root"


def test_other_users_are_for_root(home: Home) -> None:
    refused = home.cachectl("report --user", "nobody of this name", check=False)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2 if SUPERUSER else 1, "", 1)
    assert ("unknown user '" in refused.stderr) == SUPERUSER


def test_a_child_gets_the_words_of_the_verb_and_its_answer_is_summed_and_escaped() -> None:
    typed = "report --user ann --csv --user=bob --all-users --json --wait=1 -- pocl"
    assert list(users._words(typed.split())) == ["report", "--json", "--wait=1", "--", "pocl"]
    numbers: list[tuple[object, int | None]] = [(1, 1), ([1, 2], 2), *((bad, None) for bad in ("1", -1, True, 1 << 64))]
    for value, number in numbers:
        item = users._escaped({"bytes": value, "layer": "\x1b]0;\x07\n\u202e"}, 3)
        assert (users._number(item, "bytes"), item["layer"]) == (number, r"\x1b]0;\x07\n\u202e")


def document(*layers: object, count: object = None) -> bytes:
    """Return the rows that a child writes: what is beside lists, and how long these are; then an item a line."""
    head = {"schema": "cachectl/report/1", "rows": {"layers": len(layers) if count is None else count}}
    return "".join(f"{json.dumps(row)}\n" for row in (head, *({"layers": layer} for layer in layers))).encode()


POCL = {"layer": "pocl", "bytes": 1}


@pytest.mark.parametrize(
    ("status", "written", "errors", "error"),
    [
        (0, document(POCL), b"", None),
        (0, b"", b"", "ended with status 0 and no answer"),
        (2, b"", b"noise\ncachectl report: name the \x1b[31mlayers\n", r"name the \x1b[31mlayers"),
        (-9, b"", b"", "was ended by signal 9"),
        *(
            (0, data, b"", "did not write a valid document of report")
            for data in (
                b'{"rows": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
                document(1),
                document({"bytes": float("nan")}),
                document(count="many"),
                document(count=float("inf")),
                document(POCL).replace(b'"rows"', b'"row"'),
                document(POCL).replace(b'{"layers": {', b'{"other": {'),
                b" " * (2 << 20),
                "\udcff".encode("utf-16", "surrogatepass"),
            )
        ),
    ],
)
def test_an_answer_is_a_document(
    status: int, written: bytes, errors: bytes, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "_run", lambda *_: (status, written, errors, None))
    document, _, _ = users._ask(pwd.getpwnam(ME), ["report", "--json"], "layers")
    assert (document["error"], "layers" in document) == (error, error is None)


@pytest.mark.parametrize(
    ("written", "kept", "cut"),
    [
        (document(POCL, POCL), 2, 0),
        (document(POCL, {"layer": "x" * (64 << 10)}, POCL), 2, 1),
        (document(POCL, count=1000), 1, 999),
        (document(*[POCL] * 50)[:-5], 49, 1),
    ],
)
def test_rows_beyond_the_limits_are_counted(
    written: bytes, kept: int, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "_run", lambda *_: (0, written, b"", None))
    document, _, _ = users._ask(pwd.getpwnam(ME), ["report", "--json"], "layers")
    said = f"{cut} row{'s' * (cut > 1)} cut: a row has at most 64 KiB, an answer 2 MiB; select fewer entries"
    assert (len(document["layers"]), document["error"]) == (kept, said if cut else None)


class Person(NamedTuple):
    """A user of this machine, and a cachectl that everybody can start."""

    name: str
    home: Path
    cachectl: tuple[str, ...]

    def run(self, *command: str) -> subprocess.Popen[str]:
        user = {"user": self.name, "group": pwd.getpwnam(self.name).pw_gid, "extra_groups": []}
        own = {"HOME": str(self.home), "PATH": os.defpath}
        return subprocess.Popen(command, env=own, cwd=self.home, stdout=subprocess.PIPE, text=True, **user)  # type: ignore[call-overload, no-any-return]

    def report(self) -> Any:  # noqa: ANN401 - JSON
        return json.loads(self.run(*self.cachectl, "report", "--json").communicate()[0])["total"]

    def own(self) -> None:
        """Give the user everything in the home, and nobody else a way into it."""
        subprocess.run(["chown", "-RhP", f"{self.name}:", self.home], check=True)
        self.home.chmod(0o700)


class People(NamedTuple):
    """Two users and a hostile third, alone in a password file of their own, and a folder of root's."""

    ann: Person
    bob: Person
    eve: Person
    base: Path
    command: tuple[str, ...]

    def cachectl(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a command as root, in a system whose only people are these, without root's power over files."""
        variables = {**at_home(self.base / "root"), "PATH": os.environ["PATH"]}
        command = [*self.command, *self.ann.cachectl, *line.split()]
        return subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True, check=False, timeout=600)

    def json(self, line: str) -> Any:  # noqa: ANN401 - JSON
        return json.loads(self.cachectl(f"{line} --json").stdout)


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
    return install_for_all(base)


@pytest.fixture
def people(base: Path, installed: tuple[str, ...], filled: Home) -> Iterator[People]:
    """Make the users, with caches that real programs filled, and a system in which there are no others."""
    for tool in ("unshare", "setpriv"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    with ExitStack() as stack:
        names = {name: f"cctl{secrets.token_hex(3)}{name}" for name in ("ann", "bob", "eve")}
        ann, bob, eve = (
            Person(stack.enter_context(account(user, base / name)), base / name, installed)
            for name, user in names.items()
        )
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
    (eve / ".cache/pocl").symlink_to(people.bob.home / ".cache/pocl")
    (eve / ".cache/neo_compiler_cache").symlink_to(outside)
    (eve / ".cache/mesa_shader_cache").symlink_to("/etc")
    # Code that a Python of this user would run.
    code = f"import os; os.close(os.open({str(eve / 'ran')!r}, os.O_CREAT | os.O_WRONLY))\n"
    for version in range(10, 16):
        site = eve / f".local/lib/python3.{version}/site-packages"
        (site / "evil-1.dist-info").mkdir(parents=True)
        (site / "evil-1.dist-info/METADATA").write_text("Name: evil\nVersion: 1\n")
        (site / "evil-1.dist-info/entry_points.txt").write_text("[cachectl.layers]\nevil = evil:Evil\n")
        (site / "evil.pth").write_text(code.replace("\n", "") + "\n")
        for module in ("sitecustomize", "usercustomize", "evil", "cachectl", "platformdirs"):
            (site / f"{module}.py").write_text(code)
    for module in ("sitecustomize", "cachectl", "platformdirs", "json"):
        (eve / f"{module}.py").write_text(code)
    people.eve.own()
    # A hard link to it is in that home.
    os.chown(outside / "thesis.tex", 0, 0)
    return outside


@real
@pytest.mark.environment
def test_all_users_are_counted_and_cleared_each_as_themselves(people: People) -> None:
    outside = _make_hostile(people)
    everybody = (people.ann, people.bob, people.eve)
    totals = [person.report() for person in everybody]
    assert totals[0] == totals[1]
    assert totals[0]["entries"] > 20
    before = hash_tree(outside, people.bob.home / ".cache")

    document = validated(people.json("report --all-users"))
    reported = [(user["user"], user["total"]) for user in document["users"]]
    assert reported == [(person.name, total) for person, total in zip(everybody, totals, strict=True)]
    for number in ("entries", "files", "bytes"):
        assert document["total"][number] == sum(total[number] or 0 for total in totals)
    assert document["complete"] == all(total["complete"] for total in totals)

    ann, bob = people.ann.name, people.bob.name
    _, *lines, _ = (line.split() for line in people.cachectl("report --all-users").stdout.splitlines())
    sizes = {person.name: total["bytes"] or 0 for person, total in zip(everybody, totals, strict=True)}
    assert [line[0] for line in lines] == sorted(sizes, key=lambda name: -sizes[name])
    kernels = people.cachectl(f"report --user {ann} --user {bob} --by kernel").stdout.splitlines()
    assert (kernels[0].split()[:2], {line.split()[0] for line in kernels[1:-1]}) == (["user", "kernels"], {ann, bob})
    table = people.cachectl(f"report -v --user {ann} --user {bob}").stdout.splitlines()
    assert table[0].split() == ["user", "layer", "entries", "files", "bytes", "stale_bytes"]
    assert {line.split()[0] for line in table[1:]} == {ann, bob, "total"}
    listed = people.cachectl(f"ls --user {ann} --limit=2 --csv").stdout.splitlines()
    assert [line.split(",")[0] for line in listed] == ["user", ann, ann]
    (document,) = people.json(f"ls --user {ann}")["users"]
    shown = [line.split() for line in people.cachectl(f"ls --user {ann}").stdout.splitlines()]
    assert shown[0] == ["user", "kernels", "layers", "bytes", "entries"]
    assert [line[1] for line in shown[1:-1]] == [share["kernels"][0] for share in document["kernels"]]
    assert people.cachectl(f"ls -l --user {ann}").stdout.split()[:4] == ["user", "layer", "key", "bytes"]
    for verb in ("ls", "verify", "doctor"):
        assert len(people.json(f"{verb} --all-users")["users"]) == 3
    assert people.json("prune --max-size=0B --dry-run --all-users")["total"]["removed"] > 40
    assert hash_tree(outside, people.bob.home / ".cache") == before

    # A lock that its owner never gives back holds up nobody else.
    hold = "import sqlite3, sys, time; c = sqlite3.connect(sys.argv[1]); c.execute('create table t (a)');"
    hold += "c.execute('begin exclusive'); print('held', flush=True); time.sleep(600)"
    held = people.eve.home / f".cache/pytools/pdict-v5-held-{PYTHON}.sqlite"
    holder = people.eve.run(people.ann.cachectl[0], "-c", hold, str(held))
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        people.cachectl(f"purge --all --user {people.eve.name} --wait=0.1")
        assert hash_tree(outside, people.bob.home / ".cache") == before
        document = people.json("purge --all --all-users --wait=0.1")
    finally:
        holder.kill()
        holder.communicate()
    removed = {user["user"]: user["total"]["removed"] for user in document["users"]}
    assert removed[ann] == removed[bob] == totals[0]["entries"]
    assert [person.report()["entries"] for person in (people.ann, people.bob)] == [0, 0]
    assert hash_tree(outside) == {path: what for path, what in before.items() if path.startswith(bytes(outside))}
    assert not (people.eve.home / "ran").exists()
    assert not list((people.base / "root").glob("**/*"))


@real
@pytest.mark.environment
def test_each_user_has_settings_of_his_own(people: People) -> None:
    limits = {
        people.base / "root": "[prune]\nmax-size = '0B'\n",
        people.ann.home: '[prune]\nmax-size = "1B"\n',
        people.eve.home: "[prune]\nmax-sise = 0\n",
    }
    for home, text in limits.items():
        Home(home, {}).configure(text)
    (people.bob.home / ".config/cachectl/config.toml").mkdir(parents=True)
    for person in (people.ann, people.bob, people.eve):
        person.own()
    found = {one["user"]: one for one in people.json("prune --all-users --dry-run")["users"]}
    assert "pocl" in {layer["layer"] for layer in found[people.ann.name]["layers"] if layer["removed"]}
    assert "config.toml: not a file" in found[people.bob.name]["error"]
    assert "config.toml: prune.max-sise: unknown key" in found[people.eve.name]["error"]
    shutil.rmtree(people.base / "root/.config")


@real
@pytest.mark.environment
@pytest.mark.parametrize(
    ("flood", "because"), [((), "took longer than 60 s"), (("80",), "did not write a valid document of report")]
)
def test_a_child_that_its_user_has_taken_over_fails_alone(flood: Sequence[str], because: str, people: People) -> None:
    program = people.base / "captor.py"
    shutil.copy(PROGRAMS / "captor.py", program)
    captor = people.eve.run(people.ann.cachectl[0], str(program), *flood)
    try:
        assert captor.stdout is not None
        assert captor.stdout.readline()
        started = time.monotonic()
        done = people.cachectl("report --all-users")
        assert time.monotonic() - started < 100
    finally:
        captor.kill()
        captor.communicate()
    (line,) = done.stderr.splitlines()
    assert (done.returncode, because in line, line.startswith(f"cachectl: {people.eve.name}: ")) == (1, True, True)
    assert all(person.name in done.stdout for person in (people.ann, people.bob))
    assert subprocess.run(["pgrep", "-u", people.eve.name], check=False).returncode == 1, "a process is left"
