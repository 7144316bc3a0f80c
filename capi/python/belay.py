"""Belay for programs in Python: histories of checkpoints, and declared accesses.

    import belay
    with belay.History("adjoint", "/local/scratch", host_bytes=64 << 20, keep=belay.UNTIL_READ) as history:
        history.region(0, field)               # a numpy array, or anything else with a writable buffer
        history.hint(reversed(range(500)))
        ...
        history.put(step)                      # forward
        ...
        history.get(step)                      # backward: into the same memory

    field, flux = belay.Dataset("field", a), belay.Dataset("flux", b)
    step = belay.Site("step").loop(belay.reads(field), belay.overwrites(flux))
    with step:
        ...                                    # reads a, and overwrites b

Needs libbelay.so.0, which a wheel brings with it, and nothing else. An error is an OSError with the number and the words of the library.
"""

import ctypes
import errno
import operator
import os
import re
import threading
import weakref

OURS, SCORE, LRU, BELADY = range(4)
PAGED, CONTIGUOUS = range(2)
LASTING, UNTIL_READ = range(2)
IN_HOST, LOCAL, DURABLE = range(3)
DISCARD, KEEP = 1, 2
R, W, RW = 1, 2, 3

_u64, _u32, _size, _handle = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p
_i64 = ctypes.c_int64


def _within(bits, signed=False):
    """Takes numbers for a parameter of the library that has so many bits: ctypes would take their lower bits."""
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)

    def number(value):
        value = operator.index(value)
        if not least <= value <= most:
            raise OverflowError(f"{value} is not between {least} and {most}")
        return value

    return number


_as_u32, _as_u64, _as_i64 = _within(32), _within(64), _within(64, signed=True)


def _text(name):
    """A name or path for C, which would end at a zero byte."""
    if b"\0" in name:
        raise ValueError("a name has no zero byte")
    return name


def _without_objects(format):
    """References to objects mean something in this process only, and would come back without being counted."""
    if "O" in re.sub(r":[^:]*:", "", format):
        raise TypeError("an array of Python objects holds references, which mean nothing elsewhere")


class _Options(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("dir", ctypes.c_char_p),
        ("host_bytes", _u64),
        ("device_bytes", _u64),
        ("extent_bytes", _u64),
        ("device", ctypes.c_int32),
        ("policy", _u32),
        ("layout", _u32),
        ("keep", _u32),
        ("reserved", _u64 * 8),
    ]


_STATS = "puts gets put_ns get_ns put_bytes get_bytes hits from_files down up cancelled failed versions held".split()


class _Stats(ctypes.Structure):
    _fields_ = [(name, _u64) for name in _STATS] + [("reserved", _u64 * 16)]


class _Use(ctypes.Structure):
    _fields_ = [
        ("dataset", _u32),
        ("mode", ctypes.c_int),
        ("lo", ctypes.POINTER(_i64)),
        ("hi", ctypes.POINTER(_i64)),
    ]


