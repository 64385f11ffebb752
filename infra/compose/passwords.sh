#!/bin/sh
# Makes .env from example.env, with a password of its own in each place, for its owner only. An .env that is there stays.
set -eu
cd "$(dirname "$0")"
if [ -e .env ]; then
  echo "infra/compose/.env is there already"
  exit 0
fi
umask 077
while IFS= read -r line; do
  case $line in
    [A-Z]*=) printf '%s%s\n' "$line" "$(openssl rand -hex 24)" ;;
    *) printf '%s\n' "$line" ;;
  esac
done <example.env >.env.partial
mv .env.partial .env
echo "infra/compose/.env has new passwords"
