"""How a run over several processes starts: who says what meanwhile, and the status of a start that comes to nothing."""

import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from phalanx.engines.hosts import addresses, stores, world
from phalanx.errors import UsageError
from phalanx.lab.network import NAMES
from tests.hosts.network import Network, output, why_not
from tests.hosts.worlds import ended, started

JOB = """
import torch, phalanx
torch.manual_seed(0)
x, y = torch.randn(16, 8), torch.randn(16, 1)
make, loss = lambda: torch.nn.Linear(8, 1), torch.nn.functional.mse_loss
recipe = phalanx.Recipe(make, (x, y), loss, replicas=4, batch_size=8, steps=4)
"""
START = """
import os, signal, sys, time
from phalanx.cli.app import main
from phalanx.engines.hosts import stores, world
from phalanx.errors import PeersLostError
rank, World = int(os.environ["RANK"]), world.World
world.SECONDS, stores.SAID_AFTER, stores.LONELY_SECONDS = 8.0, 1.0, 4.0  # planted
def raised(error):
    raise error
def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)
{plant}
sys.argv = ["phalanx", "train", {job!r}, "--workers", "4"]
main()
"""
LEFT = "process 1 left before this run began: "
# What happens, which processes are started, the status of one of them, what it says in the end, and for whom it waits.
STARTS = {
    "nobody serves the store": ("", [1], (1, 3), "did not find each other", "the store of process 0"),
    "the address means nothing": (
        "os.environ['MASTER_ADDR'] = 'no.such.host.invalid'", [1], (1, 3), "did not find each other", "an address of",
    ),
    "process 1 is not started": ("", [0], (0, 3), "process 1 did not come", "process 1 (of 2) at 127.0.0.1:"),
    "process 0 is not started, its agent has a store": (
        "os.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'True'\nstore = stores.served('127.0.0.1', int(os.environ["
        "'MASTER_PORT']), world.CONNECTED)", [1], (1, 3), "process 0 did not come", "process 0 (of 2)",
    ),
    "killed once it has come": ("if rank: World.agree = killed", [0, 1], (0, 3), "did not come", "process 1"),
    "who has the store is killed": ("if not rank: World.agree = killed", [0, 1], (1, 3), "cannot be reached any", ""),
    "who has the state is killed": ("if not rank: World.send = killed", [0, 1], (1, 3), "", ""),
    "Ctrl-C": (
        "if rank: World.agree = lambda *_: raised(KeyboardInterrupt())", [0, 1], (0, 3), LEFT + "KeyboardInt", "",
    ),
    "lost": ("if rank: World.agree = lambda *_: raised(PeersLostError('x'))", [0, 1], (0, 3), LEFT + "Peers", ""),
    "not connected": (
        "if rank: World._connect = lambda *_: time.sleep(60)", [0, 1], (0, 3), "another process cannot be reached",
        "a connection to process 1",
    ),
    "another secret": (
        "os.environ['PHALANX_SECRET'] = 'the secret of process ' + str(rank)", [0, 1], (0, 3), "and the secret must",
        "process 1",
    ),
    "workers are not connected": (
        "import dataclasses\nfrom phalanx.engines.hosts import driver\ndriver.MOST, rendezvous = 0, World.rendezvous\n"
        "if rank: World.rendezvous = lambda *one: dataclasses.replace(rendezvous(*one), run=7)", [0, 1], (0, 3),
        "1 times in a row no step was finished", "",
    ),
    # Negative twins: to start it again does not help.
    "who has the state goes on with another recipe": (
        "from phalanx.checkpoint import resume\n"
        "resume.ResumeState.begin = lambda *_: raised(resume.UsageError('another recipe'))", [0, 1], (1, 1),
        "left the run: UsageError: another recipe", "",
    ),
    "its recipe raises": ("if rank: World.agree = lambda *_: raised(ValueError('x'))", [0, 1], (0, 1), LEFT, ""),
}  # fmt: skip


