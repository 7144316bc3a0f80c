// What librdmacm promises where something goes wrong, or many come at once. All ends are in this process.
//
//     verbs_cm_rules CHECK PORT      PORT and the two after it are free
#include "verbscheck.h"
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sys/resource.h>

enum { CONSUMER = 28 };

static int port;

static struct sockaddr_in here(int p) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)p)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}

static int readable(struct rdma_event_channel *channel, int ms) {
    struct pollfd polled = {channel->fd, POLLIN, 0};
    return OK(poll(&polled, 1, ms)) > 0;
}

static void never_wait(struct rdma_event_channel *channel) {
    OK(fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK));
}

static struct rdma_cm_id *new_id(struct rdma_event_channel *channel) {
    struct rdma_cm_id *id;
    OK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
    return id;
}

static int bind_to(struct rdma_cm_id *id, int p) {
    struct sockaddr_in a = here(p);
    return rdma_bind_addr(id, (struct sockaddr *)&a);
}

static struct rdma_cm_id *listener(struct rdma_event_channel *channel) {
    struct rdma_cm_id *id = new_id(channel);
    OK(bind_to(id, port));
    OK(rdma_listen(id, 0));
    return id;
}

// The next event, which must be this one. It is acknowledged; its identifier.
static struct rdma_cm_id *expect(struct rdma_event_channel *channel, enum rdma_cm_event_type type, int status) {
    struct rdma_cm_event *event;
    OK(rdma_get_cm_event(channel, &event));
    if (event->event != type || event->status != status)
        fail("%s with %d and not %s", rdma_event_str(event->event), event->status, rdma_event_str(type));
    struct rdma_cm_id *id = event->id;
    OK(rdma_ack_cm_event(event));
    return id;
}

// An identifier that asks for a connection to the listener.
static struct rdma_cm_id *ask(struct rdma_event_channel *channel) {
    struct rdma_cm_id *id = new_id(channel);
    struct sockaddr_in a = here(port);
    OK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 2000));
    CHECK(expect(channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0) == id);
    OK(rdma_resolve_route(id, 2000));
    CHECK(expect(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, 0) == id);
    struct rdma_conn_param p = {.responder_resources = 1, .initiator_depth = 1, .qp_num = 7};
    OK(rdma_connect(id, &p));
    return id;
}

static void reject(struct rdma_event_channel *channel) {
    struct rdma_cm_id *id = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    CHECK(id->channel == channel);
    OK(rdma_reject(id, NULL, 0));
    OK(rdma_destroy_id(id));
}

static void rejected(struct rdma_event_channel *channel) {
    OK(rdma_destroy_id(expect(channel, RDMA_CM_EVENT_REJECTED, CONSUMER)));
}

// Descriptors that are open.
static int descriptors(void) {
    int n = 0;
    for (int fd = 0; fd < 4096; fd++) n += fcntl(fd, F_GETFD) != -1;
    return n;
}

