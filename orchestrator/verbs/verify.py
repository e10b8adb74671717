"""``cachectl verify``: look for damage, entry by entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cachectl import layer_set, listing, verbs

OPTIONS = (verbs.LAYERS, verbs.PLACES, verbs.WAIT, verbs.FORM)


def verify(stack: layer_set.LayerSet, layers: Iterable[str] = ()) -> listing.Findings:
    """Check every entry of the named layers, or of all, for damage."""
    return listing.damage(stack.named(layers))


def run(request: verbs.Request) -> listing.Findings:
    """Carry out ``cachectl verify``."""
    with request.working("verifying"):
        return verify(request.stack, request.options.layers)


table = listing.findings_table


def show(result: listing.Findings, request: verbs.Request) -> Iterator[object]:
    """Yield each finding; warn of what was not checked."""
    yield from listing.findings_lines(result, "no damage found")
    layers_by_content: dict[str, list[str]] = {}
    for layer, content in (result.not_checked or {}).items():
        layers_by_content.setdefault(content, []).append(layer)
    for content, layers in layers_by_content.items():
        request.notice(f"{', '.join(layers)}: not checked: {content}")
