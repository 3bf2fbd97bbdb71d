"""What becomes of the data, tokenizers and model folders that people have: some 420 cases.

    python tests/odd_inputs.py [--only WORD] [--failing]

Each case is made in a temporary folder and goes through everything that tba.py does before it
loads a model. It either trains on exactly the rows that its table says, or is refused with exit
code 2 and a line that names the flag. The output has a case's exit code and that line, or its rows;
"!" marks what was not expected. Nothing is downloaded.
"""

import argparse
import contextlib
import gzip
import io
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet
import sentencepiece
import torch
import transformers
from harness import config_and_task, judges_of
from safetensors.torch import load_file, save_file

import tba

MODELS = Path(__file__).resolve().parent / "models"


class Case(NamedTuple):
    """An input and what should become of it."""

    name: str
    files: dict[str, Any]  # what `put` writes, in this order
    expected: str  # alternatives between "or": "18+2" rows, or what a refusal says: "--flag, word"
    flags: dict[str, Any]
    check: Callable[..., bool] | None  # of the settings and the task that was loaded


class Outcome(NamedTuple):
    """What became of a case."""

    code: int  # exit code: 0, 1 for a traceback, 2
    line: str  # what was said last, or the rows that are trained on
    right: bool  # as expected


CASES: list[Case] = []
SUFFIXES = {list: "jsonl", str: "csv", bytes: "parquet"}


def cases(
    expected: str, table: dict[str, Any], check: Callable[..., bool] | None = None, **flags: Any
) -> None:
    """Add cases that end alike: {name: files}, of which the first, or its folder, is the dataset.

    Files are {name: content}, or rows of JSON lines, the text of a CSV file, the bytes of Parquet.
    """
    for name, files in table.items():
        if not isinstance(files, dict):
            files = {f"a.{SUFFIXES[type(files)]}": files}
        named = {} if flags.get("dataset") is None else {"dataset": flags["dataset"]}
        first = {"dataset": next(iter(files)).split("/")[0]} if files else {}
        CASES.append(Case(name, files, expected, flags | first | named, check))


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


def load(flags: dict[str, Any]) -> tuple[tba.Config, tba.Task]:
    """Everything that tba.py does with its flags before it makes the run's folder."""
    flags = {name: value() if callable(value) else value for name, value in flags.items()}
    files = MODELS / (flags["task"] if flags.get("task") in tba.TASKS else "gsm8k")
    config, task = config_and_task(files, Path("run"), **flags)
    if config.sft_data:
        task.pairs = tba.read_sft_pairs(config, task)
    return config, task


def faults_of(config: tba.Config, task: tba.Task) -> list[str]:
    """What is wrong with rows that would be trained on."""
    faults = []
    ends = tba.end_tokens(*tba.check_model("model", config))
    for examples, prompts in (
        (task.train, task.train_prompts),
        (task.held_out, task.held_out_prompts),
    ):
        texts = [*map(task.prompt, examples), *map(task.text, prompts)]
        wrong = [t for t in texts if re.search(r"wrong|None|nan|\{'|\['|\[\{", t)]
        faults += [f"prompt {text!r:.60}" for text in wrong]
        for example, prompt in zip(examples, prompts, strict=True):
            meant = task.prompt(example).endswith(task.tokenizer.eos_token)
            if int(prompt[-1]) in ends and not meant:
                faults.append("a prompt ends with EOS")
            gold = [*example.values()][-1]
            right = True
            if config.task == "gsm8k":
                right = task.rewards([example], [example["answer"]], np.ones(1))[0]
            if config.task == "math":
                right = task.judge(gold, gold if "boxed" in gold else f"\\boxed{{{gold}}}")
            if not right:
                faults.append(f"{gold!r} is never right")
    return [*dict.fromkeys(faults)]


def refused(one: Case, code: int, line: str) -> Outcome:
    """A refusal, which must say what one of the case's alternatives does, and leave no folder."""
    meant = any(all(w in line for w in words.split(", ")) for words in one.expected.split(" or "))
    right = code == 2 and meant and "\n" not in line and not Path("run").exists()
    return Outcome(code, line, right)


def outcome_of(one: Case) -> Outcome:
    """Make the case in the current folder, which is empty, and see what becomes of it."""
    for name, content in one.files.items():
        put(Path(name), content)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            config, task = load(one.flags)
    except tba.InputError as error:
        return refused(one, 2, str(error))
    except SystemExit as error:
        return refused(one, error.code, said.getvalue().strip().split("\n")[-1])
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)
        own = [frame.lineno for frame in where if frame.filename == tba.__file__]
        line = f"{type(error).__name__}: {tba.first_line(error)} (tba.py:{own[-1]})"
        return Outcome(1, line, False)
    faults = faults_of(config, task)
    if one.check and not one.check(config, task):
        faults.append("the case's own check")
    line = f"trains on {len(task.train)} rows, evaluates on {len(task.held_out)}"
    right = f"{len(task.train)}+{len(task.held_out)}" in one.expected.split(" or ") and not faults
    return Outcome(0, "; ".join([line, *faults]), right)


