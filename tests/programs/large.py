"""Store 9 MiB of noise in a user's own pytools dictionary, one value for each node; print what there was."""

import json
import os
import random

from pytools.persistent_dict import WriteOncePersistentDict

SIZE = 9 << 20

if __name__ == "__main__":
    mine = WriteOncePersistentDict("large-v1", safe_sync=False)
    values = {node: random.Random(node).randbytes(SIZE) for node in "ab"}  # noqa: S311 - the same noise in every run
    there = [node for node, value in values.items() if node in mine and mine[node] == value]
    node = os.environ["CACHECTL_NODE"]
    if node not in there:
        mine.store_if_not_present(node, values[node])
    print(json.dumps({"node": node, "there": there}))
