// What is due when: a heap.
#include "fvd.h"
#include <stdlib.h>
#include <time.h>

static struct timer **heap;
static size_t count, room;

uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void put(size_t pos, struct timer *t) {
    heap[pos] = t;
    t->pos = pos;
}

static void up(size_t pos) {
    struct timer *t = heap[pos];
    for (; pos > 1 && heap[pos / 2]->at > t->at; pos /= 2) put(pos, heap[pos / 2]);
    put(pos, t);
}

static void down(size_t pos) {
    struct timer *t = heap[pos];
    for (size_t c = pos * 2; c <= count; pos = c, c *= 2) {
        if (c < count && heap[c + 1]->at < heap[c]->at) c++;
        if (heap[c]->at >= t->at) break;
        put(pos, heap[c]);
    }
    put(pos, t);
}

void timer_stop(struct timer *t) {
    if (!t->pos) return;
    size_t pos = t->pos;
    struct timer *moved = heap[count--];
    t->pos = 0;
    if (moved == t) return;
    put(pos, moved);
    up(pos);
    down(moved->pos);
}

void timer_set(struct timer *t, uint64_t at) {
    timer_stop(t);
    if (count + 2 > room) {
        room = room ? room * 2 : 64;
        heap = realloc(heap, room * sizeof *heap);
        if (!heap) abort();
    }
    t->at = at;
    heap[++count] = t;
    up(count);
}

void timers_fire(void) {
    uint64_t now = now_ns();
    while (count && heap[1]->at <= now) {
        struct timer *t = heap[1];
        timer_stop(t);
        t->fire(t);
    }
}

uint64_t timers_next(void) { return count ? heap[1]->at : UINT64_MAX; }
