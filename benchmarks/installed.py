"""Is what was installed whole? Two ranks over ``init_process_group("phalanx")``, from the installed package alone.

Prints, too, how long ``import phalanx`` takes beside ``import torch``: medians of seven fresh processes each, in turn.
"""

import os
import statistics
import subprocess
import sys
import time

RANK = """
import os, torch
import phalanx, phalanx.backend
torch.distributed.init_process_group("phalanx")
x = torch.full((3,), float(torch.distributed.get_rank() + 1))
torch.distributed.all_reduce(x)
assert x.tolist() == [3.0, 3.0, 3.0]
print("rank", torch.distributed.get_rank(), "of phalanx", phalanx.__version__, "in", os.path.dirname(phalanx.__file__))
torch.distributed.destroy_process_group()
"""


def seconds(name: str, environment: dict) -> float:
    """How long a fresh process takes that imports a module."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {name}"], env=environment, check=True)
    return time.perf_counter() - began


def main() -> None:
    common = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": "2"}
    taken = [[seconds(name, common) for name in ("torch", "phalanx")] for _ in range(7)]
    torch, both = map(statistics.median, zip(*taken, strict=True))
    print(f"import torch: {torch:.2f} s, import phalanx: {both - torch:.2f} s more")
    ranks = [subprocess.Popen([sys.executable, "-c", RANK], env=common | {"RANK": str(rank)}) for rank in range(2)]
    sys.exit(max(rank.wait(timeout=120) for rank in ranks))


if __name__ == "__main__":
    main()
