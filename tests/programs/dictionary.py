"""Store and fetch N values in a user's own pytools dictionary; print how many were there before, as JSON."""

import json
import sys

from pytools.persistent_dict import WriteOncePersistentDict

if __name__ == "__main__":
    mine = WriteOncePersistentDict("sumpy-code-cache-v8-test", safe_sync=False)
    before = 0
    for index in range(int(sys.argv[1])):
        try:
            before += mine[index] == [index] * 3
        except KeyError:
            mine.store_if_not_present(index, [index] * 3)
    print(json.dumps({"before": before}))
