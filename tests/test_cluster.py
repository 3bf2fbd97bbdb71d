"""Searchers on a Ray cluster whose nodes are all on this machine, at 127.0.0.1."""

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.managers import BaseManager
from pathlib import Path

import psutil
import pytest
from harness import Run, arguments, processes_of, read_lines, run_tba, wait_until
from test_runs import same_weights

import tba

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # nodes at 127.0.0.1; read at Ray's import
os.environ["RAY_health_check_failure_threshold"] = "20"  # noqa: SIM112 (a busy machine is late)
from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 10**8}
FASTER = '''"""Waits are logged after three seconds."""
import tba

tba.Trainer.PATIENCE = 3
tba.SearcherProcesses.LOG_EVERY = 3
'''


@pytest.fixture
def cluster():
    """A head, which has one CPU for the Trainer, and two further nodes."""
    made = Cluster(initialize_head=True, head_node_args=NODE)
    made.workers = [made.add_node(**NODE), made.add_node(**NODE)]
    yield made
    made.shutdown()


def cluster_searchers() -> list[int]:
    """The processes of Searchers on any node."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[-2:-1] + process.cmdline()[-1:] == [tba.__file__, "--searcher"]:
                found.append(process.pid)
    return found


def endless(gsm8k, out, cluster, **flags):
    """Flags of a run on the cluster that continues until it is stopped."""
    settings = {
        "steps": 100_000, "eval_every": 0, "eval_samples": 8, "save_every": 0, "sync_every": 1,
        "transfer_timeout": 5, "searcher_timeout": 20, "cluster": cluster.address,
    }  # fmt: skip
    return arguments(gsm8k, out, **(settings | flags))


def test_nodes_are_lost_and_join(gsm8k, tmp_path, cluster):
    """Three Searchers on two nodes: one is pending; nodes die, the run waits, a new node joins."""
    out = tmp_path / "run"
    plugin = tmp_path / "faster.py"
    plugin.write_text(FASTER)
    flags = {"num_searchers": 3, "plugin": plugin}
    run = Run(out, endless(gsm8k, out, cluster, **flags), hooks=False)
    run.reaches(5)
    assert read_lines(out / "metrics.jsonl")[-1]["searchers_alive"] == 2
    run.says("1 Searchers are pending: 0 of 3 CPUs are free")
    cluster.remove_node(cluster.workers.pop(), allow_graceful=False)
    run.until(lambda: read_lines(out / "metrics.jsonl")[-1]["searchers_alive"] == 1, "one is lost")
    step = read_lines(out / "metrics.jsonl")[-1]["step"]
    run.reaches(step + 5)  # with the other
    cluster.remove_node(cluster.workers.pop(), allow_graceful=False)
    run.says("waiting for generation")
    run.says("3 Searchers are pending")
    step = read_lines(out / "metrics.jsonl")[-1]["step"]
    cluster.workers.append(cluster.add_node(**NODE))
    run.reaches(step + 5)
    os.kill(run.process.pid, signal.SIGINT)
    said = run.ends(128 + signal.SIGINT)
    assert "Traceback" not in said and "restart 1 of" not in said  # no Searcher has failed
    wait_until(lambda: not cluster_searchers(), "every Searcher gone")
    # each group has arrived once: resumed with one Searcher, places continue where they were
    step = read_lines(out / "metrics.jsonl")[-1]["step"]
    run_tba(["--resume", str(out), "--num_searchers", "1", "--steps", str(step + 3)])
    assert [m["step"] for m in read_lines(out / "metrics.jsonl")] == list(range(1, step + 4))


def test_lockstep_on_a_cluster_equals_one_machine(gsm8k, tmp_path, cluster):
    flags = {"synchronous": True, "lag": 1, "num_searchers": 2, "eval_every": 3, "steps": 6}
    run_tba(arguments(gsm8k, tmp_path / "one", **flags))
    run_tba(arguments(gsm8k, tmp_path / "many", cluster=cluster.address, **flags))
    assert same_weights(tmp_path / "one" / "final", tmp_path / "many" / "final")
    one, many = (read_lines(tmp_path / name / "eval.jsonl") for name in ("one", "many"))
    assert one == many


def test_a_killed_trainer_leaves_nothing_and_strangers_are_refused(gsm8k, tmp_path, cluster):
    out = tmp_path / "run"
    run = Run(out, endless(gsm8k, out, cluster), hooks=False)  # a Searcher for each device
    run.reaches(3)
    assert len(cluster_searchers()) == 2
    trainer = set(listening(run.process.pid))
    others = set()
    for pid in processes_of(run.process.pid)[1:] + cluster_searchers():
        others |= set(listening(pid))
    ours = {address for address in trainer | others if address[0] != "::"}  # which are Ray's own
    assert {ip.removeprefix("::ffff:") for ip, _ in ours} == {"127.0.0.1"}
    ports = {port for _, port in set(listening(manager_of(run))) - trainer}  # less inherited ones
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


def manager_of(run: Run) -> int:
    """The Manager's process: the only one that the Trainer forks."""
    trainer = psutil.Process(run.process.pid)
    (manager,) = (p for p in trainer.children() if p.cmdline() == trainer.cmdline())
    return manager.pid


def test_clusters_that_are_not_there_or_too_small(gsm8k, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RAY_gcs_rpc_server_connect_timeout_s", "1")
    out = tmp_path / "run"
    _, said = run_tba(arguments(gsm8k, out, cluster="auto"), code=2)
    assert said.count("error: --cluster auto") == 1 and "Traceback" not in said
    made = Cluster(initialize_head=True, head_node_args=NODE)
    address = made.address
    _, said = run_tba(arguments(gsm8k, out, cluster=address), code=2)
    made.shutdown()
    assert f"--cluster {address}: has no CPU for a Searcher" in said
    assert not out.exists() and not Path("runs").exists()
