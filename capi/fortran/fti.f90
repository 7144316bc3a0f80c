! FTI's interface for programs in Fortran (https://fault-tolerance-interface.readthedocs.io), over the one for programs in C in
! fti.h: a program that was written for FTI is compiled with this file and fti_calls.c, and linked with -lbelay. What is the
! same and what is not: docs/histories.md.
module FTI
    use, intrinsic :: iso_c_binding
    implicit none
    private

    public :: FTI_Init, FTI_Status, FTI_InitType, FTI_Protect, FTI_GetStoredSize, FTI_Realloc, FTI_Checkpoint, FTI_Recover
    public :: FTI_RecoverVarInit, FTI_RecoverVar, FTI_RecoverVarFinalize, FTI_Snapshot, FTI_Finalize

    integer, parameter, public :: FTI_SCES = 0, FTI_NSCS = -1

    ! Types with their kinds, for memory that is given by its address; from FTI_Init on.
    integer, protected, public :: FTI_CHARACTER1 = -1
    integer, protected, public :: FTI_LOGICAL1 = -1, FTI_LOGICAL2 = -1, FTI_LOGICAL4 = -1, FTI_LOGICAL8 = -1
    integer, protected, public :: FTI_INTEGER1 = -1, FTI_INTEGER2 = -1, FTI_INTEGER4 = -1, FTI_INTEGER8 = -1
    integer, protected, public :: FTI_REAL4 = -1, FTI_REAL8 = -1, FTI_REAL16 = -1
    integer, protected, public :: FTI_COMPLEX4 = -1, FTI_COMPLEX8 = -1, FTI_COMPLEX16 = -1

    ! The first is for variables of any type, kind and rank.
    interface FTI_Protect
        module procedure protect_variable
        module procedure protect_address
    end interface

    interface
        function init(config, comm) bind(c, name="belay_fti_init") result(answer)
            import :: c_char, c_int
            character(kind=c_char), intent(in) :: config(*)
            integer(c_int), intent(inout) :: comm
            integer(c_int) :: answer
        end function

        function status_now() bind(c, name="FTI_Status") result(answer)
            import :: c_int
            integer(c_int) :: answer
        end function

        function init_type(type, bytes) bind(c, name="FTI_InitType") result(answer)
            import :: c_int
            integer(c_int), intent(out) :: type
            integer(c_int), value :: bytes
            integer(c_int) :: answer
        end function

        function protect_described(id, data) bind(c, name="belay_fti_protect") result(answer)
            import :: c_int
            integer(c_int), value :: id
            type(*), target, intent(inout) :: data(..)
            integer(c_int) :: answer
        end function

        function protect(id, at, count, type) bind(c, name="FTI_Protect") result(answer)
            import :: c_int, c_int64_t, c_ptr
            integer(c_int), value :: id, type
            type(c_ptr), value :: at
            integer(c_int64_t), value :: count
            integer(c_int) :: answer
        end function

        function stored_size(id) bind(c, name="FTI_GetStoredSize") result(bytes)
            import :: c_int, c_int64_t
            integer(c_int), value :: id
            integer(c_int64_t) :: bytes
        end function

        function reallocated(id, at) bind(c, name="FTI_Realloc") result(now)
            import :: c_int, c_ptr
            integer(c_int), value :: id
            type(c_ptr), value :: at
            type(c_ptr) :: now
        end function

        function checkpoint(id, level) bind(c, name="FTI_Checkpoint") result(answer)
            import :: c_int
            integer(c_int), value :: id, level
            integer(c_int) :: answer
        end function

        function recover() bind(c, name="FTI_Recover") result(answer)
            import :: c_int
            integer(c_int) :: answer
        end function

        function recover_init() bind(c, name="FTI_RecoverVarInit") result(answer)
            import :: c_int
            integer(c_int) :: answer
        end function

        function recover_one(id) bind(c, name="FTI_RecoverVar") result(answer)
            import :: c_int
            integer(c_int), value :: id
            integer(c_int) :: answer
        end function

        function recover_finalize() bind(c, name="FTI_RecoverVarFinalize") result(answer)
            import :: c_int
            integer(c_int) :: answer
        end function

        function snapshot() bind(c, name="FTI_Snapshot") result(answer)
            import :: c_int
            integer(c_int) :: answer
        end function

        function finalize() bind(c, name="FTI_Finalize") result(answer)
            import :: c_int
            integer(c_int) :: answer
        end function
    end interface

