// Protection domains, memory regions, thread domains.
#include "fv.h"
#include <stdbool.h>
#include <sys/mman.h>

#undef ibv_reg_mr
#undef ibv_reg_mr_iova

static void *refuse(int error) {
    errno = error;
    return NULL;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
    struct fv_request q = {.op = FV_ALLOC_PD};
    struct fv_reply a;
    struct fv_pd *pd = calloc(1, sizeof *pd);
    if (!pd) return NULL;
    int error = fv_ask(to_ctx(context), &q, NULL, 0, &a);
    if (error) {
        free(pd);
        return refuse(error);
    }
    pd->base = (struct ibv_pd){context, a.handle};
    return &pd->base;
}

int ibv_dealloc_pd(struct ibv_pd *pd) {
    struct fv_request q = {.op = FV_DEALLOC_PD, .handle = pd->handle};
    struct fv_reply a;
    int error = ((struct fv_pd *)pd)->parent ? 0 : fv_ask(to_ctx(pd->context), &q, NULL, 0, &a);
    if (!error) free(pd);
    return error;
}

// A parent domain is its domain under another pointer.
struct ibv_pd *fv_alloc_parent_domain(struct ibv_context *c, struct ibv_parent_domain_init_attr *a) {
    const uint32_t known = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    if (!a->pd || a->comp_mask & ~known) return refuse(EINVAL);
    struct fv_pd *pd = calloc(1, sizeof *pd);
    if (!pd) return NULL;
    pd->base = (struct ibv_pd){c, a->pd->handle};
    pd->parent = a->pd;
    return &pd->base;
}

struct ibv_td *fv_alloc_td(struct ibv_context *c, struct ibv_td_init_attr *a) {
    if (a->comp_mask) return refuse(EINVAL);
    struct ibv_td *td = calloc(1, sizeof *td);
    if (td) td->context = c;
    return td;
}

int fv_dealloc_td(struct ibv_td *td) {
    free(td);
    return 0;
}

// The pages of a region are pinned when it is made, so they must be there.
static bool is_mapped(const void *addr, size_t length) {
    uintptr_t first = (uintptr_t)addr & ~(uintptr_t)4095, end = (uintptr_t)addr + length;
    return !length || !msync((void *)first, end - first, MS_ASYNC);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access) {
    const unsigned int remote = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    struct fv_request q = {.op = FV_REG_MR};
    struct fv_reply a;
    if (access & remote && !(access & IBV_ACCESS_LOCAL_WRITE)) return refuse(EINVAL);
    if (access & IBV_ACCESS_ON_DEMAND) return refuse(EOPNOTSUPP);
    if (!is_mapped(addr, length)) return refuse(EFAULT);
    struct fv_mr *mr = calloc(1, sizeof *mr);
    if (!mr) return NULL;
    q.mr.pd = pd->handle;
    q.mr.access = access;
    q.mr.addr = (uintptr_t)addr;
    q.mr.length = length;
    q.mr.iova = access & IBV_ACCESS_ZERO_BASED ? 0 : iova;
    int error = fv_ask(to_ctx(pd->context), &q, NULL, 0, &a);
    if (error) {
        free(mr);
        return refuse(error);
    }
    mr->access = access;
    mr->base = (struct ibv_mr){pd->context, pd, addr, length, a.handle, a.mr.lkey, a.mr.rkey};
    return &mr->base;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access) {
    return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, (unsigned int)access);
}

struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access) {
    return ibv_reg_mr_iova2(pd, addr, length, iova, (unsigned int)access);
}

int ibv_rereg_mr(struct ibv_mr *ibmr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access) {
    struct fv_mr *mr = (struct fv_mr *)ibmr;
    struct fv_request q = {.op = FV_REREG_MR, .handle = ibmr->handle};
    struct fv_reply a;
    bool moves = flags & IBV_REREG_MR_CHANGE_TRANSLATION, other = flags & IBV_REREG_MR_CHANGE_PD;
    if (!flags || flags & ~IBV_REREG_MR_FLAGS_SUPPORTED || (moves && (!addr || !length)) || (other && !pd)) {
        errno = EINVAL;
        return IBV_REREG_MR_ERR_INPUT;
    }
    q.mr.pd = other ? pd->handle : ibmr->pd->handle;
    q.mr.access = flags & IBV_REREG_MR_CHANGE_ACCESS ? (unsigned int)access : mr->access;
    q.mr.addr = (uintptr_t)(moves ? addr : ibmr->addr);
    q.mr.length = moves ? length : ibmr->length;
    q.mr.iova = q.mr.addr;
    int error = fv_ask(to_ctx(ibmr->context), &q, NULL, 0, &a);
    if (error) {
        errno = error;
        return IBV_REREG_MR_ERR_CMD;
    }
    mr->access = q.mr.access;
    ibmr->lkey = a.mr.lkey;
    ibmr->rkey = a.mr.rkey;
    if (other) ibmr->pd = pd;
    if (moves) {
        ibmr->addr = addr;
        ibmr->length = length;
    }
    return 0;
}

int ibv_dereg_mr(struct ibv_mr *mr) {
    struct fv_request q = {.op = FV_DEREG_MR, .handle = mr->handle};
    struct fv_reply a;
    int error = fv_ask(to_ctx(mr->context), &q, NULL, 0, &a);
    if (!error) free(mr);
    return error;
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
    (void)pd, (void)offset, (void)length, (void)iova, (void)fd, (void)access;
    return refuse(EOPNOTSUPP);
}

int fv_advise_mr(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags, struct ibv_sge *sg, uint32_t n) {
    (void)pd, (void)advice, (void)flags, (void)sg, (void)n;
    return EOPNOTSUPP;
}

struct ibv_pd *ibv_import_pd(struct ibv_context *c, uint32_t handle) {
    (void)c, (void)handle;
    return refuse(EOPNOTSUPP);
}
void ibv_unimport_pd(struct ibv_pd *pd) { (void)pd; }
struct ibv_mr *ibv_import_mr(struct ibv_pd *pd, uint32_t handle) {
    (void)pd, (void)handle;
    return refuse(EOPNOTSUPP);
}
void ibv_unimport_mr(struct ibv_mr *mr) { (void)mr; }
struct ibv_dm *ibv_import_dm(struct ibv_context *c, uint32_t handle) {
    (void)c, (void)handle;
    return refuse(EOPNOTSUPP);
}
void ibv_unimport_dm(struct ibv_dm *dm) { (void)dm; }

// The daemon writes into this process's pages wherever they are, also after a fork: nothing has to be kept from the
// child.
int ibv_fork_init(void) { return 0; }
enum ibv_fork_status ibv_is_fork_initialized(void) { return IBV_FORK_UNNEEDED; }
int ibv_dontfork_range(void *base, size_t size) {
    (void)base, (void)size;
    return 0;
}
int ibv_dofork_range(void *base, size_t size) {
    (void)base, (void)size;
    return 0;
}
