"""Searchers that die, hang or raise, wrong weights, signals: what promises 2 to 5 say."""

import contextlib
import io
import itertools
import math
import os
import pickle
import queue
import shutil
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
    check_positions,
    config_and_task,
    endless,
    helpers_of,
    processes_of,
    steps_of,
    trajectory,
)
from hypothesis import given
from hypothesis import strategies as st

import tba
from tba import read_lines


@pytest.mark.slow
@pytest.mark.devices(4)
def test_one_run_suffers_all_faults_and_loses_nothing(gsm8k, tmp_path):
    """Killed, hanging and raising Searchers, in each phase of a weight transfer too.

    One that hangs costs the others --transfer_timeout; it is killed only after that.
    """
    out = tmp_path / "run"
    run = Run(out, endless(gsm8k, out, num_searchers=3, searcher_timeout=600))
    run.want("slow-trainer", "0.05")
    # each Searcher has sent a group, without which a failure ends the run
    run.until(lambda: len({index % 3 for index, *_ in run.noted("stored")}) == 3, "groups of all")
    run.reaches(1)

    def goes_on(what):
        group, version = run.noted("stored")[-1], run.latest()["version"]
        run.until(lambda: run.noted("stored")[-1] != group, f"data {what}")
        run.until(lambda: run.latest()["version"] > version, f"new weights {what}")

    faults = ["die-generating", "hang-receiving", "raise", "die-loading", "hang-generating"]
    faults += ["die-received", "hang-loading", "die-receiving", "die-joining", "hang-joining"]
    number = 0
    for fault in faults:
        run.want(fault)
        if "joining" in fault:  # a group is formed when its members change
            run.want("die-generating")
            number += 1
        run.suffered(fault)
        if fault.startswith("hang"):
            goes_on(f"beside {fault}")
            for pid in processes_of(run.process.pid):
                if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                    os.kill(pid, signal.SIGKILL)
        number += 1
        run.until(lambda n=number: len(run.failed()) >= n, f"{fault} noticed")
        assert len(run.failed()) == number  # no healthy Searcher is restarted with it
        goes_on(f"after {fault}")
    run.until(lambda: run.latest()["searchers_alive"] == 3, "all back")
    assert "ArithmeticError: a fault on demand" in run.text()
    os.kill(run.process.pid, signal.SIGINT)
    run.ends(128 + signal.SIGINT)
    check_positions([index for index, *_ in run.noted("stored")], 3)
    assert max(m["logprob_gap"] for m in read_lines(out / "metrics.jsonl")) < 1e-3


@pytest.mark.slow
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
    run = Run(out, endless(gsm8k, out, num_searchers=3, lockstep=True, max_restarts=0))
    run.want("slow-trainer", "1000")
    run.until(lambda: run.noted("trained"), "a step, which lasts")
    os.kill(run.process.pid, signal.SIGINT)
    run.says("SIGINT")
    time.sleep(1.1)  # before that, it would count as the same signal
    os.kill(run.process.pid, signal.SIGINT)
    run.ends(-signal.SIGINT)  # a shell's $? is 128 + signal


def test_a_run_outlives_its_folders_but_not_its_manager(gsm8k, tmp_path, monkeypatch):
    """A Searcher is restarted without the working directory and, in /tmp, the fork server's socket.

    Without the Manager, one line says what has ended, after a checkpoint.
    """
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    out = tmp_path / "run"
    run = Run(out, endless(gsm8k, out))
    run.reaches(1)
    (tmp_path / "here").rmdir()
    server, manager = helpers_of(psutil.Process(run.process.pid))
    (socket,) = {c.laddr for c in server.net_connections("unix") if c.laddr.startswith("/")}
    shutil.rmtree(os.path.dirname(socket))  # as a cleaner does, after ten days
    run.want("die-generating")
    run.until(run.failed, "a failed Searcher")
    version = run.latest()["version"]
    newer = lambda: run.latest()["version"] > version + 1
    run.until(newer, "new weights of the one that replaces it")
    manager.kill()
    said = run.ends(1)
    assert "tba.py: error: the Manager" in said and "Traceback" not in said
    assert [path.name for path in out.glob("checkpoint-*")] == [f"checkpoint-{steps_of(out)}"]


