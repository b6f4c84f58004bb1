#!/bin/sh
# Both parties on this machine, each in a network namespace of its own, with one cable between them:
# nothing that one of them binds to loopback can be reached from the other. Needs root.
#
#   experiments/launch/two_namespaces.sh [options of spu-llm generate]
#
# MODEL, DRAFT: model directories (default: the shipped pair).
set -eu
command -v spu-llm >/dev/null || { echo "no spu-llm: run . .venv/bin/activate first" >&2; exit 2; }
if ! unshare --net true 2>/dev/null || ! command -v ip >/dev/null; then
    echo "skipped: this needs root, and the command ip" >&2
    exit 77
fi

models=$(python3 -c 'import models, os; print(os.path.dirname(models.__file__))')/shipped
work=$(mktemp -d)
tag=spu$$
finish() {
    kill "${provider:-}" 2>/dev/null || true
    wait 2>/dev/null || true
    ip netns del "$tag-p" 2>/dev/null || true
    ip netns del "$tag-c" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

ip netns add "$tag-p"
ip netns add "$tag-c"
ip link add "$tag-p" netns "$tag-p" type veth peer name "$tag-c" netns "$tag-c"
for end in p c; do
    number=1
    [ "$end" = p ] || number=2
    ip -n "$tag-$end" address add "10.213.0.$number/30" dev "$tag-$end"
    ip -n "$tag-$end" link set "$tag-$end" up
    ip -n "$tag-$end" link set lo up
done

spu-llm keygen --name 10.213.0.1 --out "$work/provider" >/dev/null
spu-llm keygen --name 10.213.0.2 --out "$work/client" >/dev/null

ip netns exec "$tag-p" spu-llm serve --model "${MODEL:-$models/private}" --listen 10.213.0.1:9000 \
    --identity "$work/provider" --trust "$work/client/cert.pem" >"$work/said" &
provider=$!
until grep -q '^serving ' "$work/said"; do
    kill -0 "$provider" 2>/dev/null || { wait "$provider"; exit 1; }
    sleep 0.2
done

ip netns exec "$tag-c" spu-llm generate --server 10.213.0.1:9000 \
    --identity "$work/client" --trust "$work/provider/cert.pem" \
    --draft-model "${DRAFT:-$models/public}" "$@"
