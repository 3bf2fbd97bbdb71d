"""What is trained on is what the user named, or one line says what is wrong, with its row."""

import bz2
import gzip
import json
import logging
import shutil

import datasets
import numpy as np
import pytest
from conftest import MODELS
from harness import arguments, config_and_task, judges_of, run_tba
from test_cli import refused
from tokenizers.normalizers import Prepend
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

import tba

ROWS = [{"question": f"What is {i}?", "answer": f"#### {i}"} for i in range(20)]


def write(path, rows=ROWS):
    """A JSONL file of these rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tokenizer(gsm8k):
    return AutoTokenizer.from_pretrained(gsm8k / "model")


@pytest.fixture
def read(gsm8k, tmp_path, tokenizer):
    """Function: the task of a dataset, which has read its examples."""

    def task_of(dataset, **flags):
        args = arguments(gsm8k, tmp_path / "out", dataset=dataset, **flags)
        config = tba.resolve(tba.parse(args))
        return tba.TASKS[config.task](config, tokenizer)

    return task_of


def error_of(call, *args, **flags):
    """The one line of the InputError that a call raises."""
    with pytest.raises(tba.InputError) as raised:
        call(*args, **flags)
    assert "\n" not in str(raised.value)
    return str(raised.value)


NO_TEXT = [None, "", " \n", True, ["a"], [{"role": "user", "content": "a"}], {"a": 1}]


@pytest.mark.parametrize("cell", NO_TEXT, ids=repr)
@pytest.mark.parametrize("column", ["question", "answer"])
def test_a_cell_that_is_no_text_is_named(cell, column, read, tmp_path):
    write(tmp_path / "good.jsonl")
    bad = write(tmp_path / "bad.jsonl", [*ROWS[:2], ROWS[2] | {column: cell}])
    for flags in ({"dataset": bad}, {"dataset": tmp_path / "good.jsonl", "eval_dataset": bad}):
        line = error_of(read, **flags)
        assert f"--{[*flags][-1]} {bad}: split train, row 2 " in line and column in line


@pytest.mark.parametrize("text", ["", "NA", "None", "NaN"])
def test_an_empty_cell_of_a_table_is_named(text, read, tmp_path):
    rows = [["question", "answer"], ["1+1?", "2"], ["1+2?", text]]
    for name, comma in (("a.csv", ","), ("a.tsv", "\t")):
        (tmp_path / name).write_text("".join(comma.join(row) + "\n" for row in rows))
        line = error_of(read, tmp_path / name)
        assert "row 1 " in line and "column answer" in line
    data = datasets.Dataset.from_dict({"question": ["1+1?", "1+2?"], "answer": [2.0, float("nan")]})
    data.to_parquet(tmp_path / "a.parquet")
    assert "row 1 " in error_of(read, tmp_path / "a.parquet")


def test_a_test_split_with_hidden_answers_is_named(read, tmp_path):
    write(tmp_path / "data" / "train.jsonl")
    for hidden in ("", "?"):
        write(tmp_path / "data" / "test.jsonl", [ROWS[0], ROWS[1] | {"answer": hidden}])
        line = error_of(read, tmp_path / "data")
        assert f"--dataset {tmp_path / 'data'}: split test, row 1 " in line and "answer" in line


def test_numbers_are_written_without_exponent(read, tmp_path):
    numbers = {7: "7", 1e-05: "0.00001", 2.5: "2.5", 10**17: "1" + "0" * 17}
    for number, text in numbers.items():
        task = read(write(tmp_path / "a.jsonl", [{"question": 1, "answer": number}] * 10))
        assert task.train[0] == {"question": "1", "answer": text}
        assert task.checked_rewards(task.train[:1], [f"It is {text}."], np.ones(1)) == [1.0]


def test_a_task_says_which_examples_it_can_use(read, tmp_path, monkeypatch):
    line = error_of(read, write(tmp_path / "a.jsonl", [*ROWS, ROWS[0] | {"answer": "B"}]))
    assert "row 20 " in line and "'B'" in line
    rows = [{"problem": "1+1?", "solution": f"\\boxed{{{i}}}"} for i in (1, 2, "")]
    assert "row 2 " in error_of(read, write(tmp_path / "b.jsonl", rows), task="math")

    class Short(tba.Task):
        """Questions of at most ten characters."""

        columns = ("question",)

        def check(self, example):
            if len(example["question"]) > 10:
                raise ValueError("this question is too long")

    monkeypatch.setitem(tba.TASKS, "short", Short)
    path = write(tmp_path / "c.jsonl", [{"question": "1+1?"}, {"question": "One and one?"}])
    assert "row 1 " in (line := error_of(read, path, task="short")) and "too long" in line


def test_a_path_that_exists_is_that_path(read, tmp_path):
    sibling = [{"question": "of the sibling", "answer": "1"}] * 3
    for name, other in {"run[1]": "run1", "x*": "xy", "a:b": "a", "s::p": "s", "q?": "qq"}.items():
        write(tmp_path / f"{other}.jsonl", sibling)
        write(tmp_path / other / "train.jsonl", sibling)
        for path in (write(tmp_path / f"{name}.jsonl"), write(tmp_path / name / "train.jsonl")):
            dataset = path if path.parent == tmp_path else path.parent
            if dataset.is_dir():
                dataset.chmod(0o555)  # a shared folder
            task = read(dataset)
            assert len(task.train + task.held_out) == len(ROWS), dataset
            assert "sibling" not in str(task.train), dataset


def test_a_path_may_be_relative(read, tmp_path, monkeypatch):
    """For `load_task` itself, too, which callers may give settings that `parse` has not seen."""
    write(tmp_path / "a.jsonl")
    write(tmp_path / "data" / "train.jsonl")
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "./data", "data/../a.jsonl"):
        splits = tba.read_dataset("dataset", tba.settings(dataset=name))
        assert splits["train"]["answer"] == [row["answer"] for row in ROWS]


CHAT = [
    {"role": "user", "content": "Is 3 odd?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And 4?"},
    {"role": "assistant", "content": "No."},
]


def test_a_task_may_read_data_of_another_form(read, tmp_path, monkeypatch):
    """The examples of docs/hacking.md: chat messages, and a column that may be empty."""

    class Chat(tba.Task):
        """The messages before the last one are the prompt, and that one is the answer."""

        def examples(self):
            splits = tba.read_dataset("dataset", self.config)
            rows = [self.example(row) for row in splits["train"]]
            return rows[1:], rows[:1]

        def example(self, row):
            *turns, last = row["messages"]
            text = "".join(f"{turn['role']}: {turn['content']}\n" for turn in turns)
            return {"prompt": f"{text}assistant:", "answer": last["content"]}

    class Alpaca(Chat):
        """Instructions, some of which have an input."""

        def example(self, row):
            given = f"\n{row['input']}" if row["input"] else ""
            return {"prompt": f"{row['instruction']}{given}\n", "answer": row["output"]}

    Chat.template = Alpaca.template = "{prompt}"
    for kind in (Chat, Alpaca):
        monkeypatch.setitem(tba.TASKS, kind.__name__.lower(), kind)
    task = read(write(tmp_path / "a.jsonl", [{"messages": CHAT}] * 3), task="chat")
    expected = "user: Is 3 odd?\nassistant: Yes.\nuser: And 4?\nassistant:"
    assert [task.prompt(example) for example in task.train] == [expected] * 2
    assert task.held_out == [{"prompt": expected, "answer": "No."}]
    rows = [{"instruction": "Add.", "input": text, "output": "3"} for text in ("", "1 2", None)]
    task = read(write(tmp_path / "b.jsonl", rows), task="alpaca")
    assert [task.prompt(example) for example in task.train] == ["Add.\n1 2\n", "Add.\n"]


def test_many_prompts_are_tokenized_in_pieces(gsm8k, tmp_path, tokenizer, monkeypatch):
    """Each as it is tokenized alone; the output for all of 100,000 would take over a GiB."""
    sizes = []
    whole = tba.prompt_tokens

    def noted(own, texts, special=True):
        sizes.append(len(texts))
        return whole(own, texts, special)

    monkeypatch.setattr(tba, "prompt_tokens", noted)
    rows = [{"question": f"What is {i}?", "answer": f"{i}"} for i in range(5000)]
    data = write(tmp_path / "a.jsonl", rows)
    _, task = config_and_task(gsm8k, tmp_path / "out", dataset=data, eval_dataset=data)
    assert sum(sizes) == 10_000 and max(sizes) <= 1000
    for i in (0, 999, 1000, 2500, 4999):
        text = task.prompt(task.train[i])
        assert task.train_prompts[i].tolist() == tokenizer(text)["input_ids"]


def test_a_token_without_an_embedding_is_one_line(gsm8k, tmp_path):
    """Not if no prompt has it: some models have a smaller vocabulary than their tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(gsm8k / "model", folder)
    twin = AutoTokenizer.from_pretrained(folder)
    twin.add_tokens(["<turn>"])
    twin.save_pretrained(folder)
    config_and_task(gsm8k, tmp_path / "out", model=folder)
    rows = [*ROWS, {"question": "<turn> What is 7?", "answer": "7"}]
    data = write(tmp_path / "a.jsonl", rows)
    line = error_of(config_and_task, gsm8k, tmp_path / "out", model=folder, dataset=data)
    assert f"--model {folder}: " in line and str(len(twin) - 1) in line


