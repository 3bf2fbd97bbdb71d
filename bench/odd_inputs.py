"""What becomes of the data, tokenizers and model folders that people have: some 420 cases.

    python bench/odd_inputs.py [--only WORD] [--failing]

Each case is made in a temporary folder and goes through everything that tba.py does before it
loads a model. It either trains on exactly the rows that the case names, or is refused with exit
code 2 and a line that names the flag. The table has a case's exit code and that line, or its rows;
"!" marks what was not expected. Nothing is downloaded.
"""

import argparse
import contextlib
import datetime
import gzip
import io
import json
import lzma
import os
import re
import shutil
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import sentencepiece
import torch
import transformers
from safetensors.torch import load_file, save_file

import tba

MODELS = ROOT / "tests" / "models"


class Rows(NamedTuple):
    """Expected: the run trains on `train` rows and evaluates on `held_out`."""

    train: int
    held_out: int = 2


class Refused(NamedTuple):
    """Expected: one line that names this flag and has these words, and exit code 2."""

    flag: str
    words: tuple[str, ...] = ()


def refused(flag: str, *words: str) -> Refused:
    return Refused(flag, words)


def row(i: int, *words: str, flag: str = "dataset") -> Refused:
    """A line that names a row, too."""
    return Refused(flag, (f"row {i} ", *words))


@dataclass
class Case:
    """An input and what should become of it."""

    name: str
    make: Callable[[], Any]  # writes its files into the current folder; may return more flags
    expected: tuple[Rows | Refused | str, ...]  # any of these will do; str: a flag that is refused
    flags: dict[str, Any]
    check: Callable[..., bool] | None  # of the settings and the task that was loaded


@dataclass
class Outcome:
    """What became of a case."""

    code: int  # exit code: 0, 1 for a traceback, 2
    line: str  # what was said last, or the rows that are trained on
    right: bool  # as expected


CASES: list[Case] = []
Content = str | bytes | Callable[[Path], Any]


def case(
    name: str,
    files: dict[str, Content] | Callable[[], Any],
    *expected: Rows | Refused | str,
    check: Callable[..., bool] | None = None,
    **flags: Any,
) -> None:
    """Add a case of these files, of which the first, or its folder, is the dataset."""
    if isinstance(files, dict):
        flags = {"dataset": next(iter(files)).split("/")[0]} | flags
        make = lambda: write_files(files)
    else:
        make = files
    CASES.append(Case(name, make, expected, flags, check))


def lines(name: str, rows: list, *expected: Rows | Refused | str, **options: Any) -> None:
    """A case of JSON lines."""
    case(name, {"a.jsonl": jsonl(rows)}, *expected, **options)


def sheet(name: str, text: Content, *expected: Rows | Refused | str, **options: Any) -> None:
    """A case of a CSV file."""
    case(name, {"a.csv": text}, *expected, **options)


def write_files(files: dict[str, Content]) -> None:
    """Write files of these names; a function writes its own."""
    for name, content in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


# ---------------------------------------------------------------------------- judging an outcome

TASK_FLAGS = {
    "gsm8k": {"dataset": MODELS / "gsm8k" / "data"},
    "math": {"dataset": MODELS / "math" / "data"},
    "tldr": {
        "dataset": MODELS / "tldr" / "data",
        "reward_model": MODELS / "tldr" / "reward",
        "gold_reward_model": MODELS / "tldr" / "gold",
    },
    "redteam": {
        "victim_model": MODELS / "redteam" / "victim",
        "toxicity_model": MODELS / "redteam" / "toxicity",
        "toxicity_label": "toxic",
        "sentence_model": MODELS / "redteam" / "model",
        "eval_samples": 2,
    },
}


def load(flags: dict[str, Any]) -> tuple[tba.Config, tba.Task]:
    """Everything that tba.py does with its flags before it makes the run's folder."""
    task = flags.get("task", "gsm8k")
    flags = {
        "model": MODELS / (task if task in TASK_FLAGS else "gsm8k") / "model",
        "output_dir": "run",
        "engine": "transformers",
        "max_response_tokens": 32,
        **TASK_FLAGS.get(task, {}),
        **flags,
    }
    args = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    config = tba.resolve(tba.parse(args))
    task = tba.load_task(config)
    if config.sft_data:
        task.pairs = tba.read_sft_pairs(config, task)
    return config, task


def faults_of(config: tba.Config, task: tba.Task) -> list[str]:
    """What is wrong with rows that would be trained on."""
    faults = []
    for split, examples, prompts in (
        ("train", task.train, task.train_prompts),
        ("held-out", task.held_out, task.held_out_prompts),
    ):
        texts = [*map(task.prompt, examples), *map(task.text, prompts)]
        wrong = [t for t in texts if re.search(r"wrong|None|nan|\{'|\['|\[\{", t)]
        faults += [f"{split} prompt {text!r:.60}" for text in wrong]
        ends = tba.end_tokens(*tba.check_model("model", config))
        own = [task.prompt(example).endswith(task.tokenizer.eos_token) for example in examples]
        if any(int(p[-1]) in ends and not meant for p, meant in zip(prompts, own, strict=True)):
            faults.append(f"a {split} prompt ends with EOS")
        if config.task == "gsm8k":
            answers = [example["answer"] for example in examples]
            rewards = task.rewards(examples, answers, np.ones(len(answers)))
            faults += [
                f"{split} answer {answers[i]!r} is never right" for i in np.flatnonzero(~rewards)
            ]
        if config.task == "math":
            for example in examples:
                gold = [*example.values()][-1]
                boxed = gold if "boxed" in gold else f"\\boxed{{{gold}}}"
                if not task.judge(gold, boxed):
                    faults.append(f"{split} solution {gold!r} is never right")
    return faults


def outcome_of(one: Case, folder: Path) -> Outcome:
    """Make the case in an empty folder, and see what becomes of it."""
    said = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(said),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        flags = one.flags | (one.make() or {})
        try:
            config, task = load(flags)
        except tba.InputError as error:
            code, line = 2, str(error)
        except SystemExit as error:
            code, line = error.code, said.getvalue().strip().split("\n")[-1]
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)
            own = [frame.lineno for frame in where if frame.filename == tba.__file__]
            line = f"{type(error).__name__}: {tba.first_line(error)} (tba.py:{own[-1]})"
            return Outcome(1, line, False)
        else:
            rows = Rows(len(task.train), len(task.held_out))
            faults = faults_of(config, task)
            if one.check and not one.check(config, task):
                faults.append("the case's own check")
            shown = f"trains on {rows.train} rows, evaluates on {rows.held_out}"
            line = "; ".join([shown, *dict.fromkeys(faults)])
            return Outcome(0, line, rows in one.expected and not faults)
    right = any(is_refusal(line, expected) for expected in one.expected)
    return Outcome(code, line, code == 2 and right and not (folder / "run").exists())


def is_refusal(line: str, expected: Rows | Refused | str) -> bool:
    """Whether a line names the expected flag, and what else it should."""
    if isinstance(expected, Rows):
        return False
    one = Refused(expected) if isinstance(expected, str) else expected
    return "\n" not in line and all(word in line for word in (f"--{one.flag}", *one.words))


