"""Nodes that train apart, although they could share their work, are named; nothing else is."""

import os
import socket
from pathlib import Path

import pytest

from containers.program.watch.joined import Apart, Peers, peers


def test_a_connection_is_seen_from_both_ends(tmp_path: Path) -> None:
    """torch's store listens on a socket of version 6, which takes those of version 4, too."""
    pids, others = [os.getpid(), 2**22 + 1], ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        place = ("127.0.0.3", server.getsockname()[1])
        with socket.create_connection(place, source_address=("127.0.0.2", 0)), server.accept()[0]:
            assert peers(pids, tmp_path, others).addresses == {*others[:2]}


ALONE, TO_0 = Peers(shares=True), Peers(shares=True, addresses=frozenset({"10.0.0.0"}))
OTHER = Peers()  # no steps, no process group, or the sockets are not looked at yet


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([ALONE, ALONE], "node 1 has not joined node 0: each trains by itself"),
        ([ALONE] * 3, "node 1, node 2 have not joined node 0: each trains by itself"),
        # One node of several, of which rank 0 has heard nothing: it has joined, seen from there.
        ([ALONE, TO_0, ALONE, ALONE], "node 3 has not joined node 2: each trains by itself"),
        ([ALONE, TO_0, ALONE], ""),
        ([ALONE, TO_0], ""),
        ([TO_0, ALONE], ""),
        # Inference on parts of the data, a sweep of plain loops, a node that prepares.
        ([OTHER, OTHER], ""),
        ([ALONE, OTHER], ""),
        ([ALONE], ""),
        ([], ""),
    ],
)
def test_only_nodes_that_step_apart_for_minutes_are_named(nodes: list[Peers], words: str) -> None:
    apart, addresses = Apart(), {number: f"10.0.0.{number}" for number in range(4)}
    sample = dict(enumerate(nodes))
    assert not any(apart.hear(now, sample, addresses) for now in (0.0, 60.0, 119.0))
    assert apart.words == ""
    said = [apart.hear(now, sample, addresses) for now in (121.0, 126.0)]
    assert said == [bool(words), False]
    assert apart.words == words


def test_nodes_that_join_late_are_not_named() -> None:
    apart, addresses = Apart(), {0: "10.0.0.0", 1: "10.0.0.1"}
    for now, second in ((0.0, ALONE), (110.0, TO_0), (130.0, ALONE), (240.0, ALONE)):
        assert not apart.hear(now, {0: ALONE, 1: second}, addresses)
    assert apart.hear(260.0, {0: ALONE, 1: ALONE}, addresses)
