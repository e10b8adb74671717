"""The page about schedules: systemd, cron and a job's end take its text, and run it."""

import pwd
import re
import secrets
import shlex
import subprocess
from pathlib import Path

import pytest
from documents import DOCS
from homes import CACHECTL, Home
from support.accounts import account, install_for_all
from support.doctor import leak
from tiers import as_root

from benchmarks.commands import at_home

PAGE = (DOCS / "howto/schedule.md").read_text(encoding="utf-8")
#: The path that users replace.
PLACEHOLDER = "/opt/cachectl/bin/cachectl"
#: Runs a command beside a user manager of systemd that has its own processes, cgroups and /run.
MANAGER = """
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/cgroup
mount -t cgroup2 none /run/cgroup
group=$(mktemp -d /run/cgroup/cachectl-XXXXXXXX)
echo $$ >$group/cgroup.procs
status=0
unshare --cgroup --mount --pid --fork --mount-proc --kill-child sh -c '
  mkdir -m 700 /run/user
  umount -l /sys/fs/cgroup 2>/dev/null
  mount -t cgroup2 none /sys/fs/cgroup
  /lib/systemd/systemd --user >/run/log 2>&1 &
  for _ in $(seq 50); do [ -S /run/user/systemd/private ] && break; sleep 0.1; done
  "$@"' sh "$@" || status=$?
echo $$ >/run/cgroup/cgroup.procs
find $group -depth -type d -exec rmdir {} +
exit $status
"""
#: Runs a command where no user has a crontab.
NO_CRONTABS = 'mount -t tmpfs -o mode=1730 tmpfs /var/spool/cron/crontabs && exec "$@"'
APART = ("unshare", "--mount", "sh", "-c")


def block(heading: str, language: str, number: int = 0) -> str:
    """Return a listing below a heading of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return str(re.findall(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[number])


def units(folder: Path, command: str) -> list[Path]:
    """Write the units of the page, which start a command, into a folder."""
    folder.mkdir(parents=True)
    written = [folder / "cachectl-prune.service", folder / "cachectl-prune.timer"]
    for number, path in enumerate(written):
        path.write_text(block("systemd", "ini", number).replace(PLACEHOLDER, command))
    return written


def program(folder: Path) -> Path:
    """Write a program that starts the tested cachectl into a folder."""
    path = folder / "cachectl"
    path.write_text(f'#!/bin/sh\ncd / && exec {shlex.join(CACHECTL)} "$@"\n')
    path.chmod(0o755)
    return path


def leaked_beside_program(home: Home) -> tuple[Path, Path]:
    """Make what a prune removes, and a program in a folder whose name needs quoting; return both."""
    home.configure("[prune]\nstale = true\n")
    (home.path / "odd folder % of mine").mkdir()
    return leak(home.path), program(home.path / "odd folder % of mine")


def test_the_line_of_cron_prunes(home: Home) -> None:
    leaked, path = leaked_beside_program(home)
    line = block("cron", "text").rstrip("\n").replace(PLACEHOLDER, f'"{path}"'.replace("%", "\\%"))
    schedule = re.fullmatch(r"\d+ \d+ \* \* \* (.*)", line)
    assert schedule is not None
    # cron takes \% for %.
    command = ["/bin/sh", "-c", schedule[1].replace("\\%", "%")]
    done = subprocess.run(command, env=at_home(home.path), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not leaked.exists()


def test_the_epilog_is_a_script_that_does_nothing_without_a_user(tmp_path: Path) -> None:
    epilog = tmp_path / "epilog"
    epilog.write_text(block("Slurm", "sh").replace(PLACEHOLDER, "/nonexistent/cachectl"))
    subprocess.run(["sh", "-n", epilog], check=True)
    done = subprocess.run(["sh", epilog], env={}, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.cluster
@as_root
def test_the_end_of_a_job_prunes_the_home_of_its_user(open_folder: Path) -> None:
    epilog = open_folder / "prune"
    epilog.write_text(block("Slurm", "sh").replace(PLACEHOLDER, shlex.join(install_for_all(open_folder))))
    with account(f"cctl{secrets.token_hex(3)}job", open_folder / "home") as name:
        folder = Path(pwd.getpwnam(name).pw_dir)
        leaked, config = leak(folder), Home(folder, {}).configure("[prune]\nstale = true\n")
        subprocess.run(["chown", "-R", f"{name}:", folder], check=True)
        # Without the name of a user nothing is done; with it, slurmd gives no other variable of a home.
        for variables, stays in (({}, True), ({"SLURM_JOB_USER": name}, False)):
            done = subprocess.run(["sh", str(epilog)], env=variables, cwd="/", capture_output=True, check=False)
            assert (done.returncode, done.stdout, leaked.exists()) == (0, b"", stays), done.stderr
        assert config.exists()


@pytest.mark.usefixtures("schedulers")
def test_the_manager_of_systemd_takes_and_runs_the_units(home: Home) -> None:
    leaked, path = leaked_beside_program(home)
    written = units(home.path / ".config/systemd/user", f'"{path}"'.replace("%", "%%"))
    checked = subprocess.run(["systemd-analyze", "verify", *written], capture_output=True, text=True, check=False)
    assert "cachectl-prune" not in checked.stderr
    commands = block("systemd", "console").replace("$ ", "")
    steps = f"""
        set -e
        {commands}
        systemctl --user is-active cachectl-prune.timer
        systemctl --user start cachectl-prune.service
        systemctl --user show -P Result cachectl-prune.service
    """
    done = home.run(*APART, MANAGER, "sh", "sh", "-c", steps, XDG_RUNTIME_DIR="/run/user", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(?:active|success)$", done.stdout, re.MULTILINE) == ["active", "success"]
    assert not leaked.exists()


@pytest.mark.usefixtures("schedulers")
def test_cron_takes_the_line(home: Home) -> None:
    line = block("cron", "text")
    steps = """printf '%s' "$LINE" | crontab - && crontab -l"""
    assert home.run(*APART, NO_CRONTABS, "sh", "sh", "-c", steps, LINE=line).stdout == line