def trainer_of(checkpoint=(), **flags):
    """A Trainer without processes and a policy; its Searchers are ready.

    Its Manager's queues are of this process. It has files if `flags` has an --output_dir, or else a
    list `said` of what goes to the terminal.
    """
    config = tba.settings(**flags)
    task = SimpleNamespace(
        held_out_prompts=[None] * 7, train_prompts=[[p] for p in range(9)],
        buffer_class=tba.ReplayBuffer, tokenizer=SimpleNamespace(decode=str),
        response_texts=lambda rows: [str(rows)],
    )  # fmt: skip
    said = []
    folder = SimpleNamespace(
        step=0, say=said.append, evaluations=[], append=lambda *_: None, config=config
    )
    if config.output_dir:
        with contextlib.redirect_stderr(io.StringIO()):  # or its bar appears when the tests end
            folder = tba.RunFolder(config)
    trainer = tba.Trainer(config, task, folder, tba.Ranks(), dict(checkpoint))
    trainer.said, trainer.LOG_EVERY = said, 0
    trainer.learner = SimpleNamespace(ranks=trainer.ranks, skipped=0)
    trainer.log.write = lambda *_: None
    trainer.sync = SimpleNamespace(due=False, version=0, reference_version=0, seconds=0.0)
    trainer.sync.poll = trainer.sync.begin_if_due = lambda *_: None
    processes = trainer.searchers
    processes.manager = SimpleNamespace(Queue=queue.Queue, Barrier=threading.Barrier)
    processes.messages = processes.shared = None
    processes.channel = tba.WeightChannel("127.0.0.1", 0, False, tba.timedelta(seconds=30))
    processes.receiving = Future()
    processes.running = [searcher_in("ready", i) for i in range(config.num_searchers)]
    return trainer


def searcher_in(state, searcher):
    """A Searcher, as the Trainer sees it."""
    spec = SimpleNamespace(searcher=searcher, start=searcher + 1, commands=queue.Queue())
    now = tba.time.monotonic()
    return tba.RunningSearcher(spec, process_of(), state, started=now, seen=now)


def process_of(*_):
    """A process that lives until it is killed."""
    process = SimpleNamespace(alive=True, exitcode=1)
    process.is_alive = lambda: process.alive
    process.kill = lambda: setattr(process, "alive", False)
    return process


@pytest.fixture
def clock(clock, monkeypatch):
    """A clock that the test moves; processes that are started meanwhile do nothing."""
    for name in ("LocalProcess", "ClusterProcess"):
        monkeypatch.setattr(tba, name, process_of)
    return clock


@given(
    st.booleans(), st.lists(st.sampled_from(["started", "heartbeat", "failed", "dies", "silence"]))
)
def test_no_state_of_a_searcher_is_without_an_exit(clock, on_a_cluster, events):
    """Whatever happens, the table in RunningSearcher's docstring says what comes next."""
    flags = {"cluster": "auto" if on_a_cluster else "", "searcher_timeout": 60}
    processes = trainer_of(num_searchers=1, max_restarts=1000, **flags).searchers
    processes.record_arrival(0)
    first = "pending" if on_a_cluster else "loading"
    processes.running = [processes.start_searcher(0)]
    assert processes.running[0].state == first
    processes.running[0].seen = clock.now
    for event in events:
        (s,) = processes.running
        message = {
            "started": tba.Started(),
            "heartbeat": tba.Heartbeat(clock.now, 0.0, 0),
            "failed": tba.Failed("a traceback", final=False),
        }.get(event)
        if message is not None:
            processes.arrivals.put((s.spec.start, message))
        if event == "dies":
            s.process.alive = False
        expected = {"started": "loading", "heartbeat": "ready"}.get(event, first)
        for seconds in (0, 2000 if event == "silence" else 1, 1):
            clock.now += seconds
            assert list(processes.take()) == []
            for ended in processes.reap():
                processes.restart(ended)
                processes.running[0].seen = clock.now
        (after,) = processes.running
        assert after.state == expected
        waits = event == "silence" and s.state == "pending"  # for free resources
        assert (after is s) == (event in ("started", "heartbeat") or waits)