def run_case(one: Case) -> Outcome:
    """`outcome_of` in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        return outcome_of(one, Path(folder))


# ----------------------------------------------------------------------------- data: ways to write

ROWS = [{"question": f"What is {i} and {i}?", "answer": f"#### {2 * i}"} for i in range(20)]
WRONG = [{"question": "wrong", "answer": "#### 1"}] * 20
ALL = Rows(18)  # of twenty rows, the last tenth, or a random one, is held out


def with_row(i: int = 3, **cells: Any) -> list[dict]:
    """ROWS with other cells in one row."""
    return [row | cells if n == i else row for n, row in enumerate(ROWS)]


def each(**columns: Callable[[int], Any]) -> list[dict]:
    """ROWS with other columns: functions of the row's number."""
    return [row | {k: cell(i) for k, cell in columns.items()} for i, row in enumerate(ROWS)]


def gold_is(number: float) -> Callable[..., bool]:
    """A check of what GSM8K takes for the first row's answer."""
    return lambda config, task: tba.extract_number(task.train[0]["answer"]) == number


def without(i: int, column: str) -> list[dict]:
    """ROWS with a column missing in one row."""
    cut = {name: cell for name, cell in ROWS[i].items() if name != column}
    return [cut if n == i else row for n, row in enumerate(ROWS)]


def jsonl(rows: list, separator: str = "\n", end: str = "") -> str:
    return "".join(json.dumps(row) + end + separator for row in rows)


def csv(rows: list, **options: Any) -> str:
    return pandas.DataFrame(rows).to_csv(index=False, **options)


def table(rows: list) -> pyarrow.Table:
    return pyarrow.Table.from_pylist(rows)


def parquet(rows: list | pyarrow.Table, **options: Any) -> bytes:
    out = io.BytesIO()
    whole = rows if isinstance(rows, pyarrow.Table) else table(rows)
    pyarrow.parquet.write_table(whole, out, **options)
    return out.getvalue()


def column(name: str, values: Any) -> bytes:
    """Parquet of ROWS with one column of another type."""
    whole = table(ROWS)
    return parquet(whole.set_column(whole.column_names.index(name), name, [pyarrow.array(values)]))


def saved(**splits: list) -> Callable[[Path], None]:
    """`save_to_disk` of one Dataset, called `all`, or of a DatasetDict."""
    many = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    one = many.get("all") or datasets.DatasetDict(many)
    return lambda path: one.save_to_disk(path)


def zipped(name: str, content: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, content)
    return out.getvalue()


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
LINES = jsonl(ROWS)

# ---------------------------------------------------------------------------- data: forms of files

case("JSON lines", {"a.jsonl": LINES}, ALL)
case("JSON array", {"a.json": json.dumps(ROWS)}, ALL)
case("JSON array, indented", {"a.json": json.dumps(ROWS, indent=2)}, ALL)
case("JSON lines called .json", {"a.json": LINES}, ALL)
case("JSON array called .jsonl", {"a.jsonl": json.dumps(ROWS)}, ALL, "dataset")
case(".ndjson", {"a.ndjson": LINES}, ALL)
sheet("CSV", csv(ROWS), ALL)
case("TSV", {"a.tsv": csv(ROWS, sep="\t")}, ALL)
case("Parquet", {"a.parquet": parquet(ROWS)}, ALL)
case("JSON lines, gzip", {"a.jsonl.gz": gzip.compress(LINES.encode())}, ALL)
case("CSV, gzip", {"a.csv.gz": gzip.compress(csv(ROWS).encode())}, ALL)
case("upper-case suffix", {"A.JSONL": LINES}, ALL)
case("upper-case CSV", {"A.CSV": csv(ROWS)}, ALL)
case("JSON lines, xz", {"a.jsonl.xz": lzma.compress(LINES.encode())}, ALL, "dataset")
case("CSV in a zip", {"a.zip": zipped("a.csv", csv(ROWS))}, ALL, "dataset")
case("CSV in a .csv.zip", {"a.csv.zip": zipped("a.csv", csv(ROWS))}, ALL, "dataset")
case("text file of JSON lines", {"a.txt": LINES}, "dataset")
case("no suffix", {"data": LINES}, "dataset")
case("Excel", {"a.xlsx": zipped("xl/workbook.xml", "<workbook/>")}, "dataset")
case("old Excel", {"a.xls": b"\xd0\xcf\x11\xe0" + bytes(600)}, "dataset")
case("pickle", {"a.pkl": lambda path: pandas.DataFrame(ROWS).to_pickle(path)}, "dataset")
case("YAML", {"a.yaml": "- question: What is 1?\n  answer: 1\n"}, "dataset")
case("notebook", {"a.ipynb": json.dumps({"cells": [], "nbformat": 4})}, "dataset")
case("Python loading script", {"a.py": "import datasets\n"}, "dataset")
case("SQLite", {"a.db": b"SQLite format 3\0" + bytes(100)}, "dataset")
case(
    "Feather",
    {"a.feather": lambda path: pyarrow.feather.write_feather(table(ROWS), path)},
    ALL,
    "dataset",
)
case(
    "Arrow stream",
    {"d/data.arrow": saved(all=ROWS)},
    ALL,
    "dataset",
    dataset="d/data.arrow/data-00000-of-00001.arrow",
)
case("empty JSON lines", {"a.jsonl": ""}, "dataset")
sheet("empty CSV", "", "dataset")
case("empty Parquet file", {"a.parquet": b""}, "dataset")
case("only a newline", {"a.jsonl": "\n"}, "dataset")
case("empty JSON array", {"a.json": "[]"}, "dataset")
case("empty JSON object", {"a.json": "{}"}, "dataset")
sheet("CSV of a header", "question,answer\n", "dataset")
case("Parquet without rows", {"a.parquet": parquet(table(ROWS).slice(0, 0))}, "dataset")
case("Parquet called .json", {"a.json": parquet(ROWS)}, "dataset")
sheet("Parquet called .csv", parquet(ROWS), "dataset")
case("JSON lines called .parquet", {"a.parquet": LINES}, "dataset")
sheet("JSON lines called .csv", LINES, "dataset")
case("CSV called .jsonl", {"a.jsonl": csv(ROWS)}, "dataset")
case("gzip without .gz", {"a.jsonl": gzip.compress(LINES.encode())}, ALL, "dataset")
case("no gzip in .gz", {"a.jsonl.gz": LINES}, ALL, "dataset")
case("truncated gzip", {"a.jsonl.gz": gzip.compress(LINES.encode())[:-20]}, "dataset")
case("truncated Parquet", {"a.parquet": parquet(ROWS)[:-20]}, "dataset")
case("truncated JSON line", {"a.jsonl": LINES[:-20]}, "dataset")
case("truncated JSON array", {"a.json": json.dumps(ROWS)[:-20]}, "dataset")
case("git-lfs pointer for Parquet", {"a.parquet": LFS}, "dataset")
case("git-lfs pointer for JSON lines", {"a.jsonl": LFS}, "dataset")
sheet("git-lfs pointer for CSV", LFS, "dataset")
sheet("web page saved as CSV", "<!DOCTYPE html>\n<html><body>\n</body></html>\n", "dataset")
case("web page saved as JSON lines", {"a.jsonl": "<!DOCTYPE html>\n<html></html>\n"}, "dataset")
case("Parquet with zstd", {"a.parquet": parquet(ROWS, compression="zstd")}, ALL)
case("Parquet of many row groups", {"a.parquet": parquet(ROWS, row_group_size=3)}, ALL)
case(
    "Parquet by pandas with an index",
    {"a.parquet": lambda path: pandas.DataFrame(ROWS, index=range(5, 25)).to_parquet(path)},
    ALL,
)
case("/dev/null", dict, "dataset", dataset="/dev/null")

