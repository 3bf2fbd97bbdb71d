"""Data, tokenizers and model folders as people have them: some 330 cases.

Each is made in a temporary folder and goes through everything that tba.py does before it loads a
model. It either trains on exactly the rows that its table says, or is refused in a line that names
the flag. Nothing is downloaded.
"""

import base64
import gzip
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest
import transformers
from conftest import MODELS
from harness import config_and_task, judges_of
from safetensors.torch import load_file, save_file

import tba

CASES = []
SUFFIXES = {list: "jsonl", str: "csv", bytes: "parquet"}


def cases(
    expected: str, table: dict[str, Any], check: Callable[..., bool] = lambda *_: True, **flags: Any
) -> None:
    """Add cases that end alike: {name: files}, of which the first, or its folder, is the dataset.

    Files are {name: content}, or rows of JSON lines, the text of a CSV file, the bytes of Parquet.
    Expected are alternatives between "or": "18+2" rows, "18+1: word" of a warning, "--flag, word"
    of a refusal. The check is of the settings and the task that was loaded.
    """
    for name, files in table.items():
        if not isinstance(files, dict):
            files = {f"a.{SUFFIXES[type(files)]}": files}
        named = {} if flags.get("dataset") is None else {"dataset": flags["dataset"]}
        first = {"dataset": next(iter(files)).split("/")[0]} if files else {}
        CASES.append(pytest.param(files, expected, flags | first | named, check, id=name))


def put(path: Path, content: Any) -> None:
    """Write a file of these bytes, text or rows; a function writes its own.

    A dict changes values of a JSON file; None removes a file, or one of these values.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        content(path)
    elif content is None:
        path.unlink()
    elif isinstance(content, dict):
        values = json.loads(path.read_text()) | content
        put(path, json.dumps({name: v for name, v in values.items() if v is not None}))
    elif isinstance(content, list):
        put(path, jsonl(content))
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


# ---------------------------------------------------------------------------- judging an outcome


def prompt_text(prompt: tba.Prompt) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def faults_of(config: tba.Config, task: tba.Task) -> list[str]:
    """What is wrong with rows that would be trained on."""
    faults = []
    held_out = task.held_out, task.held_out_prompts
    for examples, prompts in ((task.train, task.train_prompts), held_out):
        texts = [*map(prompt_text, map(task.prompt, examples))]
        texts += map(task.tokenizer.decode, prompts)
        wrong = [t for t in texts if re.search(r"wrong|None|nan|\{'|\['|\[\{", t)]
        faults += [f"prompt {text!r:.60}" for text in wrong]
        for example, prompt in zip(examples, prompts, strict=True):
            meant = prompt_text(task.prompt(example)).endswith(task.tokenizer.eos_token)
            if int(prompt[-1]) in task.end_tokens and not meant:
                faults.append("a prompt ends with EOS")
            gold, right = [*example.values()][-1], True
            if config.task == "gsm8k":
                right = task.rewards([example], [gold], np.ones(1))[0]
            if config.task == "math":
                bare = gold.rpartition("####")[2]
                right = task.judge(gold, gold if "boxed" in gold else f"\\boxed{{{bare}}}")
            asked = re.fullmatch(r"What is (\d+) and \1\?", example.get("question", ""))
            if asked and re.fullmatch(r"#### \d+", gold):  # the answer of its own row
                right = gold == f"#### {2 * int(asked[1])}"
            if not right:
                faults.append(f"{gold!r} is not right")
    return [*dict.fromkeys(faults)]


@pytest.fixture(scope="module")
def loaded_once():
    """The models of tests/models, which no case changes, are checked once."""
    check, known = tba.check_model, {}

    def checked(name, config, kind="AutoModelForCausalLM"):
        key = getattr(config, name), kind
        if key not in known or not key[0].startswith(f"{MODELS}/"):
            known[key] = check(name, config, kind)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tba, "check_model", checked)
        yield


# ------------------------------------------------------------------------------- rows and files

ROWS = [{"question": f"What is {i} and {i}?", "answer": f"#### {2 * i}"} for i in range(20)]
THREE = ROWS[:3]
WRONG = [{"question": "wrong", "answer": "#### 1"}] * 20
MISSING = object()
ALL = "18+2"  # of twenty rows, the last tenth, or a random one, is held out
NO, NO_QUESTION, NO_ANSWER = "--dataset", "--dataset, question", "--dataset, answer"
EITHER = "18+2 or --dataset"


def row(i: int, *words: str, flag: str = "dataset") -> str:
    """A refusal that names a row, too."""
    return ", ".join([f"--{flag}", f"row {i} ", *words])


def left_out(i: int, *words: str, flag: str = "dataset", rows: str = "18+1") -> str:
    """One row cannot be used, and a warning names it."""
    return f"{rows}: warning: {row(i, *words, flag=flag)}"


def with_row(i: int = 3, **cells: Any) -> list[dict]:
    """ROWS with other cells in one row; MISSING leaves one out."""
    changed = {name: cell for name, cell in (ROWS[i] | cells).items() if cell is not MISSING}
    return [changed if n == i else row for n, row in enumerate(ROWS)]


def each(rows: list[dict] = ROWS, **columns: Any) -> list[dict]:
    """Rows with other columns: functions of the row's number, or a cell for all."""
    return [
        row | {name: cell(i) if callable(cell) else cell for name, cell in columns.items()}
        for i, row in enumerate(rows)
    ]


def jsonl(rows: list, separator: str = "\n") -> str:
    return "".join(json.dumps(row) + separator for row in rows)


