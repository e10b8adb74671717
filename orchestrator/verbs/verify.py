"""``cachectl verify``: look for damage, entry by entry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cachectl.findings import Findings, damage, lines, table
from cachectl.options import FORM, LAYERS, PLACES, WAIT, Request

__all__ = ["OPTIONS", "run", "show", "table"]

OPTIONS: Final = (LAYERS, PLACES, WAIT, FORM)


def run(request: Request) -> Findings:
    """Carry out ``cachectl verify``."""
    with request.working("verifying"):
        return damage(request.stack.named(request.options.layers))


def show(result: Findings, request: Request) -> Iterator[object]:
    """Yield each finding; warn of what was not checked."""
    yield from lines(result, "no damage found")
    for layer, content in (result.not_checked or {}).items():
        request.notice(f"{layer}: not checked: {content}")