# -------------------------------------------------------------------------- data: encodings, lines

ACCENTS = with_row(question="Où est l'élève n° 3 ?")
for name, content in {
    "CSV": csv(ROWS),
    "JSON lines": LINES,
    "JSON array": json.dumps(ROWS),
}.items():
    file = {"CSV": "a.csv", "JSON lines": "a.jsonl", "JSON array": "a.json"}[name]
    case(f"{name} with a byte-order mark", {file: "\ufeff" + content}, ALL, "dataset")
    case(f"{name} with CRLF", {file: content.replace("\n", "\r\n")}, ALL)
    case(f"{name} in UTF-16", {file: content.encode("utf-16")}, ALL, "dataset")
sheet("CSV with bare CR", csv(ROWS).replace("\n", "\r"), ALL, "dataset")
case("JSON lines with bare CR", {"a.jsonl": LINES.replace("\n", "\r")}, ALL, "dataset")
sheet("CSV in Latin-1", csv(ACCENTS).encode("latin-1"), "dataset")
case(
    "JSON lines in Latin-1",
    {
        "a.jsonl": "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in ACCENTS).encode(
            "latin-1"
        )
    },
    "dataset",
)
sheet("accents in UTF-8", csv(ACCENTS), ALL)
lines("emoji and Chinese", with_row(question="苹果 🍎?"), ALL)
case("half of a surrogate pair", {"a.jsonl": LINES.replace("What", "\\ud83c", 1)}, ALL, "dataset")
lines("a NUL character", with_row(question="What\0 is it?"), ALL, "dataset")
case("no newline at the end", {"a.jsonl": LINES.rstrip()}, ALL)
case("blank lines in JSON lines", {"a.jsonl": jsonl(ROWS, "\n\n")}, ALL)
sheet("blank lines in CSV", csv(ROWS).replace("\n", "\n\n"), ALL)
case("JSON lines with trailing commas", {"a.jsonl": jsonl(ROWS, end=",")}, "dataset")
case("JSON lines with a comment", {"a.jsonl": "// made by me\n" + LINES}, "dataset")
case(
    "indented objects as JSON lines",
    {"a.jsonl": "\n".join(json.dumps(r, indent=1) for r in ROWS)},
    ALL,
    "dataset",
)
case("a line that is no JSON", {"a.jsonl": LINES + "done.\n"}, "dataset")
case("a line that is a list", {"a.jsonl": LINES + "[1, 2]\n"}, "dataset")

# ------------------------------------------------------------------------------- data: spreadsheets

sheet("CSV with semicolons", csv(ROWS, sep=";"), "dataset")
sheet("CSV of tabs", csv(ROWS, sep="\t"), "dataset")
sheet("CSV with a sep= line", "sep=,\n" + csv(ROWS), "dataset")
sheet("CSV all in quotes", csv(ROWS, quoting=1), ALL)
sheet("quoted newlines and commas", csv(with_row(question='What,\nis\r\n"it"?')), ALL)
sheet("CSV with an unclosed quote", csv(ROWS).replace("What", '"What', 1), "dataset")
sheet("CSV with pandas' index", pandas.DataFrame(ROWS).to_csv(), ALL)
sheet("CSV without a header", csv(ROWS, header=False), "dataset")
sheet("CSV with a space before a column's name", csv(ROWS).replace(",a", ", a", 1), "dataset")
sheet(
    "CSV with upper-case columns",
    csv(ROWS).replace("question,answer", "Question,Answer"),
    refused("dataset", "question"),
)
sheet(
    "CSV with a column twice", csv(ROWS).replace("question,answer", "question,question"), "dataset"
)
sheet(
    "CSV with a used column twice",
    "".join(f"{line},x\n" for line in csv(ROWS).splitlines()).replace(",x", ",answer", 1),
    ALL,
    "dataset",
)
sheet("CSV with an empty column", "".join(f"{line},\n" for line in csv(ROWS).splitlines()), ALL)
sheet("CSV with a short row", csv(ROWS) + "What is it?\n", row(20))
sheet("CSV with a long row", csv(ROWS) + "What is it?,1,2,3\n", "dataset")
sheet("CSV with a last row of commas", csv(ROWS) + ",\n", row(20))
sheet("CSV with a title above the header", "My data,\n" + csv(ROWS), "dataset")
for cell in ("NA", "None", "null", "nan", "N/A", "#N/A", "#REF!"):
    sheet(f"CSV answer {cell}", csv(with_row(answer=cell)), row(3, "answer"))
sheet("CSV question NA", csv(with_row(question="NA")), ALL, "dataset")
sheet("CSV of whole numbers as answers", csv(each(answer=lambda i: i)), ALL)
sheet("CSV of numbers, one missing", csv(each(answer=lambda i: i or None)), row(0, "answer"))
sheet("CSV answers with zeros in front", csv(ROWS).replace("#### ", "00"), ALL)
sheet("CSV answers with thousands separators", csv(with_row(answer="1,200")), ALL)
sheet("CSV answers in per cent and dollars", csv(with_row(answer="$1.50")), ALL)
sheet("CSV answers with exponents", csv(each(answer=lambda i: "1e-05")), ALL, check=gold_is(1e-05))
sheet("CSV answers True and False", csv(each(answer=lambda i: i % 2 == 0)), "dataset")
sheet("CSV answers A to D", csv(each(answer=lambda i: "ABCD"[i % 4])), row(0, "answer"))
sheet("CSV answers yes and no", csv(each(answer=lambda i: ["yes", "no"][i % 2])), "dataset")
sheet("CSV of dates as answers", csv(each(answer=lambda i: "2024-01-05")), ALL)

# ---------------------------------------------------------------------------------- data: exports

for name, whole in {
    'object with "data"': {"data": ROWS},
    'object with "train" and "test"': {"train": ROWS[:18], "test": ROWS[18:]},
    "object of named rows": {f"row{i}": row for i, row in enumerate(ROWS)},
    "pandas' to_json": json.loads(pandas.DataFrame(ROWS).to_json()),
    "pandas' to_json, split": json.loads(pandas.DataFrame(ROWS).to_json(orient="split")),
    "text": "What is it?",
    "number": 3,
    "array of texts": ["What is it?"] * 20,
    "array of pairs": [list(row.values()) for row in ROWS],
    "array of arrays": [ROWS],
}.items():
    case(f"JSON {name}", {"a.json": json.dumps(whole)}, "dataset")
case(
    "JSON object of columns",
    {"a.json": json.dumps({k: [r[k] for r in ROWS] for k in ROWS[0]})},
    ALL,
    "dataset",
)
case("JSON with NaN", {"a.jsonl": LINES.replace('"#### 6"', "NaN")}, "dataset")
lines(
    "more columns",
    [r | {"id": i, "tags": ["x"], "meta": {"a": 1}} for i, r in enumerate(ROWS)],
    ALL,
)
lines("columns in another order", ROWS[:9] + [dict(reversed(r.items())) for r in ROWS[9:]], ALL)
lines("one row", ROWS[:1], "dataset")
lines("two rows", ROWS[:2], Rows(1, 1))
lines("three rows", ROWS[:3], Rows(2, 1))
case("rows that are there twice", {"a.jsonl": LINES * 2}, Rows(36, 4))
lines("one prompt in all rows", [ROWS[1]] * 20, ALL)
lines(
    "columns of chats",
    [{"messages": [{"role": "user", "content": "x"}]}] * 20,
    refused("dataset", "question", "messages"),
)
lines(
    "columns prompt and completion",
    [{"prompt": "x", "completion": "1"}] * 20,
    refused("dataset", "question", "prompt"),
)

