"""The job in phalanx."""

from parts import make_model, test, train
from torch.nn.functional import cross_entropy

import phalanx
from phalanx.callbacks import EMA, EarlyStopping, Log, SaveBest


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


recipe = phalanx.Recipe(make_model, train, cross_entropy, batch_size=64, replicas=8, epochs=100, precision="bfloat16")
result = recipe.train(
    run_dir="runs/phalanx",
    evaluation=phalanx.Evaluation(accuracy, test),
    callbacks=[EarlyStopping("accuracy", patience=5), SaveBest("accuracy"), EMA(0.99), Log("csv")],
)
print("suggested rate", phalanx.find_lr(recipe).suggestion)
print("best accuracy", result.best.value, "after", result.best.steps, "steps, of", result.steps, result.digest[:12])
