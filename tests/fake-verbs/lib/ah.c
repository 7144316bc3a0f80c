// Address handles. They are this process's own: a work request carries the whole address.
#include "fv.h"
#include <arpa/inet.h>

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr) {
    static _Atomic uint32_t next;
    union ibv_gid from;
    // As providers of Ethernet do, by the exported function.
    if (attr->port_num != 1 || (attr->is_global && ibv_query_gid(pd->context, 1, attr->grh.sgid_index, &from))) {
        errno = EINVAL;
        return NULL;
    }
    if (!attr->is_global && to_ctx(pd->context)->port.link_layer == IBV_LINK_LAYER_ETHERNET) {
        errno = EINVAL;
        return NULL;
    }
    struct fv_request q = {.op = FV_FIND, .group = {.gid = attr->grh.dgid}};
    struct fv_reply a;
    int error = attr->is_global ? fv_ask(to_ctx(pd->context), &q, NULL, 0, &a) : 0;
    if (error) {
        errno = error;
        return NULL;
    }
    struct fv_ah *ah = calloc(1, sizeof *ah);
    if (!ah) return NULL;
    ah->base = (struct ibv_ah){pd->context, pd, atomic_fetch_add(&next, 1)};
    ah->attr = *attr;
    return &ah->base;
}

int ibv_destroy_ah(struct ibv_ah *ah) {
    free(ah);
    return 0;
}

// The same GID may be there for both versions of RoCE: the header says which it was.
static int index_of(struct ibv_context *c, const union ibv_gid *gid, bool v2) {
    struct ibv_gid_entry e;
    for (uint32_t i = 0; !ibv_query_gid_ex(c, 1, i, &e, 0); i++)
        if (!memcmp(&e.gid, gid, sizeof *gid) && (e.gid_type == IBV_GID_TYPE_ROCE_V2) == v2) return (int)i;
    return -1;
}

static void mapped(union ibv_gid *gid, const uint8_t *ipv4) {
    memset(gid, 0, sizeof *gid);
    gid->raw[10] = gid->raw[11] = 0xff;
    memcpy(gid->raw + 12, ipv4, 4);
}

// On Ethernet an IPv4 header may stand in the last 20 bytes of the 40: if its checksum is right, whatever is before it.
static bool is_ipv4(const uint8_t *raw) {
    uint32_t sum = 0;
    for (int i = 20; i < FV_GRH; i += 2) sum += (uint32_t)raw[i] << 8 | raw[i + 1];
    return raw[20] == 0x45 && ((sum & 0xffff) + (sum >> 16)) == 0xffff;
}

// True for RoCE v2.
static bool ends(const struct ibv_grh *grh, union ibv_gid *from, union ibv_gid *to) {
    const uint8_t *raw = (const uint8_t *)grh;
    if (is_ipv4(raw)) {
        mapped(from, raw + 32);
        mapped(to, raw + 36);
        return true;
    }
    *from = grh->sgid;
    *to = grh->dgid;
    return grh->next_hdr == 17;
}

int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh,
                        struct ibv_ah_attr *a) {
    memset(a, 0, sizeof *a);
    a->dlid = wc->slid;
    a->sl = wc->sl;
    a->src_path_bits = wc->dlid_path_bits;
    a->port_num = port;
    if (!(wc->wc_flags & IBV_WC_GRH)) return 0;
    union ibv_gid from, to;
    bool v2 = ends(grh, &from, &to);
    int index = index_of(context, &to, v2);
    if (index < 0) return -1;
    const uint8_t *raw = (const uint8_t *)grh;
    uint32_t flow = is_ipv4(raw) ? (uint32_t)raw[21] << 20 : ntohl(grh->version_tclass_flow);
    a->is_global = 1;
    a->grh.dgid = from;
    a->grh.sgid_index = (uint8_t)index;
    a->grh.flow_label = flow & 0xfffff;
    a->grh.traffic_class = (flow >> 20) & 0xff;
    a->grh.hop_limit = 0xff;
    return 0;
}

struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh, uint8_t port) {
    struct ibv_ah_attr a;
    if (ibv_init_ah_from_wc(pd->context, port, wc, grh, &a)) {
        errno = EINVAL;
        return NULL;
    }
    return ibv_create_ah(pd, &a);
}

// The hardware address that a GID stands for: within a link-local one, or made of the IPv4 address.
int ibv_resolve_eth_l2_from_gid(struct ibv_context *c, struct ibv_ah_attr *a, uint8_t mac[ETHERNET_LL_SIZE],
                                uint16_t *vid) {
    const uint8_t *raw = a->grh.dgid.raw;
    (void)c;
    if (raw[0] == 0xfe) {
        const uint8_t eui[] = {raw[8] ^ 2, raw[9], raw[10], raw[13], raw[14], raw[15]};
        memcpy(mac, eui, sizeof eui);
    } else {
        const uint8_t made[] = {2, 0, raw[12], raw[13], raw[14], raw[15]};
        memcpy(mac, made, sizeof made);
    }
    if (vid) *vid = 0xffff;
    return 0;
}
