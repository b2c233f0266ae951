"""One optimizer step of jax recipes: phalanx beside loops that jax users write, in interleaved rounds.

    python benchmarks/step.py --framework jax

Columns: a compiled step with 1 thread and with all cores; the same over a batch that is sharded over 2 host devices,
parameters replicated, arguments donated; phalanx with 2 worker processes and R = 2 or 8 replicas; inline, R = 1.
Every column gets a fresh process.
"""

import itertools
import json
import os
import time

COLUMNS = ("jit, 1 thread", "jit, all cores", "sharded jit", "W=2", "W=2 R=8", "R=1")
ONCE = ("R=2", "R=8")
NAMES = ("tiny", "lenet", "mlp")
DEVICES = 2
METHOD = """Rounds: {rounds}, interleaved, a fresh process per column and round. Times are medians, ratios are medians
of each round's ratio. Everything is timed after warm steps, a fifth as many ({steps} are timed); the loss is read
after each step. AdamW of optax, whole batches as in the torch table. sharded jit: one compiled step, donated, its batch
sharded over 2 host devices, parameters replicated."""


def measure(column: str, name: str, *, quick: bool) -> dict:
    """Facts of one column, in this process; jax is not imported yet."""
    cores = os.cpu_count() or 1
    threads = {"jit, all cores": cores, "sharded jit": cores}.get(column, 1)
    os.environ["NPROC"] = str(threads)
    if column == "sharded jit":
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import models_jax

    case = models_jax.case(name)
    case = case.shortened() if quick else case
    if "=" in column:
        return ours(case, models_jax.FORWARD[name][1], column)
    return loop(case, models_jax.FORWARD[name][1], sharded=column == "sharded jit")


def ours(case, forward, column: str) -> dict:
    """A whole run."""
    import models_jax

    import phalanx

    workers = 2 if column.startswith("W=2") else 1
    replicas = 2 if column == "W=2" else int(column[-1])
    recipe = phalanx.Recipe(
        case.make_model, (case.x, case.y), case.loss_fn, forward, replicas=replicas, batch_size=case.batch_size,
        steps=case.warm_up + case.steps, optimizer=models_jax.OPTIMIZER,
    )  # fmt: skip
    engine = "inline" if workers == 1 else "processes"
    with recipe.start(workers=workers, engine=engine, progress=False) as run:
        for _ in itertools.islice(run, case.warm_up):
            pass
        began = time.perf_counter()
        run.finish()
        ended = time.perf_counter()
        return {"seconds": (ended - began) / case.steps, "digest": run.result().digest}


def loop(case, forward, *, sharded: bool) -> dict:
    """The loop that users write: one compiled step with donated arguments."""
    import jax
    import models_jax
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    def step(params, state, x, y):
        loss, gradient = jax.value_and_grad(lambda p: case.loss_fn(forward(p, x), y))(params)
        updates, state = models_jax.OPTIMIZER.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = case.make_model(jax.random.key(0))
    state = models_jax.OPTIMIZER.init(params)
    over = None
    if sharded:
        mesh = Mesh(np.array(jax.devices()), ("batch",))
        over = NamedSharding(mesh, PartitionSpec("batch"))
        params, state = jax.device_put((params, state), NamedSharding(mesh, PartitionSpec()))
    compiled = jax.jit(step, donate_argnums=(0, 1))
    began = 0.0
    for number, chosen in enumerate(itertools.islice(shuffled(case), case.warm_up + case.steps)):
        if number == case.warm_up:
            began = time.perf_counter()
        x, y = case.x[chosen], case.y[chosen]
        if sharded:
            x, y = jax.device_put((x[: len(x) // DEVICES * DEVICES], y[: len(y) // DEVICES * DEVICES]), over)
        params, state, loss = compiled(params, state, x, y)
        float(loss)
    return {"seconds": (time.perf_counter() - began) / case.steps}


def shuffled(case):
    """Indices of one batch after another."""
    import numpy as np

    random = np.random.default_rng(0)
    while True:
        order = random.permutation(len(case.x))
        yield from np.split(order, range(case.batch_size, len(order), case.batch_size))


def main(arguments) -> None:
    """Measure, print, and write ``results/step_jax.*`` if asked to."""
    if arguments.column:
        print(json.dumps(measure(arguments.column, arguments.model, quick=arguments.quick)))
        return
    import step
    import tqdm

    names = [arguments.model] if arguments.model else NAMES
    rounds = 1 if arguments.quick else arguments.rounds
    measured = {}
    with tqdm.tqdm(total=len(names) * (rounds * len(COLUMNS) + len(ONCE)), unit="process") as bar:
        for name in names:
            facts = measured[name] = {column: [] for column in (*COLUMNS, *ONCE)}
            for number in range(rounds):
                columns = (*COLUMNS, *ONCE) if number == 0 else COLUMNS
                for column in columns if number % 2 == 0 else reversed(columns):
                    bar.set_description(f"{name}, {column}")
                    found = step.measured_apart(column, name, "--framework", "jax", quick=arguments.quick)
                    facts[column].append(found)
                    bar.update()
            for one, other in (("W=2", "R=2"), ("W=2 R=8", "R=8")):
                if {run["digest"] for run in facts[one]} != {run["digest"] for run in facts[other]}:
                    raise SystemExit(f"WRONG: {name}, {one} and {other} ended in different digests")
    report = text(measured, rounds)
    print(report)
    if arguments.save:
        step.save("step_jax", report, measured)


def text(measured: dict, rounds: int) -> str:
    """The report."""
    import models
    import step

    header = ["model", *(f"{column}, ms" for column in COLUMNS), "sharded / W=2", "sharded / W=2 R=8", "digest, R=2"]
    rows = []
    for name, facts in measured.items():
        cells = [step.spelled(step.milliseconds(facts, column)) for column in COLUMNS]
        ratios = [f"**{step.ratio(facts, 'sharded jit', ours):.2f}**" for ours in ("W=2", "W=2 R=8")]
        rows.append([name, *cells, *ratios, f"`{facts['W=2'][0]['digest'][:12]}`"])
    steps = ", ".join(f"{name} {models.case(name).steps} steps" for name in measured)
    return (
        f"# One step in jax\n\n{step.circumstances('step.py')}\n\n{METHOD.format(rounds=rounds, steps=steps)}\n\n"
        f"{step.markdown(header, rows)}\n\nDigests were equal for 1 (inline) and 2 workers, in every round.\n"
    )
