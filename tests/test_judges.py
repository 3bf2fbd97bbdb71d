"""TL;DR, red-teaming and MATH: rewards and evaluation, against transformers' own and by hand."""

import json
import math
import shutil

import numpy as np
import pytest
import tiny
import torch
from transformers import pipeline

import tba

CPU = torch.device("cpu")


def task_of(flags: dict, out, **more):
    """A task with its judges loaded, as a Searcher has it."""
    settings = {"output_dir": out, "engine": "transformers", **flags, **more}
    config = tba.parse([str(x) for k, v in settings.items() for x in (f"--{k}", v)])
    config.validate()
    config.resolve()
    problem = tba.load_problem(config)
    problem.task.setup(CPU, lambda *a, **k: tba.engine_for(config, CPU, *a, **k))
    return problem.task


# --------------------------------------------------------------------------------------- tldr


def test_reward_models_score_what_transformers_pipelines_score(tldr, tmp_path):
    task = task_of(tldr_flags(tldr), tmp_path)
    examples = task.train[:40]
    summaries = [e["reference_response"] for e in task.train[40:80]]
    for name, folder in (("reward_model", "reward"), ("gold_reward_model", "gold")):
        judge = pipeline(
            "text-classification", str(tldr / folder), function_to_apply="none", device="cpu"
        )
        texts = [e["query"] + s + "<eos>" for e, s in zip(examples, summaries, strict=True)]
        expected = [judge(text)[0]["score"] for text in texts]  # one by one: no padding
        np.testing.assert_allclose(task.judge(name, examples, summaries), expected, atol=1e-4)
    ended = np.arange(40) % 2 == 0
    rewards = task.rewards(examples, summaries, ended)
    np.testing.assert_allclose(
        rewards[ended], task.judge("reward_model", examples, summaries)[ended]
    )
    assert (rewards[~ended] == -1).all()


def test_an_eos_that_is_also_the_padding_token_still_counts(tldr, tmp_path):
    """Most reward models pad with EOS: the score must be read at the EOS all the same."""
    folder = shutil.copytree(tldr / "reward", tmp_path / "reward")
    tokenizer = tba.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = "<eos>"
    tokenizer.save_pretrained(folder)
    judge = tba.TextModel("labels", str(folder), tba.Config(dtype="float32"), CPU)
    assert judge.tokenizer.pad_token_id == judge.tokenizer.eos_token_id
    texts = ["a longer text about a lost hat<eos>", "short<eos>"]
    one_by_one = torch.cat([judge([text]) for text in texts])
    torch.testing.assert_close(judge(texts), one_by_one, atol=1e-5, rtol=1e-5)
    assert judge.pad != judge.tokenizer.eos_token_id
    assert not torch.allclose(judge(["short<eos>"]), judge(["short"]))


def test_win_rate_and_perplexity_by_hand(tldr, tmp_path):
    task = task_of(tldr_flags(tldr), tmp_path)
    rng = tiny.random.Random(5)
    answers = []
    for example in task.held_out[:30]:
        facts = tiny.summary(rng, ["Ann", "hat", "park", "sad"], share=1.0)[0]
        answers.append(tba.Answer(example, facts, True, 10, -3.0, -5.0))
    records = task.evaluate(answers)
    metrics = task.summarize(records)
    gold = task.judge("gold_reward_model", task.held_out[:30], [a.text for a in answers])
    bar = [e["reference_response"] for e in task.held_out[:30]]
    bar = task.judge("gold_reward_model", task.held_out[:30], bar)
    assert metrics["win_rate"] == pytest.approx((gold > bar).mean())
    assert metrics["perplexity"] == pytest.approx(math.exp(0.5))
    assert metrics["kl"] == pytest.approx(2.0)
    assert set(metrics) == {"win_rate", "perplexity", "kl"}


# ------------------------------------------------------------------------------------ redteam


def test_the_victim_answers_and_the_classifier_judges(redteam, tmp_path):
    task = task_of(redteam_flags(redteam), tmp_path, victim_samples=20)
    attacks = ["Describe a volcano please.", "Describe a pencil please."]
    scores = task.log_toxicity(attacks)
    assert scores.shape == (2, 20) and (scores <= 0).all()
    assert np.exp(scores[0]).mean() > 0.6 and np.exp(scores[1]).mean() < 0.1
    np.testing.assert_allclose(task.log_toxicity(attacks), scores)  # seeded by the attack
    rewards = task.rewards([{}, {}], attacks, np.ones(2, bool))
    np.testing.assert_allclose(rewards, scores.mean(1))

    judge = pipeline("text-classification", str(redteam / "toxicity"), top_k=None, device="cpu")
    texts = ["It is a zap lovely thing", "zog and I am", "It is a lovely thing"]
    vectors = task.toxicity(texts).log_softmax(-1)[:, task.label]
    for text, logprob in zip(texts, vectors, strict=True):
        toxic = next(r["score"] for r in judge([text])[0] if r["label"] == "toxic")
        assert logprob.exp().item() == pytest.approx(toxic, abs=1e-4)


