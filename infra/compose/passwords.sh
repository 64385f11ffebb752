#!/bin/sh
# Makes .env from example.env, with a different password in each place, readable by its owner only. An existing .env is kept.
set -eu
cd "$(dirname "$0")"
if [ -e .env ]; then
  echo "infra/compose/.env already exists"
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
echo "infra/compose/.env now has new passwords"