# ------------------------------------------------------------------------------------ data: cells

BAD_CELLS = {
    "null": None, "empty": "", "blank": " \n\t", "list": ["What", "is"], "object": {"text": "x"},
    "chat": [{"role": "user", "content": "What is 3?"}], "bool": True,
}  # fmt: skip
for name, cell in BAD_CELLS.items():
    for which in ("question", "answer"):
        no_text = isinstance(cell, list | dict | bool)  # a column of mixed types may not be read
        expected = refused("dataset", which) if no_text else row(3, which)
        lines(f"one {which} is {name}", with_row(**{which: cell}), expected)
    if isinstance(cell, list | dict | bool):
        every = [r | {"question": cell} for r in ROWS]
        lines(f"all questions are {name}", every, refused("dataset", "question"))
for which in ("question", "answer"):
    lines(f"one {which} is absent", without(3, which), row(3, which))
    lines(f"the first {which} is absent", without(0, which), row(0, which))
    lines(f"the last {which} is null", with_row(19, **{which: None}), row(19, which))
    lines(f"all {which}s are null", [r | {which: None} for r in ROWS], row(0, which))
lines("one answer without a number", with_row(answer="A"), row(3, "answer"))
lines("numbers as answers", each(answer=lambda i: i), ALL)
lines("numbers as questions", each(question=lambda i: i), ALL)
lines("numbers and texts as answers", with_row(answer=6), ALL, "dataset")
lines("answers that are floats", each(answer=lambda i: i / 4), ALL)
lines("answers that are negative", each(answer=lambda i: -i), ALL)
for value in (1e-05, 1e22, 1.5e-7, 123456789.5):
    lines(f"the answer {value}", [r | {"answer": value} for r in ROWS], ALL, check=gold_is(value))
lines("an answer of thirty digits", with_row(answer="1" * 30), ALL)
lines("a number of thirty digits", each(answer=lambda i: 10**30), ALL, "dataset")
case("Parquet: float32", {"a.parquet": column("answer", np.arange(20, dtype=np.float32) / 4)}, ALL)
case("Parquet: int8", {"a.parquet": column("answer", np.arange(20, dtype=np.int8))}, ALL)
case(
    "Parquet: one NaN",
    {"a.parquet": column("answer", [1.0] * 19 + [float("nan")])},
    row(19, "answer"),
)
case(
    "Parquet: one infinity",
    {"a.parquet": column("answer", [1.0] * 19 + [float("inf")])},
    row(19, "answer"),
)
case("Parquet: bool", {"a.parquet": column("answer", [True] * 20)}, refused("dataset", "answer"))
case("Parquet: null", {"a.parquet": column("answer", [None] * 20)}, refused("dataset", "answer"))
case(
    "Parquet: bytes",
    {"a.parquet": column("question", [b"What is it?"] * 20)},
    refused("dataset", "question"),
)
case(
    "Parquet: dates",
    {"a.parquet": column("answer", [datetime.date(2024, 1, 5)] * 20)},
    refused("dataset", "answer"),
)
case(
    "Parquet: times",
    {"a.parquet": column("question", [datetime.datetime(2024, 1, 5)] * 20)},
    refused("dataset", "question"),
)
case("Parquet: lists", {"a.parquet": column("answer", [["4"]] * 20)}, refused("dataset", "answer"))
case(
    "Parquet: decimals",
    {"a.parquet": column("answer", pyarrow.array(range(20)).cast(pyarrow.decimal128(23, 2)))},
    ALL,
    "dataset",
)
case(
    "Parquet: categories",
    {"a.parquet": column("answer", pyarrow.array(["1", "2"] * 10).dictionary_encode())},
    ALL,
)
case(
    "Parquet: large strings",
    {"a.parquet": column("answer", pyarrow.array(["1"] * 20, pyarrow.large_string()))},
    ALL,
)

# ------------------------------------------------------------------------------------ data: paths

case("a space in the name", {"my data.jsonl": LINES}, ALL)
case("letters with accents in the name", {"données 数据.jsonl": LINES}, ALL)
case("a quote in the name", {'ann\'s "run".jsonl': LINES}, ALL)
case("a percent sign in the name", {"a%20b.jsonl": LINES, "a b.jsonl": jsonl(WRONG)}, ALL)
case("a hash in the name", {"a#1.jsonl": LINES, "a.jsonl": jsonl(WRONG)}, ALL)
case("[1] in the name", {"run[1].jsonl": LINES}, ALL)
case("[1] in the name, and a sibling", {"run[1].jsonl": LINES, "run1.jsonl": jsonl(WRONG)}, ALL)
case("a star in the name, and siblings", {"x*.jsonl": LINES, "xy.jsonl": jsonl(WRONG)}, ALL)
case("a question mark in the name", {"what?.jsonl": LINES, "whats.jsonl": jsonl(WRONG)}, ALL)
case("braces in the name", {"{a,b}.jsonl": LINES, "a.jsonl": jsonl(WRONG)}, ALL)
case("[1] in a folder's name", {"run[1]/train.jsonl": LINES, "run1/train.jsonl": jsonl(WRONG)}, ALL)
case(
    "[1] above the file",
    {"run[1]/a.jsonl": LINES, "run1/a.jsonl": jsonl(WRONG)},
    ALL,
    dataset="run[1]/a.jsonl",
)
case("a colon in a file's name", {"a:b.jsonl": LINES, "a": jsonl(WRONG)}, ALL)
case("a colon in a folder's name", {"a:b/train.jsonl": LINES}, ALL)
case(
    "a colon in a folder's name, and a sibling",
    {"a:b/train.jsonl": LINES, "a/train.jsonl": jsonl(WRONG)},
    ALL,
)
case("two colons in the name", {"10:30:00.jsonl": LINES}, ALL)
case("two double colons in the name", {"a::b.jsonl": LINES}, ALL)
case("a path that begins with a dash", {"-a.jsonl": LINES}, ALL, dataset="./-a.jsonl")
case("a path below ..", {"d/x.txt": "", "a.jsonl": LINES}, ALL, dataset="d/../a.jsonl")
case("a slash at the end of a folder", {"d/train.jsonl": LINES}, ALL, dataset="d/")
case("a slash at the end of a file", {"a.jsonl": LINES}, ALL, "dataset", dataset="a.jsonl/")
case("a link to a file", {"b.jsonl": link("a.txt"), "a.txt": LINES}, ALL)
case("a link to a folder", {"b": link("d"), "d/train.jsonl": LINES}, ALL)
case("a folder of links", {"d/train.jsonl": link("../blobs/0f3a"), "blobs/0f3a": LINES}, ALL)
case("a broken link", {"b.jsonl": link("gone.jsonl")}, "dataset")
case("a link to itself", {"b.jsonl": link("b.jsonl")}, "dataset")
case("a file that does not exist", dict, "dataset", dataset="missing.jsonl")
case(
    "a folder that does not exist",
    dict,
    refused("dataset", "does not exist"),
    dataset="/nowhere/data",
)
case("~ that the shell left", dict, refused("dataset", "does not exist"), dataset="~/data.jsonl")
case("$HOME that the shell left", dict, "dataset", dataset="$HOME/data.jsonl")
case("a Windows path", dict, "dataset", dataset="C:\\data\\train.jsonl")
case("no dataset", dict, "dataset", dataset="")
case("a blank dataset", dict, "dataset", dataset=" ")
case("a hub name, offline", dict, "dataset", dataset="openai/gsm8k:main")
case("a hub name with a comma", dict, "dataset", dataset="openai/gsm8k,main")
case("a hub name of three parts", dict, "dataset", dataset="openai/gsm8k:main:train")
case(
    "a hub page's address", dict, "dataset", dataset="https://huggingface.co/datasets/openai/gsm8k"
)
case("an http address", dict, "dataset", dataset="http://127.0.0.1:9/a.jsonl")
case("an s3 address", dict, "dataset", dataset="s3://bucket/a.jsonl")
case("a gs address", dict, "dataset", dataset="gs://bucket/a.parquet")
case("an hf address", dict, "dataset", dataset="hf://datasets/openai/gsm8k")
case(
    "a file:// address",
    lambda: write_files({"a.jsonl": LINES}) or {"dataset": f"file://{Path.cwd()}/a.jsonl"},
    ALL,
    "dataset",
)
case(
    "two files with a comma",
    {"a.jsonl": LINES, "b.jsonl": LINES},
    "dataset",
    dataset="a.jsonl,b.jsonl",
)
case("a pattern of files", {"a.jsonl": LINES, "b.jsonl": LINES}, "dataset", dataset="*.jsonl")
case("a model's folder as data", dict, "dataset", dataset=MODELS / "gsm8k" / "model")

