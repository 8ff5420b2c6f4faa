// Parity and time of the CUDA gated delta net with a per-channel gate (KDA) at head size 128, driven through ggml's own op.
//
//   kda_parity parity   errors against an FP64 reference, tokens given at once and in pieces, and the bits of the one against the
//                       other (which the chunked kernel alone may change: where its chunks begin depends on the pieces)
//   kda_parity time     microseconds of one launch: medians of replayed CUDA graphs, 96 heads (and 264: as many for each
//                       multiprocessor of an H200 as 96 are on 48), inputs that stay in the cache and inputs that do not;
//                       `kda_parity time HEADS TOKENS` that one size alone, for a profiler
//   kda_parity small    a few launches of every variant, for compute-sanitizer
//
// kda_parity.sh builds it against a source tree. The switch of a patch set is an environment variable, so each run shows one path:
// GGML_CUDA_K3_KDA_BLOCKED=1, GGML_CUDA_K3_KDA_CHUNKED=1, GGML_CUDA_K3_FLASHKDA=1 with GGML_CUDA_K3_FLASHKDA_FUSED=1, or none for
// the existing kernel.

#include "gated_delta_net.cuh"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

static void check(cudaError_t error, int line) {
    if (error != cudaSuccess) {
        fprintf(stderr, "line %d: %s\n", line, cudaGetErrorString(error));
        exit(1);
    }
}
#define CHECK(x) check(x, __LINE__)

// --- what the op needs of ggml, so that two of its files are all that is compiled ---------------------------------------

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
extern "C" bool ggml_is_contiguous(const ggml_tensor * t) {
    size_t next = sizeof(float);
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        if (t->ne[i] != 1 && t->nb[i] != next) {
            return false;
        }
        next *= t->ne[i];
    }
    return true;
}
extern "C" bool ggml_is_contiguous_rows(const ggml_tensor * t) { return t->nb[0] == sizeof(float); }
extern "C" bool ggml_are_same_stride(const ggml_tensor * a, const ggml_tensor * b) { return !memcmp(a->nb, b->nb, sizeof(a->nb)); }

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
ggml_backend_cuda_context::~ggml_backend_cuda_context() {}

// Keeps what it gave: a captured graph uses it again.
struct kept_pool : public ggml_cuda_pool {
    std::multimap<size_t, void *> unused;

    void * alloc(size_t size, size_t * actual) override {
        const auto found = unused.lower_bound(size);
        if (found != unused.end()) {
            void * pointer = found->second;
            *actual        = found->first;
            unused.erase(found);
            return pointer;
        }
        void * pointer;
        CHECK(cudaMalloc(&pointer, size));
        *actual = size;
        return pointer;
    }
    void free(void * pointer, size_t size) override { unused.emplace(size, pointer); }
};
std::unique_ptr<ggml_cuda_pool> ggml_backend_cuda_context::new_pool_for_device(int, int) { return std::make_unique<kept_pool>(); }

// --- data -----------------------------------------------------------------------------------------------------------------

constexpr int D = 128;

__global__ void fill(float * p, int64_t n, float low, float high, uint64_t seed) {
    for (int64_t i = blockIdx.x * (int64_t) blockDim.x + threadIdx.x; i < n; i += (int64_t) gridDim.x * blockDim.x) {
        uint64_t z = seed * 0x9E3779B97F4A7C15ull + i * 0xBF58476D1CE4E5B9ull; // splitmix64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        p[i] = low + (high - low) * (((z ^ (z >> 31)) >> 40) * (1.0f / 16777216.0f));
    }
}

__global__ void normalize(float * p, int64_t rows) {
    const int64_t row = blockIdx.x * (int64_t) blockDim.x + threadIdx.x;
    if (row < rows) {
        float sum = 0.0f;
        for (int i = 0; i < D; i++) {
            sum += p[row * D + i] * p[row * D + i];
        }
        for (int i = 0; i < D; i++) {
            p[row * D + i] *= rsqrtf(sum);
        }
    }
}

struct buffer {
    float * data = nullptr;
    int64_t n;

