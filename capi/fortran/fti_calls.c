/* What the module in fti.f90 calls: the functions of fti.h, which are in this object, and two for what Fortran has and C has
 * not. Compiled with the compiler for C of the same MPI, and of the same maker as the one for Fortran.
 */
#include <ISO_Fortran_binding.h>
#include <fti.h>

/* Communicators are numbers in Fortran. */
int belay_fti_init(const char *config, MPI_Fint *comm) {
    int answer = FTI_Init(config, MPI_Comm_f2c(*comm));
    if (answer == FTI_SCES) *comm = MPI_Comm_c2f(FTI_COMM_WORLD);
    return answer;
}

/* A variable of any type and rank. */
int belay_fti_protect(int id, CFI_cdesc_t *data) {
    int64_t bytes = (int64_t)data->elem_len;
    int d;
    /* Of a pointer to nothing no bounds are known. */
    for (d = 0; data->base_addr && d < data->rank; d++) {
        if (data->dim[d].extent < 0)
            return belay_levels_say("FTI", 0, "the size of region %d is not known here: protect it where it is declared", id);
        bytes *= data->dim[d].extent;
    }
    if (data->base_addr && data->rank > 0 && !CFI_is_contiguous(data))
        return belay_levels_say("FTI", 0, "region %d is not of one piece: protect the whole array", id);
    return FTI_Protect(id, data->base_addr, bytes, FTI_CHAR);
}
