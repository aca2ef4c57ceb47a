# SPDX-License-Identifier: Apache-2.0
"""Authenticated encryption of records, and X25519, by the libcrypto of the machine.

Theory of operation. libcrypto is opened at run time (load()), so nothing is linked, and a process
without encryption never opens it. A Cipher is one direction of one connection: a key, and the
number of the next record, which is the nonce and is never sent. So a record that is changed, cut,
left out, repeated or moved to another place, connection or direction does not open. A number is
used once: it advances also when a record fails, and a connection ends with its first failure.

A forked child has the keys and numbers of its parent, and would use them again. So a Cipher works
only in the process that made it, whoever forked and whatever else the child does.

After REKEY_RECORDS records both ends replace the key by one that follows from it and does not lead
back (REKEY of the Noise protocol framework, revision 34, section 4.2). With records of 64 KiB a
key encrypts 2^36 bytes, far below the limit of AES-GCM (RFC 8446, section 5.5).

Threads: load() is called under the GIL; a Cipher is used by one thread at a time.
"""

cimport cython
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from fastps.errors import AuthError, ConfigError, ProtocolError

cdef extern from "<dlfcn.h>" nogil:
    int RTLD_NOW
    int RTLD_LOCAL
    void* dlopen(const char*, int)
    void* dlsym(void*, const char*)

cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void*, void*, void (*)() noexcept nogil)

cdef extern from "<time.h>" nogil:
    struct timespec:
        int64_t tv_sec
        long tv_nsec
    int CLOCK_THREAD_CPUTIME_ID
    int clock_gettime(int, timespec*)

cdef extern from "<string.h>" nogil:
    void explicit_bzero(void*, size_t)

cdef enum:
    KEY_BYTES = 32              # given of every key; AES-128 takes the first half
    SALT_BYTES = 4
    NONCE_BYTES = 12
    CURVE_BYTES = 32            # of X25519: keys and secrets
    SET_TAG = 0x11              # EVP_CTRL_AEAD_SET_TAG, evp.h
    GET_TAG = 0x10              # EVP_CTRL_AEAD_GET_TAG
    X25519_ID = 1034            # NID_X25519, obj_mac.h
    KINDS = 3
    REKEY_RECORDS = 1 << 20     # records of one key; a power of two
    MEASURE_NS = 20000000       # processor time of a measurement

SECRET_BYTES = KEY_BYTES + SALT_BYTES
SEAL_BYTES = TAG_BYTES
OLDEST = 0x10101000             # 1.1.1, the first with X25519

ctypedef void* (*make_fn)() noexcept nogil
ctypedef void (*free_fn)(void*) noexcept nogil
ctypedef int (*init_fn)(
    void*, const void*, void*, const unsigned char*, const unsigned char*, int) noexcept nogil
ctypedef int (*update_fn)(void*, void*, int*, const void*, int) noexcept nogil
ctypedef int (*final_fn)(void*, void*, int*) noexcept nogil
ctypedef int (*control_fn)(void*, int, int, void*) noexcept nogil
ctypedef int (*one_fn)(void*) noexcept nogil
ctypedef int (*two_fn)(void*, void*) noexcept nogil
ctypedef int (*bytes_fn)(void*, unsigned char*, size_t*) noexcept nogil
ctypedef void* (*raw_fn)(int, void*, const unsigned char*, size_t) noexcept nogil
ctypedef void* (*derivation_fn)(void*, void*) noexcept nogil
ctypedef unsigned long (*number_fn)() noexcept nogil
ctypedef const char* (*text_fn)(int) noexcept nogil

cdef struct Library:            # functions of the libcrypto in use
    make_fn context_new
    free_fn context_free
    init_fn init
    update_fn update
    final_fn final
    control_fn control
    make_fn ciphers[KINDS]      # by Kind
    raw_fn private_key
    raw_fn public_key
    bytes_fn raw_public
    free_fn key_free
    derivation_fn derivation
    free_fn derivation_free
    one_fn derive_init
    two_fn derive_peer
    bytes_fn derive
    number_fn number
    text_fn text

cdef Library lib
cdef str loaded = ""            # version of the library; empty: none yet
cdef unsigned char ZEROS[64]
cdef int forks = 0              # between the process that called load() and this one

