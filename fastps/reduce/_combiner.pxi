# SPDX-License-Identifier: Apache-2.0
# Part of _partition.pyx.
#
# The combiner of one partition: what a rule makes of updates, by the kernels of this room.
#
# Knows neither keys nor peers. Rules that look at each element by itself take one pass, in which
# NaN and infinity are noticed; then the sources that have them are found and left out, and what is
# left goes another way, for any number. All other rules end in a mix of the updates by weights
# (or, Bulyan, in a rule by element of some of them), and these follow from norms or from distances
# between all pairs alone. So a rule looks at each part of the updates once, when it comes (look),
# then decides (weigh), however many iterations it has, and makes the result part by part (finish).
# Lengths are enough to clip, and to clip once around the last result distances to that. With z =
# sum of w_j u_j, where the w_j add up to 1,
#
#     |u_i - z|^2 = sum_j w_j D_ij - 1/2 sum_jk w_j w_k D_jk,    D_jk = |u_j - u_k|^2
#
# (schoolbook algebra: expand both sides around any point). The last result, where centered
# clipping begins, is one more such u. Updates may be clipped and mixed before a rule, to rows
# y_i = sum of P_ij u_j. Lengths and distances of these follow from the same numbers, and weights
# of the y are weights of the u; only rules by element need the y themselves, piece by piece.
# fastps/byzantine/reference.py has the formulas in NumPy.

cdef enum:
    DONE = 1                    # of kernels
    E_PROTOCOL = -4             # of _core.pxd, as in kernels.py
    NOT_FINITE = 2              # of combine_kernels.py
    PIECE = 1 << 12             # elements of all sources that are looked at before the next
    MIXED = 1 << 10             # elements of mixed updates that are made at a time, in the cache

cdef double FARTHEST = 1e300    # of squares of distances: their sums stay finite
cdef double TINY = 1e-300       # in place of a length of 0

cdef int AVERAGE = Kind.AVERAGE
cdef int MEAN_AROUND_MEDIAN = Kind.MEAN_AROUND_MEDIAN
cdef int MEDIAN = Kind.MEDIAN
cdef int NORM_CLIPPING = Kind.NORM_CLIPPING
cdef int CENTERED_CLIPPING = Kind.CENTERED_CLIPPING
cdef int GEOMETRIC_MEDIAN = Kind.GEOMETRIC_MEDIAN
cdef int KRUM = Kind.KRUM
cdef int BULYAN = Kind.BULYAN
cdef int OWN = Kind.OWN
cdef int MDA = Kind.MDA
cdef int SMEA = Kind.SMEA
cdef int CAF = Kind.CAF


cdef inline uint64_t mixed_bytes(Combining* how) noexcept nogil:
    """Return the bytes of a piece of all mixed updates."""
    if not (how.is_mixed and how.is_by_element):
        return 0
    return <uint64_t>how.slots * min(<uint64_t>MIXED, round_up(how.count)) * how.itemsize


cdef void lay_out(Combining* how, Table* table, char* room) noexcept nogil:
    """Put a table's numbers into room of scratch_bytes."""
    table.squares = <double*>room
    table.part = table.squares + how.slots * how.slots
    table.norms = table.part + how.slots * how.slots
    table.weights = table.norms + how.slots
    table.mixes = table.weights + how.slots
    table.n_mixes = 0
    table.room = table.mixes + (how.slots * how.slots if how.is_mixed else 0)
    table.mixed = <char*>round_up(<uintptr_t>(
        table.room + (2 * how.slots * how.slots if how.kind in (SMEA, CAF) else 0)))
    table.buckets = table.mixed + mixed_bytes(how)


# ---------------------------------------------------------------- who counts

cdef int64_t refuse(Combining* how, const void* const* sources, int64_t n, Table* table,
                    uint8_t* refused) noexcept nogil:
    """List the sources whose norms are numbers."""
    cdef int64_t j, status = how.norms(sources, n, table.norms, how.count, NULL)
    table.m = 0
    for j in range(n):
        refused[j] = not isfinite(table.norms[j])
        if not refused[j]:
            table.rows[table.m] = sources[j]
            table.m += 1
    return status


