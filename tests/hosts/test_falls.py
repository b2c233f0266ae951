"""Hosts that fall, come and leave: the others go on within the run, to the digest of one process."""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

import phalanx
from phalanx.checkpoint.directory import newest_step
from phalanx.lab import pages
from tests.families import FAMILIES
from tests.hosts.network import ROOT, Network, descendants, output, strike, until, why_not
from tests.hosts.worlds import free_port

WHY_NOT = why_not()
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.timeout(240)]
STEPS, REPLICAS = 90, 6
JOB = """
import json, os, sys, time
import phalanx
from phalanx.checkpoint.directory import newest_step
from tests.families import FAMILIES
folder, options, pause = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
me, told = os.environ["RANK"], []
class Tell:
    everywhere = True
    def step(self, report):
        told.append(report.step)
        with open(os.path.join(folder, f"step-{me}"), "w") as file:
            file.write(str(report.step))
        if not os.path.exists(os.path.join(folder, "enough")):
            time.sleep(pause)
        waits = time.monotonic() + (5 if report.step >= recipe.steps - 16 else 0)
        while os.path.exists(os.path.join(folder, "late")) and time.monotonic() < waits:
            time.sleep(0.02)
def slow(output, target):
    time.sleep(0.2)
    return (output.argmax(1) == target).float().mean()
recipe = FAMILIES["conv_norm"].recipe(%d, steps=%d)
columns = recipe.data
def rows(shard, shards):
    with open(os.path.join(folder, "read-" + os.environ["RANK"]), "ab", buffering=0) as file:
        for at in range(int(shard), 24, shards):
            file.write(b".")
            yield tuple(column[at %% len(column)] for column in columns)
if options.pop("stream", False):
    recipe = recipe.replace(data=phalanx.Stream(lambda: zip(*columns, strict=True)))
if options.pop("shards", False):
    recipe = recipe.replace(data=phalanx.Stream(rows, 2, shards=12))
if options.pop("plant", False):
    from phalanx.engines.hosts.driver import Distributed
    share = Distributed._share
    def planted(self, chosen):
        share(self, chosen)
        next(iter(self._framework.export(0, copy=False, digest=False).params.values())).data.add_(1)
    Distributed._share = planted
if options.pop("apart", False):
    options["run_dir"] += me
if (whom := options.pop("slow", False)) and (whom is True or whom == me):
    options["evaluation"] = phalanx.Evaluation(slow, columns, batch_size=2, every_steps=20, name="slow")
brought = options.pop("brought", False)
try:
    options = {"workers": 6, "lost_after": 2.0, "deadline_seconds": 20.0, "callbacks": [Tell()], **options}
    if brought:
        with recipe.replace(data=None, steps=None).start(**options) as run:
            while run.steps < recipe.steps:
                run.step(tuple(column[run.steps %% 10 :][:10] for column in columns))
        result = run.result()
    else:
        result = recipe.train(**options)
    facts = {"digest": result.digest, "told": told, "chain": result.chain, "losses": result.loss_history}
    facts["incidents"] = [[each.kind, each.worker, each.why] for each in result.incidents]
    print(json.dumps(facts))
except phalanx.PhalanxError as error:
    print(json.dumps({"error": type(error).__name__, "why": str(error)}))
""" % (REPLICAS, STEPS)  # noqa: UP031  it has braces


def trained(kind="", steps=STEPS, **options):
    """The same run in one process."""
    recipe = FAMILIES["conv_norm"].recipe(REPLICAS, steps=steps)
    columns = recipe.data
    if kind == "stream":
        recipe = recipe.replace(data=phalanx.Stream(lambda: zip(*columns, strict=True)))
    if kind == "shards":

        def rows(shard, shards):
            return (tuple(column[at % len(column)] for column in columns) for at in range(int(shard), 24, shards))

        recipe = recipe.replace(data=phalanx.Stream(rows, 2, shards=12))
    if kind == "brought":
        with recipe.replace(data=None, steps=None).start(engine="inline", **options) as run:
            while run.steps < steps:
                run.step(tuple(column[run.steps % 10 :][:10] for column in columns))
        return run.result()
    return recipe.train(engine="inline", **options)


@functools.cache
def wanted(kind=""):
    """Losses and digest of one process."""
    result = trained(kind)
    return result.digest, result.loss_history


