"""The epilog of ``cachectl schedule slurm-epilog``, run by a real Slurm of one node."""

from __future__ import annotations

import os
import pwd
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from support.accounts import account, install_for_all

USER: Final = f"cctl{secrets.token_hex(3)}job"
CONFIG: Final = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
Epilog={folder}/epilog.d/*
NodeName={host} NodeAddr=127.0.0.1 CPUs=1
PartitionName=main Nodes={host} Default=YES
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def cluster(schedulers: None) -> Iterator[Path]:
    """Start munge and a Slurm of one node; return the folder of its configuration, ``slurm.conf``."""
    del schedulers
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        folder.chmod(0o755)
        for name in ("epilog.d", "state", "spool"):
            (folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        ports = {"controller": free_port(), "node": free_port()}
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, **ports))
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed", "key-file": "key"}
        munge = ["munged", "--foreground", *(f"--{option}={folder}/munge.{end}" for option, end in files.items())]
        paths = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        variables = {**os.environ, "PATH": paths, "SLURM_CONF": str(folder / "slurm.conf")}
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
            program = subprocess.Popen(command, env=variables, cwd="/", stdout=-3, stderr=-3)
            stack.callback(program.wait)
            stack.callback(program.terminate)
            if command is munge:
                wait_for(folder / "munge.sock")
        yield folder


@pytest.fixture
def user(cluster: Path) -> Iterator[pwd.struct_passwd]:
    """Make a user with a home."""
    with account(USER, cluster / "home"):
        yield pwd.getpwnam(USER)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.mark.cluster
def test_the_end_of_a_job_prunes_the_home_of_its_user(cluster: Path, user: pwd.struct_passwd) -> None:
    place = Path(user.pw_dir)
    leaked = place / ".cache" / "pocl" / "kcache" / "tempfile_aB3dE6"
    config = place / ".config" / "cachectl" / "config.toml"
    for file, text in ((leaked, ""), (config, "[prune]\nstale = true\n")):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    leaked.chmod(0o600)
    subprocess.run(["chown", "-R", f"{user.pw_uid}:{user.pw_gid}", str(place)], check=True)
    script = cluster / "epilog.d" / "prune"
    with script.open("wb") as output:
        subprocess.run([*install_for_all(cluster), "schedule", "slurm-epilog"], check=True, stdout=output)
    script.chmod(0o755)
    job = place / "job.sh"
    job.write_text("#!/bin/sh\ntrue\n")
    batch = ["sbatch", "--wait", f"--uid={USER}", "--chdir=/", "--output=/dev/null", str(job)]
    variables = {**os.environ, "SLURM_CONF": str(cluster / "slurm.conf")}
    done = subprocess.run(batch, env=variables, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 60
    while leaked.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not leaked.exists(), (cluster / "slurmd.log").read_text()
    assert config.exists()
    node = subprocess.check_output(["sinfo", "--noheader", "--format=%T"], env=variables, text=True)
    assert node.strip() in ("idle", "completing")