def begun(plant, ranks, job, size=2, **environment):
    """Processes with these ranks of a world, each a `phalanx train` in which something is planted."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return started(START.format(plant=plant, job=str(job)), size, environment, ranks=ranks, **streams)


def told(processes, one):
    """Status and errors of one of them; all end with it."""
    try:
        _, text = one.communicate(timeout=120)
    finally:
        ended(processes)
        for other in {*processes} - {one}:
            other.communicate()
    return one.returncode, text


@pytest.mark.long
@pytest.mark.cases(2)
@pytest.mark.parametrize("what", STARTS)
def test_a_start_that_comes_to_nothing(what, tmp_path):
    """`phalanx train` ends with 3 wherever to start again may help, and says why, and meanwhile for whom it waits."""
    plant, ranks, (rank, status), why, whom = STARTS[what]
    (tmp_path / "job.py").write_text(JOB)
    processes = begun(plant, ranks, tmp_path / "job.py")
    found, text = told(processes, processes[ranks.index(rank)])
    lines = text.splitlines()
    assert found == status, text
    assert why in lines[-1], text
    waits = [line for line in lines if line.startswith(f"phalanx: process {rank} waits for {whom}")]
    assert len(waits) == 1 or not whom, text


@pytest.mark.long
def test_who_is_there_is_not_named_as_missing(tmp_path):
    """Process 2 hears nothing of process 0, which waits for process 1: it says so, and once."""
    (tmp_path / "job.py").write_text(JOB)
    outlives = "if not rank: world.SECONDS = 60.0"  # else its store may be gone before process 2 has given up
    processes = begun(outlives, [0, 2], tmp_path / "job.py", size=3)
    status, text = told(processes, processes[1])
    assert status == 3, text
    assert text.count("process 2 waits for process 0, or one that it waits for, (of 3) at 127.0.0.1:") == 1, text
    assert "process 0, or one that it waits for, did not come to this run in time" in text.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_something_else_listens_there(rank, tmp_path):
    """It accepts connections and says nothing, for ever: a start comes to an end all the same, and says what to see."""
    (tmp_path / "job.py").write_text(JOB)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        processes = begun("", [rank], tmp_path / "job.py", MASTER_PORT=str(mute.getsockname()[1]))
        status, text = told(processes, processes[0])
    assert status == 3, text
    assert "see that nothing else listens there" in text.splitlines()[-1]


@pytest.mark.long
def test_an_interface_that_is_not_there(tmp_path):
    """It is named, with those that are there, and it is a wrong call; the other one hears of no connection."""
    (tmp_path / "job.py").write_text(JOB)
    processes = begun("", [0, 1], tmp_path / "job.py", GLOO_SOCKET_IFNAME="nosuch0")
    status, text = told(processes, processes[0])
    assert status == 2, text
    assert "GLOO_SOCKET_IFNAME is 'nosuch0', which Gloo cannot use here; name one of " in text.splitlines()[-1]


def test_where_this_host_is_follows_from_a_name_that_is_known(monkeypatch):
    """That of a new pod gets its address late; asked before, this host's own address would be that of loopback."""
    known, asked = [False, False, True], []

    def ends(address):
        asked.append(address)
        raise LookupError

    monkeypatch.setattr(addresses, "is_known", lambda _: known.pop(0))
    for name, thing in {"surroundings": lambda: (0, 2, "pod", 29500), "ends": ends, "RUNS": [0]}.items():
        monkeypatch.setattr(world, name, thing)
    with pytest.raises(LookupError):
        world.World(5.0, 2.0)
    assert (known, asked) == ([], ["pod"])


@pytest.mark.parametrize(("port", "size"), [(65535, 2), (65533, 4), (70000, 1)])
def test_a_port_that_leaves_too_few_for_all(monkeypatch, port, size):
    """It is refused at once, and the highest that works is named."""
    most = 65536 - size
    for name, value in {"RANK": 0, "WORLD_SIZE": size, "MASTER_ADDR": "a", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UsageError, match=f"MASTER_PORT is {port}, .*; choose at most {most}"):
        stores.surroundings()
    monkeypatch.setenv("MASTER_PORT", str(most))
    assert stores.surroundings() == (0, size, "a", most)


def test_whoever_waits_says_so_now_and_then(capsys, monkeypatch):
    """After 5 s, and then every 30. After work of one's own a wait begins anew, and without whom nothing is said."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(stores, "time", SimpleNamespace(monotonic=lambda: clock.now))
    waiting, said = stores.Waiting("process 0 waits for {}"), []

    def wait(whom, seconds):
        with waiting.on(whom):
            for _ in range(10 * seconds):
                clock.now += 0.1
                waiting.tick()
                said.extend((round(clock.now), line) for line in capsys.readouterr().err.splitlines())

    wait("process 1", 2)
    clock.now += 1
    waiting.tick()  # in between, for nobody
    wait("process 1", 1)
    wait("process 2", 70)  # it follows at once
    clock.now += 60
    wait("process 3", 4)
    clock.now += 60
    wait("process 4", 6)
    line = "phalanx: process 0 waits for process "
    assert said == [(5, line + "2"), (35, line + "2"), (65, line + "2"), (203, line + "4")]
    for _ in range(100):
        clock.now += 0.1
        waiting.tick()
    assert capsys.readouterr().err == ""


WHY_NOT = why_not()
NEEDS_NAMESPACES = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.mark.long
@NEEDS_NAMESPACES
def test_a_name_that_is_loopback_at_process_0(tmp_path):
    """Debian's line: refused at once where others are elsewhere, else once nobody came. The way out works."""
    (tmp_path / "job.py").write_text(JOB)
    code = START.format(plant="world.SECONDS = 60", job=str(tmp_path / "job.py"))
    ways = [({"MASTER_ADDR": "debian", "LOCAL_WORLD_SIZE": "1"}, 2, 1), ({"MASTER_ADDR": "debian"}, 3, 1),
            ({"MASTER_ADDR": "10.77.0.1"}, 0, 2)]  # fmt: skip
    with Network(2) as network:
        for number, address in enumerate(("127.0.1.1", "10.77.0.1")):
            with (NAMES / network.hosts[number] / "hosts").open("a") as file:
                file.write(f"{address} debian\n")
        for at, (way, wanted, size) in enumerate(ways):
            facts = {"WORLD_SIZE": "2", "MASTER_PORT": str(29700 + at), **way}
            ranks = [network.start(rank, sys.executable, "-c", code, RANK=str(rank), **facts) for rank in range(size)]
            begun_at = time.monotonic()
            status, text = output(ranks[0])
            assert status == wanted, text
            assert ("MASTER_ADDR is debian, which is 127.0.1.1 on the host" in text) == bool(wanted), text
            assert time.monotonic() - begun_at < 50
            assert [output(other)[0] for other in ranks[1:]] == [0] * (size - 1)
