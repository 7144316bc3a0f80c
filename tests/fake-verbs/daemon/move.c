// Memory of processes: keys and copies. Each process has handed over its /proc/self/mem, through which the daemon reads
// and writes as an adapter does: without its help, also while it is stopped, and with no right over other processes
// than what it was given.
#include "fvd.h"
#include <unistd.h>

static char bounce[1 << 18];

static bool covers(const struct mr *mr, const struct pd *pd, uint64_t addr, uint64_t length, uint32_t access) {
    if (mr->pd != pd || (access & mr->access) != access) return false;
    uint64_t at = addr - mr->iova;
    return addr >= mr->iova && at <= mr->length && length <= mr->length - at;
}

bool side_of_sges(struct side *s, struct ctx *c, const struct pd *pd, const struct ibv_sge *sge, uint32_t n,
                  uint32_t access) {
    s->memory = c->memory;
    s->direct = NULL;
    s->count = 0;
    s->total = 0;
    for (uint32_t i = 0; i < n && i < FV_MAX_SGE; i++) {
        if (!sge[i].length) continue;
        const struct mr *mr = map_get(&c->host->lkeys, sge[i].lkey);
        if (!mr || mr->o.ctx != c || !covers(mr, pd, sge[i].addr, sge[i].length, access)) return false;
        s->segment[s->count++] = (struct segment){mr->addr + (sge[i].addr - mr->iova), sge[i].length};
        s->total += sge[i].length;
    }
    return true;
}

bool side_of_key(struct side *s, struct ctx *c, const struct pd *pd, uint32_t rkey, uint64_t addr, uint64_t length,
                 uint32_t access) {
    s->memory = c->memory;
    s->direct = NULL;
    s->count = 0;
    s->total = length;
    if (!length) return true;
    const struct mr *mr = map_get(&c->host->rkeys, rkey);
    if (!mr || mr->o.ctx != c || !covers(mr, pd, addr, length, access)) return false;
    s->segment[s->count++] = (struct segment){mr->addr + (addr - mr->iova), length};
    return true;
}

void side_of_buffer(struct side *s, void *data, uint64_t length) {
    s->direct = data;
    s->count = 0;
    s->total = length;
}

struct cursor {
    const struct side *side;
    uint32_t segment;
    uint64_t at;
};

// All of `n` bytes or nothing.
static bool transfer(int fd, bool in, char *buf, size_t n, uint64_t addr) {
    while (n) {
        ssize_t r = in ? pread(fd, buf, n, (off_t)addr) : pwrite(fd, buf, n, (off_t)addr);
        if (r <= 0) return false;
        buf += r;
        addr += (uint64_t)r;
        n -= (size_t)r;
    }
    return true;
}

static bool pass(struct cursor *c, bool in, char *buf, size_t n) {
    const struct side *s = c->side;
    if (s->direct) {
        char *own = (char *)s->direct + c->at;
        if (in) memcpy(buf, own, n);
        else memcpy(own, buf, n);
        c->at += n;
        return true;
    }
    while (n) {
        const struct segment *g = &s->segment[c->segment];
        size_t part = g->length - c->at < n ? g->length - c->at : n;
        if (!transfer(s->memory, in, buf, part, g->addr + c->at)) return false;
        buf += part;
        n -= part;
        c->at += part;
        if (c->at == g->length) {
            c->segment++;
            c->at = 0;
        }
    }
    return true;
}

enum moved move(const struct side *from, const struct side *to, uint64_t length) {
    struct cursor in = {from, 0, 0}, out = {to, 0, 0};
    while (length) {
        size_t n = length < sizeof bounce ? length : sizeof bounce;
        if (!pass(&in, true, bounce, n)) return M_SOURCE;
        if (!pass(&out, false, bounce, n)) return M_SINK;
        length -= n;
    }
    return M_OK;
}
