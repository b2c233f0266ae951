"""Estimators as scikit-learn has them: each ``fit`` is one run of a recipe, with the recipe's bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
from torch import nn

import phalanx
from phalanx.callbacks import EarlyStopping, SaveBest
from phalanx.definition import checks

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_array, check_random_state, column_or_1d, compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise phalanx.UsageError(
        f"scikit-learn 1.6 or later is needed ({error}): pip install 'phalanx[sklearn]'"
    ) from error

HIDDEN, HELD_OUT = (100,), "validation_loss"
FIELDS = ("replicas", "epochs", "batch_size", "lr", "optimizer", "scheduler", "schedule_every", "max_norm", "shuffle",
          "drop_last", "threads")  # fmt: skip
OPTIONS = "workers", "run_dir", "progress", "callbacks"  # of train(), as FIELDS are the recipe's
PLACES = {  # of what MLPClassifier and skorch have under other names
    "optimizer=functools.partial(AdamW, lr=1e-3, weight_decay=0.1)": "solver alpha optimizer__lr weight_decay momentum",
    "make_model=functools.partial(Net, hidden=20)": "module model activation device warm_start module__hidden",
    "early_stopping=True, with validation_fraction= and n_iter_no_change=": "train_split eval_set patience tol",
    "loss_fn=functools.partial(F.huber_loss, delta=2.0)": "criterion loss",
    "workers=, never part of the answer": "n_jobs num_workers",
    "lr=, or scheduler=": "learning_rate learning_rate_init",
    "epochs=": "max_iter max_epochs", "random_state=": "seed", "progress=": "verbose",
}  # fmt: skip
NAMES = {name: f"here it is {place}" for place, names in PLACES.items() for name in names.split()}


def _loss(loss_fn: Callable[..., Any], outputs: int, output: Any, target: Any) -> Any:
    """The mean loss of a share; of weighted samples, the weighted mean and the sum of the weights."""
    y, *weights = target
    if getattr(output, "shape", None) != (len(y), outputs):
        returned, wanted = checks.described(output), f"the shape {(len(y), outputs)}, which y needs"
        raise phalanx.UsageError(
            f"the model of make_model returned {returned}, not {wanted}; let it have n_outputs outputs"
        )
    if not weights:
        return loss_fn(output, y)
    each = loss_fn(output, y, reduction="none").reshape(len(y), -1).mean(1)
    return (each * weights[0]).sum() / weights[0].sum(), weights[0].sum()


@dataclass(eq=False, repr=False)
class _Network(BaseEstimator):
    """What both share. A dataclass has the constructor that scikit-learn wants: one that assigns, and no more."""

    _usual_loss: ClassVar[Any] = staticmethod(nn.functional.mse_loss)
    class_weight: ClassVar[Any] = None  # a Regressor has none
    _target: ClassVar[Callable[..., tuple[Any, int]]]  # of y: the column, and how many outputs the model has
    make_model: Any = None
    replicas: int = 4
    _: KW_ONLY
    hidden_layer_sizes: Any = HIDDEN
    loss_fn: Any = None
    epochs: int = 20
    batch_size: int = 32
    lr: float = 1e-3
    optimizer: Any = None
    scheduler: Any = None
    schedule_every: str | None = None
    max_norm: float = np.inf
    shuffle: bool = True
    drop_last: bool = False
    threads: int = 1
    random_state: Any = 0
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    workers: int | str = 1
    run_dir: Any = None
    progress: bool | str = False
    callbacks: Sequence[Any] = ()

    def set_params(self, **params: Any) -> Self:
        """As scikit-learn's."""
        type(self)(**params)  # refuses names that it does not know, and says what they are called here
        return super().set_params(**params)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803  scikit-learn's name
        """Train a new model.

        Parameters
        ----------
        X, y, sample_weight : arrays of shape (n_samples, n_features), (n_samples,) and (n_samples,)
            Cast to float32, but for classes. A Regressor takes y of shape (n_samples, n_outputs), too. With weights the
            loss of a batch is the weighted mean. Samples of weight 0 are left out before all else.

        Raises
        ------
        UsageError
            An argument or parameter is wrong. It is a ValueError, too. ``Recipe.train`` says what else is raised.
        """
        x, y = validate_data(self, X, y, dtype=np.float32, order="C", multi_output=True)
        columns: list[Any] = [x, y, *self._weights(sample_weight, y)]
        if len(columns) > 2:
            columns = [column[columns[2] > 0] for column in columns]
        columns[1], outputs = self._target(columns[1])
        self._train(columns, outputs)
        return self

    def _weights(self, sample_weight: Any, y: Any) -> list[Any]:
        if sample_weight is None and self.class_weight is None:
            return []
        weight = np.ones(len(y)) if sample_weight is None else sample_weight
        weight = check_array(weight, ensure_2d=False, dtype="float32", input_name="sample_weight")
        weight, here = weight.astype(float), weight > 0
        if self.class_weight is not None and here.any() and weight.shape == (len(y),):
            weight[here] *= compute_sample_weight(self.class_weight, y[here])
        if weight.shape != (len(y),) or weight.min() < 0 or not weight.any():
            found = f"has shape {weight.shape} and values from {weight.min()} to {weight.max()}, with class_weight"
            raise phalanx.UsageError(f"sample_weight {found}; give {len(y)} numbers of at least 0, not zero for all")
        return [weight.astype(np.float32)]

    def _train(self, columns: Sequence[Any], outputs: int) -> None:
        """Run the recipe, and keep what a fitted estimator has. The result is not kept, as it holds the data."""
        seed = self.random_state
        seed = seed if isinstance(seed, (int, np.integer)) else check_random_state(seed).randint(2**31 - 1)
        seed = checks.integer("random_state", seed, least=0, most=2**64 - 1)
        loss_fn = self._usual_loss if self.loss_fn is None else self.loss_fn
        if len(columns) > 2 and not checks.takes(loss_fn, "reduction"):
            given, wanted = checks.shown(loss_fn), "torch.nn.functional.huber_loss, say, or a partial of it"
            raise phalanx.UsageError(f"loss_fn is {given}, without reduction=, which weights need; give {wanted}")
        loss = functools.partial(_loss, loss_fn, outputs)
        fields, options = ({name: getattr(self, name) for name in names} for names in (FIELDS, OPTIONS))
        checks.choice("early_stopping", self.early_stopping, (True, False))
        if self.early_stopping:
            size, classes = self.validation_fraction, columns[1] if isinstance(self, ClassifierMixin) else None
            if not 0 < size < 1:
                raise phalanx.UsageError(f"validation_fraction is {size!r}; it must be a number between 0 and 1")
            halves: Any = train_test_split(*columns, test_size=size, stratify=classes, random_state=seed % 2**32)
            columns, held_out = halves[::2], halves[1::2]
            patience = checks.integer("n_iter_no_change", self.n_iter_no_change, least=1)
            options["evaluation"] = phalanx.Evaluation({HELD_OUT: loss}, (held_out[0], tuple(held_out[1:])))
            options["callbacks"] = [SaveBest(HELD_OUT), EarlyStopping(HELD_OUT, patience), *self.callbacks]
        maker = self._maker(columns[0].shape[1], outputs)
        result = phalanx.Recipe(maker, (columns[0], tuple(columns[1:])), loss, seed=seed, **fields).train(**options)
        losses, steps = result.loss_history, result.steps_per_epoch or 1
        means = [float(np.mean(losses[at : at + steps])) for at in range(0, len(losses), steps)]
        self.model_, self.digest_, self.n_iter_, self.loss_curve_ = result.model, result.digest, len(means), means
        self.validation_loss_curve_ = [one.value for one in result.metric_history] if self.early_stopping else None
        used = result.averaged if result.best is None else result.best.weights
        if used:  # of averaged weights there are no buffers
            self.model_.load_state_dict({**self.model_.state_dict(), **used})

    def _maker(self, features: int, outputs: int) -> Any:
        """The recipe's ``make_model``."""
        make, hidden = self.make_model, self.hidden_layer_sizes
        if make is None:
            hidden = [checks.integer("hidden_layer_sizes", size, least=1) for size in np.atleast_1d(hidden).tolist()]
            pairs = list(pairwise([features, *hidden, outputs]))
            return lambda: nn.Sequential(*[one for pair in pairs for one in (nn.Linear(*pair), nn.ReLU())][:-1])
        if hidden != HIDDEN:
            raise phalanx.UsageError(f"hidden_layer_sizes is {hidden!r}, but make_model is given, and makes all layers")
        if isinstance(make, nn.Module):
            return make
        if not callable(make):
            instead = "numbers of units are hidden_layer_sizes=(64,)"
            raise phalanx.UsageError(f"make_model is {checks.shown(make)}; it must be a function; {instead}")
        required = [name for name in checks.parameters_of(make) if checks.takes(make, name, required=True)]
        given = dict(zip(required, (features, outputs), strict=True)) if len(required) == 2 else {}
        return functools.partial(make, **given)

    def _outputs(self, X: Any) -> Any:  # noqa: N803
        """The model's outputs as float64: computed as in a run, so that threads and their number change no bit."""
        check_is_fitted(self, "model_")
        x = validate_data(self, X, reset=False, dtype=np.float32, order="C")
        recipe = phalanx.Recipe(self.model_, None, threads=self.threads, modes="as_made")
        with recipe.start(engine="inline") as run:
            return run.predict(x).double()


