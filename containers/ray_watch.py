"""Watch over a program that runs beside Ray: its driver on the head, actors and tasks on all nodes.

    python -m containers.ray_watch HEAD NODE

This samples the program's processes on a worker node, and looks at them when the head asks. Ray's
own key-value store carries that: a task or an actor of ours would need a place in Ray, and a node
with one never counts as idle.
"""

import contextlib
import functools
import importlib
import os
import pickle
import re
import sys
import time
from typing import Any, Final

from containers.demand import ANSWER_S, read
from containers.host import machine
from containers.program.start import shell
from containers.program.start.code import WATCHED
from containers.program.watch import signs as watch
from containers.ray_head import JobConfig, RayHead
from contract.nodes import ENV_WATCH, GCS_PORT

#: All nodes have looked after so many seconds, as a rule.
_LOOK_S: Final = 30.0
#: A process of Ray that waits uses this share of a processor; measured: 0.7 % of a slow one.
_IDLE: Final = 0.01
#: Lines of Ray's own, such as those about resources that it lacks, which it repeats; in color.
_OF_RAY: Final = re.compile(r"[^(]{,9}\((autoscaler|raylet|gcs_server|TrainController)\b")


@functools.cache
def client_of(address: str) -> Any:
    """Client of Ray's head, whose address has a port."""
    os.environ["RAY_AUTH_MODE"] = "token"
    return importlib.import_module("ray._raylet").GcsClient(address)  # takes a second


def _put(client: Any, key: str, value: object) -> None:
    client.internal_kv_put(key.encode(), pickle.dumps(value), True, timeout=ANSWER_S)


def _get(client: Any, prefix: str) -> dict[bytes, Any]:
    """Values whose keys begin so. Who can write there can run code in Ray."""
    keys = client.internal_kv_keys(prefix.encode(), timeout=ANSWER_S)
    return {
        key: pickle.loads(value)
        for key, value in client.internal_kv_multi_get(keys, timeout=ANSWER_S).items()
    }


def report(client: Any, node: str, **others: int) -> None:
    """Sample this node; look at the program's processes if the head has asked for it.

    Args:
        node: its address.
        others: signs of life that are known already.
    """
    pids = machine.marked(ENV_WATCH, str(WATCHED))
    for asked in _get(client, "train look").values():
        if not _get(client, answer := f"{asked} {node}"):
            _put(client, answer, watch.look(pids, WATCHED, node=node, is_last=asked[1]))
    others["is_served"] = watch.is_served(pids) or shell.is_open()
    found = watch.signs(pids, WATCHED, idle=_IDLE * len(pids), **others)
    _put(client, f"train signs {node}", found)


class RayWatch:
    """Watches a program beside Ray, on the head: what it asks Ray for, and if it hangs."""

    def __init__(self, config: JobConfig, ray: RayHead, now: float) -> None:
        """``now``: the program's start, by the monotonic clock."""
        self._spec, self._ray = config.spec, ray
        self._life, self._lines = watch.Watch(self._spec.hang_s), watch.NewLines()
        self._life.begin(now, spins=config.worker_gpus > 0)
        # Ray is not imported while the program starts.
        self._waits_since, self._next = now, now + watch.EVERY_S
        self._asked: tuple[float, bool] | None = None  # when, and if the program ends then

    def hear(self, line: str) -> None:
        """The next line of the driver, which prints those of all nodes."""
        if not _OF_RAY.match(line):
            self._lines.hear(line)

    def check(self, now: float, written_ns: int) -> str:
        """Description of a program that hangs; empty while it does not. Call this all the time.

        Args:
            written_ns: as in ``Signs``.
        """
        if now < self._next:
            return ""
        self._next = now + watch.EVERY_S
        ray, lines = self._ray, self._lines
        client = client_of(f"{ray.address}:{GCS_PORT}")
        ray.demand.take(read(client), now=now)
        report(client, ray.address, printed=lines.num, lines=lines.num_new, written_ns=written_ns)

        # While hosts may still come, nothing is heard, and so nothing ends.
        there, nodes = len(ray.demand.idle_s), self._spec.nodes
        if not (there < nodes.low or (ray.demand.waits and there < nodes.high)):
            self._waits_since = now
        elif now - self._waits_since < self._spec.capacity_wait_s:
            return ""

        self._life.hear(now, _get(client, "train signs"))
        if self._asked is None:
            verdict = self._life.verdict(has_ended=False)
            if verdict is not watch.Verdict.ALIVE:
                self._asked = now, verdict is watch.Verdict.HUNG
                _put(client, "train look", self._asked)
        elif now - self._asked[0] >= _LOOK_S:
            looks = _get(client, f"{self._asked} ").values()
            found = [each for of_node in looks for each in of_node]
            is_last, self._asked = self._asked[1], None
            for each in found:
                print(each.seen.details, flush=True)
            text = watch.silence(self._life, found)
            if is_last:
                return text
            machine.say(f"warning: {text}; the stacks of all processes are in the log")
        return ""


def main(head: str, node: str) -> None:
    """Report every few seconds, as long as Ray runs on this node."""
    while True:
        with contextlib.suppress(Exception):  # Ray is busy
            report(client_of(head), node)
        time.sleep(watch.EVERY_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
