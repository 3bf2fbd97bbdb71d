"""The promises of the README under faults, with real processes."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch.multiprocessing as mp
from conftest import ROOT, arguments, read_lines, run_tba
from harness import Run, processes_of, steps_of, wait_until
from test_runs import TIMING

import tba


def stable(out: Path, *files: str) -> list[list[dict]]:
    """What a run wrote, less what depends on the clock."""
    names = files or ("metrics.jsonl", "eval.jsonl", "completions.jsonl")
    keep = lambda line: {key: value for key, value in line.items() if key not in TIMING}
    return [[keep(line) for line in read_lines(out / name)] for name in names]


LOCKSTEP = {
    "num_searchers": 2, "steps": 12, "sync_every": 3, "eval_every": 4, "save_every": 4,
    "reset_reference_every": 5, "learning_rate": 1e-3, "lr_schedule": "linear",
    "beta_final": 0.02, "beta_anneal_steps": 8, "tau": 1.5, "tau_final": 1, "keep_checkpoints": 0,
}  # fmt: skip


@pytest.mark.slow
def test_a_resumed_lockstep_run_is_the_uninterrupted_one(gsm8k, tmp_path):
    """Killed, its newest checkpoint damaged; stopped by SIGTERM between two syncs; killed again."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    run_tba([*arguments(gsm8k, whole, **LOCKSTEP), "--synchronous"])
    run = Run(out, [*arguments(gsm8k, out, **LOCKSTEP), "--synchronous"], hooks=False)
    run.reaches(9)
    run.process.kill()
    run.ends(-9)
    saved = out / "checkpoint-8" / "optimizer.safetensors"
    content = bytearray(saved.read_bytes())
    content[len(content) // 2] ^= 1
    saved.write_bytes(content)
    (out / ".checkpoint-9").mkdir()  # as an interrupted one leaves it
    (out / "checkpoint-4").rename(out / ".checkpoint-4")  # and one that was whole, but not named
    _, err = run_tba(["--resume", str(out), "--dry_run"], code=2)
    assert "checkpoint-8 is damaged" in err and (out / "checkpoint-8").exists()  # looks only
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 10, "rew')  # a line that was cut off
    run = Run(out, ["--resume", str(out)], hooks=False)
    run.says("checkpoint-8 is damaged and not used")
    run.says("checkpoint-4")
    wait_until(lambda: 5 <= steps_of(out) < 9, 60, "taken back to step 4")
    run.reaches(7)
    run.process.terminate()
    assert "SIGTERM" in run.ends(143)
    stopped = max(int(p.name[11:]) for p in out.glob("checkpoint-*"))
    assert 7 <= stopped <= 12
    Run(out, ["--resume", str(out)], hooks=False).ends(0)
    assert stable(out) == stable(whole)
    seconds = [line["seconds"] for line in read_lines(out / "metrics.jsonl")]
    assert seconds == sorted(seconds)
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert [m["step"] for m in read_lines(out / name)] == sorted(
            {m["step"] for m in read_lines(out / name)}
        )


@pytest.mark.slow
def test_a_searcher_killed_in_lockstep_changes_nothing(gsm8k, tmp_path):
    """Its part of the batch is generated again, by the same weights and seeds."""
    logs = []
    for name in ("calm", "killed"):
        out = tmp_path / name
        args = arguments(gsm8k, out, **{**LOCKSTEP, "steps": 8, "save_every": 0})
        run = Run(out, [*args, "--synchronous"])
        if name == "killed":
            for kill, step in enumerate((2, 4)):
                run.reaches(step)
                run.want("die-generating")
                run.says("ended with exit code -9", times=kill + 1)
        run.ends(0)
        logs.append(stable(out))
    for line in logs[0][0] + logs[1][0]:
        del line["searchers_alive"]
    assert logs[0] == logs[1]


@pytest.mark.slow
def test_resume_through_a_script_and_what_it_refuses(gsm8k, tmp_path):
    """Flags before --resume are the script's, those after it are wishes."""
    out = tmp_path / "run"
    env = {**os.environ, "PYTHON": sys.executable}
    script = ["bash", str(ROOT / "run_gsm8k.sh"), "--tiny"]
    small = "--steps 3 --eval_samples 8 --initial_trajectories 64 --save_every 3 --seed 5".split()
    small += ["--engine", "transformers", "--output_dir", str(out)]
    first = subprocess.run([*script, *small], env=env, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    again = [*script, "--resume", str(out), "--steps", "5"]
    second = subprocess.run(again, env=env, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert "the run's own settings hold; not, as before --resume:" in second.stderr
    assert "after 5 steps" in second.stdout and f"resume     {out}/checkpoint-3" in second.stdout
    assert [m["step"] for m in read_lines(out / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    record = json.loads((out / "config.json").read_text())
    assert record["resumed_from"] == "checkpoint-3"
    assert record["config"]["seed"] == 5 and record["config"]["steps"] == 5
    _, err = run_tba(["--resume", str(tmp_path)], code=2)
    assert err.count("\n") == 1 and f"--resume {tmp_path}: holds no run" in err
    for checkpoint in out.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    _, err = run_tba(["--resume", str(out)], code=2)
    assert err.count("\n") == 1 and "has no whole checkpoint" in err


@pytest.mark.slow
def test_resume_keeps_the_buffer_and_the_prompt_order(gsm8k, tmp_path):
    """Asynchronous: nothing that arrived is lost, nothing that was begun is skipped."""
    out = tmp_path / "run"
    flags = {"num_searchers": 2, "steps": 100_000, "eval_every": 0, "save_every": 0}
    run = Run(out, arguments(gsm8k, out, **flags))
    run.reaches(20)
    run.process.send_signal(signal.SIGUSR1)
    run.ends(138)
    (checkpoint,) = out.glob("checkpoint-*")
    before = dict(np.load(checkpoint / "buffer.npz"))
    sent, stored = run.noted("sent"), run.noted("stored")
    assert len(stored) == len(set(stored))
    assert set(sent) <= set(stored)  # what was on the queue is in the buffer
    (run.faults / "stored").unlink()
    run = Run(out, ["--resume", str(out), "--steps", str(int(checkpoint.name[11:]) + 10)])
    run.ends(0)
    after = run.noted("stored")
    assert not set(after) & set(stored)
    for searcher in (0, 1):
        numbers = {n for s, n in stored + after if s == searcher}
        gaps = set(range(max(numbers))) - numbers
        assert all(n > max(numbers) - 60 for n in gaps)  # those under way at the end
    trained = read_lines(out / "metrics.jsonl")
    assert trained[-1]["buffer_trajectories"] > len(before["lengths"])


class Small(tba.Trainer):
    """A Trainer whose checkpoints have one small file, and fail at a given operation."""

    def write_checkpoint(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "content").write_text(self.content)
        self.may_fail()

    def may_fail(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("failing", range(1, 6))
def test_a_checkpoint_of_the_same_step_replaces_it_whole_or_not_at_all(
    failing, tmp_path, monkeypatch
):
    """Whichever of its operations a full disk fails: write, seal, move, name, sync."""
    config = tba.Config(task="gsm8k", model="m", output_dir=str(tmp_path / "run"), steps=1)
    trainer = Small(config, None, tba.RunFolder(config))
    trainer.step, trainer.left, trainer.content = 7, 0, "old"
    path = trainer.save_checkpoint()
    for owner, name in ((tba, "seal"), (Path, "rename"), (tba, "fsync")):
        act = getattr(owner, name)

        def acting(*args, act=act, name=name):
            if name != "fsync" or args[0] == trainer.folder.path:
                trainer.may_fail()
            return act(*args)

        monkeypatch.setattr(owner, name, acting)
    trainer.left, trainer.content = failing, "new"
    assert trainer.save_checkpoint() is None
    assert trainer.left <= 0  # it came there
    assert tba.newest_checkpoint(trainer.folder.path, tidy=False) == path
    assert (path / "content").read_text() == ("new" if failing == 5 else "old")
    assert [p.name for p in trainer.folder.path.glob("*checkpoint-*")] == [path.name]
    trainer.left, trainer.content = 0, "newer"
    assert trainer.save_checkpoint() == path and (path / "content").read_text() == "newer"


def test_a_searcher_that_dies_is_restarted_and_no_other(gsm8k, tmp_path):
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, num_searchers=3, steps=100_000, eval_every=0))
    run.reaches(5)
    victim, *others = run.searchers()
    os.kill(victim, signal.SIGKILL)
    run.says("ended with exit code -9")
    at = steps_of(out)
    alive = lambda since: {m["searchers_alive"] for m in read_lines(out / "metrics.jsonl")[since:]}
    run.until(lambda: alive(at) == {2, 3}, 60, "restarted")
    run.reaches(at + 20)  # training went on
    assert set(others) < set(run.searchers())
    run.want("raise")
    run.says("ArithmeticError: a fault on demand")
    run.want("out-of-memory")
    run.says("can't allocate memory")
    run.until(lambda: len(run.searchers()) == 3 and alive(-1) == {3}, 60, "restarted")
    run.process.send_signal(signal.SIGINT)
    assert "restart 1 of 5" in run.ends(130)


@pytest.mark.slow
def test_no_searcher_left_ends_the_run_with_the_last_ones_traceback(gsm8k, tmp_path):
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, steps=100_000, eval_every=0, max_restarts=1))
    run.reaches(3)
    os.kill(*run.searchers(), signal.SIGKILL)
    run.says("restart 1 of 1")
    run.want("raise")
    text = run.ends(1)
    assert "ArithmeticError: a fault on demand" in text
    assert "no Searcher is left" in text and "given up after 1 restarts" in text
    assert list(out.glob("checkpoint-*")) and "go on with --resume" in text
    metrics = read_lines(out / "metrics.jsonl")
    alone = [m["recent_fraction"] for m in metrics if not m["searchers_alive"]]
    assert alone and not any(alone)  # it learned from all of the buffer, not from the last few
    assert metrics[2]["searchers_alive"] and metrics[2]["recent_fraction"]


@pytest.mark.slow
def test_a_searcher_that_hangs_is_killed_and_restarted(gsm8k, tmp_path):
    """Stopped, it is no longer heard of; training goes on, and the other gets its weights."""
    out = tmp_path / "run"
    limits = {"searcher_timeout": 10, "transfer_timeout": 3, "max_restarts": 20}
    run = Run(out, arguments(gsm8k, out, num_searchers=2, steps=100_000, eval_every=0, **limits))
    run.reaches(5)
    for place in ("receiving", "joining"):  # while it generates: bench/soak.py
        if place == "joining":  # a group is formed only when its members change
            os.kill(run.searchers()[0], signal.SIGKILL)
        run.want(f"hang-{place}")
        run.suffered(f"hang-{place}")
        at, hung = steps_of(out), "has given no sign of life since"
        run.says(hung, times=run.text().count(hung) + 1)
        assert steps_of(out) > at + 10
        versions = [m["version"] for m in read_lines(out / "metrics.jsonl")[at:]]
        assert versions[-1] > versions[0]  # the other Searcher was given new weights meanwhile
        wait_until(lambda: len(run.searchers()) == 2, 60, "restarted")
    run.reaches(steps_of(out) + 10)
    run.process.send_signal(signal.SIGINT)
    run.ends(130)


def test_wrong_weights_are_noticed_and_named(gsm8k, tmp_path):
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, steps=100_000, num_searchers=2, eval_every=0))
    run.reaches(4)
    name = "model.layers.0.mlp.up_proj.weight"
    run.want("late-end")
    run.want("corrupt", name)
    text = run.ends(1)
    assert f"arrived corrupted: {name}" in text and "logprob" in text
    version = int(text.split("after the transfer of step ")[1].split("'")[0])
    culprit = int(text.split("weights, Searcher ")[1].split("'")[0])
    (checkpoint,) = out.glob("checkpoint-*")
    step = json.loads((checkpoint / "trainer.json").read_text())["step"]
    assert step - version <= 1
    # what the culprit made with them is in no batch, nor in the buffer; what others made is
    assert {s for s, v, _ in run.noted("weights") if v >= version} == {1 - culprit}


