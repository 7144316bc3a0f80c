// A table of numbers: open addressing, next place, entries move up when one is dropped.
#include "fvd.h"
#include <stdlib.h>

static uint32_t home(const struct map *m, uint32_t key) { return (key * 2654435769u) & (m->room - 1); }

static struct place *find(const struct map *m, uint32_t key) {
    uint32_t i = home(m, key);
    while (m->at[i].value && m->at[i].key != key) i = (i + 1) & (m->room - 1);
    return &m->at[i];
}

void *map_get(const struct map *m, uint32_t key) { return m->room ? find(m, key)->value : NULL; }

static void grow(struct map *m) {
    struct map more = {calloc(m->room ? m->room * 2 : 64, sizeof *m->at), m->room ? m->room * 2 : 64, m->used};
    if (!more.at) abort();
    for (uint32_t i = 0; i < m->room; i++)
        if (m->at[i].value) *find(&more, m->at[i].key) = m->at[i];
    free(m->at);
    *m = more;
}

void map_put(struct map *m, uint32_t key, void *value) {
    if (m->used * 2 >= m->room) grow(m);
    struct place *p = find(m, key);
    m->used += !p->value;
    *p = (struct place){key, value};
}

void map_drop(struct map *m, uint32_t key) {
    if (!m->room || !find(m, key)->value) return;
    uint32_t hole = (uint32_t)(find(m, key) - m->at), mask = m->room - 1;
    m->at[hole].value = NULL;
    m->used--;
    for (uint32_t i = (hole + 1) & mask; m->at[i].value; i = (i + 1) & mask) {
        // An entry may move to the hole unless its home lies between the two.
        if (((i - home(m, m->at[i].key)) & mask) < ((i - hole) & mask)) continue;
        m->at[hole] = m->at[i];
        m->at[i].value = NULL;
        hole = i;
    }
}

void map_free(struct map *m) {
    free(m->at);
    *m = (struct map){0};
}
