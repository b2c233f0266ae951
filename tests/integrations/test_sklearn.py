"""Estimators as scikit-learn has them: their bits are a recipe's, and scikit-learn takes them for its own."""

from __future__ import annotations

import functools
import inspect
import pickle
import subprocess
import sys
import warnings

import joblib
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor, make_column_transformer
from sklearn.datasets import load_digits, load_iris
from sklearn.ensemble import AdaBoostClassifier, VotingClassifier
from sklearn.exceptions import DataConversionWarning
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.callbacks import EMA
from phalanx.integrations.sklearn import Classifier, Regressor

X, Y = load_iris(return_X_y=True)
CHECKED = {
    "check_sample_weight_equivalence_on_dense_data": "the sums are the same but for rounding in float32 where all "
    "samples are in one batch; else repeated samples come in other batches than weighted ones"
}


def net(n_features, n_outputs, hidden=8):
    return nn.Sequential(nn.Linear(n_features, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, n_outputs))


quick = functools.partial(Classifier, net, epochs=2)


def digest(estimator, x=X, y=Y, **given):
    return estimator.fit(x, y, **given).digest_


@pytest.mark.longest
@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_scikit_learn_takes_them_for_its_own(kind):
    """All checks of scikit-learn pass, but for one, whose reason is named."""
    found = check_estimator(kind(), expected_failed_checks=CHECKED, on_fail=None, on_skip=None)
    assert len(found) > 50
    assert [one["check_name"] for one in found if one["status"] == "failed"] == []


@pytest.mark.long
@pytest.mark.parametrize("callbacks", [(), (EMA(0.9),)], ids=["plain", "averaged"])
def test_a_fit_is_a_run(callbacks):
    """The digest is that of the recipe that one would write, and so are the predictions, with averages if there are."""
    given = {"epochs": 3, "lr": 0.01, "batch_size": 16, "max_norm": 1.0}
    estimator = Classifier(net, random_state=7, callbacks=callbacks, **given).fit(X, Y)
    x = X.astype(np.float32)
    recipe = phalanx.Recipe(lambda: net(4, 3), (x, Y), F.cross_entropy, seed=7, **given)
    result = recipe.train(engine="inline", callbacks=callbacks)
    assert estimator.digest_ == result.digest
    chances = torch.softmax(result.predict(x).double(), 1).numpy()
    assert np.array_equal(estimator.predict_proba(X), chances)
    assert np.array_equal(estimator.predict(X), chances.argmax(1))
    assert (estimator.n_iter_, len(estimator.loss_curve_)) == (3, 3)
    assert estimator.loss_curve_[-1] == float(np.mean(result.loss_history[-10:]))


@pytest.mark.long
def test_any_number_of_workers():
    """Workers change no bit, alone and in a pipeline; replicas and the seed do."""
    weight = np.random.RandomState(0).randint(0, 3, len(Y))
    one, *others = [quick(workers=workers).fit(X, Y, weight) for workers in (1, 2, 3)]
    assert [other.digest_ for other in others] == [one.digest_] * 2
    assert all(np.array_equal(other.predict_proba(X), one.predict_proba(X)) for other in others)
    changed = [quick(replicas=2), quick(random_state=1), quick(workers=2, shuffle=False)]
    assert one.digest_ not in [digest(other, sample_weight=weight) for other in changed]
    pipelines = [make_pipeline(StandardScaler(), quick(workers=workers)).fit(X, Y) for workers in (1, 2)]
    assert pipelines[0][-1].digest_ == pipelines[1][-1].digest_ != one.digest_


@pytest.mark.long
@pytest.mark.parametrize("backend", [pytest.param("loky", marks=pytest.mark.longest), "threading"])
def test_a_search_in_parallel(backend):
    """Jobs beside each other, as processes or as threads, find what one after the other finds."""
    search = functools.partial(
        GridSearchCV, make_pipeline(StandardScaler(), quick()), {"classifier__lr": [0.01, 0.1]}, cv=2
    )
    with joblib.parallel_config(backend=backend):
        alone, beside = (search(n_jobs=jobs).fit(X, Y) for jobs in (1, 2))
    assert np.array_equal(alone.cv_results_["mean_test_score"], beside.cv_results_["mean_test_score"])
    assert alone.best_estimator_[-1].digest_ == beside.best_estimator_[-1].digest_


@pytest.mark.long
def test_cross_validation():
    """Scores are the same with two workers."""
    scores = [cross_val_score(quick(workers=workers, lr=0.05), X, Y, cv=2) for workers in (1, 2)]
    assert np.array_equal(*scores)


