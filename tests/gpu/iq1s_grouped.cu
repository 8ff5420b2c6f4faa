// Parity and time of MUL_MAT_ID with IQ1_S experts on a GPU, driven through ggml's own entry of its quantized matrix product.
//
//   iq1s_grouped parity   for each shape: error against an FP64 product of the dequantized weights and the unquantized activations,
//                         and a hash of all output bits
//   iq1s_grouped time     microseconds of one operation (sorting and quantizing included): medians over launches; no part of the
//                         weights is in the cache when a launch begins
//   iq1s_grouped sweep    the same from 1 to 4096 tokens
//   iq1s_grouped one [tokens [repeats]]   one shape, for a profiler
//   iq1s_grouped model parity|time        both at the model's shapes alone: 512, 1024 and 2048 tokens, uniform and skewed
//   iq1s_grouped rows     parity for numbers of rows that are no multiple of a tile's
//   iq1s_grouped small    a few operations on small shapes, for compute-sanitizer
//
// iq1s_grouped.sh builds it against a source tree. The switch of a patch set is an environment variable, so each run shows one path.

#include "common.cuh"

#define GGML_COMMON_DECL_CUDA
#define GGML_COMMON_IMPL_CUDA
#include "ggml-common.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

static void check(cudaError_t error, int line) {
    if (error != cudaSuccess) {
        fprintf(stderr, "line %d: %s\n", line, cudaGetErrorString(error));
        exit(1);
    }
}
#define CHECK(x) check(x, __LINE__)

// --- what the operation needs of ggml, so that few of its files are compiled ---------------------------------------------

extern "C" void ggml_abort(const char * file, int line, const char * text, ...) {
    fprintf(stderr, "%s:%d: %s\n", file, line, text);
    abort();
}
extern "C" void ggml_log_internal(enum ggml_log_level, const char * format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
}
extern "C" int64_t ggml_time_us() { return 0; }
extern "C" size_t  ggml_type_size(ggml_type type) { return type == GGML_TYPE_IQ1_S ? sizeof(block_iq1_s) : 4; }
extern "C" size_t  ggml_element_size(const ggml_tensor * t) { return ggml_type_size(t->type); }
extern "C" size_t  ggml_nbytes(const ggml_tensor *) { return 0; }
extern "C" bool    ggml_is_contiguously_allocated(const ggml_tensor *) { return true; }
extern "C" ggml_backend_buffer_usage ggml_backend_buffer_get_usage(ggml_backend_buffer_t) { return GGML_BACKEND_BUFFER_USAGE_WEIGHTS; }
extern "C" size_t  ggml_backend_buffer_get_alloc_size(ggml_backend_buffer_t, const ggml_tensor *) { return 0; }

void ggml_cuda_error(const char * statement, const char *, const char * file, int line, const char * text) {
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, statement, text);
    abort();
}
int  ggml_cuda_get_device() { return 0; }
void ggml_cuda_set_device(int) {}
const ggml_cuda_device_info & ggml_cuda_info() {
    static const ggml_cuda_device_info info = [] {
        ggml_cuda_device_info made = {};
        cudaDeviceProp        found;
        CHECK(cudaGetDeviceProperties(&found, 0));
        made.device_count         = 1;
        made.devices[0].cc        = found.major * 100 + found.minor * 10;
        made.devices[0].nsm       = found.multiProcessorCount;
        made.devices[0].smpb      = found.sharedMemPerBlock;
        made.devices[0].smpbo     = found.sharedMemPerBlockOptin;
        made.devices[0].warp_size = 32;
        return made;
    }();
    return info;
}

// blocks are kept and given out again, first fit
struct keeping_pool : ggml_cuda_pool {
    std::vector<std::pair<void *, size_t>> kept;
    void * alloc(size_t size, size_t * actual) override {
        for (auto it = kept.begin(); it != kept.end(); ++it) {
            if (it->second >= size && it->second < 2 * size + 4096) {
                void * found = it->first;
                *actual      = it->second;
                kept.erase(it);
                return found;
            }
        }
        void * made;
        CHECK(cudaMalloc(&made, size));
        *actual = size;
        return made;
    }
    void free(void * pointer, size_t size) override { kept.emplace_back(pointer, size); }
    ~keeping_pool() override {
        for (auto & block : kept) {
            cudaFree(block.first);
        }
    }
};
std::unique_ptr<ggml_cuda_pool> ggml_backend_cuda_context::new_pool_for_device(int, int) { return std::make_unique<keeping_pool>(); }
ggml_backend_cuda_context::~ggml_backend_cuda_context() {}

