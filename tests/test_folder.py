"""A run's folder, in one process: checkpoints, resuming, logs, curves, trackers."""

import collections
import copy
import dataclasses
import errno
import json
import math
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import matplotlib.axes
import numpy as np
import pytest
import torch
from harness import (
    arguments,
    learner_of,
    random_groups,
    trajectory,
    weights_of,
    without_searchers,
)
from safetensors.torch import save_file
from test_faults import states_of, trainer_of
from transformers import AutoModelForCausalLM

import tba
from tba import read_lines

# ------------------------------------------------------------------------------ what a step logs


def test_the_numbers_of_a_step_are_those_of_what_arrived_and_what_was_trained_on(tmp_path, clock):
    trainer = trainer_of(output_dir=str(tmp_path))
    log = tba.StepLog(trainer)
    own = {"forward_backward_seconds": 0.5, "optimizer_seconds": 0.25, "sampler_gap": 0.0}
    own |= {"sampler_z": 0.0}

    def write(wall, arrived, batch):
        trainer.step += 1
        trainer.arrived = [tba.Group(i, rows) for i, rows in enumerate(arrived)]
        clock.now += wall
        log.write(own, batch)
        assert trainer.folder.bar.n == trainer.step
        return read_lines(tmp_path / "metrics.jsonl")[-1]

    row = trajectory([9], kl=math.nan)
    for _ in range(50):
        assert write(1, [[row]], [[row], [row]])["kl"] is None

    long = trajectory([1, 2], reward=1.0, version=40, last_version=42)
    cut = trajectory([1], reward=0.0, version=45, ended=False, kl=math.nan)
    third = trajectory([1, 2, 3], reward=0.5, version=50, kl=0.3)
    last = trajectory([4, 5], reward=0.1, version=48, last_version=49, kl=0.6, prompt_id=7)
    demonstration = trajectory([7], reward=1.0, version=-1, kl=math.nan)
    batch = [[long, cut], [third, demonstration], [last, last]]
    trainer.searchers.running = [
        SimpleNamespace(state=state, logprob_gap=gap, recent_rates=lambda rates=rates: rates)
        for state, gap, *rates in (
            ("ready", 0.1, 0.5, 90), ("loading", 0.3, 0.1, 10), ("pending", 0.9, 0.9, 70)
        )
    ]  # fmt: skip
    trainer.buffer.trajectories = {0: range(3), 1: range(4)}
    trainer.sync = SimpleNamespace(version=49, seconds=1.5)
    trainer.groups_dropped = 6
    log.waited.update({"generation": 0.5, "a weight sync": 0.25, "an evaluation": 9})
    numbers = {
        "step": 51, "seconds": 52, "trainer_busy": 0.75 / 2, "train_tokens_per_second": 11 / 2,
        "reward": 0.4, "response_length": 2, "eos_fraction": 0.75, "version_span": 0.75, "kl": 0.3,
        "distinct": 5 / 54,  # of two responses in each group
        "staleness_mean": (10 + 5 + 0 + 2 + 2) / 5, "staleness_max": 10,
        "replay_ratio": (49 * 2 + 3) / (49 + 2),  # of 50 steps
        "dropped_groups": 6, "wait_seconds": 0.5, "sync_wait_seconds": 0.25, "sync_seconds": 1.5,
        "buffer_trajectories": 7, "version": 49, "searcher_busy": 0.3, "searchers_alive": 2,
        "generated_tokens_per_second": 100, "logprob_gap": 0.3,
        "gpu_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip
    found = write(2, [[long, cut, third], [last, demonstration]], batch)
    assert found == pytest.approx(numbers | own)
    shown = {"step": 51, "version": 48, "prompt": "[7]", "reward": 0.1}
    assert read_lines(tmp_path / "completions.jsonl")[-1] == shown | {
        "response": str([last.tokens])
    }

    # nothing arrives: the same means
    found = write(1, [], batch[:1])
    changed = {
        "step": 52, "seconds": 53, "trainer_busy": 0.75, "train_tokens_per_second": 3,
        "staleness_mean": (11 + 6) / 2, "staleness_max": 11,
        "replay_ratio": (48 * 2 + 3 + 1) / (48 + 2),
    }  # fmt: skip
    changed |= dict.fromkeys(("wait_seconds", "sync_wait_seconds", "sync_seconds"), 0)
    assert found == pytest.approx(numbers | own | changed)
    for name in numbers:
        own[name] = 1.0  # an objective's
        with pytest.raises(ValueError, match=f"choose others: {name}$"):
            write(1, [], batch)
        del own[name]
        trainer.step -= 1


# ---------------------------------------------------------------------------- files and trackers


def write_rows(path, name, rows):
    (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_resumed_folder_has_what_was_before_its_step_and_no_more(tmp_path, capsys, clock):
    """Rows, evaluations and checkpoints of later steps go; the clock starts where it was."""
    files = {
        "metrics": [{"step": step, "seconds": 10.0 * step, "loss": None} for step in range(1, 9)],
        "completions": [{"step": step, "response": "Ä\u2028"} for step in (1, 3, 5, 5, 6, 8)],
        "eval": [{"step": step, "n": n} for step, n in ((0, 8), (5, 8), (5, 99), (8, 8))],
    }
    for name, rows in files.items():
        write_rows(tmp_path, f"{name}.jsonl", rows)
    for name in ("4", "5", "6", "10", "6.broken"):
        (tmp_path / f"checkpoint-{name}" / name).mkdir(parents=True)
    folder = tba.RunFolder(tba.settings(output_dir=str(tmp_path)), 5)
    assert folder.start == clock.now - 50 and folder.bar.n == 5
    assert read_lines(tmp_path / "metrics.jsonl") == files["metrics"]  # until it is accepted
    folder.truncate()
    for name, rows in files.items():
        kept = [row for row in rows if row["step"] <= 5]
        assert read_lines(tmp_path / f"{name}.jsonl") == kept
    assert folder.evaluations == kept
    left = {path.parent.name[11:]: path.name for path in tmp_path.glob("checkpoint-*/*")}
    assert left == {"4": "4", "5": "5", "6.broken": "6", "10.broken": "10"}
    assert capsys.readouterr().err.count("is renamed to") == 2
    new = tba.RunFolder(tba.settings(output_dir=str(tmp_path / "new"), steps=7))
    assert (new.start, new.step, new.bar.n, new.bar.total) == (clock.now, 0, 0, 7)
    assert new.evaluations == []


def test_evaluations_are_kept_and_shown_in_the_order_of_their_steps(tmp_path, capsys):
    """That of step 2 comes last, because its judge was slow."""
    trainer = trainer_of(output_dir=str(tmp_path))
    folder = trainer.folder
    trainer.learner = None
    for step, n in ((0, 8), (4, 8), (6, 99), (2, 8)):
        folder.write_evaluation(step, n, {"accuracy": step / 10}, f"answers {step}\n")
    assert [e["step"] for e in folder.evaluations] == [0, 2, 4, 6]
    assert folder.evaluations[3] == {"step": 6, "n": 99, "accuracy": 0.6}
    assert [e["step"] for e in read_lines(tmp_path / "eval.jsonl")] == [0, 4, 6, 2]
    answers = (tmp_path / "eval_answers.txt").read_text()
    assert re.findall(r"\d", answers) == ["0", "4", "6", "2"]
    assert "step 4: accuracy 0.4 (8 held-out prompts)" in capsys.readouterr().err
    tba.finish(trainer)  # before its first step: no model to write
    said = "step 0: accuracy 0 (8 held-out prompts) -> step 6: accuracy 0.6 (99 held-out prompts)\n"
    assert capsys.readouterr().out == said
    del folder.evaluations[1:]
    tba.finish(trainer)
    assert capsys.readouterr().out == "step 0: accuracy 0 (8 held-out prompts)\n"


@pytest.mark.parametrize("tracker", ["none", "tensorboard", "trackio", "wandb"])
def test_trackers_get_steps_and_evaluations_and_resume_their_run(tracker, tmp_path, monkeypatch):
    """W&B refuses steps that are not later than all, and gets them as a metric."""
    log, started, axes = [], [], []
    patch = partial(monkeypatch.setattr, tba.Accelerator)
    patch("init_trackers", lambda _, name, init_kwargs: started.append(init_kwargs))
    define = SimpleNamespace(
        define_metric=lambda name, step_metric: axes.append(name + step_metric)
    )
    patch("get_tracker", lambda _, name, unwrap: define)
    table = SimpleNamespace(Table=lambda columns, data: dict(zip(columns, *data, strict=True)))
    monkeypatch.setitem(sys.modules, tracker, table)
    trainer = trainer_of(output_dir=str(tmp_path / "mine"), run_id="ab12")
    folder = trainer.folder
    folder.path.mkdir()
    folder.config.report_to = tracker
    folder.accelerator = SimpleNamespace(log=lambda *args: log.append(args))
    trainer.step = 3
    folder.bar.update(3)
    tba.StepLog(trainer).log_arrivals([tba.Group(0, [trajectory([1])])])
    folder.track({"loss": 0.5}, 3)
    folder.write_evaluation(2, 8, {"accuracy": 0.25}, "")
    at = lambda step: None if tracker == "wandb" else step
    evaluated = {"held_out/n": 8, "held_out/accuracy": 0.25, "step": 2}
    assert log[-2:] == [({"loss": 0.5, "step": 3}, at(3)), (evaluated, at(2))]
    (row,) = read_lines(tmp_path / "mine" / "completions.jsonl")
    shown = [({"completion": row, "step": 3}, at(3))] if tracker in ("wandb", "trackio") else []
    assert log[:-2] == shown

    trainer.config.report_to = "wandb"
    tba.make_accelerator(trainer.config, 5)
    assert axes == ["*step"]
    shared = {"config": vars(trainer.config), "resume": "allow"}
    for options, first in zip(started, (1, 6), strict=True):
        assert options["wandb"] == {"name": "mine", "id": "ab12", **shared}
        assert options["trackio"] == {"name": "mine-ab12", **shared}
        assert options["tensorboard"]["purge_step"] == first


@pytest.mark.parametrize("steps", [3, 1000, 20_000])
def test_curves_show_every_metric_in_at_most_a_thousand_points(
    steps, tmp_path, capsys, monkeypatch
):
    """However many steps there were: reading all would slow down the training thread."""
    drawn = {}
    plot = matplotlib.axes.Axes.plot

    def record(axes, x, y, *style, **options):
        drawn[axes.get_title()] = x, y
        return plot(axes, x, y, *style, **options)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", record)
    rows = [{"step": step, "seconds": 1.0, "reward": step / 7} for step in range(1, steps + 1)]
    write_rows(tmp_path, "metrics.jsonl", rows)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 20')  # is being written
    first = {"step": 0, "n": 8, "accuracy": 0.1}  # of a version that did not log `distinct`
    write_rows(tmp_path, "eval.jsonl", [first, first | {"step": 2, "distinct": 0.9}])
    folder = tba.RunFolder(tba.settings(output_dir=str(tmp_path)), steps)
    folder.draw_curves()
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert [*drawn] == [*tba.RunFolder.PANELS, "held out: accuracy", "held out: distinct"]
    x, y = drawn["reward"]
    assert min(steps, 500) <= len(x) <= 1000 and x[0] == 1 and x[-1] > 0.99 * steps
    assert y.tolist() == [[step / 7] for step in x]
    assert np.isnan(drawn["loss"][1]).all() and len(drawn["loss"][1]) == len(x)
    np.testing.assert_equal(drawn["held out: distinct"], ([0, 2], [[math.nan], [0.9]]))
    (tmp_path / "curves.png").unlink()
    (tmp_path / "curves.png").mkdir()  # it cannot be written
    folder.draw_curves()
    assert "warning: curves.png" in capsys.readouterr().err


# ------------------------------------------------------------------------- checkpoints, resuming


def equal(one, other):
    """Whether two states are the same, in values, types and dtypes."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tba.Trajectory):
        return all(
            np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True)
            for name in tba.Trajectory.__slots__
        )
    return type(one) is type(other) and one == other


def test_a_checkpoint_has_the_reference_of_its_step(gsm8k, tmp_path, monkeypatch):
    """And all other states; the next reset comes while it is written. The newest two are kept."""
    without_searchers(monkeypatch)
    out = tmp_path / "run"
    save, write = tba.save, tba.save_model
    before, trainers = {}, []

    def remember(trainer):
        if trainer.step == 3:
            before.update({name: owner.state() for name, owner in trainer.registered.items()})
            before["policy"] = {name: p.detach() for name, p in trainer.learner.weights.items()}
            before.update(copy.deepcopy(before), step=3)
            (out / "checkpoint-0").mkdir()
            trainers.append(trainer)
        save(trainer)

    def write_during_a_step(*args):
        while trainers:
            trainer = trainers.pop()
            trainer.train_step(random_groups(trainer.task, 4, 8))
            trainer.inbox.clear()
        write(*args)

    monkeypatch.setattr(tba, "save", remember)
    monkeypatch.setattr(tba, "save_model", write_during_a_step)
    flags = {"reset_reference_every": 2, "save_every": 3, "learning_rate": 1e-3, "steps": 5}
    assert tba.main(arguments(gsm8k, out, eval_every=0, **flags)) == 0
    saved = read_states(out / "checkpoint-3")
    for name, state in before.items():
        assert equal(state, saved[name]), name
    assert before["ReplayBuffer"]["trajectories"] and before["Trainer"]["trajectories"]
    assert before["WeightSync"]["reference_version"] == 2
    assert before["policy"].keys() == before["WeightSync"]["reference"].keys()
    assert [path.name for path in tba.checkpoints(out)] == ["checkpoint-5", "checkpoint-3"]
    for step in (9, 10, 100):
        (out / f"checkpoint-{step}").mkdir()
    (out / "checkpoint-11.broken").mkdir()
    assert [int(path.name[11:]) for path in tba.checkpoints(out)] == [100, 10, 9, 5, 3]


def read_states(path):
    """What a checkpoint has, by name."""
    saved = tba.open_checkpoint(path)
    for file in path.glob("*.trajectories"):
        saved[file.stem]["trajectories"] = tba.read_trajectories(file)
    return copy.deepcopy(saved) | {"policy": weights_of(path)}


def refused_flag(config, task):
    """The flag that a resume with this configuration is refused for, or an empty string."""
    try:
        tba.read_checkpoint(config, task)
    except tba.InputError as error:
        return re.match(r"--(\w+)", str(error))[1]
    return ""


FIXED = {
    "task", "sft_data", "temperature", "lockstep", "lora_rank", "reset_reference_every", "seed",
    "chat_template_kwargs",
    "model",  # its files are compared
}  # fmt: skip
OF_LOCKSTEP = {
    "lag", "updates_per_batch", "prompts_per_step", "trained_per_prompt", "recent_probability"
}  # fmt: skip


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_resume_may_change_what_its_stored_groups_do_not_depend_on(lockstep, saved_run, tmp_path):
    """Every flag is changed in turn."""
    out = saved_run(tmp_path / "run")
    base = tba.resolve(tba.parse(["--resume", str(out), *["--lockstep"] * lockstep]))
    task = tba.load_task(base)
    record = json.loads((out / "config.json").read_text())
    record["config"] |= {"temperature": 0.123, "lockstep": not lockstep}  # are not looked at
    record["resolved"] |= {"lockstep": lockstep, "recent_probability": base.recent_probability}
    (out / "config.json").write_text(json.dumps(record))
    assert refused_flag(base, task) == ""
    refused = {}
    flags = [f.name for kind in (tba.Config, tba.WarmStartFlags) for f in dataclasses.fields(kind)]
    for name in set(flags) - {"resume", "lockstep"}:
        value = getattr(base, name)
        changed = copy.copy(base)
        changed.folders = {n: folder for n, folder in base.folders.items() if n != name}
        if isinstance(value, bool):
            setattr(changed, name, not value)
        else:
            setattr(changed, name, "x" if isinstance(value, str) else value + 1)
        if blamed := refused_flag(changed, task):
            refused[name] = blamed
    expected = FIXED - {"lockstep"} | (OF_LOCKSTEP if lockstep else {"searched_per_prompt"})
    assert refused == {name: name for name in expected}
    other = copy.copy(base)
    other.lockstep = not lockstep
    assert refused_flag(other, task) == "lockstep"
    for steps, blamed in ((1, "steps"), (2, ""), (3, "")):
        base.steps = steps
        assert refused_flag(base, task) == blamed
    task.checksums = task.checksums | {"dataset": 1}
    assert refused_flag(base, task) == "dataset"


FILES = (  # that a model or its tokenizer is loaded from
    "config.json generation_config.json model.safetensors model-00001-of-00002.safetensors "
    "pytorch_model.bin tokenizer.json tokenizer_config.json vocab.txt merges.txt spiece.model "
    "special_tokens_map.json added_tokens.json"
).split()
OTHERS = ["README.md", "trainer_state.json", "optimizer.pt", "chat_template.jinja"]


def test_a_checksum_is_of_the_files_that_a_model_is_loaded_from(tmp_path):
    """It depends on their names, sizes and contents, but not on the folder or their order."""
    folder = tmp_path / "model"
    checksum = lambda: tba.model_checksum(str(folder))
    contents = {name: name.encode() * 3 for name in FILES + OTHERS}
    contents["model.safetensors"] = bytes(5_000_000)
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    first = checksum()
    for name, content in contents.items():
        others = [content + b"x", content[:-1] + b"x"]
        if len(content) > 1000:  # any part that a fine-tuning would change
            parts = [(i, content[:i], content[i + 50_000 :]) for i in range(0, 5_000_000, 500_000)]
            others = [content + b"x", *(a + b"1" * 50_000 + b for _, a, b in parts)]
        for other in others:
            (folder / name).write_bytes(other)
            assert (checksum() != first) == (name in FILES), name
        (folder / name).write_bytes(content)
    copied = tmp_path / "copy"
    copied.mkdir()
    for name in reversed(contents):
        (copied / name).write_bytes(contents[name])
    assert tba.model_checksum(str(copied)) == checksum() == first
    (folder / "vocab.txt").rename(folder / "vocab.old")
    assert checksum() != first
    apis = {tba.model_checksum(name) for name in ("gpt-4o", "gpt-5", str(copied))}
    assert len(apis) == 3


def test_a_checksum_of_every_model_that_a_flag_names(gsm8k, tldr, tmp_path):
    """A folder that a hub name was loaded from, and the result of a warm start, count instead."""
    of = lambda path: tba.model_checksum(str(path))
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "config.json").write_text("{}")
    flags = {"model": str(gsm8k / "model"), "reward_model": str(tldr / "reward")}
    config = tba.settings(**flags, output_dir=str(tmp_path))
    found = tba.model_checksums(config)
    assert found == {n: of(v) for n, v in vars(config).items() if n.endswith("model") and v}
    config.folders = {"reward_model": str(tldr / "gold")}
    assert tba.model_checksums(config) == found | {"reward_model": of(tldr / "gold")}
    config.sft_data = "pairs.jsonl"
    assert tba.model_checksums(config)["model"] == of(tmp_path / "sft")


@pytest.fixture
def older_model(gsm8k, tmp_path):
    """A bfloat16 model as transformers 4 wrote it, with a processor's file."""
    folder = tmp_path / "older"
    shutil.copytree(gsm8k / "model", folder)
    old = {"rope_theta": 5000.0, "torch_dtype": "bfloat16", "transformers_version": "4.57.1"}
    words = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, changes in (("config.json", old), ("tokenizer_config.json", words)):
        config = json.loads((folder / name).read_text()) | changes
        config = {key: x for key, x in config.items() if key not in ("rope_parameters", "dtype")}
        (folder / name).write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text("{}")
    weights = {name: tensor.bfloat16() for name, tensor in weights_of(folder).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_final_model_is_read_as_the_initial_one_was(gsm8k, older_model, tmp_path):
    """Other programs and users can read it, too; checkpoints stay float32."""
    learner = learner_of(gsm8k, tmp_path / "run", model=older_model)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter))
    before = os.umask(0o027)
    try:
        for name, final in (("checkpoint", False), ("final", True)):
            with tba.atomic_folder(tmp_path / name) as new:
                tba.save_model(learner.model, tba.saved_weights(learner), learner.task, new, final)
    finally:
        os.umask(before)
    final = tmp_path / "final"
    files = {file.name for file in older_model.iterdir()}
    assert files <= {file.name for file in final.iterdir()}
    for name in files - {"model.safetensors", "generation_config.json"}:
        assert (final / name).read_bytes() == (older_model / name).read_bytes()
    assert {file.stat().st_mode & 0o777 for file in final.iterdir()} == {0o640}
    exact, rounded = weights_of(tmp_path / "checkpoint"), weights_of(final)
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)
    assert all(exact[name].dtype == torch.float32 for name in exact)
    for name, dtype in (("checkpoint", torch.float32), ("final", torch.bfloat16)):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert loaded.dtype == dtype and loaded.config.rope_parameters["rope_theta"] == 5000
    assert (tmp_path / "checkpoint" / "preprocessor_config.json").exists()
    learner.model.config.max_position_embeddings = 99  # one that means something else is its own
    tba.save_model(learner.model, tba.saved_weights(learner), learner.task, final, True)
    loaded = AutoModelForCausalLM.from_pretrained(final)
    assert loaded.config.max_position_embeddings == 99 and loaded.dtype == torch.bfloat16