GAPS = st.lists(st.sampled_from([1, 20, 50, 70, 24 * 60]), max_size=40)  # minutes


@given(GAPS)
def test_failures_count_until_a_searcher_has_run_for_an_hour(clock, gaps):
    """One failure a day never ends a run; repeated ones do, even if groups arrive in between."""
    processes = trainer_of(num_searchers=1, max_restarts=3, searcher_timeout=60).searchers
    failures = 0
    for index, gap in enumerate(gaps):
        processes.record_arrival(index)
        clock.now += 60 * gap
        failures = 1 if gap > 60 else failures + 1
        (failed,) = processes.running
        failed.started = clock.now - 60 * gap
        if failures > 3:
            with pytest.raises(tba.RunEnded):
                processes.restart(failed)
            return
        processes.restart(failed)


@pytest.mark.parametrize("state", ["ready", "pending"])
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("lockstep", [False, True])
def test_a_run_stops_once_it_can_be_resumed_exactly(lockstep, lag, state):
    """Lockstep waits for groups in flight, but at lag 0 not for those of a machine that is lost."""
    trainer = trainer_of(lockstep=lockstep, lag=lag, num_searchers=2)
    searchers = trainer.searchers
    searchers.running[1].state = state
    searchers.search_up_to(2)
    searchers.record_arrival(0)
    assert trainer.can_stop() == (not lockstep or (lag == 0 and state == "pending"))
    searchers.record_arrival(1)
    assert trainer.can_stop()


@pytest.mark.parametrize(("gpus", "nccl"), [(False, False), (True, False), (True, True)])
def test_searchers_that_share_gpus_start_one_after_another(gpus, nccl, clock, monkeypatch):
    processes = trainer_of(num_searchers=3).searchers
    processes.running.clear()
    processes.channel.nccl = nccl
    monkeypatch.setattr(tba.torch.cuda, "is_available", lambda: gpus)
    started = []
    for _ in range(4):
        processes.start_missing()
        processes.start_missing()
        started.append([s.spec.searcher for s in processes.running])
        processes.running[-1].state = "ready"
    all_at_once = [[0, 1, 2]] * 4
    assert started == ([[0], [0, 1], [0, 1, 2], [0, 1, 2]] if gpus and not nccl else all_at_once)


@pytest.mark.parametrize(("state", "limit"), [("loading", 900), ("ready", 60)])
def test_a_searcher_that_was_killed_and_remains_ends_the_run(clock, state, limit):
    """Its fork server may hang, which alone can tell that it has ended."""
    processes = trainer_of(num_searchers=1, searcher_timeout=60).searchers
    (s,) = processes.running
    s.state, s.process.kill = state, lambda: None
    for seconds, expected in ((limit - 1, state), (2, "ended"), (59, "ended")):
        clock.now += seconds
        assert processes.reap() == [] and s.state == expected
    clock.now += 2
    with pytest.raises(tba.RunEnded, match="killed Searcher 0 remains"):
        processes.reap()


def test_rewards_that_take_too_long_are_an_error_but_not_a_wait_for_a_thread(clock):
    started, done = threading.Semaphore(0), threading.Semaphore(0)

    def rewards(examples, texts, ended):
        started.release()
        assert done.acquire(timeout=PATIENCE)
        return [1.0] * len(texts)

    task = SimpleNamespace(
        reward_threads=1, train=[{}], held_out=[{}], checked_rewards=rewards, evaluate=rewards,
        response_texts=lambda rows: [*rows],
    )  # fmt: skip
    config = tba.settings(searcher_timeout=10, searched_per_prompt=1, lockstep=True)
    config.sequences_in_flight = 1  # a call takes one group
    scoring = tba.Scoring(config, task, threading.Event())
    scoring.waiting[False] = [one_group(0), one_group(1)]
    assert scoring.advance() == [] and scoring.unscored == len(scoring.calls) == 2
    assert started.acquire(timeout=PATIENCE)
    clock.now += 9
    assert scoring.advance() == []
    done.release()
    assert started.acquire(timeout=PATIENCE)  # the second call, which waited for 9 seconds
    clock.now += 9
    (group,) = scoring.advance()
    assert group.index == 0 and group.trajectories[0].reward == 1 and scoring.unscored == 1
    clock.now += 2
    with pytest.raises(TimeoutError, match="--searcher_timeout"):
        scoring.advance()
    done.release()
    scoring.calls[0].future.result(PATIENCE)  # it, and not the next one, takes the permit
    scoring = tba.Scoring(config, task, threading.Event())
    scoring.waiting[True] = [one_group(0)]
    assert scoring.advance() == [] and len(scoring.calls) == 1
    assert scoring.unscored == 0  # held-out answers do not count
    config.lockstep = False
    scoring.waiting[False] = [one_group(0), one_group(1)]
    assert scoring.advance() == [] and len(scoring.waiting[False]) == 1  # it waits for the thread
    assert scoring.unscored == 2
    done.release(2)