class OneHost:
    """Starts processes on this machine, as ``Network`` does on hosts; ended with the block."""

    def __init__(self):
        self.processes = []

    def __enter__(self):
        return self

    def start(self, _, *command, **environment):
        told = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}", **environment}
        told |= {"MASTER_ADDR": "127.0.0.1"}
        file = tempfile.TemporaryFile("w+")  # noqa: SIM115  read when it has ended
        process = subprocess.Popen(command, env=told, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        process.file = file
        self.processes.append(process)
        return process

    def __exit__(self, *_):
        for process in self.processes:
            for pid in descendants(process.pid) if process.poll() is None else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            process.file.close()


class Hosts:
    """Three hosts with a process of two workers each, which do steps slowly enough to be struck at one."""

    def __init__(self, network, folder, pause=0.03, size=3, **options):
        self.network, self.folder = network, folder
        self.command = [sys.executable, "-c", JOB, str(folder), json.dumps(options), str(pause)]
        self.wanted = wanted(next((kind for kind in ("stream", "shards", "brought") if options.get(kind)), ""))
        self.world = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(size)}
        self.processes = [self.begin(number) for number in range(size)]

    def begin(self, number):
        return self.network.start(number, *self.command, RANK=str(number), **self.world)

    def again(self, number):
        """Start a process again, as a launcher would, with the same environment; the last steps wait for it."""
        self.processes[number].wait(30)
        (self.folder / "late").touch()  # on a loaded machine the run would end before that
        (self.folder / f"step-{number}").unlink()
        self.processes[number] = self.begin(number)

    def in_again(self, *numbers):
        """Wait until processes have joined; from there on steps take no longer than they must."""
        for number in numbers:
            self.at(1, number)
        (self.folder / "enough").touch()

    def at(self, step, number=1):
        """Wait until a process has been told of a step."""
        until(lambda: self.step(number) >= step, 120)
        (self.folder / "late").unlink(missing_ok=True)

    def step(self, number):
        """The step that a process was told of last."""
        path = self.folder / f"step-{number}"
        return int(path.read_text() or 0) if path.exists() else 0

    def workers(self, number):
        """The workers of a host, without what starts them."""
        commands = {
            pid: pathlib.Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(self.processes[number].pid)
        }
        return [pid for pid, command in commands.items() if "zygote" in command][1:]

    def ended(self, *survivors):
        """What survivors told; each has the digest of one process, and was told each step once."""
        found = {}
        for number in survivors:
            status, text = output(self.processes[number], 150)
            told = [line for line in text.splitlines() if line.startswith("{")]  # agents of torchrun say more
            found[number] = facts = json.loads(told[-1])
            assert status == 0, text
            assert (facts.get("digest"), facts.get("losses")) == self.wanted, text
            assert facts["told"] == list(range(facts["told"][0], STEPS)), text
        return found


def kinds(facts):
    return [kind for kind, *_ in facts["incidents"] if kind not in ("death", "replaced")]


