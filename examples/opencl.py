"""A model of tinygrad's on two OpenCL devices, or on the CPU where there are none: any number gives the same digest."""

import functools

import numpy as np
from sklearn.datasets import load_digits

import phalanx

try:
    from tinygrad import nn
except ImportError:
    raise SystemExit("this example needs tinygrad: pip install 'phalanx[tinygrad]'") from None

data = load_digits()
x, y = (data.data / 16).astype(np.float32), data.target.astype(np.int32)


class Net:
    def __init__(self):
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)

    def __call__(self, x):
        return self.last(self.first(x).relu())


recipe = phalanx.Recipe(
    Net,
    (x[:1280], y[:1280]),
    lambda output, target: output.sparse_categorical_crossentropy(target),
    replicas=4,
    batch_size=128,
    epochs=1,
    optimizer=functools.partial(nn.optim.AdamW, lr=3e-3),
)

if __name__ == "__main__":
    metric = lambda output, target: (output.argmax(1) == target).float().mean()  # noqa: E731
    for devices in (["CL:0"], ["CL:0", "CL:1"], ["CPU"], ["CPU", "CPU:1"]):
        try:
            result = recipe.train(devices=devices, evaluation=phalanx.Evaluation(metric, (x[1280:], y[1280:])))
        except phalanx.UsageError as error:  # it says what to install
            print(error)
        else:
            print(f"{', '.join(devices):12} {result.digest[:16]}  accuracy {result.metric_history[-1].value:.3f}")
            if len(devices) == 2:
                break
