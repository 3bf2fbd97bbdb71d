"""How people run and stop tba.py: terminals, pipes, `timeout`, process groups, Python."""

import contextlib
import fcntl
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import textwrap
from pathlib import Path

import psutil
import pytest
import torch
from harness import (
    PATIENCE,
    ROOT,
    Run,
    arguments,
    helpers_of,
    kill_all,
    processes_of,
    run_tba,
    steps_of,
    wait_until,
)
from safetensors.torch import load_file
from starter import restore_signals

import tba
from tba import read_lines

COMMAND = [sys.executable, str(ROOT / "tba.py")]


def endless(gsm8k, out, **flags):
    """Flags of a run that goes on until it is stopped."""
    settings = {"steps": 100_000, "eval_every": 0, "eval_samples": 8, "save_every": 0}
    return arguments(gsm8k, out, **(settings | flags))


@pytest.mark.parametrize("which", ["fork server", "Manager"])
def test_a_helper_that_hangs_does_not_keep_a_run_from_ending(gsm8k, tmp_path, which):
    run = Run(tmp_path / "run", endless(gsm8k, tmp_path / "run"), interpreter=True)
    run.reaches(1)
    server, manager = helpers_of(psutil.Process(run.process.pid))
    helper = {"fork server": server, "Manager": manager}[which]
    helper.suspend()
    try:
        os.kill(run.process.pid, signal.SIGTERM)
        run.until(lambda: run.process.poll() is not None, "its end", alive=False, seconds=120)
        assert run.process.returncode == 128 + signal.SIGTERM, run.text()
        assert list((tmp_path / "run").glob("checkpoint-*"))
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            helper.kill()
    run.gone()


def test_a_repeated_signal_ends_the_first_process_of_a_container(monkeypatch):
    """The kernel does not deliver to it what it has no handler for."""
    trainer = object.__new__(tba.Trainer)
    trainer.signals = {signal.SIGTERM: 0.0}
    for name, function in (("kill", lambda *_: None), ("_exit", sys.exit)):
        monkeypatch.setattr(os, name, function)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="143"):
        tba.on_signal(trainer, signal.SIGTERM, None)