def test_probes_are_as_long_as_the_longest_sequence(gsm8k, tmp_path):
    """With the prompt that follows it, one of them has all positions that a run has."""
    _, task = config_and_task(gsm8k, tmp_path, max_response_tokens=20)
    lengths = [2 * len(x) + len(y) for x, responses in tba.probes(task) for y in responses]
    assert max(lengths) == task.longest and len(lengths) == 7


def test_searchers_do_not_wait_for_a_long_training_step():
    """However many messages come before the Trainer handles them."""
    config = tba.settings(num_searchers=0)
    folder = SimpleNamespace(say=print, step=0)
    processes = tba.SearcherProcesses(config, SimpleNamespace(), folder)
    processes.start()
    try:
        for _ in range(9000):
            processes.messages.put((1, pickle.dumps(tba.Started())), timeout=PATIENCE)
    finally:
        processes.stop()


@pytest.mark.parametrize("wrong", [0, 4, 9])
@pytest.mark.parametrize("value", [0.0, 0.01, -0.01, math.nan])
def test_every_token_of_every_probe_counts(wrong, value):
    """The first, one in the middle, the last."""
    s = tba.RunningSearcher(None, None, "ready")
    s.transfer = tba.Transfer(None, [s], scores=np.zeros(10, np.float32))
    sync = SimpleNamespace(config=SimpleNamespace(logprob_tolerance=1e-3))
    scores = np.zeros(10, np.float32)
    scores[wrong] = value
    with pytest.raises(tba.RunEnded) if value else contextlib.nullcontext():
        tba.WeightSync.on_loaded(sync, s, np.split(scores, [4, 5]))


def test_what_is_due_after_a_step(monkeypatch):
    """A sync every 3 steps, an evaluation every 4 and at the end."""
    monkeypatch.setattr(tba.Learner, "step", lambda *_: {})
    trainer = trainer_of(steps=9, sync_every=3, eval_every=4)
    syncs, evaluations = [], []
    for _ in range(9):
        trainer.evaluations.due = trainer.sync.due = False
        trainer.train_step([])
        syncs += [trainer.step] * trainer.sync.due
        evaluations += [trainer.step] * trainer.evaluations.due
    assert (syncs, evaluations) == ([3, 6, 9], [4, 8, 9])


def test_ten_skipped_steps_in_a_row_end_a_run(monkeypatch):
    monkeypatch.setattr(tba.Learner, "step", lambda *_: {})
    trainer = trainer_of()
    for trainer.learner.skipped in range(10):
        trainer.train_step([])
    assert len(trainer.said) == 9  # all but the first have been skipped
    trainer.learner.skipped = 10
    with pytest.raises(tba.RunEnded):
        trainer.train_step([])


def test_what_is_logged_as_waiting_is_waiting(clock):
    """Not the work of the condition that is waited for, such as storing groups."""
    trainer = trainer_of()
    answers = iter([False, False, True])

    def passes(seconds):
        clock.now += seconds

    def condition():
        passes(3)
        return next(answers)

    nothing = lambda: None
    trainer.searchers.wake_up = SimpleNamespace(wait=passes, set=nothing, clear=nothing)
    assert trainer.wait_for("generation", condition)
    assert trainer.log.waited["generation"] == pytest.approx(2 * tba.POLL_SECONDS)


