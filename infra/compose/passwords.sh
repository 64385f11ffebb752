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
    [A-Z]*=)
      password=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
      if [ ${#password} != 48 ]; then
        echo "infra/compose/passwords.sh: od and tr made no password from /dev/urandom" >&2
        exit 1
      fi
      printf '%s%s\n' "$line" "$password"
      ;;
    *) printf '%s\n' "$line" ;;
  esac
done <example.env >.env.partial
mv .env.partial .env
echo "infra/compose/.env now has new passwords"
