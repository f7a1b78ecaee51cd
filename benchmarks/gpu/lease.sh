#!/usr/bin/env bash
# The first minutes on a GPU, in the root of the repository: bash benchmarks/gpu/lease.sh first | second | tests
#
#   first   in 300 s: tests of stream order and of shared GPUs, copies, steps
#   second  in 410 s: memory, predictions, and what else there are tests of
#   tests   every test that needs a GPU
#
# Nothing is installed: PY (python3 by default) has torch, the repository is imported where it is, and packages that PY
# lacks come from wheels/ (make wheels). Each part has a process and a limit in seconds of its own. What it printed and
# found is packed into $OUT (out/gpu by default) after every part, so that a machine that ends early loses nothing.
# TOY=--toy runs the parts at toy size, also without a GPU; LIMIT=600 is another limit for every part.
set -u
cd "$(dirname "$0")/../.."
export PYTHONUNBUFFERED=1 PYTHONUTF8=1 OMP_NUM_THREADS=4 PANPIPE_CACHE= PY=${PY:-python3} OUT=${OUT:-out/gpu}
work=$(mktemp -d) found="" failed=0
mkdir -p "$OUT" "$work/import" "$work/$1"
ln -s "$PWD" "$work/import/panpipe"
export PYTHONPATH=$work/import:$(printf '%s:' wheels/*.whl)${PYTHONPATH:-}
"$PY" -m panpipe.core.search.compiling > "$work/compiling.log" 2>&1 & # half a minute of one core, before the first plan
trap 'kill $! 2> "$work/kill.log"; rm -rf "$work"' EXIT

run() { # name, limit, command
    local name=$1 limit=${LIMIT:-$2} start=$SECONDS code
    shift 2
    timeout -k 5 "$limit" "$@" > "$work/$found/$name.log" 2>&1
    code=$?
    [ $code = 0 ] || failed=1
    echo "## $name: status $code after $((SECONDS - start)) of $limit s"
    tail -n 3 "$work/$found/$name.log" | cut -c1-900
    tar czf "$OUT/$found.tgz" -C "$work" "$found"
}
part() { run "$1" "$2" "$PY" benchmarks/gpu/run_part.py "$1" --out "$work/$found" ${TOY:-}; }
tests() { run "$1" "$2" "$PY" -m pytest -v -p no:cacheprovider -m cuda --tb=short "${@:3}"; }

order="share_a_gpu or waits_for_nothing or step_returns or pool_captures or copies_overlap or pinned"
found=$1
case $1 in
first)
    run device 10 nvidia-smi
    tests order 75 tests/runtimes/test_cuda.py -k "$order"
    part offload 25
    part steps 60
    ;;
second)
    part memory 90
    part predictions 90
    tests rest 90 tests/runtimes/test_cuda.py -k "not ($order) and not inductor and not compiled"
    ;;
tests) tests all 580 $(grep -rl "mark\.cuda" tests) ;;
*) echo "there is no call '$1': give first, second or tests" >&2 && exit 2 ;;
esac
exit $failed