def answers(values: Any) -> bytes:
    """Parquet of ROWS with answers of another type."""
    out = io.BytesIO()
    table = pa.table({"question": FRAME["question"].tolist(), "answer": values})
    pyarrow.parquet.write_table(table, out)
    return out.getvalue()


def saved(**splits: list) -> Callable[[Path], None]:
    """`save_to_disk` of one Dataset, called `all`, or of a DatasetDict."""
    many = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    one = many.get("all") or datasets.DatasetDict(many)
    return one.save_to_disk


csv = lambda rows, index=False, **options: pandas.DataFrame(rows).to_csv(index=index, **options)
link = lambda target: lambda path: path.symlink_to(target)
splits = lambda **rows: {f"d/{name}.jsonl": own for name, own in rows.items()}
FRAME = pandas.DataFrame(ROWS)
LINES, CSV, PARQUET = jsonl(ROWS), csv(ROWS), FRAME.to_parquet(index=False)
FORMS = {
    "a.jsonl": LINES, "a.json": json.dumps(ROWS), "a.csv": CSV, "a.tsv": csv(ROWS, sep="\t"),
    "a.parquet": PARQUET,
}  # fmt: skip
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = "<!DOCTYPE html>\n<html><body>\n</body></html>\n"
CHAT = [{"role": "user", "content": "x"}]
TEST = f"{NO_ANSWER}, test"

# ---------------------------------------------------------------- data: forms of files, encodings

for name, whole in FORMS.items():
    encoded = whole.encode() if isinstance(whole, str) else whole
    cases(ALL, {f"{name} in upper case": {name.upper(): encoded}})
    cases(NO, {
        f"an empty {name}": {name: b""}, f"{name} is a web page": {name: PAGE},
        f"a truncated {name}.gz": {f"{name}.gz": gzip.compress(encoded)[:-20]},
        f"{name} is a git-lfs pointer": {name: LFS}})  # fmt: skip
    if name in ("a.jsonl", "a.json", "a.parquet"):
        cases(NO, {f"a truncated {name}": {name: encoded[:-20]}})
    if isinstance(whole, str):
        cases(NO, {f"no gzip in {name}.gz": {f"{name}.gz": encoded}})
        cases(ALL, {f"{name} with CRLF": {name: whole.replace("\n", "\r\n")},
            f"{name}, gzip": {f"{name}.gz": gzip.compress(encoded)}})  # fmt: skip
        cases(EITHER, {f"{name} with a byte-order mark": {name: "\ufeff" + whole}})
        latin = whole.replace("What", "Qu\xe9", 1).encode("latin-1")
        cases(NO, {f"{name} in Latin-1": {name: latin}})
cases(ALL, {
    ".ndjson": {"a.ndjson": ROWS}, "JSON lines called .json": {"a.json": ROWS},
    "Parquet by pandas with an index": FRAME.set_index(np.arange(5, 25)).to_parquet(),
    "no newline at the end": {"a.jsonl": LINES.rstrip()},
    "blank lines in JSON lines": {"a.jsonl": jsonl(ROWS, "\n\n")},
    "blank lines in CSV": CSV.replace("\n", "\n\n")})  # fmt: skip
cases(EITHER, {"JSON array called .jsonl": {"a.jsonl": json.dumps(ROWS)},
    "half of a surrogate pair": {"a.jsonl": LINES.replace("What", "\\ud83c", 1)}})  # fmt: skip
cases(NO, {
    "pickle": {"a.pkl": FRAME.to_pickle}, "only a newline": {"a.jsonl": "\n"},
    "Python loading script": {"a.py": "import datasets\n"},
    "CSV of a header": "question,answer\n", "Parquet without rows": FRAME[:0].to_parquet(),
    "a line that is no JSON": {"a.jsonl": LINES + "done.\n"},
    "a line that is a list": {"a.jsonl": LINES + "[1, 2]\n"}})  # fmt: skip

# ------------------------------------------------------------------------------- data: spreadsheets

gold_is = lambda x: lambda config, task: tba.extract_number(task.train[0]["answer"]) == x

cases(ALL, {
    "CSV with pandas' index": csv(ROWS, index=True),
    "quoted newlines and commas": csv(with_row(question='What,\nis\r\n"it"?')),
    "CSV of whole numbers as answers": csv(each(answer=lambda i: i)),
    "CSV answers with zeros in front": CSV.replace("#### ", "00"),
    "CSV answers with thousands separators": csv(with_row(answer="1,200"))})  # fmt: skip
cases(ALL, {"CSV answers with exponents": csv(each(answer="1e-05"))}, check=gold_is(1e-05))
cases(NO, {
    "CSV with semicolons": csv(ROWS, sep=";"), "CSV without a header": csv(ROWS, header=False),
    "CSV with an unclosed quote": CSV.replace("What", '"What', 1),
    "CSV with a long row": CSV + "What is it?,1,2,3\n",
    "CSV answers True and False": csv(each(answer=lambda i: i % 2 == 0))})  # fmt: skip
cases(NO_QUESTION, {"CSV with upper-case columns": CSV.replace("question", "Question")})
cases(left_out(20, rows="18+2"), {"CSV with a short row": CSV + "What is it?\n"})
integers = lambda config, task: {x["answer"] for x in task.train} <= {str(i) for i in range(20)}
one = csv(each(answer=lambda i: i or None))
cases(left_out(0, "answer"), {"CSV of numbers, one missing": one}, integers)
cases(row(0, "20 of 20", "answer"), {"CSV answers A": csv(each(answer="A"))})
for cell in ("NA", "None", "nan", "#REF!"):
    cases(left_out(3, "answer"), {f"CSV answer {cell}": csv(with_row(answer=cell))})