@pytest.mark.slow
def test_a_late_searcher_is_left_behind_and_catches_up(gsm8k, tmp_path):
    """It misses the reset of the reference too, and is sent it when it comes back."""
    out, reset = tmp_path / "run", 120
    flags = {"num_searchers": 2, "steps": 100_000, "eval_every": 0, "transfer_timeout": 1,
             "reset_reference_every": reset}  # fmt: skip
    run = Run(out, arguments(gsm8k, out, **flags))
    run.reaches(reset - 15)
    (late, _) = run.searchers()
    os.kill(late, signal.SIGSTOP)
    run.reaches(reset + 8)
    before = len(run.noted("weights"))
    run.want("slow-trainer", "0.1")  # or the next reset may come first
    os.kill(late, signal.SIGCONT)
    new = lambda: {
        s for s, version, r in run.noted("weights")[before:] if version > reset and r == reset
    }
    wait_until(lambda: new() == {0, 1}, 60, "both Searchers' data with the new reference")
    assert steps_of(out) < 2 * reset, "too slow to tell"
    run.process.send_signal(signal.SIGINT)
    assert "no sign of life" not in run.ends(130)


@pytest.mark.slow
def test_twenty_kills_lose_nothing(gsm8k, tmp_path):
    """Any of three Searchers at random moments, most of them in the midst of a weight transfer."""
    out, rng = tmp_path / "run", np.random.default_rng(0)
    flags = {"num_searchers": 3, "steps": 100_000, "eval_every": 0, "max_restarts": 50,
             "save_every": 0, "learning_rate": 2e-5, "searcher_timeout": 60}  # fmt: skip
    run = Run(out, arguments(gsm8k, out, **flags))
    run.reaches(5)
    for kill in range(20):
        wait_until(lambda: run.searchers(), 60, "a Searcher")
        place = ["anywhere", "receiving", "loading", "joining"][kill % 4]
        if place == "anywhere":
            os.kill(int(rng.choice(run.searchers())), signal.SIGKILL)
        else:
            run.want(f"die-{place}")
            run.suffered(f"die-{place}", 90)
        run.says("ended with exit code -9", times=kill + 1)
        time.sleep(rng.uniform(0, 2))
    at = steps_of(out)
    wait_until(lambda: len(run.searchers()) == 3, 90, "all three again")
    run.reaches(at + 20)
    run.process.send_signal(signal.SIGINT)
    text = run.ends(130)
    assert text.count("exit code -9") == 20 and "Traceback" not in text
    sent, stored = run.noted("sent"), run.noted("stored")
    assert set(sent) <= set(stored)  # all that was on the queue was taken
    assert len(stored) == len(set(stored))  # and nothing twice
    for searcher in range(3):
        numbers = {n for s, n in stored if s == searcher}
        gaps = set(range(max(numbers))) - numbers  # no more than is in flight at the end
        assert len(gaps) <= 8, gaps
    metrics = read_lines(out / "metrics.jsonl")
    assert all(m["logprob_gap"] < 1e-3 for m in metrics)
    rewards = [m["reward"] for m in metrics if m["reward"] is not None]
    n = len(rewards) // 10
    assert np.mean(rewards[-n:]) > np.mean(rewards[:n]) + 0.1  # it learned as ever
    waits = [m["sync_seconds"] + m["sync_wait_seconds"] for m in metrics]
    assert max(waits) < 40  # no longer than --transfer_timeout, and a little


