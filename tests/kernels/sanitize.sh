#!/usr/bin/env bash
# Runs the tests of the C++ code under the address and undefined-behaviour sanitizers. It builds the
# extension with the sanitizers in a directory of its own and loads it instead of the installed one.
# The programs that mutate messages and deltas can be run again, with more of them:
# build/sanitize/fuzz_messages 20000000; build/sanitize/fuzz_deltas 20000000
# Needs the development environment's `python` first on PATH.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
build=$root/build/sanitize
mkdir -p "$build"

# -O1 compiles in two thirds of the time that -O2 takes.
cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g -DNDEBUG" \
    -DPython_EXECUTABLE="$(command -v python)" \
    -Dnanobind_DIR="$(python -m nanobind --cmake_dir)" \
    -DSPARCEL_SANITIZE=address,undefined >"$build/configure.log" ||
    { cat "$build/configure.log"; exit 1; }
cmake --build "$build" --parallel "$(nproc)"
cmake --build "$build" --target headers --parallel "$(nproc)" # each header alone includes what it uses

export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
"$build/fuzz_messages" 200000
"$build/fuzz_deltas" 200000

compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")
# Python is built without the sanitizer, so the sanitizer's runtime must be loaded before Python. So
# must libstdc++, or the runtime does not see exceptions. Leaks in Python itself are ignored.
runtime="$("$compiler" -print-file-name=libasan.so):$("$compiler" -print-file-name=libstdc++.so.6)"
cd "$root"
# Not the tests of Triton's kernels, nor those that compare a decoder in Python: they call no C++ code
# that the others do not.
LD_PRELOAD=$runtime \
    ASAN_OPTIONS=detect_leaks=0 \
    SPARCEL_CPU_DIRECTORY=$build \
    python -m pytest tests/kernels tests/comm/torch/test_mesh.py tests/delta/test_codec.py \
    tests/formats tests/rows -q -n 2 --dist worksteal --ignore tests/kernels/gpu \
    --ignore tests/formats/test_layout.py -p tests.kernels.sanitized "$@"