@checks.answering(**NAMES)
@dataclass(eq=False, repr=False)
class Classifier(ClassifierMixin, _Network):
    """A classifier. The same fit ends in the same bits for any number of workers, and in any process.

    Parameters
    ----------
    make_model : callable or torch.nn.Module, optional
        ``make_model()``, or ``make_model(n_features, n_outputs)`` if it has two parameters without defaults. The model
        returns (n, n_outputs) logits: one for each class, also for two. Default: ``hidden_layer_sizes`` with ReLU.
    loss_fn : callable, optional
        ``loss_fn(output, y)``; default: cross entropy, of a Regressor the mean squared error. With weights it is called
        with ``reduction="none"``, as torch's functions know it.
    random_state : int, RandomState or None, default 0
        The recipe's seed. RandomState, and None for numpy's global one: a seed is drawn for each fit.
    early_stopping, validation_fraction, n_iter_no_change
        Hold out a share, stop after so many epochs whose loss on it was no better, take the best epoch's weights.
    **others
        ``workers``, ``run_dir``, ``progress``, ``callbacks`` as in ``Recipe.train``, ``class_weight`` as in
        scikit-learn (of a Classifier only), all else as in ``phalanx.Recipe``.

    Attributes
    ----------
    model_, classes_, digest_, n_iter_, loss_curve_, validation_loss_curve_
        The module, and the classes of its outputs. Of the run: digest at its last step, epochs, losses of each.
    """

    _usual_loss: ClassVar[Any] = staticmethod(nn.functional.cross_entropy)
    class_weight: Any = field(default=None, kw_only=True)

    def _target(self, y: Any) -> tuple[Any, int]:
        if y.ndim > 1 and y.shape[1] > 1:
            instead = "for several labels: sklearn.multioutput.MultiOutputClassifier(Classifier())"
            raise phalanx.UsageError(f"y has shape {y.shape}, but a Classifier predicts one class; {instead}")
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, target = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise phalanx.UsageError(f"y has 1 class ({self.classes_[0]}), where weights are not 0; give two or more")
        return target, len(self.classes_)

    def predict_proba(self, X: Any) -> Any:  # noqa: N803
        """Softmax of the outputs, of shape (n_samples, n_classes), in the order of ``classes_``."""
        return nn.functional.softmax(self._outputs(X), 1).numpy()

    def predict(self, X: Any) -> Any:  # noqa: N803
        """The most probable class, of shape (n_samples,)."""
        chances = self.predict_proba(X)
        return self.classes_[chances.argmax(1)]


@checks.answering(**NAMES)
@dataclass(eq=False, repr=False)
class Regressor(RegressorMixin, _Network):
    """A regressor, of one number or several; ``Classifier`` documents parameters and attributes."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _target(self, y: Any) -> tuple[Any, int]:
        y = check_array(y, dtype="float32", ensure_2d=False, order="C", input_name="y")
        self._shape = y.shape[1:]
        return y.reshape(len(y), -1), int(np.prod(self._shape))

    def predict(self, X: Any) -> Any:  # noqa: N803
        """Outputs of the shape that y had: (n_samples,) or (n_samples, n_outputs)."""
        return self._outputs(X).numpy().reshape(-1, *self._shape)
