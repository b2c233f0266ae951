"""A recipe and its two verbs: ``train`` runs it to the end, ``start`` gives you a run to hold."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Unpack

from phalanx.definition import checks
from phalanx.definition.fields import Definition
from phalanx.engines import close as close
from phalanx.errors import UsageError
from phalanx.run.opening import opened
from phalanx.run.options import DEFAULTS, FIELDS, Options, unknown
from phalanx.run.result import Result
from phalanx.run.run import Run
from phalanx.surroundings import interrupts, sources
from phalanx.surroundings.interrupts import on_sigterm


class Recipe(Definition):
    """Everything that defines the answer. Two runs of one recipe end in the same bits.

    Parameters
    ----------
    make_model : callable or torch.nn.Module
        Called without arguments right after seeding with ``seed``; a module is copied, never trained in place. If it
        returns a tree of jax arrays, jax computes (``docs/jax.md``); a model of tinygrad's: ``docs/open_devices.md``.
    data : tuple, dict, list, map-style dataset, Stream or None
        Columns (a tuple or dict of arrays, tensors or data frames of equal length), a dataset with ``__getitem__`` and
        ``__len__``, a list of samples, ``phalanx.Stream``; None: the caller brings batches with ``run.step(batch)``.
    loss_fn : callable or None
        ``loss_fn(output, target)`` returns the mean loss over the share, or (mean loss, weight). None: ``forward_fn``,
        or the model, returns that itself, or an object with ``.loss``. See ``loss_takes``. A dict of numbers,
        ``{"loss": loss, "kl": kl}``, has named losses, whose means are in ``report.losses`` (docs/callbacks.md).
    forward_fn : callable, optional
        ``forward_fn(model, batch) -> output``. Default: ``model(x)`` where the batch is ``(x, y)``, ``model(**batch)``
        for a dict, else ``model(batch)``. For jax, required: ``forward_fn(params, x)``.
    target_fn : callable, optional
        ``target_fn(batch) -> target``. Default: ``y`` where the batch is ``(x, y)``, ``batch["labels"]`` where it is a
        dict that has labels, else the batch.
    replicas : int, default 4
        R, part of the answer: into how many shares each batch is cut.
    batch_size : int or None, default 32
        Samples a step over all replicas. None: one sample per replica, handed over as it is, with no added axis.
    steps, epochs : int
        Optimizer steps, or passes over the data; exactly one of them.
    optimizer : callable, optional
        Called with ``list(model.named_parameters())``, or, if its parameter is called ``model``, with the model (or
        with both: ``f(named, model)``); returns a ``torch.optim.Optimizer`` or a list of them. Default:
        ``torch.optim.Adam`` with ``lr``. For jax, an ``optax.GradientTransformation``; tinygrad: ``nn.optim``'s.
    lr : float, default 1e-3
        Only for the default optimizer.
    scheduler : callable, optional
        Called with each optimizer; its result is stepped as ``schedule_every`` says. ReduceLROnPlateau gets the mean
        loss of the step or epoch, or the metric named by ``schedule_on``.
    max_norm : float, default inf
        Global-norm clipping of the mean gradient, as ``torch.nn.utils.clip_grad_norm_`` does it.
    shuffle, drop_last : bool
        Whether each epoch has its own order; whether a last short batch is left out.
    collate_fn : callable, optional
        Turns a list of samples into a batch; ``torch.utils.data.default_collate`` by default.
    seed : int, default 0
        From 0 to 2**64 - 1.
    precision : None or "bfloat16"
        Autocast around forward and loss.
    threads : int, default 1
        Intra-op threads per replica; part of the answer.
    on_nonfinite : "stop", "skip" or "ignore"
        What happens at a loss or gradient that is not finite: raise before the update; leave the state and go on;
        nothing.
    schedule_every : "step" or "epoch", optional
        How often the scheduler is stepped; once a step by default.
    schedule_on : str, optional
        With ``schedule_every="epoch"``: the scheduler is stepped when this metric of ``evaluation`` is known, and
        ReduceLROnPlateau gets its value.
    modes : "train" or "as_made"
        Modules are trained in the modes that they are made in. "train": a model that is in eval mode as a whole is
        refused, since it was probably loaded or evaluated before. "as_made": it is trained in eval mode.
    micro_batches : int, default 1
        Into how many parts each replica's share is cut, computed one after the other in less memory; their gradients
        are added in order (``docs/steps.md``).
    phases : list of Phase, optional
        Several updates, one after the other, that make a step, each with its own loss, parameters and optimizer.
    loss_takes : "output" or "model"
        "model": ``loss_fn(model, batch)`` calls the model itself, as Mixup needs it (``docs/cookbook.md``). Evaluations
        use ``forward_fn`` and ``target_fn`` all the same. For torch.
    weights : sequence of float, optional
        One number per sample: each epoch draws as many samples as there are, with replacement, with chances in
        proportion to these, keyed by (seed, epoch). As torch's WeightedRandomSampler; ``docs/inputs.md``.
    batch_sampler : callable, optional
        ``batch_sampler(epoch, generator)`` returns all batches of an epoch, as lists of sample numbers; batches and
        epochs may differ in size. ``generator`` is a ``numpy.random.Generator`` keyed by (seed, epoch). It is called
        several times and in each process, so it keeps no state. In place of ``batch_size`` and ``shuffle``.
    buffers : dict of str to str, optional
        By name of a buffer or module, or pattern: how a buffer that differs over replicas is settled after a step, as
        in ``{"queue": "first"}``. "mean": averaged; "first": as the first replica left it; "refuse": an error. The
        first name that matches counts. Others: the mean, if floating, else the first. BatchNorm's need nothing. For
        torch.
    loss_over : "share" or "batch"
        "batch": ``loss_fn`` sees the outputs and targets of the whole batch, as contrastive losses need it
        (``docs/batch_losses.md``): tensors, or trees of them, with a row for each sample. ``loss_fn(output, target)``
        returns one loss, and with ``loss_takes="model"`` it is ``loss_fn(model, output, batch)``. For torch and jax.

    Raises
    ------
    UsageError
        An argument is wrong; the message names it, its value and the way out.
    """

    if not TYPE_CHECKING:  # type checkers see the dataclass's own

        @functools.wraps(Definition.__init__)
        def __init__(self, *arguments: object, **fields: object) -> None:
            if wrong := [name for name in fields if name not in FIELDS]:
                raise UsageError(unknown(wrong[0], FIELDS, DEFAULTS))
            super().__init__(*arguments, **fields)
            if self.batch_sampler is None:
                checks.shares(self.global_batch, self.replicas, self.micro_batches)
            sources.note()  # workers may run it after its files have changed

    def replace(self, **fields: Any) -> Recipe:
        """A copy with other fields, as in ``recipe.replace(lr=0.01, seed=3)``.

        Raises
        ------
        UsageError
            As for ``Recipe``.
        """
        return dataclasses.replace(self, **fields)

    def train(self, **options: Unpack[Options]) -> Result:
        """Run the recipe to its end. Options change the speed, never the answer, but for those that say so.

        Those are ``callbacks`` that stop the run or freeze and thaw (EarlyStopping, Thaw), ``max_seconds``,
        ``warm_start``, ``resume="anyway"`` and ``nondeterministic="allow"``.

        Parameters
        ----------
        workers : int or "auto"
            W, at most ``replicas``. "auto": the run starts in this process, and hands over to one worker per core once
            they are up, if that is faster.
        readers : int or "auto"
            Processes that read a dataset, or a stream's shards, ahead (``docs/inputs.md``). "auto": one for each
            worker, as far as cores are left. 0: none. Arrays and lists have none. The caller reads a stream without
            shards, so a number only brings a warning.
        engine : "auto", "inline", "processes" or "distributed"
            Where workers live: "inline" is this process, "distributed" all processes of a torch.distributed world
            (``docs/hosts.md``). "auto": distributed in such a world, else processes if ``workers`` is more than 1.
        devices : "auto", str or sequence of str
            Names as the framework has them, at most R. In torch each of several is a worker process's; in jax and
            tinygrad this process deals replicas to them (``docs/devices.md``).
            "cuda": all that are visible; "local": the one that torchrun means; "cpu" may come several times. Worker
            processes compute on "cpu" only. "auto": where ``make_model`` puts the model.
        nondeterministic : "error" or "allow"
            What happens at an operation without a deterministic kernel (on accelerators), and at a replica that gives
            another value when it is computed again. "allow" lets both pass, and gives the promise up.
        evaluation : Evaluation, or list or dict of them, optional
            Due after every epoch, or as often as each says, and after the last step; kept in ``result.metric_history``.
        callbacks : sequence
            Functions, each called with the ``StepReport`` of every step, once, in this process; and objects with any
            of the hooks ``begin(run)``, ``step(report)``, ``evaluated(values)``, ``end(result)``, ``state()`` and
            ``load(state)``, as in ``phalanx.callbacks``. Their state is in snapshots.
        progress : bool or "auto"
            True: a progress bar on stderr, or, if that is no terminal, a plain line after each epoch (and after each
            minute where epochs are longer). "auto": a bar if it is a terminal or a notebook, else nothing.
        max_seconds : float, optional
            Stop after the first step at whose end so much time has passed since the call; ``result.stopped_early``
            says so. With a ``run_dir``, the same call goes on from there, with as much time again.
        deadline_seconds : float or "auto"
            A worker process that does nothing for longer counts as hung: it is killed and replaced. "auto": 20 usual
            steps, at least a minute; 10 minutes before the first step is done, for a chunk of an evaluation, and for
            a worker that repeats a step in which one was killed as hung; never under a debugger. Over several hosts:
            how long to wait for a process that lives, 120 s by default (``docs/hosts.md``).
        lost_after : float
            Over several hosts: seconds after which a process that is not heard is lost. The others go on without it.
        min_hosts : int
            With how many processes it is worth while to go on. Fewer save, and end with a ``PeersLostError``.
        secret_file : str or path, optional
            Over several hosts: a file with a secret, at least 16 bytes, the same on all hosts, in place of
            PHALANX_SECRET. Who does not have it cannot take part (``docs/hosts.md``).
        run_dir : str or path, optional
            Where snapshots and a log of events are kept. The same call again goes on from the newest good snapshot, to
            the same digest, with any number of workers. SIGTERM then saves and raises ``Preempted``.
        resume : bool or "anyway"
            False: refuse a ``run_dir`` that has snapshots already. "anyway": go on even if its recipe was another; a
            warning and the log say what differs.
        snapshot_every : int or "auto"
            Steps from one to the next. "auto": at least 30 s, and so rarely that it costs 1 % of the time. The
            beginning and the end are always saved.
        keep_snapshots : int
            How many snapshots stay.
        on_snapshot_error : "continue" or "stop"
            What to do if one cannot be written; those before stay whole.
        chain : "auto", "every", int or "off"
            A ``run_dir`` has a chain, with a link for every step, whose root is ``result.chain`` (``docs/proof.md``).
            How many steps lie between digests of the whole state beside it; "auto": they cost under 1 % of the time.
            A link takes 320 bytes and 54 for each replica, and the log's line about 190, with any of these: 0.73 GB
            for a million steps of 4 replicas.
        audit : float
            In this share of steps another worker computes one replica again; a difference is a CorruptionError.
        max_failures : int
            Deaths of workers by SIGKILL or SIGTERM, in a row at the same replica of the same step, that end the run; of
            exits, faults and hangs three do.
        warm_start : str or path, dict or Best, optional
            Begin from these weights and buffers, unless the run is resumed: of a snapshot, as ``run.save`` writes it, a
            ``run_dir``, a safetensors file, a state dict, or ``result.best``. Names and shapes must be the model's.

        Raises
        ------
        UsageError
            The call is wrong, ``run_dir`` is in use or another recipe's, or data was changed in place.
        WorkerError
            User code raised; ``__cause__`` is its exception, ``result`` the state after the last good step.
        NonFiniteError
            See ``on_nonfinite``.
        CorruptionError
            See ``audit``.
        SnapshotError
            No snapshot in ``run_dir``, or that to begin from, can be used; or ``on_snapshot_error`` is "stop", and one
            could not be written.
        PeersLostError
            So many processes were lost, or did not come, that this one may not go on.
        LeftError
            Another process of a torch.distributed world ended the run early.
        Preempted
            SIGTERM came, and there is a ``run_dir``: the state was saved there.
        RunError
            The base of all but UsageError. A plain RunError says why the run cannot go on: workers that die again and
            again or take the state with them, a batch in which every weight is 0.
        KeyboardInterrupt
            Ctrl-C; carries ``result`` too.
        """
        if self.data is None:
            raise UsageError(
                "train() needs data, but data is None: start() the recipe and bring batches: run.step(batch)"
            )
        result = None
        try:
            with interrupts.guarded():
                with self.start(**options) as run:
                    terminate = functools.partial(run.terminate, "SIGTERM came")
                    with on_sigterm(terminate if options.get("run_dir") else None):
                        run.finish()
                result = run.result()
        except KeyboardInterrupt as error:
            if not hasattr(error, "result"):  # Ctrl-C came when all was done, or with another error
                error.result = result or getattr(error.__context__, "result", None)  # type: ignore[attr-defined]
            raise
        return result

    def start(self, **options: Unpack[Options]) -> Run:
        """Begin a run that you hold. Takes the options of ``train``.

        Returns
        -------
        Run
            For a ``with`` block: iterate it, feed it with ``run.step(batch)``, evaluate it, take its result.

        Raises
        ------
        UsageError
            The call is wrong, or what ``make_model``, ``optimizer`` or ``scheduler`` returned cannot be used.
        SnapshotError
            As in ``train``.
        RunError
            Workers cannot be started. A PeersLostError: another process of a torch.distributed world did not come, or
            left before the run began.
        """
        run = None
        try:
            with interrupts.guarded():
                run = opened(self, options)
        except BaseException:
            if run is not None:  # Ctrl-C came last, and nobody else would close the run
                run.close()
            raise
        return run


def train(make_model: Any, data: Any, loss_fn: Any = None, **arguments: Any) -> Result:
    """``Recipe(make_model, data, loss_fn, ...).train(...)`` in one call.

    Parameters
    ----------
    make_model, data, loss_fn
        As in ``Recipe``. A bare ``nn.Module`` works too; it is copied.
    **arguments
        Any other argument of ``Recipe`` (these define the answer) or of ``Recipe.train`` (these do not).

    Returns
    -------
    Result

    Raises
    ------
    UsageError
        An argument is wrong; ``Recipe.train`` says what else is raised.

    Examples
    --------
    >>> result = phalanx.train(lambda: torch.nn.Linear(4, 3), (x, y), torch.nn.functional.cross_entropy, steps=100)
    """
    options = {name: value for name, value in arguments.items() if name in DEFAULTS}
    fields = {name: value for name, value in arguments.items() if name not in options}
    if wrong := [name for name in fields if name not in FIELDS]:
        raise UsageError(unknown(wrong[0], FIELDS | set(DEFAULTS)))
    return Recipe(make_model, data, loss_fn, **fields).train(**options)  # type: ignore[arg-type]