def unix_sockets() -> set[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {name for line in lines for name in line.split()[7:] if "tba-" in name}


@pytest.mark.slow
def test_nothing_is_left_when_the_trainer_is_killed(gsm8k, tmp_path):
    """Not even a Searcher that is stopped, a socket, a port, or shared memory."""
    shared, sockets = set(os.listdir("/dev/shm")), unix_sockets()
    temporary = set(os.listdir("/tmp"))
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, num_searchers=2, steps=100_000, eval_every=0))
    run.reaches(3)
    assert unix_sockets() > sockets
    assert len(processes_of(run.process.pid)) >= 4  # Trainer, Manager, two Searchers
    os.kill(run.searchers()[0], signal.SIGSTOP)
    run.process.kill()
    run.ends(-9)  # which waits at most ten seconds for every process to be gone

    def left() -> set[str]:
        files = {name for name in set(os.listdir("/tmp")) - temporary if name.startswith("pymp")}
        return (unix_sockets() - sockets) | (set(os.listdir("/dev/shm")) - shared) | files

    wait_until(lambda: not left(), 10, "nothing left", lambda: str(left()))


@pytest.mark.slow
def test_a_second_ctrl_c_exits_at_once(gsm8k, tmp_path):
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, num_searchers=2, steps=100_000, eval_every=0))
    run.reaches(3)
    run.want("late-end")  # or a checkpoint this small is written before a second signal comes
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to all its processes
    run.says("SIGINT: saving a checkpoint (Ctrl-C again: exit at once)")
    os.killpg(run.process.pid, signal.SIGINT)
    start = time.monotonic()
    assert run.process.wait(20) == 130
    assert time.monotonic() - start < 2
    run.ends(130)
    assert not list(out.glob("checkpoint-*"))


