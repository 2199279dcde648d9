"""The MLflow UI with a first page of ours."""
