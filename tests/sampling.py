"""Which tests ``make test`` tries: the same ones every time. ``make test-all`` tries all tests.

``make test`` tries every test that is not marked "long" or "longest", and of those the ones in ``EVERY_TIME``. Of a
long list of cases (``sample``, ``cover``, the mark ``cases(count)``) it tries a few. Which ones follows from the
list's name alone. What is left out has the mark "campaign". A file that is named on the command line runs its long
tests, too.

``make test-all`` tries each test. Of one that has many cases with the mark "campaign" it tries ``CASES``, drawn by
``SEED``, so that each night tries others: all of them take hours on two cores. ``make test-all CASES=all`` tries all.
"""

import itertools
import os
import random

import pytest

# For tests that attack at random: the same attack every time, another one with PHALANX_SEED in the environment.
SEED = int(os.environ.get("PHALANX_SEED", "0"))

# The long tests that run every time, and how many cases of each. Every capability has some.
EVERY_TIME = {
    "same bits on any number of workers": {
        "engines/test_same_bits.py::test_families_with_some_workers": 2,
        "engines/test_same_bits.py::test_families_with_any_number_of_workers": 1,
        "engines/test_same_bits.py::test_faults_in_the_workers": 1,
        "exactness/test_many_replicas.py::test_families": 4,
        "exactness/test_many_replicas.py::test_faults_in_the_loop": 2,
        "contract/test_contract.py::test_families": 1,
        "contract/test_contract.py::test_moving_to_workers_and_back[torch]": 1,
        "contract/test_contract.py::test_any_number_of_workers": 1,
    },
    "workers that die or hang": {
        "engines/test_falls.py::test_a_death_at_every_named_point": 4,
        "engines/test_falls.py::test_a_worker_that_hangs_is_ended_and_replaced": 1,
        "engines/test_falls.py::test_all_workers_at_once": 1,
        "engines/test_starter.py::test_it_may_be_killed_while_it_starts": 1,
        "engines/test_worker_ends.py::test_a_worker_that_is_killed_is_replaced": 1,
        "recovery/test_lifecycle.py::test_a_death_at_every_point_is_judged_as_what_it_is": 1,
    },
    "errors and Ctrl-C": {
        "engines/test_worker_errors.py::test_an_error_in_user_code_arrives_as_inline": 2,
        "engines/test_worker_ends.py::test_ctrl_c_in_a_long_step_comes_back_with_the_state": 1,
        "face/test_interrupts.py::test_ctrl_c_at_any_line_inline": 1,
        "face/test_told_once.py::test_whoever_goes_on_is_told_every_step_once": 3,
        "face/test_threads.py::test_runs_in_threads_end_as_they_do_alone": 1,
    },
    "snapshots and resuming": {
        "state/test_resume.py::test_the_driver_is_killed_after_every_step": 1,
        "state/test_resume.py::test_every_kind_of_data": 1,
        "state/test_sigterm.py::test_sigterm_at_any_time": 1,
        "state/test_resume.py::test_what_is_not_put_back_shows_in_the_digest": 1,
        "state/test_damage.py::test_a_damaged_file": 3,
        "state/test_writing.py::test_a_write_that_fails_is_told": 2,
        "state/test_torn.py::test_no_snapshot_mixes_two_steps": 1,
        "state/test_disks.py::test_what_a_kill_or_a_power_loss_leaves": 1,
    },
    "callbacks, evaluations, readers, streams": {
        "engines/test_seen.py::test_a_run_that_moves": 1,
        "engines/test_held_views.py::test_of_a_frozen_weight_a_model_may_keep_anything": 1,
        "callbacks/test_state_in_evaluations.py::test_what_decides_is_refused[two workers-a running mean]": 1,
        "callbacks/test_state_in_evaluations.py::test_honest_code_has_one_answer_without_a_word": 1,
        "exactness/test_two_modes.py::test_engines[two workers]": 1,
        "inputs/test_drawn.py::test_resume_and_replay": 1,
        "inputs/test_shards.py::test_workers_and_readers_decide_nothing": 1,
        "callbacks/test_looking.py::test_what_else_is_changed_has_no_effect": 1,
    },
    "public reports": {
        "reports/test_answers.py::test_right_value": 4,
        "reports/test_answers.py::test_what_a_resume_forgets_is_seen": 1,
        "reports/test_refusals.py::test_a_changed_recipe": 1,
        "reports/test_ends.py::test_the_main_process_is_killed": 1,
    },
    "phases, micro-batches, frozen weights": {
        "exactness/test_phases.py::test_workers_and_kills": 1,
        "exactness/test_micro_batches.py::test_workers[torch]": 1,
        "exactness/test_nothing_counts.py::test_a_batch_in_which_nothing_counts_is_skipped": 1,
        "exactness/test_sizes.py::test_whatever_filters_say": 1,
        "engines/test_frozen.py::test_a_death_around_the_step_that_thaws": 1,
    },
    "losses over the whole batch": {
        "exactness/test_over_batch.py::test_any_engine": 2,
        "exactness/test_over_batch.py::test_deaths": 1,
        "exactness/test_over_batch.py::test_resumes": 1,
        "exactness/test_rows.py::test_refused": 1,
        "exactness/test_rows.py::test_differing_workers": 1,
        "jax/test_over_batch.py::test_by_hand": 1,
    },
    "workers start anywhere and leave nothing": {
        "engines/test_forks.py::test_workers_end_with_the_parent_though_its_child_lives_on": 1,
    },
    "modules and loaders of others": {
        "integrations/test_lightning.py::test_losses_are_those_of_lightning": 2,
        "integrations/test_lightning_situations.py::test_what_goes_over": 1,
    },
    "jax, tinygrad, devices": {
        "jax/test_exactness.py::test_several_replicas": 1,
        "devices/test_ranks.py::test_any_number_of_devices": 3,
        "devices/test_ranks.py::test_resumed_on_other_devices": 1,
        "devices/test_rank_deaths.py::test_a_death_at_every_named_point": 3,
        "devices/test_rank_deaths.py::test_kills_at_random": 1,
        "devices/test_accelerators.py::test_faults_are_seen": 1,
        "devices/test_hanging.py::test_a_death_at_every_point": 1,
        "accelerator/test_accelerator.py::test_the_host_cannot_read_a_device": 1,
    },
    "hosts and the backend": {
        "hosts/test_hosts.py::test_two_hosts": 1,
        "simulation/test_hosts.py::test_random_schedules": 1,
        "simulation/test_workers.py::test_a_death_and_two": 1,
        "hosts/test_messages.py::test_whatever_comes_nobody_ends": 1,
        "backend/test_collectives.py::test_all_reduce": 1,
        "backend/test_failures.py::test_a_dead_rank_is_an_error_on_all_others": 1,
    },
    "jobs of other libraries": {
        "integrations/test_transformers.py::test_one_replica_has_the_bits_of_the_trainer": 1,
        "integrations/test_transformers.py::test_four_replicas_come_to_the_losses_of_accumulation": 1,
        "integrations/test_trainer_arguments.py::test_what_is_not_translated_is_refused": 1,
        "integrations/test_trainer_programs.py::test_programs_go_over": 1,
    },
    "estimators of scikit-learn": {
        "integrations/test_sklearn.py::test_a_fit_is_a_run": 1,
    },
    "proof, command line, documents": {
        "proof/test_chain.py::test_kills_leave_the_root": 1,
        "proof/test_replay.py::test_an_error_has_all_that_is_needed": 1,
        "proof/test_proofs.py::test_of_several_stretches_the_first_step_that_differs_is_told": 1,
        "shell/test_other_systems.py::test_runs_have_the_same_bits": 1,
        "shell/test_command_line.py::test_train_prints_what_the_library_gives": 1,
        "shell/test_trust.py::test_no_string_of_a_run_is_imported_or_executed": 1,
        "house/test_documents.py::test_documents_run[README.md]": 1,
    },
}
LONG_TESTS = {test: count for tests in EVERY_TIME.values() for test, count in tests.items()}