def test_forms_that_people_have(read, tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    for name in (
        "a.jsonl", "a.ndjson", "A.JSONL", "a.v2.jsonl", "test.jsonl", "a.test.jsonl",
        "validation-1.jsonl", "test [1.2].jsonl", "a copy (2).json.jsonl",
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
    (tmp_path / "bom.jsonl").write_text("\ufeff" + text)
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    data.to_csv(tmp_path / "a.csv")
    data.to_csv(tmp_path / "a.tsv", sep="\t")
    data.to_parquet(tmp_path / "a.parquet")
    for suffix, module in {"gz": gzip, "bz2": bz2}.items():
        for name in ("a.json", "a.jsonl", "a.csv", "a.tsv"):
            plain = (tmp_path / name).read_bytes()
            (tmp_path / f"{name}.{suffix}").write_bytes(module.compress(plain))
    spark = tmp_path / "spark.parquet"  # a folder
    spark.mkdir()
    for part in range(2):
        shard = data.shard(2, part, contiguous=True)
        shard.to_parquet(spark / f"part-0000{part}-3c1d.snappy.parquet")
    (spark / "_SUCCESS").touch()
    data.save_to_disk(tmp_path / "saved")
    two = datasets.DatasetDict(train=data.select(range(18)), test=data.select([18, 19]))
    two.save_to_disk(tmp_path / "saved_dict")
    write(tmp_path / "folder" / "train.jsonl", ROWS[:18])
    write(tmp_path / "folder" / "test.jsonl", ROWS[18:])
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for path in sorted(tmp_path.iterdir()):
        task = read(path)
        assert (len(task.train), len(task.held_out)) == (18, 2), path
        found = sorted(task.train + task.held_out, key=lambda row: int(row["answer"][5:]))
        assert found == ROWS, path


def test_other_forms_are_refused_in_a_line_that_lists_those_that_work(read, tmp_path):
    for name in (
        "a.xlsx",
        "noextension",
        "a.pkl",
        "a.md",
        "empty.jsonl",
        "empty.json",
        "empty.csv",
    ):
        (tmp_path / name).write_text("" if "empty" in name else "some text\n")
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "header.csv").write_text("question,answer\n")
    (tmp_path / "broken.jsonl").write_text('{"question": 1\n')
    (tmp_path / "excel.csv").write_text("question,answer\nq,1\n", encoding="utf-16")
    (tmp_path / "folder").mkdir()
    for path in sorted(tmp_path.iterdir()):
        line = error_of(read, path)
        assert f"--dataset {path}: " in line and "Parquet" in line, line
    for name, text in {"nested.json": {"data": ROWS}, "a.json": {"question": ["a"]}}.items():
        (tmp_path / name).write_text(json.dumps(text))
        assert "answer" in error_of(read, tmp_path / name)
    write(tmp_path / "nothing" / "train.jsonl", [])
    for path in (tmp_path / "empty.jsonl", tmp_path / "empty.json", tmp_path / "nothing"):
        assert "is empty" in error_of(read, path)
    (tmp_path / "semicolon.csv").write_text("question;answer\nq;1\n")
    assert "question;answer" in error_of(read, tmp_path / "semicolon.csv")
    latin = json.dumps(ROWS[0] | {"question": "¿Qué?"}, ensure_ascii=False)
    (tmp_path / "latin.jsonl").write_bytes(latin.encode("latin-1"))
    assert "utf-8" in error_of(read, tmp_path / "latin.jsonl")
    (tmp_path / "a.txt").write_text("a question\n")
    assert "text" in error_of(read, tmp_path / "a.txt")


def test_splits_are_named(read, tmp_path):
    part = lambda *numbers: datasets.Dataset.from_list([ROWS[i] for i in numbers])
    answers = lambda rows: {int(row["answer"][5:]) for row in rows}
    chat = datasets.DatasetDict(
        test_sft=part(0), train_sft=part(1, 2, 3), extra=part(4), test=part(5)
    )
    both = datasets.DatasetDict(train=part(0, 1), train_sft=part(2, 3))
    both.save_to_disk(tmp_path / "both")
    task = read(tmp_path / "both", train_split="train_sft")
    assert answers(task.train + task.held_out) == {2, 3}
    chat.save_to_disk(tmp_path / "chat")
    line = error_of(read, tmp_path / "chat")
    assert "--train_split" in line and "train_sft" in line
    task = read(tmp_path / "chat", train_split="train_sft")
    assert (answers(task.train), answers(task.held_out)) == ({1, 2, 3}, {5})
    task = read(tmp_path / "chat", train_split="train_sft", eval_split="test_sft")
    assert (answers(task.train), answers(task.held_out)) == ({1, 2, 3}, {0})
    for split in ("none", "train_sft"):  # no such split; what is trained on
        flags = {"train_split": "train_sft", "eval_split": split}
        assert "--eval_split" in error_of(read, tmp_path / "chat", **flags)
    only = datasets.DatasetDict(validation=part(6, 7))
    only.save_to_disk(tmp_path / "only")
    assert "validation" in error_of(read, tmp_path / "only")
    file = write(tmp_path / "a.jsonl")
    assert answers(read(file, eval_dataset=tmp_path / "only").held_out) == {6, 7}
    assert answers(read(file, eval_dataset=tmp_path / "chat").held_out) == {5}
    chat.pop("test")
    chat.save_to_disk(tmp_path / "no_test")
    assert "--eval_split" in error_of(read, file, eval_dataset=tmp_path / "no_test")
    task = read(file, eval_dataset=tmp_path / "no_test", eval_split="extra")
    assert (answers(task.train), answers(task.held_out)) == (set(range(20)), {4})
    assert "--eval_split" in error_of(read, file, eval_split="test")


def test_held_out_prompts_are_a_fixed_random_sample(read, tmp_path):
    rows = [{"question": f"{i}?", "answer": f"{i}"} for i in range(1000)]  # sorted
    tasks = [read(write(tmp_path / "a.jsonl", rows)) for _ in range(2)]
    numbers = [int(row["answer"]) for row in tasks[0].held_out]
    assert len(set(numbers)) == 100 and 400 < np.mean(numbers) < 600
    assert tasks[0].held_out == tasks[1].held_out and tasks[0].train == tasks[1].train
    assert len(tasks[0].train) == 900 and not {str(n) for n in numbers} & {
        row["answer"] for row in tasks[0].train
    }


def test_a_start_says_what_is_trained_and_evaluated_on(gsm8k, tmp_path, capsys):
    data = write(tmp_path / "data" / "train.jsonl", [*ROWS, ROWS[0] | {"question": "a " * 300}])
    other = write(tmp_path / "other.jsonl", ROWS[:3])
    config_and_task(gsm8k, tmp_path / "out", dataset=data.parent, eval_dataset=other)
    said = capsys.readouterr().err
    assert f"--dataset {data.parent}: 21 rows of split train, columns question, answer\n" in said
    assert f"--eval_dataset {other}: 3 rows of split train, columns question, answer\n" in said
    assert "training: 20 of 21 " in said and "evaluation: 3 of 3 " in said


def appending_eos(model, out):
    """A copy of a model whose tokenizer appends EOS, as with `add_eos_token`."""
    shutil.copytree(model, out)
    tokenizer = AutoTokenizer.from_pretrained(model)
    eos = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {eos[0]}", special_tokens=[eos]
    )
    tokenizer.save_pretrained(out)
    assert AutoTokenizer.from_pretrained(out)("a")["input_ids"][-1] == eos[1]
    return out