def test_rates_of_a_searcher_that_is_not_heard_of_fall(clock):
    s = searcher_in("ready", 0)
    for seconds in range(10):
        s.heartbeats.append(tba.Heartbeat(100.0 + seconds, 0.1 * seconds, 50 * seconds))
    assert s.recent_rates() == pytest.approx((0.9, 50))
    clock.now += 10  # a second of which is usual
    assert s.recent_rates() == pytest.approx((0.45, 25))


def one_group(index, prompt_id=0, version=0):
    """A group of one response."""
    return tba.Group(index, [trajectory([index], prompt_id=prompt_id, version=version)])


def test_a_group_counts_as_of_its_arrival_however_late_it_is_stored():
    """Groups that came before a sync are not drawn as if they had come after it."""
    trainer = trainer_of(num_searchers=1, recent_probability=1.0)
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
    flags = dict.fromkeys(("prompts_per_step", "searched_per_prompt", "trained_per_prompt"), 1)
    flags |= {"initial_trajectories": 0, "recent_probability": 1.0}
    trainer = trainer_of(**flags)
    trainer.inbox = [one_group(0), one_group(1)]
    trainer = trainer_of(states_of(trainer), **flags)
    trainer.store_inbox()
    assert trainer.next_batch() and not trainer.inbox
    trainer.log.log_arrivals(trainer.arrived)
    assert trainer.log.means["reward"] == 0


def states_of(trainer):
    """What a checkpoint saves of a Trainer without a policy."""
    return {name: owner.state() for name, owner in trainer.registered.items()}


def test_a_buffer_of_another_class_resumes_with_what_was_stored(monkeypatch):
    """As with another plug-in at --resume."""
    trainer = trainer_of()
    for index in range(3):
        trainer.buffer.add(one_group(index))
        assert len(trainer.buffer.trajectories[0]) == index + 1
        monkeypatch.setattr(tba, "ReplayBuffer", type("Other", (tba.ReplayBuffer,), {}))
        trainer = trainer_of(states_of(trainer))


