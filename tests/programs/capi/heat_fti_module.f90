! Heat with FTI's interface for Fortran. heat_fti_module CONFIGURATION snapshot|checkpoint
program heat_fti_module
    use, intrinsic :: iso_c_binding
    use, intrinsic :: iso_fortran_env, only: error_unit, output_unit
    use fti
    use mpi
    implicit none

    type :: plan
        integer :: id = 0, level = 0
        real(8) :: weight = 0
    end type

    interface
        function usleep(us) bind(c) result(answer)
            import :: c_int
            integer(c_int), value :: us
            integer(c_int) :: answer
        end function
        function malloc(bytes) bind(c) result(at)
            import :: c_ptr, c_size_t
            integer(c_size_t), value :: bytes
            type(c_ptr) :: at
        end function
    end interface

    integer, parameter :: width = 400, lines = 150, steps = 600
    real(8), pointer :: now(:, :), next(:, :)
    integer, target :: step
    type(plan), target :: p
    ! One of each type, and of each rank.
    character(1), pointer :: text(:)
    character(9), target :: words
    logical(1), pointer :: l1
    logical(8), pointer :: l8(:)
    integer(1), pointer :: i1(:, :)
    integer(2), pointer :: i2(:, :, :)
    integer(8), pointer :: i8(:, :, :, :)
    real(4), pointer :: r4(:, :, :, :, :)
    real(16), pointer :: r16(:, :, :, :, :, :)
    complex(4), pointer :: c4(:, :, :, :, :, :, :)
    complex(8), allocatable, target :: c8(:)
    integer, pointer :: grows(:)
    type(c_ptr) :: memory
    integer :: world, rank, ranks, err, plan_type, before
    logical :: by_hand
    character(len=1000) :: configuration, how

    call MPI_Init(err)
    call get_command_argument(1, configuration)
    call get_command_argument(2, how)
    by_hand = how == "checkpoint"
    rank = -1
    world = MPI_COMM_WORLD
    call FTI_Init("/nowhere/config.fti", world, err)
    call want(err == FTI_NSCS .and. world == MPI_COMM_WORLD, "a configuration that is not there")
    call FTI_Init(configuration, world, err)
    call want(err == FTI_SCES .and. world /= MPI_COMM_WORLD, "FTI_Init")
    call MPI_Comm_rank(world, rank, err)
    call MPI_Comm_size(world, ranks, err)
    call start()
    call name_memory()
    call refused()
    call FTI_Status(err)
    if (err /= 0 .and. by_hand) call recover()
    if (by_hand .and. step > 0 .and. rank == 0) print "(a, i0)", "from ", step
    if (rank == 0) print "(a)", "begins"
    flush (output_unit)
    do while (step < steps)
        if (.not. by_hand) then
            before = step
            call FTI_Snapshot(err)
            call want(err >= 0, "FTI_Snapshot")
            if (step /= before .and. rank == 0) print "(a, i0)", "from ", step
        end if
        call one_step()
        step = step + 1
        if (by_hand .and. mod(step, 20) == 0) call checkpoint()
    end do
    call say()
    call FTI_Finalize(err)
    call want(err == FTI_SCES, "FTI_Finalize")
    call MPI_Finalize(err)

