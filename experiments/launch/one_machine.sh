#!/bin/sh
# Both parties on this machine, with certificates: a provider, and one completion of a client.
#
#   experiments/launch/one_machine.sh [options of spu-llm generate]
#
# MODEL, DRAFT: model directories (default: the shipped pair). PORT (default: any free one).
set -eu
command -v spu-llm >/dev/null || { echo "no spu-llm: run . .venv/bin/activate first" >&2; exit 2; }

models=$(python3 -c 'import models, os; print(os.path.dirname(models.__file__))')/shipped
work=$(mktemp -d)
trap 'kill "${provider:-}" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for party in provider client; do
    spu-llm keygen --name localhost --out "$work/$party" >/dev/null
done

spu-llm serve --model "${MODEL:-$models/private}" --listen "127.0.0.1:${PORT:-0}" \
    --identity "$work/provider" --trust "$work/client/cert.pem" >"$work/said" &
provider=$!

# It says where it listens as soon as it does: "serving DIR on 127.0.0.1:PORT".
until at=$(sed -n 's/^serving .* on //p' "$work/said") && [ -n "$at" ]; do
    kill -0 "$provider" 2>/dev/null || { wait "$provider"; exit 1; }
    sleep 0.2
done

spu-llm generate --server "$at" --identity "$work/client" --trust "$work/provider/cert.pem" \
    --draft-model "${DRAFT:-$models/public}" "$@"
