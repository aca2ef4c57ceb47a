# SPDX-License-Identifier: Apache-2.0
"""Steps of one's own with rare exchanges, and steps that validators judge.

inner_steps.py      the optimizer whose steps are one's own
local_sgd.py        local SGD and DiLoCo
async_local_sgd.py  the same without rounds
validated.py        the same, judged by validators
"""