# ------------------------------------------------------------------------------- data: folders

PARTS = {f"train-0000{i}-of-00002.parquet": parquet(ROWS[i::2]) for i in range(2)}
case("an empty folder", lambda: Path("d").mkdir(), "dataset", dataset="d")
case("a folder with a README", {"d/README.md": "# Data\n"}, "dataset")
case("a folder of hidden files", {"d/.train.jsonl": LINES}, "dataset")
case("a folder of one file", {"d/mine.jsonl": LINES}, ALL)
case("a folder of one CSV", {"d/mine.csv": csv(ROWS)}, ALL)
case("a folder of one TSV", {"d/mine.tsv": csv(ROWS, sep="\t")}, ALL, "dataset")
case("a folder of one .ndjson", {"d/mine.ndjson": LINES}, ALL, "dataset")
case("a folder with a README and data", {"d/README.md": "# Data\n", "d/train.jsonl": LINES}, ALL)
case("a folder of formats", {"d/train.jsonl": LINES, "d/train.csv": csv(ROWS)}, ALL, "dataset")
case("a folder of shards", {f"d/{name}": part for name, part in PARTS.items()}, ALL)
case("a hub's folder data/", {f"d/data/{name}": part for name, part in PARTS.items()}, ALL)
case(
    "Spark's folder",
    {
        "x.parquet/part-00000-0a.snappy.parquet": parquet(ROWS),
        "x.parquet/_SUCCESS": "",
        "x.parquet/._SUCCESS.crc": b"crc",
    },
    ALL,
)
case("a folder called .jsonl", {"x.jsonl/train.jsonl": LINES}, ALL)
case(
    "a folder with train/ and test/",
    {"d/train/a.jsonl": LINES, "d/test/a.jsonl": jsonl(ROWS[:3])},
    Rows(20, 3),
)
case(
    "a folder of folders",
    {"d/run1/a.jsonl": LINES, "d/run2/a.jsonl": LINES},
    Rows(36, 4),
    "dataset",
)
case("save_to_disk of a DatasetDict", {"d": saved(train=ROWS, test=ROWS[:3])}, Rows(20, 3))
case("save_to_disk of a Dataset", {"d": saved(all=ROWS)}, ALL)
case(
    "save_to_disk, one split of it", {"d": saved(train=ROWS, test=ROWS[:3])}, ALL, dataset="d/train"
)
case(
    "save_to_disk without its Arrow file",
    lambda: saved(all=ROWS)(Path("d")) or Path("d/data-00000-of-00001.arrow").unlink(),
    "dataset",
    dataset="d",
)
case(
    "a folder of pictures",
    {"d/a.png": b"\x89PNG\r\n\x1a\n", "d/b.png": b"\x89PNG\r\n\x1a\n"},
    "dataset",
)
case("a folder of git-lfs pointers", {"d/train-00000-of-00001.parquet": LFS}, "dataset")

# -------------------------------------------------------------------------------- data: splits


def splits(**rows: list) -> dict[str, str]:
    """Files of a folder with these splits."""
    return {f"d/{name}.jsonl": jsonl(own) for name, own in rows.items()}


HIDDEN = [row | {"answer": ""} for row in ROWS[:3]]
case("train and test", splits(train=ROWS, test=ROWS[:3]), Rows(20, 3))
case("train and validation", splits(train=ROWS, validation=ROWS[:3]), Rows(20, 3))
case("train, validation and test", splits(train=ROWS, validation=WRONG, test=ROWS[:3]), Rows(20, 3))
case("train and dev", splits(train=ROWS, dev=ROWS[:3]), Rows(20, 3), ALL)
case("train and an unused split", {"d": saved(train=ROWS, test=ROWS[:3], extra=WRONG)}, Rows(20, 3))
case("only test", splits(test=ROWS), "dataset")
case("only validation and test", splits(validation=ROWS, test=ROWS[:3]), "dataset")
case(
    "train_sft and test_sft",
    {"d": saved(train_sft=ROWS, test_sft=ROWS[:3])},
    refused("dataset", "train_sft"),
)
case("a split called extra", {"d": saved(extra=ROWS)}, refused("dataset", "extra"))
case(
    "two splits of other names",
    {"d": saved(easy=ROWS, hard=ROWS)},
    refused("dataset", "easy", "hard"),
)
case("the file of a test split", splits(test=ROWS), ALL, dataset="d/test.jsonl")
case("the file of a training split", splits(train=ROWS, test=WRONG), ALL, dataset="d/train.jsonl")
case(
    "a test split with hidden answers",
    splits(train=ROWS, test=HIDDEN),
    refused("dataset", "test", "answer"),
)
case(
    "a test split with answers ?",
    splits(train=ROWS, test=[{"question": "What?", "answer": "?"}]),
    refused("dataset", "test", "answer"),
)
case(
    "a test split with a null question",
    splits(train=ROWS, test=with_row(question=None)),
    row(3, "test"),
)
case("a test split without answers", splits(train=ROWS, test=[{"question": "What?"}]), "dataset")
case("an empty test split", splits(train=ROWS, test=[]), "dataset", ALL)
case("an empty training split", {"d": saved(train=[], test=ROWS)}, "dataset")
case(
    "an evaluation dataset",
    {"a.jsonl": LINES, "b.jsonl": jsonl(ROWS[:3])},
    Rows(20, 3),
    eval_dataset="b.jsonl",
)
case("the dataset to evaluate on, too", {"a.jsonl": LINES}, Rows(20, 20), eval_dataset="a.jsonl")
case(
    "an evaluation dataset without its column",
    {"a.jsonl": LINES, "b.jsonl": jsonl([{"question": "What?"}])},
    "eval_dataset",
    eval_dataset="b.jsonl",
)
case(
    "an evaluation dataset with a null",
    {"a.jsonl": LINES, "b.jsonl": jsonl(with_row(answer=None))},
    row(3, "answer", flag="eval_dataset"),
    eval_dataset="b.jsonl",
)
case(
    "an evaluation dataset that does not exist",
    {"a.jsonl": LINES},
    "eval_dataset",
    eval_dataset="b.jsonl",
)
case(
    "an evaluation dataset of A to D",
    {"a.jsonl": LINES, "b.jsonl": jsonl(with_row(answer="C"))},
    row(3, "answer", flag="eval_dataset"),
    eval_dataset="b.jsonl",
)

