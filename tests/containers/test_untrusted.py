"""A node reads or refuses whatever code, orders and spot notices say (``tests/fuzzing.py``)."""

import io
import shutil
import stat
import zipfile
from pathlib import Path

from containers import spot
from containers.node import NodeConfig
from containers.program.code import unpack
from containers.ray_head import JobConfig
from contract import nodes
from contract.errors import InputError
from contract.job import JobSpec
from contract.nodes import Range
from tests.fuzzing import fuzz, fuzz_text, fuzz_values

VARIABLES = {
    "RAY_AUTH_TOKEN": "x" * 64,
    nodes.ENV_HEAD_ADDRESS: "10.0.0.1",
    nodes.ENV_NUM_CPUS: "4",
    nodes.ENV_NUM_GPUS: "1",
    nodes.ENV_HEAD_WAIT: "600",
    nodes.ENV_JOB: "job-1",
    nodes.ENV_DEADLINE: "1800000000",
    nodes.ENV_WORKER_TASK: "worker:1",
    nodes.ENV_WORKER_CPUS: "4",
    nodes.ENV_JOB_SPEC: JobSpec(run="r", command=("true",), nodes=Range(1, 1)).to_json(),
}


def archive() -> bytes:
    """As ``trainctl`` packs a folder: two files, one that runs, and a link."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as code:
        code.writestr("main.py", "print('hello')\n" * 20)
        run = zipfile.ZipInfo("bin/run.sh")
        run.external_attr = (stat.S_IFREG | 0o755) << 16
        code.writestr(run, "#!/bin/sh\n")
        link = zipfile.ZipInfo("link.py")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        code.writestr(link, "main.py")
    return content.getvalue()


def test_archives_with_the_code_of_a_job(tmp_path: Path) -> None:
    file, place = tmp_path / "code.zip", tmp_path / "below" / "code"

    def read(content: bytes) -> None:
        file.write_bytes(content)
        shutil.rmtree(place.parent, ignore_errors=True)
        place.mkdir(parents=True)
        unpack(file, place)

    try:
        fuzz(archive(), read, InputError)
    finally:
        assert {each.name for each in tmp_path.iterdir()} <= {"code.zip", "below"}
        assert {each.name for each in place.parent.iterdir()} <= {"code"}


def test_notices_of_spot_hosts() -> None:
    notice = '{"action": "terminate", "time": "2026-11-21T09:30:00Z"}'
    fuzz_text(notice, lambda text: spot.parse(text, now=0.0))


def test_environments() -> None:
    def of(values: object) -> dict[str, str]:
        given = values if isinstance(values, dict) else {}
        return {name: str(value) for name, value in given.items()}

    fuzz_values(
        VARIABLES, lambda given: NodeConfig.from_environment("worker", of(given)), InputError
    )
    fuzz_values(VARIABLES, lambda given: JobConfig.from_environment(of(given)), InputError)
