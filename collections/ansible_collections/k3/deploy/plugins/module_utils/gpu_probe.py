"""A bandwidth probe of an NVIDIA GPU through the driver's own library: no toolkit, no Python package. Standard library only.

Clocks and watts alone do not show every slow power state. On GB10 one of them leaves clocks, power and plain copies as they are and makes
matrix-vector products three times slower, so both are timed: a product over a matrix that no cache holds, and a copy.
"""

from __future__ import annotations

import ctypes
import statistics
import time

# y[row] += A[row] . x for single-precision rows: one block of 256 threads a row, four values a load. The driver compiles it for its device.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry k3_gemv(.param .u64 p_a, .param .u64 p_x, .param .u64 p_y, .param .u32 p_quads)
{
  .reg .pred %done, %lane0;
  .reg .b32 %t, %row, %n, %i, %r, %s;
  .reg .f32 %sum, %o, %a0, %a1, %a2, %a3, %x0, %x1, %x2, %x3;
  .reg .b64 %a, %x, %y, %wide, %pa, %px;
  ld.param.u64 %a, [p_a];
  ld.param.u64 %x, [p_x];
  ld.param.u64 %y, [p_y];
  ld.param.u32 %n, [p_quads];
  cvta.to.global.u64 %a, %a;
  cvta.to.global.u64 %x, %x;
  cvta.to.global.u64 %y, %y;
  mov.u32 %t, %tid.x;
  mov.u32 %row, %ctaid.x;
  mul.wide.u32 %wide, %row, %n;
  shl.b64 %wide, %wide, 4;
  add.s64 %a, %a, %wide;
  mov.f32 %sum, 0f00000000;
  mov.u32 %i, %t;
LOOP:
  setp.ge.u32 %done, %i, %n;
  @%done bra SUM;
  mul.wide.u32 %wide, %i, 16;
  add.s64 %pa, %a, %wide;
  add.s64 %px, %x, %wide;
  ld.global.nc.v4.f32 {%a0, %a1, %a2, %a3}, [%pa];
  ld.global.nc.v4.f32 {%x0, %x1, %x2, %x3}, [%px];
  fma.rn.f32 %sum, %a0, %x0, %sum;
  fma.rn.f32 %sum, %a1, %x1, %sum;
  fma.rn.f32 %sum, %a2, %x2, %sum;
  fma.rn.f32 %sum, %a3, %x3, %sum;
  add.u32 %i, %i, 256;
  bra LOOP;
SUM:
  mov.b32 %r, %sum;
  shfl.sync.down.b32 %s, %r, 16, 31, 0xffffffff;
  mov.b32 %o, %s;
  add.f32 %sum, %sum, %o;
  mov.b32 %r, %sum;
  shfl.sync.down.b32 %s, %r, 8, 31, 0xffffffff;
  mov.b32 %o, %s;
  add.f32 %sum, %sum, %o;
  mov.b32 %r, %sum;
  shfl.sync.down.b32 %s, %r, 4, 31, 0xffffffff;
  mov.b32 %o, %s;
  add.f32 %sum, %sum, %o;
  mov.b32 %r, %sum;
  shfl.sync.down.b32 %s, %r, 2, 31, 0xffffffff;
  mov.b32 %o, %s;
  add.f32 %sum, %sum, %o;
  mov.b32 %r, %sum;
  shfl.sync.down.b32 %s, %r, 1, 31, 0xffffffff;
  mov.b32 %o, %s;
  add.f32 %sum, %sum, %o;
  and.b32 %t, %t, 31;
  setp.ne.u32 %lane0, %t, 0;
  @%lane0 bra END;
  mul.wide.u32 %wide, %row, 4;
  add.s64 %y, %y, %wide;
  red.global.add.f32 [%y], %sum;
END:
  ret;
}
"""
SIDE = 8192  # the matrix is SIDE x SIDE single-precision numbers: 256 MiB, many times any GPU's cache
MATRIX_BYTES = SIDE * SIDE * 4


class Driver:
    """The few calls of libcuda that the probe makes; every error is an OSError with the driver's own name for it."""

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name):
        function = getattr(self.driver, name)

        def call(*arguments):
            result = function(*arguments)
            if result != 0:
                text = ctypes.c_char_p()
                self.driver.cuGetErrorName(result, ctypes.byref(text))
                raise OSError(f"{name}: {(text.value or b'').decode() or result}")

        return call


