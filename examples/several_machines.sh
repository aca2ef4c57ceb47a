#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Run on every machine, with its number and the address of machine 0:
#   examples/several_machines.sh 0 10.0.0.1        on machine 0
#   examples/several_machines.sh 1 10.0.0.1        on machine 1
# job.token must be the same on all, mode 0600. Make it once and copy it:
#   (umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > job.token)
set -eu
: "${1:?number of this machine}" "${2:?address of machine 0}"
exec fastps-run --machines "${MACHINES:-2}" --machine-rank "$1" -np "${WORKERS:-2}" \
    --scheduler-host "$2" --scheduler-port "${PORT:-7654}" \
    --token-file "${TOKEN_FILE:-job.token}" python "${PROGRAM:-examples/minimal.py}"
