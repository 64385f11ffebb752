#!/bin/sh
# Makes base/.env, what the secret `metronome` gives to pods of runs, from the passwords of infra/compose/.env, which it makes if
# there are none. It is readable by its owner only; an existing one is kept.
set -eu
cd "$(dirname "$0")"
sh ../compose/passwords.sh
if [ -e base/.env ]; then
  echo "infra/kubernetes/base/.env already exists"
  exit 0
fi
password() {  # NAME
  value=$(sed -n "s/^$1=//p" ../compose/.env)
  [ -n "$value" ] || { echo "infra/compose/.env: $1 has no value" >&2; exit 1; }
}
umask 077
password PREFECT_API_PASSWORD
prefect=$value
password MLFLOW_ADMIN_PASSWORD
mlflow=$value
password MINIO_CLIENT_PASSWORD
client=$value
token=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
[ ${#token} = 48 ] || { echo "infra/kubernetes/secrets.sh: od and tr made no token from /dev/urandom" >&2; exit 1; }
cat >base/.env.partial <<ENV
PREFECT_API_AUTH_STRING=metronome:$prefect
MLFLOW_TRACKING_USERNAME=metronome
MLFLOW_TRACKING_PASSWORD=$mlflow
AWS_ACCESS_KEY_ID=client
AWS_SECRET_ACCESS_KEY=$client
AWS_DEFAULT_REGION=us-east-1
METRONOME_TOKEN=$token
ENV
mv base/.env.partial base/.env
echo "infra/kubernetes/base/.env now has keys and a new token"