cdef void draw_order(Combining* how, uint32_t version, int32_t* order, int32_t m) noexcept nogil:
    """Shuffle by Fisher and Yates."""
    cdef uint64_t base = mix_bits(how.seed ^ mix_bits(version))
    cdef int32_t last, other
    for last in range(m):
        order[last] = last
    for last in range(m - 1, 0, -1):
        other = <int32_t>(mix_bits(base + <uint64_t>last) % <uint64_t>(last + 1))
        order[last], order[other] = order[other], order[last]


cdef int64_t fill_buckets(Combining* how, Table* table, uint32_t version) noexcept nogil:
    """Replace the updates by means of random buckets."""
    cdef int32_t order[MAX_VOICES]
    cdef const void* some[MAX_VOICES]
    cdef const void* means[MAX_VOICES]
    cdef int32_t first = 0, j, size, n = 0
    cdef int64_t status
    draw_order(how, version, order, table.m)
    while first < table.m:
        size = min(how.bucket, table.m - first)
        for j in range(size):
            some[j] = table.rows[order[first + j]]
            table.weights[j] = 1.0 / size
        means[n] = table.buckets + <uint64_t>n * round_up(how.count * how.itemsize)
        status = how.mix(some, size, <void*>means[n], how.count, table.weights)
        if status != DONE:
            return status
        first += size
        n += 1
    table.m = n
    memcpy(table.rows, means, n * sizeof(void*))
    return DONE


# ---------------------------------------------------------------- looking at whole updates

cdef inline bint is_one_step(Combining* how) noexcept nogil:
    """Return whether clipping needs only distances to the last result."""
    return how.kind == CENTERED_CLIPPING and how.iterations == 1 and not how.is_mixed


cdef int32_t gather_rows(Combining* how, const void* const* sources, int64_t n, uint64_t first,
                         const void** rows) noexcept nogil:
    """List the rows that have distances: the updates, and the last result if it is kept."""
    memcpy(rows, sources, n * sizeof(void*))
    if how.last == NULL:
        return <int32_t>n
    rows[n] = how.last + first * how.itemsize
    return <int32_t>n + 1


cdef int64_t look_from_last(Combining* how, const void* const* sources, int64_t n,
                            uint64_t first, uint64_t count, Table* table) noexcept nogil:
    """Add squared distances to the last result, in pieces that stay in the caches."""
    cdef const void* pair[2]
    cdef double squares[4]
    cdef uint64_t start = 0, size
    cdef int64_t status = DONE
    cdef int32_t i
    if not first:
        memset(table.norms, 0, n * sizeof(double))
    while start < count and status == DONE:
        size = min(count - start, PIECE)
        pair[1] = how.last + (first + start) * how.itemsize
        for i in range(<int32_t>n):
            pair[0] = <const char*>sources[i] + start * how.itemsize
            status = how.distances(pair, 2, squares, size, NULL)
            table.norms[i] += squares[1]
        start += size
    return status


cdef int64_t look(Combining* how, const void* const* sources, int64_t n, uint64_t first,
                  uint64_t count, Table* table) noexcept nogil:
    cdef const void* rows[SLOTS]
    cdef int32_t i, all = gather_rows(how, sources, n, first, rows)
    cdef int32_t measured = all if how.is_mixed else <int32_t>n
    cdef bint has_pairs = how.kind != NORM_CLIPPING or how.is_mixed
    cdef uint64_t start = 0, size
    cdef int64_t status = DONE
    if is_one_step(how):
        return look_from_last(how, sources, n, first, count, table)
    if not first:
        memset(table.norms, 0, all * sizeof(double))
        memset(table.squares, 0, all * all * sizeof(double))
    while start < count and status == DONE:
        size = min(count - start, PIECE)
        status = how.norms(rows, measured, table.part, size, NULL)     # reads memory in one stream
        for i in range(measured):
            table.norms[i] += table.part[i]
        if has_pairs and status == DONE:
            status = how.distances(rows, all, table.part, size, NULL)
            for i in range(all * all):
                table.squares[i] += table.part[i]
        for i in range(all):
            rows[i] = <const char*>rows[i] + size * how.itemsize
        start += size
    return status


