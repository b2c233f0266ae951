"""A model of how much of a long run's time is training, where hosts fall: everything starts again, or others go on.

    python benchmarks/effective_time.py

The share of useful time, ETTR, is that of Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning
Research Clusters" (HPCA 2025, arXiv 2410.21680), for a long run that waits in no queue. It has H hosts, each of which
fails ``rate`` times a day. After each failure everything starts, and half of what lies between two checkpoints is
computed again:

    1 - H x rate x (start + between / 2)

Where the others go on, a failure costs the silence until a host counts as lost, what members need to agree and to meet
anew, and the step that was under way. After that, steps take longer until somebody is back: replicas of the lost host
are computed by others, so that one of them has more than before.
"""

import argparse

DAY = 86400.0
RATE = 6.5e-3  # failures of a node and day, on the worse of the paper's two clusters; 2.3e-3 on the other
HOSTS = 16, 64, 256, 1024
RESTARTS = (300.0, 1800.0), (60.0, 300.0)  # seconds of a start, and between checkpoints


def restarted(hosts: int, rate: float, start: float, between: float) -> float:
    """ETTR where everything starts again."""
    return 1 - hosts * rate / DAY * (start + between / 2)


def went_on(hosts: int, rate: float, pause: float, back: float, each: int) -> float:
    """The same where others go on: they pause, and are slower until somebody is back.

    Parameters
    ----------
    each : int
        Replicas of a host. Of one more a step takes (each + 1) / each times as long, at least while few are away.
    """
    slower = back * (1 - each / (each + 1))
    return 1 - hosts * rate / DAY * (pause + slower)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=RATE, help="failures of a host and day")
    parser.add_argument("--pause", type=float, default=20.0, help="seconds from a fall until others go on")
    parser.add_argument("--back", type=float, default=120.0, help="seconds until a host is back")
    given = parser.parse_args()
    restarts = [
        f"all start again in {start / 60:g} min, checkpoint every {between / 60:g}" for start, between in RESTARTS
    ]
    going_on = [f"others go on, R = {'' if each == 1 else f'{each} '}H" for each in (1, 4)]
    names = ["hosts", "failures a day", *restarts, *going_on]
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    for hosts in HOSTS:
        shares = [restarted(hosts, given.rate, *times) for times in RESTARTS]
        shares += [went_on(hosts, given.rate, given.pause, given.back, each) for each in (1, 4)]
        print(f"| {hosts} | {hosts * given.rate:.1f} | " + " | ".join(f"{max(0, one):.2%}" for one in shares) + " |")


if __name__ == "__main__":
    main()
