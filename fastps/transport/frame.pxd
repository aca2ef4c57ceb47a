# SPDX-License-Identifier: Apache-2.0
# The frame header as C sees it; tests/aids/wire.py has the same layout as a struct.Struct, and a
# test compares the two. Little-endian, 48 bytes, no padding.
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

cdef packed struct Header:
    uint32_t magic          # MAGIC
    uint8_t version         # PROTOCOL_VERSION
    uint8_t kind            # FrameKind
    uint8_t dtype           # types.DType, 0 where the frame has no elements
    uint8_t flags           # FrameFlag bits
    uint64_t key            # tensor id << 16 | partition index
    uint32_t key_version    # round of this key, counts from 1
    uint32_t sender         # number of the member
    int32_t priority        # larger is more urgent; RESULT frames carry the push's priority back
    uint32_t offset         # of the payload within the partition, bytes
    uint32_t length         # payload bytes that follow
    int32_t status          # ERROR: why the round failed, negative; of a broadcast: root's rank
    uint32_t subject        # ERROR: member at fault; of a broadcast: number of root's machine
    uint32_t checksum       # crc32c of the 44 bytes before

cdef enum:
    KEY_BITS = 16           # of a key: the index of the partition
    MAGIC = 0x31535046      # b"FPS1"
    PROTOCOL_VERSION = 3
    HEADER_BYTES = 48

cdef enum FrameKind:
    KIND_PUSH = 1           # worker -> owner: one chunk of one contribution
    KIND_RESULT = 2         # owner -> worker: one chunk of the reduced value
    KIND_PULL = 3           # worker -> owner: no contribution, send me the result
    KIND_ERROR = 4          # owner -> worker: this round fails; length = 0
    KIND_BYE = 5            # either way: orderly end of the link, length = 0
    # between workers; key: the channel, key_version: the operation on it, subject: which message
    KIND_MESSAGE = 6        # bytes of a message; status: of how many in all
    KIND_READY = 7          # receiver: the buffer for a message of `status` bytes is ready
    KIND_OFFER = 8          # sender: announces a message of `status` bytes (rendezvous)
    KIND_CREDIT = 9         # receiver: `status` bytes of unexpected messages were taken
    KIND_REFUSE = 10        # the operation fails; status: why
    # of a window: key: which, key_version: number of the operation; see graph/_windows.pyx
    KIND_WINDOW = 11

cdef enum FrameFlag:
    FLAG_AVERAGE = 1        # divide the sum by the number of workers (Roster.divisor)
    FLAG_NO_RESULT = 2      # the pusher wants an empty RESULT as acknowledgement (broadcast root)
    FLAG_BROADCAST = 4      # the round has one contribution, the root's; others PULL
    FLAG_PLAIN = 8          # of a tensor with a codec: this operation goes unencoded, both ways
