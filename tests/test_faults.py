"""Searchers that die, hang or raise, wrong weights, signals: what promises 2 to 5 say."""

import itertools
import math
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from harness import (
    PATIENCE,
    ROOT,
    Run,
    arguments,
    check_positions,
    config_and_task,
    helpers_of,
    processes_of,
    run_tba,
    steps_of,
)
from hypothesis import given
from hypothesis import strategies as st

import tba
from tba import read_lines


def endless(gsm8k, out, **flags):
    """Flags of a run that goes on until it is ended."""
    settings = {
        "steps": 100_000, "eval_every": 0, "eval_samples": 8, "save_every": 0, "num_searchers": 3,
        "max_restarts": 20, "transfer_timeout": 6, "searcher_timeout": 20, "sync_every": 1,
    }  # fmt: skip
    return arguments(gsm8k, out, **(settings | flags))


@pytest.mark.devices(4)
def test_one_run_suffers_all_faults_and_loses_nothing(gsm8k, tmp_path):
    """Killed, hanging and raising Searchers, in each phase of a weight transfer too."""
    out = tmp_path / "run"
    run = Run(out, endless(gsm8k, out))
    run.want("slow-trainer", "0.05")
    # each Searcher has sent a group, without which a failure ends the run
    run.until(lambda: len({index % 3 for index, *_ in run.noted("stored")}) == 3, "groups of all")
    run.reaches(1)
    faults = ["die-generating", "hang-receiving", "raise", "die-loading", "hang-generating"]
    faults += ["die-received", "hang-loading", "die-receiving", "die-joining", "hang-joining"]
    number = 0
    for fault in faults:
        run.want(fault)
        if "joining" in fault:  # a group is formed when its members change
            run.want("die-generating")
            number += 1
        run.suffered(fault)
        number += 1
        run.until(lambda n=number: len(run.failed()) >= n, f"{fault} noticed")
        assert len(run.failed()) == number  # no healthy Searcher is restarted with it
        before = run.noted("stored")[-1]
        run.until(lambda last=before: run.noted("stored")[-1] != last, f"data after {fault}")
        version = read_lines(out / "metrics.jsonl")[-1]["version"]
        run.until(
            lambda v=version: read_lines(out / "metrics.jsonl")[-1]["version"] > v,
            f"new weights after {fault}",
        )
    run.until(lambda: read_lines(out / "metrics.jsonl")[-1]["searchers_alive"] == 3, "all back")
    assert "ArithmeticError: a fault on demand" in run.text()
    os.kill(run.process.pid, signal.SIGINT)
    run.ends(128 + signal.SIGINT)
    check_positions([index for index, *_ in run.noted("stored")], 3)
    assert max(m["logprob_gap"] for m in read_lines(out / "metrics.jsonl")) < 1e-3
    # its checkpoint can be resumed
    step = read_lines(out / "metrics.jsonl")[-1]["step"]
    run_tba(["--resume", str(out), "--steps", str(step + 3)])
    assert [m["step"] for m in read_lines(out / "metrics.jsonl")] == list(range(1, step + 4))


def first_steps(out):
    """By version of the weights last sent, when the first step after that ended, in seconds."""
    times = {}
    for m in read_lines(out / "metrics.jsonl"):
        times.setdefault(m["version"], m["seconds"])
    return times


@pytest.mark.devices(4)
def test_a_searcher_that_hangs_costs_the_others_one_transfer_timeout(gsm8k, tmp_path):
    """Before it has received weights, or once it has them; it is restarted much later."""
    for fault in ("hang-receiving", "hang-loading"):
        out = tmp_path / fault
        run = Run(out, endless(gsm8k, out, transfer_timeout=10, searcher_timeout=600))
        run.reaches(3)
        run.want(fault)
        run.suffered(fault)
        before = len(first_steps(out))
        run.until(lambda o=out, n=before: len(first_steps(o)) > n + 3, "newer weights")
        times = list(first_steps(out).values())
        waited = max(after - before for before, after in itertools.pairwise(times))
        print(f"{fault}: new weights after {waited:.1f} s")
        assert 10 < waited < 60  # --transfer_timeout, and what a busy machine takes for some steps
        run.reaches(read_lines(out / "metrics.jsonl")[-1]["step"] + 5)
        assert not run.failed()  # it still hangs, and no other was taken for it
        os.kill(run.process.pid, signal.SIGINT)
        run.ends(128 + signal.SIGINT)


@pytest.mark.devices(3)
def test_an_evaluation_whose_weights_do_not_arrive_is_repeated(gsm8k, tmp_path):
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, lockstep=True, num_searchers=2, steps=2, eval_every=0))
    run.want("miss")
    said = run.ends(0, seconds=200)
    assert "sending the weights of step 0 failed" in said and "a broadcast failed" in said
    assert [record["step"] for record in read_lines(out / "eval.jsonl")] == [0, 2]


@pytest.mark.devices(4)
def test_a_killed_trainer_leaves_nothing_and_a_second_signal_ends_at_once(gsm8k, tmp_path):
    out = tmp_path / "killed"
    run = Run(out, endless(gsm8k, out, num_searchers=2), interpreter=True)
    run.reaches(3)
    assert len(processes_of(run.process.pid)) >= 5  # Trainer, Manager, fork server, two Searchers
    run.process.kill()
    run.process.wait()
    run.gone()

    out = tmp_path / "twice"
    run = Run(out, endless(gsm8k, out, lockstep=True, max_restarts=0))
    run.want("slow-trainer", "1000")
    run.until(lambda: run.noted("trained"), "a step, which lasts")
    os.kill(run.process.pid, signal.SIGINT)
    run.says("SIGINT")
    time.sleep(1.1)  # before that, it would count as the same signal
    os.kill(run.process.pid, signal.SIGINT)
    run.ends(-signal.SIGINT)  # a shell's $? is 128 + signal


