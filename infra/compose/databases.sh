#!/bin/sh
# Run once by the PostgreSQL image, when its volume is new: a database and a user for each server.
set -eu
for name in prefect mlflow; do
  case $name in prefect) password=$PREFECT_PASSWORD ;; *) password=$MLFLOW_PASSWORD ;; esac
  psql --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --set name="$name" --set password="$password" <<'SQL'
CREATE USER :"name" PASSWORD :'password';
CREATE DATABASE :"name" OWNER :"name";
SQL
done
