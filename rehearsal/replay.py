"""``python -m rehearsal replay FILE``: where a canary's answers differ from the model.

A state that the model does not have, one that comes after a later one, a reason that it does not
give, and a duration outside ``Times`` are differences.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from contract.errors import InputError
from rehearsal.answers import Row, read, words
from rehearsal.model import EXITED, LOST, NO_HOST, SHUT_DOWN, STATES, Times

#: Fields of a reason. Of one that the caller gave, only the code is AWS's.
REASON: Final = ("stopCode", "stoppedReason", "containers.0.reason", "StateReason.Message")
OWN: Final = "UserInitiated"
KNOWN: Final = {
    words(" ".join(reason), lambda _: "") for reason in (EXITED, NO_HOST, LOST, SHUT_DOWN)
}


def differences(rows: Sequence[Row], *, times: Times | None = None) -> list[str]:
    """Each difference once, with the number of times that it was seen."""
    found: Counter[str] = Counter()
    every = rows[0]["every"]
    things = defaultdict[int, list[Row]](list)
    for row in rows:
        if row["kind"] in STATES:
            things[row["id"]].append(row)
    launched = {row["id"]: row["LaunchTime"] for row in rows if "LaunchTime" in row}
    for history in things.values():
        kind = history[0]["kind"]
        field, states = STATES[kind]
        last = ""
        for row in history:
            state, reason = row[field], _reason(row)
            if state not in states:
                found[f"{kind}: no state {state} {row.get('ResourceStatusReason', '')}"] += 1
            elif last and states.index(state) < states.index(last):
                found[f"{kind}: {state} after {last}"] += 1
            else:
                last = state
            if reason not in KNOWN | {"", OWN}:
                found[f"{kind}: no reason {reason}"] += 1
        for name, seconds, (least, most) in _durations(history, launched, times or Times()):
            # A state counts from the look that saw it first.
            if seconds < least - every or seconds > most + every:
                limits = f"{least:.0f} to {most:.0f} s in the model"
                found[f"{name}: {seconds:.0f} s, {limits}"] += 1
    return [f"{what} ({num} times)" if num > 1 else what for what, num in found.items()]


def _reason(row: Row) -> str:
    fields = (each for each in REASON if row.get("stopCode") != OWN or each != "stoppedReason")
    text = " ".join(row[each] for each in fields if row.get(each))
    return re.sub(r"#\d+", "#", text)


def _durations(
    history: Sequence[Row], launched: Mapping[int, float], times: Times
) -> Iterator[tuple[str, float, tuple[float, float]]]:
    """Name of a field of ``Times``, the seconds in the file (NaN: not there), and its limits."""
    # Of states when they were seen first, of fields their value.
    at = defaultdict[str, Any](lambda: math.nan)
    for row in reversed(history):
        at |= {value: row["at"] for value in row.values() if isinstance(value, str)}
    at |= history[-1]
    yield "shows", history[0]["at"] - at["createdAt"], (0, times.shows)
    yield "starts", at["startedAt"] - at["PENDING"], times.starts
    yield "stops", at["stoppedAt"] - at["STOPPED"], (-times.stops, times.stops)
    yield "boots", at["registeredAt"] - launched.get(at["ec2InstanceId"], math.nan), times.boots
    yield "terminates", at["terminated"] - at["shutting-down"], times.terminates
    if at["stopCode"] == NO_HOST[0]:
        yield "gives_up", at["stoppedAt"] - at["createdAt"], times.gives_up


def replay(file: Path) -> list[str]:
    """Differences of a file. Raises InputError: it is no file of a canary."""
    try:
        return differences(read(file))
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is no file of a canary: {error!r}") from None