def test_a_run_outlives_its_working_directory_but_not_its_manager(gsm8k, tmp_path, monkeypatch):
    """A Searcher that dies is restarted; then one line says what has ended, after a checkpoint."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    out = tmp_path / "run"
    run = Run(out, endless(gsm8k, out, num_searchers=1))
    run.reaches(1)
    (tmp_path / "here").rmdir()
    run.want("die-generating")
    run.until(run.failed, "a failed Searcher")
    version = read_lines(out / "metrics.jsonl")[-1]["version"]
    newer = lambda: read_lines(out / "metrics.jsonl")[-1]["version"] > version + 1
    run.until(newer, "new weights of the one that replaces it")
    _, manager = helpers_of(psutil.Process(run.process.pid))
    manager.kill()
    said = run.ends(1)
    assert "tba.py: error: the Manager" in said and "Traceback" not in said
    assert [path.name for path in out.glob("checkpoint-*")] == [f"checkpoint-{steps_of(out)}"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_saves_a_checkpoint(gsm8k, tmp_path, number):
    out = tmp_path / "run"
    interpreter = number == signal.SIGHUP
    run = Run(out, endless(gsm8k, out, num_searchers=1), interpreter=interpreter)
    run.reaches(3)
    os.kill(run.process.pid, number)
    run.ends(128 + number)
    step = read_lines(out / "metrics.jsonl")[-1]["step"]
    assert [path.name for path in out.glob("checkpoint-*")] == [f"checkpoint-{step}"]


@pytest.mark.devices(4)
def test_faults_that_end_a_run(gsm8k, tmp_path):
    """A failure before the first group ever, too many failures, wrong weights: one exit code."""
    out = tmp_path / "first"
    run = Run(out, endless(gsm8k, out))
    run.want("raise")
    said = run.ends(1)
    assert "ArithmeticError: a fault on demand" in said and "before its first group" in said

    out = tmp_path / "many"
    run = Run(out, endless(gsm8k, out, num_searchers=1, max_restarts=1, initial_trajectories=10**6))
    run.until(lambda: run.noted("stored"), "a group")
    for _ in range(2):
        run.want("raise")
        run.suffered("raise")
    said = run.ends(1)
    assert said.count("ArithmeticError: a fault on demand") == 2
    assert not list(out.glob("checkpoint-*"))  # not a step was taken

    out = tmp_path / "wrong"
    run = Run(out, endless(gsm8k, out))
    run.want("slow-trainer", "0.5")  # groups arrive with the message that ends the run
    run.reaches(2)
    run.want("corrupt")
    said = run.ends(1)
    assert "logprob_tolerance" in said
    saved = tba.open_checkpoint(next(out.glob("checkpoint-*")))
    searchers = saved["SearcherProcesses"]
    arrived = searchers["first_missing"] + len(searchers["arrived_positions"])
    assert arrived == len(run.noted("stored")) + len(saved["Trainer"]["inbox"])  # none is lost
    step = read_lines(out / "metrics.jsonl")[-1]["step"]  # the Trainer's own policy is healthy
    assert [path.name for path in out.glob("checkpoint-*")] == [f"checkpoint-{step}"]


def test_what_a_run_saves_after_a_skipped_step_and_an_exception(gsm8k, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        '''"""TB that is not finite at step 3, and raises at step 6."""
import tba

def broken(batch, config):
    if batch.step == 6:
        raise ArithmeticError("step 6")
    result = tba.tb(batch, config)
    if batch.step == 3:
        result.loss = result.loss * float("nan")
    return result

tba.OBJECTIVES["broken"] = broken
'''
    )
    out = tmp_path / "run"
    flags = {"objective": "broken", "plugin": plugin, "steps": 10, "save_every": 4}
    said, err = run_tba(arguments(gsm8k, out, eval_every=0, eval_samples=8, **flags), code=1)
    assert "step 4: loss or gradient not finite" in err and "ArithmeticError: step 6" in err
    assert sorted(path.name for path in out.glob("checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-6",
    ]
    run_tba(["--resume", str(out), "--steps", "7", "--objective", "tb"])
    assert read_lines(out / "metrics.jsonl")[-1]["step"] == 7

    # a lockstep run could not repeat the unfinished step exactly
    out = tmp_path / "lockstep"
    flags |= {"lockstep": True, "eval_every": 0, "eval_samples": 8}
    run_tba(arguments(gsm8k, out, **flags), code=1)
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-4"]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_which_tries_again(gsm8k, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        '''"""The disk is full once, at step 4; the run may try again at this very step."""
import tba

write = tba.save_model
written = []

def full(model, weights, task, folder):
    written.append(folder)
    if len(written) == 2:
        raise OSError(28, "No space left on device")
    write(model, weights, task, folder)

tba.save_model = full
'''
    )
    out = tmp_path / "run"
    flags = {"plugin": plugin, "steps": 10_000, "save_every": 2, "eval_every": 0, "eval_samples": 8}
    _, err = run_tba(arguments(gsm8k, out, **flags), code=1)
    assert "No space left on device" in err and "Traceback" not in err
    step = read_lines(out / "metrics.jsonl")[-1]["step"]
    assert sorted(path.name for path in out.glob("checkpoint-*")) == [
        "checkpoint-2",
        f"checkpoint-{step}",
    ]


def test_a_slow_write_of_a_checkpoint_is_waited_for_with_a_notice(gsm8k, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        '''"""Writing a checkpoint lasts until a file says so."""
import os, time
from pathlib import Path
import tba

tba.Trainer.LOG_EVERY = 0.5
write = tba.save_model

def slow(*args):
    while not Path(os.environ["TBA_FAULTS"], "write").exists():
        time.sleep(0.05)
    write(*args)

tba.save_model = slow
'''
    )
    out = tmp_path / "run"
    flags = {"num_searchers": 1, "save_every": 2, "plugin": plugin}
    run = Run(out, endless(gsm8k, out, **flags), hooks=False)
    run.says("step 4: waiting for the previous checkpoint")
    os.kill(run.process.pid, signal.SIGINT)
    run.says("SIGINT")
    (run.faults / "write").touch()
    run.ends(128 + signal.SIGINT)
    assert sorted(path.name for path in out.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]


BLOCKING = '''"""Rewards, or verdicts on held-out answers, that come when a file says so."""
import multiprocessing, os, time
from pathlib import Path
import numpy as np
import tba

FOLDER = Path(os.environ["TBA_FAULTS"])

def wait_for(name):
    while not (FOLDER / name).exists():
        time.sleep(0.01)

class Blocking(tba.GSM8K):
    """GSM8K with a slow judge."""

    def rewards(self, examples, responses, ended):
        with open(FOLDER / "called", "a") as file:
            file.write(f"{len(responses)}\\n")
        wait_for("rewards")
        if (FOLDER / "raise-reward").exists():
            raise ArithmeticError("a judge that fails")
        return super().rewards(examples, responses, ended)

    def evaluate(self, examples, responses, ended):
        wait_for("verdicts")
        return [{"accuracy": float(x)} for x in super().rewards(examples, responses, ended)]

broadcast = tba.WeightChannel.broadcast

def missed(*args):
    broadcast(*args)
    if multiprocessing.parent_process() and (FOLDER / "miss").exists():
        (FOLDER / "miss").unlink()
        raise RuntimeError("a broadcast failed")

make_groups = tba.Searcher.make_groups

def counted(searcher, completions):
    if not completions[0].request.id.held_out:
        with open(FOLDER / "decoded", "a") as file:
            file.write(f"{len(completions)}\\n" * len(completions))
    return make_groups(searcher, completions)

tba.WeightChannel.broadcast = missed
tba.Searcher.make_groups = counted
tba.TASKS["blocking"] = Blocking
'''


def test_decoding_and_weights_do_not_wait_for_rewards_or_verdicts(gsm8k, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(BLOCKING)
    out = tmp_path / "run"
    flags = {"task": "blocking", "plugin": plugin, "steps": 40, "eval_every": 4, "sync_every": 1}
    run = Run(out, arguments(gsm8k, out, eval_samples=8, **flags), hooks=False)
    # 64 responses are decoded at a time, 8 to a prompt; their rewards are not there
    run.until(lambda: len(run.noted("decoded")) >= 24, "further groups")
    time.sleep(3)
    assert len(run.noted("decoded")) <= 4 * 8  # no more than that wait
    assert not (out / "metrics.jsonl").exists()
    (run.faults / "miss").touch()
    (run.faults / "rewards").touch()
    run.reaches(40)  # with weights that were loaded, although no verdict has come
    assert read_lines(out / "metrics.jsonl")[-1]["version"] >= 4
    assert not (out / "eval.jsonl").exists()
    (run.faults / "verdicts").touch()
    run.ends(0)
    # however many responses wait, a call takes a limited number, and so a limited time
    assert max(size for (size,) in run.noted("called")) <= 64
    steps = [e["step"] for e in read_lines(out / "eval.jsonl")]
    # the first goes on although its Searcher missed later weights; on a slow machine one may begin
    # for two
    assert steps[0] == 0 and steps[-1] == 40 and not (run.faults / "miss").exists()


def test_a_reward_that_raises_ends_the_searcher_with_its_traceback(gsm8k, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(BLOCKING)
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, task="blocking", plugin=plugin), hooks=False)
    for name in ("raise-reward", "verdicts", "rewards"):
        (run.faults / name).touch()
    said = run.ends(1)
    assert "ArithmeticError: a judge that fails" in said and "in rewards" in said


def searcher_of(gsm8k, tmp_path, **flags):
    """A Searcher in this process, of a run with one Searcher; it has weights of step 0."""
    flags = {"num_searchers": 1, "sequences_in_flight": 8, "dtype": "float32"} | flags
    config, task = config_and_task(gsm8k, tmp_path / "none", **flags)
    spec = tba.SearcherSpec(
        searcher=0, start=1, first=0, arrived_positions=frozenset(), shared=None,
        commands=queue.Queue(),
        channel=tba.WeightChannel("127.0.0.1", 0, False, tba.timedelta(seconds=30)),
        messages=queue.Queue(),
    )  # fmt: skip
    searcher = tba.Searcher(config, task, spec)
    searcher.search_end = math.inf
    with torch.no_grad():
        for name, tensor in searcher.staging.views.items():
            tensor.copy_(searcher.engine.state[name])
    searcher.staged = weights_of_step(0)
    searcher.between_steps()
    return searcher


def test_a_searcher_skips_positions_whose_groups_have_arrived(gsm8k, tmp_path):
    searcher = searcher_of(gsm8k, tmp_path, sequences_in_flight=1000)
    searcher.spec.arrived_positions = frozenset({1, 2, 4})  # before the run was resumed
    searcher.search_end = 6
    searcher.submit_prompts()
    assert [source.index for source in searcher.in_flight] == [0, 3, 5]


def sent(searcher, kind, count):
    """The messages of a kind that a Searcher sends, until there are `count` of them."""
    found = []
    while len(found) < count:
        searcher.between_steps()
        while not searcher.spec.messages.empty():
            message = pickle.loads(searcher.spec.messages.get()[1])
            found += [message] if isinstance(message, kind) else []
    return found


def weights_of_step(step):
    """The message that such weights are in the staging buffer."""
    return tba.ReceiveWeights(
        version=step, reference=False, held_out=range(0), channel=None, meeting=None
    )  # fmt: skip


def test_a_version_is_that_of_the_weights_at_submission(gsm8k, tmp_path):
    """However often weights are loaded while a response is being generated."""
    searcher = searcher_of(gsm8k, tmp_path)
    step = 0

    def load_newer_weights():
        nonlocal step
        step += 1
        searcher.staged = weights_of_step(step)
        searcher.between_steps()

    submitted = []
    for _ in range(3):
        searcher.submit_prompts()
        submitted.append(searcher.version)
        searcher.handle_completions(searcher.engine.step(load_newer_weights))
        assert searcher.version == step > submitted[-1]
    groups = sent(searcher, tba.Group, 3)
    versions = [{t.version for t in group.trajectories} for group in groups]
    assert versions == [{version} for version in submitted]
    for group in groups:  # weights were loaded after each token
        assert all(t.last_version == t.version + len(t.tokens) - 1 for t in group.trajectories)


def test_slow_rewards_do_not_change_what_lockstep_samples(gsm8k, tmp_path, monkeypatch):
    batches = []
    scored = threading.Event()
    rewards = tba.GSM8K.rewards
    monkeypatch.setattr(
        tba.GSM8K, "rewards", lambda *args: scored.wait(PATIENCE) and rewards(*args)
    )
    for slow in (False, True):
        searcher = searcher_of(gsm8k, tmp_path, lockstep=True)
        searcher.search_end = 12
        searcher.engine.pads = False  # prompts of other lengths wait in the engine
        scored.set()
        if slow:
            scored.clear()
        sampled = []
        for _ in range(12):
            searcher.submit_prompts()
            if searcher.engine.unfinished:
                done = searcher.engine.step(searcher.between_steps)
                sampled.append([(c.request.id, [y.tolist() for y in c.tokens]) for c in done])
                searcher.handle_completions(done)
        scored.set()
        assert searcher.index == 12 and not searcher.engine.unfinished
        assert len(sent(searcher, tba.Group, 12)) == 12
        batches.append(sampled)
    assert batches[0] == batches[1]


def test_answers_are_judged_and_sent_by_their_own_prompts(gsm8k, tmp_path, monkeypatch):
    searcher = searcher_of(gsm8k, tmp_path, eval_responses=2)
    monkeypatch.setattr(
        searcher.task, "evaluate",
        lambda examples, responses, ended: [
            {"seen": (example["question"], response, bool(one))}
            for example, response, one in zip(examples, responses, ended, strict=True)
        ],
    )  # fmt: skip
    submitted = []
    monkeypatch.setattr(searcher.engine, "submit", submitted.append)
    searcher.version = 7
    searcher.submit_held_out([3, 0, 5, 1])
    answers = []
    for request, row in zip(submitted, (3, 0, 5, 1), strict=True):
        tokens = [request.prompt[-row - 2 :], request.prompt[-row - 3 :]]
        logprobs = [np.zeros(len(answer), np.float32) for answer in tokens]
        answers.append(
            tba.Completion(request, tokens, logprobs, np.array([True, False]), [(7, 7)] * 2)
        )
    searcher.handle_completions(answers)
    records = {}
    for evaluated in sent(searcher, tba.Evaluated, 4):
        assert evaluated.version == 7
        records |= evaluated.records
    assert set(records) == {3, 0, 5, 1}  # calls may end in another order
    for done in answers:
        row = done.request.id.prompt_id
        question = searcher.task.held_out[row]["question"]
        texts = searcher.task.response_texts(done.tokens)
        seen = [record["seen"] for record in records[row]]
        assert seen == [(question, texts[0], True), (question, texts[1], False)]


@given(st.integers(1, 3), st.integers(1, 9), st.randoms(), st.booleans())
def test_an_evaluation_has_one_record_of_each_prompt(members, prompts, random, loses_one):
    """Whatever order they come in; one that loses a Searcher is due again."""
    config = tba.settings(steps=10, eval_every=5)
    written = []
    folder = SimpleNamespace(
        step=0, evaluations=[], write_evaluation=lambda *args: written.append(args)
    )
    task = SimpleNamespace(
        held_out_prompts=[None] * prompts,
        text=lambda tokens: "a prompt",
        summarize=lambda records: {"ids": [r["id"] for r in records]},
    )
    evaluations = tba.Evaluations(config, task, folder)
    searchers = [tba.RunningSearcher(None, None, "ready") for _ in range(members)]
    for attempt in (1, 2):
        assert evaluations.begin_if_due(5, searchers) == prompts
        messages = [
            tba.Evaluated(5, {row: [{"id": row, "answer": "odd" if row % 2 else "even"}]})
            for row in range(prompts)
        ]
        random.shuffle(messages)
        assert not evaluations.idle()
        for message in messages[:-1]:
            evaluations.on_records(message)
            assert not written
        if loses_one and attempt == 1:
            evaluations.drop(random.choice(searchers))
            evaluations.on_records(messages[-1])
            assert not written and not evaluations.idle()
            continue
        evaluations.on_records(messages[-1])
        assert evaluations.idle() and len(written) == 1
        step, n, metrics, _ = written[0]
        assert (step, n, metrics["ids"]) == (5, prompts, list(range(prompts)))
        assert metrics["distinct"] == min(2, prompts) / prompts
        return


def test_a_searcher_that_ended_or_hangs_is_noticed_and_no_longer_ready(monkeypatch, request):
    config = tba.settings(num_searchers=3, searcher_timeout=60)
    processes = searcher_processes(config)

    def process_of(spec, code=""):
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(PATIENCE,))
        process.start()
        request.addfinalizer(process.kill)
        return process

    monkeypatch.setattr(tba, "LocalProcess", process_of)
    processes.running = [processes.start_searcher(i) for i in range(3)]
    killed, hanging, loading = processes.running
    killed.state = hanging.state = "ready"
    for position in range(3):
        processes.record_arrival(position)
    assert processes.reap() == []
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.join()
    now = time.monotonic() + 100
    monkeypatch.setattr(tba.time, "monotonic", lambda: now)
    assert processes.reap() == [killed]
    processes.restart(killed)
    assert killed.state == "ended" and killed not in processes.running
    assert hanging.state == "ended"  # it has been killed, and is found next
    hanging.process.join()
    now += 1
    assert processes.reap() == [hanging] and "--searcher_timeout" in hanging.reason
    processes.restart(hanging)
    assert processes.running[2] is loading and loading.process.is_alive()
    assert all(s.state == "loading" for s in processes.running)
    now += 1000
    assert processes.reap() == []
    loading.process.join()


@given(
    st.booleans(), st.lists(st.sampled_from(["started", "heartbeat", "failed", "dies", "silence"]))
)
def test_no_state_of_a_searcher_is_without_an_exit(on_a_cluster, events):
    """Whatever happens, the table in RunningSearcher's docstring says what comes next."""
    address = "auto" if on_a_cluster else ""
    config = tba.settings(num_searchers=1, cluster=address, searcher_timeout=60, max_restarts=1000)
    processes = searcher_processes(config)
    now = 1e6

    def process_of(spec, code=""):
        process = SimpleNamespace(alive=True, exitcode=1)
        process.is_alive = lambda: process.alive
        process.kill = lambda: setattr(process, "alive", False)
        return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tba.time, "monotonic", lambda: now)
        patch.setattr(tba, "LocalProcess", process_of)
        patch.setattr(tba, "ClusterProcess", process_of)
        processes.record_arrival(0)
        first = "pending" if on_a_cluster else "loading"
        processes.running = [processes.start_searcher(0)]
        assert processes.running[0].state == first
        processes.running[0].seen = now
        for event in events:
            (s,) = processes.running
            message = {
                "started": tba.Started(),
                "heartbeat": tba.Heartbeat(now, 0.0, 0),
                "failed": tba.Failed("a traceback", final=False),
            }.get(event)
            if message is not None:
                processes.arrivals.put((s.spec.start, message))
            if event == "dies":
                s.process.alive = False
            expected = {"started": "loading", "heartbeat": "ready"}.get(event, first)
            for seconds in (0, 2000 if event == "silence" else 1, 1):
                now += seconds
                assert list(processes.take()) == []
                for ended in processes.reap():
                    processes.restart(ended)
                    processes.running[0].seen = now
            (after,) = processes.running
            assert after.state == expected
            waits = event == "silence" and s.state == "pending"  # for free resources
            assert (after is s) == (event in ("started", "heartbeat") or waits)