    explicit buffer(int64_t n) : n(n) {
        CHECK(cudaMalloc(&data, n * sizeof(float)));
        CHECK(cudaMemset(data, 0xFF, n * sizeof(float))); // NaN: what is not written shows
    }
    buffer(const buffer &) = delete;
    ~buffer() { cudaFree(data); }
    void random(float low, float high, uint64_t seed) { fill<<<1024, 256>>>(data, n, low, high, seed); }
};

struct gate {
    const char * name;
    float        low, high;
};
static const gate FAST  = { "fast", -5.0f, -1e-6f };  // forgets within a few tokens
static const gate SLOW  = { "slow", -1e-3f, -1e-5f }; // keeps the state for thousands
static const gate SHARP = { "sharp", -20.0f, -1e-4f }; // beyond the model's lower bound

struct shape {
    int          tokens, seqs, heads, q_heads;
    const gate * decay;
    bool         permuted; // heads before tokens in memory, the other layout that graphs produce
    bool         fused;    // the terminal state goes to the cache, as in production, not behind the outputs
};

static ggml_backend_cuda_context & context() {
    static auto * made = new ggml_backend_cuda_context(0);
    return *made;
}

static ggml_tensor tensor(float * data, std::vector<int64_t> ne, std::vector<int64_t> strides) {
    ggml_tensor t = {};
    t.type  = GGML_TYPE_F32;
    t.data  = data;
    t.nb[0] = sizeof(float);
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        t.ne[i] = ne[i];
        if (i > 0) {
            t.nb[i] = strides[i - 1] * sizeof(float);
        }
    }
    return t;
}

struct problem {
    shape   s;
    int64_t n_q, n_v, n_state;
    buffer  q, k, v, g, beta, state, dst, cache;
    int64_t q1, q2, q3, v1, v2, v3; // strides over heads, tokens, sequences

    problem(const shape & s, uint64_t seed)
        : s(s), n_q((int64_t) D * s.q_heads * s.tokens * s.seqs), n_v((int64_t) D * s.heads * s.tokens * s.seqs),
          n_state((int64_t) D * D * s.heads * s.seqs), q(n_q), k(n_q), v(n_v), g(n_v), beta(n_v / D), state(n_state),
          dst(n_v + n_state), cache(n_state) {
        q.random(-1.0f, 1.0f, seed);
        k.random(-1.0f, 1.0f, seed + 1);
        normalize<<<(n_q / D + 255) / 256, 256>>>(q.data, n_q / D);
        normalize<<<(n_q / D + 255) / 256, 256>>>(k.data, n_q / D);
        v.random(-0.3f, 0.5f, seed + 2);
        g.random(s.decay->low, s.decay->high, seed + 3);
        beta.random(0.0f, 1.0f, seed + 4);
        state.random(-1.0f, 1.0f, seed + 5);
        CHECK(cudaDeviceSynchronize());
        q1 = s.permuted ? (int64_t) D * s.tokens : D;
        q2 = s.permuted ? D : (int64_t) D * s.q_heads;
        q3 = (int64_t) D * s.q_heads * s.tokens;
        v1 = s.permuted ? (int64_t) D * s.tokens : D;
        v2 = s.permuted ? D : (int64_t) D * s.heads;
        v3 = (int64_t) D * s.heads * s.tokens;
    }