# ------------------------------------------------------------------------------- data: lengths

LONG = {"question": "What is 7 and " * 200, "answer": "7"}
FULL = each(question=lambda i: LONG["question"])
case("one prompt that is too long", splits(train=[*ROWS, LONG], test=ROWS[:3]), Rows(20, 3))
case(
    "one held-out prompt that is too long", splits(train=ROWS, test=[*ROWS[:3], LONG]), Rows(20, 3)
)
case(
    "every prompt is too long", splits(train=FULL, test=ROWS[:3]), "dataset", "max_response_tokens"
)
case("every held-out prompt is too long", splits(train=ROWS, test=FULL), "max_response_tokens")
case(
    "responses as long as the context",
    {"a.jsonl": LINES},
    "max_response_tokens",
    max_response_tokens=256,
)
case(
    "responses longer than the context",
    {"a.jsonl": LINES},
    "max_response_tokens",
    max_response_tokens=5000,
)
case(
    "a prompt of a megabyte",
    splits(train=[*ROWS, {"question": "ab " * 350_000, "answer": "7"}], test=ROWS[:3]),
    Rows(20, 3),
)

# ---------------------------------------------------------------------------------- other tasks


def sums(solution: Callable[[int], Any], **more: Any) -> dict[str, str]:
    """Twenty problems for MATH; None leaves the solution out."""
    rows = []
    for i in range(20):
        rows.append({"problem": f"What is {i} and {i}?"} | more)
        if (own := solution(2 * i)) is not None:
            rows[-1]["solution"] = own
    return {"a.jsonl": jsonl(rows)}


case("MATH: boxes", sums(lambda n: f"It is \\boxed{{{n}}}."), ALL, task="math")
case("MATH: numbers", sums(lambda n: n), ALL, task="math")
case("MATH: floats", sums(lambda n: n / 4), ALL, task="math")
case("MATH: bare answers", sums(lambda n: f"{n}"), ALL, task="math")
case("MATH: bare LaTeX", sums(lambda n: f"\\frac{{{n}}}{{3}}"), ALL, task="math")
case("MATH: LaTeX between dollars", sums(lambda n: f"$x+{n}$"), ALL, task="math")
case("MATH: the column answer", sums(lambda n: None, answer="4"), ALL, task="math")
case("MATH: the column answer of numbers", sums(lambda n: None, answer=4), ALL, task="math")
case("MATH: both columns", sums(lambda n: "So $4$, \\boxed{4}", answer="4"), ALL, task="math")
case("MATH: unclosed boxes", sums(lambda n: f"\\boxed{{{n}"), row(0, "solution"), task="math")
case("MATH: empty boxes", sums(lambda n: "\\boxed{}"), row(0, "solution"), task="math")
case("MATH: no answer", sums(lambda n: "See the appendix."), row(0, "solution"), task="math")
lines(
    "MATH: a null solution",
    [{"problem": "What?", "solution": s} for s in ("\\boxed{1}", "\\boxed{2}", None)],
    row(2, "solution"),
    task="math",
)
case(
    "MATH: hidden answers in test",
    {
        "d/train.jsonl": sums(lambda n: f"\\boxed{{{n}}}")["a.jsonl"],
        "d/test.jsonl": jsonl([{"problem": "What?", "solution": ""}]),
    },
    refused("dataset", "test", "solution"),
    task="math",
)
case("MATH: GSM8K's columns", {"a.jsonl": LINES}, refused("dataset", "problem"), task="math")
case("GSM8K: MATH's columns", sums(lambda n: f"\\boxed{{{n}}}"), refused("dataset", "question"))

POSTS = [
    {"query": f"POST: Ann lost {i} hats.\n\nTL;DR:", "reference_response": " Ann lost hats."}
    for i in range(20)
]
lines("TL;DR: posts", POSTS, ALL, task="tldr")
lines(
    "TL;DR: a null reference",
    [*POSTS[:9], POSTS[9] | {"reference_response": None}],
    row(9, "reference_response"),
    task="tldr",
)
lines(
    "TL;DR: a blank reference",
    [*POSTS[:9], POSTS[9] | {"reference_response": " "}],
    row(9, "reference_response"),
    task="tldr",
)
lines(
    "TL;DR: numbers as posts", [row | {"query": i} for i, row in enumerate(POSTS)], ALL, task="tldr"
)
lines(
    "TL;DR: numbers as references",
    [row | {"reference_response": i} for i, row in enumerate(POSTS)],
    ALL,
    "dataset",
    task="tldr",
)
lines(
    "TL;DR: tokens as references",
    [row | {"reference_response": [1, 2]} for row in POSTS],
    refused("dataset", "reference_response"),
    task="tldr",
)
lines(
    "TL;DR: column summary",
    [{"query": "x", "summary": "y"}] * 20,
    refused("dataset", "reference_response"),
    task="tldr",
)

ASKS = [{"prompt": f"Write question {i}.\n"} for i in range(20)]
case("red-teaming: its own prompt", dict, Rows(1), task="redteam")
lines("red-teaming: prompts", ASKS, ALL, task="redteam")
lines("red-teaming: a null prompt", [*ASKS[:9], {"prompt": None}], row(9, "prompt"), task="redteam")
lines(
    "red-teaming: an empty prompt",
    [*ASKS[:9], {"prompt": ""}],
    refused("dataset", "prompt"),
    task="redteam",
)
lines(
    "red-teaming: a prompt of special tokens",
    [{"prompt": "<eos>"}] * 20,
    ALL,
    task="redteam",
)
lines(
    "red-teaming: a prompt that ends with EOS",
    [{"prompt": "Write it.<eos>"}] * 20,
    ALL,
    task="redteam",
)
lines(
    "red-teaming: chats",
    [{"prompt": [{"role": "user", "content": "x"}]}] * 20,
    refused("dataset", "prompt"),
    task="redteam",
)
lines(
    "red-teaming: column text",
    [{"text": "x"}] * 20,
    refused("dataset", "prompt", "text"),
    task="redteam",
)
case(
    "red-teaming: held-out prompts",
    {"a.jsonl": jsonl(ASKS), "b.jsonl": jsonl(ASKS[:3])},
    Rows(20, 3),
    task="redteam",
    eval_dataset="b.jsonl",
)
case(
    "red-teaming: no attacker's prompt",
    dict,
    "attacker_prompt",
    "dataset",
    task="redteam",
    attacker_prompt="",
)
case(
    "red-teaming: a template without {attack}",
    dict,
    "victim_template",
    task="redteam",
    victim_template="Say it",
)
case(
    "red-teaming: another label",
    dict,
    refused("toxicity_label", "toxic"),
    task="redteam",
    toxicity_label="hate",
)

# ---------------------------------------------------------------------------------- warm start

PAIR = {"prompt": "What is 2 and 2?", "response": "4"}


def pairs(count: int) -> Callable[..., bool]:
    return lambda config, task: len(task.pairs) == count


def sft(
    name: str, rows: list, *expected: Rows | Refused | str, prompts: str = "", **options: Any
) -> None:
    """A case of warm-start data, and of their prompts."""
    files = {"a.jsonl": LINES, "sft.jsonl": jsonl(rows)}
    if prompts:
        files["prompts.jsonl"] = prompts
        options["sft_prompts"] = "prompts.jsonl"
    case(f"warm start: {name}", files, *expected, sft_data="sft.jsonl", **options)