@pytest.fixture
def three(tmp_path):
    """Makes ``Hosts`` on a network of its own."""
    with Network(3) as network:
        yield lambda **options: Hosts(network, tmp_path, **options)


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "process", "stopped", "frozen", "cut"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_host_falls(three, how, victim):
    """Killed or frozen, all of it or the caller's process, or its link down: two go on, in the same processes."""
    hosts = three()
    watcher = (victim + 1) % 3
    hosts.at(20, watcher)
    fallen = hosts.processes[victim]
    if how == "cut":
        hosts.network.cut(victim)
    elif how in ("killed", "stopped"):
        strike(fallen, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    else:
        os.kill(fallen.pid, signal.SIGKILL if how == "process" else signal.SIGSTOP)
    others = [number for number in range(3) if number != victim]
    found = hosts.ended(*others)
    for number in others:
        assert kinds(found[number]) == ["lost"], found
        print(how, victim, found[number]["incidents"])
    if how == "cut":
        assert json.loads(output(fallen, 60)[1].splitlines()[-1])["error"] == "PeersLostError"


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_falls(three, victim):
    """A worker is killed, twice: the same processes go on, with other workers."""
    hosts = three()
    for step in (20, 40):
        hosts.at(step)
        os.kill(hosts.workers(victim)[0], signal.SIGKILL)
    found = hosts.ended(0, 1, 2)
    assert all(kinds(facts) == ["again", "again"] for facts in found.values()), found


@pytest.mark.long
def test_a_worker_falls_in_an_evaluation(three):
    """A worker is killed while all evaluate: other workers evaluate again, and nothing is told twice."""
    hosts = three(slow=True)
    hosts.at(18)
    time.sleep(1)  # into the evaluation that follows the next step
    os.kill(hosts.workers(1)[0], signal.SIGKILL)
    found = hosts.ended(0, 1, 2)
    assert all(kinds(facts) == ["again"] for facts in found.values()), found


@pytest.mark.long
def test_one_after_another(three):
    """Two of three fall one after another; the lowest goes on alone."""
    hosts = three()
    hosts.at(20)
    strike(hosts.processes[2], signal.SIGKILL)
    hosts.at(40)
    strike(hosts.processes[1], signal.SIGSTOP)
    assert kinds(hosts.ended(0)[0]) == ["lost", "lost"]


@pytest.mark.long
def test_two_at_once(three):
    """One of three may not go on alone: it says so, and ends."""
    hosts = three()
    hosts.at(20, 0)
    for number in (1, 2):
        strike(hosts.processes[number], signal.SIGKILL)
    facts = json.loads(output(hosts.processes[0], 60)[1].splitlines()[-1])
    assert facts["error"] == "PeersLostError"
    assert "Of 3 members only a majority goes on" in facts["why"]


@pytest.mark.long
@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (2, 1)])
def test_a_link_is_cut_in_one_direction(three, pair):
    """A host hears another that does not hear it: they count as cut off from each other, and two go on."""
    hosts = three()
    hosts.at(20)
    hosts.network.cut_one_way(*pair)
    told = [json.loads(output(process, 150)[1].splitlines()[-1]) for process in hosts.processes]
    assert sorted("digest" in facts for facts in told) == [False, True, True], told
    assert {facts["digest"] for facts in told if "digest" in facts} == {wanted()[0]}
    assert {facts["error"] for facts in told if "error" in facts} == {"PeersLostError"}


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
def test_a_host_comes_back(three, victim):
    """A process that starts again with the same environment finds the run and joins it, the first one too."""
    hosts = three(pause=0.5)
    watcher = 1
    hosts.at(4, watcher)
    strike(hosts.processes[victim], signal.SIGKILL)
    hosts.at(6, watcher)
    hosts.again(victim)
    hosts.in_again(victim)
    found = hosts.ended(0, 1, 2)
    assert kinds(found[watcher]) == ["lost", "joined"], found
    assert found[victim]["told"][0] > 4
    print(found[watcher]["incidents"])


@pytest.mark.long
@pytest.mark.parametrize("options", [{"workers": "auto"}, {"workers": "auto", "stream": True}])
def test_comes_back_to_a_host_that_it_shares(tmp_path, options):
    """Nobody said how many workers: who comes has as many as the others have. It goes on in a stream where they are."""
    with OneHost() as here:
        hosts = Hosts(here, tmp_path, pause=0.5, **options)
        hosts.at(4)
        strike(hosts.processes[2], signal.SIGKILL)
        hosts.at(6)
        hosts.again(2)
        hosts.in_again(2)
        assert kinds(hosts.ended(0, 1, 2)[0]) == ["lost", "joined"]


@pytest.mark.long
@pytest.mark.parametrize(("victim", "address"), [(1, "10.77.0.1"), (0, "10.77.0.2")])
def test_comes_back_on_another_host(tmp_path, victim, address):
    """A process that starts on another host finds the run at MASTER_ADDR, where a member lives."""
    with Network(4) as network:
        hosts, watcher = Hosts(network, tmp_path, pause=0.5), 2
        hosts.at(4, watcher)
        strike(hosts.processes[victim], signal.SIGKILL)
        hosts.at(6, watcher)
        (hosts.folder / f"step-{victim}").unlink()
        # The job keeps its name where a process finds it at another address.
        job = {"PHALANX_JOB": hosts.world["MASTER_ADDR"]}
        world = {**hosts.world, **job, "MASTER_ADDR": address, "RANK": str(victim)}
        hosts.processes[victim] = network.start(3, *hosts.command, **world)
        hosts.in_again(victim)
        assert kinds(hosts.ended(0, 1, 2)[watcher]) == ["lost", "joined"]


class Agents(Hosts):
    """The same hosts, each with an agent of torchrun, whose rendezvous is static; or without one, in ``plain``."""

    plain = ()

    def begin(self, number):
        if number in self.plain:
            return super().begin(number)
        where = [f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={self.world['MASTER_PORT']}"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=1", *where]
        options = ["--max-restarts=3", "--monitor-interval=0.5", "--no-python"]
        return self.network.start(number, *torchrun, *options, *self.command, TORCH_ELASTIC_WORKER_IDENTICAL="1")


