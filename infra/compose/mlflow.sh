#!/bin/sh
# MLflow with its own log-in. Its configuration has the administrator's password, so it is made in the container.
set -eu
umask 077
cat >/tmp/mlflow-auth.ini <<INI
[mlflow]
default_permission = READ
database_uri = $DATABASE
admin_username = metronome
admin_password = $ADMIN_PASSWORD
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
INI
export MLFLOW_AUTH_CONFIG_PATH=/tmp/mlflow-auth.ini
exec mlflow server --host 0.0.0.0 --port 5000 --workers 2 --app-name basic-auth \
  --backend-store-uri "$DATABASE" --artifacts-destination s3://metronome/mlflow \
  --allowed-hosts 'mlflow:5000,localhost:*,127.0.0.1:*'
