! Parts whose bounds are not as many as the array has dimensions: too few, and too many.
program access_rank
    use, intrinsic :: iso_c_binding
    use belay_access
    implicit none
    integer, parameter :: n = 64
    real(c_double), allocatable, target :: flat(:), square(:, :)
    integer(c_int32_t) :: d_flat, d_square, loop
    allocate (flat(n * n), square(n, n), source=1.0_c_double)
    d_flat = belay_dataset("flat", c_loc(flat), storage_size(flat) / 8, shape(flat))
    d_square = belay_dataset("square", c_loc(square), storage_size(square) / 8, shape(square))
    loop = belay_site_id("loop")
    call belay_enter(loop, [belay_uses(d_flat, BELAY_W, [1, 1], [n, n]), belay_uses(d_square, BELAY_W, [1], [n])])
    flat = flat + 1
    square = square + 1
    call belay_leave(loop)
    print *, sum(flat) + sum(square)
end program
