"""Members of a run over many hosts: what they say while all is well, and what a fall takes.

    python benchmarks/scale.py --save        # both parts, some minutes; needs unshare, for a network of its own
    python benchmarks/scale.py --sizes 1000  # takes about a minute for each fall, and 1.5 GB

Falls are simulated: the code of members, beacons and agreement is the real one, and time passes from one event to the
next. A link takes 10 to 20 ms, a datagram 40 us of a processor, a socket holds 160. A member is silent for 2 s before
it is lost, and beats 5 times in that time; by default those are 10 s and 20 times. So what counts is the time after the
silence. Beats while all is well are those of real processes, as the kernel counts them.
"""

import argparse
import contextlib
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import tqdm

from phalanx.engines.hosts.members import Members
from phalanx.engines.hosts.messages import Door, key_of
from tests.simulation.many import LOST_AFTER, Many

RESULTS = pathlib.Path(__file__).parent / "results"
SHARES = {"one": lambda size: 1, "a tenth": lambda size: max(1, size // 10), "a third": lambda size: size // 3}
SECONDS, BEATS = 4.0, 20  # of real members: how long they are counted; beats within lost_after
WITHOUT_HUBS = 300  # members, up to which all three hubs fall with one seed: of 1,000 the simulator needs an hour then
NAMES = "members", "lost", "s after the silence", "datagrams of a hub", "of the middle", "KB of a hub", "of the middle"
REAL = 8, 16, 32, 64


def fall(size, share, seed, lowest):
    """[seconds after the silence, datagrams of the busiest, of the one in the middle, bytes of both] of one fall."""
    count = SHARES[share](size)
    fallen = range(count) if lowest else random.Random(seed).sample(range(size), count)
    many = Many(size, seed, fallen).run()
    assert not many.ends, next(iter(many.ends.values()))
    assert {tuple(each[0][1]["lost"]) for each in many.agreed.values() if each} == {tuple(sorted(fallen))}
    said, sizes = zip(*many.said.values(), strict=True)
    return [many.pause - LOST_AFTER, max(said), statistics.median(said), max(sizes), statistics.median(sizes)]


def falls(sizes, seeds):
    """Rows of a table: for each size and share the worst of some seeds."""
    rows, cases = [], [(size, share) for size in sizes for share in SHARES if SHARES[share](size) * 2 < size]
    with tqdm.tqdm(total=len(cases) * seeds, unit="fall") as bar:
        for size, share in cases:
            runs = []
            for seed in range(seeds):
                bar.set_description(f"{size} members lose {share}")
                runs.append(fall(size, share, seed, lowest=seed == 0 and size <= WITHOUT_HUBS))
                bar.update()
            worst = [max(column) for column in zip(*runs, strict=True)]
            rows.append([size, share, worst[0], *map(round, worst[1:3]), worst[3] / 1e3, worst[4] / 1e3])
    return rows


def counted():
    """Datagrams and bytes that this network has sent."""
    lines = [
        line.split()
        for name in ("snmp", "netstat")
        for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    found = {}
    for names, values in zip(lines[::2], lines[1::2], strict=True):
        found |= {names[0] + name: value for name, value in zip(names[1:], values[1:], strict=True)}
    return int(found["Udp:OutDatagrams"]), int(found["IpExt:OutOctets"])


def beats(size):
    """[members, datagrams and bytes a second of a member] of real ones, in this network."""
    with contextlib.ExitStack() as undo:
        some = [Members(rank, "127.0.0.1", 0, Door(key_of(b"", "scale"), size), 20.0) for rank in range(size)]
        for one in some:
            undo.callback(one.close)
        places = {one.me: one.place for one in some}
        for one in some:
            one.begin(1, 0, places)
        settled, before, end = 0.0, (0, 0), time.monotonic() + 2 * SECONDS
        while (now := time.monotonic()) < end:
            for one in some:
                assert not one.news(), one.news()
            if not settled and now > end - SECONDS:  # until then they begin
                settled, before = now, counted()
            time.sleep(0.05)
        share = size * (time.monotonic() - settled)
        return [size, *((now - then) / share for now, then in zip(counted(), before, strict=True))]


def table(names, rows):
    """Rows as Markdown."""
    spelled = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(names), ["---"] * len(names), *spelled])


def picture(rows, path):
    """Time after the silence and datagrams over the number of members."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for share in SHARES:
        of = [row for row in rows if row[1] == share]
        left.plot([row[0] for row in of], [row[2] for row in of], "o-", label=f"lost: {share}")
    of = [row for row in rows if row[1] == "one"]
    right.plot([row[0] for row in of], [row[3] for row in of], "o-", label="a hub")
    right.plot([row[0] for row in of], [row[4] for row in of], "o-", label="the member in the middle")
    left.set(xscale="log", ylim=0, xlabel="members", ylabel="seconds after the silence", title="until all have agreed")
    right.set(xscale="log", yscale="log", xlabel="members", ylabel="datagrams", title="sent for the fall of one")
    for one in (left, right):
        one.legend()
        one.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description="What members of a run over many hosts say, and what a fall takes.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[3, 10, 30, 100, 300, 1000])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/scale.md, scale.json and scale.png")
    parser.add_argument("--beats", action="store_true", help=argparse.SUPPRESS)  # inside a network of its own
    given = parser.parse_args()
    if given.beats:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        print(json.dumps([beats(size) for size in tqdm.tqdm(REAL, unit="size")]))
        return
    inside = ["unshare", "-n", sys.executable, __file__, "--beats"]
    well = json.loads(subprocess.run(inside, check=True, stdout=subprocess.PIPE, timeout=300).stdout)
    rows = falls(given.sizes, given.seeds)
    text = "\n\n".join([
        "# Members of a run over many hosts",
        f"`python benchmarks/scale.py`. Falls are simulated. The worst of {given.seeds} seeds. In one the lowest fall, "
        f"and so all three hubs (up to {WITHOUT_HUBS} members).",
        table(NAMES, rows),
        "![Falls](scale.png)",
        "While all is well, of real processes on loopback, with `lost_after=20`: one beat a second.",
        table(["members", "datagrams a second and member", "bytes"], well),
    ])  # fmt: skip
    print(text)
    if given.save:
        (RESULTS / "scale.md").write_text(text + "\n")
        (RESULTS / "scale.json").write_text(json.dumps({"falls": rows, "well": well}, indent=1) + "\n")
        picture(rows, RESULTS / "scale.png")


if __name__ == "__main__":
    main()
