"""The command line: mistakes end in one line that names the flag, with exit code 2."""

import argparse
import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from harness import ROOT, arguments, run_tba, wait_until

import tba


def refused(args, capsys):
    """The one line that this process says of a command line, which it refuses."""
    with pytest.raises(SystemExit) as ended:
        tba.main([str(arg) for arg in args])
    assert ended.value.code == 2
    lines = [line for line in capsys.readouterr().err.split("\n") if "error:" in line]
    assert len(lines) == 1
    return lines[0]


def run_folder(path, **config):
    """A folder with the config.json of a run."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"config": config}))
    return path


MINE = """from dataclasses import dataclass
import tba

@dataclass
class Mine:
    resume_often: int | None = tba.flag(0, 'A flag of a plug-in.')

assert Mine.__annotations__['resume_often'] == int | None
tba.FLAGS.append(Mine)
"""


@pytest.mark.parametrize("form", ["--resume={}", "--resume {}"])
def test_flags_before_resume_are_ignored_and_those_after_override(
    form, tmp_path, capsys, monkeypatch
):
    """Also a plug-in, and its flags; one may begin like --resume. A run to resume is named."""
    monkeypatch.setattr(tba, "FLAGS", [*tba.FLAGS])
    monkeypatch.setattr(tba, "executed", [], raising=False)
    (tmp_path / "other.py").write_text("import tba\n\ntba.executed.append('other')\n")
    (tmp_path / f"mine{len(form)}.py").write_text(MINE)
    plugin = str(tmp_path / f"mine{len(form)}.py")
    saved = {"plugin": plugin, "steps": 3, "resume_often": 1, "run_id": "ab", "lag": None}
    out = run_folder(tmp_path / "run", beta="0.3", **saved)
    resume = form.format(out).split()
    before = ["--resume_often", "2", "--steps", "9", "--plugin", str(tmp_path / "other.py")]
    config = tba.parse([*before, *resume, "--beta", "0.4"])
    assert (config.steps, config.resume_often, config.plugin) == (3, 1, plugin)
    assert (config.beta, config.run_id, config.output_dir) == ("0.4", "ab", str(out))
    assert config.lag == 0 and config.prompts_per_step == tba.settings().prompts_per_step
    assert tba.executed == []
    config = tba.parse([*resume, "--resume_often", "2", "--steps", "9"])
    assert (config.steps, config.resume_often, config.beta) == (9, 2, "0.3")
    assert tba.parse([*resume, *before[2:]]).plugin == before[-1]
    assert tba.executed == ["other"]
    for unnamed in (form.format("").split(" "), ["--resume"]):  # as of an unset variable
        assert "--resume" in refused([*before, *unnamed], capsys)


PATHS = {
    "model", "dataset", "eval_dataset", "plugin", "reward_model", "gold_reward_model",
    "gold_reward_tokenizer", "victim_model", "toxicity_model", "sentence_model", "sft_data",
    "sft_prompts",
}  # fmt: skip


def test_paths_are_absolute_and_names_stay(tmp_path, monkeypatch):
    """Every flag of a text, with the name of a file of the working directory or of none."""
    home, work = tmp_path / "home", tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
        (folder / "own.py").write_text("")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    fields = [f for kind in tba.FLAGS for f in dataclasses.fields(kind)]
    names = {f.name for f in fields if f.type in (str, "str")}
    for name in names - {"resume", "output_dir"}:
        flag = f"--{name}"
        expected = str(work / "own.py") if name in PATHS else "own.py"
        assert getattr(tba.parse([flag, "own.py"]), name) == expected, name
        assert getattr(tba.parse([flag, "~/own.py"]), name) == str(home / "own.py")
        if name != "plugin":
            assert getattr(tba.parse([flag, "some/name"]), name) == "some/name"
    assert names >= PATHS
    run_folder(work / "run", steps=3)
    assert tba.parse(["--output_dir", "new"]).output_dir == str(work / "new")
    assert tba.parse(["--output_dir=~/new"]).output_dir == str(home / "new")
    assert tba.parse(["--resume", "run"]).output_dir == str(work / "run")
    assert tba.parse(["--resume", "run", "--output_dir", "run"]).output_dir == str(work / "run")
    assert tba.parse(["--beta=0.1@0,0.2~9"]).beta == "0.1@0,0.2~9"
    # in containers, two runs of the same second may have the same process ID, too
    monkeypatch.setattr(tba.time, "strftime", lambda text: text)
    folders = {tba.parse([]).output_dir for _ in range(9)}
    assert len(folders) == 9 and {os.path.dirname(path) for path in folders} == {str(work / "runs")}


def test_folders_that_hub_names_were_loaded_from_are_kept_until_a_flag_names_another(tmp_path):
    folders = {"model": "/cache/a", "dataset": "/cache/b", "of_no_flag": "/cache/c"}
    saved = {"model": "some/model", "dataset": "some/data", "folders": folders}
    resume = ["--resume", str(run_folder(tmp_path / "run", **saved))]
    assert tba.parse(resume).folders == folders
    assert tba.parse([*resume, "--model", "some/model"]).folders == folders
    kept = tba.parse([*resume, "--model", "another"]).folders
    assert kept == {"dataset": "/cache/b", "of_no_flag": "/cache/c"}
    assert tba.parse([]).folders == {}


def accepted(flag, text):
    """The value of a flag on the command line, or None if it is refused."""
    with contextlib.suppress(SystemExit):
        return getattr(tba.parse([f"--{flag}={text}"]), flag)


def test_a_number_is_accepted_within_its_range_only(capsys):
    """Both ends of each range; every point of a schedule; no fraction for an integer."""
    numbers = 0
    for f in [f for kind in tba.FLAGS for f in dataclasses.fields(kind)]:
        kind, (low, high) = str(f.type), f.metadata["range"]
        scheduled = f.metadata["scheduled"]
        if (not scheduled and not re.search("int|float", kind)) or "Literal" in kind:
            continue
        numbers += 1
        whole = "int" in kind
        exclusive = low == tba.ABOVE_0
        step = 1 if whole else 1e-3
        inside = [low, low + step, min(high, 7)]
        outside = [low - step, "inf", "-inf", "nan", "x", "", "1 2"]
        outside += ["1.5"] if whole else []
        if exclusive:
            inside[0], outside[0] = 1e-300, 0
        if math.isfinite(high):
            inside.append(high)
            outside.append(high + step)
        for value in inside:
            assert accepted(f.name, value) == (str(value) if scheduled else value), (f.name, value)
        for value in outside:
            assert accepted(f.name, value) is None, (f.name, value)
        if scheduled:
            assert accepted(f.name, "1@0,2~3,1@end") == "1@0,2~3,1@end"
            for text in ("1@0,-1@3", "-1@0,1@3", "1@3,1@0", "1@1", "1@0,1@x", "1@0,nan@4", "1@0,"):
                assert accepted(f.name, text) is None, (f.name, text)
    assert numbers > 50


def test_a_switch_is_on_if_it_is_named():
    for flags in ("--lockstep", "--lockstep True", "--lockstep --steps 3"):
        assert tba.parse(flags.split()).lockstep is True
    for flags in ("", "--lockstep false", "--lockstep=0"):
        assert tba.parse(flags.split()).lockstep is False


def test_settings_are_resolved_by_device_and_mode(tmp_path):
    """And what was given is not changed: a resumed run resolves it again."""
    for lockstep, m, dtype, tolerance in itertools.product(
        (False, True), (None, 0.0, 0.5), ("auto", "float32", "bfloat16"), (0.0, 0.3)
    ):
        given = tba.settings(
            lockstep=lockstep, recent_probability=m, dtype=dtype, engine="transformers",
            logprob_tolerance=tolerance, trained_per_prompt=5, kept_per_prompt=5,
        )  # fmt: skip
        before = dict(vars(given))
        config = tba.resolve(given)
        assert vars(given) == before
        usual = 0.95 if not lockstep else 1.0
        used = (
            ("bfloat16" if torch.cuda.is_available() else "float32") if dtype == "auto" else dtype
        )
        assert config.dtype == used
        assert config.recent_probability == (usual if m is None else m)
        assert config.logprob_tolerance == (tolerance or (1e-3 if used == "float32" else 1.0))
        assert config.searched_per_prompt == (5 if lockstep else given.searched_per_prompt)
        assert config.num_searchers >= 1


def refused_settings(**values):
    """The flag for which these settings are refused, or an empty string."""
    try:
        tba.resolve(tba.settings(engine="transformers", **values))
    except tba.InputError as error:
        return re.match(r"--(\w+)", str(error))[1]
    return ""


def test_settings_that_contradict_each_other_are_refused():
    """At the limits; `lag`, or E > 1, with replay and with resets each work, but not all three."""
    for name in ("searched_per_prompt", "kept_per_prompt"):
        for value in (6, 7, 8):
            values = {"trained_per_prompt": 7, "searched_per_prompt": 9, "kept_per_prompt": 9}
            wrong = name if value < 7 else ""
            assert refused_settings(**(values | {name: value})) == wrong
    assert refused_settings(lockstep=True, trained_per_prompt=7, searched_per_prompt=3) == ""
    for lockstep, lag, E, m, resets in itertools.product(
        (False, True), (0, 2), (1, 2), (0.5, 1.0), (0, 9)
    ):
        expected = "updates_per_batch" if E > 1 and not lockstep else ""
        if lag and not lockstep:
            expected = "lag"
        if lockstep and (lag or E > 1) and m < 1 and resets:
            expected = "reset_reference_every"
        found = refused_settings(
            lockstep=lockstep, lag=lag, updates_per_batch=E, recent_probability=m,
            reset_reference_every=resets,
        )  # fmt: skip
        assert found == expected, (lockstep, lag, E, m, resets)


def test_searchers_that_share_a_gpu_must_share_its_memory(monkeypatch):
    """Two of three GPUs are for Searchers; vLLM takes a fraction of all of a GPU's memory."""
    monkeypatch.setattr(tba.torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(tba, "vllm_can_run", lambda: True)
    for engine, searchers, share, fits in (
        ("vllm", 2, 0.9, True), ("vllm", 4, 0.5, True), ("vllm", 4, 0.51, False),
        ("vllm", 3, 0.6, False), ("vllm", 6, 0.4, False), ("transformers", 6, 0.9, True),
    ):  # fmt: skip
        flags = {"engine": engine, "num_searchers": searchers, "gpu_memory_utilization": share}
        with contextlib.nullcontext() if fits else pytest.raises(tba.InputError, match="share"):
            assert tba.resolve(tba.settings(**flags)).num_searchers == searchers
    assert tba.resolve(tba.settings(engine="vllm")).num_searchers == 2


def test_a_rule_that_lockstep_would_not_ask_is_refused(monkeypatch):
    """It asks `choose` and, with m < 1, `replay` and what that asks."""
    pick = lambda *args: None
    for method, lockstep, m in itertools.product(
        ("sample", "on_group", "choose", "replay", "next_prompt"), (False, True), (0.5, 1.0)
    ):
        for parent in (tba.ReplayRule, tba.RecentOrReward):
            rule = type("Rule", (parent,), {method: pick})
            monkeypatch.setitem(tba.REPLAY_RULES, "own", rule)
            asked = method == "choose" or (m < 1 and method in ("replay", "next_prompt"))
            found = refused_settings(replay_rule="own", lockstep=lockstep, recent_probability=m)
            assert found == ("" if asked or not lockstep else "replay_rule"), (method, lockstep, m)
        assert refused_settings(lockstep=lockstep, recent_probability=m) == ""


def test_a_folder_is_locked_for_one_run(tmp_path, monkeypatch):
    """A file system without locks is no error; an empty folder is no run."""
    config = tba.settings(output_dir=str(tmp_path / "run"))
    resumed = tba.settings(output_dir=config.output_dir, resume=config.output_dir)
    with tba.lock_folder(config):
        for other, flag in ((config, "--output_dir"), (resumed, "--resume")):
            with pytest.raises(tba.InputError, match=rf"{flag} .* has not ended"):
                tba.lock_folder(other)
    tba.lock_folder(config).close()
    for name in ("eval.jsonl", "checkpoint-3"):
        (tmp_path / "run" / name).mkdir()
        with pytest.raises(tba.InputError, match=r"--output_dir .* has a run"):
            tba.lock_folder(config)
        tba.lock_folder(resumed).close()
        (tmp_path / "run" / name).rmdir()

    (tmp_path / "run" / "config.json").write_text("{}")  # of one killed before its first step
    tba.lock_folder(config).close()
    (tmp_path / "config.json").write_text("{}")  # of a model, say
    with pytest.raises(tba.InputError, match=r"--output_dir .* not of a run"):
        tba.lock_folder(tba.settings(output_dir=str(tmp_path)))

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(tba.fcntl, "flock", no_locks)
    tba.lock_folder(config).close()


def test_a_folder_tells_what_was_given_what_it_meant_and_the_code_of_each_start(
    tmp_path, monkeypatch
):
    """What JSON lacks is null, and its default after a resume; and a commit without git."""
    out = tmp_path / "run"
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # as in a container
    monkeypatch.setattr(tba, "CODE", {"tba": b"# first", "plugin_mine": b"# mine"})
    given = tba.settings(output_dir=str(out), engine="transformers", a_plugins_limit=math.inf)
    config = tba.resolve(given)
    tba.claim_folder(given, config)
    commit = json.loads((out / "config.json").read_text())["git_commit"]
    assert re.fullmatch("[0-9a-f]{40}(-dirty)?", commit or "") or not (ROOT / ".git").exists()
    tba.CODE["tba"] = b"# second"
    monkeypatch.setattr(tba, "__file__", "/nowhere/tba.py")
    tba.claim_folder(given, config, 7)
    record = json.loads((out / "config.json").read_text(), parse_constant=pytest.fail)
    for name, settings in (("config", given), ("resolved", config)):
        assert record[name] == {**vars(settings), "a_plugins_limit": None}
    assert given.dtype == "auto" != config.dtype and "torch" in record["versions"]
    assert record["command"] == sys.argv and record["git_commit"] is None
    code = {str(path.relative_to(out)): path.read_text() for path in (out / "code").rglob("*.py")}
    assert code == {
        "code/0/tba.py": "# first", "code/0/plugin_mine.py": "# mine",
        "code/7/tba.py": "# second", "code/7/plugin_mine.py": "# mine",
    }  # fmt: skip
    resumed = tba.parse(["--resume", str(out)])
    assert resumed.steps == given.steps and not hasattr(resumed, "a_plugins_limit")


def outcome_of_run(
    monkeypatch, raised, saving=None, step=3, ranks=1, at_barrier=True, **settings
):  # fmt: skip
    """Exit code of `run`, and what it did and said, when training raises this, or ends."""
    done, said = [], []

    def do(name, error=None):
        done.append(name)
        if error:
            raise error

    trainer = SimpleNamespace(
        config=tba.settings(steps=9, **settings), step=step, signals={}, saving=Future(),
        folder=SimpleNamespace(
            say=said.append, path="", bar=SimpleNamespace(close=lambda: None)
        ),
        run=lambda: do("train", raised), at_barrier=lambda: at_barrier,
        ranks=SimpleNamespace(size=ranks, from_rank_zero=lambda call: do("end ranks")),
    )  # fmt: skip
    trainer.saving.set_result(0)
    monkeypatch.setattr(tba, "save", lambda trainer: do("save", saving))
    monkeypatch.setattr(tba, "finish", lambda trainer: do("finish"))
    monkeypatch.setattr(tba, "close", lambda trainer: do("close"))
    return tba.run(trainer), done, "\n".join(said)


def test_how_a_run_ends_decides_its_code_and_what_is_saved(monkeypatch):
    ways = [None, KeyboardInterrupt(15), KeyboardInterrupt(2), tba.RunEnded("x"), ValueError("y")]
    for raised, lockstep, lag, ranks, step, at_barrier in itertools.product(
        ways, (False, True), (0, 2), (1, 2), (0, 3), (False, True)
    ):
        if (lag and not lockstep) or (raised is None and lag and not at_barrier):
            continue
        code, done, said = outcome_of_run(
            monkeypatch, raised, lockstep=lockstep, lag=lag, ranks=ranks, step=step,
            at_barrier=at_barrier,
        )  # fmt: skip
        # in lockstep, groups of the batches to come would be missing; an error may have come
        # within a step
        whole = not isinstance(raised, ValueError) or (ranks == 1 and not lockstep)
        whole = whole and (at_barrier or not lag)
        expected = ["train"] + ["save"] * bool(step and whole)
        expected += ["finish"] * (raised is None) + ["end ranks"] * whole + ["close"]
        assert done == expected, (raised, lockstep, lag, ranks, step, at_barrier)
        signaled = isinstance(raised, KeyboardInterrupt)
        assert code == (0 if raised is None else 128 + raised.args[0] if signaled else 1)
        assert ("is not saved" in said) == bool(step and not whole)
        assert ("Traceback" in said) == isinstance(raised, ValueError)
    code, done, said = outcome_of_run(monkeypatch, None, saving=OSError("full"))
    assert code == 1 and done == ["train", "save", "close"] and "cannot be saved" in said
    for rate, warned in (("1e-4@0,0@8", True), ("1e-4@0,0@9", False), ("0", True)):
        _, _, said = outcome_of_run(monkeypatch, None, learning_rate=rate)
        assert ("--learning_rate ends at 0" in said) == warned
    assert "warning" not in outcome_of_run(monkeypatch, None, learning_rate="0", step=9)[2]


ENDS = [  # what `main` does -> exit code, and what is said
    (lambda: 0, 0, ""), (lambda: 143, 143, ""), (sys.exit, 0, ""), (lambda: sys.exit(2), 2, ""),
    (lambda: sys.exit("set JUDGE_KEY"), 1, "set JUDGE_KEY\n"),
    (lambda: 1 / 0, 1, "ZeroDivisionError"), (lambda: signal.raise_signal(signal.SIGINT), 130, ""),
]  # fmt: skip


@pytest.mark.parametrize("main, code, said", ENDS)
def test_the_exit_code_of_the_program(main, code, said, tmp_path, monkeypatch, capsys):
    """Its temporary folder is gone by then; a socket's path has at most 107 bytes."""
    sockets = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * (30 + code))))
    os.mkdir(tempfile.tempdir)
    monkeypatch.setattr(sys, "argv", ["tba.py", "--steps", "3"])
    monkeypatch.setattr(tba, "main", lambda argv: main() if argv == ["--steps", "3"] else 9)
    monkeypatch.setattr(tba, "fork_server", sockets.append)
    monkeypatch.setattr(os, "_exit", lambda status: sys.exit(f"exit {status}"))
    monkeypatch.setenv("RANK", "0")
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit, match=f"^exit {code}$"):
            tba.run_command_line()
    finally:
        signal.signal(signal.SIGINT, handler)
    err = capsys.readouterr().err
    assert said in err and (said or err == "")
    (socket,) = sockets
    assert len(os.fsencode(socket)) <= 107 and not os.path.exists(os.path.dirname(socket))


