"""``trainctl``: the name is taken, the commands are to come.

Cluster commands arrive with the CDK app. Until then training is local, through
``python -m training.launch``, and this command says so instead of not existing. Standard library
only, so that it answers on a laptop without torch and Ray.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata

from training.contract import EXIT_OK

_NOTICE = """\
There are no cluster commands in this version yet: it trains on one machine.

  python -m training.launch ddp --local --workers 2     train here, with two processes
  python -m training.launch --help                      recipes, presets and options
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainctl",
        description="Distributed training on Amazon ECS, from the command line.",
        epilog=_NOTICE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"trainctl {metadata.version('ecs-train')}"
    )
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="none in this version")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the help; any command is refused with exit code 2, as argparse does."""
    commands = parser()
    arguments, unknown = commands.parse_known_args(argv)
    if arguments.command is not None:
        # Checked before the options: those after an unknown command are not what is wrong.
        commands.error(f"unknown command {arguments.command!r}: {_NOTICE.splitlines()[0]}")
    if unknown:
        commands.error(f"unknown option {unknown[0]!r}")
    commands.print_help()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
