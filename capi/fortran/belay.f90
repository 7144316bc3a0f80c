! Belay: interface for programs in Fortran. Compile this file with the program, and link with -lbelay.
!
! The functions are those of belay.h, where everything is said about them; they return 0 or a negative errno value, and belay_message() says in words why the last one failed. Version numbers are below 2**63 here.
! Regions are given by c_loc(x), of x with the attribute target, and the number of bytes, storage_size(x) / 8 times size(x).
module belay
    use, intrinsic :: iso_c_binding
    implicit none
    private

    public :: belay_message
    public :: belay_history_open, belay_history_region, belay_history_put, belay_history_hint, belay_history_hint_sized
    public :: belay_history_hint_replace, belay_history_prefetch, belay_history_size, belay_history_regions, belay_history_get
    public :: belay_history_drop, belay_history_wait, belay_history_is_at, belay_history_versions, belay_history_get_stats
    public :: belay_history_put_async, belay_history_put_wait, belay_history_close

    ! policy
    integer(c_int32_t), parameter, public :: BELAY_H_OURS = 0, BELAY_H_SCORE = 1, BELAY_H_LRU = 2, BELAY_H_BELADY = 3
    ! layout
    integer(c_int32_t), parameter, public :: BELAY_H_PAGED = 0, BELAY_H_CONTIGUOUS = 1
    ! keep
    integer(c_int32_t), parameter, public :: BELAY_H_LASTING = 0, BELAY_H_UNTIL_READ = 1
    ! flags of a get
    integer(c_int32_t), parameter, public :: BELAY_H_DISCARD = 1, BELAY_H_KEEP = 2
    ! levels
    integer(c_int32_t), parameter, public :: BELAY_H_IN_HOST = 0, BELAY_H_LOCAL = 1, BELAY_H_DURABLE = 2

    type, bind(c) :: history_opts
        type(c_ptr) :: name = c_null_ptr, dir = c_null_ptr
        integer(c_int64_t) :: host_bytes = 0, device_bytes = 0, extent_bytes = 0
        integer(c_int32_t) :: device = 0, policy = 0, layout = 0, keep = 0
        integer(c_int64_t) :: reserved(8) = 0
    end type

    type, bind(c), public :: belay_history_stats
        integer(c_int64_t) :: puts, gets, put_ns, get_ns, put_bytes, get_bytes, hits, from_files, down, up, cancelled, failed
        integer(c_int64_t) :: versions, held, reserved(16)
    end type

    interface
        function error_text() bind(c, name="belay_error") result(text)
            import :: c_ptr
            type(c_ptr) :: text
        end function

        pure function length_of(text) bind(c, name="strlen") result(n)
            import :: c_ptr, c_size_t
            type(c_ptr), value, intent(in) :: text
            integer(c_size_t) :: n
        end function

        function open_with(opts, history) bind(c, name="belay_history_open") result(answer)
            import :: c_int, c_ptr, history_opts
            type(history_opts), intent(in) :: opts
            type(c_ptr), intent(out) :: history
            integer(c_int) :: answer
        end function

        function belay_history_region(history, id, at, bytes) bind(c) result(answer)
            import :: c_int, c_int32_t, c_ptr, c_size_t
            type(c_ptr), value :: history, at
            integer(c_int32_t), value :: id
            integer(c_size_t), value :: bytes
            integer(c_int) :: answer
        end function

        function belay_history_put(history, version) bind(c) result(answer)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: history
            integer(c_int64_t), value :: version
            integer(c_int) :: answer
        end function

        ! `stream` and `event` are c_null_ptr. Memory that is written so has the attribute asynchronous beside target.
        function belay_history_put_async(history, version, stream, event) bind(c) result(answer)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: history, stream, event
            integer(c_int64_t), value :: version
            integer(c_int) :: answer
        end function

        function belay_history_put_wait(history, version) bind(c) result(answer)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: history
            integer(c_int64_t), value :: version
            integer(c_int) :: answer
        end function

        function belay_history_hint(history, versions, n) bind(c) result(answer)
            import :: c_int, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: history
            integer(c_int64_t), intent(in) :: versions(*)
            integer(c_size_t), value :: n
            integer(c_int) :: answer
        end function

        function belay_history_hint_sized(history, versions, bytes, n) bind(c) result(answer)
            import :: c_int, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: history
            integer(c_int64_t), intent(in) :: versions(*), bytes(*)
            integer(c_size_t), value :: n
            integer(c_int) :: answer
        end function

        ! `from` is counted from 0.
        function belay_history_hint_replace(history, from, versions, n) bind(c) result(answer)
            import :: c_int, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: history
            integer(c_size_t), value :: from, n
            integer(c_int64_t), intent(in) :: versions(*)
            integer(c_int) :: answer
        end function

        function belay_history_prefetch(history, on) bind(c) result(answer)
            import :: c_int, c_ptr
            type(c_ptr), value :: history
            integer(c_int), value :: on
            integer(c_int) :: answer
        end function

        function belay_history_size(history, version, id, bytes) bind(c) result(answer)
            import :: c_int, c_int32_t, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: history
            integer(c_int64_t), value :: version
            integer(c_int32_t), value :: id
            integer(c_size_t), intent(out) :: bytes
            integer(c_int) :: answer
        end function

        function belay_history_regions(history, version, ids, room, n) bind(c) result(answer)
            import :: c_int, c_int32_t, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: history
            integer(c_int64_t), value :: version
            integer(c_int32_t), intent(inout) :: ids(*)
            integer(c_size_t), value :: room
            integer(c_size_t), intent(out) :: n
            integer(c_int) :: answer
        end function

        function belay_history_get(history, version, flags) bind(c) result(answer)
            import :: c_int, c_int32_t, c_int64_t, c_ptr
            type(c_ptr), value :: history
            integer(c_int64_t), value :: version
            integer(c_int32_t), value :: flags
            integer(c_int) :: answer
        end function

        function belay_history_drop(history, version) bind(c) result(answer)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: history
            integer(c_int64_t), value :: version
            integer(c_int) :: answer
        end function

        function belay_history_wait(history, level) bind(c) result(answer)
            import :: c_int, c_int32_t, c_ptr
            type(c_ptr), value :: history
            integer(c_int32_t), value :: level
            integer(c_int) :: answer
        end function

        ! 1: nothing is to be waited for; 0: something is.
        function belay_history_is_at(history, level) bind(c) result(answer)
            import :: c_int, c_int32_t, c_ptr
            type(c_ptr), value :: history
            integer(c_int32_t), value :: level
            integer(c_int) :: answer
        end function

        function belay_history_versions(history, versions, room, n) bind(c) result(answer)
            import :: c_int, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: history
            integer(c_int64_t), intent(inout) :: versions(*)
            integer(c_size_t), value :: room
            integer(c_size_t), intent(out) :: n
            integer(c_int) :: answer
        end function

        function belay_history_get_stats(history, stats) bind(c) result(answer)
            import :: belay_history_stats, c_int, c_ptr
            type(c_ptr), value :: history
            type(belay_history_stats), intent(out) :: stats
            integer(c_int) :: answer
        end function

        function belay_history_close(history) bind(c) result(answer)
            import :: c_int, c_ptr
            type(c_ptr), value :: history
            integer(c_int) :: answer
        end function
    end interface

