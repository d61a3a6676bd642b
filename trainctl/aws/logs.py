"""What nodes write: their log streams in CloudWatch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from contract import nodes
from contract.nodes import ClusterSize
from trainctl.aws.clients import Clients, code_of
from trainctl.aws.tasks import Task

if TYPE_CHECKING:
    from mypy_boto3_logs.type_defs import GetLogEventsRequestTypeDef

#: Lines of the head's newest log that may stand between two of the cluster's sizes.
_SIZE_WITHIN_LINES: Final = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPage:
    """A part of a node's log."""

    lines: tuple[str, ...]
    times: tuple[int, ...]
    """When each of them was written: Unix time in milliseconds."""
    token: str | None
    """Where the next part begins; the same as before at the end of what there is."""


class NodeLogs:
    """The logs of all nodes, in one log group."""

    def __init__(self, clients: Clients, *, group: str) -> None:
        self._clients, self.group = clients, group

    def page(self, task: Task, token: str | None) -> LogPage:
        """A node's log from its beginning, or from where ``token`` of the last page left off."""
        request = self._request(task)
        request["startFromHead"] = True
        if token:
            request["nextToken"] = token
        return self._read(request, token)

    def last_lines(self, task: Task, number: int = 5) -> list[str]:
        """The end of a node's log; empty when it has none."""
        request = self._request(task)
        request |= {"startFromHead": False, "limit": number}
        return [*self._read(request, None).lines]

    def ray_size(self, head: Task) -> ClusterSize | None:
        """What the head's log reports that Ray has; None while it has reported nothing."""
        lines = self.last_lines(head, _SIZE_WITHIN_LINES)
        sizes = (ClusterSize.from_line(line) for line in reversed(lines))
        return next((size for size in sizes if size), None)

    def _request(self, task: Task) -> "GetLogEventsRequestTypeDef":
        return {
            "logGroupName": self.group,
            "logStreamName": f"{task.node}/{nodes.CONTAINER}/{task.id}",
        }

    def _read(self, request: "GetLogEventsRequestTypeDef", token: str | None) -> LogPage:
        from botocore.exceptions import ClientError

        try:
            found = self._clients.logs.get_log_events(**request)
        except ClientError as error:
            if code_of(error) == "ResourceNotFoundException":
                return LogPage(
                    lines=(), times=(), token=token
                )  # the container has not written a line yet
            raise
        return LogPage(
            lines=tuple(each["message"].rstrip() for each in found["events"]),
            times=tuple(each["timestamp"] for each in found["events"]),
            token=found.get("nextForwardToken", token),
        )
