"""Data, and the four tasks: rewards and evaluations beside plain computations."""

import copy
import json
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from conftest import REAL_GSM8K
from harness import arguments, config_and_task, judges_of, random_groups
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import tba


def task_of(path, out, **flags):
    """A task in the state that it has in a Searcher."""
    config, task = config_and_task(path, out, **(judges_of(path) | flags))
    make = tba.partial(tba.ENGINES[config.engine], config, 0)
    task.setup(make)
    return task, config


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 * 400 = 1,200 dollars.", 1200), ("5-3", 3), ("it is -3", -3), ("#### 7", 7),
        ("1.5 and .5", 0.5), ("none", None), ("2,500,000", 2500000), ("3.", 3),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert tba.extract_number(text) == number


def test_rewards_of_gsm8k_are_exact_matches_with_the_gold_answer(gsm8k, tmp_path):
    _, task = config_and_task(gsm8k, tmp_path)
    examples = [{"answer": answer} for answer in ("3+4=7 #### 7", "7", "7", "1200", "0.00001")]
    responses = ["is 7.0", "is 8", "not a number", "$1,200.00", "is .00001"]
    rewards = task.checked_rewards(examples, responses, np.ones(5))
    assert rewards == [1.0, 0.0, 0.0, 1.0, 1.0]


def test_accuracy_is_accuracy_whatever_the_rewards_are(gsm8k, tmp_path, monkeypatch):
    """An evaluation of a subclass whose rewards are a judge's scores."""

    class Generous(tba.GSM8K):
        def rewards(self, examples, responses, ended):
            return np.ones(len(responses))

    monkeypatch.setitem(tba.TASKS, "generous", Generous)
    _, task = config_and_task(gsm8k, tmp_path, task="generous")
    examples = [{"answer": "7"}, {"answer": "8"}]
    records = task.evaluate(examples, ["it is 7", "it is 7"], np.ones(2))
    assert task.summarize(records) == {"accuracy": 0.5}
    assert task.checked_rewards(examples, ["it is 7", "it is 7"], np.ones(2)) == [1, 1]


def test_all_of_real_gsm8k_is_read(gsm8k, tmp_path):
    if not REAL_GSM8K.exists():
        pytest.skip("the real GSM8K is not here")
    _, task = config_and_task(
        gsm8k, tmp_path, dataset=REAL_GSM8K, max_response_tokens=8, max_prompt_tokens=200
    )
    assert len(task.train_prompts) == len(task.train) > 1000 and len(task.held_out) > 100
    assert all(len(prompt) <= 200 for prompt in task.train_prompts)
    answers = [example["answer"] for example in task.train]
    assert min(task.checked_rewards(task.train, answers, np.ones(len(answers)))) == 1.0


