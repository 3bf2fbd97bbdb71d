"""TL;DR, red-teaming and MATH: rewards and evaluation, against transformers' own and by hand."""

import json
import math
import pickle
import queue
import shutil
import subprocess
import sys
import time
from collections import deque
from functools import partial

import harness
import numpy as np
import pytest
import tiny
import torch
from transformers import pipeline

import tba

CPU = torch.device("cpu")


def problem_of(flags: dict, out, **more):
    """A config and what every process knows before it loads a model."""
    settings = {"output_dir": out, "engine": "transformers", **flags, **more}
    config = tba.parse([str(x) for k, v in settings.items() for x in (f"--{k}", v)])
    tba.resolve(config)
    tba.check_settings(config)
    return config, tba.load_problem(config)


def task_of(flags: dict, out, **more):
    """A task with its judges loaded, as a Searcher has it."""
    config, problem = problem_of(flags, out, **more)
    problem.task.setup(CPU, partial(tba.engine_for, problem, config, CPU, 0))
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
        rewards[ended], task.judge("reward_model", examples, summaries)[ended], rtol=1e-5
    )
    assert (rewards[~ended] == -1).all()


def test_an_eos_that_is_also_the_padding_token_still_counts(tldr, tmp_path):
    """Most reward models pad with EOS: the score must be read at the EOS all the same."""
    folder = shutil.copytree(tldr / "reward", tmp_path / "reward")
    tokenizer = tba.transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = "<eos>"
    tokenizer.save_pretrained(folder)
    saved = tba.transformers.AutoTokenizer.from_pretrained(folder)
    assert saved.pad_token_id == saved.eos_token_id
    config = tba.Config(reward_model=str(folder), dtype="bfloat16")
    judge = tba.TextModel("labels", "reward_model", config, CPU)
    assert judge.model.dtype == torch.float32  # bfloat16 scores would be coarse
    texts = ["a longer text about a lost hat<eos>", "short<eos>"]
    one_by_one = torch.cat([judge([text]) for text in texts])
    torch.testing.assert_close(judge(texts), one_by_one, atol=1e-5, rtol=1e-5)
    assert judge.tokenizer.pad_token_id != judge.tokenizer.eos_token_id
    assert not torch.allclose(judge(["short<eos>"]), judge(["short"]))


def test_win_rate_and_perplexity_by_hand(tldr, tmp_path):
    task = task_of(tldr_flags(tldr), tmp_path)
    rng = tiny.random.Random(5)
    examples = task.held_out[:30]
    answers = [tiny.summary(rng, ["Ann", "hat", "park", "sad"], share=1.0)[0] for _ in examples]
    answers[0] = examples[0]["reference_response"]  # the same is no win
    records = task.evaluate(examples, answers, np.ones(30, bool))
    for record in records:  # a Searcher adds these
        record |= {"tokens": 10, "prompt_tokens": 90, "ref_logprob": -5.0, "kl": 2.0}
    records[3]["ref_logprob"] = -200.0
    metrics = task.summarize(records)
    bar = [e["reference_response"] for e in examples]
    # in one call: batches of other lengths round differently
    gold, bar = np.split(task.judge("gold_reward_model", examples * 2, answers + bar, False), 2)
    assert metrics["win_rate"] == pytest.approx((gold > bar).mean()) and not gold[0] > bar[0]
    # the paper's: over query and summary, and exp before the mean
    assert metrics["perplexity"] == pytest.approx((29 * math.exp(0.05) + math.exp(2)) / 30)
    assert metrics["response_perplexity"] == pytest.approx(math.exp((29 * 5 + 200) / 300))
    assert metrics["kl"] == pytest.approx(2.0)
    assert list(metrics) == ["win_rate", "perplexity", "kl", "response_perplexity"]


def test_equal_answers_have_equal_scores_and_an_eos_is_not_doubled(tldr, tmp_path):
    task = task_of(tldr_flags(tldr), tmp_path)
    texts = [" Ann lost a hat.", " a much longer one about someone.", " Ann lost a hat.<eos>"]
    scores = task.judge("gold_reward_model", [task.train[0]] * 3, texts)
    assert scores[0] == scores[2] != scores[1]


