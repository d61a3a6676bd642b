"""Message about a job's end to whom its order names: a mail of SNS, or a call of a webhook.

Packed beside ``index.py``, under this name; not for other parts of the project.
"""

import json
import os
from urllib.request import Request, urlopen

import boto3

from contract import runs, times
from contract.job import JobSpec, Outcome
from contract.outputs import TRAINING_STACK
from contract.text import dollars, duration

BUCKET = os.environ.get("BUCKET", "")
#: Topic of SNS. Each of its subscriptions lets the messages for one address pass.
TOPIC = os.environ.get("TOPIC", "")
STATE_MACHINE = os.environ.get("STATE_MACHINE", "")


def send(job: str, spec: JobSpec, outcome: Outcome) -> None:
    """Report the end of a job. Raises nothing: no message is worth a host that is not released."""
    if not spec.notify:
        return
    try:
        _send(job, spec, outcome)
    except Exception as error:  # its text may have the webhook's address, which is a secret
        print(f"{job}: no message to {spec.notify}: {type(error).__name__}")


def _send(job: str, spec: JobSpec, outcome: Outcome) -> None:
    from botocore.config import Config

    # What waits for hosts and money comes next.
    quick = Config(connect_timeout=3, read_timeout=5, retries={"total_max_attempts": 2})
    said = words(job, spec, outcome)
    if not spec.webhook:
        boto3.client("sns", config=quick).publish(
            TopicArn=TOPIC,
            Subject=f"{outcome.status}: {job}".encode("ascii", "replace").decode()[:100],
            Message=said,
            MessageAttributes={"to": {"DataType": "String", "StringValue": spec.notify}},
        )
        return
    secrets = boto3.client("secretsmanager", config=quick)
    address = secrets.get_secret_value(SecretId=spec.webhook)["SecretString"].strip()
    if address.startswith("{"):  # a key and its value, as AWS's console stores it
        (address,) = json.loads(address).values()
    body, kind = json.dumps({"text": said}).encode(), {"Content-Type": "application/json"}
    if not address.startswith("https://"):
        raise ValueError
    urlopen(Request(address, body, kind), timeout=5).close()


def words(job: str, spec: JobSpec, outcome: Outcome) -> str:
    """The message: why the job has ended, its cost, its result, and the command to look."""
    lasted = (outcome.ended or 0) - (outcome.began or 0)
    name = STATE_MACHINE.rpartition(":")[2].removesuffix(f"{TRAINING_STACK}-jobs")
    where = f" --deployment {name.removesuffix('-')}" if name else ""
    usd = usd_at_most(spec, outcome)
    cost = "unknown" if usd is None else f"at most {dollars(usd)} at list prices"
    return (
        f"Job {job} has ended: {outcome.reason}, {duration(round(lasted))} after its submission.\n"
        f"cost    {cost}; trainctl cost {job}{where}\n"
        f"result  s3://{BUCKET}/{runs.RUNS_PREFIX}/{spec.run}/\n"
        f"look    trainctl show {job}{where}\n"
    )


def usd_at_most(spec: JobSpec, outcome: Outcome) -> float | None:
    """US dollars, as if all its nodes had run from its admission on; None: not known."""
    if outcome.attempts == 0:
        return 0
    hourly = spec.prices.dearest.usd_per_hour(spec.nodes.high) if spec.prices else None
    if hourly is None or outcome.deadline is None or outcome.ended is None:
        return None
    admitted = outcome.deadline - spec.max_seconds
    return hourly * (outcome.ended - admitted + times.JOB_TAIL_S) / 3600