contains

    ! Why the last call of this thread that failed did.
    function belay_message() result(message)
        character(len=:), allocatable :: message
        character(kind=c_char), pointer :: text(:)
        type(c_ptr) :: at
        integer :: i
        at = error_text()
        call c_f_pointer(at, text, [length_of(at)])
        allocate (character(len=size(text)) :: message)
        do i = 1, size(text)
            message(i:i) = text(i)
        end do
    end function

    ! Options that are not given are 0, which belay.h says the meaning of. Blanks at the end of `name` and `dir` do not count.
    function belay_history_open(history, name, dir, host_bytes, extent_bytes, policy, layout, keep) result(answer)
        type(c_ptr), intent(out) :: history
        character(len=*), intent(in) :: name, dir
        integer(c_int64_t), intent(in), optional :: host_bytes, extent_bytes
        integer(c_int32_t), intent(in), optional :: policy, layout, keep
        integer(c_int) :: answer
        character(kind=c_char, len=:), allocatable, target :: c_name, c_dir
        type(history_opts) :: opts
        c_name = trim(name) // c_null_char
        c_dir = trim(dir) // c_null_char
        opts%name = c_loc(c_name)
        opts%dir = c_loc(c_dir)
        if (present(host_bytes)) opts%host_bytes = host_bytes
        if (present(extent_bytes)) opts%extent_bytes = extent_bytes
        if (present(policy)) opts%policy = policy
        if (present(layout)) opts%layout = layout
        if (present(keep)) opts%keep = keep
        answer = open_with(opts, history)
    end function
end module