def test_searchers_do_not_wait_for_a_long_training_step():
    """However many messages come before the Trainer handles them."""
    config = tba.settings(num_searchers=0)
    folder = SimpleNamespace(say=print, code="")
    processes = tba.SearcherProcesses(config, SimpleNamespace(), folder)
    processes.start()
    try:
        for _ in range(9000):
            processes.messages.put((1, pickle.dumps(tba.Started())), timeout=PATIENCE)
    finally:
        processes.stop()


@pytest.mark.parametrize("wrong", [0, 4, 9])
def test_every_token_of_every_probe_counts(wrong):
    """The first, one in the middle, the last; also if it is NaN."""
    own = [np.zeros(4, np.float32), np.zeros(1, np.float32), np.zeros(5, np.float32)]
    config = SimpleNamespace(logprob_tolerance=1e-3)
    for value in (0.0, 0.01, -0.01, math.nan):
        s = tba.RunningSearcher(None, None, "ready")
        s.transfer = tba.Transfer(None, [s], version=2, scores=np.concatenate(own))
        sync = SimpleNamespace(config=config)
        flat = np.zeros(10, np.float32)
        flat[wrong] = value
        if value == 0:
            tba.WeightSync.on_loaded(sync, s, np.split(flat, [4, 5]))
            continue
        with pytest.raises(tba.RunEnded):
            tba.WeightSync.on_loaded(sync, s, np.split(flat, [4, 5]))


