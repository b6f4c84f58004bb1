#!/bin/sh
# One party of two, each on its own machine.
#
#   two_machines.sh provider DIR HOST      makes DIR once, then serves the model in $MODEL on port 9000
#   two_machines.sh client DIR HOST [options of spu-llm generate]
#
# DIR holds this party's key and certificate and what it trusts. The first time, DIR is made, and the
# command asks for the other party's certificate: bring DIR/cert.pem of the other machine here as
# DIR/peer.pem, by a way that nobody can change (scp, a USB stick; compare the fingerprints aloud).
# HOST: name or address of the provider's machine. PORT (default: 9000).
set -eu
[ $# -ge 3 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
role=$1 dir=$2 host=$3
shift 3
case $role in
provider | client) ;;
*)
    echo "the role is provider or client, found '$role'" >&2
    exit 2
    ;;
esac

if [ ! -e "$dir/key.pem" ]; then
    name=$host
    [ "$role" = provider ] || name=$(hostname)
    spu-llm keygen --name "$name" --out "$dir"
fi
if [ ! -e "$dir/peer.pem" ]; then
    echo "bring the other party's certificate to $dir/peer.pem, and run this again" >&2
    exit 2
fi

case $role in
provider)
    : "${MODEL:?set MODEL to the directory of the private model}"
    spu-llm doctor --identity "$dir" --trust "$dir/peer.pem" --listen "0.0.0.0:${PORT:-9000}" \
        --model "$MODEL"
    exec spu-llm serve --model "$MODEL" --listen "0.0.0.0:${PORT:-9000}" \
        --identity "$dir" --trust "$dir/peer.pem" "$@"
    ;;
client)
    exec spu-llm generate --server "$host:${PORT:-9000}" \
        --identity "$dir" --trust "$dir/peer.pem" "$@"
    ;;
esac
