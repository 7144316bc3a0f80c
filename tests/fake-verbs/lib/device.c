// The list of devices, opening and closing.
#include "fv.h"
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>

static void describe(struct fv_dev *d, const struct fv_device *from, uint32_t index) {
    d->base.node_type = IBV_NODE_CA;
    d->base.transport_type = IBV_TRANSPORT_IB;
    snprintf(d->base.name, sizeof d->base.name, "%s", from->name);
    snprintf(d->base.dev_name, sizeof d->base.dev_name, "uverbs%u", index);
    snprintf(d->base.dev_path, sizeof d->base.dev_path, "/sys/class/infiniband_verbs/uverbs%u", index);
    snprintf(d->base.ibdev_path, sizeof d->base.ibdev_path, "/sys/class/infiniband/%.200s", from->name);
    d->guid = from->guid;
    d->index = index;
    d->users = 1;
}

// Without a fabric there is no device, as on a machine without an adapter.
static uint32_t ask_for_devices(struct fv_reply *a) {
    struct fv_request q = {.op = FV_LIST, .open = {.version = FV_VERSION}};
    snprintf(q.open.host, sizeof q.open.host, "%s", fv_host());
    int s = fv_connect();
    if (s < 0) return 0;
    int error = fv_ask_on(s, &q, NULL, 0, a);
    close(s);
    return error ? 0 : a->list.count;
}

struct ibv_device **ibv_get_device_list(int *count) {
    struct fv_reply a;
    uint32_t n = ask_for_devices(&a);
    struct ibv_device **list = calloc(n + 1, sizeof *list);
    if (count) *count = 0;
    if (!list) return NULL;
    for (uint32_t i = 0; i < n; i++) {
        struct fv_dev *d = calloc(1, sizeof *d);
        if (!d) break;
        describe(d, &a.list.device[i], i);
        list[i] = &d->base;
        if (count) *count = (int)i + 1;
    }
    errno = 0;
    return list;
}

void fv_release_device(struct fv_dev *d) {
    if (atomic_fetch_sub(&d->users, 1) == 1) free(d);
}

void ibv_free_device_list(struct ibv_device **list) {
    for (struct ibv_device **d = list; *d; d++) fv_release_device((struct fv_dev *)*d);
    free(list);
}

const char *ibv_get_device_name(struct ibv_device *d) { return d->name; }

int ibv_get_device_index(struct ibv_device *d) { return (int)((struct fv_dev *)d)->index; }

__be64 ibv_get_device_guid(struct ibv_device *d) { return ((struct fv_dev *)d)->guid; }

// Functions of old versions that no program reaches through these pointers.
static void *not_here(void) {
    errno = EOPNOTSUPP;
    return NULL;
}

static void set_operations(struct fv_ctx *c) {
    struct ibv_context_ops *o = &c->verbs.context.ops;
    o->_compat_alloc_pd = o->_compat_dealloc_pd = o->_compat_reg_mr = o->_compat_rereg_mr = o->_compat_dereg_mr =
        not_here;
    o->_compat_create_cq = o->_compat_cq_event = o->_compat_resize_cq = o->_compat_destroy_cq = not_here;
    o->_compat_create_srq = o->_compat_modify_srq = o->_compat_query_srq = o->_compat_destroy_srq = not_here;
    o->_compat_create_qp = o->_compat_query_qp = o->_compat_modify_qp = o->_compat_destroy_qp = not_here;
    o->_compat_create_ah = o->_compat_destroy_ah = o->_compat_attach_mcast = o->_compat_detach_mcast = not_here;
    o->_compat_async_event = not_here;
    o->poll_cq = fv_poll_cq;
    o->req_notify_cq = fv_req_notify_cq;
    o->post_send = fv_post_send;
    o->post_recv = fv_post_recv;
    o->post_srq_recv = fv_post_srq_recv;
    struct verbs_context *v = &c->verbs;
    v->sz = sizeof *v;
    v->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    v->query_port = fv_query_port;
    v->query_device_ex = fv_query_device_ex;
    v->query_rt_values = fv_query_rt_values;
    v->advise_mr = fv_advise_mr;
    v->alloc_td = fv_alloc_td;
    v->dealloc_td = fv_dealloc_td;
    v->alloc_parent_domain = fv_alloc_parent_domain;
    v->create_cq_ex = fv_create_cq_ex;
    v->modify_cq = fv_modify_cq;
    v->create_qp_ex = fv_create_qp_ex;
    v->create_srq_ex = fv_create_srq_ex;
    v->get_srq_num = fv_get_srq_num;
}

// Gives the daemon the bells, this process's memory and the end of a pipe for asynchronous events.
static int introduce(struct fv_ctx *c, uint32_t index) {
    struct fv_request q = {.op = FV_OPEN, .open = {.version = FV_VERSION, .device = index}};
    struct fv_reply a;
    int async[2], bells;
    snprintf(q.open.host, sizeof q.open.host, "%s", fv_host());
    c->bells = fv_share(sizeof *c->bells, &bells);
    if (!c->bells) return errno;
    if (pipe2(async, O_CLOEXEC)) {
        close(bells);
        return errno;
    }
    c->verbs.context.async_fd = async[0];
    int error = 0, memory = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    if (memory < 0) error = errno;
    int fds[] = {bells, memory, async[1]};
    if (!error) error = fv_ask(c, &q, fds, 3, &a);
    close(bells);
    close(async[1]);
    if (memory >= 0) close(memory);
    if (!error) c->port = a.port;
    return error;
}

static void drop(struct fv_ctx *c) {
    if (c->bells) munmap(c->bells, sizeof *c->bells);
    if (c->verbs.context.async_fd >= 0) close(c->verbs.context.async_fd);
    if (c->verbs.context.cmd_fd >= 0) close(c->verbs.context.cmd_fd);
    free(c->objects);
    free(c);
}

struct ibv_context *ibv_open_device(struct ibv_device *device) {
    struct fv_dev *d = (struct fv_dev *)device;
    struct fv_ctx *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    pthread_mutex_init(&c->asking, NULL);
    pthread_mutex_init(&c->ringing, NULL);
    pthread_mutex_init(&c->verbs.context.mutex, NULL);
    c->verbs.context.device = device;
    c->verbs.context.async_fd = -1;
    c->verbs.context.num_comp_vectors = 4;
    c->verbs.context.cmd_fd = fv_connect();
    set_operations(c);
    int error = c->verbs.context.cmd_fd < 0 ? ENODEV : introduce(c, d->index);
    if (!error) {
        struct fv_request q = {.op = FV_DEVICE};
        struct fv_reply a;
        error = fv_ask(c, &q, NULL, 0, &a);
        c->limits = a.limits;
    }
    if (error) {
        drop(c);
        errno = error;
        return NULL;
    }
    atomic_fetch_add(&d->users, 1);
    return &c->verbs.context;
}

int ibv_close_device(struct ibv_context *context) {
    struct fv_ctx *c = to_ctx(context);
    struct fv_dev *d = (struct fv_dev *)context->device;
    drop(c);
    fv_release_device(d);
    return 0;
}

struct ibv_context *ibv_import_device(int cmd_fd) {
    (void)cmd_fd;
    errno = EOPNOTSUPP;
    return NULL;
}
