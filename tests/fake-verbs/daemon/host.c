// Hosts and their numbers. Every start of a host gives it others; those of two hosts coincide wherever adapters'
// numbers may.
#include "fvd.h"
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

uint32_t epoch, link_layer = IBV_LINK_LAYER_INFINIBAND;

static struct host *hosts;
static uint32_t numbered;

struct move {
    struct move *next;
    char from[FV_HOST_MAX], to[FV_HOST_MAX];
};
static struct move *moves;

#define QPN_BLOCK 16
#define KEY_BLOCK 18

// A block of numbers that the host has not used at its last starts.
static uint32_t block(const struct host *h, uint32_t step, uint32_t count) {
    return (epoch + 83 * h->restarts) * step % count + 1;
}

static void link_local(union ibv_gid *gid, uint64_t guid) {
    gid->global.subnet_prefix = htobe64(0xfe80000000000000u);
    gid->global.interface_id = guid;
}

static void set_gids(struct host *h, uint32_t serial) {
    struct fv_port *p = &h->port;
    memset(p->gid, 0, sizeof p->gid);
    if (link_layer == IBV_LINK_LAYER_INFINIBAND) {
        link_local(&p->gid[0], h->guid);
        p->gid_type[0] = IBV_GID_TYPE_IB;
        p->gid_count = 1;
        return;
    }
    for (int i = 0; i < 2; i++) {
        link_local(&p->gid[i], h->guid);
        const uint8_t ipv4[] = {10, (uint8_t)(epoch % 200), (uint8_t)(serial >> 8), (uint8_t)serial};
        p->gid[2 + i].raw[10] = p->gid[2 + i].raw[11] = 0xff;
        memcpy(p->gid[2 + i].raw + 12, ipv4, 4);
        p->gid_type[i] = p->gid_type[2 + i] = i ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1;
    }
    p->gid_count = 4;
}

// The LID that a host had in the last epoch is another's in this one.
static void number(struct host *h) {
    uint32_t serial = numbered++;
    bool ethernet = link_layer == IBV_LINK_LAYER_ETHERNET;
    h->guid = htobe64(0x02be1afffe000000u | (uint64_t)(epoch & 0xff) << 16 | (serial & 0xffff) |
                      (uint64_t)(epoch & 0xff00) << 24);
    h->port = (struct fv_port){
        .lid = ethernet ? 0 : (uint16_t)(0x10 + (epoch + serial) % 0xb000),
        .sm_lid = ethernet ? 0 : 1,
        .link_layer = link_layer,
        .epoch = epoch,
    };
    set_gids(h, serial + 1);
    h->next_qpn = h->next_key = h->next_srqn = 0;
}

struct host *host_named(const char *name) {
    for (struct move *m = moves; m; m = m->next)
        if (!strcmp(m->from, name)) {
            name = m->to;
            break;
        }
    for (struct host *h = hosts; h; h = h->next)
        if (!strcmp(h->name, name)) return h;
    struct host *h = calloc(1, sizeof *h);
    if (!h) abort();
    snprintf(h->name, sizeof h->name, "%s", name);
    number(h);
    h->next = hosts;
    hosts = h;
    return h;
}

struct host *host_by_lid(uint16_t lid) {
    for (struct host *h = hosts; h; h = h->next)
        if (lid && h->port.lid == lid) return h;
    return NULL;
}

struct host *host_by_gid(const union ibv_gid *gid) {
    for (struct host *h = hosts; h; h = h->next)
        for (uint32_t i = 0; i < h->port.gid_count; i++)
            if (!memcmp(gid, &h->port.gid[i], sizeof *gid)) return h;
    return NULL;
}

// Whether there is somebody at a GID, as the kernel asks the network before an address handle is made on Ethernet.
int find_gid(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)c, (void)fds, (void)a;
    const union ibv_gid *gid = &q->group.gid;
    bool asked = faults.no_ah < 3 && !(faults.no_ah == 2 && gid->raw[0] == 0xfe);
    if (!faults.no_ah || gid->raw[0] == 0xff || (asked && host_by_gid(gid))) return 0;
    stats.not_found++;
    return ETIMEDOUT;
}

