"""Write requirements.lock: the exact version of everything that the requirement files bring along.

``make lock`` runs this with the Python of a throw-away environment, so that nothing installed can
influence the answer; pip resolves, nothing is installed. Run it on the oldest Python the project
supports: what it admits, the newer ones admit too.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = ("containers/requirements.txt", "requirements.txt", "requirements-dev.txt")
LOCK = Path("requirements.lock")
# A torch with CUDA pins these itself, exactly, and a torch without CUDA has no use for them.
OF_TORCH_ALONE = re.compile(r"(nvidia|cuda)[-_]|triton$")

HEADER = """\
# Written by `make lock`; do not edit. Every package that the requirement files bring along, for
# Linux and macOS and Python 3.11 to 3.13. A list of constraints, it installs nothing on its own:
#
#   pip install -c requirements.lock -r containers/requirements.txt
#
# No hashes, no local versions and no CUDA packages: the same torch comes in several builds, by the
# index it is taken from, each with its own hash. A build for CUDA pins its CUDA packages itself.
"""


def canonical(name: str) -> str:
    """The one spelling that packages are compared by."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    """Canonical name -> version of every ``name==version`` line of a requirement file."""
    found = re.findall(r"(?m)^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;#]+)", path.read_text())
    return {canonical(name): version for name, version in found}


def resolve(constraints: dict[str, str]) -> dict[str, str]:
    """Name -> version of all that pip would install, local version labels removed."""
    with tempfile.TemporaryDirectory() as folder:
        report, wanted = Path(folder, "report.json"), Path(folder, "constraints.txt")
        wanted.write_text("".join(f"{name}=={v}\n" for name, v in constraints.items()))
        command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report), "-c", str(wanted)]
        for source in SOURCES:
            command += ["-r", source]
        if subprocess.run(command).returncode:
            sys.exit("error: these pins do not fit together; `make lock UPGRADE=1` keeps fewer")
        chosen = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    return {
        package["name"]: package["version"].partition("+")[0]
        for package in chosen
        if not OF_TORCH_ALONE.match(canonical(package["name"]))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write requirements.lock.")
    parser.add_argument(
        "--upgrade", action="store_true", help="newest version of all that no file pins itself"
    )
    upgrade = parser.parse_args().upgrade

    asked = {name: version for source in SOURCES for name, version in pins(Path(source)).items()}
    before = pins(LOCK) if LOCK.exists() else {}
    kept = {} if upgrade else {n: v for n, v in before.items() if n not in asked}
    chosen = resolve(kept)

    lines = [f"{name}=={version}" for name, version in chosen.items()]
    LOCK.write_text(HEADER + "\n".join(sorted(lines, key=canonical)) + "\n")
    after = pins(LOCK)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            print(f"{name}: {before.get(name, 'new')} -> {after.get(name, 'gone')}")
    print(f"{LOCK}: {len(after)} packages")


if __name__ == "__main__":
    main()
