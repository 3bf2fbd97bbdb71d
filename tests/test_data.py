"""What is trained on is what the user named, or one line says what is wrong, with its row."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
from conftest import MODELS
from harness import config_and_task, judges_of
from tokenizers.normalizers import Prepend
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import tba

ROWS = [{"question": f"What is {i}?", "answer": f"#### {i}"} for i in range(20)]


def write(path, rows=ROWS):
    """A JSONL file of these rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def with_special_tokens(folder, single, **tokens):
    """The tokenizer of a folder, which adds BOS, token 5, and EOS as this template says."""
    tokenizer = AutoTokenizer.from_pretrained(folder, **tokens)
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(5)
    ids = [("BOS", 5), ("EOS", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single, special_tokens=ids)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(gsm8k):
    return AutoTokenizer.from_pretrained(gsm8k / "model")


def error_of(call, *args, **flags):
    """The one line of the InputError that a call raises."""
    with pytest.raises(tba.InputError) as raised:
        call(*args, **flags)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_names_of_local_files_and_folders(gsm8k, tmp_path, monkeypatch):
    """Also relative ones that `parse` has not seen, and whatever was loaded before."""
    write(tmp_path / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    splits = tba.read_dataset("dataset", tba.settings(dataset="./a.jsonl"))
    assert splits["train"]["answer"] == [row["answer"] for row in ROWS]
    config = tba.settings(model=str(gsm8k / "model"))
    config.folders["model"] = str(tmp_path)
    assert tba.model_folder("model", config) == str(gsm8k / "model")


@pytest.fixture
def fitting(gsm8k, tmp_path):
    """Function: the settings and the task of twelve prompts of 22 to 44 tokens."""
    rows = [{"question": "a" + " a" * (2 * i), "answer": str(i)} for i in range(12)]
    data = write(tmp_path / "lengths.jsonl", rows)
    return lambda **flags: config_and_task(
        gsm8k, tmp_path / "out", dataset=data, eval_dataset=data, **flags
    )


def test_prompts_fit_if_they_leave_room_for_their_responses(fitting, capsys):
    """In the context, all of --max_response_tokens and one more; in --max_total_tokens, one."""
    config, task = fitting()
    lengths = sorted(map(len, task.train_prompts))
    assert lengths[-1] - lengths[0] == 22 and task.max_context == 256
    for seed in range(40):
        rng = np.random.default_rng(seed)
        about = lambda own=rng: int(own.choice(lengths)) + int(own.integers(-1, 3))
        config.max_prompt_tokens = int(rng.integers(2)) * about()
        config.max_total_tokens = int(rng.integers(2)) * about()
        config.max_response_tokens = 256 - about() if rng.random() < 0.5 else 32
        limits = {
            "max_response_tokens": 256 - config.max_response_tokens - 1,
            "max_total_tokens": (config.max_total_tokens or 1000) - 1,
            "max_prompt_tokens": config.max_prompt_tokens or 1000,
        }
        named, least = min(limits.items(), key=lambda limit: limit[1])
        kept = [n for n in lengths if n <= least]
        if not kept:
            with pytest.raises(tba.InputError, match=f"^--{named} "):
                tba.encode_prompts(task, "training", task.train)
            continue
        examples, prompts = tba.encode_prompts(task, "training", task.train)
        assert sorted(map(len, prompts)) == kept
        assert f"training: {len(kept)} of 12 prompts fit {least} tokens" in capsys.readouterr().err
        texts = [task.tokenizer.decode(prompt) for prompt in prompts]
        assert texts == [task.prompt(example) for example in examples]


def test_the_longest_sequence_counts_for_packing(fitting, gsm8k, tmp_path):
    """A prompt and as many tokens as its response may have; a window must be as long."""
    prompts = fitting()[1].train_prompts
    for total in (0, 40, 50):
        _, task = fitting(max_total_tokens=total)
        fit = [len(prompt) for prompt in prompts if not total or len(prompt) < total]
        assert task.longest == max(min(n + 32, total or 1000) for n in fit)
    folder = shutil.copytree(gsm8k / "model", tmp_path / "model")
    given = json.loads((folder / "config.json").read_text())
    longest = max(map(len, prompts)) + 32
    for window in (longest - 1, longest):
        own = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(given | own | {"sliding_window": window}))
        assert fitting(model=folder)[1].packs == (window >= longest)


def test_special_tokens_are_added_unless_the_text_has_them(gsm8k, tmp_path, tokenizer):
    """As a chat template's has: MATH's prompts have them from one place only."""
    folder = shutil.copytree(gsm8k / "model", tmp_path / "model")
    with_special_tokens(folder, "BOS $A")
    data = write(tmp_path / "a.jsonl", [{"problem": "1+1?", "answer": str(i)} for i in range(3)])
    text = f"1+1?\n{tba.MATH.INSTRUCTION}"
    for expected in (f"<user>{text}<assistant>", f"{text}\n\n"):
        flags = {"task": "math", "dataset": data, "model": folder}
        _, task = config_and_task(gsm8k, tmp_path / "out", **flags)
        own = [] if "<user>" in expected else [5]
        ids = tokenizer(expected, add_special_tokens=False)["input_ids"]
        assert [prompt.tolist() for prompt in task.train_prompts] == [own + ids] * 2
        (folder / "chat_template.jinja").unlink(missing_ok=True)


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


def test_held_out_prompts_are_a_fixed_random_sample(gsm8k, tmp_path, tokenizer, monkeypatch):
    """A tenth of the rows, in an order of their own, of which --eval_samples takes the first.

    Prompts are tokenized in pieces: the output for all of 100,000 would take over a GiB.
    """
    sizes, whole = [], tba.prompt_tokens
    noted = lambda *own: sizes.append(len(own[-1])) or whole(*own)
    monkeypatch.setattr(tba, "prompt_tokens", noted)
    rows = [{"question": f"{i}?", "answer": f"{i}"} for i in range(1009)]  # sorted
    data, other = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", rows[:200])
    answers = lambda examples: [int(row["answer"]) for row in examples]
    for flags, held_out in (({}, 100), ({"eval_dataset": other}, 200)):
        tasks = [
            config_and_task(gsm8k, tmp_path / "out", dataset=data, seed=seed, **flags)[1]
            for seed in (0, 1)
        ]
        numbers = answers(tasks[0].held_out)
        assert len(set(numbers)) == len(numbers) == held_out
        assert abs(np.mean(numbers[:50]) / (1009 if held_out == 100 else 200) - 0.5) < 0.15
        assert tasks[0].held_out == tasks[1].held_out and tasks[0].train == tasks[1].train
        kept = set(range(1009)) - (set(numbers) if held_out == 100 else set())
        assert set(answers(tasks[0].train)) == kept
        assert not flags or answers(tasks[0].train) == sorted(kept)  # as in the file
        assert {ids.dtype for ids in tasks[0].train_prompts} == {np.dtype(np.int32)}
        texts = [tasks[0].prompt(example) for example in tasks[0].train]
        assert [ids.tolist() for ids in tasks[0].train_prompts] == tokenizer(texts)["input_ids"]
    assert max(sizes) <= 1000


def test_a_prompt_has_one_bos_and_keeps_an_eos_of_its_own(gsm8k, tmp_path, tokenizer):
    """Chat templates write BOS, and EOS after each turn; some tokenizers append EOS."""
    bos, eos = tokenizer.convert_ids_to_tokens(5), tokenizer.eos_token
    texts = ["What is 7?", f"{bos}What is 7?", f"What is 7?{eos}"]
    tokens_of = partial(tba.prompt_tokens, "model", tba.settings())
    inner = tokens_of(tokenizer, texts)[0]
    folder = shutil.copytree(gsm8k / "model", tmp_path / "model")
    for single in ("BOS $A", "BOS $A EOS", "$A EOS", "$A"):
        twin = with_special_tokens(folder, single)
        own = [5] if "BOS" in single else []
        plain, written, turn = tokens_of(twin, texts)
        assert plain == own + inner
        assert written == [5, *inner]
        assert turn == [*own, *inner, twin.eos_token_id]


def test_held_out_prompts_that_are_trained_on_are_counted(gsm8k, redteam, tmp_path, capsys):
    """Several solutions to a question: a tenth of the rows has questions of the others."""
    rows = [row | {"answer": f"{row['answer']} so {i}"} for row in ROWS for i in range(5)]
    config_and_task(gsm8k, tmp_path / "out", dataset=write(tmp_path / "a.jsonl", rows))
    assert "warning: 10 evaluation prompts are trained on" in capsys.readouterr().err
    config_and_task(gsm8k, tmp_path / "out", dataset=write(tmp_path / "b.jsonl"))
    config_and_task(redteam, tmp_path / "out", **judges_of(redteam))  # it has a single prompt
    assert "trained on" not in capsys.readouterr().err


def test_a_responses_tokens_continue_its_prompt_wherever_a_text_is_cut(gsm8k, tmp_path):
    """Where a token would have parts of both, the response is tokenized alone."""
    config, task = config_and_task(gsm8k, tmp_path / "none")
    text = "Gina has eight shells. Gina loses four."
    for i in range(1, len(text)):
        (before,) = tba.prompt_tokens("model", config, task.tokenizer, [text[:i]])
        *ids, last = tba.response_tokens(task, text[:i], before, text[i:])
        assert last == task.tokenizer.eos_token_id
        assert task.tokenizer.decode([*before, *ids]) == text


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


def test_warm_start_data_are_read_as_others_are(redteam, tmp_path):
    """Instructions answer a random prompt, after a space; others bring their own prompt."""
    folder = shutil.copytree(redteam / "model", tmp_path / "model")
    twin = with_special_tokens(folder, "BOS $A EOS")
    prompts = [{"id": i, "prompt": f"Number {i}:" + "\n" * (i % 2)} for i in range(4)]
    whole = {"instruction": "Explain it.", "category": "no"}
    flags = judges_of(redteam) | {"model": folder}
    flags["sft_data"] = write(tmp_path / "sft.jsonl", [whole] * 40)
    flags["sft_prompts"] = write(tmp_path / "prompts.jsonl", prompts)
    config, task = config_and_task(redteam, tmp_path / "out", **flags)

    def read(seed, rows=None):
        config.seed = seed
        if rows:
            config.sft_data = str(write(tmp_path / "other.jsonl", rows))
        pairs = tba.read_sft_pairs(config, task)
        for prompt, (response,) in pairs:
            assert prompt[0] == 5 and twin.eos_token_id not in [*prompt, *response[:-1]]
            assert response[-1] == twin.eos_token_id and 5 not in [*prompt[1:], *response]
        return [(task.tokenizer.decode(p[1:]), task.response_texts([r])[0]) for p, (r,) in pairs]

    pairs = read(0)
    assert set(pairs) == {
        (row["prompt"], "Explain it." if row["id"] % 2 else " Explain it.") for row in prompts
    }
    assert read(0) == pairs != read(1)
    config.sft_prompts = ""
    # 256 tokens fit: BOS, the prompt's, the response's n, EOS; longer rows are left out
    own = [{"prompt": "a", "response": " a" * n} for n in (252, 253, 254, 255)]
    assert [len(response) // 2 for _, response in read(0, own)] == [252, 253]
    assert "256" in error_of(read, 0, own[2:])


def test_changed_examples_have_other_checksums(tmp_path):
    """Training rows' and held-out rows' apart; not if the chat template has another date."""
    rows = [{"problem": f"{i}+1?", "solution": f"\\boxed{{{i + 1}}}"} for i in range(12)]
    changed = lambda i, rows: [*rows[:i], rows[i] | {"solution": "\\boxed{-1}"}, *rows[i + 1 :]]
    model = shutil.copytree(MODELS / "math" / "model", tmp_path / "model")
    template = (model / "chat_template.jinja").read_text()

    def sums(train=rows[:9], test=rows[9:], date="1st"):
        (model / "chat_template.jinja").write_text(f"Today is the {date}. {template}")
        write(tmp_path / "d" / "train.jsonl", train)
        write(tmp_path / "d" / "test.jsonl", test)
        flags = {"task": "math", "model": model, "dataset": tmp_path / "d"}
        return config_and_task(MODELS / "math", tmp_path / "run", **flags)[1].checksums

    train, test = (own := sums())["dataset"], own["eval_dataset"]
    assert sums(date="2nd") == sums(test=[*rows[9:], rows[9]]) == own  # a row that is repeated
    for i in (0, 8):
        other = sums(train=changed(i, rows[:9]))
        assert other["dataset"] != train and other["eval_dataset"] == test
    for held_out in (changed(0, rows[9:]), changed(2, rows[9:]), rows[9:11]):
        other = sums(test=held_out)
        assert other["dataset"] == train and other["eval_dataset"] != test


def test_a_run_resumes_on_the_examples_that_it_had(gsm8k, saved_run, tmp_path):
    data = shutil.copytree(gsm8k / "data", tmp_path / "data")
    out = saved_run(tmp_path / "run")

    def resume(*flags):
        given = ["--resume", str(out), "--dataset", str(data), *flags]
        config = tba.resolve(tba.parse(given))
        tba.read_checkpoint(config, tba.load_task(config))

    for name in ("train", "test"):
        path = data / f"{name}.jsonl"
        rows = tba.read_lines(path)
        write(path, [rows[0] | {"answer": "#### -1"}, *rows[1:]])
        assert f"--dataset {data}: " in error_of(resume)
        write(path, rows)
    other = write(tmp_path / "other.jsonl", rows[1:])
    assert f"--eval_dataset {other}: " in error_of(resume, "--eval_dataset", str(other))
    resume()  # the same rows, from another folder
