! Belay: declared accesses, for programs in Fortran. Compile this file with the program, and link with -lbelay.
!
! The functions are those of belay_access.h, where everything is said about them. An array x is given by c_loc(x), of x with the attribute target, storage_size(x) / 8 and shape(x).
! The parts of arrays that a loop uses are told as Fortran counts: from 1 on, with the last element.
module belay_access
    use, intrinsic :: iso_c_binding
    implicit none
    private

    public :: belay_dataset, belay_dataset_move, belay_dataset_forget, belay_dataset_dims, belay_live
    public :: belay_site_id, belay_uses, belay_enter, belay_leave
    public :: belay_dataset_part, belay_point, belay_fastforward

    ! What a loop does to a part of an array.
    integer(c_int), parameter, public :: BELAY_R = 1, BELAY_W = 2, BELAY_RW = 3

    integer, parameter :: most = 64, most_dims = 5

    ! An array that a loop uses, or a part of it; made by belay_uses.
    type, public :: belay_use
        private
        integer(c_int32_t) :: dataset = 0
        integer(c_int) :: mode = BELAY_RW
        logical :: part = .false.
        ! Bounds that can be none: they are heard as BELAY_RW of all of the array.
        integer(c_int64_t) :: lo(most_dims) = 0, hi(most_dims) = -1
    end type

    type, bind(c) :: one_use
        integer(c_int32_t) :: dataset
        integer(c_int) :: mode
        type(c_ptr) :: lo, hi
    end type

    interface
        function declare(name, at, elem, dims, extent, stride) bind(c, name="belay_dataset") result(dataset)
            import :: c_char, c_int, c_int32_t, c_ptr, c_size_t
            character(kind=c_char), intent(in) :: name(*)
            type(c_ptr), value :: at, stride
            integer(c_size_t), value :: elem
            integer(c_int), value :: dims
            integer(c_size_t), intent(in) :: extent(*)
            integer(c_int32_t) :: dataset
        end function

        function part(dataset, global, lower, lo, hi) bind(c, name="belay_dataset_part") result(answer)
            import :: c_int, c_int32_t, c_ptr, c_size_t, c_int64_t
            integer(c_int32_t), value :: dataset
            integer(c_size_t), intent(in) :: global(*)
            integer(c_int64_t), intent(in) :: lower(*)
            type(c_ptr), value :: lo, hi
            integer(c_int) :: answer
        end function

        function come(bytes, payload) bind(c, name="belay_point") result(answer)
            import :: c_int, c_int64_t, c_ptr
            integer(c_int64_t), value :: bytes
            type(c_ptr), value :: payload
            integer(c_int) :: answer
        end function

        function fill(payload, bytes) bind(c, name="belay_fastforward") result(answer)
            import :: c_int, c_ptr, c_size_t
            type(c_ptr), value :: payload
            integer(c_size_t), value :: bytes
            integer(c_int) :: answer
        end function

        function site_of(name) bind(c, name="belay_site_id") result(site)
            import :: c_char, c_int32_t
            character(kind=c_char), intent(in) :: name(*)
            integer(c_int32_t) :: site
        end function

        subroutine enter(site, uses, n) bind(c, name="belay_enter")
            import :: c_int, c_int32_t, one_use
            integer(c_int32_t), value :: site
            type(one_use), intent(in) :: uses(*)
            integer(c_int), value :: n
        end subroutine

        ! After a loop.
        subroutine belay_leave(site) bind(c)
            import :: c_int32_t
            integer(c_int32_t), value :: site
        end subroutine

        ! The array lies elsewhere from now on: arrays were exchanged, or it was allocated anew.
        function belay_dataset_move(dataset, at) bind(c) result(answer)
            import :: c_int, c_int32_t, c_ptr
            integer(c_int32_t), value :: dataset
            type(c_ptr), value :: at
            integer(c_int) :: answer
        end function

        ! It is none any more. Before it is deallocated.
        function belay_dataset_forget(dataset) bind(c) result(answer)
            import :: c_int, c_int32_t
            integer(c_int32_t), value :: dataset
            integer(c_int) :: answer
        end function

        ! How many dimensions it has; 0 where there is no such array.
        function belay_dataset_dims(dataset) bind(c) result(dims)
            import :: c_int, c_int32_t
            integer(c_int32_t), value :: dataset
            integer(c_int) :: dims
        end function

        ! With 1 it is kept in every checkpoint, with 0 no more.
        function belay_live(dataset, always) bind(c) result(answer)
            import :: c_int, c_int32_t
            integer(c_int32_t), value :: dataset
            integer(c_int), value :: always
            integer(c_int) :: answer
        end function
    end interface