def files_of(folder):
    """Every file of a folder, by path, with its bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Count(tba.Stateful):
    """An object of a plug-in."""

    SAVED = ("n",)

    def __init__(self, n=0):
        self.n = n


class Counting(tba.Trainer):
    """A plug-in's Trainer that registers it."""

    count: object = Count()

    def __init__(self, *args):
        super().__init__(*args)
        self.register(self.count, "my count")


def test_what_is_registered_keeps_its_name():
    """Two objects of a class have their own states; a name is given once, and not forgotten."""
    trainer = trainer_of()
    trainer.register(Count(3), "three")
    trainer.register(Count(30), "thirty")
    trainer.register(Count(300))
    with pytest.raises(ValueError, match="Count is registered already"):
        trainer.register(Count(3000))
    resumed = trainer_of(states_of(trainer))
    found = [resumed.register(Count(0), name).n for name in ("thirty", "three")]
    assert found == [30, 3]
    with pytest.raises(tba.InputError, match="the state of Count, which"):
        tba.require_claimed(resumed)
    resumed.register(Count(0))
    tba.require_claimed(resumed)


def unreadable(*args, **kwargs):
    raise OSError(errno.EIO, "Input/output error")


def empty_buffers(out, patch):
    for path in out.glob("checkpoint-*"):
        (path / "ReplayBuffer.trajectories").write_bytes(b"")


