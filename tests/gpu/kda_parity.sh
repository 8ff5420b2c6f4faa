#!/usr/bin/env bash
# Build kda_parity against a source tree to which one of the patch sets with a KDA kernel is applied:
#   k3deploy patch apply TREE u11-kda-blocked        (or u1-chunked-kda, or flashkda-bridge)
#   tests/gpu/kda_parity.sh TREE ARCH OUTPUT         (ARCH as nvcc names it: sm_90, sm_121a; for the bridge sm_90a, with K3_FLASHKDA_DIR
#                                                     and, where it is not inside, K3_CUTLASS_DIR in the environment)
# Then, on a machine with a GPU, without and with the set's switches (kda_parity.cu names them):
#   OUTPUT parity; OUTPUT time; compute-sanitizer OUTPUT small
set -euo pipefail
tree=${1:?source tree} arch=${2:?architecture} output=${3:?output}
here=$(cd "$(dirname "$0")" && pwd)
cuda=$tree/ggml/src/ggml-cuda
if [ -d "$cuda/flashkda-k3" ]; then
    flashkda=${K3_FLASHKDA_DIR:?the source tree of FlashKDA}
    kernels=("$cuda"/flashkda-k3/*.cu "$flashkda/csrc/smxx/fwd_launch.cu" -DGGML_CUDA_K3_FLASHKDA --expt-relaxed-constexpr
        -I"$flashkda/csrc" -I"${K3_CUTLASS_DIR:-$flashkda/cutlass}/include")
else
    kernels=("$cuda"/k3-kda-*.cu)
fi
nvcc -std=c++17 -O3 -use_fast_math -extended-lambda -arch="$arch" -cudart static \
    -I"$cuda" -I"$tree/ggml/src" -I"$tree/ggml/include" ${CUBLAS_INCLUDE:+-I"$CUBLAS_INCLUDE"} \
    -o "$output" "$here/kda_parity.cu" "$cuda/gated_delta_net.cu" "${kernels[@]}"