    // tokens [first, first + n) (of one sequence, unless it is all of them) from the state `in`; the terminal state to `cached`,
    // or behind the outputs
    void run(int first, int n, float * in, float * out, float * cached) const {
        const int64_t H  = s.heads;
        ggml_tensor   tq = tensor(q.data + first * q2, { D, s.q_heads, n, s.seqs }, { q1, q2, q3 });
        ggml_tensor   tk = tensor(k.data + first * q2, { D, s.q_heads, n, s.seqs }, { q1, q2, q3 });
        ggml_tensor   tv = tensor(v.data + first * v2, { D, H, n, s.seqs }, { v1, v2, v3 });
        ggml_tensor   tg = tensor(g.data + first * H * D, { D, H, n, s.seqs }, { D, D * H, D * H * n });
        ggml_tensor   tb = tensor(beta.data + first * H, { 1, H, n, s.seqs }, { 1, H, H * n });
        ggml_tensor   ts = tensor(in, { D, D, H, s.seqs }, { D, D * D, D * D * H });
        ggml_tensor   td = tensor(out, { D * H, (int64_t) n * s.seqs + D * s.seqs, 1, 1 }, { D * H, 0, 0 });
        td.op            = GGML_OP_GATED_DELTA_NET;
        td.op_params[0]  = 1; // the terminal state alone
        ggml_tensor * src[] = { &tq, &tk, &tv, &tg, &tb, &ts };
        std::copy(std::begin(src), std::end(src), td.src);
        if (cached != nullptr) {
            ggml_cuda_op_gated_delta_net_fused_cache(context(), &td, { cached, 0 });
        } else {
            ggml_cuda_op_gated_delta_net(context(), &td);
        }
    }

    void run() const { run(0, s.tokens, state.data, dst.data, s.fused ? cache.data : nullptr); }

    // the same, a few tokens a launch: the state goes on in the cache
    void run_in_pieces(int piece, float * out) const {
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(cache.data, state.data, n_state * sizeof(float), cudaMemcpyDeviceToDevice));
        for (int t = 0; t < s.tokens; t += piece) {
            run(t, std::min(piece, s.tokens - t), cache.data, out + (int64_t) t * s.heads * D, cache.data);
        }
        CHECK(cudaDeviceSynchronize());
    }

    const float * final_state() const { return s.fused ? cache.data : dst.data + n_v; }
};

// --- parity ---------------------------------------------------------------------------------------------------------------

__global__ void reference(const float * q, const float * k, const float * v, const float * g, const float * beta, const float * state,
                          double * out, double * final_state, int H, int q_heads, int T, int64_t q1, int64_t q2, int64_t q3, int64_t v1,
                          int64_t v2, int64_t v3) {
    const int     h   = blockIdx.x;
    const int     n   = blockIdx.y;
    const int     col = threadIdx.x;
    const int64_t at  = ((int64_t) (n * H + h) * D + col) * D;
    double *      S   = final_state + at;
    for (int i = 0; i < D; i++) {
        S[i] = state[at + i];
    }
    for (int t = 0; t < T; t++) {
        const float * qt    = q + n * q3 + t * q2 + (h % q_heads) * q1;
        const float * kt    = k + n * q3 + t * q2 + (h % q_heads) * q1;
        const int64_t token = ((int64_t) n * T + t) * H + h;
        double        kv    = 0.0;
        for (int i = 0; i < D; i++) {
            S[i] *= exp((double) g[token * D + i]);
            kv += S[i] * kt[i];
        }
        const double delta = (v[n * v3 + t * v2 + h * v1 + col] - kv) * beta[token];
        double       sum   = 0.0;
        for (int i = 0; i < D; i++) {
            S[i] += kt[i] * delta;
            sum += S[i] * qt[i];
        }
        out[token * D + col] = sum / sqrt((double) D);
    }
}

__global__ void compare(const float * a, const double * b, int64_t n, double * found) {
    double error = 0.0;
    double size  = 0.0;
    for (int64_t i = blockIdx.x * (int64_t) blockDim.x + threadIdx.x; i < n; i += (int64_t) gridDim.x * blockDim.x) {
        const double e = fabs(a[i] - b[i]);
        error = fmax(error, e <= 1e300 ? e : 1e300); // NaN does not pass
        size  = fmax(size, fabs(b[i]));
    }
    // doubles that are not negative are ordered like their bits
    atomicMax((unsigned long long *) found, __double_as_longlong(error));
    atomicMax((unsigned long long *) found + 1, __double_as_longlong(size));
}

__global__ void count_different(const float * a, const float * b, int64_t n, unsigned long long * found) {
    for (int64_t i = blockIdx.x * (int64_t) blockDim.x + threadIdx.x; i < n; i += (int64_t) gridDim.x * blockDim.x) {
        if (__float_as_uint(a[i]) != __float_as_uint(b[i])) {
            atomicAdd(found, 1ull);
        }
    }
}