def take_terminal():
    """In a new session: make standard input its controlling terminal."""
    restore_signals()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def started():
    """Function: start a command in a session of its own; it is killed after the test."""
    processes = []

    def start(command, preexec_fn=restore_signals, **options):
        process = subprocess.Popen(
            command, start_new_session=True, preexec_fn=preexec_fn, **options
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        kill_all(process)


def wait_for_steps(out, process, log):
    """Wait until a run has taken three steps."""

    def taken():
        assert process.poll() is None, log.read_text()
        return steps_of(out) >= 3

    wait_until(taken, "three steps", log.read_text)


def check_saved(out, process, log):
    """Wait until a run and its processes have ended; check that its last step was saved."""
    process.wait(PATIENCE)
    wait_until(lambda: not processes_of(process.pid), "every process gone")
    step = read_lines(out / "metrics.jsonl")[-1]["step"]
    assert (out / f"checkpoint-{step}").exists(), log.read_text()


@pytest.mark.parametrize("mode", ["asynchronous", "lockstep"])
def test_ctrl_c_in_a_terminal_ends_tee_too_and_the_run_saves(gsm8k, tmp_path, started, mode):
    out = tmp_path / "run"
    log = tmp_path / "log"
    shell = f'"$@" 2>&1 | tee {log}; exit "${{PIPESTATUS[0]}}"'
    command = ["bash", "-c", shell, "bash"]
    if mode == "lockstep":  # on one core, where a weight sync ends before the Trainer looks at it
        command += ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
        command += [*COMMAND, *endless(gsm8k, out, lockstep=True, lag=2)]
    else:
        command += [*COMMAND, *endless(gsm8k, out)]
    ours, theirs = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = started(command, preexec_fn=take_terminal, **streams)
    os.close(theirs)
    wait_for_steps(out, process, log)
    os.write(ours, b"\x03")
    check_saved(out, process, log)
    os.close(ours)
    if mode == "lockstep":
        step = steps_of(out)
        run_tba(["--resume", str(out), "--steps", str(step + 1)])
        assert steps_of(out) == step + 1


def test_a_run_whose_terminal_closes_saves(gsm8k, tmp_path, started):
    """The kernel sends SIGHUP, and writes to the terminal fail."""
    out = tmp_path / "run"
    ours, theirs = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = started([*COMMAND, *endless(gsm8k, out)], preexec_fn=take_terminal, **streams)
    os.close(theirs)
    wait_until(lambda: steps_of(out) >= 3, "three steps")
    os.close(ours)
    assert process.wait(PATIENCE) == 128 + signal.SIGHUP
    check_saved(out, process, out / "metrics.jsonl")


@pytest.mark.devices(3)
def test_timeout_signals_all_processes_and_the_run_saves(gsm8k, tmp_path, started):
    """`timeout` sends its signal to its child, and then to the whole group: twice."""
    out = tmp_path / "run"
    log = tmp_path / "log"
    with open(log, "w") as file:
        command = ["timeout", "100000", *COMMAND, *endless(gsm8k, out, num_searchers=2)]
        process = started(command, stdout=file, stderr=file)
    wait_for_steps(out, process, log)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    check_saved(out, process, log)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.devices(3)
def test_a_signal_to_the_group_of_a_lockstep_run_saves(gsm8k, tmp_path, number):
    """Its Searchers outlive the signal, as the batches that they have begun must be completed."""
    out = tmp_path / "run"
    run = Run(out, endless(gsm8k, out, lockstep=True, lag=2, num_searchers=2))
    run.reaches(3)
    os.killpg(run.process.pid, number)
    said = run.ends(128 + number)
    step = read_lines(out / "metrics.jsonl")[-1]["step"]
    assert (out / f"checkpoint-{step}").exists(), said
    assert "warning" not in said  # no Searcher failed


@pytest.mark.parametrize("streams", [">&- 2>&- <&-", "> /dev/full 2>&1", "2>&1 | head -n 1"])
def test_a_run_that_cannot_write_its_output_trains_and_saves(gsm8k, tmp_path, streams):
    out = tmp_path / "run"
    command = ["bash", "-c", f'set -o pipefail; "$@" {streams}', "bash", *COMMAND]
    flags = arguments(gsm8k, out, steps=4, save_every=2, eval_samples=8)
    process = subprocess.run([*command, *flags], timeout=PATIENCE)
    assert process.returncode == 0
    assert len(read_lines(out / "metrics.jsonl")) == 4
    assert (out / "checkpoint-2").exists() and (out / "final" / "model.safetensors").exists()


SLOW_DISK = '''"""Checkpoints are written until the reference changes."""
import time
import tba

start = tba.Trainer.run
write = tba.save_model
trainers = []

def remember(trainer):
    trainers.append(trainer)
    start(trainer)

def slow(*args):
    (trainer,) = trainers
    version = trainer.sync.reference_version
    while trainer.step < 6 and trainer.sync.reference_version == version:
        time.sleep(0.01)
    write(*args)

tba.Trainer.run = remember
tba.save_model = slow
'''


def test_a_checkpoint_has_the_reference_of_its_step(gsm8k, tmp_path):
    """The reference is reset to the policy of step 4, and again while that step is written."""
    plugin = tmp_path / "slow.py"
    plugin.write_text(SLOW_DISK)
    out = tmp_path / "run"
    flags = {"reset_reference_every": 2, "save_every": 4, "learning_rate": 1e-3, "plugin": plugin}
    run_tba(arguments(gsm8k, out, steps=7, eval_every=0, eval_samples=8, **flags))
    saved = tba.open_checkpoint(out / "checkpoint-4")["WeightSync"]
    policy = load_file(out / "checkpoint-4" / "model.safetensors")
    assert saved["reference_version"] == 4
    assert all(torch.equal(saved["reference"][name], policy[name]) for name in policy)


def test_a_folder_that_could_not_be_written_is_removed(tmp_path):
    with pytest.raises(OSError), tba.atomic_folder(tmp_path / "final") as new:
        (new / "part").write_text("a large part of a full disk")
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails", [1, 2])
def test_a_folder_is_never_without_its_old_or_its_new_contents(tmp_path, monkeypatch, fails):
    """Whatever it is kept under, if a run ends between two renames."""
    rename = Path.rename
    renames = 0

    def failing(path, target):
        nonlocal renames
        renames += 1
        if renames == fails:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    def write(text):
        with tba.atomic_folder(tmp_path / "final") as new:
            (new / "part").write_text(text)

    write("old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(OSError):
            write("new")
    assert [path.read_text() for path in tmp_path.rglob("part")] == ["old"]
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    write("new")
    assert [path.read_text() for path in tmp_path.rglob("part")] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert synced[-1] == str(tmp_path)  # its list of files, so that the new name lasts


TINY = """exec bash "$ROOT/run_gsm8k.sh" --tiny --steps 100000 --learning_rate 1e-4 \\
  --save_every 0 --eval_every 0 --eval_samples 8 "${@: -2}"
"""
STAND_INS = {  # of commands; pkill sees processes of this folder only
    "scontrol": "echo localhost",
    "srun": 'while [[ $1 == --* ]]; do shift; done; "$@"',
    "ray": 'while [ "$1" != -- ]; do shift; done; shift; "$@"',
    "pkill": """
for pid in $(pgrep -f "${@: -1}"); do
  if [ "$(readlink /proc/$pid/cwd)" = "$PWD" ]; then kill "$1" $pid; fi
done""",
}
ONE_MACHINE = "the script for one machine"


@pytest.mark.parametrize("case", [ONE_MACHINE, "with several ranks", "the script for a cluster"])
@pytest.mark.devices(3)
def test_the_slurm_scripts_of_the_docs_save_after_a_signal(gsm8k, tmp_path, started, case):
    """SLURM signals the shell that runs a script; started again, the script resumes the run."""
    text = (ROOT / "docs" / "operations.md").read_text()
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    one, ranks, cluster = (block for block in blocks if "$folder" in block)
    if case == ONE_MACHINE:
        script = one
    elif case == "with several ranks":
        *lines, _ = one.splitlines(keepends=True)
        flags = arguments(None, None, steps=100_000, model="MODEL", dataset="DATA", save_every=0)
        script = "".join(lines) + ranks.replace("$folder", f"{' '.join(flags)} $folder")
    else:
        script = cluster
    (tmp_path / "script").write_text(textwrap.dedent(script))
    for name in ("run_gsm8k.sh", "run_redteam.sh"):
        (tmp_path / name).write_text(TINY)
    shutil.copy(ROOT / "tba.py", tmp_path)
    (tmp_path / "MODEL").symlink_to(gsm8k / "model")
    (tmp_path / "DATA").symlink_to(gsm8k / "data")
    (tmp_path / "bin").mkdir()
    for name, body in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    paths = [str(tmp_path / "bin"), os.path.dirname(sys.executable), os.environ["PATH"]]
    environment = os.environ | {"PATH": os.pathsep.join(paths), "PYTHON": sys.executable}
    environment |= {"ROOT": ROOT, "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    out = tmp_path / re.search("run=(.*)", script)[1]
    log = tmp_path / "log"
    steps = 0
    for _ in range(2 if case == ONE_MACHINE else 1):
        with open(log, "a") as file:
            streams = {"stdout": file, "stderr": file}
            process = started(["bash", "script"], cwd=tmp_path, env=environment, **streams)
        wait_until(lambda least=steps + 3: steps_of(out) >= least, "three steps", log.read_text)
        process.send_signal(signal.SIGUSR1)
        check_saved(out, process, log)
        assert process.returncode == (1 if "ranks" in case else 128 + signal.SIGUSR1)
        steps = steps_of(out)
    assert [m["step"] for m in read_lines(out / "metrics.jsonl")] == list(range(1, steps + 1))


SCALED = """
import os
import numpy as np

def rewards(task, examples, responses, ended):
    return np.full(len(responses), float(os.environ["REWARD"]))

tba.GSM8K.rewards = rewards
"""
BEFORE = """import os, signal, threading
from concurrent.futures import ThreadPoolExecutor
import tba

handlers = [signal.getsignal(number) for number in tba.STOP_SIGNALS]
os.environ["REWARD"] = "1"
"""
AFTER = """
os.environ["REWARD"] = "5"
with ThreadPoolExecutor() as pool:
    resumed = pool.submit(tba.main, ["--resume", "runs/1e-4", "--steps", "3"])
assert resumed.result() == 0
assert [signal.getsignal(number) for number in tba.STOP_SIGNALS] == handlers
others = [thread for thread in threading.enumerate() if not thread.daemon]
others.remove(threading.main_thread())
for thread in others:
    thread.join(60)  # it may be about to end
    assert not thread.is_alive(), thread
"""


@pytest.mark.parametrize("source", ["file", "standard input"])
def test_the_sweep_of_the_docs_ends_and_leaves_nothing(gsm8k, tmp_path, started, source):
    """A script without `if __name__ == "__main__"`; the second run is resumed, in a thread.

    Each run's Searchers have the environment of its start.
    """
    text = (ROOT / "docs" / "hacking.md").read_text()
    (sweep,) = re.findall(r"```python\n(import sys\n.*?)```", text, re.DOTALL)
    script = tmp_path / "sweep.py"
    script.write_text(BEFORE + sweep + AFTER)
    plugin = tmp_path / "mine.py"  # is not executed twice
    plugin.write_text((ROOT / "bench" / "objectives.py").read_text() + SCALED)
    flags = arguments(gsm8k, None, output_dir=None, steps=2, eval_samples=8, learning_rate=None)
    flags += ["--plugin", str(plugin), "--objective", "dr_grpo"]
    command = [sys.executable, str(script) if source == "file" else "-", *flags]
    log = tmp_path / "log"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with open(log, "w") as file, open(script) as standard_input:
        streams = {"stdin": standard_input, "stdout": file, "stderr": file}
        process = started(command, cwd=tmp_path, env=environment, **streams)
    assert process.wait(PATIENCE) == 0, log.read_text()
    wait_until(lambda: not processes_of(process.pid), "every process gone")
    for rate, steps in (("1e-5", 2), ("1e-4", 3)):
        assert steps_of(tmp_path / "runs" / rate) == steps, log.read_text()
    rewards = [m["reward"] for m in read_lines(tmp_path / "runs" / "1e-4" / "metrics.jsonl")]
    assert rewards[:2] == [1, 1] and rewards[2] > 1  # groups of before may be among the new ones
