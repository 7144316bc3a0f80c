/* VELOC's interface for programs in C++ (https://veloc.readthedocs.io), over the one for programs in C: a program that was
 * written for VELOC is compiled against this header, and linked with -lbelay. What is the same and what is not:
 * docs/histories.md.
 */
#ifndef VELOC_HPP
#define VELOC_HPP

#include "veloc.h"

#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#define VELOC_OBSERVE_CKPT_END (0)

namespace veloc {

/* What get_client gives; one at a time. To delete it is to finalize: what is on its way is written. */
class client_t {
  public:
    using serializer_t = std::function<void(std::ostream &)>;
    using deserializer_t = std::function<bool(std::istream &)>;
    using observer_t = std::function<void(const std::string &name, int version)>;

    client_t(const client_t &) = delete;
    client_t &operator=(const client_t &) = delete;

    virtual ~client_t() {
        int finalized = 0;
        MPI_Finalized(&finalized);
        /* There is nothing to give back to it then. */
        if (finalized) belay_veloc_state.comm = MPI_COMM_NULL;
        VELOC_Finalize(0);
    }

    bool mem_protect(int id, void *ptr, size_t count, size_t base_size, const std::string &name = "default") {
        if (VELOC_Region_protect(id, ptr, count, base_size, group(name).c_str()) != VELOC_SUCCESS) return false;
        objects[group(name)].erase(id);
        return true;
    }

    /* An object that is written to a stream for each checkpoint, and read from one. */
    bool mem_protect(int id, const serializer_t &s, const deserializer_t &d, const std::string &name = "default") {
        object &o = objects[group(name)][id];
        o = {id, group(name), s, d, ""};
        if (place(o)) return true;
        objects[group(name)].erase(id);
        return false;
    }

    bool mem_unprotect(int id, const std::string &name = "default") {
        objects[group(name)].erase(id);
        return VELOC_Region_unprotect(id, group(name).c_str()) == VELOC_SUCCESS;
    }

    void mem_clear(const std::string &name = "default") {
        objects.erase(group(name));
        VELOC_Region_clear(group(name).c_str());
    }

    /* Called after each checkpoint that all ranks have. False: there is no such type. */
    bool register_observer(int type, const observer_t &obs) {
        if (type != VELOC_OBSERVE_CKPT_END) return belay_veloc_refuse("only VELOC_OBSERVE_CKPT_END can be observed"), false;
        observer = obs;
        return true;
    }

    /* "" after an error. */
    std::string route_file(const std::string &original) {
        char routed[VELOC_MAX_NAME];
        return VELOC_Route_file(original.c_str(), routed) == VELOC_SUCCESS ? routed : "";
    }

    bool cleanup(const std::string &name) { return VELOC_Cleanup(name.c_str()) == VELOC_SUCCESS; }

    /* Collective where the client is, as all that follow but for checkpoint_mem, checkpoint_finished, recover_size and
     * recover_mem. */
    bool checkpoint(const std::string &name, int version) {
        bool written = checkpoint_wait();
        if (!belay_levels_all(belay_veloc_state.comm, written) || !checkpoint_begin(name, version)) return false;
        written = checkpoint_mem(VELOC_CKPT_ALL, {});
        return checkpoint_end(written) && written;
    }

    bool checkpoint_begin(const std::string &name, int version) {
        return VELOC_Checkpoint_begin(name.c_str(), version) == VELOC_SUCCESS;
    }

    bool checkpoint_mem(int mode, const std::set<int> &ids) {
        std::vector<int> all(ids.begin(), ids.end());
        for (object *o : chosen(mode, all)) {
            std::ostringstream to;
            o->write(to);
            o->bytes = to.str();
            if (!to || !place(*o)) return belay_levels_say("VELOC", 0, "region %d cannot be written to a stream", o->id), false;
        }
        return VELOC_Checkpoint_selective(mode, all.data(), (int)all.size()) == VELOC_SUCCESS;
    }

    bool checkpoint_end(bool success) {
        std::string name = belay_veloc_state.group;
        long version = belay_veloc_state.version;
        bool ended = VELOC_Checkpoint_end(success) == VELOC_SUCCESS;
        if (ended && success && observer) observer(name, (int)version);
        return ended;
    }

    bool checkpoint_wait() { return VELOC_Checkpoint_wait() == VELOC_SUCCESS; }
    bool checkpoint_finished() { return VELOC_Checkpoint_finished() == 1; }

