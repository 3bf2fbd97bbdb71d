"""The command line: mistakes end in one line that names the flag, with exit code 2."""

import contextlib
import dataclasses
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from harness import PATIENCE, ROOT, Run, arguments, config_and_task, judges_of, run_tba
from hub import Hub
from safetensors.torch import load_file, save_file

import tba


def refused(args, capsys):
    """The one line that this process says of a command line, which it refuses."""
    with pytest.raises(SystemExit) as ended:
        tba.main([str(arg) for arg in args])
    assert ended.value.code == 2
    lines = [line for line in capsys.readouterr().err.split("\n") if "error:" in line]
    assert len(lines) == 1
    return lines[0]


MISTAKES = [
    {"task": "chess"}, {"objective": "ppo"}, {"engine": "llamacpp"}, {"replay_rule": "oldest"},
    {"model": "/nowhere/model"}, {"dataset": "/nowhere/data"}, {"dataset": "missing.jsonl"},
    {"eval_dataset": "missing.csv"}, {"plugin": "missing.py"}, {"resume": "/nowhere/run"},
    {"steps": -1}, {"prompts_per_step": 0}, {"trained_per_prompt": 1}, {"learning_rate": -1},
    {"recent_probability": 1.5}, {"temperature": "nan"}, {"seed": 2**32}, {"beta": "0"},
    {"beta": "1@5"}, {"beta": "1@0,x@3"}, {"tau": "-1"}, {"dtype": "float16"}, {"steps": "many"},
    {"searched_per_prompt": 4}, {"kept_per_prompt": 4}, {"lag": 2}, {"max_response_tokens": 4000},
    {"adam_beta2": 1}, {"max_recent_draws": -1}, {"report_to": "wandb"},
    {"lockstep": True, "lag": 1, "recent_probability": 0.5, "reset_reference_every": 50},
    {"learning_rate": "1e-4@0,1e-5~x"}, {"victim_top_p": 2}, {"output_dir": "x" * 300},
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: "-".join(map(str, mistake)))
def test_mistakes_are_told_in_one_line_and_leave_nothing(mistake, gsm8k, tmp_path, capsys):
    out = tmp_path / "run"
    line = refused(arguments(gsm8k, out, **mistake), capsys)
    name, value = list(mistake.items())[-1]
    assert f"--{name}" in line and str(value).split("@")[0] in line
    assert not out.exists()


def test_a_tracker_that_cannot_start_is_told_in_one_line(gsm8k, tmp_path, capsys, monkeypatch):
    def no_key(*args, **kwargs):
        raise RuntimeError("No API key configured.")

    monkeypatch.setattr(tba.Accelerator, "init_trackers", no_key)
    line = refused(arguments(gsm8k, tmp_path / "run", report_to="tensorboard"), capsys)
    assert "--report_to tensorboard: No API key" in line


def test_a_mistake_ends_the_program_with_code_2(gsm8k, tmp_path):
    flags = arguments(gsm8k, tmp_path / "run", model="/nowhere/model")
    out, err = run_tba(flags, code=2, interpreter=True)
    assert out == "" and "--model /nowhere/model" in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_plugin_may_end_the_program_with_a_message(gsm8k, tmp_path):
    plugin = tmp_path / "keyless.py"
    plugin.write_text("import sys\nsys.exit('set JUDGE_KEY')")
    _, err = run_tba(arguments(gsm8k, tmp_path / "run", plugin=plugin), code=1, interpreter=True)
    assert err == "set JUDGE_KEY\n"


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 14, 0)])
def test_other_versions_of_python_are_refused(version):
    code = f"import runpy, sys; sys.version_info = {version}; runpy.run_path({tba.__file__!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "Python 3.11 to 3.13" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_tmpdir_whose_path_is_too_long_for_a_socket(gsm8k, tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    run_tba(arguments(gsm8k, tmp_path / "run", steps=1, eval_every=0, eval_samples=8))