def test_no_prompt_ends_with_eos(gsm8k, redteam, tmp_path):
    """In training, evaluation, warm start, and as the victim reads it."""
    _, plain = config_and_task(gsm8k, tmp_path / "out")
    model = appending_eos(gsm8k / "model", tmp_path / "model")
    _, task = config_and_task(gsm8k, tmp_path / "out", model=model)
    for name in ("train_prompts", "held_out_prompts"):
        for own, expected in zip(getattr(task, name), getattr(plain, name), strict=True):
            assert np.array_equal(own, expected)
    write(tmp_path / "sft.jsonl", [{"instruction": "Explain it."}])
    flags = judges_of(redteam) | {"sft_data": tmp_path / "sft.jsonl", "victim_template": "{attack}"}
    flags["model"] = appending_eos(redteam / "model", tmp_path / "attacker")
    flags["victim_model"] = appending_eos(redteam / "victim", tmp_path / "victim")
    config, task = config_and_task(redteam, tmp_path / "out", **flags)
    ((prompt, (response,)),) = tba.read_sft_pairs(config, task)
    assert np.array_equal(prompt, task.train_prompts[0])
    assert prompt[-1] != task.tokenizer.eos_token_id == response[-1] != response[-2]
    assert task.victim_ids("a")[-1] != task.victim_tokenizer.eos_token_id


