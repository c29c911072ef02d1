#!/usr/bin/env bash
# Checks Ortolan on NVIDIA's graphics processors: parity with the CPU, recorded decode calls, speed.
#
#   bash cuda_check.sh [KIT]
#
# KIT is a folder that benchmarks/make_check_kit.py made, by default the one that this file lies in.
# Nothing has to be prepared but NVIDIA's driver and the onnxruntime-gpu wheel: installed in $PYTHON,
# or lying in KIT/wheels or $WHEELS, or to be had from the network. Ends inside 8 minutes, the
# installation not counted. The report is printed, and kept as KIT/report.json or $REPORT.
#
# PROVIDER=cpu bash cuda_check.sh KIT runs the same on the CPU, to see that the kit is whole.
# What check_provider.py takes may follow KIT, such as --batch 1,16 --repeat 3.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
kit=${1:-$here}
shift || true
provider=${PROVIDER:-cuda}
python=${PYTHON:-python3}
limit_s=${LIMIT_S:-450}

fail() {
    echo "cuda_check: $1" >&2
    exit 2
}

[ -d "$kit/bundles" ] && [ -d "$kit/references" ] ||
    fail "$kit is no kit; make one: python benchmarks/make_check_kit.py KIT BUNDLE"
kit=$(cd "$kit" && pwd)
report=${REPORT:-$kit/report.json}
case $provider in
    cuda) distribution="onnxruntime-gpu[cuda,cudnn]" entry=CUDAExecutionProvider ;;
    cpu) distribution="onnxruntime" entry=CPUExecutionProvider ;;
    *) fail "PROVIDER is cuda or cpu, not $provider" ;;
esac

# The packages that this Python lacks, by the names that pip knows.
missing() {
    "$python" - "$entry" "$distribution" << 'EOF'
import importlib.util, sys
found = lambda name: importlib.util.find_spec(name) is not None
names = [name for name in ("numpy", "tokenizers", "jinja2", "click", "rich") if not found(name)]
if not found("ortolan"):
    names.append("ortolan")
try:
    import onnxruntime
    has = sys.argv[1] in onnxruntime.get_available_providers()
except ImportError:
    has = False
print(*names, *[] if has else [sys.argv[2]])
EOF
}

lacks=$(missing) || fail "$python does not run"
if [ -n "$lacks" ]; then
    # Into a folder of their own, beside what $python has already: its ONNX Runtime above all.
    target=${TARGET:-$kit/packages}
    export PYTHONPATH=$target${PYTHONPATH:+:$PYTHONPATH}
    pip=("$python" -m pip --disable-pip-version-check --quiet install --upgrade --target "$target")
    echo "$python lacks $lacks; installing into $target" >&2
    shopt -s nullglob
    wheels=("${WHEELS:-$kit/wheels}"/*.whl)
    if ((${#wheels[@]})); then
        "${pip[@]}" --no-index --no-deps "${wheels[@]}" || fail "a wheel does not fit this Python"
    fi
    read -ra absent <<< "$(missing)"
    if ((${#absent[@]})); then # then from the network
        "${pip[@]}" "${absent[@]}" ||
            fail "${absent[*]} cannot be installed; carry their wheels in $kit/wheels"
    fi
    lacks=$(missing)
    [ -z "$lacks" ] || fail "$python still lacks $lacks: it shows no $entry"
fi

# The driver stops its steps by itself; this is for what does not let itself be stopped.
guard=()
if command -v timeout > /dev/null; then
    guard=(timeout --kill-after=5 "$((${limit_s%.*} + 20))")
fi
status=0
"${guard[@]}" "$python" "$here/check_provider.py" "$kit" --provider "$provider" \
    --seconds "$limit_s" --report "$report" "$@" || status=$?
echo "report: $report"
exit "$status"
