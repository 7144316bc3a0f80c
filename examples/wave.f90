! Waves on a membrane that is held at its rim, with explicit steps.
!
!     wave [POINTS [STEPS]]
!
! At the end it prints a checksum of the displacement, which is the same to the last bit in every run. What its loops
! read and overwrite is declared (belay_access.f90): between two steps displacement and velocity are alive, of five arrays.
program wave
    use, intrinsic :: iso_c_binding
    use, intrinsic :: iso_fortran_env, only: int64, real64, output_unit
    use belay_access
    implicit none
    real(real64), parameter :: pace = 0.4_real64, damping = 1e-4_real64
    real(real64), allocatable, target, dimension(:, :) :: displacement, velocity, across, along, energy
    integer(c_int32_t) :: d_displacement, d_velocity, d_across, d_along, d_energy
    integer(c_int32_t) :: tension, acceleration, motion, balance
    integer :: points, steps, step

    points = argument(1, 1000)
    steps = argument(2, 5000)
    if (points < 3 .or. steps < 1) error stop "usage: wave [POINTS [STEPS]], with at least 3 points"
    allocate (displacement(points, points), velocity(points, points), across(points, points), along(points, points), &
              energy(points, points), source=0.0_real64)
    d_displacement = declare("displacement", displacement)
    d_velocity = declare("velocity", velocity)
    d_across = declare("across", across)
    d_along = declare("along", along)
    d_energy = declare("energy", energy)
    tension = belay_site_id("tension")
    acceleration = belay_site_id("acceleration")
    motion = belay_site_id("motion")
    balance = belay_site_id("balance")

    call pluck()
    do step = 1, steps
        call pull()
        call accelerate()
        call move()
        if (mod(step, 10) == 0) call report()
    end do
    print "(a, z16.16)", "checksum ", checksum()

contains

    ! The number that is argument `n`, if it is there.
    integer function argument(n, otherwise)
        integer, intent(in) :: n, otherwise
        character(len=20) :: text
        integer :: status
        call get_command_argument(n, text, status=status)
        argument = otherwise
        if (status == 0) read (text, *, iostat=status) argument
        if (status > 0 .and. text /= "") argument = 0
    end function

    function declare(name, array) result(dataset)
        character(len=*), intent(in) :: name
        real(real64), intent(in), target :: array(:, :)
        integer(c_int32_t) :: dataset
        dataset = belay_dataset(name, c_loc(array), storage_size(array) / 8, shape(array))
    end function

    ! A hump, somewhere.
    subroutine pluck()
        integer :: i, j
        real(real64) :: x, y
        do j = 2, points - 1
            do i = 2, points - 1
                x = real(i, real64) / points - 0.4_real64
                y = real(j, real64) / points - 0.3_real64
                displacement(i, j) = max(0.0_real64, 1 - 25 * (x * x + y * y))
            end do
        end do
    end subroutine

    ! What pulls between each point and the ones before it, in both directions.
    subroutine pull()
        integer :: i, j
        call belay_enter(tension, [belay_uses(d_displacement, BELAY_R), belay_uses(d_across, BELAY_W), &
                                   belay_uses(d_along, BELAY_W)])
        do j = 1, points
            do i = 1, points
                across(i, j) = displacement(i, j) - displacement(max(i - 1, 1), j)
                along(i, j) = displacement(i, j) - displacement(i, max(j - 1, 1))
            end do
        end do
        call belay_leave(tension)
    end subroutine

    subroutine accelerate()
        integer :: i, j
        call belay_enter(acceleration, [belay_uses(d_across, BELAY_R), belay_uses(d_along, BELAY_R), &
                                        belay_uses(d_velocity, BELAY_RW)])
        do j = 2, points - 1
            do i = 2, points - 1
                velocity(i, j) = (1 - damping) * velocity(i, j) &
                                 + pace * (across(i + 1, j) - across(i, j) + along(i, j + 1) - along(i, j))
            end do
        end do
        call belay_leave(acceleration)
    end subroutine

    subroutine move()
        call belay_enter(motion, [belay_uses(d_velocity, BELAY_R), belay_uses(d_displacement, BELAY_RW)])
        displacement = displacement + pace * velocity
        call belay_leave(motion)
    end subroutine

    ! The energy of each point, and of all.
    subroutine report()
        real(real64) :: total
        call belay_enter(balance, [belay_uses(d_velocity, BELAY_R), belay_uses(d_across, BELAY_R), &
                                   belay_uses(d_along, BELAY_R), belay_uses(d_energy, BELAY_W)])
        energy = velocity**2 + across**2 + along**2
        total = sum(energy)
        call belay_leave(balance)
        print "(a, i0, a, es13.6)", "step ", step, ", energy ", total / 2
        flush (output_unit)
    end subroutine

    integer(int64) function checksum()
        integer :: j
        call belay_enter(balance, [belay_uses(d_displacement, BELAY_R)])
        checksum = 0
        do j = 1, points
            checksum = ieor(ishftc(checksum, 1), fold(displacement(:, j)))
        end do
        call belay_leave(balance)
    end function

    ! The bits of a column.
    pure integer(int64) function fold(column)
        real(real64), intent(in) :: column(:)
        integer :: i
        fold = 0
        do i = 1, size(column)
            fold = ieor(ishftc(fold, 1), transfer(column(i), fold))
        end do
    end function
end program
