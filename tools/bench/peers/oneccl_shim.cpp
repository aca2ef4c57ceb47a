// SPDX-License-Identifier: Apache-2.0
// A few C functions over oneCCL, for ctypes: one communicator, float32 sums in place.
//
// Built by install.py against the static CPU library of the wheel oneccl-devel. That library
// refers to Intel's tracing hooks and memory routines, which are not in the wheel: the hooks are
// null here (tracing off), the routines are the C library's.
//
// Every function returns 0, or -1 after one line on stderr; ctypes calls them without the GIL.

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include <oneapi/ccl.hpp>

extern "C" {
void *__itt_domain_create_ptr__3_0 = nullptr;
void *__itt_event_create_ptr__3_0 = nullptr;
void *__itt_event_end_ptr__3_0 = nullptr;
void *__itt_event_start_ptr__3_0 = nullptr;
void *__itt_metadata_add_ptr__3_0 = nullptr;
void *__itt_string_handle_create_ptr__3_0 = nullptr;
void *__itt_task_begin_ptr__3_0 = nullptr;
void *__itt_task_end_ptr__3_0 = nullptr;
void *__itt_thread_set_name_ptr__3_0 = nullptr;

void *_intel_fast_memcpy(void *to, const void *from, size_t nbytes)
{
    return memcpy(to, from, nbytes);
}

void *_intel_fast_memset(void *to, int value, size_t nbytes)
{
    return memset(to, value, nbytes);
}
}

namespace {

ccl::shared_ptr_class<ccl::kvs> meeting;
std::unique_ptr<ccl::communicator> world;

template <class Body>
int guarded(const char *name, Body body)
{
    try {
        body();
        return 0;
    } catch (const std::exception &error) {
        fprintf(stderr, "%s: %s\n", name, error.what());
        return -1;
    }
}

ccl::event start_sum(float *values, size_t count)
{
    return ccl::allreduce(
        values, values, count, ccl::datatype::float32, ccl::reduction::sum, *world);
}

} // namespace

extern "C" {

const char *peer_version()
{
    return CCL_PRODUCT_FULL;
}

size_t peer_address_bytes()
{
    return ccl::kvs::address_max_size;
}

// Open the place where the processes meet; only one of them calls it.
int peer_open(char *address)
{
    return guarded("peer_open", [&] {
        ccl::init();
        meeting = ccl::create_main_kvs();
        const auto found = meeting->get_address();
        memcpy(address, found.data(), found.size());
    });
}

// Join the others at the address that peer_open gave.
int peer_join(int size, int rank, const char *address)
{
    return guarded("peer_join", [&] {
        ccl::init();
        if (!meeting) {
            ccl::kvs::address_type wanted;
            memcpy(wanted.data(), address, wanted.size());
            meeting = ccl::create_kvs(wanted);
        }
        world.reset(new ccl::communicator(ccl::create_communicator(size, rank, meeting)));
    });
}

int peer_sum(float *values, size_t count)
{
    return guarded("peer_sum", [&] { start_sum(values, count).wait(); });
}

// Sum `tensors` arrays of `count` values each: all are started before the first is waited for.
int peer_sum_many(float *const *arrays, size_t tensors, size_t count)
{
    return guarded("peer_sum_many", [&] {
        std::vector<ccl::event> started;
        started.reserve(tensors);
        for (size_t i = 0; i < tensors; i++)
            started.push_back(start_sum(arrays[i], count));
        for (auto &event : started)
            event.wait();
    });
}

int peer_barrier()
{
    return guarded("peer_barrier", [&] { ccl::barrier(*world).wait(); });
}

void peer_close()
{
    world.reset();
    meeting.reset();
}
}
