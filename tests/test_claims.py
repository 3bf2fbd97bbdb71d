"""The experiments in bench/: how rates are chosen, the tables, the small engine, the clock."""

import math
import re
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from harness import ROOT

import tba

sys.path.append(str(ROOT / "bench"))

import against_trl
import claims
import common
import demonstrations
import families
import inside
import smollm2

PROGRAMS = {
    "claims": claims, "inside": inside, "smollm2": smollm2, "trl": against_trl,
    "demonstrations": demonstrations,
}  # fmt: skip
SETTING = common.Setting("staleness", "tb", 2)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """The experiments are on CPUs, where a machine has room for all Searchers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def choose(rows, reward_at, setting=SETTING):
    """Make every run that is missing; a rate's reward is `reward_at` it, None: it collapses."""
    while job := rows.next([setting]):
        own, role, rate, seed = job
        reward = reward_at(rate)
        points = [
            dict.fromkeys(common.POINT, 0.0) | {"step": 10 * i, "kl": kl, "reward": reward}
            for i, (kl, reward) in enumerate([(0, 0), (1, reward) if reward else (99, 0.5)])
        ]
        row = asdict(own) | {"role": role, "rate": rate, "seed": seed, "path": points}
        rows.add(row | {"clip": 1.0, "exit_code": 0, "model": "", "commit": ""})
    chosen = [row for row in rows.rows if row["role"] == "choose"]
    return sorted({row["rate"] for row in chosen}), rows.of(setting)


@pytest.mark.parametrize("best", [3e-6, 3e-4, 1e-3, 3e-2])
def test_the_grid_is_widened_until_the_best_rate_is_inside(best, tmp_path):
    rows = claims.Rows(tmp_path / "rows.jsonl")
    tried, reported = choose(rows, lambda rate: 1 - 0.1 * abs(math.log10(rate / best)))
    assert {row["rate"] for row in reported} == {best}
    assert tried[0] < best < tried[-1] and set(claims.FIRST_RATES) <= set(tried)
    assert sorted(row["seed"] for row in reported) == [1, 2, 3]
    assert claims.Rows(rows.path).next([SETTING]) is None  # the file says that nothing is missing


def test_lower_rates_are_tried_where_all_collapse_and_of_good_ones_the_usual_is_taken(tmp_path):
    rows = claims.Rows(tmp_path / "collapse.jsonl")
    tried, reported = choose(rows, lambda rate: None if rate > 5e-5 else 1e4 * rate)
    assert {row["rate"] for row in reported} == {3e-5} and tried[-1] == 3e-3
    rows = claims.Rows(tmp_path / "good.jsonl")
    tried, reported = choose(rows, lambda rate: 0.5, claims.search("search, ten seeds", 16))
    assert {row["rate"] for row in reported} == {1e-3} and tried == [3e-4, 1e-3, 3e-3]


def test_the_tables_of_the_docs_are_those_of_the_rows():
    """The `report` commands were run after the last row."""
    text = (ROOT / "docs" / "results.md").read_text()
    marked = dict(re.findall(r"<!-- (?!end)(.+?) -->\n(.*?)<!-- end -->", text, re.DOTALL))
    tables = {}
    for name, program in PROGRAMS.items():
        path = ROOT / "bench" / "results" / f"{name}.jsonl"
        tables |= program.tables_of(program.Rows(path))
    assert len(marked) >= 8
    for title in marked:
        assert marked[title] == tables[title], title


def test_the_small_engine_samples_from_the_models_own_distribution():
    path = ROOT / "bench" / "models" / "valence" / "model"
    _, gaps = families.compare(path, "small")
    for check, value in gaps.items():
        assert value < families.TOLERANCE[check], check
    config = tba.settings(model=str(path), dtype="float32", sequences_in_flight=10_000)
    engine = common.SmallLlama(config, 0, "model", 100)
    prompt, n = np.arange(5, 8, dtype=np.int32), 4000
    engine.submit(tba.Request(0, prompt, n=n, max_tokens=1, temperature=1.0, seed=5))
    [done] = engine.step()
    with torch.no_grad():
        logits = engine.model(torch.from_numpy(prompt).long()[None]).logits[0, -1]
    p = logits.softmax(-1).double().numpy()
    share = np.bincount(np.concatenate(done.tokens), minlength=len(p)) / n
    assert (np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / n) + 1 / n).all()


def simulate(folder, monkeypatch, clock="3", searchers=1):
    """Five steps on the simulated clock: their losses and staleness, and when they ended."""
    ends = []

    class Watched(claims.SimulatedTrainer):
        def train_step(self, groups):
            super().train_step(groups)
            ends.append(self.searchers.now)

    monkeypatch.setattr(Watched, "clock", clock)
    flags = (("clock", clock), ("max_recent_draws", 1), ("recent_probability", 1.0))
    setting = common.Setting("", "tb", steps=5, flags=flags)
    words = common.arguments_of(setting, 1e-3, 1, 1.0, folder / "run")
    flags = {name[2:]: value for name, value in zip(words[::2], words[1::2], strict=True)}
    flags |= {name: str(flags[name]) for name in ("model", "dataset", "output_dir")}
    flags |= {"plugin": "", "eval_responses": 1, "max_response_tokens": 16}
    config = tba.resolve(tba.settings(**flags | {"num_searchers": searchers}))
    tba.claim_folder(config, config)
    run = tba.RunFolder(config)
    Watched(config, tba.load_task(config), run, tba.Ranks(), {}).run()
    metrics = tba.read_lines(run.path / "metrics.jsonl")
    return [(m["loss"], m["staleness_mean"]) for m in metrics], ends


def test_on_the_simulated_clock_searchers_take_turns_and_weights_take_time(tmp_path, monkeypatch):
    """One Searcher's batches come at 3, 6, 9, ..., and weights are sent after steps 2 and 4.

    Two Searchers' batches take 4, weights 1/2. The first weights arrive at 0.5, when Searcher 0
    begins; Searcher 1 begins at 2. Those that are sent at 7, after step 2, arrive at 7.5, before
    the batch that begins at 8.5: it comes at 12.5. The Trainer waits rather than replay.
    """
    steps, ends = simulate(tmp_path / "one", monkeypatch)
    assert ends == [4, 7, 10, 13, 16]  # each group is drawn once
    assert [staleness for _, staleness in steps] == [0, 1, 2, 1, 2]
    steps, ends = simulate(tmp_path / "two", monkeypatch, clock="4 1/2", searchers=2)
    assert ends == [5.5, 7, 9.5, 11, 13.5]  # a batch comes at 4.5, 6, 8.5, 10, 12.5
    assert [staleness for _, staleness in steps] == [0, 1, 2, 3, 2]
