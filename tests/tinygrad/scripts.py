"""A script for a process of its own: OpenCL and WebGPU devices are opened there, never where others fork."""

import json
import os
import subprocess
import sys

from tests.state.runs import ROOT

SCRIPT = """
import contextlib, dataclasses, io, json, re, sys
from phalanx.cli.app import list_devices
from phalanx.lab.check import SAME, check, circumstances, verdict
from tinygrad import helpers
asking, helpers.DEV.value, *orders = sys.argv[1:]

def printed(function, *arguments):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        function(*arguments)
    return text.getvalue().strip()

def same():
    results = [made.train(devices=devices.split(",")) for devices in orders]
    told = {"same": [[result.digest, result.loss_history] for result in results]}
    told["other"] = dataclasses.replace(made, seed=1).train(devices=orders[0].split(",")).digest
    named = orders[-1].split(",")
    told["check"] = [verdict(list(check(made, None, named, 2))) == SAME, circumstances(named, 2)["devices"]]
    return told

def documented():
    with open("docs/open_devices.md") as file:
        block = re.search(r"```py\\n(.*?)```", file.read(), re.DOTALL)[1]
    return printed(exec, block, {})

if orders:
    from tests.tinygrad.families import FAMILIES
    made = FAMILIES["dropout"].recipe(2, steps=2, batch_size=4)
asked = {"listed": lambda: json.loads(printed(list_devices, True)), "same": same, "documented": documented}
print(json.dumps(asked[asking]()))
"""


def run(asking, kind, *orders, **environment):
    """What a process tells of these devices of a kind, named in several orders; fails with all of its errors.

    ``asking`` is "listed" (all devices), "same" (a recipe on each of the orders) or "documented" (the example).
    """
    command = [sys.executable, "-c", SCRIPT, asking, kind, *orders]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
