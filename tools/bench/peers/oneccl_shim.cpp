// SPDX-License-Identifier: Apache-2.0
// A few C functions over oneCCL, for ctypes: one communicator, arrays of float32.
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

constexpr auto values = ccl::datatype::float32;

ccl::event start_sum(float *array, size_t count)
{
    return ccl::allreduce(array, array, count, values, ccl::reduction::sum, *world);
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

int peer_sum(float *array, size_t count)
{
    return guarded("peer_sum", [&] { start_sum(array, count).wait(); });
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

// What follows has the shapes of tools/bench/collectives.py: `count` is that of one worker's array.

int peer_allreduce(const float *from, float *to, size_t count)
{
    return guarded("peer_allreduce", [&] {
        ccl::allreduce(from, to, count, values, ccl::reduction::sum, *world).wait();
    });
}

int peer_allgather(const float *from, float *to, size_t count)
{
    return guarded("peer_allgather", [&] {
        const std::vector<size_t> counts(world->size(), count);
        ccl::allgatherv(from, count, to, counts, values, *world).wait();
    });
}

int peer_reducescatter(const float *from, float *to, size_t count)
{
    return guarded("peer_reducescatter", [&] {
        ccl::reduce_scatter(from, to, count, values, ccl::reduction::sum, *world).wait();
    });
}

// to and from hold world->size() blocks of `count` values.
int peer_alltoall(const float *from, float *to, size_t count)
{
    return guarded("peer_alltoall", [&] { ccl::alltoall(from, to, count, values, *world).wait(); });
}

int peer_broadcast(float *array, size_t count, int root)
{
    return guarded(
        "peer_broadcast", [&] { ccl::broadcast(array, count, values, root, *world).wait(); });
}

// Send to one process and receive from another, both at once.
int peer_exchange(float *from, int target, float *to, int source, size_t count)
{
    return guarded("peer_exchange", [&] {
        auto sent = ccl::send(from, count, values, target, *world);
        auto received = ccl::recv(to, count, values, source, *world);
        sent.wait();
        received.wait();
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