// A channel that is destroyed before its identifiers takes everything with it that is in it, and nothing of another that
// comes after it.
static void channels(void) {
    struct rdma_event_channel *gone = V(rdma_create_event_channel()), *channel, *asks = V(rdma_create_event_channel());
    struct rdma_cm_id *old = new_id(gone), *listens = listener(gone), *first = ask(asks), *second = ask(asks);
    // One request is seen, and the other is made and not seen.
    struct rdma_cm_id *seen = expect(gone, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    int before = descriptors();
    rdma_destroy_event_channel(gone);
    CHECK(descriptors() < before);
    // What comes next takes the memory of what has gone.
    struct rdma_event_channel *next[8];
    for (int i = 0; i < 8; i++) next[i] = V(rdma_create_event_channel());
    struct sockaddr_in a = here(port);
    rdma_resolve_addr(old, NULL, (struct sockaddr *)&a, 2000);
    for (int i = 0; i < 8; i++) CHECK(!readable(next[i], 0));
    // Those who have asked are told; it listens no more.
    rejected(asks);
    rejected(asks);
    channel = V(rdma_create_event_channel());
    never_wait(channel);
    struct rdma_cm_id *other = listener(channel);
    OK(rdma_destroy_id(old));
    OK(rdma_destroy_id(listens));
    OK(rdma_destroy_id(seen));
    (void)first, (void)second;
    for (int i = 0; i < 8; i++) rdma_destroy_event_channel(next[i]);
    // The other one is as it was.
    ask(asks);
    CHECK(readable(channel, 5000));
    reject(channel);
    rejected(asks);
    OK(rdma_destroy_id(other));
    rdma_destroy_event_channel(channel);
    rdma_destroy_event_channel(asks);
}

// Why there is no channel, or no event, is said by the number that the manual page says.
static void numbers(void) {
    struct rdma_event_channel *channel = V(rdma_create_event_channel());
    struct rdma_cm_event *event;
    OK(close(channel->fd));
    EQ(rdma_get_cm_event(channel, &event), -1);
    EQ(errno, EBADF);
    struct rlimit all, few = {3, 3};
    OK(getrlimit(RLIMIT_NOFILE, &all));
    few.rlim_max = all.rlim_max;
    OK(setrlimit(RLIMIT_NOFILE, &few));
    errno = 0;
    CHECK(!rdma_create_event_channel());
    EQ(errno, EMFILE);
    OK(setrlimit(RLIMIT_NOFILE, &all));
}

// A port is one identifier's, from when it is bound.
static void ports(void) {
    struct rdma_event_channel *channel = V(rdma_create_event_channel());
    struct rdma_cm_id *first = new_id(channel), *second = new_id(channel);
    OK(bind_to(first, port));
    EQ(bind_to(second, port), -1);
    EQ(errno, EADDRINUSE);
    OK(rdma_listen(first, 0));
    EQ(bind_to(second, port), -1);
    EQ(errno, EADDRINUSE);
    // Connections that have ended keep it from nobody.
    ask(channel);
    struct rdma_cm_id *asked = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    OK(rdma_destroy_id(first));
    OK(bind_to(second, port));
    OK(rdma_destroy_id(asked));
    OK(rdma_destroy_id(expect(channel, RDMA_CM_EVENT_REJECTED, CONSUMER)));
    OK(rdma_destroy_id(second));
    second = listener(channel);
    OK(rdma_destroy_id(second));
    // Two that say so may have one, of which one listens.
    first = new_id(channel), second = new_id(channel);
    int yes = 1;
    OK(rdma_set_option(first, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &yes, sizeof yes));
    OK(rdma_set_option(second, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &yes, sizeof yes));
    OK(bind_to(first, port));
    OK(bind_to(second, port));
    OK(rdma_listen(second, 0));
    EQ(rdma_listen(first, 0), -1);
    EQ(errno, EADDRINUSE);
    OK(rdma_destroy_id(first));
    OK(rdma_destroy_id(second));
    rdma_destroy_event_channel(channel);
}

// On one host a channel is readable when there is an event: who polls first does not wait in rdma_get_cm_event.
static void polled(void) {
    struct rdma_event_channel *serves = V(rdma_create_event_channel()), *asks = V(rdma_create_event_channel());
    struct rdma_cm_id *listens = listener(serves);
    for (int i = 0; i < 20; i++) {
        ask(asks);
        CHECK(!readable(asks, 20));
        CHECK(readable(serves, 5000));
        reject(serves);
        CHECK(readable(asks, 5000));
        rejected(asks);
    }
    OK(rdma_destroy_id(listens));
    rdma_destroy_event_channel(serves);
    rdma_destroy_event_channel(asks);
}

// More than wait for a listener at a time: each is heard.
static void crowd(void) {
    enum { CROWD = 200 };
    struct rdma_event_channel *serves = V(rdma_create_event_channel()), *asks = V(rdma_create_event_channel());
    struct rdma_cm_id *listens = listener(serves);
    for (int i = 0; i < CROWD; i++) ask(asks);
    for (int i = 0; i < CROWD; i++) reject(serves);
    for (int i = 0; i < CROWD; i++) rejected(asks);
    OK(rdma_destroy_id(listens));
    rdma_destroy_event_channel(serves);
    rdma_destroy_event_channel(asks);
}

static pthread_barrier_t turn;

static void *waits(void *channel) {
    struct rdma_cm_event *event;
    Z(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL));
    pthread_barrier_wait(&turn);
    pthread_barrier_wait(&turn);
    // It is cancelled already, and ends where it may.
    Z(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL));
    rdma_get_cm_event(channel, &event);
    return NULL;
}

