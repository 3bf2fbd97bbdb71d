"""Prove the GPU path on this machine: every check with a time limit of its own, offline.

    python bench/gpu_check.py                 # all checks, under half an hour on one GPU
    python bench/gpu_check.py --only nccl     # one of them; --list names them
    python bench/gpu_check.py --tiny          # tiny shapes: what a CPU can show of it, minutes

A check passes with its figures, fails with its error, or says what it needs (two GPUs, vLLM). One
that fails does not keep the others from running. Models have random weights and are made here.
Results go to bench/results/gpu_check.json; the exit code is 1 if a check failed.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import tiny
import torch
import torch.multiprocessing as mp
import transformers

import tba

CUDA = torch.cuda.is_available()
FILES = Path(os.environ.get("TBA_CACHE", ROOT / ".cache"))
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # bfloat16 operations/s, without sparsity


class Needs(Exception):
    """What this machine lacks for a check."""


def need_vllm() -> None:
    if not tba.vllm_can_run():
        raise Needs("vLLM with a device to run on")


def timed(work, repeats: int = 5) -> float:
    """Median seconds of a call, the device waited for."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if CUDA:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:]))


# ---------------------------------------------------------------------------------------- models

FAMILIES = {
    "llama": (transformers.LlamaConfig, {"num_key_value_heads": 4}),
    "gpt2": (transformers.GPT2Config, {}),
    "gpt_neox": (transformers.GPTNeoXConfig, {}),
    "qwen2": (transformers.Qwen2Config, {"num_key_value_heads": 4}),
}


