"""Compare what ``trace`` says of the CUDA cache with the openings of its entries, counted in the process itself.

20 plain and 8 loopy kernels are built on an NVIDIA GPU: cold, warm, with one kernel purged, and by two programs of
which one is traced, which makes the numbers doubtful. A library loaded before all others logs each opening of an entry
file, with its error: a lookup that finds nothing too. It exits with 1 if a number differs, or if evidence is called
exact that is doubtful.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

PROGRAMS = Path(__file__).parent
PROGRAM = (sys.executable, str(PROGRAMS / "nvidia_mixed.py"), "20", "8")
KEY = re.compile(r".*/ComputeCache/([0-9a-f]/[0-9a-f]/[0-9a-f]{14})")


def environment(folder):
    """Return variables of a fresh home in which NVIDIA's driver is registered."""
    (folder / "home").mkdir()
    theirs = ("XDG_", "CUDA_CACHE", "PYOPENCL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    if "OCL_ICD_VENDORS" not in kept:
        listed = subprocess.run(("ldconfig", "-p"), capture_output=True, text=True, check=False).stdout
        found = re.findall(r"=> (\S*libnvidia-opencl\.so\.1)", listed)
        for place in ("/usr/local/nvidia", "/usr/lib"):
            found += map(str, Path(place).rglob("libnvidia-opencl.so.1"))
        (folder / "vendors").mkdir()
        (folder / "vendors/nvidia.icd").write_text(f"{found[0]}\n")
        kept["OCL_ICD_VENDORS"] = str(folder / "vendors")
    return {**kept, "HOME": str(folder / "home")}


def opened(log):
    """Return the readings and the stores of each entry, and the number of lookups that found nothing.

    An entry that is written again right after it was read was not complete, so that this was no hit.
    """
    hits, stores, absent, was_read = Counter(), Counter(), 0, set()
    for line in log.read_text().splitlines() if log.exists() else ():
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


class Job:
    def __init__(self, folder):
        self.folder, self.variables, self.log = folder, environment(folder), folder / "opens.log"
        library = folder / "opens.so"
        subprocess.run(("cc", "-shared", "-fPIC", "-O1", "-o", library, PROGRAMS / "opens.c", "-ldl"), check=True)
        added = (f"LD_PRELOAD={library}", f"OPENS_LOG={self.log}", "OPENS_IN=/ComputeCache/")
        self.command = ("env", *added, *PROGRAM)
        self.differences = 0

    def cachectl(self, *arguments):
        command = (sys.executable, "-m", "cachectl", *arguments)
        return subprocess.run(command, env=self.variables, capture_output=True, text=True, check=True)

    def trace(self, *options):
        """Trace the program; return the document, what it says of CUDA, and its numbers."""
        self.log.unlink(missing_ok=True)
        file = self.folder / "trace.json"
        done = self.cachectl("trace", *options, "--json", str(file), "--force", "--", *self.command)
        document = {**json.loads(file.read_text()), "text": done.stderr}
        (cuda,) = [layer for layer in document["layers"] if layer["layer"] == "cuda"]
        return document, cuda, (cuda["hits"], cuda["misses"], cuda["stores"])

    def expect(self, what, expected, holds):
        self.differences += not holds
        if not holds:
            print(f"{what}: DIFFERENT: {expected}")

    def compare(self, what, *options):
        """Trace, and print the numbers of both; return the document and the traced numbers."""
        document, cuda, traced = self.trace(*options)
        hits, stores, absent = opened(self.log)
        entries = [entry for entry in document["entries"] if entry["layer"] == "cuda"]
        own = [{one["key"]: one[kind] for one in entries if one[kind]} for kind in ("hits", "stores")]
        direct = (sum(hits.values()), absent, sum(stores.values()))
        served = [str(one["served_by"] or ("compiled" if one["compiled"] else None)) for one in document["kernels"]]
        print(f"{what}: opened (hits, misses, stores) {direct}, traced {traced}, {cuda['evidence']}: {cuda['why']}")
        print(f"  builds served by {dict(Counter(served))}")
        self.expect(what, f"{own} and not {hits}, {stores}", (direct, own) == (traced, [hits, stores]))
        self.expect(what, "evidence of warm runs", cuda["evidence"] == "exact" or what != "warm")
        return document, traced


def main():
    with tempfile.TemporaryDirectory(dir=os.environ.get("CACHECTL_BENCH_DIR")) as folder:
        job = Job(Path(folder))
        job.compare("cold")
        _, (before, _, _) = job.compare("warm")
        job.cachectl("purge", "cuda", "--kernel", "nv3")
        purged, numbers = job.compare("nv3 purged", "--explain")
        job.expect("nv3 purged", f"two of {before} hits are misses, and not {numbers}", numbers == (before - 2, 2, 2))
        print(f"  compiled: {[one['kernels'] for one in purged['kernels'] if one['compiled']]}\n{purged['text']}")
        with subprocess.Popen(PROGRAM, env=job.variables):
            _, cuda, _ = job.trace()
        job.expect("while another program runs", "evidence is inferred", cuda["evidence"] == "inferred")
        print(f"while another program runs: {cuda['evidence']}: {cuda['why']}")
        return int(job.differences > 0)


if __name__ == "__main__":
    sys.exit(main())