static void *waits_long(void *channel) {
    struct rdma_cm_event *event;
    pthread_barrier_wait(&turn);
    rdma_get_cm_event(channel, &event);
    return NULL;
}

// A thread that is cancelled while it waits for an event takes none with it, and no lock.
static void cancelled(void) {
    struct rdma_event_channel *channel = V(rdma_create_event_channel());
    struct rdma_cm_id *listens = listener(channel);
    Z(pthread_barrier_init(&turn, NULL, 2));
    for (int i = 0; i < 40; i++) {
        pthread_t thread;
        void *answer;
        Z(pthread_create(&thread, NULL, i % 2 ? waits_long : waits, channel));
        pthread_barrier_wait(&turn);
        if (i % 2) nap_us(i * 100);
        Z(pthread_cancel(thread));
        if (i % 2 == 0) pthread_barrier_wait(&turn);
        Z(pthread_join(thread, &answer));
        CHECK(answer == PTHREAD_CANCELED);
        struct rdma_cm_id *id = new_id(channel);
        struct sockaddr_in a = here(port);
        OK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 2000));
        CHECK(expect(channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0) == id);
        OK(rdma_destroy_id(id));
    }
    OK(rdma_destroy_id(listens));
    rdma_destroy_event_channel(channel);
}

// Who has asked a listener goes with it to another channel: heard, made and not seen, or connected only.
static void moved(void) {
    struct rdma_event_channel *from = V(rdma_create_event_channel()), *to = V(rdma_create_event_channel());
    struct rdma_event_channel *asks = V(rdma_create_event_channel());
    struct rdma_cm_id *listens = listener(from);
    int silent = (int)OK(socket(AF_INET, SOCK_STREAM, 0));
    struct sockaddr_in a = here(port);
    OK(connect(silent, (struct sockaddr *)&a, sizeof a));
    for (int i = 0; i < 3; i++) ask(asks);
    reject(from);
    for (int i = 0; i < 2; i++) ask(asks);
    OK(rdma_migrate_id(listens, to));
    never_wait(from);
    CHECK(!readable(from, 0));
    for (int i = 0; i < 4; i++) reject(to);
    // Who had said nothing says something.
    CHECK(!readable(to, 0));
    EQ(send(silent, "x", 1, MSG_NOSIGNAL), 1);
    CHECK(readable(to, 5000) && !readable(from, 0));
    for (int i = 0; i < 5; i++) rejected(asks);
    // One that was made before it moved, and has given up by then.
    struct rdma_cm_id *first = ask(asks), *second = ask(asks);
    reject(to);
    OK(rdma_migrate_id(listens, from));
    OK(rdma_destroy_id(second));
    CHECK(readable(from, 5000));
    struct rdma_cm_event *event;
    struct rdma_cm_id *made = NULL;
    for (int rejections = 0; !rejections;) {
        if (rdma_get_cm_event(from, &event)) {
            EQ(errno, EAGAIN);
            continue;
        }
        made = event->id;
        CHECK(made->channel == from);
        rejections = event->event == RDMA_CM_EVENT_REJECTED;
        OK(rdma_ack_cm_event(event));
    }
    OK(rdma_destroy_id(made));
    OK(rdma_destroy_id(first));
    OK(close(silent));
    OK(rdma_destroy_id(listens));
    rdma_destroy_event_channel(from);
    rdma_destroy_event_channel(to);
    rdma_destroy_event_channel(asks);
}

