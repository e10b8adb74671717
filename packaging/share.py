"""Write what the wheel installs under ``share``: the manual page and the completions, from the grammar.

Run it after a change of the command line; a test compares its output with the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from argparse_manpage.manpage import Manpage

from cachectl import __version__
from cachectl.cli.completion import script
from cachectl.cli.main import VERBS, build_parser, verb_module

#: What the grammar does not say, by the names that manual pages use.
SECTIONS = {
    "EXIT STATUS": (
        ("0", "done; what was skipped is printed"),
        ("1", "something failed, was refused, is missing or damaged, or a proof does not hold"),
        ("2", "misuse: an option, layer, age or size that does not exist"),
        ("126, 127", "run, trace, bench and stage: the command could not be started, or was not found"),
        ("128+n", "run, trace, bench and stage: signal n ended the command; else its own status"),
    ),
    "FILES": (
        ("$XDG_CONFIG_HOME/cachectl/config.toml", "settings, see cachectl config"),
        ("$XDG_STATE_HOME/cachectl/", "the ledger of traces, drivers seen on this host, temporary folders; private"),
    ),
    "ENVIRONMENT": (
        ("CACHECTL_CONFIG", "the file of settings"),
        ("CACHECTL_NODE", "the name of this node for stage, if not that of the host"),
        ("NO_COLOR", "no colours"),
        ("TMPDIR, XDG_*", "where temporary folders, settings and state are"),
    ),
}
SHARE = Path(__file__).parent / "share"
#: Where each shell looks for completions below a prefix.
PLACES = {
    "bash": "bash-completion/completions/cachectl",
    "zsh": "zsh/site-functions/_cachectl",
    "fish": "fish/vendor_completions.d/cachectl.fish",
}


def files() -> dict[str, str]:
    """Return the text of each file, by its path below ``share``."""
    # argparse wraps usages to the width of the terminal.
    os.environ["COLUMNS"] = "80"
    page = {
        "manual_title": "cachectl",
        "project_name": "cachectl",
        "version": __version__,
        "description": "see, clear, switch and prove every kernel cache of the OpenCL stack",
    }
    manual = str(Manpage(build_parser(), format="single-commands-section", _data=page))
    examples = ((verb_module(name).EXAMPLE, "") for name in VERBS)
    sections = {**SECTIONS, "EXAMPLES": tuple(examples)}
    more = "".join(_section(title, rows) for title, rows in sections.items())
    manual = manual.replace(".SH COMMENTS", f"{more}.SH COMMENTS")
    # The day when it was made would make it another file each day.
    manual = re.sub(r'^(\.TH CACHECTL "1") "[^"]*"', r'\1 ""', manual)
    return {"man/man1/cachectl.1": manual, **{place: f"{script(shell)}\n" for shell, place in PLACES.items()}}


def _section(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a section of the manual: terms with their meaning, in the roff language."""
    lines = [f".SH {title}"]
    for term, meaning in rows:
        bold, plain = (text.replace("\\", "\\\\").replace("-", "\\-") for text in (term, meaning))
        lines += [".TP", f"\\fB{bold}\\fR", *([plain] if plain else [])]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write every file."""
    for name, text in files().items():
        place = SHARE / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


if __name__ == "__main__":
    main()
