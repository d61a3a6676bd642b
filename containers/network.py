"""Which address and which interface a node uses: asked of the kernel, never assumed.

In awsvpc mode a container has two interfaces, and what they are called depends on the host's image.
"""

import fcntl
import socket
import struct
import time
from collections.abc import Callable

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: the IPv4 address of an interface


def address_towards(host: str, port: int = 9) -> str:
    """This node's own address on the way to ``host``. Nothing is sent.

    Raises:
        OSError: There is no route, or ``host`` has no address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address


def own_address() -> str:
    """This node's address on its default route; without one, that of its first interface."""
    try:
        return address_towards("192.0.2.1")  # RFC 5737: unassigned, so the default route's
    except OSError:
        for _, name in socket.if_nameindex():
            address = _address_of(name)
            if address and not address.startswith("127."):
                return address
    return "127.0.0.1"


def interface_of(address: str) -> str:
    """Name of the interface that has ``address``. Raises OSError when none has."""
    for _, name in socket.if_nameindex():
        if _address_of(name) == address:
            return name
    raise OSError(f"no interface has the address {address}")


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return None  # it has no IPv4 address
    return socket.inet_ntoa(answer[20:24])


def wait_for_port(
    host: str,
    port: int,
    *,
    timeout_s: float,
    should_stop: Callable[[], bool],
    say: Callable[[str], None],
) -> str | None:
    """Wait until ``host:port`` accepts connections; return why not, or None when it does.

    The name is looked up anew each time: it may not exist yet, and it may change its address.
    """
    deadline = time.monotonic() + timeout_s
    reason, next_word = "", 0.0
    while not should_stop():
        try:
            with socket.create_connection((host, port), timeout=3):
                return None
        except socket.gaierror:
            reason = f"the name {host} has no address yet"
        except OSError as error:
            reason = f"{host}:{port} does not answer ({error.strerror or error})"
        if time.monotonic() >= deadline:
            break
        if time.monotonic() >= next_word:
            say(f"waiting for the head: {reason}")
            next_word = time.monotonic() + 15
        time.sleep(0.2)  # a refused connection costs nothing, and the head waits for its workers
    return reason
