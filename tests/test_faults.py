"""The promises of the README under faults, with real processes."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, arguments, run_tba
from harness import GONE, Run, processes_of, read_lines, steps_of, wait_until


def endless(gsm8k: Path, out: Path, **flags: object) -> list[str]:
    """Flags of a run that goes on until it is ended, and hardly learns."""
    settings = {"steps": 100_000, "eval_every": 0, "save_every": 0, "learning_rate": 1e-6}
    return arguments(gsm8k, out, **{**settings, **flags})


def share_memory(out: Path) -> None:
    """The run that will have this folder shares its weights' memory, as on one GPU."""
    faults = out.parent / f"{out.name}-faults"
    faults.mkdir()
    (faults / "share-memory").touch()


def alive(run: Run) -> int:
    return read_lines(run.out / "metrics.jsonl")[-1]["searchers_alive"]


def stored_by(run: Run) -> set[int]:
    """The Searchers whose groups are in the buffer by now."""
    return {searcher for searcher, _ in run.noted("stored")}


def nothing_lost_nothing_twice(run: Run) -> None:
    """Of a run that has ended: whatever a Searcher had sent was stored, once."""
    sent, stored = run.noted("sent"), run.noted("stored")
    assert set(sent) <= set(stored) and len(stored) == len(set(stored))


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses on which a process listens."""
    found = psutil.Process(pid).net_connections("inet")
    return [tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN]


def unix_sockets(pids: list[int]) -> set[str]:
    """The names of the run's own Unix sockets that these processes have open."""
    found = [c for pid in pids for c in psutil.Process(pid).net_connections("unix")]
    return {c.laddr for c in found if "tba-" in c.laddr}


@pytest.mark.slow
def test_searchers_that_die_are_restarted_and_nothing_is_left_of_a_killed_run(gsm8k, tmp_path):
    """One dies while it generates, then one in a transfer; last the Trainer is killed."""
    shared, out = set(os.listdir("/dev/shm")), tmp_path / "run"
    run = Run(out, endless(gsm8k, out, num_searchers=2))
    run.reaches(3)
    run.until(lambda: stored_by(run) == {0, 1}, "groups of both")
    before = set(run.searchers())
    others = set(processes_of(run.process.pid)) - before - {run.process.pid}
    threads = lambda: max(psutil.Process(pid).num_threads() for pid in others)  # the Manager's
    at_first = threads()
    run.want("die-generating")
    run.says("ended with exit code -9")
    run.says("restart 1 of 5 in 1 s")
    victim = run.failed()[0]  # the only one, unless it died beside a transfer to both
    at = len(run.noted("weights"))
    run.until(lambda: alive(run) == 2, "restarted")
    later = lambda: [searcher for searcher, *_ in run.noted("weights")[at:]]
    run.until(lambda: victim in later(), "a group of the restarted one")
    failed, restarted = "'s weights failed: ", " of 5 in "
    if failed not in run.text():  # unless it died beside a transfer to both
        assert len(before & set(run.searchers())) == 1  # the other one went on
    back = at + later().index(victim)
    new = lambda: [searcher for searcher, *_ in run.noted("weights")[back:]]
    run.until(lambda: len(new()) >= 40, "more groups")
    assert new().count(victim) >= 8  # it searches no less than the other
    assert min(version for _, version, _ in run.noted("weights")) >= 0

    so_far = [run.text().count(text) for text in (failed, restarted)]
    run.want("die-receiving")
    run.says(failed, times=so_far[0] + 1)
    run.says(restarted, times=so_far[1] + 2)  # both were members
    at, steps = len(run.noted("weights")), steps_of(out)
    run.until(lambda: set(later()) == {0, 1}, "groups of both, restarted")
    assert steps_of(out) >= steps + 5  # it learned from the buffer meanwhile
    assert not before & set(run.searchers())
    stored = run.noted("stored")
    assert len(stored) == len(set(stored))
    metrics = read_lines(out / "metrics.jsonl")
    assert all(m["logprob_gap"] < 1e-3 for m in metrics)
    assert {m["searchers_alive"] for m in metrics} == {0, 1, 2}

    run.until(lambda: threads() <= at_first + 1, "no thread waits for a process that is gone")
    everyone = processes_of(run.process.pid)
    addresses = [address for pid in everyone for address in listening(pid)]
    assert addresses and all(host == "127.0.0.1" for host, _ in addresses)  # the weight group's
    sockets = unix_sockets(everyone)
    assert sockets and len(everyone) >= 4
    run.want("leave")
    run.until(lambda: run.noted("left"), "a process that a Searcher leaves behind")
    ((left,),) = run.noted("left")  # in a session of its own
    os.kill(run.searchers()[0], signal.SIGSTOP)
    run.process.kill()
    run.ends(-9)  # which waits for every process to be gone
    wait_until(lambda: not psutil.pid_exists(left), "that one gone too", seconds=GONE)
    assert not set(os.listdir("/dev/shm")) - shared
    named = Path("/proc/net/unix").read_text()
    assert not [socket for socket in sockets if socket.strip("\0@") in named]


