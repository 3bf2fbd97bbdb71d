"""A policy sharded over two processes: the same numbers as one, and the end of either."""

import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from harness import (
    GONE,
    PATIENCE,
    ROOT,
    ForkedRun,
    arguments,
    processes_of,
    run_tba,
    steps_of,
    wait_until,
    weights_of,
)

import tba
from tba import read_lines

pytestmark = pytest.mark.devices(3)  # two ranks and a Searcher
TORCHRUN = "torch.distributed.run --nproc_per_node 2 --master_port 0 --standalone"
# of a user who shards other programs' models with it
ACCELERATE_CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
mixed_precision: fp16
num_machines: 1
num_processes: 2
use_cpu: false
"""


def start_ranks(args, log, launcher=TORCHRUN, program=ROOT / "tba.py"):
    """Two ranks, as a launcher starts them; returns the launcher's process."""
    command = [sys.executable, "-m", *launcher.split(), str(program), *args]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    streams = {"stdout": log, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, start_new_session=True, **streams)


def run_ranks(args, tmp_path, **more):
    """Run two ranks to their end, which has to be a good one."""
    path = tmp_path / "ranks.log"
    with open(path, "a") as log:
        process = start_ranks(args, log, **more)
        assert process.wait(PATIENCE) == 0, path.read_text()
    wait_until(lambda: not processes_of(process.pid), "every process gone", seconds=GONE)


def run_forked_ranks(args, tmp_path):
    """As `run_ranks`, without a launcher, which would need new interpreters."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    variables |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    path = tmp_path / "ranks.log"
    with open(path, "a") as log:
        ranks = [ForkedRun(args, log, log, RANK=i, LOCAL_RANK=i, **variables) for i in "01"]
        for process in ranks:
            assert process.wait(PATIENCE) == 0, path.read_text()
    for process in ranks:
        wait_until(lambda pid=process.pid: not processes_of(pid), "every process gone")


def flags_of(gsm8k, out, **more):
    """Lockstep, groups over the budget of a micro-batch, a warm-up, clipped gradients."""
    flags = {
        "lockstep": True, "steps": 4, "eval_every": 0, "eval_samples": 8, "max_grad_norm": 1,
        "tokens_per_microbatch": 300, "save_every": 2, "learning_rate": 1e-3,
    }  # fmt: skip
    return arguments(gsm8k, out, **(flags | more))


CASES = [pytest.param("tb", name, marks=pytest.mark.slow) for name in ("llama", "tied_llama")]
CASES.append(pytest.param("tb_learned_z", "llama", marks=pytest.mark.nightly))


@pytest.mark.parametrize(("objective", "architecture"), CASES)
def test_two_ranks_train_as_one_process_does(gsm8k, tmp_path, model_of, objective, architecture):
    """Also if the embedding is the head's weight: both belong to one FSDP group."""
    flags = {"objective": objective}
    if architecture != "llama":
        flags["model"] = model_of(architecture)
    run_tba(flags_of(gsm8k, tmp_path / "one", **flags))
    settings = tmp_path / "accelerate.yaml"
    settings.write_text(ACCELERATE_CONFIG)
    accelerate = f"accelerate.commands.launch --main_process_port 0 --config_file {settings}"
    run_ranks(flags_of(gsm8k, tmp_path / "two", **flags), tmp_path, launcher=accelerate)
    one = read_lines(tmp_path / "one" / "metrics.jsonl")
    two = read_lines(tmp_path / "two" / "metrics.jsonl")
    assert len(one) == len(two) == 4
    for name in ("loss", "grad_norm", "entropy", "log_z", "kl", "reward", "lr"):
        first = [m[name] for m in one][:2]  # later ones differ by what rounding lets be sampled
        second = [m[name] for m in two][:2]
        np.testing.assert_allclose(first, second, rtol=2e-3, atol=2e-3, err_msg=name)
    start = weights_of(flags.get("model", gsm8k / "model"))
    ends = [weights_of(tmp_path / name / "final") for name in ("one", "two")]
    moved = sum(float((ends[0][name] - start[name]).square().sum()) for name in start) ** 0.5
    apart = sum(float((ends[0][name] - ends[1][name]).square().sum()) for name in start) ** 0.5
    assert moved > 0.1 and apart < 0.1 * moved
    if objective != "tb" or architecture != "llama":
        return
    # a run can be resumed with another number of ranks, which may run several times
    run_tba(["--resume", str(tmp_path / "two"), "--steps", "5"])
    program = tmp_path / "sweep.py"
    program.write_text(
        "import sys, tba\n"
        "for steps in '56':\n"
        "    assert tba.main([*sys.argv[1:], '--steps', steps]) == 0\n"
    )
    run_ranks(["--resume", str(tmp_path / "one")], tmp_path, program=program)
    for name, steps in (("one", 6), ("two", 5)):
        assert len(read_lines(tmp_path / name / "metrics.jsonl")) == steps