def trainer_of(**flags):
    """A Trainer whose steps change nothing, without Searchers and files."""
    trainer = object.__new__(tba.Trainer)
    trainer.config = tba.settings(**flags)
    trainer.task = SimpleNamespace(held_out_prompts=[None], train_prompts=[None])
    trainer.step, trainer.inbox, trainer.said = 0, [], []
    trainer.folder = SimpleNamespace(step=0, say=trainer.said.append, evaluations=[])
    trainer.evaluations = tba.Evaluations(trainer.config, trainer.task, trainer.folder)
    trainer.searchers = searcher_processes(trainer.config)
    trainer.buffer = tba.ReplayBuffer(trainer.config)
    trainer.searchers.running = [
        searcher_in("ready", i) for i in range(trainer.config.num_searchers)
    ]
    trainer.searchers.reap = list
    trainer.signals, trainer.groups_stored, trainer.waiting_because = {}, 0, ""
    trainer.ranks = tba.Ranks()
    trainer.saving = Future()
    trainer.saving.set_result(0)
    trainer.sync = SimpleNamespace(due=False, version=0, reference_version=0, poll=lambda: None)
    trainer.sync.begin_if_due = lambda step: False
    trainer.arrived, trainer.log = [], tba.StepLog(trainer)
    trainer.log.write = lambda *_: None
    trainer.learner = SimpleNamespace(ranks=trainer.ranks, skipped=0)
    return trainer