void ggml_cuda_mul_mat_q(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * ids,
                         ggml_tensor * dst);

// the products of the other types, which mmq.cu names and nothing here calls
struct mmq_args;
template <ggml_type type, ggml_prec prec = GGML_PREC_Q8> void mul_mat_q_case(ggml_backend_cuda_context &, const mmq_args &, cudaStream_t) {
    abort();
}
#define ABSENT(...) template void mul_mat_q_case<__VA_ARGS__>(ggml_backend_cuda_context &, const mmq_args &, cudaStream_t);
ABSENT(GGML_TYPE_Q1_0) ABSENT(GGML_TYPE_Q2_0) ABSENT(GGML_TYPE_Q4_0) ABSENT(GGML_TYPE_Q4_1) ABSENT(GGML_TYPE_Q5_0) ABSENT(GGML_TYPE_Q5_1)
ABSENT(GGML_TYPE_Q8_0) ABSENT(GGML_TYPE_Q2_K) ABSENT(GGML_TYPE_Q3_K) ABSENT(GGML_TYPE_Q4_K) ABSENT(GGML_TYPE_Q5_K) ABSENT(GGML_TYPE_Q6_K)
ABSENT(GGML_TYPE_IQ2_XXS) ABSENT(GGML_TYPE_IQ2_XS) ABSENT(GGML_TYPE_IQ2_S) ABSENT(GGML_TYPE_IQ3_XXS) ABSENT(GGML_TYPE_IQ3_S)
ABSENT(GGML_TYPE_IQ4_XS) ABSENT(GGML_TYPE_IQ4_NL) ABSENT(GGML_TYPE_MXFP4) ABSENT(GGML_TYPE_NVFP4)
ABSENT(GGML_TYPE_MXFP4, GGML_PREC_Q4) ABSENT(GGML_TYPE_NVFP4, GGML_PREC_Q4)

// --- data -----------------------------------------------------------------------------------------------------------------

