#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# One launcher on each machine of the allocation; sbatch examples/slurm.sh
#SBATCH --job-name=fastps
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
set -eu

program="${1:-examples/minimal.py}"
workers="${WORKERS:-2}"                         # of each machine
token="${TOKEN_FILE:-$HOME/.fastps-$SLURM_JOB_ID}"  # where all machines see it
(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > "$token")
trap 'rm -f "$token"' EXIT

host="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
port=$((20000 + SLURM_JOB_ID % 10000))
export token program workers host port
# Workers take their numbers from the launcher, not from the task that runs it.
srun bash -c '
    machine=$SLURM_NODEID machines=$SLURM_NNODES
    for name in $(compgen -e SLURM_); do unset "$name"; done
    exec fastps-run --machines "$machines" --machine-rank "$machine" -np "$workers" \
        --scheduler-host "$host" --scheduler-port "$port" --token-file "$token" \
        python "$program"'
