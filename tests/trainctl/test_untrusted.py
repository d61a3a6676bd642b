"""Commands that list others' jobs and runs read or leave out whatever AWS and the bucket hold
(``tests/fuzzing.py``)."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer

from contract.cluster_shape import ClusterShape
from contract.errors import InputError
from contract.job import JobSpec, JobStatus, Outcome
from contract.nodes import Range
from stacks.settings import load
from store.bucket import Stored
from tests.conftest import ROOT
from tests.fuzzing import fuzz_text, fuzz_values
from tests.trainctl.account import SHAPE
from trainctl import job_file, output, run_list
from trainctl.__main__ import app
from trainctl.aws.errors import UsageError
from trainctl.aws.jobs import JobExecution
from trainctl.aws.logs import LogLine
from trainctl.data_sets import StoredSet
from trainctl.job_log import Printer
from training.data.pictures.index import StoredFile

SPEC = JobSpec(run="r", command=("true",), nodes=Range(1, 1))
SHAPED = SHAPE | {"shared": {"deployment": "scratch", "capacity_gib": 1200, "mbps_per_tib": 200}}


def test_executions_that_were_started_by_hand() -> None:
    now = datetime.now(UTC)

    def described(**more: Any) -> Any:
        return cast("Any", {"name": "job", "startDate": now, "stopDate": now, **more})

    def shown(job: JobExecution) -> object:
        return job.run, job.status, job.reason, job.shell_code, job.is_over

    def by_input(text: str) -> object:
        return shown(JobExecution.from_execution(described(status="RUNNING", input=text)))

    def by_output(text: str) -> object:
        found = described(status="SUCCEEDED", input=SPEC.to_json(), output=text)
        return shown(JobExecution.from_execution(found))

    def by_cause(text: str) -> object:
        found = described(status="FAILED", input=SPEC.to_json(), error="x", cause=text)
        return shown(JobExecution.from_execution(found))

    fuzz_text(SPEC.to_json(), by_input)
    outcome = Outcome(status=JobStatus.FAILED, reason="x", exit_code=3, attempts=1)
    fuzz_text(outcome.to_json(), by_output)
    fuzz_text(outcome.to_json(), by_cause)


def test_what_a_deployment_says_of_itself() -> None:
    fuzz_text(
        json.dumps(SHAPED),
        ClusterShape.from_json,
        KeyError,
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
    )


def test_lists_of_data_sets() -> None:
    files = {"a.bin": StoredFile(size=3, sha256="0" * 64)}
    stored = StoredSet(name="set", files=files, uploaded="2026-01-31 12:00")
    fuzz_text(stored.to_json(), lambda text: StoredSet.from_json(text.encode()))


@dataclass
class OneFile:
    """A bucket with one object."""

    content: bytes = b""

    def read(self, _key: str) -> bytes:
        return self.content


def test_manifests_of_checkpoints() -> None:
    bucket = OneFile()
    stored = Stored(key="k", size=3, modified=datetime.now(UTC))

    def read(text: str) -> object:
        bucket.content = text.encode()
        parts = {"manifest.json": stored, "model.safetensors": stored}
        return run_list._is_complete(cast("Any", bucket), parts)

    manifest = {"files": {"model.safetensors": {"bytes": 3, "sha256": "0" * 64}}}
    fuzz_text(json.dumps(manifest), read)


def test_settings_of_a_deployment() -> None:
    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    # Of the command-line's own flags nothing is looked at.
    own = {name: value for name, value in context.items() if "/" not in name and ":" not in name}

    def read(values: object) -> object:
        return load(values if isinstance(values, dict) else own)

    fuzz_values(own | {"image_tag": "x"}, read, InputError)


def test_job_files(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    command: Any = typer.main.get_command(app)
    options = command.commands["plan"].params[1:]
    text = 'recipe = "ddp"\nnodes = "1:2"\nmax_hours = 1.5\n[env]\nA = "b"\n[settings]\nlr = 0.1\n'

    def read(content: str) -> object:
        file.write_text(content)
        return job_file.expanded(file, [], [], options)

    fuzz_text(text, read, UsageError)


# --- the terminal ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("\x1b]52;c;cm0=\x07", "^[]52;c;cm0=^G"),  # the clipboard
        ("\x1b]0;root\x1b\\", "^[]0;root^[\\"),  # the title
        ("\x1b[2J\x1b[31m", "^[[2J^[[31m"),  # clear, and colors alike
        ("\x9b2J\x7f\x00", "<U+009B>2J^?^@"),
        ("\u202egpj\u2066", "<U+202E>gpj<U+2066>"),  # read from the right
        ("10%\r20%", "10%\n20%"),
        ("a\tb\nü 漢", "a\tb\nü 漢"),
    ],
)
def test_control_characters_of_others_are_shown_and_not_sent(
    sent: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output.say(sent)
    output.print_text(sent)
    head: Any = SimpleNamespace(id="1", node="head")
    Printer().print([LogLine(task=head, at=0, text=sent, id="e")])
    output.print_table(("name",), ((sent,),))
    out, err = capsys.readouterr()
    plain = shown.expandtabs()
    assert err.expandtabs() == f"{plain}\n"
    assert out.expandtabs() == f"{plain}\n{plain}\nname\n{plain}\n"
