"""Compare what ``trace`` says of the CUDA cache with the openings of its entries, counted in the process itself.

20 plain and 8 loopy kernels are built on an NVIDIA GPU: cold, warm, with one kernel purged, and by two programs of
which one is traced, which makes the numbers doubtful. A library loaded before all others logs each opening of an entry
file, with its error: a lookup that finds nothing too. It exits with 1 if a number differs, or if evidence is called
exact that is doubtful.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent
PROGRAM = (sys.executable, str(PROGRAMS / "nvidia_mixed.py"), "20", "8")
KEY = re.compile(r".*/ComputeCache/([0-9a-f]/[0-9a-f]/[0-9a-f]{14})")


def environment(folder: Path) -> dict[str, str]:
    """Return variables of a fresh home in which NVIDIA's driver is registered."""
    (folder / "home").mkdir()
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "CUDA_CACHE", "PYOPENCL"))
    }
    kept["HOME"] = str(folder / "home")
    if "OCL_ICD_VENDORS" not in kept:
        listed = subprocess.run(("ldconfig", "-p"), capture_output=True, text=True, check=False).stdout
        found = re.findall(r"=> (\S*libnvidia-opencl\.so\.1)", listed)
        found += map(str, Path("/usr/local/nvidia").rglob("libnvidia-opencl.so.1"))
        found += map(str, Path("/usr/lib").rglob("libnvidia-opencl.so.1"))
        (folder / "vendors").mkdir()
        (folder / "vendors" / "nvidia.icd").write_text(f"{found[0]}\n")
        kept["OCL_ICD_VENDORS"] = str(folder / "vendors")
    return kept


class Job:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = environment(folder)
        self.log = folder / "opens.log"
        self.library = folder / "opens.so"
        source = str(PROGRAMS / "opens.c")
        subprocess.run(("cc", "-shared", "-fPIC", "-O1", "-o", str(self.library), source, "-ldl"), check=True)
        self.differences = 0

    def cachectl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "cachectl", *arguments)
        return subprocess.run(command, env=self.variables, capture_output=True, text=True, check=True)

    def logged(self) -> tuple[str, ...]:
        self.log.unlink(missing_ok=True)
        added = (f"LD_PRELOAD={self.library}", f"OPENS_LOG={self.log}", "OPENS_IN=/ComputeCache/")
        return ("env", *added, *PROGRAM)

    def trace(self, *options: str, beside: bool = False) -> dict[str, Any]:
        """Trace the program, if asked while another one runs it too, and return the document."""
        document = self.folder / "trace.json"
        other = subprocess.Popen(PROGRAM, env=self.variables) if beside else None
        done = self.cachectl("trace", *options, "--json", str(document), "--force", "--", *self.logged())
        if other is not None:
            other.wait()
        read: dict[str, Any] = json.loads(document.read_text())
        read["text"] = done.stderr
        return read

    def opened(self) -> tuple[Counter[str], Counter[str], int]:
        """Return the readings and the stores of each entry, and the number of lookups that found nothing.

        An entry that is written again right after it was read was not complete, so that this was no hit.
        """
        hits: Counter[str] = Counter()
        stores: Counter[str] = Counter()
        absent = 0
        was_read: set[str] = set()
        for line in self.log.read_text().splitlines() if self.log.exists() else ():
            _, flags, error, path = line.split(" ", 3)
            key = KEY.fullmatch(path)
            if key is None:
                continue
            writes = int(flags) & os.O_ACCMODE != os.O_RDONLY
            if int(error):
                absent += not writes
            elif writes:
                stores[key[1]] += 1
                hits[key[1]] -= key[1] in was_read
                absent += key[1] in was_read
            else:
                hits[key[1]] += 1
            (was_read.discard if int(error) or writes else was_read.add)(key[1])
        return +hits, stores, absent

    def compare(self, what: str, document: dict[str, Any]) -> None:
        """Print the numbers of both, and the entries in which they differ."""
        hits, stores, absent = self.opened()
        (cuda,) = [layer for layer in document["layers"] if layer["layer"] == "cuda"]
        entries = [entry for entry in document["entries"] if entry["layer"] == "cuda"]
        own = ({entry["key"]: entry["hits"] for entry in entries if entry["hits"]},
               {entry["key"]: entry["stores"] for entry in entries if entry["stores"]})  # fmt: skip
        direct = (sum(hits.values()), absent, sum(stores.values()))
        traced = (cuda["hits"], cuda["misses"], cuda["stores"])
        builds = Counter(str(kernel["served_by"] or ("compiled" if kernel["compiled"] else None))
                         for kernel in document["kernels"])  # fmt: skip
        same = direct == traced and own == (dict(hits), dict(stores))
        self.differences += not same
        print(f"{what}: opened (hits, misses, stores) {direct}, traced {traced}, {cuda['evidence']}: {cuda['why']}")
        print(f"  {'the same, entry by entry' if same else 'DIFFERENT'}; builds served by {dict(builds)}")
        self.expect(what, "evidence of warm runs", cuda["evidence"] == "exact" or what != "warm")
        for key in sorted({*hits, *stores, *own[0], *own[1]}) if not same else ():
            print(f"  {key}: opened {hits[key]} {stores[key]}, traced {own[0].get(key, 0)} {own[1].get(key, 0)}")

    def expect(self, what: str, expected: str, holds: bool) -> None:
        self.differences += not holds
        if not holds:
            print(f"{what}: DIFFERENT: {expected}")


def main() -> int:
    with tempfile.TemporaryDirectory(dir=os.environ.get("CACHECTL_BENCH_DIR")) as folder:
        job = Job(Path(folder))
        cold = job.trace()
        job.compare("cold", cold)
        files = [path for path in (Path(folder) / "home" / ".nv").rglob("?" * 14) if KEY.fullmatch(str(path))]
        print(f"  files of entries: {len(files)}, of which {sum(path.stat().st_size for path in files)} bytes")
        warm = job.trace()
        job.compare("warm", warm)
        job.cachectl("purge", "cuda", "--kernel", "nv3")
        purged = job.trace("--explain")
        job.compare("nv3 purged", purged)
        (cuda,) = [layer for layer in purged["layers"] if layer["layer"] == "cuda"]
        numbers = (cuda["hits"], cuda["misses"], cuda["stores"])
        (before,) = [layer["hits"] for layer in warm["layers"] if layer["layer"] == "cuda"]
        job.expect("nv3 purged", f"two of {before} hits are misses, and not {numbers}", numbers == (before - 2, 2, 2))
        compiled = [kernel["kernels"] for kernel in purged["kernels"] if kernel["compiled"]]
        print(f"  compiled: {compiled}\n{purged['text']}")
        (cuda,) = [layer for layer in job.trace(beside=True)["layers"] if layer["layer"] == "cuda"]
        job.expect("while another program runs", "evidence is inferred", cuda["evidence"] == "inferred")
        print(f"while another program runs: {cuda['evidence']}: {cuda['why']}")
        return int(job.differences > 0)


if __name__ == "__main__":
    sys.exit(main())