def test_a_plugin_is_executed_once_under_a_name_of_its_own(tmp_path, monkeypatch, capsys):
    """It may be called like a library; a Searcher executes the code that the Trainer read."""
    monkeypatch.setattr(tba, "executed", [], raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "wave.v2.py").write_text(
            f"import wave, tba\nassert wave.WAVE_FORMAT_PCM\ntba.executed.append({folder!r})\n"
        )
        (tmp_path / folder / "wave.py").write_text("")
    first, second = (str(tmp_path / folder / "wave.v2.py") for folder in "ab")
    monkeypatch.chdir(tmp_path)
    for path in (first, "a/wave.v2.py", second, first):
        tba.run_plugin(path)
    assert tba.executed == ["a", "b", "a"]
    assert tba.CODE["plugin_wave_v2"] == (tmp_path / "a" / "wave.v2.py").read_bytes()
    tba.run_plugin(second, {"plugin_wave_v2": b"import tba\ntba.executed.append('sent')"})
    assert tba.executed[-1] == "sent"
    tba.CODE["plugin_wave_v2"] = Path(second).read_bytes()
    Path(second).write_text("import tba\ntba.executed.append('edited')\n")
    with pytest.raises(SystemExit):  # rather than run the old one, in a notebook
        tba.run_plugin(second)
    assert (
        tba.executed[-1] == "sent" and f"--plugin {second}: has changed" in capsys.readouterr().err
    )
    assert "--plugin is one file" in refused(["--plugin", first, f"--plugin={second}"], capsys)
    del tba.CODE["plugin_wave_v2"], sys.modules["plugin_wave_v2"]


