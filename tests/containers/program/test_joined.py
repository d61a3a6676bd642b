"""Nodes that train apart, although they could share their work, are named; nothing else is.

The tables are a Linux kernel's own: ``/proc/net/tcp`` and ``tcp6`` of a process with torch's store,
which listens on a socket of version 6, and of gloo.
"""

import pytest

from containers.program.joined import Apart, Peers, connections

HEADER = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout"
)
TCP = f"""{HEADER}  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0 0
   1: 0600000A:B3C4 0700000A:7B8C 01 00000000:00000000 02:000A4B1C 00000000  1000        0 12 2 0 0
   2: 0600000A:733C 0700000A:9D22 06 00000000:00000000 03:000014E7 00000000     0        0 0 3 0
"""
MAPPED = "0000000000000000FFFF0000"
TCP6 = f"""{HEADER}  timeout inode
   0: 00000000000000000000000000000000:733C 00000000000000000000000000000000:0000 0A \
00000000:00000000 00:00000000 00000000  1000        0 21 1 0 100 0 0 10 0
   1: {MAPPED}0600000A:733C {MAPPED}0800000A:C350 01 \
00000000:00000000 00:00000000 00000000  1000        0 22 1 0 20 4 30 10 -1
   2: B80D0120000000000000000001000000:733C B80D0120000000000000000002000000:C350 01 \
00000000:00000000 00:00000000 00000000  1000        0 23 1 0 20 4 30 10 -1
"""


def test_the_kernels_tables_are_read() -> None:
    assert [*connections(TCP)] == [("10.0.0.7", 12)]
    assert [*connections(TCP6)] == [("10.0.0.8", 22), ("2001:db8::2", 23)]


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
