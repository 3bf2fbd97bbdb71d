"""How people run and stop tba.py: terminals, pipes, `timeout`, process groups, Python."""

import contextlib
import errno
import fcntl
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import textwrap
import time
from types import SimpleNamespace

import psutil
import pytest
from harness import (
    PATIENCE,
    ROOT,
    Run,
    arguments,
    endless,
    helpers_of,
    kill_all,
    processes_of,
    steps_of,
    wait_until,
)
from starter import restore_signals

import tba
from tba import read_lines

COMMAND = [sys.executable, str(ROOT / "tba.py")]


@pytest.mark.slow
def test_a_helper_that_hangs_does_not_keep_a_run_from_ending(gsm8k, tmp_path):
    """Here the fork server and the Manager hang, and the Trainer goes on until it needs them."""
    out = tmp_path / "run"
    run = Run(out, endless(gsm8k, out, searcher_timeout=120), interpreter=True)
    run.reaches(1)
    helpers = helpers_of(psutil.Process(run.process.pid))
    assert len(helpers) == 2
    for helper in helpers:
        helper.suspend()
    time.sleep(3)
    os.kill(run.process.pid, signal.SIGTERM)
    run.until(lambda: run.process.poll() is not None, "its end", alive=False)
    for helper in helpers:
        with contextlib.suppress(psutil.NoSuchProcess):
            helper.kill()
    assert run.process.returncode == 128 + signal.SIGTERM, run.text()
    assert list(out.glob("checkpoint-*"))
    run.gone()


def test_a_signal_that_is_repeated_after_a_second_kills(clock, monkeypatch, capfd):
    """Each signal for itself; the kernel delivers none to a container's first process."""
    events = []
    monkeypatch.setattr(signal, "signal", lambda *args: events.append(args))
    monkeypatch.setattr(os, "kill", lambda *args: events.append(args))
    monkeypatch.setattr(os, "_exit", sys.exit)
    trainer = SimpleNamespace(signals={})
    for seconds, number in ((0, signal.SIGTERM), (0.9, signal.SIGTERM), (0.15, signal.SIGINT)):
        clock.now += seconds
        tba.on_signal(trainer, number, None)
    assert events == [] and [*trainer.signals] == [signal.SIGTERM, signal.SIGINT]
    assert capfd.readouterr().err.count("SIGTERM: stopping") == 2
    clock.now += 0.05
    with pytest.raises(SystemExit, match="143"):
        tba.on_signal(trainer, signal.SIGTERM, None)
    assert events == [(signal.SIGTERM, signal.SIG_DFL), (os.getpid(), signal.SIGTERM)]


def test_signals_that_are_ignored_stay_ignored_and_others_are_restored():
    """As SIGHUP under `nohup`."""
    numbers = tba.STOP_SIGNALS
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        inside = [signal.getsignal(number) for number in numbers]
        handler = lambda *_: None
        with pytest.raises(ValueError), tba.stop_signal_handler(handler):
            for number in numbers:
                expected = signal.SIG_IGN if number == signal.SIGHUP else handler
                assert signal.getsignal(number) == expected
            raise ValueError
        assert [signal.getsignal(number) for number in numbers] == inside
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO])
def test_output_that_cannot_be_written_is_no_error(number, monkeypatch):
    """A closed pipe, a full disk, a terminal that is gone."""

    def fails(*_):
        raise OSError(number, "gone")

    stream = SimpleNamespace(write=fails, flush=fails, isatty=lambda: True)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    with tba.lenient_output():
        print("a line", flush=True)
        print("another", file=sys.stderr, flush=True)
        assert sys.stderr.isatty()
    assert sys.stdout is stream and sys.stderr is stream


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


def check_saved(out, process, log):
    """Wait until a run and its processes have ended; check that its last step was saved."""
    process.wait(PATIENCE)
    wait_until(lambda: not processes_of(process.pid), "every process gone")
    assert (out / f"checkpoint-{steps_of(out)}").exists(), log.read_text()


@pytest.mark.slow
@pytest.mark.devices(3)
@pytest.mark.parametrize("way", ["Ctrl-C", "a closed terminal", "timeout"])
def test_a_run_saves_however_it_is_stopped(gsm8k, tmp_path, started, way):
    """In a terminal that Ctrl-C reaches with `tee`, or that closes, so that writes to it fail.

    On one core, where a weight sync ends before the Trainer looks at it. `timeout` sends its signal
    to its child, and then to the whole group: twice.
    """
    out, log = tmp_path / "run", tmp_path / "log"
    shell = f'"$@" 2>&1 | tee {log}; exit "${{PIPESTATUS[0]}}"'
    before = {
        "Ctrl-C": ["bash", "-c", shell, "bash", "taskset", "-c", str(min(os.sched_getaffinity(0)))],
        "a closed terminal": [],
        "timeout": ["timeout", "100000"],
    }[way]
    flags = {"lockstep": True, "lag": 2} if way == "Ctrl-C" else {"num_searchers": 2}
    ours, theirs = pty.openpty()
    output = theirs if way != "timeout" else os.open(log, os.O_WRONLY | os.O_CREAT)
    process = started(
        [*before, *COMMAND, *endless(gsm8k, out, **flags)],
        preexec_fn=take_terminal, stdin=theirs, stdout=output, stderr=output,
    )  # fmt: skip
    os.close(theirs)
    wait_until(lambda: steps_of(out) >= 3 or process.poll() is not None, "three steps")
    if way == "Ctrl-C":
        os.write(ours, b"\x03")
    elif way == "timeout":
        process.send_signal(signal.SIGTERM)
    else:
        os.close(ours)
    check_saved(out, process, out / "metrics.jsonl")
    expected = {"a closed terminal": 128 + signal.SIGHUP, "timeout": 128 + signal.SIGTERM}
    assert process.returncode == expected.get(way, process.returncode)


