# SPDX-License-Identifier: Apache-2.0
"""Calls that are made again and again begin at once: what is known of them.

To check arrays, names and sizes, to choose a schedule and to make a handle takes Python 15 us
while its code lies in the caches, and 50 after a long copy; the engine needs a third of that. So
a call is looked up by all that was given to it, arrays by shape and dtype. When such a call has
been through once, and was one operation on just these arrays, a Repeated is left here, which
begins the same on others (_repeated.pxi).

Whatever may change what a call means or does forgets them all: invalidate_call_cache(). Threads:
any, with the GIL.
"""

cimport cython
from libc.stdint cimport int64_t

import functools

import numpy as np

cdef enum:
    MANY_CALLS = 512            # of one function, that are known

CACHE_MISS = object()
cdef type ndarray = np.ndarray
cdef list everything = []       # what is known of each function
cdef int64_t changes = 0
cdef set identities = set()     # types of which each object is told apart by what it is


class MeanwhileError(Exception):
    """A call that was made again went well, and something changed while it was under way."""

    def __init__(self, operation, result):
        super().__init__(operation.name)
        self.operation = operation
        self.result = result


def tell_apart(*types):
    """Let calls differ by which object of a type is given, not by what it holds."""
    identities.update(types)


def invalidate_call_cache():
    """Let every call be checked whole again: something has changed."""
    global changes
    changes += 1
    for calls in everything:
        (<Calls>calls).known.clear()


cpdef int64_t current_epoch() noexcept:
    """Count what made them so."""
    return changes


@cython.final
cdef class Calls:
    """Those of one function, which lives as long as the process."""

    def __cinit__(self):
        self.known = {}
        everything.append(self)

    def again(self, tuple args, dict options):
        """Make a call that was made before, and return its result, or CACHE_MISS. Blocks."""
        cdef int64_t before = changes
        cdef list arrays = []
        repeated = self.find(args, options, arrays)
        return CACHE_MISS if repeated is None else repeated.run(arrays, before)

    def begin(self, tuple args, dict options):
        """Begin a call that was made before; give its operation and its result to be, or None."""
        cdef int64_t before = changes
        cdef list arrays = []
        repeated = self.find(args, options, arrays)
        return None if repeated is None else repeated.begin(arrays, before)

    def remember(self, tuple args, dict options, result, operations, int64_t before):
        """Note what a call led to; operations: nothing but these, and they went well.

        before: current_epoch() when the call began.
        """
        cdef list arrays = []
        cdef tuple key
        if len(operations) != 1 or changes != before:
            return
        key = self.key_of(args, options, arrays)
        if key is None:
            return
        group = operations[0].group
        repeated = None if group is None else group.repeated_of(operations[0], arrays, result)
        if repeated is None:
            return
        if len(self.known) >= MANY_CALLS:
            self.known.clear()
        self.known[key] = repeated
        if changes != before:           # while that looked at the key
            self.known.clear()

    cdef find(self, tuple args, dict options, list arrays):
        """Give what was left of a call like this, or None; append its arrays."""
        cdef tuple key
        if not self.known:
            return None
        key = self.key_of(args, options, arrays)
        return None if key is None else self.known.get(key)

    cdef tuple key_of(self, tuple args, dict options, list arrays):
        """Give what tells a call apart, and its arrays; None: it cannot be told."""
        cdef list parts = [len(args)]
        for given in args:
            if not self.add(parts, given, arrays):
                return None
        for word, given in options.items():
            parts.append(word)
            if not self.add(parts, given, arrays):
                return None
        return tuple(parts)

    cdef bint add(self, list parts, given, list arrays) except -1:
        cdef type kind = type(given)
        if kind is ndarray:
            arrays.append(given)
            parts.append(given.shape)
            parts.append(given.dtype)
            return True
        parts.append(given)
        return given is None or kind is str or kind is int or kind in identities or (
            kind is tuple and is_plain(given))


cdef bint is_plain(tuple given) except -1:
    """Return whether a tuple holds integers and such tuples alone, so that it can be a key."""
    for one in given:
        if type(one) is not int and not (type(one) is tuple and is_plain(one)):
            return False
    return True


def cached(start):
    """Have what starts an operation begin at once what it began before.

    start: returns a Handle; on its way to the operation it checks all that was given to it.
    """
    cdef Calls calls = Calls()

    @functools.wraps(start)
    def run(*args, **options):
        begun = calls.begin(args, options)
        if begun is not None:
            return begun[0].group.handle_of(*begun)
        before = current_epoch()
        handle = start(*args, **options)
        operations = handle.operations
        if operations:
            handle.then(lambda result: calls.remember(args, options, result, operations, before))
        return handle

    return run