def test_threads_are_those_of_the_user_or_of_the_container(monkeypatch):
    """OMP_NUM_THREADS, or an equal part of the cores that cgroups leave to a container."""
    monkeypatch.setattr(tba.os, "sched_getaffinity", lambda process: range(64))
    read = tba.Path.read_text
    limits = {"max 100000\n": 64, "1200000 100000\n": 12, "50000 100000\n": 1, "": 64}
    for limit, cores in limits.items():
        said = lambda path, limit=limit: limit if "cpu.max" in str(path) else read(path)
        monkeypatch.setattr(tba.Path, "read_text", said)
        for given, expected in {"": cores // 4, "3": 3, "2,1": 2, "many": cores // 4}.items():
            monkeypatch.setenv("OMP_NUM_THREADS", given)
            assert tba.cpu_threads(tba.settings(num_searchers=3)) == max(1, expected)


def test_ctrl_c_during_imports_ends_the_program_in_silence(tmp_path):
    """The first one of a library takes long."""
    slow = "import pathlib, time\npathlib.Path(__file__).with_name('begun').touch()\ntime.sleep(60)"
    (tmp_path / "numpy.py").write_text(slow)
    process = subprocess.Popen(
        [sys.executable, ROOT / "tba.py"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # not as a background job
    )  # fmt: skip
    wait_until((tmp_path / "begun").exists, "the import")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", None) and process.returncode == 130


def test_profilers_and_debuggers_see_the_end(tmp_path):
    """Python's own exit lets a profiler write its file; pdb of Python 3.11 sets no `__spec__`."""
    profile = tmp_path / "profile"
    wrong = [ROOT / "tba.py", "--steps", "-1"]
    for options in (["cProfile", "-o", profile], ["pdb", "-c", "continue"]):
        command = [sys.executable, "-m", *options, *wrong]
        done = subprocess.run(command, input="q\n", capture_output=True, text=True)
        assert "argument --steps: -1: must be" in done.stderr and "Traceback" not in done.stderr
    assert profile.stat().st_size > 1000


def test_a_user_without_a_home_gets_one(tmp_path, monkeypatch):
    """But not another folder of models, if one is named."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("HF_HOME", raising=False)
    tba.set_home("/new")
    assert os.environ["HOME"] == str(tmp_path) and "HF_HOME" not in os.environ
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for given, expected in ((None, "/cache/huggingface"), ("/models", "/models")):
        if given:
            monkeypatch.setenv("HF_HOME", given)
        tba.set_home("/new")
        assert (os.environ["HOME"], os.environ["HF_HOME"]) == ("/new", expected)


MISTAKES = {  # test_odd_inputs.py has those of flags, data, policies and judges
    "replay_rule": "oldest", "eval_dataset": "missing.csv", "plugin": "missing.py",
    "resume": "/nowhere/run", "searched_per_prompt": 4, "max_response_tokens": 4000,
    "report_to": "wandb", "output_dir": "x" * 300,
}  # fmt: skip


def test_mistakes_are_told_in_one_line_and_leave_nothing(gsm8k, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    mistakes = MISTAKES if tba.vllm_can_run() else MISTAKES | {"engine": "vllm"}
    for name, value in mistakes.items():
        line = refused(arguments(gsm8k, out, **{name: value}), capsys)
        assert f"--{name}" in line and str(value) in line
        assert not out.exists()

    def no_key(*args, **kwargs):
        raise RuntimeError("No API key configured.")

    monkeypatch.setattr(tba.Accelerator, "init_trackers", no_key)
    line = refused(arguments(gsm8k, out, report_to="tensorboard"), capsys)
    assert "--report_to tensorboard: No API key" in line
    monkeypatch.setenv("LOCAL_RANK", "1")  # a machine's other ranks are silent
    with pytest.raises(SystemExit, match="2"):
        tba.exit_with_error("x")
    assert capsys.readouterr().err == ""


def test_a_mistake_ends_the_program_with_code_2(gsm8k, tmp_path):
    flags = arguments(gsm8k, tmp_path / "run", model="/nowhere/model")
    out, err = run_tba(flags, code=2, interpreter=True)
    assert out == "" and "--model /nowhere/model" in err and err.count("\n") == 1


def test_other_versions_of_python_are_refused():
    for version in ((3, 10, 9), (3, 14, 0)):
        code = f"import runpy, sys; sys.version_info = {version}; runpy.run_path({tba.__file__!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 2 and "Python 3.11 to 3.13" in done.stderr
        assert done.stderr.count("\n") == 1


def full(path, text):
    """Write to a full disk."""
    path.write_bytes(text[:1000].encode())
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_of_checkpoints_without_logs_holds_a_run(
    saved_run, gsm8k, tmp_path, capsys, monkeypatch
):
    out = saved_run(tmp_path / "run")
    assert "--output_dir" in refused(arguments(gsm8k, out), capsys)
    assert "--output_dir" in refused(["--resume", out, "--output_dir", tmp_path / "b"], capsys)
    record = (out / "config.json").read_text()
    given = tba.parse(["--resume", str(out)])
    with monkeypatch.context() as patch, pytest.raises(tba.InputError):
        patch.setattr(Path, "write_text", full)
        tba.claim_folder(given, tba.resolve(given), 0)
    assert (out / "config.json").read_text() == record
    for path in out.iterdir():  # a new run would delete its own checkpoints, and keep these
        if path.is_file():
            path.unlink()
    before = set(out.rglob("*"))
    assert "--output_dir" in refused(arguments(gsm8k, out), capsys)
    assert set(out.rglob("*")) == before


def test_help_has_every_flag_once_in_a_section(capsys, monkeypatch):
    """Also under `python -OO`, without docstrings."""

    @dataclasses.dataclass
    class Mine:
        mine: int = tba.flag(3, "A flag of a plug-in's class, 100% without a docstring.")
        text: str | None = tba.flag(None, "A text, or none.")
        either: Literal[1, 2] = tba.flag(1, "One of two numbers.")

    monkeypatch.setattr(tba, "FLAGS", [*tba.FLAGS, Mine])
    with pytest.raises(SystemExit) as ended:
        tba.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    sections = re.findall(r"^(\S.*):$", said, re.MULTILINE)
    assert len(sections) == len(set(sections)) and sections[-1] == "Mine"
    for kind in tba.FLAGS:
        for f in dataclasses.fields(kind):
            assert len(re.findall(rf"^  --{f.name}\b", said, re.MULTILINE)) == 1
            assert "_" not in f.name or f"--{f.name.replace('_', '-')}" not in said
            assert len(f.metadata["help"]) > 10
    parser = argparse.ArgumentParser()
    tba.add_flags(parser, Mine)
    given = parser.parse_args(["--text", "1@x", "--either", "2"], Mine())
    assert vars(given) == {"mine": 3, "text": "1@x", "either": 2}
    counts = [len(dataclasses.fields(kind)) for kind in tba.FLAGS[:-1]]
    assert len(dataclasses.fields(tba.Config)) <= 61 and sum(counts) <= 90
    monkeypatch.setattr(tba, "__doc__", None)
    with pytest.raises(SystemExit, match="0"):
        tba.main(["--help"])


def test_only_a_launchers_own_variables_are_removed(monkeypatch):
    """And a notebook's backend of matplotlib; no key of a plug-in whose name begins like them."""
    removed, kept = {"MASTER_ADDR", "TORCHELASTIC_RUN_ID"}, {"RANKER_API_KEY", "MASTER_KEY"}
    with monkeypatch.context() as patch:
        for name in removed | kept | {"MPLBACKEND"}:
            patch.setenv(name, "x")
        patch.setitem(sys.modules, "ipykernel", None)
        tba.prepare_process()
        assert kept | {"MPLBACKEND"} <= os.environ.keys() and removed.isdisjoint(os.environ)
        patch.delitem(sys.modules, "ipykernel")
        tba.prepare_process()
        assert kept <= os.environ.keys() and "MPLBACKEND" not in os.environ
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for is_searcher in (False, True):
        for name, value in torchrun.items():
            monkeypatch.setenv(name, value)
        tba.prepare_process(is_searcher)
        assert (torchrun.items() <= os.environ.items()) != is_searcher
        assert torchrun.keys().isdisjoint(os.environ) == is_searcher


VARIABLES = {  # of launchers that did not start this process, schedulers and `accelerate config`
    "RANK": "3", "WORLD_SIZE": "many", "LOCAL_RANK": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "2", "PMI_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1",
    "OMP_NUM_THREADS": "many", "ACCELERATE_MIXED_PRECISION": "fp16",
    "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_MEGATRON_LM": "true", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8", "ACCELERATE_TORCH_DEVICE": "meta",
}  # fmt: skip
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
ALONE |= {"MASTER_PORT": "1"}


@pytest.mark.slow
def test_a_launchers_or_schedulers_variables_change_nothing_or_are_refused(gsm8k, tmp_path):
    """What a user's own `accelerate config` says of other programs changes no number here."""
    found = []
    for i, environment in enumerate([{}, VARIABLES, ALONE]):
        out = tmp_path / f"{i}"
        flags = arguments(gsm8k, out, lockstep=True, steps=2, eval_every=0, eval_samples=8)
        run_tba(flags, environment=environment)
        rows = tba.read_lines(out / "metrics.jsonl")
        found.append([(row["loss"], row["grad_norm"]) for row in rows])
    assert found[0] == found[1] == found[2] and len(found[0]) == 2
    _, err = run_tba(flags, code=2, environment=ALONE | {"RANK": "x", "WORLD_SIZE": "2"})
    assert "WORLD_SIZE" in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.root
def test_the_first_command_of_a_user_without_name_and_home():
    if os.getuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can become another user, with setpriv")
    user = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    # root's own Python may be unreadable to others
    user += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    if subprocess.run([*user, sys.executable, "-c", ""], capture_output=True).returncode:
        pytest.skip("another user cannot run this Python")
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 12345, 12345)
        given = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        given["HF_HOME"] = "/proc"  # it is read-only
        command = [*user, "bash", str(ROOT / "run_gsm8k.sh"), "--tiny", "--steps", "1"]
        command += "--eval_samples 8 --output_dir run --engine transformers".split()
        ended = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True)
        said = ended.stderr
        assert ended.returncode == 0 and "Traceback" not in said, said
        assert "warning" not in said.lower(), said
        assert (Path(folder) / "run" / "final" / "config.json").exists()
        left = [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]
        assert left == ["run"]
