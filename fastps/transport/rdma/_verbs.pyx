# SPDX-License-Identifier: Apache-2.0
"""The native data path of RDMA: calls of libibverbs, none of which takes the GIL.

Built only where the header of libibverbs is found. The library itself is loaded at import, which
raises ImportError where it is missing. A device is opened by name. Its queue pairs, completion
queues and regions are made here, because other modules cannot access the pointers inside pyverbs'
objects.
"""

cimport cython
from libc.errno cimport EIO, ENODEV, ENOMEM, errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset, strcmp

from fastps.native.posix cimport getpid
from fastps.transport.rdma._transport cimport (
    ACCESS_LOCAL, ACCESS_REMOTE, GID_BYTES, OPCODE_SEND, OPCODE_WRITE_WITH_IMM, TROUBLE_ADDRESS,
    TROUBLE_DEVICE, TROUBLE_PORT, Done, Greeting, Opened, Pinned, Request, Route, Shape,
    VerbsDevice,
)

import os

from fastps.errors import TransportError

cdef extern from "<fcntl.h>" nogil:
    int fcntl(int, int, ...)
    int F_GETFL
    int F_SETFL
    int O_NONBLOCK

cdef extern from "ibverbs.h" nogil:
    const char* fps_find_verbs()
    struct ibv_device:
        pass
    struct ibv_context:
        int async_fd
    struct ibv_pd:
        pass
    struct ibv_comp_channel:
        int fd
    struct ibv_cq:
        pass
    struct ibv_mr:
        uint32_t lkey
        uint32_t rkey
    struct ibv_mw:
        uint32_t rkey
    struct ibv_device_attr:
        unsigned int device_cap_flags
        int max_mw
    union ibv_gid:
        uint8_t raw[16]
    struct ibv_port_attr:
        int state
        int active_mtu
        uint32_t max_msg_sz
        uint16_t lid
    struct ibv_qp_cap:
        uint32_t max_send_wr
        uint32_t max_recv_wr
        uint32_t max_send_sge
        uint32_t max_recv_sge
        uint32_t max_inline_data
    struct ibv_qp_init_attr:
        ibv_cq* send_cq
        ibv_cq* recv_cq
        ibv_qp_cap cap
        int qp_type
        int sq_sig_all
    struct ibv_qp:
        uint32_t qp_num
    struct ibv_global_route:
        ibv_gid dgid
        uint8_t sgid_index
        uint8_t hop_limit
        uint8_t traffic_class
    struct ibv_ah_attr:
        ibv_global_route grh
        uint16_t dlid
        uint8_t sl
        uint8_t is_global
        uint8_t port_num
    struct ibv_qp_attr:
        int qp_state
        int path_mtu
        uint32_t rq_psn
        uint32_t sq_psn
        uint32_t dest_qp_num
        int qp_access_flags
        ibv_ah_attr ah_attr
        uint16_t pkey_index
        uint8_t max_rd_atomic
        uint8_t max_dest_rd_atomic
        uint8_t min_rnr_timer
        uint8_t port_num
        uint8_t timeout
        uint8_t retry_cnt
        uint8_t rnr_retry
    struct ibv_sge:
        uint64_t addr
        uint32_t length
        uint32_t lkey
    struct ibv_send_wr:
        uint64_t wr_id
        ibv_send_wr* next
        ibv_sge* sg_list
        int num_sge
        int opcode
        unsigned int send_flags
        uint32_t imm_data
    struct ibv_recv_wr:
        uint64_t wr_id
        ibv_recv_wr* next
        ibv_sge* sg_list
        int num_sge
    struct ibv_wc:
        uint64_t wr_id
        int status
        int opcode
        uint32_t byte_len
        uint32_t imm_data
        unsigned int wc_flags
    struct ibv_async_event:
        int event_type
    int IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_ERR
    int IBV_QP_STATE, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_ACCESS_FLAGS, IBV_QP_AV
    int IBV_QP_PATH_MTU, IBV_QP_DEST_QPN, IBV_QP_RQ_PSN, IBV_QP_MAX_DEST_RD_ATOMIC
    int IBV_QP_MIN_RNR_TIMER, IBV_QP_TIMEOUT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY
    int IBV_QP_SQ_PSN, IBV_QP_MAX_QP_RD_ATOMIC
    int IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_MW_BIND
    int IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM
    int IBV_WR_BIND_MW, IBV_WR_LOCAL_INV
    int IBV_SEND_SIGNALED, IBV_SEND_INLINE
    int IBV_WC_SUCCESS, IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM
    int IBV_MW_TYPE_2
    unsigned int IBV_DEVICE_MEM_WINDOW_TYPE_2B
    int IBV_PORT_ACTIVE
    int IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ERR, IBV_EVENT_GID_CHANGE
    ibv_device** ibv_get_device_list(int*)
    void ibv_free_device_list(ibv_device**)
    const char* ibv_get_device_name(ibv_device*)
    ibv_context* ibv_open_device(ibv_device*)
    int ibv_close_device(ibv_context*)
    int ibv_query_device(ibv_context*, ibv_device_attr*)
    int ibv_query_port(ibv_context*, uint8_t, ibv_port_attr*)
    int ibv_query_gid(ibv_context*, uint8_t, int, ibv_gid*)
    ibv_pd* ibv_alloc_pd(ibv_context*)
    int ibv_dealloc_pd(ibv_pd*)
    ibv_comp_channel* ibv_create_comp_channel(ibv_context*)
    int ibv_destroy_comp_channel(ibv_comp_channel*)
    ibv_cq* ibv_create_cq(ibv_context*, int, void*, ibv_comp_channel*, int)
    int ibv_destroy_cq(ibv_cq*)
    int ibv_req_notify_cq(ibv_cq*, int)
    int ibv_get_cq_event(ibv_comp_channel*, ibv_cq**, void**)
    void ibv_ack_cq_events(ibv_cq*, unsigned int)
    int ibv_poll_cq(ibv_cq*, int, ibv_wc*)
    ibv_qp* ibv_create_qp(ibv_pd*, ibv_qp_init_attr*)
    int ibv_modify_qp(ibv_qp*, ibv_qp_attr*, int)
    int ibv_destroy_qp(ibv_qp*)
    ibv_mr* ibv_reg_mr(ibv_pd*, void*, size_t, int)
    int ibv_dereg_mr(ibv_mr*)
    ibv_mw* ibv_alloc_mw(ibv_pd*, int)
    int ibv_dealloc_mw(ibv_mw*)
    uint32_t ibv_inc_rkey(uint32_t)
    int ibv_post_send(ibv_qp*, ibv_send_wr*, ibv_send_wr**)
    int ibv_post_recv(ibv_qp*, ibv_recv_wr*, ibv_recv_wr**)
    int ibv_get_async_event(ibv_context*, ibv_async_event*)
    void ibv_ack_async_event(ibv_async_event*)
    const char* ibv_wc_status_str(int)
    int ibv_fork_init()
    int ibv_is_fork_initialized()
    int IBV_FORK_UNNEEDED
    int ibv_query_pkey(ibv_context*, uint8_t, int, uint16_t*)