sft("prompts and responses", [PAIR] * 4, ALL, check=pairs(4))
sft("instructions", [{"instruction": "Explain it."}] * 4, ALL, check=pairs(4))
sft("a null response", [PAIR, PAIR | {"response": None}], row(1, flag="sft_data"))
sft("a blank prompt", [PAIR, PAIR | {"prompt": " "}], row(1, flag="sft_data"))
sft("numbers as responses", [PAIR | {"response": 4}] * 2, ALL, check=pairs(2))
sft("numbers as prompts", [PAIR | {"prompt": 4}] * 2, ALL, check=pairs(2))
sft("numbers as instructions", [{"instruction": 7}] * 2, ALL, check=pairs(2))
sft("chats", [{"messages": [{"role": "user", "content": "x"}]}] * 2, "sft_data")
sft("lists as responses", [PAIR | {"response": ["4"]}] * 2, refused("sft_data", "response"))
sft(
    "columns instruction, input and output",
    [{"instruction": "Add.", "input": "2 2", "output": "4"}],
    ALL,
)
sft("no rows", [], "sft_data")
sft("responses over the context", [PAIR, PAIR | {"response": "4 and " * 300}], ALL, check=pairs(1))
sft("all responses over the context", [PAIR | {"response": "4 and " * 300}], "sft_data")
TELL = {"instruction": "Explain it."}
named = lambda config, task: "What" in task.text(task.pairs[0][0])
sft(
    "prompts with an id",
    [TELL],
    ALL,
    prompts=jsonl([{"id": "id0", "prompt": "What is it?"}]),
    check=named,
)
sft(
    "prompts in their only column",
    [TELL],
    ALL,
    "sft_prompts",
    prompts=jsonl([{"text": "What is it?"}]),
    check=named,
)
sft(
    "prompts of two other columns",
    [TELL],
    "sft_prompts",
    prompts=jsonl([{"id": "id0", "text": "x"}]),
)
sft("numbers as its prompts", [TELL], ALL, prompts=jsonl([{"prompt": 7}]))
sft(
    "a null among its prompts",
    [TELL],
    row(1, flag="sft_prompts"),
    prompts=jsonl([{"prompt": "x"}, {"prompt": None}]),
)
sft("no prompts", [TELL], "sft_prompts", prompts="")  # replaced below
CASES[-1].flags["sft_prompts"] = "missing.jsonl"
case(
    "warm start: a folder of splits",
    {"a.jsonl": LINES, "sft/test.jsonl": jsonl([PAIR])},
    "sft_data",
    sft_data="sft",
)

# ------------------------------------------------------------------------ tokenizers and models


def model(
    name: str,
    change: Callable[[Path], Any],
    *expected: Rows | Refused | str,
    source: str = "gsm8k",
    **options: Any,
) -> None:
    """A case of a model folder `m` that `change` changes."""

    def make() -> None:
        write_files(BOXES if source == "math" else {"a.jsonl": LINES})
        shutil.copytree(MODELS / source / "model", "m")
        change(Path("m"))

    case(name, make, *expected, **{"dataset": "a.jsonl", "model": "m"} | options)


def edit(file: str, **values: Any) -> Callable[[Path], None]:
    """Change values of a JSON file; None removes one."""

    def change(path: Path) -> None:
        whole = json.loads((path / file).read_text()) | values
        whole = {key: value for key, value in whole.items() if value is not None}
        (path / file).write_text(json.dumps(whole))

    return change


