"""Where hosts are: the address of this one towards others, its interface, its name, and whether others can come."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import socket
import struct
import time

from phalanx.definition.plain import hashed
from phalanx.engines.hosts.stores import POLL_SECONDS, SECRET, Waiting, unfound
from phalanx.errors import UsageError
from phalanx.surroundings import interrupts
from phalanx.surroundings.presence import say

SIOCGIFADDR = 0x8915
OPEN = (
    "whoever reaches the ports of this run on {} can read its weights, join it and end it, as it has no secret; give "
    f"all processes the same {SECRET}, or use a private network (docs/hosts.md)"
)
LOOPBACK_NAME = (
    "MASTER_ADDR is {}, which is {} on the host of process 0, so processes on other machines do not reach it; give the "
    "address that they know, or take the name out of the line in /etc/hosts; 127.0.0.1 if all are on this machine"
)


def is_known(address: str) -> bool:
    """Whether a name has an address by now."""
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(address, None))
    return False


def until_known(address: str, port: int, seconds: float, waiting: Waiting) -> None:
    """Wait until a name has an address: by it a process knows its own one, and the name of a new pod comes late.

    Raises
    ------
    PeersLostError
        It has none.
    """
    end = time.monotonic() + seconds
    with waiting.on(f"an address of {address}"):
        while not is_known(address):
            if time.monotonic() > end:
                raise unfound(address, port, "that name has no address")
            interrupts.check()
            waiting.tick()
            time.sleep(POLL_SECONDS)


def look_at_address(address: str, own: str, size: int, *, open_: bool) -> str:
    """Say where others reach this process if they cannot, or if anybody can. A UsageError if some cannot who should.

    Returns why perhaps nobody can come; "" if they can.
    """
    if not own.startswith("127.") and own != "::1":
        if open_:
            say(OPEN.format(own))
        return ""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", -1))
    if here != size and address != "localhost" and not address.startswith(("127.", "::1")):
        text = LOOPBACK_NAME.format(address, own)
        if here > 0:
            raise UsageError(text)
        say(text)
        return text
    return ""


def ends(address: str) -> tuple[str, str]:
    """The address of this host on the way to another, and that of the other one."""
    with contextlib.suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return probe.getsockname()[0], probe.getpeername()[0]
    return "127.0.0.1", "127.0.0.1"


def towards(address: str) -> str:
    """The interface by which ``address`` is reached; "" if that cannot be told."""
    if not address:
        return ""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        own, _ = ends(address)
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                ifreq = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(ifreq[20:24]) == own:
                    return name
    return ""


def host_name() -> str:
    """What this host is called, and what tells network namespaces of one machine apart."""
    name = socket.gethostname()[:40]
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{name} {hashed([boot, os.readlink('/proc/self/ns/net')]).hex()[:16]}"
    return name
