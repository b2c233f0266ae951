"""Steps over several hosts: phalanx beside DistributedDataParallel, on network namespaces with shaped links.

    python benchmarks/hosts.py                     # 2 hosts x 2 workers, 1 Gbit/s, 1 ms
    python benchmarks/hosts.py --hosts 4 --workers 2 --model mlp --rounds 1

Each host is a network namespace of this machine with an interface of its own; needs the right to make them. All hosts
share this machine's cores, so computing is slower than it would be; what crosses the links is as it would be.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(pathlib.Path(__file__).parent), str(ROOT)]
MODELS = ("lenet", "mlp", "gpt")
STEPS = {"lenet": 60, "mlp": 20, "gpt": 40}
SENT = "/sys/class/net/eth0/statistics/tx_bytes"
RATE, DELAY = 1000, 1
METHOD = """{hosts} hosts (network namespaces of this machine) with {workers} workers each, links of {links}, {rounds}
rounds, interleaved. Seconds are the mean of the first host's steps after 5 warm ones, in a run that nobody watches, and
medians of rounds. MB per host and step are what its
interface sent, all included; the limit is 2 N (H - 1) / H floats. DDP: {ranks} ranks over Gloo,
`gradient_as_bucket_view`, `static_graph`, the same fused AdamW and the same whole batch; phalanx: one process per
host, R = {replicas}."""


def rank(kind: str, model: str, replicas: int, workers: int) -> dict:
    """What one process does, and its facts; ``workers`` in all."""
    import models
    import torch

    torch.set_num_threads(1)
    case, steps, warm = models.case(model), STEPS[model], 5
    run = ours if kind == "phalanx" else ddp
    began, ended = run(case, replicas, workers, warm + steps, warm)
    return {"seconds": (ended[0] - began[0]) / steps, "bytes": (ended[1] - began[1]) / steps}


def ours(case, replicas, workers, steps, warm):
    import models

    import phalanx

    recipe = phalanx.Recipe(
        case.make_model, (case.x, case.y), case.loss_fn, replicas=replicas, batch_size=case.batch_size, steps=steps,
        optimizer=models.OPTIMIZER,
    )  # fmt: skip
    with recipe.start(workers=workers, progress=False) as run:
        for _ in itertools.islice(run, warm):
            pass
        began = now()
        run.finish()
        return began, now()


def ddp(case, replicas, workers, steps, warm):
    import models
    import peers
    import torch
    from torch import distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        case.make_model(), gradient_as_bucket_view=True, static_graph=True
    )
    optimizer = models.OPTIMIZER(model.parameters())
    batches = peers.shuffled(case, distributed.get_rank(), distributed.get_world_size())
    for x, y in itertools.islice(batches, warm):
        peers.step(model, optimizer, case, x, y)
    began = now()
    for x, y in itertools.islice(batches, steps - warm):
        peers.step(model, optimizer, case, x, y)
    ended = now()
    distributed.barrier()
    return began, ended


def now() -> tuple[float, int]:
    """Seconds, and bytes sent so far."""
    return time.perf_counter(), int(pathlib.Path(SENT).read_text())


def measure(kind: str, model: str, arguments) -> dict:
    """Facts of the first host's first process."""
    from tests.hosts.network import Network, output

    each = 1 if kind == "phalanx" else arguments.workers
    whole = arguments.hosts * arguments.workers
    with Network(arguments.hosts) as net:
        if arguments.rate:
            arguments.links = net.shape(arguments.rate, arguments.delay)
        words = [str(pathlib.Path(__file__)), "--rank", kind, "--model", model, "--replicas", str(arguments.replicas)]
        code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        found = [output(one, 600) for one in net.ranks(code, *words, "--whole", str(whole), each=each)]
    if any(status for status, _ in found):
        raise SystemExit("\n".join(text for _, text in found))
    return json.loads(found[0][1].splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help=f"one of {', '.join(MODELS)}; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="on each host")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rate", type=int, default=RATE, help="Mbit/s; 0 for as fast as it goes")
    parser.add_argument("--delay", type=int, default=DELAY, help="ms from host to host")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/hosts.*, or hosts_unlimited.*")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--whole", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.links = "any speed"
    if arguments.rank:
        print(json.dumps(rank(arguments.rank, arguments.model, arguments.replicas, arguments.whole)), flush=True)
        return
    import models
    import step
    import tqdm

    names = [arguments.model] if arguments.model else MODELS
    rows, measured = [], {}
    with tqdm.tqdm(total=2 * arguments.rounds * len(names)) as bar:
        for name in names:
            facts = measured[name] = {"phalanx": [], "ddp": []}
            for number in range(arguments.rounds):
                for kind in ("phalanx", "ddp") if number % 2 == 0 else ("ddp", "phalanx"):
                    bar.set_description(f"{name}, {kind}")
                    facts[kind].append(measure(kind, name, arguments))
                    bar.update()
            count = sum(parameter.numel() for parameter in models.case(name).make_model().parameters())
            limit = 2 * 4 * count * (arguments.hosts - 1) / arguments.hosts
            sent = {kind: statistics.median(fact["bytes"] for fact in facts[kind]) for kind in facts}
            rows.append([
                name, *(step.spelled(step.milliseconds(facts, kind)) for kind in ("ddp", "phalanx")),
                f"**{step.ratio(facts, 'ddp', 'phalanx'):.2f}**", f"{limit / 1e6:.3g}", f"{sent['ddp'] / 1e6:.3g}",
                f"{sent['phalanx'] / 1e6:.3g}", f"{sent['phalanx'] / limit:.2f}",
            ])  # fmt: skip
    header = [
        "model",
        "DDP, ms",
        "phalanx, ms",
        "DDP / phalanx",
        "limit, MB",
        "DDP, MB",
        "phalanx, MB",
        "phalanx / limit",
    ]
    method = METHOD.format(
        hosts=arguments.hosts, workers=arguments.workers, links=arguments.links,
        rounds=arguments.rounds, ranks=arguments.hosts * arguments.workers, replicas=arguments.replicas,
    )  # fmt: skip
    report = f"# Over hosts\n\n{step.circumstances('hosts.py')}\n\n{method}\n\n{step.markdown(header, rows)}\n"
    print(report)
    if arguments.save:
        step.save("hosts" if arguments.rate else "hosts_unlimited", report, measured)


if __name__ == "__main__":
    main()