static __device__ uint64_t mix(uint64_t z) { // splitmix64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

__global__ void fill_weights(block_iq1_s * p, int64_t n) {
    for (int64_t i = blockIdx.x * (int64_t) blockDim.x + threadIdx.x; i < n; i += (int64_t) gridDim.x * blockDim.x) {
        uint16_t * words = (uint16_t *) p[i].qs;
        for (int w = 0; w < 24; w++) { // qs, then qh
            words[w] = mix(i * 24 + w + 0x9E3779B97F4A7C15ull) >> 17;
        }
        const uint64_t z = mix(i * 0xD1B54A32D192ED03ull + 7);
        float d = 0.001f + 0.01f * ((z >> 40) * (1.0f / 16777216.0f));
        if (z % 997 == 0) {
            d = 0.0f;
        }
        p[i].d = z % 2 == 0 ? d : -d;
    }
}

__global__ void fill_activations(float * p, int64_t n, int k) {
    for (int64_t i = blockIdx.x * (int64_t) blockDim.x + threadIdx.x; i < n; i += (int64_t) gridDim.x * blockDim.x) {
        const uint64_t z = mix(i * 0x9E3779B97F4A7C15ull + 3);
        const float u = ((z & 0xFFFF) + (z >> 16 & 0xFFFF) + (z >> 32 & 0xFFFF) + (z >> 48)) * (1.0f / 65536.0f) - 2.0f; // bell-shaped
        const int64_t block = i / 32;
        p[i] = block % 61 == 0 ? 0.0f : mix(block) % 29 == 0 ? 40.0f * u : u; // some blocks of zeros, some of outliers
        GGML_UNUSED(k);
    }
}

struct shape {
    int  experts, used, rows, k, tokens;
    bool shared; // all experts of a token see the same activations (up and gate), or each its own (down)
    bool skewed;
};

static std::vector<int32_t> route(const shape & s, int & largest) {
    std::mt19937_64                       random(1234);
    std::uniform_real_distribution<float> uniform(1e-7f, 1.0f);
    std::vector<int32_t>                  ids;
    std::vector<int>                      count(s.experts), order(s.experts), name(s.experts);
    std::vector<float>                    key(s.experts);
    for (int e = 0; e < s.experts; e++) {
        name[e] = e;
    }
    std::shuffle(name.begin(), name.end(), random);
    for (int t = 0; t < s.tokens; t++) {
        for (int e = 0; e < s.experts; e++) {
            order[e] = e;
            key[e]   = -std::log(uniform(random)) * (s.skewed ? e + 12.0f : 1.0f); // chosen with probability about 1/(e + 12)
        }
        std::partial_sort(order.begin(), order.begin() + s.used, order.end(), [&](int a, int b) { return key[a] < key[b]; });
        for (int i = 0; i < s.used; i++) {
            ids.push_back(name[order[i]]);
            count[name[order[i]]]++;
        }
    }
    largest = *std::max_element(count.begin(), count.end());
    return ids;
}

// one warp for each row of one column
__global__ void reference(const block_iq1_s * x, const float * y, const int32_t * ids, double * out, shape s, int column) {
    const int row    = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int lane   = threadIdx.x % 32;
    const int expert = ids[column];
    const block_iq1_s * w = x + ((int64_t) expert * s.rows + row) * (s.k / 256);
    const float *       v = y + (int64_t) (s.shared ? column / s.used : column) * s.k;
    double sum = 0.0;
    for (int i = lane; i < s.k / 8; i += 32) {
        const block_iq1_s & b  = w[i / 32];
        const int           in = i % 32; // group of 8 in the block
        const uint32_t      qh = b.qh[in / 4];
        const uint32_t      grid  = iq1s_grid_gpu[b.qs[in] | (qh >> (3 * (in % 4)) & 7) << 8];
        const double        scale = (double) __half2float(b.d) * (2 * (qh >> 12 & 7) + 1);
        const double        shift = (qh & 0x8000 ? -1.0 : 1.0) * 0.125 - 1.0;
        for (int l = 0; l < 8; l++) {
            const int value = grid >> (8 * (l % 4) + 4 * (l / 4)) & 0xF;
            sum += scale * (value + shift) * v[8 * i + l];
        }
    }
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
    }
    if (lane == 0) {
        out[row] = sum;
    }
}

static ggml_tensor tensor(ggml_type type, void * data, size_t size, int64_t block, std::vector<int64_t> ne) {
    ggml_tensor t = {};
    t.type  = type;
    t.data  = data;
    t.nb[0] = size;
    t.nb[1] = size * (ne[0] / block);
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        t.ne[i] = ne[i];
        if (i > 1) {
            t.nb[i] = t.nb[i - 1] * ne[i - 1];
        }
    }
    return t;
}

static ggml_backend_cuda_context & context() {
    static auto * made = new ggml_backend_cuda_context(0);
    if (made->streams[0][0] == nullptr) {
        CHECK(cudaStreamCreateWithFlags(&made->streams[0][0], cudaStreamNonBlocking));
    }
    return *made;
}

struct operation {
    shape       s;
    char *      x = nullptr;
    float *     y = nullptr;
    float *     out = nullptr;
    int32_t *   ids = nullptr;
    int64_t     n_out;
    int         largest;
    ggml_tensor tx, ty, ti, to;

