"""Hosts on one machine: network namespaces with an interface each, joined by a bridge in one more; all made here.

Needs Linux, iproute2 and the right to make namespaces.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import shutil
import subprocess
import sys

NAMES = pathlib.Path("/etc/netns")  # what namespaces have instead of the files in /etc
NUMBERS = itertools.count()


def ip(*words: str) -> None:
    """Call iproute2's ``ip``."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def why_not() -> str:
    """Why no namespaces can be made here; "" if they can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and iproute2"
    probe = f"px{os.getpid()}p"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode:
        return f"namespaces may not be made here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


class Network:
    """So many hosts, each with the interface ``eth0`` at 10.77.0.(number + 1); they are gone after the ``with`` block.

    Attributes
    ----------
    hosts : list of str
        The names of their namespaces.
    bridge : str
        That of the one between them.
    """

    def __init__(self, count: int) -> None:
        prefix = f"px{os.getpid()}n{next(NUMBERS)}"
        self.hosts = [f"{prefix}h{number}" for number in range(count)]
        self.bridge = f"{prefix}b"

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        ip("netns", "add", self.bridge)
        ip("-n", self.bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", self.bridge, "link", "set", "br0", "up")
        for number, host in enumerate(self.hosts):
            ip("netns", "add", host)
            ip("-n", host, "link", "add", "eth0", "type", "veth", "peer", f"p{number}", "netns", self.bridge)
            ip("-n", self.bridge, "link", "set", f"p{number}", "master", "br0", "up")
            ip("-n", host, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", host, "link", "set", "lo", "up")
        names = "".join(f"10.77.0.{number + 1} host{number}\n" for number in range(len(self.hosts)))
        for host in self.hosts:  # else each name that torch looks up takes five seconds
            (NAMES / host).mkdir(parents=True, exist_ok=True)
            (NAMES / host / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def __exit__(self, *_: object) -> None:
        for name in [*self.hosts, self.bridge]:
            shutil.rmtree(NAMES / name, ignore_errors=True)
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)

    def inside(self, number: int) -> list[str]:
        """What a command begins with that is to run on a host."""
        return ["ip", "netns", "exec", self.hosts[number]]

    def cut(self, number: int, *, heal: bool = False) -> None:
        """Take a host's link down, or up again."""
        ip("-n", self.bridge, "link", "set", f"p{number}", "up" if heal else "down")

    def cut_one_way(self, number: int, other: int, *, heal: bool = False) -> None:
        """Have a host send nothing to another one, which still sends to it; or have it send again."""
        ip("-n", self.hosts[number], "route", "del" if heal else "add", "blackhole", f"10.77.0.{other + 1}/32")
