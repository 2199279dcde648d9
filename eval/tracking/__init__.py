"""What is kept in MLflow: runs, datasets, models and trials; the only room that imports MLflow."""