for n, expected in {20: "17+1: 2 of 20, row 0 ", 19: "--dataset, 2 of 19, row 0 "}.items():
    rows = each(ROWS[:2], answer="?") + ROWS[2:n]
    cases(expected, {f"2 of {n} rows without an answer": rows})

# ------------------------------------------------------------------------- data: columns and cells

for whole in ({"train": ROWS[:18], "test": ROWS[18:]}, FRAME.to_dict(), [ROWS], 3, ["What?"] * 20):
    cases(NO, {f"JSON: {whole!r:.30}": {"a.json": json.dumps(whole)}})
cases(ALL, {"more columns": each(id=lambda i: i, tags=["x"], meta={"a": 1}),
    "one prompt in all rows": [ROWS[1]] * 20})  # fmt: skip
cases(NO, {"one row": ROWS[:1]})
cases(left_out(3), {"JSON with NaN": {"a.jsonl": LINES.replace('"#### 6"', "NaN")}})
for n, expected in {2: "1+1", 3: "2+1", 19: "18+1"}.items():
    cases(expected, {f"{n} rows": ROWS[:n]})
cases("36+4", {"rows that are there twice": ROWS * 2})
cases(f"{NO_QUESTION}, messages", {"columns of chats": [{"messages": CHAT}] * 20})

NOTHING = {"null": None, "empty": "", "blank": " \n\t", "absent": MISSING}
NO_TEXTS = {  # a column of mixed types may not be read, so no row is named
    "a list": ["What", "is"], "an object": {"text": "x"}, "a bool": True, "a chat": CHAT,
}  # fmt: skip
for which in ("question", "answer"):
    for (name, cell), i in zip(NOTHING.items(), (3, 0, 19, 19), strict=True):
        cases(left_out(i, which), {f"{which} {i} is {name}": with_row(i, **{which: cell})})
    for name, cell in NO_TEXTS.items():
        expected = f"18+1: row 3 , {which} or --dataset, {which}"
        cases(expected, {f"one {which} is {name}": with_row(**{which: cell})})
        cases(f"--dataset, {which}", {f"all {which}s are {name}": each(**{which: cell})})
    cases(row(0, which), {f"all {which}s are null": each(**{which: None})})
cases(left_out(3, "answer"), {"one answer without a number": with_row(answer="A")})
for value in (1e-05, 1e22, 123456789.5, -7, "1" * 30):
    cases(ALL, {f"the answer {value}": each(answer=value)}, check=gold_is(float(value)))
cases(ALL, {"numbers as questions": each(question=lambda i: i)})
cases(left_out(19, "answer"), {"Parquet: one NaN": answers([1.0] * 19 + [float("nan")]),
    "Parquet: one infinity": answers([1.0] * 19 + [float("inf")])})  # fmt: skip
cases(ALL, {"Parquet: whole numbers as floats": answers(np.arange(20.0))}, integers)
cases(ALL, {"Parquet: decimals": answers([Decimal("5.00")] * 20)}, gold_is(5.0))
cases(NO_ANSWER, {"Parquet: bytes": answers([b"#### 4"] * 20),
    "Parquet: dates": answers(pa.array(range(20), pa.date32()))})  # fmt: skip

# ------------------------------------------------------------------------------------ data: paths

SIBLINGS = {  # what a name might be taken for, as a pattern or an address
    "run[1]": "run1", "x*": "xy", "what?": "whats", "{a,b}": "a", "a%20b": "a b", "a#1": "a",
    "a:b": "a", "s::p": "s", "my data": "my", "données 数据": "donn", 'ann\'s "run"': "ann",
    "a.v2": "a", "test": "train", "validation-1": "validation", "a copy (2).json": "a copy (2)",
}  # fmt: skip
for name, other in SIBLINGS.items():
    file = {f"{name}.jsonl": ROWS, f"{other}.jsonl": WRONG, other: WRONG}
    folder = {f"{name}/train.jsonl": ROWS, f"{other}/train.jsonl": WRONG}
    cases(ALL, {f"a file called {name}": file, f"a folder called {name}": folder})
cases(ALL, {"a link to a folder": {"b": link("d"), "d/train.jsonl": ROWS},
    "a folder of links": {"d/train.jsonl": link("../blobs/0f3a"), "blobs/0f3a": ROWS}})  # fmt: skip
for path in ("run[1]/-a.jsonl", "run[1]/"):
    files = {"run[1]/-a.jsonl": ROWS, "run1/-a.jsonl": WRONG}
    cases(ALL, {f"the path {path}": files}, dataset=path)
cases(NO, {"a broken link": {"b.jsonl": link("gone.jsonl")}})
cases("--dataset, does not exist", {"a file that is not in a home": {}}, dataset="~/a.jsonl")
for path in (
    "missing.jsonl", "$HOME/data.jsonl", "/dev/null", "", " ", "openai/gsm8k:main",
    "openai/gsm8k:main:train", "http://127.0.0.1:9/a.jsonl", "s3://bucket/a.jsonl",
    "a.jsonl,b.jsonl", "*.jsonl", MODELS / "gsm8k" / "model",
):  # fmt: skip
    cases(NO, {f"the path {path}": {"a.jsonl": ROWS, "b.jsonl": ROWS}}, dataset=path)

# ---------------------------------------------------------------------- data: folders and splits

