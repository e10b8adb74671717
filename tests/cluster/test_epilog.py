"""The epilog of ``cachectl schedule slurm-epilog``, run as slurmd runs it."""

import pwd
import secrets
import subprocess
from pathlib import Path

import pytest
from homes import Home
from support.accounts import account, install_for_all
from support.doctor import leak
from tiers import as_root


@pytest.mark.cluster
@as_root
def test_the_end_of_a_job_prunes_the_home_of_its_user(open_folder: Path) -> None:
    command = [*install_for_all(open_folder), "schedule", "slurm-epilog"]
    epilog = open_folder / "prune"
    epilog.write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    with account(f"cctl{secrets.token_hex(3)}job", open_folder / "home") as name:
        folder = Path(pwd.getpwnam(name).pw_dir)
        leaked, config = leak(folder), Home(folder, {}).configure("[prune]\nstale = true\n")
        subprocess.run(["chown", "-R", f"{name}:", folder], check=True)
        # Without the name of a user nothing is done; with it, slurmd gives no other variable of a home.
        for variables, stays in (({}, True), ({"SLURM_JOB_USER": name}, False)):
            done = subprocess.run(["sh", str(epilog)], env=variables, cwd="/", capture_output=True, check=False)
            assert (done.returncode, done.stdout, leaked.exists()) == (0, b"", stays), done.stderr
        assert config.exists()
