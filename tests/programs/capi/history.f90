! All of the module: what each function does, and what it answers to wrong use. history DIRECTORY
program history_all
    use, intrinsic :: iso_c_binding
    use belay
    implicit none
    integer(c_int64_t), target, asynchronous :: whole(50000), part(7)
    integer(c_int64_t) :: all(20), v
    integer(c_int32_t) :: ids(3)
    integer(c_size_t) :: n
    type(c_ptr) :: h, other
    type(belay_history_stats) :: stats
    character(len=1000) :: dir

    call get_command_argument(1, dir)
    call must(belay_history_open(h, "fortran", dir, host_bytes=2097152_c_int64_t, extent_bytes=4096_c_int64_t, &
        policy=BELAY_H_LRU, layout=BELAY_H_CONTIGUOUS, keep=BELAY_H_LASTING))
    call fails(belay_history_open(other, "fortran", dir), "open already")
    call fails(belay_history_open(other, ".", dir), "the name of a history")
    call must(belay_history_prefetch(h, 1_c_int))
    call must(belay_history_hint(h, [1_c_int64_t, 2_c_int64_t], 2_c_size_t))
    call must(belay_history_hint_sized(h, [3_c_int64_t], [400056_c_int64_t], 1_c_size_t))
    call must(belay_history_hint_replace(h, 0_c_size_t, [(v, v=10, 1, -1)], 10_c_size_t))
    call must(belay_history_region(h, 4, c_loc(whole), c_sizeof(whole)))
    call must(belay_history_region(h, -1, c_loc(part), c_sizeof(part)))
    do v = 1, 10
        whole = v
        part = -v
        if (mod(v, 2_c_int64_t) == 0) then
            call must(belay_history_put_async(h, v, c_null_ptr, c_null_ptr))
            call must(belay_history_put_wait(h, v))
        else
            call must(belay_history_put(h, v))
        end if
    end do
    call fails(belay_history_put(h, 3_c_int64_t), "version 3 is there already")
    call fails(belay_history_put_async(h, 4_c_int64_t, c_null_ptr, c_null_ptr), "version 4 is there already")
    call fails(belay_history_put_async(h, 40_c_int64_t, c_loc(part), c_null_ptr), "no devices")
    call fails(belay_history_put_wait(h, 40_c_int64_t), "version 40 is unknown")
    call must(belay_history_wait(h, BELAY_H_DURABLE))
    if (belay_history_is_at(h, BELAY_H_DURABLE) /= 1) error stop "not there after a wait"
    call fails(belay_history_is_at(h, 9), "no such level")
    do v = 10, 1, -1
        call must(belay_history_get(h, v, BELAY_H_KEEP))
        if (any(whole /= v) .or. any(part /= -v)) error stop "other values"
    end do
    call must(belay_history_size(h, 5_c_int64_t, -1, n))
    if (n /= c_sizeof(part)) error stop "the size of a region"
    call must(belay_history_regions(h, 5_c_int64_t, ids, 3_c_size_t, n))
    if (n /= 2 .or. any(ids(:2) /= [4, -1])) error stop "the regions of a version"
    call must(belay_history_drop(h, 5_c_int64_t))
    call fails(belay_history_get(h, 5_c_int64_t, 0), "version 5 has been dropped")
    call fails(belay_history_get(h, 11_c_int64_t, 0), "version 11 is unknown")
    call must(belay_history_get(h, 6_c_int64_t, BELAY_H_DISCARD))
    call must(belay_history_close(h))

    call must(belay_history_open(h, "fortran", dir))
    call must(belay_history_versions(h, all, 20_c_size_t, n))
    if (n /= 8 .or. any(all(:8) /= [1, 2, 3, 4, 7, 8, 9, 10])) error stop "the versions"
    call must(belay_history_get_stats(h, stats))
    if (stats%versions /= 8 .or. stats%puts /= 0 .or. any(stats%reserved /= 0)) error stop "the figures"
    call must(belay_history_close(h))

contains

    subroutine must(answer)
        integer(c_int), intent(in) :: answer
        if (answer < 0) error stop belay_message()
    end subroutine

    subroutine fails(answer, words)
        integer(c_int), intent(in) :: answer
        character(len=*), intent(in) :: words
        if (answer >= 0) error stop "no error: " // words
        if (index(belay_message(), words) == 0) error stop belay_message()
    end subroutine
end program
