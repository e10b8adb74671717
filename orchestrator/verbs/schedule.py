"""``cachectl schedule``: what prunes by itself, and how to install it.

Sources: systemd.timer(5), systemd.service(5) and systemd.syntax(7); crontab(5); slurm.conf(5), section "Prolog and
Epilog Scripts".
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from cachectl import verbs
from cachectl.layer_set import LayerSet
from cachectl.layers import core

KINDS = ("systemd", "cron", "slurm-epilog")
EXAMPLE = "cachectl schedule systemd"
OPTIONS = (
    ("kind", "|".join(KINDS), "daily, or when a job of Slurm ends", {"choices": KINDS}),
    ("--all-users", "systemd, cron: as root, for the caches of all users", {"dest": "everybody"}),
)

_SYSTEMD = """\
# Install: cachectl schedule systemd{words} | sh
mkdir -p {folder}
cat >{folder}/cachectl-prune.service <<'END'
[Unit]
Description=Prune kernel caches to the limits in cachectl's settings

[Service]
Type=oneshot
WorkingDirectory=/
{variables}ExecStart={command}
Nice=19
IOSchedulingClass=idle
END
cat >{folder}/cachectl-prune.timer <<'END'
[Unit]
Description=Prune kernel caches every day

[Timer]
OnCalendar=daily
RandomizedDelaySec=2h
Persistent=true

[Install]
WantedBy=timers.target
END
{systemctl} daemon-reload
{systemctl} enable --now cachectl-prune.timer
# Remove: {systemctl} disable --now cachectl-prune.timer && rm {folder}/cachectl-prune.*
"""
_CRON = """\
# Install: (crontab -l 2>/dev/null | grep -v 'cachectl schedule'; cachectl schedule cron{words}) | crontab -
{line}
"""
_EPILOG = """\
#!/bin/sh
# Install: cachectl schedule slurm-epilog | install -m 755 /dev/stdin /etc/slurm/epilog.d/cachectl-prune
# slurm.conf needs Epilog=/etc/slurm/epilog.d/*; then run: scontrol reconfigure
# When a job ends, slurmd runs this as root on its nodes. It prunes the caches of the job's user, as that user.
[ -n "$SLURM_JOB_USER" ] || exit 0
# Its nodes usually share the home, so that the first one is enough.
first=$(scontrol show hostnames "$SLURM_NODELIST" 2>/dev/null | head -n 1)
[ -z "$first" ] || [ "$first" = "$SLURMD_NODENAME" ] || exit 0
cd /
{command} --user "$SLURM_JOB_USER" >/dev/null
# Slurm drains a node whose epilog fails.
exit 0
"""


def schedule(layers: LayerSet, kind: str, *, all_users: bool = False) -> str:
    """Return a schedule of a kind in :data:`KINDS`, with the command that installs it; ``all_users`` is for root.

    Raises :class:`BadRequest` for a variable that cannot be written down.
    """
    if kind == "slurm-epilog" and all_users:
        raise core.BadRequest("slurm-epilog prunes the caches of the job's user; drop --all-users")
    # Python started by a relative path keeps dots in it.
    command = [os.path.abspath(sys.executable), "-m", "cachectl", "prune", *(["--all-users"] if all_users else [])]
    words = " --all-users" if all_users else ""
    # Each user has caches and settings of his own.
    variables = {} if all_users or kind == "slurm-epilog" else _needed_variables(layers)
    if kind == "systemd":
        folder = "/etc/systemd/system" if all_users else '"${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user"'
        systemctl = "systemctl" if all_users else "systemctl --user"
        lines = "".join(f"Environment={_unit_word(f'{name}={value}')}\n" for name, value in variables.items())
        start = " ".join(map(_unit_word, command))
        return _SYSTEMD.format(words=words, folder=folder, variables=lines, command=start, systemctl=systemctl)
    if kind == "cron":
        # Users of one machine start at different times, and one user always at the same time.
        minute = crc32(os.fsencode(layers.environment.home_folder)) % 60
        own = " ".join(["cd / &&", *(f"{name}={shlex.quote(value)}" for name, value in variables.items())])
        # cron would take % for the end of the line. It mails what a command prints, so that only errors are mailed.
        line = f"{minute} 4 * * * {own} {shlex.join(command)} >/dev/null # cachectl schedule".replace("%", "\\%")
        return _CRON.format(words=words, line=line)
    return _EPILOG.format(command=shlex.join(command))


def _needed_variables(layers: LayerSet) -> Mapping[str, str]:
    """Return the variables that move caches or settings: a timer does not get those that a shell sets."""
    environment = layers.environment
    here = _places(layers)
    needed = {}
    for name, value in environment.variables.items():
        without = environment.with_variables({name: None})
        if name != "HOME" and _places(type(layers)(without)) != here:
            if re.search(r"[\x00-\x1f\x7f]", value):
                raise core.BadRequest(f"{name} has a control character, which no schedule can hold; change it")
            needed[name] = value
    return needed


def _places(layers: LayerSet) -> set[Path]:
    """Return where caches and settings are."""
    places = {path for _, path in core.config_paths(layers.environment)}
    for layer in layers:
        with suppress(*core.FAILURES):
            places.update(root.path for root in layer.roots())
    return places


def _unit_word(text: str) -> str:
    """Return a word of a unit file, quoted if it must be."""
    word = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return word if re.fullmatch(r"[\w%+=:,./-]+", word, re.ASCII) else f'"{word}"'


def run(request: verbs.Request) -> int:
    """Carry out ``cachectl schedule``."""
    options = request.options
    request.output.show_raw(schedule(request.stack, options.kind, all_users=options.everybody).splitlines())
    # The settings of other users set their limits.
    own = options.kind != "slurm-epilog" and not options.everybody
    if own and request.config.limits(request.now).none:
        request.notice("prune has no limit yet, so it would fail; cachectl config shows where to set one")
    return 0