def run_case(one: Case) -> Outcome:
    """`outcome_of` in a temporary folder."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        warnings.catch_warnings(action="ignore"),
    ):
        return outcome_of(one)


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


def jsonl(rows: list, separator: str = "\n", **options: Any) -> str:
    return "".join(json.dumps(row, **options) + separator for row in rows)


def parquet(table: pa.Table, **options: Any) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(table, out, **options)
    return out.getvalue()


def answers(values: Any, column: str = "answer") -> bytes:
    """Parquet of ROWS with a column of another type."""
    at = TABLE.column_names.index(column)
    return parquet(TABLE.set_column(at, column, [pa.array(values)]))


def saved(**splits: list) -> Callable[[Path], None]:
    """`save_to_disk` of one Dataset, called `all`, or of a DatasetDict."""
    many = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    one = many.get("all") or datasets.DatasetDict(many)
    return one.save_to_disk


csv = lambda rows, index=False, **options: pandas.DataFrame(rows).to_csv(index=index, **options)
link = lambda target: lambda path: path.symlink_to(target)
splits = lambda **rows: {f"d/{name}.jsonl": own for name, own in rows.items()}
FRAME, TABLE = pandas.DataFrame(ROWS), pa.Table.from_pylist(ROWS)
LINES, ARRAY, CSV, TSV = jsonl(ROWS), json.dumps(ROWS), csv(ROWS), csv(ROWS, sep="\t")
PARQUET, ZIPPED = parquet(TABLE), gzip.compress(LINES.encode())
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = "<!DOCTYPE html>\n<html><body>\n</body></html>\n"
CHAT = [{"role": "user", "content": "x"}]
TEST = f"{NO_ANSWER}, test"

# ---------------------------------------------------------------------------- data: forms of files

zip_options = {"method": "zip", "archive_name": "a.csv"}
in_zip = lambda path: FRAME.to_csv(path, index=False, compression=zip_options)
cases(ALL, {
    "JSON lines": ROWS, "JSON array": {"a.json": ARRAY},
    "JSON lines called .json": {"a.json": ROWS},
    "JSON array, indented": {"a.json": json.dumps(ROWS, indent=2)}, ".ndjson": {"a.ndjson": ROWS},
    "CSV": CSV, "TSV": {"a.tsv": TSV}, "Parquet": PARQUET, "upper-case suffix": {"A.JSONL": ROWS},
    "JSON lines, gzip": {"a.jsonl.gz": ZIPPED}, "upper-case CSV": {"A.CSV": CSV},
    "CSV, gzip": {"a.csv.gz": gzip.compress(CSV.encode())},
    "Parquet with zstd": parquet(TABLE, compression="zstd"),
    "Parquet of many row groups": parquet(TABLE, row_group_size=3),
    "Parquet by pandas with an index": FRAME.set_index(np.arange(5, 25)).to_parquet()})  # fmt: skip
cases(EITHER, {
    "JSON lines, xz": {"a.jsonl.xz": lambda p: FRAME.to_json(p, orient="records", lines=True)},
    "JSON array called .jsonl": {"a.jsonl": ARRAY}, "gzip without .gz": {"a.jsonl": ZIPPED},
    "CSV in a zip": {"a.zip": in_zip}, "CSV in a .csv.zip": {"a.csv.zip": in_zip},
    "Feather": {"a.feather": FRAME.to_feather}})  # fmt: skip
ARROW = "data-00000-of-00001.arrow"
cases(EITHER, {"Arrow stream": {"d.arrow": saved(all=ROWS)}}, dataset=f"d.arrow/{ARROW}")
cases(NO, {
    "text file of JSON lines": {"a.txt": ROWS}, "no suffix": {"data": ROWS},
    "Excel": {"a.xlsx": b"PK\3\4" + bytes(600)},
    "old Excel": {"a.xls": b"\xd0\xcf\x11\xe0" + bytes(600)}, "pickle": {"a.pkl": FRAME.to_pickle},
    "YAML": {"a.yaml": "- question: What is 1?\n  answer: 1\n"},
    "notebook": {"a.ipynb": json.dumps({"cells": [], "nbformat": 4})},
    "Python loading script": {"a.py": "import datasets\n"},
    "SQLite": {"a.db": b"SQLite format 3\0" + bytes(100)}, "empty JSON lines": {"a.jsonl": ""},
    "empty CSV": "", "empty Parquet file": b"", "only a newline": {"a.jsonl": "\n"},
    "empty JSON array": {"a.json": "[]"}, "empty JSON object": {"a.json": "{}"},
    "CSV of a header": "question,answer\n", "Parquet without rows": parquet(TABLE.slice(0, 0)),
    "Parquet called .json": {"a.json": PARQUET}, "Parquet called .csv": {"a.csv": PARQUET},
    "JSON lines called .parquet": {"a.parquet": ROWS}, "JSON lines called .csv": {"a.csv": ROWS},
    "CSV called .jsonl": {"a.jsonl": CSV}, "no gzip in .gz": {"a.jsonl.gz": LINES},
    "truncated gzip": {"a.jsonl.gz": ZIPPED[:-20]}, "truncated Parquet": PARQUET[:-20],
    "truncated JSON line": {"a.jsonl": LINES[:-20]},
    "truncated JSON array": {"a.json": ARRAY[:-20]}, "git-lfs pointer for Parquet": LFS.encode(),
    "git-lfs pointer for JSON lines": {"a.jsonl": LFS}, "git-lfs pointer for CSV": LFS,
    "web page saved as CSV": PAGE, "web page saved as JSON lines": {"a.jsonl": PAGE}})  # fmt: skip

# -------------------------------------------------------------------------- data: encodings, lines

for name, file, text in [
    ("CSV", "a.csv", CSV),
    ("JSON lines", "a.jsonl", LINES),
    ("JSON array", "a.json", ARRAY),
]:
    cases(EITHER, {f"{name} with a byte-order mark": {file: "\ufeff" + text}})
    cases(EITHER, {f"{name} in UTF-16": {file: text.encode("utf-16")}})
    cases(ALL, {f"{name} with CRLF": {file: text.replace("\n", "\r\n")}})
accents = with_row(question="Où est l'élève n° 3 ?")
cases(ALL, {
    "accents in UTF-8": csv(accents), "emoji and Chinese": with_row(question="苹果 🍎?"),
    "no newline at the end": {"a.jsonl": LINES.rstrip()},
    "blank lines in JSON lines": {"a.jsonl": jsonl(ROWS, "\n\n")},
    "blank lines in CSV": CSV.replace("\n", "\n\n")})  # fmt: skip
cases(EITHER, {
    "CSV with bare CR": CSV.replace("\n", "\r"),
    "JSON lines with bare CR": {"a.jsonl": LINES.replace("\n", "\r")},
    "half of a surrogate pair": {"a.jsonl": LINES.replace("What", "\\ud83c", 1)},
    "a NUL character": with_row(question="What\0 is it?"),
    "indented objects as JSON lines": {"a.jsonl": jsonl(ROWS, indent=1)}})  # fmt: skip
cases(NO, {
    "CSV in Latin-1": {"a.csv": csv(accents).encode("latin-1")},
    "JSON lines in Latin-1": {"a.jsonl": jsonl(accents, ensure_ascii=False).encode("latin-1")},
    "JSON lines with trailing commas": {"a.jsonl": jsonl(ROWS, ",\n")},
    "JSON lines with a comment": {"a.jsonl": "// made by me\n" + LINES},
    "a line that is no JSON": {"a.jsonl": LINES + "done.\n"},
    "a line that is a list": {"a.jsonl": LINES + "[1, 2]\n"}})  # fmt: skip

# ------------------------------------------------------------------------------- data: spreadsheets

header = lambda names: CSV.replace("question,answer", names)
wider = lambda cell: "".join(f"{line},{cell}\n" for line in CSV.splitlines())  # a third column
gold_is = lambda x: lambda config, task: tba.extract_number(task.train[0]["answer"]) == x

cases(ALL, {
    "CSV all in quotes": csv(ROWS, quoting=1), "CSV with pandas' index": csv(ROWS, index=True),
    "quoted newlines and commas": csv(with_row(question='What,\nis\r\n"it"?')),
    "CSV with an empty column": wider(""),
    "CSV of whole numbers as answers": csv(each(answer=lambda i: i)),
    "CSV answers with zeros in front": CSV.replace("#### ", "00"),
    "CSV answers with thousands separators": csv(with_row(answer="1,200")),
    "CSV answers in per cent and dollars": csv(with_row(answer="$1.50")),
    "CSV of dates as answers": csv(each(answer="2024-01-05"))})  # fmt: skip
cases(ALL, {"CSV answers with exponents": csv(each(answer="1e-05"))}, check=gold_is(1e-05))
cases(EITHER, {"CSV question NA": csv(with_row(question="NA")),
    "CSV with a used column twice": wider("x").replace(",x", ",answer", 1)})  # fmt: skip
cases(NO, {
    "CSV with semicolons": csv(ROWS, sep=";"), "CSV of tabs": TSV,
    "CSV with a sep= line": "sep=,\n" + CSV, "CSV without a header": csv(ROWS, header=False),
    "CSV with an unclosed quote": CSV.replace("What", '"What', 1),
    "CSV with a space before a column's name": header("question, answer"),
    "CSV with a column twice": header("question,question"),
    "CSV with a long row": CSV + "What is it?,1,2,3\n",
    "CSV with a title above the header": "My data,\n" + CSV,
    "CSV answers True and False": csv(each(answer=lambda i: i % 2 == 0)),
    "CSV answers yes and no": csv(each(answer=lambda i: ["yes", "no"][i % 2]))})  # fmt: skip
cases(NO_QUESTION, {"CSV with upper-case columns": header("Question,Answer")})
cases(row(20), {"CSV with a short row": CSV + "What is it?\n",
    "CSV with a last row of commas": CSV + ",\n"})  # fmt: skip
cases(row(0, "answer"), {"CSV of numbers, one missing": csv(each(answer=lambda i: i or None)),
    "CSV answers A to D": csv(each(answer=lambda i: "ABCD"[i % 4]))})  # fmt: skip
for cell in ("NA", "None", "null", "nan", "N/A", "#N/A", "#REF!"):
    cases(row(3, "answer"), {f"CSV answer {cell}": csv(with_row(answer=cell))})

# ---------------------------------------------------------------------------------- data: exports

for name, whole in {
    'object with "data"': {"data": ROWS},
    'object with "train" and "test"': {"train": ROWS[:18], "test": ROWS[18:]},
    "object of named rows": {f"row{i}": row for i, row in enumerate(ROWS)},
    "pandas' to_json": FRAME.to_dict(), "array of arrays": [ROWS],
    "pandas' to_json, split": FRAME.to_dict(orient="split"), "text": "What is it?", "number": 3,
    "array of texts": ["What is it?"] * 20, "array of pairs": FRAME.to_numpy().tolist(),
}.items():  # fmt: skip
    cases(NO, {f"JSON {name}": {"a.json": json.dumps(whole)}})
cases(EITHER, {"JSON object of columns": {"a.json": json.dumps(FRAME.to_dict(orient="list"))}})
cases(ALL, {"more columns": each(id=lambda i: i, tags=["x"], meta={"a": 1}),
    "columns in another order": ROWS[:9] + [dict(reversed(row.items())) for row in ROWS[9:]],
    "one prompt in all rows": [ROWS[1]] * 20})  # fmt: skip
cases(NO, {"one row": ROWS[:1], "JSON with NaN": {"a.jsonl": LINES.replace('"#### 6"', "NaN")}})
cases("1+1", {"two rows": ROWS[:2]})
cases("2+1", {"three rows": ROWS[:3]})
cases("36+4", {"rows that are there twice": ROWS * 2})
cases(f"{NO_QUESTION}, messages", {"columns of chats": [{"messages": CHAT}] * 20})
completions = [{"prompt": "x", "completion": "1"}] * 20
cases(f"{NO_QUESTION}, prompt", {"columns prompt and completion": completions})

# ------------------------------------------------------------------------------------ data: cells

NO_TEXTS = {  # a column of mixed types may not be read, so no row is named
    "list": ["What", "is"], "object": {"text": "x"}, "bool": True,
    "chat": [{"role": "user", "content": "What is 3?"}],
}  # fmt: skip
for which in ("question", "answer"):
    for name, cell in {"null": None, "empty": "", "blank": " \n\t"}.items():
        cases(row(3, which), {f"one {which} is {name}": with_row(**{which: cell})})
    for name, cell in NO_TEXTS.items():
        cases(f"--dataset, {which}", {f"one {which} is {name}": with_row(**{which: cell})})
    cases(row(3, which), {f"one {which} is absent": with_row(3, **{which: MISSING})})
    cases(row(0, which), {f"the first {which} is absent": with_row(0, **{which: MISSING})})
    cases(row(19, which), {f"the last {which} is null": with_row(19, **{which: None})})
    cases(row(0, which), {f"all {which}s are null": each(**{which: None})})
for name, cell in NO_TEXTS.items():
    cases(NO_QUESTION, {f"all questions are {name}": each(question=cell)})
cases(row(3, "answer"), {"one answer without a number": with_row(answer="A")})
for value in (1e-05, 1e22, 1.5e-7, 123456789.5):
    cases(ALL, {f"the answer {value}": each(answer=value)}, check=gold_is(value))
cases(ALL, {
    "numbers as answers": each(answer=lambda i: i),
    "numbers as questions": each(question=lambda i: i),
    "answers that are floats": each(answer=lambda i: i / 4),
    "answers that are negative": each(answer=lambda i: -i),
    "an answer of thirty digits": with_row(answer="1" * 30),
    "Parquet: int8": answers(np.arange(20, dtype=np.int8)),
    "Parquet: float32": answers(np.arange(20, dtype=np.float32) / 4),
    "Parquet: categories": answers(pa.array(["1", "2"] * 10).dictionary_encode()),
    "Parquet: large strings": answers(pa.array(["1"] * 20, pa.large_string()))})  # fmt: skip
cases(EITHER, {"numbers and texts as answers": with_row(answer=6),
    "a number of thirty digits": each(answer=10**30),
    "Parquet: decimals": answers(pa.array(range(20)).cast(pa.decimal128(23, 2)))})  # fmt: skip
cases(row(19, "answer"), {"Parquet: one NaN": answers([1.0] * 19 + [float("nan")]),
    "Parquet: one infinity": answers([1.0] * 19 + [float("inf")])})  # fmt: skip
cases(NO_ANSWER, {"Parquet: bool": answers([True] * 20), "Parquet: null": answers([None] * 20),
    "Parquet: dates": answers(pa.array(range(20), pa.date32())),
    "Parquet: lists": answers([["4"]] * 20)})  # fmt: skip
cases(NO_QUESTION, {"Parquet: bytes": answers([b"What is it?"] * 20, "question"),
    "Parquet: times": answers(pa.array(range(20), pa.timestamp("us")), "question")})  # fmt: skip

# ------------------------------------------------------------------------------------ data: paths

cases(ALL, {
    "a space in the name": {"my data.jsonl": ROWS}, "[1] in the name": {"run[1].jsonl": ROWS},
    "letters with accents in the name": {"données 数据.jsonl": ROWS},
    "a quote in the name": {'ann\'s "run".jsonl': ROWS},
    "a percent sign in the name": {"a%20b.jsonl": ROWS, "a b.jsonl": WRONG},
    "a hash in the name": {"a#1.jsonl": ROWS, "a.jsonl": WRONG},
    "[1] in the name, and a sibling": {"run[1].jsonl": ROWS, "run1.jsonl": WRONG},
    "a star in the name, and siblings": {"x*.jsonl": ROWS, "xy.jsonl": WRONG},
    "a question mark in the name": {"what?.jsonl": ROWS, "whats.jsonl": WRONG},
    "braces in the name": {"{a,b}.jsonl": ROWS, "a.jsonl": WRONG},
    "[1] in a folder's name": {"run[1]/train.jsonl": ROWS, "run1/train.jsonl": WRONG},
    "a colon in a file's name": {"a:b.jsonl": ROWS, "a": WRONG},
    "a colon in a folder's name": {"a:b/train.jsonl": ROWS},
    "a colon in a folder's name, and a sibling": {"a:b/train.jsonl": ROWS, "a/train.jsonl": WRONG},
    "two colons in the name": {"10:30:00.jsonl": ROWS},
    "two double colons in the name": {"a::b.jsonl": ROWS},
    "a link to a file": {"b.jsonl": link("a.txt"), "a.txt": ROWS},
    "a link to a folder": {"b": link("d"), "d/train.jsonl": ROWS},
    "a folder of links": {"d/train.jsonl": link("../blobs/0f3a"), "blobs/0f3a": ROWS}})  # fmt: skip
above = {"run[1]/a.jsonl": ROWS, "run1/a.jsonl": WRONG}
cases(ALL, {"[1] above the file": above}, dataset="run[1]/a.jsonl")
cases(ALL, {"a path that begins with a dash": {"-a.jsonl": ROWS}}, dataset="./-a.jsonl")
cases(ALL, {"a path below ..": {"d/x.txt": "", "a.jsonl": ROWS}}, dataset="d/../a.jsonl")
cases(ALL, {"a slash at the end of a folder": {"d/train.jsonl": ROWS}}, dataset="d/")
cases(EITHER, {"a slash at the end of a file": ROWS}, dataset="a.jsonl/")
cases(EITHER, {"a file:// address": ROWS}, dataset=lambda: f"file://{Path.cwd()}/a.jsonl")
cases(NO, {"a broken link": {"b.jsonl": link("gone.jsonl")}})
cases(NO, {"a link to itself": {"b.jsonl": link("b.jsonl")}})
cases("--dataset, does not exist", {"a folder that does not exist": {}}, dataset="/nowhere/data")
cases("--dataset, does not exist", {"~ that the shell left": {}}, dataset="~/data.jsonl")
for name, path in {
    "a file that does not exist": "missing.jsonl", "$HOME that the shell left": "$HOME/data.jsonl",
    "a Windows path": "C:\\data\\train.jsonl", "/dev/null": "/dev/null", "no dataset": "",
    "a blank dataset": " ", "a hub name, offline": "openai/gsm8k:main",
    "a hub name with a comma": "openai/gsm8k,main",
    "a hub name of three parts": "openai/gsm8k:main:train",
    "a hub page's address": "https://huggingface.co/datasets/openai/gsm8k",
    "an http address": "http://127.0.0.1:9/a.jsonl", "an s3 address": "s3://bucket/a.jsonl",
    "a gs address": "gs://bucket/a.parquet", "an hf address": "hf://datasets/openai/gsm8k",
    "two files with a comma": "a.jsonl,b.jsonl", "a pattern of files": "*.jsonl",
    "a model's folder as data": MODELS / "gsm8k" / "model",
}.items():  # fmt: skip
    cases(NO, {name: {"a.jsonl": ROWS, "b.jsonl": ROWS}}, dataset=path)

# ------------------------------------------------------------------------------- data: folders

parts = {f"train-0000{i}-of-00002.parquet": parquet(TABLE[10 * i : 10 * i + 10]) for i in range(2)}
spark = {"part-00000-0a.snappy.parquet": PARQUET, "_SUCCESS": "", "._SUCCESS.crc": b"crc"}
cases(ALL, {
    "a folder of one file": {"d/mine.jsonl": ROWS}, "a folder of one CSV": {"d/mine.csv": CSV},
    "a folder with a README and data": {"d/README.md": "# Data\n", "d/train.jsonl": ROWS},
    "a folder of shards": {f"d/{name}": part for name, part in parts.items()},
    "a hub's folder data/": {f"d/data/{name}": part for name, part in parts.items()},
    "Spark's folder": {f"x.parquet/{name}": part for name, part in spark.items()},
    "a folder called .jsonl": {"x.jsonl/train.jsonl": ROWS},
    "save_to_disk of a Dataset": {"d": saved(all=ROWS)}})  # fmt: skip
disk = {"d": saved(train=ROWS, test=THREE)}
cases(ALL, {"save_to_disk, one split of it": disk}, dataset="d/train")
cases("20+3", {"a folder with train/ and test/": {"d/train/a.jsonl": ROWS, "d/test/a.jsonl": THREE},
    "save_to_disk of a DatasetDict": disk})  # fmt: skip
runs = {"d/run1/a.jsonl": ROWS, "d/run2/a.jsonl": ROWS}
cases("36+4 or --dataset", {"a folder of folders": runs})
cases(EITHER, {"a folder of one TSV": {"d/mine.tsv": TSV},
    "a folder of one .ndjson": {"d/mine.ndjson": ROWS},
    "a folder of formats": {"d/train.jsonl": ROWS, "d/train.csv": CSV}})  # fmt: skip
cases(NO, {
    "an empty folder": {"d": Path.mkdir}, "a folder with a README": {"d/README.md": "# Data\n"},
    "a folder of hidden files": {"d/.train.jsonl": ROWS},
    "a folder of pictures": {f"d/{name}.png": b"\x89PNG\r\n\x1a\n" for name in "ab"},
    "a folder of git-lfs pointers": {"d/train-00000-of-00001.parquet": LFS},
    "save_to_disk without its Arrow file": {"d": saved(all=ROWS), f"d/{ARROW}": None}})  # fmt: skip

# -------------------------------------------------------------------------------- data: splits

cases("20+3", {"train and test": splits(train=ROWS, test=THREE),
    "train and validation": splits(train=ROWS, validation=THREE),
    "train, validation and test": splits(train=ROWS, validation=WRONG, test=THREE),
    "train and an unused split": {"d": saved(train=ROWS, test=THREE, extra=WRONG)}})  # fmt: skip
cases("20+3 or 18+2", {"train and dev": splits(train=ROWS, dev=THREE)})
cases(NO, {"only test": splits(test=ROWS),
    "an empty training split": {"d": saved(train=[], test=ROWS)},
    "only validation and test": splits(validation=ROWS, test=THREE),
    "a test split without answers": splits(train=ROWS, test=[{"question": "What?"}])})  # fmt: skip
cases("--dataset, train_sft", {
    "train_sft and test_sft": {"d": saved(train_sft=ROWS, test_sft=THREE)}})  # fmt: skip
cases("--dataset, extra", {"a split called extra": {"d": saved(extra=ROWS)}})
cases("--dataset, easy, hard", {"two splits of other names": {"d": saved(easy=ROWS, hard=ROWS)}})
cases(ALL, {"the file of a test split": splits(test=ROWS)}, dataset="d/test.jsonl")
two = splits(train=ROWS, test=WRONG)
cases(ALL, {"the file of a training split": two}, dataset="d/train.jsonl")
cases(TEST, {"a test split with hidden answers": splits(train=ROWS, test=each(THREE, answer=""))})
cases(TEST, {"a test split with answers ?": splits(train=ROWS, test=each(THREE, answer="?"))})
null = splits(train=ROWS, test=with_row(question=None))
cases(row(3, "test"), {"a test split with a null question": null})
cases(EITHER, {"an empty test split": splits(train=ROWS, test=[])})
cases("20+20", {"the dataset to evaluate on, too": ROWS}, eval_dataset="a.jsonl")
for name, rows, expected in [
    ("", THREE, "20+3"),
    (" without its column", [{"question": "What?"}], "--eval_dataset"),
    (" with a null", with_row(answer=None), row(3, "answer", flag="eval_dataset")),
    (" of A to D", with_row(answer="C"), row(3, "answer", flag="eval_dataset")),
    (" that does not exist", link("missing.jsonl"), "--eval_dataset"),
]:
    files = {"a.jsonl": ROWS, "b.jsonl": rows}
    cases(expected, {f"an evaluation dataset{name}": files}, eval_dataset="b.jsonl")

# ------------------------------------------------------------------------------- data: lengths

LONG = {"question": "What is 7 and " * 200, "answer": "7"}
MEGABYTE = {"question": "ab " * 350_000, "answer": "7"}
TOKENS = "--max_response_tokens"
cases("20+3", {"one prompt that is too long": splits(train=[*ROWS, LONG], test=THREE),
    "one held-out prompt that is too long": splits(train=ROWS, test=[*THREE, LONG]),
    "a prompt of a megabyte": splits(train=[*ROWS, MEGABYTE], test=THREE)})  # fmt: skip
cases(f"{NO} or {TOKENS}", {"every prompt is too long": splits(train=[LONG] * 20, test=THREE)})
cases(TOKENS, {"every held-out prompt is too long": splits(train=ROWS, test=[LONG] * 20)})
cases(TOKENS, {"responses as long as the context": ROWS}, max_response_tokens=256)
cases(TOKENS, {"responses longer than the context": ROWS}, max_response_tokens=5000)

# ---------------------------------------------------------------------------------- other tasks


def sums(solution: Callable[[int], Any] | None, **more: Any) -> list[dict]:
    """Twenty problems for MATH."""
    own = {"solution": lambda i: solution(2 * i)} if solution else {}
    return each([{"problem": row["question"]} | more for row in ROWS], **own)


BOXES = sums(lambda n: f"It is \\boxed{{{n}}}.")
cases(ALL, {
    "MATH: boxes": BOXES, "MATH: numbers": sums(lambda n: n), "MATH: floats": sums(lambda n: n / 4),
    "MATH: bare answers": sums(str), "MATH: bare LaTeX": sums(lambda n: f"\\frac{{{n}}}{{3}}"),
    "MATH: LaTeX between dollars": sums(lambda n: f"$x+{n}$"),
    "MATH: the column answer": sums(None, answer="4"),
    "MATH: the column answer of numbers": sums(None, answer=4),
    "MATH: both columns": sums(lambda n: "So $4$, \\boxed{4}", answer="4"),
}, task="math")  # fmt: skip
cases(row(0, "solution"), {"MATH: unclosed boxes": sums(lambda n: f"\\boxed{{{n}"),
    "MATH: empty boxes": sums(lambda n: "\\boxed{}"),
    "MATH: no answer": sums(lambda n: "See the appendix.")}, task="math")  # fmt: skip
solved = [{"problem": "What?", "solution": s} for s in ("\\boxed{1}", "\\boxed{2}", None)]
cases(row(2, "solution"), {"MATH: a null solution": solved}, task="math")
hidden = splits(train=BOXES, test=[{"problem": "What?", "solution": ""}])
cases("--dataset, test, solution", {"MATH: hidden answers in test": hidden}, task="math")
cases("--dataset, problem", {"MATH: GSM8K's columns": ROWS}, task="math")
cases(NO_QUESTION, {"GSM8K: MATH's columns": BOXES})

TLDR = judges_of(MODELS / "tldr")
POST = "POST: Ann lost {} hats.\n\nTL;DR:"
POSTS = [{"query": POST.format(i), "reference_response": " Ann lost hats."} for i in range(20)]
count = lambda i: i
cases(ALL, {"TL;DR: posts": POSTS, "TL;DR: numbers as posts": each(POSTS, query=count)}, **TLDR)
for name, cell in {"null": None, "blank": " "}.items():
    rows = POSTS[:9] + each(POSTS[9:10], reference_response=cell)
    cases(row(9, "reference_response"), {f"TL;DR: a {name} reference": rows}, **TLDR)
cases(EITHER, {"TL;DR: numbers as references": each(POSTS, reference_response=count)}, **TLDR)
cases("--dataset, reference_response", {
    "TL;DR: tokens as references": each(POSTS, reference_response=[1, 2]),
    "TL;DR: column summary": [{"query": "x", "summary": "y"}] * 20}, **TLDR)  # fmt: skip
policy = {"reward_model": MODELS / "tldr" / "model"}
cases("--reward_model", {"judges: a policy as the reward model": {}}, **TLDR | policy)
gold = {"gold_reward_model": ""}
cases("--gold_reward_model", {"judges: no gold reward model": {}}, **TLDR | gold)

REDTEAM = judges_of(MODELS / "redteam") | {"eval_samples": 2}
ASKS = [{"prompt": f"Write question {i}.\n"} for i in range(20)]
cases("1+2", {"red-teaming: its own prompt": {}}, **REDTEAM)
cases(ALL, {
    "red-teaming: prompts": ASKS,
    "red-teaming: a prompt of special tokens": [{"prompt": "<eos>"}] * 20,
    "red-teaming: a prompt that ends with EOS": [{"prompt": "Write it.<eos>"}] * 20,
}, **REDTEAM)  # fmt: skip
held_out = {"a.jsonl": ASKS, "b.jsonl": ASKS[:3]}
cases("20+3", {"red-teaming: held-out prompts": held_out}, eval_dataset="b.jsonl", **REDTEAM)
cases(row(9, "prompt"), {"red-teaming: a null prompt": [*ASKS[:9], {"prompt": None}]}, **REDTEAM)
cases("--dataset, prompt", {"red-teaming: an empty prompt": [*ASKS[:9], {"prompt": ""}],
    "red-teaming: chats": [{"prompt": CHAT}] * 20}, **REDTEAM)  # fmt: skip
cases("--dataset, prompt, text", {"red-teaming: column text": [{"text": "x"}] * 20}, **REDTEAM)
for name, flags, expected in [
    ("red-teaming: no attacker's prompt", {"attacker_prompt": ""}, f"--attacker_prompt or {NO}"),
    ("red-teaming: another label", {"toxicity_label": "hate"}, "--toxicity_label, toxic"),
    ("red-teaming: a template without {attack}", {"victim_template": "x"}, "--victim_template"),
    ("judges: no victim", {"victim_model": ""}, "--victim_model"),
    ("judges: a victim that does not exist", {"victim_model": "./v"}, "--victim_model"),
    ("judges: no toxicity model", {"toxicity_model": ""}, "--toxicity_model"),
    ("judges: no sentence model", {"sentence_model": ""}, "--sentence_model"),
]:
    cases(expected, {name: {}}, **REDTEAM | flags)

# ---------------------------------------------------------------------------------- warm start

PAIR = {"prompt": "What is 2 and 2?", "response": "4"}
LONGER = PAIR | {"response": "4 and " * 300}
INPUTS = {"instruction": "Add.", "input": "2 2", "output": "4"}
TELL = {"instruction": "Explain it."}
ASK = "What is it?"
for name, rows, kept, expected in [  # rows that are trained on
    ("prompts and responses", [PAIR] * 4, 4, ALL),
    ("instructions", [TELL] * 4, 4, ALL),
    ("a null response", [PAIR, PAIR | {"response": None}], 0, row(1, flag="sft_data")),
    ("a blank prompt", [PAIR, PAIR | {"prompt": " "}], 0, row(1, flag="sft_data")),
    ("numbers as responses", [PAIR | {"response": 4}] * 2, 2, ALL),
    ("numbers as prompts", [PAIR | {"prompt": 4}] * 2, 2, ALL),
    ("numbers as instructions", [{"instruction": 7}] * 2, 2, ALL),
    ("chats", [{"messages": CHAT}] * 2, 0, "--sft_data"),
    ("lists as responses", [PAIR | {"response": ["4"]}] * 2, 0, "--sft_data, response"),
    ("columns instruction, input and output", [INPUTS], 1, ALL),
    ("no rows", [], 0, "--sft_data"),
    ("responses over the context", [PAIR, LONGER], 1, ALL),
    ("all responses over the context", [LONGER], 0, "--sft_data"),
]:
    files = {"a.jsonl": ROWS, "sft.jsonl": rows}
    check = lambda config, task, kept=kept: len(task.pairs) == kept
    cases(expected, {f"warm start: {name}": files}, check, sft_data="sft.jsonl")
for name, prompts, expected in [
    ("prompts with an id", [{"id": "id0", "prompt": ASK}], ALL),
    ("prompts in their only column", [{"text": ASK}], "18+2 or --sft_prompts"),
    ("prompts of two other columns", [{"id": "id0", "text": ASK}], "--sft_prompts"),
    ("numbers as its prompts", [{"prompt": 7}], ALL),
    ("a null among its prompts", [{"prompt": ASK}, {"prompt": None}], row(1, flag="sft_prompts")),
    ("no prompts", link("missing.jsonl"), "--sft_prompts"),
]:
    files = {"a.jsonl": ROWS, "sft.jsonl": [TELL], "p.jsonl": prompts}
    used = lambda config, task: re.search("What|7", task.text(task.pairs[0][0]))
    own = {"sft_data": "sft.jsonl", "sft_prompts": "p.jsonl"}
    cases(expected, {f"warm start: {name}": files}, used, **own)
folder = {"a.jsonl": ROWS, "sft/test.jsonl": [PAIR]}
cases("--sft_data", {"warm start: a folder of splits": folder}, sft_data="sft")

# ------------------------------------------------------------------------ tokenizers and models


def models(
    expected: str, table: dict[str, dict], check: Any = None, task: str = "gsm8k", **flags: Any
) -> None:
    """Add cases of a folder `m` with changes to the files of a task's model."""
    copy = lambda path: shutil.copytree(MODELS / task / "model", path)
    whole = {"a.jsonl": BOXES if task == "math" else ROWS, "m": copy}
    flags = {"model": "m", "task": task if task == "math" else "gsm8k"} | flags
    for name, changes in table.items():
        files = whole | {f"m/{file}": change for file, change in changes.items()}
        cases(expected, {name: files}, check, **flags)