def test_a_flag_that_is_misspelt_and_data_that_do_not_fit(gsm8k, tldr, redteam, tmp_path, capsys):
    out = tmp_path / "run"
    assert "--stpes" in refused([*arguments(gsm8k, out), "--stpes", "3"], capsys)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"question": "1+1?", "solution": "2"}) + "\n")
    line = refused(arguments(gsm8k, out, dataset=data), capsys)
    assert "answer" in line and str(data) in line
    data.write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    assert "--dataset" in refused(arguments(gsm8k, out, dataset=data), capsys)
    empty = judges_of(redteam) | {"attacker_prompt": ""}
    assert "--attacker_prompt" in refused(arguments(redteam, out, **empty), capsys)
    low = judges_of(redteam) | {"explore_low": 3}
    assert "--explore_low 3" in refused(arguments(redteam, out, **low), capsys)
    short = judges_of(redteam) | {"min_attack_tokens": 33}
    assert "--min_attack_tokens 33" in refused(arguments(redteam, out, **short), capsys)
    judges = {"task": "tldr", "reward_model": tldr / "model", "gold_reward_model": tldr / "gold"}
    assert "--reward_model" in refused(arguments(tldr, out, **judges), capsys)
    if not tba.vllm_can_run():
        assert "--engine vllm" in refused(arguments(gsm8k, out, engine="vllm"), capsys)
    assert not out.exists()


def test_a_folder_that_holds_a_run(gsm8k, tmp_path, capsys):
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, steps=10_000, eval_every=0, eval_samples=8, save_every=1))
    run.until(lambda: list(out.glob("checkpoint-*")), "a checkpoint")
    run.process.kill()
    run.process.wait()
    run.gone()
    assert "--output_dir" in refused(arguments(gsm8k, out), capsys)
    assert "--steps" in refused(["--resume", out, "--steps", 0], capsys)
    assert "--lockstep" in refused(["--resume", out, "--lockstep"], capsys)
    # stored groups were sampled and scored with these: a reference, a temperature, S responses
    other = {"--model": changed(gsm8k / "model", tmp_path / "other"), "--temperature": 0.5}
    other |= {"--searched_per_prompt": 16, "--lora_rank": 2, "--reset_reference_every": 2}
    for name, value in other.items():
        assert f"{name} {value}" in refused(["--resume", out, name, value], capsys)
    flags = ["--resume", out, "--dataset", gsm8k / "data" / "test.jsonl"]
    assert "--dataset" in refused(flags, capsys)
    plugin = tmp_path / "same.py"
    plugin.write_text("import tba\n\ntba.TASKS['same'] = type('Same', (tba.GSM8K,), {})\n")
    assert "--task same" in refused(["--resume", out, "--plugin", plugin, "--task", "same"], capsys)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
    assert f"--sft_data {pairs}" in refused(["--resume", out, "--sft_data", pairs], capsys)
    assert "--output_dir" in refused(["--resume", out, "--output_dir", tmp_path / "b"], capsys)
    record = (out / "config.json").read_text()
    given = tba.parse(["--resume", str(out)])
    with limited_file_size(1000), pytest.raises(tba.InputError):  # as on a full disk
        tba.claim_folder(given, tba.resolve(given), 0)
    assert (out / "config.json").read_text() == record