cdef void keep_sound(Combining* how, int32_t n, Table* table, uint8_t* refused) noexcept nogil:
    """List the updates with finite norms, and compact their distances."""
    cdef int32_t i, j, all = n + (how.last != NULL)
    table.m = 0
    for i in range(n):
        refused[i] = not isfinite(table.norms[i])
        if not refused[i]:
            table.norms[table.m] = table.norms[i]
            table.who[table.m] = i
            table.m += 1
    table.who[table.m] = n
    table.norms[table.m] = table.norms[n]       # of the last result, if there is one
    n = 0 if is_one_step(how) else table.m + (how.last != NULL)
    for i in range(n):
        for j in range(n):
            table.part[i * n + j] = fmin(table.squares[table.who[i] * all + table.who[j]],
                                         FARTHEST)
    table.squares, table.part = table.part, table.squares


# ---------------------------------------------------------------- before the rule

cdef int32_t lies_before(int32_t f, int32_t m) noexcept nogil:
    return min(f, max((m - 1) // 2, 0))


cdef void clip_longest(Combining* how, Table* table, double* scales) noexcept nogil:
    """Shorten updates to a radius, or the k longest to the length of the next; scales: by what."""
    cdef int32_t i, j, m = table.m, n = m + (how.last != NULL)
    cdef int32_t f = lies_before(how.arc, m)
    cdef int32_t k = 2 * f * (m - f) // m
    cdef double limit, products
    cdef double* ordered = table.weights
    for i in range(m):
        j = i
        while j > 0 and ordered[j - 1] > table.norms[i]:
            ordered[j] = ordered[j - 1]
            j -= 1
        ordered[j] = table.norms[i]
    limit = how.clip * how.clip if how.clip else ordered[m - k - 1]
    for i in range(m):
        if table.norms[i] > limit:
            scales[i] = sqrt(limit / table.norms[i])
    for i in range(n):
        for j in range(n):
            products = table.norms[i] + table.norms[j] - table.squares[i * n + j]
            if scales[i] != 1 or scales[j] != 1:
                table.squares[i * n + j] = 0 if i == j else fmax(
                    scales[i] * scales[i] * table.norms[i]
                    + scales[j] * scales[j] * table.norms[j]
                    - scales[i] * scales[j] * products, 0.0)
    for i in range(m):
        table.norms[i] *= scales[i] * scales[i]


cdef void list_nearest(Combining* how, Table* table, int32_t n) noexcept nogil:
    """Let each mix be the mean of an update and those nearest to it; of as near ones the first."""
    cdef int32_t nearest[SLOTS]
    cdef int32_t i, j, k, m = table.m
    cdef int32_t keep = m - lies_before(how.nnm, m)
    cdef double* squares
    for i in range(m):
        squares = table.squares + i * n
        for j in range(m):
            k = j
            while k > 0 and squares[nearest[k - 1]] > squares[j]:
                nearest[k] = nearest[k - 1]
                k -= 1
            nearest[k] = j
        table.mixes[i * n + i] = 0
        for j in range(keep):
            table.mixes[i * n + nearest[j]] = 1.0 / keep


cdef void measure_mixes(Table* table, int32_t n) noexcept nogil:
    """Replace norms and squared distances of updates by those of their mixes.

    As in the formula above: of mixes N, with F = N D N', D_ij = F_ij - (F_ii + F_jj) / 2, and the
    square of a length is sum_k N_ik |u_k|^2 - F_ii / 2.
    """
    cdef double spreads[SLOTS]
    cdef double* row
    cdef double total
    cdef int32_t i, j, k
    for i in range(n):
        row = table.part + i * n
        memset(row, 0, n * sizeof(double))
        for k in range(n):
            if table.mixes[i * n + k] != 0:
                for j in range(n):
                    row[j] += table.mixes[i * n + k] * table.squares[k * n + j]
        spreads[i] = 0
        table.weights[i] = 0
        for k in range(n):
            spreads[i] += row[k] * table.mixes[i * n + k] / 2
            table.weights[i] += table.mixes[i * n + k] * table.norms[k]
    for i in range(n):
        table.norms[i] = fmax(table.weights[i] - spreads[i], 0.0)
        for j in range(i + 1):
            total = 0
            if memcmp(table.mixes + i * n, table.mixes + j * n, n * sizeof(double)):
                for k in range(n):
                    total += table.part[i * n + k] * table.mixes[j * n + k]
                total = fmin(fmax(total - spreads[i] - spreads[j], 0.0), FARTHEST)
            table.squares[i * n + j] = table.squares[j * n + i] = total


cdef void mix_first(Combining* how, Table* table) noexcept nogil:
    """Clip, then mix: what rules see are the mixes from here on."""
    cdef double scales[SLOTS]
    cdef int32_t i, j, n = table.m + (how.last != NULL)
    memset(table.mixes, 0, n * n * sizeof(double))
    for i in range(n):
        scales[i] = table.mixes[i * n + i] = 1
        table.who[i] = i
    if how.arc or how.clip:
        clip_longest(how, table, scales)
    if how.nnm:
        list_nearest(how, table, n)
        measure_mixes(table, n)
    for i in range(n):
        for j in range(n):
            table.mixes[i * n + j] *= scales[j]


cdef void of_updates(Combining* how, Table* table, const int32_t* who, int32_t m) noexcept nogil:
    """Turn weights of mixes into weights of updates, or list the mixes to make."""
    cdef int32_t i, j, has_last = how.last != NULL
    cdef int32_t n = m + has_last, rows = table.m + has_last
    memset(table.part, 0, n * n * sizeof(double))
    for i in range(rows):
        for j in range(n):
            if how.is_by_element:
                table.part[i * n + j] = table.mixes[table.who[i] * n + j]
            else:
                table.part[j] += table.weights[i] * table.mixes[table.who[i] * n + j]
    if how.is_by_element:
        table.mixes, table.part = table.part, table.mixes
        table.n_mixes = rows
    else:
        memcpy(table.weights, table.part, n * sizeof(double))
    memcpy(table.who, who, n * sizeof(int32_t))
    table.m = m


# ---------------------------------------------------------------- weights from distances

cdef double to_mean(Table* table, int32_t n, int32_t i) noexcept nogil:
    """Sum the weighted distances of one row to all."""
    cdef double total = 0
    cdef int32_t j
    for j in range(n):
        total += table.weights[j] * table.squares[i * n + j]
    return total


cdef void lengths_to_mix(Table* table, int32_t n, double* lengths) noexcept nogil:
    """Compute the distance of each row to the mix by the weights, which add up to 1."""
    cdef double spread = 0
    cdef int32_t i
    for i in range(n):
        lengths[i] = to_mean(table, n, i)
        spread += table.weights[i] * lengths[i]
    for i in range(n):
        lengths[i] = sqrt(fmax(lengths[i] - spread / 2, 0.0))


cdef void weigh_geometric(Combining* how, Table* table) noexcept nogil:
    """Weigh rows by smoothed Weiszfeld steps, from the mean on."""
    cdef double lengths[SLOTS]
    cdef double total
    cdef int32_t i, _step
    for i in range(table.m):
        table.weights[i] = 1.0 / table.m
    for _step in range(how.iterations):
        lengths_to_mix(table, table.m, lengths)
        total = 0
        for i in range(table.m):
            table.weights[i] = 1.0 / fmax(lengths[i], fmax(how.nu, TINY))
            total += table.weights[i]
        for i in range(table.m):
            table.weights[i] /= total


cdef void weigh_centered(Combining* how, Table* table) noexcept nogil:
    """Weigh rows by steps from the last result, row m, towards clipped updates."""
    cdef double lengths[SLOTS]
    cdef double factor, moved
    cdef int32_t i, _step, m = table.m
    memset(table.weights, 0, (m + 1) * sizeof(double))
    table.weights[m] = 1
    for _step in range(how.iterations):
        if is_one_step(how):
            for i in range(m):
                lengths[i] = sqrt(table.norms[i])
        else:
            lengths_to_mix(table, m + 1, lengths)
        moved = 0
        for i in range(m):
            lengths[i] = fmin(1.0, how.radius / fmax(lengths[i], TINY)) / m
            moved += lengths[i]
        for i in range(m + 1):
            factor = lengths[i] if i < m else 0.0
            table.weights[i] = table.weights[i] * (1 - moved) + factor


# ---------------------------------------------------------------- Krum and its kin

cdef double krum_score(Table* table, int32_t i, const uint8_t* is_out, int32_t left,
                       int32_t f) noexcept nogil:
    """Sum the squared distances of one update to its nearest others among those left."""
    cdef double nearest[SLOTS]
    cdef double square, total = 0
    cdef int32_t j, k, n = 0
    for j in range(table.m):
        if j == i or is_out[j]:
            continue
        square = table.squares[i * table.m + j]
        k = n
        while k > 0 and nearest[k - 1] > square:
            nearest[k] = nearest[k - 1]
            k -= 1
        nearest[k] = square
        n += 1
    for j in range(min(max(left - f - 2, 1), n)):
        total += nearest[j]
    return total


cdef int32_t best_left(Table* table, const double* scores, const uint8_t* is_out) noexcept nogil:
    """Find the least score of those left; of equal ones the first."""
    cdef int32_t i, best = -1
    for i in range(table.m):
        if not is_out[i] and (best < 0 or scores[i] < scores[best]):
            best = i
    return best


cdef void choose(Table* table, int32_t keep, bint scores_anew) noexcept nogil:
    """Keep the rows that Krum scores best, the best first; scores_anew: among those left."""
    cdef double scores[MAX_VOICES]
    cdef uint8_t is_out[MAX_VOICES]
    cdef int32_t chosen[MAX_VOICES]
    cdef int32_t i, best, n
    memset(is_out, 0, sizeof(is_out))
    for n in range(keep):
        if n == 0 or scores_anew:
            for i in range(table.m):
                if not is_out[i]:
                    scores[i] = krum_score(table, i, is_out, table.m - n, table.f)
        best = best_left(table, scores, is_out)
        is_out[best] = True
        chosen[n] = table.who[best]
    memcpy(table.who, chosen, keep * sizeof(int32_t))
    table.m = keep


cdef void weigh_evenly(Table* table) noexcept nogil:
    cdef int32_t i
    for i in range(table.m):
        table.weights[i] = 1.0 / table.m


cdef void weigh_chosen(Combining* how, Table* table) noexcept nogil:
    """Choose by Krum's score; Bulyan's scores are of those that are left each time."""
    cdef int32_t keep = how.keep if how.keep else table.m - table.f
    if how.kind == KRUM:
        keep = 1
    elif how.kind == BULYAN:
        keep = table.m - 2 * table.f
    choose(table, min(keep, table.m), how.kind == BULYAN)
    weigh_evenly(table)


cdef void keep_subset(Combining* how, Table* table) noexcept nogil:
    """Average the rows of the best subset."""
    cdef int32_t best[MAX_VOICES]
    cdef int32_t i, keep = table.m - table.f
    choose_subset(table.squares, table.m, keep, how.kind == SMEA, best, table.room)
    for i in range(keep):
        table.who[i] = table.who[best[i]]
    table.m = keep
    weigh_evenly(table)


cdef void weigh_clipped(Combining* how, Table* table) noexcept nogil:
    cdef int32_t i
    for i in range(table.m):
        table.weights[i] = fmin(1.0, how.radius / fmax(sqrt(table.norms[i]), TINY)) / table.m


cdef void weigh(Combining* how, int64_t n, Table* table, uint8_t* refused) noexcept nogil:
    cdef int32_t who[SLOTS]
    cdef int32_t m
    keep_sound(how, <int32_t>n, table, refused)
    table.f = how.lies[table.m]
    if table.f < 0:
        table.m = 0
        return
    m = table.m
    if how.is_mixed:
        memcpy(who, table.who, (m + 1) * sizeof(int32_t))
        mix_first(how, table)
    if how.kind == NORM_CLIPPING:
        weigh_clipped(how, table)
    elif how.kind == GEOMETRIC_MEDIAN:
        weigh_geometric(how, table)
    elif how.kind == CENTERED_CLIPPING:
        weigh_centered(how, table)
    elif how.kind == AVERAGE:
        weigh_evenly(table)
    elif how.kind == CAF:
        weigh_filtered(table.squares, table.m, table.f, table.weights, table.room)
    elif how.kind in (MDA, SMEA):
        keep_subset(how, table)
    elif not how.is_by_element or how.kind == BULYAN:
        weigh_chosen(how, table)
    if how.is_mixed:
        of_updates(how, table, who, m)


# ---------------------------------------------------------------- results

cdef int64_t mix_rows(Combining* how, const void* const* rows, int32_t m, const double* weights,
                      void* dst, uint64_t count) noexcept nogil:
    if m == 1 and weights[0] == 1:
        memcpy(dst, rows[0], count * how.itemsize)
        return DONE
    return how.mix(rows, m, dst, count, weights)


cdef int64_t by_element(Combining* how, const void* const* rows, int32_t m, int32_t f, void* dst,
                        uint64_t count) noexcept nogil:
    """Make each element by itself, of any number of updates."""
    cdef int64_t args[2]
    args[0] = f
    args[1] = m - f
    if how.kind in (MEDIAN, MEAN_AROUND_MEDIAN, BULYAN):
        args[0] = (m - 1) // 2
    if how.kind == BULYAN:
        args[1] = m - 2 * f
    return how.plain(rows, m, dst, count, args)


cdef int64_t middle_of(Combining* how, const void* const* rows, int32_t m, int32_t f, void* dst,
                       uint64_t count) noexcept nogil:
    """Make each element by itself, in the fast way where that is for as many."""
    cdef int64_t status = NOT_FINITE
    if how.ordered != NULL and m == how.n_ordered and f == how.f:
        status = how.ordered(rows, m, dst, count, NULL)     # NOT_FINITE: a sum of large numbers
    if status == NOT_FINITE:
        status = by_element(how, rows, m, f, dst, count)
    return status


cdef int64_t mix_row(Combining* how, const void* const* rows, const double* weights, int32_t m,
                     uint64_t first, uint64_t count, char* dst) noexcept nogil:
    """Mix a part of those rows that have a weight."""
    cdef const void* some[SLOTS]
    cdef double shares[SLOTS]
    cdef int32_t j, n = 0
    for j in range(m):
        if weights[j] != 0:
            some[n] = <const char*>rows[j] + first * how.itemsize
            shares[n] = weights[j]
            n += 1
    if n == 0:
        memset(dst, 0, count * how.itemsize)
        return DONE
    return mix_rows(how, some, n, shares, dst, count)


cdef int64_t middle_of_mixes(Combining* how, const void* const* rows, Table* table, char* dst,
                             uint64_t count) noexcept nogil:
    """Make mixes and combine them by element, in pieces that stay in the caches."""
    cdef const void* made[SLOTS]
    cdef uint64_t start = 0, size
    cdef int64_t status = DONE
    cdef int32_t i
    while start < count and status == DONE:
        size = min(count - start, <uint64_t>MIXED)
        for i in range(table.n_mixes):
            made[i] = table.mixed + i * size * how.itemsize
            if i and not memcmp(table.mixes + i * table.m, table.mixes + (i - 1) * table.m,
                                table.m * sizeof(double)):
                made[i] = made[i - 1]       # as honest updates often have the same neighbors
                continue
            status = mix_row(how, rows, table.mixes + i * table.m, table.m, start, size,
                             <char*>made[i])
            if status != DONE:
                return status
        status = middle_of(how, made, table.n_mixes, table.f, dst + start * how.itemsize, size)
        start += size
    return status


cdef int64_t finish(Combining* how, const void* const* sources, int64_t n, void* dst,
                    uint64_t first, uint64_t count, Table* table) noexcept nogil:
    cdef const void* all[SLOTS]
    cdef const void* rows[SLOTS]
    cdef int64_t status
    cdef int32_t i, m = table.m + (how.last != NULL)
    if table.m == 0:
        memset(dst, 0, count * how.itemsize)
        return DONE
    gather_rows(how, sources, n, first, all)
    for i in range(m):
        rows[i] = all[table.who[i]]
    if table.n_mixes:
        status = middle_of_mixes(how, rows, table, <char*>dst, count)
    elif how.is_by_element:
        status = middle_of(how, rows, m, table.f, dst, count)
    elif how.is_mixed:
        status = mix_row(how, rows, table.weights, m, 0, count, <char*>dst)
    else:
        status = mix_rows(how, rows, m, table.weights, dst, count)
    if how.last != NULL:
        memcpy(how.fresh + first * how.itemsize, dst, count * how.itemsize)
        if first + count == how.count:      # a round that fails on the way leaves the last whole
            how.last, how.fresh = how.fresh, how.last
    return status


cdef int64_t at_once(Combining* how, const void* const* sources, int64_t n, void* dst,
                     uint8_t* refused, Table* table) noexcept nogil:
    """Look at whole updates, decide, and make the result."""
    cdef int64_t status = look(how, sources, n, 0, how.count, table) if n else DONE
    if status != DONE:
        return status
    weigh(how, n, table, refused)
    return finish(how, sources, n, dst, 0, how.count, table)


cdef int64_t call_python(Combining* how, Table* table, void* dst) noexcept with gil:
    """Call a user's function on this thread; log what it raises."""
    try:
        kind = numpy_of(how)
        rows = np.empty((table.m, how.count), kind)
        for i in range(table.m):
            memcpy(<void*><uintptr_t>rows[i].ctypes.data, table.rows[i],
                   how.count * how.itemsize)
        made = np.ascontiguousarray((<object>how.python)(rows), dtype=kind)
        if made.shape != (how.count,):
            raise ValueError(f"a rule must return shape {(how.count,)}, got {made.shape}")
        memcpy(dst, <void*><uintptr_t>made.ctypes.data, how.count * how.itemsize)
        return DONE
    except BaseException:
        log.exception("the user's rule %r failed", <object>how.python)
        return E_PROTOCOL


cdef object numpy_of(Combining* how):
    return np.dtype({2: "float16", 4: "float32", 8: "float64"}[how.itemsize])


cdef int64_t make(Combining* how, Table* table, void* dst, uint32_t version) noexcept nogil:
    """Make the result of the rows of a table, all of which count."""
    cdef uint8_t none[MAX_VOICES]
    cdef int64_t number = version
    if how.is_weighed:
        return at_once(how, table.rows, table.m, dst, none, table)
    table.f = how.lies[table.m]
    if table.f < 0:
        memset(dst, 0, how.count * how.itemsize)
        return DONE
    if how.kind == OWN and how.own != NULL:
        return how.own(table.rows, table.m, dst, how.count, &number)
    if how.kind == OWN:
        return call_python(how, table, dst)
    if how.kind == AVERAGE:
        weigh_evenly(table)
        return mix_rows(how, table.rows, table.m, table.weights, dst, how.count)
    return by_element(how, table.rows, table.m, table.f, dst, how.count)


cdef int64_t combine(Combining* how, const void* const* sources, int64_t n, void* dst,
                     uint32_t version, uint8_t* refused, char* scratch) noexcept nogil:
    cdef Table table
    cdef int64_t status
    memset(refused, 0, n)
    lay_out(how, &table, scratch)
    if how.is_weighed and not how.bucket:
        return at_once(how, sources, n, dst, refused, &table)
    if not how.is_weighed and how.ordered != NULL and n == how.n_ordered:
        status = how.ordered(sources, n, dst, how.count, NULL)
        if status != NOT_FINITE:
            return status
    table.m = 0
    status = refuse(how, sources, n, &table, refused) if n else DONE
    if status == DONE and how.bucket and table.m:
        status = fill_buckets(how, &table, version)
    if status != DONE:
        return status
    return make(how, &table, dst, version)


# ---------------------------------------------------------------- Python face

_ORDERED = {
    Kind.AVERAGE: "average", Kind.TRIMMED_MEAN: "trimmed", Kind.MEDIAN: "trimmed",
    Kind.PHOCAS: "phocas", Kind.MEAN_AROUND_MEDIAN: "around_median", Kind.BULYAN: "around_median",
}
_PLAIN = {
    Kind.TRIMMED_MEAN: "trimmed_mean", Kind.MEDIAN: "trimmed_mean", Kind.PHOCAS: "nearest_mean",
    Kind.MEAN_AROUND_MEDIAN: "nearest_mean", Kind.BULYAN: "nearest_mean",
    Kind.SIGN_MAJORITY: "sign_majority",
}


@cython.final
cdef class Combiner:
    """Combine updates of one partition by a rule, and keep its state from round to round.

    rule: of fastps.contract.rule, with parameters that fit n workers and the element type. count:
    elements. function: of a rule of the user's, a function of arrays or a Numba cfunc. Compiles
    kernels, for under a second each. Raises ValueError, TypeError, MemoryError.
    """

    def __cinit__(self, rule not None, code not None, *, int n, uint64_t count, function=None):
        rule.check_voices(n, code)
        self.how.kind = rule.kind
        self.how.keep, self.how.iterations = rule.keep, rule.iterations
        self.how.bucket, self.how.seed = rule.bucket, rule.seed
        self.how.arc, self.how.nnm = rule.early
        self.how.clip = rule.clip
        self.how.radius, self.how.nu = rule.radius, rule.nu
        self.how.itemsize, self.how.count = code.itemsize, count
        for m in range(n + 1):
            self.how.lies[<int>m] = -1 if rule.gives_nothing(m) else rule.lies_among(m)
        self.load(rule, code, n)
        if rule.kind is Kind.OWN:
            self.adopt(function)
        if rule.kind is Kind.CENTERED_CLIPPING:
            self.how.last = <char*>calloc(max(count, 1), code.itemsize)
            self.how.fresh = <char*>calloc(max(count, 1), code.itemsize)
            if self.how.last == NULL or self.how.fresh == NULL:
                raise MemoryError(f"no memory for the last result of {count} elements")
        self.how.is_weighed = rule.wants_whole and rule.kind is not Kind.OWN
        self.how.is_mixed = rule.is_mixed
        self.how.is_by_element = rule.kind in _PLAIN
        self.how.slots = n + 1
        self.how.scratch_bytes = round_up(
            (16 + 8 * rule.is_mixed + 16 * (rule.kind in (Kind.SMEA, Kind.CAF)))
            * self.how.slots * self.how.slots + 16 * self.how.slots + LINE_BYTES
        ) + round_up(mixed_bytes(&self.how))
        if rule.bucket:
            self.how.scratch_bytes += rule.voices(n) * round_up(count * code.itemsize)

    cdef int load(self, rule, code, int n) except -1:
        """Compile the kernels that the rule needs for n workers, and for fewer."""
        cdef int f = rule.lies_among(rule.voices(n))
        self.how.norms = <kernel_fn><uintptr_t>robust_kernel("square_norms", code)
        self.how.mix = <kernel_fn><uintptr_t>reduce_kernel(ReduceOp.MIX, code)
        if rule.kind in _PLAIN:
            self.how.plain = <kernel_fn><uintptr_t>robust_kernel(_PLAIN[rule.kind], code)
        if not rule.is_by_element:
            self.how.distances = <kernel_fn><uintptr_t>robust_kernel("pair_distances", code)
        if rule.kind not in _ORDERED or rule.bucket or rule.gives_nothing(n):
            return 0
        self.how.f = f
        self.how.n_ordered = n - 2 * f if rule.kind is Kind.BULYAN else n
        trim = {Kind.MEDIAN: (n - 1) // 2, Kind.BULYAN: 2 * f, Kind.AVERAGE: 0}.get(rule.kind, f)
        kernel = ordered_kernel(_ORDERED[rule.kind], code, self.how.n_ordered, trim)
        self.how.ordered = <kernel_fn><uintptr_t>kernel
        return 0

    def adopt(self, function):
        """Set the function of a user's rule."""
        address = getattr(function, "address", None)
        if not isinstance(address, int) and not callable(function):
            raise TypeError(f"a rule must be a function or a Numba cfunc, got {function!r}")
        self.function = function
        if isinstance(address, int):
            self.how.own = <kernel_fn><uintptr_t>address
        else:
            self.how.python = <void*><PyObject*>function

    def combine(self, updates, *, uint32_t version=1):
        """Return the combined array, and the indexes of the updates that the rule refused.

        updates: C-contiguous arrays of count elements, read; None: a worker that skips.
        """
        cdef const void* sources[MAX_VOICES]
        cdef uint8_t refused[MAX_VOICES]
        cdef int64_t status, n = 0
        cdef fps_floats before
        arrays = [one for one in updates if one is not None]
        places = [place for place, one in enumerate(updates) if one is not None]
        if len(arrays) >= self.how.slots:
            raise ValueError(
                f"the rule is for {self.how.slots - 1} updates at most, got {len(arrays)}")
        for one in arrays:
            if one.nbytes != self.how.count * self.how.itemsize or not one.flags.c_contiguous:
                raise ValueError(
                    f"an update must be C-contiguous with {self.how.count * self.how.itemsize} "
                    f"bytes, got {one.nbytes} bytes")
            sources[n] = <const void*><uintptr_t>one.ctypes.data
            n += 1
        made = np.empty_like(arrays[0]) if arrays else np.zeros(self.how.count)
        scratch = np.empty(self.how.scratch_bytes + LINE_BYTES, np.uint8)
        cdef uintptr_t room = round_up(scratch.ctypes.data)
        cdef void* dst = <void*><uintptr_t>made.ctypes.data
        with nogil:
            fps_floats_enter(&before)
            status = combine(&self.how, sources, n, dst, version, refused, <char*>room)
            fps_floats_leave(&before)
        if status != DONE:
            raise RuntimeError(f"the rule failed with status {status}; see the log")
        return made, [places[j] for j in range(n) if refused[j]]

    def __dealloc__(self):
        free(self.how.last)
        free(self.how.fresh)
