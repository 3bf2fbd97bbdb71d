"""Every plug-in of README.md and docs/hacking.md runs as it stands there."""

import contextlib
import http.server
import json
import re
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch
from harness import ROOT, Run, arguments, config_and_task, run_tba, without_searchers
from test_data import write
from test_replay import arrive, group, rule_of

import tba
from tba import extract_number, read_lines

TEXT = (ROOT / "docs" / "hacking.md").read_text()
BLOCKS = re.findall(r"```python\n# flags: ([^\n]*)\n(.*?)```", TEXT, re.DOTALL)
(OWN_REWARD,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
BLOCKS.append(("--task terse", OWN_REWARD))
FLAGS = {
    "steps": 3, "eval_every": 0, "eval_samples": 8, "recent_probability": None,
    "initial_trajectories": 32, "sync_every": 1,
}  # fmt: skip


class Judge(http.server.BaseHTTPRequestHandler):
    """Scores a response by its length."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["question"]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": len(asked["response"]) / 100}).encode())

    def log_message(self, *args):
        pass


class JudgeServer(http.server.ThreadingHTTPServer):
    request_queue_size = 128


def plugin_of(path, *words):
    """A file with the plug-ins whose flags or text have these words; returns it and the flags."""
    flags = []
    texts = []
    for word in words:
        ((own, text),) = ((f, text) for f, text in BLOCKS if word in f.split() or word in text[:60])
        flags += own.split()
        texts.append(text)
    path.write_text("\n\n".join(texts))
    return path, flags


def test_a_judge_that_is_down_ends_the_run_after_a_checkpoint(gsm8k, tmp_path):
    """The server goes away after some steps: tracebacks are shown, and what was learned is kept."""
    plugin, _ = plugin_of(tmp_path / "mine.py", "judged")
    out = tmp_path / "run"
    flags = {"task": "judged", "plugin": plugin, "judge_tries": 1, "max_restarts": 1}
    flags |= {"steps": 10_000, "eval_every": 0, "eval_samples": 8, "save_every": 0}
    with JudgeServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/score"
        run = Run(out, arguments(gsm8k, out, judge_url=url, **flags), hooks=False)
        run.reaches(3)
        server.shutdown()
    said = run.ends(1)
    assert "URLError" in said and "in rewards" in said
    metrics = read_lines(out / "metrics.jsonl")
    assert all(0 < m["reward"] < 2 for m in metrics)
    assert [path.name for path in out.glob("checkpoint-*")] == [f"checkpoint-{metrics[-1]['step']}"]


def run_plugins(gsm8k, tmp_path, *words, **flags):
    """A run with plug-ins that have these words, together in one file.

    Returns its metrics, its folder and what it said.
    """
    plugin, own = plugin_of(tmp_path / "mine.v2.py", *words)
    out = tmp_path / "run"
    said, _ = run_tba([*arguments(gsm8k, out, plugin=plugin, **FLAGS | flags), *own])
    return read_lines(out / "metrics.jsonl"), out, said


def test_a_task_a_rule_an_engine_and_an_objective_of_the_documentation(gsm8k, tmp_path):
    words = ("terse", "varied", "counted", "tb_topk")
    metrics, out, said = run_plugins(gsm8k, tmp_path, *words)
    assert "generated" in said and len(metrics) == 3
    rows = read_lines(out / "completions.jsonl")
    assert rows and all(round(x["reward"] + 0.01 * len(x["response"]), 3) in (0, 1) for x in rows)


def test_metrics_a_buffer_and_a_moving_reference_of_the_documentation(gsm8k, tmp_path):
    words = ("gsm8k_logged", "tba_prime", "average of the policy", "newer trajectories")
    metrics, out, _ = run_plugins(gsm8k, tmp_path, *words)
    assert len(metrics) == 3 and all(-1 <= m["staleness_residual"] <= 1 for m in metrics)
    for row in metrics + read_lines(out / "eval.jsonl"):
        assert row["calculations"] > 1 >= row.get("reward", 0)


def test_an_order_a_scheduled_objective_and_replay_of_the_documentation(gsm8k, tmp_path):
    """In lockstep, whose batches are of consecutive prompts: two of a batch of four."""
    words = ("gsm8k_short_first", "tb_short", "anchored")
    metrics, out, _ = run_plugins(gsm8k, tmp_path, *words, lockstep=True)
    assert metrics[0]["price"] == 0 < metrics[1]["price"]
    rows = sorted(read_lines(gsm8k / "data" / "train.jsonl"), key=lambda row: len(row["answer"]))
    for i, row in enumerate(read_lines(out / "completions.jsonl")):
        assert any(x["question"] in row["prompt"] for x in rows[2 * i : 2 * i + 2])


@pytest.mark.parametrize("task", ["parity", "gsm8k_various", "gsm8k_chat", "chat", "gsm8k_trl"])
def test_tasks_of_the_documentation(task, load, gsm8k, tmp_path):
    """Right and wrong answers, during training and in an evaluation."""
    load(f'tba.TASKS["{task}"]')
    _, loaded = config_and_task(gsm8k, tmp_path / "run", task=task)
    loaded.setup(None)
    examples = loaded.train[:8]
    numbers = [int(extract_number(example["answer"])) for example in examples]
    right = [str(n) for n in numbers]
    wrong = [str(n + 1) for n in numbers]
    if task == "parity":
        right, wrong = ([("even", "odd")[(n + k) % 2] for n in numbers] for k in (0, 1))
    ended = np.ones(8, dtype=bool)
    expected = np.ones(8)
    if task == "gsm8k_various":  # those of a group that are alike share a reward
        expected /= [right.count(text) for text in right]
    assert np.allclose(loaded.rewards(examples, right, ended), expected)
    assert not np.any(loaded.rewards(examples, wrong, ended))
    records = loaded.evaluate(loaded.held_out[:8], wrong, ended)
    assert len(records) == 8 and loaded.summarize(records)
    assert all(len(prompt) > 3 for prompt in loaded.train_prompts)


@pytest.mark.parametrize(("name", "rank"), [("reinforce_learned", 0), ("reinforce_moving", 2)])
def test_what_is_learned_is_resumed(name, rank, load, gsm8k, tmp_path, monkeypatch):
    """By the policy, or its adapter, and by an objective."""
    without_searchers(monkeypatch)
    load(f"def {name}(")
    flags = {"objective": name, "lora_rank": rank, "save_every": 0}
    flags |= {"eval_every": 0, "eval_samples": 8}
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert tba.main(arguments(gsm8k, whole, steps=4, **flags)) == 0
    assert tba.main(arguments(gsm8k, parted, steps=2, **flags)) == 0
    assert tba.main(["--resume", str(parted), "--steps", "4"]) == 0
    one, other = (read_lines(folder / "metrics.jsonl") for folder in (whole, parted))
    for metric in ("loss", "baseline", "value_error", "grad_norm"):
        values = [m.get(metric) for m in one]
        assert values == [m.get(metric) for m in other] and len(values) == 4, metric
    assert one[0].get("baseline", 1) > 0


@pytest.fixture
def load(monkeypatch):
    """Runs a plug-in of the documentation in this process, and returns what it defines."""

    def run(words: str) -> dict[str, Any]:
        monkeypatch.setattr(tba.Task, "buffer_class", tba.Task.buffer_class)
        for table in ("OBJECTIVES", "REPLAY_RULES", "TASKS", "PARAMETERS", "FLAGS"):
            monkeypatch.setattr(tba, table, getattr(tba, table).copy())
        (text,) = (text for _, text in BLOCKS if words in text)
        names = {}
        exec(text, names)
        return names

    return run


@pytest.mark.parametrize("right", [True, False])
def test_the_check_of_an_objective_finds_an_error(right, load, monkeypatch):
    """The documentation's check of its first plug-in, and of one with twice the reward."""
    plugin = types.ModuleType("topk")
    (text,) = (text for flags, text in BLOCKS if "tb_topk" in flags)
    checks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (check,) = (text for text in checks if "import topk" in text)
    assert text.count("batch.rewards.gather(1, best)") == 1
    vars(plugin).update(load("def tb_topk"))
    if not right:
        text = text.replace("batch.rewards.gather(1, best)", "2 * batch.rewards.gather(1, best)")
        exec(text, vars(plugin))
    monkeypatch.setitem(sys.modules, "topk", plugin)
    with contextlib.nullcontext() if right else pytest.raises(AssertionError):
        exec(check, {})


def test_a_reward_function_of_trl_is_used_as_it_is(load):
    rewards = pytest.importorskip("trl.rewards", reason="TRL is not installed")
    plugin = load("reward function of TRL's signature")
    task = object.__new__(plugin["GSM8KOfTRL"])
    examples = [{"question": "?", "answer": "#### 3"}] * 2
    assert task.rewards(examples, ["<think>1+2</think>3", "4"], None) == [1, 0]
    plugin["accuracy"] = rewards.think_format_reward
    assert task.rewards(examples, ["<think>1+2</think>4", "3"], None) == [1, 0]


def test_newer_trajectories_of_a_prompt_are_drawn_more_often(load):
    load("Replay draws newer trajectories")
    buffer = tba.Task.buffer_class(tba.settings())
    buffer.trajectories[0] = {str(v): types.SimpleNamespace(version=v) for v in range(20)}
    drawn = [t.version for _ in range(200) for t in buffer.draw(0, 4)]
    old, new = (sum(v in half for v in drawn) for half in (range(10), range(10, 20)))
    assert new > 2 * old > 0
    assert len(buffer.draw(0, 30)) == 30


def group_of(prompt_id, rewards):
    """A group of different responses with these rewards."""
    return group(prompt_id, [[i] for i in range(len(rewards))], rewards)


@pytest.mark.parametrize("lockstep", [False, True])
def test_dynamic_sampling_trains_on_groups_with_two_rewards_alone(lockstep, gsm8k, tmp_path):
    """A third of the groups that are sampled have equal ones."""
    flags = {"steps": 5, "prompts_per_step": 6, "trained_per_prompt": 4}
    flags |= {"lockstep": True} if lockstep else {"recent_probability": 0.7}
    metrics, *_ = run_plugins(gsm8k, tmp_path, "dynamic", **flags)
    assert [m["equal_rewards"] for m in metrics] == [0] * 5
    assert not lockstep or metrics[-1]["replay_ratio"] < 0.95  # smaller batches


def test_dynamic_sampling_waits_while_too_few_groups_differ(load, monkeypatch):
    """Recent ones, of which a batch has each once; or stored ones, after some draws."""
    load("as DAPO does")
    rule = rule_of("dynamic", recent_probability=1.0)
    for p in range(10):
        assert rule.sample(4, 3) is None
        arrive(rule, group_of(p, [float(p % 3 == 0), 0.0, 0.0]))
    assert sorted(g[0].prompt_id for g in rule.sample(4, 3)) == [0, 3, 6, 9]

    draws = []
    draw = tba.ReplayBuffer.draw
    monkeypatch.setattr(tba.ReplayBuffer, "draw", lambda *a: draws.append(a) or draw(*a))
    rule = rule_of("dynamic", recent_probability=0.0)
    arrive(rule, *(group_of(p, [1.0] * 3) for p in range(6)))
    assert rule.sample(2, 3) is None and 2 <= len(draws) <= 100
    for p in (6, 7):
        arrive(rule, group_of(p, [0.0, 1.0, 1.0]))
    batch = next(filter(None, (rule.sample(2, 3) for _ in range(100))))
    assert len(batch) == 2 and {g[0].prompt_id for g in batch} <= {6, 7}


def test_dynamic_sampling_looks_at_what_is_drawn(load):
    """Two of three rewards can be equal."""
    load("as DAPO does")
    rule = rule_of("dynamic", recent_probability=0.5, max_recent_draws=0)
    arrive(rule, *(group_of(p, [0.0, 1.0, 1.0]) for p in range(4)))
    batches = [rule.sample(3, 2) for _ in range(30)]
    assert all(len(batch) == 3 for batch in batches)
    assert all({t.reward for t in g} == {0, 1} for batch in batches for g in batch)


def test_a_form_is_rewarded_beside_the_right_answer_to_a_chat(load, gsm8k, tmp_path):
    load("SYSTEM = ")
    _, task = config_and_task(gsm8k, tmp_path / "run", task="gsm8k_tags")
    texts = ["<answer>7</answer>\n", "7", "8, <answer>8</answer>", "<answer>7</answer>, or 8"]
    texts.append("<answer></answer>")
    examples = [{"question": "?", "answer": "#### 7"}] * 5
    rewards = task.rewards(examples, texts, np.ones(5, bool))
    assert rewards.tolist() == [1.2, 1, 0.2, 0, 0]
    records = task.evaluate(examples, texts, np.ones(5, bool))
    assert records == [{"accuracy": float(i < 2)} for i in range(5)]
    tokens = task.tokenizer.convert_ids_to_tokens(task.train_prompts[0])
    assert [t for t in tokens if t in ("<user>", "<assistant>")] == ["<user>", "<assistant>"]
    shown = task.tokenizer.decode(task.train_prompts[0])
    question = task.train[0]["question"]
    assert re.fullmatch(rf"<system>Reason .*<user>{re.escape(question)}<assistant>", shown)


def test_a_curriculum_replays_what_is_solved_now_and_then(load, tmp_path):
    load("now and then")
    first, second = rules = [rule_of("varied", recent_probability=0.0) for _ in range(2)]
    for p in range(8):  # never, always and now and then solved
        arrive(first, group_of(p, [0.0, 0, 0, 0] if p % 4 == 0 else [1.0, 1, 1, 1]))
        arrive(first, group_of(p, [1.0, 1, 1, 0] if p % 4 == 2 else [float(p % 4 > 0)] * 4))
    assert first.solved[2] == (1 + 0.75) / 2
    groups = [g for _ in range(1000) for g in first.sample(1, 2)]
    counts = np.bincount([g[0].prompt_id for g in groups], minlength=8)
    share = (0.875 * 0.125 + 0.01) / (2 * (0.875 * 0.125 + 0.01) + 6 * 0.01)
    assert counts[[2, 6]] == pytest.approx(1000 * share, rel=0.15) and counts.min() > 0
    first.recent.clear()  # they are not saved
    second.buffer.load_state(first.buffer.state())
    torch.save(first.state(), tmp_path / "state.pt")
    second.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    ids = [[[g[0].prompt_id for g in rule.sample(5, 2)] for _ in range(9)] for rule in rules]
    assert ids[0] == ids[1] and all(len(set(batch)) == 5 for batch in ids[0])
    assert len(first.sample(9, 2)) == 9  # all, and one of them once more


def test_demonstrations_are_tokenized_and_leave_metrics_alone(load, gsm8k, tmp_path):
    """`World.on_group` checks that they are among the responses."""
    load("gsm8k_shown")
    config, task = config_and_task(gsm8k, tmp_path / "none", task="gsm8k_shown")
    decode = task.tokenizer.decode
    for example, rows in zip(task.train[:20], task.demonstration_tokens, strict=False):
        assert [decode(row) for row in rows] == [example["answer"] + task.tokenizer.eos_token]
    shown = ((0, "so 5."), (0, "so 6."), (1, "very " * 300))
    rows = [{"question": task.train[i]["question"], "response": text} for i, text in shown]
    path = write(tmp_path / "answers.jsonl", rows)
    several = {"task": "gsm8k_shown", "shown": path, "trained_per_prompt": 2}
    _, task = config_and_task(gsm8k, tmp_path / "none", **several, searched_per_prompt=3)
    assert [len(rows) for rows in task.demonstration_tokens[:3]] == [2, 0, 0]  # one is too long
    assert task.response_texts(task.demonstration_tokens[0]) == ["so 5.", "so 6."]
    write(path, [*rows[:1], rows[1] | {"response": "so 7."}, *rows[2:]])  # after a resume
    _, other = config_and_task(gsm8k, tmp_path / "none", **several, searched_per_prompt=3)
    assert {n for n in other.checksums if other.checksums[n] != task.checksums[n]} == {"dataset"}
    longest = len(task.demonstration_tokens[0][0])
    for limit, fit in ((longest, 2), (longest - 1, 0)):
        flags = several | {"searched_per_prompt": 3, "max_response_tokens": limit}
        _, task = config_and_task(gsm8k, tmp_path / "none", **flags)
        assert len(task.demonstration_tokens[0]) == fit
    with pytest.raises(tba.InputError, match=r"--searched_per_prompt 2: .* 2 demonstrations"):
        config_and_task(gsm8k, tmp_path / "none", **several, searched_per_prompt=2)

    flags = {"prompts_per_step": 3, "trained_per_prompt": 4, "lockstep": True}
    for m in run_plugins(gsm8k, tmp_path, "gsm8k_shown", **flags)[0]:
        assert m["staleness_max"] == 0 and m["sampler_gap"] < 1e-4
        assert m["reward"] < 0.6 and abs(m["kl"]) < 1


def test_there_are_plugins_of_every_kind():
    text = "".join(text for _, text in BLOCKS)
    for name in ("FLAGS", "OBJECTIVES", "REPLAY_RULES", "TASKS", "ENGINES", "next_reference"):
        assert f"tba.{name}" in text
    assert len(BLOCKS) == 25  # a new one needs a test here