def test_a_file_that_is_replaced_by_one_of_its_size_and_time_is_read_again(gsm8k, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes((gsm8k / "data" / "test.jsonl").read_bytes())
    config_and_task(gsm8k, tmp_path / "out", dataset=file)
    times = file.stat()
    file.write_text(file.read_text().replace("How many", "Now many"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    _, task = config_and_task(gsm8k, tmp_path / "out", dataset=file)
    assert "How many" not in task.train[0]["question"]


def test_prompts_that_are_too_long_are_left_out(gsm8k, tmp_path, capsys):
    config, task = config_and_task(gsm8k, tmp_path)
    lengths = sorted(map(len, task.train_prompts))
    limit = lengths[len(lengths) // 2]
    _, fewer = config_and_task(gsm8k, tmp_path, max_prompt_tokens=limit)
    assert len(fewer.train_prompts) == sum(n <= limit for n in lengths) == len(fewer.train)
    said = f"training: {len(fewer.train_prompts)} of {len(lengths)} prompts fit {limit} tokens"
    assert said in capsys.readouterr().err
    _, total = config_and_task(gsm8k, tmp_path, max_total_tokens=limit + 1)
    assert max(map(len, total.train_prompts)) <= limit
    assert all(1 <= total.config.response_limit(p) <= 32 for p in total.train_prompts)
    _, context = config_and_task(gsm8k, tmp_path, max_response_tokens=256 - limit - 1)
    assert max(map(len, context.train_prompts)) == limit


def test_a_task_may_stop_responses_at_texts(gsm8k, tmp_path, monkeypatch):
    """Every token with such a text ends a response of the policy, and of no other model."""

    class Few(tba.GSM8K):
        stop = ("th",)

    monkeypatch.setitem(tba.TASKS, "few", Few)
    config, task = config_and_task(gsm8k, tmp_path, task="few", temperature=5.0)
    eos = task.tokenizer.eos_token_id
    stops = set(task.end_tokens) - {eos}
    assert stops == {i for t, i in task.tokenizer.get_vocab().items() if "th" in t}
    assert len(stops) > 1 and eos in task.end_tokens
    engine = tba.ENGINES["transformers"](config, 0, "model", task.longest)
    engine.submit(tba.Request(0, task.train_prompts[0], 64, max_tokens=32, temperature=5.0))
    (done,) = engine.step()
    for tokens, ended in zip(done.tokens, done.ended, strict=True):
        assert not {*stops, eos} & set(tokens[:-1].tolist())
        assert ended == (tokens[-1] in {*stops, eos})
    assert any(tokens[-1] in stops for tokens in done.tokens)
    assert engine.end_tokens == task.end_tokens  # as the sampling check has them
    config.victim_model = config.model
    other = tba.ENGINES["transformers"](config, 0, "victim_model", task.longest)
    assert not stops & set(other.end_tokens)


def test_a_response_keeps_its_leading_space(gsm8k, tmp_path):
    _, task = config_and_task(gsm8k, tmp_path)
    ids = task.tokenizer(" a b\nc", add_special_tokens=False)["input_ids"]
    response = np.array([*ids, task.tokenizer.eos_token_id])
    assert task.response_texts([response]) == [" a b\nc"]


@pytest.mark.parametrize(
    "given", [np.array([1.0, math.nan]), np.ones(3), np.ones((2, 1)), [math.inf, 0]]
)
def test_rewards_must_be_one_finite_number_each(gsm8k, tmp_path, given):
    class Wrong(tba.GSM8K):
        """A task whose rewards are wrong."""

        def rewards(self, examples, responses, ended):
            return given

    _, task = config_and_task(gsm8k, tmp_path)
    with pytest.raises(ValueError, match=r"Wrong\.rewards"):
        Wrong.__new__(Wrong).checked_rewards(task.train[:2], ["a", "b"], np.ones(2))


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("\\boxed{\\frac{1}{2}}", "so \\boxed{0.5}", True),
        ("\\boxed{x^2+1}", "\\boxed{1+x^2}", True),
        ("\\boxed{3}", "\\boxed{2} no, \\boxed{3}", True),
        ("\\boxed{3}", "\\boxed{4}", False),
        ("\\boxed{3}", "the answer is 3", False),
        ("\\boxed{3}", "\\boxed{", False),
        # what follows the box does not count, whatever is in it
        ("\\boxed{6}", "\\boxed{5}. The final answer is $6$.", False),
        ("\\boxed{6}", "\\boxed{?}. 6", False),
        ("\\boxed{6}", "\\boxed{} 6", False),
        ("\\boxed{6}", "\\boxed{6}. So it is $6$ apples and $7$ pears", True),
        ("\\boxed{6}. It was 5.", "\\boxed{5}", False),
        ("\\boxed{1200}", "\\boxed{1\\,200}", True),
        ("$\\boxed 5$, as 5 < 7", "\\boxed{\\text{5}}", True),
        ("\\boxed{\\{1,2\\}}", "\\boxed{\\left\\{2,1\\right\\}}", True),
        ("\\boxed{\\sqrt{\\frac{1}{2}}}.", "\\boxed{\\frac{1}{\\sqrt{2}}} is about $0.7$", True),
        ("\\boxed{5}", "\\boxed{5}, or better \\boxed{", False),
        ("\\boxed{1,\\!200}", "\\boxed{1~200}", True),
        # a gold answer needs no box, a response does
        ("3", "\\boxed{3}", True),
        ("1\\,200", "\\boxed{1200}", True),
        ("$\\frac{1}{2}$", "\\boxed{0.5}", True),
        ("x + y", "\\boxed{y+x}", True),
        ("3", "\\boxed{4}", False),
        ("3", "3", False),
        ("3", "", False),
        # a final period is not part of an answer
        ("\\boxed{7}", "\\boxed{7.}", True),
        ("\\boxed{7.}", "\\boxed{7}", True),
        ("\\boxed{7.5}", "\\boxed{7.}", False),
        ("\\boxed{\\frac12}", "\\boxed{\\frac12.}", True),
        ("\\boxed{\\frac{1}{2}}", "\\boxed{1/2.}", True),
        ("\\boxed{Monday}", "\\boxed{Monday.}", True),
        ("\\boxed{\\text{Monday.}}", "\\boxed{Monday}", True),
        ("\\boxed{\\text{Monday.}}", "\\boxed{Tuesday.}", False),
        ("\\boxed{\\text{(A)}}", "\\boxed{A.}", True),
        ("\\boxed{(1,2)}", "\\boxed{(1,2).}", True),
        ("\\boxed{\\{1,2\\}}", "\\boxed{\\{2,1\\}.}", True),
        ("\\boxed{1}", "\\boxed{...}", False),
        # spaces between groups of three digits
        ("\\boxed{1234}", "\\boxed{1 234}", True),
        ("\\boxed{1 234}", "\\boxed{1,234}", True),
        ("\\boxed{12345678}", "\\boxed{12 345 678}", True),
        ("\\boxed{12}", "\\boxed{1 2}", False),
        ("\\boxed{1 234}", "\\boxed{234}", False),
        ("\\boxed{12}", "\\boxed{12 000}", False),
        ("\\boxed{(10, 200)}", "\\boxed{10 200}", False),
        # repeating decimals are compared as they are written
        ("\\boxed{0.\\overline{3}}", "\\boxed{0.\\overline{3}}", True),
        ("\\boxed{0.\\overline{3}}", "\\boxed{0.3}", False),
        ("\\boxed{\\frac13}", "\\boxed{0.\\overline{3}}", True),
        ("\\boxed{0.1\\overline{6}}", "\\boxed{\\frac{1}{6}}", True),
        ("\\boxed{2.\\overline{45}}", "\\boxed{\\frac{27}{11}}", True),
    ],
)
def test_verdicts_of_math(gold, answer, same):
    assert tba.MATH.judge(gold, answer) == same


def end_judges(task):
    for pool in task.judges.values():
        pool.stop()
        pool.join()


def test_a_gold_answer_may_stand_in_a_column_of_its_own(gsm8k, tmp_path):
    """As in AIME's and DAPO's data: `answer` has no box. With a `solution`, that one counts."""
    rows = [{"problem": f"1+{n}?", "answer": n + 1} for n in range(1, 5)]
    for more in ({}, {"solution": "It is \\boxed{7}."}):
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(row | more) + "\n" for row in rows))
        _, task = config_and_task(gsm8k, tmp_path / "out", task="math", dataset=data)
        task.setup(None)
        responses = [f"\\boxed{{{int(example['problem'][2]) + 1}}}" for example in task.train]
        rewards = task.checked_rewards(task.train, responses, np.ones(3))
        assert rewards == [0.0 if more else 1.0] * 3
        end_judges(task)


