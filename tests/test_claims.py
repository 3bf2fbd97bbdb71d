"""The experiments in bench/: how rates are chosen, what rows count for, the tables, the clock.

Also the small engine, and which prompts bench/smollm2.py holds out.
"""

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
import inside
import smollm2

PROGRAMS = {"claims": claims, "inside": inside, "smollm2": smollm2, "trl": against_trl}
SETTING = common.Setting("staleness", "tb", 2)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """The experiments are on CPUs, where a machine has room for all Searchers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def row_of(setting, role, rate, seed, path, exit_code=0):
    """A row of a run with this path of (KL, reward)."""
    points = [
        dict.fromkeys(common.POINT, 0.0) | {"step": 10 * i, "kl": kl, "reward": reward}
        for i, (kl, reward) in enumerate(path)
    ]
    row = asdict(setting) | {"role": role, "rate": rate, "seed": seed, "path": points}
    return row | {"clip": 1.0, "exit_code": exit_code, "model": "", "commit": ""}


def choose(rows, reward_at):
    """Make every run that is missing; a rate's reward is `reward_at` it, None: it collapses."""
    while job := rows.next([SETTING]):
        setting, role, rate, seed = job
        reward = reward_at(rate)
        path = [(0, 0), (99, 0.5)] if reward is None else [(0, 0), (1, reward)]
        rows.add(row_of(setting, role, rate, seed, path))
    return rows.of(SETTING, "choose"), rows.of(SETTING, "report")


@pytest.mark.parametrize("best", [3e-6, 3e-4, 1e-3, 3e-2])
def test_the_grid_is_widened_until_the_best_rate_is_inside(best, tmp_path):
    rows = claims.Rows(tmp_path / "rows.jsonl")
    chosen, reported = choose(rows, lambda rate: 1 - 0.1 * abs(math.log10(rate / best)))
    assert {row["rate"] for row in reported} == {best}
    tried = sorted({row["rate"] for row in chosen})
    assert tried[0] < best < tried[-1]
    assert set(claims.FIRST_RATES) <= set(tried)
    for rate in tried:
        assert sorted(row["seed"] for row in chosen if row["rate"] == rate) == [101, 102]
    assert sorted(row["seed"] for row in reported) == [1, 2, 3]
    assert claims.Rows(rows.path).next([SETTING]) is None  # the file says that nothing is missing


def test_where_every_rate_collapses_lower_ones_are_tried(tmp_path):
    rows = claims.Rows(tmp_path / "rows.jsonl")
    chosen, reported = choose(rows, lambda rate: None if rate > 5e-5 else 1e4 * rate)
    assert {row["rate"] for row in reported} == {3e-5}
    assert max(row["rate"] for row in chosen) == 3e-3


def test_a_collapse_on_the_way_counts_though_the_run_came_back():
    path = [(0, 0.1), (3, 0.5), (60, 0.9), (5, 0.6)]
    row = row_of(SETTING, "choose", 1e-3, 1, path)
    assert common.collapsed(row)
    assert claims.score([row]) == 0
    assert common.area(row) > 0  # it is reported all the same
    assert common.collapsed(row_of(SETTING, "choose", 1e-3, 1, path[:2], exit_code=1))
    assert not common.collapsed(row_of(SETTING, "choose", 1e-3, 1, path[:2]))


def test_the_frontier_is_the_best_within_each_budget():
    """0.4 at 3 nats and 1.0 at 9: on the way from one to the other 0.5 is passed at 4 nats."""
    row = row_of(SETTING, "report", 1e-3, 1, [(0, 0.1), (3, 0.4), (9, 1.0), (20, 0.2)])
    assert common.frontier(row) == pytest.approx({2.0: 0.3, 4.0: 0.5, 6.0: 0.7, 12.0: 1.0})
    assert common.area(row) == pytest.approx((0.3 + 0.5 + 0.7 + 1.0) / 4 - 0.1)
    assert claims.first_step(row, 0.25) == pytest.approx(5)
    assert claims.first_step(row, 1.1) == math.inf


def test_a_run_that_ends_with_few_responses_is_reported_as_collapsed_but_keeps_its_score():
    """One response is about 13 nats away, so a limit on the KL does not find it."""
    row = row_of(SETTING, "report", 1e-3, 1, [(0, 0), (6, 0.4), (12.8, 0.6)])
    for point, distinct in zip(row["path"], (1.0, 0.9, 0.01), strict=True):
        point["distinct"] = distinct
    assert common.lost(row) and not common.collapsed(row)
    assert common.note([row]).endswith("(1 of 1)")
    assert claims.score([row]) == pytest.approx(common.area(row), abs=1e-6)
    assert not common.lost(row | {"path": row["path"][:2]})
    assert not common.lost(row | {"task": "attacks"})  # there it is a distance


