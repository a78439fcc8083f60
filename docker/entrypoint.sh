#!/bin/sh
# Entrypoint of the image. Without a command of ours it behaves as TGI's: all arguments go to
# text-generation-launcher, which reads MODEL_ID, PORT and the rest from the environment.
#   moe-opt-entrypoint --model-id M              serve one model
#   moe-opt-entrypoint router --decode URL ...   any command of moe-opt
#   moe-opt-entrypoint healthcheck               whether the server answers, for HEALTHCHECK
set -eu

# Docker sets HOSTNAME to the container's id, which TGI's launcher, and ours, would take for the address to listen on.
case "${HOSTNAME:-}" in
    "" | 0.0.0.0 | 127.* | *:*) ;;
    *) if [ -f /.dockerenv ] || [ -n "${KUBERNETES_SERVICE_HOST:-}" ]; then HOSTNAME=0.0.0.0; fi ;;
esac
export HOSTNAME="${HOSTNAME:-0.0.0.0}"

# Spelt as older images and other tools have it.
if [ -n "${HUGGING_FACE_HUB_TOKEN:-}" ] && [ -z "${HF_TOKEN:-}" ]; then
    export HF_TOKEN="$HUGGING_FACE_HUB_TOKEN"
fi
# SageMaker and Vertex AI say the port and the model in variables of their own.
if [ -n "${AIP_HTTP_PORT:-}" ]; then export PORT="$AIP_HTTP_PORT"; fi
if [ -n "${HF_MODEL_ID:-}" ] && [ -z "${MODEL_ID:-}" ]; then export MODEL_ID="$HF_MODEL_ID"; fi

cache=${HF_HOME:-/data}
if [ ! -w "$cache" ]; then
    echo "moe-opt: $cache is not writable for user $(id -u): mount a volume that is, or run with --user" >&2
    exit 2
fi
# Workers on one host hand KV over through shared memory; Docker gives 64 MB unless told otherwise.
size=$(df -k /dev/shm 2>/dev/null | awk 'NR == 2 {print $2}')
if [ -n "$size" ] && [ "$size" -lt 262144 ]; then
    echo "moe-opt: /dev/shm has only $((size / 1024)) MB: add --shm-size 1g if this container is part of a fleet" >&2
fi

case "${1:-}" in
    healthcheck)
        exec python3 -c '
import os, sys, urllib.request
port = os.environ.get("PORT", "80")
try:
    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=4)
except OSError as error:
    sys.exit(f"not healthy: {error}")
'
        ;;
    serve | router | launch | fit-signatures | bench | eval | distill | inspect | score | simulate | plot | demo)
        exec moe-opt "$@"
        ;;
    moe-opt | text-generation-launcher | sh | bash | python | python3)
        exec "$@"
        ;;
    *)
        exec text-generation-launcher "$@"
        ;;
esac
