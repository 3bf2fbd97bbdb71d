"""Tasks: GSM8K's answer rule, the loader of data, rewards, and task files of one's own."""

import errno
import gzip
import importlib.machinery
import json
import pickle
import sys

import numpy as np
import pytest
from conftest import REAL_GSM8K, arguments, run_tba
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_one_file_holds_out_its_last_tenth(gsm8k, tmp_path):
    rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(20)]
    for suffix, text in (
        (".jsonl", lines(rows)),
        (".json", json.dumps(rows)),
        (".csv", "question,answer\n" + "".join(f"q{i},#### {i}\n" for i in range(20))),
    ):
        path = tmp_path / f"data{suffix}"
        path.write_text(text)
        task = load(gsm8k, tmp_path, path)
        assert [e["question"] for e in task.train] == [f"q{i}" for i in range(18)]
        assert [e["question"] for e in task.held_out] == ["q18", "q19"]


@pytest.mark.parametrize("given", [[3, 12, -4], [2.5, 1000, 7]])
def test_numbers_as_answers_work_as_their_text_does(given, gsm8k, tmp_path):
    table = "question,answer\n" + "".join(f"q,{value}\n" for value in given)
    data = {"a.jsonl": lines({"question": "q", "answer": v} for v in given), "a.csv": table}
    for name, text in data.items():
        (tmp_path / name).write_text(text)
        task = load(gsm8k, tmp_path, tmp_path / name)
        examples = task.train + task.held_out
        right = [f"so #### {v:,}" for v in given]
        ended = np.ones(len(given), bool)
        assert task.rewards(examples, right, ended).tolist() == [1] * len(given)
        assert task.rewards(examples, ["#### 77"] * len(given), ended).tolist() == [0] * len(given)


def test_a_byte_order_mark_is_no_part_of_the_data(gsm8k, tmp_path):
    rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(20)]
    (tmp_path / "a.jsonl").write_text(lines(rows), encoding="utf-8-sig")
    (tmp_path / "a.csv").write_text(
        "question,answer\n" + "".join(f"q{i},{i}\n" for i in range(20)), encoding="utf-8-sig"
    )
    for name in ("a.jsonl", "a.csv"):
        assert load(gsm8k, tmp_path, tmp_path / name).train[0]["question"] == "q0"


def test_eval_samples_leaves_the_held_out_data_whole_for_the_end(gsm8k, redteam, tmp_path):
    for samples in (7, 0):
        assert len(load(gsm8k, tmp_path, gsm8k / "data", eval_samples=samples).held_out) == 200


@pytest.mark.skipif(not REAL_GSM8K.exists(), reason="GSM8K is not beside this repository")
def test_all_of_real_gsm8k(gsm8k, tmp_path):
    task = load(gsm8k, tmp_path, REAL_GSM8K)
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


# ------------------------------------------------------------------------------ texts of tokens


