"""Real registries: Debian's ``docker-registry`` with a folder of its own, and what reads images from it."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from tiers import absent

#: A line of the registry's log of requests.
_REQUEST: Final = re.compile(r'"((?:GET|HEAD|PUT|POST|PATCH|DELETE) [^ "]+) HTTP/1\.1" ([0-9]{3}) ')
CONFIGURATION: Final = """\
version: 0.1
storage:
  filesystem: {{rootdirectory: {folder}/data}}
  delete: {{enabled: {delete}}}
http: {{addr: "{address}", secret: asecretofthetests}}
{more}
"""


@dataclass(frozen=True)
class RealRegistry:
    """A registry that runs: its address, and the folder with its configuration, its log and its ``data``."""

    address: str
    folder: Path

    def url(self, name: str) -> str:
        return f"oci://{self.address}/{name}"

    def requests(self) -> list[tuple[str, int]]:
        """Return the requests so far, each as method and path, with its status."""
        return [(line, int(status)) for line, status in _REQUEST.findall((self.folder / "log").read_text())]

    def collect(self) -> str:
        """Run the registry's own garbage collection, which also removes manifests without a tag."""
        command = ["docker-registry", "garbage-collect", "--delete-untagged", str(self.folder / "config.yml")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def serving(folder: Path, *, delete: bool = True, more: str = "") -> Iterator[RealRegistry]:
    """Run a registry that keeps everything in a folder; ``more`` are lines of its configuration."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = folder / "config.yml"
    config.write_text(CONFIGURATION.format(folder=folder, delete=str(delete).lower(), address=address, more=more))
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=log, stderr=log)
        try:
            _wait_for(address, server)
            yield RealRegistry(address, folder)
        finally:
            server.terminate()
            server.wait(60)


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    host, port = address.split(":")
    for _ in range(600):
        assert server.poll() is None, "the registry did not start"
        try:
            socket.create_connection((host, int(port))).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return


@pytest.fixture
def real_registries(tmp_path: Path, no_proxy: None) -> Iterator[Callable[..., RealRegistry]]:
    """Return what starts registries, which end with the test."""
    # A proxy is not asked about this machine.
    del no_proxy
    if shutil.which("docker-registry") is None:
        absent("needs a registry: apt-get install docker-registry")
    with ExitStack() as running:

        def start(name: str = "registry", *, delete: bool = True, more: str = "") -> RealRegistry:
            folder = tmp_path / name
            folder.mkdir()
            return running.enter_context(serving(folder, delete=delete, more=more))

        yield start


@pytest.fixture
def real_registry(real_registries: Callable[..., RealRegistry]) -> RealRegistry:
    return real_registries()
