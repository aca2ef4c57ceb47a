# SPDX-License-Identifier: Apache-2.0
# Part of _partition.pyx.
#
# Weights from the eigenvectors of updates' covariance, and the best of all subsets.
#
# All of it follows from squared distances: with weights w of sum 1, z = sum w_i x_i, t = D w,
#
#     K_ij = <x_i - z, x_j - z> = (t_i + t_j - w.t - D_ij) / 2
#
# and sqrt(w_i w_j) K_ij has the eigenvalues of the covariance sum w_i (x_i - z)(x_i - z)'. Its
# first eigenvector is found by squaring the matrix: that needs no vector to begin from, which
# updates could be at a right angle to, and does the same for the same updates.
# fastps/byzantine/reference.py has the formulas in NumPy.

cdef enum:
    SQUARINGS = 24              # 2^24 steps of the power method

cdef double ALONE = 1e-13       # share of all other eigenvalues at which the first is alone


cdef double sum_weighted(const double* row, const double* weights, int32_t n) noexcept nogil:
    cdef double total = 0
    cdef int32_t i
    for i in range(n):
        total += row[i] * weights[i]
    return total


cdef double center(const double* squares, const int32_t* who, int32_t n, int32_t all,
                   const double* weights, double* matrix) noexcept nogil:
    """Write sqrt(w_i w_j) K_ij of some of all rows; return its trace, the sum of eigenvalues."""
    cdef double to_all[MAX_VOICES]
    cdef double spread = 0, trace = 0
    cdef int32_t i, j
    for i in range(n):
        to_all[i] = 0
        for j in range(n):
            to_all[i] += weights[j] * squares[who[i] * all + who[j]]
        spread += weights[i] * to_all[i]
    for i in range(n):
        for j in range(i + 1):
            matrix[i * n + j] = sqrt(weights[i] * weights[j]) / 2 * (
                to_all[i] + to_all[j] - spread - squares[who[i] * all + who[j]])
            matrix[j * n + i] = matrix[i * n + j]
        trace += matrix[i * n + i]
    return trace


cdef void find_top(double* matrix, double* work, int32_t n, double* vector) noexcept nogil:
    """Find the eigenvector of the largest eigenvalue of a matrix of trace 1, which is lost."""
    cdef double length = 0, square
    cdef int32_t i, j, best = 0, _step
    for _step in range(SQUARINGS):
        square = sum_weighted(matrix, matrix, n * n)    # 1 if all other eigenvalues are 0
        if square > 1 - ALONE:
            break
        for i in range(n):
            for j in range(i + 1):
                work[i * n + j] = sum_weighted(matrix + i * n, matrix + j * n, n) / square
                work[j * n + i] = work[i * n + j]
        matrix, work = work, matrix
    for i in range(n):
        if matrix[i * n + i] > matrix[best * n + best]:
            best = i
    for i in range(n):
        vector[i] = matrix[best * n + i]
        length += vector[i] * vector[i]
    for i in range(n):
        vector[i] /= sqrt(length)


cdef double top_value(const double* squares, const int32_t* who, int32_t n, int32_t all,
                      const double* weights, double most, double* vector,
                      double* room) noexcept nogil:
    """Return the largest eigenvalue, and its vector; most: of more a lower bound will do.

    room: 2 n * n.
    """
    cdef double* scaled = room + n * n
    cdef double trace = center(squares, who, n, all, weights, room)
    cdef double value = 0
    cdef int32_t i
    memset(vector, 0, n * sizeof(double))
    if not trace > 0:
        return 0
    for i in range(n * n):                      # so that no square overflows
        scaled[i] = room[i] / trace
    value = trace * sum_weighted(scaled, scaled, n * n)     # squares / sum of eigenvalues
    if value >= most:
        return value
    find_top(scaled, room, n, vector)
    center(squares, who, n, all, weights, room)
    value = 0
    for i in range(n):
        value += vector[i] * sum_weighted(room + i * n, vector, n)
    return fmax(value, 0.0)


cdef double diameter(const double* squares, const int32_t* who, int32_t n, int32_t all,
                     double most) noexcept nogil:
    """Return the largest squared distance; most: of more a lower bound will do."""
    cdef double found = 0
    cdef int32_t i, j
    for i in range(n):
        for j in range(i):
            found = fmax(found, squares[who[i] * all + who[j]])
        if found >= most:
            break
    return found


cdef bint next_subset(int32_t* who, int32_t keep, int32_t m) noexcept nogil:
    """Go on to the next `keep` of m numbers, in the order of words; False after the last."""
    cdef int32_t i = keep - 1, j
    while i >= 0 and who[i] == m - keep + i:
        i -= 1
    if i < 0:
        return False
    who[i] += 1
    for j in range(i + 1, keep):
        who[j] = who[j - 1] + 1
    return True


cdef void choose_subset(const double* squares, int32_t m, int32_t keep, bint is_by_spread,
                        int32_t* best, double* room) noexcept nogil:
    """Choose rows of the least diameter, or the least largest eigenvalue; room: 2 m * m."""
    cdef double weights[MAX_VOICES]
    cdef double vector[MAX_VOICES]
    cdef int32_t who[MAX_VOICES]
    cdef double found, least = INFINITY
    cdef int32_t i
    for i in range(keep):
        who[i] = best[i] = i
        weights[i] = 1.0 / keep
    while True:
        if is_by_spread:
            found = top_value(squares, who, keep, m, weights, least, vector, room)
        else:
            found = diameter(squares, who, keep, m, least)
        if found < least:
            least = found
            memcpy(best, who, keep * sizeof(int32_t))
        if not next_subset(who, keep, m):
            return


cdef void weigh_filtered(const double* squares, int32_t m, int32_t f, double* best,
                         double* room) noexcept nogil:
    """Weigh rows as CAF does; best: weights of sum 1, OUT. room: 2 m * m."""
    cdef double counts[MAX_VOICES]
    cdef double weights[MAX_VOICES]
    cdef double vector[MAX_VOICES]
    cdef int32_t who[MAX_VOICES]
    cdef double found, farthest, least = INFINITY, total = m
    cdef int32_t i
    for i in range(m):
        counts[i] = 1
        best[i] = 1.0 / m
        who[i] = i
    while total > m - 2 * f:
        for i in range(m):
            weights[i] = counts[i] / total
        found = top_value(squares, who, m, m, weights, INFINITY, vector, room)
        if found < least:
            least = found
            memcpy(best, weights, m * sizeof(double))
        farthest = 0
        for i in range(m):                      # vector: sqrt(w_i) times the distance along it
            vector[i] = vector[i] * vector[i] / weights[i] if weights[i] > 0 else 0
            farthest = fmax(farthest, vector[i])
        if not (found > 0 and farthest > 0):
            return
        total = 0
        for i in range(m):
            counts[i] *= 1 - vector[i] / farthest
            total += counts[i]