@pytest.mark.parametrize("p", [1 / 183, 1 / 1820])
def test_the_optimum_of_rare_rewards_is_that_of_a_search_over_policies(p):
    """Among policies with success rate q, pi_ref reweighted within both classes is the nearest."""
    q = np.linspace(p, 1 - 1e-9, 1_000_001)
    kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    J = q - 0.1 * kl
    assert claims.best_success(p, 0.1) == pytest.approx(q[J.argmax()], abs=1e-4)


def test_the_report_says_where_runs_on_sparse_rewards_end():
    """Two of three seeds reach 0.5; one of these falls back, the third ends with one response."""
    setting = claims.search("search, ten seeds")
    ends = {1: [(0, 0), (3, 0.8)], 2: [(0, 0), (3, 0.6), (1, 0.1)], 3: [(0, 0), (2, 0.3)]}
    rows = [row_of(setting, "report", 1e-3, seed, path) for seed, path in ends.items()]
    for row in rows:
        for point in row["path"]:
            point["distinct"] = 0.01 if row["seed"] == 3 and point["step"] else 1.0
    # J: 0.8 - 0.3, 0.1 - 0.1, 0.3 - 0.2; steps: 6.25, 8.3, never
    assert claims.ends_of_search(rows) == "0.40 (0.10); 8; 1"


def test_the_ends_of_long_runs_are_counted():
    """One response with a high J and one with a low; a broken run; one that tba.py ended."""
    setting = claims.collapse_settings()["constant", "tb", 10]
    ends = [(10, 0.6, 0.01, 0), (10, 0.4, 0.03, 0), (50, 0.1, 0.9, 0), (2, 0.3, 0.81, 1)]
    rows = []
    for seed, (kl, reward, distinct, code) in enumerate(ends):
        row = row_of(setting, "report", 1e-3, seed, [(0, 0), (kl, reward)], code)
        row["path"][-1]["distinct"] = distinct
        rows.append(row)
    assert claims.ends_of_long_runs(rows) == "2, 2; 0.23"  # J: 0.4, 0.2, -0.9, 0.26


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


