"""Orders, records and names from others are read or refused, whatever they say
(``tests/fuzzing.py``)."""

from contract.errors import InputError
from contract.files import Claim, FileList, SavedFile, base_from_json, base_to_json
from contract.instance_types import HostPrice, Prices
from contract.job import JobSpec, JobStatus, Outcome, record_json
from contract.nodes import ClusterSize, Range
from contract.runs import check_relative, check_run_name, checkpoint_key
from tests.fuzzing import fuzz, fuzz_text

HOST = HostPrice(type="g5.xlarge", disk_gib=200, usd_per_hour=1.0)
SPEC = JobSpec(
    run="r1",
    command=("python", "-m", "x"),
    nodes=Range(1, 4),
    code="s3://bucket/code.zip",
    code_sha256="0" * 64,
    variables={"A": "one"},
    secrets={"KEY": "training/key"},
    prices=Prices(region="us-east-1", spot=False, nat_usd_per_hour=0.045, head=HOST, worker=HOST),
)
OBJECT = "objects/000001-0/1/" + "0" * 64
OUTCOME = Outcome(
    status=JobStatus.FAILED, reason="x", exit_code=1, attempts=2, began=1.0, ended=2.0, deadline=3.0
)


def test_names() -> None:
    fuzz_text("my-run.1", check_run_name, InputError)
    fuzz_text("step-00000010", checkpoint_key)
    fuzz_text("a/b/c.txt", check_relative, InputError)


def test_ranges() -> None:
    fuzz_text("1:4", lambda text: Range.parse(text, option="nodes"), InputError)


def test_orders_of_jobs() -> None:
    fuzz_text(SPEC.to_json(), JobSpec.from_json, InputError)


def test_outcomes_of_jobs() -> None:
    fuzz_text(OUTCOME.to_json(), Outcome.from_json, InputError)
    fuzz_text(record_json("job", SPEC, OUTCOME), Outcome.from_json, InputError)


def test_lists_of_what_a_program_has_written() -> None:
    files = (
        SavedFile(name="work/a", size=3, pieces=(OBJECT,)),
        SavedFile(name="work/b", link="a"),
    )
    fuzz(FileList(files=files).to_json(), FileList.from_json, InputError)
    fuzz(Claim(writer="w", nodes=(0, 1)).to_json(), Claim.from_json, InputError)
    fuzz(base_to_json({0: OBJECT}), base_from_json, InputError)


def test_lines_of_a_head() -> None:
    line = ClusterSize(num_nodes=3, num_cpus=8, num_gpus=2).line()
    fuzz_text(line, ClusterSize.from_line)