@pytest.mark.long
def test_agents_of_torchrun(tmp_path):
    """Agents are lost and come back, the first one as a plain process; an agent starts its process again."""
    with OneHost() as here:
        hosts = Agents(here, tmp_path, pause=1.0)
        hosts.at(2, 0)
        strike(hosts.processes[1], signal.SIGKILL)
        hosts.again(1)
        hosts.at(1, 1)
        strike(hosts.processes[0], signal.SIGKILL)
        hosts.at(hosts.step(2) + 2, 2)  # the others have gone on
        (tmp_path / "step-2").unlink()
        os.kill(descendants(hosts.processes[2].pid)[1], signal.SIGKILL)
        hosts.at(1, 2)
        hosts.plain = (0,)
        hosts.again(0)
        hosts.at(1, 0)
        strike(hosts.processes[1], signal.SIGKILL)
        hosts.again(1)
        hosts.in_again(1)
        found = hosts.ended(0, 1, 2)
        assert kinds(found[2]) == ["joined", "lost", "joined"], found


@pytest.mark.long
def test_comes_and_falls(three):
    """One after another falls and comes back, so that in the end nobody is there who began."""
    hosts = three(pause=0.5)
    hosts.at(4)
    strike(hosts.processes[2], signal.SIGKILL)
    hosts.at(6)
    for victim in (0, 1):
        hosts.again((victim + 2) % 3)
        hosts.at(1, (victim + 2) % 3)
        strike(hosts.processes[victim], signal.SIGKILL)
    hosts.again(1)
    hosts.in_again(1)
    hosts.ended(0, 1, 2)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_leaves(three, tmp_path, victim):
    """SIGTERM to one process: it leaves after a step, the others go on, and it may come back."""
    hosts = three(pause=0.5, run_dir=str(tmp_path / "run"), snapshot_every=10)
    hosts.at(4, 2)
    os.kill(hosts.processes[victim].pid, signal.SIGTERM)
    facts = json.loads(output(hosts.processes[victim], 60)[1].splitlines()[-1])
    assert facts["error"] == "Preempted", facts
    hosts.again(victim)
    hosts.in_again(victim)
    found = hosts.ended(0, 1, 2)
    assert kinds(found[2]) == ["lost", "joined"], found
    assert "SIGTERM" in found[2]["incidents"][0][2]


def saved(tmp_path, found, kind=""):
    """The lines of the log of a run whose end another saved: its root is that of one process, and it can go on."""
    assert found[1]["chain"] == trained(kind, run_dir=tmp_path / "alone").chain
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(STEPS))
    shutil.copytree(tmp_path / "run", tmp_path / "resumed", symlinks=True)
    resumed = trained(kind, STEPS + 5, run_dir=tmp_path / "resumed")
    assert resumed.resumed_from == STEPS
    assert resumed.digest == trained(kind, STEPS + 5).digest
    return lines


@pytest.mark.long
@pytest.mark.parametrize("during", ["steps", "slow", "last"])
def test_who_is_left_saves(three, tmp_path, during):
    """The process that saves falls while it saves every step, or in an evaluation: another goes on, with one chain."""
    hosts = three(run_dir=str(tmp_path / "run"), snapshot_every=1, slow=during != "steps")
    hosts.at(STEPS - 2 if during == "last" else 18, 1)
    time.sleep(0 if during == "steps" else 1)  # into the evaluation that follows the next step
    strike(hosts.processes[0], signal.SIGKILL)
    found = hosts.ended(1, 2)
    lines = saved(tmp_path, found)
    assert [line["event"] for line in lines if line["event"] in ("start", "end")] == ["start", "end"]
    pages.report([tmp_path / "run"], tmp_path / "page.html")
    assert f"<td>{found[1]['incidents'][0][-1]}</td>" in (tmp_path / "page.html").read_text()


@pytest.mark.longest
@pytest.mark.filterwarnings("ignore:the recipe may not be that of the snapshot")
@pytest.mark.parametrize("kind", ["stream", "shards", "brought"])
def test_who_is_left_saves_what_no_plan_has(tmp_path, kind):
    """The process that saves falls before it has noted a step: another adds it, with the batch that it was given."""
    with OneHost() as here:
        hosts = Hosts(here, tmp_path, 0.5, run_dir=str(tmp_path / "run"), snapshot_every=1, **{kind: True})
        hosts.at(4, 0)  # it is in a callback, which comes before the link
        strike(hosts.processes[0], signal.SIGKILL)
        (tmp_path / "enough").touch()
        found = hosts.ended(1, 2)
    assert kinds(found[1]) == ["lost"]
    saved(tmp_path, found, kind)


