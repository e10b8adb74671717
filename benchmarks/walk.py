"""``python walk.py FOLDER``: count the files and blocks below a folder, with nothing but ``os.scandir``."""

import os
import sys


def main() -> None:
    """Walk and print both sums."""
    files = blocks = 0
    ahead = [sys.argv[1]]
    while ahead:
        with os.scandir(ahead.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    ahead.append(entry.path)
                else:
                    files += 1
                    blocks += entry.stat(follow_symlinks=False).st_blocks
    sys.stdout.write(f"{files} files, {blocks * 512} bytes\n")


if __name__ == "__main__":
    main()
