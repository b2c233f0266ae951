"""One recipe on 1, 2 and 4 workers: the same digest, a lambda for a model, no main guard."""

import torch

import phalanx

x = torch.randn(4096, 20, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] * x[:, 1] > 0).long()


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


recipe = phalanx.Recipe(
    lambda: torch.nn.Sequential(torch.nn.Linear(20, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2)),
    (x, y),
    torch.nn.functional.cross_entropy,
    replicas=4,
    batch_size=256,
    epochs=3,
)
for workers in (1, 2, 4):
    with recipe.start(workers=workers) as run:
        for report in run:  # while you hold a report, the state is the one after its step
            if report.step == 20:
                print(f"after step 20: accuracy {run.evaluate(accuracy, (x, y)):.3f}, workers {run.worker_pids}")
    result = run.result()
    print(f"{workers} workers: {result.digest[:16]}, {result.seconds / result.steps * 1e3:.2f} ms a step")
phalanx.close()  # ends the process that is kept to start workers; the interpreter's end does so too
