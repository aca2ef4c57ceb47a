# SPDX-License-Identifier: Apache-2.0
"""The policies of keys, which act on pushes and pulls, and the rules of keys that keep state.

_policies.pxd is the seam to the store. Each policy stands in pieces: first its layout with its
theory of operation (_rounds_state, _accumulate_state), then what it sends, what it computes, and
what arrives. The store calls a policy by its table (SUM_POLICY, ACCUMULATE_POLICY), and a rule by
its address (CodedRule, RuledRule).
"""

cimport cython
from libc.math cimport pow as power, sqrt, sqrtf
from libc.stdint cimport (
    INT64_MAX, UINT32_MAX, int32_t, int64_t, int8_t, uint8_t, uint16_t, uint32_t, uint64_t,
    uintptr_t,
)
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from fastps._core cimport (
    E_MISMATCH, E_NOMEM, E_PEER_LOST, E_PROTOCOL, E_AGAIN, OK, PROBE_SERVER_RESULT,
    PROBE_SERVER_SUM, SPAN_RECEIVE, SPAN_RESULT, SPAN_SUM, BufferPool, is_traced, now_ns,
    probe_hit, run_rule, trace_span, tracing,
)
from fastps.native._floats cimport fps_floats, fps_floats_enter, fps_floats_leave
from fastps.native.atomic cimport (
    fps_add32, fps_add64, fps_and32, fps_cas32, fps_load32, fps_load64, fps_or32, fps_store32,
)
from fastps.native.posix cimport pthread_mutex_lock, pthread_mutex_unlock, sched_yield
from fastps.reduce._partition cimport (
    MAX_VOICES, Code, Coder, Combiner, Combining, Table, code_add, code_decode, code_encode,
    code_sum, combine, finish, lay_out, look, round_up, weigh,
)
from fastps.transport._link cimport (
    KICK_FULL, KICK_WAKE, LINK_CAN_PROMISE, Link, LinkSlot, SendItem, is_early_broadcast, sent_fn,
    slot_acquire, slot_release,
)
from fastps.transport.frame cimport (
    FLAG_AVERAGE, FLAG_BROADCAST, FLAG_NO_RESULT, FLAG_PLAIN, KEY_BITS, KIND_ERROR, KIND_PULL,
    KIND_PUSH, KIND_RESULT, Header,
)

include "_rounds_state.pxi"
include "_rounds_send.pxi"
include "_rounds_sum.pxi"
include "_rounds.pxi"
include "_accumulate_state.pxi"
include "_delay_compensation.pxi"
include "_delta_coding.pxi"
include "_accumulate_answer.pxi"
include "_deadline_rounds.pxi"
include "_accumulate.pxi"
include "_coded_rule.pxi"
include "_robust_rule.pxi"