@pytest.mark.parametrize("empties", [dict.clear, lambda stored: stored.update({0: {}})])
def test_a_rule_that_deletes_all_has_the_run_wait(empties):
    """For instance groups of equal rewards, which is all there are at first. The log says why."""
    flags = {"initial_trajectories": 8, "recent_probability": 0.0, "steps": 1}
    trainer = trainer_of(num_searchers=1, prompts_per_step=2, searched_per_prompt=4, **flags)
    (s,) = trainer.searchers.running
    indices = itertools.count()

    class Deleting(tba.RecentOrReward):
        def on_group(self, group):
            super().on_group(group)
            if group.index < 4:
                empties(self.buffer.trajectories)

    trainer.rule = Deleting(trainer.buffer, trainer.config)

    def poll():
        index = next(indices)
        group = one_group(index, prompt_id=index // 4)
        trainer.searchers.arrivals.put((s.spec.start, group))

    trainer.sync.poll = poll
    trained = []
    trainer.train_step = lambda batch: (trained.append(batch), setattr(trainer, "step", 1))
    trainer.run_asynchronous()
    assert [[group[0].prompt_id for group in batch] for batch in trained] == [[1, 1]]
    said = "\n".join(trainer.said)
    assert "4 of --initial_trajectories" in said and "--replay_rule draws no batch" in said
    trainer.buffer.trajectories = {}
    with pytest.raises(tba.RunEnded, match="--replay_rule"):  # in lockstep
        trainer.rule.replay(1, 1, set())


@pytest.fixture
def weight_sync(monkeypatch):
    """Function: the Trainer's side of weight syncs, of a policy that is one number.

    Nothing is broadcast, and a process group has no members.
    """

    def broadcast(channel, weights, meeting):
        channel.formed = channel.formed or SimpleNamespace(abort=lambda: None)

    def make(members, **flags):
        monkeypatch.setattr(tba.WeightChannel, "broadcast", broadcast)
        score = lambda learner: [np.full(2, learner.weights["w"].item(), np.float32)]
        monkeypatch.setattr(tba, "policy_probes", score)
        flags |= {"dtype": "float32", "logprob_tolerance": 1e-3, "num_searchers": members}
        trainer = trainer_of(**flags)
        vars(trainer.learner).update(
            config=trainer.config, weights={"w": torch.zeros(1)}, adapters={}
        )
        trainer.searchers.sending = SimpleNamespace(submit=lambda put, *args: put(*args))  # at once
        return tba.WeightSync(trainer.learner, trainer.searchers, trainer.evaluations)

    return make


# what becomes of a member of a transfer, perhaps only after the others had to go on without it
ENDS = ["loads", "loads late", "misses", "misses late", "dies", "dies late"]
END = st.sampled_from([*ENDS, "loads", "misses"])


@given(
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.tuples(END, END, END, st.booleans(), st.booleans()), max_size=12),
)
def test_all_searchers_get_the_latest_weights_whatever_happens_to_transfers(
    clock, weight_sync, monkeypatch, members, lockstep, rounds
):
    """One transfer after the other; each gets the latest reference before it gets a policy.

    Whoever misses three transfers in a row is killed, and nobody else. A lost or silent member
    gives nobody a strike. A silent one keeps the others for --transfer_timeout (in lockstep, until
    it replies or ends), and is left out until it replies or ends. A group in which one failed is
    not used again, others are. Evaluations are of weights that have arrived.
    """
    flags = {"reset_reference_every": 1, "eval_every": 3, "steps": 1000, "transfer_timeout": 30}
    sync = weight_sync(members, lockstep=lockstep, **flags)
    running, evaluations = sync.searchers.running, sync.evaluations
    loaded = {s: {True: [], False: []} for s in running}  # versions of the policy, the reference
    strikes = dict.fromkeys(running, 0)
    silent = {}  # member without a reply -> how it ends, whether it is a policy, version, round
    failed = set()  # names of groups in which one failed
    latest = None  # name and members of the latest group
    step, rank_0_fails = 0, False
    broadcast = tba.WeightChannel.broadcast

    def broadcast_or_fail(channel, *args):
        broadcast(channel, *args)
        if rank_0_fails:
            raise RuntimeError("rank 0 failed")

    monkeypatch.setattr(tba.WeightChannel, "broadcast", broadcast_or_fail)

    def comes(s, end, policy, version):
        silent.pop(s, None)
        if end == "dies":
            s.process.alive = False
        elif end == "loads":
            sync.on_loaded(s, [np.full(1, version, np.float32)] * 2)  # of the snapshot's step
            loaded[s][policy].append(version)
            strikes[s] = 0
        else:
            failed.add(s.transfer.channel.name)
            sync.on_missed(s, "a failure")

    def reap():
        """Replace those that have ended or were killed, as the Trainer does."""
        for s in [s for s in running if not s.process.alive]:
            evaluations.drop(s)
            s.state = "ended"
            new = running[s.spec.searcher] = searcher_in("ready", s.spec.searcher)
            loaded[new], strikes[new] = {True: [], False: []}, 0

    healthy = ("loads", "loads", "loads", False, None)
    for number, (*ends, error, resets) in enumerate([*rounds, *[healthy] * (2 * members + 8)]):
        clock.now += 40
        for s, (end, *weights, since) in list(silent.items()):
            if number > since + 1:
                comes(s, end, *weights)
        reap()
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

        for s, words in end_of.items():
            end, *late = words.split()
            if late:
                silent[s] = (end, policy, version, number)
            else:
                comes(s, end, policy, version)
        lost = [s for s in free if end_of[s] == "dies"]
        reap()
        sync.poll()
        assert transfer.meeting.parties == len(free) + 1
        assert transfer.meeting.broken == bool(lost)  # the others stop waiting for it
        assert sync.in_progress == any(s in silent for s in free)
        if sync.in_progress:
            sync.begin_if_due(step)
            assert sync.transfer is transfer
            clock.now += 31
            sync.poll()
            assert sync.in_progress
            clock.now += 3  # --transfer_timeout, and a little
            sync.poll()
            assert sync.in_progress == lockstep
        if sync.in_progress:  # lockstep waits for what becomes of them
            for s in [s for s in free if s in silent]:
                end_of[s], *weights, _ = silent[s]
                comes(s, end_of[s], *weights)
            lost = [s for s in free if end_of[s] == "dies"]
            reap()
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
def test_only_lockstep_and_the_first_weights_wait_for_searchers_that_load_their_models(
    weight_sync, lockstep
):
    sync = weight_sync(2, lockstep=lockstep)
    first, second = sync.searchers.running

    def completes(*members):
        sync.transfer.sending.result()
        for s in members:
            sync.on_loaded(s, [np.zeros(2)])
        sync.poll()

    second.state = "loading"
    assert not begins(sync, 0)
    second.state = "ready"
    assert begins(sync, 0)
    completes(first, second)
    assert not begins(sync, 1)  # nothing is due
    sync.searchers.running[1] = restarted = searcher_in("loading", 1)
    sync.due = True
    assert begins(sync, 1) == (not lockstep)
    if not lockstep:
        completes(first)
    sync.due = lockstep
    restarted.state = "ready"
    assert begins(sync, 2)  # though nothing else is due, it has no weights


