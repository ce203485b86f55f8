/* rocmforge_kernels.hip: the GPU device of rocmforge.h. One symbol, rocmforge_hip_api(), gives its table.
 *
 *     hipcc -O3 --offload-arch=gfx1100 -c rocmforge_kernels.hip                  AMD
 *     nvcc -O1 -arch=compute_90a -code=sm_90a -x cu -c rocmforge_kernels.hip     NVIDIA (90a: H100, H200)
 *     c++ -x c++ -DROCMFORGE_HIP_EMU -include tests/hip_emu.h -c ...             on the CPU, for tests
 *
 * Sections (search for the tag)
 *    1 >>config       what the compilers call differently    5 >>attention    softmax of scores times values
 *    2 >>weights      quantized blocks to floats             6 >>device       memory, streams, events
 *    3 >>rows         norms, rope, elementwise ops           7 >>plan         from a plan to launches
 *    4 >>matmul       matrix times columns                   8 >>table        rocmforge_hip_api
 *
 * Reads sections 1 and 2 of rocmforge.h only, and is C++11 without its library. Names: rfk_*. Kernels take WAVE (32 or
 * 64) as a template parameter that the host chooses from the device's properties. Floats are summed in a fixed order,
 * never by atomics, so that a repeated run gives the same bits. */

#include "rocmforge.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ==== 1 Config ========================================================================================== >>config
 * What the three compilers call differently: runtime names, half floats, dot products of four bytes, wave shuffles. */

#if defined(ROCMFORGE_HIP_EMU)
#ifndef HIP_EMU_H
#error "ROCMFORGE_HIP_EMU needs -include tests/hip_emu.h"
#endif
#define RFK_SHARED(T, name) HIP_EMU_SHARED(T, name)
#define RFK_DYNAMIC(T, name) HIP_EMU_DYNAMIC(T, name)
#elif defined(__CUDACC__) && !defined(__HIP__)
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define RFK_NVIDIA 1
#pragma nv_diag_suppress 128 /* loops that one instantiation of a template does not reach */
#define RFK_SHARED(T, name) __shared__ T name
#define RFK_DYNAMIC(T, name) extern __shared__ T name[]
#define hipError_t cudaError_t
#define hipEvent_t cudaEvent_t
#define hipStream_t cudaStream_t
#define hipDeviceProp_t cudaDeviceProp
#define hipSuccess cudaSuccess
#define hipErrorNotReady cudaErrorNotReady
#define hipErrorOutOfMemory cudaErrorMemoryAllocation
#define hipMemcpyHostToDevice cudaMemcpyHostToDevice
#define hipMemcpyDeviceToHost cudaMemcpyDeviceToHost
#define hipMemcpyDeviceToDevice cudaMemcpyDeviceToDevice
#define hipEventDefault cudaEventDefault
#define hipEventDisableTiming cudaEventDisableTiming
#define hipStreamNonBlocking cudaStreamNonBlocking
#define hipHostMallocPortable cudaHostAllocPortable
#define hipGetErrorName cudaGetErrorName
#define hipGetErrorString cudaGetErrorString
#define hipGetLastError cudaGetLastError
#define hipGetDeviceCount cudaGetDeviceCount
#define hipGetDevice cudaGetDevice
#define hipDeviceCanAccessPeer cudaDeviceCanAccessPeer
#define hipDeviceEnablePeerAccess cudaDeviceEnablePeerAccess
#define hipIpcMemHandle_t cudaIpcMemHandle_t
#define hipIpcGetMemHandle cudaIpcGetMemHandle
#define hipIpcOpenMemHandle cudaIpcOpenMemHandle
#define hipIpcCloseMemHandle cudaIpcCloseMemHandle
#define hipIpcMemLazyEnablePeerAccess cudaIpcMemLazyEnablePeerAccess
#define hipSetDevice cudaSetDevice
#define hipGetDeviceProperties cudaGetDeviceProperties
#define hipMemGetInfo cudaMemGetInfo
#define hipMalloc cudaMalloc
#define hipFree cudaFree
#define hipHostMalloc cudaHostAlloc
#define hipHostFree cudaFreeHost
#define hipStreamCreateWithFlags cudaStreamCreateWithFlags
#define hipStreamSynchronize cudaStreamSynchronize
#define hipStreamDestroy cudaStreamDestroy
#define hipStreamWaitEvent cudaStreamWaitEvent
#define hipEventCreateWithFlags cudaEventCreateWithFlags
#define hipEventDestroy cudaEventDestroy
#define hipEventRecord cudaEventRecord
#define hipEventQuery cudaEventQuery
#define hipEventSynchronize cudaEventSynchronize
#define hipEventElapsedTime cudaEventElapsedTime
#define hipMemcpyAsync cudaMemcpyAsync
#define hipMemcpy2DAsync cudaMemcpy2DAsync
#define hipMemsetAsync cudaMemsetAsync
#define hipLaunchKernel cudaLaunchKernel
#define hipGraph_t cudaGraph_t
#define hipGraphExec_t cudaGraphExec_t
#define hipStreamCaptureModeThreadLocal cudaStreamCaptureModeThreadLocal
#define hipStreamBeginCapture cudaStreamBeginCapture
#define hipStreamEndCapture cudaStreamEndCapture
#define hipGraphLaunch cudaGraphLaunch
#define hipGraphDestroy cudaGraphDestroy
#define hipGraphExecDestroy cudaGraphExecDestroy
#else
#include <hip/hip_runtime.h>
#include <hip/hip_fp16.h>
#define RFK_SHARED(T, name) __shared__ T name
#define RFK_DYNAMIC(T, name) extern __shared__ T name[]
#endif

/* Ranks: RCCL, or NCCL, whose calls are the same. */
#if defined(ROCMFORGE_RCCL)
#if defined(RFK_NVIDIA)
#include <nccl.h>
#elif !defined(ROCMFORGE_HIP_EMU)
#include <rccl/rccl.h>
#endif
#if NCCL_VERSION_CODE < 21400
#error "ROCMFORGE_RCCL wants RCCL of ROCm 5.6 or NCCL 2.14: older ones wait for other ranks without end"
#endif
#endif

#if defined(__clang__) || defined(RFK_NVIDIA)
#define RFK_PRAGMA(text) _Pragma(#text)
#define RFK_UNROLL(n) RFK_PRAGMA(unroll n)
#else
#define RFK_UNROLL(n)
#endif

/* Launch bounds: threads of a block, and how many blocks NVIDIA's compiler leaves registers for on a multiprocessor.
 * RFK_THREADS asks for one, because the compiler would rather spill than use all registers. */
#if defined(RFK_NVIDIA)
#define RFK_RESIDENT(n, blocks) __launch_bounds__(n, blocks)
#else
#define RFK_RESIDENT(n, blocks) __launch_bounds__(n)
#endif
#define RFK_THREADS(n) RFK_RESIDENT(n, 1)

#define RFK_DEVICE static __device__ __forceinline__
/* A function that is called, not inlined where it is used many times. On AMD, calls cost a kernel private memory. */
#if defined(RFK_NVIDIA)
#define RFK_CALLED static __device__ __noinline__
#else
#define RFK_CALLED RFK_DEVICE
#endif

#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define RFK_SM80 1 /* device code with the instructions of sm_80 */
#endif
#if defined(ROCMFORGE_HIP_EMU) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define RFK_HAS_WGMMA 1
#endif

/* Lanes of a wave of the GPU that this pass compiles for; 0 in host code and in emulation. Kernels for the other size
 * are never launched there: they stay empty, which halves the time to compile. */
#if defined(__GFX9__)
#define RFK_TARGET_WAVE 64
#elif defined(RFK_NVIDIA) || defined(__GFX10__) || defined(__GFX11__) || defined(__GFX12__)
#define RFK_TARGET_WAVE 32
#else
#define RFK_TARGET_WAVE 0
#endif
#define RFK_RUNS_WAVE(wave) (RFK_TARGET_WAVE == 0 || RFK_TARGET_WAVE == (wave))

/* c + the dot product of four signed bytes. */
RFK_DEVICE int rfk_dot4(int a, int b, int c) {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    return __dp4a(a, b, c);
#elif defined(__GFX11__) || defined(__GFX12__) || defined(__gfx1100__) || defined(__gfx1101__) ||                    \
    defined(__gfx1102__) || defined(__gfx1103__) || defined(__gfx1150__) || defined(__gfx1151__) ||                  \
    defined(__gfx1200__) || defined(__gfx1201__)
    return __builtin_amdgcn_sudot4(true, a, true, b, c, false);
#elif defined(__gfx906__) || defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx940__) ||                    \
    defined(__gfx941__) || defined(__gfx942__) || defined(__gfx950__) || defined(__gfx1011__) ||                     \
    defined(__gfx1012__) || defined(__gfx1030__) || defined(__gfx1031__) || defined(__gfx1032__) ||                  \
    defined(__gfx1033__) || defined(__gfx1034__) || defined(__gfx1035__) || defined(__gfx1036__)
    return __builtin_amdgcn_sdot4(a, b, c, false);
#else
    for (int i = 0; i < 32; i += 8) c += (int)(int8_t)(a >> i) * (int)(int8_t)(b >> i);
    return c;
#endif
}

/* The same with unsigned bytes in a. gfx11 and gfx12 have it, too, but no test has run it there. */
#if defined(RFK_NVIDIA) || defined(ROCMFORGE_HIP_EMU)
#define RFK_HAS_UNSIGNED_DOT4 1
RFK_DEVICE int rfk_dot4_unsigned(uint32_t a, int b, int c) {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));
    return c;
#else
    for (int i = 0; i < 32; i += 8) c += (int)(uint8_t)(a >> i) * (int)(int8_t)(b >> i);
    return c;
#endif
}
#endif

/* Bits of a half to float and back, rounded to nearest even. */
#if defined(ROCMFORGE_HIP_EMU)
RFK_DEVICE float rfk_from_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff, bits;
    float v;
    if (exponent == 0) { /* zero or subnormal: fraction * 2^-24 */
        v = (float)fraction * 5.9604644775390625e-8f;
        memcpy(&bits, &v, 4);
        bits |= sign;
    } else {
        bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    }
    memcpy(&v, &bits, 4);
    return v;
}
RFK_DEVICE uint16_t rfk_to_half(float v) {
    uint32_t bits, sign;
    memcpy(&bits, &v, 4);
    sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) { /* below 2^-14: adding 0.5 rounds to units of 2^-24, in the low bits */
        float shifted;
        memcpy(&shifted, &bits, 4);
        shifted += 0.5f;
        memcpy(&bits, &shifted, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    return (uint16_t)(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13)); /* may carry to infinity */
}
#else
RFK_DEVICE float rfk_from_half(uint16_t h) { return __half2float(__ushort_as_half(h)); }
RFK_DEVICE uint16_t rfk_to_half(float v) { return __half_as_ushort(__float2half_rn(v)); }
#endif

/* Two floats to halves, `low` in the lower 16 bits. */
RFK_DEVICE uint32_t rfk_to_half2(float low, float high) {
#if defined(RFK_SM80)
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return rfk_to_half(low) | (uint32_t)rfk_to_half(high) << 16;
#endif
}

RFK_DEVICE float rfk_as_float(uint32_t bits) {
    union { uint32_t u; float f; } x;
    x.u = bits;
    return x.f;
}

RFK_DEVICE uint32_t rfk_as_bits(float f) {
    union { uint32_t u; float f; } x;
    x.f = f;
    return x.u;
}

/* The value of lane (own ^ mask). All lanes of the wave must take part. */
template <int WAVE, class T> RFK_DEVICE T rfk_shuffle_xor(T v, int mask) {
#if defined(RFK_NVIDIA)
    return __shfl_xor_sync(0xffffffffu, v, mask, WAVE); /* NVIDIA's waves have 32 lanes */
#else
    return __shfl_xor(v, mask, WAVE);
#endif
}

/* The value of one lane of the wave. All lanes must take part. */
template <int WAVE, class T> RFK_DEVICE T rfk_shuffle(T v, uint32_t lane) {
#if defined(RFK_NVIDIA)
    return __shfl_sync(0xffffffffu, v, (int)lane, WAVE);
#else
    return __shfl(v, (int)lane, WAVE);
#endif
}

/* A value that all lanes of a wave have: AMD's compiler takes a scalar register for it if it knows. */
RFK_DEVICE uint32_t rfk_uniform(uint32_t v) {
#if defined(RFK_NVIDIA) || defined(ROCMFORGE_HIP_EMU)
    return v;
#else
    return (uint32_t)__builtin_amdgcn_readfirstlane((int)v);
#endif
}

/* a * b and a * b + c, rounded once each: where kernels must agree on bits, no compiler chooses what it contracts. */
RFK_DEVICE float rfk_mul(float a, float b) {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
    return a * b;
#endif
}
RFK_DEVICE float rfk_fma(float a, float b, float c) {
#if defined(ROCMFORGE_HIP_EMU)
    return a * b + c; /* the emulator's kernels all round twice */
#else
    return fmaf(a, b, c);
#endif
}

/* Sum over the wave, in every lane, added in the same order in every lane: adjacent lanes first. */
template <int WAVE, class T> RFK_DEVICE T rfk_wave_sum(T v) {
#if defined(ROCMFORGE_HIP_EMU)
    if (hip_emu_joins_at_once()) return hip_emu_wave_sum(v, WAVE);
#endif
    for (int mask = 1; mask < WAVE; mask *= 2) v += rfk_shuffle_xor<WAVE>(v, mask);
    return v;
}

/* What the lanes of a wave wrote to shared memory can be read by its other lanes. All lanes must take part. */
template <int WAVE> RFK_DEVICE void rfk_sync_lanes() {
#if defined(ROCMFORGE_HIP_EMU)
    (void)rfk_shuffle_xor<WAVE>(0, 1);
#elif defined(RFK_NVIDIA)
    __syncwarp();
#else
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
#endif
}

/* Maximum over the wave, in every lane. */
template <int WAVE> RFK_DEVICE float rfk_wave_max(float v) {
#if defined(ROCMFORGE_HIP_EMU)
    if (hip_emu_joins_at_once()) return hip_emu_wave_max(v, WAVE);
#endif
    for (int mask = WAVE / 2; mask > 0; mask /= 2) v = fmaxf(v, rfk_shuffle_xor<WAVE>(v, mask));
    return v;
}
template <int WAVE> RFK_DEVICE uint32_t rfk_wave_max(uint32_t v) {
#if defined(RFK_SM80)
    return __reduce_max_sync(0xffffffffu, v);
#else
#if defined(ROCMFORGE_HIP_EMU)
    if (hip_emu_joins_at_once()) return hip_emu_wave_max(v, WAVE);
#endif
    for (int mask = WAVE / 2; mask > 0; mask /= 2) {
        const uint32_t other = rfk_shuffle_xor<WAVE>(v, mask);
        v = other > v ? other : v;
    }
    return v;
#endif
}

/* The compiler moves no loads across this: that many in flight would not fit into registers. */
RFK_DEVICE void rfk_compiler_fence() {
#if !defined(ROCMFORGE_HIP_EMU)
    asm volatile("" ::: "memory");
#endif
}

/* A fence for AMD's instruction scheduler, which would run out of registers. */
RFK_DEVICE void rfk_schedule_fence() {
#if defined(__AMDGCN__)
    rfk_compiler_fence();
    __builtin_amdgcn_sched_barrier(0);
#endif
}

/* v. What is computed from it is computed here: the compiler does not do so before a loop and keep it in registers. */
RFK_DEVICE uint32_t rfk_computed_here(uint32_t v) {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    asm volatile("" : "+r"(v));
#elif defined(__AMDGCN__)
    asm volatile("" : "+v"(v));
#endif
    return v;
}

/* The same by hipcc alone: where nvcc spills less without. */
RFK_DEVICE uint32_t rfk_computed_here_amd(uint32_t v) {
#if defined(__AMDGCN__)
    v = rfk_computed_here(v);
#endif
    return v;
}

/* Launch parameters. early_carveout: 0, or the kernel may start while the one before it in the stream still runs
 * (programmatic dependent launch), because it calls rfk_wait_previous before it touches what others write. Then it is
 * the share of shared memory in a multiprocessor's L1, in percent, the same for all kernels of a step: it changes only
 * when the multiprocessor is idle. cluster: 0, or so many blocks along y run at the same time and read each other's
 * shared memory. */
struct rfk_config {
    dim3 grid, block;
    uint32_t shared_bytes, early_carveout;
    hipStream_t stream;
    uint32_t cluster;
};

/* Launch a kernel.   Returns the runtime's code. */
template <class T> struct rfk_same { typedef T type; };
template <class... P>
static hipError_t rfk_launch_config(void (*kernel)(P...), const rfk_config &c,
                                    typename rfk_same<P>::type... args) {
#if defined(ROCMFORGE_HIP_EMU)
    return hip_emu_launch(kernel, c.grid, c.block, c.shared_bytes, c.cluster, c.stream, args...);
#else
    void *list[] = {(void *)&args...};
#if defined(RFK_NVIDIA)
    if (c.early_carveout || c.cluster) {
        cudaLaunchConfig_t config;
        cudaLaunchAttribute attributes[3], *next = attributes;
        memset(&config, 0, sizeof config);
        memset(attributes, 0, sizeof attributes);
        if (c.early_carveout) {
            next->id = cudaLaunchAttributeProgrammaticStreamSerialization;
            next++->val.programmaticStreamSerializationAllowed = 1;
#if CUDART_VERSION >= 12060
            next->id = cudaLaunchAttributePreferredSharedMemoryCarveout;
            next++->val.sharedMemCarveout = c.early_carveout;
#else
            (void)cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                       (int)c.early_carveout);
#endif
        }
        if (c.cluster) {
            next->id = cudaLaunchAttributeClusterDimension;
            next->val.clusterDim.x = next->val.clusterDim.z = 1;
            next++->val.clusterDim.y = c.cluster;
        }
        config.numAttrs = (unsigned)(next - attributes);
        config.gridDim = c.grid;
        config.blockDim = c.block;
        config.dynamicSmemBytes = c.shared_bytes;
        config.stream = c.stream;
        config.attrs = attributes;
        return cudaLaunchKernelExC(&config, (const void *)kernel, list);
    }
#endif
    return hipLaunchKernel((const void *)kernel, c.grid, c.block, list, c.shared_bytes, c.stream);
#endif
}
template <class... P>
static hipError_t rfk_launch(void (*kernel)(P...), dim3 grid, dim3 block, hipStream_t stream,
                             typename rfk_same<P>::type... args) {
    rfk_config c = {grid, block, 0, 0, stream, 0};
    return rfk_launch_config(kernel, c, args...);
}

/* Let the next kernel start, to load its weights while this one waits. Its own rfk_wait_previous returns when this one
 * has ended, and with it all before. All threads call it. */
RFK_DEVICE void rfk_start_next() {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Wait until the writes of earlier kernels can be read, then let the next kernel start to load its weights. Returns at
 * once in a kernel that was not launched early. All threads call it. */
RFK_DEVICE void rfk_wait_previous() {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    rfk_start_next();
}

/* Where there are no clusters, it is a constant that none is there: no second join of attention is compiled. */
#if defined(RFK_NVIDIA) || defined(ROCMFORGE_HIP_EMU)
#define RFK_HAS_CLUSTERS 1
#else
#define RFK_HAS_CLUSTERS 0
#endif

/* ---- mbarriers and clusters ----
 * An mbarrier counts arrivals, and bytes that are on their way to shared memory: those of bulk copies, and those that
 * another block of the cluster sends. PTX ISA 8.7, "mbarrier", "st.async". */
#if defined(ROCMFORGE_HIP_EMU)
typedef hip_emu_gate rfk_mbarrier;
RFK_DEVICE void rfk_mbarrier_init(rfk_mbarrier *g, uint32_t n) { hip_emu_gate_make(g, n); }
RFK_DEVICE void rfk_mbarrier_expect(rfk_mbarrier *g, uint32_t n_bytes) { hip_emu_gate_arrive(g, n_bytes); }
RFK_DEVICE void rfk_mbarrier_wait(rfk_mbarrier *g, uint32_t n) { hip_emu_gate_wait(g, n & 1); }
RFK_DEVICE void rfk_arrive_at_cluster() { hip_emu_arrive_at_cluster(); }
RFK_DEVICE void rfk_wait_for_cluster() { hip_emu_wait_for_cluster(); }
RFK_DEVICE void rfk_send(uint32_t rank, float *to, const float4 &v, rfk_mbarrier *g) {
    hip_emu_gate_send(g, rank, to, &v, sizeof v);
}
#else
typedef uint64_t rfk_mbarrier;
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
RFK_DEVICE uint32_t rfk_shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
/* By one thread, before a barrier of the block or the cluster. */
RFK_DEVICE void rfk_mbarrier_init(rfk_mbarrier *g, uint32_t n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(rfk_shared_address(g)), "r"(n) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* Arrive, and tell how many bytes come. */
RFK_DEVICE void rfk_mbarrier_expect(rfk_mbarrier *g, uint32_t n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(rfk_shared_address(g)), "r"(n_bytes)
                 : "memory");
}
/* The n-th wait, from 0: an mbarrier has one parity bit. */
RFK_DEVICE void rfk_mbarrier_wait(rfk_mbarrier *g, uint32_t n) {
    asm volatile("{.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}"
                 ::"r"(rfk_shared_address(g)), "r"(n & 1) : "memory");
}
/* The barrier of a cluster: after the wait all its blocks have begun, and their mbarriers are there. All threads call
 * both. */
RFK_DEVICE void rfk_arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
RFK_DEVICE void rfk_wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
/* Store v to `to` in the shared memory of block `rank` of the cluster, whose mbarrier at g counts the bytes. That block
 * has begun, and does not end before it has them. */
RFK_DEVICE void rfk_send(uint32_t rank, float *to, const float4 &v, rfk_mbarrier *g) {
    uint32_t at = rfk_shared_address(to), gate = rfk_shared_address(g);
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(gate) : "r"(rank));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];"
                 ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(gate) : "memory");
}
#else /* no clusters */
RFK_DEVICE void rfk_mbarrier_init(rfk_mbarrier *, uint32_t) {}
RFK_DEVICE void rfk_mbarrier_expect(rfk_mbarrier *, uint32_t) {}
RFK_DEVICE void rfk_mbarrier_wait(rfk_mbarrier *, uint32_t) {}
RFK_DEVICE void rfk_arrive_at_cluster() {}
RFK_DEVICE void rfk_wait_for_cluster() {}
RFK_DEVICE void rfk_send(uint32_t, float *, const float4 &, rfk_mbarrier *) {}
#endif
#endif

#define RFK_BLOCK 256        /* threads of a block unless a kernel says otherwise */
#define RFK_MATVEC_WAVES 4   /* waves of a matvec block; a wave computes a row */

static uint32_t rfk_ceil_div(uint64_t a, uint32_t b) { return (uint32_t)((a + b - 1) / b); }

/* ==== 2 Weights ======================================================================================== >>weights
 * A quantized row is read in units of 32 weights: two halves of 16, adjacent in some types and STRIDE apart in others,
 * because that is what a 16-byte load of packed bytes holds. A weight is d * (q - OFFSET) - m, q a signed byte. Blocks
 * of Q4_K and Q5_K are multiples of 16 bytes, those of IQ1_M of 8: they stay as they are, but for Q5_K's codes. The
 * other types are repacked when they are written, from an array of structs to a struct of arrays ("planes"), so that
 * loads are aligned. */

struct rfk_weight {
    const uint8_t *plane[4]; /* one array for each field of a block; [0] alone if not repacked */
    uint32_t type;
};

struct rfk_unit {
    int q[8];   /* 4 signed bytes each: words 0-3 are the first half, 4-7 the second */
    float d[2];
    float m[2]; /* defined only if HAS_MIN */
    float min_q[2], dmin; /* Q4_K and Q5_K: m = dmin * min_q */
};

/* A unit as loaded, not yet unpacked, so that loads can be issued long before their use. */
struct rfk_raw {
    int4 a, b;        /* quants; the next 16 bytes, the upper bits or the block header */
    uint32_t c, e, f; /* scales and other small fields */
    uint32_t more[2], type;
};

/* Fields of a block as offset and size in bytes. Repacking moves 2 bytes at a time, 1 in MXFP4, which has odd sizes. */
struct rfk_packing {
    uint32_t n_planes; /* 0: not repacked */
    uint32_t at[4], bytes[4];
    uint32_t bits[2];  /* of the first two planes; 0: bytes as they are; else as rfk_unit_bits makes them */
};
/* rfk_packing.bits: which function makes the bytes of a plane. Codes of Q5_0, Q5_1, Q3_K and Q6_K are in two planes. */
enum {
    RFK_BITS_PAIRS = 1, RFK_BITS_IQ3_S, RFK_BITS_IQ3_XXS, RFK_BITS_NVFP4, RFK_BITS_Q5, RFK_BITS_Q5_LAST, RFK_BITS_Q5_K,
    RFK_BITS_Q3_K, RFK_BITS_Q3_K_LAST, RFK_BITS_Q6_K, RFK_BITS_Q6_K_LAST
};

static rfk_packing rfk_packing_of(uint32_t type) {
    static const rfk_packing none = {0, {0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0}};
    static const struct {
        uint32_t type;
        rfk_packing packing;
    } list[] = {
        {RF_TYPE_Q8_0, {2, {2, 0, 0, 0}, {32, 2, 0, 0}, {0, 0}}},
        {RF_TYPE_Q4_0, {2, {2, 0, 0, 0}, {16, 2, 0, 0}, {0, 0}}},
        {RF_TYPE_Q4_1, {2, {4, 0, 0, 0}, {16, 4, 0, 0}, {0, 0}}},
        {RF_TYPE_Q5_0, {3, {6, 2, 0, 0}, {16, 4, 2, 0}, {RFK_BITS_Q5, RFK_BITS_Q5_LAST}}},
        {RF_TYPE_Q5_1, {3, {8, 4, 0, 0}, {16, 4, 4, 0}, {RFK_BITS_Q5, RFK_BITS_Q5_LAST}}},
        {RF_TYPE_Q2_K, {3, {16, 0, 80, 0}, {64, 16, 4, 0}, {RFK_BITS_PAIRS, 0}}},
        {RF_TYPE_Q3_K, {4, {32, 0, 96, 108}, {64, 32, 12, 2}, {RFK_BITS_Q3_K, RFK_BITS_Q3_K_LAST}}},
        {RF_TYPE_Q5_K, {1, {0, 0, 0, 0}, {176, 0, 0, 0}, {RFK_BITS_Q5_K, 0}}},
        {RF_TYPE_Q6_K, {4, {0, 128, 192, 208}, {128, 64, 16, 2}, {RFK_BITS_Q6_K, RFK_BITS_Q6_K_LAST}}},
        {RF_TYPE_IQ4_NL, {2, {2, 0, 0, 0}, {16, 2, 0, 0}, {0, 0}}},
        {RF_TYPE_IQ4_XS, {2, {8, 0, 0, 0}, {128, 8, 0, 0}, {0, 0}}},
        {RF_TYPE_MXFP4, {2, {1, 0, 0, 0}, {16, 1, 0, 0}, {0, 0}}},
        {RF_TYPE_NVFP4, {2, {4, 0, 0, 0}, {32, 4, 0, 0}, {0, RFK_BITS_NVFP4}}},
        {RF_TYPE_IQ3_XXS, {3, {2, 66, 0, 0}, {64, 32, 2, 0}, {0, RFK_BITS_IQ3_XXS}}},
        {RF_TYPE_IQ3_S, {3, {2, 66, 0, 0}, {64, 44, 2, 0}, {0, RFK_BITS_IQ3_S}}},
        {RF_TYPE_IQ2_XXS, {2, {2, 0, 0, 0}, {64, 2, 0, 0}, {0, 0}}},
        {RF_TYPE_IQ2_XS, {3, {2, 66, 0, 0}, {64, 8, 2, 0}, {0, 0}}},
        {RF_TYPE_IQ2_S, {3, {2, 66, 0, 0}, {64, 16, 2, 0}, {0, 0}}},
        {RF_TYPE_IQ1_S, {3, {2, 34, 0, 0}, {32, 16, 2, 0}, {0, 0}}},
        {RF_TYPE_TQ1_0, {3, {0, 48, 52, 0}, {48, 4, 2, 0}, {0, 0}}},
        {RF_TYPE_TQ2_0, {2, {0, 64, 0, 0}, {64, 2, 0, 0}, {RFK_BITS_PAIRS, 0}}},
        {RF_TYPE_Q1_0, {2, {2, 0, 0, 0}, {16, 2, 0, 0}, {0, 0}}},
        {RF_TYPE_Q2_0, {2, {2, 0, 0, 0}, {16, 2, 0, 0}, {0, 0}}},
    };
    for (uint32_t i = 0; i < sizeof list / sizeof *list; i++)
        if (list[i].type == type) return list[i].packing;
    return none;
}

/* requires: p is aligned to the size of the load */
RFK_DEVICE int4 rfk_load16(const uint8_t *p) { return *reinterpret_cast<const int4 *>(p); }
RFK_DEVICE uint32_t rfk_load4(const uint8_t *p) { return *reinterpret_cast<const uint32_t *>(p); }
RFK_DEVICE uint16_t rfk_load2(const uint8_t *p) { return *reinterpret_cast<const uint16_t *>(p); }
RFK_DEVICE float rfk_load_half(const uint8_t *p) { return rfk_from_half(rfk_load2(p)); }
RFK_DEVICE void rfk_load8bytes(const uint8_t *p, uint32_t *v) {
    uint2 both = *reinterpret_cast<const uint2 *>(p);
    v[0] = both.x, v[1] = both.y;
}

/* Load what a decode step reads once, or several times at about the same time: quantized weights, and halves of keys
 * and values. On NVIDIA it is the first to leave the L2 cache (evict-first), so that kernels' code and what they pass
 * on stay there while all weights pass through: 1 to 5 % of a step of one row on an H200, 0 to 2 % of 2 to 16. Prompts
 * do not: those of dense models would lose 2 %. */
template <class T> RFK_DEVICE T rfk_load_once(const void *p) {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    return __ldcs(reinterpret_cast<const T *>(p));
#else
    return *reinterpret_cast<const T *>(p);
#endif
}
/* Load quants where a wave reads 64 or 128 bytes of each of eight rows, then the next ones: the first load brings 256
 * bytes of a row to the L2. Prompts of 17 to 64 rows of an 8B on an H200 are 6 to 7 % faster by it, steps of 32 rows
 * 11 %. */
RFK_DEVICE int4 rfk_load16_of_rows(const uint8_t *p) {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    int4 v;
    asm("ld.global.L2::256B.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
#else
    return *reinterpret_cast<const int4 *>(p);
#endif
}
/* A place in weights that are read so: OF_ROWS or once. */
template <bool OF_ROWS> struct rfk_place {
    const uint8_t *p;
    template <class T> __device__ __forceinline__ T load() const {
        return OF_ROWS ? *reinterpret_cast<const T *>(p) : rfk_load_once<T>(p);
    }
    __device__ __forceinline__ uint32_t operator[](size_t i) const { return (*this + i).template load<uint8_t>(); }
    __device__ __forceinline__ rfk_place operator+(size_t n) const {
        const rfk_place at = {p + n};
        return at;
    }
};
typedef rfk_place<false> rfk_once;
template <bool OF_ROWS> RFK_DEVICE int4 rfk_load16(rfk_place<OF_ROWS> w) {
    return OF_ROWS ? rfk_load16_of_rows(w.p) : rfk_load_once<int4>(w.p);
}
template <bool OF_ROWS> RFK_DEVICE uint32_t rfk_load4(rfk_place<OF_ROWS> w) { return w.template load<uint32_t>(); }
template <bool OF_ROWS> RFK_DEVICE uint16_t rfk_load2(rfk_place<OF_ROWS> w) { return w.template load<uint16_t>(); }
template <bool OF_ROWS> RFK_DEVICE void rfk_load8bytes(rfk_place<OF_ROWS> w, uint32_t *v) {
    const uint2 both = w.template load<uint2>();
    v[0] = both.x, v[1] = both.y;
}
template <bool OF_ROWS> struct rfk_weight_places {
    rfk_place<OF_ROWS> plane[4];
    uint32_t type;
};
template <bool OF_ROWS> RFK_DEVICE rfk_weight_places<OF_ROWS> rfk_places(const rfk_weight &w) {
    const rfk_weight_places<OF_ROWS> at = {{{w.plane[0]}, {w.plane[1]}, {w.plane[2]}, {w.plane[3]}}, w.type};
    return at;
}
typedef rfk_weight_places<false> rfk_weight_once;
RFK_DEVICE rfk_weight_once rfk_read_once(const rfk_weight &w) { return rfk_places<false>(w); }

RFK_DEVICE void rfk_nibbles(const int4 &v, int *q) {
    const int in[4] = {v.x, v.y, v.z, v.w};
    RFK_UNROLL(4)
    for (int i = 0; i < 4; i++) {
        q[i] = in[i] & 0x0f0f0f0f;
        q[4 + i] = (in[i] >> 4) & 0x0f0f0f0f;
    }
}

RFK_DEVICE void rfk_words(const int4 &v, int *w) { w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w; }

/* Four signed bytes q - offset; q < 128. */
RFK_DEVICE int rfk_subtract4(int q, int offset) {
    return (int)((((uint32_t)q | 0x80808080u) - (uint32_t)offset * 0x01010101u) ^ 0x80808080u);
}

/* How a type is read. BLOCK: weights of a block; STRIDE: weights from a unit's first half to its second; SCALES: scales
 * of a unit. fetch: W is rfk_weight or rfk_weight_places. */
template <int TYPE> struct rfk_format;

template <> struct rfk_format<RF_TYPE_Q8_0> {
    static const int BLOCK = 32, STRIDE = 16, OFFSET = 0, HAS_MIN = 0, SCALES = 1;
    template <class W> RFK_DEVICE void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        r.a = rfk_load16(w.plane[0] + (block + u) * 32);
        r.b = rfk_load16(w.plane[0] + (block + u) * 32 + 16);
        r.c = rfk_load2(w.plane[1] + (block + u) * 2);
    }
    RFK_DEVICE void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        (void)u;
        o.q[0] = r.a.x, o.q[1] = r.a.y, o.q[2] = r.a.z, o.q[3] = r.a.w;
        o.q[4] = r.b.x, o.q[5] = r.b.y, o.q[6] = r.b.z, o.q[7] = r.b.w;
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)r.c);
    }
};

template <> struct rfk_format<RF_TYPE_Q4_0> {
    static const int BLOCK = 32, STRIDE = 16, OFFSET = 8, HAS_MIN = 0, SCALES = 1;
    template <class W> RFK_DEVICE void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        r.a = rfk_load16(w.plane[0] + (block + u) * 16);
        r.c = rfk_load2(w.plane[1] + (block + u) * 2);
    }
    RFK_DEVICE void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        (void)u;
        rfk_nibbles(r.a, o.q);
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)r.c);
    }
};

template <> struct rfk_format<RF_TYPE_Q4_1> {
    static const int BLOCK = 32, STRIDE = 16, OFFSET = 0, HAS_MIN = 1, SCALES = 1;
    template <class W> RFK_DEVICE void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        r.a = rfk_load16(w.plane[0] + (block + u) * 16);
        r.c = rfk_load4(w.plane[1] + (block + u) * 4);
    }
    RFK_DEVICE void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        (void)u;
        rfk_nibbles(r.a, o.q);
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)(r.c & 0xffff));
        o.m[0] = o.m[1] = -rfk_from_half((uint16_t)(r.c >> 16)); /* the file stores the value to add */
    }
};

/* Four five-bit codes of a unit's first half and four of its second, from its word i, v, and its last word
 * (rfk_q5_byte). IN_PLACE: times 8, as they lie in their bytes. */
template <bool IN_PLACE> RFK_DEVICE void rfk_q5_codes(uint32_t v, uint32_t last, uint32_t i, int &first, int &second) {
    if (IN_PLACE) {
        first = (int)(v & 0xf8f8f8f8u);
        second = (int)((v << 5 & 0xe0e0e0e0u) | ((i < 2 ? last << (3 - 2 * i) : last >> (2 * i - 3)) & 0x18181818u));
    } else {
        first = (int)(v >> 3 & 0x1f1f1f1fu);
        second = (int)((v << 2 & 0x1c1c1c1cu) | (last >> (2 * i) & 0x03030303u));
    }
}

/* All codes of a unit. */
RFK_DEVICE void rfk_q5_unit(const int4 &v, uint32_t last, int *q) {
    int words[4];
    rfk_words(v, words);
    RFK_UNROLL(4)
    for (uint32_t i = 0; i < 4; i++) rfk_q5_codes<false>((uint32_t)words[i], last, i, q[i], q[4 + i]);
}

template <> struct rfk_format<RF_TYPE_Q5_0> {
    static const int BLOCK = 32, STRIDE = 16, OFFSET = 16, HAS_MIN = 0, SCALES = 1;
    template <class W> RFK_DEVICE void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        r.a = rfk_load16(w.plane[0] + (block + u) * 16);
        r.e = rfk_load4(w.plane[1] + (block + u) * 4);
        r.c = rfk_load2(w.plane[2] + (block + u) * 2);
    }
    RFK_DEVICE void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        (void)u;
        rfk_q5_unit(r.a, r.e, o.q);
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)r.c);
    }
};

template <> struct rfk_format<RF_TYPE_Q5_1> {
    static const int BLOCK = 32, STRIDE = 16, OFFSET = 0, HAS_MIN = 1, SCALES = 1;
    template <class W> RFK_DEVICE void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        r.a = rfk_load16(w.plane[0] + (block + u) * 16);
        r.e = rfk_load4(w.plane[1] + (block + u) * 4);
        r.c = rfk_load4(w.plane[2] + (block + u) * 4);
    }
    RFK_DEVICE void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        (void)u;
        rfk_q5_unit(r.a, r.e, o.q);
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)(r.c & 0xffff));
        o.m[0] = o.m[1] = -rfk_from_half((uint16_t)(r.c >> 16));
    }
};

/* Scales of sub-blocks 2c and 2c+1 of a Q4_K or Q5_K block from its first 16 bytes: d, dmin, 12 bytes of 6-bit pairs
 * (the last four sub-blocks keep their upper two bits in the upper bits of the first eight bytes). */
RFK_DEVICE void rfk_k_scales(const int4 &head, uint32_t c, rfk_unit &o) {
    uint32_t shift = 16 * (c & 1), scale, minimum;
    uint32_t a = (uint32_t)head.y >> shift, b = (uint32_t)head.z >> shift, e = (uint32_t)head.w >> shift;
    if (c < 2) {
        scale = a & 0x3f3f;
        minimum = b & 0x3f3f;
    } else {
        scale = (e & 0x0f0f) | ((a >> 2) & 0x3030);
        minimum = ((e >> 4) & 0x0f0f) | ((b >> 2) & 0x3030);
    }
    float d = rfk_from_half((uint16_t)((uint32_t)head.x & 0xffff)),
          dmin = rfk_from_half((uint16_t)((uint32_t)head.x >> 16));
    o.d[0] = d * (float)(scale & 255);
    o.d[1] = d * (float)((scale >> 8) & 255);
    o.dmin = dmin;
    o.min_q[0] = (float)(minimum & 255);
    o.min_q[1] = (float)((minimum >> 8) & 255);
    o.m[0] = dmin * o.min_q[0];
    o.m[1] = dmin * o.min_q[1];
}

template <> struct rfk_format<RF_TYPE_Q4_K> {
    static const int BLOCK = 256, STRIDE = 32, OFFSET = 0, HAS_MIN = 1, SCALES = 1;
    template <class W> RFK_DEVICE void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        const auto p = w.plane[0] + (block + u / 8) * 144;
        r.a = rfk_load16(p + 16 + u % 8 * 16);
        r.b = rfk_load16(p);
    }
    RFK_DEVICE void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        rfk_nibbles(r.a, o.q);
        rfk_k_scales(r.b, u % 8 / 2, o);
    }
};

template <> struct rfk_format<RF_TYPE_Q5_K> {
    static const int BLOCK = 256, STRIDE = 32, OFFSET = 0, HAS_MIN = 1, SCALES = 1;
    template <class W> RFK_DEVICE void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        const auto p = w.plane[0] + (block + u / 8) * 176;
        r.a = rfk_load16(p + 48 + u % 8 * 16);
        r.b = rfk_load16(p);
        r.c = rfk_load4(p + 16 + u % 8 * 4);
    }
    RFK_DEVICE void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        rfk_q5_unit(r.a, r.c, o.q);
        rfk_k_scales(r.b, u % 8 / 2, o);
    }
};

template <> struct rfk_format<RF_TYPE_Q6_K> {
    static const int BLOCK = 256, STRIDE = 64, OFFSET = 32, HAS_MIN = 0, SCALES = 2;
    template <class W> RFK_DEVICE void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        size_t b = block + u / 8;
        uint32_t i = u % 8, n = i / 4, part = i % 4; /* n: half of the block; part: which 16 of its 64 low bytes */
        r.a = rfk_load16(w.plane[0] + b * 128 + i * 16);
        r.b = rfk_load16(w.plane[1] + b * 64 + n * 32 + part % 2 * 16);
        r.c = w.plane[2][b * 16 + n * 8 + part];
        r.e = w.plane[2][b * 16 + n * 8 + part + 4];
        r.f = rfk_load2(w.plane[3] + b * 2);
    }
    RFK_DEVICE void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        const uint32_t shift = u % 4 < 2 ? 4 : 0; /* of the last four bits of the second half's codes */
        int first[4], last[4];
        rfk_words(r.a, first);
        rfk_words(r.b, last);
        RFK_UNROLL(4)
        for (int k = 0; k < 4; k++) {
            const uint32_t v = (uint32_t)first[k];
            o.q[k] = (int)((v >> 2 & 0x3f3f3f3fu) ^ 0x20202020u);
            o.q[4 + k] = (int)(((v << 4 & 0x30303030u) ^ 0x20202020u) | ((uint32_t)last[k] >> shift & 0x0f0f0f0fu));
        }
        float d = rfk_from_half((uint16_t)r.f);
        o.d[0] = d * (float)(int8_t)r.c;
        o.d[1] = d * (float)(int8_t)r.e;
    }
};

/* ---- the other types ----
 * Decoded to signed bytes. One kernel takes all of them and branches on the type for each unit: a kernel for each type
 * would be seventeen times the code, for types that few models use. */

/* Inlined on GPUs for speed; not in emulation, where it only costs time to compile. */
#if defined(ROCMFORGE_HIP_EMU)
#define RFK_DECODER static __attribute__((noinline))
#else
#define RFK_DECODER RFK_DEVICE
#endif

/* A codebook: sixteen signed bytes, indexed by four bits. */
struct rfk_codebook { uint32_t word[4]; };
RFK_DEVICE rfk_codebook rfk_codes_iq4() { /* -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113 */
    rfk_codebook c = {{0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}};
    return c;
}
RFK_DEVICE rfk_codebook rfk_codes_fp4() { /* 0 1 2 3 4 6 8 12 and their negatives: twice the values of FP4 */
    rfk_codebook c = {{0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu}};
    return c;
}

/* NVIDIA's PRMT, for its selectors of four bits: bytes 0-3 are of x, 4-7 of y, and with 8 added a byte becomes eight
 * copies of its sign. */
#if (defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)) || defined(ROCMFORGE_HIP_EMU)
#define RFK_HAS_PERMUTE 1
RFK_DEVICE uint32_t rfk_permute(uint32_t x, uint32_t y, uint32_t selectors) {
#if defined(ROCMFORGE_HIP_EMU)
    const uint64_t bytes = x | (uint64_t)y << 32;
    uint32_t out = 0;
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t selector = selectors >> (4 * i), byte = (uint32_t)(bytes >> (8 * (selector & 7))) & 255;
        out |= (selector & 8 ? (byte >> 7) * 255 : byte) << (8 * i);
    }
    return out;
#else
    uint32_t out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(y), "r"(selectors));
    return out;
#endif
}

/* A constant that stays in a register: ptxas would move it there for each instruction that wants it in one. No block is
 * two threads deep. */
RFK_DEVICE uint32_t rfk_in_register(uint32_t constant) {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    return constant + threadIdx.z;
#else
    return constant;
#endif
}
#endif

/* A codebook as two tables of eight, so that nibbles are PRMT's selectors as they are: the first for codes 0 to 7, the
 * second for codes 8 to 15, whose selectors have the upper bit inverted. Each code is looked up in both. The table that
 * does not have it gives the sign of an entry, 0 or -1; the entries are such that the two results add up to the code's
 * value.
 * IS: whether TYPE is read so here; whole, halves: its codebook, and the two tables; LANES: if a byte's low nibble is
 * value i, its high one is value i + 4 * LANES. */
template <int TYPE> struct rfk_split_codes {
    static const bool IS = false;
    static const uint32_t LANES = 0;
    RFK_DEVICE rfk_codebook whole() { return {{0, 0, 0, 0}}; }
    RFK_DEVICE rfk_codebook halves() { return {{0, 0, 0, 0}}; }
};
#if defined(RFK_HAS_PERMUTE)
struct rfk_split_iq4 {
    static const bool IS = true;
    static const uint32_t LANES = 4;
    RFK_DEVICE rfk_codebook whole() { return rfk_codes_iq4(); }
    RFK_DEVICE rfk_codebook halves() { /* the first eight are negative: the others one larger */
        rfk_codebook c = rfk_codes_iq4();
        c.word[2] += 0x01010101u, c.word[3] += 0x01010101u;
        return c;
    }
};
template <uint32_t OF_LANES> struct rfk_split_fp4 {
    static const bool IS = true;
    static const uint32_t LANES = OF_LANES;
    RFK_DEVICE rfk_codebook whole() { return rfk_codes_fp4(); }
    RFK_DEVICE rfk_codebook halves() { /* all of the last eight but the first are negative: the others one larger */
        rfk_codebook c = rfk_codes_fp4();
        c.word[0] += 0x01010100u, c.word[1] += 0x01010101u;
        return c;
    }
};
template <> struct rfk_split_codes<RF_TYPE_IQ4_NL> : rfk_split_iq4 {};
template <> struct rfk_split_codes<RF_TYPE_IQ4_XS> : rfk_split_iq4 {};
template <> struct rfk_split_codes<RF_TYPE_MXFP4> : rfk_split_fp4<4> {};
template <> struct rfk_split_codes<RF_TYPE_NVFP4> : rfk_split_fp4<2> {};

/* The upper half of v as a dot product: unlike a shift that leaves the unit of logic ops and PRMT free, on which
 * look-ups wait. */
RFK_DEVICE uint32_t rfk_upper_half(uint32_t v) {
#if defined(ROCMFORGE_HIP_EMU)
    return v >> 16;
#else
    uint32_t out;
    asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(out) : "r"(v), "r"(0x100), "r"(0));
    return out;
#endif
}

/* Add the products of the codes of `words`, eight each, and x, which lies in the order of a byte's nibbles. */
template <int TYPE> RFK_DEVICE int rfk_dot_codes(const int *words, const int4 &x, int sum) {
    const rfk_codebook c = rfk_split_codes<TYPE>::halves();
    const uint32_t first = rfk_in_register(c.word[0]), second = rfk_in_register(c.word[2]);
    const int in[4] = {x.x, x.y, x.z, x.w};
    RFK_UNROLL(2)
    for (int i = 0; i < 2; i++) {
        const uint32_t v = (uint32_t)words[i], n = v ^ 0x88888888u; /* one of two shifts: units are equally busy */
        sum = rfk_dot4((int)rfk_permute(first, c.word[1], v), in[2 * i], sum);
        sum = rfk_dot4((int)rfk_permute(second, c.word[3], n), in[2 * i], sum);
        sum = rfk_dot4((int)rfk_permute(first, c.word[1], v >> 16), in[2 * i + 1], sum);
        sum = rfk_dot4((int)rfk_permute(second, c.word[3], rfk_upper_half(n)), in[2 * i + 1], sum);
    }
    return sum;
}

/* Look up eight nibbles: their lower three bits select in the codebook's halves, `which` the half. */
struct rfk_nibble_selectors { uint32_t lower, which; };
RFK_DEVICE rfk_nibble_selectors rfk_selectors_of(uint32_t v) {
    return {v & 0x77777777u, ((v & 0x88888888u) >> 1) | 0x32103210u};
}
/* The first four. */
RFK_DEVICE uint32_t rfk_look_up4(const rfk_codebook &c, uint32_t lower, uint32_t which) {
    const uint32_t first = rfk_in_register(c.word[0]), third = rfk_in_register(c.word[2]);
    return rfk_permute(rfk_permute(first, c.word[1], lower), rfk_permute(third, c.word[3], lower), which);
}

/* The codes of a word in the order of the nibbles, for products with several columns. */
template <int TYPE> RFK_DEVICE void rfk_look_up_in_order(int word, int *codes) {
    const rfk_codebook c = rfk_split_codes<TYPE>::whole();
    const rfk_nibble_selectors s = rfk_selectors_of((uint32_t)word);
    codes[0] = (int)rfk_look_up4(c, s.lower, s.which);
    codes[1] = (int)rfk_look_up4(c, rfk_upper_half(s.lower), rfk_upper_half(s.which));
}

/* x of eight low nibbles and of eight high ones in the order of the nibbles: word `i` of two. */
RFK_DEVICE int rfk_interleave(int low, int high, uint32_t i) {
    return (int)rfk_permute((uint32_t)low, (uint32_t)high, i ? 0x7362u : 0x5140u);
}
#else
template <int TYPE> RFK_DEVICE int rfk_dot_codes(const int *, const int4 &, int sum) { return sum; }
template <int TYPE> RFK_DEVICE void rfk_look_up_in_order(int, int *) {}
RFK_DEVICE int rfk_interleave(int low, int, uint32_t) { return low; }
#endif

/* Look up the eight nibbles: the low nibble of each byte, and the high one. */
RFK_DEVICE void rfk_look_up(const rfk_codebook &c, int nibbles, int *low, int *high) {
    const uint32_t v = (uint32_t)nibbles;
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    const rfk_nibble_selectors s = rfk_selectors_of(v);
    const uint32_t a = rfk_look_up4(c, s.lower, s.which), b = rfk_look_up4(c, s.lower >> 16, s.which >> 16);
    *low = (int)rfk_permute(a, b, 0x6420);
    *high = (int)rfk_permute(a, b, 0x7531);
#elif defined(__HIP_DEVICE_COMPILE__)
    const uint32_t part[2] = {v & 0x0f0f0f0fu, (v >> 4) & 0x0f0f0f0fu};
    uint32_t out[2];
    RFK_UNROLL(2)
    for (int i = 0; i < 2; i++) {
        uint32_t s = part[i] & 0x07070707u;
        out[i] = __builtin_amdgcn_perm(__builtin_amdgcn_perm(c.word[3], c.word[2], s),
                                       __builtin_amdgcn_perm(c.word[1], c.word[0], s),
                                       ((part[i] & 0x08080808u) >> 1) | 0x03020100u);
    }
    *low = (int)out[0], *high = (int)out[1];
#else
    uint32_t out[2] = {0, 0};
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t index = (v >> (4 * i)) & 15;
        out[i % 2] |= ((c.word[index / 4] >> (8 * (index % 4))) & 255) << (4 * (i - i % 2));
    }
    *low = (int)out[0], *high = (int)out[1];
#endif
}

/* Four fields of 2 (or 3) bits to the low bits of four bytes. */
RFK_DEVICE uint32_t rfk_spread2(uint32_t bits) {
    uint32_t pairs = (bits | bits << 12) & 0x000f000fu;
    return (pairs | pairs << 6) & 0x03030303u;
}
RFK_DEVICE uint32_t rfk_spread3(uint32_t bits) {
    uint32_t pairs = (bits & 0x3fu) | (bits & 0xfc0u) << 10;
    return (pairs | pairs << 5) & 0x07070707u;
}

/* Four bytes of 1 to 127; byte i is negated if bit i of `signs` is set. */
RFK_DEVICE int rfk_negate4(uint32_t values, uint32_t signs) {
    uint32_t ones = ((signs & 15) * 0x00204081u) & 0x01010101u;
    return (int)((values ^ ((ones << 8) - ones)) + ones);
}
/* 255 in byte k where its bit i is set, else 0. */
RFK_DEVICE uint32_t rfk_bits_to_bytes(uint32_t bytes, uint32_t i) {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    return rfk_permute(bytes << (7 - i), 0, 0xba98); /* signs of the bytes */
#else
    const uint32_t ones = (bytes >> i) & 0x01010101u;
    return (ones << 8) - ones;
#endif
}
/* All sign bits of a unit of IQ3_XXS: an even number of eight adjacent ones. */
RFK_DEVICE uint32_t rfk_even_signs_of_unit(uint32_t c) {
    const uint32_t known = c & 0x55ffffffu, halves = known ^ known >> 16, words = halves ^ halves >> 8;
    return known | ((words ^ words >> 1) & 0x55) << 25;
}
/* Seven sign bits, and the eighth, which makes the number of set bits even. */
RFK_DEVICE uint32_t rfk_even_signs(uint32_t seven) {
    seven &= 127;
    return seven | ((0x6996u >> ((seven ^ seven >> 4) & 15)) & 1) << 7;
}

#define RFK_CODES(v) v,
static __device__ const uint16_t rfk_grid_iq2_xxs[256] = {RF_GRID_IQ2_XXS(RFK_CODES)},
                                 rfk_grid_iq2_xs[512] = {RF_GRID_IQ2_XS(RFK_CODES)},
                                 rfk_grid_iq2_s[1024] = {RF_GRID_IQ2_S(RFK_CODES)},
                                 rfk_grid_iq1[2048] = {RF_GRID_IQ1(RFK_CODES)},
                                 rfk_grid_iq3_xxs[256] = {RF_GRID_IQ3_XXS(RFK_CODES)},
                                 rfk_grid_iq3_s[512] = {RF_GRID_IQ3_S(RFK_CODES)};
#undef RFK_CODES

/* The grid of a type: ENTRIES of WORDS with four values each, without their signs. */
template <int TYPE> struct rfk_grid {
    static const uint32_t ENTRIES = 0, WORDS = 1;
    RFK_DEVICE uint32_t word(uint32_t, uint32_t) { return 0; }
};
template <> struct rfk_grid<RF_TYPE_IQ3_XXS> {
    static const uint32_t ENTRIES = 256, WORDS = 1;
    RFK_DEVICE uint32_t word(uint32_t e, uint32_t) {
        const uint32_t c = rfk_spread3(rfk_grid_iq3_xxs[e]), last = c & (c >> 1) & (c >> 2) & 0x01010101u;
        return 0x04040404u + c * 8 + last * 2;
    }
};
template <> struct rfk_grid<RF_TYPE_IQ3_S> {
    static const uint32_t ENTRIES = 512, WORDS = 1;
    RFK_DEVICE uint32_t word(uint32_t e, uint32_t) { return rfk_spread3(rfk_grid_iq3_s[e]) * 2 + 0x01010101u; }
};
RFK_DEVICE uint32_t rfk_grid2_word(uint32_t entry, uint32_t i) {
    const uint32_t c = rfk_spread2((entry >> (8 * i)) & 255);
    return 0x08080808u + c * 17 + ((c >> 1) & 0x01010101u);
}
template <> struct rfk_grid<RF_TYPE_IQ2_XXS> {
    static const uint32_t ENTRIES = 256, WORDS = 2;
    RFK_DEVICE uint32_t word(uint32_t e, uint32_t i) { return rfk_grid2_word(rfk_grid_iq2_xxs[e], i); }
};
template <> struct rfk_grid<RF_TYPE_IQ2_XS> {
    static const uint32_t ENTRIES = 512, WORDS = 2;
    RFK_DEVICE uint32_t word(uint32_t e, uint32_t i) { return rfk_grid2_word(rfk_grid_iq2_xs[e], i); }
};
template <> struct rfk_grid<RF_TYPE_IQ2_S> {
    static const uint32_t ENTRIES = 1024, WORDS = 2;
    RFK_DEVICE uint32_t word(uint32_t e, uint32_t i) { return rfk_grid2_word(rfk_grid_iq2_s[e], i); }
};
template <> struct rfk_grid<RF_TYPE_IQ1_S> { /* 8 times the values 0, 1, 2 */
    static const uint32_t ENTRIES = 2048, WORDS = 2;
    RFK_DEVICE uint32_t word(uint32_t e, uint32_t i) { return rfk_spread2((rfk_grid_iq1[e] >> (8 * i)) & 255) << 3; }
};
template <> struct rfk_grid<RF_TYPE_IQ1_M> : rfk_grid<RF_TYPE_IQ1_S> {};

/* Entry e: of a copy in shared memory, or made anew. */
template <int TYPE, bool SHARED> RFK_DEVICE void rfk_grid_entry(const uint32_t *grid, uint32_t e, uint32_t *v) {
    typedef rfk_grid<TYPE> G;
    if (SHARED && G::WORDS == 2) {
        const uint2 two = reinterpret_cast<const uint2 *>(grid)[e];
        v[0] = two.x, v[1] = two.y;
    } else {
        RFK_UNROLL(2)
        for (uint32_t i = 0; i < G::WORDS; i++) v[i] = SHARED ? grid[e] : G::word(e, i);
    }
}

/* Eight weights of a grid entry: of the IQ2 grids, and of IQ1's, where `down` says whether delta is -1/8 or +1/8. */
RFK_DEVICE void rfk_grid2(const uint32_t *v, uint32_t signs, int *q) {
    q[0] = rfk_negate4(v[0], signs), q[1] = rfk_negate4(v[1], signs >> 4);
}
RFK_DEVICE void rfk_grid1(const uint32_t *v, uint32_t down, int *q) {
    const int offset = (int)(7 + 2 * (down & 1));
    q[0] = rfk_subtract4((int)v[0], offset), q[1] = rfk_subtract4((int)v[1], offset);
}

template <> struct rfk_format<RF_TYPE_IQ4_NL> {
    static const int OFFSET = 0, HAS_MIN = 0, SCALES = 1;
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        r.a = rfk_load16(w.plane[0] + (block + u) * 16);
        r.c = rfk_load2(w.plane[1] + (block + u) * 2);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        int in[4];
        (void)u;
        rfk_words(r.a, in);
        RFK_UNROLL(4)
        for (int i = 0; i < 4; i++) rfk_look_up(rfk_codes_iq4(), in[i], &o.q[i], &o.q[4 + i]);
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)r.c);
    }
};

template <> struct rfk_format<RF_TYPE_IQ4_XS> {
    static const int OFFSET = 0, HAS_MIN = 0, SCALES = 1;
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        r.a = rfk_load16(w.plane[0] + (block * 8 + u) * 16);
        rfk_load8bytes(w.plane[1] + (block + u / 8) * 8, r.more);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        int in[4];
        uint32_t scale = ((r.more[1] >> (4 * (u % 8))) & 15) | ((r.more[0] >> (16 + 2 * (u % 8))) & 3) << 4;
        rfk_words(r.a, in);
        RFK_UNROLL(4)
        for (int i = 0; i < 4; i++) rfk_look_up(rfk_codes_iq4(), in[i], &o.q[i], &o.q[4 + i]);
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)(r.more[0] & 0xffff)) * (float)((int)scale - 32);
    }
};

/* 2^(c - 127) / 2 */
RFK_DEVICE float rfk_mxfp4_scale(uint32_t c) { return rfk_as_float(c < 2 ? 0x200000u << c : (c - 1) << 23); }
template <> struct rfk_format<RF_TYPE_MXFP4> {
    static const int OFFSET = 0, HAS_MIN = 0, SCALES = 1;
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        r.a = rfk_load16(w.plane[0] + (block + u) * 16);
        r.c = w.plane[1][block + u];
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        int in[4];
        (void)u;
        rfk_words(r.a, in);
        RFK_UNROLL(4)
        for (int i = 0; i < 4; i++) rfk_look_up(rfk_codes_fp4(), in[i], &o.q[i], &o.q[4 + i]);
        o.d[0] = o.d[1] = rfk_mxfp4_scale(r.c);
    }
};

template <> struct rfk_format<RF_TYPE_NVFP4> {
    static const int OFFSET = 0, HAS_MIN = 0, SCALES = 2;
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        r.a = rfk_load16(w.plane[0] + (block * 2 + u) * 16);
        r.c = rfk_load2(w.plane[1] + (block * 2 + u) * 2);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        (void)u;
        rfk_look_up(rfk_codes_fp4(), r.a.x, &o.q[0], &o.q[2]);
        rfk_look_up(rfk_codes_fp4(), r.a.y, &o.q[1], &o.q[3]);
        rfk_look_up(rfk_codes_fp4(), r.a.z, &o.q[4], &o.q[6]);
        rfk_look_up(rfk_codes_fp4(), r.a.w, &o.q[5], &o.q[7]);
        /* half of a UE4M3 scale: its bits are those of a half that is 256 times smaller */
        const uint32_t halves = (r.c << 7 | r.c << 15) & 0x3f803f80u;
        o.d[0] = rfk_from_half((uint16_t)(halves & 0xffff)) * 128.0f;
        o.d[1] = rfk_from_half((uint16_t)(halves >> 16)) * 128.0f;
    }
};

/* Units of two bits a value: eight bytes, as rfk_pairs_byte makes them. */
RFK_DEVICE void rfk_quarters(const uint32_t *two, int *q) {
    RFK_UNROLL(8)
    for (int i = 0; i < 8; i++) q[i] = (int)((two[i / 4] >> (i % 4 * 2)) & 0x03030303u);
}

template <> struct rfk_format<RF_TYPE_Q2_K> {
    static const int BLOCK = 256, STRIDE = 16, OFFSET = 0, HAS_MIN = 1, SCALES = 2;
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        size_t b = block + u / 8;
        rfk_load8bytes(w.plane[0] + (block * 8 + u) * 8, r.more);
        r.c = rfk_load2(w.plane[1] + b * 16 + u % 8 * 2);
        r.e = rfk_load4(w.plane[2] + b * 4);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        float d = rfk_from_half((uint16_t)(r.e & 0xffff)), dmin = rfk_from_half((uint16_t)(r.e >> 16));
        (void)u;
        rfk_quarters(r.more, o.q);
        RFK_UNROLL(2)
        for (int h = 0; h < 2; h++) {
            o.d[h] = d * (float)((r.c >> (8 * h)) & 15);
            o.m[h] = dmin * (float)((r.c >> (8 * h + 4)) & 15);
        }
    }
};

template <> struct rfk_format<RF_TYPE_Q3_K> {
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        size_t b = block + u / 8;
        rfk_load8bytes(w.plane[0] + (block * 8 + u) * 8, r.more);
        r.a.x = (int)rfk_load4(w.plane[1] + (block * 8 + u) * 4);
        r.c = rfk_load2(w.plane[2] + b * 12 + u % 4 * 2);
        r.e = rfk_load2(w.plane[2] + b * 12 + 8 + u % 2 * 2);
        r.f = rfk_load2(w.plane[3] + b * 2);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        const float d = rfk_from_half((uint16_t)r.f) / 32;
        const uint32_t word[3] = {r.more[0], r.more[1], (uint32_t)r.a.x},
                       last = (word[0] << 6 & 0xc0c0c0c0u) | (word[1] << 4 & 0x30303030u) |
                              (word[2] << 2 & 0x0c0c0c0cu);
        u %= 8;
        RFK_UNROLL(4) /* 32 times the values: their three bits are a byte's upper ones */
        for (int i = 0; i < 4; i++) {
            const uint32_t two = i < 3 ? word[i] : last;
            o.q[2 * i] = (int)(two & 0xe0e0e0e0u), o.q[2 * i + 1] = (int)(two << 3 & 0xe0e0e0e0u);
        }
        RFK_UNROLL(2)
        for (uint32_t h = 0; h < 2; h++) {
            uint32_t scale = ((r.c >> (8 * h + u / 4 * 4)) & 15) | ((r.e >> (8 * h + u / 2 * 2)) & 3) << 4;
            o.d[h] = d * (float)((int)scale - 32);
        }
    }
};

template <> struct rfk_format<RF_TYPE_IQ3_XXS> {
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        rfk_load8bytes(w.plane[0] + (block * 8 + u) * 8, r.more);
        r.c = rfk_load4(w.plane[1] + (block * 8 + u) * 4);
        r.e = rfk_load2(w.plane[2] + (block + u / 8) * 2);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) { unpack_by<false>(r, u, o, NULL); }
    template <bool SHARED> RFK_DEVICE void unpack_by(const rfk_raw &r, uint32_t u, rfk_unit &o, const uint32_t *grid) {
        const uint32_t signs = rfk_even_signs_of_unit(r.c), pairs = (r.c >> 25) & 0x55,
                       fours = (pairs | pairs >> 1) & 0x33;
        (void)u;
        RFK_UNROLL(8)
        for (int i = 0; i < 8; i++) { /* a negated number has all bits above its lowest 1 inverted: 2 in 62, else 4 */
            uint32_t v[2];
            rfk_grid_entry<RF_TYPE_IQ3_XXS, SHARED>(grid, (r.more[i / 4] >> (i % 4 * 8)) & 255, v);
            const uint32_t inverted = (v[0] << 1 & 0x04040404u) | 0xf8f8f8f8u;
            o.q[i] = (int)(v[0] ^ (rfk_bits_to_bytes(signs, (uint32_t)i) & inverted));
        }
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)r.e) * (0.5f + (float)((fours | fours >> 2) & 15)) * 0.5f;
    }
};

template <> struct rfk_format<RF_TYPE_IQ3_S> {
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        const auto rest = w.plane[1] + (block + u / 8) * 44; /* high bits, signs, scales */
        rfk_load8bytes(w.plane[0] + (block * 8 + u) * 8, r.more);
        r.c = rfk_load4(rest + 8 + u % 8 * 4);
        r.e = rest[u % 8];
        r.f = rest[40 + u % 8 / 2];
        r.a.x = rfk_load2(w.plane[2] + (block + u / 8) * 2);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) { unpack_by<false>(r, u, o, NULL); }
    template <bool SHARED> RFK_DEVICE void unpack_by(const rfk_raw &r, uint32_t u, rfk_unit &o, const uint32_t *grid) {
        RFK_UNROLL(8)
        for (int i = 0; i < 8; i++) {
            const uint32_t index = ((r.more[i / 4] >> (i % 4 * 8)) & 255) | ((r.e << (8 - i)) & 256);
            uint32_t v[2];
            rfk_grid_entry<RF_TYPE_IQ3_S, SHARED>(grid, index, v);
            o.q[i] = (int)(v[0] ^ (rfk_bits_to_bytes(r.c, (uint32_t)i) & 0xfefefefeu)); /* values are odd */
        }
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)r.a.x) * (float)(1 + 2 * ((r.f >> (u % 2 * 4)) & 15));
    }
};

template <> struct rfk_format<RF_TYPE_IQ2_XXS> {
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        rfk_load8bytes(w.plane[0] + (block * 8 + u) * 8, r.more);
        r.c = rfk_load2(w.plane[1] + (block + u / 8) * 2);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) { unpack_by<false>(r, u, o, NULL); }
    template <bool SHARED> RFK_DEVICE void unpack_by(const rfk_raw &r, uint32_t u, rfk_unit &o, const uint32_t *grid) {
        (void)u;
        RFK_UNROLL(4)
        for (int i = 0; i < 4; i++) {
            uint32_t v[2];
            rfk_grid_entry<RF_TYPE_IQ2_XXS, SHARED>(grid, (r.more[0] >> (8 * i)) & 255, v);
            rfk_grid2(v, rfk_even_signs(r.more[1] >> (7 * i)), o.q + 2 * i);
        }
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)r.c) * (0.5f + (float)(r.more[1] >> 28)) * 0.25f;
    }
};

template <> struct rfk_format<RF_TYPE_IQ2_XS> {
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        rfk_load8bytes(w.plane[0] + (block * 8 + u) * 8, r.more);
        r.c = w.plane[1][block * 8 + u];
        r.e = rfk_load2(w.plane[2] + (block + u / 8) * 2);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) { unpack_by<false>(r, u, o, NULL); }
    template <bool SHARED> RFK_DEVICE void unpack_by(const rfk_raw &r, uint32_t u, rfk_unit &o, const uint32_t *grid) {
        (void)u;
        RFK_UNROLL(4)
        for (int i = 0; i < 4; i++) {
            uint32_t code = r.more[i / 2] >> (i % 2 * 16), v[2];
            rfk_grid_entry<RF_TYPE_IQ2_XS, SHARED>(grid, code & 511, v);
            rfk_grid2(v, rfk_even_signs(code >> 9), o.q + 2 * i);
        }
        RFK_UNROLL(2)
        for (int h = 0; h < 2; h++)
            o.d[h] = rfk_from_half((uint16_t)r.e) * (0.5f + (float)((r.c >> (4 * h)) & 15)) * 0.25f;
    }
};

template <> struct rfk_format<RF_TYPE_IQ2_S> {
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        size_t b = block + u / 8;
        r.more[0] = rfk_load4(w.plane[0] + b * 64 + u % 8 * 4);
        r.more[1] = rfk_load4(w.plane[0] + b * 64 + 32 + u % 8 * 4);
        r.c = w.plane[1][b * 16 + u % 8];
        r.e = w.plane[1][b * 16 + 8 + u % 8];
        r.f = rfk_load2(w.plane[2] + b * 2);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) { unpack_by<false>(r, u, o, NULL); }
    template <bool SHARED> RFK_DEVICE void unpack_by(const rfk_raw &r, uint32_t u, rfk_unit &o, const uint32_t *grid) {
        (void)u;
        RFK_UNROLL(4)
        for (int i = 0; i < 4; i++) {
            const uint32_t index = ((r.more[0] >> (8 * i)) & 255) | ((r.c >> (2 * i)) & 3) << 8;
            uint32_t v[2];
            rfk_grid_entry<RF_TYPE_IQ2_S, SHARED>(grid, index, v);
            rfk_grid2(v, r.more[1] >> (8 * i), o.q + 2 * i);
        }
        RFK_UNROLL(2)
        for (int h = 0; h < 2; h++)
            o.d[h] = rfk_from_half((uint16_t)r.f) * (0.5f + (float)((r.e >> (4 * h)) & 15)) * 0.25f;
    }
};

template <> struct rfk_format<RF_TYPE_IQ1_S> {
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        r.c = rfk_load4(w.plane[0] + (block * 8 + u) * 4);
        r.e = rfk_load2(w.plane[1] + (block * 8 + u) * 2);
        r.f = rfk_load2(w.plane[2] + (block + u / 8) * 2);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) { unpack_by<false>(r, u, o, NULL); }
    template <bool SHARED> RFK_DEVICE void unpack_by(const rfk_raw &r, uint32_t u, rfk_unit &o, const uint32_t *grid) {
        (void)u;
        RFK_UNROLL(4)
        for (int i = 0; i < 4; i++) {
            uint32_t v[2];
            rfk_grid_entry<RF_TYPE_IQ1_S, SHARED>(grid, ((r.c >> (8 * i)) & 255) | ((r.e >> (3 * i)) & 7) << 8, v);
            rfk_grid1(v, r.e >> 15, o.q + 2 * i);
        }
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)r.f) * (float)(2 * ((r.e >> 12) & 7) + 1) * 0.125f;
    }
};

template <> struct rfk_format<RF_TYPE_IQ1_M> {
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        const auto p = w.plane[0] + (block + u / 8) * 56;
        r.c = rfk_load4(p + u % 8 * 4);
        r.e = rfk_load2(p + 32 + u % 8 * 2);
        rfk_load8bytes(p + 48, r.more);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) { unpack_by<false>(r, u, o, NULL); }
    template <bool SHARED> RFK_DEVICE void unpack_by(const rfk_raw &r, uint32_t u, rfk_unit &o, const uint32_t *grid) {
        RFK_UNROLL(4)
        for (int i = 0; i < 4; i++) {
            uint32_t high = r.e >> (4 * i), v[2];
            rfk_grid_entry<RF_TYPE_IQ1_S, SHARED>(grid, ((r.c >> (8 * i)) & 255) | (high & 7) << 8, v);
            rfk_grid1(v, high >> 3, o.q + 2 * i);
        }
        /* four 16-bit words, each a nibble of d above four scales of 3 bits */
        uint32_t d = ((r.more[0] >> 12) & 15) | ((r.more[0] >> 24) & 0xf0) | ((r.more[1] >> 4) & 0xf00) |
                     ((r.more[1] >> 16) & 0xf000),
                 scales = (u % 8 < 4 ? r.more[0] : r.more[1]) >> (u / 2 % 2 * 16 + u % 2 * 6);
        o.d[0] = rfk_from_half((uint16_t)d) * (float)(2 * (scales & 7) + 1) * 0.125f;
        o.d[1] = rfk_from_half((uint16_t)d) * (float)(2 * ((scales >> 3) & 7) + 1) * 0.125f;
    }
};

/* Base-3 digits, most significant first: digit n of a byte b, read as the fraction b / 256, is the integer part of 3 *
 * frac(b * 3^n / 256). */
RFK_DEVICE int rfk_digits3(uint32_t bytes, uint32_t n) {
    uint32_t power = n < 4 ? 0x1b090301u >> (8 * n) & 255 : 81, even = bytes & 0x00ff00ffu,
             odd = (bytes >> 8) & 0x00ff00ffu;
    even = ((even * power & 0x00ff00ffu) * 3 >> 8) & 0x00030003u;
    odd = ((odd * power & 0x00ff00ffu) * 3) & 0x03000300u;
    return rfk_subtract4((int)(even | odd), 1);
}

template <> struct rfk_format<RF_TYPE_TQ1_0> {
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        size_t b = block + u / 8;
        const auto p = w.plane[0] + b * 48;
        r.a = rfk_load16(p + (u % 8 < 5 ? 0 : 32));
        r.b = rfk_load16(p + (u % 8 < 5 ? 16 : 32));
        r.c = rfk_load4(w.plane[1] + b * 4);
        r.e = rfk_load2(w.plane[2] + b * 2);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        int in[8];
        u %= 8;
        rfk_words(r.a, in);
        rfk_words(r.b, in + 4);
        RFK_UNROLL(8)
        for (uint32_t i = 0; i < 8; i++) { /* digits of 32 bytes, of 16, of 4 at last */
            bool last = u == 7 && i >= 4;
            uint32_t n = u < 5 ? u : last ? i - 4 : 2 * (u - 5) + i / 4;
            o.q[i] = rfk_digits3(last ? r.c : (uint32_t)in[i], n);
        }
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)r.e);
    }
};

template <> struct rfk_format<RF_TYPE_TQ2_0> {
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        rfk_load8bytes(w.plane[0] + (block * 8 + u) * 8, r.more);
        r.c = rfk_load2(w.plane[1] + (block + u / 8) * 2);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        (void)u;
        rfk_quarters(r.more, o.q);
        RFK_UNROLL(8)
        for (int i = 0; i < 8; i++) o.q[i] = rfk_subtract4(o.q[i], 1);
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)r.c);
    }
};

template <> struct rfk_format<RF_TYPE_Q1_0> {
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        r.c = rfk_load4(w.plane[0] + (block * 4 + u) * 4);
        r.e = rfk_load2(w.plane[1] + (block + u / 4) * 2);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        (void)u;
        RFK_UNROLL(8)
        for (int i = 0; i < 8; i++) o.q[i] = rfk_negate4(0x01010101u, ~r.c >> (4 * i));
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)r.e);
    }
};

template <> struct rfk_format<RF_TYPE_Q2_0> {
    template <class W> RFK_DECODER void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {
        rfk_load8bytes(w.plane[0] + (block * 2 + u) * 8, r.more);
        r.c = rfk_load2(w.plane[1] + (block + u / 2) * 2);
    }
    RFK_DECODER void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {
        (void)u;
        RFK_UNROLL(8)
        for (int i = 0; i < 8; i++)
            o.q[i] = rfk_subtract4((int)rfk_spread2((r.more[i / 4] >> (i % 4 * 8)) & 255), 1);
        o.d[0] = o.d[1] = rfk_from_half((uint16_t)r.c);
    }
};

/* Classes of types that share kernels: one scale for each unit; two scales; both and Q2_K. */
enum { RFK_OTHER32 = RF_TYPE_COUNT, RFK_OTHER16, RFK_OTHER };
#define RFK_OTHER32_TYPES(X)                                                                                         \
    X(RF_TYPE_IQ4_NL) X(RF_TYPE_IQ4_XS) X(RF_TYPE_MXFP4) X(RF_TYPE_IQ3_XXS) X(RF_TYPE_IQ3_S) X(RF_TYPE_IQ2_XXS)      \
    X(RF_TYPE_IQ1_S) X(RF_TYPE_TQ1_0) X(RF_TYPE_TQ2_0) X(RF_TYPE_Q1_0) X(RF_TYPE_Q2_0)
#define RFK_OTHER16_TYPES(X) \
    X(RF_TYPE_Q3_K) X(RF_TYPE_NVFP4) X(RF_TYPE_IQ2_XS) X(RF_TYPE_IQ2_S) X(RF_TYPE_IQ1_M)

/* Types with kernels of their own: rows of floats, and quantized rows. */
#define RFK_FLOAT_TYPES(X) X(RF_TYPE_F32) X(RF_TYPE_F16) X(RF_TYPE_BF16)
#define RFK_NARROW_TYPES(X)                                                                                          \
    X(RF_TYPE_Q8_0) X(RF_TYPE_Q4_0) X(RF_TYPE_Q4_1) X(RF_TYPE_Q5_0) X(RF_TYPE_Q5_1) X(RF_TYPE_Q4_K) X(RF_TYPE_Q5_K)  \
    X(RF_TYPE_Q6_K) X(RF_TYPE_Q2_K)
#define RFK_QUANTIZED_TYPES(X) RFK_NARROW_TYPES(X) X(RFK_OTHER32) X(RFK_OTHER16)

/* Whether this build has kernels for a type or class (ROCMFORGE_TYPES). Tables of kernels hold RFK_BUILT of each type:
 * for a type that is left out, kernels of another, which are never launched, because op_supported refuses the type. */
#define RFK_OR_BUILT(TYPE) || RF_TYPE_IS_BUILT(TYPE)
template <int TYPE> struct rfk_built {
    static const bool is =
        TYPE == RFK_OTHER32   ? (false RFK_OTHER32_TYPES(RFK_OR_BUILT))
        : TYPE == RFK_OTHER16 ? (false RFK_OTHER16_TYPES(RFK_OR_BUILT))
        : TYPE == RFK_OTHER   ? (false RFK_OTHER32_TYPES(RFK_OR_BUILT) RFK_OTHER16_TYPES(RFK_OR_BUILT)
                                 RFK_OR_BUILT(RF_TYPE_Q2_K))
                              : RF_TYPE_IS_BUILT(TYPE);
};
#undef RFK_OR_BUILT
#define RFK_IF_BUILT(TYPE) rfk_built<TYPE>::is ? (int)TYPE :
static const int rfk_first_built = RFK_QUANTIZED_TYPES(RFK_IF_BUILT) (int)RF_TYPE_Q8_0;
#undef RFK_IF_BUILT
#define RFK_BUILT(TYPE) (rfk_built<TYPE>::is ? (int)TYPE : rfk_first_built)
#define RFK_BUILT_FLOAT(TYPE) (rfk_built<TYPE>::is ? (int)TYPE : (int)RF_TYPE_F32)

/* The type that kernels are chosen by: the type itself, or its class. */
static uint32_t rfk_kernel_type(uint32_t type) {
#define RFK_CLASS_CASE(TYPE) case TYPE:
    switch (type) {
        RFK_OTHER32_TYPES(RFK_CLASS_CASE) return RFK_OTHER32;
        RFK_OTHER16_TYPES(RFK_CLASS_CASE) return RFK_OTHER16;
    default: return type;
    }
#undef RFK_CLASS_CASE
}

#define RFK_FETCH_CASE(TYPE) \
    case TYPE: if (rfk_built<TYPE>::is) rfk_format<TYPE>::fetch(w, 0, (uint32_t)block + u, r); break;
#define RFK_UNPACK_CASE(TYPE) case TYPE: if (rfk_built<TYPE>::is) rfk_format<TYPE>::unpack(r, u, o); break;
#define RFK_OTHER_FORMAT(CLASS, TYPES, scales)                                                                       \
    template <> struct rfk_format<CLASS> {                                                                           \
        static const int BLOCK = 32, STRIDE = 16, OFFSET = 0, HAS_MIN = 0, SCALES = scales;                          \
        template <class W> RFK_DEVICE void fetch(const W &w, size_t block, uint32_t u, rfk_raw &r) {                 \
            r.type = w.type;                                                                                         \
            switch (w.type) { TYPES(RFK_FETCH_CASE) default: break; }                                                \
        }                                                                                                            \
        RFK_DEVICE void unpack(const rfk_raw &r, uint32_t u, rfk_unit &o) {                                          \
            switch (r.type) { TYPES(RFK_UNPACK_CASE) default: break; }                                               \
        }                                                                                                            \
    };
RFK_OTHER_FORMAT(RFK_OTHER32, RFK_OTHER32_TYPES, 1)
RFK_OTHER_FORMAT(RFK_OTHER16, RFK_OTHER16_TYPES, 2)
#undef RFK_OTHER_FORMAT

template <int TYPE> RFK_DEVICE void rfk_load_unit(const rfk_weight &w, size_t block, uint32_t u, rfk_unit &o) {
    rfk_raw raw;
    rfk_format<TYPE>::fetch(w, block, u, raw);
    rfk_format<TYPE>::unpack(raw, u, o);
}

/* Position in the row of the first half of unit u. */
template <int TYPE> RFK_DEVICE uint32_t rfk_unit_at(uint32_t u) {
    if (rfk_format<TYPE>::STRIDE == 32) return u / 2 * 64 + u % 2 * 16;
    if (rfk_format<TYPE>::STRIDE == 64) return u / 4 * 128 + u % 4 * 16;
    return u * 32;
}

/* A unit of any quantized type, for kernels that need not be the fastest: weight k of half h is d[h] * (q - offset) -
 * m[h], at position at + h * stride + k of the row. */
struct rfk_any_unit {
    rfk_unit unit;
    uint32_t at, stride;
    int offset;
};
template <int TYPE> RFK_DEVICE void rfk_place_unit_of(uint32_t u, rfk_any_unit &o) {
    o.at = rfk_unit_at<TYPE>(u);
    o.stride = rfk_format<TYPE>::STRIDE;
    o.offset = rfk_format<TYPE>::OFFSET;
}
template <int TYPE>
RFK_DEVICE void rfk_load_unit_of(const rfk_weight &w, size_t row, uint32_t n_in, uint32_t u, rfk_unit &o) {
    if (!rfk_built<TYPE>::is) return;
    rfk_load_unit<TYPE>(w, row * (n_in / rfk_format<TYPE>::BLOCK), u, o);
    if (!rfk_format<TYPE>::HAS_MIN) o.m[0] = o.m[1] = 0;
}
/* Unit u of a row: where it lies; then its weights. kernel_type: rfk_kernel_type of the matrix. */
RFK_DEVICE void rfk_place_any_unit(uint32_t kernel_type, uint32_t u, rfk_any_unit &o) {
    o.at = o.stride = 0, o.offset = 0;
#define RFK_PLACE_CASE(TYPE) case TYPE: rfk_place_unit_of<TYPE>(u, o); break;
    switch (kernel_type) { RFK_QUANTIZED_TYPES(RFK_PLACE_CASE) default: break; }
#undef RFK_PLACE_CASE
}
RFK_DEVICE void rfk_load_any_unit(const rfk_weight &w, uint32_t kernel_type, size_t row, uint32_t n_in, uint32_t u,
                                  rfk_any_unit &o) {
#define RFK_UNIT_CASE(TYPE) case TYPE: rfk_load_unit_of<TYPE>(w, row, n_in, u, o.unit); break;
    switch (kernel_type) { RFK_QUANTIZED_TYPES(RFK_UNIT_CASE) default: break; }
#undef RFK_UNIT_CASE
}
RFK_DEVICE float rfk_unit_value(const rfk_any_unit &o, uint32_t h, uint32_t k) {
    const float q = (float)((int8_t)(o.unit.q[4 * h + k / 4] >> (8 * (k % 4))) - o.offset);
    return o.unit.d[h] * q - o.unit.m[h];
}

/* Element i of F32, F16 or BF16 data; and eight elements from i on, a multiple of 8, by 16-byte loads. */
template <int TYPE> RFK_DEVICE float rfk_load1(const uint8_t *p, size_t i) {
    if (TYPE == RF_TYPE_F32) return *reinterpret_cast<const float *>(p + 4 * i);
    if (TYPE == RF_TYPE_F16) return rfk_load_half(p + 2 * i);
    return rfk_as_float((uint32_t)rfk_load2(p + 2 * i) << 16);
}

RFK_DEVICE float rfk_load_any(const uint8_t *p, uint32_t type, size_t i) {
    if (type == RF_TYPE_F32) return rfk_load1<RF_TYPE_F32>(p, i);
    const uint16_t v = rfk_load2(p + 2 * i); /* one load for both types: kernels have many copies of this */
    return type == RF_TYPE_F16 ? rfk_from_half(v) : rfk_as_float((uint32_t)v << 16);
}

/* The eight values of 16 bytes of F16 or BF16. */
template <int TYPE> RFK_DEVICE void rfk_eight_of_16bit(const int4 &a, float *v) {
    const uint32_t words[4] = {(uint32_t)a.x, (uint32_t)a.y, (uint32_t)a.z, (uint32_t)a.w};
    RFK_UNROLL(4)
    for (int k = 0; k < 4; k++) {
        v[2 * k] = TYPE == RF_TYPE_F16 ? rfk_from_half((uint16_t)(words[k] & 0xffff)) : rfk_as_float(words[k] << 16);
        v[2 * k + 1] =
            TYPE == RF_TYPE_F16 ? rfk_from_half((uint16_t)(words[k] >> 16)) : rfk_as_float(words[k] & 0xffff0000u);
    }
}
template <int TYPE> RFK_DEVICE void rfk_load8(const uint8_t *p, size_t i, float *v) {
    if (TYPE == RF_TYPE_F32) {
        const float4 *f = reinterpret_cast<const float4 *>(p + 4 * i);
        float4 a = f[0], b = f[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        return;
    }
    rfk_eight_of_16bit<TYPE>(rfk_load16(p + 2 * i), v);
}

/* Byte `at` of a plane of sign bits: a word for a unit of 32 values, whose byte k has in bit i that of value 4i + k. In
 * the file IQ3_S has them in order. IQ3_XXS has seven of every eight there, one behind the other, then a scale of four
 * bits, which take the places of the missing ones: bits 1, 3, 5 and 7 of byte 3. */
RFK_DEVICE uint8_t rfk_unit_signs(const uint8_t *from, uint32_t at, uint32_t bits) {
    uint32_t word = 0, signs = 0;
    if (bits == RFK_BITS_IQ3_S && (at < 8 || at >= 40)) return from[at];
    for (uint32_t i = 0; i < 4; i++) word |= (uint32_t)from[at / 4 * 4 + i] << (8 * i);
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t bit = 4 * i + at % 4;
        if (bits == RFK_BITS_IQ3_XXS) bit = bit % 8 < 7 ? bit / 8 * 7 + bit % 8 : 28 + bit / 8;
        signs |= (word >> bit & 1) << i;
    }
    return (uint8_t)signs;
}
/* The value of a weight without its scale, in the file's block, as a two's complement of 3 bits (Q3_K: k of the 32 in
 * unit u) or 6 bits (Q6_K: l of the 32 in a piece, a quarter of half n of the block). */
RFK_DEVICE uint32_t rfk_q3_code(const uint8_t *block, uint32_t u, uint32_t k) {
    return ((block[32 + u / 4 * 32 + k] >> (u % 4 * 2) & 3u) | (block[k] >> u & 1u) << 2) ^ 4;
}
RFK_DEVICE uint32_t rfk_q6_code(const uint8_t *block, uint32_t n, uint32_t piece, uint32_t l) {
    const uint32_t low = block[n * 64 + piece % 2 * 32 + l] >> (piece / 2 * 4) & 15u,
                   high = block[128 + n * 32 + l] >> (2 * piece) & 3u;
    return (low | high << 4) ^ 32;
}
/* Such a code in the upper bits of a byte is a signed byte after one mask: 32 or 4 times the value. The bits below hold
 * codes that have no byte of their own.
 * Byte k of word i of a unit of Q3_K: the codes of values 8i + k and 8i + 4 + k, then two bits of the codes of values
 * 24 + k and 28 + k: words 0 to 2 have their six bits, the upper ones first. */
RFK_DEVICE uint8_t rfk_q3_byte(const uint8_t *block, uint32_t u, uint32_t i, uint32_t k) {
    const uint32_t six = rfk_q3_code(block, u, 24 + k) << 3 | rfk_q3_code(block, u, 28 + k);
    return (uint8_t)(rfk_q3_code(block, u, 8 * i + k) << 5 | rfk_q3_code(block, u, 8 * i + 4 + k) << 2 |
                     (six >> (4 - 2 * i) & 3));
}
/* Byte `at` of Q6_K's first plane: a code of piece 0 or 1, then the upper two bits of one of piece 2 or 3. is_last: of
 * the second plane, the lower four bits of a code of piece 2, then of piece 3. */
RFK_DEVICE uint8_t rfk_q6_byte(const uint8_t *block, uint32_t at, bool is_last) {
    const uint32_t n = at / (is_last ? 32 : 64), piece = at % 64 / 32, l = at % 32;
    if (is_last) return (uint8_t)(rfk_q6_code(block, n, 2, l) << 4 | (rfk_q6_code(block, n, 3, l) & 15));
    return (uint8_t)(rfk_q6_code(block, n, piece, l) << 2 | rfk_q6_code(block, n, piece + 2, l) >> 4);
}
/* A unit of five-bit codes, whose lower four bits are the low and high nibbles of 16 bytes. It becomes 16 bytes and a
 * word. Byte 4i + k: the code of the low nibble there, then the upper three bits of that of the high nibble; byte k of
 * the word has its lower two from bit 2i on. first, second: the fifth bits of the two codes, as bit 0. */
RFK_DEVICE uint8_t rfk_q5_byte(uint32_t nibbles, uint32_t first, uint32_t second) {
    return (uint8_t)((nibbles & 15) << 3 | (first & 1) << 7 | (second & 1) << 2 | nibbles >> 6);
}
RFK_DEVICE uint8_t rfk_q5_last(const uint8_t *low, uint32_t k) {
    uint32_t last = 0;
    for (uint32_t i = 0; i < 4; i++) last |= (low[4 * i + k] >> 4 & 3u) << (2 * i);
    return (uint8_t)last;
}
/* Byte `at` of a Q5_K block, whose units have 16 values of two groups each. */
RFK_DEVICE uint8_t rfk_q5_k_byte(const uint8_t *block, uint32_t at) {
    if (at < 16) return block[at];
    const uint32_t u = at < 48 ? at / 4 - 4 : at / 16 - 3, l = u % 2 * 16;
    const uint8_t *const low = block + 48 + u / 2 * 32 + l;
    if (at < 48) return rfk_q5_last(low, at % 4);
    const uint32_t bits = block[16 + l + at % 16] >> (u / 2 * 2);
    return rfk_q5_byte(low[at % 16], bits, bits >> 1);
}
/* Byte `at` of a plane in which units of 32 values have two words: byte k of the first has, from the lowest up, the two
 * bits each of values k, 4 + k, 8 + k and 12 + k, of the second those of the next 16. In the file a byte has bits of a
 * value of each of four units. */
RFK_DEVICE uint8_t rfk_pairs_byte(const uint8_t *from, uint32_t at) {
    const uint32_t unit = at / 8, first = at % 8 / 4 * 16 + at % 4;
    uint32_t out = 0;
    for (uint32_t i = 0; i < 4; i++) out |= (from[unit / 4 * 32 + first + 4 * i] >> (unit % 4 * 2) & 3u) << (2 * i);
    return (uint8_t)out;
}
/* Byte `at` of a plane, which is in the file's block from `from` on. */
RFK_DEVICE uint8_t rfk_unit_bits(const uint8_t *from, uint32_t at, uint32_t bits) {
    switch (bits) {
    case RFK_BITS_PAIRS: return rfk_pairs_byte(from, at);
    case RFK_BITS_NVFP4: return from[at] == 0x7f ? 0 : from[at] & 0x7f; /* NaN counts as 0, a sign as none */
    /* the fifth bits of Q5_0 and Q5_1 are the four bytes in front of the nibbles */
    case RFK_BITS_Q5: return rfk_q5_byte(from[at], (from - 4)[at / 8] >> (at % 8), (from - 2)[at / 8] >> (at % 8));
    case RFK_BITS_Q5_LAST: return rfk_q5_last(from + 4, at);
    case RFK_BITS_Q5_K: return rfk_q5_k_byte(from, at);
    case RFK_BITS_Q3_K: return rfk_q3_byte(from - 32, at / 8, at % 8 / 4, at % 4);
    case RFK_BITS_Q3_K_LAST: return rfk_q3_byte(from, at / 4, 2, at % 4);
    case RFK_BITS_Q6_K: return rfk_q6_byte(from, at, false);
    case RFK_BITS_Q6_K_LAST: return rfk_q6_byte(from - 128, at, true);
    default: return rfk_unit_signs(from, at, bits);
    }
}

/* Blocks [0, n_blocks) of src, as in the file, to the planes of dst from block `first` on.
 *   grid ceil(n_blocks * block_bytes / step / 256)   block 256   writes every byte once; those of planes by the unit
 *   read several from cache */
struct rfk_repack_args {
    rfk_packing packing;
    const uint8_t *src;
    uint8_t *plane[4];
    uint64_t first, n_bytes;
    uint32_t block_bytes, step; /* step: bytes moved at once, 1 or 2 */
};
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_repack(rfk_repack_args a) {
    uint64_t i = ((uint64_t)blockIdx.x * RFK_BLOCK + threadIdx.x) * a.step;
    if (i >= a.n_bytes) return;
    uint64_t block = i / a.block_bytes;
    uint32_t at = (uint32_t)(i % a.block_bytes);
    RFK_UNROLL(4)
    for (uint32_t p = 0; p < 4; p++) {
        if (p >= a.packing.n_planes || at < a.packing.at[p] || at - a.packing.at[p] >= a.packing.bytes[p]) continue;
        const uint32_t byte = at - a.packing.at[p], bits = p < 2 ? a.packing.bits[p] : 0;
        uint8_t *to = a.plane[p] + (a.first + block) * a.packing.bytes[p] + byte;
        if (bits) {
            const uint8_t *const from = a.src + block * a.block_bytes + a.packing.at[p];
            for (uint32_t k = 0; k < a.step; k++) to[k] = rfk_unit_bits(from, byte + k, bits);
        } else if (a.step == 2) *reinterpret_cast<uint16_t *>(to) = rfk_load2(a.src + i);
        else *to = a.src[i];
    }
}

/* Tell the device where an expert's weights are: kernels find them by the expert's index.   grid 1   block 1 */
struct rfk_expert_args {
    rfk_weight *to, w;
};
static __global__ void rfk_write_expert(rfk_expert_args a) { *a.to = a.w; }

/* ==== 3 Rows ============================================================================================== >>rows
 * Norms, element-wise ops, quantization, rope, the KV store, and the values of a step. */

/* Writes known values: the host reads them back to learn that the file was compiled for this GPU.   grid 1   block
 * 32 */
static __global__ void rfk_probe(uint32_t *out) { out[threadIdx.x] = threadIdx.x * 3 + 7; }

/* *sum += the 2 n uint64 of src: measures read bandwidth (mem_sum).
 *   grid any   block 256   2 KiB of LDS   reads 16 n bytes, eight 16-byte loads in flight a lane */
struct alignas(16) rfk_sixteen {
    unsigned long long a, b;
};
struct rfk_sum_parts {
    unsigned long long of[RFK_BLOCK];
};
struct rfk_sum_args {
    const rfk_sixteen *src;
    unsigned long long *sum;
    uint64_t n;
};
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_sum(rfk_sum_args a) {
    RFK_SHARED(rfk_sum_parts, part);
    const uint64_t stride = (uint64_t)gridDim.x * RFK_BLOCK;
    unsigned long long total = 0;
    uint64_t i = (uint64_t)blockIdx.x * RFK_BLOCK + threadIdx.x;
    for (; i + 7 * stride < a.n; i += 8 * stride) {
        rfk_sixteen w[8];
        RFK_UNROLL(8)
        for (uint32_t k = 0; k < 8; k++) w[k] = a.src[i + k * stride];
        RFK_UNROLL(8)
        for (uint32_t k = 0; k < 8; k++) total += w[k].a + w[k].b;
    }
    for (; i < a.n; i += stride) total += a.src[i].a + a.src[i].b;
    part.of[threadIdx.x] = total;
    for (uint32_t half = RFK_BLOCK / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part.of[threadIdx.x] += part.of[threadIdx.x + half];
    }
    if (threadIdx.x == 0) atomicAdd(a.sum, part.of[0]);
}

/* From the first row of a sequence in a step to its last; others may lie between them. Empty: {0, 0}. */
struct rfk_row_range {
    uint32_t first, end;
};

/* A step's values travel as kernel arguments, which the runtime copies: none is overwritten while in flight. Tokens
 * that the host does not know are read from the scratch memory, and given to the host.
 *   grid 1   block 64 */
#define RFK_STEP_ROWS 64
struct rfk_step_args {
    rf_step_row row[RFK_STEP_ROWS];
    rfk_row_range range[RFK_STEP_ROWS];
    uint32_t logit_row[RFK_STEP_ROWS];
    uint32_t chosen[RFK_STEP_ROWS]; /* as rf_step.chosen */
    const int32_t *scratch;
    int32_t *tokens;
    rf_step_row *rows;
    rfk_row_range *ranges; /* [rows of the step] of its sequences; beyond them empty */
    uint32_t *logit_rows;
    uint32_t first, n_rows, n_logits, n_chosen;
    uint32_t *now, turn, epoch; /* for sums over members */
};
static __global__ void rfk_write_step(rfk_step_args a) {
    if (threadIdx.x == 0) a.now[0] = a.turn, a.now[1] = a.epoch;
    const uint32_t chosen = threadIdx.x < a.n_chosen ? a.chosen[threadIdx.x] : 0;
    const int32_t token = chosen ? a.scratch[chosen - 1] : -1;
    if (chosen && a.tokens) a.tokens[a.first + threadIdx.x] = token;
    if (threadIdx.x < a.n_rows) {
        rf_step_row row = a.row[threadIdx.x];
        if (chosen) row.token = token < 0 ? 0 : token; /* none: any */
        a.rows[a.first + threadIdx.x] = row;
        a.ranges[a.first + threadIdx.x] = a.range[threadIdx.x];
    }
    if (threadIdx.x < a.n_logits) a.logit_rows[a.first + threadIdx.x] = a.logit_row[threadIdx.x];
}

/* out[t] (+)= scale * W[token of row t, or its position]; rows without a token are skipped.
 *   grid [ceil(n / 32 or 1 / 256), T]   block 256 */
struct rfk_embed_args {
    rfk_weight w;
    const rf_step_row *rows;
    float *out;
    uint32_t kernel_type, out_stride, n_out, by_position, accumulate;
    float scale;
};
RFK_DEVICE int32_t rfk_embed_row(const rfk_embed_args &a) {
    const rf_step_row &row = a.rows[blockIdx.y];
    return a.by_position == 2 ? 0 : a.by_position ? row.pos : row.token;
}
RFK_DEVICE void rfk_embed_value(const rfk_embed_args &a, float *out, float v) {
    *out = a.accumulate ? *out + v * a.scale : v * a.scale;
}
/* Quantized rows, a unit a thread. */
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_embed(rfk_embed_args a) {
    const uint32_t u = blockIdx.x * RFK_BLOCK + threadIdx.x;
    const int32_t token = rfk_embed_row(a);
    if (token < 0 || u >= a.n_out / 32) return;
    rfk_any_unit o;
    rfk_place_any_unit(a.kernel_type, u, o);
    rfk_load_any_unit(a.w, a.kernel_type, (size_t)token, a.n_out, u, o);
    float *out = a.out + (size_t)blockIdx.y * a.out_stride + o.at;
    RFK_UNROLL(2)
    for (uint32_t h = 0; h < 2; h++)
        RFK_UNROLL(16)
        for (uint32_t k = 0; k < 16; k++) rfk_embed_value(a, &out[h * o.stride + k], rfk_unit_value(o, h, k));
}
/* Rows of floats, a value a thread. */
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_embed_float(rfk_embed_args a) {
    const uint32_t i = blockIdx.x * RFK_BLOCK + threadIdx.x;
    const int32_t token = rfk_embed_row(a);
    if (token < 0 || i >= a.n_out) return;
    const size_t row = (size_t)token * a.n_out;
    rfk_embed_value(a, &a.out[(size_t)blockIdx.y * a.out_stride + i], rfk_load_any(a.w.plane[0], a.kernel_type,
                                                                                   row + i));
}

/* Values 4i .. 4i + 3 of a row of n, 0 beyond its end: one load if the row is aligned. */
RFK_DEVICE void rfk_get4(const float *row, uint32_t i, uint32_t n, float *x) {
    if ((size_t)row % 16 == 0 && 4 * i + 4 <= n) {
        const float4 v = reinterpret_cast<const float4 *>(row)[i];
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        return;
    }
    for (uint32_t k = 0; k < 4; k++) x[k] = 4 * i + k < n ? row[4 * i + k] : 0.0f;
}
RFK_DEVICE void rfk_set4(float *row, uint32_t i, uint32_t n, const float *x) {
    if ((size_t)row % 16 == 0 && 4 * i + 4 <= n) {
        float4 v;
        v.x = x[0], v.y = x[1], v.z = x[2], v.w = x[3];
        reinterpret_cast<float4 *>(row)[i] = v;
        return;
    }
    for (uint32_t k = 0; k < 4 && 4 * i + k < n; k++) row[4 * i + k] = x[k];
}

/* Activations for int8 dot products, in groups of 32: x = d * q, and the sums of q over each half of the group. The
 * bits are those of the CPU device: d = max|x| / 127, q = x * (1 / d) rounded to nearest even; d = 0 and q = 0 if d
 * would be below 2^-126; d = NaN and q = 0 if an x is infinite or NaN. */
struct rfk_group {
    float d;
    int16_t sum[2];
};
struct rfk_int8_rows {
    int *q;           /* [rows, n / 4] words of four int8, or bf16; NULL: not wanted */
    rfk_group *group; /* [rows, n / 32] */
    uint32_t bf16; /* not 0: the number of rows, and q is [n / 64, rows, 64] bf16, each 64 values rfk_swizzled */
    uint32_t n_in; /* bf16: not 0: in the order of rfk_bf16_at, and a row has vectors of n_in values */
};

/* Two floats to bf16, rounded to nearest even, `low` in the lower half. */
RFK_DEVICE uint32_t rfk_to_bf16x2(float low, float high) {
#if defined(RFK_SM80)
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    uint32_t bits[2] = {rfk_as_bits(low), rfk_as_bits(high)};
    for (int i = 0; i < 2; i++)
        bits[i] = (bits[i] & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16;
    return bits[0] | bits[1] << 16;
#endif
}

/* A row of 64 bf16 of an operand is 128 bytes. Its 16-byte words are XORed with the row index, the 128-byte swizzle of
 * wgmma: the same word of 8 rows lies in different banks. */
RFK_DEVICE uint32_t rfk_swizzled(uint32_t row, uint32_t word) { return word ^ row % 8; }

/* x / 127, rounded once, of any x that is not infinite or NaN: the product with 1/127 is one unit off at most, and its
 * remainder is exact (Markstein). Three instructions instead of a division. */
RFK_DEVICE float rfk_divide_by_127(float x) {
#if defined(ROCMFORGE_HIP_EMU) /* its rfk_fma rounds twice */
    return x / 127.0f;
#else
    const float one = 1.0f / 127.0f, y = rfk_mul(x, one);
    return fmaf(fmaf(-y, 127.0f, x), one, y);
#endif
}

/* The lowest bytes of four words. */
RFK_DEVICE int rfk_join_bytes(const uint32_t *w) {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    return (int)__byte_perm(__byte_perm(w[0], w[1], 0x0040), __byte_perm(w[2], w[3], 0x0040), 0x5410);
#else
    return (int)((w[0] & 255) | (w[1] & 255) << 8 | (w[2] & 255) << 16 | w[3] << 24);
#endif
}

/* The largest bits of |x| of n values: as integers, NaN > infinity > all numbers. */
RFK_DEVICE uint32_t rfk_largest(const float *x, int n) {
    uint32_t top = 0;
    for (int k = 0; k < n; k++) {
        const uint32_t bits = rfk_as_bits(x[k]) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    return top;
}

/* How a group is quantized whose largest value's bits are `top`. */
struct rfk_int8_scale {
    float d, inverse;
    bool finite;
};
RFK_DEVICE rfk_int8_scale rfk_scale_of(uint32_t top) {
    rfk_int8_scale s = {rfk_divide_by_127(rfk_as_float(top)), 0, top < 0x7f800000u};
    if (s.d >= 1.17549435e-38f) s.inverse = 1.0f / s.d;
    else s.d = 0;
    if (!s.finite) s.d = rfk_as_float(0x7fc00000u);
    return s;
}
/* Four values as int8. 1.5 * 2^23 + x rounds x to the nearest integer, even among two, and ends in its bits. */
RFK_DEVICE int rfk_quantize_four(const float *x, const rfk_int8_scale &s) {
    uint32_t q[4];
    for (int k = 0; k < 4; k++) q[k] = rfk_as_bits(rfk_mul(x[k], s.inverse) + 12582912.0f);
    return s.finite ? rfk_join_bytes(q) : 0;
}

/* Quantize a group of 32, four values a lane in eight adjacent lanes.   Returns the lane's four int8; the group's d,
 * and the sum of q over the lane's half of the group. All lanes of the wave must take part. */
template <int WAVE> RFK_DEVICE int rfk_quantize_lane(const float *x, float *d_out, int *sum_out) {
    uint32_t top = rfk_largest(x, 4);
    for (int mask = 1; mask < 8; mask *= 2) {
        uint32_t bits = rfk_shuffle_xor<WAVE>(top, mask);
        top = bits > top ? bits : top;
    }
    const rfk_int8_scale scale = rfk_scale_of(top);
    const int packed = rfk_quantize_four(x, scale);
    int sum = rfk_dot4(packed, 0x01010101, 0);
    for (int mask = 1; mask < 4; mask *= 2) sum += rfk_shuffle_xor<WAVE>(sum, mask);
    *d_out = scale.d;
    *sum_out = sum;
    return packed;
}

/* The same, 16 values a lane in two adjacent lanes. */
struct rfk_int8_chunk {
    int4 q;
    float d;
    int sum, other; /* of q, and of the other half of the group */
};
template <int WAVE> RFK_DEVICE void rfk_quantize_chunk(const float *x, rfk_int8_chunk &to) {
    uint32_t top = rfk_largest(x, 16);
    const uint32_t bits = rfk_shuffle_xor<WAVE>(top, 1);
    const rfk_int8_scale scale = rfk_scale_of(bits > top ? bits : top);
    to.q.x = rfk_quantize_four(x, scale), to.q.y = rfk_quantize_four(x + 4, scale);
    to.q.z = rfk_quantize_four(x + 8, scale), to.q.w = rfk_quantize_four(x + 12, scale);
    to.d = scale.d;
    to.sum = rfk_dot4(to.q.x, 0x01010101, 0);
    to.sum = rfk_dot4(to.q.y, 0x01010101, to.sum);
    to.sum = rfk_dot4(to.q.z, 0x01010101, to.sum);
    to.sum = rfk_dot4(to.q.w, 0x01010101, to.sum);
    to.other = rfk_shuffle_xor<WAVE>(to.sum, 1);
}

/* Four values of a lane, quantized; eight lanes share a group. */
struct rfk_int8_four {
    float d;
    int packed, sum, other; /* sum of the lane's half of the group, and of the other */
};
/* All lanes of the wave must take part. */
template <int WAVE> RFK_DEVICE rfk_int8_four rfk_quantize_halves(const float *x) {
    rfk_int8_four o;
    o.packed = rfk_quantize_lane<WAVE>(x, &o.d, &o.sum);
    o.other = rfk_shuffle_xor<WAVE>(o.sum, 4);
    return o;
}
/* Store values 4i .. 4i + 3 of a row of n. */
RFK_DEVICE void rfk_put_int8(const rfk_int8_rows &to, size_t row, uint32_t n, uint32_t i, const rfk_int8_four &v) {
    to.q[row * (n / 4) + i] = v.packed;
    if (i % 8 == 0) {
        rfk_group g;
        g.d = v.d;
        g.sum[0] = (int16_t)v.sum;
        g.sum[1] = (int16_t)v.other;
        to.group[row * (n / 32) + i / 8] = g;
    }
}
/* Quantize values 4i .. 4i + 3 of a row of n. All lanes of the wave must take part; `inside`: i < n / 4. */
template <int WAVE>
RFK_DEVICE void rfk_quantize4(const rfk_int8_rows &to, size_t row, uint32_t n, uint32_t i, const float *x,
                              bool inside) {
    const rfk_int8_four v = rfk_quantize_halves<WAVE>(x);
    if (inside) rfk_put_int8(to, row, n, i, v);
}

/* Columns of a step of several rows as int8, in tiles of 16, for rfk_few and its like. */
#define RFK_FEW_ROWS 16u /* columns of a tile, and rows of W that a block has at a time */
struct rfk_few_columns {
    int4 *q;         /* [tile][n / 16][16 columns], and behind these what the functions below find; NULL: no memory */
    size_t capacity; /* values that there is room for, a multiple of 512: all parts begin at multiples of 16 bytes */
};
#define RFK_FEW_BYTES(capacity) ((capacity) / 8 * 13)
/* [tile][n / 32][16]: the scale of a group of 32, and that times its sum. */
RFK_DEVICE float *rfk_few_d(const rfk_few_columns &x) { return reinterpret_cast<float *>(x.q + x.capacity / 16); }
RFK_DEVICE float *rfk_few_e(const rfk_few_columns &x) { return rfk_few_d(x) + x.capacity / 32; }
/* [tile][n / 16][16]: sums of 16. */
RFK_DEVICE float *rfk_few_sum(const rfk_few_columns &x) { return rfk_few_d(x) + x.capacity / 16; }
/* [column][n / 32]: sums of squares of a deferred norm. */
RFK_DEVICE float *rfk_few_squares(const rfk_few_columns &x) { return rfk_few_d(x) + x.capacity / 8; }

/* Store values 4i .. 4i + 3 of a column of n. */
RFK_DEVICE void rfk_few_put_int8(const rfk_few_columns &to, uint32_t n, uint32_t col, uint32_t i,
                                 const rfk_int8_four &v) {
    const uint32_t c = col % RFK_FEW_ROWS;
    const size_t tile = col / RFK_FEW_ROWS, piece = tile * n + i / 4 * RFK_FEW_ROWS + c,
                 group = tile * (n / 2) + i / 8 * RFK_FEW_ROWS + c;
    reinterpret_cast<int *>(to.q + piece)[i % 4] = v.packed;
    if (i % 4 == 0) rfk_few_sum(to)[piece] = (float)v.sum;
    if (i % 8 == 0) rfk_few_d(to)[group] = v.d, rfk_few_e(to)[group] = v.d * (float)(v.sum + v.other);
}

/* Where rfk_matmul_narrow wants value k of a row's vector, which is even, and the next:
 * [vector][n_in / 128][2][row][64], 64 being a swizzled row of an operand. A lane of four has 16 adjacent values and
 * those 32 after them, from 64 (lane / 2) + 16 (lane % 2) of 128 on; its 4 positions of each 16 are 4 of them.
 * Positions beyond n_in are 0. */
RFK_DEVICE uint32_t *rfk_bf16_at(const rfk_int8_rows &to, uint32_t row, uint32_t vector, uint32_t k) {
    const uint32_t lane = k / 64 % 2 * 2 + k / 16 % 2,
                   tile = (vector * ((to.n_in + 127) / 128) + k / 128) * 2 + k / 32 % 2;
    return reinterpret_cast<uint32_t *>(to.q) + ((size_t)tile * to.bf16 + row) * 32 +
           rfk_swizzled(row, k % 16 / 2) * 4 + lane;
}

/* The same to int8 or bf16, whichever the next matmul takes; as bf16, 64 values of all rows lie together. */
template <int WAVE>
RFK_DEVICE void rfk_convert4(const rfk_int8_rows &to, size_t row, uint32_t n, uint32_t i, const float *x, bool inside) {
    if (!to.bf16) return rfk_quantize4<WAVE>(to, row, n, i, x, inside);
    if (!inside) return;
    uint2 v;
    v.x = rfk_to_bf16x2(x[0], x[1]), v.y = rfk_to_bf16x2(x[2], x[3]);
    if (to.n_in) {
        const uint32_t vector = 4 * i < to.n_in ? 0 : 4 * i / to.n_in, k = 4 * i - vector * to.n_in;
        *rfk_bf16_at(to, (uint32_t)row, vector, k) = v.x;
        *rfk_bf16_at(to, (uint32_t)row, vector, k + 2) = v.y;
        for (uint32_t beyond = to.n_in; k + 4 == to.n_in && beyond % 128; beyond += 2)
            *rfk_bf16_at(to, (uint32_t)row, vector, beyond) = 0;
        return;
    }
    uint2 *word = reinterpret_cast<uint2 *>(reinterpret_cast<int4 *>(to.q) + (i / 16 * (size_t)to.bf16 + row) * 8 +
                                            rfk_swizzled((uint32_t)row, i % 16 / 2));
    word[i % 2] = v;
}

/* Quantize rows of floats for a matmul, or the first n values of each head, side by side.
 *   grid [rows, ceil(n / 1024), heads]   block 256 */
struct rfk_quantize_args {
    const float *in;
    rfk_int8_rows to;
    uint32_t in_stride, n, head; /* head: values from one head to the next */
};
template <int WAVE> static __global__ void RFK_THREADS(RFK_BLOCK) rfk_quantize(rfk_quantize_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    rfk_wait_previous();
    uint32_t i = blockIdx.y * RFK_BLOCK + threadIdx.x;
    float x[4];
    rfk_get4(a.in + (size_t)blockIdx.x * a.in_stride + (size_t)blockIdx.z * a.head, i, a.n, x);
    rfk_convert4<WAVE>(a.to, blockIdx.x, a.n * gridDim.z, blockIdx.z * (a.n / 4) + i, x, i < a.n / 4);
}

/* out (+)= x / sqrt(mean(x^2) + eps) * w + b over n values, x = in, or in - mean(in) if `center`; also quantized for
 * the next matmul (heads is 1 then, n a multiple of 32).   grid [rows, heads]   block 256   out may be in */
struct rfk_norm_args {
    const uint8_t *w, *b; /* NULL: none */
    const float *in;
    float *out;           /* NULL: not wanted */
    rfk_int8_rows to;
    const float *before;  /* [rows][out_stride] what the norm is added to; NULL: nothing */
    uint32_t w_type, b_type, in_stride, out_stride, n, n_heads, center;
    uint32_t w_head; /* values of w from one head to the next */
    float eps;
};
struct rfk_norm_shared { float sum[2][8]; };

/* Sum over the first `threads` of the block, in every thread. Each sum of a launch has a `slot` of its own: no barrier
 * is needed between them. */
template <int WAVE>
RFK_DEVICE float rfk_block_sum(rfk_norm_shared &s, int slot, float v, uint32_t threads = RFK_BLOCK) {
    v = rfk_wave_sum<WAVE>(v);
    if (threadIdx.x % WAVE == 0 && threadIdx.x < RFK_BLOCK) s.sum[slot][threadIdx.x / WAVE] = v;
    __syncthreads();
    v = 0;
    RFK_UNROLL(RFK_BLOCK / WAVE)
    for (uint32_t i = 0; i < RFK_BLOCK / WAVE; i++)
        if (i * WAVE < threads) v += s.sum[slot][i];
    return v;
}

/* Where the block's row begins among rows of out_stride values. */
RFK_DEVICE size_t rfk_norm_at(const rfk_norm_args &a) {
    return (size_t)blockIdx.x * a.out_stride + (size_t)blockIdx.y * a.n;
}
RFK_DEVICE float *rfk_norm_out(const rfk_norm_args &a) { return a.out ? a.out + rfk_norm_at(a) : NULL; }

RFK_DEVICE float rfk_norm_value(const rfk_norm_args &a, float x, float scale, uint32_t i) {
    float y = x * scale;
    if (a.w) y *= rfk_load_any(a.w, a.w_type, (size_t)blockIdx.y * a.w_head + i);
    if (a.b) y += rfk_load_any(a.b, a.b_type, i);
    return a.before ? a.before[rfk_norm_at(a) + i] + y : y;
}

template <int WAVE> static __global__ void RFK_THREADS(RFK_BLOCK) rfk_rms_norm(rfk_norm_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    rfk_wait_previous();
    RFK_SHARED(rfk_norm_shared, s);
    const float *in = a.in + (size_t)blockIdx.x * a.in_stride + (size_t)blockIdx.y * a.n;
    float *out = rfk_norm_out(a);
    float sum = 0, mean = 0;
    if (a.center) {
        for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK) mean += in[i];
        mean = rfk_block_sum<WAVE>(s, 0, mean) / (float)a.n;
    }
    for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK) sum += (in[i] - mean) * (in[i] - mean);
    sum = rfk_block_sum<WAVE>(s, 1, sum);
    float scale = 1.0f / sqrtf(sum / (float)a.n + a.eps);
    if (!a.to.q) {
        for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK)
            out[i] = rfk_norm_value(a, in[i] - mean, scale, i);
        return;
    }
    for (uint32_t first = 0; first < a.n / 4; first += RFK_BLOCK) {
        uint32_t i = first + threadIdx.x;
        bool inside = i < a.n / 4;
        float x[4] = {0, 0, 0, 0};
        for (uint32_t k = 0; inside && k < 4; k++) {
            x[k] = rfk_norm_value(a, in[4 * i + k] - mean, scale, 4 * i + k);
            if (out) out[4 * i + k] = x[k];
        }
        rfk_convert4<WAVE>(a.to, blockIdx.x, a.n, i, x, inside);
    }
}

/* RMS norm with an F32 weight, no bias and no mean, all rows aligned for loads of four values. Rows of up to
 * RFK_NORM_KEPT * 1024 values are read once.   grid [rows, heads]   block 256 */
#define RFK_NORM_KEPT 4
/* Values in a thread's registers: [j] is the four from 4 * (first + j * 256 + thread) on, 0 beyond the row's end. */
typedef float rfk_norm_part[RFK_NORM_KEPT][4];

RFK_DEVICE void rfk_norm_get4(const float *row, uint32_t i, uint32_t n, float *x) {
    float4 v = {0, 0, 0, 0};
    if (4 * i < n) v = reinterpret_cast<const float4 *>(row)[i];
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

/* A row in memory. */
struct rfk_norm_row {
    const float *in;
    uint32_t n;
};
RFK_DEVICE void rfk_norm_load(const rfk_norm_row &r, uint32_t first, rfk_norm_part &x) {
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < RFK_NORM_KEPT; j++) rfk_norm_get4(r.in, first + j * RFK_BLOCK + threadIdx.x, r.n, x[j]);
}
RFK_DEVICE const rfk_norm_row &rfk_norm_again(const rfk_norm_row &r) { return r; }

/* 1 / rms of a row of n values that the block's first 256 threads load; their last ones stay in x. */
template <int WAVE, class R>
RFK_DEVICE float rfk_norm_scale(const R &r, uint32_t n, float eps, rfk_norm_part &x, rfk_norm_shared &s) {
    float sum = 0;
    RFK_UNROLL(1)
    for (uint32_t first = 0; 4 * first < n && threadIdx.x < RFK_BLOCK; first += RFK_NORM_KEPT * RFK_BLOCK) {
        rfk_norm_load(r, first, x);
        RFK_UNROLL(4)
        for (uint32_t j = 0; j < RFK_NORM_KEPT; j++)
            for (uint32_t k = 0; k < 4; k++) sum = rfk_fma(x[j][k], x[j][k], sum);
    }
    return 1.0f / sqrtf(rfk_block_sum<WAVE>(s, 1, sum) / (float)n + eps);
}

/* The norm of a row that rfk_norm_load(r) loads: the last values stay in registers, the others are loaded again. */
template <int WAVE, class R> RFK_DEVICE void rfk_norm_wide(const rfk_norm_args &a, const R &r, rfk_norm_shared &s) {
    const uint32_t step = RFK_NORM_KEPT * RFK_BLOCK, last = (a.n - 1) / 4 / step * step;
    const float *w = reinterpret_cast<const float *>(a.w) + (size_t)blockIdx.y * a.w_head;
    float *out = rfk_norm_out(a), factor[4];
    rfk_norm_part x;
    const float scale = rfk_norm_scale<WAVE>(r, a.n, a.eps, x, s);
    for (uint32_t first = last;; first -= step) {
        if (first != last) rfk_norm_load(rfk_norm_again(r), first, x);
        RFK_UNROLL(4)
        for (uint32_t j = 0; j < RFK_NORM_KEPT; j++) {
            const uint32_t i = first + j * RFK_BLOCK + threadIdx.x;
            if (4 * (i - threadIdx.x) >= a.n) break;
            rfk_norm_get4(w, i, a.n, factor);
            for (uint32_t k = 0; k < 4; k++) x[j][k] = rfk_mul(rfk_mul(x[j][k], scale), factor[k]);
            if (a.before) {
                rfk_norm_get4(a.before + (out - a.out), i, a.n, factor);
                for (uint32_t k = 0; k < 4; k++) x[j][k] += factor[k];
            }
            if (out) rfk_set4(out, i, a.n, x[j]);
            if (a.to.q) rfk_convert4<WAVE>(a.to, blockIdx.x, a.n, i, x[j], i < a.n / 4);
        }
        if (first == 0) return;
    }
}

template <int WAVE> static __global__ void RFK_THREADS(RFK_BLOCK) rfk_rms_norm_wide(rfk_norm_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    rfk_wait_previous();
    RFK_SHARED(rfk_norm_shared, s);
    const rfk_norm_row r = {a.in + (size_t)blockIdx.x * a.in_stride + (size_t)blockIdx.y * a.n, a.n};
    rfk_norm_wide<WAVE>(a, r, s);
}

/* The same for heads of up to 16 WAVE values, a wave each.   grid [rows, ceil(heads / waves)]   block 256 */
template <int WAVE> static __global__ void RFK_THREADS(RFK_BLOCK) rfk_rms_norm_heads(rfk_norm_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    const uint32_t head = blockIdx.y * (RFK_BLOCK / WAVE) + threadIdx.x / WAVE, lane = threadIdx.x % WAVE;
    if (head >= a.n_heads) return;
    const float *in = a.in + (size_t)blockIdx.x * a.in_stride + (size_t)head * a.n,
                *w = reinterpret_cast<const float *>(a.w) + (size_t)head * a.w_head;
    float *out = a.out + (size_t)blockIdx.x * a.out_stride + (size_t)head * a.n, sum = 0, factor[4], before[4];
    rfk_norm_part x;
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < RFK_NORM_KEPT; j++) {
        rfk_norm_get4(in, j * WAVE + lane, a.n, x[j]);
        for (uint32_t k = 0; k < 4; k++) sum += x[j][k] * x[j][k];
    }
    const float scale = 1.0f / sqrtf(rfk_wave_sum<WAVE>(sum) / (float)a.n + a.eps);
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < RFK_NORM_KEPT; j++) {
        const uint32_t i = j * WAVE + lane;
        rfk_norm_get4(w, i, a.n, factor);
        rfk_norm_get4(a.before ? a.before + (out - a.out) : out, i, a.before ? a.n : 0, before);
        for (uint32_t k = 0; k < 4; k++) x[j][k] = x[j][k] * scale * factor[k] + before[k];
        rfk_set4(out, i, a.n, x[j]);
    }
}

/* cos and sin. The quadrant is removed in double precision, because pos * frequency is large; the rest is a Taylor
 * series, so that every device gets the same bits. An angle that is not below RF_ROPE_ANGLE_MAX gives NaN. */
RFK_DEVICE void rfk_cos_sin(double angle, float *c, float *s) {
    if (!(fabs(angle) < RF_ROPE_ANGLE_MAX)) {
        *c = *s = NAN;
        return;
    }
    double quadrant = rint(angle * 0.63661977236758134308);
    float x = (float)(angle - quadrant * 1.57079632679489661923), x2 = x * x;
    int q = (int)((long long)quadrant & 3);
    float sine = x * (1.0f + x2 * (-1.0f / 6 + x2 * (1.0f / 120 + x2 * (-1.0f / 5040 + x2 * (1.0f / 362880)))));
    float cosine =
        1.0f + x2 * (-0.5f + x2 * (1.0f / 24 + x2 * (-1.0f / 720 + x2 * (1.0f / 40320 + x2 * (-1.0f / 3628800)))));
    *c = q & 1 ? sine : cosine;
    *s = q & 1 ? cosine : sine;
    if (q == 1 || q == 2) *c = -*c;
    if (q >= 2) *s = -*s;
}

/* RoPE: rotate pairs of the first n_rot values of each head in place, in one or two buffers (queries and keys). A
 * thread rotates its pair of RFK_ROPE_HEADS heads, by one angle.
 *   grid [T, ceil(heads / (RFK_ROPE_HEADS * heads of a block at once)), ceil(n_rot / 2 / 256)]   block 256 */
#define RFK_ROPE_HEADS 4u
struct rfk_rope_args {
    float *x[2];
    uint32_t stride[2], n_heads[2];
    const float *table;
    const uint8_t *freqs; /* NULL: none */
    const rf_step_row *rows;
    uint32_t freqs_type, head_dim, n_rot, neox;
    uint32_t group; /* threads of a head, at most 256: pairs rotated at once */
    float scale;
    int32_t shift;
};
RFK_DEVICE float *rfk_rope_head(const rfk_rope_args &a, uint32_t head) {
    if (head < a.n_heads[0]) return a.x[0] + (size_t)blockIdx.x * a.stride[0] + (size_t)head * a.head_dim;
    return a.x[1] + (size_t)blockIdx.x * a.stride[1] + (size_t)(head - a.n_heads[0]) * a.head_dim;
}
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_rope(rfk_rope_args a) {
    const uint32_t half = a.n_rot / 2, i = blockIdx.z * RFK_BLOCK + threadIdx.x % a.group,
                   at_once = RFK_BLOCK / a.group, own = threadIdx.x / a.group,
                   head = blockIdx.y * (RFK_ROPE_HEADS * at_once) + own,
                   n_heads = a.n_heads[0] + a.n_heads[1], first = a.neox ? i : 2 * i,
                   second = a.neox ? i + half : 2 * i + 1;
    rfk_wait_previous();
    if (i >= half || own >= at_once) return;
    float x[RFK_ROPE_HEADS][2], c, s;
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < RFK_ROPE_HEADS; j++) {
        if (head + j * at_once >= n_heads) break;
        const float *from = rfk_rope_head(a, head + j * at_once);
        x[j][0] = from[first], x[j][1] = from[second];
    }
    double angle = ((double)a.rows[blockIdx.x].pos + a.shift) * (double)a.table[i];
    if (a.freqs) angle /= (double)rfk_load_any(a.freqs, a.freqs_type, i);
    rfk_cos_sin(angle, &c, &s);
    c *= a.scale, s *= a.scale;
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < RFK_ROPE_HEADS; j++) {
        if (head + j * at_once >= n_heads) break;
        float *to = rfk_rope_head(a, head + j * at_once);
        to[first] = x[j][0] * c - x[j][1] * s;
        to[second] = x[j][0] * s + x[j][1] * c;
    }
}

RFK_DEVICE void rfk_store_value(uint16_t *p, float v) { *p = rfk_to_half(v); }
RFK_DEVICE void rfk_store_value(float *p, float v) { *p = v; }
RFK_DEVICE void rfk_store4(uint16_t *p, const float *x) {
    uint2 v;
    v.x = rfk_to_half2(x[0], x[1]), v.y = rfk_to_half2(x[2], x[3]);
    *reinterpret_cast<uint2 *>(p) = v;
}
RFK_DEVICE void rfk_store4(float *p, const float *x) { rfk_set4(p, 0, 4, x); }

struct rfk_store_args {
    const float *k, *v;
    void *k_state, *v_state;
    const rf_step_row *rows;
    uint32_t k_stride, v_stride, n_kv_heads, head_dim, head_dim_v, n_cells, unit;
};
/* The cell of a row's head; false if the row is not stored. */
RFK_DEVICE bool rfk_find_cell(const rfk_store_args &a, const rf_step_row &row, uint32_t head, size_t *cell) {
    *cell = ((size_t)row.seq * a.n_kv_heads + head) * a.n_cells + (uint32_t)row.pos / a.unit % a.n_cells;
    return ((uint32_t)row.pos + 1) % a.unit == 0;
}
/* MLA: store keys of two parts, head_dim_v values of k and the rest of v.
 *   grid [ceil(heads * dk / 256), T]   block 256 */
template <class KV> static __global__ void RFK_THREADS(RFK_BLOCK) rfk_latent_store(rfk_store_args a) {
    const uint32_t i = blockIdx.x * RFK_BLOCK + threadIdx.x, head = i / a.head_dim, e = i % a.head_dim,
                   rest = a.head_dim - a.head_dim_v;
    if (head >= a.n_kv_heads) return;
    size_t cell;
    if (!rfk_find_cell(a, a.rows[blockIdx.y], head, &cell)) return;
    const float x = e < a.head_dim_v
                        ? a.k[(size_t)blockIdx.y * a.k_stride + (size_t)head * a.head_dim_v + e]
                        : a.v[(size_t)blockIdx.y * a.v_stride + (size_t)head * rest + e - a.head_dim_v];
    rfk_store_value((KV *)a.k_state + cell * a.head_dim + e, x);
}

/* Store a step's keys and values in their cells, [seq][head][cell][dim]. PER values a thread, all of one head.
 *   grid [ceil(heads * (dk + dv) / (256 * PER)), T]   block 256 */
template <class KV, int PER> static __global__ void RFK_THREADS(RFK_BLOCK) rfk_kv_store(rfk_store_args a) {
    rfk_wait_previous();
    uint32_t i = PER * (blockIdx.x * RFK_BLOCK + threadIdx.x), n_k = a.n_kv_heads * a.head_dim;
    bool key = i < n_k;
    uint32_t dim = key ? a.head_dim : a.head_dim_v;
    if (!key) i -= n_k;
    if (i >= a.n_kv_heads * dim) return;
    size_t cell;
    if (!rfk_find_cell(a, a.rows[blockIdx.y], i / dim, &cell)) return;
    const float *src = key ? a.k + (size_t)blockIdx.y * a.k_stride : a.v + (size_t)blockIdx.y * a.v_stride;
    KV *to = (KV *)(key ? a.k_state : a.v_state) + cell * dim + i % dim;
    if (PER == 1) {
        rfk_store_value(to, src[i]);
        return;
    }
    float x[4];
    rfk_get4(src, i / 4, a.n_kv_heads * dim, x);
    rfk_store4(to, x);
}

RFK_DEVICE size_t rfk_q8_bytes(size_t n) { return n / 32 * 34; }

/* The same to RF_CACHE_Q8_0, four values a thread.   grid [ceil(heads * (dk + dv) / 1024), T]   block 256 */
template <int WAVE, bool LATENT> static __global__ void RFK_THREADS(RFK_BLOCK) rfk_q8_store(rfk_store_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    const uint32_t i = 4 * (blockIdx.x * RFK_BLOCK + threadIdx.x), n_k = a.n_kv_heads * a.head_dim;
    const bool key = LATENT || i < n_k, inside = i < n_k + (LATENT ? 0 : a.n_kv_heads * a.head_dim_v);
    const uint32_t at = key ? i : i - n_k, dim = key || !inside ? a.head_dim : a.head_dim_v; /* never 0 */
    const uint32_t head = at / dim, e = at % dim;
    const float *k = a.k + (size_t)blockIdx.y * a.k_stride, *v = a.v + (size_t)blockIdx.y * a.v_stride;
    const float *src = !LATENT           ? (key ? k : v) + at
                       : e < a.head_dim_v ? k + (size_t)head * a.head_dim_v + e
                                          : v + (size_t)head * (dim - a.head_dim_v) + e - a.head_dim_v;
    float x[4] = {0, 0, 0, 0}, d;
    for (uint32_t j = 0; inside && j < 4; j++) x[j] = src[j];
    int sum;
    const uint32_t packed = (uint32_t)rfk_quantize_lane<WAVE>(x, &d, &sum);
    size_t cell;
    if (!inside || !rfk_find_cell(a, a.rows[blockIdx.y], head, &cell)) return;
    uint16_t *to = (uint16_t *)(void *)((uint8_t *)(key ? a.k_state : a.v_state) + cell * rfk_q8_bytes(dim));
    to[e / 2] = (uint16_t)(packed & 0xffff);
    to[e / 2 + 1] = (uint16_t)(packed >> 16);
    if (e % 32 == 0) to[dim / 2 + e / 32] = rfk_to_half(d);
}

/* A GELU is x / (1 + e^-z), a SILU that of z = x. Every kernel gets the same bits. */
RFK_DEVICE float rfk_gelu_z(float x) {
    return rfk_mul(1.5957691216057308f, rfk_fma(rfk_mul(0.044715f, rfk_mul(x, x)), x, x));
}

/* Apply an rf_activation. */
RFK_DEVICE float rfk_activate(uint32_t activation, float x) {
    if (activation == RF_ACT_NONE) return x;
    if (activation == RF_ACT_RELU) return fmaxf(x, 0.0f);
    if (activation == RF_ACT_RELU2) return fmaxf(x, 0.0f) * fmaxf(x, 0.0f);
    const float e = expf(-(activation == RF_ACT_GELU       ? rfk_gelu_z(x)
                           : activation == RF_ACT_SOFTPLUS ? fabsf(x)
                                                           : x));
    if (activation == RF_ACT_SOFTPLUS) return fmaxf(x, 0.0f) + log1pf(e);
    return (activation == RF_ACT_SIGMOID ? 1.0f : x) / (1.0f + e);
}

RFK_DEVICE float rfk_activate_oai(float gate, float up) {
    gate = gate > 7.0f ? 7.0f : gate;
    up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return gate / (1.0f + expf(-1.702f * gate)) * (up + 1.0f);
}

/* out = act(gate) * up, four values a thread; also quantized for the next matmul (n is a multiple of 32 then).
 *   grid [ceil(n / 1024), rows]   block 256   out may be gate or up */
struct rfk_glu_args {
    const float *gate, *up; /* up NULL: out = act(gate) */
    const uint8_t *factor;  /* a scalar that multiplies all results, or divisors of each; NULL: none */
    float *out;             /* NULL: not wanted */
    rfk_int8_rows to;
    uint32_t gate_stride, up_stride, out_stride, n, activation, factor_type;
    uint32_t repeat;        /* values that each value of up multiplies */
    uint32_t divides;       /* factor has n divisors                   */
    float limit;            /* RF_ACT_CLAMP, _SILU_MIN, _MIN_SILU, _SITU */
    float alpha_p, alpha_n, beta, eps; /* RF_ACT_XIELU            */
};
RFK_DEVICE float rfk_clamp(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }
RFK_DEVICE float rfk_glu_value(const rfk_glu_args &a, float gate, float up, float factor) {
    float x;
    if (a.activation == RF_ACT_CLAMP) x = rfk_clamp(gate, a.limit) * up;
    else if (a.activation == RF_ACT_XIELU)
        x = up * (a.beta * gate + (gate > 0 ? a.alpha_p * gate * gate
                                            : a.alpha_n * (expm1f(fminf(gate, a.eps)) - gate)));
    else if (a.activation == RF_ACT_OAI) x = rfk_activate_oai(gate, up);
    else if (a.activation == RF_ACT_SITU)
        x = a.limit * tanhf(gate / a.limit) / (1.0f + expf(-gate)) *
            (a.up && a.beta > 0 ? a.beta * tanhf(up / a.beta) : up);
    else if (a.activation == RF_ACT_SILU_MIN)
        x = rfk_activate(RF_ACT_SILU, fminf(gate, a.limit)) * rfk_clamp(up, a.limit);
    else if (a.activation == RF_ACT_MIN_SILU)
        x = fminf(rfk_activate(RF_ACT_SILU, gate), a.limit) * rfk_clamp(up, a.limit);
    else x = rfk_activate(a.activation, gate) * up;
    return a.factor ? x * factor : x;
}
template <int WAVE> static __global__ void RFK_THREADS(RFK_BLOCK) rfk_glu(rfk_glu_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    rfk_wait_previous();
    const uint32_t i = blockIdx.x * RFK_BLOCK + threadIdx.x;
    const float factor = a.factor && !a.divides ? rfk_load_any(a.factor, a.factor_type, 0) : 1.0f;
    float gate[4], up[4] = {1, 1, 1, 1}, x[4];
    rfk_get4(a.gate + (size_t)blockIdx.y * a.gate_stride, i, a.n, gate);
    if (a.up && a.repeat > 1)
        for (uint32_t k = 0; k < 4 && 4 * i + k < a.n; k++)
            up[k] = a.up[(size_t)blockIdx.y * a.up_stride + (4 * i + k) / a.repeat];
    else if (a.up) rfk_get4(a.up + (size_t)blockIdx.y * a.up_stride, i, a.n, up);
    if (a.activation == RF_ACT_SILU) /* nearly all models: no branch for each value */
        for (uint32_t k = 0; k < 4; k++) x[k] = rfk_activate(RF_ACT_SILU, gate[k]) * up[k] * factor;
    else
        for (uint32_t k = 0; k < 4; k++) x[k] = rfk_glu_value(a, gate[k], up[k], factor);
    for (uint32_t k = 0; a.divides && k < 4 && 4 * i + k < a.n; k++)
        x[k] /= rfk_load_any(a.factor, a.factor_type, 4 * i + k);
    if (a.out) rfk_set4(a.out + (size_t)blockIdx.y * a.out_stride, i, a.n, x);
    if (a.to.q) rfk_convert4<WAVE>(a.to, blockIdx.y, a.n, i, x, i < a.n / 4);
}

/* out[i] = in[row of logits i].   grid [ceil(n / 256), L]   block 256 */
struct rfk_gather_args {
    const float *in;
    float *out;
    const uint32_t *logit_rows;
    uint32_t in_stride, out_stride, n;
};
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_gather(rfk_gather_args a) {
    uint32_t i = blockIdx.x * RFK_BLOCK + threadIdx.x;
    if (i < a.n)
        a.out[(size_t)blockIdx.y * a.out_stride + i] = a.in[(size_t)a.logit_rows[blockIdx.y] * a.in_stride + i];
}

/* out[row] = index of the row's maximum, the smallest one among equals; NaN never wins; -1 if nothing exceeds
 * -infinity. With several parts, each leaves the best of its share in `part` for rfk_argmax_join.
 *   grid [rows, parts]   block 1024   reads every value once */
#define RFK_ARGMAX_BLOCK 1024
#define RFK_ARGMAX_PARTS 32u
struct rfk_best_value {
    float value;
    uint32_t id;
};
struct rfk_argmax_args {
    const float *in;
    float *out; /* int32 */
    rfk_best_value *part; /* [rows, parts]; NULL: one part */
    uint32_t in_stride, out_stride, n, n_parts;
};

struct rfk_argmax_shared {
    float value[RFK_ARGMAX_BLOCK / 32];
    uint32_t id[RFK_ARGMAX_BLOCK / 32];
};
RFK_DEVICE void rfk_larger(float *value, uint32_t *id, float other_value, uint32_t other_id) {
    if (other_value > *value || (other_value == *value && other_id < *id)) *value = other_value, *id = other_id;
}
template <int WAVE> static __global__ void RFK_THREADS(RFK_ARGMAX_BLOCK) rfk_argmax(rfk_argmax_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    RFK_SHARED(rfk_argmax_shared, s);
    const float *in = a.in + (size_t)blockIdx.x * a.in_stride;
    float largest = -INFINITY, v[8]; /* eight loads in flight */
    rfk_wait_previous();
    const uint32_t share = (a.n + gridDim.y - 1) / gridDim.y, begin = share * blockIdx.y,
                   end = begin + share < a.n ? begin + share : a.n;
    uint32_t id = 0xffffffffu;
    for (uint32_t first = begin + threadIdx.x; first < end; first += 8 * RFK_ARGMAX_BLOCK) {
        RFK_UNROLL(8)
        for (uint32_t k = 0; k < 8; k++) {
            uint32_t i = first + k * RFK_ARGMAX_BLOCK;
            v[k] = i < end ? in[i] : -INFINITY;
        }
        RFK_UNROLL(8)
        for (uint32_t k = 0; k < 8; k++)
            if (v[k] > largest) largest = v[k], id = first + k * RFK_ARGMAX_BLOCK;
    }
    for (int mask = WAVE / 2; mask > 0; mask /= 2) {
        float value = rfk_shuffle_xor<WAVE>(largest, mask);
        uint32_t other = rfk_shuffle_xor<WAVE>(id, mask);
        rfk_larger(&largest, &id, value, other);
    }
    if (threadIdx.x % WAVE == 0) s.value[threadIdx.x / WAVE] = largest, s.id[threadIdx.x / WAVE] = id;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int i = 1; i < RFK_ARGMAX_BLOCK / WAVE; i++) rfk_larger(&largest, &id, s.value[i], s.id[i]);
    if (!a.part) {
        reinterpret_cast<uint32_t *>(a.out)[(size_t)blockIdx.x * a.out_stride] = id;
        return;
    }
    rfk_best_value best = {largest, id};
    a.part[(size_t)blockIdx.x * gridDim.y + blockIdx.y] = best;
}
/* The maximum of the parts.   grid rows   block WAVE */
template <int WAVE> static __global__ void RFK_THREADS(WAVE) rfk_argmax_join(rfk_argmax_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    rfk_best_value best = {-INFINITY, 0xffffffffu};
    rfk_wait_previous();
    for (uint32_t i = threadIdx.x; i < a.n_parts; i += WAVE) {
        const rfk_best_value other = a.part[(size_t)blockIdx.x * a.n_parts + i];
        rfk_larger(&best.value, &best.id, other.value, other.id);
    }
    for (int mask = WAVE / 2; mask > 0; mask /= 2) {
        float value = rfk_shuffle_xor<WAVE>(best.value, mask);
        uint32_t other = rfk_shuffle_xor<WAVE>(best.id, mask);
        rfk_larger(&best.value, &best.id, value, other);
    }
    if (threadIdx.x == 0) reinterpret_cast<uint32_t *>(a.out)[(size_t)blockIdx.x * a.out_stride] = best.id;
}

/* ---- drawing tokens ----
 * rf_draw, as rf_sampler_sample does it: weights are integers, whose sums do not depend on the order, so that the
 * tokens are the same. First each of many blocks keeps, of its part of the row, what may be chosen: the best top_k, or
 * what lies close enough to the maximum. Then a block draws from these few: its threads read them once for each of at
 * most 2 x 3 digits of a key, and then less and less of them to find the place of the random number. */
#define RFK_DRAW_BLOCK 1024
#define RFK_DRAW_BUCKETS 2048u
#define RFK_DRAW_PARTS (RF_DRAW_MAX_VOCAB / RF_DRAW_PART + 1)
/* A part of a row and of its draw. */
struct rfk_draw_part {
    uint64_t sum, rest; /* weights: of what is kept, unless the draw will keep less; of the others, for top-p */
    uint32_t n, max;    /* kept; the largest key, of rows that change */
};
static_assert(sizeof(rfk_draw_part) <= RF_DRAW_PART_BYTES && RF_DRAW_PART == 4 * RFK_DRAW_BLOCK, "room for them");
struct rfk_draw_args {
    float *logits;         /* [n_rows, n], as they were afterwards */
    const int32_t *argmax; /* [n_rows]     */
    rf_draw *draws;
    const rf_draw_change *changes;
    char *work; /* [draws][work_bytes] logits that are kept [parts][RF_DRAW_PART], their places, parts */
    uint64_t work_bytes;
    uint32_t n_rows, n, n_changes, n_parts;
};
struct rfk_draw_shared {
    uint32_t low[RFK_DRAW_BUCKETS], high[RFK_DRAW_BUCKETS]; /* count, or sum of weights, of keys with a digit */
    uint64_t sum[RFK_DRAW_BLOCK / 32], target, above, rest, parts[RFK_DRAW_PARTS];
    uint32_t equal[RFK_DRAW_BLOCK / 32], first[RFK_DRAW_PARTS], bucket;
};
/* Logits and what of them can be chosen: keys above `key` and the first `ties` whose key equals it; of these keys from
 * `floor` on. parts: they lie in parts, which begin at s.first; else together. */
struct rfk_draw_row {
    const float *logits;
    float max;
    uint32_t n, key, ties, floor;
    bool parts;
};

/* Where the i-th logit lies. */
RFK_DEVICE uint32_t rfk_draw_place(const rfk_draw_shared &s, const rfk_draw_row &row, uint32_t i) {
    uint32_t part = 0;
    if (!row.parts) return i;
    for (uint32_t half = RFK_DRAW_PARTS / 2; half; half /= 2)
        if (s.first[part + half] <= i) part += half;
    return part * RF_DRAW_PART + i - s.first[part];
}
RFK_DEVICE float rfk_draw_logit(const rfk_draw_shared &s, const rfk_draw_row &row, uint32_t i) {
    return row.logits[rfk_draw_place(s, row, i)];
}

RFK_DEVICE uint64_t rfk_mul_high(uint64_t a, uint64_t b) {
    const uint64_t low = (a & 0xffffffffu) * (b & 0xffffffffu);
    const uint64_t ab = (a >> 32) * (b & 0xffffffffu), ba = (a & 0xffffffffu) * (b >> 32);
    const uint64_t middle = (low >> 32) + (uint32_t)ab + (uint32_t)ba;
    return (a >> 32) * (b >> 32) + (ab >> 32) + (ba >> 32) + (middle >> 32);
}

/* As rfi_logit_key: order-preserving; NaN counts as -infinity, -0 as 0. */
#define RFK_KEY_NONE 0x007fffffu
RFK_DEVICE uint32_t rfk_logit_key(float logit) {
    const uint32_t bits = rfk_as_bits(logit), key = bits ^ ((0u - (bits >> 31)) | 0x80000000u);
    if (key - RFK_KEY_NONE > 0xff800000u - RFK_KEY_NONE) return RFK_KEY_NONE;
    return key + (key == 0x7fffffffu);
}
/* Its inverse. */
RFK_DEVICE float rfk_key_logit(uint32_t key) { return rfk_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

/* As rfi_choice_weight, in units of 2^-44 of the largest. */
RFK_DEVICE uint64_t rfk_draw_weight(float max, float logit, double scale) {
    const double y = ((double)max - (double)logit) * scale;
    if (!(y < 44)) return (uint64_t)(logit == max) << 44;
    const uint64_t fixed = (uint64_t)(int64_t)(y * 4294967296.0);
    const uint32_t f = (uint32_t)fixed;
    uint32_t p = 5485254u - (uint32_t)((uint64_t)f * 471680u >> 32);
    p = 41153703u - (uint32_t)((uint64_t)f * p >> 32);
    p = 238336808u - (uint32_t)((uint64_t)f * p >> 32);
    p = 1031757105u - (uint32_t)((uint64_t)f * p >> 32);
    p = 2977044068u - (uint32_t)((uint64_t)f * p >> 32);
    const uint64_t power = (1ull << 32) - ((uint64_t)f * p >> 32);
    return power << 12 >> (uint32_t)(fixed >> 32);
}

/* Two atomics of 32 bits: NVIDIA's shared memory has none of 64. A wrapped sum shows in what was there before. */
RFK_DEVICE void rfk_draw_add(rfk_draw_shared &s, uint32_t bucket, uint64_t v) {
    uint32_t low = (uint32_t)v, high = (uint32_t)(v >> 32);
    if (low) high += atomicAdd(&s.low[bucket], low) + low < low;
    if (high) atomicAdd(&s.high[bucket], high);
}

/* From the largest digit down: in which bucket do the sums reach the target, and what is above it? Each thread has
 * `share` neighbouring buckets. top_p: the target is that share of all, s.rest included, else s.target. If it is not
 * reached, s.bucket stays. All threads have reached the sums; the caller waits for what this writes. */
template <int WAVE> RFK_DEVICE void rfk_draw_find(rfk_draw_shared &s, uint32_t share, uint32_t top_p) {
    const uint32_t wave = threadIdx.x / WAVE, lane = threadIdx.x % WAVE;
    const uint32_t first = share * (RFK_DRAW_BLOCK - 1 - threadIdx.x), last = first + share - 1;
    const uint64_t largest = s.low[last] | (uint64_t)s.high[last] << 32;
    const uint64_t own = share == 1 ? largest : largest + (s.low[first] | (uint64_t)s.high[first] << 32);
    uint64_t target = s.target, above = s.above, total = s.above, to = own; /* to: of this lane's and those above */
    for (uint32_t far = 1; far < WAVE; far *= 2) {
        const uint64_t v = rfk_shuffle<WAVE>(to, (lane - far) % WAVE);
        if (lane >= far) to += v;
    }
    if (lane == WAVE - 1) s.sum[wave] = to;
    __syncthreads();
    for (uint32_t w = 0; w < RFK_DRAW_BLOCK / WAVE; w++) {
        if (w < wave) above += s.sum[w];
        total += s.sum[w];
    }
    above += to - own;
    if (top_p) target = rfk_mul_high(total + s.rest, (uint64_t)top_p << 32);
    else if (target > total) target = total; /* top-k of fewer than k numbers */
    if (target == 0) target = 1;
    if (total == 0 || above >= target || above + own < target) return;
    const bool in_first = above + largest < target;
    s.bucket = in_first ? first : last, s.above = in_first ? above + largest : above, s.target = target;
}

/* Cut to the best top_k, or, if that is 0, to the best that hold top_p of the weight at temperature 1, as
 * rfi_choice_tighten. Where min-p takes away all that top-p would, the row stays as it is. */
template <int WAVE>
RFK_DEVICE void rfk_draw_tighten(rfk_draw_shared &s, rfk_draw_row &row, uint32_t top_k, uint32_t top_p) {
    const double scale = 1.4426950408889634;
    uint32_t prefix = 0, shift = 32;
    if (threadIdx.x == 0) s.target = top_k, s.above = 0, s.bucket = RF_NONE;
    for (int level = 0; level < 3; level++) {
        const uint32_t bits = level < 2 ? 11 : 10, mask = (1u << bits) - 1;
        shift -= bits;
        for (uint32_t i = threadIdx.x; i <= mask; i += RFK_DRAW_BLOCK) s.low[i] = s.high[i] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < row.n; i += RFK_DRAW_BLOCK) {
            const float logit = rfk_draw_logit(s, row, i);
            const uint32_t key = rfk_logit_key(logit);
            if (key <= row.key || (level > 0 && key >> shift >> bits != prefix)) continue;
            rfk_draw_add(s, key >> shift & mask, top_k ? 1 : rfk_draw_weight(row.max, logit, scale));
        }
        if (threadIdx.x == 0 && row.ties && (level == 0 || row.key >> shift >> bits == prefix)) {
            const float logit = rfk_key_logit(row.key);
            rfk_draw_add(s, row.key >> shift & mask, row.ties * rfk_draw_weight(row.max, logit, scale));
        }
        __syncthreads();
        rfk_draw_find<WAVE>(s, (mask + 1) / RFK_DRAW_BLOCK, level == 0 ? top_p : 0);
        __syncthreads();
        if (s.bucket == RF_NONE) return; /* no numbers, or what has top_p goes on behind what was kept */
        prefix = prefix << bits | s.bucket;
        if (top_p && (((uint64_t)prefix + 1) << shift) <= row.floor) return;
    }
    const float logit = rfk_key_logit(prefix);
    const uint64_t each = top_k ? 1 : rfk_draw_weight(row.max, logit, scale);
    row.key = prefix;
    row.ties = (uint32_t)((s.target - s.above - 1) / each + 1);
    __syncthreads();
}

/* Draw from the row: sums by waves of equal shares; the share that holds the point is shared out next. The point is
 * that share of all, random in units of 2^-64; or, if the row is one part, the weight before it in that.
 *   Returns which of the row's logits */
template <int WAVE>
RFK_DEVICE uint32_t rfk_draw_point(rfk_draw_shared &s, const rfk_draw_row &row, double scale, uint64_t random) {
    const uint32_t n_waves = RFK_DRAW_BLOCK / WAVE, wave = threadIdx.x / WAVE, lane = threadIdx.x % WAVE;
    const float equal_logit = rfk_key_logit(row.key);
    const uint64_t each = row.ties && row.key >= row.floor ? rfk_draw_weight(row.max, equal_logit, scale) : 0;
    uint32_t first = 0, end = row.n, ties = row.ties;
    uint64_t point = random;
    for (int round = 0;; round++) {
        const uint32_t share = (end - first + n_waves - 1) / n_waves;
        uint64_t sum = 0;
        uint32_t equal = 0;
        for (uint32_t i = lane; i < share && first + wave * share + i < end; i += WAVE) {
            const float logit = rfk_draw_logit(s, row, first + wave * share + i);
            const uint32_t key = rfk_logit_key(logit);
            if (key > row.key && key >= row.floor) sum += rfk_draw_weight(row.max, logit, scale);
            equal += key == row.key;
        }
        for (int mask = WAVE / 2; mask > 0; mask /= 2) {
            sum += rfk_shuffle_xor<WAVE>(sum, mask);
            equal += rfk_shuffle_xor<WAVE>(equal, mask);
        }
        if (lane == 0) s.sum[wave] = sum, s.equal[wave] = equal;
        __syncthreads();
        uint64_t total = 0;
        uint32_t left = ties, w = 0;
        for (uint32_t i = 0; row.parts && round == 0 && i < n_waves; i++) {
            const uint32_t taken = s.equal[i] < left ? s.equal[i] : left;
            total += s.sum[i] + taken * each;
            left -= taken;
        }
        if (row.parts && round == 0) point = rfk_mul_high(random, total);
        for (; w + 1 < n_waves; w++) {
            const uint32_t taken = s.equal[w] < ties ? s.equal[w] : ties;
            const uint64_t weight = s.sum[w] + taken * each;
            if (point < weight) break;
            point -= weight;
            ties -= taken;
        }
        first += w * share;
        if (share == 1) return first;
        if (end - first > share) end = first + share;
        __syncthreads();
    }
}

/* A logit with its bias and penalties, rounded as rfi_sampler_adjust rounds it. */
RFK_DEVICE float rfk_draw_changed(const rf_draw &draw, const rf_draw_change &change, float logit) {
    logit += change.bias;
    if (change.count == 0) return logit;
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    const float less = __fdiv_rn(logit, draw.repeat);
#else
    const float less = logit / draw.repeat;
#endif
    logit = logit > 0 ? less : rfk_mul(logit, draw.repeat);
    return logit - (rfk_mul((float)change.count, draw.frequency) + draw.presence);
}

/* A draw, and a part of its row: ids from `begin`. good: there is something to draw from. */
struct rfk_draw_part_of {
    rf_draw draw;
    rfk_draw_part *parts;
    float *logits, *kept; /* of the part */
    uint16_t *places;
    uint32_t begin, n;
    bool good;
};
RFK_DEVICE rfk_draw_part_of rfk_draw_find_part(const rfk_draw_args &a, uint32_t draw, uint32_t part) {
    rfk_draw_part_of p;
    char *work = a.work + draw * a.work_bytes;
    p.draw = a.draws[draw];
    p.good = p.draw.row < a.n_rows && a.argmax[p.draw.row] >= 0 && p.draw.first_change <= a.n_changes &&
             p.draw.n_changes <= a.n_changes - p.draw.first_change && p.draw.n_changes <= RF_DRAW_MAX_CHANGES;
    p.begin = part * RF_DRAW_PART;
    p.n = a.n - p.begin < RF_DRAW_PART ? a.n - p.begin : RF_DRAW_PART;
    p.kept = reinterpret_cast<float *>(work) + p.begin;
    p.places = reinterpret_cast<uint16_t *>(work + 4ull * RF_DRAW_PART * a.n_parts) + p.begin;
    p.parts = reinterpret_cast<rfk_draw_part *>(work + 6ull * RF_DRAW_PART * a.n_parts);
    p.logits = p.good ? a.logits + (size_t)p.draw.row * a.n + p.begin : NULL;
    return p;
}

/* The thread's change, if its token is one of the part. */
struct rfk_draw_patch {
    float *at, before; /* NULL: none */
};
RFK_DEVICE rfk_draw_patch rfk_draw_apply(const rfk_draw_args &a, const rfk_draw_part_of &p) {
    rfk_draw_patch patch = {NULL, 0};
    if (threadIdx.x >= p.draw.n_changes) return patch;
    const rf_draw_change change = a.changes[p.draw.first_change + threadIdx.x];
    if (change.token - p.begin >= p.n) return patch;
    patch.at = p.logits + (change.token - p.begin);
    patch.before = *patch.at;
    *patch.at = rfk_draw_changed(p.draw, change, patch.before);
    return patch;
}

/* The largest logit of the row: that of its argmax, or, of a row that changes, what rfk_draw_maxima found. */
template <int WAVE> RFK_DEVICE float rfk_draw_max(const rfk_draw_args &a, const rfk_draw_part_of &p) {
    if (p.draw.n_changes == 0) return a.logits[(size_t)p.draw.row * a.n + a.argmax[p.draw.row]];
    uint32_t best = RFK_KEY_NONE;
    for (uint32_t i = threadIdx.x % WAVE; i < a.n_parts; i += WAVE)
        if (p.parts[i].max > best) best = p.parts[i].max;
    return rfk_key_logit(rfk_wave_max<WAVE>(best));
}

/* Each part's largest logit, where logits change.   grid [parts, draws]   block 1024 */
template <int WAVE> static __global__ void RFK_THREADS(RFK_DRAW_BLOCK) rfk_draw_maxima(rfk_draw_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    RFK_SHARED(rfk_draw_shared, s);
    const rfk_draw_part_of p = rfk_draw_find_part(a, blockIdx.y, blockIdx.x);
    if (!p.good || p.draw.n_changes == 0) return;
    const rfk_draw_patch patch = rfk_draw_apply(a, p);
    uint32_t best = RFK_KEY_NONE;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.n; i += RFK_DRAW_BLOCK) {
        const uint32_t key = rfk_logit_key(p.logits[i]);
        if (key > best) best = key;
    }
    best = rfk_wave_max<WAVE>(best);
    if (threadIdx.x % WAVE == 0) s.equal[threadIdx.x / WAVE] = best;
    __syncthreads();
    if (patch.at) *patch.at = patch.before;
    if (threadIdx.x != 0) return;
    for (uint32_t i = 0; i < RFK_DRAW_BLOCK / WAVE; i++)
        if (s.equal[i] > best) best = s.equal[i];
    p.parts[blockIdx.x].max = best;
}

/* *before and the sum of n of all threads before this one; *before becomes more by those of all. */
template <int WAVE> RFK_DEVICE uint32_t rfk_draw_rank(rfk_draw_shared &s, uint32_t n, uint32_t *before) {
    const uint32_t wave = threadIdx.x / WAVE, lane = threadIdx.x % WAVE;
    uint32_t to = n, rank = *before;
    for (uint32_t far = 1; far < WAVE; far *= 2) {
        const uint32_t v = rfk_shuffle<WAVE>(to, (lane - far) % WAVE);
        if (lane >= far) to += v;
    }
    if (lane == WAVE - 1) s.equal[wave] = to;
    __syncthreads();
    for (uint32_t w = 0; w < RFK_DRAW_BLOCK / WAVE; w++) {
        if (w < wave) rank += s.equal[w];
        *before += s.equal[w];
    }
    __syncthreads();
    return rank + to - n;
}

/* Keys below are not chosen: those that min-p takes away; and with top-p those of which all n weights, at temperature
 * 1, are less than 1 - top_p of the largest. With top-k and top-p all of the best k count. */
RFK_DEVICE uint32_t rfk_draw_cut(const rf_draw &draw, uint32_t n, float max, bool top_k) {
    float gap = draw.min_gap;
    const uint32_t outside = 0u - draw.top_p; /* 1 - top_p, in units of 2^-32 */
    if (top_k && draw.top_p) return 0;
    if (draw.top_p && outside >= 1024) { /* else rounding of weights might count */
        float bits = 0; /* n weights of 2^-bits are less than half of that */
        for (uint64_t reach = outside; reach < (uint64_t)n << 33; reach *= 2) bits++;
        gap = fmaxf(gap, -0.6931472f * bits);
    }
    return rfk_logit_key(max + gap);
}

/* Keep what may be chosen of each part.   grid [parts, draws]   block 1024   19 KiB of LDS */
template <int WAVE> static __global__ void RFK_THREADS(RFK_DRAW_BLOCK) rfk_draw_keep(rfk_draw_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    RFK_SHARED(rfk_draw_shared, s);
    const rfk_draw_part_of p = rfk_draw_find_part(a, blockIdx.y, blockIdx.x);
    if (!p.good) return;
    const rfk_draw_patch patch = rfk_draw_apply(a, p);
    rfk_draw_row row = {p.logits, rfk_draw_max<WAVE>(a, p), p.n, RFK_KEY_NONE, 0, 0, false};
    const bool top_k = p.draw.top_k && p.draw.top_k < a.n;
    const uint32_t cut = rfk_draw_cut(p.draw, a.n, row.max, top_k);
    __syncthreads();
    if (top_k && p.draw.top_k < p.n) rfk_draw_tighten<WAVE>(s, row, p.draw.top_k, 0);
    uint64_t sum = 0, rest = 0;
    uint32_t n_kept = 0, n_equal = 0;
    const uint32_t first = 4 * threadIdx.x;
    float v[4];
    uint32_t key[4], keep = 0, equal = 0;
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < 4; k++) v[k] = first + k < p.n ? p.logits[first + k] : -INFINITY;
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < 4; k++) {
        key[k] = rfk_logit_key(v[k]);
        keep |= (uint32_t)(key[k] > row.key && key[k] >= cut) << k;
        equal += key[k] == row.key;
    }
    if (row.ties) { /* the same in all threads */
        uint32_t rank = rfk_draw_rank<WAVE>(s, equal, &n_equal);
        for (uint32_t k = 0; k < 4; k++)
            if (key[k] == row.key) keep |= (uint32_t)(rank++ < row.ties && key[k] >= cut) << k;
    }
    uint32_t at = rfk_draw_rank<WAVE>(s, (keep & 1) + (keep >> 1 & 1) + (keep >> 2 & 1) + (keep >> 3), &n_kept);
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < 4; k++)
        if (keep >> k & 1) {
            p.kept[at] = v[k];
            p.places[at++] = (uint16_t)(first + k);
            if (!top_k && !p.draw.top_p) sum += rfk_draw_weight(row.max, v[k], p.draw.scale);
        } else if (!top_k && p.draw.top_p && key[k] > RFK_KEY_NONE) {
            rest += rfk_draw_weight(row.max, v[k], 1.4426950408889634);
        }
    for (int mask = WAVE / 2; mask > 0; mask /= 2) {
        sum += rfk_shuffle_xor<WAVE>(sum, mask);
        rest += rfk_shuffle_xor<WAVE>(rest, mask);
    }
    __syncthreads();
    if (patch.at) *patch.at = patch.before;
    if (threadIdx.x % WAVE == 0) s.sum[threadIdx.x / WAVE] = sum + rest; /* one of them is 0 */
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (uint32_t w = 1; w < RFK_DRAW_BLOCK / WAVE; w++) s.sum[0] += s.sum[w];
    p.parts[blockIdx.x].sum = p.draw.top_p ? 0 : s.sum[0];
    p.parts[blockIdx.x].rest = p.draw.top_p ? s.sum[0] : 0;
    p.parts[blockIdx.x].n = n_kept;
}

/* Draw from what was kept.   grid draws   block 1024   19 KiB of LDS */
template <int WAVE> static __global__ void RFK_THREADS(RFK_DRAW_BLOCK) rfk_draw(rfk_draw_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    RFK_SHARED(rfk_draw_shared, s);
    const rfk_draw_part_of p = rfk_draw_find_part(a, blockIdx.x, 0);
    int32_t *const token = &a.draws[blockIdx.x].token;
    const float max = p.good ? rfk_draw_max<WAVE>(a, p) : -INFINITY;
    if (!p.good || rfk_logit_key(max) <= RFK_KEY_NONE) {
        if (threadIdx.x == 0) *token = -1;
        return;
    }
    rfk_draw_part part = {0, 0, 0, 0};
    uint32_t n = 0;
    if (threadIdx.x < a.n_parts) part = p.parts[threadIdx.x];
    const uint32_t rank = rfk_draw_rank<WAVE>(s, part.n, &n);
    if (threadIdx.x < RFK_DRAW_PARTS) s.first[threadIdx.x] = threadIdx.x < a.n_parts ? rank : 0xffffffffu;
    if (threadIdx.x < a.n_parts) s.parts[threadIdx.x] = part.sum + part.rest;
    __syncthreads();
    uint64_t total = 0;
    for (uint32_t i = 0; i < a.n_parts; i++) total += s.parts[i];
    if (threadIdx.x == 0) s.rest = total;
    rfk_draw_row row = {p.kept, max, n, RFK_KEY_NONE, 0, rfk_logit_key(max + p.draw.min_gap), true};
    const bool top_k = p.draw.top_k && p.draw.top_k < a.n;
    uint64_t point = p.draw.random;
    uint32_t begin = 0;
    if (top_k && p.draw.top_k < row.n) rfk_draw_tighten<WAVE>(s, row, p.draw.top_k, 0);
    if (p.draw.top_p) rfk_draw_tighten<WAVE>(s, row, 0, p.draw.top_p);
    if (!top_k && !p.draw.top_p) { /* the parts' sums say in which the point lies */
        uint32_t i = 0;
        for (point = rfk_mul_high(point, total); point >= s.parts[i]; i++) point -= s.parts[i];
        row.n = (i + 1 < a.n_parts ? s.first[i + 1] : n) - s.first[i];
        row.parts = false;
        begin = i * RF_DRAW_PART;
        row.logits += begin;
    }
    const uint32_t at = begin + rfk_draw_place(s, row, rfk_draw_point<WAVE>(s, row, p.draw.scale, point));
    if (threadIdx.x == 0) *token = (int32_t)(at / RF_DRAW_PART * RF_DRAW_PART + p.places[at]);
}

/* The router, RF_OP_ROUTE: top-k experts of a row and their weights.   grid rows   block WAVE
 * Sums are lane by lane. */
struct rfk_route_args {
    const float *logits;
    const uint8_t *bias; /* NULL: none */
    const int32_t *fixed; /* [tokens, n_used] the experts of tokens; NULL: none */
    const rf_step_row *rows;
    float *out;          /* [rows, 2, n_used] */
    uint32_t bias_type, in_stride, out_stride, n_experts, n_used, n_groups, n_groups_used, flags;
    float scale;
};
RFK_CALLED float rfk_sqrt_softplus(float x) { return sqrtf(x > 20.0f ? x : log1pf(expf(x))); }
/* What N logits become before softmax's sum divides them. No branch stands between the values: their latencies
 * overlap. sqrt(softplus) is long: there is one copy of it, and each value has its turn. */
template <int N> RFK_DEVICE void rfk_route_values(uint32_t flags, float *x, float top) {
    if (flags & RF_OP_SQRT_SOFTPLUS) {
        RFK_UNROLL(1)
        for (int turn = 0; turn < N; turn++) {
            const float y = rfk_sqrt_softplus(x[0]);
            RFK_UNROLL(8)
            for (int j = 0; j < N - 1; j++) x[j] = x[j + 1];
            x[N - 1] = y;
        }
        return;
    }
    const bool sigmoid = (flags & RF_OP_SIGMOID) != 0;
    RFK_UNROLL(8)
    for (int j = 0; j < N; j++) x[j] = expf(sigmoid ? -x[j] : x[j] - top);
    if (!sigmoid) return;
    RFK_UNROLL(8)
    for (int j = 0; j < N; j++) x[j] = 1.0f / (1.0f + x[j]);
}
struct rfk_route_shared {
    float p[RF_MAX_EXPERTS], score[RF_MAX_EXPERTS], group[RF_MAX_EXPERTS], weight[RF_MAX_EXPERTS];
    uint8_t taken[RF_MAX_EXPERTS], out[RF_MAX_EXPERTS]; /* out: groups that were taken */
};
/* The better of two scores: the larger; any number beats NaN; the smaller id among equals; RF_NONE loses. */
RFK_DEVICE void rfk_better(float *score, uint32_t *id, float other, uint32_t other_id) {
    bool larger = other > *score || (other == other && *score != *score);
    bool smaller = *score > other || (*score == *score && other != other);
    if (other_id == RF_NONE) return;
    if (*id == RF_NONE || larger || (!smaller && other_id < *id)) *score = other, *id = other_id;
}
/* The best of n that are not taken yet, in every lane. */
template <int WAVE> RFK_DEVICE uint32_t rfk_best(const float *score, const uint8_t *taken, uint32_t n) {
    float best = 0;
    uint32_t id = RF_NONE;
    for (uint32_t i = threadIdx.x; i < n; i += WAVE)
        if (!taken[i]) rfk_better(&best, &id, score[i], i);
    for (int mask = WAVE / 2; mask > 0; mask /= 2) {
        float other = rfk_shuffle_xor<WAVE>(best, mask);
        uint32_t other_id = rfk_shuffle_xor<WAVE>(id, mask);
        rfk_better(&best, &id, other, other_id);
    }
    return id;
}
/* Group-limited routing: keep the groups whose two best scores have the largest sums; mark the experts of all other
 * groups as taken. */
template <int WAVE> RFK_DEVICE void rfk_route_groups(rfk_route_shared &s, const rfk_route_args &a) {
    const uint32_t size = a.n_experts / a.n_groups;
    for (uint32_t g = threadIdx.x; g < a.n_groups; g += WAVE) {
        float first = 0, second = 0;
        uint32_t first_id = RF_NONE, second_id = RF_NONE;
        for (uint32_t i = g * size; i < (g + 1) * size; i++) {
            float score = s.score[i], was = first;
            uint32_t was_id = first_id;
            rfk_better(&first, &first_id, score, i);
            if (first_id == i) rfk_better(&second, &second_id, was, was_id);
            else rfk_better(&second, &second_id, score, i);
        }
        s.group[g] = second_id == RF_NONE ? first : first + second;
        s.out[g] = 0;
    }
    __syncthreads();
    for (uint32_t k = 0; k < a.n_groups_used; k++) {
        uint32_t id = rfk_best<WAVE>(s.group, s.out, a.n_groups);
        __syncthreads();
        if (threadIdx.x == 0) s.out[id] = 1;
        __syncthreads();
    }
    for (uint32_t i = threadIdx.x; i < a.n_experts; i += WAVE) s.taken[i] = !s.out[i / size];
    __syncthreads();
}
/* Whether weights are the softmax of the chosen experts' logits alone. Where a softmax of all comes first and the
 * chosen weights are divided by their sum, that is the same: the other experts cancel. */
RFK_DEVICE bool rfk_softmax_after_top_k(const rfk_route_args &a) {
    if (a.flags & (RF_OP_SIGMOID | RF_OP_SQRT_SOFTPLUS)) return false;
    return (a.flags & RF_OP_CHOSEN) || ((a.flags & RF_OP_NORMALIZE) && !a.bias && !a.fixed && a.n_groups <= 1);
}
/* Whether a logit makes every weight NaN: in a softmax of all experts it does. */
RFK_DEVICE uint32_t rfk_spoils_softmax(const rfk_route_args &a, float x) {
    return !(a.flags & (RF_OP_SIGMOID | RF_OP_SQRT_SOFTPLUS | RF_OP_CHOSEN)) && !(x < INFINITY);
}
/* x, which is to be divided by a sum. */
RFK_DEVICE float rfk_route_divide(float x, float sum) { return x / (sum > 6.103515625e-5f ? sum : 6.103515625e-5f); }
/* From the chosen experts' logits (softmax after top-k) or values to their weights, a lane each, by one wave. */
template <int WAVE>
RFK_DEVICE void rfk_route_weights(float *chosen, const rfk_route_args &a, bool after_top_k, float *weights) {
    float top = -INFINITY, sum = 0;
    const uint32_t lane = threadIdx.x % WAVE;
    for (uint32_t k = lane; k < a.n_used; k += WAVE) top = chosen[k] > top ? chosen[k] : top;
    if (after_top_k) top = rfk_wave_max<WAVE>(top);
    for (uint32_t k = lane; k < a.n_used; k += WAVE) {
        if (after_top_k) chosen[k] = expf(chosen[k] - top);
        sum += chosen[k];
    }
    sum = rfk_wave_sum<WAVE>(sum);
    for (uint32_t k = lane; k < a.n_used; k += WAVE) {
        const float weight = after_top_k || (a.flags & RF_OP_NORMALIZE) ? rfk_route_divide(chosen[k], sum) : chosen[k];
        weights[k] = a.scale != 0 ? weight * a.scale : weight;
    }
}
template <int WAVE> static __global__ void RFK_THREADS(WAVE) rfk_route(rfk_route_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    rfk_wait_previous();
    RFK_SHARED(rfk_route_shared, s);
    const float *in = a.logits + (size_t)blockIdx.x * a.in_stride;
    float *out = a.out + (size_t)blockIdx.x * a.out_stride, top = -INFINITY, sum = 0;
    const bool after_top_k = rfk_softmax_after_top_k(a),
               softmax = !after_top_k && !(a.flags & (RF_OP_SIGMOID | RF_OP_SQRT_SOFTPLUS));
    uint32_t spoilt = 0;
    for (uint32_t i = threadIdx.x; i < a.n_experts; i += WAVE) {
        top = in[i] > top ? in[i] : top;
        spoilt |= rfk_spoils_softmax(a, in[i]);
    }
    top = rfk_wave_max<WAVE>(top);
    spoilt = rfk_wave_max<WAVE>(spoilt);
    for (uint32_t i = threadIdx.x; i < a.n_experts; i += WAVE) {
        s.p[i] = in[i];
        if (!after_top_k) rfk_route_values<1>(a.flags, &s.p[i], top);
        if (spoilt) s.p[i] = NAN;
        sum += s.p[i];
    }
    sum = rfk_wave_sum<WAVE>(sum);
    for (uint32_t i = threadIdx.x; i < a.n_experts; i += WAVE) {
        if (softmax) s.p[i] /= sum;
        s.score[i] = a.bias ? s.p[i] + rfk_load_any(a.bias, a.bias_type, i) : s.p[i];
        s.taken[i] = 0;
    }
    __syncthreads();
    if (a.n_groups > 1) rfk_route_groups<WAVE>(s, a);
    const int32_t token = a.fixed ? a.rows[blockIdx.x].token : -1;
    for (uint32_t k = 0; k < a.n_used; k++) {
        const uint32_t want = token >= 0 ? (uint32_t)a.fixed[(size_t)token * a.n_used + k]
                                         : rfk_best<WAVE>(s.score, s.taken, a.n_experts),
                       id = want < a.n_experts ? want : 0;
        __syncthreads();
        if (threadIdx.x == 0) {
            s.taken[id] = 1;
            s.weight[k] = want < a.n_experts ? s.p[id] : NAN;
            reinterpret_cast<uint32_t *>(out)[k] = id;
        }
        __syncthreads();
    }
    rfk_route_weights<WAVE>(s.weight, a, after_top_k, out + a.n_used);
}

/* rfk_route of a row without groups, by one wave of a block: lane k gets the k-th of a.n_used <= WAVE choices. Other
 * waves wait for it. A lane has N experts. Scores are compared as integers: of two floats the larger one has the larger
 * key, NaN has 1, what is taken or not there 0.
 *   values: room for WAVE * N floats in shared memory. Called: one copy for all uses in a kernel. */
#define RFK_CHOOSE_FROM 256u /* experts, at most */
struct rfk_chosen {
    uint32_t id;
    float weight;
};
template <int WAVE, int N>
RFK_CALLED rfk_chosen rfk_choose_of(rfk_route_args a, uint32_t row, float *values) {
    const float *logits = a.logits + (size_t)row * a.in_stride;
    const uint32_t lane = threadIdx.x % WAVE;
    const bool inside = lane < a.n_used, after_top_k = rfk_softmax_after_top_k(a),
               softmax = !after_top_k && !(a.flags & (RF_OP_SIGMOID | RF_OP_SQRT_SOFTPLUS));
    float p[N], bias[N];
    uint32_t key[N], spoilt = 0;
    RFK_UNROLL(8)
    for (int j = 0; j < N; j++) { /* without branches, so that all loads are on their way at once */
        const uint32_t i = lane + (uint32_t)j * WAVE;
        p[j] = logits[i < a.n_experts ? i : a.n_experts - 1];
        bias[j] = 0;
    }
    RFK_UNROLL(8)
    for (int j = 0; j < N && a.bias; j++) {
        const uint32_t i = lane + (uint32_t)j * WAVE;
        bias[j] = rfk_load_any(a.bias, a.bias_type, i < a.n_experts ? i : a.n_experts - 1);
    }
    RFK_UNROLL(8)
    for (int j = 0; j < N; j++) spoilt |= rfk_spoils_softmax(a, p[j]);
    spoilt = rfk_wave_max<WAVE>(spoilt);
    if (!after_top_k) {
        float top = -INFINITY, sum = 0;
        RFK_UNROLL(8)
        for (int j = 0; j < N; j++) top = p[j] > top ? p[j] : top;
        if (softmax) top = rfk_wave_max<WAVE>(top);
        rfk_route_values<N>(a.flags, p, top);
        RFK_UNROLL(8)
        for (int j = 0; j < N; j++) sum += lane + (uint32_t)j * WAVE < a.n_experts ? p[j] : 0.0f;
        if (softmax) {
            sum = rfk_wave_sum<WAVE>(sum);
            RFK_UNROLL(8)
            for (int j = 0; j < N; j++) p[j] = p[j] / sum;
        }
    }
    RFK_UNROLL(8)
    for (int j = 0; j < N; j++) {
        if (spoilt) p[j] = NAN;
        const float score = p[j] + bias[j] + 0.0f; /* no -0 */
        const uint32_t bits = rfk_as_bits(score);
        key[j] = score != score ? 1u : bits >> 31 ? ~bits : bits | 0x80000000u;
        if (lane + (uint32_t)j * WAVE >= a.n_experts) key[j] = 0;
        values[lane + (uint32_t)j * WAVE] = p[j];
    }
    rfk_chosen own = {0, 0};
    RFK_UNROLL(1)
    for (uint32_t k = 0; k < a.n_used; k++) {
        uint32_t best = key[0], slot = 0;
        RFK_UNROLL(8)
        for (int j = 1; j < N; j++)
            if (key[j] > best) best = key[j], slot = (uint32_t)j;
        const uint32_t id = best == rfk_wave_max<WAVE>(best) ? lane + slot * WAVE : RF_NONE,
                       chosen = ~rfk_wave_max<WAVE>(~id); /* the smallest one among equals */
        RFK_UNROLL(8)
        for (int j = 0; j < N; j++)
            if (chosen - lane == (uint32_t)j * WAVE) key[j] = 0;
        if (lane == k) own.id = chosen;
    }
    rfk_sync_lanes<WAVE>();
    own.weight = inside ? values[own.id] : 0.0f;
    if (after_top_k) {
        const float top = rfk_wave_max<WAVE>(inside ? own.weight : -INFINITY);
        own.weight = inside ? expf(own.weight - top) : 0.0f;
    }
    if (after_top_k || (a.flags & RF_OP_NORMALIZE))
        own.weight = rfk_route_divide(own.weight, rfk_wave_sum<WAVE>(own.weight));
    if (a.scale != 0) own.weight *= a.scale;
    return own;
}
template <int WAVE>
RFK_DEVICE rfk_chosen rfk_choose(const rfk_route_args &a, uint32_t row, float *values) {
#if defined(RFK_NVIDIA) || defined(ROCMFORGE_HIP_EMU) /* elsewhere each would be inlined */
    if (a.n_experts <= (uint32_t)WAVE) return rfk_choose_of<WAVE, 1>(a, row, values);
    if (a.n_experts <= 128) return rfk_choose_of<WAVE, 128 / WAVE>(a, row, values);
#endif
    return rfk_choose_of<WAVE, RFK_CHOOSE_FROM / WAVE>(a, row, values);
}

/* out (+)= scale * sum over the chosen experts of weight * in, in order of choice.
 *   grid [ceil(n / 256), rows, sums]   block 256 */
struct rfk_mix_args {
    const float *in, *route; /* [rows, n_used, n]; [rows, 2, n_used], or [rows, sums, n_used] from `first` 0 on */
    float *out;
    uint32_t in_stride, route_stride, out_stride, n, n_used, first, accumulate, sigmoid;
    float scale;
};
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_mix(rfk_mix_args a) {
    uint32_t i = blockIdx.x * RFK_BLOCK + threadIdx.x;
    if (i >= a.n) return;
    const float *in = a.in + (size_t)blockIdx.y * a.in_stride + i,
                *weight = a.route ? a.route + (size_t)blockIdx.y * a.route_stride : NULL;
    float *out = a.out + (size_t)blockIdx.y * a.out_stride + (size_t)blockIdx.z * a.n + i, sum = 0;
    if (weight) weight += a.first + blockIdx.z * a.n_used;
    for (uint32_t k = 0; k < a.n_used; k++)
        sum += (!weight ? 1.0f : a.sigmoid ? 1.0f / (1.0f + expf(-weight[k])) : weight[k]) * in[(size_t)k * a.n];
    *out = (a.accumulate ? *out : 0.0f) + a.scale * sum;
}

/* ---- recurrent layers ----
 * Rows of a sequence are sequential: a block takes one sequence of the step from its first row to its last and skips
 * those of others between them. */

/* The rows of a step's sequence i. ranges NULL: each row is another sequence's. */
RFK_DEVICE rfk_row_range rfk_rows_of(const rfk_row_range *ranges, uint32_t i) {
    rfk_row_range rows;
    rows.first = ranges ? ranges[i].first : i;
    rows.end = ranges ? ranges[i].end : i + 1;
    return rows;
}

/* Causal 1-D convolution. A block takes 32 channels, 128 bytes of a row, through the rows of a sequence; its groups of
 * 32 threads share these rows, consecutive ones each. out may be in: inputs before a thread's first row are read
 * before any is overwritten. Past inputs in registers.
 *   grid [ceil(n / 32), sequences]   block 32 * groups, up to 512   reads and writes every value once */
#define RFK_CONV_CHANNELS 32u
#define RFK_CONV_GROUPS 16u
#define RFK_CONV_ROWS 8u /* loads in flight */
struct rfk_conv_args {
    const float *in;
    const uint8_t *w; /* [n][weights]; NULL: 1 / weights */
    const uint8_t *bias; /* [n], or NULL */
    float *out, *state; /* [slots][n_taps - 1][n] */
    uint32_t dilation;  /* every so many taps one has a weight, the last one; the others are 0 */
    const rf_step_row *rows;
    const rfk_row_range *ranges;
    uint32_t w_type, bias_type, in_stride, out_stride, n, n_taps, activation;
};
/* The inputs of channel c before row t of the step to x, the newest last: of rows of the sequence, whose first one is
 * row `first`, before those its state. */
template <uint32_t TAPS>
RFK_DEVICE void rfk_conv_past(const rfk_conv_args &a, uint32_t first, uint32_t t, uint32_t c, float (&x)[TAPS]) {
    const int32_t seq = a.rows[t].seq;
    uint32_t have = 0, from = a.rows[t].from;
    for (; t > first && have + 1 < a.n_taps; t--) {
        if (a.rows[t - 1].seq != seq) continue;
        const float v = a.in[(size_t)(t - 1) * a.in_stride + c];
        RFK_UNROLL(16)
        for (uint32_t j = 0; j < TAPS; j++) x[j] = j + have + 1 == TAPS ? v : x[j]; /* in registers */
        from = a.rows[t - 1].from;
        have++;
    }
    RFK_UNROLL(16)
    for (uint32_t j = 1; j < TAPS; j++) {
        const uint32_t past = j + have + a.n_taps - TAPS - 1; /* wraps around if there is no such tap */
        if (from && j + have < TAPS && past < a.n_taps - 1)
            x[j] = a.state[((size_t)(from - 1) * (a.n_taps - 1) + past) * a.n + c];
    }
}
RFK_DEVICE float rfk_conv_weight(const rfk_conv_args &a, uint32_t c, uint32_t tap) {
    const uint32_t n = (a.n_taps - 1) / a.dilation + 1;
    if (c >= a.n || tap >= a.n_taps || tap % a.dilation) return 0;
    return a.w ? rfk_load_any(a.w, a.w_type, (size_t)c * n + tap / a.dilation) : 1.0f / (float)n;
}
/* TAPS: at most so many, those without a weight included. */
template <uint32_t TAPS>
static __global__ void RFK_THREADS(RFK_CONV_CHANNELS * RFK_CONV_GROUPS) rfk_conv(rfk_conv_args a) {
    const uint32_t c = blockIdx.x * RFK_CONV_CHANNELS + threadIdx.x % RFK_CONV_CHANNELS,
                   groups = blockDim.x / RFK_CONV_CHANNELS;
    constexpr uint32_t ROWS = TAPS > RF_MAX_TAPS ? RFK_CONV_ROWS / 4 : RFK_CONV_ROWS; /* gfx906 spills else */
    float w[TAPS], x[TAPS]; /* the last n_taps are used; the others are zero */
    RFK_UNROLL(16)
    for (uint32_t j = 0; j < TAPS; j++) {
        const uint32_t tap = j + a.n_taps - TAPS;
        w[j] = rfk_conv_weight(a, c, tap);
        x[j] = 0;
    }
    rfk_wait_previous();
    const rfk_row_range rows = rfk_rows_of(a.ranges, blockIdx.y);
    const int32_t seq = a.rows[rows.first].seq;
    const uint32_t share = (rows.end - rows.first + groups - 1) / groups,
                   begin = rows.first + threadIdx.x / RFK_CONV_CHANNELS * share,
                   end = begin + share < rows.end ? begin + share : rows.end;
    uint32_t first = begin;
    while (first < end && a.rows[first].seq != seq) first++;
    if (first < end && c < a.n) rfk_conv_past<TAPS>(a, rows.first, first, c, x);
    __syncthreads();
    if (c >= a.n) return;
    const float bias = a.bias ? rfk_load_any(a.bias, a.bias_type, c) : 0.0f;
    for (uint32_t t0 = first; t0 < end; t0 += ROWS) {
        float in[ROWS];
        RFK_UNROLL(8)
        for (uint32_t i = 0; i < ROWS; i++)
            in[i] = t0 + i < end ? a.in[(size_t)(t0 + i) * a.in_stride + c] : 0.0f;
        RFK_UNROLL(1)
        for (uint32_t i = 0; i < ROWS && t0 + i < end; i++) {
            const float newest = in[0];
            RFK_UNROLL(8)
            for (uint32_t j = 0; j + 1 < ROWS; j++) in[j] = in[j + 1];
            if (a.rows[t0 + i].seq != seq) continue;
            const uint32_t to = a.rows[t0 + i].to;
            RFK_UNROLL(16)
            for (uint32_t j = 0; j + 1 < TAPS; j++) x[j] = x[j + 1];
            x[TAPS - 1] = newest;
            float sum = 0;
            RFK_UNROLL(16)
            for (uint32_t j = 0; j < TAPS; j++) sum += w[j] * x[j];
            a.out[(size_t)(t0 + i) * a.out_stride + c] = rfk_activate(a.activation, sum + bias);
            if (to == 0) continue;
            RFK_UNROLL(16)
            for (uint32_t j = 1; j < TAPS; j++) {
                const uint32_t past = j + a.n_taps - TAPS - 1;
                if (past < a.n_taps - 1) a.state[((size_t)(to - 1) * (a.n_taps - 1) + past) * a.n + c] = x[j];
            }
        }
    }
}

/* RF_OP_DELTA, the gated delta rule. A wave holds RFK_DELTA_COLS columns of a head's state S in registers: a column's
 * at most DIM values lie on WAVE / RFK_DELTA_COLS lanes, and its update depends on that column alone. Some tokens at a
 * time, the block normalizes queries and keys in shared memory, while those of the next tokens are on their way.
 *   LDS 29 KiB, gated 41   reads q and k of a row once per block */
#define RFK_DELTA_COLS(wave, dim) ((dim) > 4 * (wave) ? 4u : 8u) /* a lane has registers for 32 values of a column */
#define RFK_GATED_COLS(wave) ((wave) / 4u) /* the same in a block of 512 threads that has all columns of a head */
#define RFK_GATED_DIM 128                  /* dimension of such heads, at most */
#define RFK_DELTA_WAVES(wave, gated) ((gated) ? RFK_GATED_DIM / (int)RFK_GATED_COLS(wave) : 4)
struct rfk_delta_args {
    const float *in, *beta, *alpha;
    const uint8_t *a, *b; /* [n_heads] */
    float *out, *state;   /* [slots][n_heads][head_dim][head_dim_v] */
    const rf_step_row *rows;
    const rfk_row_range *ranges;
    uint32_t a_type, b_type, in_stride, beta_stride, alpha_stride, out_stride, n_heads, n_k_heads, head_dim,
        head_dim_v, cyclic, n_decays;
    uint32_t early; /* only `in` is written by the launch before, which lets this one start when it has waited itself:
                       all else may be read before rfk_wait_previous */
    float scale, eps, lower_bound;
    const uint8_t *norm; /* [head_dim_v] GATED: the norm of each head's result, and what its gate goes through */
    uint32_t norm_type, activation;
    float norm_eps;
    rfk_int8_rows x8;    /* q NULL: results are not wanted as int8 of one row */
    rfk_few_columns few; /* q NULL: nor as columns of several rows */
};
/* What a block knows of the tokens that it works on. */
template <int WAVE, int DIM, bool GATED> struct rfk_delta_shared {
    static const int TOKENS = 2048 / DIM, COLS = GATED ? RFK_GATED_COLS(WAVE) : RFK_DELTA_COLS(WAVE, DIM),
                     WAVES = RFK_DELTA_WAVES(WAVE, GATED);
    float4 q[TOKENS][DIM / 4], k[TOKENS][DIM / 4]; /* of length scale and 1 */
    float4 decays[TOKENS][DIM / 4];                /* of the rows of S, where each has its own */
    float v[TOKENS][WAVES * COLS], kq[TOKENS], beta[TOKENS], decay[TOKENS];
    float a, b;                                    /* of the head; b: n_decays 1 */
    float gate[GATED ? TOKENS : 1][DIM], norm[DIM]; /* gated: results take the places of v */
};
/* The same as read, on its way to shared memory: a wave's share. */
template <int WAVE, int DIM, bool GATED> struct rfk_delta_loads {
    typedef rfk_delta_shared<WAVE, DIM, GATED> shared;
    static const int TOKENS = shared::TOKENS, COLS = shared::COLS, WAVES = shared::WAVES, N = DIM / WAVE;
    float q[TOKENS / WAVES][N], k[TOKENS / WAVES][N], v[TOKENS * COLS / WAVE], gate[TOKENS * COLS / WAVE],
        beta, alpha;
    int32_t own; /* whether row `lane` of the tokens is the sequence's */
    uint32_t to; /* of that row */
};
/* The decay of a row of S from its input. Called: kernels have many copies. */
RFK_CALLED float rfk_delta_decay(float lower_bound, float x, float by) {
    if (lower_bound != 0) return expf(-fabsf(lower_bound) / (1.0f + expf(lower_bound < 0 ? -by * x : by * x)));
    return expf((x > 20.0f ? x : log1pf(expf(x))) * by);
}
/* The sum over the lanes of a column, in each of them. */
template <int WAVE, int COLS> RFK_DEVICE float rfk_column_sum(float v) {
    for (int mask = WAVE / 2; mask >= COLS; mask /= 2) v += rfk_shuffle_xor<WAVE>(v, mask);
    return v;
}
/* The values before a head's queries in a row of a.in, and before its keys. */
RFK_DEVICE uint32_t rfk_delta_key(const rfk_delta_args &a) {
    return a.head_dim * (a.cyclic ? blockIdx.y % a.n_k_heads : blockIdx.y / (a.n_heads / a.n_k_heads));
}
/* Read tokens t0 on; l.own is of these already. */
template <int WAVE, int DIM, bool GATED>
RFK_DEVICE void rfk_delta_fetch(rfk_delta_loads<WAVE, DIM, GATED> &l, const rfk_delta_args &a, uint32_t t0) {
    const int TOKENS = l.TOKENS, WAVES = l.WAVES, COLS = WAVES * l.COLS;
    const uint32_t thread = rfk_computed_here_amd(threadIdx.x), lane = thread % WAVE, wave = thread / WAVE,
                   key = rfk_delta_key(a), n_keys = a.n_k_heads * a.head_dim, h = blockIdx.y;
    RFK_UNROLL(8)
    for (uint32_t i = 0; i < (uint32_t)TOKENS / WAVES; i++) {
        const bool own = rfk_shuffle<WAVE>(l.own, WAVES * i + wave) != 0;
        const float *in = a.in + (size_t)(t0 + WAVES * i + wave) * a.in_stride + key;
        RFK_UNROLL(8)
        for (uint32_t j = 0; j < (uint32_t)l.N; j++) {
            const bool there = own && j * WAVE + lane < a.head_dim;
            l.q[i][j] = there ? in[j * WAVE + lane] : 0.0f;
            l.k[i][j] = there ? in[n_keys + j * WAVE + lane] : 0.0f;
        }
    }
    RFK_UNROLL(8)
    for (uint32_t j = 0; j < sizeof l.v / sizeof *l.v; j++) {
        const uint32_t i = (j * WAVES * WAVE + thread) / COLS,
                       col = blockIdx.x * COLS + (j * WAVES * WAVE + thread) % COLS;
        const bool own = rfk_shuffle<WAVE>(l.own, i) != 0;
        l.v[j] = own && col < a.head_dim_v
                     ? a.in[(size_t)(t0 + i) * a.in_stride + 2 * (size_t)n_keys + (size_t)h * a.head_dim_v + col]
                     : 0.0f;
        if (GATED)
            l.gate[j] = own && col < a.head_dim_v
                            ? a.out[(size_t)(t0 + i) * a.out_stride + (size_t)h * a.head_dim_v + col]
                            : 0.0f;
    }
    const bool own = thread < (uint32_t)TOKENS && l.own;
    l.beta = own ? a.beta[(size_t)(t0 + lane) * a.beta_stride + h] : 0.0f;
    l.alpha = own ? a.alpha[(size_t)(t0 + lane) * a.alpha_stride + (size_t)h * a.n_decays] : 0.0f;
}
/* Store what was read, queries and keys normalized. */
template <int WAVE, int DIM, bool GATED>
RFK_DEVICE void rfk_delta_put(rfk_delta_shared<WAVE, DIM, GATED> &s, const rfk_delta_loads<WAVE, DIM, GATED> &l,
                              const rfk_delta_args &a, uint32_t t0) {
    const uint32_t thread = rfk_computed_here_amd(threadIdx.x), lane = thread % WAVE, wave = thread / WAVE,
                   h = blockIdx.y, WAVES = s.WAVES, COLS = WAVES * s.COLS;
    const size_t bias = (size_t)h * a.n_decays;
    RFK_UNROLL(8)
    for (uint32_t i = 0; i < (uint32_t)l.TOKENS / WAVES; i++) {
        const uint32_t token = WAVES * i + wave;
        float kk = 0, qq = 0, kq = 0;
        RFK_UNROLL(8)
        for (uint32_t j = 0; j < (uint32_t)l.N; j++)
            kk += l.k[i][j] * l.k[i][j], qq += l.q[i][j] * l.q[i][j], kq += l.k[i][j] * l.q[i][j];
        kk = 1.0f / sqrtf(rfk_wave_sum<WAVE>(kk) + a.eps);
        qq = a.scale / sqrtf(rfk_wave_sum<WAVE>(qq) + a.eps);
        kq = rfk_wave_sum<WAVE>(kq) * kk * qq;
        if (lane == 0) s.kq[token] = kq;
        RFK_UNROLL(8)
        for (uint32_t j = 0; j < (uint32_t)l.N; j++) {
            reinterpret_cast<float *>(s.q[token])[j * WAVE + lane] = l.q[i][j] * qq;
            reinterpret_cast<float *>(s.k[token])[j * WAVE + lane] = l.k[i][j] * kk;
        }
        const bool own = rfk_shuffle<WAVE>(l.own, token) != 0;
        for (uint32_t e = lane; a.n_decays > 1 && own && e < DIM; e += WAVE)
            reinterpret_cast<float *>(s.decays[token])[e] =
                e < a.head_dim
                    ? rfk_delta_decay(a.lower_bound,
                                      a.alpha[(size_t)(t0 + token) * a.alpha_stride + bias + e] +
                                          rfk_load_any(a.b, a.b_type, bias + e),
                                      s.a)
                    : 0.0f;
    }
    RFK_UNROLL(8)
    for (uint32_t j = 0; j < sizeof l.v / sizeof *l.v; j++) {
        const uint32_t i = (j * WAVES * WAVE + thread) / COLS, col = (j * WAVES * WAVE + thread) % COLS;
        s.v[i][col] = l.v[j];
        if (GATED) s.gate[i][col] = l.gate[j];
    }
    if (thread >= (uint32_t)l.TOKENS) return;
    s.beta[lane] = 1.0f / (1.0f + expf(-l.beta));
    s.decay[lane] = a.n_decays > 1 ? 1.0f : rfk_delta_decay(a.lower_bound, l.alpha + s.b, s.a);
}
/* Which rows these are, for rfk_delta_fetch: of rows before `end`. */
template <int WAVE, int DIM, bool GATED>
RFK_DEVICE void rfk_delta_rows(rfk_delta_loads<WAVE, DIM, GATED> &l, const rfk_delta_args &a, int32_t seq, uint32_t t0,
                               uint32_t end) {
    const uint32_t t = t0 + threadIdx.x % WAVE;
    const bool inside = threadIdx.x % WAVE < (uint32_t)l.TOKENS && t < end;
    l.own = inside && a.rows[t].seq == seq;
    l.to = inside ? a.rows[t].to : 0;
}
/* A token: x, the lane's N values of a column of S, decays and takes in the key; returns the column's output. */
template <int WAVE, int DIM, bool GATED, int N>
RFK_DEVICE float rfk_delta_token(const rfk_delta_shared<WAVE, DIM, GATED> &s, float (&x)[N], uint32_t i,
                                 bool row_decays) {
    const int COLS = rfk_delta_shared<WAVE, DIM, GATED>::COLS;
    const uint32_t lanes = WAVE / COLS, first = threadIdx.x % WAVE / COLS;
    float sk[4] = {0, 0, 0, 0}, sq[4] = {0, 0, 0, 0};
    if (row_decays) {
        RFK_UNROLL(8)
        for (uint32_t m = 0; m < (uint32_t)N; m += 4) {
            const float4 decay = s.decays[i][m / 4 * lanes + first];
            x[m] *= decay.x, x[m + 1] *= decay.y, x[m + 2] *= decay.z, x[m + 3] *= decay.w;
        }
    }
    RFK_UNROLL(8)
    for (uint32_t m = 0; m < (uint32_t)N; m += 4) {
        const float4 k = s.k[i][m / 4 * lanes + first], q = s.q[i][m / 4 * lanes + first];
        sk[0] += x[m] * k.x, sk[1] += x[m + 1] * k.y, sk[2] += x[m + 2] * k.z, sk[3] += x[m + 3] * k.w;
        sq[0] += x[m] * q.x, sq[1] += x[m + 1] * q.y, sq[2] += x[m + 2] * q.z, sq[3] += x[m + 3] * q.w;
        if (GATED) rfk_schedule_fence();
    }
    const float seen = rfk_column_sum<WAVE, COLS>(sk[0] + sk[1] + (sk[2] + sk[3])),
                read = rfk_column_sum<WAVE, COLS>(sq[0] + sq[1] + (sq[2] + sq[3])), decay = s.decay[i],
                d = s.beta[i] * (s.v[i][threadIdx.x / WAVE * COLS + threadIdx.x % COLS] - decay * seen);
    RFK_UNROLL(8)
    for (uint32_t m = 0; m < (uint32_t)N; m += 4) {
        const float4 k = s.k[i][m / 4 * lanes + first];
        x[m] = decay * x[m] + d * k.x, x[m + 1] = decay * x[m + 1] + d * k.y;
        x[m + 2] = decay * x[m + 2] + d * k.z, x[m + 3] = decay * x[m + 3] + d * k.w;
        if (GATED) rfk_schedule_fence();
    }
    return decay * read + d * s.kq[i]; /* S^T q after the update */
}
/* Load or store the lane's values of a column: 4 of every 4 * lanes rows, row `first` on, which is at `state`. */
template <bool LOAD, int WAVE, int COLS, int N>
RFK_DEVICE void rfk_delta_state(const rfk_delta_args &a, float (&x)[N], float *state, uint32_t first, bool inside) {
    RFK_UNROLL(32)
    for (uint32_t m = 0; m < (uint32_t)N; m++) {
        const uint32_t row = m / 4 * (4 * WAVE / COLS) + m % 4;
        if (!inside || first + row >= a.head_dim) continue;
        if (LOAD) x[m] = state[(size_t)row * a.head_dim_v];
        else state[(size_t)row * a.head_dim_v] = x[m];
        if (m % 4 == 3) rfk_schedule_fence(); /* addresses take two registers each */
    }
}
/* The norm and the gate of a token's result of a head, by a wave. own: it is the sequence's token. */
template <int WAVE>
RFK_DEVICE void rfk_delta_gate_out(const rfk_delta_args &a, const float *y, const float *gates, const float *norm,
                                   size_t t, bool own) {
    const uint32_t lane = threadIdx.x % WAVE, n = a.head_dim_v, h = blockIdx.y, i = h * (n / 4) + lane,
                   width = a.n_heads * n;
    float *out = a.out + t * a.out_stride, x[4], gate[4], w[4];
    rfk_get4(y, lane, own ? n : 0, x);
    rfk_get4(norm, lane, n, w);
    rfk_get4(gates, lane, own ? n : 0, gate);
    const float squares = x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3],
                scale = 1.0f / sqrtf(rfk_wave_sum<WAVE>(squares) / (float)n + a.norm_eps);
    RFK_UNROLL(4)
    for (int k = 0; k < 4; k++)
        x[k] = rfk_activate(a.activation, gate[k]) * (x[k] * scale * w[k]);
    const bool inside = own && lane < n / 4;
    if (inside) rfk_set4(out, i, width, x);
    if (!a.x8.q && !a.few.q) return;
    const rfk_int8_four v = rfk_quantize_halves<WAVE>(x);
    if (inside && a.x8.q) rfk_put_int8(a.x8, 0, width, i, v);
    if (inside && a.few.q) rfk_few_put_int8(a.few, width, (uint32_t)t, i, v);
}
/* GATED: out holds the gates, and then act(gate) * norm(result), also quantized.
 *   grid [GATED ? 1 : ceil(head_dim_v / (4 * RFK_DELTA_COLS)), heads, sequences]   block RFK_DELTA_WAVES waves */
template <int WAVE, int DIM, bool GATED>
static __global__ void RFK_THREADS(RFK_DELTA_WAVES(WAVE, GATED) * WAVE) rfk_delta(rfk_delta_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    typedef rfk_delta_shared<WAVE, DIM, GATED> shared;
    RFK_SHARED(shared, s);
    const int N = DIM * shared::COLS / WAVE;
    const uint32_t TOKENS = shared::TOKENS, COLS = shared::COLS, WAVES = shared::WAVES, h = blockIdx.y,
                   wave = threadIdx.x / WAVE, first = 4 * (threadIdx.x % WAVE / COLS),
                   col = (blockIdx.x * WAVES + wave) * COLS + threadIdx.x % COLS;
    rfk_delta_loads<WAVE, DIM, GATED> l;
    if (threadIdx.x == 0) {
        s.a = rfk_load_any(a.a, a.a_type, h);
        s.b = a.n_decays > 1 ? 0.0f : rfk_load_any(a.b, a.b_type, h);
    }
    if (GATED && threadIdx.x < a.head_dim_v) s.norm[threadIdx.x] = rfk_load_any(a.norm, a.norm_type, threadIdx.x);
    if (!a.early) rfk_wait_previous();
    const rfk_row_range rows = rfk_rows_of(a.ranges, blockIdx.z);
    const int32_t seq = a.rows[rows.first].seq;
    const uint32_t slot_from = a.rows[rows.first].from;
    const bool inside = col < a.head_dim_v;
    const size_t width = (size_t)a.n_heads * a.head_dim * a.head_dim_v,
                 at = ((size_t)h * a.head_dim + first) * a.head_dim_v + col;
    float x[N];
    RFK_UNROLL(32)
    for (uint32_t m = 0; m < (uint32_t)N; m++) x[m] = 0;
    rfk_delta_rows(l, a, seq, rows.first, rows.end);
    if (slot_from && rows.first < rows.end)
        rfk_delta_state<true, WAVE, shared::COLS>(a, x, a.state + (slot_from - 1) * width + at, first, inside);
    if (a.early) rfk_wait_previous();
    rfk_delta_fetch(l, a, rows.first);
    for (uint32_t t0 = rows.first; t0 < rows.end; t0 += TOKENS) {
        const int32_t own = l.own;
        const uint32_t to = l.to;
        const bool any = rfk_wave_max<WAVE>(own ? 1.0f : 0.0f) > 0;
        if (any) {
            __syncthreads(); /* the tokens before have been read */
            rfk_delta_put(s, l, a, t0);
            __syncthreads();
        }
        if (!GATED) {
            rfk_delta_rows(l, a, seq, t0 + TOKENS, rows.end);
            rfk_delta_fetch(l, a, t0 + TOKENS);
        }
        for (uint32_t i = 0; any && i < TOKENS; i++) {
            if (!rfk_shuffle<WAVE>(own, i)) continue;
            const uint32_t slot_to = rfk_shuffle<WAVE>(to, i);
            const float y = rfk_delta_token(s, x, i, a.n_decays > 1);
            if (GATED) rfk_sync_lanes<WAVE>(); /* all have read v */
            if (inside && first == 0) {
                if (GATED) s.v[i][col] = y;
                else a.out[(size_t)(t0 + i) * a.out_stride + (size_t)h * a.head_dim_v + col] = y;
            }
            if (slot_to)
                rfk_delta_state<false, WAVE, shared::COLS>(a, x, a.state + (slot_to - 1) * width + at, first, inside);
        }
        if (!GATED) continue;
        __syncthreads();
        for (uint32_t i = wave; any && i < TOKENS; i += WAVES)
            rfk_delta_gate_out<WAVE>(a, s.v[i], s.gate[i], s.norm, t0 + i, rfk_shuffle<WAVE>(own, i) != 0);
        if (t0 + TOKENS >= rows.end) return; /* there are seldom more: registers for them would be spilled */
        rfk_delta_rows(l, a, seq, t0 + TOKENS, rows.end);
        rfk_delta_fetch(l, a, t0 + TOKENS);
    }
}

/* ---- the delta rule of prompts ----
 * Four rows at a time: what their keys and queries read of the state before them is one sum over lanes, and what they
 * read of each other follows from the products of the four (the WY form). A lane holds a tile of S, so that a value in
 * shared memory serves four columns. Half of the threads prepare rows while the others work on those before.
 * A row that is not the sequence's has zeros for its key, query and beta, and a decay of 1. */
#define RFK_CHUNK 4u           /* rows at a time */
#define RFK_CHUNKS 4u          /* prepared at a time */
#define RFK_CHUNK_THREADS 128u /* that work, and as many that prepare */
#define RFK_CHUNK_DIM 128u     /* values of a key, at most */
#define RFK_CHUNK_LANES 16u    /* of four columns */
#define RFK_CHUNK_COLS 32u     /* of a block */
struct rfk_delta_chunk {
    float4 k[RFK_CHUNK][RFK_CHUNK_DIM / 4], q[RFK_CHUNK][RFK_CHUNK_DIM / 4]; /* of length 1 and scale */
    float4 v[RFK_CHUNK][RFK_CHUNK_COLS / 4];
    /* Of row i: by what d of row j counts in its output, and in its own d; since: the decay since the chunk began. */
    float read[RFK_CHUNK][RFK_CHUNK], seen[RFK_CHUNK][RFK_CHUNK];
    float beta[RFK_CHUNK], decay[RFK_CHUNK], since[RFK_CHUNK];
    uint32_t own[RFK_CHUNK], to[RFK_CHUNK];
};
/* A lane's rows of its four columns: 4 of every 64. */
struct rfk_delta_tile {
    float x[RFK_CHUNK_DIM / RFK_CHUNK_LANES][4];
};
#define RFK_CHUNK_ROWS (RFK_CHUNK_DIM / RFK_CHUNK_LANES) /* of a tile */
/* N values of each lane become N / 2: of two lanes that differ in MASK, each adds up half of both. */
template <int WAVE, int N, int MASK> RFK_DEVICE void rfk_fold(float *v) {
    const bool upper = (threadIdx.x & MASK) != 0;
    RFK_UNROLL(16)
    for (int i = 0; i < N / 2; i++) {
        const float first = v[i], second = v[i + N / 2],
                    other = rfk_shuffle_xor<WAVE>(upper ? first : second, MASK);
        v[i] = (upper ? second : first) + other;
    }
}
/* The sum over the wave of value `lane % 16`. */
template <int WAVE> RFK_DEVICE float rfk_fold16(float (&v)[16]) {
    rfk_fold<WAVE, 16, 8>(v), rfk_fold<WAVE, 8, 4>(v), rfk_fold<WAVE, 4, 2>(v), rfk_fold<WAVE, 2, 1>(v);
    for (int mask = 16; mask < WAVE; mask *= 2) v[0] += rfk_shuffle_xor<WAVE>(v[0], mask);
    return v[0];
}
/* The product of the decays of rows after `from`, up to `to`. */
RFK_DEVICE float rfk_decay_between(const float (&decay)[RFK_CHUNK], uint32_t from, uint32_t to) {
    float v = 1.0f;
    RFK_UNROLL(4)
    for (uint32_t i = 1; i < RFK_CHUNK; i++)
        if (i > from && i <= to) v *= decay[i];
    return v;
}
/* Normalize the queries and keys of a chunk, in registers. */
template <int WAVE>
RFK_DEVICE void rfk_chunk_normalize(float (&k)[RFK_CHUNK][RFK_CHUNK_DIM / WAVE],
                                    float (&q)[RFK_CHUNK][RFK_CHUNK_DIM / WAVE], const rfk_delta_args &a) {
    float squares[16];
    RFK_UNROLL(4)
    for (uint32_t i = 0; i < RFK_CHUNK; i++) {
        squares[i] = squares[4 + i] = squares[8 + i] = squares[12 + i] = 0;
        RFK_UNROLL(4)
        for (uint32_t j = 0; j < RFK_CHUNK_DIM / WAVE; j++)
            squares[i] += k[i][j] * k[i][j], squares[4 + i] += q[i][j] * q[i][j];
    }
    const float sum = rfk_fold16<WAVE>(squares), length = sqrtf(sum + a.eps),
                by = sum == 0 ? 0.0f : (threadIdx.x % 16 < 4 ? 1.0f : a.scale) / length;
    RFK_UNROLL(4)
    for (uint32_t i = 0; i < RFK_CHUNK; i++) {
        const float of_k = rfk_shuffle<WAVE>(by, i), of_q = rfk_shuffle<WAVE>(by, 4 + i);
        RFK_UNROLL(4)
        for (uint32_t j = 0; j < RFK_CHUNK_DIM / WAVE; j++) k[i][j] *= of_k, q[i][j] *= of_q;
    }
}
/* What rows of a chunk read of each other: lane 4 i + j has q of row i times k of row j, or k of both where j > i. */
template <int WAVE>
RFK_DEVICE void rfk_chunk_relate(rfk_delta_chunk &chunk, const float (&k)[RFK_CHUNK][RFK_CHUNK_DIM / WAVE],
                                 const float (&q)[RFK_CHUNK][RFK_CHUNK_DIM / WAVE], float own_decay, float own_beta) {
    const uint32_t lane = threadIdx.x % WAVE, i = lane / 4, j = lane % 4;
    float products[16], decay[RFK_CHUNK];
    RFK_UNROLL(4)
    for (uint32_t m = 0; m < RFK_CHUNK; m++) {
        RFK_UNROLL(4)
        for (uint32_t n = 0; n < RFK_CHUNK; n++) {
            products[4 * m + n] = 0;
            RFK_UNROLL(4)
            for (uint32_t e = 0; e < RFK_CHUNK_DIM / WAVE; e++)
                products[4 * m + n] += (n > m ? k[m][e] : q[m][e]) * k[n][e];
        }
        decay[m] = rfk_shuffle<WAVE>(own_decay, m);
    }
    const float product = rfk_fold16<WAVE>(products), beta = rfk_shuffle<WAVE>(own_beta, j);
    if (lane < RFK_CHUNK) {
        chunk.beta[lane] = own_beta;
        chunk.decay[lane] = own_decay;
        chunk.since[lane] = decay[0] * rfk_decay_between(decay, 0, lane);
    }
    if (lane >= 16) return;
    chunk.read[i][j] = j > i ? 0.0f : product * rfk_decay_between(decay, j, i);
    if (j > i) chunk.seen[j][i] = beta * product * rfk_decay_between(decay, i, j);
}
/* A wave prepares rows t0 to t0 + 3, those before `end`. */
template <int WAVE>
RFK_DEVICE void rfk_chunk_prepare(rfk_delta_chunk &chunk, const rfk_delta_args &a, int32_t seq, uint32_t t0,
                                  uint32_t end) {
    const uint32_t lane = threadIdx.x % WAVE, h = blockIdx.y, n_keys = a.n_k_heads * a.head_dim,
                   t = t0 + lane % RFK_CHUNK;
    rf_step_row row;
    row.seq = -1, row.to = 0;
    if (t < end) row = a.rows[t];
    const bool mine = row.seq == seq;
    float k[RFK_CHUNK][RFK_CHUNK_DIM / WAVE], q[RFK_CHUNK][RFK_CHUNK_DIM / WAVE];
    RFK_UNROLL(4)
    for (uint32_t i = 0; i < RFK_CHUNK; i++) {
        const bool own = rfk_shuffle<WAVE>(mine ? 1 : 0, i) != 0;
        const float *in = a.in + (size_t)(t0 + i) * a.in_stride, *key = in + rfk_delta_key(a),
                    *v = in + 2 * (size_t)n_keys + (size_t)h * a.head_dim_v;
        RFK_UNROLL(4)
        for (uint32_t j = 0; j < RFK_CHUNK_DIM / WAVE; j++) {
            const bool there = own && j * WAVE + lane < a.head_dim;
            q[i][j] = there ? key[j * WAVE + lane] : 0.0f;
            k[i][j] = there ? key[n_keys + j * WAVE + lane] : 0.0f;
        }
        const uint32_t col = blockIdx.x * RFK_CHUNK_COLS + lane;
        if (lane < RFK_CHUNK_COLS)
            reinterpret_cast<float *>(chunk.v[i])[lane] = own && col < a.head_dim_v ? v[col] : 0.0f;
    }
    const float beta = mine ? 1.0f / (1.0f + expf(-a.beta[(size_t)t * a.beta_stride + h])) : 0.0f,
                decay = mine ? rfk_delta_decay(a.lower_bound, a.alpha[(size_t)t * a.alpha_stride + h] +
                                                      rfk_load_any(a.b, a.b_type, h),
                                               rfk_load_any(a.a, a.a_type, h))
                             : 1.0f;
    rfk_chunk_normalize<WAVE>(k, q, a);
    RFK_UNROLL(4)
    for (uint32_t i = 0; i < RFK_CHUNK; i++) {
        RFK_UNROLL(4)
        for (uint32_t j = 0; j < RFK_CHUNK_DIM / WAVE; j++) {
            reinterpret_cast<float *>(chunk.k[i])[j * WAVE + lane] = k[i][j];
            reinterpret_cast<float *>(chunk.q[i])[j * WAVE + lane] = q[i][j];
        }
    }
    if (lane < RFK_CHUNK) chunk.own[lane] = mine, chunk.to[lane] = row.to;
    rfk_chunk_relate<WAVE>(chunk, k, q, decay, beta);
}
/* Load a tile of a state, or store it: of rows from 4 * `lane` on and four columns from col on. */
template <bool LOAD>
RFK_DEVICE void rfk_chunk_state(const rfk_delta_args &a, rfk_delta_tile &tile, uint32_t slot, uint32_t lane,
                                uint32_t col) {
    float *state = a.state + ((size_t)(slot - 1) * a.n_heads + blockIdx.y) * a.head_dim * a.head_dim_v;
    lane = rfk_computed_here(lane), col = rfk_computed_here(col);
    RFK_UNROLL(8)
    for (uint32_t m = 0; m < RFK_CHUNK_ROWS; m++) {
        const uint32_t row = m / 4 * (4 * RFK_CHUNK_LANES) + 4 * lane + m % 4;
        RFK_UNROLL(4)
        for (uint32_t c = 0; c < 4; c++) {
            if (row >= a.head_dim || col + c >= a.head_dim_v) continue;
            float *at = state + (size_t)row * a.head_dim_v + col + c;
            if (LOAD) tile.x[m][c] = *at;
            else *at = tile.x[m][c];
        }
    }
}
/* The tile after row `last` of a chunk: it decays, and takes in the keys. */
RFK_DEVICE void rfk_chunk_update(rfk_delta_tile &tile, const rfk_delta_chunk &chunk, uint32_t lane,
                                 uint32_t last, const float (&d)[RFK_CHUNK][4]) {
    const float since = chunk.since[last],
                decay[RFK_CHUNK] = {chunk.decay[0], chunk.decay[1], chunk.decay[2], chunk.decay[3]};
    RFK_UNROLL(8)
    for (uint32_t m = 0; m < RFK_CHUNK_ROWS; m++)
        RFK_UNROLL(4)
        for (uint32_t c = 0; c < 4; c++) tile.x[m][c] *= since;
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < RFK_CHUNK; j++) {
        const float by = j > last ? 0.0f : rfk_decay_between(decay, j, last),
                    e[4] = {by * d[j][0], by * d[j][1], by * d[j][2], by * d[j][3]};
        RFK_UNROLL(2)
        for (uint32_t m = 0; m < RFK_CHUNK_ROWS; m += 4) {
            const float4 k = chunk.k[j][m / 4 * RFK_CHUNK_LANES + lane];
            RFK_UNROLL(4)
            for (uint32_t c = 0; c < 4; c++) {
                tile.x[m][c] += k.x * e[c], tile.x[m + 1][c] += k.y * e[c];
                tile.x[m + 2][c] += k.z * e[c], tile.x[m + 3][c] += k.w * e[c];
            }
        }
    }
}
/* Keys and queries of a chunk times the tile: of row i's key and column c at 2 (4 i + c), of its query behind it. */
RFK_DEVICE void rfk_chunk_products(float (&sum)[32], const rfk_delta_tile &tile, const rfk_delta_chunk &chunk,
                                 uint32_t lane) {
    RFK_UNROLL(4)
    for (uint32_t i = 0; i < RFK_CHUNK; i++) {
        RFK_UNROLL(8)
        for (uint32_t c = 0; c < 8; c++) sum[8 * i + c] = 0;
        RFK_UNROLL(2)
        for (uint32_t m = 0; m < RFK_CHUNK_ROWS; m += 4) {
            const uint32_t at = m / 4 * RFK_CHUNK_LANES + lane;
            const float4 k = chunk.k[i][at], q = chunk.q[i][at];
            RFK_UNROLL(4)
            for (uint32_t c = 0; c < 4; c++) {
                float *to = sum + 2 * (4 * i + c);
                to[0] += k.x * tile.x[m][c], to[0] += k.y * tile.x[m + 1][c];
                to[0] += k.z * tile.x[m + 2][c], to[0] += k.w * tile.x[m + 3][c];
                to[1] += q.x * tile.x[m][c], to[1] += q.y * tile.x[m + 1][c];
                to[1] += q.z * tile.x[m + 2][c], to[1] += q.w * tile.x[m + 3][c];
            }
        }
    }
}
/* A wave's columns take in a chunk, rows t0 on. */
template <int WAVE>
RFK_DEVICE void rfk_chunk_take(const rfk_delta_chunk &chunk, rfk_delta_tile &tile, const rfk_delta_args &a,
                             uint32_t t0) {
    const uint32_t lane = threadIdx.x % RFK_CHUNK_LANES, four = threadIdx.x / RFK_CHUNK_LANES,
                   col = blockIdx.x * RFK_CHUNK_COLS + 4 * four, first_lane = threadIdx.x % WAVE - lane,
                   i = lane / 4, c = lane % 4;
    float sum[32], d[RFK_CHUNK][4];
    rfk_chunk_products(sum, tile, chunk, lane);
    rfk_fold<WAVE, 32, 8>(sum), rfk_fold<WAVE, 16, 4>(sum), rfk_fold<WAVE, 8, 2>(sum), rfk_fold<WAVE, 4, 1>(sum);
    RFK_UNROLL(4)
    for (uint32_t n = 0; n < RFK_CHUNK; n++) {
        const float v[4] = {chunk.v[n][four].x, chunk.v[n][four].y, chunk.v[n][four].z, chunk.v[n][four].w},
                    beta = chunk.beta[n], old = beta * chunk.since[n];
        RFK_UNROLL(4)
        for (uint32_t e = 0; e < 4; e++) {
            d[n][e] = beta * v[e] - old * rfk_shuffle<WAVE>(sum[0], first_lane + 4 * n + e);
            RFK_UNROLL(4)
            for (uint32_t j = 0; j < RFK_CHUNK; j++)
                if (j < n) d[n][e] -= chunk.seen[n][j] * d[j][e];
        }
    }
    float y = chunk.since[i] * sum[1];
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < RFK_CHUNK; j++)
        y += chunk.read[i][j] * (c < 2 ? (c == 0 ? d[j][0] : d[j][1]) : (c == 2 ? d[j][2] : d[j][3]));
    if (chunk.own[i] && col + c < a.head_dim_v)
        a.out[(size_t)(t0 + i) * a.out_stride + (size_t)blockIdx.y * a.head_dim_v + col + c] = y;
    RFK_UNROLL(1)
    for (uint32_t n = 0; n < RFK_CHUNK; n++) {
        if (!chunk.own[n] || !chunk.to[n]) continue; /* the state after row n */
        rfk_delta_tile kept = tile;
        rfk_chunk_update(kept, chunk, lane, n, d);
        rfk_chunk_state<false>(a, kept, chunk.to[n], lane, col);
    }
    rfk_chunk_update(tile, chunk, lane, RFK_CHUNK - 1, d);
}
/* grid [ceil(head_dim_v / 32), heads, sequences]   block 256   LDS 38 KiB   reads q and k of a row once per block */
template <int WAVE> static __global__ void RFK_THREADS(2 * RFK_CHUNK_THREADS) rfk_delta_prompt(rfk_delta_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    rfk_wait_previous();
    typedef rfk_delta_chunk chunks[2][RFK_CHUNKS];
    RFK_SHARED(chunks, s);
    const rfk_row_range rows = rfk_rows_of(a.ranges, blockIdx.z);
    const int32_t seq = a.rows[rows.first].seq;
    const uint32_t window = RFK_CHUNK * RFK_CHUNKS, lane = threadIdx.x % RFK_CHUNK_LANES,
                   col = blockIdx.x * RFK_CHUNK_COLS + 4 * (threadIdx.x / RFK_CHUNK_LANES),
                   begin = rows.first / RFK_CHUNK * RFK_CHUNK, slot_from = a.rows[rows.first].from;
    const bool works = threadIdx.x < RFK_CHUNK_THREADS;
    rfk_delta_tile tile;
    RFK_UNROLL(8)
    for (uint32_t m = 0; m < RFK_CHUNK_ROWS; m++) tile.x[m][0] = tile.x[m][1] = tile.x[m][2] = tile.x[m][3] = 0;
    if (works && slot_from) rfk_chunk_state<true>(a, tile, slot_from, lane, col);
    for (uint32_t n = 0; n <= (rows.end - begin + window - 1) / window; n++) {
        for (uint32_t i = 0; n > 0 && works && i < RFK_CHUNKS; i++) {
            const rfk_delta_chunk &chunk = s[(n - 1) % 2][i];
            if (!(chunk.own[0] | chunk.own[1] | chunk.own[2] | chunk.own[3])) continue;
            rfk_chunk_take<WAVE>(chunk, tile, a, begin + (n - 1) * window + i * RFK_CHUNK);
        }
        const uint32_t waves = RFK_CHUNK_THREADS / WAVE;
        for (uint32_t i = threadIdx.x / WAVE - waves; !works && i < RFK_CHUNKS && begin + n * window < rows.end;
             i += waves)
            rfk_chunk_prepare<WAVE>(s[n % 2][i], a, seq, begin + n * window + i * RFK_CHUNK, rows.end);
        __syncthreads();
    }
}

/* RF_OP_SCAN, the selective scan of Mamba. A column of a head's state S belongs to one value of the head; it lies on
 * lanes as in rfk_delta, DIM values of it at most.
 *   grid [ceil(n_heads * head_dim / (4 * RFK_DELTA_COLS)), sequences]   block 4 waves */
struct rfk_scan_args {
    const float *in, *dt;
    const uint8_t *a, *b, *skip; /* [n_heads][n_decays], [n_heads], [n_heads]; NULL: decays, steps of 1, 0 */
    const float *decays;
    float *out, *state;          /* [slots][n_heads][n_state][head_dim]       */
    const rf_step_row *rows;
    const rfk_row_range *ranges;
    uint32_t a_type, b_type, skip_type, in_stride, dt_stride, out_stride, n_heads, n_groups, head_dim, n_state,
        n_decays;
};
template <int WAVE, int DIM> static __global__ void RFK_THREADS(4 * WAVE) rfk_scan(rfk_scan_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    const rfk_row_range rows = rfk_rows_of(a.ranges, blockIdx.y);
    const int32_t seq = a.rows[rows.first].seq;
    const uint32_t slot_from = a.rows[rows.first].from;
    if (rows.first == rows.end) return;
    const uint32_t cols = RFK_DELTA_COLS(WAVE, DIM), lanes = WAVE / cols, n_x = a.n_heads * a.head_dim,
                   first = threadIdx.x % WAVE / cols,
                   col = (blockIdx.x * 4 + threadIdx.x / WAVE) * cols + threadIdx.x % cols;
    const bool inside = col < n_x;
    const uint32_t h = inside ? col / a.head_dim : 0, group = h / (a.n_heads / a.n_groups);
    const float bias = a.b ? rfk_load_any(a.b, a.b_type, h) : 0.0f,
                skip = a.skip ? rfk_load_any(a.skip, a.skip_type, h) : 0.0f,
                decay = a.a ? rfk_load_any(a.a, a.a_type, (size_t)h * a.n_decays) : a.decays[h];
    const size_t width = (size_t)n_x * a.n_state,
                 at = ((size_t)h * a.n_state + first) * a.head_dim + (inside ? col % a.head_dim : 0),
                 step = (size_t)lanes * a.head_dim;
    float s[DIM * RFK_DELTA_COLS(WAVE, DIM) / WAVE], decay_by[DIM * RFK_DELTA_COLS(WAVE, DIM) / WAVE];
    RFK_UNROLL(64)
    for (uint32_t m = 0; m < DIM / lanes; m++) {
        const uint32_t i = m * lanes + first;
        s[m] = slot_from && inside && i < a.n_state ? a.state[(slot_from - 1) * width + at + m * step] : 0.0f;
        decay_by[m] = a.n_decays > 1 && i < a.n_state ? rfk_load_any(a.a, a.a_type, (size_t)h * a.n_decays + i) : decay;
    }
    for (uint32_t t = rows.first; t < rows.end; t++) {
        rf_step_row row = a.rows[t];
        if (row.seq != seq) continue;
        const float *in = a.in + (size_t)t * a.in_stride, *b = in + n_x + (size_t)group * a.n_state + first,
                    *c = b + (size_t)a.n_groups * a.n_state;
        const float x = inside ? in[col] : 0.0f, raw = a.dt ? a.dt[(size_t)t * a.dt_stride + h] + bias : 0.0f,
                    dt = !a.dt ? 1.0f : raw > 20.0f ? raw : log1pf(expf(raw));
        float sum = 0;
        RFK_UNROLL(64)
        for (uint32_t m = 0; m < DIM / lanes; m++) {
            if (m * lanes + first >= a.n_state) continue;
            s[m] = s[m] * expf(dt * decay_by[m]) + dt * b[m * lanes] * x;
            sum += s[m] * c[m * lanes];
        }
        sum = rfk_column_sum<WAVE, (int)RFK_DELTA_COLS(WAVE, DIM)>(sum);
        if (inside && first == 0) a.out[(size_t)t * a.out_stride + col] = sum + skip * x;
        if (row.to == 0 || !inside) continue;
        RFK_UNROLL(64)
        for (uint32_t m = 0; m < DIM / lanes; m++)
            if (m * lanes + first < a.n_state) a.state[(row.to - 1) * width + at + m * step] = s[m];
    }
}

/* RF_OP_COMPRESS: a running softmax a channel, as the CPU has it; a thread a channel.
 *   grid [ceil(n / 256), sequences]   block 256   reads and writes every value once */
struct rfk_compress_args {
    const float *in, *scores;
    const uint8_t *w; /* [unit][(1 + overlap) n] */
    float *out, *state;
    const rf_step_row *rows;
    const rfk_row_range *ranges;
    uint32_t w_type, in_stride, scores_stride, out_stride, n, unit, overlap;
};
struct rfk_running_softmax {
    float top, sum, y; /* sum 0: nothing is in it */
};
RFK_DEVICE void rfk_join_softmax(rfk_running_softmax &s, const rfk_running_softmax &more) {
    const float top = s.sum > 0 && !(more.top > s.top) ? s.top : more.top, keep = s.sum > 0 ? expf(s.top - top) : 0.0f,
                take = expf(more.top - top);
    s.top = top;
    s.sum = s.sum * keep + more.sum * take;
    s.y = s.y * keep + more.y * take;
}
RFK_DEVICE void rfk_compress_state(const rfk_compress_args &a, uint32_t slot, uint32_t c, bool load,
                                   rfk_running_softmax (&s)[3]) {
    const uint32_t parts = a.overlap ? 3 : 1;
    float *at = a.state + (size_t)(slot - 1) * 3 * parts * a.n + c;
    RFK_UNROLL(3)
    for (uint32_t i = 0; i < 3; i++) {
        if (i >= parts) continue;
        float *p = at + (size_t)3 * i * a.n;
        if (load) s[i].top = p[0], s[i].sum = p[a.n], s[i].y = p[2 * (size_t)a.n];
        else p[0] = s[i].top, p[a.n] = s[i].sum, p[2 * (size_t)a.n] = s[i].y;
    }
}
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_compress(rfk_compress_args a) {
    const uint32_t c = blockIdx.x * RFK_BLOCK + threadIdx.x, second = a.overlap ? a.n : 0;
    const rfk_running_softmax none = {0, 0, 0};
    rfk_running_softmax s[3] = {none, none, none}; /* of the block, of first halves, of those before the block */
    const rfk_row_range rows = rfk_rows_of(a.ranges, blockIdx.y);
    const int32_t seq = a.rows[rows.first].seq;
    const uint32_t slot_from = a.rows[rows.first].from;
    if (c >= a.n || rows.first == rows.end) return;
    if (slot_from) rfk_compress_state(a, slot_from, c, true, s);
    for (uint32_t t = rows.first; t < rows.end; t++) {
        const rf_step_row row = a.rows[t];
        if (row.seq != seq) continue;
        const uint32_t place = (uint32_t)row.pos % a.unit;
        const float *in = a.in + (size_t)t * a.in_stride + c, *scores = a.scores + (size_t)t * a.scores_stride + c;
        const size_t w = (size_t)place * (second + a.n) + c;
        if (place == 0) s[2] = s[1], s[0] = s[1] = none;
        const rfk_running_softmax own = {scores[second] + rfk_load_any(a.w, a.w_type, w + second), 1, in[second]};
        rfk_join_softmax(s[0], own);
        rfk_running_softmax all = s[0];
        if (second) {
            const rfk_running_softmax first = {scores[0] + rfk_load_any(a.w, a.w_type, w), 1, in[0]};
            rfk_join_softmax(s[1], first);
            if (s[2].sum > 0) rfk_join_softmax(all, s[2]);
        }
        a.out[(size_t)t * a.out_stride + c] = all.y / all.sum;
        if (row.to) rfk_compress_state(a, row.to, c, false, s);
    }
}

/* out[t, head] = a part of in[t, head].   grid [ceil(n_heads * dim / 256), rows]   block 256 */
struct rfk_slice_args {
    const float *in; /* points at the part's first value */
    float *out;
    uint32_t in_stride, out_stride, n_heads, width, dim;
};
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_slice(rfk_slice_args a) {
    rfk_wait_previous();
    uint32_t i = blockIdx.x * RFK_BLOCK + threadIdx.x;
    if (i < a.n_heads * a.dim)
        a.out[(size_t)blockIdx.y * a.out_stride + i] =
            a.in[(size_t)blockIdx.y * a.in_stride + (size_t)(i / a.dim) * a.width + i % a.dim];
}

/* ==== 4 Matmul ========================================================================================== >>matmul
 * out[cols, n_out] = x[cols, n_in] W^T. Few columns (decode): a wave reads a row of W once and keeps one sum per
 * column. Many columns (prefill): tiles of 64 or 128 rows by as many columns, in shared memory. Quantized weights are
 * multiplied by int8 activations, weights of floats by floats. For more than 64 columns on Hopper, quantized weights
 * become bf16, and activations the weights' 16-bit type. */

/* One product. A launch does up to three that share input and weight type (such as Q, K, V); each has the blocks
 * [end_block of the one before, end_block) of the grid. */
struct rfk_product {
    rfk_weight w;
    const uint8_t *bias, *factor; /* NULL: none */
    float *out;
    uint32_t type, bias_type, factor_type, out_stride, row0, n_out, accumulate, end_block;
    float scale, softcap;         /* softcap 0: none */
    float *const *far;            /* [n_far] where other members want it, too: [cols, n_out] (rfk_sum_members) */
    uint32_t n_far;
};
#define RFK_PRODUCTS 4
struct rfk_matmul_args {
    rfk_product part[RFK_PRODUCTS];
    const float *x;   /* [cols, x_stride], for weights of F32, F16, BF16; for the others: */
    rfk_int8_rows x8; /* [cols, n_in], int8 or bf16 */
    uint32_t x_stride, n_in, n_cols;
    uint32_t aligned; /* rows of W and x allow 16-byte loads */
};

/* The product that this block works on; *block becomes its index in that product. */
template <class ARGS> RFK_DEVICE rfk_product rfk_pick(const ARGS &a, uint32_t *block) {
    rfk_product p = a.part[0];
    if (*block >= a.part[2].end_block) {
        p = a.part[3];
        *block -= a.part[2].end_block;
    } else if (*block >= a.part[1].end_block) {
        p = a.part[2];
        *block -= a.part[1].end_block;
    } else if (*block >= a.part[0].end_block) {
        p = a.part[1];
        *block -= a.part[0].end_block;
    }
    return p;
}

/* Called: tiles have many results, and seldom a softcap. */
RFK_CALLED float rfk_capped(float v, float softcap) { return softcap * tanhf(v / softcap); }

RFK_DEVICE float rfk_epilogue(const rfk_product &p, uint32_t row, float v, float before) {
    if (p.factor) v = rfk_mul(v, rfk_load_any(p.factor, p.factor_type, 0));
    if (p.bias) v += rfk_load_any(p.bias, p.bias_type, row);
    v = rfk_mul(v, p.scale);
    if (p.softcap != 0) v = rfk_capped(v, p.softcap);
    return p.accumulate ? before + v : v;
}
/* Store the epilogue of v and return it. before: the value there, if the product accumulates. */
RFK_DEVICE float rfk_put_on(const rfk_product &p, uint32_t row, uint32_t col, float v, float before) {
    return p.out[(size_t)col * p.out_stride + row] = rfk_epilogue(p, row, v, before);
}

/* What is rare in the epilogue of many results, for rows 4i .. 4i + 3 of n_out. Called: one copy for all kernels. */
struct rfk_rare {
    const uint8_t *factor, *bias;
    uint32_t factor_type, bias_type, n_out;
    float scale, softcap;
};
RFK_CALLED float4 rfk_epilogue_rare(rfk_rare of, uint32_t row, float4 x) {
    float v[4] = {x.x, x.y, x.z, x.w};
    for (uint32_t k = 0; k < 4; k++) {
        if (of.factor) v[k] = rfk_mul(v[k], rfk_load_any(of.factor, of.factor_type, 0));
        if (of.bias && row + k < of.n_out) v[k] += rfk_load_any(of.bias, of.bias_type, row + k);
        v[k] = rfk_mul(v[k], of.scale);
    }
    RFK_UNROLL(1)
    for (int k = 0; k < 4 && of.softcap != 0; k++) { /* each value in its turn: one copy of tanhf */
        const float capped = rfk_capped(v[0], of.softcap);
        v[0] = v[1], v[1] = v[2], v[2] = v[3], v[3] = capped;
    }
    x.x = v[0], x.y = v[1], x.z = v[2], x.w = v[3];
    return x;
}
/* rfk_epilogue of rows row .. row + 3, without what is there. */
RFK_DEVICE void rfk_epilogue4(const rfk_product &p, uint32_t row, float *v) {
#if defined(RFK_NVIDIA) /* elsewhere what is rare is inlined, and needs no second copy of what is not */
    if (!p.factor && !p.bias && p.softcap == 0) {
        for (uint32_t k = 0; k < 4; k++) v[k] = rfk_mul(v[k], p.scale);
        return;
    }
#endif
    const rfk_rare of = {p.factor, p.bias, p.factor_type, p.bias_type, p.n_out, p.scale, p.softcap};
    const float4 x = {v[0], v[1], v[2], v[3]}, y = rfk_epilogue_rare(of, row, x);
    v[0] = y.x, v[1] = y.y, v[2] = y.z, v[3] = y.w;
}
RFK_DEVICE void rfk_put(const rfk_product &p, uint32_t row, uint32_t col, float v) {
    v = rfk_put_on(p, row, col, v, p.accumulate ? p.out[(size_t)col * p.out_stride + row] : 0.0f);
    RFK_UNROLL(1)
    for (uint32_t k = 0; k < p.n_far; k++) p.far[k][(size_t)col * p.n_out + row] = v;
}
/* The same for rows 4i .. 4i + 3 of the n_out; v becomes what is stored. */
RFK_DEVICE void rfk_put4(const rfk_product &p, uint32_t i, uint32_t col, float *v) {
    float *out = p.out + (size_t)col * p.out_stride, before[4] = {0, 0, 0, 0};
    rfk_epilogue4(p, 4 * i, v);
    if (p.accumulate) rfk_get4(out, i, p.n_out, before);
    for (uint32_t k = 0; p.accumulate && k < 4; k++) v[k] = before[k] + v[k];
    rfk_set4(out, i, p.n_out, v);
    RFK_UNROLL(1)
    for (uint32_t k = 0; k < p.n_far; k++) rfk_set4(p.far[k] + (size_t)col * p.n_out, i, p.n_out, v);
}

/* Dot product of a unit with a column, given by its quants and groups. at: rfk_unit_at. Multiply-adds are fused here,
 * not by the compiler, which may do so in one column and not in the next: a row's bits would depend on its place. */
template <int TYPE>
RFK_DEVICE float rfk_unit_dot(const rfk_unit &w, const int *q, const rfk_group *group, uint32_t at) {
    typedef rfk_format<TYPE> F;
    float total = 0;
    RFK_UNROLL(2)
    for (int h = 0; h < 2; h++) {
        uint32_t x = at + (uint32_t)(h * F::STRIDE);
        int4 v = *reinterpret_cast<const int4 *>(q + x / 4);
        rfk_group g = group[x / 32];
        int sum = x & 16 ? g.sum[1] : g.sum[0];
        int dot = rfk_dot4(w.q[4 * h], v.x, F::OFFSET ? -F::OFFSET * sum : 0);
        dot = rfk_dot4(w.q[4 * h + 1], v.y, dot);
        dot = rfk_dot4(w.q[4 * h + 2], v.z, dot);
        dot = rfk_dot4(w.q[4 * h + 3], v.w, dot);
        float part = rfk_mul(w.d[h], (float)dot);
        if (F::HAS_MIN) part = rfk_fma(-w.m[h], (float)sum, part);
        total = rfk_fma(g.d, part, total);
    }
    return total;
}

/* grid [ceil(n_out / 4), ceil(cols / COLS)]   block 4 waves, a row each   reads W once per COLS columns */
template <int TYPE, int WAVE, int COLS>
static __global__ void RFK_THREADS(RFK_MATVEC_WAVES *WAVE) rfk_matvec(rfk_matmul_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    typedef rfk_format<TYPE> F;
    uint32_t number = blockIdx.x;
    const rfk_product p = rfk_pick(a, &number);
    uint32_t lane = threadIdx.x % WAVE, col0 = blockIdx.y * COLS;
    uint32_t row = number * RFK_MATVEC_WAVES + threadIdx.x / WAVE;
    if (row >= p.n_out) return; /* the whole wave leaves */
    size_t block = (size_t)(p.row0 + row) * (a.n_in / F::BLOCK);
    float sum[COLS];
    for (int c = 0; c < COLS; c++) sum[c] = 0;
    RFK_UNROLL(2)
    for (uint32_t u = lane; u < a.n_in / 32; u += WAVE) {
        rfk_unit unit;
        rfk_load_unit<TYPE>(p.w, block, u, unit);
        RFK_UNROLL(COLS)
        for (int c = 0; c < COLS; c++) {
            uint32_t col = col0 + (uint32_t)c;
            if (col >= a.n_cols) col = a.n_cols - 1; /* columns beyond the last repeat it */
            sum[c] += rfk_unit_dot<TYPE>(unit, a.x8.q + (size_t)col * (a.n_in / 4),
                                         a.x8.group + (size_t)col * (a.n_in / 32), rfk_unit_at<TYPE>(u));
        }
    }
    RFK_UNROLL(COLS)
    for (int c = 0; c < COLS; c++) {
        float total = rfk_wave_sum<WAVE>(sum[c]);
        if (lane == 0 && col0 + (uint32_t)c < a.n_cols) rfk_put(p, row, col0 + (uint32_t)c, total);
    }
}

/* Eight adjacent weights of floats, as stored. */
template <int TYPE> struct rfk_eight_floats {
    int4 v[TYPE == RF_TYPE_F32 ? 2 : 1];
    __device__ __forceinline__ void load(const uint8_t *w, size_t i) {
        RFK_UNROLL(2)
        for (uint32_t k = 0; k < sizeof v / sizeof v[0]; k++)
            v[k] = rfk_load_once<int4>(w + i * (TYPE == RF_TYPE_F32 ? 4 : 2) + 16 * k);
    }
    __device__ __forceinline__ void values(float *x) const {
        if (TYPE != RF_TYPE_F32) return rfk_eight_of_16bit<TYPE>(v[0], x);
        RFK_UNROLL(2)
        for (uint32_t k = 0; k < sizeof v / sizeof v[0]; k++) {
            int words[4];
            rfk_words(v[k], words);
            for (uint32_t i = 0; i < 4; i++) x[4 * k + i] = rfk_as_float((uint32_t)words[i]);
        }
    }
};
/* The same with weights of floats. A wave has several rows, which share what it reads of the columns; a lane's next
 * weights are on their way, the first before x may be read. 8B F16 on an H200: 213 -> 247 tok/s.
 *   grid ceil(n_out / (4 * RFK_FLOAT_ROWS)) * ceil(cols / COLS)   blocks of the same rows are adjacent: W is read once,
 * for further columns from L2 */
#define RFK_FLOAT_ROWS(COLS) ((COLS) == 1 ? 2u : 4u) /* of a wave */
template <int TYPE, int WAVE, int COLS>
static __global__ void RFK_THREADS(RFK_MATVEC_WAVES *WAVE) rfk_matvec_float(rfk_matmul_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    const uint32_t rows = RFK_FLOAT_ROWS(COLS), ahead = 4 / rows, lane = threadIdx.x % WAVE,
                   n_parts = (a.n_cols + COLS - 1) / COLS, col0 = blockIdx.x % n_parts * COLS;
    uint32_t number = blockIdx.x / n_parts;
    const rfk_product p = rfk_pick(a, &number);
    const uint32_t row0 = (number * RFK_MATVEC_WAVES + threadIdx.x / WAVE) * rows;
    if (row0 >= p.n_out) return;
    size_t first[rows];
    float sum[rows][COLS];
    rfk_eight_floats<TYPE> raw[ahead][rows];
    RFK_UNROLL(4)
    for (uint32_t r = 0; r < rows; r++) { /* rows and columns beyond the last repeat it */
        first[r] = (size_t)(p.row0 + (row0 + r < p.n_out ? row0 + r : p.n_out - 1)) * a.n_in;
        for (uint32_t c = 0; c < COLS; c++) sum[r][c] = 0;
        RFK_UNROLL(4)
        for (uint32_t k = 0; k < ahead; k++)
            if (a.aligned && (lane + k * WAVE) * 8 < a.n_in)
                raw[k][r].load(p.w.plane[0], first[r] + (lane + k * WAVE) * 8);
    }
    rfk_wait_previous();
    RFK_UNROLL(1)
    for (uint32_t from = lane * 8; a.aligned && from < a.n_in; from += ahead * WAVE * 8) {
        RFK_UNROLL(4)
        for (uint32_t k = 0; k < ahead; k++) {
            const uint32_t i = from + k * WAVE * 8, next = i + ahead * WAVE * 8;
            if (i >= a.n_in) break;
            float w[rows][8], v[8];
            RFK_UNROLL(4)
            for (uint32_t r = 0; r < rows; r++) {
                raw[k][r].values(w[r]);
                if (next < a.n_in) raw[k][r].load(p.w.plane[0], first[r] + next);
            }
            RFK_UNROLL(COLS)
            for (uint32_t c = 0; c < COLS; c++) {
                const uint32_t col = col0 + c < a.n_cols ? col0 + c : a.n_cols - 1;
                rfk_load8<RF_TYPE_F32>(reinterpret_cast<const uint8_t *>(a.x + (size_t)col * a.x_stride), i, v);
                RFK_UNROLL(4)
                for (uint32_t r = 0; r < rows; r++) {
                    RFK_UNROLL(8)
                    for (uint32_t e = 0; e < 8; e++) sum[r][c] = rfk_fma(w[r][e], v[e], sum[r][c]);
                }
            }
        }
    }
    for (uint32_t i = lane; !a.aligned && i < a.n_in; i += WAVE) {
        RFK_UNROLL(COLS)
        for (uint32_t c = 0; c < COLS; c++) {
            const float x = a.x[(size_t)(col0 + c < a.n_cols ? col0 + c : a.n_cols - 1) * a.x_stride + i];
            RFK_UNROLL(4)
            for (uint32_t r = 0; r < rows; r++)
                sum[r][c] = rfk_fma(rfk_load1<TYPE>(p.w.plane[0], first[r] + i), x, sum[r][c]);
        }
    }
    RFK_UNROLL(4)
    for (uint32_t r = 0; r < rows; r++) {
        RFK_UNROLL(COLS)
        for (uint32_t c = 0; c < COLS; c++) {
            const float total = rfk_wave_sum<WAVE>(sum[r][c]);
            if (lane == 0 && col0 + c < a.n_cols && row0 + r < p.n_out) rfk_put(p, row0 + r, col0 + c, total);
        }
    }
}

/* ---- router ----
 * A decode step's norm and the products of its result with few rows of floats, such as a router's: a row a block, which
 * norms the input itself; each stores a part of it.   grid [rows of all products, rows]
 * block: 256, or fewer waves where a row has fewer than 1024 values */
#define RFK_NORM_DOTS_ROWS 1024u /* of all products, at most */
struct rfk_norm_dots_args {
    rfk_product part[RFK_PRODUCTS];
    const float *in;
    const uint8_t *norm;
    float *norm_out;
    uint32_t norm_type, in_stride, out_stride, n_in; /* n_in: a multiple of 4; out_stride: of norm_out */
    float eps;
};
/* Values 4i .. 4i + 3 of F32, F16 or BF16 data of n values. */
RFK_DEVICE void rfk_load_any4(const uint8_t *p, uint32_t type, size_t first, uint32_t i, uint32_t n, float *v) {
    if (type == RF_TYPE_F32) return rfk_get4(reinterpret_cast<const float *>(p) + first, i, n, v);
    for (uint32_t k = 0; k < 4; k++) v[k] = 4 * i + k < n ? rfk_load_any(p, type, first + 4 * i + k) : 0.0f;
}
template <int WAVE> static __global__ void RFK_THREADS(RFK_BLOCK) rfk_norm_dots(rfk_norm_dots_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    RFK_SHARED(rfk_norm_shared, s);
    uint32_t row = blockIdx.x;
    const uint32_t n = a.n_in;
    const rfk_product p = rfk_pick(a, &row);
    const size_t at = (size_t)(p.row0 + row) * n;
    const float *in = a.in + (size_t)blockIdx.y * a.in_stride;
    float w[4][4], norm[4][4], x[4], squares = 0, sum = 0; /* w, norm: the first 4096 values are loaded early */
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < 4; j++) {
        const uint32_t i = threadIdx.x + j * RFK_BLOCK;
        rfk_load_any4(p.w.plane[0], p.type, at, i, n, w[j]);
        rfk_load_any4(a.norm, a.norm_type, 0, i, n, norm[j]);
    }
    rfk_wait_previous();
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < 4; j++) { /* x is on its way before anything waits for w */
        rfk_get4(in, threadIdx.x + j * RFK_BLOCK, n, x);
        for (int k = 0; k < 4; k++) squares += x[k] * x[k], sum += x[k] * (w[j][k] * norm[j][k]);
    }
    for (uint32_t i = threadIdx.x + 4 * RFK_BLOCK; i < n / 4; i += RFK_BLOCK) {
        rfk_get4(in, i, n, x);
        rfk_load_any4(p.w.plane[0], p.type, at, i, n, w[0]);
        rfk_load_any4(a.norm, a.norm_type, 0, i, n, norm[0]);
        for (int k = 0; k < 4; k++) squares += x[k] * x[k], sum += x[k] * (w[0][k] * norm[0][k]);
    }
    squares = rfk_block_sum<WAVE>(s, 0, squares, blockDim.x);
    sum = rfk_block_sum<WAVE>(s, 1, sum, blockDim.x);
    const float scale = 1.0f / sqrtf(squares / (float)n + a.eps);
    if (threadIdx.x == 0) rfk_put(p, row, blockIdx.y, sum * scale);
    for (uint32_t i = blockIdx.x + gridDim.x * threadIdx.x; i < n / 4; i += gridDim.x * blockDim.x) {
        rfk_get4(in, i, n, x);
        rfk_load_any4(a.norm, a.norm_type, 0, i, n, norm[0]);
        for (int k = 0; k < 4; k++) x[k] *= scale * norm[0][k];
        rfk_set4(a.norm_out + (size_t)blockIdx.y * a.out_stride, i, n, x);
    }
}

/* ---- experts ----
 * A pair is a row and one of the experts it chose: one column, multiplied by that expert's matrix. */

struct rfk_experts_args {
    const rfk_weight *w; /* [n_experts]; plane[0] is NULL for an expert that is not loaded */
    const uint8_t *bias; /* [n_experts, n_out]; NULL: none */
    const float *x, *route;
    rfk_int8_rows x8;    /* [rows or pairs, n_in] */
    float *out;          /* [rows, n_used, n_out] */
    uint32_t bias_type, x_stride, route_stride, out_stride, n_in, n_out, n_used;
    uint32_t per_choice; /* x has a row for each pair */
    uint32_t aligned;    /* as rfk_matmul_args */
    uint32_t x_choice, out_choice; /* values from one choice to the next */
    uint32_t row0;                 /* first row of each matrix */
    const uint8_t *factor;         /* [n_experts]; NULL: none */
    uint32_t factor_type;
    uint32_t first_own, n_own;     /* own experts; results of others are 0 */
    rfk_weight heads;    /* route NULL: choice k takes rows of it from row0 + k * head_rows on (RF_OP_HEADS) */
    uint32_t head_rows;
    uint32_t kernel_type; /* rfk_kernel_type of `heads`, for rfk_across */
};

RFK_DEVICE bool rfk_owns(const rfk_experts_args &a, uint32_t expert) { return expert - a.first_own < a.n_own; }

/* The matrix of an expert, or of a head; *row becomes the row in it. plane[0] is NULL for an expert that is not loaded,
 * and for those of other members. */
RFK_DEVICE rfk_weight rfk_expert_matrix(const rfk_experts_args &a, uint32_t expert, uint32_t *row) {
    rfk_weight w = a.heads;
    *row += a.row0;
    if (a.route) {
        w = a.w[expert];
        if (!rfk_owns(a, expert)) w.plane[0] = NULL;
    } else *row += expert * a.head_rows;
    return w;
}
/* That of this block's choice. */
RFK_DEVICE rfk_weight rfk_choice(const rfk_experts_args &a, uint32_t *expert, uint32_t *row) {
    const uint32_t *ids = reinterpret_cast<const uint32_t *>(a.route);
    *expert = ids ? ids[(size_t)blockIdx.z * a.route_stride + blockIdx.y] : blockIdx.y;
    return rfk_expert_matrix(a, *expert, row);
}

RFK_DEVICE void rfk_put_pair(const rfk_experts_args &a, uint32_t pair, uint32_t expert, uint32_t row, float v) {
    if (a.factor) v *= rfk_load_any(a.factor, a.factor_type, expert);
    if (a.bias) v += rfk_load_any(a.bias, a.bias_type, (size_t)expert * a.n_out + row);
    a.out[(size_t)(pair / a.n_used) * a.out_stride + (size_t)(pair % a.n_used) * a.out_choice + row] =
        rfk_owns(a, expert) ? v : 0;
}

/* grid [ceil(n_out / 4), n_used, rows]   block 4 waves, a row of W each   reads W once per pair */
template <int TYPE, int WAVE>
static __global__ void RFK_THREADS(RFK_MATVEC_WAVES *WAVE) rfk_experts(rfk_experts_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    typedef rfk_format<TYPE> F;
    const uint32_t lane = threadIdx.x % WAVE, row = blockIdx.x * RFK_MATVEC_WAVES + threadIdx.x / WAVE,
                   pair = blockIdx.z * a.n_used + blockIdx.y;
    if (row >= a.n_out) return; /* the whole wave leaves */
    uint32_t expert, w_row = row;
    const rfk_weight w = rfk_choice(a, &expert, &w_row);
    const size_t block = (size_t)w_row * (a.n_in / F::BLOCK), col = a.per_choice ? pair : blockIdx.z;
    const int *q = a.x8.q + col * (a.n_in / 4);
    const rfk_group *group = a.x8.group + col * (a.n_in / 32);
    float sum = w.plane[0] ? 0.0f : NAN; /* an expert that is not loaded must not go unnoticed */
    RFK_UNROLL(2)
    for (uint32_t u = lane; w.plane[0] && u < a.n_in / 32; u += WAVE) {
        rfk_unit unit;
        rfk_load_unit<TYPE>(w, block, u, unit);
        sum += rfk_unit_dot<TYPE>(unit, q, group, rfk_unit_at<TYPE>(u));
    }
    sum = rfk_wave_sum<WAVE>(sum);
    if (lane == 0) rfk_put_pair(a, pair, expert, row, sum);
}

/* The same with weights of floats. */
template <int TYPE, int WAVE>
static __global__ void RFK_THREADS(RFK_MATVEC_WAVES *WAVE) rfk_experts_float(rfk_experts_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    const uint32_t lane = threadIdx.x % WAVE, row = blockIdx.x * RFK_MATVEC_WAVES + threadIdx.x / WAVE,
                   pair = blockIdx.z * a.n_used + blockIdx.y;
    if (row >= a.n_out) return;
    uint32_t expert, w_row = row;
    const uint8_t *weights = rfk_choice(a, &expert, &w_row).plane[0];
    const size_t first = (size_t)w_row * a.n_in;
    const float *x = a.x + (size_t)blockIdx.z * a.x_stride + (a.per_choice ? (size_t)blockIdx.y * a.x_choice : 0);
    float sum = 0;
    if (!weights) {
        sum = NAN;
    } else if (a.aligned) {
        RFK_UNROLL(2)
        for (uint32_t i = lane * 8; i < a.n_in; i += WAVE * 8) {
            float w[8], v[8];
            rfk_load8<TYPE>(weights, first + i, w);
            rfk_load8<RF_TYPE_F32>(reinterpret_cast<const uint8_t *>(x), i, v);
            RFK_UNROLL(8)
            for (int k = 0; k < 8; k++) sum += w[k] * v[k];
        }
    } else {
        for (uint32_t i = lane; i < a.n_in; i += WAVE) sum += rfk_load1<TYPE>(weights, first + i) * x[i];
    }
    sum = rfk_wave_sum<WAVE>(sum);
    if (lane == 0) rfk_put_pair(a, pair, expert, row, sum);
}

/* ---- pairs ----
 * Pairs sorted by expert (of RF_OP_HEADS: head), then by row and choice, and cut into tiles of up to RFK_PAIR_TILE
 * pairs. An expert with pairs [first, end) owns tiles [first / RFK_PAIR_TILE + expert, end / RFK_PAIR_TILE + expert +
 * 1): at least as many as it needs, so that no expert depends on the counts of others. Tiles that are not needed are
 * empty. */
#define RFK_PAIR_TILE 64
struct rfk_pair_tile {
    uint32_t expert, first, n, number; /* number: of the expert's tiles before it */
};
struct rfk_pair_lists {
    uint32_t *sorted;    /* [n_pairs] */
    rfk_pair_tile *tile; /* [n_pairs / RFK_PAIR_TILE + n_experts] */
};
struct rfk_sort_args {
    const float *route;
    rfk_pair_lists to;
    uint32_t route_stride, n_used, n_pairs;
};
struct rfk_sort_shared {
    uint32_t own[RFK_BLOCK], lower[RFK_BLOCK];
};

/* List the tiles of an expert that has the n pairs from `first` on. */
RFK_DEVICE void rfk_list_tiles(const rfk_pair_lists &to, uint32_t expert, uint32_t first, uint32_t n) {
    const uint32_t tile = first / RFK_PAIR_TILE;
    for (uint32_t k = threadIdx.x; k <= (first + n) / RFK_PAIR_TILE - tile; k += RFK_BLOCK) {
        const uint32_t done = k * RFK_PAIR_TILE, left = n > done ? n - done : 0;
        rfk_pair_tile t;
        t.expert = expert;
        t.first = first + done;
        t.n = left < RFK_PAIR_TILE ? left : RFK_PAIR_TILE;
        t.number = k;
        to.tile[tile + expert + k] = t;
    }
}

/* grid n_experts   block 256, adjacent pairs a thread   reads all ids twice, from cache */
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_sort_pairs(rfk_sort_args a) {
    RFK_SHARED(rfk_sort_shared, s);
    const uint32_t expert = blockIdx.x, i = threadIdx.x, share = (a.n_pairs + RFK_BLOCK - 1) / RFK_BLOCK,
                   begin = i * share < a.n_pairs ? i * share : a.n_pairs,
                   end = begin + share < a.n_pairs ? begin + share : a.n_pairs;
    const uint32_t *ids = reinterpret_cast<const uint32_t *>(a.route);
    uint32_t own = 0, lower = 0; /* pairs of this expert, and of experts before it */
    for (uint32_t pair = begin; pair < end; pair++) {
        uint32_t id = ids[(size_t)(pair / a.n_used) * a.route_stride + pair % a.n_used];
        own += id == expert;
        lower += id < expert;
    }
    s.own[i] = own, s.lower[i] = lower;
    for (uint32_t step = 1; step < RFK_BLOCK; step *= 2) {
        __syncthreads();
        uint32_t more = i >= step ? s.own[i - step] : 0, more_lower = i >= step ? s.lower[i - step] : 0;
        __syncthreads();
        s.own[i] += more, s.lower[i] += more_lower;
    }
    __syncthreads();
    const uint32_t first = s.lower[RFK_BLOCK - 1];
    uint32_t at = first + s.own[i] - own;
    for (uint32_t pair = begin; pair < end; pair++)
        if (ids[(size_t)(pair / a.n_used) * a.route_stride + pair % a.n_used] == expert) a.to.sorted[at++] = pair;
    rfk_list_tiles(a.to, expert, first, s.own[RFK_BLOCK - 1]);
}

/* The same for heads, each of which every row has.   grid heads   block 256 */
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_sort_heads(rfk_sort_args a) {
    const uint32_t head = blockIdx.x, n_rows = a.n_pairs / a.n_used, first = head * n_rows;
    for (uint32_t row = threadIdx.x; row < n_rows; row += RFK_BLOCK) a.to.sorted[first + row] = row * a.n_used + head;
    rfk_list_tiles(a.to, head, first, n_rows);
}

/* RF_OP_ACROSS: each head's values times its matrix from the other side, over rows instead of along them. A thread has
 * 32 columns of every 16th row; partial sums are added in order.
 *   grid [ceil(n_out / 512), heads, rows]   block 256   reads a head's matrix once per row of the step */
#define RFK_ACROSS_ROWS 16u
#define RFK_ACROSS_COLS (32 * RFK_BLOCK / RFK_ACROSS_ROWS)
struct rfk_across_shared { float sum[RFK_BLOCK][4]; };
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_across(rfk_experts_args a) {
    RFK_SHARED(rfk_across_shared, s);
    const uint32_t units = RFK_BLOCK / RFK_ACROSS_ROWS, u = blockIdx.x * units + threadIdx.x % units;
    const float *x = a.x + (size_t)blockIdx.z * a.x_stride + (size_t)blockIdx.y * a.x_choice;
    float *out = a.out + (size_t)blockIdx.z * a.out_stride + (size_t)blockIdx.y * a.out_choice;
    rfk_any_unit o;
    rfk_place_any_unit(a.kernel_type, u, o);
    float sum[32];
    RFK_UNROLL(32)
    for (int k = 0; k < 32; k++) sum[k] = 0;
    for (uint32_t i = threadIdx.x / units; i < a.n_in && u < a.n_out / 32; i += RFK_ACROSS_ROWS) {
        rfk_load_any_unit(a.heads, a.kernel_type, (size_t)(a.row0 + blockIdx.y * a.head_rows + i), a.n_out, u, o);
        RFK_UNROLL(32)
        for (uint32_t k = 0; k < 32; k++) sum[k] += x[i] * rfk_unit_value(o, k / 16, k % 16);
    }
    RFK_UNROLL(8)
    for (int k = 0; k < 32; k += 4) {
        RFK_UNROLL(4)
        for (int e = 0; e < 4; e++) s.sum[threadIdx.x][e] = sum[k + e];
        __syncthreads();
        const uint32_t e = threadIdx.x / units;
        float all = 0;
        for (uint32_t row = 0; e < 4 && row < RFK_ACROSS_ROWS; row++)
            all += s.sum[row * units + threadIdx.x % units][e];
        if (e < 4 && u < a.n_out / 32) out[o.at + k / 16 * o.stride + k % 16 + e] = all;
        __syncthreads();
    }
}
/* The same with weights of floats, a column a thread.   grid [ceil(n_out / 256), heads, rows]   block 256 */
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_across_float(rfk_experts_args a) {
    const uint32_t c = blockIdx.x * RFK_BLOCK + threadIdx.x;
    if (c >= a.n_out) return;
    const float *x = a.x + (size_t)blockIdx.z * a.x_stride + (size_t)blockIdx.y * a.x_choice;
    const size_t first = (size_t)(a.row0 + blockIdx.y * a.head_rows) * a.n_out + c;
    float sum = 0;
    for (uint32_t i = 0; i < a.n_in; i++)
        sum += x[i] * rfk_load_any(a.heads.plane[0], a.kernel_type, first + (size_t)i * a.n_out);
    a.out[(size_t)blockIdx.z * a.out_stride + (size_t)blockIdx.y * a.out_choice + c] = sum;
}

/* RF_OP_HEADS: copy the values of each head beyond n_in to where its results end.
 *   grid [ceil(heads * rest / 256), rows]   block 256 */
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_rest(rfk_experts_args a) {
    const uint32_t i = blockIdx.x * RFK_BLOCK + threadIdx.x, rest = a.x_choice - a.n_in, head = i / rest, e = i % rest;
    if (head >= a.n_used) return;
    a.out[(size_t)blockIdx.y * a.out_stride + (size_t)head * a.out_choice + a.n_out + e] =
        a.x[(size_t)blockIdx.y * a.x_stride + (size_t)head * a.x_choice + a.n_in + e];
}

/* ---- values for other members ----
 * What one GPU writes and another one reads while both run. */

RFK_DEVICE void rfk_store_far(uint32_t *p, uint32_t v) { /* after all writes that this thread has seen */
#if defined(ROCMFORGE_HIP_EMU)
    *p = v;
#elif defined(RFK_NVIDIA)
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
#else
    __hip_atomic_store(p, v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
#endif
}
RFK_DEVICE uint32_t rfk_load_far(const uint32_t *p) { /* before all reads that follow */
#if defined(ROCMFORGE_HIP_EMU)
    return *p;
#elif defined(RFK_NVIDIA)
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
#else
    return __hip_atomic_load(p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
#endif
}

/* Two values with their flags: each of the two is one write. */
struct rfk_flagged {
    uint64_t v[2]; /* bits of the value | turn << 32 */
};
RFK_DEVICE uint64_t rfk_flag_value(float v, uint32_t turn) { return (uint64_t)turn << 32 | rfk_as_bits(v); }
RFK_DEVICE void rfk_store_flagged(rfk_flagged *p, float2 v, uint32_t turn) {
    const uint64_t x = rfk_flag_value(v.x, turn), y = rfk_flag_value(v.y, turn);
#if defined(ROCMFORGE_HIP_EMU)
    p->v[0] = x, p->v[1] = y;
#elif defined(RFK_NVIDIA)
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(x), "l"(y) : "memory");
#else
    __hip_atomic_store(&p->v[0], x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    __hip_atomic_store(&p->v[1], y, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
#endif
}
RFK_DEVICE rfk_flagged rfk_load_flagged(const rfk_flagged *p) {
    rfk_flagged f;
#if defined(ROCMFORGE_HIP_EMU)
    f = *p;
#elif defined(RFK_NVIDIA)
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(f.v[0]), "=l"(f.v[1]) : "l"(p) : "memory");
#else
    f.v[0] = __hip_atomic_load(&p->v[0], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    f.v[1] = __hip_atomic_load(&p->v[1], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
#endif
    return f;
}
RFK_DEVICE uint64_t rfk_load_flag(const uint64_t *p) {
#if defined(ROCMFORGE_HIP_EMU)
    return *p;
#elif defined(RFK_NVIDIA)
    uint64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
#else
    return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
#endif
}

/* The beginning of a member's block of memory. */
struct rfk_sum_head {
    uint32_t flag[RF_MAX_MEMBERS][RF_SUM_BLOCKS]; /* [k][i]: the turn that block i of member k has written */
    uint32_t reports;                             /* waits that were given up and say so */
};
static_assert(sizeof(rfk_sum_head) <= RF_SUM_HEAD_BYTES, "the flags of sums");

struct rfk_members_args {
    const float *in;
    float *out;
    uint32_t in_stride, out_stride, n, n_rows, accumulate, index;
    uint32_t polls;   /* until a wait is given up */
    uint32_t pushed;  /* the product has written this member's part */
    uint32_t arrived; /* as rf_sum_arrives */
    uint32_t n_members, rank;
    uint64_t part_values;        /* of a part without flags */
    char *block[RF_MAX_MEMBERS]; /* the members' */
    uint32_t *trouble;           /* as in rf_plan_members */
    const volatile uint32_t *now; /* {turn of sum 0, epoch}: rfk_write_step. Volatile: not from L1 */
};

#if defined(ROCMFORGE_HIP_EMU) /* which runs threads in turn; small models have both kinds of sums */
#define RFK_MEMBER_BLOCKS 3u
#define RFK_MEMBER_FLAGGED 1000u
#define RFK_MEMBER_ASKS 1u
#define RFK_MEMBER_POLLS 5u
#else
#define RFK_MEMBER_BLOCKS RF_SUM_BLOCKS
#define RFK_MEMBER_FLAGGED RF_SUM_FLAGGED
#define RFK_MEMBER_ASKS 4096u  /* polls of a flag between two looks at trouble[0], which is host memory */
#define RFK_MEMBER_POLLS 2200u /* in a millisecond, or in half of one */
#endif
#define RFK_MEMBER_BLOCK 512           /* threads of a sum of many values */

/* A wait of one thread for one member. */
struct rfk_sum_wait {
    rfk_sum_head *own;
    uint32_t from, turn, epoch, polls;
};

/* Whether to poll again, after turn `found`. Says so where a wait is given up first. */
RFK_DEVICE bool rfk_waits_on(const rfk_members_args &a, rfk_sum_wait &w, uint32_t found) {
#if defined(ROCMFORGE_HIP_EMU)
    const bool alone = !hip_emu_wait(); /* nobody will write any more */
#else
    const bool alone = false;
#endif
    if (!alone && ++w.polls % RFK_MEMBER_ASKS) return true;
    const uint32_t stopped = rfk_load_far(a.trouble);
    if (stopped == w.epoch || stopped == RF_NO_EPOCH) return false;
    if (!alone && w.polls < a.polls) return true;
    if (atomicAdd(&w.own->reports, 1u) == 0) {
        uint32_t *say = a.trouble + RF_TROUBLE_WORDS * (1 + a.rank);
        say[RF_TROUBLE_SUM] = a.index;
        say[RF_TROUBLE_BLOCK] = blockIdx.x;
        say[RF_TROUBLE_WANTED] = w.turn;
        say[RF_TROUBLE_FOUND] = found;
        say[RF_TROUBLE_EPOCH] = w.epoch;
        rfk_store_far(say + RF_TROUBLE_FROM, 1 + w.from);
    }
    rfk_store_far(a.trouble, RF_NO_EPOCH);
    return false;
}

/* The flagged part of member `from` in a member's block of memory. */
RFK_DEVICE rfk_flagged *rfk_flagged_part(char *block, uint32_t n_members, uint32_t from, uint32_t turn) {
    rfk_flagged *parts = reinterpret_cast<rfk_flagged *>(block + RF_SUM_HEAD_BYTES);
    return parts + (size_t)((turn & 1) * n_members + from) * (RF_SUM_FLAGGED / 2);
}

/* A sum that blocks of a product take, in shared memory: hipcc copies arguments that are indexed to private memory. */
struct rfk_product_sum {
    uint32_t turn, epoch;
    char *block[RF_MAX_MEMBERS]; /* as in rfk_members_args */
};
/* By one thread, before a barrier. */
RFK_DEVICE void rfk_begin_sum(const rfk_members_args &a, rfk_product_sum &s) {
    s.turn = a.now[0] + a.index, s.epoch = a.now[1];
    RFK_UNROLL(16)
    for (uint32_t k = 0; k < RF_MAX_MEMBERS; k++) s.block[k] = a.block[k];
}

/* Part `row` of what product blocks write for a sum, into the members' blocks of memory but this one's. */
RFK_DEVICE void rfk_push(const rfk_members_args &a, const rfk_product_sum &s, uint32_t row, float v) {
    const uint64_t flagged = rfk_flag_value(v, s.turn);
    for (uint32_t k = 0; k < a.n_members; k++) {
        if (k == a.rank) continue;
        uint64_t *to = &rfk_flagged_part(s.block[k], a.n_members, a.rank, s.turn)[row / 2].v[row % 2];
#if defined(ROCMFORGE_HIP_EMU)
        *to = flagged;
#elif defined(RFK_NVIDIA)
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(flagged) : "memory");
#else
        __hip_atomic_store(to, flagged, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
#endif
    }
}

/* The sum of all members' parts for `row`, in their order; own: this one's. Waits for the others'. */
RFK_DEVICE float rfk_take(const rfk_members_args &a, const rfk_product_sum &s, uint32_t row, float own) {
    float sum = 0;
    for (uint32_t k = 0; k < a.n_members; k++) {
        float v = own;
        if (k != a.rank) {
            rfk_sum_wait w = {reinterpret_cast<rfk_sum_head *>(s.block[a.rank]), k, s.turn, s.epoch, 0};
            const uint64_t *at = &rfk_flagged_part(s.block[a.rank], a.n_members, k, s.turn)[row / 2].v[row % 2];
            uint64_t found;
            do found = rfk_load_flag(at);
            while ((uint32_t)(found >> 32) != s.turn && rfk_waits_on(a, w, (uint32_t)(found >> 32)));
            v = rfk_as_float((uint32_t)found);
        }
        sum = k == 0 ? v : sum + v;
    }
    return sum;
}

/* ---- one column ----
 * The fused matvec of a decode step. A block keeps the column as int8 in shared memory, in the order in which lanes
 * read it, and makes it itself: from floats, from the RMS norm of floats, both also behind a post-norm, or from int8
 * rows. Waves take rows of W in turn, lanes fragments of 64 weights. A lane loads its next fragment as soon as the
 * registers of the last one are free, and its first one before the previous kernel has ended. Which lane adds which
 * products, and in what order, depends on the type and n_in alone. */

#if defined(ROCMFORGE_HIP_EMU) /* as the GPUs below, by device */
#define RFK_FUSED_BLOCK blockDim.x
#define RFK_FUSED_RESIDENT 1
#define RFK_FUSED_BLOCK_OF(dev) hip_emu_fused_block_of((dev)->index)
#elif defined(RFK_NVIDIA)
#define RFK_FUSED_BLOCK 1024 /* at 64 registers a thread, one block fills a multiprocessor */
#define RFK_FUSED_RESIDENT 1
#else
#define RFK_FUSED_BLOCK 512
#define RFK_FUSED_RESIDENT 2
#endif
#if !defined(ROCMFORGE_HIP_EMU)
#define RFK_FUSED_BLOCK_OF(dev) RFK_FUSED_BLOCK
#endif
/* Fragments of a row in flight a lane: at most, and until launch configs are timed. On NVIDIA a second one does not fit
 * into 64 registers (spilling made a step 4 to 10 % slower on an H200): there rfk_pairs_matvec has two of each of two
 * rows. The emulator starts with either. */
#define RFK_MAX_IN_FLIGHT 2
#if defined(ROCMFORGE_HIP_EMU)
#define RFK_FIRST_IN_FLIGHT(WAVE) ((WAVE) == 32 ? 1 : 2)
#elif defined(RFK_NVIDIA)
#define RFK_FIRST_IN_FLIGHT(WAVE) 1
#else
#define RFK_FIRST_IN_FLIGHT(WAVE) 2
#endif
#define RFK_MAX_COLUMN 32768u /* values: 1.25 bytes of shared memory each */

/* A post-norm in the launch that reads what it is added to: x + y / rms(y) * w takes x's place. */
struct rfk_add_args {
    const float *y, *w; /* y NULL: none */
    float *out;         /* where the sum goes, for later launches */
    uint32_t y_stride;
    float eps;
};

struct rfk_fused_args {
    rfk_product part[RFK_PRODUCTS]; /* glu: the gates, then what they multiply */
    const float *x;                 /* x8.q NULL: the column */
    rfk_add_args add;               /* to x; out is not x, which other blocks still read */
    const uint8_t *norm;            /* NULL: no norm */
    float *norm_out;                /* where the normed x goes; NULL: no other op reads it */
    rfk_int8_rows x8;               /* the column, quantized */
    const float *squares;           /* [n_in / 32] x8 is a deferred norm; NULL: it is not */
    uint32_t n_in, norm_type;
    uint32_t glu, is_gelu;          /* act(gate) * up: a GELU, else a SILU */
    uint32_t rows_log2;             /* rfk_pairs_matvec: a block takes 2^rows_log2 adjacent rows at a time */
    float eps;
    rfk_int8_rows to8;              /* the glu's or the product's results, quantized; NULL: not wanted */
    const uint8_t *to_norm;         /* weights of the deferred norm that to8 is; NULL: it is none */
    float *to_squares;              /* [n_out / 32] */
    uint32_t to_norm_type;
    rfk_members_args sum;           /* which the only product's results are parts of; n_members 0: of none */
};

/* Deferred RMS norm: quantize x * w and keep the sum of squares of x for each group of 32; dot products are scaled by 1
 * / sqrt(mean(x^2) + eps) afterwards. So the blocks that compute x can quantize it, although none of them has the whole
 * row. */

/* The column as fragments of 64 values. A fragment has four pieces of 16 int8 values, stored as piece-major arrays, and
 * scales. For most types it has two groups of 32, and the scales are {d, d, e, e}: e is d * sum, or where the integer
 * dot product starts. Pieces of Q6_K and Q8_0 lie in four groups: the scales are four d. */
#define RFK_ORDER_LINEAR 0u /* 64 contiguous values */
#define RFK_ORDER_Q6 1u    /* every other 16 of 128 values */
#define RFK_ORDER_STRIDED 2u /* four times 16 values, a wave's lanes apart */
#define RFK_ORDER_UNITS 3u   /* 32 contiguous values, two units a fragment: two pieces and d by the unit */
#define RFK_ORDER_NIBBLES(LANES) (RFK_ORDER_UNITS + (LANES)) /* units whose values lie as rfk_split_codes' nibbles */
struct rfk_column {
    int4 *piece;
    float *scale;
    uint32_t *grid; /* of the weights' type, behind the column */
    uint32_t n_fragments, order, wave, has_min;
    int offset;
};

/* Integer dot products start at the bits of 1.5 * 2^23, minus what the weights' OFFSET adds, so that the result read as
 * a float is 12582912 + sum: conversions are slow. Sums stay below 2^22. */
#define RFK_DOT_START 0x4b400000
RFK_DEVICE float rfk_dot_to_float(int dot) { return rfk_as_float((uint32_t)dot) - 12582912.0f; }

/* Lanes of a wave that have a fragment, of those left in a row. */
RFK_DEVICE uint32_t rfk_active_lanes(uint32_t left, uint32_t wave) { return left < wave ? left : wave; }

RFK_DEVICE uint32_t rfk_chunk_fragment(const rfk_column &c, uint32_t chunk, uint32_t *piece) {
    if (c.order == RFK_ORDER_Q6) {
        *piece = chunk % 8 / 2;
        return chunk / 8 * 2 + chunk % 2;
    }
    if (c.order == RFK_ORDER_STRIDED) {
        const uint32_t first = chunk / (4 * c.wave) * c.wave, i = chunk % (4 * c.wave),
                       n = rfk_active_lanes(c.n_fragments - first, c.wave);
        *piece = n == c.wave ? i / c.wave : i / n;
        return first + i - *piece * n;
    }
    if (c.order >= RFK_ORDER_UNITS) {
        *piece = chunk % 2 * 2; /* the upper halves lie behind the lower ones of all units */
        return chunk / 2;
    }
    *piece = chunk % 4;
    return chunk / 4;
}

/* Store the scales of 16 values: d and the sum of their group of 32 for most types; d where pieces lie in four
 * groups. */
RFK_DEVICE void rfk_put_scale(const rfk_column &c, uint32_t chunk, float d, int sum) {
    uint32_t piece, fragment = rfk_chunk_fragment(c, chunk, &piece);
    if (c.order >= RFK_ORDER_UNITS) {
        if (piece == 0) c.scale[fragment] = d;
    } else if (c.order != RFK_ORDER_LINEAR) {
        c.scale[4 * fragment + piece] = d;
    } else if (chunk % 2 == 0) {
        c.scale[4 * fragment + piece / 2] = d;
        c.scale[4 * fragment + 2 + piece / 2] =
            c.has_min ? d * (float)sum : rfk_as_float((uint32_t)(RFK_DOT_START - c.offset * sum));
    }
}

/* Bytes of shared memory for n values of columns. */
static uint32_t rfk_columns_bytes(uint32_t n) { return n + n / 4; }

/* A column of n values in shared memory. */
RFK_DEVICE rfk_column rfk_column_in(int4 *memory, uint32_t n) {
    rfk_column c;
    c.n_fragments = n / 64;
    c.piece = memory;
    c.scale = reinterpret_cast<float *>(memory + 4 * c.n_fragments);
    c.grid = reinterpret_cast<uint32_t *>(memory + 5 * c.n_fragments);
    return c;
}

/* The product of this block, the block's number in it and how many blocks it has. */
RFK_DEVICE uint32_t rfk_find_product(const rfk_product *part, uint32_t &number, uint32_t &n_blocks) {
    uint32_t which = 0;
    number = blockIdx.x, n_blocks = part[0].end_block;
    for (uint32_t i = 1; i < RFK_PRODUCTS; i++)
        if (blockIdx.x >= part[i - 1].end_block) {
            which = i;
            number = blockIdx.x - part[i - 1].end_block;
            n_blocks = part[i].end_block - part[i - 1].end_block;
        }
    return which;
}

#define RFK_FUSED_PASSES 8u /* rows of a wave at most, if the block keeps its results */
struct rfk_fused_shared {
    float factor;                         /* of all dot products: 1 / rms of a deferred norm */
    rfk_product_sum sum;                  /* that the results are parts of */
    rfk_norm_shared norm;
    float squares[RFK_MAX_COLUMN / 32];   /* of the norm that this block makes */
    float out[RFK_FUSED_PASSES][32];       /* results, if they are quantized or parts of a sum */
    float to_norm[RFK_FUSED_PASSES][32];   /* and the norm weights that multiply them */
};

/* Sum of squares of a group of 32, four values a lane in eight adjacent lanes. All lanes of the wave must take part. */
template <int WAVE> RFK_DEVICE float rfk_group_squares(const float (&x)[4]) {
    float sum = rfk_fma(x[0], x[0], rfk_mul(x[1], x[1])) + rfk_fma(x[2], x[2], rfk_mul(x[3], x[3]));
    for (int mask = 1; mask < 8; mask *= 2) sum += rfk_shuffle_xor<WAVE>(sum, mask);
    return sum;
}

/* 1 / sqrt(mean(x^2) + eps), by one wave. */
template <int WAVE> RFK_DEVICE float rfk_norm_factor(const float *squares, uint32_t n, float eps) {
    float sum = 0;
    RFK_UNROLL(4)
    for (uint32_t i = threadIdx.x % WAVE; i < n / 32; i += WAVE) sum += squares[i];
    return 1.0f / sqrtf(rfk_wave_sum<WAVE>(sum) / (float)n + eps);
}

/* The norm weights of values 4i .. 4i + 3. The first ones are loaded before rfk_wait_previous. */
RFK_DEVICE void rfk_norm_weights(const rfk_fused_args &a, uint32_t i, float *w) {
    w[0] = w[1] = w[2] = w[3] = 0;
    if (!a.norm || a.x8.q || i >= a.n_in / 4) return; /* x8 is already multiplied by them */
    if (a.norm_type == RF_TYPE_F32) {
        const float4 four = reinterpret_cast<const float4 *>(a.norm)[i];
        w[0] = four.x, w[1] = four.y, w[2] = four.z, w[3] = four.w;
        return;
    }
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < 4; k++) w[k] = rfk_load_any(a.norm, a.norm_type, 4 * (size_t)i + k);
}

/* The weights of norms to the L2 cache, before the previous kernel has ended. */
RFK_DEVICE void rfk_prefetch_norms(const rfk_fused_args &a) {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    const uint32_t i = 32 * threadIdx.x;
    if (a.x8.q || i >= a.n_in) return;
    if (a.norm && a.norm_type == RF_TYPE_F32)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const float *>(a.norm) + i));
    if (a.add.y) asm volatile("prefetch.global.L2 [%0];" ::"l"(a.add.w + i));
#else
    (void)a;
#endif
}

/* Eight int8 values of low nibbles and eight of high ones in the order of the nibbles. */
RFK_DEVICE int4 rfk_interleave_eights(int low0, int low1, int high0, int high1) {
    int4 v;
    v.x = rfk_interleave(low0, high0, 0), v.y = rfk_interleave(low0, high0, 1);
    v.z = rfk_interleave(low1, high1, 0), v.w = rfk_interleave(low1, high1, 1);
    return v;
}
/* 16 int8 values of x in the column's order. */
RFK_DEVICE int4 rfk_ordered_chunk(const int *q, uint32_t chunk, uint32_t order) {
    if (order <= RFK_ORDER_UNITS) return reinterpret_cast<const int4 *>(q)[chunk];
    /* in eights: of the low nibbles and of the high ones */
    const bool near = order == RFK_ORDER_NIBBLES(2);
    const uint32_t at = near ? 2 * chunk : 2 * chunk - chunk % 2;
    const int2 *const eight = reinterpret_cast<const int2 *>(q) + at;
    const int2 low = eight[0], high = eight[near ? 1 : 2];
    return rfk_interleave_eights(low.x, low.y, high.x, high.y);
}
/* Put a lane's int8 values 4i .. 4i + 3 into the column's order, among others; returns which four it has then. All
 * lanes of the wave take part. */
template <int WAVE> RFK_DEVICE uint32_t rfk_order_four(uint32_t i, uint32_t order, int *packed) {
    if (order <= RFK_ORDER_UNITS) return i;
    const bool near = order == RFK_ORDER_NIBBLES(2);
    const int other = rfk_shuffle_xor<WAVE>(*packed, near ? 2 : 4);
    const uint32_t upper = i / (near ? 2 : 4) % 2;
    *packed = rfk_interleave(upper ? other : *packed, upper ? *packed : other, upper);
    return near ? i / 4 * 4 + i % 2 * 2 + upper : i / 8 * 8 + i % 4 * 2 + upper;
}

/* Copy the column from x8. */
RFK_DEVICE void rfk_copy_column(const rfk_fused_args &a, const rfk_column &c, uint32_t threads) {
    for (uint32_t chunk = threadIdx.x; chunk < a.n_in / 16; chunk += threads) {
        rfk_group g = a.x8.group[chunk / 2];
        int4 v = rfk_ordered_chunk(a.x8.q, chunk, c.order);
        uint32_t piece, fragment = rfk_chunk_fragment(c, chunk, &piece);
        c.piece[piece * c.n_fragments + fragment] = v;
        rfk_put_scale(c, chunk, g.d, g.sum[0] + g.sum[1]);
    }
}

/* Its 1 / rms(y). All threads of the block take part. */
template <int WAVE>
RFK_DEVICE float rfk_add_scale(const rfk_add_args &a, const float *y, uint32_t n, rfk_norm_shared &s) {
    const rfk_norm_row row = {y, n};
    rfk_norm_part values; /* are loaded again: there are no registers for them */
    return rfk_norm_scale<WAVE>(row, n, a.eps, values, s);
}
/* x += y * scale * w, values 4i .. 4i + 3 of n, with rfk_norm_wide's bits. */
RFK_DEVICE void rfk_add(const rfk_add_args &a, const float *y, uint32_t i, uint32_t n, float scale, float (&x)[4]) {
    float own[4], w[4];
    rfk_norm_get4(y, i, n, own);
    rfk_norm_get4(a.w, i, n, w);
    for (int k = 0; k < 4; k++) x[k] += rfk_mul(rfk_mul(own[k], scale), w[k]);
}

/* Quantize the column from x, as a deferred norm if there is one. weight: rfk_norm_weights of the thread's first
 * values. */
template <int WAVE>
RFK_DEVICE void rfk_quantize_column(const rfk_fused_args &a, const rfk_column &c, float (&weight)[4],
                                    rfk_fused_shared &s, uint32_t threads) {
    const uint32_t n = a.n_in / 4;
    float v[4], d, scale = 0;
    if (a.add.y) scale = rfk_add_scale<WAVE>(a.add, a.add.y, a.n_in, s.norm);
    RFK_UNROLL(1)
    for (uint32_t first = 0; first < n; first += threads) {
        const uint32_t i = first + threadIdx.x;
        const bool inside = i < n;
        if (i - threadIdx.x % WAVE >= n) break; /* the whole wave */
        rfk_norm_get4(a.x, i, a.n_in, v);
        if (first) rfk_norm_weights(a, i, weight);
        if (a.add.y) {
            rfk_add(a.add, a.add.y, i, a.n_in, scale, v);
            if (inside && blockIdx.x == 0) rfk_set4(a.add.out, i, a.n_in, v);
        }
        if (a.norm) {
            float squares = rfk_group_squares<WAVE>(v);
            if (inside && i % 8 == 0) s.squares[i / 8] = squares;
            RFK_UNROLL(4)
            for (uint32_t k = 0; k < 4; k++) v[k] *= weight[k];
        }
        int sum, packed = rfk_quantize_lane<WAVE>(v, &d, &sum), other = rfk_shuffle_xor<WAVE>(sum, 4);
        const uint32_t to = rfk_order_four<WAVE>(i, c.order, &packed);
        if (!inside) continue;
        uint32_t piece, fragment = rfk_chunk_fragment(c, to / 4, &piece);
        reinterpret_cast<int *>(c.piece + piece * c.n_fragments + fragment)[to % 4] = packed;
        if (i % 4 == 0) rfk_put_scale(c, i / 4, d, sum + other);
    }
}

/* Fill the column and its factor. Ends with a barrier. */
template <int WAVE>
RFK_DEVICE void rfk_fill_column(const rfk_fused_args &a, const rfk_column &c, float (&weight)[4], rfk_fused_shared &s,
                                uint32_t threads) {
    const float *squares = a.squares;
    if (a.x8.q) rfk_copy_column(a, c, threads);
    else {
        rfk_quantize_column<WAVE>(a, c, weight, s, threads);
        if (a.norm) {
            squares = s.squares;
            __syncthreads();
        }
    }
    if (threadIdx.x / WAVE == threads / WAVE - 1) { /* the wave with the least to copy */
        float factor = squares ? rfk_norm_factor<WAVE>(squares, a.n_in, a.eps) : 1.0f;
        if (threadIdx.x % WAVE == 0) s.factor = factor;
    }
    __syncthreads();
    if (!a.norm_out || blockIdx.x != 0) return;
    const float *x = a.add.y ? a.add.out : a.x;
    for (uint32_t i = threadIdx.x; i < a.n_in; i += threads)
        a.norm_out[i] = x[i] * s.factor * rfk_load_any(a.norm, a.norm_type, i);
}

/* Byte k of v as a float. On NVIDIA a conversion takes as long as four other instructions: there the byte becomes the
 * last of 2^23's mantissa. */
RFK_DEVICE float rfk_byte_to_float(uint32_t v, uint32_t k) {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    return __uint_as_float(__byte_perm(v, 0x4b000000u, 0x7440u + k)) - 8388608.0f;
#else
    return (float)((v >> (8 * k)) & 255);
#endif
}
/* The lower or the upper halves of x and y. */
RFK_DEVICE uint32_t rfk_join_halves(uint32_t x, uint32_t y, uint32_t upper) {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    return __byte_perm(x, y, upper ? 0x7632u : 0x5410u);
#else
    return ((x >> (16 * upper)) & 0xffff) | (y >> (16 * upper)) << 16;
#endif
}

/* A fragment of the column in registers. */
struct rfk_fragment_x {
    int4 piece[4];
    float4 scale;
};

/* A fragment of weights as loaded, and the address of the next one. */
struct rfk_fragment {
    int4 q[4], head;
    uint32_t s[4];
};
struct rfk_fragment_at {
    uint32_t o[4]; /* offsets into the planes; such weights are smaller than 4 GiB */
};

RFK_DEVICE int rfk_dot16(const int *w, const int4 &x, int sum) {
    sum = rfk_dot4(w[0], x.x, sum);
    sum = rfk_dot4(w[1], x.y, sum);
    sum = rfk_dot4(w[2], x.z, sum);
    return rfk_dot4(w[3], x.w, sum);
}
#if defined(RFK_HAS_UNSIGNED_DOT4)
RFK_DEVICE int rfk_dot16_unsigned(const int *w, const int4 &x, int sum) {
    sum = rfk_dot4_unsigned((uint32_t)w[0], x.x, sum);
    sum = rfk_dot4_unsigned((uint32_t)w[1], x.y, sum);
    sum = rfk_dot4_unsigned((uint32_t)w[2], x.z, sum);
    return rfk_dot4_unsigned((uint32_t)w[3], x.w, sum);
}
#endif
RFK_DEVICE int rfk_low4(int v) { return v & 0x0f0f0f0f; }
RFK_DEVICE int rfk_high4(int v) { return (v >> 4) & 0x0f0f0f0f; }
/* IN_PLACE: high ones stay where they are in their bytes, times 16. */
template <bool IN_PLACE> RFK_DEVICE void rfk_split_nibbles(int v, int &low, int &high) {
    high = IN_PLACE ? v & (int)0xf0f0f0f0u : rfk_high4(v);
    low = rfk_low4(v);
}
RFK_DEVICE float rfk_low_half(uint32_t v) { return rfk_from_half((uint16_t)(v & 0xffff)); }
RFK_DEVICE float rfk_high_half(uint32_t v) { return rfk_from_half((uint16_t)(v >> 16)); }

/* How a lane reads a type. VALUES: of a fragment; loaded: its registers; begin: address of the lane's first fragment of
 * a row; fetch: load it; next: advance to the lane's next; unpack: its weights, a piece of 16 after the other, and its
 * scales; join: add its products to total, from its DOTS dot products with x, of one or two pieces each. sums: of x for
 * minimums, d * sum of a group, in RFK_OTHER the sum of a piece. */
template <int TYPE> struct rfk_fragments;
#define RFK_SCALES 6 /* of a fragment, at most */
struct rfk_fragment_weights {
    int q[16];
    float s[RFK_SCALES];
};
struct rfk_fragment_scales {
    float d[4], sums[2]; /* of x, for each dot product */
};

/* Bytes of a block in planes 0 to 2. */
template <int TYPE> struct rfk_plane_bytes {
    static const int P0 = 16,
                     P1 = TYPE == RF_TYPE_Q4_1 || TYPE == RF_TYPE_Q5_0 || TYPE == RF_TYPE_Q5_1 ? 4 : 2,
                     P2 = TYPE == RF_TYPE_Q5_0 ? 2 : TYPE == RF_TYPE_Q5_1 ? 4 : 0;
};

/* Types with blocks of 32: a fragment is two blocks. */
template <int TYPE> struct rfk_fragments32 {
    static const int VALUES = 64, DOTS = 2, ORDER = RFK_ORDER_LINEAR, OFFSET = rfk_format<TYPE>::OFFSET;
    typedef rfk_fragment loaded;
    typedef rfk_plane_bytes<TYPE> B;
    template <int WAVE> RFK_DEVICE void begin(uint32_t row, uint32_t n_in, uint32_t lane, rfk_fragment_at &at) {
        at.o[0] = row * (n_in / 32) + 2 * lane; /* the block: gives the offsets into all planes */
    }
    RFK_DEVICE void fetch(const rfk_weight &weight, const rfk_fragment_at &at, rfk_fragment &o) {
        const rfk_weight_once w = rfk_read_once(weight);
        const rfk_once p = w.plane[0] + at.o[0] * B::P0, p1 = w.plane[1] + at.o[0] * B::P1,
                       p2 = w.plane[2] + at.o[0] * B::P2;
        RFK_UNROLL(4)
        for (int i = 0; i < 2; i++) o.q[i] = rfk_load16(p + 16 * i);
        if (B::P1 == 2) o.s[0] = rfk_load4(p1);
        else rfk_load8bytes(p1, o.s);
        if (B::P2 == 2) o.s[2] = rfk_load4(p2);
        if (B::P2 == 4) rfk_load8bytes(p2, o.s + 2);
    }
    template <int WAVE> RFK_DEVICE void next(rfk_fragment_at &at) { at.o[0] += 2 * WAVE; }
    RFK_DEVICE void unpack(const rfk_fragment &w, uint32_t lane, rfk_fragment_weights &o) {
        unpack_by<false>(w, lane, o);
    }
    template <bool IN_PLACE> RFK_DEVICE void unpack_by(const rfk_fragment &w, uint32_t, rfk_fragment_weights &o) {
        RFK_UNROLL(2)
        for (int h = 0; h < 2; h++) {
            int *low = o.q + 8 * h, *high = low + 4;
            rfk_words(w.q[h], low);
            RFK_UNROLL(4)
            for (uint32_t i = 0; i < 4; i++)
                if (TYPE == RF_TYPE_Q5_0 || TYPE == RF_TYPE_Q5_1)
                    rfk_q5_codes<false>((uint32_t)low[i], w.s[h], i, low[i], high[i]);
                else rfk_split_nibbles<IN_PLACE>(low[i], low[i], high[i]);
            uint32_t scale = TYPE == RF_TYPE_Q4_1   ? w.s[h]
                             : TYPE == RF_TYPE_Q5_1 ? w.s[2 + h]
                             : TYPE == RF_TYPE_Q5_0 ? w.s[2] >> (16 * h)
                                                    : w.s[0] >> (16 * h);
            o.s[h] = rfk_low_half(scale);
            o.s[2 + h] = rfk_high_half(scale); /* of types with minimums */
        }
    }
    RFK_DEVICE float join(const float *s, const float *dots, const rfk_fragment_scales &x, float total) {
        RFK_UNROLL(2)
        for (int h = 0; h < 2; h++) {
            total = rfk_fma(rfk_mul(s[h], x.d[h]), dots[h], total);
            if (TYPE == RF_TYPE_Q4_1 || TYPE == RF_TYPE_Q5_1) total = rfk_fma(s[2 + h], x.sums[h], total);
        }
        return total;
    }
};

/* Q4_K and Q5_K: a fragment is two groups of a block, the low and high nibbles of 32 bytes. */
template <int TYPE> struct rfk_fragments_k {
    static const int VALUES = 64, DOTS = 2, ORDER = RFK_ORDER_LINEAR, OFFSET = 0;
    typedef rfk_fragment loaded;
    static const bool FIVE = TYPE == RF_TYPE_Q5_K;
    static const int BYTES = FIVE ? 176 : 144, QUANTS = FIVE ? 48 : 16;
    template <int WAVE> RFK_DEVICE void begin(uint32_t row, uint32_t n_in, uint32_t lane, rfk_fragment_at &at) {
        at.o[0] = (row * (n_in / 256) + lane / 4) * BYTES;
        at.o[1] = at.o[0] + QUANTS + lane % 4 * 32;
        if (FIVE) at.o[2] = at.o[0] + 16 + lane % 4 * 8; /* the last bits of codes */
    }
    RFK_DEVICE void fetch(const rfk_weight &weight, const rfk_fragment_at &at, rfk_fragment &o) {
        const rfk_weight_once w = rfk_read_once(weight);
        const rfk_once head = w.plane[0] + at.o[0], p = w.plane[0] + at.o[1];
        o.q[0] = rfk_load16(p);
        o.q[1] = rfk_load16(p + 16);
        o.head = rfk_load16(head);
        if (FIVE) rfk_load8bytes(w.plane[0] + at.o[2], o.s);
    }
    template <int WAVE> RFK_DEVICE void next(rfk_fragment_at &at) {
        at.o[0] += WAVE / 4 * BYTES;
        at.o[1] += WAVE / 4 * BYTES;
        if (FIVE) at.o[2] += WAVE / 4 * BYTES;
    }
    RFK_DEVICE void unpack(const rfk_fragment &w, uint32_t lane, rfk_fragment_weights &o) {
        unpack_by<false>(w, lane, o);
    }
    template <bool IN_PLACE>
    RFK_DEVICE void unpack_by(const rfk_fragment &w, uint32_t lane, rfk_fragment_weights &o) {
        const uint32_t c = lane % 4; /* which of the block's four fragments */
        RFK_UNROLL(2)
        for (int i = 0; i < 2; i++) {
            int *low = o.q + 4 * i, *high = low + 8;
            rfk_words(w.q[i], low);
            RFK_UNROLL(4)
            for (uint32_t k = 0; k < 4; k++) {
                if (FIVE) rfk_q5_codes<IN_PLACE>((uint32_t)low[k], w.s[i], k, low[k], high[k]);
                else rfk_split_nibbles<IN_PLACE>(low[k], low[k], high[k]);
            }
        }
        unpack_scales(w, c, o);
        if (FIVE && IN_PLACE) o.s[4] /= 8;
    }
    /* 6-bit scales and minimums of the two groups; those of the last four groups have their upper two bits elsewhere.
     * c: which of the block's four fragments */
    RFK_DEVICE void unpack_scales(const rfk_fragment &w, uint32_t c, rfk_fragment_weights &o) {
        const uint32_t yz = rfk_join_halves((uint32_t)w.head.y, (uint32_t)w.head.z, c & 1),
                       e = rfk_join_halves((uint32_t)w.head.w, 0, c & 1),
                       more = ((e | e << 12) & 0x0f0f0f0fu) | ((yz >> 2) & 0x30303030u),
                       bytes = c < 2 ? yz & 0x3f3f3f3fu : more;
        RFK_UNROLL(4)
        for (uint32_t i = 0; i < 4; i++) o.s[i] = rfk_byte_to_float(bytes, i);
        o.s[4] = rfk_low_half((uint32_t)w.head.x), o.s[5] = rfk_high_half((uint32_t)w.head.x);
    }
    RFK_DEVICE float join(const float *s, const float *dots, const rfk_fragment_scales &x, float total) {
        const float products = rfk_fma(rfk_mul(s[1], x.d[1]), dots[1], rfk_mul(rfk_mul(s[0], x.d[0]), dots[0])),
                    minimums = rfk_fma(s[3], x.sums[1], rfk_mul(s[2], x.sums[0]));
        return rfk_fma(-s[5], minimums, rfk_fma(s[4], products, total));
    }
};

/* Q8_0: lanes take 16 values in turn, so that a wave's load is contiguous: contiguous fragments would fetch every
 * 32-byte sector twice. A fragment is four halves of groups. */
template <> struct rfk_fragments<RF_TYPE_Q8_0> {
    static const int VALUES = 64, DOTS = 4, ORDER = RFK_ORDER_STRIDED, OFFSET = 0;
    typedef rfk_fragment loaded;
    template <int WAVE> RFK_DEVICE void begin(uint32_t row, uint32_t n_in, uint32_t lane, rfk_fragment_at &at) {
        at.o[0] = row * (n_in / 16) + lane; /* the first half of a group */
        at.o[1] = n_in / 64;                /* fragments of the row from here on */
        at.o[2] = rfk_active_lanes(at.o[1], WAVE);  /* distance between its halves */
    }
    RFK_DEVICE void fetch(const rfk_weight &weight, const rfk_fragment_at &at, rfk_fragment &o) {
        const rfk_weight_once w = rfk_read_once(weight);
        RFK_UNROLL(4)
        for (uint32_t k = 0; k < 4; k++) {
            const uint32_t half = at.o[0] + k * at.o[2];
            o.q[k] = rfk_load16(w.plane[0] + half * 16);
            o.s[k] = rfk_load2(w.plane[1] + half / 2 * 2);
        }
    }
    template <int WAVE> RFK_DEVICE void next(rfk_fragment_at &at) {
        at.o[0] += 4 * WAVE;
        at.o[1] -= WAVE;
        at.o[2] = rfk_active_lanes(at.o[1], WAVE);
    }
    RFK_DEVICE void unpack(const rfk_fragment &w, uint32_t lane, rfk_fragment_weights &o) {
        (void)lane;
        RFK_UNROLL(4)
        for (int k = 0; k < 4; k++) rfk_words(w.q[k], o.q + 4 * k), o.s[k] = rfk_low_half(w.s[k]);
    }
    RFK_DEVICE float join(const float *s, const float *dots, const rfk_fragment_scales &x, float total) {
        RFK_UNROLL(4)
        for (int k = 0; k < 4; k++) total = rfk_fma(rfk_mul(s[k], x.d[k]), dots[k], total);
        return total;
    }
};
template <> struct rfk_fragments<RF_TYPE_Q4_0> : rfk_fragments32<RF_TYPE_Q4_0> {};
template <> struct rfk_fragments<RF_TYPE_Q4_1> : rfk_fragments32<RF_TYPE_Q4_1> {};
template <> struct rfk_fragments<RF_TYPE_Q5_0> : rfk_fragments32<RF_TYPE_Q5_0> {};
template <> struct rfk_fragments<RF_TYPE_Q5_1> : rfk_fragments32<RF_TYPE_Q5_1> {};
template <> struct rfk_fragments<RF_TYPE_Q4_K> : rfk_fragments_k<RF_TYPE_Q4_K> {};
template <> struct rfk_fragments<RF_TYPE_Q5_K> : rfk_fragments_k<RF_TYPE_Q5_K> {};

/* Four times the values of pieces i and 2 + i of Q6_K, of their bytes (rfk_q6_byte). */
RFK_DEVICE void rfk_q6_values(uint32_t code, uint32_t last, int i, int *first, int *second) {
    *first = (int)(code & 0xfcfcfcfcu);
    *second = (int)((code << 6 & 0xc0c0c0c0u) | ((i ? last << 2 : last >> 2) & 0x3c3c3c3cu));
}

/* Q6_K: a fragment is every other 16 values of half a block: they share 16 bytes of codes' last bits. */
template <> struct rfk_fragments<RF_TYPE_Q6_K> {
    static const int VALUES = 64, DOTS = 4, ORDER = RFK_ORDER_Q6, OFFSET = 0;
    typedef rfk_fragment loaded;
    template <int WAVE> RFK_DEVICE void begin(uint32_t row, uint32_t n_in, uint32_t lane, rfk_fragment_at &at) {
        uint32_t half = row * (n_in / 128) + lane / 2, odd = lane % 2; /* halves of 128 weights */
        at.o[0] = half * 64 + odd * 16;
        at.o[1] = half * 32 + odd * 16;
        at.o[2] = half;
    }
    RFK_DEVICE void fetch(const rfk_weight &weight, const rfk_fragment_at &at, rfk_fragment &o) {
        const rfk_weight_once w = rfk_read_once(weight);
        const rfk_once low = w.plane[0] + at.o[0];
        o.q[0] = rfk_load16(low);
        o.q[1] = rfk_load16(low + 32);
        o.q[2] = rfk_load16(w.plane[1] + at.o[1]);
        rfk_load8bytes(w.plane[2] + at.o[2] * 8, o.s);
        o.s[2] = rfk_load2(w.plane[3] + at.o[2] / 2 * 2);
    }
    template <int WAVE> RFK_DEVICE void next(rfk_fragment_at &at) {
        at.o[0] += WAVE / 2 * 64;
        at.o[1] += WAVE / 2 * 32;
        at.o[2] += WAVE / 2;
    }
    RFK_DEVICE void unpack(const rfk_fragment &w, uint32_t lane, rfk_fragment_weights &o) {
        int code[2][4], last[4]; /* rfk_q6_byte */
        rfk_words(w.q[0], code[0]);
        rfk_words(w.q[1], code[1]);
        rfk_words(w.q[2], last);
        RFK_UNROLL(2)
        for (int i = 0; i < 2; i++)
            RFK_UNROLL(4)
            for (int k = 0; k < 4; k++)
                rfk_q6_values((uint32_t)code[i][k], (uint32_t)last[k], i, &o.q[4 * i + k], &o.q[8 + 4 * i + k]);
        RFK_UNROLL(4)
        for (int i = 0; i < 4; i++) /* scale of piece i: byte 2 * i + odd, signed */
            o.s[i] = rfk_byte_to_float(w.s[i / 2] ^ 0x80808080u, lane % 2 + 2 * (uint32_t)(i % 2)) - 128.0f;
        o.s[4] = rfk_low_half(w.s[2]) / 4;
    }
    RFK_DEVICE float join(const float *s, const float *dots, const rfk_fragment_scales &x, float total) {
        float sum = 0;
        RFK_UNROLL(4)
        for (int i = 0; i < 4; i++) sum = rfk_fma(rfk_mul(s[i], x.d[i]), dots[i], sum);
        return rfk_fma(s[4], sum, total);
    }
};

/* The other types: a unit at a time, half a fragment of the column. Offsets are 0; Q2_K has minimums, 0 in the others.
 * RFK_OTHER reads the type of each unit; RFK_ONE(type) is code for that type alone, with the same units and sums. */
#define RFK_ONE(TYPE) (RFK_OTHER + 1 + (int)(TYPE))
/* Whether all 32 products of a unit are added as integers, then multiplied by its one scale: split codes in nibbles'
 * order have no sums of its halves. Other types of RFK_OTHER multiply each half's 16 products by a scale. */
RFK_DEVICE constexpr bool rfk_has_one_dot(uint32_t type) {
    return type == RF_TYPE_IQ4_NL || type == RF_TYPE_IQ4_XS || type == RF_TYPE_MXFP4;
}
template <int TYPE> struct rfk_format {
    static const int HAS_MIN = 0;
};
template <int TYPE> struct rfk_fragments {
    static const int ONLY = TYPE - RFK_ONE(0); /* the type of RFK_ONE; RFK_OTHER: negative */
    static const int VALUES = 32, DOTS = 2, ORDER = RFK_ORDER_NIBBLES(rfk_split_codes<ONLY>::LANES), OFFSET = 0;
    typedef rfk_raw loaded;
    template <int WAVE> RFK_DEVICE void begin(uint32_t row, uint32_t n_in, uint32_t lane, rfk_fragment_at &at) {
        at.o[0] = row * (n_in / 32) + lane;
    }
    RFK_DEVICE void fetch(const rfk_weight &weight, const rfk_fragment_at &at, loaded &r) {
        const rfk_weight_once w = rfk_read_once(weight);
        const uint32_t block = 0, u = at.o[0];
        r.type = ONLY < 0 ? w.type : (uint32_t)ONLY;
        switch (r.type) {
            RFK_OTHER32_TYPES(RFK_FETCH_CASE)
            RFK_OTHER16_TYPES(RFK_FETCH_CASE)
            RFK_FETCH_CASE(RF_TYPE_Q2_K)
        default: break;
        }
    }
    template <int WAVE> RFK_DEVICE void next(rfk_fragment_at &at) { at.o[0] += WAVE; }
    RFK_DEVICE void unpack(const loaded &r, uint32_t lane, rfk_fragment_weights &to) {
        const uint32_t u = lane;
        rfk_unit o;
        o.m[0] = o.m[1] = 0;
        switch (ONLY < 0 ? r.type : (uint32_t)ONLY) {
            RFK_OTHER32_TYPES(RFK_UNPACK_CASE)
            RFK_OTHER16_TYPES(RFK_UNPACK_CASE)
            RFK_UNPACK_CASE(RF_TYPE_Q2_K)
        default: break;
        }
        RFK_UNROLL(8)
        for (int i = 0; i < 8; i++) to.q[i] = o.q[i];
        to.s[0] = o.d[0], to.s[1] = o.d[1], to.s[2] = o.m[0], to.s[3] = o.m[1], to.s[4] = 0;
        if (rfk_has_one_dot(r.type)) to.s[0] = 0, to.s[4] = 1;
    }
    RFK_DEVICE float join(const float *s, const float *dots, const rfk_fragment_scales &x, float total) {
        if (ONLY >= 0 && rfk_has_one_dot((uint32_t)ONLY))
            return rfk_fma(x.d[0], rfk_mul(s[1], dots[0] + dots[1]), total);
        if (ONLY >= 0 && ONLY != RF_TYPE_Q2_K)
            return rfk_fma(x.d[0], rfk_fma(s[1], dots[1], rfk_mul(s[0], dots[0])), total);
        const float minimums = rfk_fma(s[3], x.sums[1], rfk_mul(s[2], x.sums[0])),
                    second = rfk_fma(s[4], dots[0], dots[1]);
        return rfk_fma(x.d[0], rfk_fma(s[1], second, rfk_mul(s[0], dots[0])) - minimums, total);
    }
};

/* Whether minimums are there: of RFK_OTHER the type of the weights tells. */
template <int TYPE> RFK_DEVICE bool rfk_is_q2(uint32_t type) {
    return TYPE == RFK_OTHER ? type == RF_TYPE_Q2_K : TYPE == RFK_ONE(RF_TYPE_Q2_K);
}
template <int TYPE> RFK_DEVICE bool rfk_is_q2(const rfk_raw &r) { return rfk_is_q2<TYPE>(r.type); }
template <int TYPE> RFK_DEVICE bool rfk_is_q2(const rfk_fragment &) { return false; }

/* A fragment's weights for rfk_dot_unpacked. IN_PLACE: codes that are upper bits of a byte stay there. */
template <int TYPE, bool SPLIT = rfk_split_codes<TYPE - RFK_ONE(0)>::IS> struct rfk_unpack_dots {
    static const bool IN_PLACE = false;
    RFK_DEVICE void run(const typename rfk_fragments<TYPE>::loaded &raw, uint32_t lane, rfk_fragment_weights &w) {
        rfk_fragments<TYPE>::unpack(raw, lane, w);
    }
};
/* Nibbles of rfk_split_codes stay as they are. */
template <int TYPE> struct rfk_unpack_dots<TYPE, true> {
    static const bool IN_PLACE = false;
    RFK_DEVICE void run(const rfk_raw &raw, uint32_t lane, rfk_fragment_weights &w) {
        rfk_fragments<TYPE>::unpack(raw, lane, w); /* for the scales */
        rfk_words(raw.a, w.q);
    }
};
template <int CODES> RFK_DEVICE void rfk_dots_of_codes(const int *w, const rfk_fragment_x &x, float *dots) {
    const int first = rfk_dot_codes<CODES>(w, x.piece[0], RFK_DOT_START);
    const bool one = rfk_has_one_dot((uint32_t)CODES);
    dots[0] = one ? 0.0f : rfk_dot_to_float(first);
    dots[1] = rfk_dot_to_float(rfk_dot_codes<CODES>(w + 2, x.piece[1], one ? first : RFK_DOT_START));
}
#if defined(RFK_HAS_UNSIGNED_DOT4)
template <int TYPE> struct rfk_unpack_in_place {
    static const bool IN_PLACE = true;
    RFK_DEVICE void run(const rfk_fragment &raw, uint32_t lane, rfk_fragment_weights &w) {
        rfk_fragments<TYPE>::template unpack_by<true>(raw, lane, w);
    }
};
template <> struct rfk_unpack_dots<RF_TYPE_Q4_0, false> : rfk_unpack_in_place<RF_TYPE_Q4_0> {};
template <> struct rfk_unpack_dots<RF_TYPE_Q4_1, false> : rfk_unpack_in_place<RF_TYPE_Q4_1> {};
template <> struct rfk_unpack_dots<RF_TYPE_Q4_K, false> : rfk_unpack_in_place<RF_TYPE_Q4_K> {};
template <> struct rfk_unpack_dots<RF_TYPE_Q5_K, false> : rfk_unpack_in_place<RF_TYPE_Q5_K> {};
/* The dot products of a fragment's two groups. In Q4_K and Q5_K one group is the low nibbles and the other the high
 * ones; in types with blocks of 32 a group has both. */
template <int TYPE>
RFK_DEVICE void rfk_dots_in_place(const int *w, const rfk_fragment_x &x, const int *start, float *dots) {
    if (TYPE == RF_TYPE_Q4_K || TYPE == RF_TYPE_Q5_K) {
        dots[0] = rfk_dot_to_float(rfk_dot16_unsigned(w + 4, x.piece[1], rfk_dot16_unsigned(w, x.piece[0], start[0])));
        const int upper = rfk_dot16_unsigned(w + 12, x.piece[3], rfk_dot16_unsigned(w + 8, x.piece[2], start[1]));
        if (TYPE == RF_TYPE_Q5_K) dots[1] = rfk_dot_to_float(upper);
        else dots[1] = rfk_fma(rfk_as_float((uint32_t)upper), 0.0625f, -12582912.0f / 16); /* exact */
        return;
    }
    RFK_UNROLL(2)
    for (int h = 0; h < 2; h++) {
        const int upper = rfk_dot16_unsigned(w + 8 * h + 4, x.piece[2 * h + 1], 0) >> 4;
        dots[h] = rfk_dot_to_float(rfk_dot16_unsigned(w + 8 * h, x.piece[2 * h], start[h] + upper));
    }
}
#else
template <int TYPE> RFK_DEVICE void rfk_dots_in_place(const int *, const rfk_fragment_x &, const int *, float *) {}
#endif

/* Add the products of an unpacked fragment (rfk_unpack_dots) and a column's part of it to total. is_q2: a Q2_K unit.
 * LOOKED_UP: codes of rfk_split_codes are looked up. */
template <int TYPE, bool LOOKED_UP = false>
RFK_DEVICE float rfk_dot_unpacked(const rfk_fragment_weights &w, bool is_q2, const rfk_fragment_x &x, float total) {
    typedef rfk_fragments<TYPE> F;
    const bool offset = F::OFFSET != 0, has_min = rfk_format<TYPE>::HAS_MIN != 0;
    rfk_fragment_scales scales = {{x.scale.x, x.scale.y, x.scale.z, x.scale.w}, {x.scale.z, x.scale.w}};
    float dots[4];
    int start[2];
    RFK_UNROLL(2)
    for (int h = 0; h < 2; h++)
        start[h] = has_min || !offset ? RFK_DOT_START : (int)rfk_as_bits(scales.sums[h]);
    if (rfk_unpack_dots<TYPE>::IN_PLACE) rfk_dots_in_place<TYPE>(w.q, x, start, dots);
    else if (rfk_split_codes<TYPE - RFK_ONE(0)>::IS && !LOOKED_UP) rfk_dots_of_codes<TYPE - RFK_ONE(0)>(w.q, x, dots);
    else if (TYPE >= RFK_OTHER || F::DOTS == 4) {
        RFK_UNROLL(4)
        for (int i = 0; i < F::DOTS; i++)
            dots[i] = rfk_dot_to_float(rfk_dot16(w.q + 4 * i, x.piece[i], RFK_DOT_START));
    } else {
        RFK_UNROLL(2)
        for (int h = 0; h < 2; h++)
            dots[h] = rfk_dot_to_float(rfk_dot16(w.q + 8 * h + 4, x.piece[2 * h + 1],
                                                 rfk_dot16(w.q + 8 * h, x.piece[2 * h], start[h])));
    }
    if (TYPE >= RFK_OTHER) {
        const int ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
        RFK_UNROLL(2)
        for (int i = 0; i < 2; i++) scales.sums[i] = is_q2 ? (float)rfk_dot16(ones, x.piece[i], 0) : 0.0f;
    }
    return F::join(w.s, dots, scales, total);
}
template <int TYPE>
RFK_DEVICE float rfk_dot_fragment(const typename rfk_fragments<TYPE>::loaded &raw, const rfk_fragment_x &x,
                                  uint32_t lane, float total) {
    rfk_fragment_weights w;
    rfk_unpack_dots<TYPE>::run(raw, lane, w);
    return rfk_dot_unpacked<TYPE>(w, rfk_is_q2<TYPE>(raw), x, total);
}

#define RFK_GRID_TYPES(X)                                                                                            \
    X(RF_TYPE_IQ3_XXS) X(RF_TYPE_IQ3_S) X(RF_TYPE_IQ2_XXS) X(RF_TYPE_IQ2_XS) X(RF_TYPE_IQ2_S) X(RF_TYPE_IQ1_S)       \
    X(RF_TYPE_IQ1_M)

/* Bytes of a type's grid that blocks keep behind the column; 0: none, or too many. */
#if defined(RFK_NVIDIA) || defined(ROCMFORGE_HIP_EMU)
#define RFK_MAX_GRID 16384u
#else
#define RFK_MAX_GRID 8192u
#endif
#define RFK_GRID_WORDS(TYPE) (rfk_grid<TYPE>::ENTRIES * rfk_grid<TYPE>::WORDS)
#define RFK_GRID_BYTES(TYPE) (RFK_GRID_WORDS(TYPE) * 4 > RFK_MAX_GRID ? 0 : RFK_GRID_WORDS(TYPE) * 4)

/* The type with such a grid that fragments of TYPE are of; none: RF_TYPE_F32, which has no grid. */
template <int TYPE> struct rfk_grid_of {
    static const int ONLY = TYPE > RFK_OTHER ? TYPE - RFK_ONE(0) : RF_TYPE_F32,
                     IS = RFK_GRID_BYTES(ONLY) ? ONLY : RF_TYPE_F32;
};

/* Make the grid of a type, by a block's `threads`. */
template <int TYPE> RFK_DEVICE void rfk_fill_grid(uint32_t *grid, uint32_t threads) {
    const int words = RFK_GRID_WORDS(TYPE);
    for (int i = (int)threadIdx.x; i < words; i += (int)threads)
        grid[i] = rfk_grid<TYPE>::word((uint32_t)i / rfk_grid<TYPE>::WORDS, (uint32_t)i % rfk_grid<TYPE>::WORDS);
}

/* Unpack a fragment, by the grid in shared memory if its type has one. */
template <int TYPE, int GRID> struct rfk_unpack_by {
    RFK_DEVICE void run(const rfk_raw &raw, uint32_t lane, const uint32_t *grid, rfk_fragment_weights &w) {
        rfk_unit o;
        rfk_format<GRID>::template unpack_by<true>(raw, lane, o, grid);
        RFK_UNROLL(8)
        for (int i = 0; i < 8; i++) w.q[i] = o.q[i];
        w.s[0] = o.d[0], w.s[1] = o.d[1], w.s[2] = w.s[3] = 0;
    }
};
template <int TYPE> struct rfk_unpack_by<TYPE, RF_TYPE_F32> {
    RFK_DEVICE void run(const typename rfk_fragments<TYPE>::loaded &raw, uint32_t lane, const uint32_t *,
                        rfk_fragment_weights &w) {
        rfk_unpack_dots<TYPE>::run(raw, lane, w);
    }
};

/* Load the column's part of a fragment. */
template <int TYPE> RFK_DEVICE void rfk_load_x(const rfk_column &c, uint32_t fragment, rfk_fragment_x &x) {
    if (TYPE >= RFK_OTHER) { /* a unit */
        x.piece[0] = c.piece[fragment];
        x.piece[1] = c.piece[2 * c.n_fragments + fragment];
        x.scale.x = c.scale[fragment];
        return;
    }
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < 4; j++) x.piece[j] = c.piece[j * c.n_fragments + fragment];
    x.scale = reinterpret_cast<const float4 *>(c.scale)[fragment];
}

/* Store act(gate) * sum of a row and column, the results of two products, and return it. ARGS: rfk_fused_args or
 * rfk_few_args. */
template <class ARGS> RFK_DEVICE float rfk_put_glu(const ARGS &a, uint32_t row, uint32_t col, float gate, float sum) {
    const rfk_product &gates = a.part[0], &p = a.part[1];
    if (gates.bias) gate += rfk_load_any(gates.bias, gates.bias_type, row);
    if (p.bias) sum += rfk_load_any(p.bias, p.bias_type, row);
    p.out[(size_t)col * p.out_stride + row] = sum;
    const float z = a.is_gelu ? rfk_gelu_z(gate) : gate;
    return gates.out[(size_t)col * gates.out_stride + row] = rfk_mul(gate / (1.0f + expf(-z)), sum);
}

/* Store the epilogue of a row's sum, or act(gate) * sum, and return it. before: the value there, if the
 * product accumulates. */
RFK_DEVICE float rfk_fused_epilogue(const rfk_fused_args &a, const rfk_product &p, uint32_t row, float gate, float sum,
                                float before, const rfk_product_sum &sums) {
    if (a.sum.n_members) {
        const float part = rfk_epilogue(p, row, sum, before);
        rfk_push(a.sum, sums, row, part);
        return part;
    }
    return a.glu ? rfk_put_glu(a, row, 0, gate, sum) : rfk_put_on(p, row, 0, sum, before);
}

/* Quantize a fused matvec's results from `first` on, those of one pass a wave. */
template <int WAVE>
RFK_DEVICE void rfk_quantize_results(const rfk_fused_args &a, uint32_t first, uint32_t n_out, rfk_fused_shared &s) {
    if (threadIdx.x / WAVE >= RFK_FUSED_PASSES) return; /* a wave quantizes the 32 results of one pass */
    const uint32_t lane = threadIdx.x % WAVE;
    const bool inside = lane < 8 && first < n_out;
    float x[4] = {0, 0, 0, 0};
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < 4; k++)
        if (inside) x[k] = s.out[threadIdx.x / WAVE][4 * lane + k];
    if (a.to_norm) {
        float squares = rfk_group_squares<WAVE>(x);
        if (inside && lane == 0) a.to_squares[first / 32] = squares;
        RFK_UNROLL(4)
        for (uint32_t k = 0; k < 4; k++)
            if (inside) x[k] *= s.to_norm[threadIdx.x / WAVE][4 * lane + k];
    }
    rfk_quantize4<WAVE>(a.to8, 0, n_out, first / 4 + lane, x, inside);
}

/* The sums of the rows that a block has written parts of, `each` a pass. */
RFK_DEVICE void rfk_take_sums(const rfk_members_args &a, uint32_t number, uint32_t n_blocks, uint32_t each,
                              uint32_t n_out, rfk_fused_shared &s) {
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < RFK_FUSED_PASSES * each; i += blockDim.x) {
        const uint32_t row = (i / each * n_blocks + number) * each + i % each;
        if (row >= n_out) return;
        float &own = s.out[i / each][i % each];
        const float before = a.accumulate ? a.out[row] : 0.0f, sum = rfk_take(a, s.sum, row, own);
        a.out[row] = own = a.accumulate ? sum + before : sum;
    }
}

/* A block's rows, a wave each; glu: rows of the two products in turn. U fragments are in flight a lane. */
template <int TYPE, int WAVE, int U>
RFK_DEVICE void rfk_fused_block(const rfk_fused_args &a, const rfk_product &p, uint32_t number, uint32_t n_blocks,
                               rfk_column c, rfk_fused_shared &s) {
    typedef rfk_fragments<TYPE> F;
    const uint32_t n_fragments = a.n_in / F::VALUES, lane = threadIdx.x % WAVE, n_out = p.n_out, glu = a.glu,
                   step = n_blocks * (RFK_FUSED_BLOCK / WAVE);
    const uint32_t mine = lane < n_fragments ? (n_fragments - lane + WAVE - 1) / WAVE : 0, /* this lane's */
        rounds = (n_fragments + WAVE * U - 1) / (WAVE * U);
    uint32_t row = number * (RFK_FUSED_BLOCK / WAVE) + threadIdx.x / WAVE, second = 0, round = 0, pass = 0;
    typename F::loaded raw[U];
    rfk_fragment_at at;
    float sum = 0, gate = 0;
    c.order = F::ORDER;
    c.wave = WAVE;
    c.has_min = rfk_format<TYPE>::HAS_MIN;
    c.offset = F::OFFSET;
    float weight[4], to_norm = 0;
    rfk_prefetch_norms(a);
    rfk_norm_weights(a, threadIdx.x, weight);
    const uint32_t mine_to = number * 32 + threadIdx.x / 32 * step + threadIdx.x % 32;
    if (a.to_norm && threadIdx.x < RFK_FUSED_PASSES * 32 && mine_to < n_out)
        to_norm = rfk_load_any(a.to_norm, a.to_norm_type, mine_to);
    F::template begin<WAVE>(p.row0 + row, a.n_in, lane, at);
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < (uint32_t)U; k++) {
        if (row < n_out && k < mine) F::fetch(p.w, at, raw[k]);
        F::template next<WAVE>(at);
    }
    rfk_fill_grid<rfk_grid_of<TYPE>::IS>(c.grid, RFK_FUSED_BLOCK);
    rfk_wait_previous();
    if (a.to_norm && threadIdx.x < RFK_FUSED_PASSES * 32) s.to_norm[threadIdx.x / 32][threadIdx.x % 32] = to_norm;
    if (a.sum.n_members && threadIdx.x == 0) rfk_begin_sum(a.sum, s.sum);
    rfk_fill_column<WAVE>(a, c, weight, s, RFK_FUSED_BLOCK);
    float before = lane == 0 && p.accumulate && row < n_out ? p.out[row] : 0.0f;
    while (row < n_out) {
        uint32_t next_round = round + 1, next_row = row, next_second = second;
        if (next_round == rounds) { /* the row is done: next row */
            next_round = 0;
            next_second = glu & (second ^ 1);
            if (!next_second) next_row += step;
            F::template begin<WAVE>((next_second ? a.part[1].row0 : p.row0) + next_row, a.n_in, lane, at);
        }
        RFK_UNROLL(4)
        for (uint32_t k = 0; k < (uint32_t)U; k++) {
            uint32_t i = round * U + k, fragment = lane + i * WAVE;
            if (i < mine) {
                rfk_fragment_x x;
                rfk_load_x<TYPE>(c, fragment, x);
                rfk_fragment_weights w;
                rfk_unpack_by<TYPE, rfk_grid_of<TYPE>::IS>::run(raw[k], lane, c.grid, w);
                sum = rfk_dot_unpacked<TYPE>(w, rfk_is_q2<TYPE>(raw[k]), x, sum);
            }
            if (next_row < n_out && next_round * U + k < mine) {
                if (next_second) F::fetch(a.part[1].w, at, raw[k]);
                else F::fetch(p.w, at, raw[k]);
            }
            F::template next<WAVE>(at);
        }
        if (next_round == 0) {
            sum = rfk_wave_sum<WAVE>(sum);
            if (next_second) gate = sum;
            else if (lane == 0) {
                const float made =
                    rfk_fused_epilogue(a, p, row, rfk_mul(gate, s.factor), rfk_mul(sum, s.factor), before, s.sum);
                if (a.to8.q || a.sum.n_members) s.out[pass][threadIdx.x / WAVE] = made;
                if (p.accumulate && next_row < n_out) before = p.out[next_row];
            }
            pass += !next_second;
            sum = 0;
        }
        row = next_row;
        second = next_second;
        round = next_round;
    }
    if (a.sum.n_members) rfk_take_sums(a.sum, number, n_blocks, RFK_FUSED_BLOCK / WAVE, n_out, s);
    if (!a.to8.q) return;
    __syncthreads();
    rfk_quantize_results<WAVE>(a, number * 32 + threadIdx.x / WAVE * step, n_out, s);
}

/* Types whose fragments have 64 values, and how many of them in flight fit. Two of Q8_0, of 68 bytes, would spill. */
#define RFK_FUSED_TYPES(X)                                                                                            \
    X(RF_TYPE_Q8_0, 1) X(RF_TYPE_Q4_0, 2) X(RF_TYPE_Q4_1, 2) X(RF_TYPE_Q5_0, 2)                                      \
    X(RF_TYPE_Q5_1, 2) X(RF_TYPE_Q4_K, 2) X(RF_TYPE_Q5_K, 2) X(RF_TYPE_Q6_K, 2)

/* Bytes of the grid that blocks keep in shared memory: of a type; of the largest among a launch's products. */
static uint32_t rfk_grid_bytes_of(uint32_t type) {
#define RFK_GRID_CASE(TYPE) case TYPE: return RFK_GRID_BYTES(TYPE);
    switch (type) {
        RFK_GRID_TYPES(RFK_GRID_CASE)
    default: return 0;
    }
#undef RFK_GRID_CASE
}

static uint32_t rfk_grid_bytes(const rfk_product *part, uint32_t n) {
    uint32_t max = 0;
    for (uint32_t i = 0; i < n; i++)
        if (rfk_grid_bytes_of(part[i].type) > max) max = rfk_grid_bytes_of(part[i].type);
    return max;
}

static uint32_t rfk_max_in_flight(uint32_t type) {
#define RFK_MAX_CASE(TYPE, max) \
    case TYPE: return max < RFK_MAX_IN_FLIGHT ? max : RFK_MAX_IN_FLIGHT;
    switch (type) {
        RFK_FUSED_TYPES(RFK_MAX_CASE)
    default: return 1;
    }
#undef RFK_MAX_CASE
}

/* Types that a kernel is compiled for: those of Q4_K_M or Q5_K_M files, all of RFK_FUSED_TYPES, others, or one alone.
 * Less code takes less time to fetch, and does not lose registers to other types. One row on an H200: 8B, Q4_K_M 2 to
 * 3 %, Q5_K_M 5 %; qwen3moe 30B, IQ4_XS 6 %, Q8_0 3 %. */
enum { RFK_SET_Q4_K_M, RFK_SET_Q5_K_M, RFK_SET_FUSED, RFK_SET_OTHER, RFK_SET_ONE /* + type */ };
static __host__ __device__ constexpr bool rfk_is_in(int set, uint32_t type) {
    return set >= RFK_SET_ONE      ? type == (uint32_t)(set - RFK_SET_ONE)
           : set == RFK_SET_Q4_K_M ? type == RF_TYPE_Q4_K || type == RF_TYPE_Q6_K
           : set == RFK_SET_Q5_K_M ? type == RF_TYPE_Q5_K || type == RF_TYPE_Q6_K
                                   : set == RFK_SET_FUSED;
}

/* grid: the blocks of each product   block RFK_FUSED_BLOCK   LDS 6 KiB and 1.25 bytes a value of the column
 *   reads W once
 * U: fragments in flight a lane, or fewer if the type needs more registers; SET: RFK_SET_OTHER is for RFK_OTHER types,
 * where U does not matter */
template <int WAVE, int U, int SET>
static __global__ void RFK_RESIDENT(RFK_FUSED_BLOCK, RFK_FUSED_RESIDENT) rfk_fused_matvec(rfk_fused_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    RFK_SHARED(rfk_fused_shared, s);
    RFK_DYNAMIC(int4, column);
    uint32_t number, n_blocks;
    const uint32_t which = rfk_find_product(a.part, number, n_blocks);
#if defined(RFK_NVIDIA)
    const rfk_product &p = a.part[which]; /* stays in constant memory: there are no registers for it */
#else
    rfk_product p = a.part[0];
    RFK_UNROLL(4)
    for (uint32_t i = 1; i < RFK_PRODUCTS; i++)
        if (which == i) p = a.part[i]; /* no index that is only known at run time: p would be in memory */
#endif
    const rfk_column c = rfk_column_in(column, a.n_in);
    if (SET == RFK_SET_OTHER) {
#define RFK_ONE_CASE(TYPE) \
    case TYPE: \
        if (rfk_built<TYPE>::is) \
            rfk_fused_block<RFK_ONE(TYPE), WAVE, 1>(a, p, number, n_blocks, c, s); \
        return;
        switch (p.type) {
            RFK_OTHER32_TYPES(RFK_ONE_CASE)
            RFK_OTHER16_TYPES(RFK_ONE_CASE)
            RFK_ONE_CASE(RF_TYPE_Q2_K)
        default: return;
        }
#undef RFK_ONE_CASE
    }
#define RFK_FUSED_CASE(TYPE, max) \
    case TYPE: \
        if (rfk_built<TYPE>::is && rfk_is_in(SET, TYPE)) \
            rfk_fused_block<TYPE, WAVE, (U < max ? U : max)>(a, p, number, n_blocks, c, s); \
        break;
    switch (p.type) {
        RFK_FUSED_TYPES(RFK_FUSED_CASE)
    default: break;
    }
#undef RFK_FUSED_CASE
}

/* Sums over the wave of two values, in every lane. */
template <int WAVE> RFK_DEVICE void rfk_wave_sums(float *x, float *y) {
    const bool odd = threadIdx.x % 2;
    float v = (odd ? *y : *x) + rfk_shuffle_xor<WAVE>(odd ? *x : *y, 1);
    for (int mask = 2; mask < WAVE; mask *= 2) v += rfk_shuffle_xor<WAVE>(v, mask);
    *x = rfk_shuffle<WAVE>(v, 0), *y = rfk_shuffle<WAVE>(v, 1);
}

/* ---- one column, rows in pairs ----
 * On NVIDIA, with the bits of rfk_fused_matvec: a wave takes two rows at a time, of the two products of a GLU or
 * adjacent ones. Both use what a lane has read of the column, and half as many waves leave the registers. A block makes
 * 32 results, then the next 32: of adjacent rows, or, where no block needs 32 to quantize, of eights between those of
 * other blocks, so that all end at the same time. 8B on an H200: Q4_K_M 562 -> 590 tok/s, Q3_K 418 -> 445, IQ3_S
 * 388 -> 437. RFK_OTHER types always run so; of RFK_FUSED_TYPES some models lose up to 1.5 %: there it is the launch
 * config of two fragments in flight, and launch configs are timed. */

#if defined(RFK_NVIDIA)
#define RFK_HAS_PAIRS(dev) true
#elif defined(ROCMFORGE_HIP_EMU)
#define RFK_HAS_PAIRS(dev) ((dev)->direct != 0) /* emulates NVIDIA's matrix unit */
#else
#define RFK_HAS_PAIRS(dev) false
#endif
#define RFK_PAIRS_BLOCK 512u
/* Units of RFK_OTHER types in flight, of each row of the pair. */
#define RFK_PAIRS_UNITS(TYPE) ((TYPE) == RF_TYPE_TQ1_0 ? 2 : 4)
#if defined(RFK_NVIDIA) || defined(ROCMFORGE_HIP_EMU)
/* A result that a lane keeps, of a GLU two products: with as many as a wave has lanes, or all, the lanes finish theirs
 * at once. */
struct rfk_pairs_result {
    uint32_t turn;       /* the wave's pair that it is of: so many before it */
    uint32_t place, row; /* among the block's results; in the product */
    float before;        /* what is there, if the product accumulates */
    float made[2];
};
/* The row of a block's result `place`: blocks take adjacent rows in turn. */
RFK_DEVICE uint32_t rfk_pairs_row(const rfk_fused_args &a, uint32_t place, uint32_t number, uint32_t n_blocks) {
    const uint32_t log2 = a.rows_log2;
    return ((place >> log2) * n_blocks + number) << log2 | (place & ((1u << log2) - 1));
}
RFK_DEVICE void rfk_place_result(const rfk_fused_args &a, const rfk_product &p, uint32_t number, uint32_t n_blocks,
                                 rfk_pairs_result &o) {
    o.row = rfk_pairs_row(a, o.place, number, n_blocks);
    o.before = p.accumulate && o.row < p.n_out ? p.out[o.row] : 0.0f;
}
RFK_DEVICE void rfk_finish_results(const rfk_fused_args &a, const rfk_product &p, uint32_t n_made,
                                   const rfk_pairs_result &o, rfk_fused_shared &s) {
    if (o.turn >= n_made || o.row >= p.n_out) return;
    const float result = rfk_fused_epilogue(a, p, o.row, rfk_mul(o.made[0], s.factor), rfk_mul(o.made[1], s.factor),
                                            o.before, s.sum);
    if (a.to8.q || a.sum.n_members) s.out[o.place / 32][o.place % 32] = result;
}

template <int TYPE, int U>
RFK_DEVICE void rfk_pairs_block(const rfk_fused_args &a, const rfk_product &p, uint32_t number, uint32_t n_blocks,
                                rfk_column c, rfk_fused_shared &s) {
    typedef rfk_fragments<TYPE> F;
    const uint32_t n_fragments = a.n_in / F::VALUES, lane = threadIdx.x % 32, n_out = p.n_out, each = a.glu ? 1 : 2,
                   waves = RFK_PAIRS_BLOCK / 32, rounds = (n_fragments + 32 * U - 1) / (32 * U),
                   mine = lane < n_fragments ? (n_fragments - lane + 31) / 32 : 0; /* this lane's */
    const rfk_product &other = a.glu ? a.part[1] : p;
    uint32_t place = threadIdx.x / 32 * each, row = rfk_pairs_row(a, place, number, n_blocks), round = 0;
    typename F::loaded raw[U][2];
    rfk_fragment_at at[2];
    float sum[2] = {0, 0};
    c.order = F::ORDER, c.wave = 32, c.has_min = rfk_format<TYPE>::HAS_MIN, c.offset = F::OFFSET;
    float weight[4], to_norm = 0;
    rfk_prefetch_norms(a);
    rfk_norm_weights(a, threadIdx.x, weight);
    const uint32_t mine_to = (threadIdx.x / 32 * n_blocks + number) * 32 + threadIdx.x % 32;
    if (a.to_norm && threadIdx.x < RFK_FUSED_PASSES * 32 && mine_to < n_out)
        to_norm = rfk_load_any(a.to_norm, a.to_norm_type, mine_to);
    F::template begin<32>(p.row0 + row, a.n_in, lane, at[0]);
    F::template begin<32>(other.row0 + (a.glu || row + 1 >= n_out ? row : row + 1), a.n_in, lane, at[1]);
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < (uint32_t)U; k++) {
        if (row < n_out && k < mine) F::fetch(p.w, at[0], raw[k][0]), F::fetch(other.w, at[1], raw[k][1]);
        F::template next<32>(at[0]);
        F::template next<32>(at[1]);
    }
    rfk_fill_grid<rfk_grid_of<TYPE>::IS>(c.grid, RFK_PAIRS_BLOCK);
    rfk_wait_previous();
    if (a.to_norm && threadIdx.x < RFK_FUSED_PASSES * 32) s.to_norm[threadIdx.x / 32][threadIdx.x % 32] = to_norm;
    if (a.sum.n_members && threadIdx.x == 0) rfk_begin_sum(a.sum, s.sum);
    rfk_fill_column<32>(a, c, weight, s, RFK_PAIRS_BLOCK);
    rfk_pairs_result own = {lane / each, place + lane / each * waves * each + lane % each, 0, 0, {0, 0}};
    rfk_place_result(a, p, number, n_blocks, own);
    uint32_t n_made = 0;
    while (row < n_out) {
        uint32_t next_round = round + 1, next_place = place, next_row = row;
        if (next_round == rounds) { /* the rows are done: next two */
            next_round = 0;
            next_place += waves * each;
            next_row = rfk_pairs_row(a, next_place, number, n_blocks);
            F::template begin<32>(p.row0 + next_row, a.n_in, lane, at[0]);
            F::template begin<32>(other.row0 + (a.glu || next_row + 1 >= n_out ? next_row : next_row + 1), a.n_in, lane,
                                  at[1]);
        }
        RFK_UNROLL(4)
        for (uint32_t k = 0; k < (uint32_t)U; k++) {
            const uint32_t i = round * U + k;
            if (i < mine) {
                rfk_fragment_x x;
                rfk_load_x<TYPE>(c, lane + i * 32, x);
                RFK_UNROLL(2)
                for (int j = 0; j < 2; j++) {
                    rfk_fragment_weights w;
                    rfk_unpack_by<TYPE, rfk_grid_of<TYPE>::IS>::run(raw[k][j], lane, c.grid, w);
                    sum[j] = rfk_dot_unpacked<TYPE>(w, rfk_is_q2<TYPE>(raw[k][j]), x, sum[j]);
                }
            }
            if (next_row < n_out && next_round * U + k < mine)
                F::fetch(p.w, at[0], raw[k][0]), F::fetch(other.w, at[1], raw[k][1]);
            F::template next<32>(at[0]);
            F::template next<32>(at[1]);
        }
        if (next_round == 0) {
            rfk_wave_sums<32>(&sum[0], &sum[1]);
            if (own.turn == n_made++) own.made[0] = sum[0], own.made[1] = a.glu || lane % 2 ? sum[1] : sum[0];
            if (n_made * each == 32 || next_row >= n_out) {
                rfk_finish_results(a, p, n_made, own, s);
                n_made = 0;
                own.place += 32 * waves;
                rfk_place_result(a, p, number, n_blocks, own);
            }
            sum[0] = sum[1] = 0;
        }
        place = next_place, row = next_row, round = next_round;
    }
    if (a.sum.n_members) rfk_take_sums(a.sum, number, n_blocks, 32, n_out, s);
    if (!a.to8.q) return;
    __syncthreads();
    rfk_quantize_results<32>(a, (threadIdx.x / 32 * n_blocks + number) * 32, n_out, s);
}

/* grid: the blocks of each product   block RFK_PAIRS_BLOCK   LDS 6 KiB and 1.25 bytes a value of the column
 *   reads W once */
template <int SET> static __global__ void RFK_RESIDENT(RFK_PAIRS_BLOCK, 1) rfk_pairs_matvec(rfk_fused_args a) {
    RFK_SHARED(rfk_fused_shared, s);
    RFK_DYNAMIC(int4, column);
    uint32_t number, n_blocks;
    const uint32_t which = rfk_find_product(a.part, number, n_blocks);
    const rfk_product &p = a.part[which]; /* stays in constant memory */
    const rfk_column c = rfk_column_in(column, a.n_in);
#define RFK_PAIRS_CASE(TYPE, max) \
    case TYPE: \
        if (rfk_built<TYPE>::is && rfk_is_in(SET, TYPE)) \
            rfk_pairs_block<TYPE, max>(a, p, number, n_blocks, c, s); \
        break;
#define RFK_PAIRS_UNITS_CASE(TYPE) \
    case TYPE: \
        if (rfk_built<TYPE>::is && (SET == RFK_SET_OTHER || rfk_is_in(SET, TYPE))) \
            rfk_pairs_block<RFK_ONE(TYPE), RFK_PAIRS_UNITS(TYPE)>(a, p, number, n_blocks, c, s); \
        break;
    switch (p.type) {
        RFK_FUSED_TYPES(RFK_PAIRS_CASE)
        RFK_OTHER32_TYPES(RFK_PAIRS_UNITS_CASE)
        RFK_OTHER16_TYPES(RFK_PAIRS_UNITS_CASE)
        RFK_PAIRS_UNITS_CASE(RF_TYPE_Q2_K)
    default: break;
    }
#undef RFK_PAIRS_UNITS_CASE
#undef RFK_PAIRS_CASE
}
/* The set of a launch's types that are all of RFK_FUSED_TYPES. */
static int rfk_set_of(const rfk_product *part) {
    bool is[2] = {true, true}; /* Q4_K_M, Q5_K_M */
    for (uint32_t i = 0, from = 0; i < RFK_PRODUCTS; from = part[i++].end_block)
        for (int set = 0; set < 2; set++)
            if (part[i].end_block > from) is[set] = is[set] && rfk_is_in(set, part[i].type);
    return is[RFK_SET_Q4_K_M] ? RFK_SET_Q4_K_M : is[RFK_SET_Q5_K_M] ? RFK_SET_Q5_K_M : RFK_SET_FUSED;
}
/* That of a launch of one row: of its type alone, but of Q4_K_M or Q5_K_M if its types are in one of these. */
static int rfk_row_set_of(const rfk_product *part, bool other) {
    const int set = other ? RFK_SET_OTHER : rfk_set_of(part);
    bool one = set >= RFK_SET_FUSED;
    for (uint32_t i = 0, from = 0; i < RFK_PRODUCTS; from = part[i++].end_block)
        one = one && (part[i].end_block == from || part[i].type == part[0].type);
    return one ? RFK_SET_ONE + (int)part[0].type : set;
}
/* The set of kernels for a type alone. Q4_K, Q5_K and Q6_K have none, as rfk_row_set_of says: no gain, or 2 % less. */
static constexpr int rfk_set_of_one(int type) {
    return rfk_is_in(RFK_SET_Q4_K_M, type) || rfk_is_in(RFK_SET_Q5_K_M, type) ? RFK_SET_FUSED : RFK_SET_ONE + type;
}
static void (*rfk_find_pairs(int set))(rfk_fused_args) {
#define RFK_PAIRS_ONE(TYPE) \
    case RFK_SET_ONE + (int)TYPE: return rfk_pairs_matvec<rfk_set_of_one(RFK_BUILT(TYPE))>;
#define RFK_PAIRS_ONE_FUSED(TYPE, max) RFK_PAIRS_ONE(TYPE)
    switch (set) {
    case RFK_SET_Q4_K_M: return rfk_pairs_matvec<RFK_SET_Q4_K_M>;
    case RFK_SET_Q5_K_M: return rfk_pairs_matvec<RFK_SET_Q5_K_M>;
    case RFK_SET_OTHER: return rfk_pairs_matvec<RFK_SET_OTHER>;
        RFK_FUSED_TYPES(RFK_PAIRS_ONE_FUSED)
        RFK_OTHER32_TYPES(RFK_PAIRS_ONE)
        RFK_OTHER16_TYPES(RFK_PAIRS_ONE)
        RFK_PAIRS_ONE(RF_TYPE_Q2_K)
    default: return rfk_pairs_matvec<RFK_SET_FUSED>;
    }
#undef RFK_PAIRS_ONE_FUSED
#undef RFK_PAIRS_ONE
}
/* One fragment in flight, types of RFK_FUSED_TYPES. */
static void (*rfk_find_fused_one(int set))(rfk_fused_args) {
#define RFK_FUSED_ONE(TYPE, max) \
    case RFK_SET_ONE + (int)TYPE: return rfk_fused_matvec<32, 1, rfk_set_of_one(RFK_BUILT(TYPE))>;
    switch (set) {
        RFK_FUSED_TYPES(RFK_FUSED_ONE)
    default: return rfk_fused_matvec<32, 1, RFK_SET_FUSED>;
    }
#undef RFK_FUSED_ONE
}
#endif

/* ---- mixtures ----
 * Experts of a decode step, the shared experts as one more choice if there are any: from the products of the gates and
 * of what they multiply to their activation, or from there to the weighted sum (down). Waves take results in turn,
 * lanes fragments, as in the fused matvec. The sum is one long dot product: of the chosen experts' rows, one behind the
 * other, and of what each reads, multiplied by the expert's weight. */

#define RFK_MIXTURE_CHOICES 17u /* at most, the shared experts included */
struct rfk_mixture_args {
    rfk_experts_args e;        /* gates or down; e.x: floats; down: e.out is the sum */
    uint32_t n_experts;
    rfk_route_args choose;     /* logits NULL: the route is there; else it is made here and goes to choose.out */
    const rfk_weight *w2;      /* what the gates multiply */
    const uint8_t *bias2, *factor2;
    uint32_t bias2_type, factor2_type, row2, activation;
    rfk_weight shared[2];      /* gate and up, or down */
    uint32_t n_shared;         /* rows of gate, or columns of down; 0: no shared experts */
    const float *shared_x;     /* down: their input */
    float *shared_out;         /* results of their activation */
    const float *share;        /* down: their weight before the sigmoid; NULL: 1 */
    uint32_t shared_stride, share_stride;
    float scale, shared_scale; /* down */
    uint32_t accumulate;       /* down: add to e.out */
};

struct rfk_mixture_shared {
    rfk_weight w[2][RFK_MIXTURE_CHOICES]; /* of the choices */
    uint32_t id[RFK_MIXTURE_CHOICES];
    float weight[RFK_MIXTURE_CHOICES];    /* down: of a choice in the sum */
    float values[RFK_CHOOSE_FROM];        /* rfk_choose */
    float factor[2][RFK_MIXTURE_CHOICES]; /* of the products; NaN: an expert that is not loaded must not go unnoticed */
};

/* How a lane reads a type: fragments of 64, or for the other types units of 32, whose column has two pieces and a
 * scale. */
template <int TYPE> struct rfk_mixture_reads32 {
    static const int VALUES = 32, ORDER = RFK_ORDER_LINEAR;
    typedef rfk_raw loaded;
    template <int WAVE>
    RFK_DEVICE void fetch(const rfk_weight &w, uint32_t row, uint32_t n_in, uint32_t u, loaded &raw) {
        rfk_format<TYPE>::fetch(rfk_read_once(w), 0, row * (n_in / 32) + u, raw);
    }
    struct x {
        int4 piece[2];
        float d;
    };
    template <int WAVE> RFK_DEVICE int4 order(const int4 &q) { return q; }
    RFK_DEVICE void load_x(const rfk_column &c, uint32_t u, x &to) {
        to.piece[0] = c.piece[u], to.piece[1] = c.piece[c.n_fragments + u];
        to.d = c.scale[u];
    }
    RFK_DEVICE float dot(const loaded &raw, const x &x, uint32_t lane, float total) {
        typedef rfk_format<TYPE> F;
        rfk_unit unit;
        F::unpack(raw, lane, unit); /* units of a block are in adjacent lanes */
        const int first = rfk_dot16(unit.q, x.piece[0], RFK_DOT_START);
        if (F::SCALES == 1 && !F::HAS_MIN)
            return rfk_fma(rfk_mul(unit.d[0], x.d), rfk_dot_to_float(rfk_dot16(unit.q + 4, x.piece[1], first)), total);
        float sum = rfk_fma(unit.d[1], rfk_dot_to_float(rfk_dot16(unit.q + 4, x.piece[1], RFK_DOT_START)),
                            rfk_mul(unit.d[0], rfk_dot_to_float(first)));
        if (F::HAS_MIN) {
            const int ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
            sum -= rfk_fma(unit.m[1], (float)rfk_dot16(ones, x.piece[1], 0),
                           rfk_mul(unit.m[0], (float)rfk_dot16(ones, x.piece[0], 0)));
        }
        return rfk_fma(x.d, sum, total);
    }
};
template <int TYPE> struct rfk_mixture_reads : rfk_mixture_reads32<TYPE> {};
template <int TYPE> struct rfk_mixture_reads64 {
    static const int VALUES = 64, ORDER = rfk_fragments<TYPE>::ORDER;
    typedef typename rfk_fragments<TYPE>::loaded loaded;
    template <int WAVE>
    RFK_DEVICE void fetch(const rfk_weight &w, uint32_t row, uint32_t n_in, uint32_t i, loaded &raw) {
        rfk_fragment_at at;
        rfk_fragments<TYPE>::template begin<WAVE>(row, n_in, i, at);
        rfk_fragments<TYPE>::fetch(w, at, raw);
    }
    typedef rfk_fragment_x x;
    template <int WAVE> RFK_DEVICE int4 order(const int4 &q) { return q; }
    RFK_DEVICE void load_x(const rfk_column &c, uint32_t i, x &to) { rfk_load_x<TYPE>(c, i, to); }
    RFK_DEVICE float dot(const loaded &raw, const x &x, uint32_t lane, float total) {
        return rfk_dot_fragment<TYPE>(raw, x, lane, total);
    }
};
#define RFK_MIXTURE_TYPES64(X)                                                                                        \
    X(RF_TYPE_Q4_0) X(RF_TYPE_Q4_1) X(RF_TYPE_Q5_0) X(RF_TYPE_Q5_1) X(RF_TYPE_Q4_K) X(RF_TYPE_Q5_K) X(RF_TYPE_Q6_K)
#define RFK_READS64(TYPE) template <> struct rfk_mixture_reads<TYPE> : rfk_mixture_reads64<TYPE> {};
RFK_MIXTURE_TYPES64(RFK_READS64)
#undef RFK_READS64

/* Types of a class that have kernels of their own: common in mixtures, and faster so (qwen3moe 30B IQ4_XS on an H200:
 * 478 -> 579 tok/s). Matrices that share a launch are of one of them, or of one class of the others. */
#define RFK_MIXTURE_CODES(X) X(RF_TYPE_MXFP4) X(RF_TYPE_IQ4_XS) X(RF_TYPE_IQ4_NL)
#define RFK_MIXTURE_OWN_TYPES(X) RFK_MIXTURE_CODES(X) X(RF_TYPE_NVFP4)
#if defined(RFK_HAS_PERMUTE)
/* x lies in the order of the nibbles, which stay as they are (rfk_split_codes). */
template <int TYPE> struct rfk_mixture_reads_codes : rfk_mixture_reads32<TYPE> {
    /* From values 16i .. 16i + 15 in the lanes of a pair to the order of the nibbles. */
    template <int WAVE> RFK_DEVICE int4 order(const int4 &q) {
        const bool odd = threadIdx.x % 2;
        const int first = rfk_shuffle_xor<WAVE>(odd ? q.x : q.z, 1), second = rfk_shuffle_xor<WAVE>(odd ? q.y : q.w, 1),
                  low[2] = {odd ? first : q.x, odd ? second : q.y}, high[2] = {odd ? q.z : first, odd ? q.w : second};
        return rfk_interleave_eights(low[0], low[1], high[0], high[1]);
    }
    RFK_DEVICE float dot(const rfk_raw &raw, const typename rfk_mixture_reads32<TYPE>::x &x, uint32_t lane,
                         float total) {
        int words[4];
        rfk_unit unit;
        rfk_format<TYPE>::unpack(raw, lane, unit); /* for the scale */
        rfk_words(raw.a, words);
        const int first = rfk_dot_codes<TYPE>(words, x.piece[0], RFK_DOT_START),
                  all = rfk_dot_codes<TYPE>(words + 2, x.piece[1], first);
        return rfk_fma(rfk_mul(unit.d[0], x.d), rfk_dot_to_float(all), total);
    }
};
#define RFK_READS_CODES(TYPE) template <> struct rfk_mixture_reads<TYPE> : rfk_mixture_reads_codes<TYPE> {};
RFK_MIXTURE_CODES(RFK_READS_CODES)
#undef RFK_READS_CODES
#endif

#define RFK_OR_IS(T) || TYPE == T
template <int TYPE> struct rfk_mixture_own {
    static const bool IS = false RFK_MIXTURE_OWN_TYPES(RFK_OR_IS);
};
#undef RFK_OR_IS

/* Pairs of fragments or units of a lane in flight: of the gate and of what it multiplies, or two of a row of down. */
#define RFK_MIXTURE_IN_FLIGHT(TYPE) (rfk_mixture_own<TYPE>::IS ? 2 : 1)
#if defined(ROCMFORGE_HIP_EMU)
#define RFK_MIXTURE_BLOCK(TYPE) 256u
#elif defined(RFK_NVIDIA)
#define RFK_MIXTURE_BLOCK(TYPE) ((TYPE) == RFK_OTHER16 ? 512u : 768u) /* 80 registers a thread fill a multiprocessor */
#else
#define RFK_MIXTURE_BLOCK(TYPE) 512u /* 128 on gfx906: fewer would spill */
#endif

/* Values 16i .. 16i + 15 of what the row's experts read; down: the last n_shared of all are the shared experts'. */
template <bool DOWN>
RFK_DEVICE void rfk_mixture_x(const rfk_mixture_args &a, uint32_t i, uint32_t all, float *x) {
    const uint32_t n = DOWN ? all - a.n_shared : all;
    const float *from = a.e.x + (size_t)blockIdx.y * a.e.x_stride + 16 * i;
    if (DOWN && 16 * i >= n) from = a.shared_x + (size_t)blockIdx.y * a.shared_stride + (16 * i - n);
    const bool inside = 16 * i < all;
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < 4; k++) {
        x[4 * k] = x[4 * k + 1] = x[4 * k + 2] = x[4 * k + 3] = 0;
        if (inside) rfk_get4(from, k, 16, x + 4 * k);
    }
}

/* The column of `values` values. */
template <int TYPE, int WAVE>
RFK_DEVICE void rfk_mixture_column(rfk_column &c, int4 *memory, uint32_t values) {
    typedef rfk_mixture_reads<TYPE> R;
    c.n_fragments = values / R::VALUES;
    c.piece = memory;
    c.scale = reinterpret_cast<float *>(memory + R::VALUES / 16 * c.n_fragments);
    c.order = R::ORDER;
    c.wave = WAVE;
    c.has_min = rfk_format<TYPE>::HAS_MIN;
    c.offset = rfk_fragments<TYPE>::OFFSET;
}

/* Quantize the column's chunk i and store it. All lanes of a wave take part. */
template <int TYPE, int WAVE, bool DOWN>
RFK_DEVICE void rfk_mixture_fill(const rfk_mixture_args &a, const rfk_column &c, uint32_t i, uint32_t values,
                                 rfk_int8_chunk &chunk) {
    typedef rfk_mixture_reads<TYPE> R;
    uint32_t piece = i % 2, fragment = i / 2;
    float x[16];
    rfk_mixture_x<DOWN>(a, i, values, x);
    rfk_quantize_chunk<WAVE>(x, chunk);
    if (R::VALUES == 64) fragment = rfk_chunk_fragment(c, i, &piece);
    const int4 q = R::template order<WAVE>(chunk.q);
    if (16 * i < values) c.piece[piece * c.n_fragments + fragment] = q;
}

/* Store its scales. weight: 1, or that of the choice that reads it (down). */
template <int TYPE>
RFK_DEVICE void rfk_mixture_set_scale(const rfk_column &c, uint32_t i, const rfk_int8_chunk &chunk, float weight) {
    const float d = rfk_mul(chunk.d, weight);
    if (rfk_mixture_reads<TYPE>::VALUES == 64) rfk_put_scale(c, i, d, chunk.sum + chunk.other);
    else if (i % 2 == 0) c.scale[i / 2] = d;
}

/* Copy what a type's loads need of a matrix's description. */
template <int TYPE> RFK_DEVICE void rfk_copy_weight(rfk_weight &to, const rfk_weight &from) {
    const uint32_t planes = TYPE == RF_TYPE_Q4_K || TYPE == RF_TYPE_Q5_K ? 1 : rfk_mixture_own<TYPE>::IS ? 2 : 4;
    RFK_UNROLL(4)
    for (uint32_t i = 0; i < planes; i++) to.plane[i] = from.plane[i];
    if (TYPE >= RFK_OTHER32) to.type = from.type;
}

/* The choices of the row and their matrices, by one wave. The shared experts' are copied apart: clang would join both
 * copies to one, which reads the kernel's arguments from private memory. */
template <int TYPE, int WAVE, bool DOWN>
RFK_DEVICE void rfk_find_choices(const rfk_mixture_args &a, rfk_mixture_shared &s) {
    const uint32_t k = threadIdx.x % WAVE, n_used = a.e.n_used;
    if (k == 0 && a.n_shared) {
        rfk_copy_weight<TYPE>(s.w[0][n_used], a.shared[0]);
        if (!DOWN) rfk_copy_weight<TYPE>(s.w[1][n_used], a.shared[1]);
        s.factor[0][n_used] = s.factor[1][n_used] = 1; /* shared experts have no factor and no bias */
        s.weight[n_used] =
            a.shared_scale * (a.share ? 1.0f / (1.0f + expf(-a.share[(size_t)blockIdx.y * a.share_stride])) : 1.0f);
    }
    rfk_chosen own = {0, 0};
    if (!DOWN && a.choose.logits) own = rfk_choose<WAVE>(a.choose, blockIdx.y, s.values);
    if (k >= n_used) return;
    if (DOWN || !a.choose.logits) {
        const float *route = a.e.route + (size_t)blockIdx.y * a.e.route_stride;
        own.id = reinterpret_cast<const uint32_t *>(route)[k];
        own.weight = route[n_used + k];
    }
    const uint32_t id = own.id;
    s.id[k] = id;
    rfk_copy_weight<TYPE>(s.w[0][k], a.e.w[id]);
    if (!DOWN) rfk_copy_weight<TYPE>(s.w[1][k], a.w2[id]);
    float factor = a.e.factor ? rfk_load_any(a.e.factor, a.e.factor_type, id) : 1.0f;
    if (!DOWN && a.choose.logits && blockIdx.x == 0) {
        float *out = a.choose.out + (size_t)blockIdx.y * a.choose.out_stride;
        reinterpret_cast<uint32_t *>(out)[k] = id;
        out[n_used + k] = own.weight;
    }
    s.factor[0][k] = s.w[0][k].plane[0] ? factor : NAN;
    if (DOWN) {
        s.factor[1][k] = own.weight * a.scale; /* of the bias */
        s.weight[k] = s.factor[1][k] * s.factor[0][k];
        return;
    }
    factor = a.factor2 ? rfk_load_any(a.factor2, a.factor2_type, id) : 1.0f;
    s.factor[1][k] = s.w[1][k].plane[0] ? factor : NAN;
}

/* What the waves of a block compute: n_items results, `step` from a wave's one to its next. A result is one dot product
 * of n_fragments (down: of all choices' and the shared experts', `all`), or two. A lane has `rounds` pairs of fragments
 * of a result. */
struct rfk_mixture_shape {
    uint32_t n_items, first, step, n_fragments, all, rounds;
    float inverse; /* 1 / n_fragments */
};
/* Where a wave is: the results that are left to it, the round, and the choice (not down) and row. */
struct rfk_mixture_cursor {
    uint32_t left, round, k, row;
};
template <bool DOWN> RFK_DEVICE void rfk_mixture_row(const rfk_mixture_args &a, rfk_mixture_cursor &at) {
    while (!DOWN && at.k < a.e.n_used && at.row >= a.e.n_out) at.row -= a.e.n_out, at.k++;
}
template <bool DOWN>
RFK_DEVICE rfk_mixture_cursor rfk_mixture_begin(const rfk_mixture_args &a, const rfk_mixture_shape &shape) {
    rfk_mixture_cursor at = {0, 0, 0, shape.first};
    if (shape.first < shape.n_items) at.left = (shape.n_items - shape.first + shape.step - 1) / shape.step;
    rfk_mixture_row<DOWN>(a, at);
    return at;
}
/* Returns whether the result is complete. */
template <bool DOWN>
RFK_DEVICE bool rfk_mixture_next(const rfk_mixture_args &a, const rfk_mixture_shape &shape, rfk_mixture_cursor &at) {
    if (++at.round < shape.rounds) return false;
    at.round = 0;
    at.left--;
    at.row += shape.step;
    rfk_mixture_row<DOWN>(a, at);
    return true;
}

/* Fragment j of a lane's pair in a round, of `all`. */
template <int WAVE, bool DOWN> RFK_DEVICE uint32_t rfk_mixture_fragment(uint32_t round, uint32_t j) {
    return (DOWN ? 2 * round + j : round) * WAVE + threadIdx.x % WAVE;
}

/* Load the lane's pair of a round. */
template <int TYPE, int WAVE, bool DOWN>
RFK_DEVICE void rfk_mixture_fetch(const rfk_mixture_args &a, const rfk_mixture_shared &s,
                                  const rfk_mixture_shape &shape, const rfk_mixture_cursor &at,
                                  typename rfk_mixture_reads<TYPE>::loaded *raw) {
    RFK_UNROLL(2)
    for (uint32_t j = 0; j < 2; j++) {
        uint32_t i = rfk_mixture_fragment<WAVE, DOWN>(at.round, j), k = at.k, n_in = a.e.n_in;
        if (i >= shape.all) continue;
        if (DOWN) {
            k = (uint32_t)(((float)i + 0.5f) * shape.inverse);
            if (k >= a.e.n_used) k = a.e.n_used, n_in = a.n_shared;
            i -= k * shape.n_fragments;
        }
        const uint32_t row = at.row + (k == a.e.n_used ? 0 : !DOWN && j ? a.row2 : a.e.row0);
        const rfk_weight &w = s.w[DOWN ? 0 : j][k];
        if (w.plane[0]) rfk_mixture_reads<TYPE>::template fetch<WAVE>(w, row, n_in, i, raw[j]);
    }
}

/* Add the products of the lane's pair to `sum`: of the gate and of what it multiplies, or down's in [0]. */
template <int TYPE, int WAVE, bool DOWN>
RFK_DEVICE void rfk_mixture_dot(const typename rfk_mixture_reads<TYPE>::loaded *raw, const rfk_column &c,
                                uint32_t round, uint32_t all, float *sum) {
    typedef rfk_mixture_reads<TYPE> R;
    const uint32_t lane = threadIdx.x % WAVE;
    typename R::x x;
    RFK_UNROLL(2)
    for (uint32_t j = 0; j < 2; j++) {
        const uint32_t i = rfk_mixture_fragment<WAVE, DOWN>(round, j);
        if (i >= all) continue;
        if (DOWN || j == 0) R::load_x(c, i, x);
        sum[DOWN ? 0 : j] = R::dot(raw[j], x, lane, sum[DOWN ? 0 : j]);
    }
}

/* What a result needs beside its sums, loaded while they are made: the biases, those of down weighted and added up, and
 * what down adds to. A lane each. */
template <bool DOWN>
RFK_DEVICE void rfk_mixture_before(const rfk_mixture_args &a, const rfk_mixture_shared &s, uint32_t item,
                                   float *before) {
    const uint32_t n_used = a.e.n_used;
    before[0] = before[1] = 0;
    if (DOWN) {
        for (uint32_t k = 0; a.e.bias && k < n_used; k++)
            before[0] += s.factor[1][k] * rfk_load_any(a.e.bias, a.e.bias_type, (size_t)s.id[k] * a.e.n_out + item);
        if (a.accumulate) before[1] = a.e.out[(size_t)blockIdx.y * a.e.out_stride + item];
        return;
    }
    const uint32_t k = item / a.e.n_out;
    if (k >= n_used) return;
    const size_t at = (size_t)s.id[k] * a.e.n_out + (item - k * a.e.n_out);
    if (a.e.bias) before[0] = rfk_load_any(a.e.bias, a.e.bias_type, at);
    if (a.bias2) before[1] = rfk_load_any(a.bias2, a.bias2_type, at);
}

/* Store a result: of the gate and of what it multiplies, or of the weighted sum. A lane each. */
template <bool DOWN>
RFK_DEVICE void rfk_mixture_put(const rfk_mixture_args &a, const rfk_mixture_shared &s, uint32_t item,
                                const float *sum, const float *before) {
    if (DOWN) {
        a.e.out[(size_t)blockIdx.y * a.e.out_stride + item] = before[1] + (sum[0] + before[0]);
        return;
    }
    const uint32_t n_used = a.e.n_used, k = item / a.e.n_out < n_used ? item / a.e.n_out : n_used;
    const float gate = sum[0] * s.factor[0][k] + before[0], up = sum[1] * s.factor[1][k] + before[1];
    float *out = k == n_used ? a.shared_out + (size_t)blockIdx.y * a.shared_stride
                             : a.e.out + (size_t)blockIdx.y * a.e.out_stride + (size_t)k * a.e.out_choice;
    out[item - k * a.e.n_out] =
        a.activation == RF_ACT_OAI ? rfk_activate_oai(gate, up) : rfk_activate(a.activation, gate) * up;
}

/* The wave's results, whose first pairs are on their way. Lane i keeps the sums of the i-th one since results were
 * stored. */
template <int TYPE, int WAVE, bool DOWN>
RFK_DEVICE void rfk_mixture_items(const rfk_mixture_args &a, const rfk_mixture_shared &s,
                                  const rfk_mixture_shape &shape, const rfk_column &c,
                                  typename rfk_mixture_reads<TYPE>::loaded (*raw)[2], rfk_mixture_cursor at,
                                  rfk_mixture_cursor ahead) {
    const int IN_FLIGHT = RFK_MIXTURE_IN_FLIGHT(TYPE);
    const uint32_t lane = threadIdx.x % WAVE;
    float sum[2] = {0, 0}, kept[2] = {0, 0}, before[2];
    uint32_t n_kept = 0, item = shape.first;
    if (lane < at.left) rfk_mixture_before<DOWN>(a, s, item + lane * shape.step, before);
    while (at.left) {
        RFK_UNROLL(4)
        for (int u = 0; u < IN_FLIGHT; u++) {
            if (at.left) {
                rfk_mixture_dot<TYPE, WAVE, DOWN>(raw[u], c, at.round, shape.all, sum);
                if (ahead.left) {
                    rfk_mixture_fetch<TYPE, WAVE, DOWN>(a, s, shape, ahead, raw[u]);
                    (void)rfk_mixture_next<DOWN>(a, shape, ahead);
                }
                if (rfk_mixture_next<DOWN>(a, shape, at)) {
                    if (DOWN) sum[0] = rfk_wave_sum<WAVE>(sum[0]);
                    else rfk_wave_sums<WAVE>(&sum[0], &sum[1]);
                    if (lane == n_kept) kept[0] = sum[0], kept[1] = sum[1];
                    sum[0] = sum[1] = 0, n_kept++;
                }
            }
        }
        if (at.left && n_kept + IN_FLIGHT <= WAVE) continue;
        if (lane < n_kept) rfk_mixture_put<DOWN>(a, s, item + lane * shape.step, kept, before);
        item += n_kept * shape.step;
        n_kept = 0;
        if (lane < at.left) rfk_mixture_before<DOWN>(a, s, item + lane * shape.step, before);
    }
}

/* Bring the descriptions of all experts into the L2 cache: which of them are read is known late. */
RFK_DEVICE void rfk_prefetch_experts(const rfk_weight *w, uint32_t n_experts) {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    if (threadIdx.x * 128 < n_experts * sizeof *w)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const uint8_t *>(w) + threadIdx.x * 128));
#else
    (void)w, (void)n_experts;
#endif
}

/* grid [blocks, rows]   block up to RFK_MIXTURE_BLOCK, at least two waves   LDS 1.25 bytes a value of the column
 *   reads W once per row
 * The first wave finds the choices, the others quantize what they read meanwhile, 16 values a lane. */
template <int TYPE, int WAVE, bool DOWN>
static __global__ void RFK_RESIDENT(RFK_MIXTURE_BLOCK(TYPE), 1) rfk_mixture(rfk_mixture_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    typedef rfk_mixture_reads<TYPE> R;
    const int IN_FLIGHT = RFK_MIXTURE_IN_FLIGHT(TYPE);
    RFK_SHARED(rfk_mixture_shared, s);
    RFK_DYNAMIC(int4, memory);
    const uint32_t waves = blockDim.x / WAVE, n_used = a.e.n_used, fillers = blockDim.x - WAVE,
                   thread = threadIdx.x - WAVE, values = DOWN ? n_used * a.e.n_in + a.n_shared : a.e.n_in,
                   chunks = threadIdx.x < WAVE ? 0 : values / 16, /* the first wave fills nothing */
                   reader = DOWN ? 16 * thread / a.e.n_in : 0; /* of the first chunk: divided before the wait */
    rfk_mixture_shape shape;
    shape.n_items = DOWN ? a.e.n_out : n_used * a.e.n_out + a.n_shared;
    shape.first = blockIdx.x * waves + threadIdx.x / WAVE;
    shape.step = gridDim.x * waves;
    shape.n_fragments = a.e.n_in / R::VALUES;
    shape.all = values / R::VALUES;
    shape.rounds = DOWN ? (shape.all + 2 * WAVE - 1) / (2 * WAVE) : (shape.all + WAVE - 1) / WAVE;
    shape.inverse = 1.0f / (float)shape.n_fragments;
    rfk_column c;
    rfk_mixture_column<TYPE, WAVE>(c, memory, values);
    rfk_prefetch_experts(a.e.w, a.n_experts);
    if (!DOWN) rfk_prefetch_experts(a.w2, a.n_experts);
    const rfk_mixture_cursor begin = rfk_mixture_begin<DOWN>(a, shape);
    rfk_wait_previous();
    rfk_int8_chunk chunk = {};
    if (threadIdx.x < WAVE) rfk_find_choices<TYPE, WAVE, DOWN>(a, s);
    for (uint32_t i = thread; !DOWN && i - i % WAVE < chunks; i += fillers) {
        rfk_mixture_fill<TYPE, WAVE, DOWN>(a, c, i, values, chunk);
        if (i < chunks) rfk_mixture_set_scale<TYPE>(c, i, chunk, 1.0f);
    }
    if (DOWN && thread - thread % WAVE < chunks) rfk_mixture_fill<TYPE, WAVE, DOWN>(a, c, thread, values, chunk);
    __syncthreads(); /* the choices and their weights; gate and up: the column */
    for (uint32_t i = thread; DOWN && i - i % WAVE < chunks; i += fillers) {
        const uint32_t k = i == thread ? reader : 16 * i / a.e.n_in;
        if (i != thread) rfk_mixture_fill<TYPE, WAVE, DOWN>(a, c, i, values, chunk);
        if (i < chunks) rfk_mixture_set_scale<TYPE>(c, i, chunk, s.weight[k < n_used ? k : n_used]);
    }
    rfk_mixture_cursor ahead = begin;
    typename R::loaded raw[IN_FLIGHT][2];
    RFK_UNROLL(4)
    for (int u = 0; u < IN_FLIGHT; u++)
        if (ahead.left) {
            rfk_mixture_fetch<TYPE, WAVE, DOWN>(a, s, shape, ahead, raw[u]);
            (void)rfk_mixture_next<DOWN>(a, shape, ahead);
        }
    if (DOWN) __syncthreads();
    rfk_mixture_items<TYPE, WAVE, DOWN>(a, s, shape, c, raw, begin, ahead);
}

/* ---- matrix units ----
 * A wave multiplies 16 rows by 16 columns of 32 bytes each. An operand is the 16 rows (or columns) distributed over the
 * lanes as the unit wants them. Results are RFK_DOT_START + sum, which read as a float is 12582912 + sum.
 * Layouts: PTX ISA 8.0, "Matrix fragments for mma.m16n8k32"; AMD Instinct MI200 and MI300 ISA, "Matrix core
 * instructions"; AMD RDNA3 and RDNA4 ISA, "WMMA". */

#define RFK_MATRIX_DOT 0    /* none: rfk_dot4 */
#define RFK_MATRIX_SM80 1   /* mma.sync m16n8k32 */
#define RFK_MATRIX_MFMA2 2  /* gfx908, gfx90a: v_mfma_i32_16x16x16i8 */
#define RFK_MATRIX_MFMA3 3  /* gfx942, gfx950: v_mfma_i32_16x16x32_i8 */
#define RFK_MATRIX_WMMA11 4 /* gfx11: v_wmma_i32_16x16x16_iu8, operands in both halves of the wave */
#define RFK_MATRIX_WMMA12 5 /* gfx12: the same, operands in one half */

#if defined(ROCMFORGE_HIP_EMU)
#define RFK_MATRIX hip_emu_matrix()
#elif defined(RFK_SM80)
#define RFK_MATRIX RFK_MATRIX_SM80
#elif defined(__gfx908__) || defined(__gfx90a__)
#define RFK_MATRIX RFK_MATRIX_MFMA2
#elif defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__) || defined(__gfx950__)
#define RFK_MATRIX RFK_MATRIX_MFMA3
#elif defined(__GFX11__) || defined(__gfx1100__) || defined(__gfx1101__) || defined(__gfx1102__) ||                \
    defined(__gfx1103__) || defined(__gfx1150__) || defined(__gfx1151__)
#define RFK_MATRIX RFK_MATRIX_WMMA11
#elif defined(__GFX12__) || defined(__gfx1200__) || defined(__gfx1201__)
#define RFK_MATRIX RFK_MATRIX_WMMA12
#else
#define RFK_MATRIX RFK_MATRIX_DOT
#endif

/* Whether code for these units is compiled; the emulator has all of them. */
#if defined(ROCMFORGE_HIP_EMU)
#define RFK_MAY_BE(units) 1
#else
#define RFK_MAY_BE(units) (RFK_MATRIX == (units))
#endif

#if defined(ROCMFORGE_HIP_EMU)
typedef hip_emu_int2 rfk_int2;
typedef hip_emu_int4 rfk_int4;
typedef hip_emu_int8 rfk_int8;
typedef hip_emu_half4 rfk_half4, rfk_short4;
typedef hip_emu_half8 rfk_half8, rfk_short8;
typedef hip_emu_half16 rfk_half16, rfk_short16;
typedef hip_emu_float4 rfk_float4;
typedef hip_emu_float8 rfk_float8;
#elif !defined(RFK_NVIDIA)
typedef _Float16 rfk_half4 __attribute__((ext_vector_type(4)));
typedef _Float16 rfk_half8 __attribute__((ext_vector_type(8)));
typedef _Float16 rfk_half16 __attribute__((ext_vector_type(16)));
typedef short rfk_short4 __attribute__((ext_vector_type(4)));
typedef short rfk_short8 __attribute__((ext_vector_type(8)));
typedef short rfk_short16 __attribute__((ext_vector_type(16)));
typedef float rfk_float4 __attribute__((ext_vector_type(4)));
typedef float rfk_float8 __attribute__((ext_vector_type(8)));
typedef int rfk_int2 __attribute__((ext_vector_type(2)));
typedef int rfk_int4 __attribute__((ext_vector_type(4)));
typedef int rfk_int8 __attribute__((ext_vector_type(8)));
#endif

/* Whether the units multiply 16-bit floats without loss: gfx90a flushes subnormal halves to zero, gfx908 has half the
 * depth for bf16. */
#define RFK_HAS_UNITS (RFK_MATRIX != RFK_MATRIX_DOT)
#define RFK_UNITS_F16 (RFK_HAS_UNITS && RFK_MATRIX != RFK_MATRIX_MFMA2)
#if defined(__gfx908__)
#define RFK_UNITS_BF16 false
#else
#define RFK_UNITS_BF16 RFK_HAS_UNITS
#endif

/* A lane has 256 / WAVE results, in RFK_LANE_ROWS rows and RFK_LANE_COLS columns. */
#if defined(ROCMFORGE_HIP_EMU)
#define RFK_LANE_ROWS(n) (n)
#define RFK_LANE_COLS(n) (n)
#define RFK_ROW_INDEX(i) (i)
#define RFK_COL_INDEX(i) (i)
#elif defined(RFK_SM80)
#define RFK_LANE_ROWS(n) 2
#define RFK_LANE_COLS(n) 4
#define RFK_ROW_INDEX(i) ((i) % 4 / 2)
#define RFK_COL_INDEX(i) ((i) / 4 * 2 + (i) % 2)
#else
#define RFK_LANE_ROWS(n) (n)
#define RFK_LANE_COLS(n) 1
#define RFK_ROW_INDEX(i) (i)
#define RFK_COL_INDEX(i) 0
#endif

/* The row of the tile for a lane's row index; the same for columns. */
RFK_DEVICE uint32_t rfk_matrix_row(uint32_t lane, uint32_t index, uint32_t n) {
    uint32_t kind = RFK_MATRIX;
#if defined(ROCMFORGE_HIP_EMU)
    if (kind == RFK_MATRIX_SM80) index = index % 4 / 2;
#endif
    if (kind == RFK_MATRIX_SM80) return lane / 4 + 8 * index;
    if (kind == RFK_MATRIX_WMMA11) return 2 * index + lane / 16;
    return lane / 16 * n + index;
}
RFK_DEVICE uint32_t rfk_matrix_col(uint32_t lane, uint32_t index) {
    uint32_t kind = RFK_MATRIX;
#if defined(ROCMFORGE_HIP_EMU)
    index = kind == RFK_MATRIX_SM80 ? index / 4 * 2 + index % 2 : 0;
#endif
    if (kind == RFK_MATRIX_SM80) return index / 2 * 8 + lane % 4 * 2 + index % 2;
    return lane % 16;
}

struct rfk_operand {
    int r[8];
    const int4 *rows; /* RFK_MATRIX_DOT reads from here when it multiplies */
};
#define RFK_MATRIX_STRIDE 9 /* 16-byte words from one row of an int8 tile to the next, in shared memory */

#if defined(RFK_SM80)
/* Four 8x8 matrices of 16-byte rows; each lane gives the address of a row. */
RFK_DEVICE void rfk_load_matrices(rfk_operand &o, const int4 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(o.r[0]), "=r"(o.r[1]), "=r"(o.r[2]), "=r"(o.r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row)));
}
#endif

/* Bytes [32 * g, + 32) of 16 rows that are STRIDE 16-byte words apart: 32 int8, or 16 halves (HALVES). */
template <int STRIDE, bool HALVES>
RFK_DEVICE void rfk_load_rows(rfk_operand &o, const int4 *rows, uint32_t g, uint32_t lane) {
    const uint32_t kind = RFK_MATRIX;
    rows += 2 * g;
    o.rows = rows;
    const int *word = reinterpret_cast<const int *>(rows);
    if (kind == RFK_MATRIX_SM80) {
#if defined(RFK_SM80)
        rfk_load_matrices(o, rows + lane % 16 * STRIDE + lane / 16);
#else
        for (uint32_t i = 0; i < 4; i++)
            o.r[i] = word[(lane / 4 + i % 2 * 8) * (STRIDE * 4) + i / 2 * 4 + lane % 4];
#endif
    } else if (kind == RFK_MATRIX_MFMA2 && !HALVES) {
        word += lane % 16 * (STRIDE * 4) + lane / 16;
        o.r[0] = word[0], o.r[1] = word[4];
    } else if (kind == RFK_MATRIX_MFMA3 || kind == RFK_MATRIX_MFMA2) {
        word += lane % 16 * (STRIDE * 4) + lane / 16 * 2;
        o.r[0] = word[0], o.r[1] = word[1];
    } else if (kind == RFK_MATRIX_WMMA11) {
        word += lane % 16 * (STRIDE * 4);
        RFK_UNROLL(8)
        for (int i = 0; i < 8; i++) o.r[i] = word[i];
    } else if (kind == RFK_MATRIX_WMMA12 && HALVES) {
        word += lane % 16 * (STRIDE * 4) + lane / 16 * 4;
        RFK_UNROLL(4)
        for (int i = 0; i < 4; i++) o.r[i] = word[i];
    } else if (kind == RFK_MATRIX_WMMA12) {
        word += lane % 16 * (STRIDE * 4) + lane / 16 * 2;
        o.r[0] = word[0], o.r[1] = word[1], o.r[2] = word[4], o.r[3] = word[5];
    }
}

/* The same for 16 columns of the second operand; mma.sync wants the words of eight columns adjacent. */
template <int STRIDE, bool HALVES>
RFK_DEVICE void rfk_load_columns(rfk_operand &o, const int4 *columns, uint32_t g, uint32_t lane) {
    const uint32_t kind = RFK_MATRIX;
    if (kind != RFK_MATRIX_SM80) return rfk_load_rows<STRIDE, HALVES>(o, columns, g, lane);
    o.rows = columns + 2 * g;
#if defined(RFK_SM80)
    rfk_load_matrices(o, columns + 2 * g + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2);
#else
    const int *word = reinterpret_cast<const int *>(columns + 2 * g);
    for (uint32_t i = 0; i < 4; i++)
        o.r[i] = word[(lane / 4 + i / 2 * 8) * (STRIDE * 4) + i % 2 * 4 + lane % 4];
#endif
}

/* rfk_mma_int8 without a matrix unit. */
template <int WAVE> RFK_DEVICE void rfk_dot_int8(const rfk_operand &a, const rfk_operand &b, int part, int *out) {
    const uint32_t lane = threadIdx.x % WAVE;
    rfk_compiler_fence(); /* loads of one tile at a time: there are no registers for more */
    for (uint32_t i = 0; i < 256 / WAVE; i++) {
        const int4 *row = a.rows + rfk_matrix_row(lane, i, 256 / WAVE) * RFK_MATRIX_STRIDE,
                   *col = b.rows + rfk_matrix_col(lane, i) * RFK_MATRIX_STRIDE;
        int sum = RFK_DOT_START;
        for (int h = 0; h < 2; h++) {
            if (part == 1 - h) continue;
            int4 x = row[h], y = col[h];
            sum = rfk_dot4(x.x, y.x, sum);
            sum = rfk_dot4(x.y, y.y, sum);
            sum = rfk_dot4(x.z, y.z, sum);
            sum = rfk_dot4(x.w, y.w, sum);
        }
        out[i] = sum;
    }
}

/* out = RFK_DOT_START + a b over bytes 0-15 (part 0), 16-31 (1) or all (2). All lanes must take part. */
template <int WAVE> RFK_DEVICE void rfk_mma_int8(const rfk_operand &a, const rfk_operand &b, int part, int *out) {
    const uint32_t lane = threadIdx.x % WAVE, kind = RFK_MATRIX;
    (void)lane, (void)kind;
#if RFK_MAY_BE(RFK_MATRIX_SM80)
    if (WAVE == 32 && kind == RFK_MATRIX_SM80) {
        RFK_UNROLL(2)
        for (int n = 0; n < 2; n++) {
#if defined(ROCMFORGE_HIP_EMU)
            const int av[4] = {part == 1 ? 0 : a.r[0], part == 1 ? 0 : a.r[1], part == 0 ? 0 : a.r[2],
                               part == 0 ? 0 : a.r[3]},
                      bv[2] = {b.r[2 * n], b.r[2 * n + 1]},
                      c[4] = {RFK_DOT_START, RFK_DOT_START, RFK_DOT_START, RFK_DOT_START};
            hip_emu_mma_m16n8k32_s8(out + 4 * n, av, bv, c);
#else
            if (part == 2)
                asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                    "{%10,%10,%10,%10};"
                    : "=r"(out[4 * n]), "=r"(out[4 * n + 1]), "=r"(out[4 * n + 2]), "=r"(out[4 * n + 3])
                    : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[2 * n]), "r"(b.r[2 * n + 1]),
                      "r"(RFK_DOT_START));
            else
                asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
                    : "=r"(out[4 * n]), "=r"(out[4 * n + 1]), "=r"(out[4 * n + 2]), "=r"(out[4 * n + 3])
                    : "r"(a.r[2 * part]), "r"(a.r[2 * part + 1]), "r"(b.r[2 * n + part]), "r"(RFK_DOT_START));
#endif
        }
        return;
    }
#endif
#if RFK_MAY_BE(RFK_MATRIX_MFMA2)
    if (WAVE == 64 && kind == RFK_MATRIX_MFMA2) {
        rfk_int4 c = {RFK_DOT_START, RFK_DOT_START, RFK_DOT_START, RFK_DOT_START};
        if (part != 1) c = __builtin_amdgcn_mfma_i32_16x16x16i8(a.r[0], b.r[0], c, 0, 0, 0);
        if (part != 0) c = __builtin_amdgcn_mfma_i32_16x16x16i8(a.r[1], b.r[1], c, 0, 0, 0);
        for (int i = 0; i < 4; i++) out[i] = c[i];
        return;
    }
#endif
#if RFK_MAY_BE(RFK_MATRIX_MFMA3)
    if (WAVE == 64 && kind == RFK_MATRIX_MFMA3) { /* one part only: lanes of the other half contribute 0 */
        rfk_int4 c = {RFK_DOT_START, RFK_DOT_START, RFK_DOT_START, RFK_DOT_START};
        bool counts = part == 2 || (int)(lane / 32) == part;
        uint64_t av = counts ? (uint32_t)a.r[0] | (uint64_t)(uint32_t)a.r[1] << 32 : 0,
                 bv = (uint32_t)b.r[0] | (uint64_t)(uint32_t)b.r[1] << 32;
        c = __builtin_amdgcn_mfma_i32_16x16x32_i8((long)av, (long)bv, c, 0, 0, 0);
        for (int i = 0; i < 4; i++) out[i] = c[i];
        return;
    }
#endif
#if RFK_MAY_BE(RFK_MATRIX_WMMA11)
    if (WAVE == 32 && kind == RFK_MATRIX_WMMA11) {
        rfk_int8 c;
        for (int i = 0; i < 8; i++) c[i] = RFK_DOT_START;
        for (int h = 0; h < 2; h++) {
            if (part == 1 - h) continue;
            rfk_int4 av = {a.r[4 * h], a.r[4 * h + 1], a.r[4 * h + 2], a.r[4 * h + 3]},
                     bv = {b.r[4 * h], b.r[4 * h + 1], b.r[4 * h + 2], b.r[4 * h + 3]};
            c = __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, av, true, bv, c, false);
        }
        for (int i = 0; i < 8; i++) out[i] = c[i];
        return;
    }
#endif
#if RFK_MAY_BE(RFK_MATRIX_WMMA12)
    if (WAVE == 32 && kind == RFK_MATRIX_WMMA12) {
        rfk_int8 c;
        for (int i = 0; i < 8; i++) c[i] = RFK_DOT_START;
        for (int h = 0; h < 2; h++) {
            if (part == 1 - h) continue;
            rfk_int2 av = {a.r[2 * h], a.r[2 * h + 1]}, bv = {b.r[2 * h], b.r[2 * h + 1]};
            c = __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(true, av, true, bv, c, false);
        }
        for (int i = 0; i < 8; i++) out[i] = c[i];
        return;
    }
#endif
    rfk_dot_int8<WAVE>(a, b, part, out);
}

/* sum += a b, operands from rfk_load_rows and rfk_load_columns, over 16 halves, or 16 bf16 (BF16; RFK_UNITS_BF16 or
 * RFK_MATRIX_DOT only). STRIDE_A, STRIDE_B: of the operands' rows. All lanes must take part. */
template <int WAVE, int STRIDE_A, int STRIDE_B, bool BF16 = false>
RFK_DEVICE void rfk_mma_16bit(const rfk_operand &a, const rfk_operand &b, float *sum) {
    const uint32_t lane = threadIdx.x % WAVE, kind = RFK_MATRIX;
    (void)lane, (void)kind;
#if RFK_MAY_BE(RFK_MATRIX_SM80)
    if (WAVE == 32 && kind == RFK_MATRIX_SM80) {
        RFK_UNROLL(2)
        for (int n = 0; n < 2; n++) {
#if defined(ROCMFORGE_HIP_EMU)
            const int bv[2] = {b.r[2 * n], b.r[2 * n + 1]};
            if (BF16) hip_emu_mma_m16n8k16_bf16(sum + 4 * n, a.r, bv);
            else hip_emu_mma_m16n8k16_f16(sum + 4 * n, a.r, bv);
#else
            float *d = sum + 4 * n;
            if (BF16)
                asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                             "{%8,%9}, {%0,%1,%2,%3};"
                             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                             : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[2 * n]),
                               "r"(b.r[2 * n + 1]));
            else
                asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                             "{%8,%9}, {%0,%1,%2,%3};"
                             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                             : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[2 * n]),
                               "r"(b.r[2 * n + 1]));
#endif
        }
        return;
    }
#endif
#if RFK_MAY_BE(RFK_MATRIX_MFMA2) || RFK_MAY_BE(RFK_MATRIX_MFMA3)
    if (WAVE == 64 && (kind == RFK_MATRIX_MFMA2 || kind == RFK_MATRIX_MFMA3)) {
        union { int i[2]; rfk_half4 h; rfk_short4 b; } av, bv;
        RFK_UNROLL(8)
        for (int i = 0; i < 2; i++) av.i[i] = a.r[i], bv.i[i] = b.r[i];
        rfk_float4 c = {sum[0], sum[1], sum[2], sum[3]};
#if !defined(__gfx908__)
        if (BF16) c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(av.b, bv.b, c, 0, 0, 0);
#endif
        if (!BF16) c = __builtin_amdgcn_mfma_f32_16x16x16f16(av.h, bv.h, c, 0, 0, 0);
        for (int i = 0; i < 4; i++) sum[i] = c[i];
        return;
    }
#endif
#if RFK_MAY_BE(RFK_MATRIX_WMMA11)
    if (WAVE == 32 && kind == RFK_MATRIX_WMMA11) {
        union { int i[8]; rfk_half16 h; rfk_short16 b; } av, bv;
        RFK_UNROLL(8)
        for (int i = 0; i < 8; i++) av.i[i] = a.r[i], bv.i[i] = b.r[i];
        rfk_float8 c = {sum[0], sum[1], sum[2], sum[3], sum[4], sum[5], sum[6], sum[7]};
        if (BF16) c = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(av.b, bv.b, c);
        else c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(av.h, bv.h, c);
        for (int i = 0; i < 8; i++) sum[i] = c[i];
        return;
    }
#endif
#if RFK_MAY_BE(RFK_MATRIX_WMMA12)
    if (WAVE == 32 && kind == RFK_MATRIX_WMMA12) {
        union { int i[4]; rfk_half8 h; rfk_short8 b; } av, bv;
        RFK_UNROLL(8)
        for (int i = 0; i < 4; i++) av.i[i] = a.r[i], bv.i[i] = b.r[i];
        rfk_float8 c = {sum[0], sum[1], sum[2], sum[3], sum[4], sum[5], sum[6], sum[7]};
        if (BF16) c = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(av.b, bv.b, c);
        else c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(av.h, bv.h, c);
        for (int i = 0; i < 8; i++) sum[i] = c[i];
        return;
    }
#endif
    for (uint32_t i = 0; i < 256 / WAVE; i++) {
        const uint8_t *row = reinterpret_cast<const uint8_t *>(a.rows + rfk_matrix_row(lane, i, 256 / WAVE) * STRIDE_A),
                      *col = reinterpret_cast<const uint8_t *>(b.rows + rfk_matrix_col(lane, i) * STRIDE_B);
        for (int k = 0; k < 16; k += 8) {
            float x[8], y[8];
            rfk_load8<BF16 ? RF_TYPE_BF16 : RF_TYPE_F16>(row, (size_t)k, x);
            rfk_load8<BF16 ? RF_TYPE_BF16 : RF_TYPE_F16>(col, (size_t)k, y);
            for (int e = 0; e < 8; e++) sum[i] += x[e] * y[e];
        }
    }
}

/* ---- a check of the units ----
 * When a device is opened, one wave multiplies two tiles in every way that kernels do, and the host compares the
 * results with its own: a wrong layout, on a new instruction set or compiler, must not become wrong text. */

#define RFK_CHECK_PARTS 5 /* of int8: bytes 0-15, 16-31, all 32; of 16 halves; of 16 bf16 */

/* A pseudo-random byte: byte k of row (or column) i of operand 0 or 1; halves have these values. */
__host__ RFK_DEVICE int rfk_check_value(uint32_t operand, uint32_t i, uint32_t k) {
    uint32_t mixed = (operand * 512 + i * 32 + k + 1) * 2654435761u;
    return (int)(mixed >> 24) - 128;
}

struct rfk_check_shared {
    int4 bytes[2][16][RFK_MATRIX_STRIDE], halves[2][16][RFK_MATRIX_STRIDE], bf16[2][16][RFK_MATRIX_STRIDE];
};
union rfk_check_result {
    int dot;
    float sum;
};
struct rfk_check_results {
    rfk_check_result part[RFK_CHECK_PARTS][256]; /* [row][column]; int8 results include RFK_DOT_START */
    uint32_t has_units, units_f16, units_bf16;   /* 1: as the macros say */
    uint32_t direct;                             /* 1: rfk_few_direct is compiled in */
};

/* grid 1   block a wave   LDS 13.5 KiB */
template <int WAVE> static __global__ void RFK_THREADS(WAVE) rfk_check_matrix(rfk_check_results *out) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    RFK_SHARED(rfk_check_shared, s);
    const int N = 256 / WAVE;
    const uint32_t lane = threadIdx.x;
    if (lane == 0)
        out->has_units = RFK_HAS_UNITS, out->units_f16 = RFK_UNITS_F16, out->units_bf16 = RFK_UNITS_BF16,
        out->direct = RFK_MATRIX == RFK_MATRIX_SM80;
    for (uint32_t j = lane; j < 2 * 16 * 32; j += WAVE) {
        uint32_t operand = j / 512, i = j / 32 % 16, k = j % 32;
        int v = rfk_check_value(operand, i, k);
        reinterpret_cast<int8_t *>(s.bytes[operand][i])[k] = (int8_t)v;
        if (k >= 16) continue;
        reinterpret_cast<uint16_t *>(s.halves[operand][i])[k] = rfk_to_half((float)v);
        reinterpret_cast<uint16_t *>(s.bf16[operand][i])[k] = (uint16_t)(rfk_as_bits((float)v) >> 16);
    }
    __syncthreads();
    rfk_operand a, b;
    int dot[3][N];
    float sum[2][N];
    rfk_load_rows<RFK_MATRIX_STRIDE, false>(a, s.bytes[0][0], 0, lane);
    rfk_load_columns<RFK_MATRIX_STRIDE, false>(b, s.bytes[1][0], 0, lane);
    RFK_UNROLL(3)
    for (int part = 0; part < 3; part++) rfk_mma_int8<WAVE>(a, b, part, dot[part]);
    RFK_UNROLL(8)
    for (int i = 0; i < N; i++) sum[0][i] = sum[1][i] = 0;
    rfk_load_rows<RFK_MATRIX_STRIDE, true>(a, s.halves[0][0], 0, lane);
    rfk_load_columns<RFK_MATRIX_STRIDE, true>(b, s.halves[1][0], 0, lane);
    rfk_mma_16bit<WAVE, RFK_MATRIX_STRIDE, RFK_MATRIX_STRIDE>(a, b, sum[0]);
    rfk_load_rows<RFK_MATRIX_STRIDE, true>(a, s.bf16[0][0], 0, lane);
    rfk_load_columns<RFK_MATRIX_STRIDE, true>(b, s.bf16[1][0], 0, lane);
    if (RFK_UNITS_BF16) rfk_mma_16bit<WAVE, RFK_MATRIX_STRIDE, RFK_MATRIX_STRIDE, true>(a, b, sum[1]);
    RFK_UNROLL(8)
    for (int i = 0; i < N; i++) {
        uint32_t at = rfk_matrix_row(lane, RFK_ROW_INDEX((uint32_t)i), N) * 16 +
                      rfk_matrix_col(lane, RFK_COL_INDEX((uint32_t)i));
        RFK_UNROLL(3)
        for (int part = 0; part < 3; part++) out->part[part][at].dot = dot[part][i];
        out->part[3][at].sum = sum[0][i];
        out->part[4][at].sum = sum[1][i];
    }
}

/* ---- many columns ---- */

#define RFK_LARGE_TILE_ROWS 128          /* rows of W of a large tile */
#define RFK_SMALL_TILE_ROWS 64            /* and of a small one */
#define RFK_DEPTH 128              /* values of a row in shared memory */
#define RFK_SMALL_TILE_COLS RFK_PAIR_TILE /* columns of a small tile */
#define RFK_LARGE_TILE_COLS 128          /* and of a large one */
/* Kernels for large tiles are empty where wgmma is compiled in: what it cannot do is rare enough for small ones. */
#if defined(RFK_HAS_WGMMA) && !defined(ROCMFORGE_HIP_EMU)
#define RFK_RUNS_TILES(cols) ((cols) < RFK_LARGE_TILE_COLS)
#else
#define RFK_RUNS_TILES(cols) 1
#endif
/* Rows of a tile. With 128 rows, Q2_K, with two minimums for 32 weights, would need more than 48 KiB; classes of types
 * need the registers of a second unit to unpack one. type: rfk_kernel_type. */
#define RFK_TILE_ROWS_OF(type, cols)                                                                     \
    ((cols) == RFK_LARGE_TILE_COLS && (type) < RF_TYPE_COUNT && (type) != RF_TYPE_Q2_K && !RFK_IS_REGISTER_BOUND(type) \
         ? RFK_LARGE_TILE_ROWS                                                                                \
         : RFK_SMALL_TILE_ROWS)
/* Two scales for 32 weights do not fit into AMD's 256 registers with a large tile; with minimums, not even its
 * columns. */
#if defined(RFK_NVIDIA) || defined(ROCMFORGE_HIP_EMU)
#define RFK_IS_REGISTER_BOUND(type) 0
#else
#define RFK_IS_REGISTER_BOUND(type) ((type) == RF_TYPE_Q6_K || (type) == RF_TYPE_Q2_K)
#endif
#define RFK_TILE_COLS_OF(type, cols) \
    (RFK_IS_REGISTER_BOUND(type) && (type) == RF_TYPE_Q2_K ? RFK_SMALL_TILE_COLS : (cols))

#define RFK_HAS_PARTS(type) ((type) == RF_TYPE_Q4_K || (type) == RF_TYPE_Q5_K)

/* A tile of adjacent columns, those with results in [first, end); columns beyond repeat the last. */
struct rfk_neighbours {
    uint32_t first, end;
};
/* Split-K: `part` has the partial results of tiles whose depth is split over several blocks,
 * [tile][split][column][row]. */
struct rfk_tiles_args {
    typedef rfk_neighbours columns;
    rfk_matmul_args m;
    float *part; /* NULL: one split, results go to the products */
    uint32_t n_splits, split_units, rows, cols;
};

/* One depth step of a tile in shared memory. Arrays for minimums have one element for types without. */
template <int TYPE, int ROWS, int COLS> struct rfk_tile_shared {
    static const int GROUPS = RFK_DEPTH / 32, SCALES = rfk_format<TYPE>::SCALES,
                     MINIMUMS = rfk_format<TYPE>::HAS_MIN ? GROUPS : 1, PARTS = RFK_HAS_PARTS(TYPE) ? COLS : 1,
                     W_PARTS = RFK_HAS_PARTS(TYPE) ? ROWS : 1;
    int4 w[ROWS][RFK_MATRIX_STRIDE]; /* int8 values; one word of padding: adjacent rows start in different banks */
    int4 x[COLS][RFK_MATRIX_STRIDE];
    float w_scale[GROUPS][ROWS][SCALES]; /* d */
    float x_scale[GROUPS][COLS];         /* d */
    union {
        float w_min[MINIMUMS][ROWS][SCALES]; /* m */
        int4 w_parts[W_PARTS][2];
    };
    union {
        float x_sum[MINIMUMS][SCALES][COLS]; /* d * sum of the values that a minimum applies to */
        int4 x_parts[PARTS][2];
    };
};

/* Minimums on the matrix unit: the sum over a step's groups of min_q * (d * sum) is a dot product of 16 bf16, four for
 * each group. min_q has 6 bits and is exact; d * sum is split into three bf16 terms, which is exact, too. The fourth
 * bf16 of W holds dmin as a half; x's is 0. */
template <int TYPE, int WAVE> RFK_DEVICE bool rfk_takes_parts() {
    uint32_t kind = RFK_MATRIX;
    return RFK_HAS_PARTS(TYPE) && WAVE == 32 && kind == RFK_MATRIX_SM80;
}
RFK_DEVICE void rfk_store_w_parts(int4 *row, uint32_t g, float min_q, float dmin) {
    uint32_t bits = rfk_as_bits(min_q) >> 16;
    uint2 words;
    words.x = bits | bits << 16, words.y = bits | (uint32_t)rfk_to_half(dmin) << 16;
    reinterpret_cast<uint2 *>(row)[g] = words;
}
RFK_DEVICE void rfk_store_x_parts(int4 *column, uint32_t g, float v) {
    uint32_t first = rfk_as_bits(v) & 0xffff0000u;
    v -= rfk_as_float(first);
    uint32_t second = rfk_as_bits(v) & 0xffff0000u;
    v -= rfk_as_float(second);
    uint2 words;
    words.x = first >> 16 | second, words.y = rfk_as_bits(v) >> 16;
    reinterpret_cast<uint2 *>(column)[g] = words;
}

/* Store a unit of W in shared memory. */
template <int TYPE, int WAVE, class S>
RFK_DEVICE void rfk_tile_unit(S &s, uint32_t i, uint32_t u, const rfk_unit &unit) {
    typedef rfk_format<TYPE> F;
    const bool scales16 = F::SCALES == 2;
    uint32_t at = rfk_unit_at<TYPE>(u) / 16;
    RFK_UNROLL(2)
    for (uint32_t h = 0; h < 2; h++) {
        uint32_t to = at + h * (F::STRIDE / 16);
        int4 v;
        v.x = unit.q[4 * h], v.y = unit.q[4 * h + 1], v.z = unit.q[4 * h + 2], v.w = unit.q[4 * h + 3];
        if (F::OFFSET) {
            v.x = rfk_subtract4(v.x, F::OFFSET), v.y = rfk_subtract4(v.y, F::OFFSET);
            v.z = rfk_subtract4(v.z, F::OFFSET), v.w = rfk_subtract4(v.w, F::OFFSET);
        }
        s.w[i][to] = v;
        if (!scales16 && to % 2 == 1) continue; /* the other unit with a half in this group stores the scale */
        s.w_scale[to / 2][i][scales16 ? to % 2 : 0] = unit.d[h];
        if (rfk_takes_parts<TYPE, WAVE>()) rfk_store_w_parts(s.w_parts[i], to / 2, unit.min_q[h], unit.dmin);
        else if (F::HAS_MIN) s.w_min[to / 2][i][scales16 ? to % 2 : 0] = unit.m[h];
    }
}

/* Store the scale of a group of x, and its sums; 0 beyond the row's end (not `inside`). */
template <int TYPE, int WAVE, class S>
RFK_DEVICE void rfk_tile_x_group(S &s, uint32_t i, uint32_t g, const rfk_group &group, bool inside) {
    typedef rfk_format<TYPE> F;
    float d = inside ? group.d : 0.0f;
    s.x_scale[g][i] = d;
    if (!F::HAS_MIN) return;
    if (rfk_takes_parts<TYPE, WAVE>()) rfk_store_x_parts(s.x_parts[i], g, d * (float)(group.sum[0] + group.sum[1]));
    else if (F::SCALES == 1) s.x_sum[g][0][i] = d * (float)(group.sum[0] + group.sum[1]);
    else s.x_sum[g][0][i] = d * (float)group.sum[0], s.x_sum[g][F::SCALES - 1][i] = d * (float)group.sum[1];
}

/* Copy 16 bytes to shared memory, asynchronously where the hardware can (cp.async); rfk_wait_copies before a
 * barrier. */
#if defined(RFK_SM80)
#define RFK_ASYNC_COPIES 1
RFK_DEVICE void rfk_copy16(int4 *to, const int4 *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}
/* The same of what a step reads once: rfk_load_once. */
RFK_DEVICE void rfk_copy16_once(int4 *to, const uint8_t *from) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                 ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "l"(policy) : "memory");
}
RFK_DEVICE void rfk_wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
/* Commit this thread's copies as a group; wait until at most one group is in flight. */
RFK_DEVICE void rfk_commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
RFK_DEVICE void rfk_wait_copies_but_one() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
RFK_DEVICE void rfk_wait_copies_but_two() { asm volatile("cp.async.wait_group 2;" ::: "memory"); }
#else
#define RFK_ASYNC_COPIES 0
RFK_DEVICE void rfk_copy16(int4 *to, const int4 *from) { *to = *from; }
RFK_DEVICE void rfk_wait_copies() {}
#if RFK_MAY_BE(RFK_MATRIX_SM80)
RFK_DEVICE void rfk_copy16_once(int4 *to, const uint8_t *from) { *to = *reinterpret_cast<const int4 *>(from); }
RFK_DEVICE void rfk_commit_copies() {}
RFK_DEVICE void rfk_wait_copies_but_one() {}
RFK_DEVICE void rfk_wait_copies_but_two() {}
#endif
#endif

RFK_DEVICE const rfk_tiles_args &rfk_tiles(const rfk_tiles_args &t) { return t; }
RFK_DEVICE bool rfk_find_columns(const rfk_tiles_args &t, uint32_t, uint32_t cols, uint32_t *number, rfk_product *p,
                                 rfk_neighbours *c) {
    *p = rfk_pick(t.m, number);
    c->first = blockIdx.x * cols;
    c->end = t.m.n_cols;
    return true;
}
RFK_DEVICE uint32_t rfk_nth_column(const rfk_neighbours &c, uint32_t i) {
    return c.first + i < c.end ? c.first + i : c.end - 1;
}
RFK_DEVICE void rfk_put_column(const rfk_tiles_args &, const rfk_product &p, const rfk_neighbours &c, uint32_t row,
                               uint32_t i, float v) {
    if (c.first + i < c.end) rfk_put(p, row, c.first + i, v);
}

/* The columns of an expert's tile: each pair has its row of x. */
struct rfk_pair_columns {
    const uint32_t *x_row; /* in shared memory */
    rfk_pair_tile tile;
};
struct rfk_pair_rows {
    uint32_t x[RFK_PAIR_TILE];
};
struct rfk_pair_tiles_args {
    typedef rfk_pair_columns columns;
    rfk_tiles_args t; /* x, n_in, one split; products are in e */
    rfk_experts_args e;
    rfk_pair_lists lists;
};
RFK_DEVICE const rfk_tiles_args &rfk_tiles(const rfk_pair_tiles_args &a) { return a.t; }
RFK_DEVICE uint32_t rfk_nth_column(const rfk_pair_columns &c, uint32_t i) { return c.x_row[i]; }
RFK_DEVICE void rfk_put_column(const rfk_pair_tiles_args &a, const rfk_product &, const rfk_pair_columns &c,
                               uint32_t row, uint32_t i, float v) {
    if (i < c.tile.n) rfk_put_pair(a.e, a.lists.sorted[c.tile.first + i], c.tile.expert, row, v);
}
/* False: the tile is empty, or its expert is not loaded and its results were set to NaN. */
RFK_DEVICE bool rfk_find_columns(const rfk_pair_tiles_args &a, uint32_t rows, uint32_t, uint32_t *number,
                                 rfk_product *p, rfk_pair_columns *c) {
    RFK_SHARED(rfk_pair_rows, s);
    c->tile = a.lists.tile[blockIdx.x];
    if (c->tile.n == 0) return false;
    p->row0 = 0;
    p->w = rfk_expert_matrix(a.e, c->tile.expert, &p->row0);
    p->n_out = a.e.n_out;
    if (!p->w.plane[0]) {
        for (uint32_t i = threadIdx.x; i < rows * c->tile.n; i += RFK_BLOCK)
            if (*number * rows + i % rows < p->n_out)
                rfk_put_column(a, *p, *c, *number * rows + i % rows, i / rows, NAN);
        return false;
    }
    if (threadIdx.x < RFK_PAIR_TILE) {
        uint32_t pair = a.lists.sorted[c->tile.first + (threadIdx.x < c->tile.n ? threadIdx.x : c->tile.n - 1)];
        s.x[threadIdx.x] = a.e.per_choice ? pair : pair / a.e.n_used;
    }
    c->x_row = s.x;
    __syncthreads();
    return true;
}

/* A thread's 16 bytes of 32 columns of the tile, from unit u0 on. */
template <class C>
RFK_DEVICE const int4 *rfk_x_chunk(const rfk_matmul_args &a, const C &columns, uint32_t first, uint32_t u0) {
    uint32_t col = rfk_nth_column(columns, first + threadIdx.x / 8), chunk = u0 * 2 + threadIdx.x % 8;
    if (chunk >= a.n_in / 16) chunk = a.n_in / 16 - 1;
    return reinterpret_cast<const int4 *>(a.x8.q + (size_t)col * (a.n_in / 4)) + chunk;
}

/* Wait until the tile is no longer read, then fill it: rows of W and columns of x, values from unit u0 on. Rows and
 * columns beyond the last repeat it; values beyond a row's end have scales of 0. */
template <int TYPE, int WAVE, int ROWS, int COLS, class C>
RFK_DEVICE void rfk_fill_tile(rfk_tile_shared<TYPE, ROWS, COLS> &s, const rfk_matmul_args &a, const rfk_product &p,
                              uint32_t row0, const C &columns, uint32_t u0) {
    typedef rfk_format<TYPE> F;
    const uint32_t n_units = a.n_in / 32, i = threadIdx.x / 4, u = u0 + threadIdx.x % 4;
    const bool inside = u < n_units;
    int4 x[COLS / 32]; /* all loads before their first use */
    rfk_raw raw[ROWS / 64];
    RFK_UNROLL(2)
    for (uint32_t j = 0; j < ROWS / 64; j++) {
        uint32_t row = row0 + i + 64 * j < p.n_out ? row0 + i + 64 * j : p.n_out - 1;
        F::fetch(p.w, (size_t)(p.row0 + row) * (a.n_in / F::BLOCK), inside ? u : n_units - 1, raw[j]);
    }
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < COLS / 32; j++)
        if (!RFK_ASYNC_COPIES) x[j] = *rfk_x_chunk(a, columns, 32 * j, u0);
    rfk_group group[COLS / 64];
    RFK_UNROLL(2)
    for (uint32_t j = 0; j < COLS / 64; j++) {
        uint32_t col = rfk_nth_column(columns, i + 64 * j);
        group[j] = a.x8.group[(size_t)col * n_units + (inside ? u : n_units - 1)];
    }
    __syncthreads(); /* all are done with what was there */
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < COLS / 32; j++)
        rfk_copy16(&s.x[threadIdx.x / 8 + 32 * j][threadIdx.x % 8],
                   RFK_ASYNC_COPIES ? rfk_x_chunk(a, columns, 32 * j, u0) : &x[j]);
    RFK_UNROLL(2)
    for (uint32_t j = 0; j < ROWS / 64; j++) {
        rfk_unit unit;
        F::unpack(raw[j], u, unit);
        if (!inside) unit.d[0] = unit.d[1] = unit.m[0] = unit.m[1] = 0;
        rfk_tile_unit<TYPE, WAVE>(s, i + 64 * j, threadIdx.x % 4, unit);
    }
    RFK_UNROLL(2)
    for (uint32_t j = 0; j < COLS / 64; j++)
        rfk_tile_x_group<TYPE, WAVE>(s, i + 64 * j, threadIdx.x % 4, group[j], inside);
    rfk_wait_copies();
}

/* The values of a lane's columns; `values` begins at the tile's first. */
template <int N> RFK_DEVICE void rfk_lane_values(const float *values, uint32_t lane, float *out) {
#if defined(RFK_SM80)
    RFK_UNROLL(2)
    for (uint32_t i = 0; i < 2; i++) { /* adjacent */
        float2 both = *reinterpret_cast<const float2 *>(values + rfk_matrix_col(lane, 2 * i));
        out[2 * i] = both.x, out[2 * i + 1] = both.y;
    }
#else
    RFK_UNROLL(8)
    for (uint32_t i = 0; i < RFK_LANE_COLS((uint32_t)N); i++) out[i] = values[rfk_matrix_col(lane, i)];
#endif
}

/* Add the products of group g to a wave's results: RT x CT tiles of 16 x 16. */
template <int TYPE, int WAVE, int RT, int CT, class S>
RFK_DEVICE void rfk_tile_group(const S &s, uint32_t g, uint32_t row0, uint32_t col0,
                               float (&sum)[RT][CT][256 / WAVE]) {
    const bool scales16 = rfk_format<TYPE>::SCALES == 2,
               has_min = rfk_format<TYPE>::HAS_MIN && !rfk_takes_parts<TYPE, WAVE>();
    const int N = 256 / WAVE, LAST = rfk_format<TYPE>::SCALES - 1;
    const uint32_t lane = threadIdx.x % WAVE;
    rfk_operand a[RT], b;
    float d[RT][RFK_LANE_ROWS(N)][4], min[RT][RFK_LANE_ROWS(N)][2];
    RFK_UNROLL(4)
    for (int r = 0; r < RT; r++) {
        rfk_load_rows<RFK_MATRIX_STRIDE, false>(a[r], s.w[row0 + 16 * (uint32_t)r], g, lane);
        RFK_UNROLL(8)
        for (uint32_t i = 0; i < RFK_LANE_ROWS((uint32_t)N); i++) {
            uint32_t row = row0 + 16 * (uint32_t)r + rfk_matrix_row(lane, i, N);
            d[r][i][0] = s.w_scale[g][row][0];
            d[r][i][1] = scales16 ? s.w_scale[g][row][LAST] : 0.0f;
            /* d has 11 + 8 bits at most, its product with 12582912 21 bits: exact, so fmaf(d, result, -that) is */
            d[r][i][2] = d[r][i][0] * -12582912.0f;
            d[r][i][3] = scales16 ? d[r][i][1] * -12582912.0f : 0.0f;
            if (!has_min) continue;
            min[r][i][0] = s.w_min[g][row][0];
            min[r][i][1] = scales16 ? s.w_min[g][row][LAST] : 0.0f;
        }
    }
    RFK_UNROLL(8)
    for (int c = 0; c < CT; c++) {
        float x[RFK_LANE_COLS(N)], x_sum[2][RFK_LANE_COLS(N)];
        const uint32_t col = col0 + 16 * (uint32_t)c;
        rfk_load_columns<RFK_MATRIX_STRIDE, false>(b, s.x[col], g, lane);
        rfk_lane_values<N>(&s.x_scale[g][col], lane, x);
        if (has_min) rfk_lane_values<N>(&s.x_sum[g][0][col], lane, x_sum[0]);
        if (has_min && scales16) rfk_lane_values<N>(&s.x_sum[g][LAST][col], lane, x_sum[1]);
        RFK_UNROLL(4)
        for (int r = 0; r < RT; r++) {
            int dot[N], upper[N];
            rfk_mma_int8<WAVE>(a[r], b, scales16 ? 0 : 2, dot);
            if (scales16) rfk_mma_int8<WAVE>(a[r], b, 1, upper);
            RFK_UNROLL(8)
            for (int i = 0; i < N; i++) {
                const float *wd = d[r][RFK_ROW_INDEX(i)], *wm = min[r][RFK_ROW_INDEX(i)];
                float product = fmaf(wd[0], rfk_as_float((uint32_t)dot[i]), wd[2]);
                if (scales16) product += fmaf(wd[1], rfk_as_float((uint32_t)upper[i]), wd[3]);
                sum[r][c][i] += product * x[RFK_COL_INDEX(i)];
                if (has_min) sum[r][c][i] -= wm[0] * x_sum[0][RFK_COL_INDEX(i)];
                if (has_min && scales16) sum[r][c][i] -= wm[1] * x_sum[1][RFK_COL_INDEX(i)];
            }
        }
    }
}

/* Subtract the minimums of a step from a wave's results. */
template <int TYPE, int WAVE, int RT, int CT, class S>
RFK_DEVICE void rfk_tile_parts(const S &s, uint32_t row0, uint32_t col0, float (&sum)[RT][CT][256 / WAVE]) {
    const int N = 256 / WAVE;
    const uint32_t lane = threadIdx.x % WAVE;
    rfk_operand a[RT], b;
    float min[RT][RFK_LANE_ROWS(N)];
    RFK_UNROLL(4)
    for (int r = 0; r < RT; r++) {
        rfk_load_rows<2, true>(a[r], s.w_parts[row0 + 16 * (uint32_t)r], 0, lane);
        RFK_UNROLL(8)
        for (uint32_t i = 0; i < RFK_LANE_ROWS((uint32_t)N); i++) {
            uint32_t row = row0 + 16 * (uint32_t)r + rfk_matrix_row(lane, i, N);
            min[r][i] = rfk_from_half(reinterpret_cast<const uint16_t *>(s.w_parts[row])[3]);
        }
    }
    RFK_UNROLL(8)
    for (int c = 0; c < CT; c++) {
        rfk_load_columns<2, true>(b, s.x_parts[col0 + 16 * (uint32_t)c], 0, lane);
        RFK_UNROLL(4)
        for (int r = 0; r < RT; r++) {
            float out[N];
            RFK_UNROLL(8)
            for (int i = 0; i < N; i++) out[i] = 0;
            rfk_mma_16bit<WAVE, 2, 2, true>(a[r], b, out);
            RFK_UNROLL(8)
            for (int i = 0; i < N; i++) sum[r][c][i] -= min[r][RFK_ROW_INDEX(i)] * out[i];
        }
    }
}

/* grid [ceil(cols / COLS) or tiles of pairs, row tiles of all products, splits]   block 256   LDS 48 KiB at most
 *   reads W once per COLS columns and x once per ROWS rows
 * Results leave through shared memory: stores are coalesced, and the epilogue takes no registers from the sums. */
template <int TYPE, int WAVE, int COLS, class ARGS>
static __global__ void RFK_RESIDENT(RFK_BLOCK, 2) rfk_matmul(ARGS args) {
    if (!RFK_RUNS_WAVE(WAVE) || !RFK_RUNS_TILES(COLS)) return;
    /* DOWN x ACROSS waves */
    const int ROWS = RFK_TILE_ROWS_OF(TYPE, COLS), N = 256 / WAVE, RT = 2, DOWN = ROWS / (16 * RT),
              ACROSS = RFK_BLOCK / WAVE / DOWN, CT = COLS / ACROSS / 16;
    typedef rfk_tile_shared<TYPE, ROWS, COLS> shared;
    const uint32_t PITCH = ROWS + 4, PASSES = COLS * PITCH * sizeof(float) > sizeof(shared) ? 2 : 1,
                   PER_PASS = COLS / PASSES;
    union either {
        shared s;
        float out[PER_PASS][PITCH];
    };
    RFK_SHARED(either, memory);
    const rfk_tiles_args &t = rfk_tiles(args);
    const rfk_matmul_args &a = t.m;
    uint32_t number = blockIdx.y, lane = threadIdx.x % WAVE, wave = threadIdx.x / WAVE;
    rfk_product p;
    typename ARGS::columns columns;
    if (!rfk_find_columns(args, ROWS, COLS, &number, &p, &columns)) return;
    const uint32_t row0 = number * ROWS, wave_row = wave / ACROSS * (16 * RT), wave_col = wave % ACROSS * (16 * CT);
    float sum[RT][CT][N];
    RFK_UNROLL(8)
    for (int r = 0; r < RT; r++)
        RFK_UNROLL(8)
        for (int c = 0; c < CT; c++)
            RFK_UNROLL(8)
            for (int i = 0; i < N; i++) sum[r][c][i] = 0;
    uint32_t end = t.split_units * (blockIdx.z + 1) < a.n_in / 32 ? t.split_units * (blockIdx.z + 1) : a.n_in / 32;
    RFK_UNROLL(1)
    for (uint32_t u0 = t.split_units * blockIdx.z; u0 < end; u0 += RFK_DEPTH / 32) {
        rfk_fill_tile<TYPE, WAVE, ROWS, COLS>(memory.s, a, p, row0, columns, u0);
        __syncthreads();
        RFK_UNROLL(1)
        for (uint32_t g = 0; g < RFK_DEPTH / 32; g++)
            rfk_tile_group<TYPE, WAVE, RT, CT>(memory.s, g, wave_row, wave_col, sum);
        if (rfk_takes_parts<TYPE, WAVE>()) rfk_tile_parts<TYPE, WAVE, RT, CT>(memory.s, wave_row, wave_col, sum);
    }
    float *part = t.part;
    if (part) part += (((size_t)blockIdx.y * gridDim.x + blockIdx.x) * t.n_splits + blockIdx.z) * ROWS * COLS;
    RFK_UNROLL(2)
    for (uint32_t pass = 0; pass < PASSES; pass++) {
        __syncthreads();
        RFK_UNROLL(8)
        for (int r = 0; r < RT; r++)
            RFK_UNROLL(8)
            for (int c = 0; c < CT; c++)
                RFK_UNROLL(8)
                for (int i = 0; i < N; i++) {
                    uint32_t row = wave_row + 16 * (uint32_t)r + rfk_matrix_row(lane, RFK_ROW_INDEX((uint32_t)i), N),
                             first = wave_col + 16 * (uint32_t)c;
                    if (first / PER_PASS == pass)
                        memory.out[first % PER_PASS + rfk_matrix_col(lane, RFK_COL_INDEX((uint32_t)i))][row] =
                            sum[r][c][i];
                }
        __syncthreads();
        const uint32_t row = threadIdx.x % ROWS;
        RFK_UNROLL(1)
        for (uint32_t i = threadIdx.x / ROWS; i < PER_PASS; i += RFK_BLOCK / ROWS) {
            uint32_t col = pass * PER_PASS + i;
            if (part) part[col * ROWS + row] = memory.out[i][row];
            else if (row0 + row < p.n_out) rfk_put_column(args, p, columns, row0 + row, col, memory.out[i][row]);
        }
    }
}

/* Four adjacent rows of a column: the sum over the splits, in order. tile: index among all tiles; i: among its
 * results. */
RFK_DEVICE void rfk_join4(const rfk_tiles_args &t, uint32_t tile, uint32_t i, float *sum) {
    const uint32_t results = t.rows * t.cols;
    const float4 *part = reinterpret_cast<const float4 *>(t.part + (size_t)tile * t.n_splits * results + i);
    const float4 first = part[0];
    sum[0] = first.x, sum[1] = first.y, sum[2] = first.z, sum[3] = first.w;
    RFK_UNROLL(4)
    for (uint32_t z = 1; z < t.n_splits; z++) {
        const float4 v = part[z * (results / 4)];
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
}

/* Split-K reduction of a tile, 1024 results a block.
 *   grid as rfk_matmul's, but z: results of a tile's columns that are there / 1024   block 256 */
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_join_tiles(rfk_tiles_args t) {
    rfk_wait_previous();
    uint32_t number = blockIdx.y;
    const rfk_product p = rfk_pick(t.m, &number);
    const uint32_t i = 4 * (blockIdx.z * RFK_BLOCK + threadIdx.x), row = number * t.rows + i % t.rows,
                   col = blockIdx.x * t.cols + i / t.rows;
    if (row >= p.n_out || col >= t.m.n_cols) return;
    float sum[4];
    rfk_join4(t, blockIdx.y * gridDim.x + blockIdx.x, i, sum);
    rfk_put4(p, row / 4, col, sum);
}

/* A row of a product, reduced over its splits and stored before it is normed. The product only scales and
 * accumulates. */
struct rfk_joined_row {
    const rfk_tiles_args *t;
    uint32_t col;
};
RFK_DEVICE rfk_norm_row rfk_norm_again(const rfk_joined_row &r) {
    const rfk_product &p = r.t->m.part[0];
    const rfk_norm_row row = {p.out + (size_t)r.col * p.out_stride, p.n_out};
    return row;
}
RFK_DEVICE void rfk_norm_load(const rfk_joined_row &r, uint32_t first, rfk_norm_part &x) {
    const rfk_tiles_args &t = *r.t;
    const rfk_product &p = t.m.part[0];
    const uint32_t col_tiles = (t.m.n_cols + t.cols - 1) / t.cols, results = t.rows * t.cols;
    float *out = p.out + (size_t)r.col * p.out_stride;
    rfk_norm_part before;
    uint32_t from[RFK_NORM_KEPT];
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < RFK_NORM_KEPT; j++) {
        const uint32_t row = 4 * (first + j * RFK_BLOCK + threadIdx.x),
                       tile = row / t.rows * col_tiles + r.col / t.cols;
        from[j] = tile * t.n_splits * results + r.col % t.cols * t.rows + row % t.rows;
        for (int k = 0; k < 4; k++) before[j][k] = x[j][k] = 0;
        if (p.accumulate) rfk_norm_get4(out, row / 4, p.n_out, before[j]);
    }
    RFK_UNROLL(2)
    for (uint32_t z = 0; z < t.n_splits; z++) {
        RFK_UNROLL(4)
        for (uint32_t j = 0; j < RFK_NORM_KEPT; j++) {
            if (4 * (first + j * RFK_BLOCK + threadIdx.x) >= p.n_out) break;
            const float4 v = *reinterpret_cast<const float4 *>(t.part + from[j] + z * results);
            x[j][0] += v.x, x[j][1] += v.y, x[j][2] += v.z, x[j][3] += v.w;
        }
    }
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < RFK_NORM_KEPT; j++) {
        for (int k = 0; k < 4; k++) x[j][k] = before[j][k] + x[j][k] * p.scale;
        rfk_set4(out, first + j * RFK_BLOCK + threadIdx.x, p.n_out, x[j]);
    }
}

/* Split-K reduction of a product's tiles, then the norm of the results.   grid cols   block 256, four blocks a
 * multiprocessor: all rows of 512 run at once */
struct rfk_join_norm_args {
    rfk_tiles_args t;
    rfk_norm_args norm;
};
template <int WAVE> static __global__ void RFK_RESIDENT(RFK_BLOCK, 4) rfk_join_norm(rfk_join_norm_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    RFK_SHARED(rfk_norm_shared, s);
    const rfk_joined_row r = {&a.t, blockIdx.x};
    rfk_norm_wide<WAVE>(a.norm, r, s);
}

/* ---- few columns ----
 * The products of a fused matvec for steps of several rows. Columns of int8 lie in memory in tiles of 16. A block has
 * 16 rows of W at a time, and its eight waves share their depth: each has the fragments of an eighth of a wave's lanes
 * in the fused matvec. Weights are unpacked once, to shared memory, and multiplied by 16 columns on matrix units,
 * exactly. There is a float sum for each of those lanes, and sums of adjacent ones are added first, all as in the fused
 * matvec: results have its bits. */

#define RFK_FEW_WAVES 8u
#define RFK_FEW_PITCH 17 /* 16-byte words from row to row in shared memory: four fragments, and one against conflicts */
/* Quantize values 4i .. 4i + 3 of a column of n, x, a group of 32 in eight adjacent lanes. norm: their weights if it is
 * to be a deferred norm, or NULL. All lanes of the wave take part. */
template <int WAVE>
RFK_DEVICE void rfk_few_put(const rfk_few_columns &to, uint32_t n, uint32_t col, uint32_t i, float (&x)[4],
                            const float *norm, bool inside) {
    if (norm) {
        const float squares = rfk_group_squares<WAVE>(x);
        if (inside && i % 8 == 0) rfk_few_squares(to)[(size_t)col * (n / 32) + i / 8] = squares;
        RFK_UNROLL(4)
        for (int k = 0; k < 4; k++) x[k] *= norm[k];
    }
    const rfk_int8_four v = rfk_quantize_halves<WAVE>(x);
    if (inside) rfk_few_put_int8(to, n, col, i, v);
}

/* Quantize columns, behind a post-norm and as a deferred norm if there are such.
 *   grid [columns, ceil(n / 1024)]   block 256 */
struct rfk_few_quantize_args {
    const float *x;
    rfk_add_args add;     /* to x; out may be x. Without rows */
    const uint32_t *rows; /* NULL: a column is its row */
    const uint8_t *norm;  /* NULL: none */
    rfk_few_columns to;
    uint32_t x_stride, n, norm_type;
};
template <int WAVE> static __global__ void RFK_THREADS(RFK_BLOCK) rfk_few_quantize(rfk_few_quantize_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    const uint32_t col = blockIdx.x, i = blockIdx.y * RFK_BLOCK + threadIdx.x;
    const bool inside = i < a.n / 4;
    float x[4], w[4] = {1, 1, 1, 1};
    RFK_SHARED(rfk_norm_shared, s);
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < 4; k++)
        if (a.norm && inside) w[k] = rfk_load_any(a.norm, a.norm_type, 4 * (size_t)i + k);
    rfk_start_next();
    rfk_wait_previous();
    rfk_get4(a.x + (size_t)(a.rows ? a.rows[col] : col) * a.x_stride, i, a.n, x);
    if (a.add.y) {
        const float *y = a.add.y + (size_t)col * a.add.y_stride;
        rfk_add(a.add, y, i, a.n, rfk_add_scale<WAVE>(a.add, y, a.n, s), x);
        if (inside) rfk_set4(a.add.out + (size_t)col * a.x_stride, i, a.n, x);
    }
    rfk_few_put<WAVE>(a.to, a.n, col, i, x, a.norm ? w : NULL, inside);
}

struct rfk_few_args {
    rfk_product part[RFK_PRODUCTS]; /* glu: the gates, then what they multiply */
    rfk_few_columns x;
    const uint8_t *norm;            /* NULL: x is no deferred norm */
    const float *from;              /* what it was made from, [row][from_stride] */
    const uint32_t *rows;           /* NULL: a column is its row */
    float *norm_out;                /* [column][norm_stride] the normed x; NULL: no other op reads it */
    uint32_t n_in, n_cols, norm_type, from_stride, norm_stride, glu, is_gelu;
    uint32_t n_tiles;               /* of 16 rows of all products, or of a GLU's gates */
    float eps;
};
template <int WAVE> struct rfk_few_shared {
    struct input {
        int4 w[RFK_FEW_WAVES][RFK_FEW_ROWS][RFK_FEW_PITCH];
        float scale[RFK_FEW_WAVES][4 * RFK_FEW_ROWS][RFK_SCALES];
    };
    union {
        input in;
        float sum[RFK_FEW_WAVES][RFK_FEW_ROWS * RFK_FEW_ROWS]; /* [wave][column][row] */
    } u;
    float factor[RFK_FEW_ROWS]; /* of each column: 1 / rms of a deferred norm */
};

/* The 16 values of x that piece i of a fragment multiplies. */
template <int TYPE, int WAVE> RFK_DEVICE uint32_t rfk_fragment_piece(uint32_t f, uint32_t i, uint32_t n_fragments) {
    const int order = rfk_fragments<TYPE>::ORDER;
    if (order == RFK_ORDER_Q6) return f / 2 * 8 + f % 2 + 2 * i;
    if (order == RFK_ORDER_STRIDED) {
        const uint32_t first = f / WAVE * WAVE;
        return 4 * first + (f - first) + i * rfk_active_lanes(n_fragments - first, WAVE);
    }
    return rfk_fragments<TYPE>::VALUES / 16 * f + i;
}

/* An operand of 16 columns by 32 bytes, from two pieces of 16. */
RFK_DEVICE void rfk_few_operand(rfk_operand &o, const int4 *first, const int4 *second, uint32_t lane) {
    const uint32_t kind = RFK_MATRIX, col = lane % 16 * 4;
    const int *a = reinterpret_cast<const int *>(first), *b = reinterpret_cast<const int *>(second);
    if (kind == RFK_MATRIX_SM80) {
        o.r[0] = a[lane], o.r[1] = b[lane], o.r[2] = a[32 + lane], o.r[3] = b[32 + lane];
    } else if (kind == RFK_MATRIX_MFMA2) {
        o.r[0] = a[col + lane / 16], o.r[1] = b[col + lane / 16];
    } else if (kind == RFK_MATRIX_MFMA3) {
        const int *half = (lane < 32 ? a : b) + col + lane / 16 % 2 * 2;
        o.r[0] = half[0], o.r[1] = half[1];
    } else if (kind == RFK_MATRIX_WMMA11) {
        RFK_UNROLL(4)
        for (int i = 0; i < 4; i++) o.r[i] = a[col + i], o.r[4 + i] = b[col + i];
    } else if (kind == RFK_MATRIX_WMMA12) {
        const uint32_t at = col + lane / 16 * 2;
        o.r[0] = a[at], o.r[1] = a[at + 1], o.r[2] = b[at], o.r[3] = b[at + 1];
    }
}

/* Dot products of 16 rows and 16 columns over two pieces, the first (part 0), the second (1) or both (2). */
template <int WAVE>
RFK_DEVICE void rfk_few_dots(const int4 *rows, const int4 *first, const int4 *second, int n_parts,
                             int (&dots)[2][256 / WAVE]) {
    const uint32_t lane = threadIdx.x % WAVE, kind = RFK_MATRIX;
    if (kind == RFK_MATRIX_DOT) {
        for (uint32_t i = 0; i < 256 / WAVE; i++) {
            const uint32_t col = rfk_matrix_col(lane, i);
            const int4 *row = rows + rfk_matrix_row(lane, i, 256 / WAVE) * RFK_FEW_PITCH;
            int w[4];
            rfk_words(row[0], w);
            dots[0][i] = rfk_dot16(w, first[col], RFK_DOT_START);
            rfk_words(row[1], w);
            if (n_parts == 1) dots[0][i] = rfk_dot16(w, second[col], dots[0][i]);
            else dots[1][i] = rfk_dot16(w, second[col], RFK_DOT_START);
        }
        return;
    }
    rfk_operand a, b;
    rfk_load_rows<RFK_FEW_PITCH, false>(a, rows, 0, lane);
    rfk_few_operand(b, first, second, lane);
    rfk_mma_int8<WAVE>(a, b, n_parts == 1 ? 2 : 0, dots[0]);
    if (n_parts == 2) rfk_mma_int8<WAVE>(a, b, 1, dots[1]);
}

/* Results of a lane; NARROW: up to eight columns, for which mma.sync has an instruction of its own. */
#if defined(RFK_SM80)
#define RFK_FEW_RESULTS(NARROW, WAVE) ((NARROW) ? 4 : 8)
#else
#define RFK_FEW_RESULTS(NARROW, WAVE) (256 / (WAVE))
#endif

/* Add the products of a fragment to the lane's results. w, scale: the fragment of the tile's first row. */
template <int TYPE, int WAVE, int N>
RFK_DEVICE void rfk_few_fragment(const rfk_few_args &a, uint32_t f, const int4 *w, const float *scale, bool has_sums,
                                 float (&sum)[N]) {
    typedef rfk_fragments<TYPE> F;
    const int ALL = 256 / WAVE, PARTS = TYPE >= RFK_OTHER || F::DOTS == 4 ? 2 : 1;
    const bool has_min = rfk_format<TYPE>::HAS_MIN != 0;
    const uint32_t lane = threadIdx.x % WAVE, n_fragments = a.n_in / F::VALUES;
    const size_t tile = blockIdx.x;
    int dots[F::DOTS / PARTS][2][ALL];
    float d[F::DOTS][ALL], sums[2][ALL];
    RFK_UNROLL(4)
    for (uint32_t i = 0; i < (uint32_t)F::DOTS; i++) {
        const uint32_t per = PARTS == 2 ? 1 : 2, piece = rfk_fragment_piece<TYPE, WAVE>(f, i * per, n_fragments);
        const size_t group = tile * (a.n_in / 2) + piece / 2 * RFK_FEW_ROWS;
        rfk_lane_values<ALL>(rfk_few_d(a.x) + group, lane, d[i]);
        if (has_min) rfk_lane_values<ALL>(rfk_few_e(a.x) + group, lane, sums[i % 2]);
        if (has_sums) rfk_lane_values<ALL>(rfk_few_sum(a.x) + tile * a.n_in + piece * RFK_FEW_ROWS, lane, sums[i % 2]);
    }
    RFK_UNROLL(2)
    for (uint32_t g = 0; g < F::VALUES / 32; g++) {
        const int4 *x = a.x.q + tile * a.n_in;
        rfk_few_dots<WAVE>(w + 2 * g, x + rfk_fragment_piece<TYPE, WAVE>(f, 2 * g, n_fragments) * RFK_FEW_ROWS,
                           x + rfk_fragment_piece<TYPE, WAVE>(f, 2 * g + 1, n_fragments) * RFK_FEW_ROWS, PARTS,
                           dots[g]);
    }
    float s[RFK_LANE_ROWS(ALL)][RFK_SCALES];
    RFK_UNROLL(8)
    for (uint32_t r = 0; r < RFK_LANE_ROWS((uint32_t)ALL); r++)
        RFK_UNROLL(3)
        for (int k = 0; k < RFK_SCALES; k += 2) {
            const float2 two = *reinterpret_cast<const float2 *>(
                scale + rfk_matrix_row(lane, r, ALL) * 4 * RFK_SCALES + k);
            s[r][k] = two.x, s[r][k + 1] = two.y;
        }
    RFK_UNROLL(8)
    for (int i = 0; i < N; i++) {
        rfk_fragment_scales x;
        float values[4];
        RFK_UNROLL(4)
        for (int k = 0; k < F::DOTS; k++) {
            x.d[k] = d[k][RFK_COL_INDEX(i)];
            values[k] = rfk_dot_to_float(dots[k / PARTS][k % PARTS][i]);
        }
        RFK_UNROLL(2)
        for (int k = 0; k < 2; k++) x.sums[k] = has_min || has_sums ? sums[k][RFK_COL_INDEX(i)] : 0.0f;
        sum[i] = F::join(s[RFK_ROW_INDEX(i)], values, x, sum[i]);
    }
}

/* Store an unpacked fragment in shared memory. */
template <int TYPE>
RFK_DEVICE void rfk_few_store(const typename rfk_fragments<TYPE>::loaded &raw, uint32_t lane, int4 *w, float *scale) {
    const int offset = rfk_fragments<TYPE>::OFFSET;
    rfk_fragment_weights o;
    rfk_fragments<TYPE>::unpack(raw, lane, o);
    RFK_UNROLL(4)
    for (int i = 0; i < rfk_fragments<TYPE>::VALUES / 16; i++) {
        int4 v;
        v.x = o.q[4 * i], v.y = o.q[4 * i + 1], v.z = o.q[4 * i + 2], v.w = o.q[4 * i + 3];
        if (offset) {
            v.x = rfk_subtract4(v.x, offset), v.y = rfk_subtract4(v.y, offset);
            v.z = rfk_subtract4(v.z, offset), v.w = rfk_subtract4(v.w, offset);
        }
        w[i] = v;
    }
    RFK_UNROLL(6)
    for (int i = 0; i < RFK_SCALES; i++) scale[i] = o.s[i];
}

/* The factors of a block's `count` columns from col0 on, a column a wave, from the last wave on: it has the least to
 * copy. */
template <int WAVE>
RFK_DEVICE void rfk_few_factors(const rfk_few_args &a, uint32_t col0, uint32_t count, float *factors) {
    for (uint32_t c = (blockDim.x - 1 - threadIdx.x) / WAVE; c < count; c += blockDim.x / WAVE) {
        const float *squares = rfk_few_squares(a.x) + (size_t)(col0 + c) * (a.n_in / 32);
        const float factor = a.norm && col0 + c < a.n_cols ? rfk_norm_factor<WAVE>(squares, a.n_in, a.eps) : 1.0f;
        if (threadIdx.x % WAVE == 0) factors[c] = factor;
    }
}

/* By one block: store the normed columns, where another op reads them. */
RFK_DEVICE void rfk_few_norm_out(const rfk_few_args &a, uint32_t col0, uint32_t count, const float *factors) {
    for (uint32_t k = 0; k < count && col0 + k < a.n_cols; k++) {
        const uint32_t to = col0 + k;
        const float *from = a.from + (size_t)(a.rows ? a.rows[to] : to) * a.from_stride;
        for (uint32_t i = threadIdx.x; i < a.n_in; i += blockDim.x)
            a.norm_out[(size_t)to * a.norm_stride + i] = from[i] * factors[k] * rfk_load_any(a.norm, a.norm_type, i);
    }
}

/* ---- up to four columns, by dot products ----
 * For types that rfk_few_direct does not have, and up to three columns in plans where no room is made for its blocks
 * (rfk_find_plan_way). As the fused matvec: a wave has a row, its lanes fragments, which they unpack once and
 * multiply by each column. */

#define RFK_ROWS_MAX 4u     /* columns: eight took longer, for a few as for eight */
#define RFK_ROWS_MIXTURE 3u /* the same where rfk_few_direct has the types, but no room */
#if defined(RFK_NVIDIA)
#define RFK_ROWS_RESIDENT 1 /* at 128 registers a thread, one block fills a multiprocessor */
#else
#define RFK_ROWS_RESIDENT 2
#endif
#define RFK_ROWS_BLOCK 512
#define RFK_ROWS_IN_FLIGHT 2 /* fragments a lane: fewer of them in more waves were slower on an H200 */
/* Groups of columns whose loads are in flight a thread: hipcc keeps more than one in private memory. */
#if defined(RFK_NVIDIA) || defined(ROCMFORGE_HIP_EMU)
#define RFK_ROWS_GROUPS 4u
#else
#define RFK_ROWS_GROUPS 1u
#endif
/* Types without a grid that have code of their own here on NVIDIA: 8B MXFP4 on an H200, 2 and 4 rows 3.74 and 4.47 ->
 * 2.67 and 3.15 ms. */
#if defined(RFK_NVIDIA) || defined(ROCMFORGE_HIP_EMU)
#define RFK_ROWS_ONE_TYPES(X) \
    X(RF_TYPE_IQ4_NL) X(RF_TYPE_IQ4_XS) X(RF_TYPE_MXFP4) X(RF_TYPE_NVFP4) X(RF_TYPE_Q3_K) X(RF_TYPE_Q2_K)
#else
#define RFK_ROWS_ONE_TYPES(X)
#endif
/* The type, if waves of this size may have such code, else RFK_OTHER: emulated waves of 64 run what AMD's run. */
template <int WAVE> RFK_DEVICE uint32_t rfk_rows_type(uint32_t type) { return WAVE == 32 ? type : (uint32_t)RFK_OTHER; }
struct rfk_rows_shared {
    float factors[RFK_ROWS_MAX]; /* as in rfk_few_shared */
};

RFK_DEVICE rfk_column rfk_column_of(rfk_column c, uint32_t i) {
    c.piece += i * 5 * c.n_fragments, c.scale += i * 20 * c.n_fragments, c.grid += i * 20 * c.n_fragments;
    return c;
}

/* Store a group of 32 values and its scale. */
RFK_DEVICE void rfk_put_group(const rfk_column &c, uint32_t group, const int4 &first, const int4 &second, float d) {
    const int ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
    const int sum = rfk_dot16(ones, first, 0), next = rfk_dot16(ones, second, 0);
    int4 piece0 = first, piece1 = second;
    if (c.order == RFK_ORDER_NIBBLES(4)) {
        piece0 = rfk_interleave_eights(first.x, first.y, second.x, second.y);
        piece1 = rfk_interleave_eights(first.z, first.w, second.z, second.w);
    } else if (c.order == RFK_ORDER_NIBBLES(2)) {
        piece0 = rfk_interleave_eights(first.x, first.y, first.z, first.w);
        piece1 = rfk_interleave_eights(second.x, second.y, second.z, second.w);
    }
    uint32_t piece, fragment = rfk_chunk_fragment(c, 2 * group, &piece);
    c.piece[piece * c.n_fragments + fragment] = piece0;
    rfk_put_scale(c, 2 * group, d, sum + next);
    fragment = rfk_chunk_fragment(c, 2 * group + 1, &piece);
    c.piece[piece * c.n_fragments + fragment] = piece1;
    rfk_put_scale(c, 2 * group + 1, d, sum + next);
}

/* Copy the columns to shared memory, a group of 32 of a column a thread at a time. Waves without groups make the
 * factors meanwhile. Ends with a barrier. */
template <int WAVE> RFK_DEVICE void rfk_fill_columns(const rfk_few_args &a, const rfk_column &c, float *factors) {
    const uint32_t N = RFK_ROWS_GROUPS;
    const uint32_t shift = a.n_cols > 2 ? 2 : 1, end = a.n_in / 32 << shift, col = threadIdx.x & ((1u << shift) - 1);
    const float *const scale = rfk_few_d(a.x) + col;
    RFK_UNROLL(1)
    for (uint32_t i = threadIdx.x; i < end && col < a.n_cols; i += N * RFK_ROWS_BLOCK) {
        int4 q[N][2];
        float d[N];
        RFK_UNROLL(4)
        for (uint32_t k = 0; k < N; k++) { /* the first one again instead of those behind the end */
            const uint32_t at = i + k * RFK_ROWS_BLOCK, group = (at < end ? at : i) >> shift;
            q[k][0] = a.x.q[2 * group * RFK_FEW_ROWS + col], q[k][1] = a.x.q[(2 * group + 1) * RFK_FEW_ROWS + col];
            d[k] = scale[group * RFK_FEW_ROWS];
        }
        RFK_UNROLL(4)
        for (uint32_t k = 0; k < N; k++)
            if (i + k * RFK_ROWS_BLOCK < end)
                rfk_put_group(rfk_column_of(c, col), (i + k * RFK_ROWS_BLOCK) >> shift, q[k][0], q[k][1], d[k]);
    }
    rfk_few_factors<WAVE>(a, 0, a.n_cols, factors);
    __syncthreads();
}

/* rfk_wave_sum of each of four values (reduce-scatter): value i where lane % 4 is i. */
template <int WAVE> RFK_DEVICE float rfk_wave_sums(const float (&v)[RFK_ROWS_MAX]) {
    const bool odd = threadIdx.x % 2 != 0, second = threadIdx.x / 2 % 2 != 0;
    const float low = (odd ? v[1] : v[0]) + rfk_shuffle_xor<WAVE>(odd ? v[0] : v[1], 1),
                high = (odd ? v[3] : v[2]) + rfk_shuffle_xor<WAVE>(odd ? v[2] : v[3], 1);
    float sum = (second ? high : low) + rfk_shuffle_xor<WAVE>(second ? low : high, 2);
    for (int mask = 4; mask < WAVE; mask *= 2) sum += rfk_shuffle_xor<WAVE>(sum, mask);
    return sum;
}

/* A block's rows, as rfk_fused_block. Lane i of a wave stores what belongs to column i. LOOK_UP: codes of
 * rfk_split_codes are looked up once for all columns, instead of two dot products for each: faster from three columns
 * on. */
template <int TYPE, int WAVE, int U, bool LOOK_UP>
RFK_DEVICE void rfk_rows_block(const rfk_few_args &a, const rfk_product &p, uint32_t number, uint32_t n_blocks,
                               rfk_column c, float *factors) {
    typedef rfk_fragments<TYPE> F;
    const uint32_t n_fragments = a.n_in / F::VALUES, lane = threadIdx.x % WAVE, n_out = p.n_out,
                   step = n_blocks * (RFK_ROWS_BLOCK / WAVE);
    const uint32_t mine = lane < n_fragments ? (n_fragments - lane + WAVE - 1) / WAVE : 0, /* this lane's */
        rounds = (n_fragments + WAVE * U - 1) / (WAVE * U);
    uint32_t row = number * (RFK_ROWS_BLOCK / WAVE) + threadIdx.x / WAVE, second = 0, round = 0;
    typename F::loaded raw[U];
    rfk_fragment_at at;
    float sum[RFK_ROWS_MAX] = {0}, gate = 0;
    c.order = F::ORDER, c.wave = WAVE, c.has_min = rfk_format<TYPE>::HAS_MIN, c.offset = F::OFFSET;
    F::template begin<WAVE>(p.row0 + row, a.n_in, lane, at);
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < (uint32_t)U; k++) {
        if (row < n_out && k < mine) F::fetch(p.w, at, raw[k]);
        F::template next<WAVE>(at);
    }
    const int GRID = rfk_grid_of<TYPE>::IS;
    uint32_t *grid = rfk_column_of(c, a.n_cols - 1).grid;
    rfk_fill_grid<GRID>(grid, RFK_ROWS_BLOCK);
    rfk_wait_previous();
    rfk_fill_columns<WAVE>(a, c, factors);
    while (row < n_out) {
        uint32_t next_round = round + 1, next_row = row, next_second = second;
        if (next_round == rounds) { /* the row is done: next row */
            next_round = 0;
            next_second = a.glu & (second ^ 1);
            if (!next_second) next_row += step;
            F::template begin<WAVE>((next_second ? a.part[1].row0 : p.row0) + next_row, a.n_in, lane, at);
        }
        RFK_UNROLL(4)
        for (uint32_t k = 0; k < (uint32_t)U; k++) {
            const uint32_t i = round * U + k, fragment = lane + i * WAVE;
            rfk_fragment_weights w;
            bool is_q2 = false;
            if (i < mine) {
                rfk_unpack_by<TYPE, GRID>::run(raw[k], lane, grid, w);
                is_q2 = rfk_is_q2<TYPE>(raw[k]);
                RFK_UNROLL(4)
                for (int i = 3; LOOK_UP && rfk_split_codes<TYPE - RFK_ONE(0)>::IS && i >= 0; i--)
                    rfk_look_up_in_order<TYPE - RFK_ONE(0)>(w.q[i], w.q + 2 * i);
            }
            if (next_row < n_out && next_round * U + k < mine) {
                if (next_second) F::fetch(a.part[1].w, at, raw[k]);
                else F::fetch(p.w, at, raw[k]);
            }
            F::template next<WAVE>(at);
            RFK_UNROLL(4)
            for (uint32_t col = 0; col < RFK_ROWS_MAX; col++)
                if (i < mine && col < a.n_cols) {
                    rfk_fragment_x x;
                    rfk_load_x<TYPE>(rfk_column_of(c, col), fragment, x);
                    sum[col] = rfk_dot_unpacked<TYPE, LOOK_UP>(w, is_q2, x, sum[col]);
                }
        }
        if (next_round == 0) {
            const float all = rfk_wave_sums<WAVE>(sum), made = lane < a.n_cols ? rfk_mul(all, factors[lane]) : 0.0f;
            sum[0] = sum[1] = sum[2] = sum[3] = 0;
            if (next_second) gate = made;
            else if (a.glu && lane < a.n_cols) (void)rfk_put_glu(a, row, lane, gate, made);
            else if (lane < a.n_cols) rfk_put(p, row, lane, made);
        }
        row = next_row, second = next_second, round = next_round;
    }
    if (a.norm_out && blockIdx.x == 0) rfk_few_norm_out(a, 0, a.n_cols, factors);
}

/* The same for RFK_ONE types: codes are looked up where that is faster. */
template <int TYPE, int WAVE>
RFK_DEVICE void rfk_rows_one(const rfk_few_args &a, const rfk_product &p, uint32_t number, uint32_t n_blocks,
                             const rfk_column &c, float *factors) {
    const bool has_codes = rfk_split_codes<TYPE - RFK_ONE(0)>::IS;
    if (has_codes && a.n_cols > 2)
        rfk_rows_block<TYPE, WAVE, RFK_ROWS_IN_FLIGHT, has_codes>(a, p, number, n_blocks, c, factors);
    else rfk_rows_block<TYPE, WAVE, RFK_ROWS_IN_FLIGHT, false>(a, p, number, n_blocks, c, factors);
}

/* grid: the blocks of each product   block RFK_ROWS_BLOCK   LDS 1.25 bytes a value of the columns   reads W once */
template <int WAVE, bool OTHER>
static __global__ void RFK_RESIDENT(RFK_ROWS_BLOCK, RFK_ROWS_RESIDENT) rfk_rows(rfk_few_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    RFK_SHARED(rfk_rows_shared, s);
    RFK_DYNAMIC(int4, column);
    uint32_t number, n_blocks;
    const uint32_t which = rfk_find_product(a.part, number, n_blocks);
#if defined(RFK_NVIDIA)
    const rfk_product &p = a.part[which]; /* stays in constant memory: there are no registers for it */
#else
    rfk_product p = a.part[0];
    RFK_UNROLL(4)
    for (uint32_t i = 1; i < RFK_PRODUCTS; i++)
        if (which == i) p = a.part[i]; /* no index that is only known at run time: p would be in memory */
#endif
    const rfk_column c = rfk_column_in(column, a.n_in);
    if (OTHER) {
#define RFK_ROWS_ONE_CASE(TYPE) \
    case TYPE: \
        if (rfk_built<TYPE>::is) \
            rfk_rows_one<RFK_ONE(TYPE), WAVE>(a, p, number, n_blocks, c, s.factors); \
        return;
        switch (p.type) {
            RFK_GRID_TYPES(RFK_ROWS_ONE_CASE)
        default: break;
        }
        switch (rfk_rows_type<WAVE>(p.type)) {
            RFK_ROWS_ONE_TYPES(RFK_ROWS_ONE_CASE)
        default: break;
        }
#undef RFK_ROWS_ONE_CASE
        if (rfk_built<RFK_OTHER>::is) rfk_rows_block<RFK_OTHER, WAVE, 1, false>(a, p, number, n_blocks, c, s.factors);
        return;
    }
#define RFK_ROWS_CASE(TYPE, max) \
    case TYPE: \
        if (rfk_built<TYPE>::is) \
            rfk_rows_block<TYPE, WAVE, (RFK_ROWS_IN_FLIGHT < max ? RFK_ROWS_IN_FLIGHT : max), false>( \
                a, p, number, n_blocks, c, s.factors); \
        break;
    switch (p.type) {
        RFK_FUSED_TYPES(RFK_ROWS_CASE)
    default: break;
    }
#undef RFK_ROWS_CASE
}
template <int WAVE> static void (*rfk_find_rows(bool other))(rfk_few_args) {
    return other ? rfk_rows<WAVE, true> : rfk_rows<WAVE, false>;
}

/* ---- weights straight to mma.sync ----
 * A lane unpacks what mma.sync wants of it: of rows lane / 4 and lane / 4 + 8 the lane's quarter of each dot product.
 * mma.sync has eight columns and a depth of 32. Four columns of x are given to it twice: as columns 0 to 3 x of one
 * fragment, with zeros in the upper half of the depth; as columns 4 to 7 x of the second fragment after it, with zeros
 * in the lower half. So each of a lane's results is of one fragment, and is scaled for a column that is there. The
 * order of values in an exact sum is free, if x has the same. Results have the bits of rfk_few_fragment's. */

#define RFK_DIRECT_TILES(COLS) ((COLS) == 16 ? 2u : 1u) /* of 16 rows, which a block has at a time */
#if defined(RFK_NVIDIA) || defined(ROCMFORGE_HIP_EMU)
#define RFK_DIRECT_TYPES(X) X(RF_TYPE_Q4_K) X(RF_TYPE_Q5_K) X(RF_TYPE_Q6_K) X(RF_TYPE_Q4_0)
#define RFK_DIRECT_WAVES(COLS) (RFK_FEW_WAVES * RFK_DIRECT_TILES(COLS))

/* What a block's columns, 4, 8 or 16, have for a block of 256 weights. */
template <uint32_t COLS> struct rfk_direct_x {
    int4 q[16][COLS];
    float d[8][COLS];
    float sum[16][COLS]; /* e of the groups, or of a type with an offset the sums of the pieces */
};
/* Eight waves share a tile's columns of W; a block of 16 columns has two tiles at a time, whose waves share x. */
template <uint32_t COLS> struct rfk_direct_shared {
    rfk_direct_x<COLS> x[RFK_FEW_WAVES][2];
    uint8_t w[RFK_DIRECT_WAVES(COLS)][2][RFK_FEW_ROWS * 208];  /* [wave]; rfk_direct::ROW */
    float sum[2][RFK_DIRECT_WAVES(COLS)][COLS * RFK_FEW_ROWS]; /* of a tile and of the next: [wave][column][row] */
    float factor[COLS];                                        /* as in rfk_few_shared */
};
#if RFK_MAY_BE(RFK_MATRIX_SM80)

/* How a wave copies a block of 256 weights of 16 rows to shared memory, and a lane reads its part of four adjacent
 * fragments. K: values of a product, of which a lane has eight ADJACENT ones, or four of each 16; ROW: bytes of a row
 * there; head: scales; loaded: what is kept in registers; get_scales: those of fragment 2 * half + j. */
template <int TYPE> struct rfk_direct;
/* A tile's two halves of eight rows: adjacent, or in a GLU the same rows of its two products. */
struct rfk_direct_half {
    uint32_t block, last; /* of the first row; the last row that exists */
};
struct rfk_direct_at {
    rfk_direct_half half[2];
    uint32_t product[2]; /* whose weights they are */
};
/* Where the block of row i of the tile is in plane `plane`, whose blocks have `bytes` bytes. */
RFK_DEVICE const uint8_t *rfk_direct_from(const rfk_few_args &a, const rfk_direct_at &at, uint32_t i, int plane,
                                          uint32_t bytes) {
    const bool low = i < 8;
    const uint32_t block = low ? at.half[0].block : at.half[1].block, last = low ? at.half[0].last : at.half[1].last;
    const uint8_t *const from = a.part[low ? at.product[0] : at.product[1]].w.plane[plane];
    return from + (block + (i % 8 < last ? i % 8 : last) * (a.n_in / 256)) * bytes;
}
/* 16 bytes of the lane's row r, behind all rows. */
template <int ROW> RFK_DEVICE int4 rfk_direct_head(const uint8_t *w, uint32_t r) {
    return reinterpret_cast<const int4 *>(w + RFK_FEW_ROWS * ROW)[threadIdx.x % 32 / 4 + 8 * r];
}
/* Q4_K and Q5_K: a row's last bits of codes, quants. */
template <int TYPE> struct rfk_direct_k {
    static const bool FIVE = TYPE == RF_TYPE_Q5_K;
    static const int K = 32, ADJACENT = 1, ROW = 160; /* bytes: rows of a half wave lie in different banks */
    static const uint32_t BYTES = FIVE ? 176 : 144, QUANTS = FIVE ? 32 : 0;
    struct loaded {};
    struct scales {
        uint32_t scale[2][2], min[2][2]; /* [row] eight of 6 bits, a byte each */
        float d[2], m[2];
    };
    RFK_DEVICE void copy(const rfk_few_args &a, const rfk_direct_at &at, uint8_t *to, loaded &) {
        const uint32_t lane = threadIdx.x % 32;
        RFK_UNROLL(4)
        for (uint32_t k = 0; k < 4; k++) {
            const uint32_t row = lane / 8 + 4 * k, part = QUANTS + lane % 8 * 16;
            rfk_copy16_once(reinterpret_cast<int4 *>(to + row * ROW + part),
                            rfk_direct_from(a, at, row, 0, BYTES) + 16 + part);
        }
        if (FIVE)
            rfk_copy16_once(reinterpret_cast<int4 *>(to + lane / 2 * ROW + lane % 2 * 16),
                            rfk_direct_from(a, at, lane / 2, 0, BYTES) + 16 + lane % 2 * 16);
        if (lane < 16)
            rfk_copy16_once(reinterpret_cast<int4 *>(to + RFK_FEW_ROWS * ROW + 16 * lane),
                            rfk_direct_from(a, at, lane, 0, BYTES));
    }
    RFK_DEVICE void read_head(const uint8_t *w, const loaded &, scales &o) {
        RFK_UNROLL(2)
        for (int r = 0; r < 2; r++) {
            const int4 head = rfk_direct_head<ROW>(w, r);
            const uint32_t y = (uint32_t)head.y, z = (uint32_t)head.z, e = (uint32_t)head.w;
            o.scale[r][0] = y & 0x3f3f3f3fu, o.scale[r][1] = (e & 0x0f0f0f0fu) | ((y >> 2) & 0x30303030u);
            o.min[r][0] = z & 0x3f3f3f3fu, o.min[r][1] = ((e >> 4) & 0x0f0f0f0fu) | ((z >> 2) & 0x30303030u);
            o.d[r] = rfk_low_half((uint32_t)head.x), o.m[r] = rfk_high_half((uint32_t)head.x);
        }
    }
    RFK_DEVICE void unpack(const uint8_t *w, uint32_t j, int (&a)[4][4]) {
        const uint32_t quarter = threadIdx.x % 4;
        RFK_UNROLL(2)
        for (int r = 0; r < 2; r++) {
            const uint8_t *const row = w + (threadIdx.x % 32 / 4 + 8 * r) * ROW;
            const uint2 q = *reinterpret_cast<const uint2 *>(row + QUANTS + 32 * j + 8 * quarter);
            if (!FIVE) {
                rfk_split_nibbles<false>((int)q.x, a[0][r], a[1][r]);
                rfk_split_nibbles<false>((int)q.y, a[0][2 + r], a[1][2 + r]);
                continue;
            }
            const uint32_t last = *reinterpret_cast<const uint32_t *>(row + 8 * j + quarter / 2 * 4) >> quarter % 2 * 4;
            rfk_q5_codes<false>(q.x, last, 0, a[0][r], a[1][r]);
            rfk_q5_codes<false>(q.y, last, 1, a[0][2 + r], a[1][2 + r]);
        }
    }
    RFK_DEVICE void get_scales(const scales &h, bool half, uint32_t j, float (&s)[2][RFK_SCALES]) {
        RFK_UNROLL(2)
        for (int r = 0; r < 2; r++) {
            const uint32_t scale = (half ? h.scale[r][1] : h.scale[r][0]) >> (16 * j),
                           min = (half ? h.min[r][1] : h.min[r][0]) >> (16 * j);
            s[r][0] = (float)(scale & 255), s[r][1] = (float)((scale >> 8) & 255);
            s[r][2] = (float)(min & 255), s[r][3] = (float)((min >> 8) & 255);
            s[r][4] = h.d[r], s[r][5] = h.m[r];
        }
    }
};
template <> struct rfk_direct<RF_TYPE_Q4_K> : rfk_direct_k<RF_TYPE_Q4_K> {};
template <> struct rfk_direct<RF_TYPE_Q5_K> : rfk_direct_k<RF_TYPE_Q5_K> {};
template <> struct rfk_direct<RF_TYPE_Q4_0> {
    static const int K = 32, ADJACENT = 0, ROW = 144; /* rows of a wave lie in different banks */
    struct loaded {};
    struct scales {
        int4 d[2]; /* [row] eight halves */
    };
    RFK_DEVICE void copy(const rfk_few_args &a, const rfk_direct_at &at, uint8_t *to, loaded &) {
        const uint32_t lane = threadIdx.x % 32;
        RFK_UNROLL(4)
        for (uint32_t k = 0; k < 4; k++) {
            const uint32_t row = lane / 8 + 4 * k, part = lane % 8 * 16;
            rfk_copy16_once(reinterpret_cast<int4 *>(to + row * ROW + part),
                            rfk_direct_from(a, at, row, 0, 128) + part);
        }
        if (lane < 16)
            rfk_copy16_once(reinterpret_cast<int4 *>(to + RFK_FEW_ROWS * ROW + 16 * lane),
                            rfk_direct_from(a, at, lane, 1, 16));
    }
    RFK_DEVICE void read_head(const uint8_t *w, const loaded &, scales &o) {
        RFK_UNROLL(2)
        for (int r = 0; r < 2; r++) o.d[r] = rfk_direct_head<ROW>(w, r);
    }
    RFK_DEVICE void unpack(const uint8_t *w, uint32_t j, int (&a)[4][4]) {
        RFK_UNROLL(2)
        for (int r = 0; r < 2; r++)
            RFK_UNROLL(2)
            for (int i = 0; i < 2; i++) {
                const int q = *reinterpret_cast<const int *>(w + (threadIdx.x % 32 / 4 + 8 * r) * ROW + 32 * j +
                                                             16 * i + threadIdx.x % 4 * 4);
                a[i][r] = rfk_low4(q), a[i][2 + r] = rfk_high4(q);
            }
    }
    RFK_DEVICE void get_scales(const scales &h, bool half, uint32_t j, float (&s)[2][RFK_SCALES]) {
        RFK_UNROLL(2)
        for (int r = 0; r < 2; r++) {
            int words[4];
            rfk_words(h.d[r], words);
            const uint32_t d = (uint32_t)(half ? words[2 + j] : words[j]);
            s[r][0] = rfk_low_half(d), s[r][1] = rfk_high_half(d);
        }
    }
};
template <> struct rfk_direct<RF_TYPE_Q6_K> {
    static const int K = 16, ADJACENT = 0, ROW = 208; /* low, high, scales */
    struct loaded {
        uint32_t d[2];
    };
    struct scales {
        int4 scale[2];
        float d[2];
    };
    RFK_DEVICE void copy(const rfk_few_args &a, const rfk_direct_at &at, uint8_t *to, loaded &ahead) {
        const uint32_t lane = threadIdx.x % 32;
        RFK_UNROLL(4)
        for (uint32_t k = 0; k < 4; k++) {
            const uint32_t row = lane / 8 + 4 * k, part = lane % 8 * 16;
            const uint8_t *from = rfk_direct_from(a, at, row, 0, 128) + part;
            rfk_copy16_once(reinterpret_cast<int4 *>(to + row * ROW + part), from);
        }
        RFK_UNROLL(2)
        for (uint32_t k = 0; k < 2; k++) {
            const uint32_t row = lane / 4 + 8 * k, part = lane % 4 * 16;
            const uint8_t *from = rfk_direct_from(a, at, row, 1, 64) + part;
            rfk_copy16_once(reinterpret_cast<int4 *>(to + row * ROW + 128 + part), from);
        }
        if (lane < 16)
            rfk_copy16_once(reinterpret_cast<int4 *>(to + lane * ROW + 192), rfk_direct_from(a, at, lane, 2, 16));
        RFK_UNROLL(2)
        for (uint32_t r = 0; r < 2; r++) ahead.d[r] = rfk_load2(rfk_direct_from(a, at, lane / 4 + 8 * r, 3, 2));
    }
    RFK_DEVICE void read_head(const uint8_t *w, const loaded &loaded, scales &o) {
        RFK_UNROLL(2)
        for (int r = 0; r < 2; r++) {
            o.scale[r] = *reinterpret_cast<const int4 *>(w + (threadIdx.x % 32 / 4 + 8 * r) * ROW + 192);
            o.d[r] = rfk_low_half(loaded.d[r]) / 4;
        }
    }
    RFK_DEVICE void unpack(const uint8_t *w, uint32_t j, int (&a)[4][4]) {
        RFK_UNROLL(2)
        for (int r = 0; r < 2; r++) {
            const uint8_t *const row = w + (threadIdx.x % 32 / 4 + 8 * r) * ROW + 4 * (threadIdx.x % 4);
            const uint32_t last = *reinterpret_cast<const uint32_t *>(row + 128 + 16 * j);
            RFK_UNROLL(2)
            for (int i = 0; i < 2; i++)
                rfk_q6_values(*reinterpret_cast<const uint32_t *>(row + j / 2 * 64 + j % 2 * 16 + 32 * i), last, i,
                              &a[i][r], &a[2 + i][r]);
        }
    }
    RFK_DEVICE void get_scales(const scales &h, bool half, uint32_t j, float (&s)[2][RFK_SCALES]) {
        RFK_UNROLL(2)
        for (int r = 0; r < 2; r++) {
            int words[4];
            rfk_words(h.scale[r], words);
            RFK_UNROLL(4)
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t w = (uint32_t)(half ? words[2 + i / 2] : words[i / 2]);
                s[r][i] = (float)(int8_t)(w >> (8 * j + 16 * (i % 2)));
            }
            s[r][4] = h.d[r];
        }
    }
};

/* out = start + a b: 16 rows by 8 columns over K bytes; start of either column. */
template <int K> RFK_DEVICE void rfk_mma_direct(const int *a, const int *b, const int *start, int *out) {
#if defined(ROCMFORGE_HIP_EMU)
    const int av[4] = {a[0], a[1], K == 32 ? a[2] : 0, K == 32 ? a[3] : 0}, bv[2] = {b[0], K == 32 ? b[1] : 0},
              c[4] = {start[0], start[1], start[0], start[1]};
    hip_emu_mma_m16n8k32_s8(out, av, bv, c);
#else
    if (K == 32)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%10,%11,%10,%11};"
            : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(start[0]), "r"(start[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%7,%8};"
            : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
            : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(start[0]), "r"(start[1]));
#endif
}

/* out += a b, as rfk_mma_direct<32>. */
RFK_DEVICE void rfk_mma_add(const int *a, const int *b, int *out) {
#if defined(ROCMFORGE_HIP_EMU)
    hip_emu_mma_m16n8k32_s8(out, a, b, out);
#else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(out[0]), "+r"(out[1]), "+r"(out[2]), "+r"(out[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

/* out = start + products of two fragments of K values, a and upper: b's columns 0 to 3 are x of a, 4 to 7 x of upper.
 * low: all bits set in lanes that have columns 0 to 3 of b, else 0. */
template <int K>
RFK_DEVICE void rfk_mma_both(const int *a, const int *upper, const int *b, uint32_t low, const int *start, int *out) {
    RFK_UNROLL(2)
    for (int k = 0; k < K / 16; k++) {
        const int both[4] = {a[2 * k], a[2 * k + 1], upper[2 * k], upper[2 * k + 1]},
                  x[2] = {(int)((uint32_t)b[k] & low), (int)((uint32_t)b[k] & ~low)};
        if (k == 0) rfk_mma_direct<32>(both, x, start, out);
        else rfk_mma_add(both, x, out);
    }
}

/* Copy what the columns have for block `block` to shared memory; of 16, the waves of each tile copy eight. */
template <int TYPE, uint32_t COLS>
RFK_DEVICE void rfk_direct_copy(const rfk_few_args &a, uint32_t block, rfk_direct_x<COLS> &to) {
    const uint32_t N = COLS < 8 ? COLS : 8, lane = threadIdx.x % 32, into = COLS == 16 ? threadIdx.x / 256 * 8 : 0,
                   col = blockIdx.x * COLS + into, two = lane / (N / 4), four = lane % (N / 4) * 4;
    const bool offset = rfk_fragments<TYPE>::OFFSET != 0;
    const size_t tile = col / RFK_FEW_ROWS, first = col % RFK_FEW_ROWS,
                 piece = tile * a.n_in + block * 16 * RFK_FEW_ROWS + first,
                 group = tile * (a.n_in / 2) + block * 8 * RFK_FEW_ROWS + first;
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < N / 2; k++) {
        const uint32_t i = lane / N + 32 / N * k;
        rfk_copy16(&to.q[i][into + lane % N], a.x.q + piece + i * RFK_FEW_ROWS + lane % N);
    }
    const float *d = rfk_few_d(a.x) + group + two % 8 * RFK_FEW_ROWS + four, *e = d + a.x.capacity / 32,
                *sum = rfk_few_sum(a.x) + piece + two * RFK_FEW_ROWS + four;
    if (two >= 16) return;
    int4 *const to_sum = reinterpret_cast<int4 *>(&to.sum[offset ? two : two % 8][into + four]);
    if (offset) rfk_copy16(to_sum, reinterpret_cast<const int4 *>(sum));
    if (two < 8) rfk_copy16(reinterpret_cast<int4 *>(&to.d[two][into + four]), reinterpret_cast<const int4 *>(d));
    else if (!offset) rfk_copy16(to_sum, reinterpret_cast<const int4 *>(e));
}

/* A lane's results of a tile: of eight columns [columns / 8][fragment]. Of four those of fragments p and p + 2, p = 0
 * and 1, each of the two in half of the lanes. */
template <uint32_t COLS> struct rfk_direct_sums {
    float of[COLS == 4 ? 1 : COLS / 8][COLS == 4 ? 2 : 4][4];
};

/* Add products of a block to the lane's results: of four columns those of fragments f and f + 2, weights w[0] and w[1],
 * else of eight columns those of f, weights w[0]. s: scales of that fragment whose results the lane gets. */
template <int TYPE, uint32_t COLS>
RFK_DEVICE void rfk_direct_fragment(const rfk_direct_x<COLS> &in, uint32_t eight, uint32_t f, const int (&w)[2][4][4],
                                    const float (&s)[2][RFK_SCALES], float *sum) {
    typedef rfk_fragments<TYPE> F;
    typedef rfk_direct<TYPE> D;
    const bool has_min = rfk_format<TYPE>::HAS_MIN != 0, offset = F::OFFSET != 0, both = COLS == 4;
    const uint32_t lane = threadIdx.x % 32, quarter = lane % 4, col = both ? lane / 4 % 4 : 8 * eight + lane / 4,
                   to = both ? quarter % 2 * 2 : 8 * eight + quarter * 2, low = lane < 16 ? 0xffffffffu : 0,
                   of = both ? f + lane / 16 * 2 : f, made = both ? f + quarter / 2 * 2 : f;
    int dots[F::DOTS][4];
    float2 d[F::DOTS], e[F::DOTS];
    RFK_UNROLL(4)
    for (uint32_t i = 0; i < (uint32_t)F::DOTS; i++) {
        const uint32_t from = rfk_fragment_piece<TYPE, 32>(of, i * (D::K / 16), 0),
                       piece = rfk_fragment_piece<TYPE, 32>(made, i * (D::K / 16), 0);
        int start[2] = {RFK_DOT_START, RFK_DOT_START}, b[2] = {0, 0};
        if (offset) {
            float2 sums = *reinterpret_cast<const float2 *>(&in.sum[piece][to]);
            if (D::K == 32) {
                const float2 more = *reinterpret_cast<const float2 *>(&in.sum[piece + 1][to]);
                sums.x += more.x, sums.y += more.y; /* integers: exact */
            }
            start[0] = (int)rfk_as_bits(rfk_fma(sums.x, -(float)F::OFFSET, 12582912.0f));
            start[1] = (int)rfk_as_bits(rfk_fma(sums.y, -(float)F::OFFSET, 12582912.0f));
        }
        if (D::ADJACENT) {
            const uint2 two = reinterpret_cast<const uint2 *>(&in.q[from + quarter / 2][col])[quarter % 2];
            b[0] = (int)two.x, b[1] = (int)two.y;
        } else {
            b[0] = reinterpret_cast<const int *>(&in.q[from][col])[quarter];
            if (D::K == 32) b[1] = reinterpret_cast<const int *>(&in.q[from + 1][col])[quarter];
        }
        if (both) rfk_mma_both<D::K>(w[0][i], w[1][i], b, low, start, dots[i]);
        else rfk_mma_direct<D::K>(w[0][i], b, start, dots[i]);
        d[i] = *reinterpret_cast<const float2 *>(&in.d[piece / 2][to]);
        if (has_min) e[i] = *reinterpret_cast<const float2 *>(&in.sum[piece / 2][to]);
    }
    RFK_UNROLL(4)
    for (int i = 0; i < 4; i++) {
        rfk_fragment_scales x;
        float values[4];
        x.sums[0] = x.sums[1] = 0;
        RFK_UNROLL(4)
        for (int k = 0; k < F::DOTS; k++) {
            x.d[k] = i % 2 ? d[k].y : d[k].x;
            if (has_min) x.sums[k % 2] = i % 2 ? e[k].y : e[k].x;
            values[k] = rfk_dot_to_float(dots[k][i]);
        }
        sum[i] = F::join(s[i / 2], values, x, sum[i]);
    }
}

/* Add the products of a block. */
template <int TYPE, uint32_t COLS>
RFK_DEVICE void rfk_direct_block(const uint8_t *w, const typename rfk_direct<TYPE>::loaded &loaded,
                                 const rfk_direct_x<COLS> &x, rfk_direct_sums<COLS> &sum) {
    typedef rfk_direct<TYPE> D;
    typename D::scales head;
    D::read_head(w, loaded, head);
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < (COLS == 4 ? 2u : 4u); j++) {
        int q[2][4][4];
        float scale[2][RFK_SCALES];
        D::unpack(w, j, q[0]);
        if (COLS == 4) D::unpack(w, j + 2, q[1]);
        D::get_scales(head, COLS == 4 ? threadIdx.x % 4 >= 2 : j >= 2, j % 2, scale);
        RFK_UNROLL(2)
        for (uint32_t k = 0; k < (COLS == 4 ? 1 : COLS / 8); k++)
            rfk_direct_fragment<TYPE>(x, k, j, q, scale, sum.of[k][j]);
    }
}

/* The wave's tile t of a block: 16 rows, or in a GLU eight of each of its products. The waves of a block's second tile
 * come along where there are no rows left. */
struct rfk_direct_place {
    uint32_t which, row0; /* the product, and its first row */
};
template <uint32_t COLS> RFK_DEVICE bool rfk_find_direct(const rfk_few_args &a, uint32_t t, rfk_direct_place &to) {
    uint32_t number = blockIdx.y + t * gridDim.y;
    if (number >= a.n_tiles) return false;
    to.which = 0;
    to.row0 = number;
    for (uint32_t i = 1; i < RFK_PRODUCTS; i++)
        if (!a.glu && number >= a.part[i - 1].end_block) to.which = i, to.row0 = number - a.part[i - 1].end_block;
    to.row0 = (to.row0 * RFK_DIRECT_TILES(COLS) + threadIdx.x / 256) * (a.glu ? RFK_FEW_ROWS / 2 : RFK_FEW_ROWS);
    return true;
}

/* The wave's first block of the tile. */
RFK_DEVICE void rfk_begin_direct(const rfk_few_args &a, const rfk_direct_place &place, rfk_direct_at &at) {
    const uint32_t n = a.part[place.which].n_out, row0 = place.row0 < n ? place.row0 : 0, rows = n - row0,
                   wave = threadIdx.x / 32 % RFK_FEW_WAVES;
    RFK_UNROLL(2)
    for (uint32_t h = 0; h < 2; h++) {
        at.product[h] = a.glu ? h : place.which;
        const uint32_t first = a.glu || rows <= 8 ? 0 : 8 * h, left = rows - first; /* of eight: at least one */
        at.half[h].block = (a.part[at.product[h]].row0 + row0 + first) * (a.n_in / 256) + wave;
        at.half[h].last = (left < 8 ? left : 8) - 1;
    }
}

/* A result of tile t: the sum of its waves' sums. */
template <class S> RFK_DEVICE float rfk_direct_result(const S &s, uint32_t t, uint32_t i) {
    float v[RFK_FEW_WAVES];
    RFK_UNROLL(8)
    for (uint32_t k = 0; k < RFK_FEW_WAVES; k++) v[k] = s.sum[t % 2][threadIdx.x / 256 * RFK_FEW_WAVES + k][i];
    return rfk_mul(((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])), s.factor[i / RFK_FEW_ROWS]);
}

/* Add up a tile's sums, and store its results. Ends before other waves' sums of this tile are overwritten: the next
 * tile's go elsewhere. */
template <uint32_t COLS, class S>
RFK_DEVICE void rfk_end_direct(const rfk_few_args &a, const rfk_direct_place &place, const rfk_direct_sums<COLS> &sum,
                               uint32_t t, S &s) {
    const uint32_t lane = threadIdx.x % 32, wave = threadIdx.x / 32, N = COLS == 4 ? 4 : 8;
    RFK_UNROLL(8)
    for (uint32_t k = 0; k < (COLS == 4 ? 4 : COLS / 2); k++) {
        const uint32_t eight = k / 4, i = k % 4, row = rfk_matrix_row(lane, RFK_ROW_INDEX(i), 8),
                       col = 8 * eight + rfk_matrix_col(lane, RFK_COL_INDEX(i)) % N;
        float all = sum.of[eight][0][i] + sum.of[eight][1][i];
        all += N == 4 ? rfk_shuffle_xor<32>(all, 2) : sum.of[eight][N / 4][i] + sum.of[eight][N / 4 + 1][i];
        if (N == 8 || lane % 4 < 2) s.sum[t % 2][wave][col * RFK_FEW_ROWS + row] = all;
    }
    __syncthreads();
    const uint32_t of = threadIdx.x % 256, i = of % RFK_FEW_ROWS, row = place.row0 + i, c = of / RFK_FEW_ROWS,
                   col = blockIdx.x * COLS + c;
    if (c >= COLS || col >= a.n_cols || row >= a.part[place.which].n_out) return;
    if (!a.glu) rfk_put(a.part[place.which], row, col, rfk_direct_result(s, t, of));
    else if (i < 8)
        (void)rfk_put_glu(a, row, col, rfk_direct_result(s, t, of), rfk_direct_result(s, t, of + 8));
}

/* Wait for the wave's lanes, and if x changes for the waves that share it with this one. */
template <uint32_t COLS> RFK_DEVICE void rfk_sync_direct(bool changes) {
    const uint32_t wave = threadIdx.x / 32 % RFK_FEW_WAVES;
    if (COLS <= 8 || !changes) {
        rfk_sync_lanes<32>();
        return;
    }
#if defined(ROCMFORGE_HIP_EMU)
    hip_emu_named_barrier(1 + wave, 64);
#else
    asm volatile("bar.sync %0, 64;" ::"r"(1 + wave) : "memory");
#endif
}

/* What a wave copies next: block `block` of its rows of tile t. RF_NONE, or too large: it has no more of this type. */
struct rfk_direct_cursor {
    rfk_direct_at at;
    uint32_t t, block;
};
template <int TYPE, uint32_t COLS> RFK_DEVICE void rfk_begin_copies(const rfk_few_args &a, rfk_direct_cursor &c) {
    rfk_direct_place place = {0, 0};
    c.block = threadIdx.x / 32 % RFK_FEW_WAVES;
    if (!rfk_find_direct<COLS>(a, c.t, place) || a.part[place.which].type != TYPE) c.block = RF_NONE;
    else rfk_begin_direct(a, place, c.at);
}
/* Copy its weights, and go to the next block, after a tile's last to the next tile. */
template <int TYPE, uint32_t COLS>
RFK_DEVICE void rfk_copy_next(const rfk_few_args &a, rfk_direct_cursor &c, uint8_t *to,
                              typename rfk_direct<TYPE>::loaded &loaded) {
    if (c.block >= a.n_in / 256) return;
    rfk_direct<TYPE>::copy(a, c.at, to, loaded);
    c.block += RFK_FEW_WAVES;
    c.at.half[0].block += RFK_FEW_WAVES, c.at.half[1].block += RFK_FEW_WAVES;
    if (c.block < a.n_in / 256) return;
    c.t++;
    rfk_begin_copies<TYPE, COLS>(a, c);
}

/* A block's tiles from t on whose weights are of one type; returns the first that is of another. While a wave
 * multiplies a block of 256 weights of its 16 rows, the next one is on its way to shared memory, of the next tile after
 * a tile's last; two are before the launch may read x. What the columns have for a wave's blocks is copied once, if
 * that is two blocks at most. */
template <int TYPE, uint32_t COLS>
RFK_DEVICE uint32_t rfk_direct_tiles(const rfk_few_args &a, uint32_t t, rfk_direct_shared<COLS> &s) {
    const uint32_t wave = threadIdx.x / 32 % RFK_FEW_WAVES, n_blocks = a.n_in / 256;
    uint8_t(&w)[2][RFK_FEW_ROWS * 208] = s.w[threadIdx.x / 32];
    const bool stays = n_blocks <= 2 * RFK_FEW_WAVES;
    rfk_direct_cursor ahead;
    typename rfk_direct<TYPE>::loaded now, next;
    ahead.t = t;
    rfk_begin_copies<TYPE, COLS>(a, ahead);
    rfk_copy_next<TYPE, COLS>(a, ahead, w[0], now);
    rfk_copy_next<TYPE, COLS>(a, ahead, w[1], next);
    if (t == 0) rfk_wait_previous();
    if (wave < n_blocks) rfk_direct_copy<TYPE, COLS>(a, wave, s.x[wave][0]);
    rfk_commit_copies();
    if (wave + RFK_FEW_WAVES < n_blocks) rfk_direct_copy<TYPE, COLS>(a, wave + RFK_FEW_WAVES, s.x[wave][1]);
    rfk_commit_copies();
    if (t == 0) rfk_few_factors<32>(a, blockIdx.x * COLS, COLS, s.factor);
    const uint32_t first = t;
    uint32_t turn = 0;
    rfk_direct_place here = {0, 0};
    while (rfk_find_direct<COLS>(a, t, here) && a.part[here.which].type == TYPE) {
        rfk_direct_sums<COLS> sum = {};
        RFK_UNROLL(1)
        for (uint32_t block = wave; block < n_blocks; block += RFK_FEW_WAVES, turn ^= 1) {
            rfk_wait_copies_but_one();
            rfk_sync_direct<COLS>(!stays || t == first);
            rfk_direct_block<TYPE>(w[turn], now, s.x[wave][stays ? block / RFK_FEW_WAVES : turn],
                                   sum);
            rfk_sync_direct<COLS>(!stays); /* copies go where this block's is */
            now = next;
            if (!stays && ahead.block < n_blocks) rfk_direct_copy<TYPE, COLS>(a, ahead.block, s.x[wave][turn]);
            rfk_copy_next<TYPE, COLS>(a, ahead, w[turn], next);
            rfk_commit_copies();
        }
        rfk_end_direct(a, here, sum, t++, s);
    }
    return t;
}
#endif

/* rfk_few for types that have rfk_direct. All blocks are on the GPU at once. COLS: 4, 8 or 16 columns a block.
 *   grid [blocks of columns, blocks]   block 8 or 16 waves   LDS 78, 104 or 224 KiB   reads W once, and from cache for
 *   further columns */
template <uint32_t COLS, int SET>
static __global__ void RFK_RESIDENT(RFK_DIRECT_WAVES(COLS) * 32, COLS == 16 ? 1 : 2) rfk_few_direct(rfk_few_args a) {
#if RFK_MAY_BE(RFK_MATRIX_SM80)
    if (!RFK_RUNS_WAVE(32)) return;
    RFK_DYNAMIC(int4, memory);
    rfk_direct_shared<COLS> *const s = reinterpret_cast<rfk_direct_shared<COLS> *>(memory);
    rfk_direct_place place;
#define RFK_DIRECT_CASE(TYPE) \
    case TYPE: \
        if (rfk_built<TYPE>::is && rfk_is_in(SET, TYPE)) t = rfk_direct_tiles<TYPE, COLS>(a, t, *s); \
        break;
    for (uint32_t t = 0; rfk_find_direct<COLS>(a, t, place);)
        switch (a.part[place.which].type) {
            RFK_DIRECT_TYPES(RFK_DIRECT_CASE)
        default: return;
        }
#undef RFK_DIRECT_CASE
    if (a.norm_out && blockIdx.y == 0) rfk_few_norm_out(a, blockIdx.x * COLS, COLS, s->factor);
#endif
}
template <int SET> static void (*rfk_direct_kernel_of(uint32_t cols))(rfk_few_args) {
    return cols == 16 ? rfk_few_direct<16, SET> : cols == 8 ? rfk_few_direct<8, SET> : rfk_few_direct<4, SET>;
}
static void (*rfk_direct_kernel(int set, uint32_t cols))(rfk_few_args) {
    if (set == RFK_SET_Q4_K_M) return rfk_direct_kernel_of<RFK_SET_Q4_K_M>(cols);
    return rfk_direct_kernel_of<RFK_SET_FUSED>(cols);
}

/* ---- weights unpacked to shared memory, then mma.sync ----
 * As rfk_few_direct, for the other types: a lane unpacks whole fragments and stores their bytes in shared memory, where
 * the lanes of a product find theirs. A wave has a chunk at a time, the four adjacent fragments of its lanes in the
 * fused matvec, of 16 rows: two fragments a lane. Those of the next chunks are on their way to registers meanwhile.
 * 8B on an H200, 8 and 16 rows (rfk_few before): MXFP4 4.85, 6.04 -> 3.41, 4.87 ms, IQ3_S 7.32, 9.39 -> 4.30, 5.74. */

#define RFK_STAGED_TYPES(X) X(RF_TYPE_Q8_0) X(RF_TYPE_Q4_1) X(RF_TYPE_Q5_0) X(RF_TYPE_Q5_1)
#define RFK_STAGED_ONE_TYPES(X) RFK_OTHER32_TYPES(X) RFK_OTHER16_TYPES(X) X(RF_TYPE_Q2_K)
#define RFK_STAGED_MAX(type) ((type) == RF_TYPE_Q8_0 ? 8u : 16u) /* columns: with more rfk_few is faster */

template <uint32_t COLS> struct rfk_staged_shared {
    rfk_direct_x<COLS> x[RFK_FEW_WAVES][2];
    int4 w[RFK_DIRECT_WAVES(COLS)][RFK_FEW_ROWS * 17];
    float scale[RFK_DIRECT_WAVES(COLS)][RFK_FEW_ROWS * 4][4]; /* [row][fragment] */
    float sum[2][RFK_DIRECT_WAVES(COLS)][COLS * RFK_FEW_ROWS];
    float factor[COLS];
};
#if RFK_MAY_BE(RFK_MATRIX_SM80)

/* How fragments are read here: as rfk_fragments, those of Q8_0 in halves, which need half of the registers. */
template <int TYPE> struct rfk_staged_fragments : rfk_fragments<TYPE> {
    static const uint32_t PARTS = 1;
};
template <> struct rfk_staged_fragments<RF_TYPE_Q8_0> {
    typedef rfk_fragments<RF_TYPE_Q8_0> whole;
    static const uint32_t PARTS = 2;
    static const int VALUES = 32, DOTS = 2, ORDER = whole::ORDER, OFFSET = 0;
    struct loaded {
        int4 q[2];
        uint32_t d[2];
    };
    template <int WAVE> RFK_DEVICE void begin(uint32_t row, uint32_t n_in, uint32_t lane, rfk_fragment_at &at) {
        whole::template begin<WAVE>(row, n_in, lane, at);
        at.o[3] = 0; /* which half */
    }
    RFK_DEVICE void fetch(const rfk_weight &weight, const rfk_fragment_at &at, loaded &o) {
        const rfk_weight_once w = rfk_read_once(weight);
        RFK_UNROLL(2)
        for (uint32_t k = 0; k < 2; k++) {
            const uint32_t piece = at.o[0] + (2 * at.o[3] + k) * at.o[2];
            o.q[k] = rfk_load16(w.plane[0] + piece * 16);
            o.d[k] = rfk_load2(w.plane[1] + piece / 2 * 2);
        }
    }
    template <int WAVE> RFK_DEVICE void next(rfk_fragment_at &at) {
        at.o[3] ^= 1;
        if (!at.o[3]) whole::template next<WAVE>(at);
    }
    RFK_DEVICE void unpack(const loaded &w, uint32_t, rfk_fragment_weights &o) {
        RFK_UNROLL(2)
        for (int k = 0; k < 2; k++) rfk_words(w.q[k], o.q + 4 * k), o.s[k] = rfk_low_half(w.d[k]);
    }
    RFK_DEVICE float join(const float *s, const float *dots, const rfk_fragment_scales &x, float total) {
        return rfk_fma(rfk_mul(s[1], x.d[1]), dots[1], rfk_fma(rfk_mul(s[0], x.d[0]), dots[0], total));
    }
};
/* PIECES: of 16 values in a fragment; PITCH: 16-byte words from row to row in shared memory, so that rows lie in
 * different banks; RING: chunks that there is room for in the wave's x; LOADS: chunks in registers on their way; DOTS:
 * products of K values. */
template <int TYPE> struct rfk_staged {
    typedef rfk_staged_fragments<TYPE> F;
    static const bool UNITS = TYPE > RFK_OTHER;
    static const int OF = UNITS ? TYPE - RFK_ONE(0) : TYPE;
    static const bool IS_Q2 = UNITS && OF == RF_TYPE_Q2_K, ONE_DOT = UNITS && rfk_has_one_dot((uint32_t)OF),
                      STRIDED = F::ORDER == RFK_ORDER_STRIDED;
    static const uint32_t PIECES = F::VALUES / 16, PITCH = 4 * PIECES + 1, RING = 8 / PIECES, LOADS = 4 / PIECES;
    static const int K = ONE_DOT || (!UNITS && !STRIDED) ? 32 : 16, DOTS = ONE_DOT ? 1 : 2;
    /* How many chunks the wave has. */
    RFK_DEVICE uint32_t chunks(uint32_t n_in, uint32_t wave) {
        const uint32_t n = n_in / F::VALUES / F::PARTS;
        return n > 4 * wave ? (n - 4 * wave + 31) / 32 * F::PARTS : 0;
    }
    /* Where piece i of the chunk's fragment j is among the chunk's pieces of x. */
    RFK_DEVICE uint32_t place(uint32_t j, uint32_t i) { return STRIDED ? 4 * i + j : PIECES * j + i; }
    /* The piece of x that is at place `at` of the wave's chunk m. */
    RFK_DEVICE uint32_t piece(uint32_t n_in, uint32_t wave, uint32_t m, uint32_t at) {
        const uint32_t j = STRIDED ? at % 4 : at / PIECES, i = STRIDED ? at / 4 : at % PIECES;
        return rfk_fragment_piece<TYPE, 32>(m / F::PARTS * 32 + 4 * wave + j, m % F::PARTS * PIECES + i,
                                            n_in / F::VALUES / F::PARTS);
    }
};
/* Unpack a fragment, by the grid in shared memory if its type has one. */
template <int TYPE, int GRID> struct rfk_unpack_bytes : rfk_unpack_by<TYPE, GRID> {};
template <int TYPE> struct rfk_unpack_bytes<TYPE, RF_TYPE_F32> {
    RFK_DEVICE void run(const typename rfk_staged_fragments<TYPE>::loaded &raw, uint32_t lane, const uint32_t *,
                        rfk_fragment_weights &w) {
        rfk_staged_fragments<TYPE>::unpack(raw, lane, w);
    }
};

/* Copy what the columns have for the wave's chunk m to a place of its ring; of 16 columns, the waves of each tile copy
 * eight. */
template <int TYPE, uint32_t COLS>
RFK_DEVICE void rfk_staged_copy(const rfk_few_args &a, uint32_t m, rfk_direct_x<COLS> (&x)[2], uint32_t slot) {
    typedef rfk_staged<TYPE> D;
    const uint32_t lane = threadIdx.x % 32, wave = threadIdx.x / 32 % RFK_FEW_WAVES,
                   into = COLS == 16 ? threadIdx.x / 256 * 8 : 0, col = blockIdx.x * COLS + into,
                   piece0 = slot % (D::RING / 2) * 4 * D::PIECES, two = lane / 2, four = lane % 2 * 4;
    const size_t tile = col / RFK_FEW_ROWS * (size_t)a.n_in, in = col % RFK_FEW_ROWS;
    rfk_direct_x<COLS> &to = x[slot / (D::RING / 2)];
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < D::PIECES; k++) {
        const uint32_t at = lane / 8 + 4 * k;
        rfk_copy16(&to.q[piece0 + at][into + lane % 8],
                   a.x.q + tile + D::piece(a.n_in, wave, m, at) * RFK_FEW_ROWS + in + lane % 8);
    }
    if (two < 2 * D::PIECES) {
        const float *const d =
            rfk_few_d(a.x) + tile / 2 + D::piece(a.n_in, wave, m, 2 * two) / 2 * RFK_FEW_ROWS + in + four;
        rfk_copy16(reinterpret_cast<int4 *>(&to.d[piece0 / 2 + two][into + four]), reinterpret_cast<const int4 *>(d));
        if (rfk_format<TYPE>::HAS_MIN)
            rfk_copy16(reinterpret_cast<int4 *>(&to.sum[piece0 / 2 + two][into + four]),
                       reinterpret_cast<const int4 *>(d + a.x.capacity / 32));
    }
    if (D::IS_Q2 && two < 4 * D::PIECES) {
        const float *const sum = rfk_few_sum(a.x) + tile + D::piece(a.n_in, wave, m, two) * RFK_FEW_ROWS + in + four;
        rfk_copy16(reinterpret_cast<int4 *>(&to.sum[piece0 + two][into + four]), reinterpret_cast<const int4 *>(sum));
    }
}

/* What a lane loads next: two fragments of the wave's chunk m of tile t. RF_NONE: there is no such tile. */
struct rfk_staged_cursor {
    rfk_fragment_at at[2];
    uint32_t product[2], t, m;
};
template <int TYPE, uint32_t COLS> RFK_DEVICE void rfk_begin_staged(const rfk_few_args &a, rfk_staged_cursor &c) {
    const uint32_t lane = threadIdx.x % 32, wave = threadIdx.x / 32 % RFK_FEW_WAVES;
    rfk_direct_place place = {0, 0};
    c.m = RF_NONE;
    if (!rfk_find_direct<COLS>(a, c.t, place)) return;
    c.m = 0;
    RFK_UNROLL(2)
    for (uint32_t h = 0; h < 2; h++) {
        const uint32_t last = a.part[place.which].n_out - 1, row = place.row0 + (a.glu ? 0 : 8 * h) + lane / 4;
        c.product[h] = a.glu ? h : place.which;
        rfk_staged_fragments<TYPE>::template begin<32>(a.part[c.product[h]].row0 + (row < last ? row : last), a.n_in,
                                                       4 * wave + lane % 4, c.at[h]);
    }
}
/* Load them, and go to the next chunk of the wave's n, after the tile's last to the next tile. A tile takes a multiple
 * of LOADS turns. */
template <int TYPE, uint32_t COLS>
RFK_DEVICE void rfk_load_staged(const rfk_few_args &a, uint32_t n, rfk_staged_cursor &c,
                                typename rfk_staged_fragments<TYPE>::loaded (&raw)[2]) {
    typedef rfk_staged<TYPE> D;
    if (c.m == RF_NONE) return;
    RFK_UNROLL(2)
    for (uint32_t h = 0; h < 2 && c.m < n; h++) {
        D::F::fetch(a.part[c.product[h]].w, c.at[h], raw[h]);
        D::F::template next<32>(c.at[h]);
    }
    c.m++;
    if (c.m < n || c.m % D::LOADS) return;
    c.t++;
    rfk_begin_staged<TYPE, COLS>(a, c);
}

/* Store a fragment's bytes and scales: row and fragment as `k` = 4 * row + fragment. */
template <int TYPE>
RFK_DEVICE void rfk_store_staged(const typename rfk_staged_fragments<TYPE>::loaded &raw, uint32_t lane,
                                 const uint32_t *grid, uint32_t k, int4 *w, float (*scale)[4]) {
    typedef rfk_staged<TYPE> D;
    const int offset = rfk_staged_fragments<TYPE>::OFFSET;
    rfk_fragment_weights o;
    rfk_unpack_bytes<TYPE, rfk_grid_of<TYPE>::IS>::run(raw, lane, grid, o);
    RFK_UNROLL(4)
    for (uint32_t i = 0; i < D::PIECES; i++) {
        int4 v;
        v.x = o.q[4 * i], v.y = o.q[4 * i + 1], v.z = o.q[4 * i + 2], v.w = o.q[4 * i + 3];
        if (offset) {
            v.x = rfk_subtract4(v.x, offset), v.y = rfk_subtract4(v.y, offset);
            v.z = rfk_subtract4(v.z, offset), v.w = rfk_subtract4(v.w, offset);
        }
        w[k / 4 * D::PITCH + k % 4 * D::PIECES + i] = v;
    }
    float4 s;
    s.x = o.s[0], s.y = o.s[1], s.z = o.s[2], s.w = o.s[3];
    *reinterpret_cast<float4 *>(scale[k]) = s;
}

/* A lane's part of a fragment, and its scales in the lane's two rows. */
struct rfk_staged_part {
    int q[4][4]; /* [product] */
    float s[2][RFK_SCALES];
};
/* Add the products of fragment j of a chunk and eight columns to the lane's results. */
template <int TYPE, uint32_t COLS>
RFK_DEVICE void rfk_staged_fragment(const rfk_direct_x<COLS> &x, uint32_t piece0, uint32_t eight, uint32_t j,
                                    const rfk_staged_part &w, float (&sum)[4]) {
    typedef rfk_staged<TYPE> D;
    const uint32_t lane = threadIdx.x % 32, quarter = lane % 4, col = 8 * eight + lane / 4,
                   to = 8 * eight + quarter * 2;
    const bool has_min = rfk_format<TYPE>::HAS_MIN != 0;
    const int start[2] = {RFK_DOT_START, RFK_DOT_START};
    int dots[D::DOTS][4];
    float2 d[4], e[4];
    RFK_UNROLL(4)
    for (uint32_t i = 0; i < (uint32_t)D::DOTS; i++) {
        const uint32_t per = D::K / 16, at = piece0 + D::place(j, i * per);
        int b[2] = {reinterpret_cast<const int *>(&x.q[at][col])[quarter], 0};
        if (per == 2) b[1] = reinterpret_cast<const int *>(&x.q[piece0 + D::place(j, i * per + 1)][col])[quarter];
        rfk_mma_direct<D::K>(w.q[i], b, start, dots[i]);
        d[i] = *reinterpret_cast<const float2 *>(&x.d[at / 2][to]);
        if (has_min) e[i] = *reinterpret_cast<const float2 *>(&x.sum[at / 2][to]);
        if (D::IS_Q2) e[i] = *reinterpret_cast<const float2 *>(&x.sum[at][to]);
    }
    RFK_UNROLL(4)
    for (int i = 0; i < 4; i++) {
        rfk_fragment_scales of;
        float values[4] = {0, 0, 0, 0};
        of.sums[0] = of.sums[1] = 0;
        RFK_UNROLL(4)
        for (int k = 0; k < D::DOTS; k++) {
            of.d[k] = i % 2 ? d[k].y : d[k].x;
            if (has_min || D::IS_Q2) of.sums[k % 2] = i % 2 ? e[k].y : e[k].x;
            values[k] = rfk_dot_to_float(dots[k][i]);
        }
        if (D::ONE_DOT) sum[i] = rfk_fma(of.d[0], rfk_mul(w.s[i / 2][1], values[0]), sum[i]); /* join with one sum */
        else sum[i] = D::F::join(w.s[i / 2], values, of, sum[i]);
    }
}

/* Add the products of a chunk. */
template <int TYPE, uint32_t COLS>
RFK_DEVICE void rfk_staged_chunk(const rfk_direct_x<COLS> &x, uint32_t piece0, const int4 *w, const float (*scale)[4],
                                 rfk_direct_sums<COLS> &sum) {
    typedef rfk_staged<TYPE> D;
    const uint32_t lane = threadIdx.x % 32;
    RFK_UNROLL(4)
    for (uint32_t j = 0; j < 4; j++) {
        rfk_staged_part part;
        RFK_UNROLL(2)
        for (uint32_t r = 0; r < 2; r++) {
            const uint32_t row = lane / 4 + 8 * r;
            const int *const from = reinterpret_cast<const int *>(w + row * D::PITCH + j * D::PIECES) + lane % 4;
            RFK_UNROLL(4)
            for (uint32_t i = 0; i < D::PIECES; i++) /* of K = 32 two pieces are one operand */
                part.q[D::K == 32 ? i / 2 : i][D::K == 32 ? i % 2 * 2 + r : r] = from[4 * i];
            const float4 four = *reinterpret_cast<const float4 *>(scale[4 * row + j]);
            float *const s = part.s[r];
            s[0] = four.x, s[1] = four.y, s[2] = four.z, s[3] = four.w, s[4] = 0;
        }
        RFK_UNROLL(2)
        for (uint32_t k = 0; k < COLS / 8; k++) rfk_staged_fragment<TYPE>(x, piece0, k, j, part, sum.of[k][j]);
    }
}

/* A block's tiles, as rfk_direct_tiles. What the columns have for a wave's chunks is copied once if its ring holds it
 * all. */
template <int TYPE, uint32_t COLS>
RFK_DEVICE void rfk_staged_tiles(const rfk_few_args &a, rfk_staged_shared<COLS> &s, uint32_t *grid) {
    typedef rfk_staged<TYPE> D;
    const uint32_t lane = threadIdx.x % 32, wave = threadIdx.x / 32 % RFK_FEW_WAVES, n = D::chunks(a.n_in, wave);
    const bool stays = D::chunks(a.n_in, 0) <= D::RING;
    int4 *const w = s.w[threadIdx.x / 32];
    float(*const scale)[4] = s.scale[threadIdx.x / 32];
    typename D::F::loaded raw[D::LOADS][2];
    rfk_staged_cursor next;
    next.t = 0;
    rfk_begin_staged<TYPE, COLS>(a, next);
    RFK_UNROLL(2)
    for (uint32_t k = 0; k < D::LOADS; k++) rfk_load_staged<TYPE, COLS>(a, n, next, raw[k]);
    rfk_fill_grid<rfk_grid_of<TYPE>::IS>(grid, RFK_DIRECT_WAVES(COLS) * 32);
    rfk_wait_previous();
    RFK_UNROLL(1)
    for (uint32_t m = 0; m < D::RING; m++) {
        if (m < n) rfk_staged_copy<TYPE, COLS>(a, m, s.x[wave], m);
        rfk_commit_copies();
    }
    rfk_few_factors<32>(a, blockIdx.x * COLS, COLS, s.factor);
    if (rfk_grid_of<TYPE>::IS != RF_TYPE_F32) __syncthreads();
    uint32_t slot = 0, ahead = D::RING < n ? D::RING : 0;
    rfk_direct_place here = {0, 0};
    for (uint32_t t = 0; rfk_find_direct<COLS>(a, t, here); t++) {
        rfk_direct_sums<COLS> sum = {};
        RFK_UNROLL(1)
        for (uint32_t first = 0; first < n; first += D::LOADS)
            RFK_UNROLL(2)
            for (uint32_t k = 0; k < D::LOADS; k++) {
                const uint32_t m = first + k, in = stays ? m : slot;
                RFK_UNROLL(2)
                for (uint32_t h = 0; h < 2; h++)
                    if (m < n) rfk_store_staged<TYPE>(raw[k][h], 4 * wave + lane % 4, grid, 32 * h + lane, w, scale);
                rfk_load_staged<TYPE, COLS>(a, n, next, raw[k]);
                if (m >= n) break;
                rfk_wait_copies_but_one();
                rfk_sync_direct<COLS>(!stays || t == 0);
                rfk_staged_chunk<TYPE>(s.x[wave][in / (D::RING / 2)], in % (D::RING / 2) * 4 * D::PIECES, w, scale,
                                       sum);
                rfk_sync_direct<COLS>(!stays); /* what comes next goes where this was */
                if (!stays) {
                    rfk_staged_copy<TYPE, COLS>(a, ahead, s.x[wave], in);
                    ahead = ahead + 1 < n ? ahead + 1 : 0;
                    slot = (slot + 1) % D::RING;
                }
                rfk_commit_copies();
            }
        rfk_end_direct(a, here, sum, t, s);
    }
}
#endif

/* rfk_few for types that have neither rfk_direct nor floats, where all products have TYPE. All blocks are on the GPU at
 * once. COLS: 8 or 16 columns a block.
 *   grid [blocks of columns, blocks]   block 8 or 16 waves   LDS 94 or 204 KiB, and the type's grid
 *   reads W once, and from cache for further columns */
template <int TYPE, uint32_t COLS>
static __global__ void RFK_RESIDENT(RFK_DIRECT_WAVES(COLS) * 32, COLS == 16 ? 1 : 2) rfk_few_staged(rfk_few_args a) {
#if RFK_MAY_BE(RFK_MATRIX_SM80)
    if (!RFK_RUNS_WAVE(32) || !rfk_built<rfk_staged<TYPE>::OF>::is) return;
    RFK_DYNAMIC(int4, memory);
    rfk_staged_shared<COLS> *const s = reinterpret_cast<rfk_staged_shared<COLS> *>(memory);
    rfk_staged_tiles<TYPE, COLS>(a, *s, reinterpret_cast<uint32_t *>(s + 1));
    if (a.norm_out && blockIdx.y == 0) rfk_few_norm_out(a, blockIdx.x * COLS, COLS, s->factor);
#endif
}
static uint32_t rfk_staged_bytes(uint32_t type, uint32_t cols) {
    return (uint32_t)(cols == 16 ? sizeof(rfk_staged_shared<16>) : sizeof(rfk_staged_shared<8>)) +
           rfk_grid_bytes_of(type);
}
/* The kernel of a type; NULL: there is none. */
static void (*rfk_staged_kernel(uint32_t type, uint32_t cols))(rfk_few_args) {
#define RFK_STAGED_CASE(TYPE) \
    case TYPE: return cols == 16 ? rfk_few_staged<TYPE, RFK_STAGED_MAX(TYPE)> : rfk_few_staged<TYPE, 8>;
#define RFK_STAGED_ONE_CASE(TYPE) \
    case TYPE: return cols == 16 ? rfk_few_staged<RFK_ONE(TYPE), 16> : rfk_few_staged<RFK_ONE(TYPE), 8>;
    switch (type) {
        RFK_STAGED_TYPES(RFK_STAGED_CASE)
        RFK_STAGED_ONE_TYPES(RFK_STAGED_ONE_CASE)
    default: return NULL;
    }
#undef RFK_STAGED_ONE_CASE
#undef RFK_STAGED_CASE
}
#endif

/* A wave's part of a tile through shared memory: sum[j] of each lane of the fused matvec. first: as rfk_few_tile. */
template <int TYPE, int WAVE, int N>
RFK_DEVICE void rfk_few_wave(const rfk_few_args &a, const rfk_product &p, uint32_t row0, bool first,
                             rfk_few_shared<WAVE> &s, float (&sum)[WAVE / 8][N]) {
    typedef rfk_fragments<TYPE> F;
    const int FETCHES = 64 / WAVE, SETS = WAVE / 32;
    const uint32_t thread = rfk_computed_here_amd(threadIdx.x), lane = thread % WAVE, wave = thread / WAVE,
                   n_fragments = a.n_in / F::VALUES, lane0 = wave * (WAVE / RFK_FEW_WAVES);
    typename F::loaded raw[SETS][FETCHES];
    rfk_fragment_at at[SETS][FETCHES];
    RFK_UNROLL(2)
    for (uint32_t t = 0; t < (uint32_t)SETS; t++)
        RFK_UNROLL(2)
        for (uint32_t i = 0; i < (uint32_t)FETCHES; i++) { /* four fragments of 16 rows */
            const uint32_t k = lane + i * WAVE, row = row0 + k / 4, f = lane0 + 4 * t + k % 4;
            F::template begin<WAVE>(p.row0 + (row < p.n_out ? row : p.n_out - 1), a.n_in, f, at[t][i]);
            if (f < n_fragments) F::fetch(p.w, at[t][i], raw[t][i]);
        }
    if (first) {
        rfk_wait_previous();
        rfk_few_factors<WAVE>(a, blockIdx.x * RFK_FEW_ROWS, RFK_FEW_ROWS, s.factor);
    }
    const bool has_sums = rfk_is_q2<TYPE>(p.type);
    RFK_UNROLL(1)
    for (uint32_t base = 0; base < n_fragments; base += WAVE)
        RFK_UNROLL(2)
        for (uint32_t t = 0; t < (uint32_t)SETS; t++) {
            RFK_UNROLL(2)
            for (uint32_t i = 0; i < (uint32_t)FETCHES; i++) {
                const uint32_t k = lane + i * WAVE, f = base + lane0 + 4 * t + k % 4;
                if (f < n_fragments)
                    rfk_few_store<TYPE>(raw[t][i], f, &s.u.in.w[wave][k / 4][4 * (k % 4)], s.u.in.scale[wave][k]);
                F::template next<WAVE>(at[t][i]);
                if (f + WAVE < n_fragments) F::fetch(p.w, at[t][i], raw[t][i]);
            }
            rfk_sync_lanes<WAVE>();
            RFK_UNROLL(4)
            for (uint32_t j = 0; j < 4; j++) {
                const uint32_t f = base + lane0 + 4 * t + j;
                if (f < n_fragments)
                    rfk_few_fragment<TYPE, WAVE, N>(a, f, &s.u.in.w[wave][0][4 * j], s.u.in.scale[wave][j], has_sums,
                                                    sum[4 * t + j]);
            }
            rfk_sync_lanes<WAVE>();
        }
}

/* Multiply 16 rows of p from row0 on by a tile of columns.   Returns the thread's result: row threadIdx.x % 16 of
 * column threadIdx.x / 16. `first`: what earlier launches wrote was not waited for. Ends with a barrier. */
template <int TYPE, int WAVE, bool NARROW>
RFK_DEVICE float rfk_few_tile(const rfk_few_args &a, const rfk_product &p, uint32_t row0, bool first,
                              rfk_few_shared<WAVE> &s) {
    const int SETS = WAVE / 32, N = RFK_FEW_RESULTS(NARROW, WAVE);
    const uint32_t lane = threadIdx.x % WAVE, wave = threadIdx.x / WAVE;
    float sum[4 * SETS][N];
    RFK_UNROLL(8)
    for (int j = 0; j < 4 * SETS; j++)
        RFK_UNROLL(8)
        for (int i = 0; i < N; i++) sum[j][i] = 0;
    rfk_few_wave<TYPE, WAVE, N>(a, p, row0, first, s, sum);
    __syncthreads();
    RFK_UNROLL(8)
    for (int i = 0; i < N; i++) {
        RFK_UNROLL(3)
        for (int step = 1; step < 4 * SETS; step *= 2)
            RFK_UNROLL(8)
            for (int j = 0; j + step < 4 * SETS; j += 2 * step) sum[j][i] += sum[j + step][i];
        const uint32_t row = rfk_matrix_row(lane, RFK_ROW_INDEX((uint32_t)i), 256 / WAVE),
                       col = rfk_matrix_col(lane, RFK_COL_INDEX((uint32_t)i));
        s.u.sum[wave][col * RFK_FEW_ROWS + row] = sum[0][i];
    }
    __syncthreads();
    float all = 0;
    if (threadIdx.x < RFK_FEW_ROWS * RFK_FEW_ROWS) {
        float v[RFK_FEW_WAVES];
        RFK_UNROLL(8)
        for (uint32_t i = 0; i < RFK_FEW_WAVES; i++) v[i] = s.u.sum[i][threadIdx.x];
        all = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    }
    __syncthreads();
    return all;
}

/* A tile of product `which`, or of gate and up in turn: in a loop, because a tile is much code. */
template <int TYPE, int WAVE, bool NARROW>
RFK_DEVICE void rfk_few_block(const rfk_few_args &a, uint32_t which, uint32_t number, rfk_few_shared<WAVE> &s) {
    const uint32_t row0 = number * RFK_FEW_ROWS;
    float gate = 0;
    RFK_UNROLL(1)
    for (uint32_t i = 0; i < (a.glu ? 2u : 1u); i++) {
        const rfk_product &p = a.part[which + i];
        const float v = rfk_few_tile<TYPE, WAVE, NARROW>(a, p, row0, i == 0, s);
        const uint32_t thread = rfk_computed_here_amd(threadIdx.x), row = row0 + thread % RFK_FEW_ROWS,
                       c = thread / RFK_FEW_ROWS, col = blockIdx.x * RFK_FEW_ROWS + c;
        if (c >= RFK_FEW_ROWS || col >= a.n_cols || row >= p.n_out) continue;
        const float product = rfk_mul(v, s.factor[c]);
        if (i) (void)rfk_put_glu(a, row, col, gate, product);
        else if (a.glu) gate = product;
        else rfk_put(p, row, col, product);
    }
}

/* grid [tiles of 16 columns, tiles of 16 rows of all products]   block 8 waves   LDS 46 KiB
 *   reads W once, and from cache for further columns */
template <int WAVE, bool NARROW, bool OTHER>
static __global__ void RFK_RESIDENT(RFK_FEW_WAVES *WAVE, 2) rfk_few(rfk_few_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    if (WAVE == 64 && !RFK_HAS_UNITS) return; /* never launched: it would spill */
    typedef rfk_few_shared<WAVE> shared;
    RFK_SHARED(shared, s);
    uint32_t number = blockIdx.y, which = 0;
    for (uint32_t i = 1; i < RFK_PRODUCTS; i++)
        if (blockIdx.y >= a.part[i - 1].end_block) which = i, number = blockIdx.y - a.part[i - 1].end_block;
#define RFK_FEW_CASE(TYPE, max) \
    case TYPE: \
        if (rfk_built<TYPE>::is) rfk_few_block<TYPE, WAVE, NARROW>(a, which, number, s); \
        break;
    if (OTHER) {
        if (rfk_built<RFK_OTHER>::is) rfk_few_block<RFK_OTHER, WAVE, NARROW>(a, which, number, s);
    } else {
        switch (a.part[which].type) {
            RFK_FUSED_TYPES(RFK_FEW_CASE)
        default: break;
        }
    }
#undef RFK_FEW_CASE
    if (a.norm_out && blockIdx.y == 0) rfk_few_norm_out(a, blockIdx.x * RFK_FEW_ROWS, RFK_FEW_ROWS, s.factor);
}

/* ---- many columns, on warpgroups ----
 * Hopper's wgmma multiplies 64 rows by 64, 128 or 256 columns of 16-bit floats in shared memory, asynchronously, for a
 * warpgroup of four waves. Warp specialization: a producer warpgroup decodes weights to bf16, or copies those that are
 * 16-bit floats, into the stages of a ring buffer, consumers multiply; activations were converted by the kernel before.
 * The rounding error of bf16 is at most 2^-8 of a value, where that of int8 activations is up to 1 / 254 of the largest
 * in the group; bf16 do not overflow, as halves would. F16 weights are multiplied by halves: a row of activations is
 * scaled by a power of two first, the error is 2^-11 of a value.
 * rfk_matmul_wgmma: 128 rows of W by up to 128 columns, one consumer, two blocks a multiprocessor.
 * rfk_matmul_wide: 128 rows by 256 columns, two consumers of 64 rows each: shared memory is read the least. Its blocks
 * are persistent, and do one tile after another: the producer is at the next tile while the consumers store the one
 * before. Types with two producers have a block a tile (RFK_WIDE_PRODUCERS).
 * PTX ISA 8.7, "Asynchronous Warpgroup Level Matrix Instructions", "mbarrier". The n-th wait for an mbarrier returns
 * after n times the arrivals (and bytes) that it was made for. */

#define RFK_WARPGROUP 128u
#define RFK_WGMMA_ROWS 128u /* rows of W for a block */
#define RFK_WGMMA_COLS 128u
#define RFK_WGMMA_DEPTH 64u /* values of a row in a stage: 128 bytes */
#define RFK_WGMMA_STAGES 3u
#define RFK_WGMMA_BLOCK (2 * RFK_WARPGROUP)
#define RFK_WIDE_COLS 256u
#define RFK_WIDE_STAGES 4u
/* Producer warpgroups: types that share a kernel take long to decode, and have two. They leave a consumer the registers
 * for products with 128 columns, one producer for 256: those read shared memory less. Nor have two the registers to
 * find the next tile: their blocks do a single one. */
#define RFK_WIDE_PRODUCERS(type) ((type) >= RF_TYPE_COUNT ? 2u : 1u)
#define RFK_WIDE_BLOCK(type) ((2 + RFK_WIDE_PRODUCERS(type)) * RFK_WARPGROUP)
#define RFK_WIDE_PUT 64u /* columns that pass through shared memory at once on their way out */
#define RFK_WGMMA_RIGHT 1u
#define RFK_WGMMA_WRONG 2u

template <uint32_t COLS> struct rfk_wgmma_stage { int4 w[RFK_WGMMA_ROWS][8], x[COLS][8]; /* rfk_swizzled */ };
struct rfk_wgmma_out { /* the consumer's sums, in place of the stages */
    float at[RFK_WGMMA_COLS][RFK_WGMMA_ROWS + 4]; /* padding: columns of a wave's lanes lie in different banks */
};
struct rfk_wgmma_shared {
    union {
        rfk_wgmma_stage<RFK_WGMMA_COLS> stage[RFK_WGMMA_STAGES];
        rfk_wgmma_out out;
    };
};
struct rfk_wide_shared {
    rfk_wgmma_stage<RFK_WIDE_COLS> stage[RFK_WIDE_STAGES];
    float out[2][RFK_WIDE_PUT][64]; /* a consumer's sums, rows as rfk_wide_row */
};
/* Dynamic shared memory of a launch: 1024 bytes more, for the swizzle is by address bits. */
#define RFK_WGMMA_BYTES ((uint32_t)sizeof(rfk_wgmma_shared) + 1024)
#define RFK_WIDE_BYTES ((uint32_t)sizeof(rfk_wide_shared) + 1024)
#define RFK_WGMMA_CHECK_BYTES ((64 + RFK_WIDE_COLS) * 128 + 1024)

#if defined(ROCMFORGE_HIP_EMU)
#define RFK_MAY_WGMMA(index, arch) hip_emu_has_wgmma(index)
#elif defined(RFK_NVIDIA)
#define RFK_MAY_WGMMA(index, arch) (strcmp(arch, "sm_90") == 0)
#else
#define RFK_MAY_WGMMA(index, arch) false
#endif

#if defined(RFK_HAS_WGMMA)

struct rfk_wgmma_columns {
    uint32_t x[RFK_WGMMA_COLS]; /* rfk_wgmma_tile.x_row */
};
/* full: W and x of a stage are there: a producer's waves and a bulk copy arrive. empty: the consumers' waves are done
 * with it. */
template <uint32_t STAGES> struct rfk_mbarriers { rfk_mbarrier full[STAGES], empty[STAGES]; };
/* The stage of the next step, and the parity of how often it was used before: that of its mbarriers' phase. */
template <uint32_t STAGES> struct rfk_wgmma_turn {
    uint32_t stage, round;
};
template <uint32_t STAGES> RFK_DEVICE void rfk_wgmma_next(rfk_wgmma_turn<STAGES> &t) {
    if (++t.stage == STAGES) t.stage = 0, t.round ^= 1;
}

#if defined(ROCMFORGE_HIP_EMU)
RFK_DEVICE uint32_t rfk_shared_address(const void *p) { return (uint32_t)(size_t)p; }
RFK_DEVICE void rfk_assume_global(const void *) {}
RFK_DEVICE void rfk_mbarrier_arrive(rfk_mbarrier *g) { hip_emu_gate_arrive(g, 0); }
RFK_DEVICE void rfk_mbarrier_copy(rfk_mbarrier *g, void *to, const void *from, uint32_t n_bytes) {
    rfk_mbarrier_expect(g, n_bytes);
    hip_emu_gate_copy(g, to, from, n_bytes);
}
RFK_DEVICE void rfk_fence_async_proxy() {}
RFK_DEVICE void rfk_sync_wave() { (void)rfk_shuffle_xor<32>(0, 1); }
template <int N> RFK_DEVICE void rfk_grow_registers() {}
template <int N> RFK_DEVICE void rfk_shrink_registers() {}
RFK_DEVICE void rfk_wgmma_fence() {}
RFK_DEVICE void rfk_wgmma_commit() {}
template <int LEFT> RFK_DEVICE void rfk_wgmma_wait() {}
typedef const int4 *rfk_wgmma_operand;
RFK_DEVICE rfk_wgmma_operand rfk_wgmma_at(const int4 *rows) { return rows; }
template <int COLS, bool F16> RFK_DEVICE void rfk_wgmma(float *sum, rfk_wgmma_operand w, rfk_wgmma_operand x, int add) {
    hip_emu_wgmma_m64k16<COLS, F16>(sum, w, x, add);
}
/* A lane's results are of two rows, whose values four adjacent lanes have. */
template <int COLS>
RFK_DEVICE void rfk_wgmma_rows(float *sum, const uint32_t *fragment, rfk_wgmma_operand x, int add) {
    uint16_t values[2][16];
    for (uint32_t lane = 0; lane < 4; lane++)
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t pair = rfk_shuffle<32>(fragment[i], (threadIdx.x & 28) | lane);
            for (uint32_t b = 0; b < 2; b++) values[i % 2][i / 2 * 8 + lane * 2 + b] = (uint16_t)(pair >> (16 * b));
        }
    hip_emu_wgmma_rows_m64k16<COLS>(sum, values, x, add);
}
RFK_DEVICE uint32_t rfk_same_in_wave(uint32_t v) { return v; }
#else
/* Pointers out of tables: loads that may be of shared memory are slower. */
RFK_DEVICE void rfk_assume_global(const void *p) { __builtin_assume(__isGlobal(p)); }
RFK_DEVICE void rfk_mbarrier_arrive(rfk_mbarrier *g) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(rfk_shared_address(g)) : "memory");
}
/* Arrive, and start a bulk copy whose bytes the mbarrier waits for, too. */
RFK_DEVICE void rfk_mbarrier_copy(rfk_mbarrier *g, void *to, const void *from, uint32_t n_bytes) {
    rfk_mbarrier_expect(g, n_bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(rfk_shared_address(to)), "l"(from), "r"(n_bytes), "r"(rfk_shared_address(g)) : "memory");
}
/* Make this thread's stores to shared memory visible to wgmma after the next arrival or barrier. */
RFK_DEVICE void rfk_fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
RFK_DEVICE void rfk_sync_wave() { __syncwarp(); }
/* The registers of a warpgroup's threads from here on (setmaxnreg). */
template <int N> RFK_DEVICE void rfk_grow_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
RFK_DEVICE void rfk_shrink_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
RFK_DEVICE void rfk_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
RFK_DEVICE void rfk_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Wait until at most LEFT committed groups are in flight. */
template <int LEFT> RFK_DEVICE void rfk_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
/* Matrix descriptor: address / 16, 1024 bytes from 8 rows to the next, 128-byte swizzle. */
RFK_DEVICE uint64_t rfk_wgmma_matrix(const int4 *rows) {
    return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | 1u << 16 | (rfk_shared_address(rows) & 0x3ffff) >> 4;
}
/* For the compiler: the value is the same in all lanes. */
RFK_DEVICE uint32_t rfk_same_in_wave(uint32_t v) { return __shfl_sync(~0u, v, 0); }
/* The low word of a matrix descriptor: adding to it moves the operand by int4. Opaque: the compiler would compute the
 * address again for each product. */
typedef uint32_t rfk_wgmma_operand;
RFK_DEVICE rfk_wgmma_operand rfk_wgmma_at(const int4 *rows) {
    uint32_t low = (uint32_t)rfk_wgmma_matrix(rows);
    asm volatile("" : "+r"(low));
    return rfk_same_in_wave(low);
}
RFK_DEVICE uint64_t rfk_wgmma_descriptor(rfk_wgmma_operand at) {
    uint64_t both;
    asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(at), "r"(1u << 30 | 1024 >> 4));
    return both;
}
#define RFK_WGMMA_8(s) "+f"((s)[0]), "+f"((s)[1]), "+f"((s)[2]), "+f"((s)[3]), "+f"((s)[4]), "+f"((s)[5]), \
    "+f"((s)[6]), "+f"((s)[7])
#define RFK_WGMMA_16(s) RFK_WGMMA_8(s), RFK_WGMMA_8(s + 8)
#define RFK_WGMMA_32(s) RFK_WGMMA_16(s), RFK_WGMMA_16(s + 16)
#define RFK_WGMMA_64(s) RFK_WGMMA_32(s), RFK_WGMMA_32(s + 32)
#define RFK_WGMMA_OF_64(type) \
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
                 "%32, %33, p, 1, 1, 0, 0;\n}" \
                 : RFK_WGMMA_32(sum) \
                 : "l"(rfk_wgmma_descriptor(w)), "l"(rfk_wgmma_descriptor(x)), "r"(add))
#define RFK_WGMMA_OF_128(type) \
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
                 "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
                 "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
                 "%64, %65, p, 1, 1, 0, 0;\n}" \
                 : RFK_WGMMA_64(sum) \
                 : "l"(rfk_wgmma_descriptor(w)), "l"(rfk_wgmma_descriptor(x)), "r"(add))
#define RFK_WGMMA_OF_256(type) \
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " " \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
                 "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
                 "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, " \
                 "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
                 "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, " \
                 "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
                 "%126, %127}, " \
                 "%128, %129, p, 1, 1, 0, 0;\n}" \
                 : RFK_WGMMA_64(sum), RFK_WGMMA_64((sum + 64)) \
                 : "l"(rfk_wgmma_descriptor(w)), "l"(rfk_wgmma_descriptor(x)), "r"(add))
/* sum = (add ? sum : 0) + 64 rows of w times COLS columns of x over 16 values, asynchronously. A whole warpgroup. */
template <int COLS, bool F16>
RFK_DEVICE void rfk_wgmma(float *sum, rfk_wgmma_operand w, rfk_wgmma_operand x, int add) {
    if (COLS == 256 && F16) RFK_WGMMA_OF_256("f16");
    else if (COLS == 256) RFK_WGMMA_OF_256("bf16");
    else if (COLS == 128 && F16) RFK_WGMMA_OF_128("f16");
    else if (COLS == 128) RFK_WGMMA_OF_128("bf16");
    else RFK_WGMMA_OF_64("bf16");
}
/* sum = (add ? sum : 0) + 64 rows times COLS columns of x, 32 or 64, over 16 positions, asynchronously. fragment: the
 * lane's words of the rows. A whole warpgroup. */
template <int COLS>
RFK_DEVICE void rfk_wgmma_rows(float *sum, const uint32_t *fragment, rfk_wgmma_operand x, int add) {
    if (COLS == 32)
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                     "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
                     : RFK_WGMMA_16(sum)
                     : "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]),
                       "l"(rfk_wgmma_descriptor(x)), "r"(add));
    else asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                 "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                 : RFK_WGMMA_32(sum)
                 : "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]),
                   "l"(rfk_wgmma_descriptor(x)), "r"(add));
}
#endif

/* Row and column of a thread's result i. */
RFK_DEVICE uint32_t rfk_wgmma_row(uint32_t i) {
    return threadIdx.x % RFK_WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4 + i % 4 / 2 * 8;
}
RFK_DEVICE uint32_t rfk_wgmma_col(uint32_t i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

/* The products of a stage with COLS columns, asynchronously: sum[n] has rows 64 n to 64 n + 63. Not WHOLE: by two
 * instructions of half the columns. */
template <int COLS, bool F16, bool WHOLE, int N>
RFK_DEVICE void rfk_wgmma_step(float (&sum)[N][COLS / 2], rfk_wgmma_operand w, rfk_wgmma_operand x, bool add) {
    rfk_wgmma_fence();
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < RFK_WGMMA_DEPTH / 16; k++)
        RFK_UNROLL(2)
        for (uint32_t n = 0; n < N; n++) {
            rfk_wgmma<WHOLE ? COLS : COLS / 2, F16>(sum[n], w + 64 * 8 * n + 2 * k, x + 2 * k, k > 0 || add);
            if (!WHOLE)
                rfk_wgmma<COLS / 2, F16>(sum[n] + COLS / 4, w + 64 * 8 * n + 2 * k, x + 8 * COLS / 2 + 2 * k,
                                         k > 0 || add);
        }
    rfk_wgmma_commit();
}

/* Wait for all products; the sums may be read afterwards. */
template <int COLS, int N> RFK_DEVICE void rfk_wgmma_drain(float (&sum)[N][COLS / 2]) {
    rfk_wgmma_wait<0>();
#if !defined(ROCMFORGE_HIP_EMU)
    RFK_UNROLL(4)
    for (int n = 0; n < N * COLS / 64; n++) asm volatile("" : RFK_WGMMA_32((&sum[0][0] + 32 * n))::"memory");
#else
    (void)sum;
#endif
}

/* A consumer's products of the next n_steps steps: it leaves a stage when those of the stage after it have begun. */
template <int COLS, bool F16, bool WHOLE, int N, uint32_t STAGES>
RFK_DEVICE void rfk_wgmma_multiply(float (&sum)[N][COLS / 2], rfk_wgmma_operand w, rfk_wgmma_operand x,
                                   uint32_t stage_words, uint32_t n_steps, rfk_mbarriers<STAGES> &barriers,
                                   rfk_wgmma_turn<STAGES> &now) {
    const bool arrives = threadIdx.x % 32 == 0;
    uint32_t before = 0;
    RFK_UNROLL(1)
    for (uint32_t i = 0; i < n_steps; i++) {
        rfk_mbarrier_wait(&barriers.full[now.stage], now.round);
        rfk_wgmma_step<COLS, F16, WHOLE>(sum, w + now.stage * stage_words, x + now.stage * stage_words, i > 0);
        rfk_wgmma_wait<1>(); /* the previous step is done */
        if (i > 0 && arrives) rfk_mbarrier_arrive(&barriers.empty[before]);
        before = now.stage;
        rfk_wgmma_next(now);
    }
    rfk_wgmma_drain<COLS>(sum);
    if (n_steps && arrives) rfk_mbarrier_arrive(&barriers.empty[before]);
}

/* Dynamic shared memory, aligned to 1024 bytes by an index: the compiler must see that it is shared memory. */
template <class T> RFK_DEVICE T &rfk_wgmma_memory(int4 *asked_for) {
    return *reinterpret_cast<T *>(asked_for + (0u - rfk_shared_address(asked_for)) % 1024 / sizeof(int4));
}

/* Store 16 weights d * (q - OFFSET) - m as words `word` and word + 1 of row i. A byte placed above a float's last 8
 * bits is the float 32768 + byte: one fmaf removes the excess and rounds by about 2^-9 of d. Overflows for d of 2^113,
 * which only MXFP4 can express. */
template <int OFFSET>
RFK_DEVICE void rfk_wgmma_store(int4 *row, uint32_t i, uint32_t word, const int *q, float d, float m) {
    const float start = fmaf(-d, (float)(32768 + 128 + OFFSET), -m);
    int to[8];
    RFK_UNROLL(4)
    for (int k = 0; k < 4; k++) {
        const uint32_t bytes = (uint32_t)q[k] ^ 0x80808080u; /* q + 128 */
        float v[4];
        RFK_UNROLL(4)
        for (uint32_t b = 0; b < 4; b++) {
#if defined(RFK_NVIDIA)
            const uint32_t bits = __byte_perm(bytes, 0x47000000u, 0x7404u | b << 4);
#else
            const uint32_t bits = 0x47000000u | (bytes >> (8 * b) & 255) << 8;
#endif
            v[b] = fmaf(d, rfk_as_float(bits), start);
        }
        to[2 * k] = (int)rfk_to_bf16x2(v[0], v[1]), to[2 * k + 1] = (int)rfk_to_bf16x2(v[2], v[3]);
    }
    RFK_UNROLL(2)
    for (uint32_t h = 0; h < 2; h++) {
        int4 v;
        v.x = to[4 * h], v.y = to[4 * h + 1], v.z = to[4 * h + 2], v.w = to[4 * h + 3];
        row[rfk_swizzled(i, word + h)] = v;
    }
}

/* A block's rows of W from row0 on, n columns of x, up to 128, and depth steps [first, end). Columns are
 * adjacent from col0 on (x_row NULL), or those of pairs: x_row is a column's first word, plus what its words are
 * swizzled by. */
struct rfk_wgmma_tile {
    uint32_t row0, col0, n, first, end;
    const uint32_t *x_row; /* in shared memory */
};

/* Start to fill x of a stage: one bulk copy, by one thread. */
template <uint32_t COLS>
RFK_DEVICE void rfk_wgmma_copy_x(const rfk_int8_rows &x, uint32_t col0, uint32_t n, uint32_t step,
                                 rfk_wgmma_stage<COLS> &to, rfk_mbarrier *full) {
    const int4 *from = reinterpret_cast<const int4 *>(x.q) + ((size_t)step * x.bf16 + col0) * 8;
    rfk_mbarrier_copy(full, to.x, from, (n + RFK_PAIR_TILE - 1) / RFK_PAIR_TILE * RFK_PAIR_TILE * sizeof to.x[0]);
}
/* The same for columns of pairs: a copy for each word, by the producer warpgroup. */
RFK_DEVICE void rfk_wgmma_copy_pairs(const rfk_int8_rows &rows, const rfk_wgmma_tile &tile, uint32_t step,
                                     rfk_wgmma_stage<RFK_WGMMA_COLS> &to) {
    const uint32_t thread = threadIdx.x % RFK_WARPGROUP, word = thread % 8;
    const int4 *from = reinterpret_cast<const int4 *>(rows.q) + (size_t)step * rows.bf16 * 8;
    RFK_UNROLL(4)
    for (uint32_t i = thread / 8; i < (tile.n <= RFK_PAIR_TILE ? RFK_PAIR_TILE : RFK_WGMMA_COLS); i += 16) {
        const uint32_t x = tile.x_row[i];
        rfk_copy16(&to.x[i][rfk_swizzled(i, word)], from + (x - x % 8) + rfk_swizzled(x, word));
    }
}

/* A producer's stores and finished copies to a stage can be read. */
RFK_DEVICE void rfk_wgmma_filled(rfk_mbarrier *full) {
    rfk_fence_async_proxy();
    rfk_sync_wave();
    if (threadIdx.x % 32 == 0) rfk_mbarrier_arrive(full);
}

/* A producer warpgroup starts to copy a step's weights of 16-bit floats. Rows beyond the last repeat it. */
RFK_DEVICE void rfk_wgmma_copy_w(const rfk_product &p, uint32_t n_in, uint32_t row0, uint32_t step, int4 (*to)[8]) {
    const uint32_t thread = threadIdx.x % RFK_WARPGROUP, word = thread % 8;
    RFK_UNROLL(8)
    for (uint32_t j = thread / 8; j < RFK_WGMMA_ROWS; j += 16) {
        const uint32_t row = row0 + j < p.n_out ? row0 + j : p.n_out - 1;
        const uint8_t *from = p.w.plane[0] + 2 * ((size_t)(p.row0 + row) * n_in + step * RFK_WGMMA_DEPTH);
        rfk_copy16(&to[j][rfk_swizzled(j, word)], reinterpret_cast<const int4 *>(from) + word);
    }
}

/* One stage is being filled while the one before it arrives. */
RFK_DEVICE void rfk_wgmma_copy(const rfk_matmul_args &a, const rfk_product &p, const rfk_wgmma_tile &tile,
                               rfk_wgmma_shared &s, rfk_mbarriers<RFK_WGMMA_STAGES> &barriers) {
    rfk_wgmma_turn<RFK_WGMMA_STAGES> now = {0, 0}, behind = {0, 0};
    RFK_UNROLL(1)
    for (uint32_t step = tile.first; step < tile.end + 1; step++) {
        if (step < tile.end) {
            rfk_mbarrier_wait(&barriers.empty[now.stage], now.round ^ 1);
            if (threadIdx.x % RFK_WARPGROUP == 0)
                rfk_wgmma_copy_x(a.x8, tile.col0, tile.n, step, s.stage[now.stage], &barriers.full[now.stage]);
            rfk_wgmma_copy_w(p, a.n_in, tile.row0, step, s.stage[now.stage].w);
            rfk_wgmma_next(now);
        }
        rfk_commit_copies();
        rfk_wait_copies_but_one();
        if (step == tile.first) continue;
        rfk_wgmma_filled(&barriers.full[behind.stage]);
        rfk_wgmma_next(behind);
    }
}

/* How producers decode a type: TEAM waves fill a stage, so that 4 / TEAM stages are filled at once; two lanes a row.
 * Where a unit's halves are 64 values apart, two steps share twice as many UNITS and take a half each. */
template <int TYPE, uint32_t TEAM> struct rfk_wgmma_decoder {
    typedef rfk_format<TYPE> F;
    static const uint32_t UNITS = F::STRIDE == 64 ? 2 : 1, ROWS = RFK_WGMMA_ROWS / (16 * TEAM), N = ROWS * UNITS;
};
/* The first of a lane's rows: stores of 8 lanes must hit all banks: rows 0-3, or 0, 1, 4 and 5 if they are 2 words
 * apart. */
template <int TYPE, uint32_t TEAM> RFK_DEVICE uint32_t rfk_wgmma_first_row() {
    const uint32_t pair = threadIdx.x % (32 * TEAM) / 2;
    return rfk_format<TYPE>::STRIDE == 16 ? pair : (pair & ~6u) | (pair & 2) << 1 | (pair & 4) >> 1;
}
/* Where a lane's rows begin. Rows beyond the last repeat it. */
template <int TYPE, uint32_t TEAM>
RFK_DEVICE void rfk_wgmma_blocks(const rfk_product &p, uint32_t n_in, uint32_t row0, size_t *block) {
    RFK_UNROLL(8)
    for (uint32_t j = 0; j < rfk_wgmma_decoder<TYPE, TEAM>::ROWS; j++) {
        const uint32_t row = row0 + rfk_wgmma_first_row<TYPE, TEAM>() + 16 * TEAM * j;
        block[j] = (size_t)(p.row0 + (row < p.n_out ? row : p.n_out - 1)) * (n_in / rfk_format<TYPE>::BLOCK);
    }
}
template <int TYPE, uint32_t TEAM>
RFK_DEVICE void rfk_wgmma_fetch(const rfk_weight &w, const size_t *block, uint32_t step, rfk_raw *raw) {
    const uint32_t UNITS = rfk_wgmma_decoder<TYPE, TEAM>::UNITS;
    for (int i = 0; i < 4; i++) rfk_assume_global(w.plane[i]);
    RFK_UNROLL(8)
    for (uint32_t n = 0; n < rfk_wgmma_decoder<TYPE, TEAM>::N; n++)
        rfk_format<TYPE>::fetch(w, block[n / UNITS], 2 * step + threadIdx.x % 2 + n % UNITS * 2, raw[n]);
}
template <int TYPE, uint32_t TEAM>
RFK_DEVICE void rfk_wgmma_unpack(const rfk_raw *raw, uint32_t step, rfk_unit *unpacked) {
    const uint32_t UNITS = rfk_wgmma_decoder<TYPE, TEAM>::UNITS;
    RFK_UNROLL(8)
    for (uint32_t n = 0; n < rfk_wgmma_decoder<TYPE, TEAM>::N; n++)
        rfk_format<TYPE>::unpack(raw[n], 2 * step + threadIdx.x % 2 + n % UNITS * 2, unpacked[n]);
}
/* part: of the steps that share the units. */
template <int TYPE, uint32_t TEAM>
RFK_DEVICE void rfk_wgmma_store_units(const rfk_unit *unpacked, uint32_t step, uint32_t part, int4 (*to)[8]) {
    typedef rfk_format<TYPE> F;
    const uint32_t UNITS = rfk_wgmma_decoder<TYPE, TEAM>::UNITS;
    RFK_UNROLL(8)
    for (uint32_t n = 0; n < rfk_wgmma_decoder<TYPE, TEAM>::N; n++) {
        const uint32_t row = rfk_wgmma_first_row<TYPE, TEAM>() + n / UNITS * 16 * TEAM,
                       unit = 2 * step + threadIdx.x % 2 + n % UNITS * 2;
        const rfk_unit &v = unpacked[n];
        RFK_UNROLL(2)
        for (uint32_t h = 0; h < 2; h++) {
            if (UNITS == 2 && h != part) continue;
            rfk_wgmma_store<F::OFFSET>(to[row], row, rfk_unit_at<TYPE>(unit) % 64 / 8 + h * (F::STRIDE % 64 / 8),
                                       v.q + 4 * h, v.d[h], F::HAS_MIN ? v.m[h] : 0.0f);
        }
    }
}

/* A producer warpgroup fills the stages of its steps. */
template <int TYPE>
RFK_DEVICE void rfk_wgmma_fill(const rfk_matmul_args &a, const rfk_product &p, const rfk_wgmma_tile &tile,
                               rfk_wgmma_shared &s, rfk_mbarriers<RFK_WGMMA_STAGES> &barriers) {
    typedef rfk_wgmma_decoder<TYPE, 4> D;
    rfk_wgmma_turn<RFK_WGMMA_STAGES> now = {0, 0}, copied = {0, 0};
    rfk_raw raw[D::N];
    size_t block[D::ROWS];
    if (tile.first >= tile.end) return;
    if (tile.x_row) {
        rfk_wgmma_copy_pairs(a.x8, tile, tile.first, s.stage[0]);
        rfk_commit_copies();
        rfk_wgmma_next(copied);
    }
    rfk_wgmma_blocks<TYPE, 4>(p, a.n_in, tile.row0, block);
    rfk_wgmma_fetch<TYPE, 4>(p.w, block, tile.first, raw);
    RFK_UNROLL(1)
    for (uint32_t step = tile.first; step < tile.end; step += D::UNITS) {
        RFK_UNROLL(2)
        for (uint32_t part = 0; part < D::UNITS; part++) {
            /* columns of pairs are on their way while the step before is unpacked */
            const uint32_t next = step + part + (tile.x_row ? 1 : 0);
            if (next < tile.end) {
                rfk_mbarrier_wait(&barriers.empty[copied.stage], copied.round ^ 1);
                if (tile.x_row) rfk_wgmma_copy_pairs(a.x8, tile, next, s.stage[copied.stage]);
                else if (threadIdx.x % RFK_WARPGROUP == 0)
                    rfk_wgmma_copy_x(a.x8, tile.col0, tile.n, next, s.stage[copied.stage],
                                     &barriers.full[copied.stage]);
                rfk_wgmma_next(copied);
            }
            if (tile.x_row) rfk_commit_copies();
            rfk_unit unpacked[D::N];
            rfk_wgmma_unpack<TYPE, 4>(raw, step, unpacked);
            if (part + 1 == D::UNITS && step + D::UNITS < tile.end) /* they arrive while the step's are stored */
                rfk_wgmma_fetch<TYPE, 4>(p.w, block, step + D::UNITS, raw);
            rfk_wgmma_store_units<TYPE, 4>(unpacked, step, part, s.stage[now.stage].w);
            if (tile.x_row) rfk_wait_copies_but_one(); /* not for a bulk copy: it would wait for what is fetched, too */
            rfk_wgmma_filled(&barriers.full[now.stage]);
            rfk_wgmma_next(now);
        }
    }
}
#endif

/* Adjacent columns, or those of pairs (lists.tile not NULL; products are in e). unit: [cols] scale of columns, or
 * NULL. */
struct rfk_wgmma_args {
    rfk_tiles_args t;
    const float *unit;
    rfk_experts_args e;
    rfk_pair_lists lists;
};

#if defined(RFK_HAS_WGMMA)

/* As rfk_put_pair, rows 4i .. 4i + 3. */
RFK_DEVICE void rfk_put_pair4(const rfk_experts_args &a, uint32_t pair, uint32_t expert, uint32_t i, float *v) {
    float *out = a.out + (size_t)(pair / a.n_used) * a.out_stride + (size_t)(pair % a.n_used) * a.out_choice;
    const float factor = a.factor ? rfk_load_any(a.factor, a.factor_type, expert) : 1.0f;
    for (uint32_t k = 0; k < 4; k++) {
        v[k] *= factor;
        if (a.bias && 4 * i + k < a.n_out)
            v[k] += rfk_load_any(a.bias, a.bias_type, (size_t)expert * a.n_out + 4 * i + k);
    }
    rfk_set4(out, i, a.n_out, v);
}
/* A block does two adjacent tiles of an expert's pairs.   False: the block has nothing to do, or the expert is not
 * loaded and its results were set to NaN. */
RFK_DEVICE bool rfk_wgmma_find_pairs(const rfk_wgmma_args &a, rfk_product *p, rfk_wgmma_tile *work, uint32_t *x_row) {
    const rfk_pair_tile tile = a.lists.tile[blockIdx.x];
    if (tile.n == 0 || tile.number % 2) return false;
    const uint32_t n_rows = a.t.m.x8.bf16, *pairs = a.lists.sorted + tile.first;
    work->row0 = blockIdx.y * RFK_WGMMA_ROWS;
    work->col0 = tile.first;
    work->n = tile.n == RFK_PAIR_TILE ? RFK_PAIR_TILE + a.lists.tile[blockIdx.x + 1].n : tile.n;
    work->x_row = x_row;
    p->row0 = 0;
    p->w = rfk_expert_matrix(a.e, tile.expert, &p->row0);
    p->n_out = a.e.n_out;
    for (uint32_t i = threadIdx.x; !p->w.plane[0] && i < work->n * RFK_WGMMA_ROWS; i += RFK_WGMMA_BLOCK) {
        const uint32_t row = work->row0 + i % RFK_WGMMA_ROWS;
        if (row < p->n_out) rfk_put_pair(a.e, pairs[i / RFK_WGMMA_ROWS], tile.expert, row, NAN);
    }
    if (threadIdx.x < RFK_WGMMA_COLS) {
        const uint32_t pair = pairs[threadIdx.x < work->n ? threadIdx.x : work->n - 1], row = pair / a.e.n_used,
                       choice = a.e.per_choice ? pair % a.e.n_used : 0;
        x_row[threadIdx.x] = (choice * (a.e.n_in / RFK_WGMMA_DEPTH) * n_rows + row) * 8 + row % 8;
    }
    return p->w.plane[0] != NULL;
}

/* Store the sums that the consumer left: four rows of a column a thread. */
RFK_DEVICE void rfk_wgmma_put(const rfk_wgmma_args &a, const rfk_product &p, const rfk_wgmma_tile &work,
                              const rfk_wgmma_out &sums) {
    const rfk_tiles_args &t = a.t;
    const uint32_t fours = RFK_WGMMA_ROWS / 4, row = 4 * (threadIdx.x % fours), i = (work.row0 + row) / 4,
                   tile = blockIdx.y * t.n_splits + blockIdx.z; /* if there are splits, of a single column of tiles */
    if (work.row0 + row >= p.n_out && !t.part) return;
    RFK_UNROLL(1)
    for (uint32_t at = threadIdx.x / fours; at < work.n; at += RFK_WARPGROUP / fours) {
        const uint32_t col = work.col0 + at;
        float4 v = *reinterpret_cast<const float4 *>(&sums.at[at][row]);
        const float unit = a.unit ? a.unit[col] : 1.0f;
        v.x *= unit, v.y *= unit, v.z *= unit, v.w *= unit;
        float out[4] = {v.x, v.y, v.z, v.w};
        if (t.part)
            *reinterpret_cast<float4 *>(t.part + ((size_t)tile * RFK_WGMMA_COLS + at) * RFK_WGMMA_ROWS + row) = v;
        else if (!work.x_row) rfk_put4(p, i, col, out);
        else rfk_put_pair4(a.e, a.lists.sorted[col], a.lists.tile[blockIdx.x].expert, i, out);
    }
}
/* The consumer's part; at the end the sums replace the stages. */
template <int COLS, bool F16>
RFK_DEVICE void rfk_wgmma_consume(uint32_t n_steps, rfk_wgmma_shared &s, rfk_mbarriers<RFK_WGMMA_STAGES> &barriers) {
    float sum[2][COLS / 2];
    rfk_wgmma_turn<RFK_WGMMA_STAGES> now = {0, 0};
    rfk_wgmma_multiply<COLS, F16, true>(sum, rfk_wgmma_at(s.stage[0].w[0]), rfk_wgmma_at(s.stage[0].x[0]),
                                  sizeof s.stage[0] / sizeof(int4), n_steps, barriers, now);
    __syncthreads();
    RFK_UNROLL(2)
    for (uint32_t n = 0; n < 2; n++)
        RFK_UNROLL(64)
        for (uint32_t i = 0; i < COLS / 2; i++) s.out.at[rfk_wgmma_col(i)][64 * n + rfk_wgmma_row(i)] = sum[n][i];
    __syncthreads();
}
#endif

/* grid [1 or tiles of pairs, row tiles of all products, splits]   block 256   LDS 97 KiB   n_in % 64 == 0
 *   reads W once and x once per 128 rows
 * ONLY: the one type of a class that comes here; its producers do not branch on the type. */
template <int TYPE, uint32_t ONLY = RF_TYPE_COUNT>
static __global__ void RFK_RESIDENT(RFK_WGMMA_BLOCK, 2) rfk_matmul_wgmma(rfk_wgmma_args a) {
#if defined(RFK_HAS_WGMMA)
    const bool HALVES = TYPE == RF_TYPE_F16, COPIED = HALVES || TYPE == RF_TYPE_BF16;
    RFK_SHARED(rfk_mbarriers<RFK_WGMMA_STAGES>, barriers);
    RFK_SHARED(rfk_wgmma_columns, columns);
    RFK_DYNAMIC(int4, memory);
    rfk_wgmma_shared &s = rfk_wgmma_memory<rfk_wgmma_shared>(memory);
    const rfk_tiles_args &t = a.t;
    const uint32_t steps = t.m.n_in / RFK_WGMMA_DEPTH, last = t.split_units / 2 * (blockIdx.z + 1);
    rfk_product p;
    rfk_wgmma_tile work;
    work.first = t.split_units / 2 * blockIdx.z, work.end = last < steps ? last : steps;
    if (a.lists.tile) {
        if (!rfk_wgmma_find_pairs(a, &p, &work, columns.x)) return;
    } else {
        uint32_t number = blockIdx.y;
        p = rfk_pick(t.m, &number);
        work.row0 = number * RFK_WGMMA_ROWS, work.col0 = 0, work.n = t.m.n_cols, work.x_row = NULL;
    }
    for (int i = 0; i < 4; i++) rfk_assume_global(p.w.plane[i]);
    if (threadIdx.x < RFK_WGMMA_STAGES) {
        rfk_mbarrier_init(&barriers.full[threadIdx.x], RFK_WARPGROUP / 32 + (work.x_row == NULL));
        rfk_mbarrier_init(&barriers.empty[threadIdx.x], RFK_WARPGROUP / 32);
    }
    __syncthreads();
    if (threadIdx.x >= RFK_WARPGROUP) {
        rfk_shrink_registers<88>();
        if (ONLY < RF_TYPE_COUNT) p.w.type = ONLY;
        if (COPIED) rfk_wgmma_copy(t.m, p, work, s, barriers);
        else rfk_wgmma_fill<COPIED ? RF_TYPE_Q8_0 : TYPE>(t.m, p, work, s, barriers);
        __syncthreads(); /* matches the barriers in rfk_wgmma_consume */
        __syncthreads();
        return;
    }
    rfk_grow_registers<168>();
    const uint32_t n_steps = work.end - work.first;
    if (!COPIED && work.n <= RFK_PAIR_TILE) rfk_wgmma_consume<RFK_PAIR_TILE, false>(n_steps, s, barriers);
    else rfk_wgmma_consume<RFK_WGMMA_COLS, HALVES>(n_steps, s, barriers);
    rfk_wgmma_put(a, p, work, s.out);
#else
    (void)a;
#endif
}

/* ---- more columns, on warpgroups ---- */

/* unit: [cols] scale of columns, or NULL. A block does every gridDim.x-th of n_tiles. */
struct rfk_wide_args {
    rfk_tiles_args t;
    const float *unit;
    uint32_t col_tiles, row_tiles, n_tiles; /* of 256 columns, of 128 rows of all products; with the splits */
};

#if defined(RFK_HAS_WGMMA)

struct rfk_wide_tile { uint32_t row_tile, row0, col0, n, first, end, split; };
struct rfk_wide_barriers {
    rfk_mbarriers<RFK_WIDE_STAGES> stages;
    rfk_mbarrier put[2]; /* a consumer's waves wait for each other */
};
typedef rfk_wgmma_turn<RFK_WIDE_STAGES> rfk_wide_turn;

/* A number that the compiler does not know: what is found of it again need not stay in registers. */
RFK_DEVICE uint32_t rfk_tile_again(uint32_t tile) {
#if defined(RFK_NVIDIA)
    asm volatile("" : "+r"(tile));
#endif
    return tile;
}

/* Tiles with the same rows are adjacent, so that W is read from memory once. */
RFK_DEVICE rfk_product rfk_wide_find(const rfk_wide_args &a, uint32_t tile, rfk_wide_tile &work) {
    const rfk_tiles_args &t = a.t;
    const uint32_t rows = tile / a.col_tiles, steps = t.m.n_in / RFK_WGMMA_DEPTH, per_split = t.split_units / 2;
    uint32_t number = work.row_tile = rows % a.row_tiles;
    work.split = rows / a.row_tiles, work.col0 = tile % a.col_tiles * RFK_WIDE_COLS;
    work.n = t.m.n_cols - work.col0 < RFK_WIDE_COLS ? t.m.n_cols - work.col0 : RFK_WIDE_COLS;
    work.first = per_split * work.split;
    work.end = work.first + per_split < steps ? work.first + per_split : steps;
    const rfk_product p = rfk_pick(t.m, &number);
    work.row0 = number * RFK_WGMMA_ROWS;
    return p;
}

/* Where a producer is: a step of a tile of its block. base: steps of the tiles before. */
struct rfk_wide_place {
    rfk_wide_tile work;
    uint32_t tile, step, base;
};
RFK_DEVICE rfk_wide_turn rfk_wide_turn_of(const rfk_wide_place &at, uint32_t part) {
    const uint32_t i = at.base + at.step - at.work.first + part;
    const rfk_wide_turn turn = {i % RFK_WIDE_STAGES, i / RFK_WIDE_STAGES % 2};
    return turn;
}
/* Go to the block's next tile that has a step for this producer, who begins with its step `ahead`, from at.tile on. */
RFK_DEVICE void rfk_wide_enter(const rfk_wide_args &a, uint32_t ahead, rfk_wide_place &at, rfk_product &p) {
    for (; at.tile < a.n_tiles; at.tile += gridDim.x) {
        p = rfk_wide_find(a, at.tile, at.work);
        at.step = at.work.first + ahead;
        if (at.step < at.work.end) return;
        at.base += at.work.end - at.work.first;
    }
}

/* Waves that fill a stage together. */
#define RFK_WIDE_TEAM(type) (rfk_format<type>::STRIDE == 64 || RFK_WIDE_PRODUCERS(type) > 1 ? 4u : 2u)

/* A producer warpgroup decodes the weights of its block's tiles; each team of waves fills every TEAMS-th stage. */
template <int TYPE, uint32_t ONLY>
RFK_DEVICE void rfk_wide_fill(const rfk_wide_args &a, rfk_wide_shared &s, rfk_wide_barriers &barriers) {
    const uint32_t TEAM = RFK_WIDE_TEAM(TYPE), TEAMS = 4 / TEAM, n_in = a.t.m.n_in;
    typedef rfk_wgmma_decoder<TYPE, TEAM> D;
    const uint32_t wave = threadIdx.x % RFK_WARPGROUP / 32, ahead = wave / TEAM * D::UNITS;
    rfk_wide_place at = {{0, 0, 0, 0, 0, 0, 0}, blockIdx.x, 0, 0};
    rfk_product p = a.t.m.part[0];
    rfk_raw raw[D::N];
    size_t block[D::ROWS];
    rfk_wide_enter(a, ahead, at, p);
    if (ONLY < RF_TYPE_COUNT) p.w.type = ONLY;
    if (at.tile < a.n_tiles) {
        rfk_wgmma_blocks<TYPE, TEAM>(p, n_in, at.work.row0, block);
        rfk_wgmma_fetch<TYPE, TEAM>(p.w, block, at.step, raw);
    }
    RFK_UNROLL(1)
    while (at.tile < a.n_tiles) {
        rfk_wide_place next = at;
        RFK_UNROLL(2)
        for (uint32_t part = 0; part < D::UNITS; part++) {
            const rfk_wide_turn turn = rfk_wide_turn_of(at, part);
            rfk_mbarrier *full = &barriers.stages.full[turn.stage];
            rfk_mbarrier_wait(&barriers.stages.empty[turn.stage], turn.round ^ 1);
            /* the waves of a team take turns: it takes a while */
            if (threadIdx.x % 32 == 0 && wave % TEAM == turn.stage / TEAMS % TEAM)
                rfk_wgmma_copy_x(a.t.m.x8, at.work.col0, at.work.n, at.step + part, s.stage[turn.stage], full);
            rfk_unit unpacked[D::N];
            rfk_wgmma_unpack<TYPE, TEAM>(raw, at.step, unpacked);
            if (part + 1 == D::UNITS) { /* what is fetched arrives while the step's are stored */
                next.step += D::UNITS * TEAMS;
                if (next.step >= next.work.end) {
                    next.base += next.work.end - next.work.first, next.tile += gridDim.x;
                    rfk_wide_enter(a, ahead, next, p);
                    if (ONLY < RF_TYPE_COUNT) p.w.type = ONLY;
                    if (next.tile < a.n_tiles) rfk_wgmma_blocks<TYPE, TEAM>(p, n_in, next.work.row0, block);
                }
                if (next.tile < a.n_tiles) rfk_wgmma_fetch<TYPE, TEAM>(p.w, block, next.step, raw);
            }
            rfk_wgmma_store_units<TYPE, TEAM>(unpacked, at.step, part, s.stage[turn.stage].w);
            rfk_wgmma_filled(full);
        }
        at = next;
    }
}

/* One of two producer warpgroups decodes the weights of its block's tile: every second step, or two of four. */
template <int TYPE, uint32_t ONLY>
RFK_DEVICE void rfk_wide_fill_one(const rfk_wide_args &a, rfk_wide_shared &s, rfk_wide_barriers &barriers) {
    typedef rfk_wgmma_decoder<TYPE, 4> D;
    rfk_wide_tile work;
    rfk_product p = rfk_wide_find(a, blockIdx.x, work);
    const uint32_t first = work.first + D::UNITS * (threadIdx.x / RFK_WARPGROUP - 2);
    rfk_raw raw[D::N];
    size_t block[D::ROWS];
    if (first >= work.end) return;
    if (ONLY < RF_TYPE_COUNT) p.w.type = ONLY;
    rfk_wgmma_blocks<TYPE, 4>(p, a.t.m.n_in, work.row0, block);
    rfk_wgmma_fetch<TYPE, 4>(p.w, block, first, raw);
    RFK_UNROLL(1)
    for (uint32_t step = first; step < work.end; step += 2 * D::UNITS) {
        RFK_UNROLL(2)
        for (uint32_t part = 0; part < D::UNITS; part++) {
            const uint32_t i = step + part - work.first, stage = i % RFK_WIDE_STAGES;
            rfk_mbarrier *full = &barriers.stages.full[stage];
            rfk_mbarrier_wait(&barriers.stages.empty[stage], i / RFK_WIDE_STAGES % 2 ^ 1);
            if (threadIdx.x % RFK_WARPGROUP == 0)
                rfk_wgmma_copy_x(a.t.m.x8, work.col0, work.n, step + part, s.stage[stage], full);
            rfk_unit unpacked[D::N];
            rfk_wgmma_unpack<TYPE, 4>(raw, step, unpacked);
            if (part + 1 == D::UNITS) /* what is fetched arrives while the step's are stored */
                rfk_wgmma_fetch<TYPE, 4>(p.w, block, step + 2 * D::UNITS < work.end ? step + 2 * D::UNITS : step, raw);
            rfk_wgmma_store_units<TYPE, 4>(unpacked, step, part, s.stage[stage].w);
            rfk_wgmma_filled(full);
        }
    }
}

/* A producer warpgroup copies the weights of its block's tiles, of 16-bit floats: two stages are being filled while the
 * one before them arrives. */
RFK_DEVICE void rfk_wide_copy(const rfk_wide_args &a, rfk_wide_shared &s, rfk_wide_barriers &barriers) {
    rfk_wide_turn now = {0, 0}, behind = {0, 0};
    uint32_t n_ahead = 0;
    RFK_UNROLL(1)
    for (uint32_t tile = blockIdx.x; tile < a.n_tiles; tile += gridDim.x) {
        rfk_wide_tile work;
        const rfk_product p = rfk_wide_find(a, tile, work);
        RFK_UNROLL(1)
        for (uint32_t step = work.first; step < work.end; step++) {
            rfk_mbarrier_wait(&barriers.stages.empty[now.stage], now.round ^ 1);
            if (threadIdx.x % RFK_WARPGROUP == 32 * now.stage)
                rfk_wgmma_copy_x(a.t.m.x8, work.col0, work.n, step, s.stage[now.stage],
                                 &barriers.stages.full[now.stage]);
            rfk_wgmma_copy_w(p, a.t.m.n_in, work.row0, step, s.stage[now.stage].w);
            rfk_commit_copies();
            rfk_wgmma_next(now);
            if (n_ahead < 2) {
                n_ahead++;
                continue;
            }
            rfk_wait_copies_but_two();
            rfk_wgmma_filled(&barriers.stages.full[behind.stage]);
            rfk_wgmma_next(behind);
        }
    }
    for (; n_ahead > 0; n_ahead--) {
        rfk_commit_copies();
        rfk_wait_copies_but_two();
        rfk_wgmma_filled(&barriers.stages.full[behind.stage]);
        rfk_wgmma_next(behind);
    }
}

/* Where a row of a column is in rfk_wide_shared.out: the columns of a wave's lanes lie in different banks. */
RFK_DEVICE uint32_t rfk_wide_row(uint32_t col, uint32_t row) { return row ^ (col / 2 % 4 * 8); }

RFK_DEVICE void rfk_wide_meet(rfk_mbarrier *put, uint32_t &n) {
    rfk_sync_wave();
    if (threadIdx.x % 32 == 0) rfk_mbarrier_arrive(put);
    rfk_mbarrier_wait(put, n++);
}

/* Store a consumer's sums of a tile, on their way through shared memory: four rows of a column a thread. */
RFK_DEVICE void rfk_wide_put_columns(const rfk_wide_args &a, const rfk_product &p, const rfk_wide_tile &work,
                                     uint32_t from, const float (*out)[64]) {
    const rfk_tiles_args &t = a.t;
    const uint32_t thread = threadIdx.x % RFK_WARPGROUP, r = 4 * (thread % 16),
                   row = threadIdx.x / RFK_WARPGROUP * 64 + r,
                   col_tiles = (t.m.n_cols + RFK_WGMMA_COLS - 1) / RFK_WGMMA_COLS;
    RFK_UNROLL(1)
    for (uint32_t c = thread / 16; c < RFK_WIDE_PUT && from + c < work.n; c += RFK_WARPGROUP / 16) {
        const uint32_t col = work.col0 + from + c;
        float4 v = *reinterpret_cast<const float4 *>(&out[c][rfk_wide_row(c, r)]);
        const float unit = a.unit ? a.unit[col] : 1.0f;
        v.x *= unit, v.y *= unit, v.z *= unit, v.w *= unit;
        float results[4] = {v.x, v.y, v.z, v.w};
        if (t.part) { /* [row tiles, tiles of 128 columns, splits] */
            const size_t tile = (size_t)work.row_tile * col_tiles + col / RFK_WGMMA_COLS;
            *reinterpret_cast<float4 *>(t.part + ((tile * t.n_splits + work.split) * RFK_WGMMA_COLS +
                                                  col % RFK_WGMMA_COLS) * RFK_WGMMA_ROWS + row) = v;
        } else if (work.row0 + row < p.n_out) {
            rfk_put4(p, (work.row0 + row) / 4, col, results);
        }
    }
}
/* Part PART of a thread's sums, to shared memory. */
template <uint32_t PART> RFK_DEVICE void rfk_wide_share(float (*out)[64], const float (&sum)[RFK_WIDE_COLS / 2]) {
    const uint32_t RESULTS = RFK_WIDE_PUT / 2;
    RFK_UNROLL(32)
    for (uint32_t i = 0; i < RESULTS; i++)
        out[rfk_wgmma_col(i)][rfk_wide_row(rfk_wgmma_col(i), rfk_wgmma_row(i))] = sum[RESULTS * PART + i];
}
RFK_DEVICE void rfk_wide_put(const rfk_wide_args &a, const rfk_product &p, const rfk_wide_tile &work,
                             const float (&sum)[RFK_WIDE_COLS / 2], rfk_wide_shared &s, rfk_mbarrier *put,
                             uint32_t &n) {
    float(*out)[64] = s.out[threadIdx.x / RFK_WARPGROUP];
    RFK_UNROLL(1)
    for (uint32_t part = 0; part < RFK_WIDE_COLS / RFK_WIDE_PUT; part++) {
        if (part == 0) rfk_wide_share<0>(out, sum); /* the sums must stay in registers */
        else if (part == 1) rfk_wide_share<1>(out, sum);
        else if (part == 2) rfk_wide_share<2>(out, sum);
        else rfk_wide_share<3>(out, sum);
        rfk_wide_meet(put, n);
        rfk_wide_put_columns(a, p, work, RFK_WIDE_PUT * part, out);
        rfk_wide_meet(put, n);
    }
}
#endif

/* grid [multiprocessors, or tiles if they are fewer; with two producers: tiles]   block 384 or 512   LDS 225 KiB
 *   n_in % 64 == 0   reads W once per 256 columns and x once per 128 rows */
template <int TYPE, uint32_t ONLY = RF_TYPE_COUNT>
static __global__ void RFK_RESIDENT(RFK_WIDE_BLOCK(TYPE), 1) rfk_matmul_wide(rfk_wide_args a) {
#if defined(RFK_HAS_WGMMA)
    const bool HALVES = TYPE == RF_TYPE_F16, COPIED = HALVES || TYPE == RF_TYPE_BF16;
    RFK_SHARED(rfk_wide_barriers, barriers);
    RFK_DYNAMIC(int4, memory);
    rfk_wide_shared &s = rfk_wgmma_memory<rfk_wide_shared>(memory);
    const uint32_t warpgroup = rfk_same_in_wave(threadIdx.x / RFK_WARPGROUP);
    const int DECODED = COPIED ? RF_TYPE_Q8_0 : TYPE;
    const uint32_t team = COPIED ? 4 : RFK_WIDE_TEAM(DECODED);
    if (threadIdx.x < RFK_WIDE_STAGES) {
        rfk_mbarrier_init(&barriers.stages.full[threadIdx.x], team + 1);
        rfk_mbarrier_init(&barriers.stages.empty[threadIdx.x], 2 * RFK_WARPGROUP / 32);
        if (threadIdx.x < 2) rfk_mbarrier_init(&barriers.put[threadIdx.x], RFK_WARPGROUP / 32);
    }
    __syncthreads();
    if (warpgroup >= 2) {
        if (RFK_WIDE_PRODUCERS(TYPE) > 1) rfk_shrink_registers<88>();
        if (COPIED) rfk_wide_copy(a, s, barriers);
        else if (RFK_WIDE_PRODUCERS(TYPE) > 1) rfk_wide_fill_one<DECODED, ONLY>(a, s, barriers);
        else rfk_wide_fill<DECODED, ONLY>(a, s, barriers);
        return;
    }
    if (RFK_WIDE_PRODUCERS(TYPE) > 1) rfk_grow_registers<168>();
    const rfk_wgmma_operand w = rfk_wgmma_at(s.stage[0].w[64 * warpgroup]), x = rfk_wgmma_at(s.stage[0].x[0]);
    float sum[1][RFK_WIDE_COLS / 2];
    rfk_wide_turn now = {0, 0};
    uint32_t n = 0;
    RFK_UNROLL(1)
    for (uint32_t tile = blockIdx.x; tile < a.n_tiles; tile += gridDim.x) {
        rfk_wide_tile work;
        const rfk_product p = rfk_wide_find(a, tile, work);
        rfk_wgmma_multiply<RFK_WIDE_COLS, HALVES, RFK_WIDE_PRODUCERS(TYPE) == 1>(
            sum, w, x, sizeof s.stage[0] / sizeof(int4), work.end - work.first, barriers.stages, now);
        rfk_wide_put(a, p, work, sum[0], s, &barriers.put[warpgroup], n);
    }
#else
    (void)a;
#endif
}

/* ---- more columns, on warpgroups, weights of float32 ----
 * rfk_matmul_wide for float32: both operands are sums of two 16-bit floats, upper and lower. All their products are
 * added but that of the lower ones, an error of 2^-22 of a product. Columns are scaled as a whole (rfk_split_rows). The
 * producer splits weights on their way to shared memory, and scales the 64 values of a row in a stage by a power of
 * two, so that the largest is near 2^14: the error of a weight is 2^-22 of it or 2^-38 of the largest. Consumers scale
 * back when they add a stage's sums to those of the stages before, as floats: a unit truncates at each addition, and
 * there would be 3 n_in / 16 of them. Weights of about 2^100 overflow (2^113 / n_in); an infinite one gives NaN. */

#define RFK_SPLIT_STAGES (RFK_WIDE_STAGES / 2) /* each is two of rfk_wide_shared: upper, lower */

#if defined(RFK_HAS_WGMMA)

struct rfk_split_barriers {
    rfk_mbarriers<RFK_SPLIT_STAGES> stages;
    rfk_mbarrier put[2];                          /* a consumer's waves wait for each other */
    rfk_mbarrier turn[2];                         /* the other consumer's products have begun */
    float unit[RFK_SPLIT_STAGES][RFK_WGMMA_ROWS]; /* scale of a row of W in a stage */
};
typedef rfk_wgmma_turn<RFK_SPLIT_STAGES> rfk_split_turn;

/* The 64 weights of a tile's row in a step. Rows beyond the last repeat it. */
RFK_DEVICE const float4 *rfk_split_row(const rfk_product &p, uint32_t n_in, const rfk_wide_place &at, uint32_t i) {
    const uint32_t row = at.work.row0 + i < p.n_out ? at.work.row0 + i : p.n_out - 1;
    rfk_assume_global(p.w.plane[0]);
    return reinterpret_cast<const float4 *>(p.w.plane[0]) +
           ((size_t)(p.row0 + row) * n_in + at.step * RFK_WGMMA_DEPTH) / 4;
}
/* The L2 loads a step's weights, a row a thread. */
RFK_DEVICE void rfk_split_prefetch(const rfk_product &p, uint32_t n_in, const rfk_wide_place &at) {
    const float4 *from = rfk_split_row(p, n_in, at, threadIdx.x % RFK_WARPGROUP);
#if defined(RFK_NVIDIA)
    asm volatile("prefetch.global.L2 [%0];\nprefetch.global.L2 [%0 + 128];" ::"l"(from));
#else
    (void)from;
#endif
}
/* A producer thread has weights of every 16th row: values 4i .. 4i + 3 and those 32 after them, i its lane of eight.
 * They become word i of the row; columns have that order, too (rfk_split_args.wide). */
RFK_DEVICE void rfk_split_fetch(const rfk_product &p, uint32_t n_in, const rfk_wide_place &at, uint32_t j,
                                float (&v)[8]) {
    const uint32_t thread = threadIdx.x % RFK_WARPGROUP;
    const float4 *from = rfk_split_row(p, n_in, at, thread / 8 + 16 * j) + thread % 8, a = from[0], b = from[8];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
/* Split eight of them, and store both terms and the scale. */
RFK_DEVICE void rfk_split_store(const float (&v)[8], uint32_t j, int4 (*upper)[8], int4 (*lower)[8], float *unit) {
    const uint32_t word = threadIdx.x % 8, row = threadIdx.x % RFK_WARPGROUP / 8 + 16 * j;
    float top = 0;
    RFK_UNROLL(8)
    for (uint32_t k = 0; k < 8; k++) top = fmaxf(top, fabsf(v[k]));
    RFK_UNROLL(3)
    for (int mask = 1; mask < 8; mask *= 2) top = fmaxf(top, rfk_shuffle_xor<32>(top, mask));
    uint32_t exponent = rfk_as_bits(top) >> 23, to[2][4];
    if (exponent < 15) exponent = 15; /* tiny or all zero */
    const float scale = rfk_as_float((268 - exponent) << 23);
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < 4; k++) {
        const float x = v[2 * k] * scale, y = v[2 * k + 1] * scale;
        to[0][k] = rfk_to_half2(x, y);
        to[1][k] = rfk_to_half2(x - rfk_from_half((uint16_t)to[0][k]), y - rfk_from_half((uint16_t)(to[0][k] >> 16)));
    }
    int4 words[2];
    RFK_UNROLL(2)
    for (uint32_t h = 0; h < 2; h++)
        words[h].x = (int)to[h][0], words[h].y = (int)to[h][1], words[h].z = (int)to[h][2], words[h].w = (int)to[h][3];
    upper[row][rfk_swizzled(row, word)] = words[0];
    lower[row][rfk_swizzled(row, word)] = words[1];
    if (word == 0) unit[row] = rfk_as_float((exponent - 14) << 23);
}

/* The producer: a step's weights are fetched while it waits for consumers, not before: the fence behind its stores
 * would wait for these loads, too. */
RFK_DEVICE void rfk_split_fill(const rfk_wide_args &a, rfk_wide_shared &s, rfk_split_barriers &barriers) {
    const uint32_t n_in = a.t.m.n_in;
    rfk_int8_rows lower = a.t.m.x8;
    lower.q += (size_t)a.t.m.n_cols * n_in / 2;
    rfk_wide_place at = {{0, 0, 0, 0, 0, 0, 0}, blockIdx.x, 0, 0};
    rfk_split_turn now = {0, 0};
    rfk_product p = a.t.m.part[0];
    float w[RFK_WGMMA_ROWS / 16][8];
    rfk_wide_enter(a, 0, at, p);
    RFK_UNROLL(8)
    for (uint32_t j = 0; j < RFK_WGMMA_ROWS / 16 && at.tile < a.n_tiles; j++) rfk_split_fetch(p, n_in, at, j, w[j]);
    RFK_UNROLL(1)
    while (at.tile < a.n_tiles) {
        rfk_mbarrier *full = &barriers.stages.full[now.stage];
        rfk_wgmma_stage<RFK_WIDE_COLS> *to = &s.stage[2 * now.stage];
        rfk_mbarrier_wait(&barriers.stages.empty[now.stage], now.round ^ 1);
        if (threadIdx.x % RFK_WARPGROUP == 0) {
            rfk_wgmma_copy_x(a.t.m.x8, at.work.col0, at.work.n, at.step, to[0], full);
            rfk_wgmma_copy_x(lower, at.work.col0, at.work.n, at.step, to[1], full);
        }
        if (++at.step == at.work.end) {
            at.tile += gridDim.x;
            rfk_wide_enter(a, 0, at, p);
        }
        if (at.tile < a.n_tiles) rfk_split_prefetch(p, n_in, at);
        RFK_UNROLL(8)
        for (uint32_t j = 0; j < RFK_WGMMA_ROWS / 16; j++)
            rfk_split_store(w[j], j, to[0].w, to[1].w, barriers.unit[now.stage]);
        rfk_wgmma_filled(full);
        rfk_wgmma_next(now);
        RFK_UNROLL(8)
        for (uint32_t j = 0; j < RFK_WGMMA_ROWS / 16 && at.tile < a.n_tiles; j++)
            rfk_split_fetch(p, n_in, at, j, w[j]);
    }
}

/* A consumer's products of a tile, smallest first. Consumers take turns: one multiplies while the other one adds. */
RFK_DEVICE void rfk_split_multiply(float (&sum)[RFK_WIDE_COLS / 2], const rfk_wide_tile &work, rfk_wgmma_operand w,
                                   rfk_wgmma_operand x, rfk_split_barriers &barriers, rfk_split_turn &now,
                                   uint32_t &n_turns) {
    const uint32_t words = sizeof(rfk_wgmma_stage<RFK_WIDE_COLS>) / sizeof(int4),
                   warpgroup = rfk_same_in_wave(threadIdx.x / RFK_WARPGROUP), row = 64 * warpgroup + rfk_wgmma_row(0);
    RFK_UNROLL(128)
    for (uint32_t i = 0; i < RFK_WIDE_COLS / 2; i++) sum[i] = 0;
    RFK_UNROLL(1)
    for (uint32_t step = work.first; step < work.end; step++) {
        rfk_mbarrier_wait(&barriers.stages.full[now.stage], now.round);
        const float unit[2] = {barriers.unit[now.stage][row], barriers.unit[now.stage][row + 8]};
        const uint32_t upper = 2 * now.stage * words, lower = upper + words;
        RFK_UNROLL(2)
        for (uint32_t half = 0; half < 2; half++) { /* of the columns */
            if (half && work.n <= RFK_WGMMA_COLS) break;
            float part[1][RFK_WGMMA_COLS / 2];
            rfk_mbarrier_wait(&barriers.turn[warpgroup], warpgroup ? n_turns : n_turns + 1); /* 0 begins */
            n_turns++;
            rfk_wgmma_fence();
            RFK_UNROLL(3)
            for (uint32_t n = 0; n < 3; n++)
                RFK_UNROLL(4)
                for (uint32_t k = 0; k < RFK_WGMMA_DEPTH / 16; k++)
                    rfk_wgmma<RFK_WGMMA_COLS, true>(part[0], w + (n == 0 ? lower : upper) + 2 * k,
                                                    x + (n == 1 ? lower : upper) + RFK_WGMMA_COLS * 8 * half + 2 * k,
                                                    n > 0 || k > 0);
            rfk_wgmma_commit();
            if (threadIdx.x % 32 == 0) rfk_mbarrier_arrive(&barriers.turn[1 - warpgroup]);
            rfk_wgmma_drain<RFK_WGMMA_COLS>(part);
            if (threadIdx.x % 32 == 0 && (half || work.n <= RFK_WGMMA_COLS))
                rfk_mbarrier_arrive(&barriers.stages.empty[now.stage]);
            RFK_UNROLL(64)
            for (uint32_t i = 0; i < RFK_WGMMA_COLS / 2; i++)
                sum[RFK_WGMMA_COLS / 2 * half + i] =
                    fmaf(part[0][i], unit[i % 4 / 2], sum[RFK_WGMMA_COLS / 2 * half + i]);
        }
        rfk_wgmma_next(now);
    }
}
#endif

/* grid [multiprocessors, or tiles if they are fewer]   block 384   LDS 226 KiB   n_in % 64 == 0
 *   reads W once per 256 columns and both halves of x once per 128 rows */
static __global__ void RFK_RESIDENT(RFK_WIDE_BLOCK(RF_TYPE_F32), 1) rfk_matmul_wide_split(rfk_wide_args a) {
#if defined(RFK_HAS_WGMMA)
    RFK_SHARED(rfk_split_barriers, barriers);
    RFK_DYNAMIC(int4, memory);
    rfk_wide_shared &s = rfk_wgmma_memory<rfk_wide_shared>(memory);
    const uint32_t warpgroup = rfk_same_in_wave(threadIdx.x / RFK_WARPGROUP);
    if (threadIdx.x < RFK_SPLIT_STAGES) {
        rfk_mbarrier_init(&barriers.stages.full[threadIdx.x], RFK_WARPGROUP / 32 + 2);
        rfk_mbarrier_init(&barriers.stages.empty[threadIdx.x], 2 * RFK_WARPGROUP / 32);
    }
    if (threadIdx.x < 2) { /* of each consumer */
        rfk_mbarrier_init(&barriers.put[threadIdx.x], RFK_WARPGROUP / 32);
        rfk_mbarrier_init(&barriers.turn[threadIdx.x], RFK_WARPGROUP / 32);
    }
    __syncthreads();
    if (warpgroup == 2) {
        rfk_shrink_registers<88>();
        rfk_split_fill(a, s, barriers);
        return;
    }
    rfk_grow_registers<208>();
    const rfk_wgmma_operand w = rfk_wgmma_at(s.stage[0].w[64 * warpgroup]), x = rfk_wgmma_at(s.stage[0].x[0]);
    float sum[RFK_WIDE_COLS / 2];
    rfk_split_turn now = {0, 0};
    uint32_t n = 0, n_turns = 0;
    RFK_UNROLL(1)
    for (uint32_t tile = blockIdx.x; tile < a.n_tiles; tile += gridDim.x) {
        rfk_wide_tile work;
        (void)rfk_wide_find(a, tile, work);
        rfk_split_multiply(sum, work, w, x, barriers, now, n_turns);
        const rfk_product p = rfk_wide_find(a, rfk_tile_again(tile), work);
        rfk_wide_put(a, p, work, sum, s, &barriers.put[warpgroup], n);
    }
#else
    (void)a;
#endif
}

static void (*rfk_find_wgmma(uint32_t type))(rfk_wgmma_args) {
    const uint32_t MXFP4 = rfk_built<RF_TYPE_MXFP4>::is ? RF_TYPE_MXFP4 : RF_TYPE_COUNT;
    if (type == RF_TYPE_MXFP4) return rfk_matmul_wgmma<RFK_BUILT(RFK_OTHER32), MXFP4>;
#define RFK_QUANTIZED_CASE(TYPE) case TYPE: return rfk_matmul_wgmma<RFK_BUILT(TYPE)>;
    switch (rfk_kernel_type(type)) {
        RFK_QUANTIZED_TYPES(RFK_QUANTIZED_CASE)
    case RF_TYPE_F16: return rfk_matmul_wgmma<RFK_BUILT(RF_TYPE_F16)>;
    case RF_TYPE_BF16: return rfk_matmul_wgmma<RFK_BUILT(RF_TYPE_BF16)>;
    default: return NULL;
    }
#undef RFK_QUANTIZED_CASE
}
static void (*rfk_find_wide(uint32_t type))(rfk_wide_args) {
    const uint32_t MXFP4 = rfk_built<RF_TYPE_MXFP4>::is ? RF_TYPE_MXFP4 : RF_TYPE_COUNT;
    if (type == RF_TYPE_MXFP4) return rfk_matmul_wide<RFK_BUILT(RFK_OTHER32), MXFP4>;
#define RFK_QUANTIZED_CASE(TYPE) case TYPE: return rfk_matmul_wide<RFK_BUILT(TYPE)>;
    switch (rfk_kernel_type(type)) {
        RFK_QUANTIZED_TYPES(RFK_QUANTIZED_CASE)
    case RF_TYPE_F32: return rfk_matmul_wide_split;
    case RF_TYPE_F16: return rfk_matmul_wide<RFK_BUILT(RF_TYPE_F16)>;
    case RF_TYPE_BF16: return rfk_matmul_wide<RFK_BUILT(RF_TYPE_BF16)>;
    default: return NULL;
    }
#undef RFK_QUANTIZED_CASE
}

/* ---- up to 32 or 64 columns, on warpgroups ----
 * wgmma can take rows from registers. Where columns are few, decoding W and handing it over in shared memory is what
 * takes the time: here four consumer warpgroups have 64 rows each, and decode weights right into the registers that the
 * instruction reads. A producer warpgroup copies columns. Types that share a kernel take too many registers to decode:
 * they stay with rfk_matmul_wgmma.
 * Blocks are persistent; the next tile's first weights and columns are on their way while one's sums are stored, and
 * the first tile's weights while the launch before ends. */

#define RFK_NARROW_COLS RFK_PAIR_TILE
#define RFK_NARROW_CONSUMERS 4u
#define RFK_NARROW_ROWS (64 * RFK_NARROW_CONSUMERS)
#define RFK_NARROW_BLOCK (RFK_WARPGROUP * (RFK_NARROW_CONSUMERS + 1))
#define RFK_NARROW_STAGES 4u
/* A stage: two times 64 positions of the columns, rfk_swizzled. out: the sums of a consumer, [column][rfk_wide_row]. */
struct rfk_narrow_shared {
    int4 x[RFK_NARROW_STAGES][2][RFK_NARROW_COLS][8];
    float out[RFK_NARROW_CONSUMERS][RFK_NARROW_COLS][64];
};
#define RFK_NARROW_BYTES ((uint32_t)sizeof(rfk_narrow_shared) + 1024)

/* As rfk_wide_args; or columns of pairs (lists.tile not NULL; products are in e), and a block does one tile. */
struct rfk_narrow_args {
    rfk_tiles_args t;
    uint32_t row_tiles, n_tiles; /* of 256 rows of all products; with the splits */
    rfk_experts_args e;
    rfk_pair_lists lists;
};

#if defined(RFK_HAS_WGMMA)

/* full: the stage's x is there: a bulk copy's bytes, or what a producer's waves copied. */
struct rfk_narrow_barriers {
    rfk_mbarriers<RFK_NARROW_STAGES> stages;
    rfk_mbarrier put[RFK_NARROW_CONSUMERS]; /* a consumer's waves wait for each other */
};
typedef rfk_wgmma_turn<RFK_NARROW_STAGES> rfk_narrow_turn;
struct rfk_narrow_columns { uint32_t x[RFK_NARROW_COLS]; }; /* as rfk_wgmma_tile.x_row */

/* A lane's weights: two rows, 8 apart, and of the 128 values of a step two times 16, as rfk_bf16_at has them. A
 * fragment is what an instruction reads of 16 positions, 4 of them a lane: words 0 and 2 of the first row, 1 and 3 of
 * the second. */
template <int TYPE> struct rfk_narrow_weights {
    rfk_weight w;
    rfk_raw raw[2];
    rfk_unit unit[2];
    size_t block[2]; /* where the rows begin */
};

/* Rows beyond the last repeat it. */
template <int TYPE>
RFK_DEVICE void rfk_narrow_begin(rfk_narrow_weights<TYPE> &o, const rfk_product &p, uint32_t row0, uint32_t n_in) {
    RFK_UNROLL(2)
    for (uint32_t j = 0; j < 2; j++) {
        const uint32_t at = row0 + threadIdx.x / RFK_WARPGROUP * 64 + rfk_wgmma_row(2 * j),
                       row = at < p.n_out ? at : p.n_out - 1;
        o.block[j] = (size_t)(p.row0 + row) * (n_in / rfk_format<TYPE>::BLOCK);
    }
    o.w = p.w;
}

/* The lane's unit of a step; those beyond the row repeat its last: x is 0 there. */
template <int TYPE> RFK_DEVICE uint32_t rfk_narrow_unit(uint32_t step, uint32_t n_in) {
    const uint32_t u = 4 * step + threadIdx.x % 4, last = n_in / 32 - 1;
    return rfk_format<TYPE>::BLOCK == 256 || u < last ? u : last;
}
template <int TYPE> RFK_DEVICE void rfk_narrow_fetch(rfk_narrow_weights<TYPE> &o, uint32_t step, uint32_t n_in) {
    const uint32_t unit = rfk_narrow_unit<TYPE>(step, n_in);
    for (int i = 0; i < 4; i++) rfk_assume_global(o.w.plane[i]);
    RFK_UNROLL(2)
    for (uint32_t j = 0; j < 2; j++) rfk_format<TYPE>::fetch(rfk_places<true>(o.w), o.block[j], unit, o.raw[j]);
}

/* Two lanes, whose numbers differ by BY, have two halves each. The lane without that bit gets both first halves, the
 * other one both second. */
template <int BY, class T> RFK_DEVICE void rfk_narrow_exchange(T &first, T &second) {
    const bool upper = (threadIdx.x & BY) != 0;
    const T other = rfk_shuffle_xor<32>(upper ? first : second, BY);
    if (upper) first = other;
    else second = other;
}
/* Unpack a step's units. A type's unit has 16 adjacent values twice, STRIDE apart; the lane wants them 32 apart. */
template <int TYPE> RFK_DEVICE void rfk_narrow_unpack(rfk_narrow_weights<TYPE> &o, uint32_t step, uint32_t n_in) {
    typedef rfk_format<TYPE> F;
    const int BY = F::STRIDE == 16 ? 1 : 2;
    RFK_UNROLL(2)
    for (uint32_t j = 0; j < 2; j++) {
        rfk_unit &v = o.unit[j];
        F::unpack(o.raw[j], rfk_narrow_unit<TYPE>(step, n_in), v);
        if (F::STRIDE == 32) continue;
        RFK_UNROLL(4)
        for (uint32_t k = 0; k < 4; k++) rfk_narrow_exchange<BY>(v.q[k], v.q[4 + k]);
        rfk_narrow_exchange<BY>(v.d[0], v.d[1]);
        if (F::HAS_MIN) rfk_narrow_exchange<BY>(v.m[0], v.m[1]);
    }
}

/* Four weights d * (q - OFFSET) - m as two pairs of bf16: a byte becomes a float's bits, and one fmaf removes the
 * excess. Bytes of 0 to 127, of all types but Q8_0, are the last bits of bf16 from 128 on; the upper one of a pair is
 * a float with the lower one as its last bits, an error of up to 2^-9 of d. `above` is in a register so that one
 * instruction can mask and add these bits. Q8_0's are placed above a float's last 8 bits, as rfk_wgmma_store does. */
template <int TYPE>
RFK_DEVICE void rfk_narrow_convert(uint32_t q, float d, float m, uint32_t &low, uint32_t &high) {
    const int OFFSET = rfk_format<TYPE>::OFFSET;
    float v[4];
    if (TYPE != RF_TYPE_Q8_0) {
        const float start = fmaf(-d, (float)(128 + OFFSET), -m), upper = fmaf(-d, 0.26171875f, start); /* 0x43 * 2^-8 */
        const uint32_t above = rfk_in_register(0x43004300u), even = (q & 0x00ff00ffu) | above,
                       odd = (q >> 8 & 0x00ff00ffu) | above;
        v[0] = fmaf(d, rfk_as_float(even << 16), start), v[1] = fmaf(d, rfk_as_float(odd << 16), start);
        v[2] = fmaf(d, rfk_as_float(even), upper), v[3] = fmaf(d, rfk_as_float(odd), upper);
    } else {
        const float start = fmaf(-d, (float)(32768 + 128 + OFFSET), -m);
        const uint32_t bytes = q ^ 0x80808080u; /* q + 128 */
        RFK_UNROLL(4)
        for (uint32_t b = 0; b < 4; b++) {
#if defined(RFK_NVIDIA)
            const uint32_t bits = __byte_perm(bytes, 0x47000000u, 0x7404u | b << 4);
#else
            const uint32_t bits = 0x47000000u | (bytes >> (8 * b) & 255) << 8;
#endif
            v[b] = fmaf(d, rfk_as_float(bits), start);
        }
    }
    low = rfk_to_bf16x2(v[0], v[1]), high = rfk_to_bf16x2(v[2], v[3]);
}
/* Two of the four fragments of a half of each row's unit, a quarter of the step. */
template <int TYPE>
RFK_DEVICE void rfk_narrow_fragments(const rfk_narrow_weights<TYPE> &o, uint32_t quarter, uint32_t (&to)[2][4]) {
    const uint32_t half = quarter / 2;
    RFK_UNROLL(2)
    for (uint32_t j = 0; j < 2; j++) {
        const rfk_unit &v = o.unit[j];
        RFK_UNROLL(2)
        for (uint32_t k = 0; k < 2; k++)
            rfk_narrow_convert<TYPE>((uint32_t)v.q[2 * quarter + k], v.d[half],
                                     rfk_format<TYPE>::HAS_MIN ? v.m[half] : 0.0f, to[k][j], to[k][2 + j]);
    }
}

/* A tile: rows of W from row0 on, n columns from col0 on, steps [first, end) of 128 values. */
struct rfk_narrow_tile { uint32_t row_tile, row0, col0, n, first, end, split; };

/* p->w.plane[0] NULL: the expert is not loaded. n 0: nothing to do. */
RFK_DEVICE rfk_product rfk_narrow_find_pairs(const rfk_narrow_args &a, rfk_narrow_tile &work) {
    const rfk_pair_tile tile = a.lists.tile[blockIdx.x];
    rfk_product p;
    memset(&p, 0, sizeof p);
    work.row_tile = work.split = work.first = 0, work.end = (a.e.n_in + 127) / 128;
    work.row0 = blockIdx.y * RFK_NARROW_ROWS, work.col0 = tile.first, work.n = tile.n;
    if (tile.n) p.w = rfk_expert_matrix(a.e, tile.expert, &p.row0);
    p.n_out = a.e.n_out;
    return p;
}
RFK_DEVICE rfk_product rfk_narrow_find(const rfk_narrow_args &a, uint32_t tile, rfk_narrow_tile &work) {
    if (a.lists.tile) return rfk_narrow_find_pairs(a, work);
    const rfk_tiles_args &t = a.t;
    const uint32_t steps = (t.m.n_in + 127) / 128, per_split = t.split_units / 4;
    uint32_t number = work.row_tile = tile % a.row_tiles;
    work.split = tile / a.row_tiles, work.col0 = 0, work.n = t.m.n_cols;
    work.first = per_split * work.split;
    work.end = work.first + per_split < steps ? work.first + per_split : steps;
    const rfk_product p = rfk_pick(t.m, &number);
    work.row0 = number * RFK_NARROW_ROWS;
    return p;
}

/* Results of an expert that is not loaded. */
RFK_DEVICE void rfk_narrow_put_nan(const rfk_narrow_args &a, const rfk_narrow_tile &work) {
    for (uint32_t i = threadIdx.x; i < work.n * RFK_NARROW_ROWS; i += RFK_NARROW_BLOCK) {
        const uint32_t row = work.row0 + i % RFK_NARROW_ROWS;
        if (row < a.e.n_out)
            rfk_put_pair(a.e, a.lists.sorted[work.col0 + i / RFK_NARROW_ROWS], a.lists.tile[blockIdx.x].expert, row,
                         NAN);
    }
}
RFK_DEVICE void rfk_narrow_find_columns(const rfk_narrow_args &a, const rfk_narrow_tile &work,
                                        rfk_narrow_columns &columns) {
    if (threadIdx.x >= RFK_NARROW_COLS) return;
    const uint32_t pair = a.lists.sorted[work.col0 + (threadIdx.x < work.n ? threadIdx.x : work.n - 1)],
                   row = pair / a.e.n_used, choice = a.e.per_choice ? pair % a.e.n_used : 0;
    columns.x[threadIdx.x] = (choice * 2 * work.end * a.t.m.x8.bf16 + row) * 8 + row % 8;
}

/* The producer: one bulk copy a stage by one thread; for pairs, 16 bytes at a time by all. */
template <uint32_t COLS>
RFK_DEVICE void rfk_narrow_copy(const rfk_narrow_args &a, rfk_narrow_shared &s, rfk_narrow_barriers &barriers) {
    const rfk_int8_rows &x = a.t.m.x8;
    rfk_narrow_turn now = {0, 0};
    if (threadIdx.x % RFK_WARPGROUP) return;
    RFK_UNROLL(1)
    for (uint32_t tile = blockIdx.x; tile < a.n_tiles; tile += gridDim.x) {
        rfk_narrow_tile work;
        (void)rfk_narrow_find(a, tile, work);
        RFK_UNROLL(1)
        for (uint32_t step = work.first; step < work.end; step++) {
            rfk_mbarrier_wait(&barriers.stages.empty[now.stage], now.round ^ 1);
            RFK_UNROLL(2)
            for (uint32_t half = 0; half < 2; half++)
                rfk_mbarrier_copy(&barriers.stages.full[now.stage], s.x[now.stage][half],
                                  reinterpret_cast<const int4 *>(x.q) + (size_t)(2 * step + half) * x.bf16 * 8,
                                  COLS * sizeof s.x[0][0][0]);
            rfk_wgmma_next(now);
        }
    }
}
RFK_DEVICE void rfk_narrow_copy_pairs(const rfk_narrow_args &a, const rfk_narrow_tile &work,
                                      const rfk_narrow_columns &columns, rfk_narrow_shared &s,
                                      rfk_narrow_barriers &barriers) {
    const rfk_int8_rows &rows = a.t.m.x8;
    const uint32_t thread = threadIdx.x % RFK_WARPGROUP, word = thread % 8, n_steps = work.end;
    rfk_narrow_turn now = {0, 0}, behind = {0, 0};
    RFK_UNROLL(1)
    for (uint32_t step = 0; step < n_steps + 2; step++) { /* two stages are on their way */
        if (step < n_steps) {
            const int4 *from = reinterpret_cast<const int4 *>(rows.q) + (size_t)step * rows.bf16 * 16;
            rfk_mbarrier_wait(&barriers.stages.empty[now.stage], now.round ^ 1);
            RFK_UNROLL(4)
            for (uint32_t i = thread / 8; i < RFK_NARROW_COLS; i += 16) {
                const uint32_t x = columns.x[i], word_to = rfk_swizzled(i, word);
                const int4 *at = from + (x - x % 8) + rfk_swizzled(x, word);
                rfk_copy16(&s.x[now.stage][0][i][word_to], at);
                rfk_copy16(&s.x[now.stage][1][i][word_to], at + rows.bf16 * 8);
            }
            rfk_wgmma_next(now);
        }
        rfk_commit_copies();
        if (step < 2) continue;
        rfk_wait_copies_but_two();
        rfk_wgmma_filled(&barriers.stages.full[behind.stage]);
        rfk_wgmma_next(behind);
    }
}

/* Store a consumer's sums, on their way through shared memory: four rows of a column a thread. */
template <uint32_t COLS>
RFK_DEVICE void rfk_narrow_put(const rfk_narrow_args &a, uint32_t number, const float (&sum)[COLS / 2],
                               rfk_narrow_shared &s, rfk_mbarrier *put, uint32_t &n) {
    float(*out)[64] = s.out[threadIdx.x / RFK_WARPGROUP];
    const rfk_tiles_args &t = a.t;
    const uint32_t thread = threadIdx.x % RFK_WARPGROUP, r = 4 * (thread % 16),
                   row = threadIdx.x / RFK_WARPGROUP * 64 + r;
    rfk_narrow_tile work;
    const rfk_product p = rfk_narrow_find(a, number, work);
    const uint32_t i = (work.row0 + row) / 4;
    const size_t at = ((size_t)work.row_tile * t.n_splits + work.split) * RFK_NARROW_COLS * RFK_NARROW_ROWS + row;
    RFK_UNROLL(32)
    for (uint32_t k = 0; k < COLS / 2; k++)
        out[rfk_wgmma_col(k)][rfk_wide_row(rfk_wgmma_col(k), rfk_wgmma_row(k))] = sum[k];
    rfk_wide_meet(put, n);
    RFK_UNROLL(1)
    for (uint32_t c = thread / 16; c < work.n; c += RFK_WARPGROUP / 16) {
        const float4 v = *reinterpret_cast<const float4 *>(&out[c][rfk_wide_row(c, r)]);
        float results[4] = {v.x, v.y, v.z, v.w};
        if (t.part) /* [row tile][split][column][row] */
            *reinterpret_cast<float4 *>(t.part + at + (size_t)c * RFK_NARROW_ROWS) = v;
        else if (work.row0 + row >= p.n_out) continue;
        else if (COLS == RFK_NARROW_COLS && a.lists.tile)
            rfk_put_pair4(a.e, a.lists.sorted[work.col0 + c], a.lists.tile[blockIdx.x].expert, i, results);
        else rfk_put4(p, i, c, results);
    }
    rfk_wide_meet(put, n);
}

/* A consumer's products of a tile. The weights of its first step were fetched. A quarter's products run while the next
 * quarter's weights become fragments: otherwise consumers convert at the same time and then wait at the same time, and
 * the matrix units are idle meanwhile. */
template <int TYPE, uint32_t COLS>
RFK_DEVICE void rfk_narrow_multiply(float (&sum)[1][COLS / 2], rfk_narrow_weights<TYPE> &weights,
                                    const rfk_narrow_tile &work, uint32_t n_in, const rfk_narrow_shared &s,
                                    rfk_narrow_barriers &barriers, rfk_narrow_turn &now) {
    const bool arrives = threadIdx.x % 32 == 0;
    const rfk_wgmma_operand x = rfk_wgmma_at(s.x[0][0][0]);
    uint32_t fragment[2][2][4], before = 0;
    RFK_UNROLL(1)
    for (uint32_t step = work.first; step < work.end; step++) {
        rfk_narrow_unpack<TYPE>(weights, step, n_in);
        rfk_narrow_fetch<TYPE>(weights, step + 1 < work.end ? step + 1 : step, n_in);
        RFK_UNROLL(4)
        for (uint32_t quarter = 0; quarter < 4; quarter++) {
            rfk_wgmma_wait<1>(); /* the fragments are free; in the second quarter the stage before, too */
            if (quarter == 1 && step > work.first && arrives) rfk_mbarrier_arrive(&barriers.stages.empty[before]);
            rfk_narrow_fragments<TYPE>(weights, quarter, fragment[quarter % 2]);
            if (quarter == 0) rfk_mbarrier_wait(&barriers.stages.full[now.stage], now.round);
            rfk_wgmma_fence();
            const rfk_wgmma_operand at = x + (2 * now.stage + quarter / 2) * RFK_NARROW_COLS * 8 + 4 * (quarter % 2);
            RFK_UNROLL(2)
            for (uint32_t k = 0; k < 2; k++)
                rfk_wgmma_rows<COLS>(sum[0], fragment[quarter % 2][k], at + 2 * k,
                                     step > work.first || quarter > 0 || k > 0);
            rfk_wgmma_commit();
        }
        before = now.stage;
        rfk_wgmma_next(now);
    }
    rfk_wgmma_drain<COLS>(sum);
    if (arrives) rfk_mbarrier_arrive(&barriers.stages.empty[before]);
}

/* Find a tile, and begin to load its first weights. */
template <int TYPE>
RFK_DEVICE void rfk_narrow_start(const rfk_narrow_args &a, uint32_t tile, rfk_narrow_weights<TYPE> &o,
                                 rfk_narrow_tile &work) {
    const rfk_product p = rfk_narrow_find(a, tile, work);
    rfk_narrow_begin<TYPE>(o, p, work.row0, a.t.m.n_in);
    rfk_narrow_fetch<TYPE>(o, work.first, a.t.m.n_in);
}
/* A consumer: one tile after another. */
template <int TYPE, uint32_t COLS>
RFK_DEVICE void rfk_narrow_consume(const rfk_narrow_args &a, rfk_narrow_shared &s, rfk_narrow_barriers &barriers) {
    float sum[1][COLS / 2];
    rfk_narrow_weights<TYPE> weights;
    rfk_narrow_turn now = {0, 0};
    rfk_narrow_tile work;
    uint32_t n = 0, tile = rfk_tile_again(blockIdx.x);
    rfk_narrow_start<TYPE>(a, tile, weights, work);
    rfk_wait_previous();
    RFK_UNROLL(1)
    for (;;) {
        const uint32_t done = tile;
        rfk_narrow_multiply<TYPE, COLS>(sum, weights, work, a.t.m.n_in, s, barriers, now);
        tile += gridDim.x;
        const bool more = (COLS < RFK_NARROW_COLS || !a.lists.tile) && tile < a.n_tiles;
        if (more) rfk_narrow_start<TYPE>(a, tile, weights, work);
        rfk_narrow_put<COLS>(a, rfk_tile_again(done), sum[0], s, &barriers.put[threadIdx.x / RFK_WARPGROUP], n);
        if (!more) return;
    }
}
#endif

/* grid [multiprocessors, or tiles if they are fewer] or [tiles of pairs, row tiles]   block 640   LDS 129 KiB
 *   n_in % 64 == 0   reads W once and x once per 256 rows */
template <int TYPE, uint32_t COLS>
static __global__ void RFK_RESIDENT(RFK_NARROW_BLOCK, 1) rfk_matmul_narrow(rfk_narrow_args a) {
#if defined(RFK_HAS_WGMMA)
    RFK_SHARED(rfk_narrow_barriers, barriers);
    RFK_SHARED(rfk_narrow_columns, columns);
    RFK_DYNAMIC(int4, memory);
    rfk_narrow_shared &s = rfk_wgmma_memory<rfk_narrow_shared>(memory);
    const bool pairs = COLS == RFK_NARROW_COLS && a.lists.tile != NULL;
    rfk_narrow_tile work;
    const rfk_product p = rfk_narrow_find(a, blockIdx.x, work);
    if (work.n == 0) return;
    if (!p.w.plane[0]) return rfk_narrow_put_nan(a, work);
    if (threadIdx.x < RFK_NARROW_STAGES) {
        rfk_mbarrier_init(&barriers.stages.full[threadIdx.x], pairs ? RFK_WARPGROUP / 32 : 2);
        rfk_mbarrier_init(&barriers.stages.empty[threadIdx.x], RFK_NARROW_CONSUMERS * RFK_WARPGROUP / 32);
        if (threadIdx.x < RFK_NARROW_CONSUMERS) rfk_mbarrier_init(&barriers.put[threadIdx.x], RFK_WARPGROUP / 32);
    }
    if (pairs) rfk_narrow_find_columns(a, work, columns);
    __syncthreads();
    if (rfk_same_in_wave(threadIdx.x / RFK_WARPGROUP) == RFK_NARROW_CONSUMERS) {
        rfk_shrink_registers<32>();
        rfk_wait_previous();
        if (pairs) rfk_narrow_copy_pairs(a, work, columns, s, barriers);
        else rfk_narrow_copy<COLS>(a, s, barriers);
        return;
    }
    rfk_grow_registers<112>();
    rfk_narrow_consume<TYPE, COLS>(a, s, barriers);
#else
    (void)a;
#endif
}

static void (*rfk_find_narrow(uint32_t type, uint32_t n_cols))(rfk_narrow_args) {
#define RFK_NARROW_CASE(TYPE) \
    case TYPE: \
        return n_cols <= RFK_NARROW_COLS / 2 ? rfk_matmul_narrow<RFK_BUILT(TYPE), RFK_NARROW_COLS / 2> \
                                             : rfk_matmul_narrow<RFK_BUILT(TYPE), RFK_NARROW_COLS>;
    switch (type) {
        RFK_NARROW_TYPES(RFK_NARROW_CASE)
    default: return NULL;
    }
#undef RFK_NARROW_CASE
}

#if defined(RFK_HAS_WGMMA)
/* The expected result of the check below. */
RFK_DEVICE float rfk_wgmma_want(uint32_t row, uint32_t col) {
    int want = 0;
    for (uint32_t k = 0; k < RFK_WGMMA_DEPTH; k++)
        want += rfk_check_value(row / 8, row % 8 * 2 + k / 32, k % 32) *
                rfk_check_value(col / 8, col % 8 * 2 + k / 32, k % 32);
    return (float)want;
}

/* n_rows rows and, behind them, n_cols columns of the check. */
RFK_DEVICE void rfk_wgmma_fill_check(int4 (*rows)[8], uint32_t n_rows, uint32_t n_cols, bool halves) {
    RFK_UNROLL(1)
    for (uint32_t j = threadIdx.x; j < (n_rows + n_cols) * RFK_WGMMA_DEPTH; j += RFK_WARPGROUP) {
        const uint32_t row = j / RFK_WGMMA_DEPTH, i = row < n_rows ? row : 128 + row - n_rows, k = j % RFK_WGMMA_DEPTH;
        const float v = (float)rfk_check_value(i / 8, i % 8 * 2 + k / 32, k % 32);
        reinterpret_cast<uint16_t *>(&rows[row][rfk_swizzled(row, k / 8)])[k % 8] =
            halves ? rfk_to_half(v) : (uint16_t)rfk_to_bf16x2(v, 0);
    }
    rfk_fence_async_proxy();
}
/* This thread's results of one instruction, for 64 rows. */
template <int COLS, bool F16> RFK_DEVICE void rfk_wgmma_try(int4 (*rows)[8], float *results) {
    float sum[1][COLS / 2];
    rfk_wgmma_step<COLS, F16, true>(sum, rfk_wgmma_at(rows[0]), rfk_wgmma_at(rows[64]), false);
    rfk_wgmma_drain<COLS>(sum);
    RFK_UNROLL(128)
    for (uint32_t j = 0; j < COLS / 2; j++) results[j] = sum[0][j];
}
/* The same of the instruction that reads rows from registers. */
template <int COLS>
RFK_DEVICE void rfk_wgmma_try_rows(int4 (*columns)[8], float *results) {
    float sum[1][COLS / 2];
    uint32_t fragment[4][4];
    RFK_UNROLL(16)
    for (uint32_t i = 0; i < 16; i++) {
        const uint32_t row = rfk_wgmma_row(i % 2 * 2), k = i / 4 * 16 + i % 4 / 2 * 8 + threadIdx.x % 4 * 2;
        fragment[i / 4][i % 4] = rfk_to_bf16x2((float)rfk_check_value(row / 8, row % 8 * 2 + k / 32, k % 32),
                                               (float)rfk_check_value(row / 8, row % 8 * 2 + k / 32, k % 32 + 1));
    }
    rfk_wgmma_fence();
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < 4; k++) rfk_wgmma_rows<COLS>(sum[0], fragment[k], rfk_wgmma_at(columns[0]) + 2 * k, k > 0);
    rfk_wgmma_commit();
    rfk_wgmma_drain<COLS>(sum);
    RFK_UNROLL(32)
    for (uint32_t j = 0; j < COLS / 2; j++) results[j] = sum[0][j];
}
#endif

/* Check wgmma: each thread writes RFK_WGMMA_RIGHT or _WRONG for its results, 0 if the kernel was not compiled for it.
 * All values and sums are integers, exact in any order.   grid 1   block 128   LDS 41 KiB */
static __global__ void RFK_THREADS(RFK_WARPGROUP) rfk_check_wgmma(uint32_t *out) {
#if defined(RFK_HAS_WGMMA)
    RFK_DYNAMIC(int4, memory);
    int4(*s)[8] = reinterpret_cast<int4(*)[8]>(&rfk_wgmma_memory<int4>(memory));
    float results[RFK_WIDE_COLS / 2]; /* in private memory */
    bool right = true;
    RFK_UNROLL(1)
    for (uint32_t test = 0; test < 7; test++) { /* a loop: one copy of what is around the instructions */
        const bool few = test == 0 || test == 5, wide = test == 2 || test == 4;
        const uint32_t n_cols = test == 6 ? RFK_NARROW_COLS / 2 : few ? RFK_PAIR_TILE
                                : wide    ? RFK_WIDE_COLS
                                          : RFK_WGMMA_COLS;
        __syncthreads();
        rfk_wgmma_fill_check(s, test >= 5 ? 0 : 64, n_cols, test == 3 || test == 4);
        __syncthreads();
        if (test == 0) rfk_wgmma_try<RFK_PAIR_TILE, false>(s, results);
        if (test == 1) rfk_wgmma_try<RFK_WGMMA_COLS, false>(s, results);
        if (test == 2) rfk_wgmma_try<RFK_WIDE_COLS, false>(s, results);
        if (test == 3) rfk_wgmma_try<RFK_WGMMA_COLS, true>(s, results);
        if (test == 4) rfk_wgmma_try<RFK_WIDE_COLS, true>(s, results);
        if (test == 5) rfk_wgmma_try_rows<RFK_NARROW_COLS>(s, results);
        if (test == 6) rfk_wgmma_try_rows<RFK_NARROW_COLS / 2>(s, results);
        RFK_UNROLL(1)
        for (uint32_t j = 0; j < n_cols / 2; j++)
            right = right && results[j] == rfk_wgmma_want(rfk_wgmma_row(j), 128 + rfk_wgmma_col(j));
    }
    out[threadIdx.x] = right ? RFK_WGMMA_RIGHT : RFK_WGMMA_WRONG;
#else
    out[threadIdx.x] = 0;
#endif
}

#define RFK_TILE 64 /* rows and columns of a tile of floats */
#define RFK_FLOAT_DEPTH 16
struct alignas(16) rfk_float_tile {
    float w[RFK_FLOAT_DEPTH][RFK_TILE + 4];
    float x[RFK_FLOAT_DEPTH][RFK_TILE + 4];
};

/* A thread's part of a tile: position k of four rows of W and of x, 16 rows apart. */
struct rfk_float_part {
    float w[4], x[4];
};
template <int TYPE>
RFK_DEVICE void rfk_fetch_float(const rfk_matmul_args &a, const rfk_product &p, uint32_t row0, uint32_t col0,
                                uint32_t k, uint32_t end, rfk_float_part &to) {
    RFK_UNROLL(4)
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t row = row0 + 16 * i, col = col0 + 16 * i;
        to.w[i] =
            k < end && row < p.n_out ? rfk_load1<TYPE>(p.w.plane[0], (size_t)(p.row0 + row) * a.n_in + k) : 0.0f;
        to.x[i] = k < end && col < a.n_cols ? a.x[(size_t)col * a.x_stride + k] : 0.0f;
    }
}
/* Weights of floats without matrix units.
 *   grid [ceil(cols / 64), row tiles of all products, splits]   block 256, 4 x 4 results a thread   LDS 8.5 KiB */
template <int TYPE> static __global__ void RFK_THREADS(RFK_BLOCK) rfk_matmul_float(rfk_tiles_args t) {
    RFK_SHARED(rfk_float_tile, s);
    const rfk_matmul_args &a = t.m;
    uint32_t number = blockIdx.y;
    const rfk_product p = rfk_pick(a, &number);
    const uint32_t first = t.split_units * 32 * blockIdx.z, last = first + t.split_units * 32,
                   end = last < a.n_in ? last : a.n_in;
    uint32_t row0 = number * RFK_TILE, col0 = blockIdx.x * RFK_TILE, tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    rfk_float_part part;
    float sum[4][4];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) sum[i][j] = 0;
    rfk_fetch_float<TYPE>(a, p, row0 + ty, col0 + ty, first + tx, end, part);
    for (uint32_t k0 = first; k0 < end; k0 += RFK_FLOAT_DEPTH) {
        RFK_UNROLL(4)
        for (uint32_t i = 0; i < 4; i++) s.w[tx][ty + 16 * i] = part.w[i], s.x[tx][ty + 16 * i] = part.x[i];
        __syncthreads();
        rfk_fetch_float<TYPE>(a, p, row0 + ty, col0 + ty, k0 + RFK_FLOAT_DEPTH + tx, end, part);
        RFK_UNROLL(4)
        for (int k = 0; k < RFK_FLOAT_DEPTH; k++) {
            const float4 row = *reinterpret_cast<const float4 *>(&s.w[k][4 * ty]),
                         col = *reinterpret_cast<const float4 *>(&s.x[k][4 * tx]);
            const float rows[4] = {row.x, row.y, row.z, row.w}, cols[4] = {col.x, col.y, col.z, col.w};
            RFK_UNROLL(4)
            for (uint32_t i = 0; i < 4; i++)
                RFK_UNROLL(4)
                for (uint32_t j = 0; j < 4; j++) sum[i][j] += rows[i] * cols[j];
        }
        __syncthreads();
    }
    const size_t tile = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * t.n_splits + blockIdx.z;
    for (uint32_t j = 0; j < 4; j++) {
        const uint32_t row = 4 * ty, col = 4 * tx + j;
        float v[4] = {sum[0][j], sum[1][j], sum[2][j], sum[3][j]};
        if (t.part) rfk_set4(t.part + (tile * RFK_TILE + col) * RFK_TILE + row, 0, 4, v);
        else if (row0 + row < p.n_out && col0 + col < a.n_cols) rfk_put4(p, (row0 + row) / 4, col0 + col, v);
    }
}

/* ---- many columns, weights of 16-bit floats ----
 * On matrix units, as exact as float32: x is split into terms of the weights' type whose sum it is (split precision).
 * F16: two terms, after scaling the row by a power of two so that its largest value is near 2^14; the error is 2^-22 of
 * a value or 2^-38 of the largest. BF16: three terms hold all bits of a float. The unit adds products of 32 values;
 * those sums are added as floats, because units may truncate when they add. */

struct rfk_terms {
    uint16_t *value; /* [term][cols][n_in] */
    float *unit;     /* [cols] scale of the terms */
};
struct rfk_split_args {
    const float *in; /* [cols / per_row, in_stride], per_row of n values each, `apart` values apart */
    rfk_terms to;
    uint32_t in_stride, per_row, n, apart;
    uint32_t wide; /* F16, in the order of rfk_int8_rows.bf16: 1: only the first term, for rfk_matmul_wgmma; 2: one
                    * behind the other, words as rfk_split_fetch has them, for rfk_matmul_wide_split; 0: neither */
};

struct rfk_split_shared {
    float largest[RFK_BLOCK / 32];
};

#define RFK_TERMS(bf16) ((bf16) ? 3 : 2)
#define RFK_16BIT_DEPTH 32
#define RFK_16BIT_STRIDE 5 /* 16-byte words from one row to the next: one of padding, for other banks */

/* grid cols   block 256   reads x twice (F16) or once, writes 4 or 6 bytes a value */
template <int WAVE, bool BF16> static __global__ void RFK_THREADS(RFK_BLOCK) rfk_split_rows(rfk_split_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    RFK_SHARED(rfk_split_shared, s);
    const float *in =
        a.in + (size_t)(blockIdx.x / a.per_row) * a.in_stride + (size_t)(blockIdx.x % a.per_row) * a.apart;
    const size_t piece = (size_t)gridDim.x * a.n;
    uint16_t *to = a.to.value + (size_t)blockIdx.x * a.n;
    if (BF16) {
        for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK) {
            float x = in[i];
            RFK_UNROLL(3)
            for (int p = 0; p < 3; p++) {
                uint32_t upper = rfk_as_bits(x) & 0xffff0000u;
                to[p * piece + i] = (uint16_t)(upper >> 16);
                x = (upper & 0x7f800000) == 0x7f800000 ? 0.0f : x - rfk_as_float(upper);
            }
        }
        if (threadIdx.x == 0) a.to.unit[blockIdx.x] = 1;
        return;
    }
    float top = 0;
    for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK) top = fmaxf(top, fabsf(in[i]));
    top = rfk_wave_max<WAVE>(top);
    if (threadIdx.x % WAVE == 0) s.largest[threadIdx.x / WAVE] = top;
    __syncthreads();
    for (uint32_t w = 0; w < RFK_BLOCK / WAVE; w++) top = fmaxf(top, s.largest[w]);
    uint32_t exponent = rfk_as_bits(top) >> 23;
    if (exponent < 15) exponent = 15; /* tiny or all zero */
    const float scale = rfk_as_float((268 - exponent) << 23);
    for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK) {
        float x = in[i] * scale;
        uint16_t upper = rfk_to_half(x);
        const uint32_t word = a.wide == 2 ? i % 32 / 4 : i % 64 / 8, k = a.wide == 2 ? i % 64 / 32 * 4 + i % 4 : i % 8;
        uint16_t *at = to + i;
        if (a.wide)
            at = a.to.value + ((size_t)(i / 64) * gridDim.x + blockIdx.x) * 64 + rfk_swizzled(blockIdx.x, word) * 8 + k;
        *at = upper;
        if (a.wide != 1)
            at[piece] = (upper & 0x7c00) == 0x7c00 ? (uint16_t)0 : rfk_to_half(x - rfk_from_half(upper));
    }
    if (threadIdx.x == 0) a.to.unit[blockIdx.x] = rfk_as_float((exponent - 14) << 23);
}

/* TILES: rfk_tiles_args or rfk_pair_tiles_args; n_cols are rows of x. */
template <class TILES> struct rfk_16bit_args {
    TILES tiles;
    rfk_terms x;
};
/* 16 bytes on their way to shared memory. AMD's int4 is a class: hipcc would keep arrays of it in private memory. */
#if defined(ROCMFORGE_HIP_EMU) || defined(RFK_NVIDIA)
typedef int4 rfk_chunk;
#else
typedef rfk_int4 rfk_chunk;
#endif
template <int TERMS, int COLS, int W_TERMS = 1> struct rfk_16bit_shared {
    int4 w[W_TERMS][RFK_SMALL_TILE_ROWS][RFK_16BIT_STRIDE], x[TERMS][COLS][RFK_16BIT_STRIDE];
};
RFK_DEVICE void rfk_put_chunk(int4 *to, const rfk_chunk &v) { *reinterpret_cast<rfk_chunk *>(to) = v; }
template <int TERMS, int COLS> struct rfk_16bit_loads {
    rfk_chunk w, x[TERMS * COLS / 64];
};

/* Load a thread's 16 bytes of W and of every 64 columns of each term, values [k0, + 32). Rows and columns beyond the
 * last repeat it. */
template <int TERMS, int COLS, class C>
RFK_DEVICE void rfk_fetch_16bit(rfk_16bit_loads<TERMS, COLS> &v, const rfk_matmul_args &a, const rfk_terms &x,
                                 const rfk_product &p, uint32_t row0, const C &columns, uint32_t k0) {
    const uint32_t i = threadIdx.x / 4, chunk = threadIdx.x % 4, n_in = a.n_in, n_cols = a.n_cols,
                   row = row0 + i < p.n_out ? row0 + i : p.n_out - 1;
    v.w = reinterpret_cast<const rfk_chunk *>(p.w.plane[0] + 2 * ((size_t)(p.row0 + row) * n_in + k0))[chunk];
    RFK_UNROLL(8)
    for (uint32_t j = 0; j < TERMS * COLS / 64; j++) {
        uint32_t piece = j / (COLS / 64), col = rfk_nth_column(columns, i + j % (COLS / 64) * 64);
        v.x[j] = reinterpret_cast<const rfk_chunk *>(x.value + ((size_t)piece * n_cols + col) * n_in + k0)[chunk];
    }
}

/* The products of 32 values: RT x CT tiles of 16 x 16. Of terms of both, those of term i and j with i + j < TERMS. */
template <int WAVE, int RT, int CT, bool BF16, int COLS, int W_TERMS>
RFK_DEVICE void rfk_16bit_step(const rfk_16bit_shared<RFK_TERMS(BF16), COLS, W_TERMS> &s, uint32_t row0,
                               uint32_t col0, float (&sum)[RT][CT][256 / WAVE]) {
    const int N = 256 / WAVE, TERMS = RFK_TERMS(BF16);
    const uint32_t lane = threadIdx.x % WAVE;
    float part[RT][CT][N];
    RFK_UNROLL(4)
    for (int r = 0; r < RT; r++)
        for (int c = 0; c < CT; c++)
            for (int i = 0; i < N; i++) part[r][c][i] = 0;
    RFK_UNROLL(2)
    for (uint32_t g = 0; g < RFK_16BIT_DEPTH / 16; g++) {
        rfk_operand a[W_TERMS][RT], b;
        RFK_UNROLL(4)
        for (int term = 0; term < W_TERMS; term++)
            RFK_UNROLL(4)
            for (int r = 0; r < RT; r++)
                rfk_load_rows<RFK_16BIT_STRIDE, true>(a[term][r], s.w[term][row0 + 16 * (uint32_t)r], g, lane);
        RFK_UNROLL(4)
        for (int c = 0; c < CT; c++)
            RFK_UNROLL(4)
            for (int piece = TERMS - 1; piece >= 0; piece--) { /* smallest terms first */
                rfk_load_columns<RFK_16BIT_STRIDE, true>(b, s.x[piece][col0 + 16 * (uint32_t)c], g, lane);
                RFK_UNROLL(4)
                for (int term = 0; term < W_TERMS; term++)
                    RFK_UNROLL(4)
                    for (int r = 0; r < RT; r++)
                        if (term + piece < TERMS)
                            rfk_mma_16bit<WAVE, RFK_16BIT_STRIDE, RFK_16BIT_STRIDE, BF16>(a[term][r], b,
                                                                                          part[r][c]);
            }
    }
    RFK_UNROLL(4)
    for (int r = 0; r < RT; r++)
        for (int c = 0; c < CT; c++)
            for (int i = 0; i < N; i++) sum[r][c][i] += part[r][c][i];
}

/* Store a wave's tiles of results, or this split's part of them. unit: [cols] scale, or NULL. */
template <int WAVE, int RT, int CT, int COLS, class TILES>
RFK_DEVICE void rfk_16bit_put(const TILES &tiles, const rfk_product &p, const typename TILES::columns &columns,
                              const float *unit, uint32_t row0, const float (&sum)[RT][CT][256 / WAVE]) {
    const int N = 256 / WAVE, ACROSS = 128 / WAVE;
    const rfk_tiles_args &t = rfk_tiles(tiles);
    const uint32_t lane = threadIdx.x % WAVE, wave = threadIdx.x / WAVE, wave_row = wave / ACROSS * (16 * RT),
                   wave_col = wave % ACROSS * (16 * CT);
    float *part = t.part;
    if (part)
        part += (((size_t)blockIdx.y * gridDim.x + blockIdx.x) * t.n_splits + blockIdx.z) * RFK_SMALL_TILE_ROWS * COLS;
    RFK_UNROLL(4)
    for (int r = 0; r < RT; r++)
        RFK_UNROLL(4)
        for (int c = 0; c < CT; c++)
            RFK_UNROLL(8)
            for (int i = 0; i < N; i++) {
                uint32_t row = wave_row + 16 * (uint32_t)r + rfk_matrix_row(lane, RFK_ROW_INDEX((uint32_t)i), N),
                         col = wave_col + 16 * (uint32_t)c + rfk_matrix_col(lane, RFK_COL_INDEX((uint32_t)i));
                float result = sum[r][c][i] * (unit ? unit[rfk_nth_column(columns, col)] : 1.0f);
                if (part) part[col * RFK_SMALL_TILE_ROWS + row] = result;
                else if (row0 + row < p.n_out) rfk_put_column(tiles, p, columns, row0 + row, col, result);
            }
}

/* grid as rfk_matmul's   block 256   LDS 15 to 35 KiB   n_in % 32 == 0
 * reads W once per COLS columns and the terms of x once per 64 rows */
template <bool BF16, int WAVE, int COLS, class TILES>
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_matmul_16bit(rfk_16bit_args<TILES> a) {
    if (!RFK_RUNS_WAVE(WAVE) || !RFK_RUNS_TILES(COLS)) return;
    if (!(BF16 ? RFK_UNITS_BF16 : RFK_UNITS_F16) || !rfk_built<BF16 ? RF_TYPE_BF16 : RF_TYPE_F16>::is)
        return; /* never launched */
    const int TERMS = RFK_TERMS(BF16), N = 256 / WAVE, RT = 2, CT = COLS * WAVE / 2048, ACROSS = 128 / WAVE;
    typedef rfk_16bit_shared<TERMS, COLS> shared;
    RFK_SHARED(shared, s);
    const rfk_tiles_args &t = rfk_tiles(a.tiles);
    uint32_t number = blockIdx.y, wave = threadIdx.x / WAVE;
    rfk_product p;
    typename TILES::columns columns;
    if (!rfk_find_columns(a.tiles, RFK_SMALL_TILE_ROWS, COLS, &number, &p, &columns)) return;
    const uint32_t row0 = number * RFK_SMALL_TILE_ROWS, wave_row = wave / ACROSS * (16 * RT),
                   wave_col = wave % ACROSS * (16 * CT), first = t.split_units * blockIdx.z * 32,
                   last = first + t.split_units * 32, end = last < t.m.n_in ? last : t.m.n_in;
    rfk_16bit_loads<TERMS, COLS> v;
    float sum[RT][CT][N];
    RFK_UNROLL(4)
    for (int r = 0; r < RT; r++)
        for (int c = 0; c < CT; c++)
            for (int i = 0; i < N; i++) sum[r][c][i] = 0;
    rfk_fetch_16bit(v, t.m, a.x, p, row0, columns, first);
    for (uint32_t k0 = first; k0 < end; k0 += RFK_16BIT_DEPTH) {
        __syncthreads(); /* all are done with what was there */
        rfk_put_chunk(&s.w[0][threadIdx.x / 4][threadIdx.x % 4], v.w);
        RFK_UNROLL(8)
        for (uint32_t j = 0; j < TERMS * COLS / 64; j++)
            rfk_put_chunk(&s.x[j / (COLS / 64)][threadIdx.x / 4 + j % (COLS / 64) * 64][threadIdx.x % 4], v.x[j]);
        __syncthreads();
        if (k0 + RFK_16BIT_DEPTH < end) rfk_fetch_16bit(v, t.m, a.x, p, row0, columns, k0 + RFK_16BIT_DEPTH);
        rfk_16bit_step<WAVE, RT, CT, BF16, COLS, 1>(s, wave_row, wave_col, sum);
    }
    rfk_16bit_put<WAVE, RT, CT, COLS>(a.tiles, p, columns, a.x.unit, row0, sum);
}

/* The same for weights of float32: on their way to shared memory, W and x are both cut into three bf16, which hold all
 * bits of a float. */
struct rfk_split_loads {
    float w[8], x[8];
};
RFK_DEVICE void rfk_fetch_split(rfk_split_loads &v, const rfk_matmul_args &a, const rfk_product &p, uint32_t row0,
                                uint32_t col0, uint32_t k0) {
    const uint32_t i = threadIdx.x / 4, row = row0 + i < p.n_out ? row0 + i : p.n_out - 1,
                   col = col0 + i < a.n_cols ? col0 + i : a.n_cols - 1, at = k0 / 4 + threadIdx.x % 4 * 2;
    const float *w = reinterpret_cast<const float *>(p.w.plane[0]) + (size_t)(p.row0 + row) * a.n_in,
                *x = a.x + (size_t)col * a.x_stride;
    RFK_UNROLL(2)
    for (uint32_t h = 0; h < 2; h++) {
        rfk_get4(w, at + h, a.n_in, v.w + 4 * h);
        rfk_get4(x, at + h, a.n_in, v.x + 4 * h);
    }
}
/* Eight values as three words of 16 bytes, `apart` words from one to the next. */
RFK_DEVICE void rfk_put_split(int4 *to, uint32_t apart, float *v) {
    RFK_UNROLL(3)
    for (uint32_t term = 0; term < 3; term++) {
        uint32_t word[4];
        RFK_UNROLL(8)
        for (uint32_t i = 0; i < 8; i++) {
            const uint32_t upper = rfk_as_bits(v[i]) & 0xffff0000u;
            v[i] = (upper & 0x7f800000) == 0x7f800000 ? 0.0f : v[i] - rfk_as_float(upper);
            word[i / 2] = i % 2 ? word[i / 2] | upper : upper >> 16;
        }
        int4 words;
        words.x = (int)word[0], words.y = (int)word[1], words.z = (int)word[2], words.w = (int)word[3];
        to[term * apart] = words;
    }
}
/* grid as rfk_matmul's   block 256   LDS 30 KiB   n_in % 32 == 0 */
template <int WAVE> static __global__ void RFK_THREADS(RFK_BLOCK) rfk_matmul_split(rfk_tiles_args t) {
    if (!RFK_RUNS_WAVE(WAVE) || !RFK_UNITS_BF16) return; /* never launched */
    const int COLS = RFK_SMALL_TILE_COLS, N = 256 / WAVE, RT = 2, CT = COLS * WAVE / 2048, ACROSS = 128 / WAVE;
    typedef rfk_16bit_shared<3, COLS, 3> shared;
    RFK_SHARED(shared, s);
    uint32_t number = blockIdx.y, wave = threadIdx.x / WAVE;
    rfk_product p;
    rfk_tiles_args::columns columns;
    if (!rfk_find_columns(t, RFK_SMALL_TILE_ROWS, COLS, &number, &p, &columns)) return;
    const uint32_t row0 = number * RFK_SMALL_TILE_ROWS, wave_row = wave / ACROSS * (16 * RT),
                   wave_col = wave % ACROSS * (16 * CT), first = t.split_units * blockIdx.z * 32,
                   last = first + t.split_units * 32, end = last < t.m.n_in ? last : t.m.n_in;
    rfk_split_loads v;
    float sum[RT][CT][N];
    RFK_UNROLL(4)
    for (int r = 0; r < RT; r++)
        for (int c = 0; c < CT; c++)
            for (int i = 0; i < N; i++) sum[r][c][i] = 0;
    rfk_fetch_split(v, t.m, p, row0, blockIdx.x * COLS, first);
    for (uint32_t k0 = first; k0 < end; k0 += RFK_16BIT_DEPTH) {
        __syncthreads(); /* all are done with what was there */
        rfk_put_split(&s.w[0][threadIdx.x / 4][threadIdx.x % 4], RFK_SMALL_TILE_ROWS * RFK_16BIT_STRIDE, v.w);
        rfk_put_split(&s.x[0][threadIdx.x / 4][threadIdx.x % 4], COLS * RFK_16BIT_STRIDE, v.x);
        __syncthreads();
        if (k0 + RFK_16BIT_DEPTH < end)
            rfk_fetch_split(v, t.m, p, row0, blockIdx.x * COLS, k0 + RFK_16BIT_DEPTH);
        rfk_16bit_step<WAVE, RT, CT, true, COLS, 3>(s, wave_row, wave_col, sum);
    }
    rfk_16bit_put<WAVE, RT, CT, COLS>(t, p, columns, NULL, row0, sum);
}

/* ==== 5 Attention ==================================================================================== >>attention
 * Online softmax: a block takes up to 8 queries (heads of one KV head, adjacent rows of one sequence) through 64
 * positions at a time with a running maximum and sum; scores never leave shared memory. In steps of few rows, a
 * sequence is cut into splits of split_cells positions, whose results a second kernel combines. Where splits begin
 * depends on n_ctx alone. */

#define RFK_QUERIES 8
#define RFK_CELLS 64
#define RFK_MAX_HEAD 256
#define RFK_LATENT_HEAD 576  /* of MLA's latent keys; values have at most 2 * RFK_BLOCK */
#define RFK_ANY_HEAD 1024    /* of keys that rfk_any_attention takes */
#if defined(RFK_NVIDIA) /* has shared memory enough: one kernel less to compile for each type of the cache */
#define RFK_SMALL_HEAD RFK_LATENT_HEAD
#else
#define RFK_SMALL_HEAD RFK_MAX_HEAD
#endif

struct rfk_attention_args {
    const float *q;
    const void *k, *v; /* [seq][kv head][n_cells][dim]: position p in cell p % n_cells */
    float *out;
    const float *slopes;  /* [n_heads] ALiBi slopes; NULL: none */
    const uint8_t *sinks; /* [n_heads] attention sinks: one more score without a value; NULL: none */
    float *part; /* [row][head][max_splits][head_dim_v + 2]: weighted sums, maximum, sum of weights; NULL: one split */
    const rf_step_row *rows;
    uint32_t q_stride, out_stride, n_rows, rows_per_block, heads_per_block, sinks_type;
    uint32_t n_heads, n_kv_heads, head_dim, head_dim_v, n_cells, max_splits, split_cells;
    uint32_t v_row;                      /* values from one position to the next */
    uint32_t reverse_from;               /* rfk_flash: blocks from here on take rows in reverse order */
    uint32_t window, temperature_length; /* window 0: all positions */
    float scale, softcap, temperature;   /* 0: none */
};

/* The factor of the queries at a position. */
RFK_DEVICE float rfk_temperature(const rfk_attention_args &a, int32_t pos) {
    return a.temperature == 0 ? 1.0f
                              : 1.0f + a.temperature * logf((float)(1u + (uint32_t)pos / a.temperature_length));
}

template <uint32_t HEAD> struct rfk_attention_shared {
    float q[RFK_QUERIES][HEAD];
    float p[RFK_QUERIES][RFK_CELLS]; /* scores, then weights */
    float largest[RFK_QUERIES], sum[RFK_QUERIES], keep[RFK_QUERIES];
    float join[2 * RFK_BLOCK];
};

RFK_DEVICE float rfk_value(const uint16_t *p) { return rfk_from_half(*p); }
RFK_DEVICE float rfk_value(const float *p) { return *p; }
RFK_DEVICE void rfk_values8(const uint16_t *p, float *v) {
    rfk_load8<RF_TYPE_F16>(reinterpret_cast<const uint8_t *>(p), 0, v);
}
RFK_DEVICE void rfk_values8(const float *p, float *v) {
    rfk_load8<RF_TYPE_F32>(reinterpret_cast<const uint8_t *>(p), 0, v);
}

/* Rows of n keys or values of any cache type: the address of a row, and a value of it. */
struct rfk_q8 { int8_t q; };
template <class KV> RFK_DEVICE const KV *rfk_kv_row(const KV *first, size_t row, uint32_t n) { return first + row * n; }
RFK_DEVICE const rfk_q8 *rfk_kv_row(const rfk_q8 *first, size_t row, uint32_t n) {
    return first + row * rfk_q8_bytes(n);
}
template <class KV> RFK_DEVICE float rfk_kv_value(const KV *row, uint32_t n, uint32_t i) {
    (void)n;
    return rfk_value(row + i);
}
RFK_DEVICE float rfk_kv_scale(const rfk_q8 *row, uint32_t n, uint32_t i) {
    return rfk_from_half(reinterpret_cast<const uint16_t *>(row + n)[i / 32]);
}
RFK_DEVICE float rfk_kv_value(const rfk_q8 *row, uint32_t n, uint32_t i) {
    return (float)row[i].q * rfk_kv_scale(row, n, i);
}
/* Eight values from i on; i and n are multiples of 8. */
template <class KV> RFK_DEVICE void rfk_kv_values8(const KV *row, uint32_t n, uint32_t i, float *v) {
    (void)n;
    rfk_values8(row + i, v);
}
RFK_DEVICE void rfk_kv_values8(const rfk_q8 *row, uint32_t n, uint32_t i, float *v) {
    const float scale = rfk_kv_scale(row, n, i);
    const uint16_t *pairs = reinterpret_cast<const uint16_t *>(row + i); /* rows of 34 bytes are aligned to 2 */
    RFK_UNROLL(4)
    for (int e = 0; e < 4; e++) {
        const uint16_t pair = pairs[e];
        v[2 * e] = (float)(int8_t)(pair & 255) * scale;
        v[2 * e + 1] = (float)(int8_t)(pair >> 8) * scale;
    }
}

/* A run: queries of n_heads heads from head0 on, rows [row0, row1) of one sequence. */
struct rfk_run {
    uint32_t row0, row1, head0, n_heads, n;
    uint32_t begin, end; /* positions of this split */
    uint32_t seen;       /* the first visible position; cells before it may hold other positions */
};

/* The products of a position's key with n queries, 8 * eights values apart: four threads a position, each with eight of
 * every 32 values. row NULL: nobody sees it. */
template <int WAVE, class KV>
RFK_DEVICE void rfk_key_dots(const float *q, uint32_t eights, uint32_t n, const KV *row, uint32_t head_dim,
                             float (&dot)[RFK_QUERIES]) {
    for (int g = 0; g < RFK_QUERIES; g++) dot[g] = 0;
    for (uint32_t i = threadIdx.x % 4 * 8; row && i < head_dim; i += 32) {
        float v[8];
        if (head_dim % 8 == 0) {
            rfk_kv_values8(row, head_dim, i, v);
        } else {
            for (uint32_t e = 0; e < 8; e++) v[e] = i + e < head_dim ? rfk_kv_value(row, head_dim, i + e) : 0.0f;
        }
        RFK_UNROLL(8)
        for (uint32_t g = 0; g < RFK_QUERIES; g++)
            if (g < n)
                for (uint32_t e = 0; e < 8; e++) dot[g] += q[8 * (g * eights) + i + e] * v[e];
    }
    RFK_UNROLL(8)
    for (uint32_t g = 0; g < RFK_QUERIES; g++) {
        dot[g] += rfk_shuffle_xor<WAVE>(dot[g], 1);
        dot[g] += rfk_shuffle_xor<WAVE>(dot[g], 2);
    }
}

/* Scores of positions [cell0, cell0 + 64) to s.p. */
template <int WAVE, class KV, uint32_t HEAD>
RFK_DEVICE void rfk_scores(rfk_attention_shared<HEAD> &s, const rfk_attention_args &a, const rfk_run &r, const KV *k,
                           uint32_t cell0) {
    uint32_t cell = threadIdx.x / 4, part = threadIdx.x % 4, pos = cell0 + cell, first = cell0 % a.n_cells;
    const KV *row = pos < r.end ? rfk_kv_row(k, first + cell, a.head_dim) : NULL;
    float dot[RFK_QUERIES];
    rfk_key_dots<WAVE>(s.q[0], HEAD / 8, r.n, row, a.head_dim, dot);
    RFK_UNROLL(1)
    for (uint32_t g = part; g < r.n; g += 4) { /* the four threads share the queries */
        float score = 0;
        RFK_UNROLL(8)
        for (uint32_t k = 0; k < RFK_QUERIES; k++) score = k == g ? dot[k] : score; /* dot stays in registers */
        const int32_t at = a.rows[r.row0 + g / r.n_heads].pos;
        const bool visible = pos < r.end && (int32_t)pos <= at && (!a.window || (uint32_t)at - pos < a.window);
        score *= a.scale;
        if (a.softcap != 0) score = a.softcap * tanhf(score / a.softcap);
        if (a.slopes) score += a.slopes[r.head0 + g % r.n_heads] * (float)((int32_t)pos - at);
        s.p[g][cell] = visible ? score : -INFINITY;
    }
}

/* Online softmax: scores to weights exp(score - maximum); updates the running maximum and sum, and the factor s.keep of
 * older sums. 32 threads a query, which all hold its maximum and sum. */
template <int WAVE, class SHARED> RFK_DEVICE void rfk_softmax(SHARED &s, float *running, float *total) {
    uint32_t g = threadIdx.x / 32, i = threadIdx.x % 32;
    float a = s.p[g][i], b = s.p[g][i + 32], largest = fmaxf(a, b), sum;
    for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, rfk_shuffle_xor<WAVE>(largest, mask));
    largest = fmaxf(largest, *running);
    bool any = largest > -INFINITY;
    a = any ? expf(a - largest) : 0.0f;
    b = any ? expf(b - largest) : 0.0f;
    sum = a + b;
    for (int mask = 16; mask > 0; mask /= 2) sum += rfk_shuffle_xor<WAVE>(sum, mask);
    s.p[g][i] = a;
    s.p[g][i + 32] = b;
    float keep = any ? expf(*running - largest) : 0.0f; /* 0 the first time */
    if (i == 0) s.keep[g] = keep;
    *total = *total * keep + sum;
    *running = largest;
}

/* Combine query g's sums over the block's threads, `columns` threads for the head's values: to the output, or to a part
 * with the maximum and the sum of weights. */
template <uint32_t HEAD>
RFK_DEVICE void rfk_put_attention(const rfk_attention_shared<HEAD> &s, const rfk_attention_args &a, const rfk_run &r,
                                  uint32_t g, uint32_t columns) {
    const uint32_t row = r.row0 + g / r.n_heads, h = r.head0 + g % r.n_heads;
    for (uint32_t e = threadIdx.x; e < a.head_dim_v; e += RFK_BLOCK) {
        float total = 0;
        for (uint32_t t = 0; t < RFK_BLOCK / columns; t++) total += s.join[2 * t * columns + e];
        if (!a.part) {
            a.out[(size_t)row * a.out_stride + (size_t)h * a.head_dim_v + e] = s.sum[g] == 0 ? 0.0f : total / s.sum[g];
            continue;
        }
        float *part = a.part + (((size_t)row * a.n_heads + h) * a.max_splits + blockIdx.z) * (a.head_dim_v + 2);
        part[e] = total;
        if (e == 0) part[a.head_dim_v] = s.largest[g], part[a.head_dim_v + 1] = s.sum[g];
    }
}

/* What a thread has of a run: the maximum and sum of query threadIdx.x / 32, and sums of two adjacent values of each
 * query. Threads beyond a head's values take other positions of a tile: every stride-th from `start` on. */
struct rfk_attending {
    float largest, sum, acc[RFK_QUERIES][2];
    uint32_t columns, column, start, stride;
};
template <uint32_t HEAD>
RFK_DEVICE void rfk_begin_attending(rfk_attention_shared<HEAD> &s, const rfk_attention_args &a, const rfk_run &r,
                                    rfk_attending &t) {
    t.columns = 16;
    while (t.columns * 2 < a.head_dim_v) t.columns *= 2;
    t.column = threadIdx.x % t.columns * 2, t.start = threadIdx.x / t.columns, t.stride = RFK_BLOCK / t.columns;
    for (int g = 0; g < RFK_QUERIES; g++) t.acc[g][0] = t.acc[g][1] = 0;
    for (uint32_t i = threadIdx.x; i < RFK_QUERIES * RFK_CELLS; i += RFK_BLOCK)
        s.p[i / RFK_CELLS][i % RFK_CELLS] = -INFINITY;
    t.largest = -INFINITY, t.sum = 0;
    if (a.sinks && blockIdx.z == 0 && threadIdx.x / 32 < r.n) { /* the first split: every row has it */
        t.largest = rfk_load_any(a.sinks, a.sinks_type, r.head0 + threadIdx.x / 32 % r.n_heads);
        t.sum = 1;
    }
}
template <uint32_t HEAD> RFK_DEVICE void rfk_rescale(const rfk_attention_shared<HEAD> &s, rfk_attending &t) {
    RFK_UNROLL(8)
    for (uint32_t g = 0; g < RFK_QUERIES; g++) t.acc[g][0] *= s.keep[g], t.acc[g][1] *= s.keep[g];
}
/* Add the values of position i of the tile. */
template <class KV, uint32_t HEAD>
RFK_DEVICE void rfk_add_values(const rfk_attention_shared<HEAD> &s, const rfk_attention_args &a, const KV *row,
                               uint32_t i, rfk_attending &t) {
    float v0 = rfk_kv_value(row, a.v_row, t.column),
          v1 = t.column + 1 < a.head_dim_v ? rfk_kv_value(row, a.v_row, t.column + 1) : 0.0f;
    RFK_UNROLL(8)
    for (uint32_t g = 0; g < RFK_QUERIES; g++) t.acc[g][0] += s.p[g][i] * v0, t.acc[g][1] += s.p[g][i] * v1;
}
template <uint32_t HEAD>
RFK_DEVICE void rfk_end_attending(rfk_attention_shared<HEAD> &s, const rfk_attention_args &a, const rfk_run &r,
                                  const rfk_attending &t) {
    if (threadIdx.x % 32 == 0) s.largest[threadIdx.x / 32] = t.largest, s.sum[threadIdx.x / 32] = t.sum;
    RFK_UNROLL(1)
    for (uint32_t g = 0; g < r.n; g++) {
        float own[2] = {0, 0};
        RFK_UNROLL(8)
        for (uint32_t k = 0; k < RFK_QUERIES; k++) /* acc stays in registers */
            if (k == g) own[0] = t.acc[k][0], own[1] = t.acc[k][1];
        s.join[2 * threadIdx.x] = own[0];
        s.join[2 * threadIdx.x + 1] = own[1];
        __syncthreads();
        rfk_put_attention(s, a, r, g, t.columns);
        __syncthreads();
    }
}

template <int WAVE, class KV, uint32_t HEAD>
RFK_DEVICE void rfk_attend(rfk_attention_shared<HEAD> &s, const rfk_attention_args &a, const rfk_run &r) {
    size_t head = (size_t)a.rows[r.row0].seq * a.n_kv_heads + r.head0 / (a.n_heads / a.n_kv_heads);
    const KV *k = rfk_kv_row((const KV *)a.k, head * a.n_cells, a.head_dim);
    const KV *v = rfk_kv_row((const KV *)a.v, head * a.n_cells, a.v_row);
    rfk_attending t;
    __syncthreads(); /* the previous run is done with s */
    for (uint32_t e = threadIdx.x % 32; e < (a.head_dim + 7) / 8 * 8; e += 32) { /* 32 threads a query */
        const uint32_t g = threadIdx.x / 32, row = r.row0 + g / r.n_heads;
        const bool inside = g < r.n && e < a.head_dim;
        s.q[g][e] = inside ? a.q[(size_t)row * a.q_stride + (size_t)(r.head0 + g % r.n_heads) * a.head_dim + e] *
                                 rfk_temperature(a, a.rows[row].pos)
                           : 0.0f;
    }
    rfk_begin_attending(s, a, r, t);
    __syncthreads();
    for (uint32_t cell0 = r.begin; cell0 < r.end; cell0 += RFK_CELLS) {
        rfk_scores<WAVE, KV>(s, a, r, k, cell0);
        __syncthreads();
        rfk_softmax<WAVE>(s, &t.largest, &t.sum);
        __syncthreads();
        uint32_t n_cells = r.end - cell0 < RFK_CELLS ? r.end - cell0 : RFK_CELLS, first = cell0 % a.n_cells;
        rfk_rescale(s, t);
        for (uint32_t i = t.start; t.column < a.head_dim_v && i < n_cells; i += t.stride) {
            if (cell0 + i < r.seen) continue; /* its weight is 0, but the cell may hold NaN */
            rfk_add_values(s, a, rfk_kv_row(v, first + i, a.v_row), i, t);
        }
        __syncthreads();
    }
    rfk_end_attending(s, a, r, t);
}

/* grid [ceil(T / rows_per_block), n_kv_heads * ceil(group / heads_per_block), splits]   block 256
 * LDS 12.1 KiB, with RFK_LATENT_HEAD 22.1
 * A block reads the keys and values of its split once for up to 8 queries. */
template <int WAVE, class KV, uint32_t HEAD>
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_attention(rfk_attention_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    RFK_SHARED(rfk_attention_shared<HEAD>, s);
    uint32_t group = a.n_heads / a.n_kv_heads, chunks = (group + a.heads_per_block - 1) / a.heads_per_block;
    uint32_t kv_head = blockIdx.y / chunks, chunk = blockIdx.y % chunks;
    rfk_run r;
    r.head0 = kv_head * group + chunk * a.heads_per_block;
    r.n_heads =
        group - chunk * a.heads_per_block < a.heads_per_block ? group - chunk * a.heads_per_block : a.heads_per_block;
    uint32_t row = blockIdx.x * a.rows_per_block,
             last = row + a.rows_per_block < a.n_rows ? row + a.rows_per_block : a.n_rows;
    while (row < last) { /* runs of rows of one sequence, in order of position */
        r.row0 = row;
        while (row < last && a.rows[row].seq == a.rows[r.row0].seq) row++;
        r.row1 = row;
        r.n = (r.row1 - r.row0) * r.n_heads;
        uint32_t length = (uint32_t)a.rows[r.row1 - 1].pos + 1;
        r.begin = blockIdx.z * a.split_cells;
        r.end = length - r.begin < a.split_cells ? length : r.begin + a.split_cells;
        r.seen = (uint32_t)a.rows[r.row0].pos + 1; /* of the first row; later rows see no older positions */
        r.seen = a.window && r.seen > a.window ? r.seen - a.window : 0;
        if (r.begin >= length) continue;
        if (r.seen > r.begin) /* skip whole tiles that no row sees */
            r.begin += (r.seen - r.begin) / RFK_CELLS * RFK_CELLS;
        if (r.begin > r.end) r.begin = r.end;
        rfk_attend<WAVE, KV, HEAD>(s, a, r);
    }
}

/* Attention to positions that lie after the row's own too, or to those of a list, or to compressed blocks, with biases
 * by distance, and with longer keys than the others': a block takes some heads of a row through 64 positions at a time.
 *   grid [T, n_kv_heads * ceil(group / heads_per_block)]   block 256   LDS 22.4 KiB */
struct rfk_any_attention_args {
    rfk_attention_args a;
    const int32_t *list;         /* [T][list_stride]; NULL: none                  */
    const void *blocks;          /* as a.k, n_block_cells of them, of block_unit positions; NULL: none */
    const uint8_t *bias;         /* [n_buckets][n_heads]; NULL: none              */
    const float *buckets;
    uint32_t bias_type, n_buckets, list_stride, n_lists, n_listed, list_unit, n_dense, both_ways,
        n_block_cells, block_unit;
};
#define RFK_UNSEEN 0xffffffffu
struct rfk_any_places { uint32_t pos[RFK_CELLS]; }; /* of a tile; RFK_UNSEEN: none */
/* Heads whose queries have room in shared memory. */
__host__ RFK_DEVICE uint32_t rfk_any_heads(uint32_t head_dim) {
    const uint32_t n = RFK_QUERIES * RFK_LATENT_HEAD / ((head_dim + 7) / 8 * 8);
    return n < RFK_QUERIES ? n : RFK_QUERIES;
}
/* The largest of a value over the block's threads, or the sum; in each of them. */
RFK_DEVICE float rfk_block_join(float *parts, float v, bool sum) {
    __syncthreads();
    parts[threadIdx.x] = v;
    __syncthreads();
    for (uint32_t n = RFK_BLOCK / 2; n; n /= 2) {
        if (threadIdx.x < n)
            parts[threadIdx.x] = sum ? parts[threadIdx.x] + parts[threadIdx.x + n]
                                     : fmaxf(parts[threadIdx.x], parts[threadIdx.x + n]);
        __syncthreads();
    }
    return parts[0];
}
/* What distance adds to a score. */
RFK_DEVICE float rfk_distance_bias(const rfk_any_attention_args &x, uint32_t h, uint32_t own, uint32_t pos) {
    const uint32_t after = pos > own, distance = after ? pos - own : own - pos;
    float v = x.a.slopes ? -x.a.slopes[h] * (float)distance : 0.0f;
    if (!x.bias) return v;
    const uint32_t bucket = (uint32_t)x.buckets[distance < RF_DISTANCES ? distance : RF_DISTANCES - 1];
    return v + rfk_load_any(x.bias, x.bias_type, (size_t)(bucket + after * (x.n_buckets / 2)) * x.a.n_heads + h);
}
/* Positions, or rows of blocks, that a query sees. */
template <class KV> struct rfk_any_span {
    const KV *k, *v;
    const int32_t *list;       /* blocks of list_unit of them, as many as are not negative; NULL: all */
    uint32_t begin, end, seen; /* of them, or of places in the list, which count if they name one below `seen` */
    uint32_t list_unit, n_cells;
};
template <class KV> RFK_DEVICE uint32_t rfk_any_place(const rfk_any_span<KV> &r, uint32_t i) {
    if (i >= r.end) return RFK_UNSEEN;
    const int32_t block = r.list ? r.list[i / r.list_unit] : 0;
    const uint32_t pos = r.list ? (uint32_t)block * r.list_unit + i % r.list_unit : i;
    return block >= 0 && pos < r.seen ? pos : RFK_UNSEEN;
}
/* Scores of a tile's positions to s.p. */
template <int WAVE, class KV>
RFK_DEVICE void rfk_any_scores(rfk_attention_shared<RFK_LATENT_HEAD> &s, const rfk_any_attention_args &x,
                               const rfk_any_places &places, const rfk_run &r, const rfk_any_span<KV> &span) {
    const rfk_attention_args &a = x.a;
    const uint32_t cell = threadIdx.x / 4, pos = places.pos[cell], own = (uint32_t)a.rows[r.row0].pos;
    const KV *row = pos == RFK_UNSEEN ? NULL : rfk_kv_row(span.k, pos % span.n_cells, a.head_dim);
    float dot[RFK_QUERIES];
    rfk_key_dots<WAVE>(s.q[0], (a.head_dim + 7) / 8, r.n, row, a.head_dim, dot);
    RFK_UNROLL(1)
    for (uint32_t g = threadIdx.x % 4; g < r.n; g += 4) { /* the four threads share the queries */
        float score = 0;
        RFK_UNROLL(8)
        for (uint32_t k = 0; k < RFK_QUERIES; k++) score = k == g ? dot[k] : score; /* dot stays in registers */
        score *= a.scale;
        if (a.softcap != 0) score = a.softcap * tanhf(score / a.softcap);
        s.p[g][cell] = row ? score + rfk_distance_bias(x, r.head0 + g, own, pos) : -INFINITY;
    }
}
/* What the row sees: first positions, and where there are compressed blocks, those in a second turn. */
template <class KV>
RFK_DEVICE rfk_any_span<KV> rfk_any_find_span(const rfk_any_attention_args &x, const rfk_run &run, uint32_t turn) {
    const rfk_attention_args &a = x.a;
    const rf_step_row at = a.rows[run.row0];
    const uint32_t own = (uint32_t)at.pos, kv_head = run.head0 / (a.n_heads / a.n_kv_heads);
    const int32_t *list = x.list && own >= x.n_dense
                              ? x.list + (size_t)run.row0 * x.list_stride + kv_head % x.n_lists * x.n_listed
                              : NULL;
    const size_t head = (size_t)(uint32_t)at.seq * a.n_kv_heads + kv_head;
    rfk_any_span<KV> r = {NULL, NULL, NULL, 0, own + 1, own + 1, 1, a.n_cells};
    if (turn) {
        r.k = r.v = rfk_kv_row(static_cast<const KV *>(x.blocks), head * x.n_block_cells, a.head_dim);
        r.n_cells = x.n_block_cells;
        r.seen = (own + 1) / x.block_unit;
        r.list = list;
        r.end = list ? x.n_listed : r.seen;
        return r;
    }
    r.k = rfk_kv_row(static_cast<const KV *>(a.k), head * a.n_cells, a.head_dim);
    r.v = rfk_kv_row(static_cast<const KV *>(a.v), head * a.n_cells, a.v_row);
    uint32_t last = x.both_ways ? a.n_rows - 1 : run.row0; /* of the sequence */
    while (a.rows[last].seq != at.seq) last--;
    r.end = (uint32_t)a.rows[last].pos + 1;
    const uint32_t half = x.both_ways ? a.window / 2 : a.window - 1;
    if (a.window && own > half) r.begin = own - half;
    if (a.window && x.both_ways && r.end > own + half + 1) r.end = own + half + 1;
    if (x.both_ways) r.seen = r.end;
    if (list && !x.blocks) r.list = list, r.list_unit = x.list_unit, r.begin = 0, r.end = x.n_listed * x.list_unit;
    return r;
}
template <int WAVE, class KV>
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_any_attention(rfk_any_attention_args x) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    const rfk_attention_args &a = x.a;
    RFK_SHARED(rfk_attention_shared<RFK_LATENT_HEAD>, s);
    RFK_SHARED(rfk_any_places, places);
    const uint32_t group = a.n_heads / a.n_kv_heads, chunks = (group + a.heads_per_block - 1) / a.heads_per_block,
                   chunk = blockIdx.y % chunks, apart = (a.head_dim + 7) / 8 * 8;
    rfk_run run;
    run.row0 = blockIdx.x, run.row1 = run.row0 + 1;
    run.head0 = blockIdx.y / chunks * group + chunk * a.heads_per_block;
    run.n = run.n_heads =
        group - chunk * a.heads_per_block < a.heads_per_block ? group - chunk * a.heads_per_block : a.heads_per_block;
    const float *in = a.q + (size_t)run.row0 * a.q_stride + (size_t)run.head0 * a.head_dim;
    const float heat = rfk_temperature(a, a.rows[run.row0].pos);
    float *q = s.q[0];
    for (uint32_t i = threadIdx.x; i < run.n * apart; i += RFK_BLOCK)
        q[i] = i % apart < a.head_dim ? in[i / apart * a.head_dim + i % apart] * heat : 0.0f;
    rfk_attending t;
    rfk_begin_attending(s, a, run, t);
    for (uint32_t turn = 0; turn < (x.blocks ? 2u : 1u); turn++) { /* one call: its code is there once */
        const rfk_any_span<KV> r = rfk_any_find_span<KV>(x, run, turn);
        for (uint32_t first = r.begin; first < r.end; first += RFK_CELLS) {
            if (r.list && r.list[first / r.list_unit] < 0) break;
            if (threadIdx.x < RFK_CELLS) places.pos[threadIdx.x] = rfk_any_place(r, first + threadIdx.x);
            __syncthreads();
            rfk_any_scores<WAVE>(s, x, places, run, r);
            __syncthreads();
            rfk_softmax<WAVE>(s, &t.largest, &t.sum);
            __syncthreads();
            rfk_rescale(s, t);
            for (uint32_t i = t.start; t.column < a.head_dim_v && i < RFK_CELLS; i += t.stride)
                if (places.pos[i] != RFK_UNSEEN)
                    rfk_add_values(s, a, rfk_kv_row(r.v, places.pos[i] % r.n_cells, a.v_row), i, t);
            __syncthreads();
        }
    }
    rfk_end_attending(s, a, run, t);
}

/* Attention over residual streams: a score for each vector, by its product with the weight and its own length; then all
 * in proportion.   grid [T]   block 256 */
struct rfk_blend_args {
    const float *banked, *own;
    const uint8_t *weight;
    float *out;
    uint32_t banked_stride, own_stride, out_stride, n, n_banked, weight_type;
    float eps;
};
struct rfk_blend_shared {
    float parts[RFK_BLOCK], score[RF_MAX_BLENDS];
};
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_blend(rfk_blend_args a) {
    RFK_SHARED(rfk_blend_shared, s);
    const float *banked = a.banked + (size_t)blockIdx.x * a.banked_stride,
                *own = a.own + (size_t)blockIdx.x * a.own_stride;
    float largest = -INFINITY, total = 0;
    for (uint32_t k = 0; k <= a.n_banked; k++) {
        const float *x = k < a.n_banked ? banked + (size_t)k * a.n : own;
        float squares = 0, score = 0;
        for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK) {
            squares += x[i] * x[i];
            score += x[i] * rfk_load_any(a.weight, a.weight_type, i);
        }
        squares = rfk_block_join(s.parts, squares, true);
        score = rfk_block_join(s.parts, score, true) / sqrtf(squares / (float)a.n + a.eps);
        if (threadIdx.x == 0) s.score[k] = score;
        largest = fmaxf(largest, score);
    }
    __syncthreads();
    for (uint32_t k = 0; k <= a.n_banked; k++) total += expf(s.score[k] - largest);
    for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK) {
        float sum = expf(s.score[a.n_banked] - largest) * own[i];
        for (uint32_t k = 0; k < a.n_banked; k++) sum += expf(s.score[k] - largest) * banked[(size_t)k * a.n + i];
        a.out[(size_t)blockIdx.x * a.out_stride + i] = sum / total;
    }
}

/* To the streams of hyper-connections: how much of `in` each receives, then that.   grid [T, streams]   block 256 */
struct rfk_spread_args {
    const float *in, *in2, *in3; /* as rf_spread_params; NULL: none */
    float *out;
    uint32_t in_stride, in2_stride, in3_stride, out_stride, n, first, accumulate, sigmoid;
    float scale;
};
struct rfk_spread_shared {
    float parts[RFK_BLOCK];
};
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_spread(rfk_spread_args a) {
    RFK_SHARED(rfk_spread_shared, s);
    const size_t at = (size_t)blockIdx.y * a.n;
    const float *in = a.in + (size_t)blockIdx.x * a.in_stride;
    float *out = a.out + (size_t)blockIdx.x * a.out_stride + (size_t)a.first * a.n + at, w = a.scale;
    if (a.in3) {
        const float *x = a.in2 + (size_t)blockIdx.x * a.in2_stride + at,
                    *y = a.in3 + (size_t)blockIdx.x * a.in3_stride + at;
        float sum = 0;
        for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK) sum += x[i] * y[i];
        const float d = rfk_block_join(s.parts, sum, true) / sqrtf((float)a.n), root = sqrtf(fmaxf(fabsf(d), 1e-6f));
        w /= 1.0f + expf(d > 0 ? -root : d < 0 ? root : d);
    } else if (a.in2) {
        const float x = a.in2[(size_t)blockIdx.x * a.in2_stride + blockIdx.y];
        w *= a.sigmoid ? 1.0f / (1.0f + expf(-x)) : x;
    }
    for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK) out[i] = (a.accumulate ? out[i] : 0.0f) + w * in[i];
}

/* Weights of hyper-connections, one a thread, and the matrix, a line of it a thread.   grid [T]   block 256 */
struct rfk_hyper_args {
    const float *in;
    const uint8_t *scale, *base;
    float *out;
    uint32_t in_stride, out_stride, scale_type, base_type, n_streams, n_parts, n_rounds;
    float magnitude, eps;
};
struct rfk_hyper_shared {
    float c[RF_HYPER_STREAMS * RF_HYPER_STREAMS]; /* [to][from] */
};
/* Divide a line of n values, `step` apart, by their sum + eps, and add `then`. */
RFK_DEVICE void rfk_divide_line(float *v, uint32_t n, uint32_t step, float eps, float then) {
    float sum = eps;
    for (uint32_t i = 0; i < n; i++) sum += v[i * step];
    for (uint32_t i = 0; i < n; i++) v[i * step] = v[i * step] / sum + then;
}
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_hyper(rfk_hyper_args a) {
    RFK_SHARED(rfk_hyper_shared, s);
    const uint32_t n = a.n_streams, line = threadIdx.x;
    for (uint32_t i = threadIdx.x; i < 2 * a.n_streams; i += RFK_BLOCK) {
        const uint32_t part = i / a.n_streams, to = part ? i - a.n_streams : i + a.n_streams;
        float w = 0;
        if (part < a.n_parts) {
            const float x = a.in[(size_t)blockIdx.x * a.in_stride + i] * rfk_load_any(a.scale, a.scale_type, part) +
                            rfk_load_any(a.base, a.base_type, i);
            w = (part ? a.magnitude : 1.0f) / (1.0f + expf(-x)) + (part && a.n_parts == 3 ? 0.0f : a.eps);
        }
        a.out[(size_t)blockIdx.x * a.out_stride + to] = w;
    }
    if (a.n_parts < 3) return;
    if (line < n) {
        float max = -INFINITY;
        for (uint32_t to = 0; to < n; to++) {
            const uint32_t at = (2 + line) * n + to;
            s.c[to * n + line] = a.in[(size_t)blockIdx.x * a.in_stride + at] * rfk_load_any(a.scale, a.scale_type, 2) +
                                 rfk_load_any(a.base, a.base_type, at);
            max = fmaxf(max, s.c[to * n + line]);
        }
        for (uint32_t to = 0; to < n; to++) s.c[to * n + line] = expf(s.c[to * n + line] - max);
        rfk_divide_line(s.c + line, n, n, 0, a.eps);
    }
    for (uint32_t round = 0; round < a.n_rounds; round++) {
        if (line < n && round > 0) rfk_divide_line(s.c + line, n, n, a.eps, 0);
        __syncthreads();
        if (line < n) rfk_divide_line(s.c + line * n, n, 1, a.eps, 0);
        __syncthreads();
    }
    for (uint32_t i = threadIdx.x; i < n * n; i += RFK_BLOCK)
        a.out[(size_t)blockIdx.x * a.out_stride + 2 * n + i] = s.c[i];
}

/* Vectors of `in` with the length of in2's.   grid [T, groups]   block 256 */
struct rfk_match_args {
    const float *in, *in2;
    float *out;
    uint32_t in_stride, in2_stride, out_stride, n;
};
struct rfk_match_shared {
    float parts[RFK_BLOCK];
};
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_match(rfk_match_args a) {
    RFK_SHARED(rfk_match_shared, s);
    const float *in = a.in + (size_t)blockIdx.x * a.in_stride + (size_t)blockIdx.y * a.n,
                *as = a.in2 + (size_t)blockIdx.x * a.in2_stride;
    float *out = a.out + (size_t)blockIdx.x * a.out_stride + (size_t)blockIdx.y * a.n, found = 0, want = 0;
    for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK) found += in[i] * in[i], want += as[i] * as[i];
    found = rfk_block_join(s.parts, found, true);
    want = rfk_block_join(s.parts, want, true);
    const float factor = found > 0 ? sqrtf(want / found) : 0.0f;
    for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK) out[i] = factor * in[i];
}

/* What is above mean + cutoff * deviation.   grid [T]   block 256 */
struct rfk_trim_args {
    const float *in;
    float *out;
    uint32_t in_stride, out_stride, n;
    float cutoff;
};
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_trim(rfk_trim_args a) {
    RFK_SHARED(rfk_match_shared, s);
    const float *in = a.in + (size_t)blockIdx.x * a.in_stride;
    float *out = a.out + (size_t)blockIdx.x * a.out_stride, sum = 0, squares = 0;
    for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK) sum += in[i];
    const float mean = rfk_block_join(s.parts, sum, true) / (float)a.n;
    for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK) squares += (in[i] - mean) * (in[i] - mean);
    const float least = mean + a.cutoff * sqrtf(rfk_block_join(s.parts, squares, true) / (float)(a.n - 1));
    for (uint32_t i = threadIdx.x; i < a.n; i += RFK_BLOCK) out[i] = in[i] - least < 0 ? 0.0f : in[i] - least;
}

/* ---- sums over the members of a group ----
 * As rf_plan_members says. A member knows that another has read a set of parts before it writes there again: it has
 * what that one wrote for the sum between, by a kernel that began when the one that read had ended. Where they can
 * (rfk_pushes) products write their part while they run: in large steps the sum then only waits and adds, in a decode
 * step the product's blocks do that, too (rfk_take_sums), and the sum is no launch. */

/* At most RFK_MEMBER_FLAGGED values, n is even.
 *   grid [ceil(n_rows * n / 2 / 256), at most RFK_MEMBER_BLOCKS]   block 256 */
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_sum_flagged(rfk_members_args a) {
    const uint32_t n2 = a.n / 2, total = n2 * a.n_rows, first = blockIdx.x * RFK_BLOCK + threadIdx.x,
                   step = gridDim.x * RFK_BLOCK;
    rfk_wait_previous();
    if (a.n_members == 0) return; /* a launch that loads the kernel */
    const uint32_t turn = a.now[0] + a.index, epoch = a.now[1];
    for (uint32_t i = first; i < total; i += step) {
        const float2 v = *reinterpret_cast<const float2 *>(a.in + (size_t)(i / n2) * a.in_stride + 2 * (i % n2));
        for (uint32_t k = 0; k < a.n_members; k++)
            rfk_store_flagged(rfk_flagged_part(a.block[k], a.n_members, a.rank, turn) + i, v, turn);
    }
    __syncthreads(); /* no thread waits before all have written */
    for (uint32_t begin = 0; begin < total; begin += step) { /* all threads take part in each */
        const uint32_t i = begin + first;
        float2 *out = reinterpret_cast<float2 *>(a.out + (size_t)(i / n2) * a.out_stride + 2 * (i % n2)), sum = {0, 0},
               before = {0, 0};
        if (a.accumulate && i < total) before = *out;
        for (uint32_t k = 0; k < a.n_members && i < total; k++) {
            rfk_sum_wait w = {reinterpret_cast<rfk_sum_head *>(a.block[a.rank]), k, turn, epoch, 0};
            const rfk_flagged *at = rfk_flagged_part(a.block[a.rank], a.n_members, k, turn) + i;
            for (;;) {
                const rfk_flagged f = rfk_load_flagged(at);
                const uint32_t x = (uint32_t)(f.v[0] >> 32), y = (uint32_t)(f.v[1] >> 32);
                if ((x == turn && y == turn) || !rfk_waits_on(a, w, x == turn ? y : x)) {
                    const float2 v = {rfk_as_float((uint32_t)f.v[0]), rfk_as_float((uint32_t)f.v[1])};
                    if (k == 0) sum = v;
                    else sum.x += v.x, sum.y += v.y;
                    break;
                }
            }
        }
        if (a.accumulate) sum.x += before.x, sum.y += before.y;
        if (i < total) *out = sum;
    }
}

__host__ RFK_DEVICE float4 *rfk_sum_part(const rfk_members_args &a, uint32_t to, uint32_t from, uint32_t turn) {
    char *parts = a.block[to] + RF_SUM_HEAD_BYTES + (size_t)2 * a.n_members * RF_SUM_FLAGGED * sizeof(uint64_t);
    return reinterpret_cast<float4 *>(reinterpret_cast<float *>(parts) +
                                      ((turn & 1) * a.n_members + from) * a.part_values);
}

/* Four values, the i-th of rows of n4. */
RFK_DEVICE const float4 *rfk_sum_at(const float *rows, uint32_t stride, uint32_t n4, uint32_t i) {
    return reinterpret_cast<const float4 *>(rows + (size_t)(i / n4) * stride + 4 * (i % n4));
}

/* More, or of one member alone. n is a multiple of 4.   grid RFK_MEMBER_BLOCKS   block RFK_MEMBER_BLOCK */
static __global__ void RFK_THREADS(RFK_MEMBER_BLOCK) rfk_sum_members(rfk_members_args a) {
    const uint32_t n4 = a.n / 4, total = n4 * a.n_rows, first = blockIdx.x * RFK_MEMBER_BLOCK + threadIdx.x,
                   step = RFK_MEMBER_BLOCKS * RFK_MEMBER_BLOCK;
    rfk_sum_head *own = reinterpret_cast<rfk_sum_head *>(a.n_members > 1 ? a.block[a.rank] : NULL);
    rfk_wait_previous();
    const uint32_t turn = own ? a.now[0] + a.index : 0, epoch = own ? a.now[1] : 0;
    RFK_UNROLL(4)
    for (uint32_t i = own && !a.pushed && !a.arrived ? first : total; i < total; i += step) {
        const float4 v = *rfk_sum_at(a.in, a.in_stride, n4, i);
        for (uint32_t k = 0; k < a.n_members; k++)
            if (k != a.rank) rfk_sum_part(a, k, a.rank, turn)[i] = v;
    }
    if (own && !a.arrived) {
        __threadfence_system();
        __syncthreads();
        const bool pairs = threadIdx.x < a.n_members && threadIdx.x != a.rank; /* a thread for each of the others */
        if (pairs)
            rfk_store_far(&reinterpret_cast<rfk_sum_head *>(a.block[threadIdx.x])->flag[a.rank][blockIdx.x], turn);
        __syncthreads(); /* no wave waits before all flags are written */
        rfk_sum_wait w = {own, threadIdx.x, turn, epoch, 0};
        while (pairs) {
            const uint32_t found = rfk_load_far(&own->flag[threadIdx.x][blockIdx.x]);
            if (found == turn || !rfk_waits_on(a, w, found)) break;
        }
        __syncthreads();
    }
    RFK_UNROLL(1)
    for (uint32_t begin = first; begin < total; begin += 4 * step) { /* four in flight: it is bound by memory */
        float4 mine[4], before[4], sum[4];
        RFK_UNROLL(4)
        for (uint32_t u = 0; u < 4; u++) {
            const uint32_t i = begin + u * step;
            const float4 zero = {0, 0, 0, 0};
            mine[u] = before[u] = zero;
            if (i < total) mine[u] = *rfk_sum_at(a.in, a.in_stride, n4, i);
            if (i < total && a.accumulate) before[u] = *rfk_sum_at(a.out, a.out_stride, n4, i);
        }
        for (uint32_t k = 0; k < a.n_members; k++)
            RFK_UNROLL(4)
            for (uint32_t u = 0; u < 4; u++) {
                float4 v = mine[u];
                if (k != a.rank && begin + u * step < total) v = rfk_sum_part(a, a.rank, k, turn)[begin + u * step];
                if (k == 0) sum[u] = v;
                else sum[u].x += v.x, sum[u].y += v.y, sum[u].z += v.z, sum[u].w += v.w;
            }
        RFK_UNROLL(4)
        for (uint32_t u = 0; u < 4 && begin + u * step < total; u++) {
            float4 v = sum[u];
            if (a.accumulate) v.x += before[u].x, v.y += before[u].y, v.z += before[u].z, v.w += before[u].w;
            *const_cast<float4 *>(rfk_sum_at(a.out, a.out_stride, n4, begin + u * step)) = v;
        }
    }
}

/* ---- the indexer of sparse attention ---- */

#define RFK_INDEX_ROWS 16u /* rows that are scored, then chosen from, at a time       */
#define RFK_INDEX_CELLS 32 /* positions whose keys a block holds in shared memory     */
#define RFK_INDEX_HEAD 256 /* head_dim at most                                        */

struct rfk_index_args {
    const float *q, *weights; /* weights NULL: 1                                      */
    const void *keys;
    uint32_t *scores;         /* [rows][n_lists][n_ctx], as rfk_index_key makes them  */
    int32_t *out;
    const rf_step_row *rows;  /* from the first of these rows on, as q and out        */
    uint32_t q_stride, weights_stride, out_stride, n_heads, head_dim, n_cells, n_ctx;
    uint32_t n_lists, n_listed, list_unit, n_local, whole; /* whole: RF_OP_LAST       */
};
/* Blocks that compete in a row, all of which are listed if there are not more than n_best. */
RFK_DEVICE uint32_t rfk_index_blocks(const rfk_index_args &a, uint32_t end, uint32_t *n_best) {
    *n_best = a.n_listed - a.whole;
    return (end - !a.whole) / a.list_unit + !a.whole;
}
/* A score as a number that sorts as it does; NaN is the least. */
RFK_DEVICE uint32_t rfk_index_key(float score) {
    union {
        float f;
        uint32_t bits;
    } u;
    u.f = score + 0.0f; /* -0 is 0 */
    return score != score ? 0 : u.bits >> 31 ? ~u.bits : u.bits | 0x80000000u;
}
struct rfk_index_shared {
    float key[RFK_INDEX_CELLS][RFK_INDEX_HEAD + 1], part[RFK_BLOCK / RFK_INDEX_CELLS][RFK_INDEX_CELLS];
};
/* Scores. The threads of a position share its heads.   grid [ceil(scores / 32), rows]   block 256   LDS 33 KiB */
template <class KV> static __global__ void RFK_THREADS(RFK_BLOCK) rfk_index_score(rfk_index_args a) {
    RFK_SHARED(rfk_index_shared, s);
    const rf_step_row row = a.rows[blockIdx.y];
    const uint32_t end = (uint32_t)row.pos + 1, step = a.whole ? a.list_unit : 1, n = end / step,
                   first = blockIdx.x * RFK_INDEX_CELLS, cell = threadIdx.x % RFK_INDEX_CELLS,
                   part = threadIdx.x / RFK_INDEX_CELLS;
    uint32_t n_best;
    if (first >= n || rfk_index_blocks(a, end, &n_best) <= n_best) return;
    const KV *keys = rfk_kv_row(static_cast<const KV *>(a.keys), (size_t)(uint32_t)row.seq * a.n_cells, a.head_dim);
    for (uint32_t i = threadIdx.x; i < RFK_INDEX_CELLS * a.head_dim; i += RFK_BLOCK) {
        const uint32_t c = i / a.head_dim, at = first + c < n ? first + c : n - 1;
        const KV *key = rfk_kv_row(keys, at % a.n_cells, a.head_dim);
        s.key[c][i % a.head_dim] = rfk_kv_value(key, a.head_dim, i % a.head_dim);
    }
    __syncthreads();
    const float *q = a.q + (size_t)blockIdx.y * a.q_stride,
                *weights = a.weights ? a.weights + (size_t)blockIdx.y * a.weights_stride : NULL;
    uint32_t *out = a.scores + (size_t)blockIdx.y * a.n_lists * a.n_ctx + first + cell;
    float sum = 0;
    for (uint32_t h = part; h < a.n_heads; h += RFK_BLOCK / RFK_INDEX_CELLS) {
        float score = 0;
        for (uint32_t i = 0; i < a.head_dim; i++) score += q[(size_t)h * a.head_dim + i] * s.key[cell][i];
        if (a.n_lists > 1 && first + cell < n) out[(size_t)h * a.n_ctx] = rfk_index_key(score);
        sum += (weights ? weights[h] : 1.0f) * (score < 0 ? 0.0f : score);
    }
    if (a.n_lists > 1) return;
    s.part[part][cell] = sum;
    __syncthreads();
    if (part > 0 || first + cell >= n) return;
    for (uint32_t i = 1; i < RFK_BLOCK / RFK_INDEX_CELLS; i++) sum += s.part[i][cell];
    *out = rfk_index_key(sum);
}

struct rfk_choose_shared {
    uint32_t count[RFK_BLOCK], least, left; /* count: of keys with a digit, or of threads' blocks */
};
/* The score of a block of a list. */
RFK_DEVICE uint32_t rfk_index_block(const rfk_index_args &a, const uint32_t *scores, uint32_t b, uint32_t n,
                                    uint32_t end) {
    if (b + a.n_local >= n) return 0xffffffffu;
    if (a.whole || a.list_unit == 1) return scores[b];
    uint32_t best = 0;
    for (uint32_t i = b * a.list_unit; i < end && i < (b + 1) * a.list_unit; i++)
        if (scores[i] > best) best = scores[i];
    return best;
}
/* Lists: the score that the last of the best has is found digit by digit; then the ids are written in order.
 *   grid [n_lists, rows]   block 256 */
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_index_choose(rfk_index_args a) {
    RFK_SHARED(rfk_choose_shared, s);
    const uint32_t end = (uint32_t)a.rows[blockIdx.y].pos + 1, t = threadIdx.x;
    const uint32_t *scores = a.scores + ((size_t)blockIdx.y * a.n_lists + blockIdx.x) * a.n_ctx;
    int32_t *out = a.out + (size_t)blockIdx.y * a.out_stride + (size_t)blockIdx.x * a.n_listed;
    uint32_t n_best, least = 0, left = 0, written = 0;
    const uint32_t n = rfk_index_blocks(a, end, &n_best);
    const bool all = n <= n_best;
    left = n_best;
    for (int shift = 24; !all && n_best > 0 && shift >= 0; shift -= 8) {
        s.count[t] = 0;
        __syncthreads();
        for (uint32_t b = t; b < n; b += RFK_BLOCK) {
            const uint32_t key = rfk_index_block(a, scores, b, n, end);
            if (shift == 24 || key >> (shift + 8) == least >> (shift + 8)) atomicAdd(&s.count[key >> shift & 255], 1u);
        }
        __syncthreads();
        if (t == 0) {
            uint32_t digit = 255;
            for (; s.count[digit] < left; digit--) left -= s.count[digit];
            s.least = least | digit << shift;
            s.left = left;
        }
        __syncthreads();
        least = s.least, left = s.left;
    }
    uint32_t ties = 0; /* listed so far */
    for (uint32_t first = 0; first < n; first += RFK_BLOCK) { /* larger keys count 1, equal ones 2^16 */
        const uint32_t b = first + t;
        const uint32_t key = all || b >= n ? 0 : rfk_index_block(a, scores, b, n, end);
        const uint32_t mine = b >= n || (!all && (n_best == 0 || key < least)) ? 0 : all || key > least ? 1 : 1u << 16;
        __syncthreads();
        s.count[t] = mine;
        __syncthreads();
        for (uint32_t far = 1; far < RFK_BLOCK; far *= 2) {
            const uint32_t v = t >= far ? s.count[t - far] : 0;
            __syncthreads();
            s.count[t] += v;
            __syncthreads();
        }
        const uint32_t to = s.count[t], total = s.count[RFK_BLOCK - 1], room = left - ties;
        const uint32_t equal = (to - mine) >> 16, before = ((to - mine) & 0xffff) + (equal < room ? equal : room);
        if (mine == 1 || (mine && equal < room)) out[written + before] = (int32_t)b;
        const uint32_t now = total >> 16 < room ? total >> 16 : room;
        written += (total & 0xffff) + now;
        ties += now;
    }
    if (a.whole && end % a.list_unit && t == 0) out[written] = (int32_t)n;
    if (a.whole && end % a.list_unit) written++;
    for (uint32_t i = written + t; i < a.n_listed; i += RFK_BLOCK) out[i] = -1;
}

/* Combine the splits of a row and head.   grid [T, n_heads]   block 256 */
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_attention_join(rfk_attention_args a) {
    uint32_t n = (uint32_t)a.rows[blockIdx.x].pos / a.split_cells + 1;
    const float *part = a.part + ((size_t)blockIdx.x * a.n_heads + blockIdx.y) * a.max_splits * (a.head_dim_v + 2);
    float largest = -INFINITY;
    for (uint32_t i = 0; i < n; i++) largest = fmaxf(largest, part[i * (a.head_dim_v + 2) + a.head_dim_v]);
    for (uint32_t e = threadIdx.x; e < a.head_dim_v; e += RFK_BLOCK) {
        float sum = 0, total = 0;
        for (uint32_t i = 0; i < n; i++) {
            const float *p = part + i * (a.head_dim_v + 2);
            float weight = expf(p[a.head_dim_v] - largest);
            sum += weight * p[a.head_dim_v + 1];
            total += weight * p[e];
        }
        a.out[(size_t)blockIdx.x * a.out_stride + (size_t)blockIdx.y * a.head_dim_v + e] = total / sum;
    }
}

/* ---- many rows ----
 * Flash attention for prompts, on matrix units. A wave takes 16 queries of a group's heads through 32 positions at a
 * time; queries, scores, weights and sums stay in registers. Heads of more than 128 values are shared by 2 or 4 waves,
 * 128 values each, that add their scores in shared memory. With mma.sync, results are laid out as rows of its first
 * operand: scores are queries times keys. Elsewhere they are laid out as columns of the second operand, so all products
 * are transposed: keys times queries, values times weights.
 * Queries and weights are sums of two halves, as precise as floats. The units of gfx90a flush subnormal halves to zero:
 * so the lower half of a query counts 2^-11, and weights and their sum are scaled by 2^14, so that only negligible
 * values are subnormal. Keys and values of RF_CACHE_Q8_0 are sums of two halves, too. */

#define RFK_FLASH_CELLS 32 /* positions at a time */
#define RFK_FLASH_HEAD 512 /* head_dim at most, a multiple of 16 */
#define RFK_FLASH_PART(head) ((head) < 128 ? (head) : 128) /* values of a head that a wave takes */
#define RFK_FLASH_PARTS(head) ((head) / RFK_FLASH_PART(head))
#define RFK_FLASH_WAVES(head) ((head) > 128 ? 8 : 4)
/* of a block: all heads of a group for a few tokens */
#define RFK_FLASH_QUERIES(head) (16 * RFK_FLASH_WAVES(head) / RFK_FLASH_PARTS(head))
#define RFK_FLASH_LOWER 2048.0f
#define RFK_FLASH_WEIGHT 16384.0f
#define RFK_FLASH_WEIGHT_LOG2 14.0f
#define RFK_FLASH_NOTHING -1e30f /* the maximum before the first score */
#define RFK_LOG2_E 1.44269504088896341f /* weights are computed as 2^score */

/* Double buffering: a tile is copied while the previous one is multiplied. */
#if defined(RFK_NVIDIA) || defined(ROCMFORGE_HIP_EMU)
#define RFK_FLASH_DOUBLE_BUFFERED true
#else
#define RFK_FLASH_DOUBLE_BUFFERED false
#endif

/* Whether keys and values are two halves each. */
template <class KV> struct rfk_flash_halves { static const bool TWO = false; };
template <> struct rfk_flash_halves<rfk_q8> { static const bool TWO = true; };

template <int HEAD> struct rfk_flash_tile {
    static const int STRIDE = HEAD / 8 + 1; /* one word of padding: other banks */
    int4 k[RFK_FLASH_CELLS][STRIDE];
    int4 v[HEAD][5]; /* transposed: [dim][position]; as the keys for mma.sync, whose loads transpose */
};
/* Two buffers, or the upper and lower halves of one tile. */
template <class KV, int HEAD> struct rfk_flash_shared {
    static const bool DOUBLE_BUFFERED = RFK_FLASH_DOUBLE_BUFFERED && !rfk_flash_halves<KV>::TWO && HEAD <= 256;
    rfk_flash_tile<HEAD> tile[DOUBLE_BUFFERED || rfk_flash_halves<KV>::TWO ? 2 : 1];
    float scores[RFK_FLASH_PARTS(HEAD) > 1 ? RFK_FLASH_WAVES(HEAD) * 512 : 1]; /* [wave][16 * 32] of its values */
};

/* A wave's queries and their running state. A lane has results of one query, two with mma.sync. */
template <int WAVE, int HEAD> struct rfk_flash_wave {
    static const int DEPTH = RFK_FLASH_PART(HEAD) / 16;
    rfk_operand upper[DEPTH], lower[DEPTH]; /* on gfx11 `upper` holds both: rfk_flash_query_operands */
    float sum_of[DEPTH][256 / WAVE];
    float largest[2], sum[2];
    int32_t pos[2];         /* -1: not in this run */
    uint32_t row[2];        /* in the block, 0 to RFK_FLASH_QUERIES - 1 */
    uint32_t row16;         /* its first query */
    uint32_t from16;        /* its first value of a head, in units of 16 */
    uint32_t kv_head;
    int32_t lowest, highest; /* positions of its queries in this run; -1: none */
};

/* Whether products are transposed; which of a lane's queries result i belongs to; its place in the tile. */
RFK_DEVICE bool rfk_flash_transposed() { return RFK_MATRIX != RFK_MATRIX_SM80; }
RFK_DEVICE uint32_t rfk_flash_which(uint32_t i) { return rfk_flash_transposed() ? 0 : i % 4 / 2; }
RFK_DEVICE uint32_t rfk_flash_query(uint32_t lane, uint32_t which) {
    return rfk_flash_transposed() ? lane % 16 : lane / 4 + 8 * which;
}
template <int WAVE> RFK_DEVICE uint32_t rfk_flash_place(uint32_t lane, uint32_t i) {
    return rfk_flash_transposed() ? rfk_matrix_row(lane, RFK_ROW_INDEX(i), 256 / WAVE)
                              : rfk_matrix_col(lane, RFK_COL_INDEX(i));
}
/* Maximum and sum over the lanes that share a query: their indices differ in these bits. */
template <int WAVE> RFK_DEVICE float rfk_flash_top(float v) {
    if (!rfk_flash_transposed()) v = fmaxf(v, rfk_shuffle_xor<WAVE>(v, 1));
    v = fmaxf(v, rfk_shuffle_xor<WAVE>(v, rfk_flash_transposed() ? 16 : 2));
    return WAVE == 64 ? fmaxf(v, rfk_shuffle_xor<WAVE>(v, WAVE / 2)) : v;
}
template <int WAVE> RFK_DEVICE float rfk_flash_total(float v) {
    if (!rfk_flash_transposed()) v += rfk_shuffle_xor<WAVE>(v, 1);
    v += rfk_shuffle_xor<WAVE>(v, rfk_flash_transposed() ? 16 : 2);
    return WAVE == 64 ? v + rfk_shuffle_xor<WAVE>(v, WAVE / 2) : v;
}

/* The value of lane (own ^ 16) of a wave of 32. */
template <int WAVE> RFK_DEVICE int rfk_swap_halves(int v) {
#if defined(__GFX11__) || defined(__GFX12__)
    return (int)__builtin_amdgcn_permlanex16((uint32_t)v, (uint32_t)v, 0x76543210u, 0xfedcba98u, false, false);
#else
    return rfk_shuffle_xor<WAVE>(v, 16);
#endif
}

/* sum += queries (or weights) times keys (or values), transposed or not. */
template <int WAVE> RFK_DEVICE void rfk_flash_multiply(const rfk_operand &queries, const rfk_operand &y, float *sum) {
    if (rfk_flash_transposed()) rfk_mma_16bit<WAVE, 1, 1>(y, queries, sum);
    else rfk_mma_16bit<WAVE, 1, 1>(queries, y, sum);
}

/* Whether it is true in any lane of the wave. All lanes must take part. */
template <int WAVE> RFK_DEVICE bool rfk_any(bool mine) {
#if defined(RFK_NVIDIA)
    return __any_sync(0xffffffffu, mine);
#elif defined(ROCMFORGE_HIP_EMU)
    int any = mine;
    for (int mask = WAVE / 2; mask > 0; mask /= 2) any |= rfk_shuffle_xor<WAVE>(any, mask);
    return any != 0;
#else
    return __any(mine);
#endif
}

/* 2^x; subnormal results may be 0. */
RFK_DEVICE float rfk_exp2(float x) {
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

/* softcap * tanh(score / softcap), in few registers; scores and softcap are in units of log2(e). */
RFK_DEVICE float rfk_softcap_exp2(float score, float softcap, float twice_inverse) {
    return softcap - 2 * softcap / (exp2f(score * twice_inverse) + 1);
}

/* Two floats to halves, `low` in the low bits. */
RFK_DEVICE uint32_t rfk_pack_halves(float low, float high) {
#if defined(RFK_NVIDIA)
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&both);
#else
    return rfk_to_half(low) | (uint32_t)rfk_to_half(high) << 16;
#endif
}

/* The rounding errors of two halves, times scale, as halves. */
RFK_DEVICE uint32_t rfk_rest_halves(float a, float b, uint32_t upper, float scale) {
    return rfk_pack_halves((a - rfk_from_half((uint16_t)(upper & 0xffff))) * scale,
                           (b - rfk_from_half((uint16_t)(upper >> 16))) * scale);
}

/* Two values as two halves each: the rounded values, and the errors times scale. */
RFK_DEVICE void rfk_two_halves(float a, float b, float scale, int *upper, int *lower) {
    const uint32_t both = rfk_pack_halves(a, b);
    *upper = (int)both;
    *lower = (int)rfk_rest_halves(a, b, both, scale);
}

/* x, or 0 if its half would be subnormal: the lower half holds all of it then. */
RFK_DEVICE float rfk_flash_normal(float x) { return fabsf(x) < 6.103515625e-5f ? 0.0f : x; }

/* Eight values of a row as halves, or as sums of two. */
RFK_DEVICE void rfk_flash_chunk(const uint16_t *row, uint32_t dim, uint32_t chunk, int4 *upper, int4 *lower) {
    (void)dim, (void)lower;
    *upper = reinterpret_cast<const int4 *>(row)[chunk];
}
RFK_DEVICE void rfk_flash_chunk(const rfk_q8 *row, uint32_t dim, uint32_t chunk, int4 *upper, int4 *lower) {
    float x[8];
    rfk_kv_values8(row, dim, 8 * chunk, x);
    rfk_two_halves(x[0], x[1], RFK_FLASH_LOWER, &upper->x, &lower->x);
    rfk_two_halves(x[2], x[3], RFK_FLASH_LOWER, &upper->y, &lower->y);
    rfk_two_halves(x[4], x[5], RFK_FLASH_LOWER, &upper->z, &lower->z);
    rfk_two_halves(x[6], x[7], RFK_FLASH_LOWER, &upper->w, &lower->w);
}

/* Transpose: store eight values of a position in their dims. */
RFK_DEVICE void rfk_flash_transpose(int4 (*to)[5], uint32_t chunk, uint32_t cell, const int4 &x) {
    const int words[4] = {x.x, x.y, x.z, x.w};
    RFK_UNROLL(4)
    for (uint32_t e = 0; e < 4; e++) {
        reinterpret_cast<uint16_t *>(to[8 * chunk + 2 * e])[cell] = (uint16_t)((uint32_t)words[e] & 0xffff);
        reinterpret_cast<uint16_t *>(to[8 * chunk + 2 * e + 1])[cell] = (uint16_t)((uint32_t)words[e] >> 16);
    }
}

/* The nearest position in [first, end). */
RFK_DEVICE uint32_t rfk_flash_cell(uint32_t cell, uint32_t first, uint32_t end) {
    cell = cell < end ? cell : end - 1;
    return cell > first ? cell : first;
}

/* Load keys and values of 32 positions into shared memory, those outside [first, end) from the nearest in it: their
 * weights are 0, but their cells may hold NaN. */
template <int THREADS, class KV, int HEAD>
RFK_DEVICE void rfk_flash_fetch(rfk_flash_tile<HEAD> *tile, const KV *k, const KV *v, uint32_t dim, uint32_t first,
                                uint32_t end) {
    const uint32_t chunks = HEAD / 8, STRIDE = rfk_flash_tile<HEAD>::STRIDE, chunk = threadIdx.x % chunks;
    RFK_UNROLL(4)
    for (uint32_t j = 0; chunk < dim / 8 && j < RFK_FLASH_CELLS * chunks / THREADS; j++) {
        const uint32_t cell = threadIdx.x / chunks + j * (THREADS / chunks), from = rfk_flash_cell(cell, first, end);
        const KV *key = rfk_kv_row(k, from, dim), *value = rfk_kv_row(v, from, dim);
        if (!rfk_flash_halves<KV>::TWO) {
            rfk_copy16(&tile->k[cell][chunk], reinterpret_cast<const int4 *>(key) + chunk);
            if (!rfk_flash_transposed())
                rfk_copy16(&tile->v[0][0] + cell * STRIDE + chunk, reinterpret_cast<const int4 *>(value) + chunk);
            continue;
        }
        int4 upper, lower;
        rfk_schedule_fence();
        rfk_flash_chunk(key, dim, chunk, &tile[0].k[cell][chunk], &tile[1].k[cell][chunk]);
        if (rfk_flash_transposed()) continue;
        rfk_flash_chunk(value, dim, chunk, &upper, &lower);
        (&tile[0].v[0][0])[cell * STRIDE + chunk] = upper;
        (&tile[1].v[0][0])[cell * STRIDE + chunk] = lower;
    }
    RFK_UNROLL(1)
    for (uint32_t i = threadIdx.x; rfk_flash_transposed() && i < RFK_FLASH_CELLS * (dim / 8); i += THREADS) {
        const uint32_t cell = i % RFK_FLASH_CELLS, part = i / RFK_FLASH_CELLS;
        int4 upper, lower;
        rfk_schedule_fence();
        rfk_flash_chunk(rfk_kv_row(v, rfk_flash_cell(cell, first, end), dim), dim, part, &upper, &lower);
        rfk_flash_transpose(tile[0].v, part, cell, upper);
        if (rfk_flash_halves<KV>::TWO) rfk_flash_transpose(tile[1].v, part, cell, lower);
    }
#if defined(RFK_NVIDIA)
    __syncwarp(); /* the next products need all lanes together */
#endif
}

/* An operand: values of 16 positions, 16 * half on, and 16 dims. */
template <int HEAD>
RFK_DEVICE void rfk_flash_values(rfk_operand &o, const rfk_flash_tile<HEAD> &tile, uint32_t half, uint32_t dims,
                                 uint32_t lane) {
    const int STRIDE = rfk_flash_tile<HEAD>::STRIDE;
    if (rfk_flash_transposed()) return rfk_load_rows<5, true>(o, tile.v[16 * dims], half, lane);
    const int4 *values = &tile.v[0][0] + 16 * half * STRIDE + 2 * dims;
    (void)values;
    o.rows = NULL;
#if defined(RFK_SM80)
    const int4 *from = values + lane / 16 + lane % 16 * STRIDE;
    uint32_t address = (uint32_t)__cvta_generic_to_shared(from);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(o.r[0]), "=r"(o.r[1]), "=r"(o.r[2]), "=r"(o.r[3])
                 : "r"(address));
#elif defined(ROCMFORGE_HIP_EMU)
    for (uint32_t i = 0; i < 4; i++) {
        const uint16_t *value =
            reinterpret_cast<const uint16_t *>(values + (i % 2 * 8 + lane % 4 * 2) * STRIDE) + i / 2 * 8 + lane / 4;
        o.r[i] = (int)(value[0] | (uint32_t)value[8 * STRIDE] << 16);
    }
#endif
}

/* Load a wave's queries as operands; the lower halves count 1 / lower_scale. */
template <int WAVE, int HEAD>
RFK_DEVICE void rfk_flash_queries(rfk_flash_wave<WAVE, HEAD> &w, const rfk_attention_args &a, uint32_t row0,
                                  uint32_t last, float lower_scale) {
    const uint32_t kind = RFK_MATRIX, group = a.n_heads / a.n_kv_heads, lane = threadIdx.x % WAVE,
                   words = kind == RFK_MATRIX_WMMA11 ? 8 : 128 / WAVE,
                   first = kind == RFK_MATRIX_SM80     ? lane % 4 * 2
                           : kind == RFK_MATRIX_WMMA11 ? 0
                                                       : lane / 16 * (2 * words);
    const float *q[2];
    float scale[2];
    RFK_UNROLL(2)
    for (int n = 0; n < 2; n++) { /* missing queries are zero */
        const uint32_t t = row0 + w.row[n] / group;
        const bool inside = t < last && w.row[n] < a.rows_per_block * group;
        q[n] = a.q + (size_t)(inside ? t : row0) * a.q_stride +
               (size_t)(w.kv_head * group + w.row[n] % group) * a.head_dim;
        scale[n] = inside ? a.scale * RFK_LOG2_E * rfk_temperature(a, a.rows[t].pos) : 0.0f;
    }
    RFK_UNROLL(8)
    for (uint32_t g = 0; g < (uint32_t)w.DEPTH; g++) {
        const uint32_t value = 16 * (w.from16 + g);
        w.upper[g].rows = w.lower[g].rows = NULL; /* units do not read them */
        RFK_UNROLL(8)
        for (uint32_t i = 0; i < 8; i++) {
            if (i >= words) continue;
            const uint32_t n = kind == RFK_MATRIX_SM80 ? i % 2 : 0, from = value < a.head_dim ? value : 0,
                           at = from + first + (kind == RFK_MATRIX_SM80 ? i / 2 * 8 : 2 * i);
            const float factor = value < a.head_dim ? scale[n] : 0.0f;
            const float x0 = factor * q[n][at], x1 = factor * q[n][at + 1];
            const uint32_t upper = rfk_pack_halves(rfk_flash_normal(x0), rfk_flash_normal(x1));
            w.upper[g].r[i] = (int)upper;
            w.lower[g].r[i] = (int)rfk_rest_halves(x0, x1, upper, lower_scale);
            if (kind == RFK_MATRIX_WMMA11 && lane >= 16) w.upper[g].r[i] = w.lower[g].r[i];
        }
        rfk_schedule_fence();
    }
}

/* Operands of the queries' values 16 g on. On gfx11 lanes would hold them twice, for which there are no registers:
 * lanes 0 to 15 hold the upper halves, the others the lower ones. */
template <int WAVE, int HEAD>
RFK_DEVICE void rfk_flash_query_operands(const rfk_flash_wave<WAVE, HEAD> &w, uint32_t g, rfk_operand &upper,
                               rfk_operand &lower) {
    const bool first = threadIdx.x % WAVE < 16;
    upper = w.upper[g];
    lower = w.lower[g];
    RFK_UNROLL(8)
    for (int i = 0; RFK_MATRIX == RFK_MATRIX_WMMA11 && i < 8; i++) {
        const int mine = w.upper[g].r[i], other = rfk_swap_halves<WAVE>(mine);
        upper.r[i] = first ? mine : other;
        lower.r[i] = first ? other : mine;
    }
}

/* Weights of 16 positions as an operand. A unit's results, packed in pairs, are one already, but on gfx11 lanes have
 * every other position and need all. */
template <int WAVE> RFK_DEVICE void rfk_flash_weights(rfk_operand &o, const int *words, uint32_t lane) {
    o.rows = NULL;
    RFK_UNROLL(4)
    for (int i = 0; i < 128 / WAVE; i++) {
        if (RFK_MATRIX != RFK_MATRIX_WMMA11) {
            o.r[i] = words[i];
            continue;
        }
        const int other = rfk_swap_halves<WAVE>(words[i]);
        const uint32_t even = (uint32_t)(lane < 16 ? words[i] : other), odd = (uint32_t)(lane < 16 ? other : words[i]);
        o.r[2 * i] = (int)((even & 0xffff) | odd << 16);
        o.r[2 * i + 1] = (int)(even >> 16 | (odd & 0xffff0000u));
    }
}

/* Products of the queries with the keys of a tile, over the wave's values of a head. */
template <int WAVE, class KV, int HEAD>
RFK_DEVICE void rfk_flash_products(const rfk_flash_wave<WAVE, HEAD> &w, const rfk_flash_tile<HEAD> *tile,
                                   float (&x)[2][256 / WAVE]) {
    const int N = 256 / WAVE, STRIDE = rfk_flash_tile<HEAD>::STRIDE;
    const uint32_t lane = threadIdx.x % WAVE;
    rfk_operand y[2];
    float low[2][N];
    RFK_UNROLL(8)
    for (int i = 0; i < N; i++) x[0][i] = x[1][i] = low[0][i] = low[1][i] = 0;
    RFK_UNROLL(8)
    for (uint32_t g = 0; g < (uint32_t)w.DEPTH; g++) { /* consecutive products add to different sums */
        rfk_operand upper, lower;
        rfk_schedule_fence();
        rfk_flash_query_operands(w, g, upper, lower);
        RFK_UNROLL(2)
        for (int h = 0; h < 2; h++) rfk_load_columns<STRIDE, true>(y[h], tile[0].k[16 * h], w.from16 + g, lane);
        RFK_UNROLL(2)
        for (int h = 0; h < 2; h++) rfk_flash_multiply<WAVE>(upper, y[h], x[h]);
        RFK_UNROLL(2)
        for (int h = 0; h < 2; h++) rfk_flash_multiply<WAVE>(lower, y[h], low[h]);
        if (!rfk_flash_halves<KV>::TWO) continue;
        rfk_schedule_fence();
        RFK_UNROLL(2)
        for (int h = 0; h < 2; h++) rfk_load_columns<STRIDE, true>(y[h], tile[1].k[16 * h], w.from16 + g, lane);
        RFK_UNROLL(2)
        for (int h = 0; h < 2; h++) rfk_flash_multiply<WAVE>(upper, y[h], low[h]);
    }
    RFK_UNROLL(2)
    for (int h = 0; h < 2; h++)
        RFK_UNROLL(8)
        for (int i = 0; i < N; i++) x[h][i] += low[h][i] * (1 / RFK_FLASH_LOWER);
}

/* The sums of the products of the waves that share queries, in each of them. All waves take part. */
template <int WAVE, int HEAD> RFK_DEVICE void rfk_flash_sum(float *scores, float (&x)[2][256 / WAVE]) {
    const uint32_t N = 256 / WAVE, PARTS = RFK_FLASH_PARTS(HEAD), lane = threadIdx.x % WAVE,
                   wave = threadIdx.x / WAVE, first = wave / PARTS * PARTS;
    RFK_UNROLL(2)
    for (uint32_t h = 0; h < 2; h++)
        RFK_UNROLL(8)
        for (uint32_t i = 0; i < N; i++) scores[512 * wave + (N * h + i) * WAVE + lane] = x[h][i];
    __syncthreads();
    RFK_UNROLL(2)
    for (uint32_t h = 0; h < 2; h++)
        RFK_UNROLL(8)
        for (uint32_t i = 0; i < N; i++) {
            x[h][i] = 0;
            RFK_UNROLL(4)
            for (uint32_t p = 0; p < PARTS; p++) x[h][i] += scores[512 * (first + p) + (N * h + i) * WAVE + lane];
        }
}

/* Products with the positions from cell0 on to scores, in units of log2(e): caps, ALiBi, and what is not visible. */
template <int WAVE, int HEAD>
RFK_DEVICE void rfk_flash_scores(const rfk_flash_wave<WAVE, HEAD> &w, const rfk_attention_args &a, uint32_t cell0,
                                 float (&x)[2][256 / WAVE]) {
    const int N = 256 / WAVE;
    const uint32_t lane = threadIdx.x % WAVE;
    if (a.softcap != 0) {
        RFK_UNROLL(2)
        for (int h = 0; h < 2; h++)
            RFK_UNROLL(8)
            for (int i = 0; i < N; i++)
                x[h][i] = rfk_softcap_exp2(x[h][i], a.softcap * RFK_LOG2_E, 2 / a.softcap);
    }
    const int32_t end = (int32_t)cell0 + RFK_FLASH_CELLS;
    if (!a.slopes && end <= w.lowest + 1 && (a.window == 0 || w.highest - (int32_t)cell0 < (int32_t)a.window)) return;
    float slope[2] = {0, 0};
    RFK_UNROLL(2)
    for (uint32_t n = 0; a.slopes && n < 2; n++) {
        const uint32_t group = a.n_heads / a.n_kv_heads;
        slope[n] = RFK_LOG2_E * a.slopes[w.kv_head * group + w.row[n] % group];
    }
    RFK_UNROLL(2)
    for (uint32_t h = 0; h < 2; h++)
        RFK_UNROLL(8)
        for (uint32_t i = 0; i < (uint32_t)N; i++) {
            const uint32_t n = rfk_flash_which(i);
            const int32_t ago = w.pos[n] - (int32_t)(cell0 + 16 * h + rfk_flash_place<WAVE>(lane, i));
            x[h][i] -= slope[n] * (float)ago;
            if (ago < 0 || (a.window && (uint32_t)ago >= a.window)) x[h][i] = -INFINITY;
        }
}

/* Weights of 16 positions as two halves, and scaled ones for the lower halves of values. */
struct rfk_flash_operands {
    rfk_operand upper, lower, small;
};

/* Scores of 16 positions to weights 2^(score - less), as operands. */
template <int WAVE, class KV>
RFK_DEVICE void rfk_flash_weigh(rfk_flash_operands &o, const float (&x)[256 / WAVE], const float (&less)[2],
                                float (&sum)[2]) {
    const uint32_t lane = threadIdx.x % WAVE;
    int words[3][4];
    RFK_UNROLL(4)
    for (uint32_t i = 0; i < 128 / WAVE; i++) {
        const uint32_t n = rfk_flash_which(2 * i);
        const float p0 = rfk_exp2(x[2 * i] - less[n]), p1 = rfk_exp2(x[2 * i + 1] - less[n]);
        sum[n] += p0 + p1;
        rfk_two_halves(p0, p1, 1.0f, &words[0][i], &words[1][i]);
        if (rfk_flash_halves<KV>::TWO)
            words[2][i] = (int)rfk_pack_halves(p0 * (1 / RFK_FLASH_LOWER), p1 * (1 / RFK_FLASH_LOWER));
    }
    rfk_flash_weights<WAVE>(o.upper, words[0], lane);
    rfk_flash_weights<WAVE>(o.lower, words[1], lane);
    if (rfk_flash_halves<KV>::TWO) rfk_flash_weights<WAVE>(o.small, words[2], lane);
}

/* Add weights times values of 16 positions. */
template <int WAVE, class KV, int HEAD>
RFK_DEVICE void rfk_flash_add(rfk_flash_wave<WAVE, HEAD> &w, const rfk_flash_tile<HEAD> *tile, uint32_t h,
                              const rfk_flash_operands &o) {
    const uint32_t lane = threadIdx.x % WAVE, DIMS = 2; /* consecutive products add to different sums */
    RFK_UNROLL(4)
    for (uint32_t d0 = 0; d0 < (uint32_t)w.DEPTH; d0 += DIMS) {
        rfk_operand y[DIMS];
        rfk_schedule_fence();
        RFK_UNROLL(2)
        for (uint32_t d = 0; d < DIMS; d++) rfk_flash_values(y[d], tile[0], h, w.from16 + d0 + d, lane);
        RFK_UNROLL(2)
        for (uint32_t d = 0; d < DIMS; d++) rfk_flash_multiply<WAVE>(o.upper, y[d], w.sum_of[d0 + d]);
        RFK_UNROLL(2)
        for (uint32_t d = 0; d < DIMS; d++) rfk_flash_multiply<WAVE>(o.lower, y[d], w.sum_of[d0 + d]);
        if (!rfk_flash_halves<KV>::TWO) continue;
        RFK_UNROLL(2)
        for (uint32_t d = 0; d < DIMS; d++) rfk_flash_values(y[d], tile[1], h, w.from16 + d0 + d, lane);
        RFK_UNROLL(2)
        for (uint32_t d = 0; d < DIMS; d++) rfk_flash_multiply<WAVE>(o.small, y[d], w.sum_of[d0 + d]);
    }
}

/* A wave's step over a tile whose products are x: scores, online softmax, weighted sums of values. */
template <int WAVE, class KV, int HEAD>
RFK_DEVICE void rfk_flash_step(rfk_flash_wave<WAVE, HEAD> &w, const rfk_flash_tile<HEAD> *tile,
                               const rfk_attention_args &a, uint32_t cell0, float (&x)[2][256 / WAVE]) {
    const int N = 256 / WAVE;
    float keep[2], less[2];
    rfk_flash_scores<WAVE>(w, a, cell0, x);
    RFK_UNROLL(2)
    for (uint32_t n = 0; n < 2; n++) {
        if (n == 1 && rfk_flash_transposed()) continue;
        float top = w.largest[n];
        RFK_UNROLL(2)
        for (int h = 0; h < 2; h++)
            RFK_UNROLL(8)
            for (uint32_t i = 0; i < (uint32_t)N; i++)
                if (rfk_flash_which(i) == n) top = fmaxf(top, x[h][i]);
        top = rfk_flash_top<WAVE>(top);
        keep[n] = rfk_exp2(w.largest[n] - top);
        w.largest[n] = top;
        less[n] = top - RFK_FLASH_WEIGHT_LOG2;
        w.sum[n] *= keep[n];
    }
    if (rfk_any<WAVE>(keep[0] != 1 || (!rfk_flash_transposed() && keep[1] != 1))) {
        RFK_UNROLL(8)
        for (int d = 0; d < w.DEPTH; d++)
            RFK_UNROLL(8)
            for (uint32_t i = 0; i < (uint32_t)N; i++) w.sum_of[d][i] *= keep[rfk_flash_which(i)];
    }
    RFK_UNROLL(2)
    for (uint32_t h = 0; h < 2; h++) {
        rfk_flash_operands o;
        rfk_flash_weigh<WAVE, KV>(o, x[h], less, w.sum);
        rfk_flash_add<WAVE, KV>(w, tile, h, o);
    }
}

/* Begin a run of rows [row, end) of one sequence: positions of the wave's queries, empty sums. */
template <int WAVE, int HEAD>
RFK_DEVICE void rfk_flash_begin(rfk_flash_wave<WAVE, HEAD> &w, const rfk_attention_args &a, uint32_t row0, uint32_t row,
                                uint32_t end) {
    const uint32_t lane = threadIdx.x % WAVE, group = a.n_heads / a.n_kv_heads;
    uint32_t low = row0 + w.row16 / group, high = row0 + (w.row16 + 15) / group;
    const bool some = low < end && high >= row && w.row16 < a.rows_per_block * group;
    low = low > row ? low : row;
    high = high < end ? high : end - 1;
    w.lowest = some ? a.rows[low].pos : -1;
    w.highest = some ? a.rows[high].pos : -1;
    RFK_UNROLL(2)
    for (int n = 0; n < 2; n++) {
        const uint32_t t = row0 + w.row[n] / group;
        const bool inside = t >= row && t < end && w.row[n] < a.rows_per_block * group;
        const bool first = (rfk_flash_transposed() ? lane / 16 : lane % 4) == 0; /* of the lanes that share it */
        w.pos[n] = inside ? a.rows[t].pos : -1;
        w.largest[n] = RFK_FLASH_NOTHING;
        w.sum[n] = 0;
        if (!a.sinks || !inside) continue;
        const uint32_t query_head = rfk_computed_here_amd(w.kv_head * group + w.row[n] % group);
        w.largest[n] = fmaxf(RFK_LOG2_E * rfk_load_any(a.sinks, a.sinks_type, query_head), RFK_FLASH_NOTHING);
        w.sum[n] = first ? RFK_FLASH_WEIGHT : 0.0f;
    }
    RFK_UNROLL(8)
    for (int d = 0; d < w.DEPTH; d++)
        RFK_UNROLL(8)
        for (int i = 0; i < 256 / WAVE; i++) w.sum_of[d][i] = 0;
}

/* Store the results of a run. */
template <int WAVE, int HEAD>
RFK_DEVICE void rfk_flash_end(rfk_flash_wave<WAVE, HEAD> &w, const rfk_attention_args &a, uint32_t row0) {
    const uint32_t lane = threadIdx.x % WAVE, group = a.n_heads / a.n_kv_heads;
    float *out[2];
    RFK_UNROLL(2)
    for (int n = 0; n < 2; n++) {
        w.sum[n] = 1 / rfk_flash_total<WAVE>(w.sum[n]);
        out[n] = w.pos[n] < 0 ? NULL
                              : a.out + (size_t)(row0 + w.row[n] / group) * a.out_stride +
                                    (size_t)(w.kv_head * group + w.row[n] % group) * a.head_dim;
    }
    RFK_UNROLL(8)
    for (uint32_t d = 0; d < (uint32_t)w.DEPTH; d++)
        RFK_UNROLL(8)
        for (uint32_t i = 0; i < 256 / WAVE; i++) {
            const uint32_t n = rfk_flash_which(i), value = 16 * (w.from16 + d);
            if (out[n] && value < a.head_dim)
                out[n][value + rfk_flash_place<WAVE>(lane, i)] = w.sum_of[d][i] * w.sum[n];
        }
}

/* The end of the run of rows of one sequence that begins at `row`. */
template <int WAVE>
RFK_DEVICE uint32_t rfk_flash_run_end(const rf_step_row *rows, uint32_t row, uint32_t last, uint32_t lane) {
    uint32_t end = last;
    for (uint32_t t = row + 1 + lane; t < last; t += WAVE)
        if (rows[t].seq != rows[row].seq && t < end) end = t;
    RFK_UNROLL(6)
    for (int mask = WAVE / 2; mask > 0; mask /= 2) {
        const uint32_t other = rfk_shuffle_xor<WAVE>(end, mask);
        end = other < end ? other : end;
    }
    return end;
}

/* grid n_kv_heads * ceil(T / rows_per_block)   block RFK_FLASH_WAVES waves   LDS up to 91 KiB
 * rows_per_block = RFK_FLASH_QUERIES / heads of a group
 * A block reads the keys and values of its sequence that a row of it sees. Blocks with most of them, those of the last
 * rows, come first; from block a.reverse_from on those with fewest, to share a multiprocessor with the first ones. */
template <int WAVE, class KV, int HEAD>
static __global__ void RFK_THREADS(RFK_FLASH_WAVES(HEAD) * WAVE) rfk_flash(rfk_attention_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    if (!RFK_HAS_UNITS || (rfk_flash_halves<KV>::TWO && !RFK_UNITS_F16)) return; /* never launched */
    rfk_wait_previous();
    typedef rfk_flash_shared<KV, HEAD> rfk_shared;
    RFK_DYNAMIC(int4, memory);
    rfk_shared &s = *reinterpret_cast<rfk_shared *>(memory);
    const int THREADS = RFK_FLASH_WAVES(HEAD) * WAVE, PARTS = RFK_FLASH_PARTS(HEAD);
    const uint32_t lane = threadIdx.x % WAVE, dim = a.head_dim, blocks = gridDim.x / a.n_kv_heads,
                   place = blockIdx.x < a.reverse_from ? blockIdx.x : gridDim.x - 1 - (blockIdx.x - a.reverse_from),
                   row0 = (blocks - 1 - place / a.n_kv_heads) * a.rows_per_block,
                   last = row0 + a.rows_per_block < a.n_rows ? row0 + a.rows_per_block : a.n_rows;
    rfk_flash_wave<WAVE, HEAD> w;
    w.kv_head = place % a.n_kv_heads;
    w.row16 = threadIdx.x / WAVE / PARTS * 16;
    w.from16 = threadIdx.x / WAVE % PARTS * w.DEPTH;
    for (uint32_t n = 0; n < 2; n++) w.row[n] = w.row16 + rfk_flash_query(lane, n);
    rfk_flash_queries(w, a, row0, last, RFK_FLASH_LOWER);
    const int4 zero = {0, 0, 0, 0};
    for (uint32_t i = threadIdx.x; dim < HEAD && i < RFK_FLASH_CELLS * HEAD / 8; i += THREADS)
        for (size_t t = 0; i % (HEAD / 8) >= dim / 8 && t < sizeof s.tile / sizeof *s.tile; t++)
            s.tile[t].k[i / (HEAD / 8)][i % (HEAD / 8)] = zero;
    for (uint32_t row = row0, end; row < last; row = end) {
        end = rfk_flash_run_end<WAVE>(a.rows, row, last, lane);
        const size_t head = ((size_t)a.rows[row].seq * a.n_kv_heads + w.kv_head) * a.n_cells;
        const KV *k = rfk_kv_row((const KV *)a.k, head, dim), *v = rfk_kv_row((const KV *)a.v, head, dim);
        const uint32_t length = (uint32_t)a.rows[end - 1].pos + 1;
        uint32_t seen = (uint32_t)a.rows[row].pos + 1, tile = 0; /* the first position that any row of the run sees */
        seen = a.window && seen > a.window ? seen - a.window : 0;
        /* tiles begin at multiples of 32, also in a ring buffer */
        uint32_t cell0 = seen / RFK_FLASH_CELLS * RFK_FLASH_CELLS, at = cell0 % a.n_cells;
        if (rfk_shared::DOUBLE_BUFFERED) {
            __syncthreads();
            rfk_flash_fetch<THREADS>(s.tile, rfk_kv_row(k, at, dim), rfk_kv_row(v, at, dim), dim, seen - cell0,
                                          length - cell0);
        }
        rfk_flash_begin(w, a, row0, row, end);
        for (; cell0 < length; cell0 += RFK_FLASH_CELLS) {
            if (!rfk_shared::DOUBLE_BUFFERED) {
                const uint32_t first = seen > cell0 ? seen - cell0 : 0;
                __syncthreads();
                rfk_flash_fetch<THREADS>(s.tile, rfk_kv_row(k, at, dim), rfk_kv_row(v, at, dim), dim, first,
                                              length - cell0);
            }
            rfk_wait_copies();
            __syncthreads();
            const uint32_t next = cell0 + RFK_FLASH_CELLS;
            at = at + RFK_FLASH_CELLS < a.n_cells ? at + RFK_FLASH_CELLS : 0;
            if (rfk_shared::DOUBLE_BUFFERED && next < length) {
                rfk_flash_fetch<THREADS>(s.tile + 1 - tile, rfk_kv_row(k, at, dim), rfk_kv_row(v, at, dim), dim, 0u,
                                              length - next);
            }
            float x[2][256 / WAVE];
            const bool sees = (int32_t)cell0 <= w.highest &&
                              (a.window == 0 || w.lowest - (int32_t)next < (int32_t)a.window - 1);
            if (sees) rfk_flash_products<WAVE, KV>(w, s.tile + tile, x);
            if (PARTS > 1) rfk_flash_sum<WAVE, HEAD>(s.scores, x);
            if (sees) rfk_flash_step<WAVE, KV>(w, s.tile + tile, a, cell0, x);
            if (rfk_shared::DOUBLE_BUFFERED) tile = 1 - tile;
        }
        rfk_flash_end(w, a, row0);
    }
}

/* ---- many rows, by wgmma ----
 * The same for heads of up to 128 values in halves: two warpgroups of 64 queries each take 64 positions at a time.
 * Their units keep subnormal halves: both halves of a query add to the same sum. */

#define RFK_FLASH_WGMMA_CELLS 64u
#define RFK_FLASH_WGMMA_HEAD 128
#define RFK_FLASH_WGMMA_QUERIES 128u
struct rfk_flash_panel { /* 64 values of a head each, rfk_swizzled */
    int4 k[2][RFK_FLASH_WGMMA_CELLS][8], v[2][RFK_FLASH_WGMMA_CELLS][8];
};
#define RFK_FLASH_WGMMA_BYTES ((uint32_t)(2 * sizeof(rfk_flash_panel)) + 1024)

#if defined(RFK_HAS_WGMMA)
#if defined(ROCMFORGE_HIP_EMU)
template <int N> RFK_DEVICE void rfk_wgmma_done(float *) {}
/* Two halves of a panel's position, adjacent values. */
RFK_DEVICE int rfk_panel_word(const int4 (*panel)[8], uint32_t cell, uint32_t value) {
    return reinterpret_cast<const int *>(&panel[cell][rfk_swizzled(cell, value / 8)])[value % 8 / 2];
}
RFK_DEVICE void rfk_wgmma_keys(float *sum, const rfk_operand &q, const int4 (*k)[8], uint32_t step) {
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t n = 0; n < 8; n++) {
        int b[2];
        for (uint32_t j = 0; j < 2; j++) b[j] = rfk_panel_word(k, 8 * n + lane / 4, 16 * step + lane % 4 * 2 + 8 * j);
        hip_emu_mma_m16n8k16_f16(sum + 4 * n, q.r, b);
    }
}
RFK_DEVICE void rfk_wgmma_values(float *sum, const rfk_operand &p, const int4 (*v)[8], uint32_t cell0) {
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t n = 0; n < 16; n++) {
        const uint32_t value = n % 8 * 8 + lane / 4;
        int b[2] = {0, 0};
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t word = (uint32_t)rfk_panel_word(v + n / 8 * RFK_FLASH_WGMMA_CELLS,
                                                           cell0 + lane % 4 * 2 + j / 2 * 8 + j % 2, value / 2 * 2);
            b[j / 2] |= (int)((value % 2 ? word >> 16 : word & 0xffff) << 16 * (j % 2));
        }
        hip_emu_mma_m16n8k16_f16(sum + 4 * n, p.r, b);
    }
}
#else
/* Results of products that are complete; not before, for the compiler. */
template <int N> RFK_DEVICE void rfk_wgmma_done(float *sum) {
    RFK_UNROLL(8)
    for (int i = 0; i < N; i += 8) asm volatile("" : RFK_WGMMA_8(sum + i)::"memory");
}
/* sum += 64 queries times 64 keys over 16 values, asynchronously. */
RFK_DEVICE void rfk_wgmma_keys(float *sum, const rfk_operand &q, const int4 (*k)[8], uint32_t step) {
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                 : RFK_WGMMA_8(sum), RFK_WGMMA_8(sum + 8), RFK_WGMMA_8(sum + 16), RFK_WGMMA_8(sum + 24)
                 : "r"(q.r[0]), "r"(q.r[1]), "r"(q.r[2]), "r"(q.r[3]), "l"(rfk_wgmma_matrix(&k[0][2 * step])), "r"(1));
}
/* sum += 64 weights times 128 values of 16 positions, asynchronously: the operand is transposed, its two panels are
 * the descriptor's leading dimension. */
RFK_DEVICE void rfk_wgmma_values(float *sum, const rfk_operand &p, const int4 (*v)[8], uint32_t cell0) {
    const uint64_t operand = (rfk_wgmma_matrix(v[cell0]) & ~((uint64_t)0x3fff << 16)) |
                             (uint64_t)(RFK_FLASH_WGMMA_CELLS * 128 >> 4) << 16;
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
                 : RFK_WGMMA_64(sum)
                 : "r"(p.r[0]), "r"(p.r[1]), "r"(p.r[2]), "r"(p.r[3]), "l"(operand), "r"(1));
}
#endif

/* Copy keys and values of 64 positions, those outside [first, end) from the nearest in it. */
RFK_DEVICE void rfk_panel_fetch(rfk_flash_panel &to, const uint16_t *k, const uint16_t *v, uint32_t dim, uint32_t first,
                                uint32_t end) {
    const uint32_t chunk = threadIdx.x % 16;
    RFK_UNROLL(4)
    for (uint32_t j = 0; chunk < dim / 8 && j < RFK_FLASH_WGMMA_CELLS / 16; j++) {
        const uint32_t cell = threadIdx.x / 16 + 16 * j, from = rfk_flash_cell(cell, first, end),
                       word = rfk_swizzled(cell, chunk % 8);
        rfk_copy16(&to.k[chunk / 8][cell][word], reinterpret_cast<const int4 *>(k + (size_t)from * dim) + chunk);
        rfk_copy16(&to.v[chunk / 8][cell][word], reinterpret_cast<const int4 *>(v + (size_t)from * dim) + chunk);
    }
}

/* A warpgroup's step over 64 positions. */
RFK_DEVICE void rfk_panel_step(rfk_flash_wave<32, RFK_FLASH_WGMMA_HEAD> &w, const rfk_flash_panel &panel,
                               const rfk_attention_args &a, uint32_t cell0) {
    float x[2][2][8], keep[2], less[2], *scores = x[0][0], *sums = w.sum_of[0];
    RFK_UNROLL(32)
    for (int i = 0; i < 32; i++) scores[i] = 0;
    rfk_wgmma_fence();
    RFK_UNROLL(8)
    for (uint32_t g = 0; g < 8; g++) {
        rfk_wgmma_keys(scores, w.upper[g], panel.k[g / 4], g % 4);
        rfk_wgmma_keys(scores, w.lower[g], panel.k[g / 4], g % 4);
    }
    rfk_wgmma_commit();
    rfk_wgmma_wait<0>();
    rfk_wgmma_done<32>(scores);
    RFK_UNROLL(2)
    for (uint32_t h = 0; h < 2; h++) rfk_flash_scores<32>(w, a, cell0 + RFK_FLASH_CELLS * h, x[h]);
    RFK_UNROLL(2)
    for (uint32_t n = 0; n < 2; n++) {
        float top = w.largest[n];
        RFK_UNROLL(32)
        for (uint32_t i = 0; i < 32; i++)
            if (i % 4 / 2 == n) top = fmaxf(top, scores[i]);
        top = rfk_flash_top<32>(top);
        keep[n] = rfk_exp2(w.largest[n] - top);
        w.largest[n] = top;
        less[n] = top - RFK_FLASH_WEIGHT_LOG2;
        w.sum[n] *= keep[n];
    }
    if (rfk_any<32>(keep[0] != 1 || keep[1] != 1)) {
        RFK_UNROLL(64)
        for (uint32_t i = 0; i < 64; i++) sums[i] *= keep[i % 4 / 2];
    }
    rfk_flash_operands o[4];
    RFK_UNROLL(4)
    for (uint32_t h = 0; h < 4; h++) rfk_flash_weigh<32, uint16_t>(o[h], x[h / 2][h % 2], less, w.sum);
    rfk_wgmma_fence();
    RFK_UNROLL(4)
    for (uint32_t h = 0; h < 4; h++) {
        rfk_wgmma_values(sums, o[h].upper, panel.v[0], 16 * h);
        rfk_wgmma_values(sums, o[h].lower, panel.v[0], 16 * h);
    }
    rfk_wgmma_commit();
    rfk_wgmma_wait<0>();
    rfk_wgmma_done<64>(sums);
}
#endif

/* grid and order as rfk_flash's   block 256   LDS 65 KiB   rows_per_block = 128 / heads of a group */
static __global__ void RFK_THREADS(2 * RFK_WARPGROUP) rfk_flash_wgmma(rfk_attention_args a) {
#if defined(RFK_HAS_WGMMA)
    rfk_wait_previous();
    RFK_DYNAMIC(int4, memory);
    typedef rfk_flash_panel rfk_panels[2];
    rfk_panels &panel = rfk_wgmma_memory<rfk_panels>(memory);
    const uint32_t CELLS = RFK_FLASH_WGMMA_CELLS, dim = a.head_dim, lane = threadIdx.x % 32,
                   blocks = gridDim.x / a.n_kv_heads,
                   place = blockIdx.x < a.reverse_from ? blockIdx.x : gridDim.x - 1 - (blockIdx.x - a.reverse_from),
                   row0 = (blocks - 1 - place / a.n_kv_heads) * a.rows_per_block,
                   last = row0 + a.rows_per_block < a.n_rows ? row0 + a.rows_per_block : a.n_rows;
    rfk_flash_wave<32, RFK_FLASH_WGMMA_HEAD> w;
    w.kv_head = place % a.n_kv_heads;
    w.row16 = threadIdx.x / 32 * 16;
    w.from16 = 0;
    for (uint32_t n = 0; n < 2; n++) w.row[n] = w.row16 + rfk_flash_query(lane, n);
    rfk_flash_queries(w, a, row0, last, 1.0f);
    const int4 zero = {0, 0, 0, 0};
    int4 *words = &panel[0].k[0][0][0];
    for (uint32_t i = threadIdx.x; dim < RFK_FLASH_WGMMA_HEAD && i < sizeof panel / 16; i += blockDim.x)
        words[i] = zero;
    for (uint32_t row = row0, end; row < last; row = end) {
        end = rfk_flash_run_end<32>(a.rows, row, last, lane);
        const size_t head = ((size_t)a.rows[row].seq * a.n_kv_heads + w.kv_head) * a.n_cells;
        const uint16_t *k = (const uint16_t *)a.k + head * dim, *v = (const uint16_t *)a.v + head * dim;
        const uint32_t length = (uint32_t)a.rows[end - 1].pos + 1;
        uint32_t seen = (uint32_t)a.rows[row].pos + 1, tile = 0; /* the first position that any row of the run sees */
        seen = a.window && seen > a.window ? seen - a.window : 0;
        uint32_t cell0 = seen / CELLS * CELLS, at = cell0 % a.n_cells;
        __syncthreads();
        rfk_panel_fetch(panel[0], k + (size_t)at * dim, v + (size_t)at * dim, dim, seen - cell0, length - cell0);
        rfk_flash_begin(w, a, row0, row, end);
        /* of the warpgroup: all its waves take part in a product */
        const uint32_t group = a.n_heads / a.n_kv_heads, first = row0 + w.row16 / 64 * 64 / group,
                       final = row0 + (w.row16 / 64 * 64 + 63) / group;
        const bool some = first < end && final >= row;
        const int32_t lowest = some ? a.rows[first > row ? first : row].pos : 0,
                      highest = some ? a.rows[final < end ? final : end - 1].pos : -1;
        for (; cell0 < length; cell0 += CELLS, tile = 1 - tile) {
            rfk_wait_copies();
            rfk_fence_async_proxy();
            __syncthreads();
            const uint32_t next = cell0 + CELLS;
            at = at + CELLS < a.n_cells ? at + CELLS : 0;
            if (next < length)
                rfk_panel_fetch(panel[1 - tile], k + (size_t)at * dim, v + (size_t)at * dim, dim, 0, length - next);
            if ((int32_t)cell0 <= highest && (a.window == 0 || lowest - (int32_t)next < (int32_t)a.window - 1))
                rfk_panel_step(w, panel[tile], a, cell0);
        }
        rfk_flash_end(w, a, row0);
    }
#else
    (void)a;
#endif
}

/* ---- one row ----
 * The fused attention of a decode step: norms of the heads, RoPE, the KV store of the new position, and attention. */

#define RFK_ROPES 2 /* RoPE tables in a plan: of layers with a sliding window, and of the others */

/* cos and sin for the positions of the step's rows, for each RoPE table.
 *   grid [ceil(n_rot / 2 / 256), kinds, rows]   block 256 */
struct rfk_angles_of {
    const float *table;
    const uint8_t *freqs; /* NULL: none */
    float *out;           /* [row][RFK_MAX_HEAD], of which [n_rot / 2][2] */
    uint32_t freqs_type, n_rot;
    float scale;
    int32_t shift;
};
struct rfk_angles_args {
    rfk_angles_of first, second;
    const rf_step_row *rows;
};
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_angles(rfk_angles_args a) {
    const rfk_angles_of of = blockIdx.y == 0 ? a.first : a.second;
    uint32_t i = blockIdx.x * RFK_BLOCK + threadIdx.x;
    if (i >= of.n_rot / 2) return;
    double angle = ((double)a.rows[blockIdx.z].pos + of.shift) * (double)of.table[i];
    if (of.freqs) angle /= (double)rfk_load_any(of.freqs, of.freqs_type, i);
    float c, s;
    rfk_cos_sin(angle, &c, &s);
    float *out = of.out + blockIdx.z * RFK_MAX_HEAD;
    out[2 * i] = c * of.scale;
    out[2 * i + 1] = s * of.scale;
}

#define RFK_DECODE_CELLS 64u /* positions of a split, at least; half as many in a cluster */
#define RFK_DECODE_GROUP 4u  /* queries of a block, at most; those of a larger group read the same cells */
/* Positions: rows of up to so many have RFK_CLUSTER splits at most, where clusters are. H200, behind 1,500 tokens, with
 * 1,024, 2,048 and 4,096: 1B 2,035, 2,102 and 2,101 tok/s, 8B 598, 614 and 614; 8B behind 3,900: 569, 571 and 552. */
#define RFK_DECODE_NEAR 2048u
#define RFK_DECODE_SHORT 256u /* a graph of one row for so many positions has fewer blocks */
#define RFK_CLUSTER 8u       /* blocks of a cluster, at most: every GPU that has clusters has room for these */
#define RFK_DECODE_RESIDENT 2 /* blocks of a multiprocessor that run at once */

struct rfk_decode_attention_args {
    const float *q, *k, *v;
    const uint8_t *norm[2]; /* of queries and keys; NULL: none */
    const float *angles;
    const uint8_t *sinks;    /* [n_heads] attention sinks: one more score without a value; NULL: none */
    void *k_state, *v_state; /* [seq][kv head][n_cells][dim]: position p in cell p % n_cells */
    float *out;
    float *part;       /* of splits: rfk_decode_part */
    uint32_t *tickets; /* [row][column] counters of finished splits; 0 between launches */
    rfk_int8_rows x8;    /* the output of one row, quantized; NULL: not wanted */
    rfk_few_columns few; /* that of several rows */
    const rf_step_row *rows;
    uint32_t norm_type[2], n_heads, n_kv_heads, head_dim, n_rot, neox, n_cells;
    uint32_t q_stride, k_stride, v_stride, out_stride; /* from row to row */
    uint32_t n_shared;                            /* rows that share the grid's blocks; 0: each has the same number */
    uint32_t n_splits;                            /* of a row, at most; not if rows share them without turns */
    uint32_t group;                               /* queries of a KV head */
    uint32_t columns_log2, per_column;            /* of a KV head: 2^columns_log2 columns of the grid; their queries */
    uint32_t n_near;                              /* rows of up to so many positions have RFK_CLUSTER splits at most */
    uint32_t is_cluster;                          /* the splits of a row are a cluster */
    uint32_t is_stored;                           /* the step's keys and values are in their cells already */
    uint32_t window, sinks_type;                  /* window 0: all positions */
    float eps[2], scale, softcap, softcap_factor; /* as rfk_softcap_exp2 takes them; softcap 0: none */
};

/* (byte - 128) * d. */
RFK_DEVICE float rfk_byte_value(uint32_t byte, float d) {
#if defined(RFK_NVIDIA)
    return (rfk_as_float(0x4b000000u | byte) - 8388736.0f) * d; /* 2^23 + byte: conversions are slow */
#else
    return ((float)byte - 128.0f) * d;
#endif
}

/* A lane's eight values of a cached key or value, as stored; row() is the offset of a cell. make() sets them from the
 * new row: its floats, or its bytes if PACKED. */
template <class KV, int PER> struct rfk_decode_raw;
template <int PER> struct rfk_decode_raw<uint16_t, PER> {
    static const bool PACKED = false;
    int4 v;
    RFK_DEVICE size_t row(uint32_t cell, uint32_t dim) { return (size_t)cell * dim; }
    __device__ __forceinline__ void clear() { v.x = v.y = v.z = v.w = 0; }
    __device__ __forceinline__ void load(const uint16_t *p) { v = rfk_load_once<int4>(p); }
    __device__ __forceinline__ void make(const float *row) {
        const float *p = row + threadIdx.x % PER * 8;
        int w[4];
        for (int i = 0; i < 4; i++) w[i] = (int)(rfk_to_half(p[2 * i]) | (uint32_t)rfk_to_half(p[2 * i + 1]) << 16);
        v.x = w[0], v.y = w[1], v.z = w[2], v.w = w[3];
    }
    __device__ __forceinline__ void values(float *x) const {
        const uint32_t w[4] = {(uint32_t)v.x, (uint32_t)v.y, (uint32_t)v.z, (uint32_t)v.w};
        RFK_UNROLL(4)
        for (int i = 0; i < 4; i++) {
            x[2 * i] = rfk_from_half((uint16_t)(w[i] & 0xffff));
            x[2 * i + 1] = rfk_from_half((uint16_t)(w[i] >> 16));
        }
    }
};
template <int PER> struct rfk_decode_raw<float, PER> {
    static const bool PACKED = false;
    float v[8]; /* not two float4: those would go to private memory on AMD */
    RFK_DEVICE size_t row(uint32_t cell, uint32_t dim) { return (size_t)cell * dim; }
    __device__ __forceinline__ void clear() {
        RFK_UNROLL(8)
        for (int i = 0; i < 8; i++) v[i] = 0;
    }
    __device__ __forceinline__ void load(const float *p) {
        const float4 a = reinterpret_cast<const float4 *>(p)[0], b = reinterpret_cast<const float4 *>(p)[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
    __device__ __forceinline__ void make(const float *row) { load(row + threadIdx.x % PER * 8); }
    __device__ __forceinline__ void values(float *x) const {
        RFK_UNROLL(8)
        for (int i = 0; i < 8; i++) x[i] = v[i];
    }
};
/* Rows have exactly 8 * PER values: they are aligned to 4 bytes, and to 8 but for heads of 64. */
template <int PER> struct rfk_decode_raw<rfk_q8, PER> {
    static const bool PACKED = true;
    uint32_t q[2], scale;
    RFK_DEVICE size_t row(uint32_t cell, uint32_t) { return (size_t)cell * (PER / 4 * 34); }
    __device__ __forceinline__ void clear() { q[0] = q[1] = scale = 0; }
    __device__ __forceinline__ void load(const rfk_q8 *p) {
        const uint32_t lane = threadIdx.x % PER;
        if (PER > 8) {
            const uint2 v = *reinterpret_cast<const uint2 *>(p);
            q[0] = v.x, q[1] = v.y;
        } else {
            q[0] = reinterpret_cast<const uint32_t *>(p)[0];
            q[1] = reinterpret_cast<const uint32_t *>(p)[1];
        }
        scale = *reinterpret_cast<const uint16_t *>(p + (PER - lane) * 8 + lane / 4 * 2);
    }
    __device__ __forceinline__ void make(const float *row) {
        load(reinterpret_cast<const rfk_q8 *>(row) + threadIdx.x % PER * 8);
    }
    __device__ __forceinline__ void values(float *x) const {
        const float d = rfk_from_half((uint16_t)scale);
        RFK_UNROLL(2)
        for (int i = 0; i < 2; i++) {
            const uint32_t w = q[i] ^ 0x80808080u; /* q + 128 */
            RFK_UNROLL(4)
            for (int k = 0; k < 4; k++) x[4 * i + k] = rfk_byte_value(w >> 8 * k & 255, d);
        }
    }
};

/* PER lanes share a position, eight values each; a block takes SLOTS positions at a time, T times. The T scores of each
 * of G queries are distributed over the PER lanes, KEPT a lane. */
template <class KV, int G, int PER> struct rfk_decode_shape {
    static const int T = sizeof(KV) > 2 ? 2 : 4,     /* floats take more registers */
        N = G * T, KEPT = N > PER ? N / PER : 1,
        COPIES = PER > N ? PER / N : 1,              /* lanes with the same score */
        LANES = PER / G,                             /* lanes of a query */
        SLOTS = RFK_BLOCK / PER;
};

/* The queries of a block, of one KV head: its group or a part of it. Made anew where it is used: registers are few. */
struct rfk_decode_heads {
    uint32_t kv_head, first, n;
};
RFK_DEVICE rfk_decode_heads rfk_decode_heads_of(const rfk_decode_attention_args &a) {
    const uint32_t x = rfk_uniform(rfk_computed_here(blockIdx.x)), kv_head = x >> a.columns_log2,
                   at = (x - (kv_head << a.columns_log2)) * a.per_column, left = a.group > at ? a.group - at : 0;
    const rfk_decode_heads heads = {kv_head, kv_head * a.group + at, left < a.per_column ? left : a.per_column};
    return heads;
}

/* A block's split of a row, or its first. Visible positions are divided evenly over the splits: see rfk_decode_min. */
struct rfk_decode_share {
    uint32_t row, split, most; /* splits of the row, at most; of those taken in turn, as found, its blocks */
    uint32_t slot;             /* where the parts of the row's splits begin, in splits */
};

#define RFK_DECODE_JOIN 4096 /* floats: from eight waves, four heads of 128 or two of 256 */
#define RFK_DECODE_SPLITS 64u
#define RFK_DECODE_PARTS(queries, head_dim) ((queries) * ((head_dim) + 4) * 4) /* bytes of a split's */
template <int G, int PER> struct rfk_decode_shared {
    alignas(16) float x[G + 2][PER * 8];  /* the queries, the new key, the new value */
    alignas(16) float join[RFK_DECODE_JOIN]; /* [query][wave] weighted sums */
    float norm[2][PER * 8];               /* weights of the norms of queries and keys */
    float peak[G][8][2];                  /* [query][wave] maximum, sum of weights */
    rfk_decode_share share;
    rfk_mbarrier parts;                   /* of a cluster: those of its splits are there, at its first block */
    uint32_t is_last, n_splits;           /* here for lack of registers */
};

/* A lane's pairs of a head: those that RoPE rotates, then the others. */
template <int WAVE, int PER> struct rfk_decode_pairs {
    static const int N = PER * 4 > WAVE ? PER * 4 / WAVE : 1;
    uint32_t first[N], second[N];
    float c[N], s[N];
};
template <int WAVE, int PER>
RFK_DEVICE void rfk_decode_pair(rfk_decode_pairs<WAVE, PER> &o, const rfk_decode_attention_args &a, uint32_t row) {
    const uint32_t half = a.n_rot / 2, lane = threadIdx.x % WAVE;
    RFK_UNROLL(4)
    for (uint32_t k = 0; k < (uint32_t)rfk_decode_pairs<WAVE, PER>::N; k++) {
        const uint32_t i = lane + k * WAVE;
        const bool rotates = i < half;
        o.first[k] = rotates && a.neox ? i : 2 * i;
        o.second[k] = rotates && a.neox ? i + half : 2 * i + 1;
        o.c[k] = rotates ? a.angles[row * RFK_MAX_HEAD + 2 * i] : 1.0f;
        o.s[k] = rotates ? a.angles[row * RFK_MAX_HEAD + 2 * i + 1] : 0.0f;
    }
}

/* To s.norm: the weights of the norms, before rfk_wait_previous. */
template <int G, int PER>
RFK_DEVICE void rfk_decode_norms(rfk_decode_shared<G, PER> &s, const rfk_decode_attention_args &a) {
    RFK_UNROLL(1)
    for (uint32_t i = threadIdx.x; i < 2 * a.head_dim; i += RFK_BLOCK) {
        const uint32_t key = i >= a.head_dim, e = key ? i - a.head_dim : i;
        if (key ? a.norm[1] : a.norm[0])
            s.norm[key][e] = rfk_load_any(key ? a.norm[1] : a.norm[0], key ? a.norm_type[1] : a.norm_type[0], e);
    }
    __syncthreads();
}

/* To s.x: the block's queries, normed, rotated and scaled, and the new key and value if its split owns them, a wave
 * each. Scores are exponents of 2. */
template <int WAVE, int G, int PER>
RFK_DEVICE void rfk_decode_queries(rfk_decode_shared<G, PER> &s, const rfk_decode_attention_args &a, uint32_t row,
                                   bool owns_key, const rfk_decode_pairs<WAVE, PER> &pairs) {
    const int N = rfk_decode_pairs<WAVE, PER>::N, WAVES = RFK_BLOCK / WAVE, AT_ONCE = G + 2 > WAVES ? 2 : 1;
    const rfk_decode_heads heads = rfk_decode_heads_of(a);
    const uint32_t lane = threadIdx.x % WAVE;
    RFK_UNROLL(1)
    for (uint32_t h0 = threadIdx.x / WAVE; h0 < (uint32_t)G + 2; h0 += AT_ONCE * WAVES) {
        float x0[AT_ONCE][N], x1[AT_ONCE][N];
        RFK_UNROLL(2)
        for (uint32_t j = 0; j < (uint32_t)AT_ONCE; j++) {
            const uint32_t h = h0 + j * WAVES;
            const bool wanted = h < G ? h < heads.n : owns_key && h < G + 2;
            const float *from = h > G    ? a.v + (size_t)row * a.v_stride
                                : h == G ? a.k + (size_t)row * a.k_stride
                                         : a.q + (size_t)row * a.q_stride;
            from += (h < G ? heads.first + h : heads.kv_head) * a.head_dim;
            RFK_UNROLL(4)
            for (uint32_t k = 0; k < (uint32_t)N; k++) {
                bool inside = wanted && 2 * (lane + k * WAVE) < a.head_dim;
                x0[j][k] = inside ? from[pairs.first[k]] : 0.0f;
                x1[j][k] = inside ? from[pairs.second[k]] : 0.0f;
            }
        }
        RFK_UNROLL(2)
        for (uint32_t j = 0; j < (uint32_t)AT_ONCE; j++) {
            const uint32_t h = h0 + j * WAVES;
            if (h >= G + 2) continue;
            const bool key = h == G, value = h == G + 1, norm = !value && (key ? a.norm[1] : a.norm[0]);
            float sum = 0, factor = 1;
            RFK_UNROLL(4)
            for (uint32_t k = 0; k < (uint32_t)N; k++) sum += rfk_fma(x0[j][k], x0[j][k], rfk_mul(x1[j][k], x1[j][k]));
            if (norm) {
                sum = rfk_wave_sum<WAVE>(sum);
                factor = 1.0f / sqrtf(sum / (float)a.head_dim + (key ? a.eps[1] : a.eps[0]));
            }
            const float scale = h < G ? a.scale * RFK_LOG2_E : 1.0f;
            RFK_UNROLL(4)
            for (uint32_t k = 0; k < (uint32_t)N; k++) {
                const uint32_t i = lane + k * WAVE, first = pairs.first[k], second = pairs.second[k];
                if (i >= PER * 4) continue;
                if (norm && 2 * i < a.head_dim) {
                    x0[j][k] = x0[j][k] * factor * s.norm[key][first];
                    x1[j][k] = x1[j][k] * factor * s.norm[key][second];
                }
                const float c = value ? 1.0f : pairs.c[k], sine = value ? 0.0f : pairs.s[k];
                s.x[h][first] = rfk_fma(x0[j][k], c, -rfk_mul(x1[j][k], sine)) * scale;
                s.x[h][second] = rfk_fma(x0[j][k], sine, rfk_mul(x1[j][k], c)) * scale;
            }
        }
    }
}

/* A lane's state: its part of T keys and values; eight values of each query's weighted sum; of its own query the
 * maximum, and sums of the weights, one for each score that the lane keeps: of fewer queries more lanes keep scores. */
template <class KV, int G, int PER> struct rfk_decode_work {
    rfk_decode_raw<KV, PER> k[rfk_decode_shape<KV, G, PER>::T], v[rfk_decode_shape<KV, G, PER>::T];
    float acc[G][8], largest, sum[rfk_decode_shape<KV, G, PER>::KEPT];
};

/* A head's cache from the lane's values on, and the positions of a split: they end at `end`, those of earlier steps at
 * older_end; new_pos is this step's, RF_NONE in other splits. */
template <class KV> struct rfk_decode_cells {
    const KV *k, *v;
    uint32_t begin, end, older_end, new_pos;
};

/* Load the older positions among the T from `first` on. In a ring buffer, positions are cells that continue after the
 * last one, less than twice around. */
template <class KV, int PER, int T>
RFK_DEVICE void rfk_decode_load(rfk_decode_raw<KV, PER> (&to)[T], const KV *from, uint32_t n_cells, uint32_t dim,
                             uint32_t first, uint32_t slots, uint32_t end) {
    RFK_UNROLL(4)
    for (uint32_t t = 0; t < (uint32_t)T; t++) {
        const uint32_t pos = first + t * slots;
        const uint32_t again = pos - n_cells, cell = again < pos ? again : pos;
        if (pos < end) to[t].load(from + rfk_decode_raw<KV, PER>::row(cell, dim));
        else to[t].clear();
    }
}

/* Reduce-scatter: sums of N values over PER lanes. Halves of the list go to halves of the lanes until each lane has its
 * own: value i ends in lanes from i * COPIES on, or KEPT values in a lane. */
template <int WAVE, int PER, int N> RFK_DEVICE void rfk_decode_spread(float (&v)[N]) {
    const uint32_t lane = threadIdx.x % PER;
    int n = N;
    RFK_UNROLL(5)
    for (int mask = PER / 2; mask > 0; mask /= 2) {
        const bool upper = (lane & (uint32_t)mask) != 0;
        if (n > 1) {
            n /= 2;
            RFK_UNROLL(16)
            for (int i = 0; i < N / 2; i++) {
                if (i >= n) continue;
                float own = upper ? v[i + n] : v[i], other = upper ? v[i] : v[i + n];
                v[i] = own + rfk_shuffle_xor<WAVE>(other, mask);
            }
        } else {
            v[0] += rfk_shuffle_xor<WAVE>(v[0], mask);
        }
    }
}

/* T positions from `first` on: scores, online softmax, weighted sums. Loads of the next ones, from `next` to next_end,
 * are issued as soon as registers are free. What is fused is written, not left to the compiler: a query has the same
 * bits in kernels of one query and of more. */
template <int WAVE, class KV, int G, int PER>
RFK_DEVICE void rfk_decode_positions(const rfk_decode_shared<G, PER> &s, const rfk_decode_attention_args &a,
                                  const rfk_decode_cells<KV> &in, uint32_t first, uint32_t next, uint32_t next_end,
                                  rfk_decode_work<KV, G, PER> &o) {
    typedef rfk_decode_shape<KV, G, PER> S;
    const bool packed = rfk_decode_raw<KV, PER>::PACKED;
    const uint32_t thread = rfk_computed_here(threadIdx.x), lane = thread % PER, base = thread % WAVE - lane;
    float score[S::N], x[8], keys[S::T][8], keep;
    if (in.new_pos >= first && in.new_pos - first < (uint32_t)(S::T * S::SLOTS)) {
        rfk_decode_raw<KV, PER> made;
        made.make(packed ? s.join : s.x[G]);
        RFK_UNROLL(4)
        for (uint32_t t = 0; t < (uint32_t)S::T; t++)
            if (first + t * S::SLOTS == in.new_pos) o.k[t] = made;
        made.make(packed ? s.join + PER * 8 : s.x[G + 1]);
        RFK_UNROLL(4)
        for (uint32_t t = 0; t < (uint32_t)S::T; t++)
            if (first + t * S::SLOTS == in.new_pos) o.v[t] = made;
    }
    RFK_UNROLL(4)
    for (int t = 0; t < S::T; t++) o.k[t].values(keys[t]);
    RFK_UNROLL(8)
    for (int g = 0; g < G; g++) { /* a query is read once for all positions */
        const float4 *q = reinterpret_cast<const float4 *>(&s.x[g][lane * 8]);
        const float4 q0 = q[0], q1 = q[1];
        RFK_UNROLL(4)
        for (int t = 0; t < S::T; t++) {
            const float *y = keys[t];
            score[g * S::T + t] =
                (rfk_fma(q0.x, y[0], rfk_mul(q0.y, y[1])) + rfk_fma(q0.z, y[2], rfk_mul(q0.w, y[3]))) +
                (rfk_fma(q1.x, y[4], rfk_mul(q1.y, y[5])) + rfk_fma(q1.z, y[6], rfk_mul(q1.w, y[7])));
        }
    }
    rfk_decode_load<KV, PER, S::T>(o.k, in.k, a.n_cells, a.head_dim, next, S::SLOTS, next_end);
    rfk_decode_spread<WAVE, PER, S::N>(score);
    float top = o.largest;
    RFK_UNROLL(2)
    for (uint32_t j = 0; j < (uint32_t)S::KEPT; j++) {
        const uint32_t t = (lane * S::KEPT / S::COPIES + j) % S::T;
        if (a.softcap != 0) score[j] = rfk_softcap_exp2(score[j], a.softcap, a.softcap_factor);
        if (first + t * S::SLOTS >= in.end) score[j] = -INFINITY;
        top = fmaxf(top, score[j]);
    }
    for (int mask = 1; mask < S::LANES; mask *= 2) top = fmaxf(top, rfk_shuffle_xor<WAVE>(top, mask));
    keep = exp2f(o.largest - top);
    o.largest = top;
    RFK_UNROLL(2)
    for (int j = 0; j < S::KEPT; j++) {
        score[j] = exp2f(score[j] - top);
        o.sum[j] = rfk_mul(o.sum[j], keep);
        if (lane % S::COPIES == 0) o.sum[j] += score[j];
    }
    RFK_UNROLL(8)
    for (uint32_t g = 0; g < (uint32_t)G; g++) {
        const float factor = rfk_shuffle<WAVE>(keep, base + g * S::LANES);
        RFK_UNROLL(8)
        for (int e = 0; e < 8; e++) o.acc[g][e] = rfk_mul(o.acc[g][e], factor);
    }
    RFK_UNROLL(4)
    for (uint32_t t = 0; t < (uint32_t)S::T; t++) {
        o.v[t].values(x);
        RFK_UNROLL(8)
        for (uint32_t g = 0; g < (uint32_t)G; g++) {
            const uint32_t i = g * S::T + t;
            const float weight = rfk_shuffle<WAVE>(score[i % S::KEPT], base + i * S::COPIES / S::KEPT);
            RFK_UNROLL(8)
            for (int e = 0; e < 8; e++) o.acc[g][e] = rfk_fma(weight, x[e], o.acc[g][e]);
        }
    }
    rfk_decode_load<KV, PER, S::T>(o.v, in.v, a.n_cells, a.head_dim, next, S::SLOTS, next_end);
}

/* Where the results of a block's queries go, and the parts of its splits: of a cluster in its first block's shared
 * memory, where `parts` counts them. */
struct rfk_decode_output {
    float *out, *part;
    rfk_mbarrier *parts; /* NULL: no cluster */
    rfk_int8_rows x8;
    rfk_few_columns few;
    uint32_t row, first, group, n_heads, head_dim;
};
RFK_DEVICE rfk_decode_output rfk_decode_output_of(const rfk_decode_attention_args &a, const rfk_decode_share &share,
                                                  float *shared, rfk_mbarrier *parts) {
    const rfk_decode_heads heads = rfk_decode_heads_of(a);
    const size_t part = (size_t)(share.slot * a.n_heads + heads.first * share.most) * (a.head_dim + 4);
    const bool is_cluster = RFK_HAS_CLUSTERS && a.is_cluster;
    const rfk_decode_output to = {a.out + (size_t)share.row * a.out_stride, is_cluster ? shared : a.part + part,
                                  is_cluster ? parts : NULL, a.x8, a.few, share.row, heads.first, heads.n, a.n_heads,
                                  a.head_dim};
    return to;
}

/* Values 4c .. 4c + 3 of the result of a query of the block, also quantized. All lanes of the wave take part. Called:
 * kernels need it several times. */
template <int WAVE>
RFK_CALLED void rfk_decode_out(rfk_decode_output to, uint32_t query, uint32_t c, float4 four, bool inside) {
    float x[4] = {four.x, four.y, four.z, four.w};
    const uint32_t i = (to.first + query) * (to.head_dim / 4) + c;
    if (inside) reinterpret_cast<float4 *>(to.out)[i] = four;
    if (!to.x8.q && !to.few.q) return;
    const rfk_int8_four v = rfk_quantize_halves<WAVE>(x);
    if (inside && to.x8.q) rfk_put_int8(to.x8, 0, to.n_heads * to.head_dim, i, v);
    if (inside && to.few.q) rfk_few_put_int8(to.few, to.n_heads * to.head_dim, to.row, i, v);
}

/* Where split y leaves its weighted sums, [query][head_dim], and behind them [query] maximum, sum of weights, 0, 0. */
RFK_DEVICE float *rfk_decode_part(const rfk_decode_output &to, uint32_t y) {
    return to.part + (size_t)y * to.group * (to.head_dim + 4);
}
/* Store four values of a part. */
RFK_DEVICE void rfk_decode_leave(const rfk_decode_output &to, float *at, float4 v) {
    if (to.parts) rfk_send(0, at, v, to.parts);
    else *reinterpret_cast<float4 *>(at) = v;
}

/* Combine the lanes of a wave (reduce-scatter): v becomes the lane's share of the weighted sums, [query][8] from the
 * returned index on; maximum and sum of weights go to s.peak. */
template <int WAVE, class KV, int G, int PER>
RFK_DEVICE uint32_t rfk_decode_join_wave(rfk_decode_shared<G, PER> &s, const rfk_decode_work<KV, G, PER> &o,
                                      float (&v)[G * 8]) {
    typedef rfk_decode_shape<KV, G, PER> S;
    const uint32_t lane = threadIdx.x % WAVE, base = lane - lane % PER;
    float top = o.largest, sum = o.sum[0];
    for (int j = 1; j < S::KEPT; j++) sum += o.sum[j];
    for (int mask = 1; mask < S::LANES; mask *= 2) sum += rfk_shuffle_xor<WAVE>(sum, mask);
    for (int mask = PER; mask < WAVE; mask *= 2) top = fmaxf(top, rfk_shuffle_xor<WAVE>(top, mask));
    const float own = exp2f(o.largest - top);
    sum = rfk_mul(sum, own);
    for (int mask = PER; mask < WAVE; mask *= 2) sum += rfk_shuffle_xor<WAVE>(sum, mask);
    if (lane < PER && lane % S::LANES == 0) {
        s.peak[lane / S::LANES][threadIdx.x / WAVE][0] = top;
        s.peak[lane / S::LANES][threadIdx.x / WAVE][1] = sum;
    }
    RFK_UNROLL(8)
    for (uint32_t g = 0; g < (uint32_t)G; g++) {
        const float factor = rfk_shuffle<WAVE>(own, base + g * S::LANES);
        RFK_UNROLL(8)
        for (int e = 0; e < 8; e++) v[g * 8 + e] = rfk_mul(o.acc[g][e], factor);
    }
    uint32_t first = 0;
    int n = G * 8;
    RFK_UNROLL(3)
    for (int mask = WAVE / 2; mask >= PER; mask /= 2) { /* halves of the list go to halves of the lanes */
        const bool upper = (lane & (uint32_t)mask) != 0;
        n /= 2;
        first += upper ? (uint32_t)n : 0;
        RFK_UNROLL(32)
        for (int i = 0; i < G * 4; i++) {
            if (i >= n) continue;
            const float low = v[i], high = v[i + n]; /* indexed otherwise, v would go to private memory on AMD */
            v[i] = (upper ? high : low) + rfk_shuffle_xor<WAVE>(upper ? low : high, mask);
        }
    }
    return first;
}

/* Combine the waves of the block: the result if this is the only split, else the part of split y. */
template <int WAVE, class KV, int G, int PER>
RFK_DEVICE void rfk_decode_join(rfk_decode_shared<G, PER> &s, const rfk_decode_output &out, uint32_t y,
                             const rfk_decode_work<KV, G, PER> &o) {
    const uint32_t lane = threadIdx.x % PER, wave = threadIdx.x / WAVE, group = out.group, dim = out.head_dim;
    const int waves = RFK_BLOCK / WAVE, row = PER * 8, fit = RFK_DECODE_JOIN / (waves * row),
            at_once = fit < G ? fit : G,
              n_values = G * 8 * PER / WAVE;
    float v[G * 8];
    const uint32_t first = rfk_decode_join_wave<WAVE, KV, G, PER>(s, o, v);
    RFK_UNROLL(1)
    for (uint32_t g0 = 0; g0 < group; g0 += at_once) {
        if (g0 || rfk_decode_raw<KV, PER>::PACKED) __syncthreads(); /* s.join is still read */
        RFK_UNROLL(8)
        for (uint32_t j = 0; j < (uint32_t)(n_values + 7) / 8; j++) {
            const uint32_t g = first / 8 + j - g0;
            if (g >= (uint32_t)at_once) continue;
            float *to = s.join + (g * waves + wave) * row + lane * 8 + first % 8;
            if (n_values % 4) {
                for (int e = 0; e < n_values; e++) to[e] = v[e];
                continue;
            }
            for (uint32_t e = 0; e < 8 && e < (uint32_t)n_values; e += 4) {
                const float4 four = {v[j * 8 + e], v[j * 8 + e + 1], v[j * 8 + e + 2], v[j * 8 + e + 3]};
                *reinterpret_cast<float4 *>(to + e) = four;
            }
        }
        __syncthreads();
        const uint32_t g = threadIdx.x / (PER * 2), c = threadIdx.x % (PER * 2), head = g0 + g; /* of the group */
        const bool inside = g < (uint32_t)at_once && head < group && c * 4 < dim;
        float x[4] = {0, 0, 0, 0}, top = -3e38f, weights = 0;
        if (inside) {
            RFK_UNROLL(8)
            for (int i = 0; i < waves; i++) top = fmaxf(top, s.peak[head][i][0]);
            RFK_UNROLL(8)
            for (int i = 0; i < waves; i++) {
                const float weight = exp2f(s.peak[head][i][0] - top);
                const float4 four = *reinterpret_cast<const float4 *>(s.join + (g * waves + i) * row + c * 4);
                weights = rfk_fma(weight, s.peak[head][i][1], weights);
                x[0] = rfk_fma(weight, four.x, x[0]), x[1] = rfk_fma(weight, four.y, x[1]);
                x[2] = rfk_fma(weight, four.z, x[2]), x[3] = rfk_fma(weight, four.w, x[3]);
            }
        }
        if (s.n_splits == 1) {
            const float inverse = inside ? 1.0f / weights : 0.0f;
            const float4 four = {x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse};
            rfk_decode_out<WAVE>(out, head, c, four, inside);
        } else if (inside) {
            float *part = rfk_decode_part(out, y);
            const float4 four = {x[0], x[1], x[2], x[3]}, rest = {top, weights, 0, 0};
            rfk_decode_leave(out, part + head * dim + c * 4, four);
            if (c == 0) rfk_decode_leave(out, part + group * dim + 4 * head, rest);
        }
    }
}

/* Whether this is the last of n_blocks of these queries to finish: it sees the parts of the others. */
template <int G, int PER>
RFK_DEVICE bool rfk_decode_last(rfk_decode_shared<G, PER> &s, const rfk_decode_attention_args &a, uint32_t row,
                                uint32_t n_blocks) {
    uint32_t *ticket = a.tickets + row * gridDim.x + blockIdx.x;
#if defined(RFK_NVIDIA) && defined(__CUDA_ARCH__)
    __syncthreads(); /* so that thread 0 releases what the whole block wrote */
    if (threadIdx.x == 0) {
        uint32_t before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
        s.is_last = before == n_blocks - 1;
        if (s.is_last) *ticket = 0;
    }
    __syncthreads();
    return s.is_last;
#else
    __threadfence(); /* make this block's part visible before its ticket */
    __syncthreads();
    if (threadIdx.x == 0) {
        s.is_last = atomicAdd(ticket, 1u) == n_blocks - 1;
        if (s.is_last) *ticket = 0;
    }
    __syncthreads();
    if (s.is_last) __threadfence();
    return s.is_last;
#endif
}

/* Parts of other blocks, past L1: they are read once. */
RFK_DEVICE float4 rfk_decode_load_part(const float *p) {
#if defined(RFK_NVIDIA)
    return __ldcg(reinterpret_cast<const float4 *>(p));
#else
    return *reinterpret_cast<const float4 *>(p);
#endif
}

/* Combine up to RFK_CLUSTER splits, four values of a query a thread: all loads are in flight at once. Called: one copy
 * for all kernels, whose blocks have up to RFK_BLOCK / row queries of 4 * row values. */
template <int WAVE> RFK_CALLED void rfk_decode_join_near(rfk_decode_output out, uint32_t n_splits, uint32_t row) {
    const uint32_t g = threadIdx.x / row, c = threadIdx.x % row;
    const bool inside = g < out.group && c * 4 < out.head_dim;
    float x[4] = {0, 0, 0, 0}, largest[RFK_CLUSTER], sum[RFK_CLUSTER], v[RFK_CLUSTER][4], top = -3e38f, all = 0;
    if (inside) {
        RFK_UNROLL(8)
        for (uint32_t k = 0; k < RFK_CLUSTER; k++) {
            const uint32_t y = k < n_splits ? k : n_splits - 1; /* behind the last: its weight is 0 */
            const float4 *part = reinterpret_cast<const float4 *>(rfk_decode_part(out, y));
            const float4 four = part[g * (out.head_dim / 4) + c], rest = part[out.group * (out.head_dim / 4) + g];
            largest[k] = rest.x, sum[k] = rest.y;
            v[k][0] = four.x, v[k][1] = four.y, v[k][2] = four.z, v[k][3] = four.w;
        }
        RFK_UNROLL(8)
        for (uint32_t k = 0; k < RFK_CLUSTER; k++) top = fmaxf(top, largest[k]);
        RFK_UNROLL(8)
        for (uint32_t k = 0; k < RFK_CLUSTER; k++) {
            const float weight = k < n_splits ? exp2f(largest[k] - top) : 0.0f;
            all += weight * sum[k];
            for (int e = 0; e < 4; e++) x[e] += weight * v[k][e];
        }
        all = 1.0f / all;
    }
    const float4 four = {x[0] * all, x[1] * all, x[2] * all, x[3] * all};
    rfk_decode_out<WAVE>(out, g, c, four, inside);
}

/* Weights of the splits, a wave for each query, to join: [query][RFK_DECODE_SPLITS]. */
template <int WAVE> RFK_DEVICE void rfk_decode_weights(float *join, const rfk_decode_output &out, uint32_t n_splits) {
    const uint32_t lane = threadIdx.x % WAVE;
    const int n = RFK_DECODE_SPLITS / WAVE; /* parts of a lane */
    RFK_UNROLL(1)
    for (uint32_t g = threadIdx.x / WAVE; g < out.group; g += RFK_BLOCK / WAVE) {
        float largest[n], sum[n], top = -3e38f, all = 0;
        RFK_UNROLL(2)
        for (int k = 0; k < n; k++) {
            const uint32_t y = lane + k * WAVE;
            largest[k] = -3e38f, sum[k] = 0;
            if (y < n_splits) {
                const float4 rest = rfk_decode_load_part(rfk_decode_part(out, y) + out.group * out.head_dim + g * 4);
                largest[k] = rest.x, sum[k] = rest.y;
            }
            top = fmaxf(top, largest[k]);
        }
        top = rfk_wave_max<WAVE>(top);
        RFK_UNROLL(2)
        for (int k = 0; k < n; k++) largest[k] = exp2f(largest[k] - top), all += largest[k] * sum[k];
        all = 1.0f / rfk_wave_sum<WAVE>(all);
        RFK_UNROLL(2)
        for (int k = 0; k < n; k++) join[g * RFK_DECODE_SPLITS + lane + k * WAVE] = largest[k] * all;
    }
}

/* Combine more splits. Sets of threads take parts in turn. Called: one copy for all kernels, whose blocks have up to G
 * queries of 4 * row values. */
template <int WAVE>
RFK_CALLED void rfk_decode_join_splits(float *join, rfk_decode_output out, uint32_t n_splits, uint32_t G,
                                       uint32_t row) {
    const uint32_t columns = G * row, sets = RFK_BLOCK / columns, AT_ONCE = 16, /* parts in flight a thread */
        set = threadIdx.x / columns, stride = out.group * (out.head_dim + 4), i = threadIdx.x % columns, g = i / row,
                   c = i % row;
    float *sums = join + G * RFK_DECODE_SPLITS;
    const bool inside = g < out.group && c * 4 < out.head_dim;
    const float *part = rfk_decode_part(out, 0) + (inside ? g * out.head_dim + c * 4 : 0);
    float x[4] = {0, 0, 0, 0};
    RFK_UNROLL(1)
    for (uint32_t y0 = 0; y0 < n_splits; y0 += sets * AT_ONCE) {
        float v[AT_ONCE][4];
        RFK_UNROLL(16)
        for (uint32_t k = 0; k < AT_ONCE; k++) {
            const uint32_t y = y0 + set + k * sets, last = n_splits - 1; /* behind the last: its weight is 0 */
            const float4 four = rfk_decode_load_part(part + (y < last ? y : last) * stride);
            v[k][0] = four.x, v[k][1] = four.y, v[k][2] = four.z, v[k][3] = four.w;
        }
        if (y0 == 0) {
            rfk_decode_weights<WAVE>(join, out, n_splits);
            __syncthreads();
        }
        RFK_UNROLL(16)
        for (uint32_t k = 0; k < AT_ONCE; k++) {
            const uint32_t y = y0 + set + k * sets;
            const float weight = inside && y < n_splits ? join[g * RFK_DECODE_SPLITS + y] : 0.0f;
            for (int e = 0; e < 4; e++) x[e] += weight * v[k][e];
        }
    }
    if (sets > 1) {
        const float4 four = {x[0], x[1], x[2], x[3]};
        reinterpret_cast<float4 *>(sums)[threadIdx.x] = four;
        __syncthreads();
        for (uint32_t k = 1; k < sets && set == 0; k++) {
            const float4 more = reinterpret_cast<const float4 *>(sums)[k * columns + threadIdx.x];
            x[0] += more.x, x[1] += more.y, x[2] += more.z, x[3] += more.w;
        }
    }
    const float4 four = {x[0], x[1], x[2], x[3]};
    rfk_decode_out<WAVE>(out, g, c, four, inside && set == 0);
}

/* Store the new key and value in their cell; k and v begin at the head's first cell. */
template <int WAVE, int G, int PER, class KV>
RFK_DEVICE void rfk_decode_store(rfk_decode_shared<G, PER> &s, KV *k, KV *v, uint32_t cell, uint32_t dim) {
    const size_t row = (size_t)cell * dim;
    for (uint32_t e = threadIdx.x; e < dim; e += RFK_BLOCK) {
        rfk_store_value(k + row + e, s.x[G][e]);
        rfk_store_value(v + row + e, s.x[G + 1][e]);
    }
}
/* The same to Q8_0, and to s.join in the same layout: four values a thread. All threads take part. */
template <int WAVE, int G, int PER>
RFK_DEVICE void rfk_decode_store(rfk_decode_shared<G, PER> &s, rfk_q8 *k, rfk_q8 *v, uint32_t cell, uint32_t dim) {
    const uint32_t part = threadIdx.x / (2 * PER), i = threadIdx.x % (2 * PER); /* part: key, value */
    float x[4] = {0, 0, 0, 0}, d;
    int sum;
    (void)dim;
    RFK_UNROLL(4)
    for (uint32_t e = 0; e < 4; e++)
        if (part < 2) x[e] = s.x[G + part][4 * i + e];
    const uint32_t packed = (uint32_t)rfk_quantize_lane<WAVE>(x, &d, &sum);
    if (part < 2) {
        uint32_t *row = reinterpret_cast<uint32_t *>((part ? v : k) + rfk_decode_raw<rfk_q8, PER>::row(cell, 0)),
                 *kept = reinterpret_cast<uint32_t *>(s.join + part * (PER * 8));
        row[i] = kept[i] = packed;
        if (i % 8 == 0) {
            const uint16_t scale = rfk_to_half(d);
            reinterpret_cast<uint16_t *>(row + 2 * PER)[i / 8] = scale;
            reinterpret_cast<uint16_t *>(kept + 2 * PER)[i / 8] = scale;
        }
    }
    __syncthreads();
}

/* Norm, rotate and store the keys, and store the values, of a step's rows: before attention, because rows may be of one
 * sequence.   grid [n_kv_heads, 1, rows]   block 256   LDS up to 20 KiB */
template <int WAVE, class KV, int PER>
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_decode_keys(rfk_decode_attention_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    typedef rfk_decode_shared<1, PER> shared;
    RFK_SHARED(shared, s);
    const rf_step_row row = a.rows[blockIdx.z];
    rfk_decode_pairs<WAVE, PER> pairs;
    rfk_decode_pair<WAVE, PER>(pairs, a, blockIdx.z);
    rfk_decode_norms<1, PER>(s, a);
    rfk_start_next();
    rfk_wait_previous();
    rfk_decode_queries<WAVE, 1, PER>(s, a, blockIdx.z, true, pairs);
    __syncthreads();
    const size_t head = rfk_decode_raw<KV, PER>::row(1, a.head_dim) *
                        ((size_t)row.seq * a.n_kv_heads + blockIdx.x) * a.n_cells;
    rfk_decode_store<WAVE>(s, (KV *)a.k_state + head, (KV *)a.v_state + head, (uint32_t)row.pos % a.n_cells,
                           a.head_dim);
}

/* Positions of a split. */
RFK_DEVICE uint32_t rfk_decode_cut(uint32_t n, uint32_t most, uint32_t min) {
    const uint32_t cells = (n + most - 1) / most;
    return cells < min ? min : (cells + 31) / 32 * 32;
}

/* The least positions of a split, for a row with n visible ones. pass: those that a block takes at a time. Clusters
 * join their splits fast: rows of few positions take smaller splits (rfk_used_splits), and larger ones later, to stay
 * in a cluster. */
RFK_DEVICE uint32_t rfk_decode_min(uint32_t n, uint32_t pass, uint32_t n_near) {
    const uint32_t far = pass > RFK_DECODE_CELLS ? pass : RFK_DECODE_CELLS,
                   least = pass > RFK_DECODE_CELLS / 2 ? pass : RFK_DECODE_CELLS / 2,
                   near = (n + RFK_CLUSTER - 1) / RFK_CLUSTER, cells = near < least ? least : (near + 31) / 32 * 32;
    return n <= n_near ? cells : far;
}

/* Rows that share a grid, so that long sequences get more of its blocks than short ones. */
struct rfk_decode_rows {
    const rf_step_row *rows;
    uint32_t n_rows, window, pass, n_near;
};
RFK_DEVICE uint32_t rfk_decode_visible(const rfk_decode_rows &of, uint32_t row) {
    const uint32_t n = (uint32_t)of.rows[row].pos + 1;
    return of.window && n > of.window ? of.window : n;
}
/* A row's splits, of up to about `room` positions. */
RFK_DEVICE uint32_t rfk_decode_splits_of(const rfk_decode_rows &of, uint32_t row, uint32_t room) {
    const uint32_t n = rfk_decode_visible(of, row),
                   cells = rfk_decode_cut(n, (n + room - 1) / room, rfk_decode_min(n, of.pass, of.n_near));
    return (n + cells - 1) / cells;
}

/* The share of block blockIdx.y of a column, found by a wave: of the smallest room, about, with which the grid is
 * large enough. Called: one copy for all kernels. */
template <int WAVE> RFK_CALLED void rfk_decode_find_share(rfk_decode_share *to, rfk_decode_rows of) {
    const uint32_t lane = threadIdx.x % WAVE;
    uint32_t all = 0, own, at;
    for (uint32_t row = lane; row < of.n_rows; row += WAVE) all += rfk_decode_visible(of, row);
    uint32_t room = rfk_wave_sum<WAVE>(all) / gridDim.y + 1;
    RFK_UNROLL(1)
    for (;; room += room / 8 + RFK_DECODE_CELLS) {
        own = 0;
        for (uint32_t row = lane; row < of.n_rows; row += WAVE) own += rfk_decode_splits_of(of, row, room);
        if (rfk_wave_sum<WAVE>(own) <= gridDim.y) break;
    }
    at = own;
    for (uint32_t distance = 1; distance < (uint32_t)WAVE; distance *= 2) { /* of the lanes up to this one */
        const uint32_t before = rfk_shuffle<WAVE>(at, lane >= distance ? lane - distance : lane);
        at += lane >= distance ? before : 0;
    }
    at -= own;
    for (uint32_t row = lane; row < of.n_rows; row += WAVE) {
        const uint32_t most = rfk_decode_splits_of(of, row, room);
        const rfk_decode_share share = {row, blockIdx.y - at, most, at};
        if (share.split < most) *to = share;
        at += most;
    }
    const rfk_decode_share none = {0, RF_NONE, 1, 0};
    if (lane == WAVE - 1 && blockIdx.y >= at) *to = none;
}

/* TURNS: the splits are those of a row alone, and what was found is which of the row's blocks this is. */
template <int TURNS>
RFK_DEVICE rfk_decode_share rfk_decode_share_of(const rfk_decode_share &found, const rfk_decode_attention_args &a) {
    rfk_decode_share o = {blockIdx.z, blockIdx.y, a.n_splits, blockIdx.z * a.n_splits};
    if (a.n_shared) {
        o.row = rfk_uniform(found.row), o.split = rfk_uniform(found.split);
        o.most = TURNS ? a.n_splits : rfk_uniform(found.most);
        o.slot = TURNS ? o.row * a.n_splits : rfk_uniform(found.slot);
    }
    return o;
}
/* From a block's split to its next: so many blocks take a row's splits in turn. */
RFK_DEVICE uint32_t rfk_decode_stride(const rfk_decode_share &found, const rfk_decode_attention_args &a) {
    return a.n_shared ? rfk_uniform(found.most) : gridDim.y;
}

/* The blocks of a cluster that have positions tell each other that they have begun; the first waits for n_floats. */
RFK_DEVICE void rfk_decode_expect(rfk_mbarrier &parts, uint32_t n_floats) {
    if (threadIdx.x == 0) {
        rfk_mbarrier_init(&parts, 1);
        rfk_mbarrier_expect(&parts, n_floats * (uint32_t)sizeof(float));
    }
    rfk_arrive_at_cluster();
}

/* The cells of a split that begins at `begin`, of a column of the row that ends at `all`; 0: there is no such split. */
template <class KV, int PER>
RFK_DEVICE rfk_decode_cells<KV> rfk_decode_cells_of(const rfk_decode_attention_args &a, const rf_step_row &row,
                                                    uint32_t begin, uint32_t cells, uint32_t all) {
    const uint32_t end = begin + cells < all ? begin + cells : all, lane = threadIdx.x % PER;
    const bool owns_key = end == all && !a.is_stored, inside = lane * 8 < a.head_dim;
    const size_t head = rfk_decode_raw<KV, PER>::row(1, a.head_dim) *
                        ((size_t)row.seq * a.n_kv_heads + (blockIdx.x >> a.columns_log2)) * a.n_cells;
    const rfk_decode_cells<KV> in = {(const KV *)a.k_state + head + lane * 8, (const KV *)a.v_state + head + lane * 8,
                                     begin, end, !inside || !all ? 0 : owns_key ? all - 1 : end,
                                     owns_key ? all - 1 : RF_NONE};
    return in;
}

/* Nothing seen yet. */
template <class KV, int G, int PER> RFK_DEVICE void rfk_decode_clear(rfk_decode_work<KV, G, PER> &work) {
    work.largest = -3e38f; /* finite */
    for (int j = 0; j < rfk_decode_shape<KV, G, PER>::KEPT; j++) work.sum[j] = 0;
    for (int g = 0; g < G; g++)
        for (int e = 0; e < 8; e++) work.acc[g][e] = 0;
}

/* Each query's sink: one more score, whose value is zero. */
template <class KV, int G, int PER>
RFK_DEVICE void rfk_decode_sinks(rfk_decode_work<KV, G, PER> &work, const rfk_decode_attention_args &a) {
    typedef rfk_decode_shape<KV, G, PER> S;
    const rfk_decode_heads heads = rfk_decode_heads_of(a);
    const uint32_t lane = threadIdx.x % PER;
    if (lane / S::LANES >= heads.n) return;
    work.largest = rfk_load_any(a.sinks, a.sinks_type, heads.first + lane / S::LANES) * RFK_LOG2_E;
    work.sum[0] = lane % S::LANES == 0 ? 1.0f : 0.0f;
}

/* grid [columns, blocks of a row, rows], or [columns, blocks of all rows]   columns: KV heads, or parts of their groups
 * block 256   LDS up to 27 KiB, in a cluster 33 more   cluster [1, up to RFK_CLUSTER, 1]
 * Reads each key and value once for all queries of a column. Blocks without positions or queries return. TURNS: blocks
 * take a row's splits in turn, and load the next while they multiply one. */
template <int WAVE, class KV, int G, int PER, int TURNS>
static __global__ void RFK_RESIDENT(RFK_BLOCK, RFK_DECODE_RESIDENT) rfk_decode_attention(rfk_decode_attention_args a) {
    if (!RFK_RUNS_WAVE(WAVE)) return;
    typedef rfk_decode_shape<KV, G, PER> S;
    typedef rfk_decode_shared<G, PER> shared;
    RFK_SHARED(shared, s);
    RFK_DYNAMIC(float4, parts); /* of a cluster's splits */
    const uint32_t pass = S::T * S::SLOTS;
    /* written before the previous kernel began: the step's rows, angles, keys and values of older positions */
    rfk_decode_share share;
    if (a.n_shared) {
        const rfk_decode_rows of = {a.rows, a.n_shared, a.window, pass, a.n_near};
        if (threadIdx.x < WAVE) rfk_decode_find_share<WAVE>(&s.share, of);
        __syncthreads();
    }
    share = rfk_decode_share_of<TURNS>(s.share, a);
    const rf_step_row row = a.rows[share.row];
    uint32_t n = (uint32_t)row.pos + 1, seen = 0; /* visible positions, and the cell of the first */
    if (a.window && n > a.window) seen = (n - a.window) % a.n_cells, n = a.window;
    const uint32_t cells = rfk_decode_cut(n, share.most, rfk_decode_min(n, pass, a.n_near)),
                   n_splits = (n + cells - 1) / cells, all = seen + n, slot = threadIdx.x / PER;
    if (share.split >= n_splits || rfk_decode_heads_of(a).n == 0)
        return; /* split 0 of column 0 waits for the previous kernel, so this one ends after it */
    rfk_decode_work<KV, G, PER> work;
    rfk_decode_pairs<WAVE, PER> pairs;
    uint32_t split = share.split;
    rfk_decode_cells<KV> in = rfk_decode_cells_of<KV, PER>(a, row, seen + split * cells, cells, all);
    if (a.is_stored) rfk_wait_previous();
    rfk_decode_load<KV, PER, S::T>(work.k, in.k, a.n_cells, a.head_dim, in.begin + slot, S::SLOTS, in.older_end);
    rfk_decode_load<KV, PER, S::T>(work.v, in.v, a.n_cells, a.head_dim, in.begin + slot, S::SLOTS, in.older_end);
    rfk_decode_pair<WAVE, PER>(pairs, a, share.row);
    rfk_decode_clear(work);
    if (a.sinks && split == 0 && slot == 0) rfk_decode_sinks(work, a);
    if (threadIdx.x == 0) s.n_splits = n_splits;
    if (RFK_HAS_CLUSTERS && a.is_cluster && n_splits > 1)
        rfk_decode_expect(s.parts, rfk_decode_heads_of(a).n * n_splits * (a.head_dim + 4));
    rfk_decode_norms<G, PER>(s, a);
    if (!a.is_stored) rfk_wait_previous();
    const bool owns_key = TURNS ? !a.is_stored && (n_splits - 1 - split) % rfk_decode_stride(s.share, a) == 0
                                : in.new_pos != RF_NONE;
    rfk_decode_queries<WAVE, G, PER>(s, a, share.row, owns_key, pairs);
    RFK_UNROLL(1)
    for (;;) {
        rfk_decode_cells<KV> next = in;
        __syncthreads(); /* also: what the split before has joined is read */
        if (in.new_pos != RF_NONE) /* all columns of a KV head store the same */
            rfk_decode_store<WAVE>(s, (KV *)in.k - threadIdx.x % PER * 8, (KV *)in.v - threadIdx.x % PER * 8,
                                   (uint32_t)row.pos % a.n_cells, a.head_dim);
        if (TURNS) {
            split += rfk_decode_stride(s.share, a);
            next = rfk_decode_cells_of<KV, PER>(a, row, seen + split * cells, cells, split < n_splits ? all : 0);
        }
        RFK_UNROLL(1)
        for (uint32_t first = in.begin; first < in.end; first += pass) {
            const bool ends = TURNS && first + pass >= in.end;
            rfk_decode_positions<WAVE, KV, G, PER>(s, a, in, first + slot, (ends ? next.begin : first + pass) + slot,
                                                   ends ? next.older_end : in.older_end, work);
        }
        const rfk_decode_share done = rfk_decode_share_of<TURNS>(s.share, a); /* once more: registers are few */
        const rfk_decode_output out = rfk_decode_output_of(a, done, reinterpret_cast<float *>(parts), &s.parts);
        if (out.parts && s.n_splits > 1) rfk_wait_for_cluster(); /* all have begun */
        rfk_decode_join<WAVE, KV, G, PER>(s, out, TURNS ? split - rfk_decode_stride(s.share, a) : done.split, work);
        if (!TURNS || split >= n_splits) break;
        in = next;
        rfk_decode_clear(work);
    }
    if (s.n_splits == 1) return;
    const rfk_decode_share done = rfk_decode_share_of<TURNS>(s.share, a);
    const rfk_decode_output out = rfk_decode_output_of(a, done, reinterpret_cast<float *>(parts), &s.parts);
    if (out.parts) {
        if (done.split) return;
        rfk_mbarrier_wait(out.parts, 0);
        rfk_decode_join_near<WAVE>(out, s.n_splits, PER * 2);
        return;
    }
    const uint32_t stride = rfk_decode_stride(s.share, a),
                   n_blocks = TURNS && stride < s.n_splits ? stride : s.n_splits;
    if (!rfk_decode_last<G, PER>(s, a, done.row, n_blocks)) return;
    if (s.n_splits <= RFK_CLUSTER) rfk_decode_join_near<WAVE>(out, s.n_splits, PER * 2);
    else rfk_decode_join_splits<WAVE>(s.join, out, s.n_splits, G, PER * 2);
}

/* Instances cost time to compile: few queries take those of more, above all with rare types of the cache, and a single
 * one has its own only where clusters are. */
template <int WAVE, class KV, int PER>
static void (*rfk_decode_attention_of(uint32_t queries, int turns))(rfk_decode_attention_args) {
    const bool half = sizeof(KV) == 2;
    if (turns) return rfk_decode_attention<WAVE, KV, RFK_DECODE_GROUP, PER, RFK_HAS_CLUSTERS && half>;
    if (queries == 1) return rfk_decode_attention<WAVE, KV, half ? 2 - RFK_HAS_CLUSTERS : RFK_DECODE_GROUP, PER, 0>;
    if (queries == 2) return rfk_decode_attention<WAVE, KV, half ? 2 : RFK_DECODE_GROUP, PER, 0>;
    return rfk_decode_attention<WAVE, KV, RFK_DECODE_GROUP, PER, 0>;
}
template <int WAVE, class KV>
static void (*rfk_decode_attention_by(uint32_t head_dim, uint32_t queries, int turns))(rfk_decode_attention_args) {
    if (head_dim <= 64) return rfk_decode_attention_of<WAVE, KV, sizeof(KV) == 4 ? 16 : 8>(queries, turns);
    if (head_dim <= 128) return rfk_decode_attention_of<WAVE, KV, 16>(queries, turns);
    return rfk_decode_attention_of<WAVE, KV, 32>(queries, turns);
}
template <int WAVE>
static void (*rfk_find_decode_attention(uint32_t cache_type, uint32_t head_dim,
                                        uint32_t queries, int turns))(rfk_decode_attention_args) {
    if (cache_type == RF_CACHE_F32) return rfk_decode_attention_by<WAVE, float>(head_dim, queries, turns);
    if (cache_type == RF_CACHE_Q8_0) return rfk_decode_attention_by<WAVE, rfk_q8>(head_dim, queries, turns);
    return rfk_decode_attention_by<WAVE, uint16_t>(head_dim, queries, turns);
}

/* ==== 6 Device ========================================================================================== >>device
 * Objects of the device API: device, queue with its tickets, weight table, memory. Every function of it makes its
 * device current for the calling thread and restores the previous one. */

#define RFK_EVENTS 36u                             /* tickets of a queue that can be outstanding without a wait */
#define RFK_STAGING_BYTES ((uint64_t)256 << 10)     /* half of a queue's staging buffer for pageable memory */
#define RFK_REPACK_BYTES ((uint64_t)8 << 20)       /* scratch for repacking; more only if a row is longer */

/* Pinned host memory that was handed out; copies of other memory go through a staging buffer. */
struct rfk_pinned {
    rfk_pinned *next;
    void *base;
    uint64_t size_bytes;
    int shared; /* another device's */
};

/* The fastest launch config for decode steps of plans of one shape, found by timing. */
#define RFK_KNOWN_CONFIGS 16u
struct rfk_known_config {
    uint64_t shape; /* rfk_shape_of the plan */
    uint32_t config;
    float us[RF_LAUNCH_CONFIGS];
};

struct rf_dev {
    rf_allocator allocator;
    int index;
    uint32_t wave;
    rf_device_info info;
    pthread_mutex_t lock; /* guards pinned, known, comm */
    rfk_pinned *pinned;
    rfk_known_config known[RFK_KNOWN_CONFIGS]; /* a ring buffer of the last ones */
    uint32_t n_known;     /* ever found */
    int lost;             /* atomic */
    int graphs;           /* atomic: rfk_graphs */
    int early;            /* programmatic dependent launch works: see rfk_config */
    int clusters;         /* so do clusters */
    uint32_t wrong_units; /* RFK_WRONG_...: what the matrix units got wrong when the device was opened */
    int has_units;
    int units_f16, units_bf16; /* matrix units multiply prompts with such weights */
    int wgmma;                 /* rfk_matmul_wgmma is compiled in and right */
    int large_tiles;           /* it is not compiled in, so that kernels for large tiles are */
    uint32_t direct;           /* most columns of a block of rfk_few_direct: 8 or 16; 0: it is not there */
#if defined(ROCMFORGE_RCCL)
    ncclComm_t comm;           /* NULL: it is no rank, or has left; guarded by lock */
#endif
    uint32_t wait_ms;          /* for other ranks; 0: it is none */
    int ranks_here;            /* all ranks are devices of this process: it says when they leave */
    uint32_t shared_bytes;     /* dynamic shared memory of a block of rfk_flash, at most */
};

/* A kernel for the device's waves. */
#if defined(RFK_NVIDIA)
#define RFK_WITH_WAVE(d, k32, k64) k32
#else
#define RFK_WITH_WAVE(d, k32, k64) ((d)->wave == 32 ? k32 : k64)
#endif
#define RFK_WRONG_BYTES 1u  /* of int8: weights are multiplied without tiles */
#define RFK_WRONG_HALVES 2u /* of halves or bf16: so are such weights; no flash attention */
#define RFK_WRONG_WGMMA 4u  /* of wgmma: prompts are multiplied as int8 */

/* Whether decode steps are replayed as graphs. Checked: compared with launches first, on drivers known to replay large
 * graphs with stale values. */
enum rfk_graphs { RFK_GRAPHS_OFF = 0, RFK_GRAPHS_CHECKED = 1, RFK_GRAPHS_ON = 2 };

struct rf_queue {
    rf_dev *dev;
    hipStream_t stream;
    pthread_mutex_t submit;      /* held while work is added */
    pthread_mutex_t lock;        /* guards the tickets */
    uint32_t last_wait_us;       /* what the last wait of over 2 ms for a ticket took */
    hipEvent_t event[RFK_EVENTS];/* ticket v has [v % RFK_EVENTS], until a later one takes it */
    uint64_t issued, done;
    char *staging;                /* pinned, two halves */
    hipEvent_t staging_event[2];  /* the last copy from each half */
    uint32_t staging_used;        /* bit i: event i was recorded */
};

struct rfk_slot {
    rfk_weight w;
    uint32_t ready;
};

struct rf_table {
    rf_dev *dev;
    const rf_plan *plan;
    rfk_slot *slots;     /* [n_slots] */
    rfk_weight *experts; /* on the device, [n_slots]: experts' matrices by index; NULL: no experts */
    uint64_t generation; /* atomic: changes with any slot, because graphs hold their addresses */
};

/* Record a failure, unless there is one already; returns its code. */
__attribute__((format(printf, 5, 6)))
static rf_result rfk_fail(rf_error *err, rf_result code, int sys, uint64_t where, const char *format, ...) {
    if (err && err->code == RF_OK) {
        va_list args;
        va_start(args, format);
        vsnprintf(err->text, sizeof err->text, format, args);
        va_end(args);
        err->code = code;
        err->sys = sys;
        err->where = where;
        for (char *c = err->text; *c; c++)
            if (*c < 0x20 || *c > 0x7e) *c = '?';
    }
    return code;
}

/* Whether the device takes no more work from this process after this failure. */
static int rfk_is_fatal(hipError_t e) {
    switch ((int)e) {
    case 214: /* uncorrectable memory error */
    case 700: /* illegal address */
    case 702: /* launch timeout */
    case 710: /* device-side assertion */
    case 719: /* launch failure */
    case 721: return 1;
    default: return 0;
    }
}

/* The result of a runtime call: `call` is its name, `object` what it was for. */
static rf_result rfk_check(rf_dev *d, rf_error *err, hipError_t e, const char *call, const char *object,
                           uint64_t where) {
    if (e == hipSuccess) return RF_OK;
    (void)hipGetLastError(); /* clear it: not for the program's next check */
    if (d && rfk_is_fatal(e)) __atomic_store_n(&d->lost, 1, __ATOMIC_RELAXED);
    return rfk_fail(err, RF_ERR_DEVICE, (int)e, where, "%s: %s for %s failed: %s (%d, %s)", d ? d->info.name : "hip",
                    call, object, hipGetErrorString(e), (int)e, hipGetErrorName(e));
}

/* Makes a device current while it lives. `error`: that failed. */
struct rfk_scope {
    int before;
    hipError_t error;
    explicit rfk_scope(int index) : before(-1) {
        error = hipGetDevice(&before);
        if (error != hipSuccess) before = -1;
        else if (before != index) error = hipSetDevice(index);
        else before = -1; /* nothing to restore */
    }
    ~rfk_scope() {
        if (before >= 0 && hipSetDevice(before) != hipSuccess) (void)hipSetDevice(before);
    }
    rfk_scope(const rfk_scope &) = delete;
    rfk_scope &operator=(const rfk_scope &) = delete;
};
static rf_result rfk_check_scope(rf_dev *d, const rfk_scope &scope, rf_error *err) {
    return rfk_check(d, err, scope.error, "hipSetDevice", "the device", 0);
}

static void *rfk_alloc(const rf_allocator *a, uint64_t n, uint64_t element_bytes, const char *what, rf_error *err) {
    uint64_t bytes = n * element_bytes;
    void *p = NULL;
    if (element_bytes == 0 || n <= ((uint64_t)1 << 46) / element_bytes) {
        size_t size = bytes ? (size_t)bytes : 1;
        p = a->alloc_fn ? a->alloc_fn(size, a->user) : malloc(size);
        if (p) memset(p, 0, size);
    }
    if (!p)
        rfk_fail(err, RF_ERR_MEMORY, 0, 0, "out of memory: %llu x %llu bytes for %s", (unsigned long long)n,
                 (unsigned long long)element_bytes, what);
    return p;
}
static void rfk_free(const rf_allocator *a, void *p) {
    if (!p) return;
    if (a->free_fn) a->free_fn(p, a->user);
    else free(p);
}

/* ---- devices ---- */

/* The name up to the first colon: "gfx90a" of "gfx90a:sramecc+:xnack-". */
static void rfk_arch_name(const hipDeviceProp_t &p, char *out, size_t capacity) {
#if defined(RFK_NVIDIA)
    snprintf(out, capacity, "sm_%d%d", p.major, p.minor);
#else
    snprintf(out, capacity, "%.*s", (int)strcspn(p.gcnArchName, ":"), p.gcnArchName);
#endif
}

/* Why there is no device, in words that help the user. */
static void rfk_no_device(rf_device_info *out, hipError_t e) {
    memset(out, 0, sizeof *out);
    out->is_gpu = 1;
    snprintf(out->name, sizeof out->name, "hip");
    snprintf(out->text, sizeof out->text, "no GPU");
#if defined(RFK_NVIDIA)
    snprintf(out->note, sizeof out->note, "no usable NVIDIA GPU: %s", hipGetErrorString(e));
#elif defined(ROCMFORGE_HIP_EMU)
    snprintf(out->note, sizeof out->note, "no usable GPU: %s", hipGetErrorString(e));
#else
    if (access("/dev/kfd", F_OK) != 0)
        snprintf(out->note, sizeof out->note,
                 "no AMD GPU driver: /dev/kfd is missing (load the amdgpu kernel module)");
    else if (access("/dev/kfd", R_OK | W_OK) != 0)
        snprintf(out->note, sizeof out->note,
                 "no permission on /dev/kfd: add the user to the groups render and video, then log in again");
    else
        snprintf(out->note, sizeof out->note, "no usable AMD GPU: %s", hipGetErrorString(e));
#endif
}

static rf_result rfk_describe(int index, rf_device_info *out, uint32_t *shared_bytes, rf_error *err) {
    hipDeviceProp_t p;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "hip:%d", index);
    hipError_t e = hipGetDeviceProperties(&p, index);
    if (e != hipSuccess) return rfk_check(NULL, err, e, "hipGetDeviceProperties", out->name, 0);
    snprintf(out->text, sizeof out->text, "%.*s", (int)(sizeof out->text - 1), p.name);
    rfk_arch_name(p, out->arch, sizeof out->arch);
    out->is_gpu = 1;
    out->wave_size = (uint32_t)p.warpSize;
    out->compute_units = (uint32_t)p.multiProcessorCount;
    out->total_bytes = p.totalGlobalMem;
#if defined(RFK_NVIDIA)
    *shared_bytes = (uint32_t)p.sharedMemPerBlockOptin;
#else
    *shared_bytes = (uint32_t)p.sharedMemPerBlock;
#endif
    out->usable = p.warpSize == 32 || p.warpSize == 64;
    if (!out->usable) snprintf(out->note, sizeof out->note, "waves of %d lanes are not supported", p.warpSize);
    else if (p.integrated) snprintf(out->note, sizeof out->note, "integrated GPU: shares the host's memory");
    size_t free_bytes = 0, total_bytes = 0;
    rfk_scope scope(index);
    if (scope.error == hipSuccess && hipMemGetInfo(&free_bytes, &total_bytes) == hipSuccess)
        out->free_bytes = free_bytes;
    return RF_OK;
}

static rf_result rfk_device_list(rf_device_info *out, uint32_t capacity, uint32_t *count, rf_error *err) {
    int n = 0;
    uint32_t shared_bytes;
    hipError_t e = hipGetDeviceCount(&n);
    (void)err;
    if (e != hipSuccess) (void)hipGetLastError();
    if (e != hipSuccess || n <= 0) { /* no failure of the call: the list says why */
        *count = 1;
        if (capacity) rfk_no_device(out, e);
        return RF_OK;
    }
    *count = (uint32_t)n;
    for (uint32_t i = 0; i < capacity && i < (uint32_t)n; i++) {
        rf_error why;
        memset(&why, 0, sizeof why);
        if (rfk_describe((int)i, &out[i], &shared_bytes, &why) != RF_OK)
            snprintf(out[i].note, sizeof out[i].note, "%.150s", why.text);
    }
    return RF_OK;
}

/* Put p in the device's list. */
static void rfk_add_pinned(rf_dev *d, rfk_pinned *p, void *base, uint64_t size_bytes, int shared) {
    p->base = base;
    p->size_bytes = size_bytes;
    p->shared = shared;
    pthread_mutex_lock(&d->lock);
    p->next = d->pinned;
    d->pinned = p;
    pthread_mutex_unlock(&d->lock);
}

static rf_result rfk_host_create(rf_dev *d, uint64_t size_bytes, void **out, rf_error *err) {
    rfk_scope scope(d->index);
    if (scope.error != hipSuccess) return rfk_check_scope(d, scope, err);
    *out = NULL;
    rfk_pinned *p = (rfk_pinned *)rfk_alloc(&d->allocator, 1, sizeof *p, "pinned memory", err);
    if (!p) return RF_ERR_MEMORY;
    void *base = NULL;
    rf_result r = rfk_check(d, err, hipHostMalloc(&base, (size_t)(size_bytes ? size_bytes : 1), hipHostMallocPortable),
                            "hipHostMalloc", "pinned memory", 0);
    if (r == RF_OK) rfk_add_pinned(d, p, *out = base, size_bytes, 0);
    else rfk_free(&d->allocator, p);
    return r;
}

static rf_result rfk_host_share(rf_dev *d, void *host, uint64_t size_bytes, rf_error *err) {
    rfk_pinned *p = (rfk_pinned *)rfk_alloc(&d->allocator, 1, sizeof *p, "pinned memory", err);
    if (!p) return RF_ERR_MEMORY;
    rfk_add_pinned(d, p, host, size_bytes, 1);
    return RF_OK;
}

static void rfk_host_release(rf_dev *d, void *host) {
    if (!host) return;
    pthread_mutex_lock(&d->lock);
    rfk_pinned **at = &d->pinned;
    while (*at && (*at)->base != host) at = &(*at)->next;
    rfk_pinned *p = *at;
    if (p) *at = p->next;
    pthread_mutex_unlock(&d->lock);
    rfk_scope scope(d->index);
    if (!p || !p->shared) (void)hipHostFree(host);
    rfk_free(&d->allocator, p);
}

#define RFK_PEER_IS_OPEN 704 /* hipErrorPeerAccessAlreadyEnabled: the program, or another group */

static rf_result rfk_peer_open(rf_dev *d, rf_dev *other, rf_error *err) {
    int can = 0;
    if (d->index == other->index) return RF_OK;
    rfk_scope scope(d->index);
    if (scope.error != hipSuccess) return rfk_check_scope(d, scope, err);
    rf_result r = rfk_check(d, err, hipDeviceCanAccessPeer(&can, d->index, other->index), "hipDeviceCanAccessPeer",
                            other->info.name, 0);
    if (r != RF_OK) return r;
    if (!can)
        return rfk_fail(err, RF_ERR_UNSUPPORTED, 0, 0, "%s: no peer access to %s", d->info.name, other->info.name);
    const hipError_t e = hipDeviceEnablePeerAccess(other->index, 0);
    if ((int)e == RFK_PEER_IS_OPEN) return (void)hipGetLastError(), RF_OK;
    return rfk_check(d, err, e, "hipDeviceEnablePeerAccess", other->info.name, 0);
}

static int rfk_is_pinned(rf_dev *d, const void *p, uint64_t n) {
    int found = 0;
    pthread_mutex_lock(&d->lock);
    for (const rfk_pinned *i = d->pinned; i && !found; i = i->next) {
        uintptr_t base = (uintptr_t)i->base, at = (uintptr_t)p;
        found = at >= base && at - base <= i->size_bytes && n <= i->size_bytes - (at - base);
    }
    pthread_mutex_unlock(&d->lock);
    return found;
}

static rf_result rfk_mem_create(rf_dev *d, uint64_t size_bytes, rf_mem *out, rf_error *err) {
    rfk_scope scope(d->index);
    if (scope.error != hipSuccess) return rfk_check_scope(d, scope, err);
    char what[64];
    memset(out, 0, sizeof *out);
    snprintf(what, sizeof what, "%llu bytes of device memory", (unsigned long long)size_bytes);
    rf_result r =
        rfk_check(d, err, hipMalloc(&out->base, (size_t)(size_bytes ? size_bytes : 1)), "hipMalloc", what, 0);
    if (r == RF_OK) out->size_bytes = size_bytes;
    else out->base = NULL;
    return r;
}

/* Memory of hipMalloc is coherent between AMD's GPUs at the end of a kernel only. */
static rf_result rfk_shared_create(rf_dev *d, uint64_t size_bytes, rf_mem *out, rf_error *err) {
#if defined(RFK_NVIDIA)
    return rfk_mem_create(d, size_bytes, out, err);
#else
    rfk_scope scope(d->index);
    if (scope.error != hipSuccess) return rfk_check_scope(d, scope, err);
    memset(out, 0, sizeof *out);
    rf_result r = rfk_check(d, err, hipExtMallocWithFlags(&out->base, (size_t)size_bytes, hipDeviceMallocFinegrained),
                            "hipExtMallocWithFlags", "memory for sums of several devices", 0);
    if (r == RF_OK) out->size_bytes = size_bytes;
    else out->base = NULL;
    return r;
#endif
}

static void rfk_mem_release(rf_dev *d, rf_mem *mem) {
    rfk_scope scope(d->index);
    if (mem->base) (void)hipFree(mem->base);
    memset(mem, 0, sizeof *mem);
}

/* Add a note about the device. */
__attribute__((format(printf, 2, 3))) static void rfk_add_note(rf_device_info *out, const char *format, ...) {
    va_list args;
    size_t n = strlen(out->note);
    if (n) n += (size_t)snprintf(out->note + n, sizeof out->note - n, "; ");
    if (n >= sizeof out->note) return;
    va_start(args, format);
    vsnprintf(out->note + n, sizeof out->note - n, format, args);
    va_end(args);
}

static rf_result rfk_device_info(rf_dev *d, rf_device_info *out, rf_error *err) {
    *out = d->info;
    out->lost = (uint32_t)__atomic_load_n(&d->lost, __ATOMIC_RELAXED);
    out->free_bytes = 0;
    const uint32_t wrong = d->wrong_units & (RFK_WRONG_BYTES | RFK_WRONG_HALVES);
    if (wrong)
        rfk_add_note(out, "matrix units give wrong products of %s%s%s here: dot products are used instead",
                     wrong & RFK_WRONG_BYTES ? "bytes" : "",
                     wrong == (RFK_WRONG_BYTES | RFK_WRONG_HALVES) ? " and " : "",
                     wrong & RFK_WRONG_HALVES ? "halves" : "");
    if (d->wrong_units & RFK_WRONG_WGMMA)
        rfk_add_note(out, "wgmma gives wrong products here: prompts do without");
    if (__atomic_load_n(&d->graphs, __ATOMIC_RELAXED) == RFK_GRAPHS_OFF)
        rfk_add_note(out, "graphs are off: this driver replays them with stale values");
    rfk_scope scope(d->index);
    if (scope.error != hipSuccess) return rfk_check_scope(d, scope, err);
    size_t free_bytes = 0, total_bytes = 0;
    rf_result r = rfk_check(d, err, hipMemGetInfo(&free_bytes, &total_bytes), "hipMemGetInfo", "device_info", 0);
    if (r == RF_OK) out->free_bytes = free_bytes;
    return r;
}

/* ---- queues and tickets ----
 * When a function that takes a queue fails, nothing of the queue is running any more: the caller may free its memory.
 * */

static void rfk_rank_leave(rf_dev *d);
static rf_result rfk_settle(rf_queue *q, rf_result r) {
    if (r != RF_OK) {
        if (!q->dev->ranks_here) rfk_rank_leave(q->dev); /* else the queue might wait for another rank without end */
        (void)hipStreamSynchronize(q->stream);
        (void)hipGetLastError();
    }
    return r;
}
/* The failure of `scope`, with nothing of the queue running. */
static rf_result rfk_enter_queue(rf_queue *q, const rfk_scope &scope, rf_error *err) {
    return rfk_settle(q, rfk_check_scope(q->dev, scope, err));
}

static void rfk_queue_release(rf_queue *q) {
    rf_dev *d = q->dev;
    rfk_scope scope(d->index);
    if (q->stream) {
        (void)hipStreamSynchronize(q->stream);
        (void)hipStreamDestroy(q->stream);
    }
    for (uint32_t i = 0; i < RFK_EVENTS; i++)
        if (q->event[i]) (void)hipEventDestroy(q->event[i]);
    for (int i = 0; i < 2; i++)
        if (q->staging_event[i]) (void)hipEventDestroy(q->staging_event[i]);
    if (q->staging) (void)hipHostFree(q->staging);
    pthread_mutex_destroy(&q->submit);
    pthread_mutex_destroy(&q->lock);
    rfk_free(&d->allocator, q);
}

static rf_result rfk_queue_create(rf_dev *d, rf_queue **out, rf_error *err) {
    rfk_scope scope(d->index);
    if (scope.error != hipSuccess) return rfk_check_scope(d, scope, err);
    *out = NULL;
    rf_queue *q = (rf_queue *)rfk_alloc(&d->allocator, 1, sizeof *q, "a queue", err);
    if (!q) return RF_ERR_MEMORY;
    q->dev = d;
    pthread_mutex_init(&q->submit, NULL); /* cannot fail with default attributes on Linux */
    pthread_mutex_init(&q->lock, NULL);
    void *staging = NULL;
    rf_result r = rfk_check(d, err, hipStreamCreateWithFlags(&q->stream, hipStreamNonBlocking),
                            "hipStreamCreateWithFlags", "a queue", 0);
    if (r == RF_OK)
        r = rfk_check(d, err, hipHostMalloc(&staging, (size_t)(2 * RFK_STAGING_BYTES), hipHostMallocPortable),
                      "hipHostMalloc", "a queue", 0);
    q->staging = (char *)staging;
    for (uint32_t i = 0; r == RF_OK && i < RFK_EVENTS + 2; i++) {
        hipEvent_t *e = i < RFK_EVENTS ? &q->event[i] : &q->staging_event[i - RFK_EVENTS];
        r = rfk_check(d, err, hipEventCreateWithFlags(e, hipEventDisableTiming), "hipEventCreateWithFlags", "a queue",
                      0);
    }
    if (r != RF_OK) rfk_queue_release(q);
    else *out = q;
    return r;
}

/* A ticket for everything added so far. Waits only if RFK_EVENTS tickets are outstanding. */
static rf_result rfk_ticket_record(rf_queue *q, rf_ticket *ticket, rf_error *err) {
    rf_result r = RF_OK;
    if (!ticket) return RF_OK;
    pthread_mutex_lock(&q->lock);
    uint64_t value = q->issued + 1;
    hipEvent_t event = q->event[value % RFK_EVENTS];
    if (value > RFK_EVENTS && q->done < value - RFK_EVENTS) {
        r = rfk_check(q->dev, err, hipEventSynchronize(event), "hipEventSynchronize", "a ticket", 0);
        if (r == RF_OK) q->done = value - RFK_EVENTS;
    }
    if (r == RF_OK) r = rfk_check(q->dev, err, hipEventRecord(event, q->stream), "hipEventRecord", "a ticket", 0);
    if (r == RF_OK) {
        q->issued = value;
        ticket->queue = q;
        ticket->value = value;
    }
    pthread_mutex_unlock(&q->lock);
    return r;
}

/* The end of a function that added work: a ticket unless r is a failure, and q->submit is released. */
static rf_result rfk_end_submit(rf_queue *q, rf_result r, rf_ticket *ticket, rf_error *err) {
    if (r == RF_OK) r = rfk_ticket_record(q, ticket, err);
    r = rfk_settle(q, r);
    pthread_mutex_unlock(&q->submit);
    return r;
}

/* hipSuccess, hipErrorNotReady, or how the work failed. If the ticket's event now stands for a later one, the ticket is
 * known to be done. */
static hipError_t rfk_ticket_query(const rf_ticket *ticket) {
    rf_queue *q = ticket->queue;
    hipError_t e = hipSuccess;
    pthread_mutex_lock(&q->lock);
    if (ticket->value > q->done) {
        e = hipEventQuery(q->event[ticket->value % RFK_EVENTS]);
        if (e == hipSuccess) q->done = ticket->value;
    }
    pthread_mutex_unlock(&q->lock);
    if (e != hipSuccess) (void)hipGetLastError();
    return e;
}

static int rfk_ticket_done(const rf_ticket *ticket) {
    if (!ticket || !ticket->queue || ticket->value == 0) return 1;
    rfk_scope scope(ticket->queue->dev->index);
    return rfk_ticket_query(ticket) != hipErrorNotReady; /* failed work is done; ticket_wait says how */
}

static double rfk_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void rfk_no_ticket(rf_ticket *ticket) {
    if (ticket) memset(ticket, 0, sizeof *ticket);
}

static rf_result rfk_range(const rf_mem *mem, uint64_t offset, uint64_t n, const char *what, rf_error *err) {
    if (offset <= mem->size_bytes && n <= mem->size_bytes - offset) return RF_OK;
    return rfk_fail(err, RF_ERR_ARGUMENT, 0, offset, "hip: %s of %llu bytes at %llu, the block has %llu", what,
                    (unsigned long long)n, (unsigned long long)offset, (unsigned long long)mem->size_bytes);
}

/* ---- ranks ----
 * Processes with a GPU each, joined by a communicator that does not block: what is in progress is asked for until a
 * time-out. After a failure a rank has left, since what it would send next is not what the others wait for. */

#if defined(ROCMFORGE_RCCL)
static_assert(sizeof(ncclUniqueId) == RF_RANK_ID_BYTES, "an id");

#define RFK_HAS_LEFT ncclNumResults /* there is no communicator */

static ncclResult_t rfk_comm_state(rf_dev *d) {
    ncclResult_t e = RFK_HAS_LEFT;
    pthread_mutex_lock(&d->lock);
    if (d->comm) {
        const ncclResult_t asked = ncclCommGetAsyncError(d->comm, &e);
        if (asked != ncclSuccess) e = asked;
    }
    pthread_mutex_unlock(&d->lock);
    return e;
}

/* The result of a call, e, when it is no longer in progress. */
static rf_result rfk_comm_wait(rf_dev *d, ncclResult_t e, const char *call, rf_error *err) {
    const double start = rfk_now();
    while (e == ncclInProgress && (rfk_now() - start) * 1e3 < (double)d->wait_ms) {
        const struct timespec nap = {0, 10000};
        e = rfk_comm_state(d);
        if (e == ncclInProgress) nanosleep(&nap, NULL);
    }
    if (e == ncclSuccess) return RF_OK;
    if (e == ncclInProgress)
        return rfk_fail(err, RF_ERR_DEVICE, (int)e, 0, "%s: %s: not finished after %u ms", d->info.name, call,
                        d->wait_ms);
    return rfk_fail(err, RF_ERR_DEVICE, (int)e, 0, "%s: %s: %s", d->info.name, call,
                    e == RFK_HAS_LEFT ? "this rank has left" : ncclGetErrorString(e));
}

static rf_result rfk_rank_id(uint8_t *id, rf_error *err) {
    ncclUniqueId made;
    const ncclResult_t e = ncclGetUniqueId(&made);
    if (e != ncclSuccess)
        return rfk_fail(err, RF_ERR_DEVICE, (int)e, 0, "hip: ncclGetUniqueId: %s", ncclGetErrorString(e));
    memcpy(id, &made, sizeof made);
    return RF_OK;
}

static void rfk_rank_leave(rf_dev *d) {
    pthread_mutex_lock(&d->lock);
    if (d->comm) (void)ncclCommAbort(d->comm);
    d->comm = NULL;
    pthread_mutex_unlock(&d->lock);
}

static rf_result rfk_rank_join(rf_dev *const *d, uint32_t n, const rf_device_desc *desc, rf_error *err) {
    ncclResult_t e[RF_MAX_MEMBERS];
    ncclUniqueId id;
    uint32_t begun = 0;
    rf_result r = RF_OK;
    memcpy(&id, desc->rank_id, sizeof id);
    for (; r == RF_OK && begun < n; begun++) {
        rf_dev *one = d[begun];
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        ncclComm_t comm = NULL;
        rfk_scope scope(one->index);
        if ((r = rfk_check_scope(one, scope, err)) != RF_OK) break;
        config.blocking = 0;
        one->wait_ms = desc->rank_wait_ms;
        one->ranks_here = n > 1;
        e[begun] = ncclCommInitRankConfig(&comm, (int)desc->ranks, id, (int)(desc->rank + begun), &config);
        one->comm = comm;
        if (e[begun] != ncclInProgress) r = rfk_comm_wait(one, e[begun], "ncclCommInitRankConfig", err);
    }
    for (uint32_t i = 0; r == RF_OK && i < n; i++) r = rfk_comm_wait(d[i], e[i], "ncclCommInitRankConfig", err);
    for (uint32_t i = 0; r != RF_OK && i < begun; i++) rfk_rank_leave(d[i]);
    return r;
}

/* When nothing is in flight: others may still read what this rank has sent. */
static void rfk_rank_finish(rf_dev *d) {
    pthread_mutex_lock(&d->lock);
    const ncclResult_t e = d->comm ? ncclCommFinalize(d->comm) : RFK_HAS_LEFT;
    pthread_mutex_unlock(&d->lock);
    if (rfk_comm_wait(d, e, "ncclCommFinalize", NULL) == RF_OK) {
        (void)ncclCommDestroy(d->comm);
        d->comm = NULL;
    }
    rfk_rank_leave(d);
}

static ncclResult_t rfk_transfer_all(rf_queue *const *q, uint32_t n_queues, const rf_transfer *t, uint32_t n) {
    for (uint32_t k = 0; k < n_queues; k++)
        if (!q[k]->dev->comm) return RFK_HAS_LEFT;
    ncclResult_t e = ncclGroupStart();
    if (e != ncclSuccess) return e;
    for (uint32_t i = 0; (e == ncclSuccess || e == ncclInProgress) && i < n_queues * n; i++) {
        const rf_queue *own = q[i / n];
        char *at = (char *)t[i].at.mem->base + t[i].at.offset;
        const int peer = (int)t[i].peer;
        e = t[i].is_send ? ncclSend(at, (size_t)t[i].n, ncclInt8, peer, own->dev->comm, own->stream)
                         : ncclRecv(at, (size_t)t[i].n, ncclInt8, peer, own->dev->comm, own->stream);
    }
    const ncclResult_t end = ncclGroupEnd();
    return e == ncclSuccess || e == ncclInProgress ? end : e;
}

/* Locks of several queues and devices are taken in the queues' order. */
static rf_result rfk_transfer(rf_queue *const *q, uint32_t n_queues, const rf_transfer *t, uint32_t n,
                              rf_ticket *tickets, rf_error *err) {
    rf_result r = RF_OK;
    for (uint32_t k = 0; k < n_queues; k++) rfk_no_ticket(&tickets[k]);
    for (uint32_t i = 0; r == RF_OK && i < n_queues * n; i++)
        r = rfk_range(t[i].at.mem, t[i].at.offset, t[i].n, "transfer", err);
    if (r != RF_OK) return r;
    rfk_scope scope(q[0]->dev->index);
    if (scope.error != hipSuccess) return rfk_enter_queue(q[0], scope, err);
    for (uint32_t k = 0; k < n_queues; k++) pthread_mutex_lock(&q[k]->submit);
    for (uint32_t k = 0; k < n_queues; k++) pthread_mutex_lock(&q[k]->dev->lock);
    const ncclResult_t e = rfk_transfer_all(q, n_queues, t, n);
    for (uint32_t k = 0; k < n_queues; k++) pthread_mutex_unlock(&q[k]->dev->lock);
    for (uint32_t k = 0; r == RF_OK && k < n_queues; k++) r = rfk_comm_wait(q[k]->dev, e, "ncclGroupEnd", err);
    for (uint32_t k = 0; r != RF_OK && k < n_queues; k++) rfk_rank_leave(q[k]->dev);
    for (uint32_t k = 0; k < n_queues; k++) {
        rfk_scope own(q[k]->dev->index);
        if (r == RF_OK) r = rfk_check_scope(q[k]->dev, own, err);
        const rf_result one = rfk_end_submit(q[k], r, &tickets[k], err);
        if (r == RF_OK) r = one;
    }
    return r;
}

static_assert(sizeof(hipIpcMemHandle_t) == RF_HANDLE_BYTES, "a handle");

static rf_result rfk_mem_export(rf_dev *d, const rf_mem *mem, uint8_t *handle, rf_error *err) {
    hipIpcMemHandle_t of;
    rfk_scope scope(d->index);
    if (scope.error != hipSuccess) return rfk_check_scope(d, scope, err);
    const rf_result r = rfk_check(d, err, hipIpcGetMemHandle(&of, mem->base), "hipIpcGetMemHandle", "memory", 0);
    if (r == RF_OK) memcpy(handle, &of, sizeof of);
    return r;
}

static rf_result rfk_mem_import(rf_dev *d, const uint8_t *handle, uint64_t size_bytes, rf_mem *out, rf_error *err) {
    hipIpcMemHandle_t of;
    rfk_scope scope(d->index);
    memset(out, 0, sizeof *out);
    if (scope.error != hipSuccess) return rfk_check_scope(d, scope, err);
    memcpy(&of, handle, sizeof of);
    const rf_result r = rfk_check(d, err, hipIpcOpenMemHandle(&out->base, of, hipIpcMemLazyEnablePeerAccess),
                                  "hipIpcOpenMemHandle", "memory of another rank", 0);
    if (r == RF_OK) out->size_bytes = size_bytes;
    else out->base = NULL;
    return r;
}

static void rfk_mem_forget(rf_dev *d, rf_mem *mem) {
    rfk_scope scope(d->index);
    if (mem->base) (void)hipIpcCloseMemHandle(mem->base);
    memset(mem, 0, sizeof *mem);
}
#else
static void rfk_rank_leave(rf_dev *d) { (void)d; }
static void rfk_rank_finish(rf_dev *d) { (void)d; }
#endif

/* ---- waiting and copies ---- */

/* Whether to sleep between two polls, of a wait of so many seconds. A sleep takes 0.1 ms, which would make a decode
 * step longer: none in the first 2 ms, nor around the time that the queue's last long wait took, if below 20 ms. */
static bool rfk_may_sleep(double waited, double last) {
    return waited > 2e-3 && (last > 20e-3 || waited < 0.95 * last - 3e-4 || waited > last + 2e-3);
}

static rf_result rfk_ticket_wait(const rf_ticket *ticket, uint32_t timeout_ms, rf_error *err) {
    if (!ticket || !ticket->queue || ticket->value == 0) return RF_OK;
    rf_dev *d = ticket->queue->dev;
    rfk_scope scope(ticket->queue->dev->index);
    if (scope.error != hipSuccess) return rfk_enter_queue(ticket->queue, scope, err);
    uint32_t *const last_us = &ticket->queue->last_wait_us;
    const double start = rfk_now(), last = __atomic_load_n(last_us, __ATOMIC_RELAXED) * 1e-6;
    for (;;) {
        hipError_t e = rfk_ticket_query(ticket);
        const double waited = rfk_now() - start;
        if (e != hipErrorNotReady) {
            if (waited > 2e-3) __atomic_store_n(last_us, (uint32_t)(fmin(waited, 3600) * 1e6), __ATOMIC_RELAXED);
            return rfk_settle(ticket->queue, rfk_check(d, err, e, "hipEventQuery", "work of a queue", 0));
        }
        if (waited * 1e3 > (double)timeout_ms)
            return rfk_fail(err, RF_ERR_DEVICE, 0, 0, "%s: not finished after %u ms", d->info.name, timeout_ms);
#if defined(ROCMFORGE_RCCL)
        const ncclResult_t state = waited > 2e-3 && d->wait_ms ? rfk_comm_state(d) : ncclSuccess;
        if (state != ncclSuccess && state != ncclInProgress && !(state == RFK_HAS_LEFT && d->ranks_here))
            return rfk_comm_wait(d, state, "ncclSend or ncclRecv", err);
#endif
        if (rfk_may_sleep(waited, last)) {
            struct timespec nap = {0, 50000};
            nanosleep(&nap, NULL);
        }
    }
}

static rf_result rfk_queue_after(rf_queue *q, const rf_ticket *ticket, rf_error *err) {
    if (!ticket || !ticket->queue || ticket->value == 0 || ticket->queue == q) return RF_OK;
    rfk_scope scope(q->dev->index);
    if (scope.error != hipSuccess) return rfk_enter_queue(q, scope, err);
    rf_queue *other = ticket->queue;
    rf_result r = RF_OK;
    pthread_mutex_lock(&other->lock);
    if (ticket->value > other->done)
        r = rfk_check(q->dev, err, hipStreamWaitEvent(q->stream, other->event[ticket->value % RFK_EVENTS], 0),
                      "hipStreamWaitEvent", "queue_after", 0);
    pthread_mutex_unlock(&other->lock);
    return r;
}

/* ---- copies ---- */

/* Wait until half i of the staging buffer is free. */
static rf_result rfk_staging_wait(rf_queue *q, uint32_t i, rf_error *err) {
    if (!(q->staging_used >> i & 1)) return RF_OK;
    return rfk_check(q->dev, err, hipEventSynchronize(q->staging_event[i]), "hipEventSynchronize", "staging", 0);
}
static rf_result rfk_staging_record(rf_queue *q, uint32_t i, rf_error *err) {
    rf_result r =
        rfk_check(q->dev, err, hipEventRecord(q->staging_event[i], q->stream), "hipEventRecord", "staging", 0);
    if (r == RF_OK) q->staging_used |= 1u << i;
    return r;
}

/* Host to device. Memory that is not pinned has been copied when this returns. Requires q->submit. */
static rf_result rfk_copy_in(rf_queue *q, char *dst, const void *src, uint64_t n, const char *what, rf_error *err) {
    if (rfk_is_pinned(q->dev, src, n))
        return rfk_check(q->dev, err, hipMemcpyAsync(dst, src, (size_t)n, hipMemcpyHostToDevice, q->stream),
                         "hipMemcpyAsync", what, 0);
    rf_result r = RF_OK;
    uint32_t half = 0;
    for (uint64_t at = 0; r == RF_OK && at < n; at += RFK_STAGING_BYTES, half ^= 1) {
        size_t bytes = (size_t)(n - at < RFK_STAGING_BYTES ? n - at : RFK_STAGING_BYTES);
        char *stage = q->staging + half * RFK_STAGING_BYTES;
        r = rfk_staging_wait(q, half, err);
        if (r != RF_OK) break;
        memcpy(stage, (const char *)src + at, bytes);
        r = rfk_check(q->dev, err, hipMemcpyAsync(dst + at, stage, bytes, hipMemcpyHostToDevice, q->stream),
                      "hipMemcpyAsync", what, 0);
        if (r == RF_OK) r = rfk_staging_record(q, half, err);
    }
    return r;
}

static rf_result rfk_mem_write(rf_queue *q, const rf_mem *dst, uint64_t offset, const void *src, uint64_t n,
                               rf_ticket *ticket, rf_error *err) {
    rfk_no_ticket(ticket);
    rf_result r = rfk_range(dst, offset, n, "mem_write", err);
    if (r != RF_OK || n == 0) return r;
    rfk_scope scope(q->dev->index);
    if (scope.error != hipSuccess) return rfk_enter_queue(q, scope, err);
    pthread_mutex_lock(&q->submit);
    r = rfk_copy_in(q, (char *)dst->base + offset, src, n, "mem_write", err);
    return rfk_end_submit(q, r, ticket, err);
}

static rf_result rfk_mem_read(rf_queue *q, const rf_mem *src, uint64_t offset, void *dst, uint64_t n,
                              rf_ticket *ticket, rf_error *err) {
    rfk_no_ticket(ticket);
    rf_result r = rfk_range(src, offset, n, "mem_read", err);
    if (r != RF_OK || n == 0) return r;
    rfk_scope scope(q->dev->index);
    if (scope.error != hipSuccess) return rfk_enter_queue(q, scope, err);
    const char *from = (const char *)src->base + offset;
    pthread_mutex_lock(&q->submit);
    if (rfk_is_pinned(q->dev, dst, n)) {
        r = rfk_check(q->dev, err, hipMemcpyAsync(dst, from, (size_t)n, hipMemcpyDeviceToHost, q->stream),
                      "hipMemcpyAsync", "mem_read", 0);
    } else { /* done when the call returns */
        ticket = NULL;
        for (int i = 0; r == RF_OK && i < 2; i++) r = rfk_staging_wait(q, (uint32_t)i, err);
        for (uint64_t at = 0; r == RF_OK && at < n; at += RFK_STAGING_BYTES) {
            size_t bytes = (size_t)(n - at < RFK_STAGING_BYTES ? n - at : RFK_STAGING_BYTES);
            r = rfk_check(q->dev, err, hipMemcpyAsync(q->staging, from + at, bytes, hipMemcpyDeviceToHost, q->stream),
                          "hipMemcpyAsync", "mem_read", 0);
            if (r == RF_OK)
                r = rfk_check(q->dev, err, hipStreamSynchronize(q->stream), "hipStreamSynchronize", "mem_read", 0);
            if (r == RF_OK) memcpy((char *)dst + at, q->staging, bytes);
        }
    }
    return rfk_end_submit(q, r, ticket, err);
}

static rf_result rfk_mem_copy(rf_queue *q, rf_mem_at dst, rf_mem_at src, uint64_t n, rf_ticket *ticket,
                              rf_error *err) {
    rfk_no_ticket(ticket);
    rf_result r = rfk_range(dst.mem, dst.offset, n, "mem_copy", err);
    if (r == RF_OK) r = rfk_range(src.mem, src.offset, n, "mem_copy", err);
    if (r != RF_OK || n == 0) return r;
    rfk_scope scope(q->dev->index);
    if (scope.error != hipSuccess) return rfk_enter_queue(q, scope, err);
    pthread_mutex_lock(&q->submit);
    r = rfk_check(q->dev, err,
                  hipMemcpyAsync((char *)dst.mem->base + dst.offset, (const char *)src.mem->base + src.offset,
                                 (size_t)n, hipMemcpyDeviceToDevice, q->stream),
                  "hipMemcpyAsync", "mem_copy", 0);
    return rfk_end_submit(q, r, ticket, err);
}

static rf_result rfk_mem_fill(rf_queue *q, const rf_mem *dst, uint64_t offset, uint8_t value, uint64_t n,
                              rf_ticket *ticket, rf_error *err) {
    rfk_no_ticket(ticket);
    rf_result r = rfk_range(dst, offset, n, "mem_fill", err);
    if (r != RF_OK || n == 0) return r;
    rfk_scope scope(q->dev->index);
    if (scope.error != hipSuccess) return rfk_enter_queue(q, scope, err);
    pthread_mutex_lock(&q->submit);
    r = rfk_check(q->dev, err, hipMemsetAsync((char *)dst->base + offset, value, (size_t)n, q->stream),
                  "hipMemsetAsync", "mem_fill", 0);
    return rfk_end_submit(q, r, ticket, err);
}

#define RFK_SUM_BLOCKS 16u /* of each compute unit */

static rf_result rfk_mem_sum(rf_queue *q, rf_mem_at src, uint64_t n, rf_mem_at sum, rf_ticket *ticket, rf_error *err) {
    rfk_no_ticket(ticket);
    rf_result r = rfk_range(src.mem, src.offset, n, "mem_sum", err);
    if (r == RF_OK) r = rfk_range(sum.mem, sum.offset, 8, "mem_sum", err);
    if (r == RF_OK && (src.offset % 16 || n % 16 || sum.offset % 8))
        r = rfk_fail(err, RF_ERR_ARGUMENT, 0, src.offset, "hip: mem_sum of %llu bytes at %llu: want multiples of 16",
                     (unsigned long long)n, (unsigned long long)src.offset);
    if (r != RF_OK || n == 0) return r;
    rfk_scope scope(q->dev->index);
    if (scope.error != hipSuccess) return rfk_enter_queue(q, scope, err);
    rfk_sum_args a = {(const rfk_sixteen *)(const void *)((const char *)src.mem->base + src.offset),
                      (unsigned long long *)(void *)((char *)sum.mem->base + sum.offset), n / 16};
    uint32_t blocks = q->dev->info.compute_units * RFK_SUM_BLOCKS;
    if ((uint64_t)blocks * RFK_BLOCK > a.n) blocks = rfk_ceil_div(a.n, RFK_BLOCK);
    pthread_mutex_lock(&q->submit);
    r = rfk_check(q->dev, err, rfk_launch(rfk_sum, dim3(blocks), dim3(RFK_BLOCK), q->stream, a), "hipLaunchKernel",
                  "mem_sum", 0);
    return rfk_end_submit(q, r, ticket, err);
}

/* Draw n tokens, at most RF_DRAW_AT_ONCE. */
static rf_result rfk_launch_draws(rf_queue *q, rfk_draw_args a, uint32_t n, rf_error *err) {
    const dim3 parts(a.n_parts, n), block(RFK_DRAW_BLOCK);
    hipError_t e = hipSuccess;
    if (a.n_changes)
        e = rfk_launch(RFK_WITH_WAVE(q->dev, rfk_draw_maxima<32>, rfk_draw_maxima<64>), parts, block, q->stream, a);
    if (e == hipSuccess)
        e = rfk_launch(RFK_WITH_WAVE(q->dev, rfk_draw_keep<32>, rfk_draw_keep<64>), parts, block, q->stream, a);
    if (e == hipSuccess)
        e = rfk_launch(RFK_WITH_WAVE(q->dev, rfk_draw<32>, rfk_draw<64>), dim3(n), block, q->stream, a);
    return rfk_check(q->dev, err, e, "hipLaunchKernel", "draw", 0);
}

static rf_result rfk_draw_tokens(rf_queue *q, const rf_mem *mem, const rf_draw_batch *b, rf_ticket *ticket,
                                 rf_error *err) {
    rfk_no_ticket(ticket);
    rf_result r = rfk_range(mem, b->logits, (uint64_t)b->n_rows * b->n_vocab * sizeof(float), "draw", err);
    if (r == RF_OK) r = rfk_range(mem, b->argmax, b->n_rows * sizeof(int32_t), "draw", err);
    if (r == RF_OK) r = rfk_range(mem, b->draws, b->n_draws * sizeof(rf_draw), "draw", err);
    if (r == RF_OK) r = rfk_range(mem, b->changes, b->n_changes * sizeof(rf_draw_change), "draw", err);
    if (r == RF_OK) r = rfk_range(mem, b->work, rf_draw_work_bytes(b->n_vocab, b->n_draws), "draw", err);
    if (r == RF_OK && (b->n_vocab == 0 || b->n_vocab > RF_DRAW_MAX_VOCAB))
        r = rfk_fail(err, RF_ERR_ARGUMENT, 0, b->n_vocab, "hip: draw from %u logits: want 1 to %u", b->n_vocab,
                     RF_DRAW_MAX_VOCAB);
    if (r != RF_OK || b->n_draws == 0) return r;
    rfk_scope scope(q->dev->index);
    if (scope.error != hipSuccess) return rfk_enter_queue(q, scope, err);
    char *base = (char *)mem->base;
    rf_draw *draws = (rf_draw *)(void *)(base + b->draws);
    rfk_draw_args a = {(float *)(void *)(base + b->logits), (const int32_t *)(const void *)(base + b->argmax), draws,
                       (const rf_draw_change *)(const void *)(base + b->changes), base + b->work,
                       rf_draw_work_bytes(b->n_vocab, 1), b->n_rows, b->n_vocab, b->n_changes,
                       rfk_ceil_div(b->n_vocab, RF_DRAW_PART)};
    pthread_mutex_lock(&q->submit);
    for (uint32_t first = 0; r == RF_OK && first < b->n_draws; first += RF_DRAW_AT_ONCE) {
        const uint32_t n = b->n_draws - first < RF_DRAW_AT_ONCE ? b->n_draws - first : RF_DRAW_AT_ONCE;
        a.draws = draws + first;
        r = rfk_launch_draws(q, a, n, err);
    }
    return rfk_end_submit(q, r, ticket, err);
}

/* ---- opening ---- */

static void rfk_device_close(rf_dev *d) {
    rf_allocator allocator = d->allocator;
    rfk_rank_finish(d);
    pthread_mutex_destroy(&d->lock);
    rfk_free(&allocator, d);
}

/* Launch the probe; tells a GPU that the file was not compiled for from a broken one. */
static rf_result rfk_launch_probe(rf_queue *q, const rf_mem *mem, rf_error *err) {
    rf_dev *d = q->dev;
    hipError_t e = rfk_launch(rfk_probe, dim3(1), dim3(32), q->stream, (uint32_t *)mem->base);
    int code = (int)e;
    if (code != 98 && code != 200 && code != 209 && code != 222 && code != 301) /* no code for this GPU */
        return rfk_check(d, err, e, "hipLaunchKernel", "a probe", 0);
    (void)hipGetLastError();
#if defined(RFK_NVIDIA)
    const char *option = "-arch=";
#else
    const char *option = "--offload-arch=";
#endif
    return rfk_fail(err, RF_ERR_DEVICE, code, 0,
                    "%s is a %s (%s), which rocmforge_kernels.hip was not compiled for: compile it with %s%s%s (%s)",
                    d->info.name, d->info.arch, d->info.text, option, d->info.arch,
                    strcmp(d->info.arch, "sm_90") == 0 ? "a" : "", hipGetErrorName(e)); /* sm_90a has wgmma */
}

/* RFK_WRONG_... of the matrix units' results. */
static uint32_t rfk_judge_matrix(const rfk_check_results *found) {
    uint32_t wrong = 0;
    for (uint32_t row = 0; row < 16; row++)
        for (uint32_t col = 0; col < 16; col++) {
            const uint32_t at = row * 16 + col;
            int half[2] = {0, 0};
            for (uint32_t k = 0; k < 32; k++) half[k / 16] += rfk_check_value(0, row, k) * rfk_check_value(1, col, k);
            if (found->part[0][at].dot != RFK_DOT_START + half[0] ||
                found->part[1][at].dot != RFK_DOT_START + half[1] ||
                found->part[2][at].dot != RFK_DOT_START + half[0] + half[1])
                wrong |= RFK_WRONG_BYTES;
            /* exact in any order of additions */
            if (found->part[3][at].sum != (float)half[0]) wrong |= RFK_WRONG_HALVES;
            if (found->units_bf16 && found->part[4][at].sum != (float)half[0]) wrong |= RFK_WRONG_HALVES;
        }
    return wrong;
}

/* Results of the kernels that check a device when it is opened. */
struct rfk_probe_results {
    uint32_t probe[32];
    rfk_check_results matrix;
    uint32_t wgmma[RFK_WARPGROUP];
};

/* Two or three launches, then 6 KiB are read back. */
static rf_result rfk_run_probe(rf_dev *d, rf_error *err) {
    rf_queue *q = NULL;
    rf_mem mem;
    rfk_probe_results found;
    rf_ticket ticket;
    memset(&found, 0, sizeof found);
    memset(&mem, 0, sizeof mem);
    rfk_scope scope(d->index);
    if (scope.error != hipSuccess) return rfk_check_scope(d, scope, err);
    rf_result r = rfk_queue_create(d, &q, err);
    if (r != RF_OK) return r;
    r = rfk_mem_create(d, sizeof found, &mem, err);
    if (r == RF_OK) r = rfk_launch_probe(q, &mem, err);
    if (r == RF_OK)
        r = rfk_check(d, err,
                      rfk_launch(RFK_WITH_WAVE(d, rfk_check_matrix<32>, rfk_check_matrix<64>), dim3(1), dim3(d->wave),
                                 q->stream, &((rfk_probe_results *)mem.base)->matrix),
                      "hipLaunchKernel", "a check of the matrix units", 0);
    const bool wgmma = RFK_MAY_WGMMA(d->index, d->info.arch);
    if (r == RF_OK && wgmma) {
        const rfk_config c = {dim3(1), dim3(RFK_WARPGROUP), RFK_WGMMA_CHECK_BYTES, 0, q->stream, 0};
        r = rfk_check(d, err, rfk_launch_config(rfk_check_wgmma, c, ((rfk_probe_results *)mem.base)->wgmma),
                      "hipLaunchKernel", "a check of the matrix units", 0);
    }
    if (r == RF_OK) r = rfk_mem_read(q, &mem, 0, &found, sizeof found, &ticket, err);
    for (uint32_t i = 0; r == RF_OK && i < 32; i++)
        if (found.probe[i] != i * 3 + 7)
            r = rfk_fail(err, RF_ERR_DEVICE, 0, 0,
                         "%s: a probe kernel ran and gave wrong values (%s: driver or kernels file)", d->info.name,
                         d->info.arch);
    if (r == RF_OK) {
        d->wrong_units = rfk_judge_matrix(&found.matrix);
        d->has_units = found.matrix.has_units;
#if defined(RFK_DIRECT_TYPES)
        if (found.matrix.direct) d->direct = d->shared_bytes < sizeof(rfk_direct_shared<16>) ? 8 : 16;
#endif
        d->units_f16 = found.matrix.units_f16 && !(d->wrong_units & RFK_WRONG_HALVES);
        d->units_bf16 = found.matrix.units_bf16 && !(d->wrong_units & RFK_WRONG_HALVES);
        d->wgmma = wgmma;
        d->large_tiles = !found.wgmma[0];
        for (uint32_t i = 0; wgmma && i < RFK_WARPGROUP; i++) {
            if (found.wgmma[i] == RFK_WGMMA_WRONG) d->wrong_units |= RFK_WRONG_WGMMA;
            if (found.wgmma[i] != RFK_WGMMA_RIGHT) d->wgmma = 0;
        }
    }
    rfk_queue_release(q);
    rfk_mem_release(d, &mem);
    return r;
}

/* Flash attention of a head_dim and a cache type. */
struct rfk_flash_kernel {
    void (*run)(rfk_attention_args);
    uint32_t waves, queries, shared_bytes;
};
template <class KV, int HEAD> static rfk_flash_kernel rfk_flash_of(const rf_dev *d) {
    rfk_flash_kernel k = {RFK_WITH_WAVE(d, (rfk_flash<32, KV, HEAD>), (rfk_flash<64, KV, HEAD>)), RFK_FLASH_WAVES(HEAD),
                          RFK_FLASH_QUERIES(HEAD), (uint32_t)sizeof(rfk_flash_shared<KV, HEAD>)};
    return k;
}
template <class KV> static rfk_flash_kernel rfk_find_flash(const rf_dev *d, uint32_t head_dim) {
    return head_dim <= 64    ? rfk_flash_of<KV, 64>(d)
           : head_dim <= 128 ? rfk_flash_of<KV, 128>(d)
           : head_dim <= 256 ? rfk_flash_of<KV, 256>(d)
                             : rfk_flash_of<KV, RFK_FLASH_HEAD>(d);
}

#if defined(RFK_NVIDIA)
/* Let launches of a kernel ask for so much shared memory: without it 48 KiB.   Returns whether they may. */
static bool rfk_allow_memory(const void *kernel, size_t n_bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)n_bytes) == cudaSuccess;
}
/* The same for the kernels on wgmma.   Returns 0 if one may not. */
static int rfk_allow_wgmma_memory(void) {
    for (uint32_t type = 0; type < RF_TYPE_COUNT; type++) {
        const struct {
            const void *kernel;
            uint32_t n_bytes;
        } list[] = {{(const void *)rfk_find_wgmma(type), RFK_WGMMA_BYTES},
                    {(const void *)rfk_find_wide(type), RFK_WIDE_BYTES},
                    {(const void *)rfk_find_narrow(type, 1), RFK_NARROW_BYTES},
                    {(const void *)rfk_find_narrow(type, RFK_NARROW_COLS), RFK_NARROW_BYTES}};
        for (int i = 0; i < 4; i++)
            if (list[i].kernel && !rfk_allow_memory(list[i].kernel, list[i].n_bytes)) return 0;
        if (list[0].kernel) /* for two blocks a multiprocessor */
            (void)cudaFuncSetAttribute(list[0].kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
    }
    return rfk_allow_memory((const void *)rfk_flash_wgmma, RFK_FLASH_WGMMA_BYTES);
}
/* What the device's kernels may do: early launches, clusters, shared memory beyond 48 KiB. Those that do not get theirs
 * are not used. */
static void rfk_allow_kernels(rf_dev *d) {
    rfk_scope scope(d->index); /* attributes belong to the current device */
    cudaFuncAttributes kernel;
    int value = 0;
    const void *const matvec = (const void *)rfk_fused_matvec<32, 1, RFK_SET_FUSED>;
    memset(&kernel, 0, sizeof kernel);
    /* griddepcontrol is in code for sm_90 and later */
    d->early = cudaFuncGetAttributes(&kernel, matvec) == cudaSuccess && kernel.ptxVersion >= 90;
    d->clusters =
        d->early && cudaDeviceGetAttribute(&value, cudaDevAttrClusterLaunch, d->index) == cudaSuccess && value;
    for (int set = 0; set < RFK_SET_ONE + (int)RF_TYPE_COUNT; set++) {
        (void)rfk_allow_memory((const void *)rfk_find_fused_one(set), rfk_columns_bytes(RFK_MAX_COLUMN) + RFK_MAX_GRID);
        (void)rfk_allow_memory((const void *)rfk_find_pairs(set), rfk_columns_bytes(RFK_MAX_COLUMN) + RFK_MAX_GRID);
    }
    for (uint32_t type = 0; type < RF_TYPE_COUNT; type++) {
        if (!rfk_staged_kernel(type, 8)) continue;
        for (uint32_t cols = d->direct; cols >= 8; cols -= 8)
            if (!rfk_allow_memory((const void *)rfk_staged_kernel(type, cols), rfk_staged_bytes(type, cols)))
                d->direct = cols - 8;
    }
    const int sets[2] = {RFK_SET_Q4_K_M, RFK_SET_FUSED};
    for (int i = 0; i < 2; i++) {
        if (d->direct == 16 &&
            !rfk_allow_memory((const void *)rfk_direct_kernel(sets[i], 16), sizeof(rfk_direct_shared<16>)))
            d->direct = 8;
        if (!rfk_allow_memory((const void *)rfk_direct_kernel(sets[i], 8), sizeof(rfk_direct_shared<8>)) ||
            !rfk_allow_memory((const void *)rfk_direct_kernel(sets[i], 4), sizeof(rfk_direct_shared<4>)))
            d->direct = 0;
    }
    for (int i = 0; i < 2; i++)
        (void)rfk_allow_memory((const void *)rfk_find_rows<32>(i != 0), d->shared_bytes - 1024);
    for (uint32_t i = 0; i < 9; i++) /* types of caches, by queries of a column */
        (void)rfk_allow_memory((const void *)rfk_find_decode_attention<32>(i / 3, RFK_MAX_HEAD, 1u << i % 3, 0),
                               RFK_CLUSTER * RFK_DECODE_PARTS(RFK_DECODE_GROUP, RFK_MAX_HEAD));
    const rfk_flash_kernel flash[] = {rfk_find_flash<uint16_t>(d, 256), rfk_find_flash<uint16_t>(d, RFK_FLASH_HEAD),
                                      rfk_find_flash<rfk_q8>(d, 256), rfk_find_flash<rfk_q8>(d, RFK_FLASH_HEAD)};
    for (int i = 0; i < 4; i++)
        if (flash[i].shared_bytes <= d->shared_bytes)
            (void)rfk_allow_memory((const void *)flash[i].run, flash[i].shared_bytes);
    if (d->wgmma) d->wgmma = rfk_allow_wgmma_memory();
    (void)cudaGetLastError();
}
#endif

static rf_result rfk_device_open(uint32_t index, const rf_device_desc *desc, rf_dev **out, rf_error *err) {
    int n = 0;
    *out = NULL;
    hipError_t e = hipGetDeviceCount(&n);
    if (e != hipSuccess || n <= 0) {
        rf_device_info why;
        (void)hipGetLastError();
        rfk_no_device(&why, e);
        return rfk_fail(err, RF_ERR_DEVICE, (int)e, 0, "hip: %s", why.note);
    }
    if (index >= (uint32_t)n)
        return rfk_fail(err, RF_ERR_NOT_FOUND, 0, index, "hip:%u: there are %d devices", index, n);
    rf_allocator allocator;
    memset(&allocator, 0, sizeof allocator);
    if (desc) allocator = desc->allocator;
    rf_dev *d = (rf_dev *)rfk_alloc(&allocator, 1, sizeof *d, "a device", err);
    if (!d) return RF_ERR_MEMORY;
    d->allocator = allocator;
    d->index = (int)index;
    pthread_mutex_init(&d->lock, NULL);
    rf_result r = rfk_describe(d->index, &d->info, &d->shared_bytes, err);
    d->wave = d->info.wave_size;
#if defined(ROCMFORGE_HIP_EMU)
    d->graphs = hip_emu_graphs_are_trusted() ? RFK_GRAPHS_ON : RFK_GRAPHS_CHECKED;
#elif defined(RFK_NVIDIA)
    d->graphs = RFK_GRAPHS_ON;
#else
    d->graphs = RFK_GRAPHS_CHECKED;
#endif
    if (r == RF_OK && !d->info.usable)
        r = rfk_fail(err, RF_ERR_UNSUPPORTED, 0, 0, "%s: %s", d->info.name, d->info.note);
    if (r == RF_OK) r = rfk_run_probe(d, err);
#if defined(ROCMFORGE_HIP_EMU)
    d->early = d->clusters = d->wave == 32; /* the others have no early launches, and join by tickets */
#endif
#if defined(RFK_NVIDIA)
    if (r == RF_OK) rfk_allow_kernels(d);
#endif
    if (r != RF_OK) rfk_device_close(d);
    else *out = d;
    return r;
}

/* ---- weights ---- */

static void rfk_block_of(uint32_t type, uint32_t *elements, uint32_t *bytes) {
    *elements = *bytes = 0;
#define RFK_BLOCK_CASE(NAME, id, text, n, size, runs) \
    if (type == id) *elements = n, *bytes = size;
    RF_TYPE_TABLE(RFK_BLOCK_CASE)
#undef RFK_BLOCK_CASE
}

static const char *rfk_type_name(uint32_t type) {
    const char *name = "?";
#define RFK_NAME_CASE(NAME, id, text, n, size, runs) \
    if (type == id) name = text;
    RF_TYPE_TABLE(RFK_NAME_CASE)
#undef RFK_NAME_CASE
    return name;
}

static int rfk_is_float_type(uint32_t type) {
    return type == RF_TYPE_F32 || type == RF_TYPE_F16 || type == RF_TYPE_BF16;
}

static bool rfk_is_built(uint32_t type) { return type < RF_TYPE_COUNT && RF_TYPE_IS_BUILT(type); }

static uint64_t rfk_row_bytes(const rf_plan_weight *w) {
    uint32_t elements, bytes;
    rfk_block_of(w->type, &elements, &bytes);
    return elements ? (uint64_t)(w->n_in / elements) * bytes : 0;
}

static uint64_t rfk_weight_bytes(const rf_plan_weight *w) { return rfk_row_bytes(w) * w->n_rows; }

/* n rows of a weight, `stride` bytes apart in host memory (0: one after the other). Requires q->submit. */
static rf_result rfk_copy_rows(rf_queue *q, const rf_plan_weight *w, char *dst, const char *src, uint64_t n,
                               uint64_t stride, rf_error *err) {
    const uint64_t row_bytes = rfk_row_bytes(w);
    if (stride == 0 || stride == row_bytes || n == 0) return rfk_copy_in(q, dst, src, n * row_bytes, w->name, err);
    if (rfk_is_pinned(q->dev, src, (n - 1) * stride + row_bytes))
        return rfk_check(q->dev, err,
                         hipMemcpy2DAsync(dst, (size_t)row_bytes, src, (size_t)stride, (size_t)row_bytes, (size_t)n,
                                          hipMemcpyHostToDevice, q->stream),
                         "hipMemcpy2DAsync", w->name, 0);
    rf_result r = RF_OK;
    for (uint64_t i = 0; r == RF_OK && i < n; i++)
        r = rfk_copy_in(q, dst + i * row_bytes, src + i * stride, row_bytes, w->name, err);
    return r;
}

static void rfk_table_release(rf_table *t) {
    rf_allocator allocator = t->dev->allocator;
    rfk_scope scope(t->dev->index);
    if (t->experts) (void)hipFree(t->experts);
    rfk_free(&allocator, t->slots);
    rfk_free(&allocator, t);
}

/* Device memory for the addresses of experts, none of them loaded yet. */
static rf_result rfk_create_experts(rf_table *t, rf_error *err) {
    rf_mem mem = {NULL, (uint64_t)t->plan->n_slots * sizeof *t->experts};
    rf_queue *q = NULL;
    rf_ticket ticket;
    rf_result r = rfk_mem_create(t->dev, mem.size_bytes, &mem, err);
    if (r != RF_OK) return r;
    t->experts = (rfk_weight *)mem.base;
    r = rfk_queue_create(t->dev, &q, err);
    if (r != RF_OK) return r;
    r = rfk_mem_fill(q, &mem, 0, 0, mem.size_bytes, &ticket, err);
    if (r == RF_OK)
        r = rfk_check(t->dev, err, hipStreamSynchronize(q->stream), "hipStreamSynchronize", "experts", 0);
    rfk_queue_release(q);
    return r;
}

static rf_result rfk_table_create(rf_dev *d, const rf_plan *plan, rf_table **out, rf_error *err) {
    *out = NULL;
    rf_table *t = (rf_table *)rfk_alloc(&d->allocator, 1, sizeof *t, "a weight table", err);
    rfk_slot *slots =
        t ? (rfk_slot *)rfk_alloc(&d->allocator, plan->n_slots, sizeof *slots, "a weight table", err) : NULL;
    if (!slots) {
        rfk_free(&d->allocator, t);
        return RF_ERR_MEMORY;
    }
    t->dev = d;
    t->plan = plan;
    t->slots = slots;
    rf_result r = RF_OK;
    for (uint32_t i = 0; r == RF_OK && !t->experts && i < plan->n_weights; i++)
        if (plan->weights[i].n_experts) r = rfk_create_experts(t, err);
    if (r == RF_OK) *out = t;
    else rfk_table_release(t);
    return r;
}

static rf_weight_layout rfk_weight_layout(rf_dev *d, const rf_plan *plan, const rf_plan_weight *w) {
    rf_weight_layout layout;
    uint64_t row_bytes = rfk_row_bytes(w), bytes = row_bytes * w->n_rows;
    (void)d, (void)plan;
    memset(&layout, 0, sizeof layout);
    layout.size_bytes = bytes;
    layout.align = 256;
    if (rfk_packing_of(w->type).n_planes) {
        uint64_t scratch = RFK_REPACK_BYTES > row_bytes ? RFK_REPACK_BYTES : row_bytes;
        layout.scratch_bytes = scratch < bytes ? scratch : bytes;
    }
    return layout;
}

/* The planes of a weight whose memory begins at `base`. */
static rfk_weight rfk_planes(const rf_plan_weight *w, uint8_t *base) {
    rfk_packing packing = rfk_packing_of(w->type);
    rfk_weight out;
    uint32_t elements, bytes;
    rfk_block_of(w->type, &elements, &bytes);
    uint64_t n_blocks = (uint64_t)w->n_rows * (w->n_in / elements), at = 0;
    memset(&out, 0, sizeof out);
    out.type = w->type;
    out.plane[0] = base;
    for (uint32_t i = 0; i < packing.n_planes; i++) {
        out.plane[i] = base + at;
        at += n_blocks * packing.bytes[i];
    }
    return out;
}

/* Copy rows to scratch and repack them from there, as many at a time as scratch holds. Requires q->submit. */
static rf_result rfk_write_repacked(rf_queue *q, const rf_plan_weight *w, uint8_t *base, const rf_weight_part *part,
                                    rf_error *err) {
    const rf_mem *scratch = part->scratch;
    const char *src = (const char *)part->src;
    const uint32_t row0 = part->row0, n_rows = part->n_rows;
    uint32_t elements, block_bytes;
    rfk_block_of(w->type, &elements, &block_bytes);
    uint64_t row_bytes = rfk_row_bytes(w), step = scratch->size_bytes / row_bytes;
    const uint64_t stride = part->src_stride ? part->src_stride : row_bytes;
    rfk_weight planes = rfk_planes(w, base);
    rf_result r = RF_OK;
    for (uint64_t row = 0; r == RF_OK && row < n_rows; row += step) {
        uint64_t n = n_rows - row < step ? n_rows - row : step;
        r = rfk_copy_rows(q, w, (char *)scratch->base, src + row * stride, n, stride, err);
        if (r != RF_OK) break;
        rfk_repack_args a;
        memset(&a, 0, sizeof a);
        a.packing = rfk_packing_of(w->type);
        a.src = (const uint8_t *)scratch->base;
        for (int i = 0; i < 4; i++) a.plane[i] = const_cast<uint8_t *>(planes.plane[i]);
        a.first = (row0 + row) * (w->n_in / elements);
        a.n_bytes = n * row_bytes;
        a.block_bytes = block_bytes;
        a.step = block_bytes % 2 ? 1 : 2;
        r = rfk_check(
            q->dev, err,
            rfk_launch(rfk_repack, dim3(rfk_ceil_div(a.n_bytes, a.step * RFK_BLOCK)), dim3(RFK_BLOCK), q->stream, a),
            "hipLaunchKernel", w->name, 0);
    }
    return r;
}

static void rfk_table_bind(rf_table *t, uint32_t slot, const rfk_weight &w) {
    t->slots[slot].w = w;
    t->slots[slot].ready = 1;
    __atomic_add_fetch(&t->generation, 1, __ATOMIC_RELEASE);
}

static rf_result rfk_weight_write(rf_table *t, rf_queue *q, const rf_weight_part *part, rf_ticket *ticket,
                                  rf_error *err) {
    const uint32_t slot = part->slot, row0 = part->row0, n_rows = part->n_rows;
    const rf_mem *mem = part->mem, *scratch = part->scratch;
    const uint64_t offset = part->offset;
    const void *src = part->src;
    rfk_no_ticket(ticket);
    if (slot >= t->plan->n_slots)
        return rfk_fail(err, RF_ERR_ARGUMENT, 0, slot, "hip: weight slot %u of %u", slot, t->plan->n_slots);
    const rf_plan_weight *w = rf_plan_weight_of(t->plan, slot);
    uint64_t row_bytes = rfk_row_bytes(w);
    int repack = rfk_packing_of(w->type).n_planes > 0;
    if (!rfk_is_built(w->type) && w->type != RF_TYPE_I32)
        return rfk_fail(err, RF_ERR_UNSUPPORTED, 0, slot, "hip: %s is of type %s, which is not among ROCMFORGE_TYPES",
                        w->name, rfk_type_name(w->type));
    const int lent = !src, whole = row0 == 0 && n_rows == w->n_rows;
    if (!mem || !mem->base || n_rows == 0 || row0 >= w->n_rows || n_rows > w->n_rows - row0 || offset % 256 != 0 ||
        (lent && (!whole || w->n_experts)) ||
        (!lent && repack && (!scratch || !scratch->base || scratch->size_bytes < row_bytes)))
        return rfk_fail(err, RF_ERR_ARGUMENT, 0, slot, "hip: %s: bad write of rows %u + %u at %llu", w->name, row0,
                        n_rows, (unsigned long long)offset);
    rf_result r = rfk_range(mem, offset, row_bytes * w->n_rows, w->name, err);
    if (r != RF_OK) return r;
    uint8_t *base = (uint8_t *)mem->base + offset;
    if (lent) {
        rfk_table_bind(t, slot, rfk_planes(w, base));
        return RF_OK;
    }
    rfk_scope scope(q->dev->index);
    if (scope.error != hipSuccess) return rfk_enter_queue(q, scope, err);
    pthread_mutex_lock(&q->submit);
    if (repack) r = rfk_write_repacked(q, w, base, part, err);
    else r = rfk_copy_rows(q, w, (char *)base + row0 * row_bytes, (const char *)src, n_rows, part->src_stride, err);
    if (r == RF_OK && w->n_experts && row0 + n_rows == w->n_rows) {
        rfk_expert_args a = {t->experts + slot, rfk_planes(w, base)};
        r = rfk_check(q->dev, err, rfk_launch(rfk_write_expert, dim3(1), dim3(1), q->stream, a), "hipLaunchKernel",
                      w->name, 0);
    }
    r = rfk_end_submit(q, r, ticket, err);
    if (r == RF_OK && row0 + n_rows == w->n_rows) rfk_table_bind(t, slot, rfk_planes(w, base));
    return r;
}

/* An expert's address stays on the device: the host runs no op whose rows chose an expert that is not loaded. */
static void rfk_weight_clear(rf_table *t, uint32_t slot) {
    memset(&t->slots[slot], 0, sizeof t->slots[slot]);
    __atomic_add_fetch(&t->generation, 1, __ATOMIC_RELEASE);
}

/* ==== 7 Plan ================================================================================================ >>plan
 * A plan bound to a session's memory, and its launches. What ops need besides the session's buffers (the step's values,
 * RoPE tables, quantized inputs, partial results of split-K and of attention) is one allocation, made when the plan is
 * prepared. */

#define RFK_FEW_MAX 16u /* rows: in steps up to here a row's results have the same bits, whatever else is in the step */
#define RFK_FEW_STEP 32u /* rows: steps up to here run by the launches of a decode step */
#define RFK_DECODE_ROWS 128u /* rows: steps up to here take its attention, if no sequence has many of them */
#define RFK_MATVEC_COLS RFK_FEW_MAX /* columns: matvec up to here, tiles beyond */
#define RFK_SPLIT_ROWS RFK_FEW_MAX  /* rows: steps up to here split attention */
#define RFK_MAX_TILE_SPLITS 16u
#define RFK_MAX_SPLITS 64u
#define RFK_SPLIT_CELLS 256u

/* An op with its pointers; those to logits buffers are of row 0. */
struct rfk_bound {
    float *in, *in2, *in3, *out;
    uint32_t in_stride, in2_stride, in3_stride, out_stride;
    char *k, *v;       /* of its state; k alone for a recurrent one */
    uint32_t n_cells;  /* cells of a sequence */
    char *blocks;      /* as k, of an attention's blocks; NULL: none */
    uint32_t n_block_cells;
    uint32_t quantize;  /* matmul: quantize its input first; norm, glu: quantize the output for the next matmul */
    uint32_t together;  /* ops of one launch: this one and those after it */
    uint32_t only_int8; /* norm, glu: its output is only read as int8 or bf16 */
    uint32_t sort;      /* experts: sort the pairs of its route first, if there are enough for tiles */
};

/* A launch of a decode step: an op with those launched together, a fused matvec, fused attention, a norm with few rows
 * of floats (such as a router), a mixture of experts, in two launches, or a delta rule with its norm and gate. RF_NONE:
 * no such op. */
enum rfk_fused_kind {
    RFK_FUSED_OP = 0,
    RFK_FUSED_MATVEC = 1,
    RFK_FUSED_ATTENTION = 2,
    RFK_FUSED_NORM_DOTS = 3,
    RFK_FUSED_UP = 4,
    RFK_FUSED_DOWN = 5,
    RFK_FUSED_DELTA = 6
};
struct rfk_fused {
    uint32_t kind;
    uint32_t first, n_ops;
    uint32_t norm, gather, products, n_products, glu, is_int8; /* matvec; is_int8: the input is in x8 */
    uint32_t to_norm;                                          /* matvec: norm of the next launch, of its output */
    uint32_t norm_is_deferred;                                           /* the input may be a deferred norm */
    uint32_t add;      /* matvec: post-norm that the launch before is, of what this one reads; RF_NONE: none */
    uint32_t add_next; /* launch of what reads the sum next, if that is a post-norm of the same buffer */
    uint32_t norms[2], ropes, store, attention, angles;        /* attention; angles: which RoPE table */
    uint32_t to_int8; /* the output of attention or GLU also goes to x8; of attention, of several rows, to few[1] */
    uint32_t choice;           /* UP: its route, made in its blocks if that is an op of the same call */
    uint32_t shared[2], share; /* UP: shared gate and up; DOWN: shared down, the sum that takes their share */
};

#define RFK_MAX_GRAPHS 16u
#define RFK_GRAPH_NODES 140u /* kernels of a graph where graphs are checked: larger ones are known to fail */
#define RFK_GRAPH_CHECKS 2u  /* steps whose replay is compared with launches */
#define RFK_NEAR_STEPS 16u   /* one after the other: then a graph for fewer positions is worth its capture */

/* The timing of launch configs by decode steps. */
struct rfk_tuning {
    hipEvent_t event[2]; /* before and after a step; NULL: nothing is timed */
    uint64_t shape;
    uint32_t visit;      /* visit to a config: each once, the default again at the end */
    uint32_t n_steps;    /* steps of this visit: one to warm up, then those timed */
    uint32_t n_rounds;   /* of visits */
    float first_us;      /* time of the default in its first visit */
    int replayed;        /* the timed steps are replayed as graphs */
    int is_timed;        /* the last step is timed, and its time not read yet */
};

/* A graph of steps of several rows; exec NULL: none. */
struct rfk_few_graph {
    hipGraphExec_t exec;
    uint32_t n_kernels;
    uint32_t positions; /* of a row, at most */
};

/* The kernels of rfk_few_args: rfk_few, rfk_few_staged up to a number of rows, or rfk_few_direct. */
enum { RFK_FEW_ANY, RFK_FEW_STAGED, RFK_FEW_DIRECT };
struct rfk_few_way {
    int kernel;
    uint32_t max_rows; /* of a step; with more rfk_few */
};

struct rf_prepared {
    rf_dev *dev;
    rf_table *table;
    const rf_plan *plan;
    uint32_t n_ctx, n_seq, n_batch, n_logits, cache_type, n_slots;
    const rf_plan_members *members; /* NULL: none but this */
    const int32_t *scratch;
    uint64_t scratch_bytes;
    rfk_bound *ops;
    uint32_t *segments; /* [n_segments + 1] first op of each */
    uint32_t n_segments;
    void *memory;       /* device memory; the pointers below are its parts */
    rf_step_row *rows;
    rfk_row_range *ranges;
    uint32_t *logit_rows;
    float *tables;
    rfk_int8_rows x8;
    float *part;
    uint32_t split_cells, max_splits;
    rfk_terms terms;    /* split precision: a launch's input for 16-bit float weights */
    rfk_pair_lists lists; /* pairs of the last route that was sorted */
    float *tile_part;     /* partial results of split-K */
    uint32_t *index_scores; /* [RFK_INDEX_ROWS][n_lists][n_ctx] */
    uint32_t tile_blocks; /* blocks of such a launch at most */
    /* the step in rows, ranges and logit_rows, written through `written_by`; copies on the host */
    rf_queue *written_by;
    uint32_t n_rows, n_row_logits, turn, epoch;
    rf_step_row *host_rows;
    uint32_t *host_logit_rows;
    /* decode steps */
    rfk_fused *fused;   /* [n_fused] launches, by segment */
    uint32_t *fused_of; /* [n_segments + 1] first launch of each */
    uint32_t n_fused, decode_splits;
    uint32_t n_few;         /* rows of a step that runs by these launches, at most */
    uint32_t n_attend;      /* rows of a step that run by the fused attention among them, at most */
    rfk_few_columns few[2]; /* the input of its matvecs, of several rows; the same, quantized by attention */
    uint32_t few_for;       /* the launch that reads the latter, or RF_NONE */
    rfk_int8_rows deferred; /* a deferred norm, and its sums of squares */
    float *deferred_squares;
    uint32_t deferred_for;   /* the launch that will find it there */
    uint32_t fused_begin, fused_end; /* launches of this call: weights of others may not be loaded */
    float *residual; /* a step of one row: where a launch with a post-norm leaves the sum, and the next takes it from */
    uint32_t moved;  /* the buffer whose values are there; RF_NONE: none */
    const rf_op *ropes[RFK_ROPES]; /* RoPE tables of fused attention */
    uint32_t n_ropes;
    float *angles, *decode_part, *kept_logits;
    rfk_best_value *best; /* [RFK_ARGMAX_PARTS] */
    uint32_t *tickets, n_tickets; /* of fused attention: one a column of its grid */
    uint32_t *differ;
    uint32_t *now;       /* of the step: rfk_members_args */
    float **parts;       /* [2][n - 1] of even and odd turns: where the other members have this one's without flags */
    hipGraphExec_t graph[RFK_MAX_GRAPHS];
    uint32_t n_graphs, graphs_checked, graph_config;
    uint32_t graph_positions;         /* of a row, at most */
    uint32_t near_steps;              /* in a row that a graph for fewer positions could do */
    int capturing, no_graphs;
    rfk_tuning tuning;
    uint32_t n_launched; /* kernels by rfk_enqueue, captured ones included */
    uint32_t n_captured; /* kernels in the graphs */
    rf_session_stats stats;
    uint64_t graph_generation;
    uint64_t checked_generation;              /* 1 + that in which all weights were found written; 0: never */
    rfk_few_way few_way; /* of all products */
    rfk_few_graph few_graph[2][RFK_FEW_STEP + 1]; /* [are_apart] of steps of so many rows */
    /* of the step: */
    rfk_row_range *host_ranges; /* [n_ranges] of its sequences */
    uint32_t *range_of;         /* [n_seq] that of a sequence, if it is in the step */
    uint32_t n_ranges;
    uint32_t n_decode;             /* rows, from the first on, that take the attention of a decode step */
    uint32_t positions, are_apart; /* these rows, or all: of a row, at most; whether each is another sequence's */
    uint32_t first_row;            /* of the launches that follow; 0 but for attention of the rows behind n_decode */
    uint64_t few_generation;                  /* of the weights in these */
    uint32_t few_rows;                        /* of the last step of several rows with those weights */
    hipEvent_t *events; /* [2 * n_ops] while timing: before and after each op */
    uint8_t *timed;     /* [n_ops] 1: recorded */
};

/* ---- checks ---- */

/* "op 7 (matmul blk.0.attn_q.weight)" */
static void rfk_describe_op(const rf_plan *plan, const rf_op *op, char *out, size_t capacity) {
    const int has_weight = op->weight < plan->n_weights;
    snprintf(out, capacity, "op %u (%s%s%s)", (uint32_t)(op - plan->ops), rf_op_name(op->kind), has_weight ? " " : "",
             has_weight ? plan->weights[op->weight].name : "");
}

static rf_result rfk_bad_op(const rf_plan *plan, const rf_op *op, rf_result code, const char *why, rf_error *err) {
    char what[128];
    rfk_describe_op(plan, op, what, sizeof what);
    return rfk_fail(err, code, 0, (uint64_t)(op - plan->ops), "hip: %s: %s", what, why);
}

/* Why no kernel does an op that rf_op_check accepted; NULL: one does. */
static const char *rfk_why_unsupported(const rf_plan *plan, const rf_op *op) {
    const rf_op_spec s = rf_op_get_spec(plan, op);
    for (uint32_t i = 0; i < s.n_weights; i++) {
        const rf_plan_weight *w = &plan->weights[s.weight[i].id];
        uint32_t elements, bytes;
        if (s.weight[i].n_in == 0) continue; /* a vector of floats */
        rfk_block_of(w->type, &elements, &bytes);
        if (w->n_in % elements) return "the weight's rows are no whole blocks";
        if (op->kind == RF_OP_EXPERTS && !w->n_experts) return "its weight is not of experts";
    }
    if (op->kind == RF_OP_ATTENTION &&
        (op->attention.head_dim > RFK_ANY_HEAD || op->attention.head_dim_v > 2 * RFK_BLOCK))
        return "heads of more than 1024 values, or 512 summed ones";
    if (op->kind == RF_OP_SUM && (op->sum.n % 4 || plan->buffers[op->in].width % 4 || plan->buffers[op->out].width % 4))
        return "a sum of rows that are no multiple of 4 values";
    if (op->kind == RF_OP_DELTA && op->delta.head_dim > RFK_MAX_HEAD) return "keys of heads of more than 256 values";
    if (op->kind == RF_OP_INDEX && op->index.head_dim > RFK_INDEX_HEAD) return "index keys of more than 256 values";
    if (op->kind == RF_OP_SCAN && op->scan.n_state > RFK_MAX_HEAD) return "states of more than 256 rows";
    return NULL;
}

static rf_result rfk_op_supported(rf_dev *d, const rf_plan *plan, const rf_op *op, rf_error *err) {
    (void)d;
    const char *why = rf_op_check(plan, op);
    if (why) return rfk_bad_op(plan, op, RF_ERR_ARGUMENT, why, err);
    const rf_op_spec s = rf_op_get_spec(plan, op);
    for (uint32_t i = 0; i < s.n_weights; i++) {
        const rf_plan_weight *w = &plan->weights[s.weight[i].id];
        char text[160];
        if (rfk_is_built(w->type) || rf_op_reads_ids(op, &s.weight[i])) continue;
        snprintf(text, sizeof text, "%.80s is of type %s, which is not among ROCMFORGE_TYPES", w->name,
                 rfk_type_name(w->type));
        return rfk_bad_op(plan, op, RF_ERR_UNSUPPORTED, text, err);
    }
    why = rfk_why_unsupported(plan, op);
    return why ? rfk_bad_op(plan, op, RF_ERR_UNSUPPORTED, why, err) : RF_OK;
}

/* ---- preparing ---- */

static uint64_t rfk_align(uint64_t n) { return (n + 255) & ~(uint64_t)255; }
static uint64_t rfk_align16(uint64_t n) { return (n + 15) & ~(uint64_t)15; }

/* Whether heads of keys and values are whole groups of RF_CACHE_Q8_0. */
static int rfk_has_q8_heads(const rf_plan *plan, const rf_op *op) {
    const rf_op_spec s = rf_op_get_spec(plan, op);
    return s.head_dim % 32 == 0 && s.head_dim_v % 32 == 0;
}

/* Where the keys of an op's state, or a recurrent state, and the values begin. */
static rf_result rfk_bind_state(const rf_plan_bind *bind, const rf_op *op, uint32_t state, char **k, char **v,
                                uint32_t *n_cells, rf_error *err) {
    const rf_plan *plan = bind->plan;
    const rf_plan_state *s = &plan->states[state];
    *n_cells = rf_state_cells(bind, state);
    uint64_t cells = (uint64_t)bind->n_seq * s->n_kv_heads * *n_cells;
    if (bind->cache_type > RF_CACHE_Q8_0 ||
        (bind->cache_type == RF_CACHE_Q8_0 && s->width == 0 && !rfk_has_q8_heads(plan, op)))
        return rfk_bad_op(plan, op, RF_ERR_UNSUPPORTED, "its cache type, or that of heads of this size", err);
    if (cells == 0 && s->width == 0) return rfk_bad_op(plan, op, RF_ERR_ARGUMENT, "its state has too few cells", err);
    uint64_t offset = bind->state_offset[state],
             k_bytes = rfk_align(cells * rf_cache_row_bytes(bind->cache_type, s->head_dim)),
             size = s->width ? (uint64_t)bind->n_slots * s->width * 4
                             : k_bytes + cells * rf_cache_row_bytes(bind->cache_type, s->head_dim_v);
    if (offset % RF_STATE_ALIGN != 0 || rfk_range(&bind->state, offset, size, "a state", NULL) != RF_OK)
        return rfk_bad_op(plan, op, RF_ERR_ARGUMENT, "its state does not lie in the session's memory", err);
    *k = (char *)bind->state.base + offset;
    *v = *k + k_bytes;
    return RF_OK;
}

/* Bind an op to the session's memory; its buffers must lie inside. */
static rf_result rfk_bind_op(rf_prepared *p, const rf_plan_bind *bind, uint32_t i, rf_error *err) {
    const rf_plan *plan = p->plan;
    const rf_op *op = &plan->ops[i];
    rfk_bound *b = &p->ops[i];
    const uint32_t ids[4] = {op->in, op->in2, op->in3, op->out};
    float **at[4] = {&b->in, &b->in2, &b->in3, &b->out};
    uint32_t *stride[4] = {&b->in_stride, &b->in2_stride, &b->in3_stride, &b->out_stride};
    for (int k = 0; k < 4; k++) {
        if (ids[k] >= plan->n_buffers) continue;
        const rf_plan_buffer *buffer = &plan->buffers[ids[k]];
        uint64_t rows = buffer->rows == RF_ROWS_LOGITS ? bind->n_logits : bind->n_batch,
                 offset = bind->buffer_offset[ids[k]];
        if (offset % 256 != 0 || rfk_range(&bind->scratch, offset, rows * buffer->width * 4, "a buffer", NULL) != RF_OK)
            return rfk_bad_op(plan, op, RF_ERR_ARGUMENT, "a buffer does not lie in the session's memory", err);
        *at[k] = (float *)(void *)((char *)bind->scratch.base + offset);
        *stride[k] = buffer->width;
    }
    if (op->state >= plan->n_states) return RF_OK;
    rf_result r = rfk_bind_state(bind, op, op->state, &b->k, &b->v, &b->n_cells, err);
    char *unused;
    if (r == RF_OK && op->kind == RF_OP_ATTENTION && op->attention.block_unit)
        r = rfk_bind_state(bind, op, op->attention.blocks, &b->blocks, &unused, &b->n_block_cells, err);
    return r;
}

static int rfk_takes_int8(const rf_plan *plan, const rf_op *op) {
    return op->kind == RF_OP_MATMUL && !rfk_is_float_type(plan->weights[op->weight].type);
}

/* MATMUL, EXPERTS, HEADS: length of an input vector, and how many of them a row of the step has. */
static uint32_t rfk_n_in(const rf_op *op) {
    if (op->kind == RF_OP_HEADS) return op->heads.n_in;
    return op->kind == RF_OP_EXPERTS ? op->experts.n_in : op->matmul.n_in;
}
static uint32_t rfk_n_vectors(const rf_op *op) {
    if (op->kind == RF_OP_HEADS) return op->heads.n_heads;
    return op->kind == RF_OP_EXPERTS && op->flags & RF_OP_PER_CHOICE ? op->experts.n_used : 1;
}
static uint64_t rfk_row_values(const rf_op *op) { return (uint64_t)rfk_n_in(op) * rfk_n_vectors(op); }
/* The same as bf16: rfk_bf16_at. */
static uint64_t rfk_bf16_values(const rf_op *op) {
    return (uint64_t)rfk_ceil_div(rfk_n_in(op), 128) * 128 * rfk_n_vectors(op);
}

/* EXPERTS and HEADS that tiles may do: matrices, and how many of them a row of the step is multiplied by. */
static bool rfk_has_pairs(const rf_op *op) {
    return op->kind == RF_OP_EXPERTS || (op->kind == RF_OP_HEADS && !(op->flags & RF_OP_ACROSS));
}
static uint32_t rfk_n_matrices(const rf_op *op) {
    return op->kind == RF_OP_HEADS ? op->heads.n_heads : op->experts.n_experts;
}
static uint32_t rfk_n_chosen(const rf_op *op) {
    return op->kind == RF_OP_HEADS ? op->heads.n_heads : op->experts.n_used;
}

/* Whether tiles of int8 work on this device for weights of this type. */
static bool rfk_has_tiles(const rf_dev *d, uint32_t type) {
    uint32_t needed = RFK_WRONG_BYTES;
    if (RFK_HAS_PARTS(type)) needed |= RFK_WRONG_HALVES; /* their minimums are multiplied as bf16 */
    return !rfk_is_float_type(type) && !(d->wrong_units & needed);
}

/* F32 weights with fewer rows leave most of the GPU without a tile of rfk_matmul_wide_split. */
#define RFK_SPLIT_MIN_ROWS 1024u

/* Split precision: values of all terms of a row of the op's input; 0: matrix units do not multiply it, or split it
 * themselves (rfk_matmul_split). */
static uint64_t rfk_term_values(const rf_dev *d, const rf_plan *plan, const rf_op *op) {
    if ((op->kind != RF_OP_MATMUL && !rfk_has_pairs(op)) || rfk_n_in(op) % RFK_16BIT_DEPTH) return 0;
    const uint32_t type = plan->weights[op->weight].type;
    if (type == RF_TYPE_F32 && d->wgmma && op->kind == RF_OP_MATMUL && op->matmul.n_out >= RFK_SPLIT_MIN_ROWS &&
        rfk_n_in(op) % RFK_WGMMA_DEPTH == 0)
        return rfk_row_values(op) * RFK_TERMS(false);
    if (type == RF_TYPE_F16 && d->units_f16) return rfk_row_values(op) * RFK_TERMS(false);
    return type == RF_TYPE_BF16 && d->units_bf16 ? rfk_row_values(op) * RFK_TERMS(true) : 0;
}

/* The pairs of such an op if they are enough for tiles, else 0. The matvec reads a matrix for every pair, tiles read
 * it once for up to RFK_PAIR_TILE pairs. With 3 pairs an expert, evenly distributed, 5 % of the experts have none:
 * tiles read 0.95 of all matrices, not 3 times all. A matmul switches to tiles there, too: its matvec would read W a
 * third time. */
static uint32_t rfk_many_pairs(const rf_op *op, uint64_t rows) {
    if (rows <= RFK_FEW_MAX) return 0;
    const uint64_t pairs = rows * rfk_n_chosen(op);
    return pairs >= 3 * (uint64_t)rfk_n_matrices(op) && pairs >> 31 == 0 ? (uint32_t)pairs : 0;
}

static bool rfk_is_narrow_type(uint32_t type) {
    return rfk_kernel_type(type) < RF_TYPE_COUNT && !rfk_is_float_type(type);
}
/* Whether rfk_matmul_narrow has the op, of those that rfk_takes_wgmma says: a matmul of few rows, and experts whatever
 * their pairs are, so that a pair's results have the same bits in any company. */
static bool rfk_has_narrow(const rf_plan *plan, const rf_op *op) {
    return op->kind != RF_OP_HEADS && rfk_is_narrow_type(plan->weights[op->weight].type);
}

/* Whether a kernel on wgmma does the op in a step of so many rows. Not for experts of floats. */
static bool rfk_takes_wgmma(const rf_dev *d, const rf_plan *plan, const rf_op *op, uint64_t rows) {
    if (op->kind != RF_OP_MATMUL && !rfk_has_pairs(op)) return false;
    const bool is_narrow = op->kind == RF_OP_MATMUL && rfk_has_narrow(plan, op);
    if (!d->wgmma || rfk_n_in(op) % RFK_WGMMA_DEPTH || rows <= (is_narrow ? RFK_FEW_MAX : RFK_FEW_STEP)) return false;
    if (rfk_is_float_type(plan->weights[op->weight].type))
        return op->kind == RF_OP_MATMUL && rfk_term_values(d, plan, op) > 0;
    return op->kind == RF_OP_MATMUL || rfk_many_pairs(op, rows) > 0;
}
static bool rfk_takes_narrow(const rf_dev *d, const rf_plan *plan, const rf_op *op, uint64_t rows) {
    return rfk_takes_wgmma(d, plan, op, rows) && rfk_has_narrow(plan, op) &&
           (op->kind != RF_OP_MATMUL || rows <= RFK_NARROW_COLS);
}

/* Most rows of a step that runs by the launches of a decode step. Where rfk_matmul_narrow makes all quantized products,
 * it is faster than two passes of those. Weights are asked, not ops: rfk_is_wide says why. */
static uint32_t rfk_most_few(const rf_dev *d, const rf_plan *plan) {
    bool narrow = false;
    for (uint32_t i = 0; i < plan->n_weights; i++) {
        const rf_plan_weight *w = &plan->weights[i];
        if (w->n_experts) return RFK_FEW_STEP;
        if (w->row_reads || rfk_is_float_type(w->type)) continue;
        if (!rfk_is_narrow_type(w->type) || w->n_in % RFK_WGMMA_DEPTH) return RFK_FEW_STEP;
        narrow = true;
    }
    return d->wgmma && narrow ? RFK_FEW_MAX : RFK_FEW_STEP;
}

/* The pairs of an op for tiles; 0: too few, or another op. */
static uint32_t rfk_tile_pairs(const rf_dev *d, const rf_plan *plan, const rf_op *op, uint64_t rows) {
    if (!rfk_has_pairs(op)) return 0;
    const bool has_tiles = rfk_has_tiles(d, plan->weights[op->weight].type) || rfk_term_values(d, plan, op) ||
                           rfk_takes_wgmma(d, plan, op, rows);
    return has_tiles ? rfk_many_pairs(op, rows) : 0;
}
/* Tiles for so many pairs, at most. */
static uint32_t rfk_pair_tiles(uint32_t pairs, uint32_t n_experts) { return pairs / RFK_PAIR_TILE + n_experts; }

/* Whether the op reads int8 rows. */
static int rfk_reads_int8(const rf_plan *plan, const rf_op *op) {
    return rfk_takes_int8(plan, op) || (rfk_has_pairs(op) && !rfk_is_float_type(plan->weights[op->weight].type));
}

/* Whether b, the op after a, can be part of its launch: it reads nothing that a writes, and differs only in what
 * kernels take per part. */
static int rfk_can_join(const rf_plan *plan, const rf_op *a, const rf_op *b) {
    if (a->kind != b->kind || a->layer != b->layer || a->rows != b->rows || a->out == b->out) return 0;
    if (a->kind == RF_OP_MATMUL)
        return a->in == b->in && a->matmul.n_in == b->matmul.n_in &&
               plan->weights[a->weight].type == plan->weights[b->weight].type;
    return a->kind == RF_OP_ROPE && rf_op_same_angles(a, b) && a->rope.head_dim == b->rope.head_dim &&
           a->flags == b->flags;
}

/* Whether the op overwrites all of its output. */
static int rfk_replaces(const rf_plan *plan, const rf_op *op) {
    if (op->kind == RF_OP_SLICE)
        return op->slice.out_at == 0 && op->slice.n_heads * op->slice.n == plan->buffers[op->out].width;
    return op->kind != RF_OP_ROPE && !(op->flags & RF_OP_ACCUMULATE);
}

/* For op i, which quantizes its output: whether nothing reads the floats before they are overwritten. */
static int rfk_read_as_int8(const rf_prepared *p, uint32_t i) {
    const rf_plan *plan = p->plan;
    const uint32_t buffer = plan->ops[i].out;
    if (plan->ops[i].flags & RF_OP_ACCUMULATE || plan->buffers[buffer].rows == RF_ROWS_LOGITS) return 0;
    for (i++; i < plan->n_ops; i++) {
        const rf_op *op = &plan->ops[i];
        if (op->in2 == buffer || op->in3 == buffer) return 0;
        if (op->in == buffer && (!rfk_reads_int8(plan, op) || p->ops[i].quantize)) return 0;
        if (op->out == buffer) return rfk_replaces(plan, op);
    }
    return 1;
}

/* Whether op b can read the rows that were made for op a, in steps of any number of rows. */
static bool rfk_reads_same(const rf_prepared *p, const rf_op *a, const rf_op *b) {
    if (!a || a->kind != b->kind) return false;
    return !p->dev->wgmma || rfk_has_narrow(p->plan, a) == rfk_has_narrow(p->plan, b);
}

/* Segments are the ops of one layer. Within one, an input that several matmuls share is quantized once, by the norm or
 * GLU that makes it if there is one; matmuls with one input, and the RoPE of queries and keys, are launched together.
 * Matmuls and experts do not share int8 rows: in a decode step, fused matmuls keep theirs in shared memory. Nor do
 * types that rfk_matmul_narrow has and others. */
static void rfk_make_segments(rf_prepared *p) {
    const rf_plan *plan = p->plan;
    uint32_t held = RF_NONE, held_n = 0; /* the buffer in the int8 rows */
    const rf_op *held_for = NULL,        /* the op that it is for */
        *sorted = NULL;                  /* the experts whose pairs are sorted */
    for (uint32_t i = 0; i < plan->n_ops; i++) {
        const rf_op *op = &plan->ops[i],
                    *next = i + 1 < plan->n_ops && plan->ops[i + 1].layer == op->layer ? op + 1 : NULL;
        if (rf_op_begins_segment(plan, i)) {
            p->segments[p->n_segments++] = i;
            held = RF_NONE;
            sorted = NULL;
        }
        if (rfk_reads_int8(plan, op)) {
            p->ops[i].quantize = held != op->in || held_n != rfk_n_in(op) || !rfk_reads_same(p, held_for, op);
            held = op->in, held_n = rfk_n_in(op), held_for = op;
        }
        if (rfk_tile_pairs(p->dev, plan, op, p->n_batch)) {
            p->ops[i].sort = !sorted || sorted->in2 != op->in2 || rfk_n_chosen(sorted) != rfk_n_chosen(op) ||
                             rfk_n_matrices(sorted) != rfk_n_matrices(op);
            sorted = op;
        }
        if (sorted && sorted->in2 != RF_NONE && op->out == sorted->in2) sorted = NULL;
        if (op->out == held || op->kind == RF_OP_ATTENTION || op->kind == RF_OP_HEADS) held = RF_NONE;
        uint32_t made = op->kind == RF_OP_RMS_NORM && op->norm.n_groups == 1 ? op->norm.n
                        : op->kind == RF_OP_GLU                             ? op->glu.n
                                                                            : 0;
        if (op->kind == RF_OP_GLU && next && next->kind == RF_OP_EXPERTS && (i == 0 || op[-1].kind != RF_OP_EXPERTS))
            made = 0; /* it may become part of a matmul's launch */
        if (made && next && next->kind != RF_OP_HEADS && rfk_reads_int8(plan, next) && next->in == op->out &&
            rfk_row_values(next) == made) {
            p->ops[i].quantize = 1;
            held = op->out, held_n = rfk_n_in(next), held_for = next;
        }
        uint32_t max = op->kind == RF_OP_MATMUL ? RFK_PRODUCTS : op->kind == RF_OP_ROPE ? 2 : 1, n = 1;
        for (int joins = 1; joins && n < max && i + n < plan->n_ops;) {
            for (uint32_t k = 0; k < n; k++) joins = joins && rfk_can_join(plan, op + k, op + n);
            n += (uint32_t)joins;
        }
        p->ops[i].together = n;
    }
    p->segments[p->n_segments] = plan->n_ops;
    for (uint32_t i = 0; i < plan->n_ops; i++)
        if ((plan->ops[i].kind == RF_OP_RMS_NORM || plan->ops[i].kind == RF_OP_GLU) && p->ops[i].quantize)
            p->ops[i].only_int8 = (uint32_t)rfk_read_as_int8(p, i);
}

/* Point `out` to the next n_bytes at *at, rounded up to 256. */
template <class T> static void rfk_take_bytes(uintptr_t *at, T **out, uint64_t n_bytes) {
    *out = (T *)*at;
    *at += (uintptr_t)rfk_align(n_bytes);
}

/* Divide a plan's allocation, which begins at `memory`.   Returns its size; memory NULL: only that. */
static uint64_t rfk_divide_memory(rf_prepared *p, void *memory) {
    const rf_plan *plan = p->plan;
    uint64_t rows = p->n_batch > p->n_logits ? p->n_batch : p->n_logits, widest = 0, heads = 0, dim = 0,
             terms = 0, units = 0, pairs = 0, pair_tiles = 0, lists = 0, bf16 = 0;
    for (uint32_t i = 0; i < plan->n_ops; i++) {
        const rf_op *op = &plan->ops[i];
        const uint32_t n_pairs = rfk_tile_pairs(p->dev, plan, op, p->n_batch);
        if (n_pairs > pairs) pairs = n_pairs;
        if (n_pairs && rfk_pair_tiles(n_pairs, rfk_n_matrices(op)) > pair_tiles)
            pair_tiles = rfk_pair_tiles(n_pairs, rfk_n_matrices(op));
        const uint64_t values =
            n_pairs || (op->kind == RF_OP_MATMUL && rows > RFK_MATVEC_COLS) ? rfk_term_values(p->dev, plan, op) : 0;
        if (values > terms) terms = values;
        if (values && rfk_n_vectors(op) > units) units = rfk_n_vectors(op);
        if (rfk_reads_int8(plan, op) && rfk_row_values(op) > widest) widest = rfk_row_values(op);
        if (rfk_reads_int8(plan, op) && rfk_bf16_values(op) > bf16) bf16 = rfk_bf16_values(op);
        if (op->kind == RF_OP_INDEX && op->index.n_lists > lists) lists = op->index.n_lists;
        if (op->kind != RF_OP_ATTENTION) continue;
        if (op->attention.n_heads > heads) heads = op->attention.n_heads;
        if (op->attention.head_dim_v > dim) dim = op->attention.head_dim_v;
    }
    p->split_cells = rfk_ceil_div(rfk_ceil_div(p->n_ctx, RFK_MAX_SPLITS), RFK_CELLS) * RFK_CELLS;
    if (p->split_cells < RFK_SPLIT_CELLS) p->split_cells = RFK_SPLIT_CELLS;
    p->max_splits = rfk_ceil_div(p->n_ctx, p->split_cells);
    uint64_t split_rows = p->n_batch < RFK_SPLIT_ROWS ? p->n_batch : RFK_SPLIT_ROWS;
    const uint64_t n_kept = __atomic_load_n(&p->dev->graphs, __ATOMIC_RELAXED) == RFK_GRAPHS_CHECKED &&
                                    plan->logits < plan->n_buffers
                                ? plan->n_vocab
                                : 0; /* never grows: checks end and do not begin again */
    p->tile_blocks = 3 * p->dev->info.compute_units;
    const uint64_t tile_floats = (uint64_t)p->tile_blocks * RFK_LARGE_TILE_ROWS * RFK_LARGE_TILE_COLS,
                   tile_bytes = rows > RFK_MATVEC_COLS ? tile_floats * sizeof(float) : 0;
    uintptr_t at = (uintptr_t)memory;
    rfk_take_bytes(&at, &p->rows, p->n_batch * sizeof *p->rows);
    rfk_take_bytes(&at, &p->ranges, p->n_batch * sizeof *p->ranges);
    rfk_take_bytes(&at, &p->logit_rows, p->n_logits * sizeof *p->logit_rows);
    rfk_take_bytes(&at, &p->tables, plan->n_tables * sizeof *p->tables);
    rfk_take_bytes(&at, &p->x8.q, p->dev->wgmma ? (rows * bf16 + RFK_WGMMA_COLS * RFK_WGMMA_DEPTH) * sizeof(uint16_t)
                                               : rows * widest);
    rfk_take_bytes(&at, &p->x8.group, rows * (widest / 32) * sizeof *p->x8.group);
    rfk_take_bytes(&at, &p->part,
                  p->max_splits > 1 ? split_rows * heads * p->max_splits * (dim + 2) * sizeof *p->part : 0);
    const uint64_t few = p->n_few, columns = few > 1 ? rfk_align16(few) * widest : 0;
    for (int i = 0; i < 2; i++) {
        rfk_take_bytes(&at, &p->few[i].q, RFK_FEW_BYTES(columns));
        p->few[i].capacity = columns;
    }
    const uint64_t attend = p->n_attend, few_parts = (attend < RFK_FEW_MAX ? attend : RFK_FEW_MAX) * p->decode_splits,
                   parts = few_parts > attend + p->decode_splits ? few_parts : attend + p->decode_splits;
    rfk_take_bytes(&at, &p->angles, attend * p->n_ropes * RFK_MAX_HEAD * sizeof *p->angles);
    rfk_take_bytes(&at, &p->decode_part,
                   p->n_ropes ? parts * heads * (dim + 4) * sizeof *p->decode_part : 0);
    rfk_take_bytes(&at, &p->tickets, attend * heads * sizeof *p->tickets);
    rfk_take_bytes(&at, &p->kept_logits, n_kept * sizeof *p->kept_logits);
    rfk_take_bytes(&at, &p->differ, sizeof *p->differ);
    rfk_take_bytes(&at, &p->now, 2 * sizeof *p->now);
    const uint64_t n_members = p->members ? p->members->n : 0;
    rfk_take_bytes(&at, &p->parts, 2 * n_members * sizeof *p->parts);
    rfk_take_bytes(&at, &p->tile_part, tile_bytes);
    rfk_take_bytes(&at, &p->index_scores, (uint64_t)RFK_INDEX_ROWS * lists * p->n_ctx * sizeof *p->index_scores);
    rfk_take_bytes(&at, &p->terms.value, /* a tile may reach beyond the last row */
                   (rows * terms + (terms && p->dev->wgmma ? RFK_WGMMA_COLS * RFK_WGMMA_DEPTH : 0)) *
                       sizeof *p->terms.value);
    rfk_take_bytes(&at, &p->terms.unit, rows * units * sizeof *p->terms.unit);
    rfk_take_bytes(&at, &p->best, RFK_ARGMAX_PARTS * sizeof *p->best);
    rfk_take_bytes(&at, &p->lists.sorted, pairs * sizeof *p->lists.sorted);
    rfk_take_bytes(&at, &p->lists.tile, pair_tiles * sizeof *p->lists.tile);
    rfk_take_bytes(&at, &p->deferred.q, widest);
    rfk_take_bytes(&at, &p->deferred.group, widest / 32 * sizeof *p->deferred.group);
    rfk_take_bytes(&at, &p->deferred_squares, widest / 32 * sizeof *p->deferred_squares);
    rfk_take_bytes(&at, &p->residual, widest * sizeof *p->residual);
    if (n_kept == 0) p->kept_logits = NULL;
    p->n_tickets = (uint32_t)(attend * heads);
    return at - (uintptr_t)memory + 256;
}

/* What all sums of a plan with members have in common. */
static rfk_members_args rfk_members_of(const rf_prepared *p) {
    const rf_plan_members *members = p->members;
    rfk_members_args a;
    memset(&a, 0, sizeof a);
    a.n_members = members->n;
    a.rank = members->rank;
    a.part_values = (members->blocks[a.rank].size_bytes - RF_SUM_HEAD_BYTES -
                     (uint64_t)2 * members->n * RF_SUM_FLAGGED * sizeof(uint64_t)) /
                    (2 * members->n * sizeof(float));
    a.trouble = members->trouble;
    a.polls = RFK_MEMBER_POLLS * (members->wait_ms < 1000000 ? members->wait_ms : 1000000);
    a.now = p->now;
    for (uint32_t k = 0; k < members->n; k++) /* of a rank that it has no access to: not used */
        a.block[k] = (char *)members->blocks[members->blocks[k].base ? k : a.rank].base;
    return a;
}

/* Tables of where products write what others sum, and the kernels: the runtime loads them when they are first launched.
 */
static rf_result rfk_prepare_members(rf_prepared *p, rf_queue *q, rf_error *err) {
    const rfk_members_args a = rfk_members_of(p);
    rfk_members_args nothing;
    float *parts[2 * RF_MAX_MEMBERS];
    uint32_t n_parts = 0;
    rf_ticket ticket;
    memset(&nothing, 0, sizeof nothing);
    for (uint32_t odd = 0; odd < 2; odd++)
        for (uint32_t k = 0; k < a.n_members; k++)
            if (k != a.rank) parts[n_parts++] = reinterpret_cast<float *>(rfk_sum_part(a, k, a.rank, odd));
    const rf_mem to_parts = {p->parts, n_parts * sizeof *parts};
    rf_result r = rfk_mem_write(q, &to_parts, 0, parts, to_parts.size_bytes, &ticket, err);
    if (r == RF_OK)
        r = rfk_check(p->dev, err, rfk_launch(rfk_sum_members, dim3(1), dim3(RFK_MEMBER_BLOCK), q->stream, nothing),
                      "hipLaunchKernel", "a sum", 0);
    if (r != RF_OK) return r;
    return rfk_check(p->dev, err, rfk_launch(rfk_sum_flagged, dim3(1), dim3(RFK_BLOCK), q->stream, nothing),
                     "hipLaunchKernel", "a sum", 0);
}

/* Make a plan's allocation; write RoPE tables, zero tickets. */
static rf_result rfk_prepare_memory(rf_prepared *p, rf_error *err) {
    const rf_plan *plan = p->plan;
    const uint64_t total = rfk_divide_memory(p, NULL);
    rf_result r = rfk_check(p->dev, err, hipMalloc(&p->memory, (size_t)total), "hipMalloc", "a prepared plan", 0);
    if (r != RF_OK) {
        p->memory = NULL;
        return r;
    }
    (void)rfk_divide_memory(p, p->memory);
    rf_queue *q = NULL;
    rf_ticket ticket;
    rf_mem tables = {p->tables, plan->n_tables * sizeof *p->tables},
           tickets = {p->tickets, p->n_tickets * sizeof *p->tickets};
    r = rfk_queue_create(p->dev, &q, err);
    if (r != RF_OK) return r;
    r = rfk_mem_fill(q, &tickets, 0, 0, tickets.size_bytes, &ticket, err);
    if (r == RF_OK) r = rfk_mem_write(q, &tables, 0, plan->tables, tables.size_bytes, &ticket, err);
    if (r == RF_OK && p->members) r = rfk_prepare_members(p, q, err);
    if (r == RF_OK)
        r = rfk_check(p->dev, err, hipStreamSynchronize(q->stream), "hipStreamSynchronize", "rope tables", 0);
    rfk_queue_release(q);
    return r;
}

/* ---- what a decode step launches ---- */

/* Whether a quantized matrix is none for rfk_fused_matvec. Weights are asked, not ops: a member of a group has some of
 * the plan's ops and all weights, and is to launch what one device does. */
static int rfk_is_wide(const rf_plan_weight *w) {
    return rfk_is_built(w->type) && !rfk_is_float_type(w->type) && !w->row_reads && !w->n_experts &&
           (w->n_in > RFK_MAX_COLUMN || w->n_in % 64 || rfk_weight_bytes(w) >> 32);
}

/* Whether op i is before `end` and a product for rfk_fused_matvec. */
static int rfk_takes_column(const rf_plan *plan, uint32_t i, uint32_t end) {
    const rf_op *op = &plan->ops[i];
    return i < end && rfk_takes_int8(plan, op) && !rfk_is_wide(&plan->weights[op->weight]);
}

/* Whether the type of op i's weight is one of RFK_OTHER. */
static bool rfk_is_other(const rf_plan *plan, uint32_t i) {
    uint32_t type = plan->weights[plan->ops[i].weight].type;
    return type == RF_TYPE_Q2_K || rfk_kernel_type(type) != type;
}

/* Whether no op from i on reads what the buffer holds now. */
static int rfk_is_dead(const rf_plan *plan, uint32_t i, uint32_t buffer) {
    for (; i < plan->n_ops; i++) {
        const rf_op *op = &plan->ops[i];
        if (op->in == buffer || op->in2 == buffer || op->in3 == buffer) return 0;
        if (op->out == buffer) return rfk_replaces(plan, op);
    }
    return plan->buffers[buffer].rows != RF_ROWS_LOGITS; /* the host reads those */
}

/* A norm that can be fused: in * weight / rms. */
static int rfk_is_plain_norm(const rf_op *op) {
    return op->kind == RF_OP_RMS_NORM && op->flags == 0 && op->weight != RF_NONE && op->bias == RF_NONE;
}

/* A product without epilogue but its bias. */
static int rfk_is_plain_matmul(const rf_op *op) {
    return op->flags == 0 && op->factor == RF_NONE && op->matmul.scale == 0 && op->matmul.softcap == 0;
}

/* Whether g is the activation, alone, of n results in a's buffer times those in b's. */
static int rfk_is_glu_of(const rf_op *g, const rf_op *a, const rf_op *b, uint32_t n) {
    return g->kind == RF_OP_GLU && g->in == a->out && g->in2 == b->out && g->out == a->out && g->rows == a->rows &&
           g->glu.n == n && g->glu.in2_at == 0 && g->glu.repeat <= 1 && g->flags == 0 && g->factor == RF_NONE &&
           a->out != b->out;
}

/* Whether g is silu(a) * b or gelu(a) * b of the results of two products with weights of one type. */
static int rfk_is_plain_glu(const rf_plan *plan, const rf_op *g, const rf_op *a, const rf_op *b) {
    return rfk_is_glu_of(g, a, b, a->matmul.n_out) && b->matmul.n_out == a->matmul.n_out &&
           (g->glu.activation == RF_ACT_SILU || g->glu.activation == RF_ACT_GELU) && rfk_is_plain_matmul(a) &&
           rfk_is_plain_matmul(b) && plan->weights[a->weight].type == plan->weights[b->weight].type;
}

/* Match a fused matvec from op i on: [gather] [norm], up to RFK_PRODUCTS matmuls of one input [and the GLU of two]. 0
 * ops: no match. */
static rfk_fused rfk_match_fused_matvec(const rf_prepared *p, uint32_t i, uint32_t end, uint32_t int8_buffer) {
    const rf_plan *plan = p->plan;
    const rf_op *ops = plan->ops;
    rfk_fused f, none;
    memset(&none, 0, sizeof none);
    none.norm = none.gather = none.glu = none.to_norm = none.add = none.add_next = RF_NONE;
    f = none;
    f.kind = RFK_FUSED_MATVEC;
    f.first = i;
    if (i + 1 < end && ops[i].kind == RF_OP_GATHER && rfk_is_plain_norm(&ops[i + 1]) &&
        ops[i + 1].in == ops[i].out && ops[i + 1].out == ops[i].out && ops[i + 1].norm.n_groups == 1 &&
        ops[i + 1].norm.n == ops[i].gather.n)
        f.gather = i++;
    if (i < end && rfk_is_plain_norm(&ops[i]) && ops[i].norm.n_groups == 1) f.norm = i++;
    if (!rfk_takes_column(plan, i, end)) return none;
    const rf_op *m = &ops[i];
    uint32_t source = f.gather != RF_NONE ? ops[f.gather].in : f.norm != RF_NONE ? ops[f.norm].in : m->in;
    if (f.norm != RF_NONE && (m->in != ops[f.norm].out || m->matmul.n_in != ops[f.norm].norm.n)) return none;
    f.products = i;
    while (rfk_takes_column(plan, i, end) && f.n_products < RFK_PRODUCTS) {
        const rf_op *op = &ops[i];
        int joins = op->in == m->in && op->matmul.n_in == m->matmul.n_in && op->rows == m->rows && op->out != source &&
                    rfk_is_other(plan, i) == rfk_is_other(plan, f.products);
        for (uint32_t k = f.products; k < i; k++) joins = joins && ops[k].out != op->out;
        if (!joins) break;
        f.n_products++;
        i++;
    }
    if (f.n_products == 0) return none;
    if (f.n_products == 2 && i < end && rfk_is_plain_glu(plan, &ops[i], m, m + 1)) f.glu = i++;
    /* a norm in place would overwrite what other blocks still read: then no other op may read it */
    if (f.norm != RF_NONE && ops[f.norm].out == source && !rfk_is_dead(plan, i, source)) return none;
    f.is_int8 = f.norm == RF_NONE && source == int8_buffer;
    f.n_ops = i - f.first;
    return f;
}

/* Whether the fused attention can do this op: rows of its buffers that are wider than its heads begin aligned, too. */
static int rfk_decode_can_attend(const rf_prepared *p, const rf_op *store, const rf_op *op) {
    const rf_attention_params *a = &op->attention;
    const rf_plan_buffer *buffers = p->plan->buffers;
    const uint32_t dim = a->head_dim;
    if ((buffers[op->in].width | buffers[op->out].width | buffers[store->in].width | buffers[store->in2].width) % 4)
        return 0;
    return !(op->flags & (RF_OP_MLA | RF_OP_BOTH_WAYS)) && op->in2 == RF_NONE && a->slopes == RF_NONE &&
           a->temperature == 0 && a->head_dim_v == dim &&
           a->n_heads / a->n_kv_heads <= RFK_QUERIES &&
           (p->cache_type == RF_CACHE_Q8_0 ? dim == 64 || dim == 128 || dim == 256
                                           : dim % 8 == 0 && dim <= RFK_MAX_HEAD);
}

/* Match fused attention from op i on: [norms of queries and keys], RoPE of both, KV store, attention. */
static rfk_fused rfk_match_attention(const rf_prepared *p, uint32_t i, uint32_t end) {
    const rf_plan *plan = p->plan;
    const rf_op *ops = plan->ops;
    rfk_fused f, none;
    memset(&none, 0, sizeof none);
    none.norms[0] = none.norms[1] = RF_NONE;
    f = none;
    f.kind = RFK_FUSED_ATTENTION;
    f.first = i;
    if (i + 6 <= end && rfk_is_plain_norm(&ops[i]) && rfk_is_plain_norm(&ops[i + 1])) {
        f.norms[0] = i++;
        f.norms[1] = i++;
    }
    if (i + 4 > end || ops[i].kind != RF_OP_ROPE || ops[i + 1].kind != RF_OP_ROPE ||
        ops[i + 2].kind != RF_OP_KV_STORE || ops[i + 3].kind != RF_OP_ATTENTION)
        return none;
    const rf_op *rope = &ops[i], *store = &ops[i + 2], *att = &ops[i + 3];
    const rf_attention_params *a = &att->attention;
    const uint32_t q = att->in, k = store->in, n_heads[2] = {a->n_heads, a->n_kv_heads};
    f.ropes = i, f.store = i + 2, f.attention = i + 3;
    f.n_ops = i + 4 - f.first;
    while (f.angles < p->n_ropes && !rf_op_same_angles(rope, p->ropes[f.angles])) f.angles++;
    int ok = f.angles < RFK_ROPES && !(store->flags & RF_OP_MLA) && rfk_decode_can_attend(p, store, att) &&
             rope[0].out == q && rope[1].out == k && store->state == att->state && store->in2 != q && store->in2 != k &&
             q != k && att->out != q && att->out != k && att->out != store->in2 && rope->rope.n_rot > 0;
    for (int r = 0; r < 2; r++)
        ok = ok && !(rope[r].flags & RF_OP_LAST) && rope[r].rope.head_dim == a->head_dim &&
             rope[r].rope.n_heads == n_heads[r] && rf_op_same_angles(&rope[r], rope) && rope[r].flags == rope->flags;
    for (int r = 0; r < 2 && f.norms[r] != RF_NONE; r++) {
        const rf_op *n = &ops[f.norms[r]];
        ok = ok && n->in == (r ? k : q) && n->out == n->in && n->norm.n == a->head_dim &&
             n->norm.n_groups == n_heads[r];
    }
    ok = ok && rfk_is_dead(plan, i + 4, q) && rfk_is_dead(plan, i + 4, k);
    return ok ? f : none;
}

static rfk_fused rfk_no_launch(uint32_t kind, uint32_t first) {
    rfk_fused f;
    memset(&f, 0, sizeof f);
    f.kind = kind;
    f.first = first;
    f.norm = f.gather = f.glu = f.to_norm = f.add = f.add_next = f.norms[0] = f.norms[1] = RF_NONE;
    f.choice = f.shared[0] = f.shared[1] = f.share = RF_NONE;
    return f;
}

/* Match a delta rule, the norm of each head's result and its gate. 0 ops: no match. */
static rfk_fused rfk_match_delta(const rf_prepared *p, uint32_t i, uint32_t end) {
    const rf_plan *plan = p->plan;
    const rf_op *op = &plan->ops[i], *norm = op + 1, *gate = op + 2;
    const rf_delta_params *d = &op->delta;
    const rfk_fused none = rfk_no_launch(RFK_FUSED_OP, i);
    rfk_fused f = rfk_no_launch(RFK_FUSED_DELTA, i);
    if (i + 3 > end || op->kind != RF_OP_DELTA || !rfk_is_plain_norm(norm) || gate->kind != RF_OP_GLU) return none;
    const uint32_t n = d->n_heads * d->head_dim_v, y = op->out, out = gate->out, activation = gate->glu.activation;
    const bool ok = d->head_dim <= RFK_GATED_DIM && d->head_dim_v <= RFK_GATED_DIM && d->head_dim_v % 4 == 0 &&
                    plan->buffers[out].width % 4 == 0 && norm->in == y && norm->out == y &&
                    norm->norm.n == d->head_dim_v && norm->norm.n_groups == d->n_heads && gate->in == out &&
                    gate->in2 == y && gate->glu.n == n && gate->glu.in2_at == 0 && gate->glu.repeat <= 1 &&
                    gate->flags == 0 && gate->factor == RF_NONE && gate->rows == op->rows &&
                    (activation == RF_ACT_SILU || activation == RF_ACT_SIGMOID) && out != y && out != op->in &&
                    out != op->in2 && out != op->in3 && rfk_is_dead(plan, i + 3, y) &&
                    (!p->ops[i + 2].quantize || rfk_takes_column(plan, i + 3, end));
    f.norm = i + 1, f.glu = i + 2;
    f.n_ops = 3;
    return ok ? f : none;
}

/* Match a norm and products of its result with few rows of floats. 0 ops: no match. */
static rfk_fused rfk_match_norm_dots(const rf_prepared *p, uint32_t i, uint32_t end) {
    const rf_op *ops = p->plan->ops, *norm = &ops[i];
    const rfk_fused none = rfk_no_launch(RFK_FUSED_OP, i);
    rfk_fused f = rfk_no_launch(RFK_FUSED_NORM_DOTS, i);
    uint32_t rows = 0;
    if (!rfk_is_plain_norm(norm) || norm->norm.n_groups != 1 || norm->norm.n % 4 || norm->out == norm->in ||
        norm->rows != RF_ROWS_TOKENS)
        return none;
    f.norm = i;
    f.products = i + 1;
    for (i++; i < end && f.n_products < RFK_PRODUCTS; i++) {
        const rf_op *op = &ops[i];
        if (op->kind != RF_OP_MATMUL || !rfk_is_float_type(p->plan->weights[op->weight].type) || op->in != norm->out ||
            op->matmul.n_in != norm->norm.n || op->rows != norm->rows || op->out == norm->in || op->out == norm->out ||
            rows + op->matmul.n_out > RFK_NORM_DOTS_ROWS)
            break;
        rows += op->matmul.n_out;
        f.n_products++;
    }
    f.n_ops = 1 + f.n_products;
    return f.n_products ? f : none;
}

/* Whether g is such a GLU that the mixtures' kernels have. */
static int rfk_is_mixture_glu(const rf_op *g, const rf_op *a, const rf_op *b, uint32_t n) {
    const uint32_t activation = g->glu.activation;
    return rfk_is_glu_of(g, a, b, n) &&
           (activation == RF_ACT_SILU || activation == RF_ACT_GELU || activation == RF_ACT_OAI);
}

/* The type that the mixtures' kernels are chosen by, and the values of their fragments. */
static uint32_t rfk_mixture_type(const rf_plan *plan, const rf_op *op) {
    const uint32_t type = plan->weights[op->weight].type;
#define RFK_OWN_CASE(TYPE) case TYPE:
    switch (type) {
        RFK_MIXTURE_OWN_TYPES(RFK_OWN_CASE) return type;
    default: return rfk_kernel_type(type);
    }
#undef RFK_OWN_CASE
}
static uint32_t rfk_mixture_values(uint32_t type) {
#define RFK_VALUES_CASE(TYPE) case TYPE:
    switch (type) {
        RFK_MIXTURE_TYPES64(RFK_VALUES_CASE) return 64;
    default: return 32;
    }
#undef RFK_VALUES_CASE
}

/* Match the shared experts from op i on, as one more choice of a mixture of `up` and `down`: gate, up and activation,
 * then down, with its share in a sum of its own if there is one.   Returns how many ops. */
static uint32_t rfk_match_shared(const rf_plan *plan, uint32_t i, uint32_t end, rfk_fused *up, rfk_fused *down) {
    const rf_op *ops = plan->ops, *e = &ops[up->first], *mix = &ops[down->first + 1], *a = &ops[i], *d = a + 3;
    if (i + 4 > end || a[0].kind != RF_OP_MATMUL || a[1].kind != RF_OP_MATMUL || d->kind != RF_OP_MATMUL) return 0;
    const uint32_t n = a->matmul.n_out;
    int ok = a[0].in == e->in && a[1].in == e->in && a->out != e->out && a->out != e->in2 && a->out != mix->out &&
             a->rows == e->rows && a[1].matmul.n_out == n &&
             n % rfk_mixture_values(rfk_mixture_type(plan, &ops[down->first])) == 0 &&
             a->matmul.n_in == e->experts.n_in && rfk_is_mixture_glu(&a[2], &a[0], &a[1], n) &&
             a[2].glu.activation == ops[up->glu].glu.activation && d->in == a[2].out && d->matmul.n_in == n &&
             d->matmul.n_out == mix->mix.n && !(d->flags & ~RF_OP_ACCUMULATE) && d->matmul.softcap == 0;
    for (uint32_t k = 0; k < 4 && ok; k += k == 1 ? 2 : 1)
        ok = a[k].bias == RF_NONE && a[k].factor == RF_NONE && a[k].matmul.first_row == 0 &&
             rfk_mixture_type(plan, &a[k]) == rfk_mixture_type(plan, k == 3 ? &ops[down->first] : e) &&
             (k == 3 || rfk_is_plain_matmul(&a[k]));
    if (!ok || !rfk_is_dead(plan, i + 4, a[0].out) || !rfk_is_dead(plan, i + 3, a[1].out)) return 0;
    up->shared[0] = i, up->shared[1] = i + 1;
    down->shared[0] = i + 3;
    if (d->flags & RF_OP_ACCUMULATE) {
        if (d->out == mix->out) return 4;
    } else if (i + 4 < end && d[1].kind == RF_OP_MIX && d[1].in == d->out && d[1].mix.n_used == 1 &&
               d[1].mix.n == mix->mix.n && d[1].flags == (RF_OP_ACCUMULATE | RF_OP_SIGMOID) && d[1].in2 != RF_NONE &&
               d[1].out == mix->out && d->matmul.scale == 0 && rfk_is_dead(plan, i + 5, d->out)) {
        down->share = i + 4;
        return 5;
    }
    up->shared[0] = up->shared[1] = down->shared[0] = RF_NONE;
    return 0;
}

#define RFK_COLUMNS_BYTES (38u * 1024u) /* of a mixture's columns, at most: 31,129 values */

/* Match a mixture from op i on: gate, up, activation, down and the weighted sum of the chosen experts.   Returns
 * whether; *up and *down become its launches. */
static int rfk_match_mixture(const rf_prepared *p, uint32_t i, uint32_t end, rfk_fused *up, rfk_fused *down) {
    const rf_plan *plan = p->plan;
    const rf_op *e = &plan->ops[i], *d = e + 3, *mix = e + 4;
    if (i + 5 > end || e[0].kind != RF_OP_EXPERTS || e[1].kind != RF_OP_EXPERTS || d->kind != RF_OP_EXPERTS ||
        mix->kind != RF_OP_MIX || mix->mix.n_out)
        return 0;
    const uint32_t n = e->experts.n_out, n_used = e->experts.n_used, type = rfk_mixture_type(plan, e);
    *up = rfk_no_launch(RFK_FUSED_UP, i);
    *down = rfk_no_launch(RFK_FUSED_DOWN, i + 3);
    up->n_ops = 3, down->n_ops = 2;
    up->glu = i + 2;
    if (i > 0 && e[-1].kind == RF_OP_ROUTE && e[-1].out == e->in2 && e[-1].route.n_groups <= 1 &&
        e[-1].factor == RF_NONE && e[-1].route.n_experts <= RFK_CHOOSE_FROM)
        up->choice = i - 1;
    int ok = e->experts.n_own == 0 && e->rows == RF_ROWS_TOKENS && e[0].flags == 0 && e[1].flags == 0 &&
             e[1].in == e->in && e[1].in2 == e->in2 && e[1].experts.n_out == n &&
             e[1].experts.n_in == e->experts.n_in &&
             rfk_mixture_type(plan, &e[1]) == type && !rfk_is_float_type(type) && e->in != e->out &&
             e->in != e[1].out && e->experts.n_in % rfk_mixture_values(type) == 0 &&
             n % rfk_mixture_values(rfk_mixture_type(plan, d)) == 0 &&
             n_used < RFK_MIXTURE_CHOICES && rfk_is_mixture_glu(&e[2], &e[0], &e[1], n_used * n) &&
             d->flags == RF_OP_PER_CHOICE && d->in == e->out && d->in2 == e->in2 && d->experts.n_in == n &&
             !rfk_is_float_type(rfk_mixture_type(plan, d)) && mix->in == d->out && mix->in2 == e->in2 &&
             mix->mix.n == d->experts.n_out && mix->mix.n_used == n_used && !(mix->flags & RF_OP_SIGMOID) &&
             mix->out != e->in && mix->out != e->out && mix->out != e->in2 &&
             rfk_columns_bytes(e->experts.n_in) <= RFK_COLUMNS_BYTES;
    if (!ok || !rfk_is_dead(plan, i + 4, e[0].out) || !rfk_is_dead(plan, i + 3, e[1].out) ||
        !rfk_is_dead(plan, i + 5, d->out))
        return 0;
    const uint32_t more = rfk_match_shared(plan, i + 5, end, up, down);
    const uint32_t n_shared = more ? plan->ops[down->shared[0]].matmul.n_in : 0;
    down->n_ops += more;
    return rfk_columns_bytes(n_used * n + n_shared) <= RFK_COLUMNS_BYTES;
}

/* Whether a fused matvec can quantize its n results: a block makes 32 at a time, in few enough passes even with the
 * fewest blocks of any config. */
static int rfk_fused_to_int8(const rf_prepared *p, uint32_t n) {
    return RFK_FUSED_BLOCK_OF(p->dev) / p->dev->wave == 32 && n % 32 == 0 &&
           n / 32 <= RFK_FUSED_PASSES * RFK_FUSED_RESIDENT * p->dev->info.compute_units;
}

/* Find the launches of a decode step in the plan's ops; what does not match a fused one is an op of its own. */
static void rfk_make_fused(rf_prepared *p) {
    const rf_plan *plan = p->plan;
    uint32_t int8_buffer = RF_NONE; /* what x8 holds */
    int wide = 0;                   /* some matmuls read x8 without fusion: x8 must be as in other steps */
    for (uint32_t i = 0; i < plan->n_weights; i++) wide = wide || rfk_is_wide(&plan->weights[i]);
    p->n_fused = 0;
    for (uint32_t segment = 0; segment < p->n_segments; segment++) {
        uint32_t end = p->segments[segment + 1];
        p->fused_of[segment] = p->n_fused;
        for (uint32_t i = p->segments[segment]; i < end;) {
            rfk_fused f = rfk_no_launch(RFK_FUSED_OP, i), up, down;
            if (!wide) f = rfk_match_fused_matvec(p, i, end, int8_buffer);
            if (!wide && f.n_ops == 0) f = rfk_match_attention(p, i, end);
            if (f.n_ops == 0) f = rfk_match_norm_dots(p, i, end);
            if (!wide && f.n_ops == 0) f = rfk_match_delta(p, i, end);
            if (f.n_ops == 0 && rfk_match_mixture(p, i, end, &up, &down)) {
                p->fused[p->n_fused++] = up;
                i += up.n_ops;
                f = down;
            } else if (f.n_ops == 0) {
                f = rfk_no_launch(RFK_FUSED_OP, i);
                f.n_ops = p->ops[i].together;
                if (plan->ops[i].kind == RF_OP_ATTENTION) p->no_graphs = 1; /* the grid depends on the position */
            }
            int8_buffer = RF_NONE;
            if (f.kind == RFK_FUSED_ATTENTION) {
                const rf_op *att = &plan->ops[f.attention], *next = att + 1;
                if (f.angles == p->n_ropes) p->ropes[p->n_ropes++] = &plan->ops[f.ropes];
                f.to_int8 = rfk_takes_column(plan, f.attention + 1, end) && next->in == att->out &&
                            next->matmul.n_in == att->attention.n_heads * att->attention.head_dim &&
                            att->attention.head_dim % 32 == 0;
                if (f.to_int8) int8_buffer = att->out;
            } else if (f.kind == RFK_FUSED_MATVEC && f.glu != RF_NONE) {
                const rf_op *glu = &plan->ops[f.glu], *next = glu + 1;
                f.to_int8 = !f.is_int8 && rfk_takes_column(plan, f.glu + 1, end) && next->in == glu->out &&
                            next->matmul.n_in == glu->glu.n && rfk_fused_to_int8(p, glu->glu.n);
                if (f.to_int8) int8_buffer = glu->out;
            } else if (f.kind == RFK_FUSED_DELTA) {
                const rf_op *gate = &plan->ops[f.glu], *next = gate + 1;
                f.to_int8 = rfk_takes_column(plan, f.glu + 1, end) && next->in == gate->out &&
                            next->matmul.n_in == gate->glu.n && plan->ops[i].delta.head_dim_v % 32 == 0;
                if (f.to_int8) int8_buffer = gate->out;
            }
            p->fused[p->n_fused++] = f;
            i += f.n_ops;
        }
    }
    p->fused_of[p->n_segments] = p->n_fused;
}

/* From a fused matvec to the launch that takes its results, or the sum that they are parts of. */
static uint32_t rfk_to_next(const rf_prepared *p, const rfk_fused *f) {
    const uint32_t after = f->first + f->n_ops;
    return after < p->plan->n_ops && p->plan->ops[after].kind == RF_OP_SUM ? 2 : 1;
}

/* Deferred norms: let a launch that makes all of a norm's input quantize it. */
static void rfk_defer_norms(rf_prepared *p) {
    const rf_op *ops = p->plan->ops;
    for (uint32_t i = 0; i + 1 < p->n_fused; i++) {
        rfk_fused *f = &p->fused[i], *next = f + rfk_to_next(p, f);
        if (f->kind != RFK_FUSED_MATVEC || next >= p->fused + p->n_fused || next->kind != RFK_FUSED_MATVEC ||
            next->norm == RF_NONE)
            continue;
        const rf_op *made = &ops[f->products], *norm = &ops[next->norm];
        const uint32_t n = norm->norm.n, out = rfk_to_next(p, f) == 2 ? made[1].out : made->out;
        if (f->n_products != 1 || f->norm_is_deferred || made->matmul.n_out != n || !rfk_fused_to_int8(p, n) ||
            out != (next->gather == RF_NONE ? norm->in : ops[next->gather].in))
            continue;
        f->to_norm = next->norm;
        next->norm_is_deferred = 1;
    }
}

/* Whether op is a post-norm of tokens: out += in / rms(in) * weight, as rfk_norm_wide does it. */
static int rfk_is_post_norm(const rf_plan *plan, const rf_op *op) {
    return op->kind == RF_OP_RMS_NORM && op->flags == RF_OP_ACCUMULATE && op->weight != RF_NONE &&
           op->bias == RF_NONE && op->norm.n_groups == 1 && op->rows == RF_ROWS_TOKENS && op->in != op->out &&
           plan->weights[op->weight].type == RF_TYPE_F32 &&
           (op->norm.n | plan->buffers[op->in].width | plan->buffers[op->out].width) % 4 == 0;
}

/* The launch of op i, from launch k on, if that is a launch of its own; RF_NONE: it is not. */
static uint32_t rfk_own_launch(const rf_prepared *p, uint32_t i, uint32_t k) {
    while (k < p->n_fused && p->fused[k].first < i) k++;
    const rfk_fused *f = &p->fused[k];
    return k < p->n_fused && f->kind == RFK_FUSED_OP && f->first == i && f->n_ops == 1 ? k : RF_NONE;
}

/* Let fused matvecs take the post-norm before them, if they read its sum. */
static void rfk_take_post_norms(rf_prepared *p) {
    const rf_plan *plan = p->plan;
    const rf_op *ops = plan->ops;
    for (uint32_t k = 1; k < p->n_fused; k++) {
        rfk_fused *f = &p->fused[k];
        const uint32_t i = f->first - 1, end = f->first + f->n_ops;
        const rf_op *add = &ops[i];
        if (f->kind != RFK_FUSED_MATVEC || f->gather != RF_NONE || rfk_own_launch(p, i, k - 1) == RF_NONE ||
            !rfk_is_post_norm(plan, add) || ops[f->first].in != add->out || ops[f->products].matmul.n_in != add->norm.n)
            continue;
        uint32_t next = f->first; /* the op that touches the sum next */
        int ok = 1;
        for (; next < end; next++) ok = ok && ops[next].out != add->in && ops[next].out != add->out;
        while (next < plan->n_ops && ops[next].in != add->out && ops[next].in2 != add->out &&
               ops[next].in3 != add->out && ops[next].out != add->out)
            next++;
        if (ok) f->add = i;
        if (ok && next < plan->n_ops && rfk_is_post_norm(plan, &ops[next]) && ops[next].in != add->out)
            f->add_next = rfk_own_launch(p, next, k);
    }
}

/* What makes `count` products of ops from i on in a step of several rows: a GLU's two have one type. */
static rfk_few_way rfk_find_few_way(const rf_prepared *p, uint32_t i, uint32_t count) {
    rfk_few_way way = {RFK_FEW_ANY, 0};
#if defined(RFK_DIRECT_TYPES)
    const rf_plan *plan = p->plan;
    const uint32_t first = plan->weights[plan->ops[i].weight].type;
    bool direct = p->dev->direct != 0, staged = direct && rfk_staged_kernel(first, 8);
#define RFK_OR_TYPE(TYPE) || type == TYPE
    for (uint32_t k = i; k < i + count; k++) {
        const uint32_t type = plan->weights[plan->ops[k].weight].type;
        const bool whole = plan->ops[k].matmul.n_in % 256 == 0;
        direct = direct && whole && (false RFK_DIRECT_TYPES(RFK_OR_TYPE));
        staged = staged && whole && type == first;
    }
#undef RFK_OR_TYPE
    way.kernel = direct ? RFK_FEW_DIRECT : staged ? RFK_FEW_STAGED : RFK_FEW_ANY;
    way.max_rows = direct ? RFK_FEW_ROWS : staged ? RFK_STAGED_MAX(first) : 0;
#else
    (void)p, (void)i, (void)count;
#endif
    return way;
}

/* How many products of fused matvec f, from its `first` on, one kernel multiplies in a step of several rows; *way:
 * which one. So gates of a few rows do not slow down the large matrices beside them. */
static uint32_t rfk_few_run(const rf_prepared *p, const rfk_fused *f, uint32_t first, rfk_few_way *way) {
    uint32_t n = f->glu != RF_NONE ? f->n_products : 1;
    *way = rfk_find_few_way(p, f->products + first, n);
    for (; first + n < f->n_products; n++)
        if (rfk_find_few_way(p, f->products + first + n, 1).kernel != way->kernel ||
            rfk_find_few_way(p, f->products + first, n + 1).kernel != way->kernel)
            break;
    return n;
}

#define RFK_FEW_SMALL 256u /* rows: products of fewer take a small part of a step */
/* What all products of the plan have in common, but small ones: rfk_early_carveout. Mixtures lose by it. */
static void rfk_find_plan_way(rf_prepared *p) {
    rfk_few_way all = {p->n_fused ? RFK_FEW_DIRECT : RFK_FEW_ANY, RFK_FEW_ROWS}, way;
    for (uint32_t i = 0; i < p->n_fused; i++) {
        const rfk_fused *f = &p->fused[i];
        if (f->kind == RFK_FUSED_UP || f->kind == RFK_FUSED_DOWN) all.kernel = RFK_FEW_ANY;
        if (f->kind != RFK_FUSED_MATVEC) continue;
        for (uint32_t first = 0, n; first < f->n_products; first += n) {
            uint32_t n_out = 0;
            n = rfk_few_run(p, f, first, &way);
            for (uint32_t k = first; k < first + n; k++) n_out += p->plan->ops[f->products + k].matmul.n_out;
            if (n_out < RFK_FEW_SMALL) continue;
            if (way.kernel < all.kernel) all.kernel = way.kernel;
            if (way.max_rows < all.max_rows) all.max_rows = way.max_rows;
        }
    }
    p->few_way = all;
}

/* How many columns a KV head has in the grid of decode attention, if each has up to `queries`: the logarithm of a power
 * of two. */
static uint32_t rfk_decode_columns_log2(const rf_attention_params *a, uint32_t queries) {
    uint32_t log2 = 0;
    while (queries << log2 < a->n_heads / a->n_kv_heads) log2++;
    return log2;
}

/* Splits of a decode step's attention: as many blocks a compute unit as fit at once. */
static void rfk_choose_decode_splits(rf_prepared *p) {
    uint32_t columns = 0;
    for (uint32_t i = 0; i < p->n_fused; i++) {
        if (p->fused[i].kind != RFK_FUSED_ATTENTION) continue;
        const rf_attention_params *a = &p->plan->ops[p->fused[i].attention].attention;
        const uint32_t n = a->n_kv_heads << rfk_decode_columns_log2(a, RFK_DECODE_GROUP);
        if (n > columns) columns = n;
    }
    p->decode_splits = columns ? rfk_ceil_div(RFK_DECODE_RESIDENT * (uint64_t)p->dev->info.compute_units, columns) : 1;
    if (p->decode_splits > RFK_DECODE_SPLITS) p->decode_splits = RFK_DECODE_SPLITS;
    if (p->decode_splits == 0) p->decode_splits = 1;
}

/* ---- launch configs of a decode step ----
 * The fastest config differs from GPU to GPU, and most GPUs were never measured. More fragments in flight hide more
 * latency, but may spill; more blocks than fit at once end closer together, but each makes its column again. All
 * configs give the same bits, so a session's first decode steps are the measurement: it adds no launch and no wait,
 * except where graphs are checked, for each config again. There is one config for the whole plan, timed over whole
 * steps: a launch timed alone differs from one in a step, where changing from one kernel to another costs microseconds.
 * */

#define RFK_TIMED_STEPS 3u     /* timed steps of a visit, after one to warm up: the fastest counts */
#define RFK_TIMED_ROUNDS 3u    /* rounds of visits, at most, until the default's two times agree */
#define RFK_TIMED_CHANGE 0.05f /* largest relative difference between the two */
#define RFK_TIMED_GAIN 0.99f   /* the default stays unless another one is faster than this times its time */

/* List the configs that differ for this plan, the default first; none if it has no fused matvec. */
static void rfk_list_configs(rf_prepared *p) {
    const rf_op *ops = p->plan->ops;
    rf_session_stats *s = &p->stats;
    uint32_t max = 0, first = p->dev->wave == 32 ? RFK_FIRST_IN_FLIGHT(32) : RFK_FIRST_IN_FLIGHT(64);
    for (uint32_t i = 0; i < p->n_fused; i++) {
        const rfk_fused *f = &p->fused[i];
        for (uint32_t k = 0; f->kind == RFK_FUSED_MATVEC && k < f->n_products; k++) {
            const uint32_t fragments = rfk_max_in_flight(p->plan->weights[ops[f->products + k].weight].type);
            max = fragments > max ? fragments : max;
        }
    }
    if (first > max) first = max;
    s->n_configs = 2 * max;
    for (uint32_t i = 0; i < s->n_configs; i++) {
        s->configs[i].in_flight = i < 2 ? first : 3 - first;
        s->configs[i].blocks_per_cu = RFK_FUSED_RESIDENT * (1 + i % 2);
    }
}

static void rfk_mix_in(uint64_t *hash, uint64_t value) { *hash = (*hash ^ value) * 0x100000001b3u; }

/* A hash of the products that decode steps launch, in order: plans with the same ones have the same shape. */
static uint64_t rfk_shape_of(const rf_prepared *p) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (uint32_t segment = 0; segment < p->n_segments; segment++) {
        rfk_mix_in(&hash, p->fused_of[segment + 1]);
        for (uint32_t i = p->fused_of[segment]; i < p->fused_of[segment + 1]; i++) {
            const rfk_fused *f = &p->fused[i];
            rfk_mix_in(&hash, f->kind);
            if (f->kind != RFK_FUSED_MATVEC) continue;
            rfk_mix_in(&hash, (uint64_t)f->n_products << 2 | (uint64_t)(f->glu != RF_NONE) << 1 | (f->norm != RF_NONE));
            for (uint32_t k = f->products; k < f->products + f->n_products; k++) {
                const rf_op *op = &p->plan->ops[k];
                rfk_mix_in(&hash, (uint64_t)p->plan->weights[op->weight].type << 32 | op->matmul.n_in);
                rfk_mix_in(&hash, op->matmul.n_out);
            }
        }
    }
    return hash;
}

/* The config known for a shape; NULL: none. Requires d->lock. */
static const rfk_known_config *rfk_find_known(const rf_dev *d, uint64_t shape) {
    for (uint32_t i = 0; i < RFK_KNOWN_CONFIGS && i < d->n_known; i++)
        if (d->known[i].shape == shape) return &d->known[i];
    return NULL;
}

/* Use the config that the device knows for this shape; 0: there is none. Requires d->lock. */
static int rfk_use_known(rf_prepared *p) {
    const rfk_known_config *c = rfk_find_known(p->dev, p->tuning.shape);
    if (!c || c->config >= p->stats.n_configs) return 0; /* the latter: another shape with this hash */
    p->stats.config = c->config;
    p->stats.config_is_timed = 1;
    for (uint32_t i = 0; i < RF_LAUNCH_CONFIGS; i++) p->stats.configs[i].us = c->us[i];
    return 1;
}

static void rfk_stop_tuning(rf_prepared *p) {
    for (int i = 0; i < 2; i++) {
        if (p->tuning.event[i]) (void)hipEventDestroy(p->tuning.event[i]);
        p->tuning.event[i] = NULL;
    }
}

/* Start timing, unless there is no choice or the device knows it. Without events, the default is used. */
static void rfk_start_tuning(rf_prepared *p) {
    rfk_tuning *t = &p->tuning;
    if (p->stats.n_configs < 2) return;
    t->shape = rfk_shape_of(p);
    pthread_mutex_lock(&p->dev->lock);
    const int known = rfk_use_known(p);
    pthread_mutex_unlock(&p->dev->lock);
    if (known) return;
    for (int i = 0; i < 2; i++)
        if (hipEventCreateWithFlags(&t->event[i], hipEventDefault) != hipSuccess) {
            (void)hipGetLastError();
            t->event[i] = NULL;
            rfk_stop_tuning(p);
            return;
        }
}

static void rfk_use_config(rf_prepared *p, uint32_t config) {
    p->stats.config = config;
    p->tuning.n_steps = 0;
}

/* All configs are timed: the fastest one is used and becomes the device's, unless another session was first. */
static void rfk_choose_config(rf_prepared *p) {
    rf_dev *d = p->dev;
    rf_session_stats *s = &p->stats;
    rfk_known_config c;
    float min = RFK_TIMED_GAIN * s->configs[0].us;
    memset(&c, 0, sizeof c);
    c.shape = p->tuning.shape;
    for (uint32_t i = 0; i < s->n_configs; i++) {
        c.us[i] = s->configs[i].us;
        if (i && c.us[i] > 0 && c.us[i] < min) min = c.us[i], c.config = i;
    }
    pthread_mutex_lock(&d->lock);
    if (!rfk_find_known(d, c.shape)) d->known[d->n_known++ % RFK_KNOWN_CONFIGS] = c;
    (void)rfk_use_known(p);
    pthread_mutex_unlock(&d->lock);
    rfk_stop_tuning(p);
}

/* End of a visit: on to the next config. If the two times of the default disagree, something else has changed and a new
 * round begins; the last round counts whatever it finds. */
static void rfk_next_config(rf_prepared *p) {
    rfk_tuning *t = &p->tuning;
    rf_session_stats *s = &p->stats;
    float *us = &s->configs[0].us;
    if (t->visit++ == 0) t->first_us = *us, *us = 0;
    if (t->visit <= s->n_configs) return rfk_use_config(p, t->visit % s->n_configs);
    if (fabsf(*us - t->first_us) <= RFK_TIMED_CHANGE * t->first_us || ++t->n_rounds == RFK_TIMED_ROUNDS) {
        *us = fminf(*us, t->first_us);
        return rfk_choose_config(p);
    }
    for (uint32_t i = 0; i < s->n_configs; i++) s->configs[i].us = 0;
    t->visit = 0;
    rfk_use_config(p, 0);
}

/* Before a decode step: read the time of the last one, and go to the next config after enough steps. The time of a step
 * that is still running is dropped, not waited for. So no graph is running when the config changes. */
static void rfk_tune(rf_prepared *p) {
    rfk_tuning *t = &p->tuning;
    float *us = &p->stats.configs[p->stats.config].us, ms = 0;
    if (!t->is_timed) return;
    t->is_timed = 0;
    if (hipEventElapsedTime(&ms, t->event[0], t->event[1]) != hipSuccess) { /* the step will say so itself */
        (void)hipGetLastError();
        return;
    }
    if (*us == 0 || ms * 1e3f < *us) *us = ms * 1e3f;
    if (++t->n_steps > RFK_TIMED_STEPS) rfk_next_config(p);
}

/* Called before and after the launches of a decode step, or its graphs. */
static void rfk_before_timed(rf_prepared *p, rf_queue *q, int replayed) {
    rfk_tuning *t = &p->tuning;
    if (t->replayed != replayed) { /* graphs and launches are timed separately */
        t->replayed = replayed;
        t->visit = 0;
        rfk_use_config(p, 0);
        for (uint32_t i = 0; i < p->stats.n_configs; i++) p->stats.configs[i].us = 0;
    }
    t->is_timed = t->n_steps > 0 && hipEventRecord(t->event[0], q->stream) == hipSuccess;
    if (!t->is_timed) (void)hipGetLastError();
    if (t->n_steps == 0) t->n_steps = 1;
}
static void rfk_after_timed(rf_prepared *p, rf_queue *q, rf_result r) {
    rfk_tuning *t = &p->tuning;
    if (!t->is_timed) return;
    t->is_timed = r == RF_OK && hipEventRecord(t->event[1], q->stream) == hipSuccess;
    if (!t->is_timed) (void)hipGetLastError();
}

static void rfk_drop_graphs(rf_prepared *p) {
    for (uint32_t i = 0; i < p->n_graphs; i++) (void)hipGraphExecDestroy(p->graph[i]);
    p->n_graphs = 0;
}

static void rfk_drop_few_graphs(rf_prepared *p) {
    for (uint32_t apart = 0; apart < 2; apart++)
        for (uint32_t i = 0; i <= RFK_FEW_STEP; i++) {
            rfk_few_graph *graph = &p->few_graph[apart][i];
            if (graph->exec) (void)hipGraphExecDestroy(graph->exec);
            graph->exec = NULL;
        }
}

static void rfk_stop_timing(rf_prepared *p) {
    for (uint32_t i = 0; p->events && i < 2 * p->plan->n_ops; i++)
        if (p->events[i]) (void)hipEventDestroy(p->events[i]);
    rfk_free(&p->dev->allocator, p->events);
    rfk_free(&p->dev->allocator, p->timed);
    p->events = NULL;
    p->timed = NULL;
}

static void rfk_plan_release(rf_prepared *p) {
    rf_dev *d = p->dev;
    rfk_scope scope(d->index);
    rfk_stop_timing(p);
    rfk_stop_tuning(p);
    rfk_drop_graphs(p);
    rfk_drop_few_graphs(p);
    if (p->memory) (void)hipFree(p->memory);
    rfk_free(&d->allocator, p->fused);
    rfk_free(&d->allocator, p->fused_of);
    rfk_free(&d->allocator, p->ops);
    rfk_free(&d->allocator, p->segments);
    rfk_free(&d->allocator, p->host_rows);
    rfk_free(&d->allocator, p->host_ranges);
    rfk_free(&d->allocator, p->range_of);
    rfk_free(&d->allocator, p->host_logit_rows);
    rfk_free(&d->allocator, p);
}

/* Create a plan that knows its launches, without memory. Of `bind`, only sizes are used. */
static rf_result rfk_plan_create(rf_dev *d, const rf_plan_bind *bind, rf_prepared **out, rf_error *err) {
    const rf_plan *plan = bind->plan;
    rf_result r = RF_OK;
    *out = NULL;
    if (bind->n_ctx == 0 || bind->n_seq == 0 || bind->n_batch == 0 || bind->n_batch > 65535 || bind->n_logits > 65535)
        return rfk_fail(
            err, RF_ERR_ARGUMENT, 0, 0,
            "hip: %u sequences of %u cells, %u rows, %u logits: at most 65535 rows of a step, at least 1 of each",
            bind->n_seq, bind->n_ctx, bind->n_batch, bind->n_logits);
    for (uint32_t i = 0; r == RF_OK && i < plan->n_ops; i++) r = rfk_op_supported(d, plan, &plan->ops[i], err);
    if (r != RF_OK) return r;
    rf_prepared *p = (rf_prepared *)rfk_alloc(&d->allocator, 1, sizeof *p, "a prepared plan", err);
    if (!p) return RF_ERR_MEMORY;
    p->dev = d;
    p->table = bind->table;
    p->plan = plan;
    p->n_ctx = bind->n_ctx;
    p->scratch = (const int32_t *)bind->scratch.base;
    p->scratch_bytes = bind->scratch.size_bytes;
    p->n_seq = bind->n_seq;
    p->n_batch = bind->n_batch;
    p->n_logits = bind->n_logits;
    p->cache_type = bind->cache_type;
    p->n_slots = bind->n_slots;
    p->members = bind->members;
    const int has_few = !(d->wrong_units & RFK_WRONG_BYTES) && (d->has_units || d->wave == 32);
    const uint32_t most_few = rfk_most_few(d, plan);
    p->n_few = !has_few ? 1 : p->n_batch < most_few ? p->n_batch : most_few;
    p->n_attend = p->n_batch < RFK_DECODE_ROWS ? p->n_batch : RFK_DECODE_ROWS;
    p->ops = (rfk_bound *)rfk_alloc(&d->allocator, plan->n_ops, sizeof *p->ops, "a prepared plan", err);
    p->segments =
        (uint32_t *)rfk_alloc(&d->allocator, (uint64_t)plan->n_ops + 1, sizeof *p->segments, "segments", err);
    p->host_rows = (rf_step_row *)rfk_alloc(&d->allocator, p->n_batch, sizeof *p->host_rows, "a step's rows", err);
    p->host_ranges =
        (rfk_row_range *)rfk_alloc(&d->allocator, p->n_batch, sizeof *p->host_ranges, "a step's sequences", err);
    p->range_of = (uint32_t *)rfk_alloc(&d->allocator, p->n_seq, sizeof *p->range_of, "a step's sequences", err);
    p->host_logit_rows =
        (uint32_t *)rfk_alloc(&d->allocator, p->n_logits, sizeof *p->host_logit_rows, "a step's logits", err);
    p->fused = (rfk_fused *)rfk_alloc(&d->allocator, plan->n_ops, sizeof *p->fused, "decode launches", err);
    p->fused_of =
        (uint32_t *)rfk_alloc(&d->allocator, (uint64_t)plan->n_ops + 1, sizeof *p->fused_of, "decode launches", err);
    if (!p->ops || !p->segments || !p->host_rows || !p->host_ranges || !p->range_of || !p->host_logit_rows ||
        !p->fused || !p->fused_of) {
        rfk_plan_release(p);
        return RF_ERR_MEMORY;
    }
    rfk_make_segments(p);
    rfk_make_fused(p);
    rfk_defer_norms(p);
    rfk_take_post_norms(p);
    rfk_choose_decode_splits(p);
    rfk_find_plan_way(p);
    rfk_list_configs(p);
    bool tiles = d->wgmma;
    for (uint32_t i = 0; i < plan->n_weights; i++) tiles = tiles && plan->weights[i].n_experts == 0; /* other tiles */
    if (tiles) p->stats.tile_rows[0] = most_few == RFK_FEW_MAX ? RFK_NARROW_COLS : 0;
    if (tiles) p->stats.tile_rows[1] = RFK_WIDE_COLS;
    *out = p;
    return RF_OK;
}

static rf_result rfk_plan_bytes(rf_dev *d, const rf_plan_bind *bind, uint64_t *bytes, rf_error *err) {
    rf_prepared *p;
    rf_result r = rfk_plan_create(d, bind, &p, err);
    if (r != RF_OK) return r;
    *bytes = rfk_divide_memory(p, NULL);
    rfk_plan_release(p);
    return RF_OK;
}

static rf_result rfk_plan_prepare(rf_dev *d, const rf_plan_bind *bind, uint32_t *segment_ops, uint32_t *n_segments,
                                  rf_prepared **out, rf_error *err) {
    rf_prepared *p;
    *out = NULL;
    rfk_scope scope(d->index);
    if (scope.error != hipSuccess) return rfk_check_scope(d, scope, err);
    rf_result r = rfk_plan_create(d, bind, &p, err);
    if (r != RF_OK) return r;
    for (uint32_t i = 0; r == RF_OK && i < p->plan->n_ops; i++) r = rfk_bind_op(p, bind, i, err);
    if (r == RF_OK) r = rfk_prepare_memory(p, err);
    if (r != RF_OK) {
        rfk_plan_release(p);
        return r;
    }
    rfk_start_tuning(p);
    memcpy(segment_ops, p->segments, p->n_segments * sizeof *segment_ops);
    *n_segments = p->n_segments;
    *out = p;
    return RF_OK;
}

static rf_session_stats rfk_plan_stats(const rf_prepared *p) { return p->stats; }

/* ---- launches ---- */

/* The launch of an op. */
struct rfk_launching {
    rf_prepared *p;
    rf_queue *q;
    const rf_step *step;
    rf_error *err;
    const rf_op *op;
    uint32_t index, n_rows;
    uint32_t first_row; /* of the step's, in the buffers */
    uint32_t together; /* ops of this launch: op, op + 1, ... */
    uint32_t end;      /* the first op after this call's */
    uint32_t done;     /* ops that are done: `together` or more */
    rfk_bound b;       /* logits buffers point to the step's first row */
};

#define RFK_BY_WAVE(l, k32, k64) RFK_WITH_WAVE((l)->p->dev, k32, k64)

/* Count kernels that were submitted at once. */
static void rfk_count(rf_prepared *p, uint32_t n_kernels) {
    p->stats.launches += n_kernels;
    p->stats.submissions++;
}

template <class K, class A>
static rf_result rfk_enqueue_config(const rfk_launching *l, K kernel, const rfk_config &config, const A &args) {
    hipError_t e = rfk_launch_config(kernel, config, args);
    l->p->n_launched++;
    if (!l->p->capturing) rfk_count(l->p, 1);
    if (e == hipSuccess) return RF_OK;
    char what[128];
    rfk_describe_op(l->p->plan, l->op, what, sizeof what);
    return rfk_check(l->p->dev, l->err, e, "hipLaunchKernel", what, l->index);
}

template <class K, class A>
static rf_result rfk_enqueue(const rfk_launching *l, K kernel, dim3 grid, uint32_t block, const A &args) {
    rfk_config c = {grid, dim3(block), 0, 0, l->q->stream, 0};
    return rfk_enqueue_config(l, kernel, c, args);
}

/* Whether a step runs by the fused launches of a decode step. */
static bool rfk_is_fused_step(const rf_prepared *p, const rf_step *step) {
    return step->n_rows <= p->n_few && step->n_logits <= step->n_rows && !p->events;
}

/* Whether a step's rows are so few, but too many for a decode step, that rfk_matmul_narrow multiplies them and launches
 * begin early. */
static bool rfk_is_narrow_step(const rf_prepared *p, const rf_step *step) {
    return p->dev->early && p->n_few == RFK_FEW_MAX && step->n_rows > RFK_FEW_MAX && step->n_rows <= RFK_NARROW_COLS;
}

/* rfk_config's early_carveout of kernels that call rfk_wait_previous: not 0 in a graph, and in launches of a whole step
 * of several rows. Nothing but kernels comes between these. */
static uint32_t rfk_early_carveout(const rfk_launching *l) {
    const rf_prepared *p = l->p;
    const uint32_t n = l->step->n_rows;
    const bool narrow = rfk_is_narrow_step(p, l->step) && !p->events,
               whole = p->n_fused > 0 && p->fused_begin == 0 && p->fused_end == p->n_fused;
    if (!p->dev->early || !(p->capturing || (n > 1 && (narrow || rfk_is_fused_step(p, l->step)) && whole))) return 0;
    const uint32_t by_rows = p->few_way.kernel == RFK_FEW_DIRECT ? 1 : RFK_ROWS_MAX; /* up to so many rows: rfk_rows */
    return narrow || (n > by_rows && n <= p->few_way.max_rows && p->few_way.kernel != RFK_FEW_ANY) ? 100 : 50;
}

/* The same for a kernel that calls rfk_wait_previous. */
template <class K, class A>
static rf_result rfk_enqueue_early(const rfk_launching *l, K kernel, dim3 grid, uint32_t block, const A &args) {
    rfk_config c = {grid, dim3(block), 0, rfk_early_carveout(l), l->q->stream, 0};
    return rfk_enqueue_config(l, kernel, c, args);
}

static const rfk_slot *rfk_slot_of(const rf_prepared *p, uint32_t weight) {
    return &p->table->slots[p->plan->weights[weight].slot];
}

/* Address of element `at` of a vector; NULL for none. */
static const uint8_t *rfk_vector(const rf_prepared *p, uint32_t weight, uint64_t at, uint32_t *type) {
    *type = RF_TYPE_F32;
    if (weight == RF_NONE) return NULL;
    *type = p->plan->weights[weight].type;
    return rfk_slot_of(p, weight)->w.plane[0] + at * (*type == RF_TYPE_F32 ? 4 : 2);
}

static rf_result rfk_run_embed(const rfk_launching *l) {
    const uint32_t type = l->p->plan->weights[l->op->weight].type;
    rfk_embed_args a;
    a.w = rfk_slot_of(l->p, l->op->weight)->w;
    a.rows = l->p->rows;
    a.out = l->b.out;
    a.out_stride = l->b.out_stride;
    a.n_out = l->op->embed.n;
    a.by_position = l->op->flags & RF_OP_FIRST ? 2 : (l->op->flags & RF_OP_POSITIONS) != 0;
    a.accumulate = (l->op->flags & RF_OP_ACCUMULATE) != 0;
    a.scale = l->op->embed.scale != 0 ? l->op->embed.scale : 1.0f;
    a.kernel_type = rfk_kernel_type(type);
    const bool floats = rfk_is_float_type(type);
    rf_result r = rfk_enqueue(l, floats ? rfk_embed_float : rfk_embed,
                         dim3(rfk_ceil_div(floats ? a.n_out : a.n_out / 32, RFK_BLOCK), l->n_rows), RFK_BLOCK, a);
    for (uint32_t t = 0; r == RF_OK && !a.by_position && t < l->n_rows; t++) /* rows of embeddings */
        if (l->step->rows[t].token < 0)
            r = rfk_copy_in(l->q, (char *)(l->b.out + (size_t)t * l->b.out_stride),
                            l->step->embeddings + (size_t)t * a.n_out, (uint64_t)a.n_out * sizeof(float),
                            "embeddings", l->err);
    return r;
}

/* Whether the floats of the output are not needed: only fused launches read them. */
static bool rfk_skips_floats(const rfk_launching *l) { return l->b.only_int8 && !rfk_is_fused_step(l->p, l->step); }

/* The rows that an op reads, if it reads bf16. */
static void rfk_as_bf16(const rf_prepared *p, const rf_op *op, uint32_t n_rows, rfk_int8_rows *x) {
    if (rfk_takes_wgmma(p->dev, p->plan, op, n_rows)) x->bf16 = n_rows;
    if (rfk_takes_narrow(p->dev, p->plan, op, n_rows)) x->n_in = rfk_n_in(op);
}

/* Where a norm or GLU leaves its results for the next op. */
static rfk_int8_rows rfk_rows_for_next(const rfk_launching *l) {
    rfk_int8_rows to = l->p->x8;
    if (!l->b.quantize) to.q = NULL;
    else rfk_as_bf16(l->p, l->op + 1, l->n_rows, &to);
    return to;
}

static rfk_norm_args rfk_make_norm(const rfk_launching *l) {
    rfk_norm_args a;
    a.w = rfk_vector(l->p, l->op->weight, 0, &a.w_type);
    a.b = rfk_vector(l->p, l->op->bias, 0, &a.b_type);
    a.center = (l->op->flags & RF_OP_CENTER) != 0;
    a.before = !(l->op->flags & RF_OP_ACCUMULATE) ? NULL : l->p->moved == l->op->out ? l->p->residual : l->b.out;
    a.in = l->b.in;
    a.out = rfk_skips_floats(l) ? NULL : l->b.out;
    a.in_stride = l->b.in_stride;
    a.out_stride = l->b.out_stride;
    a.n = l->op->norm.n;
    a.n_heads = l->op->norm.n_groups;
    a.w_head = l->op->flags & RF_OP_EACH_HEAD ? a.n : 0;
    a.eps = l->op->norm.eps;
    a.to = rfk_rows_for_next(l);
    return a;
}

static bool rfk_is_aligned(const void *p, uint32_t stride) { return ((size_t)p | 4 * (size_t)stride) % 16 == 0; }

/* Whether rfk_rms_norm_wide can do it: only an F32 weight, all aligned for loads of four values. */
static bool rfk_is_simple_norm(const rfk_norm_args *a) {
    return a->w && a->w_type == RF_TYPE_F32 && !a->b && !a->center && a->n % 4 == 0 &&
           rfk_is_aligned(a->w, 0) && rfk_is_aligned(a->in, a->in_stride) && rfk_is_aligned(a->out, a->out_stride);
}

static rf_result rfk_run_rms_norm(const rfk_launching *l) {
    const rfk_norm_args a = rfk_make_norm(l);
    const dim3 grid(l->n_rows, a.n_heads);
    const uint32_t wave = l->p->dev->info.wave_size;
    const bool simple = rfk_is_simple_norm(&a);
    if (l->p->moved == l->op->out) l->p->moved = RF_NONE; /* it is back in its buffer */
    if (simple && l->n_rows > RFK_FEW_STEP && a.n_heads > 1 && a.n <= 16 * wave && !a.to.q)
        return rfk_enqueue(l, RFK_BY_WAVE(l, (rfk_rms_norm_heads<32>), (rfk_rms_norm_heads<64>)),
                           dim3(l->n_rows, rfk_ceil_div(a.n_heads, RFK_BLOCK / wave)), RFK_BLOCK, a);
    if (simple && (a.n >= 4 * RFK_BLOCK || a.before)) /* four values a thread; or the bits of fused post-norms */
        return rfk_enqueue_early(l, RFK_BY_WAVE(l, (rfk_rms_norm_wide<32>), (rfk_rms_norm_wide<64>)), grid, RFK_BLOCK,
                                 a);
    return rfk_enqueue_early(l, RFK_BY_WAVE(l, (rfk_rms_norm<32>), (rfk_rms_norm<64>)), grid, RFK_BLOCK, a);
}

/* Quantize n_rows rows of n floats of the op's input. */
static rf_result rfk_run_quantize(const rfk_launching *l, rfk_int8_rows to, uint32_t n_rows, uint32_t n,
                                  uint32_t n_heads = 1, uint32_t head = 0) {
    const rfk_quantize_args a = {l->b.in, to, l->b.in_stride, n, head};
    const dim3 grid(n_rows, rfk_ceil_div(n, 4 * RFK_BLOCK), n_heads);
    return rfk_enqueue_early(l, RFK_BY_WAVE(l, (rfk_quantize<32>), (rfk_quantize<64>)), grid, RFK_BLOCK, a);
}

typedef void (*rfk_matmul_kernel)(rfk_matmul_args);

template <int WAVE, int COLS> static rfk_matmul_kernel rfk_find_matvec(uint32_t type) {
#define RFK_FLOAT_CASE(TYPE) case TYPE: return rfk_matvec_float<RFK_BUILT_FLOAT(TYPE), WAVE, COLS>;
#define RFK_QUANTIZED_CASE(TYPE) case TYPE: return rfk_matvec<RFK_BUILT(TYPE), WAVE, COLS>;
    switch (rfk_kernel_type(type)) {
        RFK_FLOAT_TYPES(RFK_FLOAT_CASE)
        RFK_QUANTIZED_TYPES(RFK_QUANTIZED_CASE)
    default: return NULL; /* op_supported lets none through */
    }
#undef RFK_FLOAT_CASE
#undef RFK_QUANTIZED_CASE
}

static void (*rfk_find_matmul_float(uint32_t type))(rfk_tiles_args) {
    switch (type) {
    case RF_TYPE_F32: return rfk_matmul_float<RF_TYPE_F32>;
    case RF_TYPE_F16: return rfk_matmul_float<RFK_BUILT_FLOAT(RF_TYPE_F16)>;
    default: return rfk_matmul_float<RFK_BUILT_FLOAT(RF_TYPE_BF16)>;
    }
}

template <class ARGS, int WAVE, int COLS> static void (*rfk_find_matmul(uint32_t type))(ARGS) {
#define RFK_QUANTIZED_CASE(TYPE) \
    case TYPE: return rfk_matmul<RFK_BUILT(TYPE), WAVE, RFK_TILE_COLS_OF(RFK_BUILT(TYPE), COLS), ARGS>;
    switch (rfk_kernel_type(type)) {
        RFK_QUANTIZED_TYPES(RFK_QUANTIZED_CASE)
    default: return NULL; /* op_supported lets none through */
    }
#undef RFK_QUANTIZED_CASE
}

/* The address of a buffer at the step's first row. */
static float *rfk_at_step(const rfk_launching *l, float *base, uint32_t id) {
    const rf_plan_buffer *b = &l->p->plan->buffers[id];
    return base + (size_t)(b->rows == RF_ROWS_LOGITS ? l->step->first_logits_row : l->first_row) * b->width;
}

/* Make `to` a launch of op i in l's step; false: it has no rows. */
static bool rfk_find_op(const rfk_launching *l, uint32_t i, rfk_launching *to) {
    const rf_plan *plan = l->p->plan;
    *to = *l;
    to->op = &plan->ops[i];
    to->index = i;
    to->b = l->p->ops[i];
    to->n_rows = to->op->rows == RF_ROWS_LOGITS ? l->step->n_logits : l->step->n_rows;
    if (to->op->in < plan->n_buffers) to->b.in = rfk_at_step(l, to->b.in, to->op->in);
    if (to->op->in2 < plan->n_buffers) to->b.in2 = rfk_at_step(l, to->b.in2, to->op->in2);
    if (to->op->out < plan->n_buffers) to->b.out = rfk_at_step(l, to->b.out, to->op->out);
    return to->n_rows > 0;
}

/* Whether the fused launches have the product of op i as the only one of a launch. */
static bool rfk_is_fused_alone(const rf_prepared *p, uint32_t i) {
    bool is = false;
    for (const rfk_fused *f = p->fused; f < p->fused + p->n_fused && !is; f++)
        is = f->kind == RFK_FUSED_MATVEC && f->products == i && f->n_products == 1 && f->glu == RF_NONE;
    return is;
}
/* Whether the product of op i writes its part of the sum that follows where the members want it. In a decode step with
 * turns: its blocks add up their rows, too, and it is launched when the sum is run. In larger steps without turns,
 * which the host knows. Both ops ask. */
enum { RFK_PUSHES_NOT, RFK_PUSHES_FLAGGED, RFK_PUSHES_PARTS };
static int rfk_pushes(const rf_prepared *p, const rf_step *step, uint32_t i) {
    const rf_op *op = &p->plan->ops[i];
    if (!p->members || p->events || i + 1 >= p->plan->n_ops || op[1].kind != RF_OP_SUM || op->kind != RF_OP_MATMUL ||
        op->out != op[1].in || rf_sum_arrives(p->members, &op[1], step->n_rows))
        return RFK_PUSHES_NOT;
    if ((uint64_t)op->matmul.n_out * step->n_rows > RFK_MEMBER_FLAGGED)
        return p->capturing ? RFK_PUSHES_NOT : RFK_PUSHES_PARTS;
    const uint32_t kept = RFK_FUSED_PASSES * (RFK_FUSED_BLOCK_OF(p->dev) / p->dev->wave) * p->dev->info.compute_units;
    const bool flagged = step->n_rows == 1 && rfk_is_fused_step(p, step) && rfk_is_fused_alone(p, i) &&
                         op->matmul.n_out <= kept;
    return flagged ? RFK_PUSHES_FLAGGED : RFK_PUSHES_NOT;
}

/* Fill in the products of a launch, blocks of `rows` rows.   Returns the number of blocks. */
static uint32_t rfk_make_products(const rfk_launching *l, rfk_matmul_args *a, uint32_t rows) {
    uint32_t end = 0;
    memset(a->part, 0, sizeof a->part);
    for (uint32_t i = 0; i < RFK_PRODUCTS; i++) {
        rfk_product *p = &a->part[i];
        if (i < l->together) {
            const rf_op *op = l->op + i;
            const rfk_bound *b = &l->p->ops[l->index + i];
            p->w = rfk_slot_of(l->p, op->weight)->w;
            p->type = l->p->plan->weights[op->weight].type;
            p->bias = rfk_vector(l->p, op->bias, op->matmul.first_row, &p->bias_type);
            p->factor = rfk_vector(l->p, op->factor, 0, &p->factor_type);
            p->scale = op->matmul.scale != 0 ? op->matmul.scale : 1.0f;
            p->softcap = op->matmul.softcap;
            p->out = rfk_at_step(l, b->out, op->out);
            p->out_stride = b->out_stride;
            p->row0 = op->matmul.first_row;
            p->n_out = op->matmul.n_out;
            p->accumulate = (op->flags & RF_OP_ACCUMULATE) != 0;
            if (rfk_pushes(l->p, l->step, l->index + i) == RFK_PUSHES_PARTS) {
                const uint32_t turn = l->p->members->turn + op[1].sum.index;
                p->n_far = l->p->members->n - 1;
                p->far = l->p->parts + (turn & 1) * p->n_far;
            }
            end += rfk_ceil_div(op->matmul.n_out, rows);
        }
        p->end_block = end;
    }
    return end;
}

/* Split-K: blocks that share the depth of a tile, of `steps` steps. Two tiles keep a compute unit busy, of two blocks
 * or `together` in one; one alone is slower. A block's start and end cost about two steps, the reduction one or two.
 * Measured on an H200. */
static uint32_t rfk_choose_tile_splits(uint32_t tiles, uint32_t together, uint32_t steps, uint32_t compute_units,
                                       uint32_t max_tiles) {
    uint32_t best = 1;
    float min = 0;
    for (uint32_t n = 1; n <= RFK_MAX_TILE_SPLITS && (n == 1 || (n <= steps / 4 && tiles * n <= max_tiles)); n++) {
        uint32_t waves = together * rfk_ceil_div((uint64_t)(tiles / together) * n, compute_units);
        float time = ((float)waves + 0.4f * (float)(waves % 2)) * ((float)rfk_ceil_div(steps, n) + 2);
        if (n > 1) time += 2 + 1.5f * (float)(tiles * n) / (float)compute_units;
        if (n == 1 || time < min) min = time, best = n;
    }
    return best;
}

/* Split-K: n_splits blocks of split_units groups of 32 values, multiples of `step`. */
static void rfk_cut_depth(const rf_prepared *p, rfk_tiles_args *t, uint32_t tiles, uint32_t step = RFK_DEPTH / 32,
                          uint32_t together = 1) {
    const uint32_t units = rfk_ceil_div(t->m.n_in, 32), steps = rfk_ceil_div(units, step),
                   splits = rfk_choose_tile_splits(tiles, together, steps, p->dev->info.compute_units, p->tile_blocks);
    t->split_units = rfk_ceil_div(steps, splits) * step;
    t->n_splits = rfk_ceil_div(units, t->split_units);
    t->part = t->n_splits > 1 ? p->tile_part : NULL;
}

/* Split-K reduction, together with the norm after the product if it is a simple one of all its results. That has a
 * block a column: in steps of few, two launches that begin early are faster, and a step run by segments, whose launches
 * do not, has the same bits. */
static rf_result rfk_run_join(rfk_launching *l, const rfk_tiles_args *t, uint32_t row_tiles, uint32_t col_tiles) {
    const rfk_product *p = &t->m.part[0];
    rfk_launching next;
    if (l->together == 1 && l->index + 1 < l->end && !rfk_is_narrow_step(l->p, l->step) &&
        !rf_op_begins_segment(l->p->plan, l->index + 1) && /* a call may end there: bits must not depend on that */
        !p->bias && !p->factor && p->softcap == 0 &&
        rfk_find_op(l, l->index + 1, &next) && next.op->kind == RF_OP_RMS_NORM && next.op->norm.n_groups == 1 &&
        next.b.in == p->out && next.op->norm.n == p->n_out && next.n_rows == t->m.n_cols) {
        rfk_join_norm_args a;
        a.t = *t;
        a.norm = rfk_make_norm(&next);
        if (rfk_is_simple_norm(&a.norm)) {
            l->done = 2;
            return rfk_enqueue(l, RFK_BY_WAVE(l, rfk_join_norm<32>, rfk_join_norm<64>), dim3(t->m.n_cols), RFK_BLOCK,
                               a);
        }
    }
    const uint32_t n_cols = t->m.n_cols < t->cols ? t->m.n_cols : t->cols;
    return rfk_enqueue_early(l, rfk_join_tiles,
                             dim3(col_tiles, row_tiles, rfk_ceil_div((uint64_t)t->rows * n_cols, 4 * RFK_BLOCK)),
                             RFK_BLOCK, *t);
}

/* Tiles of int8, on matrix units or by dot products. */
static rf_result rfk_run_tiles(rfk_launching *l, const rfk_matmul_args *products) {
    rf_prepared *p = l->p;
    rfk_tiles_args t;
    uint32_t type = p->plan->weights[l->op->weight].type;
    t.m = *products;
    bool many = t.m.n_cols > RFK_SMALL_TILE_COLS && p->dev->large_tiles;
    t.cols = many ? RFK_TILE_COLS_OF(type, RFK_LARGE_TILE_COLS) : RFK_SMALL_TILE_COLS;
    t.rows = RFK_TILE_ROWS_OF(rfk_kernel_type(type), t.cols);
    uint32_t row_tiles = rfk_make_products(l, &t.m, t.rows), col_tiles = rfk_ceil_div(t.m.n_cols, t.cols);
    rfk_cut_depth(p, &t, row_tiles * col_tiles);
    void (*big)(rfk_tiles_args) = RFK_BY_WAVE(l, (rfk_find_matmul<rfk_tiles_args, 32, RFK_LARGE_TILE_COLS>(type)),
                                              (rfk_find_matmul<rfk_tiles_args, 64, RFK_LARGE_TILE_COLS>(type)));
    void (*small)(rfk_tiles_args) = RFK_BY_WAVE(l, (rfk_find_matmul<rfk_tiles_args, 32, RFK_SMALL_TILE_COLS>(type)),
                                                (rfk_find_matmul<rfk_tiles_args, 64, RFK_SMALL_TILE_COLS>(type)));
    rf_result r = rfk_enqueue(l, many ? big : small, dim3(col_tiles, row_tiles, t.n_splits), RFK_BLOCK, t);
    if (r != RF_OK || t.n_splits == 1) return r;
    return rfk_run_join(l, &t, row_tiles, col_tiles);
}

/* Split the input of a launch into terms: n_cols rows of n values, per_row of them `apart` values apart. wide: as
 * rfk_split_args. */
template <bool BF16>
static rf_result rfk_run_split_rows(const rfk_launching *l, uint32_t n_cols, uint32_t n, uint32_t per_row = 1,
                                    uint32_t apart = 0, uint32_t wide = 0) {
    rfk_split_args z = {l->b.in, l->p->terms, l->b.in_stride, per_row, n, apart, wide};
    void (*cut)(rfk_split_args) = RFK_BY_WAVE(l, (rfk_split_rows<32, BF16>), (rfk_split_rows<64, BF16>));
    return rfk_enqueue(l, cut, dim3(n_cols), RFK_BLOCK, z);
}

template <bool BF16> static rf_result rfk_run_16bit(rfk_launching *l, const rfk_matmul_args *products) {
    rf_prepared *p = l->p;
    rfk_16bit_args<rfk_tiles_args> a;
    rfk_tiles_args *t = &a.tiles;
    t->m = *products;
    a.x = p->terms;
    const uint32_t n_cols = products->n_cols, row_tiles = rfk_make_products(l, &t->m, RFK_SMALL_TILE_ROWS);
    const bool many = n_cols > RFK_SMALL_TILE_COLS && p->dev->large_tiles;
    const uint32_t cols = many ? RFK_LARGE_TILE_COLS : RFK_SMALL_TILE_COLS, col_tiles = rfk_ceil_div(n_cols, cols);
    t->rows = RFK_SMALL_TILE_ROWS, t->cols = cols;
    rfk_cut_depth(p, t, row_tiles * col_tiles);
    rf_result r = rfk_run_split_rows<BF16>(l, n_cols, products->n_in);
    typedef void (*rfk_16bit_kernel)(rfk_16bit_args<rfk_tiles_args>);
    rfk_16bit_kernel big = RFK_BY_WAVE(l, (rfk_matmul_16bit<BF16, 32, RFK_LARGE_TILE_COLS, rfk_tiles_args>),
                                        (rfk_matmul_16bit<BF16, 64, RFK_LARGE_TILE_COLS, rfk_tiles_args>));
    rfk_16bit_kernel small = RFK_BY_WAVE(l, (rfk_matmul_16bit<BF16, 32, RFK_SMALL_TILE_COLS, rfk_tiles_args>),
                                          (rfk_matmul_16bit<BF16, 64, RFK_SMALL_TILE_COLS, rfk_tiles_args>));
    if (r == RF_OK) r = rfk_enqueue(l, many ? big : small, dim3(col_tiles, row_tiles, t->n_splits), RFK_BLOCK, a);
    if (r != RF_OK || t->n_splits == 1) return r;
    return rfk_run_join(l, t, row_tiles, col_tiles);
}

/* Tiles of float32 on matrix units. */
static rf_result rfk_run_matmul_split(rfk_launching *l, const rfk_matmul_args *products) {
    rfk_tiles_args t;
    t.m = *products;
    t.rows = RFK_SMALL_TILE_ROWS, t.cols = RFK_SMALL_TILE_COLS;
    const uint32_t row_tiles = rfk_make_products(l, &t.m, t.rows), col_tiles = rfk_ceil_div(t.m.n_cols, t.cols);
    rfk_cut_depth(l->p, &t, row_tiles * col_tiles, 2);
    rf_result r = rfk_enqueue(l, RFK_BY_WAVE(l, rfk_matmul_split<32>, rfk_matmul_split<64>),
                              dim3(col_tiles, row_tiles, t.n_splits), RFK_BLOCK, t);
    if (r != RF_OK || t.n_splits == 1) return r;
    return rfk_run_join(l, &t, row_tiles, col_tiles);
}

/* Tiles of floats without matrix units. */
static rf_result rfk_run_matmul_float(rfk_launching *l, const rfk_matmul_args *products) {
    rfk_tiles_args t;
    t.m = *products;
    t.rows = t.cols = RFK_TILE;
    const uint32_t row_tiles = rfk_make_products(l, &t.m, t.rows), col_tiles = rfk_ceil_div(t.m.n_cols, t.cols);
    rfk_cut_depth(l->p, &t, row_tiles * col_tiles, 2); /* so that a block has a depth of 256 at least */
    rf_result r = rfk_enqueue(l, rfk_find_matmul_float(l->p->plan->weights[l->op->weight].type),
                              dim3(col_tiles, row_tiles, t.n_splits), RFK_BLOCK, t);
    if (r != RF_OK || t.n_splits == 1) return r;
    return rfk_run_join(l, &t, row_tiles, col_tiles);
}

static rf_result rfk_launch_wgmma(const rfk_launching *l, const rfk_wgmma_args *a, dim3 grid) {
    const rfk_config c = {grid, dim3(RFK_WGMMA_BLOCK), RFK_WGMMA_BYTES, 0, l->q->stream, 0};
    return rfk_enqueue_config(l, rfk_find_wgmma(l->p->plan->weights[l->op->weight].type), c, *a);
}
/* Tiles of 256 columns. */
static rf_result rfk_launch_wide(const rfk_launching *l, const rfk_wgmma_args *narrow, uint32_t row_tiles) {
    const uint32_t n_units = l->p->dev->info.compute_units, type = l->p->plan->weights[l->op->weight].type;
    rfk_wide_args a = {narrow->t, narrow->unit, rfk_ceil_div(narrow->t.m.n_cols, RFK_WIDE_COLS), row_tiles, 0};
    a.n_tiles = a.col_tiles * row_tiles * a.t.n_splits;
    const bool persistent = RFK_WIDE_PRODUCERS(rfk_kernel_type(type)) == 1;
    const rfk_config c = {dim3(persistent && a.n_tiles > n_units ? n_units : a.n_tiles),
                          dim3(RFK_WIDE_BLOCK(rfk_kernel_type(type))), RFK_WIDE_BYTES, 0, l->q->stream, 0};
    return rfk_enqueue_config(l, rfk_find_wide(type), c, a);
}

static rf_result rfk_launch_narrow(const rfk_launching *l, const rfk_narrow_args *a, dim3 grid) {
    const uint32_t early = a->lists.tile ? 0 : rfk_early_carveout(l);
    const rfk_config c = {grid, dim3(RFK_NARROW_BLOCK), RFK_NARROW_BYTES, early, l->q->stream, 0};
    const uint32_t n_cols = a->lists.tile ? RFK_NARROW_COLS : a->t.m.n_cols;
    return rfk_enqueue_config(l, rfk_find_narrow(l->p->plan->weights[l->op->weight].type, n_cols), c, *a);
}
/* Tiles of 256 rows, of up to 64 columns. */
static rf_result rfk_run_narrow(rfk_launching *l, const rfk_matmul_args *products) {
    const uint32_t n_units = l->p->dev->info.compute_units;
    rfk_narrow_args a;
    rfk_tiles_args *t = &a.t;
    rf_result r = RF_OK;
    memset(&a, 0, sizeof a);
    t->m = *products;
    t->rows = RFK_NARROW_ROWS, t->cols = RFK_NARROW_COLS;
    rfk_as_bf16(l->p, l->op, l->n_rows, &t->m.x8);
    if (l->b.quantize) r = rfk_run_quantize(l, t->m.x8, t->m.n_cols, t->m.n_in);
    a.row_tiles = rfk_make_products(l, &t->m, t->rows);
    rfk_cut_depth(l->p, t, 2 * a.row_tiles, 128 / 32, 2); /* a block is alone on its multiprocessor, as two would be */
    a.n_tiles = a.row_tiles * t->n_splits;
    if (r == RF_OK) r = rfk_launch_narrow(l, &a, dim3(a.n_tiles < n_units ? a.n_tiles : n_units));
    if (r != RF_OK || t->n_splits == 1) return r;
    return rfk_run_join(l, t, a.row_tiles, 1);
}

/* Tiles of 16-bit floats, on wgmma. */
static rf_result rfk_run_wgmma(rfk_launching *l, const rfk_matmul_args *products) {
    const uint32_t type = l->p->plan->weights[l->op->weight].type;
    rfk_wgmma_args a;
    rfk_tiles_args *t = &a.t;
    rf_result r = RF_OK;
    memset(&a, 0, sizeof a);
    t->m = *products;
    t->m.x8.bf16 = t->m.n_cols;
    t->rows = RFK_WGMMA_ROWS, t->cols = RFK_WGMMA_COLS;
    if (rfk_is_float_type(type)) t->m.x8.q = (int *)(void *)l->p->terms.value; /* the int8 rows may be in use */
    if (type == RF_TYPE_F16 || type == RF_TYPE_F32) {
        a.unit = l->p->terms.unit;
        r = rfk_run_split_rows<false>(l, t->m.n_cols, t->m.n_in, 1, 0, type == RF_TYPE_F32 ? 2 : 1);
    } else if (l->b.quantize || type == RF_TYPE_BF16) {
        r = rfk_run_quantize(l, t->m.x8, t->m.n_cols, t->m.n_in);
    }
    const uint32_t row_tiles = rfk_make_products(l, &t->m, t->rows), col_tiles = rfk_ceil_div(t->m.n_cols, t->cols),
                   together = col_tiles > 1 || type == RF_TYPE_F32 ? 2 : 1; /* tiles of 128 columns in a block */
    rfk_cut_depth(l->p, t, row_tiles * rfk_ceil_div(col_tiles, together) * together, RFK_DEPTH / 32, together);
    if (r == RF_OK && together > 1) r = rfk_launch_wide(l, &a, row_tiles);
    else if (r == RF_OK) r = rfk_launch_wgmma(l, &a, dim3(1, row_tiles, t->n_splits));
    if (r != RF_OK || t->n_splits == 1) return r;
    return rfk_run_join(l, t, row_tiles, col_tiles);
}

static rf_result rfk_run_matmul(rfk_launching *l) {
    const rf_op *op = l->op;
    uint32_t type = l->p->plan->weights[op->weight].type;
    rfk_matmul_args a;
    a.x = l->b.in;
    a.x8 = l->p->x8;
    a.x_stride = l->b.in_stride;
    a.n_in = op->matmul.n_in;
    a.n_cols = l->n_rows;
    a.aligned = op->matmul.n_in % 8 == 0 && a.x_stride % 4 == 0 && (size_t)l->b.in % 16 == 0;
    if (rfk_takes_narrow(l->p->dev, l->p->plan, op, l->n_rows)) return rfk_run_narrow(l, &a);
    if (rfk_takes_wgmma(l->p->dev, l->p->plan, op, l->n_rows)) return rfk_run_wgmma(l, &a);
    rf_result r = RF_OK;
    if (l->b.quantize) r = rfk_run_quantize(l, a.x8, l->n_rows, op->matmul.n_in);
    if (r != RF_OK) return r;
    bool tiles = a.n_cols > RFK_MATVEC_COLS;
    if (tiles && rfk_has_tiles(l->p->dev, type)) return rfk_run_tiles(l, &a);
    if (!rfk_is_float_type(type)) tiles = false;
    if (tiles && type != RF_TYPE_F32 && rfk_term_values(l->p->dev, l->p->plan, op))
        return type == RF_TYPE_F16 ? rfk_run_16bit<false>(l, &a) : rfk_run_16bit<true>(l, &a);
    if (tiles && type == RF_TYPE_F32 && l->p->dev->units_bf16 && a.n_in % RFK_16BIT_DEPTH == 0 && a.aligned)
        return rfk_run_matmul_split(l, &a);
    if (tiles) return rfk_run_matmul_float(l, &a);
    const bool floats = rfk_is_float_type(type);
    const uint32_t threads = RFK_MATVEC_WAVES * l->p->dev->wave, n_parts = rfk_ceil_div(a.n_cols, 4),
                   rows = !floats ? 1 : a.n_cols == 1 ? RFK_FLOAT_ROWS(1) : RFK_FLOAT_ROWS(4),
                   blocks = rfk_make_products(l, &a, rows * RFK_MATVEC_WAVES);
    rfk_matmul_kernel one = RFK_BY_WAVE(l, (rfk_find_matvec<32, 1>(type)), (rfk_find_matvec<64, 1>(type)));
    rfk_matmul_kernel four = RFK_BY_WAVE(l, (rfk_find_matvec<32, 4>(type)), (rfk_find_matvec<64, 4>(type)));
    rfk_matmul_kernel kernel = a.n_cols == 1 ? one : four;
    return floats ? rfk_enqueue_early(l, kernel, dim3(blocks * n_parts), threads, a)
                  : rfk_enqueue(l, kernel, dim3(blocks, n_parts), threads, a);
}

static rf_result rfk_run_rope(const rfk_launching *l) {
    const rf_op *op = l->op;
    const rf_rope_params *r = &op->rope;
    rfk_rope_args a;
    if (r->n_rot == 0) return RF_OK;
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t k = i < l->together ? i : 0;
        a.x[i] = rfk_at_step(l, l->p->ops[l->index + k].out, op[k].out);
        if (op->flags & RF_OP_LAST) a.x[i] += r->head_dim - r->n_rot;
        a.stride[i] = l->p->ops[l->index + k].out_stride;
        a.n_heads[i] = i < l->together ? op[k].rope.n_heads : 0;
    }
    a.table = l->p->tables + r->table;
    a.freqs = rfk_vector(l->p, op->weight, 0, &a.freqs_type);
    a.rows = l->p->rows + l->first_row;
    a.head_dim = r->head_dim;
    a.n_rot = r->n_rot;
    a.neox = (op->flags & RF_OP_NEOX) != 0;
    a.scale = r->scale;
    a.shift = r->shift;
    a.group = r->n_rot / 2 < RFK_BLOCK ? r->n_rot / 2 : RFK_BLOCK;
    dim3 grid(l->n_rows, rfk_ceil_div(a.n_heads[0] + (uint64_t)a.n_heads[1], RFK_ROPE_HEADS * (RFK_BLOCK / a.group)),
              rfk_ceil_div(r->n_rot / 2, RFK_BLOCK));
    return rfk_enqueue_early(l, rfk_rope, grid, RFK_BLOCK, a);
}

static rf_result rfk_run_kv_store(const rfk_launching *l) {
    const rf_op *op = l->op;
    const rf_kv_store_params *s = &op->kv_store;
    rfk_store_args a;
    a.k = l->b.in;
    a.v = l->b.in2;
    a.k_state = l->b.k;
    a.v_state = l->b.v;
    a.rows = l->p->rows + l->first_row;
    a.k_stride = l->b.in_stride;
    a.v_stride = l->b.in2_stride;
    a.n_kv_heads = s->n_kv_heads;
    a.head_dim = s->head_dim;
    a.head_dim_v = s->head_dim_v;
    a.n_cells = l->b.n_cells;
    a.unit = rf_state_unit(&l->p->plan->states[op->state]);
    if (l->p->cache_type == RF_CACHE_Q8_0) {
        const bool latent = op->flags & RF_OP_MLA;
        const uint64_t n = (uint64_t)s->n_kv_heads * (s->head_dim + (latent ? 0 : s->head_dim_v));
        void (*rows)(rfk_store_args) = RFK_BY_WAVE(l, (rfk_q8_store<32, false>), (rfk_q8_store<64, false>));
        void (*keys)(rfk_store_args) = RFK_BY_WAVE(l, (rfk_q8_store<32, true>), (rfk_q8_store<64, true>));
        return rfk_enqueue(l, latent ? keys : rows, dim3(rfk_ceil_div(n, 4 * RFK_BLOCK), l->n_rows), RFK_BLOCK, a);
    }
    if (op->flags & RF_OP_MLA) {
        dim3 grid(rfk_ceil_div((uint64_t)s->n_kv_heads * s->head_dim, RFK_BLOCK), l->n_rows);
        return rfk_enqueue(l, l->p->cache_type == RF_CACHE_F32 ? rfk_latent_store<float> : rfk_latent_store<uint16_t>,
                           grid,
                      RFK_BLOCK, a);
    }
    const uint32_t per = s->head_dim % 4 == 0 && s->head_dim_v % 4 == 0 ? 4 : 1;
    void (*full)(rfk_store_args) = per == 4 ? rfk_kv_store<float, 4> : rfk_kv_store<float, 1>;
    void (*half)(rfk_store_args) = per == 4 ? rfk_kv_store<uint16_t, 4> : rfk_kv_store<uint16_t, 1>;
    dim3 grid(rfk_ceil_div((uint64_t)s->n_kv_heads * (s->head_dim + s->head_dim_v), RFK_BLOCK * per), l->n_rows);
    return rfk_enqueue_early(l, l->p->cache_type == RF_CACHE_F32 ? full : half, grid, RFK_BLOCK, a);
}

/* Whether these are many rows, and their sequences have many. */
static bool rfk_has_runs(const rf_step_row *rows, uint32_t n_rows) {
    uint32_t runs = 1;
    for (uint32_t t = 1; t < n_rows; t++) runs += rows[t].seq != rows[t - 1].seq;
    return n_rows > RFK_SPLIT_ROWS && n_rows >= 8 * runs;
}

/* Whether flash attention does it: sequences must have many rows. Quantized keys and values are sums of two halves, the
 * second of which may be subnormal. */
static bool rfk_takes_flash(const rfk_launching *l, const rfk_flash_kernel *kernel) {
    const rf_attention_params *a = &l->op->attention;
    if (l->p->dev->wrong_units & RFK_WRONG_HALVES) return false;
    if (!rfk_has_runs(l->step->rows, l->step->n_rows)) return false;
    return !(l->op->flags & RF_OP_MLA) && l->p->cache_type != RF_CACHE_F32 &&
           (l->p->cache_type == RF_CACHE_Q8_0 ? l->p->dev->units_f16 : l->p->dev->has_units) &&
           a->head_dim == a->head_dim_v && a->head_dim % 16 == 0 && a->head_dim <= RFK_FLASH_HEAD &&
           a->n_heads / a->n_kv_heads <= kernel->queries && kernel->shared_bytes <= l->p->dev->shared_bytes;
}

template <uint32_t HEAD> static void (*rfk_find_attention(const rfk_launching *l))(rfk_attention_args) {
    void (*half)(rfk_attention_args) =
        RFK_BY_WAVE(l, (rfk_attention<32, uint16_t, HEAD>), (rfk_attention<64, uint16_t, HEAD>));
    void (*full)(rfk_attention_args) =
        RFK_BY_WAVE(l, (rfk_attention<32, float, HEAD>), (rfk_attention<64, float, HEAD>));
    void (*quantized)(rfk_attention_args) =
        RFK_BY_WAVE(l, (rfk_attention<32, rfk_q8, HEAD>), (rfk_attention<64, rfk_q8, HEAD>));
    return l->p->cache_type == RF_CACHE_F32 ? full : l->p->cache_type == RF_CACHE_Q8_0 ? quantized : half;
}

/* Whether only rfk_any_attention does it; `longest`: positions that the step's rows see. */
static bool rfk_is_any_attention(const rf_op *op, uint32_t longest) {
    return op->flags & RF_OP_BOTH_WAYS || op->bias != RF_NONE || op->attention.head_dim > RFK_LATENT_HEAD ||
           op->attention.block_unit ||
           (op->in2 != RF_NONE && longest > op->attention.n_dense);
}

static rf_result rfk_run_any_attention(const rfk_launching *l, const rfk_attention_args *a) {
    const rf_attention_params *att = &l->op->attention;
    rfk_any_attention_args x;
    memset(&x, 0, sizeof x);
    x.a = *a;
    x.a.part = NULL;
    x.list = l->op->in2 == RF_NONE ? NULL : (const int32_t *)(const void *)l->b.in2;
    x.bias = rfk_vector(l->p, l->op->bias, 0, &x.bias_type);
    x.buckets = l->p->tables + att->buckets;
    x.n_buckets = att->n_buckets;
    x.list_stride = l->b.in2_stride;
    x.n_lists = att->n_lists;
    x.n_listed = att->n_listed;
    x.list_unit = att->list_unit;
    x.n_dense = att->n_dense;
    x.blocks = l->b.blocks;
    x.n_block_cells = l->b.n_block_cells;
    x.block_unit = att->block_unit;
    x.both_ways = (l->op->flags & RF_OP_BOTH_WAYS) != 0;
    const uint32_t group = att->n_heads / att->n_kv_heads, room = rfk_any_heads(att->head_dim),
                   wanted = 2 * l->p->dev->info.compute_units; /* blocks */
    uint32_t *n = &x.a.heads_per_block;
    *n = group < room ? group : room;
    while (*n > 1 && (uint64_t)l->n_rows * att->n_kv_heads * rfk_ceil_div(group, *n) < wanted) *n = (*n + 1) / 2;
    void (*half)(rfk_any_attention_args) =
        RFK_BY_WAVE(l, (rfk_any_attention<32, uint16_t>), (rfk_any_attention<64, uint16_t>));
    void (*full)(rfk_any_attention_args) =
        RFK_BY_WAVE(l, (rfk_any_attention<32, float>), (rfk_any_attention<64, float>));
    void (*quantized)(rfk_any_attention_args) =
        RFK_BY_WAVE(l, (rfk_any_attention<32, rfk_q8>), (rfk_any_attention<64, rfk_q8>));
    const uint32_t type = l->p->cache_type;
    return rfk_enqueue(l, type == RF_CACHE_F32 ? full : type == RF_CACHE_Q8_0 ? quantized : half,
                       dim3(l->n_rows, att->n_kv_heads * rfk_ceil_div(group, *n)), RFK_BLOCK, x);
}

static rfk_flash_kernel rfk_choose_flash(const rfk_launching *l) {
    const rf_attention_params *att = &l->op->attention;
    const rf_dev *d = l->p->dev;
    const rfk_flash_kernel wgmma = {rfk_flash_wgmma, 8, RFK_FLASH_WGMMA_QUERIES, RFK_FLASH_WGMMA_BYTES};
    const uint32_t queries = att->n_heads / att->n_kv_heads * l->n_rows;
    if (l->p->cache_type == RF_CACHE_Q8_0) return rfk_find_flash<rfk_q8>(d, att->head_dim);
    if (d->wgmma && att->head_dim > 64 && att->head_dim <= RFK_FLASH_WGMMA_HEAD &&
        queries >= RFK_FLASH_WGMMA_QUERIES && /* rfk_flash has twice the blocks: faster if they are few */
        4 * rfk_ceil_div(queries, RFK_FLASH_WGMMA_QUERIES) * att->n_kv_heads > d->info.compute_units)
        return wgmma;
    return rfk_find_flash<uint16_t>(d, att->head_dim);
}

static rf_result rfk_run_flash(const rfk_launching *l, const rfk_flash_kernel *flash, rfk_attention_args *a) {
    a->rows_per_block = flash->queries / (a->n_heads / a->n_kv_heads);
    const uint32_t blocks = rfk_ceil_div(l->n_rows, a->rows_per_block) * a->n_kv_heads,
                   units = l->p->dev->info.compute_units;
    a->reverse_from = flash->waves == 4 && blocks <= 2 * units ? units : blocks; /* 8 fill a multiprocessor */
    const rfk_config c = {dim3(blocks), dim3(flash->waves * l->p->dev->wave), flash->shared_bytes,
                          rfk_early_carveout(l), l->q->stream, 0};
    return rfk_enqueue_config(l, flash->run, c, *a);
}

static rf_result rfk_run_attention(const rfk_launching *l) {
    const rf_op *op = l->op;
    const rf_attention_params *att = &op->attention;
    rf_prepared *p = l->p;
    uint32_t longest = 0, group = att->n_heads / att->n_kv_heads;
    for (uint32_t t = 0; t < l->n_rows; t++)
        if ((uint32_t)l->step->rows[t].pos + 1 > longest) longest = (uint32_t)l->step->rows[t].pos + 1;
    bool split = l->n_rows <= RFK_SPLIT_ROWS && longest > p->split_cells;
    rfk_attention_args a;
    a.q = l->b.in;
    a.k = l->b.k;
    a.v = op->flags & RF_OP_MLA ? l->b.k : l->b.v;
    a.v_row = op->flags & RF_OP_MLA ? att->head_dim : att->head_dim_v;
    a.out = l->b.out;
    a.part = split ? p->part : NULL;
    a.slopes = att->slopes == RF_NONE ? NULL : p->tables + att->slopes;
    a.sinks = rfk_vector(p, op->weight, 0, &a.sinks_type);
    a.rows = p->rows + l->first_row;
    a.q_stride = l->b.in_stride;
    a.out_stride = l->b.out_stride;
    a.n_rows = l->n_rows;
    a.heads_per_block = group < RFK_QUERIES ? group : RFK_QUERIES;
    a.rows_per_block = RFK_QUERIES / a.heads_per_block;
    a.n_heads = att->n_heads;
    a.n_kv_heads = att->n_kv_heads;
    a.head_dim = att->head_dim;
    a.head_dim_v = att->head_dim_v;
    a.n_cells = l->b.n_cells;
    a.max_splits = p->max_splits;
    a.split_cells = split ? p->split_cells : p->n_ctx;
    a.scale = att->scale;
    a.softcap = att->softcap;
    a.window = att->window;
    a.temperature = att->temperature;
    a.temperature_length = att->temperature_length;
    if (rfk_is_any_attention(op, longest)) return rfk_run_any_attention(l, &a);
    const rfk_flash_kernel flash = rfk_choose_flash(l);
    if (rfk_takes_flash(l, &flash)) return rfk_run_flash(l, &flash, &a);
    dim3 grid(rfk_ceil_div(l->n_rows, a.rows_per_block), att->n_kv_heads * rfk_ceil_div(group, a.heads_per_block),
              rfk_ceil_div(longest, a.split_cells));
    bool wide = att->head_dim > RFK_MAX_HEAD || att->head_dim_v > RFK_MAX_HEAD;
    rf_result r = rfk_enqueue(l, wide ? rfk_find_attention<RFK_LATENT_HEAD>(l) : rfk_find_attention<RFK_SMALL_HEAD>(l),
                              grid, RFK_BLOCK, a);
    if (r == RF_OK && split) r = rfk_enqueue(l, rfk_attention_join, dim3(l->n_rows, att->n_heads), RFK_BLOCK, a);
    return r;
}

static rf_result rfk_run_blend(const rfk_launching *l) {
    rfk_blend_args a;
    a.banked = l->b.in;
    a.own = l->b.in2;
    a.weight = rfk_vector(l->p, l->op->weight, 0, &a.weight_type);
    a.out = l->b.out;
    a.banked_stride = l->b.in_stride;
    a.own_stride = l->b.in2_stride;
    a.out_stride = l->b.out_stride;
    a.n = l->op->blend.n;
    a.n_banked = l->op->blend.n_banked;
    a.eps = l->op->blend.eps;
    return rfk_enqueue(l, rfk_blend, dim3(l->n_rows), RFK_BLOCK, a);
}

static rf_result rfk_run_spread(const rfk_launching *l) {
    rfk_spread_args a;
    a.in = l->b.in;
    a.in2 = l->b.in2;
    a.in3 = l->b.in3;
    a.out = l->b.out;
    a.in_stride = l->b.in_stride;
    a.in2_stride = l->b.in2_stride;
    a.in3_stride = l->b.in3_stride;
    a.out_stride = l->b.out_stride;
    a.n = l->op->spread.n;
    a.first = l->op->spread.first;
    a.accumulate = (l->op->flags & RF_OP_ACCUMULATE) != 0;
    a.sigmoid = (l->op->flags & RF_OP_SIGMOID) != 0;
    a.scale = l->op->spread.scale != 0 ? l->op->spread.scale : 1.0f;
    return rfk_enqueue(l, rfk_spread, dim3(l->n_rows, l->op->spread.n_streams), RFK_BLOCK, a);
}

static rf_result rfk_run_hyper(const rfk_launching *l) {
    rfk_hyper_args a;
    a.in = l->b.in;
    a.scale = rfk_vector(l->p, l->op->weight, 0, &a.scale_type);
    a.base = rfk_vector(l->p, l->op->bias, 0, &a.base_type);
    a.out = l->b.out;
    a.in_stride = l->b.in_stride;
    a.out_stride = l->b.out_stride;
    a.n_streams = l->op->hyper.n_streams;
    a.n_parts = l->op->hyper.n_parts;
    a.n_rounds = l->op->hyper.n_rounds;
    a.magnitude = l->op->hyper.magnitude;
    a.eps = l->op->hyper.eps;
    return rfk_enqueue(l, rfk_hyper, dim3(l->n_rows), RFK_BLOCK, a);
}

static rf_result rfk_run_match(const rfk_launching *l) {
    rfk_match_args a;
    a.in = l->b.in;
    a.in2 = l->b.in2;
    a.out = l->b.out;
    a.in_stride = l->b.in_stride;
    a.in2_stride = l->b.in2_stride;
    a.out_stride = l->b.out_stride;
    a.n = l->op->match.n;
    return rfk_enqueue(l, rfk_match, dim3(l->n_rows, l->op->match.n_groups), RFK_BLOCK, a);
}

static rf_result rfk_run_trim(const rfk_launching *l) {
    rfk_trim_args a;
    a.in = l->b.in;
    a.out = l->b.out;
    a.in_stride = l->b.in_stride;
    a.out_stride = l->b.out_stride;
    a.n = l->op->trim.n;
    a.cutoff = l->op->trim.cutoff;
    return rfk_enqueue(l, rfk_trim, dim3(l->n_rows), RFK_BLOCK, a);
}

/* Of the sum that is op i. */
static rfk_members_args rfk_sum_of(const rfk_launching *l, uint32_t i) {
    const rf_prepared *p = l->p;
    const rf_op *op = &p->plan->ops[i];
    rfk_members_args a;
    memset(&a, 0, sizeof a);
    if (p->members) a = rfk_members_of(p);
    else a.n_members = 1;
    a.in = rfk_at_step(l, p->ops[i].in, op->in);
    a.out = rfk_at_step(l, p->ops[i].out, op->out);
    a.in_stride = p->ops[i].in_stride;
    a.out_stride = p->ops[i].out_stride;
    a.n = op->sum.n;
    a.n_rows = l->n_rows;
    a.accumulate = op->flags & RF_OP_ACCUMULATE;
    a.index = op->sum.index;
    return a;
}

static rf_result rfk_run_sum(const rfk_launching *l) {
    const rf_prepared *p = l->p;
    rfk_members_args a = rfk_sum_of(l, l->index);
    a.arrived = rf_sum_arrives(p->members, l->op, l->n_rows);
    a.pushed = l->index > 0 && rfk_pushes(p, l->step, l->index - 1) != RFK_PUSHES_NOT;
    if (!p->members || a.arrived || (uint64_t)a.n * a.n_rows > RFK_MEMBER_FLAGGED)
        return rfk_enqueue_early(l, rfk_sum_members, dim3(RFK_MEMBER_BLOCKS), RFK_MEMBER_BLOCK, a);
    const uint32_t want = rfk_ceil_div((uint64_t)a.n * a.n_rows / 2, RFK_BLOCK);
    return rfk_enqueue_early(l, rfk_sum_flagged, dim3(want < RFK_MEMBER_BLOCKS ? want : RFK_MEMBER_BLOCKS), RFK_BLOCK,
                             a);
}

static rf_result rfk_run_index(const rfk_launching *l) {
    const rf_index_params *x = &l->op->index;
    const uint32_t step = rf_index_step(l->op);
    rfk_index_args a;
    a.keys = l->b.k;
    a.scores = l->p->index_scores;
    a.q_stride = l->b.in_stride;
    a.weights_stride = l->b.in2_stride;
    a.out_stride = l->b.out_stride;
    a.n_heads = x->n_heads;
    a.head_dim = x->head_dim;
    a.n_cells = l->b.n_cells;
    a.n_ctx = l->p->n_ctx;
    a.n_lists = x->n_lists;
    a.n_listed = x->n_listed;
    a.list_unit = x->list_unit;
    a.n_local = x->n_local;
    a.whole = (l->op->flags & RF_OP_LAST) != 0;
    void (*score)(rfk_index_args) = l->p->cache_type == RF_CACHE_F32    ? rfk_index_score<float>
                                    : l->p->cache_type == RF_CACHE_Q8_0 ? rfk_index_score<rfk_q8>
                                                                        : rfk_index_score<uint16_t>;
    rf_result r = RF_OK;
    for (uint32_t first = 0; r == RF_OK && first < l->n_rows; first += RFK_INDEX_ROWS) {
        const uint32_t n = l->n_rows - first < RFK_INDEX_ROWS ? l->n_rows - first : RFK_INDEX_ROWS;
        uint32_t longest = 0;
        for (uint32_t t = first; t < first + n; t++)
            if ((uint32_t)l->step->rows[t].pos + 1 > longest) longest = (uint32_t)l->step->rows[t].pos + 1;
        a.rows = l->p->rows + first;
        a.q = l->b.in + (size_t)first * a.q_stride;
        a.weights = l->op->in2 == RF_NONE ? NULL : l->b.in2 + (size_t)first * a.weights_stride;
        a.out = (int32_t *)(void *)(l->b.out + (size_t)first * a.out_stride);
        if (longest / step)
            r = rfk_enqueue(l, score, dim3(rfk_ceil_div(longest / step, RFK_INDEX_CELLS), n), RFK_BLOCK, a);
        if (r == RF_OK) r = rfk_enqueue(l, rfk_index_choose, dim3(a.n_lists, n), RFK_BLOCK, a);
    }
    return r;
}

static rf_result rfk_run_glu(const rfk_launching *l) {
    rfk_glu_args a;
    a.gate = l->b.in;
    a.up = l->op->in2 == RF_NONE ? NULL : l->b.in2 + l->op->glu.in2_at;
    a.factor = rfk_vector(l->p, l->op->factor, 0, &a.factor_type);
    a.limit = l->op->glu.limit;
    a.repeat = l->op->glu.repeat;
    a.alpha_p = l->op->glu.alpha_p;
    a.alpha_n = l->op->glu.alpha_n;
    a.beta = l->op->glu.beta;
    a.eps = l->op->glu.eps;
    a.divides = a.factor && (l->op->flags & RF_OP_EACH_HEAD);
    a.activation = l->op->glu.activation;
    a.out = l->b.out;
    a.gate_stride = l->b.in_stride;
    a.up_stride = l->b.in2_stride;
    a.out_stride = l->b.out_stride;
    a.n = l->op->glu.n;
    a.to = rfk_rows_for_next(l);
    if (rfk_skips_floats(l)) a.out = NULL;
    return rfk_enqueue_early(l, RFK_BY_WAVE(l, (rfk_glu<32>), (rfk_glu<64>)),
                             dim3(rfk_ceil_div(a.n, 4 * RFK_BLOCK), l->n_rows), RFK_BLOCK, a);
}

static rf_result rfk_run_gather(const rfk_launching *l) {
    rfk_gather_args a;
    a.in = l->b.in;
    a.out = l->b.out;
    a.logit_rows = l->p->logit_rows;
    a.in_stride = l->b.in_stride;
    a.out_stride = l->b.out_stride;
    a.n = l->op->gather.n;
    return rfk_enqueue(l, rfk_gather, dim3(rfk_ceil_div(a.n, RFK_BLOCK), l->n_rows), RFK_BLOCK, a);
}

static rf_result rfk_run_argmax(const rfk_launching *l) {
    rfk_argmax_args a;
    a.in = l->b.in;
    a.out = l->b.out;
    a.in_stride = l->b.in_stride;
    a.out_stride = l->b.out_stride;
    a.n = l->op->argmax.n;
    a.part = l->n_rows == 1 && a.n > RFK_ARGMAX_PARTS * RFK_ARGMAX_BLOCK ? l->p->best : NULL;
    a.n_parts = a.part ? RFK_ARGMAX_PARTS : 1;
    rf_result r = rfk_enqueue_early(l, RFK_BY_WAVE(l, (rfk_argmax<32>), (rfk_argmax<64>)), dim3(l->n_rows, a.n_parts),
                                    RFK_ARGMAX_BLOCK, a);
    if (r != RF_OK || !a.part) return r;
    return rfk_enqueue_early(l, RFK_BY_WAVE(l, (rfk_argmax_join<32>), (rfk_argmax_join<64>)), dim3(1),
                             l->p->dev->wave, a);
}

static rfk_route_args rfk_make_route(const rf_prepared *p, uint32_t index) {
    const rf_op *op = &p->plan->ops[index];
    const rfk_bound *b = &p->ops[index];
    rfk_route_args a;
    a.logits = b->in;
    a.bias = rfk_vector(p, op->bias, 0, &a.bias_type);
    a.fixed = op->factor == RF_NONE ? NULL
                                    : (const int32_t *)(const void *)rfk_slot_of(p, op->factor)->w.plane[0];
    a.rows = p->rows;
    a.out = b->out;
    a.in_stride = b->in_stride;
    a.out_stride = b->out_stride;
    a.n_experts = op->route.n_experts;
    a.n_used = op->route.n_used;
    a.n_groups = op->route.n_groups;
    a.n_groups_used = op->route.n_groups_used;
    a.flags = op->flags;
    a.scale = op->route.scale;
    return a;
}

static rf_result rfk_run_route(const rfk_launching *l) {
    return rfk_enqueue_early(l, RFK_BY_WAVE(l, rfk_route<32>, rfk_route<64>), dim3(l->n_rows), l->p->dev->wave,
                             rfk_make_route(l->p, l->index));
}

typedef void (*rfk_experts_kernel)(rfk_experts_args);
template <int WAVE> static rfk_experts_kernel rfk_find_experts(uint32_t type) {
#define RFK_FLOAT_CASE(TYPE) case TYPE: return rfk_experts_float<RFK_BUILT_FLOAT(TYPE), WAVE>;
#define RFK_QUANTIZED_CASE(TYPE) case TYPE: return rfk_experts<RFK_BUILT(TYPE), WAVE>;
    switch (rfk_kernel_type(type)) {
        RFK_FLOAT_TYPES(RFK_FLOAT_CASE)
        RFK_QUANTIZED_TYPES(RFK_QUANTIZED_CASE)
    default: return NULL; /* op_supported lets none through */
    }
#undef RFK_FLOAT_CASE
#undef RFK_QUANTIZED_CASE
}

/* Experts with 16-bit float weights and many pairs. */
template <bool BF16>
static rf_result rfk_run_pair_16bit(const rfk_launching *l, const rfk_pair_tiles_args *tiles, uint32_t n_tiles) {
    const uint32_t per_row = tiles->e.per_choice ? tiles->e.n_used : 1;
    rfk_16bit_args<rfk_pair_tiles_args> a;
    a.tiles = *tiles;
    a.x = l->p->terms;
    a.tiles.t.m.n_cols = l->n_rows * per_row;
    rf_result r = rfk_run_split_rows<BF16>(l, a.tiles.t.m.n_cols, tiles->e.n_in, per_row, tiles->e.x_choice);
    if (r != RF_OK) return r;
    void (*kernel)(rfk_16bit_args<rfk_pair_tiles_args>) =
        RFK_BY_WAVE(l, (rfk_matmul_16bit<BF16, 32, RFK_PAIR_TILE, rfk_pair_tiles_args>),
                    (rfk_matmul_16bit<BF16, 64, RFK_PAIR_TILE, rfk_pair_tiles_args>));
    return rfk_enqueue(l, kernel, dim3(n_tiles, rfk_ceil_div(tiles->e.n_out, RFK_SMALL_TILE_ROWS)), RFK_BLOCK, a);
}

/* Experts or heads with many pairs. No split-K: results of a pair do not depend on what else is in the step. */
static rf_result rfk_run_pair_tiles(const rfk_launching *l, const rfk_experts_args *e, uint32_t n_pairs) {
    const uint32_t type = l->p->plan->weights[l->op->weight].type, n_experts = rfk_n_matrices(l->op),
                   n_tiles = rfk_pair_tiles(n_pairs, n_experts);
    if (l->b.sort) {
        rfk_sort_args z = {e->route, l->p->lists, e->route_stride, e->n_used, n_pairs};
        rf_result r = rfk_enqueue(l, e->route ? rfk_sort_pairs : rfk_sort_heads, dim3(n_experts), RFK_BLOCK, z);
        if (r != RF_OK) return r;
    }
    rfk_pair_tiles_args a;
    memset(&a, 0, sizeof a);
    a.e = *e;
    a.lists = l->p->lists;
    a.t.m.x8 = e->x8;
    a.t.m.n_in = e->n_in;
    a.t.n_splits = 1;
    a.t.split_units = e->n_in / 32;
    if (e->x8.n_in) {
        rfk_narrow_args n;
        memset(&n, 0, sizeof n);
        n.t = a.t, n.e = *e, n.lists = a.lists;
        return rfk_launch_narrow(l, &n, dim3(n_tiles, rfk_ceil_div(e->n_out, RFK_NARROW_ROWS)));
    }
    if (e->x8.bf16) {
        rfk_wgmma_args w = {a.t, NULL, *e, a.lists};
        return rfk_launch_wgmma(l, &w, dim3(n_tiles, rfk_ceil_div(e->n_out, RFK_WGMMA_ROWS)));
    }
    if (type == RF_TYPE_F16) return rfk_run_pair_16bit<false>(l, &a, n_tiles);
    if (type == RF_TYPE_BF16) return rfk_run_pair_16bit<true>(l, &a, n_tiles);
    void (*kernel)(rfk_pair_tiles_args) =
        RFK_BY_WAVE(l, (rfk_find_matmul<rfk_pair_tiles_args, 32, RFK_PAIR_TILE>(type)),
                    (rfk_find_matmul<rfk_pair_tiles_args, 64, RFK_PAIR_TILE>(type)));
    const uint32_t row_tiles = rfk_ceil_div(e->n_out, RFK_TILE_ROWS_OF(rfk_kernel_type(type), RFK_PAIR_TILE));
    return rfk_enqueue(l, kernel, dim3(n_tiles, row_tiles), RFK_BLOCK, a);
}

static rfk_experts_args rfk_make_experts(const rfk_launching *l) {
    const rf_op *op = l->op;
    const rf_prepared *p = l->p;
    rfk_experts_args a;
    memset(&a, 0, sizeof a);
    a.w = p->table->experts + p->plan->weights[op->weight].slot;
    a.bias = rfk_vector(p, op->bias, 0, &a.bias_type);
    a.factor = rfk_vector(p, op->factor, 0, &a.factor_type);
    a.row0 = op->experts.first_row;
    a.first_own = op->experts.first_own;
    a.n_own = op->experts.n_own ? op->experts.n_own : op->experts.n_experts;
    a.x = l->b.in;
    a.route = l->b.in2;
    a.x8 = p->x8;
    rfk_as_bf16(p, op, l->n_rows, &a.x8);
    a.out = l->b.out;
    a.x_stride = l->b.in_stride;
    a.route_stride = l->b.in2_stride;
    a.out_stride = l->b.out_stride;
    a.n_in = op->experts.n_in;
    a.n_out = op->experts.n_out;
    a.n_used = op->experts.n_used;
    a.per_choice = (op->flags & RF_OP_PER_CHOICE) != 0;
    a.x_choice = op->experts.n_in;
    a.out_choice = op->experts.n_out;
    a.aligned = op->experts.n_in % 8 == 0 && a.x_stride % 4 == 0 && (size_t)l->b.in % 16 == 0;
    return a;
}

static rf_result rfk_run_experts(const rfk_launching *l) {
    const rf_op *op = l->op;
    rf_prepared *p = l->p;
    const uint32_t type = p->plan->weights[op->weight].type;
    const rfk_experts_args a = rfk_make_experts(l);
    if (l->b.quantize) {
        rf_result r = rfk_run_quantize(l, a.x8, l->n_rows, (uint32_t)rfk_row_values(op));
        if (r != RF_OK) return r;
    }
    const uint32_t n_pairs = rfk_tile_pairs(p->dev, p->plan, op, l->n_rows);
    if (n_pairs) return rfk_run_pair_tiles(l, &a, n_pairs);
    return rfk_enqueue(l, RFK_BY_WAVE(l, (rfk_find_experts<32>(type)), (rfk_find_experts<64>(type))),
                  dim3(rfk_ceil_div(a.n_out, RFK_MATVEC_WAVES), a.n_used, l->n_rows),
                  RFK_MATVEC_WAVES * p->dev->wave, a);
}

static rfk_experts_args rfk_make_heads(const rfk_launching *l) {
    const rf_op *op = l->op;
    const rf_heads_params *h = &op->heads;
    const rf_prepared *p = l->p;
    rfk_experts_args a;
    memset(&a, 0, sizeof a);
    a.heads = rfk_slot_of(p, op->weight)->w;
    a.x = l->b.in;
    a.x8 = p->x8;
    rfk_as_bf16(p, op, l->n_rows, &a.x8);
    a.out = l->b.out;
    a.x_stride = l->b.in_stride;
    a.out_stride = l->b.out_stride;
    a.n_in = h->n_in;
    a.n_out = h->n_out;
    a.n_used = h->n_heads;
    a.per_choice = 1;
    a.x_choice = h->head_dim;
    a.out_choice = h->n_out + h->head_dim - h->n_in;
    a.row0 = h->first_row;
    a.head_rows = h->head_rows;
    a.n_own = RF_NONE;
    a.kernel_type = rfk_kernel_type(p->plan->weights[op->weight].type);
    a.aligned = h->n_in % 8 == 0 && a.x_stride % 4 == 0 && a.x_choice % 4 == 0 && (size_t)l->b.in % 16 == 0;
    return a;
}

/* Kernels of experts, where each choice takes its own rows of one matrix. */
static rf_result rfk_run_heads(const rfk_launching *l) {
    const rf_op *op = l->op;
    const rf_prepared *p = l->p;
    const rfk_experts_args a = rfk_make_heads(l);
    const uint32_t type = p->plan->weights[op->weight].type, rest = a.x_choice - a.n_in,
                   n_pairs = rfk_tile_pairs(p->dev, p->plan, op, l->n_rows);
    rf_result r = RF_OK;
    if (l->b.quantize) r = rfk_run_quantize(l, a.x8, l->n_rows, a.n_in, a.n_used, a.x_choice);
    if (r == RF_OK && n_pairs) r = rfk_run_pair_tiles(l, &a, n_pairs);
    else if (r == RF_OK && op->flags & RF_OP_ACROSS)
        r = rfk_enqueue(l, rfk_is_float_type(type) ? rfk_across_float : rfk_across,
                   dim3(rfk_ceil_div(a.n_out, rfk_is_float_type(type) ? RFK_BLOCK : RFK_ACROSS_COLS), a.n_used,
                        l->n_rows), RFK_BLOCK, a);
    else if (r == RF_OK)
        r = rfk_enqueue(l, RFK_BY_WAVE(l, (rfk_find_experts<32>(type)), (rfk_find_experts<64>(type))),
                   dim3(rfk_ceil_div(a.n_out, RFK_MATVEC_WAVES), a.n_used, l->n_rows),
                   RFK_MATVEC_WAVES * p->dev->wave, a);
    if (r != RF_OK || rest == 0) return r;
    return rfk_enqueue(l, rfk_rest, dim3(rfk_ceil_div((uint64_t)rest * a.n_used, RFK_BLOCK), l->n_rows), RFK_BLOCK,
                       a);
}

static rf_result rfk_run_mix(const rfk_launching *l) {
    const rf_op *op = l->op;
    const rf_mix_params *m = &op->mix;
    rfk_mix_args a;
    a.in = l->b.in;
    a.route = op->in2 == RF_NONE ? NULL : l->b.in2;
    a.out = l->b.out;
    a.in_stride = l->b.in_stride;
    a.route_stride = l->b.in2_stride;
    a.out_stride = l->b.out_stride;
    a.n = m->n;
    a.n_used = m->n_used;
    a.accumulate = (op->flags & RF_OP_ACCUMULATE) != 0;
    a.sigmoid = (op->flags & RF_OP_SIGMOID) != 0;
    a.first = a.sigmoid || m->n_out ? 0 : a.n_used;
    a.scale = m->scale != 0 ? m->scale : 1;
    const uint32_t n_sums = m->n_out ? m->n_out : 1;
    return rfk_enqueue(l, rfk_mix, dim3(rfk_ceil_div(a.n, RFK_BLOCK), l->n_rows, n_sums), RFK_BLOCK, a);
}

/* How many sequences a launch of a recurrent op takes: those of the step, or of a graph for several rows, which is for
 * all steps of so many rows, as many as there can be. *ranges: for rfk_rows_of. */
static uint32_t rfk_n_sequences(const rfk_launching *l, const rfk_row_range **ranges) {
    const rf_prepared *p = l->p;
    const bool apart = p->n_ranges == l->n_rows; /* so are all steps of a graph, or none */
    *ranges = apart ? NULL : p->ranges;
    return apart || !p->capturing ? p->n_ranges : l->n_rows < p->n_seq ? l->n_rows : p->n_seq;
}

static rf_result rfk_run_conv(const rfk_launching *l) {
    const rf_op *op = l->op;
    rfk_conv_args a;
    a.in = l->b.in;
    a.w = rfk_vector(l->p, op->weight, 0, &a.w_type);
    a.bias = rfk_vector(l->p, op->bias, 0, &a.bias_type);
    a.out = l->b.out;
    a.state = (float *)(void *)l->b.k;
    a.rows = l->p->rows;
    const uint32_t n_sequences = rfk_n_sequences(l, &a.ranges);
    a.in_stride = l->b.in_stride;
    a.out_stride = l->b.out_stride;
    a.n = op->conv.n;
    a.n_taps = (uint32_t)rf_conv_reach(&op->conv) + 1;
    a.dilation = op->conv.dilation ? op->conv.dilation : 1;
    a.activation = op->conv.activation;
    const uint32_t groups = rfk_ceil_div(l->n_rows, RFK_CONV_ROWS),
                   block = RFK_CONV_CHANNELS * (groups < RFK_CONV_GROUPS ? groups : RFK_CONV_GROUPS);
    return rfk_enqueue_early(l, a.n_taps <= RF_MAX_TAPS ? rfk_conv<RF_MAX_TAPS> : rfk_conv<RF_MAX_REACH + 1>,
                             dim3(rfk_ceil_div(a.n, RFK_CONV_CHANNELS), n_sequences), block, a);
}

typedef void (*rfk_delta_kernel)(rfk_delta_args);
template <int WAVE> static rfk_delta_kernel rfk_find_delta(uint32_t head_dim) {
    if (head_dim <= 64) return rfk_delta<WAVE, 64, false>;
    return head_dim <= 128 ? rfk_delta<WAVE, 128, false> : rfk_delta<WAVE, RFK_MAX_HEAD, false>;
}

/* *n_sequences: of the grid. */
static rfk_delta_args rfk_bind_delta(const rfk_launching *l, uint32_t *n_sequences) {
    const rf_op *op = l->op;
    rfk_delta_args a;
    memset(&a, 0, sizeof a);
    a.in = l->b.in;
    a.beta = l->b.in2;
    a.alpha = l->b.in3;
    a.a = rfk_vector(l->p, op->weight, 0, &a.a_type);
    a.b = rfk_vector(l->p, op->bias, 0, &a.b_type);
    a.out = l->b.out;
    a.state = (float *)(void *)l->b.k;
    a.rows = l->p->rows;
    *n_sequences = rfk_n_sequences(l, &a.ranges);
    a.in_stride = l->b.in_stride;
    a.beta_stride = l->b.in2_stride;
    a.alpha_stride = l->b.in3_stride;
    a.out_stride = l->b.out_stride;
    a.n_heads = op->delta.n_heads;
    a.n_k_heads = op->delta.n_k_heads;
    a.head_dim = op->delta.head_dim;
    a.head_dim_v = op->delta.head_dim_v;
    a.cyclic = (op->flags & RF_OP_CYCLIC) != 0;
    a.n_decays = op->delta.n_decays;
    a.lower_bound = op->delta.lower_bound;
    a.scale = op->delta.scale;
    a.eps = op->delta.eps;
    return a;
}

static rf_result rfk_run_delta(const rfk_launching *l) {
    uint32_t n_sequences;
    const rfk_delta_args a = rfk_bind_delta(l, &n_sequences);
    if (rfk_has_runs(l->step->rows, l->step->n_rows) && a.head_dim <= RFK_CHUNK_DIM && a.n_decays == 1)
        return rfk_enqueue_early(l, RFK_BY_WAVE(l, rfk_delta_prompt<32>, rfk_delta_prompt<64>),
                                 dim3(rfk_ceil_div(a.head_dim_v, RFK_CHUNK_COLS), a.n_heads, n_sequences),
                                 2 * RFK_CHUNK_THREADS, a);
    rfk_delta_kernel kernel = RFK_BY_WAVE(l, (rfk_find_delta<32>(a.head_dim)), (rfk_find_delta<64>(a.head_dim)));
    const uint32_t wave = l->p->dev->wave, cols = RFK_DELTA_COLS(wave, a.head_dim);
    return rfk_enqueue_early(l, kernel, dim3(rfk_ceil_div(a.head_dim_v, 4 * cols), a.n_heads, n_sequences), 4 * wave,
                             a);
}

typedef void (*rfk_scan_kernel)(rfk_scan_args);
template <int WAVE> static rfk_scan_kernel rfk_find_scan(uint32_t n_state) {
    if (n_state <= 64) return rfk_scan<WAVE, 64>;
    return n_state <= 128 ? rfk_scan<WAVE, 128> : rfk_scan<WAVE, RFK_MAX_HEAD>;
}

static rf_result rfk_run_scan(const rfk_launching *l) {
    const rf_op *op = l->op;
    rfk_scan_args a;
    a.in = l->b.in;
    a.dt = op->in2 == RF_NONE ? NULL : l->b.in2;
    a.decays = l->p->tables + op->scan.decays;
    a.a = rfk_vector(l->p, op->weight, 0, &a.a_type);
    a.b = rfk_vector(l->p, op->bias, 0, &a.b_type);
    a.skip = rfk_vector(l->p, op->factor, 0, &a.skip_type);
    a.out = l->b.out;
    a.state = (float *)(void *)l->b.k;
    a.rows = l->p->rows;
    const uint32_t n_sequences = rfk_n_sequences(l, &a.ranges);
    a.in_stride = l->b.in_stride;
    a.dt_stride = l->b.in2_stride;
    a.out_stride = l->b.out_stride;
    a.n_heads = op->scan.n_heads;
    a.n_groups = op->scan.n_groups;
    a.head_dim = op->scan.head_dim;
    a.n_state = op->scan.n_state;
    a.n_decays = op->scan.n_decays;
    rfk_scan_kernel kernel = RFK_BY_WAVE(l, (rfk_find_scan<32>(a.n_state)), (rfk_find_scan<64>(a.n_state)));
    const uint32_t wave = l->p->dev->wave, cols = RFK_DELTA_COLS(wave, a.n_state);
    return rfk_enqueue(l, kernel, dim3(rfk_ceil_div((uint64_t)a.n_heads * a.head_dim, 4 * cols), n_sequences), 4 * wave,
                       a);
}

static rf_result rfk_run_compress(const rfk_launching *l) {
    const rf_op *op = l->op;
    rfk_compress_args a;
    a.in = l->b.in;
    a.scores = l->b.in2;
    a.w = rfk_vector(l->p, op->weight, 0, &a.w_type);
    a.out = l->b.out;
    a.state = (float *)(void *)l->b.k;
    a.rows = l->p->rows;
    const uint32_t n_sequences = rfk_n_sequences(l, &a.ranges);
    a.in_stride = l->b.in_stride;
    a.scores_stride = l->b.in2_stride;
    a.out_stride = l->b.out_stride;
    a.n = op->compress.n;
    a.unit = op->compress.unit;
    a.overlap = op->compress.overlap;
    return rfk_enqueue(l, rfk_compress, dim3(rfk_ceil_div(a.n, RFK_BLOCK), n_sequences), RFK_BLOCK, a);
}

static rf_result rfk_run_slice(const rfk_launching *l) {
    const rf_slice_params *s = &l->op->slice;
    rfk_slice_args a;
    a.in = l->b.in + s->at;
    a.out = l->b.out + s->out_at;
    a.in_stride = l->b.in_stride;
    a.out_stride = l->b.out_stride;
    a.n_heads = s->n_heads;
    a.width = s->head_dim;
    a.dim = s->n;
    return rfk_enqueue_early(l, rfk_slice, dim3(rfk_ceil_div((uint64_t)a.n_heads * a.dim, RFK_BLOCK), l->n_rows),
                             RFK_BLOCK, a);
}

/* ---- launches of a decode step ---- */

/* Divide about max_blocks blocks, of `waves` rows at a time, among the products by their bytes. */
static uint32_t rfk_divide_blocks(const rfk_launching *l, rfk_product *part, bool glu, uint32_t waves,
                                  uint32_t max_blocks) {
    uint64_t total = 0, bytes[RFK_PRODUCTS] = {0};
    uint32_t end = 0, n = glu ? 1 : l->together;
    for (uint32_t i = 0; i < n; i++)
        total += bytes[i] = (uint64_t)part[i].n_out * rfk_row_bytes(&l->p->plan->weights[l->op[i].weight]);
    for (uint32_t i = 0; i < RFK_PRODUCTS; i++) {
        if (i < n) {
            uint32_t blocks = (uint32_t)((bytes[i] * max_blocks + total / 2) / total),
                     enough = rfk_ceil_div(part[i].n_out, waves);
            blocks = blocks > enough ? enough : blocks;
            end += blocks ? blocks : 1;
        }
        part[i].end_block = end;
    }
    return end;
}

static void rfk_begin_fused(rf_prepared *p, uint32_t begin, uint32_t end) {
    p->fused_begin = begin;
    p->fused_end = end;
    p->few_for = RF_NONE;
    p->deferred_for = RF_NONE;
    p->moved = RF_NONE;
}

/* Whether launch k makes the post-norm that is the launch before it. In a step of one row it leaves the sum elsewhere,
 * or takes it from there: then a launch of this call has to put it back. */
static bool rfk_takes_post_norm(const rf_prepared *p, const rf_step *step, uint32_t k) {
    const rfk_fused *f = &p->fused[k];
    if (k <= p->fused_begin || k >= p->fused_end || f->kind != RFK_FUSED_MATVEC || f->add == RF_NONE) return false;
    return step->n_rows > 1 || p->moved == p->plan->ops[f->add].out ||
           (p->moved == RF_NONE && f->add_next < p->fused_end);
}

/* Bind that post-norm; *x is what it is added to. */
static rfk_add_args rfk_bind_post_norm(rf_prepared *p, const rf_step *step, const rfk_fused *f, const float **x) {
    rfk_add_args a;
    memset(&a, 0, sizeof a);
    if (!rfk_takes_post_norm(p, step, (uint32_t)(f - p->fused))) return a;
    const rf_op *op = &p->plan->ops[f->add];
    const rfk_bound *b = &p->ops[f->add];
    uint32_t type;
    a.y = b->in;
    a.y_stride = b->in_stride;
    a.w = reinterpret_cast<const float *>(rfk_vector(p, op->weight, 0, &type));
    a.eps = op->norm.eps;
    a.out = b->out;
    if (step->n_rows > 1) return a;
    if (p->moved == RF_NONE) a.out = p->residual;
    else *x = p->residual;
    p->moved = p->moved == RF_NONE ? op->out : RF_NONE;
    return a;
}

/* Bind the deferred norm of the previous launch, and the one for the next. */
static void rfk_bind_deferred_norm(rf_prepared *p, const rfk_fused *f, rfk_fused_args *a) {
    const uint32_t self = (uint32_t)(f - p->fused), next = self + rfk_to_next(p, f);
    if (f->norm_is_deferred && p->deferred_for == self) {
        a->x8 = p->deferred;
        a->squares = p->deferred_squares;
    }
    p->deferred_for = RF_NONE;
    if (f->to_norm == RF_NONE || next >= p->fused_end || (next > self + 1 && !a->sum.n_members)) return;
    a->to_norm = rfk_vector(p, p->plan->ops[f->to_norm].weight, 0, &a->to_norm_type);
    a->to8 = p->deferred;
    a->to_squares = p->deferred_squares;
    p->deferred_for = next;
}

template <int WAVE> static void (*rfk_find_fused_matvec(bool other, uint32_t fragments))(rfk_fused_args) {
#if defined(RFK_NVIDIA)
    (void)other, (void)fragments; /* the caller takes rfk_find_fused_one or rfk_find_pairs */
    return rfk_fused_matvec<WAVE, 1, RFK_SET_FUSED>;
#else
    if (other) return rfk_fused_matvec<WAVE, 1, RFK_SET_OTHER>;
    return fragments == 1 ? rfk_fused_matvec<WAVE, 1, RFK_SET_FUSED>
                          : rfk_fused_matvec<WAVE, RFK_MAX_IN_FLIGHT, RFK_SET_FUSED>;
#endif
}

template <int WAVE> static void (*rfk_find_few(bool other, uint32_t n_cols))(rfk_few_args) {
    if (other) return n_cols <= 8 ? rfk_few<WAVE, true, true> : rfk_few<WAVE, false, true>;
    return n_cols <= 8 ? rfk_few<WAVE, true, false> : rfk_few<WAVE, false, false>;
}

/* Where the launch reads its input: of an op's buffer, or of the rows that have logits in another op's. */
static uint32_t rfk_source_of(const rfk_fused *f) {
    return f->gather != RF_NONE ? f->gather : f->norm != RF_NONE ? f->norm : f->products;
}

/* Which kernel multiplies n_cols columns. Where the plan leaves no room for two blocks of rfk_few_staged on a
 * multiprocessor (mixtures), rfk_few keeps the types that it has code for. */
static int rfk_choose_few(const rf_prepared *p, const rfk_few_way *way, uint32_t n_cols, bool other) {
    if (n_cols > way->max_rows) return RFK_FEW_ANY;
    if (way->kernel == RFK_FEW_STAGED && p->few_way.kernel == RFK_FEW_ANY && !other) return RFK_FEW_ANY;
    return way->kernel;
}

/* Multiply: l has the products of one kernel, `a` the rest. */
static rf_result rfk_run_few_products(rfk_launching *l, rfk_few_args a, int way) {
    rf_prepared *p = l->p;
    rfk_matmul_args products;
    const bool other = rfk_is_other(p->plan, l->index);
    const uint32_t direct = way == RFK_FEW_ANY                      ? 0 /* columns of a block */
                            : a.n_cols > 8 && p->dev->direct > 8    ? 16
                            : a.n_cols > 4 || way == RFK_FEW_STAGED ? 8
                                                                    : 4,
                   rows = RFK_FEW_ROWS * RFK_DIRECT_TILES(direct),
                   tiles = rfk_make_products(l, &products, rows);
    memcpy(a.part, products.part, sizeof a.part);
    a.n_tiles = a.glu ? a.part[0].end_block : tiles;
    rfk_config c = {dim3(), dim3(), 0, rfk_early_carveout(l), l->q->stream, 0};
    c.shared_bytes = rfk_columns_bytes(a.n_in) * a.n_cols + rfk_grid_bytes(a.part, l->together);
    const uint32_t max_cols = way != RFK_FEW_DIRECT                 ? RFK_ROWS_MAX
                              : p->few_way.kernel == RFK_FEW_DIRECT ? 1
                                                                    : RFK_ROWS_MIXTURE;
    if (a.n_cols <= max_cols && c.shared_bytes + 1024 <= p->dev->shared_bytes) {
        const uint32_t waves = RFK_ROWS_BLOCK / p->dev->wave, blocks = RFK_ROWS_RESIDENT * p->dev->info.compute_units;
        c.grid = dim3(rfk_divide_blocks(l, a.part, a.glu, waves, blocks));
        c.block = dim3(RFK_ROWS_BLOCK);
        return rfk_enqueue_config(l, RFK_BY_WAVE(l, rfk_find_rows<32>(other), rfk_find_rows<64>(other)), c, a);
    }
    c.shared_bytes = 0;
    c.grid = dim3(rfk_ceil_div(a.n_cols, RFK_FEW_ROWS), a.n_tiles);
    c.block = dim3(RFK_FEW_WAVES * p->dev->wave);
#if defined(RFK_DIRECT_TYPES)
    if (direct) {
        c.grid.x = rfk_ceil_div(a.n_cols, direct);
        if (a.glu) a.n_tiles = rfk_ceil_div(a.part[0].n_out, rows / 2);
        const uint32_t fit = (direct == 16 ? 1 : 2) * p->dev->info.compute_units / c.grid.x;
        c.grid.y = a.n_tiles < fit ? a.n_tiles : fit;
        c.block = dim3(32 * RFK_DIRECT_WAVES(direct));
        if (way == RFK_FEW_STAGED) {
            c.shared_bytes = rfk_staged_bytes(a.part[0].type, direct);
            return rfk_enqueue_config(l, rfk_staged_kernel(a.part[0].type, direct), c, a);
        }
        c.shared_bytes = direct == 16  ? sizeof(rfk_direct_shared<16>)
                         : direct == 8 ? sizeof(rfk_direct_shared<8>)
                                       : sizeof(rfk_direct_shared<4>);
        return rfk_enqueue_config(l, rfk_direct_kernel(rfk_set_of(a.part), direct), c, a);
    }
#endif
    return rfk_enqueue_config(l, RFK_BY_WAVE(l, rfk_find_few<32>(other, a.n_cols), rfk_find_few<64>(other, a.n_cols)),
                              c, a);
}

/* A fused matvec of several rows: quantize its columns, then multiply. */
static rf_result rfk_run_few(rfk_launching *l, const rfk_fused *f) {
    rf_prepared *p = l->p;
    const rf_op *ops = p->plan->ops;
    const uint32_t n_cols = l->op->rows == RF_ROWS_LOGITS ? l->step->n_logits : l->step->n_rows,
                   source = rfk_source_of(f);
    rfk_few_quantize_args z;
    rfk_few_args a;
    memset(&z, 0, sizeof z);
    memset(&a, 0, sizeof a);
    a.x = p->few[p->few_for == (uint32_t)(f - p->fused)];
    a.from = rfk_at_step(l, p->ops[source].in, ops[source].in);
    a.from_stride = p->ops[source].in_stride;
    a.rows = f->gather != RF_NONE ? p->logit_rows : NULL;
    a.n_in = l->op->matmul.n_in;
    a.n_cols = n_cols;
    a.glu = f->glu != RF_NONE;
    a.is_gelu = a.glu && ops[f->glu].glu.activation == RF_ACT_GELU;
    if (f->norm != RF_NONE) {
        const rf_op *norm = &ops[f->norm];
        a.norm = rfk_vector(p, norm->weight, 0, &a.norm_type);
        a.eps = norm->norm.eps;
        a.norm_stride = p->ops[f->norm].out_stride;
        if (norm->out != ops[source].in && !rfk_is_dead(p->plan, f->first + f->n_ops, norm->out))
            a.norm_out = rfk_at_step(l, p->ops[f->norm].out, norm->out);
    }
    rf_result r = RF_OK;
    if (p->few_for != (uint32_t)(f - p->fused)) {
        rfk_config c = {dim3(a.n_cols, rfk_ceil_div(a.n_in, 4 * RFK_BLOCK)), dim3(RFK_BLOCK), 0, rfk_early_carveout(l),
                        l->q->stream, 0};
        z.x = a.from, z.x_stride = a.from_stride, z.rows = a.rows, z.n = a.n_in, z.to = a.x;
        z.norm = a.norm, z.norm_type = a.norm_type;
        z.add = rfk_bind_post_norm(p, l->step, f, &z.x);
        r = rfk_enqueue_config(l, RFK_BY_WAVE(l, rfk_few_quantize<32>, rfk_few_quantize<64>), c, z);
    }
    for (uint32_t first = 0; r == RF_OK && first < f->n_products; first += l->together) {
        rfk_few_way way;
        l->index = f->products + first;
        l->op = &ops[l->index];
        l->together = rfk_few_run(p, f, first, &way);
        r = rfk_run_few_products(l, a, rfk_choose_few(p, &way, n_cols, rfk_is_other(p->plan, l->index)));
        a.norm_out = NULL; /* the first launch stores it */
    }
    return r;
}

static rf_result rfk_run_fused_matvec(rfk_launching *l, const rfk_fused *f) {
    rf_prepared *p = l->p;
    const rf_op *ops = p->plan->ops;
    const uint32_t source = rfk_source_of(f);
    rfk_matmul_args products;
    rfk_fused_args a;
    memset(&a, 0, sizeof a);
    l->op = &ops[f->products];
    l->index = f->products;
    l->together = f->n_products;
    if (l->step->n_rows > 1) return rfk_run_few(l, f);
    (void)rfk_make_products(l, &products, 1);
    memcpy(a.part, products.part, sizeof a.part);
    if (f->is_int8) a.x8 = p->x8;
    else a.x = rfk_at_step(l, p->ops[source].in, ops[source].in);
    a.add = rfk_bind_post_norm(p, l->step, f, &a.x);
    if (f->norm != RF_NONE) {
        const rf_op *norm = &ops[f->norm];
        a.norm = rfk_vector(p, norm->weight, 0, &a.norm_type);
        a.eps = norm->norm.eps;
        if (norm->out != ops[source].in && !rfk_is_dead(p->plan, f->first + f->n_ops, norm->out))
            a.norm_out = rfk_at_step(l, p->ops[f->norm].out, norm->out);
    }
    a.n_in = l->op->matmul.n_in;
    a.glu = f->glu != RF_NONE;
    a.is_gelu = a.glu && ops[f->glu].glu.activation == RF_ACT_GELU;
    if (f->to_int8) a.to8 = p->x8;
    if (rfk_pushes(p, l->step, f->products) == RFK_PUSHES_FLAGGED) a.sum = rfk_sum_of(l, f->products + 1);
    rfk_bind_deferred_norm(p, f, &a);
    const rf_launch_config *config = &p->stats.configs[p->stats.config];
    const bool other = rfk_is_other(p->plan, f->products);
    const bool pairs = RFK_HAS_PAIRS(p->dev) && (other || config->in_flight == 2);
    const uint32_t waves = RFK_FUSED_BLOCK_OF(p->dev) / p->dev->wave,
                   shared = rfk_columns_bytes(a.n_in) + rfk_grid_bytes(a.part, f->n_products);
    uint32_t per_cu = config->blocks_per_cu;
    if (a.sum.n_members) /* blocks wait for others, so that all must run at once */
        per_cu = 2 * (shared + sizeof(rfk_fused_shared)) > p->dev->shared_bytes ? 1 : RFK_FUSED_RESIDENT;
    a.rows_log2 = a.to8.q || a.sum.n_members ? 5 : 3; /* pairs of rows: 1B and 30B some 1 % slower than 32 in one run */
    const uint32_t blocks = rfk_divide_blocks(l, a.part, a.glu, pairs ? 1u << a.rows_log2 : waves,
                                              per_cu * p->dev->info.compute_units);
    rfk_config c = {dim3(blocks), dim3(pairs ? RFK_PAIRS_BLOCK : RFK_FUSED_BLOCK_OF(p->dev)), shared,
                    rfk_early_carveout(l), l->q->stream, 0};
    void (*kernel)(rfk_fused_args) =
        RFK_BY_WAVE(l, rfk_find_fused_matvec<32>(other, config->in_flight),
                    rfk_find_fused_matvec<64>(other, config->in_flight));
#if defined(RFK_NVIDIA) || defined(ROCMFORGE_HIP_EMU)
    const int set = rfk_row_set_of(a.part, other);
    if (pairs) kernel = rfk_find_pairs(set);
    else if (RFK_HAS_PAIRS(p->dev)) kernel = rfk_find_fused_one(set);
#endif
    return rfk_enqueue_config(l, kernel, c, a);
}

/* Positions that a block takes at a time: T * SLOTS of the kernel that rfk_decode_attention_by chooses. */
static uint32_t rfk_decode_pass(uint32_t cache_type, uint32_t head_dim) {
    const uint32_t lanes = head_dim > 128 ? 32 : head_dim > 64 || cache_type == RF_CACHE_F32 ? 16 : 8;
    return RFK_BLOCK / lanes * (cache_type == RF_CACHE_F32 ? 2 : 4);
}
template <int WAVE, class KV>
static void (*rfk_decode_keys_of(const rf_op *op))(rfk_decode_attention_args) {
    const bool exact = sizeof(KV) == 1; /* rows of Q8_0 have 8 * PER values */
    if (exact && op->attention.head_dim <= 64) return rfk_decode_keys<WAVE, KV, exact ? 8 : 32>;
    return op->attention.head_dim <= 128 ? rfk_decode_keys<WAVE, KV, exact ? 16 : 32> : rfk_decode_keys<WAVE, KV, 32>;
}
template <int WAVE>
static void (*rfk_find_decode_keys(uint32_t cache_type, const rf_op *op))(rfk_decode_attention_args) {
    if (cache_type == RF_CACHE_F32) return rfk_decode_keys_of<WAVE, float>(op);
    return cache_type == RF_CACHE_Q8_0 ? rfk_decode_keys_of<WAVE, rfk_q8>(op) : rfk_decode_keys_of<WAVE, uint16_t>(op);
}
/* Whether each row of the step sees so few positions that its splits are a cluster. */
static bool rfk_is_near(const rf_prepared *p, uint32_t window) {
    return p->dev->clusters && (p->positions <= RFK_DECODE_NEAR || (window && window <= RFK_DECODE_NEAR));
}

/* How many splits of a row have positions in any row of the step, at most. If some of the grid have none, those that
 * have take rfk_decode_min each, whatever the grid: results keep their bits. */
static uint32_t rfk_used_splits(const rf_prepared *p, const rf_attention_params *a) {
    const bool near = rfk_is_near(p, a->window);
    const uint32_t n = a->window && a->window < p->positions ? a->window : p->positions,
                   pass = rfk_decode_pass(p->cache_type, a->head_dim),
                   least = near ? RFK_DECODE_CELLS / 2 : RFK_DECODE_CELLS,
                   most = near && p->decode_splits > RFK_CLUSTER ? RFK_CLUSTER : p->decode_splits,
                   used = rfk_ceil_div(n, pass > least ? pass : least);
    return used < most ? used : most;
}

/* Splits that rows share: as many blocks as fit at once, or one for each row and half as many more for those of long
 * sequences; not more than have positions. */
static uint32_t rfk_shared_splits(const rf_prepared *p, const rf_attention_params *a, uint32_t n_rows) {
    const uint32_t fit = p->decode_splits, most = n_rows + fit / 2 > fit ? n_rows + fit / 2 : fit,
                   used = n_rows * rfk_used_splits(p, a);
    return used < most ? used : most;
}

/* Queries of a column, at most. While a step's clusters leave compute units idle, columns have fewer queries each: a
 * block's time is that of its instructions, which are one query's then. Same bits; other caches have no kernels for
 * fewer. 8B on an H200: 623 -> 645 tok/s, behind 900 tokens 599 -> 621. */
static uint32_t rfk_decode_queries_of(const rf_prepared *p, const rf_attention_params *a, uint32_t n_blocks) {
    const uint32_t group = a->n_heads / a->n_kv_heads;
    uint32_t queries = rfk_ceil_div(group, 1u << rfk_decode_columns_log2(a, RFK_DECODE_GROUP));
    while (n_blocks && p->cache_type == RF_CACHE_F16 && queries > 1 &&
           n_blocks << rfk_decode_columns_log2(a, (queries + 1) / 2) <= p->dev->info.compute_units)
        queries = (queries + 1) / 2;
    return queries;
}

/* Where a launch of several rows leaves its results as int8 for the next one; q NULL: that does not take them. */
static rfk_few_columns rfk_few_for_next(rfk_launching *l, const rfk_fused *f, uint32_t rows) {
    rf_prepared *p = l->p;
    rfk_few_columns few;
    const uint32_t next = (uint32_t)(f - p->fused) + 1;
    memset(&few, 0, sizeof few);
    if (!f->to_int8 || l->n_rows <= 1 || l->n_rows != l->step->n_rows || !rfk_is_fused_step(p, l->step) ||
        next >= p->fused_end || p->plan->ops[p->fused[next].products].rows != rows)
        return few;
    p->few_for = next;
    return p->few[1];
}

static rf_result rfk_run_decode_attention(rfk_launching *l, const rfk_fused *f) {
    rf_prepared *p = l->p;
    const rf_op *ops = p->plan->ops, *op = &ops[f->attention];
    const rf_attention_params *att = &op->attention;
    rfk_decode_attention_args a;
    memset(&a, 0, sizeof a);
    l->op = op;
    l->index = f->attention;
    a.q = p->ops[f->attention].in;
    a.k = p->ops[f->store].in;
    a.v = p->ops[f->store].in2;
    for (int i = 0; i < 2 && f->norms[i] != RF_NONE; i++) {
        a.norm[i] = rfk_vector(p, ops[f->norms[i]].weight, 0, &a.norm_type[i]);
        a.eps[i] = ops[f->norms[i]].norm.eps;
    }
    a.angles = p->angles + f->angles * p->n_attend * RFK_MAX_HEAD;
    a.sinks = rfk_vector(p, op->weight, 0, &a.sinks_type);
    a.k_state = p->ops[f->attention].k;
    a.v_state = p->ops[f->attention].v;
    a.out = p->ops[f->attention].out;
    a.part = p->decode_part;
    a.tickets = p->tickets;
    a.x8 = p->x8;
    if (!f->to_int8 || l->step->n_rows > 1) a.x8.q = NULL;
    a.few = rfk_few_for_next(l, f, op->rows);
    a.rows = p->rows;
    a.n_heads = att->n_heads;
    a.n_kv_heads = att->n_kv_heads;
    a.head_dim = att->head_dim;
    a.n_rot = ops[f->ropes].rope.n_rot;
    a.neox = (ops[f->ropes].flags & RF_OP_NEOX) != 0;
    a.n_cells = p->ops[f->attention].n_cells;
    a.q_stride = p->ops[f->attention].in_stride;
    a.k_stride = p->ops[f->store].in_stride;
    a.v_stride = p->ops[f->store].in2_stride;
    a.out_stride = p->ops[f->attention].out_stride;
    a.is_stored = !p->are_apart;
    a.window = att->window;
    a.scale = att->scale;
    a.softcap = att->softcap * RFK_LOG2_E;
    a.softcap_factor = att->softcap == 0 ? 0 : 2 / att->softcap; /* 2 log2(e) / (softcap log2(e)) */
    a.n_near = p->dev->clusters ? RFK_DECODE_NEAR : 0;
    rfk_config c = {dim3(att->n_kv_heads, 1, l->n_rows), dim3(RFK_BLOCK), 0, rfk_early_carveout(l), l->q->stream, 0};
    if (a.is_stored) { /* no queries yet: column x is KV head x */
        void (*keys)(rfk_decode_attention_args) = RFK_BY_WAVE(l, rfk_find_decode_keys<32>(p->cache_type, op),
                                                              rfk_find_decode_keys<64>(p->cache_type, op));
        const rf_result r = rfk_enqueue_config(l, keys, c, a);
        if (r != RF_OK) return r;
    }
    a.group = att->n_heads / att->n_kv_heads;
    a.n_shared = l->n_rows > RFK_FEW_MAX ? l->n_rows : 0;
    a.is_cluster = !a.n_shared && rfk_is_near(p, a.window);
    a.n_splits = rfk_used_splits(p, att);
    c.grid = dim3(att->n_kv_heads, a.n_splits, l->n_rows);
    if (a.n_shared) c.grid = dim3(c.grid.x, rfk_shared_splits(p, att, l->n_rows));
    a.per_column = rfk_decode_queries_of(p, att, a.is_cluster ? c.grid.x * c.grid.y * c.grid.z : 0);
    a.columns_log2 = rfk_decode_columns_log2(att, a.per_column);
    c.grid.x <<= a.columns_log2;
    /* More clusters than run at once would take a second round, for their blocks without positions, too, and each
     * block waits for its first keys. As many as fit take several splits of a row each instead; of rows beyond a
     * cluster's a long one gets more blocks. 8B on an H200, 16 rows: behind 256 tokens 3.91 -> 3.76 ms, behind 4,000
     * 7.13 -> 6.10; 2 rows behind 8,000 would take 2.89 instead of 2.73. Columns of one or two queries, which have
     * kernels of their own, do not. */
    const uint32_t fit = RFK_DECODE_RESIDENT * p->dev->info.compute_units, columns = c.grid.x * c.grid.z;
    const int near = a.is_cluster, full = !a.n_shared && columns * c.grid.y > (near ? fit : 2 * fit),
              turns = full && p->dev->clusters && a.per_column > 2 && p->cache_type == RF_CACHE_F16;
    if (full) a.is_cluster = 0;
    if (turns && near) c.grid.y = columns < fit ? fit / columns : 1;
    if (turns && !near) {
        a.n_shared = l->n_rows;
        c.grid = dim3(c.grid.x, rfk_shared_splits(p, att, l->n_rows));
    }
    if (a.is_cluster) c.cluster = c.grid.y, c.shared_bytes = c.grid.y * RFK_DECODE_PARTS(a.per_column, att->head_dim);
    void (*kernel)(rfk_decode_attention_args) =
        RFK_BY_WAVE(l, rfk_find_decode_attention<32>(p->cache_type, att->head_dim, a.per_column, turns),
                    rfk_find_decode_attention<64>(p->cache_type, att->head_dim, a.per_column, turns));
    return rfk_enqueue_config(l, kernel, c, a);
}

static rf_result rfk_run_norm_dots(rfk_launching *l, const rfk_fused *f) {
    rf_prepared *p = l->p;
    const rf_op *ops = p->plan->ops, *norm = &ops[f->norm];
    rfk_matmul_args products;
    rfk_norm_dots_args a;
    memset(&a, 0, sizeof a);
    l->op = &ops[f->products];
    l->index = f->products;
    l->together = f->n_products;
    const uint32_t rows = rfk_make_products(l, &products, 1);
    memcpy(a.part, products.part, sizeof a.part);
    a.in = p->ops[f->norm].in;
    a.norm = rfk_vector(p, norm->weight, 0, &a.norm_type);
    a.norm_out = p->ops[f->norm].out;
    a.in_stride = p->ops[f->norm].in_stride;
    a.out_stride = p->ops[f->norm].out_stride;
    a.n_in = norm->norm.n;
    a.eps = norm->norm.eps;
    const uint32_t wave = p->dev->wave, threads = rfk_ceil_div(a.n_in / 4, wave) * wave;
    return rfk_enqueue_early(l, RFK_BY_WAVE(l, rfk_norm_dots<32>, rfk_norm_dots<64>), dim3(rows, l->n_rows),
                             threads < RFK_BLOCK ? threads : RFK_BLOCK, a);
}

static rf_result rfk_run_gated_delta(rfk_launching *l, const rfk_fused *f) {
    rf_prepared *p = l->p;
    const rf_op *norm = &p->plan->ops[f->norm], *gate = &p->plan->ops[f->glu];
    const uint32_t k = (uint32_t)(f - p->fused);
    uint32_t n_sequences;
    if (!rfk_find_op(l, f->first, l)) return RF_OK;
    rfk_delta_args a = rfk_bind_delta(l, &n_sequences);
    a.early = k > p->fused_begin && f[-1].kind == RFK_FUSED_OP && l->op[-1].kind == RF_OP_CONV &&
              l->op[-1].out == l->op->in;
    a.out = p->ops[f->glu].out;
    a.out_stride = p->ops[f->glu].out_stride;
    a.norm = rfk_vector(p, norm->weight, 0, &a.norm_type);
    a.norm_eps = norm->norm.eps;
    a.activation = gate->glu.activation;
    if (f->to_int8 && l->step->n_rows == 1) a.x8 = p->x8;
    a.few = rfk_few_for_next(l, f, gate->rows);
    void (*kernel)(rfk_delta_args) = RFK_BY_WAVE(l, (rfk_delta<32, RFK_GATED_DIM, true>),
                                                 (rfk_delta<64, RFK_GATED_DIM, true>));
    const uint32_t wave = p->dev->wave, waves = (uint32_t)RFK_DELTA_WAVES(wave, true);
    return rfk_enqueue_early(l, kernel, dim3(1, a.n_heads, n_sequences), waves * wave, a);
}

/* Whether launch i of this call makes its own route: the one of the op before it, which is not launched then. */
static int rfk_makes_route(const rf_prepared *p, uint32_t i) {
    return i > p->fused_begin && i < p->fused_end && p->fused[i].kind == RFK_FUSED_UP && p->fused[i].choice != RF_NONE;
}

typedef void (*rfk_mixture_kernel)(rfk_mixture_args);
template <int WAVE> static rfk_mixture_kernel rfk_find_mixture(uint32_t type, bool down) {
#define RFK_QUANTIZED_CASE(TYPE) \
    case TYPE: return down ? rfk_mixture<RFK_BUILT(TYPE), WAVE, true> : rfk_mixture<RFK_BUILT(TYPE), WAVE, false>;
    switch (type) {
        RFK_QUANTIZED_TYPES(RFK_QUANTIZED_CASE)
        RFK_MIXTURE_OWN_TYPES(RFK_QUANTIZED_CASE)
    default: return NULL; /* rfk_match_mixture lets none through */
    }
#undef RFK_QUANTIZED_CASE
}

/* Launch one of the two kernels of a mixture. */
static rf_result rfk_run_mixture(rfk_launching *l, const rfk_fused *f) {
    rf_prepared *p = l->p;
    const rf_op *ops = p->plan->ops, *op = &ops[f->first],
                *shared = f->shared[0] == RF_NONE ? NULL : &ops[f->shared[0]];
    rfk_mixture_args a;
    memset(&a, 0, sizeof a);
    l->op = op;
    l->index = f->first;
    l->b = p->ops[f->first];
    a.e = rfk_make_experts(l);
    const bool down = f->kind == RFK_FUSED_DOWN;
    a.n_experts = p->plan->weights[op->weight].n_experts;
    if (shared) {
        a.shared[0] = rfk_slot_of(p, shared->weight)->w;
        a.n_shared = down ? shared->matmul.n_in : shared->matmul.n_out;
    }
    if (!down) {
        if (rfk_makes_route(p, (uint32_t)(f - p->fused))) a.choose = rfk_make_route(p, f->choice);
        a.w2 = p->table->experts + p->plan->weights[op[1].weight].slot;
        a.bias2 = rfk_vector(p, op[1].bias, 0, &a.bias2_type);
        a.factor2 = rfk_vector(p, op[1].factor, 0, &a.factor2_type);
        a.row2 = op[1].experts.first_row;
        a.activation = op[2].glu.activation;
        if (shared) {
            a.shared[1] = rfk_slot_of(p, shared[1].weight)->w;
            a.shared_out = p->ops[f->shared[0]].out;
            a.shared_stride = p->ops[f->shared[0]].out_stride;
        }
    } else {
        const rf_op *mix = &op[1];
        a.e.out = p->ops[f->first + 1].out;
        a.e.out_stride = p->ops[f->first + 1].out_stride;
        a.scale = mix->mix.scale != 0 ? mix->mix.scale : 1;
        a.accumulate = (mix->flags & RF_OP_ACCUMULATE) != 0;
        if (shared) {
            const float scale = f->share == RF_NONE ? shared->matmul.scale : ops[f->share].mix.scale;
            a.shared_x = p->ops[f->shared[0]].in;
            a.shared_stride = p->ops[f->shared[0]].in_stride;
            a.shared_scale = scale != 0 ? scale : 1;
            if (f->share != RF_NONE) a.share = p->ops[f->share].in2, a.share_stride = p->ops[f->share].in2_stride;
        }
    }
    const uint32_t type = rfk_mixture_type(p->plan, op), max = RFK_MIXTURE_BLOCK(type) / p->dev->wave,
                   values = down ? a.e.n_used * a.e.n_in + a.n_shared : a.e.n_in,
                   results = down ? a.e.n_out : a.e.n_used * a.e.n_out + a.n_shared,
                   units = p->dev->info.compute_units / l->n_rows ? p->dev->info.compute_units / l->n_rows : 1,
                   rounds = rfk_ceil_div(results, units * max),      /* results of a wave */
                   wanted = rfk_ceil_div(results, units * rounds),   /* waves of a block */
                   waves = wanted < 2 ? 2 : wanted;
    const rfk_config c = {dim3(rfk_ceil_div(results, waves * rounds), l->n_rows), dim3(waves * p->dev->wave),
                          rfk_columns_bytes(values), rfk_early_carveout(l), l->q->stream, 0};
    void (*kernel)(rfk_mixture_args) =
        RFK_BY_WAVE(l, rfk_find_mixture<32>(type, down), rfk_find_mixture<64>(type, down));
    return rfk_enqueue_config(l, kernel, c, a);
}

/* How many rows of a step, from its first, take the attention of a decode step, where the plan has it fused: all of few
 * rows, if no sequence has many of them; those before the first sequence that has, such as a prompt, for flash
 * attention would read the keys of each in turn. */
static uint32_t rfk_count_decode_rows(const rf_prepared *p, const rf_step *step) {
    const rf_step_row *rows = step->rows;
    const uint32_t n = step->n_rows;
    uint32_t prompt = 0; /* first row of a sequence with more than RFK_SPLIT_ROWS in a row */
    if (p->events) return 0;
    if (n <= p->n_attend && !rfk_has_runs(rows, n)) return n;
    for (uint32_t t = 0; t < n && t - prompt <= RFK_SPLIT_ROWS; t++)
        if (rows[t].seq != rows[prompt].seq) prompt = t;
    const bool apart = !rfk_has_runs(rows, prompt) && rfk_has_runs(rows + prompt, n - prompt);
    return apart && prompt <= p->n_attend ? prompt : 0;
}

/* The RoPE tables that this call's attention needs: factors of others may not be loaded. */
static rf_result rfk_run_angles(rfk_launching *l) {
    rf_prepared *p = l->p;
    rfk_angles_args a;
    uint32_t max = 0;
    memset(&a, 0, sizeof a);
    a.rows = p->rows;
    for (uint32_t j = p->fused_begin; j < p->fused_end; j++) {
        const uint32_t i = p->fused[j].angles;
        rfk_angles_of *of = i ? &a.second : &a.first;
        if (p->fused[j].kind != RFK_FUSED_ATTENTION || of->n_rot) continue;
        const rf_op *op = p->ropes[i];
        l->op = op;
        l->index = (uint32_t)(op - p->plan->ops);
        of->table = p->tables + op->rope.table;
        of->freqs = rfk_vector(p, op->weight, 0, &of->freqs_type);
        of->out = p->angles + i * p->n_attend * RFK_MAX_HEAD;
        of->n_rot = op->rope.n_rot;
        of->scale = op->rope.scale;
        of->shift = op->rope.shift;
        max = op->rope.n_rot > max ? op->rope.n_rot : max;
    }
    if (max == 0) return RF_OK;
    return rfk_enqueue(l, rfk_angles, dim3(rfk_ceil_div(max / 2, RFK_BLOCK), p->n_ropes, l->n_rows), RFK_BLOCK, a);
}

static rf_result rfk_check_step(const rf_prepared *p, const rf_step *step, rf_error *err) {
    if (step->n_rows == 0 || step->n_rows > p->n_batch || step->n_logits > p->n_logits ||
        step->first_logits_row > p->n_logits - step->n_logits)
        return rfk_fail(err, RF_ERR_ARGUMENT, 0, 0,
                        "hip: a step of %u rows (at most %u), %u logits from %u (at most %u)", step->n_rows,
                        p->n_batch, step->n_logits, step->first_logits_row, p->n_logits);
    for (uint32_t i = 0; i < step->n_rows; i++) {
        const rf_step_row *row = &step->rows[i];
        if (row->seq < 0 || (uint32_t)row->seq >= p->n_seq || row->pos < 0 || (uint32_t)row->pos >= p->n_ctx ||
            (row->token < 0 && !step->embeddings) || row->from > p->n_slots || row->to > p->n_slots)
            return rfk_fail(err, RF_ERR_ARGUMENT, 0, i,
                            "hip: row %u: token %d, sequence %d of %u, position %d of %u, slots %u and %u of %u", i,
                            row->token, row->seq, p->n_seq, row->pos, p->n_ctx, row->from, row->to, p->n_slots);
    }
    for (uint32_t i = 0; i < step->n_chosen; i++)
        if (step->chosen[i] > p->scratch_bytes / sizeof(int32_t))
            return rfk_fail(err, RF_ERR_ARGUMENT, 0, i, "hip: row %u: its token is %u of the scratch memory's %llu", i,
                            step->chosen[i] - 1, (unsigned long long)(p->scratch_bytes / sizeof(int32_t)));
    for (uint32_t i = 0; i < step->n_logits; i++)
        if (step->logit_rows[i] >= step->n_rows)
            return rfk_fail(err, RF_ERR_ARGUMENT, 0, i, "hip: logits %u of row %u, the step has %u", i,
                            step->logit_rows[i], step->n_rows);
    return RF_OK;
}

/* Check that the weights an op reads are loaded. */
static rf_result rfk_check_weights(const rf_prepared *p, const rf_op *op, rf_error *err) {
    const uint32_t weights[3] = {op->kind == RF_OP_EXPERTS ? RF_NONE : op->weight, op->bias,
                                 op->kind == RF_OP_ROPE ? RF_NONE : op->factor};
    for (int k = 0; k < 3; k++)
        if (weights[k] < p->plan->n_weights && !rfk_slot_of(p, weights[k])->ready)
            return rfk_bad_op(p->plan, op, RF_ERR_ARGUMENT, "a weight it reads is not written", err);
    return RF_OK;
}

/* Check that an op's tokens are rows of its weight. */
static rf_result rfk_check_tokens(const rf_prepared *p, const rf_step *step, const rf_op *op, rf_error *err) {
    for (uint32_t t = 0; op->kind == RF_OP_EMBED && t < step->n_rows; t++) {
        int32_t row = op->flags & RF_OP_FIRST       ? 0
                      : op->flags & RF_OP_POSITIONS ? step->rows[t].pos
                                                    : step->rows[t].token;
        const bool any = t < step->n_chosen && step->chosen[t] && !(op->flags & (RF_OP_FIRST | RF_OP_POSITIONS));
        if (any) row = (int32_t)p->plan->n_vocab - 1;
        if (row >= 0 && (uint32_t)row >= p->plan->weights[op->weight].n_rows)
            return rfk_bad_op(p->plan, op, RF_ERR_ARGUMENT, "a token or position is none of the weight's rows", err);
    }
    return RF_OK;
}

/* Write the step's values to the device, unless they are there: a step run segment by segment writes them once. */
static rf_result rfk_write_step_values(rf_prepared *p, rf_queue *q, const rf_step *step, rf_error *err) {
    size_t row_bytes = step->n_rows * sizeof *step->rows, logit_bytes = step->n_logits * sizeof *step->logit_rows;
    const uint32_t turn = p->members ? p->members->turn : 0, epoch = p->members ? p->members->epoch : 0;
    if (step->n_chosen == 0 && p->written_by == q && p->n_rows == step->n_rows && p->n_row_logits == step->n_logits &&
        p->turn == turn && p->epoch == epoch &&
        memcmp(p->host_rows, step->rows, row_bytes) == 0 &&
        (logit_bytes == 0 || memcmp(p->host_logit_rows, step->logit_rows, logit_bytes) == 0))
        return RF_OK;
    p->written_by = NULL;
    uint32_t max = step->n_rows > step->n_logits ? step->n_rows : step->n_logits;
    if (step->n_chosen > max) max = step->n_chosen;
    for (uint32_t first = 0; first < max; first += RFK_STEP_ROWS) {
        rfk_step_args a;
        memset(&a, 0, sizeof a);
        a.rows = p->rows;
        a.ranges = p->ranges;
        a.logit_rows = p->logit_rows;
        a.scratch = p->scratch;
        a.tokens = step->tokens;
        a.now = p->now;
        a.turn = turn;
        a.epoch = epoch;
        a.first = first;
        for (; a.n_rows < RFK_STEP_ROWS && first + a.n_rows < step->n_rows; a.n_rows++) {
            a.row[a.n_rows] = step->rows[first + a.n_rows];
            if (first + a.n_rows < p->n_ranges) a.range[a.n_rows] = p->host_ranges[first + a.n_rows];
        }
        for (; a.n_logits < RFK_STEP_ROWS && first + a.n_logits < step->n_logits; a.n_logits++)
            a.logit_row[a.n_logits] = step->logit_rows[first + a.n_logits];
        for (; a.n_chosen < RFK_STEP_ROWS && first + a.n_chosen < step->n_chosen; a.n_chosen++)
            a.chosen[a.n_chosen] = step->chosen[first + a.n_chosen];
        rf_result r = rfk_check(p->dev, err, rfk_launch(rfk_write_step, dim3(1), dim3(RFK_STEP_ROWS), q->stream, a),
                                "hipLaunchKernel", "a step's values", 0);
        if (r != RF_OK) return r;
        rfk_count(p, 1);
    }
    memcpy(p->host_rows, step->rows, row_bytes);
    if (logit_bytes) memcpy(p->host_logit_rows, step->logit_rows, logit_bytes);
    p->n_rows = step->n_rows;
    p->n_row_logits = step->n_logits;
    p->turn = turn;
    p->epoch = epoch;
    if (step->n_chosen == 0) p->written_by = q;
    return RF_OK;
}

static rf_result rfk_run_kind(rfk_launching *l) {
    switch (l->op->kind) {
    case RF_OP_EMBED: return rfk_run_embed(l);
    case RF_OP_RMS_NORM: return rfk_run_rms_norm(l);
    case RF_OP_MATMUL: return rfk_run_matmul(l);
    case RF_OP_ROPE: return rfk_run_rope(l);
    case RF_OP_KV_STORE: return rfk_run_kv_store(l);
    case RF_OP_ATTENTION: return rfk_run_attention(l);
    case RF_OP_GLU: return rfk_run_glu(l);
    case RF_OP_GATHER: return rfk_run_gather(l);
    case RF_OP_ROUTE: return rfk_run_route(l);
    case RF_OP_EXPERTS: return rfk_run_experts(l);
    case RF_OP_MIX: return rfk_run_mix(l);
    case RF_OP_HEADS: return rfk_run_heads(l);
    case RF_OP_CONV: return rfk_run_conv(l);
    case RF_OP_DELTA: return rfk_run_delta(l);
    case RF_OP_SLICE: return rfk_run_slice(l);
    case RF_OP_SCAN: return rfk_run_scan(l);
    case RF_OP_COMPRESS: return rfk_run_compress(l);
    case RF_OP_INDEX: return rfk_run_index(l);
    case RF_OP_BLEND: return rfk_run_blend(l);
    case RF_OP_SPREAD: return rfk_run_spread(l);
    case RF_OP_HYPER: return rfk_run_hyper(l);
    case RF_OP_MATCH: return rfk_run_match(l);
    case RF_OP_TRIM: return rfk_run_trim(l);
    case RF_OP_SUM: return rfk_run_sum(l);
    default: return rfk_run_argmax(l);
    }
}

static rfk_launching rfk_begin_launch(rf_prepared *p, rf_queue *q, const rf_step *step, rf_error *err) {
    rfk_launching l;
    memset(&l, 0, sizeof l);
    l.p = p;
    l.q = q;
    l.step = step;
    l.err = err;
    l.first_row = p->first_row;
    return l;
}

/* Run op i and those launched with it, at least *n; *n becomes the ops that are done, none of them `end` or later. */
static rf_result rfk_run_ops(rf_prepared *p, rf_queue *q, const rf_step *step, uint32_t i, uint32_t end, uint32_t *n,
                             rf_error *err) {
    rfk_launching l = rfk_begin_launch(p, q, step, err);
    l.end = end;
    if (!rfk_find_op(&l, i, &l)) return RF_OK;
    l.together = l.done = *n;
    const rf_result r = rfk_run_kind(&l);
    *n = l.done;
    return r;
}

/* The ops of a fused launch, as larger steps run them. */
static rf_result rfk_run_each(rf_prepared *p, rf_queue *q, const rf_step *step, const rfk_fused *f, rf_error *err) {
    rf_result r = RF_OK;
    for (uint32_t i = f->first, n; r == RF_OK && i < f->first + f->n_ops; i += n) {
        n = p->ops[i].together;
        r = rfk_run_ops(p, q, step, i, f->first + f->n_ops, &n, err);
    }
    return r;
}

/* Fused attention of the step's first n_decode rows, its ops for the rows behind them. */
static rf_result rfk_run_fused_attention(rf_prepared *p, rf_queue *q, const rf_step *step, const rfk_fused *f,
                                         rf_error *err) {
    rfk_launching l = rfk_begin_launch(p, q, step, err);
    rf_step others = *step;
    others.rows += p->n_decode;
    others.n_rows -= p->n_decode;
    l.n_rows = p->n_decode;
    rf_result r = l.n_rows ? rfk_run_decode_attention(&l, f) : RF_OK;
    p->first_row = p->n_decode;
    if (r == RF_OK && others.n_rows) r = rfk_run_each(p, q, &others, f, err);
    p->first_row = 0;
    return r;
}

/* A launch of a decode step. What is fused for fewer rows runs as ops. */
static rf_result rfk_run_fused(rf_prepared *p, rf_queue *q, const rf_step *step, uint32_t i, rf_error *err) {
    const rfk_fused *f = &p->fused[i];
    rfk_launching l = rfk_begin_launch(p, q, step, err);
    l.n_rows = step->n_rows;
    if (i == p->fused_begin) { /* first of all: attention reads them before rfk_wait_previous */
        rf_result r = rfk_run_angles(&l);
        if (r != RF_OK) return r;
    }
    if (f->kind == RFK_FUSED_MATVEC) {
        const bool waits = rfk_pushes(p, step, f->products) == RFK_PUSHES_FLAGGED, /* for its sum */
                   empty = p->plan->ops[f->products].rows == RF_ROWS_LOGITS && step->n_logits == 0;
        return waits || empty ? RF_OK : rfk_run_fused_matvec(&l, f);
    }
    if (p->plan->ops[f->first].kind == RF_OP_SUM && f->first > 0 &&
        rfk_pushes(p, step, f->first - 1) == RFK_PUSHES_FLAGGED)
        return rfk_run_fused_matvec(&l, f - 1);
    if (f->kind == RFK_FUSED_ATTENTION) return rfk_run_fused_attention(p, q, step, f, err);
    if (f->kind == RFK_FUSED_NORM_DOTS) return rfk_run_norm_dots(&l, f);
    if (f->kind == RFK_FUSED_DELTA && !rfk_has_runs(step->rows, step->n_rows)) return rfk_run_gated_delta(&l, f);
    if (f->kind == RFK_FUSED_UP || f->kind == RFK_FUSED_DOWN) return rfk_run_mixture(&l, f);
    if (f->kind == RFK_FUSED_OP && (rfk_makes_route(p, i + 1) || rfk_takes_post_norm(p, step, i + 1))) return RF_OK;
    return rfk_run_each(p, q, step, f, err);
}

/* Run the ops of segments [first, last). While timing, each op is a launch of its own between two events. */
static rf_result rfk_run_segments(rf_prepared *p, rf_queue *q, uint32_t first, uint32_t last, const rf_step *step,
                                  rf_error *err) {
    rf_result r = RF_OK;
    const rfk_fused *f = p->fused + p->fused_of[first], *none = p->fused + p->fused_of[last];
    rfk_launching l = rfk_begin_launch(p, q, step, err);
    l.n_rows = p->n_decode;
    rfk_begin_fused(p, p->fused_of[first], p->fused_of[last]);
    if (rfk_is_fused_step(p, step)) {
        for (uint32_t i = p->fused_of[first]; r == RF_OK && i < p->fused_of[last]; i++)
            r = rfk_run_fused(p, q, step, i, err);
        return r;
    }
    if (p->n_decode) r = rfk_run_angles(&l);
    for (uint32_t i = p->segments[first], n; r == RF_OK && i < p->segments[last]; i += n) {
        while (f < none && f->first < i) f++;
        if (p->n_decode && f < none && f->first == i && f->kind == RFK_FUSED_ATTENTION) {
            n = f->n_ops;
            r = rfk_run_fused_attention(p, q, step, f, err);
            continue;
        }
        n = p->events ? 1 : p->ops[i].together;
        if (p->events)
            r = rfk_check(p->dev, err, hipEventRecord(p->events[2 * i], q->stream), "hipEventRecord", "timing", i);
        if (r == RF_OK) r = rfk_run_ops(p, q, step, i, p->events ? i + 1 : p->segments[last], &n, err);
        if (r == RF_OK && p->events)
            r = rfk_check(p->dev, err, hipEventRecord(p->events[2 * i + 1], q->stream), "hipEventRecord", "timing",
                          i);
        if (r == RF_OK && p->events) p->timed[i] = 1;
    }
    return r;
}

/* ---- graphs ---- */

/* differ[0] = 1 if a and b differ in any bit.   grid ceil(n / 256)   block 256 */
struct rfk_compare_args {
    const uint32_t *a, *b;
    uint32_t *differ, n;
};
static __global__ void RFK_THREADS(RFK_BLOCK) rfk_compare(rfk_compare_args a) {
    uint32_t i = blockIdx.x * RFK_BLOCK + threadIdx.x;
    if (i < a.n && a.a[i] != a.b[i]) a.differ[0] = 1;
}

/* Whether this is a decode step whose launches can be timed. */
static int rfk_is_decode(const rf_prepared *p, const rf_step *step) {
    return !p->events && step->n_rows == 1 && step->n_logits == 1;
}
static int rfk_has_graphs(const rf_prepared *p) {
    const int graphs = __atomic_load_n(&p->dev->graphs, __ATOMIC_RELAXED);
    if (p->members && graphs != RFK_GRAPHS_ON) return 0; /* a check would wait for members that have no work yet */
    return graphs != RFK_GRAPHS_OFF && !p->no_graphs;
}

/* Whether the step can be replayed: its launches are the same for every token, one row with logits at the start of
 * their buffer. */
static int rfk_can_replay(const rf_prepared *p, const rf_step *step) {
    return rfk_has_graphs(p) && step->first_logits_row == 0 && step->rows[0].token >= 0;
}

static hipError_t rfk_end_capture(rf_queue *q, hipGraphExec_t *exec) {
    hipGraph_t graph = NULL;
    hipError_t e = hipStreamEndCapture(q->stream, &graph);
    if (e != hipSuccess) return e;
#if defined(RFK_NVIDIA)
    e = cudaGraphInstantiate(exec, graph, 0);
#else
    e = hipGraphInstantiate(exec, graph, NULL, NULL, 0);
#endif
    (void)hipGraphDestroy(graph);
    if (e != hipSuccess) *exec = NULL;
#if defined(RFK_NVIDIA)
    else if (cudaGraphUpload(*exec, q->stream) != cudaSuccess) (void)cudaGetLastError(); /* its first launch does it */
#endif
    return e;
}

/* Capture a decode step as graphs; p->n_graphs is 0 if that fails. */
static void rfk_capture(rf_prepared *p, rf_queue *q, const rf_step *step) {
    const uint32_t max =
        __atomic_load_n(&p->dev->graphs, __ATOMIC_RELAXED) == RFK_GRAPHS_ON ? 0xffffffffu : RFK_GRAPH_NODES;
    rf_error ignored;
    rf_result r = RF_OK;
    hipError_t e = hipSuccess;
    memset(&ignored, 0, sizeof ignored);
    rfk_drop_graphs(p);
    p->graph_generation = __atomic_load_n(&p->table->generation, __ATOMIC_RELAXED);
    if (p->graph_config != p->stats.config) p->graphs_checked = 0; /* the driver may be wrong about others */
    p->graph_config = p->stats.config;
    p->graph_positions = p->positions;
    p->near_steps = 0;
    p->tuning.n_steps = 0; /* a graph's first replay is slower */
    p->capturing = 1;
    rfk_begin_fused(p, 0, p->n_fused);
    const uint32_t before_all = p->n_launched;
    for (uint32_t i = 0; r == RF_OK && e == hipSuccess && i < p->n_fused;) {
        uint32_t before = p->n_launched;
        e = p->n_graphs < RFK_MAX_GRAPHS ? hipStreamBeginCapture(q->stream, hipStreamCaptureModeThreadLocal)
                                         : hipErrorOutOfMemory;
        if (e != hipSuccess) break;
        for (; r == RF_OK && i < p->n_fused && p->n_launched - before < max; i++)
            r = rfk_run_fused(p, q, step, i, &ignored);
        e = rfk_end_capture(q, &p->graph[p->n_graphs]);
        p->n_graphs += e == hipSuccess;
    }
    p->capturing = 0;
    p->n_captured = p->n_launched - before_all;
    if (r == RF_OK && e == hipSuccess) return;
    (void)hipGetLastError();
    rfk_drop_graphs(p);
    p->no_graphs = 1;
}

/* The token of a step of one row, which is written; the step itself may overwrite where it was chosen. */
static rf_result rfk_read_token(rf_prepared *p, rf_queue *q, int32_t *token, rf_error *err) {
    rf_result r = RF_OK;
    for (uint32_t i = 0; r == RF_OK && i < 2; i++) r = rfk_staging_wait(q, i, err);
    if (r == RF_OK)
        r = rfk_check(p->dev, err, hipMemcpyAsync(q->staging, &p->rows->token, sizeof *token, hipMemcpyDeviceToHost,
                                                  q->stream), "hipMemcpyAsync", "a token", 0);
    if (r == RF_OK)
        r = rfk_check(p->dev, err, hipStreamSynchronize(q->stream), "hipStreamSynchronize", "a token", 0);
    if (r == RF_OK) memcpy(token, q->staging, sizeof *token);
    return r;
}

/* A step of one row for a replay that is checked: it keeps the recurrent states, because the launches that check it
 * begin with the same ones and then store theirs. */
static rf_result rfk_write_checked_step(rf_prepared *p, rf_queue *q, const rf_step *step, rf_error *err) {
    rf_step kept = *step;
    rf_step_row row = step->rows[0];
    row.to = 0;
    kept.rows = &row;
    return rfk_write_step_values(p, q, &kept, err);
}

/* The logits of a step; NULL: none, or replays are not compared. */
static float *rfk_logits_to_check(const rf_prepared *p) {
    float *logits = NULL;
    if (p->plan->ops[0].layer > 0) return NULL; /* of a part of a plan a second run would add to what the first made */
    for (uint32_t i = 0; p->kept_logits && i < p->plan->n_ops; i++)
        if (p->plan->ops[i].out == p->plan->logits) logits = p->ops[i].out;
    return logits;
}

/* Run the step that was just replayed again by launches: the logits must have the same bits. */
static rf_result rfk_check_replay(rf_prepared *p, rf_queue *q, const rf_step *step, rf_error *err) {
    float *logits = rfk_logits_to_check(p);
    uint32_t differ = 0, n = p->plan->n_vocab;
    rfk_compare_args a = {(const uint32_t *)logits, (const uint32_t *)p->kept_logits, p->differ, n};
    rf_result r = rfk_check(p->dev, err, hipMemsetAsync(p->differ, 0, sizeof differ, q->stream), "hipMemsetAsync",
                            "a check of graphs", 0);
    if (r == RF_OK)
        r = rfk_check(p->dev, err,
                      hipMemcpyAsync(p->kept_logits, logits, (size_t)n * sizeof(float), hipMemcpyDeviceToDevice,
                                     q->stream),
                      "hipMemcpyAsync", "a check of graphs", 0);
    if (r == RF_OK) r = rfk_write_step_values(p, q, step, err);
    if (r == RF_OK) r = rfk_run_segments(p, q, 0, p->n_segments, step, err);
    if (r == RF_OK)
        r = rfk_check(p->dev, err,
                      rfk_launch(rfk_compare, dim3(rfk_ceil_div(n, RFK_BLOCK)), dim3(RFK_BLOCK), q->stream, a),
                      "hipLaunchKernel", "a check of graphs", 0);
    if (r == RF_OK) rfk_count(p, 1);
    for (uint32_t i = 0; r == RF_OK && i < 2; i++) r = rfk_staging_wait(q, i, err);
    if (r == RF_OK)
        r = rfk_check(p->dev, err,
                      hipMemcpyAsync(q->staging, p->differ, sizeof differ, hipMemcpyDeviceToHost, q->stream),
                      "hipMemcpyAsync", "a check of graphs", 0);
    if (r == RF_OK)
        r = rfk_check(p->dev, err, hipStreamSynchronize(q->stream), "hipStreamSynchronize", "a check of graphs", 0);
    if (r != RF_OK) return r;
    memcpy(&differ, q->staging, sizeof differ);
    if (differ) __atomic_store_n(&p->dev->graphs, RFK_GRAPHS_OFF, __ATOMIC_RELAXED);
    p->graphs_checked++;
    return RF_OK;
}

/* Capture a decode step if weights have moved, the config has changed, or the sequence has outgrown the graph; also if
 * one for fewer positions has been enough for some steps.   Returns whether it can be replayed */
static int rfk_ready_graphs(rf_prepared *p, rf_queue *q, const rf_step *step) {
    p->near_steps = p->positions < p->graph_positions ? p->near_steps + 1 : 0;
    if (p->n_graphs == 0 || p->graph_config != p->stats.config || p->positions > p->graph_positions ||
        p->near_steps > RFK_NEAR_STEPS ||
        p->graph_generation != __atomic_load_n(&p->table->generation, __ATOMIC_RELAXED))
        rfk_capture(p, q, step);
    return p->n_graphs > 0;
}

/* Replay a decode step. *replayed = 0: launch it. */
static rf_result rfk_replay(rf_prepared *p, rf_queue *q, const rf_step *step, int *replayed, rf_error *err) {
    *replayed = rfk_ready_graphs(p, q, step);
    rf_result r = RF_OK;
    const int checks = p->graphs_checked < RFK_GRAPH_CHECKS &&
                       __atomic_load_n(&p->dev->graphs, __ATOMIC_RELAXED) == RFK_GRAPHS_CHECKED &&
                       rfk_logits_to_check(p);
    const int times = *replayed && !checks && p->tuning.event[0];
    rf_step known = *step;
    rf_step_row row = step->rows[0];
    if (*replayed && checks && step->n_chosen) {
        r = rfk_read_token(p, q, &row.token, err);
        known.rows = &row;
        known.n_chosen = 0;
    }
    if (r == RF_OK && *replayed && checks) r = rfk_write_checked_step(p, q, &known, err);
    if (times) rfk_before_timed(p, q, 1);
    for (uint32_t i = 0; r == RF_OK && i < p->n_graphs; i++)
        r = rfk_check(p->dev, err, hipGraphLaunch(p->graph[i], q->stream), "hipGraphLaunch", "a decode step", 0);
    if (r == RF_OK && *replayed) {
        p->stats.launches += p->n_captured;
        p->stats.submissions += p->n_graphs;
    }
    if (times) rfk_after_timed(p, q, r);
    if (r == RF_OK && *replayed && checks) r = rfk_check_replay(p, q, &known, err);
    return r;
}

/* ---- graphs of several rows ---- */

/* Whether the launches of a step of several rows depend on their number alone. Only where replays need no check. */
static int rfk_can_replay_few(const rf_prepared *p, const rf_step *step) {
    int ok = __atomic_load_n(&p->dev->graphs, __ATOMIC_RELAXED) == RFK_GRAPHS_ON && !p->no_graphs &&
             rfk_is_fused_step(p, step) && step->n_rows > 1 && step->n_logits == step->n_rows &&
             step->first_logits_row == 0 && p->n_decode == step->n_rows;
    for (uint32_t i = 0; ok && i < step->n_rows; i++) ok = step->rows[i].token >= 0;
    return ok;
}

static void rfk_capture_few(rf_prepared *p, rf_queue *q, const rf_step *step, rfk_few_graph *to) {
    rf_error ignored;
    rf_result r = RF_OK;
    memset(&ignored, 0, sizeof ignored);
    if (hipStreamBeginCapture(q->stream, hipStreamCaptureModeThreadLocal) != hipSuccess) r = RF_ERR_DEVICE;
    const int begun = r == RF_OK;
    const uint32_t before = p->n_launched;
    p->capturing = 1;
    rfk_begin_fused(p, 0, p->n_fused);
    for (uint32_t i = 0; r == RF_OK && i < p->n_fused; i++) r = rfk_run_fused(p, q, step, i, &ignored);
    p->capturing = 0;
    to->n_kernels = p->n_launched - before;
    to->positions = p->positions;
    if (begun && rfk_end_capture(q, &to->exec) == hipSuccess && r == RF_OK) return;
    (void)hipGetLastError();
    if (to->exec) (void)hipGraphExecDestroy(to->exec);
    to->exec = NULL;
    p->no_graphs = 1;
}

/* List the sequences of a step. */
static void rfk_list_ranges(rf_prepared *p, const rf_step *step) {
    p->n_ranges = 0;
    for (uint32_t t = 0; t < step->n_rows; t++) {
        const int32_t seq = step->rows[t].seq;
        uint32_t i = p->range_of[seq]; /* perhaps of an earlier step */
        if (i >= p->n_ranges || step->rows[p->host_ranges[i].first].seq != seq) {
            i = p->range_of[seq] = p->n_ranges++;
            p->host_ranges[i].first = t;
        }
        p->host_ranges[i].end = t + 1;
    }
}

/* What the launches of a step's attention depend on. Positions are rounded up to a power of two: a graph of several
 * rows is captured again when a sequence outgrows it, a graph of one row is for all positions, for a cluster's, or for
 * few. */
static void rfk_begin_rows(rf_prepared *p, const rf_step *step) {
    uint32_t last = 0;
    rfk_list_ranges(p, step);
    p->n_decode = rfk_count_decode_rows(p, step);
    const uint32_t n = p->n_decode ? p->n_decode : step->n_rows;
    p->are_apart = n <= RFK_DECODE_ROWS;
    for (uint32_t i = 0; p->are_apart && i < n; i++)
        for (uint32_t k = 0; k < i; k++) p->are_apart &= step->rows[i].seq != step->rows[k].seq;
    for (uint32_t i = 0; i < n; i++)
        if ((uint32_t)step->rows[i].pos > last) last = (uint32_t)step->rows[i].pos;
    p->positions = RFK_DECODE_CELLS;
    while (p->positions <= last) p->positions *= 2;
    if (step->n_rows == 1)
        p->positions = !p->dev->clusters || last >= RFK_DECODE_NEAR ? 0x80000000u
                       : last >= RFK_DECODE_SHORT                     ? RFK_DECODE_NEAR
                                                                    : RFK_DECODE_SHORT;
}

/* The graph of a step of several rows; NULL: none. Captured when two in a row have as many rows and the same weights.
 */
static const rfk_few_graph *rfk_ready_few(rf_prepared *p, rf_queue *q, const rf_step *step) {
    const uint64_t generation = __atomic_load_n(&p->table->generation, __ATOMIC_RELAXED);
    rfk_few_graph *graph = &p->few_graph[p->are_apart][step->n_rows];
    if (p->few_generation != generation) {
        rfk_drop_few_graphs(p);
        p->few_rows = 0;
    }
    if (graph->exec && graph->positions < p->positions) {
        (void)hipGraphExecDestroy(graph->exec);
        graph->exec = NULL;
    }
    if (!graph->exec && p->few_rows == step->n_rows) rfk_capture_few(p, q, step, graph);
    p->few_generation = generation;
    p->few_rows = step->n_rows;
    return graph->exec ? graph : NULL;
}

static rf_result rfk_replay_few(rf_prepared *p, rf_queue *q, const rf_step *step, int *replayed, rf_error *err) {
    const rfk_few_graph *graph = rfk_ready_few(p, q, step);
    *replayed = graph != NULL;
    if (!*replayed) return RF_OK;
    p->stats.launches += graph->n_kernels;
    p->stats.submissions++;
    return rfk_check(p->dev, err, hipGraphLaunch(graph->exec, q->stream), "hipGraphLaunch", "a step", 0);
}

/* Of a step that failed: before this member waits for what runs, no sum waits for the others any more. */
static void rfk_end_epoch(const rf_prepared *p) {
    if (p->members) *(volatile uint32_t *)p->members->trouble = p->members->epoch;
}

/* After a failure nothing of the step is running, earlier segments included: the caller may free its memory. */
static rf_result rfk_plan_run(rf_prepared *p, rf_queue *q, uint32_t first, uint32_t last, const rf_step *step,
                              rf_ticket *ticket, rf_error *err) {
    rfk_no_ticket(ticket);
    if (first > last || last > p->n_segments)
        return rfk_fail(err, RF_ERR_ARGUMENT, 0, first, "hip: segments %u to %u of %u", first, last, p->n_segments);
    rfk_scope scope(q->dev->index);
    if (scope.error != hipSuccess) {
        rfk_end_epoch(p);
        return rfk_enter_queue(q, scope, err);
    }
    pthread_mutex_lock(&q->submit);
    rf_result r = rfk_check_step(p, step, err);
    const uint64_t generation = 1 + __atomic_load_n(&p->table->generation, __ATOMIC_ACQUIRE);
    for (uint32_t i = p->segments[first]; r == RF_OK && i < p->segments[last]; i++) {
        if (p->checked_generation != generation) r = rfk_check_weights(p, &p->plan->ops[i], err);
        if (r == RF_OK) r = rfk_check_tokens(p, step, &p->plan->ops[i], err);
    }
    if (r == RF_OK && first == 0 && last == p->n_segments) p->checked_generation = generation;
    if (r == RF_OK) rfk_begin_rows(p, step);
    if (r == RF_OK) r = rfk_write_step_values(p, q, step, err);
    if (r == RF_OK && step->known) r = rfk_ticket_record(q, step->known, err);
    const int decode = r == RF_OK && first == 0 && last == p->n_segments && rfk_is_decode(p, step);
    int replayed = decode && rfk_can_replay(p, step);
    if (decode && !p->members) rfk_tune(p);
    const int times = decode && p->tuning.event[0] && !rfk_has_graphs(p);
    if (replayed) r = rfk_replay(p, q, step, &replayed, err);
    if (r == RF_OK && first == 0 && last == p->n_segments && rfk_can_replay_few(p, step))
        r = rfk_replay_few(p, q, step, &replayed, err);
    if (times) rfk_before_timed(p, q, 0);
    if (r == RF_OK && !replayed) r = rfk_run_segments(p, q, first, last, step, err);
    if (times) rfk_after_timed(p, q, r);
    if (r == RF_OK) r = rfk_ticket_record(q, ticket, err);
    if (r != RF_OK) rfk_end_epoch(p);
    r = rfk_settle(q, r);
    pthread_mutex_unlock(&q->submit);
    return r;
}

/* A graph's first launch loads it, too: that is done here. */
static rf_result rfk_plan_ready(rf_prepared *p, rf_queue *q, const rf_step *step, int *whole, rf_error *err) {
    *whole = 0;
    rfk_scope scope(q->dev->index);
    if (scope.error != hipSuccess) return rfk_enter_queue(q, scope, err);
    pthread_mutex_lock(&q->submit);
    const rf_result r = rfk_check_step(p, step, err);
    if (r == RF_OK) rfk_begin_rows(p, step);
    if (r == RF_OK && rfk_is_decode(p, step)) {
        rfk_tune(p);
        *whole = rfk_can_replay(p, step) && rfk_ready_graphs(p, q, step);
    } else if (r == RF_OK && rfk_can_replay_few(p, step)) {
        *whole = rfk_ready_few(p, q, step) != NULL;
    }
    pthread_mutex_unlock(&q->submit);
    return r;
}

static rf_result rfk_times(rf_prepared *p, float *us, uint32_t n, rf_error *err) {
    rf_dev *d = p->dev;
    uint32_t n_ops = p->plan->n_ops;
    rfk_scope scope(d->index);
    if (scope.error != hipSuccess) return rfk_check_scope(d, scope, err);
    rf_result r = RF_OK;
    if (us) {
        for (uint32_t i = 0; i < n; i++) {
            float ms = 0;
            us[i] = 0;
            if (!p->events || i >= n_ops || !p->timed[i] || r != RF_OK) continue;
            r = rfk_check(d, err, hipEventSynchronize(p->events[2 * i + 1]), "hipEventSynchronize", "timing", i);
            if (r == RF_OK)
                r = rfk_check(d, err, hipEventElapsedTime(&ms, p->events[2 * i], p->events[2 * i + 1]),
                              "hipEventElapsedTime", "timing", i);
            us[i] = ms * 1e3f;
        }
        return r;
    }
    rfk_stop_timing(p);
    if (n == 0) return RF_OK;
    p->events = (hipEvent_t *)rfk_alloc(&d->allocator, 2 * (uint64_t)n_ops, sizeof *p->events, "timing", err);
    p->timed = (uint8_t *)rfk_alloc(&d->allocator, n_ops, 1, "timing", err);
    if (!p->events || !p->timed) r = RF_ERR_MEMORY;
    for (uint32_t i = 0; r == RF_OK && i < 2 * n_ops; i++)
        r = rfk_check(d, err, hipEventCreateWithFlags(&p->events[i], hipEventDefault), "hipEventCreateWithFlags",
                      "timing", i / 2);
    if (r != RF_OK) rfk_stop_timing(p);
    return r;
}

/* ==== 8 Table ============================================================================================== >>table
 * The device API of this file. Members in the order of their declaration: C++11 has no designated initializers. */

extern "C" const rf_device_api *rocmforge_hip_api(void) {
    static const rf_device_api api = {
        sizeof(rf_device_api), RF_DEVICE_API_VERSION, sizeof(rf_op), sizeof(rf_step), "hip",
        rfk_device_list, rfk_device_open, rfk_device_close, rfk_device_info,
        rfk_host_create, rfk_host_release, rfk_host_share, rfk_peer_open, rfk_mem_create, rfk_mem_release,
        rfk_shared_create,
        rfk_queue_create, rfk_queue_release,
        rfk_table_create, rfk_table_release, rfk_weight_layout, rfk_weight_write, rfk_weight_clear,
        rfk_mem_write, rfk_mem_read, rfk_mem_copy, rfk_mem_fill, rfk_mem_sum, rfk_draw_tokens,
        rfk_ticket_done, rfk_ticket_wait, rfk_queue_after,
        rfk_op_supported, rfk_plan_bytes, rfk_plan_prepare, rfk_plan_run, rfk_plan_ready, rfk_plan_release,
        rfk_plan_stats, rfk_times,
#if defined(ROCMFORGE_RCCL)
        rfk_rank_id, rfk_rank_join, rfk_rank_leave, rfk_transfer, rfk_mem_export, rfk_mem_import, rfk_mem_forget,
#else
        NULL, NULL, NULL, NULL, NULL, NULL, NULL,
#endif
        RFK_MEMBER_FLAGGED,
    };
    return &api;
}
