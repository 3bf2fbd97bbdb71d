#!/usr/bin/env bash
# TBA on GSM8K: RhoMath-1B (4 GPUs: 1 Trainer, 3 Searchers; fewer work too).
#
# The paper reports 54.6 % greedy test accuracy after 1.4 hours on 4 A100 80 GB (SFT: 40 %). The authors'
# code differs in that it trains bfloat16 weights without float32 masters, hands data over at
# blocking syncs only, and draws recent prompts without replacement. For these three, add
#   --master_dtype bfloat16 --deliver_at_sync --replay_recent exhaust
#
#   bash run_gsm8k.sh [FLAGS OF tba.py...]          e.g. --output_dir runs/mine, or --resume runs/mine
#   bash run_gsm8k.sh --tiny [FLAGS OF tba.py...]   the same path on a CPU, offline, in two minutes
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}

if [ "${1:-}" = --tiny ]; then
  shift
  files=${TBA_CACHE:-$here/.cache}/tiny-gsm8k
  "$python" "$here/tests/tiny.py" gsm8k --out "$files"
  exec "$python" "$here/tba.py" --task gsm8k \
    --model "$files/model" --dataset "$files/data" \
    --steps 80 \
    --prompts_per_step 8 --trained_per_prompt 16 --searched_per_prompt 16 \
    --recent_probability 0.9 \
    --beta 0.05 \
    --learning_rate 1e-4 --lr_schedule linear --max_grad_norm 1 \
    --temperature 1.0 --max_response_tokens 32 \
    --sequences_in_flight 128 \
    --sync_every 2 --eval_every 20 \
    "$@"
fi

settings=(
  --model realtreetune/rho-1b-sft-GSM8K      # policy and reference
  --dataset openai/gsm8k --dataset_config main
  --steps 700
  --prompts_per_step 7                       # B
  --trained_per_prompt 20                    # K: a batch is 7 x 20 = 140 trajectories
  --searched_per_prompt 24                   # S: four more, so that K distinct ones exist
  --sync_every 2                             # k
  --recent_probability 0.95                  # m
  --reward_inverse_temperature 0             # the rest of the replay is uniform
  --kept_per_prompt 100
  --initial_trajectories 500
  --learning_rate 1e-5
  --lr_schedule warmup_stable_decay          # 50 + 350 + 600: the 700 steps end half-way down
  --warmup_steps 50 --stable_steps 350 --decay_steps 600
  --beta 0.014 --beta_final 0.004 --beta_anneal_steps 500
  --temperature 0.7
  --max_response_tokens 512
  --eval_every 50
)
exec "$python" "$here/tba.py" --task gsm8k "${settings[@]}" "$@"