@pytest.mark.long
def test_data_of_any_form_is_the_same_data():
    """float64, float32, Fortran order, lists, objects, frames and classes with names end in the same bits."""
    due = digest(quick())
    frame, names = pd.DataFrame(X, columns=list("abcd")), np.array(["u", "v", "w"])
    forms = [
        (X.astype(np.float32), Y),
        (np.asfortranarray(X), Y),
        (X.tolist(), Y.tolist()),
        (X.astype(object), names[Y]),
        (frame, pd.Series(names[Y], index=range(5, 155))),
    ]
    assert [digest(quick(), *form) for form in forms] == [due] * len(forms)
    fitted = quick().fit(frame, names[Y])
    assert list(fitted.feature_names_in_) == list("abcd")
    assert set(fitted.predict(frame)) <= set(fitted.classes_) == set(names)
    with pytest.raises(ValueError, match="same order"):
        fitted.predict(frame[list("dcba")])
    with pytest.warns(DataConversionWarning):
        assert digest(quick(), X, Y[:, None]) == due
    assert digest(quick(), X + 1e-3) != due


def test_classes_of_any_kind():
    """Booleans and floats that are whole numbers come back as they were given."""
    assert quick().fit(X, Y > 0).predict(X).dtype == bool
    assert set(quick().fit(X, Y.astype(float) + 1).classes_) == {1.0, 2.0, 3.0}
    several = MultiOutputClassifier(quick()).fit(X, np.eye(3, dtype=int)[Y])
    assert several.predict(X).shape == (150, 3)


def test_shapes_of_a_regressor():
    """What is predicted has the shape of what was given, one number or several."""
    shapes = [Regressor(epochs=1).fit(X, y).predict(X).shape for y in (X[:, 0], X[:, :1], X[:, :3])]
    assert shapes == [(150,), (150, 1), (150, 3)]


@pytest.mark.long
def test_weights():
    """Weights decide the mean of a batch, over any R; a sample of weight 0 is as if it were not there."""
    zeros = np.arange(150) % 2
    assert digest(quick(), sample_weight=zeros) == digest(quick(), X[1::2], Y[1::2], sample_weight=zeros[1::2])
    assert digest(quick(), sample_weight=zeros + 1) != digest(quick(), sample_weight=zeros * 2 + 1)
    by_class = {0: 1.0, 1: 4.0, 2: 2.0}
    weight = np.array([by_class[one] for one in Y.tolist()])
    assert digest(quick(class_weight=by_class)) == digest(quick(), sample_weight=weight)
    balanced = quick(class_weight="balanced")
    assert digest(quick(class_weight=by_class)) != digest(balanced)
    few = zeros.astype(bool) | (Y == 0)  # more of class 0 than of the others
    assert digest(balanced, sample_weight=few) == digest(balanced, X[few], Y[few])
    with pytest.raises(phalanx.UsageError, match="not zero for all"):
        balanced.fit(X, Y, zeros * 0)
    linear, whole = nn.Linear(4, 3), functools.partial(Classifier, epochs=1, batch_size=150, shuffle=False)
    each = F.cross_entropy(linear(torch.tensor(X).float()), torch.tensor(Y), reduction="none").detach().numpy()
    for replicas in (1, 3, 4):
        loss = whole(linear, replicas=replicas).fit(X, Y, weight).loss_curve_[0]
        assert loss == pytest.approx(np.average(each, weights=weight), rel=1e-6)  # sums of float32 in another order
    losses = [
        Regressor(epochs=1, loss_fn=loss_fn).fit(X, X[:, :2], weight).loss_curve_ for loss_fn in (None, F.l1_loss)
    ]
    assert losses[0] != losses[1]


@pytest.mark.long
def test_early_stopping():
    """The best epoch's weights are kept, the run ends when it no longer gets better, and workers change nothing."""
    early = functools.partial(
        quick, lr=0.1, epochs=40, early_stopping=True, validation_fraction=0.2, n_iter_no_change=3
    )
    one = early().fit(X, Y)
    curve = one.validation_loss_curve_
    assert len(curve) == one.n_iter_ < 40
    assert min(curve) not in curve[-3:]
    assert digest(early(workers=2)) == one.digest_
    best = early(epochs=curve.index(min(curve)) + 1, early_stopping=True).fit(X, Y)
    assert np.array_equal(best.predict_proba(X), one.predict_proba(X))
    assert best.digest_ != one.digest_
    assert clone(one).set_params(early_stopping=False, epochs=1).fit(X, Y).validation_loss_curve_ is None