def test_a_signal_while_models_load_ends_the_run(gsm8k, tmp_path):
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, steps=100_000))
    wait_until(lambda: run.searchers(), 60, "a Searcher's start")
    run.process.terminate()
    assert "Traceback" not in run.ends(143, 60)


@pytest.mark.parametrize("stuck", [False, True])
def test_a_stuck_weight_group_does_not_abort_the_end(stuck, capfd):
    """The interpreter's last rites are left out, for they would, should its thread come back."""
    child = mp.get_context("fork").Process(target=ending, args=(stuck,))
    child.start()
    child.join(20)
    said = capfd.readouterr().out
    assert child.exitcode == 3 and "all is said" in said and ("last rites" in said) != stuck


def ending(stuck: bool) -> None:
    print("all is said", end="")  # not flushed
    if stuck:
        wait = threading.Event().wait
        threading.Thread(target=wait, name=tba.WeightLink.THREAD, daemon=True).start()
    try:
        tba.leave(3)
    finally:
        print("last rites", flush=True)


@pytest.mark.slow
def test_preemption_with_every_searcher_stuck(gsm8k, tmp_path):
    """SIGTERM while no Searcher answers: a checkpoint within a minute all the same."""
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, num_searchers=2, steps=100_000, eval_every=0))
    run.reaches(3)
    for pid in run.searchers():
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    start = time.monotonic()
    os.killpg(run.process.pid, signal.SIGTERM)  # as SLURM does
    run.ends(143, 60)
    assert time.monotonic() - start < 60
    assert (next(out.glob("checkpoint-*")) / "buffer.npz").exists()