def save_count(out, patch):
    path = out / "checkpoint-2" / "trainer.pt"
    torch.save(torch.load(path, weights_only=True) | {"my count": {"n": 1}}, path)


REFUSALS = {  # what is said of a resume, and what is done before it
    "--temperature 0.5": lambda out, patch: None,
    "had the sizes {'log_z': 1000}, now {'log_z': 7}": lambda out, patch: patch.setitem(
        tba.PARAMETERS, "log_z", (7, 0.1)
    ),
    "now {}": lambda out, patch: patch.delitem(tba.PARAMETERS, "log_z"),
    "RecentOrReward.SAVED is": lambda out, patch: patch.setattr(
        tba.RecentOrReward, "SAVED", (*tba.RecentOrReward.SAVED, "more")
    ),
    "no state of my count": lambda out, patch: patch.setattr(tba, "Trainer", Counting),
    "has the state of my count": save_count,
    "checkpoint-3 cannot be read": lambda out, patch: patch.setattr(tba.torch, "load", unreadable),
    "no checkpoint that loads": empty_buffers,
    "has not ended": lambda out, patch: patch.setattr(  # another run
        tba, "held", tba.lock_folder(tba.settings(resume="x", output_dir=str(out))), False
    ),
}


@pytest.mark.parametrize("said", REFUSALS)
def test_a_resume_that_is_refused_changes_no_file(said, saved_run, tmp_path, capsys, monkeypatch):
    """Not a log, which has later steps, nor a newer checkpoint, which is damaged."""
    out = saved_run(tmp_path / "run")
    shutil.copytree(out / "checkpoint-2", out / "checkpoint-3")
    os.truncate(out / "checkpoint-3" / "ReplayBuffer.trajectories", 5000)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "seconds": 1.0}\n')
    REFUSALS[said](out, monkeypatch)
    before = files_of(out)
    monkeypatch.setattr(tba, "run", lambda trainer: 0)
    flags = said.split() if said.startswith("--") else []
    with pytest.raises(SystemExit) as ended:
        tba.main(["--resume", str(out), *flags])
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert ended.value.code == 2 and len(lines) == 1 and said in lines[0]
    assert files_of(out) == before


