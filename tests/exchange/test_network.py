"""Hostile servers: each costs a bounded time and memory, one line, and no process that goes on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from homes import CACHECTL, Home
from support.bundles import TRUSTED
from support.miopen_kernels import add_kernels
from support.servers import HOSTILE, S3_USER, hostile_server, processes_of, watched
from tiers import thorough, thorough_only

from cachectl.exchange import network, place
from cachectl.exchange.store import place_of
from cachectl.layers.base.errors import CachectlError

pytestmark = pytest.mark.usefixtures("no_proxy")

#: Seconds that starting two interpreters and importing libraries may take on a busy machine.
START = 8.0
#: The memory of the parent and of the child's libraries, in bytes.
BASE = 160 << 20
#: A command that says whether a process for the network, of its own home, is there.
PROBE = """
import os
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{name}/environ", "rb") as variables, open(f"/proc/{name}/cmdline", "rb") as words:
            if b"HOME=%s" % os.environb[b"HOME"] in variables.read() and b"network." + b"serve" in words.read():
                print("it goes on")
    except OSError:
        pass
print("RAN")
"""


def address(scheme: str, port: int) -> tuple[str, dict[str, str]]:
    """Return the URL of a store on a server, and variables that lead there."""
    if scheme == "s3":
        return "s3://bucket/k", {**S3_USER, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    return {"oci": f"oci://127.0.0.1:{port}/team/caches", "ssh": f"ssh://ann:pw@127.0.0.1:{port}/store"}[scheme], {}


@pytest.mark.parametrize(
    ("scheme", "behaviour"),
    [
        ("oci", "refuses"),
        *thorough(*(("oci", name) for name in HOSTILE if name != "refuses"), *(("s3", name) for name in HOSTILE)),
        *thorough(*(("ssh", name) for name in ("refuses", "is silent", "sends a byte a second", "sends a body"))),
    ],
)
def test_a_hostile_server_costs_little_time_and_memory(home: Home, scheme: str, behaviour: str) -> None:
    with hostile_server(behaviour) as port:
        url, variables = address(scheme, port)
        done = watched(home, "pull", url, "--trust", **variables)
    assert (done.status, done.said.startswith("cachectl: "), done.said.count("\n"), done.left) == (1, True, 1, [])
    at_once = behaviour.isdecimal() or behaviour in ("refuses", "redirects", "sends headers")
    assert ("more names than a store" in done.said) == (scheme == "s3" and behaviour.startswith("lists"))
    # What is sent forever ends at its limit of bytes.
    limits = {"continues": 90, "lists names": 120, "sends a body": 30, "lists nothing": 30}
    limit = limits.get(behaviour, network.ANSWER)
    assert done.seconds < START + (0 if at_once and scheme != "ssh" else limit)
    assert done.peak < BASE + (network.MEMORY if behaviour in ("sends a body", "lists names") else 0)


@pytest.mark.parametrize("behaviour", ["sends a body", *thorough("is silent", "continues")])
def test_nothing_goes_on_beside_a_wrapped_command(home: Home, behaviour: str) -> None:
    """The store may take as long as --store-wait says, and not a moment longer."""
    with hostile_server(behaviour) as port:
        url, variables = address("s3", port)
        store = ("run", "--store", url, "--trust", "--store-wait", "1")
        done = watched(home, *store, "--", sys.executable, "-c", PROBE, **variables)
    lines = done.said.splitlines()
    assert (done.status, "RAN" in lines, "it goes on" in lines, done.left) == (0, True, False, [])
    (said,) = (line for line in lines if "--store" in line)
    # A fast machine sends as much as it may before that.
    assert "not done in time" in said or "sends more than " in said
    assert done.peak < BASE + network.MEMORY


def child_of(where: place.StorePlace) -> int:
    """Return the process that reaches a place."""
    (process,) = where._end.peek()[2][:1]  # type: ignore[attr-defined]
    return int(process.pid)


def ends(process: int) -> bool:
    """Return whether a process ends within two seconds."""
    for _ in range(100):
        with suppress(FileNotFoundError):
            if Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z":
                time.sleep(0.02)
                continue
        return True
    return False


@pytest.fixture
def folder(home: Home, tmp_path: Path) -> Iterator[place.StorePlace]:
    """Yield a folder that a child process reaches."""
    with_child = place_of(tmp_path / "store", home.environment(), deadline=time.monotonic() + 60)
    yield with_child
    with_child.close()


def test_a_place_in_a_child_is_the_same_place(folder: place.StorePlace, tmp_path: Path) -> None:
    name, data = f"packs/{'0' * 64}", os.urandom(3 << 20)
    assert (folder.shown, folder.is_bundle, folder.digest()) == (f"{tmp_path}/store", False, None)
    assert folder.names("packs") == {}
    folder.write(name, data)
    folder.write(f"index/key-{'0' * 16}", b"")
    assert (folder.read(name, len(data)), [*folder.names("packs")]) == (data, [name])
    with pytest.raises(place.BadStore, match="more than 5 bytes"):
        folder.read(name, 5)
    folder.remove([name])
    with pytest.raises(place.Gone, match="is missing") as raised:
        folder.read(name, 5)
    # What the operating system has said.
    assert "No such file" in str(raised.value.__cause__)
    folder.finish()
    process = child_of(folder)
    folder.close()
    assert ends(process)
    with pytest.raises(CachectlError):
        folder.names("packs")


def test_a_child_that_is_killed_is_one_line(folder: place.StorePlace) -> None:
    os.kill(child_of(folder), signal.SIGKILL)
    with pytest.raises(place.TransferFailed, match="its process failed") as raised:
        folder.names("packs")
    assert "\n" not in str(raised.value)


def test_a_child_ends_when_nobody_needs_it_any_more(home: Home, tmp_path: Path) -> None:
    where = place_of(tmp_path / "store", home.environment(), deadline=time.monotonic() + 60)
    process = child_of(where)
    del where
    assert ends(process)


@pytest.mark.parametrize("number", [signal.SIGINT, *thorough(signal.SIGTERM, signal.SIGKILL)])
def test_a_signal_ends_both_processes(home: Home, number: signal.Signals) -> None:
    with hostile_server("is silent") as port:
        url, variables = address("oci", port)
        command = (*CACHECTL, "pull", url, "--trust")
        with subprocess.Popen(command, env={**home.variables, **variables}, cwd=home.path, stderr=-3) as process:
            while len(processes_of(home)) < 2:
                time.sleep(0.02)
            process.send_signal(number)
            process.wait(5)
    assert all(ends(one) for one in processes_of(home))


def test_modules_are_not_found_in_the_working_folder(home: Home) -> None:
    for name in ("oras", "fsspec", "cachectl"):
        (home.path / f"{name}.py").write_text(f"open('{home.path}/executed', 'w')")
    with hostile_server("404") as port:
        command = (str(Path(sys.executable).with_name("cachectl")), "pull", address("oci", port)[0], "--trust")
        subprocess.run(command, env=dict(home.variables), cwd=home.path, check=False, capture_output=True)
    assert not (home.path / "executed").exists()


@thorough_only
def test_a_server_that_lists_forever_over_ssh_is_stopped(
    home: Home, sftp: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, served = sftp
    (served / "store/index").mkdir(parents=True)
    for number in range(2000):
        (served / f"store/index/{number:0200}").touch()
    monkeypatch.setattr(network, "_LISTED", 0)
    monkeypatch.setattr(network, "_OVERHEAD", 1 << 16)
    with pytest.raises(place.BadStore, match="sends more"):
        home.stack.pull(f"{url}/store", TRUSTED)


@thorough_only
def test_a_push_that_is_not_answered_ends(home: Home) -> None:
    add_kernels(home, [1])
    with hostile_server("stops early") as port:
        began = time.monotonic()
        with pytest.raises(place.TransferFailed, match="no answer or no progress in 10 s"):
            home.stack.push(address("oci", port)[0])
        assert time.monotonic() - began < START + network.ANSWER