@contextlib.contextmanager
def limited_file_size(size):
    """Make writes of larger files fail in this process, with an error instead of a signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_folder_of_checkpoints_without_logs_holds_a_run(saved_run, gsm8k, tmp_path, capsys):
    """A new run would delete its own, which have lower steps, and keep those."""
    out = saved_run(tmp_path / "run")
    for path in out.iterdir():
        if path.is_file():
            path.unlink()
    before = set(out.rglob("*"))
    assert "--output_dir" in refused(arguments(gsm8k, out), capsys)
    assert set(out.rglob("*")) == before


@pytest.mark.parametrize("resume", (["--resume", ""], ["--resume="], ["--resume"]))
def test_a_run_to_resume_must_be_named(gsm8k, tmp_path, capsys, resume):
    """An unset variable of a shell does not start a run without the flags before it."""
    flags = arguments(gsm8k, tmp_path / "run")
    assert "--resume" in refused([*flags, *resume], capsys)


def test_an_attention_window_skips_no_prompt(gsm8k, tmp_path, capsys):
    window = {"model_type": "mistral", "sliding_window": 32}
    model = changed(gsm8k / "model", tmp_path / "model", **window)
    _, windowed = config_and_task(gsm8k, tmp_path / "run", model=model)
    assert capsys.readouterr().err.count("one response per row") == 1
    _, whole = config_and_task(gsm8k, tmp_path / "run")
    assert (
        len(windowed.train_prompts) == len(whole.train_prompts)
        and whole.packs
        and not windowed.packs
    )


def test_a_decoder_may_have_an_encoders_fields_as_older_libraries_wrote_them(gsm8k, tmp_path):
    fields = {"is_decoder": False, "add_cross_attention": False}
    model = changed(gsm8k / "model", tmp_path / "model", **fields)
    _, task = config_and_task(gsm8k, tmp_path / "run", model=model)
    assert task.packs


def test_flags_before_resume_are_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(tba, "executed", [], raising=False)
    for name in ("own", "other"):
        (tmp_path / f"{name}.py").write_text(f"import tba\n\ntba.executed.append({name!r})\n")
    saved = {"plugin": str(tmp_path / "own.py"), "steps": 3}
    (tmp_path / "config.json").write_text(json.dumps({"config": saved}))
    other = ["--steps", "9", "--plugin", str(tmp_path / "other.py")]
    config = tba.parse([*other, "--resume", str(tmp_path)])
    assert (config.steps, config.plugin, tba.executed) == (3, saved["plugin"], ["own"])
    config = tba.parse(["--resume", str(tmp_path), *other])
    assert (config.steps, config.plugin) == (9, other[-1])


def test_a_flag_of_ones_own_may_begin_like_resume(tmp_path, monkeypatch):
    own = dataclasses.make_dataclass("Own", [("resume_late", bool, tba.flag(False, "own"))])
    monkeypatch.setattr(tba, "FLAGS", [*tba.FLAGS, own])
    (tmp_path / "config.json").write_text(json.dumps({"config": {"steps": 3}}))
    before = ["--resume_late", "True", "--steps", "9"]
    for resume in ([f"--resume={tmp_path}"], ["--resume", str(tmp_path)]):
        config = tba.parse([*before, *resume])
        assert (config.steps, config.resume_late) == (3, False)


def test_two_runs_of_the_same_second_get_two_folders(monkeypatch):
    """In containers they may have the same process ID, too."""
    monkeypatch.setattr(tba.time, "strftime", lambda text: text)
    assert tba.parse([]).output_dir != tba.parse([]).output_dir


def test_a_plugins_flag_that_begins_with_resume_is_another_flag(tmp_path, monkeypatch):
    monkeypatch.setattr(tba, "FLAGS", [*tba.FLAGS])
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from dataclasses import dataclass\nimport tba\n@dataclass\nclass Mine:\n"
        "    resume_often: int | None = tba.flag(0, 'A flag of a plug-in.')\n"
        "assert Mine.__annotations__['resume_often'] == int | None\n"
        "tba.FLAGS.append(Mine)\n"
    )
    saved = {"plugin": str(plugin), "steps": 3, "resume_often": 1}
    (tmp_path / "config.json").write_text(json.dumps({"config": saved}))
    config = tba.parse(["--resume_often", "2", "--steps", "9", "--resume", str(tmp_path)])
    assert (config.steps, config.resume_often) == (3, 1)
    config = tba.parse(["--resume", str(tmp_path), "--resume_often", "2"])
    assert (config.steps, config.resume_often) == (3, 2)


def test_commands_that_are_shown_can_be_pasted(gsm8k, tmp_path, capsys):
    out = tmp_path / "a run"
    out.mkdir()
    (out / "metrics.jsonl").write_text("")
    assert f"--resume {shlex.quote(str(out))}" in refused(arguments(gsm8k, out), capsys)


def test_help_has_every_flag_once_in_a_section(capsys, monkeypatch):
    @dataclasses.dataclass
    class Mine:
        mine: int = tba.flag(3, "A flag of a plug-in's class without a docstring.")

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
    counts = {kind.__name__: len(dataclasses.fields(kind)) for kind in tba.FLAGS[:-1]}
    assert counts["Config"] <= 61 and sum(counts.values()) <= 90


def test_help_without_docstrings(capsys, monkeypatch):
    """As under `python -OO`."""
    monkeypatch.setattr(tba, "__doc__", None)
    with pytest.raises(SystemExit) as ended:
        tba.main(["--help"])
    assert ended.value.code == 0 and "--steps" in capsys.readouterr().out


def test_only_a_launchers_own_variables_are_removed(monkeypatch):
    """Not a key of a plug-in whose name begins like one of them."""
    with monkeypatch.context() as patch:
        for name in ("RANKER_API_KEY", "MASTER_KEY", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
            patch.setenv(name, "x")
        tba.prepare_process()
        assert {"RANKER_API_KEY", "MASTER_KEY"} <= os.environ.keys()
        assert {"MASTER_ADDR", "TORCHELASTIC_RUN_ID"}.isdisjoint(os.environ)


@pytest.mark.parametrize("name", ["run_gsm8k.sh", "run_redteam.sh", "run_tldr.sh"])
def test_the_scripts_run_whatever_CDPATH_is(name):
    """With it, `cd` prints where it went."""
    done = subprocess.run(
        ["bash", f"{ROOT.name}/{name}", "--tiny"],
        cwd=ROOT.parent,
        env=os.environ | {"CDPATH": str(ROOT.parent), "PYTHON": "echo"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(f"{ROOT}/tba.py --task") and done.stdout.count("\n") == 1


ENVIRONMENTS = """
import json, os, sys
from pathlib import Path
import accelerate.tracking, datasets, torch, transformers.models.llama.modeling_llama

