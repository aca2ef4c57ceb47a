# SPDX-License-Identifier: Apache-2.0
"""The commands fastps-run and fastps: processes of a job, on one machine or several.

Decides which processes make a job, what each is told, and in which order they end. Must never know
what they compute: other rooms meet it as the environment alone. Threads: one loop per launcher,
and one for the job's scheduler.

options.py, layout.py, plan.py    the command line, and which processes make the job: pure
processes.py, output.py           start, signal and bury one process; lines, names and colours
job.py                            the loop over all of them, and the order of stopping
leader.py, follower.py            launchers on several machines
scheduler.py, messenger.py        the job's scheduler, and what it is told of processes that ended
cause.py, exit_report.py          which part failed first, and who says so
run.py, doctor.py, team.py        entry points: fastps-run, fastps, fastps.run()
"""
