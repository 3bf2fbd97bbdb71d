"""Searchers on a Ray cluster: nodes at 127.0.0.1, and two machines in network namespaces."""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.managers import BaseManager
from pathlib import Path

import psutil
import pytest
from harness import (
    Run,
    arguments,
    cluster_searchers,
    endless,
    helpers_of,
    local_cluster,
    processes_of,
    run_tba,
    wait_until,
)
from test_runs import same_weights

import tba
from tba import read_lines

pytestmark = pytest.mark.cluster

# the faults on demand of faults.py; waits are logged after three seconds
PLUGIN = f"""
import sys
import tba
sys.path.append({str(Path(__file__).parent)!r})
import faults

tba.Trainer.LOG_EVERY = 3
"""


@pytest.fixture(scope="module")
def lasting():
    """A cluster of a head and two nodes that no test takes away."""
    with local_cluster(2) as cluster:
        yield cluster


def continues(run: Run) -> None:
    """Wait for five more steps."""
    run.reaches(run.latest()["step"] + 5)


def test_nodes_are_lost_and_join(gsm8k, tmp_path, monkeypatch):
    """Three Searchers on two nodes, which are lost in a transfer, while loading, and idle."""
    out = tmp_path / "run"
    plugin = tmp_path / "mine.py"
    plugin.write_text(PLUGIN)
    monkeypatch.setenv("TBA_FAULTS", str(tmp_path / "run-faults"))  # for processes of the nodes
    with local_cluster(2) as cluster:
        flags = {"num_searchers": 3, "plugin": plugin}
        run = Run(out, endless(gsm8k, out, cluster=cluster.address, **flags), hooks=False)
        run.reaches(5)
        alive = lambda: run.latest()["searchers_alive"]
        run.until(lambda: alive() == 2, "both Searchers that have room")  # one loads later

        run.want("hang-receiving")  # a Searcher stops within a transfer; then its node is lost
        run.suffered("hang-receiving")
        stopped = lambda s: s.status() == psutil.STATUS_STOPPED
        wait_until(lambda: any(map(stopped, cluster_searchers())), "a Searcher that hangs")
        nodes = sorted(
            cluster.worker_nodes, key=lambda n: not any(map(stopped, cluster_searchers(n)))
        )
        cluster.lose(nodes[0])
        run.until(lambda: alive() == 1, "one Searcher left")
        continues(run)
        run.says("lost its machine and waits for another one")

        joined = cluster.join()
        run.until(lambda: cluster_searchers(joined), "a Searcher on the new node")
        cluster.lose(joined)  # while the Searcher loads its models
        continues(run)

        cluster.lose(nodes[1])
        run.says("0/3 Searchers ready")
        cluster.join()
        continues(run)
        os.kill(run.process.pid, signal.SIGINT)
        said = run.ends(128 + signal.SIGINT)
        wait_until(lambda: not cluster_searchers(), "every Searcher gone")
    assert "restart 1 of" not in said  # a lost machine is not a failure
    positions = [index for index, *_ in run.noted("stored")]
    assert len(positions) == len(set(positions))
    # with another number of Searchers, on one machine
    step = run.latest()["step"]
    more = ["--cluster", "", "--num_searchers", "1", "--steps", str(step + 3)]
    run_tba(["--resume", str(out), *more])
    assert [m["step"] for m in read_lines(out / "metrics.jsonl")] == list(range(1, step + 4))


def test_lockstep_that_waits_for_a_machine_saves_after_a_signal(gsm8k, tmp_path):
    out = tmp_path / "run"
    with local_cluster(1) as cluster:
        flags = {"lockstep": True, "num_searchers": 1}
        run = Run(out, endless(gsm8k, out, cluster=cluster.address, **flags), hooks=False)
        run.reaches(3)
        cluster.lose(*cluster.worker_nodes)
        run.says("lost its machine and waits for another one")
        os.kill(run.process.pid, signal.SIGINT)
        run.ends(128 + signal.SIGINT)
    assert (out / f"checkpoint-{run.latest()['step']}").exists()


def test_lockstep_on_a_cluster_equals_one_machine(gsm8k, tmp_path, lasting):
    flags = {"lockstep": True, "lag": 1, "num_searchers": 2, "eval_every": 3, "steps": 6}
    run_tba(arguments(gsm8k, tmp_path / "one", **flags))
    run_tba(arguments(gsm8k, tmp_path / "many", cluster=lasting.address, **flags))
    assert not cluster_searchers()
    assert same_weights(tmp_path / "one" / "final", tmp_path / "many" / "final")
    one, many = (read_lines(tmp_path / name / "eval.jsonl") for name in ("one", "many"))
    assert one == many


def test_the_trainer_has_the_cores_that_searchers_on_its_machine_leave(lasting, monkeypatch):
    """However many Searchers run elsewhere: the head's only device is the Trainer's."""
    import ray

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # of bench/common.py
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(32))
    config = tba.settings(cluster=lasting.address, num_searchers=31)
    assert tba.cpu_threads(config) == 1  # a Searcher's, which does not know what else is there
    try:
        assert tba.join_cluster(config) == 2
        assert tba.cpu_threads(config) == 32
        config.cluster = ""
        assert tba.cpu_threads(config) == 1
    finally:
        ray.shutdown()


