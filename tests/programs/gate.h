// A library that takes part in checkpoints through a control page (abi/src/control.rs says how), for tests only.
//
// gate_join() makes the page and the thread that serves it. What must not be interrupted by a checkpoint stands
// between gate_enter() and gate_leave(). gate_hook is called at each edge.
#ifndef GATE_H
#define GATE_H
#include "check.h"
#include <linux/futex.h>
#include <stddef.h>

#define GATE_MAGIC 0x6c746379616c6562ULL
#define GATE_DIED 0x40000000u
#define GATE_WAITERS 0x80000000u
enum { GATE_CLOSE = 1, GATE_OPEN, GATE_REBUILD };
enum { GATE_DONE, GATE_REFUSED, GATE_BUSY, GATE_MORE };
enum { GATE_FACT = 1, GATE_WISH, GATE_SUM };

typedef struct { _Alignas(8) _Atomic uint32_t value; } gate_word;
typedef struct {
    _Atomic uint64_t magic;
    uint32_t version;
    int32_t owner, descriptor;
    uint32_t reserved;
    char library[40];
    gate_word hold[2], serve[2];
    _Atomic uint32_t order, limit_ms, answer, outcome;
    struct { uint64_t address, bytes; } fault, told, room;
    _Atomic uint64_t heard;
    _Atomic uint32_t round;
} gate_control;
_Static_assert(sizeof(gate_control) == 176 && offsetof(gate_control, hold) == 64 && offsetof(gate_control, order) == 96, "layout");

// The list by which the kernel finds what a thread holds: a link for each word, as far before it.
struct gate_links { struct robust_list link[2]; struct robust_list_head head; };

#define GATE_THREADS 64
static gate_control *gate_page;
static struct gate_links *gate_links;
static pthread_t gate_thread;
// The order that has shut the gate, 0 while it is open; where each thread is.
enum { GATE_OUTSIDE, GATE_KNOCKS, GATE_INSIDE };
static _Atomic uint32_t gate_shut, gate_in[GATE_THREADS];
static _Atomic unsigned gate_threads;
static __thread unsigned gate_slot;
// What the program looks at: the orders carried out, and what is counted inside.
static _Atomic unsigned long gate_closed, gate_opened, gate_rebuilt, gate_orphaned;
static _Atomic unsigned long gate_before, gate_after;
// The edges at which the hook is called: the order is there, and it is about to be answered, or has been.
enum { EDGE_ASKED, EDGE_READY, EDGE_ANSWERED };
static void (*gate_hook)(uint32_t kind, int edge);
// What a library may do that does not keep what it promises: it waits for nobody, or refuses.
static int gate_careless;
static uint32_t gate_outcome;
// What it has to tell the others, by whose answer it decides how to answer itself.
static uint32_t (*gate_talk)(uint32_t round);
static char gate_told[1024], gate_room[65536];

static long gate_futex(_Atomic uint32_t *word, int op, uint32_t value) { return syscall(SYS_futex, word, op, value, NULL, NULL, 0); }
static void gate_wake(_Atomic uint32_t *word) { gate_futex(word, FUTEX_WAKE, INT_MAX); }
static unsigned gate_place(uint32_t order) { return order >> 8 & 1; }
static void gate_edge(uint32_t kind, int edge) { if (gate_hook) gate_hook(kind, edge); }

// Nobody is inside, and all that was begun there has been finished.
static void gate_check(const char *when) {
    for (unsigned i = 1; i <= gate_threads; i++)
        if (gate_in[i] == GATE_INSIDE) fail("%s: thread %u is inside", when, i);
    if (gate_before != gate_after) fail("%s: %lu begun, %lu finished", when, gate_before, gate_after);
}

