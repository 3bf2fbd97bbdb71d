#!/usr/bin/env bash
# Run a command on virtual GPUs, which are built first if need be:
#
#   VIRTUAL_GPUS=4 bash tests/virtual_gpu/run.sh python tba.py ...
#
# PYTHON is the interpreter for whose PyTorch they are built (default: python). See README.md.
exec "${PYTHON:-python}" "$(dirname "$0")/build.py" "$@"
