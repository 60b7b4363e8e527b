#!/usr/bin/env bash
# Makes .venv in the current folder and installs the project and its tests into it, at the versions of constraints.txt.
# Called by the Makefile, which sets PYTHON, WANTED (what .venv/.installed shall say) and PIP_CONSTRAINT.
# Usage: deploy/install.sh [SECONDS]    between two lines of progress where there is no terminal; default: 10
set -euo pipefail

python="${PYTHON:-python3}"
every="${1:-10}"
say() { printf 'install   %s\n' "$*"; }
fail() { printf 'error: %s\n  why: %s\n  fix: %s\n' "$1" "$2" "$3" >&2; exit 1; }

# Waits for process $1, and shows what it does: a line that changes on a terminal, else a line now and then. What
# follows is a command that prints it.
watch_process() {
  local pid=$1 shown=$SECONDS
  shift
  while kill -0 "$pid" 2> /dev/null; do
    if [ -t 1 ]; then
      printf '\r\033[Kinstall   %3d s  %.60s' "$((SECONDS - began))" "$("$@")"
    elif [ "$((SECONDS - shown))" -ge "$every" ]; then
      shown=$SECONDS
      printf 'install   %3d s  %.60s\n' "$((SECONDS - began))" "$("$@")"
    fi
    sleep 0.5
  done
  if [ -t 1 ]; then printf '\r\033[K'; fi
  wait "$pid"
}
last_of_pip() {
  grep -oE '^ *(Collecting|Downloading|Using cached|Installing collected packages|Building|Successfully (built|installed)) ?[^ ]*( \([0-9.]+ [kMG]B\))?' "$log" |
    tail -n 1 | sed -E 's/^ *//; s/-(cp|py)[0-9][^ ]*\.whl//' || true
}

command -v "$python" > /dev/null || fail "there is no $python" "Diptych needs Python 3.11 or newer" "sudo apt install python3 python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) is too old" "Diptych needs Python 3.11 or newer" "make serve PYTHON=python3.11"
# Debian splits venv from Python: the module is there, and fails only when it wants pip.
"$python" -c 'import ensurepip, venv' 2> /dev/null ||
  fail "$python cannot make virtual environments" "Debian and Ubuntu package venv apart" "sudo apt install python3-venv"

mkdir -p .run
log=.run/install.log
began=$SECONDS
if [ ! -x .venv/bin/python ]; then
  say "the first time takes about 3 minutes: pip downloads 0.9 GB (more where torch comes with CUDA), .venv takes 3 GB"
  say "making .venv"
  "$python" -m venv .venv
fi
say "installing the versions of constraints.txt (details in $log)"
.venv/bin/python -m pip install --progress-bar off -e '.[test]' > "$log" 2>&1 &
watch_process $! last_of_pip || { tail -n 5 "$log" >&2; fail "pip could not install" "the last lines are above, all of them in $log" "make install"; }
installed=$SECONDS
say "installed in $((installed - began)) s; compiling the kernels that a start loads (about 15 s)"
# Every process loads these. What fails here is done again, and reported, at the first start.
.venv/bin/python -m compileall -q diptych kvcache kvtransfer engine router worker prefill_worker decode_worker vllm_worker planner services models >> "$log" 2>&1 || true
.venv/bin/python -m worker.precompile >> "$log" 2>&1 &
watch_process $! echo "compiling kernels" || say "not all kernels could be compiled (details in $log)"
printf '%s\n' "$WANTED" > .venv/.installed
say "done in $((SECONDS - began)) s, of which kernels took $((SECONDS - installed)) s; a start takes about 10 s"
