# SPDX-License-Identifier: Apache-2.0
# A table from tensor id to a C record that I/O threads read without a lock. It grows under the
# GIL only; records are complete before they are put, and leave the table all together.
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

cdef enum:
    PAGE_RECORDS = 1024
    MAX_PAGES = 4096
    MAX_RECORDS = PAGE_RECORDS * MAX_PAGES      # 4 Mi tensors

cdef struct IdTable:
    void** pages[MAX_PAGES]

ctypedef void (*record_fn)(void* record, void* context) noexcept nogil


cdef inline void* table_get(IdTable* table, uint64_t number) noexcept nogil:
    if number >= MAX_RECORDS or table.pages[number / PAGE_RECORDS] == NULL:
        return NULL
    return table.pages[number / PAGE_RECORDS][number % PAGE_RECORDS]


cdef inline bint table_put(IdTable* table, uint64_t number, void* record) noexcept nogil:
    """False: no memory, or the number is out of range."""
    cdef void*** page
    if number >= MAX_RECORDS:
        return False
    page = &table.pages[number / PAGE_RECORDS]
    if page[0] == NULL:
        page[0] = <void**>calloc(PAGE_RECORDS, sizeof(void*))
    if page[0] == NULL:
        return False
    page[0][number % PAGE_RECORDS] = record
    return True


cdef inline void table_each(IdTable* table, record_fn visit, void* context) noexcept nogil:
    cdef int page, slot
    for page in range(MAX_PAGES):
        if table.pages[page] == NULL:
            continue
        for slot in range(PAGE_RECORDS):
            if table.pages[page][slot] != NULL:
                visit(table.pages[page][slot], context)


cdef inline void table_clear(IdTable* table) noexcept nogil:
    cdef int page
    for page in range(MAX_PAGES):
        free(table.pages[page])
        table.pages[page] = NULL
