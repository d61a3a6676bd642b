"""Time until a program has its packages: on a host that has them already, and on a new one.

    python -m benchmarks.packages [--packages 20] [--megabytes 5] [--json]

Wheels of that many packages are made here and installed from a folder, so that the time is pip's
and the disk's. From a package index the first installation takes longer, the second does not.
"""

import argparse
import os
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from benchmarks.output import report, say
from containers.program import requirements
from containers.program.cache import Cache
from contract.requirements import REQUIREMENTS_TXT


def make_wheel(folder: Path, name: str, *, num_bytes: int) -> None:
    """A package of random bytes, which cannot be compressed, and a hundred modules."""
    about = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    about_wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/data.bin", os.urandom(num_bytes))
        for number in range(100):
            wheel.writestr(f"{name}/part{number}.py", f"NUMBER = {number}\n" * 20)
        wheel.writestr(f"{about}/METADATA", metadata)
        wheel.writestr(f"{about}/WHEEL", about_wheel)
        wheel.writestr(f"{about}/RECORD", "")


def seconds_to_install(code: Path, cache: Path) -> float:
    began = time.perf_counter()
    found = requirements.install(code, Cache(cache))
    assert found is not None
    found.lease.close()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packages", description=__doc__)
    parser.add_argument("--packages", type=int, default=20, help="default: 20")
    parser.add_argument("--megabytes", type=int, default=5, help="of each (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="packages-") as name:
        folder = Path(name)
        code, wheels = folder / "code", folder / "wheels"
        code.mkdir()
        wheels.mkdir()
        names = [f"package{number}" for number in range(options.packages)]
        for each in names:
            make_wheel(wheels, each, num_bytes=options.megabytes * 10**6)
        listed = [f"--no-index --find-links {wheels}", *names]
        (code / REQUIREMENTS_TXT).write_text("\n".join(listed) + "\n")
        say(f"installing {len(names)} packages of {options.megabytes} MB")
        first = seconds_to_install(code, folder / "cache")
        say("once more, as the host's next job does")
        second = seconds_to_install(code, folder / "cache")
    result = {
        "benchmark": "packages",
        "ratio": first / second,
        "packages": options.packages,
        "megabytes": options.packages * options.megabytes,
        "seconds_of_first_job": first,
        "seconds_of_second_job": second,
    }
    report(result, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
