"""Run four copies of a program at once, as the arguments say, and end with the worst of their statuses."""

import subprocess
import sys

if __name__ == "__main__":
    running = [subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.DEVNULL) for _ in range(4)]
    sys.exit(max(program.wait() for program in running))