def with_special_tokens(tokenizer, single):
    """A copy of a tokenizer that adds special tokens as this template says."""
    twin = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    twin.bos_token = twin.convert_ids_to_tokens(5)
    ends = [(twin.bos_token, 5), (twin.eos_token, twin.eos_token_id)]
    twin.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ends)
    return twin


def test_a_prompt_has_one_bos_and_keeps_an_eos_of_its_own(tokenizer):
    """Chat templates write BOS, and EOS after each turn; some tokenizers append EOS."""
    bos, eos = tokenizer.convert_ids_to_tokens(5), tokenizer.eos_token
    inner = tba.prompt_tokens(tokenizer, ["What is 7?"])[0]
    for single in (f"{bos} $A", f"{bos} $A {eos}", f"$A {eos}", "$A"):
        twin = with_special_tokens(tokenizer, single)
        own = [5] if bos in single else []
        plain, written, turn = tba.prompt_tokens(
            twin, ["What is 7?", f"{bos}What is 7?", f"What is 7?{eos}"]
        )
        assert plain == own + inner
        assert written == [5, *inner]
        assert turn == [*own, *inner, twin.eos_token_id]


def test_held_out_prompts_that_are_trained_on_are_counted(gsm8k, tmp_path, capsys):
    """Several solutions to a question: a tenth of the rows has questions of the others."""
    rows = [row | {"answer": f"{row['answer']} so {i}"} for row in ROWS for i in range(5)]
    config_and_task(gsm8k, tmp_path / "out", dataset=write(tmp_path / "a.jsonl", rows))
    assert "warning: 10 evaluation prompts are trained on" in capsys.readouterr().err
    config_and_task(gsm8k, tmp_path / "out", dataset=write(tmp_path / "b.jsonl"))
    assert "trained on" not in capsys.readouterr().err