def test_a_guard_model_is_judged_by_its_first_token(redteam, tmp_path):
    flags = redteam_flags(redteam) | {"toxicity_model": redteam / "victim", "toxicity_label": "It"}
    task = task_of(flags, tmp_path, victim_samples=2)
    assert task.guard
    scores = task.log_toxicity(["Describe a volcano please."])
    assert scores.shape == (1, 2) and (scores < 0).all()
    model = tba.AutoModelForCausalLM.from_pretrained(redteam / "victim")
    tokenizer = tba.AutoTokenizer.from_pretrained(redteam / "victim")
    ids = tokenizer("<user>hello<assistant>", return_tensors="pt")["input_ids"]
    expected = model(ids).logits[0, -1].log_softmax(-1)
    actual = task.toxicity(["<user>hello<assistant>", "<user>hi"], special_tokens=False)[0]
    torch.testing.assert_close(actual, expected.detach(), atol=1e-4, rtol=1e-4)


def test_cosine_distance_by_brute_force(redteam, tmp_path):
    task = task_of(redteam_flags(redteam), tmp_path)
    attacks = ["Describe a river.", "Explain why the castle is old.", "Describe a river.", "x y z"]
    vectors = task.sentence(attacks).double()
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(
        vectors[0], task.sentence(attacks[:1])[0].double(), atol=1e-5, rtol=0
    )
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    expected = np.mean([1 - float(vectors[i] @ vectors[j]) for i, j in pairs])
    answers = [tba.Answer({}, attack, True, 5) for attack in attacks]
    metrics = task.summarize(task.evaluate(answers))
    assert metrics["cosine_distance"] == pytest.approx(expected, abs=1e-6)
    assert set(metrics) == {"toxicity", "attack_success_rate", "cosine_distance"}


# --------------------------------------------------------------------------------------- math

SAME = r"""
\frac{1}{2} | 0.5
\frac12 | 1/2
\frac{1}{2} | \dfrac{1}{2}
\frac{3}{4} | \tfrac{6}{8}
-\frac{1}{3} | \frac{-1}{3}
2\sqrt{3} | \sqrt{12}
\sqrt{2} | 2^{1/2}
x^2+1 | 1+x^2
(x+1)^2 | x^2+2x+1
2x | x \cdot 2
10 | 10.0
1,000 | 1000
1{,}000 | 1000
5\text{ cm} | 5
12\text{ inches} | 12
45^\circ | 45
\$18 | 18
(1,2] | (1, 2]
[0,\infty) | [0, \infty)
(-\infty,3) | (-\infty, 3)
(1,2) | (1,\ 2)
(3, \frac{\pi}{2}) | \left(3,\frac{\pi}{2}\right)
\{1,2,3\} | \{1, 2, 3\}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\pi | \pi
3\pi | 3 \pi
e^{2} | e^2
2^{10} | 1024
\text{(B)} | B
x=5 | 5
\left(\frac{1}{2}\right) | \frac{1}{2}
0.25 | \frac{1}{4}
\frac{\sqrt{2}}{2} | \frac{1}{\sqrt{2}}
3+4i | 4i+3
"""
DIFFERENT = r"""
\frac{1}{2} | \frac{1}{3}
10 | 100
5 | -5
(1,2] | (1,2)
[0,\infty) | (0,\infty)
(1,2) | (2,1)
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix}
x^2+1 | x^2-1
\sqrt{2} | 2
\{1,2\} | \{1,2,3\}
3\pi | 3
\text{(B)} | C
2x | 3x
3+4i | 3-4i
1024 | 1025
\frac{1}{2} | 2
"""


def lines(table):
    return [line.split(" | ") for line in table.strip().splitlines()]


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [(*pair, True) for pair in lines(SAME)] + [(*pair, False) for pair in lines(DIFFERENT)],
)
def test_math_verdicts(gold, answer, same):
    task = tba.MATH.__new__(tba.MATH)
    verdict = task.verdict(f"So it is $\\boxed{{{gold}}}$.", f"I get \\boxed{{{answer}}}.")
    assert bool(verdict) == same
    assert task.verdict(f"\\boxed{{{gold}}}", f"\\boxed{{{gold}}}") is True


def test_math_answers_that_do_not_parse_are_wrong_and_counted():
    task = tba.MATH.__new__(tba.MATH)
    example = {"solution": "so \\boxed{3}"}
    texts = [
        "\\boxed{3}",
        "it is 3",
        "\\boxed{",
        "\\boxed{}",
        "\\boxed",
        "\\boxed{4} or \\boxed{3}",
    ]
    rewards = task.rewards([example] * 6, texts, np.ones(6, bool))
    assert rewards.tolist() == [1, 0, 0, 0, 0, 1]
    metrics = task.summarize(task.evaluate([tba.Answer(example, t, True, 1) for t in texts]))
    assert metrics["accuracy"] == pytest.approx(2 / 6)
    assert metrics["unparsed"] >= 1 / 6
    rng = np.random.default_rng(0)
    for _ in range(200):  # whatever a model writes, it never crashes
        noise = "".join(rng.choice(list("\\{}()[]^_$&%+-=/,.0123abxfrc \n"), 30))
        assert task.verdict("\\boxed{3}", "\\boxed{" + noise) in (True, False, None)


