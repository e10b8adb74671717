"""Write what the wheel installs under ``share``: the manual page and the completions, from the grammar.

Run it after a change of the command line; a test compares its output with the files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from argparse_manpage.manpage import Manpage

from cachectl import __version__
from cachectl.cli.completion import script
from cachectl.cli.main import build_parser

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
    # The day when it was made would make it another file each day.
    manual = re.sub(r'^(\.TH CACHECTL "1") "[^"]*"', r'\1 ""', manual)
    return {"man/man1/cachectl.1": manual, **{place: f"{script(shell)}\n" for shell, place in PLACES.items()}}


def main() -> None:
    """Write every file."""
    for name, text in files().items():
        place = SHARE / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


if __name__ == "__main__":
    main()
