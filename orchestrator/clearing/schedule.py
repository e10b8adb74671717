"""``cachectl schedule``: prune by itself, from a timer of systemd, a line of cron, or an epilog of Slurm.

Sources: systemd.timer(5), systemd.service(5) and systemd.syntax(7); crontab(5); slurm.conf(5), section "Prolog and
Epilog Scripts".
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zlib import crc32

from cachectl.layers.base.environment import SETTING_PREFIX, config_paths, user_name
from cachectl.layers.base.errors import FAILURES, BadRequest, CachectlError
from cachectl.layers.base.texts import printable
from cachectl.layers.disk.atomic import write_synced
from cachectl.layers.disk.trust import deciding_owner, shared_because

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment

#: Stands in every file and line that cachectl writes, so that it changes no other.
_MARK: Final = "written by cachectl schedule"
_CRON_MARK: Final = f"# {_MARK} cron"
_TIMER: Final = "cachectl-prune.timer"
_SERVICE: Final = "cachectl-prune.service"
_EPILOG: Final = "/etc/slurm/epilog.d/cachectl-prune"
KINDS: Final = ("systemd", "cron", "slurm-epilog")

_SERVICE_TEXT: Final = """\
# {mark} systemd
[Unit]
Description=Prune kernel caches to the limits in cachectl's settings

[Service]
Type=oneshot
WorkingDirectory=/
{variables}ExecStart={command}
Nice=19
IOSchedulingClass=idle
"""
_TIMER_TEXT: Final = """\
# {mark} systemd
[Unit]
Description=Prune kernel caches every day

[Timer]
OnCalendar=daily
RandomizedDelaySec=2h
Persistent=true

