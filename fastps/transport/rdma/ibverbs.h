/* SPDX-License-Identifier: Apache-2.0 */
/* libibverbs found when it is needed: nothing is linked, so one wheel serves machines with and
 * without it. Each function that we call is defined here, for this module alone, and hands its
 * arguments to the library's. What is missing in CALLS makes the module fail to import. */
#include <dlfcn.h>
#include <infiniband/verbs.h>

#define LIBRARY "libibverbs.so.1"

/* result, name, parameters, arguments */
#define CALLS(CALL) \
    CALL(struct ibv_device**, ibv_get_device_list, (int* count), (count)) \
    CALL(void, ibv_free_device_list, (struct ibv_device** list), (list)) \
    CALL(const char*, ibv_get_device_name, (struct ibv_device* device), (device)) \
    CALL(struct ibv_context*, ibv_open_device, (struct ibv_device* device), (device)) \
    CALL(int, ibv_close_device, (struct ibv_context* context), (context)) \
    CALL(int, ibv_query_device, (struct ibv_context* context, struct ibv_device_attr* found), \
         (context, found)) \
    CALL(int, ibv_query_port, \
         (struct ibv_context* context, uint8_t port, struct _compat_ibv_port_attr* found), \
         (context, port, found)) \
    CALL(int, ibv_query_gid, \
         (struct ibv_context* context, uint8_t port, int index, union ibv_gid* gid), \
         (context, port, index, gid)) \
    CALL(int, ibv_query_pkey, \
         (struct ibv_context* context, uint8_t port, int index, __be16* key), \
         (context, port, index, key)) \
    CALL(struct ibv_pd*, ibv_alloc_pd, (struct ibv_context* context), (context)) \
    CALL(int, ibv_dealloc_pd, (struct ibv_pd* domain), (domain)) \
    CALL(struct ibv_comp_channel*, ibv_create_comp_channel, (struct ibv_context* context), \
         (context)) \
    CALL(int, ibv_destroy_comp_channel, (struct ibv_comp_channel* channel), (channel)) \
    CALL(struct ibv_cq*, ibv_create_cq, \
         (struct ibv_context* context, int room, void* user, struct ibv_comp_channel* channel, \
          int vector), \
         (context, room, user, channel, vector)) \
    CALL(int, ibv_destroy_cq, (struct ibv_cq* queue), (queue)) \
    CALL(int, ibv_get_cq_event, \
         (struct ibv_comp_channel* channel, struct ibv_cq** queue, void** user), \
         (channel, queue, user)) \
    CALL(void, ibv_ack_cq_events, (struct ibv_cq* queue, unsigned int count), (queue, count)) \
    CALL(struct ibv_qp*, ibv_create_qp, \
         (struct ibv_pd* domain, struct ibv_qp_init_attr* wanted), (domain, wanted)) \
    CALL(int, ibv_modify_qp, (struct ibv_qp* pair, struct ibv_qp_attr* wanted, int which), \
         (pair, wanted, which)) \
    CALL(int, ibv_destroy_qp, (struct ibv_qp* pair), (pair)) \
    CALL(struct ibv_mr*, ibv_reg_mr, \
         (struct ibv_pd* domain, void* address, size_t nbytes, int access), \
         (domain, address, nbytes, access)) \
    CALL(struct ibv_mr*, ibv_reg_mr_iova2, \
         (struct ibv_pd* domain, void* address, size_t nbytes, uint64_t base, \
          unsigned int access), \
         (domain, address, nbytes, base, access)) \
    CALL(int, ibv_dereg_mr, (struct ibv_mr* region), (region)) \
    CALL(int, ibv_get_async_event, \
         (struct ibv_context* context, struct ibv_async_event* event), (context, event)) \
    CALL(void, ibv_ack_async_event, (struct ibv_async_event* event), (event)) \
    CALL(const char*, ibv_wc_status_str, (enum ibv_wc_status status), (status)) \
    CALL(int, ibv_fork_init, (void), ()) \
    CALL(enum ibv_fork_status, ibv_is_fork_initialized, (void), ())

/* The parentheses keep those names whole that the header also has as macros. */
#define FORWARD(result, name, parameters, arguments) \
    static result(*found_##name) parameters; \
    __attribute__((visibility("hidden"))) result(name) parameters { \
        return found_##name arguments; \
    }
CALLS(FORWARD)

#define FIND(result, name, parameters, arguments) \
    found_##name = (result(*) parameters)dlsym(library, #name); \
    if (found_##name == NULL) \
        return dlerror();

/* Find the library and its functions; NULL, or what is missing. It stays loaded. */
static const char* fps_find_verbs(void) {
    void* library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return dlerror();
    CALLS(FIND)
    return NULL;
}
