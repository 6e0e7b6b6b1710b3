#!/bin/sh
# Run a command where there is no network but loopback, as everything that starts Ray is tested:
#     tests/loopback.sh pytest -m ray
# Root makes the network namespace as it is, anybody else (or root in a container) as root of a
# user namespace. Needs util-linux and iproute2.
set -eu

if unshare --net true 2> /dev/null; then map=; else map=--map-root-user; fi
exec unshare --net $map sh -c 'ip link set lo up && exec "$@"' loopback "$@"
