"""``python -m rehearsal start``: a local AWS in the foreground, until Ctrl-C.
``python -m rehearsal all``: the whole system in containers, up, run and down.
``python -m rehearsal images``: only the images, for later.
``python -m rehearsal canary``: the first deployment in a real account.
``python -m rehearsal replay FILE``: where its answers differ from the model of AWS.
"""

import argparse
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from contract import faults
from rehearsal import canary, cycle, rehearse, replay
from rehearsal.local_aws import is_healthy, local_aws


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rehearsal",
        description="An AWS on this machine, to rehearse a deployment on. It needs no account and "
        "costs nothing; `make venv-aws` installs it.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    start = commands.add_parser(
        "start",
        help="run it in the foreground, until Ctrl-C",
        description="Run a local AWS in the foreground, and print the variables that send the AWS "
        "CLI, the CDK and boto3 there. Ctrl-C ends it, and everything deployed to it is gone.",
    )
    start.add_argument("--port", type=int, default=4566, help="0 takes a free one [%(default)s]")
    start.add_argument("--host", default="127.0.0.1", help="address to listen on [%(default)s]")
    commands.add_parser(
        "all",
        help="the whole system: deploy, train, destroy (needs a Docker Engine)",
        description="Build the images, deploy the stacks to a local AWS, run the tutorials' jobs "
        "in containers, and remove everything. Downloads FashionMNIST (31 MB) once. Seconds go to "
        "stdout as JSON. After Ctrl-C nothing of it is left; the images stay for the next time.",
    )
    commands.add_parser(
        "images",
        help="build the images that the others run (needs a Docker Engine)",
        description="Build the images of head and worker, and start nothing. What runs containers "
        "afterwards finds them in the engine. Their names go to stdout as JSON.",
    )
    flight = commands.add_parser(
        "canary",
        help="the account in use: deploy preset cpu, run three jobs, remove all (at most $3)",
    )
    flight.add_argument("--yes", action="store_true", help="do not ask")
    flight.add_argument("--gpu", action="store_true", help="one g5.xlarge instead (at most $5)")
    played = commands.add_parser(
        "replay", help="differences of a canary's file from the model of the local AWS"
    )
    played.add_argument("file", type=Path, metavar="FILE", help=".canary/answers.jsonl")
    return parser


def start(host: str, port: int) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="local-aws-") as folder,
        local_aws(Path(folder), host=host, port=port) as aws,
    ):
        variables = aws.environment().items()
        lines = [f"export {name}={shlex.quote(value)}" for name, value in variables]
        print("\n".join(lines), flush=True)
        print(
            f"The local AWS answers at {aws.endpoint}. Paste these lines into another terminal; "
            f"Ctrl-C here ends it.\nLog: {aws.log}",
            file=sys.stderr,
        )
        while is_healthy(aws.endpoint):
            time.sleep(2)
        print(
            f"error: it ended; the end of its log:\n{aws.log.read_text()[-2000:]}", file=sys.stderr
        )
        return 1


@faults.command()
def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    # `kill` ends it like Ctrl-C, so that its folder is removed too; and Ctrl-C does where a shell
    # has started this in the background, with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        if arguments.command == "all":
            print(json.dumps(rehearse.rehearse(), indent=1))
            return 0
        if arguments.command == "images":
            print(json.dumps(cycle.build_images(), indent=1))
            return 0
        if arguments.command == "canary":
            canary.Canary(has_gpu=arguments.gpu).run(is_sure=arguments.yes)
            return 0
        if arguments.command == "replay":
            found = replay.replay(arguments.file)
            print("\n".join(found) or "no difference")
            return int(bool(found))
        return start(arguments.host, arguments.port)
    except KeyboardInterrupt:
        if arguments.command != "start":
            raise
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
