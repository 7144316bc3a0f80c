"""Belay for programs in Python: histories of checkpoints.

    import belay
    with belay.History("adjoint", "/local/scratch", host_bytes=64 << 20, keep=belay.UNTIL_READ) as history:
        history.region(0, field)               # a numpy array, or anything else with a writable buffer
        history.hint(reversed(range(500)))
        ...
        history.put(step)                      # forward
        ...
        history.get(step)                      # backward: into the same memory

Needs libbelay.so.0, and nothing else. An error is an OSError with the number and the words of the library.
"""

import ctypes
import os

OURS, SCORE, LRU, BELADY = range(4)
PAGED, CONTIGUOUS = range(2)
LASTING, UNTIL_READ = range(2)
IN_HOST, LOCAL, DURABLE = range(3)
DISCARD, KEEP = 1, 2

_u64, _u32, _size, _handle = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p


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


def _load():
    library = ctypes.CDLL("libbelay.so.0")
    library.belay_error.restype = ctypes.c_char_p
    p = ctypes.POINTER
    for name, arguments in {
        "open": [p(_Options), p(_handle)],
        "region": [_handle, _u32, ctypes.c_void_p, _size],
        "put": [_handle, _u64],
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


def _numbers(values):
    values = list(values)
    return (_u64 * len(values))(*values), len(values)


class History:
    """A history: versions that are written once, whole, and read back. See docs/histories.md."""

    def __init__(self, name, dir, host_bytes=0, keep=LASTING, policy=OURS, layout=PAGED, extent_bytes=0):
        self._at = _handle()
        self._regions = {}
        options = _Options(
            name=name.encode(), dir=os.fsencode(dir), host_bytes=host_bytes, extent_bytes=extent_bytes, policy=policy, layout=layout, keep=keep
        )
        self._call("open", ctypes.byref(options), ctypes.byref(self._at), at=False)

    def _call(self, name, *arguments, at=True):
        if at and not self._at:
            raise ValueError("the history is closed")
        answer = getattr(_library, "belay_history_" + name)(*([self._at] if at else []), *arguments)
        if answer < 0:
            raise OSError(-answer, _library.belay_error().decode(errors="replace"))
        return answer

    def region(self, id, memory):
        """A part of the versions: C-contiguous, writable memory, which is kept as it is until it is replaced. None: a part no more."""
        if memory is None:
            self._call("region", id, None, 0)
            self._regions.pop(id, None)
            return
        view = memoryview(memory)
        # Also keeps the memory from being freed or resized.
        export = (ctypes.c_char * view.nbytes).from_buffer(view)
        self._call("region", id, ctypes.addressof(export), view.nbytes)
        self._regions[id] = export

    def put(self, version):
        """Writes a version."""
        self._call("put", version)

    def get(self, version, flags=0):
        """Reads a version into the regions. DISCARD: it is not needed any more; KEEP: it is; without either as `keep` of the history says."""
        self._call("get", version, flags)

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
        self._call("hint_replace", start, *_numbers(versions))

    def prefetch(self, on=True):
        """Whether versions are fetched ahead."""
        self._call("prefetch", int(on))

    def size(self, version, id):
        """Bytes that a region had when the version was put."""
        size = _size()
        self._call("size", version, id, ctypes.byref(size))
        return size.value

    def regions(self, version):
        """The numbers of the regions that a version has."""
        n = _size()
        self._call("regions", version, None, 0, ctypes.byref(n))
        numbers = (_u32 * n.value)()
        self._call("regions", version, numbers, len(numbers), ctypes.byref(n))
        return list(numbers[: n.value])

    def drop(self, version):
        """The version is not needed any more."""
        self._call("drop", version)

    def wait(self, level=LOCAL):
        """Waits until all that has been put is at a level."""
        self._call("wait", level)

    def is_at(self, level=LOCAL):
        """Whether all that has been put is at a level, without waiting. Files are synced by wait only."""
        return self._call("is_at", level) > 0

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
        """Ends the history. Once is enough."""
        if self._at:
            at, self._at = self._at, _handle()
            self._regions.clear()
            self._call("close", at, at=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        try:
            self.close()
        except OSError:
            pass