    // the weights of another operation are taken over where they are given
    operation(const shape & s, char * weights) : s(s), x(weights), n_out((int64_t) s.rows * s.used * s.tokens) {
        const int64_t n_y = (int64_t) s.k * s.tokens * (s.shared ? 1 : s.used);
        CHECK(cudaMalloc(&y, n_y * sizeof(float)));
        CHECK(cudaMalloc(&out, n_out * sizeof(float)));
        CHECK(cudaMemset(out, 0xFF, n_out * sizeof(float))); // NaN: what is not written shows
        const auto routes = route(s, largest);
        CHECK(cudaMalloc(&ids, routes.size() * sizeof(int32_t)));
        CHECK(cudaMemcpy(ids, routes.data(), routes.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
        fill_activations<<<1024, 256>>>(y, n_y, s.k);
        CHECK(cudaDeviceSynchronize());
        tx = tensor(GGML_TYPE_IQ1_S, x, sizeof(block_iq1_s), 256, { s.k, s.rows, s.experts, 1 });
        ty = tensor(GGML_TYPE_F32, y, 4, 1, { s.k, s.shared ? 1 : s.used, s.tokens, 1 });
        ti = tensor(GGML_TYPE_I32, ids, 4, 1, { s.used, s.tokens, 1, 1 });
        to = tensor(GGML_TYPE_F32, out, 4, 1, { s.rows, s.used, s.tokens, 1 });
        to.src[0] = &tx;
    }
    operation(const operation &) = delete;
    ~operation() {
        cudaFree(y);
        cudaFree(out);
        cudaFree(ids);
    }
    void run() { ggml_cuda_mul_mat_q(context(), &tx, &ty, &ti, &to); }
};

static char * weights(int64_t experts, int64_t rows, int64_t k) {
    const int64_t n = experts * rows * k / 256;
    char *        p;
    CHECK(cudaMalloc(&p, n * sizeof(block_iq1_s) + 4096));
    fill_weights<<<4096, 256>>>((block_iq1_s *) p, n);
    CHECK(cudaDeviceSynchronize());
    return p;
}

static void parity(const shape & s, char * x) {
    operation op(s, x);
    op.run();
    CHECK(cudaDeviceSynchronize());
    std::vector<float> out(op.n_out);
    CHECK(cudaMemcpy(out.data(), op.out, op.n_out * sizeof(float), cudaMemcpyDeviceToHost));
    uint64_t hash = 0xCBF29CE484222325ull;
    int64_t  unwritten = 0;
    for (int64_t i = 0; i < op.n_out; i++) {
        uint32_t bits;
        memcpy(&bits, &out[i], 4);
        hash = (hash ^ bits) * 0x100000001B3ull;
        unwritten += bits == 0xFFFFFFFF;
    }
    double * wanted;
    CHECK(cudaMalloc(&wanted, s.rows * sizeof(double)));
    std::vector<double> w(s.rows);
    double square = 0, error = 0, worst = 0;
    const int n_columns = s.used * s.tokens, step = std::max(1, n_columns / 64);
    for (int c = 0; c < n_columns; c += step) {
        reference<<<s.rows / 8, 256>>>((const block_iq1_s *) op.x, op.y, op.ids, wanted, s, c);
        CHECK(cudaMemcpy(w.data(), wanted, s.rows * sizeof(double), cudaMemcpyDeviceToHost));
        for (int r = 0; r < s.rows; r++) {
            const double e = std::abs(out[(int64_t) c * s.rows + r] - w[r]);
            square += w[r] * w[r];
            error += e * e;
            worst = e <= worst ? worst : e; // a NaN stays
        }
    }
    cudaFree(wanted);
    const double n = (double) s.rows * ((n_columns + step - 1) / step);
    printf("%4d/%-2d %4dx%4d %s%-7s n=%-5d largest=%-4d relative rms error %.9f worst/rms %.5f hash %016llx", s.experts, s.used, s.rows, s.k,
           s.shared ? "shared " : "own    ", s.skewed ? "skewed" : "uniform", s.tokens, op.largest, std::sqrt(error / square),
           worst / std::sqrt(square / n), (unsigned long long) hash);
    if (unwritten > 0) {
        printf(" NOT WRITTEN: %lld of %lld", (long long) unwritten, (long long) op.n_out);
    }
    printf("\n");
    fflush(stdout);
}

static void time_of(const shape & s, char * x, int repeats) {
    operation op(s, x);
    cudaStream_t stream = context().stream();
    std::vector<float> us;
    cudaEvent_t before, after;
    CHECK(cudaEventCreate(&before));
    CHECK(cudaEventCreate(&after));
    for (int i = 0; i < repeats + 2; i++) {
        CHECK(cudaEventRecord(before, stream));
        op.run();
        CHECK(cudaEventRecord(after, stream));
        CHECK(cudaEventSynchronize(after));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, before, after));
        if (i >= 2) {
            us.push_back(1000 * ms);
        }
    }
    std::sort(us.begin(), us.end());
    printf("%4d/%-2d %4dx%4d %s%-7s n=%-5d largest=%-4d %9.1f us (%.1f to %.1f)\n", s.experts, s.used, s.rows, s.k, s.shared ? "shared " : "own    ",
           s.skewed ? "skewed" : "uniform", s.tokens, op.largest, us[us.size() / 2], us.front(), us.back());
    fflush(stdout);
}