def test_what_makes_the_model():
    """A function of nothing, of two sizes, a partial, a class and a module; by default layers of given sizes."""

    class Net(nn.Linear):
        def __init__(self, n_features, n_outputs, bias=True):
            super().__init__(n_features, n_outputs, bias)

    makers = [lambda: nn.Linear(4, 3), lambda i, o: nn.Linear(i, o), Net, functools.partial(nn.Linear, 4, 3)]
    assert len({digest(Classifier(make, epochs=1)) for make in makers}) == 1
    module = nn.Linear(4, 3)
    before = module.weight.clone()
    assert Classifier(module, epochs=1).fit(X, Y).model_ is not module
    assert torch.equal(module.weight, before)
    small = Classifier(hidden_layer_sizes=(5, 6), epochs=1).fit(X, Y)
    assert [tuple(weight.shape) for weight in small.model_.parameters() if weight.ndim == 2] == [(5, 4), (6, 5), (3, 6)]


def normed(features, outputs):
    return nn.Sequential(nn.Linear(features, 8), nn.BatchNorm1d(8), nn.Linear(8, outputs))


@pytest.mark.filterwarnings("ignore:the last batch of an epoch has")
def test_a_last_batch_that_is_too_short():
    """BatchNorm takes no share of one sample. The way out that the error names is an argument here, too."""
    few = X[::4][:35], Y[::4][:35]
    with pytest.raises(phalanx.UsageError, match="drop_last=True drops a short last batch"):
        Classifier(normed, epochs=1).fit(*few)
    assert Classifier(normed, epochs=1, drop_last=True).fit(*few).n_iter_ == 1


def test_seeds():
    """A number is the recipe's seed; None and RandomState draw one for each fit, from numpy's generators."""
    assert digest(quick(random_state=3)) == digest(quick(random_state=np.int64(3))) != digest(quick())
    np.random.seed(0)
    drawn = [digest(quick(random_state=None)) for _ in range(2)]
    np.random.seed(0)
    assert [digest(quick(random_state=None)) for _ in range(2)] == drawn
    assert drawn[0] != drawn[1]
    assert digest(quick(random_state=np.random.RandomState(0))) == drawn[0]


@pytest.mark.long
def test_copies(tmp_path):
    """A clone, a pickle and a file of joblib's predict, and fit again, as the original; a lambda cannot be pickled."""
    one = quick(batch_size=16).fit(X, Y)
    joblib.dump(one, tmp_path / "one.joblib")
    for other in (pickle.loads(pickle.dumps(one)), joblib.load(tmp_path / "one.joblib")):  # noqa: S301
        assert np.array_equal(other.predict_proba(X), one.predict_proba(X))
        assert other.digest_ == one.digest_ == digest(clone(other))
    assert not hasattr(clone(one), "digest_")
    assert len(pickle.dumps(one)) < X.nbytes * 3  # the data is not kept
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(Classifier(lambda: nn.Linear(4, 3)))


@pytest.mark.long
def test_a_directory_goes_on(tmp_path):
    """With a run_dir, the same fit is not computed again, and other data is refused."""
    one = quick(run_dir=tmp_path / "a")
    assert digest(one) == digest(clone(one)) == digest(quick())
    with pytest.raises(phalanx.UsageError, match="run_dir"):
        one.fit(X[:100], Y[:100])


def test_tiny_data():
    """Fewer samples than a batch, or than replicas, are trained on; a batch below R is warned of, as in a recipe."""
    assert Classifier(epochs=1).fit(X[49:51], Y[49:51]).predict(X[:1]).shape == (1,)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quick(batch_size=2).fit(X, Y)
    assert [str(one.message)[:31] for one in caught] == ["batch_size is 2 and replicas is"]