def weights(change: Callable[[dict], dict]) -> dict:
    """Change the tensors of a model."""
    write = lambda path: save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return {"model.safetensors": write}


def with_masks(tensors: dict) -> dict:
    """The weights, and the buffers that transformers saved until 2023."""
    masks = {"bias": torch.ones(1, 1, 64, 64).tril().byte(), "masked_bias": torch.tensor(-1e4)}
    return tensors | {f"transformer.h.0.attn.{name}": mask for name, mask in masks.items()}


def as_bin(path: Path) -> None:
    """PyTorch's own format in place of safetensors."""
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()


def in_shards(path: Path) -> None:
    """Several files of weights and their index."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(path.parent)
    whole.save_pretrained(path.parent, max_shard_size="100KB")
    path.unlink(missing_ok=True)


def without_last_shard(path: Path) -> None:
    in_shards(path)
    sorted(path.parent.glob("model-*.safetensors"))[-1].unlink()


def pieces(path: Path) -> None:
    """A SentencePiece model."""
    texts = [f"{row['question']} {row['answer']} [MATH TASK] Problem: Solution:" for row in ROWS]
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts * 5), model_writer=file, vocab_size=300,
            model_type="bpe", byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
        )  # fmt: skip


def kind(name: str, **options: Any) -> dict:
    """Another kind of model beside the tokenizer."""

    def write(path: Path) -> None:
        path.unlink()
        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        own = getattr(transformers, name)
        config = own.config_class(vocab_size=428, **small, intermediate_size=16, **options)
        own(config).save_pretrained(path.parent)

    return {"model.safetensors": write}


truncated = lambda path: os.truncate(path, path.stat().st_size // 2)
TOKENIZER, GENERATION = "tokenizer_config.json", "generation_config.json"
TEMPLATE = "chat_template.jinja"
NO_MODEL, UNSURE = "--model", "18+2 or --model"
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
IDS = {"bos_token_id": 1, "eos_token_id": 2}
PIECES = {  # SentencePiece's own file, as folders converted years ago have
    "tokenizer.json": None, TOKENIZER: json.dumps(LLAMA), TEMPLATE: None,
    "tokenizer.model": pieces, "config.json": IDS, GENERATION: IDS,
}  # fmt: skip
A, B = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
ADDS_EOS = {  # as with add_eos_token
    "type": "TemplateProcessing", "pair": [A, B],
    "single": [A, {"SpecialToken": {"id": "<eos>", "type_id": 0}}],
    "special_tokens": {"<eos>": {"id": "<eos>", "ids": [0], "tokens": ["<eos>"]}},
}  # fmt: skip
MINE = {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}
SHORT = {"truncation_side": "left", "model_max_length": 8}
models("--model, EOS", {"tokenizer: no EOS": {TOKENIZER: {"eos_token": None}}})
models(ALL, {
    "tokenizer: no padding token": {TOKENIZER: {"pad_token": None}},
    "tokenizer: ends a prompt with EOS": {"tokenizer.json": {"post_processor": ADDS_EOS}},
    "tokenizer: model_max_length 16": {TOKENIZER: {"model_max_length": 16}},
    "tokenizer: truncates": {TOKENIZER: SHORT}, "chat template: none, not needed": {TEMPLATE: None},
    "stop tokens: null in config.json": {"config.json": {"eos_token_id": None}},
    "stop tokens: no generation_config.json": {GENERATION: None}})  # fmt: skip
models(UNSURE, {
    "tokenizer: SentencePiece alone": PIECES, "tokenizer: code of its own": {TOKENIZER: MINE},
    "tokenizer: no tokenizer_config.json": {TOKENIZER: None},
    "tokenizer: an unknown class": {TOKENIZER: {"tokenizer_class": "MyTokenizer"}},
    "stop tokens: generation_config.json is no JSON": {GENERATION: "{"}})  # fmt: skip
models(NO_MODEL, {"tokenizer: no files": {"tokenizer.json": None, TOKENIZER: None},
    "tokenizer: no tokenizer.json": {"tokenizer.json": None},
    "tokenizer: truncated": {"tokenizer.json": truncated},
    "tokenizer: git-lfs pointer": {"tokenizer.json": LFS}})  # fmt: skip
date = "{{ strftime_now('%d %b %Y') }}"
date += "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
models(ALL, {"chat template: none for MATH": {TEMPLATE: None},
    "chat template: with the date": {TEMPLATE: date}}, task="math")  # fmt: skip
empty = {"chat template: empty text": {TEMPLATE: "{# nothing #}"}}
models("--model or --dataset", empty, task="math")
for file in (GENERATION, "config.json"):
    ends = lambda config, task: tba.end_tokens(*tba.check_model("model", config)) == [0, 7]
    models(ALL, {f"stop tokens: a list in {file}": {file: {"eos_token_id": [0, 7]}}}, ends)

for name, changes, path, expected in [
    ("in a folder with a space", {".": lambda path: path.rename("my model")}, "my model", ALL),
    ("in a folder with [1]", {".": lambda path: path.rename("m[1]")}, "m[1]", ALL),
    ("a slash at the end", {}, "m/", ALL),
    ("a link", {"../l": link("m")}, "l", ALL),
    ("the folder above", {".": lambda path: shutil.move(path, "above/m")}, "above", NO_MODEL),
    ("an empty folder", {"../e": Path.mkdir}, "e", NO_MODEL),
    ("a GGUF file", {"m.gguf": b"GGUF" + bytes(100)}, "m/m.gguf", NO_MODEL),
    ("its weights' file", {}, "m/model.safetensors", NO_MODEL),
    ("the dataset's path", {}, "a.jsonl", NO_MODEL),
    ("nothing named", {}, "", NO_MODEL),
    ("no such folder", {}, "./n", NO_MODEL),
    ("a hub name, offline", {}, "meta-llama/Llama-3.2-1B", NO_MODEL),
    ("a hub name with a version", {}, "gpt2@main", NO_MODEL),
    ("a hub address", {}, "https://huggingface.co/gpt2", NO_MODEL),
]:
    models(expected, {f"model: {name}": changes}, model=path)
bits = {"quant_method": "bitsandbytes", "load_in_4bit": True}
for name, change in {
    "no config.json": None, "config.json is no JSON": "{", "other sizes": {"hidden_size": 32},
    "config.json without a type": {"model_type": None, "architectures": None},
    "an unknown type": {"model_type": "llama9"}, "a layer too many": {"num_hidden_layers": 1},
    "code of its own": {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
    "fewer embeddings than tokens": {"vocab_size": 400},
    "quantized": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "quantized by bitsandbytes": {"quantization_config": bits},
}.items():  # fmt: skip
    models(NO_MODEL, {f"model: {name}": {"config.json": change}})
for name, change, expected in [
    ("no weights", None, NO_MODEL),
    ("truncated weights", truncated, NO_MODEL),
    ("empty weights", b"", NO_MODEL),
    ("git-lfs pointer", LFS, NO_MODEL),
    ("weights in a .bin", as_bin, UNSURE),
    ("weights in shards", in_shards, ALL),
    ("a shard is missing", without_last_shard, NO_MODEL),
]:
    models(expected, {f"model: {name}": {"model.safetensors": change}})
old = weights(with_masks)
models(ALL, {"model: a GPT-2 of 2023, with causal masks": old}, task="redteam")
halved = weights(lambda t: {name: x.bfloat16() for name, x in t.items()})
models(ALL, {"model: saved as bfloat16": halved})
models(ALL, {"model: a trainer's optimizer beside it": {"optimizer.pt": b"x"}})
one_layer = lambda t: {name: x for name, x in t.items() if "layers.1." not in name}
prefixed = lambda prefix: weights(lambda t: {f"{prefix}.{name}": x for name, x in t.items()})
models(NO_MODEL, {
    "model: a layer is missing": weights(one_layer), "model: names of DDP": prefixed("module"),
    "model: names of torch.compile": prefixed("_orig_mod"),
    "model: an encoder": kind("BertForMaskedLM"),
    "model: sequence to sequence": kind("T5ForConditionalGeneration", d_ff=16, d_kv=8),
    "model: a classifier": kind("LlamaForSequenceClassification"),
    "model: a body without a head": kind("LlamaModel")})  # fmt: skip
decoder = kind("BertLMHeadModel", is_decoder=True)
models(UNSURE, {"model: a decoder of an encoder's kind": decoder})
ADAPTER = {
    "config.json": None, "model.safetensors": None, "adapter_model.safetensors": LFS,
    "adapter_config.json": '{"base_model_name_or_path": "gpt2", "peft_type": "LORA"}',
}  # fmt: skip
models("--model, adapter", {"model: an adapter alone": ADAPTER,
    "model: an adapter beside it": {"adapter_config.json": "{}"}})  # fmt: skip

# ----------------------------------------------------------------------------------------- flags

for flag, value in {
    "steps": "1e3", "learning_rate": "1e-5,", "beta": "0,014", "temperature": "0", "seed": "-1",
    "max_response_tokens": "1k", "prompts_per_step": "7.0", "dtype": "fp16", "pack": "maybe",
    "task": "GSM8K", "engine": "VLLM", "objective": "TB", "num_searchers": "auto", "plugin": "mine",
}.items():  # fmt: skip
    cases(f"--{flag}", {f"flag --{flag} {value}": {}}, **{flag: value})
cases("--eval-every", {"a flag with a dash": {}}, **{"eval-every": 3})
cases("--datset", {"a flag that is misspelt": {}}, datset="a.jsonl")


def main() -> int:
    """Print the outcomes; returns the exit code: 1 if something was not as expected."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--failing", action="store_true", help="only what was not as expected")
    args = parser.parse_args()
    chosen = [one for one in CASES if args.only in one.name]
    right = 0
    for one in chosen:
        outcome = run_case(one)
        right += outcome.right
        if not (outcome.right and args.failing):
            mark = " " if outcome.right else "!"
            print(f"{mark} {one.name:<45} {outcome.code} {outcome.line:.200}")
    print(f"{right} of {len(chosen)} cases as expected")
    return int(right < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
