! What the loops of CloverLeaf 3D do to its arrays, told to belay (see docs/access.md, "Declaring a real program").
! Compile after belay_access.f90 and definitions.f90. With more than one tile a chunk nothing is declared.
module belay_clover
    use, intrinsic :: iso_c_binding
    use, intrinsic :: iso_fortran_env, only: int64
    use belay_access
    use data_module
    use definitions_module
    implicit none
    private

    public :: clover_datasets, clover_exchanged, clover_halo, clover_done, clover_checksum
    public :: clover_initial, clover_ideal_gas, clover_viscosity, clover_calc_dt, clover_pdv, clover_revert, clover_accelerate
    public :: clover_flux_calc, clover_advec_cell, clover_advec_mom, clover_reset_field, clover_summary, clover_visit

    ! The arrays: first those that have halos, with CloverLeaf's numbers for them, then work arrays and the mesh.
    integer, parameter :: work = NUM_FIELDS, volume = work + 8, xarea = volume + 1, yarea = volume + 2, zarea = volume + 3
    integer(c_int32_t) :: d(zarea)

    ! The places, and the names of them.
    enum, bind(c)
        enumerator :: s_initial = 1, s_gas, s_viscosity, s_dt, s_pdv, s_revert, s_accelerate, s_flux, s_cell, s_mom, s_reset
        enumerator :: s_summary, s_visit, s_x, s_y, s_z, s_halo
    end enum
    character(len=12), parameter :: names(s_halo) = [character(len=12) :: "initial", "ideal gas", "viscosity", "calc dt", "PdV", &
        "revert", "accelerate", "flux calc", "advec cell", "advec mom", "reset field", "summary", "visit", "exchange x", &
        "exchange y", "exchange z", "halo"]
    integer(c_int32_t) :: sites(s_halo)

    logical :: on = .false.
    integer :: extent(3), n = 0, site = 0
    type(belay_use) :: list(64)
    integer, parameter :: none(3) = 0, all_low(3) = -2, all_high(3) = 2, one(3) = 1
    ! How many more elements than cells an array has in each direction, by its kind of data.
    integer, parameter :: more(3, Z_FACE_DATA) = reshape([0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1], [3, Z_FACE_DATA])
    integer, parameter :: kinds(NUM_FIELDS) = [CELL_DATA, CELL_DATA, CELL_DATA, CELL_DATA, CELL_DATA, CELL_DATA, CELL_DATA, &
        VERTEX_DATA, VERTEX_DATA, VERTEX_DATA, VERTEX_DATA, VERTEX_DATA, VERTEX_DATA, X_FACE_DATA, Y_FACE_DATA, Z_FACE_DATA, &
        X_FACE_DATA, Y_FACE_DATA, Z_FACE_DATA]

