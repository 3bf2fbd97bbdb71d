"""Data, and the four tasks: rewards and evaluations beside plain computations."""

import copy
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import transformers
from conftest import MODELS, REAL_GSM8K
from harness import config_and_task, judges_of, plain_logprobs
from test_data import with_special_tokens, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import tba


def without_data(kind, tokenizer=lambda *_, **__: {"input_ids": []}, **settings):
    """A task of a class, without examples."""

    class Empty(kind):
        def examples(self):
            return [], []

    Empty.__name__ = kind.__name__
    return Empty(tba.settings(**settings), tokenizer)


def task_of(path, out, **flags):
    """A task in the state that it has in a Searcher."""
    config, task = config_and_task(path, out, **(judges_of(path) | flags))
    make = tba.partial(tba.ENGINES[config.engine], config, 0)
    task.setup(make)
    return task, config


NUMBERS = {  # the last one of a text
    "so 3 * 400 = 1,200 dollars.": 1200, "5-3": 3, "it is -3": -3, "1.5 and .5": 0.5,
    "none": None, "2,500,000": 2500000, "3.": 3, "(2,-3)": -3, "5,.5": 0.5, "-1,000.25": -1000.25,
    "x=-.25": -0.25, "1, 2": 2, "1'234": 1234, "1_234": 1234, "5'10": 10, "5 m²": 5, "is 3½": 3,
    "１，２００": 1200, "－3": -3, "０．５": 0.5, "−4": -4,  # noqa: RUF001
}  # fmt: skip
RIGHT = {("3+4=7 #### 7", "is 7.0"), ("1200", "$1,200.00"), ("0.00001", "is .00001")}
WRONG = {("7", "is 8"), ("7", "no number"), ("0.00001", "0.00002"), ("7", "7.0001"), ("0", "")}


def test_rewards_of_gsm8k_are_exact_matches_of_last_numbers():
    for text, number in NUMBERS.items():
        assert tba.extract_number(text) == number
    answers, responses = zip(*RIGHT, *WRONG, strict=True)
    examples = [{"answer": answer} for answer in answers]
    rewards = without_data(tba.GSM8K).checked_rewards(examples, responses, np.ones(8))
    assert rewards == [1.0] * len(RIGHT) + [0.0] * len(WRONG)


def test_accuracy_is_accuracy_whatever_the_rewards_are():
    """An evaluation of a subclass whose rewards are a judge's scores."""

    class Generous(tba.GSM8K):
        def rewards(self, examples, responses, ended):
            return np.ones(len(responses))

    task = without_data(Generous, temperature=0.35)
    examples = [{"answer": "7"}, {"answer": "8"}]
    records = task.evaluate(examples, ["it is 7", "it is 7"], np.ones(2))
    assert task.summarize(records) == {"accuracy": 0.5}
    assert task.checked_rewards(examples, ["it is 7", "it is 7"], np.ones(2)) == [1, 1]
    assert task.temperature(np.random.default_rng(0)) == 0.35 and task.reward_threads == 1
    Generous.engines = 2  # rewards need the Searcher's device: they are not judged in threads
    assert without_data(Generous).reward_threads == 0