DAMAGE = {
    "emptied": lambda path: (path / "ReplayBuffer.trajectories").write_bytes(b""),
    "missing": lambda path: (path / "ReplayBuffer.trajectories").unlink(),
    "cut": lambda path: os.truncate(path / "ReplayBuffer.trajectories", 5000),
    "state": lambda path: os.truncate(path / "trainer.pt", 20_000),
    "tokenizer": lambda path: os.truncate(path / "tokenizer.json", 100),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(
    damage, saved_run, tmp_path, capsys, monkeypatch
):
    out = saved_run(tmp_path / "run")
    DAMAGE[damage](out / "checkpoint-2")
    trainers = []
    monkeypatch.setattr(tba, "run", lambda trainer: trainers.append(trainer) or 0)
    assert tba.main(["--resume", str(out)]) == 0
    (trainer,) = trainers
    assert trainer.step == 1
    assert sum(map(len, trainer.buffer.trajectories.values())) == 4 * 8
    said = capsys.readouterr().err
    assert "checkpoint-2 is damaged" in said and "renamed to checkpoint-2.broken" in said
    left = {path.name for path in out.glob("checkpoint-*")}
    assert left == {"checkpoint-1", "checkpoint-2.broken"}
    assert [m["step"] for m in read_lines(out / "metrics.jsonl")] == [1]


def test_a_run_resumes_whatever_its_classes_are_called(saved_run, tmp_path, capsys, monkeypatch):
    """With all its states, but for the rule's if that changes. A line of the log is damaged."""
    out = saved_run(tmp_path / "run")
    saved = read_states(out / "checkpoint-2")
    lines = (out / "metrics.jsonl").read_bytes()
    (out / "metrics.jsonl").write_bytes(bytes(50) + b"\n" + lines)
    trainers = []

    class MyTrainer(tba.Trainer):
        def run(self):
            trainers.append(self)
            super().run()

    without_searchers(monkeypatch)
    monkeypatch.setattr(tba, "Trainer", MyTrainer)
    monkeypatch.setattr(tba, "Learner", type("MyLearner", (tba.Learner,), {}))
    monkeypatch.setitem(tba.REPLAY_RULES, "other", type("Other", (tba.RecentOrReward,), {}))
    for rule in ("recent_or_reward", "other"):
        assert tba.main(["--resume", str(out), "--replay_rule", rule]) == 0
        trainer = trainers.pop()
        assert isinstance(trainer.rule, tba.REPLAY_RULES[rule])
        states = {name: owner.state() for name, owner in trainer.registered.items()}
        for name in states.keys() - {"--replay_rule other"}:
            assert equal(states[name], saved[name]), name
        assert len(states) == 6 and any(
            x["exp_avg"].any() for x in states["Learner"]["optimizer"].values()
        )
        assert trainer.arrived == trainer.inbox and len(trainer.inbox) == 1
        assert trainer.step == trainer.saving.result() == 2
    assert "warning: skipping a damaged line" in capsys.readouterr().err
    assert (out / "metrics.jsonl").read_bytes() == lines


@pytest.mark.parametrize("value", [np.float64(0.5), collections.deque([1])], ids=["numpy", "deque"])
def test_a_state_that_no_resume_could_load_ends_the_run_at_its_first_checkpoint(
    value, gsm8k, tmp_path, capsys, monkeypatch
):
    without_searchers(monkeypatch)
    monkeypatch.setattr(Counting, "count", Count({"a prompt": value}))
    monkeypatch.setattr(tba, "Trainer", Counting)
    out = tmp_path / "run"
    flags = {"steps": 9, "save_every": 1, "eval_every": 0, "eval_samples": 8}
    assert tba.main(arguments(gsm8k, out, **flags)) == 1
    said = capsys.readouterr().err
    name = "numpy._core.multiarray.scalar" if value == 0.5 else "collections.deque"
    assert f"a value of {name}: SAVED may have" in said and "Traceback" not in said
    assert len(read_lines(out / "metrics.jsonl")) <= 2
    assert not any(re.match(r"checkpoint|final|\.partial", path.name) for path in out.iterdir())


def test_a_reset_that_fails_is_repeated_by_the_resumed_run(gsm8k, tmp_path, capsys, monkeypatch):
    """The reference and its version are the old ones; the step is not counted."""
    without_searchers(monkeypatch)
    out = tmp_path / "run"
    flags = {"steps": 2, "reset_reference_every": 2, "save_every": 0, "learning_rate": 1e-3}
    calls = []

    def fails(policy, reference, config):
        calls.append(policy)
        assert len(calls) < 5
        return policy

    with monkeypatch.context() as patch:
        patch.setattr(tba, "next_reference", fails)
        assert tba.main(arguments(gsm8k, out, eval_every=0, eval_samples=8, **flags)) == 1
    assert "AssertionError" in capsys.readouterr().err
    saved = tba.open_checkpoint(out / "checkpoint-1")["WeightSync"]
    model = weights_of(gsm8k / "model")
    assert saved["reference_version"] == 0
    assert all(torch.equal(saved["reference"][name], model[name]) for name in model)
    assert tba.main(["--resume", str(out)]) == 0
    saved = tba.open_checkpoint(out / "checkpoint-2")["WeightSync"]
    policy = weights_of(out / "checkpoint-2")
    assert saved["reference_version"] == 2
    assert all(torch.equal(saved["reference"][name], policy[name]) for name in policy)


# ---------------------------------------------------------------------------------- a run's folder


KINDS = {  # of policies -> ten groups of S responses, or one
    "diverse": lambda rng, S: rng.integers(0, 99, (10, S, 8)),
    "one per prompt": lambda rng, S: rng.integers(0, 99, (10, 1, 8)).repeat(S, 1),
    "one of two": lambda rng, S: rng.integers(0, 2, (10, S, 1)),
    "one": lambda rng, S: np.full((10, S, 2), 5),
    "a single group": lambda rng, S: np.arange(S).reshape(1, S, 1),
}


@pytest.mark.parametrize(
    "kinds, warnings, last",
    [
        (["diverse", "one per prompt"], 0, 0.5),  # it may have learned the right answers
        (["one of two", "one"], 0, 1 / 128),  # few from the start
        (["a single group", "one of two"], 0, 2 / 128),  # also few
        (["diverse", "one"], 1, 1 / 128),
        (["diverse", "one per prompt", "one"], 1, 1 / 128),
    ],
)
def test_a_collapse_is_reported_once(kinds, warnings, last, tmp_path):
    for S in (2, 24):
        rng = np.random.default_rng(0)
        trainer = trainer_of(output_dir=str(tmp_path))
        said = []
        trainer.folder.say = said.append
        log = tba.StepLog(trainer)
        for groups in [KINDS[kind](rng, S) for kind in kinds for _ in range(10)]:
            log.log_arrivals([tba.Group(0, [*map(trajectory, group)]) for group in groups])
            log.check_learning()
        assert len(said) == warnings and all("distinct" in text for text in said)
        assert log.means["distinct"] == last


@pytest.mark.parametrize("resumed_at", [0, 40])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("contrast", [False, True])
def test_only_the_first_steps_of_a_run_can_learn_nothing(resumed_at, ended, contrast, tmp_path):
    """Later there may be nothing left to learn. One response that ends, or one pair, is enough."""
    trainer = trainer_of(output_dir=str(tmp_path))
    said, trainer.folder.step, trainer.folder.say = [], resumed_at, lambda text: said.append(text)
    log = tba.StepLog(trainer)
    for trainer.step in range(resumed_at + 1, resumed_at + 30):
        rewards = [0.5, 0.5 + (contrast and trainer.step == 7)]
        pair = [trajectory([1], reward=r, ended=ended and trainer.step == 7) for r in rewards]
        log.log_arrivals([tba.Group(0, pair)])
        log.check_learning()
    names = ("--max_response_tokens", "--dataset")
    found = {name for text in said for name in names if name in text}
    expected = {name for name, had in zip(names, (ended, contrast), strict=True) if not had}
    assert found == (set() if resumed_at else expected) and len(said) == len(found)


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_folder_is_never_without_its_old_or_its_new_contents(tmp_path, monkeypatch, fails):
    """Whatever it is kept under, if the disk is full, or a run ends between two renames."""
    rename = Path.rename
    renames = 0

    def failing(path, target):
        nonlocal renames
        renames += 1
        if renames == fails:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    def write(text):
        with tba.atomic_folder(tmp_path / "final") as new:
            (new / "part").write_text(text)
            if text == "new" and fails == 0:
                raise OSError(28, "No space left on device")

    write("old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(OSError):
            write("new")
    assert [path.read_text() for path in tmp_path.rglob("part")] == ["old"]
    synced, fails = [], 3
    name_of = lambda file: os.readlink(f"/proc/self/fd/{file}")
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(name_of(file)))
    write("new")
    assert [path.read_text() for path in tmp_path.rglob("part")] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    new = tmp_path / ".partial"
    # before the renames: the file; after them: the folder's list of files, with the new name
    assert synced == [str(new / "part"), str(new), str(tmp_path)]