contains

    subroutine want(yes, what)
        logical, intent(in) :: yes
        character(len=*), intent(in) :: what
        integer :: ignored
        if (yes) return
        write (error_unit, "(a, i0, a, i0, 2a)") "FAIL rank ", rank, " step ", step, ": ", what
        call MPI_Abort(MPI_COMM_WORLD, 3, ignored)
    end subroutine

    subroutine start()
        integer :: j
        allocate (now(width, 0:lines + 1), next(width, lines))
        allocate (text(5), l1, l8(3), i1(2, 3), i2(2, 1, 2), i8(1, 2, 1, 2), r4(2, 1, 1, 1, 2), r16(1, 1, 1, 1, 1, 2))
        allocate (c4(2, 1, 1, 2, 1, 1, 2), c8(-1:2))
        step = 0
        now = 0
        call fill(0)
        if (rank == 0) now(width / 10:width * 9 / 10, 0) = [(100 + mod(j, 7), j=width / 10, width * 9 / 10)]
        memory = malloc(c_sizeof(step))
        call c_f_pointer(memory, grows, [1])
        grows = 0
    end subroutine

    subroutine name_memory()
        call FTI_Protect(0, step, err)
        call want(err == FTI_SCES, "FTI_Protect of a number")
        call FTI_Protect(1, now, err)
        call want(err == FTI_SCES, "FTI_Protect of an array")
        plan_type = FTI_InitType(storage_size(p) / 8_c_size_t)
        call FTI_Protect(2, c_loc(p), 1, plan_type, err)
        call want(plan_type >= 0 .and. err == FTI_SCES, "FTI_Protect of an address")
        call FTI_Protect(3, memory, 1, FTI_INTEGER4, err)
        call want(err == FTI_SCES, "FTI_Protect of an address")
        call FTI_Protect(10, text, err)
        call FTI_Protect(11, words, err)
        call FTI_Protect(12, l1, err)
        call FTI_Protect(13, l8, err)
        call FTI_Protect(14, i1, err)
        call FTI_Protect(15, i2, err)
        call FTI_Protect(16, i8, err)
        call FTI_Protect(17, r4, err)
        call FTI_Protect(18, r16, err)
        call FTI_Protect(19, c4, err)
        call FTI_Protect(20, c8, err)
        call want(err == FTI_SCES, "FTI_Protect")
    end subroutine

    subroutine refused()
        real(8), pointer :: part(:, :), nothing(:)
        part => now(1:width:2, :)
        call FTI_Protect(30, part, err)
        call want(err == FTI_NSCS, "memory of several pieces")
        allocate (nothing(3))
        deallocate (nothing)
        call FTI_Protect(30, nothing, err)
        call want(err == FTI_NSCS, "a pointer to nothing")
        call FTI_Protect(30, c_loc(p), 1, 999, err)
        call want(err == FTI_NSCS, "a type that there is not")
        call want(FTI_InitType(4294967304_c_size_t) == FTI_NSCS, "a type that is too large")
        call FTI_Checkpoint(1, 9, err)
        call want(err == FTI_NSCS, "a level that there is not")
        call FTI_Status(err)
        if (err /= 0) return
        call FTI_Recover(err)
        call want(err /= FTI_SCES, "nothing to recover")
    end subroutine

    ! What only one step has.
    subroutine fill(n)
        integer, intent(in) :: n
        p%id = n
        p%weight = n / 7d0
        text = achar(65 + mod(n, 26))
        write (words, "(i9)") n
        l1 = mod(n, 3) == 0
        l8 = mod(n, 4) == 0
        i1 = int(mod(n, 100), 1)
        i2 = int(mod(n, 30000), 2)
        i8 = 3000000000_8 * n
        r4 = n / 4.0
        r16 = n / 7.0_16
        c4 = cmplx(n, -n)
        c8 = cmplx(n / 3d0, n, 8)
    end subroutine

    subroutine check(n)
        integer, intent(in) :: n
        character(9) :: right
        write (right, "(i9)") n
        call want(p%id == n .and. abs(p%weight - n / 7d0) <= 0, "a type of its own")
        call want(all(text == achar(65 + mod(n, 26))) .and. words == right, "characters")
        call want(logical(l1) .eqv. mod(n, 3) == 0, "a logical")
        call want(all(logical(l8) .eqv. mod(n, 4) == 0), "logicals")
        call want(all(i1 == mod(n, 100)) .and. all(i2 == mod(n, 30000)) .and. all(i8 == 3000000000_8 * n), "integers")
        call want(all(abs(r4 - n / 4.0) <= 0) .and. all(abs(r16 - n / 7.0_16) <= 0), "reals")
        call want(all(abs(c4 - cmplx(n, -n)) <= 0) .and. all(abs(c8 - cmplx(n / 3d0, n, 8)) <= 0), "complex numbers")
    end subroutine

    subroutine checkpoint()
        integer :: n
        n = step / 20 + 1
        memory = grown(n)
        call c_f_pointer(memory, grows, [n])
        grows(n) = step
        call FTI_Protect(3, memory, n, FTI_INTEGER4, err)
        call want(err == FTI_SCES, "FTI_Protect of more")
        p%level = mod(p%level, 4) + 1
        call fill(step)
        call FTI_Checkpoint(step, p%level, err)
        call want(err > 0, "FTI_Checkpoint")
    end subroutine

    ! The memory that grows, with room for so many numbers.
    function grown(n) result(at)
        integer, intent(in) :: n
        type(c_ptr) :: at
        integer, pointer :: old(:), new(:)
        old => grows
        at = malloc(n * c_sizeof(step))
        call c_f_pointer(at, new, [n])
        new(:size(old)) = old
    end function

    subroutine recover()
        integer(8) :: bytes
        integer :: i
        call FTI_RecoverVarInit(err)
        call want(err == FTI_SCES, "FTI_RecoverVarInit")
        call FTI_RecoverVar(0, err)
        call want(err == FTI_SCES .and. step > 0 .and. p%id == 0, "one region alone")
        call FTI_GetStoredSize(3, bytes)
        call want(bytes == 4 * (step / 20 + 1), "FTI_GetStoredSize")
        call FTI_Recover(err)
        call want(err /= FTI_SCES, "a region that is too small")
        call FTI_Realloc(3, memory, err)
        call want(err == FTI_SCES, "FTI_Realloc")
        call c_f_pointer(memory, grows, [bytes / 4])
        call FTI_Recover(err)
        call want(err == FTI_SCES, "FTI_Recover")
        call want(all(grows == [(20 * i, i=0, step / 20)]), "memory that has grown")
        call check(step)
        call FTI_RecoverVarFinalize(err)
        call FTI_Status(i)
        call want(err == FTI_SCES .and. i == 0, "FTI_Status")
    end subroutine

    subroutine one_step()
        integer :: up, down, i, j, ignored(MPI_STATUS_SIZE)
        up = merge(rank - 1, MPI_PROC_NULL, rank > 0)
        down = merge(rank + 1, MPI_PROC_NULL, rank + 1 < ranks)
        call MPI_Sendrecv(now(1, 1), width, MPI_REAL8, up, 1, now(1, lines + 1), width, MPI_REAL8, down, 1, world, ignored, err)
        call MPI_Sendrecv(now(1, lines), width, MPI_REAL8, down, 2, now(1, 0), width, MPI_REAL8, up, 2, world, ignored, err)
        do j = 1, lines
            do i = 2, width - 1
                next(i, j) = 0.25d0 * (now(i, j - 1) + now(i, j + 1) + now(i - 1, j) + now(i + 1, j)) + 1d-3 * step
            end do
        end do
        now(2:width - 1, 1:lines) = next(2:width - 1, :)
        err = usleep(1500)
    end subroutine

    ! Every bit of the result in one number.
    subroutine say()
        integer(8) :: sum, all_ranks
        integer :: i, j
        sum = 0
        do j = 1, lines
            do i = 1, width
                sum = ieor(sum, ishftc(transfer(now(i, j), sum), mod((rank * lines + j) * width + i, 64)))
            end do
        end do
        call MPI_Allreduce(sum, all_ranks, 1, MPI_INTEGER8, MPI_BXOR, world, err)
        if (rank == 0) print "(a, z16.16)", "heat ", all_ranks
    end subroutine
end program