def make_model(family: str, folder: Path, small: bool, logits: float = 0.0) -> Path:
    """A model with random weights and the tiny GSM8K's tokenizer; `logits`: their largest size.

    Large: 22 layers of width 2,048 (rho-1b's shape) for Llama, 12 of 1,024 for the others.
    """
    tiny.make("gsm8k", FILES / "tiny-gsm8k")
    tokenizer = transformers.AutoTokenizer.from_pretrained(FILES / "tiny-gsm8k" / "model")
    kind, more = FAMILIES[family]
    width, layers = (128, 2) if small else (2048, 22) if family == "llama" else (1024, 12)
    heads = max(4, width // 64)
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    if family != "gpt2":
        more = more | {"intermediate_size": 2 * width if small else 11 * width // 4}
    config = kind(
        **shape, **more, vocab_size=len(tokenizer) if small else 32_000,
        max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id, tie_word_embeddings=family == "gpt2",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if logits:  # scale the head until the largest logit has the wanted size
        ids = torch.randint(5, len(tokenizer), (4, 48))
        with torch.no_grad():
            largest = model(ids).logits.abs().max()
            model.get_output_embeddings().weight.mul_(logits / largest)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_of(model: Path, out: Path, **flags) -> tba.Config:
    """A resolved configuration of the tiny GSM8K's prompts with this model."""
    data = FILES / "tiny-gsm8k" / "data"
    config = tba.Config(model=str(model), dataset=str(data), output_dir=str(out), **flags)
    tba.resolve(config)
    return config


# ---------------------------------------------------------------------------------------- checks


def check_versions(args, folder: Path) -> dict:
    """Versions, the device, and bandwidths in GB/s."""
    installed = {"torch": torch.__version__, "transformers": transformers.__version__}
    found = {**installed, "cuda": torch.version.cuda, "device": "CPU"}
    size = 2**22 if args.tiny else 2**30
    host, device = torch.empty(size, dtype=torch.uint8), tba.own_device()
    there = torch.empty(size, dtype=torch.uint8, device=device)
    if CUDA:
        query = "--query-gpu=driver_version", "--format=csv,noheader"
        properties = torch.cuda.get_device_properties(0)
        found["device"] = f"{torch.cuda.device_count()} x {properties.name}"
        found["GiB"] = properties.total_memory / 2**30
        found["driver"] = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, check=False
        ).stdout.split("\n")[0]
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        pinned = host.pin_memory()
        found["pinned to device"] = size / timed(lambda: there.copy_(pinned)) / 1e9
    found["pageable to device"] = size / timed(lambda: there.copy_(host)) / 1e9
    found["device to device"] = size / timed(there.clone) / 1e9
    return found


WEIGHTS = 2**22  # numbers in the one tensor that weight groups are tried with


def group_member(shared, name: str, device: torch.device, fate: str) -> None:
    """The Searcher's end of a weight group: dies or stops at its time, or says what it got."""
    if fate == "killed before":
        os.kill(os.getpid(), signal.SIGKILL)
    config = tba.Config(dtype="float32", transfer_timeout=60.0)
    staging = tba.FlatWeights({"weight": torch.Size([WEIGHTS])}, torch.float32, device)
    group = tba.WeightGroup(config, shared, name, rank=1, size=2, device=device)
    group.form()
    if fate != "lives":
        os.kill(os.getpid(), signal.SIGKILL if fate == "killed in" else signal.SIGSTOP)
    group.wait(group.broadcast(staging.buckets))
    shared["got"] = float(staging.views["weight"].sum())


def check_nccl(args, folder: Path) -> dict:
    """A member lost before and in a transfer: the Trainer's end gives up in time and goes on."""
    if CUDA and torch.cuda.device_count() < 2:
        raise Needs("2 GPUs")
    device, limit, figures = tba.own_device(), 4.0, {"backend": "NCCL" if CUDA else "Gloo"}
    there = torch.device("cuda:1") if CUDA else device
    snapshot = tba.FlatWeights({"weight": torch.Size([WEIGHTS])}, torch.float32, device)
    snapshot.copy_from([("weight", torch.ones(WEIGHTS, device=device))])
    patient, short = (tba.Config(dtype="float32", transfer_timeout=t) for t in (60.0, limit))
    with mp.Manager() as manager:
        shared = manager.dict()
        for i, fate in enumerate(("lives", "killed before", "killed in", "stopped in", "lives")):
            name = f"group-{i}"
            member = mp.get_context("spawn").Process(
                target=group_member, args=(shared, name, there, fate)
            )
            member.start()
            # a member that comes needs time for its imports
            config = short if fate == "killed before" else patient
            group = tba.WeightGroup(config, shared, name, rank=0, size=2, device=device)
            start = time.perf_counter()
            error = ""
            try:
                group.form()
                group.config = short
                start = time.perf_counter()
                for _ in range(1 if fate == "lives" else 50):  # the first may fit into buffers
                    group.wait(group.broadcast(snapshot.buckets))
            except tba.TransferError as lost:
                error = str(lost)
            seconds = figures[f"{i + 1}. the member {fate}, s"] = time.perf_counter() - start
            if fate == "lives":
                member.join(60)
                assert not error, error
                assert shared.pop("got") == WEIGHTS, "the member has other weights"
            else:
                assert error, f"{fate}: the Trainer noticed nothing"
                assert seconds < limit + 20, f"{fate}: noticed after {seconds:.1f} s"
                group.abort()
                member.kill()
            assert float(torch.ones(8, device=device).sum()) == 8, "the CUDA context is lost"
    return figures


def check_vllm(args, folder: Path) -> dict:
    """vLLM: load time, and 50 reloads of weights under running requests for each --on_sync."""
    need_vllm()
    model, figures = make_model("llama", folder / "model", args.tiny), {}
    before = torch.cuda.mem_get_info()[0] if CUDA else 0
    flags = {"engine": "vllm", "max_response_tokens": 64, "sequences_in_flight": 64}
    config = config_of(model, folder / "run", **flags)
    problem = tba.load_problem(config)
    memory = tba.memory_plan(config, problem, tba.gpu_gib(), shared=True)
    problem.kv_cache_bytes = tba.kv_cache_bytes(config, memory)
    start = time.perf_counter()
    engine = tba.VLLMEngine(config, problem, tba.own_device(), seed=1)
    figures["load, s"] = time.perf_counter() - start
    if CUDA:
        used = figures["GiB"] = (before - torch.cuda.mem_get_info()[0]) / 2**30
        longest = max(map(len, problem.prompts + problem.held_out))
        cache = engine.kv_cache_size(config, problem, longest)
        planned = memory.searcher["policy"] + memory.searcher["CUDA"] + cache / 2**30
        figures["GiB planned"] = planned
        assert used < 1.03 * planned + 1, "it takes more memory than planned"
    device_model = tba.load_model(config, torch.float32, tba.own_device())
    state, probes = tba.checkpoint_state(device_model), problem.probes()
    for on_sync in ("keep", "recompute", "drain"):
        engine.config.on_sync, ended, seconds = on_sync, 0, []
        for i in range(64):
            engine.submit(tba.Request(i, problem.prompts[i], 4))
        for i in range(4 if args.tiny else 50):
            while on_sync == "drain" and engine.unfinished:
                ended += len(engine.step())
            for _ in range(2):
                ended += len(engine.step()) if engine.unfinished else 0
            start = time.perf_counter()
            engine.load_weights((n, t * (1 + 1e-3 * i)) for n, t in state.items())
            seconds.append(time.perf_counter() - start)
        engine.load_weights(iter(state.items()))
        while engine.unfinished:
            ended += len(engine.step())
        assert ended == 64, f"{on_sync}: {ended} of 64 requests ended"
        figures[f"reload ({on_sync}), s"] = float(np.median(seconds))
        gap = gap_between(engine.prompt_logprobs(probes), device_model, probes, config)
        figures[f"logprob_gap after it ({on_sync})"] = gap
        assert gap < config.logprob_tolerance, f"{on_sync}: log-probabilities are off by {gap:.3g}"
    return figures


def gap_between(scored: list, model, probes: list, config: tba.Config) -> float:
    """The largest difference of an engine's log-probabilities from the Trainer's."""
    expected = tba.score_probes(tba.TokenLogProbs(model, 1.0), probes, config)
    return float(max(np.abs(a - b).max() for a, b in zip(scored, expected, strict=True)))


def check_gap(args, folder: Path) -> dict:
    """logprob_gap in bfloat16 with logits of 70-100, for each family of models."""
    figures, engine_name = {}, "vllm" if tba.vllm_can_run() else "transformers"
    for family in FAMILIES:
        model = make_model(family, folder / family, args.tiny, logits=85.0)
        flags = {"engine": engine_name, "dtype": "bfloat16", "max_response_tokens": 16}
        config = config_of(model, folder / "run", kv_cache_gib=2.0, **flags)
        problem, device = tba.load_problem(config), tba.own_device()
        engine = tba.ENGINES[engine_name](config, problem, device, 1)
        scored = engine.prompt_logprobs(problem.probes())
        master = tba.load_model(config, torch.float32, device)
        gap = gap_between(scored, master, problem.probes(), config)
        figures[f"{family} ({engine_name})"] = gap
        assert gap < 1, f"{family}: {gap:.3g}; hidden states in bfloat16 alone gave up to 0.52"
        if engine_name == "vllm":
            engine.llm.llm_engine.engine_core.shutdown()
        del engine, master
        torch.cuda.empty_cache()
    return figures


def run_script(args, folder: Path, task: str) -> dict:
    """A script's tiny run, which must learn; returns its last evaluation and speeds."""
    steps = ["--steps", "4", "--eval_samples", "8"] if args.tiny else []
    command = ["bash", str(ROOT / f"run_{task}.sh"), "--tiny", "--output_dir", str(folder / task)]
    environment = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run(
        [*command, *steps], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr[-3000:]
    read = lambda name: (folder / task / name).read_text().splitlines()
    first, last = (json.loads(read("eval.jsonl")[i]) for i in (0, -1))
    rows = [json.loads(line) for line in read("metrics.jsonl")]
    name = list(last)[4]
    figures = {f"{name} before": first[name], f"{name} after": last[name]}
    for key in ("trainer_busy", "searcher_busy", "sync_seconds", "logprob_gap"):
        figures[key] = float(np.median([row[key] for row in rows]))
    return figures


def check_llama(args, folder: Path) -> dict:
    """Rho-1b's shape at GSM8K's and TL;DR's lengths: training tokens/s, utilisation, memory."""
    from step import SHAPES  # prompts' and responses' lengths

    figures = {}
    model = make_model("llama", folder / "model", args.tiny)
    for task, shape in SHAPES.items():
        flags = {"num_searchers": 1, "engine": "transformers", "prompts_per_step": 7,
                 "trained_per_prompt": 20, "searched_per_prompt": 20,
                 "tokens_per_microbatch": 2048 if args.tiny else 16384}  # fmt: skip
        config = config_of(model, folder / f"run-{task}", **flags)
        problem = tba.load_problem(config)
        trainer = tba.Trainer(config, problem, tba.RunFolder(config, {}), {})
        trainer.load()
        rng = np.random.default_rng(0)
        fill_buffer(trainer, rng, *(n // 8 if args.tiny else n for n in shape[:3]))
        trainer.last_step_end = time.perf_counter()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(2 if args.tiny else 6):
            start = time.perf_counter()
            trainer.train_step()
            seconds.append(time.perf_counter() - start)
        figures[f"{task}: an optimizer step, s"] = float(np.median(seconds[1:]))
        rows = list(trainer.folder.records("metrics.jsonl"))[1:]
        speed = float(np.median([row["train_tokens_per_second"] for row in rows]))
        figures[f"{task}: response tokens/s"] = speed
        if CUDA:
            name = torch.cuda.get_device_properties(0).name
            peak = next((value for key, value in PEAK.items() if key in name), float("nan"))
            figures[f"{task}: model FLOPs utilisation, response tokens"] = (
                6 * problem.parameters * speed / peak
            )
            figures[f"{task}: peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
            memory = tba.memory_plan(config, problem, tba.gpu_gib(), shared=True)
            figures[f"{task}: GiB planned"] = sum(memory.trainer.values())
        trainer.folder.bar.close()
        del trainer
        torch.cuda.empty_cache()
    return figures


def fill_buffer(trainer, rng, prompt_length: int, mean: int, longest: int) -> None:
    """Random groups of lengths like a task's, as if a Searcher had sent them."""
    config, problem = trainer.config, trainer.problem
    vocabulary = len(problem.tokenizer)
    for prompt_id in range(2 * config.prompts_per_step):
        problem.prompts[prompt_id] = rng.integers(5, vocabulary, prompt_length).astype(np.int32)
        trajectories = []
        for _ in range(config.trained_per_prompt):
            n = int(np.clip(rng.lognormal(np.log(mean), 0.4), 2, longest))
            tokens = rng.integers(5, vocabulary, n).astype(np.int32)
            logprobs = np.full(n, -5.0, np.float32)
            reward = float(rng.random() < 0.5)
            trajectory = tba.Trajectory(
                tokens=tokens,
                logprobs=logprobs,
                ended=True,
                reward=reward,
                ref_logprobs=logprobs,
                prompt_id=prompt_id,
                version=0,
                reference=0,
            )
            trajectories.append(trajectory)
        trainer.buffer.add(tba.Group(prompt_id, trajectories, 0, prompt_id))


def check_generation(args, folder: Path) -> dict:
    """Tokens/s of a vLLM Searcher over a bare LLM.generate, at rho-1b's shape.

    On a GPU also with vLLM's model runner V2 and asynchronous scheduling, which are off in tba.py.
    """
    need_vllm()
    flags = ["--width", "128", "--layers", "2", "--prompts", "8", "--repeats", "1"]
    large = ["--width", "2048", "--layers", "22", "--prompts", "64", "--repeats", "3",
             "--tokens", "256", "--in_flight", "256"]  # fmt: skip
    figures = {}
    for runner in ("0", "1") if CUDA else ("0",):
        out = folder / f"searcher-{runner}.json"
        command = [sys.executable, str(ROOT / "bench" / "searcher.py"), "--out", str(out)]
        environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": runner}
        subprocess.run([*command, *(flags if args.tiny else large)], check=True, env=environment)
        kind = ", asynchronous scheduling" if runner == "1" else ""
        for name, result in json.loads(out.read_text())["results"].items():
            figures[f"{name}{kind}: tokens/s"] = result["tokens_per_second"]
            figures[f"{name}{kind}: over bare"] = result["over_bare"]
    return figures


def check_sync(args, folder: Path) -> dict:
    """What a weight sync with a real Searcher costs both sides, at rho-1b's shape."""
    from sync import GOAL, sync_times

    model = make_model("llama", folder / "model", args.tiny)
    flags = {"num_searchers": 1, "prompts_per_step": 2, "trained_per_prompt": 2,
             "searched_per_prompt": 2, "sequences_in_flight": 4, "max_response_tokens": 32,
             "eval_samples": 4, "transfer_timeout": 120.0}  # fmt: skip
    config = config_of(model, folder / "run", **flags)
    times = sync_times(config, rounds=3 if args.tiny else 9)
    ratios = np.array(times["trainer"]) / np.array(times["copy"])
    return {
        "begin to last Loaded, s": float(np.median(times["whole"])),
        "the Trainer's loss, s": float(np.median(times["trainer"])),
        "a bare copy and the probes, s": float(np.median(times["copy"])),
        f"the Trainer's loss over these (goal: at most {GOAL})": float(np.median(ratios)),
        "the Searcher's loss, s": float(np.median(times["searcher"])),
    }


def check_faults(args, folder: Path) -> dict:
    """SIGKILL of a Searcher and of the Trainer, and a resume."""
    from harness import GONE, Run, processes_of, steps_of, wait_until

    tiny.make("gsm8k", FILES / "tiny-gsm8k")
    files, out = FILES / "tiny-gsm8k", folder / "run"
    flags = ["--task", "gsm8k", "--model", files / "model", "--dataset", files / "data",
             "--output_dir", out, "--steps", "100000", "--save_every", "20", "--eval_every", "0",
             "--eval_samples", "8", "--prompts_per_step", "4", "--trained_per_prompt", "4",
             "--searched_per_prompt", "4", "--initial_trajectories", "16",
             "--max_response_tokens", "16"]  # fmt: skip
    figures, run = {}, Run(out, [str(flag) for flag in flags], hooks=False)
    run.reaches(30)
    start = time.perf_counter()
    os.kill(run.searchers()[0], signal.SIGKILL)
    run.says("restart 1 of")
    step = steps_of(out)
    run.until(lambda: len(run.searchers()) == 1 and steps_of(out) > step + 20, "it goes on")
    figures["a Searcher killed: at work again, s"] = time.perf_counter() - start
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    start = time.perf_counter()
    wait_until(lambda: not processes_of(run.process.pid), "every process gone", seconds=GONE)
    figures["the Trainer killed: nothing left, s"] = time.perf_counter() - start
    more = str(steps_of(out) + 20)
    start = time.perf_counter()
    Run(out, ["--resume", str(out), "--steps", more], hooks=False).ends(0)
    figures["resumed and ended, s"] = time.perf_counter() - start
    return figures


VLLM_START = 60  # seconds, on a GPU: it compiles kernels

CHECKS = {  # name -> (function, limit in seconds)
    "versions": (check_versions, 60),
    "nccl": (check_nccl, 300),
    "vllm": (check_vllm, 180 + VLLM_START),
    "gap": (check_gap, 180 + 4 * VLLM_START),
    "gsm8k": (partial(run_script, task="gsm8k"), 150 + VLLM_START),
    "tldr": (partial(run_script, task="tldr"), 240 + VLLM_START),
    "redteam": (partial(run_script, task="redteam"), 240 + 2 * VLLM_START),
    "llama": (check_llama, 180),
    "generation": (check_generation, 240 + 4 * VLLM_START),
    "sync": (check_sync, 180 + VLLM_START),
    "faults": (check_faults, 240 + 3 * VLLM_START),
}


def run_check(name: str, args) -> dict:
    """One check in a process of its own, which is ended with all its children at its limit."""
    folder = Path(tempfile.mkdtemp(prefix=f"tba-check-{name}-"))
    command = [sys.executable, __file__, "--child", name, "--folder", str(folder)]
    process = subprocess.Popen(
        command + ["--tiny"] * args.tiny, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    start, limit = time.perf_counter(), CHECKS[name][1]
    try:
        text, _ = process.communicate(timeout=limit)
        result = json.loads((folder / "result.json").read_text())
    except subprocess.TimeoutExpired:
        result = {"outcome": "fail", "error": f"it took over {limit} s"}
    except OSError:
        result = {"outcome": "fail", "error": f"it ended with {process.returncode}\n{text[-3000:]}"}
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it may have left
    shutil.rmtree(folder, ignore_errors=True)
    return {**result, "seconds": time.perf_counter() - start}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--list", action="store_true", help="name the checks and exit")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes (always on a CPU)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu_check.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.tiny |= not CUDA
    if args.list:
        for name, (function, limit) in CHECKS.items():
            doc = (getattr(function, "func", function).__doc__ or "").split("\n")[0]
            print(f"{name:12} {limit:4} s at most   {doc}")
        return 0
    if args.child:
        try:
            figures = CHECKS[args.child][0](args, args.folder)
            result = {"outcome": "pass", "figures": figures}
        except Needs as lack:
            result = {"outcome": f"needs {lack}"}
        except BaseException:
            result = {"outcome": "fail", "error": traceback.format_exc()}
        (args.folder / "result.json").write_text(json.dumps(result))
        tba.exit_now(0)
    results = {}
    for name in args.only:
        result = results[name] = run_check(name, args)
        print(f"{name:12} {result['outcome']:8} {result['seconds']:6.1f} s", flush=True)
        for key, value in result.get("figures", {}).items():
            print(f"    {key}: {value:.4g}" if isinstance(value, float) else f"    {key}: {value}")
        if "error" in result:
            print("    " + result["error"].strip().replace("\n", "\n    "))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n")
    return int(any(result["outcome"] == "fail" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
