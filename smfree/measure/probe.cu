// What does measuring itself cost, how fast does the SM clock run, and how is the L2 emptied?
//
// empty_kernel: nothing; its time is the floor of every launch.
// clock_probe:  one thread watches %globaltimer for spin_ns; out = {SM cycles, ns}. Two clocks of one SM only. Starts and
//               ends on a tick of %globaltimer, which can be 1 us long.
// read_sweep:   reads one word of every step_bytes of a buffer, so that the L2 holds clean lines of it afterwards
//               (a memset would leave dirty lines, whose write-back the next kernel pays for). sink is null: a store
//               that never happens. Without it ptxas sees that nobody uses the words and drops the loads.
// Minimum architecture: sm_80. Compile: nvcc -cubin -arch=sm_80 probe.cu

typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ __forceinline__ u64 clock64_now() {
  u64 value;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(value)::"memory");
  return value;
}

static __device__ __forceinline__ u64 globaltimer_now() {
  u64 value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value)::"memory");
  return value;
}

extern "C" __global__ void empty_kernel() {}

extern "C" __global__ void clock_probe(u64* out, u64 spin_ns) {
  u64 start_ns = globaltimer_now();
  u64 now_ns = start_ns;
  while (now_ns == start_ns) {
    now_ns = globaltimer_now();
  }
  u64 cycles = clock64_now();
  start_ns = now_ns;
  while (now_ns - start_ns < spin_ns) {
    now_ns = globaltimer_now();
  }
  out[0] = clock64_now() - cycles;
  out[1] = now_ns - start_ns;
}

extern "C" __global__ void read_sweep(const unsigned char* buffer, u64 num_bytes, u32 step_bytes, u32* sink) {
  u32 sum = 0;
  u64 stride = (u64)gridDim.x * blockDim.x * step_bytes;
  for (u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * step_bytes; at < num_bytes; at += stride) {
    u32 word;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(word) : "l"(buffer + at) : "memory");
    sum ^= word;
  }
  if (sink) {
    *sink = sum;
  }
}