// Completion queues go once: those of an identifier with its queue pair, those of the program when the program says so.
static void queues(void) {
    struct rdma_event_channel *channel = V(rdma_create_event_channel());
    struct ibv_qp_init_attr own = {.cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
    struct sockaddr_in a = here(port);
    for (int way = 0; way < 3; way++) {
        struct rdma_cm_id *id = new_id(channel);
        OK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 2000));
        expect(channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
        struct ibv_qp_init_attr init = own;
        struct ibv_cq *given = NULL;
        if (way) given = V(ibv_create_cq(id->verbs, 8, NULL, NULL, 0));
        // Given for the queue pair alone, or to the identifier, which has it for both then.
        if (way == 1) init.send_cq = init.recv_cq = given;
        if (way == 2) {
            id->send_cq_channel = id->recv_cq_channel = V(ibv_create_comp_channel(id->verbs));
            ibv_destroy_cq(given);
            id->send_cq = id->recv_cq = V(ibv_create_cq(id->verbs, 8, NULL, id->send_cq_channel, 0));
        }
        OK(rdma_create_qp(id, NULL, &init));
        CHECK(way == 1 ? id->qp->send_cq == given && !id->send_cq : id->qp->send_cq == id->send_cq && id->send_cq);
        // What comes next takes the memory of what has gone.
        rdma_destroy_qp(id);
        CHECK(!id->qp && !id->send_cq && !id->recv_cq && !id->send_cq_channel && !id->recv_cq_channel);
        struct ibv_cq *next = V(ibv_create_cq(id->verbs, 8, NULL, NULL, 0));
        struct ibv_context *verbs = id->verbs;
        OK(rdma_destroy_id(id));
        Z(ibv_destroy_cq(next));
        if (way == 1) Z(ibv_destroy_cq(given));
        CHECK(verbs);
    }
    rdma_destroy_event_channel(channel);
}

static long resident_kib(void) { return told_kib("/proc/self/status", "VmRSS"); }

static uint64_t dice;

static uint64_t roll(uint64_t below) {
    dice = mix(dice + 1);
    return dice % below;
}

// A request as others send it, or what it might be, or anything.
static size_t words_of(uint8_t *bytes) {
    size_t length = 60 + roll(256);
    for (size_t i = 0; i < length; i++) bytes[i] = (uint8_t)roll(256);
    int kind = (int)roll(4);
    if (kind == 0) return roll(length + 1);
    memcpy(bytes, "belay-cm\0\1", 10);
    bytes[10] = kind == 1 ? 0 : (uint8_t)roll(6);
    bytes[11] = (uint8_t)(length - 60);
    if (kind != 3) {
        // Its numbers are those that pass.
        bytes[30] = (uint8_t)roll(3), bytes[31] = 3, bytes[35] = 7, bytes[36] = 7, bytes[40] = bytes[44] = 0;
        bytes[52] = bytes[53] = 0, bytes[54] = 1, bytes[55] = 6;
    }
    return roll(3) ? length : roll(length + 1);
}