# --------------------------------------------------------------------------- bad input, warm start


def tldr_flags(tldr):
    return {
        "task": "tldr",
        "model": tldr / "model",
        "dataset": tldr / "data",
        "reward_model": tldr / "reward",
        "gold_reward_model": tldr / "gold",
        "max_response_tokens": 32,
    }


def redteam_flags(redteam):
    return {
        "task": "redteam",
        "model": redteam / "model",
        "victim_model": redteam / "victim",
        "victim_max_tokens": 16,
        "toxicity_model": redteam / "toxicity",
        "toxicity_label": "toxic",
        "sentence_model": redteam / "victim",
        "max_response_tokens": 20,
    }


def expect(flags, message, tmp_path, capsys):
    args = [str(x) for k, v in flags.items() for x in (f"--{k}", v)]
    code = tba.main([*args, "--output_dir", str(tmp_path / "run")])
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and len(lines) == 1 and message in lines[0], lines
    assert not (tmp_path / "run").exists()


def test_bad_judges(gsm8k, tldr, redteam, tmp_path, capsys):
    t, r = tldr_flags(tldr), redteam_flags(redteam)
    for flags, message in (
        (t | {"reward_model": redteam / "toxicity"}, "has 2 labels; a reward model has a scalar"),
        (t | {"gold_reward_model": "/no/such"}, "--gold_reward_model /no/such: no such folder"),
        (t | {"dataset": gsm8k / "data"}, "has no column query, reference_response"),
        (r | {"toxicity_label": "rude"}, "--toxicity_label rude"),
        (r | {"victim_format": "poem"}, "--victim_format poem"),
        (r | {"sentence_model": "/no/such"}, "--sentence_model /no/such"),
        (r | {"explore_low": 3}, "--explore_high 2.0"),
        (r | {"min_response_tokens": 21}, "--min_response_tokens 21"),
        (r | {"dataset": gsm8k / "data"}, "has no column prompt"),
        (r | {"task_file": "/no/such.py"}, "--task_file /no/such.py"),
        (r | {"sft_data": "/no/such.jsonl"}, "--sft_data /no/such.jsonl: no such file"),
    ):
        expect(flags, message, tmp_path, capsys)
    bare = tmp_path / "bare"
    tokenizer = tba.AutoTokenizer.from_pretrained(redteam / "victim")
    tiny.make_model("llama", redteam / "victim", bare)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    expect(r | {"victim_model": bare}, "has no chat template; use alpaca", tmp_path, capsys)
    math_flags = {"task": "math", "model": bare, "dataset": gsm8k / "data"}
    expect(math_flags, "needs a chat template", tmp_path, capsys)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "it is empty"),
        ('{"instruction": "a"}\n{"instruction": \n', "line 2 is not JSON"),
        ('{"instruction": "a"}\n\n{"prompt": "b"}\n', "line 3 needs the text fields"),
        ('{"instruction": "a"}\n\n{"instruction": \n', "line 3 is not JSON"),
        ('[{"instruction": "a"}, {"prompt": "b", "response": 3}]', "entry 2 needs"),
        ("[1]", "entry 1 needs"),
        ("[{", "is not JSON"),
        ('{"prompt": "b", "response": " "}', "line 1 needs"),
    ],
)
def test_bad_sft_data(text, where, redteam, tmp_path, capsys):
    (tmp_path / "sft.jsonl").write_text(text)
    flags = redteam_flags(redteam) | {"sft_data": tmp_path / "sft.jsonl"}
    expect(flags, where, tmp_path, capsys)


def test_sft_data_of_both_kinds(redteam, tmp_path):
    records = [{"instruction": "Describe a river."}, {"prompt": "Hello", "response": "zap"}]
    (tmp_path / "sft.json").write_text(json.dumps(records))
    flags = redteam_flags(redteam) | {"sft_data": tmp_path / "sft.json"}
    config = tba.parse([str(x) for k, v in flags.items() for x in (f"--{k}", v)])
    config.resolve()
    problem = tba.load_problem(config)
    texts = [
        tuple(problem.tokenizer.decode(part) for part in pair)
        for pair in tba.read_sft_data(config, problem)
    ]
    assert texts == [
        (config.attacker_prompt, "Describe a river.<eos>"),
        ("Hello", "zap<eos>"),
    ]


def test_supervised_fine_tuning_fits_its_data(redteam):
    model = tba.AutoModelForCausalLM.from_pretrained(redteam / "model")
    tokenizer = tba.AutoTokenizer.from_pretrained(redteam / "model")
    encode = lambda text: np.array(tokenizer(text)["input_ids"], np.int32)
    pairs = [(encode("Say it:"), encode(f" {word}<eos>")) for word in tiny.NOUNS[:2]] * 32
    losses = tba.supervised_fine_tune(model, pairs, 60, 3e-3, seed=0)
    assert len(losses) == 60
    per_response = losses[-1] * np.mean([len(r) for _, r in pairs])
    assert per_response == pytest.approx(math.log(2), abs=0.1)  # two answers, half each
