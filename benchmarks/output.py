"""Command line and output that all benchmarks share."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from training.system.machine import environment


def command_line(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has.

    Args:
        name: of the benchmark's module.
        doc: its description.
    """
    found = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc)
    found.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return found


def report(result: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a benchmark's figures with the machine and the versions they were measured on.

    Args:
        result: Figures by name; ``ratio`` is the headline, larger is better.
        as_json: One JSON object on stdout instead of lines for people.
    """
    assert "ratio" in result
    machine = environment()
    machine.pop("command")
    whole = {**result, "environment": machine}
    if as_json:
        print(json.dumps(whole, indent=1))
        return
    _print(whole, indent="")


def say(text: str) -> None:
    """Show progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def _print(values: Mapping[str, Any], *, indent: str) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            print(f"{indent}{name}:")
            _print(value, indent=indent + "  ")
        elif isinstance(value, float):
            print(f"{indent}{name}: {value:.4g}")
        else:
            print(f"{indent}{name}: {value}")