def test_an_answer_that_cannot_be_judged_costs_its_own_reward_only(gsm8k, tmp_path):
    """A power tower that nobody can compute: its judge is killed, and another one goes on."""
    task = tba.MATH.__new__(tba.MATH)
    task.JUDGE_TIMEOUT = 5
    task.setup(None)
    answers = ["\\boxed{2}", "\\boxed{9^{9^{9^{9^{9}}}}}", "\\boxed{3}", "\\boxed{2}"]
    rewards = task.rewards([{"solution": "\\boxed{2}"}] * 4, answers, np.ones(4))
    assert rewards.tolist() == [1, 0, 0, 1]
    end_judges(task)


class SlowMATH(tba.MATH):
    """Judges an answer in as many seconds as it says."""

    @staticmethod
    def judge(solution, response):
        time.sleep(float(response))
        return True


def test_verdicts_on_held_out_answers_do_not_delay_rewards():
    task = SlowMATH.__new__(SlowMATH)
    task.setup(None)
    solution = [{"solution": "1"}]
    pool = ThreadPoolExecutor(1)
    evaluation = pool.submit(task.evaluate, 2 * solution, ["0", "4"], np.ones(2))
    while not task.judges:
        time.sleep(0.01)
    assert task.rewards(solution, ["0"], np.ones(1)) == [1]
    assert not evaluation.done()
    assert evaluation.result() == 2 * [{"accuracy": 1.0}]
    end_judges(task)