@pytest.mark.slow
def test_searchers_that_hang_or_lack_memory_are_restarted_and_ctrl_c_twice_ends_at_once(
    gsm8k, tmp_path
):
    out = tmp_path / "run"
    limits = {"searcher_timeout": 8, "transfer_timeout": 4, "max_restarts": 20}
    run = Run(out, endless(gsm8k, out, num_searchers=2, **limits))
    run.reaches(3)
    run.until(lambda: stored_by(run) == {0, 1}, "groups of both")
    for fault, words in (
        ("stuck-generating", "was silent for 8 s (--searcher_timeout): killed"),
        ("hang-receiving", "'s weights failed: it took over 4 s (--transfer_timeout)"),
        ("out-of-memory", "can't allocate memory"),
    ):
        steps = steps_of(out)
        run.want(fault)
        run.says(words)
        both = lambda: len(run.searchers()) == 2 and alive(run) == 2
        run.until(both, f"restarted after {fault}")
        at = len(run.noted("stored"))
        after = lambda at=at: {searcher for searcher, _ in run.noted("stored")[at:]}
        run.until(lambda: after() == {0, 1}, f"groups of both after {fault}")  # noqa: B023
        assert steps_of(out) > steps + 5  # it trained on meanwhile
    stored = run.noted("stored")
    assert len(stored) == len(set(stored))

    run.want("stuck-ending")  # the checkpoint never gets written
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to all its processes
    run.says("SIGINT: saving a checkpoint (Ctrl-C again: exit at once)")
    run.suffered("stuck-ending")
    os.killpg(run.process.pid, signal.SIGINT)
    run.ends(130, seconds=20)
    assert not list(out.glob("checkpoint-*"))


@pytest.mark.slow
def test_a_searcher_that_loads_late_is_compared_with_the_weights_that_it_was_sent(gsm8k, tmp_path):
    """Others, and training, go on; the next sync begins when it has loaded."""
    out = tmp_path / "run"
    run = Run(out, endless(gsm8k, out, num_searchers=2, transfer_timeout=15, learning_rate=1e-3))
    run.reaches(5)
    run.until(lambda: stored_by(run) == {0, 1}, "groups of both")
    run.want("late-loaded")
    run.suffered("late-loaded")
    run.reaches(steps_of(out) + 2)  # it loads before the sync's own step is logged
    version = read_lines(out / "metrics.jsonl")[-1]["version"]
    at = steps_of(out)
    later = lambda: [m["version"] for m in read_lines(out / "metrics.jsonl")[at:]]
    run.until(lambda: len(set(later())) >= 5, "more syncs")
    assert later().count(version) >= 5  # it trained on with these weights on their way
    assert "warning" not in run.text(), run.text()
    run.process.send_signal(signal.SIGINT)
    run.ends(130)
    nothing_lost_nothing_twice(run)


