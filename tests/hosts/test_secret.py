"""A run with a secret: who does not have it takes no part, and the secret is nowhere that others see."""

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from phalanx.engines.hosts.gloo import TCP, Gloo
from phalanx.engines.hosts.messages import Door, key_of
from phalanx.engines.hosts.stores import Values, secret_of
from phalanx.errors import SeveredError, UsageError
from tests.families import FAMILIES
from tests.hosts.network import Network, descendants, output, strike, why_not
from tests.hosts.test_falls import Hosts, kinds
from tests.hosts.test_messages import JOIN, Outside
from tests.hosts.worlds import BEGIN, END, ended, free_port, started, world

SECRET = "correct horse battery staple"


def wanted(**fields):
    """The digest of one process."""
    return FAMILIES["mlp"].recipe(4, **fields).train(engine="inline").digest


@pytest.mark.long
def test_with_a_secret_the_answer_is_the_same(tmp_path):
    """Out of the environment, or of a file, which counts for more."""
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    code = f"tried(lambda: family.recipe(4).train(deadline_seconds=20, secret_file={str(file)!r}).digest)"
    assert world(code, PHALANX_SECRET="something else, and long") == [[wanted()]] * 2


@pytest.mark.long
def test_who_has_another_secret_is_not_believed(tmp_path):
    """Neither side begins, and both say what may be wrong. They begin together, and who has the store ends last."""
    found = world(f"""
os.environ["PHALANX_SECRET"] = f"the secret of process {{rank}}"
open(f"{tmp_path}/here-{{rank}}", "w").close()
while not os.path.exists(f"{tmp_path}/here-{{1 - rank}}"):
    time.sleep(0.01)
tried(lambda: family.recipe(4).train(deadline_seconds=14 - 6 * rank).digest)
""")
    assert all("PHALANX_JOB and the secret must be the same in all processes" in told[0] for told in found), found


@pytest.mark.long
def test_the_secret_is_nowhere(tmp_path):
    """It is in no file of a run, no command line, and nothing that the processes print or raise."""
    code = (
        BEGIN
        + f"""
def slowly(report):
    time.sleep(0.1)
class Everywhere:
    everywhere = True
    def step(self, report):
        time.sleep(0.1)
        open(f"{tmp_path}/begun-{{rank}}", "w").close()
x, y = family.data
options = dict(run_dir={str(tmp_path)!r} + "/run", deadline_seconds=20, lost_after=2.0, callbacks=[Everywhere()])
result = family.recipe(4, steps=20).train(workers=2, **options)
told += [result.digest, repr(result), str(result), repr(result.incidents)]
tried(lambda: family.recipe(4, seed=1, steps=30).train(workers=2, **options).digest)
"""
        + END
    )
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = started(code, 2, {"PHALANX_SECRET": SECRET}, **streams)
    secrets = SECRET.encode(), SECRET.encode().hex().encode()
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "begun-1").exists():
            assert time.monotonic() < end
            assert processes[0].poll() is None, processes[0].communicate()
            time.sleep(0.05)
        commands = b""
        for process in processes:
            for pid in descendants(process.pid):
                with contextlib.suppress(OSError):
                    commands += pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        printed = [process.communicate(timeout=200) for process in processes]
    finally:
        ended(processes)
    digest = json.loads(printed[0][0].splitlines()[-1])[0]
    assert digest == wanted(steps=20)
    assert b"beacon" in commands
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert len(written) > 1000
    for secret in secrets:
        assert secret not in commands
        assert secret not in written
        assert secret not in repr(printed).encode()


@pytest.mark.long
def test_a_stranger_without_the_secret_changes_nothing():
    """It reads the store, knows address, port and size, and asks to join: the run goes on to its digest."""
    port = free_port()
    code = (
        BEGIN
        + """
class Everywhere:
    everywhere = True
    def step(self, report):
        time.sleep(0.15)
        print(json.dumps(report.step), flush=True)
result = family.recipe(4, steps=25).train(workers=2, deadline_seconds=20, lost_after=2.0, callbacks=[Everywhere()])
told += [result.digest, [each.kind for each in result.incidents], [each.why for each in result.incidents]]
"""
        + END
    )
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = started(code, 2, {"PHALANX_SECRET": SECRET, "MASTER_PORT": port}, **streams)
    try:
        assert processes[0].stdout.readline() == "0\n"
        weak = Outside(Door(key_of(b"", f"{port} 2 none 127.0.0.1"), 2))
        weak.air.setblocking(False)
        member = SimpleNamespace(place=["127.0.0.1", int(port)])
        store = TCP("127.0.0.1", int(port), is_master=False)
        store.set("phalanx/1/run", "7")
        for _ in range(20):
            weak.say(member, run=None, look=True)
            weak.say(member, say=JOIN)
            weak.say(member, bye={"way": "failed", "why": "\x1b[31m"})
        time.sleep(1.0)
        assert weak.heard() == []
        weak.air.close()
        found = [process.communicate(timeout=100) for process in processes]
    finally:
        ended(processes)
    told = [json.loads(out.splitlines()[-1]) for out, _ in found]
    assert [each[0] for each in told] == [wanted(steps=25)] * 2, found
    assert set(told[0][1]) == {"dropped"}
    dropped = [each for rows in told for each in rows[2]]
    assert any("of another job" in each for each in dropped), dropped