def sentencepiece(model: str) -> PreTrainedTokenizerFast:
    """A tokenizer as SentencePiece makes them, with a token for every byte."""
    words = ["\u2581world", "\u2581the", "\u2581", "wor", "ld", ".", *"abcdehlorwt"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    if model == "unigram":
        scored = [(piece, -float(len(pieces) - i)) for i, piece in enumerate(pieces)]
        tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        whole = [decoders.ByteFallback(), decoders.Metaspace()]
    else:  # as Llama 2's
        merges = [("wor", "ld")]
        vocabulary = {piece: i for i, piece in enumerate([*pieces, "world"])}
        bpe = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        tokenizer = Tokenizer(bpe)
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        whole = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        whole.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(whole)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def problem_with(tokenizer) -> tba.Problem:
    return tba.Problem(None, tokenizer, [], [], [], (1, 1, 1), 1, 1)


@pytest.mark.parametrize("model", ["unigram", "bpe"])
def test_a_response_keeps_its_leading_space(model):
    """What SentencePiece's tokens say alone is not what they say behind a prompt."""
    problem = problem_with(sentencepiece(model))
    ids = problem.tokenizer.convert_tokens_to_ids
    spoken = lambda pieces: problem.response_text(np.array(ids(pieces), np.int32))
    world = ["\u2581world"]
    assert problem.text(ids(world)) == "world"  # which glued two words together
    assert spoken(world) == " world"
    assert spoken(["wor", "ld"]) == "world"
    assert spoken(["\u2581", *world, "</s>"]) == "  world"
    assert spoken([]) == spoken(["</s>"]) == ""
    smile = [f"<0x{byte:02X}>" for byte in "\U0001f600".encode()]
    assert spoken([*smile, *world]) == "\U0001f600 world"
    # a character cut off: what it says does not depend on how a prompt ends
    assert spoken(smile[:3]) == spoken(smile[1:]) == "\ufffd" * 3
    prompts = ["the", "world.", "a\U0001f600"]
    for prompt in (problem.tokenizer(text)["input_ids"] for text in prompts):
        both = [*prompt, *ids(["\u2581the", "\u2581world"])]
        assert problem.text(both) == problem.text(prompt) + spoken(["\u2581the", "\u2581world"])


def test_byte_level_responses_say_what_they_say_alone(gsm8k):
    """Any tokens, with special ones and parts of characters at both ends."""
    tokenizer = tba.transformers.AutoTokenizer.from_pretrained(gsm8k / "model")
    problem, rng = problem_with(tokenizer), np.random.default_rng(0)
    for _ in range(500):
        tokens = rng.integers(0, len(tokenizer), rng.integers(0, 12)).astype(np.int32)
        assert problem.response_text(tokens) == problem.text(tokens)
    smile = tokenizer("\U0001f600", add_special_tokens=False)["input_ids"]
    for part in (smile, smile[1:], smile[:-1]):
        assert problem.response_text(np.array(part, np.int32)) == problem.text(part)


# -------------------------------------------------------------------------- a task of one's own


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([1.0], "[1.0]"),
        ([1.0, 2.0, 3.0], "[1.0, 2.0, 3.0]"),
        (None, "None"),
        ([None, 1.0], "[None, 1.0]"),
        ([float("nan"), 1.0], "[nan, 1.0]"),
        ([[1.0], [2.0]], "[[1.0], [2.0]]"),
        (["good", "bad"], "['good', 'bad']"),
        (0.5, "0.5"),
    ],
)
def test_rewards_that_are_not_one_number_each_are_named_in_training_and_evaluation(given, shown):
    class Mine(tba.Task):
        config = tba.Config(task="mine")

        def rewards(self, examples, responses, ended):
            return given

    task, answers = Mine.__new__(Mine), ([{}, {}], ["a", "b"], np.ones(2, bool))
    for function in (task.checked_rewards, task.evaluate):
        with pytest.raises(tba.InputError) as caught:
            function(*answers)
        must = "it must return 2 finite numbers, one per response"
        assert str(caught.value) == f"--task mine: Mine.rewards returned {shown}; {must}"


def test_rewards_of_any_kind_of_numbers_do_in_training_and_evaluation():
    class Mine(tba.Task):
        metric = "score"

        def rewards(self, examples, responses, ended):
            return [True, 2]

    task, answers = Mine.__new__(Mine), ([{}, {}], ["a", "b"], np.ones(2, bool))
    assert task.checked_rewards(*answers) == [1.0, 2.0]
    records = task.evaluate(*answers)
    assert records == [{"score": 1.0}, {"score": 2.0}] and task.summarize(records) == {"score": 1.5}


MINE = """
import tba
from helper_of_mine import WORD

class Mine(tba.Task):
    columns = ("question", "answer")
    template = "{question} " + WORD

    def rewards(self, examples, responses, ended):
        return [float(str(e["answer"]) in r) for e, r in zip(examples, responses)]

tba.TASKS["mine"] = Mine
"""