def _find():
    try:
        # A part of this program that is not in Python has it already: what both declare must come to the same one.
        return ctypes.CDLL("libbelay.so.0", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        brought = os.path.join(os.path.dirname(os.path.abspath(__file__)), "belay.libs", "libbelay.so.0")
        return ctypes.CDLL(brought if os.path.exists(brought) else "libbelay.so.0")


def _load():
    library = _find()
    library.belay_error.restype = ctypes.c_char_p
    p = ctypes.POINTER
    for name, answer, arguments in [
        ("dataset", _u32, [ctypes.c_char_p, ctypes.c_void_p, _size, ctypes.c_int, p(_size), p(_size)]),
        ("dataset_move", ctypes.c_int, [_u32, ctypes.c_void_p]),
        ("dataset_forget", ctypes.c_int, [_u32]),
        ("live", ctypes.c_int, [_u32, ctypes.c_int]),
        ("site_id", _u32, [ctypes.c_char_p]),
        ("dataset_part", ctypes.c_int, [_u32, p(_size), p(_i64), p(_i64), p(_i64)]),
        ("point", ctypes.c_int, [_u64, ctypes.c_char_p]),
        ("fastforward", ctypes.c_int, [ctypes.c_void_p, _size]),
        ("enter", None, [_u32, p(_Use), ctypes.c_int]),
        ("leave", None, [_u32]),
        ("abandon", None, [_u32]),
    ]:
        function = getattr(library, "belay_" + name)
        function.restype, function.argtypes = answer, arguments
    for name, arguments in {
        "open": [p(_Options), p(_handle)],
        "region": [_handle, _u32, ctypes.c_void_p, _size],
        "put": [_handle, _u64],
        "put_async": [_handle, _u64, ctypes.c_void_p, ctypes.c_void_p],
        "put_wait": [_handle, _u64],
        "get": [_handle, _u64, _u32],
        "hint": [_handle, p(_u64), _size],
        "hint_sized": [_handle, p(_u64), p(_u64), _size],
        "hint_replace": [_handle, _size, p(_u64), _size],
        "prefetch": [_handle, ctypes.c_int],
        "size": [_handle, _u64, _u32, p(_size)],
        "regions": [_handle, _u64, p(_u32), _size, p(_size)],
        "drop": [_handle, _u64],
        "wait": [_handle, _u32],
        "is_at": [_handle, _u32],
        "versions": [_handle, p(_u64), _size, p(_size)],
        "get_stats": [_handle, p(_Stats)],
        "close": [_handle],
    }.items():
        getattr(library, "belay_history_" + name).argtypes = arguments
    return library


_library = _load()


def _failure(number):
    return OSError(number, _library.belay_error().decode(errors="replace"))


def _checked(answer):
    if answer < 0:
        raise _failure(-answer)
    return answer


def _numbers(values):
    values = [_as_u64(value) for value in values]
    return (_u64 * len(values))(*values), len(values)


_forks = 0


def _forked():
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


def _this_process():
    # In a namespace of its own a child can have its parent's number.
    return os.getpid(), _forks


class History:
    """A history: versions that are written once, whole, and read back. See docs/histories.md."""

    def __init__(self, name, dir, host_bytes=0, keep=LASTING, policy=OURS, layout=PAGED, extent_bytes=0):
        self._at = _handle()
        self._regions = {}
        self._regions_lock = threading.RLock()
        # Calls that go on, and their threads: the history is closed when there are none. A forked child looks at neither.
        self._calls, self._changed, self._process = {}, threading.Condition(), _this_process()
        # What the last of them is to close.
        self._left = None
        options = _Options(
            name=_text(name.encode()),
            dir=_text(os.fsencode(dir)),
            host_bytes=_as_u64(host_bytes),
            extent_bytes=_as_u64(extent_bytes),
            policy=_as_u32(policy),
            layout=_as_u32(layout),
            keep=_as_u32(keep),
        )
        _checked(_library.belay_history_open(ctypes.byref(options), ctypes.byref(self._at)))

    def _is_of_parent(self):
        return _this_process() != self._process

    def _call(self, name, *arguments):
        function = getattr(_library, "belay_history_" + name)
        if self._is_of_parent():
            return _checked(function(self._at, *arguments))
        call, last = object(), None
        try:
            with self._changed:
                if not self._at:
                    raise ValueError("the history is closed")
                at = self._at
                self._calls[call] = threading.get_ident()
            return _checked(function(at, *arguments))
        finally:
            with self._changed:
                self._calls.pop(call, None)
                if not self._calls:
                    last, self._left = self._left, None
                self._changed.notify_all()
            if last:
                self._end(last)

    def region(self, id, memory):
        """A part of the versions: C-contiguous, writable memory, which is kept as it is until it is replaced. None: a part no more."""
        id = _as_u32(id)
        if self._is_of_parent():
            self._call("region", id, None, 0)
        if memory is None:
            with self._regions_lock:
                self._call("region", id, None, 0)
                self._regions.pop(id, None)
            return
        view = memoryview(memory)
        _without_objects(view.format)
        # Also keeps the memory from being freed or resized.
        export = (ctypes.c_char * view.nbytes).from_buffer(view)
        with self._regions_lock:
            self._call("region", id, ctypes.addressof(export), view.nbytes)
            self._regions[id] = export

    def put(self, version):
        """Writes a version."""
        self._call("put", _as_u64(version))

    def put_async(self, version):
        """Begins to write a version: the regions may be read meanwhile, and are changed only after put_wait."""
        self._call("put_async", _as_u64(version), None, None)

    def put_wait(self, version):
        """Waits until that version is written."""
        self._call("put_wait", _as_u64(version))

    def get(self, version, flags=0):
        """Reads a version into the regions. DISCARD: it is not needed any more; KEEP: it is; without either as `keep` of the history says."""
        self._call("get", _as_u64(version), _as_u32(flags))

    def hint(self, versions, bytes=None):
        """Appends to the order of reads, with the bytes that each version will have, where they are known."""
        numbers, n = _numbers(versions)
        if bytes is None:
            self._call("hint", numbers, n)
            return
        sizes, m = _numbers(bytes)
        if m != n:
            raise ValueError("there must be as many sizes as versions")
        self._call("hint_sized", numbers, sizes, n)

    def hint_replace(self, start, versions):
        """Replaces the hints from position `start` on, counted from the first that was ever given."""
        self._call("hint_replace", _as_u64(start), *_numbers(versions))

    def prefetch(self, on=True):
        """Whether versions are fetched ahead."""
        self._call("prefetch", int(on))

    def size(self, version, id):
        """Bytes that a region had when the version was put."""
        size = _size()
        self._call("size", _as_u64(version), _as_u32(id), ctypes.byref(size))
        return size.value

    def regions(self, version):
        """The numbers of the regions that a version has."""
        n, version = _size(), _as_u64(version)
        self._call("regions", version, None, 0, ctypes.byref(n))
        numbers = (_u32 * n.value)()
        self._call("regions", version, numbers, len(numbers), ctypes.byref(n))
        return list(numbers[: n.value])

    def drop(self, version):
        """The version is not needed any more."""
        self._call("drop", _as_u64(version))

    def wait(self, level=LOCAL):
        """Waits until all that has been put is at a level."""
        self._call("wait", _as_u32(level))

    def is_at(self, level=LOCAL):
        """Whether all that has been put is at a level, without waiting. Files are synced by wait only."""
        return self._call("is_at", _as_u32(level)) > 0

    def versions(self):
        """The numbers of all versions there are."""
        n = _size()
        self._call("versions", None, 0, ctypes.byref(n))
        numbers = (_u64 * n.value)()
        self._call("versions", numbers, len(numbers), ctypes.byref(n))
        return list(numbers[: n.value])

    def stats(self):
        """Figures so far, by name."""
        stats = _Stats()
        self._call("get_stats", ctypes.byref(stats))
        return {name: getattr(stats, name) for name in _STATS}

    def close(self):
        """Ends the history, when the calls that go on have ended: it waits for those of other threads. Once is enough."""
        if self._is_of_parent():
            at, self._at = self._at, _handle()
        else:
            with self._changed:
                at, self._at = self._at, _handle()
                if threading.get_ident() in self._calls.values():
                    # In a handler of a signal that has come during a call, which closes it.
                    self._left = at or self._left
                    return
                try:
                    while self._calls:
                        self._changed.wait()
                except BaseException:
                    self._at = at
                    raise
        if at:
            self._end(at)

    def _end(self, at):
        answer = _library.belay_history_close(at)
        self._regions.clear()
        _checked(answer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        try:
            self.close()
        except OSError:
            pass


class Dataset:
    """An array that loops are declared for. See docs/access.md.

    It is a numpy array, also with strides, or anything else C-contiguous with a writable buffer; dimensions are those that
    it has. The array is kept until it is replaced or forgotten.
    """

    def __init__(self, name, array):
        self._number = 0
        kept, at, form = self._look(array)
        elem, shape, strides = form
        n = len(shape)
        # The library's first dimension is the one that changes fastest: the last one here.
        extent, stride = (_size * n)(*reversed(shape)), (_size * n)(*reversed(strides))
        name = _text(name.encode())
        self._number = _library.belay_dataset(name, at, elem, n, extent, stride)
        self._dims = n
        if not self._number:
            raise _failure(errno.EINVAL)
        self._kept, self._form = kept, form
        # Its memory becomes somebody else's. Unless the name has been declared anew: the number is that one's then.
        Dataset._last[self._number] = key = object()
        self._forgotten = weakref.finalize(self, Dataset._let_go, self._number, key)
        self._forgotten.atexit = False

    _last = {}

    @staticmethod
    def _let_go(number, key):
        if Dataset._last.get(number) is key:
            _library.belay_dataset_forget(number)
            del Dataset._last[number]

    @staticmethod
    def _look(array):
        """What keeps the array's memory, where it lies, and its form: bytes of an element, shape, strides."""
        if hasattr(array, "__array_interface__"):
            form = array.__array_interface__
            if getattr(getattr(array, "dtype", None), "hasobject", "O" in form["typestr"]):
                _without_objects("O")
            (at, read_only), shape = form["data"], form["shape"] or (1,)
            elem = getattr(array, "itemsize", None) or int(form["typestr"].lstrip("<>|=")[1:])
            if read_only:
                raise BufferError("the array is read-only")
            strides = form.get("strides")
            kept = array
        else:
            view = memoryview(array)
            _without_objects(view.format)
            # Also keeps the memory from being freed or resized.
            kept = (ctypes.c_char * view.nbytes).from_buffer(view)
            at, elem, shape, strides = ctypes.addressof(kept), view.itemsize, view.shape or (1,), view.strides
        if not strides:
            strides, size = [], elem
            for extent in reversed(shape):
                strides.insert(0, size)
                size *= extent
        if any(stride < 0 for stride in strides):
            raise ValueError("an array that runs backwards cannot be declared")
        return kept, at, (elem, tuple(shape), tuple(strides))

    def _call(self, name, *arguments):
        answer = getattr(_library, "belay_" + name)(self._number, *arguments)
        if answer < 0:
            raise _failure(-answer)

    def move(self, array):
        """The same array lies elsewhere from now on: one of the same form."""
        kept, at, form = self._look(array)
        if form != self._form:
            raise ValueError("an array of another form is another dataset")
        self._call("dataset_move", at)
        self._kept = kept

    def forget(self):
        """It is none any more."""
        self._call("dataset_forget")
        self._kept = None

    def part(self, extent, lower, lo=None, hi=None):
        """It is a part of a global array of this extent, in which its first element has the index `lower`, below 0 where that is a
        ghost beyond the rim. The process's own are its elements from index `lo` up to, but without, `hi`; else all."""
        if (lo is None) != (hi is None):
            raise ValueError("what is its own has a lower and an upper bound")
        if any(given is not None and len(given) != self._dims for given in (extent, lower, lo, hi)):
            raise ValueError("a part has as many numbers as the dataset has dimensions")
        if any(side < 0 for side in extent):
            raise ValueError("an extent is not below 0")
        bounds = _i64 * self._dims
        numbers = lambda given: bounds(*(_as_i64(n) for n in reversed(given)))
        own = [None if given is None else numbers(given) for given in (lo, hi)]
        self._call("dataset_part", (_size * self._dims)(*(_as_u64(n) for n in reversed(extent))), numbers(lower), *own)

    def live(self, always=True):
        """Whether it is kept in every checkpoint, whatever loops say of it."""
        self._call("live", int(always))


def _use(mode, dataset, lo, hi):
    if (lo is None) != (hi is None):
        raise ValueError("a part has a lower and an upper bound")
    if lo is not None and any(first < 0 or behind < first for first, behind in zip(lo, hi)):
        raise ValueError("a part begins at 0 or later, and does not end before it begins")
    return mode, dataset, lo, hi


def reads(dataset, lo=None, hi=None):
    """That a loop reads a dataset: all of it, or from index `lo` up to, but without, `hi` in each dimension."""
    return _use(R, dataset, lo, hi)


def overwrites(dataset, lo=None, hi=None):
    """That a loop overwrites all of it, or of that part, and reads nothing of it before."""
    return _use(W, dataset, lo, hi)


def changes(dataset, lo=None, hi=None):
    """That a loop does anything else to it."""
    return _use(RW, dataset, lo, hi)


def point(payload=b""):
    """The program's own point, between two steps, at which a checkpoint of global arrays can be taken. `payload`, at most 4096
    bytes, is the same in all processes."""
    # A number would be so many zero bytes.
    payload = bytes(memoryview(payload))
    _checked(_library.belay_point(len(payload), payload))


def fastforward(size=0):
    """Fills what is declared as parts of global arrays from what another run has left: the payload of its point then, of so
    many bytes; None where there is nothing to start from."""
    size = _as_u64(size)
    payload = ctypes.create_string_buffer(max(size, 1))
    found = _checked(_library.belay_fastforward(ctypes.byref(payload), size))
    return payload.raw[:size] if found else None


class Site:
    """A place in the program, by its name: once each."""

    def __init__(self, name):
        self._number = _library.belay_site_id(_text(name.encode()))
        if not self._number:
            raise _failure(errno.EINVAL)

    def loop(self, *uses):
        """What is done there, for `with`, as often as it is done: reads(), overwrites() and changes() of datasets."""
        return Loop(self._number, uses)


class Loop:
    """A loop with all that it uses. Loops are not begun in others."""

    def __init__(self, site, uses):
        self._site = site
        # The datasets, and so their memory, live as long as the loop.
        self._datasets = [dataset for _, dataset, _, _ in uses]
        self._uses, self._n = (_Use * len(uses))(), len(uses)
        for to, (mode, dataset, lo, hi) in zip(self._uses, uses):
            to.dataset, to.mode = dataset._number, mode
            if lo is not None:
                if len(lo) != dataset._dims or len(hi) != dataset._dims:
                    raise ValueError("a part has as many bounds as the dataset has dimensions")
                bounds = ctypes.c_int64 * dataset._dims
                to.lo, to.hi = (bounds(*(_as_i64(n) for n in reversed(given))) for given in (lo, hi))

    def __enter__(self):
        _library.belay_enter(self._site, self._uses, self._n)

    def __exit__(self, exception, *_):
        # By an exception, it may not have overwritten what it said.
        end = _library.belay_leave if exception is None else _library.belay_abandon
        end(self._site)