int main(int argc, char ** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "small") {
        char * x = weights(8, 1024, 512);
        for (int tokens : { 1, 5, 40, 200 }) {
            for (bool skewed : { false, true }) {
                parity({ 8, 2, 512, 1024, tokens, true, skewed }, x);
                parity({ 8, 2, 1024, 512, tokens, false, skewed }, x);
            }
        }
        parity({ 4, 1, 512, 512, 33, true, false }, x);
        return 0;
    }
    if (mode == "rows") {
        char * x = weights(8, 1920, 1024);
        for (int rows : { 8, 248, 256, 264, 1000, 1152, 1920 }) { // below, at and above a tile; multiples of 128 and not
            for (int tokens : { 1, 5, 40, 100, 600 }) {
                parity({ 8, 2, rows, 1024, tokens, true, false }, x);
                parity({ 8, 2, rows, 768, tokens, false, true }, x);
            }
        }
        return 0;
    }
    char * x = weights(896, 3584, 3072); // both orientations hold as much
    if (mode == "model") {
        const bool timed = argc > 2 && std::string(argv[2]) == "time";
        const auto both  = [&](const shape & s) {
            if (timed) {
                time_of(s, x, 7);
            } else {
                parity(s, x);
            }
        };
        for (int tokens : { 512, 1024, 2048 }) {
            for (bool skewed : { false, true }) {
                both({ 896, 16, 3072, 3584, tokens, true, skewed });
                both({ 896, 16, 3584, 3072, tokens, false, skewed });
            }
        }
        both({ 568, 16, 3072, 3584, 2048, true, false });
        both({ 568, 16, 3584, 3072, 2048, false, false });
    } else if (mode == "parity") {
        for (int tokens : { 2048, 512, 64 }) {
            for (bool skewed : { false, true }) {
                parity({ 896, 16, 3072, 3584, tokens, true, skewed }, x);
                parity({ 896, 16, 3584, 3072, tokens, false, skewed }, x);
            }
        }
        parity({ 568, 16, 3072, 3584, 2048, true, false }, x);
        parity({ 896, 16, 3072, 3584, 4096, true, false }, x);
        for (int tokens : { 1, 8, 33, 512 }) {
            parity({ 28, 2, 3072, 3584, tokens, true, false }, x);
            parity({ 28, 2, 3584, 3072, tokens, false, false }, x);
        }
    } else if (mode == "time") {
        for (bool skewed : { false, true }) {
            time_of({ 896, 16, 3072, 3584, 2048, true, skewed }, x, 9);
            time_of({ 896, 16, 3584, 3072, 2048, false, skewed }, x, 9);
        }
        for (int tokens : { 512, 1024, 4096 }) {
            time_of({ 896, 16, 3072, 3584, tokens, true, false }, x, 7);
        }
        time_of({ 568, 16, 3072, 3584, 2048, true, false }, x, 9);
        time_of({ 568, 16, 3584, 3072, 2048, false, false }, x, 9);
    } else if (mode == "one") {
        time_of({ 896, 16, 3072, 3584, argc > 2 ? atoi(argv[2]) : 2048, true, false }, x, argc > 3 ? atoi(argv[3]) : 1);
    } else if (mode == "sweep") {
        for (int tokens : { 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 768, 1536, 3072, 4096 }) {
            for (bool skewed : { false, true }) {
                time_of({ 896, 16, 3072, 3584, tokens, true, skewed }, x, 7);
                time_of({ 896, 16, 3584, 3072, tokens, false, skewed }, x, 7);
            }
        }
        for (int tokens : { 1, 8, 32, 128, 512, 2048 }) {
            time_of({ 28, 2, 3072, 3584, tokens, true, false }, x, 15);
            time_of({ 28, 2, 3584, 3072, tokens, false, false }, x, 15);
        }
    } else {
        fprintf(stderr, "iq1s_grouped parity|time|sweep|one|model|rows|small\n");
        return 2;
    }
    return 0;
}