cdef extern from *:
    """
    #include <errno.h>
    static inline void fps_set_remote(struct ibv_send_wr* work, uint64_t address, uint32_t key) {
        work->wr.rdma.remote_addr = address;
        work->wr.rdma.rkey = key;
    }
    static inline int fps_port_of(struct ibv_async_event* event) {
        return event->element.port_num;
    }
    static inline void fps_forget_error(void) {
        errno = 0;
    }
    static inline void fps_set_bind(struct ibv_send_wr* work, struct ibv_mw* window, uint32_t key,
                                    struct ibv_mr* region, uint64_t address, uint64_t nbytes) {
        work->bind_mw.mw = window;
        work->bind_mw.rkey = key;
        work->bind_mw.bind_info.mr = region;
        work->bind_mw.bind_info.addr = address;
        work->bind_mw.bind_info.length = nbytes;
        work->bind_mw.bind_info.mw_access_flags = IBV_ACCESS_REMOTE_WRITE;
    }
    static inline void fps_set_invalidate(struct ibv_send_wr* work, uint32_t key) {
        work->invalidate_rkey = key;
    }
    """
    void fps_set_remote(ibv_send_wr* work, uint64_t address, uint32_t key) noexcept nogil
    int fps_port_of(ibv_async_event* event) noexcept nogil
    void fps_forget_error() noexcept nogil
    void fps_set_bind(ibv_send_wr* work, ibv_mw* window, uint32_t key, ibv_mr* region,
                      uint64_t address, uint64_t nbytes) noexcept nogil
    void fps_set_invalidate(ibv_send_wr* work, uint32_t key) noexcept nogil

