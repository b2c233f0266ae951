"""Scripts for processes of their own: OpenCL and WebGPU devices are opened there, never where others fork."""

import os
import subprocess
import sys

from tests.state.runs import ROOT

DIGESTS = """
import dataclasses, json, sys
from phalanx.proof.check import SAME, check, circumstances, verdict
from tinygrad import helpers
helpers.DEV.value = sys.argv[1]
from tests.tinygrad.families import FAMILIES
recipe = FAMILIES["dropout"].recipe(2, steps=2, batch_size=4)
same = []
for devices in sys.argv[2:]:
    result = recipe.train(devices=devices.split(","))
    same.append([result.digest, result.loss_history])
other = dataclasses.replace(recipe, seed=1).train(devices=sys.argv[2].split(","))
named = sys.argv[-1].split(",")
rows = list(check(recipe, named, 2))
told = [verdict(rows) == SAME, len(rows), circumstances(named, 2)["devices"]]
print(json.dumps({"same": same, "other": other.digest, "check": told}))
"""


def run(command, **environment):
    """What a Python process prints; fails with all of its errors."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=115
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
