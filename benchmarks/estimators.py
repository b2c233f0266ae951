"""What `phalanx.integrations.sklearn.Classifier` costs, beside a plain loop in torch and MLPClassifier.

    python benchmarks/estimators.py              # a minute
    python benchmarks/estimators.py --save       # writes results/estimators.md

Digits, a hidden layer of 100, Adam, batches of 32, 20 epochs, one thread each. Rounds are interleaved, in one process;
seconds are those of the processor. A call of `predict` is for one row, and counts beside the model's own pass.
"""

import argparse
import pathlib
import statistics
import sys
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import numpy as np
import step
import torch
import tqdm
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier
from torch import nn

from phalanx.integrations.sklearn import Classifier

RESULTS = pathlib.Path(__file__).parent / "results" / "estimators.md"
EPOCHS, BATCH = 20, 32
PLAIN, OTHER = "plain loop", "MLPClassifier"
X, Y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)


def plain() -> None:
    """As a tutorial has it, with data in memory."""
    model, x, y = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)), torch.tensor(X), torch.tensor(Y)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def fit(replicas: int) -> None:
    """The estimator."""
    Classifier(replicas=replicas, epochs=EPOCHS, batch_size=BATCH).fit(X, Y)


WAYS = {
    PLAIN: plain,
    OTHER: lambda: MLPClassifier(max_iter=EPOCHS, batch_size=BATCH, n_iter_no_change=EPOCHS).fit(X, Y),
    "Classifier(replicas=1)": lambda: fit(1),
    "Classifier(replicas=4)": lambda: fit(4),
}


def measured(rounds: int) -> dict[str, list[float]]:
    """Processor seconds of a fit, by the way."""
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in tqdm.trange(rounds):
        for name, way in WAYS.items():
            began = time.process_time()
            way()
            found[name].append(time.process_time() - began)
    return found


def predicting(calls: int = 30) -> float:
    """Milliseconds of a call of `predict` for one row, beside the model."""
    known = Classifier(replicas=1, epochs=1).fit(X, Y)
    seconds, row = [], torch.tensor(X[:1])
    for _ in range(calls):
        began = time.perf_counter()
        known.predict(X[:1])
        between = time.perf_counter()
        with torch.no_grad():
            known.model_(row)
        seconds.append(2 * between - began - time.perf_counter())
    return statistics.median(seconds) * 1e3


def report(found: dict[str, list[float]], milliseconds: float) -> str:
    """The table; ratios are of each round."""
    rows = []
    for name, seconds in found.items():
        pairs = [zip(seconds, found[other], strict=True) for other in (PLAIN, OTHER)]
        ratios = [statistics.median(one / other for one, other in pair) for pair in pairs]
        rows.append([name, f"{statistics.median(seconds):.2f}", *(f"{ratio:.1f}" for ratio in ratios)])
    table = step.markdown(["fit", "processor seconds", f"over the {PLAIN}", f"over {OTHER}"], rows)
    method = f"Digits, {EPOCHS} epochs, one thread. Rounds: {len(found[PLAIN])}, interleaved; medians."
    call = f"A call of `predict` for one row: {milliseconds:.1f} ms beside the model's own pass."
    return f"# Estimators\n\n{step.circumstances('estimators.py')}\n\n{method}\n\n{table}\n\n{call}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # MLPClassifier has not converged
    text = report(measured(given.rounds), predicting())
    print(text)
    if given.save:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