spark = {"part-00000-0a.snappy.parquet": PARQUET, "_SUCCESS": "", "._SUCCESS.crc": b"crc"}
half = lambda i: {f"d/data/train-{i:05}-of-00002.parquet": FRAME[10 * i :][:10].to_parquet()}
cases(ALL, {
    "a folder of one file": {"d/mine.jsonl": ROWS}, "a hub's folder data/": half(0) | half(1),
    "a folder with a README and data": {"d/README.md": "# Data\n", "d/train.jsonl": ROWS},
    "Spark's folder": {f"x.parquet/{name}": part for name, part in spark.items()},
    "save_to_disk of a Dataset": {"d": saved(all=ROWS)}})  # fmt: skip
disk = {"d": saved(train=ROWS, test=THREE)}
cases(ALL, {"save_to_disk, one split of it": disk}, dataset="d/train")
cases(NO, {
    "an empty folder": {"d": Path.mkdir}, "a folder with a README": {"d/README.md": "# Data\n"},
    "a folder of hidden files": {"d/.train.jsonl": ROWS},
    "a folder of git-lfs pointers": {"d/train-00000-of-00001.parquet": LFS},
    "save_to_disk without its Arrow file":
        {"d": saved(all=ROWS), "d/data-00000-of-00001.arrow": None}})  # fmt: skip
cases("20+3", {"train and test": splits(train=ROWS, test=THREE),
    "a folder with train/ and test/": {"d/train/a.jsonl": ROWS, "d/test/a.jsonl": THREE},
    "train and validation": splits(train=ROWS, validation=THREE),
    "train, validation and test": splits(train=ROWS, validation=WRONG, test=THREE),
    "train and an unused split": {"d": saved(train=ROWS, test=THREE, extra=WRONG)}})  # fmt: skip
cases(NO, {"only validation and test": splits(validation=ROWS, test=THREE),
    "an empty training split": {"d": saved(train=[], test=ROWS)},
    "a test split without answers": splits(train=ROWS, test=[{"question": "What?"}])})  # fmt: skip
cases("--dataset, easy, hard", {"two splits of other names": {"d": saved(easy=ROWS, hard=ROWS)}})
cases(EITHER, {"an empty test split": splits(train=ROWS, test=[])})
cases(TEST, {"a test split with hidden answers": splits(train=ROWS, test=each(THREE, answer="?"))})
null = splits(train=ROWS, test=with_row(question=None))
cases(left_out(3, "test", rows="20+19"), {"a test split with a null question": null})
for name, wrong in {"train": "test", "test": "train"}.items():
    files = splits(**{name: ROWS, wrong: WRONG})
    cases(ALL, {f"the file of split {name}": files}, dataset=f"d/{name}.jsonl")
cases("--dataset, train_split", {"a split as a configuration": disk}, dataset="d:test")
cases("--dataset, train, name one", {
    "a split in two formats": {"d/train.jsonl": ROWS, "d/train.csv": CSV},
    "a split as Parquet, too": {"d/train.jsonl": ROWS, "d/train.parquet": PARQUET}})  # fmt: skip
cases(ALL, {"other files": {"d/train.jsonl": ROWS, "d/notes.csv": CSV, "d/train.txt": "x"}})
both = {"d": saved(train=WRONG, own=ROWS, test=THREE, more=ROWS[3:7])}
for own, held_out, expected in [
    ("own", None, "20+3"), ("own", "more", "20+4"), ("own", "own", "--eval_split own, trained"),
    ("own", "none", "--dataset, --eval_split"),
]:  # fmt: skip
    cases(expected, {f"splits {own} and {held_out}": both}, train_split=own, eval_split=held_out)
cases("--dataset, --eval_split", {"a split of a file": ROWS}, eval_split="test")
EVAL = {"flag": "eval_dataset", "rows": "20+19"}
for name, rows, split, expected in [
    ("a split by name", saved(train=WRONG, extra=THREE), "extra", "20+3"),
    ("test", saved(train=WRONG, validation=WRONG, test=THREE), None, "20+3"),
    ("unknown splits", saved(extra=ROWS, other=ROWS), None, "--eval_dataset, --eval_split"),
    ("a file", ROWS, None, "20+20"),
    ("a file without its column", [{"question": "What?"}], None, "--eval_dataset"),
    ("a file with an A", with_row(answer="A"), None, left_out(3, "answer", **EVAL)),
    ("a file that does not exist", link("missing.jsonl"), None, "--eval_dataset"),
]:
    path = "e.jsonl" if "file" in name else "e"
    files = {"a.jsonl": ROWS, path: rows}
    cases(expected, {f"evaluation: {name}": files}, eval_dataset=path, eval_split=split)

# labels are names, dates are texts, configurations have names, and unused columns do not matter
labels = datasets.ClassLabel(names=[row["answer"] for row in ROWS])
labelled = datasets.Dataset.from_list(each(answer=lambda i: i)).cast_column("answer", labels)
cases(ALL, {"labels, save_to_disk": {"d": labelled.save_to_disk},
    "labels, Parquet": {"a.parquet": labelled.to_parquet}},
    lambda config, task: task.train[0]["answer"].startswith("####"))  # fmt: skip
DATES = each(question=lambda i: f"2024-01-{i + 1:02}", answer="2024-01-05")
TIMES = each(question=lambda i: f"2024-01-{i + 1:02}T10:00:00", answer="2024-01-05 10:00:00")
asks = lambda text: lambda config, task: re.fullmatch(text, task.train[0]["question"])
day, moment = asks(r"2024-01-\d\d"), asks(r"2024-01-\d\dT10:00:00")
for suffix, write in {"jsonl": jsonl, "json": json.dumps, "csv": csv}.items():
    cases(ALL, {f"dates as questions in {suffix}": {f"a.{suffix}": write(DATES)}}, day)
    cases(ALL, {f"times as questions in {suffix}": {f"a.{suffix}": write(TIMES)}}, moment)
