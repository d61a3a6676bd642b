"""AWS's answers during a canary, without anything that belongs to the account.

``ALLOWED`` lists the fields that may be written; nothing else is. Names, ARNs and ids become
numbers, and so does every word of a reason that is not in ``WORDS``. One line of JSON for each
change of a thing.
"""

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

Row = dict[str, Any]

#: Kind of a thing -> its id.
IDS: Final = {
    "task": "taskArn",
    "host": "containerInstanceArn",
    "machine": "InstanceId",
    "execution": "executionArn",
    "event": "EventId",
}
#: Path of a field -> pattern of what is written of it; "": a number or a time.
STATE: Final = "[A-Z]+(_[A-Z]+)*"
ALLOWED: Final[Mapping[str, str]] = {
    "containerInstanceArn": "",
    "ec2InstanceId": "",
    "lastStatus": STATE,
    "desiredStatus": STATE,
    "status": STATE,
    "State.Name": "[a-z-]+",
    "ResourceStatus": STATE,
    "ResourceType": "AWS(::[A-Za-z0-9]+){2}",
    "stopCode": ".*",
    "stoppedReason": ".*",
    "containers.0.reason": ".*",
    "StateReason.Message": ".*",
    "ResourceStatusReason": ".*",
    "containers.0.exitCode": "",
    "agentConnected": "",
    "createdAt": "",
    "startedAt": "",
    "stoppedAt": "",
    "registeredAt": "",
    "LaunchTime": "",
    "startDate": "",
    "stopDate": "",
}
_WORDS: Final = """
    a access accessdeniedexception account agent allocated already an and api are asg at attempt
    auth auto be because been begin being by cache cannot cannotcreatecontainererror
    cannotinspectcontainererror cannotpullcontainererror cannotstartcontainererror capacity
    cause check checks client client.instanceinitiatedshutdown client.internalerror
    client.userinitiatedshutdown closed cluster code config configuration connect connection
    container containers could create created credentials currently daemon deadline delete
    deleted denied dependencies dependency dependencyviolation deployment disconnected disk
    docker dockertimeouterror does driver due ec2 ecr ecs empty eni error essential
    essentialcontainerexited exceeded execution exist exit exited fail failed failure fetch for
    found from gpu group has have health healthy host http image in initialization initiated
    inspect inspecting instance insufficient insufficientinstancecapacity interface internal
    interrupted invalid io is it killed launch launching layer left limit log logs manager
    manifest memory network never no not object of on or out outofmemoryerror pending permission
    placement processing provider provisioning pull quota reached ref refused register
    registration registry request requested resolve resource resourceinitializationerror
    resources retried retrieval retry role root running scale scaling secret secrets
    server.internalerror server.spotinstancetermination service serviceschedulerinitiated
    shutdown shutting-down space spot spotinterruption start started starting state status stop
    stopped stopping stream subnet successful sufficient task taskfailedtostart tasks terminated
    terminating termination terminationnotice that the this throttled time timed timeout to
    token too transition unable unavailable under unexpected unhealthy unit until usage use used
    user userinitiated vcpu vcpulimitexceeded volume waiting was we were while with you your
    zone
"""
#: Words of AWS's states and reasons.
WORDS: Final = frozenset(_WORDS.split())


class Answers:
    """Writes rows to a file; continues one that is there."""

    def __init__(self, file: Path, *, began: float) -> None:
        self._file, self._began = file, began
        self._numbers: dict[str, int] = {}
        self._first = 1 + max((row["id"] for row in read(file)), default=0)
        self._last: dict[int, Row] = {}

    def take(self, kind: str, record: Mapping[str, Any], *, at: float) -> None:
        """Write a record's allowed fields if one of them has changed."""
        row: Row = {"kind": kind, "id": self._number(record.get(IDS[kind]))}
        for path, pattern in ALLOWED.items():
            value: Any = record
            for part in path.split("."):
                value = (value or [None])[0] if part == "0" else (value or {}).get(part)
            if value is not None:
                row[path] = self._written(value, pattern)
        if self._last.get(row["id"]) != row:
            self._last[row["id"]] = row
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, "at": round(at - self._began, 1)}) + "\n")

    def _number(self, value: object) -> int:
        return self._numbers.setdefault(str(value), self._first + len(self._numbers))

    def _written(self, value: object, pattern: str) -> object:
        if isinstance(value, datetime):
            return round(value.timestamp() - self._began, 1)
        if isinstance(value, int):
            return value
        if pattern == ".*":
            return words(str(value), self._number)
        return value if re.fullmatch(pattern, str(value)) else self._number(value)


def words(text: str, number: Callable[[str], object]) -> str:
    """A reason, with ``#`` and a number for each word that is not in ``WORDS``."""
    kept = (
        word if word.strip("().,:;").lower() in WORDS else f"#{number(word)}"
        for word in text.split()
    )
    return " ".join(kept)


def read(file: Path) -> list[Row]:
    """Rows of a file; none where it is missing. Raises ValueError: it is no such file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]