// Strangers at the port of a listener: they say anything, in pieces, or nothing, and stay or leave.
static void strangers(void) {
    enum { STRANGERS = 3000, AT_A_TIME = 400 };
    struct rdma_event_channel *serves = V(rdma_create_event_channel()), *asks = V(rdma_create_event_channel());
    struct rdma_cm_id *listens = listener(serves);
    struct sockaddr_in a = here(port);
    never_wait(serves);
    const char *seed = getenv("VERBS_SEED");
    dice = seed ? strtoull(seed, NULL, 0) : (uint64_t)now_ns();
    printf("VERBS_SEED=%llu\n", (unsigned long long)dice);
    int own = descriptors(), heard = 0;
    long before = 0;
    static int they[AT_A_TIME];
    for (int i = 0; i < STRANGERS; i++) {
        int *who = &they[i % AT_A_TIME];
        if (*who) close(*who);
        *who = (int)OK(socket(AF_INET, SOCK_STREAM, 0));
        OK(connect(*who, (struct sockaddr *)&a, sizeof a));
        uint8_t bytes[512];
        size_t length = words_of(bytes), first = roll(length + 1);
        if (roll(8)) {
            send(*who, bytes, first, MSG_NOSIGNAL);
            if (roll(2)) send(*who, bytes + first, length - first, MSG_NOSIGNAL);
        }
        if (roll(16) == 0) {
            struct linger now = {1, 0};
            OK(setsockopt(*who, SOL_SOCKET, SO_LINGER, &now, sizeof now));
            OK(close(*who));
            *who = 0;
        }
        // Whoever means it is served meanwhile.
        struct rdma_cm_id *mine = i % 100 == 0 ? ask(asks) : NULL;
        for (int turns = 0; turns < 40 || mine; turns++) {
            struct rdma_cm_event *event;
            if (rdma_get_cm_event(serves, &event)) {
                EQ(errno, EAGAIN);
            } else {
                struct rdma_cm_id *id = event->id;
                EQ(event->event, RDMA_CM_EVENT_CONNECT_REQUEST);
                OK(rdma_ack_cm_event(event));
                heard++;
                OK(rdma_reject(id, NULL, 0));
                OK(rdma_destroy_id(id));
            }
            if (mine && readable(asks, 0)) {
                rejected(asks);
                mine = NULL;
            }
            if (turns > 2000000) fail("who means it is not heard");
        }
        int most = own + AT_A_TIME + 140;
        if (i % 500 == 0 && descriptors() > most) fail("%d descriptors are open", descriptors());
        if (i == STRANGERS / 3) before = resident_kib();
    }
    if (heard < 60) fail("%d requests were heard", heard);
    long grown = resident_kib() - before;
    if (grown > 4096) fail("%ld KiB more", grown);
    OK(rdma_destroy_id(listens));
    rdma_destroy_event_channel(serves);
    rdma_destroy_event_channel(asks);
}

// Checkpoints find requests for which nobody asks: one is waited for, one was given up, and one has said nothing.
static void unheard(void) {
    struct rdma_event_channel *serves = V(rdma_create_event_channel()), *asks = V(rdma_create_event_channel());
    struct rdma_cm_id *listens = listener(serves);
    struct sockaddr_in a = here(port);
    int silent = (int)OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(connect(silent, (struct sockaddr *)&a, sizeof a));
    ask(asks);
    OK(rdma_destroy_id(ask(asks)));
    OK(close(silent));
    while (running()) nap_us(1000);
    // In the end they are all there; the one that was given up says so.
    int requests = 0, given_up = 0;
    while (requests < 2 || !given_up) {
        struct rdma_cm_event *event;
        OK(rdma_get_cm_event(serves, &event));
        struct rdma_cm_id *id = event->id;
        enum rdma_cm_event_type type = event->event;
        OK(rdma_ack_cm_event(event));
        requests += type == RDMA_CM_EVENT_CONNECT_REQUEST;
        given_up += type == RDMA_CM_EVENT_REJECTED;
        if (type == RDMA_CM_EVENT_REJECTED || (requests == 1 && type == RDMA_CM_EVENT_CONNECT_REQUEST)) {
            if (type == RDMA_CM_EVENT_CONNECT_REQUEST) OK(rdma_reject(id, NULL, 0));
            OK(rdma_destroy_id(id));
        }
    }
    rejected(asks);
    OK(rdma_destroy_id(listens));
    rdma_destroy_event_channel(serves);
    rdma_destroy_event_channel(asks);
}

static const struct check checks[] = {
    {"channels", channels},   {"numbers", numbers}, {"ports", ports},   {"polled", polled},       {"crowd", crowd},
    {"cancelled", cancelled}, {"moved", moved},     {"queues", queues}, {"strangers", strangers},
    {"unheard", unheard},
};

int main(int argc, char **argv) {
    char name[64];
    CHECK(argc == 3);
    snprintf(name, sizeof name, "verbs_cm_rules-%s", argv[1]);
    begin(name);
    port = atoi(argv[2]);
    // What waits for ever is no success.
    if (strcmp(argv[1], "unheard")) alarm(60);
    return run_check(argv[1], checks, sizeof checks / sizeof *checks);
}
