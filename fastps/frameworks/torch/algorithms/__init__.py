# SPDX-License-Identifier: Apache-2.0
"""Local steps with rare exchanges, and local steps that validators judge.

inner_steps.py      steps of the inner optimizer, blocks of tensors
local_sgd.py        local SGD and DiLoCo
async_local_sgd.py  local SGD without rounds
validated.py        local steps that validators judge
"""
