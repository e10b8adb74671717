"""``ls``: entries by kernel over all layers, and keys that can be typed."""

import json
import os
import sys
from collections import Counter

import pytest
from homes import Home
from support.tracing import trace
from tiers import real, thorough_only

from cachectl.layers.core.selection import short_key


@real
def test_kernels_have_their_entries_in_all_layers(warm: Home) -> None:
    """The sums are those of the entries; ``report`` has the same ones; a limit and an order count for lines."""
    listed = warm.json("ls")
    numbers, sizes = Counter[str](), Counter[str]()
    for entry in listed["entries"]:
        name = " ".join(sorted(entry["kernels"] or ())) or entry["layer"]
        numbers[name] += 1
        sizes[name] += entry["bytes"]
    shown = {" ".join(one["kernels"]) or one["layers"][0]: one for one in listed["kernels"]}
    assert {name: (one["entries"], one["bytes"]) for name, one in shown.items()} == {
        name: (number, sizes[name]) for name, number in numbers.items()
    }
    assert [one["bytes"] for one in listed["kernels"]] == sorted(sizes.values(), reverse=True)
    assert any({"loopy", "pocl"} <= set(one["layers"]) for one in listed["kernels"])
    assert warm.json("report", "--by", "kernel")["kernels"] == listed["kernels"]
    lines = warm.cachectl("ls --sort size --limit 2").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["kernel", *(one["kernels"][0] for one in listed["kernels"][:2])]


@thorough_only
@real
def test_kernels_of_one_program_are_one(home: Home) -> None:
    home.python("named.py one two")
    home.python("named.py two three")
    home.python("named.py four")
    assert [one["kernels"] for one in home.json("ls pocl")["kernels"]] == [["one", "three", "two"], ["four"]]


@thorough_only
@real
def test_what_a_trace_measured_is_what_entries_save(home: Home) -> None:
    assert "saves" not in home.cachectl("ls").stdout
    cold = trace(home, "kernels.py", "1")
    (kernel,) = (one for one in home.json("ls")["kernels"] if one["kernels"] == ["lk0"])
    (missed,) = (one for one in cold["missed"] if one["kernel"] == "lk0")
    assert kernel["saves"] == pytest.approx(missed["seconds"], rel=0.5)
    assert sum(kernel["saves_in"].values()) == pytest.approx(kernel["saves"])
    (said,) = (line for line in home.cachectl("report --by kernel").stdout.splitlines() if line.startswith("measured"))
    assert all(f" s in {layer}" in said for layer in kernel["saves_in"])
    assert home.cachectl("ls").stdout.splitlines()[0].split()[-1] == "saves"
    trace(home, "kernels.py", "1")
    assert [one["saves"] for one in home.json("ls")["kernels"] if one["kernels"] == ["lk0"]] == [kernel["saves"]]


@real
def test_short_keys_are_taken_like_whole_ones(warm: Home) -> None:
    """They are those of ``ls -l``; one that no entry has is a miss."""
    entries = warm.json("ls")["entries"]
    lines = warm.cachectl("ls -l").stdout.splitlines()[1:]
    assert [line.split()[-1] for line in lines] == [short_key(entry["key"]) for entry in entries]
    for layer in ("loopy", "pocl"):
        key = next(entry["key"] for entry in entries if entry["layer"] == layer)
        short = short_key(key)
        for name, given in (("whole", key), ("short", short)):
            warm.cachectl("get", layer, given, "-o", name)
        assert (warm.path / "whole").read_bytes() == (warm.path / "short").read_bytes()
        assert [entry["key"] for entry in warm.json("ls", "--key", short)["entries"]] == [key]
        assert warm.json("purge", layer, "--key", short)["total"]["removed"] == 1
        warm.refused("get", layer, short, says=f"no entry has the key {short!r}")
        warm.refused("put", layer, short[::-1], "whole", says="the artifact belongs to the key")
        warm.cachectl("put", layer, short, "whole")
        assert [entry["key"] for entry in warm.json("ls", layer, "--key", key)["entries"]] == [key]


