#!/bin/bash
# The same command on each of two hosts; the name is that of the first, and both must reach it.
#
#     bash torchrun_two_hosts.sh first-host

# Without the next line a host that replaced another was seen to wait (torch 2.13): agents seem to tell each
# other the address of their shared store only once.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

torchrun \
    --nnodes=2 \
    --nproc-per-node="${RANKS_PER_HOST:-gpu}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$1:29400" \
    --rdzv-id=fullshard \
    --max-restarts=3 \
    -m fullshard train run.toml
