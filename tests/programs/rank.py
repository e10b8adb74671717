"""Run ``thirteen.py 2 1`` as one rank of a job; write into FOLDER what was in this rank's caches before and after."""

import json
import os
import runpy
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

FOLDER = sys.argv[1]


def cached():
    pocl = Path(os.environ.get("POCL_CACHE_DIR") or Path.home() / ".cache/pocl/kcache")
    rows = {}
    for file in (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytools").glob("*.sqlite"):
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            rows[file.name] = sum(database.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for (name,) in tables)
    files = [str(path.relative_to(pocl)) for path in pocl.rglob("*") if path.suffix in {".bc", ".so"}]
    return {"pocl": sorted(files), "rows": {name: count for name, count in rows.items() if count}}


if __name__ == "__main__":
    before, started = cached(), time.time()
    sys.path.insert(0, str(Path(__file__).parent))
    sys.argv = ["thirteen.py", "2", "1"]
    runpy.run_path(str(Path(__file__).with_name("thirteen.py")), run_name="__main__")
    result = {"before": before, "after": cached(), "began": started, "node": os.environ.get("CACHECTL_NODE")}
    Path(FOLDER, f"{os.getpid()}.json").write_text(json.dumps(result))
