"""``python -m containers head|worker|job``: the entry point of both images."""

import sys

from containers.node import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