// "FROM TO": who calls itself FROM from now on runs on TO, as a process does that is restarted elsewhere with its old
// environment.
int host_move(const char *text) {
    struct move *m = calloc(1, sizeof *m);
    if (!m) return ENOMEM;
    if (sscanf(text, "%63s %63s", m->from, m->to) != 2) {
        free(m);
        return EINVAL;
    }
    for (struct move **at = &moves; *at; at = &(*at)->next)
        if (!strcmp((*at)->from, m->from)) {
            struct move *old = *at;
            *at = old->next;
            free(old);
            break;
        }
    m->next = moves;
    moves = m;
    return 0;
}

// All that is open there dies, as when the machine goes down; what comes next finds other numbers.
int host_restart(const char *name) {
    struct host *h = host_named(name);
    for (struct ctx *c = contexts; c; c = c->next)
        if (c->host == h && !c->dead) {
            tell(c, IBV_EVENT_DEVICE_FATAL, 1);
            ctx_die(c);
        }
    h->restarts++;
    number(h);
    return 0;
}

// "HOST" or "HOST IPV4": a subnet manager gives the port another LID; on Ethernet the host gets other addresses, of IPv4
// the one that is named. What is open stays open.
int host_readdress(const char *text) {
    char name[FV_HOST_MAX], address[INET_ADDRSTRLEN];
    int words = sscanf(text, "%63s %15s", name, address);
    if (words < 1) return EINVAL;
    struct host *h = host_named(name);
    bool ethernet = link_layer == IBV_LINK_LAYER_ETHERNET;
    uint32_t serial = numbered++;
    if (ethernet) set_gids(h, serial + 1);
    else h->port.lid = (uint16_t)(0x10 + (epoch + serial) % 0xb000);
    for (int i = 2; words == 2 && i < 4; i++)
        if (!ethernet || inet_pton(AF_INET, address, h->port.gid[i].raw + 12) != 1) return EINVAL;
    for (struct ctx *c = contexts; c; c = c->next)
        if (c->host == h && !c->dead) tell(c, ethernet ? IBV_EVENT_GID_CHANGE : IBV_EVENT_LID_CHANGE, 1);
    return 0;
}

static uint32_t take(struct map *m, void *object, uint32_t base, uint32_t *next, uint32_t room) {
    while (map_get(m, base + *next % room)) ++*next;
    uint32_t n = base + (*next)++ % room;
    map_put(m, n, object);
    return n;
}

uint32_t take_qpn(struct host *h, void *qp) {
    uint32_t chosen = faults.next_qpn;
    faults.next_qpn = 0;
    if (chosen && !map_get(&h->qps, chosen)) {
        map_put(&h->qps, chosen, qp);
        return chosen;
    }
    return take(&h->qps, qp, (block(h, 37, 250) << QPN_BLOCK) + 0x40, &h->next_qpn, (1 << QPN_BLOCK) - 0x40);
}

uint32_t take_srqn(struct host *h, void *srq) {
    return take(&h->srqs, srq, (block(h, 41, 250) << QPN_BLOCK) + 0x40, &h->next_srqn, (1 << QPN_BLOCK) - 0x40);
}

// The two keys of a region differ, so that neither can stand for the other.
static void put_keys(struct host *h, struct mr *mr, uint32_t lkey) {
    mr->lkey = lkey;
    mr->rkey = lkey ^ 0xff;
    map_put(&h->lkeys, mr->lkey, mr);
    map_put(&h->rkeys, mr->rkey, mr);
}

void take_keys(struct host *h, struct mr *mr) {
    uint8_t tag = (uint8_t)(0x5a ^ epoch);
    uint32_t base = block(h, 17, 63) << KEY_BLOCK;
    while (map_get(&h->lkeys, (base + h->next_key % (1 << KEY_BLOCK)) << 8 | tag)) h->next_key++;
    uint32_t index = base + h->next_key++ % (1 << KEY_BLOCK);
    put_keys(h, mr, index << 8 | tag);
}

// In place of those that it has.
void take_other_keys(struct host *h, struct mr *mr) {
    uint32_t chosen = faults.rereg_key;
    map_drop(&h->lkeys, mr->lkey);
    map_drop(&h->rkeys, mr->rkey);
    faults.rereg_key = 0;
    if (chosen && !map_get(&h->lkeys, chosen)) put_keys(h, mr, chosen);
    else take_keys(h, mr);
}