def test_report_fills_marked_places_and_prints_the_rest_if_asked_to(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    results = tmp_path / "docs" / "results.md"
    results.parent.mkdir()
    text = "a\n<!-- one -->\n{}<!-- end -->\nb\n<!-- to come -->\n<!-- end -->\n"
    results.write_text(text.format("old\n"))
    common.publish({"one": "| new |\n", "two": "| other |\n"}, print_all=False)
    assert results.read_text() == text.format("| new |\n") and not capsys.readouterr().out
    common.publish({"one": "| new |\n", "two": "| other |\n"}, print_all=True)
    said = capsys.readouterr().out
    assert all(part in said for part in ("## one", "| new |", "## two", "| other |"))


def test_the_small_engine_samples_what_it_says_from_the_models_own_distribution():
    path = str(ROOT / "bench" / "models" / "valence" / "model")
    config = tba.settings(model=path, dtype="float32", sequences_in_flight=10_000)
    device = torch.device("cpu")
    ends = tba.end_tokens(*tba.check_model("model", config))
    engine = common.SmallLlama(config, 0, "model", 100)
    model = tba.load_model(config, path, torch.float32, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    engine.load_weights(tba.checkpoint_state(model).items(), 1)

    prompts = [np.arange(5, 5 + n, dtype=np.int32) for n in (3, 9, 6)]
    for i, prompt in enumerate(prompts):
        engine.submit(tba.Request(i, prompt, n=16, max_tokens=20 + i, temperature=0.7, seed=i))
    groups = []
    said = []
    for done in sorted(engine.step(), key=lambda done: done.request.id):
        groups.append((done.request.prompt, done.tokens))
        said += done.logprobs
        lengths = [len(tokens) for tokens in done.tokens]
        assert max(lengths) <= 20 + done.request.id
        for tokens, ended in zip(done.tokens, done.ended, strict=True):
            assert not np.isin(tokens[:-1], ends).any()
            assert ended == (tokens[-1] in ends)
    own = tba.token_logprobs(tba.TokenLogProbs(model, 0.7), groups, config)
    for a, b in zip(said, own, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)

    n = 4000
    engine.submit(tba.Request(0, prompts[0], n=n, max_tokens=1, temperature=1.0, seed=5))
    [done] = engine.step()
    with torch.no_grad():
        logits = model(torch.from_numpy(prompts[0]).long()[None]).logits[0, -1]
    p = logits.softmax(-1).double().numpy()
    share = np.bincount(np.concatenate(done.tokens), minlength=len(p)) / n
    assert (np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / n) + 1 / n).all()


def simulate(folder, monkeypatch, max_recent_draws, clock="3", searchers=1):
    """Five steps on the simulated clock: their losses and staleness, and when they ended."""
    ends = []

    class Watched(claims.SimulatedTrainer):
        def train_step(self, groups):
            super().train_step(groups)
            ends.append(self.searchers.now)

    monkeypatch.setattr(Watched, "clock", clock)
    flags = (("clock", clock), ("max_recent_draws", max_recent_draws), ("recent_probability", 1.0))
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


def test_on_the_simulated_clock_the_trainer_waits_rather_than_replay(tmp_path, monkeypatch):
    """Batches of 8 groups come at 3, 6, 9, ..., and weights are sent after steps 2 and 4."""
    steps, ends = simulate(tmp_path / "bounded", monkeypatch, 1)
    assert simulate(tmp_path / "again", monkeypatch, 1) == (steps, ends)
    assert ends == [4, 7, 10, 13, 16]  # each group is drawn once
    assert [staleness for _, staleness in steps] == [0, 1, 2, 1, 2]
    steps, ends = simulate(tmp_path / "unbounded", monkeypatch, 0)
    assert ends == [4, 5, 6, 7, 8]


def test_on_the_simulated_clock_searchers_take_turns_and_weights_take_time(tmp_path, monkeypatch):
    """Batches take 4, weights 1/2; each group is drawn once.

    The first weights arrive at 0.5, when Searcher 0 begins; Searcher 1 begins at 2. Those that are
    sent at 7, after step 2, arrive at 7.5, before the batch that begins at 8.5: it comes at 12.5.
    """
    steps, ends = simulate(tmp_path, monkeypatch, 1, clock="4 1/2", searchers=2)
    assert ends == [5.5, 7, 9.5, 11, 13.5]  # a batch comes at 4.5, 6, 8.5, 10, 12.5
    assert [staleness for _, staleness in steps] == [0, 1, 2, 3, 2]


def test_the_runs_of_an_experiment_come_in_an_order_that_keeps_tables_balanced(tmp_path):
    """Rates first, those of 16 Searchers with 8; then a seed of all settings, then the next."""
    rows = claims.Rows(tmp_path / "rows.jsonl")
    settings = [claims.search("search, ten seeds", M) for M in (1, 2, 16)]
    order = []
    while job := rows.next(settings):
        setting, role, rate, seed = job
        rows.add(row_of(setting, role, rate, seed, [(0, 0), (1, 0.5)]))
        order.append(
            (role, 0 if role != "report" else seed, dict(setting.flags).get("num_searchers"))
        )
    roles = [role for role, _, _ in order]
    assert roles == sorted(roles, key=["pilot", "choose", "report"].index)
    assert {M for role, _, M in order if role == "choose"} == {1, 2, 8}
    assert [key[1:] for key in order if key[0] == "report"] == [
        (seed, M) for seed in range(11, 21) for M in (1, 2, 16)
    ]
    # all rates are as good: the one nearest 1e-3 is taken, and the grid is not widened without end
    assert {row["rate"] for row in rows.rows if row["role"] == "report"} == {1e-3}
    assert {row["rate"] for row in rows.rows if row["role"] == "choose"} == {3e-4, 1e-3, 3e-3}


def test_a_rate_of_a_fixed_grid_is_chosen_and_a_comparison_resumes(tmp_path, monkeypatch):
    """One of three rates fails, although it ends with the highest accuracy."""
    path = tmp_path / "rows.jsonl"
    settings = [inside.setting_of("tb", 10, m) for m in inside.RECENT]
    of_rate = {1e-4: (0.7, 0.5), 3e-4: (0.8, 0.5), 1e-3: (0.9, 0.05)}  # accuracy, distinct

    monkeypatch.setattr(inside, "SEEDS", (1, 2))
    monkeypatch.setattr(inside.Rows, "rates", tuple(of_rate))
    done = []
    while job := inside.Rows(path).next(settings):  # each run in a new process
        setting, role, rate, seed = job
        accuracy, distinct = of_rate.get(rate, (0.3, 0.5))
        row = row_of(setting, role, rate, seed, [(0, 0.3), (1, accuracy)])
        row["path"][-1]["distinct"] = distinct
        inside.Rows(path).add(row)
        done.append((role, rate, seed, dict(setting.flags).get("recent_probability")))
    assert done[0][0] == "pilot"
    tried = [(rate, seed, m) for seed, m in ((101, 0.95), (102, 0.5)) for rate in of_rate]
    assert [run[1:] for run in done if run[0] == "choose"] == tried
    reported = [(3e-4, seed, m) for seed in (1, 2) for m in (0.95, 0.5)]
    assert [run[1:] for run in done if run[0] == "report"] == reported


def test_no_sum_that_is_held_out_is_trained_on_or_shown_in_the_prompt():
    pairs = {
        split: {frozenset(example["question"].split(" + ")) for example in examples}
        for split, examples in smollm2.make_examples().items()
    }
    assert len(pairs["test"]) == smollm2.HELD_OUT
    shown = {frozenset(map(str, pair)) for pair in smollm2.EXAMPLES}
    assert not pairs["test"] & (pairs["train"] | shown)