@pytest.fixture
def tasks(monkeypatch, fork_server):
    """What a task file changes in this process is undone."""
    monkeypatch.setattr(tba, "TASKS", dict(tba.TASKS))
    monkeypatch.setattr(tba, "OBJECTIVES", dict(tba.OBJECTIVES))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [n for n in sys.modules if n.startswith(("task_file_", "helper_of_mine"))]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "name", ["json.py", "numpy.py", "datasets.py", "tba.py", "my.task-v2.py", "an é.py"]
)
def test_a_task_file_of_any_name(name, tasks, gsm8k, tmp_path, capsys):
    """One named like another module, or with dots, dashes or spaces, with a helper beside it."""
    (tmp_path / name).write_text(MINE)
    (tmp_path / "helper_of_mine.py").write_text("WORD = 'Answer:'\n")
    args = arguments(gsm8k, tmp_path / "run", task="mine", task_file=tmp_path / name)
    assert tba.main([*args, "--dry_run"]) == 0
    assert "task       mine" in capsys.readouterr().out
    config = tba.parse(args)
    tba.resolve(config)
    problem = tba.load_problem(config)
    assert problem.tokenizer.decode(problem.prompts[0]).endswith("? Answer:")
    again = pickle.loads(pickle.dumps(problem.task))  # as it travels to the Searchers
    assert again.rewards([{"answer": 3}] * 2, ["so 3", "4"], None) == [1.0, 0.0]


