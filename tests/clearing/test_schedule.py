"""Schedules: what is printed, installed and removed, and that the real systemd and cron take it and run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from cachectl.clearing.schedule import SystemdTimer
from cachectl.layers.base.conformance import snapshot

if TYPE_CHECKING:
    from homes import Home

#: Runs a command beside a user manager of systemd that has its own processes, cgroups and /run.
MANAGER: Final = """
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
NO_CRONTABS: Final = 'mount -t tmpfs -o mode=1730 tmpfs /var/spool/cron/crontabs && exec "$@"'
APART: Final = ("unshare", "--mount", "sh", "-c")
CACHECTL: Final = (sys.executable, "-m", "cachectl")


def configure(home: Home) -> None:
    file = home.path / ".config" / "cachectl" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[prune]\nstale = true\n")


def leak(home: Home) -> Path:
    """Leave what a killed PoCL program leaves, and prune removes."""
    leaked = home.path / "odd % folder" / "kcache" / "tempfile_aB3dE6"
    leaked.parent.mkdir(parents=True)
    leaked.touch(mode=0o600)
    return leaked


def complaints(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what is said of our units; those of the system may not like the folder of a test."""
    return [line for line in (done.stdout + done.stderr).splitlines() if "cachectl-" in line]


def moved(home: Home) -> dict[str, str]:
    """Return a variable of a user's shell that moves PoCL's cache."""
    return {"POCL_CACHE_DIR": str(home.path / "odd % folder" / "kcache")}


def test_each_schedule_is_printed_and_changes_nothing(home: Home) -> None:
    configure(home)
    before = snapshot(home.path, times=True)
    unit, line, script = (
        home.cachectl("schedule", kind, check=True, **moved(home)) for kind in ("systemd", "cron", "slurm-epilog")
    )
    assert "OnCalendar=daily" in unit.stdout
    folder = str(home.path / "odd %% folder" / "kcache")
    assert f'Environment="POCL_CACHE_DIR={folder}"' in unit.stdout
    assert re.search(r'ExecStart="/[^"]+cachectl" "prune"\n', unit.stdout)
    assert re.fullmatch(
        r"\d+ 4 \* \* \* cd / && .* prune >/dev/null # written by cachectl schedule cron\n", line.stdout
    )
    assert "odd \\% folder" in line.stdout
    assert 'prune --user "$SLURM_JOB_USER"' in script.stdout
    assert not unit.stderr + line.stderr + script.stderr
    assert snapshot(home.path, times=True) == before


def test_the_line_of_cron_prunes(home: Home) -> None:
    configure(home)
    leaked = leak(home)
    line = home.cachectl("schedule", "cron", check=True, **moved(home)).stdout
    # cron gives a command these variables, and takes \% for %.
    command = line.split(" ", 5)[5].replace("\\%", "%")
    variables = {name: home.variables[name] for name in ("HOME",)}
    done = subprocess.run(["/bin/sh", "-c", command], env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not leaked.exists()


def test_a_timer_is_installed_and_removed_where_no_manager_answers(home: Home) -> None:
    configure(home)
    before = snapshot(home.path)
    folder = home.path / ".config" / "systemd" / "user"
    offline = {"XDG_RUNTIME_DIR": str(home.path / "none"), "DBUS_SESSION_BUS_ADDRESS": ""}
    first, second = (home.cachectl("schedule", "systemd", "--install", check=True, **offline).stdout for _ in range(2))
    assert "systemctl --user daemon-reload && systemctl --user enable --now cachectl-prune.timer" in first
    assert sorted(os.listdir(folder)) == ["cachectl-prune.service", "cachectl-prune.timer"]
    assert f"wrote {folder}/cachectl-prune.timer" in first
    assert f"{folder}/cachectl-prune.timer is there already" in second
    assert f"removed {folder}" in home.cachectl("schedule", "systemd", "--remove", check=True, **offline).stdout
    assert "no timer" in home.cachectl("schedule", "systemd", "--remove", check=True, **offline).stdout
    folder.rmdir()
    folder.parent.rmdir()
    assert snapshot(home.path) == before


def test_a_file_of_somebody_else_stays(home: Home) -> None:
    file = home.path / ".config" / "systemd" / "user" / "cachectl-prune.timer"
    file.parent.mkdir(parents=True)
    file.write_text("[Timer]\n")
    for change in ("--install", "--remove"):
        done = home.cachectl("schedule", "systemd", change, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert f"{file} is there, and cachectl did not write it" in done.stderr
    assert file.read_text() == "[Timer]\n"
    file.unlink()
    os.mkfifo(file)
    assert home.cachectl("schedule", "systemd", "--install", check=False).returncode == 1


def test_an_epilog_is_installed_and_removed(home: Home) -> None:
    file = home.path / "epilog.d" / "50-prune"
    words = ("schedule", "slurm-epilog", "--file", str(file))
    first, second = (home.cachectl(*words, "--install").stdout for _ in range(2))
    assert f"slurm.conf needs Epilog={file.parent}/*" in first
    assert f"{file} is there already" in second
    assert file.stat().st_mode & 0o777 == 0o755
    assert os.listdir(file.parent) == [file.name]
    subprocess.run(["sh", "-n", str(file)], check=True)
    home.cachectl(*words, "--remove")
    assert not file.exists()
    assert "no script" in home.cachectl(*words, "--remove").stdout


def test_misuse_and_missing_limits_are_said(home: Home) -> None:
    assert home.cachectl("schedule", check=False).returncode == 2
    assert home.cachectl("schedule", "cron", "--install", "--remove", check=False).returncode == 2
    wrong = home.cachectl("schedule", "cron", "--file", "x", check=False)
    assert (wrong.returncode, "only slurm-epilog takes a file" in wrong.stderr) == (2, True)
    newline = home.cachectl("schedule", "cron", POCL_CACHE_DIR="/a\nb", check=False)
    assert (newline.returncode, "POCL_CACHE_DIR has a control character" in newline.stderr) == (2, True)
    latin = {"POCL_CACHE_DIR": os.fsdecode(b"/caf\xe9")}
    bytes_ = home.cachectl("schedule", "systemd", check=False, **latin)
    assert (bytes_.returncode, "not UTF-8" in bytes_.stderr, bytes_.stderr.count("\n")) == (2, True, 1)
    assert "prune has no limit yet" in home.cachectl("schedule", "cron").stderr
    nowhere = home.cachectl("schedule", "cron", "--install", PATH="/nowhere", check=False)
    assert (nowhere.returncode, "crontab is not installed" in nowhere.stderr) == (1, True)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs the superuser, who gives files away")
def test_root_writes_no_unit_through_a_link_of_another_user(home: Home, tmp_path: Path) -> None:
    target, link = tmp_path / "target", home.path / ".config" / "systemd" / "user"
    target.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    os.lchown(link, 65534, 65534)
    done = home.cachectl("schedule", "systemd", "--install", check=False)
    assert (done.returncode, "belongs to nobody; do it as nobody" in done.stderr) == (1, True)
    assert not os.listdir(target)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs the superuser, who gives files away")
def test_root_runs_no_program_of_another_user(home: Home) -> None:
    folder = home.path / "epilog.d"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    done = home.cachectl("schedule", "slurm-epilog", "--install", "--file", str(folder / "x"), check=False)
    assert (done.returncode, "belongs to nobody" in done.stderr) == (1, True)
    assert not os.listdir(folder)


# ---------------------------------------------------------------------- real programs


@pytest.mark.usefixtures("schedulers")
def test_the_manager_of_systemd_takes_and_runs_the_timer(home: Home) -> None:
    configure(home)
    leaked = leak(home)
    schedule = f"{' '.join(CACHECTL)} schedule systemd"
    steps = f"""
        set -e
        {schedule} --install
        systemctl --user is-active cachectl-prune.timer
        {schedule} --install
        systemctl --user start cachectl-prune.service
        systemctl --user show -P Result cachectl-prune.service
        {schedule} --remove
        ! systemctl --user is-active cachectl-prune.timer
    """
    done = home.run(*APART, MANAGER, "sh", "sh", "-c", steps, XDG_RUNTIME_DIR="/run/user", **moved(home), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not leaked.exists()
    assert re.findall(r"^(?:active|inactive|success)$", done.stdout, re.MULTILINE) == ["active", "success", "inactive"]
    assert not list((home.path / ".config" / "systemd" / "user").rglob("*.timer"))


@pytest.mark.usefixtures("schedulers")
def test_systemd_finds_nothing_wrong_with_the_units(home: Home) -> None:
    configure(home)
    home.cachectl("schedule", "systemd", "--install", check=True, XDG_RUNTIME_DIR="/none", **moved(home))
    folder = home.path / ".config" / "systemd" / "user"
    done = home.run("systemd-analyze", "verify", "--user", *map(str, folder.iterdir()), XDG_RUNTIME_DIR=str(home.path))
    assert complaints(done) == []


@pytest.mark.usefixtures("schedulers")
@pytest.mark.parametrize("name", ["a b", "$HOME", 'quo"te', "apo'strophe", "back\\slash", "per%cent"])
def test_systemd_starts_a_program_of_any_path(home: Home, name: str) -> None:
    program = home.path / name / "cachectl"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    SystemdTimer([str(program), "prune"], {"POCL_CACHE_DIR": name}, home.environment(XDG_RUNTIME_DIR="/none")).install()
    unit = home.path / ".config" / "systemd" / "user" / "cachectl-prune.service"
    done = home.run("systemd-analyze", "verify", "--user", str(unit), XDG_RUNTIME_DIR=str(home.path))
    assert complaints(done) == []


@pytest.mark.usefixtures("schedulers")
def test_other_lines_of_a_crontab_stay(home: Home) -> None:
    configure(home)
    # Python takes some of these characters for the end of a line, cron does not.
    others = "# mine \f5 * * * * false\n5 * * * * echo one % two\u2028\x85\n@daily true\n"
    python = " ".join(CACHECTL)
    steps = f"""
        set -e
        {python} schedule cron --install; crontab -l
        printf '%s' "$OTHERS" | crontab -
        {python} schedule cron --install; {python} schedule cron --install
        crontab -l >first; printf 'PATH=/bin\\n' | cat first - | crontab -
        unset POCL_CACHE_DIR; {python} schedule cron --install; crontab -l >second
        {python} schedule cron --remove; {python} schedule cron --remove; crontab -l >third
    """
    done = home.run(*APART, NO_CRONTABS, "sh", "sh", "-c", steps, OTHERS=others, **moved(home), check=False)
    assert done.returncode == 0, done.stderr
    line, changed = (
        home.cachectl("schedule", "cron", check=True, **variables).stdout for variables in (moved(home), {})
    )
    *installed, removed, again = done.stdout.replace(line, "").splitlines()
    assert installed == [*["the line runs daily"] * 2, "the line is there already", "the line runs daily"]
    assert (removed, again) == ("removed the line", "no such line in the crontab")
    assert (home.path / "first").read_text() == others + line
    assert (home.path / "second").read_text() == others + changed + "PATH=/bin\n"
    assert (home.path / "third").read_text() == others + "PATH=/bin\n"
