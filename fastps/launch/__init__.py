# SPDX-License-Identifier: Apache-2.0
"""The commands fastps-run and fastps: processes of a job, on one machine or several.

Decides which processes make a job, their environment, and the order in which they end. Must never
know what they compute: other rooms see the launcher only as their environment. Threads: one loop
per launcher, and one in the process of the job's scheduler.

options.py, layout.py, plan.py    the command line, and the processes of the job: pure
processes.py, output.py            start, signal and reap a process; lines, names and colours
job.py                            the loop over all of them, and the order of stopping
leader.py, follower.py            launchers on several machines
scheduler.py, messenger.py        the job's scheduler, and the messages to and from it
scheduler_process.py              what its process does
survival.py                       what goes on when a launcher or leader is gone
cause.py, exit_report.py           which part failed first, and the report of it
run.py, doctor.py, team.py        entry points: fastps-run, fastps, fastps.run()
progress_line.py, top.py          the pace of a job: a line below its output, and a screen
"""
