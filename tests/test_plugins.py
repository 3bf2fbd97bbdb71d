"""Every plug-in of README.md and docs/hacking.md runs as it stands there; one is resumed."""

import contextlib
import http.server
import json
import math
import os
import re
import subprocess
import sys
import threading
import types
from typing import Any

import pytest
import torch
from harness import ROOT, Run, arguments, run_tba

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
    """Takes many connections at once."""

    request_queue_size = 128


@contextlib.contextmanager
def judge_server():
    server = JudgeServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_judge_that_is_down_ends_the_run_after_a_checkpoint(gsm8k, tmp_path):
    """The server goes away after some steps: tracebacks are shown, and what was learned is kept."""
    plugin = tmp_path / "mine.py"
    (plugin_text,) = (text for flags, text in BLOCKS if "judged" in flags)
    plugin.write_text(plugin_text)
    out = tmp_path / "run"
    flags = {"task": "judged", "plugin": plugin, "judge_tries": 1, "max_restarts": 1}
    flags |= {"steps": 10_000, "eval_every": 0, "eval_samples": 8, "save_every": 0}
    with judge_server() as server:
        url = f"http://127.0.0.1:{server.server_port}/score"
        run = Run(out, arguments(gsm8k, out, judge_url=url, **flags), hooks=False)
        run.reaches(3)
    said = run.ends(1)
    assert "URLError" in said and "in rewards" in said
    step = read_lines(out / "metrics.jsonl")[-1]["step"]
    assert [path.name for path in out.glob("checkpoint-*")] == [f"checkpoint-{step}"]


@pytest.mark.parametrize(("flags", "text"), BLOCKS, ids=[flags.split()[1] for flags, _ in BLOCKS])
def test_plugins_of_the_documentation(flags, text, gsm8k, tmp_path):
    plugin = tmp_path / "mine.v2.py"
    plugin.write_text(text)
    out = tmp_path / "run"
    data = gsm8k / "data"
    settings = arguments(gsm8k, out, plugin=plugin, **FLAGS)
    if "short_first" in flags or "reinforce" in flags:
        settings.append("--lockstep")  # batches are of consecutive prompts; resumed exactly
    with judge_server() as server:
        flags = flags.replace("127.0.0.1:8000", f"127.0.0.1:{server.server_port}")
        said, _ = run_tba([*settings, *flags.split()])
    metrics = read_lines(out / "metrics.jsonl")
    assert len(metrics) == 3
    if "staleness_residual" in text:
        assert all(-1 <= m["staleness_residual"] <= 1 for m in metrics)
    if "gsm8k_trl" in flags:
        answers = {row["question"]: row["answer"] for row in read_lines(data / "train.jsonl")}
        for row in read_lines(out / "completions.jsonl"):
            (question,) = (q for q in answers if q in row["prompt"])
            right = extract_number(answers[question]) == extract_number(row["response"])
            assert row["reward"] == right
    if "terse" in flags:
        rows = read_lines(out / "completions.jsonl")
        assert rows and all(
            round(row["reward"] + 0.01 * len(row["response"]), 3) in (0, 1) for row in rows
        )
    if "gsm8k_logged" in flags:
        for row in metrics + read_lines(out / "eval.jsonl"):
            assert row["calculations"] > 1 >= row.get("reward", 0)
    if "gsm8k_short_first" in flags:
        rows = sorted(read_lines(data / "train.jsonl"), key=lambda row: len(row["answer"]))
        for i, row in enumerate(read_lines(out / "completions.jsonl")):
            assert any(x["question"] in row["prompt"] for x in rows[4 * i : 4 * i + 4])
    if "tb_short" in flags:
        assert metrics[0]["price"] == 0 < metrics[1]["price"]
    if "judged" in flags:
        assert all(0 < m["reward"] < 2 for m in metrics)
    if "counted" in flags:
        assert "generated" in said
    if "reinforce" in flags:
        assert metrics[0].get("baseline", 1) > 0
        run_tba(["--resume", str(out), "--steps", "5"])
        whole = arguments(gsm8k, tmp_path / "whole", plugin=plugin, **(FLAGS | {"steps": 5}))
        run_tba([*whole, "--lockstep", *flags.split()])
        for name in ("loss", "baseline", "value_error", "grad_norm"):
            values = [
                [m.get(name) for m in read_lines(folder / "metrics.jsonl")]
                for folder in (out, tmp_path / "whole")
            ]
            assert values[0] == values[1] and len(values[0]) == 5, name
    if "varied" in flags or "next_reference" in text:
        run_tba(["--resume", str(out), "--steps", "5"])
        metrics = read_lines(out / "metrics.jsonl")
        assert len(metrics) == 5
        assert not math.isnan(metrics[3]["reward"])  # new groups have arrived by then


