"""Real servers on this machine: of S3's protocol and of SFTP, which say what they were asked for; and a registry."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
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
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "ann",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
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