@pytest.mark.parametrize("name", ["json", "numpy", "datasets", "tba"])
def test_a_task_file_hides_no_module_from_the_searchers(name, tasks, gsm8k, tmp_path):
    """They inherit the search path, and import what this process has imported long ago."""
    (tmp_path / f"{name}.py").write_text(MINE)
    (tmp_path / "helper_of_mine.py").write_text("WORD = 'Answer:'\n")
    tba.load_task_file(str(tmp_path / f"{name}.py"))
    found = importlib.machinery.PathFinder.find_spec(name)
    assert found.origin != str(tmp_path / f"{name}.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import tba\n\nx = (\ny = 1\n", "line 3: SyntaxError: '(' was never closed"),
        ("  x = 1\n", "line 1: IndentationError: unexpected indent"),
        ("class Mine:\n    x = 1\n    y = nonsense\n", "line 3: NameError: name 'nonsense' is not"),
        ("def f():\n    return 1 / 0\n\nf()\n", "line 2: ZeroDivisionError: division by zero"),
        ("import tba\nimport no_such_thing\n", "line 2: ModuleNotFoundError: No module named"),
        ("\nimport json\njson.loads('{')\n", "line 3: JSONDecodeError: Expecting property name"),
        ("import tba\ntba.TASKS['other'] = tba.GSM8K\n", "--task mine: choose one of"),
    ],
)
def test_an_error_in_a_task_file_shows_its_line(text, message, tasks, gsm8k, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(text)
    where = "" if message.startswith("--") else f"--task_file {path}: "
    for more in ([], ["--dry_run"]):
        args = arguments(gsm8k, tmp_path / "run", task="mine", task_file=path)
        assert tba.main([*args, *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"tba.py: error: {where}{message}")


def test_an_error_in_a_task_file_of_a_relative_path_shows_its_line(
    tasks, gsm8k, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("class Mine:\n    y = nonsense\n")
    assert tba.main(arguments(gsm8k, tmp_path / "run", task="mine", task_file="mine.py")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tba.py: error: --task_file mine.py: line 2: NameError: ")


def test_an_error_in_a_task_files_helper_shows_the_line_that_imports_it(tasks, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "helper_of_mine.py").write_text("\n\n\n\nWORD = (\n")
    with pytest.raises(ValueError, match=r"line 3: SyntaxError: .*helper_of_mine.py, line 5"):
        tba.load_task_file(str(tmp_path / "mine.py"))


def test_a_task_file_that_is_missing_or_no_python(gsm8k, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text(MINE)
    for path in (tmp_path / "none.py", tmp_path / "mine.txt", tmp_path):
        args = arguments(gsm8k, tmp_path / "run", task="mine", task_file=path)
        assert tba.main(args) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"tba.py: error: --task_file {path}: no such Python file"


WRONG = """
import math, sys
import torch
import tba


class Mine(tba.Task):
    columns = ("question", "answer")

    def prompt(self, example):
        return example["question"]

    def rewards(self, examples, responses, ended):
        return [0.5] * len(responses)


tba.TASKS["mine"] = Mine
"""
LAST = len(WRONG.splitlines())  # the line before those that a case adds
NEW_METHOD = "def wrong(self, *arguments):\n    return {}\nMine.{} = wrong\n"
WRONG_TASKS = {  # what a task file does wrong: (its last lines, the message)
    "prompt raises": (
        "def wrong(self, example):\n    return example['txt']\nMine.prompt = wrong",
        f"line {LAST + 2}: KeyError: 'txt' (in Mine.prompt, training row 0)",
    ),
    "prompt is missing": ("del Mine.prompt", "Mine has no prompt method and no template"),
    "prompt returns None": (
        NEW_METHOD.format("None", "prompt"),
        "Mine.prompt returned None; it must return a text (training row 0)",
    ),
    "prompt is empty": (NEW_METHOD.format("''", "prompt"), "the prompt of training row 0 has no t"),
    "rewards raises": (
        NEW_METHOD.format("1 / 0", "rewards"),
        f"line {LAST + 2}: ZeroDivisionError: division by zero (in Mine.rewards)",
    ),
    "rewards returns one number": (
        NEW_METHOD.format("0.5", "rewards"),
        "Mine.rewards returned 0.5; it must return 2 finite numbers, one per response",
    ),
    "rewards is missing": ("del Mine.rewards", "NotImplementedError (in Mine.rewards)"),
    "evaluate returns texts": (
        NEW_METHOD.format("['a', 'b']", "evaluate"),
        "Mine.evaluate returned ['a', 'b']; it must return one dict of finite numbers per response",
    ),
    "evaluate returns texts in dicts": (
        NEW_METHOD.format("[{'m': 'a'}] * 2", "evaluate"),
        "Mine.evaluate returned [{'m': 'a'}, {'m': 'a'}]; it must return one dict of finite",
    ),
    "evaluate returns NaN": (
        NEW_METHOD.format("[{'m': 1.0}, {'m': math.nan}]", "evaluate"),
        "Mine.evaluate returned [{'m': 1.0}, {'m': nan}]; it must return one dict of finite",
    ),
    "evaluate returns too few": (
        NEW_METHOD.format("[{'m': 1.0}]", "evaluate"),
        "Mine.evaluate returned [{'m': 1.0}]; it must return one dict of finite numbers per",
    ),
    "evaluate returns different keys": (
        NEW_METHOD.format("[{'m': 1.0}, {'n': 1.0}]", "evaluate"),
        "Mine.evaluate returned [{'m': 1.0}, {'n': 1.0}]; it must return one dict of finite",
    ),
    "summarize raises": (
        NEW_METHOD.format("{}['m']", "summarize"),
        f"line {LAST + 2}: KeyError: 'm' (in Mine.summarize)",
    ),
    "summarize returns texts": (
        NEW_METHOD.format("{'m': 'good'}", "summarize"),
        "Mine.summarize returned {'m': 'good'}; it must return a dict of numbers, one or more,",
    ),
    "summarize returns nothing": (
        NEW_METHOD.format("{}", "summarize"),
        "Mine.summarize returned {}; it must return a dict of numbers, one or more,",
    ),
    "summarize returns a name that is taken": (
        NEW_METHOD.format("{'step': 1.0}", "summarize"),
        "Mine.summarize returned {'step': 1.0}; it must return a dict of numbers, one or more,",
    ),
    "a metric without a name": (
        NEW_METHOD.format("[{3: 1.0}, {3: 1.0}]", "evaluate"),
        "Mine.summarize returned {3: 1.0}; it must return a dict of numbers, one or more,",
    ),
    "vectors returns a number": (
        NEW_METHOD.format("3", "vectors"),
        "TypeError: object of type 'int' has no len() (in Mine.vectors)",
    ),
    "a task that holds a file": (
        "Mine.special_tokens = True\n"
        "def wrong(self, config, tokenizer):\n"
        "    tba.Task.__init__(self, config, tokenizer)\n"
        "    self.file = open(__file__)\n"
        "Mine.__init__ = wrong",
        "Mine cannot be pickled, to be sent to Searchers: cannot pickle '_io.TextIOWrapper' object",
    ),
    "a task that cannot be unpickled": (
        "def wrong(self, state):\n    raise OSError('gone')\nMine.__setstate__ = wrong",
        f"line {LAST + 2}: OSError: gone (in a Searcher's process)",
    ),
    "a reward that ends its process": (
        "import os\n" + NEW_METHOD.format("os._exit(3)", "rewards"),
        "Mine ended its process, when it was tried, with exit code 3",
    ),
    "__init__ raises": (
        NEW_METHOD.format("int('x')", "__init__"),
        f"line {LAST + 2}: ValueError: invalid literal for int() with base 10: 'x' (in Mine.__ini",
    ),
    "check raises": (
        NEW_METHOD.format("len(3)", "check"),
        f"line {LAST + 2}: TypeError: object of type 'int' has no len() (in Mine.__init__)",
    ),
    "no examples": (NEW_METHOD.format("[], []", "examples"), "it has no training or held-out ex"),
    "__init__ without its base's": (
        NEW_METHOD.format("None", "__init__"),
        "AttributeError: 'Mine' object has no attribute 'train' (in Mine.__init__)",
    ),
    "special_tokens is neither true nor false": (
        "Mine.special_tokens = None",
        "TypeError: 'None' is not an instance of 'bool' (in Mine.special_tokens)",
    ),
    "columns that are no tuple": (
        "Mine.columns = 'question'",
        "the columns of Mine are 'question'; they must be a tuple",
    ),
    "models that are no flags": ("Mine.models = ('judge',)", "Mine.models names ('judge',); all"),
    "an instance": (
        "tba.TASKS['mine'] = Mine.__new__(Mine)",
        "enter a class derived from tba.Task",
    ),
    "a function": ("tba.TASKS['mine'] = len", "enter a class derived from tba.Task"),
    "an end": ("sys.exit('enough')", f"line {LAST + 1}: SystemExit: enough"),
    "a bare loss": (
        "tba.OBJECTIVES['mine'] = lambda batch, config: batch.logprobs.sum()",
        "the objective mine returned tensor(",
    ),
    "a float": (
        "tba.OBJECTIVES['mine'] = lambda batch, config: tba.Loss(0.5, batch.rewards.mean(1))",
        "the objective mine returned Loss(loss=0.5, log_z=tensor([",
    ),
    "a loss that is not reduced": (
        "tba.OBJECTIVES['mine'] = lambda batch, config: "
        "tba.Loss(batch.sums(batch.logprobs), batch.rewards.mean(1))",
        "it must return tba.Loss(loss, log_z, metrics): a scalar tensor with a gradient, a tensor",
    ),
    "a loss without a gradient": (
        "tba.OBJECTIVES['mine'] = lambda batch, config: "
        "tba.Loss(batch.ref_logprobs.sum(), batch.rewards.mean(1))",
        "it must return tba.Loss(loss, log_z, metrics): a scalar tensor with a gradient, a tensor",
    ),
    "an objective that raises": (
        "def wrong(batch):\n    pass\ntba.OBJECTIVES['mine'] = wrong",
        "TypeError: wrong() takes 1 positional argument but 2 were given (in the objective mine)",
    ),
}


@pytest.mark.parametrize("case", WRONG_TASKS)
def test_a_task_or_objective_of_ones_own_that_is_wrong(case, tasks, gsm8k, tmp_path, capsys):
    """One line, code 2, before anything is started."""
    last, message = WRONG_TASKS[case]
    path, out = tmp_path / "mine.py", tmp_path / "run"
    path.write_text(WRONG + last + "\n")
    objective = "mine" if "'mine'" in last and "OBJECTIVES" in last else "tb"
    args = arguments(gsm8k, out, task="mine", task_file=path, objective=objective)
    assert tba.main([*args, "--dry_run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tba.py: error: --") and message in line
    assert not out.exists()


def test_a_null_cell_and_a_list_in_a_column_of_ones_own_task(tasks, gsm8k, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(WRONG)
    for cell in (None, ["a", "b"], {"a": 1}, 3, 0.5):
        rows = [{"question": cell, "answer": f"{i}"} for i in range(4)]
        if cell is None:
            rows[0]["question"] = "q"  # one null among texts
        (tmp_path / "data.jsonl").write_text(lines(rows))
        flags = {"task": "mine", "task_file": tmp_path / "mine.py"}
        args = arguments(gsm8k, tmp_path / "run", dataset=tmp_path / "data.jsonl", **flags)
        assert tba.main([*args, "--dry_run"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "Mine.prompt returned " in line and "; it must return a text (" in line


def test_an_objective_that_is_right_is_not_refused(tasks, gsm8k, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import tba\n"
        "def mine(batch, config):\n"
        "    loss = -(batch.sums(batch.logprobs) * batch.rewards).mean()\n"
        "    return tba.Loss(loss, batch.rewards.new_zeros(len(batch.rewards)))\n"
        "tba.OBJECTIVES['mine'] = mine\n"
    )
    flags = {"task_file": tmp_path / "mine.py", "objective": "mine"}
    assert tba.main([*arguments(gsm8k, tmp_path / "run", **flags), "--dry_run"]) == 0
    assert not capsys.readouterr().err


def test_a_searcher_ends_the_run_if_a_task_that_it_sets_up_returns_nonsense(gsm8k, tmp_path):
    """What it returned is said in one line, without a traceback, by a real run."""
    (tmp_path / "mine.py").write_text(
        WRONG + "Mine.setup = lambda self, device, engine_of: None\n"
        "Mine.evaluate = lambda self, examples, responses, ended: ['a']\n"
    )
    flags = {"task": "mine", "task_file": tmp_path / "mine.py"}
    _, err = run_tba(arguments(gsm8k, tmp_path / "run", **flags), code=1)
    said = f"tba.py: error: --task_file {tmp_path / 'mine.py'}: Mine.evaluate returned ['a']; it "
    assert said in err and "Traceback" not in err and "restart" not in err


# ------------------------------------------------------------------------------ kinds of files


def test_files_of_every_kind_are_read_whatever_their_names(gsm8k, tmp_path):
    """Also compressed, in upper case, and with characters that mean a pattern elsewhere."""
    rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(20)]
    table = "question,answer\n" + "".join(f"q{i},#### {i}\n" for i in range(20))
    files = {
        "a.tsv": table.replace(",", "\t").encode(),
        "a.jsonl.gz": gzip.compress(lines(rows).encode()),
        "a.json.gz": gzip.compress(json.dumps(rows).encode()),
        "a.csv.gz": gzip.compress(table.encode()),
        "A.JSONL": lines(rows).encode(),
        "A.CSV.GZ": gzip.compress(table.encode()),
        "a[1].jsonl": lines(rows).encode(),
        "a*?b.jsonl": lines(rows).encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        task = load(gsm8k, tmp_path, tmp_path / name)
        assert [e["question"] for e in task.train + task.held_out] == [f"q{i}" for i in range(20)]


def test_folders_of_save_to_disk_are_read(gsm8k, tmp_path):
    import datasets

    rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(20)]
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(tmp_path / "one")
    parts = {"train": table.select(range(5)), "test": table.select(range(5, 20))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "two")
    for name, count in ("one", 18), ("two", 5):
        task = load(gsm8k, tmp_path, tmp_path / name)
        assert (len(task.train), len(task.held_out)) == (count, 20 - count)
        assert task.held_out[0] == rows[count]


def test_a_cache_that_cannot_be_written_is_said_to_be_that(gsm8k, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/dev/null/cache")
    with pytest.raises(ValueError, match=r"/dev/null.*; set the environment variable HF_HOME to"):
        load(gsm8k, tmp_path, REAL_GSM8K if REAL_GSM8K.exists() else gsm8k / "data")
    data = tmp_path / "locked.csv"
    data.write_text("question,answer\nq,1\n")
    refused = PermissionError(errno.EACCES, "Permission denied", str(data))
    assert not tba.cache_refused(refused, str(data))  # there HF_HOME would not help


def test_an_example_is_named_by_its_row_of_the_file(gsm8k, tmp_path):
    rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(40)]
    data = tmp_path / "data.jsonl"
    data.write_text(lines([*rows[:38], {"question": " ", "answer": "1"}, rows[39]]))
    with pytest.raises(ValueError, match="held-out row 38: the question is empty"):
        load(gsm8k, tmp_path, data)
    long = {"question": "apples " * 400, "answer": "1"}
    args = arguments(gsm8k, tmp_path / "out", dataset=data)
    config = tba.parse(args)
    tba.resolve(config)
    data.write_text(lines([*rows[:37], long, *rows[38:]]))
    with pytest.raises(ValueError, match=r"of held-out row 37 \(\d+ tokens\).*--skip_long_prompts"):
        tba.load_problem(config)


def test_what_too_little_data_lack_is_said(gsm8k, tmp_path, monkeypatch):
    import datasets

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("question,answer\nq,1\n")
    with pytest.raises(ValueError, match=r"it has 1 row\(s\); it needs two rows or more"):
        load(gsm8k, tmp_path, tmp_path / "data")
    table = datasets.Dataset.from_dict({"question": ["q"], "answer": ["1"]})
    splits = {"train": table, "test": table.select([])}  # files cannot say so, but the hub can
    monkeypatch.setattr(tba, "read_dataset", lambda *_: splits)
    with pytest.raises(ValueError, match="its held-out split has no rows"):
        load(gsm8k, tmp_path, tmp_path / "data")


@pytest.mark.parametrize(
    "limit", [{"max_response_tokens": 32}, {"max_total_tokens": 120, "max_response_tokens": 8}]
)
def test_long_prompts_are_left_out_counted_and_said(limit, gsm8k, tmp_path, capsys):
    """With their examples: a prompt's number is its example's, and resuming finds them again."""
    rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(40)]
    for i in (3, 17, 38):
        rows[i] = {"question": "apples " * 400, "answer": str(i)}
    data = tmp_path / "data.jsonl"
    data.write_text(lines(rows))
    args = [*arguments(gsm8k, tmp_path / "out", dataset=data, **limit), "--skip_long_prompts"]
    assert tba.main([*args, "--dry_run"]) == 0
    assert "left out as too long: 2 training and 1 held-out prompts" in capsys.readouterr().out
    config = tba.parse(args)
    tba.resolve(config)
    problem = tba.load_problem(config)
    assert problem.left_out == (2, 1)
    pairs = [(problem.task.train, problem.prompts), (problem.task.held_out, problem.held_out)]
    for examples, prompts in pairs:
        assert len(examples) == len(prompts)
        for example, tokens in zip(examples, prompts, strict=True):
            assert f"{example['question']}\n" in problem.text(tokens)
    assert [len(prompts) for _, prompts in pairs] == [34, 3]
    shorter = tmp_path / "shorter"  # the same data without them is the same problem
    shorter.mkdir()
    for name, part in ("train", rows[:36]), ("test", rows[36:]):
        kept = [row for row in part if len(row["question"]) < 10]
        (shorter / f"{name}.jsonl").write_text(lines(kept))
    again = tba.load_problem(tba.dataclasses.replace(config, dataset=str(shorter)))
    assert problem.checksum() == again.checksum() and again.left_out == (0, 0)
    nothing = tba.dataclasses.replace(config, max_response_tokens=250)
    with pytest.raises(ValueError, match="--skip_long_prompts True: no training prompt is short"):
        tba.load_problem(nothing)
