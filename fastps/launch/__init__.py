# SPDX-License-Identifier: Apache-2.0
"""The command fastps-run: one job's processes on this machine.

    options.py    the command line
    plan.py       which processes make the job: pure
    output.py     lines, names and colours
    processes.py  start, signal and bury one process
    job.py        the loop over all of them, and the order of stopping
    run.py        entry point

Never imported by other rooms.
"""