// The gate that order `by` has shut opens, unless a later one has shut it since. Who opens it looks first, so that
// nobody comes in before.
#define GATE_LOOKING 0x80
static void gate_open(uint32_t by) {
    if (by & GATE_LOOKING) {
        gate_futex(&gate_shut, FUTEX_WAIT, by);
        return;
    }
    uint32_t looking = by | GATE_LOOKING;
    uint32_t expected = by;
    if (!atomic_compare_exchange_strong(&gate_shut, &expected, looking)) return;
    // One that has not come to rest was in nobody's checkpoint.
    if (gate_page->answer == by) gate_check("before it opens");
    atomic_compare_exchange_strong(&gate_shut, &looking, 0);
    gate_wake(&gate_shut);
}

// Waits at the gate that `by` has shut for a change of whatever `order` is held by; opens it when nothing does.
static void gate_wait(uint32_t by, uint32_t order) {
    _Atomic uint32_t *hold = &gate_page->hold[gate_place(order)].value;
    uint32_t value = *hold;
    if (value & GATE_DIED) {
        // The kernel has woken one of those that wait.
        if (order == gate_page->order && atomic_compare_exchange_strong(hold, &value, 0)) gate_orphaned++;
        gate_wake(hold);
    }
    if (value && !(value & GATE_DIED)) {
        gate_futex(hold, FUTEX_WAIT, value);
        // Perhaps the kernel has woken this thread alone.
        if (*hold != value) gate_wake(hold);
    } else if (order == gate_page->order) gate_open(by);
}

static void gate_enter(void) {
    if (!gate_slot) gate_slot = ++gate_threads;
    CHECK(gate_slot < GATE_THREADS);
    for (;;) {
        gate_in[gate_slot] = GATE_KNOCKS;
        uint32_t by = gate_shut;
        if (!by) {
            gate_in[gate_slot] = GATE_INSIDE;
            return;
        }
        gate_in[gate_slot] = GATE_OUTSIDE;
        gate_wake(&gate_in[gate_slot]);
        gate_wait(by, gate_page->order);
    }
}

static void gate_leave(void) {
    gate_in[gate_slot] = GATE_OUTSIDE;
    if (gate_shut) gate_wake(&gate_in[gate_slot]);
}

static void gate_come_to_rest(uint32_t order) {
    gate_shut = order;
    for (unsigned i = 1; i <= gate_threads && !gate_careless; i++)
        for (uint32_t at; (at = gate_in[i]);) gate_futex(&gate_in[i], FUTEX_WAIT, at);
}

// Adds an entry to what is told.
static void gate_tell(uint8_t kind, const char *key, const void *value, uint32_t bytes) {
    uint16_t length = (uint16_t)strlen(key);
    char *at = gate_told + gate_page->told.bytes;
    CHECK(at + 8 + length + bytes <= gate_told + sizeof gate_told);
    memcpy(at, (uint8_t[]){kind, 0}, 2);
    memcpy(at + 2, &length, 2);
    memcpy(at + 4, &bytes, 4);
    memcpy(at + 8, key, length);
    if (bytes) memcpy(at + 8 + length, value, bytes);
    gate_page->told.bytes += 8 + length + bytes;
}

// The entries of this kind in the answer whose keys begin so: how many, and what their numbers add up to.
static unsigned gate_heard(uint8_t kind, const char *begin, uint64_t *sum) {
    unsigned n = 0;
    *sum = 0;
    for (const char *at = gate_room, *end = at + gate_page->heard; at < end;) {
        uint16_t length;
        uint32_t bytes;
        memcpy(&length, at + 2, 2);
        memcpy(&bytes, at + 4, 4);
        const char *value = at + 8 + length;
        uint64_t number = 0;
        CHECK(value + bytes <= end && bytes == sizeof number);
        memcpy(&number, value, sizeof number);
        if ((uint8_t)*at == kind && length >= strlen(begin) && memcmp(at + 8, begin, strlen(begin)) == 0) n++, *sum += number;
        at = value + bytes;
    }
    return n;
}

static uint32_t gate_self(void) { return (uint32_t)syscall(SYS_gettid) | GATE_WAITERS; }