cases("20+3", {"times in two splits": splits(train=TIMES, test=TIMES[:3])}, moment)
CONFIGS = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/*}]
- config_name: other
  data_files: [{split: train, path: other/*}]
---
"""
folder = {"d/README.md": CONFIGS, "d/main/a.jsonl": ROWS, "d/other/a.jsonl": WRONG}
for path in ("d:main", "d/:main", "d/main"):
    cases(ALL, {f"a configuration: {path}": folder}, dataset=path)
colon = {path.replace("d/", "a:b/", 1): rows for path, rows in folder.items()}
cases(ALL, {"a configuration in a folder with a colon": colon}, dataset="a:b:main")
cases("--dataset, main, other, 'd'", {"a folder of configurations": folder})
cases("--dataset, 'none', main", {"an unknown configuration": folder}, dataset="d:none")
cases("--dataset, does not exist", {"a configuration of nothing": {}}, dataset="./d:main")
cases("20+3", {"a split with one less": splits(train=each(source="x"), test=THREE),
    "a split with other types": splits(train=each(id=1), test=each(THREE, id="x"))})  # fmt: skip
cases(f"{NO}, stats.json, data.jsonl", {"statistics beside the data":
    {"d/data.jsonl": ROWS, "d/stats.json": '{"rows": 20}'}})  # fmt: skip

LONG = {"question": "What is 7 and " * 200, "answer": "7"}
TOKENS = "--max_response_tokens"
cases("20+3", {"one held-out prompt is too long": splits(train=ROWS, test=[*THREE, LONG])})
cases(f"{NO} or {TOKENS}", {"every prompt is too long": splits(train=[LONG] * 20, test=THREE)})
cases(TOKENS, {"every held-out prompt is too long": splits(train=ROWS, test=[LONG] * 20)})
cases(TOKENS, {"responses as long as the context": ROWS}, max_response_tokens=256)

# ---------------------------------------------------------------------------------- other tasks


# test_tasks.py has more of MATH's answers


def sums(solution: Callable[[int], Any]) -> list[dict]:
    """Twenty problems for MATH."""
    problems = [{"problem": row["question"]} for row in ROWS]
    return each(problems, solution=lambda i: solution(2 * i))


BOXES = sums(lambda n: f"It is \\boxed{{{n}}}.")
cases(ALL, {"MATH: boxes": BOXES, "MATH: floats": sums(lambda n: n / 4),
    "MATH: bare LaTeX": sums(lambda n: f"$\\frac{{{n}}}{{3}}$"),
    "MATH: GSM8K's columns": ROWS}, task="math")  # fmt: skip
cases(ALL, {"MATH: an answer beside another solution": each(BOXES, answer="4")},
    lambda config, task: task.train[0]["answer"] == "4", task="math")  # fmt: skip
none = sums(lambda n: "See the appendix.")
cases(row(0, "solution"), {"MATH: no answer": none}, task="math")
solved = [{"problem": "What?", "solution": s} for s in ("\\boxed{1}", "\\boxed{2}", None)]
cases(row(2, "solution"), {"MATH: a null solution": solved}, task="math")
cases("--dataset, problem", {"MATH: prompts": [{"prompt": "1+1?", "answer": "2"}]}, task="math")
cases(NO_QUESTION, {"GSM8K: MATH's columns": BOXES})

TLDR = judges_of(MODELS / "tldr")
POST = "POST: Ann lost {} hats.\n\nTL;DR:"
POSTS = [{"query": POST.format(i), "reference_response": " Ann lost hats."} for i in range(20)]
nothing = POSTS[:9] + each(POSTS[9:10], reference_response=" ")
blank = left_out(9, "reference_response", rows="8+1")
cases(blank, {"TL;DR: a blank reference": nothing}, **TLDR)

REDTEAM = judges_of(MODELS / "redteam") | {"eval_samples": 2}
ASKS = [{"prompt": f"Write question {i}.\n"} for i in range(20)]
cases("1+2", {"red-teaming: its own prompt": {}}, **REDTEAM)
cases(ALL, {"red-teaming: EOS": [{"prompt": "<eos>"}] * 20}, **REDTEAM)
empty = [*ASKS[:9], {"prompt": ""}]
cases(left_out(9, "prompt", rows="8+2"), {"red-teaming: an empty one": empty}, **REDTEAM)
policy = MODELS / "tldr" / "model"
for base, flags, expected in [
    (TLDR, {"model": MODELS / "tldr" / "reward"}, "--model"),
    (TLDR, {"reward_model": policy}, "--reward_model"),  # it has no head of one label
    (TLDR, {"gold_reward_model": ""}, "--gold_reward_model"),
    (REDTEAM, {"attacker_prompt": ""}, f"--attacker_prompt or {NO}"),
    (REDTEAM, {"toxicity_label": "hate"}, "--toxicity_label, toxic"),
    (REDTEAM, {"toxicity_model": policy, "toxicity_label": None}, "--toxicity_label"),
    (REDTEAM, {"victim_template": "x"}, "--victim_template"),
    *(
        (REDTEAM, {f"{name}_model": ""}, f"--{name}_")
        for name in ("victim", "toxicity", "sentence")
    ),
]:
    cases(expected, {f"{base['task']}: {flags}": {}}, **base | flags)

# ------------------------------------------------- warm start, whose rows are read as others are

PAIR, ASK = {"prompt": "What is 2 and 2?", "response": "4"}, "What is it?"
OWN = {"instruction": "Add."}
ALPACA = OWN | {"input": "2 2", "output": "4"}
DOLLY = OWN | {"context": "2 2", "response": "4", "category": "open_qa"}
TRL = {"prompt": "What is 2 and 2?", "completion": "4"}


def learns(prompt: str | None, response: str = "4") -> Callable[..., bool]:
    """Four pairs of this prompt, or one of the task's, and this response."""

    def check(config: tba.Config, task: tba.Task) -> bool:
        decode = partial(task.tokenizer.decode, skip_special_tokens=True)
        texts = {(decode(prompt), decode(*answers)) for prompt, answers in task.pairs}
        known = {task.prompt(x) for x in task.train} if prompt is None else {prompt}
        return len(task.pairs) == 4 and all(x in known and y == response for x, y in texts)

    return check


WHOLE = "What is 2 and 2?"
for name, rows, expected, check in [
    ("prompts and responses", [PAIR] * 4, ALL, learns(WHOLE)),
    ("prompts and completions", [TRL] * 4, ALL, learns(WHOLE)),
    ("Alpaca", [ALPACA] * 4, ALL, learns("Add.\n2 2\n")),
    ("Alpaca without inputs", [OWN | {"output": "4"}] * 4, ALL, learns("Add.\n")),
    ("Dolly", [DOLLY] * 4, ALL, learns("Add.\n2 2\n")),
    ("Dolly with null contexts", [DOLLY | {"context": None}] * 4, ALL, learns("Add.\n")),
    ("prompts beside inputs", [PAIR | OWN | {"input": "wrong"}] * 4, ALL, learns(WHOLE)),
    ("numbers as instructions", [{"instruction": 7}] * 4, ALL, learns(None, "7")),
    ("instructions and prompts", [OWN | {"prompt": ASK}] * 4, "--sft_data, prompt, instr", None),
    ("instructions and answers", [OWN | {"answer": "5"}] * 4, "--sft_data, answer", None),
    ("Alpaca without outputs", [OWN | {"input": ""}] * 4, "--sft_data, input, output", None),
    ("a null response", [PAIR, PAIR | {"response": None}], row(1, flag="sft_data"), None),
    ("a blank instruction", [OWN, {"instruction": " "}], row(1, flag="sft_data"), None),
    ("prompts alone", [{"prompt": ASK}] * 2, "--sft_data, response", None),
    ("no rows", [], "--sft_data", None),
]:
    files = {"a.jsonl": ROWS, "sft.jsonl": rows}
    cases(expected, {f"warm start: {name}": files}, check, sft_data="sft.jsonl")
chats = lambda config, task: "<assistant>" in task.tokenizer.decode(task.pairs[0][0])
files = {"a.jsonl": BOXES, "sft.jsonl": [OWN] * 4}
cases(ALL, {"warm start: answers to chats": files}, chats, task="math", sft_data="sft.jsonl")
own = {"sft_data": "sft.jsonl", "sft_prompts": "sft.jsonl"}
files = {"a.jsonl": ROWS, "sft.jsonl": [PAIR] * 4}
cases("--sft_prompts, not used", {"warm start: prompts twice": files}, **own)
for name, prompts, expected in [
    ("prompts of two other columns", [{"id": "id0", "text": ASK}], "--sft_prompts, prompt"),
    ("numbers as its prompts", [{"prompt": 7}], ALL),
    ("a null among its prompts", [{"prompt": ASK}, {"prompt": None}], row(1, flag="sft_prompts")),
]:
    files = {"a.jsonl": ROWS, "sft.jsonl": [OWN], "p.jsonl": prompts}
    used = lambda config, task: "7" in task.tokenizer.decode(task.pairs[0][0])
    own = {"sft_data": "sft.jsonl", "sft_prompts": "p.jsonl"}
    cases(expected, {f"warm start: {name}": files}, used, **own)
folder = {"a.jsonl": ROWS, "sft/test.jsonl": [PAIR]}
cases("--sft_data", {"warm start: a folder of splits": folder}, sft_data="sft")

# ------------------------------------------------------------------------ tokenizers and models


def models(expected: str, table: dict, *check: Callable, task: str = "gsm8k", **flags: Any) -> None:
    """Add cases of a folder `m` with changes to the files of a task's model."""
    copy = lambda path: shutil.copytree(MODELS / task / "model", path)
    whole = {"a.jsonl": BOXES if task == "math" else ROWS, "m": copy}
    flags = {"model": "m", "task": task if task == "math" else "gsm8k"} | flags
    for name, changes in table.items():
        files = whole | {f"m/{file}": change for file, change in changes.items()}
        cases(expected, {name: files}, *check, **flags)


def weights(change: Callable[[dict], dict]) -> dict:
    """Change the tensors of a model."""
    write = lambda path: save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return {"model.safetensors": write}


def in_shards(path: Path) -> None:
    """Several files of weights and their index."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(path.parent)
    whole.save_pretrained(path.parent, max_shard_size="100KB")
    path.unlink(missing_ok=True)


def without_last_shard(path: Path) -> None:
    in_shards(path)
    sorted(path.parent.glob("model-*.safetensors"))[-1].unlink()


without = lambda part: weights(lambda t: {n: x for n, x in t.items() if part not in n})
truncated = lambda path: os.truncate(path, path.stat().st_size // 2)
CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer_config.json", "generation_config.json"
TEMPLATE, WEIGHTS, NO_MODEL = "chat_template.jinja", "model.safetensors", "--model"
SHORT = {"truncation_side": "left", "model_max_length": 8}
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
models(ALL, {
    "tokenizer: no padding token": {TOKENIZER: {"pad_token": None}},
    "tokenizer: truncates": {TOKENIZER: SHORT}, "chat template: none, not needed": {TEMPLATE: None},
    "stop tokens: null in config.json": {CONFIG: {"eos_token_id": None}},
    "stop tokens: no generation_config.json": {GENERATION: None},
    "model: weights in shards": {WEIGHTS: in_shards},
    "model: saved as bfloat16": weights(lambda t: {name: x.bfloat16() for name, x in t.items()}),
    "model: a trainer's optimizer beside it": {"optimizer.pt": b"x"}})  # fmt: skip
models(ALL, {"chat template: none for MATH": {TEMPLATE: None}, "chat template: with the date": {
    TEMPLATE: "{{ strftime_now('%d %b %Y') }}" + TURNS}}, task="math")  # fmt: skip
ENDS = TURNS.replace("{% endfor", "{% if m.role == 'assistant' %}<eos>\n{% endif %}{% endfor")
THINKS = TURNS + "<assistant>{% if enable_thinking is false %}<think></think>{% endif %}"
KNOWN, OTHER = (MODELS / "math" / "model" / TEMPLATE).read_text(), "other {{ messages[0].content }}"
named = lambda *names: [{"name": n, "template": KNOWN if n == "default" else OTHER} for n in names]
asks_like = lambda pattern: lambda config, task: re.fullmatch(pattern, prompt_of(task), re.DOTALL)
prompt_of = lambda task: task.tokenizer.decode(task.train_prompts[0])
models(ALL, {"chat template: its own": {}, "chat template: in chat_template.json": {
        TEMPLATE: None, "chat_template.json": json.dumps({"chat_template": KNOWN})},
    "chat template: in tokenizer_config.json": {
        TEMPLATE: None, TOKENIZER: {"chat_template": KNOWN}},
    "chat template: the default of several": {
        TEMPLATE: None, TOKENIZER: {"chat_template": named("tool_use", "default")}},
    "chat template: others beside it": {"additional_chat_templates/rag.jinja": OTHER}},
    asks_like(".*<user>What is .*boxed{}.<assistant>"), task="math")  # fmt: skip
models(ALL, {"chat template: thinking": {TEMPLATE: THINKS}}, asks_like(".*<assistant>"),
    task="math")  # fmt: skip
models(ALL, {"chat template: no thinking": {TEMPLATE: THINKS}}, asks_like(".*<think></think>"),
    task="math", chat_template_kwargs='{"enable_thinking": false}')  # fmt: skip
for given in ('{"enable_thinkin": false}', '{"truncation": true, "max_length": 5}'):
    models("--chat_template_kwargs, no", {f"chat template: without {given}": {TEMPLATE: THINKS}},
        task="math", chat_template_kwargs=given)  # fmt: skip
several = {TEMPLATE: None, TOKENIZER: {"chat_template": named("rag", "tool_use")}}
models(ALL, {"chat template: chosen by name": several}, asks_like("other .*"), task="math",
    chat_template_kwargs='{"chat_template": "rag"}')  # fmt: skip
for words, name, changes in [
    ("rag", "several without a default", several), ("", "no Jinja", {TEMPLATE: "{% if %}"}),
    ("only tools", "raises", {TEMPLATE: "{{ raise_exception('only tools') }}"}),
]:  # fmt: skip
    models(f"--model, chat template, {words}", {f"chat template: {name}": changes}, task="math")
parts = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}<user>{% endfor %}"
models("18+2: warning: all training prompts are the same", {"chat template: of other contents":
    {TEMPLATE: parts}}, task="math")  # fmt: skip
PAD_IS_EOS = {TOKENIZER: {"eos_token": "<pad>"}, CONFIG: {"eos_token_id": 1},
    GENERATION: {"eos_token_id": 1}, TEMPLATE: ENDS}  # fmt: skip
silent = lambda config, task: 0 in task.end_tokens
models("18+2: warning: --model, '<eos>', ends no response", {"turns that EOS does not end":
    PAD_IS_EOS}, lambda config, task: task.end_tokens == [1], task="math")  # fmt: skip
models(ALL, {"turns whose end generation_config.json has": PAD_IS_EOS | {GENERATION:
    {"eos_token_id": [0, 1]}}}, silent, task="math")  # fmt: skip
stops = {GENERATION: {"stop_strings": ["<assistant>", "no such token"]}}
models("18+2: warning: --model, a stop string, 'no such token'", {"stop strings": stops},
    lambda config, task: len(task.end_tokens) == 2)  # fmt: skip
models("--model, code of its own", {
    "code of a model's own": {CONFIG: {"model_type": "mine", "auto_map": {
        "AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}, "mine.py": "1 / 0"},
    "code of a tokenizer's own": {TOKENIZER: {"tokenizer_class": "Mine", "auto_map": {
        "AutoTokenizer": ["mine.Tokenizer", None]}}, "mine.py": "1 / 0"}})  # fmt: skip
TEKKEN = {
    "config": {"pattern": r"[^\s]+|\s+", "num_vocab_tokens": 256, "default_vocab_size": 276,
        "default_num_special_tokens": 20, "version": "v3"},
    "vocab": [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None}
        for i in range(256)],
}  # fmt: skip
mistral = {"tekken.json": json.dumps(TEKKEN), GENERATION: None, CONFIG: {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "eos_token_id": 2,
}}  # fmt: skip
alone = {"tokenizer.json": None, TOKENIZER: None, TEMPLATE: None}
inst = asks_like(r"<s>\[INST\]What is .*\[/INST\]")
models(ALL, {"Mistral's tokenizer": mistral | alone, "Mistral's beside another": mistral},
    inst, task="math")  # fmt: skip
models("--model or --dataset", {"chat template: empty": {TEMPLATE: "{# nothing #}"}}, task="math")
models("--model, EOS", {"tokenizer: no EOS": {TOKENIZER: {"eos_token": None}}})
models("--model, adapter", {
    "model: an adapter beside it": {"adapter_config.json": "{}"},
    "model: an adapter alone": {CONFIG: None, WEIGHTS: None, "adapter_config.json": "{}"},
})  # fmt: skip
window = {CONFIG: {"model_type": "mistral", "sliding_window": 32}}
apart = lambda config, task: not task.packs
models("18+2: one response per row", {"model: an attention window": window}, apart)
old = {CONFIG: {"is_decoder": False, "add_cross_attention": False}}  # as decoders once had
models(ALL, {"model: an encoder's fields": old}, lambda config, task: task.packs)
ends = lambda config, task: tba.end_tokens(*tba.check_model("model", config)) == [0, 7]
models(ALL, {"stop tokens: a list in config.json": {CONFIG: {"eos_token_id": [0, 7]}}}, ends)
for path in ("m/", "l"):
    models(ALL, {f"model: {path}": {"../l": link("m")}}, model=path)
models(ALL, {"model: a [1]": {".": lambda path: path.rename("a [1]")}}, model="a [1]")
for path in ("e", "", "./n", "m/model.safetensors", "org/name"):
    models(NO_MODEL, {f"model: called {path!r}": {"../e": Path.mkdir}}, model=path)
for file, changes in {
    CONFIG: {
        "missing": None, "no JSON": "{", "of other sizes": {"hidden_size": 32},
        "of an unknown type": {"model_type": "llama9"}, "of one layer": {"num_hidden_layers": 1},
        "quantized": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    },
    WEIGHTS: {
        "missing": None, "truncated": truncated, "a git-lfs pointer": LFS,
        "shards without the last": without_last_shard,
    },
    "tokenizer.json": {"missing": None, "truncated": truncated, "a git-lfs pointer": LFS},
}.items():  # fmt: skip
    models(NO_MODEL, {f"model: {file} {name}": {file: change} for name, change in changes.items()})
models(NO_MODEL, {f"model: without {part}": without(part) for part in ("layers.1.", "embed")})
names_of_ddp = weights(lambda t: {f"module.{name}": x for name, x in t.items()})
models(NO_MODEL, {"model: names of DDP": names_of_ddp})

# labels that do not exclude each other are not read by a softmax
independent = {CONFIG: {"problem_type": "multi_label_classification"}}
judges = [(own, name) for own in (TLDR, REDTEAM) for name in own if name.endswith("_model")]
for own, name, source, changes in [
    (TLDR, "reward_model", policy, {CONFIG: {"id2label": {0: "s"}}}),
    (REDTEAM, "toxicity_model", MODELS / "redteam" / "toxicity", independent),
    *((own, name, own[name], without("layers.1.")) for own, name in judges),
]:
    files = {"j": lambda path, source=source: shutil.copytree(source, path)}
    files |= {f"j/{file}": change for file, change in changes.items()}
    data = own.get("dataset", MODELS / "tldr" / "data") or ""
    flags = own | {name: "j", "dataset": data}
    cases(f"--{name} ", {f"{name}: {source.name} of other {[*changes]}": files}, **flags)

# -------------------------------------------------------------------------- misspelt flags, values

for flag, *values in [
    ("learning_rate", "1e-5,"), ("beta", "0,014"), ("max_response_tokens", "1k"), ("pack", "maybe"),
    ("prompts_per_step", "7.0"), ("task", "GSM8K"), ("engine", "VLLM"), ("plugin", "mine"),
    ("eval-every", 3), ("datset", "a.jsonl"),
    ("chat_template_kwargs", "{", "enable_thinking=false", "[]", "3", "null"),
]:  # fmt: skip
    for value in values:
        cases(f"--{flag}", {f"flag --{flag} {value}": {}}, **{flag: value})

# ------------------------------------------------------------------------------------- the test


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("files, expected, flags, check", CASES)
def test_odd_inputs_are_trained_on_as_they_are_or_refused_in_one_line(
    files, expected, flags, check, loaded_once, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        put(Path(name), content)
    has = lambda text, words: all(word in text for word in words.split(", "))
    models = MODELS / (flags["task"] if flags.get("task") in tba.TASKS else "gsm8k")
    try:
        config, task = config_and_task(models, tmp_path / "run", **flags)
        task.pairs = tba.read_sft_pairs(config, task) if config.sft_data else []
    except (tba.InputError, SystemExit) as error:
        own = isinstance(error, tba.InputError)
        line = str(error) if own else capsys.readouterr().err.strip().split("\n")[-1]
        assert any(has(line, words) for words in expected.split(" or ")), line
        assert getattr(error, "code", 2) == 2 and "\n" not in line
        assert not (tmp_path / "run").exists()
        return
    assert faults_of(config, task) == []
    assert check(config, task)
    found, said = f"{len(task.train)}+{len(task.held_out)}", capsys.readouterr().err
    outcomes = [text.partition(": ") for text in expected.split(" or ")]
    as_expected = any(rows == found and has(said, words) for rows, _, words in outcomes)
    assert as_expected, f"trains on {found}\n{said}"
