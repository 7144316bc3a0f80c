! What the loops of TeaLeaf do to its arrays, told to belay (see docs/access.md, "Declaring a real program").
! Compile after belay_access.f90 and definitions.f90. Nothing is declared with more than one tile a task, or with the solvers
! by Chebyshev and Jacobi.
module belay_tea
    use, intrinsic :: iso_c_binding
    use, intrinsic :: iso_fortran_env, only: int64
    use belay_access
    use data_module
    use definitions_module
    implicit none
    private

    public :: tea_datasets, tea_done, tea_checksum
    public :: tea_initial, tea_set, tea_summary, tea_visit, tea_halo, tea_common, tea_residual, tea_norm, tea_finish
    public :: tea_cg_init, tea_calc_w, tea_calc_ur, tea_calc_p, tea_ppcg_init, tea_zrnorm, tea_inner, tea_store_r, tea_rrn

    ! The arrays: first those that are exchanged, with TeaLeaf's numbers for them (R is the one of the inner steps).
    enum, bind(c)
        enumerator :: density = FIELD_DENSITY, energy0, energy1, u, p, sd, rtemp, z, kx, ky, di, u0, r, r_store, mi, w, utemp
        enumerator :: cp, bfp, volume
    end enum
    integer(c_int32_t) :: d(volume)

    ! The places, and the names of them.
    enum, bind(c)
        enumerator :: s_initial = 1, s_set, s_summary, s_visit, s_halo, s_common, s_residual, s_norm, s_finish, s_cg, s_w, s_ur
        enumerator :: s_p, s_ppcg, s_zr, s_inner, s_store, s_rrn
    end enum
    character(len=12), parameter :: names(s_rrn) = [character(len=12) :: "initial", "set field", "summary", "visit", "halo", &
        "common init", "residual", "norm", "finish", "cg init", "calc w", "calc ur", "calc p", "ppcg init", "zrnorm", &
        "inner steps", "store r", "calc rrn"]
    integer(c_int32_t) :: sites(s_rrn)

    logical :: on = .false., plain
    integer :: extent(2), halo, n = 0, depth = 0, site = 0
    type(belay_use) :: list(64)

