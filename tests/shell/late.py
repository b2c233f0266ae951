"""The process of a job that takes long until it hears Ctrl-C."""

import time

from phalanx.lab.many import live as live

time.sleep(2)