@pytest.mark.slow
def test_a_full_disk_costs_a_checkpoint_at_most(gsm8k, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        out = disk / "run"
        args = arguments(gsm8k, out, steps=100_000, eval_every=0, save_every=10, keep_checkpoints=1)
        run = Run(out, args, notes=tmp_path)
        run.reaches(11)
        wait_until(lambda: list(out.glob("checkpoint-*")), 20, "a checkpoint")
        filler = disk / "filler"
        with open(filler, "wb") as file:  # leaves room for a part of one
            file.truncate(0)
            free = os.statvfs(disk).f_bavail * 4096
            file.write(b"x" * (free - 1_000_000))
        run.says("could not be saved: ")
        before = sorted(out.glob("checkpoint-*"))
        at = steps_of(out)
        more = disk / "more"
        while "will try again" not in run.text():  # to the last byte: not even metrics can be
            with contextlib.suppress(OSError), open(more, "ab", buffering=0) as file:
                file.write(b"x" * 4096)
        resumable = sorted(out.glob("checkpoint-*"))
        assert len(before) == 1 and len(resumable) == 1  # the old one, whole
        assert not list(out.glob(".checkpoint-*"))
        filler.unlink()
        more.unlink()
        wait_until(lambda: sorted(out.glob("checkpoint-*")) != resumable, 60, "the next one")
        run.reaches(at + 20)
        run.process.send_signal(signal.SIGINT)
        run.ends(130)
        steps = [m["step"] for m in read_lines(out / "metrics.jsonl")]
        assert steps == list(range(1, len(steps) + 1))  # no line is missing
        resumed = ["--resume", str(out), "--steps", str(len(steps) + 2)]
        Run(out, resumed, notes=tmp_path).ends(0)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_queue_slows_searchers_and_drops_nothing(gsm8k, tmp_path):
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, steps=100_000, eval_every=0, queue_size=3))
    run.reaches(10)
    run.want("slow-trainer", "1.5")
    run.reaches(steps_of(out) + 6)
    slow = read_lines(out / "metrics.jsonl")[-1]
    assert slow["queue_depth"] == 3 and slow["searcher_busy"] < 0.5
    (run.faults / "slow-trainer").unlink()
    run.reaches(steps_of(out) + 30)
    run.process.send_signal(signal.SIGINT)
    run.ends(130)
    assert set(run.noted("sent")) <= set(run.noted("stored"))
    numbers = sorted(n for _, n in run.noted("stored"))
    assert len(set(range(numbers[-1])) - set(numbers)) <= 8  # but for what was in flight


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.slow
def test_a_lost_manager_ends_the_run_with_a_checkpoint(how, gsm8k, tmp_path):
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, steps=100_000, eval_every=0))
    run.reaches(3)
    helpers = set(processes_of(run.process.pid)) - {run.process.pid, *run.searchers()}
    name = lambda pid: Path(f"/proc/{pid}/cmdline").read_bytes()
    (manager,) = [pid for pid in helpers if b"resource_tracker" not in name(pid)]
    os.kill(manager, how)
    text = run.ends(1, 60)
    said = "the Manager ended" if how == signal.SIGKILL else "waited for the Manager to answer"
    assert said in text and "Traceback" not in text and list(out.glob("checkpoint-*"))


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_survives_transfers_that_are_cut_off(gsm8k, tmp_path):
    """Half a load must leave the engine fit for the next one."""
    out = tmp_path / "run"
    flags = {"engine": "vllm", "num_searchers": 2, "steps": 100_000, "eval_every": 0}
    run = Run(out, arguments(gsm8k, out, **flags))
    run.reaches(5, 240)
    for kill in range(2):
        run.want(["die-receiving", "die-loading"][kill])
        run.says("ended with exit code -9", times=kill + 1)
        at = steps_of(out)
        alive = lambda: read_lines(out / "metrics.jsonl")[-1]["searchers_alive"]
        wait_until(lambda: alive() == 2, 60, "the restart")  # noqa: B023
        run.says("was cut off", times=kill + 1)
        run.reaches(at + 30)
    newcomer = lambda: max(number for _, number in run.noted("sent"))
    wait_until(lambda: newcomer() > 20, 120, "more data")
    run.process.send_signal(signal.SIGINT)
    text = run.ends(130)
    assert text.count("ended with exit code") == 2 and "Traceback" not in text
    metrics = read_lines(out / "metrics.jsonl")
    assert metrics[-1]["version"] > metrics[4]["version"]
    assert all(m["logprob_gap"] < 1e-3 for m in metrics)


@pytest.mark.slow
def test_a_soak_of_three_minutes():
    """bench/soak.py: a fault every twelve seconds, nothing lost, nothing leaked."""
    command = [sys.executable, str(ROOT / "bench" / "soak.py"), "--minutes", "3", "--every", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
