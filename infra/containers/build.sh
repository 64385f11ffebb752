#!/bin/sh
# Build the images named by their container files (cpu, cuda, ascend, minio), tell each one's user and digest, and write the
# list of its files: `make images`. It takes docker, podman or buildah, in this order, or the one that BUILDER names.
#   sh infra/containers/build.sh cpu minio
# A variable of the environment (IMAGE=debian:12, DEVICE=a3) replaces a file's default.
set -eu
cd "$(dirname "$0")/../.."
lists=${LISTS:-runs/images}
builder=
for one in ${BUILDER:-docker podman buildah}; do  # docker's client may be there without its server
  [ -n "$builder" ] || ! "$one" info >/dev/null 2>&1 || builder=$one
done
[ -n "$builder" ] || { echo "error: no builder of images works here (${BUILDER:-docker, podman, buildah})" >&2; exit 1; }
mkdir -p "$lists"
[ $# -gt 0 ] || set -- cpu
for name in "$@"; do
  case $name in
    minio) file=infra/compose/minio.Containerfile context=infra/compose
      tag=$(sed -n 's/^ *image: \(metronome-minio:.*\)/\1/p' infra/compose/compose.yaml | head -n 1) ;;
    *) file=infra/containers/$name.Containerfile tag=metronome:$name context=. ;;
  esac
  [ -f "$file" ] || { echo "error: no image $name: expected cpu, cuda, ascend or minio" >&2; exit 2; }
  set --
  # shellcheck disable=SC2013  # names of variables
  for variable in $(sed -n 's/^ARG \([A-Z_]*\)=.*/\1/p' "$file"); do
    value=
    eval "value=\${$variable:-}"
    [ -z "$value" ] || set -- "$@" --build-arg "$variable=$value"
  done
  "$builder" build "$@" --file "$file" --tag "$tag" "$context"
  if [ "$builder" = buildah ]; then
    user=$(buildah inspect --format '{{.OCIv1.Config.User}}' "$tag")
    digest=$(buildah inspect --format '{{.FromImageDigest}}' "$tag")
    container=$(buildah from "$tag")
    tree=$(buildah mount "$container")
    (cd "$tree" && find . -type f -o -type l | sort) >"$lists/$name.txt"
    buildah rm "$container" >/dev/null
  else
    user=$("$builder" image inspect --format '{{.Config.User}}' "$tag")
    digest=$("$builder" image inspect --format '{{.Id}}' "$tag")
    container=$("$builder" create "$tag")
    "$builder" export "$container" | tar --list | sort >"$lists/$name.txt"
    "$builder" rm "$container" >/dev/null
  fi
  echo "$tag: user $user, $digest, $(wc -l <"$lists/$name.txt") files in $lists/$name.txt"
done