    int restart_test(const std::string &name, int version, int target_rank = -1) {
        return own(target_rank) ? VELOC_Restart_test(name.c_str(), version) : VELOC_FAILURE;
    }

    bool restart(const std::string &name, int version, int target_rank = -1) {
        if (!restart_begin(name, version, target_rank)) return false;
        bool read = recover_mem(VELOC_RECOVER_ALL, {});
        return restart_end(read) && read;
    }

    bool restart_begin(const std::string &name, int version, int target_rank = -1) {
        return own(target_rank) && VELOC_Restart_begin(name.c_str(), version) == VELOC_SUCCESS;
    }

    /* 0: the version has no such region. */
    size_t recover_size(int id) {
        long bytes = restarts() ? stored(id) : 0;
        return bytes > 0 ? (size_t)bytes : 0;
    }

    bool recover_mem(int mode, const std::set<int> &ids) {
        std::vector<int> all(ids.begin(), ids.end());
        if (!restarts()) return belay_veloc_refuse("restart_begin comes first"), false;
        std::vector<object *> read;
        for (object *o : chosen(mode, all)) {
            long bytes = stored(o->id);
            if (bytes < 0) continue;
            o->bytes.assign((size_t)bytes, 0);
            if (!place(*o)) return false;
            read.push_back(o);
        }
        if (VELOC_Recover_selective(mode, all.data(), (int)all.size()) != VELOC_SUCCESS) return false;
        for (object *o : read) {
            std::istringstream from(o->bytes);
            if (!o->read(from)) return belay_levels_say("VELOC", 0, "region %d cannot be read from a stream", o->id), false;
        }
        return true;
    }

    bool restart_end(bool success) { return VELOC_Restart_end(success) == VELOC_SUCCESS; }

  private:
    /* Its bytes are a region of the interface in C. */
    struct object {
        int id;
        std::string in;
        serializer_t write;
        deserializer_t read;
        std::string bytes;
    };

    std::map<std::string, std::map<int, object>> objects; /* by group and number */
    observer_t observer;

    client_t() {}
    friend client_t *get_client(unsigned int id, const std::string &cfg_file);
    friend client_t *get_client(MPI_Comm comm, const std::string &cfg_file);

    static client_t *started(int answer, const std::string &cfg_file) {
        if (answer == VELOC_SUCCESS) return new client_t();
        throw std::runtime_error("belay (VELOC): no client with the configuration " + cfg_file + "; standard error has the reason");
    }

    /* What the interface in C calls regions of any checkpoint. */
    static std::string group(const std::string &name) { return name == "default" ? "" : name; }

    static bool restarts() { return belay_veloc_state.now && belay_veloc_state.restarting; }

    /* There is no way to what other ranks have. */
    static bool own(int target_rank) {
        bool is_own = target_rank < 0 || (belay_veloc_state.comm == MPI_COMM_NULL && target_rank == belay_veloc_state.rank);
        if (!is_own) belay_levels_say("VELOC", 0, "rank %d's checkpoints alone cannot be asked for: leave it away", target_rank);
        return is_own;
    }

    /* Bytes of a region in the version that is being read; -1: it has none. */
    static long stored(int id) { return belay_levels_size(belay_veloc_state.now, belay_veloc_state.key, id); }

    static bool place(object &o) {
        return VELOC_Region_protect(o.id, &o.bytes[0], o.bytes.size(), 1, o.in.c_str()) == VELOC_SUCCESS;
    }

    /* The objects among the regions that a checkpoint or restart is of. */
    std::vector<object *> chosen(int mode, const std::vector<int> &ids) {
        std::vector<object *> found;
        size_t n = 0;
        belay_levels_region *all = belay_veloc_chosen(mode, ids.data(), (int)ids.size(), &n);
        for (size_t i = 0; i < n; i++) {
            std::map<int, object> &of = objects[all[i].group];
            auto at = of.find(all[i].id);
            if (at != of.end()) found.push_back(&at->second);
        }
        free(all);
        return found;
    }
};

/* One process for itself, with a number that no other has. */
inline client_t *get_client(unsigned int id, const std::string &cfg_file) {
    return client_t::started(VELOC_Init_single(id, cfg_file.c_str()), cfg_file);
}

/* Collective. */
inline client_t *get_client(MPI_Comm comm, const std::string &cfg_file) {
    return client_t::started(VELOC_Init(comm, cfg_file.c_str()), cfg_file);
}

}

#endif