def test_a_searcher_measures_tokens_and_kl_of_the_answers_it_evaluates(tldr, tmp_path):
    """Against full logits of policy and reference; answers are judged a few at a time."""
    config, problem = problem_of(tldr_flags(tldr), tmp_path, temperature=0.7)
    queues = tba.Link(0, 0, *(queue.Queue() for _ in range(3)), {})
    searcher = tba.Searcher(config, problem, queues, 0, 0)
    policy = tba.load_model(config, torch.float32, CPU)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    searcher.engine.load_weights(tba.checkpoint_state(policy).items())
    searcher.begin_evaluation(3, list(range(40)))
    answers, messages = {}, []
    while searcher.engine.unfinished:
        for completion in searcher.engine.step():
            answers[completion.request.id[1]] = completion.tokens[0]
            searcher.handle_completions([completion])
    while searcher.answers:
        searcher.judge_some()
    while not queues.messages.empty():
        messages.append(queues.messages.get())
    assert searcher.ungenerated == 0
    parts = [message for searcher, start, message in messages]
    assert len(parts) >= 2 and {part.evaluation for part in parts} == {3}
    assert all(len(part.records) <= searcher.JUDGED_AT_ONCE for part in parts)
    assert sorted(parts[0].answers) == list(range(tba.ANSWERS_SHOWN)) and not parts[1].answers
    records = {row: record for part in parts for row, record in part.records.items()}
    assert sum(len(part.records) for part in parts) == len(records)
    assert sorted(records) == list(range(40))
    reference = tba.load_model(config, torch.float32, CPU)
    for row in range(40):
        prompt, tokens = problem.held_out[row], answers[row]
        ids = torch.from_numpy(np.concatenate([prompt, tokens])).long()
        logprobs = []
        for model in (policy, reference):
            steps = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            logprobs.append(steps.gather(1, ids[len(prompt) :, None]).sum().item())
        assert records[row]["tokens"] == len(tokens)
        assert records[row]["ref_logprob"] == pytest.approx(logprobs[1], abs=1e-3)
        assert records[row]["kl"] == pytest.approx(logprobs[0] - logprobs[1], abs=2e-3)
    assert max(abs(record["kl"]) for record in records.values()) > 0.1


def test_the_gold_score_is_read_before_the_eos_or_at_it(tldr, tmp_path):
    """Against the model's hidden states: of the summary's last token, or of the EOS after it."""
    example = {"query": "A post.", "reference_response": " A summary."}
    tokenizer = tba.transformers.AutoTokenizer.from_pretrained(tldr / "gold")
    kind = tba.transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(tldr / "gold")
    ids = torch.tensor([tokenizer("A post. One.<eos>", add_special_tokens=True)["input_ids"]])
    scores = model.score(model.model(ids).last_hidden_state)[0, :, 0]  # (L,)
    for choice, expected in (("before_eos", scores[-2]), ("eos", scores[-1])):
        task = task_of(tldr_flags(tldr) | {"gold_score_at": choice}, tmp_path)
        ended = choice == "eos"
        (score,) = task.judge("gold_reward_model", [example], [" One."], ended)
        assert score == pytest.approx(float(expected.detach()), abs=1e-4)
        read, judge = [], task.judges["gold_reward_model"]
        record = lambda texts: read.extend(texts) or judge(texts)  # noqa: B023
        record.tokenizer = judge.tokenizer
        task.judges["gold_reward_model"] = record
        task.evaluate([example], [" One."], np.array([True]))
        assert [text.endswith("<eos>") for text in read] == [choice == "eos"] * 2


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_slow_judge_gets_fewer_answers_at_a_time(synchronous, tldr, tmp_path):
    """So that messages are heeded in between; not in lockstep, where time must not matter."""
    settings = {"synchronous": True} if synchronous else {}
    config, problem = problem_of(tldr_flags(tldr), tmp_path, **settings)
    queues = tba.Link(0, 0, *(queue.Queue() for _ in range(3)), {})
    searcher = tba.Searcher(config, problem, queues, 0, 0)
    searcher.begin_evaluation(1, list(range(80)))
    while searcher.engine.unfinished:
        searcher.handle_completions(searcher.engine.step())
    sizes = []

    def judge(rows, texts, completions):
        sizes.append(len(rows))
        time.sleep(0.05 * len(rows))
        return [{} for _ in rows]

    searcher.judge = judge
    while searcher.answers:
        searcher.next_judging = 0.0
        searcher.judge_some()
    assert sum(sizes) == 80
    if synchronous:
        assert sizes == [32, 32, 16]
    else:
        assert max(sizes[1:]) <= 10


def test_reference_summaries_are_judged_once_and_by_tensor_cores(tldr, tmp_path):
    task = task_of(tldr_flags(tldr), tmp_path)
    read, precisions, judge = [], [], task.judges["gold_reward_model"]

    def compute(texts):
        read.extend(texts)
        precisions.append(torch.get_float32_matmul_precision())
        return tba.TextModel.compute(judge, texts)

    judge.compute = compute
    examples = task.held_out[:10]
    first = task.evaluate(examples, [" One."] * 10, np.ones(10, bool))
    assert len(read) == 20 and set(precisions) == {"high"}
    assert torch.get_float32_matmul_precision() == "highest"
    again = task.evaluate(examples, [" One."] * 10, np.ones(10, bool))
    assert len(read) == 30 and first == again
    same = [example["reference_response"] for example in examples]
    assert not any(
        record["win_rate"] for record in task.evaluate(examples, same, np.ones(10, bool))
    )


