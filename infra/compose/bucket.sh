#!/bin/sh
# Run at each start: the bucket, and a user for each service that may reach its own objects only.
set -eu
mc mb --ignore-existing store/metronome

allow() {  # USER KEY RESOURCE DENIED
  cat >/tmp/"$1".json <<JSON
{"Version": "2012-10-17", "Statement": [
  {"Effect": "Allow", "Action": ["s3:ListBucket", "s3:GetBucketLocation"], "Resource": ["arn:aws:s3:::metronome"]},
  {"Effect": "Allow", "Action": ["s3:*Object", "s3:*MultipartUpload*"], "Resource": ["arn:aws:s3:::metronome/$3"]},
  {"Effect": "Deny", "Action": ["s3:*Object", "s3:*MultipartUpload*"], "Resource": ["arn:aws:s3:::metronome/$4"]}]}
JSON
  mc admin user add store "$1" "$2"
  mc admin policy create store "$1" /tmp/"$1".json
  mc admin policy attach store "$1" --user "$1" || true  # it has it since the first start
}

allow mlflow "$MLFLOW_KEY" "mlflow/*" "checkpoints/*"
allow client "$CLIENT_KEY" "*" "mlflow/*"
