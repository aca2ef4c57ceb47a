# SPDX-License-Identifier: Apache-2.0
# Seal and open the records of one direction of a connection, without the GIL; see _cipher.pyx.

from libc.stdint cimport uint64_t

cdef enum:
    TAG_BYTES = 16
    RECORD_BYTES = 64 << 10     # most bytes of one record of a data connection

cdef struct Cipher:             # one direction of one connection; used by one thread at a time
    void* context               # of libcrypto, with the key in it
    uint64_t number             # of the next record, which is its nonce; never used twice
    unsigned char salt[4]       # the rest of the nonce
    int key_bytes
    int forks                   # of the process that made it: a forked child may not use it
    bint is_sealing             # else it opens
    bint hides                  # else records are readable, and only authenticated

# Return NULL if there is no memory or no library. secret: SECRET_BYTES; kind: a Kind of
# ciphers.py. load() is called before.
cdef Cipher* cipher_create(
    int kind, const unsigned char* secret, bint is_sealing, bint hides,
) noexcept nogil
cdef void cipher_free(Cipher* cipher) noexcept nogil            # also NULL; overwrites the key
# Overwrite the key in a forked child, where no record may be sealed or opened any more.
cdef void cipher_wipe(Cipher* cipher) noexcept nogil
# Process the next record: nbytes at data come out at out, which may be the same place, and
# head_bytes at head are authenticated only. seal writes the tag, open compares it. 0, or negative:
# the record is wrong, or libcrypto failed, and the connection has to end. Without `hides`, out is
# not written.
cdef int cipher_seal(
    Cipher* cipher, const void* head, int head_bytes, const void* data, int nbytes, void* out,
    void* tag,
) noexcept nogil
cdef int cipher_open(
    Cipher* cipher, const void* head, int head_bytes, const void* data, int nbytes, void* out,
    const void* tag,
) noexcept nogil