def test_a_gradient_does_not_depend_on_ranks_or_micro_batches(gsm8k, tmp_path):
    """Micro-batches of all groups, of each group, of less than a response."""
    flags = {"plugin": ROOT / "tests" / "gradients.py", "steps": 1, "save_every": 0}
    flags |= {"prompts_per_step": 3, "trained_per_prompt": 4, "searched_per_prompt": 4}
    run_tba(flags_of(gsm8k, tmp_path / "one", **flags))
    run_forked_ranks(flags_of(gsm8k, tmp_path / "two", **flags), tmp_path)
    one = torch.load(tmp_path / "one" / "gradients.pt")
    two = torch.load(tmp_path / "two" / "gradients.pt")
    for name, ((expected, metrics), *others) in one.items():
        assert expected.norm() > 1e-3, name
        for gradient, other_metrics in [*others, *two[name]]:
            assert (gradient - expected).norm() < 1e-4 * expected.norm(), name
            for key in ("loss", "entropy", "grad_norm", "log_z", "ratio_max"):
                assert other_metrics[key] == pytest.approx(metrics[key], 1e-3, 1e-3), (name, key)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_restores_its_own_shard(rank):
    """If it has the parameter's shape; AdamW's step counts stay whole. Only rank 0 saves."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", None, None, 2, rank, fake_pg.FakeStore())
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        whole = torch.arange(20.0).view(5, 4)
        shard = torch.distributed.tensor.Shard(0)
        parameter = torch.distributed.tensor.distribute_tensor(
            torch.zeros(5, 4), mesh, [shard], src_data_rank=None
        )
        assert (tba.host_copy(whole, tba.Ranks(rank, 2)) is None) == (rank == 1)
        own = tba.shard_like(parameter, whole)
        assert torch.equal(own.to_local(), [whole[:3], whole[3:]][rank])
        assert own.placements == parameter.placements
        count = torch.tensor(3.0)
        assert tba.shard_like(parameter, count) is count
        assert tba.shard_like(torch.zeros(5, 4), whole) is whole
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lost", "signal", "launcher"])
def test_a_lost_rank_ends_the_run_and_a_signal_saves_a_checkpoint(gsm8k, tmp_path, case):
    out = tmp_path / "run"
    path = tmp_path / "log"
    with open(path, "w") as log:
        process = start_ranks(flags_of(gsm8k, out, steps=100_000, lockstep=None), log)
    wait_until(lambda: steps_of(out) > 0, "a step", path.read_text)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 5  # two ranks, Manager, fork server, Searcher
    if case == "lost":
        ranks = [p for p in family if str(ROOT / "tba.py") in p.cmdline()]
        (second,) = [p for p in ranks if p.environ().get("RANK") == "1"]
        second.kill()
    elif case == "signal":
        process.send_signal(signal.SIGTERM)
    else:  # the launcher does not handle this signal: it ends, and leaves its ranks to themselves
        process.send_signal(signal.SIGUSR1)
    assert process.wait(PATIENCE) != 0
    _, alive = psutil.wait_procs(family, timeout=2 * GONE)
    assert not alive
    if case != "lost":
        assert (out / f"checkpoint-{steps_of(out)}").exists(), path.read_text()


def test_a_rank_whose_launcher_ended_while_it_connected_ends(monkeypatch):
    """The kernel tells it only if the launcher ends later."""
    launchers = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in launchers.items():
        monkeypatch.setenv(name, value)
    parents = iter([4321, 1])
    store = SimpleNamespace(set_timeout=lambda _: None)
    monkeypatch.setattr(tba.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tba.dist, "rendezvous", lambda *_, **__: iter([(store, 1, 2)]))
    monkeypatch.setattr(tba.dist, "init_process_group", lambda *_: None)
    monkeypatch.setattr(tba.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: None))
    monkeypatch.setattr(tba.os, "getppid", lambda: next(parents))
    sent = []
    monkeypatch.setattr(tba.os, "kill", lambda pid, number: sent.append((pid, number)))
    assert tba.Ranks.connect().size == 2 and sent == [(os.getpid(), signal.SIGTERM)]
