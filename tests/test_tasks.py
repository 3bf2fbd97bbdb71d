"""GSM8K: the answer rule, the loader, and the real data where it lies beside the repository."""

import json

import numpy as np
import pytest
from conftest import REAL_GSM8K, arguments

import tba


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", 18),
        ("so 1,234,567 in all.", 1234567),
        ("it costs $3.50.", 3.5),
        ("-7 degrees", -7),
        ("16-3=13", 13),
        ("10-5", 5),
        ("a drop of .5", 0.5),
        ("#### -3\n", -3),
        ("5, 6", 6),
        ("x1,000 y", 1000),
        ("1,2,3", 123),
        ("no number", None),
        ("", None),
        ("minus - only", None),
    ],
)
def test_extract_number(text, number):
    assert tba.extract_number(text) == number


def test_rewards_are_exact_matches_of_the_last_number():
    task = tba.GSM8K.__new__(tba.GSM8K)
    example = {"question": "?", "answer": "2+2=4\n#### 1,004"}
    responses = ["#### 1004", "1004 then 5", "1,004.0", "", "none"]
    rewards = task.rewards([example] * 5, responses, np.ones(5, bool))
    assert rewards.tolist() == [1, 0, 1, 0, 0]


def load(gsm8k, tmp_path, dataset, **flags):
    config = tba.parse(arguments(gsm8k, tmp_path / "out", dataset=dataset, **flags))
    return tba.GSM8K(config, None)


def test_one_file_holds_out_its_last_tenth(gsm8k, tmp_path):
    rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(20)]
    for suffix, text in (
        (".jsonl", "".join(json.dumps(r) + "\n" for r in rows)),
        (".json", json.dumps(rows)),
        (".csv", "question,answer\n" + "".join(f"q{i},#### {i}\n" for i in range(20))),
    ):
        path = tmp_path / f"data{suffix}"
        path.write_text(text)
        task = load(gsm8k, tmp_path, path, eval_samples=0)
        assert [e["question"] for e in task.train] == [f"q{i}" for i in range(18)]
        assert [e["question"] for e in task.held_out] == ["q18", "q19"]


def test_eval_samples_limits_the_held_out_split(gsm8k, tmp_path):
    assert len(load(gsm8k, tmp_path, gsm8k / "data", eval_samples=7).held_out) == 7
    assert len(load(gsm8k, tmp_path, gsm8k / "data", eval_samples=0).held_out) == 200


@pytest.mark.skipif(not REAL_GSM8K.exists(), reason="GSM8K is not beside this repository")
def test_all_of_real_gsm8k(gsm8k, tmp_path):
    config = tba.parse(arguments(gsm8k, tmp_path / "out", dataset=REAL_GSM8K, eval_samples=0))
    task = tba.GSM8K(config, None)
    assert (len(task.train), len(task.held_out)) == (7473, 1319)
    for example in task.train + task.held_out:
        prompt = task.prompt(example)
        assert prompt.startswith("[MATH TASK] Problem:\n") and prompt.endswith("\n\nSolution:\n")
        gold = example["answer"].split("####")[1].strip().replace(",", "")
        assert tba.extract_number(example["answer"]) == float(gold)
    examples = task.held_out
    answers = [example["answer"] for example in examples]
    assert task.rewards(examples, answers, np.ones(len(answers), bool)).all()
    wrong = task.rewards(examples, answers[1:] + answers[:1], np.ones(len(answers), bool))
    assert wrong.mean() < 0.05
