#!/bin/sh
# TRL's own scripts, unchanged: `sh run.sh sft|dpo [option of TRL ...]`. Resumes from the newest
# checkpoint in the folder `out`.
set -eu
method=$1
shift
# The trainer writes its state last: without it, a kill has left the checkpoint in part.
state=$(find out -path '*/checkpoint-*/trainer_state.json' 2>/dev/null | sort -V | tail -n 1)
if [ -n "$state" ]; then
    set -- "$@" --resume_from_checkpoint "$(dirname "$state")"
fi
exec torchrun -m "trl.scripts.$method" --config "$method.yaml" "$@"