[Install]
WantedBy=timers.target
"""
_EPILOG_TEXT: Final = """\
#!/bin/sh
# {mark} slurm-epilog
# When a job ends, slurmd runs this as root on its nodes. It prunes the caches of the job's user, as that user.
[ -n "$SLURM_JOB_USER" ] || exit 0
# Its nodes usually share the home, so that the first one is enough.
first=$(scontrol show hostnames "$SLURM_NODELIST" 2>/dev/null | head -n 1)
[ -z "$first" ] || [ "$first" = "$SLURMD_NODENAME" ] || exit 0
cd /
{command} --user "$SLURM_JOB_USER" --time-limit 300 >/dev/null
# Slurm drains a node whose epilog fails.
exit 0
"""


class Schedule(ABC):
    """A schedule that can be printed, installed and removed; doing so twice changes nothing.

    :meth:`install` and :meth:`remove` return a line for each thing that they did, and for each that is left to do. They
    raise :class:`CachectlError` if something is in the way, and :class:`OSError`.
    """

    #: What is installed.
    text: str

    def install(self) -> tuple[str, ...]:
        """Install it, or bring it up to date."""
        return tuple(self._install())

    def remove(self) -> tuple[str, ...]:
        """Remove it."""
        return tuple(self._remove())

    @abstractmethod
    def _install(self) -> Iterator[str]: ...

    @abstractmethod
    def _remove(self) -> Iterator[str]: ...


def schedule(layers: LayerSet, kind: str, file: str | None = None) -> Schedule:
    """Return a schedule of a kind in :data:`KINDS`; ``file`` is the place of the epilog.

    Raises :class:`BadRequest` for another kind, and for a variable that cannot be written down.
    """
    environment = layers.environment
    command = [*_program(), "prune"]
    _demand_printable("the path of cachectl", command[0])
    if kind == "slurm-epilog":
        return SlurmEpilog(command, environment.expand(file or _EPILOG))
    if file is not None:
        message = f"the place of {kind} is fixed; only slurm-epilog takes a file"
        raise BadRequest(message)
    if kind == "systemd":
        return SystemdTimer(command, _needed_variables(layers), environment)
    if kind == "cron":
        return CronLine(command, _needed_variables(layers), environment)
    message = f"{kind!r} is no schedule; there are {', '.join(KINDS)}"
    raise BadRequest(message)


def _program() -> tuple[str, ...]:
    """Return the words that start this cachectl from any folder, without a search path."""
    # Python started by a relative path keeps dots in it.
    python = os.path.abspath(sys.executable)
    for script in (os.path.abspath(sys.argv[0]), os.path.join(os.path.dirname(python), "cachectl")):
        if os.path.basename(script) == "cachectl" and os.path.isfile(script) and os.access(script, os.X_OK):
            return (script,)
    return (python, "-m", "cachectl")


def _needed_variables(layers: LayerSet) -> Mapping[str, str]:
    """Return the variables that move caches or hold settings: a timer does not get those that a shell sets."""
    environment = layers.environment
    here = _places(layers)
    needed = {}
    for name, value in environment.variables.items():
        without = environment.with_variables({}, frozenset({name}))
        if name != "HOME" and (name.startswith(SETTING_PREFIX) or _places(type(layers)(without)) != here):
            _demand_printable(name, value)
            needed[name] = value
    return needed


def _demand_printable(what: str, text: str) -> None:
    if re.search(r"[\x00-\x1f\x7f]", text):
        message = f"{what} has a control character, which no schedule can hold; change it"
        raise BadRequest(message)


def _places(layers: LayerSet) -> set[Path]:
    """Return where caches and settings are."""
    found = {path for _, path in config_paths(layers.environment)}
    for layer in layers:
        with suppress(*FAILURES):
            found.update(root.path for root in layer.roots())
    return found


# ---------------------------------------------------------------------- systemd


class SystemdTimer(Schedule):
    """A timer of the user's service manager, and the service that it starts."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], environment: Environment) -> None:
        named = environment.get("XDG_CONFIG_HOME") or ""
        config = Path(named) if os.path.isabs(named) else environment.home_folder / ".config"
        self._folder = config / "systemd" / "user"
        self._variables = environment.variables
        lines = "".join(f"Environment={_unit_word(f'{name}={value}')}\n" for name, value in variables.items())
        # systemd takes no path of a program with these characters.
        through = ("/bin/sh", "-c", 'exec "$0" "$@"') if re.search(r"""["'\\$]""", command[0]) else ()
        words = " ".join(_unit_word(word).replace("$", "$$") for word in (*through, *command))
        self._files = {
            self._folder / _SERVICE: _SERVICE_TEXT.format(mark=_MARK, variables=lines, command=words),
            self._folder / _TIMER: _TIMER_TEXT.format(mark=_MARK),
        }
        self.text = "\n".join(f"# {path}\n{text}" for path, text in self._files.items())

    def _install(self) -> Iterator[str]:
        """Write both files and start the timer; if the service manager does not answer, yield the command for it."""
        for path in self._files:
            _demand_own(path)
        self._folder.mkdir(parents=True, exist_ok=True)
        for path, text in self._files.items():
            yield _write(path, text, 0o644)
        commands = (("daemon-reload",), ("enable", "--now", _TIMER))
        yield from self._systemctl("the timer runs daily", *commands)

    def _remove(self) -> Iterator[str]:
        """Stop the timer and remove both files."""
        there = [path for path in self._files if _demand_own(path)]
        if not there:
            yield f"no timer in {printable(self._folder)}"
            return
        stopped = tuple(self._systemctl("the timer is stopped", ("disable", "--now", _TIMER)))
        with suppress(FileNotFoundError):
            (self._folder / "timers.target.wants" / _TIMER).unlink()
        for path in there:
            path.unlink()
            yield f"removed {printable(path)}"
        yield from stopped

    def _systemctl(self, done: str, *commands: Sequence[str]) -> Iterator[str]:
        """Give commands to the user's service manager; yield ``done``, or the commands if it does not answer."""
        for command in commands:
            answer = _run(("systemctl", "--user", *command), self._variables)
            if answer is None or answer.returncode:
                why = "not installed" if answer is None else _first_line(answer.stderr)
                line = " && ".join(shlex.join(("systemctl", "--user", *words)) for words in commands)
                yield f"systemctl --user: {why}; in a session of yours, run: {line}"
                return
        yield f"{done}; it needs a session of yours, or: loginctl enable-linger"