@pytest.mark.devices(3)
@pytest.mark.parametrize("lockstep", [False, True])
def test_a_signal_saves_a_checkpoint(gsm8k, tmp_path, lockstep):
    """If it reaches the Searchers too, these outlive it: in lockstep, batches must be completed."""
    out = tmp_path / "run"
    flags = {"lockstep": True, "lag": 2, "num_searchers": 2} if lockstep else {}
    run = Run(out, endless(gsm8k, out, **flags))
    run.reaches(3)
    number = signal.SIGHUP if lockstep else signal.SIGUSR1
    (os.killpg if lockstep else os.kill)(run.process.pid, number)
    said = run.ends(128 + number)
    assert [path.name for path in out.glob("checkpoint-*")] == [f"checkpoint-{steps_of(out)}"]
    assert "warning" not in said  # no Searcher failed


@pytest.mark.slow
def test_a_run_that_cannot_write_its_output_trains_and_saves(gsm8k, tmp_path):
    """No input, a full disk as standard output, and a pipe that closes as standard error."""
    out = tmp_path / "run"
    streams = "<&- 2>&1 > /dev/full | head -n 1"
    command = ["bash", "-c", f'set -o pipefail; "$@" {streams}', "bash", *COMMAND]
    flags = arguments(gsm8k, out, steps=4, save_every=2, eval_samples=8)
    process = subprocess.run([*command, *flags], timeout=PATIENCE)
    assert process.returncode == 0
    assert len(read_lines(out / "metrics.jsonl")) == 4
    assert (out / "checkpoint-2").exists() and (out / "final" / "model.safetensors").exists()


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


@pytest.mark.slow
@pytest.mark.parametrize("case", [ONE_MACHINE, "with several ranks", "the script for a cluster"])
@pytest.mark.devices(3)
def test_the_slurm_scripts_of_the_docs_save_after_a_signal(gsm8k, tmp_path, started, case):
    """SLURM signals the shell that runs a script; started again, the script resumes the run."""
    text = (ROOT / "docs" / "operations.md").read_text()
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    one, ranks, cluster = (block for block in blocks if "$folder" in block)
    script = cluster if case == "the script for a cluster" else one
    if case == "with several ranks":
        *lines, _ = one.splitlines(keepends=True)
        flags = endless(gsm8k, None)
        script = "".join(lines) + ranks.replace("$folder", f"{shlex.join(flags)} $folder")
    (tmp_path / "script").write_text(textwrap.dedent(script))
    for name in ("run_gsm8k.sh", "run_redteam.sh"):
        (tmp_path / name).write_text(TINY)
    shutil.copy(ROOT / "tba.py", tmp_path)
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
BEFORE = """import os
from concurrent.futures import ThreadPoolExecutor
import tba

os.environ["REWARD"] = "1"
"""
AFTER = """
os.environ["REWARD"] = "5"
with ThreadPoolExecutor() as pool:
    resumed = pool.submit(tba.main, ["--resume", "runs/1e-4", "--steps", "3"])
assert resumed.result() == 0
"""


@pytest.mark.slow
def test_the_sweep_of_the_docs_ends_and_leaves_nothing(gsm8k, tmp_path, started):
    """On standard input, without `if __name__ == "__main__"`; a run is resumed, in a thread.

    Each run's Searchers have the environment of its start.
    """
    text = (ROOT / "docs" / "hacking.md").read_text()
    (sweep,) = re.findall(r"```python\n(import sys\n.*?)```", text, re.DOTALL)
    script, log = tmp_path / "sweep.py", tmp_path / "log"
    script.write_text(BEFORE + sweep + AFTER)
    flags = arguments(gsm8k, None, output_dir=None, steps=2, eval_samples=8, learning_rate=None)
    plugin = tmp_path / "mine.py"  # is not executed twice
    plugin.write_text((ROOT / "bench" / "objectives.py").read_text() + SCALED)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with open(log, "w") as file, open(script) as standard_input:
        streams = {"stdin": standard_input, "stdout": file, "stderr": file}
        command = [sys.executable, "-", *flags, "--plugin", str(plugin), "--objective", "dr_grpo"]
        process = started(command, cwd=tmp_path, env=environment, **streams)
    assert process.wait(PATIENCE) == 0, log.read_text()
    wait_until(lambda: not processes_of(process.pid), "every process gone")
    for rate, steps in (("1e-5", 2), ("1e-4", 3)):
        assert steps_of(tmp_path / "runs" / rate) == steps, log.read_text()
    rewards = [m["reward"] for m in read_lines(tmp_path / "runs" / "1e-4" / "metrics.jsonl")]
    assert rewards[:2] == [1, 1] and rewards[2] > 1  # groups of before may be among the new ones