@pytest.fixture
def nothing_learned(monkeypatch):
    """Optimizer steps do nothing."""
    monkeypatch.setattr(tba.Learner, "step", lambda *_: {})


@pytest.mark.usefixtures("nothing_learned")
def test_what_is_due_after_a_step():
    """A sync every 3 steps, an evaluation every 4 and at the end."""
    trainer = trainer_of(steps=9, sync_every=3, eval_every=4)
    syncs, evaluations = [], []
    for _ in range(9):
        trainer.evaluations.due = trainer.sync.due = False
        trainer.train_step([])
        syncs += [trainer.step] * trainer.sync.due
        evaluations += [trainer.step] * trainer.evaluations.due
    assert (syncs, evaluations) == ([3, 6, 9], [4, 8, 9])


@pytest.mark.usefixtures("nothing_learned")
def test_ten_skipped_steps_in_a_row_end_a_run():
    trainer = trainer_of()
    for trainer.learner.skipped in range(10):
        trainer.train_step([])
    assert len(trainer.said) == 9  # all but the first have been skipped
    trainer.learner.skipped = 10
    with pytest.raises(tba.RunEnded):
        trainer.train_step([])


def one_group(index, prompt_id=0, version=0):
    """A group of one response."""
    trajectory = tba.Trajectory(
        tokens=np.array([index], np.int32),
        logprobs=np.zeros(1, np.float32),
        ref_logprobs=np.zeros(1, np.float32),
        ended=True,
        kl=0.0,
        temperature=1.0,
        reward=0.0,
        prompt_id=prompt_id,
        version=version,
        last_version=version,
        reference_version=0,
    )
    return tba.Group(index, [trajectory])


@pytest.mark.parametrize("lockstep", [False, True])
def test_searchers_pause_in_every_wait_while_batches_of_groups_are_not_stored(lockstep):
    """They pause with a few batches, not with some number of groups. Lockstep has its own limit."""
    trainer = trainer_of(num_searchers=1, prompts_per_step=10, lockstep=lockstep)
    trainer.INBOX_BATCHES = 3
    trainer.rule = tba.RecentOrReward(trainer.buffer, trainer.config)
    now, limits = 1e6, []

    def add(group):
        nonlocal now
        now += 0.25  # seconds

    trainer.buffer.add = add
    trainer.inbox = [one_group(i) for i in range(50)]
    trainer.searchers.search_end = 70

    def written():
        limits.append(trainer.searchers.search_end)
        return len(limits) == 15

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tba.time, "monotonic", lambda: now)
        trainer.wait_for("the previous checkpoint", written)
    if lockstep:
        assert set(limits) == {70} and len(trainer.inbox) == 50
    else:  # four a second are stored; 30 may be left
        assert limits == [70] + [0] * 4 + [math.inf] * 10 and not trainer.inbox


def test_slow_storing_does_not_make_data_ever_staler(gsm8k, tmp_path):
    """As with a large buffer of attacks: two groups a step are stored, and more are generated."""
    plugin = tmp_path / "slow.py"
    plugin.write_text(
        """import time
import tba

add = tba.ReplayBuffer.add

def slow(buffer, group):
    time.sleep(0.5)
    add(buffer, group)

tba.ReplayBuffer.add = slow
"""
    )
    out = tmp_path / "run"
    flags = {"steps": 40, "prompts_per_step": 2, "sequences_in_flight": 16, "plugin": plugin}
    flags["recent_probability"] = 1  # replayed groups may be of any age
    run_tba(arguments(gsm8k, out, eval_every=0, eval_samples=8, initial_trajectories=16, **flags))
    staleness = [m["staleness_mean"] for m in read_lines(out / "metrics.jsonl")]
    assert max(staleness[-10:]) < 20, staleness  # without a bound: 30 to 39