cdef enum:
    POLL_BATCH = 16
    HOP_LIMIT = 64
    MIN_RNR_TIMER = 12      # 0.64 ms; credits keep it from ever mattering
    INLINE_WISH = 256       # a message without payload fits, and small payloads with it
    LEAST_INLINE = 32       # fewer would not hold the shortest message
    MAX_PKEYS = 128
    FULL_MEMBER = 0x8000    # in a partition's key: may talk to all of its members

cdef struct Settings:
    uint8_t port
    uint8_t gid_index
    uint8_t traffic_class
    uint16_t pkey_index
    uint8_t ack_timeout     # 4.096 us times two to the power of this
    uint8_t retries
    uint8_t mtu

cdef struct Device:
    ibv_context* context
    ibv_pd* domain
    int pid                 # a fork shares the context, and must leave it alone
    Settings settings
    ibv_gid gid
    uint16_t lid
    uint32_t inline_bytes
    bint has_windows

cdef struct Port:
    Device* device
    ibv_comp_channel* channel
    ibv_cq* queue
    ibv_qp* pair


# ---------------------------------------------------------------- queue pairs

cdef inline int last_error() noexcept nogil:
    """Return the errno of a failed call, or EIO: some drivers set none."""
    return errno if errno else EIO


cdef int set_state(ibv_qp* pair, int state) noexcept nogil:
    cdef ibv_qp_attr attributes
    memset(&attributes, 0, sizeof(attributes))
    attributes.qp_state = state
    return ibv_modify_qp(pair, &attributes, IBV_QP_STATE)


cdef void end_pair(ibv_qp* pair) noexcept nogil:
    """Destroy a queue pair; reset it first if that fails, so that it receives nothing."""
    if ibv_destroy_qp(pair):
        set_state(pair, IBV_QPS_RESET)
        ibv_destroy_qp(pair)


cdef void verbs_halt_port(void* handle) noexcept nogil:
    set_state((<Port*>handle).pair, IBV_QPS_ERR)


cdef void verbs_close_port(void* handle) noexcept nogil:
    cdef Port* port = <Port*>handle
    if port.pair != NULL:
        end_pair(port.pair)
    if port.queue != NULL:
        ibv_destroy_cq(port.queue)
    if port.channel != NULL:
        ibv_destroy_comp_channel(port.channel)
    free(port)


cdef int begin_pair(Port* port) noexcept nogil:
    """Move the queue pair to the state in which it takes receives; 0 or an errno."""
    cdef ibv_qp_attr attributes
    memset(&attributes, 0, sizeof(attributes))
    attributes.qp_state = IBV_QPS_INIT
    attributes.pkey_index = port.device.settings.pkey_index
    attributes.port_num = port.device.settings.port
    attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE
    return ibv_modify_qp(port.pair, &attributes,
                         IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)


cdef void set_nonblocking(int descriptor) noexcept nogil:
    fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK)


cdef int make_pair(Port* port, const Shape* shape) noexcept nogil:
    fps_forget_error()
    port.channel = ibv_create_comp_channel(port.device.context)
    if port.channel == NULL:
        return last_error()
    set_nonblocking(port.channel.fd)
    port.queue = ibv_create_cq(port.device.context, shape.sends + shape.receives + 1, NULL,
                               port.channel, 0)
    if port.queue == NULL:
        return last_error()
    port.pair = create_pair(port.device.domain, port.queue, shape, port.device.inline_bytes)
    return last_error() if port.pair == NULL else begin_pair(port)