def test_a_warning_about_an_old_mistral_tokenizer_is_shown(gsm8k, tmp_path):
    """It splits words wrongly, as the model may have learned them; what is saved splits them so."""
    folder = tmp_path / "model"
    shutil.copytree(gsm8k / "model", folder)
    sizes = {"vocab_size": 512, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    MistralForCausalLM(MistralConfig(**sizes)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "4.40.0"}))
    parts = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = parts["model"]["vocab"]
    unused = range(1000, 110_000)  # those that are wrong have over 100,000 tokens
    vocabulary |= {f"unused {i}": i for i in unused}
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    logger = tba.transformers.logging.get_logger("transformers")
    shown = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())
    tba.transformers.logging.add_handler(handler)
    tokenizer, _ = tba.check_model("model", tba.settings(model=str(folder)))
    logger.warning("not about a model of this run")
    tba.transformers.logging.remove_handler(handler)
    assert len(shown) == 1 and "fix_mistral_regex" in shown[0]
    tokenizer.save_pretrained(folder)
    text = "What's WRONG with thisWord, 12345?"
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_a_warm_start_learns_the_tokens_of_the_whole_text(gsm8k, redteam, tmp_path):
    """With a tokenizer that marks the start of a text, as SentencePiece's do, and one EOS."""
    folder = tmp_path / "model"
    shutil.copytree(redteam / "model", folder)
    twin = AutoTokenizer.from_pretrained(folder)
    twin.backend_tokenizer.normalizer = Prepend("I ")  # visible: "I " before every text
    twin.save_pretrained(folder)
    rows = [{"prompt": "Tell me a", "response": " story."}]
    rows.append({"prompt": "Tell me a", "response": f" story.{twin.eos_token}"})
    data = write(tmp_path / "sft.jsonl", rows)
    flags = judges_of(redteam) | {"model": folder, "sft_data": data}
    config, task = config_and_task(redteam, tmp_path / "out", **flags)
    for prompt, (response,) in tba.read_sft_pairs(config, task):
        whole = [*prompt, *response]
        assert whole == [*twin("Tell me a story.")["input_ids"], twin.eos_token_id]