@pytest.mark.slow
def test_faults_of_searchers_that_share_memory_with_the_trainer(gsm8k, tmp_path):
    """As on one GPU: those that die or hang with the memory open are restarted and open it anew."""
    shared, out = set(os.listdir("/dev/shm")), tmp_path / "run"
    share_memory(out)
    limits = {"transfer_timeout": 4, "max_restarts": 20}
    run = Run(out, endless(gsm8k, out, num_searchers=2, learning_rate=1e-3, **limits))
    run.reaches(3)
    for fault in ("die-receiving", "die-loading", "hang-receiving", "die-generating"):
        steps = steps_of(out)
        run.until(lambda: stored_by(run) == {0, 1} and alive(run) == 2, "both at work")
        restarts = run.text().count(" of 20 in ")
        run.want(fault)
        run.until(lambda: run.text().count(" of 20 in ") > restarts, "a restart")  # noqa: B023
        at = len(run.noted("weights"))
        after = lambda at=at: {searcher for searcher, *_ in run.noted("weights")[at:]}
        run.until(lambda: after() == {0, 1}, f"groups of both after {fault}")  # noqa: B023
        assert steps_of(out) > steps + 3  # it trained on meanwhile
    run.process.send_signal(signal.SIGINT)
    text = run.ends(130)
    nothing_lost_nothing_twice(run)
    metrics = read_lines(out / "metrics.jsonl")
    assert all(m["logprob_gap"] < 1e-3 for m in metrics)
    assert len({m["version"] for m in metrics}) > 5  # weights went on to arrive
    assert "cannot be shared" not in text
    assert not set(os.listdir("/dev/shm")) - shared


def test_wrong_weights_end_the_run_and_their_data_stay_out(gsm8k, tmp_path):
    out = tmp_path / "run"
    run = Run(out, endless(gsm8k, out, num_searchers=2))
    run.reaches(4)
    run.want("late-end")
    run.want("corrupt")
    text = run.ends(1)
    told = re.search(r"step (\d+)'s weights, Searcher (\d)'s log-probabilities differ", text)
    assert told and "--logprob_tolerance" in text, text
    version, culprit = map(int, told.groups())
    (checkpoint,) = out.glob("checkpoint-*")
    assert version <= int(checkpoint.name[11:]) <= version + 500  # the run ended when it was told
    assert culprit not in {s for s, v, _ in run.noted("weights") if v >= version}


@pytest.mark.slow
def test_too_many_failures_end_the_run_with_the_last_traceback(gsm8k, tmp_path):
    out = tmp_path / "run"
    run = Run(out, endless(gsm8k, out, max_restarts=1))
    run.reaches(3)
    os.kill(*run.searchers(), signal.SIGKILL)
    run.says("restart 1 of 1")
    at = steps_of(out)
    run.want("raise")
    text = run.ends(1)
    assert "ArithmeticError: a fault on demand" in text
    assert "not restarted: 2 failures (--max_restarts)" in text
    assert list(out.glob("checkpoint-*")) and "go on with --resume" in text
    metrics = read_lines(out / "metrics.jsonl")
    assert metrics[-1]["step"] > at + 5  # it learned without a Searcher,
    alone = [m["recent_fraction"] for m in metrics if not m["searchers_alive"]]
    assert alone and not any(alone)  # from all of the buffer, not from the last few prompts
    assert metrics[2]["searchers_alive"] and metrics[2]["recent_fraction"]


@pytest.mark.slow
def test_lockstep_survives_killed_searchers(gsm8k, tmp_path):
    """What a killed one had not sent of a batch is searched again."""
    out = tmp_path / "run"
    flags = {"num_searchers": 2, "steps": 8, "sync_every": 2, "eval_every": 4}
    run = Run(out, [*arguments(gsm8k, out, **flags), "--synchronous"])
    run.want("slow-trainer", "0.5")  # or it may have ended before one is killed
    for kill, step in enumerate((2, 5), 1):
        run.reaches(step)
        run.want("die-generating")
        run.says("ended with exit code -9", times=kill)
    run.ends(0)
    metrics = read_lines(out / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 9))
    assert max(m["staleness_max"] for m in metrics) == 1
    assert [e["step"] for e in read_lines(out / "eval.jsonl")] == [0, 4, 8, 8]
    stored = run.noted("stored")
    assert len(stored) == len(set(stored)) == 8 * 4
    nothing_lost_nothing_twice(run)


