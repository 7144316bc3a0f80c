// Conjugate gradients on a distributed 2-D Poisson problem. mpi_cg [ITERATIONS [SIDE]]
//
// The solver prints its residual history (every bit of it, as hexadecimal floats) and a checksum of the answer, so that
// two runs can be compared exactly. With BELAY_TEST_GO set it solves the same system again and again until told to end
// and checks that each solve gives the same bits; without, it solves once.
#include "mpicheck.h"
static int n = 256, rows, first, iterations = 60, pause_us;
static double *x, *r, *p, *q;
static double dot(const double *a, const double *b) {
    double s = 0, t;
    for (int i = 0; i < rows * n; i++) s += a[i] * b[i];
    static double all[512];
    // Summed in rank order, so that the result does not depend on the library's reduction tree.
    MPI(MPI_Gather(&s, 1, MPI_DOUBLE, all, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD));
    t = 0;
    for (int i = 0; rank == 0 && i < size; i++) t += all[i];
    MPI(MPI_Bcast(&t, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD));
    return t;
}
static void halo(double *v) {  // v has one ghost row before and behind its rows
    int up = rank ? rank - 1 : MPI_PROC_NULL, down = rank + 1 < size ? rank + 1 : MPI_PROC_NULL;
    MPI(MPI_Sendrecv(v, n, MPI_DOUBLE, up, 1, v + rows * n, n, MPI_DOUBLE, down, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    MPI(MPI_Sendrecv(v + (rows - 1) * n, n, MPI_DOUBLE, down, 2, v - n, n, MPI_DOUBLE, up, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
}
static void apply(const double *v, double *out) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < n; j++) {
            double s = 4 * v[i * n + j];
            if (i > 0 || rank > 0) s -= v[(i - 1) * n + j];
            if (i + 1 < rows || rank + 1 < size) s -= v[(i + 1) * n + j];
            if (j > 0) s -= v[i * n + j - 1];
            if (j + 1 < n) s -= v[i * n + j + 1];
            out[i * n + j] = s;
        }
}
static uint64_t solve(int print) {
    uint64_t hash = 1;
    for (int i = 0; i < rows * n; i++) {
        x[i] = 0;
        r[i] = p[i] = (double)(mix((uint64_t)(first * n + i)) >> 40) / 65536.0;
    }
    double rr = dot(r, r);
    for (int it = 0; it < iterations; it++) {
        halo(p);
        apply(p, q);
        double alpha = rr / dot(p, q);
        for (int i = 0; i < rows * n; i++) {
            x[i] += alpha * p[i];
            r[i] -= alpha * q[i];
        }
        double next = dot(r, r), beta = next / rr;
        rr = next;
        for (int i = 0; i < rows * n; i++) p[i] = r[i] + beta * p[i];
        uint64_t bits;
        memcpy(&bits, &rr, 8);
        hash = mix(hash ^ bits);
        if (print && rank == 0) {
            printf("iteration %4d residual %.6e %a\n", it + 1, rr, rr);
            fflush(stdout);
        }
        if (print && pause_us) nap_us(pause_us);
        if (!print && it % 4 == 0) running();
    }
    uint64_t mine = 0, all[512];
    for (int i = 0; i < rows * n; i++) {
        uint64_t bits;
        memcpy(&bits, &x[i], 8);
        mine = mix(mine ^ bits);
    }
    MPI(MPI_Gather(&mine, 1, MPI_UINT64_T, all, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD));
    for (int i = 0; rank == 0 && i < size; i++) hash = mix(hash ^ all[i]);
    MPI(MPI_Bcast(&hash, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD));
    return hash;
}
int main(int argc, char **argv) {
    mpi_begin("mpi_cg", &argc, &argv);
    if (argc > 1) iterations = atoi(argv[1]);
    if (argc > 2) n = atoi(argv[2]);
    if (argc > 3) pause_us = atoi(argv[3]);
    rows = n / size + (rank < n % size);
    first = rank * (n / size) + (rank < n % size ? rank : n % size);
    size_t len = (size_t)(rows + 2) * (size_t)n;
    x = calloc(len, sizeof *x);
    r = calloc(len, sizeof *r);
    p = (double *)calloc(len, sizeof *p) + n;
    q = calloc(len, sizeof *q);
    if (!check_go[0]) {
        uint64_t h = solve(1);
        if (rank == 0) printf("answer %016llx after %d iterations on %d ranks\n", (unsigned long long)h, iterations, size);
        MPI(MPI_Finalize());
        return 0;
    }
    uint64_t want = solve(0);
    while (mpi_running()) {
        uint64_t h = solve(0);
        if (h != want) fail("the answer is %016llx, first it was %016llx", (unsigned long long)h, (unsigned long long)want);
    }
    if (rank == 0) printf("answer %016llx after %d iterations on %d ranks\n", (unsigned long long)want, iterations, size);
    return mpi_finish();
}