def test_rewards_may_see_special_tokens(gsm8k, tmp_path, monkeypatch):
    class Marked(tba.GSM8K):
        """GSM8K, for responses with marks that are special tokens."""

        keep_special_tokens = True

    monkeypatch.setitem(tba.TASKS, "marked", Marked)
    for name, text in (("gsm8k", " 3 4"), ("marked", " 3<assistant> 4")):
        _, task = config_and_task(gsm8k, tmp_path / "out", task=name)
        ids = task.tokenizer(" 3<assistant> 4", add_special_tokens=False)["input_ids"]
        assert task.response_texts([np.array(ids)]) == [text]


def test_warm_start_data_are_read_as_others_are(redteam, tmp_path):
    sft = {"instruction": "Explain it."}
    flags = judges_of(redteam) | {"sft_data": write(tmp_path / "sft.jsonl", [sft] * 8)}
    prompts = [{"id": i, "prompt": f"Number {i}:"} for i in range(3)]
    flags["sft_prompts"] = write(tmp_path / "prompts.jsonl", prompts)
    config, task = config_and_task(redteam, tmp_path / "out", **flags)
    texts = {task.text(prompt) for prompt, _ in tba.read_sft_pairs(config, task)}
    assert texts <= {f"Number {i}:" for i in range(3)} and len(texts) > 1

    def refuse(name, rows):
        setattr(config, name, str(write(tmp_path / f"bad_{name}.jsonl", rows)))
        line = error_of(tba.read_sft_pairs, config, task)
        setattr(config, name, str(flags[name]))
        assert f"--{name} {tmp_path}" in line
        return line

    for cell in (None, "", [1]):
        assert "row 1 " in refuse("sft_data", [sft, {"instruction": cell}])
        assert "row 1 " in refuse("sft_data", [{"prompt": "a", "response": r} for r in ("b", cell)])
        assert "row 1 " in refuse("sft_prompts", [{"id": 1, "prompt": "a"}, {"prompt": cell}])
    assert "response" in refuse("sft_data", [{"prompt": "a"}])
    assert "prompt" in refuse("sft_prompts", [{"id": 1, "text": "a"}])
    # rows that are longer than the model's context are left out
    assert "256" in refuse("sft_data", [{"instruction": "a b " * 300}])
    config.sft_data = str(write(tmp_path / "mixed.jsonl", [sft, {"instruction": "a b " * 300}]))
    assert len(tba.read_sft_pairs(config, task)) == 1


def test_a_run_resumes_on_the_examples_that_it_had(tmp_path, capsys):
    """Not if an answer or a held-out row has changed; but if the chat template has another date."""
    math = MODELS / "math"
    train, test, other = (tmp_path / name for name in ("d/train.jsonl", "d/test.jsonl", "e.jsonl"))
    rows = [json.loads(line) for line in (math / "data" / "test.jsonl").open()]
    write(train, rows[:40])
    write(test, rows[40:48])
    model = tmp_path / "model"
    shutil.copytree(math / "model", model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    template = tokenizer.chat_template
    tokenizer.chat_template = "Today is the 1st. " + template
    tokenizer.save_pretrained(model)
    out = tmp_path / "run"
    flags = {"task": "math", "model": model, "dataset": train.parent, "steps": 1, "eval_every": 0}
    run_tba(arguments(math, out, **flags))
    resume = ["--resume", out, "--steps", 2]

    changed = [*rows[:39], rows[39] | {"solution": "\\boxed{-1}"}]
    write(train, changed)
    assert f"--dataset {train.parent}: " in refused(resume, capsys)
    write(train, rows[:40])
    write(test, [*rows[40:47], rows[60]])
    assert f"--dataset {train.parent}: " in refused(resume, capsys)
    write(test, rows[40:48])
    write(other, rows[40:47])
    assert f"--eval_dataset {other}: " in refused([*resume, "--eval_dataset", other], capsys)
    tokenizer.chat_template = "Today is the 2nd. " + template
    tokenizer.save_pretrained(model)
    run_tba(list(map(str, resume)))
    assert [m["step"] for m in tba.read_lines(out / "metrics.jsonl")] == [1, 2]
