#!/usr/bin/env bash
# Build iq1s_grouped against a source tree to which one of the patch sets of IQ1_S is applied, or none:
#   k3deploy patch apply TREE u12-iq1s-grouped     (or u10-iq1s-rows256, or u10b-iq1s-ncols)
#   tests/gpu/iq1s_grouped.sh TREE ARCH OUTPUT     (ARCH as nvcc names it: sm_90, sm_121a)
# The kernels of u10-iq1s-rows256 are for GB10 alone; DEFINES=-DK3_IQ1S_ROWS256_ARCH=900 is for an sm_90 device instead.
# Then, on a machine with a GPU and 6 GB of its memory, without and with the set's switch (GGML_CUDA_K3_IQ1S_GROUPED=exact or fine,
# GGML_CUDA_K3_IQ1S_ROWS256=1, GGML_CUDA_K3_IQ1S_NCOLS=1):
#   OUTPUT parity; OUTPUT time; OUTPUT sweep; compute-sanitizer OUTPUT small
set -euo pipefail
tree=${1:?source tree} arch=${2:?architecture} output=${3:?output}
here=$(cd "$(dirname "$0")" && pwd)
cuda=$tree/ggml/src/ggml-cuda
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sources=("$here/iq1s_grouped.cu" "$cuda/mmq.cu" "$cuda/mmid.cu" "$cuda/quantize.cu" "$cuda/template-instances/mmq-instance-iq1_s.cu")
for file in "$cuda"/k3-iq1s-*.cu; do
    if [ -e "$file" ]; then sources+=("$file"); fi
done
printf '%s\0' "${sources[@]}" | xargs -0 -P "${JOBS:-$(nproc)}" -I{} sh -c '
    nvcc -std=c++17 -O3 -use_fast_math -extended-lambda -lineinfo -arch="$1" -I"$2" -I"$3/ggml/src" -I"$3/ggml/include" \
        ${CUBLAS_INCLUDE:+-I"$CUBLAS_INCLUDE"} ${DEFINES:-} -c -o "$4/$(basename "$5").o" "$5"' sh "$arch" "$cuda" "$tree" "$work" {}
nvcc -arch="$arch" -cudart static -o "$output" "$work"/*.o