struct errors {
    double output, state; // the state's relative to max|S|
};

// of all tokens at once, or in pieces (one sequence, state in the cache)
static errors errors_of(const problem & p, int piece = 0) {
    double * out;
    double * state;
    double * found;
    CHECK(cudaMalloc(&out, p.n_v * sizeof(double)));
    CHECK(cudaMalloc(&state, p.n_state * sizeof(double)));
    CHECK(cudaMalloc(&found, 4 * sizeof(double)));
    CHECK(cudaMemset(found, 0, 4 * sizeof(double)));
    reference<<<dim3(p.s.heads, p.s.seqs), D>>>(p.q.data, p.k.data, p.v.data, p.g.data, p.beta.data, p.state.data, out, state, p.s.heads,
                                                p.s.q_heads, p.s.tokens, p.q1, p.q2, p.q3, p.v1, p.v2, p.v3);
    if (piece > 0) {
        p.run_in_pieces(piece, p.dst.data);
    } else {
        p.run();
    }
    CHECK(cudaDeviceSynchronize());
    compare<<<512, 256>>>(p.dst.data, out, p.n_v, found);
    compare<<<512, 256>>>(p.final_state(), state, p.n_state, found + 2);
    double host[4];
    CHECK(cudaMemcpy(host, found, sizeof(host), cudaMemcpyDeviceToHost));
    for (double * pointer : { out, state, found }) {
        CHECK(cudaFree(pointer));
    }
    return { host[0], host[2] / host[3] };
}

static unsigned long long different(const float * a, const float * b, int64_t n) {
    unsigned long long * found;
    unsigned long long   host;
    CHECK(cudaMalloc(&found, sizeof(host)));
    CHECK(cudaMemset(found, 0, sizeof(host)));
    count_different<<<512, 256>>>(a, b, n, found);
    CHECK(cudaMemcpy(&host, found, sizeof(host), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(found));
    return host;
}

static bool split_is_invisible(int tokens, int heads, int piece, const gate & decay) {
    const problem p({ tokens, 1, heads, heads, &decay, false, true }, 99);
    buffer        out(p.dst.n);
    buffer        state(p.n_state);
    p.run();
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(state.data, p.cache.data, p.n_state * sizeof(float), cudaMemcpyDeviceToDevice));
    p.run_in_pieces(piece, out.data);
    const auto outputs = different(p.dst.data, out.data, p.n_v);
    const auto states  = different(state.data, p.cache.data, p.n_state);
    printf("%d tokens at once and in %ds, %d heads, %s decay: %llu outputs and %llu state values differ\n", tokens, piece, heads,
           decay.name, outputs, states);
    return outputs == 0 && states == 0;
}

// What FP32 can hold, which catches what is wrong (the printed numbers say how good it is); of BF16 outputs the gate of the matrix.
static double output_bound() { return getenv("GGML_CUDA_K3_FLASHKDA") == nullptr ? 1e-6 : 1e-3; }

static bool split_is_harmless(int tokens, int heads, int piece, const gate & decay) {
    const problem p({ tokens, 1, heads, heads, &decay, false, true }, 99);
    const errors  e = errors_of(p, piece);
    printf("%d tokens in %ds, %d heads, %s decay: output %.2e, state / max|S| %.2e\n", tokens, piece, heads, decay.name,
           e.output, e.state);
    return e.output <= output_bound() && e.state <= 3e-6;
}