def test_a_group_counts_as_of_its_arrival_however_late_it_is_stored():
    """Groups that came before a sync are not drawn as if they had come after it."""
    trainer = trainer_of(num_searchers=1, recent_probability=1.0)
    trainer.rule = tba.RecentOrReward(trainer.buffer, trainer.config)
    (s,) = trainer.searchers.running
    for index in range(6):
        trainer.sync.version = 10 * (index // 3)
        trainer.searchers.arrivals.put((s.spec.start, one_group(index, prompt_id=index)))
        trainer.handle_messages()
    trainer.sync.version = 20
    trainer.store_inbox()
    assert {g[0].prompt_id for g in trainer.rule.sample(3, 1)} == {3, 4, 5}


def test_a_resumed_run_may_train_on_groups_that_were_not_stored_before_any_arrive():
    """Its first step has a reward to log: theirs."""
    config = tba.settings(
        prompts_per_step=1, searched_per_prompt=1, trained_per_prompt=1, initial_trajectories=0,
        recent_probability=1.0,
    )  # fmt: skip
    task = SimpleNamespace(
        held_out_prompts=[None], train_prompts=[None], buffer_class=tba.ReplayBuffer, text=str,
        response_texts=str,
    )  # fmt: skip
    ignore = lambda name, record: None
    folder = SimpleNamespace(step=0, say=print, evaluations=[], append=ignore, config=config)
    saved = {}
    for inbox in ([one_group(0), one_group(1)], []):
        trainer = tba.Trainer(config, task, folder, tba.Ranks(), saved)
        trainer.inbox += inbox
        saved = {name: owner.state() for name, owner in trainer.registered.items()}
    trainer.sync = SimpleNamespace(reference_version=0)
    trainer.store_inbox()
    assert trainer.next_batch() and not trainer.inbox
    trainer.log.log_arrivals(trainer.arrived)
    assert trainer.log.means["reward"] == 0


def test_a_buffer_of_another_class_resumes_with_what_was_stored():
    """As with another plug-in at --resume."""

    class Other(tba.ReplayBuffer):
        pass

    buffers = []
    saved = {}
    for kind in (tba.ReplayBuffer, Other, tba.ReplayBuffer):
        task = SimpleNamespace(held_out_prompts=[None], buffer_class=kind)
        folder = SimpleNamespace(step=0, say=print, code="", evaluations=[])
        trainer = tba.Trainer(tba.settings(), task, folder, tba.Ranks(), saved)
        trainer.buffer.add(one_group(len(buffers)))
        saved = {name: owner.state() for name, owner in trainer.registered.items()}
        buffers.append(trainer.buffer)
    assert [len(buffer.trajectories[0]) for buffer in buffers] == [1, 2, 3]


class Count(tba.Stateful):
    """An object of a plug-in."""

    SAVED = ("n",)

    def __init__(self, n):
        self.n = n


def test_what_is_registered_keeps_its_name():
    """Two objects of a class have their own states; a name is given once, and not forgotten."""
    task = SimpleNamespace(held_out_prompts=[None], buffer_class=tba.ReplayBuffer)
    folder = SimpleNamespace(step=0, say=print, code="", evaluations=[])
    make = lambda saved: tba.Trainer(tba.settings(), task, folder, tba.Ranks(), saved)
    trainer = make({})
    trainer.register(Count(3), "three")
    trainer.register(Count(30), "thirty")
    trainer.register(Count(300))
    with pytest.raises(ValueError, match="Count is registered already"):
        trainer.register(Count(3000))
    saved = {name: owner.state() for name, owner in trainer.registered.items()}
    resumed = make(saved)
    found = [resumed.register(Count(0), name).n for name in ("thirty", "three")]
    assert found == [30, 3]
    with pytest.raises(tba.InputError, match="the state of Count, which"):
        tba.require_claimed(resumed)
    resumed.register(Count(0))
    tba.require_claimed(resumed)


def test_a_wait_says_what_the_replay_rule_or_the_start_lacks():
    trainer = trainer_of(num_searchers=1, prompts_per_step=2, searched_per_prompt=4, steps=1)
    trainer.config.initial_trajectories = 8
    trainer.task.train_prompts = [None] * 9
    trainer.LOG_EVERY = 0
    (s,) = trainer.searchers.running

    class Late(tba.ReplayRule):
        """Waits for five groups, and keeps the newest prompt alone."""

        groups = 0

        def on_group(self, group):
            self.groups += 1
            self.buffer.trajectories = {group.prompt_id: self.buffer.trajectories[group.prompt_id]}

        def sample(self, B, K):
            if self.groups < 5:
                return None
            return self.replay(B, K, set())

    trainer.rule = Late(trainer.buffer, trainer.config)
    index = 0

    def next_group():
        nonlocal index
        trainer.searchers.arrivals.put((s.spec.start, one_group(index, prompt_id=index)))
        index += 1

    trainer.sync.poll = next_group  # at each poll
    trained = []
    trainer.train_step = lambda batch: (trained.append(batch), setattr(trainer, "step", 1))
    trainer.run_asynchronous()
    assert [[g[0].prompt_id for g in groups] for groups in trained] == [[4, 4]]
    said = "\n".join(trainer.said)
    assert "4 of --initial_trajectories" in said and "--replay_rule draws no batch" in said


@pytest.mark.parametrize("empties", [dict.clear, lambda stored: stored.update({0: {}})])
def test_a_rule_that_deletes_all_has_the_run_wait(empties):
    """For instance all groups of equal rewards, which is all there are at first."""
    trainer = trainer_of(num_searchers=1, prompts_per_step=1, searched_per_prompt=1, steps=1)
    trainer.config.recent_probability = 0.0
    trainer.config.initial_trajectories = 0
    trainer.LOG_EVERY = 0

    class Deleting(tba.RecentOrReward):
        def on_group(self, group):
            super().on_group(group)
            empties(self.buffer.trajectories)

    trainer.rule = Deleting(trainer.buffer, trainer.config)
    trainer.inbox = [one_group(0)]
    trainer.searchers.record_arrival(0)

    def stop(text):
        trainer.said.append(text)
        trainer.signals[signal.SIGTERM] = 0.0

    trainer.folder.say = stop
    with pytest.raises(KeyboardInterrupt):
        trainer.run_asynchronous()
    assert "--replay_rule draws no batch" in trainer.said[0] and trainer.groups_stored == 1
    with pytest.raises(tba.RunEnded, match="--replay_rule"):  # as in lockstep
        trainer.rule.replay(1, 1, set())


def weight_sync(patch, members, **flags):
    """The Trainer's side of weight syncs, of a policy that is one number, and ready Searchers.

    Nothing is broadcast, and a process group has no members.
    """

    def broadcast(channel, weights, meeting):
        channel.formed = channel.formed or SimpleNamespace(abort=lambda: None)

    patch.setattr(tba.WeightChannel, "broadcast", broadcast)
    score = lambda learner: [np.full(2, learner.weights["w"].item(), np.float32)]
    patch.setattr(tba, "policy_probes", score)
    flags |= {"dtype": "float32", "logprob_tolerance": 1e-3, "num_searchers": members}
    config = tba.settings(**flags)
    learner = SimpleNamespace(
        config=config, weights={"w": torch.zeros(1)}, adapters={}, ranks=tba.Ranks()
    )
    processes = searcher_processes(config)
    processes.channel = tba.WeightChannel("127.0.0.1", 0, False, tba.timedelta(seconds=30))
    processes.manager.Barrier = Meeting
    processes.running = [searcher_in("ready", i) for i in range(members)]
    task = SimpleNamespace(held_out_prompts=[None] * 7)
    evaluations = tba.Evaluations(config, task, SimpleNamespace(step=0, evaluations=[]))
    return tba.WeightSync(learner, processes, evaluations)


class Meeting:
    """Where the members of a transfer meet: nobody comes, and nobody waits."""

    aborted = False

    def __init__(self, parties):
        self.parties = parties

    def abort(self):
        self.aborted = True


def searcher_in(state, searcher):
    spec = SimpleNamespace(searcher=searcher, start=searcher + 1, commands=queue.Queue())
    process = SimpleNamespace(alive=True)
    process.is_alive = lambda: process.alive
    process.kill = lambda: setattr(process, "alive", False)
    return tba.RunningSearcher(spec, process, state)


# what becomes of a member of a transfer: it replies, perhaps only after the others had to go on;
# or it dies before it replies, or hangs: its heartbeats end
ENDS = ["loads", "loads late", "misses", "misses late", "dies", "hangs"]
END = st.sampled_from([*ENDS, "loads", "misses"])


@given(
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.tuples(END, END, END, st.booleans(), st.booleans()), max_size=12),
)
def test_all_searchers_get_the_latest_weights_whatever_happens_to_transfers(
    members, lockstep, rounds
):
    """One transfer after the other; each gets the latest reference before it gets a policy.

    Whoever misses three transfers in a row is killed, and nobody else, but for those that hang. A
    lost or silent member gives nobody a strike. A silent one keeps the others for
    --transfer_timeout (in lockstep, until it replies or ends), and is left out until it replies or
    ends. A group in which one failed is not used again, others are. Evaluations are of weights that
    have arrived.
    """
    with pytest.MonkeyPatch.context() as patch:
        play(patch, members, lockstep, rounds)