@pytest.mark.parametrize("barrier_hangs", [True, False])
def test_the_training_thread_never_waits_for_the_manager(weight_sync, barrier_hangs):
    """It may hang as prompts are requested, as a sync begins or a member ends, or after a sync."""
    answers = threading.Event()
    hangs = barrier_hangs
    hang = lambda *_: hangs and answers.wait(60)

    class Proxy:
        abort = __del__ = hang  # which tells the Manager

    sync = weight_sync(1)
    searchers = sync.searchers
    searchers.sending = ThreadPoolExecutor(1)
    searchers.manager.Barrier = hang if barrier_hangs else lambda members: Proxy()
    searchers.manager.Queue = hang
    searchers.config.searcher_timeout = 0.1
    (s,) = searchers.running
    s.spec.commands.put = hang
    late = threading.Timer(20, answers.set)
    late.start()
    searchers.search_up_to(4)
    assert begins(sync, 0)
    if not barrier_hangs:  # but it does after a whole sync
        sync.transfer.sending.result()
        searchers.sending.submit(print).result()  # all was sent
        hangs = True
        sync.on_missed(s, "it was late")
        sync.poll()
        assert begins(sync, 1)
        sync.transfer.sending.result()
    s.state = "ended"
    sync.poll()
    with pytest.raises(TimeoutError):
        searchers.start_searcher(0)
    assert not answers.is_set()
    answers.set()
    late.cancel()


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_broadcast_that_never_returns_is_left_behind(clock, weight_sync, monkeypatch, lockstep):
    """As in NCCL, which may hang when it gives up: the next transfer has another group."""
    returns, said = threading.Event(), []
    sync = weight_sync(2, lockstep=lockstep, transfer_timeout=30)
    sync.searchers.say = said.append
    monkeypatch.setattr(tba.WeightChannel, "broadcast", lambda *args: returns.wait(30))
    assert begins(sync, 0)
    clock.now += 31.5
    sync.poll()
    assert sync.in_progress  # it may still come
    clock.now += 1
    sync.poll()
    assert not sync.in_progress and "weights of step 0 failed: it " in said[0]
    name = sync.transfer.channel.name
    states = [s.state for s in sync.searchers.running]
    assert states == ["ended" if lockstep else "ready"] * 2  # lockstep needs all of them
    for s in sync.searchers.running:
        sync.on_missed(s, "a timeout")
        s.state = "ready"
    monkeypatch.setattr(tba.WeightChannel, "broadcast", lambda *args: None)
    assert begins(sync, 1) and sync.transfer.channel.name != name
    returns.set()


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


@pytest.mark.nightly
def test_a_soak_of_random_faults_loses_nothing(gsm8k, tmp_path):
    command = [sys.executable, str(ROOT / "bench" / "soak.py"), "--minutes", "2", "--faults", "10"]
    done = subprocess.run(
        [*command, "--files", str(gsm8k)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
