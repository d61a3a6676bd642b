"""What a job's head tells ``containers.program.nodes``; without Ray, which that one imports."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Self

from containers.program.launch import Order
from contract.nodes import RENDEZVOUS_PORT, Range

ENV_PROGRAM: Final = "TRAIN_PROGRAM"


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What the head of a job tells this program."""

    run: str
    words: tuple[str, ...]
    workers: Range
    """Worker nodes."""
    variables: Mapping[str, str]
    capacity_wait_s: float
    """How long lost nodes are waited for."""
    address: str
    """Of the head."""
    rendezvous_port: int = RENDEZVOUS_PORT
    archive: str = ""
    """As in ``containers.program.launch.Order``."""
    storage: str = ""
    """The same."""
    deadline: float = math.inf
    """Unix time at which the job is told to end."""

    def order(self, *, nodes: Range, port: int) -> Order:
        """What its launcher is told on each node; ``port`` is that of the rendezvous store."""
        return Order(
            run=self.run,
            words=self.words,
            variables=self.variables,
            nodes=nodes,
            rendezvous=self.address,
            rendezvous_port=port,
            archive=self.archive,
            storage=self.storage,
        )

    def to_json(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps(
            values | {"workers": str(self.workers), "variables": dict(self.variables)}
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises KeyError, TypeError or ValueError where it is not what ``to_json`` writes."""
        values = json.loads(text)
        values["words"] = tuple(values["words"])
        values["workers"] = Range.parse(str(values["workers"]), option="workers")
        return cls(**values)