@thorough_only
@real
def test_traced_runs_are_summed(home: Home) -> None:
    """What hits saved is known for what a trace has measured."""
    assert "runs" not in home.json("report")
    assert home.json("report", "--since", "1d")["runs"]["runs"] == 0
    cold, warm = (trace(home, "kernels.py", "1") for _ in range(2))
    (seconds,) = (one["seconds"] for one in cold["missed"] if one["kernel"] == "lk0")
    runs = home.json("report", "--since", "1d")["runs"]
    assert (runs["runs"], runs["hits"]) == (2, sum(one["hits"] or 0 for one in warm["layers"]))
    assert runs["missed"] == pytest.approx(cold["summary"]["missed"])
    assert runs["saved"] == pytest.approx(seconds, rel=0.5)
    assert "2 traced runs of " in home.cachectl("report --since 1d").stdout
    assert home.json("report", "--since", "0s")["runs"]["runs"] == 0


@thorough_only
@real
def test_programs_say_which_compiler_wrote_them(home: Home) -> None:
    home.python("named.py one two")
    asked = "import binaries; print(binaries.device().platform.version)"
    version = home.run(sys.executable, "-c", f"import sys; sys.path.insert(0, {str(home.programs)!r}); {asked}").stdout
    (entry,) = home.json("ls pocl")["entries"]
    assert f"LLVM {entry['versions']['llvm']}" in version
    (share,) = [one for one in home.json("report", "--by", "driver")["drivers"] if one["layer"] == "pocl"]
    assert (share["layer"], share["versions"], share["entries"]) == ("pocl", entry["versions"], 1)
    assert f"llvm {entry['versions']['llvm']}" in home.cachectl("report --by driver").stdout


@thorough_only
@real
def test_prune_keeps_what_takes_long_to_make(home: Home) -> None:
    """Two programs of the same size and age: the one goes whose misses took less."""
    for name in ("one", "two"):
        trace(home, "named.py", name)
    for path in sorted(home.path.glob(".cache/pocl/kcache/*/*/**"), reverse=True):
        os.utime(path, (1e9, 1e9))
    ledger = home.path / ".local/state/cachectl/ledger/ledger.json"
    for slow, fast in (("one", "two"), ("two", "one")):
        document = json.loads(ledger.read_text())
        for name, seconds in ((slow, 9.0), (fast, 0.1)):
            document["kernels"][name]["seconds"] = {"pocl": seconds}
        ledger.write_text(json.dumps(document))
        total = sum(one["bytes"] for one in home.json("ls pocl")["entries"])
        plan = home.json("prune", "pocl", "--max-size", f"{total - 1}B", "--dry-run")
        (going,) = plan["layers"][0]["entries"]
        (kernel,) = (one["kernels"] for one in home.json("ls pocl")["entries"] if one["key"] == going["key"])
        assert kernel == [fast]


@real
def test_a_name_that_nothing_has_is_said_with_what_is_near(warm: Home) -> None:
    kernel = warm.json("ls")["kernels"][0]["kernels"][0]
    unknown, near = f"{kernel}_x", f"no entry has a kernel '{kernel}_x'; similar names: {kernel}"
    for command, status in (("ls", 1), ("push warm.zip", 1), ("purge --all", 0)):
        done = warm.cachectl(command, "--kernel", unknown, check=False)
        assert (done.returncode, near in done.stderr) == (status, True), done.stderr
    assert not (warm.path / "warm.zip").exists()
    done = warm.cachectl("ls --key nosuch --json", check=False)
    assert (done.returncode, json.loads(done.stdout)["entries"]) == (1, [])
    assert "no entry has the key 'nosuch'" in done.stderr
    # Of what is there nothing is said if another condition leaves it out.
    done = warm.cachectl("ls --older-than 30d", "--kernel", kernel)
    assert done.stderr == ""
    assert "digest" not in warm.cachectl("push empty.zip cuda").stdout
