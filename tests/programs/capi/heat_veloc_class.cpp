// Heat with VELOC's interface for C++. heat_veloc_class CONFIGURATION plain|objects|file|single
//
// objects: a part of the state is written to streams. single: each process for itself, which knows nothing of MPI.
#include "heat.h"
#include "include/veloc.hpp"

static char how;
static veloc::client_t *client;
static int seen = -1;
// What the steps have left: grows, and is no memory of one piece.
static std::map<int, std::string> history;

static void write_history(std::ostream &to) {
    for (auto &entry : history) to << entry.first << ' ' << entry.second << '\n';
}

static bool read_history(std::istream &from) {
    int key;
    std::string value;
    history.clear();
    while (from >> key >> value) history[key] = value;
    return from.eof();
}

static void checkpoint() {
    if (how == 'p' || how == 's') {
        want(client->checkpoint("heat", step), "checkpoint");
        return;
    }
    want(client->checkpoint_wait(), "checkpoint_wait");
    want(client->checkpoint_begin("heat", step), "checkpoint_begin");
    want(!client->checkpoint_begin("heat", step), "a checkpoint in a checkpoint");
    if (how == 'o') {
        want(client->checkpoint_mem(VELOC_CKPT_REST, {3}), "checkpoint_mem");
    } else {
        std::string path = client->route_file("heat.dat");
        FILE *f = fopen(path.c_str(), "wb");
        want(f && fwrite(&step, sizeof step, 1, f) == 1 && fwrite(now, sizeof now, 1, f) == 1 && fclose(f) == 0, "write");
    }
    want(client->checkpoint_end(true), "checkpoint_end");
    want(seen == step, "an observer");
}

static void restart(int version) {
    want(!client->restart("heat", version + 1), "a version that nobody has");
    want(!client->restart("heat", version, 5) && client->restart_test("heat", 0, 5) < 0, "another rank");
    if (how == 'p' || how == 's') {
        want(client->restart("heat", version), "restart");
        return;
    }
    want(!client->recover_mem(VELOC_RECOVER_ALL, {}), "recover_mem before restart_begin");
    want(client->restart_begin("heat", version), "restart_begin");
    if (how == 'o') {
        want(client->recover_size(1) == sizeof now && client->recover_size(3) == 0, "recover_size");
        want(client->recover_mem(VELOC_RECOVER_SOME, {0}) && step == version, "recover_mem");
        want(now[1][COLUMNS / 2] == 0 && history.empty(), "one region alone");
        want(!client->recover_mem(VELOC_RECOVER_SOME, {3}), "a region that the version has not");
        want(client->mem_unprotect(2) && !client->recover_mem(VELOC_RECOVER_REST, {0}), "an object that is not there");
        want(client->mem_protect(2, write_history, [](std::istream &) { return false; }), "mem_protect");
        want(!client->recover_mem(VELOC_RECOVER_REST, {0}), "an object that cannot be read");
        want(client->mem_protect(2, write_history, read_history), "mem_protect");
        want(client->recover_mem(VELOC_RECOVER_REST, {0}), "recover_mem");
    } else {
        std::string path = client->route_file("heat.dat");
        FILE *f = fopen(path.c_str(), "rb");
        want(f && fread(&step, sizeof step, 1, f) == 1 && fread(now, sizeof now, 1, f) == 1 && fclose(f) == 0, "read");
    }
    want(client->restart_end(true), "restart_end");
}

// Objects and memory that belong to one checkpoint only.
static void of_one_name() {
    int k = 7, shared = 3;
    std::string text = "seven", large(100000, 'x');
    auto write = [&](std::ostream &to) { to << text; };
    auto read = [&](std::istream &from) { return bool(from >> text); };
    want(client->mem_protect(0, &k, 1, sizeof k, "other") && client->mem_protect(1, write, read, "other"), "mem_protect");
    want(client->checkpoint("other", 1), "checkpoint");
    // Memory in the place of an object, and the other way round.
    want(client->mem_protect(1, &shared, 1, sizeof shared, "other") && client->mem_protect(0, write, read, "other"), "mem_protect");
    text = large;
    want(client->checkpoint("other", 2), "checkpoint");
    k = shared = 0;
    text.clear();
    want(client->mem_protect(2, write, [](std::istream &) { return false; }, "other"), "mem_protect of what no version has");
    want(client->restart("other", 2) && shared == 3 && text == large && k == 0, "restart");
    want(client->mem_protect(0, &k, 1, sizeof k, "other") && client->mem_protect(1, write, read, "other"), "mem_protect");
    want(client->restart("other", 1) && k == 7 && text == "seven" && shared == 3, "restart of what is older");
    client->mem_clear("other");
    want(client->mem_protect(0, &k, 1, sizeof k, "other") && !client->restart("other", 1), "a region that has no place");
    client->mem_clear("other");
}

int main(int argc, char **argv) {
    double unsaved[3] = {0};
    std::string expected;
    want(argc > 2, "arguments");
    how = argv[2][0];
    if (how == 's') {
        ranks = 1;
        rank = atoi(getenv("OMPI_COMM_WORLD_RANK"));
        client = veloc::get_client((unsigned)rank, argv[1]);
    } else {
        MPI_Init(&argc, &argv);
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &ranks);
        bool refused = false;
        try {
            veloc::get_client(MPI_COMM_WORLD, "/nowhere/veloc.cfg");
        } catch (std::exception &e) {
            refused = strstr(e.what(), "/nowhere/veloc.cfg");
        }
        want(refused, "a configuration that is not there");
        client = veloc::get_client(MPI_COMM_WORLD, argv[1]);
    }
    want(client->register_observer(VELOC_OBSERVE_CKPT_END, [](const std::string &name, int v) { seen = name == "heat" ? v : -1; }),
         "register_observer");
    want(!client->register_observer(77, [](const std::string &, int) {}), "an observer of what there is not");
    want(!client->checkpoint("heat", 0), "a checkpoint of nothing");
    start_heat();
    if (how != 'f') {
        want(client->mem_protect(0, &step, 1, sizeof step), "mem_protect");
        want(client->mem_protect(1, now, sizeof now / sizeof(double), sizeof(double)), "mem_protect");
    }
    if (how == 'o') {
        want(client->mem_protect(2, write_history, read_history), "mem_protect");
        want(client->mem_protect(3, unsaved, 3, sizeof(double)), "mem_protect");
    }
    int version = client->restart_test("heat", 0);
    if (version > 0) {
        restart(version);
        want(step == version, "another version");
        if (rank == 0) printf("from %d\n", step);
    }
    if (rank == 0) printf("begins\n"), fflush(stdout);
    while (step < STEPS) {
        if (how == 's') usleep(2000), now[1][0] = now[1][0] * 0.999 + step;
        else one_step(MPI_COMM_WORLD);
        if (++step % 20) continue;
        history[step] = std::to_string(step * 7);
        checkpoint();
    }
    if (how == 'o')
        for (int s = 20; s <= STEPS; s += 20) want(history[s] == std::to_string(s * 7), "an object");
    if (how != 's') say_heat(MPI_COMM_WORLD);
    else if (rank == 0) printf("heat %a\n", now[1][0]);
    if (how == 'o') of_one_name();
    want(client->checkpoint_wait() && client->checkpoint_finished(), "checkpoint_wait");
    want(client->restart_test("heat", STEPS) == STEPS - 20, "the one before the last");
    want(client->cleanup("heat"), "cleanup");
    // With MPI, or after its end.
    if (how != 'f') delete client;
    if (how != 's') MPI_Finalize();
    if (how == 'f') delete client;
    return 0;
}