contains

    ! After the arrays have been allocated.
    subroutine tea_datasets()
        integer :: i
        if (tiles_per_task /= 1 .or. tl_use_jacobi .or. tl_use_chebyshev) return
        halo = chunk%halo_exchange_depth
        plain = tl_preconditioner_type == 1
        associate (f => chunk%tiles(1)%field)
            extent = [f%x_max, f%y_max]
            d(density) = declare("density", f%density)
            d(energy0) = declare("energy0", f%energy0)
            d(energy1) = declare("energy1", f%energy1)
            d(u) = declare("u", f%u)
            d(p) = declare("p", f%vector_p)
            d(sd) = declare("sd", f%vector_sd)
            d(rtemp) = declare("rtemp", f%vector_rtemp)
            d(z) = declare("z", f%vector_z)
            d(kx) = declare("Kx", f%vector_Kx)
            d(ky) = declare("Ky", f%vector_Ky)
            d(di) = declare("Di", f%vector_Di)
            d(u0) = declare("u0", f%u0)
            d(r) = declare("r", f%vector_r)
            d(r_store) = declare("r_store", f%vector_r_store)
            d(mi) = declare("Mi", f%vector_Mi)
            d(w) = declare("w", f%vector_w)
            d(utemp) = declare("utemp", f%vector_utemp)
            d(cp) = declare("tri_cp", f%tri_cp)
            d(bfp) = declare("tri_bfp", f%tri_bfp)
            d(volume) = declare("volume", f%volume)
        end associate
        do i = 1, size(sites)
            sites(i) = belay_site_id(names(i))
        end do
        on = .true.
    end subroutine

    function declare(name, array) result(dataset)
        character(len=*), intent(in) :: name
        real(c_double), intent(in), target, contiguous :: array(:, :)
        integer(c_int32_t) :: dataset
        dataset = belay_dataset(name, c_loc(array), storage_size(array) / 8, shape(array))
    end function

    ! Adds what a loop does to all of an array.
    subroutine all_of(array, mode)
        integer, intent(in) :: array
        integer(c_int), intent(in) :: mode
        n = n + 1
        list(n) = belay_uses(d(array), mode)
    end subroutine

    ! The same to the cells from the first ones + `low` to the last ones + `high`.
    subroutine cells(arrays, mode, low, high)
        integer, intent(in) :: arrays(:), low, high
        integer(c_int), intent(in) :: mode
        integer :: i, before
        do i = 1, size(arrays)
            n = n + 1
            ! That has two cells around it however deep the others' halos are.
            before = merge(2, halo, arrays(i) == volume)
            list(n) = belay_uses(d(arrays(i)), mode, [1, 1] + before + low, extent + before + high)
        end do
    end subroutine

    ! Halos of `deep` cells, and `inner` cells beside them, are read and written.
    subroutine rims(array, deep, inner)
        integer, intent(in) :: array, deep, inner
        integer :: k, lo(2), hi(2)
        do k = 1, 2
            lo = 1 - deep + halo
            hi = extent + deep + halo
            hi(k) = inner + halo
            n = n + 1
            list(n) = belay_uses(d(array), BELAY_RW, lo, hi)
            lo(k) = extent(k) + 1 - inner + halo
            hi(k) = extent(k) + deep + halo
            n = n + 1
            list(n) = belay_uses(d(array), BELAY_RW, lo, hi)
        end do
    end subroutine

    ! What preconditioners use.
    subroutine preconditioned()
        if (plain) return
        call all_of(z, BELAY_RW)
        call all_of(mi, BELAY_RW)
        call all_of(cp, BELAY_RW)
        call all_of(bfp, BELAY_RW)
        call cells([kx, ky], BELAY_R, 0, 1)
        call cells([di], BELAY_R, 0, 0)
    end subroutine

    ! A loop; those in it are a part of it.
    subroutine enter(place)
        integer, intent(in) :: place
        depth = depth + 1
        if (depth == 1) site = place
        if (on .and. depth == 1) call belay_enter(sites(place), list(:n))
        n = 0
    end subroutine

    subroutine tea_done()
        if (on .and. depth == 1) call belay_leave(sites(site))
        depth = depth - 1
    end subroutine

    ! The mesh and the first values.
    subroutine tea_initial()
        integer :: i
        do i = 1, size(d)
            call all_of(i, BELAY_RW)
        end do
        call enter(s_initial)
    end subroutine

    subroutine tea_set()
        call cells([energy0], BELAY_R, 0, 0)
        call cells([energy1], BELAY_W, 0, 0)
        call enter(s_set)
    end subroutine

    subroutine tea_summary()
        call cells([volume, density, energy1, u], BELAY_R, 0, 0)
        call enter(s_summary)
    end subroutine

    subroutine tea_visit()
        call cells([density, energy0, u], BELAY_R, 0, 0)
        call enter(s_visit)
    end subroutine

    subroutine tea_halo(fields, deep)
        integer, intent(in) :: fields(:), deep
        integer :: f
        do f = 1, NUM_FIELDS
            if (fields(f) == 1) call rims(f, deep, deep)
        end do
        call enter(s_halo)
    end subroutine

    subroutine tea_common()
        call all_of(density, BELAY_R)
        call cells([energy1], BELAY_R, 0, 0)
        call cells([u, u0, r], BELAY_W, 0, 0)
        call rims(u, 1, 0)
        call all_of(w, BELAY_W)
        if (reflective_boundary) then
            call cells([kx, ky], BELAY_W, 1 - halo, halo)
        else
            call all_of(kx, BELAY_RW)
            call all_of(ky, BELAY_RW)
        end if
        call cells([di], BELAY_W, 1 - halo, halo - 1)
        call preconditioned()
        call enter(s_common)
    end subroutine

    subroutine tea_residual()
        call cells([u], BELAY_R, -1, 1)
        call cells([u0, di], BELAY_R, 0, 0)
        call cells([kx, ky], BELAY_R, 0, 1)
        call cells([r], BELAY_W, 0, 0)
        call enter(s_residual)
    end subroutine

    subroutine tea_norm(which)
        integer, intent(in) :: which
        call cells([merge(u0, r, which == 0)], BELAY_R, 0, 0)
        call enter(s_norm)
    end subroutine

    subroutine tea_finish()
        call cells([u, density], BELAY_R, 0, 0)
        call cells([energy1], BELAY_W, 0, 0)
        call enter(s_finish)
    end subroutine

    subroutine tea_cg_init()
        call cells([r], BELAY_R, 0, 0)
        call cells([p, z], BELAY_W, 0, 0)
        call preconditioned()
        call enter(s_cg)
    end subroutine

    subroutine tea_calc_w()
        call cells([p], BELAY_R, -1, 1)
        call cells([kx, ky], BELAY_R, 0, 1)
        call cells([di], BELAY_R, 0, 0)
        call cells([w], BELAY_W, 0, 0)
        call enter(s_w)
    end subroutine

    subroutine tea_calc_ur()
        call cells([u, r], BELAY_RW, 0, 0)
        call cells([p, w], BELAY_R, 0, 0)
        call preconditioned()
        call enter(s_ur)
    end subroutine

    subroutine tea_calc_p()
        call cells([p], BELAY_RW, 0, 0)
        ! One of them.
        call cells([merge(z, r, .not. plain .or. tl_ppcg_active)], BELAY_R, 0, 0)
        call enter(s_p)
    end subroutine

    subroutine tea_ppcg_init(step)
        integer, intent(in) :: step
        call cells([r], BELAY_R, 0, 0)
        if (step == 3) call cells([z], BELAY_R, 0, 0)
        if (step /= 2) call cells([p], BELAY_W, 0, 0)
        if (step == 1) call cells([z], BELAY_W, 0, 0)
        call preconditioned()
        call enter(s_ppcg)
    end subroutine

    subroutine tea_zrnorm()
        call cells([z, r], BELAY_R, 0, 0)
        call enter(s_zr)
    end subroutine

    ! All inner steps of an iteration, with their exchanges.
    subroutine tea_inner()
        integer :: i, arrays(3)
        call cells([r], BELAY_R, 0, 0)
        call all_of(kx, BELAY_R)
        call all_of(ky, BELAY_R)
        call all_of(di, BELAY_R)
        arrays = [sd, rtemp, utemp]
        call cells(arrays, BELAY_W, 0, 0)
        do i = 1, size(arrays)
            call rims(arrays(i), halo, 0)
        end do
        if (plain) call cells([z], BELAY_W, 0, 0)
        call preconditioned()
        call enter(s_inner)
    end subroutine

    subroutine tea_store_r()
        call cells([r], BELAY_R, 0, 0)
        call cells([r_store], BELAY_W, 0, 0)
        call enter(s_store)
    end subroutine

    subroutine tea_rrn()
        call cells([r, r_store, z], BELAY_R, 0, 0)
        call enter(s_rrn)
    end subroutine

    ! The bits of the state, for comparisons.
    subroutine tea_checksum()
        call tea_summary()
        associate (f => chunk%tiles(1)%field)
            print "(a, i0, 2(1x, z16.16))", "checksum of ", parallel%task, &
                fold(f%energy1, f%x_max, f%y_max), fold(f%u, f%x_max, f%y_max)
        end associate
        call tea_done()
    end subroutine

    integer(int64) function fold(array, x, y)
        integer, intent(in) :: x, y
        real(c_double), intent(in) :: array(1 - chunk%halo_exchange_depth:, 1 - chunk%halo_exchange_depth:)
        integer :: j, k
        fold = 0
        do k = 1, y
            do j = 1, x
                fold = ieor(ishftc(fold, 1), transfer(array(j, k), fold))
            end do
        end do
    end function
end module