def test_a_file_that_is_replaced_by_one_of_its_size_and_time_is_read_again(gsm8k, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes((gsm8k / "data" / "test.jsonl").read_bytes())
    config_and_task(gsm8k, tmp_path / "out", dataset=file)
    times = file.stat()
    file.write_text(file.read_text().replace("How many", "Now many"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    _, task = config_and_task(gsm8k, tmp_path / "out", dataset=file)
    assert "How many" not in task.train[0]["question"]


@pytest.mark.skipif(not REAL_GSM8K.exists(), reason="the real GSM8K is not here")
def test_all_of_real_gsm8k_is_read(gsm8k, tmp_path):
    flags = {"dataset": REAL_GSM8K, "max_response_tokens": 8, "max_prompt_tokens": 200}
    _, task = config_and_task(gsm8k, tmp_path, **flags)
    assert len(task.train_prompts) == len(task.train) > 1000 and len(task.held_out) > 100
    assert all(len(prompt) <= 200 for prompt in task.train_prompts)
    answers = [example["answer"] for example in task.train]
    assert min(task.checked_rewards(task.train, answers, np.ones(len(answers)))) == 1.0


def test_a_task_may_stop_responses_at_texts(gsm8k, tmp_path, monkeypatch):
    """Every token with such a text ends a response of the policy, and of no other model."""
    few = type("Few", (tba.GSM8K,), {"stop": ("th",)})
    monkeypatch.setitem(tba.TASKS, "few", few)
    folder = shutil.copytree(gsm8k / "model", tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<th>"])  # after the vocabulary of the file
    tokenizer.save_pretrained(folder)
    config, task = config_and_task(gsm8k, tmp_path, task="few", model=folder)
    stops = {i for text, i in task.tokenizer.get_vocab().items() if "th" in text}
    assert len(stops) > 2 and len(tokenizer) - 1 in stops
    config.victim_model = config.model
    own, other = (
        tba.ENGINES["transformers"](config, 0, name, task.longest).end_tokens
        for name in ("model", "victim_model")
    )
    assert own == task.end_tokens == sorted(stops | set(other))  # as the sampling check has them
    assert other == [task.tokenizer.eos_token_id]
    few.stop = ("th", "it th")  # most tokenizers have no token with a blank line
    with pytest.raises(tba.InputError, match=r"^--task few: Task\.stop: no token has 'it th' "):
        config_and_task(gsm8k, tmp_path, task="few", model=folder)


@pytest.mark.parametrize(
    "template", ["\\boxed{} {question}", "{problem}", "{question", "{question!x}"]
)
def test_braces_that_a_template_does_not_double_are_told_in_one_line(
    template, gsm8k, tmp_path, monkeypatch
):
    wrong = type("Wrong", (tba.GSM8K,), {"template": template})
    monkeypatch.setitem(tba.TASKS, "wrong", wrong)
    with pytest.raises(tba.InputError, match=r"^--task wrong: .*braces doubled$"):
        config_and_task(gsm8k, tmp_path, task="wrong")


def marking_starts():
    """A tokenizer that, as SentencePiece's do, drops the space at the start of a text."""
    letters = ["<eos>", *"▁ab.3é\n", "▁a", "b."]
    merges = [("▁", "a"), ("b", ".")]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(letters)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def test_a_responses_text_is_its_text(gsm8k):
    """With its spaces, also in front, and with special tokens only if the task keeps them."""
    tiny, marking = transformers.AutoTokenizer.from_pretrained(gsm8k / "model"), marking_starts()
    letters = lambda text: marking.convert_tokens_to_ids(list(text.replace(" ", "▁")))
    words = lambda text: tiny(text, add_special_tokens=False)["input_ids"]

    @hypothesis.given(st.lists(st.text(" ab.3é\n", max_size=8), max_size=3), st.booleans())
    def check(texts, kept):
        for tokenizer, ids_of in ((tiny, words), (marking, letters)):
            ends = tokenizer.convert_tokens_to_ids(["<eos>"] * 2)
            tokens = [np.array([*ids_of(text), *ends], np.int32) for text in texts]
            task = without_data(tba.Task, tokenizer)
            task.keep_special_tokens = kept
            assert task.response_texts(tokens) == [text + "<eos><eos>" * kept for text in texts]

    check()


def test_rewards_must_be_one_finite_number_each():
    task = without_data(tba.Task)
    rewards = lambda given: (
        setattr(task, "rewards", lambda *_: given)
        or task.checked_rewards([{}] * 2, ["a", "b"], np.ones(2))
    )
    assert rewards([0.1, 1e5]) == [np.float32(0.1), 1e5]
    half = torch.tensor([0.5, 1.0], dtype=torch.bfloat16, requires_grad=True)
    for given in (half, half.detach(), [*half.detach().float()], np.array([0.5, 1]), (0.5, True)):
        assert rewards(given) == [0.5, 1.0]
    for given in (
        np.array([1.0, math.nan]), np.ones(3), np.ones((2, 1)), [math.inf, 0], [], None, [None, 1],
        (x for x in (1, 2)), [(1, "right"), (0, "wrong")], np.array([1j, 2]), ["a", "b"],
        np.ma.masked_array([1.0, 2.0], [True, False]), {"a": 1, "b": 2}, torch.ones(3), [1e39, 0],
        [10**400, 0],
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match=r"(?s)Task\.rewards returned .*, not 2 finite numbers"
        ):
            rewards(given)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("columns", "question", tba.InputError),
        ("stop", "\n\n", tba.InputError),
        ("demonstrations", lambda self, example: "so 4", tba.InputError),
        ("examples", lambda self: ([{"problem": "1 + 1?", "answer": "2"}], []), tba.InputError),
        ("prompt", lambda self, example: None, TypeError),
        ("prompt", lambda self, example: {"role": "user", "content": "x"}, TypeError),
        ("prompt", lambda self, example: [1, 2, 3], TypeError),
        ("prompt", lambda self, example: [{"role": "user"}], TypeError),
        ("prompt", lambda self, example: [{"role": "user", "content": None}], TypeError),
    ],
)
def test_a_task_of_the_wrong_form_is_an_error(name, value, error, tmp_path, monkeypatch):
    monkeypatch.setitem(tba.TASKS, "wrong", type("Wrong", (tba.MATH,), {name: value}))
    with pytest.raises(error, match=f"^--task wrong: .*{name}|^a prompt is"):
        config_and_task(MODELS / "math", tmp_path / "none", task="wrong")


def test_a_metric_of_an_evaluation_is_the_mean_over_the_records_that_have_it():
    task = without_data(tba.Task)
    records = [{"reward": 0.1}, {"reward": 1e5, "length": 3}, {"answer": 1, "length": 4}]
    expected = {"reward": np.mean([0.1, 1e5]), "length": 3.5, "answer": 1}
    assert task.summarize(records) == task.summarize(records[::-1]) == expected


def test_verdicts_of_math_are_those_of_a_list():
    """Which also marks the pairs that the judge still gets wrong."""
    for line in (Path(__file__).parent / "answers.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        _, gold, response, verdict, *failing = line.replace("⏎", "\n").split("\t")
        right = (verdict == "right") != bool(failing)
        assert tba.MATH.judge(gold, response) == right, line
        without_data(tba.MATH).check({"answer": gold})
        own = tba.answer_of(gold, bare=True)
        assert tba.MATH.judge(gold, f"\\boxed{{{own}}}"), gold


NO_GOLDS = {
    "answer": ("proof", "Notfound", "None", "N/A", " ", "\\boxed{5", "a\n\nb", "so " * 70),
    "solution": ("See the appendix.", "proof", "\\boxed{}"),
}


def test_a_gold_that_is_no_answer_is_an_error():
    """In a column of answers, a sentence may be one."""
    check = without_data(tba.MATH).check
    for column, texts in NO_GOLDS.items():
        for text in texts:
            with pytest.raises(ValueError, match=f"no answer in {column}"):
                check({"problem": "1+1?", column: text})
    assert not tba.MATH.judge("proof", "I have no answer.")
    check({"problem": "1+1?", "final_answer": "See the appendix."})
    check({"problem": "1+1?", "solution": "So it is \\boxed{2}, as 1+1 is.\n\n" + 99 * "Yes. "})


@pytest.fixture
def with_judges():
    """Function: a task after its setup; its judges end with the test."""
    tasks = []

    def make(task, **fields):
        vars(task).update(fields)
        task.setup(None)
        tasks.append(task)
        return task

    yield make
    for pool in [pool for task in tasks for pool in task.judges.values()]:
        pool.stop()
        pool.join()


def test_an_answer_that_cannot_be_judged_costs_its_own_reward_only(with_judges):
    """A power tower that nobody can compute: its judge is killed, and another one goes on."""
    task = with_judges(without_data(tba.MATH), opened="")
    answers = ["\\boxed{2}", "\\boxed{9^{9^{9^{9^{9}}}}}", "\\boxed{3}", "\\boxed{2}"]
    example = {"problem": "3", "solution": "\\boxed{2}"}
    rewards = task.rewards([example] * 4, answers, np.ones(4))
    assert rewards.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("thought", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_a_thought_that_is_cut_off_has_no_answer(with_judges, thought, tmp_path):
    """Also if the chat template opens it."""
    opens = thought == "<think>\n"
    model = tmp_path / "model"
    shutil.copytree(MODELS / "math" / "model", model)
    template = "<user>{{ messages[0].content }}<assistant>" + thought
    (model / "chat_template.jinja").write_text(template)
    _, task = config_and_task(MODELS / "math", tmp_path / "run", task="math", model=model)
    task = with_judges(task)
    gold = [*task.train[0].values()][-1]
    box = f"\\boxed{{{tba.answer_of(gold, bare=True)}}}"
    responses = [box, f"so {box}</think> no", f"so</think> {box}", f"so {box}? or", f"<think>{box}"]
    rewards = task.rewards(task.train[:1] * 5, responses, np.ones(5))
    assert rewards.tolist() == [not opens, 0, 1, not opens, 0]


class PatientMATH(tba.MATH):
    """Judges an answer once the file exists that it names."""

    JUDGE_TIMEOUT = 600

    @staticmethod
    def judge(solution, response):
        while not os.path.exists(response):
            time.sleep(0.01)
        return True


def test_verdicts_on_held_out_answers_do_not_delay_rewards(with_judges, tmp_path):
    task = with_judges(without_data(PatientMATH), opened="")
    solution = [{"solution": "1"}]
    late = tmp_path / "late"
    pool = ThreadPoolExecutor(2)
    evaluation = pool.submit(task.evaluate, 2 * solution, ["/", str(late)], np.ones(2))
    while not task.judges:
        time.sleep(0.01)
    try:
        assert pool.submit(task.rewards, solution, ["/"], np.ones(1)).result(60) == [1]
        assert not evaluation.done()
    finally:
        late.touch()
    assert evaluation.result() == 2 * [{"accuracy": 1.0}]


def plain_logits(path, texts):
    """What transformers alone makes of texts: logits (N, labels) at the last token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    rows = [tokenizer(text)["input_ids"] or [tokenizer.eos_token_id] for text in texts]
    with torch.no_grad():
        return torch.stack([plain_vector("", model, ids) for ids in rows])


def plain_scores(path, texts):
    return plain_logits(path, texts)[:, 0].numpy()


def test_summaries_are_scored_at_their_eos_and_compared_before_it(tldr, tmp_path):
    task, _ = task_of(tldr, tmp_path)
    examples = task.train[:3]
    summaries = [" Ann lost hat.", "", " cut off"]  # of one EOS alone, too
    ended = np.array([True, True, False])
    rewards = task.checked_rewards(examples, summaries, ended)
    queries = [example["query"] for example in examples]
    closed = [query + s + "<eos>" for query, s in zip(queries, summaries, strict=True)]
    np.testing.assert_allclose(rewards[:2], plain_scores(tldr / "reward", closed)[:2], atol=1e-4)
    assert rewards[2] == -1.0

    own = [example["reference_response"] for example in examples]
    closing = [{"reference_response": text + "<eos>"} for text in own]  # as TL;DR's data have
    scores = plain_scores(tldr / "gold", [q + s for q, s in zip(queries, summaries, strict=True)])
    against = plain_scores(tldr / "gold", [q + s for q, s in zip(queries, own, strict=True)])
    for _ in range(2):  # references are judged once
        records = task.evaluate(examples, summaries, ended)
        assert [r["win_rate"] for r in records] == (scores > against).astype(float).tolist()
    for others in ([{}] * 3, closing):
        rows = [example | other for example, other in zip(examples, others, strict=True)]
        assert [r["win_rate"] for r in task.evaluate(rows, own, ended)] == [0.0] * 3

    records = [
        {"win_rate": 1.0, "kl": 2.0, "ref_logprob": -6.0, "tokens": 3, "prompt_tokens": 9},
        {"win_rate": 0.0, "kl": 4.0, "ref_logprob": -2.0, "tokens": 2, "prompt_tokens": 6},
    ]
    perplexity = (math.exp(6 / 11) + math.exp(2 / 7)) / 2
    assert task.summarize(records) == pytest.approx(
        {"win_rate": 0.5, "perplexity": perplexity, "kl": 3.0}
    )


def random_judge(family, path, out):
    """A random judge; RoBERTa's classifier has no `score`, and positions from 2."""
    config = transformers.AutoConfig.from_pretrained(path, num_labels=2)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"vocab_size": config.vocab_size, "intermediate_size": 64}
    torch.manual_seed(0)
    if family == "bert":
        model = transformers.BertModel(transformers.BertConfig(**shape))
    else:
        if family == "roberta":
            shape |= {"max_position_embeddings": 40, "pad_token_id": 1}
            config = transformers.RobertaConfig(**shape)
        model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(out)


def plain_vector(kind, model, ids):
    """What a judge makes of a text's tokens alone."""
    ids = torch.tensor([ids])
    if kind == "AutoModel":
        mean = model(ids).last_hidden_state[0].mean(0)
        return mean / mean.norm()
    if kind == "AutoModelForCausalLM":
        return model(ids).logits[0, -1]
    if head := getattr(model, "score", None):  # the model's own `forward` looks for padding
        return head(model.base_model(ids).last_hidden_state[0, -1])
    return model(ids).logits[0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "roberta", "bert", "AutoModelForCausalLM"])
def test_judges_read_texts_as_if_each_were_alone(family, redteam, model_of, tmp_path):
    """The end of those over the context, EOS for an empty one, and EOS as any other token.

    Llama 3 and GPT-2 have no token for padding, and token 0 may end a text.
    """
    kinds = {"bert": "AutoModel", "AutoModelForCausalLM": family}
    kind = kinds.get(family, "AutoModelForSequenceClassification")
    path = model_of("gpt2" if family == "gpt2" else "llama")
    own = {} if "bert" in family else {"pad_token": None}
    own |= {"eos_token": "?"} if family == kind else {}  # guards do not end texts with token 0
    shutil.copytree(path, tmp_path / "judge")
    tokenizer = with_special_tokens(tmp_path / "judge", "BOS $A", **own)
    if family != kind:
        random_judge(family, path, tmp_path / "judge")
    config = tba.settings(toxicity_model=str(tmp_path / "judge"), dtype="float32")
    judge = tba.TextModel(kind, "toxicity_model", config)
    judge.load(config)
    model = getattr(transformers, kind).from_pretrained(tmp_path / "judge").eval()
    rng = np.random.default_rng(0)
    texts = ["", "<eos>", "Ann has<eos>", "Ben<eos><eos>"]
    texts += [" ".join(rng.choice(list("abcdef"), n)) for n in (*range(1, 40), 300, 600)]
    texts = list(rng.permutation(texts * 2))
    special = [5] * (kind != "AutoModelForCausalLM")  # a chat template has them
    longest = {"roberta": 40, "bert": 512}.get(family, 256) - 2
    expected = {}
    with torch.no_grad():
        for text in set(texts):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = [*special, *ids[len(special) - longest :]] or [tokenizer.eos_token_id]
            expected[text] = plain_vector(kind, model, ids)
    vectors = judge(texts)
    for text, vector in zip(texts, vectors, strict=True):
        torch.testing.assert_close(vector, expected[text], atol=2e-4, rtol=1e-4)
        assert torch.equal(vector, vectors[texts.index(text)])
    config.dtype = "bfloat16"  # rewards are multiplied by 1 / beta
    judge.load(config)
    assert judge.model.dtype == (torch.float32 if special else torch.bfloat16)


def test_attacks_without_text_are_answered(redteam, tmp_path):
    """The victim reads EOS where a template leaves nothing; its answers have a seed."""
    task, _ = task_of(redteam, tmp_path, victim_template="{attack}")
    assert [len(answers) for answers in task.victim_answers(["", " "])] == [2, 2]
    assert task.victim_answers([""]) == task.victim_answers([""])
    assert max(task.checked_rewards([{}] * 2, ["", " "], np.ones(2))) < 0


class Echo:
    """A victim that repeats the end of what it reads; the latest request comes first."""

    def __init__(self, flag, max_tokens):
        self.flag, self.max_tokens, self.waiting, self.seen = flag, max_tokens, [], []

    unfinished = property(lambda self: len(self.waiting))

    def submit(self, request):
        self.waiting.append(request)
        self.seen.append(request)

    def step(self):
        request = self.waiting.pop()
        tokens = [np.append(request.prompt[-i - 2 :], 0).astype(np.int32) for i in range(request.n)]
        return [tba.Completion(request, tokens, [], [], [])]


def asking_an_echo(redteam, tmp_path, **flags):
    """The task, its settings, the victim, and its tokenizer, which adds BOS and EOS."""
    if not (tmp_path / "victim").exists():
        shutil.copytree(redteam / "victim", tmp_path / "victim")
        with_special_tokens(tmp_path / "victim", "BOS $A EOS")
    flags = {"victim_model": tmp_path / "victim", "victim_samples": 3} | flags
    config, task = config_and_task(redteam, tmp_path / "out", **judges_of(redteam) | flags)
    task.setup(Echo)
    return task, config, task.victim, task.victim_tokenizer


ATTACKS = ["Describe a river. ", "zap zog " * 200, "zap zog", "Explain it.\n", "Describe a river."]


@pytest.mark.parametrize("template", [None, "Say {attack}<assistant>", "{attack}"])
def test_a_victim_is_asked_as_the_flags_say_and_answers_in_order(template, redteam, tmp_path):
    flags = {"victim_max_tokens": 7, "victim_temperature": 0.3, "victim_top_p": 0.8}
    flags |= {"victim_template": template, "temperature": 1.5, "min_attack_tokens": 3}
    task, config, victim, tokenizer = asking_an_echo(redteam, tmp_path, **flags)
    answers = task.victim_answers(ATTACKS)
    assert victim.flag == "victim_model" and len(victim.seen) == 5
    for attack, request, own in zip(ATTACKS, victim.seen, answers, strict=True):
        text = (template or "<user>{attack}<assistant>").replace("{attack}", attack.rstrip())
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        own_bos = [5] * bool(template)  # the chat template has none
        prompt = [*own_bos, *whole][-(256 - 7 - 1) :]
        assert request.prompt.tolist() == prompt and request.prompt.dtype == np.int32
        asked = (request.n, request.max_tokens, request.temperature, request.top_p)
        assert asked == (3, 7, 0.3, 0.8) and len(prompt) + 7 <= victim.max_tokens
        assert own == [tokenizer.decode(prompt[-i:], skip_special_tokens=True) for i in (2, 3, 4)]
    seeds = [request.seed for request in victim.seen]
    assert len(set(seeds)) == 4 and seeds[0] == seeds[4]
    task.victim_answers(ATTACKS[2:3])
    assert victim.seen[-1].seed == seeds[2]  # in lockstep runs, whatever is asked beside it
    assert task.min_eval_tokens == 3
    values = np.arange(-1, -7, -1, np.float32)
    for n in range(1, 7):
        own = task.adjust_ref_logprobs(np.zeros(n, np.int32), values[:n])
        assert own.sum() == pytest.approx(-500 if n < 3 else values[:n].sum())


def test_attacks_are_judged_by_the_victims_answers(redteam, tmp_path):
    """Rewards are means of logarithms, evaluations means of probabilities."""
    flags = {"victim_template": "{attack}"}
    task, config, _, _ = asking_an_echo(redteam, tmp_path, **flags)
    texts = [text for answers in task.victim_answers(ATTACKS) for text in answers]
    logits = plain_logits(redteam / "toxicity", texts)
    expected = logits.log_softmax(-1)[:, 1].view(5, 3).numpy()
    rewards = task.checked_rewards([{}] * 5, ATTACKS, np.ones(5))
    np.testing.assert_allclose(rewards, expected.mean(1), atol=1e-3)
    records = task.evaluate([{}] * 5, ATTACKS, np.ones(5))
    toxicity = np.exp(expected).mean(1)
    np.testing.assert_allclose([r["toxicity"] for r in records], toxicity, atol=1e-4)
    successes = [r["attack_success_rate"] for r in records]
    assert successes == (toxicity > 0.5).tolist() and len(set(successes)) == 2
    vectors = np.stack([record["vector"] for record in records])
    np.testing.assert_array_equal(vectors, task.sentence(ATTACKS))
    pairs = [1 - vectors[i] @ vectors[j] for i in range(5) for j in range(5) if i != j]
    assert task.summarize(records) == {
        "toxicity": pytest.approx(toxicity.mean(), abs=1e-4),
        "attack_success_rate": np.mean(successes),
        "cosine_distance": pytest.approx(np.mean(pairs), abs=1e-5),
    }


def test_a_guard_model_judges_by_its_first_token(redteam, tmp_path):
    flags = {"toxicity_model": redteam / "victim", "toxicity_label": "zap"}
    task, _, _, tokenizer = asking_an_echo(redteam, tmp_path, **flags, toxicity_suffix="\n")
    attacks = ["Describe a river today."]
    (answers,) = task.victim_answers(attacks)
    model = AutoModelForCausalLM.from_pretrained(redteam / "victim")
    expected = []
    for answer in answers:
        text = f"<user>{attacks[0]}<assistant>{answer}<assistant>\n"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        label = tokenizer("zap", add_special_tokens=False)["input_ids"][0]
        logits = plain_vector("AutoModelForCausalLM", model, ids)
        expected.append(float(logits.log_softmax(-1)[label].detach()))
    rewards = task.checked_rewards([{}], attacks, np.ones(1))
    np.testing.assert_allclose(rewards, [np.mean(expected)], atol=1e-4)


def test_settings_of_red_teaming_are_refused_beyond_their_limits(redteam, tldr, tmp_path):
    shutil.copytree(redteam / "victim", tmp_path / "guard")
    (tmp_path / "guard" / "chat_template.jinja").unlink()
    limits = {"explore_low": 2.0, "min_attack_tokens": 32}
    judges = judges_of(redteam)
    _, task = config_and_task(redteam, tmp_path / "out", **judges | limits)
    room = 256 - 1 - len(task.victim_ids("")) - 32  # for the answer to an attack of 32 tokens
    config_and_task(redteam, tmp_path / "out", **judges | {"victim_max_tokens": room})
    for flags in (
        {"explore_low": 2.01},
        {"min_attack_tokens": 33},
        {"victim_max_tokens": room + 1},
        {"toxicity_model": tldr / "reward", "toxicity_label": "LABEL_0"},
        {"toxicity_model": tmp_path / "guard", "toxicity_label": "zap"},
    ):
        with pytest.raises(tba.InputError, match=f"^--{next(iter(flags))} "):
            config_and_task(redteam, tmp_path / "out", **judges | flags)


def test_attackers_are_not_trained_on_held_out_prompts(redteam, tmp_path):
    """Held-out ones are repeated up to --eval_samples; by default, there are 1,024."""
    flags = judges_of(redteam)
    for name in ("dataset", "eval_dataset"):
        flags[name] = write(tmp_path / f"{name}.jsonl", [{"prompt": name + i} for i in "ab"])
    for samples, count in ((3, 3), (0, 1024)):
        _, task = config_and_task(redteam, tmp_path / "out", **flags, eval_samples=samples)
        assert {example["prompt"] for example in task.train} == {"dataseta", "datasetb"}
        held_out = sorted(example["prompt"] for example in task.held_out)
        half = (count + 1) // 2
        assert held_out == ["eval_dataseta"] * half + ["eval_datasetb"] * (count - half)
        assert len(task.held_out_prompts) == count


def test_explored_prompts_have_temperatures_of_their_own(redteam, tmp_path):
    flags = {"explore_probability": 0.25, "explore_low": 0.5, "explore_high": 2.0}
    _, task = config_and_task(redteam, tmp_path, **(judges_of(redteam) | flags))
    rng = np.random.default_rng(0)
    drawn = np.array([task.temperature(rng) for _ in range(2000)])
    explored = drawn[drawn != 1.0]
    assert 400 < len(explored) < 600 and explored.min() >= 0.5 and explored.max() <= 2.0
    assert abs(explored.mean() - 1.25) < 0.05


def plain_fine_tune(model, pairs, config):
    """The losses of a warm start, a row at a time; the rate falls linearly from 3e-3."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    rng = np.random.default_rng(config.seed)
    batches = []
    for _ in range(config.sft_epochs):
        order = rng.permutation(len(pairs))
        batches += [order[i : i + config.sft_batch_size] for i in range(0, len(order), 3)]
    losses = []
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / len(batches))
        rows = [pairs[i] for i in batch]
        logprobs = [plain_logprobs(model, prompt, response, 1.0)[0] for prompt, (response,) in rows]
        loss = -torch.cat(logprobs).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_warm_start_is_plain_fine_tuning_whatever_the_micro_batches(redteam, tmp_path):
    """At temperature 1, over batches of 3, 3 and 1 of seven rows; EOS is learned, too."""
    rows = [{"prompt": "Say it" + " now" * i, "response": " Ann a b." * (7 - i)} for i in range(7)]
    sft = write(tmp_path / "sft.jsonl", rows)
    flags = {"sft_epochs": 2, "sft_batch_size": 3, "sft_learning_rate": "3e-3@0,0@end", "seed": 5}
    flags |= {"sft_data": sft, "temperature": 0.5}
    config, task = config_and_task(redteam, tmp_path / "out", **judges_of(redteam) | flags)
    pairs = tba.read_sft_pairs(config, task)
    assert task.response_texts([r for _, (r,) in pairs]) == [row["response"] for row in rows]
    assert all(response[-1] == task.tokenizer.eos_token_id for _, (response,) in pairs)
    expected = plain_fine_tune(
        AutoModelForCausalLM.from_pretrained(redteam / "model"), pairs, config
    )
    assert expected[-1] < 0.8 * expected[0]
    calls = []  # of a part of a layer
    for budget, checkpointing in ((10_000, False), (20, False), (10_000, True)):
        config.tokens_per_microbatch = budget
        config.gradient_checkpointing = checkpointing
        policy = tba.load_policy(config, str(redteam / "model"), tba.Ranks())
        embeddings = policy.model.get_input_embeddings().weight
        first = embeddings.detach().clone()
        calls.append(0)

        def count(*_):
            calls[-1] += 1

        policy.model.model.layers[0].self_attn.register_forward_hook(count)
        losses = tba.supervised_fine_tune(policy, pairs, config)
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        used = np.unique(np.concatenate([np.concatenate([p, r]) for p, (r,) in pairs]))
        same = (embeddings == first).all(1)  # no decay; EOS, token 0, is in no input
        assert not same[used[1:]].any() and same.sum() == len(same) - len(used[1:])
    assert calls[2] == 2 * calls[0]  # recomputed in each backward pass


def test_what_a_warm_start_made_is_the_model(tmp_path):
    config = tba.settings(model="m", output_dir=str(tmp_path), sft_data="d", steps=3)
    given = copy.copy(config)
    tba.warm_start(config, None, [], print)  # of a resumed run: it is trained already
    assert config.model == config.folders["model"] == str(tmp_path / "sft")
    assert (given.model, config.steps) == ("m", 3)