cdef ibv_qp* create_pair(ibv_pd* domain, ibv_cq* queue, const Shape* shape,
                         uint32_t inline_bytes) noexcept nogil:
    cdef ibv_qp_init_attr attributes
    memset(&attributes, 0, sizeof(attributes))
    attributes.send_cq = attributes.recv_cq = queue
    attributes.qp_type = IBV_QPT_RC
    attributes.cap.max_send_wr = shape.sends
    attributes.cap.max_recv_wr = shape.receives
    attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1
    attributes.cap.max_inline_data = inline_bytes
    return ibv_create_qp(domain, &attributes)


cdef uint32_t find_inline(ibv_context* context, ibv_pd* domain) noexcept nogil:
    """Return the bytes that the device takes inline. There is no query: try queue pairs."""
    cdef uint32_t wish = INLINE_WISH
    cdef Shape shape
    cdef ibv_qp* pair
    cdef ibv_cq* queue = ibv_create_cq(context, 2, NULL, NULL, 0)
    if queue == NULL:
        return 0
    shape.sends = shape.receives = 1
    while wish:
        pair = create_pair(domain, queue, &shape, wish)
        if pair != NULL:
            ibv_destroy_qp(pair)
            break
        wish = wish / 2 if wish > LEAST_INLINE else 0
    ibv_destroy_cq(queue)
    return wish


cdef uint16_t find_partition(ibv_context* context, uint8_t port) noexcept nogil:
    """Return the index of the first partition with full membership, else 0."""
    cdef uint16_t key, index
    for index in range(<uint16_t>MAX_PKEYS):
        if ibv_query_pkey(context, port, index, &key):
            break
        # in network byte order: the first byte has the bit
        if (<uint8_t*>&key)[0] & FULL_MEMBER >> 8:
            return index
    return 0


cdef int verbs_open_port(void* handle, const Shape* shape, void** opened,
                         int* descriptor) noexcept nogil:
    cdef Port* port = <Port*>calloc(1, sizeof(Port))
    cdef int error
    if port == NULL:
        return ENOMEM
    port.device = <Device*>handle
    error = make_pair(port, shape)
    if error:
        verbs_close_port(port)
        return error
    descriptor[0] = port.channel.fd
    opened[0] = port
    return 0


cdef void verbs_describe(void* handle, Greeting* greeting) noexcept nogil:
    cdef Port* port = <Port*>handle
    greeting.mtu = port.device.settings.mtu
    greeting.lid = port.device.lid
    greeting.queue_pair = port.pair.qp_num
    memcpy(greeting.gid, port.device.gid.raw, GID_BYTES)


