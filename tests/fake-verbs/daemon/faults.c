// Faults on demand.
#include "fvd.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

struct faults faults = {.retry_us = 0, .limits = {.max_cqe = 1 << 18, .max_qp_wr = 1 << 14, .max_qp = 1 << 14}};
struct stats stats;

static uint64_t seed = 0x9e3779b97f4a7c15u;

static const struct {
    const char *name;
    uint32_t *value;
} knobs[] = {
    {"latency_us", &faults.latency_us},
    {"jitter_us", &faults.jitter_us},
    {"ack_us", &faults.ack_us},
    {"ack_drop", &faults.ack_drop},
    {"hold_acks", &faults.hold_acks},
    {"hold_messages", &faults.hold_messages},
    {"ud_drop", &faults.ud_drop},
    {"rnr", &faults.rnr},
    {"bandwidth_mb", &faults.bandwidth_mb},
    {"retry_us", &faults.retry_us},
    {"no_ah", &faults.no_ah},
    {"rereg_key", &faults.rereg_key},
    {"next_qpn", &faults.next_qpn},
    {"max_cqe", &faults.limits.max_cqe},
    {"max_qp_wr", &faults.limits.max_qp_wr},
    {"max_qp", &faults.limits.max_qp},
    {"zero_write", &faults.limits.zero_write},
    {"any_qp", &faults.limits.any_qp},
    {"keep_cqes", &faults.limits.keep_cqes},
};

static uint64_t next(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

bool chance(uint32_t percent) { return percent && next() % 100 < percent; }
uint64_t some(uint64_t below) { return below ? next() % below : 0; }

// "name=value name=value"
int faults_set(const char *text) {
    char name[32];
    unsigned long value;
    int used;
    while (sscanf(text, " %31[a-z_]=%lu%n", name, &value, &used) == 2) {
        size_t i = 0, n = sizeof knobs / sizeof *knobs;
        while (i < n && strcmp(knobs[i].name, name)) i++;
        if (i < n) *knobs[i].value = (uint32_t)value;
        else if (!strcmp(name, "seed")) seed = value * 2 + 1;
        else return EINVAL;
        text += used;
    }
    while (*text == ' ') text++;
    return *text ? EINVAL : 0;
}
