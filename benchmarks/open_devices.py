"""LeNet on devices of tinygrad: phalanx, tinygrad's own ``shard``, and netcl's ``data_parallel_step``, on equal data.

    python benchmarks/open_devices.py --kinds CPU CL --save --netcl-python OTHER/bin/python

Every run is a process of its own: the same weights at the start, the same batches of 96 images, SGD, 8 steps. ``bits``
is a hash of the weights after them; ``difference`` the largest from those of the plain loop on one device of that kind,
which sees each batch as one. phalanx computes 6 replicas, whatever the number of devices. The time is the median of the
last 5 steps. Devices of one kind are here one CPU several times, so more of them need not be faster: this compares what
the ways cost beside computing, and which bits they end in. netcl runs in a Python of its own (pip install netcl==0.4.4
pyopencl). A message in the place of bits is the last line of that way's error.
"""

import argparse
import functools
import hashlib
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import numpy as np

BATCH, STEPS, TIMED, LR, REPLICAS = 96, 8, 5, 0.05, 6
SHAPES = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]
RESULTS = pathlib.Path(__file__).parent / "results"
HEADER = ["kind", "devices", "by", "ms a step", "bits", "difference", "replicas equal"]


def weights():
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape) * (len(shape) > 1) for shape in SHAPES]
    inputs = [np.prod(shape[1:]) if len(shape) > 2 else shape[0] for shape in SHAPES]
    return [(array / np.sqrt(count)).astype(np.float32) for array, count in zip(arrays, inputs, strict=True)]


def data():
    random = np.random.default_rng(1)
    x = random.standard_normal((BATCH * STEPS, 1, 28, 28)).astype(np.float32)
    return x, random.integers(0, 10, BATCH * STEPS).astype(np.int32)


def forward(model, x):
    w = model["weights"]
    x = x.conv2d(w[0], w[1]).relu().avg_pool2d((2, 2))
    x = x.conv2d(w[2], w[3]).relu().avg_pool2d((2, 2)).flatten(1)
    return (x @ w[4] + w[5]).relu() @ w[6] + w[7]


def loss(output, target):
    return output.sparse_categorical_crossentropy(target)


def told(arrays, seconds, equal=True):
    """What a job prints."""
    shown = {"ms": statistics.median(seconds[-TIMED:]) * 1e3, "weights": [array.tolist() for array in arrays]}
    bits = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()[:12]
    print(json.dumps(shown | {"bits": bits, "equal": equal}))


def by_phalanx(devices):
    from tinygrad import Tensor
    from tinygrad.nn.optim import SGD

    import phalanx

    recipe = phalanx.Recipe(
        lambda: {"weights": [Tensor(array) for array in weights()]}, data(), loss, forward, replicas=REPLICAS,
        batch_size=BATCH, steps=STEPS, shuffle=False, optimizer=functools.partial(SGD, lr=LR),
    )  # fmt: skip
    with recipe.start(devices=devices, progress=False) as run:
        seconds = [report.seconds for report in run]
        told([tensor.numpy() for tensor in run.result().params.values()], seconds)


def by_shard(devices):
    """By tinygrad's own means: the batch is cut over devices, all have the weights; on one device, the plain loop."""
    from tinygrad import Context, Tensor, TinyJit
    from tinygrad.nn.optim import SGD

    from phalanx.frameworks.tinygrad.devices import opened  # sees all OpenCL devices

    devices = tuple(map(opened, devices))
    several = len(devices) > 1
    model = {"weights": [Tensor(array, device=devices[0]) for array in weights()]}
    if several:
        for tensor in model["weights"]:
            tensor.shard_(devices)
    x, y = data()
    optimizer = SGD(model["weights"], lr=LR)

    @TinyJit
    def step(x, y):
        value = loss(forward(model, x), y)
        gradient = value.gradient(*model["weights"])
        value.realize(*gradient)
        for tensor, entry in zip(model["weights"], gradient, strict=True):
            tensor.grad = entry
        optimizer.step()
        return value

    seconds = []
    with Context(TRAINING=1, BEAM=0):
        for number in range(STEPS):
            rows = slice(number * BATCH, (number + 1) * BATCH)
            began = time.perf_counter()
            batch = [Tensor(array[rows], device=devices[0]) for array in (x, y)]
            step(*(tensor.shard(devices, axis=0).realize() if several else tensor.realize() for tensor in batch)).item()
            seconds.append(time.perf_counter() - began)
    told([tensor.numpy() for tensor in model["weights"]], seconds)