contains

    ! After the arrays have been allocated.
    subroutine clover_datasets()
        integer :: i
        if (tiles_per_chunk /= 1) return
        associate (tile => chunk%tiles(1))
            extent = [tile%t_xmax, tile%t_ymax, tile%t_zmax]
            associate (f => tile%field)
                d(FIELD_DENSITY0) = declare("density0", f%density0)
                d(FIELD_DENSITY1) = declare("density1", f%density1)
                d(FIELD_ENERGY0) = declare("energy0", f%energy0)
                d(FIELD_ENERGY1) = declare("energy1", f%energy1)
                d(FIELD_PRESSURE) = declare("pressure", f%pressure)
                d(FIELD_VISCOSITY) = declare("viscosity", f%viscosity)
                d(FIELD_SOUNDSPEED) = declare("soundspeed", f%soundspeed)
                d(FIELD_XVEL0) = declare("xvel0", f%xvel0)
                d(FIELD_XVEL1) = declare("xvel1", f%xvel1)
                d(FIELD_YVEL0) = declare("yvel0", f%yvel0)
                d(FIELD_YVEL1) = declare("yvel1", f%yvel1)
                d(FIELD_ZVEL0) = declare("zvel0", f%zvel0)
                d(FIELD_ZVEL1) = declare("zvel1", f%zvel1)
                d(FIELD_VOL_FLUX_X) = declare("vol_flux_x", f%vol_flux_x)
                d(FIELD_VOL_FLUX_Y) = declare("vol_flux_y", f%vol_flux_y)
                d(FIELD_VOL_FLUX_Z) = declare("vol_flux_z", f%vol_flux_z)
                d(FIELD_MASS_FLUX_X) = declare("mass_flux_x", f%mass_flux_x)
                d(FIELD_MASS_FLUX_Y) = declare("mass_flux_y", f%mass_flux_y)
                d(FIELD_MASS_FLUX_Z) = declare("mass_flux_z", f%mass_flux_z)
                d(work + 1) = declare("work1", f%work_array1)
                d(work + 2) = declare("work2", f%work_array2)
                d(work + 3) = declare("work3", f%work_array3)
                d(work + 4) = declare("work4", f%work_array4)
                d(work + 5) = declare("work5", f%work_array5)
                d(work + 6) = declare("work6", f%work_array6)
                d(work + 7) = declare("work7", f%work_array7)
                d(volume) = declare("volume", f%volume)
                d(xarea) = declare("xarea", f%xarea)
                d(yarea) = declare("yarea", f%yarea)
                d(zarea) = declare("zarea", f%zarea)
            end associate
        end associate
        do i = 1, size(sites)
            sites(i) = belay_site_id(names(i))
        end do
        on = .true.
    end subroutine

    function declare(name, array) result(dataset)
        character(len=*), intent(in) :: name
        real(c_double), intent(in), target, contiguous :: array(:, :, :)
        integer(c_int32_t) :: dataset
        dataset = belay_dataset(name, c_loc(array), storage_size(array) / 8, shape(array))
    end function

    ! Adds what a loop does to an array: all of it, or the cells from the first ones + `low` to the last ones + `high`.
    subroutine add(array, mode, low, high)
        integer, intent(in) :: array
        integer(c_int), intent(in) :: mode
        integer, intent(in), optional :: low(3), high(3)
        n = n + 1
        if (present(low)) then
            ! Two cells lie before the first one.
            list(n) = belay_uses(d(array), mode, 3 + low, 2 + extent + high)
        else
            list(n) = belay_uses(d(array), mode)
        end if
    end subroutine

    subroutine reads(arrays, low, high)
        integer, intent(in) :: arrays(:), low(3), high(3)
        integer :: i
        do i = 1, size(arrays)
            call add(arrays(i), BELAY_R, low, high)
        end do
    end subroutine

    subroutine writes(arrays, low, high)
        integer, intent(in) :: arrays(:), low(3), high(3)
        integer :: i
        do i = 1, size(arrays)
            call add(arrays(i), BELAY_W, low, high)
        end do
    end subroutine

    subroutine enter(place)
        integer, intent(in) :: place
        site = place
        if (on .and. n > 0) call belay_enter(sites(site), list(:n))
    end subroutine

    ! After each loop.
    subroutine clover_done()
        if (on .and. n > 0) call belay_leave(sites(site))
        n = 0
    end subroutine

    ! The mesh and the first values.
    subroutine clover_initial()
        integer :: i
        do i = 1, size(d)
            call add(i, BELAY_RW)
        end do
        call enter(s_initial)
    end subroutine

    subroutine clover_ideal_gas(predict)
        logical, intent(in) :: predict
        call reads(merge([FIELD_DENSITY1, FIELD_ENERGY1], [FIELD_DENSITY0, FIELD_ENERGY0], predict), none, none)
        call writes([FIELD_PRESSURE, FIELD_SOUNDSPEED], none, none)
        call enter(s_gas)
    end subroutine

    subroutine clover_viscosity()
        call reads([FIELD_DENSITY0, xarea, yarea, zarea], none, none)
        call reads([FIELD_PRESSURE], -one, one)
        call reads([FIELD_XVEL0, FIELD_YVEL0, FIELD_ZVEL0], none, one)
        call writes([FIELD_VISCOSITY], none, none)
        call enter(s_viscosity)
    end subroutine

    subroutine clover_calc_dt()
        call reads([FIELD_DENSITY0, FIELD_ENERGY0, FIELD_PRESSURE, FIELD_VISCOSITY, FIELD_SOUNDSPEED, volume, xarea, yarea, &
                    zarea], none, none)
        call reads([FIELD_XVEL0, FIELD_YVEL0, FIELD_ZVEL0], none, one)
        call writes([work + 1], none, none)
        call enter(s_dt)
    end subroutine

    subroutine clover_pdv(predict)
        logical, intent(in) :: predict
        call reads([FIELD_DENSITY0, FIELD_ENERGY0, FIELD_PRESSURE, FIELD_VISCOSITY, volume], none, none)
        call reads([xarea], none, more(:, X_FACE_DATA))
        call reads([yarea], none, more(:, Y_FACE_DATA))
        call reads([zarea], none, more(:, Z_FACE_DATA))
        call reads([FIELD_XVEL0, FIELD_YVEL0, FIELD_ZVEL0], none, one)
        if (.not. predict) call reads([FIELD_XVEL1, FIELD_YVEL1, FIELD_ZVEL1], none, one)
        call writes([FIELD_DENSITY1, FIELD_ENERGY1], none, none)
        call enter(s_pdv)
    end subroutine

    subroutine clover_revert()
        call reads([FIELD_DENSITY0, FIELD_ENERGY0], none, none)
        call writes([FIELD_DENSITY1, FIELD_ENERGY1], none, none)
        call enter(s_revert)
    end subroutine

    subroutine clover_accelerate()
        call reads([FIELD_DENSITY0, FIELD_PRESSURE, FIELD_VISCOSITY, volume, xarea, yarea, zarea], -one, one)
        call reads([FIELD_XVEL0, FIELD_YVEL0, FIELD_ZVEL0], none, one)
        call writes([FIELD_XVEL1, FIELD_YVEL1, FIELD_ZVEL1], none, one)
        call enter(s_accelerate)
    end subroutine

    subroutine clover_flux_calc()
        integer :: i
        call reads([FIELD_XVEL0, FIELD_YVEL0, FIELD_ZVEL0, FIELD_XVEL1, FIELD_YVEL1, FIELD_ZVEL1], none, one)
        do i = 0, 2
            call reads([xarea + i], none, more(:, X_FACE_DATA + i))
            call writes([FIELD_VOL_FLUX_X + i], none, more(:, X_FACE_DATA + i))
        end do
        call enter(s_flux)
    end subroutine

    ! The fluxes of volume that a sweep of advection still has before it, and its own.
    subroutine reads_vol_flux(direction, sweep)
        integer, intent(in) :: direction, sweep
        integer :: i
        do i = 1, 3
            if (sweep == 1 .or. i == direction .or. (sweep == 2 .and. i == merge(3, 1, advect_x))) &
                call add(FIELD_VOL_FLUX_X + i - 1, BELAY_R)
        end do
    end subroutine

    subroutine clover_advec_cell(sweep, direction)
        integer, intent(in) :: sweep, direction
        integer :: high(3)
        call add(volume, BELAY_R)
        call reads_vol_flux(direction, sweep)
        call add(FIELD_DENSITY1, BELAY_RW)
        call add(FIELD_ENERGY1, BELAY_RW)
        call writes([work + 1, work + 2], all_low, all_high)
        call writes([work + 3, work + 4, work + 5, work + 6], none, none)
        ! The sweep along y goes on in z, too.
        high = 2 * more(:, X_FACE_DATA + direction - 1)
        if (direction == g_ydir) high(3) = 2
        call writes([FIELD_MASS_FLUX_X + direction - 1, work + 7], none, high)
        call enter(s_cell)
    end subroutine

    subroutine clover_advec_mom(velocity, direction, sweep)
        integer, intent(in) :: velocity, direction, sweep
        integer :: along(3)
        integer(c_int) :: mode
        along = more(:, X_FACE_DATA + direction - 1)
        call add(volume, BELAY_R)
        call reads_vol_flux(direction, sweep)
        if (velocity == 1) then
            call reads([FIELD_MASS_FLUX_X + direction - 1], -one - along, one + 2 * along)
            call reads([FIELD_DENSITY1], -one - along, one + along)
        end if
        ! Masses and fluxes are made for the first component, and used for all.
        mode = merge(BELAY_W, BELAY_R, velocity == 1)
        call add(work + 1, mode, -2 * along, one + along)
        call add(work + 2, mode, -along, one + along)
        call add(work + 3, mode, -along, one + along)
        call writes([work + 5], -along, one)
        call writes([work + 6, work + 7], all_low, all_high)
        call add(FIELD_XVEL1 + 2 * (velocity - 1), BELAY_RW)
        call enter(s_mom)
    end subroutine

    subroutine clover_reset_field()
        call reads([FIELD_DENSITY1, FIELD_ENERGY1], none, none)
        call reads([FIELD_XVEL1, FIELD_YVEL1, FIELD_ZVEL1], none, one)
        call writes([FIELD_DENSITY0, FIELD_ENERGY0], none, none)
        call writes([FIELD_XVEL0, FIELD_YVEL0, FIELD_ZVEL0], none, one)
        call enter(s_reset)
    end subroutine

    subroutine clover_summary()
        call reads([volume, FIELD_DENSITY0, FIELD_ENERGY0, FIELD_PRESSURE], none, none)
        call reads([FIELD_XVEL0, FIELD_YVEL0, FIELD_ZVEL0], none, one)
        call enter(s_summary)
    end subroutine

    subroutine clover_visit()
        call reads([FIELD_DENSITY0, FIELD_ENERGY0, FIELD_PRESSURE, FIELD_VISCOSITY], none, none)
        call reads([FIELD_XVEL0, FIELD_YVEL0, FIELD_ZVEL0], none, one)
        call enter(s_visit)
    end subroutine

    ! The exchange with the neighbours in one direction. What is sent has the halos of the other directions, as they are.
    subroutine clover_exchanged(direction, fields, depth)
        integer, intent(in) :: direction, fields(:), depth
        integer :: f, low(3), high(3), from(3), to(3)
        logical :: before, behind
        before = chunk%chunk_neighbours(2 * direction - 1) /= EXTERNAL_FACE
        behind = chunk%chunk_neighbours(2 * direction) /= EXTERNAL_FACE
        do f = 1, NUM_FIELDS
            if (fields(f) /= 1) cycle
            low = -depth
            high = more(:, kinds(f)) + depth
            from = low
            to = high
            if (before) then
                to(direction) = -extent(direction)
                call add(f, BELAY_W, from, to)
                from(direction) = 0
                to(direction) = to(direction) + depth + more(direction, kinds(f))
                call add(f, BELAY_R, from, to)
            end if
            from = low
            to = high
            if (behind) then
                from(direction) = extent(direction) + more(direction, kinds(f))
                call add(f, BELAY_W, from, to)
                from(direction) = extent(direction) - depth
                to(direction) = more(direction, kinds(f))
                call add(f, BELAY_R, from, to)
            end if
        end do
        call enter(s_x + direction - 1)
    end subroutine

    ! The rims of one array, in the order y, x, z. A rim is overwritten, but for what an earlier direction has read of it.
    subroutine clover_halo(f, depth)
        integer, intent(in) :: f, depth
        integer, parameter :: order(3) = [2, 1, 3]
        integer :: i, k, low(3), high(3), from(3), to(3), over(3)
        logical :: before, behind
        over = more(:, kinds(f))
        low = -depth
        high = over + depth
        do i = 1, 3
            k = order(i)
            before = chunk%chunk_neighbours(2 * k - 1) == EXTERNAL_FACE
            behind = chunk%chunk_neighbours(2 * k) == EXTERNAL_FACE
            ! The rims in z lack the last row of what lies on faces.
            if (k == 3 .and. (kinds(f) == X_FACE_DATA .or. kinds(f) == Y_FACE_DATA)) high = min(high, depth)
            from = low
            to = high
            if (before) then
                to(k) = -extent(k)
                ! The rim below y of these lacks the last plane.
                if (k == 2 .and. f == FIELD_VOL_FLUX_Z) to(3) = high(3) - 1
                call add(f, BELAY_W, from, to)
                from(3) = extent(3) + to(3)
                to(3) = high(3)
                if (from(3) < extent(3) + to(3)) call add(f, BELAY_RW, from, to)
                from(3) = low(3)
            end if
            to(k) = high(k)
            if (behind) then
                from(k) = extent(k) + over(k)
                call add(f, BELAY_W, from, to)
            end if
            from = -depth
            to = over + depth
            if (before) then
                from(k) = 0
                to(k) = -extent(k) + depth + 1
                call add(f, BELAY_RW, from, to)
                low(k) = depth + 1
            end if
            if (behind) then
                from(k) = extent(k) + over(k) - depth - 1
                to(k) = over(k)
                call add(f, BELAY_RW, from, to)
                high(k) = over(k) - depth - 1
            end if
        end do
        call enter(s_halo)
    end subroutine

    ! The bits of the state, for comparisons.
    subroutine clover_checksum()
        call clover_summary()
        associate (f => chunk%tiles(1)%field)
            print "(a, i0, 5(1x, z16.16))", "checksum of ", parallel%task, fold(f%density0), fold(f%energy0), fold(f%xvel0), &
                fold(f%yvel0), fold(f%zvel0)
        end associate
        call clover_done()
    end subroutine

    integer(int64) function fold(array)
        real(c_double), intent(in) :: array(-1:, -1:, -1:)
        integer :: i, j, k
        fold = 0
        do k = 1, extent(3)
            do j = 1, extent(2)
                do i = 1, extent(1)
                    fold = ieor(ishftc(fold, 1), transfer(array(i, j, k), fold))
                end do
            end do
        end do
    end function
end module