_NAMES = (
    b"EVP_CIPHER_CTX_new", b"EVP_CIPHER_CTX_free", b"EVP_CipherInit_ex", b"EVP_CipherUpdate",
    b"EVP_CipherFinal_ex", b"EVP_CIPHER_CTX_ctrl", b"EVP_aes_128_gcm", b"EVP_aes_256_gcm",
    b"EVP_chacha20_poly1305", b"EVP_PKEY_new_raw_private_key", b"EVP_PKEY_new_raw_public_key",
    b"EVP_PKEY_get_raw_public_key", b"EVP_PKEY_free", b"EVP_PKEY_CTX_new", b"EVP_PKEY_CTX_free",
    b"EVP_PKEY_derive_init", b"EVP_PKEY_derive_set_peer", b"EVP_PKEY_derive",
    b"OpenSSL_version_num", b"OpenSSL_version",
)


# ---------------------------------------------------------------- the library

cdef bint resolve(const char* path, Library* found):
    """Open a library and find its functions, in the order of the struct; False: it lacks some."""
    cdef void* handle
    cdef void** place = <void**>found
    cdef const char* name
    with nogil:
        handle = dlopen(path, RTLD_NOW | RTLD_LOCAL)
    if handle == NULL:
        return False
    for one in _NAMES:
        name = one
        place[0] = dlsym(handle, name)
        if place[0] == NULL:
            return False
        place += 1
    return True


def load(candidates):
    """Open the newest libcrypto of some names or paths, once; return its version.

    Raises ConfigError where none of them is OpenSSL 1.1.1 or later.
    """
    global loaded, lib
    cdef Library found
    cdef unsigned long newest = 0
    if loaded:
        return loaded
    if sizeof(Library) != len(_NAMES) * sizeof(void*):
        raise SystemError("the names of libcrypto's functions do not fit their struct")
    for path in candidates:
        if resolve(path, &found) and found.number() >= <unsigned long>max(OLDEST, newest + 1):
            newest, lib = found.number(), found
    if not newest:
        raise ConfigError(
            "encryption needs libcrypto of OpenSSL 1.1.1 or later, and this machine has none; "
            "install it (Debian: apt install libssl3; Fedora: dnf install openssl-libs; conda: "
            "conda install openssl)"
        )
    if pthread_atfork(NULL, NULL, count_fork):
        raise MemoryError("no memory to be called in forked children")
    loaded = lib.text(0).decode(errors="replace")
    return loaded


cdef void count_fork() noexcept nogil:
    global forks                # in the child, which has one thread
    forks += 1


# ---------------------------------------------------------------- records

cdef Cipher* cipher_create(
    int kind, const unsigned char* secret, bint is_sealing, bint hides,
) noexcept nogil:
    cdef Cipher* cipher = NULL
    if lib.context_new != NULL:
        cipher = <Cipher*>calloc(1, sizeof(Cipher))
    if cipher == NULL:
        return NULL
    cipher.is_sealing, cipher.hides, cipher.forks = is_sealing, hides, forks
    cipher.key_bytes = KEY_BYTES // 2 if kind == 0 else KEY_BYTES
    memcpy(cipher.salt, secret + KEY_BYTES, SALT_BYTES)
    cipher.context = lib.context_new()
    if cipher.context == NULL or not lib.init(
            cipher.context, lib.ciphers[kind](), NULL, secret, NULL, is_sealing):
        cipher_free(cipher)
        return NULL
    return cipher


cdef void cipher_free(Cipher* cipher) noexcept nogil:
    if cipher != NULL:
        cipher_wipe(cipher)
        free(cipher)


cdef void cipher_wipe(Cipher* cipher) noexcept nogil:
    if cipher != NULL and cipher.context != NULL:
        lib.context_free(cipher.context)    # overwrites the key
        cipher.context = NULL


cdef void write_nonce(const Cipher* cipher, uint64_t number, unsigned char* nonce) noexcept nogil:
    memcpy(nonce, cipher.salt, SALT_BYTES)
    memcpy(nonce + SALT_BYTES, &number, sizeof(number))


