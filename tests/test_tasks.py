"""Tasks: GSM8K's answer rule, the loader of data, rewards, and task files of one's own."""

import importlib.machinery
import json
import pickle
import sys

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
        def rewards(self, examples, responses, ended):
            return given

    task, answers = Mine.__new__(Mine), ([{}, {}], ["a", "b"], np.ones(2, bool))
    for function in (task.checked_rewards, task.evaluate):
        with pytest.raises(ValueError) as caught:
            function(*answers)
        assert str(caught.value) == f"rewards must be 2 finite numbers; they are {shown}"


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
def tasks(monkeypatch):
    """What a task file changes in this process is undone."""
    monkeypatch.setattr(tba, "TASKS", dict(tba.TASKS))
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
    config.resolve()
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