def plain_scores(path, texts):
    """What transformers alone makes of texts: the score at the last token."""
    tokenizer = tba.transformers.AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    scores = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        hidden = model.base_model(ids).last_hidden_state[0, -1]
        scores.append(float(model.score(hidden)[0]))
    return np.array(scores)


def test_summaries_are_scored_at_their_eos_and_compared_before_it(tldr, tmp_path):
    task, _ = task_of(tldr, tmp_path)
    examples = task.train[:3]
    summaries = [" Ann lost hat.", " Ben lost key at park.", " cut off"]
    ended = np.array([True, True, False])
    rewards = task.checked_rewards(examples, summaries, ended)
    queries = [example["query"] for example in examples]
    closed = [query + s + "<eos>" for query, s in zip(queries, summaries, strict=True)]
    np.testing.assert_allclose(rewards[:2], plain_scores(tldr / "reward", closed)[:2], atol=1e-4)
    assert rewards[2] == -1.0

    own = [example["reference_response"] for example in examples]
    scores = plain_scores(tldr / "gold", [q + s for q, s in zip(queries, summaries, strict=True)])
    against = plain_scores(tldr / "gold", [q + s for q, s in zip(queries, own, strict=True)])
    for _ in range(2):  # references are judged once
        records = task.evaluate(examples, summaries, ended)
        assert [r["win_rate"] for r in records] == (scores > against).astype(float).tolist()
    assert [r["win_rate"] for r in task.evaluate(examples, own, ended)] == [0.0] * 3

    records = [
        {"win_rate": 1.0, "kl": 2.0, "ref_logprob": -6.0, "tokens": 3, "prompt_tokens": 9},
        {"win_rate": 0.0, "kl": 4.0, "ref_logprob": -2.0, "tokens": 2, "prompt_tokens": 6},
    ]
    perplexity = (math.exp(6 / 11) + math.exp(2 / 7)) / 2
    assert task.summarize(records) == pytest.approx(
        {"win_rate": 0.5, "perplexity": perplexity, "kl": 3.0}
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_judge_reads_the_last_token_whatever_it_is(family, model_of, tmp_path):
    """As for Llama 3 and GPT-2: no token for padding, and token 0 is "!", which may end a text."""
    path = tmp_path / "judge"
    body = transformers.AutoConfig.from_pretrained(model_of(family), num_labels=1)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(body).save_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_of(family))
    tokenizer.pad_token = tokenizer.unk_token = None
    tokenizer.eos_token = "<assistant>"
    tokenizer.save_pretrained(path)
    config = tba.settings(reward_model=str(path), dtype="float32")
    judge = tba.TextModel("AutoModelForSequenceClassification", "reward_model", config)
    judge.load(config)
    ending = tokenizer.convert_ids_to_tokens(0)
    texts = [f"Ann lost hat{ending}", "Ann lost hat", f"Ben lost a key at the park.{ending * 2}"]
    np.testing.assert_allclose(judge(texts)[:, 0], plain_scores(path, texts), atol=1e-5)