static void gate_answer(uint32_t order, uint32_t outcome) {
    gate_page->outcome = outcome;
    gate_page->serve[!gate_place(order)].value = gate_self();
    gate_page->answer = order;
    gate_page->serve[gate_place(order)].value = 0;
    gate_wake(&gate_page->serve[gate_place(order)].value);
}

static void gate_carry_out(uint32_t order) {
    uint32_t kind = order & 0xff;
    gate_page->serve[gate_place(order)].value = gate_self();
    gate_edge(kind, EDGE_ASKED);
    if (kind == GATE_CLOSE) gate_come_to_rest(order);
    if (kind == GATE_REBUILD) gate_check("after a restart");
    uint32_t outcome = GATE_DONE;
    if (kind != GATE_OPEN && gate_talk) outcome = gate_talk(gate_page->round);
    if (outcome == GATE_DONE && kind == GATE_CLOSE) gate_closed++;
    if (outcome == GATE_DONE && kind == GATE_REBUILD) gate_rebuilt++;
    gate_edge(kind, EDGE_READY);
    if (gate_outcome) outcome = gate_outcome;
    // The last order counts.
    if (order != gate_page->order) return;
    if (kind == GATE_OPEN) {
        gate_opened++;
        uint32_t by = gate_shut;
        if (by) gate_open(by);
    }
    gate_answer(order, outcome);
    gate_edge(kind, EDGE_ANSWERED);
}

static void *gate_serve(void *arg) {
    struct gate_links *l = gate_links;
    (void)arg;
    // In place of the C library's list, which this thread has no use for.
    OK(syscall(SYS_set_robust_list, &l->head, sizeof l->head));
    uint32_t done = gate_page->order;
    gate_page->serve[!gate_place(done)].value = gate_self();
    atomic_store(&gate_page->magic, GATE_MAGIC);
    for (;;) {
        uint32_t order = gate_page->order;
        if (order != done) gate_carry_out(done = order);
        // Not at what holds a later order, which only this thread can answer.
        else if (gate_shut) gate_wait(gate_shut, done);
        else gate_futex(&gate_page->order, FUTEX_WAIT, done);
    }
}

static void gate_start(const char *library) {
    size_t page = 4096;
    int fd = (int)OK(syscall(SYS_memfd_create, "belay-control", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    OK(ftruncate(fd, (off_t)page));
    OK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK));
    // The links in a page of our own, as far before the words as the next page begins.
    char *both = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(both != MAP_FAILED && mmap(both + page, page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == both + page);
    gate_control *c = (gate_control *)(void *)(both + page);
    struct robust_list *links = (struct robust_list *)(void *)(both + offsetof(gate_control, serve));
    struct gate_links *l = calloc(1, sizeof *l);
    CHECK(l != NULL);
    links[0].next = &links[1];
    links[1].next = &l->head.list;
    l->head.list.next = &links[0];
    l->head.futex_offset = (long)page;
    c->version = 2;
    c->room.address = (uintptr_t)gate_room;
    c->room.bytes = sizeof gate_room;
    c->told.address = (uintptr_t)gate_told;
    c->owner = getpid();
    c->descriptor = fd;
    snprintf(c->library, sizeof c->library, "%s", library);
    gate_page = c;
    gate_links = l;
    gate_shut = 0;
    CHECK(pthread_create(&gate_thread, NULL, gate_serve, NULL) == 0);
    while (!atomic_load(&c->magic)) sched_yield();
}

// In a child, whose page is its parent's: a page and a thread of its own.
static void gate_after_fork(void) {
    int fd = gate_page->descriptor;
    char library[sizeof gate_page->library];
    memcpy(library, gate_page->library, sizeof library);
    OK(munmap((char *)gate_page - 4096, 2 * 4096));
    OK(close(fd));
    for (unsigned i = 0; i < GATE_THREADS; i++) gate_in[i] = GATE_OUTSIDE;
    gate_threads = gate_slot = 0;
    gate_start(library);
}

static void gate_join(const char *library) {
    gate_start(library);
    CHECK(pthread_atfork(NULL, NULL, gate_after_fork) == 0);
}
#endif
