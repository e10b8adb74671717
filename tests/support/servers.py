"""Real servers on this machine: of S3's protocol and of SFTP, which say what they were asked for; and a registry."""

import itertools
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from homes import Home
from tiers import absent

BUCKET = "warm-caches"
CONFIGURATION = """\
version: 0.1
storage:
  filesystem: {{rootdirectory: {folder}}}
http: {{addr: "{address}", secret: asecretofthetests}}
"""
#: Arguments of a client, in the order of the variables.
KEYWORDS = ("aws_access_key_id", "aws_secret_access_key", "region_name")


class S3(NamedTuple):
    """The variables that lead a program to the server, and what it was asked for so far: methods, and bytes sent."""

    variables: dict[str, str]
    requests: list[tuple[str, int]]


#: Variables of a user of an S3 server.
S3_USER = {
    "AWS_ACCESS_KEY_ID": "ann",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.moto_server.threaded_moto_server", reason="needs moto[server]")
    requests: list[tuple[str, int]] = []
    answer = moto.DomainDispatcherApplication.__call__

    def counted(self: object, environ: dict[str, Any], start_response: object) -> object:
        requests.append((environ["REQUEST_METHOD"], int(environ.get("CONTENT_LENGTH") or 0)))
        return answer(self, environ, start_response)

    moto.DomainDispatcherApplication.__call__ = counted
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", **S3_USER}
    given = dict(zip(("endpoint_url", *KEYWORDS), variables.values(), strict=False))
    boto3.client("s3", **given).create_bucket(Bucket=BUCKET)
    yield S3(variables, requests)
    server.stop()


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tester's proxy out of what goes on on this machine."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")


@pytest.fixture
def sftp(tmp_path: Path, home: Home) -> Iterator[tuple[str, Path]]:
    """Serve a folder by paramiko's server; yield its address and the folder.

    The file ``requests`` beside the folder has a line for each thing that was asked for.
    """
    pytest.importorskip("paramiko")
    folder = tmp_path / "remote"
    folder.mkdir()
    command = [sys.executable, f"{home.programs}/sftp_server.py", f"{tmp_path}/requests"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        yield f"ssh://ann:password@127.0.0.1:{int(server.stdout.readline())}{folder}", folder
        server.kill()


@pytest.fixture
def real_registry(tmp_path: Path, no_proxy: None) -> Iterator[str]:
    """Yield the address of Debian's ``docker-registry`` with a folder of its own, which ends with the test."""
    # A proxy is not asked about this machine.
    del no_proxy
    if shutil.which("docker-registry") is None:
        absent("needs a registry: apt-get install docker-registry")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    config = tmp_path / "registry.yml"
    config.write_text(CONFIGURATION.format(folder=tmp_path / "registry", address=address))
    with subprocess.Popen(["docker-registry", "serve", str(config)], stdout=-3, stderr=-3) as server:
        for _ in range(600):
            assert server.poll() is None, "the registry did not start"
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                time.sleep(0.05)
            else:
                break
        yield f"oci://{address}"
        server.terminate()


# ---------------------------------------------------------------------- hostile servers

_PAGE = b"".join(
    b"<Contents><Key>k/index/%064d</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
    % one
    for one in range(1000)
)


def _answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", "")
    return "\r\n".join(lines).encode() + body


def _page(keys: bytes) -> bytes:
    """Return an answer of S3 that lists keys, and says that there are more."""
    token = b"<NextContinuationToken>%d</NextContinuationToken>" % time.monotonic_ns()
    return _answer(b"<ListBucketResult><IsTruncated>true</IsTruncated>%s%s</ListBucketResult>" % (token, keys))


def _fail(code: int) -> Iterable[bytes]:
    return [_answer(b"", f"{code} Failure")]


#: What a server sends after each request, by what it is like; a number is a pause in seconds.
HOSTILE: dict[str, Callable[[], Iterable[bytes | float]]] = {
    "refuses": tuple,
    "is silent": lambda: [3600.0],
    "sends a byte a second": lambda: itertools.chain(
        *((bytes([one]), 1.0) for one in b"HTTP/1.1 200 OK\r\nA: ".ljust(4000, b"a"))
    ),
    "redirects": lambda: [_answer(b"", "302 Found", "Location: /v2/elsewhere")],
    "sends headers": lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"A: b\r\n" * 10_000)),
    "continues": lambda: itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "sends a body": lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n\r\n"], itertools.repeat(bytes(1 << 20))),
    "stops early": lambda: [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nshort", 3600.0],
    "lists names": lambda: [_page(_PAGE)],
    "lists nothing": lambda: [_page(b"")],
    **{str(code): partial(_fail, code) for code in (400, 401, 403, 404, 405, 410, 429, 500)},
}


@contextmanager
def hostile_server(behaviour: str) -> Iterator[int]:
    """Run a server of HTTP that answers every request in one way of :data:`HOSTILE`; yield its port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                while request := self.request.recv(1 << 16):
                    if b"\r\n" not in request:
                        continue
                    for answer in HOSTILE[behaviour]():
                        if isinstance(answer, bytes):
                            self.request.sendall(answer)
                        elif ended.wait(answer):
                            return

    ended = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        port = server.server_address[1]
        if behaviour == "refuses":
            server.server_close()
        else:
            threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        yield port
        ended.set()
        if behaviour != "refuses":
            server.shutdown()


class Watched(NamedTuple):
    """What a command did: its status, what it said, its seconds, and the most memory of all its processes at once."""

    status: int
    said: str
    seconds: float
    peak: int
    left: list[int]


def watched(home: Home, *arguments: str, **variables: str) -> Watched:
    """Run a command of cachectl, and see how much memory it and its processes use, and which of them it leaves."""
    began, peak = time.monotonic(), 0
    command = [sys.executable, "-m", "cachectl", *arguments]
    environment = {**home.variables, **variables}
    with subprocess.Popen(command, env=environment, cwd=home.path, stdout=-1, stderr=-2, text=True) as process:
        while process.poll() is None:
            peak = max(peak, sum(_resident(number) for number in processes_of(home)))
            time.sleep(0.02)
        seconds = time.monotonic() - began
        assert process.stdout is not None
        said = process.stdout.read()
    return Watched(process.returncode, said, seconds, peak, processes_of(home))


def processes_of(home: Home) -> list[int]:
    """Return the processes that have a home."""
    mine = f"HOME={home.path}".encode()
    numbers = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if mine in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                numbers.append(int(name))
    return numbers


def _resident(process: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096
    return 0
