# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: the points that a key passes; one armed fault per process, for tests.

cdef enum:
    ACTION_KILL = 1
    ACTION_STOP = 2
    ACTION_DELAY = 3
    ACTION_EXIT = 4

cdef struct Fault:
    int32_t point           # PROBE_NONE: not armed; the only field an unarmed check reads
    int32_t action
    int32_t value           # milliseconds of a delay, code of an exit
    int32_t hits_left       # the action is due when it falls to zero

# Written by arm_fault with the GIL, point last; read by every thread.
cdef Fault armed_fault
memset(&armed_fault, 0, sizeof(armed_fault))


cdef void probe_hit(int point, uint64_t key, uint32_t version) noexcept nogil:
    if unlikely(fps_load32(&armed_fault.point) == point):
        fault_count_hit()


cdef void fault_count_hit() noexcept nogil:
    cdef timespec pause
    if fps_add32(&armed_fault.hits_left, -1) != 0:
        return
    if armed_fault.action == ACTION_KILL:
        kill(getpid(), SIGKILL)
    elif armed_fault.action == ACTION_STOP:
        kill(getpid(), SIGSTOP)
    elif armed_fault.action == ACTION_EXIT:
        _exit(armed_fault.value)
    else:
        pause = timespec_of(<int64_t>armed_fault.value * NS_PER_MS)
        while nanosleep(&pause, &pause) != 0 and errno == EINTR:
            pass


_FAULT_POINTS = {
    "worker_start": PROBE_WORKER_START,
    "worker_result": PROBE_WORKER_RESULT,
    "server_landing": PROBE_SERVER_LANDING,
    "server_sum": PROBE_SERVER_SUM,
    "server_result": PROBE_SERVER_RESULT,
    "link_send": PROBE_LINK_SEND,
    "link_recv": PROBE_LINK_RECV,
    "local_arrive": PROBE_LOCAL_ARRIVE,
    "local_chunk": PROBE_LOCAL_CHUNK,
    "local_stage": PROBE_LOCAL_STAGE,
    "board_mark": PROBE_BOARD_MARK,
    "board_report": PROBE_BOARD_REPORT,
}
_FAULT_ACTIONS = {
    "kill": ACTION_KILL,
    "stop": ACTION_STOP,
    "delay": ACTION_DELAY,
    "exit": ACTION_EXIT,
}
_FAULT_SPEC = re.compile(r"([a-z_]+)@([1-9][0-9]{0,8}):(?:(kill|stop)|(delay|exit)([0-9]{1,8}))")


def arm_fault(spec: str) -> None:
    """Arm one fault of the form ``point@n:action``, or disarm with an empty string.

    The action happens once, at the n-th time any thread passes the point: ``kill`` (SIGKILL to
    this process), ``stop`` (SIGSTOP), ``delay<ms>``, ``exit<code>``. ConfigError when it does
    not parse.
    """
    fps_store32(&armed_fault.point, PROBE_NONE)
    if not spec:
        return
    match = _FAULT_SPEC.fullmatch(spec)
    if match is None or match[1] not in _FAULT_POINTS:
        raise ConfigError(
            f"fault {spec!r} is not point@n:action with a point of {', '.join(_FAULT_POINTS)}"
            " and an action of kill, stop, delay<ms>, exit<code>; for example server_sum@3:kill"
        )
    armed_fault.action = _FAULT_ACTIONS[match[3] or match[4]]
    armed_fault.value = int(match[5] or 0)
    armed_fault.hits_left = int(match[2])
    fps_store32(&armed_fault.point, _FAULT_POINTS[match[1]])