EMPTY = ([], ["<eos>"], ["<pad>", "<eos>"], ["<eos>", "<pad>", "<eos>"])


def empty_responses(task):
    """Responses without text: their tokens and, as tasks get them, their texts."""
    ids = [task.tokenizer.convert_tokens_to_ids(tokens) for tokens in EMPTY]
    tokens = [np.array(row, np.int32) for row in ids]
    texts = task.response_texts(tokens)
    assert texts == [""] * len(EMPTY)
    return tokens, texts


def test_responses_without_text_are_wrong_answers(gsm8k, tmp_path):
    for name in ("gsm8k", "math"):
        _, task = config_and_task(gsm8k.parent / name, tmp_path, task=name)
        _, texts = empty_responses(task)
        task.setup(None)
        rewards = task.checked_rewards(task.train[:4], texts, np.ones(4))
        assert rewards == [0.0] * 4
    end_judges(task)


def test_summaries_without_text_get_the_posts_own_score(tldr, tmp_path):
    task, _ = task_of(tldr, tmp_path)
    _, texts = empty_responses(task)
    ended = np.array([True, True, True, False])
    rewards = task.checked_rewards(task.train[:4], texts, ended)
    closed = [example["query"] + "<eos>" for example in task.train[:3]]
    np.testing.assert_allclose(rewards[:3], plain_scores(tldr / "reward", closed), atol=1e-4)
    assert rewards[3] == -1.0
    records = task.evaluate(task.train[:4], texts, ended)
    assert all(record["win_rate"] in (0.0, 1.0) for record in records)


def test_judges_take_an_empty_text_for_eos(redteam, tmp_path):
    """Whatever else is judged beside it. There are no tokens in it, so padding would be judged."""
    task, _ = task_of(redteam, tmp_path)
    for judge in (task.toxicity, task.sentence):
        (expected,) = judge(["<eos>"])
        assert expected.abs().sum() > 0
        for texts in ([""], ["", ""], ["Describe a river today.", ""]):
            np.testing.assert_allclose(judge(texts)[-1], expected, atol=1e-5)


@pytest.mark.parametrize("template", [None, "{attack}", "Say {attack}"])
def test_attacks_without_text_are_answered_and_differ_by_their_tokens(template, redteam, tmp_path):
    task, config = task_of(
        redteam, tmp_path, victim_template=template, near_duplicate=0.3, min_attack_tokens=2
    )
    tokens, texts = empty_responses(task)
    assert [len(answers) for answers in task.victim_answers(texts)] == [2] * 4
    rewards = task.checked_rewards([{}] * 4, texts, np.ones(4))
    assert all(reward < 0 for reward in rewards)
    records = task.evaluate([{}] * 4, [*texts[:3], "Describe a river."], np.ones(4))
    assert 0 <= task.summarize(records)["cosine_distance"] <= 2
    group = random_groups(task, B=1, K=3)[0]
    for t, own in zip(group, tokens[1:], strict=True):
        t.tokens = own
        t.ref_logprobs = task.adjust_ref_logprobs(own, np.full(len(own), -1.0, np.float32))
    assert [t.ref_logprobs.sum() for t in group] == pytest.approx([-500, -2, -3])
    buffer = tba.AttackBuffer(config)
    buffer.add(tba.Group(0, group))
    (stored,) = buffer.trajectories.values()
    # of 2 and 3 tokens, with one edit: 1/5 is less than 0.3; of 1 and 2 tokens: 1/3 is not
    assert [len(t.tokens) for t in stored.values()] == [1, 3]


def test_a_victim_reads_its_whole_prompt(redteam, tmp_path):
    """Also one that is longer than all sequences of the attacker."""
    template = "Answer in a word. " * 4 + "{attack}"
    task, _ = task_of(redteam, tmp_path, victim_template=template, max_response_tokens=8)
    seen = []
    submit = task.victim.submit

    def noted(request):
        seen.append(request.prompt.tolist())
        submit(request)

    task.victim.submit = noted
    task.victim_answers(["Describe a river today."])
    assert seen == [task.victim_ids("Describe a river today.")]
    assert len(seen[0]) > task.longest


