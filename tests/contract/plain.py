"""A fourth framework in numpy alone, as another package would bring it: lines through points, and no autograd."""

import functools
import math

import numpy as np

from phalanx.definition import generators
from phalanx.definition.batches import as_batch
from phalanx.definition.data import Columns
from phalanx.definition.digest import Entry, digest_of
from phalanx.frameworks import arithmetic
from phalanx.frameworks.record import Record, Unshared, stored
from phalanx.seams.records import Captured, Computed, Exported
from phalanx.surroundings.turns import Reentrant


class Line:
    """A model: weights, and the gradient of its mean squared error."""

    def __init__(self):
        self.w = np.random.standard_normal(3)

    def gradient(self, x, y):
        """Loss and gradient of a batch."""
        error = x @ self.w - y
        return float((error**2).mean()), [2 * x.T @ error / len(x)]


class Plain:
    """Implements ``seams.Framework``."""

    name, lanes, told, arithmetic = "plain", None, (0.0, 0.0), arithmetic
    sharing = Unshared("the model is plain, which computes in one process; leave workers out")

    def __init__(self, made):
        self._definition, self._model = made.definition, made.model
        self.lr = made.definition.lr
        self.environment = Reentrant(generators.kept())

    def opened(self, source):
        """Columns as numpy arrays."""
        return Columns(tuple(map(np.asarray, source.arrays)), source.rebuild)

    def gradients(self, todo, watch=None):
        """One after the other."""
        for _, key, share, *_ in todo:
            samples = share.read(share.samples)
            generators.seed(key)
            yield Computed(*self._computed(*as_batch(samples, share, self._definition.collate_fn)), [])

    def _computed(self, x, y):
        loss, gradient = self._model.gradient(x, y)
        return loss, None, gradient

    def norm(self, gradient):
        """Of all of it."""
        return arithmetic.norm(gradient)

    def update(self, step, gradient, buffers):
        """Gradient descent, clipped."""
        norm = self.norm(gradient)
        factor = 1.0 if norm <= self._definition.max_norm else self._definition.max_norm / norm
        self._model.w = self._model.w - self.lr * factor * gradient[0]

    def rewind(self):
        """Nothing is left behind."""

    def schedule(self, value, epoch=None):
        """There is none."""

    def measure(self, metrics, key, share, weights):
        """Of one chunk."""
        x, y = as_batch(share.read(share.samples), share, self._definition.collate_fn)
        return functools.partial(metrics.read, metrics.see(x @ self._model.w, y, np.copy), len(share.samples))

    def export(self, steps, *, copy, digest=True):
        """A model of its own."""
        other = Line()
        other.w = self._model.w.copy()
        return Exported(lambda: other, {"w": other.w}, RECORD.digest(other, None, steps, ()))

    def capture(self, *, copy):
        """Its weights."""
        return Captured({"w": stored(self._model.w)}, {}, {"framework": "plain"})

    def adopt(self, state):
        """The same again."""
        self._model.w = RECORD.tensor_of(state.weights["w"])


class PlainRecord(Record):
    """See ``frameworks.record.Record``."""

    name, module, returns = "plain", __name__, "a Line"

    def recognises(self, model):
        """By its class."""
        return isinstance(model, Line)

    def open(self, made):
        """In this process."""
        return Plain(made)

    def entries(self, model, optimizer, state):
        """Its weights."""
        return [Entry("parameter", "w", "float64", model.w.shape, model.w.tobytes())]


RECORD = PlainRecord()


def by_hand(x, y, replicas, batch_size, steps, lr, seed=0):
    """The digest of a loop over shares, for a plan without shuffling."""
    np.random.seed(seed)
    w = np.random.standard_normal(3)
    for step in range(steps):
        at = np.arange(step * batch_size, (step + 1) * batch_size) % len(x)
        shares = np.array_split(at, replicas)
        gradients = [2 * x[s].T @ (x[s] @ w - y[s]) / len(s) * (len(s) / batch_size * replicas) for s in shares]
        while len(gradients) > 1:
            pairs = zip(gradients[::2], gradients[1::2], strict=True)
            gradients = [left + right for left, right in pairs]
        w = w - lr * (gradients[0] / replicas)
    assert math.isfinite(w.sum())
    return digest_of([Entry("parameter", "w", "float64", w.shape, w.tobytes())], steps)