def play(patch, members, lockstep, rounds):
    """Check a whole sequence of transfers against a model of what should happen."""
    sync = weight_sync(
        patch, members, lockstep=lockstep, reset_reference_every=1, eval_every=3, steps=1000,
        transfer_timeout=30, searcher_timeout=100,
    )  # fmt: skip
    processes, evaluations = sync.searchers, sync.evaluations
    running = processes.running
    loaded = {s: {True: [], False: []} for s in running}  # versions of the policy, the reference
    strikes = dict.fromkeys(running, 0)
    silent = {}  # member without a reply -> how it ends, whether it is a policy, version, round
    timeouts = {}  # member without a reply -> when --searcher_timeout began
    failed = set()  # names of groups in which one failed
    latest = None  # name and members of the latest group
    now, step, rank_0_fails = 1e6, 0, False
    broadcast = tba.WeightChannel.broadcast

    def broadcast_or_fail(channel, *args):
        broadcast(channel, *args)
        if rank_0_fails:
            raise RuntimeError("rank 0 failed")

    patch.setattr(tba.WeightChannel, "broadcast", broadcast_or_fail)
    patch.setattr(tba.time, "monotonic", lambda: now)

    def reply(s, loads, policy, version):
        silent.pop(s, None)
        timeouts.pop(s, None)
        if loads:
            sync.on_loaded(s, [np.full(1, version, np.float32)] * 2)  # of the snapshot's step
            loaded[s][policy].append(version)
            strikes[s] = 0
        else:
            failed.add(s.transfer.channel.name)
            sync.on_missed(s, "a failure")

    def reap():
        """Find those that have ended, and kill those that are to be killed, as the Trainer does."""
        processes.polled = 0.0
        for s in running:
            if s not in silent or silent[s][0] != "hangs":
                s.seen = now
        dead = {s for s in running if not s.process.alive}
        assert set(processes.reap()) == dead
        killed = {s for s in running if not s.process.alive} - dead
        assert killed == {s for s, since in timeouts.items() if now > since + 100} - dead
        for s in dead:
            evaluations.drop(s)
            s.state = "ended"
            silent.pop(s, None)
            timeouts.pop(s, None)
            new = running[s.spec.searcher] = searcher_in("ready", s.spec.searcher)
            new.seen = now
            loaded[new], strikes[new] = {True: [], False: []}, 0

    def wait(seconds):
        nonlocal now
        now += seconds
        reap()
        reap()  # finds those that the first one killed

    healthy = ("loads", "loads", "loads", False, None)
    for number, (*ends, error, resets) in enumerate([*rounds, *[healthy] * (2 * members + 8)]):
        wait(40)
        for s, (end, *weights, since) in list(silent.items()):
            if end.endswith("late") and number > since + 1:
                reply(s, end == "loads late", *weights)
        if resets is not None:
            step += 1
            sync.learner.weights["w"].fill_(step)
            sync.due = True
            evaluations.due |= evaluations.last_due(step) == step
            if resets:
                sync.reset_reference(step)

        free = [s for s in running if s not in silent]
        end_of = {s: ends[s.spec.searcher] for s in free}
        rank_0_fails = error
        sync.begin_if_due(step)
        transfer = sync.transfer
        if transfer.sending is None:
            assert not (sync.due and free)
            continue
        transfer.sending.exception()  # waits for it
        assert transfer.members == free
        policy = not transfer.reference
        references = [max(loaded[s][False], default=0) for s in free]
        assert policy == all(version == sync.reference_version for version in references)
        version = sync.learner.snapshot.flat.item()
        assert version == (step if policy else sync.reference_version)
        messages = [s.spec.commands.get_nowait() for s in free]
        assert {(m.version, m.reference) for m in messages} == {(version, not policy)}
        assert {m.meeting for m in messages} == {transfer.meeting}
        assert [m.channel.rank for m in messages] == list(range(1, len(free) + 1))
        assert {m.channel.size for m in messages} == {len(free) + 1}
        rows = sorted(row for m in messages for row in m.held_out)
        assert rows == list(range(7)) * (policy and bool(rows))
        (name,) = {m.channel.name for m in messages}
        reusable = latest is not None and latest[0] not in failed and latest[1] == free
        assert (latest == (name, free)) == reusable and name not in failed
        latest = name, free

        for s, end in end_of.items():
            if end == "dies":
                s.process.alive = False
            elif end in ("loads", "misses"):
                reply(s, end == "loads", policy, version)
            else:
                silent[s] = (end, policy, version, number)
                if end == "hangs":
                    timeouts[s] = now
        lost = [s for s in free if end_of[s] == "dies"]
        reap()
        sync.poll()
        assert transfer.meeting.parties == len(free) + 1
        assert transfer.meeting.aborted == bool(lost)  # the others stop waiting for it
        assert sync.in_progress == any(s in silent for s in free)
        if sync.in_progress:
            sync.begin_if_due(step)
            assert sync.transfer is transfer
            wait(31)
            sync.poll()
            assert sync.in_progress
            wait(3)  # --transfer_timeout, and a little
            sync.poll()
            assert sync.in_progress == lockstep
        if sync.in_progress:  # lockstep waits for what becomes of them
            hanging = [s for s in free if s in silent and end_of[s] == "hangs"]
            if hanging:
                wait(70)
                lost += hanging
            for s in free:
                if s in silent:
                    end, *weights, _ = silent[s]
                    reply(s, end == "loads late", *weights)
                    end_of[s] = end.removesuffix(" late")
            sync.poll()
            assert not sync.in_progress
        quiet = [s for s in free if s in silent]
        if rank_0_fails or lost or "misses" in end_of.values():
            failed.add(name)
        for s in free:
            strikes[s] += end_of[s] == "misses" and not (lost or (rank_0_fails and quiet))
            assert s in lost or s.process.alive == (strikes[s] < 3)
        reap()

    assert not (silent or sync.due or sync.in_progress or evaluations.due)
    for s in running:
        assert s.version == loaded[s][True][-1] == sync.version == step
    for version, (evaluating, _) in evaluations.pending.items():
        assert all(version in loaded[s][True] for s in evaluating)


def begins(sync, step):
    """Whether a transfer begins if one is due."""
    sync.begin_if_due(step)
    return sync.in_progress


@pytest.mark.parametrize("lockstep", [False, True])
def test_only_lockstep_and_the_first_weights_wait_for_searchers_that_load_their_models(lockstep):
    with pytest.MonkeyPatch.context() as patch:
        sync = weight_sync(patch, 2, lockstep=lockstep)
        first, second = sync.searchers.running
        second.state = "loading"
        assert not begins(sync, 0)
        second.state = "ready"
        assert begins(sync, 0)
        sync.transfer.sending.result()
        for s in (first, second):
            sync.on_loaded(s, [np.zeros(2)])
        sync.poll()
        assert not begins(sync, 1)  # nothing is due
        sync.searchers.running[1] = restarted = searcher_in("loading", 1)
        sync.due = True
        assert begins(sync, 1) == (not lockstep)
        if not lockstep:
            sync.transfer.sending.result()
            sync.on_loaded(first, [np.zeros(2)])
            sync.poll()
        sync.due = lockstep
        restarted.state = "ready"
        assert begins(sync, 2)  # though nothing else is due, it has no weights


@pytest.fixture
def group_of():
    """Function: channels of a group's members, which are threads here, and their next meetings."""
    made = []
    stores = []  # which have to live as long

    def make(size, seconds):
        store = tba.dist.TCPStore("127.0.0.1", 0, is_master=True)
        stores.append(store)
        timeout = tba.timedelta(seconds=seconds)
        channels = [
            tba.WeightChannel("127.0.0.1", store.port, False, timeout, "a group", rank, size)
            for rank in range(size)
        ]
        made.extend(channels)
        return channels, lambda: manager.Barrier(size)

    with tba.SyncManager(ctx=tba.mp.get_context("fork")) as manager:
        yield make
        for channel in made:
            channel.abandon()


