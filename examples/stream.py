"""Lines of files as a stream: shuffled in a buffer, and resumed in the middle of an epoch."""

import json
import pathlib
import random
import tempfile

import sklearn.datasets
import torch
from torch import nn

import phalanx


def lines(folder):
    """Samples, line by line; the generators that this draws from are seeded anew for each epoch."""
    files = sorted(pathlib.Path(folder).glob("*.jsonl"))
    random.shuffle(files)
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            yield torch.tensor(row["pixels"]) / 16, row["digit"]


def recipe(folder):
    """Three epochs over all lines; the next sample is drawn from 500."""
    return phalanx.Recipe(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)),
        phalanx.Stream(lambda: lines(folder), shuffle_buffer=500),
        nn.functional.cross_entropy,
        batch_size=64,
        epochs=3,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        data = sklearn.datasets.load_digits()
        rows = [
            json.dumps({"pixels": x.tolist(), "digit": int(y)}) for x, y in zip(data.data, data.target, strict=True)
        ]
        for number in range(6):
            pathlib.Path(folder, f"part-{number}.jsonl").write_text("\n".join(rows[number::6]))

        undisturbed = recipe(folder).train(workers=1)
        with recipe(folder).start(workers=2, run_dir=f"{folder}/run") as run:
            for report in run:
                if report.step == 40:  # in the second epoch
                    break
        resumed = recipe(folder).train(workers=2, run_dir=f"{folder}/run")
        print(f"loss {undisturbed.loss_history[0]:.3f} -> {undisturbed.loss:.3f} after {undisturbed.steps} steps")
        print(f"went on from step {resumed.resumed_from}; the same bits: {resumed.digest == undisturbed.digest}")