@pytest.mark.slow
def test_a_late_searcher_catches_up_and_a_lost_manager_ends_the_run(gsm8k, tmp_path):
    """It misses the reset of the reference too, and is sent it when it comes back."""
    out, reset = tmp_path / "run", 60
    flags = {"num_searchers": 2, "transfer_timeout": 60, "reset_reference_every": reset}
    run = Run(out, endless(gsm8k, out, sync_every=15, **flags))
    run.reaches(reset - 8)  # between two syncs: to stop it in a transfer is another matter
    late = run.searchers()[0]
    os.kill(late, signal.SIGSTOP)
    run.reaches(reset + 8)
    before = len(run.noted("weights"))
    run.want("slow-trainer", "0.8")  # or the next reset may come first
    os.kill(late, signal.SIGCONT)
    new = lambda: {
        s for s, version, r in run.noted("weights")[before:] if version > reset and r >= reset
    }
    wait_until(lambda: new() == {0, 1}, "both Searchers' data with the new reference")
    assert steps_of(out) < 2 * reset, "too slow to tell"
    assert "warning" not in run.text(), run.text()

    helpers = set(processes_of(run.process.pid)) - {run.process.pid, *run.searchers()}
    name = lambda pid: Path(f"/proc/{pid}/cmdline").read_bytes()
    (manager,) = [pid for pid in helpers if b"import main" not in name(pid)]
    os.kill(manager, signal.SIGKILL)
    text = run.ends(1)
    assert "the Manager ended with exit code -9" in text and "Traceback" not in text
    assert list(out.glob("checkpoint-*"))


STARTS = """
import multiprocessing, os, subprocess, threading
import tba

def capitals(text):
    return float(sum(map(str.isupper, text)))

class Starts(tba.GSM8K):
    left = False

    def rewards(self, examples, responses, ended):
        ended_by_a_signal = subprocess.Popen(["sleep", "1000"])
        ended_by_a_signal.terminate()
        ended_by_a_signal.wait()
        with multiprocessing.Pool(2) as pool:  # which ends its workers by a signal too
            rewards = pool.map(capitals, responses)
        if not self.left:
            self.left = True
            sleep = ["sh", "-c", "sleep 1000 & sleep 1000"]
            left = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
            left.append(multiprocessing.Process(target=threading.Event().wait))
            left[-1].start()
            with open(os.environ["TBA_FAULTS"] + "/left", "a") as file:
                file.write(" ".join(str(process.pid) for process in left) + "\\n")
        return rewards

tba.TASKS["starts"] = Starts
"""


def test_a_reward_may_start_and_end_processes_and_none_of_them_outlives_its_searcher(
    gsm8k, tmp_path
):
    """Whether it is killed or ends with the run; nor does any outlive the task's trial."""
    (tmp_path / "starts.py").write_text(STARTS)
    out = tmp_path / "run"
    flags = {"steps": 60, "eval_every": 0, "eval_samples": 8, "max_response_tokens": 8}
    flags |= {"task": "starts", "task_file": tmp_path / "starts.py", "prompts_per_step": 2}
    run = Run(out, arguments(gsm8k, out, **flags), hooks=False)
    run.until(lambda: len(run.noted("left")) == 2, "processes that a reward starts")
    assert not any(map(psutil.pid_exists, run.noted("left")[0]))
    run.reaches(1)
    everything = lambda: {pid for line in run.noted("left")[1:] for pid in line}
    below = lambda pids: {c.pid for p in pids for c in psutil.Process(p).children(recursive=True)}
    first = everything() | below(everything())
    assert len(first) >= 7 and all(map(psutil.pid_exists, first))
    os.kill(run.searchers()[0], signal.SIGKILL)
    wait_until(lambda: not any(map(psutil.pid_exists, first)), "they end with it", run.text, GONE)
    run.until(lambda: len(run.noted("left")) == 3, "the restarted one's processes")
    assert "Traceback" not in run.ends(0)
    gone = lambda: not any(map(psutil.pid_exists, everything()))  # some are of other sessions
    wait_until(gone, "the restarted one's processes end too", seconds=GONE)


# --------------------------------------------------------------------------- signals, the end