def look(environment):
    "How a process in this environment trains."
    os.environ.update(environment)
    import tba
    from harness import learner_of, random_groups
    tba.Ranks.JOIN_TIMEOUT = tba.timedelta(seconds=1)
    tba.prepare_process()
    ranks = tba.Ranks.connect()
    learner = learner_of(Path(sys.argv[1]), Path("run"), dtype="bfloat16")
    groups = random_groups(learner.task, 2, 4)
    metrics = learner.step(groups, tba.at_step(learner.config, 0), 0)
    assert tba.make_accelerator(learner.config, 0).num_processes == ranks.size
    return [ranks.size, tba.local_ranks(), tba.cpu_threads(learner.config), metrics["grad_norm"]]

for environment in json.load(sys.stdin):
    if (child := os.fork()) == 0:
        try:
            print(json.dumps(look(environment)), flush=True)
        except SystemExit as error:
            print(json.dumps(error.code), flush=True)
        except BaseException as error:
            print(json.dumps(repr(error)), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""

OTHERS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
WORKING = [
    {}, {"WORLD_SIZE": "4"}, {"RANK": "3", "WORLD_SIZE": "many"}, {"LOCAL_RANK": "1"},
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **OTHERS},
    {
        "SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "2", "PMI_SIZE": "4",
        "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "CUDA_VISIBLE_DEVICES": "",
    },
    {"OMP_NUM_THREADS": "many", "ACCELERATE_MIXED_PRECISION": "fp16"},
    {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_USE_MEGATRON_LM": "true", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8", "ACCELERATE_TORCH_DEVICE": "meta",
    },
]  # fmt: skip
REFUSED = [
    {"RANK": "x", "WORLD_SIZE": "2", **OTHERS},
    {"RANK": "0", "WORLD_SIZE": "2", **OTHERS | {"MASTER_PORT": "0"}},  # the other never comes
]


def test_a_launchers_or_schedulers_variables_change_nothing_or_are_refused(gsm8k, tmp_path):
    """What a user's own `accelerate config` says of other programs changes no number here."""
    command = [sys.executable, "-c", ENVIRONMENTS, str(gsm8k)]
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    cases = json.dumps(WORKING + REFUSED)
    done = subprocess.run(
        command, input=cases, env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for case, result in zip(WORKING, found, strict=False):
        assert result == found[0], case
    assert found[0][:2] == [1, 1] and found[0][-1] > 0
    assert found[len(WORKING) :] == [2] * len(REFUSED), done.stderr
    lines = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(lines) == len(REFUSED) and all("WORLD_SIZE" in line for line in lines)


def without_second_layer(tensors):
    return {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}


def as_torch_compile_names_them(tensors):
    return {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}


def changed(model, out, weights=lambda tensors: tensors, **settings):
    """A copy of a model's folder: `weights` maps its tensors, `settings` change its config.json."""
    shutil.copytree(model, out)
    tensors = weights(load_file(out / "model.safetensors"))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | settings))
    return out


@pytest.mark.parametrize(
    "change",
    [
        {"weights": without_second_layer},
        {"weights": as_torch_compile_names_them},
        {"num_hidden_layers": 1},
        {"vocab_size": 500},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ],
)
def test_a_policy_is_whole_or_refused(change, gsm8k, tmp_path, capsys):
    out = tmp_path / "run"
    model = changed(gsm8k / "model", tmp_path / "model", **change)
    assert f"--model {model}" in refused(arguments(gsm8k, out, model=model), capsys)
    assert not out.exists()


def test_judges_and_victims_are_whole_or_refused(tldr, redteam, tmp_path, capsys):
    out = tmp_path / "run"
    for files in (tldr, redteam):
        judges = judges_of(files)
        for name in [name for name in judges if name.endswith("_model")]:
            folder = changed(judges[name], tmp_path / name, without_second_layer)
            line = refused(arguments(files, out, **(judges | {name: folder})), capsys)
            assert f"--{name} {folder}" in line
    assert not out.exists()


