# SPDX-License-Identifier: Apache-2.0
"""The command fastps-run: one job's processes on this machine.

    layout.py     how many processes of the job are on which machine: pure
    options.py    the command line
    plan.py       which processes make the job: pure
    output.py     lines, names and colours
    processes.py  start, signal and bury one process
    limits.py     descriptors, standard streams, the kernel's memory killer
    messenger.py  what the scheduler is told of processes that end before the start
    scheduler.py  the job's scheduler, in a thread
    job.py        the loop over all of them, and the order of stopping
    run.py        entry point

Never imported by other rooms.
"""
