"""A real registry: Debian's ``docker-registry`` with a folder of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tiers import absent

CONFIGURATION: Final = """\
version: 0.1
storage:
  filesystem: {{rootdirectory: {folder}}}
http: {{addr: "{address}", secret: asecretofthetests}}
"""


@pytest.fixture
def real_registry(tmp_path: Path, no_proxy: None) -> Iterator[str]:
    """Yield the address of a registry, which ends with the test."""
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