static int parity() {
    const bool splits_show    = getenv("GGML_CUDA_K3_KDA_CHUNKED") != nullptr || getenv("GGML_CUDA_K3_FLASHKDA") != nullptr;
    const auto split_is_right = splits_show ? split_is_harmless : split_is_invisible;
    bool       good           = true;
    for (const gate & decay : { FAST, SLOW, SHARP }) {
        std::vector<shape> shapes;
        for (int tokens : { 1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 33, 64, 127, 256, 512, 1000, 2048, 4096 }) {
            for (int seqs : { 1, 2 }) {
                shapes.push_back({ tokens, seqs, 4, 4, &decay, false, tokens % 2 == 1 });
            }
        }
        for (int tokens : { 1, 17, 256 }) {
            shapes.push_back({ tokens, 2, 6, 3, &decay, true, false });
            shapes.push_back({ tokens, 1, 8, 2, &decay, true, true });
            shapes.push_back({ tokens, 1, 264, 264, &decay, false, true });
        }
        errors worst = {};
        for (const shape & s : shapes) {
            const errors e = errors_of(problem(s, s.tokens * 7 + s.seqs));
            worst = { std::max(worst.output, e.output), std::max(worst.state, e.state) };
        }
        const errors k3 = errors_of(problem({ 2048, 1, 96, 96, &decay, false, true }, 14337));
        printf("%s decay: worst of %zu shapes: output %.2e, state / max|S| %.2e; 2048 tokens of 96 heads: %.2e, %.2e\n",
               decay.name, shapes.size(), worst.output, worst.state, k3.output, k3.state);
        good = good && worst.output <= output_bound() && k3.output <= output_bound() && worst.state <= 3e-6 && k3.state <= 3e-6;
        for (int heads : { 96, 264 }) {
            for (int piece : { 7, 250, 256, 512 }) {
                good = split_is_right(2048, heads, piece, decay) && good;
            }
            good = split_is_right(40, heads, 1, decay) && good;
        }
    }
    puts(good ? "OK" : "FAILED");
    return good ? 0 : 1;
}

// --- time -----------------------------------------------------------------------------------------------------------------

static void time_of(int heads, int tokens, int n_sets) {
    std::vector<std::unique_ptr<problem>> sets;
    for (int i = 0; i < n_sets; i++) {
        sets.push_back(std::make_unique<problem>(shape{ tokens, 1, heads, heads, &FAST, false, true }, 5 + i));
    }
    cudaStream_t stream = context().stream();
    const int    rounds = n_sets > 1 ? 4 : tokens >= 512 ? 5 : 50;
    sets[0]->run();
    CHECK(cudaStreamSynchronize(stream));
    cudaGraph_t     graph;
    cudaGraphExec_t runnable;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    for (int i = 0; i < rounds; i++) {
        for (const auto & one : sets) {
            one->run();
        }
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&runnable, graph, 0));
    cudaEvent_t begin;
    cudaEvent_t end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<float> us;
    for (int i = 0; i < 18; i++) {
        CHECK(cudaEventRecord(begin, stream));
        CHECK(cudaGraphLaunch(runnable, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3) {
            us.push_back(ms * 1000.0f / (rounds * n_sets));
        }
    }
    std::sort(us.begin(), us.end());
    printf("%3d heads %4d tokens%s: %8.2f us (%.2f - %.2f)\n", heads, tokens, n_sets > 1 ? ", not in the cache" : "", us[us.size() / 2],
           us.front(), us.back());
    CHECK(cudaGraphExecDestroy(runnable));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
}

static int times() {
    for (int tokens : { 1, 2, 4, 8, 16 }) {
        time_of(96, tokens, 24);
    }
    for (int tokens : { 1, 8, 64, 256, 512, 1024, 2048 }) {
        time_of(96, tokens, 1);
    }
    for (int tokens : { 1, 256, 2048 }) {
        time_of(264, tokens, 1);
    }
    return 0;
}

static int small() {
    for (int heads : { 4, 264 }) {
        for (int tokens : { 1, 5, 17, 50 }) {
            for (bool fused : { false, true }) {
                const problem p({ tokens, 2, heads, heads / 2, &FAST, false, fused }, 5);
                p.run();
                CHECK(cudaDeviceSynchronize());
            }
        }
    }
    return 0;
}

int main(int argc, char ** argv) {
    const std::string what = argc >= 2 ? argv[1] : "";
    if (what == "time" && argc == 4) {
        time_of(atoi(argv[2]), atoi(argv[3]), 1);
        return 0;
    }
    if (what == "parity") {
        return parity();
    }
    if (what == "time") {
        return times();
    }
    if (what == "small") {
        return small();
    }
    fprintf(stderr, "usage: kda_parity parity|time [HEADS TOKENS]|small\n");
    return 2;
}