def _unit_word(text: str) -> str:
    """Quote a word of a unit file. Raises :class:`BadRequest` for bytes that no unit file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"not UTF-8, and systemd takes nothing else: {printable(text)}; cachectl schedule cron takes it"
        raise BadRequest(message) from error
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


# ---------------------------------------------------------------------- cron


class CronLine(Schedule):
    """A line of the user's crontab; other lines stay as they are."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], environment: Environment) -> None:
        self._variables = environment.variables
        # Users of one machine start at different times, and one user always at the same time.
        minute = crc32(os.fsencode(environment.home_folder)) % 60
        set_here = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        words = " ".join(("cd / &&", *set_here, shlex.join(command)))
        # cron would take % for the end of the line. It mails what a command prints, so that only errors are mailed.
        self._line = f"{minute} 4 * * * {words} >/dev/null {_CRON_MARK}".replace("%", "\\%")
        self.text = f"{self._line}\n"

    def _install(self) -> Iterator[str]:
        """Add the line to the crontab, or replace the one that is there."""
        yield "the line runs daily" if self._replace([self._line]) else "the line is there already"

    def _remove(self) -> Iterator[str]:
        """Remove the line from the crontab."""
        yield "removed the line" if self._replace([]) else "no such line in the crontab"

    def _replace(self, own: Sequence[str]) -> bool:
        """Replace cachectl's lines in the crontab, and return whether that changed anything."""
        # Only a newline ends a line: splitlines also knows form feeds and others.
        with StringIO(self._crontab("-l", missing="no crontab for"), newline="\n") as text:
            before = [line.removesuffix("\n") for line in text]
        at = next((number for number, line in enumerate(before) if line.endswith(_CRON_MARK)), len(before))
        others = [line for line in before if not line.endswith(_CRON_MARK)]
        lines = [*others[:at], *own, *others[at:]]
        if lines == before:
            return False
        self._crontab("-", text="".join(f"{line}\n" for line in lines))
        return True

    def _crontab(self, argument: str, *, text: str = "", missing: str | None = None) -> str:
        """Run crontab and return what it prints. Raises :class:`CachectlError` if it fails."""
        answer = _run(("crontab", argument), self._variables, text)
        if answer is None:
            message = "crontab is not installed; install cron, or use: cachectl schedule systemd"
            raise CachectlError(message)
        if answer.returncode and not (missing and missing in answer.stderr):
            message = f"crontab {argument}: {_first_line(answer.stderr)}"
            raise CachectlError(message)
        return "" if answer.returncode else answer.stdout


# ---------------------------------------------------------------------- Slurm


class SlurmEpilog(Schedule):
    """A script that slurmd runs as root on the nodes of a job when it ends."""

    def __init__(self, command: Sequence[str], path: Path) -> None:
        self._program = Path(command[0])
        self._path = path
        self.text = _EPILOG_TEXT.format(mark=_MARK, command=shlex.join(command))

    def _install(self) -> Iterator[str]:
        """Write the script. Raises :class:`CachectlError` if a user other than root could change what root runs."""
        _demand_own(self._path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for place in (self._path.parent, self._program, Path(__file__), Path(sys.executable)):
            if (because := shared_because(place)) is not None:
                message = (
                    f"root would run {printable(place)}, but {because}; install cachectl as root, in a folder of root's"
                )
                raise CachectlError(message)
        yield _write(self._path, self.text, 0o755)
        yield f"slurm.conf needs Epilog={printable(self._path.parent)}/*; after a change, run: scontrol reconfigure"

    def _remove(self) -> Iterator[str]:
        """Remove the script."""
        if not _demand_own(self._path):
            yield f"no script {printable(self._path)}"
            return
        self._path.unlink()
        yield f"removed {printable(self._path)}"


# ---------------------------------------------------------------------- files and commands


def _demand_own(path: Path) -> bool:
    """Return whether a file exists. Raises :class:`CachectlError` if cachectl did not write it.

    A path that another user decides about is refused too: the superuser would write where that user's links lead.
    """
    if (decides := deciding_owner(path.parent)) is not None:
        whose = user_name(decides.st_uid)
        message = f"{printable(path.parent)} belongs to {whose}; do it as {whose}, or set HOME to your own home"
        raise CachectlError(message)
    if not os.path.lexists(path):
        return False
    if path.is_file() and _MARK in path.read_text(errors="replace"):
        return True
    message = f"{printable(path)} is there, and cachectl did not write it; move it away"
    raise CachectlError(message)


def _write(path: Path, text: str, mode: int) -> str:
    """Write a file with its mode in one step, unless it is there like that; return a line about it."""
    with suppress(FileNotFoundError):
        if path.read_text(errors="surrogateescape") == text and path.stat().st_mode & 0o777 == mode:
            return f"{printable(path)} is there already"
    # No glob of Slurm matches it.
    stage = path.with_name(f".{path.name}.new")
    stage.unlink(missing_ok=True)
    write_synced(None, str(stage), text.encode(errors="surrogateescape"), mode)
    stage.chmod(mode)
    stage.replace(path)
    return f"wrote {printable(path)}"


def _run(
    command: Sequence[str], variables: Mapping[str, str], text: str = ""
) -> subprocess.CompletedProcess[str] | None:
    """Run a command, whose messages are English; ``None`` if it is not installed."""
    try:
        done = subprocess.run(  # noqa: S603 - systemctl or crontab, without a shell
            command,
            env={**variables, "LC_ALL": "C"},
            input=text.encode(errors="surrogateescape"),
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    streams = (stream.decode(errors="surrogateescape") for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, *streams)


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "no answer")