def test_ports_keys_and_a_killed_trainer(gsm8k, tmp_path, lasting):
    out = tmp_path / "run"
    flags = {"cluster": lasting.address, "num_searchers": None}  # a Searcher for each node
    run = Run(out, endless(gsm8k, out, **flags), hooks=False)
    run.reaches(3)
    searchers = [process.pid for process in cluster_searchers()]
    assert len(searchers) == 2
    # the Trainer's device is taken: a second run is refused
    _, said = run_tba(arguments(gsm8k, tmp_path / "other", cluster=lasting.address), code=2)
    assert f"--cluster {lasting.address}: has no free CPU on this machine" in said
    trainer = set(listening(run.process.pid))
    others = set()
    for pid in processes_of(run.process.pid)[1:] + searchers:
        others |= set(listening(pid))
    ours = {address for address in trainer | others if address[0] != "::"}  # those are Ray's own
    assert {ip.removeprefix("::ffff:") for ip, _ in ours} == {"127.0.0.1"}
    _, manager = helpers_of(psutil.Process(run.process.pid))
    ports = {port for _, port in set(listening(manager.pid)) - trainer}  # less inherited ones
    with pytest.raises(multiprocessing.AuthenticationError):
        BaseManager(("127.0.0.1", *ports), b"a guess").connect()
    run.process.kill()
    run.process.wait()
    run.gone()
    wait_until(lambda: not cluster_searchers(), "every Searcher gone")


def listening(pid: int) -> list[tuple[str, int]]:
    """The addresses and ports at which a process listens."""
    connections = psutil.Process(pid).net_connections("inet")
    return [tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN]


def test_a_cluster_that_is_not_there(gsm8k, tmp_path):
    out = tmp_path / "run"
    _, said = run_tba(arguments(gsm8k, out, cluster="127.0.0.1:9"), code=2)
    (line,) = (line for line in said.splitlines() if line)
    assert "error: --cluster 127.0.0.1:9: " in line and "refused" in line
    assert not out.exists()


@contextlib.contextmanager
def two_machines():
    """Two network namespaces with addresses of their own; yields commands that run there."""
    names = ["tba-head", "tba-node"]
    ip = lambda *words: subprocess.run(["ip", *words], check=True)
    if subprocess.run(["unshare", "--net", "true"]).returncode:
        pytest.skip("network namespaces cannot be made here")
    for name in names:
        ip("netns", "add", name)
    try:
        ip(*"link add tba0 netns tba-head type veth peer tba0 netns tba-node".split())
        for i, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.77.0.{i}/24", "dev", "tba0")
            ip("-n", name, "link", "set", "tba0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.skipif(not shutil.which("ip"), reason="network namespaces need iproute2")
def test_searchers_on_another_machine(gsm8k, tmp_path, monkeypatch):
    """Every connection crosses a network, and its end is a node's own address."""
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--block"]
    start += ["--object-store-memory=100000000", "--disable-usage-stats"]
    nodes = [
        ["--head", "--port=6399", "--node-ip-address=10.77.0.1", "--include-dashboard=0"],
        ["--address=10.77.0.1:6399", "--node-ip-address=10.77.0.2"],
    ]
    out = tmp_path / "run"
    with two_machines() as machines, contextlib.ExitStack() as started:
        for machine, more in zip(machines, nodes, strict=True):
            log = open(tmp_path / machine[-1], "w+")  # noqa: SIM115
            process = subprocess.Popen([*machine, *start, *more], stdout=log, stderr=log)
            started.callback(process.wait)
            started.callback(process.terminate)
            wait_until(lambda p=log.name: "runtime started" in Path(p).read_text(), "a node of Ray")
        command = [*machines[0], sys.executable, tba.__file__]
        flags = arguments(gsm8k, out, steps=4, cluster="10.77.0.1:6399")
        log = open(tmp_path / "log", "w+")  # noqa: SIM115
        trainer = subprocess.Popen([*command, *flags], stderr=log, start_new_session=True)
        addresses = set()
        while trainer.poll() is None:
            ours = processes_of(trainer.pid) + [s.pid for s in cluster_searchers()]
            for machine in machines:
                sockets = subprocess.run([*machine, "ss", "-Hltnp"], capture_output=True, text=True)
                for line in sockets.stdout.splitlines():
                    if any(f"pid={pid}," in line for pid in ours):
                        addresses |= set(re.findall(r"10\.77\.0\.\d|127\.0\.0\.1", line.split()[3]))
            time.sleep(0.2)
        assert trainer.returncode == 0, Path(log.name).read_text()
    assert addresses == {"10.77.0.1", "10.77.0.2"}
    assert len(read_lines(out / "metrics.jsonl")) == 4