contains

    ! Declares an array of `elem` bytes an element; 0 where that failed. Blanks at the end of `name` do not count.
    function belay_dataset(name, at, elem, extent) result(dataset)
        character(len=*), intent(in) :: name
        type(c_ptr), intent(in) :: at
        integer, intent(in) :: elem, extent(:)
        integer(c_int32_t) :: dataset
        dataset = declare(trim(name) // c_null_char, at, int(elem, c_size_t), size(extent), int(extent, c_size_t), c_null_ptr)
    end function

    ! The array is a part of a global one of `global` elements in each dimension: its first element is number `first` there,
    ! counted from 1. The process's own are the elements from `own_first` to `own_last`, counted from 1 in the array itself; all,
    ! where these are not given. Each list has a number for each dimension.
    function belay_dataset_part(dataset, global, first, own_first, own_last) result(answer)
        integer(c_int32_t), intent(in) :: dataset
        integer, intent(in) :: global(:), first(:)
        integer, intent(in), optional :: own_first(:), own_last(:)
        integer(c_int) :: answer
        integer(c_int64_t), target :: lo(most_dims), hi(most_dims)
        integer(c_size_t) :: sides(most_dims)
        integer(c_int64_t) :: lower(most_dims)
        integer :: dims
        ! EINVAL, also where a list has not as many numbers.
        answer = -22
        dims = belay_dataset_dims(dataset)
        if (size(global) /= dims .or. size(first) /= dims .or. (present(own_first) .neqv. present(own_last))) return
        if (any(global < 0)) return
        sides(:dims) = int(global, c_size_t)
        lower(:dims) = int(first, c_int64_t) - 1
        if (present(own_first)) then
            if (size(own_first) /= dims .or. size(own_last) /= dims) return
            lo(:dims) = int(own_first, c_int64_t) - 1
            hi(:dims) = own_last
            answer = part(dataset, sides, lower, c_loc(lo), c_loc(hi))
        else
            answer = part(dataset, sides, lower, c_null_ptr, c_null_ptr)
        end if
    end function

    ! The program's own point, with `bytes` bytes of payload at c_loc(payload).
    function belay_point(payload, bytes) result(answer)
        type(c_ptr), intent(in) :: payload
        integer, intent(in) :: bytes
        integer(c_int) :: answer
        answer = come(int(bytes, c_int64_t), payload)
    end function

    ! Fills the arrays and the payload from what another run has left: 1 then, 0 where there is nothing, below 0 where that
    ! failed.
    function belay_fastforward(payload, bytes) result(answer)
        type(c_ptr), intent(in) :: payload
        integer, intent(in) :: bytes
        integer(c_int) :: answer
        answer = fill(payload, int(bytes, c_size_t))
    end function

    ! A place in the program, by its name; 0 where that failed.
    function belay_site_id(name) result(site)
        character(len=*), intent(in) :: name
        integer(c_int32_t) :: site
        site = site_of(trim(name) // c_null_char)
    end function

    ! That a loop uses an array, from element `first` to element `last` where they are given. Where they have not as many
    ! dimensions as the array, all of it counts as used in any way.
    function belay_uses(dataset, mode, first, last) result(use)
        integer(c_int32_t), intent(in) :: dataset
        integer(c_int), intent(in) :: mode
        integer, intent(in), optional :: first(:), last(:)
        type(belay_use) :: use
        integer :: dims
        use%dataset = dataset
        use%mode = mode
        if (.not. (present(first) .and. present(last))) then
            ! One bound alone does not say what is overwritten.
            if (present(first) .or. present(last)) use%mode = BELAY_RW
            return
        end if
        use%part = .true.
        dims = belay_dataset_dims(dataset)
        if (size(first) /= dims .or. size(last) /= dims) return
        use%lo(:dims) = int(first(:dims), c_int64_t) - 1
        use%hi(:dims) = last(:dims)
    end function

    ! Before a loop, with all that it uses.
    subroutine belay_enter(site, uses)
        integer(c_int32_t), intent(in) :: site
        type(belay_use), intent(in), target :: uses(:)
        type(one_use) :: list(most + 1)
        integer :: i, n
        ! One more than there may be: that is noticed.
        n = min(size(uses), most + 1)
        do i = 1, n
            list(i) = one_use(uses(i)%dataset, uses(i)%mode, c_null_ptr, c_null_ptr)
            if (uses(i)%part) then
                list(i)%lo = c_loc(uses(i)%lo)
                list(i)%hi = c_loc(uses(i)%hi)
            end if
        end do
        call enter(site, list, n)
    end subroutine
end module
