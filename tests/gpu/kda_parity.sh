#!/usr/bin/env bash
# Build kda_parity against a source tree to which one of the patch sets with a KDA kernel is applied:
#   k3deploy patch apply TREE u11-kda-blocked        (or u1-chunked-kda)
#   tests/gpu/kda_parity.sh TREE ARCH OUTPUT     (ARCH as nvcc names it: sm_90, sm_121a)
# Then, on a machine with a GPU, without and with GGML_CUDA_K3_KDA_BLOCKED=1 (GGML_CUDA_K3_KDA_CHUNKED=1):
#   OUTPUT parity; OUTPUT time; compute-sanitizer OUTPUT small
set -euo pipefail
tree=${1:?source tree} arch=${2:?architecture} output=${3:?output}
here=$(cd "$(dirname "$0")" && pwd)
cuda=$tree/ggml/src/ggml-cuda
nvcc -std=c++17 -O3 -use_fast_math -extended-lambda -arch="$arch" -cudart static \
    -I"$cuda" -I"$tree/ggml/src" -I"$tree/ggml/include" ${CUBLAS_INCLUDE:+-I"$CUBLAS_INCLUDE"} \
    -o "$output" "$here/kda_parity.cu" "$cuda/gated_delta_net.cu" "$cuda"/k3-kda-*.cu
