"""One call of a verb: what was typed, and the layers it is about."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from cachectl.cli import output

T = TypeVar("T")

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Protocol

    from cachectl.config import Config
    from cachectl.exchange.around import StoreUse
    from cachectl.exchange.trust import Trust
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer
    from cachectl.layers.base.selection import Selection
    from cachectl.options import Step
    from cachectl.output_files import Kind, OutputFile
    from cachectl.stack import Stack

    class _Done(Protocol):
        @property
        def failed(self) -> object: ...

    #: The columns and the rows of a verb.
    Columns = tuple[Sequence[output.Column[T]], Iterable[T]]


Done = TypeVar("Done", bound="_Done")

#: Verbs that show broken plug-ins themselves.
_SHOWING_PLUGINS: Final = frozenset({"report", "layers", "doctor"})


class Call:
    """What was typed: the options of the verb, and the command after ``--``; ``words`` is the whole line.

    ``environment`` is the one that :func:`~cachectl.cli.main.main` was given, by default this process's.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        words: Sequence[str] = (),
        command: Sequence[str] = (),
        environment: Environment | None = None,
    ) -> None:
        self.options = options
        self.words = list(words)
        self.command = list(command)
        self._given = environment

    # ------------------------------------------------------------------ what it is about

    @cached_property
    def _here(self) -> Environment:
        """The environment without options and settings."""
        from cachectl.layers.base.environment import Environment, process_variable
        from cachectl.layers.base.errors import CachectlError

        try:
            os.getcwd()
        except OSError as error:
            where = process_variable("PWD") or "the working folder"
            message = f"{where}: {error.strerror}; the working folder has gone or is closed to you, cd to another"
            raise CachectlError(message) from error
        return Environment.here() if self._given is None else self._given

    @cached_property
    def environment(self) -> Environment:
        """The environment, with the options and settings that change how caches are read and changed."""
        from dataclasses import replace

        here = self._here
        if (below := getattr(self.options, "below", None)) is not None:
            from cachectl.switching.run import environment_below

            here = environment_below(here, below)
        wait, shared = getattr(self.options, "wait", None), getattr(self.options, "shared", False)
        if self._is_configured:
            wait = self.config.get("wait") if wait is None else wait
            shared = shared or bool(self.config.get("shared"))
        return replace(
            here,
            python_paths=self._python_paths(here),
            lock_timeout=here.lock_timeout if wait is None else wait,
            shared=shared,
        )

    @property
    def changes_user(self) -> bool:
        """Return whether the verb is about other users. Raises :class:`CachectlError` if only root could do that."""
        from cachectl.layers.base.errors import CachectlError

        given = vars(self.options)
        if not given.get("user") and not given.get("all_users"):
            return False
        if not hasattr(os, "geteuid") or os.geteuid():
            raise CachectlError("only root may become other users: sudo cachectl …")
        return True

    def _python_paths(self, here: Environment) -> tuple[Path, ...]:
        """Return the interpreters that are named. Raises :class:`BadRequest` for one that does not answer."""
        named = getattr(self.options, "python", ()) or (self.config.interpreters if self._is_configured else ())
        if not named:
            return here.python_paths
        from cachectl.layers.host.pythons import named_pythons

        return named_pythons(here, named)

    @cached_property
    def _is_configured(self) -> bool:
        from cachectl.layers.base.environment import is_configured

        return is_configured(self._here)

    @cached_property
    def stack(self) -> Stack:
        """The layers of the environment; broken plug-ins are warned of."""
        from cachectl.stack import Stack

        stack = Stack(self.environment)
        options = vars(self.options)
        # A verb about all layers is incomplete without them.
        if options["verb"] not in _SHOWING_PLUGINS and not (options.get("layers") or options.get("layer")):
            for plugin in stack.broken:
                output.warn(f"plug-in {plugin.name}: {plugin.why}")
        return stack

    @cached_property
    def config(self) -> Config:
        """The config files and variables. Raises :class:`BadConfig` and :class:`ConfigRefused`."""
        from cachectl.config import load

        return load(self._here)

    @property
    def now(self) -> float:
        """The time of the environment in epoch seconds."""
        return self.environment.clock()

    # ------------------------------------------------------------------ what was typed

    def misuse(self, message: str) -> NoReturn:
        """Print what is wrong with the options, and end the program with status 2."""
        self.options.parser.error(message)
        raise SystemExit(2)

    def demand_command(self) -> None:
        """Raise :class:`BadRequest`, with the corrected line, unless the command is behind ``--``, all of it."""
        import shlex

        from cachectl.layers.base.errors import BadRequest

        if unexpected := getattr(self.options, "unexpected", []):
            at = (self.words.index("--") if "--" in self.words else len(self.words)) - len(unexpected)
            before, after = self.words[:at], self.words[at:]
            if self.command and len(unexpected) == 1 and before[-1] == "--isolated":
                what, line = "write the folder after =", [*before[:-1], f"--isolated={unexpected[0]}", *after[1:]]
            else:
                what, line = "write -- before the command", [*before, "--", *after]
            raise BadRequest(f"{what}: {shlex.join(['cachectl', *line])}")
        if not self.command:
            self.misuse("end the line with -- and the command to run")

    def key(self, text: str, layers: Iterable[Layer]) -> str:
        """Return the key that a text begins, and name it if it was not typed as a whole."""
        from cachectl.listing import full_key

        key = full_key(layers, text)
        if key != text:
            output.warn(f"{text}: the key {key}")
        return key

    def selection(self) -> Selection:
        """Return which entries were selected."""
        from cachectl.layers.base.selection import Selection, parse_age

        options, now = self.options, self.now
        return Selection(
            kernel=options.kernel,
            key=None if options.key is None else self.key(options.key, self._selected_layers()),
            before=None if options.older_than is None else now - parse_age(options.older_than),
            stale=options.stale,
        )

    def _selected_layers(self) -> Iterable[Layer]:
        # What purge and push mean without a layer has no tuning results, but their keys are of another form.
        return self.stack.named(self.options.layers)

    def trust(self) -> Trust | None:
        """Return why a store is trusted; ``None`` if no option says so."""
        from cachectl.exchange.trust import Trust

        given = (self.options.allowed_signers, self.options.digest, self.options.trust)
        return None if given == (None, None, False) else Trust(*given)

    def store_use(self) -> StoreUse | None:
        """Return the store around a command; ``None`` without one."""
        options, trust = self.options, self.trust()
        if not options.store:
            if trust is not None or options.sign is not None:
                self.misuse("--allowed-signers, --digest, --trust and --sign are for --store SOURCE")
            return None
        if options.no_cache:
            self.misuse("--no-cache leaves nothing to pull or push; drop --store")
        from cachectl.exchange.around import PATIENCE, StoreUse
        from cachectl.exchange.trust import UNTRUSTED

        if trust is None:
            self.misuse(UNTRUSTED)
        seconds = PATIENCE if options.store_wait is None else options.store_wait
        return StoreUse(self.target(options.store), trust, options.store_mode == "rw", options.sign, seconds)

    def target(self, name: str) -> str:
        """Return the address of a store, which no layer's name may be."""
        if name in self.stack:
            self.misuse(f"{name!r} is a layer: write what to read or write before the layers, or ./{name}")
        return name

    def output_file(self, name: str, kind: Kind) -> OutputFile:
        """Return a file to write, which no layer's name may be."""
        from cachectl.output_files import OutputFile

        return OutputFile(name, kind, self.stack, self.options.force)

    # ------------------------------------------------------------------ what comes out

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show a spinner on a terminal, with the layer that a reading verb has come to."""
        with output.working(what) as show:
            self.stack.announce = lambda layer: show(f"{what} {layer}".rstrip())
            try:
                yield
            finally:
                self.stack.announce = None

    @property
    def form(self) -> str:
        """Return the form of the output: ``table``, ``json`` or ``csv``."""
        return "json" if self.options.json else "csv" if getattr(self.options, "csv", False) else "table"

    def notice(self, line: str) -> None:
        """Print a line for people on standard error."""
        output.warn(line)

    def say(self, parts: Iterable[object]) -> None:
        """Print tables and lines for people."""
        output.say(parts)

    def tell(self, parts: Iterable[object]) -> None:
        """Print tables and lines on standard error, and bytes as they are."""
        output.tell(parts)

    def write_json(self, fact: object, file: OutputFile) -> None:
        """Write a fact to a file as a JSON document."""
        if file.name == "-":
            output.show_json(fact)
        else:
            file.write((output.json_bytes(fact),))

    def progress(self) -> AbstractContextManager[Callable[[Step], None]]:
        """Yield a function to call with each step of long work; on a terminal it shows a bar with the time left."""
        return output.progress()

    def show(
        self, done: Done, show: Callable[[Done], None], table: Callable[[Done], Columns[Any]] | None = None
    ) -> int:
        """Show what a verb returned in the form that was asked for, and return the exit status.

        ``show`` prints it for people; ``table`` returns columns and rows for CSV.
        """
        if self.form == "json":
            output.show_json(done)
        elif self.form == "table":
            show(done)
        elif table is None:
            self.misuse("this has no rows; use --json")
        else:
            output.show_csv(*table(done))
        return 1 if done.failed else 0