def test_models_of_another_kind_are_refused(gsm8k, tldr, redteam, tmp_path, capsys):
    """A policy as a reward model, the reverse, an adapter beside its base, a guard's verdict."""
    out = tmp_path / "run"
    policy = changed(tldr / "model", tmp_path / "policy", id2label={0: "score"})
    judges = judges_of(tldr) | {"reward_model": policy}
    assert f"--reward_model {policy}" in refused(arguments(tldr, out, **judges), capsys)
    assert "--model" in refused(arguments(tldr, out, model=tldr / "reward"), capsys)
    adapter = changed(gsm8k / "model", tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text("{}")
    assert "adapter" in refused(arguments(gsm8k, out, model=adapter), capsys)
    guard = judges_of(redteam) | {"toxicity_model": redteam / "victim", "toxicity_label": None}
    assert "--toxicity_label" in refused(arguments(redteam, out, **guard), capsys)
    # labels that do not exclude each other are not read by a softmax
    independent = {"problem_type": "multi_label_classification"}
    toxicity = changed(redteam / "toxicity", tmp_path / "toxicity", **independent)
    judges = judges_of(redteam) | {"toxicity_model": toxicity}
    assert f"--toxicity_model {toxicity}" in refused(arguments(redteam, out, **judges), capsys)
    judges = judges_of(redteam) | {"victim_max_tokens": 250}  # of a context of 256
    assert "--victim_max_tokens 250" in refused(arguments(redteam, out, **judges), capsys)
    assert not out.exists()


USER_ID = 12345  # it has no name


@pytest.fixture
def container_user():
    """Function: run a command as a user without a name, in a folder of its own, where it may."""
    if os.getuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can become another user, with setpriv")
    as_user = ["setpriv", f"--reuid={USER_ID}", f"--regid={USER_ID}", "--clear-groups"]
    # root's own Python may be unreadable to others
    reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    for prefix in ([*as_user, *reading], as_user):
        probe = subprocess.run([*prefix, sys.executable, "-c", ""], capture_output=True)
        if probe.returncode == 0:
            break
    else:
        pytest.skip("another user cannot run this Python")
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, USER_ID, USER_ID)

        def run(*command: object, **environment: object) -> subprocess.CompletedProcess:
            given = {"PYTHON": sys.executable, "OMP_NUM_THREADS": 1, "TMPDIR": folder} | environment
            variables = [f"{name}={value}" for name, value in given.items()]
            parts = [*prefix, "env", "-i", *variables, *map(str, command)]
            return subprocess.run(
                parts, cwd=folder, capture_output=True, text=True, timeout=PATIENCE
            )

        run.folder = Path(folder)
        yield run


@pytest.mark.root
def test_the_first_command_of_a_user_without_name_and_home(container_user):
    flags = ["--steps", 1, "--eval_samples", 8, "--output_dir", "run"]
    script = ROOT / "run_gsm8k.sh"
    ended = container_user("bash", script, "--tiny", *flags, HF_HOME="/proc")  # it is read-only
    assert ended.returncode == 0, ended.stderr
    assert (container_user.folder / "run" / "final" / "config.json").exists()
    assert "Traceback" not in ended.stderr and "warning" not in ended.stderr.lower()
    left = {path.name for path in container_user.folder.iterdir()}
    left = {name for name in left if not name.startswith("torchinductor_")}
    assert left == {"run"}


def test_a_library_explains_an_http_error_better_than_the_error():
    def load(name):
        try:
            raise ConnectionError("401 Client Error. (Request ID: 7)")
        except ConnectionError as error:
            raise OSError(f"{name} is not a local folder\nand not a hub name") from error

    with pytest.raises(tba.InputError, match="gtp2: gtp2 is not a local folder and not"):
        tba.load_flag("dataset", tba.settings(dataset="gtp2"), load)


@pytest.mark.root
def test_a_hub_name_needs_a_folder_that_can_be_written(gsm8k, container_user):
    hub = Hub()
    hub.add("some/model", gsm8k / "model")
    flags = ["--model", "some/model", "--dataset", gsm8k / "data"]
    command = [sys.executable, ROOT / "tba.py", *flags]
    ended = container_user(*command, HOME="/", HF_ENDPOINT=hub.url)
    hub.close()
    assert ended.returncode == 2
    assert "--model some/model: " in ended.stderr and "/.cache" in ended.stderr, ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


def test_a_path_that_does_not_exist(gsm8k, tmp_path, capsys):
    for model in (tmp_path / "moved" / "model", "./moved", "~/moved"):
        line = refused(arguments(gsm8k, tmp_path / "run", model=model), capsys)
        assert f"--model {os.path.expanduser(model)}" in line and "does not exist" in line
