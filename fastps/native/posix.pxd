# SPDX-License-Identifier: Apache-2.0
# System calls that several modules use: locks, descriptors, events, sockets.
from libc.stdint cimport uint32_t, uint64_t

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, const void*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_trylock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

cdef extern from "<sched.h>" nogil:
    ctypedef struct cpu_set_t:
        pass
    int sched_getaffinity(int, size_t, cpu_set_t*)
    int sched_getcpu()
    int sched_setaffinity(int, size_t, const cpu_set_t*)
    int sched_yield()
    int CPU_COUNT(const cpu_set_t*)
    int CPU_ISSET(int, const cpu_set_t*)
    void CPU_SET(int, cpu_set_t*)
    void CPU_ZERO(cpu_set_t*)

cdef extern from "<unistd.h>" nogil:
    int close(int)
    int getpid()
    ssize_t read(int, void*, size_t)
    ssize_t write(int, const void*, size_t)
    long syscall(long number, ...)

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int)
    int EFD_NONBLOCK
    int EFD_CLOEXEC

cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        void* ptr
        uint64_t u64
    struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int)
    int epoll_ctl(int, int, int, epoll_event*)
    int epoll_wait(int, epoll_event*, int, int)
    int EPOLL_CLOEXEC
    int EPOLL_CTL_ADD
    int EPOLL_CTL_DEL
    int EPOLL_CTL_MOD
    uint32_t EPOLLET
    uint32_t EPOLLIN
    uint32_t EPOLLOUT

cdef extern from "<sys/socket.h>" nogil:
    ssize_t send(int, const void*, size_t, int)
    ssize_t recv(int, void*, size_t, int)
    int shutdown(int, int)
    int getsockopt(int, int, int, void*, uint32_t*)
    int SOL_SOCKET
    int SO_DOMAIN
    int MSG_MORE
    int MSG_NOSIGNAL
    int MSG_DONTWAIT
    int MSG_TRUNC
    int SHUT_RD
    int SHUT_WR
    int SHUT_RDWR