def broadcast_in_threads(channels, meeting, delays=None):
    """Broadcast in each channel: the numbers that it has then, the exception, when it ended.

    Before that, rank r has the numbers r; `delays` are the seconds that the channels wait first.
    """
    start = time.monotonic()

    def come(channel, delay):
        time.sleep(delay)
        weights = tba.FlatWeights({"w": torch.zeros(1000)}, torch.float32, nccl=False)
        weights.flat.fill_(channel.rank)
        error = None
        try:
            channel.broadcast(weights, meeting)
        except (RuntimeError, TimeoutError) as raised:
            error = raised
        return set(weights.flat.tolist()), error, time.monotonic() - start

    with ThreadPoolExecutor(len(channels)) as pool:
        results = pool.map(come, channels, delays or [0] * len(channels))
        return [*zip(*results, strict=True)]


def test_all_members_that_meet_get_the_weights_and_keep_their_group(group_of):
    channels, meeting = group_of(4, seconds=PATIENCE)
    groups = []
    for _ in range(2):
        numbers, errors, _ = broadcast_in_threads(channels, meeting())
        assert errors == (None,) * 4 and numbers == ({0},) * 4
        groups.append([channel.formed for channel in channels])
    assert all(first is second is not None for first, second in zip(*groups, strict=True))


def test_members_that_wait_in_vain_for_one_give_up_together(group_of):
    """When the first one's timeout ends; one that comes later waits for nobody."""
    channels, meeting = group_of(4, seconds=6)
    vain = meeting()
    _, errors, ended = broadcast_in_threads(channels[:3], vain, delays=[0, 0, 4])
    assert all(errors)
    assert min(ended) > 5 and max(ended) < 9.5  # the third one's own timeout ends after 10 s
    channels[3].timeout = tba.timedelta(seconds=PATIENCE)
    _, (error,), (ended,) = broadcast_in_threads(channels[3:], vain)
    assert error and ended < PATIENCE / 10
    assert not any(channel.formed for channel in channels)


def test_nobody_waits_for_a_member_that_is_known_to_have_ended(group_of):
    channels, meeting = group_of(4, seconds=PATIENCE)
    for seconds in (0, 2):  # before they come, and while they wait
        vain = meeting()
        known = threading.Timer(seconds, vain.abort)
        known.start()
        _, errors, ended = broadcast_in_threads(channels[:3], vain)
        assert all(errors) and max(ended) < PATIENCE / 10
        known.join()


def test_members_whose_group_does_not_form_give_up(group_of, monkeypatch):
    """One comes to the meeting, and then neither connects nor ends."""
    channels, meeting = group_of(3, seconds=5)
    form = tba.WeightChannel.form
    done = threading.Semaphore(0)

    def form_or_hang(channel):
        try:
            if channel.rank == 2:
                raise RuntimeError("as if it hung")
            return form(channel)
        finally:
            done.release()

    monkeypatch.setattr(tba.WeightChannel, "form", form_or_hang)
    numbers, errors, ended = broadcast_in_threads(channels, meeting())
    assert all(errors) and max(ended) < 4 * 5
    assert numbers == ({0}, {1}, {2}) and not any(channel.formed for channel in channels)
    assert all(done.acquire(timeout=PATIENCE) for _ in channels)  # their threads end later


def searcher_processes(config):
    """SearcherProcesses without a Manager."""
    folder = SimpleNamespace(say=lambda text: None, code="")
    processes = tba.SearcherProcesses(config, None, folder)
    processes.manager = SimpleNamespace(Queue=queue.Queue)
    processes.messages = processes.channel = processes.shared = None
    processes.receiving = Future()
    return processes


GAPS = st.lists(st.sampled_from([1, 20, 50, 70, 24 * 60]), max_size=40)  # minutes


@given(GAPS)
def test_failures_count_until_a_searcher_has_run_for_an_hour(gaps):
    """One failure a day never ends a run; repeated ones do, even if groups arrive in between."""
    config = tba.settings(num_searchers=1, max_restarts=3, searcher_timeout=60)
    processes = searcher_processes(config)
    failures = 0
    now = 1e6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tba.time, "monotonic", lambda: now)
        patch.setattr(tba, "LocalProcess", lambda spec, code: SimpleNamespace(exitcode=1))
        processes.running = [processes.start_searcher(0)]
        for index, gap in enumerate(gaps):
            processes.record_arrival(index)
            now += 60 * gap
            failures = 1 if gap > 60 else failures + 1
            (failed,) = processes.running
            failed.started = now - 60 * gap
            if failures > 3:
                with pytest.raises(tba.RunEnded):
                    processes.restart(failed)
                return
            processes.restart(failed)


def test_a_searcher_that_was_killed_and_remains_ends_the_run():
    """Its fork server may hang, which alone can tell that it has ended."""
    processes = searcher_processes(tba.settings(num_searchers=1, searcher_timeout=60))
    s = searcher_in("ready", 0)
    s.process.is_alive = lambda: True
    processes.running = [s]
    now = 1e6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tba.time, "monotonic", lambda: now)
        s.seen = now
        now += 61
        assert processes.reap() == [] and s.state == "ended"
        now += 59
        assert processes.reap() == []
        now += 2
        with pytest.raises(tba.RunEnded, match="Searcher 0 was killed"):
            processes.reap()


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
@pytest.mark.devices(3)
def test_every_port_of_a_run_listens_on_loopback(gsm8k, tmp_path, engine):
    out = tmp_path / "run"
    run = Run(out, endless(gsm8k, out, num_searchers=2, engine=engine))
    run.reaches(3)
    connections = []
    for pid in processes_of(run.process.pid):
        connections += psutil.Process(pid).net_connections("inet")
    listening = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
    assert listening and set(listening) <= {"127.0.0.1", "::1"}


def test_a_reward_may_use_a_pool_of_processes(gsm8k, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        '''"""A task whose rewards are computed by other processes."""
import multiprocessing
import numpy as np
import tba

def right(pair):
    example, response = pair
    return tba.extract_number(example["answer"]) == tba.extract_number(response)

class Pooled(tba.GSM8K):
    """GSM8K, judged by a pool."""

    def rewards(self, examples, responses, ended):
        for _ in range(4):  # the end of a pool is the difficult part
            with multiprocessing.Pool(2) as pool:
                verdicts = pool.map(right, list(zip(examples, responses)))
        return np.array(verdicts)

tba.TASKS["pooled"] = Pooled
'''
    )
    out = tmp_path / "run"
    flags = {"task": "pooled", "plugin": plugin, "steps": 3, "eval_every": 0, "eval_samples": 8}
    run_tba(arguments(gsm8k, out, **flags))
    rewards = [m["reward"] for m in read_lines(out / "metrics.jsonl")]
    assert len(rewards) == 3 and 0 < max(rewards) <= 1


@pytest.mark.nightly
def test_a_soak_of_random_faults_loses_nothing(gsm8k, tmp_path):
    command = [sys.executable, str(ROOT / "bench" / "soak.py"), "--minutes", "2", "--faults", "10"]
    done = subprocess.run(
        [*command, "--files", str(gsm8k)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
