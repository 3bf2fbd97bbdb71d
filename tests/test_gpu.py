"""Runs on GPUs: real ones, or the virtual ones of tests/virtual_gpu."""

import pytest
from harness import arguments, run_tba, virtual_gpus

from tba import read_lines

pytestmark = pytest.mark.gpu


def test_one_gpu_for_both(gsm8k, tmp_path):
    out = tmp_path / "run"
    run_tba(arguments(gsm8k, out, dtype="bfloat16"), environment=virtual_gpus(1))
    metrics = read_lines(out / "metrics.jsonl")
    assert len(metrics) == 4 and metrics[0]["gpu_memory_gib"] > 0