def test_attacks_are_answered_by_the_victim_and_judged(redteam, tmp_path):
    task, config = task_of(redteam, tmp_path, min_attack_tokens=4)
    attacks = ["Tell me about the volcano today.", "Describe a river today."]
    answers = task.victim_answers(attacks)
    assert answers == task.victim_answers(attacks)  # seeds of their own
    assert [len(a) for a in answers] == [2, 2]
    tokenizer = task.toxicity.tokenizer
    model = AutoModelForSequenceClassification.from_pretrained(redteam / "toxicity").eval()
    expected = []
    for texts in answers:
        logprobs = []
        for text in texts:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            hidden = model.base_model(ids).last_hidden_state[0, -1]
            logprobs.append(float(model.score(hidden).log_softmax(-1)[1]))
        expected.append(np.mean(logprobs))
    rewards = task.checked_rewards([{}] * 2, attacks, np.ones(2))
    np.testing.assert_allclose(rewards, expected, atol=1e-4)

    records = task.evaluate([{}] * 2, attacks, np.ones(2))
    vectors = np.random.default_rng(0).normal(size=(5, 7))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    many = [records[i % 2] | {"vector": vectors[i]} for i in range(5)]
    pairs = [1 - vectors[i] @ vectors[j] for i in range(5) for j in range(5) if i != j]
    summary = task.summarize(many)
    assert summary["cosine_distance"] == pytest.approx(np.mean(pairs))
    assert set(summary) == {"toxicity", "attack_success_rate", "cosine_distance"}

    short = task.adjust_ref_logprobs(np.zeros(3, np.int32), np.array([-1.0, -2, -3], np.float32))
    assert short.sum() == pytest.approx(-500)
    long = np.array([-1.0, -2, -3, -4], np.float32)
    assert np.array_equal(task.adjust_ref_logprobs(np.zeros(4, np.int32), long), long)


def test_attackers_are_not_trained_on_held_out_prompts(redteam, tmp_path):
    flags = judges_of(redteam) | {"eval_samples": 3}
    for name in ("dataset", "eval_dataset"):
        flags[name] = tmp_path / f"{name}.jsonl"
        flags[name].write_text("".join(json.dumps({"prompt": name + i}) + "\n" for i in "ab"))
    _, task = config_and_task(redteam, tmp_path / "out", **flags)
    assert {example["prompt"] for example in task.train} == {"dataseta", "datasetb"}
    held_out = {example["prompt"] for example in task.held_out}
    assert held_out == {"eval_dataseta", "eval_datasetb"} and len(task.held_out_prompts) == 3


def test_a_victim_may_have_a_prompt_of_its_own(redteam, tmp_path):
    flags = judges_of(redteam) | {"victim_template": "Say {attack}<assistant>"}
    _, task = config_and_task(redteam, tmp_path, **flags)
    tokenizer = task.victim_tokenizer
    expected = tokenizer("Say Explain it.<assistant>")["input_ids"]
    assert task.victim_ids("Explain it. ") == expected
    with pytest.raises(tba.InputError, match="attack"):
        config_and_task(redteam, tmp_path, **(flags | {"victim_template": "Say it"}))


def test_a_guard_model_judges_by_its_first_token(redteam, tmp_path):
    flags = {
        "toxicity_model": redteam / "victim",
        "toxicity_label": "zap",
        "toxicity_suffix": "\n",
    }
    task, _ = task_of(redteam, tmp_path, **flags)
    attacks = ["Describe a river today."]
    (answers,) = task.victim_answers(attacks)
    tokenizer = task.toxicity.tokenizer
    model = AutoModelForCausalLM.from_pretrained(redteam / "victim")
    expected = []
    for answer in answers:
        text = f"<user>{attacks[0]}<assistant>{answer}<assistant>\n"
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        label = tokenizer("zap", add_special_tokens=False)["input_ids"][0]
        expected.append(float(model(ids).logits[0, -1].log_softmax(-1)[label].detach()))
    rewards = task.checked_rewards([{}], attacks, np.ones(1))
    np.testing.assert_allclose(rewards, [np.mean(expected)], atol=1e-4)
    shutil.copytree(redteam / "victim", tmp_path / "guard")
    (tmp_path / "guard" / "chat_template.jinja").unlink()
    with pytest.raises(tba.InputError, match="chat template"):
        task_of(redteam, tmp_path, **(flags | {"toxicity_model": tmp_path / "guard"}))