contains

    ! The communicator becomes the one to compute with.
    subroutine FTI_Init(config_file, global_comm, err)
        character(len=*), intent(in) :: config_file
        integer, intent(inout) :: global_comm
        integer, intent(out) :: err
        integer(c_int) :: comm
        comm = int(global_comm, c_int)
        err = int(init(trim(config_file) // c_null_char, comm))
        if (err /= FTI_SCES) return
        global_comm = int(comm)
        FTI_CHARACTER1 = FTI_InitType(1_c_size_t)
        FTI_LOGICAL1 = FTI_InitType(1_c_size_t)
        FTI_LOGICAL2 = FTI_InitType(2_c_size_t)
        FTI_LOGICAL4 = FTI_InitType(4_c_size_t)
        FTI_LOGICAL8 = FTI_InitType(8_c_size_t)
        FTI_INTEGER1 = FTI_InitType(1_c_size_t)
        FTI_INTEGER2 = FTI_InitType(2_c_size_t)
        FTI_INTEGER4 = FTI_InitType(4_c_size_t)
        FTI_INTEGER8 = FTI_InitType(8_c_size_t)
        FTI_REAL4 = FTI_InitType(4_c_size_t)
        FTI_REAL8 = FTI_InitType(8_c_size_t)
        FTI_REAL16 = FTI_InitType(16_c_size_t)
        FTI_COMPLEX4 = FTI_InitType(8_c_size_t)
        FTI_COMPLEX8 = FTI_InitType(16_c_size_t)
        FTI_COMPLEX16 = FTI_InitType(32_c_size_t)
    end subroutine

    subroutine FTI_Status(status)
        integer, intent(out) :: status
        status = int(status_now())
    end subroutine

    ! A type of so many bytes; FTI_NSCS if there can be none.
    function FTI_InitType(bytes) result(type)
        integer(c_size_t), intent(in) :: bytes
        integer :: type
        integer(c_int) :: made
        type = FTI_NSCS
        if (bytes > huge(made)) return
        if (init_type(made, int(bytes, c_int)) == FTI_SCES) type = int(made)
    end function

    subroutine protect_variable(id, data, err)
        integer, intent(in) :: id
        type(*), target, intent(inout) :: data(..)
        integer, intent(out) :: err
        err = int(protect_described(int(id, c_int), data))
    end subroutine

    subroutine protect_address(id, at, count, type, err)
        integer, intent(in) :: id, count, type
        type(c_ptr), value :: at
        integer, intent(out) :: err
        err = int(protect(int(id, c_int), at, int(count, c_int64_t), int(type, c_int)))
    end subroutine

    subroutine FTI_GetStoredSize(id, bytes)
        integer, intent(in) :: id
        integer(c_int64_t), intent(out) :: bytes
        bytes = stored_size(int(id, c_int))
    end subroutine

    ! Of memory that malloc of C has given.
    subroutine FTI_Realloc(id, at, err)
        integer, intent(in) :: id
        type(c_ptr), intent(inout) :: at
        integer, intent(out) :: err
        at = reallocated(int(id, c_int), at)
        err = merge(FTI_SCES, FTI_NSCS, c_associated(at))
    end subroutine

    subroutine FTI_Checkpoint(id, level, err)
        integer, intent(in) :: id, level
        integer, intent(out) :: err
        err = int(checkpoint(int(id, c_int), int(level, c_int)))
    end subroutine

    subroutine FTI_Recover(err)
        integer, intent(out) :: err
        err = int(recover())
    end subroutine

    subroutine FTI_RecoverVarInit(err)
        integer, intent(out) :: err
        err = int(recover_init())
    end subroutine

    subroutine FTI_RecoverVar(id, err)
        integer, intent(in) :: id
        integer, intent(out) :: err
        err = int(recover_one(int(id, c_int)))
    end subroutine

    subroutine FTI_RecoverVarFinalize(err)
        integer, intent(out) :: err
        err = int(recover_finalize())
    end subroutine

    subroutine FTI_Snapshot(err)
        integer, intent(out) :: err
        err = int(snapshot())
    end subroutine

    subroutine FTI_Finalize(err)
        integer, intent(out) :: err
        err = int(finalize())
    end subroutine
end module