def test_who_connects_to_gloo_without_the_key_is_noticed():
    """Each process shows that it has the key, before anything of the run is sent."""
    store = TCP("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = {}

    def meet(rank, key, name):
        mine = torch.distributed.PrefixStore(name, TCP("127.0.0.1", store.port, is_master=False))
        try:
            found[name, rank] = Gloo(mine, rank, 2, 20.0, "lo", key=key)
        except SeveredError as error:
            found[name, rank] = str(error)

    for name, keys in {"same": (b"a", b"a"), "other": (b"a", b"b")}.items():
        threads = [threading.Thread(target=meet, args=(rank, key, name)) for rank, key in enumerate(keys)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert all(isinstance(found["same", rank], Gloo) for rank in range(2))
    assert any("does not have the key of this job" in str(found["other", rank]) for rank in range(2)), found
    found["same", 0].close(), found["same", 1].close()


def test_what_a_stranger_put_into_the_store_is_as_if_it_were_not_there():
    """What has no MAC of the job is not read, whatever it is; the counter says so."""
    store = TCP("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    door = Door(key_of(SECRET.encode(), "job"), 2)
    values = Values(store, door, lambda do: do(), "1/")
    assert values.take("run") is None
    for junk in (b"7", b"", b"\xff" * 5000, Door(b"weak", 2).seal(7, "1/run"), door.seal(7, "2/run")):
        store.set("run", junk)
        assert values.take("run") is None
    values.put("run", 7)
    assert values.take("run") == 7
    assert door.dropped.total() == 4


@pytest.mark.parametrize("content", ["", "tinyone"])
def test_a_short_secret_is_refused(content, tmp_path, monkeypatch):
    """With how to make one, and without showing it."""
    file = tmp_path / "secret"
    file.write_text(content)
    file.chmod(0o600)
    monkeypatch.setenv("PHALANX_SECRET", content)
    for source in (file, None):
        with pytest.raises(UsageError, match="give at least 16, as openssl rand") as raised:
            secret_of(source)
        assert "tinyone" not in str(raised.value)


def test_secret_files(tmp_path):
    """One that others may read is warned of, one that is not there refused; an empty name is no path."""
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(0o640)
    with pytest.warns(UserWarning, match="which others on this machine may read; chmod 600 it"):
        assert secret_of(file) == SECRET.encode()
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        secret_of(tmp_path / "none")
    with pytest.raises(UsageError, match="secret_file is '', which is no path; give a file"):
        FAMILIES["mlp"].recipe(4).train(secret_file="")


def test_without_a_secret_a_run_over_hosts_says_so(capsys, monkeypatch):
    """One line, from process 0, where its address is not loopback."""
    from phalanx.engines.hosts import world as module

    told = []
    monkeypatch.setattr("phalanx.engines.hosts.addresses.say", told.append)
    monkeypatch.setattr(module, "Members", lambda *_: 1 / 0)  # planted: no further
    for address, rank, secret, lines in (("10.0.0.1", 0, "", 1), ("10.0.0.1", 1, "", 0), ("127.0.0.1", 0, "", 0),
                                         ("10.0.0.1", 0, SECRET, 0)):  # fmt: skip
        told.clear()
        monkeypatch.setattr(module, "RUNS", [0])
        monkeypatch.setattr(module, "ends", lambda _, address=address: (address, address))
        monkeypatch.setattr(module, "surroundings", lambda address=address, rank=rank: (rank, 2, address, 1))
        monkeypatch.delenv("PHALANX_SECRET", raising=False)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if secret:
            monkeypatch.setenv("PHALANX_SECRET", secret)
        with pytest.raises(ZeroDivisionError):
            module.World(1.0, 1.0)
        assert len(told) == lines, (address, rank, secret)


@pytest.mark.parametrize(("local", "what"), [(None, "said"), ("1", "refused"), ("2", "")])
def test_a_name_that_is_loopback_at_process_0(local, what, monkeypatch):
    """Debian has 127.0.1.1 for a host's own name: nobody else comes to that. Refused if others are to come."""
    from phalanx.engines.hosts import addresses as module

    told = []
    monkeypatch.setattr(module, "say", told.append)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    refused = pytest.raises(UsageError, match=r"127\.0\.1\.1 on the host")
    with refused if what == "refused" else contextlib.nullcontext():
        module.look_at_address("host0", "127.0.1.1", 2, open_=True)  # planted: as process 0 does
    assert len(told) == (what == "said")
    for address, own in (("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1")):
        module.look_at_address(address, own, 2, open_=True)  # planted: as process 0 does
    assert len(told) == (what == "said")


STRANGER = """
import json, sys, time
from types import SimpleNamespace
from phalanx.engines.hosts.gloo import TCP
from phalanx.engines.hosts.messages import Door, key_of
from tests.hosts.test_messages import BEAT, SAID, Outside
port = int(sys.argv[1])
weak = Outside(Door(key_of(b"", f"{port} 3 none 10.77.0.1"), 3), 2, "10.77.0.3")
store = TCP("10.77.0.1", port, is_master=False)
run = json.loads(store.get("/phalanx/1/run")[33:])  # the store shows it to everybody
for key in ("run", f"{run}/left/0", f"{run}/newest/1", f"{run}/about/0"):
    store.set(f"/phalanx/1/{key}", weak.door.seal(7, f"1/{key}"))
for _ in range(20):
    for rank in (0, 1):
        to = SimpleNamespace(place=[f"10.77.0.{rank + 1}", port + rank])
        for weak.rank in (2, 1 - rank):
            weak.say(to, run=None, look=True)
            weak.say(to, run=run, beat=BEAT | {"run": run, "hears": [0, 1, 2]})
            weak.say(to, run=run, bye={"way": "failed", "why": "x"})
            for said in SAID:
                weak.say(to, run=run, say=said)
    time.sleep(0.05)
time.sleep(1)
print(json.dumps(weak.heard()))
"""


def heard_by_a_stranger(network, hosts):
    """What members answer to one on the third host that knows all but the secret."""
    status, text = output(network.start(2, sys.executable, "-c", STRANGER, hosts.world["MASTER_PORT"]))
    assert status == 0, text
    return json.loads(text.splitlines()[-1])


WHY_NOT = why_not()
NEEDS_NAMESPACES = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.mark.longest
@NEEDS_NAMESPACES
def test_on_a_network_who_lacks_the_secret_is_refused(tmp_path):
    """A stranger's beats, votes, farewells and joins, and a lost rank that comes back without it. With it, it joins."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for file, secret in ((right, SECRET), (wrong, "wrong " + SECRET)):
        file.write_text(secret)
        file.chmod(0o600)
    with Network(3) as network:
        hosts = Hosts(network, tmp_path, pause=1.0, secret_file=str(right), deadline_seconds=10)
        hosts.at(3)
        strike(hosts.processes[2], signal.SIGKILL)
        hosts.at(5)
        assert heard_by_a_stranger(network, hosts) == []
        with_it = hosts.command
        hosts.command = [one.replace(str(right), str(wrong)) for one in with_it]
        hosts.again(2)
        _, text = output(hosts.processes[2])
        assert '"error": "PeersLostError"' in text, text
        assert "and the secret must be the same in all processes" in text
        hosts.command = with_it
        hosts.processes[2] = hosts.begin(2)
        hosts.in_again(2)
        found = hosts.ended(0, 1, 2)
    assert [kind for kind in kinds(found[0]) if kind != "dropped"] == ["lost", "joined"], found
    assert "dropped" in kinds(found[0])


@pytest.mark.long
@NEEDS_NAMESPACES
def test_without_a_secret_the_same_stranger_is_answered(tmp_path):
    """Negative twin: it is told of the run."""
    with Network(3) as network:
        hosts = Hosts(network, tmp_path, pause=1.0, deadline_seconds=10)
        hosts.at(3)
        strike(hosts.processes[2], signal.SIGKILL)
        hosts.at(5)
        assert any("beat" in each for each in heard_by_a_stranger(network, hosts))


MEETS = """
import datetime, os, sys, torch
from torch.distributed import PrefixStore
from phalanx.engines.hosts.gloo import TCP, Gloo
from phalanx.engines.hosts.stores import served
from phalanx.errors import SeveredError
rank, limit = int(os.environ["RANK"]), datetime.timedelta(seconds=20)
base = TCP("10.77.0.1", int(os.environ["MASTER_PORT"]), is_master=not rank, timeout=limit, wait_for_workers=False)
state = torch.arange(8.0) if not rank else torch.zeros(8)
try:
    met = Gloo(PrefixStore("callers", base), rank, 2, 20.0, "eth0", key=sys.argv[1 + rank].encode())
    met.wait([met.begin_receive(state, 0) if rank else met.begin_send(state, 1)])
    print("sum", state.sum().item(), flush=True)
except SeveredError as error:
    print("severed", error, flush=True)
"""


@pytest.mark.long
@NEEDS_NAMESPACES
@pytest.mark.parametrize("theirs", ["a", "b", ""])
def test_on_a_network_the_state_is_not_sent_to_who_lacks_the_key(theirs):
    """Whoever connects in place of a member, and shows another key or none, gets nothing; the negative twin gets it."""
    with Network(2) as network:
        found = [output(process)[1] for process in network.ranks(MEETS, "a", theirs)]
    if theirs == "a":
        assert all("sum 28.0" in text for text in found), found
    else:
        assert "severed" in found[0], found
        assert "sum 28.0" not in found[1], found