cdef bint replace_key(Cipher* cipher) noexcept nogil:
    """Encrypt zeros with the last nonce, which no record has, and take that for the key."""
    cdef unsigned char nonce[NONCE_BYTES]
    cdef unsigned char key[KEY_BYTES]
    cdef int written
    cdef bint is_done
    write_nonce(cipher, <uint64_t>-1, nonce)
    is_done = (     # a stream of bits is added: opening zeros and sealing them is the same
        lib.init(cipher.context, NULL, NULL, NULL, nonce, -1)
        and lib.update(cipher.context, key, &written, ZEROS, KEY_BYTES)
        and lib.init(cipher.context, NULL, NULL, key, NULL, -1)
    )
    explicit_bzero(key, KEY_BYTES)
    return is_done


cdef int begin_record(
    Cipher* cipher, const void* head, int head_bytes, const void* data, int nbytes, void* out,
) noexcept nogil:
    cdef unsigned char nonce[NONCE_BYTES]
    cdef uint64_t number = cipher.number
    cdef int written
    if cipher.context == NULL or cipher.forks != forks or number == <uint64_t>-1:
        return -1
    cipher.number = number + 1
    if number % REKEY_RECORDS == 0 and number and not replace_key(cipher):
        return -1
    write_nonce(cipher, number, nonce)
    if not lib.init(cipher.context, NULL, NULL, NULL, nonce, -1):
        return -1
    if head_bytes and not lib.update(cipher.context, NULL, &written, head, head_bytes):
        return -1
    if nbytes and not lib.update(
            cipher.context, out if cipher.hides else NULL, &written, data, nbytes):
        return -1
    return 0


cdef int cipher_seal(
    Cipher* cipher, const void* head, int head_bytes, const void* data, int nbytes, void* out,
    void* tag,
) noexcept nogil:
    cdef unsigned char rest[TAG_BYTES]
    cdef int written
    if not cipher.is_sealing or begin_record(cipher, head, head_bytes, data, nbytes, out) != 0:
        return -1
    if not lib.final(cipher.context, rest, &written):
        return -1
    return 0 if lib.control(cipher.context, GET_TAG, TAG_BYTES, tag) else -1


cdef int cipher_open(
    Cipher* cipher, const void* head, int head_bytes, const void* data, int nbytes, void* out,
    const void* tag,
) noexcept nogil:
    cdef unsigned char rest[TAG_BYTES]
    cdef int written
    if cipher.is_sealing or begin_record(cipher, head, head_bytes, data, nbytes, out) != 0:
        return -1
    if not lib.control(cipher.context, SET_TAG, TAG_BYTES, <void*>tag):
        return -1
    return 0 if lib.final(cipher.context, rest, &written) else -1


cdef class _Direction:
    """One direction of a connection, for Python: messages of any size, one thread at a time."""

    cdef Cipher* cipher

    cdef int begin(self, int kind, bytes secret, bint is_sealing, bint hides) except -1:
        cdef const unsigned char* content = secret
        if not loaded:
            raise ConfigError("load() was not called before")
        if not 0 <= kind < KINDS or len(secret) != SECRET_BYTES:
            raise ValueError(f"kind {kind} and {len(secret)} bytes are not a cipher and its key")
        self.cipher = cipher_create(kind, content, is_sealing, hides)
        if self.cipher == NULL:
            raise MemoryError("no memory for a cipher")
        return 0

    def __dealloc__(self):
        cipher_free(self.cipher)

    def wipe(self):
        """Overwrite the key, in a forked child: nothing is sealed or opened from now on."""
        cipher_wipe(self.cipher)

    @property
    def number(self):
        """The number of the next record."""
        return self.cipher.number

    def skip_to(self, uint64_t number):
        """Go on with a later record. For tests: those between are never made."""
        if number < self.cipher.number:
            raise ValueError(f"number {number} was used already")
        self.cipher.number = number


@cython.final
cdef class Sealer(_Direction):
    """Seal messages of one direction of a connection, in their order."""

    def __cinit__(self, int kind, bytes secret, *, bint hides=True):
        self.begin(kind, secret, True, hides)

    def seal(self, data, bytes head=b""):
        """Return the tag and the encrypted data; head is authenticated too and goes in clear."""
        cdef bytearray made = bytearray(TAG_BYTES)
        cdef const char* start = head
        cdef char* out
        cdef int status
        made += data
        out = made
        status = cipher_seal(self.cipher, start, <int>len(head), out + TAG_BYTES,
                             <int>len(made) - TAG_BYTES, out + TAG_BYTES, out)
        if status != 0:
            raise AuthError("a message could not be sealed; its connection has to end")
        return made