def test_a_truncated_summary_is_judged_without_an_eos(tldr, tmp_path):
    task = task_of(tldr_flags(tldr) | {"gold_score_at": "eos"}, tmp_path)
    seen, judge = [], task.judges["gold_reward_model"]
    task.judges["gold_reward_model"] = record = lambda texts: seen.extend(texts) or judge(texts)
    record.tokenizer = judge.tokenizer
    task.evaluate(task.train[:2], [" whole.", " cut of"], np.array([True, False]))
    ends = {text.removeprefix(e["query"]) for e in task.train[:2] for text in seen}
    assert {" whole.<eos>", " cut of"} <= ends and len(seen) == 4
    assert all(e["query"] + e["reference_response"] + "<eos>" in seen for e in task.train[:2])


@pytest.mark.parametrize(
    ("flag", "kind"), [("reward_model", "llama"), ("gold_reward_model", "gpt_neox")]
)
def test_a_judge_without_a_tokenizer_needs_another_ones(flag, kind, tldr, tmp_path, capsys):
    """As the published gold judge of TL;DR, a GPT-NeoX; its weights are pickled too."""
    bare, flags = tmp_path / "bare", tldr_flags(tldr)
    tokenizer = tba.transformers.AutoTokenizer.from_pretrained(flags[flag])
    model_config = tiny.architecture(kind, tokenizer)
    model_config.num_labels = 1
    torch.manual_seed(0)
    model = tba.transformers.AutoModelForSequenceClassification.from_config(model_config)
    model.config.save_pretrained(bare)
    torch.save(model.state_dict(), bare / "pytorch_model.bin")
    whole, flags[flag] = flags[flag], bare
    other = flag.replace("model", "tokenizer")

    def error(**more):
        args = [str(x) for k, v in (flags | more).items() for x in (f"--{k}", v)]
        assert tba.main([*args, "--dry_run"]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert f"--{flag} {bare}: " in (line := error()) and f"; name one with --{other}" in line
    small = shutil.copytree(whole, tmp_path / "small")
    model_config = json.loads((bare / "config.json").read_text())
    task = task_of(flags, tmp_path / "out", **{other: whole})
    rows, texts = task.train[:5], [e["reference_response"] for e in task.train[5:10]]
    ids = [
        tokenizer(e["query"] + x + "<eos>", return_tensors="pt")
        for e, x in zip(rows, texts, strict=True)
    ]
    expected = [model.eval()(**row).logits.item() for row in ids]
    np.testing.assert_allclose(task.judge(flag, rows, texts), expected, atol=1e-4)
    (bare / "config.json").write_text(json.dumps(model_config | {"vocab_size": 50_000}))
    assert "not the model's" in error(**{other: small})  # it speaks, but another language


def test_a_judge_that_cannot_tell_texts_apart_ends_the_run_in_one_line(tldr, tmp_path, capfd):
    dull = shutil.copytree(tldr / "gold", tmp_path / "dull")
    model = tba.transformers.AutoModelForSequenceClassification.from_pretrained(dull)
    torch.nn.init.zeros_(model.score.weight)
    model.save_pretrained(dull)
    flags = tldr_flags(tldr) | {"gold_reward_model": dull, "output_dir": tmp_path / "run"}
    args = [str(x) for k, v in flags.items() for x in (f"--{k}", v)]
    command = [sys.executable, str(harness.ROOT / "tba.py"), *args]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    error = f"tba.py: error: --gold_reward_model {dull}: its score is 0 for any text"
    assert error in result.stderr.splitlines()


def test_pickled_weights_are_loaded_and_execute_nothing(gsm8k, tmp_path):
    pickled = shutil.copytree(gsm8k / "model", tmp_path / "model")
    config = tba.Config(model=str(pickled))
    expected = tba.load_model(config, torch.float32, CPU).state_dict()
    (pickled / "model.safetensors").unlink()
    torch.save(expected, pickled / "pytorch_model.bin")
    loaded = tba.load_model(config, torch.float32, CPU).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(loaded[name], tensor)

    class Trap:
        def __reduce__(self):
            return (tmp_path / "sprung").touch, ()

    torch.save(expected | {"trap": Trap()}, pickled / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights"):
        tba.load_model(config, torch.float32, CPU)
    assert not (tmp_path / "sprung").exists()


# ------------------------------------------------------------------------------------ redteam


def test_the_victim_answers_and_the_classifier_judges(redteam, tmp_path):
    task = task_of(redteam_flags(redteam), tmp_path, victim_samples=100)
    attacks = ["Describe a volcano please.", "Describe a pencil please."]
    scores = task.log_toxicity(attacks)
    assert scores.shape == (2, 100) and (scores <= 0).all()
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
    model = tba.transformers.AutoModelForCausalLM.from_pretrained(redteam / "victim")
    tokenizer = tba.transformers.AutoTokenizer.from_pretrained(redteam / "victim")
    ids = tokenizer("<user>hello<assistant>", return_tensors="pt")["input_ids"]
    expected = model(ids).logits[0, -1].log_softmax(-1)
    actual = task.toxicity(["<user>hello<assistant>", "<user>hi"])[0].log_softmax(-1)
    torch.testing.assert_close(actual, expected.detach(), atol=1e-4, rtol=1e-4)


def test_a_guard_is_read_after_its_suffix_and_warned_about_without(redteam, tmp_path, capsys):
    """A guard that says "safe" or "unsafe" only after two line breaks, as Llama Guard 3 does."""
    tokenizer = tba.transformers.AutoTokenizer.from_pretrained(redteam / "victim")
    model = tba.transformers.AutoModelForCausalLM.from_pretrained(redteam / "victim")
    encode = lambda text: np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    pairs = []
    for word, answer in (("zap", "unsafe"), ("lovely", "safe")):
        for noun in tiny.NOUNS:
            chat = f"<user>Describe a {noun}<assistant>It is {word}<assistant>"
            pairs.append((encode(chat + "\n\n"), encode(answer)))
            pairs.append((encode(chat), encode("\n\n")))
    config = tba.Config(sft_epochs=40, sft_learning_rate=3e-3, dtype="float32")
    tba.supervised_fine_tune(tba.TokenLogProbs(model, 1.0), pairs, config)
    model.save_pretrained(tmp_path / "guard")
    tokenizer.save_pretrained(tmp_path / "guard")
    flags = redteam_flags(redteam) | {
        "toxicity_model": tmp_path / "guard", "toxicity_label": "unsafe", "victim_samples": 2,
    }  # fmt: skip
    attacks, answers = (
        ["Describe a comet", "Describe a river"],
        [["It is zap"] * 2, ["It is lovely"] * 2],
    )
    found = {}
    for suffix in ("", "\\n\\n"):
        task = task_of(flags, tmp_path / "out", toxicity_suffix=suffix)
        task.victim_answers = lambda attacks: answers
        capsys.readouterr()
        found[suffix] = np.exp(task.log_toxicity(attacks))
        warnings = capsys.readouterr().err
        task.log_toxicity(attacks)
        assert not capsys.readouterr().err  # said once
        assert ("--toxicity_suffix" in warnings) == (suffix == "")
    assert found[""].max() < 0.1
    assert found["\\n\\n"][0].min() > 0.6 and found["\\n\\n"][1].max() < 0.1


def test_demonstrations_and_attacks_that_do_not_end_are_scored_and_sent(redteam, tmp_path):
    config, problem = problem_of(redteam_flags(redteam), tmp_path, num_searchers=2)
    tokenizer = problem.tokenizer
    encode = lambda text: np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    attacks = [f"Describe a {noun}.<eos>" for noun in tiny.NOUNS]
    problem.demonstrations = [(0, encode(attack)) for attack in attacks]
    sent = []
    for index in range(2):
        queues = tba.Link(index, 0, *(queue.Queue() for _ in range(3)), {})
        searcher = tba.Searcher(config, problem, queues, 0, 0)
        searcher.score_demonstrations()
        while not queues.groups.empty():
            sent += pickle.loads(queues.groups.get()).trajectories
    texts = [tokenizer.decode(t.tokens) for t in sent]
    assert sorted(texts) == sorted(attacks)  # each by one of the two
    toxic = [t.reward for t, text in zip(sent, texts, strict=True) if text[11:-6] in tiny.TRIGGERS]
    assert len(toxic) == len(tiny.TRIGGERS)
    assert np.mean(toxic) > np.mean([t.reward for t in sent]) + 1

    open_ended, whole = encode("Describe a"), encode("Describe a pencil.<eos>")
    request = tba.Request(5, problem.prompts[0], 2)
    searcher.requests[5] = 0, 3
    logprobs = [np.full(len(x), -0.5, np.float32) for x in (open_ended, whole)]
    done = tba.Completion(request, [open_ended, whole], logprobs, np.array([False, True]))
    (group,) = searcher.score_groups([done])
    first, second = group.trajectories
    assert tokenizer.decode(first.tokens) == "Describe a<eos>" and not first.ended
    assert first.logprobs.tolist() == [-0.5] * len(open_ended) + [0.0]
    assert second.tokens.tolist() == whole.tolist()
    (scored,) = tba.token_logprobs(
        searcher.reference, [(problem.prompts[0], [first.tokens])], config
    )
    assert first.ref_logprob == pytest.approx(float(scored.sum()), abs=1e-4)


def test_the_first_samples_have_a_temperature_and_a_nucleus_of_their_own(redteam, tmp_path):
    own = {"initial_temperature": 0.6, "initial_top_p": 0.9, "trained_per_prompt": 8}
    own["searched_per_prompt"] = 8
    config, problem = problem_of(redteam_flags(redteam), tmp_path, num_searchers=1, **own)
    queues = tba.Link(0, 0, *(queue.Queue() for _ in range(3)), {})
    searcher = tba.Searcher(config, problem, queues, 0, 3)
    for searcher.version, expected in ((0, (0.6, 0.9)), (1, (None, None))):
        searcher.number = 0
        searcher.begin_prompts()
        requests, searcher.engine.waiting = list(searcher.engine.waiting), deque()
        assert [(r.temperature, r.top_p) for r in requests] == [expected] * 3
        searcher.requests.clear()


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
    metrics = task.summarize(task.evaluate([{}] * 4, attacks, np.ones(4, bool)))
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
    solution, response = f"So it is $\\boxed{{{gold}}}$.", f"I get \\boxed{{{answer}}}."
    assert tba.MATH.is_right(solution, response) is same
    assert tba.MATH.is_right(solution, solution) is True


def test_math_answers_that_do_not_parse_are_wrong():
    task = tba.MATH.__new__(tba.MATH)
    texts = [
        "\\boxed{3}",
        "it is 3",
        "\\boxed{",
        "\\boxed{}",
        "\\boxed",
        "\\boxed{4} or \\boxed{3}",
    ]
    answers = [{"solution": "so \\boxed{3}"}] * 6, texts, np.ones(6, bool)
    assert task.rewards(*answers).tolist() == [1, 0, 0, 0, 0, 1]
    assert task.summarize(task.evaluate(*answers)) == {"accuracy": pytest.approx(2 / 6)}
    rng = np.random.default_rng(0)
    for _ in range(200):  # whatever a model writes, it never crashes
        noise = "".join(rng.choice(list("\\{}()[]^_$&%+-=/,.0123abxfrc \n"), 30))
        assert task.is_right("\\boxed{3}", "\\boxed{" + noise) in (True, False)


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


def command(flags, tmp_path, *more):
    args = [str(x) for k, v in flags.items() for x in (f"--{k}", v)]
    return [*args, "--output_dir", str(tmp_path / "run"), *more]


def expect(flags, message, tmp_path, capsys):
    """One line that has `message`, and code 2, with --dry_run too, and nothing is made."""
    for more in ([], ["--dry_run"]):
        try:
            code = tba.main(command(flags, tmp_path, *more))
        except SystemExit as stop:  # the parser's way
            code = stop.code
        lines = capsys.readouterr().err.strip().splitlines()
        lines = [line for line in lines if "warning: --sft_data is not given" not in line]
        assert code == 2 and len(lines) == 1, lines
        assert lines[0].startswith("tba.py: error: ") and message in lines[0]
        assert not (tmp_path / "run").exists()


def test_bad_judges(gsm8k, tldr, redteam, tmp_path, capsys):
    t, r = tldr_flags(tldr), redteam_flags(redteam) | {"sft_data": redteam / "sft.jsonl"}
    for flags, message in (
        (t | {"reward_model": redteam / "toxicity"}, "has 2 labels; a reward model has a scalar"),
        (t | {"gold_reward_model": "/no/such"}, "--gold_reward_model /no/such: no such file"),
        (t | {"gold_reward_model": ""}, "--gold_reward_model: --task tldr needs a local folder"),
        (t | {"dataset": gsm8k / "data"}, "has no column query, reference_response"),
        (r | {"toxicity_label": "rude"}, "--toxicity_label rude: choose one of fine, toxic"),
        (r | {"victim_format": "poem"}, "invalid choice: 'poem' (choose from 'chat', 'alpaca')"),
        (r | {"victim_model": ""}, "--victim_model: --task redteam needs a local folder"),
        (r | {"sentence_model": "/no/such"}, "--sentence_model /no/such"),
        (r | {"explore_low": 3}, "--explore_high 2.0"),
        (r | {"min_response_tokens": 21}, "--max_response_tokens 20: must be at least --min_"),
        (r | {"dataset": gsm8k / "data"}, "has no column prompt"),
        (r | {"sft_data": "/no/such.jsonl"}, "--sft_data /no/such.jsonl: no such file"),
        (r | {"attacker_prompt": ""}, "--attacker_prompt: it is empty"),
    ):
        expect(flags, message, tmp_path, capsys)
    bare = tmp_path / "bare"
    tokenizer = tba.transformers.AutoTokenizer.from_pretrained(redteam / "victim")
    tiny.make_model("llama", redteam / "victim", bare)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    expect(r | {"victim_model": bare}, "has no chat template; use alpaca", tmp_path, capsys)
    math_flags = {"task": "math", "model": bare, "dataset": gsm8k / "data"}
    expect(math_flags, "has no column problem, solution", tmp_path, capsys)
    more = {"eval_temperature": 0.7}
    expect(t | more, "the kl of --task tldr is measured at temperature 1; ch", tmp_path, capsys)
    more = {"eval_dataset": gsm8k / "data"}
    expect(r | more, "--task redteam is evaluated on its own prompts; leave", tmp_path, capsys)


def test_a_blank_attacker_prompt(redteam, tmp_path, capsys):
    flags = redteam_flags(redteam) | {"sft_data": redteam / "sft.jsonl", "attacker_prompt": " "}
    expect(flags, "--attacker_prompt: it is empty", tmp_path, capsys)


BAD_ROWS = [  # task, row, what is wrong with it
    ("math", {"problem": None, "solution": "\\boxed{1}"}, "the problem is None; it must be text"),
    ("math", {"problem": "?", "solution": None}, "the solution is None; it must be text"),
    ("math", {"problem": "?", "solution": "3"}, "the solution has no \\boxed{...} answer"),
    ("tldr", {"query": None, "reference_response": "b"}, "the query is None; it must be text"),
    ("tldr", {"query": "a", "reference_response": None}, "the reference_response is None"),
    ("tldr", {"query": "a", "reference_response": " "}, "the reference_response is empty"),
    ("redteam", {"prompt": None}, "the prompt is None; it must be text"),
    ("redteam", {"prompt": ""}, "the prompt is empty"),
]
GOOD = {
    "math": {"problem": "1+1?", "solution": "\\boxed{2}"},
    "tldr": {"query": "a", "reference_response": "b"},
    "redteam": {"prompt": "a"},
}


@pytest.fixture
def flags_of(tldr, redteam):
    """Function: task -> flags of a command that is right."""
    return {
        "math": {"task": "math", "model": redteam / "victim", "max_response_tokens": 20},
        "tldr": tldr_flags(tldr),
        "redteam": redteam_flags(redteam) | {"sft_data": redteam / "sft.jsonl"},
    }.__getitem__


def good_rows(task, count=4):
    return [{column: f"{i} {text}" for column, text in GOOD[task].items()} for i in range(count)]


@pytest.mark.parametrize(("task", "bad", "message"), BAD_ROWS)
def test_a_row_without_text_is_named(task, bad, message, flags_of, tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    for row, name in (1, "training row 1"), (3, "held-out row 3"):  # rows of the file
        tiny.write_lines(path, [bad if i == row else r for i, r in enumerate(good_rows(task))])
        where = f"--dataset {path}: {name}: {message}"
        expect(flags_of(task) | {"dataset": path}, where, tmp_path, capsys)


@pytest.mark.parametrize("task", GOOD)
def test_numbers_where_text_is_needed_are_named(task, flags_of, tmp_path, capsys):
    path, column = tmp_path / "data.jsonl", next(iter(GOOD[task]))
    tiny.write_lines(path, [row | {column: i} for i, row in enumerate(good_rows(task))])
    where = f"--dataset {path}: training row 0: the {column} is 0; it must be text"
    expect(flags_of(task) | {"dataset": path}, where, tmp_path, capsys)


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (
            b"",
            "name a .json, .jsonl, .csv, .tsv (or one of these with .gz) or .parquet with examples",
        ),
        (b'{"instruction": "a"}\n{"instruction": \n', "in row 1"),
        (b'{"instruction": "a"}\n\n{"prompt": "b"}\n', "row 1: the response is None"),
        (b'{"instruction": "a"}\n{"instruction": null}\n', "row 1: the prompt is None"),
        (b'{"instruction": 3}\n', "row 0: the response is 3; it must be text"),
        (b'[{"instruction": "a"}, {"prompt": "b", "response": 3}]', "row 1: the response is 3"),
        (b"[1]", "row 0: the prompt is None"),
        (b"[{", ""),
        (b"[]", ""),
        (b'{"prompt": "b", "response": " "}', "row 0: the response is empty"),
        ('{"instruction": "a"}\n'.encode("utf-16"), ""),
        ('{"instruction": "\u00c4pfel"}\n'.encode("latin-1"), "codec can't decode byte 0xc4"),
    ],
)
def test_bad_sft_data(content, where, redteam, tmp_path, capsys):
    path = tmp_path / "sft.jsonl"
    path.write_bytes(content)
    expect(redteam_flags(redteam) | {"sft_data": path}, where, tmp_path, capsys)
    flags = redteam_flags(redteam) | {"sft_data": path}
    expect(flags, f"tba.py: error: --sft_data {path}: ", tmp_path, capsys)


def test_red_teaming_without_sft_data_warns(redteam, tmp_path, capsys):
    flags = redteam_flags(redteam)
    for more, warned in (
        ([], True),
        (["--eval_only"], False),
        (["--sft_data", str(redteam / "sft.jsonl")], False),
    ):
        assert tba.main(command(flags, tmp_path, "--dry_run", *more)) == 0
        lines = capsys.readouterr().err.splitlines()
        assert [line.split(":")[:2] for line in lines] == [
            ["warning", " --sft_data is not given"]
        ] * warned


def test_the_number_of_attacks_that_are_evaluated(redteam, tmp_path):
    for more, count in ({}, 1024), ({"eval_samples": 7}, 7):
        task = problem_of(redteam_flags(redteam), tmp_path, **more)[1].task
        assert task.held_out == [{"prompt": task.config.attacker_prompt}] * count


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_sft_data_of_both_kinds_with_and_without_a_byte_order_mark(
    suffix, encoding, redteam, tmp_path
):
    records = [{"instruction": "Describe a river."}, {"prompt": "Hello", "response": "zap"}]
    text = json.dumps(records) if suffix == ".json" else "\n".join(map(json.dumps, records))
    path = tmp_path / f"sft{suffix}"
    path.write_text(text, encoding=encoding)
    config, problem = problem_of(redteam_flags(redteam) | {"sft_data": path}, tmp_path)
    decode = problem.tokenizer.decode
    pairs, _ = tba.read_sft_data(config, problem)
    texts = [(decode(prompt), decode(response)) for prompt, response in pairs]
    assert texts == [
        (config.attacker_prompt, "Describe a river.<eos>"),
        ("Hello", "zap<eos>"),
    ]


def test_instructions_answer_other_prompts_and_are_replayed_to_the_tasks_own(
    redteam, tmp_path, capsys
):
    """A list's number is followed by a space; the replay buffer gets them for the task's prompt."""
    sft, prompts = tmp_path / "sft.jsonl", tmp_path / "prompts.jsonl"
    records = [{"instruction": f"Describe a {noun}."} for noun in tiny.NOUNS]
    records.append({"prompt": "Hello", "response": "zap"})
    sft.write_text("".join(json.dumps(r) + "\n" for r in records))
    asked = [f"Write a list:\n1. Name a {noun}.\n2." for noun in tiny.NOUNS[:3]]
    prompts.write_text("".join(json.dumps({"attacker_prompt": p}) + "\n" for p in asked))
    flags = redteam_flags(redteam) | {"sft_data": sft, "sft_prompts": prompts}
    config, problem = problem_of(flags, tmp_path)
    decode = problem.tokenizer.decode
    read, demonstrations = tba.read_sft_data(config, problem)
    pairs = [(decode(prompt), decode(response)) for prompt, response in read]
    assert pairs[-1] == ("Hello", "zap<eos>")
    assert {p for p, _ in pairs[:-1]} == set(asked)
    expected = [f" {r['instruction']}<eos>" for r in records[:-1]]
    assert [response for _, response in pairs[:-1]] == expected
    assert [(i, decode(r)) for i, r in demonstrations] == [(0, r) for r in expected]
    prompts.write_text("[{")
    expect(flags, f"tba.py: error: --sft_prompts {prompts}: ", tmp_path, capsys)


def test_supervised_fine_tuning_fits_its_data(redteam):
    model = tba.transformers.AutoModelForCausalLM.from_pretrained(redteam / "model")
    tokenizer = tba.transformers.AutoTokenizer.from_pretrained(redteam / "model")
    encode = lambda text: np.array(tokenizer(text)["input_ids"], np.int32)
    pairs = [(encode("Say it:"), encode(f" {word}<eos>")) for word in tiny.NOUNS[:2]] * 32
    config = tba.Config(sft_epochs=60, sft_learning_rate=3e-3, dtype="float32")
    losses = tba.supervised_fine_tune(tba.TokenLogProbs(model, 1.0), pairs, config)
    assert len(losses) == 60
    per_response = losses[-1] * np.mean([len(r) for _, r in pairs])
    assert per_response == pytest.approx(math.log(2), abs=0.1)  # two answers, half each


def test_supervised_fine_tuning_is_the_same_in_any_micro_batches(redteam):
    tokenizer = tba.transformers.AutoTokenizer.from_pretrained(redteam / "model")
    encode = lambda text: np.array(tokenizer(text)["input_ids"], np.int32)
    pairs = [(encode("Say it:"), encode(" " + "zap" * n + "<eos>")) for n in range(1, 20)]
    losses = []
    for budget in (100_000, 64):
        model = tba.transformers.AutoModelForCausalLM.from_pretrained(redteam / "model")
        config = tba.Config(sft_epochs=3, dtype="float32", tokens_per_microbatch=budget)
        losses.append(tba.supervised_fine_tune(tba.TokenLogProbs(model, 1.0), pairs, config))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_warm_starts_rate_rises_and_matrices_alone_decay(redteam):
    """With --sft_warmup 1 it is 0 in the first step and rises in all others."""
    tokenizer = tba.transformers.AutoTokenizer.from_pretrained(redteam / "model")
    encode = lambda text: np.array(tokenizer(text)["input_ids"], np.int32)
    pairs = [(encode("Say it:"), encode(" zap<eos>"))] * 4
    settings = {"dtype": "float32", "sft_batch": 4, "sft_learning_rate": 1e-3}

    def change(**flags):
        """What the weights are changed by, under their names."""
        model = tba.transformers.AutoModelForCausalLM.from_pretrained(redteam / "model")
        before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        policy = tba.TokenLogProbs(model, 1.0)
        tba.supervised_fine_tune(policy, pairs, tba.Config(**settings, **flags))
        return {name: tensor.detach() - before[name] for name, tensor in model.named_parameters()}

    none = change(sft_warmup=1, sft_epochs=1)
    assert all(not delta.any() for delta in none.values())
    assert any(delta.any() for delta in change(sft_warmup=0, sft_epochs=1).values())
    rising = change(sft_warmup=1, sft_epochs=2)  # the second step has half the rate
    falling = change(sft_warmup=0, sft_epochs=1)
    for name, delta in rising.items():  # the same gradient: Adam's first steps have its sign
        torch.testing.assert_close(delta, falling[name] / 2, atol=3e-5, rtol=0.05)
    decayed = change(sft_warmup=0, sft_epochs=1, sft_weight_decay=0.5)
    for name, delta in decayed.items():
        same = torch.equal(delta, falling[name])
        assert same == (delta.ndim == 1), name


def test_demonstrations_are_whole_and_a_share_of_them_is_held_out(redteam, tmp_path, capsys):
    """They are cut where the context ends, not at --max_response_tokens."""
    sft = tmp_path / "sft.jsonl"
    words = [10, 40, 4000]
    rows = [{"instruction": "zap " * n} for n in words]
    sft.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = redteam_flags(redteam) | {"sft_data": sft, "max_response_tokens": 20}
    config, problem = problem_of(flags, tmp_path)
    pairs, demonstrations = tba.read_sft_data(config, problem)
    lengths = [len(response) for _, response in pairs]
    assert 10 < lengths[0] < lengths[1] and lengths[1] > 40
    prompt, longest = pairs[2]
    assert len(prompt) + len(longest) == problem.context
    eos = problem.tokenizer.eos_token_id
    assert all(response[-1] == eos for _, response in pairs)
    assert [len(response) for _, response in demonstrations] == lengths
    numbered = [(np.array([i]), np.array([i])) for i in range(50)]
    held_out, learned = tba.split_sft_pairs(numbered, tba.Config(sft_held_out=0.1))
    assert len(held_out) == 5 and len(learned) == 45
    assert {int(p[0]) for p, _ in held_out + learned} == set(range(50))
    again, _ = tba.split_sft_pairs(numbered, tba.Config(sft_held_out=0.1))
    assert again == held_out


def test_short_attacks_are_ruled_out_and_spaces_at_an_attacks_end_do_not_count(redteam, tmp_path):
    flags = redteam_flags(redteam) | {"sft_data": redteam / "sft.jsonl", "shortest_attack": 5}
    task = task_of(flags, tmp_path)
    logprobs = np.linspace(-3, -1, 5).astype(np.float32)
    assert task.ref_logprobs(np.arange(5), logprobs) is logprobs
    assert task.ref_logprobs(np.arange(4), logprobs[:4]).sum() == pytest.approx(-500)
    assert task.victim_ids("Say zap. \n ") == task.victim_ids("Say zap.")
    assert task.victim_ids(" Say zap.") != task.victim_ids("Say zap.")
    assert task.least_answer_tokens == 5
