"""Is what was installed whole? Two ranks over ``init_process_group("phalanx")``, from the installed package alone."""

import os
import subprocess
import sys

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


def main() -> None:
    common = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": "2"}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK], env=common | {"RANK": str(rank)}) for rank in range(2)]
    sys.exit(max(rank.wait(timeout=120) for rank in ranks))


if __name__ == "__main__":
    main()
