! Starts from what portable.c has left: rows 6 to 20 of the array, with ghosts around them.
program portable
    use, intrinsic :: iso_c_binding
    use belay_access
    implicit none
    integer, parameter :: nx = 60, ny = 48, first = 6, last = 20
    integer(c_int64_t), allocatable, target :: field(:, :)
    integer(c_int32_t) :: dataset
    type, bind(c) :: payload
        integer(c_int64_t) :: step
        character(kind=c_char) :: note(32)
    end type
    type(payload), target :: left
    integer :: x, y
    allocate (field(nx + 2, last - first + 3), source=-1_c_int64_t)
    dataset = belay_dataset("field", c_loc(field), storage_size(field) / 8, shape(field))
    if (belay_dataset_part(dataset, [nx], [0, first - 1]) /= -22) error stop "too few numbers"
    if (belay_dataset_part(dataset, [nx, ny], [0, first - 1]) /= -22) error stop "own elements outside"
    if (belay_dataset_part(dataset, [nx, ny], [0, first - 1], [2, 2], [nx + 1, last - first + 2]) /= 0) error stop "no part"
    if (belay_point(c_loc(left), 40) /= 0) error stop "no point"
    select case (belay_fastforward(c_loc(left), 40))
    case (0)
        print '(a)', "nothing"
    case (1)
        do y = first - 1, last + 1
            do x = 1, nx
                if (field(x + 1, y - first + 2) /= left%step * 1000003 + (y - 1) * nx + x - 1) error stop "another element"
            end do
            if (any(field([1, nx + 2], y - first + 2) /= -1)) error stop "a ghost beyond the rim"
        end do
        print '(a, i0)', "started: step ", left%step
    case default
        error stop "not started"
    end select
end program