@pytest.mark.longest
def test_who_is_stopped_at_the_end_is_not_waited_for(tmp_path):
    """It has the lock of the directory that all see: another saves the end. Once it wakes, it changes nothing."""
    with OneHost() as here:
        hosts = Hosts(here, tmp_path, run_dir=str(tmp_path / "run"), snapshot_every=1000, slow=True)
        hosts.at(STEPS - 2)
        time.sleep(1)  # into the evaluation that follows the last step
        strike(hosts.processes[0], signal.SIGSTOP)
        found = hosts.ended(1, 2)
        assert newest_step(tmp_path / "run") == STEPS
        strike(hosts.processes[0], signal.SIGCONT)
        assert "without it" in output(hosts.processes[0], 60)[1]
    assert newest_step(tmp_path / "run") == STEPS
    lines = saved(tmp_path, found)
    assert [line["event"] for line in lines][-1] == "end"


@pytest.mark.longest
def test_an_end_that_nobody_could_save_is_said(tmp_path):
    """Two have directories of their own, and who saves falls at the end: the other says so; the same call saves it."""
    options = {"run_dir": str(tmp_path / "run"), "apart": True, "slow": "0", "snapshot_every": 1000, "size": 2}
    with OneHost() as here:
        hosts = Hosts(here, tmp_path, **options)
        hosts.at(STEPS - 1)
        time.sleep(0.3)  # process 1 waits for process 0, which evaluates
        strike(hosts.processes[0], signal.SIGKILL)
        status, text = output(hosts.processes[1], 60)
        assert status == 0
        assert f"step {STEPS}, the last one, may not be saved; the same call does that: process 0 is lost" in text
        assert newest_step(tmp_path / "run0") < STEPS
        again = Hosts(here, tmp_path, **options)
        assert again.ended(0, 1)[0]["digest"] == json.loads(text.splitlines()[-1])["digest"]
    assert newest_step(tmp_path / "run0") == STEPS


@pytest.mark.long
def test_the_last_one_goes_on(tmp_path):
    """Where all see one run_dir, who is left alone goes on though it is not the lowest; its chain has no gap."""
    with OneHost() as here:
        hosts = Hosts(here, tmp_path, run_dir=str(tmp_path / "run"), snapshot_every=10)
        for step, victim in ((10, 2), (30, 0)):
            hosts.at(step, 1)
            strike(hosts.processes[victim], signal.SIGKILL)
        found = hosts.ended(1)[1]
    assert kinds(found) == ["lost", "lost"]
    assert found["chain"] == trained(run_dir=tmp_path / "alone").chain


@pytest.mark.long
def test_of_two_halves_one_goes_on(three, tmp_path):
    """Two hosts that see one run_dir, not each other: one goes on to the digest and saves, one ends and says why."""
    hosts = three(pause=0.1, run_dir=str(tmp_path / "run"), snapshot_every=10)
    hosts.at(10)
    strike(hosts.processes[2], signal.SIGKILL)
    hosts.at(20)
    hosts.network.cut(0)
    ends = {number: json.loads(output(hosts.processes[number], 150)[1].splitlines()[-1]) for number in (0, 1)}
    lost = [number for number, facts in ends.items() if facts.get("error") == "PeersLostError"]
    assert len(lost) == 1, ends
    assert "the half that is first in" in ends[lost[0]]["why"]
    assert ends[1 - lost[0]]["digest"] == wanted()[0]
    assert newest_step(tmp_path / "run") == STEPS


@pytest.mark.long
def test_another_recipe_may_not_join(three):
    """A process that comes with another recipe is refused with a sentence, and the run goes on."""
    hosts = three(pause=0.5)
    hosts.at(4)
    strike(hosts.processes[2], signal.SIGKILL)
    hosts.at(6)
    hosts.command[2] = hosts.command[2].replace("steps=90", "steps=91")
    hosts.again(2)
    _, text = output(hosts.processes[2], 100)
    assert "a run is under way on these hosts" in text, text
    (hosts.folder / "enough").touch()
    hosts.ended(0, 1)


@pytest.mark.long
def test_a_state_that_is_not_taken_home_whole_is_found(three):
    """Negative twin of all of these: survivors whose weights are moved by one on the way end in other bits."""
    hosts = three(plant=True)
    hosts.at(20)
    strike(hosts.processes[2], signal.SIGKILL)
    found = [json.loads(output(hosts.processes[number], 150)[1].splitlines()[-1]) for number in (0, 1)]
    assert len({facts["digest"] for facts in found} | {wanted()[0]}) == 2, found