@cython.final
cdef class Opener(_Direction):
    """Open messages of the other direction, in their order."""

    def __cinit__(self, int kind, bytes secret, *, bint hides=True):
        self.begin(kind, secret, False, hides)

    def open(self, bytes sealed, bytes head=b""):
        """Return the data of seal(). Raises ProtocolError: another message came, or none of it.

        The connection has to end then.
        """
        cdef const char* tag = sealed
        cdef const char* start = head
        cdef int nbytes = <int>len(sealed) - TAG_BYTES
        cdef bytearray made
        cdef char* out
        if nbytes < 0:
            raise ProtocolError(f"a sealed message of {len(sealed)} bytes has no tag")
        made = bytearray(sealed[TAG_BYTES:])
        out = made
        if cipher_open(self.cipher, start, <int>len(head), out, nbytes, out, tag) != 0:
            raise ProtocolError(
                "a sealed message was changed, left out, repeated or moved on its way, or "
                "somebody else sent it"
            )
        return made


def measure(int kind):
    """Return how many bytes a second one thread seals, in records of 64 KiB."""
    cdef bytes secret = bytes(SECRET_BYTES)
    cdef const unsigned char* content = secret
    cdef Cipher* cipher = cipher_create(kind, content, True, True)
    cdef char* data = <char*>calloc(1, RECORD_BYTES)
    cdef unsigned char tag[TAG_BYTES]
    cdef int64_t began, spent = 0
    cdef int64_t count = 0
    if cipher == NULL or data == NULL:
        cipher_free(cipher)
        free(data)
        raise MemoryError("no memory for a measurement")
    with nogil:
        cipher_seal(cipher, NULL, 0, data, RECORD_BYTES, data, tag)
        began = processor_ns()
        while spent < MEASURE_NS:
            cipher_seal(cipher, NULL, 0, data, RECORD_BYTES, data, tag)
            count += RECORD_BYTES
            spent = processor_ns() - began
    cipher_free(cipher)
    free(data)
    return count * 1e9 / spent


cdef int64_t processor_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now)
    return now.tv_sec * 1000000000 + now.tv_nsec


# ---------------------------------------------------------------- X25519

cdef void* private_of(bytes private) except NULL:
    cdef const unsigned char* content = private
    if not loaded:
        raise ConfigError("load() was not called before")
    if len(private) != CURVE_BYTES:
        raise ValueError(f"a private key has {CURVE_BYTES} bytes, got {len(private)}")
    cdef void* key = lib.private_key(X25519_ID, NULL, content, CURVE_BYTES)
    if key == NULL:
        raise MemoryError("no memory for a key")
    return key


def public_key(bytes private):
    """Return the X25519 public key of a private one; both have 32 bytes (RFC 7748)."""
    cdef void* key = private_of(private)
    cdef unsigned char found[CURVE_BYTES]
    cdef size_t size = CURVE_BYTES
    cdef int is_done = lib.raw_public(key, found, &size)
    lib.key_free(key)
    if not is_done:
        raise MemoryError("no memory for a key")
    return found[:CURVE_BYTES]


def shared_secret(bytes private, bytes public):
    """Return the X25519 secret that both owners of the keys compute, 32 bytes.

    Raises AuthError for a public key of small order, with which the secret would be zero.
    """
    cdef const unsigned char* content = public
    cdef unsigned char found[CURVE_BYTES]
    cdef size_t size = CURVE_BYTES
    cdef void* own
    cdef void* other
    cdef void* derivation
    cdef bint is_done
    if len(public) != CURVE_BYTES:
        raise ValueError(f"a public key has {CURVE_BYTES} bytes, got {len(public)}")
    own = private_of(private)
    memset(found, 0, CURVE_BYTES)
    other = lib.public_key(X25519_ID, NULL, content, CURVE_BYTES)
    derivation = lib.derivation(own, NULL)
    is_done = (
        other != NULL and derivation != NULL and lib.derive_init(derivation) > 0
        and lib.derive_peer(derivation, other) > 0
        and lib.derive(derivation, found, &size) > 0
    )
    lib.derivation_free(derivation)
    lib.key_free(other)
    lib.key_free(own)
    secret = found[:CURVE_BYTES]
    explicit_bzero(found, CURVE_BYTES)
    if not is_done or not any(secret):
        raise AuthError("the peer sent a public key that leads to no secret")
    return secret
