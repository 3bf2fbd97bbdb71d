"""README's "Where to hack": its code is taken from there and run."""

import inspect
import json
import re
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, arguments, run_tba
from harness import read_lines
from test_runs import stable

import tba

REGISTRIES = "TASKS", "OBJECTIVES", "REPLAY_RULES", "ENGINES"


def sections() -> dict[str, str]:
    """The text under each heading of "Where to hack"."""
    text = (ROOT / "README.md").read_text()
    chapter = text.split("\n## Where to hack\n")[1].split("\n## ")[0]
    parts = [part.split("\n", 1) for part in chapter.split("\n### ")[1:]]
    return dict(parts)


SECTIONS = sections()
CODE = {
    heading: code
    for heading, text in SECTIONS.items()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
}


def write_file(path: Path, *headings: str) -> Path:
    """A task file of these headings' code."""
    path.write_text("".join(CODE[heading] for heading in headings))
    return path


def tba_with_metric(folder: Path) -> Path:
    """A copy of tba.py with README's line for a metric."""
    (diff,) = re.findall(r"```diff\n(.*?)```", SECTIONS["A metric"], re.DOTALL)
    lines = diff.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if line[0] == " ")
    new = "".join(f"{line[1:]}\n" for line in lines)
    code = (ROOT / "tba.py").read_text()
    assert len([line for line in lines if line[0] == "+"]) == 1
    assert code.count(old) == 1
    path = folder / "tba.py"
    path.write_text(code.replace(old, new))
    return path


PLACES = {  # heading -> what its code enters, and where
    "A task": ("TASKS", "shouting"),
    "An objective": ("OBJECTIVES", "clipped"),
    "A replay rule": ("REPLAY_RULES", "least_drawn"),
    "An engine": ("ENGINES", "transformers"),
    "Who gets weights": None,
}


@pytest.mark.parametrize("heading", PLACES)
def test_each_block_is_a_task_file_and_changes_one_place(heading, tmp_path, monkeypatch):
    assert set(CODE) == set(PLACES)
    before = {name: dict(getattr(tba, name)) for name in REGISTRIES}
    for name in REGISTRIES:
        monkeypatch.setattr(tba, name, dict(before[name]))
    recipients = tba.WeightSync.recipients
    monkeypatch.setattr(tba.WeightSync, "recipients", recipients)
    tba.load_task_file(str(write_file(tmp_path / "hack.py", heading)))
    changed = [
        (name, key)
        for name in REGISTRIES
        for key, value in getattr(tba, name).items()
        if before[name].get(key) is not value
    ]
    place = PLACES[heading]
    assert changed == ([place] if place else [])
    assert (tba.WeightSync.recipients is not recipients) == (place is None)


def test_the_table_of_engines_has_what_a_searcher_uses():
    table = SECTIONS["An engine"]
    used = re.findall(r"\bself\.engine\.(\w+)", inspect.getsource(tba.Searcher))
    assert set(used) == set(re.findall(r"^\| `([a-zA-Z]\w*)", table, re.MULTILINE))


@pytest.mark.slow
def test_a_task_an_objective_and_a_replay_rule_in_lockstep_resumed(gsm8k, tmp_path):
    """The rule's memory is in the checkpoint: the resumed run repeats the uninterrupted one."""
    file = write_file(tmp_path / "hacks.py", "A task", "An objective", "A replay rule")
    (tmp_path / "data").mkdir()
    for split, verb in (("train", "has"), ("test", "buys")):
        rows = [json.dumps({"text": f"Gina {verb} {n}"}) for n in range(6)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(rows))
    flags = {
        "task": "shouting", "task_file": file, "dataset": tmp_path / "data",
        "objective": "clipped", "replay_rule": "least_drawn", "learning_rate": 3e-3,
        "synchronous": True, "sync_every": 1, "steps": 8, "save_every": 4, "keep_checkpoints": 0,
        "eval_every": 0, "max_response_tokens": 16, "temperature": 3,
    }  # fmt: skip
    whole, part = tmp_path / "whole", tmp_path / "part"
    run_tba(arguments(gsm8k, whole, **flags))
    clipped = [m["clip_fraction"] for m in read_lines(whole / "metrics.jsonl")]
    assert len(clipped) == 8 and all(0 <= share <= 1 for share in clipped)
    assert max(clipped) > 0
    for step in (4, 8):
        saved = torch.load(whole / f"checkpoint-{step}" / "trainer.pt", weights_only=True)
        draws = saved["buffer"]["memory"]["draws"]
        assert sum(draws.values()) == 4 * step  # B = 4 prompts a step
        assert len(draws) == 6 and max(draws.values()) - min(draws.values()) <= 1
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoint-8")
    run_tba(["--resume", str(part)])
    assert stable(part) == stable(whole)


@pytest.mark.slow
def test_a_metric_weights_for_every_second_searcher_and_an_engine(gsm8k, tmp_path):
    """Two Searchers: the second keeps its first weights, and goes on with them."""
    file = write_file(tmp_path / "hacks.py", "Who gets weights", "An engine")
    out = tmp_path / "run"
    flags = {"num_searchers": 2, "steps": 60, "sync_every": 2, "eval_every": 20,
             "task_file": file}  # fmt: skip
    command = [sys.executable, str(tba_with_metric(tmp_path)), *arguments(gsm8k, out, **flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stderr

    metrics = read_lines(out / "metrics.jsonl")
    assert len(metrics) == 60 and metrics[-1]["version"] > 5
    assert all(m["oldest_weights"] == 0 for m in metrics)
    assert all(m["searchers_alive"] == 2 and m["logprob_gap"] < 1e-3 for m in metrics)
    evaluated = [e["step"] for e in read_lines(out / "eval.jsonl")]
    assert evaluated[0] == 0 and evaluated[-1] == 60
    assert 20 <= evaluated[1] < 60  # at the first sync that begins after step 20

    saved = torch.load(out / "checkpoint-60" / "trainer.pt", weights_only=True)
    trajectories = tba.trajectories_from_tensors(saved["buffer"]["trajectories"])
    count = len(read_lines(gsm8k / "data" / "train.jsonl"))
    assert max(saved["numbers"]) * 2 <= count  # no prompt was searched twice
    order = tba.prompt_order(0, 0, count).tolist()
    groups = [list(rows) for _, rows in groupby(trajectories, key=lambda t: t.prompt_id)]
    versions = {0: [], 1: []}
    gaps = []
    for group in groups:
        searcher = order.index(group[0].prompt_id) % 2  # they take turns in the prompt order
        versions[searcher].append(group[0].version)
        if group[0].version == 0:
            differences = [np.abs(t.logprobs - t.ref_logprobs).max() for t in group]
            gaps.append(max(differences))
    assert set(versions[1]) == {0} and max(versions[0]) > 5
    assert len(versions[1]) > len(versions[0]) / 4  # it was not idle
    # the policy's and the reference's are the same weights, at the same temperature or another
    assert min(gaps) < 1e-3 and max(gaps) > 0.02