@pytest.fixture
def load(monkeypatch):
    """Runs a plug-in of the documentation in this process, and returns what it defines."""

    def run(words: str) -> dict[str, Any]:
        monkeypatch.setattr(tba.Task, "buffer_class", tba.Task.buffer_class)
        for table in ("OBJECTIVES", "TASKS", "PARAMETERS"):
            monkeypatch.setattr(tba, table, getattr(tba, table).copy())
        (text,) = (text for _, text in BLOCKS if words in text)
        names = {}
        exec(text, names)
        return names

    return run


def test_weighted_tb_equals_its_formula_and_on_policy_it_is_tb(load):
    plugin = load("TB with truncated importance weights")
    config = tba.settings(beta=0.4, tau=1.3)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    B, K = 3, 4  # responses of one token
    logprobs, reference, rewards = draw(B * K).requires_grad_(), draw(B * K), draw(B, K)
    for behaviour in (logprobs.detach(), logprobs.detach() + 2 * draw(B * K)):
        batch = tba.Batch(
            logprobs, behaviour, reference, tokens=torch.zeros(B * K, dtype=torch.int64),
            lengths=torch.ones(B, K, dtype=torch.int64), ended=torch.ones(B, K) > 0,
            rewards=rewards, versions=torch.zeros(B, K), prompt_ids=torch.arange(B), step=0,
            parameters={},
        )  # fmt: skip
        expected = 0.0
        for j in range(0, B * K, K):
            own = slice(j, j + K)
            w = [min(math.exp(x), plugin["CAP"]) for x in (logprobs - behaviour)[own].tolist()]
            gap = (reference[own] + rewards[j // K] / 0.4) / 1.3 - logprobs[own]
            log_z = sum(a * g.item() for a, g in zip(w, gap, strict=True)) / sum(w)
            expected += sum(a * (log_z - g) ** 2 for a, g in zip(w, gap, strict=True)) / (B * K)
        (wanted,) = torch.autograd.grad(expected, logprobs)
        (gradient,) = torch.autograd.grad(plugin["tb_weighted"](batch, config).loss, logprobs)
        torch.testing.assert_close(gradient, wanted)
        (of_tb,) = torch.autograd.grad(tba.tb(batch, config).loss, logprobs)
        assert torch.allclose(gradient, of_tb) == torch.equal(behaviour, logprobs)


@pytest.mark.parametrize("right", [True, False])
def test_the_check_of_an_objective_finds_an_error(tmp_path, right):
    """The documentation's check of its first plug-in, and of one with twice the reward."""
    (plugin,) = (text for flags, text in BLOCKS if "tb_topk" in flags)
    (check,) = (
        text
        for text in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
        if "import topk" in text
    )
    assert plugin.count("batch.rewards.gather(1, best)") == 1
    if not right:
        plugin = plugin.replace(
            "batch.rewards.gather(1, best)", "2 * batch.rewards.gather(1, best)"
        )
    (tmp_path / "topk.py").write_text(plugin)
    (tmp_path / "check_topk.py").write_text(check)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "check_topk.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == right, done.stderr
    assert right or "AssertionError" in done.stderr


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


def test_there_are_plugins_of_every_kind():
    text = "".join(text for _, text in BLOCKS)
    for name in ("FLAGS", "OBJECTIVES", "REPLAY_RULES", "TASKS", "ENGINES", "next_reference"):
        assert f"tba.{name}" in text


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("kimi", "mean_log_ratio"),
        ("dro", "penalty"),
        ("flowrl", "log_z"),
        ("cispo", "clip_fraction"),
        ("rloo", "loss"),
    ],
)
def test_objectives_of_bench_run(gsm8k, tmp_path, name, metric):
    """With data that are one step old."""
    flags = FLAGS | {"plugin": ROOT / "bench" / "objectives.py", "objective": name, "lag": 1}
    run_tba([*arguments(gsm8k, tmp_path, **flags), "--lockstep"])
    metrics = read_lines(tmp_path / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert all(math.isfinite(m["loss"]) and m["grad_norm"] > 0 for m in metrics)
    assert all(math.isfinite(m[metric]) for m in metrics)


@pytest.mark.parametrize("name", ["cluster.py", "objectives.py"])
def test_programs_of_bench_load_as_plugins(name):
    said, _ = run_tba(["--plugin", str(ROOT / "bench" / name), "--help"])
    assert "--replay_rule" in said and ("--group_seconds" in said) == (name == "cluster.py")
