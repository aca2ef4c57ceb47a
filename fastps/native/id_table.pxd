# SPDX-License-Identifier: Apache-2.0
# A table from tensor id to a C record, which I/O threads read without a lock. It grows under the
# GIL only. A record is complete before it is put, so readers see all of it; all records leave the
# table together.
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

from fastps.native.atomic cimport fps_load_ptr, fps_store_ptr

cdef enum:
    PAGE_RECORDS = 1024
    MAX_PAGES = 4096
    MAX_RECORDS = PAGE_RECORDS * MAX_PAGES      # 4 Mi tensors

cdef struct IdTable:
    void** pages[MAX_PAGES]

ctypedef void (*record_fn)(void* record, void* context) noexcept nogil


cdef inline void* table_get(IdTable* table, uint64_t number) noexcept nogil:
    cdef void** page
    if number >= MAX_RECORDS:
        return NULL
    page = <void**>fps_load_ptr(<void**>&table.pages[number / PAGE_RECORDS])
    return NULL if page == NULL else fps_load_ptr(&page[number % PAGE_RECORDS])


cdef inline bint table_put(IdTable* table, uint64_t number, void* record) noexcept nogil:
    """Put a record; False: no memory, or the number is out of range."""
    cdef void** page
    if number >= MAX_RECORDS:
        return False
    page = table.pages[number / PAGE_RECORDS]
    if page == NULL and record == NULL:
        return True
    if page == NULL:
        page = <void**>calloc(PAGE_RECORDS, sizeof(void*))
        fps_store_ptr(<void**>&table.pages[number / PAGE_RECORDS], page)
    if page == NULL:
        return False
    fps_store_ptr(&page[number % PAGE_RECORDS], record)
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
