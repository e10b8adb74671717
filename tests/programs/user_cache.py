"""Print, as JSON, the folder that platformdirs gives pytools: the very call it makes."""

import json

import platformdirs

if __name__ == "__main__":
    print(json.dumps({"path": platformdirs.user_cache_dir("pytools", "pytools")}))