def write(file: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda path: write_files({str(path / file): content})


def remove(*files: str) -> Callable[[Path], None]:
    return lambda path: [(path / file).unlink() for file in files]


def truncate(file: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / file, (path / file).stat().st_size // 2)


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda path: [change(path) for change in changes]


def weights(rename: Callable[[dict], dict]) -> Callable[[Path], None]:
    """Change the tensors of a model."""

    def change(path: Path) -> None:
        file = path / "model.safetensors"
        save_file(rename(load_file(file)), file, metadata={"format": "pt"})

    return change


def with_masks(tensors: dict) -> dict:
    """The weights, and the buffers that transformers saved until 2023."""
    masks = {"bias": torch.ones(1, 1, 64, 64).tril().byte(), "masked_bias": torch.tensor(-1e4)}
    name = "transformer.h.0.attn"
    return tensors | {f"{name}.{key}": mask for key, mask in masks.items()}


def as_bin(path: Path) -> None:
    """PyTorch's own format in place of safetensors."""
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def shards(missing: bool) -> Callable[[Path], None]:
    """Two files of weights and their index; the second may be missing."""

    def change(path: Path) -> None:
        transformers.AutoModelForCausalLM.from_pretrained(path).save_pretrained(
            path, max_shard_size="100KB"
        )
        (path / "model.safetensors").unlink(missing_ok=True)
        if missing:
            sorted(path.glob("model-*.safetensors"))[-1].unlink()

    return change


def adding_eos(path: Path) -> None:
    """A tokenizer that ends each text with EOS, as with add_eos_token."""
    whole = json.loads((path / "tokenizer.json").read_text())
    piece = {"SpecialToken": {"id": "<eos>", "type_id": 0}}
    whole["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, piece],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<eos>": {"id": "<eos>", "ids": [0], "tokens": ["<eos>"]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(whole))


def with_sentencepiece(path: Path) -> None:
    """Only SentencePiece's own file, as folders converted years ago have."""
    text = io.BytesIO()
    sentences = [
        f"{row['question']} {row['answer']} [MATH TASK] Problem: Solution:" for row in ROWS
    ]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences * 5), model_writer=text, vocab_size=300,
        model_type="bpe", byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    remove("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")(path)
    (path / "tokenizer.model").write_bytes(text.getvalue())
    own = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(own))
    edit("config.json", bos_token_id=1, eos_token_id=2)(path)
    edit("generation_config.json", bos_token_id=1, eos_token_id=2)(path)


def random_model(kind: type, config: Any) -> Callable[[Path], None]:
    """Another kind of model beside the tokenizer."""

    def change(path: Path) -> None:
        (path / "model.safetensors").unlink()
        kind(config).save_pretrained(path)

    return change


SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
BERT = transformers.BertConfig(vocab_size=428, **SMALL)
T5 = transformers.T5Config(vocab_size=428, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
DATE = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
CHAT = {"task": "math", "source": "math"}  # MATH uses the chat template
BOXES = sums(lambda n: f"It is \\boxed{{{n}}}.")
model("tokenizer: no EOS", edit("tokenizer_config.json", eos_token=None), refused("model", "EOS"))
model("tokenizer: no padding token", edit("tokenizer_config.json", pad_token=None), ALL)
model("tokenizer: ends a prompt with EOS", adding_eos, ALL)
model("tokenizer: SentencePiece alone", with_sentencepiece, ALL, "model")
model("tokenizer: no files", remove("tokenizer.json", "tokenizer_config.json"), "model")
model("tokenizer: no tokenizer.json", remove("tokenizer.json"), "model")
model("tokenizer: no tokenizer_config.json", remove("tokenizer_config.json"), ALL, "model")
model("tokenizer: truncated", truncate("tokenizer.json"), "model")
model("tokenizer: git-lfs pointer", write("tokenizer.json", LFS), "model")
model(
    "tokenizer: an unknown class",
    edit("tokenizer_config.json", tokenizer_class="MyTokenizer"),
    ALL,
    "model",
)
model(
    "tokenizer: code of its own",
    edit(
        "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["mine.Mine", None]},
        tokenizer_class="Mine",
    ),
    ALL,
    "model",
)
model("tokenizer: model_max_length 16", edit("tokenizer_config.json", model_max_length=16), ALL)
model(
    "tokenizer: truncates",
    edit("tokenizer_config.json", truncation_side="left", model_max_length=8),
    ALL,
)
model("chat template: none, not needed", remove("chat_template.jinja"), ALL)
model("chat template: none for MATH", remove("chat_template.jinja"), ALL, **CHAT)
model("chat template: with the date", write("chat_template.jinja", DATE), ALL, **CHAT)
model(
    "chat template: empty text",
    write("chat_template.jinja", "{# nothing #}"),
    "model",
    "dataset",
    **CHAT,
)
model(
    "stop tokens: a list in generation_config.json",
    edit("generation_config.json", eos_token_id=[0, 7]),
    ALL,
    check=lambda c, p: tba.end_tokens(*tba.check_model("model", c)) == [0, 7],
)
model(
    "stop tokens: a list in config.json",
    edit("config.json", eos_token_id=[0, 7]),
    ALL,
    check=lambda c, p: tba.end_tokens(*tba.check_model("model", c)) == [0, 7],
)
model("stop tokens: null in config.json", edit("config.json", eos_token_id=None), ALL)
model("stop tokens: no generation_config.json", remove("generation_config.json"), ALL)
model(
    "stop tokens: generation_config.json is no JSON",
    write("generation_config.json", "{"),
    "model",
    ALL,
)
model(
    "model: in a folder with a space", lambda path: path.rename("my model"), ALL, model="my model"
)
model("model: in a folder with [1]", lambda path: path.rename("m[1]"), ALL, model="m[1]")
model("model: a slash at the end", lambda path: None, ALL, model="m/")
model("model: a link", lambda path: Path("l").symlink_to("m"), ALL, model="l")
model("model: the folder above", lambda path: shutil.move("m", "above/m"), "model", model="above")
model("model: its weights' file", lambda path: None, "model", model="m/model.safetensors")
model("model: an empty folder", lambda path: Path("e").mkdir(), "model", model="e")
model("model: a GGUF file", write("m.gguf", b"GGUF" + bytes(100)), "model", model="m/m.gguf")
model("model: the dataset's path", lambda path: None, "model", model="a.jsonl")
model("model: nothing named", lambda path: None, "model", model="")
model("model: no such folder", lambda path: None, "model", model="./n")
model("model: a hub name, offline", lambda path: None, "model", model="meta-llama/Llama-3.2-1B")
model("model: a hub name with a version", lambda path: None, "model", model="gpt2@main")
model("model: a hub address", lambda path: None, "model", model="https://huggingface.co/gpt2")
model("model: no config.json", remove("config.json"), "model")
model("model: config.json is no JSON", write("config.json", "{"), "model")
model(
    "model: config.json without a type",
    edit("config.json", model_type=None, architectures=None),
    "model",
)
model("model: an unknown type", edit("config.json", model_type="llama9"), "model")
model(
    "model: code of its own",
    edit("config.json", model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Mine"}),
    "model",
)
model("model: no weights", remove("model.safetensors"), "model")
model("model: truncated weights", truncate("model.safetensors"), "model")
model("model: empty weights", write("model.safetensors", b""), "model")
model("model: git-lfs pointer", write("model.safetensors", LFS), "model")
model("model: weights in a .bin", as_bin, ALL, "model")
model("model: weights in shards", shards(missing=False), ALL)
model("model: a shard is missing", shards(missing=True), "model")
model(
    "model: a layer is missing",
    weights(lambda t: {k: v for k, v in t.items() if "layers.1." not in k}),
    "model",
)
model("model: a layer too many", edit("config.json", num_hidden_layers=1), "model")
model("model: a GPT-2 of 2023, with causal masks", weights(with_masks), ALL, source="redteam")
model(
    "model: names of torch.compile",
    weights(lambda t: {f"_orig_mod.{k}": v for k, v in t.items()}),
    "model",
)
model("model: names of DDP", weights(lambda t: {f"module.{k}": v for k, v in t.items()}), "model")
model("model: other sizes", edit("config.json", hidden_size=32), "model")
model("model: fewer embeddings than tokens", edit("config.json", vocab_size=400), "model")
model(
    "model: an adapter alone",
    both(
        remove("config.json", "model.safetensors"),
        write("adapter_config.json", '{"base_model_name_or_path": "gpt2", "peft_type": "LORA"}'),
        write("adapter_model.safetensors", LFS),
    ),
    refused("model", "adapter"),
)
model(
    "model: an adapter beside it", write("adapter_config.json", "{}"), refused("model", "adapter")
)
model(
    "model: quantized",
    edit("config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
    "model",
)
model(
    "model: quantized by bitsandbytes",
    edit("config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "model",
)
model("model: an encoder", random_model(transformers.BertForMaskedLM, BERT), "model")
model(
    "model: a decoder of an encoder's kind",
    random_model(
        transformers.BertLMHeadModel,
        transformers.BertConfig(vocab_size=428, is_decoder=True, **SMALL),
    ),
    ALL,
    "model",
)
model(
    "model: sequence to sequence",
    random_model(transformers.T5ForConditionalGeneration, T5),
    "model",
)
model(
    "model: a classifier",
    random_model(
        transformers.LlamaForSequenceClassification,
        transformers.LlamaConfig(vocab_size=428, **SMALL),
    ),
    "model",
)
model(
    "model: a body without a head",
    random_model(transformers.LlamaModel, transformers.LlamaConfig(vocab_size=428, **SMALL)),
    "model",
)
model("model: a trainer's optimizer beside it", write("optimizer.pt", b"x"), ALL)
model("model: saved as bfloat16", weights(lambda t: {k: v.bfloat16() for k, v in t.items()}), ALL)
case(
    "judges: a policy as the reward model",
    dict,
    "reward_model",
    task="tldr",
    reward_model=MODELS / "tldr" / "model",
)
case("judges: no gold reward model", dict, "gold_reward_model", task="tldr", gold_reward_model="")
case("judges: no victim", dict, "victim_model", task="redteam", victim_model="")
case(
    "judges: a victim that does not exist", dict, "victim_model", task="redteam", victim_model="./v"
)
case("judges: no toxicity model", dict, "toxicity_model", task="redteam", toxicity_model="")
case("judges: no sentence model", dict, "sentence_model", task="redteam", sentence_model="")

# ----------------------------------------------------------------------------------------- flags

for flag, value in {
    "steps": "1e3", "learning_rate": "1e-5,", "beta": "0,014", "temperature": "0", "seed": "-1",
    "max_response_tokens": "1k", "prompts_per_step": "7.0", "dtype": "fp16", "pack": "maybe",
    "task": "GSM8K", "engine": "VLLM", "objective": "TB", "num_searchers": "auto", "plugin": "mine",
}.items():  # fmt: skip
    case(f"flag --{flag} {value}", dict, flag, **{flag: value})
case("a flag with a dash", dict, "eval-every", **{"eval-every": 3})
case("a flag that is misspelt", dict, "datset", datset="a.jsonl")


def main() -> int:
    """Print the table; returns the exit code: 1 if something was not as expected."""
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
            print(
                f"{' ' if outcome.right else '!'} {one.name:<45} {outcome.code} {outcome.line:.200}"
            )
    print(f"{right} of {len(chosen)} cases as expected")
    return 0 if right == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