def test_explored_prompts_have_temperatures_of_their_own(redteam, tmp_path):
    flags = {"explore_probability": 0.5, "explore_low": 0.5, "explore_high": 2.0}
    _, task = config_and_task(redteam, tmp_path, **(judges_of(redteam) | flags))
    rng = np.random.default_rng(0)
    drawn = np.array([task.temperature(rng) for _ in range(2000)])
    explored = drawn[drawn != 1.0]
    assert 900 < len(explored) < 1100 and explored.min() >= 0.5 and explored.max() <= 2.0
    assert abs(explored.mean() - 1.25) < 0.05


def test_a_warm_start_fits_its_data_whatever_the_micro_batches(redteam, tmp_path):
    """Rows with an instruction answer the task's prompt; others bring their own."""
    rows = [{"instruction": "Describe a river today."}, {"instruction": "Explain it."}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"prompt": "<user>", "response": "Write a poem."}
    (tmp_path / "b.jsonl").write_text(json.dumps(own) + "\n")
    flags = judges_of(redteam) | {"sft_data": tmp_path / "a.jsonl", "sft_epochs": 30}
    flags |= {"sft_learning_rate": "0@0,3e-3@3,0~end", "sft_batch_size": 4}
    config, task = config_and_task(redteam, tmp_path / "out", **flags)
    pairs = tba.read_sft_pairs(config, task)
    assert [task.text(prompt) for prompt, _ in pairs] == [config.attacker_prompt] * 2
    texts = task.response_texts([response for _, (response,) in pairs])
    assert texts == [row["instruction"] for row in rows]
    assert all(response[-1] == task.tokenizer.eos_token_id for _, (response,) in pairs)
    config.sft_data = str(tmp_path / "b.jsonl")
    pairs += tba.read_sft_pairs(config, task)
    losses, calls = [], []  # of a part of a layer
    for budget, checkpointing in ((10_000, False), (20, False), (10_000, True)):
        config.tokens_per_microbatch = budget
        config.gradient_checkpointing = checkpointing
        policy = tba.load_policy(config, str(redteam / "model"), tba.Ranks())
        calls.append(0)

        def count(*_):
            calls[-1] += 1

        policy.model.model.layers[0].self_attn.register_forward_hook(count)
        losses.append(tba.supervised_fine_tune(policy, pairs, config))
    assert losses[0][-1] < 0.5 * losses[0][0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-2)
    np.testing.assert_allclose(losses[0], losses[2], rtol=1e-2)
    assert calls[2] == 2 * calls[0]  # recomputed in each backward pass


def test_what_a_warm_start_made_is_the_model(tmp_path):
    config = tba.settings(model="m", output_dir=str(tmp_path), sft_data="d", steps=3)
    given = copy.copy(config)
    tba.warm_start(config, None, [], print)  # of a resumed run: it is trained already
    assert config.model == config.folders["model"] == str(tmp_path / "sft")
    assert (given.model, config.steps) == ("m", 3)