def by_netcl(count):
    import netcl.autograd as ag
    import pyopencl as cl
    from netcl.core.parameter import Parameter
    from netcl.core.tensor import Tensor
    from netcl.distributed.device_manager import DeviceManager
    from netcl.distributed.trainer import data_parallel_step
    from netcl.nn.functional import cross_entropy
    from netcl.optim.sgd import SGD

    queues = DeviceManager(cl.get_platforms()[0].get_devices()[:count]).get_queues()
    replicas = [[Parameter.from_host(queue, array) for array in weights()] for queue in queues]
    optimizers = [SGD(replica, lr=LR) for replica in replicas]

    def forward_fn(queue, x, y, params):
        with ag.Tape() as tape:
            w = [ag.tensor(param, requires_grad=True) for param in params]
            h = ag.tensor(Tensor.from_host(queue, np.ascontiguousarray(x)))
            h = ag.avg_pool2d(ag.relu(ag.conv2d(h, w[0], w[1], tape=tape), tape=tape), 2, 2, tape=tape)
            h = ag.avg_pool2d(ag.relu(ag.conv2d(h, w[2], w[3], tape=tape), tape=tape), 2, 2, tape=tape)
            h = ag.flatten(h, (len(x), 800), tape=tape)
            h = ag.relu(ag.bias_add(ag.matmul_op(h, w[4], tape=tape), w[5], tape=tape), tape=tape)
            h = ag.bias_add(ag.matmul_op(h, w[6], tape=tape), w[7], tape=tape)
            target = ag.tensor(Tensor.from_host(queue, np.eye(10, dtype=np.float32)[y]))
            return cross_entropy(h, target, tape=tape), tape

    x, y = data()
    seconds = []
    for number in range(STEPS):
        rows = slice(number * BATCH, (number + 1) * BATCH)
        began = time.perf_counter()
        data_parallel_step(forward_fn, replicas, optimizers, (x[rows], y[rows]))
        for queue in queues:
            queue.finish()
        seconds.append(time.perf_counter() - began)
    arrays = [[param.to_host() for param in replica] for replica in replicas]
    equal = all(
        np.array_equal(one, other) for replica in arrays[1:] for one, other in zip(arrays[0], replica, strict=True)
    )
    told(arrays[0], seconds, equal)


def run(python, by, kind, count):
    """One job in a process of its own; None where it fails, with the last line of its error."""
    environment = os.environ | {
        "DEV": kind, "POCL_DEVICES": "pthread pthread pthread", "NUM_CPU_THREADS": "1", "PARALLEL": "0",
        "PYOPENCL_NO_CACHE": "0",
    }  # fmt: skip
    names = [kind if number == 0 else f"{kind}:{number}" for number in range(count)]
    command = [python, __file__, "--job", by, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
    return json.loads(done.stdout.splitlines()[-1])


def rows(kinds, netcl):
    """Rows of the table, each as soon as it is measured."""
    for kind in kinds:
        plain = None
        ways = [("phalanx", sys.executable), ("shard", sys.executable)]
        ways += [("netcl", netcl)] if kind == "CL" and netcl else []
        for by, python in [("shard", sys.executable), *((by, python) for by, python in ways)]:
            for count in (1,) if plain is None else (1, 2, 3):
                if by == "shard" and count == 1 and plain is not None:
                    continue
                found = run(python, by, kind, count)
                name = "plain loop" if plain is None else by
                if isinstance(found, str):
                    yield [kind, str(count), name, "-", "-", found, "-"]
                    continue
                arrays = [np.array(array, np.float32) for array in found["weights"]]
                plain = arrays if plain is None else plain
                difference = max(float(np.abs(one - other).max()) for one, other in zip(plain, arrays, strict=True))
                yield [
                    kind,
                    str(count),
                    name,
                    f"{found['ms']:.0f}",
                    f"`{found['bits']}`",
                    f"{difference:.1e}",
                    str(found["equal"]),
                ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["CPU", "CL"])
    parser.add_argument("--netcl-python")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--job", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        by, *devices = arguments.job
        {"phalanx": by_phalanx, "shard": by_shard, "netcl": lambda names: by_netcl(len(names))}[by](devices)
        return
    lines = [f"| {' | '.join(HEADER)} |", "|" + " --- |" * len(HEADER)]
    for row in rows(arguments.kinds, arguments.netcl_python):
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    if arguments.save:
        about = (__doc__ or "").strip().split("\n\n")
        python, day = platform.python_version(), time.strftime("%Y-%m-%d")
        machine = f"{platform.machine()}, {os.cpu_count()} cores shared with other work, Python {python}, {day}."
        text = "\n\n".join(["# Open devices", about[0], about[2], machine, "\n".join(lines)])
        (RESULTS / "open_devices.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
