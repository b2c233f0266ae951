"""Network interfaces of this host: by which of them another one is reached, and a socket that listens on no other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

SIOCGIFADDR = 0x8915
LOOPBACK = "lo"


def towards(address: str) -> str:
    """The interface by which ``address`` is reached; "" if that cannot be told."""
    if not address:
        return ""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    return ""


def listening(address: str, port: int) -> int | None:
    """A descriptor that listens on this address only; None where it is not one of this host's own."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(place)
            made.listen()
            return os.dup(made.fileno())
    return None