cdef int verbs_connect(void* handle, const Route* route) noexcept nogil:
    cdef Port* port = <Port*>handle
    cdef Settings* settings = &port.device.settings
    cdef ibv_qp_attr attributes
    cdef int error
    memset(&attributes, 0, sizeof(attributes))
    attributes.qp_state = IBV_QPS_RTR
    attributes.path_mtu = route.mtu
    attributes.dest_qp_num = route.queue_pair
    attributes.rq_psn = route.receive_from
    attributes.min_rnr_timer = MIN_RNR_TIMER
    attributes.ah_attr.is_global = 1
    attributes.ah_attr.dlid = <uint16_t>route.lid
    attributes.ah_attr.port_num = settings.port
    memcpy(attributes.ah_attr.grh.dgid.raw, route.gid, GID_BYTES)
    attributes.ah_attr.grh.sgid_index = settings.gid_index
    attributes.ah_attr.grh.hop_limit = HOP_LIMIT
    attributes.ah_attr.grh.traffic_class = settings.traffic_class
    error = ibv_modify_qp(
        port.pair, &attributes, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
    if error:
        return error
    memset(&attributes, 0, sizeof(attributes))
    attributes.qp_state = IBV_QPS_RTS
    attributes.sq_psn = route.send_from
    attributes.timeout = settings.ack_timeout
    attributes.retry_cnt = settings.retries
    attributes.rnr_retry = 0            # credits: the peer is always ready
    return ibv_modify_qp(
        port.pair, &attributes, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)


# ---------------------------------------------------------------- requests

cdef int verbs_post_send(void* handle, const Request* request) noexcept nogil:
    cdef Port* port = <Port*>handle
    cdef ibv_send_wr work
    cdef ibv_send_wr* refused
    cdef ibv_sge piece
    memset(&work, 0, sizeof(work))
    piece.addr = request.address
    piece.length = request.length
    piece.lkey = request.lkey
    work.wr_id = request.work
    work.sg_list = &piece
    work.num_sge = 1
    work.send_flags = IBV_SEND_SIGNALED | (IBV_SEND_INLINE if request.is_inline else 0)
    if request.opcode == OPCODE_SEND:
        work.opcode = IBV_WR_SEND
    else:
        work.opcode = IBV_WR_RDMA_WRITE
        fps_set_remote(&work, request.remote, request.rkey)
    if request.opcode == OPCODE_WRITE_WITH_IMM:
        work.opcode = IBV_WR_RDMA_WRITE_WITH_IMM
        work.imm_data = request.imm     # as stored: all of this wire is little-endian
    return ibv_post_send(port.pair, &work, &refused)


cdef int verbs_post_receive(void* handle, uint64_t work, uint64_t address, uint32_t length,
                            uint32_t lkey) noexcept nogil:
    cdef Port* port = <Port*>handle
    cdef ibv_recv_wr request
    cdef ibv_recv_wr* refused
    cdef ibv_sge piece
    piece.addr = address
    piece.length = length
    piece.lkey = lkey
    request.wr_id = work
    request.next = NULL
    request.sg_list = &piece
    request.num_sge = 1
    return ibv_post_recv(port.pair, &request, &refused)


cdef int verbs_poll(void* handle, Done* done, int room) noexcept nogil:
    cdef Port* port = <Port*>handle
    cdef ibv_wc completions[POLL_BATCH]
    cdef int i, count = ibv_poll_cq(port.queue, min(room, <int>POLL_BATCH), completions)
    for i in range(count):
        done[i].work = completions[i].wr_id
        done[i].status = completions[i].status
        done[i].has_imm = completions[i].opcode == IBV_WC_RECV_RDMA_WITH_IMM
        done[i].is_receive = done[i].has_imm or completions[i].opcode == IBV_WC_RECV
        done[i].length = completions[i].byte_len
        done[i].imm = completions[i].imm_data
    return count


cdef int verbs_arm(void* handle) noexcept nogil:
    return ibv_req_notify_cq((<Port*>handle).queue, 0)


cdef void verbs_take_event(void* handle) noexcept nogil:
    cdef Port* port = <Port*>handle
    cdef ibv_cq* queue
    cdef void* context
    if ibv_get_cq_event(port.channel, &queue, &context) == 0:
        ibv_ack_cq_events(queue, 1)


# ---------------------------------------------------------------- windows

cdef int verbs_open_window(void* handle, Opened* opened) noexcept nogil:
    cdef ibv_mw* window
    fps_forget_error()
    window = ibv_alloc_mw((<Device*>handle).domain, IBV_MW_TYPE_2)
    if window == NULL:
        return last_error()
    opened.handle = window
    return 0


cdef void verbs_close_window(void* device, void* handle) noexcept nogil:
    ibv_dealloc_mw(<ibv_mw*>handle)


cdef int verbs_post_bind(void* handle, uint64_t work_id, Opened* opened, const Pinned* pinned,
                         uint64_t address, uint64_t nbytes) noexcept nogil:
    cdef ibv_mw* window = <ibv_mw*>opened.handle
    cdef ibv_send_wr work
    cdef ibv_send_wr* refused
    cdef int error
    memset(&work, 0, sizeof(work))
    work.wr_id = work_id
    work.opcode = IBV_WR_BIND_MW
    work.send_flags = IBV_SEND_SIGNALED
    opened.rkey = ibv_inc_rkey(window.rkey)
    fps_set_bind(&work, window, opened.rkey, <ibv_mr*>pinned.handle, address, nbytes)
    error = ibv_post_send((<Port*>handle).pair, &work, &refused)
    if error == 0:
        window.rkey = opened.rkey       # the library does not do this for windows of type 2
    return error


cdef int verbs_post_unbind(void* handle, uint64_t work_id, const Opened* opened) noexcept nogil:
    cdef ibv_send_wr work
    cdef ibv_send_wr* refused
    memset(&work, 0, sizeof(work))
    work.wr_id = work_id
    work.opcode = IBV_WR_LOCAL_INV
    work.send_flags = IBV_SEND_SIGNALED
    fps_set_invalidate(&work, opened.rkey)
    return ibv_post_send((<Port*>handle).pair, &work, &refused)


# ---------------------------------------------------------------- memory and trouble

cdef int verbs_pin(void* handle, void* address, uint64_t nbytes, int access,
                   Pinned* pinned) noexcept nogil:
    cdef Device* device = <Device*>handle
    cdef int flags = 0
    cdef ibv_mr* region
    if access & ACCESS_LOCAL:
        flags = IBV_ACCESS_LOCAL_WRITE
    if access == ACCESS_REMOTE:
        flags |= IBV_ACCESS_MW_BIND if device.has_windows else IBV_ACCESS_REMOTE_WRITE
    fps_forget_error()
    region = ibv_reg_mr(device.domain, address, nbytes, flags)
    if region == NULL:
        return last_error()
    pinned.handle = region
    pinned.lkey = region.lkey
    pinned.rkey = region.rkey
    return 0


cdef void verbs_unpin(void* device, void* handle) noexcept nogil:
    ibv_dereg_mr(<ibv_mr*>handle)


cdef int verbs_find_trouble(void* handle) noexcept nogil:
    cdef Device* device = <Device*>handle
    cdef ibv_port_attr attributes
    cdef ibv_gid gid
    if ibv_query_port(device.context, device.settings.port, &attributes):
        return TROUBLE_DEVICE
    if attributes.state != IBV_PORT_ACTIVE:
        return TROUBLE_PORT
    if (ibv_query_gid(device.context, device.settings.port, device.settings.gid_index, &gid)
            or memcmp(gid.raw, device.gid.raw, GID_BYTES)):
        return TROUBLE_ADDRESS
    return 0


cdef int verbs_take_trouble(void* handle) noexcept nogil:
    cdef Device* device = <Device*>handle
    cdef ibv_async_event event
    cdef int kind, port
    if ibv_get_async_event(device.context, &event):
        return 0
    kind = event.event_type
    port = fps_port_of(&event)
    ibv_ack_async_event(&event)
    if kind == IBV_EVENT_DEVICE_FATAL:
        return TROUBLE_DEVICE
    if kind == IBV_EVENT_PORT_ERR and port == device.settings.port:
        return TROUBLE_PORT
    if kind == IBV_EVENT_GID_CHANGE and port == device.settings.port:
        return verbs_find_trouble(handle)
    return 0


cdef const char* verbs_explain(int status) noexcept nogil:
    return ibv_wc_status_str(status)


# ---------------------------------------------------------------- Python face

cdef const char* missing = fps_find_verbs()
if missing != NULL:
    raise ImportError(f"{missing.decode()}; apt-get install ibverbs-providers (rdma-core 35)")


cdef int protect_forks() except -1:
    """Keep pinned pages in this process when it forks; kernels from 5.12 do so by themselves."""
    if ibv_is_fork_initialized() != IBV_FORK_UNNEEDED and ibv_fork_init():
        raise TransportError(
            "a fork would separate this process from its pinned memory on this kernel; call "
            "fastps.init() before others use RDMA, set RDMAV_FORK_SAFE=1, or use Linux 5.12")
    return 0


cdef ibv_context* open_by_name(bytes name) except NULL:
    cdef ibv_context* context = NULL
    cdef int i, error = ENODEV, count = 0
    cdef ibv_device** devices = ibv_get_device_list(&count)
    if devices == NULL:
        raise OSError(errno, f"cannot list RDMA devices: {os.strerror(errno)}")
    for i in range(count):
        if context == NULL and strcmp(ibv_get_device_name(devices[i]), name) == 0:
            context = ibv_open_device(devices[i])
            error = errno
    ibv_free_device_list(devices)
    if context == NULL:
        raise OSError(error, os.strerror(error))
    return context


@cython.final
cdef class NativeDevice(VerbsDevice):
    """An open device whose calls go straight to libibverbs.

    name: of the device. port, gid_index: of the address to use. mtu: 1 (256) to 5 (4096), or 0
    for the port's own. ack_timeout: 4.096 us times two to the power of it, until a packet is sent
    again. Raises OSError when the device cannot be opened, TransportError when the port is down.
    """

    def __cinit__(self, str name not None, *, uint8_t port, uint8_t gid_index, uint8_t mtu=0,
                  uint8_t traffic_class=0, uint8_t ack_timeout=18, uint8_t retries=6):
        cdef Device* device = <Device*>calloc(1, sizeof(Device))
        cdef ibv_port_attr attributes
        cdef ibv_device_attr abilities
        if device == NULL:
            raise MemoryError(f"no memory for the device {name}")
        device.pid = getpid()
        self.device = device
        self.name = name
        self.data_path = "native"
        device.context = open_by_name(name.encode())
        protect_forks()
        device.domain = ibv_alloc_pd(device.context)
        if device.domain == NULL:
            raise OSError(errno, f"cannot make a protection domain: {os.strerror(errno)}")
        if (ibv_query_port(device.context, port, &attributes)
                or ibv_query_gid(device.context, port, gid_index, &device.gid)):
            raise OSError(EIO, f"port {port} cannot be queried")
        if attributes.state != IBV_PORT_ACTIVE:
            raise TransportError(f"port {port} of {name} is not active; check its cable and link")
        if ibv_query_device(device.context, &abilities):
            raise OSError(EIO, f"{name} cannot be queried")
        device.has_windows = (abilities.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B != 0
                              and abilities.max_mw > 0)
        self.has_windows = device.has_windows
        device.settings.port = port
        device.settings.gid_index = gid_index
        device.settings.traffic_class = traffic_class
        device.settings.ack_timeout = ack_timeout
        device.settings.retries = retries
        device.settings.mtu = min(mtu or 5, attributes.active_mtu)
        device.lid = attributes.lid
        self.max_message_bytes = attributes.max_msg_sz
        device.settings.pkey_index = find_partition(device.context, port)
        self.inline_bytes = device.inline_bytes = find_inline(device.context, device.domain)
        self.trouble_descriptor = device.context.async_fd
        set_nonblocking(device.context.async_fd)
        self.verbs.open_port = verbs_open_port
        self.verbs.halt_port = verbs_halt_port
        self.verbs.close_port = verbs_close_port
        self.verbs.describe = verbs_describe
        self.verbs.connect = verbs_connect
        self.verbs.post_send = verbs_post_send
        self.verbs.post_receive = verbs_post_receive
        self.verbs.poll = verbs_poll
        self.verbs.arm = verbs_arm
        self.verbs.take_event = verbs_take_event
        self.verbs.pin = verbs_pin
        self.verbs.unpin = verbs_unpin
        self.verbs.open_window = verbs_open_window
        self.verbs.close_window = verbs_close_window
        self.verbs.post_bind = verbs_post_bind
        self.verbs.post_unbind = verbs_post_unbind
        self.verbs.take_trouble = verbs_take_trouble
        self.verbs.find_trouble = verbs_find_trouble
        self.verbs.explain = verbs_explain

    def __dealloc__(self):
        cdef Device* device = <Device*>self.device
        if device == NULL or device.pid != getpid():
            return
        if device.domain != NULL:
            ibv_dealloc_pd(device.domain)
        if device.context != NULL:
            ibv_close_device(device.context)
        free(device)
