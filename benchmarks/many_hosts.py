"""A run over many hosts, for real: so many processes on one machine, of which three fall and two come back.

    python benchmarks/many_hosts.py --save         # 8, 16 and 32 hosts; some minutes, and some 10 GB of memory

Each host is a network namespace with one process that trains a tiny model, and its helpers. All share this machine's
cores, so seconds are far above those of hosts with cores of their own. What is to be seen: nothing breaks, the digest
is that of one process, and what a member costs does not grow with their number.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import torch
from torch import nn

import phalanx
from phalanx.definition.plain import hashed
from phalanx.lab import falls
from phalanx.lab.falls import ENOUGH, HOLD, Hosts
from phalanx.lab.network import Network, why_not

falls.SECONDS = 400.0  # for anything that has to happen: 32 processes start on few cores
RESULTS = pathlib.Path(__file__).parent / "results"
SIZES = 8, 16, 32
LOST_AFTER, WATCHED = 10.0, 10.0  # seconds of silence; seconds for which traffic is counted
NAMES = (
    "hosts", "until all train, s", "of a processor for each, s", "three fall, on after, s", "two return, in after, s",
    "MB of a member", "of its helpers", "descriptors", "of its helpers", "threads", "datagrams a second",
    "digest",
)  # fmt: skip


def recipe(steps: int = 400, hosts: int = 8) -> phalanx.Recipe:
    """A tiny model, and one replica for each host."""
    x = torch.linspace(-1, 1, 8 * hosts * 16).reshape(-1, 16)
    return phalanx.Recipe(
        lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)), (x, x.sum(1, keepdim=True)),
        nn.MSELoss(), replicas=hosts, batch_size=2 * hosts, steps=steps, lr=1e-3,
    )  # fmt: skip


def memory(pid: int) -> float:
    """Megabytes of a process. What it shares counts in part."""
    text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(text.partition("\nPss:")[2].split()[0]) / 1e3


def processor(pid: int) -> float:
    """Seconds of a processor that it has taken so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descriptors(pid: int) -> int:
    """How many it has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def sent(pid: int) -> int:
    """Datagrams that the host of this process has sent."""
    lines = pathlib.Path(f"/proc/{pid}/net/snmp").read_text().splitlines()
    names, values = [line.split() for line in lines if line.startswith("Udp:")]
    return int(values[names.index("OutDatagrams")])


def middle(values) -> float:
    """Their median."""
    return statistics.median(list(values))


def costs(hosts: Hosts) -> list[float | int]:
    """What a member in the middle has: megabytes, descriptors, threads; and what its helpers have."""
    processes = [(host.process.pid, hosts.pids(number)) for number, host in enumerate(hosts.all)]
    helpers = [[pid for pid in pids if pid != member] for member, pids in processes]
    return [
        middle(memory(member) for member, _ in processes),
        middle(sum(map(memory, some)) for some in helpers),
        round(middle(descriptors(member) for member, _ in processes)),
        round(middle(sum(map(descriptors, some)) for some in helpers)),
        round(middle(len(os.listdir(f"/proc/{member}/task")) for member, _ in processes)),
    ]


def traffic(hosts: Hosts) -> float:
    """Datagrams that a member sends in a second, on average, while all is well."""
    pids = [host.process.pid for host in hosts.all]
    before, began = [sent(pid) for pid in pids], time.monotonic()
    time.sleep(WATCHED)
    after, seconds = [sent(pid) for pid in pids], time.monotonic() - began
    return sum(now - then for now, then in zip(after, before, strict=True)) / seconds / len(pids)


def tried(size: int) -> list[object]:
    """A row of the table."""
    quiet = recipe(hosts=size).train(engine="inline", progress=False)
    wanted = {"digest": quiet.digest, "losses": hashed(json.dumps(quiet.loss_history)).hex()}
    with tempfile.TemporaryDirectory(prefix="phalanx-") as name, Network(size) as network:
        folder, began = pathlib.Path(name), time.monotonic()
        given = {"file": __file__, "arguments": {"hosts": size}, "workers": 1, "folder": name, "lost_after": LOST_AFTER}
        hosts = Hosts(given, size, network, folder)
        try:
            hosts.until(lambda: min(host.step for host in hosts.all) >= 0, "the first step")
            began, told = time.monotonic() - began, f"{size} hosts"
            row = [size, began, middle(processor(host.process.pid) for host in hosts.all)]
            print(f"{told} train after {began:.0f} s", file=sys.stderr)
            (folder / HOLD).touch()
            beats, member = traffic(hosts), costs(hosts)
            fallen, watcher = (0, size // 2, size - 1), hosts.all[1]
            began, before, step = time.monotonic(), hosts.heard(), watcher.step
            hosts.signal([pid for number in fallen for pid in hosts.pids(number)], 9)
            hosts.until(
                lambda: {("lost", one) for one in fallen} <= {new[:2] for new in hosts.heard() - before}, "loss"
            )
            step = watcher.step
            hosts.until(lambda: watcher.step > step, "a step after the falls")
            row.append(time.monotonic() - began)
            print(f"{told}: three fell, on after {row[-1]:.1f} s", file=sys.stderr)
            began, before = time.monotonic(), hosts.heard()
            for number in fallen[:2]:
                hosts.all[number] = hosts.begin(number)
            back = {("joined", one) for one in fallen[:2]}
            hosts.until(lambda: back <= {new[:2] for new in hosts.heard() - before}, "two return")
            row.append(time.monotonic() - began)
            print(f"{told}: two are back after {row[-1]:.1f} s", file=sys.stderr)
            (folder / ENOUGH).touch()
            ends = [host.end() for number, host in enumerate(hosts.all) if number != fallen[2]]
            right = all({**end, **wanted} == end for end in ends)
        except BaseException:
            print((folder / "errors").read_text()[-4000:], file=sys.stderr)
            hosts.signal(hosts.pids(), 9)
            raise
        finally:
            left = hosts.close()
        assert not left, left
        return [*row, *member, beats, "that of one process" if right else f"WRONG: {ends}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/many_hosts.md")
    given = parser.parse_args()
    if why := why_not():
        raise SystemExit(f"many_hosts.py: {why}")
    import scale
    import step

    rows = [tried(size) for size in given.sizes]
    text = "\n\n".join([
        "# Many hosts on one machine", step.circumstances("many_hosts.py"),
        f"`lost_after={LOST_AFTER:.0f}`. Three are killed at once, the first one among them; two are started again.",
        scale.table(NAMES, rows),
    ])  # fmt: skip
    print(text)
    if given.save:
        (RESULTS / "many_hosts.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
