#!/usr/bin/env bash
# TBA on GSM8K: RhoMath-1B on 4 GPUs (1 Trainer, 3 Searchers) or fewer.
#
#   bash run_gsm8k.sh [FLAGS OF tba.py...]          Figure 1: 700 steps. The paper reports 54.6 %
#                                                   (mean of three runs; 40.3 % before training) for
#                                                   the final weights, in 82 minutes on 4 A100 80 GB
#   bash run_gsm8k.sh table2 [FLAGS OF tba.py...]   Table 2: 1,000 steps
#   bash run_gsm8k.sh --tiny [FLAGS OF tba.py...]   a tiny model on a CPU, offline, in 15 seconds
#
# FLAGS: e.g. --output_dir runs/mine, or --resume runs/mine. The initial and the final weights are
# evaluated on the whole test set; to monitor a run, add --eval_every 50 --eval_samples 256 (the
# initial evaluation then has 256 prompts too).
#
# Unlike the paper, the authors' code decays the learning rate over 600 steps, not 500.
# Unlike tba.py, it trains bfloat16 weights without float32 master weights, transfers data only at
# blocking syncs, and draws recent prompts without replacement, over and over until the next sync.
set -euo pipefail
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python}

if [ "${1:-}" = --tiny ]; then
  shift
  files=$here/tests/models/gsm8k
  exec "$python" "$here/tba.py" --task gsm8k \
    --model "$files/model" --dataset "$files/data" \
    --steps 80 \
    --prompts_per_step 8 --trained_per_prompt 16 --searched_per_prompt 16 \
    --recent_probability 0.9 \
    --beta 0.05 \
    --learning_rate 1e-4@0,0@end --max_grad_norm 1 \
    --temperature 1.0 --max_response_tokens 32 \
    --sequences_in_flight 128 \
    --sync_every 2 --eval_every 20 \
    "$@"
fi

run=figure1
case "${1:-}" in
  table2) run=$1; shift ;;
  "" | --*) ;;
  *) echo "run_gsm8k.sh: error: unknown run $1: choose table2, or start with a flag" >&2; exit 2 ;;
esac

if [ "$run" = table2 ]; then
  lengths=(
    --steps 1000
    --learning_rate 2e-7@0,1e-5@49,1e-5@499,0~999      # warmup, stable, half a cosine over 500
    --beta 0.012@0,0.004@500                 # linear, then constant
  )
else
  lengths=(
    --steps 700                              # ends before the learning rate has fully decayed
    --learning_rate 2e-7@0,1e-5@49,1e-5@399,0~899
    --beta 0.014@0,0.004@500
  )
fi

settings=(
  --model realtreetune/rho-1b-sft-GSM8K      # policy and reference
  --dataset openai/gsm8k:main
  --prompts_per_step 7                       # B
  --trained_per_prompt 20                    # K: a batch is 7 x 20 = 140 trajectories
  --searched_per_prompt 24                   # S: more than K, to get K distinct responses
  --sync_every 2                             # k
  --recent_probability 0.95                  # m
  # the authors' Searchers reach a blocking sync only after whole batches of 3 prompts, so 3 of them
  # search at least 9 prompts while 2 steps train on 14
  --max_recent_draws 1.56
  --reward_inverse_temperature 0             # uniform replay
  --kept_per_prompt 100
  --initial_trajectories 500
  --temperature 0.7
  --max_prompt_tokens 512
  --max_response_tokens 512
  --eval_every 0
)
exec "$python" "$here/tba.py" --task gsm8k "${settings[@]}" "${lengths[@]}" "$@"