REFUSED = [
    ({}, (X, Y * 0), "y has 1 class"),
    ({}, (X, np.eye(3, dtype=int)[Y]), r"MultiOutputClassifier\(Classifier"),
    ({}, (np.where(X > 7, np.nan, X), Y), "contains NaN"),
    ({}, (X, Y + 0.5), "continuous"),
    ({}, (X, Y, -np.ones(150)), "values from -1.0 to -1.0.*at least 0"),
    ({}, (X, Y, np.zeros(150)), "not zero for all"),
    ({}, (X, Y, np.ones(149)), r"shape \(149,\).*give 150"),
    ({}, (X * 1e300, Y), "too large for dtype"),
    ({"loss_fn": nn.CrossEntropyLoss()}, (X, Y, np.ones(150)), "loss_fn is CrossEntropyLoss.*reduction="),
    ({"class_weight": {0: -1}}, (X, Y), "values from -1.0 to 1.0, with class_weight"),
    ({"early_stopping": "auto"}, (X, Y), "early_stopping is 'auto'"),
    ({"early_stopping": True, "validation_fraction": 1.5}, (X, Y), "validation_fraction is 1.5"),
    ({"early_stopping": True, "n_iter_no_change": 0}, (X, Y), "n_iter_no_change is 0"),
    ({"random_state": -1}, (X, Y), "random_state is -1"),
    ({"replicas": 0}, (X, Y), "replicas is 0"),
    ({"workers": 5}, (X, Y), "workers is 5"),
    ({"hidden_layer_sizes": (3,)}, (X, Y), "hidden_layer_sizes is"),
    ({"make_model": (64,)}, (X, Y), r"make_model is \(64,\).*hidden_layer_sizes=\(64,\)"),
    ({"make_model": None, "hidden_layer_sizes": (0,)}, (X, Y), "hidden_layer_sizes is 0"),
    ({"make_model": lambda: nn.Linear(4, 1)}, (X, Y), r"shape \(8, 1\).*n_outputs"),
    ({"make_model": lambda hidden: nn.Linear(4, hidden)}, (X, Y), "missing 1 .*functools.partial"),
    ({"lr": 0.1, "optimizer": torch.optim.SGD}, (X, Y), "lr is 0.1 and optimizer is given"),
]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize(("changes", "given", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_refused(changes, given, words):
    """What is wrong is a ValueError that names the argument."""
    with pytest.raises(ValueError, match=words):
        quick().set_params(**changes).fit(*given)


NAMES = ["max_iter: epochs", "max_epochs: epochs", "alpha: optimizer", "solver: optimizer", "optimizer__lr: optimizer"]
NAMES += ["learning_rate_init: lr", "module: make_model", "module__hidden: make_model", "criterion: loss_fn"]
NAMES += ["train_split: early_stopping", "patience: n_iter_no_change", "n_jobs: workers", "verbose: progress"]
NAMES += ["seed: random_state", "warm_start: make_model", "hidden_sizes: hidden_layer_sizes"]


@pytest.mark.parametrize("pair", NAMES)
@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_names_of_other_libraries(kind, pair):
    """They are answered with the name here, in the constructor and in set_params; what clone() reads stays."""
    theirs, ours = pair.split(": ")
    assert ours in inspect.signature(kind).parameters
    for call in (kind, kind().set_params):
        with pytest.raises(phalanx.UsageError, match=f"{theirs} is not an argument of {kind.__name__}; .*{ours}"):
            call(**{theirs: 1})


@pytest.mark.long
def test_without_scikit_learn():
    """Where it is missing, the error says what to install; phalanx itself does not import it."""
    script = "import sys; sys.modules['sklearn.base'] = None; import phalanx; import phalanx.integrations.sklearn"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert "UsageError: scikit-learn 1.6 or later is needed" in done.stderr
    assert "pip install 'phalanx[sklearn]'" in done.stderr


SGD = functools.partial(torch.optim.SGD, lr=0.2)
RATES = {"scheduler": lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9), "schedule_every": "epoch"}
FRAME = pd.DataFrame(X, columns=list("abcd")).assign(kind=np.array(["u", "v"])[np.arange(150) % 2])
SITUATIONS = {
    "rates that decay": lambda: quick(optimizer=SGD, **RATES).fit(X, Y),
    "weight decay": lambda: quick(optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.1)).fit(X, Y),
    "columns of a frame": lambda: make_pipeline(
        make_column_transformer((OneHotEncoder(sparse_output=False), ["kind"]), (StandardScaler(), list("abcd"))),
        quick(),
    ).fit(FRAME, Y),
    "a scaled target": lambda: TransformedTargetRegressor(
        make_pipeline(StandardScaler(), Regressor(epochs=2, early_stopping=True)), transformer=StandardScaler()
    ).fit(X, X[:, 0]),
    "calibrated": lambda: CalibratedClassifierCV(quick(), cv=2).fit(X, Y),
    "voting": lambda: VotingClassifier([("a", quick()), ("b", quick(lr=0.1))], voting="soft").fit(X, Y),
    "boosted": lambda: AdaBoostClassifier(quick(lr=0.1), n_estimators=2, random_state=0).fit(X, Y),
}


@pytest.mark.long
@pytest.mark.parametrize("situation", SITUATIONS)
def test_situations(situation):
    """What docs/sklearn.md says goes over in one line, ends in a score, twice the same."""
    x = FRAME if "frame" in situation else X
    one, two = (SITUATIONS[situation]().predict(x) for _ in range(2))
    assert one.shape == (150,)
    assert np.array_equal(one, two)


@pytest.mark.long
def test_what_does_not_go_over():
    """Sparse X and LBFGS are refused, and there is no partial_fit."""
    with pytest.raises(TypeError, match="dense data is required"):
        quick().fit(scipy.sparse.csr_array(X), Y)
    with pytest.raises(phalanx.UsageError, match="LBFGS"):
        quick(optimizer=torch.optim.LBFGS).fit(X, Y)
    assert not hasattr(quick(), "partial_fit")


@pytest.mark.long
def test_digits():
    """The default network learns digits."""
    x, y = load_digits(return_X_y=True)
    assert Classifier(epochs=12).fit(x[:1200] / 16, y[:1200]).score(x[1200:] / 16, y[1200:]) > 0.9
