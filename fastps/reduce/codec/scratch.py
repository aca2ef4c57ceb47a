# SPDX-License-Identifier: Apache-2.0
"""The scratch of the kernels of codecs: what lies where in it, and how many words it has.

One place for the kernels, which are compiled with these numbers, and for the coder that lends the
memory. Pure; part of what the cache of machine code is keyed by.
"""

from __future__ import annotations

HISTOGRAM = 2048  # words of topk's histogram, with which scratch begins; its two lists follow
AT_ONCE = 4  # entries that topk writes to a list at once, so a list has as many more than elements


def work_words(count: int) -> int:
    """Return the words of scratch for count elements: what topk needs, which needs most.

    The other kernels begin at word 0 as well: 64 sums of float64, two bytes for each element of a
    block, or, where BytePS's pairs are decoded and added, a word for each element.
    """
    return HISTOGRAM + 2 * (count + AT_ONCE)
