"""``cachectl purge``: what it shows of each layer, and returns."""

import re

from homes import Home
from support.hostile import put_binary
from support.products import fill_neo

from cachectl import notebook


def test_layers_with_nothing_to_remove_are_one_line_unless_they_are_named(cuda: Home) -> None:
    shown = cuda.cachectl("purge --all -n").stdout
    assert (re.findall(r"\n\d+ (.*)\n", shown), "pocl" in shown) == (["more layers: nothing to remove"], False)
    for line in ("purge cuda pocl -n", "purge --all -n -v"):
        shown = cuda.cachectl(line).stdout
        assert (re.search(r"^pocl +0 ", shown, re.MULTILINE) is None, "nothing" in shown) == (False, False), shown
    cuda.cachectl("purge cuda")
    assert re.fullmatch(r"\d+ layers: nothing to remove\n", cuda.cachectl("purge --all").stdout)


def test_what_only_removed_entries_led_to_is_said_once_they_went(home: Home) -> None:
    fill_neo(home.path)
    put_binary(home.path / ".cache/pyopencl")
    said = "neo: its entries for programs that are also in pyopencl cannot be hit without those of pyopencl"
    assert [said in home.cachectl("purge pyopencl").stderr for _ in range(2)] == [True, False]


def test_a_notebook_shows_the_layers_from_which_something_goes(cuda: Home) -> None:
    plan = cuda.stack.plan_clear(layers=["cuda", "pocl"])
    html = notebook.removal_html(plan)
    assert [word in html for word in ("would go", "cuda", "pocl")] == [True, True, False]
    assert "removed" in notebook.removal_html(plan.apply())
