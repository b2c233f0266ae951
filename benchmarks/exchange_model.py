"""A model of what an exchange between many hosts takes: flat, in two levels, by halving and doubling.

    python benchmarks/exchange_model.py                                    # measures constants, for some seconds
    python benchmarks/exchange_model.py --processor 20 --thread 100        # microseconds, given

A message takes ``latency`` on its way, and ``processor`` of each host that sends one and receives one meanwhile. Bytes
take their time at each host. A round begins when the one before it has ended. Latency and bandwidth are those of a
network and given. The processor's time and that of a thread are measured, on loopback between two processes: rough, and
more than they need where the machine is busy. A step has one gather of what hosts tell, beside its sums.
"""

import argparse
import datetime
import math
import statistics
import subprocess
import sys
import time

import torch
from model import BYTES, CASES, LATENCY
from torch import distributed

from phalanx.engines.hosts.gloo import Gloo, in_thread
from phalanx.engines.hosts.pieces import chunks
from phalanx.plan.levels import MANY, grouped

COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 1024)
ROOTS = {hosts: math.isqrt(hosts) for hosts in range(4, 1025)}
EVEN = [hosts for hosts, root in ROOTS.items() if any(hosts % count == 0 for count in range(root // 2 + 1, root + 1))]
BURST, ROUNDS = 200, 15


def rounds(way: str, hosts: int) -> list[int]:
    """For each round the messages that a host sends in it."""
    if way == "flat":
        return [hosts - 1] * (1 if hosts == 2 else 2)
    if way == "halving":
        return [1] * (2 * math.ceil(math.log2(hosts)))
    groups = grouped(hosts)[0] if len(grouped(hosts)) > 1 else math.isqrt(hosts)  # for few, too, to compare with
    return 2 * [math.ceil(hosts / groups) - 1, groups - 1]


def sums(way: str, hosts: int, parameters: int, latency: float, processor: float, bandwidth: float) -> float:
    """Seconds for the sums of a step."""
    pieces = len(chunks(parameters, hosts, BYTES))
    sent = 2 * BYTES * parameters * (hosts - 1) / hosts
    return sum(latency + messages * pieces * processor for messages in rounds(way, hosts)) + sent / bandwidth


def told(way: str, hosts: int, latency: float, processor: float, thread: float) -> float:
    """Seconds of a gather: Gloo's is a ring, with two messages to the next host in each round."""
    if way == "ring":
        return (hosts - 1) * (latency + 2 * processor)
    return math.ceil(math.log2(hosts)) * (latency + processor) + thread


def first(found: dict[int, list[float]]) -> int:
    """From which number of hosts on the second way is faster than the first one, at all that were looked at."""
    return min((hosts for hosts in found if all(found[at][1] < found[at][0] for at in found if at >= hosts)), default=0)


def measure() -> tuple[float, float]:
    """Seconds of a processor for a message that is sent and one that is received; of a thread that does nothing."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = subprocess.Popen([sys.executable, __file__, "--port", str(store.port)])
    found = bursts(store, 0)
    other.wait()
    threads = []
    for _ in range(100):
        began = time.perf_counter()
        in_thread(bool, bool)
        threads.append(time.perf_counter() - began)
    return found, statistics.median(threads)


def bursts(store: distributed.TCPStore, rank: int) -> float:
    """Seconds for each of many messages of 1 kB, sent and received at once."""
    gloo, found = Gloo(store, rank, 2, 60.0, "lo"), list[float]()
    rows = torch.zeros(2, BURST, 1000, dtype=torch.uint8)
    for _ in range(ROUNDS):
        began = time.perf_counter()
        works = [gloo.begin_receive(row, 1 - rank) for row in rows[0]]
        gloo.wait(works + [gloo.begin_send(row, 1 - rank) for row in rows[1]])
        found.append((time.perf_counter() - began) / BURST)
    return statistics.median(found)


def table(latency: float, processor: float, thread: float, bandwidth: float) -> str:
    """Milliseconds of a step's exchange."""
    heads = [f"{name}, {way}" for name in CASES for way in ("flat", "two levels", "halving")]
    lines = ["| hosts | " + " | ".join([*heads, "told, ring", "told, doubling"]) + " |"]
    lines.append("|" + " --- |" * (3 + len(heads)))
    for hosts in COUNTS:
        facts = latency, processor, bandwidth
        cells = [
            sums(way, hosts, parameters, *facts)
            for parameters, _ in CASES.values()
            for way in ("flat", "two levels", "halving")
        ]
        cells += [told(way, hosts, latency, processor, thread) for way in ("ring", "doubling")]
        lines.append(f"| {hosts} | " + " | ".join(f"{1000 * cell:.2f}" for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latency", type=float, default=LATENCY * 1e6, help="us from host to host")
    parser.add_argument("--processor", type=float, help="us for a message; measured by default")
    parser.add_argument("--thread", type=float, help="us for a thread; measured by default")
    parser.add_argument("--rate", type=float, default=100, help="Gbit/s")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.port:
        limit = datetime.timedelta(seconds=60)
        bursts(distributed.TCPStore("127.0.0.1", given.port, is_master=False, timeout=limit), 1)
        return
    measured = (0.0, 0.0) if given.processor and given.thread else measure()
    processor = given.processor / 1e6 if given.processor else measured[0]
    thread = given.thread / 1e6 if given.thread else measured[1]
    latency, bandwidth = given.latency / 1e6, given.rate * 1e9 / 8
    constants = f"{latency * 1e6:.0f} us on the way, {processor * 1e6:.0f} us of a processor, {thread * 1e6:.0f} us"
    print(f"{constants} of a thread, {given.rate:g} Gbit/s\n")
    print(table(latency, processor, thread, bandwidth))
    facts = latency, processor, bandwidth
    for name, parameters in {**{name: count for name, (count, _) in CASES.items()}, "one piece": 10_000}.items():
        found = {hosts: [sums(way, hosts, parameters, *facts) for way in ("flat", "two levels")] for hosts in EVEN}
        print(f"\n{name}: two levels are faster from {first(found)} hosts on")
    ways = {hosts: [told(way, hosts, latency, processor, thread) for way in ("ring", "doubling")] for hosts in EVEN}
    print(f"\nwhat hosts tell: doubling is faster from {first(ways)} hosts on. phalanx does both from {MANY} on")


if __name__ == "__main__":
    main()
