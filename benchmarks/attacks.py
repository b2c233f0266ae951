"""Attacks the library at random for as long as is asked for, and counts what it finds; nothing may be found.

    python benchmarks/attacks.py --minutes 10 --save      # each arm; make campaign
    python benchmarks/attacks.py --arm "Ctrl-C at the hand-over" --seed 17 --rounds 1

Arms are in tests/attacks. Each round has a seed of its own, which is printed with whatever it finds.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import pathlib
import pkgutil
import platform
import random
import signal
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "attacks"
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.setdefault("OMP_NUM_THREADS", "1")


def arms() -> dict:
    """Every arm by its name."""
    import tests.attacks as package

    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        found.update(getattr(importlib.import_module(f"tests.attacks.{module.name}"), "ARMS", {}))
    return found


def attack(name: str, arm, seconds: float, rounds: int | None, seed: int) -> dict:
    """Rounds of one arm until the time is over; a finding is printed at once, with its seed."""
    import tqdm

    began, done, findings = time.monotonic(), 0, []
    with tqdm.tqdm(total=round(seconds), desc=name, unit="s", bar_format="{desc}: {n}/{total} s {postfix}") as bar:
        while time.monotonic() - began < seconds if rounds is None else done < rounds:
            number = seed + done
            try:
                finding = arm(random.Random(number))
            except Exception as error:
                finding = f"{type(error).__name__}: {error}"
            if finding is not None:
                findings.append([number, finding])
                bar.write(f"{name}, seed {number}: {finding}")
            done += 1
            bar.n = min(round(time.monotonic() - began), bar.total)
            bar.set_postfix_str(f"{done} rounds, {len(findings)} findings")
    return {"rounds": done, "seconds": time.monotonic() - began, "seed": seed, "findings": findings}


def table(results: dict) -> str:
    """What every arm did, as Markdown."""
    rows = ["| attack | rounds | seconds | first seed | findings |", "| --- | --- | --- | --- | --- |"]
    for name, fact in results.items():
        rows.append(f"| {name} | {fact['rounds']} | {fact['seconds']:.0f} | {fact['seed']} | {len(fact['findings'])} |")
    return "\n".join(rows)


def save(results: dict) -> None:
    """Add these figures to the file, which has the newest of each arm."""
    import torch

    kept = json.loads(RESULTS.with_suffix(".json").read_text()) if RESULTS.with_suffix(".json").exists() else {}
    kept.update(results)
    RESULTS.with_suffix(".json").write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    lines = [
        "# Attacks",
        "",
        "Random attacks on what a run can be asked to do; a finding would be another digest, a run that",
        "ends or hangs, or something of the process that is not as before. Each round has its own seed:",
        "`python benchmarks/attacks.py --arm NAME --seed SEED --rounds 1` plays it again. `make campaign` has more",
        "arms.",
        "",
        table(dict(sorted(kept.items()))),
        "",
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {os.cpu_count()} cores, several arms side by side.",
        "",
    ]
    RESULTS.with_suffix(".md").write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="for each arm")
    parser.add_argument("--rounds", type=int, help="of each arm, instead of minutes")
    parser.add_argument("--arm", action="append", help="only this one; a part of its name is enough")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--save", action="store_true", help="into benchmarks/results/attacks.md")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in what they start in the background
    results = {}
    for name, arm in arms().items():
        if not arguments.arm or any(part in name for part in arguments.arm):
            results[name] = attack(name, arm, arguments.minutes * 60, arguments.rounds, arguments.seed)
            if arguments.save:
                save({name: results[name]})
    print(table(results))
    sys.exit(any(fact["findings"] for fact in results.values()))


if __name__ == "__main__":
    main()
