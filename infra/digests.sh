#!/bin/sh
# Print each image of a container file or of the compose file by digest, as NAME=IMAGE:TAG@sha256:..., for a build or for .env:
#   docker build --build-arg "$(sh infra/digests.sh infra/containers/cpu.Containerfile)" ...
#   sh infra/digests.sh infra/compose/compose.yaml >> infra/compose/.env
# It asks the images' registries, by docker buildx. A variable of the environment (DEVICE=a3) replaces a file's default.
set -eu
if [ $# -ne 1 ] || [ ! -f "$1" ]; then
  echo "usage: $0 FILE, a container file or a compose file" >&2
  exit 2
fi
sed -nE 's/^ARG ([A-Z_]+)=(.+)$/\1 \2/p; s/^ *image: \$\{([A-Z_]+):-(.+)\}$/\1 \2/p' "$1" | awk '!seen[$0]++' | {
  found=0
  while read -r name default; do
    eval ": \"\${$name:=$default}\""
    image=
    eval "image=\$$name"
    case $name in *IMAGE) ;; *) continue ;; esac
    digest=$(docker buildx imagetools inspect "$image" --format '{{.Manifest.Digest}}')
    case $digest in sha256:*) ;; *) echo "error: $image: docker gave no digest" >&2; exit 1 ;; esac
    echo "$name=$image@$digest"
    found=1
  done
  [ $found = 1 ] || { echo "error: $1 names no image" >&2; exit 1; }
}
