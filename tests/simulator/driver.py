"""The driver API for the simulator's own tests: results are returned, errors raised."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Sequence

_HANDLE, _INT, _UINT, _SIZE, _U64, _TEXT = C.c_void_p, C.c_int, C.c_uint, C.c_size_t, C.c_uint64, C.c_char_p

# name: exported name, types of the results (passed by reference, first), types of the other arguments
_FUNCTIONS: dict[str, tuple[str, tuple[type, ...], tuple[type, ...]]] = {
    "cuInit": ("cuInit", (), (_UINT,)),
    "cuDriverGetVersion": ("cuDriverGetVersion", (_INT,), ()),
    "cuDeviceGetCount": ("cuDeviceGetCount", (_INT,), ()),
    "cuDeviceGet": ("cuDeviceGet", (_INT,), (_INT,)),
    "cuDeviceGetAttribute": ("cuDeviceGetAttribute", (_INT,), (_INT, _INT)),
    "cuDevicePrimaryCtxRetain": ("cuDevicePrimaryCtxRetain", (_HANDLE,), (_INT,)),
    "cuDevicePrimaryCtxRelease": ("cuDevicePrimaryCtxRelease_v2", (), (_INT,)),
    "cuCtxSetCurrent": ("cuCtxSetCurrent", (), (_HANDLE,)),
    "cuCtxPushCurrent": ("cuCtxPushCurrent_v2", (), (_HANDLE,)),
    "cuCtxPopCurrent": ("cuCtxPopCurrent_v2", (_HANDLE,), ()),
    "cuCtxGetCurrent": ("cuCtxGetCurrent", (_HANDLE,), ()),
    "cuCtxSynchronize": ("cuCtxSynchronize", (), ()),
    "cuStreamCreateWithPriority": ("cuStreamCreateWithPriority", (_HANDLE,), (_UINT, _INT)),
    "cuStreamDestroy": ("cuStreamDestroy_v2", (), (_HANDLE,)),
    "cuStreamQuery": ("cuStreamQuery", (), (_HANDLE,)),
    "cuStreamSynchronize": ("cuStreamSynchronize", (), (_HANDLE,)),
    "cuStreamWaitEvent": ("cuStreamWaitEvent", (), (_HANDLE, _HANDLE, _UINT)),
    "cuLaunchHostFunc": ("cuLaunchHostFunc", (), (_HANDLE, _HANDLE, _HANDLE)),
    "cuEventCreate": ("cuEventCreate", (_HANDLE,), (_UINT,)),
    "cuEventDestroy": ("cuEventDestroy_v2", (), (_HANDLE,)),
    "cuEventRecord": ("cuEventRecord", (), (_HANDLE, _HANDLE)),
    "cuEventQuery": ("cuEventQuery", (), (_HANDLE,)),
    "cuEventSynchronize": ("cuEventSynchronize", (), (_HANDLE,)),
    "cuMemAlloc": ("cuMemAlloc_v2", (_U64,), (_SIZE,)),
    "cuMemFree": ("cuMemFree_v2", (), (_U64,)),
    "cuMemAllocAsync": ("cuMemAllocAsync", (_U64,), (_SIZE, _HANDLE)),
    "cuMemFreeAsync": ("cuMemFreeAsync", (), (_U64, _HANDLE)),
    "cuMemHostAlloc": ("cuMemHostAlloc", (_HANDLE,), (_SIZE, _UINT)),
    "cuMemFreeHost": ("cuMemFreeHost", (), (_HANDLE,)),
    "cuMemcpyHtoDAsync": ("cuMemcpyHtoDAsync_v2", (), (_U64, _HANDLE, _SIZE, _HANDLE)),
    "cuMemcpyDtoHAsync": ("cuMemcpyDtoHAsync_v2", (), (_HANDLE, _U64, _SIZE, _HANDLE)),
    "cuMemsetD32Async": ("cuMemsetD32Async", (), (_U64, _UINT, _SIZE, _HANDLE)),
    "cuModuleLoadData": ("cuModuleLoadData", (_HANDLE,), (_TEXT,)),
    "cuModuleUnload": ("cuModuleUnload", (), (_HANDLE,)),
    "cuModuleGetFunction": ("cuModuleGetFunction", (_HANDLE,), (_HANDLE, _TEXT)),
    "cuStreamBeginCapture": ("cuStreamBeginCapture_v2", (), (_HANDLE, _INT)),
    "cuStreamEndCapture": ("cuStreamEndCapture", (_HANDLE,), ()),
    "cuStreamIsCapturing": ("cuStreamIsCapturing", (_INT,), ()),
    "cuGraphInstantiate": ("cuGraphInstantiateWithFlags", (_HANDLE,), (_HANDLE, _U64)),
    "cuGraphLaunch": ("cuGraphLaunch", (), (_HANDLE, _HANDLE)),
    "cuGraphDestroy": ("cuGraphDestroy", (), (_HANDLE,)),
    "cuGraphExecDestroy": ("cuGraphExecDestroy", (), (_HANDLE,)),
    "cuGetProcAddress": ("cuGetProcAddress_v2", (), (_TEXT, _HANDLE, _INT, _U64, _HANDLE)),
}

# Functions whose handle comes before the result.
_HANDLE_FIRST = {"cuStreamEndCapture", "cuStreamIsCapturing"}

NON_BLOCKING = 1
NO_TIMING = 2


class DriverError(RuntimeError):
    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} returned {code}")
        self.function, self.code = function, code


class Driver:
    """``driver.cuMemAlloc(64)`` returns the address, or raises `DriverError`."""

    def __init__(self, library: C.CDLL) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., object]:
        exported, results, arguments = _FUNCTIONS[name]
        function = getattr(self._library, exported)
        function.restype = C.c_int
        by_reference = tuple(C.POINTER(t) for t in results)
        if name in _HANDLE_FIRST:
            function.argtypes = (_HANDLE, *by_reference, *arguments)
        else:
            function.argtypes = (*by_reference, *arguments)

        def call(*values: object) -> object:
            out = [t() for t in results]
            references = [C.byref(o) for o in out]
            given = [values[0], *references, *values[1:]] if name in _HANDLE_FIRST else [*references, *values]
            code = function(*given)
            if code:
                raise DriverError(name, code)
            return out[0].value if out else None

        setattr(self, name, call)
        return call

    def code(self, name: str, *values: object) -> int:
        """The error code of a call, 0 for success."""
        try:
            getattr(self, name)(*values)
        except DriverError as error:
            return error.code
        return 0

    def start(self, device: int = 0) -> int:
        """Initialises and makes the primary context current; returns it."""
        self.cuInit(0)
        context = self.cuDevicePrimaryCtxRetain(device)
        self.cuCtxSetCurrent(context)
        return context

    def stream(self, flags: int = NON_BLOCKING) -> int:
        return self.cuStreamCreateWithPriority(flags, 0)

    def event(self) -> int:
        return self.cuEventCreate(NO_TIMING)

    def function(self, image: bytes, name: str) -> tuple[int, int]:
        """Loads a module; returns it and one kernel of it."""
        module = self.cuModuleLoadData(image)
        return module, self.cuModuleGetFunction(module, name.encode())

    def launch(
        self,
        function: int,
        stream: int | None,
        arguments: Sequence[object],
        grid: int = 1,
        block: int = 1,
        shared: int = 0,
    ) -> None:
        """Launches with ctypes values as arguments."""
        pointers = (C.c_void_p * len(arguments))(*(C.cast(C.byref(a), C.c_void_p) for a in arguments))  # type: ignore[arg-type]
        launch = self._library.cuLaunchKernel
        launch.argtypes = (_HANDLE, *(_UINT,) * 7, _HANDLE, _HANDLE, _HANDLE)
        if code := launch(function, grid, 1, 1, block, 1, 1, shared, stream, pointers, None):
            raise DriverError("cuLaunchKernel", code)
