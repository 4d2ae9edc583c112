#!/usr/bin/env bash
# One machine's part of an elastic training under torchrun. On each machine:
#
#     export VARUNA_CHECKPOINT_URL=s3://bucket/gpt      # a store that all machines reach
#     bash examples/launchers/torchrun/node.sh HOST:PORT
#
# HOST is a machine that stays: it keeps torchrun's rendezvous. One to four machines train together, with as many
# processes each as PROCESSES says (1). Arguments after HOST:PORT go to the script.
set -euo pipefail
endpoint=${1:?give HOST:PORT of the rendezvous, the same on all machines}
shift
: "${VARUNA_CHECKPOINT_URL:?set it to a checkpoint store that all machines reach}"
cd "$(dirname "$0")/../../.."

# torchrun counts each loss of a machine against --max-restarts. It gives up a silent machine after
# keep_alive_interval * keep_alive_max_attempt seconds, and then waits last_call_timeout seconds for others to come.
# With the store that torchrun shares with its ranks (torch 2.13), a machine that joins later never learns its address.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes=1:4 --nproc-per-node="${PROCESSES:-1}" --max-restarts=1000 \
    --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id=gpt \
    --rdzv-conf=keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=5 \
    examples/gpt/train.py --global-batch 10 "$@"