def test_a_signal_while_models_load_ends_the_run_which_can_be_started_again(gsm8k, tmp_path):
    """By the same command: nothing that it left behind blocks its folder."""
    out = tmp_path / "run"
    run = Run(out, endless(gsm8k, out))
    run.want("stuck-loading-models")
    run.suffered("stuck-loading-models")
    run.until(run.searchers, "a Searcher's start")
    run.process.terminate()
    assert "Traceback" not in run.ends(143)
    assert (out / "config.json").exists() and not list(out.glob("checkpoint-*"))
    args = ["--dry_run", *endless(gsm8k, out, seed=1)]
    assert "output     " in run_tba(args)[0]


@pytest.mark.slow
def test_preemption_with_every_searcher_stuck_saves_within_a_minute(gsm8k, tmp_path):
    out = tmp_path / "run"
    run = Run(out, endless(gsm8k, out, num_searchers=2, transfer_timeout=10))
    run.reaches(3)
    for pid in run.searchers():
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    start = time.monotonic()
    os.killpg(run.process.pid, signal.SIGTERM)  # as SLURM does
    run.ends(143)
    assert time.monotonic() - start < 60
    assert (next(out.glob("checkpoint-*")) / "trainer.pt").exists()


# ---------------------------------------------------------------------- full disks and queues


@pytest.mark.slow
def test_a_full_disk_costs_a_checkpoint_at_most(gsm8k, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        out = disk / "run"
        args = endless(gsm8k, out, save_every=10, keep_checkpoints=1)
        run = Run(out, args, notes=tmp_path)
        run.reaches(11)
        wait_until(lambda: list(out.glob("checkpoint-*")), "a checkpoint")
        filler = disk / "filler"
        with open(filler, "wb") as file:  # leaves room for a part of one
            free = os.statvfs(disk).f_bavail * 4096
            file.write(b"x" * (free - 1_000_000))
        run.says("could not be saved: ")
        before = sorted(out.glob("checkpoint-*"))
        at = steps_of(out)
        more = disk / "more"
        deadline = time.monotonic() + 60  # to the last byte: not even metrics can be written
        while "will try again" not in run.text() and time.monotonic() < deadline:
            with contextlib.suppress(OSError), open(more, "ab", buffering=0) as file:
                file.write(b"x" * 4096)
        resumable = sorted(out.glob("checkpoint-*"))
        assert len(before) == 1 and len(resumable) == 1  # the old one, whole
        filler.unlink()
        more.unlink()
        wait_until(lambda: sorted(out.glob("checkpoint-*")) != resumable, "the next one")
        run.reaches(at + 20)
        run.process.send_signal(signal.SIGINT)
        run.ends(130)
        assert not list(out.glob(".checkpoint-*"))
        steps = [m["step"] for m in read_lines(out / "metrics.jsonl")]
        assert steps == list(range(1, len(steps) + 1))  # no line is missing
        copy = shutil.copytree(out, tmp_path / "copy")
        check = [sys.executable, str(ROOT / "tba.py"), "--resume", str(copy), "--dry_run"]
        done = subprocess.run(check, capture_output=True, text=True)
        assert done.returncode == 0 and "resume     " in done.stdout and not done.stderr
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_queue_slows_searchers_and_drops_nothing(gsm8k, tmp_path):
    out = tmp_path / "run"
    run = Run(out, endless(gsm8k, out, queue_size=3))
    run.reaches(10)
    run.want("slow-trainer", "3")

    def slowed() -> bool:
        last = read_lines(out / "metrics.jsonl")[-1]
        return last["queue_depth"] == 3 and last["searcher_busy"] < 0.5

    run.until(slowed, "a full queue")
    (run.faults / "slow-trainer").unlink()
    run.reaches(steps_of(out) + 30)
    run.process.send_signal(signal.SIGINT)
    run.ends(130)
    nothing_lost_nothing_twice(run)
    numbers = sorted(n for _, n in run.noted("stored"))
    assert len(set(range(numbers[-1])) - set(numbers)) <= 8  # but for what was in flight


@pytest.mark.slow
def test_a_short_soak():
    """bench/soak.py: a fault every few seconds, nothing lost, nothing leaked."""
    command = [sys.executable, str(ROOT / "bench" / "soak.py"), "--minutes", "1", "--every", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
