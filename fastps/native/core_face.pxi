# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: what Python sees of threads and checksum. Each function converts,
# checks, releases the GIL in the smallest block, and maps the status.


cdef void end_at_once(void* arg) noexcept nogil:
    pass


def set_thread_placement(cpus: Sequence[int], node: int) -> None:
    """Pin threads made later to cpus and a NUMA node; empty and -1 do not pin.

    Tests it on one short thread and logs one warning if the system refuses; threads then run
    unpinned. Process-wide.
    """
    global default_placement
    cdef Placement wanted
    cdef Thread* probe
    cdef int cpu
    memset(&wanted, 0, sizeof(wanted))
    wanted.has_cpus = len(cpus) > 0
    wanted.node = node if node < MAX_CPUS else -1
    wanted.error = EINVAL if node >= MAX_CPUS else 0
    for cpu in cpus:
        if 0 <= cpu < MAX_CPUS:
            wanted.cpus[cpu // 64] |= <uint64_t>1 << (cpu % 64)
        else:
            wanted.error = EINVAL
    pthread_mutex_lock(&placement_mutex)
    default_placement = wanted
    pthread_mutex_unlock(&placement_mutex)
    probe = thread_create(b"probe", 0, end_at_once, NULL)
    if probe == NULL:
        raise error_of(E_SYS, "cannot start a thread; check `ulimit -u`")
    cdef int error = probe.pin_errno
    with nogil:
        thread_join(probe, INT64_MAX)
    if error != 0:
        _LOG.warning(
            "threads run unpinned: the system refused CPUs %s, NUMA node %d: %s",
            cpus, node, strerror(error).decode(),
        )


def debug_counters() -> dict[str, int]:
    """Return counts of live objects and of misuse; empty unless built with FASTPS_DEBUG=1."""
    if not FASTPS_DEBUG:
        return {}
    return {
        "completions": counted(COUNT_COMPLETIONS),
        "completions_overdone": counted(COUNT_OVERDONE),
        "items": counted(COUNT_ITEMS),
        "queues": counted(COUNT_QUEUES),
        "credit_overreturned": counted(COUNT_OVERCREDIT),
        "threads": counted(COUNT_THREADS),
        "loans": counted(COUNT_LOANS),
    }