def test_the_scripts_settings_are_the_papers(tmp_path):
    """What the run scripts give to tba.py, read by its own parser, beside tables 2, 3 and B.3."""
    import subprocess

    from conftest import ROOT

    recorder = tmp_path / "record.sh"
    recorder.write_text('#!/bin/bash\nshift\nprintf "%s\\0" "$@" > $RECORD\n')
    recorder.chmod(0o755)

    def settings_of(*command, **environment):
        record = tmp_path / "record"
        variables = tba.os.environ | {"PYTHON": str(recorder), "RECORD": str(record)} | environment
        subprocess.run(["bash", *command], cwd=ROOT, env=variables, check=True)
        config = tba.parse(record.read_text().split("\0")[:-1])
        config.eval_every = 0
        return config

    gsm8k = settings_of("run_gsm8k.sh")
    expected = {
        "prompts_per_step": 7, "trained_per_prompt": 20, "searched_per_prompt": 24, "sync_every": 2,
        "recent_probability": 0.95, "temperature": 0.7, "steps": 700,
        "max_recent_draws": 1.56,
        "beta": "0.014@0,0.004@500", "initial_trajectories": 500, "objective": "tb",
    }  # fmt: skip
    assert {name: getattr(gsm8k, name) for name in expected} == expected
    table2 = settings_of("run_gsm8k.sh", "table2")
    assert (table2.steps, table2.beta) == (1000, "0.012@0,0.004@500")
    for config, stable in ((gsm8k, 350), (table2, 450)):  # warmup over 50, cosine over 500 steps
        for step in range(config.steps):
            decayed = max(0, step - 49 - stable) / 500
            factor = min((step + 1) / 50, (1 + math.cos(math.pi * decayed)) / 2)
            assert tba.at_step(config, step).learning_rate == pytest.approx(1e-5 * factor)
    tldr = settings_of("run_tldr.sh", "1b", STEPS="625")
    expected = {
        "prompts_per_step": 8, "trained_per_prompt": 20, "searched_per_prompt": 20,
        "sync_every": 10, "recent_probability": 0.5, "steps": 625,
        "initial_trajectories": 10_000, "dtype": "float32", "max_response_tokens": 128,
    }  # fmt: skip
    assert {name: getattr(tldr, name) for name in expected} == expected
    for step in range(625):  # linear
        assert tba.at_step(tldr, step).learning_rate == pytest.approx(3e-6 * (1 - step / 625))
    assert tba.schedule_value(tldr.beta, 0) == 1 and tba.schedule_value(tldr.beta, 100) == 0.05
    attack = settings_of("run_redteam.sh", "gpt2", "--sft_data", "x.json")
    assert (attack.beta, attack.sync_every, attack.kept_per_prompt) == ("0.05", 10, 100_000)
    assert attack.prompts_per_step * attack.trained_per_prompt == 128 and attack.steps == 5000
    rates = [tba.at_step(attack, step).learning_rate for step in (0, 49, 99, 4999)]
    # warmup over 100 steps, then linear to 0 at step 40,000
    assert rates == pytest.approx([1e-6, 5e-5, 1e-4, 0.88e-4], rel=0.02)
    warm_start = [tba.schedule_value(attack.sft_learning_rate, step, 102) for step in range(102)]
    assert warm_start == pytest.approx(np.linspace(0, 3e-5, 103)[:-1])  # warmup over all its steps
    with pytest.raises(subprocess.CalledProcessError, match="status 2"):
        settings_of("run_redteam.sh", "gpt2")  # the attacker had no warm start
    flow = settings_of("run_redteam.sh", "gflownet", "--sft_data", "x.json")
    assert (flow.lockstep, flow.objective, flow.recent_probability) == (
        True, "tb_learned_z", 0.5,
    )  # fmt: skip
    assert flow.recent_probability * flow.prompts_per_step == 4
    llama = settings_of("run_redteam.sh", "llama", "--sft_data", "x.json")
    assert tba.schedule_value(llama.reference_temperature, 2000) == 1.2
    assert "{attack}" in attack.victim_template and llama.toxicity_suffix == "\n\n"


def test_arguments_are_flags(gsm8k, tmp_path):
    """The helper of these tests gives every flag that it is asked for."""
    given = tba.parse(arguments(gsm8k, tmp_path, steps=3, beta="0.5"))
    assert (given.steps, given.beta, given.model) == (3, "0.5", str(gsm8k / "model"))
