//! Files in object storage: what lies behind `s3://`, `gs://`, `az://` and `https://`.