def generator(name):
    """Random numbers for a test that attacks at random."""
    return random.Random(f"{SEED} {name}")


def marked(case, tried):
    """A case, which may be several values or a ``pytest.param``, with the mark "campaign" if it is left out."""
    given = case if hasattr(case, "marks") else pytest.param(*values(case))
    return given if tried else pytest.param(*given.values, marks=[*given.marks, pytest.mark.campaign], id=given.id)


def sample(name, cases, count):
    """All cases, so many of them tried every time; a case that is a tuple has several values."""
    cases = list(cases)
    chosen = set(random.Random(name).sample(range(len(cases)), count))
    return [marked(case, index in chosen) for index, case in enumerate(cases)]


def cover(name, rows, columns):
    """All pairs; as few of them are tried every time as have each row and each column at least once.

    A row, or a column, that is a tuple has several values.
    """
    rows, columns = list(rows), list(columns)
    draw, count = random.Random(name), max(len(rows), len(columns))
    chosen = set(zip(repeated(draw, len(rows), count), repeated(draw, len(columns), count), strict=True))
    return [
        marked((*values(rows[row]), *values(columns[column])), (row, column) in chosen)
        for row, column in itertools.product(range(len(rows)), range(len(columns)))
    ]


def repeated(draw, size, count):
    """``count`` numbers below ``size``, each as often as any other, give or take one, in an order that is drawn."""
    numbers = []
    while len(numbers) < count:
        numbers += draw.sample(range(size), size)
    return numbers[:count]


def values(case):
    """The values of a case, of a row or of a column."""
    return case if isinstance(case, tuple) else (case,)


def leave_out(items):
    """Mark what is not tried every time: long tests that are not listed, and most cases of long lists."""
    tests = {}
    for item in items:
        if any(map(item.get_closest_marker, ("longest", "long", "cases"))) and not item.get_closest_marker("campaign"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for test, cases in tests.items():
        chosen = tried(test.removeprefix("tests/"), cases)
        for case in cases:
            if case not in chosen:
                case.add_marker("campaign")


def draw(items, count, seed):
    """The items without most of what is left out every time: of each test stay ``count`` cases, drawn by ``seed``."""
    tests = {}
    for item in items:
        if item.get_closest_marker("campaign"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item.nodeid)
    kept = set()
    for test, cases in tests.items():
        kept |= set(random.Random(f"{seed} {test}").sample(sorted(cases), min(count, len(cases))))
    return [item for item in items if item.nodeid in kept or not item.get_closest_marker("campaign")]


def tried(test, cases):
    """Of the cases of a test, those that run every time."""
    mark = cases[0].get_closest_marker("cases")
    if mark and not any(map(cases[0].get_closest_marker, ("longest", "long"))):
        count = mark.args[0]
    else:
        count = LONG_TESTS.get(test, 0)
    named = [case for case in cases if case.nodeid.removeprefix("tests/") in LONG_TESTS and "[" in case.nodeid]
    cases = sorted(cases, key=lambda case: case.nodeid)
    return [*random.Random(test).sample(cases, min(count, len(cases))), *named]