def timed(driver, start, stop, work):
    """Milliseconds that the device took for `work`, by its own events."""
    driver.cuEventRecord(start, None)
    work()
    driver.cuEventRecord(stop, None)
    driver.cuEventSynchronize(stop)
    elapsed = ctypes.c_float()
    driver.cuEventElapsedTime(ctypes.byref(elapsed), start, stop)
    return elapsed.value


def rates(milliseconds, bytes_moved):
    """Median, least and greatest rate in GB/s over the repetitions."""
    found = sorted(bytes_moved / value / 1e6 for value in milliseconds if value > 0)
    if not found:
        return {"median": None, "min": None, "max": None, "count": 0}
    return {"median": round(statistics.median(found), 2), "min": round(found[0], 2), "max": round(found[-1], 2), "count": len(found)}


def probe(seconds, begun):
    """Load the first GPU for about `seconds`, calling `begun` first; OSError says what failed.

    Returns {device, gemv_gb_s, copy_gb_s: {median, min, max, count}, correct}. `correct`: whether the product of ones came out as it must; a GPU
    that miscounts is worse than a slow one.
    """
    driver = Driver()
    device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    start, stop = ctypes.c_void_p(), ctypes.c_void_p()
    matrix, vector, result = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
    name = ctypes.create_string_buffer(128)
    driver.cuInit(0)
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetName(name, 128, device)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    driver.cuCtxSetCurrent(context)
    driver.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(PTX))
    driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"k3_gemv")
    driver.cuEventCreate(ctypes.byref(start), 0)
    driver.cuEventCreate(ctypes.byref(stop), 0)
    for pointer, size in ((matrix, MATRIX_BYTES), (vector, SIDE * 4), (result, SIDE * 4)):
        driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
    one = ctypes.c_uint(0x3F800000)  # 1.0
    driver.cuMemsetD32_v2(matrix, one, ctypes.c_size_t(SIDE * SIDE))
    driver.cuMemsetD32_v2(vector, one, ctypes.c_size_t(SIDE))
    quads = ctypes.c_uint(SIDE // 4)
    arguments = (ctypes.c_void_p * 4)(*(ctypes.cast(ctypes.byref(item), ctypes.c_void_p) for item in (matrix, vector, result, quads)))
    half = ctypes.c_size_t(MATRIX_BYTES // 2)
    upper = ctypes.c_uint64(matrix.value + MATRIX_BYTES // 2)

    def product():
        driver.cuLaunchKernel(kernel, SIDE, 1, 1, 256, 1, 1, 0, None, arguments, None)

    driver.cuMemsetD32_v2(result, ctypes.c_uint(0), ctypes.c_size_t(SIDE))
    product()
    driver.cuCtxSynchronize()
    first = ctypes.c_float()
    driver.cuMemcpyDtoH_v2(ctypes.byref(first), result, ctypes.c_size_t(4))
    begun()
    end = time.monotonic() + seconds
    products, copies = [], []
    while time.monotonic() < end:
        products.append(timed(driver, start, stop, product))
        if len(products) % 8 == 0:
            copies.append(timed(driver, start, stop, lambda: driver.cuMemcpyDtoD_v2(upper, matrix, half)))
    # The clocks need a moment to rise from idle: the first third is left out.
    return {
        "device": name.value.decode("utf-8", "replace"),
        "gemv_gb_s": rates(products[len(products) // 3 :], MATRIX_BYTES),
        "copy_gb_s": rates(copies[len(copies) // 3 :], MATRIX_BYTES),
        "correct": first.value == float(SIDE),
    }
