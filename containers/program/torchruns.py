"""torchrun in a job: more than one of them, and the order in which it numbers the nodes.

A torchrun closes its rendezvous when it ends. The store at which those of all nodes meet outlives
it, so that in ``sh -c "torchrun first.py && torchrun second.py"`` the second one, which has the
same id in its environment, would find it closed and fail. This counts the torchruns of a node, and
gives the second and later ones an id of their own. A node that comes when the others have ended
theirs ends its own as they did.

Where nodes meet at a store, torchrun numbers them by the text of their addresses. This numbers them
as the job does, so that after a restart a node that replaces another one has its rank, beside its
files. One that joins while the others train is unknown to them, and comes last.

``startup/sitecustomize.py`` loads this file in each Python of a user's job; it imports nothing of
this project, which the user's code may hide, and nothing of torch until the program does.
"""

import functools
import os
import pickle
import sys
from types import ModuleType
from typing import Any, Final

# As torchrun names them; ``containers.program.launch`` sets them.
ENDPOINT: Final = "PET_RDZV_ENDPOINT"
ID: Final = "PET_RDZV_ID"
# As in containers.program.process: another one at each start of the program, on each node.
START: Final = "TRAIN_PROGRAM_START"


NODES: Final = "TRAIN_NODES"

#: Id of a rendezvous of this process -> its store.
_stores: dict[str, Any] = {}


def is_needed() -> bool:
    """Whether this is a program on the nodes of a job."""
    return all(os.environ.get(name) for name in (ENDPOINT, ID, START))


def _change_backend(module: ModuleType) -> None:
    create, backend_of = module.create_backend, module.C10dRendezvousBackend

    @functools.wraps(create)
    def new(params: Any) -> Any:
        backend, store = create(params)
        if (params.endpoint, params.run_id) != (os.environ[ENDPOINT], os.environ[ID]):
            return backend, store  # a rendezvous of the program's own
        before = store.add(f"torchruns/{params.run_id}/{os.environ[START]}", 1) - 1
        if before:
            # The handler, which is made next, takes the id from here.
            params.run_id = f"{params.run_id}.{before}"
            backend = backend_of(store, params.run_id)
        if _is_closed(backend):
            # A node that came while the others were at their end; its next torchrun is in time.
            is_well = store.check([_ended_well(params.run_id)])
            how = "already" if is_well else "with a failure"
            print(f"The other nodes have ended this torchrun {how}", file=sys.stderr, flush=True)
            raise SystemExit(0 if is_well else 1)
        _stores[params.run_id] = store
        return backend, store

    module.create_backend = new  # type: ignore[attr-defined]


def _ended_well(run_id: str) -> str:
    """Key that a store has where the processes of a rendezvous have ended with exit code 0."""
    return f"torchruns/{run_id}/ended-well"


def _is_closed(backend: Any) -> bool:
    found = backend.get_state()
    return bool(found and pickle.loads(found[0]).closed)  # as torchrun reads it


def _change_order(module: ModuleType) -> None:
    executor = module._DistributedRendezvousOpExecutor
    complete = executor._mark_rendezvous_complete
    order = os.environ.get(NODES, "").split(",")

    def rank(node: Any) -> tuple[int, Any]:
        # One that came later is not in the list of those that were there before.
        return (order.index(node.addr) if node.addr in order else len(order), node)

    @functools.wraps(complete)
    def new(self: Any) -> None:
        complete(self)
        for number, node in enumerate(sorted(self._state.participants, key=rank)):
            self._state.participants[node] = number

    executor._mark_rendezvous_complete = new


def _change_agent(module: ModuleType) -> None:
    agent = module.SimpleElasticAgent
    run = agent.run

    @functools.wraps(run)
    def new(self: Any, *given: Any, **named: Any) -> Any:
        result = run(self, *given, **named)
        run_id = self._worker_group.spec.rdzv_handler.get_run_id()
        # Before torchrun closes the rendezvous, which it does after a failure, too.
        if run_id in _stores and result is not None and not result.is_failed():
            _stores[run_id].set(_ended_well(run_id), "")
        return result

    agent.run = new


_RENDEZVOUS: Final = "torch.distributed.elastic.rendezvous"
#: Module -> what changes it, right after it has been imported.
CHANGES: Final = {
    f"{_RENDEZVOUS}.c10d_rendezvous_backend": _change_backend,
    f"{_RENDEZVOUS}.dynamic_rendezvous": _change_order,
    "torch.distributed.elastic.agent.server.api": _change_agent,
}
