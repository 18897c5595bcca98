#!/usr/bin/env bash
# nvcc -ptx makes different PTX in two runs over one file, in one folder: the names of internal
# symbols hold a process number where the source has no external function of its own.
# Exits non-zero where that changed. Needs g++ and a network.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check \
  nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
nvcc=$(echo venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
"$nvcc" --version | tail -2 | head -1
cat >unit.cu <<'END'
namespace { __device__ int calls = 0; }
template <int N> __global__ void count(int* out) { *out = atomicAdd(&calls, N); }
template __global__ void count<1>(int*);
END
compile() { "$nvcc" -gencode=arch=compute_90a,code=sm_90a -ptx "$@"; }
compile unit.cu -o first.ptx
compile unit.cu -o second.ptx
grep -ho '_[0-9a-f]*_7_unit_cu_[0-9a-f_]*' first.ptx second.ptx | sort -u
status=0
if cmp --silent first.ptx second.ptx; then
  echo "two runs are equal now"
  status=1
else
  echo "two runs over one file differ"
fi
# With an external function that makes no code, and a name in place of the path, they are equal.
echo 'extern "C" void external() {}' >>unit.cu
mkdir elsewhere
cp unit.cu elsewhere/
named=-Xcudafe=--orig_src_path_name,unit.cu
compile "$named" unit.cu -o first.ptx
compile "$named" elsewhere/unit.cu -o second.ptx
if cmp --silent first.ptx second.ptx; then
  echo "with an external function and $named they are equal, in another folder also"
else
  echo "with an external function and $named they differ"
  status=1
fi
exit "$status"
