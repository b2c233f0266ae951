"""A worker's way to the caller's process."""

from __future__ import annotations

import os
import select
import threading
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle


class Caller:
    """The way to the caller's process: messages there, wakings and the end of the socket from there."""

    def __init__(self, fd: int) -> None:
        self._connection = Connection(fd)
        self._sending = threading.RLock()  # user code may have threads that warn or import
        self._poller = select.poll()
        self._poller.register(fd, select.POLLIN)

    def tell(self, kind: str, *facts: Any) -> None:
        """Send a message."""
        message = cloudpickle.dumps((kind, *facts))
        with self._sending:
            self._connection.send_bytes(message)

    def wake(self) -> None:
        """Send an empty message."""
        with self._sending:
            self._connection.send_bytes(b"")

    def sleep(self, milliseconds: int) -> None:
        """Wait until woken; SystemExit if the caller is gone or wants this worker to end."""
        if self._poller.poll(milliseconds) and not os.read(self._connection.fileno(), 4096):
            raise SystemExit
