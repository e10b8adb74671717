"""The pages about troubleshooting and verdicts, written from the code: ``python docs/codes.py`` writes them again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from cachectl.layers.core import codes
from cachectl.layers.core.finding import Code
from cachectl.layers.registry import catalogue
from cachectl.watching.causes import CAUSES

VERDICTS = Path(__file__).with_name("verdicts.md")
PAGE = Path(__file__).with_name("troubleshooting.md")
_INTRODUCTION = """# Troubleshooting

[`doctor`](cli/doctor.md) checks the set-up, [`verify`](cli/verify.md) the entries. Each finding has a severity, a
command that fixes it, and in JSON a *code*. `fix_tested` says whether a test makes the state, runs the fix and sees the
library work; other fixes are advice. Look up a code below, or the message of a library here.

## Messages of the libraries
"""
_VERDICTS = """# Why a kernel missed

[`trace`](cli/trace.md) names the first of these causes that its evidence supports, and up to two differences of
a build.
"""
_GROUPS = {
    "Places": codes.OF_PLACES,
    "Variables and software": codes.OF_SETUP,
    "Contents": codes.OF_CONTENTS,
}
#: The reason why no test runs a fix that is none.
_NOTHING = "nothing needs to be done"
_WIDTH = 118


def page() -> str:
    """Return the text of the page."""
    return "\n".join((_INTRODUCTION, *_messages(), *_sections())).rstrip("\n") + "\n"


def verdicts() -> str:
    """Return the text of the page about the sentences of a verdict."""
    lines = [_VERDICTS, "| the verdict says | evidence | certainty | what to do |", "|---|---|---|---|"]
    for cause in CAUSES:
        sentence = re.sub(r"\{(\w+)\}", lambda value: f"*{value[1]}*", cause.text.replace("`", ""))
        lines.append(f"| {sentence} | {cause.evidence} | {cause.certainty} | {cause.cure} |")
    return "\n".join(lines) + "\n"


def _messages() -> Iterator[str]:
    """Yield the table of messages, by the alphabet."""
    states = [(symptom, code) for code in catalogue() for symptom in code.symptoms]
    yield "| message | code |"
    yield "|---|---|"
    for symptom, code in sorted(states, key=lambda state: (state[0].casefold(), state[1].name)):
        yield f"| {symptom} | [`{code.name}`](#{code.name}) |"
    yield ""


def _sections() -> Iterator[str]:
    common = {code.name for group in _GROUPS.values() for code in group}
    own = tuple(code for code in catalogue() if code.name not in common)
    for title, group in {**_GROUPS, "Single products": own}.items():
        yield f"## {title}\n"
        for code in group:
            yield from _section(code)


def _section(code: Code) -> Iterator[str]:
    words = [code.meaning, code.cure]
    if code.advice and code.advice != _NOTHING:
        words.append(f"Advice: {code.advice}.")
    yield f"### `{code.name}`\n"
    yield f"{_filled(' '.join(words))}\n"


def _filled(text: str) -> str:
    """Return a paragraph in lines; a link is not broken."""
    lines = [""]
    for word in re.findall(r"\S*\[[^\]]*\]\S*|\S+", text):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > _WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    VERDICTS.write_text(verdicts(), encoding="utf-8")
    advice = sum(bool(code.advice) for code in catalogue())
    print(f"{len(catalogue())} codes: tests run the fixes of {len(catalogue()) - advice}, {advice} are advice")
