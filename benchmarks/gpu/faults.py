"""What happens to runs on a device: resumed, killed, out of memory, refused; what is computed beside training."""

import functools
import importlib.util
import json
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import common
import loops
import recipes
import torch
from common import Case, Outcome
from recipes import CONV, IMAGES, MLP
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.callbacks import EMA
from phalanx.proof.verify import certify, check_certificate
from tests.families import ADAMW

STEPS, DECAY = 6, 0.9
OPTIMIZERS = {
    "AdamW, fused": ADAMW,
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "NAdam": torch.optim.NAdam,
}


def conv(**more: Any) -> phalanx.Recipe:
    """Convolutions with BatchNorm and dropout, AdamW, six steps."""
    return recipes.recipe(**{"make_model": recipes.conv, "data": IMAGES, "steps": STEPS, "optimizer": ADAMW, **more})


def once(folder: str, name: str) -> bool:
    """True for the first who asks, in whatever process."""
    try:
        os.close(os.open(pathlib.Path(folder, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


# ---- going on


def resumed(optimizer: Any) -> Outcome:
    """Two steps, two more by two workers, two more: the loop by hand that never stopped."""
    wanted = loops.hand(conv(optimizer=optimizer))
    with tempfile.TemporaryDirectory() as folder:
        loops.answer(conv(optimizer=optimizer, steps=2), run_dir=folder)
        loops.answer(conv(optimizer=optimizer, steps=4), 2, run_dir=folder)
        return loops.compared(wanted, loops.answer(conv(optimizer=optimizer), run_dir=folder))


class Killing(nn.Module):
    """A model whose worker is killed once, in the forward pass of a step; never in the process ``caller``."""

    def __init__(self, folder: str, caller: int) -> None:
        super().__init__()
        self.body, self.folder, self.caller = recipes.conv(), folder, caller

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.caller and phalanx.current_step() == 2 and once(self.folder, "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.body(x)


def killed(workers: int) -> Outcome:
    """SIGKILL of a worker in the middle: another takes its place, to the bits of a run without it."""
    with tempfile.TemporaryDirectory() as folder:
        made = conv(make_model=functools.partial(Killing, folder, os.getpid()))
        wanted = loops.hand(made)
        with loops.sharing(made, workers) as shared:
            devices = loops.names(workers)
            result = shared.train(devices=devices, engine="processes", progress=False)
        if not pathlib.Path(folder, "killed").exists():
            return Outcome("failed", "no worker was killed")
        outcome = loops.compared(wanted, (result.digest, result.loss_history))
        return outcome._replace(note=outcome.note or f"incidents: {[each.kind for each in result.incidents]}")


def hanging() -> Outcome:
    """SIGKILL of one of two workers on one GPU while the other's collectives hang: right, and how long it takes."""
    if common.DEVICE.type != "cuda" or not importlib.util.find_spec("cuda.bindings"):
        return Outcome("not tried", "it needs CUDA and cuda-bindings")
    with tempfile.TemporaryDirectory() as folder:
        made = conv(make_model=functools.partial(Killing, folder, os.getpid()))
        wanted = loops.hand(made)
        with loops.sharing(made, 2, loops.Asynchronous) as shared:
            result = shared.train(devices=loops.names(2), progress=False, deadline_seconds=120)
        outcome = loops.compared(wanted, (result.digest, result.loss_history))
        lasted = [each.seconds for each in result.incidents if each.kind == "replaced"]
        return outcome._replace(note=outcome.note or f"on after {max(lasted, default=0):.1f} s; to be below 5")


class Terminated:
    """A callback that sends SIGTERM to its own process, once."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def step(self, report: Any) -> None:
        if report.step == 2 and once(self.folder, "told"):
            os.kill(os.getpid(), signal.SIGTERM)


def terminated(workers: int) -> Outcome:
    """SIGTERM saves and ends the run; the same call goes on."""
    wanted = loops.hand(conv())
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as notes:
        given = {"run_dir": folder, "callbacks": [Terminated(notes)]}
        try:
            loops.trained(conv(), workers, **given)
            return Outcome("failed", "SIGTERM did not end the run")
        except phalanx.Preempted:
            result = loops.trained(conv(), workers, **given)
        outcome = loops.compared(wanted, (result.digest, result.loss_history))
        return outcome._replace(note=outcome.note or f"went on from step {result.resumed_from}")


# ---- errors


class Hungry(nn.Linear):
    """Asks for more memory than there is."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.flatten(1)) + torch.empty(1 << 42, device=input.device)[:1]


class Pooled(nn.Module):
    """Its pooling has no deterministic backward pass on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.adaptive_avg_pool2d(x, 2).flatten(1))


def spoiled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target) * torch.nan


def raised(kind: type[BaseException], words: str, do: Callable[[], object]) -> Outcome:
    """Whether this error comes, with these words in its text."""
    try:
        do()
    except kind as error:
        text = " ".join(str(error).split())
        return Outcome("same" if words in text else "different", f"{type(error).__name__}: {text[:160]}")
    return Outcome("failed", f"no {kind.__name__}")


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * recipes.SIZE**2, 10))


def hungry() -> nn.Module:
    return Hungry(3 * recipes.SIZE**2, 10)


def short_of_memory() -> Outcome:
    """Out of memory is told as such, and the next run in this process is right."""
    first = raised(phalanx.RunError, "out of memory on", lambda: loops.trained(conv(make_model=hungry)))
    common.free()
    outcome = loops.compared(loops.hand(CONV), loops.answer(CONV))
    return first if first.verdict != "same" or outcome.verdict == "same" else outcome


def refused() -> Outcome:
    """An operation without a deterministic kernel is refused by name."""
    pooled = conv(make_model=Pooled)
    return raised(phalanx.UsageError, "has no deterministic kernel", lambda: loops.trained(pooled))


def allowed() -> Outcome:
    """The same, allowed, runs."""
    result = loops.trained(conv(make_model=Pooled), nondeterministic="allow")
    return Outcome("same", f"{result.steps} steps")


def not_finite() -> Outcome:
    """A loss that is NaN ends the run before the update."""
    return raised(phalanx.NonFiniteError, "", lambda: loops.trained(conv(make_model=flat, loss_fn=spoiled)))


def out_of_range() -> Outcome:
    """An index that an embedding does not have, in a process of its own: afterwards the device is lost to it."""
    found = common.apart(str(pathlib.Path(__file__).with_name("bits.py")), "out_of_range")
    return Outcome(found["verdict"], found["note"])


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(40, 3))


def out_of_range_here() -> Outcome:
    data = torch.full((48, 10), 12), torch.zeros(48, dtype=torch.int64)
    made = recipes.recipe(embedded, data)
    return raised(phalanx.RunError, "An index out of range", lambda: loops.trained(made))


# ---- beside training


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def looked(workers: int) -> tuple[Any, ...]:
    """What an evaluation, predictions and a batch that is brought come to between steps."""
    with loops.sharing(CONV, workers) as shared, shared.start(**loops.options(workers), progress=False) as run:
        next(run)
        value = run.evaluate(accuracy, IMAGES, batch_size=recipes.BATCH)
        predicted = run.predict(IMAGES, batch_size=recipes.BATCH)
        loss = run.step(tuple(column[: recipes.BATCH] for column in IMAGES))
        return value, predicted.sum().item(), loss, run.result().digest


def evaluated() -> Outcome:
    """An evaluation and predictions in the middle: two workers, one, and the model by hand."""
    one, two = looked(1), looked(2)
    result = loops.trained(CONV)
    with common.deterministic(on=common.DEVICE.type != "cpu"), torch.no_grad():
        model = result.model.to(common.DEVICE).eval()
        pieces = [model(piece.to(common.DEVICE)).cpu() for piece in IMAGES[0].split(recipes.BATCH)]
    if not torch.equal(torch.cat(pieces), result.predict(IMAGES, batch_size=recipes.BATCH)):
        return Outcome("different", "result.predict and the model by hand")
    return common.SAME if repr(one) == repr(two) else Outcome("different", f"one {one}, two {two}")


def exponential(workers: int) -> Outcome:
    """The average of weights has the bits of torch's AveragedModel."""
    ema = EMA(DECAY)
    loops.trained(CONV, workers, callbacks=[ema])
    wanted = loops.averaged(CONV, DECAY)
    came = {name: value.cpu() for name, value in (ema.averaged or {}).items()}
    unlike = [name for name, value in wanted.items() if name not in came or not torch.equal(value, came[name])]
    return Outcome("different", f"{unlike}") if unlike else common.SAME


def audited(workers: int) -> Outcome:
    """Each step has a replica computed twice, and nothing differs."""
    result = loops.trained(CONV, workers, audit=1.0)
    outcome = loops.compared(loops.hand(CONV), (result.digest, result.loss_history))
    return outcome._replace(note=outcome.note or f"{result.audited} audited")


def verified() -> Outcome:
    """The chain of a run is computed again on the device, certified, and trained again from the certificate."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name, "run")
        loops.trained(MLP.recipe(4), run_dir=folder)
        verdict = phalanx.verify(MLP.recipe(4), folder, progress=False)
        certified, claim = certify(MLP.recipe(4), folder)
        path = pathlib.Path(name, "certificate.json")
        path.write_text(json.dumps(claim))
        again = check_certificate(path, MLP.recipe(4))
    statuses = verdict.status, certified.status, again.status
    return Outcome("different" if any(statuses) else "same", f"{statuses}: {again.text[:120]}")


def cases() -> list[Case]:
    """All of them."""
    shown: dict[str, Callable[[], Outcome]] = {
        f"resumed, {name}": functools.partial(resumed, optimizer) for name, optimizer in OPTIMIZERS.items()
    }
    for workers in (1, 2):
        by = f"{workers} worker{'s' * (workers > 1)}"
        shown |= {f"SIGKILL of a worker, {by}": functools.partial(killed, workers)}
        shown |= {f"SIGTERM and going on, {by}": functools.partial(terminated, workers)}
        shown |= {f"EMA, {by}": functools.partial(exponential, workers)}
        shown |= {f"audit, {by}": functools.partial(audited, workers)}
    shown |= {"evaluation and predict": evaluated, "verify and certify": verified, "NaN loss": not_finite}
    shown |= {"operation refused": refused, "operation allowed": allowed}
    shown |= {"out of memory, and a run after it": short_of_memory, "index out of range": out_of_range}
    if common.DEVICE.type != "cuda":
        missing = Outcome("not tried", "it needs a GPU")
        for name in ("operation refused", "out of memory, and a run after it", "index out of range"):
            shown[name] = functools.partial(lambda outcome: outcome, missing)
    shown["SIGKILL, collectives hang"] = hanging
    return [Case("runs", name, do) for name, do in shown.items()]


def world(replicas: int) -> Outcome:
    """Two processes of a world, each with a worker on the device: the loop by hand."""
    made = conv(replicas=replicas)
    script = str(pathlib.Path(__file__).with_name("bits.py"))
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
        script,
    ]
    digest = common.alone([sys.executable, *command, "--apart", "world", str(replicas)], 140, OMP_NUM_THREADS="1")
    wanted = loops.hand(made)[0]
    return common.SAME if digest == wanted else Outcome("different", f"digests {wanted[:10]} and {digest[:10]}")


def world_here(replicas: int) -> str | None:
    """A process of that world; the first one has the digest."""
    made = conv(replicas=replicas)
    device = f"cuda:{os.environ['LOCAL_RANK']}" if common.device_count() > 1 else str(common.DEVICE)
    if common.device_count() == 1:
        made = conv(replicas=replicas, make_model=loops.OverGloo(recipes.conv))
    device = "cpu" if common.DEVICE.type == "cpu" else device
    digest = made.train(devices=device, progress=False).digest
    return digest if os.environ["RANK"] == "0" else None
