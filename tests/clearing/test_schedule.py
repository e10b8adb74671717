"""Schedules: what is printed, and that the real systemd and cron take it and run it."""

import re
import subprocess
import sys
from typing import Any

import pytest
from homes import CACHECTL, Home
from support.doctor import leak

from benchmarks.commands import at_home
from cachectl.layers.core.conformance import snapshot

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


#: A place of which schedules must escape a part.
ODD = "odd % folder"


def moved(home: Home) -> dict[str, Any]:
    """Return a variable of a user's shell that moves PoCL's cache."""
    return {"POCL_CACHE_DIR": str(home.path / ODD / ".cache/pocl/kcache")}


def test_each_schedule_is_printed_and_changes_nothing(home: Home) -> None:
    home.configure("[prune]\nstale = true\n")
    before = snapshot(home.path, times=True)
    unit, line, script = (
        home.cachectl(f"schedule {kind}", **moved(home)) for kind in ("systemd", "cron", "slurm-epilog")
    )
    folder = moved(home)["POCL_CACHE_DIR"].replace("%", "%%")
    assert f'Environment="POCL_CACHE_DIR={folder}"' in unit.stdout
    assert f"ExecStart={sys.executable} -m cachectl prune\n" in unit.stdout
    assert re.search(r"(?m)^\d+ 4 \* \* \* cd / && .* prune >/dev/null # cachectl schedule$", line.stdout)
    assert "odd \\% folder" in line.stdout
    assert 'prune --user "$SLURM_JOB_USER"' in script.stdout
    for done, install in ((unit, "| sh"), (line, "| crontab -"), (script, "| install -m 755 /dev/stdin")):
        assert install in done.stdout.partition("# Install: ")[2].partition("\n")[0]
        assert not done.stderr
    for kind in ("systemd", "cron"):
        everybody = home.cachectl(f"schedule {kind} --all-users", **moved(home)).stdout
        assert ("--all-users" in everybody, "POCL_CACHE_DIR" in everybody) == (True, False)
    subprocess.run(["sh", "-n"], input=script.stdout, text=True, check=True)
    assert snapshot(home.path, times=True) == before


def test_the_line_of_cron_prunes(home: Home) -> None:
    home.configure("[prune]\nstale = true\n")
    leaked = leak(home.path / ODD)
    line = home.cachectl("schedule cron", **moved(home)).stdout
    # cron gives a command this variable, and takes \% for %.
    command = line.splitlines()[-1].split(" ", 5)[5].replace("\\%", "%")
    own = at_home(home.path)
    done = subprocess.run(["/bin/sh", "-c", command], env=own, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not leaked.exists()


def test_variables_that_no_schedule_can_hold_and_missing_limits_are_said(home: Home) -> None:
    home.refused("schedule cron", says="POCL_CACHE_DIR has a control character", status=2, POCL_CACHE_DIR="/a\nb")
    assert "prune has no limit yet" in home.cachectl("schedule cron").stderr


@pytest.mark.usefixtures("schedulers")
def test_the_manager_of_systemd_takes_and_runs_the_timer(home: Home) -> None:
    home.configure("[prune]\nstale = true\n")
    leaked = leak(home.path / ODD)
    schedule = f"{' '.join(CACHECTL)} schedule systemd"
    steps = f"""
        set -e
        {schedule} | sh
        systemctl --user is-active cachectl-prune.timer
        {schedule} | sh
        systemctl --user start cachectl-prune.service
        systemctl --user show -P Result cachectl-prune.service
        {schedule} | sed -n 's/^# Remove: //p' | sh
        ! systemctl --user is-active cachectl-prune.timer
    """
    done = home.run(*APART, MANAGER, "sh", "sh", "-c", steps, XDG_RUNTIME_DIR="/run/user", **moved(home), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not leaked.exists()
    assert re.findall(r"^(?:active|inactive|success)$", done.stdout, re.MULTILINE) == ["active", "success", "inactive"]
    assert not list((home.path / ".config" / "systemd" / "user").rglob("*.timer"))


@pytest.mark.usefixtures("schedulers")
def test_other_lines_of_a_crontab_stay(home: Home) -> None:
    home.configure("[prune]\nstale = true\n")
    others = "# mine\n5 * * * * echo one % two\n@daily true\n"
    program = f"{' '.join(CACHECTL)} schedule cron"
    install = f"""$({program} | sed -n 's/^# Install: //p' | sed 's|cachectl schedule cron)|{program})|')"""
    steps = f"""
        set -e
        printf '%s' "$OTHERS" | crontab -
        eval "{install}"; eval "{install}"
        crontab -l
    """
    done = home.run(*APART, NO_CRONTABS, "sh", "sh", "-c", steps, OTHERS=others, **moved(home), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == others + home.cachectl("schedule cron", **moved(home)).stdout
